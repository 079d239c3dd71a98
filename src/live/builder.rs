//! Starting an engine.

use std::sync::Arc;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::config::EngineConfig;
use crate::error::ConfigError;
use crate::handoff::TransferTiming;
use crate::live::actor::{Actor, Boundary, Phase};
use crate::live::clock::Clock;
use crate::live::dispatcher::{Dispatcher, Outlets};
use crate::live::error::StartError;
use crate::live::handoff::{Handoffs, Registrations};
use crate::live::lanes::{Batch, CancelEntry, CommandLane, Lane};
use crate::live::route::Routes;
use crate::live::signal::{Admission, OutputBuffering};
use crate::live::sink::{KvEventSink, PassMetricsSink};
use crate::live::stop::{Stop, Sweep, supervise};
use crate::live::table::RouteTable;
use crate::live::{Inner, LiveEngine};
use crate::metrics::EngineMetrics;
use crate::scheduler::Scheduler;
use crate::time::EngineTime;
use crate::timing::PassTiming;

/// Builds a [`LiveEngine`]: a configuration, and what of its surroundings it is connected to.
#[must_use = "a builder does nothing until start"]
pub struct LiveEngineBuilder {
    config: EngineConfig,
    dp_rank: u32,
    epoch: Option<Instant>,
    kv_events: Option<Box<dyn KvEventSink>>,
    pass_metrics: Option<Box<dyn PassMetricsSink>>,
    admissions: Option<mpsc::UnboundedSender<Admission>>,
    output_buffering: OutputBuffering,
    output_gate: Option<watch::Receiver<bool>>,
    allow_zero_output: bool,
    timing: Option<Box<dyn PassTiming>>,
    transfer_timing: TransferTiming,
}

impl std::fmt::Debug for LiveEngineBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveEngineBuilder").field("config", &self.config).finish_non_exhaustive()
    }
}

impl LiveEngineBuilder {
    pub(super) fn new(config: EngineConfig) -> Self {
        Self {
            config,
            dp_rank: 0,
            epoch: None,
            kv_events: None,
            pass_metrics: None,
            admissions: None,
            output_buffering: OutputBuffering::default(),
            output_gate: None,
            allow_zero_output: false,
            timing: None,
            transfer_timing: TransferTiming::default(),
        }
    }

    /// Data-parallel rank: a label on every record. Default 0.
    pub fn dp_rank(mut self, dp_rank: u32) -> Self {
        self.dp_rank = dp_rank;
        self
    }

    /// The instant at which engine time is zero. Default: the start. Give two engines one epoch to
    /// compare their times.
    pub fn epoch(mut self, epoch: Instant) -> Self {
        self.epoch = Some(epoch);
        self
    }

    /// Where KV events go. Without a sink none are made.
    pub fn kv_event_sink(mut self, sink: impl KvEventSink + 'static) -> Self {
        self.kv_events = Some(Box::new(sink));
        self
    }

    /// Where the metrics of each pass go.
    pub fn pass_metrics_sink(mut self, sink: impl PassMetricsSink + 'static) -> Self {
        self.pass_metrics = Some(Box::new(sink));
        self
    }

    /// Where admissions go: one message per request, so the channel is bounded by what its reader
    /// leaves. Closing the receiver stops the engine.
    pub fn admissions(mut self, observer: mpsc::UnboundedSender<Admission>) -> Self {
        self.admissions = Some(observer);
        self
    }

    /// How unread output is kept, unless a submission says otherwise. Default: cancel on overflow, 8.
    pub fn output_buffering(mut self, buffering: OutputBuffering) -> Self {
        self.output_buffering = buffering;
        self
    }

    /// While this is `false` the finished pass waits at its boundary and none is planned; commands
    /// and cancels are served. Dropping the sender stops the engine.
    pub fn output_gate(mut self, gate: watch::Receiver<bool>) -> Self {
        self.output_gate = Some(gate);
        self
    }

    /// Accept requests for no output: they end at once, by length, without a token. Default: refuse.
    pub fn allow_zero_output(mut self, allow: bool) -> Self {
        self.allow_zero_output = allow;
        self
    }

    /// Overrides the configuration's seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.config.seed = seed;
        self
    }

    /// Uses the caller's timing model instead of the configuration's.
    pub fn pass_timing(mut self, timing: impl PassTiming + 'static) -> Self {
        self.timing = Some(Box::new(timing));
        self
    }

    /// What a transfer of KV from this engine costs, reported when a source is held; the prompt's tokens are
    /// filled in. Default: bytes and bandwidth are not known, so that a transfer takes no time.
    pub fn transfer_timing(mut self, timing: TransferTiming) -> Self {
        self.transfer_timing = timing;
        self
    }

    /// Starts the engine: validates, spawns its three tasks, and returns at once.
    ///
    /// # Errors
    /// Outside a Tokio runtime, or with a value that cannot be used; nothing is spawned then.
    pub fn start(self) -> Result<LiveEngine, StartError> {
        let runtime = Handle::try_current().map_err(|_| StartError::NoRuntime)?;
        let one_thread = runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
        let (engine, actor, dispatcher) = self.assemble(one_thread)?;
        spawn(&runtime, &engine.inner.tasks, actor, dispatcher);
        Ok(engine)
    }

    /// An engine whose tasks are still to be spawned.
    pub(super) fn assemble(mut self, one_thread: bool) -> Result<(LiveEngine, Actor, Dispatcher), StartError> {
        self.config.validate()?;
        self.transfer_timing.validate().map_err(|error| error.within("transfer_timing"))?;
        let scheduler = self.scheduler()?;
        let shared = self.shared();
        let (commands, command_lane) = CommandLane::new();
        let (cancels, cancel_lane) = Lane::new();
        let (batches, event_lane) = mpsc::unbounded_channel();
        let (verdict_sender, verdicts) = mpsc::unbounded_channel();
        let initial = EngineMetrics { dp_rank: self.dp_rank, ..EngineMetrics::default() };
        let (metrics_sender, metrics) = watch::channel(initial);

        let ends = ActorEnds { commands: command_lane, cancels: cancel_lane, batches, verdicts };
        let actor = self.actor(scheduler, &shared, ends);
        let Shared { clock, stop, routes, handoffs } = shared;
        let dispatcher = Dispatcher {
            dp_rank: self.dp_rank,
            one_thread,
            clock,
            stop: Arc::clone(&stop),
            routes: Arc::clone(&routes),
            handoffs: Arc::clone(&handoffs),
            outlets: self.outlets(metrics_sender),
            batches: event_lane,
            verdicts: verdict_sender,
            table: RouteTable::default(),
            slow_consumers: 0,
            sink_errors: 0,
            dropped_facts: 0,
        };
        let Self { config, output_buffering, allow_zero_output, .. } = self;
        let inner = Inner {
            config,
            output_buffering,
            allow_zero_output,
            clock,
            stop,
            routes,
            handoffs,
            tasks: TaskTracker::new(),
            commands,
            cancels,
            metrics,
        };
        Ok((LiveEngine { inner: Arc::new(inner) }, actor, dispatcher))
    }

    fn shared(&self) -> Shared {
        let clock = Clock::new(self.epoch);
        let stop = Arc::new(Stop::default());
        let routes = Arc::new(Routes::new(self.config.seed, clock, Arc::clone(&stop)));
        let handoffs = Arc::new(Handoffs::new(self.transfer_timing, Arc::clone(&stop)));
        Shared { clock, stop, routes, handoffs }
    }

    fn actor(&mut self, scheduler: Scheduler, shared: &Shared, ends: ActorEnds) -> Actor {
        Actor {
            free_at: shared.clock.now() + self.config.speedup.scale(self.config.startup),
            planned_at: EngineTime::ZERO,
            scheduler,
            clock: shared.clock,
            stop: Arc::clone(&shared.stop),
            routes: Arc::clone(&shared.routes),
            handoffs: Arc::clone(&shared.handoffs),
            registrations: Registrations::default(),
            commands: ends.commands,
            cancels: ends.cancels,
            batches: ends.batches,
            verdicts: ends.verdicts,
            gate: self.output_gate.take(),
            gate_closed: false,
            shows_admissions: self.admissions.is_some(),
            max_model_len: self.config.max_model_len,
            phase: Phase::Idle,
            timer_set_for: None,
            boundary: Boundary::Event,
            no_output: Vec::new(),
            ending: Vec::new(),
            batch: Box::default(),
            spare_batch: None,
        }
    }

    fn scheduler(&mut self) -> Result<Scheduler, ConfigError> {
        let mut scheduler = Scheduler::new(&self.config)?;
        if let Some(timing) = self.timing.take() {
            scheduler = scheduler.with_timing(timing);
        }
        Ok(if self.kv_events.is_some() { scheduler.with_kv_events() } else { scheduler })
    }

    fn outlets(&mut self, metrics: watch::Sender<EngineMetrics>) -> Outlets {
        Outlets {
            admissions: self.admissions.take(),
            kv_events: self.kv_events.take(),
            pass_metrics: self.pass_metrics.take(),
            metrics,
        }
    }
}

/// What all parts of an engine have in common.
struct Shared {
    clock: Clock,
    stop: Arc<Stop>,
    routes: Arc<Routes>,
    handoffs: Arc<Handoffs>,
}

/// The actor's ends of the lanes.
struct ActorEnds {
    commands: CommandLane,
    cancels: Lane<CancelEntry>,
    batches: mpsc::UnboundedSender<Box<Batch>>,
    verdicts: mpsc::UnboundedReceiver<Box<Batch>>,
}

/// Spawns the tasks of one engine.
fn spawn(runtime: &Handle, tasks: &TaskTracker, actor: Actor, dispatcher: Dispatcher) {
    let sweep = Sweep::new(Arc::clone(&actor.stop), Arc::clone(&actor.routes), Arc::clone(&actor.handoffs));
    let span = tracing::info_span!("engine", dp_rank = dispatcher.dp_rank);
    span.in_scope(|| tracing::info!("engine started"));
    let actor = tasks.spawn_on(actor.run().instrument(span.clone()), runtime);
    let dispatcher = tasks.spawn_on(dispatcher.run().instrument(span.clone()), runtime);
    tasks.spawn_on(supervise(sweep, actor, dispatcher).instrument(span), runtime);
    tasks.close();
}
