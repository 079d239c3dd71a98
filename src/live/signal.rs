//! What a caller receives, and how much of it may wait unread.

use std::num::NonZeroUsize;

use uuid::Uuid;

use crate::output::FinishReason;
use crate::time::EngineTime;

/// One item of a request's stream: a token, the end, or the end with the last token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct OutputSignal {
    /// The request's client id.
    pub request_id: Uuid,
    /// The token; `None` where the request ended without one.
    pub token_id: Option<u32>,
    /// Why the request ended; set on the last signal of a stream alone.
    pub finish: Option<FinishReason>,
    /// Prompt tokens found in the KV cache; set on the first signal that carries a token.
    pub cached_tokens: Option<u32>,
    /// Engine time at the end of the pass that produced the signal, or of the decision where no pass
    /// did. Never goes back within a stream.
    pub produced_at: EngineTime,
    /// When the dispatcher handled it. Waiting in a slow reader's queue does not change it.
    pub observed_at: EngineTime,
}

/// The moment a request first got KV blocks and entered a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Admission {
    /// The request's client id.
    pub request_id: Uuid,
    /// Prompt tokens found in the KV cache.
    pub cached_tokens: u32,
    /// The start of that pass.
    pub admitted_at: EngineTime,
    /// When the dispatcher handled it.
    pub observed_at: EngineTime,
    /// Data-parallel rank of the engine.
    pub dp_rank: u32,
}

/// What happens when a reader falls behind. Nobody else ever waits for it.
///
/// `capacity` counts unread signals; the terminal signal always has a place of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum OutputBuffering {
    /// A full queue ends the request with [`FinishReason::SlowConsumer`]; what is queued stays readable.
    CancelOnOverflow {
        /// Unread tokens that may wait, at least 1; more than the output length is never kept.
        capacity: NonZeroUsize,
    },
    /// The queue holds the whole response: nothing overflows.
    FullResponse,
    /// The request is left out of passes while its queue is full, and goes on once it is read.
    Throttle {
        /// Unread tokens that may wait, at least 1; more than the output length is never kept.
        capacity: NonZeroUsize,
    },
}

impl Default for OutputBuffering {
    /// Cancel on overflow, 8 unread tokens.
    fn default() -> Self {
        const EIGHT: NonZeroUsize = NonZeroUsize::new(8).expect("8 is not 0");
        Self::CancelOnOverflow { capacity: EIGHT }
    }
}

impl OutputBuffering {
    /// Unread signals that may wait of a request that produces at the most `output_limit` tokens, the
    /// terminal one not counted.
    pub(super) fn capacity(self, output_limit: u32) -> usize {
        let limit = usize::try_from(output_limit).unwrap_or(usize::MAX).max(1);
        match self {
            Self::CancelOnOverflow { capacity } | Self::Throttle { capacity } => capacity.get().min(limit),
            Self::FullResponse => limit,
        }
    }
}

/// Choices for one request that are not part of the request itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SubmitOptions {
    /// How unread output is kept; `None`: as the engine's builder says.
    pub buffering: Option<OutputBuffering>,
}

impl SubmitOptions {
    /// Sets how unread output is kept.
    #[must_use]
    pub fn with_buffering(mut self, buffering: OutputBuffering) -> Self {
        self.buffering = Some(buffering);
        self
    }
}
