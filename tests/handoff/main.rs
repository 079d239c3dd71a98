//! Handoffs between live engines, rule by rule: h01–h16 of `docs/contract.md`.
//!
//! All of it runs over the public API under Tokio's paused clock, as the tests of the other rules do.

#[path = "../live/common/mod.rs"]
#[expect(dead_code, unused_imports, reason = "the other rules' tests use the rest")]
mod common;
mod kit;

mod cancel_safety;
mod decode;
mod destination;
mod draws;
mod lease;
mod pair;
mod pair_ends;
mod pair_sglang;
mod registration;
mod release;
mod runs;
mod sides;
mod source;
mod stop;
