//! The order in which waiting sequences are tried.

use std::cmp::Reverse;

use rustc_hash::FxHashSet;

use crate::config::{RadixEvictionPolicy, SglangPolicy};
use crate::kv::{BlockContent, Match, Namespace};
use crate::output::mix;
use crate::scheduler::sequence::Life;
use crate::scheduler::sequences::Handle;

use super::SglangCore;

/// While more than so many wait, longest-prefix-match is first come, first served; of so many the prefixes
/// are kept young.
const PREFIX_MATCH_MAX: usize = 128;
/// A match of at most so many tokens is small: `IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`. One waiting
/// sequence that shares as many with an earlier one is put off: `IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD`.
const IN_BATCH_PREFIX: usize = 32;
/// Attempts to admit between two of which the prefixes of the waiting are kept young.
const REFRESH_INTERVAL: u64 = 32;
/// Added per step by SplitMix64.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// What ordering remembers from one attempt to the next.
#[derive(Debug)]
pub(super) struct QueueOrder {
    attempts: u64,
    shuffle: u64,
}

impl QueueOrder {
    pub(super) fn new(seed: u64) -> Self {
        Self { attempts: 0, shuffle: mix(seed) }
    }

    /// Below `count`, at least 1.
    fn random(&mut self, count: usize) -> usize {
        self.shuffle = self.shuffle.wrapping_add(GOLDEN);
        ((u128::from(mix(self.shuffle)) * count as u128) >> 64) as usize
    }
}

impl SglangCore {
    /// Brings the queue into the policy's order.
    pub(super) fn order_queue(&mut self) {
        let policy = self.active_policy();
        let by_priority = self.options.enable_priority_scheduling;
        if policy != SglangPolicy::Fcfs || by_priority {
            let mut waiting: Vec<Handle> = self.book.queue.ordinary().collect();
            match policy {
                SglangPolicy::Fcfs => waiting.sort_by_key(|&handle| self.priority_key(handle)),
                SglangPolicy::Lpm => self.sort_by_prefix(&mut waiting),
                SglangPolicy::DfsWeight => waiting = self.by_branch(&waiting),
                SglangPolicy::Lof => waiting.sort_by_key(|&handle| {
                    let rank = if by_priority { self.priority_key(handle).0 } else { 0 };
                    (rank, Reverse(self.book.sequences[handle].output_limit))
                }),
                SglangPolicy::Random => {
                    for last in (1..waiting.len()).rev() {
                        waiting.swap(last, self.order.random(last + 1));
                    }
                }
            }
            let sequences = &mut self.book.sequences;
            self.book
                .queue
                .reorder(&waiting, |handle, key| sequences[handle].life = Life::Queued { key, deferred: false });
        }
        if !policy.is_cache_aware() {
            self.keep_young();
        }
    }

    fn active_policy(&self) -> SglangPolicy {
        match self.options.schedule_policy {
            policy if policy.is_cache_aware() && self.options.disable_radix_cache => SglangPolicy::Fcfs,
            SglangPolicy::Lpm if self.book.queue.num_ordinary() > PREFIX_MATCH_MAX => SglangPolicy::Fcfs,
            policy => policy,
        }
    }

    /// Smaller goes first: by priority, then by the time in the queue.
    pub(super) fn priority_key(&self, handle: Handle) -> (i64, u64) {
        let sequence = &self.book.sequences[handle];
        (self.importance(sequence.priority), sequence.queued_at)
    }

    /// A priority as a rank, the smallest the most important.
    pub(super) fn importance(&self, priority: i32) -> i64 {
        let priority = i64::from(priority);
        if self.options.schedule_low_priority_values_first { priority } else { -priority }
    }

    /// The stored prefix of all of a sequence's tokens.
    fn match_all(&mut self, handle: Handle) -> Match {
        let sequence = &self.book.sequences[handle];
        self.kv.match_prefix(&sequence.content, sequence.num_tokens())
    }

    /// Longest stored prefix first; those last whose prefix an earlier one is about to store.
    fn sort_by_prefix(&mut self, waiting: &mut [Handle]) {
        let mut starts: FxHashSet<(Namespace, [u32; IN_BATCH_PREFIX])> = FxHashSet::default();
        waiting.sort_by_cached_key(|&handle| {
            let matched = self.match_all(handle).tokens;
            let sequence = &self.book.sequences[handle];
            let num_tokens = sequence.num_tokens();
            if matched as usize <= IN_BATCH_PREFIX && num_tokens as usize >= IN_BATCH_PREFIX {
                let mut start = [0; IN_BATCH_PREFIX];
                sequence.content.fill(0, &mut start);
                if !starts.insert((sequence.content.extra_keys().namespace(), start)) {
                    return Reverse(None);
                }
            }
            Reverse(Some(matched.min(num_tokens - 1)))
        });
    }

    fn by_branch(&mut self, waiting: &[Handle]) -> Vec<Handle> {
        let ends: Vec<_> = waiting.iter().map(|&handle| self.match_all(handle).node).collect();
        self.kv.depth_first(&ends).into_iter().map(|index| waiting[index]).collect()
    }

    /// Now and then counts as an access to the prefixes of those who wait, the head last, so that they are
    /// not evicted while they do.
    fn keep_young(&mut self) {
        let is_lru = self.options.radix_eviction_policy == RadixEvictionPolicy::Lru;
        if !is_lru || self.options.disable_radix_cache || self.book.queue.num_ordinary() == 0 {
            return;
        }
        let is_due = self.order.attempts.is_multiple_of(REFRESH_INTERVAL);
        self.order.attempts += 1;
        if is_due {
            let first: Vec<Handle> = self.book.queue.ordinary().take(PREFIX_MATCH_MAX).collect();
            for handle in first.into_iter().rev() {
                self.match_all(handle);
            }
        }
    }
}
