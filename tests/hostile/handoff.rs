//! Handoffs: commands, transfers, links and coordinators with values at the edges.

use std::time::Duration;

use standin::handoff::{
    ActionOutcome, CoordinatorAction as Action, CoordinatorFact as Fact, FaultRates, Faults, HandoffOutcome, Link,
    LinkSharing, TransferCost, TransferTiming, TransferTimingMode,
};
use standin::{
    Applied, Command, Coordinator, CoordinatorConfig, EngineKind, EngineTime, FinishReason, FirstToken, HandoffId,
    HandoffKey, LoadFailurePolicy, Request, Scheduler, Speedup,
};
use uuid::Uuid;

use crate::kit::{assert_refused, engine, small_vllm, submission};

const ID: HandoffId = HandoffId(Uuid::from_u128(u128::MAX));
const LONGEST: Duration = Duration::from_nanos(u64::MAX);

fn key(generation: u64) -> HandoffKey {
    HandoffKey::new(ID, generation)
}

/// A source that is held at engine time 10 ms, under a lease.
fn held(lease: Duration) -> Scheduler {
    let config = engine(EngineKind::Vllm(small_vllm().with_kv_lease(lease)));
    let mut scheduler = Scheduler::new(&config).expect("valid");
    let submit = Command::SubmitPrefill {
        handoff: key(u64::MAX),
        submission: submission(u64::MAX, Request::new(vec![1; 9], 1)),
    };
    assert_eq!(scheduler.apply(submit, EngineTime::ZERO), Ok(Applied::Submitted));
    let pass = scheduler.begin_pass(EngineTime::ZERO).expect("a prefill");
    let end = pass.ends_at();
    scheduler.finish_pass(pass, end);
    scheduler
}

#[test]
fn heartbeats_extend_any_lease() {
    let (end, now) = (EngineTime::from_millis(10), EngineTime::from_millis(11));
    for lease in
        [Duration::from_secs(30), LONGEST, Duration::MAX / 2, Duration::MAX - Duration::from_nanos(1), Duration::MAX]
    {
        let mut scheduler = held(lease);
        assert_eq!(scheduler.next_deadline(), Some(end + lease), "{lease:?}");
        for now in [now, EngineTime::from_nanos(u64::MAX - 1)] {
            let before = scheduler.next_deadline();
            let answer = scheduler.apply(Command::Heartbeat { handoff: key(u64::MAX) }, now);
            let over = before.is_some_and(|until| until <= now);
            assert_eq!(answer, Ok(if over { Applied::HandoffOver } else { Applied::Handoff }), "{lease:?}");
            assert!(over || scheduler.next_deadline() >= before, "{lease:?}: never shorter");
        }
    }
    let scheduler = held(Duration::ZERO);
    assert_eq!(scheduler.view().pool().num_free_blocks(), 100);
}

#[test]
fn commands_with_values_at_the_edges() {
    for policy in [LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute] {
        for (valid_tokens, is_whole) in [(0, false), (1, false), (8, false), (9, true), (10, true), (u32::MAX, true)] {
            let config = engine(EngineKind::Vllm(small_vllm().with_kv_load_failure_policy(policy)));
            let mut scheduler = reserved(&config);
            let fail = Command::FailTransfer { handoff: key(1), valid_tokens };
            assert_eq!(scheduler.apply(fail, EngineTime::ZERO), Ok(Applied::Handoff));
            let fails = policy == LoadFailurePolicy::Fail && !is_whole;
            let expected = if fails { FinishReason::TransferFailed } else { FinishReason::Length };
            assert_eq!(ends(&mut scheduler), Some(expected), "{policy:?}, {valid_tokens}");
        }
    }
    for first_token in [None, Some(0), Some(u32::MAX)] {
        for way in [FirstToken::Recomputed, FirstToken::CarriedOver] {
            let config = engine(EngineKind::Vllm(small_vllm().with_first_token(way)));
            let mut scheduler = reserved(&config);
            let activate = Command::ActivateDestination { handoff: key(1), first_token };
            assert_eq!(scheduler.apply(activate, EngineTime::ZERO), Ok(Applied::Handoff));
            assert_eq!(ends(&mut scheduler), Some(FinishReason::Length), "{first_token:?} {way:?}");
        }
    }
    // A prompt that claims too much is refused under a handoff, too.
    let mut scheduler = Scheduler::new(&engine(EngineKind::Vllm(small_vllm()))).expect("valid");
    for length in [0, 64, u32::MAX as usize, usize::MAX] {
        let submission = submission(1, Request::new(crate::kit::untouchable(length), 1));
        for command in [
            Command::SubmitPrefill { handoff: key(0), submission: submission.clone() },
            Command::ReserveDestination { handoff: key(0), submission: submission.clone() },
            Command::SubmitDecode(submission.clone()),
        ] {
            assert!(scheduler.apply(command, EngineTime::MAX).is_err(), "{length}");
        }
    }
    assert_eq!(scheduler.view().num_handoffs(), 0);
}

/// A destination of 9 prompt tokens and 2 outputs that has its blocks.
fn reserved(config: &standin::EngineConfig) -> Scheduler {
    let mut scheduler = Scheduler::new(config).expect("valid");
    let submission = submission(1, Request::new(vec![1; 9], 2));
    let reserve = Command::ReserveDestination { handoff: key(1), submission };
    scheduler.apply(reserve, EngineTime::ZERO).expect("valid");
    assert!(scheduler.begin_pass(EngineTime::ZERO).is_none(), "it only reserves");
    scheduler
}

fn ends(scheduler: &mut Scheduler) -> Option<FinishReason> {
    let mut now = EngineTime::ZERO;
    let mut ended = scheduler.settle(now).and_then(|effects| effects.outputs.first()?.finish);
    while let Some(pass) = scheduler.begin_pass(now) {
        now = pass.ends_at();
        let effects = scheduler.finish_pass(pass, now);
        ended = effects.outputs.iter().find_map(|output| output.finish).or(ended);
    }
    ended
}

#[test]
fn transfers_of_anything_over_anything() {
    let bandwidths = [
        (Some(f64::NAN), "NaN"),
        (Some(f64::INFINITY), "inf"),
        (Some(f64::NEG_INFINITY), "-inf"),
        (Some(-5e-324), "-0.000"),
        (Some(0.0), ""),
        (Some(-0.0), ""),
        (Some(5e-324), ""),
        (Some(f64::MAX), ""),
        (None, ""),
    ];
    for (bandwidth_gb_s, refused) in bandwidths {
        for kv_bytes_per_token in [None, Some(0), Some(1), Some(u64::MAX)] {
            for tokens in [0, 1, u32::MAX] {
                for setup in [Duration::ZERO, Duration::MAX] {
                    let timing = TransferTiming {
                        mode: TransferTimingMode::MissingTokens,
                        full_prompt_tokens: tokens,
                        kv_bytes_per_token,
                        bandwidth_gb_s,
                        setup,
                    };
                    let error = timing.validate().err().map_or_else(String::new, |error| error.to_string());
                    assert!(refused.is_empty() == error.is_empty(), "{error}");
                    assert!(refused.is_empty() || error.starts_with(&format!("bandwidth_gb_s = {refused}")), "{error}");
                    let cost = timing.cost(u32::MAX);
                    assert!(cost.is_none_or(|cost| cost.wire <= LONGEST && cost.setup == setup), "{timing:?}");
                    for speedup in [Speedup::Factor(5e-324), Speedup::Factor(f64::MAX), Speedup::Instant] {
                        let scaled = cost.map(|cost| cost.scaled(speedup).exposed(Duration::MAX).alone());
                        assert!(scaled.is_none_or(|left| left.is_zero()), "{timing:?}");
                    }
                }
            }
        }
    }
    let json =
        r#"{"mode":"full_prompt","full_prompt_tokens":1,"kv_bytes_per_token":null,"bandwidth_gb_s":null,"setup_ms":"#;
    for (value, taken) in
        [("0", true), ("1.8446744073709552e22", true), ("1e23", false), ("-1", false), ("null", false)]
    {
        assert_eq!(serde_json::from_str::<TransferTiming>(&format!("{json}{value}}}")).is_ok(), taken, "{value}");
    }
}

#[test]
fn links_at_the_end_of_time() {
    for sharing in [LinkSharing::Unshared, LinkSharing::FairShare] {
        let mut link = Link::new(sharing);
        let costs = [Duration::ZERO, Duration::from_nanos(1), LONGEST, Duration::MAX];
        let mut started = 0;
        for now in [EngineTime::ZERO, EngineTime::from_nanos(u64::MAX - 1), EngineTime::MAX, EngineTime::ZERO] {
            for setup in costs {
                for wire in costs {
                    let id = link.start(TransferCost { setup, wire }, now);
                    started += 1;
                    let finish = link.expected_finish(id);
                    assert!(finish.is_none_or(|at| at >= now), "{sharing:?} {setup:?} {wire:?}: {finish:?}");
                }
            }
        }
        link.advance(EngineTime::MAX);
        let mut finished = 0;
        while link.poll_finished().is_some() {
            finished += 1;
        }
        assert_eq!(finished + link.in_flight(), started, "what takes longer than time lasts never ends");
        assert!(finished > 0 && link.next_deadline().is_none_or(|next| next == EngineTime::MAX));
        assert!(!link.abort(standin::handoff::TransferId(u64::MAX), EngineTime::ZERO));
    }
}

#[test]
fn options_of_a_coordinator_and_of_faults() {
    let zero = Duration::ZERO;
    let base = CoordinatorConfig::vllm;
    let rows = [
        ("for ever", base().with_timeout(Duration::MAX).with_settle_timeout(Duration::MAX), ""),
        (
            "a nanosecond",
            base().with_timeout(Duration::from_nanos(1)).with_heartbeat(Some(Duration::from_nanos(1))),
            "",
        ),
        ("no time", base().with_timeout(zero), "timeout = 0ns: greater than 0"),
        ("no transfer", base().with_transfer_timeout(Some(zero)), "transfer_timeout = 0ns: greater than 0"),
        ("no pause", base().with_heartbeat(Some(zero)), "heartbeat = 0ns: greater than 0"),
        ("no answer", base().with_settle_timeout(zero), "settle_timeout = 0ns: greater than 0"),
        ("no speed", base().with_speedup(Speedup::Factor(0.0)), "speedup.factor = 0: greater than 0 and finite"),
        ("a speed", base().with_speedup(Speedup::Factor(f64::NAN)), "speedup.factor = NaN: greater than 0 and finite"),
    ];
    for (what, config, expected) in rows {
        for now in [EngineTime::ZERO, EngineTime::MAX] {
            assert_refused(what, Coordinator::new(ID, config.clone(), now), expected);
        }
    }
    for (rate, expected) in [
        (0.0, ""),
        (1.0, ""),
        (1.0 + f64::EPSILON, "lost = 1.0000000000000002: from 0 to 1"),
        (-5e-324, "lost = -0."),
        (f64::NAN, "lost = NaN: from 0 to 1"),
        (f64::INFINITY, "lost = inf: from 0 to 1"),
    ] {
        let rates = FaultRates::default().with_lost(rate).with_max_delay(Duration::MAX).with_gone_within(Duration::MAX);
        match Faults::new(rates, u64::MAX, ID, EngineTime::MAX) {
            Ok(_) => assert_eq!(expected, ""),
            Err(error) => assert!(!expected.is_empty() && error.to_string().starts_with(expected), "{error}"),
        }
    }
    let late = FaultRates::default().with_delayed(1.0).with_duplicated(1.0).with_max_delay(Duration::MAX);
    let mut faults = Faults::new(late, 1, ID, EngineTime::MAX).expect("valid");
    faults.push(Fact::TransferCompleted, EngineTime::MAX);
    assert_eq!(
        (faults.next_deadline(), faults.poll(EngineTime::MAX)),
        (Some(EngineTime::MAX), Some(Fact::TransferCompleted))
    );
}

/// A handoff at the end of time, of a prompt without end over a link without bandwidth: it ends, as it should.
#[test]
fn a_handoff_of_extremes_ends() {
    let timings =
        [Some(5e-324), Some(f64::MAX), Some(f64::NAN), Some(-1.0), None].map(|bandwidth_gb_s| TransferTiming {
            mode: TransferTimingMode::FullPrompt,
            full_prompt_tokens: u32::MAX,
            kv_bytes_per_token: Some(u64::MAX),
            bandwidth_gb_s,
            setup: Duration::MAX,
        });
    for timing in timings {
        for now in [EngineTime::ZERO, EngineTime::MAX] {
            let config =
                CoordinatorConfig::vllm().with_timeout(Duration::MAX).with_transfer_timeout(Some(Duration::MAX));
            let mut coordinator = Coordinator::new(ID, config, now).expect("valid");
            let held = Fact::SourceHeld { timing, first_token: Some(u32::MAX), overlapped_prefill: Duration::MAX };
            let facts =
                [held, Fact::DestinationReserved { transferable_prompt_tokens: u32::MAX }, Fact::TransferCompleted];
            let mut last = None;
            for fact in facts {
                coordinator.apply(fact, now);
                while let Some(issued) = coordinator.poll_action() {
                    last = Some(issued);
                }
            }
            for _ in 0..2 {
                let issued = last.take().expect("an activation, then a release");
                assert!(matches!(issued.action, Action::ActivateDestination { .. } | Action::ReleaseSource));
                coordinator.apply(Fact::Outcome { action: issued.id, outcome: ActionOutcome::Done }, now);
                last = coordinator.poll_action();
            }
            assert_eq!(coordinator.outcome(), Some(HandoffOutcome::Completed), "{timing:?}");
            assert_eq!(coordinator.next_deadline(), None);
        }
    }
}
