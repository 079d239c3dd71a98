//! The actor's part: handoff commands into the scheduler, and what comes of them.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::handoff::HandoffKey;
use crate::live::actor::Actor;
use crate::live::error::HandoffError;
use crate::live::handoff::HandoffCommand;
use crate::live::handoff::control::Verb;
use crate::live::lanes::RouteChange;
use crate::live::request::LiveRequestRegistration;
use crate::request::SequenceId;
use crate::scheduler::{
    Applied, Command, DestinationState, Effects, HandoffFact, HandoffSide, Pass, SourceState, Submission,
};
use crate::time::EngineTime;

/// What the actor must remember of registrations that have a request. The rest it asks the scheduler.
#[derive(Debug, Default)]
pub(in crate::live) struct Registrations {
    /// Sources without a control that are still to be held: released as soon as they are.
    uncontrolled: FxHashSet<HandoffKey>,
    /// Sources that no pass has admitted yet.
    before_first_chunk: FxHashMap<SequenceId, HandoffKey>,
}

impl Actor {
    /// Whatever panics in here, a lazy prompt of the caller's say, the command's drop answers.
    pub(in crate::live) fn serve_handoff(&mut self, command: HandoffCommand) {
        self.note_change();
        let handoff = command.key();
        let Some(verb) = command.verb() else { return };
        let done = match verb {
            Verb::SubmitPrefill(registration) => {
                let submit = |submission| Command::SubmitPrefill { handoff, submission };
                let taken = self.submit_handoff(handoff, registration, command.sent_at, submit);
                if taken.is_ok() {
                    self.registrations.before_first_chunk.insert(registration.route.sequence, handoff);
                }
                return command.answer(taken);
            }
            Verb::ReserveDestination(registration) => {
                let submit = |submission| Command::ReserveDestination { handoff, submission };
                let taken = self.submit_handoff(handoff, registration, command.sent_at, submit);
                return command.answer(taken);
            }
            Verb::ActivateDestination(first_token) => {
                self.apply_handoff(Command::ActivateDestination { handoff, first_token: *first_token })
            }
            Verb::FailTransfer(valid_tokens) => {
                self.apply_handoff(Command::FailTransfer { handoff, valid_tokens: *valid_tokens })
            }
            Verb::Heartbeat => match self.apply_handoff(Command::Heartbeat { handoff }) {
                Ok(Applied::HandoffOver) => Err(HandoffError::Over),
                applied => applied,
            },
            Verb::ReleaseSource => self.apply_handoff(Command::ReleaseSource { handoff }),
            Verb::CancelSource => self.apply_handoff(Command::CancelSource { handoff }),
            Verb::CancelDestination => self.apply_handoff(Command::CancelDestination { handoff }),
        };
        match done {
            // Answered when what it did is shown.
            Ok(_) => self.batch.done.push(command),
            Err(error) => command.answer(Err(error)),
        }
    }

    fn apply_handoff(&mut self, command: Command) -> Result<Applied, HandoffError> {
        Ok(self.scheduler.apply(command, self.clock.now())?)
    }

    fn submit_handoff(
        &mut self,
        key: HandoffKey,
        registration: &LiveRequestRegistration,
        sent_at: EngineTime,
        command: impl FnOnce(Submission) -> Command,
    ) -> Result<(), HandoffError> {
        let (route, request) = (&registration.route, registration.request.clone());
        if !route.begin_scheduling() {
            return Err(HandoffError::Cancelled);
        }
        let submission = Submission { sequence: route.sequence, tie_key: route.client_id.as_u128(), request };
        if let Err(refused) = self.scheduler.apply(command(submission), sent_at) {
            route.back_to_prepared();
            return Err(refused.into());
        }
        self.handoffs.note_request(key);
        self.batch.changes.push(RouteChange::Opened(Arc::clone(route)));
        Ok(())
    }

    /// The last control of a registration is gone, and its commands are answered: nobody can submit, release or
    /// activate any more.
    pub(in crate::live) fn uncontrolled(&mut self, key: HandoffKey) {
        self.note_change();
        let known = self.scheduler.view().handoff(key.id).filter(|(known, ..)| *known == key);
        match known.map(|(_, _, side)| side) {
            None => self.handoffs.close_unused(key),
            Some(HandoffSide::Source(SourceState::Prefilling)) => {
                self.registrations.uncontrolled.insert(key);
            }
            Some(HandoffSide::Source(SourceState::Held)) => self.release(key, self.clock.now()),
            Some(HandoffSide::Destination(DestinationState::Active)) => {}
            Some(HandoffSide::Destination(_)) => {
                let cancelled = self.scheduler.apply(Command::CancelDestination { handoff: key }, self.clock.now());
                debug_assert!(cancelled.is_ok(), "it is there: {cancelled:?}");
            }
        }
    }

    fn release(&mut self, handoff: HandoffKey, at: EngineTime) {
        let released = self.scheduler.apply(Command::ReleaseSource { handoff }, at);
        debug_assert!(released.is_ok(), "it is held: {released:?}");
    }

    /// Notes which sources have come to their first chunk.
    pub(in crate::live) fn note_first_chunks(&mut self, pass: &Pass) {
        if self.registrations.before_first_chunk.is_empty() {
            return;
        }
        for admitted in pass.admitted() {
            if let Some(key) = self.registrations.before_first_chunk.remove(&admitted.sequence) {
                self.handoffs.note_first_chunk(key, pass.ends_at());
            }
        }
    }

    /// Looks at the facts of a boundary before they are shown.
    pub(in crate::live) fn note_facts(&mut self, effects: &Effects) {
        for fact in &effects.facts {
            match *fact {
                // Its release is shown at the next boundary.
                HandoffFact::SourceHeld { handoff, .. } if self.registrations.uncontrolled.remove(&handoff) => {
                    self.release(handoff, effects.at);
                }
                HandoffFact::SourceEnded { handoff, sequence, .. } => {
                    self.registrations.uncontrolled.remove(&handoff);
                    self.registrations.before_first_chunk.remove(&sequence);
                }
                _ => {}
            }
        }
    }
}
