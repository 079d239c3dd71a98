//! A stand-in for an LLM inference engine: the scheduling and the KV cache are real, the GPU is a model of time.
//!
//! `LiveEngine` is an engine on Tokio, for a mock inference server, a router's integration test or a
//! benchmark. Under Tokio's paused clock it runs in virtual time and repeats to the nanosecond:
//!
//! ```
//! # #[cfg(feature = "live")]
//! #[tokio::main(flavor = "current_thread", start_paused = true)]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     use standin::{EngineConfig, EngineTime, FinishReason, LiveEngine, Request};
//!
//!     // vLLM serving Llama-3.1-8B on one H100.
//!     let engine = LiveEngine::start(EngineConfig::default())?;
//!     let mut request = engine.submit(Request::new(vec![7; 2_000], 3)).await?;
//!
//!     let mut tokens = Vec::new();
//!     let mut last = EngineTime::ZERO;
//!     while let Some(signal) = request.recv().await {
//!         tokens.extend(signal.token_id);
//!         last = signal.produced_at;
//!     }
//!     assert_eq!((tokens.len(), request.finish_reason()), (3, Some(FinishReason::Length)));
//!     assert!(last > EngineTime::from_millis(40), "a prefill of 2,000 tokens and two decode passes");
//!     engine.shutdown().await?;
//!     Ok(())
//! }
//! # #[cfg(not(feature = "live"))]
//! # fn main() {}
//! ```
//!
//! Beneath it is [`Scheduler`], a value without clock, task, lock or channel that agrees step by step with decisions
//! recorded from real engines; drive it directly for offline runs and experiments. [`timing`] says how long a pass
//! takes, [`mod@handoff`] coordinates disaggregated prefill and decode, [`replay`] reads traces and recordings.

#![forbid(unsafe_code)]

mod config;
mod error;
pub mod handoff;
mod kv;
mod kv_event;
#[cfg(feature = "live")]
pub mod live;
mod metrics;
mod output;
pub mod replay;
mod request;
pub mod scheduler;
#[cfg(standin_seeded_bugs)]
pub mod seeded_bug;
#[cfg(not(standin_seeded_bugs))]
mod seeded_bug;
mod time;
pub mod timing;

pub use config::{
    DecodeAllocationPolicy, EngineConfig, EngineKind, FirstToken, LoadFailurePolicy, RadixEvictionPolicy,
    SchedulingState, SglangConfig, SglangPolicy, Speedup, TieVictim, VllmConfig, VllmPolicy,
};
pub use error::{CommandError, ConfigError, HandoffRefusal, RequestError};
pub use handoff::{Coordinator, CoordinatorConfig, HandoffId, HandoffKey, TransferTiming, TransferTimingMode};
pub use kv_event::{BlockExtraKeys, BlockHash, BlockId, KvEvent};
#[cfg(feature = "live")]
pub use live::{
    Admission, CancelError, HandoffError, KvEventBatch, KvEventSink, LiveEngine, LiveEngineBuilder, LiveHandoff,
    LiveHandoffControl, LiveHandoffEvent, LiveHandoffEvents, LiveHandoffSide, LiveHandoffStream, LiveLink, LiveRequest,
    LiveRequestRegistration, OutputBuffering, OutputSignal, PassMetricsSink, Refused, ShutdownError, StartError,
    StartHandoffError, StopCause, Stopped, SubmitError, SubmitOptions, handoff,
};
pub use metrics::{EngineMetrics, FinishedCounts, KvFetchCounts, Moments, PassMetrics, PrefixCacheStats};
pub use output::{FinishReason, PrefillStats, TokenGenerator};
pub use request::{
    KvCacheReportMode, MAX_KEY_BYTES, MAX_MULTIMODAL_ITEMS, MAX_OUTPUT_TOKENS, MultimodalItem, OutputPlan, Prompt,
    PromptSource, Request, SequenceId,
};
pub use scheduler::{
    Admitted, Applied, Cancelled, Command, ConnectorCall, DestinationEnd, DestinationState, Effects, HandoffFact,
    HandoffSide, KeepBlocks, LoadTiming, Output, Pass, PassRow, PoolView, RemoteCopy, RemoteKv, RowKind, Scheduler,
    SequenceStatus, SequenceView, SourceEnd, SourceState, Submission, TokenPoolView, TransferReport, View,
};
pub use time::EngineTime;
