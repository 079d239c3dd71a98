//! Time: instants and durations at both ends, in the core.

use std::time::Duration;

use standin::timing::{PassTiming, PassWork};
use standin::{Command, EngineConfig, EngineKind, EngineTime, FinishReason, Request, Scheduler, SequenceId, Speedup};

use crate::kit::{engine, kinds, run, small_vllm, submission};

#[test]
fn instants_and_durations_saturate() {
    let (start, end) = (EngineTime::ZERO, EngineTime::MAX);
    let longest = Duration::from_nanos(u64::MAX);
    let rows = [
        ("the end and a nanosecond", end + Duration::from_nanos(1), end),
        ("the end and for ever", end + Duration::MAX, end),
        ("the start and for ever", start + Duration::MAX, end),
        ("nothing", start + Duration::ZERO, start),
        ("milliseconds", EngineTime::from_millis(u64::MAX), end),
        (
            "the last whole one",
            EngineTime::from_millis(18_446_744_073_709),
            EngineTime::from_nanos(18_446_744_073_709_000_000),
        ),
        ("one more", EngineTime::from_millis(18_446_744_073_710), end),
        ("a duration", EngineTime::from(Duration::MAX), end),
        ("the longest one", EngineTime::from(longest), end),
    ];
    for (what, instant, expected) in rows {
        assert_eq!(instant, expected, "{what}");
        assert!(instant.as_secs_f64().is_finite() && !format!("{instant} {instant:?}").is_empty());
        let json = serde_json::to_string(&instant).expect("a number");
        assert_eq!(serde_json::from_str::<EngineTime>(&json).expect("a number"), instant, "{what}");
    }
    assert_eq!((start.saturating_since(end), end.saturating_since(start)), (Duration::ZERO, longest));
    for json in ["-1", "1.5", "18446744073709551616", "null", "\"1\""] {
        assert!(serde_json::from_str::<EngineTime>(json).is_err(), "{json}");
    }
}

#[test]
fn factors_scale_anything() {
    let longest = Duration::from_nanos(u64::MAX);
    let second = Duration::from_secs(1);
    let rows = [
        (Speedup::Factor(f64::MIN_POSITIVE), second, longest),
        (Speedup::Factor(5e-324), Duration::from_nanos(1), longest),
        (Speedup::Factor(5e-324), Duration::ZERO, Duration::ZERO),
        (Speedup::Factor(f64::MAX), Duration::MAX, Duration::ZERO),
        (Speedup::Factor(2.0), Duration::MAX, longest),
        (Speedup::Factor(1.0), Duration::MAX, Duration::MAX),
        (Speedup::Instant, Duration::MAX, Duration::ZERO),
        (Speedup::Factor(1e9), second, Duration::from_nanos(1)),
        (Speedup::Factor(3e9), second, Duration::ZERO),
    ];
    for (speedup, duration, expected) in rows {
        assert_eq!(speedup.scale(duration), expected, "{duration:?} at {speedup:?}");
    }
}

/// A timing model that always says the same.
#[derive(Debug)]
struct Always(Duration);

impl PassTiming for Always {
    fn pass_duration(&mut self, _: &PassWork) -> Duration {
        self.0
    }
}

/// Whatever a caller's model says, passes begin and end in order, and a request ends.
#[test]
fn passes_of_any_length_end() {
    for config in kinds() {
        for speedup in [Speedup::Factor(1.0), Speedup::Factor(f64::MIN_POSITIVE), Speedup::Factor(f64::MAX)] {
            for duration in [Duration::ZERO, Duration::from_nanos(u64::MAX), Duration::MAX] {
                for begin in [EngineTime::ZERO, EngineTime::from_nanos(u64::MAX - 1), EngineTime::MAX] {
                    let config = config.clone().with_speedup(speedup);
                    let mut scheduler = Scheduler::new(&config).expect("valid").with_timing(Box::new(Always(duration)));
                    let request = Request::new(vec![1; 70 / 7], 3);
                    scheduler.apply(Command::Submit(submission(1, request)), begin).expect("valid");
                    let (mut now, mut tokens) = (begin, 0);
                    while let Some(pass) = scheduler.begin_pass(now) {
                        assert!(pass.ends_at() >= now, "{duration:?}");
                        now = pass.ends_at();
                        let effects = scheduler.finish_pass(pass, now);
                        assert!(effects.pass.is_none_or(|pass| pass.duration() <= Duration::from_nanos(u64::MAX)));
                        tokens += effects.outputs.len();
                    }
                    assert_eq!(tokens, 3, "{duration:?} from {begin}");
                }
            }
        }
    }
}

#[test]
fn arrivals_at_both_ends_of_time() {
    for config in kinds() {
        for arrival in [EngineTime::ZERO, EngineTime::from_nanos(u64::MAX - 1), EngineTime::MAX] {
            for now in [EngineTime::ZERO, EngineTime::MAX] {
                let request = Request::new(vec![1; 9], 3).with_arrival(arrival);
                assert_eq!(run(&config, request, now, 50), (3, Some(FinishReason::Length)), "{arrival} at {now}");
            }
        }
    }
}

/// Commands may be stamped with any time, in any order; the latest one is what time it is.
#[test]
fn clocks_that_jump_and_go_back() {
    for config in kinds() {
        let mut scheduler = Scheduler::new(&config).expect("valid");
        let times = [EngineTime::MAX, EngineTime::ZERO, EngineTime::from_nanos(1), EngineTime::MAX, EngineTime::ZERO];
        for (id, now) in (0..).zip(times) {
            let submission = submission(id, Request::new(vec![1; 9], 2));
            scheduler.apply(Command::Submit(submission), now).expect("valid");
        }
        let (mut now, mut tokens) = (EngineTime::from_nanos(5), 0);
        loop {
            let Some(pass) = scheduler.begin_pass(now) else {
                match scheduler.next_deadline() {
                    Some(next) => now = now.max(next),
                    None => break,
                }
                continue;
            };
            now = pass.ends_at();
            tokens += scheduler.finish_pass(pass, now).outputs.len();
        }
        assert_eq!(tokens, 10);
        let _: standin::Cancelled = scheduler.cancel(SequenceId(u64::MAX), EngineTime::ZERO);
        assert!(scheduler.settle(EngineTime::ZERO).is_none());
    }
}

/// A pass that ends before it began, or long after its time: the scheduler is told so, and goes on.
#[test]
fn passes_that_are_finished_at_the_wrong_time() {
    for config in kinds() {
        for end in [EngineTime::ZERO, EngineTime::MAX] {
            let mut scheduler = Scheduler::new(&config).expect("valid");
            let submission = submission(1, Request::new(vec![1; 9], 2));
            scheduler.apply(Command::Submit(submission), EngineTime::from_millis(5)).expect("valid");
            let pass = scheduler.begin_pass(EngineTime::from_millis(5)).expect("work");
            let effects = scheduler.finish_pass(pass, end);
            assert_eq!((effects.at, effects.outputs.len()), (end, 1));
            let pass = scheduler.begin_pass(EngineTime::from_millis(6)).expect("work");
            assert_eq!(scheduler.finish_pass(pass, EngineTime::MAX).outputs.len(), 1);
        }
    }
}

#[test]
fn leases_and_guards_without_end_or_length() {
    for lease in [Duration::ZERO, Duration::from_nanos(1), Duration::from_nanos(u64::MAX), Duration::MAX] {
        let vllm = small_vllm().with_kv_lease(lease).with_transfer_guard(lease);
        let config: EngineConfig = engine(EngineKind::Vllm(vllm));
        assert_eq!(config.validate(), Ok(()), "{lease:?}");
        let json = serde_json::to_string(&config).expect("plain data");
        EngineConfig::from_json(&json).unwrap_or_else(|error| panic!("{lease:?}: {error}"));
    }
}
