//! The pages of SGLang's KV pool: a free list, and nothing about their content.

use std::collections::VecDeque;

use crate::kv_event::BlockId;

/// The free pages. Page 0 is padding and never handed out.
///
/// Pages that were never handed out need no memory. SGLang's token pool (pages of one token) puts freed
/// slots behind those, its paged pool before them.
#[derive(Debug)]
pub(crate) struct PagePool {
    num_pages: u32,
    num_fresh: u32,
    freed: VecDeque<BlockId>,
    freed_first: bool,
}

impl PagePool {
    /// A pool of `num_pages` pages of `page_size` tokens.
    pub(crate) fn new(num_pages: u32, page_size: u32) -> Self {
        Self { num_pages, num_fresh: num_pages, freed: VecDeque::new(), freed_first: page_size > 1 }
    }

    /// All pages.
    pub(crate) fn num_pages(&self) -> u32 {
        self.num_pages
    }

    /// Pages that can be handed out now.
    pub(crate) fn num_free(&self) -> u32 {
        // At most `num_pages` are freed.
        self.num_fresh + self.freed.len() as u32
    }

    /// The free pages, next to be handed out first.
    pub(crate) fn free_queue(&self) -> impl Iterator<Item = BlockId> + '_ {
        let fresh = self.next_fresh()..=self.num_pages;
        let (before, behind) = if self.freed_first { (Some(&self.freed), None) } else { (None, Some(&self.freed)) };
        before.into_iter().flatten().copied().chain(fresh).chain(behind.into_iter().flatten().copied())
    }

    /// Hands out the next free page.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        if self.num_fresh > 0 && (!self.freed_first || self.freed.is_empty()) {
            self.num_fresh -= 1;
            return Some(self.num_pages - self.num_fresh);
        }
        self.freed.pop_front()
    }

    /// Takes pages back, which keep their order.
    pub(crate) fn free(&mut self, pages: &[BlockId]) {
        if self.freed_first {
            pages.iter().rev().for_each(|&page| self.freed.push_front(page));
        } else {
            self.freed.extend(pages);
        }
    }

    /// Takes all pages back.
    pub(crate) fn reset(&mut self) {
        self.freed.clear();
        self.num_fresh = self.num_pages;
    }

    fn next_fresh(&self) -> BlockId {
        self.num_pages - self.num_fresh + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &mut PagePool, count: u32) -> Vec<BlockId> {
        (0..count).map(|_| pool.allocate().expect("a free page")).collect()
    }

    fn free(pool: &PagePool) -> Vec<BlockId> {
        let free: Vec<_> = pool.free_queue().collect();
        assert_eq!(free.len(), pool.num_free() as usize);
        free
    }

    #[test]
    fn slots_come_back_behind_the_fresh_ones_and_pages_before_them() {
        for (page_size, expected) in [(1, vec![4, 5, 1, 2]), (16, vec![1, 2, 4, 5])] {
            let mut pool = PagePool::new(5, page_size);
            assert_eq!(take(&mut pool, 3), [1, 2, 3]);
            pool.free(&[1, 2]);
            assert_eq!(free(&pool), expected);
            assert_eq!(take(&mut pool, 4), expected);
            assert_eq!(pool.allocate(), None);
            pool.free(&[3]);
            pool.reset();
            assert_eq!(free(&pool), [1, 2, 3, 4, 5]);
        }
    }

    #[test]
    fn the_largest_pool_costs_only_what_is_used() {
        let mut pool = PagePool::new(u32::MAX, 1);
        assert_eq!(take(&mut pool, 2), [1, 2]);
        assert_eq!(pool.num_free(), u32::MAX - 2);
    }
}
