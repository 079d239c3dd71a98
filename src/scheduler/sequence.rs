//! One sequence inside a scheduler: where it is in its life, what it holds and what it produces.

use std::sync::Arc;

use crate::config::EngineConfig;
use crate::kv::{BlockContent, ExtraKeys, HeldBlocks, SequenceBlocks};
use crate::output::{FinishReason, PrefillStats, TokenGenerator};
use crate::request::{KvCacheReportMode, OutputPlan, Prompt, Request, SequenceId};
use crate::time::EngineTime;

use super::command::Submission;
use super::remote::{KeepBlocks, Remote};
use super::view::{SequenceStatus, SequenceView};
use super::waiting::{ArrivalKey, QueueKey};

/// Where a sequence is in its life.
///
/// ```text
///  in               │ becomes
///  ─────────────────┼────────────────────────────────────────────────────────────────────────────────────
///  Arriving         │ Queued at its arrival, Aside if it is throttled then
///  Queued           │ Running when it is admitted; Loading{InFlight} when a load between passes begins;
///                   │ Aside when it is throttled
///  Aside            │ Queued when it is throttled no more
///  Loading{InFlight}│ Loading{Done} when the end of the load is reported
///  Loading{Done}    │ Loading{Tried} when a pass looks at it: what was loaded can be found then
///  Loading{Tried}   │ Running when it is admitted; Loading{InFlight} again if nothing of the load was valid
///                   │ and another one begins
///  Running          │ Queued when it is preempted, Aside if it is throttled then
///  Ended            │
/// ```
/// Every state ends by removal: its last token (from `Running`), no room in the whole pool (from
/// `Queued`, `Loading` or `Running`), a failed load (from `Loading` or `Running`), a cancel (from any). Where the
/// blocks must stay for a transfer it is `Ended` until they need not. `Loading`, `Running` and `Ended` hold blocks,
/// but for a `Loading{Tried}` of which nothing was valid; leaving `Running` for a queue gives all back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// Its arrival is still to come.
    Arriving { key: ArrivalKey },
    /// In the waiting queue; whether it was passed over there.
    Queued { key: QueueKey, deferred: bool },
    /// Throttled: out of the queue, to which it returns with this key.
    Aside { key: QueueKey },
    /// In the load queue.
    Loading { key: QueueKey, load: Load },
    /// In the batch.
    Running,
    /// Over; its blocks stay for a transfer.
    Ended { finish: FinishReason, transfer: Transfer },
}

/// How far a load is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// KV is written into the blocks.
    InFlight,
    /// Its end was reported.
    Done,
    /// A pass has tried to admit the sequence since: its valid blocks can be found.
    Tried,
}

/// The transfer that an ended sequence's blocks wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// Another engine reads them.
    Send,
    /// Another engine writes them although nobody wants the KV any more.
    Receive,
}

/// One sequence, and the blocks that it holds in the cache of its engine kind. Counts are in tokens.
#[derive(Debug)]
pub(crate) struct Sequence<B = SequenceBlocks> {
    pub(crate) id: SequenceId,
    pub(crate) life: Life,
    /// Its reader has no room: it is left out of passes.
    pub(crate) throttled: bool,
    /// The last pass it was in stopped short of its last token.
    pub(crate) mid_prefill: bool,
    /// While a pass leaves it with fewer computed tokens than this, it is a decode that needs
    /// nothing but its token; 0: that is not known, or not so.
    pub(crate) quiet_until: u32,
    pub(crate) num_prompt: u32,
    pub(crate) num_output: u32,
    /// Outputs at which it ends by length.
    pub(crate) output_limit: u32,
    /// Tokens whose KV is present, or computed by the pass in flight.
    pub(crate) num_computed: u32,
    /// Prompt tokens that the first run found: in the cache, or loaded.
    pub(crate) num_cached: u32,
    pub(crate) num_preemptions: u32,
    pub(crate) blocks: B,
    pub(crate) content: Content,
    /// When it arrived, its priority and the tie key: what priority queues and victims go by.
    pub(crate) arrival: EngineTime,
    pub(crate) priority: i32,
    pub(crate) tie_key: u128,
    pub(crate) reads_prefix_cache: bool,
    pub(crate) reports_hits: bool,
    /// It produces all its tokens, whatever they are.
    pub(crate) ignore_eos: bool,
    /// Cancelled, but still to take part in one pass.
    pub(crate) cancelled: bool,
    /// How many entered the queue before it did, the last time.
    pub(crate) queued_at: u64,
    /// It was in a pass before.
    pub(crate) admitted: bool,
    /// It is in the batch with KV that came from elsewhere, and was in no pass since.
    pub(crate) prebuilt: bool,
    /// Tokens that the last attempt to admit it would have computed.
    pub(crate) short_of: u32,
    /// Its dealings with other engines, if it has any.
    pub(crate) remote: Option<Box<Remote>>,
}

impl<B: HeldBlocks> Sequence<B> {
    /// The sequence of a request that was checked ([`Request::validate_core`]), waiting for its arrival.
    pub(crate) fn new(submission: Submission, config: &EngineConfig, arrival: EngineTime, key: ArrivalKey) -> Self {
        let Submission { sequence, tie_key, request } = submission;
        // Both were checked. A lazy prompt that says another length now than it did then gets one that can be lived with.
        let most = config.max_model_len - 1;
        let num_prompt = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX).clamp(1, most);
        let output_limit = request.output_limit(config.max_model_len).clamp(1, config.max_model_len - num_prompt);
        Self {
            id: sequence,
            life: Life::Arriving { key },
            throttled: false,
            mid_prefill: false,
            quiet_until: 0,
            num_prompt,
            num_output: 0,
            output_limit,
            num_computed: 0,
            num_cached: 0,
            num_preemptions: 0,
            blocks: B::default(),
            arrival,
            priority: request.priority,
            tie_key,
            reads_prefix_cache: !request.skip_reading_prefix_cache,
            reports_hits: request.kv_cache_report_mode == KvCacheReportMode::Full,
            ignore_eos: request.ignore_eos,
            cancelled: false,
            queued_at: 0,
            admitted: false,
            prebuilt: false,
            short_of: 0,
            remote: None,
            content: Content::new(request, num_prompt as usize, tie_key, config),
        }
    }

    /// Prompt and output tokens; at most `max_model_len`.
    pub(crate) fn num_tokens(&self) -> u32 {
        self.num_prompt + self.num_output
    }

    /// Whether it was in a batch before and lost its place.
    pub(crate) fn was_preempted(&self) -> bool {
        self.num_preemptions > 0
    }

    /// Whether it waits to load KV of another engine and has no blocks yet.
    pub(crate) fn wants_copy(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.copy.is_wanted())
    }

    /// Whether its blocks are for another engine to read.
    pub(crate) fn is_source(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.keep != KeepBlocks::Never)
    }

    /// Whether its KV comes from another engine: none of it is computed here but that of its last tokens.
    pub(crate) fn is_destination(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.copy.exists())
    }

    /// What is known of its prefill with its first token.
    pub(crate) fn prefill_stats(&self, block_size: u32, prefix_caching: bool) -> PrefillStats {
        let in_full_blocks = self.num_prompt / block_size * block_size;
        PrefillStats {
            num_prompt_tokens: self.num_prompt,
            num_computed_tokens: self.num_prompt - self.num_cached,
            num_cached_tokens: self.num_cached,
            num_external_cached_tokens: self.remote.as_ref().map_or(0, |remote| remote.num_external),
            num_cache_creation_tokens: if prefix_caching { in_full_blocks.saturating_sub(self.num_cached) } else { 0 },
        }
    }

    /// The look inside that is shown to callers.
    pub(crate) fn view(&self) -> SequenceView<'_> {
        let waiting = if self.was_preempted() { SequenceStatus::Preempted } else { SequenceStatus::Waiting };
        SequenceView {
            sequence: self.id,
            status: match self.life {
                Life::Arriving { .. } => SequenceStatus::Arriving,
                Life::Queued { .. } | Life::Aside { .. } | Life::Loading { load: Load::Tried, .. } => waiting,
                Life::Loading { load: Load::InFlight, .. } => SequenceStatus::Loading,
                Life::Loading { load: Load::Done, .. } => SequenceStatus::Loaded,
                Life::Running => SequenceStatus::Running,
                Life::Ended { finish, .. } => SequenceStatus::Held(finish),
            },
            throttled: self.throttled,
            deferred: matches!(self.life, Life::Queued { deferred: true, .. }),
            num_computed_tokens: self.num_computed,
            num_tokens: self.num_tokens(),
            num_output_tokens: self.num_output,
            max_output_tokens: self.output_limit,
            block_ids: self.blocks.ids(),
            num_preemptions: self.num_preemptions,
        }
    }
}

/// The tokens of a sequence. Output tokens are made when asked for, never stored.
#[derive(Debug)]
pub(crate) struct Content {
    prompt: Prompt,
    /// The prompt's length, asked for once.
    num_prompt: usize,
    output: OutputTokens,
    /// The first output token, where it was sampled by another engine.
    carried: Option<u32>,
    extra_keys: ExtraKeys,
}

#[derive(Debug)]
enum OutputTokens {
    /// The forbidden tokens hold every stop and end token, so a generated token never stops.
    Generated { generator: TokenGenerator, forbidden: Box<[u32]> },
    Planned {
        tokens: Arc<[u32]>,
        eos: Option<u32>,
        /// Sorted.
        stop: Box<[u32]>,
    },
}

impl Content {
    fn new(request: Request, num_prompt: usize, tie_key: u128, config: &EngineConfig) -> Self {
        let extra_keys = ExtraKeys::of(&request);
        let output = match &request.output {
            OutputPlan::Generated => OutputTokens::Generated {
                generator: TokenGenerator::new(config.seed, tie_key, config.vocab_size),
                forbidden: request.forbidden_tokens().into(),
            },
            OutputPlan::Tokens(tokens) => OutputTokens::Planned {
                tokens: Arc::clone(tokens),
                eos: request.effective_eos(),
                stop: sorted(&request.stop_token_ids),
            },
        };
        Self { prompt: request.prompt, num_prompt, output, carried: None, extra_keys }
    }

    /// Sets the first output token, which another engine has sampled. Why the sequence ends with it, if it
    /// does; it is not sampled here.
    pub(crate) fn carry(&mut self, token: u32) -> Option<FinishReason> {
        self.carried = Some(token);
        match &self.output {
            OutputTokens::Planned { eos, .. } if *eos == Some(token) => Some(FinishReason::Stop { stop_token: None }),
            OutputTokens::Planned { stop, .. } if stop.binary_search(&token).is_ok() => {
                Some(FinishReason::Stop { stop_token: Some(token) })
            }
            _ => None,
        }
    }

    /// Whether another engine has sampled the first output token.
    pub(crate) fn is_carried(&self) -> bool {
        self.carried.is_some()
    }

    /// The output token at `position`, and why the sequence ends with it if it does: the end token
    /// comes before a stop token.
    pub(crate) fn output(&self, position: u32) -> (u32, Option<FinishReason>) {
        match &self.output {
            OutputTokens::Generated { generator, forbidden } => (generator.token(position, forbidden), None),
            OutputTokens::Planned { tokens, eos, stop } => {
                let token = tokens[position as usize];
                let finish = if *eos == Some(token) {
                    Some(FinishReason::Stop { stop_token: None })
                } else {
                    let stops = stop.binary_search(&token).is_ok();
                    stops.then_some(FinishReason::Stop { stop_token: Some(token) })
                };
                (token, finish)
            }
        }
    }

    /// The output token at `position` where tokens are generated: such a token ends nothing.
    #[inline]
    pub(crate) fn generated(&self, position: u32) -> Option<u32> {
        match &self.output {
            OutputTokens::Generated { generator, forbidden } => Some(generator.token(position, forbidden)),
            OutputTokens::Planned { .. } => None,
        }
    }
}

fn sorted(tokens: &[u32]) -> Box<[u32]> {
    let mut sorted: Box<[u32]> = tokens.into();
    sorted.sort_unstable();
    sorted
}

impl BlockContent for Content {
    fn fill(&self, start: usize, out: &mut [u32]) {
        let in_prompt = self.num_prompt.saturating_sub(start).min(out.len());
        let (prompt, output) = out.split_at_mut(in_prompt);
        if !prompt.is_empty() {
            self.prompt.fill_within(start, prompt);
        }
        // Positions lie below max_model_len, a u32.
        let first = (start + in_prompt).saturating_sub(self.num_prompt) as u32;
        match &self.output {
            OutputTokens::Generated { generator, forbidden } => {
                for (token, position) in output.iter_mut().zip(first..) {
                    *token = generator.token(position, forbidden);
                }
            }
            OutputTokens::Planned { tokens, .. } => {
                let first = first as usize;
                output.copy_from_slice(&tokens[first..first + output.len()]);
            }
        }
        if let (Some(carried), Some(token), 0) = (self.carried, output.first_mut(), first) {
            *token = carried;
        }
    }

    fn key(&self, start: usize, len: usize) -> Option<u64> {
        if start + len <= self.num_prompt { self.prompt.content_key(start, len) } else { None }
    }

    fn extra_keys(&self) -> &ExtraKeys {
        &self.extra_keys
    }
}
