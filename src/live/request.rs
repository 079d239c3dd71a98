//! The two halves of one request in the hands of a caller: the registration, to be submitted, and
//! the stream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::live::error::CancelError;
use crate::live::lanes::CancelEntry;
use crate::live::route::{Route, Routes, Taken};
use crate::live::signal::OutputSignal;
use crate::live::sync::others_may_go;
use crate::output::FinishReason;
use crate::request::Request;
use crate::seeded_bug::seeded_bug;

/// A registered request that has not been submitted.
///
/// Dropping it ends the paired stream with [`FinishReason::Cancelled`] and frees the client id.
#[must_use = "dropping a registration cancels its request"]
#[derive(Debug)]
pub struct LiveRequestRegistration {
    pub(super) route: Arc<Route>,
    pub(super) routes: Arc<Routes>,
    pub(super) request: Request,
}

impl LiveRequestRegistration {
    /// The client id.
    #[must_use]
    pub fn id(&self) -> Uuid {
        self.route.client_id
    }

    /// The request.
    #[must_use]
    pub fn request(&self) -> &Request {
        &self.request
    }
}

impl Drop for LiveRequestRegistration {
    fn drop(&mut self) {
        self.routes.end_unscheduled(&self.route);
    }
}

/// The output stream of one request: its tokens in order, one terminal signal that says why it
/// ended, then `None`.
///
/// Dropping it before its end cancels the request in the background. It does not keep the engine
/// alive. It is also a [`futures_core::Stream`].
#[must_use = "dropping a stream cancels its request"]
#[derive(Debug)]
pub struct LiveRequest {
    route: Arc<Route>,
    /// The route's own, nearer at hand.
    client_id: Uuid,
    cancels: mpsc::UnboundedSender<CancelEntry>,
    finish: Option<FinishReason>,
}

impl LiveRequest {
    pub(super) fn new(route: Arc<Route>, cancels: mpsc::UnboundedSender<CancelEntry>) -> Self {
        Self { client_id: route.client_id, route, cancels, finish: None }
    }

    /// The client id: the caller's, or the one the engine made.
    #[must_use]
    pub fn id(&self) -> Uuid {
        self.client_id
    }

    /// Why the request ended; `None` until the terminal signal was received.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// The next signal; `None` after the terminal one.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses no signal.
    pub async fn recv(&mut self) -> Option<OutputSignal> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<OutputSignal>> {
        if self.finish.is_some() {
            return Poll::Ready(None);
        }
        // A reader that always finds a signal still lets other tasks run.
        let coop = ready!(tokio::task::coop::poll_proceed(context));
        let Taken { signal, made_room } = ready!(self.route.poll_take(self.client_id, context));
        coop.made_progress();
        self.finish = signal.finish;
        if made_room && !seeded_bug!(RoomIsNotTold) {
            // A closed lane: the engine has stopped and will end this stream.
            drop(self.cancels.send(CancelEntry::MadeRoom(Arc::clone(&self.route))));
        }
        Poll::Ready(Some(signal))
    }

    /// Cancels the request; tokens that are queued stay readable, then comes the terminal signal.
    ///
    /// The answer is [`crate::LiveEngine::cancel`]'s.
    ///
    /// # Errors
    /// None today.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo the cancel.
    pub async fn cancel(&self) -> Result<bool, CancelError> {
        cancel(&self.cancels, Arc::clone(&self.route)).await
    }
}

/// Stops forwarding, then waits for the scheduler's answer.
pub(super) async fn cancel(
    cancels: &mpsc::UnboundedSender<CancelEntry>,
    route: Arc<Route>,
) -> Result<bool, CancelError> {
    route.mute();
    let (reply, answer) = oneshot::channel();
    others_may_go();
    // A closed lane or a dropped reply: the engine has stopped, so this call removed nothing.
    drop(cancels.send(CancelEntry::Cancel { route, reply }));
    Ok(answer.await.unwrap_or(false))
}

impl futures_core::Stream for LiveRequest {
    type Item = OutputSignal;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<OutputSignal>> {
        self.get_mut().poll_recv(context)
    }
}

impl Drop for LiveRequest {
    fn drop(&mut self) {
        if self.finish.is_none() && self.route.abandon() && !seeded_bug!(DropDoesNotCancel) {
            others_may_go();
            // A closed lane: the engine has stopped and ends every route itself.
            drop(self.cancels.send(CancelEntry::Dropped(Arc::clone(&self.route))));
        }
    }
}
