//! The commands of one registration.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use crate::handoff::{HandoffId, HandoffKey};
use crate::live::error::{HandoffError, Refused, StopCause, Stopped};
use crate::live::handoff::Handoffs;
use crate::live::lanes::{CancelEntry, CommandSender, LaneCommand};
use crate::live::request::LiveRequestRegistration;
use crate::live::route::Routes;
use crate::live::stop::Stop;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

/// Commands one side of a handoff. Cloning is cheap; when the last clone is dropped and every command is
/// answered, what is held or reserved under the registration is released: a source as soon as it is held, a
/// destination unless it is active.
///
/// Commands apply in the order in which their futures were first polled. It does not keep the engine alive.
#[derive(Debug, Clone)]
#[must_use = "dropping the last control of a handoff releases it"]
pub struct LiveHandoffControl {
    shared: Arc<ControlShared>,
}

#[derive(Debug)]
pub(in crate::live) struct ControlShared {
    pub(in crate::live) key: HandoffKey,
    pub(in crate::live) commands: CommandSender,
    pub(in crate::live) cancels: mpsc::UnboundedSender<CancelEntry>,
    pub(in crate::live) handoffs: Arc<Handoffs>,
    pub(in crate::live) routes: Arc<Routes>,
    pub(in crate::live) stop: Arc<Stop>,
}

impl Drop for ControlShared {
    fn drop(&mut self) {
        // A closed lane: the engine has stopped and holds nothing.
        if !seeded_bug!(LostControlKeepsItsBlocks) {
            drop(self.cancels.send(CancelEntry::Uncontrolled(self.key)));
        }
    }
}

/// An answer that is owed to a command; until it is dropped the id cannot be registered again. It counts as a
/// control, so that the release of a registration never overtakes the command that fills it.
#[derive(Debug)]
struct Owed(Arc<ControlShared>);

impl Drop for Owed {
    fn drop(&mut self) {
        self.0.handoffs.answered(self.0.key);
    }
}

/// What a control asks of the actor.
#[derive(Debug)]
pub(in crate::live) enum Verb {
    SubmitPrefill(LiveRequestRegistration),
    ReserveDestination(LiveRequestRegistration),
    ActivateDestination(Option<u32>),
    FailTransfer(u32),
    Heartbeat,
    ReleaseSource,
    CancelSource,
    CancelDestination,
}

impl Verb {
    /// The registration that it brings along.
    fn into_registration(self) -> Option<LiveRequestRegistration> {
        match self {
            Self::SubmitPrefill(registration) | Self::ReserveDestination(registration) => Some(registration),
            _ => None,
        }
    }
}

type HandoffReply = Result<(), (Option<LiveRequestRegistration>, HandoffError)>;

/// A command that owes an answer: its drop gives one, and the registration back.
#[derive(Debug)]
pub(in crate::live) struct HandoffCommand {
    pub(in crate::live) sent_at: EngineTime,
    /// Until it is answered.
    asked: Option<(Verb, oneshot::Sender<HandoffReply>)>,
    owed: Owed,
}

impl HandoffCommand {
    /// The registration of its control.
    pub(in crate::live) fn key(&self) -> HandoffKey {
        self.owed.0.key
    }

    /// What is asked, until it is answered.
    pub(in crate::live) fn verb(&self) -> Option<&Verb> {
        self.asked.as_ref().map(|(verb, _)| verb)
    }

    pub(in crate::live) fn answer(mut self, answer: Result<(), HandoffError>) {
        self.reply(answer);
    }

    fn reply(&mut self, answer: Result<(), HandoffError>) {
        if let Some((verb, reply)) = self.asked.take() {
            // Where nobody waits any more, what was done stays done, and what comes back is dropped here.
            drop(reply.send(answer.map_err(|error| (verb.into_registration(), error))));
        }
    }
}

impl Drop for HandoffCommand {
    fn drop(&mut self) {
        // The receiver waits for the true cause.
        self.reply(Err(HandoffError::Stopped(Stopped { cause: StopCause::RuntimeShutdown })));
    }
}

impl LiveHandoffControl {
    pub(in crate::live) fn new(shared: ControlShared) -> Self {
        Self { shared: Arc::new(shared) }
    }

    /// The handoff.
    #[must_use]
    pub fn handoff_id(&self) -> HandoffId {
        self.shared.key.id
    }

    /// Submits the prefill of the handoff: after its last token its blocks are held, and
    /// [`super::LiveHandoffEvent::SourceHeld`] comes after that token.
    ///
    /// # Errors
    /// The registration comes back with the reason: the events were dropped, the handoff has a request
    /// already or is superseded, or what [`crate::LiveEngine::submit_prepared`] refuses.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it; the request's stream decides.
    pub async fn submit_prefill(&self, registration: LiveRequestRegistration) -> Result<(), Refused<HandoffError>> {
        self.submit(Verb::SubmitPrefill, registration).await
    }

    /// Asks for blocks for the prompt, in the order of acceptance; when they are there,
    /// [`super::LiveHandoffEvent::DestinationReserved`] comes.
    ///
    /// # Errors
    /// As [`LiveHandoffControl::submit_prefill`].
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it; the request's stream decides.
    pub async fn reserve_destination(
        &self,
        registration: LiveRequestRegistration,
    ) -> Result<(), Refused<HandoffError>> {
        self.submit(Verb::ReserveDestination, registration).await
    }

    /// The transfer has ended well: the destination decodes. `first_token` is the source's, for a
    /// destination that goes on after it; one that computes the last prompt token again ignores it.
    ///
    /// # Errors
    /// The destination is not reserved yet, active already, over, or superseded.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it.
    pub async fn activate_destination(&self, first_token: Option<u32>) -> Result<(), HandoffError> {
        self.command(Verb::ActivateDestination(first_token)).await
    }

    /// The transfer has ended badly, with the KV of the first `valid_tokens` prompt tokens in place. By the
    /// engine's load-failure policy the request ends with `TransferFailed` or computes the rest itself.
    ///
    /// # Errors
    /// As [`LiveHandoffControl::activate_destination`].
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it.
    pub async fn fail_transfer(&self, valid_tokens: u32) -> Result<(), HandoffError> {
        self.command(Verb::FailTransfer(valid_tokens)).await
    }

    /// Extends the lease of a held source; changes nothing while it is not held yet.
    ///
    /// # Errors
    /// The source is over, or superseded.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it.
    pub async fn heartbeat(&self) -> Result<(), HandoffError> {
        self.command(Verb::Heartbeat).await
    }

    /// Frees what a held source holds. `Ok` if it is over already.
    ///
    /// # Errors
    /// The source is not held yet, or superseded.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it.
    pub async fn release_source(&self) -> Result<(), HandoffError> {
        self.command(Verb::ReleaseSource).await
    }

    /// Removes a source wherever it is, queued and running too. `Ok` if it is over already.
    ///
    /// # Errors
    /// It is superseded.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it.
    pub async fn cancel_source(&self) -> Result<(), HandoffError> {
        self.command(Verb::CancelSource).await
    }

    /// Removes a destination wherever it is. `Ok` if it is over already.
    ///
    /// # Errors
    /// It is superseded.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it.
    pub async fn cancel_destination(&self) -> Result<(), HandoffError> {
        self.command(Verb::CancelDestination).await
    }

    async fn submit(
        &self,
        verb: impl FnOnce(LiveRequestRegistration) -> Verb,
        registration: LiveRequestRegistration,
    ) -> Result<(), Refused<HandoffError>> {
        if !Arc::ptr_eq(&registration.routes, &self.shared.routes) {
            return Err(Refused { registration, error: HandoffError::ForeignRegistration });
        }
        if let Err(error) = self.shared.handoffs.owe(self.shared.key, true) {
            return Err(Refused { registration, error });
        }
        match self.send(verb(registration)).await {
            Ok(()) => Ok(()),
            Err((Some(registration), error)) => Err(Refused { registration, error }),
            Err((None, _)) => unreachable!("a refused submission gives its registration back"),
        }
    }

    async fn command(&self, verb: Verb) -> Result<(), HandoffError> {
        self.shared.handoffs.owe(self.shared.key, false)?;
        self.send(verb).await.map_err(|(_, error)| error)
    }

    /// Sends what is owed an answer to.
    async fn send(&self, verb: Verb) -> HandoffReply {
        let (reply, answer) = oneshot::channel();
        let owed = Owed(Arc::clone(&self.shared));
        let sent_at = self.shared.routes.now();
        let command = HandoffCommand { sent_at, asked: Some((verb, reply)), owed };
        // A closed lane answers too: by the command's drop.
        self.shared.commands.send_at_once(LaneCommand::Handoff(command));
        match answer.await {
            Ok(Err((registration, HandoffError::Stopped(_)))) => {
                Err((registration, Stopped { cause: self.shared.stop.wait().await }.into()))
            }
            Ok(answer) => answer,
            Err(_) => unreachable!("a handoff command answers, in its drop at the latest"),
        }
    }
}
