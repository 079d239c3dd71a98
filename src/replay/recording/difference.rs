//! Where two JSON values part.

use std::fmt;

use serde_json::{Map, Value};

/// One field in which a replay differs from its recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The field, as a JSON pointer into the recorded line.
    pub path: String,
    /// The recorded value as JSON, or `(absent)`.
    pub expected: String,
    /// The replayed value as JSON, or `(absent)`.
    pub got: String,
}

/// Characters of a value that are shown; a whole free queue fits.
const SHOWN: usize = 300;

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, expected, got } = self;
        writeln!(f, "  {path}")?;
        writeln!(f, "    expected {}", Shown(expected))?;
        write!(f, "    got      {}", Shown(got))
    }
}

/// A text that is cut if it is too long to be read.
struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(SHOWN) {
            Some((end, _)) => write!(f, "{}… ({} bytes)", &self.0[..end], self.0.len()),
            None => f.write_str(self.0),
        }
    }
}

/// Every field in which `got` differs, those of equally long lists one by one.
pub(super) fn differences(expected: &Value, got: &Value) -> Vec<Difference> {
    let mut found = Vec::new();
    compare(&mut String::new(), Some(expected), Some(got), &mut found);
    found
}

fn compare(path: &mut String, expected: Option<&Value>, got: Option<&Value>, found: &mut Vec<Difference>) {
    match (expected, got) {
        _ if expected == got => {}
        (Some(Value::Object(expected)), Some(Value::Object(got))) => {
            for key in keys(expected, got) {
                within(path, key, |path| compare(path, expected.get(key), got.get(key), found));
            }
        }
        (Some(Value::Array(expected)), Some(Value::Array(got))) if expected.len() == got.len() => {
            for (index, (expected, got)) in expected.iter().zip(got).enumerate() {
                within(path, &index.to_string(), |path| compare(path, Some(expected), Some(got), found));
            }
        }
        _ => {
            let text = |value: Option<&Value>| value.map_or_else(|| "(absent)".to_owned(), Value::to_string);
            found.push(Difference { path: path.clone(), expected: text(expected), got: text(got) });
        }
    }
}

/// The keys of both, each once.
fn keys<'a>(expected: &'a Map<String, Value>, got: &'a Map<String, Value>) -> impl Iterator<Item = &'a String> {
    expected.keys().chain(got.keys().filter(|&key| !expected.contains_key(key)))
}

/// Calls `inner` with `/key` added to the path, in the escapes of RFC 6901.
fn within(path: &mut String, key: &str, inner: impl FnOnce(&mut String)) {
    let length = path.len();
    path.push('/');
    path.push_str(&key.replace('~', "~0").replace('/', "~1"));
    inner(path);
    path.truncate(length);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_differing_leaf_is_found_and_nothing_else() {
        let expected = json!({"a": [1, {"b": 2, "c/~": [3]}], "d": null, "e": [1, 2], "same": [[1], {}]});
        let got = json!({"a": [0, {"b": 2, "c/~": [4]}], "e": [1], "f": 1.0, "same": [[1], {}]});
        let found: Vec<_> =
            differences(&expected, &got).iter().map(|d| format!("{}: {} {}", d.path, d.expected, d.got)).collect();
        assert_eq!(found, ["/a/0: 1 0", "/a/1/c~1~0/0: 3 4", "/d: null (absent)", "/e: [1,2] [1]", "/f: (absent) 1.0"]);
        assert_eq!(differences(&expected, &expected), []);
    }

    #[test]
    fn long_values_are_cut_between_characters() {
        let long = Difference { path: "/x".into(), expected: "é".repeat(SHOWN), got: "é".repeat(SHOWN + 1) };
        let shown = long.to_string();
        assert!(shown.contains(&format!("expected {}\n", "é".repeat(SHOWN))));
        assert!(shown.ends_with(&format!("got      {}… (602 bytes)", "é".repeat(SHOWN))));
    }
}
