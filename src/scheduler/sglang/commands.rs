//! What this engine kind has to say for itself, and the steps of a sequence's life outside a pass.

use crate::config::{FirstToken, LoadFailurePolicy, SchedulingState};
use crate::kv::{KvPool, SequencePages};
use crate::kv_event::KvEvent;
use crate::output::FinishReason;
use crate::request::{OutputPlan, Request};
use crate::scheduler::book::{Book, Usage};
use crate::scheduler::command::Applied;
use crate::scheduler::engine_core::{EngineCore, HandoffTerms};
use crate::scheduler::pass::{Effects, Pass};
use crate::scheduler::sequences::Handle;
use crate::time::EngineTime;

use super::SglangCore;

impl EngineCore for SglangCore {
    type Blocks = SequencePages;

    fn book(&self) -> &Book<SequencePages> {
        &self.book
    }

    fn book_mut(&mut self) -> &mut Book<SequencePages> {
        &mut self.book
    }

    fn terms(&self) -> HandoffTerms {
        HandoffTerms {
            lease: self.options.disaggregation_waiting_timeout,
            guard: self.options.transfer_guard,
            first_token: FirstToken::CarriedOver,
            on_failed_load: LoadFailurePolicy::Fail,
            reloads: true,
        }
    }

    fn normalise(&self, request: &mut Request) {
        if request.ignore_eos && matches!(request.output, OutputPlan::Tokens(_)) {
            // It switches off every stop token; generated tokens avoid them anyway.
            request.stop_token_ids.clear();
        }
    }

    /// What it asks for, cut so that it fits the context (two short of it) and the empty pool (with a page and a token
    /// to spare); at least one is always produced. A prefill server gives one, whatever it is asked for.
    fn output_limit(&self, handle: Handle) -> u32 {
        let sequence = &self.book.sequences[handle];
        if sequence.is_source() {
            return 1;
        }
        let (page, pool) = (u64::from(self.kv.page_size()), self.kv.capacity_tokens());
        let (prompt, context) = (u64::from(sequence.num_prompt), u64::from(self.book.engine.max_model_len));
        let in_context = context.min(pool).saturating_sub(2 + prompt);
        let in_pool = pool.saturating_sub(prompt.next_multiple_of(page) + page + 1);
        let asked = u64::from(sequence.output_limit);
        // At most `asked`, a u32.
        asked.min(in_context).min(in_pool).max(1) as u32
    }

    /// Puts a sequence behind all that wait like it: a retracted destination, which goes first, a fresh one, or one
    /// that is computed here.
    fn queue_up(&mut self, handle: Handle) {
        self.num_queued += 1;
        let sequence = &mut self.book.sequences[handle];
        sequence.queued_at = self.num_queued;
        let key = match (sequence.wants_copy(), sequence.was_preempted()) {
            (false, _) => self.book.queue.back(handle.sequence),
            (true, false) => self.book.queue.destination(handle.sequence),
            (true, true) => self.book.queue.retracted(handle.sequence),
        };
        self.book.enter_queue(handle, key);
    }

    /// Forgets every cached prefix, as SGLang does it: only while nobody waits, runs or holds pages for a transfer.
    /// Those that are retracted for it may wait.
    fn reset_prefix_cache(&mut self, reset_running_requests: bool) -> Applied {
        let mut preempted = Vec::new();
        if reset_running_requests {
            self.book.running.sweep(&self.book.sequences);
            while let Some(handle) = self.chunked.take().or_else(|| self.book.running.pop()) {
                if self.retract(handle) {
                    self.queue_up(handle);
                    preempted.push(handle.sequence);
                }
            }
        }
        let reset = self.book.running.len() == 0
            && self.chunked.is_none()
            && self.nothing_is_held()
            && (reset_running_requests || self.book.queue.num_waiting() == 0);
        if reset {
            self.kv.reset();
            self.book.note_change();
        }
        Applied::PrefixCacheReset { reset, preempted }
    }

    fn set_scheduling(&mut self, state: SchedulingState) {
        self.book.state = state;
        if state == SchedulingState::Stopped {
            // The pass that the cancelled ones should still have taken part in will not come.
            let cancelled: Vec<Handle> =
                self.running().filter(|&handle| self.book.sequences[handle].cancelled).collect();
            for handle in cancelled {
                self.end_visibly(handle, FinishReason::Cancelled);
            }
        }
    }

    fn plan(&mut self, pass: &mut Pass) {
        self.plan_pass(pass);
    }

    /// In batch order, then the one whose prompt is computed in part.
    fn running(&self) -> impl Iterator<Item = Handle> + '_ {
        self.book.running.iter(&self.book.sequences).chain(self.chunked)
    }

    fn kv_events(&self) -> &[KvEvent] {
        self.kv.events()
    }

    fn show(&mut self, effects: &mut Effects, now: EngineTime) {
        self.kv.take_events(&mut effects.kv_events);
        let usable = u64::from(self.kv.num_usable());
        let usage = Usage {
            num_running: self.num_in_batch() as u64,
            usable,
            used: usable - u64::from(self.kv.num_free()),
            cached: self.kv.num_stored_pages(),
        };
        self.book.show(effects, usage, now);
    }

    fn missing_blocks(&self, handle: Handle) -> u64 {
        let sequence = &self.book.sequences[handle];
        u64::from(self.kv.missing(&sequence.blocks, sequence.num_tokens()))
    }

    fn release_blocks(&mut self, handle: Handle) {
        self.kv.release(&mut self.book.sequences[handle].blocks);
    }

    fn leave_batch(&mut self, handle: Handle) {
        if self.chunked == Some(handle) {
            self.chunked = None;
        } else {
            self.book.running.one_is_gone();
        }
    }

    /// A cancelled sequence that runs ends with its next pass, by the switch. Where no pass is planned it ends now.
    fn runs_once_more(&mut self, handle: Handle) -> bool {
        if !self.options.abort_after_next_forward || self.book.state == SchedulingState::Stopped {
            return false;
        }
        let sequence = &mut self.book.sequences[handle];
        (sequence.cancelled, sequence.throttled) = (true, false);
        true
    }

    /// The real engine polls: it has been idle if the next arrival comes after the end of the last pass.
    fn begin_turn(&mut self) {
        if self.book.arrivals.next() > self.book.last_end() {
            self.idle_turn();
        }
    }

    /// If nobody waits or runs, the real engine forgets what it learned of output lengths.
    fn idle_turn(&mut self) {
        if self.is_idle() {
            self.new_token_ratio.reset();
        }
    }
}

impl SglangCore {
    /// Takes its pages from a sequence that is not in the batch any more. Nothing of what only it holds is
    /// kept: the pages are needed at once. A destination has a copy on the host (SGLang's
    /// `disaggregation_decode_retraction_backup`). `false`: it had been cancelled, and has ended instead.
    #[must_use]
    pub(super) fn retract(&mut self, handle: Handle) -> bool {
        let sequence = &mut self.book.sequences[handle];
        if sequence.cancelled {
            self.conclude_visibly(handle, FinishReason::Cancelled);
            return false;
        }
        self.kv.release(&mut sequence.blocks);
        sequence.num_computed = 0;
        sequence.short_of = sequence.num_tokens();
        sequence.num_preemptions += 1;
        sequence.prebuilt = false;
        if let Some(remote) = &mut sequence.remote {
            remote.copy.taken_away();
        }
        self.book.metrics.num_preemptions += 1;
        true
    }
}
