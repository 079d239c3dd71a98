//! One handoff between two live engines, as one stream.
//!
//! The stream drives the coordinator when it is polled: there is no task per handoff. Its drop cleans up
//! both sides through their cancellation lanes: it drops both controls and both requests.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use crate::error::ConfigError;
use crate::handoff::{
    ActionOutcome, ActionTarget, Coordinator, CoordinatorAction as Action, CoordinatorConfig, CoordinatorFact as Fact,
    FaultRates, Faults, FirstToken, HandoffFailure, HandoffOutcome, IssuedAction,
};
use crate::live::clock::Clock;
use crate::live::handoff::{LiveHandoffSide, LiveLink};
use crate::live::request::LiveRequest;
use crate::live::route::Route;
use crate::live::signal::OutputSignal;
use crate::output::FinishReason;
use crate::time::EngineTime;

/// The output of a request that one engine prefills and another decodes. One stream with one end, as
/// [`LiveRequest`]; it must be polled for the handoff to go on.
///
/// It is also a [`futures_core::Stream`].
#[must_use = "dropping the stream cancels the request on both engines"]
pub struct LiveHandoffStream {
    driver: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    destination: LiveRequest,
    carried_over: mpsc::Receiver<OutputSignal>,
    /// The signal that was read from there.
    carried: Option<OutputSignal>,
    /// Set before the destination is cancelled for it.
    failure: Arc<OnceLock<HandoffFailure>>,
    progress: watch::Receiver<Progress>,
}

/// What is known of a handoff from outside.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    transfer: Option<Duration>,
    outcome: Option<HandoffOutcome>,
}

impl std::fmt::Debug for LiveHandoffStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveHandoffStream")
            .field("destination", &self.destination)
            .field("outcome", &self.outcome())
            .finish_non_exhaustive()
    }
}

impl LiveHandoffStream {
    pub(super) fn driven_by(mut self, driver: Driver) -> Self {
        self.driver = Some(Box::pin(driver.run()));
        self
    }

    /// The client id, on both engines, and the handoff's.
    #[must_use]
    pub fn id(&self) -> Uuid {
        self.destination.id()
    }

    /// How the handoff ended; `None` while it goes on, which it may do for a while after the terminal signal.
    #[must_use]
    pub fn outcome(&self) -> Option<HandoffOutcome> {
        self.progress.borrow().outcome
    }

    /// How long the transfer of the KV took, in engine time; `None` while it has not ended, and where there was none.
    #[must_use]
    pub fn transfer_time(&self) -> Option<Duration> {
        self.progress.borrow().transfer
    }

    /// Why the request ended; `None` until the terminal signal was received.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.destination.finish_reason().map(|reason| self.explain(reason))
    }

    /// The next signal; `None` after the terminal one, when both sides are cleaned up. Where the handoff fails,
    /// the terminal signal is [`FinishReason::TransferFailed`] and [`LiveHandoffStream::outcome`] says why then.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses no signal.
    pub async fn recv(&mut self) -> Option<OutputSignal> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<OutputSignal>> {
        if let Some(driver) = &mut self.driver
            && driver.as_mut().poll(context).is_ready()
        {
            self.driver = None;
        }
        // Before whatever the destination has: it goes on after this token. It may have ended by itself, too.
        if self.destination.finish_reason().is_none()
            && let Ok(signal) = self.carried_over.try_recv()
        {
            self.carried = Some(signal);
            return Poll::Ready(Some(signal));
        }
        match ready!(futures_core::Stream::poll_next(Pin::new(&mut self.destination), context)) {
            Some(signal) => {
                let finish = signal.finish.map(|reason| self.explain(reason));
                // Only the first token says it, and no later one is earlier: an engine that catches up with its
                // modelled timeline may begin a pass a tick before it is told to go on.
                let carried = self.carried.as_ref();
                let cached_tokens =
                    signal.cached_tokens.filter(|_| carried.is_none_or(|it| it.cached_tokens.is_none()));
                let produced_at = carried.map_or(signal.produced_at, |it| it.produced_at.max(signal.produced_at));
                Poll::Ready(Some(OutputSignal { finish, cached_tokens, produced_at, ..signal }))
            }
            None if self.driver.is_none() => Poll::Ready(None),
            // The driver has the waker.
            None => Poll::Pending,
        }
    }

    /// A destination that was cancelled because its handoff failed says so.
    fn explain(&self, reason: FinishReason) -> FinishReason {
        match reason {
            FinishReason::Cancelled if self.failure.get().is_some() => FinishReason::TransferFailed,
            _ => reason,
        }
    }
}

impl futures_core::Stream for LiveHandoffStream {
    type Item = OutputSignal;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<OutputSignal>> {
        self.get_mut().poll_recv(context)
    }
}

/// What one handoff is made of.
pub(super) struct Parts {
    pub(super) source: LiveHandoffSide,
    pub(super) source_stream: LiveRequest,
    pub(super) destination: LiveHandoffSide,
    pub(super) destination_stream: LiveRequest,
    pub(super) destination_route: Arc<Route>,
    pub(super) link: LiveLink,
    pub(super) clock: Clock,
}

/// Carries facts and actions to and fro between the coordinator and the two sides.
pub(super) struct Driver {
    coordinator: Coordinator,
    faults: Option<Faults>,
    clock: Clock,
    source: LiveHandoffSide,
    source_stream: LiveRequest,
    destination: LiveHandoffSide,
    destination_route: Arc<Route>,
    /// Where the source's token goes, if it is carried over.
    first_token: Option<mpsc::Sender<OutputSignal>>,
    link: LiveLink,
    transfer: Option<Transfer>,
    failure: Arc<OnceLock<HandoffFailure>>,
    progress: watch::Sender<Progress>,
}

/// A transfer under way.
struct Transfer {
    began: EngineTime,
    ends: Pin<Box<dyn Future<Output = ()> + Send>>,
}

enum Happened {
    Fact(Fact),
    Transferred,
    Due,
}

impl Driver {
    pub(super) fn new(
        config: CoordinatorConfig,
        faults: Option<(FaultRates, u64)>,
        parts: Parts,
    ) -> Result<(Self, LiveHandoffStream), ConfigError> {
        let (id, now) = (parts.source.handoff_id(), parts.clock.now());
        let faults = faults.map(|(rates, seed)| Faults::new(rates, seed, id, now)).transpose()?;
        let (first_token, carried_over) = mpsc::channel(1);
        let (progress, progress_receiver) = watch::channel(Progress::default());
        let failure = Arc::new(OnceLock::new());
        let stream = LiveHandoffStream {
            driver: None,
            destination: parts.destination_stream,
            carried_over,
            carried: None,
            failure: Arc::clone(&failure),
            progress: progress_receiver,
        };
        let driver = Self {
            first_token: (config.first_token == FirstToken::CarriedOver).then_some(first_token),
            coordinator: Coordinator::new(id, config, now)?,
            faults,
            clock: parts.clock,
            source: parts.source,
            source_stream: parts.source_stream,
            destination: parts.destination,
            destination_route: parts.destination_route,
            link: parts.link,
            transfer: None,
            failure,
            progress,
        };
        Ok((driver, stream))
    }

    async fn run(mut self) {
        while self.coordinator.outcome().is_none() {
            match self.next().await {
                Happened::Fact(fact) => self.tell(fact),
                Happened::Transferred => self.transferred(),
                Happened::Due => {}
            }
            self.act().await;
        }
    }

    async fn next(&mut self) -> Happened {
        let due = self.next_due();
        tokio::select! {
            biased;
            fact = self.source.fact() => Happened::Fact(fact),
            fact = self.destination.fact() => Happened::Fact(fact),
            () = pending_or(self.transfer.as_mut().map(|transfer| &mut transfer.ends)) => Happened::Transferred,
            () = tokio::time::sleep_until(self.clock.instant(due.unwrap_or_default())), if due.is_some() => Happened::Due,
        }
    }

    fn next_due(&self) -> Option<EngineTime> {
        let faults = self.faults.as_ref().and_then(Faults::next_deadline);
        self.coordinator.next_deadline().into_iter().chain(faults).min()
    }

    fn transferred(&mut self) {
        if let Some(transfer) = self.transfer.take() {
            let took = self.clock.now().saturating_since(transfer.began);
            self.progress.send_modify(|progress| progress.transfer = Some(took));
        }
        self.tell(Fact::TransferCompleted);
    }

    /// Hands the source's token to the reader, if it is carried over: the destination goes on after it.
    async fn carry_over(&mut self, token: u32, produced_at: EngineTime) {
        let Some(carry) = self.first_token.take() else { return };
        // The source was held, so its stream has ended, perhaps by a cancel that came too late for the token.
        let source = self.source_stream.recv().await;
        let signal = OutputSignal {
            request_id: self.source_stream.id(),
            token_id: Some(token),
            finish: None,
            cached_tokens: source.and_then(|signal| signal.cached_tokens),
            produced_at,
            observed_at: self.clock.now(),
        };
        // The place is for it alone; where nobody reads any more it is lost with the stream.
        let _: Result<(), mpsc::error::TrySendError<OutputSignal>> = carry.try_send(signal);
    }

    /// A fact on its way to the coordinator.
    fn tell(&mut self, fact: Fact) {
        let now = self.clock.now();
        match &mut self.faults {
            Some(faults) => faults.push(fact, now),
            None => self.coordinator.apply(fact, now),
        }
    }

    /// Brings the coordinator up to now and carries out what it asks for, until it asks for nothing.
    pub(super) async fn act(&mut self) {
        loop {
            let now = self.clock.now();
            while let Some(fact) = self.faults.as_mut().and_then(|faults| faults.poll(now)) {
                self.coordinator.apply(fact, now);
            }
            while self.coordinator.next_deadline().is_some_and(|deadline| deadline <= now) {
                self.coordinator.tick(now);
            }
            let Some(issued) = self.coordinator.poll_action() else { return };
            self.carry_out(issued).await;
        }
    }

    async fn carry_out(&mut self, IssuedAction { id, action }: IssuedAction) {
        match action {
            Action::StartTransfer { cost: Some(cost), .. } => {
                let (began, link) = (self.clock.now(), self.link.clone());
                self.transfer = Some(Transfer { began, ends: Box::pin(async move { link.transfer(cost).await }) });
            }
            Action::StartTransfer { cost: None, .. } => self.transferred(),
            Action::RecomputeDestination => self.transfer = None,
            Action::CancelDestination { failure, .. } => {
                self.transfer = None;
                // Whoever has ended the request himself is told nothing else.
                if self.destination_route.goes_on() {
                    let _: Result<(), HandoffFailure> = self.failure.set(failure);
                }
            }
            Action::Complete(outcome) => self.progress.send_modify(|progress| progress.outcome = Some(outcome)),
            _ => {}
        }
        let asked_at = self.clock.now();
        let outcome = match action.target() {
            ActionTarget::Source => self.source.carry_out(action).await,
            ActionTarget::Destination => self.destination.carry_out(action).await,
            ActionTarget::Link => ActionOutcome::Done,
            ActionTarget::Owner => return,
        };
        if let (Action::ActivateDestination { first_token: Some(token) }, ActionOutcome::Done) = (action, outcome) {
            self.carry_over(token, asked_at).await;
        }
        self.tell(Fact::Outcome { action: id, outcome });
    }
}

/// Waits for what is there; for ever if nothing is.
async fn pending_or<F: Future<Output = ()>>(future: Option<F>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
