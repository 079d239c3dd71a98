//! Which handoffs are registered, at which generation, and who is told about them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use rustc_hash::FxBuildHasher;
use tokio::sync::mpsc;

use crate::handoff::{HandoffId, HandoffKey, TransferTiming};
use crate::live::error::{HandoffError, Stopped};
use crate::live::handoff::LiveHandoffEvent;
use crate::live::stop::Stop;
use crate::live::sync::others_may_go;
use crate::scheduler::HandoffFact;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

/// Facts that the scheduler tells of one registration: that its blocks are there, and its end.
const FACTS: usize = 2;

/// The registrations of one engine.
#[derive(Debug)]
pub(in crate::live) struct Handoffs {
    map: DashMap<HandoffId, Registration, FxBuildHasher>,
    last_generation: AtomicU64,
    /// What a transfer from this engine costs; the prompt's tokens are filled in.
    timing: TransferTiming,
    stop: Arc<Stop>,
}

/// It stays until nobody listens and no answer is owed.
#[derive(Debug)]
struct Registration {
    generation: u64,
    /// Commands that have not been answered.
    owed: u32,
    /// The scheduler has taken a request under it: its last fact will come, and ends the events.
    has_request: bool,
    /// When the pass ended, or will end, that computed the first tokens of a source.
    first_chunk_end: Option<EngineTime>,
    /// Where facts go; `None` after the last one, or when nobody listens any more.
    events: Option<mpsc::Sender<LiveHandoffEvent>>,
}

impl Registration {
    fn new(generation: u64, events: Option<mpsc::Sender<LiveHandoffEvent>>) -> Self {
        Self { generation, owed: 0, has_request: false, first_chunk_end: None, events }
    }
}

impl Handoffs {
    pub(in crate::live) fn new(timing: TransferTiming, stop: Arc<Stop>) -> Self {
        Self { map: DashMap::default(), last_generation: AtomicU64::new(0), timing, stop }
    }

    /// Registers a handoff.
    pub(in crate::live) fn register(
        &self,
        id: HandoffId,
    ) -> Result<(HandoffKey, mpsc::Receiver<LiveHandoffEvent>), HandoffError> {
        let (sender, receiver) = mpsc::channel(FACTS);
        let step = if seeded_bug!(GenerationNotBumped) { 0 } else { 1 };
        let key = match self.map.entry(id) {
            Entry::Occupied(entry) if entry.get().events.is_some() => return Err(HandoffError::AlreadyRegistered(id)),
            Entry::Occupied(_) => return Err(HandoffError::AnswerOwed(id)),
            Entry::Vacant(vacant) => {
                let generation = self.last_generation.fetch_add(step, Ordering::Relaxed) + 1;
                drop(vacant.insert(Registration::new(generation, Some(sender))));
                HandoffKey { id, generation }
            }
        };
        // Only now: whoever stops the engine sets the cause first and sweeps second.
        if let Some(cause) = self.stop.cause() {
            self.close(key);
            return Err(Stopped { cause: cause.clone() }.into());
        }
        Ok((key, receiver))
    }

    /// A command is about to be sent; [`Handoffs::answered`] is due. `submits`: it brings a request along, and
    /// somebody must listen.
    pub(in crate::live) fn owe(&self, key: HandoffKey, submits: bool) -> Result<(), HandoffError> {
        others_may_go();
        let mut registration = match self.map.entry(key.id) {
            Entry::Occupied(entry) if entry.get().generation != key.generation => return Err(HandoffError::Superseded),
            Entry::Occupied(entry) if submits && entry.get().events.is_none() => return Err(self.events_gone()),
            Entry::Vacant(_) if submits => return Err(self.events_gone()),
            Entry::Occupied(entry) => entry.into_ref(),
            Entry::Vacant(vacant) => vacant.insert(Registration::new(key.generation, None)),
        };
        registration.owed += 1;
        Ok(())
    }

    /// Why there are no events under a registration that nobody has superseded.
    fn events_gone(&self) -> HandoffError {
        let stopped = self.stop.cause().map(|cause| Stopped { cause: cause.clone() }.into());
        stopped.unwrap_or(HandoffError::EventsDropped)
    }

    /// A command is answered.
    pub(in crate::live) fn answered(&self, key: HandoffKey) {
        self.change(key, |registration| registration.owed -= 1);
    }

    /// The scheduler has taken a request under the registration.
    pub(in crate::live) fn note_request(&self, key: HandoffKey) {
        self.change(key, |registration| registration.has_request = true);
    }

    /// The first pass with tokens of a source has begun.
    pub(in crate::live) fn note_first_chunk(&self, key: HandoffKey, ends_at: EngineTime) {
        self.change(key, |registration| registration.first_chunk_end = Some(ends_at));
    }

    /// Tells a fact; `false` if nobody listens.
    pub(in crate::live) fn tell(&self, fact: &HandoffFact) -> bool {
        let mut told = false;
        self.change(fact.handoff(), |registration| {
            let event = LiveHandoffEvent::of(fact, self.timing, registration.first_chunk_end);
            // There is room for every fact of one registration.
            told = registration.events.as_ref().is_some_and(|events| events.try_send(event).is_ok());
            if fact.is_last() {
                registration.events = None;
            }
        });
        told
    }

    /// Nobody can submit under the registration any more: its events end, unless facts will still be told.
    pub(in crate::live) fn close_unused(&self, key: HandoffKey) {
        self.change(key, |registration| {
            if !registration.has_request {
                registration.events = None;
            }
        });
    }

    /// Nobody listens any more.
    pub(in crate::live) fn close(&self, key: HandoffKey) {
        self.change(key, |registration| registration.events = None);
    }

    /// The engine has stopped: every stream of events ends.
    pub(in crate::live) fn close_all(&self) {
        self.map.retain(|_, registration| {
            registration.events = None;
            registration.owed > 0
        });
    }

    fn change(&self, key: HandoffKey, change: impl FnOnce(&mut Registration)) {
        others_may_go();
        if let Entry::Occupied(mut entry) = self.map.entry(key.id)
            && entry.get().generation == key.generation
        {
            change(entry.get_mut());
            if entry.get().owed == 0 && entry.get().events.is_none() {
                entry.remove();
            }
        }
    }
}
