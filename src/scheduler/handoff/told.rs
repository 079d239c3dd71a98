//! What facts tell, for the tests of every engine kind.

use super::{DestinationEnd, HandoffFact, SourceEnd};
use crate::handoff::HandoffKey;

/// The registrations whose blocks were granted, and the tokens to be transferred.
pub(crate) fn granted(facts: &[HandoffFact]) -> Vec<(HandoffKey, u32)> {
    let grants = facts.iter().filter_map(|fact| match fact {
        HandoffFact::DestinationReserved { handoff, transferable_prompt_tokens, .. } => {
            Some((*handoff, *transferable_prompt_tokens))
        }
        _ => None,
    });
    grants.collect()
}

pub(crate) fn source_ends(facts: &[HandoffFact]) -> Vec<(HandoffKey, SourceEnd)> {
    let ends = facts.iter().filter_map(|fact| match fact {
        HandoffFact::SourceEnded { handoff, end, .. } => Some((*handoff, *end)),
        _ => None,
    });
    ends.collect()
}

pub(crate) fn destination_ends(facts: &[HandoffFact]) -> Vec<(HandoffKey, DestinationEnd)> {
    let ends = facts.iter().filter_map(|fact| match fact {
        HandoffFact::DestinationEnded { handoff, end, .. } => Some((*handoff, *end)),
        _ => None,
    });
    ends.collect()
}
