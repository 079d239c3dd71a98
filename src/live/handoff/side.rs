//! One engine's part in a handoff, for whoever owns its coordinator.

use crate::handoff::{ActionOutcome, CoordinatorAction as Action, CoordinatorFact as Fact, HandoffId, Refusal};
use crate::live::error::HandoffError;
use crate::live::handoff::{LiveHandoffControl, LiveHandoffEvent, LiveHandoffEvents};
use crate::live::request::LiveRequestRegistration;
use crate::scheduler::{DestinationEnd, SourceEnd};

/// One engine's part in a handoff: it carries out a coordinator's actions for this engine, and says what a
/// coordinator is to be told. The coordinator may be in another process.
///
/// Dropping it releases what it holds on the engine, as dropping the last control does.
#[derive(Debug)]
#[must_use = "dropping a side releases what it holds"]
pub struct LiveHandoffSide {
    control: LiveHandoffControl,
    events: LiveHandoffEvents,
    /// Until it is submitted.
    registration: Option<LiveRequestRegistration>,
    /// What to say if the engine stops.
    gone: Fact,
    over: bool,
}

impl LiveHandoffSide {
    /// The prefill engine's side, of a registration there and the request that it is to prefill.
    pub fn source(registered: (LiveHandoffControl, LiveHandoffEvents), request: LiveRequestRegistration) -> Self {
        Self::new(registered, request, Fact::SourceGone)
    }

    /// The decode engine's side, of a registration there and the request that it is to decode.
    pub fn destination(registered: (LiveHandoffControl, LiveHandoffEvents), request: LiveRequestRegistration) -> Self {
        Self::new(registered, request, Fact::DestinationGone)
    }

    fn new(
        (control, events): (LiveHandoffControl, LiveHandoffEvents),
        request: LiveRequestRegistration,
        gone: Fact,
    ) -> Self {
        Self { control, events, registration: Some(request), gone, over: false }
    }

    /// The handoff.
    #[must_use]
    pub fn handoff_id(&self) -> HandoffId {
        self.control.handoff_id()
    }

    /// Carries out an action and says what came of it. What is for the other side or for the link is refused.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo the action.
    pub async fn carry_out(&mut self, action: Action) -> ActionOutcome {
        let control = &self.control;
        let result = match action {
            Action::SubmitPrefill => match self.registration.take() {
                Some(registration) => control.submit_prefill(registration).await.map_err(|refused| refused.error),
                None => Ok(()),
            },
            Action::ReserveDestination => match self.registration.take() {
                Some(registration) => control.reserve_destination(registration).await.map_err(|refused| refused.error),
                None => Ok(()),
            },
            Action::Heartbeat => control.heartbeat().await,
            Action::ActivateDestination { first_token } => control.activate_destination(first_token).await,
            Action::RecomputeDestination => control.fail_transfer(0).await,
            Action::ReleaseSource => control.release_source().await,
            Action::CancelSource => {
                self.registration = None;
                control.cancel_source().await
            }
            Action::CancelDestination { .. } => {
                self.registration = None;
                control.cancel_destination().await
            }
            Action::StartTransfer { .. } | Action::Complete(_) => return ActionOutcome::Refused(Refusal::Other),
        };
        outcome(result)
    }

    /// The next thing that the coordinator is to be told; it never comes after the last one.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses nothing.
    pub async fn fact(&mut self) -> Fact {
        while !self.over {
            match self.events.recv().await {
                Some(LiveHandoffEvent::SourceHeld { timing, first_token, overlapped_prefill, .. }) => {
                    return Fact::SourceHeld { timing, first_token: Some(first_token), overlapped_prefill };
                }
                Some(LiveHandoffEvent::DestinationReserved { transferable_prompt_tokens, .. }) => {
                    return Fact::DestinationReserved { transferable_prompt_tokens };
                }
                Some(
                    LiveHandoffEvent::SourceEnded { end: SourceEnd::Released, .. }
                    | LiveHandoffEvent::DestinationEnded { end: DestinationEnd::Finished, .. },
                ) => self.over = true,
                _ => {
                    self.over = true;
                    return self.gone;
                }
            }
        }
        std::future::pending().await
    }
}

fn outcome(result: Result<(), HandoffError>) -> ActionOutcome {
    match result {
        // A repeat of an activation that took effect before is done.
        Ok(()) | Err(HandoffError::AlreadyActive) => ActionOutcome::Done,
        Err(error) => ActionOutcome::Refused(match error {
            HandoffError::Superseded => Refusal::Superseded,
            HandoffError::NotHeld => Refusal::NotHeld,
            HandoffError::NotReserved | HandoffError::Over => Refusal::NotReserved,
            HandoffError::Stopped(_) => Refusal::Stopped,
            HandoffError::Cancelled | HandoffError::Scheduler(_) => Refusal::Rejected,
            _ => Refusal::Other,
        }),
    }
}
