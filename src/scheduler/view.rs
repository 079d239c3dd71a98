//! A borrowed look inside a scheduler, for checks and tools. The hot path records nothing for it.

use crate::kv::KvPool;
use crate::kv_event::{BlockHash, BlockId};
use crate::output::FinishReason;
use crate::request::SequenceId;

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SequenceStatus {
    /// Its arrival is still to come.
    Arriving,
    /// In the waiting queue, never run.
    Waiting,
    /// In the batch.
    Running,
    /// Preempted; in the waiting queue again.
    Preempted,
    /// Waiting with blocks into which KV of another engine is loaded.
    Loading,
    /// Waiting with blocks into which it has been loaded; no pass has looked at it since.
    Loaded,
    /// Ended in this way, with blocks that stay.
    Held(FinishReason),
}

/// One sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceView<'a> {
    /// Its id.
    pub sequence: SequenceId,
    /// Where it is.
    pub status: SequenceStatus,
    /// Whether its reader has no room ([`crate::Command::Throttle`]).
    pub throttled: bool,
    /// Whether it was passed over in the waiting queue since it came there.
    pub deferred: bool,
    /// Tokens whose KV is present or being computed by the pass in flight.
    pub num_computed_tokens: u32,
    /// Prompt and output tokens.
    pub num_tokens: u32,
    /// Output tokens.
    pub num_output_tokens: u32,
    /// Output tokens at which it ends by length, as the engine cut them on arrival.
    pub max_output_tokens: u32,
    /// Its KV blocks, in sequence order.
    pub block_ids: &'a [BlockId],
    /// How often it was preempted.
    pub num_preemptions: u32,
}

/// The KV block pool. With SGLang a block is a page.
#[derive(Debug, Clone, Copy)]
pub struct PoolView<'a> {
    pub(crate) pool: &'a dyn KvPool,
}

impl PoolView<'_> {
    /// Blocks that can be handed out at all.
    #[must_use]
    pub fn num_usable_blocks(&self) -> u32 {
        self.pool.num_usable()
    }

    /// Blocks that nobody owns, those that only hold a cached prefix included.
    #[must_use]
    pub fn num_free_blocks(&self) -> u32 {
        self.pool.num_free()
    }

    /// The free blocks, next to be handed out first. With SGLang, cached prefixes are evicted into it when
    /// they are needed, and are not among them.
    pub fn free_queue(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.pool.free_queue()
    }

    /// Distinct contents that a look-up can find.
    #[must_use]
    pub fn num_cached_hashes(&self) -> usize {
        self.pool.num_cached_hashes()
    }

    /// Blocks that hold a findable content; several can hold the same.
    #[must_use]
    pub fn num_blocks_with_hash(&self) -> usize {
        self.pool.num_blocks_with_hash()
    }

    /// How many owners a block has. With SGLang this walks the whole prefix tree.
    ///
    /// # Panics
    /// If there is no such block (vLLM kind).
    #[must_use]
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.pool.ref_count(block)
    }

    /// The findable content of a block. With SGLang contents have names only while KV events are recorded,
    /// and this walks the whole prefix tree.
    ///
    /// # Panics
    /// If there is no such block (vLLM kind).
    #[must_use]
    pub fn block_hash(&self, block: BlockId) -> Option<BlockHash> {
        self.pool.block_hash(block)
    }

    /// The block that a look-up of this content would find.
    #[must_use]
    pub fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.pool.find(hash)
    }
}

/// What SGLang's scheduler reckons with: the KV pool in tokens, and what admission goes by.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct TokenPoolView {
    /// Tokens in free pages.
    pub available_tokens: u64,
    /// Tokens of cached prefixes that no sequence uses.
    pub evictable_tokens: u64,
    /// Tokens of cached prefixes that a sequence uses.
    pub protected_tokens: u64,
    /// Share of their remaining output that running sequences are expected to take, 0 to 1.
    pub new_token_ratio: f64,
    /// Admission is closed until a running sequence leaves.
    pub batch_is_full: bool,
    /// The sequence whose prompt is only computed in part.
    pub chunked: Option<SequenceId>,
}
