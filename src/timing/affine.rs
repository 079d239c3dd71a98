//! The two simplest models: a sum of three terms, and a constant.

use std::time::Duration;

use super::config::non_negative;
use super::{PassTiming, PassWork, rounded};
use crate::error::ConfigError;

/// `pass_ms + prefill_ms_per_token · new prefill tokens + decode_ms_per_row · decode rows`.
///
/// The form in which serving logs are often fitted. BLIS, for one, gives for Llama-3.1-8B on two H100
/// (vLLM 0.8.4) 6.910 ms, 0.01767 ms and 0.00284 ms, and for Llama-3.3-70B on four H100 12.601 ms,
/// 0.07642 ms and 0.06684 ms. It knows nothing of context lengths.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Affine {
    /// Milliseconds of every pass; at least 0.
    pub pass_ms: f64,
    /// Milliseconds per prompt token computed, tokens found in the cache not counted; at least 0.
    pub prefill_ms_per_token: f64,
    /// Milliseconds per decode row; at least 0.
    pub decode_ms_per_row: f64,
}

impl Affine {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        non_negative("pass_ms", self.pass_ms)?;
        non_negative("prefill_ms_per_token", self.prefill_ms_per_token)?;
        non_negative("decode_ms_per_row", self.decode_ms_per_row)
    }
}

impl PassTiming for Affine {
    fn pass_duration(&mut self, work: &PassWork) -> Duration {
        let prefill = self.prefill_ms_per_token * work.prefill_tokens() as f64;
        let decode = self.decode_ms_per_row * work.decode_kv().len() as f64;
        rounded(self.pass_ms + prefill + decode)
    }
}

/// Every pass takes the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Constant(pub Duration);

impl Constant {
    /// `milliseconds` per pass, rounded to a nanosecond; what is negative or NaN counts as 0.
    #[must_use]
    pub fn from_ms(milliseconds: f64) -> Self {
        Self(rounded(milliseconds))
    }
}

impl PassTiming for Constant {
    fn pass_duration(&mut self, _work: &PassWork) -> Duration {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing::PrefillChunk;

    #[test]
    fn the_terms_add_up_and_are_rounded_once() {
        let mut affine = Affine { pass_ms: 6.91, prefill_ms_per_token: 0.01767, decode_ms_per_row: 0.00284 };
        let mut work = PassWork::new();
        work.push_prefill(PrefillChunk { new_tokens: 100, tokens_before: 5_000, samples: true });
        work.push_decode(70);
        work.push_decode(4_000);
        assert_eq!(affine.pass_duration(&work), Duration::from_nanos(6_910_000 + 1_767_000 + 5_680));
        assert_eq!(Constant::from_ms(0.000_000_6).pass_duration(&work), Duration::from_nanos(1));
    }
}
