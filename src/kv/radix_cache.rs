//! SGLang's KV cache: pages for sequences, prefixes found again in a radix tree, and the events of both.
//!
//! Every page is in exactly one place: free, in the tree, or held by one sequence alone. A sequence holds
//! the pages of its stored prefix through a lock on the tree node where that prefix ends; what it computes
//! behind it is its own until it is stored.

use crate::config::SglangConfig;
use crate::kv_event::{BlockExtraKeys, BlockHash, BlockId, KvEvent};
use crate::request::SequenceId;
use crate::seeded_bug::seeded_bug;

use super::block_hash::BlockHasher;
use super::cache::{BlockContent, HeldBlocks};
use super::page_pool::PagePool;
use super::pool::KvPool;
use super::radix_tree::{Entry, Match, Namespace, NodeId, RadixTree};

/// The KV pages of one sequence.
#[derive(Debug, Default)]
pub(crate) struct SequencePages {
    /// In sequence order.
    ids: Vec<BlockId>,
    /// The prefix that is in the tree, locked there.
    stored: Match,
    /// Tokens that it has stored itself, counted from its start.
    counted: u32,
}

impl SequencePages {
    /// How many there are; at most as many as the pool has, a u32.
    pub(crate) fn len(&self) -> u32 {
        self.ids.len() as u32
    }
}

impl HeldBlocks for SequencePages {
    fn ids(&self) -> &[BlockId] {
        &self.ids
    }
}

/// What a sequence has computed and now stores.
#[derive(Debug)]
pub(crate) struct Computed<'a, C> {
    pub(crate) content: &'a C,
    /// Its first tokens, prompt and output as one, whose KV is present.
    pub(crate) tokens: u32,
    /// How many of all its tokens are the prompt's.
    pub(crate) prompt_tokens: u32,
    pub(crate) priority: i32,
    pub(crate) owner: SequenceId,
}

/// Page pool, prefix tree and KV events of one engine.
#[derive(Debug)]
pub(crate) struct RadixCache {
    page_size: u32,
    enabled: bool,
    pool: PagePool,
    tree: RadixTree,
    /// Events since they were last taken; `None`: not recorded.
    events: Option<Vec<KvEvent>>,
    hasher: BlockHasher,
    tokens: Vec<u32>,
    duplicates: Vec<BlockId>,
}

impl RadixCache {
    /// The cache that the configuration describes; no events are recorded.
    pub(crate) fn new(config: &SglangConfig) -> Self {
        Self {
            page_size: config.page_size,
            enabled: !config.disable_radix_cache,
            pool: PagePool::new(config.num_pages(), config.page_size),
            tree: RadixTree::new(config.page_size, config.radix_eviction_policy),
            events: None,
            hasher: BlockHasher::default(),
            tokens: Vec::new(),
            duplicates: Vec::new(),
        }
    }

    /// Whether prefixes are found again.
    pub(crate) fn prefix_caching(&self) -> bool {
        self.enabled
    }

    /// Tokens per page.
    pub(crate) fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Tokens in free pages.
    pub(crate) fn available_tokens(&self) -> u64 {
        u64::from(self.pool.num_free()) * u64::from(self.page_size)
    }

    /// Tokens in the tree that no sequence uses.
    pub(crate) fn evictable_tokens(&self) -> u64 {
        self.tree.evictable_tokens()
    }

    /// Tokens in the tree that a sequence uses.
    pub(crate) fn protected_tokens(&self) -> u64 {
        self.tree.protected_tokens()
    }

    /// Tokens of the whole pool.
    pub(crate) fn capacity_tokens(&self) -> u64 {
        u64::from(self.pool.num_pages()) * u64::from(self.page_size)
    }

    /// Pages in the tree.
    pub(crate) fn num_stored_pages(&self) -> u64 {
        (self.evictable_tokens() + self.protected_tokens()) / u64::from(self.page_size)
    }

    /// Records events from now on.
    pub(crate) fn record_events(&mut self) {
        if self.events.is_none() {
            self.events = Some(Vec::new());
            for node in self.tree.top_down() {
                self.hash(node);
            }
        }
    }

    /// Events that wait to be taken.
    pub(crate) fn events(&self) -> &[KvEvent] {
        self.events.as_deref().unwrap_or_default()
    }

    /// Swaps the events so far for an empty buffer, so that memory goes round.
    pub(crate) fn take_events(&mut self, into: &mut Vec<KvEvent>) {
        debug_assert!(into.is_empty());
        if let Some(events) = &mut self.events {
            std::mem::swap(events, into);
        }
    }

    /// Looks for the longest stored prefix of at most `limit` tokens.
    pub(crate) fn match_prefix(&mut self, content: &impl BlockContent, limit: u32) -> Match {
        if !self.enabled {
            return Match::default();
        }
        let keys = content.extra_keys();
        self.tree.match_prefix(&keys.namespace(), &KeyTokens(content), limit)
    }

    /// Keeps a match from being evicted.
    pub(crate) fn lock(&mut self, found: Match) {
        self.tree.lock(found.node);
    }

    /// Takes one lock back.
    pub(crate) fn unlock(&mut self, found: Match) {
        self.tree.unlock(found.node);
    }

    /// Gives a sequence without pages those of a match, whose lock passes to it.
    pub(crate) fn adopt(&mut self, pages: &mut SequencePages, found: Match) {
        debug_assert!(pages.ids.is_empty());
        pages.stored = found;
        self.tree.pages_to(found.node, &mut pages.ids);
    }

    /// Evicts until that many pages are free; `false` if there is nothing left to evict.
    pub(crate) fn make_room(&mut self, num_pages: u32) -> bool {
        while self.pool.num_free() < num_pages {
            let Some(evicted) = self.tree.evict() else { return false };
            self.pool.free(&evicted.pages);
            if let Some(events) = &mut self.events {
                let removed = |(block_id, block_hash)| KvEvent::BlockRemoved { block_hash, block_id };
                let pairs = evicted.pages.iter().copied().zip(evicted.hashes);
                if seeded_bug!(ListsEvictionsInHashOrder) {
                    events.extend(pairs.collect::<std::collections::HashMap<_, _>>().into_iter().map(removed));
                } else {
                    events.extend(pairs.map(removed));
                }
            }
        }
        true
    }

    /// Evicts until that many tokens are free, or nothing is left to evict.
    pub(crate) fn make_room_for_tokens(&mut self, tokens: u64) {
        let pages = tokens.div_ceil(u64::from(self.page_size));
        self.make_room(u32::try_from(pages).unwrap_or(u32::MAX));
    }

    /// Pages that a sequence still misses for `tokens` tokens.
    pub(crate) fn missing(&self, pages: &SequencePages, tokens: u32) -> u32 {
        tokens.div_ceil(self.page_size).saturating_sub(pages.len())
    }

    /// Gives a sequence the pages that it still misses for `tokens` tokens; `false`, changing nothing, if
    /// too few are free.
    #[inline]
    pub(crate) fn extend(&mut self, pages: &mut SequencePages, tokens: u32) -> bool {
        let missing = self.missing(pages, tokens);
        if missing > self.pool.num_free() {
            return false;
        }
        pages.ids.extend((0..missing).map_while(|_| self.pool.allocate()));
        true
    }

    /// Stores what a sequence has computed, in whole pages. Where another one stored the same before, its
    /// pages are freed for that one's. Prompt and output end up in nodes of their own.
    pub(crate) fn store<C: BlockContent>(&mut self, pages: &mut SequencePages, computed: &Computed<'_, C>) {
        if !self.enabled {
            return;
        }
        let whole = |tokens: u32| tokens / self.page_size * self.page_size;
        let (end, prompt_end, held) = (whole(computed.tokens), whole(computed.prompt_tokens), pages.stored);
        let keys = computed.content.extra_keys();
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.resize((end - held.tokens) as usize, 0);
        KeyTokens(computed.content).fill(held.tokens as usize, &mut tokens);
        let first_page = held.tokens / self.page_size;
        let entry = Entry {
            namespace: &keys.namespace(),
            held,
            tokens: &tokens,
            pages: &mut pages.ids[first_page as usize..(end / self.page_size) as usize],
            counted: pages.counted,
            priority: i64::from(computed.priority),
        };
        let entered = self.tree.insert(entry, &mut self.duplicates);
        self.tokens = tokens;
        self.pool.free(&self.duplicates);
        self.duplicates.clear();
        if let Some(node) = entered.new {
            self.record_stored(node, end, computed.owner);
        }
        if 0 < prompt_end && prompt_end < end {
            self.tree.split_path(entered.node, prompt_end, i64::from(computed.priority) + 1);
        }
        self.tree.unlock(held.node);
        self.tree.lock(entered.node);
        pages.stored = Match { tokens: end, node: entered.node };
        pages.counted = pages.counted.max(end);
    }

    /// Takes the pages back that only this sequence holds, and its lock on the others.
    pub(crate) fn release(&mut self, pages: &mut SequencePages) {
        self.pool.free(&pages.ids[(pages.stored.tokens / self.page_size) as usize..]);
        self.tree.unlock(pages.stored.node);
        pages.ids.clear();
        (pages.stored, pages.counted) = (Match::default(), 0);
    }

    /// Forgets every stored prefix. No sequence may hold a page.
    pub(crate) fn reset(&mut self) {
        self.tree.clear();
        self.pool.reset();
        if let Some(events) = &mut self.events {
            events.push(KvEvent::AllBlocksCleared);
        }
    }

    /// Orders the waiting by the branches of the tree that they share.
    pub(crate) fn depth_first(&self, ends: &[Option<NodeId>]) -> Vec<usize> {
        self.tree.depth_first(ends)
    }

    /// Computes the hashes of a node, whose parent has its own.
    fn hash(&mut self, node: NodeId) {
        let (namespace, mut before, tokens) = self.tree.unhashed(node);
        let mut keys = namespace.and_then(namespace_keys);
        let mut hashes = Vec::with_capacity(tokens.len() / self.page_size as usize);
        for page in tokens.chunks_exact(self.page_size as usize) {
            let hash = self.hasher.hash(before, page, keys.take().as_ref());
            hashes.push(hash);
            before = Some(hash);
        }
        self.tree.set_hashes(node, hashes);
    }

    /// Records that a new node, which ends `end` tokens from the start, can be found.
    fn record_stored(&mut self, node: NodeId, end: u32, owner: SequenceId) {
        if self.events.is_none() {
            return;
        }
        self.hash(node);
        let (namespace, parent_block_hash, tokens) = self.tree.unhashed(node);
        let (pages, hashes, _) = self.tree.node(node);
        let keys = namespace.and_then(namespace_keys);
        let lora_name = keys.as_ref().and_then(|keys| keys.lora_name.clone());
        let mut extra_keys = Vec::new();
        if keys.is_some() {
            extra_keys.resize(pages.len(), None);
            extra_keys[0] = keys;
        }
        let event = KvEvent::BlockStored {
            block_hashes: hashes.to_vec(),
            parent_block_hash,
            token_ids: tokens.to_vec(),
            block_size: self.page_size,
            lora_name,
            extra_keys,
            block_ids: pages.to_vec(),
            sequence: Some(owner),
            // A node's tokens are part of a sequence's, a u32.
            first_block_index: end / self.page_size - pages.len() as u32,
        };
        self.events.get_or_insert_default().push(event);
    }

    /// The node that holds a page. Walks the tree: for checks and tools.
    fn node_of(&self, page: BlockId) -> Option<(NodeId, usize)> {
        self.tree.top_down().into_iter().find_map(|node| {
            let (pages, _, _) = self.tree.node(node);
            pages.iter().position(|&id| id == page).map(|index| (node, index))
        })
    }
}

impl KvPool for RadixCache {
    fn num_usable(&self) -> u32 {
        self.pool.num_pages()
    }

    fn num_free(&self) -> u32 {
        // Evictable pages are part of the pool, a u32.
        self.pool.num_free() + (self.evictable_tokens() / u64::from(self.page_size)) as u32
    }

    fn free_queue(&self) -> Box<dyn Iterator<Item = BlockId> + '_> {
        Box::new(self.pool.free_queue())
    }

    fn num_cached_hashes(&self) -> usize {
        self.num_blocks_with_hash()
    }

    fn num_blocks_with_hash(&self) -> usize {
        usize::try_from(self.num_stored_pages()).unwrap_or(usize::MAX)
    }

    fn ref_count(&self, page: BlockId) -> u32 {
        match self.node_of(page) {
            Some((node, _)) => self.tree.node(node).2,
            None => u32::from(!self.pool.free_queue().any(|free| free == page)),
        }
    }

    fn block_hash(&self, page: BlockId) -> Option<BlockHash> {
        self.node_of(page).and_then(|(node, index)| self.tree.node(node).1.get(index).copied())
    }

    fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.tree.top_down().into_iter().find_map(|node| {
            let (pages, hashes, _) = self.tree.node(node);
            hashes.iter().position(|&stored| stored == hash).map(|index| pages[index])
        })
    }
}

/// What enters the hash of a namespace's first page.
fn namespace_keys(namespace: &Namespace) -> Option<BlockExtraKeys> {
    let Namespace { lora_name, cache_salt } = namespace.clone();
    let keys = BlockExtraKeys { lora_name, cache_salt, ..BlockExtraKeys::default() };
    (keys != BlockExtraKeys::default()).then_some(keys)
}

/// A sequence's tokens as the tree knows them: SGLang puts a value made from an item's content where a
/// multimodal item stands, so that equal placeholders of different items do not match.
struct KeyTokens<'a, C>(&'a C);

impl<C: BlockContent> BlockContent for KeyTokens<'_, C> {
    fn fill(&self, start: usize, out: &mut [u32]) {
        self.0.fill(start, out);
        self.0.extra_keys().mark_items(start, out);
    }

    fn extra_keys(&self) -> &super::ExtraKeys {
        self.0.extra_keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::ExtraKeys;
    use crate::request::Request;

    struct Counting(ExtraKeys);

    impl BlockContent for Counting {
        fn fill(&self, start: usize, out: &mut [u32]) {
            out.iter_mut().zip(start as u32..).for_each(|(token, position)| *token = position);
        }

        fn extra_keys(&self) -> &ExtraKeys {
            &self.0
        }
    }

    #[test]
    fn case_30_outputs_that_were_stored_with_their_prompt_can_be_evicted_without_it() {
        let config = SglangConfig::default().with_page_size(4).with_max_total_tokens(40);
        let mut cache = RadixCache::new(&config);
        let content = Counting(ExtraKeys::of(&Request::new(vec![0], 1)));
        let mut pages = SequencePages::default();
        assert!(cache.extend(&mut pages, 30));
        let computed = Computed { content: &content, tokens: 30, prompt_tokens: 14, priority: 0, owner: SequenceId(0) };
        cache.store(&mut pages, &computed);
        assert_eq!((cache.protected_tokens(), cache.available_tokens()), (28, 8));
        cache.release(&mut pages);
        assert_eq!((cache.evictable_tokens(), cache.available_tokens()), (28, 12));
        // The prompt ends within a page, which goes with the output.
        assert!(cache.make_room(4));
        assert_eq!((cache.evictable_tokens(), cache.match_prefix(&content, 30).tokens), (12, 12));
        assert!(cache.make_room(8));
        assert_eq!((cache.evictable_tokens(), cache.available_tokens()), (0, 40));
        assert!(!cache.make_room(11));
    }
}
