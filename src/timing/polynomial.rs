//! Prefill and decode polynomials, the model that dynamo-mocker uses by default.

use std::time::Duration;

use super::config::non_negative;
use super::{PassTiming, PassWork, rounded};
use crate::error::ConfigError;

/// A polynomial for the prefill part of a pass plus one for its decode part.
///
/// ```text
/// prefill = c0 + c1·n + c2·n²          n = chunks × (mean input − mean cached), both means cut to integers;
///                                      0 without prefill
/// decode  = max(decode_min, d0 + d1·p + d2·p²)
///                                      p = KV tokens of the decode rows ÷ KV capacity, at most 1;
///                                      0 without decode rows
/// ```
/// For a chunk, the input is its new tokens and all before them, and what is cached is all before them.
///
/// It is here for parity with other simulators, and shares their faults: the two parts are **added**
/// although a real engine reads its weights once per pass, the number of decode rows does not matter,
/// and the decode time hangs on the configured capacity. Prefer a kernel table where parity is no aim.
///
/// The default values are those of dynamo-mocker (aisimulate-core 0.13.0, Apache-2.0).
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Polynomial {
    /// `c0`, `c1` and `c2` in milliseconds (per token, per token squared); finite.
    pub prefill_ms: [f64; 3],
    /// `d0`, `d1` and `d2` in milliseconds; finite.
    pub decode_ms: [f64; 3],
    /// The least decode time in milliseconds; at least 0.
    pub decode_min_ms: f64,
}

impl Default for Polynomial {
    fn default() -> Self {
        Self {
            prefill_ms: [16.501_42, 1.518_344e-2, 4.209_989e-7],
            decode_ms: [5.74, 54.01, -25.74],
            decode_min_ms: 1.0,
        }
    }
}

impl Polynomial {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        for (name, coefficients) in [("prefill_ms", &self.prefill_ms), ("decode_ms", &self.decode_ms)] {
            for (index, &value) in coefficients.iter().enumerate() {
                if !value.is_finite() {
                    return Err(ConfigError::new(format!("{name}[{index}]"), value, "finite"));
                }
            }
        }
        non_negative("decode_min_ms", self.decode_min_ms)
    }
}

/// A [`Polynomial`] for an engine whose KV pool has a known size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolynomialTiming {
    polynomial: Polynomial,
    kv_capacity_tokens: u64,
}

impl PolynomialTiming {
    /// The model for a pool of `kv_capacity_tokens`; a pool of 0 counts as full.
    #[must_use]
    pub fn new(polynomial: Polynomial, kv_capacity_tokens: u64) -> Self {
        Self { polynomial, kv_capacity_tokens }
    }

    fn prefill_ms(&self, work: &PassWork) -> f64 {
        let chunks = work.prefill().len() as u64;
        if chunks == 0 {
            return 0.0;
        }
        let mean_input = (work.prefill_tokens() + work.prefill_kv_tokens()) / chunks;
        let mean_cached = work.prefill_kv_tokens() / chunks;
        let tokens = chunks * (mean_input - mean_cached);
        evaluate(self.polynomial.prefill_ms, tokens as f64).max(0.0)
    }

    fn decode_ms(&self, work: &PassWork) -> f64 {
        if work.decode_kv().is_empty() {
            return 0.0;
        }
        let capacity = self.kv_capacity_tokens.max(1) as f64;
        let used = (work.decode_kv_tokens() as f64 / capacity).min(1.0);
        evaluate(self.polynomial.decode_ms, used).max(self.polynomial.decode_min_ms)
    }
}

impl PassTiming for PolynomialTiming {
    fn pass_duration(&mut self, work: &PassWork) -> Duration {
        rounded(self.prefill_ms(work) + self.decode_ms(work))
    }
}

/// `c0 + c1·x + c2·x²`.
fn evaluate([c0, c1, c2]: [f64; 3], x: f64) -> f64 {
    c0 + x * (c1 + x * c2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing::PrefillChunk;

    fn milliseconds(work: &PassWork) -> f64 {
        PolynomialTiming::new(Polynomial::default(), 10_000).pass_duration(work).as_secs_f64() * 1e3
    }

    fn chunk(new_tokens: u32, tokens_before: u32) -> PrefillChunk {
        PrefillChunk { new_tokens, tokens_before, samples: true }
    }

    #[test]
    fn prefill_sees_integer_means() {
        let mut work = PassWork::new();
        work.push_prefill(chunk(2048, 0));
        // Semantics of the engines, section 5.2: 49.4 ms at 2048 tokens.
        assert!((milliseconds(&work) - 49.36).abs() < 0.01, "{}", milliseconds(&work));
        work.clear();
        // Inputs 100 and 161 have mean 130, cached 0 and 61 mean 30: n = 2 × 100.
        work.push_prefill(chunk(100, 0));
        work.push_prefill(chunk(100, 61));
        let of_200 = 16.501_42 + 1.518_344e-2 * 200.0 + 4.209_989e-7 * 40_000.0;
        assert!((milliseconds(&work) - of_200).abs() < 1e-5);
    }

    #[test]
    fn decode_sees_the_used_share_of_the_pool_only() {
        let decode = |rows: &[u32]| {
            let mut work = PassWork::new();
            rows.iter().for_each(|&kv| work.push_decode(kv));
            milliseconds(&work)
        };
        assert_eq!(decode(&[5_000]), decode(&[2_500, 2_500]));
        assert!((decode(&[5_000]) - (5.74 + 27.005 - 6.435)).abs() < 1e-6);
        assert_eq!(decode(&[10_000]), decode(&[50_000]), "more than the pool counts as full");
    }

    #[test]
    fn the_two_parts_are_added() {
        let (mut prefill, mut decode, mut both) = (PassWork::new(), PassWork::new(), PassWork::new());
        prefill.push_prefill(chunk(512, 0));
        decode.push_decode(1_000);
        both.push_prefill(chunk(512, 0));
        both.push_decode(1_000);
        assert!((milliseconds(&both) - milliseconds(&prefill) - milliseconds(&decode)).abs() < 2e-6);
    }
}
