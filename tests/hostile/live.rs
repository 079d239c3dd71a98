//! The live engine: what its builder and its calls are given, and what a caller's own code does in it.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use standin::handoff::{FaultRates, TransferTiming};
use standin::timing::{PassTiming, PassWork};
use standin::{
    CoordinatorConfig, EngineConfig, EngineTime, FinishReason, KvEventBatch, LiveEngine, LiveEngineBuilder,
    LiveHandoff, OutputBuffering, Prompt, PromptSource, Request, ShutdownError, Speedup, StopCause, SubmitOptions,
    handoff,
};
use tokio::time::Instant;
use uuid::Uuid;

use crate::kit::{Claim, assert_refused, kinds, small_sglang, untouchable};

#[expect(clippy::disallowed_methods, reason = "an epoch is an instant of Tokio's clock")]
fn tokio_now() -> Instant {
    Instant::now()
}

const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

fn config() -> EngineConfig {
    let [vllm, _] = kinds();
    vllm
}

/// Serves a request of 9 tokens for 3, and shuts the engine down.
async fn serves(engine: &LiveEngine) {
    assert_eq!(finish(engine, Request::new(vec![1; 9], 3)).await, (3, Some(FinishReason::Length)));
    engine.shutdown().await.expect("it runs");
}

async fn finish(engine: &LiveEngine, request: Request) -> (usize, Option<FinishReason>) {
    let mut stream = engine.submit(request).await.expect("it is taken");
    let mut tokens = 0;
    while let Some(signal) = stream.recv().await {
        tokens += usize::from(signal.token_id.is_some());
    }
    (tokens, stream.finish_reason())
}

#[tokio::test(start_paused = true)]
async fn r02_what_a_builder_refuses() {
    let timing = |bandwidth_gb_s| TransferTiming { bandwidth_gb_s: Some(bandwidth_gb_s), ..TransferTiming::default() };
    let build = LiveEngine::builder;
    let rows: Vec<(&str, LiveEngineBuilder, &str)> = vec![
        ("a vocabulary", build(config().with_vocab_size(0)), "configuration: vocab_size = 0: at least 1"),
        (
            "a length",
            build(config().with_max_model_len(u32::MAX)),
            "configuration: kind.vllm.num_gpu_blocks = 101: at least 1073741824: the pool must hold one sequence of \
             max_model_len = 4294967295 tokens",
        ),
        (
            "a factor",
            build(config().with_speedup(Speedup::Factor(f64::NEG_INFINITY))),
            "configuration: speedup.factor = -inf: greater than 0 and finite",
        ),
        (
            "a bandwidth",
            build(config()).transfer_timing(timing(f64::NAN)),
            "configuration: transfer_timing.bandwidth_gb_s = NaN: at least 0 and finite",
        ),
        (
            "slots",
            build(EngineConfig::new(standin::EngineKind::Sglang(small_sglang().with_max_running_requests(u32::MAX)))),
            "configuration: kind.sglang.max_running_requests = 4294967295: at most 200: half the tokens of the pool",
        ),
    ];
    for (what, builder, expected) in rows {
        assert_refused(what, builder.start(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_builder_takes_it_runs_with() {
    let build = LiveEngine::builder;
    let rows: Vec<(&str, LiveEngineBuilder)> = vec![
        ("a rank and a seed", build(config()).dp_rank(u32::MAX).seed(u64::MAX)),
        ("a year's start", build(config().with_startup(YEAR))),
        ("a fast start", build(config().with_startup(Duration::MAX).with_speedup(Speedup::Factor(f64::MAX)))),
        ("an epoch long ago", build(config()).epoch(tokio_now() - Duration::from_secs(1))),
        ("any buffer", build(config()).output_buffering(OutputBuffering::Throttle { capacity: NonZeroUsize::MAX })),
        (
            "any other",
            build(config()).output_buffering(OutputBuffering::CancelOnOverflow { capacity: NonZeroUsize::MAX }),
        ),
        ("passes of a year", build(config()).pass_timing(Says(YEAR))),
    ];
    for (what, builder) in rows {
        println!("{what}");
        serves(&builder.start().expect(what)).await;
    }
}

/// What comes only after the end of all clocks is waited for, and can be given up.
#[tokio::test(start_paused = true)]
async fn what_takes_for_ever_is_waited_for_and_ends_when_it_is_told_to() {
    // The last instant there is.
    let far = || {
        let (mut at, mut step) = (tokio_now(), Duration::from_secs(1 << 62));
        while !step.is_zero() {
            match at.checked_add(step) {
                Some(later) => at = later,
                None => step /= 2,
            }
        }
        at
    };
    let rows: Vec<(&str, LiveEngineBuilder)> = vec![
        ("a start", LiveEngine::builder(config().with_startup(Duration::MAX))),
        ("a slow start", LiveEngine::builder(config().with_startup(YEAR).with_speedup(Speedup::Factor(5e-324)))),
        ("a pass", LiveEngine::builder(config()).pass_timing(Says(Duration::MAX))),
        ("an epoch", LiveEngine::builder(config()).epoch(far())),
        ("both", LiveEngine::builder(config().with_startup(Duration::MAX)).epoch(far())),
    ];
    for (what, builder) in rows {
        let engine = builder.start().expect(what);
        let mut stream = engine.submit(Request::new(vec![1; 9], 3)).await.expect(what);
        let arrives = engine.submit(Request::new(vec![1; 9], 3).with_arrival(EngineTime::MAX)).await.expect(what);
        // A day.
        let waited = tokio::time::timeout(Duration::from_secs(86_400), stream.recv()).await;
        assert!(waited.is_err(), "{what}: {waited:?}");
        assert_eq!(engine.cancel(stream.id()).await, Ok(true), "{what}");
        assert_eq!(arrives.cancel().await, Ok(true), "{what}");
        assert_eq!(engine.active_request_count(), 0, "{what}");
        engine.shutdown().await.expect(what);
    }
}

#[tokio::test(start_paused = true)]
async fn r12_requests_that_claim_too_much_are_refused_and_nothing_is_made() {
    for config in kinds() {
        let engine = LiveEngine::start(config).expect("valid");
        for length in [0, 64, 10_000_000, u32::MAX as usize, usize::MAX] {
            let request = Request::new(untouchable(length), 1).with_id(Uuid::from_u128(1));
            let expected = match length {
                0 => "prompt is empty: at least one token is required".to_owned(),
                length => format!("prompt has {length} tokens: must be below max_model_len = 64"),
            };
            assert_refused("a prompt", engine.submit(request.clone()).await, &expected);
            assert_refused("a prompt", engine.prepare_request(request.clone()), &expected);
            assert_refused("a prompt", engine.submit_decode(request).await, &expected);
        }
        for id in [Uuid::nil(), Uuid::max()] {
            assert_eq!(finish(&engine, Request::new(vec![1], 1).with_id(id)).await.0, 1, "any id will do");
        }
        let full = SubmitOptions::default().with_buffering(OutputBuffering::FullResponse);
        let request = Request::new(vec![1], standin::MAX_OUTPUT_TOKENS);
        let mut stream = engine.submit_with(request, full).await.expect("cut by the model's length");
        while stream.recv().await.is_some() {}
        assert_eq!((stream.finish_reason(), engine.active_request_count()), (Some(FinishReason::Length), 0));
        serves(&engine).await;
    }
}

/// A timing model that always says the same.
#[derive(Debug)]
struct Says(Duration);

impl PassTiming for Says {
    fn pass_duration(&mut self, _: &PassWork) -> Duration {
        self.0
    }
}

#[derive(Debug)]
struct Panics;

impl PassTiming for Panics {
    fn pass_duration(&mut self, _: &PassWork) -> Duration {
        panic!("no idea")
    }
}

impl PromptSource for Panics {
    fn num_tokens(&self) -> usize {
        9
    }

    fn fill(&self, _: usize, _: &mut [u32]) {
        panic!("no idea")
    }
}

/// That an engine ended so: its streams, its shutdown and whoever comes later say why.
async fn failed(engine: &LiveEngine, task: &str) {
    let Err(ShutdownError::Stopped(StopCause::Failed { task: failed, message })) = engine.shutdown().await else {
        panic!("it did not fail")
    };
    assert_eq!((failed, &*message), (task, "no idea"));
    assert!(engine.submit(Request::new(vec![1], 1)).await.is_err());
    assert_eq!(engine.active_request_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn r36_code_of_a_caller_that_panics_ends_the_engine_and_says_so() {
    let build = || LiveEngine::builder(config());
    let knows = false;
    let sink = move |_: KvEventBatch<'_>| {
        assert!(knows, "no idea");
        Ok(())
    };
    let rows: Vec<(&str, LiveEngine, Request, &str)> = vec![
        (
            "a timing model",
            build().pass_timing(Panics).start().expect("valid"),
            Request::new(vec![1; 9], 3),
            "scheduler actor",
        ),
        (
            "a sink",
            build().kv_event_sink(sink).start().expect("valid"),
            Request::new(vec![1; 9], 3),
            "event dispatcher",
        ),
        (
            "a prompt",
            build().start().expect("valid"),
            Request::new(Prompt::Lazy(Arc::new(Panics)), 3),
            "scheduler actor",
        ),
    ];
    for (what, engine, request, task) in rows {
        let (stream, bystander) = tokio::join!(engine.submit(request), engine.submit(Request::new(vec![2; 9], 3)));
        let (mut stream, mut bystander) = (stream.expect(what), bystander.expect(what));
        while stream.recv().await.is_some() {}
        while bystander.recv().await.is_some() {}
        let ends = (stream.finish_reason(), bystander.finish_reason());
        assert_eq!(ends, (Some(FinishReason::Failed), Some(FinishReason::Failed)), "{what}");
        failed(&engine, task).await;
    }
}

/// A length that panics does so where it is asked for, on the caller's side.
#[tokio::test(start_paused = true)]
async fn a_length_that_panics_is_the_callers_own() {
    #[derive(Debug)]
    struct NoLength;
    impl PromptSource for NoLength {
        fn num_tokens(&self) -> usize {
            panic!("no idea")
        }
        fn fill(&self, _: usize, _: &mut [u32]) {}
    }
    let engine = LiveEngine::start(config()).expect("valid");
    let request = Request::new(Prompt::Lazy(Arc::new(NoLength)), 1);
    assert!(catch_unwind(AssertUnwindSafe(|| engine.prepare_request(request))).is_err());
    serves(&engine).await;
}

/// However often a prompt is asked before it names another length, the engine goes on.
#[tokio::test(start_paused = true)]
async fn prompts_whose_length_changes_are_held_to_the_model_and_disturb_nobody() {
    for config in kinds() {
        let engine = LiveEngine::start(config).expect("valid");
        let mut taken = 0;
        for before in 1..30 {
            for length in [0, 1, 64, u32::MAX as usize, usize::MAX] {
                let mut lengths = vec![10; before];
                lengths.push(length);
                let Ok(mut stream) = engine.submit(Request::new(Claim::prompt(lengths), 3)).await else { continue };
                taken += 1;
                while stream.recv().await.is_some() {}
                assert!(matches!(stream.finish_reason(), Some(FinishReason::Length)), "{before}, then {length}");
            }
        }
        assert!(taken > 10, "{taken}");
        serves(&engine).await;
    }
}

#[tokio::test(start_paused = true)]
async fn handoffs_with_values_at_the_edges() {
    let slow = TransferTiming {
        kv_bytes_per_token: Some(u64::MAX),
        bandwidth_gb_s: Some(5e-324),
        ..TransferTiming::default()
    };
    let prefill = LiveEngine::builder(config()).transfer_timing(slow).start().expect("valid");
    let decode = LiveEngine::start(config()).expect("valid");
    let request = || Request::new(vec![1; 9], 3).with_id(Uuid::from_u128(7));
    let rows = [
        (
            "no time",
            CoordinatorConfig::vllm().with_timeout(Duration::ZERO),
            FaultRates::default(),
            "handoff: timeout = 0ns: greater than 0",
        ),
        (
            "a rate",
            CoordinatorConfig::vllm(),
            FaultRates::default().with_delayed(f64::NAN),
            "handoff: delayed = NaN: from 0 to 1",
        ),
    ];
    for (what, config, rates, expected) in rows {
        let started = LiveHandoff::new(config).faults(rates, u64::MAX).start(&prefill, &decode, request()).await;
        assert_refused(what, started, expected);
        assert_eq!((prefill.active_request_count(), decode.active_request_count()), (0, 0), "{what}");
    }
    let short = LiveEngine::start(config().with_max_model_len(9)).expect("valid");
    let expected = "engine: prompt has 9 tokens: must be below max_model_len = 9";
    for (one, other, side) in [(&short, &decode, "prefill"), (&prefill, &short, "decode")] {
        assert_refused("a prompt", handoff(one, other, request()).await, &format!("{side} {expected}"));
        assert_eq!((one.active_request_count(), other.active_request_count()), (0, 0), "the id is free at once");
    }
    // A transfer that takes longer than time lasts is given up by its time-out.
    let mut stream = handoff(&prefill, &decode, request()).await.expect("it starts");
    while stream.recv().await.is_some() {}
    assert_eq!(stream.finish_reason(), Some(FinishReason::TransferFailed));
    // With none it lasts until somebody has had enough.
    let patient = CoordinatorConfig::vllm().with_timeout(Duration::MAX).with_transfer_timeout(None);
    let mut stream = LiveHandoff::new(patient).start(&prefill, &decode, request()).await.expect("it starts");
    assert!(tokio::time::timeout(Duration::from_secs(86_400), stream.recv()).await.is_err());
    drop(stream);
    tokio::time::sleep(Duration::from_secs(1)).await;
    for engine in [&prefill, &decode] {
        let metrics = *engine.metrics_receiver().borrow();
        assert_eq!((engine.active_request_count(), metrics.num_used_blocks), (0, 0));
        serves(engine).await;
    }
}
