//! Configuration from JSON.

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::error::{ConfigError, json_path};

/// The longest configuration that is read, in bytes. The default one has a thousandth of that; an error looks the bad
/// value up in all of it.
const MAX_JSON_BYTES: usize = 1 << 20;

/// Reads JSON; an error names the path of the field and the value that was there.
pub(super) fn read<T: DeserializeOwned>(json: &str) -> Result<T, ConfigError> {
    if json.len() > MAX_JSON_BYTES {
        return Err(ConfigError::new("(JSON)", format!("{} bytes", json.len()), format!("at most {MAX_JSON_BYTES}")));
    }
    let mut reader = serde_json::Deserializer::from_str(json);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let root = serde_json::from_str::<Value>(json).ok();
        let value = root.as_ref().and_then(|root| value_at(root, error.path()));
        let value = value.map_or_else(|| "(JSON)".to_owned(), ToString::to_string);
        ConfigError::new(json_path(error.path()), value, error.into_inner().to_string())
    })?;
    reader.end().map_err(|error| ConfigError::new("(end)", "(JSON)", error.to_string()))?;
    Ok(value)
}

/// What stands at a path, if it is there.
fn value_at<'a>(root: &'a Value, path: &Path) -> Option<&'a Value> {
    path.iter().try_fold(root, |value, segment| match segment {
        Segment::Seq { index } => value.get(index),
        Segment::Map { key } => value.get(key),
        // The name of a variant is the key of an object with one entry.
        Segment::Enum { variant } => value.get(variant),
        Segment::Unknown => None,
    })
}
