//! Engine time: the one clock value that crosses every boundary of the crate.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

/// A point in engine time: nanoseconds since the engine's epoch.
///
/// The core is told the time in these; the live engine maps them to Tokio's clock.
/// A `u64` of nanoseconds holds 584 years, and additions saturate at the end of that.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct EngineTime(u64);

impl EngineTime {
    /// The engine's epoch.
    pub const ZERO: Self = Self(0);
    /// The last instant that can be expressed.
    pub const MAX: Self = Self(u64::MAX);

    /// The instant `nanos` nanoseconds after the epoch.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The instant `millis` milliseconds after the epoch, saturating at [`EngineTime::MAX`].
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Nanoseconds since the epoch.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Seconds since the epoch, for reports.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.since_epoch().as_secs_f64()
    }

    /// The time since the epoch as a duration.
    #[must_use]
    pub const fn since_epoch(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// How long after `earlier` this instant is; zero if it is not after it.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl From<Duration> for EngineTime {
    /// The instant `since_epoch` after the epoch, saturating at [`EngineTime::MAX`].
    fn from(since_epoch: Duration) -> Self {
        Self(u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl Add<Duration> for EngineTime {
    type Output = Self;

    /// Saturates at [`EngineTime::MAX`].
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(Self::from(duration).0))
    }
}

impl fmt::Debug for EngineTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.since_epoch())
    }
}

impl fmt::Display for EngineTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.since_epoch())
    }
}

/// Durations in JSON: milliseconds, fractions allowed, up to [`Duration::MAX`].
#[cfg(feature = "serde")]
pub(crate) mod duration_ms {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::time::Duration;

    /// What [`Duration::MAX`] is as a double: a second more, for want of digits.
    const MAX_SECS: f64 = u64::MAX as f64;

    pub(crate) fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(value.as_secs_f64() * 1e3)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let seconds = f64::deserialize(deserializer)? / 1e3;
        if seconds == MAX_SECS {
            return Ok(Duration::MAX);
        }
        let allowed = || format!("must be a number of milliseconds from 0 to {:e}", MAX_SECS * 1e3);
        Duration::try_from_secs_f64(seconds).map_err(|_| D::Error::custom(allowed()))
    }
}

/// Durations in JSON that may be left out or `null`: milliseconds, fractions allowed.
#[cfg(feature = "serde")]
pub(crate) mod optional_duration_ms {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::time::Duration;

    #[derive(Serialize, Deserialize)]
    struct Milliseconds(#[serde(with = "super::duration_ms")] Duration);

    pub(crate) fn serialize<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(Milliseconds).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<Milliseconds>::deserialize(deserializer)?.map(|Milliseconds(duration)| duration))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn additions_and_conversions_saturate() {
        assert_eq!(EngineTime::MAX + Duration::from_nanos(1), EngineTime::MAX);
        assert_eq!(EngineTime::from(Duration::MAX), EngineTime::MAX);
        assert_eq!(EngineTime::from_millis(u64::MAX), EngineTime::MAX);
        assert_eq!(EngineTime::ZERO.saturating_since(EngineTime::MAX), Duration::ZERO);
        assert_eq!(EngineTime::from_millis(2) + Duration::from_micros(5), EngineTime::from_nanos(2_005_000));
    }
}
