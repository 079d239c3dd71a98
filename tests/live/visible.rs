//! r29–r33: what becomes visible, and when.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Context;
use std::time::Duration;

use futures_util::future::join_all;
use standin::timing::PassWork;
use standin::{
    Admission, EngineTime, FinishReason, KvEvent, KvEventBatch, LiveEngine, LiveRequest, PassMetrics, SchedulingState,
    ShutdownError, StopCause, Stopped, SubmitError,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::common::{
    FULL, Log, Timing, assert_clean, at, cancel_on_overflow, config, config_of, cut, id, load, next, read, refused,
    request, start, submit, submit_with, turns, vllm, whole, within,
};

/// Wakers note, synchronously, when something is delivered, so the log is the dispatcher's own order.
#[tokio::test(start_paused = true)]
async fn r29_a_batch_becomes_visible_in_one_order_and_the_next_pass_is_planned_after_it() {
    let log = Log::default();
    let (admitted, mut admissions) = mpsc::unbounded_channel();
    let (plan, kv, pass) = (log.clone(), log.clone(), log.clone());
    let engine = LiveEngine::builder(config())
        .admissions(admitted)
        .pass_timing(Timing(move |work: &PassWork| {
            plan.note(format!("plan of {} tokens", work.total_tokens()));
            Duration::from_millis(10)
        }))
        .kv_event_sink(move |batch: KvEventBatch<'_>| {
            kv.note(format!("{} kv events", batch.events.len()));
            Ok(())
        })
        .pass_metrics_sink(move |_: u32, metrics: &PassMetrics| {
            pass.note(format!("pass {}", metrics.pass));
            Ok(())
        })
        .start()
        .expect("valid");
    let mut metrics = engine.metrics_receiver();
    {
        let mut admission = pin!(admissions.recv());
        assert!(admission.as_mut().poll(&mut Context::from_waker(&log.waker("admission"))).is_pending());
        let mut stream = submit(&engine, request(1, 7, 2)).await;
        at(&engine, 9).await;
        assert_eq!(log.take(), ["plan of 7 tokens", "admission"], "when it begins; nothing else before it ends");
        for (boundary, order) in [
            (10, ["1 kv events", "pass 0", "output", "metrics", "plan of 1 tokens"].as_slice()),
            (20, ["1 kv events", "pass 1", "output", "metrics"].as_slice()),
        ] {
            let mut output = pin!(stream.recv());
            let mut metrics = pin!(metrics.changed());
            assert!(output.as_mut().poll(&mut Context::from_waker(&log.waker("output"))).is_pending());
            assert!(metrics.as_mut().poll(&mut Context::from_waker(&log.waker("metrics"))).is_pending());
            at(&engine, boundary + 1).await;
            assert_eq!(log.take(), order);
            assert!(within(output).await.is_some());
            within(metrics).await.expect("alive");
        }
    }
    assert_eq!([admissions.try_recv().is_ok(), admissions.try_recv().is_ok()], [true, false], "admitted once");
}

/// A KV sink that looks around finds nothing of its batch but what came before it.
#[tokio::test(start_paused = true)]
async fn r29_sinks_see_the_state_before_the_outputs_of_their_batch() {
    let engine_in_sink = Arc::new(Mutex::new(None::<LiveEngine>));
    let (look, log) = (Arc::clone(&engine_in_sink), Log::default());
    let noted = log.clone();
    let sink = move |batch: KvEventBatch<'_>| {
        if let Some(engine) = &*look.lock().expect("not poisoned") {
            noted.note(format!("{}: {} active, {:?}", batch.at, engine.active_request_count(), load(engine)));
        }
        Ok(())
    };
    let engine = LiveEngine::builder(config()).kv_event_sink(sink).start().expect("valid");
    *engine_in_sink.lock().expect("not poisoned") = Some(engine.clone());
    let mut stream = submit(&engine, request(1, 8, 1)).await;
    assert_eq!(read(&mut stream).await, whole(1, &[10.0]));
    assert_eq!(log.take(), ["10ms: 1 active, (0, 0, 0)"]);
    engine_in_sink.lock().expect("not poisoned").take();
}

async fn received(admissions: &mut mpsc::UnboundedReceiver<Admission>) -> (u32, u32, u64, u64, u32) {
    let admission = within(admissions.recv()).await.expect("one more admission");
    let ms = |time: EngineTime| time.as_nanos() / 1_000_000;
    let n = u32::try_from(admission.request_id.as_u128()).expect("one of ours");
    (n, admission.cached_tokens, ms(admission.admitted_at), ms(admission.observed_at), admission.dp_rank)
}

#[tokio::test(start_paused = true)]
async fn r30_admissions_say_who_when_and_what_was_cached() {
    let (admitted, mut admissions) = mpsc::unbounded_channel();
    let vllm = vllm().with_max_num_seqs(2);
    let engine = LiveEngine::builder(config_of(vllm)).dp_rank(3).admissions(admitted).start().expect("valid");
    let mut streams = vec![submit(&engine, request(1, 9, 2)).await];
    at(&engine, 5).await;
    streams.push(submit(&engine, request(2, 9, 3)).await);
    // It waits for a slot until 20 ms, and finds the blocks of the first, whose prompt it shares.
    let mut again = request(3, 9, 1);
    again.prompt = request(1, 9, 1).prompt;
    streams.push(submit(&engine, again).await);
    assert_eq!(received(&mut admissions).await, (1, 0, 0, 0, 3));
    assert_eq!(engine.now(), EngineTime::from_millis(5));
    assert_eq!(received(&mut admissions).await, (2, 0, 10, 10, 3));
    assert_eq!(engine.now(), EngineTime::from_millis(10), "it goes ahead when the pass begins");
    assert_eq!(received(&mut admissions).await, (3, 8, 20, 20, 3));
    for stream in &mut streams {
        read(stream).await;
    }
    assert!(admissions.try_recv().is_err(), "each request once");
}

#[tokio::test(start_paused = true)]
async fn r30_a_return_after_a_preemption_is_no_admission() {
    let (admitted, mut admissions) = mpsc::unbounded_channel();
    let config = config_of(vllm().with_num_gpu_blocks(11)).with_max_model_len(40);
    let engine = LiveEngine::builder(config).admissions(admitted).output_buffering(FULL).start().expect("valid");
    let mut streams = [submit(&engine, request(1, 15, 20)).await, submit(&engine, request(2, 15, 20)).await];
    for stream in &mut streams {
        assert_eq!(read(stream).await.len(), 20);
    }
    assert!(engine.metrics_receiver().borrow().num_preemptions > 0);
    assert_eq!(received(&mut admissions).await, (1, 0, 0, 0, 0));
    assert_eq!(received(&mut admissions).await, (2, 0, 10, 10, 0));
    assert!(admissions.try_recv().is_err());
}

/// The stream is dropped while the pass that admits its request is planned: before the dispatcher can know.
#[tokio::test(start_paused = true)]
async fn r30_an_admission_whose_route_is_gone_is_skipped() {
    let (admitted, mut admissions) = mpsc::unbounded_channel();
    let goes = Arc::new(Mutex::new(None::<LiveRequest>));
    let dropper = Arc::clone(&goes);
    let timing = Timing(move |_: &PassWork| {
        drop(dropper.lock().expect("not poisoned").take());
        Duration::from_millis(10)
    });
    let engine = LiveEngine::builder(config()).admissions(admitted).pass_timing(timing).start().expect("valid");
    within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
    *goes.lock().expect("not poisoned") = Some(submit(&engine, request(1, 8, 3)).await);
    let mut stays = submit(&engine, request(2, 8, 1)).await;
    within(engine.set_scheduling(SchedulingState::Running)).await.expect("running");
    assert_eq!(received(&mut admissions).await, (2, 0, 0, 0, 0));
    assert_eq!(read(&mut stays).await, whole(2, &[10.0]));
    assert!(admissions.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn r30_a_closed_admission_receiver_stops_the_engine() {
    let cause = StopCause::AdmissionReceiverClosed;
    for idle in [true, false] {
        let (admitted, admissions) = mpsc::unbounded_channel();
        let engine = LiveEngine::builder(config()).admissions(admitted).start().expect("valid");
        let mut stream = if idle { None } else { Some(submit(&engine, request(1, 8, 3)).await) };
        at(&engine, 5).await;
        drop(admissions);
        turns().await;
        let stopped = SubmitError::Stopped(Stopped { cause: cause.clone() });
        assert_eq!(refused(within(engine.submit(request(2, 8, 1))).await), stopped, "idle: {idle}");
        assert_eq!(within(engine.shutdown()).await, Err(ShutdownError::Stopped(cause.clone())));
        assert_eq!((engine.now(), engine.active_request_count()), (EngineTime::from_millis(5), 0));
        if let Some(stream) = &mut stream {
            assert_eq!(read(stream).await, cut(1, &[], FinishReason::EngineStopped, 5.0));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r31_metrics_show_boundaries_and_nothing_in_between() {
    let engine = start(config());
    let mut metrics = engine.metrics_receiver();
    let mut recorder = JoinSet::new();
    recorder.spawn(async move {
        let mut changes = Vec::new();
        while metrics.changed().await.is_ok() {
            let now = *metrics.borrow_and_update();
            let load = (now.num_requests_running, now.num_requests_waiting, now.num_used_blocks);
            let change = (now.at.as_nanos() / 1_000_000, load);
            if changes.last() != Some(&change) {
                changes.push(change);
            }
        }
        changes
    });
    let mut first = submit(&engine, request(1, 8, 3)).await;
    at(&engine, 3).await;
    let second = submit(&engine, request(2, 8, 9)).await;
    let mut third = submit(&engine, request(3, 8, 9)).await;
    at(&engine, 15).await;
    drop(second);
    at(&engine, 17).await;
    assert_eq!(within(third.cancel()).await, Ok(true));
    read(&mut third).await;
    assert_eq!(read(&mut first).await, whole(1, &[10.0, 20.0, 30.0]));
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    let changes = within(recorder.join_next()).await.expect("one recorder").expect("no panic");
    // The two that came during the first pass wait at its end; the two that went during the second are gone.
    assert_eq!(changes, [(10, (1, 2, 2)), (20, (1, 0, 3)), (30, (0, 0, 0))]);
}

#[tokio::test(start_paused = true)]
async fn r31_cancelling_everything_on_an_idle_engine_shows_zero_at_once() {
    for requests in [1, 2, 256, 257, 300, 2_000] {
        for drops in [false, true] {
            let engine = start(config());
            within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
            let mut streams = Vec::new();
            for n in 0..requests {
                streams.push(submit(&engine, request(n, 8, 3)).await);
            }
            turns().await;
            assert_eq!(load(&engine), (0, u64::from(requests), 0), "each submission was its own boundary");
            if drops {
                // All but one: the answer of its cancel comes behind the drops in the lane.
                streams.truncate(1);
                assert_eq!(within(engine.cancel(id(0))).await, Ok(true));
            } else {
                let answers = within(join_all((0..requests).map(|n| engine.cancel(id(n))))).await;
                assert!(answers.iter().all(|answer| *answer == Ok(true)));
            }
            assert_clean(&engine);
            assert_eq!(engine.now(), EngineTime::ZERO, "{requests} requests");
        }
    }
}

/// One after another and from two tasks, so that cancels fall between the turns of actor and dispatcher.
#[tokio::test(start_paused = true)]
async fn r31_each_answer_on_an_idle_engine_is_visible_when_it_is_given() {
    for gap in 0..5 {
        let engine = start(config());
        within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
        let mut streams = Vec::new();
        for n in 0..8 {
            streams.push(submit(&engine, request(n, 8, 3)).await);
        }
        turns().await;
        let mut cancels = JoinSet::new();
        for n in 0..8 {
            let engine = engine.clone();
            cancels.spawn(async move {
                for _ in 0..n * gap {
                    tokio::task::yield_now().await;
                }
                assert_eq!(within(engine.cancel(id(n))).await, Ok(true));
                let at_least = engine.metrics_receiver().borrow().finished.aborted;
                (u64::from(n) + 1, at_least)
            });
        }
        let mut answered = 0;
        while let Some(result) = within(cancels.join_next()).await {
            let (_, shown) = result.expect("no panic");
            answered += 1;
            assert!(shown >= answered, "gap {gap}: {answered} answered, {shown} shown");
        }
        assert_clean(&engine);
    }
}

#[tokio::test(start_paused = true)]
async fn r32_sinks_get_one_batch_per_pass_with_the_rank() {
    let log = Log::default();
    let (kv, pass) = (log.clone(), log.clone());
    let engine = LiveEngine::builder(config())
        .dp_rank(5)
        .kv_event_sink(move |batch: KvEventBatch<'_>| {
            let stored = |event: &KvEvent| match event {
                KvEvent::BlockStored { block_hashes, .. } => block_hashes.len(),
                _ => 0,
            };
            let stored: Vec<usize> = batch.events.iter().map(stored).collect();
            kv.note(format!("kv {} {} {stored:?}", batch.dp_rank, batch.at));
            Ok(())
        })
        .pass_metrics_sink(move |rank: u32, metrics: &PassMetrics| {
            let work = (metrics.num_prefill_requests, metrics.sum_prefill_tokens, metrics.num_decode_requests);
            pass.note(format!("pass {rank} {} {work:?}", metrics.ended_at));
            Ok(())
        })
        .start()
        .expect("valid");
    within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
    let mut streams = [submit(&engine, request(1, 8, 2)).await, submit(&engine, request(2, 7, 2)).await];
    within(engine.set_scheduling(SchedulingState::Running)).await.expect("running");
    for (n, stream) in (1..).zip(&mut streams) {
        assert_eq!(read(stream).await, whole(n, &[10.0, 20.0]));
    }
    turns().await;
    let expected = ["kv 5 10ms [2, 1]", "pass 5 10ms (2, 15, 0)", "kv 5 20ms [1]", "pass 5 20ms (0, 0, 2)"];
    assert_eq!(log.take(), expected, "no batch for a pass without events, none for an empty pass");
    assert_eq!(engine.metrics_receiver().borrow().dp_rank, 5);
}

#[tokio::test(start_paused = true)]
async fn r32_an_error_of_a_sink_is_counted_and_the_engine_goes_on() {
    let log = Log::default();
    let (kv, pass) = (log.clone(), log.clone());
    let engine = LiveEngine::builder(config())
        .kv_event_sink(move |batch: KvEventBatch<'_>| {
            kv.note(format!("kv {}", batch.at));
            Err(std::io::Error::other("the subscriber is away").into())
        })
        .pass_metrics_sink(move |_: u32, metrics: &PassMetrics| {
            pass.note(format!("pass {}", metrics.ended_at));
            if metrics.pass == 0 { Err(std::io::Error::other("not yet").into()) } else { Ok(()) }
        })
        .start()
        .expect("valid");
    let mut stream = submit(&engine, request(1, 7, 3)).await;
    at(&engine, 15).await;
    assert_eq!(engine.metrics_receiver().borrow().sink_errors, 2);
    assert_eq!(read(&mut stream).await, whole(1, &[10.0, 20.0, 30.0]));
    turns().await;
    assert_eq!(engine.metrics_receiver().borrow().sink_errors, 3);
    assert_eq!(log.take(), ["kv 10ms", "pass 10ms", "kv 20ms", "pass 20ms", "pass 30ms"]);
    assert_eq!(within(engine.shutdown()).await, Ok(()));
}

fn gated(open: bool) -> (LiveEngine, watch::Sender<bool>) {
    let (gate, opened) = watch::channel(open);
    (LiveEngine::builder(config()).output_gate(opened).start().expect("valid"), gate)
}

#[tokio::test(start_paused = true)]
async fn r33_closed_while_idle_no_pass_is_planned() {
    let (engine, gate) = gated(false);
    let mut stream = submit(&engine, request(1, 8, 2)).await;
    let waiting = submit(&engine, request(2, 8, 2)).await;
    assert_eq!(engine.now(), EngineTime::ZERO, "submit is answered");
    assert_eq!(within(engine.cancel(id(2))).await, Ok(true), "cancel is answered");
    assert_eq!((engine.now(), engine.active_request_count()), (EngineTime::ZERO, 1));
    drop(waiting);
    at(&engine, 1_000).await;
    let metrics = *engine.metrics_receiver().borrow();
    assert_eq!((metrics.num_passes, metrics.num_requests_waiting), (0, 1), "who waits can be seen");
    gate.send(true).expect("alive");
    assert_eq!(read(&mut stream).await, whole(1, &[1_010.0, 1_020.0]), "from when it opened");
}

#[tokio::test(start_paused = true)]
async fn r33_closed_during_a_pass_its_end_waits() {
    let (engine, gate) = gated(true);
    let mut stream = submit(&engine, request(1, 8, 3)).await;
    at(&engine, 5).await;
    gate.send(false).expect("alive");
    at(&engine, 15).await;
    assert_eq!((load(&engine), engine.metrics_receiver().borrow().num_passes), ((0, 0, 0), 0));
    let mut second = submit(&engine, request(2, 8, 1)).await;
    assert_eq!(engine.now(), EngineTime::from_millis(15), "submit is answered");
    at(&engine, 42).await;
    gate.send(true).expect("alive");
    let first = within(stream.recv()).await.expect("a token");
    assert_eq!((first.produced_at, first.observed_at), (EngineTime::from_millis(10), EngineTime::from_millis(42)));
    // The next pass follows the opening, not the end that was held.
    assert_eq!(read(&mut stream).await, whole(1, &[10.0, 52.0, 62.0])[1..]);
    assert_eq!(read(&mut second).await, whole(2, &[52.0]));
}

#[tokio::test(start_paused = true)]
async fn r33_closed_and_open_again_within_a_pass_changes_nothing() {
    let (engine, gate) = gated(true);
    let mut stream = submit(&engine, request(1, 8, 3)).await;
    at(&engine, 3).await;
    gate.send(false).expect("alive");
    at(&engine, 7).await;
    gate.send(true).expect("alive");
    assert_eq!(read(&mut stream).await, whole(1, &[10.0, 20.0, 30.0]));
}

#[tokio::test(start_paused = true)]
async fn r33_closed_gates_let_cancelled_stopped_and_failed_through() {
    for idle in [true, false] {
        let (engine, gate) = gated(true);
        if idle {
            gate.send(false).expect("alive");
        }
        let mut cancelled = submit(&engine, request(1, 8, 3)).await;
        let mut stopped = submit(&engine, request(2, 8, 3)).await;
        at(&engine, 5).await;
        gate.send(false).expect("alive");
        at(&engine, 25).await;
        assert_eq!(within(cancelled.cancel()).await, Ok(true));
        assert_eq!(read(&mut cancelled).await, cut(1, &[], FinishReason::Cancelled, 25.0));
        assert_eq!(within(engine.shutdown()).await, Ok(()), "shutdown is answered");
        assert_eq!(read(&mut stopped).await, cut(2, &[], FinishReason::EngineStopped, 25.0));
        assert_eq!(engine.now(), EngineTime::from_millis(25));
    }
    let (engine, _gate) = gated(false);
    let (made, prompt) = crate::stop::lazily(1);
    let (registration, mut failed) = engine.prepare_request(made).expect("valid");
    let mut other = submit(&engine, request(2, 8, 1)).await;
    prompt.set_length(0);
    let back = refused(within(engine.submit_prepared(registration)).await);
    assert_eq!(back.registration.id(), id(1));
    assert!(matches!(back.error, SubmitError::Stopped(Stopped { cause: StopCause::Failed { .. } })), "{back}");
    assert_eq!(read(&mut failed).await, cut(1, &[], FinishReason::Failed, 0.0));
    assert_eq!(read(&mut other).await, cut(2, &[], FinishReason::Failed, 0.0));
}

#[tokio::test(start_paused = true)]
async fn r33_an_end_without_output_waits_for_the_gate() {
    let (gate, opened) = watch::channel(false);
    let builder = LiveEngine::builder(config()).output_gate(opened).allow_zero_output(true);
    let engine = builder.start().expect("valid");
    let mut held = submit(&engine, request(1, 8, 0)).await;
    let mut cancelled = submit(&engine, request(2, 8, 0)).await;
    drop(submit(&engine, request(3, 8, 0)).await);
    at(&engine, 20).await;
    assert_eq!(engine.active_request_count(), 2);
    assert_eq!(within(cancelled.cancel()).await, Ok(true));
    assert_eq!(read(&mut cancelled).await, cut(2, &[], FinishReason::Cancelled, 20.0));
    gate.send(true).expect("alive");
    assert_eq!(read(&mut held).await, [(None, Some(FinishReason::Length), 20.0)]);
    assert_eq!(engine.active_request_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn r33_readers_are_no_matter_while_the_gate_is_closed() {
    let (engine, gate) = gated(true);
    let mut stream = submit_with(&engine, request(1, 8, 3), cancel_on_overflow(1)).await;
    at(&engine, 15).await;
    gate.send(false).expect("alive");
    at(&engine, 100).await;
    // It would have overflowed at 20 ms; it is read in time because that end is held.
    assert_eq!(next(&mut stream).await, (Some(101), None, 10.0));
    gate.send(true).expect("alive");
    assert_eq!(read(&mut stream).await, whole(1, &[10.0, 20.0, 110.0])[1..]);
}

#[tokio::test(start_paused = true)]
async fn r33_a_dropped_gate_stops_the_engine_with_that_cause() {
    // Idle, during a pass, and while a finished pass waits.
    for (open, running, dropped_at) in
        [(true, true, 7), (true, false, 7), (false, true, 7), (false, false, 7), (false, true, 17)]
    {
        let (engine, gate) = gated(true);
        let mut stream = if running { Some(submit(&engine, request(1, 8, 3)).await) } else { None };
        at(&engine, 5).await;
        gate.send(open).expect("alive");
        at(&engine, dropped_at).await;
        drop(gate);
        turns().await;
        let cause = StopCause::OutputGateDropped;
        let error = refused(within(engine.submit(request(2, 8, 1))).await);
        assert_eq!(error, SubmitError::Stopped(Stopped { cause: cause.clone() }), "open {open}, running {running}");
        assert_eq!(within(engine.shutdown()).await, Err(ShutdownError::Stopped(cause)));
        assert_eq!(engine.now(), EngineTime::from_millis(dropped_at));
        if let Some(stream) = &mut stream {
            assert_eq!(read(stream).await, cut(1, &[], FinishReason::EngineStopped, dropped_at as f64));
        }
    }
}

/// Without a moment of idleness: passes take no time, and every poll finds something more urgent to do.
#[tokio::test(start_paused = true)]
async fn r33_a_dropped_gate_is_noticed_by_a_busy_engine() {
    let (gate, opened) = watch::channel(true);
    let instant = config().with_speedup(standin::Speedup::Instant);
    let engine = LiveEngine::builder(instant).output_gate(opened).output_buffering(FULL).start().expect("valid");
    let mut flood = JoinSet::new();
    let (_registration, never) = engine.prepare_request(request(999, 8, 1)).expect("valid");
    flood.spawn(async move {
        // Cancels of one request over and over: the lane is never empty.
        while never.finish_reason().is_none() {
            for _ in 0..600 {
                assert_eq!(crate::common::poll_once(&mut Box::pin(never.cancel())), None);
            }
            tokio::task::yield_now().await;
        }
    });
    turns().await;
    drop(gate);
    turns().await;
    let error = refused(within(engine.submit(request(2, 8, 1))).await);
    assert_eq!(error, SubmitError::Stopped(Stopped { cause: StopCause::OutputGateDropped }));
    flood.abort_all();
}
