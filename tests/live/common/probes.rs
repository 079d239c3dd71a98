//! Timing models by closure, and a log that wakers write to.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::Duration;

use standin::timing::{PassTiming, PassWork};

/// A timing model that asks a closure.
pub(crate) struct Timing<F>(pub(crate) F);

impl<F> Debug for Timing<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Timing")
    }
}

impl<F: FnMut(&PassWork) -> Duration + Send> PassTiming for Timing<F> {
    fn pass_duration(&mut self, work: &PassWork) -> Duration {
        (self.0)(work)
    }
}

/// Passes of these durations; the last one repeats.
pub(crate) fn durations(mut durations: Vec<Duration>) -> impl PassTiming {
    durations.reverse();
    Timing(move |_: &PassWork| {
        if durations.len() > 1 { durations.pop() } else { durations.last().copied() }.expect("one")
    })
}

/// What happened, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub(crate) fn note(&self, what: impl Into<String>) {
        self.0.lock().expect("no panic while it is held").push(what.into());
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("no panic while it is held"))
    }

    /// A waker that notes its name.
    pub(crate) fn waker(&self, name: &str) -> Waker {
        let (log, name) = (self.clone(), name.to_owned());
        waker_of(move || log.note(name.clone()))
    }
}

/// A waker that calls this, within the call that delivers what is waited for.
pub(crate) fn waker_of(call: impl Fn() + Send + Sync + 'static) -> Waker {
    Arc::new(CallingWaker(call)).into()
}

struct CallingWaker<F>(F);

impl<F: Fn() + Send + Sync + 'static> Wake for CallingWaker<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}
