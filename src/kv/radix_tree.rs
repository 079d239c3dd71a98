//! A radix tree over the tokens in the KV cache, page by page: SGLang's prefix cache.
//!
//! Invariants:
//! 1. A node's tokens are whole pages, at least one; siblings differ in their first page.
//! 2. A lock on a node locks every node above it, so `locks` never grows downwards.
//! 3. `victims` holds exactly the nodes that are unlocked and have no child, by the eviction policy's rank.
//! 4. Recency is a counter, one tick per access, never the clock; along a path deeper nodes are younger.
//! 5. Nothing here reads the number of nodes or of pages: a look-up costs the tokens that it matches.
//!
//! Prompts of different namespaces (LoRA adapter, cache salt) hang under different roots. A root holds no
//! tokens; it lives as long as it has children, so that salts made up per request do not pile up.

mod depth_first;

use std::collections::BTreeSet;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::config::RadixEvictionPolicy;
use crate::kv_event::{BlockHash, BlockId};
use crate::seeded_bug::seeded_bug;

use super::cache::BlockContent;

/// What keeps prefixes apart though their tokens are equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Namespace {
    pub(crate) lora_name: Option<Arc<str>>,
    pub(crate) cache_salt: Option<Arc<str>>,
}

/// A node, by its slot. Good while the node is locked, or until the next eviction.
pub(crate) type NodeId = u32;

/// Place of a node in the order of eviction, the smallest first.
type Rank = (i64, i64);

/// A node is stored this often to count as protected in segmented LRU (SGLang's default).
const SLRU_PROTECTED_HITS: u32 = 2;

#[derive(Debug)]
struct Node {
    /// `None` for the root of a namespace.
    parent: Option<NodeId>,
    /// By the first page of their tokens.
    children: FxHashMap<Box<[u32]>, NodeId>,
    tokens: Vec<u32>,
    pages: Vec<BlockId>,
    /// One per page, if KV events are recorded.
    hashes: Vec<BlockHash>,
    /// Sequences that use it.
    locks: u32,
    accessed: i64,
    created: i64,
    /// How often its tokens were stored.
    hits: u32,
    priority: i64,
    /// Its entry in `victims`.
    queued: Option<Rank>,
}

impl Node {
    fn rank(&self, policy: RadixEvictionPolicy) -> Rank {
        match policy {
            RadixEvictionPolicy::Lru if seeded_bug!(EvictsTheYoungest) => (-self.accessed, 0),
            RadixEvictionPolicy::Lru => (self.accessed, 0),
            RadixEvictionPolicy::Lfu => (i64::from(self.hits), self.accessed),
            RadixEvictionPolicy::Fifo => (self.created, self.accessed),
            RadixEvictionPolicy::Mru => (-self.accessed, 0),
            RadixEvictionPolicy::Filo => (-self.created, self.accessed),
            RadixEvictionPolicy::Priority => (self.priority, self.accessed),
            RadixEvictionPolicy::Slru => (i64::from(self.hits >= SLRU_PROTECTED_HITS), self.accessed),
        }
    }

    fn num_tokens(&self) -> u32 {
        // Its pages are part of a pool whose tokens are counted in a u32.
        self.tokens.len() as u32
    }
}

/// The longest stored prefix of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Match {
    /// Its length.
    pub(crate) tokens: u32,
    /// Where it ends; `None` if it is empty.
    pub(crate) node: Option<NodeId>,
}

/// What a sequence enters: the whole pages behind the prefix that it holds already.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) namespace: &'a Namespace,
    /// The prefix that it has locked.
    pub(crate) held: Match,
    /// The tokens behind it.
    pub(crate) tokens: &'a [u32],
    /// Their pages. Where the tree has the tokens already they are replaced by the tree's.
    pub(crate) pages: &'a mut [BlockId],
    /// Tokens, from the start, that the same sequence has entered before.
    pub(crate) counted: u32,
    pub(crate) priority: i64,
}

/// Where a sequence's tokens are after they were entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entered {
    /// The node where they end; `None` for none.
    pub(crate) node: Option<NodeId>,
    /// The node that was made for what was not there yet.
    pub(crate) new: Option<NodeId>,
}

/// A node that was evicted.
#[derive(Debug)]
pub(crate) struct Evicted {
    pub(crate) pages: Vec<BlockId>,
    pub(crate) hashes: Vec<BlockHash>,
}

/// The tree.
#[derive(Debug)]
pub(crate) struct RadixTree {
    page_size: usize,
    policy: RadixEvictionPolicy,
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    roots: FxHashMap<Namespace, NodeId>,
    namespaces: FxHashMap<NodeId, Namespace>,
    victims: BTreeSet<(Rank, NodeId)>,
    ticks: i64,
    evictable_tokens: u64,
    protected_tokens: u64,
    /// Tokens of the sequence that is looked up.
    tokens: Vec<u32>,
    /// A path, from below a root.
    path: Vec<NodeId>,
}

impl RadixTree {
    /// An empty tree of pages of `page_size` tokens, at least 1.
    pub(crate) fn new(page_size: u32, policy: RadixEvictionPolicy) -> Self {
        Self {
            page_size: page_size as usize,
            policy,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: FxHashMap::default(),
            namespaces: FxHashMap::default(),
            victims: BTreeSet::new(),
            ticks: 0,
            evictable_tokens: 0,
            protected_tokens: 0,
            tokens: Vec::new(),
            path: Vec::new(),
        }
    }

    /// Tokens that nobody uses.
    pub(crate) fn evictable_tokens(&self) -> u64 {
        self.evictable_tokens
    }

    /// Tokens that somebody uses.
    pub(crate) fn protected_tokens(&self) -> u64 {
        self.protected_tokens
    }

    /// Looks for the longest stored prefix of at most `limit` tokens, in whole pages, and counts as an
    /// access to it. Where it ends within a node that node is split.
    pub(crate) fn match_prefix(&mut self, namespace: &Namespace, content: &impl BlockContent, limit: u32) -> Match {
        let limit = limit as usize / self.page_size * self.page_size;
        let Some(&root) = self.roots.get(namespace) else { return Match::default() };
        let mut tokens = std::mem::take(&mut self.tokens);
        let (mut node, mut matched) = (root, 0);
        while matched < limit {
            tokens.resize(self.page_size, 0);
            content.fill(matched, &mut tokens);
            let Some(&child) = self.nodes[node as usize].children.get(tokens.as_slice()) else { break };
            let stored = &self.nodes[child as usize].tokens;
            tokens.resize(stored.len().min(limit - matched), 0);
            content.fill(matched, &mut tokens);
            let common = self.common_pages(stored, &tokens);
            matched += common;
            if common < stored.len() {
                node = self.split(child, common);
                break;
            }
            node = child;
        }
        self.tokens = tokens;
        if matched == 0 {
            return Match::default();
        }
        self.find_path(Some(node));
        for index in 0..self.path.len() {
            self.touch(self.path[index]);
        }
        // At most `limit`, a u32.
        Match { tokens: matched as u32, node: Some(node) }
    }

    /// The pages of the path that ends at a node, from its start.
    pub(crate) fn pages_to(&mut self, node: Option<NodeId>, pages: &mut Vec<BlockId>) {
        self.find_path(node);
        for &id in &self.path {
            pages.extend_from_slice(&self.nodes[id as usize].pages);
        }
    }

    /// Keeps a node and all above it from being evicted; one lock per use.
    pub(crate) fn lock(&mut self, node: Option<NodeId>) {
        let mut next = node;
        while let Some(id) = next {
            let node = &mut self.nodes[id as usize];
            next = node.parent;
            if node.parent.is_some() && node.locks == 0 {
                let tokens = u64::from(node.num_tokens());
                self.evictable_tokens -= tokens;
                self.protected_tokens += tokens;
            }
            self.nodes[id as usize].locks += 1;
            self.requeue(id);
        }
    }

    /// Takes one lock back.
    pub(crate) fn unlock(&mut self, node: Option<NodeId>) {
        let mut next = node;
        while let Some(id) = next {
            let node = &mut self.nodes[id as usize];
            next = node.parent;
            node.locks -= 1;
            if node.parent.is_some() && node.locks == 0 {
                let tokens = u64::from(node.num_tokens());
                self.evictable_tokens += tokens;
                self.protected_tokens -= tokens;
            }
            self.requeue(id);
        }
    }

    /// Enters tokens. Pages whose tokens are there already are not needed any more: they are added to
    /// `duplicates`.
    pub(crate) fn insert(&mut self, entry: Entry<'_>, duplicates: &mut Vec<BlockId>) -> Entered {
        let Entry { namespace, held, tokens, pages, counted, priority } = entry;
        self.access_held(held, counted, priority);
        if tokens.is_empty() {
            return Entered { node: held.node, new: None };
        }
        let mut node = held.node.unwrap_or_else(|| self.root(namespace));
        let mut done = 0;
        while done < tokens.len() {
            let first_page = &tokens[done..done + self.page_size];
            let Some(&child) = self.nodes[node as usize].children.get(first_page) else { break };
            self.touch(child);
            let stored = &self.nodes[child as usize].tokens;
            let common = self.common_pages(stored, &tokens[done..]);
            node = if common < stored.len() { self.split(child, common) } else { child };
            let own = &mut pages[done / self.page_size..(done + common) / self.page_size];
            duplicates.extend_from_slice(own);
            own.copy_from_slice(&self.nodes[node as usize].pages);
            done += common;
            self.count(node, held.tokens as usize + done > counted as usize, priority);
        }
        if done == tokens.len() {
            return Entered { node: Some(node), new: None };
        }
        let new = self.add_leaf(node, &tokens[done..], &pages[done / self.page_size..]);
        self.count(new, held.tokens as usize + tokens.len() > counted as usize, priority);
        Entered { node: Some(new), new: Some(new) }
    }

    /// Counts as an access to the first `tokens` tokens of the path that ends at `node`, and makes them
    /// end at a node of their own: what is behind them can then be evicted alone.
    pub(crate) fn split_path(&mut self, node: Option<NodeId>, tokens: u32, priority: i64) {
        self.find_path(node);
        let mut rest = tokens as usize;
        for index in 0..self.path.len() {
            if rest == 0 {
                break;
            }
            let id = self.path[index];
            self.touch(id);
            let length = self.nodes[id as usize].tokens.len();
            let head = if rest < length { self.split(id, rest) } else { id };
            self.count(head, false, priority);
            rest = rest.saturating_sub(length);
        }
    }

    /// Evicts the unlocked leaf that the policy puts first; its parent may be the next.
    pub(crate) fn evict(&mut self) -> Option<Evicted> {
        let (_, id) = self.victims.pop_first()?;
        let node = &mut self.nodes[id as usize];
        node.queued = None;
        let parent = node.parent.take();
        let (tokens, pages) = (std::mem::take(&mut node.tokens), std::mem::take(&mut node.pages));
        let hashes = std::mem::take(&mut node.hashes);
        self.evictable_tokens -= tokens.len() as u64;
        self.vacant.push(id);
        if let Some(parent) = parent {
            self.nodes[parent as usize].children.remove(&tokens[..self.page_size]);
            self.drop_empty_root(parent);
            self.requeue(parent);
        }
        Some(Evicted { pages, hashes })
    }

    /// Forgets everything. Nothing may be locked.
    pub(crate) fn clear(&mut self) {
        debug_assert_eq!(self.protected_tokens, 0);
        self.nodes.clear();
        self.vacant.clear();
        self.roots.clear();
        self.namespaces.clear();
        self.victims.clear();
        self.evictable_tokens = 0;
    }

    /// The namespace of a node, the hash just before it, and its tokens: what its own hashes follow from.
    pub(crate) fn unhashed(&self, node: NodeId) -> (Option<&Namespace>, Option<BlockHash>, &[u32]) {
        let this = &self.nodes[node as usize];
        let parent = this.parent.unwrap_or(node);
        let before = self.nodes[parent as usize].hashes.last().copied();
        (self.namespaces.get(&parent), before, &this.tokens)
    }

    /// Gives a node the hashes of its pages.
    pub(crate) fn set_hashes(&mut self, node: NodeId, hashes: Vec<BlockHash>) {
        self.nodes[node as usize].hashes = hashes;
    }

    /// A node's pages, hashes and locks.
    pub(crate) fn node(&self, node: NodeId) -> (&[BlockId], &[BlockHash], u32) {
        let node = &self.nodes[node as usize];
        (&node.pages, &node.hashes, node.locks)
    }

    /// All nodes, those above before those below.
    pub(crate) fn top_down(&self) -> Vec<NodeId> {
        let children = |id: NodeId| {
            let mut children: Vec<NodeId> = self.nodes[id as usize].children.values().copied().collect();
            children.sort_by_key(|&child| self.nodes[child as usize].created);
            children
        };
        let mut roots: Vec<NodeId> = self.namespaces.keys().copied().collect();
        roots.sort_unstable();
        let mut order: Vec<NodeId> = roots.into_iter().flat_map(children).collect();
        let mut index = 0;
        while index < order.len() {
            order.extend(children(order[index]));
            index += 1;
        }
        order
    }

    fn common_pages(&self, a: &[u32], b: &[u32]) -> usize {
        let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        common / self.page_size * self.page_size
    }

    fn tick(&mut self) -> i64 {
        self.ticks += 1;
        self.ticks
    }

    fn touch(&mut self, id: NodeId) {
        self.nodes[id as usize].accessed = self.tick();
        self.requeue(id);
    }

    fn count(&mut self, id: NodeId, stored: bool, priority: i64) {
        let node = &mut self.nodes[id as usize];
        node.hits += u32::from(stored);
        node.priority = node.priority.max(priority);
        self.requeue(id);
    }

    /// Counts an access to the prefix that a sequence holds, and the storing of what it did not store itself.
    fn access_held(&mut self, held: Match, counted: u32, priority: i64) {
        self.find_path(held.node);
        let mut end = 0;
        for index in 0..self.path.len() {
            let id = self.path[index];
            end += self.nodes[id as usize].num_tokens();
            self.touch(id);
            self.count(id, end > counted, priority);
        }
        debug_assert_eq!(end, held.tokens);
    }

    /// Fills `path` with the nodes down to `node`, without the root.
    fn find_path(&mut self, node: Option<NodeId>) {
        self.path.clear();
        let mut next = node;
        while let Some(id) = next {
            next = self.nodes[id as usize].parent;
            if next.is_some() {
                self.path.push(id);
            }
        }
        self.path.reverse();
    }

    /// Brings a node's entry among the victims up to date.
    fn requeue(&mut self, id: NodeId) {
        let node = &mut self.nodes[id as usize];
        let is_victim = node.parent.is_some() && node.locks == 0 && node.children.is_empty();
        let rank = is_victim.then(|| node.rank(self.policy));
        let before = std::mem::replace(&mut node.queued, rank);
        if before == rank {
            return;
        }
        if let Some(before) = before {
            self.victims.remove(&(before, id));
        }
        if let Some(rank) = rank {
            self.victims.insert((rank, id));
        }
    }

    fn root(&mut self, namespace: &Namespace) -> NodeId {
        if let Some(&root) = self.roots.get(namespace) {
            return root;
        }
        let root = self.new_node(None, Vec::new(), Vec::new());
        self.roots.insert(namespace.clone(), root);
        self.namespaces.insert(root, namespace.clone());
        root
    }

    fn drop_empty_root(&mut self, id: NodeId) {
        let node = &self.nodes[id as usize];
        if node.parent.is_none() && node.children.is_empty() {
            if let Some(namespace) = self.namespaces.remove(&id) {
                self.roots.remove(&namespace);
            }
            self.vacant.push(id);
        }
    }

    fn add_leaf(&mut self, parent: NodeId, tokens: &[u32], pages: &[BlockId]) -> NodeId {
        let leaf = self.new_node(Some(parent), tokens.to_vec(), pages.to_vec());
        self.nodes[parent as usize].children.insert(tokens[..self.page_size].into(), leaf);
        self.evictable_tokens += tokens.len() as u64;
        self.requeue(leaf);
        self.requeue(parent);
        leaf
    }

    /// Puts a node of a child's first `at` tokens above that child. Both count as accessed, the child last.
    fn split(&mut self, child: NodeId, at: usize) -> NodeId {
        let node = &mut self.nodes[child as usize];
        let parent = node.parent;
        let (locks, created, hits, priority) = (node.locks, node.created, node.hits, node.priority);
        let rest = node.tokens.split_off(at);
        let tokens = std::mem::replace(&mut node.tokens, rest);
        let rest = node.pages.split_off(at / self.page_size);
        let pages = std::mem::replace(&mut node.pages, rest);
        let rest = node.hashes.split_off((at / self.page_size).min(node.hashes.len()));
        let hashes = std::mem::replace(&mut node.hashes, rest);

        let head = self.new_node(parent, tokens, pages);
        let below = self.nodes[child as usize].tokens[..self.page_size].into();
        let node = &mut self.nodes[head as usize];
        (node.locks, node.created, node.hits, node.priority, node.hashes) = (locks, created, hits, priority, hashes);
        node.hits *= u32::from(!seeded_bug!(SplitForgetsHits));
        node.children.insert(below, child);
        let first_page: Box<[u32]> = node.tokens[..self.page_size].into();
        if let Some(parent) = parent {
            self.nodes[parent as usize].children.insert(first_page, head);
        }
        self.nodes[child as usize].parent = Some(head);
        self.touch(child);
        head
    }

    fn new_node(&mut self, parent: Option<NodeId>, tokens: Vec<u32>, pages: Vec<BlockId>) -> NodeId {
        let (accessed, created) = (self.tick(), self.tick());
        let node = Node {
            parent,
            children: FxHashMap::default(),
            tokens,
            pages,
            hashes: Vec::new(),
            locks: 0,
            accessed,
            created,
            hits: 0,
            priority: i64::MIN,
            queued: None,
        };
        if let Some(id) = self.vacant.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        self.nodes.push(node);
        // Every node holds a page of the pool, whose pages are counted in a u32; roots die with their children.
        (self.nodes.len() - 1) as NodeId
    }
}

#[cfg(test)]
mod radix_tree_test;
