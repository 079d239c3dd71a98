//! What a scheduler says about the handoffs it takes part in.

use crate::handoff::HandoffKey;
use crate::request::SequenceId;
use crate::time::EngineTime;

/// Something that happened to one registration. At most two of a registration are told: that its blocks
/// are there, and its end, which comes last and exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(tag = "fact", rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum HandoffFact {
    /// The source has ended its prefill, and its blocks are held for the transfer.
    SourceHeld {
        /// The registration.
        handoff: HandoffKey,
        /// The request that ended.
        sequence: SequenceId,
        /// When.
        at: EngineTime,
        /// Tokens of its prompt.
        prompt_tokens: u32,
        /// Prompt tokens that it found in its own cache.
        cached_tokens: u32,
        /// The first token that it sampled: where the first token is carried over, the destination goes on
        /// after it.
        first_token: u32,
        /// When its lease ends unless a heartbeat extends it.
        expires_at: EngineTime,
    },
    /// The source is over: it holds nothing any more.
    SourceEnded {
        /// The registration.
        handoff: HandoffKey,
        /// Its request.
        sequence: SequenceId,
        /// When its blocks were freed; a lease that ends during a pass is seen at its end, or by the first
        /// command before.
        at: EngineTime,
        /// How.
        end: SourceEnd,
    },
    /// Blocks for the prompt are reserved at the destination: the transfer can begin.
    DestinationReserved {
        /// The registration.
        handoff: HandoffKey,
        /// The request that waits.
        sequence: SequenceId,
        /// When, which may be a pass before this is told: the grant is made when a pass begins.
        at: EngineTime,
        /// Tokens of its prompt.
        prompt_tokens: u32,
        /// Those that its own cache does not have; 0: there is nothing to transfer.
        transferable_prompt_tokens: u32,
    },
    /// The destination is over: its request has ended, or will never begin.
    DestinationEnded {
        /// The registration.
        handoff: HandoffKey,
        /// Its request.
        sequence: SequenceId,
        /// When.
        at: EngineTime,
        /// How.
        end: DestinationEnd,
    },
}

impl HandoffFact {
    /// The registration that it is about.
    #[must_use]
    pub fn handoff(&self) -> HandoffKey {
        match self {
            Self::SourceHeld { handoff, .. }
            | Self::SourceEnded { handoff, .. }
            | Self::DestinationReserved { handoff, .. }
            | Self::DestinationEnded { handoff, .. } => *handoff,
        }
    }

    /// Whether it is the last one about this registration.
    #[must_use]
    pub fn is_last(&self) -> bool {
        matches!(self, Self::SourceEnded { .. } | Self::DestinationEnded { .. })
    }
}

/// How a source was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum SourceEnd {
    /// Released after its transfer.
    Released,
    /// Its lease ended.
    Expired,
    /// Cancelled, by its request or by its handoff, before or after it was held.
    Cancelled,
    /// Its request outgrew the pool before it was held.
    OutOfMemory,
    /// A later registration of the same handoff took its place.
    Superseded,
}

/// How a destination was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum DestinationEnd {
    /// Its request has all its tokens.
    Finished,
    /// Cancelled, by its request or by its handoff.
    Cancelled,
    /// Its transfer failed, and the policy ends a request for that.
    TransferFailed,
    /// Its request outgrew the pool.
    OutOfMemory,
    /// A later registration of the same handoff took its place before it was activated.
    Superseded,
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;
    use crate::handoff::HandoffId;

    #[test]
    fn h14_facts_cross_a_process_boundary_unchanged() {
        let (handoff, sequence) = (HandoffKey::new(HandoffId(uuid::Uuid::from_u128(7)), 3), SequenceId(9));
        let at = EngineTime::from_millis(5);
        let facts = [
            HandoffFact::SourceHeld {
                handoff,
                sequence,
                at,
                prompt_tokens: 10,
                cached_tokens: 8,
                first_token: 1,
                expires_at: EngineTime::MAX,
            },
            HandoffFact::SourceEnded { handoff, sequence, at, end: SourceEnd::Expired },
            HandoffFact::DestinationReserved {
                handoff,
                sequence,
                at,
                prompt_tokens: 10,
                transferable_prompt_tokens: 2,
            },
            HandoffFact::DestinationEnded { handoff, sequence, at, end: DestinationEnd::TransferFailed },
        ];
        for fact in facts {
            let json = serde_json::to_string(&fact).expect("plain data");
            assert_eq!(serde_json::from_str::<HandoffFact>(&json).expect(&json), fact);
        }
        assert_eq!(facts.map(|fact| fact.is_last()), [false, true, false, true]);
    }
}
