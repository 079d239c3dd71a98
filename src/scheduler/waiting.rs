//! Sequences that wait: those whose arrival is still to come, and the queue.

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::metrics::Moments;
use crate::request::SequenceId;
use crate::time::EngineTime;

use super::sequences::Handle;

/// When a submitted sequence can be seen, and its place among those that were submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ArrivalKey {
    visible_from: EngineTime,
    submission: u64,
}

/// Submitted sequences that no pass may see yet; at one instant in the order of their submission,
/// which need not be that of their ids: a prepared request can be overtaken.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    in_order: BTreeMap<ArrivalKey, Handle>,
    submissions: u64,
}

impl Arrivals {
    /// A place behind all that can be seen from the same instant.
    pub(crate) fn place(&mut self, visible_from: EngineTime) -> ArrivalKey {
        self.submissions += 1;
        ArrivalKey { visible_from, submission: self.submissions }
    }

    /// Adds a sequence.
    pub(crate) fn insert(&mut self, key: ArrivalKey, handle: Handle) {
        self.in_order.insert(key, handle);
    }

    /// Takes a sequence out.
    pub(crate) fn remove(&mut self, key: &ArrivalKey) {
        self.in_order.remove(key);
    }

    /// The next arrival.
    pub(crate) fn next(&self) -> Option<EngineTime> {
        self.in_order.first_key_value().map(|(key, _)| key.visible_from)
    }

    /// Takes out the next one that is visible before `now`, or at `now` if `ties` is set.
    pub(crate) fn take_due(&mut self, now: EngineTime, ties: bool) -> Option<Handle> {
        let next = self.next()?;
        if next < now || (ties && next == now) { self.in_order.pop_first().map(|(_, handle)| handle) } else { None }
    }
}

/// Who goes before whom whatever their places are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// Put before all others.
    Front,
    /// Destinations that go before ordinary sequences.
    Destination,
    /// All others.
    Ordinary,
}

/// A place in a [`WaitingQueue`]; the smallest is the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    class: Class,
    rank: i64,
    arrival: EngineTime,
    tie_key: u128,
    sequence: SequenceId,
}

impl QueueKey {
    /// A place by priority: smaller values first, then by arrival, then by the request's id.
    pub(crate) fn by_priority(priority: i32, arrival: EngineTime, tie_key: u128, sequence: SequenceId) -> Self {
        Self { class: Class::Ordinary, rank: i64::from(priority), arrival, tie_key, sequence }
    }

    /// The first of all places for ordinary sequences.
    const FIRST_ORDINARY: Self =
        Self { class: Class::Ordinary, rank: i64::MIN, arrival: EngineTime::ZERO, tie_key: 0, sequence: SequenceId(0) };

    fn goes_first(&self) -> bool {
        self.class != Class::Ordinary
    }

    /// A place by a number.
    pub(crate) fn by_rank(rank: i64, sequence: SequenceId) -> Self {
        Self { class: Class::Ordinary, rank, arrival: EngineTime::ZERO, tie_key: 0, sequence }
    }
}

/// The sequences that wait for admission, in the order in which they will be tried.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    in_order: BTreeMap<QueueKey, Handle>,
    /// How many of them go before all ordinary ones.
    num_first: usize,
    /// Places given at the front and at the back.
    fronts: i64,
    backs: i64,
    /// Tokens of those that never ran and of the preempted ones, those that stand aside or hold blocks
    /// included.
    tokens_never_run: Moments,
    tokens_preempted: Moments,
    /// Those without blocks that wait to load some.
    wanting: u64,
    /// Those that were passed over and are still here.
    deferred: u64,
}

impl WaitingQueue {
    /// A place before all others.
    pub(crate) fn front(&mut self, sequence: SequenceId) -> QueueKey {
        self.fronts += 1;
        QueueKey { class: Class::Front, ..QueueKey::by_rank(-self.fronts, sequence) }
    }

    /// A place behind all that were put before the others in this way, and before all else.
    pub(crate) fn retracted(&mut self, sequence: SequenceId) -> QueueKey {
        QueueKey { class: Class::Front, ..self.back(sequence) }
    }

    /// A place behind all destinations and before all ordinary sequences.
    pub(crate) fn destination(&mut self, sequence: SequenceId) -> QueueKey {
        QueueKey { class: Class::Destination, ..self.back(sequence) }
    }

    /// A place behind all others.
    pub(crate) fn back(&mut self, sequence: SequenceId) -> QueueKey {
        self.backs += 1;
        QueueKey::by_rank(self.backs, sequence)
    }

    /// Puts a sequence into its place.
    pub(crate) fn insert(&mut self, key: QueueKey, handle: Handle) {
        self.in_order.insert(key, handle);
        self.num_first += usize::from(key.goes_first());
    }

    /// Takes a sequence out of its place.
    pub(crate) fn remove(&mut self, key: &QueueKey) {
        self.in_order.remove(key);
        self.num_first -= usize::from(key.goes_first());
    }

    /// Puts the ordinary ones into another order; `set_key` is told each one's new place.
    pub(crate) fn reorder(&mut self, order: &[Handle], mut set_key: impl FnMut(Handle, QueueKey)) {
        debug_assert_eq!(order.len(), self.num_ordinary());
        self.in_order.split_off(&QueueKey::FIRST_ORDINARY);
        for &handle in order {
            let key = self.back(handle.sequence);
            self.in_order.insert(key, handle);
            set_key(handle, key);
        }
    }

    /// The head, or the next one behind a place.
    pub(crate) fn next(&self, behind: Option<QueueKey>) -> Option<Handle> {
        match behind {
            None => self.in_order.first_key_value().map(|(_, &handle)| handle),
            Some(key) => {
                self.in_order.range((Bound::Excluded(key), Bound::Unbounded)).next().map(|(_, &handle)| handle)
            }
        }
    }

    /// The head, if it goes before all ordinary ones.
    pub(crate) fn first_of_all(&self) -> Option<Handle> {
        self.next(None).filter(|_| self.num_first > 0)
    }

    /// The ordinary ones in order.
    pub(crate) fn ordinary(&self) -> impl Iterator<Item = Handle> + '_ {
        self.in_order.range(QueueKey::FIRST_ORDINARY..).map(|(_, &handle)| handle)
    }

    /// How many ordinary ones are in the queue, without those that stand aside.
    pub(crate) fn num_ordinary(&self) -> usize {
        self.in_order.len() - self.num_first
    }

    /// Whether nobody is in the queue.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_order.is_empty()
    }

    /// All in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Handle> + '_ {
        self.in_order.values().copied()
    }

    /// The tally of tokens that wait, of sequences that were preempted or never ran.
    pub(crate) fn tokens(&self, preempted: bool) -> &Moments {
        if preempted { &self.tokens_preempted } else { &self.tokens_never_run }
    }

    /// The same, to add to or to take from.
    pub(crate) fn tokens_mut(&mut self, preempted: bool) -> &mut Moments {
        if preempted { &mut self.tokens_preempted } else { &mut self.tokens_never_run }
    }

    /// Counts that one more waits to load blocks, or one fewer.
    pub(crate) fn count_wanting(&mut self, before: bool, after: bool) {
        self.wanting = self.wanting + u64::from(after) - u64::from(before);
    }

    /// How many of those without blocks wait to load some.
    pub(crate) fn num_wanting(&self) -> u64 {
        self.wanting
    }

    /// Counts that one more was passed over, or that one of them has left.
    pub(crate) fn count_deferred(&mut self, before: bool, after: bool) {
        self.deferred = self.deferred + u64::from(after) - u64::from(before);
    }

    /// How many of those in the queue were passed over.
    pub(crate) fn num_deferred(&self) -> u64 {
        self.deferred
    }

    /// How many wait, those that stand aside or hold blocks included.
    pub(crate) fn num_waiting(&self) -> u64 {
        self.tokens_never_run.count() + self.tokens_preempted.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_go_first_are_counted_apart_and_keep_their_order() {
        let mut queue = WaitingQueue::default();
        let handle = |sequence| Handle { slot: 0, sequence: SequenceId(sequence) };
        let keys = [
            queue.back(SequenceId(0)),
            queue.destination(SequenceId(1)),
            queue.retracted(SequenceId(2)),
            queue.destination(SequenceId(3)),
            queue.retracted(SequenceId(4)),
            queue.back(SequenceId(5)),
        ];
        keys.iter().zip(0..).for_each(|(&key, sequence)| queue.insert(key, handle(sequence)));
        let all = |queue: &WaitingQueue| queue.iter().map(|handle| handle.sequence.0).collect::<Vec<_>>();
        assert_eq!((all(&queue), queue.num_ordinary()), (vec![2, 4, 1, 3, 0, 5], 2));
        queue.reorder(&[handle(5), handle(0)], |_, _| {});
        assert_eq!(all(&queue), [2, 4, 1, 3, 5, 0]);
        for (first, left) in [(2, 4), (4, 1), (1, 3)] {
            assert_eq!(queue.first_of_all(), Some(handle(first)));
            queue.remove(&keys[first as usize]);
            assert_eq!(queue.first_of_all(), Some(handle(left)));
        }
        queue.remove(&keys[3]);
        assert_eq!((queue.first_of_all(), queue.num_ordinary()), (None, 2));
    }
}
