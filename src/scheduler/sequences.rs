//! All sequences of a scheduler, in slots that are used again.

use rustc_hash::FxHashMap;

use crate::kv::SequenceBlocks;
use crate::request::SequenceId;

use super::sequence::Sequence;

/// Where a sequence is kept, and which one it is: a slot alone may have passed to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Handle {
    pub(crate) slot: u32,
    pub(crate) sequence: SequenceId,
}

/// The sequences. Hot paths go by [`Handle`]; the map serves commands.
#[derive(Debug)]
pub(crate) struct Sequences<B = SequenceBlocks> {
    slots: Vec<Option<Sequence<B>>>,
    vacant: Vec<u32>,
    by_id: FxHashMap<SequenceId, Handle>,
}

impl<B> Default for Sequences<B> {
    fn default() -> Self {
        Self { slots: Vec::new(), vacant: Vec::new(), by_id: FxHashMap::default() }
    }
}

impl<B> Sequences<B> {
    /// Where a sequence is, if it is known.
    pub(crate) fn find(&self, sequence: SequenceId) -> Option<Handle> {
        self.by_id.get(&sequence).copied()
    }

    /// Takes a sequence in, whose id is new.
    pub(crate) fn insert(&mut self, sequence: Sequence<B>) -> Handle {
        let id = sequence.id;
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).expect("four billion sequences do not fit into memory")
        });
        self.slots[slot as usize] = Some(sequence);
        let handle = Handle { slot, sequence: id };
        self.by_id.insert(id, handle);
        handle
    }

    /// The sequence, unless it has been removed.
    pub(crate) fn get(&self, handle: Handle) -> Option<&Sequence<B>> {
        self.slots.get(handle.slot as usize)?.as_ref().filter(|sequence| sequence.id == handle.sequence)
    }

    /// The sequence, unless it has been removed.
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut Sequence<B>> {
        self.slots.get_mut(handle.slot as usize)?.as_mut().filter(|sequence| sequence.id == handle.sequence)
    }

    /// Removes a sequence and frees its slot.
    pub(crate) fn remove(&mut self, handle: Handle) -> Option<Sequence<B>> {
        self.get(handle)?;
        self.by_id.remove(&handle.sequence);
        self.vacant.push(handle.slot);
        self.slots[handle.slot as usize].take()
    }
}

impl<B> std::ops::Index<Handle> for Sequences<B> {
    type Output = Sequence<B>;

    /// # Panics
    /// If the sequence has been removed.
    fn index(&self, handle: Handle) -> &Sequence<B> {
        self.get(handle).expect("queues hold no handle of a removed sequence")
    }
}

impl<B> std::ops::IndexMut<Handle> for Sequences<B> {
    fn index_mut(&mut self, handle: Handle) -> &mut Sequence<B> {
        self.get_mut(handle).expect("queues hold no handle of a removed sequence")
    }
}
