//! Prompts that a trace describes by length and block ids only.

use std::sync::Arc;

use crate::output::mix;
use crate::request::PromptSource;

/// Tokens that one id of `hash_ids` stands for.
pub const TRACE_BLOCK_TOKENS: u32 = 512;

const BLOCK: usize = TRACE_BLOCK_TOKENS as usize;
/// The increment of SplitMix64, 2^64 divided by the golden ratio.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Tokens made from block ids.
///
/// A full block with an id has tokens that depend on the id and the position in the block alone. Everything
/// else belongs to the row alone: the part-filled last block, whose id does not say how much of it is shared,
/// and whole prompts of formats without ids.
///
/// ```text
/// key    = mix(mix(domain) ^ number)         domain 1 and the id, or domain 2 and the row's number
/// token  = (mix(key + (position + 1) · STEP) · vocab_size) >> 64      position in the block, or in the prompt
/// ```
#[derive(Debug)]
pub(super) struct TracePrompt {
    pub(super) hash_ids: Arc<[u64]>,
    pub(super) num_tokens: u32,
    pub(super) row: u64,
    pub(super) vocab_size: u32,
}

impl TracePrompt {
    /// The key of the tokens of `block`, and whether positions count from the block's start.
    fn key(&self, block: usize) -> (u64, bool) {
        let full_blocks = self.num_tokens as usize / BLOCK;
        match self.hash_ids.get(block) {
            Some(&id) if block < full_blocks => (mix(mix(1) ^ id), true),
            _ => (mix(mix(2) ^ self.row), false),
        }
    }
}

impl PromptSource for TracePrompt {
    fn num_tokens(&self) -> usize {
        self.num_tokens as usize
    }

    fn fill(&self, start: usize, mut out: &mut [u32]) {
        let mut position = start;
        while !out.is_empty() {
            let (block, offset) = (position / BLOCK, position % BLOCK);
            let (part, rest) = out.split_at_mut(out.len().min(BLOCK - offset));
            let (key, from_block_start) = self.key(block);
            let first = if from_block_start { offset } else { position };
            let mut state = key.wrapping_add((first as u64).wrapping_mul(STEP));
            for token in part.iter_mut() {
                state = state.wrapping_add(STEP);
                *token = ((u128::from(mix(state)) * u128::from(self.vocab_size)) >> 64) as u32;
            }
            position += part.len();
            out = rest;
        }
    }

    /// Within one block the tokens follow from the block's key and the position in it.
    fn content_key(&self, start: usize, len: usize) -> Option<u64> {
        let (block, offset) = (start / BLOCK, start % BLOCK);
        if len > BLOCK - offset {
            return None;
        }
        let (key, from_block_start) = self.key(block);
        let first = if from_block_start { offset } else { start };
        Some(mix(key.wrapping_add((first as u64).wrapping_mul(STEP))))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::request::Prompt;

    fn prompt(hash_ids: &[u64], num_tokens: u32, row: u64) -> Prompt {
        Prompt::Lazy(Arc::new(TracePrompt { hash_ids: hash_ids.into(), num_tokens, row, vocab_size: 128_256 }))
    }

    fn shared_prefix(left: &Prompt, right: &Prompt) -> usize {
        left.to_tokens().iter().zip(right.to_tokens().iter()).take_while(|(left, right)| left == right).count()
    }

    #[test]
    fn equal_ids_give_equal_full_blocks_and_tails_are_never_shared() {
        let first = prompt(&[7, 8, 9], 1300, 0);
        assert_eq!(shared_prefix(&first, &prompt(&[7, 8, 9], 1300, 1)), 1024, "the third block is part-filled");
        assert_eq!(shared_prefix(&first, &prompt(&[7, 8, 9], 1536, 1)), 1024, "also against a full one");
        assert_eq!(shared_prefix(&prompt(&[7, 8], 1024, 0), &prompt(&[7, 8], 1024, 1)), 1024, "two full blocks");
        assert_eq!(shared_prefix(&first, &prompt(&[7, 6, 9], 1300, 1)), 512);
        assert_eq!(shared_prefix(&prompt(&[], 600, 3), &prompt(&[], 600, 4)), 0, "no ids: nothing is shared");
        assert_eq!(first, prompt(&[7, 8, 9], 1300, 0), "the same row is the same prompt");
    }

    #[test]
    fn any_range_is_the_same_as_that_range_of_the_whole() {
        let lazy = prompt(&[5, 6, 7], 1500, 11);
        let whole = lazy.to_tokens();
        for (start, len) in [(0, 16), (500, 40), (511, 1), (512, 512), (1000, 500), (1499, 1), (700, 0)] {
            let mut part = vec![0; len];
            lazy.fill(start, &mut part);
            assert_eq!(part, whole[start..start + len], "{start}+{len}");
        }
    }

    #[test]
    fn ranges_have_equal_keys_exactly_where_they_have_equal_tokens() {
        let prompts = [
            prompt(&[7, 8, 9], 1300, 0),
            prompt(&[7, 8, 9], 1300, 1),
            prompt(&[7, 6, 8], 1536, 2),
            prompt(&[8, 7], 1024, 3),
            prompt(&[], 700, 4),
            prompt(&[], 700, 5),
        ];
        for len in [1, 16, 48, 512] {
            let (mut by_key, mut by_tokens) = (BTreeMap::new(), BTreeMap::new());
            for prompt in &prompts {
                for start in (0..prompt.len() + 1 - len).step_by(len) {
                    let mut tokens = vec![0; len];
                    prompt.fill(start, &mut tokens);
                    let key = prompt.content_key(start, len);
                    assert_eq!(key.is_none(), start % BLOCK + len > BLOCK, "{start}+{len}");
                    if let Some(key) = key {
                        assert_eq!(by_key.entry(key).or_insert_with(|| tokens.clone()), &tokens, "{start}+{len}");
                        // One token alone may be the same by chance.
                        assert!(len == 1 || *by_tokens.entry(tokens).or_insert(key) == key, "{start}+{len}");
                    }
                }
            }
        }
    }

    #[test]
    fn tokens_stay_in_the_vocabulary_and_are_stable() {
        let tiny = TracePrompt { hash_ids: [1].into(), num_tokens: 2000, row: 0, vocab_size: 3 };
        let tokens = Prompt::Lazy(Arc::new(tiny)).to_tokens();
        assert!(tokens.iter().all(|&token| token < 3));
        assert!((0..3).all(|token| tokens.contains(&token)));
        assert_eq!(prompt(&[42], 514, 9).to_tokens()[510..], GOLDEN, "a change alters every stored replay");
    }
    const GOLDEN: [u32; 4] = [48_358, 34_904, 37_835, 39_970];
}
