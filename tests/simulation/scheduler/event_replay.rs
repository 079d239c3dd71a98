//! A consumer of KV events, as a router would be one: it knows the cache from the events alone.

use std::collections::BTreeMap;

use standin::{BlockHash, BlockId, KvEvent, PoolView};

/// The cache as the events tell it.
#[derive(Debug, Default)]
pub(crate) struct EventReplay {
    contents: BTreeMap<BlockId, BlockHash>,
    copies: BTreeMap<BlockHash, usize>,
}

impl EventReplay {
    pub(crate) fn take(&mut self, event: &KvEvent) {
        match event {
            KvEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                block_ids,
                sequence,
                ..
            } => {
                assert!(!block_hashes.is_empty(), "{event:?}");
                assert_eq!(block_hashes.len(), block_ids.len(), "{event:?}");
                assert_eq!(token_ids.len(), block_hashes.len() * *block_size as usize, "{event:?}");
                if let Some(parent) = parent_block_hash {
                    assert!(self.copies.contains_key(parent), "the parent is not in the cache: {event:?}");
                }
                for (&id, &hash) in block_ids.iter().zip(block_hashes) {
                    if sequence.is_some() {
                        self.store(id, hash);
                    } else {
                        // Report mode "full" repeats what is there.
                        assert_eq!(self.contents.get(&id), Some(&hash), "{event:?}");
                    }
                }
            }
            KvEvent::BlockRemoved { block_hash, block_id } => {
                assert_eq!(self.contents.remove(block_id), Some(*block_hash), "{event:?}");
                let copies = self.copies.get_mut(block_hash).expect("a content that was stored");
                *copies -= 1;
                if *copies == 0 {
                    self.copies.remove(block_hash);
                }
            }
            KvEvent::AllBlocksCleared => *self = Self::default(),
            other => panic!("unknown event {other:?}"),
        }
    }

    fn store(&mut self, id: BlockId, hash: BlockHash) {
        assert_eq!(self.contents.insert(id, hash), None, "block {id} is stored twice");
        *self.copies.entry(hash).or_default() += 1;
    }

    /// Compares with the cache itself, when all events have been taken.
    pub(crate) fn assert_equals(&self, pool: PoolView<'_>) {
        for id in 1..=pool.num_usable_blocks() {
            assert_eq!(self.contents.get(&id).copied(), pool.block_hash(id), "block {id}");
        }
        assert_eq!(self.copies.len(), pool.num_cached_hashes());
        assert_eq!(self.contents.len(), pool.num_blocks_with_hash());
        for &hash in self.copies.keys() {
            assert!(pool.find(hash).is_some_and(|id| self.contents.get(&id) == Some(&hash)), "{hash:?}");
        }
    }
}
