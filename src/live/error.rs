//! One error enum per operation of the live engine.

use std::sync::Arc;

use uuid::Uuid;

use crate::error::{CommandError, ConfigError, HandoffRefusal, RequestError};
use crate::handoff::HandoffId;
use crate::live::LiveRequestRegistration;
use crate::output::FinishReason;

/// Why an engine stopped. Stored once; everybody who asks gets the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StopCause {
    /// [`crate::LiveEngine::shutdown`] was called.
    #[error("shutdown was called")]
    Shutdown,
    /// The last [`crate::LiveEngine`] was dropped.
    #[error("the last handle was dropped")]
    HandlesDropped,
    /// The Tokio runtime was dropped under the engine.
    #[error("the Tokio runtime was shut down")]
    RuntimeShutdown,
    /// The receiver of admissions was closed.
    #[error("the receiver of admissions was closed")]
    AdmissionReceiverClosed,
    /// The sender of the output gate was dropped.
    #[error("the sender of the output gate was dropped")]
    OutputGateDropped,
    /// A task of the engine panicked, a caller's sink or timing model among them.
    #[error("the {task} failed: {message}")]
    Failed {
        /// The task.
        task: &'static str,
        /// The panic's message.
        message: Arc<str>,
    },
}

impl StopCause {
    /// How streams end for this cause.
    pub(super) fn finish(&self) -> FinishReason {
        match self {
            Self::Failed { .. } => FinishReason::Failed,
            _ => FinishReason::EngineStopped,
        }
    }
}

/// The engine has stopped; start another one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the engine has stopped: {cause}")]
pub struct Stopped {
    /// Why.
    pub cause: StopCause,
}

/// Why an engine did not start. Nothing was spawned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// `start` was called outside a Tokio runtime. Call it inside one, with time enabled.
    #[error("no Tokio runtime: start the engine inside one, with time enabled")]
    NoRuntime,
    /// A field of the configuration cannot be used.
    #[error("configuration: {0}")]
    Config(#[from] ConfigError),
}

/// Why a request was not taken. The engine is usable unless the variant says it stopped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// A value of the request cannot be served. Change it.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Another active request has this client id. Wait for its end, or use another id.
    #[error("client id {0} belongs to an active request")]
    DuplicateId(Uuid),
    /// The request was cancelled, or its stream dropped, before the scheduler took it.
    #[error("the request was cancelled before the scheduler took it")]
    Cancelled,
    /// The registration was made by another engine. Submit it there.
    #[error("the registration belongs to another engine")]
    ForeignRegistration,
    /// The scheduler refused it.
    #[error(transparent)]
    Scheduler(#[from] CommandError),
    /// The engine has stopped. Start another one.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// Why a handoff was not registered, or its command refused. Nothing has changed; the engine is usable
/// unless the variant says it stopped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandoffError {
    /// The handoff is registered. Wait for its end, or use another id.
    #[error("{0} is registered")]
    AlreadyRegistered(HandoffId),
    /// A command of an earlier registration has not been answered yet. Try again after it.
    #[error("a command of an earlier registration of {0} has not been answered")]
    AnswerOwed(HandoffId),
    /// A newer registration of the same handoff exists: this control has nothing to say any more.
    #[error("a newer registration of this handoff exists")]
    Superseded,
    /// The events were dropped: this registration may release, activate and cancel, but not submit.
    #[error("the events of this registration were dropped: it may not submit any more")]
    EventsDropped,
    /// The source has not ended its prefill. Wait for [`crate::LiveHandoffEvent::SourceHeld`], or cancel it.
    #[error("the source is not held yet")]
    NotHeld,
    /// The destination has no blocks yet. Wait for [`crate::LiveHandoffEvent::DestinationReserved`].
    #[error("the destination is not reserved yet")]
    NotReserved,
    /// The destination was activated before, or its transfer reported as failed.
    #[error("the destination is active already")]
    AlreadyActive,
    /// There is no such source or destination: it is over, or none was submitted.
    #[error("it is over, or nothing was submitted")]
    Over,
    /// The request was cancelled, or its stream dropped, before the scheduler took it.
    #[error("the request was cancelled before the scheduler took it")]
    Cancelled,
    /// The registration was made by another engine. Submit it there.
    #[error("the registration belongs to another engine")]
    ForeignRegistration,
    /// The scheduler refused the command for another reason.
    #[error(transparent)]
    Scheduler(CommandError),
    /// The engine has stopped. Start another one.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl From<CommandError> for HandoffError {
    fn from(refused: CommandError) -> Self {
        match refused {
            CommandError::Handoff(HandoffRefusal::Superseded { .. }) => Self::Superseded,
            CommandError::Handoff(HandoffRefusal::NotHeld(_)) => Self::NotHeld,
            CommandError::Handoff(HandoffRefusal::NotReserved(_)) => Self::NotReserved,
            CommandError::Handoff(HandoffRefusal::AlreadyActive(_)) => Self::AlreadyActive,
            CommandError::Handoff(HandoffRefusal::NoDestination(_)) => Self::Over,
            other => Self::Scheduler(other),
        }
    }
}

/// A registration that was not taken, and why. Nothing has changed; submit it again or drop it.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused<E> {
    /// The registration, as it was.
    pub registration: LiveRequestRegistration,
    /// Why it was not taken.
    pub error: E,
}

/// Why a cancel failed. No cancel fails today: an unknown id, an ended request and a stopped engine
/// are all `Ok(false)`. The type keeps the signature stable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CancelError {}

/// How an engine ended that was not asked to. Every call to `shutdown` returns the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShutdownError {
    /// The engine had stopped for this cause. It is ended and clean all the same.
    #[error("the engine had stopped: {0}")]
    Stopped(StopCause),
}
