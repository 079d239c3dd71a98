//! Requests of a trace, and what came of them.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use standin::replay::trace::{TraceError, TraceRequest};
use standin::replay::{Distribution, Recorder, Report, RequestRecord};
use standin::{Admission, EngineMetrics, EngineTime, FinishReason, OutputSignal, Request};
use tokio::sync::mpsc;
use uuid::Uuid;

/// How long before its arrival a request is handed over; the engine holds it until then. More than a tick of Tokio's
/// timers (1 ms), so that none comes late. The trace starts that much after the engines.
pub(crate) const LEAD: Duration = Duration::from_millis(100);

pub(crate) type Requests = Vec<Request>;

/// Request `number` of a trace. Ids are the same in every run, so that the tokens are.
pub(crate) fn numbered((request, number): (Result<TraceRequest, TraceError>, u128)) -> anyhow::Result<Request> {
    let mut request = request?;
    request.arrival = request.arrival + LEAD;
    Ok(Request::from(request).with_id(Uuid::from_u128(number)))
}

/// Waits until it is time to hand the request over; `now` is engine time.
pub(crate) async fn wait_for(request: &Request, now: EngineTime) {
    let arrival = request.arrival.unwrap_or(now);
    tokio::time::sleep(arrival.saturating_since(now).saturating_sub(LEAD)).await;
}

/// One request that has ended.
#[derive(Debug)]
pub(crate) struct Served {
    id: Uuid,
    record: RequestRecord,
    tokens: Vec<u32>,
    ended: Option<(EngineTime, FinishReason)>,
    transfer: Option<Duration>,
    /// What engine times are multiplied with: they are as fast as the engines run.
    time_factor: f64,
}

impl Served {
    /// Nothing of it yet.
    pub(crate) fn new(request: &Request, time_factor: f64) -> Self {
        let arrival = modelled(request.arrival.unwrap_or_default(), time_factor);
        // The readers refuse longer prompts.
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        Self {
            id: request.id.unwrap_or_default(),
            record: RequestRecord::new(arrival, prompt_tokens),
            tokens: Vec::new(),
            ended: None,
            transfer: None,
            time_factor,
        }
    }

    /// A signal of its stream.
    pub(crate) fn signal(&mut self, signal: OutputSignal) {
        let at = modelled(signal.produced_at, self.time_factor);
        if let Some(token) = signal.token_id {
            self.tokens.push(token);
            self.record.token(at);
        }
        self.ended = signal.finish.map(|reason| (at, reason));
    }

    /// Whether its last signal was there.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Its KV was on the way for so long, in engine time.
    pub(crate) fn transferred(&mut self, took: Duration) {
        self.transfer = Some(took.mul_f64(self.time_factor));
    }

    /// Reads a stream to its end.
    pub(crate) async fn read(&mut self, stream: &mut (impl Stream<Item = OutputSignal> + Unpin)) {
        while let Some(signal) = stream.next().await {
            self.signal(signal);
        }
    }
}

fn modelled(at: EngineTime, time_factor: f64) -> EngineTime {
    EngineTime::from(at.since_epoch().mul_f64(time_factor))
}

/// A run that is over.
#[derive(Debug, Default)]
pub(crate) struct Run {
    served: BTreeMap<Uuid, Served>,
    refused: u64,
    metrics: EngineMetrics,
}

impl Run {
    /// A request was refused at submission.
    pub(crate) fn refused(&mut self, error: &dyn std::fmt::Display) {
        eprintln!("refused: {error}");
        self.refused += 1;
    }

    pub(crate) fn served(&mut self, served: Served) {
        self.served.insert(served.id, served);
    }

    /// The first admissions, at the engine that prefills.
    pub(crate) fn admitted(&mut self, admissions: &mut mpsc::UnboundedReceiver<Admission>) {
        while let Ok(admission) = admissions.try_recv() {
            if let Some(served) = self.served.get_mut(&admission.request_id) {
                served.record.admitted(modelled(admission.admitted_at, served.time_factor), admission.cached_tokens);
            }
        }
    }

    /// What an engine counted; of several it is the sum.
    pub(crate) fn count(&mut self, metrics: &EngineMetrics) {
        self.metrics.num_passes += metrics.num_passes;
        self.metrics.num_preemptions += metrics.num_preemptions;
    }

    pub(crate) fn report(&self) -> Report {
        let mut recorder = Recorder::new();
        for served in self.served.values() {
            if let Some((at, reason)) = served.ended {
                recorder.ended(&served.record, at, reason);
            }
        }
        (0..self.refused).for_each(|_| recorder.refused());
        recorder.report(&self.metrics, None)
    }

    pub(crate) fn transfers(&self) -> Distribution {
        let mut transfers = Distribution::default();
        self.served.values().filter_map(|served| served.transfer).for_each(|took| transfers.add(took));
        transfers
    }

    pub(crate) fn requests(&self) -> usize {
        self.served.len()
    }

    pub(crate) fn tokens(&self) -> impl Iterator<Item = (Uuid, &[u32])> {
        self.served.iter().map(|(id, served)| (*id, &*served.tokens))
    }

    pub(crate) fn tokens_of(&self, id: Uuid) -> Option<&[u32]> {
        self.served.get(&id).map(|served| &*served.tokens)
    }
}
