//! Recordings: whatever the bytes, the reader refuses them or the check says whether they agree.

use std::path::Path;

use standin::replay::recording::{Disagreement, ReadError, Recording};

pub(crate) fn recording(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Recording::parse(Path::new("fuzz"), text) {
        Err(ReadError::Line { line, field, message, .. }) => {
            assert!(line >= 1 && line <= text.lines().count() + 1);
            assert!(!field.is_empty() && !message.is_empty());
        }
        Err(error) => assert!(matches!(error, ReadError::NotSupported { .. }), "{error}"),
        Ok(recording) => match recording.check() {
            Ok(()) => assert!(recording.num_steps() <= text.lines().count()),
            Err(Disagreement::Differs(mismatch)) => assert!(!mismatch.differences.is_empty(), "{mismatch}"),
            Err(refused) => assert!(!refused.to_string().is_empty()),
        },
    }
}
