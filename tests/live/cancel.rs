//! r23–r28 and r42: cancelling, dropping, and refusals that leave no trace.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use standin::timing::TimingConfig;
use standin::{
    EngineTime, FinishReason, LiveEngine, LiveRequest, PassMetrics, Request, RequestError, SchedulingState, SubmitError,
};
use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;

use crate::common::{
    FULL, Seen, assert_clean, at, cancel_on_overflow, config, config_of, cut, durations, eight, id, load, next,
    poll_once, poll_times, read, refused, request, start, submit, submit_together, submit_with, throttle, turns, vllm,
    whole, within,
};

const CANCELLED: FinishReason = FinishReason::Cancelled;

#[tokio::test(start_paused = true)]
async fn r23_an_unknown_or_ended_request_is_not_cancelled() {
    let engine = start(config());
    assert_eq!(within(engine.cancel(id(1))).await, Ok(false), "never heard of");
    let mut unread = submit(&engine, request(1, 8, 2)).await;
    at(&engine, 25).await;
    for _ in 0..2 {
        assert_eq!(within(engine.cancel(id(1))).await, Ok(false), "ended, unread");
        assert_eq!(within(unread.cancel()).await, Ok(false), "ended, unread");
    }
    assert_eq!(read(&mut unread).await, whole(1, &[10.0, 20.0]), "its end stays what it was");
    assert_eq!(within(unread.cancel()).await, Ok(false), "read to the end");
    assert_eq!(engine.metrics_receiver().borrow().finished.aborted, 0);
}

#[tokio::test(start_paused = true)]
async fn r23_a_prepared_request_counts() {
    let engine = start(config());
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 2)).expect("valid");
    at(&engine, 3).await;
    assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
    assert_eq!(engine.active_request_count(), 0);
    assert_eq!(read(&mut stream).await, cut(1, &[], CANCELLED, 3.0));
    let back = refused(within(engine.submit_prepared(registration)).await);
    assert_eq!(back.error, SubmitError::Cancelled);
    // Also if the registration is dropped before the scheduler has answered.
    let (registration, _stream) = engine.prepare_request(request(1, 8, 2)).expect("the id is free");
    let mut cancel = Box::pin(engine.cancel(id(1)));
    assert_eq!(poll_once(&mut cancel), None);
    drop(registration);
    assert_eq!(within(cancel).await, Ok(true));
    // By its own stream as well, and the id is free again at once.
    let (_registration, stream) = engine.prepare_request(request(1, 8, 2)).expect("the id is free");
    assert_eq!(within(stream.cancel()).await, Ok(true));
    assert_eq!(read(&mut submit(&engine, request(1, 8, 1)).await).await, whole(1, &[13.0]));
}

/// One slot: the first request runs, in chunks of 4 tokens, the second one waits.
#[tokio::test(start_paused = true)]
async fn r23_queued_mid_chunk_and_decoding_requests_are_removed() {
    for (cancel_at, n, tokens, load_after) in [
        (5, 2, vec![], (1, 0, 1)),
        (15, 1, vec![], (0, 1, 0)),
        (25, 1, vec![], (0, 1, 0)),
        (45, 1, vec![30.0, 40.0], (0, 1, 0)),
    ] {
        let engine = start(config_of(vllm().with_max_num_seqs(1).with_max_num_batched_tokens(4)));
        let mut streams = [submit(&engine, request(1, 12, 9)).await, submit(&engine, request(2, 4, 3)).await];
        at(&engine, cancel_at).await;
        assert_eq!(within(engine.cancel(id(n))).await, Ok(true), "at {cancel_at} ms");
        assert_eq!(engine.now(), EngineTime::from_millis(cancel_at), "no engine time goes by");
        assert_eq!(engine.active_request_count(), 1);
        let cut = cut(n, &tokens, CANCELLED, cancel_at as f64);
        assert_eq!(read(&mut streams[n as usize - 1]).await, cut, "at {cancel_at} ms");
        let boundary = EngineTime::from_millis(cancel_at + 5);
        let mut metrics = engine.metrics_receiver();
        within(metrics.wait_for(|metrics| metrics.at == boundary)).await.expect("alive");
        assert_eq!(load(&engine), load_after, "at {boundary}");
        assert_eq!(within(engine.cancel(id(n))).await, Ok(false), "once");
    }
}

#[tokio::test(start_paused = true)]
async fn r23_forwarding_stops_with_the_first_poll() {
    // The gate holds the end of the pass, so that the cancel is certainly first.
    let (gate, opened) = watch::channel(false);
    let engine = LiveEngine::builder(config()).output_gate(opened).start().expect("valid");
    gate.send(true).expect("alive");
    let mut stream = submit(&engine, request(1, 8, 3)).await;
    at(&engine, 5).await;
    gate.send(false).expect("alive");
    at(&engine, 15).await;
    let mut cancel = Box::pin(engine.cancel(id(1)));
    assert_eq!(poll_once(&mut cancel), None);
    gate.send(true).expect("alive");
    assert_eq!(within(cancel).await, Ok(true));
    assert_eq!(read(&mut stream).await, cut(1, &[], CANCELLED, 15.0));
}

/// A cancel between the end of a pass in the scheduler and the forwarding of its outputs: in a sink, which is
/// called before them. The token is not forwarded, be it the last or not.
#[tokio::test(start_paused = true)]
async fn r23_a_token_on_its_way_is_not_forwarded_any_more() {
    for (outputs, tokens, removed) in [(2, [].as_slice(), true), (1, [].as_slice(), false), (2, &[10.0], false)] {
        let cancel_at = 10 * (1 + tokens.len() as u64);
        let engine_in_sink = Arc::new(Mutex::new(None::<LiveEngine>));
        let held = Arc::clone(&engine_in_sink);
        let sink = move |_: u32, pass: &PassMetrics| {
            if pass.ended_at == EngineTime::from_millis(cancel_at)
                && let Some(engine) = held.lock().expect("not poisoned").take()
            {
                assert_eq!(poll_once(&mut Box::pin(engine.cancel(id(1)))), None);
            }
            Ok(())
        };
        let engine = LiveEngine::builder(config()).pass_metrics_sink(sink).start().expect("valid");
        *engine_in_sink.lock().expect("not poisoned") = Some(engine.clone());
        let mut stream = submit(&engine, request(1, 8, outputs)).await;
        at(&engine, cancel_at).await;
        turns().await;
        assert_eq!(read(&mut stream).await, cut(1, tokens, CANCELLED, cancel_at as f64));
        let finished = engine.metrics_receiver().borrow().finished;
        assert_eq!((finished.length, finished.aborted), (u64::from(!removed), u64::from(removed)));
        assert_clean(&engine);
    }
}

/// And what such a cancel is told, if the request had ended with that pass.
#[tokio::test(start_paused = true)]
async fn r23_ended_with_its_last_token_on_the_way() {
    let cancel = Arc::new(Mutex::new(None));
    let held = Arc::clone(&cancel);
    let sink = move |_: u32, _: &PassMetrics| {
        if let Some(cancel) = &mut *held.lock().expect("not poisoned") {
            assert_eq!(poll_once(cancel), None);
        }
        Ok(())
    };
    let engine = LiveEngine::builder(config()).pass_metrics_sink(sink).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 1)).await;
    let owner = engine.clone();
    *cancel.lock().expect("not poisoned") = Some(Box::pin(async move { owner.cancel(id(1)).await }));
    at(&engine, 10).await;
    turns().await;
    let cancel = cancel.lock().expect("not poisoned").take().expect("it is still there");
    assert_eq!(within(cancel).await, Ok(false), "it had ended by itself");
    assert_eq!(read(&mut stream).await, cut(1, &[], CANCELLED, 10.0));
}

#[tokio::test(start_paused = true)]
async fn r24_of_many_cancels_exactly_one_removed_the_request() {
    #[derive(Debug, Clone, Copy)]
    enum State {
        Prepared,
        InLane,
        Waiting,
        MidPass,
        Throttled,
    }
    for state in [State::Prepared, State::InLane, State::Waiting, State::MidPass, State::Throttled] {
        let engine = LiveEngine::builder(config()).output_buffering(throttle(1)).start().expect("valid");
        let mut registration = None;
        let mut submitted = Box::pin(engine.submit(request(1, 8, 3)));
        let mut stream = None;
        match state {
            State::Prepared => {
                let (unused, live) = engine.prepare_request(request(1, 8, 3)).expect("valid");
                (registration, stream) = (Some(unused), Some(live));
            }
            State::InLane => assert!(poll_once(&mut submitted).is_none()),
            State::Waiting => {
                within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
                stream = Some(within(&mut submitted).await.expect("valid"));
            }
            State::MidPass => {
                stream = Some(within(&mut submitted).await.expect("valid"));
                at(&engine, 5).await;
            }
            State::Throttled => {
                stream = Some(within(&mut submitted).await.expect("valid"));
                at(&engine, 50).await;
            }
        }
        let now = engine.now();
        let answers = within(join_all((0..32).map(|_| engine.cancel(id(1))))).await;
        let removed = answers.iter().filter(|answer| **answer == Ok(true)).count();
        assert_eq!((removed, engine.now()), (1, now), "{state:?}: {answers:?}");
        assert!(answers.iter().all(Result::is_ok));
        match &mut stream {
            Some(stream) => assert_eq!(read(stream).await.last().expect("an end").1, Some(CANCELLED), "{state:?}"),
            None => assert_eq!(refused(within(submitted).await), SubmitError::Cancelled, "{state:?}"),
        }
        assert_eq!(engine.active_request_count(), 0);
        drop(registration);
    }
}

#[tokio::test(start_paused = true)]
async fn r24_none_if_it_ended_overflowed_was_dropped_or_stopped_first() {
    let engine = start(config());
    let cancels = |n: u32| join_all((0..32).map(|_| engine.cancel(id(n))).collect::<Vec<_>>());
    let requests = [(request(1, 8, 1), eight()), (request(2, 8, 9), cancel_on_overflow(1))];
    let _ended_and_overflowed = submit_together(&engine, requests).await;
    at(&engine, 25).await;
    for n in [1, 2] {
        assert!(within(cancels(n)).await.iter().all(|answer| *answer == Ok(false)), "request {n}");
    }
    // Dropped and not served yet: the drop is first in the lane.
    drop(submit(&engine, request(3, 8, 9)).await);
    assert!(within(cancels(3)).await.iter().all(|answer| *answer == Ok(false)));
    let mut stopped = submit(&engine, request(4, 8, 9)).await;
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert!(within(cancels(4)).await.iter().all(|answer| *answer == Ok(false)));
    assert_eq!(within(stopped.cancel()).await, Ok(false));
    assert_eq!(read(&mut stopped).await.last().expect("an end").1, Some(FinishReason::EngineStopped));
}

/// Its full queue is found at the boundary; the cancel comes before the actor knows of it.
#[tokio::test(start_paused = true)]
async fn r24_a_cancel_between_overflow_and_verdict_removed_nothing() {
    for yields in 0..6 {
        let engine = start(config());
        let mut stream = submit_with(&engine, request(1, 8, 9), cancel_on_overflow(1)).await;
        at(&engine, 20).await;
        for _ in 0..yields {
            tokio::task::yield_now().await;
        }
        let removed = within(engine.cancel(id(1))).await.expect("a cancel does not fail");
        let signals = read(&mut stream).await;
        let finish = if removed { CANCELLED } else { FinishReason::SlowConsumer };
        assert_eq!(signals, cut(1, &[10.0], finish, 20.0), "after {yields} yields");
        turns().await;
        assert_clean(&engine);
        let metrics = *engine.metrics_receiver().borrow();
        assert_eq!((metrics.finished.aborted, metrics.slow_consumers), (1, u64::from(!removed)));
    }
}

#[tokio::test(start_paused = true)]
async fn r25_a_thousand_cancels_are_answered_within_a_pass_of_ten_seconds() {
    let vllm = vllm().with_num_gpu_blocks(4_001).with_max_num_seqs(1_024).with_max_num_batched_tokens(8_192);
    let engine = start(config_of(vllm).with_timing(TimingConfig::ConstantMs(10_000.0)));
    let mut survivor = submit_with(&engine, request(5_000, 4, 3), FULL).await;
    let mut streams = Vec::new();
    for n in 0..1_000 {
        streams.push(submit_with(&engine, request(n, 4, 20), cancel_on_overflow(1)).await);
    }
    let mut others = submit(&engine, request(6_000, 4, 1)).await;
    // The first pass began with the survivor alone; the others' first tokens fill their queues at 20 s.
    at(&engine, 25_000).await;
    assert_eq!(load(&engine), (1_001, 0, 1_002));
    let answers = within(join_all((0..1_000).map(|n| engine.cancel(id(n))))).await;
    assert!(answers.iter().all(|answer| *answer == Ok(true)));
    assert_eq!((engine.now(), engine.active_request_count()), (EngineTime::from_millis(25_000), 1));
    assert_eq!(load(&engine), (1_001, 0, 1_002), "the metrics are those of the last boundary");
    for (n, stream) in (0..).zip(&mut streams) {
        assert_eq!(read(stream).await, cut(n, &[20_000.0], CANCELLED, 25_000.0));
    }
    assert_eq!(engine.now(), EngineTime::from_millis(25_000));
    assert_eq!(read(&mut survivor).await, whole(5_000, &[10_000.0, 20_000.0, 30_000.0]));
    assert_eq!(read(&mut others).await, whole(6_000, &[20_000.0]));
    turns().await;
    assert_clean(&engine);
    assert_eq!(engine.metrics_receiver().borrow().slow_consumers, 0, "the pass in flight gave them nothing");
}

#[tokio::test(start_paused = true)]
async fn r25_a_pass_that_never_ends_holds_up_nobody_who_calls() {
    let for_ever = durations(vec![Duration::MAX]);
    let engine = LiveEngine::builder(config()).pass_timing(for_ever).start().expect("valid");
    let mut first = submit(&engine, request(1, 8, 3)).await;
    let mut second = submit(&engine, request(2, 8, 3)).await;
    at(&engine, 60_000).await;
    assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert_eq!(engine.now(), EngineTime::from_millis(60_000));
    assert_eq!(read(&mut first).await, cut(1, &[], CANCELLED, 60_000.0));
    assert_eq!(read(&mut second).await, cut(2, &[], FinishReason::EngineStopped, 60_000.0));
}

/// The blocks of a cancelled request are free in the core at once: the pass after the one in flight has them.
#[tokio::test(start_paused = true)]
async fn r25_the_blocks_are_there_for_the_next_pass() {
    let engine = start(config_of(vllm().with_num_gpu_blocks(10)).with_max_model_len(40));
    let _large = submit(&engine, request(1, 32, 2)).await;
    let mut waiting = submit(&engine, request(2, 32, 1)).await;
    at(&engine, 9).await;
    assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
    assert_eq!(read(&mut waiting).await, whole(2, &[20.0]));
}

#[tokio::test(start_paused = true)]
async fn r26_a_cancel_at_the_natural_end_leaves_one_terminal_signal() {
    let mut outcomes = [0, 0];
    for (offset, yields) in (29..=31).flat_map(|offset| (0..8).map(move |yields| (offset, yields))) {
        let engine = start(config());
        // The caller's timer before or after the engine's own.
        let mut stream = if yields % 2 == 0 { Some(submit(&engine, request(1, 8, 3)).await) } else { None };
        let mut sleep = Box::pin(tokio::time::sleep(Duration::from_millis(offset)));
        assert!(poll_once(&mut sleep).is_none());
        let stream = match &mut stream {
            Some(stream) => stream,
            none => none.insert(submit(&engine, request(1, 8, 3)).await),
        };
        sleep.await;
        for _ in 0..yields {
            tokio::task::yield_now().await;
        }
        let removed = within(engine.cancel(id(1))).await.expect("a cancel does not fail");
        assert_eq!(engine.active_request_count(), 0);
        let signals = read(stream).await;
        let natural = whole(1, &[10.0, 20.0, 30.0]);
        if removed {
            assert_eq!(signals, cut(1, &[10.0, 20.0], CANCELLED, offset as f64));
        } else {
            assert!(signals == natural || signals == cut(1, &[10.0, 20.0], CANCELLED, 30.0), "{signals:?}");
        }
        outcomes[usize::from(removed)] += 1;
        at(&engine, 40).await;
        assert_clean(&engine);
        let finished = engine.metrics_receiver().borrow().finished;
        assert_eq!((finished.length, finished.aborted), (u64::from(!removed), u64::from(removed)));
    }
    assert!(outcomes.iter().all(|outcome| *outcome > 0), "both must be seen: {outcomes:?}");
}

#[tokio::test(start_paused = true)]
async fn r27_a_cancel_does_not_overtake_its_submission_and_get_lost() {
    for polls in 1..6 {
        let engine = start(config());
        let mut submitted = Box::pin(engine.submit(request(1, 8, 3)));
        let mut accepted = None;
        for _ in 0..polls {
            accepted = accepted.or(poll_once(&mut submitted));
            if accepted.is_some() {
                break;
            }
            if polls > 1 {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(within(engine.cancel(id(1))).await, Ok(true), "{polls} polls");
        assert_eq!(engine.active_request_count(), 0);
        match accepted {
            Some(accepted) => {
                let mut stream = accepted.expect("it was taken before the cancel");
                assert_eq!(read(&mut stream).await, cut(1, &[], CANCELLED, 0.0));
            }
            // It was taken, or it was not: either way it is gone.
            None => match within(submitted).await {
                Ok(mut stream) => assert_eq!(read(&mut stream).await, cut(1, &[], CANCELLED, 0.0)),
                Err(error) => assert_eq!(error, SubmitError::Cancelled),
            },
        }
        at(&engine, 100).await;
        assert_clean(&engine);
        assert_eq!(engine.metrics_receiver().borrow().generation_tokens, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn r27_submit_and_cancel_polled_together() {
    let engine = start(config());
    let (submitted, cancelled) =
        within(async { tokio::join!(engine.submit(request(1, 8, 3)), engine.cancel(id(1))) }).await;
    // `join!` may poll either first; whichever it was, nobody waits for ever and the two agree.
    match (submitted, cancelled) {
        (Err(error), Ok(true)) => assert_eq!(error, SubmitError::Cancelled),
        (Ok(mut stream), Ok(false)) => assert_eq!(read(&mut stream).await, whole(1, &[10.0, 20.0, 30.0])),
        (Ok(mut stream), Ok(true)) => assert_eq!(read(&mut stream).await, cut(1, &[], CANCELLED, 0.0)),
        other => panic!("{other:?}"),
    }
    turns().await;
    assert_clean(&engine);
}

/// Outside every runtime, and in another thread: drops are plain calls.
#[test]
fn r28_drops_work_outside_a_runtime() {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let (engine, running, ended, registration, paired) = runtime.block_on(async {
        let engine = start(config());
        let running = submit(&engine, request(1, 8, 40)).await;
        let ended = submit(&engine, request(2, 8, 1)).await;
        let (registration, paired) = engine.prepare_request(request(3, 8, 3)).expect("valid");
        at(&engine, 25).await;
        (engine, running, ended, registration, paired)
    });
    let mut submitted = Box::pin(engine.submit(request(4, 8, 3)));
    assert!(poll_once(&mut submitted).is_none());
    assert_eq!(engine.active_request_count(), 3);
    drop(submitted);
    drop(ended);
    std::thread::scope(|scope| {
        scope.spawn(|| drop(running));
        scope.spawn(|| drop(registration));
    });
    runtime.block_on(async {
        turns().await;
        assert_eq!(engine.active_request_count(), 0);
        drop(paired);
        at(&engine, 35).await;
        assert_clean(&engine);
        assert_eq!(engine.metrics_receiver().borrow().finished.aborted, 1);
    });
    drop(engine);
    runtime.block_on(turns());
    assert_eq!(runtime.metrics().num_alive_tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn r28_an_engine_has_three_tasks_whatever_the_load() {
    let tasks = || Handle::current().metrics().num_alive_tasks();
    assert_eq!(tasks(), 0);
    let engine = start(config());
    assert_eq!(tasks(), 3);
    let mut streams: Vec<LiveRequest> = Vec::new();
    for n in 0..500 {
        streams.push(submit_with(&engine, request(n, 8, 3), throttle(1)).await);
    }
    assert_eq!(tasks(), 3, "500 requests");
    at(&engine, 100).await;
    streams.truncate(250);
    assert_eq!(tasks(), 3, "drops");
    let cancels: Vec<_> = (0..250).map(|n| engine.cancel(id(n))).collect();
    let _prepared = engine.prepare_request(request(900, 8, 3)).expect("valid");
    within(join_all(cancels)).await;
    assert_eq!(tasks(), 3, "cancels");
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert_eq!(tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn r42_refused_commands_change_nothing() {
    let trace = |refusals: bool| async move {
        let (engine, other) = (start(config()), start(config()));
        let mut stream = submit(&engine, request(1, 8, 4)).await;
        let (foreign, _paired) = other.prepare_request(request(2, 8, 1)).expect("valid");
        at(&engine, 15).await;
        if refusals {
            let before = (engine.active_request_count(), *engine.metrics_receiver().borrow(), engine.now());
            let duplicate = refused(within(engine.submit(request(1, 8, 1))).await);
            assert_eq!(duplicate, SubmitError::DuplicateId(id(1)));
            let zero = refused(within(engine.submit(Request::new(vec![1], 0))).await);
            assert_eq!(zero, RequestError::ZeroOutput.into());
            assert!(within(engine.submit(request(5, 64, 1))).await.is_err());
            let foreign = refused(within(engine.submit_prepared(foreign)).await);
            assert_eq!(foreign.error, SubmitError::ForeignRegistration);
            assert_eq!(within(engine.reset_prefix_cache()).await, Ok(false), "blocks are in use");
            assert_eq!(within(engine.cancel(id(77))).await, Ok(false));
            turns().await;
            let after = (engine.active_request_count(), *engine.metrics_receiver().borrow(), engine.now());
            assert_eq!(before, after);
        }
        // What follows is the same to the last id: the engine's counters have not moved.
        let mut made = submit(&engine, Request::new(vec![9; 8], 3)).await;
        let signals: [Vec<Seen>; 2] = [read(&mut stream).await, read(&mut made).await];
        turns().await;
        (made.id(), signals, *engine.metrics_receiver().borrow())
    };
    assert_eq!(trace(true).await, trace(false).await);
}

/// A prompt that grows after it was registered is refused by the scheduler itself.
#[tokio::test(start_paused = true)]
async fn r42_a_registration_that_the_scheduler_refuses_is_as_it_was() {
    let engine = start(config());
    let (made, prompt) = crate::stop::lazily(1);
    let (registration, mut stream) = engine.prepare_request(made.clone()).expect("valid");
    prompt.set_length(64);
    let back = refused(within(engine.submit_prepared(registration)).await);
    let too_long = RequestError::PromptTooLong { prompt_tokens: 64, max_model_len: 64 };
    assert_eq!(back.error, SubmitError::Scheduler(too_long.into()));
    assert_eq!(engine.active_request_count(), 1);
    prompt.set_length(8);
    within(engine.submit_prepared(back.registration)).await.expect("valid again");
    assert_eq!(read(&mut stream).await, whole(1, &[10.0, 20.0, 30.0]));

    // And one that is dropped instead ends its stream.
    let (registration, mut stream) = engine.prepare_request(made).expect("valid");
    prompt.set_length(64);
    drop(refused(within(engine.submit_prepared(registration)).await));
    assert_eq!(read(&mut stream).await, cut(1, &[], CANCELLED, 30.0));
    turns().await;
    assert_clean(&engine);
}

#[tokio::test(start_paused = true)]
async fn r42_a_reset_of_the_prefix_cache_is_refused_or_done() {
    let engine = start(config());
    let prompt: Vec<u32> = (0..9).collect();
    let mut cached = Vec::new();
    for round in 0..3 {
        let mut stream = submit(&engine, Request::new(prompt.clone(), 2)).await;
        if round == 1 {
            at(&engine, engine.now().as_nanos() / 1_000_000 + 5).await;
            assert_eq!(within(engine.reset_prefix_cache()).await, Ok(false));
        }
        cached.push(within(stream.recv()).await.expect("a token").cached_tokens);
        next(&mut stream).await;
        turns().await;
        if round == 1 {
            assert_eq!(within(engine.reset_prefix_cache()).await, Ok(true));
            assert_eq!(engine.metrics_receiver().borrow().num_cached_blocks, 0, "shown when it is answered");
        }
    }
    assert_eq!(cached, [Some(0), Some(8), Some(0)]);
    assert_eq!(poll_times(engine.reset_prefix_cache(), 8).await, Some(Ok(true)), "without a pass");
}
