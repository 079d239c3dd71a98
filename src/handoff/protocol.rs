//! What a coordinator is told and what it asks for. All of it is data that two processes can exchange.

use std::fmt;
use std::time::Duration;

use super::transfer::{TransferCost, TransferTiming};

/// Something that happened to one handoff. Duplicates, and facts that come too late or too early, change nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CoordinatorFact {
    /// The prefill is done, its outputs are delivered, and the source holds its blocks.
    SourceHeld {
        /// What a transfer of them costs.
        timing: TransferTiming,
        /// The token that the prefill sampled.
        first_token: Option<u32>,
        /// Engine time of the prefill after its first chunk; counts where transfers overlap with it chunk by chunk.
        #[cfg_attr(
            feature = "serde",
            serde(rename = "overlapped_prefill_ms", default, with = "crate::time::duration_ms")
        )]
        overlapped_prefill: Duration,
    },
    /// The destination has blocks for the whole prompt.
    DestinationReserved {
        /// Prompt tokens that it does not have in its cache.
        transferable_prompt_tokens: u32,
    },
    /// All KV has arrived at the destination.
    TransferCompleted,
    /// The transfer ended without that.
    TransferFailed,
    /// The source is no more: its engine stopped, its request was cancelled, or its lease expired.
    SourceGone,
    /// The destination is no more: its engine stopped, or its request ended without all its tokens. One that has them was
    /// activated, and the answer to that is on its way.
    DestinationGone,
    /// Somebody gives the handoff up. Its own time-outs need no fact: [`super::Coordinator::tick`] sees them.
    TimedOut,
    /// The caller does not want the handoff any more. After the activation the request's own stream is what to cancel.
    Cancelled,
    /// The answer to an action.
    Outcome {
        /// Which one.
        action: ActionId,
        /// What came of it.
        outcome: ActionOutcome,
    },
}

/// One action of one coordinator; its outcome is reported under this id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct ActionId(pub u64);

impl fmt::Display for ActionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "action {}", self.0)
    }
}

/// What came of an action. A repeat of an action that had already taken effect is `Done`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum ActionOutcome {
    /// It took effect; for a submit or a reservation: it was accepted, and a fact will follow.
    Done,
    /// It did not, and nothing has changed.
    Refused(Refusal),
}

/// Why an engine refused an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Refusal {
    /// A newer registration has the handoff's id.
    #[error("a newer registration has this handoff id")]
    Superseded,
    /// The source does not hold its blocks, not yet or not any more.
    #[error("the source does not hold its blocks")]
    NotHeld,
    /// The destination has no reservation, not yet or not any more.
    #[error("the destination has no reservation")]
    NotReserved,
    /// The engine cannot serve this request.
    #[error("the engine cannot serve this request")]
    Rejected,
    /// The engine has stopped, or cannot be reached.
    #[error("the engine has stopped or cannot be reached")]
    Stopped,
    /// Anything else.
    #[error("the action failed")]
    Other,
}

/// Something that the owner of a coordinator should do, on one of the two engines or on the link between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CoordinatorAction {
    /// Source: prefill the request and hold its blocks.
    SubmitPrefill,
    /// Destination: reserve blocks for the prompt.
    ReserveDestination,
    /// Source: the destination still wants the blocks; extend the lease. A refusal says that the source is gone.
    Heartbeat,
    /// Link: move the KV, then report [`CoordinatorFact::TransferCompleted`].
    StartTransfer {
        /// Tokens to move, at least 1.
        tokens: u32,
        /// Engine time that it takes, to be given to a [`super::Link`]; `None` if it is not modelled: report the end when
        /// it comes, or at once.
        cost: Option<TransferCost>,
    },
    /// Destination: the KV is there, decode.
    ActivateDestination {
        /// The source's token, where it is carried over; decoding goes on after it.
        first_token: Option<u32>,
    },
    /// Destination: the KV will not come, none of it is valid; compute the prompt as an ordinary request does.
    RecomputeDestination,
    /// Source: the blocks are not needed any more. Comes only after the activation has been confirmed.
    ReleaseSource,
    /// Source: end it in whatever state it is, and free its blocks.
    CancelSource,
    /// Destination: end it in whatever state it is, and free its blocks.
    CancelDestination {
        /// A transfer may still write into the blocks: keep them from others until it has ended.
        transfer_in_flight: bool,
        /// Why; decides what the request's reader is told.
        failure: HandoffFailure,
    },
    /// The handoff is over; both sides have had their last word, and nothing will follow.
    Complete(HandoffOutcome),
}

/// Who carries out an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActionTarget {
    /// The prefill engine.
    Source,
    /// The decode engine.
    Destination,
    /// The link between them.
    Link,
    /// The owner of the coordinator.
    Owner,
}

impl CoordinatorAction {
    /// Who carries it out.
    #[must_use]
    pub fn target(&self) -> ActionTarget {
        match self {
            Self::SubmitPrefill | Self::Heartbeat | Self::ReleaseSource | Self::CancelSource => ActionTarget::Source,
            Self::ReserveDestination
            | Self::ActivateDestination { .. }
            | Self::RecomputeDestination
            | Self::CancelDestination { .. } => ActionTarget::Destination,
            Self::StartTransfer { .. } => ActionTarget::Link,
            Self::Complete(_) => ActionTarget::Owner,
        }
    }
}

/// An action and the id under which its outcome is reported. Doing it twice is the same as doing it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct IssuedAction {
    /// Unique within the handoff, ascending.
    pub id: ActionId,
    /// What to do.
    pub action: CoordinatorAction,
}

/// How a handoff ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum HandoffOutcome {
    /// The destination decodes, the source is released.
    Completed,
    /// The transfer failed and the destination computes the prompt itself; the source is cancelled.
    Recomputed(HandoffFailure),
    /// Both sides are cancelled.
    Failed(HandoffFailure),
}

/// Why a handoff, or its transfer, failed. The engines are usable unless a [`Refusal::Stopped`] says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum HandoffFailure {
    /// The source did not take the prefill. Use another source.
    #[error("the source refused the prefill: {0}")]
    SourceRefused(Refusal),
    /// The destination did not take the reservation. Use another destination.
    #[error("the destination refused the reservation: {0}")]
    DestinationRefused(Refusal),
    /// The transfer could not be started. Try again.
    #[error("the transfer was refused: {0}")]
    TransferRefused(Refusal),
    /// The destination did not activate. Try again.
    #[error("the destination refused the activation: {0}")]
    ActivationRefused(Refusal),
    /// The destination could not compute the prompt itself. Try again.
    #[error("the destination refused to recompute the prompt: {0}")]
    RecomputeRefused(Refusal),
    /// The source reported no token where it has to be carried over. It is not an engine of that kind.
    #[error("the source reported no first token to carry over")]
    FirstTokenMissing,
    /// The source ended before its KV had arrived. Use another source.
    #[error("the source was gone before its KV had arrived")]
    SourceGone,
    /// The destination ended before it was activated. Use another destination.
    #[error("the destination was gone before it was activated")]
    DestinationGone,
    /// The transfer failed. Try again.
    #[error("the transfer failed")]
    TransferFailed,
    /// The transfer took longer than `transfer_timeout`. Try again, or allow more time.
    #[error("the transfer timed out")]
    TransferTimedOut,
    /// The rest of the handoff took longer than `timeout`. Try again, or allow more time.
    #[error("the handoff timed out")]
    TimedOut,
    /// The caller cancelled it.
    #[error("the handoff was cancelled")]
    Cancelled,
}

impl HandoffFailure {
    /// Whether only the KV is lost, so that a destination can still compute the prompt itself.
    pub(super) fn is_of_transfer(self) -> bool {
        matches!(self, Self::SourceGone | Self::TransferFailed | Self::TransferRefused(_) | Self::TransferTimedOut)
    }
}
