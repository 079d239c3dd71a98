//! The KV cache of one engine: blocks for sequences, prefixes found again, and the events of both.
//!
//! Blocks become findable when they are given out for the tokens that will fill them, not when those
//! are computed: an identical prompt admitted in the same pass already shares them.

use crate::config::VllmConfig;
use crate::kv_event::{BlockHash, BlockId, KvEvent};
use crate::request::SequenceId;
use crate::seeded_bug::seeded_bug;

use super::block_hash::{BlockHasher, ExtraKeys};
use super::block_pool::BlockPool;

/// Blocks that are hashed together beside the one that is needed: with 16 tokens a block, 2 KB of tokens.
const HASHED_AHEAD: u32 = 32;

/// Blocks that a sequence's lists have room for beside those that it needs: with 16 tokens a block, enough
/// for most outputs, so that the lists of most sequences are allocated once.
const SPARE_BLOCKS: usize = 32;

/// Makes room for `more` elements, and for some that will follow them.
fn make_room<T>(list: &mut Vec<T>, more: u32) {
    if list.capacity() - list.len() < more as usize {
        list.reserve(more as usize + SPARE_BLOCKS);
    }
}

/// What a sequence's blocks hold.
pub(crate) trait BlockContent {
    /// Writes the tokens at `start..start + out.len()`, prompt and output as one.
    fn fill(&self, start: usize, out: &mut [u32]);

    /// A name for the tokens at `start..start + len`, if they have one ([`crate::PromptSource::content_key`]).
    fn key(&self, start: usize, len: usize) -> Option<u64> {
        let _ = (start, len);
        None
    }

    /// What beside the tokens identifies the blocks.
    fn extra_keys(&self) -> &ExtraKeys;
}

/// The KV blocks that a sequence holds, whatever its cache keeps beside them.
pub(crate) trait HeldBlocks: Default {
    /// The blocks, in sequence order.
    fn ids(&self) -> &[BlockId];
}

/// The KV blocks of one sequence.
#[derive(Debug, Default)]
pub(crate) struct SequenceBlocks {
    /// In sequence order.
    ids: Vec<BlockId>,
    /// How many of them, from the first, are findable.
    num_cached: u32,
    /// Hashes of the sequence's full blocks, as far as they were ever needed. They outlive a preemption.
    hashes: Vec<BlockHash>,
}

impl HeldBlocks for SequenceBlocks {
    fn ids(&self) -> &[BlockId] {
        self.ids()
    }
}

impl SequenceBlocks {
    /// The blocks, in sequence order.
    pub(crate) fn ids(&self) -> &[BlockId] {
        &self.ids
    }

    /// How many there are; at most as many as the pool has, a u32.
    pub(crate) fn len(&self) -> u32 {
        self.ids.len() as u32
    }
}

/// Consecutive blocks of one sequence.
#[derive(Clone, Copy)]
struct BlockRun<'a> {
    /// Index in the sequence of the first of them.
    first: u32,
    ids: &'a [BlockId],
    /// The hashes of the sequence, from its start.
    hashes: &'a [BlockHash],
}

/// What an admission must find free.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Tokens that get blocks now, those of the prefix hit included.
    pub(crate) tokens: u32,
    /// Tokens whose blocks must be free now though they are not all taken; at least `tokens`.
    pub(crate) must_fit: u32,
    /// Blocks that must stay free beside them.
    pub(crate) headroom: u32,
    /// Blocks that must stay free beside those taken now, because others count on them.
    pub(crate) reserved: u64,
}

/// Block pool, prefix cache and KV events of one engine.
#[derive(Debug)]
pub(crate) struct KvCache {
    pool: BlockPool,
    block_size: u32,
    prefix_caching: bool,
    /// Events since they were last taken; `None`: not recorded.
    events: Option<Vec<KvEvent>>,
    /// What the last look-up found.
    hits: Vec<BlockId>,
    hasher: BlockHasher,
    /// The tokens of the blocks that are being hashed.
    tokens: Vec<u32>,
}

impl KvCache {
    /// The cache that the configuration describes; no events are recorded.
    pub(crate) fn new(config: &VllmConfig) -> Self {
        Self {
            pool: BlockPool::new(config.num_gpu_blocks),
            block_size: config.block_size,
            prefix_caching: config.enable_prefix_caching,
            events: None,
            hits: Vec::new(),
            hasher: BlockHasher::default(),
            tokens: Vec::new(),
        }
    }

    /// The block pool.
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Whether prefixes are found again.
    pub(crate) fn prefix_caching(&self) -> bool {
        self.prefix_caching
    }

    /// Records events from now on.
    pub(crate) fn record_events(&mut self) {
        self.events.get_or_insert_default();
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

    /// Whether `tokens` tokens need more blocks than there are.
    pub(crate) fn outgrown_by(&self, tokens: u32) -> bool {
        tokens.div_ceil(self.block_size) > self.pool.num_usable()
    }

    /// Looks for the longest cached prefix of at most `max_tokens` tokens, in whole blocks. Returns its
    /// tokens; [`KvCache::admit`] takes the blocks.
    pub(crate) fn look_up(&mut self, blocks: &mut SequenceBlocks, content: &impl BlockContent, max_tokens: u32) -> u32 {
        self.hits.clear();
        let full = max_tokens / self.block_size;
        for index in 0..full {
            self.hash_blocks(blocks, content, index, full);
            match self.pool.find(blocks.hashes[index as usize]) {
                Some(block) => self.hits.push(block),
                None => break,
            }
        }
        // At most `max_tokens`.
        self.hits.len() as u32 * self.block_size
    }

    /// Finds nothing: the sequence does not read the cache.
    pub(crate) fn skip_look_up(&mut self) -> u32 {
        self.hits.clear();
        0
    }

    /// Reports the blocks of the last look-up once more, as vLLM's `kv_cache_report_mode` "full" does.
    pub(crate) fn report_hits(&mut self, blocks: &SequenceBlocks, content: &impl BlockContent) {
        if !self.hits.is_empty() {
            let hits = std::mem::take(&mut self.hits);
            let run = BlockRun { first: 0, ids: &hits, hashes: &blocks.hashes };
            self.record_stored(run, content, None);
            self.hits = hits;
        }
    }

    /// Gives a sequence the blocks of the last look-up and new ones after them; `false`, changing
    /// nothing, if there is no room. One that holds blocks already was not looked up and keeps them.
    pub(crate) fn admit(&mut self, blocks: &mut SequenceBlocks, room: Room) -> bool {
        debug_assert!((blocks.ids.is_empty() || self.hits.is_empty()) && room.must_fit >= room.tokens);
        // A hit block without an owner is free until it is taken, so it counts as needed.
        let is_free = |block| self.pool.ref_count(block) == 0 && !seeded_bug!(FreeHitsNeedNoRoom);
        let free_hits = self.hits.iter().filter(|&&block| is_free(block)).count() as u64;
        let present = u64::from(blocks.len()) + self.hits.len() as u64;
        let needed = |tokens: u32| {
            u64::from(tokens.div_ceil(self.block_size)).saturating_sub(present) + free_hits + u64::from(room.headroom)
        };
        let free = u64::from(self.pool.num_free());
        if needed(room.must_fit) > free || needed(room.tokens) + room.reserved > free {
            return false;
        }
        if !self.hits.is_empty() {
            for &block in &self.hits {
                self.pool.acquire(block);
            }
            blocks.ids.extend_from_slice(&self.hits);
            blocks.num_cached = self.hits.len() as u32;
        }
        self.extend(blocks, room.tokens)
    }

    /// Blocks that a sequence misses for `tokens` tokens.
    pub(crate) fn missing(&self, blocks: &SequenceBlocks, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.block_size).saturating_sub(blocks.len()))
    }

    /// Gives a sequence the blocks that it still misses for `tokens` tokens; `false`, changing nothing,
    /// if too few are free.
    #[inline]
    pub(crate) fn extend(&mut self, blocks: &mut SequenceBlocks, tokens: u32) -> bool {
        // Most tokens lie within the last block, which this tells without a division.
        u64::from(tokens) <= u64::from(blocks.len()) * u64::from(self.block_size) || self.append(blocks, tokens)
    }

    fn append(&mut self, blocks: &mut SequenceBlocks, tokens: u32) -> bool {
        let missing = tokens.div_ceil(self.block_size) - blocks.len();
        make_room(&mut blocks.ids, missing);
        let events = &mut self.events;
        self.pool.allocate(missing, &mut blocks.ids, |block_id, block_hash| {
            if let Some(events) = events {
                events.push(KvEvent::BlockRemoved { block_hash, block_id });
            }
        })
    }

    /// Makes the blocks that `tokens` tokens fill findable.
    #[inline]
    pub(crate) fn publish(
        &mut self,
        blocks: &mut SequenceBlocks,
        content: &impl BlockContent,
        tokens: u32,
        owner: SequenceId,
    ) {
        if u64::from(tokens) >= (u64::from(blocks.num_cached) + 1) * u64::from(self.block_size) && self.prefix_caching {
            self.publish_full(blocks, content, tokens / self.block_size, owner);
        }
    }

    /// As long as a sequence has fewer tokens than this, one more needs no new block and fills none that
    /// would have to become findable.
    pub(crate) fn quiet_until(&self, blocks: &SequenceBlocks) -> u32 {
        let room = blocks.len().saturating_mul(self.block_size).saturating_add(1);
        let findable = if self.prefix_caching { blocks.num_cached.saturating_add(1) } else { u32::MAX };
        findable.saturating_mul(self.block_size).min(room)
    }

    /// Makes a sequence's first `full` blocks findable.
    fn publish_full(&mut self, blocks: &mut SequenceBlocks, content: &impl BlockContent, full: u32, owner: SequenceId) {
        let first = blocks.num_cached;
        self.hash_blocks(blocks, content, full - 1, full);
        let run = first as usize..full as usize;
        self.pool.set_contents(&blocks.ids[run.clone()], &blocks.hashes[run]);
        blocks.num_cached = full;
        let run = BlockRun { first, ids: &blocks.ids[first as usize..full as usize], hashes: &blocks.hashes };
        self.record_stored(run, content, Some(owner));
    }

    /// Makes a sequence's blocks from its `first`-th on not findable any more: their content is not what it
    /// should be.
    pub(crate) fn withdraw(&mut self, blocks: &mut SequenceBlocks, first: u32) {
        for &block_id in &blocks.ids[(first as usize).min(blocks.ids.len())..] {
            if let (Some(block_hash), Some(events)) = (self.pool.take_content(block_id), &mut self.events) {
                events.push(KvEvent::BlockRemoved { block_hash, block_id });
            }
        }
        blocks.num_cached = blocks.num_cached.min(first);
    }

    /// Takes all blocks back.
    pub(crate) fn release(&mut self, blocks: &mut SequenceBlocks) {
        self.pool.release(&blocks.ids);
        blocks.ids.clear();
        blocks.num_cached = 0;
    }

    /// Forgets every cached prefix; `false`, changing nothing, while any block has an owner.
    pub(crate) fn reset(&mut self) -> bool {
        let reset = self.pool.reset();
        if let (true, Some(events)) = (reset, &mut self.events) {
            events.push(KvEvent::AllBlocksCleared);
        }
        reset
    }

    /// Makes sure that the hashes of a sequence's first blocks are known up to the one with `index`. A stretch
    /// of further ones is computed with them, as far as the tokens of `full` blocks exist: they will be needed
    /// soon, and a stretch costs less.
    fn hash_blocks(&mut self, blocks: &mut SequenceBlocks, content: &impl BlockContent, index: u32, full: u32) {
        // Both are counts of one sequence's blocks, so u32.
        let known = blocks.hashes.len() as u32;
        if index < known {
            return;
        }
        let until = full.min(index.saturating_add(HASHED_AHEAD));
        make_room(&mut blocks.hashes, until - known);
        let keys = content.extra_keys();
        let block_size = self.block_size as usize;
        let mut tokens_from = usize::MAX;
        for index in known..until {
            let (start, parent) = (index as usize * block_size, blocks.hashes.last().copied());
            let key = if keys.is_empty() { content.key(start, block_size) } else { None };
            let hash = if let Some(key) = key {
                BlockHasher::hash_key(parent, key)
            } else {
                if tokens_from == usize::MAX {
                    tokens_from = start;
                    self.tokens.resize(until as usize * block_size - start, 0);
                    content.fill(start, &mut self.tokens);
                }
                let tokens = &self.tokens[start - tokens_from..][..block_size];
                self.hasher.hash(parent, tokens, keys.of_block(index, self.block_size).as_ref())
            };
            blocks.hashes.push(hash);
        }
    }

    /// Records that blocks of a sequence can be found.
    fn record_stored(&mut self, run: BlockRun<'_>, content: &impl BlockContent, sequence: Option<SequenceId>) {
        let BlockRun { first, ids, hashes } = run;
        let Some(events) = &mut self.events else { return };
        let (start, block_size) = (first as usize, self.block_size as usize);
        let mut token_ids = vec![0; ids.len() * block_size];
        content.fill(start * block_size, &mut token_ids);
        let keys = content.extra_keys();
        let mut extra_keys: Vec<_> =
            (first..).take(ids.len()).map(|index| keys.of_block(index, self.block_size)).collect();
        if extra_keys.iter().all(Option::is_none) {
            extra_keys.clear();
        }
        events.push(KvEvent::BlockStored {
            block_hashes: hashes[start..start + ids.len()].to_vec(),
            parent_block_hash: start.checked_sub(1).map(|parent| hashes[parent]),
            token_ids,
            block_size: self.block_size,
            lora_name: keys.lora_name().cloned(),
            extra_keys,
            block_ids: ids.to_vec(),
            sequence,
            first_block_index: first,
        });
    }
}
