//! The handoff commands: each is a verb of the table, and what it means for a sequence and its blocks.

use crate::config::FirstToken;
use crate::error::HandoffRefusal;
use crate::handoff::HandoffKey;
use crate::output::FinishReason;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

use super::super::command::{Applied, ApplyResult, Submission};
use super::super::engine_core::EngineCore;
use super::super::remote::{KeepBlocks, LoadTiming, RemoteCopy, RemoteKv};
use super::super::sequence::{Life, Transfer};
use super::super::sequences::Handle;
use super::{DestinationEnd, DestinationState, HandoffFact, HandoffSide, Registration, SourceEnd, SourceState};

/// What the commands of handoffs do, the same in every engine kind.
pub(crate) trait HandoffCommands: EngineCore {
    /// Takes in the request of a source.
    fn submit_prefill(&mut self, key: HandoffKey, submission: Submission, now: EngineTime) -> ApplyResult {
        let remote = RemoteKv { copy: None, keep: KeepBlocks::WhenFinished };
        self.submit_side(key, HandoffSide::Source(SourceState::Prefilling), (submission, remote), now)
    }

    /// Takes in the request of a destination.
    fn reserve_destination(&mut self, key: HandoffKey, submission: Submission, now: EngineTime) -> ApplyResult {
        let copy = self.whole_prompt(&submission, LoadTiming::BetweenPasses);
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
        let earlier = self.book().handoffs.may_submit(key)?;
        if let Some(earlier) = earlier.filter(|_| seeded_bug!(SupersedesBeforeItChecks)) {
            self.supersede(earlier);
        }
        let submission = self.check(submission)?;
        if let Some(earlier) = earlier.filter(|_| !seeded_bug!(SupersedesBeforeItChecks)) {
            self.supersede(earlier);
        }
        let handle = self.enter(submission, Some((remote, Some(key))), now);
        self.book_mut().handoffs.submit(key, handle, side);
        Ok(Applied::Submitted)
    }

    /// Takes in a request whose prompt counts as transferred.
    fn submit_decode(&mut self, submission: Submission, now: EngineTime) -> ApplyResult {
        let copy = self.whole_prompt(&submission, LoadTiming::WithinPass);
        self.submit(submission, Some((RemoteKv { copy: Some(copy), keep: KeepBlocks::Never }, None)), now)
    }

    /// Ends an earlier registration whose place a later one takes. What runs already goes on by itself.
    fn supersede(&mut self, earlier: Registration) {
        let Registration { key, handle, side } = earlier;
        if let Some(remote) = &mut self.book_mut().sequences[handle].remote {
            remote.handoff = None;
            remote.keep = KeepBlocks::Never;
        }
        let (sequence, at) = (handle.sequence, self.book().now());
        match side {
            HandoffSide::Source(source) => {
                self.book_mut().handoffs.source_ended(key, sequence, at, SourceEnd::Superseded);
                if source == SourceState::Held {
                    self.let_go(handle);
                }
            }
            HandoffSide::Destination(DestinationState::Guarded) => self.book_mut().handoffs.forget(key),
            HandoffSide::Destination(destination) => {
                self.book_mut().handoffs.destination_ended(key, sequence, at, DestinationEnd::Superseded);
                if destination != DestinationState::Active {
                    self.end_visibly(handle, FinishReason::Cancelled);
                }
            }
        }
    }

    fn activate_destination(&mut self, key: HandoffKey, first_token: Option<u32>) -> ApplyResult {
        let Some(handle) = self.end_transfer(key)? else { return Ok(Applied::HandoffOver) };
        if let (FirstToken::CarriedOver, Some(token)) = (self.terms().first_token, first_token) {
            self.carry_over(handle, token);
        }
        Ok(Applied::Handoff)
    }

    /// Ends the transfer to a destination: its sequence, unless that had been given up and is let go now.
    fn end_transfer(&mut self, key: HandoffKey) -> Result<Option<Handle>, HandoffRefusal> {
        let (handle, destination) = self.book_mut().handoffs.end_transfer(key)?;
        if destination == DestinationState::Guarded {
            self.let_go(handle);
            return Ok(None);
        }
        self.book_mut().end_load(handle);
        Ok(Some(handle))
    }

    /// Gives a loaded sequence the first output token, which the source has shown. It may be its last.
    fn carry_over(&mut self, handle: Handle, token: u32) {
        let before = self.share(handle);
        let book = self.book_mut();
        let sequence = &mut book.sequences[handle];
        let waiting = book.queue.tokens_mut(sequence.was_preempted());
        waiting.remove(u64::from(sequence.num_tokens()));
        let stop = sequence.content.carry(token);
        sequence.num_output = 1;
        waiting.add(u64::from(sequence.num_tokens()));
        let at_limit = (sequence.num_output >= sequence.output_limit).then_some(FinishReason::Length);
        let finish = stop.or(at_limit);
        let after = self.share(handle);
        self.book_mut().loads.exchange(before, after);
        if let Some(finish) = finish {
            self.end_visibly(handle, finish);
        }
    }

    fn fail_transfer(&mut self, key: HandoffKey, valid_tokens: u32) -> ApplyResult {
        let Some(handle) = self.end_transfer(key)? else { return Ok(Applied::HandoffOver) };
        let block_size = self.book().engine.kind.block_size();
        let sequence = &mut self.book_mut().sequences[handle];
        let valid = valid_tokens / block_size * block_size;
        if valid_tokens < sequence.num_computed {
            sequence.num_computed = valid;
            self.fail_load(handle);
        }
        Ok(Applied::Handoff)
    }

    fn release_source(&mut self, key: HandoffKey) -> ApplyResult {
        let Some(handle) = self.book().handoffs.release(key)? else { return Ok(Applied::HandoffOver) };
        self.end_source(handle, SourceEnd::Released);
        Ok(Applied::Handoff)
    }

    fn cancel_source(&mut self, key: HandoffKey) -> ApplyResult {
        match self.book().handoffs.cancel_source(key)? {
            None => return Ok(Applied::HandoffOver),
            Some((handle, SourceState::Held)) => self.end_source(handle, SourceEnd::Cancelled),
            Some((handle, SourceState::Prefilling)) => self.end_visibly(handle, FinishReason::Cancelled),
        }
        Ok(Applied::Handoff)
    }

    fn cancel_destination(&mut self, key: HandoffKey) -> ApplyResult {
        match self.book().handoffs.cancel_destination(key)? {
            None => return Ok(Applied::HandoffOver),
            Some((handle, DestinationState::Guarded)) => {
                self.book_mut().handoffs.forget(key);
                self.let_go(handle);
                return Ok(Applied::HandoffOver);
            }
            Some((handle, _)) => {
                // Nothing writes into its blocks any more.
                self.book_mut().end_load(handle);
                self.end_visibly(handle, FinishReason::Cancelled);
            }
        }
        Ok(Applied::Handoff)
    }

    fn heartbeat(&mut self, key: HandoffKey) -> ApplyResult {
        let Some((handle, source)) = self.book().handoffs.heartbeat(key)? else { return Ok(Applied::HandoffOver) };
        if source == SourceState::Held {
            // The longest leases end after time does, whatever they are multiplied by.
            let ahead = self.terms().lease.saturating_mul(2) / 3;
            let until = self.book().now() + ahead;
            self.book_mut().holds.extend(handle.sequence, until);
        }
        Ok(Applied::Handoff)
    }

    fn end_source(&mut self, handle: Handle, end: SourceEnd) {
        if let Some(key) = self.handoff_of(handle) {
            let at = self.book().now();
            self.book_mut().handoffs.source_ended(key, handle.sequence, at, end);
        }
        self.let_go(handle);
    }

    /// Lets an ended sequence go whose deadline has come.
    fn expire_hold(&mut self, handle: Handle) {
        match self.book().sequences[handle].life {
            Life::Ended { transfer: Transfer::Send, .. } => {
                self.book_mut().metrics.expired_leases += 1;
                self.end_source(handle, SourceEnd::Expired);
            }
            _ => {
                self.book_mut().metrics.expired_guards += 1;
                if let Some(key) = self.handoff_of(handle) {
                    self.book_mut().handoffs.forget(key);
                }
                self.let_go(handle);
            }
        }
    }

    fn handoff_of(&self, handle: Handle) -> Option<HandoffKey> {
        self.book().sequences[handle].remote.as_ref().and_then(|remote| remote.handoff)
    }

    /// Tells the handoff of a destination that its blocks are there, and what is to be transferred into them.
    fn tell_reserved(&mut self, handle: Handle, transferable_prompt_tokens: u32) {
        let Some(handoff) = self.handoff_of(handle) else { return };
        let prompt_tokens = self.book().sequences[handle].num_prompt;
        let (sequence, at) = (handle.sequence, self.book().now());
        self.book_mut().handoffs.reserved(HandoffFact::DestinationReserved {
            handoff,
            sequence,
            at,
            prompt_tokens,
            transferable_prompt_tokens,
        });
    }

    /// Tells the handoff of a sequence that its request ends so, and which transfer its blocks wait for.
    fn tell_end(&mut self, handle: Handle, finish: FinishReason, transfer: Option<Transfer>) {
        let Some(handoff) = self.handoff_of(handle) else { return };
        let (sequence, at) = (handle.sequence, self.book().now());
        match (self.book().handoffs.is_source(handoff), transfer) {
            (true, Some(_)) => {
                let source = &self.book().sequences[handle];
                let fact = HandoffFact::SourceHeld {
                    handoff,
                    sequence,
                    at,
                    prompt_tokens: source.num_prompt,
                    cached_tokens: source.num_cached,
                    first_token: source.content.output(0).0,
                    expires_at: at + self.terms().lease,
                };
                self.book_mut().handoffs.held(fact);
            }
            (true, None) => {
                let end = match finish {
                    FinishReason::OutOfMemory => SourceEnd::OutOfMemory,
                    _ => SourceEnd::Cancelled,
                };
                self.book_mut().handoffs.source_ended(handoff, sequence, at, end);
            }
            (false, transfer) => {
                let end = match finish {
                    FinishReason::OutOfMemory => DestinationEnd::OutOfMemory,
                    FinishReason::TransferFailed => DestinationEnd::TransferFailed,
                    FinishReason::Stop { .. } | FinishReason::Length => DestinationEnd::Finished,
                    _ => DestinationEnd::Cancelled,
                };
                if transfer.is_some() {
                    self.book_mut().handoffs.guarded(handoff, sequence, at, end);
                } else {
                    self.book_mut().handoffs.destination_ended(handoff, sequence, at, end);
                }
            }
        }
    }

    /// The copy that a source has of a whole prompt, good for one load unless the destination keeps it.
    fn whole_prompt(&self, submission: &Submission, load: LoadTiming) -> RemoteCopy {
        let tokens = u32::try_from(submission.request.prompt.len()).unwrap_or(u32::MAX);
        RemoteCopy { tokens, load, lasting: self.terms().reloads, undecided_look_ups: 0 }
    }
}

impl<C: EngineCore> HandoffCommands for C {}
