//! r18–r22: readers that fall behind.

use std::time::Duration;

use standin::timing::TimingConfig;
use standin::{EngineTime, FinishReason, LiveEngine, OutputBuffering};
use tokio::task::JoinSet;

use crate::common::{
    FULL, Seen, assert_clean, at, buffered, cancel_on_overflow, config, config_of, cut, durations, eight, id, load,
    next, read, request, start, submit, submit_together, submit_with, throttle, turns, vllm, whole, within,
};

fn every_10_ms(passes: u32) -> Vec<f64> {
    (1..=passes).map(|pass| f64::from(pass) * 10.0).collect()
}

#[tokio::test(start_paused = true)]
async fn r18_a_full_or_dead_reader_changes_nothing_for_others() {
    for others in [false, true] {
        let engine = start(config());
        let mut awake = submit(&engine, request(1, 8, 12)).await;
        let mut held = Vec::new();
        if others {
            held.push(submit_with(&engine, request(2, 8, 30), cancel_on_overflow(1)).await);
            held.push(submit_with(&engine, request(3, 8, 30), throttle(1)).await);
            drop(submit(&engine, request(4, 8, 30)).await);
        }
        assert_eq!(read(&mut awake).await, whole(1, &every_10_ms(12)), "others: {others}");
    }
}

#[tokio::test(start_paused = true)]
async fn r19_a_full_queue_cancels_that_request_at_that_boundary() {
    for capacity in 1..=8 {
        let engine = start(config_of(vllm().with_max_num_seqs(2)));
        let slow = (request(1, 8, 20), cancel_on_overflow(capacity as usize));
        let [mut slow, mut beside] = submit_together(&engine, [slow, (request(2, 8, 20), FULL)]).await;
        let mut waiting = submit(&engine, request(3, 8, 1)).await;
        let cut_at = u64::from(capacity) * 10 + 10;
        at(&engine, cut_at - 1).await;
        assert_eq!((engine.active_request_count(), engine.metrics_receiver().borrow().slow_consumers), (3, 0));
        at(&engine, cut_at + 1).await;
        assert_eq!(engine.active_request_count(), 2, "it ended at the boundary of the pass that overflowed");
        assert_eq!(engine.metrics_receiver().borrow().slow_consumers, 1);
        // Its slot was free before the next pass was planned.
        assert_eq!(read(&mut waiting).await, whole(3, &[cut_at as f64 + 10.0]));
        let expected = cut(1, &every_10_ms(capacity), FinishReason::SlowConsumer, cut_at as f64);
        assert_eq!(read(&mut slow).await, expected, "capacity {capacity}");
        assert_eq!(read(&mut beside).await, whole(2, &every_10_ms(20)));
        turns().await;
        assert_clean(&engine);
        let metrics = *engine.metrics_receiver().borrow();
        assert_eq!((metrics.finished.aborted, metrics.finished.length), (1, 2));
    }
}

#[tokio::test(start_paused = true)]
async fn r19_the_blocks_of_the_last_request_are_back_without_another_pass() {
    let engine = start(config());
    let _slow = submit_with(&engine, request(1, 8, 20), cancel_on_overflow(1)).await;
    at(&engine, 20).await;
    turns().await;
    assert_clean(&engine);
    assert_eq!((engine.now(), engine.metrics_receiver().borrow().num_passes), (EngineTime::from_millis(20), 2));
}

#[tokio::test(start_paused = true)]
async fn r19_eight_is_the_default_and_never_more_than_the_output() {
    assert_eq!(OutputBuffering::default(), cancel_on_overflow(8));
    let engine = start(config());
    let huge = (request(3, 8, 3), cancel_on_overflow(usize::MAX));
    let requests = [(request(1, 8, 10), eight()), (request(2, 8, 8), eight()), huge];
    let [mut ninth, mut fits, mut huge] = submit_together(&engine, requests).await;
    at(&engine, 500).await;
    assert_eq!(read(&mut ninth).await, cut(1, &every_10_ms(8), FinishReason::SlowConsumer, 90.0));
    assert_eq!(read(&mut fits).await, whole(2, &every_10_ms(8)));
    assert_eq!(read(&mut huge).await, whole(3, &every_10_ms(3)));
}

#[tokio::test(start_paused = true)]
async fn r19_reading_makes_room() {
    let engine = start(config());
    let mut stream = submit_with(&engine, request(1, 8, 6), cancel_on_overflow(2)).await;
    at(&engine, 25).await;
    assert_eq!(next(&mut stream).await, (Some(101), None, 10.0));
    at(&engine, 35).await;
    let rest = read(&mut stream).await;
    assert_eq!(rest, whole(1, &every_10_ms(6))[1..]);
}

/// The actor is late by up to a tick of Tokio's timer, or by 50 ms, and carries out pass after pass at one
/// instant: readers that are awake have their turn between any two.
#[tokio::test(start_paused = true)]
async fn r19_catching_up_overflows_nobody_who_reads() {
    let vllm = vllm().with_num_gpu_blocks(701);
    let engine = start(config_of(vllm).with_timing(TimingConfig::ConstantMs(0.35)).with_max_model_len(400));
    let mut readers = JoinSet::new();
    let requests = [1, 2, 3, 4, 5, 6, 7, 8].map(|n| (request(n, 8, 300), cancel_on_overflow(1)));
    for mut stream in submit_together(&engine, requests).await {
        readers.spawn(async move { read(&mut stream).await.last().copied() });
    }
    for _ in 0..3 {
        tokio::time::advance(Duration::from_millis(50)).await;
    }
    while let Some(last) = within(readers.join_next()).await {
        let (_, finish, at) = last.expect("no panic").expect("an end");
        assert_eq!((finish, at), (Some(FinishReason::Length), 105.0));
    }
    assert_eq!(engine.metrics_receiver().borrow().slow_consumers, 0);
}

#[tokio::test(start_paused = true)]
async fn r20_a_full_response_never_overflows() {
    let engine = start(config());
    let requests = [(request(1, 8, 50), FULL), (request(2, 8, 5_000), FULL)];
    let [mut stream, mut capped] = submit_together(&engine, requests).await;
    at(&engine, 2_000).await;
    assert_eq!(read(&mut stream).await, whole(1, &every_10_ms(50)));
    assert_eq!(read(&mut capped).await, whole(2, &every_10_ms(56)), "64 tokens with the prompt");
    assert_eq!(engine.metrics_receiver().borrow().slow_consumers, 0);
}

#[tokio::test(start_paused = true)]
async fn r21_a_throttled_request_waits_for_its_reader_and_loses_nothing() {
    for capacity in 1..=4 {
        let engine = start(config());
        let asleep = (request(1, 8, 8), throttle(capacity as usize));
        let [mut asleep, mut awake] = submit_together(&engine, [asleep, (request(2, 8, 20), eight())]).await;
        assert_eq!(read(&mut awake).await, whole(2, &every_10_ms(20)), "nobody else is held up");
        turns().await;
        // It keeps its blocks: those of the prompt and of the tokens that were computed.
        let used = (8 + u64::from(capacity) - 1).div_ceil(4);
        assert_eq!(load(&engine), (1, 0, used), "capacity {capacity}");
        let passes = engine.metrics_receiver().borrow().num_passes;
        at(&engine, 1_000).await;
        assert_eq!(engine.metrics_receiver().borrow().num_passes, passes, "the engine sleeps meanwhile");

        // One is read, one is produced.
        let expected = every_10_ms(capacity);
        assert_eq!(next(&mut asleep).await, (Some(101), None, 10.0));
        at(&engine, 2_000).await;
        let mut rest = read(&mut asleep).await;
        let tail = rest.split_off(capacity as usize - 1);
        let queued: Vec<f64> = rest.iter().map(|(.., at)| *at).collect();
        assert_eq!(queued, expected[1..]);
        // The one produced after the first read, then one pass after another for a reader who is awake.
        let produced: Vec<f64> = tail.iter().map(|(.., at)| *at).collect();
        let resumed = (1..=7 - capacity).map(|pass| 2_000.0 + 10.0 * f64::from(pass));
        assert_eq!(produced, [1_010.0].into_iter().chain(resumed).collect::<Vec<_>>());
        let ids: Vec<u32> = rest.iter().chain(&tail).filter_map(|(token, ..)| *token).collect();
        assert_eq!(ids, (102..=108).collect::<Vec<_>>());
        assert_eq!(tail.last().expect("the end").1, Some(FinishReason::Length));
        turns().await;
        assert_clean(&engine);
    }
}

#[tokio::test(start_paused = true)]
async fn r21_a_reader_who_keeps_up_is_never_held_back() {
    let engine = LiveEngine::builder(config()).output_buffering(throttle(1)).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 20)).await;
    assert_eq!(read(&mut stream).await, whole(1, &every_10_ms(20)));
}

#[tokio::test(start_paused = true)]
async fn r21_all_readers_asleep_and_one_after_another_awake() {
    let engine = start(config());
    let mut streams = submit_together(&engine, [1, 2, 3].map(|n| (request(n, 8, 2), throttle(1)))).await;
    at(&engine, 500).await;
    assert_eq!((load(&engine), engine.metrics_receiver().borrow().num_passes), ((3, 0, 6), 1));
    for (n, stream) in (1..).zip(&mut streams) {
        let woken = 500.0 + 10.0 * f64::from(n);
        assert_eq!(read(stream).await, whole(n, &[10.0, woken]), "a pass of its own, begun when it was read");
    }
    turns().await;
    assert_clean(&engine);
}

#[tokio::test(start_paused = true)]
async fn r21_one_that_sleeps_through_its_last_token_ends_by_length() {
    let engine = LiveEngine::builder(config()).output_buffering(throttle(3)).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 3)).await;
    at(&engine, 500).await;
    assert_eq!(read(&mut stream).await, whole(1, &every_10_ms(3)), "the last token ends it; there is nothing to hold");
}

/// 10 usable blocks. The first request grows into the blocks of the second, which is throttled.
#[tokio::test(start_paused = true)]
async fn r21_preempted_while_throttled_it_stands_aside() {
    let engine = start(config_of(vllm().with_num_gpu_blocks(11)).with_max_model_len(40));
    let requests = [(request(1, 15, 20), FULL), (request(2, 15, 4), throttle(1))];
    let [mut grows, mut asleep] = submit_together(&engine, requests).await;
    at(&engine, 95).await;
    assert_eq!(load(&engine), (2, 0, 10));
    // Behind the preempted one, which needs 4 blocks of the 3 that are left.
    let mut behind = submit(&engine, request(3, 4, 1)).await;
    at(&engine, 105).await;
    assert_eq!(load(&engine), (2, 1, 10), "at 100 ms, before the pass that preempts was planned");
    assert_eq!(read(&mut behind).await, whole(3, &[120.0]), "the pass after the one that preempted");
    assert_eq!(engine.metrics_receiver().borrow().num_preemptions, 1);
    at(&engine, 125).await;
    assert_eq!(load(&engine), (1, 1, 7));
    // It is read, and waits in the queue like any other until the first one ends.
    assert_eq!(next(&mut asleep).await, (Some(201), None, 10.0));
    assert_eq!(read(&mut grows).await, whole(1, &every_10_ms(20)));
    assert_eq!(read(&mut asleep).await, whole(2, &[10.0, 210.0, 220.0, 230.0])[1..]);
    turns().await;
    assert_clean(&engine);
}

#[tokio::test(start_paused = true)]
async fn r21_a_throttled_request_can_be_cancelled_dropped_and_stopped() {
    let engine = start(config());
    let requests = [1, 2, 3].map(|n| (request(n, 8, 9), throttle(2)));
    let [mut cancelled, dropped, mut stopped] = submit_together(&engine, requests).await;
    at(&engine, 100).await;
    assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
    assert_eq!(load(&engine), (2, 0, 6), "seen when the cancel is answered");
    drop(dropped);
    turns().await;
    assert_eq!((engine.active_request_count(), load(&engine)), (1, (1, 0, 3)));
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert_eq!(read(&mut cancelled).await, cut(1, &[10.0, 20.0], FinishReason::Cancelled, 100.0));
    assert_eq!(read(&mut stopped).await, cut(3, &[10.0, 20.0], FinishReason::EngineStopped, 100.0));
}

/// The reader takes a token in every pass but the queue is full in between: nothing is lost, nothing stalls.
#[tokio::test(start_paused = true)]
async fn r21_a_reader_that_is_late_by_half_a_pass() {
    let engine = LiveEngine::builder(config()).output_buffering(throttle(1)).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 5)).await;
    let mut signals: Vec<Seen> = Vec::new();
    for read_at in [15, 30, 45, 60, 75] {
        at(&engine, read_at).await;
        signals.push(next(&mut stream).await);
    }
    assert_eq!(signals, whole(1, &[10.0, 25.0, 40.0, 55.0, 70.0]), "each pass begins when there is room again");
}

#[tokio::test(start_paused = true)]
async fn r22_the_policy_is_the_engines_unless_the_request_says_otherwise() {
    let engine = LiveEngine::builder(config()).output_buffering(cancel_on_overflow(2)).start().expect("valid");
    let prepared = engine.prepare_request_with(request(5, 8, 5), buffered(FULL));
    let (registration, mut prepared) = prepared.expect("valid");
    let requests =
        [(request(2, 8, 5), cancel_on_overflow(3)), (request(3, 8, 5), FULL), (request(4, 8, 5), throttle(1))];
    let (as_built, submitted, [mut own, mut full, mut throttled]) = tokio::join!(
        engine.submit(request(1, 8, 5)),
        engine.submit_prepared(registration),
        submit_together(&engine, requests)
    );
    let mut as_built = as_built.expect("valid");
    submitted.expect("valid");
    at(&engine, 200).await;
    assert_eq!(read(&mut as_built).await, cut(1, &[10.0, 20.0], FinishReason::SlowConsumer, 30.0));
    assert_eq!(read(&mut own).await, cut(2, &[10.0, 20.0, 30.0], FinishReason::SlowConsumer, 40.0));
    assert_eq!(read(&mut full).await, whole(3, &every_10_ms(5)));
    assert_eq!(read(&mut prepared).await, whole(5, &every_10_ms(5)));
    assert_eq!(read(&mut throttled).await, whole(4, &[10.0, 210.0, 220.0, 230.0, 240.0]));
}

#[tokio::test(start_paused = true)]
async fn r22_a_zero_duration_pass_does_not_outrun_a_throttled_reader() {
    let engine = LiveEngine::builder(config())
        .output_buffering(throttle(2))
        .pass_timing(durations(vec![Duration::ZERO]))
        .start()
        .expect("valid");
    let mut stream = submit(&engine, request(1, 8, 50)).await;
    turns().await;
    turns().await;
    assert_eq!(engine.metrics_receiver().borrow().generation_tokens, 2);
    assert_eq!(read(&mut stream).await, whole(1, &[0.0; 50]));
}
