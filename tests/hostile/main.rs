//! Hostile input: values at and beyond every limit of what a caller, a configuration, a trace or a recording can
//! give. Each is served, or refused with an error that names field, value and limit; none panics, hangs, overflows,
//! fills the memory or is changed in silence.
//!
//! Tables: one row is what is tried, the value, and the expected text of the error, or none. `docs/testing.md` says
//! how the fuzz targets go on from here.

mod config;
mod handoff;
mod kit;
mod live;
mod recording;
mod request;
mod time;
mod trace;
