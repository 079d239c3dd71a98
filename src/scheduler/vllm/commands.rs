//! Commands and cancels, and the steps of a sequence's life outside a pass.

use crate::config::VllmPolicy;
use crate::handoff::HandoffKey;
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::command::{Applied, ApplyResult, Cancelled, Command, Submission};
use crate::scheduler::remote::{ConnectorCall, Remote, RemoteKv};
use crate::scheduler::sequence::{Life, Load, Transfer};
use crate::scheduler::sequences::Handle;
use crate::scheduler::waiting::QueueKey;
use crate::time::EngineTime;

use super::VllmCore;

impl VllmCore {
    pub(crate) fn apply(&mut self, command: Command, now: EngineTime) -> ApplyResult {
        self.turn_to(now);
        match command {
            Command::Submit(submission) => self.submit(submission, now),
            Command::ResetPrefixCache { reset_running_requests } => Ok(self.reset_prefix_cache(reset_running_requests)),
            Command::SetScheduling(state) => {
                self.book.state = state;
                Ok(Applied::SchedulingSet)
            }
            Command::Throttle { sequence, throttled } => {
                self.book.throttle(sequence, throttled)?;
                Ok(Applied::ThrottleSet)
            }
            Command::SubmitPrefill { handoff, submission } => self.submit_prefill(handoff, submission, now),
            Command::ReserveDestination { handoff, submission } => self.reserve_destination(handoff, submission, now),
            Command::ActivateDestination { handoff, first_token } => self.activate_destination(handoff, first_token),
            Command::ReleaseSource { handoff } => self.release(handoff),
            Command::CancelSource { handoff } => self.cancel_source(handoff),
            Command::CancelDestination { handoff } => self.cancel_destination(handoff),
            Command::FailTransfer { handoff, valid_tokens } => self.fail_transfer(handoff, valid_tokens),
            Command::Heartbeat { handoff } => self.heartbeat(handoff),
            Command::SubmitDecode(submission) => self.submit_decode(submission, now),
            Command::SubmitRemote { submission, remote } => self.submit_remote(submission, remote, now),
            Command::Transfers(report) => {
                self.take_report(report);
                Ok(Applied::Transfers)
            }
            Command::ExpectFrees(expected) => {
                self.expects_frees = expected;
                Ok(Applied::ExpectFrees)
            }
        }
    }

    fn submit(&mut self, submission: Submission, now: EngineTime) -> ApplyResult {
        self.book.check(&submission)?;
        self.book.enter(submission, now);
        Ok(Applied::Submitted)
    }

    /// Takes a request in that was checked, with its dealings with other engines.
    pub(super) fn enter_remote(
        &mut self,
        submission: Submission,
        (remote, handoff): (RemoteKv, Option<HandoffKey>),
        now: EngineTime,
    ) -> Handle {
        let handle = self.book.enter(submission, now);
        let sequence = &mut self.book.sequences[handle];
        sequence.remote = Some(Remote::new(remote, handoff, sequence.num_prompt));
        handle
    }

    fn reset_prefix_cache(&mut self, reset_running_requests: bool) -> Applied {
        let mut preempted = Vec::new();
        if reset_running_requests {
            self.book.running.sweep(&self.book.sequences);
            while let Some(handle) = self.book.running.pop() {
                self.preempt(handle);
                preempted.push(handle.sequence);
            }
        }
        let reset = self.kv.reset();
        if reset {
            self.book.note_change();
        }
        Applied::PrefixCacheReset { reset, preempted }
    }

    pub(crate) fn cancel(&mut self, sequence: SequenceId, now: EngineTime) -> Cancelled {
        self.turn_to(now);
        let Some(handle) = self.book.alive(sequence) else { return Cancelled::Unknown };
        self.end(handle, FinishReason::Cancelled);
        Cancelled::Removed
    }

    /// Puts those into the queue whose time has come; with `ties`, also those whose time is `now`. Says
    /// whether there were any.
    pub(super) fn release_arrivals(&mut self, now: EngineTime, ties: bool) -> bool {
        let mut any = false;
        while let Some(handle) = self.book.arrivals.take_due(now, ties) {
            let key = match self.options.policy {
                _ if self.goes_first(handle) => self.book.queue.destination(handle.sequence),
                VllmPolicy::Fcfs => self.book.queue.back(handle.sequence),
                VllmPolicy::Priority => self.priority_key(handle),
            };
            self.book.enter_queue(handle, key);
            any = true;
        }
        any
    }

    fn goes_first(&self, handle: Handle) -> bool {
        let remote = self.book.sequences[handle].remote.as_ref().filter(|_| self.options.destinations_first);
        remote.is_some_and(|remote| remote.handoff.is_some() && remote.copy.is_wanted())
    }

    /// Takes all blocks from a sequence that is not in the batch any more and queues it again: at the
    /// front, or by priority where it was.
    pub(super) fn preempt(&mut self, handle: Handle) {
        let key = match self.options.policy {
            VllmPolicy::Fcfs => self.book.queue.front(handle.sequence),
            VllmPolicy::Priority => self.priority_key(handle),
        };
        let sequence = &mut self.book.sequences[handle];
        self.kv.release(&mut sequence.blocks);
        sequence.num_computed = 0;
        sequence.quiet_until = 0;
        sequence.num_preemptions += 1;
        self.book.metrics.num_preemptions += 1;
        self.book.enter_queue(handle, key);
    }

    pub(super) fn priority_key(&self, handle: Handle) -> QueueKey {
        let sequence = &self.book.sequences[handle];
        QueueKey::by_priority(sequence.priority, sequence.arrival, sequence.tie_key, sequence.id)
    }

    /// Takes a sequence out of the queue, from beside it, or from the load queue. Its new life is the caller's
    /// to set.
    pub(super) fn leave_queue(&mut self, handle: Handle) {
        if let Life::Loading { key, load } = self.book.sequences[handle].life {
            self.book.loads.remove(&key, self.share(handle), load == Load::InFlight);
        }
        self.book.leave_queue(handle);
    }

    /// Ends a sequence wherever it is.
    pub(super) fn end(&mut self, handle: Handle, finish: FinishReason) {
        let sequence = &self.book.sequences[handle];
        let transfer = match sequence.life {
            Life::Loading { load: Load::InFlight, .. } => Some(Transfer::Receive),
            _ => sequence.remote.as_ref().filter(|remote| remote.keeps(finish)).map(|_| Transfer::Send),
        };
        match sequence.life {
            Life::Arriving { key } => self.book.arrivals.remove(&key),
            Life::Queued { .. } | Life::Aside { .. } | Life::Loading { .. } => self.leave_queue(handle),
            Life::Running => self.book.running.one_is_gone(),
            Life::Ended { .. } => return,
        }
        self.conclude(handle, finish, transfer);
    }

    /// Ends a sequence that is in no queue and no batch any more: its blocks are freed, or stay for a
    /// transfer. The next pass reports it.
    pub(super) fn conclude(&mut self, handle: Handle, finish: FinishReason, transfer: Option<Transfer>) {
        self.log_end(handle, finish);
        self.tell_end(handle, finish, transfer);
        let sequence = &mut self.book.sequences[handle];
        let Some(transfer) = transfer else {
            self.kv.release(&mut sequence.blocks);
            return self.book.remove(handle, finish);
        };
        sequence.life = Life::Ended { finish, transfer };
        let num_blocks = u64::from(sequence.blocks.len());
        let stays = match transfer {
            Transfer::Send => self.options.kv_lease,
            Transfer::Receive => self.options.transfer_guard,
        };
        self.book.holds.insert(handle, num_blocks, self.book.now() + stays);
        self.book.note_end(handle.sequence, finish);
    }

    fn log_end(&mut self, handle: Handle, finish: FinishReason) {
        let Some(log) = &mut self.connector_log else { return };
        let sequence = &self.book.sequences[handle];
        let computed_tokens = sequence.num_computed;
        let computed_blocks = computed_tokens.div_ceil(self.options.block_size) as usize;
        log.push(ConnectorCall::Finished {
            sequence: handle.sequence,
            finish,
            blocks: sequence.blocks.ids().iter().take(computed_blocks).copied().collect(),
            computed_tokens,
            kept: sequence.remote.as_ref().is_some_and(|remote| remote.keeps(finish)),
        });
    }
}
