//! Seeded runs on two engines with everything that can go wrong: no leak, no hang, no token lost or doubled at the
//! boundary between the engines.
//!
//! 200 runs by default, `STANDIN_HANDOFF_RUNS` says how many; a failing one names the line that repeats it.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use standin::handoff::HandoffOutcome;
use standin::{
    EngineMetrics, FinishReason, HandoffError, HandoffId, LiveEngine, LiveHandoff, LiveHandoffControl,
    LiveHandoffStream, LiveRequest, OutputSignal, Request, StartHandoffError, SubmitError,
};
use tokio::runtime::{Builder, Handle};
use tokio::task::JoinSet;

use crate::common::{poll_once, turns};
use crate::draws::{Draws, World};
use crate::kit::within;

/// How often streams and handoffs ended how.
type Tally = BTreeMap<String, u32>;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

#[test]
fn h13_seeded_runs_leave_nothing_behind_and_lose_and_double_no_token() {
    let only = variable("STANDIN_HANDOFF_SEED");
    let runs = variable("STANDIN_HANDOFF_RUNS").unwrap_or(200);
    let seeds = only.map_or(0..runs, |seed| seed..seed + 1);
    let mut tally = Tally::new();
    for seed in seeds {
        for (what, times) in replayed(seed) {
            *tally.entry(what).or_default() += times;
        }
    }
    if only.is_none() && runs >= 200 {
        for expected in [
            "Completed",
            "Recomputed(SourceGone)",
            "Recomputed(TransferFailed)",
            "Failed(SourceGone)",
            "Failed(DestinationGone)",
            "Failed(TransferFailed)",
            "Failed(TransferTimedOut)",
            "Failed(TimedOut)",
            "Length",
            "Stop",
            "TransferFailed",
            "Cancelled",
            "SlowConsumer",
            "EngineStopped",
            "Failed",
        ] {
            assert!(tally.contains_key(expected), "{expected} was never seen: {tally:?}");
        }
    }
}

/// The same calls under paused time give the same signals to the nanosecond.
#[test]
fn h13_a_seeded_run_repeats() {
    for seed in 0..10 {
        assert_eq!(replayed(seed), replayed(seed), "seed {seed}");
    }
}

/// One run, which names itself if it fails.
fn replayed(seed: u64) -> Tally {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let run = AssertUnwindSafe(|| runtime.block_on(within(run(seed))));
    std::panic::catch_unwind(run).unwrap_or_else(|panic| {
        println!("to repeat it: STANDIN_HANDOFF_SEED={seed} cargo test --test handoff h13_seeded_runs");
        std::panic::resume_unwind(panic)
    })
}

async fn run(seed: u64) -> Tally {
    let mut world = World::new(seed);
    let mut tasks = JoinSet::new();
    for n in 0..4 + world.draws.below(8) {
        tasks.spawn(hand_over(world.fork(n), n as u32));
    }
    for n in 0..world.draws.below(6) {
        tasks.spawn(ordinary(world.fork(100 + n), 100 + n as u32));
    }
    for n in 0..world.draws.below(4) {
        tasks.spawn(by_hand(world.fork(200 + n), 200 + n as u32));
    }
    if world.draws.chance(15) {
        tasks.spawn(stop(world.fork(300)));
    }
    let mut tally = Tally::new();
    while let Some(ended) = tasks.join_next().await {
        for what in ended.expect("no task panics") {
            *tally.entry(what).or_default() += 1;
        }
    }
    world.settle().await;
    check_clean(&world).await;
    tally
}

/// Nothing is left on either engine, and every id can be registered again.
async fn check_clean(world: &World) {
    assert_eq!(world.link.in_flight(), 0, "a transfer is left on the link");
    for (name, engine) in [("prefill", &world.prefill), ("decode", &world.decode)] {
        assert_eq!(engine.active_request_count(), 0, "{name}");
        let metrics = *engine.metrics_receiver().borrow();
        for n in (0..12).chain(200..204) {
            match engine.register_handoff(HandoffId(crate::common::id(n))) {
                Ok(registered) => drop(registered),
                Err(error) => assert!(matches!(error, HandoffError::Stopped(_)), "{name}: {error}"),
            }
        }
        turns().await;
        if engine.register_handoff(HandoffId(crate::common::id(999))).is_ok() {
            let EngineMetrics { num_used_blocks, num_held_blocks, num_reserved_blocks, .. } = metrics;
            assert_eq!((num_used_blocks, num_held_blocks, num_reserved_blocks), (0, 0, 0), "{name}: blocks are left");
            let EngineMetrics { num_requests_running, num_requests_waiting, num_requests_held, .. } = metrics;
            assert_eq!((num_requests_running, num_requests_waiting, num_requests_held), (0, 0, 0), "{name}");
        }
        drop(engine.shutdown().await);
    }
    assert_eq!(within(world.alone.shutdown()).await, Ok(()));
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
}

/// One or two handoffs under one id, one after the other.
async fn hand_over(mut world: World, n: u32) -> Vec<String> {
    let request = world.request(n);
    let alone = alone(&world, request.clone()).await;
    let mut seen = Vec::new();
    for _ in 0..1 + world.draws.below(2) {
        world.pause(150).await;
        let way = world.way();
        // Dropped at some poll, or awaited.
        let polls = if world.draws.chance(10) { world.draws.below(5) as usize } else { usize::MAX };
        let started = within(start_polled(&way, &world, request.clone(), polls)).await;
        match started {
            Some(Ok(stream)) => seen.extend(read_somehow(&mut world, stream, &alone).await),
            Some(Err(error)) => seen.push(not_started(error)),
            None => {}
        }
        turns().await;
    }
    seen
}

async fn start_polled(
    way: &LiveHandoff,
    world: &World,
    request: Request,
    polls: usize,
) -> Option<Result<LiveHandoffStream, StartHandoffError>> {
    crate::common::poll_times(way.start(&world.prefill, &world.decode, request), polls).await
}

fn not_started(error: StartHandoffError) -> String {
    let stopped = matches!(
        error,
        StartHandoffError::Prefill(SubmitError::Stopped(_))
            | StartHandoffError::Decode(SubmitError::Stopped(_))
            | StartHandoffError::Register(HandoffError::Stopped(_))
    );
    assert!(stopped, "{error}");
    "not started".to_owned()
}

/// What one engine alone produces.
async fn alone(world: &World, request: Request) -> Vec<u32> {
    let mut stream = within(world.alone.submit(request)).await.expect("valid");
    let mut tokens = Vec::new();
    while let Some(signal) = within(stream.recv()).await {
        tokens.extend(signal.token_id);
    }
    tokens
}

/// Reads a handoff's stream in one of the ways that readers have.
async fn read_somehow(world: &mut World, mut stream: LiveHandoffStream, alone: &[u32]) -> Vec<String> {
    let (behaviour, after) = (world.draws.below(12), world.draws.below(200));
    let (engine, id) = (if behaviour == 0 { world.prefill.clone() } else { world.decode.clone() }, stream.id());
    let mut signals = Vec::new();
    let pause = Duration::from_millis(after);
    match behaviour {
        // Cancelled by somebody else, at one of the engines.
        0 | 1 => {
            let cancel = async {
                tokio::time::sleep(pause).await;
                drop(engine.cancel(id).await);
            };
            futures_util::future::join(read_on(&mut stream, &mut signals, Duration::ZERO), cancel).await;
        }
        // Dropped after a while.
        2 | 3 => {
            drop(tokio::time::timeout(pause, read_on(&mut stream, &mut signals, Duration::ZERO)).await);
            check(&signals, alone);
            return Vec::new();
        }
        // Not polled for a while, at the start or after a token.
        4 => {
            tokio::time::sleep(pause * 10).await;
            read_on(&mut stream, &mut signals, Duration::ZERO).await;
        }
        5 => {
            signals.extend(stream.recv().await);
            tokio::time::sleep(pause * 10).await;
            read_on(&mut stream, &mut signals, Duration::ZERO).await;
        }
        // Slow.
        6 => read_on(&mut stream, &mut signals, pause).await,
        _ => read_on(&mut stream, &mut signals, Duration::ZERO).await,
    }
    check(&signals, alone);
    let outcome = stream.outcome().expect("over when the stream is");
    let finish = stream.finish_reason().expect("ended");
    assert!(
        !matches!(outcome, HandoffOutcome::Completed) || finish != FinishReason::TransferFailed,
        "{outcome:?} {finish:?}"
    );
    vec![named(&outcome), named(&finish)]
}

async fn read_on(stream: &mut LiveHandoffStream, signals: &mut Vec<OutputSignal>, pause: Duration) {
    while let Some(signal) = stream.recv().await {
        signals.push(signal);
        tokio::time::sleep(pause).await;
    }
}

/// The tokens are a beginning of those of one engine alone, and all of them if the stream says so.
fn check(signals: &[OutputSignal], alone: &[u32]) {
    let tokens: Vec<u32> = signals.iter().filter_map(|signal| signal.token_id).collect();
    assert!(alone.starts_with(&tokens), "{tokens:?} of {alone:?}");
    let ends = signals.iter().filter(|signal| signal.finish.is_some()).count();
    let end = signals.last().and_then(|signal| signal.finish);
    assert_eq!(ends, usize::from(end.is_some()), "one end, and it is the last");
    if matches!(end, Some(FinishReason::Length | FinishReason::Stop { .. })) {
        assert_eq!(tokens, alone, "all tokens were delivered");
    }
    assert!(signals.is_sorted_by_key(|signal| signal.produced_at));
}

/// The name of an outcome or a reason, without what a stop carries.
fn named(what: &impl std::fmt::Debug) -> String {
    let name = format!("{what:?}");
    if name.starts_with("Stop ") { "Stop".to_owned() } else { name }
}

/// An ordinary request at one of the engines, read, dropped or cancelled.
async fn ordinary(mut world: World, n: u32) -> Vec<String> {
    world.pause(200).await;
    let engine = if world.draws.chance(50) { &world.prefill } else { &world.decode }.clone();
    let request = world.request(n);
    let alone = alone(&world, request.clone()).await;
    let decode_only = world.draws.chance(30);
    let submitted = if decode_only { engine.submit_decode(request).await } else { engine.submit(request).await };
    let Ok(mut stream) = submitted else { return Vec::new() };
    let mut signals = Vec::new();
    let pause = Duration::from_millis(world.draws.below(100));
    match world.draws.below(4) {
        0 => drop(tokio::time::timeout(pause, read_ordinary(&mut stream, &mut signals)).await),
        1 => {
            tokio::time::sleep(pause).await;
            drop(stream.cancel().await);
            read_ordinary(&mut stream, &mut signals).await;
        }
        _ => read_ordinary(&mut stream, &mut signals).await,
    }
    check(&signals, &alone);
    stream.finish_reason().iter().map(named).collect()
}

async fn read_ordinary(stream: &mut LiveRequest, signals: &mut Vec<OutputSignal>) {
    while let Some(signal) = stream.recv().await {
        signals.push(signal);
    }
}

/// A registration whose commands come in any order, some of them polled once and dropped, some handles dropped early.
async fn by_hand(mut world: World, n: u32) -> Vec<String> {
    world.pause(100).await;
    let engine = if world.draws.chance(50) { &world.prefill } else { &world.decode }.clone();
    let Ok((control, events)) = engine.register_handoff(HandoffId(crate::common::id(n))) else { return Vec::new() };
    let request = world.request(n);
    let Ok((registration, stream)) = engine.prepare_request(request) else { return Vec::new() };
    let (mut events, mut stream, mut registration) = (Some(events), Some(stream), Some(registration));
    for _ in 0..world.draws.below(12) {
        match world.draws.below(8) {
            0 => drop(events.take().filter(|_| world.draws.chance(50))),
            1 => drop(stream.take().filter(|_| world.draws.chance(50))),
            2 | 3 if registration.is_some() => {
                let Some(taken) = registration.take() else { continue };
                submit(&control, &mut world.draws, taken, &mut registration).await;
            }
            verb => command(&control, &mut world.draws, verb).await,
        }
        world.pause(20).await;
    }
    let clone = control.clone();
    if world.draws.chance(50) {
        drop((control, events, stream, registration, clone));
    } else {
        drop((registration, stream, clone, events, control));
    }
    Vec::new()
}

async fn submit(
    control: &LiveHandoffControl,
    draws: &mut Draws,
    taken: standin::LiveRequestRegistration,
    back: &mut Option<standin::LiveRequestRegistration>,
) {
    let (source, forget) = (draws.chance(50), draws.chance(30));
    let mut submitted =
        async { if source { control.submit_prefill(taken).await } else { control.reserve_destination(taken).await } }
            .boxed();
    if forget {
        drop(poll_once(&mut submitted));
    } else if let Err(refused) = within(submitted).await {
        *back = Some(refused.registration);
    }
}

async fn command(control: &LiveHandoffControl, draws: &mut Draws, verb: u64) {
    let valid = draws.below(30) as u32;
    let mut command = match verb {
        3 => control.activate_destination(None).boxed(),
        4 => control.fail_transfer(valid).boxed(),
        5 => control.heartbeat().boxed(),
        6 => control.release_source().boxed(),
        _ if draws.chance(50) => control.cancel_source().boxed(),
        _ => control.cancel_destination().boxed(),
    };
    if draws.chance(30) {
        drop(poll_once(&mut command));
    } else {
        // Any answer will do; none at all would be a hang.
        drop(within(command).await);
    }
}

/// One of the engines stops in the middle of it.
async fn stop(mut world: World) -> Vec<String> {
    world.pause(200).await;
    let engine: &LiveEngine = if world.draws.chance(50) { &world.prefill } else { &world.decode };
    drop(engine.shutdown().await);
    Vec::new()
}
