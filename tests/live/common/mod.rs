//! One small engine whose numbers are easy to follow, and requests whose tokens tell whose they are.

mod probes;
mod streams;

pub(crate) use probes::{Log, Timing, durations, waker_of};
pub(crate) use streams::{Seen, cut, next, read, seen, whole};

use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::future::join_all;
use standin::timing::TimingConfig;
use standin::{
    EngineConfig, EngineKind, EngineTime, LiveEngine, LiveRequest, OutputBuffering, Request, SglangConfig,
    SubmitOptions, VllmConfig,
};
use uuid::Uuid;

/// Blocks of 4 tokens, 100 of them usable; 16 sequences and 64 tokens a pass.
pub(crate) fn vllm() -> VllmConfig {
    VllmConfig::default()
        .with_block_size(4)
        .with_num_gpu_blocks(101)
        .with_max_num_seqs(16)
        .with_max_num_batched_tokens(64)
}

/// An engine of this kind, with passes of 10 ms and at most 64 tokens a request.
pub(crate) fn config_of(vllm: VllmConfig) -> EngineConfig {
    config_of_kind(EngineKind::Vllm(vllm))
}

pub(crate) fn config_of_kind(kind: EngineKind) -> EngineConfig {
    EngineConfig::new(kind).with_max_model_len(64).with_timing(TimingConfig::ConstantMs(10.0))
}

/// The same sizes for SGLang: 100 pages of 4 tokens, 16 sequences, chunks of 64 tokens.
pub(crate) fn sglang() -> SglangConfig {
    SglangConfig::default()
        .with_page_size(4)
        .with_max_total_tokens(400)
        .with_max_running_requests(16)
        .with_chunked_prefill_size(Some(64))
}

pub(crate) fn config() -> EngineConfig {
    config_of(vllm())
}

pub(crate) fn start(config: EngineConfig) -> LiveEngine {
    LiveEngine::start(config).expect("the configuration is valid")
}

pub(crate) fn id(n: u32) -> Uuid {
    Uuid::from_u128(u128::from(n))
}

/// The first `outputs` tokens of request `n`.
pub(crate) fn tokens(n: u32, outputs: u32) -> Vec<u32> {
    (1..=outputs).map(|position| n * 100 + position).collect()
}

/// Request `n`: a prompt that shares no block with others, and [`tokens`] as its output.
pub(crate) fn request(n: u32, prompt_tokens: u32, outputs: u32) -> Request {
    let prompt: Vec<u32> = (0..prompt_tokens).map(|position| n * 1_000 + position).collect();
    Request::new(prompt, outputs).with_id(id(n)).with_output_tokens(tokens(n, outputs))
}

pub(crate) const FULL: OutputBuffering = OutputBuffering::FullResponse;

/// The default: 8 unread tokens.
pub(crate) fn eight() -> OutputBuffering {
    OutputBuffering::default()
}

pub(crate) fn cancel_on_overflow(capacity: usize) -> OutputBuffering {
    OutputBuffering::CancelOnOverflow { capacity: capacity.try_into().expect("not 0") }
}

pub(crate) fn throttle(capacity: usize) -> OutputBuffering {
    OutputBuffering::Throttle { capacity: capacity.try_into().expect("not 0") }
}

pub(crate) fn buffered(buffering: OutputBuffering) -> SubmitOptions {
    SubmitOptions::default().with_buffering(buffering)
}

pub(crate) async fn submit(engine: &LiveEngine, request: Request) -> LiveRequest {
    within(engine.submit(request)).await.expect("the request is valid")
}

pub(crate) async fn submit_with(engine: &LiveEngine, request: Request, buffering: OutputBuffering) -> LiveRequest {
    within(engine.submit_with(request, buffered(buffering))).await.expect("the request is valid")
}

/// Submits all at once, so that one pass admits them all.
pub(crate) async fn submit_together<const N: usize>(
    engine: &LiveEngine,
    requests: [(Request, OutputBuffering); N],
) -> [LiveRequest; N] {
    let submits = requests.map(|(request, buffering)| engine.submit_with(request, buffered(buffering)));
    let streams = within(join_all(submits)).await.into_iter();
    let streams: Vec<_> = streams.map(|stream| stream.expect("the request is valid")).collect();
    streams.try_into().expect("as many")
}

/// Bounds what might never come: paused time runs to the limit at once when everybody waits.
pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(100), future).await.expect("it never came")
}

/// The caller's own time: until this many milliseconds of engine time.
pub(crate) async fn at(engine: &LiveEngine, ms: u64) {
    tokio::time::sleep(EngineTime::from_millis(ms).saturating_since(engine.now())).await;
}

/// Gives every task the turns that are due. No engine time goes by.
pub(crate) async fn turns() {
    for _ in 0..16 {
        tokio::task::yield_now().await;
    }
}

/// Polls a future so many times, everybody else having a turn in between, and drops it then.
pub(crate) async fn poll_times<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..polls {
        let poll = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
        if let Poll::Ready(output) = poll {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

/// Running requests, waiting requests and used blocks, as the metrics show them.
pub(crate) fn load(engine: &LiveEngine) -> (u64, u64, u64) {
    let metrics = *engine.metrics_receiver().borrow();
    (metrics.num_requests_running, metrics.num_requests_waiting, metrics.num_used_blocks)
}

/// Nothing is left: no route, and by the metrics no request and no block.
pub(crate) fn assert_clean(engine: &LiveEngine) {
    assert_eq!((engine.active_request_count(), load(engine)), (0, (0, 0, 0)));
}

/// The error of a result whose value is of no interest.
pub(crate) fn refused<T, E: Debug>(result: Result<T, E>) -> E {
    match result {
        Ok(_) => panic!("it must be refused"),
        Err(error) => error,
    }
}

/// Polls once, with nobody to be woken.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}
