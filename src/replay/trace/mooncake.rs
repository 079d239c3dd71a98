//! One line of a Mooncake trace.

use std::fmt;

use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{Problem, Row, TRACE_BLOCK_TOKENS, token_count};
use crate::request::MAX_OUTPUT_TOKENS;

/// The fields of a row. Those beside them are ignored: variants of the format add some.
const NAMES: [&str; 4] = ["timestamp", "input_length", "output_length", "hash_ids"];

/// Their values as they stand there, in the order of [`NAMES`].
#[derive(Debug, Default)]
struct Fields([Option<Value>; NAMES.len()]);

/// Parses a line.
pub(super) fn parse(line: &str) -> Result<Row, Problem> {
    let fields: Fields = serde_json::from_str(line)
        .map_err(|error| Problem::Shape(format!("not a JSON object of a Mooncake trace: {error}")))?;
    let [at, prompt_tokens, output_tokens, hash_ids] = &fields.0;
    let prompt_tokens = tokens("input_length", prompt_tokens, u32::MAX)?;
    let hash_ids = ids(required("hash_ids", hash_ids)?)?;
    let blocks = prompt_tokens.div_ceil(TRACE_BLOCK_TOKENS);
    if hash_ids.len() != blocks as usize {
        let allowed = format!("{blocks}, one per {TRACE_BLOCK_TOKENS} tokens of input_length = {prompt_tokens}");
        return Err(Problem::field("hash_ids", format!("{} ids", hash_ids.len()), allowed));
    }
    Ok(Row {
        at_nanos: timestamp(required("timestamp", at)?)?,
        prompt_tokens,
        output_tokens: tokens("output_length", output_tokens, MAX_OUTPUT_TOKENS)?,
        hash_ids,
    })
}

fn required<'a>(field: &'static str, value: &'a Option<Value>) -> Result<&'a Value, Problem> {
    value.as_ref().ok_or_else(|| Problem::field(field, "(missing)", "required"))
}

fn tokens(field: &'static str, value: &Option<Value>, max: u32) -> Result<u32, Problem> {
    let value = required(field, value)?;
    token_count(field, value.as_u64(), value, max)
}

/// Milliseconds, whole or not, as nanoseconds.
fn timestamp(value: &Value) -> Result<u128, Problem> {
    if let Some(milliseconds) = value.as_u64() {
        return Ok(u128::from(milliseconds) * 1_000_000);
    }
    match value.as_f64() {
        // The cast saturates; the reader refuses what is beyond the clock's range.
        Some(milliseconds) if milliseconds >= 0.0 => Ok((milliseconds * 1e6).round() as u128),
        _ => Err(Problem::field("timestamp", value, "a number of milliseconds, at least 0")),
    }
}

fn ids(value: &Value) -> Result<Vec<u64>, Problem> {
    let ids = value.as_array().ok_or_else(|| Problem::field("hash_ids", value, "a list of block ids"))?;
    ids.iter()
        .map(|id| id.as_u64().ok_or_else(|| Problem::field("hash_ids", id, "whole numbers from 0 to 2^64 - 1")))
        .collect()
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(OneOfEach)
    }
}

/// Takes each field once: of two of one name a map would keep the last.
struct OneOfEach;

impl<'de> Visitor<'de> for OneOfEach {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = Fields::default();
        while let Some(name) = map.next_key::<String>()? {
            match NAMES.iter().position(|known| *known == name) {
                None => drop(map.next_value::<IgnoredAny>()?),
                Some(index) if fields.0[index].is_none() => fields.0[index] = Some(map.next_value()?),
                Some(index) => return Err(A::Error::duplicate_field(NAMES[index])),
            }
        }
        Ok(fields)
    }
}
