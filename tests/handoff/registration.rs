//! h01–h04: registrations, their generations, and the order of commands.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use standin::{
    FinishReason, HandoffError, LiveEngine, LiveHandoffControl, Refused, SchedulingState, SourceEnd, Speedup,
};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

use crate::common::{at, config, cut, id, poll_once, read, request, start, submit, turns};
use crate::kit::{
    Kind, OK, assert_released, blocks, destination, for_every_kind, handoff_id, ms, register, reserved, source, within,
};

type Command<'a> = Pin<Box<dyn Future<Output = Result<(), HandoffError>> + 'a>>;

/// Every command that brings no request along.
fn commands(control: &LiveHandoffControl) -> [Command<'_>; 6] {
    [
        Box::pin(control.activate_destination(None)),
        Box::pin(control.fail_transfer(0)),
        Box::pin(control.heartbeat()),
        Box::pin(control.release_source()),
        Box::pin(control.cancel_source()),
        Box::pin(control.cancel_destination()),
    ]
}

/// Submits on both sides: the error of each, and that the registration came back as it was.
async fn submits_refused(engine: &LiveEngine, control: &LiveHandoffControl) -> [HandoffError; 2] {
    let (registration, mut stream) = engine.prepare_request(request(99, 8, 1)).expect("valid");
    let refused = within(control.submit_prefill(registration)).await.expect_err("it may not submit");
    let Refused { registration, error: prefill } = refused;
    assert_eq!(registration.id(), id(99));
    let refused = within(control.reserve_destination(registration)).await.expect_err("it may not reserve");
    within(engine.submit_prepared(refused.registration)).await.expect("it is as it was");
    assert_eq!(read(&mut stream).await.len(), 1);
    [prefill, refused.error]
}

async fn h01_an_id_is_registered_once_until_its_events_are_dropped(kind: Kind) {
    let engine = start(kind.config());
    let (control, events) = register(&engine, 1);
    assert_eq!((control.handoff_id(), events.handoff_id()), (handoff_id(1), handoff_id(1)));
    let refused = engine.register_handoff(handoff_id(1)).expect_err("it is registered");
    assert_eq!(refused, HandoffError::AlreadyRegistered(handoff_id(1)));
    let _other = register(&engine, 2);
    drop(control);
    turns().await;
    let (control, events) = register(&engine, 1);
    drop(events);
    let _again = register(&engine, 1);
    drop(control);
    turns().await;
    assert!(engine.register_handoff(handoff_id(1)).is_err(), "the last one is untouched by the drop of an earlier one");
}

async fn h01_a_registration_ends_with_its_last_event_read_or_not(kind: Kind) {
    let engine = start(kind.config());
    let held = source(&engine, 1, 8).await;
    at(&engine, 15).await;
    assert_eq!(within(held.control.release_source()).await, OK);
    turns().await;
    let (control, _events) = register(&engine, 1);
    assert_eq!(within(held.control.release_source()).await, Err(HandoffError::Superseded));
    assert_eq!(within(control.release_source()).await, OK, "nothing was submitted: over already");
    let read: Vec<_> = {
        let mut held = held;
        [held.event().await, held.event().await, held.event().await].to_vec()
    };
    assert!(read[0].is_some() && read[1].is_some() && read[2].is_none(), "unread events stay readable: {read:?}");
}

async fn h01_facts_that_nobody_listens_to_are_dropped_and_counted(kind: Kind) {
    let engine = start(kind.config());
    let held = source(&engine, 1, 8).await;
    drop(held.events);
    at(&engine, 15).await;
    let dropped = || engine.metrics_receiver().borrow().dropped_handoff_facts;
    assert_eq!((dropped(), blocks(&engine)), (1, (2, 2, 0)));
    assert_eq!(within(held.control.release_source()).await, OK);
    assert_eq!(dropped(), 2);
    let mut heard = source(&engine, 2, 8).await;
    assert!(heard.event().await.is_some());
    drop(heard);
    turns().await;
    // The drop of its events comes before the end of its source.
    assert_eq!(dropped(), 3);
    assert_released(&engine).await;
}

/// The answer to a command is owed until the actor has seen it, and until what it did is shown.
async fn h02_while_an_answer_is_owed_the_id_is_not_registered_again(kind: Kind) {
    for index in 0..6 {
        let engine = start(kind.config());
        let (control, events) = register(&engine, 1);
        let mut command = commands(&control).into_iter().nth(index).expect("one of them");
        assert_eq!(poll_once(&mut command), None);
        drop(command);
        drop(events);
        let refused = engine.register_handoff(handoff_id(1)).expect_err("an answer is owed");
        assert_eq!(refused, HandoffError::AnswerOwed(handoff_id(1)), "command {index}");
        turns().await;
        drop(register(&engine, 1));
    }
}

async fn h02_an_owed_submission_is_taken_and_its_registration_stays(kind: Kind) {
    let engine = start(kind.config());
    let (control, events) = register(&engine, 1);
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
    let mut submitted = Box::pin(control.submit_prefill(registration));
    assert!(poll_once(&mut submitted).is_none());
    drop(submitted);
    drop(events);
    assert_eq!(
        engine.register_handoff(handoff_id(1)).expect_err("an answer is owed"),
        HandoffError::AnswerOwed(handoff_id(1))
    );
    turns().await;
    let (later, _events) = register(&engine, 1);
    assert_eq!(read(&mut stream).await.len(), 1, "what was polled once is done");
    turns().await;
    assert_eq!(blocks(&engine), (2, 2, 0));
    assert_eq!(within(control.release_source()).await, Err(HandoffError::Superseded));
    assert_eq!(within(later.release_source()).await, OK, "it has nothing, and the earlier one's is not its");
    assert_eq!(blocks(&engine), (2, 2, 0));
    drop(control);
    assert_released(&engine).await;
}

async fn h03_a_control_of_an_earlier_registration_is_superseded(kind: Kind) {
    let engine = start(kind.config());
    let (earlier, events) = register(&engine, 1);
    drop(events);
    let (control, mut events) = register(&engine, 1);
    let superseded = || async {
        for (index, command) in commands(&earlier).into_iter().enumerate() {
            assert_eq!(within(command).await, Err(HandoffError::Superseded), "command {index}");
        }
        assert_eq!(submits_refused(&engine, &earlier).await, [HandoffError::Superseded, HandoffError::Superseded]);
    };
    superseded().await;
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
    within(control.submit_prefill(registration)).await.expect("it may");
    superseded().await;
    assert_eq!(read(&mut stream).await.len(), 1);
    let held = within(events.recv()).await;
    assert!(matches!(held, Some(standin::LiveHandoffEvent::SourceHeld { .. })), "{held:?}");
    superseded().await;
    drop(earlier);
    turns().await;
    assert_eq!(blocks(&engine), (2, 2, 0), "nothing has touched it");
    assert_eq!(within(control.release_source()).await, OK);
    assert_released(&engine).await;
}

/// The registration whose place is taken is over for its events too; the requests that run go on.
async fn h03_a_later_submission_takes_the_place_of_an_earlier_registration(kind: Kind) {
    let engine = start(kind.config());
    let mut held = source(&engine, 1, 8).await;
    assert!(held.event().await.is_some());
    drop(held.events);
    turns().await;
    // Another request, whose sequence the earlier control must not reach.
    let (control, mut events) = register(&engine, 1);
    let (registration, _stream) = engine.prepare_request(request(2, 12, 1)).expect("valid");
    assert_eq!(blocks(&engine), (2, 2, 0));
    within(control.submit_prefill(registration)).await.expect("it takes the place");
    assert!(within(events.recv()).await.is_some());
    assert_eq!(blocks(&engine), (3, 3, 0), "what the earlier one held is freed");
    assert_eq!(within(held.control.cancel_source()).await, Err(HandoffError::Superseded));
    drop(held.control);
    turns().await;
    assert_eq!(blocks(&engine), (3, 3, 0));
    assert_eq!(within(control.cancel_source()).await, OK);
    assert_eq!(
        within(events.recv()).await,
        Some(standin::LiveHandoffEvent::SourceEnded { at: ms(20), end: SourceEnd::Cancelled })
    );
    assert_released(&engine).await;
}

async fn h04_a_control_without_events_may_release_and_cancel_but_not_submit(kind: Kind) {
    let engine = start(kind.config());
    let (control, events) = register(&engine, 1);
    drop(events);
    assert_eq!(submits_refused(&engine, &control).await, [HandoffError::EventsDropped, HandoffError::EventsDropped]);
    for (index, expected) in
        [Err(HandoffError::Over), Err(HandoffError::Over), Err(HandoffError::Over), OK, OK, OK].into_iter().enumerate()
    {
        let command = commands(&control).into_iter().nth(index).expect("one of them");
        assert_eq!(within(command).await, expected, "command {index}, with nothing submitted");
    }

    let mut held = source(&engine, 2, 8).await;
    assert!(held.event().await.is_some());
    drop(held.events);
    assert_eq!(
        submits_refused(&engine, &held.control).await,
        [HandoffError::EventsDropped, HandoffError::EventsDropped]
    );
    assert_eq!(within(held.control.heartbeat()).await, OK);
    assert_eq!(within(held.control.release_source()).await, OK);

    let mut waits = destination(&engine, 3, 8, 2).await;
    let now = engine.now().as_nanos() / 1_000_000;
    assert_eq!(waits.event().await, reserved(now, 8));
    drop(waits.events);
    assert_eq!(within(waits.control.activate_destination(None)).await, OK);
    assert_eq!(read(&mut waits.stream).await.len(), 2);

    let given_up = destination(&engine, 4, 8, 2).await;
    drop(given_up.events);
    assert_eq!(within(given_up.control.cancel_destination()).await, OK);
    assert_released(&engine).await;
}

/// Each pair is polled once, in both orders; what counts is which was polled first.
async fn h04_commands_apply_in_the_order_of_their_first_poll(kind: Kind) {
    for activate_first in [true, false] {
        let engine = start(kind.config());
        let mut waits = destination(&engine, 1, 8, 1).await;
        assert_eq!(waits.event().await, reserved(0, 8));
        let mut activate = Box::pin(waits.control.activate_destination(None));
        let mut cancel = Box::pin(waits.control.cancel_destination());
        if activate_first {
            assert_eq!((poll_once(&mut activate), poll_once(&mut cancel)), (None, None));
        } else {
            assert_eq!((poll_once(&mut cancel), poll_once(&mut activate)), (None, None));
        }
        // Awaited the other way round.
        let expected = if activate_first { OK } else { Err(HandoffError::Over) };
        assert_eq!((within(cancel).await, within(activate).await), (OK, expected));
        assert_eq!(read(&mut waits.stream).await, cut(1, &[], FinishReason::Cancelled, 0.0));
        assert_released(&engine).await;
    }
}

/// A command that was polled once and dropped keeps its place, ahead of those polled later.
async fn h04_a_dropped_command_keeps_its_place(kind: Kind) {
    let engine = start(kind.config());
    let (control, mut events) = register(&engine, 1);
    let (registration, _stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
    let mut submitted = Box::pin(control.submit_prefill(registration));
    assert!(poll_once(&mut submitted).is_none());
    drop(submitted);
    assert_eq!(within(control.release_source()).await, Err(HandoffError::NotHeld), "it was submitted before");
    assert_eq!(within(control.cancel_source()).await, OK);
    assert_eq!(
        within(events.recv()).await,
        Some(standin::LiveHandoffEvent::SourceEnded { at: ms(0), end: SourceEnd::Cancelled })
    );
    assert_released(&engine).await;
}

/// Handoff commands need no place in the command lane: a full one delays them no more than their turn.
async fn h04_a_full_command_lane_holds_no_handoff_command_up(kind: Kind) {
    let engine = start(kind.config());
    let mut held = source(&engine, 1, 8).await;
    assert!(held.event().await.is_some());
    within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
    let mut submits: Vec<_> = (0..1_500).map(|n| Box::pin(engine.submit(request(1_000 + n, 4, 1)))).collect();
    for submitted in &mut submits {
        assert!(poll_once(submitted).is_none());
    }
    let mut release = Box::pin(held.control.release_source());
    assert_eq!(poll_once(&mut release), None);
    drop(release);
    assert_eq!(
        engine.register_handoff(handoff_id(1)).expect_err("registered"),
        HandoffError::AlreadyRegistered(handoff_id(1))
    );
    assert!(held.event().await.is_some(), "released by a future that was polled once, behind 1,024 submits");
    drop(submits);
    assert_released(&engine).await;
}

async fn h04_handoff_commands_do_not_overtake_ordinary_submissions(kind: Kind) {
    let engine = start(kind.config());
    let mut ordinary = Box::pin(engine.submit(request(1, 60, 1)));
    assert!(poll_once(&mut ordinary).is_none());
    let source = source(&engine, 2, 60).await;
    // 64 tokens a pass: the ordinary one was first, so the source gets the 4 tokens that are left.
    at(&engine, 15).await;
    drop(within(ordinary).await);
    let mut stream = source.stream;
    assert_eq!(read(&mut stream).await[0].2, 20.0);
    drop(submit(&engine, request(3, 4, 1)).await);
}

/// Real time and four threads: registrations of one id that take turns, whoever is faster.
#[test]
fn h02_registrations_race_for_one_id() {
    let runtime = Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
    let rounds = async {
        let engine = start(config().with_speedup(Speedup::Instant));
        let mut racers = JoinSet::new();
        for racer in 0..4 {
            let engine = engine.clone();
            racers.spawn(async move {
                let mut round = 0;
                while round < 100 {
                    let (control, events) = match engine.register_handoff(handoff_id(1)) {
                        Ok(registered) => registered,
                        Err(HandoffError::AlreadyRegistered(_) | HandoffError::AnswerOwed(_)) => {
                            tokio::task::yield_now().await;
                            continue;
                        }
                        Err(error) => panic!("{error}"),
                    };
                    round += 1;
                    let prepared = engine.prepare_request(request(100 * racer + round, 8, 1));
                    let (registration, stream) = prepared.expect("the id is free");
                    control.submit_prefill(registration).await.expect("nobody else is registered");
                    if round % 3 == 0 {
                        drop(control.cancel_source().await);
                    }
                    drop((stream, events, control));
                }
            });
        }
        racers.join_all().await;
        while blocks(&engine) != (0, 0, 0) || engine.active_request_count() > 0 {
            tokio::task::yield_now().await;
        }
        engine.shutdown().await.expect("it stops");
    };
    let ended = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), rounds).await });
    assert!(ended.is_ok(), "somebody waits for ever, or blocks are left");
}

for_every_kind! {
    h01_an_id_is_registered_once_until_its_events_are_dropped,
    h01_a_registration_ends_with_its_last_event_read_or_not,
    h01_facts_that_nobody_listens_to_are_dropped_and_counted,
    h02_while_an_answer_is_owed_the_id_is_not_registered_again,
    h02_an_owed_submission_is_taken_and_its_registration_stays,
    h03_a_control_of_an_earlier_registration_is_superseded,
    h03_a_later_submission_takes_the_place_of_an_earlier_registration,
    h04_a_control_without_events_may_release_and_cancel_but_not_submit,
    h04_commands_apply_in_the_order_of_their_first_poll,
    h04_a_dropped_command_keeps_its_place,
    h04_a_full_command_lane_holds_no_handoff_command_up,
    h04_handoff_commands_do_not_overtake_ordinary_submissions,
}
