//! Sequences that have ended while their blocks stay, each until it is let go or its deadline passes.

use std::collections::{BTreeMap, BTreeSet};

use crate::request::SequenceId;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

use super::sequences::Handle;

/// One sequence that has ended, and what it holds.
#[derive(Debug, Clone, Copy)]
struct Hold {
    handle: Handle,
    until: EngineTime,
    num_blocks: u64,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    by_sequence: BTreeMap<SequenceId, Hold>,
    by_deadline: BTreeSet<(EngineTime, SequenceId)>,
    num_blocks: u64,
}

impl Holds {
    /// Takes a sequence in that holds so many blocks until a deadline.
    pub(crate) fn insert(&mut self, handle: Handle, num_blocks: u64, until: EngineTime) {
        self.by_sequence.insert(handle.sequence, Hold { handle, until, num_blocks });
        self.by_deadline.insert((until, handle.sequence));
        self.num_blocks += num_blocks;
    }

    /// Moves a deadline, but never to an earlier time.
    pub(crate) fn extend(&mut self, sequence: SequenceId, until: EngineTime) {
        if let Some(hold) = self
            .by_sequence
            .get_mut(&sequence)
            .filter(|hold| hold.until < until || seeded_bug!(HeartbeatShortensTheLease))
        {
            self.by_deadline.remove(&(hold.until, sequence));
            hold.until = until;
            self.by_deadline.insert((until, sequence));
        }
    }

    /// Lets a sequence go.
    pub(crate) fn remove(&mut self, sequence: SequenceId) {
        if let Some(hold) = self.by_sequence.remove(&sequence) {
            self.by_deadline.remove(&(hold.until, sequence));
            self.num_blocks -= hold.num_blocks;
        }
    }

    /// One whose deadline has come, the earliest first.
    pub(crate) fn due(&self, now: EngineTime) -> Option<Handle> {
        let &(until, sequence) = self.by_deadline.first()?;
        (until <= now).then(|| self.by_sequence[&sequence].handle)
    }

    /// The next deadline.
    pub(crate) fn next_deadline(&self) -> Option<EngineTime> {
        self.by_deadline.first().map(|&(until, _)| until)
    }

    /// Whether nothing is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_sequence.is_empty()
    }

    /// How many sequences are held.
    pub(crate) fn len(&self) -> usize {
        self.by_sequence.len()
    }

    /// Blocks that they hold; one that several hold counts for each.
    pub(crate) fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// All in the order of their ids.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Handle> + '_ {
        self.by_sequence.values().map(|hold| hold.handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_come_in_order_and_only_move_away() {
        let at = EngineTime::from_millis;
        let handle = |sequence| Handle { slot: 0, sequence: SequenceId(sequence) };
        let mut holds = Holds::default();
        for (sequence, until) in [(1, 30), (2, 10), (3, 20)] {
            holds.insert(handle(sequence), sequence, at(until));
        }
        assert_eq!((holds.len(), holds.num_blocks(), holds.next_deadline()), (3, 6, Some(at(10))));
        holds.extend(SequenceId(2), at(25));
        holds.extend(SequenceId(1), at(29));
        assert_eq!((holds.due(at(19)), holds.due(at(20))), (None, Some(handle(3))));
        holds.remove(SequenceId(3));
        holds.remove(SequenceId(3));
        assert_eq!((holds.due(at(24)), holds.due(at(25)), holds.num_blocks()), (None, Some(handle(2)), 3));
        holds.remove(SequenceId(2));
        assert_eq!(holds.next_deadline(), Some(at(30)));
        assert_eq!(holds.iter().collect::<Vec<_>>(), [handle(1)]);
    }
}
