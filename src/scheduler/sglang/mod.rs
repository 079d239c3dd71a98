//! SGLang's scheduler (facts: SGLang 0.5.23, `--disable-overlap-schedule`; checked against its recordings).
//!
//! A pass is a prefill batch or a decode batch. Prefill comes first: as long as prompts can be admitted no
//! sequence decodes, unless `enable_mixed_chunk` lets decodes ride along. At most one prompt is split at a
//! time, and its next chunk comes before everybody who waits. Admission reckons with the output that running
//! sequences may still produce, discounted by `new_token_ratio`; when it was too hopeful, sequences are
//! retracted. What a pass computed enters the prefix tree when the pass ends, a chunk's tokens when the next
//! pass is planned.
//!
//! First come, first served costs nothing per waiting request. The other policies sort the queue at every
//! attempt to admit, as the real ones do.

mod budget;
mod commands;
mod decode;
mod finish;
mod policy;
mod prefill;
mod reserve;

#[cfg(test)]
mod admission_test;
#[cfg(test)]
mod cache_test;
#[cfg(test)]
mod handoff_test;
#[cfg(test)]
mod memory_test;
#[cfg(test)]
mod properties_test;
#[cfg(test)]
mod reserve_test;
#[cfg(test)]
mod test_kit;

use crate::config::{EngineConfig, SchedulingState, SglangConfig};
use crate::kv::{RadixCache, SequencePages};
use crate::output::FinishReason;

use super::book::Book;
use super::engine_core::EngineCore;
use super::pass::Pass;
use super::sequences::Handle;
use super::view::TokenPoolView;

use budget::NewTokenRatio;
use policy::QueueOrder;

/// The core of one engine.
#[derive(Debug)]
pub(crate) struct SglangCore {
    /// Those of it that run are those whose prompt is computed, and those that a prefill pass in flight computes
    /// to the end.
    book: Book<SequencePages>,
    options: SglangConfig,
    kv: RadixCache,
    /// The one whose prompt is computed in part.
    chunked: Option<Handle>,
    /// Its last chunk is not in the tree yet.
    chunk_unstored: bool,
    /// Admission failed, and nobody has left since.
    batch_is_full: bool,
    /// The batch that the last pass leaves behind starts with open admission.
    reopens: bool,
    new_token_ratio: NewTokenRatio,
    order: QueueOrder,
    /// How often a sequence entered the queue.
    num_queued: u64,
}

impl SglangCore {
    /// A core for a configuration that was checked ([`EngineConfig::validate_core`]).
    pub(crate) fn new(engine: &EngineConfig, options: &SglangConfig) -> Self {
        Self {
            book: Book::new(engine),
            kv: RadixCache::new(options),
            chunked: None,
            chunk_unstored: false,
            batch_is_full: false,
            reopens: false,
            new_token_ratio: NewTokenRatio::new(options.schedule_conservativeness),
            order: QueueOrder::new(engine.seed),
            num_queued: 0,
            options: options.clone(),
        }
    }

    pub(crate) fn record_kv_events(&mut self) {
        self.kv.record_events();
    }

    fn plan_pass(&mut self, pass: &mut Pass) {
        if self.book.state == SchedulingState::Stopped {
            return;
        }
        self.take_over_last_pass();
        self.reserve_destinations(pass);
        if self.mixes() {
            self.merge_prebuilt();
        }
        self.plan_prefill(pass);
        if pass.rows.is_empty() {
            self.merge_prebuilt();
            self.plan_decode(pass);
        }
    }

    /// What the real scheduler does with the last batch before it looks for the next one.
    fn take_over_last_pass(&mut self) {
        if let Some(handle) = self.chunked {
            if self.book.sequences[handle].cancelled {
                self.end_visibly(handle, FinishReason::Cancelled);
            } else if std::mem::take(&mut self.chunk_unstored) {
                self.store(handle);
            }
        }
        if std::mem::take(&mut self.reopens) || self.book.running.has_gone() {
            self.batch_is_full = false;
        }
        self.book.running.sweep(&self.book.sequences);
    }

    /// Whether nobody waits or runs.
    fn is_idle(&self) -> bool {
        self.book.running.len() == 0 && self.chunked.is_none() && self.book.queue.num_waiting() == 0
    }

    /// How many run, the one whose prompt is computed in part included.
    fn num_in_batch(&self) -> usize {
        self.book.running.len() + usize::from(self.chunked.is_some())
    }

    /// Whether no pages are held for a transfer, or wait with their KV for a place in the batch.
    fn nothing_is_held(&self) -> bool {
        self.book.loads.is_empty() && self.book.holds.is_empty()
    }

    pub(crate) fn pool(&self) -> &RadixCache {
        &self.kv
    }

    pub(crate) fn token_pool(&self) -> TokenPoolView {
        TokenPoolView {
            available_tokens: self.kv.available_tokens(),
            evictable_tokens: self.kv.evictable_tokens(),
            protected_tokens: self.kv.protected_tokens(),
            new_token_ratio: self.new_token_ratio.current(),
            batch_is_full: self.batch_is_full,
            chunked: self.chunked.map(|handle| handle.sequence),
        }
    }
}
