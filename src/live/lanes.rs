//! What travels between the handles, the scheduler actor and the event dispatcher.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::unconstrained;

use crate::config::SchedulingState;
use crate::handoff::HandoffKey;
use crate::live::error::{StopCause, Stopped, SubmitError};
use crate::live::handoff::HandoffCommand;
use crate::live::request::LiveRequestRegistration;
use crate::live::route::Route;
use crate::live::sync::others_may_go;
use crate::request::SequenceId;
use crate::scheduler::{Admitted, Effects};
use crate::time::EngineTime;

/// Places in the command lane. A sender that finds it full waits; the actor empties it every turn.
/// Handoff commands need none, so that one that was polled once is in the lane, in order; there is one
/// for each call that waits for an answer.
const COMMAND_LANE: usize = 1024;

/// Messages of one lane that the actor takes in one turn: enough that a burst of submits is one
/// turn, few enough that a flood delays the end of a pass by well under a tick of Tokio's timer.
pub(super) const LANE_TURN: usize = 256;

/// The receiving end of a lane. Its drop loses no message: a sender may have seen it open and be
/// about to push, and a message that stayed in a closed channel would owe its answer for ever.
#[derive(Debug)]
pub(super) struct Lane<T>(mpsc::UnboundedReceiver<T>);

impl<T> Lane<T> {
    pub(super) fn new() -> (mpsc::UnboundedSender<T>, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (sender, Self(receiver))
    }

    /// The next message. Cancel safe.
    pub(super) async fn recv(&mut self) -> Option<T> {
        self.0.recv().await
    }

    /// The next message that is there.
    pub(super) fn try_recv(&mut self) -> Option<T> {
        self.0.try_recv().ok()
    }
}

impl<T> Drop for Lane<T> {
    fn drop(&mut self) {
        self.0.close();
        loop {
            let next = pin!(unconstrained(self.0.recv())).poll(&mut Context::from_waker(Waker::noop()));
            match next {
                Poll::Ready(Some(message)) => drop(message),
                Poll::Ready(None) => return,
                // Between the look and the push of a sender lie a few instructions.
                Poll::Pending => std::thread::yield_now(),
            }
        }
    }
}

/// The sending end of the command lane. Its places are counted beside the channel: a bounded channel
/// cannot be emptied for good while somebody holds a place and does not use it.
#[derive(Debug, Clone)]
pub(super) struct CommandSender {
    places: Arc<Semaphore>,
    lane: mpsc::UnboundedSender<Placed>,
}

/// A command in its place.
#[derive(Debug)]
struct Placed {
    command: LaneCommand,
    _place: Option<OwnedSemaphorePermit>,
}

impl CommandSender {
    /// Sends a command, when there is a place. One that finds the lane closed is dropped, and answers
    /// in its drop.
    pub(super) async fn send(&self, command: LaneCommand) {
        others_may_go();
        if let Ok(place) = Arc::clone(&self.places).acquire_owned().await {
            drop(self.lane.send(Placed { command, _place: Some(place) }));
        }
    }

    /// Sends a command without a place. One that finds the lane closed is dropped, and answers in its drop.
    pub(super) fn send_at_once(&self, command: LaneCommand) {
        others_may_go();
        drop(self.lane.send(Placed { command, _place: None }));
    }
}

/// The receiving end of the command lane.
#[derive(Debug)]
pub(super) struct CommandLane {
    places: Arc<Semaphore>,
    lane: Lane<Placed>,
}

impl CommandLane {
    pub(super) fn new() -> (CommandSender, Self) {
        let places = Arc::new(Semaphore::new(COMMAND_LANE));
        let (sender, lane) = Lane::new();
        (CommandSender { places: Arc::clone(&places), lane: sender }, Self { places, lane })
    }

    /// The next command, whose place is free then. Cancel safe.
    pub(super) async fn recv(&mut self) -> Option<LaneCommand> {
        self.lane.recv().await.map(|placed| placed.command)
    }

    /// The next command that is there.
    pub(super) fn try_recv(&mut self) -> Option<LaneCommand> {
        self.lane.try_recv().map(|placed| placed.command)
    }
}

impl Drop for CommandLane {
    fn drop(&mut self) {
        // Those that wait for a place; the lane's own drop sees to those that have one.
        self.places.close();
    }
}

/// What the command lane carries.
#[derive(Debug)]
pub(super) enum LaneCommand {
    Submit(SubmitCommand),
    Handoff(HandoffCommand),
    ResetPrefixCache(oneshot::Sender<bool>),
    SetScheduling(SchedulingState, oneshot::Sender<bool>),
}

/// A submission that owes an answer: its drop gives the registration back to whoever waits.
#[derive(Debug)]
pub(super) struct SubmitCommand {
    pub(super) sent_at: EngineTime,
    /// Its prompt counts as transferred.
    pub(super) decode_only: bool,
    owed: Option<(LiveRequestRegistration, oneshot::Sender<SubmitReply>)>,
}

pub(super) type SubmitReply = Result<(), (LiveRequestRegistration, SubmitError)>;

impl SubmitCommand {
    pub(super) fn new(
        sent_at: EngineTime,
        decode_only: bool,
        registration: LiveRequestRegistration,
        reply: oneshot::Sender<SubmitReply>,
    ) -> Self {
        Self { sent_at, decode_only, owed: Some((registration, reply)) }
    }

    /// The registration, until it is answered.
    pub(super) fn registration(&self) -> Option<&LiveRequestRegistration> {
        self.owed.as_ref().map(|(registration, _)| registration)
    }

    /// Answers. Where nobody waits any more the drop of the stream has left an entry in the
    /// cancellation lane.
    pub(super) fn answer(mut self, answer: Result<(), SubmitError>) {
        if let Some((registration, reply)) = self.owed.take() {
            drop(reply.send(answer.map_err(|error| (registration, error))));
        }
    }
}

impl Drop for SubmitCommand {
    fn drop(&mut self) {
        if let Some((registration, reply)) = self.owed.take() {
            // The receiver knows the true cause; it waits for it.
            let error = SubmitError::Stopped(Stopped { cause: StopCause::RuntimeShutdown });
            // Nobody waits any more: the registration is dropped here and ends its stream.
            drop(reply.send(Err((registration, error))));
        }
    }
}

/// What the cancellation lane carries. Unbounded by type, bounded by construction: one entry per
/// dropped stream or control, one per waiting `cancel`, one per throttled stream that was read.
#[derive(Debug)]
pub(super) enum CancelEntry {
    /// A `cancel` that waits for its answer.
    Cancel { route: Arc<Route>, reply: oneshot::Sender<bool> },
    /// A stream was dropped before its end.
    Dropped(Arc<Route>),
    /// The reader of a full throttled stream made room.
    MadeRoom(Arc<Route>),
    /// The last control of a handoff was dropped.
    Uncontrolled(HandoffKey),
}

/// A change to the dispatcher's table of streams. It travels ahead of the outputs it concerns.
#[derive(Debug)]
pub(super) enum RouteChange {
    Opened(Arc<Route>),
    Closed(SequenceId),
}

/// One batch for the dispatcher. It comes back as the verdict, its buffers empty, where it has
/// effects.
///
/// That bounds both lanes: at most two batches are under way, the admissions of a pass that has begun and
/// the effects of its end, and one verdict. The actor sends no third before it has the verdict.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Route changes, oldest first.
    pub(super) changes: Vec<RouteChange>,
    /// First admissions of a pass that has begun.
    pub(super) admitted: Vec<Admitted>,
    /// When it began.
    pub(super) admitted_at: EngineTime,
    /// What became visible at a boundary.
    pub(super) effects: Option<Box<Effects>>,
    /// Answers to commands, due when it is visible.
    pub(super) answers: Vec<(oneshot::Sender<bool>, bool)>,
    /// Handoff commands that are done, likewise.
    pub(super) done: Vec<HandoffCommand>,
    /// Verdict: routes whose queue overflowed; their streams have ended, their sequences have not.
    pub(super) overflowed: Vec<Arc<Route>>,
    /// Verdict: throttled routes whose queue is full.
    pub(super) filled: Vec<Arc<Route>>,
}

impl Batch {
    /// Gives the answers.
    pub(super) fn answer(&mut self) {
        for (reply, answer) in self.answers.drain(..) {
            // An error: its caller has gone.
            let _: Result<(), bool> = reply.send(answer);
        }
        for command in self.done.drain(..) {
            command.answer(Ok(()));
        }
    }
}
