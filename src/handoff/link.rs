//! Transfers under way on one link.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::transfer::TransferCost;
use crate::time::EngineTime;

/// How transfers that are on a link at once divide it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum LinkSharing {
    /// Not at all: each has the bandwidth to itself.
    #[default]
    Unshared,
    /// Fairly: each of `n` gets an `n`-th, recomputed whenever one joins or leaves.
    FairShare,
}

/// A transfer on one [`Link`], never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct TransferId(pub u64);

/// A nanosecond of an unshared link is this many units of work: the least common multiple of 1 to 46, the last one that
/// lets a `u64` of nanoseconds fit into a `u128`. So the shares of up to 46 transfers are whole numbers of units, and
/// with more of them less than 10⁻¹⁹ ns are lost each time that one joins or leaves.
const UNITS_PER_NANO: u128 = 9_419_588_158_802_421_600;

/// One link between engines: transfers join, share its bandwidth and finish. A value without a clock.
///
/// Sharing is kept as one number, the work that every transfer on the wire has been given so far; a transfer is done
/// when that number reaches the value it had when the transfer joined plus the transfer's own work. Times at which
/// something happens are whole nanoseconds, rounded up, so that nothing is ever early; between them nothing is rounded.
///
/// ```
/// use std::time::Duration;
/// use standin::EngineTime;
/// use standin::handoff::{Link, LinkSharing, TransferCost};
///
/// let cost = TransferCost { setup: Duration::ZERO, wire: Duration::from_millis(10) };
/// let mut link = Link::new(LinkSharing::FairShare);
/// let first = link.start(cost, EngineTime::ZERO);
/// let second = link.start(cost, EngineTime::ZERO);
/// assert_eq!(link.expected_finish(first), Some(EngineTime::from_millis(20)));
/// link.advance(EngineTime::from_millis(20));
/// assert_eq!(link.poll_finished(), Some((first, EngineTime::from_millis(20))));
/// assert_eq!(link.poll_finished(), Some((second, EngineTime::from_millis(20))));
/// ```
#[derive(Debug, Clone)]
pub struct Link {
    sharing: LinkSharing,
    now: EngineTime,
    next_id: u64,
    /// Units given to each transfer on the wire since the wire was last idle.
    given: u128,
    /// Transfers in their setup, by the time at which they join the wire; the value is their work.
    setup: BTreeMap<(EngineTime, TransferId), u128>,
    /// Transfers on the wire, each after the value of `given` at which it is done.
    wire: BTreeSet<(u128, TransferId)>,
    finished: VecDeque<(TransferId, EngineTime)>,
}

impl Link {
    /// An idle link.
    #[must_use]
    pub fn new(sharing: LinkSharing) -> Self {
        Self {
            sharing,
            now: EngineTime::ZERO,
            next_id: 0,
            given: 0,
            setup: BTreeMap::new(),
            wire: BTreeSet::new(),
            finished: VecDeque::new(),
        }
    }

    /// Starts a transfer at `now`. It joins the wire after its setup, during which it slows nobody down.
    pub fn start(&mut self, cost: TransferCost, now: EngineTime) -> TransferId {
        self.advance(now);
        let id = TransferId(self.next_id);
        self.next_id += 1;
        let work = u128::from(EngineTime::from(cost.wire).as_nanos()) * UNITS_PER_NANO;
        self.setup.insert((self.now + cost.setup, id), work);
        self.run_to(self.now);
        id
    }

    /// Takes a transfer off the link at `now`; the others are faster from then on. Whether it was still under way.
    pub fn abort(&mut self, id: TransferId, now: EngineTime) -> bool {
        self.advance(now);
        let before = self.in_flight();
        self.setup.retain(|(_, other), _| *other != id);
        self.wire.retain(|(_, other)| *other != id);
        self.in_flight() < before
    }

    /// Moves everything on to `now`; a time before the last one changes nothing.
    pub fn advance(&mut self, now: EngineTime) {
        while let Some(at) = self.next_deadline().filter(|at| *at <= now) {
            self.run_to(at);
        }
        self.run_to(now.max(self.now));
    }

    /// The next transfer that has finished, and when; in order of time, at the same time in order of work done.
    pub fn poll_finished(&mut self) -> Option<(TransferId, EngineTime)> {
        self.finished.pop_front()
    }

    /// When to call [`Link::advance`] again: a transfer joins the wire or finishes then.
    #[must_use]
    pub fn next_deadline(&self) -> Option<EngineTime> {
        let joins = self.setup.first_key_value().map(|(&(at, _), _)| at);
        let finishes = self.wire.first().and_then(|&(goal, _)| self.time_of(goal));
        joins.into_iter().chain(finishes).min()
    }

    /// When this transfer finishes if no other starts or is aborted; `None` if it is not under way, or never finishes
    /// within the range of [`EngineTime`].
    #[must_use]
    pub fn expected_finish(&self, id: TransferId) -> Option<EngineTime> {
        let mut future = self.clone();
        future.finished.clear();
        while let Some(at) = future.next_deadline() {
            future.run_to(at);
            while let Some((finished, at)) = future.poll_finished() {
                if finished == id {
                    return Some(at);
                }
            }
        }
        None
    }

    /// Transfers that have started and not finished, those in their setup included.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.setup.len() + self.wire.len()
    }

    /// How many divide the link now.
    fn sharers(&self) -> u128 {
        match self.sharing {
            LinkSharing::Unshared => 1,
            LinkSharing::FairShare => self.wire.len().max(1) as u128,
        }
    }

    /// When `given` reaches `goal`, rounded up; `None` beyond the range of time.
    fn time_of(&self, goal: u128) -> Option<EngineTime> {
        let missing = goal - self.given;
        // Split, so that the product with the number of sharers cannot overflow.
        let (whole, part) = (missing / UNITS_PER_NANO, missing % UNITS_PER_NANO);
        let nanos = whole * self.sharers() + (part * self.sharers()).div_ceil(UNITS_PER_NANO);
        let at = u128::from(self.now.as_nanos()) + nanos;
        u64::try_from(at).ok().map(EngineTime::from_nanos)
    }

    /// Lets the time from `self.now` to `at` go by, in which nobody joins or finishes before `at`.
    fn run_to(&mut self, at: EngineTime) {
        let elapsed = u128::from(at.as_nanos() - self.now.as_nanos());
        self.given = if self.wire.is_empty() { 0 } else { self.given + elapsed * UNITS_PER_NANO / self.sharers() };
        self.now = at;
        while let Some(entry) = self.setup.first_entry().filter(|entry| entry.key().0 <= at) {
            let ((_, id), work) = entry.remove_entry();
            self.wire.insert((self.given.saturating_add(work), id));
        }
        while let Some(&(goal, id)) = self.wire.first().filter(|(goal, _)| *goal <= self.given) {
            self.wire.remove(&(goal, id));
            self.finished.push_back((id, at));
        }
    }
}

#[cfg(test)]
#[path = "link_test.rs"]
mod tests;
