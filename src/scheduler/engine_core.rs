//! What every engine kind does alike with what its book holds: the turns of its loop, taking commands in, and every
//! way in which a sequence leaves a list, ends, and lets its blocks go. An engine kind says what it does differently.

use std::time::Duration;

use crate::config::{FirstToken, LoadFailurePolicy, SchedulingState};
use crate::error::CommandError;
use crate::handoff::HandoffKey;
use crate::kv::HeldBlocks;
use crate::kv_event::KvEvent;
use crate::output::FinishReason;
use crate::request::{Request, SequenceId};
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

use super::book::Book;
use super::command::{Applied, ApplyResult, Cancelled, Command, Submission};
use super::handoff::HandoffCommands;
use super::load_queue::Share;
use super::pass::{Effects, Pass};
use super::remote::{Remote, RemoteKv, TransferReport};
use super::sequence::{Life, Load, Transfer};
use super::sequences::Handle;
use super::waiting::QueueKey;

const NO_CONNECTOR: CommandError = CommandError::NotSupported("a KV connector");

/// How an engine kind takes part in handoffs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandoffTerms {
    /// How long a source's blocks are held without a heartbeat.
    pub(crate) lease: Duration,
    /// How long the blocks of a destination that was given up wait for the end of its transfer.
    pub(crate) guard: Duration,
    /// What a destination does about its first token.
    pub(crate) first_token: FirstToken,
    /// What a failed load does to its request.
    pub(crate) on_failed_load: LoadFailurePolicy,
    /// Whether a destination can be loaded once more: it was copied elsewhere when it lost its blocks.
    pub(crate) reloads: bool,
}

/// A request's dealings with other engines, as it is taken in.
pub(crate) type Dealings = (RemoteKv, Option<HandoffKey>);

/// One engine kind's scheduler. What has no body here is what every kind has to say for itself.
pub(crate) trait EngineCore: Sized {
    /// What a sequence holds.
    type Blocks: HeldBlocks;

    fn book(&self) -> &Book<Self::Blocks>;

    fn book_mut(&mut self) -> &mut Book<Self::Blocks>;

    fn terms(&self) -> HandoffTerms;

    /// Brings a request into the kind's own terms.
    fn normalise(&self, _request: &mut Request) {}

    /// Outputs at which a request that was just taken in ends.
    fn output_limit(&self, handle: Handle) -> u32 {
        self.book().sequences[handle].output_limit
    }

    /// Puts a sequence whose time has come into its place in the queue.
    fn queue_up(&mut self, handle: Handle);

    fn reset_prefix_cache(&mut self, reset_running_requests: bool) -> Applied;

    /// Plans a pass as of now.
    fn plan(&mut self, pass: &mut Pass);

    /// The batch, in order.
    fn running(&self) -> impl Iterator<Item = Handle> + '_;

    /// KV events that no effects have shown.
    fn kv_events(&self) -> &[KvEvent];

    /// Completes effects: the events so far and the state at this boundary.
    fn show(&mut self, effects: &mut Effects, now: EngineTime);

    /// Blocks that a sequence misses for the tokens that it has.
    fn missing_blocks(&self, handle: Handle) -> u64;

    fn release_blocks(&mut self, handle: Handle);

    /// Takes note that a running sequence leaves the batch. Its new life is the caller's to set.
    fn leave_batch(&mut self, handle: Handle);

    fn set_scheduling(&mut self, state: SchedulingState) {
        self.book_mut().state = state;
    }

    /// Takes in a request with KV at another engine.
    fn submit_remote(&mut self, _submission: Submission, _remote: RemoteKv, _now: EngineTime) -> ApplyResult {
        Err(NO_CONNECTOR)
    }

    /// Takes what the worker that transfers KV says.
    fn take_report(&mut self, _report: TransferReport) -> ApplyResult {
        Err(NO_CONNECTOR)
    }

    /// Notes whether transfers will free blocks soon.
    fn expect_frees(&mut self, _expected: bool) -> ApplyResult {
        Err(NO_CONNECTOR)
    }

    /// Lets a cancelled sequence take part in one more pass, where the kind's rule wants that.
    fn runs_once_more(&mut self, _handle: Handle) -> bool {
        false
    }

    /// Notes how a sequence ends, while it is still known.
    fn log_end(&mut self, _handle: Handle, _finish: FinishReason) {}

    /// A turn of the engine's loop begins; arrivals come after it.
    fn begin_turn(&mut self) {}

    /// A turn of the engine's loop had nothing to do.
    fn idle_turn(&mut self) {}

    fn begin_pass(&mut self, now: EngineTime) -> Option<Box<Pass>> {
        let mut pass = self.book_mut().open_pass()?;
        self.turn_to(now);
        self.begin_turn();
        let sees_ties = self.book().sees_ties(now);
        self.release_arrivals(now, sees_ties);
        self.plan(&mut pass);
        // With nothing else to do there is no boundary to come first.
        if pass.rows.is_empty() && pass.preempted.is_empty() && self.release_arrivals(now, true) {
            self.plan(&mut pass);
        }
        self.book_mut().launch(pass, now)
    }

    fn settle(&mut self, now: EngineTime) -> Option<Box<Effects>> {
        self.idle_turn();
        if !self.book().in_flight() {
            self.turn_to(now);
            let sees_ties = self.book().sees_ties(now);
            self.release_arrivals(now, sees_ties);
        }
        let has_events = !self.kv_events().is_empty();
        let mut effects = self.book_mut().open_settlement(has_events)?;
        self.show(&mut effects, now);
        Some(effects)
    }

    fn has_work(&self) -> bool {
        self.book().has_work(self.running().any(|handle| !self.book().sequences[handle].throttled))
    }

    /// Notes the time and does what is due by then.
    fn turn_to(&mut self, now: EngineTime) {
        self.book_mut().hear(now);
        self.expire(now);
    }

    /// Lets go of everything whose deadline has come.
    fn expire(&mut self, now: EngineTime) {
        while let Some(handle) = self.book().holds.due(now) {
            self.expire_hold(handle);
        }
    }

    fn apply(&mut self, command: Command, now: EngineTime) -> ApplyResult {
        self.turn_to(now);
        match command {
            Command::Submit(submission) => self.submit(submission, None, now),
            Command::ResetPrefixCache { reset_running_requests } => Ok(self.reset_prefix_cache(reset_running_requests)),
            Command::SetScheduling(state) => {
                self.set_scheduling(state);
                Ok(Applied::SchedulingSet)
            }
            Command::Throttle { sequence, throttled } => {
                self.book_mut().throttle(sequence, throttled)?;
                Ok(Applied::ThrottleSet)
            }
            Command::SubmitPrefill { handoff, submission } => self.submit_prefill(handoff, submission, now),
            Command::ReserveDestination { handoff, submission } => self.reserve_destination(handoff, submission, now),
            Command::ActivateDestination { handoff, first_token } => self.activate_destination(handoff, first_token),
            Command::ReleaseSource { handoff } => self.release_source(handoff),
            Command::CancelSource { handoff } => self.cancel_source(handoff),
            Command::CancelDestination { handoff } => self.cancel_destination(handoff),
            Command::FailTransfer { handoff, valid_tokens } => self.fail_transfer(handoff, valid_tokens),
            Command::Heartbeat { handoff } => self.heartbeat(handoff),
            Command::SubmitDecode(submission) => self.submit_decode(submission, now),
            Command::SubmitRemote { submission, remote } => self.submit_remote(submission, remote, now),
            Command::Transfers(report) => self.take_report(report),
            Command::ExpectFrees(expected) => self.expect_frees(expected),
        }
    }

    /// Takes a request in, with its dealings with other engines if it has any.
    fn submit(&mut self, submission: Submission, dealings: Option<Dealings>, now: EngineTime) -> ApplyResult {
        let submission = self.check(submission)?;
        self.enter(submission, dealings, now);
        Ok(Applied::Submitted)
    }

    /// A request that can be taken in, in the kind's own terms.
    fn check(&self, mut submission: Submission) -> Result<Submission, CommandError> {
        self.normalise(&mut submission.request);
        self.book().check(&submission)?;
        Ok(submission)
    }

    /// Takes a request in that was checked; it waits for its arrival.
    fn enter(&mut self, submission: Submission, dealings: Option<Dealings>, now: EngineTime) -> Handle {
        let handle = self.book_mut().enter(submission, now);
        let sequence = &mut self.book_mut().sequences[handle];
        sequence.remote = dealings.map(|(remote, handoff)| Remote::new(remote, handoff, sequence.num_prompt));
        let output_limit = self.output_limit(handle);
        self.book_mut().sequences[handle].output_limit = output_limit;
        handle
    }

    /// Puts those into the queue whose time has come; with `ties`, also those whose time is `now`. Says
    /// whether there were any.
    fn release_arrivals(&mut self, now: EngineTime, ties: bool) -> bool {
        let mut any = false;
        while let Some(handle) = self.book_mut().arrivals.take_due(now, ties) {
            self.queue_up(handle);
            any = true;
        }
        any
    }

    fn cancel(&mut self, sequence: SequenceId, now: EngineTime) -> Cancelled {
        self.turn_to(now);
        let Some(handle) = self.book().alive(sequence) else { return Cancelled::Unknown };
        if self.book().sequences[handle].life == Life::Running && self.runs_once_more(handle) {
            return Cancelled::Ending;
        }
        self.end(handle, FinishReason::Cancelled);
        Cancelled::Removed
    }

    /// What a sequence that waits with blocks counts for.
    fn share(&self, handle: Handle) -> Share {
        let held = self.book().sequences[handle].blocks.ids().len() as u64;
        Share { held, missing: self.missing_blocks(handle) }
    }

    /// Puts a sequence whose load begins among those that wait with blocks.
    fn enter_load_queue(&mut self, handle: Handle, key: QueueKey) {
        let share = self.share(handle);
        let book = self.book_mut();
        let sequence = &mut book.sequences[handle];
        book.queue.tokens_mut(sequence.was_preempted()).add(u64::from(sequence.num_tokens()));
        sequence.life = Life::Loading { key, load: Load::InFlight };
        book.loads.insert(key, handle, share);
        book.note_change();
    }

    /// Takes a sequence out of the queue, from beside it, or from the load queue. Its new life is the caller's
    /// to set.
    fn leave_queue(&mut self, handle: Handle) {
        if let Life::Loading { key, load } = self.book().sequences[handle].life {
            let share = self.share(handle);
            self.book_mut().loads.remove(&key, share, load == Load::InFlight);
        }
        self.book_mut().leave_queue(handle);
    }

    /// Ends a sequence wherever it is.
    fn end(&mut self, handle: Handle, finish: FinishReason) {
        let sequence = &self.book().sequences[handle];
        let transfer = match sequence.life {
            Life::Loading { load: Load::InFlight, .. } if !seeded_bug!(FreesWhatIsStillWritten) => {
                Some(Transfer::Receive)
            }
            _ => sequence.remote.as_ref().filter(|remote| remote.keeps(finish)).map(|_| Transfer::Send),
        };
        match sequence.life {
            Life::Arriving { key } => self.book_mut().arrivals.remove(&key),
            Life::Queued { .. } | Life::Aside { .. } | Life::Loading { .. } => self.leave_queue(handle),
            Life::Running => self.leave_batch(handle),
            Life::Ended { .. } => return,
        }
        self.conclude(handle, finish, transfer);
    }

    /// Ends a sequence that is in no queue and no batch any more: its blocks are freed, or stay for a
    /// transfer. The next pass reports it.
    fn conclude(&mut self, handle: Handle, finish: FinishReason, transfer: Option<Transfer>) {
        self.log_end(handle, finish);
        self.tell_end(handle, finish, transfer);
        let Some(transfer) = transfer else {
            self.release_blocks(handle);
            return self.book_mut().remove(handle, finish);
        };
        let HandoffTerms { lease, guard, .. } = self.terms();
        let book = self.book_mut();
        let sequence = &mut book.sequences[handle];
        sequence.life = Life::Ended { finish, transfer };
        let num_blocks = sequence.blocks.ids().len() as u64;
        let stays = match transfer {
            Transfer::Send => lease,
            Transfer::Receive => guard,
        };
        let until = book.now() + stays;
        book.holds.insert(handle, num_blocks, until);
        book.note_end(handle.sequence, finish);
    }

    /// Ends a sequence that is in no queue and no batch any more, for a reason that its reader has not asked for.
    fn conclude_visibly(&mut self, handle: Handle, finish: FinishReason) {
        self.conclude(handle, finish, None);
        self.book_mut().show_end(handle.sequence, finish);
    }

    /// The same wherever it is.
    fn end_visibly(&mut self, handle: Handle, finish: FinishReason) {
        self.end(handle, finish);
        self.book_mut().show_end(handle.sequence, finish);
    }

    /// Deals with a load whose valid part has been cut: by the policy its request ends, or computes the rest.
    fn fail_load(&mut self, handle: Handle) {
        self.book_mut().note_change();
        if self.terms().on_failed_load == LoadFailurePolicy::Fail {
            self.end_visibly(handle, FinishReason::TransferFailed);
        }
    }

    /// Frees the blocks of an ended sequence and forgets it.
    fn let_go(&mut self, handle: Handle) {
        self.book_mut().holds.remove(handle.sequence);
        self.release_blocks(handle);
        self.book_mut().sequences.remove(handle);
        self.book_mut().note_change();
    }
}
