//! What it costs to move the KV of one prompt from a source to a destination.
//!
//! Figures that can be used, per token and over all layers, at 16 bits: Llama-3.1-8B 131,072 B (32 layers × 8 KV
//! heads × head size 128 × keys and values × 2 B), Llama-3.1-70B 327,680 B. Public effective bandwidths: 25 GB/s
//! with 0.05 ms setup (BLIS defaults); NVLink 600, InfiniBand NDR 40, RoCE 200G 20, 100 GbE 10 GB/s (llm-d).

use std::time::Duration;

use crate::config::Speedup;
use crate::error::ConfigError;

/// Which tokens of the prompt are transferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum TransferTimingMode {
    /// All of them, whatever the destination has (SGLang, whose decode side keeps no prefix cache by default).
    #[default]
    FullPrompt,
    /// Those that the destination's cache does not hold (vLLM).
    MissingTokens,
}

/// What decides how long the transfer of one prompt's KV takes. The source sends it along when it holds the blocks.
///
/// The default knows neither bytes nor bandwidth: the transfer is not modelled.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct TransferTiming {
    /// Which tokens count.
    pub mode: TransferTimingMode,
    /// Tokens in the prompt.
    pub full_prompt_tokens: u32,
    /// Bytes of KV per token over all layers and devices; `None` if it is not known.
    pub kv_bytes_per_token: Option<u64>,
    /// Bandwidth of the link in GB/s (10⁹ bytes per second), at least 0 and finite; 0 and `None` both say that it is not
    /// known.
    pub bandwidth_gb_s: Option<f64>,
    /// Time before the first byte: handshake, descriptors, registration.
    #[cfg_attr(feature = "serde", serde(rename = "setup_ms", with = "crate::time::duration_ms"))]
    pub setup: Duration,
}

impl TransferTiming {
    /// Checks the values.
    ///
    /// # Errors
    /// `bandwidth_gb_s` is negative or not finite.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match self.bandwidth_gb_s {
            Some(bandwidth) if !(bandwidth.is_finite() && bandwidth >= 0.0) => {
                Err(ConfigError::new("bandwidth_gb_s", bandwidth, "at least 0 and finite"))
            }
            _ => Ok(()),
        }
    }

    /// Tokens that are transferred to a destination that lacks `missing_tokens` of the prompt.
    #[must_use]
    pub fn tokens(&self, missing_tokens: u32) -> u32 {
        match self.mode {
            TransferTimingMode::FullPrompt => self.full_prompt_tokens,
            TransferTimingMode::MissingTokens => missing_tokens.min(self.full_prompt_tokens),
        }
    }

    /// Setup and time on the wire, the link unshared; `None` where bytes per token or bandwidth are not known.
    #[must_use]
    pub fn cost(&self, missing_tokens: u32) -> Option<TransferCost> {
        let bandwidth = self.bandwidth_gb_s.filter(|bandwidth| bandwidth.is_finite() && *bandwidth > 0.0)?;
        let bytes = u128::from(self.tokens(missing_tokens)) * u128::from(self.kv_bytes_per_token?);
        // Bytes over GB/s are nanoseconds. The cast saturates.
        let wire = Duration::from_nanos((bytes as f64 / bandwidth).round() as u64);
        Some(TransferCost { setup: self.setup, wire })
    }

    /// How long the transfer takes alone on its link:
    /// `setup + tokens × bytes per token ÷ (GB/s × 10⁹)`, rounded to a nanosecond.
    ///
    /// `None` where bytes per token or bandwidth are not known, or the bandwidth is 0: the transfer is not modelled.
    #[must_use]
    pub fn delay(&self, missing_tokens: u32) -> Option<Duration> {
        self.cost(missing_tokens).map(TransferCost::alone)
    }
}

/// The two parts of a transfer's time: only the second one competes for the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct TransferCost {
    /// Time before the first byte.
    #[cfg_attr(feature = "serde", serde(rename = "setup_ms", with = "crate::time::duration_ms"))]
    pub setup: Duration,
    /// Time on the link if nobody shares it.
    #[cfg_attr(feature = "serde", serde(rename = "wire_ms", with = "crate::time::duration_ms"))]
    pub wire: Duration,
}

impl TransferCost {
    /// The whole time if nobody shares the link, saturating.
    #[must_use]
    pub const fn alone(self) -> Duration {
        self.setup.saturating_add(self.wire)
    }

    /// The modelled cost as engine time.
    #[must_use]
    pub fn scaled(self, speedup: Speedup) -> Self {
        Self { setup: speedup.scale(self.setup), wire: speedup.scale(self.wire) }
    }

    /// What is left once `overlapped` of it lay under the prefill: `max(0, total − overlapped)`, setup first.
    ///
    /// An engine that sends each chunk as it is computed overlaps the prefill time after the first chunk. The part that
    /// is hidden so is not charged to the link.
    #[must_use]
    pub const fn exposed(self, overlapped: Duration) -> Self {
        let beyond_setup = overlapped.saturating_sub(self.setup);
        Self { setup: self.setup.saturating_sub(overlapped), wire: self.wire.saturating_sub(beyond_setup) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Llama-3.1-8B over 25 GB/s.
    const LLAMA_8B: TransferTiming = TransferTiming {
        mode: TransferTimingMode::FullPrompt,
        full_prompt_tokens: 4_096,
        kv_bytes_per_token: Some(131_072),
        bandwidth_gb_s: Some(25.0),
        setup: Duration::ZERO,
    };

    #[test]
    fn h12_delay_is_setup_plus_bytes_over_bandwidth() {
        assert_eq!(LLAMA_8B.delay(0), Some(Duration::from_nanos(21_474_836)), "537 MB at 25 GB/s");
        let infiniband = TransferTiming { bandwidth_gb_s: Some(40.0), setup: Duration::from_millis(1), ..LLAMA_8B };
        assert_eq!(infiniband.delay(0), Some(Duration::from_nanos(14_421_773)));
        let missing = TransferTiming { mode: TransferTimingMode::MissingTokens, ..infiniband };
        assert_eq!(missing.delay(1_024), Some(Duration::from_nanos(4_355_443)));
        assert_eq!(missing.delay(0), Some(Duration::from_millis(1)), "only the setup is left of the formula");
        assert_eq!(missing.tokens(9_999), 4_096, "never more than the prompt");
    }

    #[test]
    fn h12_delay_is_none_where_bytes_or_bandwidth_are_unknown() {
        let unknown = [
            TransferTiming { kv_bytes_per_token: None, ..LLAMA_8B },
            TransferTiming { bandwidth_gb_s: None, ..LLAMA_8B },
            TransferTiming { bandwidth_gb_s: Some(0.0), ..LLAMA_8B },
        ];
        for timing in unknown {
            assert_eq!((timing.delay(7), timing.validate()), (None, Ok(())), "{timing:?}");
        }
        assert_eq!(TransferTiming { kv_bytes_per_token: Some(0), ..LLAMA_8B }.delay(7), Some(Duration::ZERO));
    }

    #[test]
    fn h12_bad_bandwidths_are_refused_by_name() {
        let cases = [(-1.0, "-1"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")];
        for (bandwidth, shown) in cases {
            let timing = TransferTiming { bandwidth_gb_s: Some(bandwidth), ..LLAMA_8B };
            let message = timing.validate().expect_err("must be refused").to_string();
            assert_eq!(message, format!("bandwidth_gb_s = {shown}: at least 0 and finite"));
            assert_eq!(timing.delay(1), None, "and it does no harm where nobody checked it");
        }
    }

    #[test]
    fn case_102_delay_is_monotone_in_tokens_and_inverse_in_bandwidth() {
        let timing = TransferTiming { mode: TransferTimingMode::MissingTokens, ..LLAMA_8B };
        let delays: Vec<_> = (0..=4_096).map(|tokens| timing.delay(tokens).expect("known")).collect();
        assert!(delays.is_sorted_by(|a, b| a < b));
        let double = TransferTiming { bandwidth_gb_s: Some(50.0), ..timing };
        for tokens in [2, 100, 4_096] {
            let (slow, fast) = (timing.delay(tokens).expect("known"), double.delay(tokens).expect("known"));
            assert!(slow.abs_diff(fast * 2) <= Duration::from_nanos(1), "{tokens}: {slow:?} {fast:?}");
        }
    }

    #[test]
    fn extreme_values_saturate() {
        let huge = TransferTiming {
            full_prompt_tokens: u32::MAX,
            kv_bytes_per_token: Some(u64::MAX),
            bandwidth_gb_s: Some(f64::MIN_POSITIVE),
            setup: Duration::MAX,
            ..LLAMA_8B
        };
        assert_eq!(huge.cost(0).map(|cost| cost.wire), Some(Duration::from_nanos(u64::MAX)));
        assert_eq!(huge.delay(0), Some(Duration::MAX));
    }

    #[test]
    fn overlap_hides_setup_first_and_never_more_than_all() {
        let ms = Duration::from_millis;
        let cost = TransferCost { setup: ms(2), wire: ms(10) };
        assert_eq!(cost.exposed(ms(0)), cost);
        assert_eq!(cost.exposed(ms(1)), TransferCost { setup: ms(1), wire: ms(10) });
        assert_eq!(cost.exposed(ms(5)), TransferCost { setup: ms(0), wire: ms(7) });
        assert_eq!(cost.exposed(ms(12)).alone(), ms(0));
        assert_eq!(cost.exposed(Duration::MAX).alone(), ms(0));
        assert_eq!(cost.scaled(Speedup::Factor(4.0)), TransferCost { setup: ms(2) / 4, wire: ms(10) / 4 });
        assert_eq!(cost.scaled(Speedup::Instant).alone(), ms(0));
    }

    #[cfg(feature = "serde")]
    #[test]
    fn h14_timing_and_cost_survive_json() {
        let timing = TransferTiming { setup: Duration::from_micros(50), ..LLAMA_8B };
        let json = serde_json::to_string(&timing).expect("serialises");
        let expected = r#"{"mode":"full_prompt","full_prompt_tokens":4096,"kv_bytes_per_token":131072,"#.to_owned()
            + r#""bandwidth_gb_s":25.0,"setup_ms":0.05}"#;
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_str::<TransferTiming>(&json).expect(&json), timing);
        let cost = timing.cost(0).expect("known");
        let json = serde_json::to_string(&cost).expect("serialises");
        assert_eq!(serde_json::from_str::<TransferCost>(&json).expect(&json), cost);
        let negative = r#"{"setup_ms":-1,"wire_ms":0}"#;
        let message = serde_json::from_str::<TransferCost>(negative).expect_err("must be refused").to_string();
        assert!(message.contains("from 0 to 1.8446744073709552e22"), "{message}");
    }
}
