//! KV-cache bookkeeping: who owns which block, and what content can be found again.
//!
//! [`KvCache`] is vLLM's: blocks found by the hash of their content. [`RadixCache`] is SGLang's: a tree of
//! token sequences.

mod block_hash;
mod block_pool;
mod cache;
mod content_index;
mod page_pool;
mod pool;
mod radix_cache;
mod radix_tree;

pub(crate) use block_hash::ExtraKeys;
pub(crate) use block_pool::BlockPool;
pub(crate) use cache::{BlockContent, HeldBlocks, KvCache, Room, SequenceBlocks};
pub(crate) use pool::KvPool;
pub(crate) use radix_cache::{Computed, RadixCache, SequencePages};
pub(crate) use radix_tree::{Match, Namespace};
