//! vLLM's V1 scheduler (facts: vLLM 0.33.0, synchronous scheduling; checked against its recordings).
//!
//! A pass serves the running sequences in the order of their admission, then admits from the head of the
//! queue as long as slots, token budget and KV blocks last. There is no prefill or decode phase: each
//! sequence gets the tokens that it is short of. Blocks are given out and become findable while a pass
//! is planned; its tokens are known when it ends.
//!
//! Nothing here costs time in the length of the queue or the size of the pool, and no command in the
//! number of sequences, but for a reset and the choice of a victim by priority.

mod admit;
mod commands;
mod finish;
mod loads;
mod plan;

#[cfg(test)]
mod arrivals_test;
#[cfg(test)]
mod handoff_cases_test;
#[cfg(test)]
mod handoff_test;
#[cfg(test)]
mod limits_test;
#[cfg(test)]
mod preemption_test;
#[cfg(test)]
mod prefix_test;
#[cfg(test)]
mod random_handoff_test;
#[cfg(test)]
mod test_kit;

use std::mem;

use crate::config::{EngineConfig, VllmConfig};
use crate::kv::{BlockPool, KvCache, SequenceBlocks};

use super::book::Book;
use super::remote::{ConnectorCall, TransferReport};

/// The core of one engine.
#[derive(Debug)]
pub(crate) struct VllmCore {
    book: Book<SequenceBlocks>,
    options: VllmConfig,
    kv: KvCache,
    /// The last pass that could have admitted left somebody in the queue (`prefill_schedule_interval`).
    left_waiting: bool,
    /// Transfers will free blocks soon.
    expects_frees: bool,
    /// Reports that count when the pass in flight ends.
    reports: Vec<TransferReport>,
    connector_log: Option<Vec<ConnectorCall>>,
}

impl VllmCore {
    /// A core for a configuration that was checked ([`EngineConfig::validate_core`]).
    pub(crate) fn new(engine: &EngineConfig, options: &VllmConfig) -> Self {
        Self {
            book: Book::new(engine),
            kv: KvCache::new(options),
            left_waiting: false,
            expects_frees: false,
            reports: Vec::new(),
            connector_log: None,
            options: options.clone(),
        }
    }

    pub(crate) fn record_kv_events(&mut self) {
        self.kv.record_events();
    }

    pub(crate) fn log_connector_calls(&mut self) {
        self.connector_log.get_or_insert_default();
    }

    pub(crate) fn take_connector_calls(&mut self) -> Vec<ConnectorCall> {
        self.connector_log.as_mut().map(mem::take).unwrap_or_default()
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        self.kv.pool()
    }
}
