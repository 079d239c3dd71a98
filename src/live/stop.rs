//! How an engine ends: one cause, stored once, given to everybody who waits for it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use crate::live::error::StopCause;
use crate::live::handoff::Handoffs;
use crate::live::route::Routes;
use crate::live::sync::others_may_go;

/// The stop signal of one engine and its cause.
#[derive(Debug, Default)]
pub(super) struct Stop {
    cause: OnceLock<StopCause>,
    token: CancellationToken,
}

impl Stop {
    /// Stops the engine; the first cause stays.
    pub(super) fn request(&self, cause: StopCause) {
        others_may_go();
        if self.cause.set(cause).is_ok()
            && let Some(cause) = self.cause.get()
        {
            match cause {
                StopCause::Failed { .. } => tracing::error!(%cause, "engine failed"),
                _ => tracing::info!(%cause, "engine stopping"),
            }
        }
        others_may_go();
        self.token.cancel();
    }

    /// Why the engine stopped, if it did.
    pub(super) fn cause(&self) -> Option<&StopCause> {
        self.cause.get()
    }

    /// Resolves when the engine is told to stop. For tasks that look at it in every turn.
    pub(super) fn requested(&self) -> StopRequested<'_> {
        StopRequested { stop: self, cancelled: Box::pin(self.token.cancelled()), registered: None }
    }

    /// Waits for the cause.
    pub(super) async fn wait(&self) -> StopCause {
        self.token.cancelled().await;
        // The cause is set before the token is cancelled.
        self.cause.get().cloned().unwrap_or(StopCause::RuntimeShutdown)
    }

    /// Runs one synchronous step of a task; a panic in it stops the engine and gives `None`.
    ///
    /// All code of callers (sinks, timing models, prompt sources) runs in such steps, so the cause is
    /// known before anything is dropped by the unwinding.
    pub(super) fn guard<T>(&self, task: &'static str, step: impl FnOnce() -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(value) => Some(value),
            Err(payload) => {
                self.request(StopCause::Failed { task, message: panic_message(&*payload) });
                None
            }
        }
    }
}

/// The stop signal as a future. A look costs one load: it takes the token's lock only where another task
/// than before would have to be woken.
pub(super) struct StopRequested<'a> {
    stop: &'a Stop,
    cancelled: Pin<Box<WaitForCancellationFuture<'a>>>,
    registered: Option<Waker>,
}

impl Future for StopRequested<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.stop.cause().is_some() {
            return Poll::Ready(());
        }
        // The cause is set before the token is cancelled, so that a waker that is registered is woken.
        if this.registered.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            return Poll::Pending;
        }
        this.registered = Some(context.waker().clone());
        this.cancelled.as_mut().poll(context)
    }
}

/// Waits for the tasks of an engine; whatever ends them, the routes that are left end with the cause.
pub(super) async fn supervise(sweep: Sweep, mut actor: JoinHandle<()>, mut dispatcher: JoinHandle<()>) {
    tokio::select! {
        biased;
        ended = &mut actor => {
            sweep.observe("scheduler actor", ended);
            sweep.observe("event dispatcher", dispatcher.await);
        }
        ended = &mut dispatcher => {
            sweep.observe("event dispatcher", ended);
            sweep.observe("scheduler actor", actor.await);
        }
    }
}

/// Ends every route when it is dropped. The supervisor is given it, and does not make it, because the
/// runtime may be dropped while that waits, or before it ever ran.
pub(super) struct Sweep {
    stop: Arc<Stop>,
    routes: Arc<Routes>,
    handoffs: Arc<Handoffs>,
}

impl Sweep {
    pub(super) fn new(stop: Arc<Stop>, routes: Arc<Routes>, handoffs: Arc<Handoffs>) -> Self {
        Self { stop, routes, handoffs }
    }

    /// A task of the engine has ended; unless it was told to, that stops the engine.
    fn observe(&self, task: &'static str, ended: Result<(), JoinError>) {
        let message = match ended.map_err(JoinError::try_into_panic) {
            Err(Ok(payload)) => panic_message(&*payload),
            Err(Err(_cancelled)) => return self.stop.request(StopCause::RuntimeShutdown),
            Ok(()) if self.stop.cause().is_some() => return,
            Ok(()) => "it ended by itself".into(),
        };
        self.stop.request(StopCause::Failed { task, message });
    }
}

impl Drop for Sweep {
    fn drop(&mut self) {
        self.stop.request(StopCause::RuntimeShutdown);
        self.routes.end_all();
        self.handoffs.close_all();
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> Arc<str> {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message").into()
}
