//! What admission reckons with: the share of their output that running sequences will need, and the tokens
//! that are left for one prefill batch.

use crate::config::SglangConfig;
use crate::kv::RadixCache;

/// Share at the start: `SGLANG_INIT_NEW_TOKEN_RATIO`.
const INIT: f64 = 0.7;
/// The lowest share, as a part of the first: `SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR`.
const MIN_FACTOR: f64 = 0.14;
/// Decode passes from the first share to the lowest: `SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS`.
const DECAY_STEPS: f64 = 600.0;
/// Tokens per sequence that a retraction makes room for: `SGLANG_RETRACT_DECODE_STEPS`.
pub(super) const RETRACT_DECODE_STEPS: u64 = 20;
/// Output tokens of one sequence are reckoned with up to here: `SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`.
const CLIP_MAX_NEW_TOKENS: u32 = 4096;

/// Output tokens that are reckoned with for a sequence that may still produce `remaining`.
pub(super) fn clipped(remaining: u32) -> u32 {
    remaining.min(CLIP_MAX_NEW_TOKENS)
}

/// The share of their remaining output that running sequences are expected to take, 0 to 1.
#[derive(Debug)]
pub(super) struct NewTokenRatio {
    init: f64,
    min: f64,
    decay: f64,
    current: f64,
}

impl NewTokenRatio {
    pub(super) fn new(conservativeness: f64) -> Self {
        let init = (INIT * conservativeness).min(1.0);
        let min = (init * MIN_FACTOR).min(1.0);
        Self { init, min, decay: (init - min) / DECAY_STEPS, current: init }
    }

    pub(super) fn current(&self) -> f64 {
        self.current
    }

    /// A decode pass found room for everybody.
    pub(super) fn decay(&mut self) {
        self.current = (self.current - self.decay).max(self.min);
    }

    /// After a retraction, from the outputs that those who are left have and may have.
    pub(super) fn estimate(&mut self, count: usize, outputs: u64, limits: u64) {
        let soon = outputs + RETRACT_DECODE_STEPS * count as u64;
        self.current = (soon as f64 / (limits + 1) as f64).min(1.0);
    }

    pub(super) fn reset(&mut self) {
        self.current = self.init;
    }
}

/// Why a prefill batch goes on or stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The next one may be tried.
    Continue,
    /// The pool is spoken for: admission closes.
    NoToken,
    /// The batch has all the tokens that it may have.
    Other,
}

/// The tokens left for one prefill batch.
///
/// The sums are kept in floating point and in the real scheduler's order, as its comparisons depend on them.
#[derive(Debug)]
pub(super) struct Budget {
    page_size: u32,
    /// Pool tokens that are spoken for, future output included.
    total_offset: f64,
    /// Pool tokens that this batch takes.
    current_offset: i64,
    /// Left of `max_prefill_tokens`.
    input: i64,
    /// Left of `chunked_prefill_size`.
    chunk: Option<i64>,
}

impl Budget {
    /// The budget of a batch beside running sequences that are expected to take `offset` more tokens;
    /// `mixed` of them decode in the same pass.
    pub(super) fn new(options: &SglangConfig, mixed: u32, offset: f64) -> Self {
        Self {
            page_size: options.page_size,
            total_offset: f64::from(mixed) + offset,
            current_offset: i64::from(mixed),
            input: i64::from(options.max_prefill_tokens) - i64::from(mixed),
            chunk: options.chunked_prefill_size.map(|size| i64::from(size) - i64::from(mixed)),
        }
    }

    /// Pool tokens that nobody is expected to take.
    pub(super) fn remaining_total(&self, kv: &RadixCache) -> f64 {
        (kv.available_tokens() + kv.evictable_tokens()) as f64 - self.total_offset
    }

    /// Pool tokens that this batch has not taken.
    pub(super) fn remaining_current(&self, kv: &RadixCache) -> i64 {
        (kv.available_tokens() + kv.evictable_tokens()) as i64 - self.current_offset
    }

    /// Tokens of a batch that may be split, as far as they are limited.
    pub(super) fn chunk(&self) -> Option<i64> {
        self.chunk
    }

    /// Whether prompts that would exceed the limit of the batch are left for the next one.
    pub(super) fn exceeds_input(&self, tokens: u32) -> bool {
        self.chunk.is_none() && self.ceil(tokens) >= self.input
    }

    /// Tokens rounded up to whole pages; twice a u32 at the most.
    pub(super) fn ceil(&self, tokens: u32) -> i64 {
        i64::from(tokens.div_ceil(self.page_size)) * i64::from(self.page_size)
    }

    /// Takes what an admitted sequence needs: the tokens that this pass computes, one page, and its output.
    pub(super) fn charge(&mut self, tokens: u32, max_new_tokens: u32) {
        let tokens = self.ceil(tokens);
        let immediate = tokens + i64::from(self.page_size);
        self.total_offset += (immediate + i64::from(max_new_tokens)) as f64;
        self.current_offset += immediate;
        self.input -= tokens;
        self.chunk = self.chunk.map(|chunk| chunk - tokens);
    }

    /// Gives back what a running sequence was expected to take.
    pub(super) fn give_back(&mut self, offset: f64) {
        self.total_offset -= offset;
    }

    pub(super) fn verdict(&self, kv: &RadixCache) -> Verdict {
        if self.remaining_total(kv) <= 0.0 || self.remaining_current(kv) <= 0 {
            Verdict::NoToken
        } else if self.input <= 0 || self.chunk.is_some_and(|chunk| chunk <= 0) {
            Verdict::Other
        } else {
            Verdict::Continue
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_49_the_ratio_falls_in_600_decodes_and_jumps_with_a_retraction() {
        let mut ratio = NewTokenRatio::new(1.0);
        assert_eq!(ratio.current(), 0.7);
        (0..600).for_each(|_| ratio.decay());
        assert!((ratio.current() - 0.098).abs() < 1e-12);
        ratio.decay();
        assert_eq!(ratio.current(), 0.7 * 0.14, "the floor");
        ratio.estimate(2, 150, 2000);
        assert!((ratio.current() - 190.0 / 2001.0).abs() < 1e-15);
        ratio.estimate(1, 5, 6);
        assert_eq!(ratio.current(), 1.0, "25 of 7");
        ratio.reset();
        assert_eq!(ratio.current(), 0.7);
        assert_eq!(NewTokenRatio::new(2.0).current(), 1.0, "never above 1");
    }

    #[test]
    fn case_48_a_long_output_is_reckoned_with_up_to_4096() {
        assert_eq!([clipped(100_000), clipped(4096), clipped(7)], [4096, 4096, 7]);
    }
}
