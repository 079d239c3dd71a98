//! h05: a source is held after its outputs.

use std::time::Duration;

use standin::{
    FinishReason, HandoffError, LiveEngine, LiveHandoffEvent, PassMetrics, StartError, TransferTiming,
    TransferTimingMode,
};

use crate::common::{
    Log, at, config, id, load, poll_once, read, request, start, submit, throttle, tokens, turns, whole,
};
use crate::kit::{Event, Kind, OK, assert_released, blocks, for_every_kind, ms, source, source_of, within};

/// What [`source`] is told by an engine whose transfers are not modelled.
fn held(at: u64, full_prompt_tokens: u32, first_token: u32, overlapped_ms: u64) -> Event {
    Some(LiveHandoffEvent::SourceHeld {
        at: ms(at),
        timing: TransferTiming { full_prompt_tokens, ..TransferTiming::default() },
        first_token,
        overlapped_prefill: Duration::from_millis(overlapped_ms),
        expires_at: ms(at + 30_000),
    })
}

async fn h05_the_source_is_held_after_its_pass_and_its_blocks_stay(kind: Kind) {
    let engine = start(kind.config());
    let mut source = source(&engine, 1, 10).await;
    at(&engine, 5).await;
    assert!(poll_once(&mut Box::pin(source.events.recv())).is_none(), "not before its pass ends");
    assert_eq!(source.event().await, held(10, 10, 101, 0));
    assert_eq!(read(&mut source.stream).await, whole(1, &[10.0]));
    turns().await;
    assert_eq!((engine.active_request_count(), load(&engine)), (0, (0, 0, 3)));
    assert_eq!(blocks(&engine), (3, 3, 0));
    assert_eq!(engine.metrics_receiver().borrow().num_requests_held, 1);
    at(&engine, 20_000).await;
    assert_eq!(blocks(&engine), (3, 3, 0), "for as long as the lease lasts");
    assert_eq!(within(source.control.release_source()).await, OK);
    assert_released(&engine).await;
}

/// The wakers note, synchronously, in which order the dispatcher delivers.
async fn h05_outputs_come_before_the_fact_and_the_fact_before_the_metrics(kind: Kind) {
    let log = Log::default();
    let sink_log = log.clone();
    let sink = move |_: u32, _: &PassMetrics| {
        sink_log.note("pass metrics");
        Ok(())
    };
    let engine = LiveEngine::builder(kind.config()).pass_metrics_sink(sink).start().expect("valid");
    let mut source = source(&engine, 1, 8).await;
    turns().await;
    let mut metrics = engine.metrics_receiver();
    metrics.mark_unchanged();
    let (mut output, mut event) = (Box::pin(source.stream.recv()), Box::pin(source.events.recv()));
    let mut changed = Box::pin(metrics.changed());
    let waits = |waker: &str| log.waker(waker);
    assert!(output.as_mut().poll(&mut std::task::Context::from_waker(&waits("output"))).is_pending());
    assert!(event.as_mut().poll(&mut std::task::Context::from_waker(&waits("fact"))).is_pending());
    assert!(changed.as_mut().poll(&mut std::task::Context::from_waker(&waits("metrics"))).is_pending());
    at(&engine, 15).await;
    assert_eq!(log.take(), ["pass metrics", "output", "fact", "metrics"]);
}

async fn h05_a_prefill_in_chunks_tells_what_a_transfer_can_lie_under(kind: Kind) {
    let engine = start(kind.narrow(4, 4));
    let mut source = source(&engine, 1, 10).await;
    // Chunks of 4, 4 and 2 tokens: the first one ends at 10 ms, the last one at 30 ms.
    assert_eq!(source.event().await, held(30, 10, 101, 20));
}

/// Not from its submission on, and not from a preemption on.
async fn h05_the_first_chunk_counts_from_the_admission(kind: Kind) {
    let engine = start(kind.narrow(1, 8));
    let _first = submit(&engine, request(9, 8, 3)).await;
    let mut source = source(&engine, 1, 16).await;
    assert_eq!(source.event().await, held(50, 16, 101, 10));
}

#[tokio::test(start_paused = true)]
async fn h05_a_source_may_have_several_tokens_and_stop() {
    let engine = start(config());
    let mut longer = source_of(&engine, 1, request(1, 8, 3)).await;
    let mut stops = request(2, 8, 5);
    stops.stop_token_ids = vec![202];
    let mut stops = source_of(&engine, 2, stops).await;
    assert_eq!(longer.event().await, held(30, 8, 101, 20));
    // It came into the second pass.
    assert_eq!(stops.event().await, held(30, 8, 201, 10));
    assert_eq!(read(&mut longer.stream).await, whole(1, &[10.0, 20.0, 30.0]));
    let last = read(&mut stops.stream).await[1];
    assert_eq!(last, (Some(202), Some(FinishReason::Stop { stop_token: Some(202) }), 30.0));
}

#[tokio::test(start_paused = true)]
async fn h05_a_slow_reader_of_the_source_ends_it_and_nothing_is_held() {
    let engine = start(config());
    let (control, mut events) = crate::kit::register(&engine, 1);
    let options = crate::common::buffered(crate::common::cancel_on_overflow(1));
    let (registration, mut stream) = engine.prepare_request_with(request(1, 8, 3), options).expect("valid");
    within(control.submit_prefill(registration)).await.expect("taken");
    // The queue is full at 10 ms and overflows at 20 ms.
    let end = within(events.recv()).await;
    assert_eq!(end, Some(LiveHandoffEvent::SourceEnded { at: ms(20), end: standin::SourceEnd::Cancelled }));
    assert_eq!(within(events.recv()).await, None);
    assert_eq!(read(&mut stream).await.last().expect("an end").1, Some(FinishReason::SlowConsumer));
    assert_eq!(within(control.release_source()).await, OK, "over already");
    assert_released(&engine).await;
}

#[tokio::test(start_paused = true)]
async fn h05_a_throttled_source_is_held_when_it_has_been_read() {
    let engine = start(config());
    let (control, mut events) = crate::kit::register(&engine, 1);
    let options = crate::common::buffered(throttle(1));
    let (registration, mut stream) = engine.prepare_request_with(request(1, 8, 3), options).expect("valid");
    within(control.submit_prefill(registration)).await.expect("taken");
    at(&engine, 500).await;
    assert!(poll_once(&mut Box::pin(events.recv())).is_none());
    assert_eq!(within(stream.recv()).await.and_then(|signal| signal.token_id), Some(101));
    assert_eq!(within(stream.recv()).await.and_then(|signal| signal.token_id), Some(102));
    assert_eq!(within(events.recv()).await, held(520, 8, 101, 510));
}

async fn h05_a_source_whose_request_cannot_run_is_refused_and_comes_back(kind: Kind) {
    let engine = start(kind.config());
    let (control, _events) = crate::kit::register(&engine, 1);
    let taken = engine.prepare_request(request(1, 8, 1)).expect("valid");
    within(control.submit_prefill(taken.0)).await.expect("taken");
    let (second, _stream) = engine.prepare_request(request(2, 8, 1)).expect("valid");
    let refused = within(control.submit_prefill(second)).await.expect_err("one request per registration");
    assert!(matches!(refused.error, HandoffError::Scheduler(_)), "{:?}", refused.error);
    assert_eq!(refused.registration.id(), id(2));
    let other = start(kind.config());
    let (foreign, _stream) = other.prepare_request(request(3, 8, 1)).expect("valid");
    let refused = within(control.submit_prefill(foreign)).await.expect_err("another engine's");
    assert_eq!(refused.error, HandoffError::ForeignRegistration);
    let (cancelled, stream) = engine.prepare_request(request(4, 8, 1)).expect("valid");
    assert_eq!(within(stream.cancel()).await, Ok(true));
    let (control, _events) = crate::kit::register(&engine, 4);
    let refused = within(control.reserve_destination(cancelled)).await.expect_err("it was cancelled");
    assert_eq!(refused.error, HandoffError::Cancelled);
}

async fn h05_a_request_for_no_output_has_nothing_to_hand_over(kind: Kind) {
    let engine = LiveEngine::builder(kind.config()).allow_zero_output(true).start().expect("valid");
    let (control, _events) = crate::kit::register(&engine, 1);
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 0)).expect("allowed");
    let refused = within(control.submit_prefill(registration)).await.expect_err("no first token");
    let zero = HandoffError::Scheduler(standin::RequestError::ZeroOutput.into());
    assert_eq!(refused.error, zero);
    within(engine.submit_prepared(refused.registration)).await.expect("by itself it ends");
    assert_eq!(read(&mut stream).await, vec![(None, Some(FinishReason::Length), 0.0)]);
    assert_eq!(tokens(1, 0), Vec::<u32>::new());
}

async fn h12_the_engine_tells_what_a_transfer_costs(kind: Kind) {
    let timing = TransferTiming {
        mode: TransferTimingMode::MissingTokens,
        full_prompt_tokens: 7,
        kv_bytes_per_token: Some(131_072),
        bandwidth_gb_s: Some(25.0),
        setup: Duration::from_micros(50),
    };
    let engine = LiveEngine::builder(kind.config()).transfer_timing(timing).start().expect("valid");
    let mut source = source(&engine, 1, 10).await;
    let Some(LiveHandoffEvent::SourceHeld { timing: told, .. }) = source.event().await else { panic!("held first") };
    assert_eq!(told, TransferTiming { full_prompt_tokens: 10, ..timing }, "the prompt's tokens are filled in");
    // 50 µs + 6 tokens × 131,072 B ÷ 25 GB/s.
    assert_eq!(told.delay(6), Some(Duration::from_nanos(50_000 + 31_457)));
    for bandwidth in [-1.0, f64::NAN, f64::INFINITY] {
        let timing = TransferTiming { bandwidth_gb_s: Some(bandwidth), ..timing };
        let error = LiveEngine::builder(kind.config()).transfer_timing(timing).start().expect_err("refused");
        let StartError::Config(error) = error else { panic!("{error}") };
        assert!(error.to_string().starts_with("transfer_timing.bandwidth_gb_s = "), "{error}");
    }
}

for_every_kind! {
    h05_the_source_is_held_after_its_pass_and_its_blocks_stay,
    h05_outputs_come_before_the_fact_and_the_fact_before_the_metrics,
    h05_a_prefill_in_chunks_tells_what_a_transfer_can_lie_under,
    h05_the_first_chunk_counts_from_the_admission,
    h05_a_source_whose_request_cannot_run_is_refused_and_comes_back,
    h05_a_request_for_no_output_has_nothing_to_hand_over,
    h12_the_engine_tells_what_a_transfer_costs,
}
