//! r04–r12: submitting.

use std::sync::{Arc, Mutex};
use std::task::Context;
use std::time::Duration;

use futures_util::future::join_all;
use standin::{
    EngineTime, FinishReason, LiveEngine, MAX_OUTPUT_TOKENS, Prompt, PromptSource, Request, RequestError,
    SchedulingState, StopCause, Stopped, SubmitError, TokenGenerator,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::common::{
    FULL, Log, assert_clean, at, config, config_of, cut, eight, id, load, next, poll_once, poll_times, read, refused,
    request, start, submit, submit_together, submit_with, turns, vllm, waker_of, whole, within,
};

/// As many commands as the lane holds.
const COMMAND_LANE: u32 = 1_024;

#[tokio::test(start_paused = true)]
async fn r04_a_plan_decides_the_output_whatever_the_length_says() {
    let engine = start(config());
    let mut short = request(1, 8, 3);
    short.max_output_tokens = Some(1);
    let mut long = request(2, 8, 3);
    long.max_output_tokens = Some(40);
    let mut open = request(3, 8, 3);
    open.max_output_tokens = None;
    let mut streams = submit_together(&engine, [(short, eight()), (long, eight()), (open, eight())]).await;
    for (n, stream) in (1..).zip(&mut streams) {
        assert_eq!(read(stream).await, whole(n, &[10.0, 20.0, 30.0]));
    }
}

#[tokio::test(start_paused = true)]
async fn r04_a_stop_or_end_token_in_a_plan_stops() {
    let engine = start(config());
    let mut stop = request(1, 8, 5);
    stop.stop_token_ids = vec![7, 103];
    let mut eos = request(2, 8, 5);
    eos.eos_token_id = Some(202);
    let mut ignored = request(3, 8, 2);
    ignored.eos_token_id = Some(301);
    ignored.ignore_eos = true;
    let mut streams = submit_together(&engine, [(stop, eight()), (eos, eight()), (ignored, eight())]).await;
    let stop = Some(FinishReason::Stop { stop_token: Some(103) });
    let expected = [(Some(101), None, 10.0), (Some(102), None, 20.0), (Some(103), stop, 30.0)];
    assert_eq!(read(&mut streams[0]).await, expected);
    let eos = Some(FinishReason::Stop { stop_token: None });
    assert_eq!(read(&mut streams[1]).await, [(Some(201), None, 10.0), (Some(202), eos, 20.0)]);
    assert_eq!(read(&mut streams[2]).await, whole(3, &[10.0, 20.0]));
    turns().await;
    assert_clean(&engine);
}

async fn generated(engine: &LiveEngine, request: Request) -> Vec<u32> {
    let mut stream = submit_with(engine, request, FULL).await;
    read(&mut stream).await.into_iter().filter_map(|(token, ..)| token).collect()
}

#[tokio::test(start_paused = true)]
async fn r04_generated_tokens_follow_from_seed_id_and_position() {
    let config = config().with_vocab_size(10).with_seed(42);
    let (first, second) = (start(config.clone()), start(config.clone()));
    let mut request = Request::new(vec![1; 8], 50).with_id(id(77));
    request.stop_token_ids = vec![3, 4, 900];
    request.eos_token_id = Some(0);
    let tokens = generated(&first, request.clone()).await;
    // Beside others, and later, the same request gives the same.
    let _other = submit(&second, Request::new(vec![2; 8], 5)).await;
    at(&second, 33).await;
    assert_eq!(generated(&second, request.clone()).await, tokens);
    let generator = TokenGenerator::new(42, id(77).as_u128(), 10);
    let expected: Vec<u32> = (0..50).map(|position| generator.token(position, &[0, 3, 4, 900])).collect();
    assert_eq!(tokens, expected);
    assert!(tokens.iter().all(|token| *token < 10 && ![0, 3, 4].contains(token)), "{tokens:?}");
    let reseeded = LiveEngine::builder(config).seed(43).start().expect("valid");
    assert_ne!(generated(&reseeded, request).await, tokens);
}

#[tokio::test(start_paused = true)]
async fn r04_ids_that_the_engine_makes_follow_from_its_seed_and_a_counter() {
    let ids = |seed: u64| async move {
        let engine = start(config().with_seed(seed));
        let mut ids = Vec::new();
        for _ in 0..100 {
            ids.push(submit(&engine, Request::new(vec![1; 4], 1)).await.id());
        }
        ids
    };
    let made = ids(5).await;
    assert_eq!(ids(5).await, made);
    let other = ids(6).await;
    let mut all: Vec<Uuid> = made.iter().chain(&other).copied().collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 200, "no id twice");
    assert!(all.iter().all(|id| id.get_version_num() == 4), "in the form of random ids");
}

#[tokio::test(start_paused = true)]
async fn r05_no_output_is_refused_before_there_is_a_route() {
    let engine = start(config());
    for request in [request(1, 8, 0), Request::new(vec![1; 8], 0).with_id(id(1))] {
        assert_eq!(refused(within(engine.submit(request.clone())).await), RequestError::ZeroOutput.into());
        assert_eq!(refused(engine.prepare_request(request)), RequestError::ZeroOutput.into());
        assert_eq!(engine.active_request_count(), 0);
    }
    let mut stream = submit(&engine, request(1, 8, 1)).await;
    assert_eq!(read(&mut stream).await, whole(1, &[10.0]));
}

#[tokio::test(start_paused = true)]
async fn r05_allowed_no_output_is_one_terminal_signal_without_a_token() {
    let engine = LiveEngine::builder(config()).allow_zero_output(true).start().expect("valid");
    at(&engine, 3).await;
    let mut planned = submit(&engine, request(1, 8, 0)).await;
    let mut counted = submit(&engine, Request::new(vec![1; 8], 0)).await;
    for stream in [&mut planned, &mut counted] {
        assert_eq!(read(stream).await, [(None, Some(FinishReason::Length), 3.0)]);
    }
    assert_clean(&engine);
    assert_eq!(engine.metrics_receiver().borrow().num_passes, 0);
    // The id is free again.
    assert_eq!(read(&mut submit(&engine, request(1, 8, 1)).await).await, whole(1, &[13.0]));
}

#[tokio::test(start_paused = true)]
async fn r05_lengths_over_the_limit_are_refused_by_name() {
    let engine = start(config());
    let over = MAX_OUTPUT_TOKENS + 1;
    let error = refused(within(engine.submit(Request::new(vec![1; 8], over))).await);
    let expected = RequestError::OutputTooLong { requested: u64::from(over), limit: MAX_OUTPUT_TOKENS };
    assert_eq!(error, expected.into());
    assert!(error.to_string().contains("MAX_OUTPUT_TOKENS"), "{error}");
    let planned = Request::new(vec![1; 8], 1).with_output_tokens(vec![1; over as usize]);
    assert_eq!(refused(within(engine.submit(planned)).await), error);
    assert_eq!(engine.active_request_count(), 0);
    // The limit itself is accepted: capped by `max_model_len`.
    let stream = submit(&engine, Request::new(vec![1; 62], MAX_OUTPUT_TOKENS)).await;
    assert_eq!(generated_after(stream).await, 2);
}

async fn generated_after(mut stream: standin::LiveRequest) -> usize {
    read(&mut stream).await.len()
}

#[tokio::test(start_paused = true)]
async fn r06_a_second_request_under_an_active_id_is_refused_and_the_first_untouched() {
    let engine = start(config());
    let (registration, mut first) = engine.prepare_request(request(1, 8, 2)).expect("valid");
    let duplicate = || SubmitError::DuplicateId(id(1));
    assert_eq!(refused(within(engine.submit(request(1, 4, 9))).await), duplicate(), "prepared");
    within(engine.submit_prepared(registration)).await.expect("valid");
    assert_eq!(refused(within(engine.submit(request(1, 4, 9))).await), duplicate(), "submitted");
    at(&engine, 15).await;
    assert_eq!(refused(within(engine.submit(request(1, 4, 9))).await), duplicate(), "running");
    assert_eq!(refused(engine.prepare_request(request(1, 4, 9))), duplicate(), "running");
    assert_eq!((engine.active_request_count(), load(&engine)), (1, (1, 0, 2)));
    assert_eq!(next(&mut first).await, (Some(101), None, 10.0));
    assert_eq!(next(&mut first).await, (Some(102), Some(FinishReason::Length), 20.0));
    // Whoever has read the end finds the id free, with no turn in between.
    let (registration, second) = engine.prepare_request(request(1, 8, 1)).expect("the id is free");
    drop(registration);
    drop(second);
    let mut third = submit(&engine, request(1, 8, 1)).await;
    assert_eq!(read(&mut third).await, whole(1, &[30.0]));
}

/// Within the very call that makes the end readable.
#[tokio::test(start_paused = true)]
async fn r06_the_id_is_free_before_its_reader_can_know_of_the_end() {
    for (n, outputs, finish) in [(1, 1, FinishReason::Length), (2, 9, FinishReason::Cancelled)] {
        let engine = start(config());
        let mut stream = submit(&engine, request(n, 8, outputs)).await;
        let log = Log::default();
        let (in_waker, noted) = (engine.clone(), log.clone());
        let waker = waker_of(move || {
            let again = in_waker.prepare_request(request(n, 8, 1));
            noted.note(format!("{:?}, {}", again.map(drop), in_waker.active_request_count()));
        });
        {
            let mut end = Box::pin(stream.recv());
            assert!(end.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            at(&engine, 5).await;
            if finish == FinishReason::Cancelled {
                assert_eq!(within(engine.cancel(id(n))).await, Ok(true));
            }
            at(&engine, 15).await;
        }
        assert_eq!(log.take(), ["Ok(()), 0"]);
        assert_eq!(next(&mut stream).await.1, Some(finish));
        drop(waker);
    }
}

#[tokio::test(start_paused = true)]
async fn r06_the_id_is_free_when_the_end_could_be_read() {
    let engine = start(config());
    let first = submit(&engine, request(1, 8, 1)).await;
    at(&engine, 11).await;
    assert_eq!(engine.active_request_count(), 0, "ended, though nobody has read it");
    let mut second = submit(&engine, request(1, 8, 1)).await;
    drop(first);
    assert_eq!(read(&mut second).await, whole(1, &[21.0]), "the drop of the first one's stream is its own");
}

#[tokio::test(start_paused = true)]
async fn r07_nothing_of_an_earlier_request_reaches_a_later_one_under_the_same_id() {
    let engine = start(config());
    let mut first = submit(&engine, request(1, 8, 9)).await;
    at(&engine, 15).await;
    // The pass to 20 ms computes a token of the first.
    assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
    let mut second = submit(&engine, request(1, 12, 2)).await;
    assert_eq!(read(&mut first).await, cut(1, &[10.0], FinishReason::Cancelled, 15.0));
    assert_eq!(read(&mut second).await, whole(1, &[30.0, 40.0]), "admitted at 20 ms");
    turns().await;
    assert_clean(&engine);
}

#[tokio::test(start_paused = true)]
async fn r07_a_late_drop_or_cancel_of_an_earlier_request_does_not_touch_a_later_one() {
    let engine = start(config());
    let (registration, first) = engine.prepare_request(request(1, 8, 3)).expect("valid");
    drop(registration);
    let mut second = submit(&engine, request(1, 8, 2)).await;
    assert_eq!(within(first.cancel()).await, Ok(false));
    drop(first);
    assert_eq!(read(&mut second).await, whole(1, &[10.0, 20.0]));

    // A dropped stream whose cancel is still in its lane when the id is taken again.
    let third = submit(&engine, request(2, 8, 3)).await;
    let cancelled = engine.cancel(id(2));
    assert_eq!(within(cancelled).await, Ok(true));
    let mut fourth = submit(&engine, request(2, 8, 2)).await;
    drop(third);
    assert_eq!(read(&mut fourth).await, whole(2, &[40.0, 50.0]), "admitted when the pass begun at 20 ms has ended");
}

#[tokio::test(start_paused = true)]
async fn r08_submit_is_answered_during_a_pass() {
    let engine = start(config().with_timing(standin::timing::TimingConfig::ConstantMs(10_000.0)));
    let mut first = submit(&engine, request(1, 8, 2)).await;
    turns().await;
    at(&engine, 5_000).await;
    let mut second = submit(&engine, request(2, 8, 1)).await;
    let (registration, mut third) = engine.prepare_request(request(3, 8, 1)).expect("valid");
    within(engine.submit_prepared(registration)).await.expect("valid");
    assert_eq!(engine.now(), EngineTime::from_millis(5_000));
    assert_eq!(engine.metrics_receiver().borrow().num_passes, 0, "the pass is still on its way");
    assert_eq!(read(&mut first).await, whole(1, &[10_000.0, 20_000.0]));
    assert_eq!(read(&mut second).await, whole(2, &[20_000.0]));
    assert_eq!(read(&mut third).await, whole(3, &[20_000.0]));
}

/// What the engine is at when a `submit` is dropped.
#[derive(Debug, Clone, Copy)]
enum Situation {
    Idle,
    StartingUp,
    MidPass,
    GateClosed,
    Paused,
    LaneFull,
}

#[tokio::test(start_paused = true)]
async fn r09_a_submit_that_is_dropped_at_any_await_leaks_nothing() {
    use Situation::{GateClosed, Idle, LaneFull, MidPass, Paused, StartingUp};
    for situation in [Idle, StartingUp, MidPass, GateClosed, Paused, LaneFull] {
        for polls in 0..8 {
            dropped_after(situation, polls).await;
        }
    }
}

async fn dropped_after(situation: Situation, polls: usize) {
    let (gate, opened) = watch::channel(true);
    let startup = Duration::from_millis(if matches!(situation, Situation::StartingUp) { 100 } else { 0 });
    let engine = LiveEngine::builder(config().with_startup(startup)).output_gate(opened).start().expect("valid");
    let mut other = None;
    match situation {
        Situation::MidPass => {
            other = Some(submit(&engine, request(9, 8, 2)).await);
            at(&engine, 5).await;
        }
        Situation::GateClosed => gate.send(false).expect("alive"),
        Situation::Paused => within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running"),
        Situation::Idle | Situation::StartingUp | Situation::LaneFull => {}
    }
    let before = engine.now();
    // Submissions that nobody polls again fill the lane before the actor has a turn.
    let requests = if matches!(situation, Situation::LaneFull) { COMMAND_LANE } else { 0 };
    let mut blockers: Vec<_> = (0..requests).map(|n| Box::pin(engine.submit(request(10_000 + n, 8, 1)))).collect();
    for blocker in &mut blockers {
        assert!(poll_once(blocker).is_none());
    }
    let submitted = poll_times(engine.submit(request(1, 8, 3)), polls).await;
    let case = format!("{situation:?}, {polls} polls");
    drop(submitted);
    drop(blockers);
    turns().await;
    assert_eq!(engine.now(), before, "{case}: no time goes by");
    assert_eq!(engine.active_request_count(), usize::from(other.is_some()), "{case}");
    let (registration, stream) = engine.prepare_request(request(1, 8, 1)).expect("the id is free");
    drop((registration, stream));
    gate.send(true).expect("alive");
    within(engine.set_scheduling(SchedulingState::Running)).await.expect("running");
    if let Some(other) = &mut other {
        assert_eq!(read(other).await, whole(9, &[10.0, 20.0]), "{case}: others are unchanged");
    }
    at(&engine, 1_000).await;
    assert_clean(&engine);
    assert_eq!(within(engine.shutdown()).await, Ok(()), "{case}");
}

#[tokio::test(start_paused = true)]
async fn r09_a_submit_that_waits_for_the_full_lane_is_served_in_turn_or_frees_its_id_at_once() {
    let engine = start(config_of(vllm().with_max_num_seqs(64)));
    let mut filling: Vec<_> = (0..COMMAND_LANE).map(|n| Box::pin(engine.submit(request(n, 4, 1)))).collect();
    assert!(filling.iter_mut().all(|submission| poll_once(submission).is_none()));
    let mut waits = Box::pin(engine.submit(request(5_000, 4, 1)));
    let mut dropped = Box::pin(engine.submit(request(5_001, 4, 1)));
    assert!(poll_once(&mut waits).is_none() && poll_once(&mut dropped).is_none());
    assert_eq!(engine.active_request_count(), COMMAND_LANE as usize + 2);
    drop(dropped);
    assert_eq!(engine.active_request_count(), COMMAND_LANE as usize + 1, "dropped while it waited for a place");
    let streams = within(join_all(filling)).await;
    assert!(streams.iter().all(Result::is_ok));
    assert!(within(waits).await.is_ok());
    assert_eq!(engine.now(), EngineTime::ZERO);
}

#[tokio::test(start_paused = true)]
async fn r10_a_submission_that_races_with_shutdown_ends() {
    for (submit_polls, shutdown_first) in (0..6).flat_map(|polls| [(polls, false), (polls, true)]) {
        for running in [false, true] {
            let engine = start(config());
            let other = submit(&engine, request(9, 8, 3)).await;
            if running {
                at(&engine, 5).await;
            }
            let mut racing = Box::pin(engine.submit(request(1, 8, 3)));
            let mut shutdown = Box::pin(engine.shutdown());
            let mut early = None;
            for round in 0..=submit_polls {
                if round == 0 && shutdown_first {
                    assert!(poll_once(&mut shutdown).is_none());
                }
                early = early.or(poll_once(&mut racing));
                tokio::task::yield_now().await;
                if early.is_some() {
                    break;
                }
            }
            assert_eq!(within(shutdown).await, Ok(()));
            let answer = match early {
                Some(answer) => answer,
                None => within(racing).await,
            };
            match answer {
                Ok(mut stream) => {
                    let signals = read(&mut stream).await;
                    assert_eq!(signals.last().expect("an end").1, Some(FinishReason::EngineStopped));
                }
                Err(error) => assert_eq!(error, SubmitError::Stopped(Stopped { cause: StopCause::Shutdown })),
            }
            assert_eq!(engine.active_request_count(), 0);
            drop(other);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r10_submissions_in_a_full_lane_end_with_the_engine() {
    let engine = start(config());
    // More than can be in the lane or be handed a place that another one leaves.
    let mut submissions: Vec<_> =
        (0..2 * COMMAND_LANE + 300).map(|n| Box::pin(engine.submit(request(n, 4, 1)))).collect();
    assert!(submissions.iter_mut().all(|submission| poll_once(submission).is_none()));
    // The actor takes some, which gives places to those that wait; they are not polled before the stop.
    tokio::task::yield_now().await;
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    let mut taken = 0;
    // The last one first, while the others still hold the places that they were handed.
    for submission in submissions.iter_mut().rev() {
        match within(submission).await {
            Ok(mut stream) => {
                assert_eq!(read(&mut stream).await.last().expect("an end").1, Some(FinishReason::EngineStopped));
                taken += 1;
            }
            Err(error) => assert_eq!(error, SubmitError::Stopped(Stopped { cause: StopCause::Shutdown })),
        }
    }
    assert!(taken > 0 && taken < COMMAND_LANE, "{taken} were taken before the stop");
    assert_eq!(engine.active_request_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn r10_after_the_stop_everything_is_refused_with_the_cause() {
    let engine = start(config());
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    let stopped = Stopped { cause: StopCause::Shutdown };
    assert_eq!(refused(within(engine.submit(request(2, 8, 1))).await), stopped.clone().into());
    assert_eq!(refused(engine.prepare_request(request(2, 8, 1))), stopped.clone().into());
    let refused = refused(within(engine.submit_prepared(registration)).await);
    assert_eq!((refused.registration.id(), refused.error), (id(1), stopped.into()));
    assert_eq!(read(&mut stream).await, [(None, Some(FinishReason::EngineStopped), 0.0)]);
}

/// A prompt whose length takes as long to know as the engine to stop.
#[derive(Debug)]
struct StopsMeanwhile {
    stopped: Mutex<Option<std::sync::mpsc::Receiver<()>>>,
}

impl PromptSource for StopsMeanwhile {
    fn num_tokens(&self) -> usize {
        if let Some(stopped) = self.stopped.lock().expect("not poisoned").take() {
            stopped.recv().expect("it stops");
        }
        8
    }

    fn fill(&self, _start: usize, out: &mut [u32]) {
        out.fill(1);
    }
}

/// Real time, for the engine must run while the caller is inside `prepare_request`: the last route has been
/// swept when this one is registered.
#[test]
fn r10_a_registration_that_comes_after_the_sweep_takes_itself_out() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let engine = {
        let _entered = runtime.enter();
        start(config())
    };
    let (stopped, receiver) = std::sync::mpsc::channel();
    let stopping = engine.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn_on(
        async move {
            within(stopping.shutdown()).await.expect("in order");
            stopped.send(()).expect("the prompt waits");
        },
        runtime.handle(),
    );
    let mut late = request(1, 8, 1);
    late.prompt = Prompt::Lazy(Arc::new(StopsMeanwhile { stopped: Mutex::new(Some(receiver)) }));
    let error = refused(engine.prepare_request(late));
    assert_eq!(error, SubmitError::Stopped(Stopped { cause: StopCause::Shutdown }));
    assert_eq!(engine.active_request_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn r11_prepare_registers_the_route_and_nothing_else() {
    let engine = start(config());
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 2)).expect("valid");
    assert_eq!((registration.id(), stream.id(), registration.request()), (id(1), id(1), &request(1, 8, 2)));
    at(&engine, 100).await;
    assert_eq!((engine.active_request_count(), load(&engine)), (1, (0, 0, 0)));
    assert_eq!(engine.metrics_receiver().borrow().num_passes, 0);
    within(engine.submit_prepared(registration)).await.expect("valid");
    assert_eq!(read(&mut stream).await, whole(1, &[110.0, 120.0]), "it arrives when it is submitted");
}

#[tokio::test(start_paused = true)]
async fn r11_dropping_an_unused_registration_ends_its_stream() {
    let engine = start(config());
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 2)).expect("valid");
    at(&engine, 7).await;
    drop(registration);
    assert_eq!(engine.active_request_count(), 0, "at once");
    assert_eq!(read(&mut stream).await, [(None, Some(FinishReason::Cancelled), 7.0)]);
    let mut again = submit(&engine, request(1, 8, 1)).await;
    assert_eq!(read(&mut again).await, whole(1, &[17.0]));
}

#[tokio::test(start_paused = true)]
async fn r11_a_registration_whose_stream_is_gone_is_refused_and_comes_back() {
    let engine = start(config());
    let (registration, stream) = engine.prepare_request(request(1, 8, 2)).expect("valid");
    drop(stream);
    // At once, when the drop is still in its lane; and later.
    let back = refused(within(engine.submit_prepared(registration)).await);
    assert_eq!((back.registration.id(), back.error), (id(1), SubmitError::Cancelled));
    turns().await;
    assert_clean(&engine);
    let again = refused(within(engine.submit_prepared(back.registration)).await);
    assert_eq!((again.registration.id(), again.error), (id(1), SubmitError::Cancelled));
    drop(again.registration);
    assert_eq!(engine.metrics_receiver().borrow().num_passes, 0);
}

#[tokio::test(start_paused = true)]
async fn r11_a_registration_of_another_engine_is_refused_and_comes_back() {
    let (engine, other) = (start(config()), start(config()));
    let (registration, mut stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
    let refused = refused(within(other.submit_prepared(registration)).await);
    assert_eq!(refused.error, SubmitError::ForeignRegistration);
    assert_eq!((engine.active_request_count(), other.active_request_count()), (1, 0));
    within(engine.submit_prepared(refused.registration)).await.expect("its own engine takes it");
    assert_eq!(read(&mut stream).await, whole(1, &[10.0]));
}

/// First come, first served is the order of the submits, not that in which they were prepared.
#[tokio::test(start_paused = true)]
async fn r11_registrations_are_served_in_the_order_in_which_they_are_submitted() {
    let engine = start(config_of(vllm().with_max_num_seqs(1)));
    let (first, mut first_stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
    let (second, mut second_stream) = engine.prepare_request(request(2, 8, 1)).expect("valid");
    let mut third_stream = submit(&engine, request(3, 8, 1)).await;
    within(engine.submit_prepared(second)).await.expect("valid");
    within(engine.submit_prepared(first)).await.expect("valid");
    assert_eq!(read(&mut third_stream).await, whole(3, &[10.0]));
    assert_eq!(read(&mut second_stream).await, whole(2, &[20.0]));
    assert_eq!(read(&mut first_stream).await, whole(1, &[30.0]));
}

#[tokio::test(start_paused = true)]
async fn r12_what_can_never_run_is_refused_with_the_numbers() {
    // 9 usable blocks hold 36 tokens.
    let engine = start(config_of(vllm().with_num_gpu_blocks(10)).with_max_model_len(40));
    let refusals = [
        (request(1, 40, 1), RequestError::PromptTooLong { prompt_tokens: 40, max_model_len: 40 }),
        (request(1, 400, 1), RequestError::PromptTooLong { prompt_tokens: 400, max_model_len: 40 }),
        (request(1, 37, 1), RequestError::PromptLargerThanPool { needed_blocks: 10, usable_blocks: 9 }),
        (request(1, 0, 1), RequestError::EmptyPrompt),
    ];
    for (request, error) in refusals {
        assert_eq!(refused(within(engine.submit(request.clone())).await), error.clone().into());
        assert_eq!(refused(engine.prepare_request(request)), error.into());
        assert_eq!(engine.active_request_count(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn r12_a_longer_output_is_capped_and_ends_by_length() {
    let engine = start(config());
    let mut open = Request::new(vec![1; 62], 1);
    open.max_output_tokens = None;
    let [mut planned, mut open] = submit_together(&engine, [(request(1, 60, 99), FULL), (open, FULL)]).await;
    assert_eq!(read(&mut planned).await, whole(1, &[10.0, 20.0, 30.0, 40.0]), "64 tokens with the prompt");
    let ends: Vec<_> = read(&mut open).await.into_iter().map(|(_, finish, at)| (finish, at)).collect();
    // 60 of the 64 tokens of the first pass were taken.
    assert_eq!(ends, [(None, 20.0), (Some(FinishReason::Length), 30.0)]);
}

#[tokio::test(start_paused = true)]
async fn r12_one_that_outgrows_the_pool_ends_and_blocks_nobody() {
    // 9 usable blocks hold 36 tokens; 40 would be allowed.
    let engine = start(config_of(vllm().with_num_gpu_blocks(10)).with_max_model_len(40));
    let mut grows = submit_with(&engine, request(1, 34, 6), FULL).await;
    let mut behind = submit(&engine, request(2, 8, 1)).await;
    // Tokens 35 and 36 still fit; the third one's KV does not.
    assert_eq!(read(&mut grows).await, cut(1, &[10.0, 20.0, 30.0], FinishReason::OutOfMemory, 40.0));
    assert_eq!(read(&mut behind).await, whole(2, &[40.0]), "admitted by the pass that ended the other");
    turns().await;
    assert_clean(&engine);
    let finished = engine.metrics_receiver().borrow().finished;
    assert_eq!((finished.out_of_memory, finished.length, finished.aborted), (1, 1, 0));
}
