//! Commands and cancels, and the steps of a sequence's life outside a pass.

use crate::config::VllmPolicy;
use crate::error::CommandError;
use crate::handoff::HandoffKey;
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::command::{Applied, ApplyResult, Cancelled, Command, Submission};
use crate::scheduler::remote::{ConnectorCall, Remote, RemoteKv};
use crate::scheduler::sequence::{Life, Load, Sequence, Transfer};
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
                self.state = state;
                Ok(Applied::SchedulingSet)
            }
            Command::Throttle { sequence, throttled } => self.throttle(sequence, throttled),
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
        self.check(&submission)?;
        self.enter(submission, None, now);
        Ok(Applied::Submitted)
    }

    /// Whether a request can be taken in.
    pub(super) fn check(&self, submission: &Submission) -> Result<(), CommandError> {
        if self.sequences.find(submission.sequence).is_some() {
            return Err(CommandError::DuplicateSequence(submission.sequence));
        }
        Ok(submission.request.validate_core(&self.engine)?)
    }

    /// Takes a request in that was checked, with its dealings with other engines.
    pub(super) fn enter(
        &mut self,
        submission: Submission,
        remote: Option<(RemoteKv, Option<HandoffKey>)>,
        now: EngineTime,
    ) -> Handle {
        let arrival = submission.request.arrival.unwrap_or(now);
        let key = self.arrivals.place(arrival.max(now));
        let mut sequence = Sequence::new(submission, &self.engine, arrival, key);
        sequence.remote = remote.map(|(remote, handoff)| Remote::new(remote, handoff, sequence.num_prompt));
        let handle = self.sequences.insert(sequence);
        self.arrivals.insert(key, handle);
        handle
    }

    fn reset_prefix_cache(&mut self, reset_running_requests: bool) -> Applied {
        let mut preempted = Vec::new();
        if reset_running_requests {
            self.running.sweep(&self.sequences);
            while let Some(handle) = self.running.pop() {
                self.preempt(handle);
                preempted.push(handle.sequence);
            }
        }
        let reset = self.kv.reset();
        self.unshown |= reset;
        Applied::PrefixCacheReset { reset, preempted }
    }

    fn throttle(&mut self, sequence: SequenceId, throttled: bool) -> ApplyResult {
        let handle = self.alive(sequence).ok_or(CommandError::UnknownSequence(sequence))?;
        let sequence = &mut self.sequences[handle];
        sequence.throttled = throttled;
        sequence.quiet_until = 0;
        match (sequence.life, throttled) {
            (Life::Queued { key, deferred }, true) => {
                self.queue.count_deferred(deferred, false);
                self.queue.remove(&key);
                sequence.life = Life::Aside { key };
            }
            (Life::Aside { key }, false) => {
                self.queue.insert(key, handle);
                sequence.life = Life::Queued { key, deferred: false };
            }
            (Life::Loading { key, load: Load::Done | Load::Tried }, _) => self.loads.set_ready(key, handle, !throttled),
            _ => {}
        }
        Ok(Applied::ThrottleSet)
    }

    /// A sequence that has not ended.
    fn alive(&self, sequence: SequenceId) -> Option<Handle> {
        let handle = self.sequences.find(sequence)?;
        (!matches!(self.sequences[handle].life, Life::Ended { .. })).then_some(handle)
    }

    pub(crate) fn cancel(&mut self, sequence: SequenceId, now: EngineTime) -> Cancelled {
        self.turn_to(now);
        let Some(handle) = self.alive(sequence) else { return Cancelled::Unknown };
        self.end(handle, FinishReason::Cancelled);
        Cancelled::Removed
    }

    /// Puts those into the queue whose time has come; with `ties`, also those whose time is `now`. Says
    /// whether there were any.
    pub(super) fn release_arrivals(&mut self, now: EngineTime, ties: bool) -> bool {
        let mut any = false;
        while let Some(handle) = self.arrivals.take_due(now, ties) {
            let key = match self.options.policy {
                _ if self.goes_first(handle) => self.queue.destination(handle.sequence),
                VllmPolicy::Fcfs => self.queue.back(handle.sequence),
                VllmPolicy::Priority => self.priority_key(handle),
            };
            self.enter_queue(handle, key);
            any = true;
        }
        any
    }

    fn goes_first(&self, handle: Handle) -> bool {
        let remote = self.sequences[handle].remote.as_ref().filter(|_| self.options.destinations_first);
        remote.is_some_and(|remote| remote.handoff.is_some() && remote.copy.is_wanted())
    }

    /// Takes all blocks from a sequence that is not in the batch any more and queues it again: at the
    /// front, or by priority where it was.
    pub(super) fn preempt(&mut self, handle: Handle) {
        let key = match self.options.policy {
            VllmPolicy::Fcfs => self.queue.front(handle.sequence),
            VllmPolicy::Priority => self.priority_key(handle),
        };
        let sequence = &mut self.sequences[handle];
        self.kv.release(&mut sequence.blocks);
        sequence.num_computed = 0;
        sequence.quiet_until = 0;
        sequence.num_preemptions += 1;
        self.metrics.num_preemptions += 1;
        self.enter_queue(handle, key);
    }

    pub(super) fn priority_key(&self, handle: Handle) -> QueueKey {
        let sequence = &self.sequences[handle];
        QueueKey::by_priority(sequence.priority, sequence.arrival, sequence.tie_key, sequence.id)
    }

    fn enter_queue(&mut self, handle: Handle, key: QueueKey) {
        let sequence = &mut self.sequences[handle];
        self.queue.tokens_mut(sequence.was_preempted()).add(u64::from(sequence.num_tokens()));
        self.queue.count_wanting(false, sequence.wants_copy());
        if sequence.throttled {
            sequence.life = Life::Aside { key };
        } else {
            sequence.life = Life::Queued { key, deferred: false };
            self.queue.insert(key, handle);
        }
        self.unshown = true;
    }

    /// Takes a sequence out of the queue, from beside it, or from the load queue. Its new life is the caller's
    /// to set.
    pub(super) fn leave_queue(&mut self, handle: Handle) {
        let sequence = &self.sequences[handle];
        self.queue.tokens_mut(sequence.was_preempted()).remove(u64::from(sequence.num_tokens()));
        match sequence.life {
            Life::Queued { key, deferred } => {
                self.queue.count_deferred(deferred, false);
                self.queue.count_wanting(sequence.wants_copy(), false);
                self.queue.remove(&key);
            }
            Life::Aside { .. } => self.queue.count_wanting(sequence.wants_copy(), false),
            Life::Loading { key, load } => self.loads.remove(&key, self.share(handle), load == Load::InFlight),
            Life::Arriving { .. } | Life::Running | Life::Ended { .. } => {}
        }
    }

    /// Ends a sequence wherever it is.
    pub(super) fn end(&mut self, handle: Handle, finish: FinishReason) {
        let sequence = &self.sequences[handle];
        let transfer = match sequence.life {
            Life::Loading { load: Load::InFlight, .. } => Some(Transfer::Receive),
            _ => sequence.remote.as_ref().filter(|remote| remote.keeps(finish)).map(|_| Transfer::Send),
        };
        match sequence.life {
            Life::Arriving { key } => self.arrivals.remove(&key),
            Life::Queued { .. } | Life::Aside { .. } | Life::Loading { .. } => self.leave_queue(handle),
            Life::Running => self.running.one_is_gone(),
            Life::Ended { .. } => return,
        }
        self.conclude(handle, finish, transfer);
    }

    /// Ends a sequence that is in no queue and no batch any more: its blocks are freed, or stay for a
    /// transfer. The next pass reports it.
    pub(super) fn conclude(&mut self, handle: Handle, finish: FinishReason, transfer: Option<Transfer>) {
        self.log_end(handle, finish);
        self.tell_end(handle, finish, transfer);
        let finished = &mut self.metrics.finished;
        *match finish {
            FinishReason::Stop { .. } => &mut finished.stop,
            FinishReason::Length => &mut finished.length,
            FinishReason::OutOfMemory => &mut finished.out_of_memory,
            FinishReason::TransferFailed => &mut finished.transfer_failed,
            _ => &mut finished.aborted,
        } += 1;
        let sequence = &mut self.sequences[handle];
        if let Some(transfer) = transfer {
            sequence.life = Life::Ended { finish, transfer };
            let stays = match transfer {
                Transfer::Send => self.options.kv_lease,
                Transfer::Receive => self.options.transfer_guard,
            };
            self.holds.insert(handle, u64::from(sequence.blocks.len()), self.now + stays);
        } else {
            self.kv.release(&mut sequence.blocks);
            self.sequences.remove(handle);
        }
        self.ended.push(handle.sequence);
        self.unshown = true;
    }

    fn log_end(&mut self, handle: Handle, finish: FinishReason) {
        let Some(log) = &mut self.connector_log else { return };
        let sequence = &self.sequences[handle];
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
