//! r38–r41, r43, r44: time, order, and futures that are dropped.

use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use futures_util::future::join_all;
use standin::timing::{PassWork, TimingConfig};
use standin::{
    EngineConfig, EngineTime, FinishReason, KvEventBatch, LiveEngine, LiveRequest, PassMetrics, Request,
    SchedulingState, Speedup,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::common::{
    FULL, Log, Seen, Timing, assert_clean, at, buffered, cancel_on_overflow, config, config_of, cut, durations, id,
    load, next, poll_once, poll_times, read, request, start, submit, submit_with, throttle, turns, vllm, waker_of,
    whole, within,
};

/// The clock stands still, or is moved by hand, while a lane holds more than the actor serves in many turns.
#[tokio::test(start_paused = true)]
async fn r38_a_flood_of_cancels_delays_neither_a_pass_nor_a_submit() {
    let engine = start(config());
    let mut stream = submit(&engine, request(1, 8, 2)).await;
    let (_registration, prepared) = engine.prepare_request(request(2, 8, 1)).expect("valid");
    at(&engine, 9).await;
    for _ in 0..100_000 {
        assert_eq!(poll_once(&mut Box::pin(prepared.cancel())), None);
    }
    let mut last_cancel = Box::pin(prepared.cancel());
    assert_eq!(poll_once(&mut last_cancel), None);
    let mut submitted = Box::pin(engine.submit(request(3, 8, 1)));
    assert!(poll_once(&mut submitted).is_none());
    tokio::time::advance(Duration::from_millis(1)).await;
    let mut token = None;
    for _ in 0..4 {
        token = token.or_else(|| poll_once(&mut Box::pin(stream.recv())));
        tokio::task::yield_now().await;
        if token.is_some() {
            break;
        }
    }
    let signal = token.expect("the end of the pass comes first").expect("a token");
    let boundary = EngineTime::from_millis(10);
    assert_eq!((signal.token_id, signal.produced_at, signal.observed_at), (Some(101), boundary, boundary));
    let mut third = poll_once(&mut submitted).expect("served beside the flood").expect("valid");
    assert_eq!(poll_once(&mut last_cancel), None, "most of the flood is still to be served");
    assert_eq!(within(last_cancel).await, Ok(false));
    assert_eq!(engine.now(), boundary);
    assert_eq!(read(&mut stream).await, whole(1, &[10.0, 20.0])[1..]);
    // It was sent at 9 ms.
    assert_eq!(read(&mut third).await, whole(3, &[20.0]));
}

#[tokio::test(start_paused = true)]
async fn r38_a_flood_of_submits_delays_neither_a_pass_nor_a_cancel() {
    let engine = start(config());
    let mut stream = submit(&engine, request(1, 8, 2)).await;
    let mut waiting = submit(&engine, request(2, 8, 2)).await;
    at(&engine, 9).await;
    // Four times what the lane holds: the others wait for places.
    let mut submits: Vec<_> = (0..4_096).map(|n| Box::pin(engine.submit(request(1_000 + n, 8, 1)))).collect();
    assert!(submits.iter_mut().all(|submit| poll_once(submit).is_none()));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(within(engine.cancel(id(2))).await, Ok(true));
    let answered = submits.iter_mut().filter_map(poll_once).collect::<Vec<_>>();
    assert!(answered.len() <= 2_048, "{} submits were answered before the cancel", answered.len());
    let signal = within(stream.recv()).await.expect("a token");
    assert_eq!((signal.produced_at, signal.observed_at, engine.now()), {
        let boundary = EngineTime::from_millis(10);
        (boundary, boundary, boundary)
    });
    assert_eq!(read(&mut waiting).await, cut(2, &[], FinishReason::Cancelled, 10.0));
}

/// Passes without duration are due at every moment; both lanes are served between them.
#[tokio::test(start_paused = true)]
async fn r38_an_always_due_pass_starves_no_lane() {
    let vllm = vllm().with_block_size(16).with_num_gpu_blocks(70_000);
    let endless = config_of(vllm).with_max_model_len(1_000_016).with_speedup(Speedup::Instant);
    let engine = start(endless);
    let _endless = submit_with(&engine, Request::new(vec![1; 16], 1_000_000), FULL).await;
    for n in 1..50 {
        let before = engine.metrics_receiver().borrow().num_passes;
        let mut stream = submit_with(&engine, request(n, 16, 5_000), FULL).await;
        assert_eq!(next(&mut stream).await.0, Some(n * 100 + 1));
        assert_eq!(within(engine.cancel(id(n))).await, Ok(true));
        let passes = engine.metrics_receiver().borrow().num_passes - before;
        assert!(passes <= 6, "{passes} passes for submit, first token and cancel");
    }
}

fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut value = *state;
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Reads quickly or slowly, to the end or not: then it drops the stream, cancels, or reads on.
async fn mixed_reader(mut stream: LiveRequest, bits: u64, engine: LiveEngine, log: Log) {
    let (mut reads, pause) = ((bits >> 20) % 24, (bits >> 32) % 9);
    while let Some(signal) = stream.recv().await {
        log.note(format!("{signal:?}"));
        tokio::time::sleep(Duration::from_millis(pause)).await;
        reads = reads.saturating_sub(1);
        match (reads, (bits >> 40) % 3) {
            (0, 0) => return,
            (0, 1) => log.note(format!("{:?}", within(engine.cancel(stream.id())).await)),
            _ => {}
        }
    }
}

/// Everything that an engine of 300 requests with all sorts of readers shows, in the order in which it is seen.
async fn mixed_scenario(seed: u64) -> Vec<String> {
    let log = Log::default();
    let (kv, pass) = (log.clone(), log.clone());
    let (admitted, mut admissions) = mpsc::unbounded_channel();
    let small = config_of(vllm().with_num_gpu_blocks(40)).with_timing(TimingConfig::ConstantMs(3.35));
    let engine = LiveEngine::builder(small.with_seed(seed))
        .admissions(admitted)
        .kv_event_sink(move |batch: KvEventBatch<'_>| {
            kv.note(format!("{} {:?}", batch.at, batch.events));
            Ok(())
        })
        .pass_metrics_sink(move |_: u32, metrics: &PassMetrics| {
            pass.note(format!("{metrics:?}"));
            Ok(())
        })
        .start()
        .expect("valid");
    let mut metrics = engine.metrics_receiver();
    let mut tasks = JoinSet::new();
    let noted = log.clone();
    tasks.spawn(async move {
        while metrics.changed().await.is_ok() {
            let now = *metrics.borrow_and_update();
            noted.note(format!("{now:?}"));
        }
    });
    let noted = log.clone();
    tasks.spawn(async move {
        while let Some(admission) = within(admissions.recv()).await {
            noted.note(format!("{admission:?}"));
        }
    });
    let mut random = seed;
    for n in 0..300 {
        let bits = mix(&mut random);
        let buffering = [FULL, throttle(1 + bits as usize % 3), cancel_on_overflow(1 + bits as usize % 3)];
        let mut made = request(n, 1 + bits as u32 % 20, 1 + (bits >> 8) as u32 % 20);
        made.id = (n % 3 != 0).then(|| Uuid::from_u128(u128::from(bits) << 64 | u128::from(n)));
        let options = buffered(buffering[(bits >> 16) as usize % 3]);
        let stream = within(engine.submit_with(made, options)).await.expect("valid");
        tasks.spawn(mixed_reader(stream, bits, engine.clone(), log.clone()));
        if bits.is_multiple_of(3) {
            tokio::time::sleep(Duration::from_millis((bits >> 48) % 12)).await;
        }
    }
    tokio::time::sleep(Duration::from_millis(40)).await;
    within(engine.shutdown()).await.expect("in order");
    within(async { while tasks.join_next().await.is_some() {} }).await;
    log.take()
}

#[tokio::test(start_paused = true)]
async fn r39_the_same_calls_repeat_to_the_nanosecond() {
    let first = mixed_scenario(7).await;
    let second = mixed_scenario(7).await;
    assert!(first.len() > 2_000, "{} entries", first.len());
    for (index, (first, second)) in first.iter().zip(&second).enumerate() {
        assert_eq!(first, second, "entry {index}");
    }
    assert_eq!(first.len(), second.len());
    assert_ne!(mixed_scenario(8).await, first, "another seed is another story");
    // It held what it was meant to hold.
    for what in ["SlowConsumer", "Length", "Ok(true)", "EngineStopped", "BlockRemoved", "num_preemptions: 1"] {
        assert!(first.iter().any(|entry| entry.contains(what)), "{what} did not occur");
    }
}

#[tokio::test(start_paused = true)]
async fn r39_streams_end_in_the_order_of_their_requests() {
    let engine = start(config());
    let log = Log::default();
    let mut random = 1;
    let mut streams = Vec::new();
    for n in 0..100 {
        let made = request(n, 8, 20).with_id(Uuid::from_u128(u128::from(mix(&mut random))));
        streams.push(submit(&engine, made).await);
    }
    let mut reads: Vec<_> = streams.iter_mut().map(|stream| Box::pin(stream.recv())).collect();
    for (n, read) in reads.iter_mut().enumerate() {
        let waker = log.waker(&format!("{n:02}"));
        assert!(read.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    let expected: Vec<String> = (0..100).map(|n| format!("{n:02}")).collect();
    assert_eq!(log.take(), expected);
}

fn long(passes: u32, ms: f64) -> EngineConfig {
    let vllm = vllm().with_block_size(16).with_num_gpu_blocks(4_096);
    config_of(vllm).with_max_model_len(passes + 16).with_timing(TimingConfig::ConstantMs(ms))
}

#[tokio::test(start_paused = true)]
async fn r40_ten_thousand_passes_of_350_microseconds() {
    let engine = start(long(10_000, 0.35));
    let mut stream = submit_with(&engine, Request::new(vec![1; 8], 10_000), FULL).await;
    let mut pass = 0;
    while let Some(signal) = within(stream.recv()).await {
        pass += 1;
        assert_eq!(signal.produced_at.as_nanos(), pass * 350_000);
        let late = signal.observed_at.as_nanos() - signal.produced_at.as_nanos();
        assert!(late < 1_000_000, "pass {pass} was carried out {late} ns late");
    }
    assert_eq!(pass, 10_000);
    assert_eq!(engine.now().as_nanos(), 3_500_000_000);
}

/// Whatever is served at a boundary while the actor catches up leaves the timeline alone.
#[tokio::test(start_paused = true)]
async fn r40_what_is_served_at_a_late_boundary_does_not_move_the_timeline() {
    for kind in 0..5 {
        let engine = start(long(400, 0.35));
        let mut metrics = engine.metrics_receiver();
        let mut follower = JoinSet::new();
        follower.spawn(async move {
            let mut last = EngineTime::ZERO;
            while metrics.changed().await.is_ok() {
                let shown_at = metrics.borrow_and_update().at;
                assert!(shown_at >= last, "kind {kind}: the metrics went back from {last} to {shown_at}");
                last = shown_at;
            }
        });
        let mut stream = submit_with(&engine, Request::new(vec![1; 8], 200).with_id(id(1)), FULL).await;
        let mut others = Vec::new();
        for n in 2..14 {
            let buffering = if kind == 2 { throttle(1) } else { FULL };
            others.push(submit_with(&engine, request(n, 2, 60), buffering).await);
        }
        let mut pass = 0;
        while let Some(signal) = within(stream.recv()).await {
            pass += 1;
            assert_eq!(signal.produced_at.as_nanos(), pass * 350_000, "kind {kind}");
            // In the reader's turn between two passes.
            match kind {
                0 => drop(others.pop()),
                1 => drop(poll_once(&mut Box::pin(engine.cancel(id(pass as u32 + 1))))),
                2 => {
                    for other in &mut others {
                        let _ = poll_once(&mut Box::pin(other.recv()));
                    }
                }
                3 => drop(poll_once(&mut Box::pin(engine.set_scheduling(SchedulingState::Running)))),
                _ => drop(poll_once(&mut Box::pin(engine.reset_prefix_cache()))),
            }
        }
        assert_eq!(pass, 200);
        assert_eq!(within(engine.shutdown()).await, Ok(()));
        within(follower.join_next()).await.expect("one follower").expect("no panic");
    }
}

#[tokio::test(start_paused = true)]
async fn r40_a_pass_that_computes_nothing_does_not_move_the_timeline() {
    let engine = start(config().with_timing(TimingConfig::ConstantMs(0.35)));
    // The first one ends at 0.7 ms, which the actor carries out at 1 ms; the next arrives in between.
    let later = request(2, 8, 2).with_arrival(EngineTime::from_nanos(800_000));
    let mut streams = [submit(&engine, request(1, 8, 2)).await, submit(&engine, later).await];
    assert_eq!(read(&mut streams[0]).await, whole(1, &[0.35, 0.7]));
    assert_eq!(read(&mut streams[1]).await, whole(2, &[1.15, 1.5]));
}

#[tokio::test(start_paused = true)]
async fn r40_a_late_actor_catches_up_on_the_modelled_timeline() {
    let engine = start(config());
    let mut stream = submit_with(&engine, request(1, 8, 10), FULL).await;
    tokio::time::advance(Duration::from_millis(77)).await;
    turns().await;
    turns().await;
    assert_eq!(engine.metrics_receiver().borrow().num_passes, 7, "at once");
    let times: Vec<f64> = (1..=10).map(|pass| f64::from(pass) * 10.0).collect();
    assert_eq!(read(&mut stream).await, whole(1, &times));
}

#[tokio::test(start_paused = true)]
async fn r41_a_factor_divides_pass_and_start_up_times() {
    let start_up = Duration::from_millis(100);
    for (factor, startup, pass) in [(2.0, 50.0, 5.0), (0.5, 200.0, 20.0), (3.0, 33.333_333, 3.333_333)] {
        let faster = config().with_startup(start_up).with_speedup(Speedup::Factor(factor));
        for own_model in [false, true] {
            let mut builder = LiveEngine::builder(faster.clone());
            if own_model {
                builder = builder.pass_timing(durations(vec![Duration::from_millis(10)]));
            }
            let engine = builder.start().expect("valid");
            let mut stream = submit(&engine, request(1, 8, 3)).await;
            let nanos = |ms: f64| (ms * 1e6).round();
            let times: Vec<f64> = read(&mut stream).await.iter().map(|(.., at)| nanos(*at)).collect();
            let expected: Vec<f64> = (1..=3).map(|n| nanos(startup) + f64::from(n) * nanos(pass)).collect();
            assert_eq!(times, expected, "factor {factor}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r41_instant_passes_take_no_time() {
    let engine = start(config().with_startup(Duration::from_secs(60)).with_speedup(Speedup::Instant));
    let mut stream = submit_with(&engine, request(1, 8, 40), FULL).await;
    assert_eq!(read(&mut stream).await, whole(1, &[0.0; 40]));
    assert_eq!(engine.now(), EngineTime::ZERO);
    // An arrival is not modelled time: it is waited for.
    let later = request(2, 8, 2).with_arrival(EngineTime::from_millis(30));
    assert_eq!(read(&mut submit(&engine, later).await).await, whole(2, &[30.0, 30.0]));
}

#[tokio::test(start_paused = true)]
async fn r43_an_arrival_ahead_is_waited_for() {
    let engine = start(config());
    let ahead = |n: u32, ms: u64| request(n, 8, 2).with_arrival(EngineTime::from_millis(ms));
    let mut idle = submit(&engine, ahead(1, 25)).await;
    assert_eq!(engine.now(), EngineTime::ZERO, "the answer does not wait");
    at(&engine, 24).await;
    assert_eq!((engine.active_request_count(), load(&engine)), (1, (0, 0, 0)), "it does not wait in the queue yet");
    // Out of order, and in the middle of a pass.
    let mut last = submit(&engine, ahead(3, 52)).await;
    let mut middle = submit(&engine, ahead(2, 31)).await;
    assert_eq!(read(&mut idle).await, whole(1, &[35.0, 45.0]));
    assert_eq!(read(&mut middle).await, whole(2, &[45.0, 55.0]));
    assert_eq!(read(&mut last).await, whole(3, &[65.0, 75.0]));
}

#[tokio::test(start_paused = true)]
async fn r43_an_arrival_in_the_past_is_not_seen_before_it_is_sent() {
    let engine = start(config());
    let mut running = submit_with(&engine, request(1, 8, 10), FULL).await;
    at(&engine, 53).await;
    let mut late = submit(&engine, request(2, 8, 1).with_arrival(EngineTime::from_millis(5))).await;
    assert_eq!(read(&mut late).await, whole(2, &[70.0]), "admitted at 60 ms");
    read(&mut running).await;
    at(&engine, 201).await;
    let mut idle = submit(&engine, request(3, 8, 1).with_arrival(EngineTime::ZERO)).await;
    assert_eq!(read(&mut idle).await, whole(3, &[211.0]));
}

/// An arrival at the very end of a pass: the boundary, and the pass planned there, come first.
#[tokio::test(start_paused = true)]
async fn r43_at_a_tie_the_boundary_comes_first() {
    let engine = start(config());
    let ahead = |n: u32, ms: u64| request(n, 8, 2).with_arrival(EngineTime::from_millis(ms));
    let mut running = submit(&engine, request(1, 8, 5)).await;
    let mut tied = submit(&engine, ahead(2, 20)).await;
    let mut just_before = submit(&engine, request(3, 8, 1).with_arrival(EngineTime::from_nanos(19_999_999))).await;
    // Sent at the instant of a boundary by somebody who has just read a token.
    assert_eq!(next(&mut running).await.2, 10.0);
    let mut sent = submit(&engine, request(4, 8, 2)).await;
    assert_eq!(engine.now(), EngineTime::from_millis(10));
    assert_eq!(read(&mut sent).await, whole(4, &[30.0, 40.0]));
    assert_eq!(read(&mut just_before).await, whole(3, &[30.0]), "in the pass that begins at 20 ms");
    assert_eq!(read(&mut tied).await, whole(2, &[40.0, 50.0]), "in the next one");
    assert_eq!(read(&mut running).await, whole(1, &[10.0, 20.0, 30.0, 40.0, 50.0])[1..]);
    // With nothing else to do there is no pass to come first.
    let mut idle = submit(&engine, request(5, 8, 1)).await;
    assert_eq!(read(&mut idle).await, whole(5, &[60.0]));
}

#[tokio::test(start_paused = true)]
async fn r43_no_effect_precedes_its_cause_while_the_actor_catches_up() {
    let (admitted, mut admissions) = mpsc::unbounded_channel();
    let engine = LiveEngine::builder(config()).admissions(admitted).output_buffering(FULL).start().expect("valid");
    let mut running = submit(&engine, request(1, 8, 20)).await;
    // Stamps within the time that the actor will miss.
    let mut stamped = submit(&engine, request(2, 8, 2).with_arrival(EngineTime::from_millis(33))).await;
    tokio::time::advance(Duration::from_millis(75)).await;
    // Sent now, while the passes that began at 10, 20, … 70 ms are carried out one after another.
    let mut sent = submit(&engine, request(3, 8, 2)).await;
    let sent_at = engine.now();
    assert_eq!(sent_at, EngineTime::from_millis(75));
    turns().await;
    let mut later = submit(&engine, request(4, 8, 2)).await;
    assert_eq!(read(&mut stamped).await, whole(2, &[50.0, 60.0]), "admitted at 40 ms");
    assert_eq!(read(&mut sent).await, whole(3, &[90.0, 100.0]), "admitted at 80 ms");
    assert_eq!(read(&mut later).await, whole(4, &[90.0, 100.0]));
    read(&mut running).await;
    let arrivals = [0, 33, 75, 75].map(EngineTime::from_millis);
    for (arrival, admitted_at) in arrivals.into_iter().zip([0, 40, 80, 80]) {
        let admission = within(admissions.recv()).await.expect("each once");
        assert!(admission.admitted_at >= arrival && admission.observed_at >= admission.admitted_at);
        assert_eq!(admission.admitted_at, EngineTime::from_millis(admitted_at));
    }
}

/// The actor was idle and late: each request begins at its own cause, not at the wake-up.
#[tokio::test(start_paused = true)]
async fn r43_a_late_idle_actor_begins_at_the_arrivals() {
    let engine = start(config());
    let ahead = |n: u32, ms: u64| request(n, 8, 1).with_arrival(EngineTime::from_millis(ms));
    let mut streams = [submit(&engine, ahead(1, 5)).await, submit(&engine, ahead(2, 7)).await];
    let mut third = submit(&engine, ahead(3, 40)).await;
    tokio::time::advance(Duration::from_millis(100)).await;
    assert_eq!(read(&mut streams[0]).await, whole(1, &[15.0]));
    assert_eq!(read(&mut streams[1]).await, whole(2, &[25.0]), "it arrived during the first one's pass");
    assert_eq!(read(&mut third).await, whole(3, &[50.0]));
    assert_eq!(engine.now(), EngineTime::from_millis(100));
}

#[tokio::test(start_paused = true)]
async fn r43_cancels_ignore_stamps() {
    let engine = start(config());
    let mut stream = submit(&engine, request(1, 8, 1).with_arrival(EngineTime::from_millis(500))).await;
    assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
    assert_eq!(read(&mut stream).await, cut(1, &[], FinishReason::Cancelled, 0.0));
    assert_clean(&engine);
    at(&engine, 1_000).await;
    assert_eq!(engine.metrics_receiver().borrow().num_passes, 0);
}

#[tokio::test(start_paused = true)]
async fn r43_a_request_for_no_output_ends_no_earlier_than_it_arrives() {
    let engine = LiveEngine::builder(config()).allow_zero_output(true).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 0).with_arrival(EngineTime::from_millis(40))).await;
    let signals = read(&mut stream).await;
    assert_eq!(signals, [(None, Some(FinishReason::Length), 40.0)]);
    assert!(engine.now() >= EngineTime::from_millis(40));
}

#[tokio::test(start_paused = true)]
async fn r43_engines_with_one_epoch_tell_one_time() {
    let first = start(config());
    at(&first, 30).await;
    // An epoch in the past, and one in the future.
    let epoch = tokio::time::sleep(Duration::ZERO).deadline();
    let past = LiveEngine::builder(config()).epoch(epoch - Duration::from_millis(30)).start().expect("valid");
    let future = LiveEngine::builder(config()).epoch(epoch + Duration::from_millis(50)).start().expect("valid");
    assert_eq!((past.now(), future.now()), (EngineTime::from_millis(30), EngineTime::ZERO));
    let mut streams = [submit(&past, request(1, 8, 2)).await, submit(&future, request(1, 8, 2)).await];
    assert_eq!(read(&mut streams[0]).await, whole(1, &[40.0, 50.0]));
    assert_eq!(read(&mut streams[1]).await, whole(1, &[10.0, 20.0]));
    assert_eq!((first.now(), future.now()), (EngineTime::from_millis(100), EngineTime::from_millis(20)));
}

/// Time goes by between two looks of the actor at the clock: here while it gives an answer, whose waker moves
/// the clock. What became due meanwhile is not slept through.
#[tokio::test(start_paused = true)]
async fn r43_an_arrival_between_two_looks_at_the_clock_is_not_slept_through() {
    let engine = start(config());
    let mut ended = submit(&engine, request(9, 8, 1)).await;
    read(&mut ended).await;
    let mut stream = submit(&engine, request(1, 8, 1).with_arrival(EngineTime::from_millis(20))).await;
    let waker = waker_of(|| {
        let moved = std::pin::pin!(tokio::time::advance(Duration::from_millis(30)));
        // Its first poll moves the clock, its second one is for the others' turns.
        assert!(moved.poll(&mut Context::from_waker(Waker::noop())).is_pending());
    });
    let mut cancel = Box::pin(ended.cancel());
    assert!(cancel.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    assert_eq!(read(&mut stream).await, whole(1, &[30.0]), "it began at 20 ms");
    assert_eq!(engine.now(), EngineTime::from_millis(40));
}

#[tokio::test(start_paused = true)]
async fn r44_a_cancel_that_is_dropped_after_its_first_poll_is_not_undone() {
    for polls in 0..6 {
        for by_stream in [false, true] {
            let engine = start(config());
            let mut stream = submit(&engine, request(1, 8, 3)).await;
            at(&engine, 5).await;
            let cancelled = if by_stream {
                poll_times(stream.cancel(), polls).await
            } else {
                poll_times(engine.cancel(id(1)), polls).await
            };
            turns().await;
            let case = format!("{polls} polls, by the stream: {by_stream}");
            let expected = match (polls, cancelled) {
                (0, None) => whole(1, &[10.0, 20.0, 30.0]),
                (_, None | Some(Ok(true))) => cut(1, &[], FinishReason::Cancelled, 5.0),
                (_, answer) => panic!("{case}: {answer:?}"),
            };
            assert_eq!(engine.active_request_count(), usize::from(polls == 0), "{case}");
            assert_eq!(read(&mut stream).await, expected, "{case}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r44_a_shutdown_that_is_dropped_after_its_first_poll_is_not_undone() {
    for polls in 0..6 {
        let engine = start(config());
        let mut stream = submit(&engine, request(1, 8, 2)).await;
        at(&engine, 5).await;
        drop(poll_times(engine.shutdown(), polls).await);
        let signals = read(&mut stream).await;
        if polls == 0 {
            assert_eq!(signals, whole(1, &[10.0, 20.0]));
        } else {
            assert_eq!(signals, cut(1, &[], FinishReason::EngineStopped, 5.0), "{polls} polls");
            assert!(within(engine.submit(request(2, 8, 1))).await.is_err());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn r44_dropping_recv_loses_nothing() {
    let engine = LiveEngine::builder(config()).output_buffering(throttle(1)).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 5)).await;
    let mut signals: Vec<Seen> = Vec::new();
    // Polled and dropped at every millisecond, between and at the instants at which tokens come.
    for ms in 0..70 {
        at(&engine, ms).await;
        for polls in 0..4 {
            signals.extend(poll_times(stream.recv(), polls).await.flatten().map(crate::common::seen));
        }
    }
    assert_eq!(signals, whole(1, &[10.0, 20.0, 30.0, 40.0, 50.0]));
}

#[tokio::test(start_paused = true)]
async fn r44_commands_that_are_dropped_after_their_first_poll_are_carried_out() {
    for polls in 0..6 {
        let engine = start(config());
        drop(poll_times(engine.set_scheduling(SchedulingState::Stopped), polls).await);
        let mut stream = submit(&engine, request(1, 8, 1)).await;
        at(&engine, 100).await;
        assert_eq!(engine.metrics_receiver().borrow().num_passes, u64::from(polls == 0), "{polls} polls");
        within(engine.set_scheduling(SchedulingState::Running)).await.expect("running");
        read(&mut stream).await;
        turns().await;
        assert_eq!(engine.metrics_receiver().borrow().num_cached_blocks, 2);
        drop(poll_times(engine.reset_prefix_cache(), polls).await);
        turns().await;
        let left = engine.metrics_receiver().borrow().num_cached_blocks;
        assert_eq!(left, if polls == 0 { 2 } else { 0 }, "{polls} polls");
    }
}

/// Once it is handed over, a dropped `submit_prepared` leaves the request to its stream.
#[tokio::test(start_paused = true)]
async fn r44_a_submit_prepared_that_is_dropped() {
    for polls in 0..6 {
        let engine = start(config());
        let (registration, mut stream) = engine.prepare_request(request(1, 8, 1)).expect("valid");
        drop(poll_times(engine.submit_prepared(registration), polls).await);
        let expected = if polls == 0 { cut(1, &[], FinishReason::Cancelled, 0.0) } else { whole(1, &[10.0]) };
        assert_eq!(read(&mut stream).await, expected, "{polls} polls");
        turns().await;
        assert_clean(&engine);
    }
}

#[tokio::test(start_paused = true)]
async fn r44_futures_that_were_never_polled_do_nothing() {
    let (gate, opened) = watch::channel(true);
    let timing = Timing(|_: &PassWork| Duration::from_millis(10));
    let engine = LiveEngine::builder(config()).output_gate(opened).pass_timing(timing).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 2)).await;
    drop((engine.submit(request(2, 8, 1)), engine.cancel(id(1)), engine.shutdown(), engine.reset_prefix_cache()));
    drop((stream.cancel(), engine.set_scheduling(SchedulingState::Stopped)));
    assert_eq!(engine.active_request_count(), 1);
    assert_eq!(read(&mut stream).await, whole(1, &[10.0, 20.0]));
    let unused = pin!(engine.submit(request(3, 8, 1)));
    let _ = (unused, gate);
    assert!(within(join_all([engine.cancel(id(3))])).await == [Ok(false)]);
}
