//! What comes out of an engine: finish reasons, and the deterministic token generator.

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum FinishReason {
    /// A stop token or the end token was produced. Every token was delivered, that one included.
    Stop {
        /// The stop token that matched; `None` where the end token did.
        stop_token: Option<u32>,
    },
    /// The output length or `max_model_len` was reached. Every token was delivered.
    Length,
    /// The engine refused the request after it had been accepted into a lane.
    Rejected,
    /// The caller cancelled it.
    Cancelled,
    /// Its reader left the queue full ([`crate::OutputBuffering`]).
    SlowConsumer,
    /// It outgrew the whole KV pool.
    OutOfMemory,
    /// The KV transfer of a handoff failed.
    TransferFailed,
    /// The engine was stopped.
    EngineStopped,
    /// The engine failed.
    Failed,
}

/// Counts of the prefill of one request, known with its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PrefillStats {
    /// Tokens in the prompt.
    pub num_prompt_tokens: u32,
    /// Tokens that were computed, the cached ones not counted.
    pub num_computed_tokens: u32,
    /// Prompt tokens whose KV was there: found in the KV cache, or loaded from another engine.
    pub num_cached_tokens: u32,
    /// Of these, tokens loaded from another engine. The last prompt token counts although it is
    /// computed again.
    pub num_external_cached_tokens: u32,
    /// Tokens in full blocks that this prefill entered into the prefix cache.
    pub num_cache_creation_tokens: u32,
}

/// Output tokens as a function of seed, request and position.
///
/// Random access by position, so nothing is stored per generated token and a preempted request
/// recomputes exactly what it had. With `mix` the finaliser of SplitMix64 (Steele, Lea and Flood,
/// "Fast splittable pseudorandom number generators", OOPSLA 2014), `hi` and `lo` the halves of the request's 128-bit id:
///
/// ```text
/// stream   = mix(mix(mix(seed) ^ lo) ^ hi)
/// raw      = mix(stream + (position + 1) * 0x9E3779B97F4A7C15)      wrapping
/// token    = the r-th token of the vocabulary that is no stop or end token, r = (raw * allowed) >> 64
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenGenerator {
    stream: u64,
    vocab_size: u32,
}

impl TokenGenerator {
    /// The generator of one request: `seed` is the engine's, `request_key` the request's id as 128 bits.
    #[must_use]
    pub fn new(seed: u64, request_key: u128, vocab_size: u32) -> Self {
        let (hi, lo) = ((request_key >> 64) as u64, request_key as u64);
        Self { stream: mix(mix(mix(seed) ^ lo) ^ hi), vocab_size }
    }

    /// The token at `position` (0 is the first output token), never one of `forbidden`.
    ///
    /// `forbidden` must be sorted, without repeats, and leave one token of the vocabulary free.
    #[must_use]
    #[inline]
    pub fn token(&self, position: u32, forbidden: &[u32]) -> u32 {
        let raw = mix(self.stream.wrapping_add((u64::from(position) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        if forbidden.is_empty() {
            return ((u128::from(raw) * u128::from(self.vocab_size)) >> 64) as u32;
        }
        self.allowed_token(raw, forbidden)
    }

    #[inline(never)]
    fn allowed_token(&self, raw: u64, forbidden: &[u32]) -> u32 {
        let in_vocabulary = forbidden.partition_point(|&token| token < self.vocab_size);
        let forbidden = &forbidden[..in_vocabulary];
        let allowed = u64::from(self.vocab_size).saturating_sub(forbidden.len() as u64);
        let rank = ((u128::from(raw) * u128::from(allowed)) >> 64) as u32;
        // Below a forbidden token lie as many allowed ones as its value less its index.
        let (mut skipped, mut until) = (0, forbidden.len());
        while skipped < until {
            let middle = skipped + (until - skipped) / 2;
            if u64::from(forbidden[middle]) <= u64::from(rank) + middle as u64 {
                skipped = middle + 1;
            } else {
                until = middle;
            }
        }
        // At most the size of the vocabulary.
        rank + skipped as u32
    }
}

/// The finaliser of SplitMix64.
pub(crate) const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_tokens() {
        let generator = TokenGenerator::new(42, 7, 128_256);
        let tokens: Vec<u32> = (0..4).map(|position| generator.token(position, &[])).collect();
        assert_eq!(tokens, GOLDEN, "the documented formula gives these; a change breaks every stored expectation");
    }
    const GOLDEN: [u32; 4] = [18_057, 36_165, 113_954, 33_991];

    #[test]
    fn forbidden_tokens_never_appear_and_all_others_do() {
        let generator = TokenGenerator::new(1, 2, 8);
        let forbidden = [0, 3, 7, 900];
        let mut seen = [0_u32; 8];
        for position in 0..4_000 {
            seen[generator.token(position, &forbidden) as usize] += 1;
        }
        assert_eq!([seen[0], seen[3], seen[7]], [0, 0, 0]);
        for token in [1, 2, 4, 5, 6] {
            assert!(seen[token] > 600, "token {token} appeared {} times of 4000", seen[token]);
        }
    }

    #[test]
    fn a_million_forbidden_tokens_cost_a_search_and_not_a_walk() {
        let forbidden: Vec<u32> = (0..2_000_000).filter(|token| token % 2 == 0).collect();
        let generator = TokenGenerator::new(1, 2, 2_000_000);
        // A walk would take a thousand seconds.
        assert!((0..1_000_000).all(|position| generator.token(position, &forbidden) % 2 == 1));
        let walked = |rank: u32| forbidden.iter().fold(rank, |token, &skipped| token + u32::from(token >= skipped));
        let allowed = forbidden.len() as u128;
        for position in 0..100 {
            let raw = mix(position);
            assert_eq!(generator.allowed_token(raw, &forbidden), walked(((u128::from(raw) * allowed) >> 64) as u32));
        }
    }

    #[test]
    fn seed_id_and_position_all_matter() {
        let first = |seed, key| TokenGenerator::new(seed, key, u32::MAX).token(0, &[]);
        assert_ne!(first(1, 2), first(2, 1));
        assert_ne!(first(1, 2), first(1, 2 << 64));
    }
}
