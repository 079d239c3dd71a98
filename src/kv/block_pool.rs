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

use rustc_hash::FxHashMap;

use crate::kv_event::{BlockHash, BlockId};

use super::pool::KvPool;

/// Block 0, which ends every chain of links.
const NULL: BlockId = 0;

#[derive(Debug, Clone)]
struct Block {
    ref_count: u32,
    content: Option<BlockHash>,
    /// Neighbours in the free list.
    free: Links,
    /// Neighbours among the copies of one content.
    copies: Links,
}

#[derive(Debug, Clone, Copy)]
struct Links {
    prev: BlockId,
    next: BlockId,
}

const UNLINKED: Links = Links { prev: NULL, next: NULL };

/// Both ends of a chain of blocks.
#[derive(Debug, Clone, Copy)]
struct Chain {
    first: BlockId,
    last: BlockId,
}

const EMPTY: Chain = Chain { first: NULL, last: NULL };

/// The pool of one engine.
#[derive(Debug)]
pub(crate) struct BlockPool {
    num_blocks: u32,
    num_free: u32,
    /// The blocks that were handed out at least once, by id; those after them are still fresh.
    blocks: Vec<Block>,
    free_without_content: Chain,
    free_with_content: Chain,
    copies: FxHashMap<BlockHash, Chain>,
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
        let null = Block { ref_count: 1, content: None, free: UNLINKED, copies: UNLINKED };
        Self {
            num_blocks,
            num_free: num_blocks.saturating_sub(1),
            blocks: vec![null],
            free_without_content: EMPTY,
            free_with_content: EMPTY,
            copies: FxHashMap::default(),
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
        self.chain(self.free_without_content).chain(fresh).chain(self.chain(self.free_with_content))
    }

    /// Distinct contents that a look-up can find.
    pub(crate) fn num_cached_hashes(&self) -> usize {
        self.copies.len()
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
        self.copies.get(&content).map(|copies| copies.first)
    }

    /// Hands out the next free block to one owner; with it the content that it held until now.
    pub(crate) fn allocate(&mut self) -> Option<(BlockId, Option<BlockHash>)> {
        let fresh = self.num_fresh_from();
        let id = match (self.free_without_content.first, self.free_with_content.first) {
            (NULL, _) if fresh < self.num_blocks => {
                self.blocks.push(Block { ref_count: 1, content: None, free: UNLINKED, copies: UNLINKED });
                self.num_free -= 1;
                return Some((fresh, None));
            }
            (NULL, NULL) => return None,
            (NULL, id) | (id, _) => id,
        };
        let evicted = self.forget(id);
        self.acquire(id);
        Some((id, evicted))
    }

    /// Adds an owner to a block; a free one leaves the free list.
    pub(crate) fn acquire(&mut self, id: BlockId) {
        if self.blocks[id as usize].ref_count == 0 {
            self.unlink_free(id);
            self.num_free -= 1;
        }
        self.blocks[id as usize].ref_count += 1;
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
                    self.push_free_front(id);
                }
            }
        }
        for &id in ids.iter().rev() {
            let block = &self.blocks[id as usize];
            if block.ref_count == 0 && block.content.is_some() {
                self.push_free_back(id);
            }
        }
    }

    /// Makes a block without content, which has an owner, findable under `content`.
    pub(crate) fn set_content(&mut self, id: BlockId, content: BlockHash) {
        debug_assert!(self.blocks[id as usize].content.is_none() && self.blocks[id as usize].ref_count > 0);
        let copies = self.copies.entry(content).or_insert(Chain { first: id, last: NULL });
        let before = std::mem::replace(&mut copies.last, id);
        if before != NULL {
            self.blocks[before as usize].copies.next = id;
        }
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
        self.copies.clear();
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

    fn chain(&self, chain: Chain) -> impl Iterator<Item = BlockId> + '_ {
        let in_list = |id: BlockId| (id != NULL).then_some(id);
        std::iter::successors(in_list(chain.first), move |&id| in_list(self.blocks[id as usize].free.next))
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
        if prev == NULL && next == NULL {
            self.copies.remove(&content);
            return Some(content);
        }
        let ends = self.copies.get_mut(&content).expect("a content with copies is in the map");
        match prev {
            NULL => ends.first = next,
            prev => self.blocks[prev as usize].copies.next = next,
        }
        match next {
            NULL => ends.last = prev,
            next => self.blocks[next as usize].copies.prev = prev,
        }
        Some(content)
    }

    fn unlink_free(&mut self, id: BlockId) {
        let Links { prev, next } = std::mem::replace(&mut self.blocks[id as usize].free, UNLINKED);
        // An end of a chain is known by what points at it: the two chains share no block.
        match prev {
            NULL if self.free_without_content.first == id => self.free_without_content.first = next,
            NULL => self.free_with_content.first = next,
            prev => self.blocks[prev as usize].free.next = next,
        }
        match next {
            NULL if self.free_without_content.last == id => self.free_without_content.last = prev,
            NULL => self.free_with_content.last = prev,
            next => self.blocks[next as usize].free.prev = prev,
        }
    }

    fn push_free_front(&mut self, id: BlockId) {
        let chain = &mut self.free_without_content;
        let next = std::mem::replace(&mut chain.first, id);
        match next {
            NULL => chain.last = id,
            next => self.blocks[next as usize].free.prev = id,
        }
        self.blocks[id as usize].free = Links { prev: NULL, next };
    }

    fn push_free_back(&mut self, id: BlockId) {
        let chain = &mut self.free_with_content;
        let prev = std::mem::replace(&mut chain.last, id);
        match prev {
            NULL => chain.first = id,
            prev => self.blocks[prev as usize].free.next = id,
        }
        self.blocks[id as usize].free = Links { prev, next: NULL };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &mut BlockPool, count: usize) -> Vec<BlockId> {
        (0..count).map(|_| pool.allocate().expect("a free block").0).collect()
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
        assert_eq!(take(&mut pool, 3), [1, 2, 3]);
        assert_eq!((pool.allocate(), free(&pool)), (None, vec![]));
    }

    #[test]
    fn case_20_and_21_blocks_without_content_come_back_first_and_both_kinds_tail_first() {
        let mut pool = BlockPool::new(8);
        let a = take(&mut pool, 4);
        let b = take(&mut pool, 2);
        for (&id, content) in a[..2].iter().chain(&b).zip(10..) {
            pool.set_content(id, BlockHash(content));
        }
        pool.release(&a);
        pool.release(&b);
        assert_eq!(free(&pool), [4, 3, 7, 2, 1, 6, 5]);
        assert_eq!(pool.allocate(), Some((4, None)));
        take(&mut pool, 2);
        assert_eq!(pool.allocate(), Some((2, Some(BlockHash(11)))), "the tail of the sequence freed first");
        assert_eq!(pool.find(BlockHash(11)), None);
        assert_eq!(pool.find(BlockHash(10)), Some(1));
    }

    #[test]
    fn case_25_without_contents_the_free_list_is_last_in_first_out() {
        let mut pool = BlockPool::new(6);
        let (a, b) = (take(&mut pool, 2), take(&mut pool, 2));
        pool.release(&a);
        pool.release(&b);
        assert_eq!(free(&pool), [4, 3, 2, 1, 5]);
        assert_eq!(take(&mut pool, 3), [4, 3, 2]);
    }

    #[test]
    fn case_23_a_found_block_moves_to_the_end_only_when_it_is_released_again() {
        let mut pool = BlockPool::new(5);
        let ids = take(&mut pool, 3);
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
        let ids = take(&mut pool, 5);
        for &id in &ids {
            pool.set_content(id, CONTENT);
        }
        assert_eq!((pool.num_cached_hashes(), pool.num_blocks_with_hash()), (1, 5));
        // One from the middle, the oldest, the newest: the free list's order is the order of eviction.
        let evicted = [3, 1, 5, 4, 2];
        for (&id, found) in evicted.iter().zip([Some(1), Some(2), Some(2), Some(2), None]) {
            pool.release(&[id]);
            assert_eq!(pool.allocate(), Some((id, Some(CONTENT))));
            assert_eq!(pool.find(CONTENT), found);
        }
        assert_eq!((pool.num_cached_hashes(), pool.num_blocks_with_hash()), (0, 0));
        pool.set_content(4, CONTENT);
        assert_eq!(pool.find(CONTENT), Some(4));
    }

    #[test]
    fn case_24_reset_needs_every_block_free_and_keeps_their_order() {
        let mut pool = BlockPool::new(4);
        let ids = take(&mut pool, 2);
        pool.set_content(1, BlockHash(1));
        pool.release(&[1]);
        assert!(!pool.reset());
        assert_eq!(pool.find(BlockHash(1)), Some(1), "a refused reset changes nothing");
        pool.release(&ids[1..]);
        assert!(pool.reset());
        assert_eq!((free(&pool), pool.find(BlockHash(1)), pool.num_blocks_with_hash()), (vec![2, 3, 1], None, 0));
        assert_eq!(take(&mut pool, 3), [2, 3, 1]);
    }

    #[test]
    fn the_largest_pool_costs_only_what_is_used() {
        let mut pool = BlockPool::new(u32::MAX);
        assert_eq!(pool.num_free(), u32::MAX - 1);
        assert_eq!(take(&mut pool, 2), [1, 2]);
        assert_eq!((pool.ref_count(u32::MAX - 1), pool.block_hash(u32::MAX - 1)), (0, None));
    }
}
