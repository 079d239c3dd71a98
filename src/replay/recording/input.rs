//! The scenario line of a recording: configuration and timed inputs.

use std::ops::Range;
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};
use serde::Deserialize;

use super::{Senseless, check_output_tokens};
use crate::config::{EngineConfig, EngineKind, FirstToken, LoadFailurePolicy, TieVictim, VllmConfig, VllmPolicy};
use crate::request::KvCacheReportMode;
use crate::scheduler::KeepBlocks;
use crate::timing::TimingConfig;

/// What was recorded, and with which inputs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scenario {
    kind: ScenarioKind,
    format: String,
    pub(super) name: String,
    description: String,
    engine: EngineName,
    engine_version: String,
    pub(super) config: Config,
    /// The recording stops here if the queue has not drained.
    pub(super) max_steps: u32,
    /// In the order in which they are applied.
    pub(super) inputs: Vec<Input>,
}

impl Scenario {
    /// Whether the inputs are in phases in which an engine can be given them, and about requests that there are.
    pub(super) fn check(&self) -> Result<(), Senseless> {
        let mut added = FxHashMap::default();
        for input in &self.inputs {
            if let Input::Add(add) = input {
                let first: &mut u32 = added.entry(add.id.as_str()).or_insert(add.step);
                *first = add.step.min(*first);
            }
        }
        let mut reported = FxHashSet::default();
        for (index, input) in self.inputs.iter().enumerate() {
            let is_report = matches!(input, Input::KvDone(_));
            if is_report != (input.when().1 == Phase::Output) {
                let allowed = if is_report { "output" } else { "pre or mid" };
                return Err(Senseless::input(index, "phase", format!("must be {allowed}")));
            }
            let Input::KvDone(done) = input else { continue };
            if !reported.insert(done.step) {
                return Err(Senseless::input(index, "step", format!("step {} has a report already", done.step)));
            }
            let unknown = |id: &&str| added.get(id).is_none_or(|step| *step > done.step);
            if let Some(id) = done.ids().find(unknown) {
                return Err(Senseless::input(index, "op", format!("no request {id:?} has been added by then")));
            }
        }
        let adds = self.inputs.iter().enumerate().filter_map(|(index, input)| match input {
            Input::Add(add) => Some((index, add.output_range(self.config.max_model_len).end)),
            _ => None,
        });
        check_output_tokens(adds)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ScenarioKind {
    Scenario,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EngineName {
    Vllm,
}

/// The engine's configuration, in its own words.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    pub(super) block_size: u32,
    num_gpu_blocks: u32,
    pub(super) usable_gpu_blocks: u32,
    max_num_seqs: u32,
    max_num_active_seqs: Option<u32>,
    max_num_batched_tokens: u32,
    pub(super) max_model_len: u32,
    enable_prefix_caching: bool,
    enable_chunked_prefill: bool,
    long_prefill_token_threshold: u32,
    long_prefill_token_threshold_adaptive: bool,
    policy: VllmPolicy,
    watermark: f64,
    scheduler_reserve_full_isl: bool,
    prefill_schedule_interval: u32,
    pub(super) kv_events: bool,
    /// There is a KV connector, and the engine has these sides of a transfer. It decides nothing.
    #[serde(default)]
    pub(super) kv_role: Option<KvRole>,
    #[serde(default)]
    kv_load_failure_policy: LoadFailurePolicy,
}

/// Which sides of a transfer an engine can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) enum KvRole {
    #[serde(rename = "kv_producer")]
    Producer,
    #[serde(rename = "kv_consumer")]
    Consumer,
    #[serde(rename = "kv_both")]
    Both,
}

impl Config {
    /// The same as this crate's configuration, with the real engine's defects left in.
    pub(super) fn engine_config(&self) -> EngineConfig {
        let vllm = VllmConfig {
            block_size: self.block_size,
            num_gpu_blocks: self.num_gpu_blocks,
            max_num_seqs: self.max_num_seqs,
            max_num_active_seqs: self.max_num_active_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            enable_prefix_caching: self.enable_prefix_caching,
            enable_chunked_prefill: self.enable_chunked_prefill,
            long_prefill_token_threshold: self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive: self.long_prefill_token_threshold_adaptive,
            policy: self.policy,
            watermark: self.watermark,
            scheduler_reserve_full_isl: self.scheduler_reserve_full_isl,
            prefill_schedule_interval: self.prefill_schedule_interval,
            end_outgrown_requests: false,
            tie_victim: TieVictim::First,
            first_token: FirstToken::Recomputed,
            destinations_first: false,
            reload_one_token_prompts: true,
            kv_load_failure_policy: self.kv_load_failure_policy,
            // No recording runs for so long.
            kv_lease: Duration::MAX,
            transfer_guard: Duration::MAX,
        };
        EngineConfig::new(EngineKind::Vllm(vllm))
            .with_max_model_len(self.max_model_len)
            .with_timing(TimingConfig::ConstantMs(1.0))
    }
}

/// A timed input.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Input {
    Add(Box<Add>),
    Abort(Abort),
    ResetPrefixCache(Reset),
    Pause(Scheduling),
    PauseNew(Scheduling),
    Unpause(Scheduling),
    KvDone(KvDone),
    PendingFrees(PendingFrees),
}

impl Input {
    /// When it is applied.
    pub(super) fn when(&self) -> (u32, Phase) {
        match self {
            Self::Add(add) => (add.step, Phase::Pre),
            Self::Abort(Abort { step, phase, .. })
            | Self::ResetPrefixCache(Reset { step, phase, .. })
            | Self::Pause(Scheduling { step, phase })
            | Self::PauseNew(Scheduling { step, phase })
            | Self::Unpause(Scheduling { step, phase })
            | Self::KvDone(KvDone { step, phase, .. })
            | Self::PendingFrees(PendingFrees { step, phase, .. }) => (*step, *phase),
        }
    }
}

/// Where in its step an input is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Phase {
    /// Before the pass is planned.
    Pre,
    /// While it is in flight.
    Mid,
    /// With what the model returns.
    Output,
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
    pub(super) priority: i32,
    /// Seconds; only the order matters.
    pub(super) arrival_time: f64,
    pub(super) cache_salt: Option<String>,
    pub(super) stop_token_ids: Vec<u32>,
    pub(super) eos_token_id: Option<u32>,
    pub(super) ignore_eos: bool,
    pub(super) min_tokens: u32,
    pub(super) skip_reading_prefix_cache: Option<bool>,
    pub(super) kv_cache_report_mode: KvCacheReportMode,
    /// Leading tokens that the other side has.
    #[serde(default)]
    pub(super) remote_tokens: Option<u32>,
    /// They are loaded between steps.
    #[serde(default)]
    pub(super) load_async: bool,
    /// They are gone after the first allocation.
    #[serde(default)]
    pub(super) load_once: bool,
    /// So many look-ups are undecided.
    #[serde(default)]
    pub(super) match_pending: u32,
    #[serde(default)]
    pub(super) send: Option<Send>,
    /// The load is reported by the batch of so many steps later.
    #[serde(default)]
    pub(super) recv_after: Option<u32>,
    /// The send likewise.
    #[serde(default)]
    pub(super) sent_after: Option<u32>,
    /// Indices of blocks that are reported as invalid with the load.
    #[serde(default)]
    pub(super) recv_invalid: Vec<u32>,
}

/// When blocks are held at a request's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Send {
    /// With its last token.
    Finished,
    /// Also when it is aborted.
    Always,
}

impl From<Send> for KeepBlocks {
    fn from(send: Send) -> Self {
        match send {
            Send::Finished => Self::WhenFinished,
            Send::Always => Self::Always,
        }
    }
}

impl Add {
    /// Token `position` of the output.
    pub(super) fn output_token(&self, position: u32) -> u32 {
        output_token(&self.output_token_ids, position)
    }

    /// All tokens that it can produce; `max_model_len` keeps a large `max_tokens` from being built.
    pub(super) fn output_tokens(&self, max_model_len: u32) -> Vec<u32> {
        self.output_range(max_model_len).map(|position| self.output_token(position)).collect()
    }

    fn output_range(&self, max_model_len: u32) -> Range<u32> {
        output_tokens(self.max_tokens, max_model_len, self.prompt_token_ids.len())
    }
}

/// Token `position` of an output whose first tokens are given.
pub(super) fn output_token(given: &[u32], position: u32) -> u32 {
    given.get(position as usize).copied().unwrap_or(100_000 + position)
}

/// The positions of an output: at the most those for which there is room behind the prompt, at least one.
pub(super) fn output_tokens(max_tokens: u32, max_model_len: u32, prompt_tokens: usize) -> Range<u32> {
    let room = (max_model_len as usize).saturating_sub(prompt_tokens).max(1);
    // `room` is at most a u32.
    0..max_tokens.min(room as u32)
}

/// Requests given up by their caller.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Abort {
    step: u32,
    phase: Phase,
    pub(super) ids: Vec<String>,
}

/// A reset of the prefix cache.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reset {
    step: u32,
    phase: Phase,
    pub(super) reset_running_requests: bool,
}

/// A change of the scheduling state.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scheduling {
    step: u32,
    phase: Phase,
}

/// Reports about transfers, by id.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KvDone {
    step: u32,
    phase: Phase,
    pub(super) sent: Vec<String>,
    pub(super) received: Vec<String>,
    pub(super) failed: Vec<String>,
    /// By id and index of the block in its request.
    pub(super) invalid_blocks: Vec<(String, u32)>,
}

impl KvDone {
    /// All requests that it is about.
    fn ids(&self) -> impl Iterator<Item = &str> {
        let invalid = self.invalid_blocks.iter().map(|(id, _)| id);
        self.sent.iter().chain(&self.received).chain(&self.failed).chain(invalid).map(String::as_str)
    }
}

/// Whether transfers in flight will free blocks.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PendingFrees {
    step: u32,
    phase: Phase,
    pub(super) value: bool,
}
