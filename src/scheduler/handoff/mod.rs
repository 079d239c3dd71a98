//! Handoffs inside a scheduler: who takes part in which, how far it is, and what is told about it.

mod commands;
mod fact;
mod table;
#[cfg(test)]
pub(crate) mod told;

pub(crate) use commands::HandoffCommands;
pub use fact::{DestinationEnd, HandoffFact, SourceEnd};
pub use table::{DestinationState, HandoffSide, SourceState};
pub(crate) use table::{HandoffTable, Registration};
