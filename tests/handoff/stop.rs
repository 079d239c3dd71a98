//! h11 and h15: events that are never waited for, handles that are dropped, and engines that stop.

use std::sync::Arc;
use std::time::Duration;

use standin::timing::PassWork;
use standin::{
    DestinationEnd, FinishReason, HandoffError, LiveEngine, LiveHandoffEvent, PassMetrics, Prompt, PromptSource,
    Request, SourceEnd, StopCause, Stopped,
};
use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;

use crate::common::{
    Timing, assert_clean, at, config_of, id, poll_once, read, request, start, submit, turns, vllm, whole,
};
use crate::kit::{
    Kind, OK, Side, assert_released, blocks, destination, for_every_kind, handoff_id, ms, register, source, source_of,
    within,
};

/// Nobody reads 40 handoffs' events: neither outputs, nor other handoffs, nor metrics are late, and all is there.
async fn h11_a_stuck_reader_of_events_delays_nobody(kind: Kind) {
    let engine = start(kind.config());
    let mut stuck = Vec::new();
    for n in 0..40 {
        let side = source(&engine, n, 4).await;
        at(&engine, 10 * u64::from(n + 1)).await;
        turns().await;
        assert_eq!(within(side.control.release_source()).await, OK);
        stuck.push(side);
    }
    let now = engine.now();
    assert_eq!(now, ms(400), "one pass each");
    let mut other = submit(&engine, request(99, 4, 2)).await;
    assert_eq!(read(&mut other).await, whole(99, &[410.0, 420.0]));
    for (n, side) in (1..).zip(&mut stuck) {
        let [first, second, end] = [side.event().await, side.event().await, side.event().await];
        assert!(matches!(first, Some(LiveHandoffEvent::SourceHeld { at, .. }) if at == ms(10 * n)), "{first:?}");
        assert_eq!(second, Some(LiveHandoffEvent::SourceEnded { at: ms(10 * n), end: SourceEnd::Released }));
        assert_eq!(end, None);
    }
    assert_eq!(engine.now(), ms(420), "reading them took no time");
    assert_released(&engine).await;
}

/// One registration of each kind in every state that it can be in.
async fn every_state(engine: &LiveEngine) -> Vec<Side> {
    let held = source(engine, 1, 8).await;
    let reserved = destination(engine, 2, 8, 9).await;
    let active = destination(engine, 3, 8, 40).await;
    let guarded = destination(engine, 4, 8, 9).await;
    at(engine, 25).await;
    assert_eq!(within(active.control.activate_destination(None)).await, OK);
    assert_eq!(within(guarded.stream.cancel()).await, Ok(true));
    let prefilling = source_of(engine, 5, request(5, 8, 30)).await;
    at(engine, 35).await;
    let queued = source(engine, 6, 8).await;
    let waiting = destination(engine, 7, 8, 9).await;
    vec![held, reserved, active, guarded, prefilling, queued, waiting]
}

async fn h11_events_end_with_the_engine_in_every_state(kind: Kind) {
    for failure in [false, true] {
        let engine = LiveEngine::builder(kind.config())
            .pass_timing(Timing(move |work: &PassWork| {
                // The pass with a prompt of 13 tokens.
                assert!(work.prefill().iter().all(|chunk| chunk.new_tokens != 13), "no such hardware");
                Duration::from_millis(10)
            }))
            .start()
            .expect("valid");
        let mut sides = every_state(&engine).await;
        let (unused, mut unused_events) = register(&engine, 8);
        let mut owed = Box::pin(sides[0].control.release_source());
        let cause = if failure {
            drop(submit(&engine, request(9, 13, 1)).await);
            let _poison = submit(&engine, request(10, 13, 1)).await;
            at(&engine, 60).await;
            StopCause::Failed { task: "scheduler actor", message: "no such hardware".into() }
        } else {
            assert!(poll_once(&mut owed).is_none());
            assert_eq!(within(engine.shutdown()).await, Ok(()));
            StopCause::Shutdown
        };
        let stopped = HandoffError::Stopped(Stopped { cause: cause.clone() });
        assert_eq!(within(owed).await, Err(stopped.clone()), "it is answered");
        for side in &mut sides {
            while side.event().await.is_some() {}
            let expected = if failure { FinishReason::Failed } else { FinishReason::EngineStopped };
            let end = read(&mut side.stream).await.last().expect("an end").1.expect("an end");
            let ended = matches!(end, FinishReason::Length | FinishReason::Cancelled);
            assert!(end == expected || ended, "{end:?}");
            assert_eq!(within(side.control.cancel_source()).await, Err(stopped.clone()));
        }
        assert_eq!(within(unused_events.recv()).await, None);
        assert_eq!(within(unused.heartbeat()).await, Err(stopped.clone()));
        assert_eq!(engine.register_handoff(handoff_id(1)).expect_err("stopped"), stopped);
        assert_eq!(engine.active_request_count(), 0);
        drop((sides, unused));
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
    }
}

/// Submissions that are in the lane when the engine stops give their registration back.
async fn h11_a_submission_that_races_with_the_stop_comes_back(kind: Kind) {
    for polls in 0..4 {
        let engine = start(kind.config());
        let (control, mut events) = register(&engine, 1);
        let (registration, mut stream) = engine.prepare_request(request(1, 8, 9)).expect("valid");
        let mut submitted = Box::pin(control.submit_prefill(registration));
        let mut answer = None;
        for _ in 0..polls {
            answer = answer.or(poll_once(&mut submitted));
            if answer.is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
        let mut shutdown = Box::pin(engine.shutdown());
        assert!(poll_once(&mut shutdown).is_none());
        let answer = match answer {
            Some(answer) => answer,
            None => within(submitted).await,
        };
        if let Err(refused) = answer {
            assert_eq!(refused.error, HandoffError::Stopped(Stopped { cause: StopCause::Shutdown }));
            assert_eq!(refused.registration.id(), id(1));
        }
        assert_eq!(within(shutdown).await, Ok(()));
        assert_eq!(
            read(&mut stream).await.last().expect("an end").1,
            Some(FinishReason::EngineStopped),
            "{polls} polls"
        );
        assert_eq!(within(events.recv()).await, None);
    }
}

/// A prompt of the caller's that panics when it is read.
#[derive(Debug)]
struct Panics;

impl PromptSource for Panics {
    fn num_tokens(&self) -> usize {
        8
    }

    fn fill(&self, _: usize, _: &mut [u32]) {
        panic!("no such prompt")
    }
}

async fn h11_a_submission_whose_prompt_panics_is_answered(kind: Kind) {
    // SGLang's destinations are never asked for their prompt: it is in no cache.
    for destination in if kind == Kind::Vllm { vec![false, true] } else { vec![false] } {
        let engine = start(kind.config());
        let (control, mut events) = register(&engine, 1);
        let prompt = Prompt::Lazy(Arc::new(Panics));
        let (registration, mut stream) = engine.prepare_request(Request::new(prompt, 2)).expect("not read yet");
        let answer = if destination {
            within(control.reserve_destination(registration)).await
        } else {
            within(control.submit_prefill(registration)).await
        };
        let cause = StopCause::Failed { task: "scheduler actor", message: "no such prompt".into() };
        if let Err(refused) = answer {
            assert_eq!(refused.error, HandoffError::Stopped(Stopped { cause: cause.clone() }));
        }
        assert_eq!(within(events.recv()).await, None);
        assert_eq!(read(&mut stream).await.last().expect("an end").1, Some(FinishReason::Failed));
        let shut = within(engine.shutdown()).await;
        assert_eq!(shut, Err(standin::ShutdownError::Stopped(cause)));
    }
}

/// By the order of the drops, with the command that fills it on its way or applied.
async fn h15_dropping_every_handle_releases_in_every_state(kind: Kind) {
    for first in 0..3 {
        let engine = start(kind.config());
        let sides = every_state(&engine).await;
        for Side { control, events, stream } in sides {
            match first {
                0 => drop((control, events, stream)),
                1 => drop((stream, control, events)),
                _ => drop((events, stream, control)),
            }
        }
        turns().await;
        assert_eq!(engine.active_request_count(), 0);
        let boundary = engine.now() + Duration::from_millis(10);
        at(&engine, boundary.as_nanos() / 1_000_000).await;
        assert_released(&engine).await;
        for n in 1..=7 {
            drop(register(&engine, n));
        }
    }
}

/// A source whose control and events are gone runs on as what it is, and holds nothing at its end.
async fn h15_without_a_control_a_source_is_released_as_soon_as_it_is_held(kind: Kind) {
    for first in ["control", "events"] {
        let engine = start(kind.config());
        let Side { control, mut events, mut stream } = source_of(&engine, 1, request(1, 8, 1)).await;
        let clone = control.clone();
        at(&engine, 5).await;
        drop(control);
        turns().await;
        if first == "control" {
            drop(clone);
            at(&engine, 35).await;
            assert!(matches!(within(events.recv()).await, Some(LiveHandoffEvent::SourceHeld { .. })));
            let released = LiveHandoffEvent::SourceEnded { at: ms(10), end: SourceEnd::Released };
            assert_eq!((within(events.recv()).await, within(events.recv()).await), (Some(released), None));
        } else {
            drop(events);
            at(&engine, 35).await;
            assert_eq!(blocks(&engine), (2, 2, 0), "a control is left");
            drop(clone);
        }
        assert_eq!(read(&mut stream).await, whole(1, &[10.0]));
        assert_released(&engine).await;
    }
}

/// A destination without a control can never be activated: it is cancelled, unless it is active.
async fn h15_without_a_control_a_destination_is_cancelled_unless_it_is_active(kind: Kind) {
    for active in [false, true] {
        let engine = start(kind.config());
        let Side { control, mut events, mut stream } = destination(&engine, 1, 8, 2).await;
        assert!(within(events.recv()).await.is_some());
        if active {
            assert_eq!(within(control.activate_destination(None)).await, OK);
        }
        drop(control);
        let (end, signals) = if active {
            (DestinationEnd::Finished, whole(1, &[10.0, 20.0]))
        } else {
            (DestinationEnd::Cancelled, vec![(None, Some(FinishReason::Cancelled), 0.0)])
        };
        assert_eq!(read(&mut stream).await, signals);
        let at = ms(if active { 20 } else { 0 });
        assert_eq!(within(events.recv()).await, Some(LiveHandoffEvent::DestinationEnded { at, end }));
        assert_eq!(within(events.recv()).await, None);
        assert_released(&engine).await;
    }
}

/// The last control is dropped while its submission is in the lane, the future polled once and dropped too.
async fn h15_the_drop_of_a_control_does_not_overtake_its_own_commands(kind: Kind) {
    for destination in [false, true] {
        let engine = start(kind.config());
        let (control, mut events) = register(&engine, 1);
        let (registration, mut stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
        {
            let control = control;
            if destination {
                assert!(poll_once(&mut Box::pin(control.reserve_destination(registration))).is_none());
            } else {
                assert!(poll_once(&mut Box::pin(control.submit_prefill(registration))).is_none());
            }
        }
        let last = *read(&mut stream).await.last().expect("an end");
        let mut told = Vec::new();
        while let Some(event) = within(events.recv()).await {
            told.push(event);
        }
        if destination {
            assert_eq!(last, (None, Some(FinishReason::Cancelled), 0.0));
            let end = LiveHandoffEvent::DestinationEnded { at: ms(0), end: DestinationEnd::Cancelled };
            assert_eq!(told.last(), Some(&end));
        } else {
            assert_eq!(last, (Some(101), Some(FinishReason::Length), 10.0));
            assert_eq!(told.last(), Some(&LiveHandoffEvent::SourceEnded { at: ms(10), end: SourceEnd::Released }));
        }
        assert_released(&engine).await;
    }
}

async fn h15_events_of_an_unused_registration_end_with_its_last_control(kind: Kind) {
    let engine = start(kind.config());
    let (control, mut events) = register(&engine, 1);
    let clone = control.clone();
    drop(control);
    turns().await;
    assert!(poll_once(&mut Box::pin(events.recv())).is_none());
    drop(clone);
    assert_eq!(within(events.recv()).await, None);
    drop(register(&engine, 1));
}

/// Over in the scheduler, and told at the next boundary: the last control may go in between.
async fn h15_an_end_that_waits_for_its_boundary_is_still_told(kind: Kind) {
    let engine = start(kind.config());
    let Side { control, mut events, stream } = source_of(&engine, 1, request(1, 8, 9)).await;
    at(&engine, 5).await;
    assert_eq!(within(control.cancel_source()).await, OK);
    drop(control);
    turns().await;
    let ended = LiveHandoffEvent::SourceEnded { at: ms(5), end: SourceEnd::Cancelled };
    assert_eq!((within(events.recv()).await, within(events.recv()).await), (Some(ended), None));
    assert_eq!(engine.now(), ms(10));
    drop(stream);
    assert_released(&engine).await;
}

/// Controls, events and streams are alive and keep neither the engine nor its sinks.
async fn h15_handles_that_are_kept_keep_nothing_alive(kind: Kind) {
    let held = Arc::new(());
    let in_sink = Arc::clone(&held);
    let sink = move |_: u32, _: &PassMetrics| {
        drop(Arc::clone(&in_sink));
        Ok(())
    };
    let engine = LiveEngine::builder(kind.config()).pass_metrics_sink(sink).start().expect("valid");
    let mut sides = every_state(&engine).await;
    drop(engine);
    turns().await;
    assert_eq!((Arc::strong_count(&held), Handle::current().metrics().num_alive_tasks()), (1, 0));
    for side in &mut sides {
        while side.event().await.is_some() {}
        let error = within(side.control.release_source()).await.expect_err("it has stopped");
        assert_eq!(error, HandoffError::Stopped(Stopped { cause: StopCause::HandlesDropped }));
    }
}

/// Also outside every runtime and in another thread, with the gate closed.
#[test]
fn h15_drops_are_plain_calls() {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let (_gate, opened) = watch::channel(true);
    let (engine, sides) = runtime.block_on(async {
        let engine = LiveEngine::builder(config_of(vllm())).output_gate(opened).start().expect("valid");
        let sides = every_state(&engine).await;
        (engine, sides)
    });
    std::thread::scope(|scope| scope.spawn(|| drop(sides)).join().expect("no panic"));
    runtime.block_on(async {
        turns().await;
        at(&engine, 100).await;
        assert_clean(&engine);
        assert_released(&engine).await;
    });
}

/// Nothing is kept per handoff that is over, and no task is made for one.
async fn h15_ten_thousand_handoffs_leave_nothing(kind: Kind) {
    let engine = start(kind.config());
    for n in 0..5_000 {
        let side = source(&engine, n, 4).await;
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 3);
        drop(side);
        turns().await;
        drop(destination(&engine, n, 4, 1).await);
    }
    assert_released(&engine).await;
    for n in 0..5_000 {
        drop(register(&engine, n));
    }
}

for_every_kind! {
    h11_a_stuck_reader_of_events_delays_nobody,
    h11_events_end_with_the_engine_in_every_state,
    h11_a_submission_that_races_with_the_stop_comes_back,
    h11_a_submission_whose_prompt_panics_is_answered,
    h15_dropping_every_handle_releases_in_every_state,
    h15_without_a_control_a_source_is_released_as_soon_as_it_is_held,
    h15_without_a_control_a_destination_is_cancelled_unless_it_is_active,
    h15_the_drop_of_a_control_does_not_overtake_its_own_commands,
    h15_events_of_an_unused_registration_end_with_its_last_control,
    h15_an_end_that_waits_for_its_boundary_is_still_told,
    h15_handles_that_are_kept_keep_nothing_alive,
    h15_ten_thousand_handoffs_leave_nothing,
}
