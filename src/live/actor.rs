//! The scheduler actor: owns the scheduler, keeps the modelled timeline, serves the lanes.
//!
//! One turn, in a fixed order: the end of the pass or the dispatcher's verdict, cancels, commands;
//! then it settles or plans. It waits for no reader, and for the dispatcher only with both lanes open.
//!
//! 1. A pass that follows another begins where that one was modelled to end (r40). Where the engine
//!    was idle it begins at its cause: the arrival of the first request, or now.
//! 2. No pass is planned before the dispatcher has taken the last boundary's batch apart (r29), nor
//!    while the output gate is closed (r33).
//! 3. A command is answered at once if a pass is in flight or begins. Else what it changed is shown
//!    first: the answer travels with the batch that shows it (r31).

use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Sleep;

use crate::live::clock::Clock;
use crate::live::error::{StopCause, SubmitError};
use crate::live::handoff::{Handoffs, Registrations};
use crate::live::lanes::{Batch, CancelEntry, CommandLane, LANE_TURN, Lane, LaneCommand, RouteChange, SubmitCommand};
use crate::live::route::{EndedFrom, Route, Routes};
use crate::live::stop::{Stop, StopRequested};
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::{Applied, Cancelled, Command, Effects, Pass, Scheduler, Submission};
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

#[cfg(all(test, standin_shuttle))]
mod interleavings_test;

/// Name of the task in failures.
pub(super) const TASK: &str = "scheduler actor";

pub(super) struct Actor {
    pub(super) scheduler: Scheduler,
    pub(super) clock: Clock,
    pub(super) stop: Arc<Stop>,
    pub(super) routes: Arc<Routes>,
    pub(super) handoffs: Arc<Handoffs>,
    pub(super) registrations: Registrations,
    pub(super) commands: CommandLane,
    pub(super) cancels: Lane<CancelEntry>,
    pub(super) batches: mpsc::UnboundedSender<Box<Batch>>,
    pub(super) verdicts: mpsc::UnboundedReceiver<Box<Batch>>,
    pub(super) gate: Option<watch::Receiver<bool>>,
    /// The gate was closed when the actor last looked.
    pub(super) gate_closed: bool,
    /// Somebody wants to see admissions when a pass begins.
    pub(super) shows_admissions: bool,
    pub(super) max_model_len: u32,
    pub(super) phase: Phase,
    pub(super) timer_set_for: Option<EngineTime>,
    /// No pass begins before: the end of the last pass, of the start-up, or the last change on an idle engine.
    pub(super) free_at: EngineTime,
    /// When planning was last tried: what was due by then has been.
    pub(super) planned_at: EngineTime,
    pub(super) boundary: Boundary,
    /// Requests for no output that have not arrived yet, or that the gate holds. The scheduler takes none.
    pub(super) no_output: Vec<(EngineTime, Arc<Route>)>,
    /// Cancels of sequences that take part in one more pass: answered when they have ended.
    pub(super) ending: Vec<(SequenceId, oneshot::Sender<bool>)>,
    /// The batch that is being filled.
    pub(super) batch: Box<Batch>,
    /// The one that came back last, empty.
    pub(super) spare_batch: Option<Box<Batch>>,
}

#[derive(Debug)]
pub(super) enum Phase {
    /// Nothing is in flight.
    Idle,
    /// A pass is; it ends at its modelled end, or later if the gate is closed then.
    InFlight(Box<Pass>),
    /// The dispatcher has the effects of a boundary.
    Dispatching,
}

impl Phase {
    /// Whether an open gate would let something begin or end now.
    fn waits_for_gate(&self, now: EngineTime) -> bool {
        match self {
            Self::Idle => true,
            Self::InFlight(pass) => pass.ends_at() <= now,
            Self::Dispatching => false,
        }
    }
}

/// What the caller of a cancel is told.
enum CancelAnswer {
    /// Whether this call removed the request.
    Now(bool),
    /// This call removes it, at the end of a pass.
    WhenEnded,
}

/// What the next plan follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Boundary {
    /// The end of a pass, at `free_at`.
    PassEnd,
    /// Something else: a command, an arrival, a reader.
    Event,
}

enum Wake {
    Stopped,
    Timer,
    Verdict(Box<Batch>),
    Cancel(CancelEntry),
    Command(LaneCommand),
    GateMoved,
    GateDropped,
}

impl Actor {
    pub(super) async fn run(mut self) {
        let stop = Arc::clone(&self.stop);
        // A runtime without time panics here, and stops the engine.
        let Some(mut timer) =
            stop.guard(TASK, || Box::pin(tokio::time::sleep_until(self.clock.instant(EngineTime::ZERO))))
        else {
            return;
        };
        let mut stopped = stop.requested();
        loop {
            match self.next_wake(timer.as_mut(), &mut stopped).await {
                Wake::Stopped => return,
                wake => {
                    let Some(()) = stop.guard(TASK, || self.turn(wake)) else { return };
                }
            }
        }
    }

    /// Waits for what comes next, the most urgent first.
    async fn next_wake(&mut self, mut timer: Pin<&mut Sleep>, stopped: &mut StopRequested<'_>) -> Wake {
        self.watch_gate();
        let due = self.next_due();
        if let Some(due) = due {
            let is_due = (due <= self.planned_at || due <= self.clock.now()) && !seeded_bug!(OneDuePassATick);
            if is_due && self.stop.cause().is_none() {
                // Without a trip through the timer. It cannot spin: what follows a due pass is a wait
                // for the dispatcher, and an idle engine is due once.
                return Wake::Timer;
            }
            if self.timer_set_for != Some(due) || timer.is_elapsed() {
                timer.as_mut().reset(self.clock.timer(due));
                self.timer_set_for = Some(due);
            }
        }
        tokio::select! {
            biased;
            () = stopped => Wake::Stopped,
            () = timer, if due.is_some() => Wake::Timer,
            verdict = self.verdicts.recv() => verdict.map_or(Wake::Stopped, Wake::Verdict),
            Some(entry) = self.cancels.recv(), if self.hears_cancels() => Wake::Cancel(entry),
            Some(command) = self.commands.recv() => Wake::Command(command),
            alive = gate_moved(self.gate.as_mut()) => if alive { Wake::GateMoved } else { Wake::GateDropped },
        }
    }

    /// Whether it looks at the cancellation lane: always.
    fn hears_cancels(&self) -> bool {
        !(seeded_bug!(CancelsWaitForTheBoundary) && matches!(self.phase, Phase::InFlight(_)))
    }

    /// The next cancel that is there.
    fn next_cancel(&mut self) -> Option<CancelEntry> {
        let passed_over = seeded_bug!(ReadsTheLanesAtRandom) && RandomState::new().hash_one(()).is_multiple_of(2);
        if passed_over || !self.hears_cancels() { None } else { self.cancels.try_recv() }
    }

    /// When to act although nothing arrives.
    fn next_due(&self) -> Option<EngineTime> {
        if self.gate_closed {
            return None;
        }
        let without_output = self.no_output.iter().map(|(arrival, _)| *arrival).min();
        let next = self.next_boundary();
        next.into_iter().chain(without_output).min()
    }

    /// When a pass ends or may begin although nothing arrives.
    fn next_boundary(&self) -> Option<EngineTime> {
        match &self.phase {
            Phase::Dispatching => None,
            Phase::InFlight(pass) => Some(pass.ends_at()),
            Phase::Idle => {
                // Not what is due after now: time goes by between two looks at the clock.
                let arrival = self.scheduler.next_deadline().map(|arrival| arrival.max(self.free_at));
                arrival.into_iter().chain([self.free_at]).filter(|due| *due > self.planned_at).min()
            }
        }
    }

    /// A gate that has opened: what it held goes on from now, not from where it was stopped.
    fn watch_gate(&mut self) {
        let closed = self.gate.as_ref().is_some_and(|gate| !*gate.borrow());
        let was_closed = std::mem::replace(&mut self.gate_closed, closed);
        if was_closed && !self.gate_closed {
            let now = self.clock.now();
            if self.phase.waits_for_gate(now) {
                self.free_at = self.free_at.max(now);
            }
        }
    }

    /// One turn: what woke the actor, then the lanes, then the next boundary.
    fn turn(&mut self, wake: Wake) {
        self.watch_gate();
        self.end_due_pass();
        match wake {
            Wake::Cancel(entry) => self.serve_cancel(entry),
            Wake::Command(command) => self.serve_command(command),
            Wake::GateDropped => return self.stop.request(StopCause::OutputGateDropped),
            Wake::Verdict(verdict) => self.take_verdict(verdict),
            Wake::Timer | Wake::GateMoved | Wake::Stopped => {}
        }
        for _ in 0..LANE_TURN {
            let Some(entry) = self.next_cancel() else { break };
            self.serve_cancel(entry);
        }
        for _ in 0..LANE_TURN {
            let Some(command) = self.commands.try_recv() else { break };
            self.serve_command(command);
        }
        self.end_without_output();
        if matches!(self.phase, Phase::Idle) {
            self.plan();
        }
        if !self.shows_soon() {
            self.batch.answer();
        }
    }

    /// Whether what has changed so far is about to be shown, in no engine time.
    fn shows_soon(&self) -> bool {
        match &self.phase {
            Phase::Idle => false,
            Phase::InFlight(pass) => pass.is_empty() && !self.gate_closed,
            Phase::Dispatching => true,
        }
    }

    fn end_due_pass(&mut self) {
        if self.gate_closed {
            return;
        }
        let Phase::InFlight(pass) = &self.phase else { return };
        let ends_at = pass.ends_at();
        // A pass that takes no time was due when it was planned: no need to look at the clock again.
        let now = if ends_at <= self.planned_at { self.planned_at } else { self.clock.now() };
        if ends_at <= now
            && let Phase::InFlight(pass) = std::mem::replace(&mut self.phase, Phase::Idle)
        {
            self.end_pass(pass, now);
        }
    }

    fn end_pass(&mut self, pass: Box<Pass>, now: EngineTime) {
        let ends_at = pass.ends_at();
        // A pass that takes no time ends when it is carried out: it must not hold the timeline back. One
        // that computes nothing is no part of the timeline.
        let takes_no_time = pass.duration().is_zero() && !pass.is_empty();
        let timeline = if takes_no_time || seeded_bug!(AnchorsAtWakeUp) { now.max(ends_at) } else { ends_at };
        // `free_at` is later where the gate held the pass.
        self.free_at = self.free_at.max(timeline);
        self.boundary = Boundary::PassEnd;
        let effects = self.scheduler.finish_pass_boxed(pass, ends_at);
        self.show(effects);
    }

    /// Hands the batch to the dispatcher; nothing is planned before its verdict.
    fn send_batch(&mut self) {
        let batch = std::mem::replace(&mut self.batch, self.spare_batch.take().unwrap_or_default());
        self.phase = Phase::Dispatching;
        // An error: the dispatcher has ended, and so the engine stops.
        drop(self.batches.send(batch));
    }

    fn take_verdict(&mut self, mut verdict: Box<Batch>) {
        for route in verdict.overflowed.drain(..) {
            // Removed from the dispatcher's table already. Unknown: that pass was its last.
            let _: Cancelled = self.scheduler.cancel(route.sequence, self.clock.now());
        }
        for route in verdict.filled.drain(..) {
            // Unless its reader has taken something since.
            if route.is_full() {
                self.throttle(&route, true);
            }
        }
        if let Some(effects) = verdict.effects.take() {
            self.scheduler.recycle_boxed(effects);
        }
        self.spare_batch = Some(verdict);
        self.phase = Phase::Idle;
    }

    fn throttle(&mut self, route: &Route, throttled: bool) {
        // Refused where the sequence has ended meanwhile.
        drop(self.scheduler.apply(Command::Throttle { sequence: route.sequence, throttled }, self.clock.now()));
    }

    /// Something other than a submission changed what can run: on an idle engine, not before now. At the
    /// end of a pass the timeline goes on, however late that is carried out.
    pub(super) fn note_change(&mut self) {
        if matches!(self.phase, Phase::Idle) && self.boundary == Boundary::Event {
            self.free_at = self.free_at.max(self.clock.now());
        }
    }

    fn serve_cancel(&mut self, entry: CancelEntry) {
        match entry {
            CancelEntry::Cancel { route, reply } => match self.cancel(&route) {
                CancelAnswer::Now(removed) => self.batch.answers.push((reply, removed)),
                CancelAnswer::WhenEnded => self.ending.push((route.sequence, reply)),
            },
            CancelEntry::Dropped(route) => {
                self.cancel(&route);
            }
            CancelEntry::Uncontrolled(key) => self.uncontrolled(key),
            CancelEntry::MadeRoom(route) => {
                self.note_change();
                self.throttle(&route, false);
            }
        }
    }

    /// Removes a request wherever it is.
    fn cancel(&mut self, route: &Arc<Route>) -> CancelAnswer {
        self.note_change();
        let late = seeded_bug!(FreesAfterTheAnswer) && matches!(self.phase, Phase::InFlight(_));
        if late {
            self.batch.overflowed.push(Arc::clone(route));
        }
        let cancelled = if late { Cancelled::Removed } else { self.scheduler.cancel(route.sequence, self.clock.now()) };
        let forgotten = cancelled == Cancelled::Unknown && self.forget_without_output(route);
        match self.routes.end(route, FinishReason::Cancelled, None) {
            Some(EndedFrom::Prepared) => CancelAnswer::Now(true),
            Some(EndedFrom::Scheduled) => {
                self.batch.changes.push(RouteChange::Closed(route.sequence));
                match cancelled {
                    Cancelled::Removed => CancelAnswer::Now(true),
                    Cancelled::Ending => CancelAnswer::WhenEnded,
                    Cancelled::Unknown => CancelAnswer::Now(forgotten),
                }
            }
            None => CancelAnswer::Now(seeded_bug!(TwoCancelsRemove)),
        }
    }

    /// Has effects shown, and with them answered the cancels of the sequences that they end.
    fn show(&mut self, effects: Box<Effects>) {
        self.note_facts(&effects);
        if !self.ending.is_empty() {
            for output in effects.outputs.iter().filter(|output| output.finish.is_some()) {
                let ended = self.ending.extract_if(.., |(sequence, _)| *sequence == output.sequence);
                self.batch.answers.extend(ended.map(|(_, reply)| (reply, true)));
            }
        }
        self.batch.effects = Some(effects);
        self.send_batch();
    }

    fn serve_command(&mut self, command: LaneCommand) {
        match command {
            LaneCommand::Submit(submit) => self.submit(submit),
            LaneCommand::Handoff(command) => self.serve_handoff(command),
            LaneCommand::ResetPrefixCache(reply) => {
                self.note_change();
                let command = Command::ResetPrefixCache { reset_running_requests: false };
                let applied = self.scheduler.apply(command, self.clock.now());
                let reset = matches!(applied, Ok(Applied::PrefixCacheReset { reset: true, .. }));
                self.batch.answers.push((reply, reset));
            }
            LaneCommand::SetScheduling(state, reply) => {
                self.note_change();
                let applied = self.scheduler.apply(Command::SetScheduling(state), self.clock.now());
                self.batch.answers.push((reply, applied.is_ok()));
            }
        }
    }

    /// Whatever panics in here, a lazy prompt of the caller's say, the command's drop answers.
    fn submit(&mut self, submit: SubmitCommand) {
        let Some(registration) = submit.registration() else { return };
        let (route, request) = (Arc::clone(&registration.route), &registration.request);
        if !route.begin_scheduling() {
            return submit.answer(Err(SubmitError::Cancelled));
        }
        if request.output_length(self.max_model_len) == 0 {
            let arrival = request.arrival.map_or(submit.sent_at, |arrival| arrival.max(submit.sent_at));
            self.no_output.push((arrival, route));
            return submit.answer(Ok(()));
        }
        let (sequence, tie_key) = (route.sequence, route.client_id.as_u128());
        let submission = Submission { sequence, tie_key, request: request.clone() };
        let command = if submit.decode_only { Command::SubmitDecode(submission) } else { Command::Submit(submission) };
        match self.scheduler.apply(command, submit.sent_at) {
            Ok(_) => {
                self.batch.changes.push(RouteChange::Opened(route));
                submit.answer(Ok(()));
            }
            Err(refused) => {
                route.back_to_prepared();
                submit.answer(Err(refused.into()));
            }
        }
    }

    /// Ends the requests for no output that have arrived.
    fn end_without_output(&mut self) {
        if self.gate_closed || self.no_output.is_empty() {
            return;
        }
        let now = self.clock.now();
        for (_, route) in self.no_output.extract_if(.., |(arrival, _)| *arrival <= now) {
            self.routes.end(&route, FinishReason::Length, Some(now));
        }
    }

    fn forget_without_output(&mut self, route: &Route) -> bool {
        let held = self.no_output.iter().position(|(_, held)| held.sequence == route.sequence);
        held.map(|index| self.no_output.remove(index)).is_some()
    }

    /// Shows what commands did that no pass will show. That is a boundary: no pass begins before it.
    fn settle(&mut self, at: EngineTime) {
        if let Some(effects) = self.scheduler.settle_boxed(at) {
            self.free_at = self.free_at.max(at);
            self.show(effects);
        }
    }

    /// Begins the next pass, or shows what changed although there is none.
    fn plan(&mut self) {
        let now = self.clock.now();
        self.planned_at = now;
        if self.gate_closed || self.free_at > now {
            return self.settle(now);
        }
        self.boundary = Boundary::Event;
        // On the timeline, however late that is: after a pass, or for those who came while none could begin.
        if self.begin_pass(self.free_at) {
            return;
        }
        // Idle: at the cause, not at the wake-up.
        while let Some(arrival) = self.scheduler.next_deadline().filter(|arrival| *arrival <= now) {
            if self.begin_pass(arrival.max(self.free_at)) {
                return;
            }
            if self.scheduler.next_deadline() == Some(arrival) {
                break;
            }
        }
        self.settle(now);
    }

    fn begin_pass(&mut self, at: EngineTime) -> bool {
        let Some(pass) = self.scheduler.begin_pass_boxed(at) else { return false };
        if !pass.preempted().is_empty() {
            tracing::debug!(preempted = pass.preempted().len(), at = %at, "out of KV blocks");
        }
        if self.shows_admissions && !pass.admitted().is_empty() {
            let mut batch = Box::<Batch>::default();
            std::mem::swap(&mut batch.changes, &mut self.batch.changes);
            batch.admitted.extend_from_slice(pass.admitted());
            batch.admitted_at = at;
            drop(self.batches.send(batch));
        }
        self.note_first_chunks(&pass);
        self.phase = Phase::InFlight(pass);
        true
    }
}

/// Waits until the gate moves; `false` if its sender is gone. For ever where there is no gate.
async fn gate_moved(gate: Option<&mut watch::Receiver<bool>>) -> bool {
    match gate {
        Some(gate) => gate.changed().await.is_ok(),
        None => std::future::pending().await,
    }
}
