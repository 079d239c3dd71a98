//! How one handoff is driven: one preset per engine kind, each field an option.

use std::time::Duration;

use crate::config::{DecodeAllocationPolicy, EngineKind, FirstToken, Speedup, setters};
use crate::error::ConfigError;

/// Which side is asked first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum HandoffOrder {
    /// The source prefills, then the destination reserves (vLLM, TensorRT-LLM).
    #[default]
    SourceFirst,
    /// The destination reserves before the source computes anything (SGLang).
    DestinationFirst,
}

/// What happens to a destination that waits for KV which will not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum TransferFailurePolicy {
    /// The handoff fails.
    #[default]
    Fail,
    /// The destination computes the prompt itself (vLLM: `kv_load_failure_policy = recompute`).
    Recompute,
}

/// Whether chunks are sent while later ones are still computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum TransferOverlap {
    /// The transfer begins when the prefill is done.
    #[default]
    AfterPrefill,
    /// Each chunk is sent when it is done; only what does not fit under the rest of the prefill is waited for.
    ChunkWise,
}

/// How a [`super::Coordinator`] drives a handoff. The default is [`CoordinatorConfig::vllm`].
///
/// Time-outs and heartbeats are engine time; `speedup` does not divide them.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct CoordinatorConfig {
    /// Which side is asked first.
    pub order: HandoffOrder,
    /// Where the first output token comes from.
    pub first_token: FirstToken,
    /// What a failed transfer, or a held source that is gone, means for the destination.
    pub on_transfer_failure: TransferFailurePolicy,
    /// Whether the transfer lies under the prefill.
    pub overlap: TransferOverlap,
    /// What modelled transfer times are divided by; the same as on both engines.
    pub speedup: Speedup,
    /// How long the handoff may take up to the activation, the transfer not counted; greater than 0.
    #[cfg_attr(feature = "serde", serde(rename = "timeout_ms", with = "crate::time::duration_ms"))]
    pub timeout: Duration,
    /// How long the transfer may take; greater than 0. With `None` a transfer whose end is never reported waits until it
    /// is cancelled.
    #[cfg_attr(feature = "serde", serde(rename = "transfer_timeout_ms", with = "crate::time::optional_duration_ms"))]
    pub transfer_timeout: Option<Duration>,
    /// How often a held source hears that its destination still wants it; greater than 0. `None`: never.
    #[cfg_attr(feature = "serde", serde(rename = "heartbeat_ms", with = "crate::time::optional_duration_ms"))]
    pub heartbeat: Option<Duration>,
    /// How long the answers to the final release and cancels are waited for; greater than 0.
    #[cfg_attr(feature = "serde", serde(rename = "settle_timeout_ms", with = "crate::time::duration_ms"))]
    pub settle_timeout: Duration,
}

impl Default for CoordinatorConfig {
    fn default() -> Self {
        Self::vllm()
    }
}

impl CoordinatorConfig {
    /// vLLM 0.33 with the NIXL connector: source first, last prompt token recomputed, failed loads fail, a heartbeat every
    /// sixth of the source's 30 s lease.
    ///
    /// NIXL waits for a read without end; so that a lost report holds no block for ever, the transfer times out after the
    /// 480 s of the Mooncake connector. The overall 300 s are those of dynamo-mocker, the 30 s for the last answers
    /// SGLang's deferred release.
    #[must_use]
    pub fn vllm() -> Self {
        Self {
            order: HandoffOrder::SourceFirst,
            first_token: FirstToken::Recomputed,
            on_transfer_failure: TransferFailurePolicy::Fail,
            overlap: TransferOverlap::AfterPrefill,
            speedup: Speedup::default(),
            timeout: Duration::from_secs(300),
            transfer_timeout: Some(Duration::from_secs(480)),
            heartbeat: Some(Duration::from_secs(5)),
            settle_timeout: Duration::from_secs(30),
        }
    }

    /// SGLang 0.5: destination first, first token carried over, chunks sent while prefilling, 300 s for the KV to arrive.
    /// Its heartbeats are between servers, not per request.
    #[must_use]
    pub fn sglang() -> Self {
        Self {
            order: HandoffOrder::DestinationFirst,
            first_token: FirstToken::CarriedOver,
            overlap: TransferOverlap::ChunkWise,
            transfer_timeout: Some(Duration::from_secs(300)),
            heartbeat: None,
            ..Self::vllm()
        }
    }

    /// TensorRT-LLM: source first, first token carried over, 60 s for the transfer.
    #[must_use]
    pub fn tensorrt_llm() -> Self {
        Self {
            first_token: FirstToken::CarriedOver,
            transfer_timeout: Some(Duration::from_secs(60)),
            heartbeat: None,
            ..Self::vllm()
        }
    }

    /// The preset of a decode engine's kind, with its options.
    #[must_use]
    pub fn of_kind(kind: &EngineKind) -> Self {
        match kind {
            EngineKind::Vllm(options) => Self::vllm().with_first_token(options.first_token),
            EngineKind::Sglang(options) => match options.disaggregation_decode_allocation_policy {
                DecodeAllocationPolicy::Early => Self::sglang(),
                // No chunk can be sent before there are pages for it.
                DecodeAllocationPolicy::PrefillComplete => {
                    Self::sglang().with_order(HandoffOrder::SourceFirst).with_overlap(TransferOverlap::AfterPrefill)
                }
            },
        }
    }

    setters! {
        /// Sets `order`.
        with_order, order: HandoffOrder;
        /// Sets `first_token`.
        with_first_token, first_token: FirstToken;
        /// Sets `on_transfer_failure`.
        with_on_transfer_failure, on_transfer_failure: TransferFailurePolicy;
        /// Sets `overlap`.
        with_overlap, overlap: TransferOverlap;
        /// Sets `speedup`.
        with_speedup, speedup: Speedup;
        /// Sets `timeout`.
        with_timeout, timeout: Duration;
        /// Sets `transfer_timeout`.
        with_transfer_timeout, transfer_timeout: Option<Duration>;
        /// Sets `heartbeat`.
        with_heartbeat, heartbeat: Option<Duration>;
        /// Sets `settle_timeout`.
        with_settle_timeout, settle_timeout: Duration;
    }

    /// Checks the values.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.speedup.validate()?;
        let durations = [
            ("timeout", Some(self.timeout)),
            ("transfer_timeout", self.transfer_timeout),
            ("heartbeat", self.heartbeat),
            ("settle_timeout", Some(self.settle_timeout)),
        ];
        match durations.into_iter().find(|(_, duration)| *duration == Some(Duration::ZERO)) {
            Some((field, _)) => Err(ConfigError::new(field, "0ns", "greater than 0")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SglangConfig;

    #[test]
    fn every_preset_is_valid_and_has_its_engines_figures() {
        let presets = [
            (CoordinatorConfig::vllm(), HandoffOrder::SourceFirst, FirstToken::Recomputed, 480, Some(5)),
            (CoordinatorConfig::sglang(), HandoffOrder::DestinationFirst, FirstToken::CarriedOver, 300, None),
            (CoordinatorConfig::tensorrt_llm(), HandoffOrder::SourceFirst, FirstToken::CarriedOver, 60, None),
        ];
        for (config, order, first_token, transfer_secs, heartbeat_secs) in presets {
            assert_eq!(config.validate(), Ok(()));
            assert_eq!((config.order, config.first_token), (order, first_token));
            assert_eq!(config.timeout, Duration::from_secs(300));
            assert_eq!(config.transfer_timeout, Some(Duration::from_secs(transfer_secs)));
            assert_eq!(config.heartbeat, heartbeat_secs.map(Duration::from_secs));
        }
    }

    #[test]
    fn sglangs_allocation_policy_says_who_goes_first() {
        let of = |policy| {
            let sglang = SglangConfig::default().with_disaggregation_decode_allocation_policy(policy);
            CoordinatorConfig::of_kind(&EngineKind::Sglang(sglang))
        };
        assert_eq!(of(DecodeAllocationPolicy::Early), CoordinatorConfig::sglang());
        let late = of(DecodeAllocationPolicy::PrefillComplete);
        assert_eq!((late.order, late.overlap), (HandoffOrder::SourceFirst, TransferOverlap::AfterPrefill));
        assert_eq!(late.first_token, FirstToken::CarriedOver);
    }

    #[test]
    fn durations_of_zero_and_bad_factors_are_refused_by_name() {
        let zero = Duration::ZERO;
        let cases = [
            (CoordinatorConfig::default().with_timeout(zero), "timeout = 0ns: greater than 0"),
            (CoordinatorConfig::default().with_transfer_timeout(Some(zero)), "transfer_timeout = 0ns: greater than 0"),
            (CoordinatorConfig::default().with_heartbeat(Some(zero)), "heartbeat = 0ns: greater than 0"),
            (CoordinatorConfig::default().with_settle_timeout(zero), "settle_timeout = 0ns: greater than 0"),
            (
                CoordinatorConfig::default().with_speedup(Speedup::Factor(-2.0)),
                "speedup.factor = -2: greater than 0 and finite",
            ),
        ];
        for (config, expected) in cases {
            assert_eq!(config.validate().expect_err(expected).to_string(), expected);
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn a_config_survives_json_and_missing_fields_have_their_defaults() {
        for config in [
            CoordinatorConfig::vllm(),
            CoordinatorConfig::sglang(),
            CoordinatorConfig::tensorrt_llm().with_transfer_timeout(None),
        ] {
            let json = serde_json::to_string(&config).expect("serialises");
            assert_eq!(serde_json::from_str::<CoordinatorConfig>(&json).expect(&json), config);
        }
        let read: CoordinatorConfig =
            serde_json::from_str(r#"{"timeout_ms": 2.5, "heartbeat_ms": null}"#).expect("reads");
        let expected = CoordinatorConfig::vllm().with_timeout(Duration::from_micros(2_500)).with_heartbeat(None);
        assert_eq!(read, expected);
    }
}
