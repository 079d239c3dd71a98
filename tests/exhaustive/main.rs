//! Breadth-first exploration of tiny engines: every state that can be reached, every action in each of them.

mod explore;
mod handoff;
mod scheduler;
