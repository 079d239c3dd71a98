//! h06: releasing and cancelling a source, in every state it can be in.

use std::task::Context;

use standin::{FinishReason, HandoffError, LiveEngine, LiveHandoffEvent, SourceEnd};
use tokio::sync::watch;

use crate::common::{Log, at, config_of, cut, load, read, request, start, submit, turns, vllm, whole};
use crate::kit::{Event, Kind, OK, assert_released, blocks, for_every_kind, ms, register, source, source_of, within};

const CANCELLED: FinishReason = FinishReason::Cancelled;

fn ended(at: u64, end: SourceEnd) -> Event {
    Some(LiveHandoffEvent::SourceEnded { at: ms(at), end })
}

async fn h06_release_before_it_is_held_is_refused_and_afterwards_frees_once(kind: Kind) {
    let engine = start(kind.config());
    let mut held = source(&engine, 1, 8).await;
    at(&engine, 5).await;
    assert_eq!(within(held.control.release_source()).await, Err(HandoffError::NotHeld));
    at(&engine, 15).await;
    assert!(matches!(held.event().await, Some(LiveHandoffEvent::SourceHeld { .. })));
    assert_eq!(within(held.control.release_source()).await, OK);
    assert_eq!((engine.now(), blocks(&engine)), (ms(15), (0, 0, 0)), "shown when it is answered");
    assert_eq!(held.event().await, ended(15, SourceEnd::Released));
    assert_eq!(held.event().await, None, "nothing can follow");
    for _ in 0..2 {
        assert_eq!(within(held.control.release_source()).await, OK, "over already");
        assert_eq!(within(held.control.cancel_source()).await, OK, "over already");
    }
    assert_eq!(read(&mut held.stream).await, whole(1, &[10.0]));
    assert_released(&engine).await;
}

/// The wakers note, synchronously, in which order it is seen.
async fn h06_the_answer_comes_when_what_it_did_is_shown(kind: Kind) {
    let engine = start(kind.config());
    let mut held = source(&engine, 1, 8).await;
    assert!(held.event().await.is_some());
    at(&engine, 15).await;
    let log = Log::default();
    let mut metrics = engine.metrics_receiver();
    metrics.mark_unchanged();
    let mut released = Box::pin(held.control.release_source());
    let (mut event, mut shown) = (Box::pin(held.events.recv()), Box::pin(metrics.changed()));
    assert!(released.as_mut().poll(&mut Context::from_waker(&log.waker("answer"))).is_pending());
    assert!(event.as_mut().poll(&mut Context::from_waker(&log.waker("fact"))).is_pending());
    assert!(shown.as_mut().poll(&mut Context::from_waker(&log.waker("metrics"))).is_pending());
    turns().await;
    assert_eq!(log.take(), ["fact", "metrics", "answer"]);
}

/// One slot and chunks of 4 tokens: the first request runs, the second one waits.
async fn h06_cancel_removes_a_source_that_is_queued_running_or_held(kind: Kind) {
    let outputs: &[f64] = if kind == Kind::Vllm { &[30.0, 40.0, 50.0, 60.0] } else { &[30.0] };
    for (n, cancel_at, tokens, told) in
        [(2, 5, vec![], 0), (1, 15, vec![], 0), (1, 45, vec![30.0, 40.0], 0), (1, 65, vec![], 1)]
    {
        if kind == Kind::Sglang && !tokens.is_empty() {
            // It is held after its first token.
            continue;
        }
        let engine = start(kind.narrow(1, 4));
        let mut running = source_of(&engine, 1, request(1, 12, 4)).await;
        let mut queued = source_of(&engine, 2, request(2, 4, 8)).await;
        at(&engine, cancel_at).await;
        let side = if n == 1 { &mut running } else { &mut queued };
        assert_eq!(within(side.control.cancel_source()).await, OK, "at {cancel_at} ms");
        assert_eq!(engine.now(), ms(cancel_at), "no engine time goes by");
        for _ in 0..told {
            assert!(matches!(side.event().await, Some(LiveHandoffEvent::SourceHeld { .. })));
        }
        assert_eq!(side.event().await, ended(cancel_at, SourceEnd::Cancelled));
        assert_eq!(side.event().await, None);
        if told == 0 {
            // Told at the boundary of the pass in flight: that is when it is shown.
            let boundary = (cancel_at / 10 * 10 + 10) as f64;
            assert_eq!(read(&mut side.stream).await, cut(n, &tokens, CANCELLED, boundary), "at {cancel_at} ms");
        } else {
            let signals = read(&mut side.stream).await;
            assert_eq!(signals.iter().map(|signal| signal.2).collect::<Vec<_>>(), outputs);
        }
        drop((running, queued));
        at(&engine, 1_000).await;
        assert_released(&engine).await;
    }
}

/// While a pass is in flight the answer comes at once, and what is freed is there for the next pass.
async fn h06_a_release_during_a_pass_is_answered_at_once(kind: Kind) {
    // 12 usable blocks: 8 are held, 1 is used by another request, and a third one needs 8.
    let engine = start(kind.pool(12));
    let held = source(&engine, 1, 32).await;
    at(&engine, 15).await;
    let mut running = submit(&engine, request(2, 2, 3)).await;
    let mut waiting = submit(&engine, request(3, 32, 1)).await;
    at(&engine, 20).await;
    assert_eq!(load(&engine).1, 0);
    assert_eq!(within(held.control.release_source()).await, OK);
    assert_eq!(engine.now(), ms(20));
    // Prefill and decode share a pass, or prefill goes first.
    let times: [f64; 3] = if kind == Kind::Vllm { [25.0, 35.0, 45.0] } else { [25.0, 45.0, 55.0] };
    assert_eq!(read(&mut running).await, whole(2, &times));
    assert_eq!(read(&mut waiting).await, whole(3, &[35.0]));
}

/// Preemption takes no held blocks: a request that they leave no room for is preempted itself, and goes on later.
#[tokio::test(start_paused = true)]
async fn h06_held_blocks_are_never_taken() {
    let engine = start(config_of(vllm().with_num_gpu_blocks(11)).with_max_model_len(40));
    let held = source(&engine, 1, 16).await;
    at(&engine, 15).await;
    // 6 blocks are left: both fit at first, and one of them is preempted at the latest after 12 tokens.
    let mut first = submit(&engine, request(2, 8, 16)).await;
    let mut second = submit(&engine, request(3, 8, 16)).await;
    let mut ends = Vec::new();
    for stream in [&mut first, &mut second] {
        ends.push(read(stream).await.last().expect("an end").1);
    }
    assert_eq!(ends, [Some(FinishReason::Length); 2]);
    turns().await;
    assert!(engine.metrics_receiver().borrow().num_preemptions > 0);
    assert_eq!(blocks(&engine), (4, 4, 0));
    assert_eq!(within(held.control.release_source()).await, OK);
    assert_released(&engine).await;
}

/// The request of a source is a request like any other: its own stream cancels it.
async fn h06_a_source_ends_with_its_request(kind: Kind) {
    for drops in [false, true] {
        // With SGLang it is held as soon as it has a token.
        let (ends_at, tokens): (u64, &[f64]) = if kind == Kind::Vllm { (15, &[10.0]) } else { (5, &[]) };
        let engine = start(kind.config());
        let mut side = source_of(&engine, 1, request(1, 8, 4)).await;
        at(&engine, ends_at).await;
        if drops {
            drop(side.stream);
        } else {
            assert_eq!(within(side.stream.cancel()).await, Ok(true));
            assert_eq!(read(&mut side.stream).await, cut(1, tokens, CANCELLED, ends_at as f64));
        }
        assert_eq!(within(side.events.recv()).await, ended(ends_at, SourceEnd::Cancelled));
        assert_eq!(within(side.events.recv()).await, None);
        assert_eq!(within(side.control.release_source()).await, OK, "over already");
        assert_released(&engine).await;
    }
}

async fn h06_a_source_that_outgrows_the_pool_holds_nothing(kind: Kind) {
    let engine = start(kind.pool(9));
    let (control, mut events) = register(&engine, 1);
    // Another handoff holds 5 of 9 blocks; the source needs 9 in the end and waits for them.
    let held = source(&engine, 2, 20).await;
    let (registration, mut stream) = engine.prepare_request(request(1, 30, 6)).expect("valid");
    within(control.submit_prefill(registration)).await.expect("taken");
    at(&engine, 500).await;
    assert_eq!(within(held.control.release_source()).await, OK);
    let last = *read(&mut stream).await.last().expect("an end");
    assert_eq!(last.1, Some(FinishReason::Length));
    assert!(matches!(within(events.recv()).await, Some(LiveHandoffEvent::SourceHeld { .. })));
    assert_eq!(within(control.cancel_source()).await, OK);
    assert_released(&engine).await;
}

async fn h06_the_wrong_side_is_an_error_that_changes_nothing(kind: Kind) {
    let engine = start(kind.config());
    let held = source(&engine, 1, 8).await;
    at(&engine, 15).await;
    for refused in [
        within(held.control.activate_destination(None)).await,
        within(held.control.fail_transfer(0)).await,
        within(held.control.cancel_destination()).await,
    ] {
        assert!(matches!(refused, Err(HandoffError::Scheduler(_))), "{refused:?}");
    }
    assert_eq!(blocks(&engine), (2, 2, 0));
    let waits = crate::kit::destination(&engine, 2, 8, 1).await;
    turns().await;
    for refused in [
        within(waits.control.release_source()).await,
        within(waits.control.cancel_source()).await,
        within(waits.control.heartbeat()).await,
    ] {
        assert!(matches!(refused, Err(HandoffError::Scheduler(_))), "{refused:?}");
    }
    assert_eq!(blocks(&engine), (4, 2, 2));
}

/// The gate holds passes and their ends, not commands.
async fn h06_commands_are_answered_while_the_gate_is_closed(kind: Kind) {
    let (gate, opened) = watch::channel(true);
    let engine = LiveEngine::builder(kind.config()).output_gate(opened).start().expect("valid");
    let mut held = source(&engine, 1, 8).await;
    assert!(held.event().await.is_some());
    let mut running = source_of(&engine, 2, request(2, 8, 3)).await;
    at(&engine, 15).await;
    gate.send(false).expect("alive");
    // In the pass, and at its end, which the gate holds.
    for ms in [16, 40] {
        at(&engine, ms).await;
        assert_eq!(within(held.control.heartbeat()).await, OK);
        assert_eq!(within(running.control.release_source()).await, Err(HandoffError::NotHeld));
    }
    assert_eq!(within(held.control.release_source()).await, OK);
    assert_eq!((engine.now(), blocks(&engine)), (ms(40), (2, 2, 0)), "shown at the boundary");
    gate.send(true).expect("alive");
    assert_eq!(held.event().await, ended(40, SourceEnd::Released));
    assert!(running.event().await.is_some());
    // Idle: shown at once, closed or not.
    gate.send(false).expect("alive");
    turns().await;
    assert_eq!(within(running.control.cancel_source()).await, OK);
    assert_released(&engine).await;
}

for_every_kind! {
    h06_release_before_it_is_held_is_refused_and_afterwards_frees_once,
    h06_the_answer_comes_when_what_it_did_is_shown,
    h06_cancel_removes_a_source_that_is_queued_running_or_held,
    h06_a_release_during_a_pass_is_answered_at_once,
    h06_a_source_ends_with_its_request,
    h06_a_source_that_outgrows_the_pool_holds_nothing,
    h06_the_wrong_side_is_an_error_that_changes_nothing,
    h06_commands_are_answered_while_the_gate_is_closed,
}
