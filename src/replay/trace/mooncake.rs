//! One line of a Mooncake trace.

use serde_json::{Map, Value};

use super::{Problem, Row, TRACE_BLOCK_TOKENS, token_count};
use crate::request::MAX_OUTPUT_TOKENS;

/// Parses a line. Fields beside the four are ignored: variants of the format add some.
pub(super) fn parse(line: &str) -> Result<Row, Problem> {
    let fields: Map<String, Value> = serde_json::from_str(line)
        .map_err(|error| Problem::Shape(format!("not a JSON object of a Mooncake trace: {error}")))?;
    let prompt_tokens = tokens(&fields, "input_length", u32::MAX)?;
    let hash_ids = hash_ids(&fields)?;
    let blocks = prompt_tokens.div_ceil(TRACE_BLOCK_TOKENS);
    if hash_ids.len() != blocks as usize {
        let allowed = format!("{blocks}, one per {TRACE_BLOCK_TOKENS} tokens of input_length = {prompt_tokens}");
        return Err(Problem::field("hash_ids", format!("{} ids", hash_ids.len()), allowed));
    }
    Ok(Row {
        at_nanos: timestamp(&fields)?,
        prompt_tokens,
        output_tokens: tokens(&fields, "output_length", MAX_OUTPUT_TOKENS)?,
        hash_ids,
    })
}

fn required<'a>(fields: &'a Map<String, Value>, field: &'static str) -> Result<&'a Value, Problem> {
    fields.get(field).ok_or_else(|| Problem::field(field, "(missing)", "required"))
}

fn tokens(fields: &Map<String, Value>, field: &'static str, max: u32) -> Result<u32, Problem> {
    let value = required(fields, field)?;
    token_count(field, value.as_u64(), value, max)
}

/// Milliseconds, whole or not, as nanoseconds.
fn timestamp(fields: &Map<String, Value>) -> Result<u128, Problem> {
    let value = required(fields, "timestamp")?;
    if let Some(milliseconds) = value.as_u64() {
        return Ok(u128::from(milliseconds) * 1_000_000);
    }
    match value.as_f64() {
        // The cast saturates; the reader refuses what is beyond the clock's range.
        Some(milliseconds) if milliseconds >= 0.0 => Ok((milliseconds * 1e6).round() as u128),
        _ => Err(Problem::field("timestamp", value, "a number of milliseconds, at least 0")),
    }
}

fn hash_ids(fields: &Map<String, Value>) -> Result<Vec<u64>, Problem> {
    let value = required(fields, "hash_ids")?;
    let ids = value.as_array().ok_or_else(|| Problem::field("hash_ids", value, "a list of block ids"))?;
    ids.iter()
        .map(|id| id.as_u64().ok_or_else(|| Problem::field("hash_ids", id, "whole numbers from 0 to 2^64 - 1")))
        .collect()
}
