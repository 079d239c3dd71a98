//! The scenario line: configuration and timed inputs.

use std::ops::Range;

use serde::Deserialize;

use crate::config::{EngineConfig, EngineKind, RadixEvictionPolicy, SglangConfig, SglangPolicy};
use crate::replay::recording::input::{ScenarioKind, output_token, output_tokens};
use crate::replay::recording::{Senseless, check_output_tokens};
use crate::timing::TimingConfig;

/// What was recorded, and with which inputs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::replay::recording) struct Scenario {
    kind: ScenarioKind,
    format: String,
    pub(in crate::replay::recording) name: String,
    description: String,
    engine: EngineName,
    engine_version: String,
    pub(super) config: Config,
    /// The recording stops here if the engine has not run dry.
    pub(super) max_steps: u32,
    /// In the order in which they are applied.
    pub(super) inputs: Vec<Input>,
}

impl Scenario {
    /// Whether the inputs ask for no more than can be held.
    pub(in crate::replay::recording) fn check(&self) -> Result<(), Senseless> {
        check_output_tokens(self.inputs.iter().enumerate().filter_map(|(index, input)| match input {
            Input::Add(add) => Some((index, add.output_range(self.config.context_length).end)),
            _ => None,
        }))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EngineName {
    Sglang,
}

/// The engine's configuration, in its own words.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    page_size: u32,
    max_total_tokens: u32,
    max_running_requests: u32,
    max_prefill_tokens: u32,
    chunked_prefill_size: Option<u32>,
    pub(super) context_length: u32,
    disable_radix_cache: bool,
    schedule_policy: SglangPolicy,
    schedule_conservativeness: f64,
    eviction_policy: RadixEvictionPolicy,
    enable_mixed_chunk: bool,
    enable_priority_scheduling: bool,
    schedule_low_priority_values_first: bool,
    priority_scheduling_preemption_threshold: u32,
    prefill_max_requests: Option<u32>,
    /// Which implementation of the tree ran; both decide the same.
    tree_core: String,
    pub(super) kv_events: bool,
}

impl Config {
    /// The same as this crate's configuration, with the real engine's habits left in.
    pub(super) fn engine_config(&self) -> EngineConfig {
        let sglang = SglangConfig {
            page_size: self.page_size,
            max_total_tokens: self.max_total_tokens,
            max_running_requests: self.max_running_requests,
            max_prefill_tokens: self.max_prefill_tokens,
            chunked_prefill_size: self.chunked_prefill_size,
            disable_radix_cache: self.disable_radix_cache,
            schedule_policy: self.schedule_policy,
            schedule_conservativeness: self.schedule_conservativeness,
            radix_eviction_policy: self.eviction_policy,
            enable_mixed_chunk: self.enable_mixed_chunk,
            enable_priority_scheduling: self.enable_priority_scheduling,
            schedule_low_priority_values_first: self.schedule_low_priority_values_first,
            priority_scheduling_preemption_threshold: self.priority_scheduling_preemption_threshold,
            prefill_max_requests: self.prefill_max_requests,
            abort_after_next_forward: true,
            end_outgrown_requests: false,
            ..SglangConfig::default()
        };
        EngineConfig::new(EngineKind::Sglang(sglang))
            .with_max_model_len(self.context_length)
            .with_timing(TimingConfig::ConstantMs(1.0))
    }
}

/// A timed input, applied before its step is planned.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Input {
    Add(Box<Add>),
    Abort(Abort),
    FlushCache(Flush),
}

impl Input {
    pub(super) fn step(&self) -> u32 {
        match self {
            Self::Add(add) => add.step,
            Self::Abort(abort) => abort.step,
            Self::FlushCache(flush) => flush.step,
        }
    }
}

/// A request.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Add {
    step: u32,
    pub(super) id: String,
    pub(super) prompt_token_ids: Vec<u32>,
    /// The first tokens that the model gives; then follow 100,000 + position.
    output_token_ids: Vec<u32>,
    pub(super) max_tokens: u32,
    pub(super) priority: Option<i32>,
    pub(super) stop_token_ids: Vec<u32>,
    pub(super) eos_token_ids: Vec<u32>,
    pub(super) ignore_eos: bool,
    pub(super) cache_salt: Option<String>,
    pub(super) extra_key: Option<String>,
}

impl Add {
    /// All tokens that it can produce in a context of this length.
    pub(super) fn output_tokens(&self, context_length: u32) -> Vec<u32> {
        self.output_range(context_length).map(|position| output_token(&self.output_token_ids, position)).collect()
    }

    fn output_range(&self, context_length: u32) -> Range<u32> {
        output_tokens(self.max_tokens, context_length, self.prompt_token_ids.len())
    }
}

/// Requests given up by their callers: all whose id begins with this.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Abort {
    step: u32,
    pub(super) id: String,
}

/// A reset of the prefix cache.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Flush {
    step: u32,
}
