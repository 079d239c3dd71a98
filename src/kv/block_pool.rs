//! A pool of KV blocks: reference counts, the free list, and what each block's content is.
//!
//! Invariants:
//! 1. Block 0 is the null block. It is never handed out and is in no list, so it also ends the links.
//! 2. A block is in the free list exactly while its reference count is 0.
//! 3. A block that is free keeps its content and can be found until it is handed out again.
//! 4. Copies of one content are linked from the oldest to the newest; a look-up gives the oldest.
//!
//! The free list is three stretches: returned blocks without content (last in, first out), blocks that
//! were never handed out (ascending), returned blocks with content (first in, first out). The middle
//! stretch needs no memory, so a pool costs what was used of it and not what it could hold.
//!
//! Blocks come back in any order, so a long prompt meets blocks from all over the pool, each a cache miss or
//! two. The stretches are arrays, not links through the blocks, so that these misses come together.

use std::collections::VecDeque;

use super::content_index::ContentIndex;
use crate::kv_event::{BlockHash, BlockId};
use crate::seeded_bug::seeded_bug;

use super::pool::KvPool;

/// Block 0, which ends every chain of links.
const NULL: BlockId = 0;

/// Contents whose places in the index are asked for together: as many as a core can wait for, few enough to
/// stay in its first-level cache.
const TOGETHER: usize = 64;

#[derive(Debug, Clone)]
struct Block {
    content: Option<BlockHash>,
    ref_count: u32,
    /// How often it left the free list out of turn: a place there with another number is void.
    claims: u32,
    copies: Links,
}

impl Block {
    const fn owned_by(ref_count: u32) -> Self {
        Self { content: None, ref_count, claims: 0, copies: UNLINKED }
    }
}

/// Neighbours among the copies of one content, from the oldest to the newest. Before the oldest comes the
/// newest, after the newest none.
#[derive(Debug, Clone, Copy)]
struct Links {
    prev: BlockId,
    next: BlockId,
}

const UNLINKED: Links = Links { prev: NULL, next: NULL };

/// A place in the free list.
#[derive(Debug, Clone, Copy)]
struct Place {
    block: BlockId,
    claims: u32,
}

/// The pool of one engine.
#[derive(Debug)]
pub(crate) struct BlockPool {
    num_blocks: u32,
    num_free: u32,
    /// The blocks that were handed out at least once, by id; those after them are still fresh.
    blocks: Vec<Block>,
    /// The last one is the next to be handed out.
    free_without_content: Vec<BlockId>,
    /// The first one is the next, void places apart.
    free_with_content: VecDeque<Place>,
    num_void: usize,
    /// Content → its oldest block.
    index: ContentIndex,
    num_with_content: usize,
}

impl KvPool for BlockPool {
    fn num_usable(&self) -> u32 {
        self.num_usable()
    }

    fn num_free(&self) -> u32 {
        self.num_free()
    }

    fn free_queue(&self) -> Box<dyn Iterator<Item = BlockId> + '_> {
        Box::new(self.free_queue())
    }

    fn num_cached_hashes(&self) -> usize {
        self.num_cached_hashes()
    }

    fn num_blocks_with_hash(&self) -> usize {
        self.num_blocks_with_hash()
    }

    fn ref_count(&self, block: BlockId) -> u32 {
        self.ref_count(block)
    }

    fn block_hash(&self, block: BlockId) -> Option<BlockHash> {
        self.block_hash(block)
    }

    fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.find(hash)
    }
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included; at least 1.
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            num_blocks,
            num_free: num_blocks.saturating_sub(1),
            blocks: vec![Block::owned_by(1)],
            free_without_content: Vec::new(),
            free_with_content: VecDeque::new(),
            num_void: 0,
            index: ContentIndex::default(),
            num_with_content: 0,
        }
    }

    /// Blocks that can be handed out at all.
    pub(crate) fn num_usable(&self) -> u32 {
        self.num_blocks.saturating_sub(1)
    }

    /// Blocks without an owner.
    pub(crate) fn num_free(&self) -> u32 {
        self.num_free
    }

    /// The free blocks, next to be handed out first.
    pub(crate) fn free_queue(&self) -> impl Iterator<Item = BlockId> + '_ {
        let fresh = self.num_fresh_from()..self.num_blocks;
        let with_content = self.free_with_content.iter().filter(|place| self.is_free(place)).map(|place| place.block);
        self.free_without_content.iter().rev().copied().chain(fresh).chain(with_content)
    }

    /// Distinct contents that a look-up can find.
    pub(crate) fn num_cached_hashes(&self) -> usize {
        self.index.len()
    }

    /// Blocks that hold a content.
    pub(crate) fn num_blocks_with_hash(&self) -> usize {
        self.num_with_content
    }

    /// How many owners a block has.
    pub(crate) fn ref_count(&self, block: BlockId) -> u32 {
        self.known(block).map_or(0, |block| block.ref_count)
    }

    /// A block's content.
    pub(crate) fn block_hash(&self, block: BlockId) -> Option<BlockHash> {
        self.known(block).and_then(|block| block.content)
    }

    /// The oldest block with this content.
    pub(crate) fn find(&self, content: BlockHash) -> Option<BlockId> {
        self.index.find(content, |id| self.blocks[id as usize].content == Some(content))
    }

    /// Hands out the next `count` free blocks to one owner and appends them to `ids`; `evicted` is told the
    /// contents that they held until now. `false`, changing nothing, if too few are free.
    pub(crate) fn allocate(
        &mut self,
        count: u32,
        ids: &mut Vec<BlockId>,
        mut evicted: impl FnMut(BlockId, BlockHash),
    ) -> bool {
        if count > self.num_free {
            return false;
        }
        self.num_free -= count;
        let (first, until) = (ids.len(), ids.len() + count as usize);
        while ids.len() < until
            && let Some(id) = self.free_without_content.pop()
        {
            ids.push(id);
        }
        while ids.len() < until && self.blocks.len() < self.num_blocks as usize {
            ids.push(self.num_fresh_from());
            self.blocks.push(Block::owned_by(0));
        }
        while ids.len() < until
            && let Some(place) = self.free_with_content.pop_front()
        {
            if self.is_free(&place) {
                ids.push(place.block);
            } else {
                self.num_void -= 1;
            }
        }
        for taken in ids[first..].chunks(TOGETHER) {
            self.index.warm(taken.iter().filter_map(|&id| self.blocks[id as usize].content));
            for &id in taken {
                self.blocks[id as usize].ref_count = 1;
                if let Some(content) = self.forget(id) {
                    evicted(id, content);
                }
            }
        }
        true
    }

    /// Adds an owner to a block; a free one leaves the free list.
    pub(crate) fn acquire(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        block.ref_count += 1;
        if block.ref_count == 1 {
            block.claims = block.claims.wrapping_add(1);
            self.num_free -= 1;
            self.num_void += 1;
            self.sweep();
        }
    }

    /// Takes one owner from each of a sequence's blocks, given in sequence order. Those that become
    /// free are handed out again tail first: at once without content, as late as possible with one.
    pub(crate) fn release(&mut self, ids: &[BlockId]) {
        for &id in ids {
            let block = &mut self.blocks[id as usize];
            block.ref_count -= 1;
            if block.ref_count == 0 {
                self.num_free += 1;
                if block.content.is_none() {
                    self.free_without_content.push(id);
                }
            }
        }
        for at in 0..ids.len() {
            let id = ids[if seeded_bug!(FreesHeadFirst) { at } else { ids.len() - 1 - at }];
            let block = &self.blocks[id as usize];
            if block.ref_count == 0 && block.content.is_some() {
                self.free_with_content.push_back(Place { block: id, claims: block.claims });
            }
        }
    }

    /// Makes blocks without content, which have an owner, findable.
    pub(crate) fn set_contents(&mut self, ids: &[BlockId], contents: &[BlockHash]) {
        for (ids, contents) in ids.chunks(TOGETHER).zip(contents.chunks(TOGETHER)) {
            self.index.warm(contents.iter().copied());
            for (&id, &content) in ids.iter().zip(contents) {
                self.set_content(id, content);
            }
        }
    }

    fn set_content(&mut self, id: BlockId, content: BlockHash) {
        debug_assert!(self.blocks[id as usize].content.is_none() && self.blocks[id as usize].ref_count > 0);
        let oldest = self.index.find_or_insert(content, id, |id| self.blocks[id as usize].content == Some(content));
        // Alone, it is the oldest and the newest.
        let before = oldest.map_or(id, |oldest| {
            let newest = std::mem::replace(&mut self.blocks[oldest as usize].copies.prev, id);
            self.blocks[newest as usize].copies.next = id;
            newest
        });
        let block = &mut self.blocks[id as usize];
        block.content = Some(content);
        block.copies = Links { prev: before, next: NULL };
        self.num_with_content += 1;
    }

    /// Forgets every content; `false`, changing nothing, while any block has an owner.
    pub(crate) fn reset(&mut self) -> bool {
        if self.num_free != self.num_usable() {
            return false;
        }
        self.index.clear();
        self.num_with_content = 0;
        for block in &mut self.blocks {
            block.content = None;
            block.copies = UNLINKED;
        }
        true
    }

    /// The first id that was never handed out.
    fn num_fresh_from(&self) -> BlockId {
        // Blocks are pushed only while there are fewer than `num_blocks`, a u32.
        self.blocks.len() as BlockId
    }

    /// A block's entry; `None` for one that was never handed out.
    fn known(&self, id: BlockId) -> Option<&Block> {
        assert!(id < self.num_blocks, "block {id} of a pool of {}", self.num_blocks);
        self.blocks.get(id as usize)
    }

    /// Whether a place is that of a free block.
    fn is_free(&self, place: &Place) -> bool {
        self.blocks[place.block as usize].claims == place.claims
    }

    /// Drops the void places when they are more than the others.
    fn sweep(&mut self) {
        const FEW: usize = 64;
        if self.num_void > FEW && self.num_void > self.free_with_content.len() / 2 {
            let blocks = &self.blocks;
            self.free_with_content.retain(|place| blocks[place.block as usize].claims == place.claims);
            self.num_void = 0;
        }
    }

    /// Takes away the content of a block that has an owner.
    pub(crate) fn take_content(&mut self, id: BlockId) -> Option<BlockHash> {
        debug_assert!(self.blocks[id as usize].ref_count > 0);
        self.forget(id)
    }

    fn forget(&mut self, id: BlockId) -> Option<BlockHash> {
        let block = &mut self.blocks[id as usize];
        let content = block.content.take()?;
        let Links { prev, next } = std::mem::replace(&mut block.copies, UNLINKED);
        self.num_with_content -= 1;
        if prev == id {
            self.index.remove(content, id);
            return Some(content);
        }
        // The oldest is the one that no other has as its next, for the newest has none.
        let oldest = self.blocks[prev as usize].copies.next == NULL;
        if oldest {
            self.index.replace(content, id, next);
            self.blocks[next as usize].copies.prev = prev;
        } else {
            self.blocks[prev as usize].copies.next = next;
            match next {
                NULL => {
                    let first = self.index.find(content, |id| self.blocks[id as usize].content == Some(content));
                    let first = first.expect("a content with copies is in the index");
                    self.blocks[first as usize].copies.prev = prev;
                }
                next => self.blocks[next as usize].copies.prev = prev,
            }
        }
        Some(content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_many(pool: &mut BlockPool, count: usize) -> Vec<BlockId> {
        {
            let mut ids = Vec::new();
            assert!(pool.allocate(count as u32, &mut ids, |_, _| ()));
            ids
        }
    }

    /// Takes one block, and tells what it held.
    fn take_one(pool: &mut BlockPool) -> Option<(BlockId, Option<BlockHash>)> {
        let (mut ids, mut evicted) = (Vec::new(), None);
        pool.allocate(1, &mut ids, |id, content| evicted = Some((id, content))).then(|| {
            assert!(evicted.is_none_or(|(id, _)| id == ids[0]));
            (ids[0], evicted.map(|(_, content)| content))
        })
    }

    fn free(pool: &BlockPool) -> Vec<BlockId> {
        let free: Vec<_> = pool.free_queue().collect();
        assert_eq!(free.len(), pool.num_free() as usize);
        free
    }

    #[test]
    fn fresh_blocks_ascend_and_the_null_block_is_never_among_them() {
        let mut pool = BlockPool::new(4);
        assert_eq!((pool.num_usable(), free(&pool)), (3, vec![1, 2, 3]));
        assert_eq!(take_many(&mut pool, 3), [1, 2, 3]);
        assert_eq!((take_one(&mut pool), free(&pool)), (None, vec![]));
    }

    #[test]
    fn case_20_and_21_blocks_without_content_come_back_first_and_both_kinds_tail_first() {
        let mut pool = BlockPool::new(8);
        let a = take_many(&mut pool, 4);
        let b = take_many(&mut pool, 2);
        for (&id, content) in a[..2].iter().chain(&b).zip(10..) {
            pool.set_content(id, BlockHash(content));
        }
        pool.release(&a);
        pool.release(&b);
        assert_eq!(free(&pool), [4, 3, 7, 2, 1, 6, 5]);
        assert_eq!(take_one(&mut pool), Some((4, None)));
        take_many(&mut pool, 2);
        assert_eq!(take_one(&mut pool), Some((2, Some(BlockHash(11)))), "the tail of the sequence freed first");
        assert_eq!(pool.find(BlockHash(11)), None);
        assert_eq!(pool.find(BlockHash(10)), Some(1));
    }

    #[test]
    fn case_25_without_contents_the_free_list_is_last_in_first_out() {
        let mut pool = BlockPool::new(6);
        let (a, b) = (take_many(&mut pool, 2), take_many(&mut pool, 2));
        pool.release(&a);
        pool.release(&b);
        assert_eq!(free(&pool), [4, 3, 2, 1, 5]);
        assert_eq!(take_many(&mut pool, 3), [4, 3, 2]);
    }

    #[test]
    fn case_23_a_found_block_moves_to_the_end_only_when_it_is_released_again() {
        let mut pool = BlockPool::new(5);
        let ids = take_many(&mut pool, 3);
        for &id in &ids {
            pool.set_content(id, BlockHash(u64::from(id)));
        }
        pool.release(&ids);
        assert_eq!(free(&pool), [4, 3, 2, 1]);
        pool.acquire(2);
        pool.acquire(2);
        assert_eq!((free(&pool), pool.ref_count(2)), (vec![4, 3, 1], 2));
        pool.release(&[2]);
        assert_eq!(free(&pool), [4, 3, 1], "one owner is left");
        pool.release(&[2]);
        assert_eq!(free(&pool), [4, 3, 1, 2]);
        // Taken from the end and from the start of the chain.
        pool.acquire(2);
        pool.acquire(3);
        assert_eq!(free(&pool), [4, 1]);
    }

    #[test]
    fn case_18_copies_are_kept_and_the_oldest_is_found() {
        const CONTENT: BlockHash = BlockHash(7);
        let mut pool = BlockPool::new(6);
        let ids = take_many(&mut pool, 5);
        for &id in &ids {
            pool.set_content(id, CONTENT);
        }
        assert_eq!((pool.num_cached_hashes(), pool.num_blocks_with_hash()), (1, 5));
        // One from the middle, the oldest, the newest: the free list's order is the order of eviction.
        let evicted = [3, 1, 5, 4, 2];
        for (&id, found) in evicted.iter().zip([Some(1), Some(2), Some(2), Some(2), None]) {
            pool.release(&[id]);
            assert_eq!(take_one(&mut pool), Some((id, Some(CONTENT))));
            assert_eq!(pool.find(CONTENT), found);
        }
        assert_eq!((pool.num_cached_hashes(), pool.num_blocks_with_hash()), (0, 0));
        pool.set_content(4, CONTENT);
        assert_eq!(pool.find(CONTENT), Some(4));
    }

    #[test]
    fn case_24_reset_needs_every_block_free_and_keeps_their_order() {
        let mut pool = BlockPool::new(4);
        let ids = take_many(&mut pool, 2);
        pool.set_content(1, BlockHash(1));
        pool.release(&[1]);
        assert!(!pool.reset());
        assert_eq!(pool.find(BlockHash(1)), Some(1), "a refused reset changes nothing");
        pool.release(&ids[1..]);
        assert!(pool.reset());
        assert_eq!((free(&pool), pool.find(BlockHash(1)), pool.num_blocks_with_hash()), (vec![2, 3, 1], None, 0));
        assert_eq!(take_many(&mut pool, 3), [2, 3, 1]);
    }

    #[test]
    fn the_largest_pool_costs_only_what_is_used() {
        let mut pool = BlockPool::new(u32::MAX);
        assert_eq!(pool.num_free(), u32::MAX - 1);
        assert_eq!(take_many(&mut pool, 2), [1, 2]);
        assert_eq!((pool.ref_count(u32::MAX - 1), pool.block_hash(u32::MAX - 1)), (0, None));
    }
}
