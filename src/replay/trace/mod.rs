//! Readers for public workload traces.
//!
//! | format | fields | prompts |
//! | --- | --- | --- |
//! | Mooncake (`.jsonl`), Qin et al., FAST 2025 | `timestamp` ms from the start, `input_length` and `output_length` in tokens, `hash_ids` of 512-token blocks | equal ids give equal tokens |
//! | Azure LLM inference 2023 (`.csv`), Patel et al., ISCA 2024 | `TIMESTAMP` UTC with up to 9 fractional digits, `ContextTokens`, `GeneratedTokens` | every row has its own tokens |
//!
//! A [`TraceReader`] is an iterator over any `BufRead`. It holds one line; a request holds its block ids, and its
//! tokens are made when they are asked for.
//!
//! ```
//! use standin::replay::trace::{TraceFormat, TraceReader};
//!
//! let trace = br#"{"timestamp": 27.5, "input_length": 700, "output_length": 9, "hash_ids": [3, 4]}"#;
//! for request in TraceReader::new(&trace[..], TraceFormat::Mooncake, "inline") {
//!     let request = request?;
//!     assert_eq!((request.prompt.len(), request.output_tokens), (700, 9));
//!     let _to_submit: standin::Request = request.into();
//! }
//! # Ok::<(), standin::replay::trace::TraceError>(())
//! ```

mod azure;
mod error;
mod mooncake;
mod prompt;
mod reader;
#[cfg(test)]
mod reader_test;

pub use error::TraceError;
pub use prompt::TRACE_BLOCK_TOKENS;
pub use reader::{TraceFormat, TraceReader};

use std::sync::Arc;

use crate::error::shown;
use crate::request::{Prompt, Request};
use crate::time::EngineTime;

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceRequest {
    /// When it arrives, the reader's speed applied. Times of the trace's own start count from 0.
    pub arrival: EngineTime,
    /// Its prompt; the tokens are made when asked for.
    pub prompt: Prompt,
    /// Output tokens to produce.
    pub output_tokens: u32,
    /// Ids of the prompt's 512-token blocks, the last one perhaps filled in part; empty where the format has none.
    pub hash_ids: Arc<[u64]>,
}

impl TraceRequest {
    /// Tokens in the prompt. The readers refuse prompts longer than a `u32`; one that was put in its place counts as
    /// that.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap_or(u32::MAX)
    }
}

impl From<TraceRequest> for Request {
    /// The request to submit: it arrives at its time and generates exactly its output length.
    fn from(request: TraceRequest) -> Self {
        Self::new(request.prompt, request.output_tokens).with_arrival(request.arrival)
    }
}

/// One row as a format's parser sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    /// Nanoseconds since the trace's start, or since a fixed day where the format counts so.
    at_nanos: u128,
    prompt_tokens: u32,
    output_tokens: u32,
    hash_ids: Vec<u64>,
}

/// What is wrong with a line; the reader adds file and line number.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Problem {
    /// The line has not the format's shape.
    Shape(String),
    /// A field is missing or has a value that is not allowed.
    Field { field: &'static str, value: String, allowed: String },
}

impl Problem {
    fn field(field: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::Field { field, value: shown(value.to_string()), allowed: allowed.into() }
    }
}

/// `value` as a number of tokens from 1 to `max`.
fn token_count(field: &'static str, value: Option<u64>, shown: impl ToString, max: u32) -> Result<u32, Problem> {
    match value.map(u32::try_from) {
        Some(Ok(tokens)) if (1..=max).contains(&tokens) => Ok(tokens),
        _ => Err(Problem::field(field, shown, format!("a whole number from 1 to {max}"))),
    }
}
