//! The iterator over a trace: lines, numbering, order of arrivals.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::prompt::TracePrompt;
use super::{Problem, Row, TraceError, TraceRequest, azure, mooncake};
use crate::config::Speedup;
use crate::error::ConfigError;
use crate::request::Prompt;
use crate::time::EngineTime;

/// The longest line that is read. The longest one of the public traces has 4 kB; this is room for a
/// prompt of 50 million tokens, and keeps a file without line ends from filling the memory.
const MAX_LINE_BYTES: usize = 1 << 20;

/// The vocabulary of Llama 3, whose tables are the crate's default.
const DEFAULT_VOCAB_SIZE: u32 = 128_256;

/// The formats that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TraceFormat {
    /// Mooncake JSON lines.
    Mooncake,
    /// Azure LLM inference 2023 CSV.
    Azure2023,
}

impl TraceFormat {
    /// The format that the extension of a file names: `.jsonl` or `.csv`.
    #[must_use]
    pub fn of_path(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "jsonl" => Some(Self::Mooncake),
            "csv" => Some(Self::Azure2023),
            _ => None,
        }
    }
}

impl fmt::Display for TraceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mooncake => "mooncake",
            Self::Azure2023 => "azure2023",
        })
    }
}

impl FromStr for TraceFormat {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        match name {
            "mooncake" => Ok(Self::Mooncake),
            "azure2023" => Ok(Self::Azure2023),
            _ => Err(ConfigError::new("format", name, "mooncake or azure2023")),
        }
    }
}

/// Reads a trace request by request. Blank lines are skipped.
///
/// See [`TraceError`] for what it does after an error.
#[derive(Debug)]
pub struct TraceReader<R> {
    input: R,
    format: TraceFormat,
    file: String,
    speed: f64,
    vocab_size: u32,
    /// Number of the line in `buffer`, from 1.
    line: u64,
    buffer: Vec<u8>,
    /// Rows given out; the number of a row makes its own tokens unique.
    rows: u64,
    /// When the trace starts; Azure's clock starts with its first row.
    origin: Option<u128>,
    /// Time of the last good row, for the order of arrivals.
    last_nanos: u128,
    ended: bool,
}

impl TraceReader<BufReader<File>> {
    /// Opens a file; without a `format` its extension decides.
    ///
    /// # Errors
    /// The extension says nothing, or the file cannot be opened.
    pub fn open(path: impl AsRef<Path>, format: Option<TraceFormat>) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let file = path.display().to_string();
        let Some(format) = format.or_else(|| TraceFormat::of_path(path)) else {
            return Err(TraceError::UnknownFormat { file });
        };
        match File::open(path) {
            Ok(opened) => Ok(Self::new(BufReader::new(opened), format, file)),
            Err(error) => Err(TraceError::Open { file, message: error.to_string() }),
        }
    }
}

impl<R: BufRead> TraceReader<R> {
    /// Reads from `input`; errors call it `file`.
    #[must_use]
    pub fn new(input: R, format: TraceFormat, file: impl Into<String>) -> Self {
        Self {
            input,
            format,
            file: file.into(),
            speed: 1.0,
            vocab_size: DEFAULT_VOCAB_SIZE,
            line: 0,
            buffer: Vec::new(),
            rows: 0,
            origin: (format == TraceFormat::Mooncake).then_some(0),
            last_nanos: 0,
            ended: false,
        }
    }

    /// Divides arrival times by `speed`: 2 sends the requests twice as fast.
    ///
    /// # Errors
    /// `speed` is not greater than 0 and finite.
    pub fn with_speed(mut self, speed: f64) -> Result<Self, ConfigError> {
        if !(speed > 0.0 && speed.is_finite()) {
            return Err(ConfigError::new("speed", speed, "greater than 0 and finite"));
        }
        self.speed = speed;
        Ok(self)
    }

    /// Makes prompt tokens below `vocab_size` (at first 128,256, the vocabulary of Llama 3).
    ///
    /// # Errors
    /// `vocab_size` is 0.
    pub fn with_vocab_size(mut self, vocab_size: u32) -> Result<Self, ConfigError> {
        if vocab_size == 0 {
            return Err(ConfigError::new("vocab_size", vocab_size, "at least 1"));
        }
        self.vocab_size = vocab_size;
        Ok(self)
    }

    /// The next request; `None` at the end.
    fn read(&mut self) -> Result<Option<TraceRequest>, TraceError> {
        if self.line == 0 && self.format == TraceFormat::Azure2023 {
            self.read_header()?;
        }
        loop {
            if !self.read_line()? {
                return Ok(None);
            }
            if self.buffer.iter().any(|byte| !byte.is_ascii_whitespace()) {
                break;
            }
        }
        self.parse_line().map(Some).map_err(|problem| self.at_line(problem))
    }

    fn read_header(&mut self) -> Result<(), TraceError> {
        let found = if self.read_line()? { String::from_utf8_lossy(&self.buffer).into_owned() } else { String::new() };
        if found == azure::HEADER {
            return Ok(());
        }
        self.ended = true;
        let found = found.chars().take(azure::HEADER.len() * 2).collect();
        Err(TraceError::Header { file: self.file.clone(), found, required: azure::HEADER })
    }

    /// Reads a line into the buffer, without its end; `false` at the end of the file.
    fn read_line(&mut self) -> Result<bool, TraceError> {
        self.buffer.clear();
        self.line += 1;
        // Two bytes for the end of the line, one that tells a line that is too long from one that just fits.
        let limit = MAX_LINE_BYTES as u64 + 3;
        if let Err(error) = (&mut self.input).take(limit).read_until(b'\n', &mut self.buffer) {
            self.ended = true;
            return Err(TraceError::Read { file: self.file.clone(), line: self.line, message: error.to_string() });
        }
        let read = !self.buffer.is_empty();
        self.buffer.pop_if(|last| *last == b'\n');
        self.buffer.pop_if(|last| *last == b'\r');
        if self.buffer.len() > MAX_LINE_BYTES {
            self.ended = true;
            return Err(TraceError::LineTooLong { file: self.file.clone(), line: self.line, limit: MAX_LINE_BYTES });
        }
        Ok(read)
    }

    fn parse_line(&mut self) -> Result<TraceRequest, Problem> {
        let line = std::str::from_utf8(&self.buffer).map_err(|error| Problem::Shape(error.to_string()))?;
        let row = match self.format {
            TraceFormat::Mooncake => mooncake::parse(line)?,
            TraceFormat::Azure2023 => azure::parse(line)?,
        };
        let arrival = self.arrival(&row)?;
        Ok(self.request(row, arrival))
    }

    /// The row's arrival, if it is not before that of the row above.
    fn arrival(&mut self, row: &Row) -> Result<EngineTime, Problem> {
        let field = match self.format {
            TraceFormat::Mooncake => "timestamp",
            TraceFormat::Azure2023 => "TIMESTAMP",
        };
        let origin = *self.origin.get_or_insert(row.at_nanos);
        let from_start = |nanos: u128| format!("{} ms from the start", (nanos as f64 - origin as f64) / 1e6);
        if self.rows > 0 && row.at_nanos < self.last_nanos {
            let allowed = format!("at least that of the row above, {}", from_start(self.last_nanos));
            return Err(Problem::field(field, from_start(row.at_nanos), allowed));
        }
        let beyond_time = || {
            let mut allowed = format!("at most {} ms from the start", u64::MAX / 1_000_000);
            if self.speed != 1.0 {
                allowed += &format!(" after a division by speed = {}", self.speed);
            }
            Problem::field(field, from_start(row.at_nanos), allowed)
        };
        // A row that goes back was refused above, so this is not before the origin.
        let nanos = u64::try_from(row.at_nanos.saturating_sub(origin)).map_err(|_| beyond_time())?;
        let arrival = EngineTime::ZERO + Speedup::Factor(self.speed).scale(Duration::from_nanos(nanos));
        if arrival == EngineTime::MAX {
            return Err(beyond_time());
        }
        self.last_nanos = row.at_nanos;
        Ok(arrival)
    }

    fn request(&mut self, row: Row, arrival: EngineTime) -> TraceRequest {
        let hash_ids: Arc<[u64]> = row.hash_ids.into();
        let source = TracePrompt {
            hash_ids: Arc::clone(&hash_ids),
            num_tokens: row.prompt_tokens,
            row: self.rows,
            vocab_size: self.vocab_size,
        };
        self.rows += 1;
        TraceRequest { arrival, prompt: Prompt::Lazy(Arc::new(source)), output_tokens: row.output_tokens, hash_ids }
    }

    fn at_line(&self, problem: Problem) -> TraceError {
        let (file, line) = (self.file.clone(), self.line);
        match problem {
            Problem::Shape(problem) => TraceError::Line { file, line, problem },
            Problem::Field { field, value, allowed } => TraceError::Field { file, line, field, value, allowed },
        }
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.read().transpose();
        self.ended |= next.is_none();
        next
    }
}

impl<R: BufRead> std::iter::FusedIterator for TraceReader<R> {}
