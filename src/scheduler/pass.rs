//! A planned pass, and its effects: the two values a scheduler hands out.

use std::time::Duration;

use crate::kv_event::KvEvent;
use crate::metrics::{EngineMetrics, Moments, PassMetrics, PrefixCacheStats};
use crate::output::{FinishReason, PrefillStats};
use crate::request::SequenceId;
use crate::time::EngineTime;
use crate::timing::{PassWork, PrefillChunk};

use super::handoff::HandoffFact;
use super::sequences::Handle;
use super::waiting::WaitingQueue;

/// How a sequence came into a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// Admitted for the first time.
    New,
    /// Admitted again after a preemption.
    Resumed,
    /// It was running already.
    Running,
}

/// One sequence's part in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassRow {
    /// The sequence.
    pub sequence: SequenceId,
    /// How it came into the pass.
    pub kind: RowKind,
    /// Tokens that the pass computes for it.
    pub new_tokens: u32,
    /// Its tokens whose KV is present before; for an admission the prefix hit.
    pub computed_before: u32,
    /// Output tokens it had when the pass was planned.
    pub output_tokens: u32,
    /// KV blocks it got for this pass, those of a prefix hit included; they are its last ones.
    pub new_blocks: u32,
    /// Where the scheduler keeps the sequence.
    pub(crate) slot: u32,
    /// Whether it reaches the end of the sequence, so that a token is sampled.
    pub(crate) samples: bool,
}

impl PassRow {
    /// Where the scheduler keeps the sequence.
    pub(crate) fn handle(&self) -> Handle {
        Handle { slot: self.slot, sequence: self.sequence }
    }

    /// Whether it computes the one token that was sampled last. Anything else is a prefill chunk.
    fn is_decode(&self) -> bool {
        self.new_tokens == 1 && self.output_tokens > 0 && self.samples
    }
}

/// A first admission: the sequence got its first KV blocks and enters this pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    /// The sequence.
    pub sequence: SequenceId,
    /// Prompt tokens found in the KV cache.
    pub cached_tokens: u32,
}

/// A pass in flight. It owns its plan: no command disturbs it.
///
/// Give it back with [`crate::Scheduler::finish_pass`] when its time has gone by.
#[derive(Debug, Default)]
#[must_use = "a pass must be given back with finish_pass"]
pub struct Pass {
    pub(crate) number: u64,
    pub(crate) started_at: EngineTime,
    pub(crate) duration: Duration,
    pub(crate) work: PassWork,
    pub(crate) rows: Vec<PassRow>,
    /// How many of the first rows are a prefill batch, where the engine kind tells it from decodes.
    pub(crate) num_prefill_rows: usize,
    pub(crate) admitted: Vec<Admitted>,
    pub(crate) preempted: Vec<SequenceId>,
    pub(crate) ended: Vec<SequenceId>,
    pub(crate) prefix_cache: PrefixCacheStats,
}

impl Pass {
    /// When it began.
    #[must_use]
    pub fn started_at(&self) -> EngineTime {
        self.started_at
    }

    /// How long it takes in engine time.
    #[must_use]
    pub fn duration(&self) -> Duration {
        self.duration
    }

    /// When it ends.
    #[must_use]
    pub fn ends_at(&self) -> EngineTime {
        self.started_at + self.duration
    }

    /// Whether it computes nothing; it then takes no time. It reports ends or preemptions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The work, as the timing model saw it.
    #[must_use]
    pub fn work(&self) -> &PassWork {
        &self.work
    }

    /// The sequences in it, in schedule order.
    #[must_use]
    pub fn rows(&self) -> &[PassRow] {
        &self.rows
    }

    /// First admissions, in order.
    #[must_use]
    pub fn admitted(&self) -> &[Admitted] {
        &self.admitted
    }

    /// Sequences that were preempted while it was planned, in order.
    #[must_use]
    pub fn preempted(&self) -> &[SequenceId] {
        &self.preempted
    }

    /// Sequences that ended or were cancelled since the last pass was planned, in order.
    #[must_use]
    pub fn ended(&self) -> &[SequenceId] {
        &self.ended
    }

    /// Adds a row.
    #[inline]
    pub(crate) fn push(&mut self, row: PassRow) {
        self.tally(&row);
        self.rows.push(row);
    }

    /// Adds the row of a sequence that decodes.
    #[inline]
    pub(crate) fn push_decode(&mut self, row: PassRow) {
        debug_assert!(row.is_decode());
        self.work.push_decode(row.computed_before + 1);
        self.rows.push(row);
    }

    /// Takes a sequence's row out again, if it has one: the tokens that it would have computed.
    pub(crate) fn take_back(&mut self, handle: Handle) -> Option<u32> {
        let index = self.rows.iter().position(|row| row.handle() == handle)?;
        let row = self.rows.remove(index);
        self.work.clear();
        let rows = std::mem::take(&mut self.rows);
        rows.iter().for_each(|row| self.tally(row));
        self.rows = rows;
        Some(row.new_tokens)
    }

    #[inline]
    fn tally(&mut self, row: &PassRow) {
        if row.is_decode() {
            self.work.push_decode(row.computed_before + 1);
        } else {
            self.work.push_prefill(PrefillChunk {
                new_tokens: row.new_tokens,
                tokens_before: row.computed_before,
                samples: row.samples,
            });
        }
    }

    /// What it did, as it ends now and leaves this queue behind.
    pub(crate) fn metrics(&self, queue: &WaitingQueue, now: EngineTime) -> PassMetrics {
        let work = &self.work;
        let (mut prefill, mut decode) = (Moments::default(), Moments::default());
        work.prefill().iter().for_each(|chunk| prefill.add(u64::from(chunk.new_tokens)));
        decode.add_all(work.decode_kv(), work.decode_kv_tokens());
        let (queued_prefill, queued_decode) = (queue.tokens(false), queue.tokens(true));
        PassMetrics {
            pass: self.number,
            started_at: self.started_at,
            ended_at: now,
            num_prefill_requests: prefill.count(),
            sum_prefill_tokens: prefill.sum(),
            var_prefill_tokens: prefill.variance(),
            sum_prefill_kv_tokens: work.prefill_kv_tokens(),
            num_decode_requests: decode.count(),
            sum_decode_kv_tokens: decode.sum(),
            var_decode_kv_tokens: decode.variance(),
            num_queued_prefill: queued_prefill.count(),
            sum_queued_prefill_tokens: queued_prefill.sum(),
            var_queued_prefill_tokens: queued_prefill.variance(),
            num_queued_decode: queued_decode.count(),
            sum_queued_decode_tokens: queued_decode.sum(),
            var_queued_decode_tokens: queued_decode.variance(),
            num_preemptions: self.preempted.len() as u64,
            prefix_cache: self.prefix_cache,
        }
    }

    /// Takes everything out and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.duration = Duration::ZERO;
        self.work.clear();
        self.rows.clear();
        self.num_prefill_rows = 0;
        self.admitted.clear();
        self.preempted.clear();
        self.ended.clear();
        self.prefix_cache = PrefixCacheStats::default();
    }
}

/// A token or an end of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// The sequence.
    pub sequence: SequenceId,
    /// The token, if one was produced.
    pub token: Option<u32>,
    /// Set on the last output of a sequence.
    pub finish: Option<FinishReason>,
    /// Set on the first token of a sequence.
    pub prefill: Option<PrefillStats>,
}

/// What became visible at a boundary, in the order in which it is to be shown.
///
/// Hand it back with [`crate::Scheduler::recycle`] to have its buffers reused.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Effects {
    /// The boundary.
    pub at: EngineTime,
    /// KV events, in order. Empty unless the scheduler was told to record them.
    pub kv_events: Vec<KvEvent>,
    /// The pass; `None` where nothing was computed.
    pub pass: Option<PassMetrics>,
    /// Tokens and ends, in schedule order.
    pub outputs: Vec<Output>,
    /// What happened to handoffs, in order; shown after the outputs.
    pub facts: Vec<HandoffFact>,
    /// The engine's state.
    pub metrics: EngineMetrics,
}

impl Effects {
    /// Takes everything out but the metrics and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.kv_events.clear();
        self.outputs.clear();
        self.facts.clear();
        self.pass = None;
    }
}
