//! The same contract over SGLang's scheduler: what of it depends on the engine kind.

use standin::{EngineConfig, EngineKind, FinishReason, SchedulingState, SglangConfig};

use crate::common::{
    FULL, assert_clean, at, config_of_kind, cut, id, load, next, poll_once, read, request, sglang, start, submit,
    submit_together, submit_with, throttle, turns, whole, within,
};

fn config(sglang: SglangConfig) -> EngineConfig {
    config_of_kind(EngineKind::Sglang(sglang))
}

fn once_more() -> EngineConfig {
    config(sglang().with_abort_after_next_forward(true))
}

#[tokio::test(start_paused = true)]
async fn prefills_go_first_and_decodes_wait_for_them() {
    let engine = start(config(sglang()));
    let mut first = submit(&engine, request(1, 8, 3)).await;
    at(&engine, 5).await;
    let mut second = submit(&engine, request(2, 8, 2)).await;
    assert_eq!(read(&mut first).await, whole(1, &[10.0, 30.0, 40.0]), "a prefill of another in between");
    assert_eq!(read(&mut second).await, whole(2, &[20.0, 30.0]));
    at(&engine, 60).await;
    assert_clean(&engine);
}

#[tokio::test(start_paused = true)]
async fn a_cached_prefix_is_told_with_the_first_token() {
    let engine = start(config(sglang()));
    for expected in [0, 8] {
        let mut stream = submit(&engine, request(1, 12, 1)).await;
        let first = within(stream.recv()).await.expect("a token");
        assert_eq!(first.cached_tokens, Some(expected));
    }
    at(&engine, 40).await;
    assert_eq!(within(engine.reset_prefix_cache()).await, Ok(true));
    let mut stream = submit(&engine, request(1, 12, 1)).await;
    assert_eq!(within(stream.recv()).await.expect("a token").cached_tokens, Some(0));
}

#[tokio::test(start_paused = true)]
async fn r25_a_cancel_is_answered_at_once_unless_the_engines_own_rule_wants_one_more_pass() {
    for (config, answered_at) in [(config(sglang()), 25), (once_more(), 30)] {
        let engine = start(config);
        let [mut stream, mut other] =
            submit_together(&engine, [(request(1, 8, 9), FULL), (request(2, 8, 4), FULL)]).await;
        at(&engine, 25).await;
        assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
        turns().await;
        assert_eq!(engine.now().as_nanos(), answered_at * 1_000_000);
        let tokens = [10.0, 20.0];
        assert_eq!(read(&mut stream).await, cut(1, &tokens, FinishReason::Cancelled, 25.0), "forwarding stops at once");
        assert_eq!(read(&mut other).await, whole(2, &[10.0, 20.0, 30.0, 40.0]), "nobody else is disturbed");
        at(&engine, 60).await;
        assert_clean(&engine);
        assert_eq!(engine.metrics_receiver().borrow().finished.aborted, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn r25_the_answer_comes_when_the_blocks_are_free() {
    let engine = start(once_more());
    let _stream = submit(&engine, request(1, 8, 9)).await;
    at(&engine, 15).await;
    let mut cancel = Box::pin(engine.cancel(id(1)));
    assert_eq!(poll_once(&mut cancel), None);
    turns().await;
    assert_eq!((poll_once(&mut cancel), engine.active_request_count()), (None, 0));
    assert_eq!(within(engine.cancel(id(1))).await, Ok(false), "its route is gone, a second cancel finds nothing");
    assert_eq!(within(cancel).await, Ok(true));
    assert_eq!(load(&engine), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn r25_a_cancel_that_waits_for_a_pass_does_not_wait_for_ever() {
    // The readers of a throttled request are gone: it runs once more all the same.
    let engine = start(once_more());
    let mut slow = submit_with(&engine, request(1, 8, 9), throttle(1)).await;
    assert_eq!(next(&mut slow).await, (Some(101), None, 10.0));
    at(&engine, 55).await;
    assert_eq!(load(&engine).0, 1, "it stands still");
    assert_eq!(within(slow.cancel()).await, Ok(true));
    assert_clean(&engine);
    // No pass will come.
    let _running = submit(&engine, request(2, 8, 9)).await;
    at(&engine, 95).await;
    let mut cancel = Box::pin(engine.cancel(id(2)));
    assert_eq!(poll_once(&mut cancel), None);
    turns().await;
    within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("alive");
    assert_eq!(within(cancel).await, Ok(true));
    // The engine stops.
    let engine = start(once_more());
    let _running = submit(&engine, request(3, 8, 9)).await;
    at(&engine, 15).await;
    let mut cancel = Box::pin(engine.cancel(id(3)));
    assert_eq!(poll_once(&mut cancel), None);
    turns().await;
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert_eq!(within(cancel).await, Ok(false));
}

#[tokio::test(start_paused = true)]
async fn retracted_requests_lose_nothing() {
    let hopeful = sglang().with_max_total_tokens(64).with_schedule_conservativeness(0.01);
    let engine = start(config(hopeful));
    let streams = submit_together(&engine, [(request(1, 8, 30), FULL), (request(2, 8, 30), FULL)]).await;
    for (n, mut stream) in (1..).zip(streams) {
        let tokens: Vec<_> = read(&mut stream).await.iter().filter_map(|signal| signal.0).collect();
        assert_eq!(tokens, crate::common::tokens(n, 30));
    }
    assert!(engine.metrics_receiver().borrow().num_preemptions > 0);
}
