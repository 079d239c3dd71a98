//! r34–r37: shutdown and failure.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use standin::timing::PassWork;
use standin::{
    EngineTime, FinishReason, KvEventBatch, KvEventSink, LiveEngine, PassMetrics, Prompt, PromptSource, Request,
    SchedulingState, ShutdownError, Speedup, StopCause, Stopped, SubmitError,
};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::common::{
    FULL, Log, Timing, at, cancel_on_overflow, config, config_of, id, poll_once, poll_times, read, refused, request,
    start, submit, submit_with, throttle, turns, vllm, whole, within,
};

const STOPPED: Option<FinishReason> = Some(FinishReason::EngineStopped);

/// A sink that holds something as long as it lives.
fn kv_sink_with(held: Arc<()>) -> impl KvEventSink {
    move |_: KvEventBatch<'_>| {
        let _ = &held;
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
enum Gate {
    None,
    Open,
    ClosedIdle,
    ClosedFinished,
}

#[tokio::test(start_paused = true)]
async fn r34_shutdown_may_be_called_many_times_at_once_and_leaves_nothing() {
    for gate_state in [Gate::None, Gate::Open, Gate::ClosedIdle, Gate::ClosedFinished] {
        for (stop_at, paused) in [(0, false), (5, false), (10, false), (35, false), (35, true)] {
            everything_then_shutdown(gate_state, stop_at, paused).await;
        }
    }
}

async fn everything_then_shutdown(gate_state: Gate, stop_at: u64, paused: bool) {
    let case = format!("{gate_state:?} at {stop_at} ms, paused: {paused}");
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 0, "{case}");
    let held = Arc::new(());
    let (pass, plan) = (Arc::clone(&held), Arc::clone(&held));
    let (admitted, mut admissions) = mpsc::unbounded_channel();
    let mut builder = LiveEngine::builder(config())
        .admissions(admitted)
        .kv_event_sink(kv_sink_with(Arc::clone(&held)))
        .pass_metrics_sink(move |_: u32, _: &PassMetrics| {
            let _ = &pass;
            Ok(())
        })
        .pass_timing(Timing(move |_: &PassWork| {
            let _ = &plan;
            Duration::from_millis(10)
        }));
    let (gate, opened) = watch::channel(!matches!(gate_state, Gate::ClosedIdle));
    if !matches!(gate_state, Gate::None) {
        builder = builder.output_gate(opened);
    }
    let engine = builder.start().expect("valid");
    let mut streams = vec![
        submit_with(&engine, request(1, 8, 20), FULL).await,
        submit_with(&engine, request(2, 8, 20), throttle(1)).await,
        submit_with(&engine, request(3, 8, 20), cancel_on_overflow(20)).await,
    ];
    for n in 10..40 {
        streams.push(submit(&engine, request(n, 8, 3)).await);
    }
    let (_registration, prepared) = engine.prepare_request(request(4, 8, 1)).expect("valid");
    streams.push(prepared);
    if matches!(gate_state, Gate::ClosedFinished) {
        at(&engine, 1).await;
        gate.send(false).expect("alive");
    }
    at(&engine, stop_at).await;
    if paused {
        within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
    }
    let before = engine.now();
    let clones: Vec<LiveEngine> = (0..8).map(|_| engine.clone()).collect();
    let answers = within(join_all(clones.iter().map(LiveEngine::shutdown))).await;
    assert_eq!(answers, vec![Ok(()); 8], "{case}");
    assert_eq!(engine.now(), before, "{case}");
    assert_eq!(Arc::strong_count(&held), 1, "{case}: no sink and no timing model is left");
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 0, "{case}");
    assert_eq!(engine.active_request_count(), 0, "{case}");
    for stream in &mut streams {
        // Every end can be read at once.
        while let Some(signal) = poll_once(&mut Box::pin(stream.recv())).expect("no waiting") {
            assert!(signal.finish.is_none() || signal.finish == STOPPED || signal.finish == Some(FinishReason::Length));
        }
        assert!(stream.finish_reason().is_some(), "{case}");
    }
    while admissions.try_recv().is_ok() {}
    assert_eq!(admissions.try_recv(), Err(mpsc::error::TryRecvError::Disconnected), "{case}");
    assert_eq!(within(engine.shutdown()).await, Ok(()), "{case}: again, later");
}

#[tokio::test(start_paused = true)]
async fn r34_after_a_failure_every_shutdown_gives_its_cause() {
    let engine = LiveEngine::builder(config())
        .pass_timing(Timing(|_: &PassWork| panic!("no such hardware")))
        .start()
        .expect("valid");
    let _stream = submit(&engine, request(1, 8, 1)).await;
    let answers = within(join_all((0..8).map(|_| engine.shutdown()))).await;
    let cause = StopCause::Failed { task: "scheduler actor", message: "no such hardware".into() };
    assert_eq!(answers, vec![Err(ShutdownError::Stopped(cause)); 8]);
}

#[tokio::test(start_paused = true)]
async fn r35_dropping_the_last_handle_stops_the_engine() {
    let held = Arc::new(());
    let sink = kv_sink_with(Arc::clone(&held));
    let engine = LiveEngine::builder(config()).kv_event_sink(sink).start().expect("valid");
    let mut running = submit(&engine, request(1, 8, 20)).await;
    let mut waiting = submit(&engine, request(2, 8, 20)).await;
    let (registration, mut prepared) = engine.prepare_request(request(3, 8, 1)).expect("valid");
    let mut metrics = engine.metrics_receiver();
    at(&engine, 15).await;
    let clone = engine.clone();
    drop(engine);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(clone.now(), EngineTime::from_millis(25), "a clone keeps it alive");
    assert_eq!(metrics.borrow().num_passes, 2);
    drop(clone);
    turns().await;
    // Streams, a registration and a metrics receiver are alive, and do not keep it.
    assert_eq!((Arc::strong_count(&held), Handle::current().metrics().num_alive_tasks()), (1, 0));
    let ends = [read(&mut running).await, read(&mut waiting).await, read(&mut prepared).await];
    assert!(ends.iter().all(|signals| signals.last() == Some(&(None, STOPPED, 25.0))), "{ends:?}");
    assert_eq!(within(running.cancel()).await, Ok(false));
    drop(registration);
    while within(metrics.changed()).await.is_ok() {}
    assert_eq!(metrics.borrow().num_passes, 2, "the last state stays readable");
}

#[tokio::test(start_paused = true)]
async fn r35_the_last_handle_may_be_dropped_within_the_engine() {
    let slot = Arc::new(Mutex::new(None::<LiveEngine>));
    let in_sink = Arc::clone(&slot);
    let sink = move |_: u32, _: &PassMetrics| {
        drop(in_sink.lock().expect("not poisoned").take());
        Ok(())
    };
    let engine = LiveEngine::builder(config()).pass_metrics_sink(sink).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 20)).await;
    *slot.lock().expect("not poisoned") = Some(engine);
    assert_eq!(read(&mut stream).await.last().expect("an end").1, STOPPED);
    turns().await;
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
}

/// A prompt that panics when its tokens are asked for, that is in the scheduler actor.
#[derive(Debug)]
struct PanickingPrompt;

impl PromptSource for PanickingPrompt {
    fn num_tokens(&self) -> usize {
        8
    }

    fn fill(&self, _start: usize, _out: &mut [u32]) {
        panic!("the prompt is gone");
    }
}

fn panics_on_use(n: u32) -> Request {
    let mut request = request(n, 8, 3);
    request.prompt = Prompt::Lazy(Arc::new(PanickingPrompt));
    request
}

/// A prompt that changes its length, against the rules; with length 0 it panics.
#[derive(Debug)]
pub(crate) struct Fickle(AtomicUsize);

impl Fickle {
    pub(crate) fn set_length(&self, tokens: usize) {
        self.0.store(tokens, Ordering::Relaxed);
    }
}

impl PromptSource for Fickle {
    fn num_tokens(&self) -> usize {
        let tokens = self.0.load(Ordering::Relaxed);
        assert_ne!(tokens, 0, "the prompt is gone");
        tokens
    }

    fn fill(&self, _start: usize, out: &mut [u32]) {
        out.fill(1);
    }
}

/// Request `n` with a prompt of 8 tokens that can be changed.
pub(crate) fn lazily(n: u32) -> (Request, Arc<Fickle>) {
    let prompt = Arc::new(Fickle(AtomicUsize::new(8)));
    let mut request = request(n, 8, 3);
    request.prompt = Prompt::Lazy(prompt.clone());
    (request, prompt)
}

async fn fails(engine: LiveEngine, first: Request, task: &'static str, message: &str) {
    let cause = StopCause::Failed { task, message: message.into() };
    let (_registration, mut prepared) = engine.prepare_request(request(50, 8, 1)).expect("valid");
    let mut submitted = Vec::new();
    for request in [first, request(2, 8, 3)] {
        // The second one may find the engine failed already.
        if let Ok(stream) = within(engine.submit(request)).await {
            submitted.push(stream);
        }
    }
    for stream in submitted.iter_mut().chain([&mut prepared]) {
        assert_eq!(read(stream).await.last().expect("an end").1, Some(FinishReason::Failed), "{message}");
    }
    assert_eq!(within(engine.shutdown()).await, Err(ShutdownError::Stopped(cause.clone())));
    let stopped = Stopped { cause };
    assert_eq!(refused(within(engine.submit(request(3, 8, 1))).await), SubmitError::Stopped(stopped.clone()));
    assert_eq!(refused(engine.prepare_request(request(3, 8, 1))), SubmitError::Stopped(stopped.clone()));
    assert_eq!(within(engine.reset_prefix_cache()).await, Err(stopped.clone()));
    assert_eq!(within(engine.set_scheduling(SchedulingState::Running)).await, Err(stopped));
    assert_eq!(within(engine.cancel(id(1))).await, Ok(false));
    assert_eq!(within(engine.cancel(id(50))).await, Ok(false));
    assert_eq!((engine.active_request_count(), Handle::current().metrics().num_alive_tasks()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn r36_a_panicking_timing_model_fails_the_engine() {
    for good_passes in 0..3 {
        let mut passes = 0;
        let timing = Timing(move |_: &PassWork| {
            assert!(passes < good_passes, "pass {passes} is one too many");
            passes += 1;
            Duration::from_millis(10)
        });
        let engine = LiveEngine::builder(config()).pass_timing(timing).start().expect("valid");
        fails(engine, request(1, 8, 3), "scheduler actor", &format!("pass {good_passes} is one too many")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn r36_a_panicking_sink_fails_the_engine() {
    let kv = |_: KvEventBatch<'_>| -> Result<(), _> { panic!("kv sink") };
    let engine = LiveEngine::builder(config()).kv_event_sink(kv).start().expect("valid");
    fails(engine, request(1, 8, 3), "event dispatcher", "kv sink").await;
    let pass = |_: u32, metrics: &PassMetrics| {
        assert!(metrics.pass == 0, "{}", format!("pass sink at {}", metrics.pass));
        Ok(())
    };
    let engine = LiveEngine::builder(config()).pass_metrics_sink(pass).start().expect("valid");
    fails(engine, request(1, 8, 3), "event dispatcher", "pass sink at 1").await;
}

#[tokio::test(start_paused = true)]
async fn r36_a_panicking_prompt_fails_the_engine() {
    fails(start(config()), panics_on_use(1), "scheduler actor", "the prompt is gone").await;
}

/// What was computed and not yet dispatched is dropped, also when the dispatcher is the one that failed.
#[tokio::test(start_paused = true)]
async fn r36_tokens_that_were_not_dispatched_are_dropped() {
    let pass = |_: u32, metrics: &PassMetrics| {
        assert!(metrics.pass < 2, "enough");
        Ok(())
    };
    let engine = LiveEngine::builder(config()).pass_metrics_sink(pass).start().expect("valid");
    let mut stream = submit(&engine, request(1, 8, 9)).await;
    let signals = read(&mut stream).await;
    assert_eq!(signals, crate::common::cut(1, &[10.0, 20.0], FinishReason::Failed, 30.0));
}

/// Real time, without a time driver: a thread bounds it.
#[test]
fn r36_a_runtime_without_time_fails_the_engine_at_its_first_wait() {
    let (done, waited) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(std::panic::catch_unwind(without_time)));
    waited.recv_timeout(Duration::from_secs(100)).expect("it never came").expect("no panic");
}

fn without_time() {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let engine = start(config());
        match engine.submit(request(1, 8, 1)).await {
            Ok(mut stream) => {
                assert_eq!(stream.recv().await.expect("the end").finish, Some(FinishReason::Failed));
            }
            Err(error) => assert!(matches!(error, SubmitError::Stopped(_)), "{error:?}"),
        }
        let Err(ShutdownError::Stopped(StopCause::Failed { task, message })) = engine.shutdown().await else {
            panic!("it cannot have gone well")
        };
        assert_eq!(task, "scheduler actor");
        assert!(message.contains("timers are disabled"), "{message}");
        assert_eq!((engine.active_request_count(), Handle::current().metrics().num_alive_tasks()), (0, 0));
    });
}

/// Counts ERROR events, and keeps the fields of the last one.
#[derive(Clone, Default)]
struct Errors {
    count: Arc<AtomicU64>,
    last: Log,
}

impl Subscriber for Errors {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        if *event.metadata().level() == Level::ERROR {
            self.count.fetch_add(1, Ordering::Relaxed);
            event.record(&mut Fields(&self.last));
        }
    }
}

struct Fields<'a>(&'a Log);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.note(format!("{field}={value:?}"));
    }
}

#[test]
fn r36_the_cause_is_logged_once_and_a_good_life_logs_no_error() {
    let runtime = || Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
    let errors = Errors::default();
    // With two of them, no other test's thread can switch an event off for want of a subscriber of its own.
    let _another = tracing::Dispatch::new(Errors::default());
    tracing::subscriber::with_default(errors.clone(), || {
        runtime().block_on(async {
            let engine = start(config());
            let mut stream = submit_with(&engine, request(1, 8, 9), cancel_on_overflow(1)).await;
            drop(submit(&engine, request(2, 8, 9)).await);
            at(&engine, 50).await;
            read(&mut stream).await;
            assert_eq!(within(engine.shutdown()).await, Ok(()));
        });
        assert_eq!(errors.count.load(Ordering::Relaxed), 0, "{:?}", errors.last.take());
        runtime().block_on(async {
            let kv = |_: KvEventBatch<'_>| -> Result<(), _> { panic!("kv sink") };
            let engine = LiveEngine::builder(config()).kv_event_sink(kv).start().expect("valid");
            fails(engine, request(1, 8, 3), "event dispatcher", "kv sink").await;
        });
    });
    assert_eq!(errors.count.load(Ordering::Relaxed), 1);
    let fields = errors.last.take();
    assert!(fields.iter().any(|field| field.contains("event dispatcher failed: kv sink")), "{fields:?}");
}

/// A million passes without duration, on one thread. Whoever else wants to run, runs.
#[tokio::test(start_paused = true)]
async fn r37_zero_duration_passes_yield_to_cancels_and_other_tasks() {
    let vllm = vllm().with_block_size(16).with_num_gpu_blocks(70_000);
    let endless = config_of(vllm).with_max_model_len(1_000_016).with_speedup(Speedup::Instant);
    let engine = start(endless);
    let mut stream = submit_with(&engine, Request::new(vec![1; 16], 1_000_000).with_id(id(1)), FULL).await;
    let turns_taken = Arc::new(AtomicU64::new(0));
    let (counter, mut others) = (Arc::clone(&turns_taken), JoinSet::new());
    others.spawn(async move {
        loop {
            counter.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
    });
    for _ in 0..100 {
        assert!(within(stream.recv()).await.is_some());
    }
    let passes = |engine: &LiveEngine| engine.metrics_receiver().borrow().num_passes;
    assert!(turns_taken.load(Ordering::Relaxed) >= passes(&engine) / 2, "it ran beside the passes");
    let before = passes(&engine);
    assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
    assert!(passes(&engine) <= before + 2, "answered within a pass or two");
    assert_eq!(read(&mut stream).await.last().expect("an end").1, Some(FinishReason::Cancelled));
    assert!(engine.metrics_receiver().borrow().generation_tokens < 200);

    let _again = submit_with(&engine, Request::new(vec![1; 16], 1_000_000), FULL).await;
    turns().await;
    let before = passes(&engine);
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert!(passes(&engine) <= before + 3);
    assert_eq!(engine.now(), EngineTime::ZERO);
    others.abort_all();
}

#[tokio::test(start_paused = true)]
async fn r37_zero_duration_passes_follow_the_clock_when_it_moves() {
    let engine = start(config().with_speedup(Speedup::Instant));
    let mut first = submit(&engine, request(1, 8, 3)).await;
    assert_eq!(read(&mut first).await, whole(1, &[0.0, 0.0, 0.0]));
    at(&engine, 7).await;
    assert_eq!(read(&mut submit(&engine, request(2, 8, 2)).await).await, whole(2, &[7.0, 7.0]));
    assert_eq!(poll_times(engine.shutdown(), 8).await, Some(Ok(())));
}

/// Passes without duration follow each other at one instant, but not for ever at the same.
#[tokio::test(start_paused = true)]
async fn r37_an_endless_row_of_zero_duration_passes_lets_later_arrivals_in() {
    let vllm = vllm().with_block_size(16).with_num_gpu_blocks(70_000);
    let engine = start(config_of(vllm).with_max_model_len(1_000_016).with_speedup(Speedup::Instant));
    let _endless = submit_with(&engine, Request::new(vec![1; 16], 1_000_000), FULL).await;
    turns().await;
    tokio::time::advance(Duration::from_millis(7)).await;
    let mut later = submit(&engine, request(1, 8, 3)).await;
    assert_eq!(read(&mut later).await, whole(1, &[7.0, 7.0, 7.0]));
    let passes = engine.metrics_receiver().borrow().num_passes;
    assert!(passes < 100, "after {passes} passes");
}
