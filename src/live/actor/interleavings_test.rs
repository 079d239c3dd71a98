//! What is really concurrent, under many orders of threads: callers and readers beside the actor and the dispatcher,
//! each on a thread of its own. Locks are Shuttle's; a step on a channel or a map is one step.
//!
//! `RUSTFLAGS="--cfg standin_shuttle --cfg standin_seeded_bugs" cargo test --lib interleavings`

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Mutex as StdMutex, PoisonError};
use std::task::Poll;

use shuttle::future::block_on;
use shuttle::scheduler::RandomScheduler;
use shuttle::thread::{self, JoinHandle};
use shuttle::{Config, FailurePersistence, Runner};
use uuid::Uuid;

use super::*;
use crate::handoff::HandoffId;
use crate::live::stop::Sweep;
use crate::live::{HandoffError, LiveEngine, LiveHandoffEvent, LiveRequest, OutputBuffering, SubmitOptions};
use crate::{EngineConfig, EngineKind, Request, SchedulingState, Speedup, VllmConfig};

/// Orders of threads that are tried of each model.
fn schedules() -> usize {
    std::env::var("STANDIN_SCHEDULES").ok().map_or(1_000, |text| text.parse().expect("a number"))
}

/// One at a time: a seeded bug is active in the whole process.
static ALONE: StdMutex<()> = StdMutex::new(());

/// An engine whose passes take no time, with a thread for each of its tasks.
struct Running {
    engine: LiveEngine,
    tasks: [JoinHandle<()>; 2],
    sweep: Sweep,
}

fn start() -> Running {
    let vllm = VllmConfig::default().with_block_size(4).with_num_gpu_blocks(17).with_max_num_seqs(4);
    let config = EngineConfig::new(EngineKind::Vllm(vllm)).with_max_model_len(32).with_speedup(Speedup::Instant);
    let (engine, actor, dispatcher) = LiveEngine::builder(config).assemble(false).expect("valid");
    let sweep = Sweep::new(Arc::clone(&actor.stop), Arc::clone(&actor.routes), Arc::clone(&actor.handoffs));
    let tasks = [thread::spawn(move || block_on(act(actor))), thread::spawn(move || block_on(dispatcher.run()))];
    Running { engine, tasks, sweep }
}

/// The actor's loop without its timer: whatever is due is done.
async fn act(mut actor: Actor) {
    let stop = Arc::clone(&actor.stop);
    let mut stopped = stop.requested();
    loop {
        let due = actor.next_due().is_some_and(|due| due <= actor.clock.now());
        let wake = if stop.cause().is_none() && due {
            Wake::Timer
        } else {
            tokio::select! {
                biased;
                () = &mut stopped => return,
                Some(verdict) = actor.verdicts.recv() => Wake::Verdict(verdict),
                Some(entry) = actor.cancels.recv() => Wake::Cancel(entry),
                Some(command) = actor.commands.recv() => Wake::Command(command),
            }
        };
        if stop.guard(TASK, || actor.turn(wake)).is_none() {
            return;
        }
        thread::yield_now();
    }
}

impl Running {
    /// Nothing is left: no route, and no KV block in use.
    fn assert_clean(&self) {
        // What was sent before the first command is served before the second.
        block_on(self.engine.set_scheduling(SchedulingState::Running)).expect("it runs");
        assert_eq!(block_on(self.engine.reset_prefix_cache()), Ok(true), "blocks are in use");
        assert_eq!(self.engine.active_request_count(), 0, "a route is left");
    }

    fn stop(self) {
        self.engine.inner.stop.request(StopCause::Shutdown);
        let engine = self.join();
        assert_eq!(engine.active_request_count(), 0, "a route is left after the stop");
    }

    /// Waits for the tasks of an engine that was told to stop, as its supervisor does.
    fn join(self) -> LiveEngine {
        let Self { engine, tasks, sweep } = self;
        tasks.into_iter().for_each(|task| task.join().expect("no task panics"));
        drop(sweep);
        engine
    }
}

fn id() -> Uuid {
    Uuid::from_u128(7)
}

fn request(tokens: u32) -> Request {
    Request::new(vec![1, 2, 3, 4, 5], tokens).with_id(id())
}

fn submit(engine: &LiveEngine, tokens: u32, buffering: OutputBuffering) -> LiveRequest {
    let options = SubmitOptions::default().with_buffering(buffering);
    block_on(engine.submit_with(request(tokens), options)).expect("it is taken")
}

/// Reads to the end: how many tokens, and why it ended. Then the id is free.
fn read(engine: &LiveEngine, mut stream: LiveRequest) -> (usize, FinishReason) {
    let mut tokens = 0;
    loop {
        let signal = block_on(stream.recv()).expect("a stream ends with a terminal signal");
        tokens += usize::from(signal.token_id.is_some());
        if let Some(finish) = signal.finish {
            assert!(engine.inner.routes.get(id()).is_none(), "the end can be read, and the id is not free");
            assert_eq!(block_on(stream.recv()), None, "one end");
            return (tokens, finish);
        }
    }
}

/// A submission whose future is dropped after its first poll, at whatever point the actor is then.
fn submit_against_drop() {
    let running = start();
    let engine = running.engine.clone();
    let caller = thread::spawn(move || {
        block_on(async {
            let mut submit = pin!(engine.submit(request(3)));
            poll_fn(|context| Poll::Ready(submit.as_mut().poll(context).is_ready())).await;
        });
    });
    caller.join().expect("it is dropped");
    running.assert_clean();
    running.stop();
}

/// A cancel beside the natural end.
fn cancel_against_end() {
    let running = start();
    let stream = submit(&running.engine, 2, OutputBuffering::FullResponse);
    let engine = running.engine.clone();
    let canceller = thread::spawn(move || block_on(engine.cancel(id())).expect("never fails"));
    let (tokens, finish) = read(&running.engine, stream);
    let removed = canceller.join().expect("it is answered");
    match finish {
        FinishReason::Length => assert!(tokens == 2 && !removed, "{tokens} tokens, {removed}"),
        FinishReason::Cancelled => assert!(tokens < 2, "{tokens} tokens"),
        other => panic!("{other:?}"),
    }
    running.assert_clean();
    running.stop();
}

/// Two cancels of one request, from two threads.
fn double_cancel() {
    let running = start();
    let stream = submit(&running.engine, 2, OutputBuffering::FullResponse);
    let cancellers = [(); 2].map(|()| {
        let engine = running.engine.clone();
        thread::spawn(move || block_on(engine.cancel(id())).expect("never fails"))
    });
    let removed = cancellers.map(|canceller| canceller.join().expect("it is answered"));
    let (_, finish) = read(&running.engine, stream);
    assert!(removed != [true, true], "two calls removed it");
    assert!(removed == [false, false] || finish == FinishReason::Cancelled, "{removed:?}, {finish:?}");
    running.assert_clean();
    running.stop();
}

/// A last token that finds the queue full, or does not, as its reader goes.
fn overflow_against_end() {
    let running = start();
    let one = OutputBuffering::CancelOnOverflow { capacity: std::num::NonZeroUsize::MIN };
    let stream = submit(&running.engine, 2, one);
    match read(&running.engine, stream) {
        (2, FinishReason::Length) | (1, FinishReason::SlowConsumer) => {}
        other => panic!("{other:?}"),
    }
    running.assert_clean();
    running.stop();
}

/// A registration and a submission while the engine is stopped.
fn shutdown_against_submit() {
    let running = start();
    let engine = running.engine.clone();
    let caller = thread::spawn(move || {
        let Ok((registration, mut stream)) = engine.prepare_request(request(2)) else { return };
        let taken = block_on(engine.submit_prepared(registration)).is_ok();
        let mut last = None;
        while let Some(signal) = block_on(stream.recv()) {
            last = signal.finish;
        }
        assert!(matches!(last, Some(FinishReason::EngineStopped | FinishReason::Length)), "{last:?}, {taken}");
    });
    let engine = running.engine.clone();
    let preparer = thread::spawn(move || {
        if let Ok((registration, mut stream)) = engine.prepare_request(Request::new(vec![1], 1)) {
            let signal = block_on(stream.recv()).expect("it ends");
            assert_eq!(signal.finish, Some(FinishReason::EngineStopped));
            drop(registration);
        }
    });
    running.engine.inner.stop.request(StopCause::Shutdown);
    let engine = running.join();
    caller.join().expect("it ends");
    preparer.join().expect("it ends");
    // Only now: a registration that comes too late takes itself out.
    assert_eq!(engine.active_request_count(), 0, "a route is left after the stop");
}

/// The last control of a held source is dropped while another thread releases it, and the events are too.
fn handoff_drop_against_release() {
    let running = start();
    let (control, mut events) = running.engine.register_handoff(HandoffId(id())).expect("free");
    let (registration, stream) = running.engine.prepare_request(request(1)).expect("valid");
    let other = control.clone();
    let submitted = block_on(control.submit_prefill(registration));
    assert!(submitted.is_ok(), "{submitted:?}");
    let releaser = thread::spawn(move || block_on(other.release_source()));
    let dropper = thread::spawn(move || drop(control));
    assert_eq!(read(&running.engine, stream), (1, FinishReason::Length));
    let told: Vec<_> = std::iter::from_fn(|| block_on(events.recv())).collect();
    let [LiveHandoffEvent::SourceHeld { .. }, LiveHandoffEvent::SourceEnded { .. }] = told[..] else {
        panic!("{told:?}")
    };
    let released = releaser.join().expect("it is answered");
    assert!(matches!(released, Ok(()) | Err(HandoffError::NotHeld)), "{released:?}");
    dropper.join().expect("it never blocks");
    running.assert_clean();
    drop(running.engine.register_handoff(HandoffId(id())).expect("the id is free"));
    running.stop();
}

type Model = (&'static str, fn());

const MODELS: [Model; 6] = [
    ("submit against drop", submit_against_drop),
    ("cancel against end", cancel_against_end),
    ("double cancel", double_cancel),
    ("overflow against end", overflow_against_end),
    ("shutdown against submit", shutdown_against_submit),
    ("handoff drop against release", handoff_drop_against_release),
];

#[test]
fn six_models_hold_under_every_order_that_is_tried() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, model) in MODELS {
        let schedules = schedules();
        Runner::new(RandomScheduler::new_from_seed(1, schedules), Config::new()).run(model);
        println!("{name}: {schedules} schedules");
    }
}

/// Each model sees a bug of its kind, within 5,000 schedules.
#[cfg(standin_seeded_bugs)]
#[test]
fn six_models_each_see_a_seeded_bug() {
    use crate::seeded_bug::{SeededBug, activate};

    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let bugs = [
        SeededBug::ForgetsDroppedSubmits,
        SeededBug::EndIsReadBeforeTheIdIsFree,
        SeededBug::TwoCancelsRemove,
        SeededBug::FullQueueRefusesTheEnd,
        SeededBug::LooksForTheStopTooEarly,
        SeededBug::LostControlKeepsItsBlocks,
    ];
    for ((name, model), bug) in MODELS.into_iter().zip(bugs) {
        activate(Some(bug));
        let tried = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = Arc::clone(&tried);
        let mut config = Config::new();
        config.failure_persistence = FailurePersistence::None;
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Runner::new(RandomScheduler::new_from_seed(1, 5_000), config).run(move || {
                counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                model();
            });
        }));
        activate(None);
        println!("{name}: {bug:?} in schedule {}", tried.load(std::sync::atomic::Ordering::Relaxed));
        assert!(found.is_err(), "{name} does not see {bug:?}");
    }
}
