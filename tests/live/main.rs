//! The live contract, rule by rule: `docs/contract.md` numbers the rules, the tests are named after them.
//!
//! All of it runs over the public API under Tokio's paused clock, so times are exact and nothing sleeps
//! to wait for something to happen. The exceptions, in real time or on other runtimes, say why.

mod common;

mod cancel;
mod house_rules;
mod sglang;
mod slow;
mod smoke;
mod start;
mod stop;
mod streams;
mod submit;
mod time;
mod visible;
