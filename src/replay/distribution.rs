//! Durations counted exactly.

use std::time::Duration;

/// A multiset of durations, to the nanosecond.
///
/// It holds one entry per *distinct* duration, and at most as many again that were added lately. The tokens of a
/// batch come at the same instants, so the gaps between millions of tokens are as many different ones as
/// there were passes.
#[derive(Debug, Clone, Default)]
pub struct Distribution {
    /// Nanoseconds and how often, ascending, each duration once.
    sorted: Vec<(u64, u64)>,
    /// The same as it was added.
    recent: Vec<(u64, u64)>,
    count: u64,
    sum_nanos: u128,
}

/// Additions that are sorted in together at the least.
const FEW: usize = 4096;

/// Mean, percentiles and maximum of a [`Distribution`], in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Summary {
    /// How many values.
    pub count: u64,
    /// Their arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl Distribution {
    /// Adds a duration; what is longer than a `u64` of nanoseconds counts as that.
    pub fn add(&mut self, duration: Duration) {
        self.add_many(duration, 1);
    }

    /// Adds a duration `count` times. Counts saturate at the end of a `u64`.
    pub fn add_many(&mut self, duration: Duration, count: u64) {
        if count == 0 {
            return;
        }
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.recent.push((nanos, count));
        if self.recent.len() >= FEW.max(self.sorted.len()) {
            self.sorted = self.counts();
            self.recent.clear();
        }
        self.count = self.count.saturating_add(count);
        self.sum_nanos = self.sum_nanos.saturating_add(u128::from(nanos) * u128::from(count));
    }

    /// How many durations it holds.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Every distinct duration in nanoseconds, and how often it was added, ascending.
    fn counts(&self) -> Vec<(u64, u64)> {
        let mut counts = Vec::with_capacity(self.sorted.len() + self.recent.len());
        counts.extend_from_slice(&self.sorted);
        counts.extend_from_slice(&self.recent);
        // Stable: it finds the part that is in order.
        counts.sort_by_key(|&(nanos, _)| nanos);
        counts.dedup_by(|(later, count), (nanos, total)| {
            let same = later == nanos;
            *total = total.saturating_add(if same { *count } else { 0 });
            same
        });
        counts
    }

    /// The percentile by nearest rank: the smallest value that at least `percent` % of the values do not
    /// exceed. It is always one of the values, nothing is interpolated. `percent` is above 0 and at most 100.
    #[must_use]
    pub fn percentile(&self, percent: u32) -> Option<Duration> {
        self.percentile_of(&self.counts(), percent)
    }

    fn percentile_of(&self, counts: &[(u64, u64)], percent: u32) -> Option<Duration> {
        let rank = (u128::from(self.count) * u128::from(percent)).div_ceil(100);
        let mut below_or_equal = 0;
        for &(nanos, count) in counts {
            below_or_equal += u128::from(count);
            if below_or_equal >= rank {
                return Some(Duration::from_nanos(nanos));
            }
        }
        None
    }

    /// The usual summary; `None` if there is no value.
    #[must_use]
    pub fn summary(&self) -> Option<Summary> {
        let counts = self.counts();
        let percentile = |percent| Some(self.percentile_of(&counts, percent)?.as_nanos() as f64 / 1e6);
        Some(Summary {
            count: self.count,
            p50: percentile(50)?,
            p90: percentile(90)?,
            p99: percentile(99)?,
            max: percentile(100)?,
            mean: self.sum_nanos as f64 / self.count as f64 / 1e6,
        })
    }
}

impl PartialEq for Distribution {
    /// Equal multisets, in whatever order they were added.
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && self.counts() == other.counts()
    }
}

impl Eq for Distribution {}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(milliseconds: impl IntoIterator<Item = u64>) -> Distribution {
        let mut distribution = Distribution::default();
        milliseconds.into_iter().for_each(|value| distribution.add(Duration::from_millis(value)));
        distribution
    }

    fn percentiles(distribution: &Distribution) -> [u128; 4] {
        [50, 90, 99, 100].map(|percent| distribution.percentile(percent).expect("values").as_millis())
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        assert_eq!(percentiles(&of(1..=100)), [50, 90, 99, 100]);
        assert_eq!(percentiles(&of(1..=101)), [51, 91, 100, 101]);
        assert_eq!(percentiles(&of([7])), [7, 7, 7, 7]);
        assert_eq!(percentiles(&of([20, 10])), [10, 20, 20, 20]);
        assert_eq!(percentiles(&of([10, 10, 10, 10, 10, 10, 10, 10, 10, 99])), [10, 10, 99, 99]);
    }

    #[test]
    fn they_agree_with_sorting_on_many_values() {
        let values: Vec<u64> = (0..5_003_u64).map(|index| crate::output::mix(index) % 700).collect();
        let mut sorted = values.clone();
        sorted.sort_unstable();
        let distribution = of(values);
        for percent in 1..=100 {
            let rank = (sorted.len() * percent as usize).div_ceil(100);
            let expected = Duration::from_millis(sorted[rank - 1]);
            assert_eq!(distribution.percentile(percent), Some(expected), "{percent} %");
        }
    }

    #[test]
    fn the_summary_is_in_milliseconds() {
        let mut distribution = of([1, 2]);
        distribution.add(Duration::from_micros(4500));
        let summary = distribution.summary().expect("values");
        assert_eq!((summary.count, summary.mean, summary.p50, summary.max), (3, 2.5, 2.0, 4.5));
        assert_eq!(of([]).summary(), None);
        let mut longest = of([]);
        longest.add(Duration::MAX);
        assert_eq!(longest.percentile(50), Some(Duration::from_nanos(u64::MAX)));
    }
}
