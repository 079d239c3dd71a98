//! Routes: the live side of each request.
//!
//! A route is registered before its request enters a lane and ends exactly once. What must hold:
//! 1. The terminal signal has a place of its own in the stream, so the end can always be delivered. Who
//!    claims the end first delivers it, once.
//! 2. A route leaves the map before its terminal signal can be read: a reader that has seen the end
//!    finds the client id free.
//! 3. The lock of a stream is held to put one signal in or take one out, never across an await, nor
//!    while another lock is taken or a task is woken. So nobody waits for it longer than that.
//! 4. After the stop cause is set and [`Routes::end_all`] has run, no route is left: a registration
//!    that comes later sees the cause after it has entered the map, and takes itself out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use rustc_hash::FxBuildHasher;
use uuid::Uuid;

use crate::live::OutputBuffering;
use crate::live::clock::Clock;
use crate::live::error::{StopCause, Stopped, SubmitError};
use crate::live::signal::OutputSignal;
use crate::live::stop::Stop;
use crate::live::stream::{Forwarded, Life, Stream, Token};
use crate::live::sync::{Mutex, MutexGuard, others_may_go, touch};
use crate::output::{FinishReason, mix};
use crate::request::SequenceId;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

/// The live side of one request. Aligned, so that what a token touches is one cache line: see [`Stream`].
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Route {
    stream: Mutex<Stream>,
    pub(super) client_id: Uuid,
    pub(super) sequence: SequenceId,
}

/// How far a route was when it was ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndedFrom {
    Prepared,
    Scheduled,
}

/// A signal that was read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Taken {
    pub(super) signal: OutputSignal,
    /// The queue was full and has room now: the scheduler must be told.
    pub(super) made_room: bool,
}

impl Route {
    fn stream(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the processor fetch what a token touches. The answer means nothing.
    pub(super) fn touch(&self) -> bool {
        touch(&self.stream)
    }

    /// Stops forwarding at once.
    pub(super) fn mute(&self) {
        self.stream().muted = true;
    }

    pub(super) fn is_muted(&self) -> bool {
        self.stream().muted
    }

    /// The scheduler is about to take the request; `false` if it was cancelled, dropped or ended.
    pub(super) fn begin_scheduling(&self) -> bool {
        let mut stream = self.stream();
        let begins = stream.life == Life::Prepared && !stream.muted;
        if begins {
            stream.life = Life::Scheduled;
        }
        begins
    }

    /// The scheduler refused the request: the registration is as it was.
    pub(super) fn back_to_prepared(&self) {
        let mut stream = self.stream();
        if stream.life == Life::Scheduled {
            stream.life = Life::Prepared;
        }
    }

    /// Whether it is still prepared, and no cancel is on its way.
    fn is_unscheduled(&self) -> bool {
        let stream = self.stream();
        stream.life == Life::Prepared && !stream.muted
    }

    /// Whether it has not ended, and no cancel is on its way.
    pub(super) fn goes_on(&self) -> bool {
        let stream = self.stream();
        stream.life != Life::Ended && !stream.muted
    }

    /// The reader goes; `false` if the route had ended, so that nothing is left to cancel.
    pub(super) fn abandon(&self) -> bool {
        let mut stream = self.stream();
        let forgotten = seeded_bug!(ForgetsDroppedSubmits) && stream.life == Life::Prepared;
        let active = stream.life != Life::Ended && !forgotten;
        stream.muted |= active;
        let reader = stream.reader.take();
        drop((stream, reader));
        active
    }

    /// Whether the queue has room for one more token.
    pub(super) fn has_room(&self) -> bool {
        self.stream().has_room()
    }

    /// Puts a token into the queue.
    pub(super) fn forward(&self, token: Token) -> Forwarded {
        let mut stream = self.stream();
        let forwarded = stream.push(token);
        wake(stream);
        forwarded
    }

    /// Whether the queue is full and throttles, and nobody has read since.
    pub(super) fn is_full(&self) -> bool {
        self.stream().full
    }

    /// Takes the next signal out, or has the reader woken for it. `client_id` is this route's own: the
    /// reader has it nearer.
    pub(super) fn poll_take(&self, client_id: Uuid, context: &mut Context<'_>) -> Poll<Taken> {
        let mut stream = self.stream();
        match stream.pop(client_id) {
            Some(signal) => {
                let made_room = std::mem::take(&mut stream.full) && signal.finish.is_none();
                Poll::Ready(Taken { signal, made_room })
            }
            None => {
                let earlier = stream.reader.replace(context.waker().clone());
                // The last waker of a task may drop that task, and with it another stream.
                drop((stream, earlier));
                Poll::Pending
            }
        }
    }

    /// Claims the end of the route. `None`: somebody else ended it before.
    fn claim_end(&self) -> Option<EndedFrom> {
        match std::mem::replace(&mut self.stream().life, Life::Ended) {
            Life::Prepared => Some(EndedFrom::Prepared),
            Life::Scheduled => Some(EndedFrom::Scheduled),
            Life::Ended => None,
        }
    }

    /// Puts the terminal signal into its place, for whoever has claimed the end.
    fn deliver_end(&self, terminal: OutputSignal) {
        let mut stream = self.stream();
        stream.push_end(terminal);
        wake(stream);
    }
}

/// Wakes the reader, if it waits, after the lock is given back: a woken task may run at once.
fn wake(mut stream: MutexGuard<'_, Stream>) {
    let reader = stream.reader.take();
    drop(stream);
    if let Some(reader) = reader {
        reader.wake();
    }
}

/// All routes of one engine.
#[derive(Debug)]
pub(super) struct Routes {
    map: DashMap<Uuid, Arc<Route>, FxBuildHasher>,
    next_sequence: AtomicU64,
    /// How many client ids the engine has made.
    ids_made: AtomicU64,
    seed: u64,
    clock: Clock,
    stop: Arc<Stop>,
}

impl Routes {
    pub(super) fn new(seed: u64, clock: Clock, stop: Arc<Stop>) -> Self {
        Self {
            map: DashMap::default(),
            next_sequence: AtomicU64::new(0),
            ids_made: AtomicU64::new(0),
            seed,
            clock,
            stop,
        }
    }

    /// Engine time now.
    pub(super) fn now(&self) -> EngineTime {
        self.clock.now()
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    pub(super) fn get(&self, client_id: Uuid) -> Option<Arc<Route>> {
        self.map.get(&client_id).map(|route| Arc::clone(&route))
    }

    /// Registers a route. `capacity`: unread signals that may wait, the terminal one not counted.
    pub(super) fn register(
        &self,
        client_id: Option<Uuid>,
        buffering: OutputBuffering,
        capacity: usize,
    ) -> Result<Arc<Route>, SubmitError> {
        let client_id = client_id.unwrap_or_else(|| self.made_client_id());
        let early = seeded_bug!(LooksForTheStopTooEarly).then(|| self.stop.cause());
        others_may_go();
        let route = match self.map.entry(client_id) {
            Entry::Occupied(_) => return Err(SubmitError::DuplicateId(client_id)),
            Entry::Vacant(vacant) => {
                // Only now: what is refused leaves no gap.
                let sequence = SequenceId(self.next_sequence.fetch_add(1, Ordering::Relaxed));
                let stream = Mutex::new(Stream::new(buffering, capacity));
                Arc::clone(&vacant.insert(Arc::new(Route { stream, client_id, sequence })))
            }
        };
        // Only now: see invariant 4.
        others_may_go();
        if let Some(cause) = early.unwrap_or_else(|| self.stop.cause()) {
            self.end(&route, cause.finish(), None);
            return Err(Stopped { cause: cause.clone() }.into());
        }
        Ok(route)
    }

    /// A client id from the seed and a counter, in the form of a random (version 4) UUID.
    fn made_client_id(&self) -> Uuid {
        let stream = mix(mix(self.seed) ^ self.ids_made.fetch_add(1, Ordering::Relaxed));
        let bits = (u128::from(stream) << 64) | u128::from(mix(stream ^ 0x9E37_79B9_7F4A_7C15));
        uuid::Builder::from_random_bytes(bits.to_be_bytes()).into_uuid()
    }

    /// Ends a route with a reason that no pass produced. `None`: it had ended before.
    pub(super) fn end(&self, route: &Route, finish: FinishReason, at: Option<EngineTime>) -> Option<EndedFrom> {
        let at = at.unwrap_or_else(|| self.clock.now());
        self.end_with(
            route,
            OutputSignal {
                request_id: route.client_id,
                token_id: None,
                finish: Some(finish),
                cached_tokens: None,
                produced_at: at,
                observed_at: at,
            },
        )
    }

    /// Ends a route with this terminal signal. `None`: it had ended before.
    pub(super) fn end_with(&self, route: &Route, terminal: OutputSignal) -> Option<EndedFrom> {
        debug_assert!(terminal.finish.is_some(), "a terminal signal says why");
        let from = route.claim_end()?;
        if seeded_bug!(EndIsReadBeforeTheIdIsFree) {
            route.deliver_end(terminal);
        }
        others_may_go();
        self.map.remove_if(&route.client_id, |_, active| active.sequence == route.sequence);
        others_may_go();
        if !seeded_bug!(EndIsReadBeforeTheIdIsFree) {
            route.deliver_end(terminal);
        }
        Some(from)
    }

    /// Ends a route whose registration was dropped before the scheduler took it.
    pub(super) fn end_unscheduled(&self, route: &Route) {
        // Only the holder of the registration, who is here, makes it scheduled: no race. A muted route
        // has an entry in the cancellation lane, which ends it and is owed the answer.
        if route.is_unscheduled() {
            self.end(route, self.stop.cause().map_or(FinishReason::Cancelled, StopCause::finish), None);
        }
    }

    /// Ends every route with the stop cause, in sequence order.
    pub(super) fn end_all(&self) {
        let finish = self.stop.cause().map_or(FinishReason::EngineStopped, StopCause::finish);
        let mut routes: Vec<Arc<Route>> = self.map.iter().map(|entry| Arc::clone(&entry)).collect();
        if !seeded_bug!(StopsInMapOrder) {
            routes.sort_unstable_by_key(|route| route.sequence);
        }
        if seeded_bug!(ForgetsPreparedAtTheStop) {
            routes.retain(|route| !route.is_unscheduled());
        }
        let now = self.clock.now();
        for route in routes {
            self.end(&route, finish, Some(now));
        }
    }
}
