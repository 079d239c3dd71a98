//! How long a pass takes.
//!
//! [`PassTiming`] sees one planned pass as a whole and gives one duration: weights are read once per
//! pass, so a prefill time plus a decode time would be wrong by a full read of the weights.
//! Durations are rounded to nanoseconds here, once.
//!
//! [`TimingConfig`] names the models that come with the crate; anything else that implements
//! [`PassTiming`] is given to [`crate::Scheduler::with_timing`].

mod affine;
mod config;
mod kernel_table;
mod polynomial;
mod preset;

#[cfg(test)]
mod properties_test;

pub use affine::{Affine, Constant};
pub use config::TimingConfig;
pub use kernel_table::KernelTable;
pub use polynomial::{Polynomial, PolynomialTiming};
pub use preset::KernelPreset;

use std::fmt;
use std::time::Duration;

/// A part of a prompt (or of a preempted sequence) computed in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillChunk {
    /// Tokens that this pass computes.
    pub new_tokens: u32,
    /// Tokens of the sequence whose KV is present before.
    pub tokens_before: u32,
    /// Whether the chunk reaches the end of the sequence, so that a token is sampled.
    pub samples: bool,
}

/// The work of one planned pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassWork {
    prefill: Vec<PrefillChunk>,
    decode_kv: Vec<u32>,
    prefill_tokens: u64,
    prefill_kv_tokens: u64,
    decode_kv_tokens: u64,
    sampling_chunks: u64,
}

impl PassWork {
    /// No work.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a prefill chunk.
    pub fn push_prefill(&mut self, chunk: PrefillChunk) {
        self.prefill_tokens += u64::from(chunk.new_tokens);
        self.prefill_kv_tokens += u64::from(chunk.tokens_before);
        self.sampling_chunks += u64::from(chunk.samples);
        self.prefill.push(chunk);
    }

    /// Adds a decode row that reads the KV of `kv_len` tokens, the one it computes included.
    pub fn push_decode(&mut self, kv_len: u32) {
        self.decode_kv_tokens += u64::from(kv_len);
        self.decode_kv.push(kv_len);
    }

    /// Takes all work out and keeps the memory.
    pub fn clear(&mut self) {
        let (mut prefill, mut decode_kv) = (std::mem::take(&mut self.prefill), std::mem::take(&mut self.decode_kv));
        prefill.clear();
        decode_kv.clear();
        *self = Self { prefill, decode_kv, ..Self::default() };
    }

    /// The prefill chunks, in schedule order.
    #[must_use]
    pub fn prefill(&self) -> &[PrefillChunk] {
        &self.prefill
    }

    /// KV length of each decode row, in schedule order.
    #[must_use]
    pub fn decode_kv(&self) -> &[u32] {
        &self.decode_kv
    }

    /// New tokens of all chunks.
    #[must_use]
    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens
    }

    /// Tokens present before the chunks.
    #[must_use]
    pub fn prefill_kv_tokens(&self) -> u64 {
        self.prefill_kv_tokens
    }

    /// KV tokens read by all decode rows.
    #[must_use]
    pub fn decode_kv_tokens(&self) -> u64 {
        self.decode_kv_tokens
    }

    /// All tokens the pass computes.
    #[must_use]
    pub fn total_tokens(&self) -> u64 {
        self.prefill_tokens + self.decode_kv.len() as u64
    }

    /// Rows for which a token is sampled.
    #[must_use]
    pub fn sampled_rows(&self) -> u64 {
        self.sampling_chunks + self.decode_kv.len() as u64
    }

    /// Whether there is no work.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.prefill.is_empty() && self.decode_kv.is_empty()
    }
}

/// A model of how long a pass takes.
///
/// It must be deterministic: the same passes in the same order give the same durations.
pub trait PassTiming: fmt::Debug + Send {
    /// The duration of a pass with this work, rounded to a nanosecond. `work` is never empty.
    fn pass_duration(&mut self, work: &PassWork) -> Duration;
}

/// `milliseconds` as a duration, rounded to a nanosecond: negative values and NaN become zero, and what
/// is longer than a `u64` of nanoseconds is cut there.
fn rounded(milliseconds: f64) -> Duration {
    // A cast from float to integer does exactly that.
    Duration::from_nanos((milliseconds * 1e6).round() as u64)
}
