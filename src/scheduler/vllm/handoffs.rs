//! The handoff commands: each is a verb of the table, and what it means for a sequence and its blocks.

use crate::config::FirstToken;
use crate::handoff::HandoffKey;
use crate::output::FinishReason;
use crate::scheduler::command::{Applied, ApplyResult, Submission};
use crate::scheduler::handoff::{
    DestinationEnd, DestinationState, HandoffFact, HandoffSide, Registration, SourceEnd, SourceState,
};
use crate::scheduler::remote::{KeepBlocks, LoadTiming, RemoteCopy, RemoteKv};
use crate::scheduler::sequence::{Life, Transfer};
use crate::scheduler::sequences::Handle;
use crate::time::EngineTime;

use super::VllmCore;

impl VllmCore {
    /// Takes in the request of a source.
    pub(super) fn submit_prefill(&mut self, key: HandoffKey, submission: Submission, now: EngineTime) -> ApplyResult {
        let remote = RemoteKv { copy: None, keep: KeepBlocks::WhenFinished };
        self.submit_side(key, HandoffSide::Source(SourceState::Prefilling), (submission, remote), now)
    }

    /// Takes in the request of a destination. One load uses the source's copy up.
    pub(super) fn reserve_destination(
        &mut self,
        key: HandoffKey,
        submission: Submission,
        now: EngineTime,
    ) -> ApplyResult {
        let copy = whole_prompt(&submission, LoadTiming::BetweenPasses);
        let remote = RemoteKv { copy: Some(copy), keep: KeepBlocks::Never };
        self.submit_side(key, HandoffSide::Destination(DestinationState::Waiting), (submission, remote), now)
    }

    fn submit_side(
        &mut self,
        key: HandoffKey,
        side: HandoffSide,
        (submission, remote): (Submission, RemoteKv),
        now: EngineTime,
    ) -> ApplyResult {
        let earlier = self.book.handoffs.may_submit(key)?;
        self.book.check(&submission)?;
        if let Some(earlier) = earlier {
            self.supersede(earlier);
        }
        let handle = self.enter_remote(submission, (remote, Some(key)), now);
        self.book.handoffs.submit(key, handle, side);
        Ok(Applied::Submitted)
    }

    /// Takes in a request whose prompt is there as if it had been transferred, but for its last token.
    pub(super) fn submit_decode(&mut self, submission: Submission, now: EngineTime) -> ApplyResult {
        let copy = whole_prompt(&submission, LoadTiming::WithinPass);
        self.submit_remote(submission, RemoteKv { copy: Some(copy), keep: KeepBlocks::Never }, now)
    }

    pub(super) fn submit_remote(&mut self, submission: Submission, remote: RemoteKv, now: EngineTime) -> ApplyResult {
        self.book.check(&submission)?;
        self.enter_remote(submission, (remote, None), now);
        Ok(Applied::Submitted)
    }

    /// Ends an earlier registration whose place a later one takes. What runs already goes on by itself.
    fn supersede(&mut self, earlier: Registration) {
        let Registration { key, handle, side } = earlier;
        if let Some(remote) = &mut self.book.sequences[handle].remote {
            remote.handoff = None;
            remote.keep = KeepBlocks::Never;
        }
        let (sequence, at) = (handle.sequence, self.book.now());
        match side {
            HandoffSide::Source(source) => {
                self.book.handoffs.source_ended(key, sequence, at, SourceEnd::Superseded);
                if source == SourceState::Held {
                    self.let_go(handle);
                }
            }
            HandoffSide::Destination(DestinationState::Guarded) => self.book.handoffs.forget(key),
            HandoffSide::Destination(destination) => {
                self.book.handoffs.destination_ended(key, sequence, at, DestinationEnd::Superseded);
                if destination != DestinationState::Active {
                    self.end(handle, FinishReason::Cancelled);
                    self.book.show_end(sequence, FinishReason::Cancelled);
                }
            }
        }
    }

    pub(super) fn activate_destination(&mut self, key: HandoffKey, first_token: Option<u32>) -> ApplyResult {
        match self.book.handoffs.end_transfer(key)? {
            (handle, DestinationState::Guarded) => {
                self.let_go(handle);
                Ok(Applied::HandoffOver)
            }
            (handle, _) => {
                self.land(handle);
                if let (FirstToken::CarriedOver, Some(token)) = (self.options.first_token, first_token) {
                    self.carry_over(handle, token);
                }
                Ok(Applied::Handoff)
            }
        }
    }

    /// Gives a loaded sequence the first output token, which the source has shown. It may be its last.
    fn carry_over(&mut self, handle: Handle, token: u32) {
        let before = self.share(handle);
        let sequence = &mut self.book.sequences[handle];
        let waiting = self.book.queue.tokens_mut(sequence.was_preempted());
        waiting.remove(u64::from(sequence.num_tokens()));
        let stop = sequence.content.carry(token);
        sequence.num_output = 1;
        waiting.add(u64::from(sequence.num_tokens()));
        let at_limit = (sequence.num_output >= sequence.output_limit).then_some(FinishReason::Length);
        let finish = stop.or(at_limit);
        self.book.loads.exchange(before, self.share(handle));
        if let Some(finish) = finish {
            self.end(handle, finish);
            self.book.show_end(handle.sequence, finish);
        }
    }

    pub(super) fn fail_transfer(&mut self, key: HandoffKey, valid_tokens: u32) -> ApplyResult {
        match self.book.handoffs.end_transfer(key)? {
            (handle, DestinationState::Guarded) => {
                self.let_go(handle);
                Ok(Applied::HandoffOver)
            }
            (handle, _) => {
                self.land(handle);
                let block_size = self.options.block_size;
                let sequence = &mut self.book.sequences[handle];
                let valid = valid_tokens / block_size * block_size;
                if valid_tokens < sequence.num_computed {
                    sequence.num_computed = valid;
                    self.fail_load(handle);
                }
                Ok(Applied::Handoff)
            }
        }
    }

    pub(super) fn release(&mut self, key: HandoffKey) -> ApplyResult {
        let Some(handle) = self.book.handoffs.release(key)? else { return Ok(Applied::HandoffOver) };
        self.end_source(handle, SourceEnd::Released);
        Ok(Applied::Handoff)
    }

    pub(super) fn cancel_source(&mut self, key: HandoffKey) -> ApplyResult {
        match self.book.handoffs.cancel_source(key)? {
            None => return Ok(Applied::HandoffOver),
            Some((handle, SourceState::Held)) => self.end_source(handle, SourceEnd::Cancelled),
            Some((handle, SourceState::Prefilling)) => self.cancel_visibly(handle),
        }
        Ok(Applied::Handoff)
    }

    pub(super) fn cancel_destination(&mut self, key: HandoffKey) -> ApplyResult {
        match self.book.handoffs.cancel_destination(key)? {
            None => return Ok(Applied::HandoffOver),
            Some((handle, DestinationState::Guarded)) => {
                self.book.handoffs.forget(key);
                self.let_go(handle);
                return Ok(Applied::HandoffOver);
            }
            Some((handle, _)) => {
                // Nothing writes into its blocks any more.
                self.land(handle);
                self.cancel_visibly(handle);
            }
        }
        Ok(Applied::Handoff)
    }

    pub(super) fn heartbeat(&mut self, key: HandoffKey) -> ApplyResult {
        let Some((handle, source)) = self.book.handoffs.heartbeat(key)? else { return Ok(Applied::HandoffOver) };
        if source == SourceState::Held {
            // The longest leases end after time does, whatever they are multiplied by.
            let ahead = self.options.kv_lease.saturating_mul(2) / 3;
            self.book.holds.extend(handle.sequence, self.book.now() + ahead);
        }
        Ok(Applied::Handoff)
    }

    /// Cancels a request on behalf of its handoff: its reader has not asked for that and is told.
    fn cancel_visibly(&mut self, handle: Handle) {
        self.end(handle, FinishReason::Cancelled);
        self.book.show_end(handle.sequence, FinishReason::Cancelled);
    }

    fn end_source(&mut self, handle: Handle, end: SourceEnd) {
        if let Some(key) = self.handoff_of(handle) {
            self.book.handoffs.source_ended(key, handle.sequence, self.book.now(), end);
        }
        self.let_go(handle);
    }

    /// Lets an ended sequence go whose deadline has come.
    pub(super) fn expire_hold(&mut self, handle: Handle) {
        match self.book.sequences[handle].life {
            Life::Ended { transfer: Transfer::Send, .. } => {
                self.book.metrics.expired_leases += 1;
                self.end_source(handle, SourceEnd::Expired);
            }
            _ => {
                self.book.metrics.expired_guards += 1;
                if let Some(key) = self.handoff_of(handle) {
                    self.book.handoffs.forget(key);
                }
                self.let_go(handle);
            }
        }
    }

    pub(super) fn handoff_of(&self, handle: Handle) -> Option<HandoffKey> {
        self.book.sequences[handle].remote.as_ref().and_then(|remote| remote.handoff)
    }

    /// Tells the handoff of a destination that its blocks are there, `local` tokens of them from the cache.
    pub(super) fn tell_reserved(&mut self, handle: Handle, local: u32) {
        let Some(handoff) = self.handoff_of(handle) else { return };
        let prompt_tokens = self.book.sequences[handle].num_prompt;
        // The last token is computed again: if it alone is missing, there is nothing to transfer.
        let transferable_prompt_tokens = if local + 1 >= prompt_tokens { 0 } else { prompt_tokens - local };
        let (sequence, at) = (handle.sequence, self.book.now());
        self.book.handoffs.reserved(HandoffFact::DestinationReserved {
            handoff,
            sequence,
            at,
            prompt_tokens,
            transferable_prompt_tokens,
        });
    }

    /// Tells the handoff of a sequence that its request ends so, and which transfer its blocks wait for.
    pub(super) fn tell_end(&mut self, handle: Handle, finish: FinishReason, transfer: Option<Transfer>) {
        let Some(handoff) = self.handoff_of(handle) else { return };
        let (sequence, at) = (handle.sequence, self.book.now());
        match (self.book.handoffs.is_source(handoff), transfer) {
            (true, Some(_)) => {
                let source = &self.book.sequences[handle];
                self.book.handoffs.held(HandoffFact::SourceHeld {
                    handoff,
                    sequence,
                    at,
                    prompt_tokens: source.num_prompt,
                    cached_tokens: source.num_cached,
                    first_token: source.content.output(0).0,
                    expires_at: at + self.options.kv_lease,
                });
            }
            (true, None) => {
                let end = match finish {
                    FinishReason::OutOfMemory => SourceEnd::OutOfMemory,
                    _ => SourceEnd::Cancelled,
                };
                self.book.handoffs.source_ended(handoff, sequence, at, end);
            }
            (false, transfer) => {
                let end = match finish {
                    FinishReason::OutOfMemory => DestinationEnd::OutOfMemory,
                    FinishReason::TransferFailed => DestinationEnd::TransferFailed,
                    FinishReason::Stop { .. } | FinishReason::Length => DestinationEnd::Finished,
                    _ => DestinationEnd::Cancelled,
                };
                if transfer.is_some() {
                    self.book.handoffs.guarded(handoff, sequence, at, end);
                } else {
                    self.book.handoffs.destination_ended(handoff, sequence, at, end);
                }
            }
        }
    }
}

/// The copy that a source has of a whole prompt, good for one load.
fn whole_prompt(submission: &Submission, load: LoadTiming) -> RemoteCopy {
    let tokens = u32::try_from(submission.request.prompt.len()).unwrap_or(u32::MAX);
    RemoteCopy { tokens, load, lasting: false, undecided_look_ups: 0 }
}
