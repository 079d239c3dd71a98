//! From single requests to a report.

use std::collections::BTreeMap;
use std::time::Duration;

use super::report::finish_name;
use super::{Distribution, EndlessCacheBound, Report};
use crate::metrics::EngineMetrics;
use crate::output::FinishReason;
use crate::time::EngineTime;

/// What is known of one request in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestRecord {
    arrival: EngineTime,
    prompt_tokens: u32,
    admission: Option<(EngineTime, u32)>,
    first_and_last_token: Option<(EngineTime, EngineTime)>,
    output_tokens: u32,
    gaps: Vec<Duration>,
}

impl RequestRecord {
    /// A request that arrives at `arrival`.
    #[must_use]
    pub fn new(arrival: EngineTime, prompt_tokens: u32) -> Self {
        Self { arrival, prompt_tokens, admission: None, first_and_last_token: None, output_tokens: 0, gaps: Vec::new() }
    }

    /// It was admitted with so many prompt tokens found in the cache. Only the first admission counts.
    pub fn admitted(&mut self, at: EngineTime, cached_tokens: u32) {
        self.admission.get_or_insert((at, cached_tokens));
    }

    /// It got a token.
    pub fn token(&mut self, at: EngineTime) {
        let gap = self.count_token(at);
        self.gaps.extend(gap);
    }

    /// It got a token. The time since the one before is not kept: it is for [`Recorder::gaps`].
    pub fn count_token(&mut self, at: EngineTime) -> Option<Duration> {
        self.output_tokens += 1;
        match &mut self.first_and_last_token {
            None => {
                self.first_and_last_token = Some((at, at));
                None
            }
            Some((_, last)) => Some(at.saturating_since(std::mem::replace(last, at))),
        }
    }

    /// Prompt and output tokens so far.
    #[cfg(feature = "serde")]
    pub(super) fn tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }

    /// Output tokens so far.
    #[must_use]
    pub fn output_tokens(&self) -> u32 {
        self.output_tokens
    }
}

/// Collects requests as they end.
#[derive(Debug, Clone, Default)]
pub struct Recorder {
    refused: u64,
    ended: BTreeMap<&'static str, u64>,
    completed: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    queue: Distribution,
    ttft: Distribution,
    itl: Distribution,
    end_to_end: Distribution,
    first_arrival: Option<EngineTime>,
    last_end: EngineTime,
}

impl Recorder {
    /// Nothing recorded.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A request was refused at submission; it counts as that and in no other figure.
    pub fn refused(&mut self) {
        self.refused += 1;
    }

    /// So many times a token came so long after the one before, in requests that count their tokens
    /// ([`RequestRecord::count_token`]).
    pub fn gaps(&mut self, gap: Duration, count: u64) {
        self.itl.add_many(gap, count);
    }

    /// A request ended.
    pub fn ended(&mut self, record: &RequestRecord, at: EngineTime, reason: FinishReason) {
        *self.ended.entry(finish_name(reason)).or_default() += 1;
        let first_arrival = self.first_arrival.unwrap_or(EngineTime::MAX);
        self.first_arrival = Some(first_arrival.min(record.arrival));
        self.last_end = self.last_end.max(at);
        if let Some((admitted_at, cached_tokens)) = record.admission {
            self.prompt_tokens += u64::from(record.prompt_tokens);
            self.cached_tokens += u64::from(cached_tokens);
            self.queue.add(admitted_at.saturating_since(record.arrival));
        }
        self.output_tokens += u64::from(record.output_tokens);
        if let Some((first, _)) = record.first_and_last_token {
            self.ttft.add(first.saturating_since(record.arrival));
        }
        record.gaps.iter().for_each(|&gap| self.itl.add(gap));
        if matches!(reason, FinishReason::Stop { .. } | FinishReason::Length) {
            self.completed += 1;
            self.end_to_end.add(at.saturating_since(record.arrival));
        }
    }

    /// Requests refused or ended so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.refused + self.ended.values().sum::<u64>()
    }

    /// The report, with what the engine counted itself and the bound of the trace, if it has one.
    #[must_use]
    pub fn report(&self, metrics: &EngineMetrics, endless_cache: Option<EndlessCacheBound>) -> Report {
        let duration = self.last_end.saturating_since(self.first_arrival.unwrap_or(self.last_end));
        let per_second = |count: u64| if duration.is_zero() { 0.0 } else { count as f64 / duration.as_secs_f64() };
        Report {
            requests: self.requests(),
            refused: self.refused,
            ended: self.ended.clone(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            prefix_hit_rate: super::endless_cache::ratio(self.cached_tokens, self.prompt_tokens),
            endless_cache,
            output_tokens: self.output_tokens,
            preemptions: metrics.num_preemptions,
            passes: metrics.num_passes,
            queue_ms: self.queue.summary(),
            ttft_ms: self.ttft.summary(),
            itl_ms: self.itl.summary(),
            end_to_end_ms: self.end_to_end.summary(),
            modelled_s: duration.as_secs_f64(),
            output_tokens_per_s: per_second(self.output_tokens),
            requests_per_s: per_second(self.completed),
            wall: None,
        }
    }
}
