//! Who takes part in which handoff, and how far each is.
//!
//! The table decides which verb is legal in which state; what a verb does to sequences and blocks is the
//! engine kind's. It also collects the facts, so that their order is the order of what happened.

use rustc_hash::FxHashMap;

use crate::error::HandoffRefusal;
use crate::handoff::{HandoffId, HandoffKey};
use crate::request::SequenceId;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

use super::super::sequences::Handle;
use super::{DestinationEnd, HandoffFact, SourceEnd};

/// A source. `Registered` and the two ends are not in the table: a registration is known from its
/// submission on and forgotten at its end.
///
/// ```text
///  in          │ submit       request held  release    cancel of it    heartbeat  lease     later
///              │ again        at its end               or its request             ends      registration
///  ────────────┼──────────────────────────────────────────────────────────────────────────────────────────────
///  Registered  │ Prefilling   –             is over    is over         is over    –         –
///  Prefilling  │ refused      Held          not held   Cancelled       nothing    –         ends, the request goes on
///  Held        │ refused      –             Released   Cancelled (its  extended   Released  Released
///              │                                       request: –)
///  Released,   │ Prefilling,  –             is over    is over         is over    –         –
///  Cancelled   │ registered anew
/// ```
/// "Is over" is an answer and no error. A command of an earlier registration is refused as superseded while a
/// later one is in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SourceState {
    /// Its request waits or runs.
    Prefilling,
    /// Its request has ended, its blocks are held.
    Held,
}

/// A destination. `Registered` and the two ends are not in the table.
///
/// ```text
///  in          │ blocks    activate      fail            cancel     its request  its request  later
///              │ granted                 transfer                   cancelled    ends         registration
///  ────────────┼──────────────────────────────────────────────────────────────────────────────────────────────
///  Registered  │ –         none there    none there      is over    –            –            –
///  Waiting     │ Reserved  not reserved  not reserved    Cancelled  Cancelled    Finished¹    Cancelled
///  Reserved    │ –         Active        Active, or      Cancelled  Guarded      –            Guarded²
///              │                         Finished¹ by
///              │                         the policy
///  Active      │ –         active        active          Cancelled  Cancelled    Finished     ends, the request goes on
///              │           already       already
///  Guarded     │ –         Cancelled     Cancelled       Cancelled  –            –            Guarded²
///  Finished,   │ –         none there    none there      is over    –            –            –
///  Cancelled   │
/// ```
/// ¹ badly: it outgrew the pool, or its transfer failed. ² out of the table, until its deadline.
/// `Guarded` is an end for everybody but the blocks, into which the transfer may still write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DestinationState {
    /// It waits for its blocks.
    Waiting,
    /// It has them; the transfer is somebody else's.
    Reserved,
    /// Its transfer has ended, its request runs or waits for its place in a pass.
    Active,
    /// Its request is gone, its blocks wait for the end of the transfer.
    Guarded,
}

/// One side of a handoff.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HandoffSide {
    /// It computes the prompt.
    Source(SourceState),
    /// It takes the request over.
    Destination(DestinationState),
}

/// A registration that has a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) key: HandoffKey,
    pub(crate) handle: Handle,
    pub(crate) side: HandoffSide,
}

/// The registrations of one engine, and the facts that nobody has been told yet.
#[derive(Debug, Default)]
pub(crate) struct HandoffTable {
    by_id: FxHashMap<HandoffId, Registration>,
    facts: Vec<HandoffFact>,
}

type Found<T> = Result<Option<T>, HandoffRefusal>;

impl HandoffTable {
    /// The registration; `None` if it is over or has no request yet.
    fn find(&self, key: HandoffKey) -> Found<Registration> {
        match self.by_id.get(&key.id) {
            Some(known) if known.key.generation > key.generation => {
                Err(HandoffRefusal::Superseded { handoff: key, current: known.key.generation })
            }
            Some(known) if known.key == key || seeded_bug!(GenerationIsNotCompared) => Ok(Some(*known)),
            _ => Ok(None),
        }
    }

    fn find_source(&self, key: HandoffKey) -> Found<(Handle, SourceState)> {
        match self.find(key)? {
            None => Ok(None),
            Some(Registration { side: HandoffSide::Source(source), handle, .. }) => Ok(Some((handle, source))),
            Some(_) => Err(HandoffRefusal::NotASource(key)),
        }
    }

    fn find_destination(&self, key: HandoffKey) -> Found<(Handle, DestinationState)> {
        match self.find(key)? {
            None => Ok(None),
            Some(Registration { side: HandoffSide::Destination(destination), handle, .. }) => {
                Ok(Some((handle, destination)))
            }
            Some(_) => Err(HandoffRefusal::NotADestination(key)),
        }
    }

    /// Whether a request may be submitted under the registration; with the earlier one whose place it takes.
    pub(crate) fn may_submit(&self, key: HandoffKey) -> Found<Registration> {
        if self.find(key)?.is_some() {
            return Err(HandoffRefusal::AlreadySubmitted(key));
        }
        Ok(self.by_id.get(&key.id).copied())
    }

    /// Enters a registration that may be, in its first state.
    pub(crate) fn submit(&mut self, key: HandoffKey, handle: Handle, side: HandoffSide) {
        self.by_id.insert(key.id, Registration { key, handle, side });
    }

    /// Whose blocks to free because they are released; `None`: it is over.
    pub(crate) fn release(&self, key: HandoffKey) -> Found<Handle> {
        match self.find_source(key)? {
            None => Ok(None),
            Some((_, SourceState::Prefilling)) if !seeded_bug!(ReleasesBeforeItIsHeld) => {
                Err(HandoffRefusal::NotHeld(key))
            }
            Some((handle, _)) => Ok(Some(handle)),
        }
    }

    /// Which source to remove, and how far it is; `None`: it is over.
    pub(crate) fn cancel_source(&self, key: HandoffKey) -> Found<(Handle, SourceState)> {
        self.find_source(key)
    }

    /// Which destination to remove, and how far it is; `None`: it is over.
    pub(crate) fn cancel_destination(&self, key: HandoffKey) -> Found<(Handle, DestinationState)> {
        self.find_destination(key)
    }

    /// Which source's lease to extend; `None`: it is over.
    pub(crate) fn heartbeat(&self, key: HandoffKey) -> Found<(Handle, SourceState)> {
        self.find_source(key)
    }

    /// Ends the transfer to a destination: `Reserved` becomes `Active`, `Guarded` is over.
    pub(crate) fn end_transfer(&mut self, key: HandoffKey) -> Result<(Handle, DestinationState), HandoffRefusal> {
        let (handle, destination) = self.find_destination(key)?.ok_or(HandoffRefusal::NoDestination(key))?;
        match destination {
            DestinationState::Waiting => return Err(HandoffRefusal::NotReserved(key)),
            DestinationState::Active => return Err(HandoffRefusal::AlreadyActive(key)),
            DestinationState::Reserved => self.submit(key, handle, HandoffSide::Destination(DestinationState::Active)),
            DestinationState::Guarded => self.forget(key),
        }
        Ok((handle, destination))
    }

    /// A source's request has ended with its blocks held.
    pub(crate) fn held(&mut self, fact: HandoffFact) {
        self.advance(fact.handoff(), HandoffSide::Source(SourceState::Held));
        self.facts.push(fact);
    }

    /// A destination's blocks are granted.
    pub(crate) fn reserved(&mut self, fact: HandoffFact) {
        self.advance(fact.handoff(), HandoffSide::Destination(DestinationState::Reserved));
        self.facts.push(fact);
    }

    fn advance(&mut self, key: HandoffKey, side: HandoffSide) {
        if let Some(known) = self.by_id.get_mut(&key.id).filter(|known| known.key == key) {
            known.side = side;
        }
    }

    /// Takes a registration out, if it is still the one of its id.
    pub(crate) fn forget(&mut self, key: HandoffKey) {
        if self.by_id.get(&key.id).is_some_and(|known| known.key == key) {
            self.by_id.remove(&key.id);
        }
    }

    /// A source is over.
    pub(crate) fn source_ended(&mut self, key: HandoffKey, sequence: SequenceId, at: EngineTime, end: SourceEnd) {
        self.forget(key);
        self.facts.push(HandoffFact::SourceEnded { handoff: key, sequence, at, end });
    }

    /// A destination is over.
    pub(crate) fn destination_ended(
        &mut self,
        key: HandoffKey,
        sequence: SequenceId,
        at: EngineTime,
        end: DestinationEnd,
    ) {
        self.forget(key);
        self.facts.push(HandoffFact::DestinationEnded { handoff: key, sequence, at, end });
    }

    /// A destination is over while its transfer may still write into its blocks.
    pub(crate) fn guarded(&mut self, key: HandoffKey, sequence: SequenceId, at: EngineTime, end: DestinationEnd) {
        self.advance(key, HandoffSide::Destination(DestinationState::Guarded));
        self.facts.push(HandoffFact::DestinationEnded { handoff: key, sequence, at, end });
    }

    /// Whether a registration is a source's.
    pub(crate) fn is_source(&self, key: HandoffKey) -> bool {
        self.by_id.get(&key.id).is_some_and(|known| known.key == key && matches!(known.side, HandoffSide::Source(_)))
    }

    /// Whether facts wait to be told.
    pub(crate) fn has_facts(&self) -> bool {
        !self.facts.is_empty()
    }

    /// Swaps the facts so far for an empty buffer.
    pub(crate) fn take_facts(&mut self, into: &mut Vec<HandoffFact>) {
        debug_assert!(into.is_empty());
        std::mem::swap(&mut self.facts, into);
    }

    /// The registration of a handoff that has a request.
    pub(crate) fn get(&self, id: HandoffId) -> Option<Registration> {
        self.by_id.get(&id).copied()
    }

    /// How many registrations have a request.
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }
}
