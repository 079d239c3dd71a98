//! r13–r17: streams.

use std::time::Duration;

use futures_util::StreamExt;
use standin::timing::TimingConfig;
use standin::{
    EngineTime, FinishReason, KvEventBatch, LiveEngine, LiveRequest, Request, ShutdownError, StopCause, Stopped,
    SubmitError,
};
use tokio::runtime::{Builder, Runtime};

use crate::common::{
    FULL, Seen, Timing, assert_clean, at, cancel_on_overflow, config, config_of, cut, durations, eight, id, load, next,
    poll_once, read, refused, request, seen, start, submit, submit_together, submit_with, turns, vllm, whole, within,
};

#[tokio::test(start_paused = true)]
async fn r13_tokens_in_order_one_end_then_nothing() {
    let engine = start(config());
    // Three prompts of 30 tokens in passes of 64: the third one is cut in two.
    let mut streams = submit_together(&engine, [1, 2, 3].map(|n| (request(n, 30, 20), FULL))).await;
    let times = |first: u32| (first..first + 20).map(|pass| f64::from(pass) * 10.0).collect::<Vec<_>>();
    for (n, stream) in (1..).zip(&mut streams) {
        assert_eq!(read(stream).await, whole(n, &times(if n == 3 { 2 } else { 1 })));
    }
}

#[tokio::test(start_paused = true)]
async fn r13_a_stream_is_a_stream() {
    let engine = start(config());
    let request = submit(&engine, request(1, 8, 3)).await;
    let signals: Vec<Seen> = within(request.map(seen).collect()).await;
    assert_eq!(signals, whole(1, &[10.0, 20.0, 30.0]));
}

#[tokio::test(start_paused = true)]
async fn r14_the_end_has_a_place_beside_the_capacity() {
    let engine = start(config());
    for capacity in 1..=4 {
        let began = engine.now().as_nanos() as f64 / 1e6;
        let times: Vec<f64> = (1..=capacity).map(|pass| began + 10.0 * pass as f64).collect();
        // As many unread tokens as it may hold, then a cancel.
        let mut stream = submit_with(&engine, request(1, 8, 20), cancel_on_overflow(capacity)).await;
        at(&engine, began as u64 + 10 * capacity as u64 + 5).await;
        assert_eq!(within(stream.cancel()).await, Ok(true));
        let cancelled_at = began + 10.0 * capacity as f64 + 5.0;
        assert_eq!(read(&mut stream).await, cut(1, &times, FinishReason::Cancelled, cancelled_at));
        at(&engine, began as u64 + 100).await;
    }
}

#[tokio::test(start_paused = true)]
async fn r14_a_last_token_that_finds_the_queue_full_is_dropped_and_the_end_says_so() {
    let engine = start(config());
    for (n, capacity) in [(1, 1), (2, 2), (3, 3)] {
        let outputs = capacity + 1;
        let began = engine.now().as_nanos() as f64 / 1e6;
        let mut stream = submit_with(&engine, request(n, 8, outputs), cancel_on_overflow(capacity as usize)).await;
        at(&engine, began as u64 + 100).await;
        let times: Vec<f64> = (1..=capacity).map(|pass| began + 10.0 * f64::from(pass)).collect();
        let cut_at = began + 10.0 * f64::from(outputs);
        assert_eq!(read(&mut stream).await, cut(n, &times, FinishReason::SlowConsumer, cut_at));
    }
    // With room for all of it, `Length` means that all of it is there.
    let mut stream = submit_with(&engine, request(4, 8, 3), cancel_on_overflow(3)).await;
    at(&engine, 400).await;
    assert_eq!(read(&mut stream).await, whole(4, &[310.0, 320.0, 330.0]));
    assert_eq!(engine.metrics_receiver().borrow().slow_consumers, 3);
    assert_clean(&engine);
}

/// What can be read without waiting and without a runtime, up to the end.
fn read_now(stream: &mut LiveRequest) -> Vec<(Option<u32>, Option<FinishReason>)> {
    let mut signals = Vec::new();
    loop {
        match poll_once(&mut std::pin::pin!(stream.recv())) {
            Some(Some(signal)) => signals.push((signal.token_id, signal.finish)),
            Some(None) => return signals,
            None => panic!("no end after {signals:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r14_a_full_queue_takes_the_end_of_a_panicking_dispatcher() {
    let mut batches = 0;
    let sink = move |_: KvEventBatch<'_>| {
        batches += 1;
        assert!(batches < 3, "the third batch is too much");
        Ok(())
    };
    let engine = LiveEngine::builder(config()).kv_event_sink(sink).start().expect("valid");
    // Events at the passes that fill a block: with 7 prompt tokens the 1st, 2nd and 6th.
    let mut full = submit_with(&engine, request(1, 7, 20), cancel_on_overflow(5)).await;
    let (registration, mut prepared) = engine.prepare_request(request(2, 8, 1)).expect("valid");
    at(&engine, 59).await;
    assert_eq!(engine.active_request_count(), 2);
    at(&engine, 61).await;
    assert_eq!(read(&mut full).await, cut(1, &[10.0, 20.0, 30.0, 40.0, 50.0], FinishReason::Failed, 60.0));
    assert_eq!(read(&mut prepared).await, [(None, Some(FinishReason::Failed), 60.0)]);
    drop(registration);
    assert_eq!(engine.active_request_count(), 0);
}

fn runtimes() -> [Runtime; 2] {
    let multi_thread = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    [Builder::new_current_thread().enable_all().build().expect("a runtime"), multi_thread.expect("a runtime")]
}

/// Real time: a runtime is dropped from outside, and streams are read after it.
#[test]
fn r14_a_dropped_runtime_ends_every_stream() {
    for runtime in runtimes() {
        let passes = durations(vec![Duration::ZERO, Duration::ZERO, Duration::from_secs(3_600)]);
        let engine = {
            let _entered = runtime.enter();
            LiveEngine::builder(config()).pass_timing(passes).start().expect("valid")
        };
        let (mut running, mut waiting) = runtime.block_on(async {
            let mut running = submit_with(&engine, request(1, 8, 20), cancel_on_overflow(2)).await;
            // Two tokens and no more, so that the last pass is under way.
            let first = within(running.recv()).await.expect("a token");
            assert_eq!((first.token_id, first.finish), (Some(101), None));
            let mut metrics = engine.metrics_receiver();
            within(metrics.wait_for(|metrics| metrics.num_passes == 2)).await.expect("alive");
            (running, submit(&engine, request(2, 8, 1)).await)
        });
        let (registration, mut prepared) = engine.prepare_request(request(3, 8, 1)).expect("valid");
        drop(runtime);
        let stopped = Some(FinishReason::EngineStopped);
        assert_eq!(read_now(&mut running), [(Some(102), None), (None, stopped)]);
        assert_eq!(read_now(&mut waiting), [(None, stopped)]);
        assert_eq!(read_now(&mut prepared), [(None, stopped)]);
        assert_eq!(engine.active_request_count(), 0);
        after_the_runtime(&engine);
        drop(registration);
    }
}

/// Handed over, not taken, and nobody waits for the answer any more: only its stream is left.
#[tokio::test(start_paused = true)]
async fn r14_a_submission_in_the_lane_ends_with_the_engine() {
    let engine = start(config());
    turns().await;
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
    assert!(poll_once(&mut Box::pin(engine.submit_prepared(registration))).is_none());
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert_eq!(read(&mut stream).await, cut(1, &[], FinishReason::EngineStopped, 0.0));
}

/// The engine's tasks have never been polled.
#[test]
fn r14_a_runtime_that_is_dropped_before_it_ran_ends_every_stream() {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let engine = {
        let _entered = runtime.enter();
        start(config())
    };
    let (_registration, mut prepared) = engine.prepare_request(request(1, 8, 1)).expect("valid");
    let mut submitted = Box::pin(engine.submit(request(2, 8, 1)));
    assert!(poll_once(&mut submitted).is_none());
    let mut cancelled = Box::pin(engine.cancel(id(1)));
    assert!(poll_once(&mut cancelled).is_none());
    drop(runtime);
    let stopped = SubmitError::Stopped(Stopped { cause: StopCause::RuntimeShutdown });
    assert_eq!(refused(poll_once(&mut submitted).expect("an answer")), stopped);
    assert_eq!(poll_once(&mut cancelled), Some(Ok(false)));
    assert_eq!(read_now(&mut prepared), [(None, Some(FinishReason::EngineStopped))]);
    assert_eq!(engine.active_request_count(), 0);
    after_the_runtime(&engine);
}

fn after_the_runtime(engine: &LiveEngine) {
    let cause = StopCause::RuntimeShutdown;
    let refused = refused(poll_once(&mut Box::pin(engine.submit(request(9, 8, 1)))).expect("an answer"));
    assert_eq!(refused, SubmitError::Stopped(Stopped { cause: cause.clone() }));
    assert_eq!(poll_once(&mut Box::pin(engine.cancel(id(1)))), Some(Ok(false)));
    let shutdown = poll_once(&mut Box::pin(engine.shutdown()));
    assert_eq!(shutdown, Some(Err(ShutdownError::Stopped(cause))));
}

#[tokio::test(start_paused = true)]
async fn r15_cached_tokens_come_once_with_the_first_token() {
    let engine = start(config());
    let prompt: Vec<u32> = (0..13).collect();
    // 13 tokens are 3 full blocks; 12 are not more than 2 of them and a token to compute.
    for (n, length, cached) in [(1, 13, 0), (2, 13, 12), (3, 12, 8), (4, 4, 0)] {
        let mut stream = submit(&engine, Request::new(prompt[..length].to_vec(), 3).with_id(id(n))).await;
        let mut said = Vec::new();
        while let Some(signal) = within(stream.recv()).await {
            said.push((signal.token_id.is_some(), signal.cached_tokens));
        }
        assert_eq!(said, [(true, Some(cached)), (true, None), (true, None)], "request {n}");
    }
    // No token, no word of it.
    let mut stream = submit(&engine, Request::new(prompt, 3)).await;
    assert_eq!(within(stream.cancel()).await, Ok(true));
    assert_eq!(within(stream.recv()).await.expect("the end").cached_tokens, None);
}

#[tokio::test(start_paused = true)]
async fn r16_produced_and_observed_are_the_engines_times_not_the_readers() {
    // Tokio's timers tick in milliseconds, so that every pass of 350 µs is handled a little late.
    let engine = start(config().with_timing(TimingConfig::ConstantMs(0.35)));
    let mut stream = submit_with(&engine, request(1, 8, 5), FULL).await;
    at(&engine, 50).await;
    let mut times = Vec::new();
    while let Some(signal) = within(stream.recv()).await {
        times.push((signal.produced_at.as_nanos() / 1_000, signal.observed_at.as_nanos() / 1_000));
    }
    assert_eq!(times, [(350, 1_000), (700, 1_000), (1_050, 2_000), (1_400, 2_000), (1_750, 2_000)]);

    // Of a decision that no pass made, it is when it was made.
    let mut stream = submit(&engine, request(2, 8, 5)).await;
    at(&engine, 51).await;
    assert_eq!(within(engine.cancel(id(2))).await, Ok(true));
    at(&engine, 90).await;
    let mut last = None;
    while let Some(signal) = within(stream.recv()).await {
        assert!(Some(signal.produced_at) >= last);
        last = Some(signal.produced_at);
        if signal.finish.is_some() {
            let decided = EngineTime::from_millis(51);
            assert_eq!((signal.produced_at, signal.observed_at), (decided, decided));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r17_dropping_an_ended_stream_cancels_nothing() {
    let engine = start(config());
    let requests = [1, 2].map(|n| (request(n, 8, 2), eight()));
    let [unread, mut read_up] = submit_together(&engine, requests).await;
    assert_eq!(read(&mut read_up).await, whole(2, &[10.0, 20.0]));
    drop((unread, read_up));
    at(&engine, 100).await;
    let finished = engine.metrics_receiver().borrow().finished;
    assert_eq!((finished.length, finished.aborted), (2, 0));
    assert_clean(&engine);
}

#[tokio::test(start_paused = true)]
async fn r17_dropping_a_waiting_stream_is_served_one_turn_later() {
    let engine = start(config());
    within(engine.set_scheduling(standin::SchedulingState::Stopped)).await.expect("running");
    let streams = [submit(&engine, request(1, 8, 2)).await, submit(&engine, request(2, 8, 2)).await];
    turns().await;
    assert_eq!((engine.active_request_count(), load(&engine)), (2, (0, 2, 0)));
    drop(streams);
    // The actor's turn, in which both are removed, then the dispatcher's, which shows it.
    tokio::task::yield_now().await;
    assert_eq!(engine.active_request_count(), 0);
    tokio::task::yield_now().await;
    assert_clean(&engine);
    assert_eq!(engine.now(), EngineTime::ZERO);
}

#[tokio::test(start_paused = true)]
async fn r17_dropping_a_running_stream_gives_its_slot_and_blocks_back_at_the_boundary() {
    let engine = start(config_of(vllm().with_max_num_seqs(1)));
    let mut dropped = submit(&engine, request(1, 8, 20)).await;
    let mut waiting = submit(&engine, request(2, 8, 2)).await;
    assert_eq!(next(&mut dropped).await, (Some(101), None, 10.0));
    at(&engine, 15).await;
    drop(dropped);
    tokio::task::yield_now().await;
    assert_eq!(engine.active_request_count(), 1, "one turn later");
    assert_eq!(load(&engine), (1, 1, 2), "the metrics are those of the boundary at 10 ms");
    let mut metrics = engine.metrics_receiver();
    within(metrics.wait_for(|metrics| metrics.at == EngineTime::from_millis(20))).await.expect("alive");
    assert_eq!(load(&engine), (0, 1, 0));
    assert_eq!(read(&mut waiting).await, whole(2, &[30.0, 40.0]), "admitted at 20 ms");
}

#[tokio::test(start_paused = true)]
async fn r17_a_stream_may_be_dropped_from_within_the_engine() {
    // By a timing model, that is by the actor itself.
    let held = std::sync::Arc::new(std::sync::Mutex::new(None::<LiveRequest>));
    let dropper = std::sync::Arc::clone(&held);
    let timing = Timing(move |_: &standin::timing::PassWork| {
        drop(dropper.lock().expect("not poisoned").take());
        Duration::from_millis(10)
    });
    let engine = LiveEngine::builder(config()).pass_timing(timing).start().expect("valid");
    let mut stays = submit(&engine, request(1, 8, 3)).await;
    // The next pass admits it, and its stream is dropped while that is planned.
    let goes = submit(&engine, request(2, 8, 3)).await;
    *held.lock().expect("not poisoned") = Some(goes);
    assert_eq!(read(&mut stays).await, whole(1, &[10.0, 20.0, 30.0]));
    turns().await;
    assert_clean(&engine);
    assert_eq!(engine.metrics_receiver().borrow().finished.aborted, 1);
}
