//! The model's prefix tree and page pool: a list of nodes that each spell out the whole prefix they end, and a list
//! of the prefixes in use. Everything is found by looking at all of them.

use std::cmp::Reverse;
use std::ops::Range;

use standin::RadixEvictionPolicy;

/// A prompt or a part of one, and the namespace that it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(crate) namespace: Option<&'static str>,
    pub(crate) tokens: Vec<u32>,
}

impl Prefix {
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn cut(&self, len: usize) -> Self {
        Self { namespace: self.namespace, tokens: self.tokens[..len].to_vec() }
    }

    fn starts_with(&self, other: &Self) -> bool {
        self.namespace == other.namespace && self.tokens.starts_with(&other.tokens)
    }
}

#[derive(Debug, Clone)]
struct Node {
    /// From the root to its end.
    prefix: Prefix,
    /// Where its own tokens begin.
    start: usize,
    pages: Vec<u32>,
    accessed: u64,
    created: u64,
    hits: u32,
    priority: i64,
}

#[derive(Debug)]
pub(crate) struct Tree {
    page_size: usize,
    policy: RadixEvictionPolicy,
    nodes: Vec<Node>,
    /// The prefixes in use, one for each use; each ends where a node does.
    locks: Vec<Prefix>,
    num_pages: u32,
    /// Next to be handed out first.
    pub(crate) free: Vec<u32>,
    ticks: u64,
}

impl Tree {
    pub(crate) fn new(page_size: usize, num_pages: u32, policy: RadixEvictionPolicy) -> Self {
        let (nodes, locks) = (Vec::new(), Vec::new());
        Self { page_size, policy, nodes, locks, num_pages, free: (1..=num_pages).collect(), ticks: 0 }
    }

    pub(crate) fn available(&self) -> usize {
        self.free.len() * self.page_size
    }

    pub(crate) fn evictable(&self) -> usize {
        self.nodes.iter().filter(|node| self.count_locks(node) == 0).map(|node| node.prefix.len() - node.start).sum()
    }

    pub(crate) fn protected(&self) -> usize {
        self.nodes.iter().filter(|node| self.count_locks(node) > 0).map(|node| node.prefix.len() - node.start).sum()
    }

    /// Each stored page, the prefix that ends with it, and how many use it.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u32, Prefix, u32)> + '_ {
        self.nodes.iter().flat_map(|node| {
            let end = |index: usize| node.start + (index + 1) * self.page_size;
            let locks = self.count_locks(node);
            node.pages.iter().enumerate().map(move |(index, &page)| (page, node.prefix.cut(end(index)), locks))
        })
    }

    fn count_locks(&self, node: &Node) -> u32 {
        self.locks.iter().filter(|lock| lock.starts_with(&node.prefix)).count() as u32
    }

    /// The length of the longest stored prefix in whole pages; looking is an access to it, and it ends a node.
    pub(crate) fn look_up(&mut self, wanted: &Prefix) -> usize {
        let mut found = 0;
        while let Some((index, common)) = self.child(wanted, found) {
            found += common;
            if self.cut(index, common) {
                break;
            }
        }
        for index in self.path(&wanted.cut(found)) {
            self.touch(index);
        }
        found
    }

    /// The node that goes on with `wanted` after `start` tokens, and how many of its tokens agree; some whole page.
    fn child(&self, wanted: &Prefix, start: usize) -> Option<(usize, usize)> {
        let agreeing = |node: &Node| {
            if node.start != start || !wanted.starts_with(&node.prefix.cut(start)) {
                return 0;
            }
            let pairs = node.prefix.tokens[start..].iter().zip(&wanted.tokens[start..]);
            pairs.take_while(|(a, b)| a == b).count() / self.page_size * self.page_size
        };
        let mut found = self.nodes.iter().map(agreeing).enumerate().filter(|&(_, common)| common > 0);
        found.next()
    }

    /// The nodes on the way to a prefix, from the root.
    fn path(&self, prefix: &Prefix) -> Vec<usize> {
        let mut path: Vec<usize> =
            (0..self.nodes.len()).filter(|&index| prefix.starts_with(&self.nodes[index].prefix)).collect();
        path.sort_by_key(|&index| self.nodes[index].start);
        path
    }

    fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }

    fn touch(&mut self, index: usize) {
        self.nodes[index].accessed = self.tick();
    }

    /// Makes the first `len` tokens of a node one of their own, if there are more: it keeps the index. The rest
    /// counts as accessed after it.
    fn cut(&mut self, index: usize, len: usize) -> bool {
        let start = self.nodes[index].start;
        let whole = start + len == self.nodes[index].prefix.len();
        if !whole {
            let mut rest = self.nodes[index].clone();
            rest.start += len;
            rest.pages.drain(..len / self.page_size);
            self.touch(index);
            rest.accessed = self.tick();
            let head = &mut self.nodes[index];
            head.prefix.tokens.truncate(start + len);
            head.pages.truncate(len / self.page_size);
            self.nodes.push(rest);
        }
        !whole
    }

    pub(crate) fn lock(&mut self, prefix: Prefix) {
        self.locks.extend((prefix.len() > 0).then_some(prefix));
    }

    pub(crate) fn unlock(&mut self, prefix: &Prefix) {
        if prefix.len() > 0 {
            let position = self.locks.iter().position(|lock| lock == prefix).expect("what was locked");
            self.locks.remove(position);
        }
    }

    /// Pages of a stored prefix.
    pub(crate) fn pages_of(&self, prefix: &Prefix) -> Vec<u32> {
        self.path(prefix).into_iter().flat_map(|index| self.nodes[index].pages.clone()).collect()
    }

    /// Enters the pages of a prefix that is locked up to the start of `of_own`; up to its end the sequence has entered
    /// it before. Where the tree has a page already, it takes the place of the sequence's own, which is free then.
    pub(crate) fn enter(&mut self, prefix: &Prefix, of_own: Range<usize>, priority: i64, pages: &mut [u32]) {
        let (held, counted) = (of_own.start, of_own.end);
        for index in self.path(&prefix.cut(held)) {
            self.touch(index);
            self.count(index, self.nodes[index].prefix.len() > counted, priority);
        }
        let (mut done, mut freed) = (held, Vec::new());
        while let Some((index, common)) = self.child(prefix, done) {
            self.touch(index);
            self.cut(index, common);
            let own = &mut pages[done / self.page_size..(done + common) / self.page_size];
            freed.extend_from_slice(own);
            own.copy_from_slice(&self.nodes[index].pages);
            done += common;
            self.count(index, done > counted, priority);
        }
        if done < prefix.len() {
            let node = Node {
                prefix: prefix.clone(),
                start: done,
                pages: pages[done / self.page_size..prefix.len() / self.page_size].to_vec(),
                accessed: self.tick(),
                created: self.tick(),
                hits: u32::from(prefix.len() > counted),
                priority,
            };
            self.nodes.push(node);
        }
        self.free(&freed);
    }

    /// Counts as an access to a prefix, and makes a node end there.
    pub(crate) fn end_node_at(&mut self, prefix: &Prefix, priority: i64) {
        let mut done = 0;
        while let Some((index, common)) = self.child(prefix, done) {
            self.touch(index);
            self.cut(index, common);
            self.count(index, false, priority);
            done += common;
        }
    }

    fn count(&mut self, index: usize, stored: bool, priority: i64) {
        let node = &mut self.nodes[index];
        node.hits += u32::from(stored);
        node.priority = node.priority.max(priority);
    }

    /// Takes pages back: freed slots of the token pool go last, freed pages of a paged pool first.
    pub(crate) fn free(&mut self, pages: &[u32]) {
        let at = if self.page_size > 1 { 0 } else { self.free.len() };
        self.free.splice(at..at, pages.iter().copied());
    }

    /// Evicts leaves that nobody uses until so many pages are free; `false` if there are not enough.
    pub(crate) fn make_room(&mut self, pages: usize) -> bool {
        while self.free.len() < pages {
            let is_leaf = |node: &Node| {
                !self
                    .nodes
                    .iter()
                    .any(|other| other.start == node.prefix.len() && other.prefix.starts_with(&node.prefix))
            };
            let unused = (0..self.nodes.len())
                .filter(|&index| is_leaf(&self.nodes[index]) && self.count_locks(&self.nodes[index]) == 0);
            let Some(victim) = unused.min_by_key(|&index| self.rank(&self.nodes[index])) else { return false };
            let victim = self.nodes.remove(victim);
            self.free(&victim.pages);
        }
        true
    }

    pub(crate) fn make_room_for_tokens(&mut self, tokens: usize) {
        self.make_room(tokens.div_ceil(self.page_size));
    }

    /// Smallest first.
    fn rank(&self, node: &Node) -> (i64, Reverse<u64>, u64) {
        const NONE: Reverse<u64> = Reverse(0);
        match self.policy {
            RadixEvictionPolicy::Lru => (0, NONE, node.accessed),
            RadixEvictionPolicy::Mru => (0, Reverse(node.accessed), 0),
            RadixEvictionPolicy::Fifo => (node.created as i64, NONE, node.accessed),
            RadixEvictionPolicy::Filo => (0, Reverse(node.created), node.accessed),
            RadixEvictionPolicy::Lfu => (i64::from(node.hits), NONE, node.accessed),
            RadixEvictionPolicy::Slru => (i64::from(node.hits > 1), NONE, node.accessed),
            RadixEvictionPolicy::Priority => (node.priority, NONE, node.accessed),
        }
    }

    /// Hands out pages.
    pub(crate) fn allocate(&mut self, count: usize) -> Vec<u32> {
        self.free.drain(..count).collect()
    }

    pub(crate) fn reset(&mut self) {
        assert!(self.locks.is_empty(), "nobody may use a prefix");
        self.nodes.clear();
        self.free = (1..=self.num_pages).collect();
    }
}
