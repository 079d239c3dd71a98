//! h13: handoffs that fail, time out, are cancelled or dropped, at every moment: both sides are cleaned up once.

use std::time::Duration;

use standin::handoff::{
    CoordinatorConfig, FaultRates, HandoffFailure, HandoffOrder, HandoffOutcome, TransferFailurePolicy,
};
use standin::{
    EngineConfig, FinishReason, HandoffError, LiveEngine, LiveHandoff, LiveHandoffStream, LoadFailurePolicy, handoff,
};

use crate::common::{Seen, at, config, config_of, cut, id, request, tokens, turns, vllm, whole};
use crate::kit::{
    Kind, OK, assert_both_released, assert_released, blocks, destination, for_every_kind, pair, pair_of, read_all,
    register, within,
};

const FAILED: FinishReason = FinishReason::TransferFailed;

fn ended(failure: HandoffFailure) -> Option<HandoffOutcome> {
    Some(HandoffOutcome::Failed(failure))
}

fn ways(kind: Kind) -> [CoordinatorConfig; 2] {
    [HandoffOrder::SourceFirst, HandoffOrder::DestinationFirst].map(|order| kind.way().with_order(order))
}

/// A decode engine that computes what a failed transfer did not bring.
fn recomputing() -> EngineConfig {
    config_of(vllm().with_kv_load_failure_policy(LoadFailurePolicy::Recompute))
}

async fn begin(way: &LiveHandoff, prefill: &LiveEngine, decode: &LiveEngine, n: u32) -> LiveHandoffStream {
    within(way.start(prefill, decode, request(n, 8, 3))).await.expect("both take it")
}

/// What is read, with what happens to the engines at `ms` milliseconds, before or after what the engines do then.
async fn interrupted<F: Future<Output = ()>>(
    stream: &mut LiveHandoffStream,
    engine: &LiveEngine,
    ms: u64,
    interrupt: impl FnOnce() -> F,
) -> Vec<Seen> {
    let interrupted = async {
        at(engine, ms).await;
        interrupt().await;
    };
    futures_util::future::join(read_all(stream), interrupted).await.0
}

/// All tokens of the first three in order, without a gap and none twice, whatever the end.
fn assert_prefix(signals: &[Seen], n: u32, case: &str) {
    let got: Vec<u32> = signals.iter().filter_map(|signal| signal.0).collect();
    assert_eq!(got, tokens(n, got.len() as u32), "{case}");
    let complete = signals.last().expect("an end").1 == Some(FinishReason::Length);
    assert_eq!(got.len() == 3, complete, "{case}: {signals:?}");
}

async fn h13_dropping_the_stream_cleans_up_both_sides_at_every_moment(kind: Kind) {
    for (config, ms) in ways(kind).into_iter().flat_map(|way| (0..60).map(move |ms| (way.clone(), ms))) {
        let (prefill, decode) = pair_of(kind.config(), kind.config());
        let way = LiveHandoff::new(config);
        let mut stream = begin(&way, &prefill, &decode, 1).await;
        let read = tokio::time::timeout(Duration::from_millis(ms), read_all(&mut stream)).await;
        // With SGLang the first of the three tokens takes no pass of the decode engine.
        let ends_at = if kind == Kind::Vllm { 48 } else { 38 };
        assert_eq!(read.is_ok(), ms > ends_at, "at {ms} ms");
        drop(stream);
        turns().await;
        assert_eq!((prefill.active_request_count(), decode.active_request_count()), (0, 0), "at {ms} ms");
        // The boundary of the pass in flight shows it.
        at(&decode, ms + 11).await;
        assert_both_released(&prefill, &decode).await;
        drop((register(&prefill, 1), register(&decode, 1)));
    }
}

/// By the client id, at the decode engine: the reader has asked for it and is told `Cancelled`.
async fn h13_a_cancel_at_the_decode_engine_ends_both_sides(kind: Kind) {
    for (config, ms) in ways(kind).into_iter().flat_map(|way| (0..50).map(move |ms| (way.clone(), ms))) {
        let (prefill, decode) = pair_of(kind.config(), kind.config());
        let mut stream = begin(&LiveHandoff::new(config), &prefill, &decode, 1).await;
        let mut removed = None;
        let signals = interrupted(&mut stream, &decode, ms, || async {
            removed = Some(within(decode.cancel(id(1))).await.expect("a cancel does not fail"));
        })
        .await;
        assert_prefix(&signals, 1, &format!("at {ms} ms"));
        // Ended with its last token on the way: then the cancel removed nothing, and may still be what is seen.
        let end = signals.last().expect("an end").1;
        let natural = end == Some(FinishReason::Length) && removed == Some(false);
        assert!(natural || end == Some(FinishReason::Cancelled), "at {ms} ms: {removed:?} {end:?}");
        drop(stream);
        at(&decode, ms + 11).await;
        assert_both_released(&prefill, &decode).await;
    }
}

/// The prefill engine loses the request: the handoff fails, or the decode engine computes the prompt itself.
#[tokio::test(start_paused = true)]
async fn h13_a_source_that_is_gone_fails_or_is_recomputed() {
    for policy in [TransferFailurePolicy::Fail, TransferFailurePolicy::Recompute] {
        for ms in 0..20 {
            let (prefill, decode) = pair_of(config(), recomputing());
            let way = LiveHandoff::new(CoordinatorConfig::vllm().with_on_transfer_failure(policy));
            let mut stream = begin(&way, &prefill, &decode, 1).await;
            let (control, events) = stolen(&prefill).await;
            let signals = interrupted(&mut stream, &prefill, ms, || async {
                drop((control, events));
                within(prefill.shutdown()).await.expect("it stops");
            })
            .await;
            let case = format!("{policy:?} at {ms} ms");
            assert_prefix(&signals, 1, &case);
            let last = signals.last().expect("an end").1;
            match (stream.outcome().expect("over"), last) {
                (HandoffOutcome::Completed, Some(FinishReason::Length)) => assert!(ms >= 18, "{case}"),
                (HandoffOutcome::Recomputed(HandoffFailure::SourceGone), Some(FinishReason::Length)) => {
                    assert!(policy == TransferFailurePolicy::Recompute && (10..=18).contains(&ms), "{case}");
                }
                (HandoffOutcome::Failed(HandoffFailure::SourceGone), Some(FAILED)) => {
                    assert!(policy == TransferFailurePolicy::Fail && ms <= 18 || ms <= 10, "{case}");
                }
                other => panic!("{case}: {other:?}"),
            }
            assert_released(&decode).await;
        }
    }
}

/// Another registration at the same engine, so that not only one handoff is there when it stops.
async fn stolen(prefill: &LiveEngine) -> (standin::LiveHandoffControl, standin::LiveHandoffEvents) {
    let side = crate::kit::source(prefill, 77, 4).await;
    drop(side.stream);
    (side.control, side.events)
}

async fn h13_a_decode_engine_that_stops_ends_the_stream_and_the_source(kind: Kind) {
    for (config, ms) in ways(kind).into_iter().flat_map(|way| (0..50).map(move |ms| (way.clone(), ms))) {
        let (prefill, decode) = pair_of(kind.config(), kind.config());
        let mut stream = begin(&LiveHandoff::new(config), &prefill, &decode, 1).await;
        let signals = interrupted(&mut stream, &decode, ms, || async {
            within(decode.shutdown()).await.expect("it stops");
        })
        .await;
        assert_prefix(&signals, 1, &format!("at {ms} ms"));
        let last = signals.last().expect("an end").1;
        let expected = [Some(FinishReason::EngineStopped), Some(FinishReason::Length)];
        assert!(expected.contains(&last), "at {ms} ms: {last:?}");
        // A reader that has seen the end may stop polling: the drop cleans the source up.
        drop(stream);
        at(&prefill, ms + 11).await;
        assert_released(&prefill).await;
    }
}

/// 300 s for all but the transfer, and 480 s for that.
#[tokio::test(start_paused = true)]
async fn h13_time_outs_clean_up_both_sides() {
    let nine = || config_of(vllm().with_num_gpu_blocks(10)).with_max_model_len(36);
    let (prefill, decode) = pair_of(config(), nine());
    let blocker = destination(&decode, 9, 28, 1).await;
    let mut stream = within(handoff(&prefill, &decode, request(1, 16, 1))).await.expect("taken");
    assert_eq!(read_all(&mut stream).await, cut(1, &[], FAILED, 300_000.0));
    assert_eq!(stream.outcome(), ended(HandoffFailure::TimedOut));
    assert_released(&prefill).await;
    assert_eq!(blocks(&decode), (7, 0, 7));
    drop(blocker);
    // A transfer of 20 minutes.
    let timing = standin::TransferTiming {
        kv_bytes_per_token: Some(1_000_000),
        bandwidth_gb_s: Some(16.0 / 1_200_000.0),
        ..standin::TransferTiming::default()
    };
    let prefill = LiveEngine::builder(config()).transfer_timing(timing).start().expect("valid");
    let began = decode.now().as_nanos() as f64 / 1e6;
    let mut stream = within(handoff(&prefill, &decode, request(2, 16, 1))).await.expect("taken");
    assert_eq!(read_all(&mut stream).await, cut(2, &[], FAILED, began + 10.0 + 480_000.0));
    assert_eq!(stream.outcome(), ended(HandoffFailure::TransferTimedOut));
    assert_both_released(&prefill, &decode).await;
    // One that is allowed takes none of the 300 s.
    let patient = LiveHandoff::new(CoordinatorConfig::vllm().with_transfer_timeout(None));
    let began = decode.now().as_nanos() as f64 / 1e6;
    let mut stream = within(patient.start(&prefill, &decode, request(3, 16, 1))).await.expect("taken");
    assert_eq!(read_all(&mut stream).await, whole(3, &[began + 20.0 + 1_200_000.0]));
    assert_eq!(stream.outcome(), Some(HandoffOutcome::Completed));
    assert_both_released(&prefill, &decode).await;
}

/// Without heartbeats the lease of 30 s ends while the destination waits.
#[tokio::test(start_paused = true)]
async fn h13_a_lease_that_ends_fails_the_handoff_or_is_recomputed() {
    for (policy, kv) in [
        (TransferFailurePolicy::Fail, LoadFailurePolicy::Fail),
        (TransferFailurePolicy::Recompute, LoadFailurePolicy::Recompute),
    ] {
        let vllm = vllm().with_num_gpu_blocks(10).with_kv_load_failure_policy(kv);
        let (prefill, decode) = pair_of(config(), config_of(vllm).with_max_model_len(36));
        let blocker = destination(&decode, 9, 32, 1).await;
        let silent = CoordinatorConfig::vllm().with_heartbeat(None).with_on_transfer_failure(policy);
        let mut stream = begin(&LiveHandoff::new(silent), &prefill, &decode, 1).await;
        let signals = interrupted(&mut stream, &decode, 40_000, || async { drop(blocker) }).await;
        assert_eq!(prefill.metrics_receiver().borrow().expired_leases, 1);
        if policy == TransferFailurePolicy::Fail {
            assert_eq!(signals, cut(1, &[], FAILED, 30_010.0));
            assert_eq!(stream.outcome(), ended(HandoffFailure::SourceGone));
        } else {
            assert_eq!(signals, whole(1, &[40_010.0, 40_020.0, 40_030.0]), "it computes the prompt itself");
            assert_eq!(stream.outcome(), Some(HandoffOutcome::Recomputed(HandoffFailure::SourceGone)));
        }
        assert_both_released(&prefill, &decode).await;
    }
}

/// Each fault alone, on every fact.
#[tokio::test(start_paused = true)]
async fn h13_every_fault_alone_ends_the_stream_and_frees_both_sides() {
    let none = FaultRates::default();
    let cases = [
        (none.with_duplicated(1.0), Some(HandoffOutcome::Completed)),
        (none.with_delayed(1.0).with_max_delay(Duration::from_secs(2)), Some(HandoffOutcome::Completed)),
        (none.with_lost(1.0), ended(HandoffFailure::TimedOut)),
        (none.with_transfer_failed(1.0), ended(HandoffFailure::TransferFailed)),
        (none.with_source_gone(1.0).with_gone_within(Duration::from_millis(9)), ended(HandoffFailure::SourceGone)),
        (
            none.with_destination_gone(1.0).with_gone_within(Duration::from_millis(9)),
            ended(HandoffFailure::DestinationGone),
        ),
    ];
    for (rates, expected) in cases {
        for seed in 0..8 {
            let (prefill, decode) = pair();
            let mut stream = begin(&LiveHandoff::default().faults(rates, seed), &prefill, &decode, 1).await;
            let signals = read_all(&mut stream).await;
            assert_eq!(stream.outcome(), expected, "{rates:?}, seed {seed}");
            let finish = if expected == Some(HandoffOutcome::Completed) { FinishReason::Length } else { FAILED };
            assert_eq!(signals.last().expect("an end").1, Some(finish));
            assert_prefix(&signals, 1, &format!("{rates:?}, seed {seed}"));
            assert_both_released(&prefill, &decode).await;
        }
    }
    let bad = LiveHandoff::default().faults(none.with_lost(2.0), 1);
    let (prefill, decode) = pair();
    let refused = crate::common::refused(within(bad.start(&prefill, &decode, request(1, 8, 2))).await);
    assert_eq!(refused.to_string(), "handoff: lost = 2: from 0 to 1");
    assert_both_released(&prefill, &decode).await;
}

/// The transfer fails: by the policies of coordinator and engine the prompt is computed again, or the request ends.
#[tokio::test(start_paused = true)]
async fn h13_a_failed_transfer_is_recomputed_if_both_policies_say_so() {
    let way = LiveHandoff::new(CoordinatorConfig::vllm().with_on_transfer_failure(TransferFailurePolicy::Recompute))
        .faults(FaultRates::default().with_transfer_failed(1.0), 7);
    let (prefill, decode) = pair_of(config(), recomputing());
    let mut stream = begin(&way, &prefill, &decode, 1).await;
    assert_eq!(read_all(&mut stream).await, whole(1, &[28.0, 38.0, 48.0]));
    assert_eq!(stream.outcome(), Some(HandoffOutcome::Recomputed(HandoffFailure::TransferFailed)));
    assert_both_released(&prefill, &decode).await;
    let (prefill, decode) = pair();
    let mut stream = begin(&way, &prefill, &decode, 1).await;
    assert_eq!(read_all(&mut stream).await, cut(1, &[], FAILED, 18.0), "the engine's own policy is to fail");
    assert_both_released(&prefill, &decode).await;
}

/// A refusal that comes later than the start: the id of the request is taken from the driver at the decode engine.
#[tokio::test(start_paused = true)]
async fn h13_a_registration_that_is_superseded_ends_the_handoff() {
    let (prefill, decode) = pair();
    let mut stream = begin(&LiveHandoff::default(), &prefill, &decode, 1).await;
    let refused = decode.register_handoff(standin::HandoffId(id(1))).expect_err("the driver listens");
    assert_eq!(refused, HandoffError::AlreadyRegistered(standin::HandoffId(id(1))));
    let signals = read_all(&mut stream).await;
    assert_eq!(signals, whole(1, &[28.0, 38.0, 48.0]));
    // Over: whoever registers the id now is somebody else, and the stream's drop does not touch him.
    let (control, _events) = register(&decode, 1);
    drop(stream);
    turns().await;
    assert_eq!(within(control.cancel_destination()).await, OK);
    assert_both_released(&prefill, &decode).await;
}

for_every_kind! {
    h13_dropping_the_stream_cleans_up_both_sides_at_every_moment,
    h13_a_cancel_at_the_decode_engine_ends_both_sides,
    h13_a_decode_engine_that_stops_ends_the_stream_and_the_source,
}
