//! What every kind of KV pool can tell about itself.

use std::fmt;

use crate::kv_event::{BlockHash, BlockId};

/// A look inside a pool, for checks and tools.
pub(crate) trait KvPool: fmt::Debug {
    /// Blocks that can be handed out at all.
    fn num_usable(&self) -> u32;

    /// Blocks that nobody owns, those with a findable content included.
    fn num_free(&self) -> u32;

    /// Blocks that can be handed out at once, the next one first.
    fn free_queue(&self) -> Box<dyn Iterator<Item = BlockId> + '_>;

    /// Distinct contents that a look-up can find.
    fn num_cached_hashes(&self) -> usize;

    /// Blocks that hold a findable content.
    fn num_blocks_with_hash(&self) -> usize;

    /// How many owners a block has.
    fn ref_count(&self, block: BlockId) -> u32;

    /// A block's findable content, as far as it has a name.
    fn block_hash(&self, block: BlockId) -> Option<BlockHash>;

    /// The block that a look-up of this content would find.
    fn find(&self, hash: BlockHash) -> Option<BlockId>;
}
