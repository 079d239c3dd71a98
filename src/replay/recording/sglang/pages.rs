//! Numbers for what is in pages, from the tokens alone.
//!
//! Contents are told apart here by what they are, so that a hash of the core that stands for two of them
//! shows as a difference: it keeps the number of the first.

use rustc_hash::FxHashMap;

use super::step::Event;
use crate::kv_event::{BlockExtraKeys, BlockHash, KvEvent};

/// What makes a page: the page before it, the keys of a first page, and its tokens.
type Key = (Option<usize>, Option<(Option<String>, Option<String>)>, Vec<u32>);

/// All contents that appeared in an event.
#[derive(Debug, Default)]
pub(super) struct Pages {
    known: FxHashMap<Key, usize>,
    hashes: FxHashMap<BlockHash, usize>,
}

impl Pages {
    /// Events in a recording's own terms.
    pub(super) fn name(&mut self, events: &[KvEvent]) -> Vec<Event> {
        let mut named = Vec::new();
        for event in events {
            match (event, named.last_mut()) {
                (KvEvent::AllBlocksCleared, _) => named.push(Event::AllBlocksCleared {}),
                (KvEvent::BlockRemoved { block_hash, .. }, Some(Event::BlockRemoved { blocks })) => {
                    blocks.push(self.number(*block_hash));
                }
                (KvEvent::BlockRemoved { block_hash, .. }, _) => {
                    named.push(Event::BlockRemoved { blocks: vec![self.number(*block_hash)] });
                }
                (KvEvent::BlockStored { .. }, _) => named.push(self.stored(event)),
            }
        }
        named
    }

    fn stored(&mut self, event: &KvEvent) -> Event {
        let KvEvent::BlockStored { block_hashes, parent_block_hash, token_ids, block_size, extra_keys, .. } = event
        else {
            unreachable!("called for stored blocks alone");
        };
        let parent = parent_block_hash.map(|hash| self.number(hash));
        let mut before = parent;
        let mut blocks = Vec::new();
        for (index, (&hash, page)) in block_hashes.iter().zip(token_ids.chunks(*block_size as usize)).enumerate() {
            let keys = extra_keys.get(index).and_then(Option::as_ref).map(texts);
            let next = self.known.len();
            let number = *self.known.entry((before, keys, page.to_vec())).or_insert(next);
            blocks.push(*self.hashes.entry(hash).or_insert(number));
            before = Some(number);
        }
        Event::BlockStored {
            num_blocks: block_hashes.len(),
            block_size: *block_size,
            token_ids: token_ids.clone(),
            blocks,
            parent,
        }
    }

    /// The number of what the hash stands for; one that no recording has if it was never stored.
    fn number(&self, hash: BlockHash) -> usize {
        self.hashes.get(&hash).copied().unwrap_or(usize::MAX)
    }
}

fn texts(keys: &BlockExtraKeys) -> (Option<String>, Option<String>) {
    (keys.lora_name.as_deref().map(str::to_owned), keys.cache_salt.as_deref().map(str::to_owned))
}
