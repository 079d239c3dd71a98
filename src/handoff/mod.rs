//! Handing a request over from a prefill engine (the source) to a decode engine (the destination).
//!
//! Plain values, without a clock or a task; `now` is a parameter everywhere. Whoever owns them carries facts and actions to
//! and fro, in one process or between two: all of them are data that can be serialised.
//!
//! | value | decides |
//! | --- | --- |
//! | [`Coordinator`] | what each side of one handoff is to do next, and that both are cleaned up exactly once |
//! | [`TransferTiming`] | which tokens are moved, and how long that takes alone on the link |
//! | [`Link`] | how long it takes beside other transfers |
//! | [`Faults`] | what goes wrong on the way to the coordinator, where somebody wants to see that |
//!
//! An owner's turn, at a time `now`: [`Link::advance`], and a `TransferCompleted` for each transfer that
//! [`Link::poll_finished`] returns; then [`Coordinator::apply`] for every fact and [`Coordinator::tick`] while
//! [`Coordinator::next_deadline`] is due; then carry out what [`Coordinator::poll_action`] returns and apply the outcomes,
//! until it returns nothing. Then wait for a fact or the earliest deadline of both. A transfer is taken off the link, or left
//! on it where the real one cannot be stopped, when its coordinator goes on without it.

mod config;
mod coordinator;
mod faults;
mod ids;
mod link;
mod protocol;
mod transfer;

pub use crate::config::FirstToken;
pub use config::{CoordinatorConfig, HandoffOrder, TransferFailurePolicy, TransferOverlap};
pub use coordinator::Coordinator;
pub use faults::{FaultRates, Faults};
pub use ids::{HandoffId, HandoffKey};
pub use link::{Link, LinkSharing, TransferId};
pub use protocol::{
    ActionId, ActionOutcome, ActionTarget, CoordinatorAction, CoordinatorFact, HandoffFailure, HandoffOutcome,
    IssuedAction, Refusal,
};
pub use transfer::{TransferCost, TransferTiming, TransferTimingMode};
