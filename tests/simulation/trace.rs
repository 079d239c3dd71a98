//! Everything that a run gives out, as one number.

use std::fmt::{self, Debug, Write};
use std::hash::{DefaultHasher, Hasher};

/// A hash over the text of what is noted; off, it costs nothing.
#[derive(Debug, Default)]
pub(crate) struct Trace(Option<Text>);

#[derive(Debug, Default)]
struct Text(DefaultHasher);

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

impl Trace {
    pub(crate) fn on() -> Self {
        Self(Some(Text::default()))
    }

    pub(crate) fn off() -> Self {
        Self(None)
    }

    pub(crate) fn note(&mut self, what: &impl Debug) {
        if let Some(text) = &mut self.0 {
            writeln!(text, "{what:?}").expect("hashing never fails");
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.0.as_ref().map_or(0, |text| text.0.finish())
    }
}
