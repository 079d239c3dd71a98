//! An engine with everything connected that can be, and how a run goes.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::join_all;
use standin::timing::{PassTiming, PassWork};
use standin::{
    CancelError, EngineConfig, EngineMetrics, EngineTime, HandoffError, HandoffId, KvEventBatch, LiveEngine,
    PassMetrics, ShutdownError, StopCause,
};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::client::{self, Record};
use super::handoffs;
use super::plan::{Disturbance, End, Entry as Way, Id, Plan, Polls, Sink};
use super::trace::{Cause, Entry, ErrorLog, Trace, noting};

/// Longer than all that a run waits for by itself.
const HUNG: Duration = Duration::from_secs(100);
/// After this a client gives up on an engine that nobody lets go on.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) config: EngineConfig,
    pub(crate) trace: Arc<Trace>,
    /// The only lasting handle.
    engine: Mutex<Option<LiveEngine>>,
    gate: Mutex<Option<watch::Sender<bool>>>,
    /// Nanoseconds by which the clock was put forward.
    jumped: AtomicU64,
    /// Whatever the engine is given holds one of these.
    held: Arc<()>,
}

/// A cancel by the engine: of which id, when, and what was answered.
#[derive(Debug, Clone)]
pub(crate) struct CancelRecord {
    pub(crate) id: Uuid,
    pub(crate) called: EngineTime,
    pub(crate) answer: Option<(bool, EngineTime)>,
}

/// What came out of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) world: Arc<World>,
    pub(crate) records: Vec<Record>,
    pub(crate) cancels: Vec<CancelRecord>,
    /// What `shutdown` answered, if it was asked.
    pub(crate) shutdown: Option<Result<(), ShutdownError>>,
    pub(crate) errors: Vec<String>,
}

/// Runs a plan, on a thread of its own time.
pub(crate) fn run(plan: &Plan) -> Outcome {
    let errors = ErrorLog::default();
    let _logged = tracing::subscriber::set_default(errors.clone());
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let mut outcome = runtime.block_on(async {
        let world = Arc::new(World::new(plan.clone()));
        tokio::time::timeout(HUNG * 2, world.run()).await.expect("the run never ended")
    });
    outcome.errors = errors.take();
    outcome
}

enum Done {
    Client(Box<Record>),
    Cancels(Vec<CancelRecord>),
    Shutdown(Vec<Result<(), ShutdownError>>),
    Nothing,
}

impl World {
    fn new(plan: Plan) -> Self {
        #[expect(clippy::disallowed_methods, reason = "the caller's own clock, paused")]
        let epoch = tokio::time::Instant::now();
        let trace = Arc::new(Trace::new(epoch, plan.clients.len()));
        let config = plan.config();
        let held = Arc::new(());
        let mut builder = LiveEngine::builder(config.clone()).epoch(epoch).pass_timing(Passes {
            durations: plan.engine.passes.clone(),
            panics: plan.engine.timing_panics,
            passes: 0,
            trace: Arc::clone(&trace),
            _held: Arc::clone(&held),
        });
        if let Some(sink) = Batches::new(plan.engine.kv_sink, &trace, &held) {
            let mut sink = sink;
            builder = builder.kv_event_sink(move |batch: KvEventBatch<'_>| {
                sink.take(Entry::KvEvents(batch.at, batch.events.to_vec()))
            });
        }
        if let Some(sink) = Batches::new(plan.engine.pass_sink, &trace, &held) {
            let mut sink = sink;
            builder = builder.pass_metrics_sink(move |_, pass: &PassMetrics| sink.take(Entry::Pass(*pass)));
        }
        if plan.engine.admissions {
            let (sender, receiver) = mpsc::unbounded_channel();
            trace.observe(receiver);
            builder = builder.admissions(sender);
        }
        let gate = plan.engine.gate.then(|| watch::channel(true));
        let (gate, builder) = match gate {
            Some((sender, receiver)) => (Some(sender), builder.output_gate(receiver)),
            None => (None, builder),
        };
        let engine = builder.start().expect("a configuration that is valid");
        Self {
            plan,
            config,
            trace,
            engine: Mutex::new(Some(engine)),
            gate: Mutex::new(gate),
            jumped: AtomicU64::new(0),
            held,
        }
    }

    /// A handle on the engine, unless the last one was dropped.
    pub(crate) fn engine(&self) -> Option<LiveEngine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn now(&self) -> EngineTime {
        self.trace.now()
    }

    pub(crate) async fn at(&self, micros: u32) {
        tokio::time::sleep(EngineTime::from_nanos(u64::from(micros) * 1_000).saturating_since(self.now())).await;
    }

    /// Awaits a call that takes no engine time, or drops it after so many polls.
    pub(crate) async fn prompt<F: Future>(&self, what: &str, call: F, polls: Polls) -> Option<F::Output> {
        let (called, jumped) = (self.now(), self.jumped.load(Ordering::Relaxed));
        let output = polled(call, polls).await;
        let took = self.now().saturating_since(called);
        let by_jumps = self.jumped.load(Ordering::Relaxed) - jumped;
        assert!(took <= Duration::from_nanos(by_jumps), "{what} took {took:?}, {by_jumps} ns of it by jumps");
        output
    }

    async fn run(self: &Arc<Self>) -> Outcome {
        let mut tasks = JoinSet::new();
        let _watched = self.watch_metrics(&mut tasks);
        for (client, plan) in self.plan.clients.iter().enumerate() {
            let world = Arc::clone(self);
            let is_handoff = matches!(plan.entry, Way::Handoff(_));
            tasks.spawn(async move {
                let run = async {
                    if is_handoff { handoffs::run(&world, client).await } else { client::run(&world, client).await }
                };
                let record = tokio::time::timeout(HUNG, run).await;
                Done::Client(Box::new(record.unwrap_or_else(|_| panic!("client {client} waits for ever"))))
            });
            for &(after, polls) in &plan.cancels {
                if let Some(id) = plan.id.uuid(client) {
                    let (world, at) = (Arc::clone(self), plan.starts + after);
                    tasks.spawn(async move {
                        world.at(at).await;
                        Done::Cancels(vec![world.cancel(id, polls).await])
                    });
                }
            }
        }
        let world = Arc::clone(self);
        tasks.spawn(async move { world.disturb().await });
        let world = Arc::clone(self);
        tasks.spawn(async move { world.end(world.plan.end).await });
        self.collect(tasks).await
    }

    async fn collect(self: &Arc<Self>, mut tasks: JoinSet<Done>) -> Outcome {
        let mut outcome = Outcome {
            world: Arc::clone(self),
            records: Vec::new(),
            cancels: Vec::new(),
            shutdown: None,
            errors: Vec::new(),
        };
        let mut answers = Vec::new();
        let mut left = self.plan.clients.len();
        // The one that follows the metrics never ends.
        while left > 0 || tasks.len() > 1 {
            let Some(ended) = tasks.join_next().await else { break };
            match ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic())) {
                Done::Client(record) => {
                    outcome.records.push(*record);
                    left -= 1;
                }
                Done::Cancels(cancels) => outcome.cancels.extend(cancels),
                Done::Shutdown(results) => answers.extend(results),
                Done::Nothing => {}
            }
        }
        self.finale(&mut answers).await;
        tasks.shutdown().await;
        turns().await;
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 0, "a task is left");
        assert_eq!(Arc::strong_count(&self.held), 1, "the engine holds on to what it was given");
        outcome.records.sort_by_key(|record| record.client);
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "all get one answer: {answers:?}");
        outcome.shutdown = answers.pop();
        outcome
    }

    /// Every client has gone: nothing is left, and the engine ends cleanly.
    async fn finale(&self, answers: &mut Vec<Result<(), ShutdownError>>) {
        turns().await;
        let Some(engine) = self.engine() else { return };
        assert_eq!(engine.active_request_count(), 0, "a route is left");
        // Longer than the pass in flight, the leases and the guards.
        tokio::time::sleep(Duration::from_millis(100)).await;
        turns().await;
        let (free, handoffs) = (self.is_let_go_on(), engine.register_handoff(HandoffId(Uuid::nil())));
        if free && handoffs.is_ok() {
            let EngineMetrics { num_requests_running, num_requests_waiting, num_requests_held, .. } = shown(&engine);
            assert_eq!((num_requests_running, num_requests_waiting, num_requests_held), (0, 0, 0), "requests are left");
            let EngineMetrics { num_used_blocks, num_held_blocks, num_reserved_blocks, .. } = shown(&engine);
            assert_eq!((num_used_blocks, num_held_blocks, num_reserved_blocks), (0, 0, 0), "blocks are left");
        }
        for n in 0..8 {
            match engine.register_handoff(handoffs::id(n)) {
                Ok(registered) => drop(registered),
                Err(error) => assert!(matches!(error, HandoffError::Stopped(_)), "{error}"),
            }
        }
        drop(handoffs);
        turns().await;
        self.note_end(Cause::Shutdown);
        answers.push(engine.shutdown().await);
        self.assert_stopped(&engine).await;
        drop(engine);
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Whether the engine is held by nothing now: not by its gate, not by the scheduling state.
    fn is_let_go_on(&self) -> bool {
        !self.plan.may_stall()
    }

    /// What `shutdown` promises.
    async fn assert_stopped(&self, engine: &LiveEngine) {
        assert_eq!(engine.active_request_count(), 0, "a route is left after the shutdown");
        assert_eq!(Arc::strong_count(&self.held), 1, "a sink is left after the shutdown");
        let refused = engine.prepare_request(standin::Request::new(vec![1], 1)).map(drop);
        assert!(matches!(refused, Err(standin::SubmitError::Stopped(_))), "{refused:?}");
        assert_eq!(engine.cancel(Uuid::nil()).await, Ok(false));
    }

    /// Awaits a cancel. It takes no engine time either, unless the request is to take part in one more pass, which
    /// under a closed gate may never come.
    pub(crate) async fn cancelled<F>(&self, what: &str, call: F, polls: Polls) -> Option<bool>
    where
        F: Future<Output = Result<bool, CancelError>>,
    {
        let answer = if self.plan.aborts_late() {
            tokio::time::timeout(PATIENCE, polled(call, polls)).await.ok().flatten()
        } else {
            self.prompt(what, call, polls).await
        };
        answer.map(|removed| removed.expect("a cancel never fails"))
    }

    pub(crate) async fn cancel(&self, id: Uuid, polls: Polls) -> CancelRecord {
        let called = self.now();
        let Some(engine) = self.engine() else { return CancelRecord { id, called, answer: None } };
        let answer = self.cancelled("cancel", engine.cancel(id), polls).await.map(|removed| (removed, self.now()));
        self.trace.say(format!("cancel of {id}: {answer:?}"));
        CancelRecord { id, called, answer }
    }

    /// One after the other, so that it is known how the engine is left.
    async fn disturb(&self) -> Done {
        let mut others = self.plan.others.clone();
        others.sort_by_key(|(at, _)| *at);
        let mut cancels = Vec::new();
        for (at, other) in others {
            self.at(at).await;
            cancels.extend(self.disturb_by(other).await);
        }
        Done::Cancels(cancels)
    }

    async fn disturb_by(&self, other: Disturbance) -> Vec<CancelRecord> {
        let Some(engine) = self.engine() else { return Vec::new() };
        self.trace.say(format!("{other:?}"));
        match other {
            Disturbance::Jump(micros) => {
                let jump = Duration::from_micros(micros.into());
                self.trace.note(Entry::Jump(jump.as_nanos() as u64));
                self.jumped.fetch_add(jump.as_nanos() as u64, Ordering::Relaxed);
                tokio::time::advance(jump).await;
            }
            Disturbance::CancelAll(polls) => {
                let ids = (0..self.plan.clients.len()).filter_map(|client| Id::Own.uuid(client));
                let ids = ids.chain((0..4).filter_map(|n| Id::Shared(n).uuid(0)));
                drop(engine);
                return join_all(ids.map(|id| self.cancel(id, polls))).await;
            }
            Disturbance::Reset(polls) => {
                let answer = self.prompt("a reset", engine.reset_prefix_cache(), polls).await;
                self.trace.say(format!("reset: {answer:?}"));
            }
            Disturbance::Scheduling(state, polls) => {
                let answer = self.prompt("the scheduling state", engine.set_scheduling(state), polls).await;
                self.trace.say(format!("{state:?}: {answer:?}"));
            }
            Disturbance::Gate(open) => {
                if let Some(gate) = &*self.gate.lock().unwrap_or_else(PoisonError::into_inner) {
                    gate.send_replace(open);
                }
            }
        }
        Vec::new()
    }

    pub(crate) fn note_end(&self, cause: Cause) {
        self.trace.note(Entry::Ends(cause));
    }

    async fn end(&self, end: End) -> Done {
        match end {
            End::Natural => {}
            End::Shutdown(at, polls) => {
                self.at(at).await;
                let Some(engine) = self.engine() else { return Done::Nothing };
                if polls == Some(0) {
                    return Done::Nothing;
                }
                self.note_end(Cause::Shutdown);
                let Some(first) = self.prompt("shutdown", engine.shutdown(), polls).await else { return Done::Nothing };
                self.assert_stopped(&engine).await;
                let again = join_all([engine.shutdown(), engine.shutdown()]).await;
                return Done::Shutdown(again.into_iter().chain([first]).collect());
            }
            End::DropHandle(at) => {
                self.at(at).await;
                self.note_end(Cause::HandleDropped);
                let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
                drop(engine);
            }
            End::CloseAdmissions(at) => {
                self.at(at).await;
                if self.plan.engine.admissions {
                    self.trace.close_admissions();
                }
            }
            End::DropGate(at) => {
                self.at(at).await;
                let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner).take();
                if gate.is_some() {
                    self.note_end(Cause::GateDropped);
                }
                drop(gate);
            }
        }
        Done::Nothing
    }

    /// Notes all metrics that are shown.
    fn watch_metrics(self: &Arc<Self>, tasks: &mut JoinSet<Done>) -> Option<()> {
        let mut metrics = self.engine()?.metrics_receiver();
        let trace = Arc::clone(&self.trace);
        tasks.spawn(async move {
            loop {
                let mut changed = Box::pin(metrics.changed());
                let alive = poll_fn(|context| {
                    let waker = noting(&trace, Entry::MetricsWoken, context.waker());
                    changed.as_mut().poll(&mut Context::from_waker(&waker))
                })
                .await;
                drop(changed);
                if alive.is_err() {
                    return std::future::pending().await;
                }
                let shown = *metrics.borrow_and_update();
                trace.note(Entry::Metrics(shown));
            }
        });
        Some(())
    }
}

/// The state of an engine as it is shown.
fn shown(engine: &LiveEngine) -> EngineMetrics {
    *engine.metrics_receiver().borrow()
}

/// Whether this is a cause that the run had.
pub(crate) fn agrees(stopped: &StopCause, cause: Cause) -> bool {
    matches!(
        (stopped, cause),
        (StopCause::Shutdown, Cause::Shutdown)
            | (StopCause::HandlesDropped, Cause::HandleDropped)
            | (StopCause::AdmissionReceiverClosed, Cause::AdmissionsClosed)
            | (StopCause::OutputGateDropped, Cause::GateDropped)
            | (StopCause::Failed { .. }, Cause::Panic)
    )
}

/// Gives every task the turns that are due. No engine time goes by.
pub(crate) async fn turns() {
    for _ in 0..16 {
        tokio::task::yield_now().await;
    }
}

/// Awaits a future; or takes so many steps and drops it then: a poll, a turn for everybody else, a poll, and so on.
pub(crate) async fn polled<F: Future>(future: F, polls: Polls) -> Option<F::Output> {
    let Some(steps) = polls else { return Some(future.await) };
    let mut future = pin!(future);
    for step in 0..steps {
        if !step.is_multiple_of(2) {
            tokio::task::yield_now().await;
            continue;
        }
        let poll = poll_fn(|context| Poll::Ready(poll_once(future.as_mut(), context))).await;
        if let Poll::Ready(output) = poll {
            return Some(output);
        }
    }
    None
}

fn poll_once<F: Future>(future: Pin<&mut F>, context: &mut Context<'_>) -> Poll<F::Output> {
    future.poll(context)
}

/// Passes of the planned durations.
#[derive(Debug)]
struct Passes {
    durations: Vec<u32>,
    panics: Option<u32>,
    passes: u32,
    trace: Arc<Trace>,
    _held: Arc<()>,
}

impl PassTiming for Passes {
    fn pass_duration(&mut self, _: &PassWork) -> Duration {
        let pass = self.passes;
        self.passes += 1;
        if self.panics == Some(pass) {
            self.trace.note(Entry::Ends(Cause::Panic));
            panic!("the modelled hardware fails");
        }
        Duration::from_micros(self.durations[pass as usize % self.durations.len()].into())
    }
}

/// A sink that notes what it is given.
struct Batches {
    plan: Sink,
    batches: u32,
    trace: Arc<Trace>,
    _held: Arc<()>,
}

impl Batches {
    fn new(plan: Sink, trace: &Arc<Trace>, held: &Arc<()>) -> Option<Self> {
        let sink = Self { plan, batches: 0, trace: Arc::clone(trace), _held: Arc::clone(held) };
        (!matches!(plan, Sink::None)).then_some(sink)
    }

    /// Takes a batch; gives a sink's answer.
    fn take<E: From<std::io::Error>>(&mut self, entry: Entry) -> Result<(), E> {
        self.trace.note(entry);
        self.batches += 1;
        match self.plan {
            Sink::Fails(every) if self.batches.is_multiple_of(every) => Err(std::io::Error::other("full").into()),
            Sink::Panics(at) if self.batches > at => {
                self.trace.note(Entry::Ends(Cause::Panic));
                panic!("the sink fails");
            }
            _ => Ok(()),
        }
    }
}
