//! The one file that reads a clock: engine time on Tokio's clock, so paused time works.

use tokio::time::Instant;

use crate::time::EngineTime;

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

    /// The instant of an engine time.
    pub(super) fn instant(&self, at: EngineTime) -> Instant {
        self.epoch + at.since_epoch()
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place that reads the clock")]
fn tokio_now() -> Instant {
    Instant::now()
}
