//! KV-cache events: what a router needs to know of an engine's prefix cache.

use std::sync::Arc;

use crate::request::SequenceId;

/// The content of one full KV block, named by a hash chained over all blocks before it.
///
/// Opaque: equal values mean equal tokens (and extra keys) from the start of the sequence. It is
/// computed with XXH3, not with the hash a real engine publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct BlockHash(pub u64);

/// A physical KV block. Block 0 is the null block of vLLM and is never handed out.
pub type BlockId = u32;

/// One change of the prefix cache, per physical block.
///
/// Several blocks can hold one content: a consumer must count copies, a plain set drifts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(tag = "type"))]
#[non_exhaustive]
pub enum KvEvent {
    /// Full blocks of one sequence became findable.
    BlockStored {
        /// Their contents, in sequence order.
        block_hashes: Vec<BlockHash>,
        /// The content just before the first of them; `None` at the start of a sequence.
        parent_block_hash: Option<BlockHash>,
        /// Their tokens, `block_hashes.len() * block_size` of them.
        token_ids: Vec<u32>,
        /// Tokens per block.
        block_size: u32,
        /// The LoRA adapter whose KV this is.
        lora_name: Option<Arc<str>>,
        /// What beside the tokens entered each block's hash; empty where nothing did.
        extra_keys: Vec<Option<BlockExtraKeys>>,
        /// The physical blocks, in the order of `block_hashes`.
        block_ids: Vec<BlockId>,
        /// Who stored them; `None` where a reused prefix is only reported again
        /// ([`crate::KvCacheReportMode::Full`]).
        sequence: Option<SequenceId>,
        /// Index in the sequence of the first of them.
        first_block_index: u32,
    },
    /// A block that held a findable content was taken for another use.
    BlockRemoved {
        /// The content.
        block_hash: BlockHash,
        /// The physical block.
        block_id: BlockId,
    },
    /// The whole prefix cache was reset.
    AllBlocksCleared,
}

/// What beside its tokens identifies a block.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BlockExtraKeys {
    /// The LoRA adapter.
    pub lora_name: Option<Arc<str>>,
    /// Multimodal items that overlap the block: identifier, and the item's first token relative to the block's.
    pub multimodal: Vec<(Arc<str>, i64)>,
    /// The cache salt, on a sequence's first block only.
    pub cache_salt: Option<Arc<str>>,
}
