//! The handoffs as the contract has them: who is registered, who holds what until when, and what is to be told.
//!
//! It is told what commands were given, who got blocks and who ended; when that happens is the scheduler's affair
//! and modelled elsewhere. What follows from it for every registration is predicted to the fact.

use std::collections::BTreeMap;
use std::mem;
use std::time::Duration;

use standin::{
    Applied, DestinationEnd, DestinationState, EngineTime, FinishReason, HandoffFact, HandoffId, HandoffKey,
    HandoffRefusal, HandoffSide, LoadFailurePolicy, SequenceId, SourceEnd, SourceState,
};

/// What the rules need to know of an engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) lease: Duration,
    pub(crate) guard: Duration,
    pub(crate) failure: LoadFailurePolicy,
    pub(crate) carries_over: bool,
}

/// A sequence that takes part in a handoff, or did.
#[derive(Debug, Clone)]
pub(crate) struct Party {
    pub(crate) prompt_tokens: u32,
    /// Every token that it would produce.
    pub(crate) answer: Vec<u32>,
    pub(crate) cached_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) key: HandoffKey,
    pub(crate) sequence: SequenceId,
    pub(crate) side: HandoffSide,
}

/// Blocks that outlive their request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hold {
    until: EngineTime,
    /// Whose they are, while that is registered.
    key: Option<HandoffKey>,
    is_source: bool,
}

type Answer = Result<Applied, HandoffRefusal>;

#[derive(Debug)]
pub(crate) struct Model {
    rules: Rules,
    parties: BTreeMap<SequenceId, Party>,
    pub(crate) table: BTreeMap<HandoffId, Registration>,
    holds: BTreeMap<SequenceId, Hold>,
    facts: Vec<HandoffFact>,
    /// Ends to be shown that no row of a pass shows.
    ends: Vec<(SequenceId, FinishReason)>,
    now: EngineTime,
}

impl Model {
    pub(crate) fn new(rules: Rules) -> Self {
        let (parties, table, holds) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { rules, parties, table, holds, facts: Vec::new(), ends: Vec::new(), now: EngineTime::ZERO }
    }

    /// Time is told: leases and guards end, the earliest first.
    pub(crate) fn turn_to(&mut self, now: EngineTime) {
        self.now = now;
        while let Some((&sequence, &hold)) = self.holds.iter().min_by_key(|(id, hold)| (hold.until, **id))
            && hold.until <= now
        {
            self.holds.remove(&sequence);
            let Some(key) = hold.key else { continue };
            self.table.remove(&key.id);
            if hold.is_source {
                self.source_ended(key, sequence, SourceEnd::Expired);
            }
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<EngineTime> {
        self.holds.values().map(|hold| hold.until).min()
    }

    pub(crate) fn take_facts(&mut self) -> Vec<HandoffFact> {
        mem::take(&mut self.facts)
    }

    pub(crate) fn take_ends(&mut self) -> Vec<(SequenceId, FinishReason)> {
        mem::take(&mut self.ends)
    }

    /// Those whose blocks are held.
    pub(crate) fn held(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.holds.keys().copied()
    }

    fn source_ended(&mut self, handoff: HandoffKey, sequence: SequenceId, end: SourceEnd) {
        self.facts.push(HandoffFact::SourceEnded { handoff, sequence, at: self.now, end });
    }

    fn destination_ended(&mut self, handoff: HandoffKey, sequence: SequenceId, end: DestinationEnd) {
        self.facts.push(HandoffFact::DestinationEnded { handoff, sequence, at: self.now, end });
    }

    /// The registration of a sequence.
    fn of(&self, sequence: SequenceId) -> Option<Registration> {
        self.table.values().copied().find(|registration| registration.sequence == sequence)
    }

    fn find(&self, key: HandoffKey) -> Result<Option<Registration>, HandoffRefusal> {
        match self.table.get(&key.id) {
            Some(known) if known.key.generation > key.generation => {
                Err(HandoffRefusal::Superseded { handoff: key, current: known.key.generation })
            }
            known => Ok(known.copied().filter(|known| known.key == key)),
        }
    }

    fn source(&self, key: HandoffKey) -> Result<Option<(Registration, SourceState)>, HandoffRefusal> {
        match self.find(key)? {
            Some(known) => match known.side {
                HandoffSide::Source(state) => Ok(Some((known, state))),
                _ => Err(HandoffRefusal::NotASource(key)),
            },
            None => Ok(None),
        }
    }

    fn destination(&self, key: HandoffKey) -> Result<Option<(Registration, DestinationState)>, HandoffRefusal> {
        match self.find(key)? {
            Some(known) => match known.side {
                HandoffSide::Destination(state) => Ok(Some((known, state))),
                _ => Err(HandoffRefusal::NotADestination(key)),
            },
            None => Ok(None),
        }
    }

    fn set(&mut self, registration: Registration, side: HandoffSide) {
        self.table.insert(registration.key.id, Registration { side, ..registration });
    }

    /// Whether a submission is in order; an id that is taken is refused after that.
    pub(crate) fn may_submit(&self, key: HandoffKey) -> Result<(), HandoffRefusal> {
        match self.find(key)? {
            Some(_) => Err(HandoffRefusal::AlreadySubmitted(key)),
            None => Ok(()),
        }
    }

    pub(crate) fn submit(&mut self, key: HandoffKey, sequence: SequenceId, side: HandoffSide, party: Party) {
        if let Some(earlier) = self.table.remove(&key.id) {
            self.supersede(earlier);
        }
        self.parties.insert(sequence, party);
        self.table.insert(key.id, Registration { key, sequence, side });
    }

    fn supersede(&mut self, Registration { key, sequence, side }: Registration) {
        match side {
            HandoffSide::Source(_) => {
                self.source_ended(key, sequence, SourceEnd::Superseded);
                self.holds.remove(&sequence);
            }
            // It has told its end, and waits for its deadline alone.
            HandoffSide::Destination(DestinationState::Guarded) => {
                self.holds.get_mut(&sequence).expect("a guard").key = None;
            }
            HandoffSide::Destination(state) => {
                self.destination_ended(key, sequence, DestinationEnd::Superseded);
                if state == DestinationState::Reserved {
                    self.hold(sequence, None, false);
                }
                if state != DestinationState::Active {
                    self.ends.push((sequence, FinishReason::Cancelled));
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn hold(&mut self, sequence: SequenceId, key: Option<HandoffKey>, is_source: bool) {
        let stays = if is_source { self.rules.lease } else { self.rules.guard };
        self.holds.insert(sequence, Hold { until: self.now + stays, key, is_source });
    }

    /// The transfer of a destination is over. What it left behind is so, too.
    fn end_transfer(&mut self, key: HandoffKey) -> Result<Option<Registration>, HandoffRefusal> {
        let (known, state) = self.destination(key)?.ok_or(HandoffRefusal::NoDestination(key))?;
        match state {
            DestinationState::Waiting => Err(HandoffRefusal::NotReserved(key)),
            DestinationState::Active => Err(HandoffRefusal::AlreadyActive(key)),
            DestinationState::Reserved => {
                self.set(known, HandoffSide::Destination(DestinationState::Active));
                Ok(Some(known))
            }
            _ => {
                self.forget(known);
                Ok(None)
            }
        }
    }

    fn forget(&mut self, known: Registration) {
        self.table.remove(&known.key.id);
        self.holds.remove(&known.sequence);
    }

    pub(crate) fn activate(&mut self, key: HandoffKey, first_token: Option<u32>) -> Answer {
        let Some(known) = self.end_transfer(key)? else { return Ok(Applied::HandoffOver) };
        if let Some(token) = first_token.filter(|_| self.rules.carries_over) {
            let party = self.parties.get_mut(&known.sequence).expect("a party");
            party.answer[0] = token;
            if party.answer.len() == 1 {
                self.end_destination(known, DestinationEnd::Finished, FinishReason::Length);
            }
        }
        Ok(Applied::Handoff)
    }

    pub(crate) fn fail(&mut self, key: HandoffKey, valid_tokens: u32) -> Answer {
        let Some(known) = self.end_transfer(key)? else { return Ok(Applied::HandoffOver) };
        let missing = valid_tokens < self.parties[&known.sequence].prompt_tokens;
        if missing && self.rules.failure == LoadFailurePolicy::Fail {
            self.end_destination(known, DestinationEnd::TransferFailed, FinishReason::TransferFailed);
        }
        Ok(Applied::Handoff)
    }

    /// Ends the request of a destination, whose reader is told.
    fn end_destination(&mut self, known: Registration, end: DestinationEnd, finish: FinishReason) {
        self.table.remove(&known.key.id);
        self.destination_ended(known.key, known.sequence, end);
        self.ends.push((known.sequence, finish));
    }

    pub(crate) fn release(&mut self, key: HandoffKey) -> Answer {
        match self.source(key)? {
            None => Ok(Applied::HandoffOver),
            Some((_, SourceState::Prefilling)) => Err(HandoffRefusal::NotHeld(key)),
            Some((known, _)) => {
                self.forget(known);
                self.source_ended(key, known.sequence, SourceEnd::Released);
                Ok(Applied::Handoff)
            }
        }
    }

    pub(crate) fn cancel_source(&mut self, key: HandoffKey) -> Answer {
        let Some((known, state)) = self.source(key)? else { return Ok(Applied::HandoffOver) };
        self.forget(known);
        self.source_ended(key, known.sequence, SourceEnd::Cancelled);
        if state == SourceState::Prefilling {
            self.ends.push((known.sequence, FinishReason::Cancelled));
        }
        Ok(Applied::Handoff)
    }

    pub(crate) fn cancel_destination(&mut self, key: HandoffKey) -> Answer {
        match self.destination(key)? {
            None => Ok(Applied::HandoffOver),
            Some((known, DestinationState::Guarded)) => {
                self.forget(known);
                Ok(Applied::HandoffOver)
            }
            Some((known, _)) => {
                self.end_destination(known, DestinationEnd::Cancelled, FinishReason::Cancelled);
                Ok(Applied::Handoff)
            }
        }
    }

    pub(crate) fn heartbeat(&mut self, key: HandoffKey) -> Answer {
        let Some((known, state)) = self.source(key)? else { return Ok(Applied::HandoffOver) };
        if state == SourceState::Held {
            let hold = self.holds.get_mut(&known.sequence).expect("a held source");
            // vLLM's lease: two thirds of it ahead, and never less than it has.
            hold.until = hold.until.max(self.now + self.rules.lease * 2 / 3);
        }
        Ok(Applied::Handoff)
    }

    /// The client gives up its request, which has not ended.
    pub(crate) fn cancelled(&mut self, sequence: SequenceId) {
        let Some(known) = self.of(sequence) else { return };
        match known.side {
            HandoffSide::Source(_) => {
                self.forget(known);
                self.source_ended(known.key, sequence, SourceEnd::Cancelled);
            }
            HandoffSide::Destination(state) => {
                self.destination_ended(known.key, sequence, DestinationEnd::Cancelled);
                if state == DestinationState::Reserved {
                    // Its transfer may still write there.
                    self.set(known, HandoffSide::Destination(DestinationState::Guarded));
                    self.hold(sequence, Some(known.key), false);
                } else {
                    self.forget(known);
                }
            }
            other => panic!("{other:?}"),
        }
    }

    /// A destination got its blocks, of which so many tokens were in its own cache.
    pub(crate) fn granted(&mut self, sequence: SequenceId, local_tokens: u32) {
        let Some(known) = self.of(sequence) else { return };
        assert_eq!(known.side, HandoffSide::Destination(DestinationState::Waiting), "{known:?} has its blocks");
        self.set(known, HandoffSide::Destination(DestinationState::Reserved));
        let prompt_tokens = self.parties[&sequence].prompt_tokens;
        // The last one is computed again: where it alone is missing, nothing need be moved.
        let missing = prompt_tokens - local_tokens;
        let fact = HandoffFact::DestinationReserved {
            handoff: known.key,
            sequence,
            at: self.now,
            prompt_tokens,
            transferable_prompt_tokens: if missing <= 1 { 0 } else { missing },
        };
        self.facts.push(fact);
    }

    /// A request was admitted for the first time.
    pub(crate) fn admitted(&mut self, sequence: SequenceId, cached_tokens: u32) {
        if let Some(party) = self.parties.get_mut(&sequence) {
            party.cached_tokens = cached_tokens;
        }
    }

    /// A request has its last token, at `now`.
    pub(crate) fn finished(&mut self, sequence: SequenceId, now: EngineTime) {
        self.now = now;
        let Some(known) = self.of(sequence) else { return };
        match known.side {
            HandoffSide::Source(SourceState::Prefilling) => {
                self.set(known, HandoffSide::Source(SourceState::Held));
                self.hold(sequence, Some(known.key), true);
                let party = &self.parties[&sequence];
                self.facts.push(HandoffFact::SourceHeld {
                    handoff: known.key,
                    sequence,
                    at: now,
                    prompt_tokens: party.prompt_tokens,
                    cached_tokens: party.cached_tokens,
                    first_token: party.answer[0],
                    expires_at: now + self.rules.lease,
                });
            }
            HandoffSide::Destination(DestinationState::Active) => {
                self.table.remove(&known.key.id);
                self.destination_ended(known.key, sequence, DestinationEnd::Finished);
            }
            side => panic!("{sequence} finishes as {side:?}"),
        }
    }
}
