//! The live engine: the pure core as Tokio tasks, lanes and streams.
//!
//! [`LiveEngine`] is a cheap handle on one running scheduler rank. Three tasks serve it, whatever the
//! load: the scheduler actor, the event dispatcher, and a supervisor that waits for the two.
//!
//! ```text
//! submit() ──command lane (bounded)──▶ scheduler actor ──event lane──▶ event dispatcher ──▶ one bounded stream per request
//! cancel(), drop ──cancellation lane──▶      ▲                              │
//!                                            └──────────verdict─────────────┘
//! ```
//!
//! Nothing here decides what runs: that is [`crate::Scheduler`]'s. What a caller may rely on is written
//! down, rule by rule, in `docs/contract.md`; the tests cite the numbers.

mod actor;
mod builder;
mod clock;
mod dispatcher;
mod error;
mod handoff;
mod lanes;
mod request;
mod route;
mod signal;
mod sink;
mod stop;
mod stream;
mod sync;
mod table;

pub use builder::LiveEngineBuilder;
pub use error::{CancelError, HandoffError, Refused, ShutdownError, StartError, StopCause, Stopped, SubmitError};
pub use handoff::{
    LiveHandoff, LiveHandoffControl, LiveHandoffEvent, LiveHandoffEvents, LiveHandoffSide, LiveHandoffStream, LiveLink,
    StartHandoffError, handoff,
};
pub use request::{LiveRequest, LiveRequestRegistration};
pub use signal::{Admission, OutputBuffering, OutputSignal, SubmitOptions};
pub use sink::{KvEventBatch, KvEventSink, PassMetricsSink};

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::config::{EngineConfig, SchedulingState};
use crate::error::RequestError;
use crate::handoff::HandoffId;
use crate::live::clock::Clock;
use crate::live::handoff::{ControlShared, Handoffs};
use crate::live::lanes::{CancelEntry, CommandSender, LaneCommand, SubmitCommand};
use crate::live::route::Routes;
use crate::live::stop::Stop;
use crate::metrics::EngineMetrics;
use crate::request::Request;
use crate::time::EngineTime;

/// A handle on one running engine. Cloning is cheap; dropping the last clone stops the engine.
///
/// ```
/// use standin::{EngineConfig, LiveEngine, Request};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = LiveEngine::start(EngineConfig::default())?;
/// let mut request = engine.submit(Request::new(vec![1, 2, 3], 4)).await?;
/// let mut tokens = Vec::new();
/// while let Some(signal) = request.recv().await {
///     tokens.extend(signal.token_id);
/// }
/// assert_eq!(tokens.len(), 4);
/// engine.shutdown().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "dropping the last handle stops the engine"]
pub struct LiveEngine {
    inner: Arc<Inner>,
}

struct Inner {
    config: EngineConfig,
    output_buffering: OutputBuffering,
    allow_zero_output: bool,
    clock: Clock,
    stop: Arc<Stop>,
    routes: Arc<Routes>,
    tasks: TaskTracker,
    handoffs: Arc<Handoffs>,
    commands: CommandSender,
    cancels: mpsc::UnboundedSender<CancelEntry>,
    metrics: watch::Receiver<EngineMetrics>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop.request(StopCause::HandlesDropped);
    }
}

impl std::fmt::Debug for LiveEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveEngine")
            .field("active_requests", &self.active_request_count())
            .field("stopped", &self.inner.stop.cause())
            .finish_non_exhaustive()
    }
}

impl LiveEngine {
    /// Starts an engine with this configuration and nothing connected to it.
    ///
    /// # Errors
    /// See [`LiveEngineBuilder::start`].
    pub fn start(config: EngineConfig) -> Result<Self, StartError> {
        Self::builder(config).start()
    }

    /// A builder, for an engine with sinks, a gate, a rank, an epoch or other buffering.
    pub fn builder(config: EngineConfig) -> LiveEngineBuilder {
        LiveEngineBuilder::new(config)
    }

    /// The configuration it runs with.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }

    /// Engine time now.
    #[must_use]
    pub fn now(&self) -> EngineTime {
        self.inner.clock.now()
    }

    /// Submits a request; resolves when the scheduler has taken it into its queue, also while a pass
    /// is running.
    ///
    /// # Errors
    /// Why it was not taken; nothing is left behind.
    ///
    /// # Cancel safety
    /// Dropping the future at any point leaks nothing: the request never enters the scheduler, or is
    /// cancelled.
    pub async fn submit(&self, request: Request) -> Result<LiveRequest, SubmitError> {
        self.submit_with(request, SubmitOptions::default()).await
    }

    /// [`LiveEngine::submit`] with options.
    ///
    /// # Errors
    /// Why it was not taken; nothing is left behind.
    ///
    /// # Cancel safety
    /// As [`LiveEngine::submit`].
    pub async fn submit_with(&self, request: Request, options: SubmitOptions) -> Result<LiveRequest, SubmitError> {
        let (registration, live) = self.prepare_request_with(request, options)?;
        self.submit_prepared(registration).await.map_err(|refused| refused.error)?;
        Ok(live)
    }

    /// Registers a request without submitting it: its client id is taken and its stream exists.
    ///
    /// # Errors
    /// Why it was not registered; nothing is left behind.
    pub fn prepare_request(&self, request: Request) -> Result<(LiveRequestRegistration, LiveRequest), SubmitError> {
        self.prepare_request_with(request, SubmitOptions::default())
    }

    /// [`LiveEngine::prepare_request`] with options.
    ///
    /// # Errors
    /// Why it was not registered; nothing is left behind.
    pub fn prepare_request_with(
        &self,
        request: Request,
        options: SubmitOptions,
    ) -> Result<(LiveRequestRegistration, LiveRequest), SubmitError> {
        let inner = &*self.inner;
        if let Some(cause) = inner.stop.cause() {
            return Err(Stopped { cause: cause.clone() }.into());
        }
        request.validate(&inner.config)?;
        let max_model_len = inner.config.max_model_len;
        if request.output_length(max_model_len) == 0 && !inner.allow_zero_output {
            return Err(RequestError::ZeroOutput.into());
        }
        let buffering = options.buffering.unwrap_or(inner.output_buffering);
        let capacity = buffering.capacity(request.output_limit(max_model_len));
        let route = inner.routes.register(request.id, buffering, capacity)?;
        let live = LiveRequest::new(Arc::clone(&route), inner.cancels.clone());
        Ok((LiveRequestRegistration { route, routes: Arc::clone(&inner.routes), request }, live))
    }

    /// Submits a registered request; resolves when the scheduler has taken it into its queue.
    ///
    /// # Errors
    /// The registration comes back with the reason.
    ///
    /// # Cancel safety
    /// Dropping the future before the request was handed over drops the registration, which cancels
    /// it; afterwards the request goes on, and its stream decides.
    pub async fn submit_prepared(&self, registration: LiveRequestRegistration) -> Result<(), Refused<SubmitError>> {
        self.submit_as(registration, false).await
    }

    /// Submits a request whose prompt counts as transferred: it waits for its blocks and decodes without
    /// a prefill; it computes its last prompt token.
    ///
    /// # Errors
    /// Why it was not taken; nothing is left behind.
    ///
    /// # Cancel safety
    /// As [`LiveEngine::submit`].
    pub async fn submit_decode(&self, request: Request) -> Result<LiveRequest, SubmitError> {
        let (registration, live) = self.prepare_request(request)?;
        self.submit_as(registration, true).await.map_err(|refused| refused.error)?;
        Ok(live)
    }

    async fn submit_as(
        &self,
        registration: LiveRequestRegistration,
        decode_only: bool,
    ) -> Result<(), Refused<SubmitError>> {
        let inner = &*self.inner;
        if !Arc::ptr_eq(&registration.routes, &inner.routes) {
            return Err(Refused { registration, error: SubmitError::ForeignRegistration });
        }
        let (reply, answer) = oneshot::channel();
        let command = LaneCommand::Submit(SubmitCommand::new(inner.clock.now(), decode_only, registration, reply));
        // A closed lane answers too: the command's drop gives the registration back.
        inner.commands.send(command).await;
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err((registration, SubmitError::Stopped(_)))) => {
                let error = Stopped { cause: inner.stop.wait().await }.into();
                Err(Refused { registration, error })
            }
            Ok(Err((registration, error))) => Err(Refused { registration, error }),
            Err(_) => unreachable!("a submission answers, in its drop at the latest"),
        }
    }

    /// Cancels a request: stops forwarding at once, then waits for the scheduler, which answers also
    /// during a pass. `true` if this call removed the request; `false` if the id is unknown or the
    /// request had ended, even if its terminal signal is still on its way.
    ///
    /// # Errors
    /// None today.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo the cancel.
    pub async fn cancel(&self, client_id: Uuid) -> Result<bool, CancelError> {
        match self.inner.routes.get(client_id) {
            Some(route) => request::cancel(&self.inner.cancels, route).await,
            None => Ok(false),
        }
    }

    /// Forgets every cached prefix; `false`, changing nothing, while any KV block is in use.
    ///
    /// # Errors
    /// The engine has stopped.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it, unless the command lane was full.
    pub async fn reset_prefix_cache(&self) -> Result<bool, Stopped> {
        self.command(LaneCommand::ResetPrefixCache).await
    }

    /// Sets whether passes are planned and requests admitted.
    ///
    /// # Errors
    /// The engine has stopped.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo it, unless the command lane was full.
    pub async fn set_scheduling(&self, state: SchedulingState) -> Result<(), Stopped> {
        self.command(|reply| LaneCommand::SetScheduling(state, reply)).await.map(drop)
    }

    async fn command(&self, command: impl FnOnce(oneshot::Sender<bool>) -> LaneCommand) -> Result<bool, Stopped> {
        let (reply, answer) = oneshot::channel();
        // A closed lane drops the reply.
        self.inner.commands.send(command(reply)).await;
        match answer.await {
            Ok(answer) => Ok(answer),
            Err(_) => Err(Stopped { cause: self.inner.stop.wait().await }),
        }
    }

    /// Registers a handoff on this engine: as its source or as its destination, whichever is submitted.
    ///
    /// # Errors
    /// It is registered already, an answer to an earlier registration is owed, or the engine has stopped.
    pub fn register_handoff(
        &self,
        handoff_id: HandoffId,
    ) -> Result<(LiveHandoffControl, LiveHandoffEvents), HandoffError> {
        let inner = &*self.inner;
        let (key, events) = inner.handoffs.register(handoff_id)?;
        let control = LiveHandoffControl::new(ControlShared {
            key,
            commands: inner.commands.clone(),
            cancels: inner.cancels.clone(),
            handoffs: Arc::clone(&inner.handoffs),
            routes: Arc::clone(&inner.routes),
            stop: Arc::clone(&inner.stop),
        });
        Ok((control, LiveHandoffEvents::new(key, events, Arc::clone(&inner.handoffs))))
    }

    /// Follows the engine's metrics, boundary by boundary. It does not keep the engine alive.
    #[must_use]
    pub fn metrics_receiver(&self) -> watch::Receiver<EngineMetrics> {
        let mut metrics = self.inner.metrics.clone();
        // While nobody but the engine holds a receiver, boundaries replace the value and tell nobody.
        let shown = *metrics.borrow();
        if shown != (EngineMetrics { dp_rank: shown.dp_rank, ..EngineMetrics::default() }) {
            metrics.mark_changed();
        }
        metrics
    }

    /// Requests that are registered and have not ended.
    #[must_use]
    pub fn active_request_count(&self) -> usize {
        self.inner.routes.len()
    }

    /// Stops the engine and waits until every task has ended, every stream has its terminal signal
    /// and every sink is dropped. Every call gets the same answer.
    ///
    /// # Errors
    /// The engine had stopped by itself, and why. It is ended and clean all the same.
    ///
    /// # Cancel safety
    /// Dropping the future after its first poll does not undo the shutdown.
    pub async fn shutdown(&self) -> Result<(), ShutdownError> {
        self.inner.stop.request(StopCause::Shutdown);
        self.inner.tasks.wait().await;
        match self.inner.stop.wait().await {
            StopCause::Shutdown | StopCause::HandlesDropped => Ok(()),
            cause => Err(ShutdownError::Stopped(cause)),
        }
    }
}
