//! Commands and cancels, and the steps of a sequence's life outside a pass.

use crate::config::SchedulingState;
use crate::error::CommandError;
use crate::output::FinishReason;
use crate::request::{OutputPlan, SequenceId};
use crate::scheduler::command::{Applied, ApplyResult, Cancelled, Command, Submission};
use crate::scheduler::sequence::Life;
use crate::scheduler::sequences::Handle;
use crate::time::EngineTime;

use super::SglangCore;

impl SglangCore {
    pub(crate) fn apply(&mut self, command: Command, now: EngineTime) -> ApplyResult {
        self.book.hear(now);
        match command {
            Command::Submit(submission) => self.submit(submission, now),
            Command::ResetPrefixCache { reset_running_requests } => Ok(self.flush(reset_running_requests)),
            Command::SetScheduling(state) => {
                self.set_scheduling(state);
                Ok(Applied::SchedulingSet)
            }
            Command::Throttle { sequence, throttled } => {
                self.book.throttle(sequence, throttled)?;
                Ok(Applied::ThrottleSet)
            }
            Command::SubmitPrefill { .. }
            | Command::ReserveDestination { .. }
            | Command::ActivateDestination { .. }
            | Command::ReleaseSource { .. }
            | Command::CancelSource { .. }
            | Command::CancelDestination { .. }
            | Command::FailTransfer { .. }
            | Command::Heartbeat { .. }
            | Command::SubmitDecode(_) => Err(CommandError::NotSupported("a handoff")),
            Command::SubmitRemote { .. } | Command::Transfers(_) | Command::ExpectFrees(_) => {
                Err(CommandError::NotSupported("a KV connector"))
            }
        }
    }

    fn submit(&mut self, mut submission: Submission, now: EngineTime) -> ApplyResult {
        let request = &mut submission.request;
        if request.ignore_eos && matches!(request.output, OutputPlan::Tokens(_)) {
            // It switches off every stop token; generated tokens avoid them anyway.
            request.stop_token_ids.clear();
        }
        self.book.check(&submission)?;
        let handle = self.book.enter(submission, now);
        self.book.sequences[handle].output_limit = self.output_limit(handle);
        Ok(Applied::Submitted)
    }

    fn set_scheduling(&mut self, state: SchedulingState) {
        self.book.state = state;
        if state == SchedulingState::Stopped {
            // The pass that the cancelled ones should still have taken part in will not come.
            let sequences = &self.book.sequences;
            let running = self.book.running.iter(sequences).chain(self.chunked);
            let cancelled: Vec<Handle> = running.filter(|&handle| sequences[handle].cancelled).collect();
            for handle in cancelled {
                self.leave_batch(handle);
                self.end(handle, FinishReason::Cancelled);
            }
        }
    }

    /// Output tokens at which a request ends: what it asks for, cut so that it fits the context (two short
    /// of it) and the empty pool (with a page and a token to spare). At least one is always produced.
    fn output_limit(&self, handle: Handle) -> u32 {
        let sequence = &self.book.sequences[handle];
        let (page, pool) = (u64::from(self.kv.page_size()), self.kv.capacity_tokens());
        let (prompt, context) = (u64::from(sequence.num_prompt), u64::from(self.book.engine.max_model_len));
        let in_context = context.min(pool).saturating_sub(2 + prompt);
        let in_pool = pool.saturating_sub(prompt.next_multiple_of(page) + page + 1);
        let asked = u64::from(sequence.output_limit);
        // At most `asked`, a u32.
        asked.min(in_context).min(in_pool).max(1) as u32
    }

    /// Forgets every cached prefix, as SGLang does it: only while nobody waits or runs. Those that are
    /// retracted for it may wait.
    fn flush(&mut self, reset_running_requests: bool) -> Applied {
        let mut preempted = Vec::new();
        if reset_running_requests {
            self.book.running.sweep(&self.book.sequences);
            while let Some(handle) = self.chunked.take().or_else(|| self.book.running.pop()) {
                if self.retract(handle) {
                    self.enter_queue(handle);
                    preempted.push(handle.sequence);
                }
            }
        }
        let reset = self.book.running.len() == 0
            && self.chunked.is_none()
            && (reset_running_requests || self.book.queue.num_waiting() == 0);
        if reset {
            self.kv.reset();
            self.book.note_change();
        }
        Applied::PrefixCacheReset { reset, preempted }
    }

    pub(crate) fn cancel(&mut self, sequence: SequenceId) -> Cancelled {
        let Some(handle) = self.book.sequences.find(sequence) else {
            return Cancelled::Unknown;
        };
        match self.book.sequences[handle].life {
            Life::Arriving { key } => self.book.arrivals.remove(&key),
            Life::Queued { .. } | Life::Aside { .. } => self.book.leave_queue(handle),
            Life::Loading { .. } | Life::Ended { .. } => unreachable!("nothing is loaded or held here"),
            Life::Running if self.runs_once_more() => {
                let sequence = &mut self.book.sequences[handle];
                (sequence.cancelled, sequence.throttled) = (true, false);
                return Cancelled::Ending;
            }
            Life::Running => self.leave_batch(handle),
        }
        self.book.remove(handle, FinishReason::Cancelled);
        Cancelled::Removed
    }

    /// Whether a cancelled sequence that runs ends with its next pass. Where no pass is planned it ends now.
    fn runs_once_more(&self) -> bool {
        self.options.abort_after_next_forward && self.book.state != SchedulingState::Stopped
    }

    /// Puts those into the queue whose time has come; with `ties`, also those whose time is `now`. Says
    /// whether there were any.
    pub(super) fn release_arrivals(&mut self, now: EngineTime, ties: bool) -> bool {
        let mut any = false;
        while let Some(handle) = self.book.arrivals.take_due(now, ties) {
            self.enter_queue(handle);
            any = true;
        }
        any
    }

    /// Puts a sequence behind all that wait.
    pub(super) fn enter_queue(&mut self, handle: Handle) {
        let key = self.book.queue.back(handle.sequence);
        self.num_queued += 1;
        self.book.sequences[handle].queued_at = self.num_queued;
        self.book.enter_queue(handle, key);
    }

    /// Takes its pages from a sequence that is not in the batch any more. Nothing of what only it holds is
    /// kept: the pages are needed at once. `false`: it had been cancelled, and has ended instead.
    #[must_use]
    pub(super) fn retract(&mut self, handle: Handle) -> bool {
        let sequence = &mut self.book.sequences[handle];
        if sequence.cancelled {
            self.end(handle, FinishReason::Cancelled);
            return false;
        }
        self.kv.release(&mut sequence.blocks);
        sequence.num_computed = 0;
        sequence.short_of = sequence.num_tokens();
        sequence.num_preemptions += 1;
        self.book.metrics.num_preemptions += 1;
        true
    }

    /// Takes the pages of a running sequence that is about to be removed; its entry is swept out later.
    pub(super) fn leave_batch(&mut self, handle: Handle) {
        self.kv.release(&mut self.book.sequences[handle].blocks);
        if self.chunked == Some(handle) {
            self.chunked = None;
        } else {
            self.book.running.one_is_gone();
        }
    }

    /// Ends a sequence that is in neither queue nor batch any more, for a reason that the next effects show.
    pub(super) fn end(&mut self, handle: Handle, finish: FinishReason) {
        self.kv.release(&mut self.book.sequences[handle].blocks);
        self.book.remove(handle, finish);
        self.book.show_end(handle.sequence, finish);
    }
}
