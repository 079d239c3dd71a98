//! h13: one line hands a request over; what it takes, and when.

use std::time::Duration;

use standin::handoff::{
    CoordinatorConfig, FaultRates, FirstToken, HandoffOrder, HandoffOutcome, LinkSharing, TransferFailurePolicy,
};
use standin::{
    EngineConfig, FinishReason, LiveEngine, LiveHandoff, LiveLink, LoadFailurePolicy, Request, RequestError, Speedup,
    StartHandoffError, SubmitError, TransferTiming, TransferTimingMode, handoff,
};
use tokio::runtime::Handle;

use crate::common::{
    Seen, at, buffered, cancel_on_overflow, config, config_of, cut, id, load, poll_once, read, refused, request, start,
    submit, throttle, turns, vllm, whole,
};
use crate::kit::{
    Kind, assert_both_released, assert_released, begin, blocks, destination, drive, for_every_kind, pair, pair_of,
    read_all, register, source, within,
};

const COMPLETED: Option<HandoffOutcome> = Some(HandoffOutcome::Completed);

/// Prefill 0–10 ms, transfer of 8 tokens 10–18 ms, then a pass for each of 3 tokens.
#[tokio::test(start_paused = true)]
async fn h13_source_first_from_beginning_to_end() {
    let (prefill, decode) = pair();
    let mut stream = begin(&prefill, &decode, request(1, 8, 3)).await;
    assert_eq!((stream.id(), stream.outcome(), stream.finish_reason()), (id(1), None, None));
    drive(&mut stream, &decode, 5).await;
    assert_eq!((prefill.active_request_count(), decode.active_request_count()), (1, 1));
    assert_eq!(load(&decode), (0, 0, 0), "the destination is not asked before the source is held");
    drive(&mut stream, &decode, 15).await;
    assert_eq!((blocks(&prefill), blocks(&decode)), ((2, 2, 0), (2, 0, 2)));
    drive(&mut stream, &decode, 19).await;
    assert_eq!((blocks(&prefill), stream.outcome()), ((0, 0, 0), COMPLETED), "released after the activation");
    assert_eq!(stream.transfer_time(), Some(Duration::from_millis(8)));
    assert_eq!(read_all(&mut stream).await, whole(1, &[28.0, 38.0, 48.0]));
    assert_both_released(&prefill, &decode).await;
    let (source, destination) = (*prefill.metrics_receiver().borrow(), *decode.metrics_receiver().borrow());
    assert_eq!((source.prompt_tokens, source.generation_tokens, source.finished.length), (8, 1, 1));
    assert_eq!((destination.generation_tokens, destination.finished.length), (3, 1));
}

/// The destination reserves while the source is still waiting for its pass.
#[tokio::test(start_paused = true)]
async fn h13_destination_first_from_beginning_to_end() {
    let (prefill, decode) = pair();
    let order = CoordinatorConfig::vllm().with_order(HandoffOrder::DestinationFirst);
    let way = LiveHandoff::new(order);
    let mut stream = within(way.start(&prefill, &decode, request(1, 8, 3))).await.expect("both take it");
    drive(&mut stream, &decode, 5).await;
    assert_eq!((blocks(&prefill), blocks(&decode)), ((0, 0, 0), (2, 0, 2)));
    assert_eq!(read_all(&mut stream).await, whole(1, &[28.0, 38.0, 48.0]));
    assert_eq!(stream.outcome(), COMPLETED);
    assert_both_released(&prefill, &decode).await;
}

/// Whatever the request: ids, generated tokens, stop tokens, one token only.
async fn h13_the_tokens_are_those_of_one_engine_alone(kind: Kind) {
    let (prefill, decode) = pair_of(kind.config(), kind.config());
    let alone = start(kind.config());
    let generated =
        |n: u32| Request::new((0..20).map(|position| 31 * n + position).collect::<Vec<u32>>(), 9).with_id(id(n));
    let mut stops = request(3, 20, 9);
    stops.stop_token_ids = vec![305];
    let mut stops_at_once = request(4, 20, 9);
    stops_at_once.stop_token_ids = vec![401];
    let mut bounded = generated(5);
    bounded.min_output_tokens = 4;
    bounded.priority = -3;
    for request in [generated(1), generated(2), stops, stops_at_once, bounded, request(6, 20, 1), request(7, 1, 2)] {
        let mut expected = submit(&alone, request.clone()).await;
        let mut stream = begin(&prefill, &decode, request).await;
        // A token that is carried over and the last has its end in a signal behind it.
        let tokens_and_end = |signals: Vec<Seen>| {
            let tokens: Vec<u32> = signals.iter().filter_map(|signal| signal.0).collect();
            (tokens, signals.last().expect("an end").1)
        };
        let expected = tokens_and_end(read(&mut expected).await);
        assert_eq!(tokens_and_end(read_all(&mut stream).await), expected);
    }
    // Without an id the decode engine makes one, and the prefill engine uses it too.
    let mut stream = begin(&prefill, &decode, Request::new(vec![1; 9], 2)).await;
    assert_eq!(within(prefill.cancel(stream.id())).await, Ok(true));
    assert_eq!(read_all(&mut stream).await.last().expect("an end").1, Some(FinishReason::TransferFailed));
    assert_both_released(&prefill, &decode).await;
}

/// The source's token is shown when the destination goes on after it: at 18 ms, and a pass for each of the others.
#[tokio::test(start_paused = true)]
async fn h13_a_carried_over_first_token_is_neither_lost_nor_doubled() {
    let carrying = || config_of(vllm().with_first_token(FirstToken::CarriedOver));
    let (prefill, decode) = pair_of(config(), carrying());
    let alone = start(config());
    let mut stops_at_once = request(3, 8, 3);
    stops_at_once.stop_token_ids = vec![301];
    let generated = Request::new(vec![5; 8], 3).with_id(id(4));
    for (request, times) in [
        (request(1, 8, 3), vec![18, 28, 38]),
        (request(2, 8, 1), vec![18, 18]),
        (stops_at_once, vec![18, 18]),
        (generated, vec![18, 28, 38]),
    ] {
        let sent_at = decode.now();
        let mut expected = submit(&alone, request.clone()).await;
        let expected = read(&mut expected).await;
        let waited = decode.now().saturating_since(sent_at).as_millis() as u64;
        let mut stream = begin(&prefill, &decode, request).await;
        let signals = read_all(&mut stream).await;
        let tokens = |signals: &[Seen]| signals.iter().filter_map(|signal| signal.0).collect::<Vec<_>>();
        assert_eq!(tokens(&signals), tokens(&expected));
        assert_eq!(signals.last().expect("an end").1, expected.last().expect("an end").1);
        let began = sent_at.as_nanos() / 1_000_000 + waited;
        let times: Vec<f64> = times.into_iter().map(|time| (began + time) as f64).collect();
        assert_eq!(signals.iter().map(|signal| signal.2).collect::<Vec<_>>(), times);
        assert_eq!(stream.outcome(), COMPLETED);
        assert_both_released(&prefill, &decode).await;
    }
    // Computed again after all: the destination samples all of its tokens, and the source's is not shown.
    let policy = CoordinatorConfig::vllm()
        .with_first_token(FirstToken::CarriedOver)
        .with_on_transfer_failure(TransferFailurePolicy::Recompute);
    let way = LiveHandoff::new(policy).faults(FaultRates::default().with_transfer_failed(1.0), 1);
    let decode = start(config_of(
        vllm().with_first_token(FirstToken::CarriedOver).with_kv_load_failure_policy(LoadFailurePolicy::Recompute),
    ));
    let mut stream = within(way.start(&prefill, &decode, request(5, 8, 3))).await.expect("taken");
    assert_eq!(read_all(&mut stream).await, whole(5, &[28.0, 38.0, 48.0]));
}

/// What the destination's cache has is not transferred; with all of it there is no transfer, and the source is released.
#[tokio::test(start_paused = true)]
async fn h13_a_local_hit_shortens_or_spares_the_transfer() {
    let timing = TransferTiming {
        mode: TransferTimingMode::MissingTokens,
        kv_bytes_per_token: Some(1_000_000),
        bandwidth_gb_s: Some(1.0),
        setup: Duration::from_millis(3),
        ..TransferTiming::default()
    };
    let prefill = LiveEngine::builder(config()).transfer_timing(timing).start().expect("valid");
    let decode = start(config());
    let prompt = |tokens: u32, n: u32| Request::new((0..tokens).collect::<Vec<u32>>(), 1).with_id(id(n));
    let (mut times, mut transfers) = (Vec::new(), Vec::new());
    for request in [prompt(12, 1), prompt(12, 2), prompt(22, 3), prompt(13, 4)] {
        let sent_at = decode.now();
        let mut stream = begin(&prefill, &decode, request).await;
        times.push(read_all(&mut stream).await[0].2 - sent_at.as_nanos() as f64 / 1e6);
        transfers.push(stream.transfer_time().map(|took| took.as_millis()));
        assert_eq!(stream.outcome(), COMPLETED);
        assert_both_released(&prefill, &decode).await;
    }
    assert_eq!(transfers, [Some(15), Some(7), Some(13), None]);
    // Two passes, and a transfer of 12, 4 (the last block is computed again), 10 and no tokens.
    assert_eq!(times, [20.0 + 3.0 + 12.0, 20.0 + 3.0 + 4.0, 20.0 + 3.0 + 10.0, 20.0]);
}

/// Two transfers of 8 ms on one link, divided fairly or not, begin together.
#[tokio::test(start_paused = true)]
async fn h13_transfers_share_a_link() {
    for (sharing, first_token) in [(LinkSharing::Unshared, 28.0), (LinkSharing::FairShare, 36.0)] {
        let (prefill, decode) = pair();
        let link = LiveLink::new(sharing);
        let way = LiveHandoff::default().link(link.clone());
        let both = futures_util::future::join(
            way.start(&prefill, &decode, request(1, 8, 1)),
            way.start(&prefill, &decode, request(2, 8, 1)),
        );
        let (first, second) = within(both).await;
        let (mut first, mut second) = (first.expect("taken"), second.expect("taken"));
        let reads = futures_util::future::join(read_all(&mut first), read_all(&mut second));
        let in_flight = async {
            at(&decode, 15).await;
            link.in_flight()
        };
        let ((one, other), in_flight) = futures_util::future::join(reads, in_flight).await;
        assert_eq!((one, other, in_flight), (whole(1, &[first_token]), whole(2, &[first_token]), 2), "{sharing:?}");
        assert_eq!(link.in_flight(), 0);
    }
}

/// 4 of 8 ms are done when the other one leaves: what is left goes twice as fast.
#[tokio::test(start_paused = true)]
async fn h13_a_handoff_that_is_dropped_leaves_the_link() {
    let (prefill, decode) = pair();
    let link = LiveLink::new(LinkSharing::FairShare);
    let way = LiveHandoff::default().link(link.clone());
    let starts = [1, 2].map(|n| way.start(&prefill, &decode, request(n, 8, 1)));
    let started = within(futures_util::future::join_all(starts)).await.into_iter();
    let mut streams: Vec<_> = started.map(|stream| stream.expect("taken")).collect();
    let mut dropped = streams.pop().expect("two");
    let until_dropped = async {
        drive(&mut dropped, &decode, 18).await;
        assert_eq!(link.in_flight(), 2);
        drop(dropped);
        assert_eq!(link.in_flight(), 1);
    };
    let (signals, ()) = futures_util::future::join(read_all(&mut streams[0]), until_dropped).await;
    assert_eq!(signals, whole(1, &[18.0 + 4.0 + 10.0]));
    assert_both_released(&prefill, &decode).await;
}

/// A speedup divides passes and transfers.
#[tokio::test(start_paused = true)]
async fn h13_speedup_divides_transfers() {
    let faster = |speedup| config().with_speedup(speedup);
    for (speedup, times) in [
        (Speedup::Factor(2.0), [5.0 + 4.0 + 5.0, 19.0]),
        (Speedup::Factor(0.5), [20.0 + 16.0 + 20.0, 76.0]),
        (Speedup::Instant, [0.0, 0.0]),
    ] {
        let (prefill, decode) = pair_of(faster(speedup), faster(speedup));
        let mut stream = begin(&prefill, &decode, request(1, 8, 2)).await;
        assert_eq!(read_all(&mut stream).await, whole(1, &times), "{speedup:?}");
    }
}

/// A destination that waits 60 s for its blocks: heartbeats keep the source's lease of 30 s.
#[tokio::test(start_paused = true)]
async fn h13_heartbeats_keep_the_source_while_the_destination_waits() {
    let nine = || config_of(vllm().with_num_gpu_blocks(10)).with_max_model_len(36);
    let (prefill, decode) = pair_of(config(), nine());
    let blocker = destination(&decode, 9, 24, 1).await;
    let mut stream = begin(&prefill, &decode, request(1, 16, 1)).await;
    for second in 1..60 {
        drive(&mut stream, &decode, second * 1_000).await;
        assert_eq!(blocks(&prefill), (4, 4, 0), "at {second} s");
    }
    drop(blocker);
    assert_eq!(read_all(&mut stream).await, whole(1, &[59_000.0 + 16.0 + 10.0]));
    assert_eq!((stream.outcome(), prefill.metrics_receiver().borrow().expired_leases), (COMPLETED, 0));
    assert_both_released(&prefill, &decode).await;
}

/// A stream that nobody polls drives nothing: the lease ends, and the next poll finds that out.
#[tokio::test(start_paused = true)]
async fn h13_a_stream_that_is_not_polled_goes_no_further() {
    let (prefill, decode) = pair();
    let mut stream = begin(&prefill, &decode, request(1, 8, 3)).await;
    at(&decode, 20_000).await;
    assert_eq!((blocks(&prefill), blocks(&decode)), ((2, 2, 0), (0, 0, 0)));
    assert_eq!(read_all(&mut stream).await, whole(1, &[20_018.0, 20_028.0, 20_038.0]), "it goes on from there");
    let mut late = begin(&prefill, &decode, request(2, 8, 3)).await;
    at(&decode, 60_000).await;
    assert_both_released(&prefill, &start(config())).await;
    assert_eq!(read_all(&mut late).await, cut(2, &[], FinishReason::TransferFailed, 60_000.0));
    assert_both_released(&prefill, &decode).await;
}

/// The decode stream keeps its reader's options; capacity 1 is enough for a reader that reads.
#[tokio::test(start_paused = true)]
async fn h13_streams_of_capacity_one() {
    let (prefill, decode) = pair();
    let way = |buffering| LiveHandoff::default().options(buffered(buffering));
    for (n, buffering) in [(1, throttle(1)), (2, cancel_on_overflow(1))] {
        let sent_at = decode.now().as_nanos() as f64 / 1e6;
        let mut stream = within(way(buffering).start(&prefill, &decode, request(n, 8, 4))).await.expect("taken");
        let times = [28.0, 38.0, 48.0, 58.0].map(|time| sent_at + time);
        assert_eq!(read_all(&mut stream).await, whole(n, &times));
        turns().await;
    }
    // Nobody reads after the activation: the throttled one waits, the other one is cut off.
    let mut waits = within(way(throttle(1)).start(&prefill, &decode, request(3, 8, 4))).await.expect("taken");
    assert!(within(waits.recv()).await.is_some());
    at(&decode, 60_000).await;
    assert_eq!(load(&decode), (1, 0, 3));
    assert_eq!(read_all(&mut waits).await.len(), 3);
    let mut cut_off =
        within(way(cancel_on_overflow(1)).start(&prefill, &decode, request(4, 8, 4))).await.expect("taken");
    assert!(within(cut_off.recv()).await.is_some());
    at(&decode, 120_000).await;
    assert_eq!(read_all(&mut cut_off).await.last().expect("an end").1, Some(FinishReason::SlowConsumer));
    assert_both_released(&prefill, &decode).await;
}

#[tokio::test(start_paused = true)]
async fn h13_no_task_is_made_for_a_handoff() {
    let (prefill, decode) = pair();
    let mut streams = Vec::new();
    for n in 0..50 {
        streams.push(begin(&prefill, &decode, request(n, 8, 2)).await);
    }
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 6);
    for stream in &mut streams {
        assert_eq!(read_all(stream).await.len(), 2);
    }
    assert_both_released(&prefill, &decode).await;
}

/// What either engine refuses at once is said, and the other one is as before.
#[tokio::test(start_paused = true)]
async fn h13_a_handoff_that_cannot_start_leaves_nothing_behind() {
    let short = || config().with_max_model_len(20);
    let too_long = |prompt_tokens| SubmitError::from(RequestError::PromptTooLong { prompt_tokens, max_model_len: 20 });
    let check = async |prefill: EngineConfig, decode: EngineConfig, expected: StartHandoffError| {
        let (prefill, decode) = pair_of(prefill, decode);
        assert_eq!(refused(within(handoff(&prefill, &decode, request(1, 30, 2))).await), expected);
        assert_both_released(&prefill, &decode).await;
    };
    check(short(), config(), StartHandoffError::Prefill(too_long(30))).await;
    check(config(), short(), StartHandoffError::Decode(too_long(30))).await;

    let (prefill, decode) = pair();
    for (engine, registered) in [(&prefill, register(&prefill, 1)), (&decode, register(&decode, 1))] {
        let refused = refused(within(handoff(&prefill, &decode, request(1, 8, 2))).await);
        assert!(matches!(refused, StartHandoffError::Register(_)), "{refused}");
        drop(registered);
        assert_released(engine).await;
    }
    let zero = LiveHandoff::new(CoordinatorConfig::vllm().with_timeout(Duration::ZERO));
    let refused_zero = refused(within(zero.start(&prefill, &decode, request(1, 8, 2))).await);
    assert_eq!(refused_zero.to_string(), "handoff: timeout = 0ns: greater than 0");
    let carried = CoordinatorConfig::vllm().with_first_token(FirstToken::CarriedOver);
    let carried = refused(within(LiveHandoff::new(carried).start(&prefill, &decode, request(1, 8, 2))).await);
    assert_eq!(
        carried.to_string(),
        "handoff: first_token = CarriedOver: Recomputed, as the decode engine does it",
        "a token would be doubled"
    );
    let other = source(&prefill, 5, 8).await;
    let duplicate = refused(within(handoff(&prefill, &decode, request(5, 8, 2))).await);
    assert_eq!(duplicate, StartHandoffError::Prefill(SubmitError::DuplicateId(id(5))));
    drop(other);
    at(&decode, 100).await;
    assert_both_released(&prefill, &decode).await;
    assert_eq!(within(decode.shutdown()).await, Ok(()));
    let stopped = refused(within(handoff(&prefill, &decode, request(6, 8, 2))).await);
    assert!(matches!(stopped, StartHandoffError::Decode(SubmitError::Stopped(_))), "{stopped}");
    assert_released(&prefill).await;
}

/// One engine cannot be both: the id is taken.
#[tokio::test(start_paused = true)]
async fn h13_both_sides_on_one_engine_are_refused() {
    let engine = start(config());
    let refused = refused(within(handoff(&engine, &engine, request(1, 8, 2))).await);
    assert_eq!(refused, StartHandoffError::Prefill(SubmitError::DuplicateId(id(1))));
    assert_released(&engine).await;
}

/// The future of the start is dropped after any number of polls.
#[tokio::test(start_paused = true)]
async fn h13_dropping_the_start_cleans_up() {
    for polls in 0..6 {
        let (prefill, decode) = pair();
        let started = crate::common::poll_times(handoff(&prefill, &decode, request(1, 8, 2)), polls).await;
        drop(started);
        turns().await;
        at(&decode, 50).await;
        assert_both_released(&prefill, &decode).await;
        assert!(poll_once(&mut Box::pin(prefill.cancel(id(1)))).is_some_and(|cancelled| cancelled == Ok(false)));
        drop((register(&prefill, 1), register(&decode, 1)));
    }
}

for_every_kind! {
    h13_the_tokens_are_those_of_one_engine_alone,
}
