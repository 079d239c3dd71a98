//! A stand-in for an LLM inference engine: the scheduling and the KV cache are real, the GPU is a model of time.

mod config;
mod error;
pub mod handoff;
mod kv;
mod kv_event;
mod metrics;
mod output;
pub mod replay;
mod request;
pub mod scheduler;
mod time;
pub mod timing;

pub use config::{
    EngineConfig, EngineKind, FirstToken, LoadFailurePolicy, RadixEvictionPolicy, SchedulingState, SglangConfig,
    SglangPolicy, Speedup, TieVictim, VllmConfig, VllmPolicy,
};
pub use error::{CommandError, ConfigError, HandoffRefusal, RequestError};
pub use handoff::{Coordinator, CoordinatorConfig, HandoffId, HandoffKey, TransferTiming, TransferTimingMode};
pub use kv_event::{BlockExtraKeys, BlockHash, BlockId, KvEvent};
pub use metrics::{EngineMetrics, FinishedCounts, KvFetchCounts, Moments, PassMetrics, PrefixCacheStats};
pub use output::{FinishReason, PrefillStats, TokenGenerator};
pub use request::{
    KvCacheReportMode, MAX_OUTPUT_TOKENS, MultimodalItem, OutputPlan, Prompt, PromptSource, Request, SequenceId,
};
pub use scheduler::{
    Admitted, Applied, Cancelled, Command, ConnectorCall, DestinationEnd, DestinationState, Effects, HandoffFact,
    HandoffSide, KeepBlocks, LoadTiming, Output, Pass, PassRow, PoolView, RemoteCopy, RemoteKv, RowKind, Scheduler,
    SequenceStatus, SequenceView, SourceEnd, SourceState, Submission, TokenPoolView, TransferReport, View,
};
pub use time::EngineTime;
