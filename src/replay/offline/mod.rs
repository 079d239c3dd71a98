//! A trace through one or several engines, without a runtime: time is a number that goes from event to event.

mod router;
mod worker;

pub use router::Router;

use crate::config::EngineConfig;
use crate::error::ConfigError;
use crate::metrics::EngineMetrics;
use crate::request::Request;
use crate::time::EngineTime;

use super::trace::{TRACE_BLOCK_TOKENS, TraceError, TraceRequest};
use super::{EndlessCache, Recorder, Report};
use router::Routing;
use worker::Worker;

/// An offline run: engines that are alike, and the router in front of them.
///
/// It decides as the live engine does, to the nanosecond: a pass follows the one before, or begins when the
/// request arrives that ends an idle time; a pass that begins at the instant of an arrival because another
/// one ended there does not see that request yet. The same trace gives the same [`Report`], here and through a
/// live engine in virtual time.
///
/// The trace is read as time goes on. What is held grows with the requests in flight and with the number of
/// different times measured, not with the length of the trace.
///
/// ```
/// use standin::EngineConfig;
/// use standin::replay::trace::{TraceFormat, TraceReader};
/// use standin::replay::{OfflineRun, Router};
///
/// let trace = br#"{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [3, 4]}
/// {"timestamp": 27.5, "input_length": 600, "output_length": 5, "hash_ids": [3, 5]}"#;
/// let run = OfflineRun::new(EngineConfig::default()).with_workers(2).with_router(Router::PrefixAware);
/// let report = run.replay(TraceReader::new(&trace[..], TraceFormat::Mooncake, "inline"))?;
/// assert_eq!((report.requests, report.output_tokens), (2, 14));
/// # Ok::<(), standin::replay::OfflineError>(())
/// ```
#[derive(Debug, Clone)]
pub struct OfflineRun {
    config: EngineConfig,
    workers: usize,
    router: Router,
}

/// Why an offline run gave no report.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OfflineError {
    /// The configuration, or the number of workers, cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The trace could not be read on.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Requests wait for ever: the configuration lets a request block the queue that no pool can hold.
    #[error(
        "{requests} requests never end: with end_outgrown_requests = false one that outgrows the pool blocks the queue"
    )]
    Unfinished {
        /// How many.
        requests: usize,
    },
}

impl OfflineRun {
    /// One engine with this configuration.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        Self { config, workers: 1, router: Router::default() }
    }

    /// Sets the number of engines, 1 to 65,536.
    #[must_use]
    pub fn with_workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Sets how requests are given to engines.
    #[must_use]
    pub fn with_router(mut self, router: Router) -> Self {
        self.router = router;
        self
    }

    /// Runs a trace from an idle start to the end of its last request.
    ///
    /// A request that the configuration cannot serve is refused, as the live engine does, and counted.
    ///
    /// # Errors
    /// A configuration that the live engine would not start with, the trace's first error, or requests that
    /// never end.
    pub fn replay(
        &self,
        trace: impl IntoIterator<Item = Result<TraceRequest, TraceError>>,
    ) -> Result<Report, OfflineError> {
        self.config.validate()?;
        if !(1..=MAX_WORKERS).contains(&self.workers) {
            return Err(ConfigError::new("workers", self.workers, format!("from 1 to {MAX_WORKERS}")).into());
        }
        let mut fleet = Fleet::new(self)?;
        for request in trace {
            fleet.arrive(request?);
        }
        fleet.finish()
    }
}

/// The most engines of a run. Each costs some kilobytes before it has done anything.
const MAX_WORKERS: usize = 65_536;

/// Requests that an engine is given before it is let run, where nobody looks at it meanwhile: what it works
/// with stays in the processor's caches for so long.
const AHEAD: usize = 64;

/// A run under way.
struct Fleet<'a> {
    config: &'a EngineConfig,
    workers: Vec<Worker>,
    routing: Routing,
    recorder: Recorder,
    cache: EndlessCache,
    submitted: u64,
}

impl<'a> Fleet<'a> {
    fn new(run: &'a OfflineRun) -> Result<Self, ConfigError> {
        let workers = (0..run.workers).map(|_| Worker::new(&run.config)).collect::<Result<_, _>>()?;
        Ok(Self {
            config: &run.config,
            workers,
            routing: Routing::new(run.router, run.workers, &run.config),
            recorder: Recorder::new(),
            cache: EndlessCache::new(),
            submitted: 0,
        })
    }

    fn arrive(&mut self, trace_request: TraceRequest) {
        let TraceRequest { arrival, ref hash_ids, .. } = trace_request;
        let (prompt_tokens, hash_ids) = (trace_request.prompt_tokens(), hash_ids.clone());
        let request = Request::from(trace_request);
        if request.validate(self.config).is_err() {
            return self.recorder.refused();
        }
        if self.routing.looks_at_load() {
            // What it sees of the engines is their state at the arrival.
            for worker in &mut self.workers {
                worker.advance(arrival, &mut self.recorder);
            }
        }
        let chosen = self.routing.choose(prompt_tokens, &hash_ids, self.workers.iter().map(Worker::load));
        self.cache.observe(prompt_tokens, &hash_ids, TRACE_BLOCK_TOKENS);
        let worker = &mut self.workers[chosen];
        if !worker.submit(self.submitted, request, arrival, prompt_tokens) {
            return self.recorder.refused();
        }
        self.submitted += 1;
        if worker.num_ahead() == AHEAD {
            worker.advance(arrival, &mut self.recorder);
        }
    }

    fn finish(mut self) -> Result<Report, OfflineError> {
        let mut metrics = EngineMetrics::default();
        let mut unfinished = 0;
        for worker in &mut self.workers {
            worker.advance(EngineTime::MAX, &mut self.recorder);
            unfinished += worker.load().active_requests;
            worker.add_counts(&mut metrics);
        }
        if unfinished > 0 {
            return Err(OfflineError::Unfinished { requests: unfinished });
        }
        Ok(self.recorder.report(&metrics, self.cache.bound()))
    }
}
