//! One registration and its request on one engine, and what the metrics say of held and reserved blocks.

use std::time::Duration;

use standin::{
    CoordinatorConfig, EngineConfig, EngineKind, EngineTime, HandoffError, HandoffId, LiveEngine, LiveHandoffControl,
    LiveHandoffEvent, LiveHandoffEvents, LiveHandoffStream, LiveRequest, Request, SglangConfig, TransferTiming,
    VllmConfig, handoff,
};

use crate::common::{Seen, assert_clean, config, config_of_kind, id, request, seen, sglang, turns, vllm};

/// The engine kinds that the rules are tried on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Vllm,
    Sglang,
}

impl Kind {
    /// 100 blocks of 4 tokens, passes of 10 ms and at most 64 tokens.
    pub(crate) fn config(self) -> EngineConfig {
        self.of(|vllm| vllm, |sglang| sglang)
    }

    /// The same with other options.
    pub(crate) fn of(
        self,
        vllm_options: impl FnOnce(VllmConfig) -> VllmConfig,
        sglang_options: impl FnOnce(SglangConfig) -> SglangConfig,
    ) -> EngineConfig {
        // SGLang keeps as little free as it can, so that destinations fit as they do with vLLM, and has vLLM's lease.
        let sglang =
            sglang().with_num_reserved_decode_tokens(1).with_disaggregation_waiting_timeout(Duration::from_secs(30));
        config_of_kind(match self {
            Self::Vllm => EngineKind::Vllm(vllm_options(vllm())),
            Self::Sglang => EngineKind::Sglang(sglang_options(sglang)),
        })
    }

    /// A pool of so many blocks, and requests that fill it.
    pub(crate) fn pool(self, blocks: u32) -> EngineConfig {
        let config =
            self.of(|vllm| vllm.with_num_gpu_blocks(blocks + 1), |sglang| sglang.with_max_total_tokens(blocks * 4));
        config.with_max_model_len(blocks * 4)
    }

    /// Sources are held for so long.
    pub(crate) fn leased(self, lease: Duration) -> EngineConfig {
        self.of(|vllm| vllm.with_kv_lease(lease), |sglang| sglang.with_disaggregation_waiting_timeout(lease))
    }

    /// At most so many run, and a pass computes so many tokens.
    pub(crate) fn narrow(self, running: u32, tokens: u32) -> EngineConfig {
        self.of(
            |vllm| vllm.with_max_num_seqs(running).with_max_num_batched_tokens(tokens),
            |sglang| sglang.with_max_running_requests(running).with_chunked_prefill_size(Some(tokens)),
        )
    }

    /// How this kind's engines hand over.
    pub(crate) fn way(self) -> CoordinatorConfig {
        CoordinatorConfig::of_kind(&self.config().kind)
    }
}

/// Makes a test per kind of each function that is given one: `vllm::h01_…` and `sglang::h01_…`.
macro_rules! for_every_kind {
    ($($name:ident,)*) => {
        mod vllm {
            $(#[tokio::test(start_paused = true)] async fn $name() { super::$name($crate::kit::Kind::Vllm).await; })*
        }
        mod sglang {
            $(#[tokio::test(start_paused = true)] async fn $name() { super::$name($crate::kit::Kind::Sglang).await; })*
        }
    };
}
pub(crate) use for_every_kind;

pub(crate) type Event = Option<LiveHandoffEvent>;

pub(crate) fn handoff_id(n: u32) -> HandoffId {
    HandoffId(id(n))
}

/// One side of handoff `n`, with request `n` submitted.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) control: LiveHandoffControl,
    pub(crate) events: LiveHandoffEvents,
    pub(crate) stream: LiveRequest,
}

pub(crate) fn register(engine: &LiveEngine, n: u32) -> (LiveHandoffControl, LiveHandoffEvents) {
    engine.register_handoff(handoff_id(n)).expect("the id is free")
}

/// A source with one output token.
pub(crate) async fn source(engine: &LiveEngine, n: u32, prompt_tokens: u32) -> Side {
    source_of(engine, n, request(n, prompt_tokens, 1)).await
}

pub(crate) async fn source_of(engine: &LiveEngine, n: u32, request: Request) -> Side {
    let (control, events) = register(engine, n);
    let (registration, stream) = engine.prepare_request(request).expect("valid");
    within(control.submit_prefill(registration)).await.expect("it is taken");
    Side { control, events, stream }
}

pub(crate) async fn destination(engine: &LiveEngine, n: u32, prompt_tokens: u32, outputs: u32) -> Side {
    destination_of(engine, n, request(n, prompt_tokens, outputs)).await
}

pub(crate) async fn destination_of(engine: &LiveEngine, n: u32, request: Request) -> Side {
    let (control, events) = register(engine, n);
    let (registration, stream) = engine.prepare_request(request).expect("valid");
    within(control.reserve_destination(registration)).await.expect("it is taken");
    Side { control, events, stream }
}

impl Side {
    /// The next event.
    pub(crate) async fn event(&mut self) -> Event {
        within(self.events.recv()).await
    }
}

pub(crate) const fn ms(milliseconds: u64) -> EngineTime {
    EngineTime::from_millis(milliseconds)
}

pub(crate) fn reserved(at: u64, transferable_prompt_tokens: u32) -> Event {
    Some(LiveHandoffEvent::DestinationReserved { at: ms(at), transferable_prompt_tokens })
}

/// Blocks: used, held, reserved.
pub(crate) fn blocks(engine: &LiveEngine) -> (u64, u64, u64) {
    let metrics = *engine.metrics_receiver().borrow();
    (metrics.num_used_blocks, metrics.num_held_blocks, metrics.num_reserved_blocks)
}

/// Nothing is left, also of handoffs.
pub(crate) async fn assert_released(engine: &LiveEngine) {
    turns().await;
    assert_clean(engine);
    assert_eq!(blocks(engine), (0, 0, 0));
    assert_eq!(engine.metrics_receiver().borrow().num_requests_held, 0);
}

/// Bounds what might never come. Time-outs and leases are minutes of paused time, so the limit is a day.
pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(86_400), future).await.expect("it never came")
}

pub(crate) const OK: Result<(), HandoffError> = Ok(());

/// A prefill and a decode engine with one epoch; transfers take 1 ms a token.
pub(crate) fn pair_of(prefill: EngineConfig, decode: EngineConfig) -> (LiveEngine, LiveEngine) {
    #[expect(clippy::disallowed_methods, reason = "the caller's own clock, paused")]
    let epoch = tokio::time::Instant::now();
    let timing =
        TransferTiming { kv_bytes_per_token: Some(1_000_000), bandwidth_gb_s: Some(1.0), ..TransferTiming::default() };
    let prefill = LiveEngine::builder(prefill).epoch(epoch).transfer_timing(timing).start().expect("valid");
    let decode = LiveEngine::builder(decode).epoch(epoch).start().expect("valid");
    (prefill, decode)
}

pub(crate) fn pair() -> (LiveEngine, LiveEngine) {
    pair_of(config(), config())
}

/// Reads a stream to its end, and checks what holds for every stream.
pub(crate) async fn read_all(stream: &mut LiveHandoffStream) -> Vec<Seen> {
    let mut signals: Vec<Seen> = Vec::new();
    while let Some(signal) = within(stream.recv()).await {
        assert_eq!(signal.request_id, stream.id());
        let signal = seen(signal);
        if let Some(last) = signals.last() {
            assert!(last.1.is_none() && last.2 <= signal.2, "{signal:?} after {last:?}");
        }
        signals.push(signal);
    }
    assert_eq!(within(stream.recv()).await, None, "once ended, always ended");
    let finish = signals.last().expect("a stream has a terminal signal").1;
    assert_eq!((stream.finish_reason(), finish.is_some()), (finish, true));
    signals
}

/// Both engines are as before.
pub(crate) async fn assert_both_released(prefill: &LiveEngine, decode: &LiveEngine) {
    assert_released(prefill).await;
    assert_released(decode).await;
}

/// A handoff of a request that both engines take.
pub(crate) async fn begin(prefill: &LiveEngine, decode: &LiveEngine, request: Request) -> LiveHandoffStream {
    within(handoff(prefill, decode, request)).await.expect("both take it")
}

/// Lets a stream be driven until so many milliseconds, while no token comes.
pub(crate) async fn drive(stream: &mut LiveHandoffStream, engine: &LiveEngine, until: u64) {
    let pause = ms(until).saturating_since(engine.now());
    let signal = tokio::time::timeout(pause, stream.recv()).await;
    assert!(signal.is_err(), "{signal:?}");
}
