//! Recordings of SGLang: format `sglang-oracle/1`, the loop without overlap.

mod input;
mod pages;
mod replay;
mod step;

pub(super) use input::Scenario;
pub(super) use replay::Replay;
pub(super) use step::{End, Step};
