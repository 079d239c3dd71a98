//! Sequences that wait and hold blocks: KV is loaded into them, or has been.
//!
//! They are tried before all others, in the order of their places. One whose load is still in flight is
//! passed over, and costs a pass nothing.

use std::collections::BTreeMap;

use crate::request::SequenceId;

use super::sequences::Handle;
use super::waiting::QueueKey;

/// What one sequence holds and still needs, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Share {
    /// Blocks that it holds.
    pub(crate) held: u64,
    /// Blocks that it misses for the tokens that it has.
    pub(crate) missing: u64,
}

/// The queue of those that hold blocks.
#[derive(Debug, Default)]
pub(crate) struct LoadQueue {
    in_order: BTreeMap<QueueKey, Handle>,
    /// Those of them that can be tried.
    ready: BTreeMap<QueueKey, Handle>,
    num_in_flight: u64,
    backs: i64,
    total: Share,
}

impl LoadQueue {
    /// A place behind all others.
    pub(crate) fn back(&mut self, sequence: SequenceId) -> QueueKey {
        self.backs += 1;
        QueueKey::by_rank(self.backs, sequence)
    }

    /// Puts a sequence whose load begins into its place, to be passed over.
    pub(crate) fn insert(&mut self, key: QueueKey, handle: Handle, share: Share) {
        self.in_order.insert(key, handle);
        self.num_in_flight += 1;
        self.add(share);
    }

    /// Counts that a load has ended.
    pub(crate) fn landed(&mut self) {
        self.num_in_flight -= 1;
    }

    /// Takes a sequence out of its place; whether its load is in flight.
    pub(crate) fn remove(&mut self, key: &QueueKey, share: Share, in_flight: bool) {
        self.in_order.remove(key);
        self.ready.remove(key);
        self.num_in_flight -= u64::from(in_flight);
        self.subtract(share);
    }

    /// Lets a sequence in the queue be tried, or be passed over.
    pub(crate) fn set_ready(&mut self, key: QueueKey, handle: Handle, ready: bool) {
        if ready {
            self.ready.insert(key, handle);
        } else {
            self.ready.remove(&key);
        }
    }

    /// Counts what a sequence in the queue has got or given back.
    pub(crate) fn exchange(&mut self, before: Share, after: Share) {
        self.subtract(before);
        self.add(after);
    }

    /// The next one to be tried.
    pub(crate) fn next_ready(&self) -> Option<Handle> {
        self.ready.first_key_value().map(|(_, &handle)| handle)
    }

    /// Whether nobody is in the queue.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_order.is_empty()
    }

    /// How many are in it.
    pub(crate) fn len(&self) -> u64 {
        self.in_order.len() as u64
    }

    /// How many of them have their load in flight.
    pub(crate) fn num_in_flight(&self) -> u64 {
        self.num_in_flight
    }

    /// All in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Handle> + '_ {
        self.in_order.values().copied()
    }

    /// What all of them hold and need.
    pub(crate) fn total(&self) -> Share {
        self.total
    }

    fn add(&mut self, share: Share) {
        self.total.held += share.held;
        self.total.missing += share.missing;
    }

    fn subtract(&mut self, share: Share) {
        self.total.held -= share.held;
        self.total.missing -= share.missing;
    }
}
