//! Everything of a run that can be seen, in the order in which it could be seen.
//!
//! Sinks and wakers write it, so within one call of the engine's: a reader's own turn would come too late to tell
//! in which order the engine made things visible.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use standin::{Admission, EngineMetrics, EngineTime, KvEvent, OutputSignal, PassMetrics};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The variable that has runs print what happens, as it happens.
pub(crate) const SHOW: &str = "STANDIN_LIVE_SHOW";

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Entry {
    /// The client is about to register its request.
    Calls(usize),
    Admission(Admission),
    KvEvents(EngineTime, Vec<KvEvent>),
    Pass(PassMetrics),
    /// The client's stream has something to read.
    Woken(usize),
    Read(usize, OutputSignal),
    /// There are new metrics.
    MetricsWoken,
    Metrics(EngineMetrics),
    /// What somebody was told, or did.
    Note(String),
    /// Somebody ends the engine, or is about to make it fail.
    Ends(Cause),
    /// The clock is put forward by so many nanoseconds.
    Jump(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Shutdown,
    HandleDropped,
    AdmissionsClosed,
    GateDropped,
    Panic,
}

/// What became visible last.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Visible {
    Nothing,
    /// The metrics of a pass that ended then.
    Pass(EngineTime),
    Metrics,
}

#[derive(Debug)]
pub(crate) struct Trace {
    epoch: Instant,
    /// Each entry is printed as it is noted.
    shown: bool,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    entries: Vec<(EngineTime, Entry)>,
    admissions: Option<mpsc::UnboundedReceiver<Admission>>,
    visible: Visible,
    /// What was visible when a client was woken last.
    at_waking: Vec<Option<Visible>>,
}

impl Trace {
    pub(crate) fn new(epoch: Instant, clients: usize) -> Self {
        let inner =
            Inner { entries: Vec::new(), admissions: None, visible: Visible::Nothing, at_waking: vec![None; clients] };
        Self { epoch, shown: std::env::var_os(SHOW).is_some(), inner: Mutex::new(inner) }
    }

    #[expect(clippy::disallowed_methods, reason = "the caller's own clock, paused")]
    pub(crate) fn now(&self) -> EngineTime {
        EngineTime::from(Instant::now().saturating_duration_since(self.epoch))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admissions are read from this channel just before anything else is noted.
    pub(crate) fn observe(&self, admissions: mpsc::UnboundedReceiver<Admission>) {
        self.inner().admissions = Some(admissions);
    }

    /// Reads what has come, and closes the channel.
    pub(crate) fn close_admissions(&self) {
        self.note(Entry::Ends(Cause::AdmissionsClosed));
        let admissions = self.inner().admissions.take();
        drop(admissions);
    }

    pub(crate) fn note(&self, entry: Entry) {
        let now = self.now();
        let mut inner = self.inner();
        inner.drain(now);
        if self.shown {
            println!("{now:?} {entry:?}");
        }
        match &entry {
            Entry::Pass(pass) => inner.visible = Visible::Pass(pass.ended_at),
            Entry::MetricsWoken => inner.visible = Visible::Metrics,
            Entry::Woken(client) => inner.at_waking[*client] = Some(inner.visible),
            _ => {}
        }
        inner.entries.push((now, entry));
    }

    pub(crate) fn say(&self, what: impl Into<String>) {
        self.note(Entry::Note(what.into()));
    }

    /// What was visible when the client was woken, if it was since this was asked last.
    pub(crate) fn take_waking(&self, client: usize) -> Option<Visible> {
        self.inner().at_waking[client].take()
    }

    pub(crate) fn len(&self) -> usize {
        self.inner().entries.len()
    }

    /// All of it.
    pub(crate) fn entries(&self) -> Vec<(EngineTime, Entry)> {
        let now = self.now();
        let mut inner = self.inner();
        inner.drain(now);
        inner.entries.clone()
    }

    /// A hash of all of it.
    pub(crate) fn hash(&self) -> u64 {
        let mut trace = crate::trace::Trace::on();
        self.entries().iter().for_each(|entry| trace.note(entry));
        trace.hash()
    }
}

impl Inner {
    fn drain(&mut self, now: EngineTime) {
        let Some(admissions) = &mut self.admissions else { return };
        while let Ok(admission) = admissions.try_recv() {
            self.entries.push((now, Entry::Admission(admission)));
        }
    }
}

/// A waker that notes an entry before it wakes.
pub(crate) fn noting(trace: &Arc<Trace>, entry: Entry, waker: &Waker) -> Waker {
    Arc::new(Noting { trace: Arc::clone(trace), entry, waker: waker.clone() }).into()
}

struct Noting {
    trace: Arc<Trace>,
    entry: Entry,
    waker: Waker,
}

impl Wake for Noting {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.trace.note(self.entry.clone());
        self.waker.wake_by_ref();
    }
}

/// Collects what is logged as an error.
#[derive(Debug, Clone, Default)]
pub(crate) struct ErrorLog(Arc<Mutex<Vec<String>>>);

impl ErrorLog {
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Subscriber for ErrorLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() == Level::ERROR
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let text = format!("{event:?}");
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
