//! Decisions recorded from a real engine, and the check that this crate decides the same.
//!
//! A recording is a file of JSON lines: the scenario (configuration and timed inputs), one line per
//! step of the engine loop, and the end. [`Recording::check`] gives the inputs to a
//! [`Scheduler`](crate::Scheduler), writes down what it decides **in the recording's own types**, and
//! compares the two. That is what keeps the check honest:
//!
//! 1. A recorded field that no type here names is a read error, so nothing is passed over unseen.
//! 2. A field that a type names must be filled in by the replay, or it does not compile.
//! 3. The two sides are compared as a whole, then field by field to say where they part.
//!
//! Supported are the formats `vllm-oracle/1` (vLLM's synchronous scheduler with one group of full attention and
//! no drafts), `vllm-oracle-pd/1` (the same with a KV connector) and `sglang-oracle/1` (SGLang's loop without
//! overlap). Their sisters are refused with the reason.

mod check;
mod connector;
mod contents;
mod difference;
mod input;
mod replay;
mod scheduled;
mod sglang;
mod step;
mod updated;

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

pub use check::{Disagreement, Mismatch, Place};
pub use difference::Difference;

use crate::error::json_path;
use crate::request::MAX_OUTPUT_TOKENS;
use check::StepLine;
use input::Scenario;
use step::{End, Step};

/// The formats that are supported.
const VLLM: &str = "vllm-oracle/1";
const VLLM_CONNECTOR: &str = "vllm-oracle-pd/1";
const SGLANG: &str = "sglang-oracle/1";

/// The largest file that is read. The largest recording there is has a thirtieth of that.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// One scenario and what a real engine made of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    lines: Lines,
}

/// The lines of a recording, by engine.
#[derive(Debug, Clone, PartialEq)]
enum Lines {
    Vllm(Recorded<Scenario, Step, End>),
    Sglang(Recorded<sglang::Scenario, sglang::Step, sglang::End>),
}

/// The lines of one format.
#[derive(Debug, Clone, PartialEq)]
struct Recorded<S, T, E> {
    scenario: S,
    steps: Vec<T>,
    end: E,
}

/// Why a recording cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file or folder cannot be read.
    #[error("{}: {message}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system says.
        message: String,
    },
    /// A line is not what the format asks for. Correct or leave out the file.
    #[error("{}, line {line}, field {field}: {message}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Path of the field in the line.
        field: String,
        /// What is wrong with it.
        message: String,
    },
    /// The recording is about something that this crate does not do (yet).
    #[error("{}: not supported: {feature}", path.display())]
    NotSupported {
        /// The file.
        path: PathBuf,
        /// What it would need.
        feature: String,
    },
}

/// The part of the first line that says whether the rest can be read at all.
#[derive(Deserialize)]
struct Header {
    format: String,
}

impl Recording {
    /// Reads a recording from a file of at most 16 MiB.
    ///
    /// # Errors
    /// What is wrong with the file, by line and field; or the feature that it would need.
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        let mut text = String::new();
        // One byte more tells a file that is too large; without a limit one without an end would fill the memory.
        let read = File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text));
        read.map_err(|error| unreadable(path, &error))?;
        if text.len() as u64 > MAX_FILE_BYTES {
            let error = io::Error::other(format!("the file is larger than {MAX_FILE_BYTES} bytes"));
            return Err(unreadable(path, &error));
        }
        Self::parse(path, &text)
    }

    /// Reads a recording from text; `path` is only named in errors.
    ///
    /// # Errors
    /// As for [`Recording::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ReadError> {
        let lines: Vec<&str> = text.lines().collect();
        let [first, steps @ .., last] = lines.as_slice() else {
            return Err(line_error(path, lines.len() + 1, "kind", "a recording has a scenario line and an end line"));
        };
        let header: Header = read_line(path, 1, first)?;
        if let Some(feature) = unsupported(&header.format) {
            return Err(ReadError::NotSupported { path: path.to_owned(), feature });
        }
        let (lines, sense) = if header.format == SGLANG {
            let recorded = Recorded::<sglang::Scenario, _, _>::read(path, first, steps, last)?;
            let sense = recorded.scenario.check();
            (Lines::Sglang(recorded), sense)
        } else {
            let recorded = Recorded::<Scenario, _, _>::read(path, first, steps, last)?;
            let sense = recorded.scenario.check();
            (Lines::Vllm(recorded), sense)
        };
        sense.map_err(|Senseless { field, message }| line_error(path, 1, field, message))?;
        Ok(Self { lines })
    }

    /// The scenario's name.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.lines {
            Lines::Vllm(recorded) => &recorded.scenario.name,
            Lines::Sglang(recorded) => &recorded.scenario.name,
        }
    }

    /// Steps of the engine loop, idle ones included.
    #[must_use]
    pub fn num_steps(&self) -> usize {
        match &self.lines {
            Lines::Vllm(recorded) => recorded.steps.len(),
            Lines::Sglang(recorded) => recorded.steps.len(),
        }
    }
}

/// An input that cannot be, as no engine would have been given it.
struct Senseless {
    field: String,
    message: String,
}

impl Senseless {
    fn input(index: usize, field: &str, message: impl Into<String>) -> Self {
        Self { field: format!("inputs[{index}].{field}"), message: message.into() }
    }
}

/// Refuses inputs that ask for more output tokens than the longest request may have, all together: they are
/// held in memory, 4 bytes each. The index of an input, and how many it asks for.
fn check_output_tokens(asked: impl Iterator<Item = (usize, u32)>) -> Result<(), Senseless> {
    let mut total = 0;
    for (index, tokens) in asked {
        total += u64::from(tokens);
        if total > u64::from(MAX_OUTPUT_TOKENS) {
            let message =
                format!("{total} output tokens so far: all inputs may have MAX_OUTPUT_TOKENS = {MAX_OUTPUT_TOKENS}");
            return Err(Senseless::input(index, "max_tokens", message));
        }
    }
    Ok(())
}

impl<S: DeserializeOwned, T: DeserializeOwned + StepLine, E: DeserializeOwned> Recorded<S, T, E> {
    fn read(path: &Path, first: &str, steps: &[&str], last: &str) -> Result<Self, ReadError> {
        let steps_read = steps.iter().enumerate().map(|(index, text)| {
            let step: T = read_line(path, index + 2, text)?;
            if step.number() as usize != index {
                let message = format!("is {}, but this is the line of step {index}", step.number());
                return Err(line_error(path, index + 2, "step", message));
            }
            Ok(step)
        });
        Ok(Self {
            scenario: read_line(path, 1, first)?,
            steps: steps_read.collect::<Result<_, _>>()?,
            end: read_line(path, steps.len() + 2, last)?,
        })
    }
}

/// The recordings at `path`: the file itself, or the folder's `*.jsonl` files by name.
///
/// # Errors
/// There is no such file or folder, or the folder holds no recording.
pub fn recording_files(path: &Path) -> Result<Vec<PathBuf>, ReadError> {
    let failed = |error: io::Error| unreadable(path, &error);
    if !fs::metadata(path).map_err(failed)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = fs::read_dir(path).map_err(failed)?.map(|entry| entry.map(|entry| entry.path()));
    let mut files = entries.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "jsonl"));
    if files.is_empty() {
        return Err(failed(io::Error::other("the folder holds no *.jsonl file")));
    }
    files.sort();
    Ok(files)
}

/// What a recording in this format would need that is not there; `None` if it can be checked.
fn unsupported(format: &str) -> Option<String> {
    let feature = match format {
        VLLM | VLLM_CONNECTOR | SGLANG => return None,
        "vllm-oracle-async/1" => "two batches in flight (asynchronous scheduling)",
        "vllm-oracle-spec/1" => "draft tokens (speculative decoding)",
        _ => "a format that is not known",
    };
    Some(format!("{feature}, format {format}"))
}

fn read_line<T: DeserializeOwned>(path: &Path, line: usize, text: &str) -> Result<T, ReadError> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| line_error(path, line, json_path(error.path()), error.inner().to_string()))?;
    reader.end().map_err(|error| line_error(path, line, "(end of line)", error.to_string()))?;
    Ok(value)
}

fn line_error(path: &Path, line: usize, field: impl Into<String>, message: impl Into<String>) -> ReadError {
    ReadError::Line { path: path.to_owned(), line, field: field.into(), message: message.into() }
}

fn unreadable(path: &Path, error: &io::Error) -> ReadError {
    ReadError::Unreadable { path: path.to_owned(), message: error.to_string() }
}

#[cfg(test)]
mod recording_test;
