//! What a replay measured.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{EndlessCacheBound, Summary};
use crate::output::FinishReason;

/// What a replay measured, made by [`super::Recorder::report`].
///
/// `Display` writes it for people, serde for programs. All but `wall` is a function of the trace and the
/// configuration where time is virtual, and `wall` is not serialised: two such runs give the same JSON to the byte.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Report {
    /// Requests that were sent.
    pub requests: u64,
    /// Those refused at submission.
    pub refused: u64,
    /// The others by how they ended, under the names that [`FinishReason`] has in JSON.
    pub ended: BTreeMap<&'static str, u64>,
    /// Prompt tokens of the admitted requests.
    pub prompt_tokens: u64,
    /// Those found in the prefix cache at the first admission.
    pub cached_tokens: u64,
    /// `cached_tokens / prompt_tokens`.
    pub prefix_hit_rate: f64,
    /// What a cache without limits would have found; `None` where the trace does not tell.
    pub endless_cache: Option<EndlessCacheBound>,
    /// Output tokens of all requests.
    pub output_tokens: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Passes that computed something.
    pub passes: u64,
    /// From arrival to the first admission, over the admitted requests.
    pub queue_ms: Option<Summary>,
    /// TTFT: from arrival to the first token, over the requests that got one.
    pub ttft_ms: Option<Summary>,
    /// ITL: from one token of a request to its next, over all such pairs.
    pub itl_ms: Option<Summary>,
    /// From arrival to the end, over the requests that ended by length or by a stop token.
    pub end_to_end_ms: Option<Summary>,
    /// Engine time from the first arrival to the last end, in seconds.
    pub modelled_s: f64,
    /// `output_tokens / modelled_s`.
    pub output_tokens_per_s: f64,
    /// Requests that ended by length or by a stop token, per second of `modelled_s`.
    pub requests_per_s: f64,
    /// How long the replay took on a wall clock. For people only.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub wall: Option<Duration>,
}

/// The name of a reason in JSON, without what it carries.
pub(super) fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop { .. } => "stop",
        FinishReason::Length => "length",
        FinishReason::Rejected => "rejected",
        FinishReason::Cancelled => "cancelled",
        FinishReason::SlowConsumer => "slow_consumer",
        FinishReason::OutOfMemory => "out_of_memory",
        FinishReason::TransferFailed => "transfer_failed",
        FinishReason::EngineStopped => "engine_stopped",
        FinishReason::Failed => "failed",
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EndlessCache, Recorder, RequestRecord};
    use super::*;
    use crate::metrics::EngineMetrics;
    use crate::time::EngineTime;

    const fn ms(milliseconds: u64) -> EngineTime {
        EngineTime::from_millis(milliseconds)
    }

    fn record(arrival: u64, prompt_tokens: u32, admitted: u64, cached: u32, tokens: &[u64]) -> RequestRecord {
        let mut record = RequestRecord::new(ms(arrival), prompt_tokens);
        record.admitted(ms(admitted), cached);
        record.admitted(ms(admitted + 500), 7); // after a preemption: does not count
        tokens.iter().for_each(|&at| record.token(ms(at)));
        record
    }

    /// Three requests that end, one that is cancelled in the queue, one that is refused.
    fn recorder() -> Recorder {
        let mut recorder = Recorder::new();
        recorder.ended(&record(1000, 600, 1000, 0, &[1020, 1030, 1050]), ms(1050), FinishReason::Length);
        recorder.ended(&record(1010, 1400, 1020, 512, &[1050]), ms(1050), FinishReason::Stop { stop_token: Some(3) });
        recorder.ended(&record(1100, 2000, 1400, 1024, &[2000, 3000]), ms(4000), FinishReason::Length);
        recorder.ended(&RequestRecord::new(ms(1200), 9000), ms(1300), FinishReason::Cancelled);
        recorder.refused();
        recorder
    }

    fn report() -> Report {
        let metrics = EngineMetrics { num_preemptions: 2, num_passes: 12_345, ..EngineMetrics::default() };
        let mut cache = EndlessCache::new();
        cache.observe(600, &[1, 2], 512);
        cache.observe(1400, &[1, 3, 4], 512);
        cache.observe(2000, &[1, 3, 5, 6], 512);
        recorder().report(&metrics, cache.bound())
    }

    #[test]
    fn every_figure_follows_its_definition() {
        let report = report();
        assert_eq!((report.requests, report.refused), (5, 1));
        assert_eq!(report.ended, BTreeMap::from([("length", 2), ("stop", 1), ("cancelled", 1)]));
        assert_eq!(
            (report.prompt_tokens, report.cached_tokens),
            (4000, 1536),
            "what was never admitted does not count"
        );
        assert_eq!(report.prefix_hit_rate, 0.384);
        assert_eq!((report.output_tokens, report.preemptions, report.passes), (6, 2, 12_345));
        let means = [&report.queue_ms, &report.ttft_ms, &report.itl_ms, &report.end_to_end_ms]
            .map(|summary| summary.map(|summary| (summary.count, summary.mean, summary.p50)));
        assert_eq!(means[0], Some((3, 310.0 / 3.0, 10.0)));
        assert_eq!(means[1], Some((3, 960.0 / 3.0, 40.0)));
        assert_eq!(means[2], Some((3, 1030.0 / 3.0, 20.0)));
        assert_eq!(means[3], Some((3, 2990.0 / 3.0, 50.0)), "the cancelled one does not count");
        assert_eq!(report.modelled_s, 3.0, "from the first arrival to the last end");
        assert_eq!((report.output_tokens_per_s, report.requests_per_s), (2.0, 1.0));
    }

    #[test]
    fn the_order_in_which_requests_of_one_instant_end_changes_nothing() {
        let metrics = EngineMetrics::default();
        let (mut left, mut right) = (Recorder::new(), Recorder::new());
        let first = record(0, 10, 1, 0, &[5, 9]);
        let second = record(2, 20, 3, 0, &[6, 9]);
        left.ended(&first, ms(9), FinishReason::Length);
        left.ended(&second, ms(9), FinishReason::Length);
        right.ended(&second, ms(9), FinishReason::Length);
        right.ended(&first, ms(9), FinishReason::Length);
        assert_eq!(left.report(&metrics, None), right.report(&metrics, None));
    }

    #[test]
    fn the_text_is_aligned_and_has_units() {
        let mut report = report();
        report.wall = Some(Duration::from_millis(250));
        assert_eq!(report.to_string(), TEXT);
    }
    const TEXT: &str = "\
requests                  5   1 cancelled, 2 length, 1 stop, 1 refused
prompt tokens         4,000   38.4 % from the prefix cache (endless cache: 38.4 % of tokens, 33.3 % of blocks)
output tokens             6
preemptions               2   in 12,345 passes

                       mean         p50         p90         p99         max
time in queue     103.33 ms    10.00 ms   300.00 ms   300.00 ms   300.00 ms
TTFT              320.00 ms    40.00 ms   900.00 ms   900.00 ms   900.00 ms
ITL               343.33 ms    20.00 ms      1.00 s      1.00 s      1.00 s
end to end        996.67 ms    50.00 ms      2.90 s      2.90 s      2.90 s

modelled time        3.00 s   2.0 output tokens/s, 1.00 requests/s
wall time         250.00 ms   12.0 times as fast as modelled
";

    #[test]
    fn an_empty_replay_has_a_report_too() {
        let report = Recorder::new().report(&EngineMetrics::default(), None);
        assert_eq!((report.modelled_s, report.output_tokens_per_s, report.prefix_hit_rate), (0.0, 0.0, 0.0));
        assert_eq!((report.ttft_ms, report.itl_ms), (None, None));
        assert!(report.to_string().contains("requests"));
    }

    #[cfg(feature = "serde")]
    #[test]
    fn the_json_knows_no_wall_time_and_names_reasons_as_they_are_serialised() {
        let (mut quick, mut slow) = (report(), report());
        quick.wall = Some(Duration::from_millis(1));
        slow.wall = Some(Duration::from_secs(9));
        let json = |report: &Report| serde_json::to_string_pretty(report).expect("serialises");
        assert_eq!(json(&quick), json(&slow));
        assert!(json(&quick).contains("\"ttft_ms\": {\n    \"count\": 3,"), "{}", json(&quick));

        let reasons = [
            FinishReason::Length,
            FinishReason::Rejected,
            FinishReason::Cancelled,
            FinishReason::SlowConsumer,
            FinishReason::OutOfMemory,
            FinishReason::TransferFailed,
            FinishReason::EngineStopped,
            FinishReason::Failed,
        ];
        for reason in reasons {
            assert_eq!(serde_json::to_value(reason).expect("serialises"), finish_name(reason));
        }
    }
}
