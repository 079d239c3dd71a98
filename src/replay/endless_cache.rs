//! The prefix hits that a cache without limits would have.

use rustc_hash::FxHashSet;

/// A walk over the block ids of a trace's prompts with a cache from which nothing is ever evicted.
///
/// Each prompt's ids are walked from the left until the first one that was not seen before; then all of them
/// count as seen. An engine that admits the same requests in the order of the walk never finds more.
#[derive(Debug, Clone, Default)]
pub struct EndlessCache {
    seen: FxHashSet<u64>,
    block_references: u64,
    block_hits: u64,
    prompt_tokens: u64,
    token_hits: u64,
}

/// What an [`EndlessCache`] found, in two units.
///
/// Blocks are what traces are usually described by: the last block of a prompt counts as a whole one even
/// where it is filled in part. Tokens are what an engine counts, and there a part-filled block is never found.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EndlessCacheBound {
    /// Blocks of all prompts.
    pub block_references: u64,
    /// Those found.
    pub block_hits: u64,
    /// `block_hits / block_references`.
    pub block_hit_rate: f64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Those in full blocks that were found; at most all but the last token of a prompt, which is always computed.
    pub token_hits: u64,
    /// `token_hits / prompt_tokens`. An engine's prefix hit rate is at most this.
    pub token_hit_rate: f64,
}

impl EndlessCache {
    /// An empty cache.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Walks one prompt: its length and the ids of its blocks, `block_tokens` tokens each.
    pub fn observe(&mut self, prompt_tokens: u32, hash_ids: &[u64], block_tokens: u32) {
        let hits = hash_ids.iter().take_while(|id| self.seen.contains(id)).count() as u64;
        self.seen.extend(hash_ids);
        let (prompt_tokens, block_tokens) = (u64::from(prompt_tokens), u64::from(block_tokens.max(1)));
        let full_blocks_found = hits.min(prompt_tokens / block_tokens);
        self.block_references += hash_ids.len() as u64;
        self.block_hits += hits;
        self.prompt_tokens += prompt_tokens;
        self.token_hits += (full_blocks_found * block_tokens).min(prompt_tokens.saturating_sub(1));
    }

    /// What was found so far; `None` if no prompt had ids, so that nothing is known of its prefixes.
    #[must_use]
    pub fn bound(&self) -> Option<EndlessCacheBound> {
        (self.block_references > 0).then(|| EndlessCacheBound {
            block_references: self.block_references,
            block_hits: self.block_hits,
            block_hit_rate: ratio(self.block_hits, self.block_references),
            prompt_tokens: self.prompt_tokens,
            token_hits: self.token_hits,
            token_hit_rate: ratio(self.token_hits, self.prompt_tokens),
        })
    }
}

/// `part / whole`; 0 for nothing of nothing.
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walk_stops_at_the_first_miss_and_part_filled_blocks_give_no_tokens() {
        let mut cache = EndlessCache::new();
        assert_eq!(cache.bound(), None);
        cache.observe(1100, &[1, 2, 3], 512);
        cache.observe(1100, &[1, 2, 3], 512); // 3 blocks found, 2 of them full
        cache.observe(1536, &[1, 9, 3], 512); // 3 is known, but behind a miss
        cache.observe(1024, &[1, 2], 512); // all full: the last token is still computed
        let bound = cache.bound().expect("blocks");
        assert_eq!((bound.block_hits, bound.block_references), (3 + 1 + 2, 11));
        assert_eq!((bound.token_hits, bound.prompt_tokens), (1024 + 512 + 1023, 4760));
        assert_eq!((bound.block_hit_rate, bound.token_hit_rate), (6.0 / 11.0, 2559.0 / 4760.0));
    }

    #[cfg(feature = "serde")]
    #[test]
    fn the_bound_of_the_shipped_trace() {
        use crate::replay::trace::{TRACE_BLOCK_TOKENS, TraceReader};
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/mooncake_conversation_500.jsonl");
        let (mut cache, mut rows) = (EndlessCache::new(), 0);
        for request in TraceReader::open(path, None).expect("the file is part of the crate") {
            let request = request.expect("valid");
            cache.observe(request.prompt_tokens(), &request.hash_ids, TRACE_BLOCK_TOKENS);
            rows += 1;
        }
        let bound = cache.bound().expect("blocks");
        // Counted apart from this code, by a script over the file.
        assert_eq!(rows, 500);
        assert_eq!((bound.block_references, bound.block_hits), (14_162, 2_283));
        assert_eq!((bound.prompt_tokens, bound.token_hits), (7_124_855, 1_166_336));
    }
}
