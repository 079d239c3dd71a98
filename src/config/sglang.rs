//! Options of the SGLang kind.

use std::time::Duration;

use crate::error::ConfigError;

/// The order in which SGLang tries waiting requests.
///
/// `hrrn`, `routing-key` and `shortest-prefill-first` are not built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum SglangPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Longest cached prefix first; first come, first served while more than 128 wait.
    Lpm,
    /// Those together that share a branch of the prefix tree, the branch that most wait for first.
    DfsWeight,
    /// Longest output first.
    Lof,
    /// Shuffled at every attempt, from the engine's seed.
    Random,
}

impl SglangPolicy {
    /// Whether it looks into the prefix cache; without one it falls back to first come, first served.
    pub(crate) fn is_cache_aware(self) -> bool {
        matches!(self, Self::Lpm | Self::DfsWeight)
    }
}

/// Which unused leaf of the prefix tree is evicted first. `tlru` is not built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "lowercase"))]
pub enum RadixEvictionPolicy {
    /// Least recently used.
    #[default]
    Lru,
    /// Least often stored again, then least recently used.
    Lfu,
    /// Oldest.
    Fifo,
    /// Most recently used.
    Mru,
    /// Youngest.
    Filo,
    /// Lowest request priority, then least recently used.
    Priority,
    /// Those stored only once, then least recently used (segmented LRU).
    Slru,
}

/// When the decode side of a handoff reserves its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum DecodeAllocationPolicy {
    /// Before the prefill side computes anything.
    #[default]
    Early,
    /// When the prompt is computed: a long prefill holds no pages of the decode side meanwhile.
    PrefillComplete,
}

/// Options of the SGLang kind, in SGLang's own words. The context length is
/// [`crate::EngineConfig::max_model_len`].
///
/// Defaults are those of SGLang 0.5.23 on a GPU with 80 GB, with a pool as large as that of
/// [`crate::VllmConfig::default`].
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct SglangConfig {
    /// Tokens per page, the unit of the pool and of the prefix tree; at least 1.
    pub page_size: u32,
    /// Size of the KV pool in tokens, rounded down to whole pages; at least two pages.
    pub max_total_tokens: u32,
    /// Most running requests; at least 1. SGLang's automatic value for the default pool is 2048.
    pub max_running_requests: u32,
    /// Most tokens of one prefill batch, at least 1. With chunked prefill off, its first request may
    /// have more.
    pub max_prefill_tokens: u32,
    /// Tokens of one prefill batch at which a prompt is split, at least 1; `None`: prompts are not split.
    pub chunked_prefill_size: Option<u32>,
    /// Keep no prefixes.
    pub disable_radix_cache: bool,
    /// The order in which waiting requests are tried.
    pub schedule_policy: SglangPolicy,
    /// Scales the share of their remaining output that running requests are expected to take; greater
    /// than 0 and finite.
    pub schedule_conservativeness: f64,
    /// Which unused leaf is evicted first.
    pub radix_eviction_policy: RadixEvictionPolicy,
    /// Let running requests decode in prefill passes.
    pub enable_mixed_chunk: bool,
    /// Order by [`crate::Request::priority`] first, and let a waiting request preempt running ones.
    pub enable_priority_scheduling: bool,
    /// Smaller priorities go first; otherwise larger ones do.
    pub schedule_low_priority_values_first: bool,
    /// A running request is preempted only if its priority is lower by more than this.
    pub priority_scheduling_preemption_threshold: u32,
    /// Most requests of one prefill batch; at least 1.
    pub prefill_max_requests: Option<u32>,
    /// A cancelled request that runs takes part in one more pass, as in SGLang, before its KV is free.
    /// `false`: it is free at once.
    pub abort_after_next_forward: bool,
    /// End a request that the empty pool cannot hold with [`crate::FinishReason::OutOfMemory`]. The
    /// real engine lets it wait for ever and block the queue; `false` does the same.
    pub end_outgrown_requests: bool,
    /// Tokens that the decode side of a handoff keeps free for each request that runs or has pages, and for the
    /// one that is to get some; at least 1, or two could take each other's pages for ever.
    pub num_reserved_decode_tokens: u32,
    /// When the decode side of a handoff reserves its pages. It sets which side
    /// [`crate::CoordinatorConfig::of_kind`] asks first; the scheduler itself serves either order.
    pub disaggregation_decode_allocation_policy: DecodeAllocationPolicy,
    /// Find prefixes of transferred prompts in the prefix cache, and keep them there.
    pub disaggregation_decode_enable_radix_cache: bool,
    /// How long the pages of a source are held without a word of its transfer (`SGLANG_DISAGGREGATION_WAITING_TIMEOUT`,
    /// 300 s). SGLang has no heartbeats per request; one extends this to at least ⅔ of it ahead. Engine time, never
    /// divided by the speedup.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "disaggregation_waiting_timeout_ms", with = "crate::time::duration_ms")
    )]
    pub disaggregation_waiting_timeout: Duration,
    /// How long the pages of a request that was given up during its transfer stay without a word of the transfer's
    /// end (SGLang's deferred release: 30 s). Engine time, never divided by the speedup.
    #[cfg_attr(feature = "serde", serde(rename = "transfer_guard_ms", with = "crate::time::duration_ms"))]
    pub transfer_guard: Duration,
}

impl Default for SglangConfig {
    fn default() -> Self {
        Self {
            page_size: 1,
            max_total_tokens: 467_264,
            max_running_requests: 2048,
            max_prefill_tokens: 16_384,
            chunked_prefill_size: Some(8192),
            disable_radix_cache: false,
            schedule_policy: SglangPolicy::Fcfs,
            schedule_conservativeness: 1.0,
            radix_eviction_policy: RadixEvictionPolicy::Lru,
            enable_mixed_chunk: false,
            enable_priority_scheduling: false,
            schedule_low_priority_values_first: false,
            priority_scheduling_preemption_threshold: 10,
            prefill_max_requests: None,
            abort_after_next_forward: false,
            end_outgrown_requests: true,
            num_reserved_decode_tokens: 512,
            disaggregation_decode_allocation_policy: DecodeAllocationPolicy::Early,
            disaggregation_decode_enable_radix_cache: false,
            disaggregation_waiting_timeout: Duration::from_secs(300),
            transfer_guard: Duration::from_secs(30),
        }
    }
}

impl SglangConfig {
    setters! {
        /// Sets `page_size`.
        with_page_size, page_size: u32;
        /// Sets `max_total_tokens`.
        with_max_total_tokens, max_total_tokens: u32;
        /// Sets `max_running_requests`.
        with_max_running_requests, max_running_requests: u32;
        /// Sets `max_prefill_tokens`.
        with_max_prefill_tokens, max_prefill_tokens: u32;
        /// Sets `chunked_prefill_size`.
        with_chunked_prefill_size, chunked_prefill_size: Option<u32>;
        /// Sets `disable_radix_cache`.
        with_disable_radix_cache, disable_radix_cache: bool;
        /// Sets `schedule_policy`.
        with_schedule_policy, schedule_policy: SglangPolicy;
        /// Sets `schedule_conservativeness`.
        with_schedule_conservativeness, schedule_conservativeness: f64;
        /// Sets `radix_eviction_policy`.
        with_radix_eviction_policy, radix_eviction_policy: RadixEvictionPolicy;
        /// Sets `enable_mixed_chunk`.
        with_enable_mixed_chunk, enable_mixed_chunk: bool;
        /// Sets `enable_priority_scheduling`.
        with_enable_priority_scheduling, enable_priority_scheduling: bool;
        /// Sets `schedule_low_priority_values_first`.
        with_schedule_low_priority_values_first, schedule_low_priority_values_first: bool;
        /// Sets `priority_scheduling_preemption_threshold`.
        with_priority_scheduling_preemption_threshold, priority_scheduling_preemption_threshold: u32;
        /// Sets `prefill_max_requests`.
        with_prefill_max_requests, prefill_max_requests: Option<u32>;
        /// Sets `abort_after_next_forward`.
        with_abort_after_next_forward, abort_after_next_forward: bool;
        /// Sets `end_outgrown_requests`.
        with_end_outgrown_requests, end_outgrown_requests: bool;
        /// Sets `num_reserved_decode_tokens`.
        with_num_reserved_decode_tokens, num_reserved_decode_tokens: u32;
        /// Sets `disaggregation_decode_allocation_policy`.
        with_disaggregation_decode_allocation_policy, disaggregation_decode_allocation_policy: DecodeAllocationPolicy;
        /// Sets `disaggregation_decode_enable_radix_cache`.
        with_disaggregation_decode_enable_radix_cache, disaggregation_decode_enable_radix_cache: bool;
        /// Sets `disaggregation_waiting_timeout`.
        with_disaggregation_waiting_timeout, disaggregation_waiting_timeout: Duration;
        /// Sets `transfer_guard`.
        with_transfer_guard, transfer_guard: Duration;
    }

    /// Pages of the pool.
    pub(crate) fn num_pages(&self) -> u32 {
        self.max_total_tokens / self.page_size.max(1)
    }

    pub(super) fn validate_core(&self) -> Result<(), ConfigError> {
        let at_least_1 = [
            ("page_size", Some(self.page_size)),
            ("max_running_requests", Some(self.max_running_requests)),
            ("max_prefill_tokens", Some(self.max_prefill_tokens)),
            ("chunked_prefill_size", self.chunked_prefill_size),
            ("prefill_max_requests", self.prefill_max_requests),
            ("num_reserved_decode_tokens", Some(self.num_reserved_decode_tokens)),
        ];
        for (field, value) in at_least_1 {
            if value == Some(0) {
                return Err(ConfigError::new(field, 0, "at least 1"));
            }
        }
        if self.num_pages() < 2 {
            let allowed = format!("at least two pages of page_size = {}", self.page_size);
            return Err(ConfigError::new("max_total_tokens", self.max_total_tokens, allowed));
        }
        if let Some(chunk) = self.chunked_prefill_size
            && !chunk.is_multiple_of(self.page_size)
        {
            let allowed = format!("a multiple of page_size = {}", self.page_size);
            return Err(ConfigError::new("chunked_prefill_size", chunk, allowed));
        }
        if !(self.schedule_conservativeness > 0.0 && self.schedule_conservativeness.is_finite()) {
            let value = self.schedule_conservativeness;
            return Err(ConfigError::new("schedule_conservativeness", value, "greater than 0 and finite"));
        }
        Ok(())
    }

    /// The checks of SGLang's own start-up.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.enable_mixed_chunk && self.chunked_prefill_size.is_none() {
            return Err(ConfigError::new("enable_mixed_chunk", true, "false where chunked_prefill_size is off"));
        }
        let orders_by_priority = matches!(self.schedule_policy, SglangPolicy::Fcfs | SglangPolicy::Lof);
        if self.enable_priority_scheduling && !orders_by_priority {
            let allowed = "false unless schedule_policy is fcfs or lof";
            return Err(ConfigError::new("enable_priority_scheduling", true, allowed));
        }
        let most = self.num_pages().saturating_mul(self.page_size) / 2;
        if self.max_running_requests > most {
            let allowed = format!("at most {most}: half the tokens of the pool");
            return Err(ConfigError::new("max_running_requests", self.max_running_requests, allowed));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::{EngineConfig, EngineKind, SglangConfig, SglangPolicy};

    fn engine(sglang: SglangConfig) -> EngineConfig {
        EngineConfig::new(EngineKind::Sglang(sglang))
    }

    #[test]
    fn the_default_is_valid_and_as_large_as_vllms() {
        let config = engine(SglangConfig::default());
        assert_eq!(config.validate(), Ok(()));
        let tokens = |kind: &EngineKind| kind.usable_blocks() * u64::from(kind.block_size());
        assert_eq!(tokens(&config.kind), tokens(&EngineConfig::default().kind));
    }

    #[test]
    fn errors_name_field_value_and_what_is_allowed() {
        let sglang = SglangConfig::default;
        let cases = [
            (sglang().with_page_size(0), "kind.sglang.page_size = 0: at least 1"),
            (sglang().with_chunked_prefill_size(Some(0)), "kind.sglang.chunked_prefill_size = 0: at least 1"),
            (sglang().with_num_reserved_decode_tokens(0), "kind.sglang.num_reserved_decode_tokens = 0: at least 1"),
            (
                sglang().with_page_size(64).with_max_total_tokens(127),
                "kind.sglang.max_total_tokens = 127: at least two pages of page_size = 64",
            ),
            (
                sglang().with_schedule_conservativeness(f64::NAN),
                "kind.sglang.schedule_conservativeness = NaN: greater than 0 and finite",
            ),
            (
                sglang().with_page_size(16).with_chunked_prefill_size(Some(40)),
                "kind.sglang.chunked_prefill_size = 40: a multiple of page_size = 16",
            ),
            (
                sglang().with_enable_mixed_chunk(true).with_chunked_prefill_size(None),
                "kind.sglang.enable_mixed_chunk = true: false where chunked_prefill_size is off",
            ),
            (
                sglang().with_enable_priority_scheduling(true).with_schedule_policy(SglangPolicy::Lpm),
                "kind.sglang.enable_priority_scheduling = true: false unless schedule_policy is fcfs or lof",
            ),
            (
                sglang().with_max_total_tokens(100).with_max_running_requests(51),
                "kind.sglang.max_running_requests = 51: at most 50: half the tokens of the pool",
            ),
        ];
        for (config, expected) in cases {
            let error = engine(config).validate().expect_err(expected);
            assert_eq!(error.to_string(), expected);
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn json_uses_sglangs_names_and_refuses_what_is_not_built() {
        let json = |fields: &str| EngineConfig::from_json(&format!(r#"{{"kind": {{"sglang": {{{fields}}}}}}}"#));
        let config = json(r#""schedule_policy": "dfs-weight", "radix_eviction_policy": "slru", "page_size": 64"#);
        let expected = SglangConfig::default().with_schedule_policy(SglangPolicy::DfsWeight).with_page_size(64);
        let expected = expected.with_radix_eviction_policy(crate::RadixEvictionPolicy::Slru);
        let late = r#""disaggregation_decode_allocation_policy": "prefill_complete", "num_reserved_decode_tokens": 64,
            "disaggregation_waiting_timeout_ms": 2.5, "transfer_guard_ms": 1"#;
        let handoffs = SglangConfig::default()
            .with_disaggregation_decode_allocation_policy(crate::DecodeAllocationPolicy::PrefillComplete)
            .with_num_reserved_decode_tokens(64)
            .with_disaggregation_waiting_timeout(std::time::Duration::from_micros(2_500))
            .with_transfer_guard(std::time::Duration::from_millis(1));
        assert_eq!(json(late).expect("valid").kind, EngineKind::Sglang(handoffs));
        assert_eq!(config.expect("valid").kind, EngineKind::Sglang(expected));
        for (fields, expected) in [
            (r#""schedule_policy": "hrrn""#, "unknown variant `hrrn`"),
            (r#""radix_eviction_policy": "tlru""#, "unknown variant `tlru`"),
            (r#""block_size": 16"#, "unknown field `block_size`"),
        ] {
            let error = json(fields).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
