//! Workload traces, recordings of real engines, and what comes of replaying them. Nothing here waits: time is a
//! number.
//!
//! `trace` reads public traces as a stream of requests, `recording` what real engines decided. Whoever replays
//! a trace (the live engine in real or virtual time, or a bare scheduler) keeps one [`RequestRecord`] per request
//! in flight and gives it to a [`Recorder`] when the request ends; the [`Report`] is made from that and the
//! engine's metrics.
//!
//! What is held grows with the requests in flight and with the number of *distinct* times measured, never with
//! the number of tokens.

mod distribution;
mod endless_cache;
#[cfg(feature = "serde")]
mod offline;
mod recorder;
#[cfg(feature = "serde")]
pub mod recording;
mod report;
mod report_text;
#[cfg(feature = "serde")]
pub mod trace;

pub use distribution::{Distribution, Summary};
pub use endless_cache::{EndlessCache, EndlessCacheBound};
#[cfg(feature = "serde")]
pub use offline::{OfflineError, OfflineRun, Router};
pub use recorder::{Recorder, RequestRecord};
pub use report::Report;
