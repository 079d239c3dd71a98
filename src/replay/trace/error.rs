//! What can be wrong with a trace.

/// Why a trace, or one line of it, could not be read.
///
/// After [`TraceError::Line`] and [`TraceError::Field`] the reader goes on with the next line; after every
/// other error it has ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file's extension does not say which format it has. Name the format.
    #[error(
        "{file}: the extension names no trace format: use .jsonl (Mooncake) or .csv (Azure 2023), or name the format"
    )]
    UnknownFormat {
        /// The file.
        file: String,
    },
    /// The file could not be opened.
    #[error("{file}: {message}")]
    Open {
        /// The file.
        file: String,
        /// What the operating system said.
        message: String,
    },
    /// The file could not be read on.
    #[error("{file}:{line}: {message}")]
    Read {
        /// The file.
        file: String,
        /// The line that was to be read, from 1.
        line: u64,
        /// What the operating system said.
        message: String,
    },
    /// The first line is not the header that the format requires.
    #[error("{file}:1: header = {found:?}: must be {required:?}")]
    Header {
        /// The file.
        file: String,
        /// The line found.
        found: String,
        /// The header of the format.
        required: &'static str,
    },
    /// A line is longer than any line of a trace.
    #[error("{file}:{line}: the line is longer than {limit} bytes")]
    LineTooLong {
        /// The file.
        file: String,
        /// Its number, from 1.
        line: u64,
        /// Most bytes of a line.
        limit: usize,
    },
    /// A line does not have the shape of a row.
    #[error("{file}:{line}: {problem}")]
    Line {
        /// The file.
        file: String,
        /// Its number, from 1.
        line: u64,
        /// What is wrong.
        problem: String,
    },
    /// A field is missing or its value is not allowed.
    #[error("{file}:{line}: {field} = {value}: {allowed}")]
    Field {
        /// The file.
        file: String,
        /// The number of the line, from 1.
        line: u64,
        /// The field's name.
        field: &'static str,
        /// Its value as it stands in the file.
        value: String,
        /// What is allowed.
        allowed: String,
    },
}
