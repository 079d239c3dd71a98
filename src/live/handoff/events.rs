//! What a caller is told about one registration.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::handoff::{HandoffId, HandoffKey, TransferTiming};
use crate::live::handoff::Handoffs;
use crate::scheduler::{DestinationEnd, HandoffFact, SourceEnd};
use crate::time::EngineTime;

/// Something that happened to a handoff on this engine.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LiveHandoffEvent {
    /// The source's outputs are delivered and its blocks are held, until they are released or the lease ends.
    SourceHeld {
        /// When its request ended.
        at: EngineTime,
        /// What a transfer of the blocks costs.
        timing: TransferTiming,
        /// The token that it sampled.
        first_token: u32,
        /// Engine time of the prefill after its first chunk, under which a transfer chunk by chunk can lie.
        #[cfg_attr(feature = "serde", serde(rename = "overlapped_prefill_ms", with = "crate::time::duration_ms"))]
        overlapped_prefill: Duration,
        /// When its lease ends, unless a heartbeat extends it.
        expires_at: EngineTime,
    },
    /// The source holds nothing any more.
    SourceEnded {
        /// When.
        at: EngineTime,
        /// How.
        end: SourceEnd,
    },
    /// The destination has blocks for the whole prompt.
    DestinationReserved {
        /// When they were granted.
        at: EngineTime,
        /// Prompt tokens that its own cache does not have.
        transferable_prompt_tokens: u32,
    },
    /// The destination's request has ended, or will never begin.
    DestinationEnded {
        /// When.
        at: EngineTime,
        /// How.
        end: DestinationEnd,
    },
}

impl LiveHandoffEvent {
    pub(super) fn of(fact: &HandoffFact, timing: TransferTiming, first_chunk_end: Option<EngineTime>) -> Self {
        match *fact {
            HandoffFact::SourceHeld { at, prompt_tokens, first_token, expires_at, .. } => {
                let timing = TransferTiming { full_prompt_tokens: prompt_tokens, ..timing };
                let overlapped_prefill = at.saturating_since(first_chunk_end.unwrap_or(at));
                Self::SourceHeld { at, timing, first_token, overlapped_prefill, expires_at }
            }
            HandoffFact::SourceEnded { at, end, .. } => Self::SourceEnded { at, end },
            HandoffFact::DestinationReserved { at, transferable_prompt_tokens, .. } => {
                Self::DestinationReserved { at, transferable_prompt_tokens }
            }
            HandoffFact::DestinationEnded { at, end, .. } => Self::DestinationEnded { at, end },
        }
    }
}

/// The events of one registration, at most one that its blocks are there and one that it is over; then
/// `None`. Dropping it ends the registration's right to submit; its control may still release or cancel.
///
/// It is also a [`futures_core::Stream`].
#[derive(Debug)]
#[must_use = "a registration that nobody listens to cannot submit"]
pub struct LiveHandoffEvents {
    key: HandoffKey,
    events: mpsc::Receiver<LiveHandoffEvent>,
    handoffs: Arc<Handoffs>,
}

impl LiveHandoffEvents {
    pub(in crate::live) fn new(
        key: HandoffKey,
        events: mpsc::Receiver<LiveHandoffEvent>,
        handoffs: Arc<Handoffs>,
    ) -> Self {
        Self { key, events, handoffs }
    }

    /// The handoff.
    #[must_use]
    pub fn handoff_id(&self) -> HandoffId {
        self.key.id
    }

    /// The next event; `None` after the last one, and when the engine has stopped.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses no event.
    pub async fn recv(&mut self) -> Option<LiveHandoffEvent> {
        self.events.recv().await
    }
}

impl futures_core::Stream for LiveHandoffEvents {
    type Item = LiveHandoffEvent;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<LiveHandoffEvent>> {
        self.get_mut().events.poll_recv(context)
    }
}

impl Drop for LiveHandoffEvents {
    fn drop(&mut self) {
        self.handoffs.close(self.key);
    }
}
