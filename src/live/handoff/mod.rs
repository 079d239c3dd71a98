//! Handoffs on a live engine: a registration is a control, to command one side of a handoff, and a
//! stream of what happens to it.
//!
//! 1. A registration has a generation; a command of an earlier one is a comparison away from `Superseded`.
//! 2. A command is in the lane when its future is first polled, and is answered once, by the actor or by
//!    the command's own drop. While an answer is owed the id cannot be registered again.
//! 3. The event channel has room for every fact of one registration, so telling one never waits and needs
//!    no task of its own: the event dispatcher does it, after the outputs of the same boundary.
//! 4. Nothing here keeps an engine alive. A registration without a control is released: nobody could.

mod control;
mod driver;
mod events;
mod link;
mod pair;
mod registry;
mod serve;
mod side;

pub use control::LiveHandoffControl;
pub use driver::LiveHandoffStream;
pub use events::{LiveHandoffEvent, LiveHandoffEvents};
pub use link::LiveLink;
pub use pair::{LiveHandoff, StartHandoffError, handoff};
pub use side::LiveHandoffSide;

pub(super) use control::{ControlShared, HandoffCommand};
pub(super) use registry::Handoffs;
pub(super) use serve::Registrations;
