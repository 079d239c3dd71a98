//! The name of a full block's content: a hash chained over everything before it.
//!
//! Layout of what is hashed with XXH3-64 (seed 0): the parent's hash (8 bytes, little endian; a constant
//! at the start of a sequence), the block's tokens (4 bytes each, little endian), then the extra keys:
//! a tag byte, and for texts their length before their bytes, so that no two key sets look alike. Where a
//! lazy prompt names its content ([`crate::PromptSource::content_key`]), that name stands for the tokens.

use std::sync::Arc;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::kv_event::{BlockExtraKeys, BlockHash};
use crate::request::{MultimodalItem, Request};

use super::radix_tree::Namespace;

/// Stands in for the parent's hash at the start of a sequence. Any constant does.
const ROOT: u64 = 0x7374_616e_6469_6e00;

/// Seed for names made from content keys. Any constant but 0 does.
const KEY_SEED: u64 = 0x636f_6e74_656e_7421;

/// What beside the tokens identifies the blocks of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct ExtraKeys {
    lora_name: Option<Arc<str>>,
    multimodal: Vec<MultimodalItem>,
    cache_salt: Option<Arc<str>>,
}

impl ExtraKeys {
    /// The keys of a request.
    pub(crate) fn of(request: &Request) -> Self {
        Self {
            lora_name: request.lora_name.clone(),
            multimodal: request.multimodal.clone(),
            cache_salt: request.cache_salt.clone(),
        }
    }

    /// The LoRA adapter.
    pub(crate) fn lora_name(&self) -> Option<&Arc<str>> {
        self.lora_name.as_ref()
    }

    /// Whether no block has any.
    pub(crate) fn is_empty(&self) -> bool {
        self.lora_name.is_none() && self.multimodal.is_empty() && self.cache_salt.is_none()
    }

    /// What separates its prefixes from those of other sequences, whatever their tokens.
    pub(crate) fn namespace(&self) -> Namespace {
        Namespace { lora_name: self.lora_name.clone(), cache_salt: self.cache_salt.clone() }
    }

    /// Replaces the tokens at `start..start + out.len()` that multimodal items cover by values made from
    /// the items, in the upper half of all token ids.
    pub(crate) fn mark_items(&self, start: usize, out: &mut [u32]) {
        for item in &self.multimodal {
            let first = (item.offset as usize).max(start);
            let end = (item.offset as usize + item.num_tokens as usize).min(start + out.len());
            if first < end {
                let mark = xxh3_64(item.identifier.as_bytes()) as u32 | 1 << 31;
                out[first - start..end - start].fill(mark);
            }
        }
    }

    /// The keys of the block with this index in the sequence; `None` where there are none.
    pub(crate) fn of_block(&self, index: u32, block_size: u32) -> Option<BlockExtraKeys> {
        if self.is_empty() {
            return None;
        }
        let start = i64::from(index) * i64::from(block_size);
        let end = start + i64::from(block_size);
        let overlapping = |item: &&MultimodalItem| {
            let (first, count) = (i64::from(item.offset), i64::from(item.num_tokens));
            first < end && first + count > start
        };
        let keys = BlockExtraKeys {
            lora_name: self.lora_name.clone(),
            multimodal: self
                .multimodal
                .iter()
                .filter(overlapping)
                .map(|item| (Arc::clone(&item.identifier), i64::from(item.offset) - start))
                .collect(),
            cache_salt: self.cache_salt.clone().filter(|_| index == 0),
        };
        (keys != BlockExtraKeys::default()).then_some(keys)
    }
}

/// Computes block hashes; holds the memory that this needs.
#[derive(Debug, Default)]
pub(crate) struct BlockHasher {
    bytes: Vec<u8>,
}

impl BlockHasher {
    /// The name of the content `tokens` after `parent`.
    pub(crate) fn hash(
        &mut self,
        parent: Option<BlockHash>,
        tokens: &[u32],
        keys: Option<&BlockExtraKeys>,
    ) -> BlockHash {
        self.bytes.clear();
        self.bytes.extend_from_slice(&parent.map_or(ROOT, |parent| parent.0).to_le_bytes());
        let start = self.bytes.len();
        self.bytes.resize(start + tokens.len() * 4, 0);
        for (bytes, token) in self.bytes[start..].chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        if let Some(keys) = keys {
            self.push_keys(keys);
        }
        BlockHash(xxh3_64(&self.bytes))
    }

    /// The name of the content that `key` stands for after `parent`, where a prompt has such keys and the
    /// block no others. The seed tells these names from those of tokens.
    pub(crate) fn hash_key(parent: Option<BlockHash>, key: u64) -> BlockHash {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&parent.map_or(ROOT, |parent| parent.0).to_le_bytes());
        bytes[8..].copy_from_slice(&key.to_le_bytes());
        BlockHash(xxh3_64_with_seed(&bytes, KEY_SEED))
    }

    fn push_keys(&mut self, keys: &BlockExtraKeys) {
        if let Some(lora_name) = &keys.lora_name {
            self.push_text(b'L', lora_name);
        }
        for (identifier, offset) in &keys.multimodal {
            self.push_text(b'M', identifier);
            self.bytes.extend_from_slice(&offset.to_le_bytes());
        }
        if let Some(salt) = &keys.cache_salt {
            self.push_text(b'S', salt);
        }
    }

    fn push_text(&mut self, tag: u8, text: &str) {
        self.bytes.push(tag);
        self.bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        self.bytes.extend_from_slice(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(request: &Request, index: u32) -> Option<BlockExtraKeys> {
        ExtraKeys::of(request).of_block(index, 16)
    }

    fn hash(parent: Option<BlockHash>, tokens: &[u32], keys: Option<&BlockExtraKeys>) -> BlockHash {
        BlockHasher::default().hash(parent, tokens, keys)
    }

    fn request() -> Request {
        Request::new(vec![0; 64], 1)
    }

    #[test]
    fn case_16_parent_and_every_token_matter() {
        let root = hash(None, &[1, 2], None);
        assert_eq!(root, hash(None, &[1, 2], None));
        for other in [hash(None, &[1, 3], None), hash(None, &[2, 2], None), hash(Some(root), &[1, 2], None)] {
            assert_ne!(root, other);
        }
    }

    #[test]
    fn names_from_content_keys_chain_and_are_not_those_of_tokens() {
        let root = BlockHasher::hash_key(None, 1);
        assert_eq!(root, BlockHasher::hash_key(None, 1));
        for other in [BlockHasher::hash_key(None, 2), BlockHasher::hash_key(Some(root), 1), hash(None, &[1, 0], None)] {
            assert_ne!(root, other);
        }
    }

    #[test]
    fn case_17_every_extra_key_gives_another_hash() {
        let item = |offset| MultimodalItem { identifier: "a".into(), offset, num_tokens: 4 };
        let mut requests = vec![request(); 6];
        requests[1].lora_name = Some("a".into());
        requests[2].cache_salt = Some("a".into());
        requests[3].multimodal = vec![item(0)];
        requests[4].multimodal = vec![item(1)];
        requests[5].lora_name = Some("ab".into());
        let mut hashes: Vec<_> =
            requests.iter().map(|request| hash(None, &[0; 16], keys(request, 0).as_ref())).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), requests.len());
    }

    #[test]
    fn a_salt_is_in_the_first_block_alone_and_an_item_in_the_blocks_it_overlaps() {
        let mut salted = request();
        salted.cache_salt = Some("x".into());
        assert_eq!(keys(&salted, 0).and_then(|keys| keys.cache_salt).as_deref(), Some("x"));
        assert_eq!(keys(&salted, 1), None);

        let mut image = request();
        image.multimodal = vec![MultimodalItem { identifier: "i".into(), offset: 20, num_tokens: 13 }];
        let offsets: Vec<_> = (0..4).map(|index| keys(&image, index).map(|keys| keys.multimodal[0].1)).collect();
        assert_eq!(offsets, [None, Some(4), Some(-12), None]);
        image.multimodal[0].num_tokens = 12;
        assert_eq!(keys(&image, 2), None, "it ends with the second block");
    }
}
