//! One harness for the pure core and the live engine: everything of a run follows from one seed, a model that is
//! written separately runs beside it, and what must always hold is looked at after every operation.
//!
//! A failure prints the line that repeats it and the smallest run that was found for it. `docs/testing.md` has the
//! figures and the variables that set them.

mod coordinator;
#[cfg(feature = "live")]
mod live;
mod operations;
mod replay;
mod scheduler;
mod scheduler_handoff;
mod scheduler_sglang;
mod seeds;
mod trace;

#[cfg(all(standin_seeded_bugs, feature = "live"))]
mod seeded_bugs;
