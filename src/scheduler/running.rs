//! The running sequences, in the order in which they were admitted.

use super::sequence::Life;
use super::sequences::{Handle, Sequences};

/// The batch. A sequence that has left is passed over and swept out later, so that leaving costs no search.
#[derive(Debug, Default)]
pub(crate) struct RunningList {
    entries: Vec<Handle>,
    /// Entries whose sequence has left.
    num_gone: usize,
}

fn runs<B>(sequences: &Sequences<B>, handle: Handle) -> bool {
    sequences.get(handle).is_some_and(|sequence| sequence.life == Life::Running)
}

impl RunningList {
    /// How many run.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.num_gone
    }

    /// All in order.
    pub(crate) fn iter<'a, B>(&'a self, sequences: &'a Sequences<B>) -> impl Iterator<Item = Handle> + 'a {
        self.entries.iter().copied().filter(|&handle| runs(sequences, handle))
    }

    /// Adds the last one.
    pub(crate) fn push(&mut self, handle: Handle) {
        self.entries.push(handle);
    }

    /// Puts sequences before all others.
    pub(crate) fn put_first(&mut self, handles: impl Iterator<Item = Handle>) {
        self.entries.splice(..0, handles);
    }

    /// Whether the sequence of some entry has left.
    pub(crate) fn has_gone(&self) -> bool {
        self.num_gone > 0
    }

    /// Says that the sequence of one entry has left.
    pub(crate) fn one_is_gone(&mut self) {
        self.num_gone += 1;
    }

    /// Drops the entries of sequences that have left.
    pub(crate) fn sweep<B>(&mut self, sequences: &Sequences<B>) {
        if self.num_gone > 0 {
            self.entries.retain(|&handle| runs(sequences, handle));
            self.num_gone = 0;
        }
    }

    /// The entries; none of them is gone after [`RunningList::sweep`].
    pub(crate) fn swept(&self) -> &[Handle] {
        debug_assert_eq!(self.num_gone, 0);
        &self.entries
    }

    /// Takes an entry out by its index.
    pub(crate) fn remove(&mut self, index: usize) -> Handle {
        self.entries.remove(index)
    }

    /// Takes an entry out by its sequence, which is not gone.
    pub(crate) fn remove_handle(&mut self, handle: Handle) {
        self.entries.retain(|&entry| entry != handle);
    }

    /// Takes the last entry out.
    pub(crate) fn pop(&mut self) -> Option<Handle> {
        self.entries.pop()
    }
}
