//! Planning a pass: who gets how many tokens, and who loses the place for it.

use crate::config::{SchedulingState, TieVictim, VllmPolicy};
use crate::kv::KvCache;
use crate::output::FinishReason;
use crate::scheduler::book::Book;
use crate::scheduler::engine_core::EngineCore;
use crate::scheduler::pass::{Pass, PassRow, RowKind};
use crate::scheduler::sequence::Sequence;
use crate::scheduler::sequences::Handle;
use crate::seeded_bug::seeded_bug;

use super::VllmCore;

/// A pass while it is planned.
pub(super) struct Plan<'a> {
    pub(super) pass: &'a mut Pass,
    /// Tokens that can still be given out.
    pub(super) budget: u32,
    /// Most tokens of one sequence.
    pub(super) chunk_cap: u32,
    /// Only decodes run in this pass.
    pub(super) defer_prefills: bool,
    /// The running sequence that is served, by its index.
    index: usize,
}

impl VllmCore {
    pub(super) fn plan_pass(&mut self, pass: &mut Pass) {
        if self.book.state == SchedulingState::Stopped {
            return;
        }
        let mut plan = Plan {
            pass,
            budget: self.options.max_num_batched_tokens + u32::from(seeded_bug!(BudgetIsOneTooMany)),
            chunk_cap: self.chunk_cap(),
            defer_prefills: self.defers_prefills(),
            index: 0,
        };
        let served = self.plan_running(&mut plan);
        // A pass that had to preempt admits nobody: the victim would only lose its blocks again. Nor does one
        // in which somebody waits for a block.
        if served && plan.pass.preempted.is_empty() {
            self.plan_waiting(&mut plan);
        }
    }

    /// `long_prefill_token_threshold`: off while only one sequence exists.
    fn chunk_cap(&self) -> u32 {
        let num_sequences = self.book.running.len() as u64 + self.book.queue.num_waiting();
        match self.options.long_prefill_token_threshold {
            0 => u32::MAX,
            _ if num_sequences <= 1 => u32::MAX,
            threshold if self.options.long_prefill_token_threshold_adaptive => {
                let share = u64::from(self.options.max_num_batched_tokens) / num_sequences;
                // A share of a u32.
                threshold.max(share as u32)
            }
            threshold => threshold,
        }
    }

    /// `prefill_schedule_interval`: between its beats prefill waits as long as decodes run, unless the
    /// last pass that could admit left somebody waiting.
    fn defers_prefills(&self) -> bool {
        let interval = u64::from(self.options.prefill_schedule_interval);
        let decodes = |&handle: &Handle| {
            let sequence = &self.book.sequences[handle];
            !sequence.throttled && !sequence.mid_prefill
        };
        interval > 1
            && !self.book.metrics.num_passes.is_multiple_of(interval)
            && !self.left_waiting
            && self.book.running.swept().iter().any(decodes)
    }

    /// Serves the running sequences; `false` if one waits for a block that will be freed soon, and all behind
    /// it with it.
    fn plan_running(&mut self, plan: &mut Plan<'_>) -> bool {
        while let Some(grant) = self.serve_running(plan) {
            if self.expects_frees && !self.book.holds.is_empty() && !self.outgrows_pool(grant.handle) {
                return false;
            }
            if self.make_room(grant, plan) {
                plan.grant(&mut self.kv, &mut self.book.sequences[grant.handle], grant);
                plan.index += 1;
            }
        }
        true
    }

    /// Serves the running sequences until one is short of blocks: that one's grant. This loop is what a
    /// pass costs per sequence; everything rare is elsewhere.
    fn serve_running(&mut self, plan: &mut Plan<'_>) -> Option<Grant> {
        let Self { kv, book: Book { sequences, running, .. }, .. } = self;
        let running = running.swept().get(plan.index..).unwrap_or_default();
        for (served, &handle) in running.iter().enumerate() {
            if plan.budget == 0 {
                plan.index += served;
                return None;
            }
            let sequence = &mut sequences[handle];
            if sequence.num_computed + 1 < sequence.quiet_until {
                plan.decode_quietly(sequence, handle);
            } else if let Some(short) = plan.serve(kv, sequence, handle) {
                plan.index += served;
                return Some(short);
            }
        }
        plan.index += running.len();
        None
    }

    /// Preempts until a running sequence has the blocks for its grant. `false`: it lost its own place, and
    /// the next one to serve has its index.
    fn make_room(&mut self, grant: Grant, plan: &mut Plan<'_>) -> bool {
        let handle = grant.handle;
        if self.outgrows_pool(handle) {
            self.book.running.remove(plan.index);
            self.conclude_visibly(handle, FinishReason::OutOfMemory);
            return false;
        }
        loop {
            let position = self.victim();
            let victim = self.book.running.remove(position);
            if position < plan.index {
                plan.index -= 1;
                plan.take_back(victim);
            }
            self.preempt(victim);
            plan.pass.preempted.push(victim.sequence);
            if victim == handle {
                return false;
            }
            let sequence = &mut self.book.sequences[handle];
            if self.kv.extend(&mut sequence.blocks, sequence.num_computed + grant.tokens) {
                return true;
            }
        }
    }

    /// Index of the running sequence to preempt: the last one, or by priority the least important one that
    /// arrived last.
    fn victim(&self) -> usize {
        let running = self.book.running.swept();
        let last = running.len() - 1;
        match self.options.policy {
            VllmPolicy::Fcfs if seeded_bug!(PreemptsTheOldest) => 0,
            VllmPolicy::Fcfs => last,
            VllmPolicy::Priority => {
                let rank = |index: usize| {
                    let sequence = &self.book.sequences[running[index]];
                    (sequence.priority, sequence.arrival)
                };
                // `max_by_key` takes the last among equals.
                let victim = match self.options.tie_victim {
                    TieVictim::First => (0..=last).rev().max_by_key(|&index| rank(index)),
                    TieVictim::Last => (0..=last).max_by_key(|&index| rank(index)),
                };
                victim.unwrap_or(last)
            }
        }
    }
}

/// Tokens that a sequence gets in a pass.
#[derive(Clone, Copy)]
pub(super) struct Grant {
    pub(super) handle: Handle,
    pub(super) kind: RowKind,
    pub(super) tokens: u32,
    /// Blocks that it had before those for this pass.
    pub(super) blocks_before: u32,
}

impl Plan<'_> {
    /// Serves a running sequence, unless it is left out of this pass; its grant if it is short of blocks.
    fn serve(&mut self, kv: &mut KvCache, sequence: &mut Sequence, handle: Handle) -> Option<Grant> {
        if sequence.throttled || (self.defer_prefills && sequence.mid_prefill) {
            return None;
        }
        // A running sequence has at least one token to compute, and room for one more after it.
        let short_of = sequence.num_tokens() - sequence.num_computed;
        let grant = Grant {
            handle,
            kind: RowKind::Running,
            tokens: short_of.min(self.chunk_cap).min(self.budget),
            blocks_before: sequence.blocks.len(),
        };
        if !kv.extend(&mut sequence.blocks, sequence.num_computed + grant.tokens) {
            return Some(grant);
        }
        self.grant(kv, sequence, grant);
        None
    }

    /// Gives tokens to a sequence that has the blocks for them.
    #[inline]
    pub(super) fn grant(&mut self, kv: &mut KvCache, sequence: &mut Sequence, grant: Grant) {
        let computed_before = sequence.num_computed;
        sequence.num_computed += grant.tokens;
        let samples = sequence.num_computed == sequence.num_tokens();
        sequence.mid_prefill = !samples;
        kv.publish(&mut sequence.blocks, &sequence.content, sequence.num_computed, grant.handle.sequence);
        sequence.quiet_until = if samples && !sequence.throttled { kv.quiet_until(&sequence.blocks) } else { 0 };
        self.budget -= grant.tokens;
        self.pass.push(PassRow {
            sequence: grant.handle.sequence,
            slot: grant.handle.slot,
            kind: grant.kind,
            new_tokens: grant.tokens,
            computed_before,
            output_tokens: sequence.num_output,
            new_blocks: sequence.blocks.len() - grant.blocks_before,
            samples,
        });
    }

    /// Gives a decoding sequence its one token, which lies within its last block and does not fill it.
    #[inline]
    fn decode_quietly(&mut self, sequence: &mut Sequence, handle: Handle) {
        let computed_before = sequence.num_computed;
        sequence.num_computed += 1;
        self.budget -= 1;
        self.pass.push_decode(PassRow {
            sequence: handle.sequence,
            slot: handle.slot,
            kind: RowKind::Running,
            new_tokens: 1,
            computed_before,
            output_tokens: sequence.num_output,
            new_blocks: 0,
            samples: true,
        });
    }

    /// Takes the tokens of a victim back, if it was served already.
    fn take_back(&mut self, victim: Handle) {
        if let Some(tokens) = self.pass.take_back(victim) {
            self.budget += tokens;
        }
    }
}
