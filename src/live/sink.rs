//! Where callers have KV events and pass metrics delivered.

use crate::kv_event::KvEvent;
use crate::metrics::PassMetrics;
use crate::time::EngineTime;

/// The KV events of one boundary, in order.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct KvEventBatch<'a> {
    /// Data-parallel rank of the engine.
    pub dp_rank: u32,
    /// The boundary.
    pub at: EngineTime,
    /// The events; never empty.
    pub events: &'a [KvEvent],
}

/// Takes KV events, one batch per boundary.
///
/// It runs on the engine's dispatcher and must not block. An error is logged and counted
/// ([`crate::EngineMetrics::sink_errors`]) and the engine goes on; a panic stops it.
pub trait KvEventSink: Send {
    /// Takes one batch.
    ///
    /// # Errors
    /// Anything; it is only reported.
    fn publish(&mut self, batch: KvEventBatch<'_>) -> anyhow::Result<()>;
}

impl<F: FnMut(KvEventBatch<'_>) -> anyhow::Result<()> + Send> KvEventSink for F {
    fn publish(&mut self, batch: KvEventBatch<'_>) -> anyhow::Result<()> {
        self(batch)
    }
}

/// Takes the metrics of every pass that computed something.
///
/// It runs on the engine's dispatcher and must not block. An error is logged and counted
/// ([`crate::EngineMetrics::sink_errors`]) and the engine goes on; a panic stops it.
pub trait PassMetricsSink: Send {
    /// Takes the metrics of one pass.
    ///
    /// # Errors
    /// Anything; it is only reported.
    fn publish(&mut self, dp_rank: u32, pass: &PassMetrics) -> anyhow::Result<()>;
}

impl<F: FnMut(u32, &PassMetrics) -> anyhow::Result<()> + Send> PassMetricsSink for F {
    fn publish(&mut self, dp_rank: u32, pass: &PassMetrics) -> anyhow::Result<()> {
        self(dp_rank, pass)
    }
}
