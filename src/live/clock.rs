//! The one file that reads a clock: engine time on Tokio's clock, so paused time works.

use std::time::Duration;

use tokio::time::Instant;

use crate::time::EngineTime;

/// What Tokio's timers count in.
const TICK: Duration = Duration::from_millis(1);

/// Further than any run goes: a hundred years.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Maps engine time to Tokio's clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    epoch: Instant,
}

impl Clock {
    pub(super) fn new(epoch: Option<Instant>) -> Self {
        Self { epoch: epoch.unwrap_or_else(tokio_now) }
    }

    /// Engine time now; zero before the epoch.
    pub(super) fn now(&self) -> EngineTime {
        EngineTime::from(tokio_now().saturating_duration_since(self.epoch))
    }

    /// The instant of an engine time. Where Tokio's clock does not reach so far it is as far as anybody waits:
    /// whoever wakes up there finds that it is not time yet.
    pub(super) fn instant(&self, at: EngineTime) -> Instant {
        self.epoch.checked_add(at.since_epoch()).unwrap_or_else(|| tokio_now() + FAR)
    }

    /// The deadline for a timer that is set now and is to fire at `due`, or less than a tick after it.
    ///
    /// Tokio rounds a deadline up to its own ticks of a millisecond, and then sleeps a whole number of
    /// milliseconds from now: a deadline at `due` fires up to two of them late. From any deadline within a
    /// tick it sleeps equally long, so this is one that makes it sleep the fewest whole milliseconds that
    /// reach `due`. Where something else makes Tokio look at its timers meanwhile it may fire before
    /// `due`, by less than a tick; then it must be set again.
    pub(super) fn timer(&self, due: EngineTime) -> Instant {
        let now = tokio_now();
        let ticks = self.instant(due).saturating_duration_since(now).as_nanos().div_ceil(TICK.as_nanos());
        let whole = u32::try_from(ticks.saturating_sub(1)).unwrap_or(u32::MAX);
        now + TICK * whole + Duration::from_micros(1)
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
fn tokio_now() -> Instant {
    Instant::now()
}
