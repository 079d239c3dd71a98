//! The event dispatcher: takes batches apart and makes them visible.
//!
//! It owns the table sequence → stream and everything that callers see: the admission observer, the
//! sinks, the metrics. It waits for nobody but the event lane. Order within a batch (r29):
//! admissions, KV events, pass metrics, outputs, handoff facts, metrics, answers to commands.

use std::sync::Arc;
use std::task::Poll;

use tokio::sync::{mpsc, watch};

use crate::live::clock::Clock;
use crate::live::error::StopCause;
use crate::live::handoff::Handoffs;
use crate::live::lanes::{Batch, RouteChange};
use crate::live::route::{Route, Routes};
use crate::live::signal::{Admission, OutputSignal};
use crate::live::sink::{KvEventBatch, KvEventSink, PassMetricsSink};
use crate::live::stop::Stop;
use crate::live::stream::{Forwarded, Token};
use crate::live::table::RouteTable;
use crate::metrics::EngineMetrics;
use crate::output::FinishReason;
use crate::scheduler::{Effects, Output};
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

/// Name of the task in failures.
pub(super) const TASK: &str = "event dispatcher";

/// Outputs whose streams are asked for together.
const TOGETHER: usize = 16;

/// Where callers have things delivered.
pub(super) struct Outlets {
    pub(super) admissions: Option<mpsc::UnboundedSender<Admission>>,
    pub(super) kv_events: Option<Box<dyn KvEventSink>>,
    pub(super) pass_metrics: Option<Box<dyn PassMetricsSink>>,
    pub(super) metrics: watch::Sender<EngineMetrics>,
}

/// What the actor learns of a batch: see [`Batch`].
struct Verdict<'a> {
    overflowed: &'a mut Vec<Arc<Route>>,
    filled: &'a mut Vec<Arc<Route>>,
}

pub(super) struct Dispatcher {
    pub(super) dp_rank: u32,
    /// The runtime has one thread.
    pub(super) one_thread: bool,
    pub(super) clock: Clock,
    pub(super) stop: Arc<Stop>,
    pub(super) routes: Arc<Routes>,
    pub(super) handoffs: Arc<Handoffs>,
    pub(super) outlets: Outlets,
    pub(super) batches: mpsc::UnboundedReceiver<Box<Batch>>,
    pub(super) verdicts: mpsc::UnboundedSender<Box<Batch>>,
    pub(super) table: RouteTable,
    pub(super) slow_consumers: u64,
    pub(super) sink_errors: u64,
    pub(super) dropped_facts: u64,
}

impl Dispatcher {
    pub(super) async fn run(mut self) {
        let stop = Arc::clone(&self.stop);
        let mut stopped = stop.requested();
        let observer = self.outlets.admissions.clone();
        let mut observer_gone = std::pin::pin!(closed(observer.as_ref()));
        loop {
            let mut batch = tokio::select! {
                biased;
                () = &mut stopped => return,
                () = &mut observer_gone => return stop.request(StopCause::AdmissionReceiverClosed),
                batch = self.batches.recv() => match batch {
                    Some(batch) => batch,
                    None => return,
                },
            };
            let Some(has_effects) = stop.guard(TASK, || self.dispatch(&mut batch)) else { return };
            if !has_effects {
                continue;
            }
            // Readers that the batch woke have their turn before the next pass is planned.
            give_way(self.one_thread).await;
            if self.verdicts.send(batch).is_err() {
                return;
            }
        }
    }

    /// Makes a batch visible and turns it into its verdict. Returns whether it had effects.
    fn dispatch(&mut self, batch: &mut Batch) -> bool {
        let observed_at = self.clock.now();
        for change in batch.changes.drain(..) {
            match change {
                RouteChange::Opened(route) => self.table.insert(route),
                RouteChange::Closed(sequence) => drop(self.table.remove(sequence)),
            }
        }
        self.admit(batch, observed_at);
        let Batch { effects: Some(effects), overflowed, filled, .. } = batch else { return false };
        self.publish(effects);
        if seeded_bug!(ShowsMetricsBeforeOutputs) {
            self.show(&effects.metrics);
        }
        let mut verdict = Verdict { overflowed, filled };
        for outputs in effects.outputs.chunks(TOGETHER) {
            for output in outputs {
                std::hint::black_box(self.table.get(output.sequence).is_some_and(|route| route.touch()));
            }
            for &output in outputs {
                self.output(output, effects.at, observed_at, &mut verdict);
            }
        }
        effects.outputs.clear();
        for fact in effects.facts.drain(..) {
            self.dropped_facts += u64::from(!self.handoffs.tell(&fact));
        }
        self.show(&effects.metrics);
        batch.answer();
        true
    }

    fn show(&self, metrics: &EngineMetrics) {
        self.outlets.metrics.send_if_modified(|shown| {
            *shown = EngineMetrics {
                dp_rank: self.dp_rank,
                slow_consumers: self.slow_consumers,
                sink_errors: self.sink_errors,
                dropped_handoff_facts: self.dropped_facts,
                ..*metrics
            };
            // The engine's own receiver waits for nothing: see `LiveEngine::metrics_receiver`.
            self.outlets.metrics.receiver_count() > 1
        });
    }

    fn admit(&mut self, batch: &mut Batch, observed_at: EngineTime) {
        for admitted in batch.admitted.drain(..) {
            let Some(route) = self.table.get(admitted.sequence).filter(|route| !route.is_muted()) else { continue };
            let Some(observer) = &self.outlets.admissions else { return };
            let admission = Admission {
                request_id: route.client_id,
                cached_tokens: admitted.cached_tokens,
                admitted_at: batch.admitted_at,
                observed_at,
                dp_rank: self.dp_rank,
            };
            if observer.send(admission).is_err() {
                return self.stop.request(StopCause::AdmissionReceiverClosed);
            }
        }
    }

    fn publish(&mut self, effects: &Effects) {
        if let Some(sink) = &mut self.outlets.kv_events
            && !effects.kv_events.is_empty()
        {
            let batch = KvEventBatch { dp_rank: self.dp_rank, at: effects.at, events: &effects.kv_events };
            if let Err(error) = sink.publish(batch) {
                self.sink_errors += 1;
                tracing::warn!(%error, "the KV event sink failed");
            }
        }
        if let Some(sink) = &mut self.outlets.pass_metrics
            && let Some(pass) = &effects.pass
            && let Err(error) = sink.publish(self.dp_rank, pass)
        {
            self.sink_errors += 1;
            tracing::warn!(%error, "the pass metrics sink failed");
        }
    }

    fn output(&mut self, output: Output, produced_at: EngineTime, observed_at: EngineTime, verdict: &mut Verdict<'_>) {
        // Cancelled meanwhile where there is no route.
        let Some(route) = self.table.get(output.sequence) else { return };
        let cached_tokens = output.prefill.map(|prefill| prefill.num_cached_tokens);
        if let (Some(token_id), None) = (output.token, output.finish) {
            match route.forward(Token { token_id, cached_tokens, produced_at, observed_at }) {
                Forwarded::Queued | Forwarded::Gone => return,
                Forwarded::Filled => return verdict.filled.push(Arc::clone(route)),
                Forwarded::Overflow => {}
            }
        }
        // It ends: in the scheduler, or because its queue is full.
        let Some(route) = self.table.remove(output.sequence) else { return };
        let Output { token: token_id, finish, .. } = output;
        let request_id = route.client_id;
        let signal = OutputSignal { request_id, token_id, finish, cached_tokens, produced_at, observed_at };
        if finish.is_some() {
            self.finish(&route, signal);
        } else {
            self.cut_off(&route, signal);
            verdict.overflowed.push(route);
        }
    }

    /// The request has ended in the scheduler.
    fn finish(&mut self, route: &Route, signal: OutputSignal) {
        if route.is_muted() {
            // Its cancel, or the drop of its stream, is in the cancellation lane and ends the route.
            return;
        }
        if signal.token_id.is_some() && !route.has_room() && !seeded_bug!(OverflowOnTheLastTokenEndsLength) {
            return self.cut_off(route, signal);
        }
        self.routes.end_with(route, signal);
    }

    /// The queue is full: the token is lost, and the stream ends.
    fn cut_off(&mut self, route: &Route, lost: OutputSignal) {
        let terminal =
            OutputSignal { token_id: None, finish: Some(FinishReason::SlowConsumer), cached_tokens: None, ..lost };
        if self.routes.end_with(route, terminal).is_some() {
            self.slow_consumers += 1;
            tracing::debug!(request = %route.client_id, "reader too slow: request cancelled");
        }
    }
}

/// Waits until nobody receives admissions any more. For ever where nobody was to.
async fn closed(observer: Option<&mpsc::UnboundedSender<Admission>>) {
    match observer {
        Some(observer) => observer.closed().await,
        None => std::future::pending().await,
    }
}

/// Goes behind everything that is runnable on this thread.
///
/// Tokio's own way also looks at timers and sockets, a system call for each pass, before it comes back. On
/// a runtime of one thread that is needed: only then the future in `block_on` has its turn.
async fn give_way(one_thread: bool) {
    if one_thread {
        return tokio::task::yield_now().await;
    }
    let mut given = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut given, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
