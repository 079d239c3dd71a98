//! Configuration: what all engine kinds share, and one struct per kind in the engine's own words.
//!
//! Fields are public and every struct has a default and `with_…` methods. Strict validation
//! ([`EngineConfig::validate`]) is what the live engine does at start; the pure core accepts odd
//! values as long as they cannot make it panic.

use std::time::Duration;

use crate::error::ConfigError;
use crate::timing::TimingConfig;

/// `with_…` methods for public fields.
macro_rules! setters {
    ($($(#[$doc:meta])* $method:ident, $field:ident: $type:ty;)*) => {
        $($(#[$doc])* #[must_use] pub fn $method(mut self, $field: $type) -> Self { self.$field = $field; self })*
    };
}
pub(crate) use setters;

#[cfg(feature = "serde")]
mod json;
mod sglang;

pub use sglang::{DecodeAllocationPolicy, RadixEvictionPolicy, SglangConfig, SglangPolicy};

/// How modelled time relates to engine time. Leases and time-outs are never divided.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Speedup {
    /// Modelled pass, start-up and transfer times are divided by this, greater than 0 and finite.
    Factor(f64),
    /// Modelled times are zero.
    Instant,
}

impl Default for Speedup {
    fn default() -> Self {
        Self::Factor(1.0)
    }
}

impl Speedup {
    /// The modelled time `duration` as engine time, rounded to a nanosecond, saturating.
    #[must_use]
    pub fn scale(self, duration: Duration) -> Duration {
        match self {
            Self::Instant => Duration::ZERO,
            Self::Factor(1.0) => duration,
            Self::Factor(factor) => {
                let nanos = duration.as_nanos() as f64 / factor;
                // The cast saturates, and NaN becomes 0.
                Duration::from_nanos(nanos.round() as u64)
            }
        }
    }

    pub(crate) fn validate(self) -> Result<(), ConfigError> {
        match self {
            Self::Factor(factor) if !(factor > 0.0 && factor.is_finite()) => {
                Err(ConfigError::new("speedup.factor", factor, "greater than 0 and finite"))
            }
            _ => Ok(()),
        }
    }
}

/// Whether an engine plans passes and admits requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum SchedulingState {
    /// Everything runs.
    #[default]
    Running,
    /// Running requests go on; waiting ones stay in the queue.
    NoNewAdmissions,
    /// No pass is planned. Commands and cancels are still served.
    Stopped,
}

/// The engine that is imitated, with its own options.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum EngineKind {
    /// vLLM's V1 scheduler.
    Vllm(VllmConfig),
    /// SGLang's scheduler; its pages are called blocks where the kinds share a name.
    Sglang(SglangConfig),
}

impl EngineKind {
    /// KV blocks that can be handed out.
    #[must_use]
    pub fn usable_blocks(&self) -> u64 {
        match self {
            Self::Vllm(vllm) => u64::from(vllm.num_gpu_blocks).saturating_sub(1),
            Self::Sglang(sglang) => u64::from(sglang.num_pages()),
        }
    }

    /// Tokens per KV block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        match self {
            Self::Vllm(vllm) => vllm.block_size,
            Self::Sglang(sglang) => sglang.page_size,
        }
    }

    /// KV blocks that `tokens` tokens need.
    #[must_use]
    pub fn blocks_for(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.block_size().max(1)))
    }

    /// KV blocks that the pool must have for a prompt of so many tokens to be admitted at all.
    #[must_use]
    pub fn blocks_to_admit(&self, prompt_tokens: u64) -> u64 {
        match self {
            Self::Vllm(_) => self.blocks_for(prompt_tokens),
            // Prompt, one output token and one page must be *less* than the pool.
            Self::Sglang(_) => self.blocks_for(prompt_tokens.saturating_add(2)).saturating_add(1),
        }
    }
}

/// Configuration of one engine.
///
/// The default is vLLM serving Llama-3.1-8B on one H100 with 80 GB: 29,205 blocks of 16 tokens, a
/// budget of 8,192 tokens and 1,024 sequences per pass.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct EngineConfig {
    /// The engine that is imitated.
    pub kind: EngineKind,
    /// Most tokens of a request, prompt and output together; at least 2.
    pub max_model_len: u32,
    /// Generated tokens are below this; at least 1.
    pub vocab_size: u32,
    /// Seed of generated tokens and of ids that the engine makes.
    pub seed: u64,
    /// How long a pass takes.
    pub timing: TimingConfig,
    /// How modelled time relates to engine time.
    pub speedup: Speedup,
    /// Modelled time from start to the first pass.
    #[cfg_attr(feature = "serde", serde(rename = "startup_ms", with = "crate::time::duration_ms"))]
    pub startup: Duration,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self::new(EngineKind::Vllm(VllmConfig::default()))
    }
}

impl EngineConfig {
    /// The default configuration for an engine of this kind.
    #[must_use]
    pub fn new(kind: EngineKind) -> Self {
        Self {
            kind,
            max_model_len: 131_072,
            vocab_size: 128_256,
            seed: 0,
            timing: TimingConfig::default(),
            speedup: Speedup::default(),
            startup: Duration::ZERO,
        }
    }

    setters! {
        /// Sets `max_model_len`.
        with_max_model_len, max_model_len: u32;
        /// Sets `vocab_size`.
        with_vocab_size, vocab_size: u32;
        /// Sets `seed`.
        with_seed, seed: u64;
        /// Sets `timing`.
        with_timing, timing: TimingConfig;
        /// Sets `speedup`.
        with_speedup, speedup: Speedup;
        /// Sets `startup`.
        with_startup, startup: Duration;
    }

    /// Checks every field and every relation between fields that a real engine checks at start.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_core()?;
        match &self.kind {
            EngineKind::Vllm(vllm) => vllm.validate(self.max_model_len).map_err(|error| error.within("kind.vllm")),
            EngineKind::Sglang(sglang) => sglang.validate().map_err(|error| error.within("kind.sglang")),
        }
    }

    /// Checks only what would make the pure core panic or divide by zero.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub(crate) fn validate_core(&self) -> Result<(), ConfigError> {
        if self.max_model_len < 2 {
            return Err(ConfigError::new(
                "max_model_len",
                self.max_model_len,
                "at least 2: one prompt token and one output token",
            ));
        }
        if self.vocab_size == 0 {
            return Err(ConfigError::new("vocab_size", 0, "at least 1"));
        }
        self.speedup.validate()?;
        self.timing.validate().map_err(|error| error.within("timing"))?;
        match &self.kind {
            EngineKind::Vllm(vllm) => vllm.validate_core().map_err(|error| error.within("kind.vllm")),
            EngineKind::Sglang(sglang) => sglang.validate_core().map_err(|error| error.within("kind.sglang")),
        }
    }

    /// Reads a configuration from JSON of at most 1 MiB; fields that are left out have their defaults.
    ///
    /// # Errors
    /// An unknown field, a value of the wrong type or out of range: the error names the field by its
    /// path, the value and what is allowed. The result is strictly valid ([`EngineConfig::validate`]).
    #[cfg(feature = "serde")]
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        let config: Self = json::read(json)?;
        config.validate()?;
        Ok(config)
    }
}

/// The order in which waiting requests are admitted, and who is preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum VllmPolicy {
    /// First come, first served; the last admitted is preempted.
    #[default]
    Fcfs,
    /// Smallest `(priority, arrival, id)` first; the largest `(priority, arrival)` is preempted.
    Priority,
}

/// Who is preempted by priority among sequences of equal priority and arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum TieVictim {
    /// The first in the list of running sequences, as vLLM does. Two equals that do not fit together
    /// can then preempt each other for ever.
    First,
    /// The last in that list: the first always gets on.
    #[default]
    Last,
}

/// What becomes of a request whose KV could not be loaded from another engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum LoadFailurePolicy {
    /// It ends with [`crate::FinishReason::TransferFailed`].
    #[default]
    Fail,
    /// It computes what is missing.
    Recompute,
}

/// Where the first output token of a request comes from that is handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum FirstToken {
    /// The destination computes the last prompt token again and samples (vLLM).
    #[default]
    Recomputed,
    /// The source's token is carried over and the destination goes on with the second one (SGLang, TensorRT-LLM).
    CarriedOver,
}

/// Options of the vLLM kind, in vLLM's own words; values of 0 mean "off" only where stated.
///
/// Defaults are those of vLLM 0.33 as a server on a GPU with 70 to 160 GiB.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct VllmConfig {
    /// Tokens per KV block; at least 1.
    pub block_size: u32,
    /// Raw size of the block pool, the null block included; at least 2.
    pub num_gpu_blocks: u32,
    /// Most running requests; at least 1.
    pub max_num_seqs: u32,
    /// Lower cap on admission into the running requests.
    pub max_num_active_seqs: Option<u32>,
    /// Token budget of one pass; at least 1.
    pub max_num_batched_tokens: u32,
    /// Reuse KV blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Split prompts over passes.
    pub enable_chunked_prefill: bool,
    /// Most tokens of one request in one pass; 0: off.
    pub long_prefill_token_threshold: u32,
    /// Raise that cap to budget / requests.
    pub long_prefill_token_threshold_adaptive: bool,
    /// Queue order and choice of victims.
    pub policy: VllmPolicy,
    /// Who is preempted among equals by priority.
    pub tie_victim: TieVictim,
    /// Share of `num_gpu_blocks` that admissions leave free, 0 up to but not including 1.
    pub watermark: f64,
    /// Admit only what fits the free blocks as a whole.
    pub scheduler_reserve_full_isl: bool,
    /// At least so many passes between passes that carry prefill, while decodes run; 1: off.
    pub prefill_schedule_interval: u32,
    /// End a request that the whole pool cannot hold with [`crate::FinishReason::OutOfMemory`].
    /// The real engine lets it wait for ever and block the queue; `false` does the same.
    pub end_outgrown_requests: bool,
    /// How long a source's blocks are held without a heartbeat (vLLM's `kv_lease_duration`, 30 s). A
    /// heartbeat extends it to at least ⅔ of it ahead; 0: nothing is held beyond its pass. Engine time,
    /// never divided by the speedup.
    #[cfg_attr(feature = "serde", serde(rename = "kv_lease_ms", with = "crate::time::duration_ms"))]
    pub kv_lease: Duration,
    /// What a failed load does to its request (vLLM's default: fail).
    pub kv_load_failure_policy: LoadFailurePolicy,
    /// How long the blocks of a request that was given up during its transfer stay without a word of the
    /// transfer's end. vLLM itself waits for that word without a limit; 30 s is SGLang's limit, and ours. Engine
    /// time, never divided by the speedup.
    #[cfg_attr(feature = "serde", serde(rename = "transfer_guard_ms", with = "crate::time::duration_ms"))]
    pub transfer_guard: Duration,
    /// What a destination does about the first output token (vLLM: recompute). One that carries it over but
    /// is given none samples it.
    pub first_token: FirstToken,
    /// Destinations of handoffs go before all ordinary requests that have not run, in the order of their
    /// acceptance, so that nobody takes the blocks that they wait for. `false`: they queue with the others, as
    /// in the real engine.
    pub destinations_first: bool,
    /// Look a prompt of one token up again after its load, of which nothing counts, and load it again. The
    /// real engine does, for ever if the other engine's copy lasts.
    pub reload_one_token_prompts: bool,
}

impl Default for VllmConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_gpu_blocks: 29_205,
            max_num_seqs: 1024,
            max_num_active_seqs: None,
            max_num_batched_tokens: 8192,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            long_prefill_token_threshold: 0,
            long_prefill_token_threshold_adaptive: false,
            policy: VllmPolicy::Fcfs,
            tie_victim: TieVictim::Last,
            watermark: 0.0,
            scheduler_reserve_full_isl: true,
            prefill_schedule_interval: 1,
            end_outgrown_requests: true,
            kv_lease: Duration::from_secs(30),
            kv_load_failure_policy: LoadFailurePolicy::Fail,
            transfer_guard: Duration::from_secs(30),
            first_token: FirstToken::Recomputed,
            destinations_first: true,
            reload_one_token_prompts: false,
        }
    }
}

impl VllmConfig {
    setters! {
        /// Sets `block_size`.
        with_block_size, block_size: u32;
        /// Sets `num_gpu_blocks`.
        with_num_gpu_blocks, num_gpu_blocks: u32;
        /// Sets `max_num_seqs`.
        with_max_num_seqs, max_num_seqs: u32;
        /// Sets `max_num_active_seqs`.
        with_max_num_active_seqs, max_num_active_seqs: Option<u32>;
        /// Sets `max_num_batched_tokens`.
        with_max_num_batched_tokens, max_num_batched_tokens: u32;
        /// Sets `enable_prefix_caching`.
        with_enable_prefix_caching, enable_prefix_caching: bool;
        /// Sets `enable_chunked_prefill`.
        with_enable_chunked_prefill, enable_chunked_prefill: bool;
        /// Sets `long_prefill_token_threshold`.
        with_long_prefill_token_threshold, long_prefill_token_threshold: u32;
        /// Sets `long_prefill_token_threshold_adaptive`.
        with_long_prefill_token_threshold_adaptive, long_prefill_token_threshold_adaptive: bool;
        /// Sets `policy`.
        with_policy, policy: VllmPolicy;
        /// Sets `tie_victim`.
        with_tie_victim, tie_victim: TieVictim;
        /// Sets `watermark`.
        with_watermark, watermark: f64;
        /// Sets `scheduler_reserve_full_isl`.
        with_scheduler_reserve_full_isl, scheduler_reserve_full_isl: bool;
        /// Sets `prefill_schedule_interval`.
        with_prefill_schedule_interval, prefill_schedule_interval: u32;
        /// Sets `end_outgrown_requests`.
        with_end_outgrown_requests, end_outgrown_requests: bool;
        /// Sets `kv_lease`.
        with_kv_lease, kv_lease: Duration;
        /// Sets `kv_load_failure_policy`.
        with_kv_load_failure_policy, kv_load_failure_policy: LoadFailurePolicy;
        /// Sets `transfer_guard`.
        with_transfer_guard, transfer_guard: Duration;
        /// Sets `first_token`.
        with_first_token, first_token: FirstToken;
        /// Sets `destinations_first`.
        with_destinations_first, destinations_first: bool;
        /// Sets `reload_one_token_prompts`.
        with_reload_one_token_prompts, reload_one_token_prompts: bool;
    }

    fn validate_core(&self) -> Result<(), ConfigError> {
        let at_least = [
            ("block_size", self.block_size, 1),
            ("num_gpu_blocks", self.num_gpu_blocks, 2),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_num_active_seqs", self.max_num_active_seqs.unwrap_or(1), 1),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1),
            ("prefill_schedule_interval", self.prefill_schedule_interval, 1),
        ];
        for (field, value, min) in at_least {
            if value < min {
                return Err(ConfigError::new(field, value, format!("at least {min}")));
            }
        }
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(ConfigError::new("watermark", self.watermark, "at least 0 and below 1"));
        }
        Ok(())
    }

    /// The checks of vLLM's own start-up.
    fn validate(&self, max_model_len: u32) -> Result<(), ConfigError> {
        let needed = max_model_len.div_ceil(self.block_size);
        if self.num_gpu_blocks < needed {
            let allowed =
                format!("at least {needed}: the pool must hold one sequence of max_model_len = {max_model_len} tokens");
            return Err(ConfigError::new("num_gpu_blocks", self.num_gpu_blocks, allowed));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            let allowed = format!("at least max_num_seqs = {}", self.max_num_seqs);
            return Err(ConfigError::new("max_num_batched_tokens", self.max_num_batched_tokens, allowed));
        }
        if !self.enable_chunked_prefill && self.max_num_batched_tokens < max_model_len {
            let allowed = format!("at least max_model_len = {max_model_len} where enable_chunked_prefill is false");
            return Err(ConfigError::new("max_num_batched_tokens", self.max_num_batched_tokens, allowed));
        }
        Ok(())
    }
}
