//! Content → block, as small as it can be kept.
//!
//! Every block that is handed out costs one entry that goes and one that comes, at places that are as random
//! as the hashes: the memory that this touches is what a long prompt costs. So an entry is 8 bytes, half a
//! hash and a block, and the whole hash is where it is anyway: with the block.

use crate::kv_event::{BlockHash, BlockId};

/// An entry; `block` 0, the null block, says that the place is empty.
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    /// The upper half of the content's hash.
    tag: u32,
    block: BlockId,
}

/// Entries that lie in the first-level cache anyway.
const SMALL: usize = 1 << 12;

/// A hash table with linear probing that is filled to the half at the most. Hashes come well mixed.
#[derive(Debug, Default)]
pub(super) struct ContentIndex {
    /// A power of two of them, or none.
    entries: Vec<Entry>,
    len: usize,
}

impl ContentIndex {
    /// Contents in it.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The block of a content; `holds` says whether a block has that content.
    pub(super) fn find(&self, content: BlockHash, holds: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        let tag = tag(content);
        if self.entries.is_empty() {
            return None;
        }
        let mut place = self.home(tag);
        loop {
            match self.entries[place] {
                Entry { block: 0, .. } => return None,
                entry if entry.tag == tag && holds(entry.block) => return Some(entry.block),
                _ => place = self.after(place),
            }
        }
    }

    /// Touches the places of contents that are about to be put in or taken out. Each such place is a cache
    /// miss; asked for together they come together.
    pub(super) fn warm(&self, contents: impl Iterator<Item = BlockHash>) {
        if self.entries.len() > SMALL {
            contents.for_each(|content| {
                std::hint::black_box(self.entries[self.home(tag(content))].block);
            });
        }
    }

    /// The block of a content, as [`ContentIndex::find`]; where there is none, `block` becomes it.
    pub(super) fn find_or_insert(
        &mut self,
        content: BlockHash,
        block: BlockId,
        holds: impl Fn(BlockId) -> bool,
    ) -> Option<BlockId> {
        if self.len * 2 >= self.entries.len() {
            self.grow();
        }
        let tag = tag(content);
        let mut place = self.home(tag);
        loop {
            let entry = &mut self.entries[place];
            if entry.block == 0 {
                *entry = Entry { tag, block };
                self.len += 1;
                return None;
            }
            if entry.tag == tag && holds(entry.block) {
                return Some(entry.block);
            }
            place = self.after(place);
        }
    }

    /// Gives a content another block.
    pub(super) fn replace(&mut self, content: BlockHash, block: BlockId, by: BlockId) {
        let place = self.place(content, block);
        self.entries[place].block = by;
    }

    /// Takes a content out, whose block is `block`.
    pub(super) fn remove(&mut self, content: BlockHash, block: BlockId) {
        let mut hole = self.place(content, block);
        self.len -= 1;
        // Whoever was pushed along by this entry moves up.
        let mut place = self.after(hole);
        while self.entries[place].block != 0 {
            let home = self.home(self.entries[place].tag);
            let mask = self.entries.len() - 1;
            // How far from home it is, and how far it would have to move.
            if place.wrapping_sub(home) & mask >= place.wrapping_sub(hole) & mask {
                self.entries[hole] = self.entries[place];
                hole = place;
            }
            place = self.after(place);
        }
        self.entries[hole] = Entry::default();
    }

    /// Takes everything out and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.entries.fill(Entry::default());
        self.len = 0;
    }

    fn place(&self, content: BlockHash, block: BlockId) -> usize {
        let mut place = self.home(tag(content));
        while self.entries[place].block != block {
            debug_assert_ne!(self.entries[place].block, 0, "block {block} is in the index");
            place = self.after(place);
        }
        place
    }

    fn put(&mut self, entry: Entry) {
        let mut place = self.home(entry.tag);
        while self.entries[place].block != 0 {
            place = self.after(place);
        }
        self.entries[place] = entry;
    }

    fn grow(&mut self) {
        let larger = vec![Entry::default(); (self.entries.len() * 2).max(16)];
        let entries = std::mem::replace(&mut self.entries, larger);
        entries.into_iter().filter(|entry| entry.block != 0).for_each(|entry| self.put(entry));
    }

    fn home(&self, tag: u32) -> usize {
        tag as usize & (self.entries.len() - 1)
    }

    fn after(&self, place: usize) -> usize {
        (place + 1) & (self.entries.len() - 1)
    }
}

fn tag(content: BlockHash) -> u32 {
    (content.0 >> 32) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::output::mix;

    #[test]
    fn it_is_a_map_also_where_tags_and_homes_collide() {
        let mut index = ContentIndex::default();
        let (mut blocks, mut next): (BTreeMap<u64, BlockId>, BlockId) = (BTreeMap::new(), 1);
        for step in 0..50_000_u64 {
            // Few homes, fewer tags than contents.
            let content = ((mix(step) % 40) << 32) | ((mix(step) >> 40) % 3);
            let held = |content: u64| blocks.get(&content).copied();
            let found = index.find(BlockHash(content), |block| held(content) == Some(block));
            assert_eq!(found, held(content), "step {step}");
            match (found, mix(step ^ 5) % 3) {
                (None, _) => {
                    let found = index.find_or_insert(BlockHash(content), next, |block| held(content) == Some(block));
                    assert_eq!(found, None);
                    blocks.insert(content, next);
                }
                (Some(block), 0) => {
                    let found = index.find_or_insert(BlockHash(content), next, |block| held(content) == Some(block));
                    assert_eq!(found, Some(block));
                    index.replace(BlockHash(content), block, next);
                    blocks.insert(content, next);
                }
                (Some(block), _) => {
                    index.remove(BlockHash(content), block);
                    blocks.remove(&content);
                }
            }
            next += 1;
            assert_eq!(index.len(), blocks.len());
        }
        index.clear();
        assert_eq!((index.len(), index.find(BlockHash(0), |_| true)), (0, None));
    }
}
