//! A link that the transfers of live handoffs share.

use std::sync::{Arc, Mutex, PoisonError};

use rustc_hash::FxHashSet;
use tokio::sync::Notify;

use crate::handoff::{Link, LinkSharing, TransferCost, TransferId};
use crate::live::clock::Clock;
use crate::time::EngineTime;

/// One link between engines, for all handoffs that are to share it. Cloning gives another handle on the
/// same link; the default does not divide its bandwidth.
#[derive(Debug, Clone)]
pub struct LiveLink {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Clock,
    /// Held for a few operations, never across an await.
    state: Mutex<State>,
    /// A transfer joined or left: the others end at another time.
    moved: Notify,
}

#[derive(Debug)]
struct State {
    link: Link,
    /// Whoever looks at the link sees the end of all transfers; each waits for its own.
    finished: FxHashSet<TransferId>,
}

impl Default for LiveLink {
    fn default() -> Self {
        Self::new(LinkSharing::Unshared)
    }
}

impl LiveLink {
    /// An idle link. Its time begins now, on Tokio's clock.
    #[must_use]
    pub fn new(sharing: LinkSharing) -> Self {
        let state = State { link: Link::new(sharing), finished: FxHashSet::default() };
        let shared = Shared { clock: Clock::new(None), state: Mutex::new(state), moved: Notify::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Transfers that are under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.look(|state| state.link.in_flight())
    }

    /// Resolves when a transfer of this cost, which begins with the first poll, has ended; Tokio's timers round
    /// that up to a millisecond.
    ///
    /// # Cancel safety
    /// Dropping the future takes the transfer off the link.
    pub async fn transfer(&self, cost: TransferCost) {
        let id = self.look(|state| state.link.start(cost, self.shared.clock.now()));
        self.shared.moved.notify_waiters();
        let _on_the_link = OnTheLink { link: self, id };
        loop {
            // Registered before the look, so that no move in between is missed.
            let moved = self.shared.moved.notified();
            let Some(end) = self.look(|state| state.expected_end(id)) else { return };
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(self.shared.clock.instant(end)) => {}
                () = moved => {}
            }
        }
    }

    fn look<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.advance(self.shared.clock);
        look(&mut state)
    }
}

impl State {
    fn advance(&mut self, clock: Clock) {
        self.link.advance(clock.now());
        while let Some((id, _)) = self.link.poll_finished() {
            self.finished.insert(id);
        }
    }

    /// When the transfer ends as things are; `None`: it has.
    fn expected_end(&mut self, id: TransferId) -> Option<EngineTime> {
        // One that would take longer than time lasts has not ended either.
        let expected = |link: &Link| link.expected_finish(id).unwrap_or(EngineTime::MAX);
        if self.finished.remove(&id) { None } else { Some(expected(&self.link)) }
    }
}

/// A transfer that leaves the link when it is dropped before its end.
struct OnTheLink<'a> {
    link: &'a LiveLink,
    id: TransferId,
}

impl Drop for OnTheLink<'_> {
    fn drop(&mut self) {
        let under_way = self.link.look(|state| {
            state.finished.remove(&self.id);
            state.link.abort(self.id, self.link.shared.clock.now())
        });
        if under_way {
            self.link.shared.moved.notify_waiters();
        }
    }
}
