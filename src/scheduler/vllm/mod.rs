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
use crate::kv_event::KvEvent;
use crate::time::EngineTime;
use crate::timing::PassTiming;

use super::book::{Book, Usage};
use super::engine_core::EngineCore;
use super::pass::{Effects, Pass};
use super::remote::{ConnectorCall, TransferReport};
use super::sequences::Handle;

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

    pub(crate) fn set_timing(&mut self, timing: Box<dyn PassTiming>) {
        self.book.timing = timing;
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

    pub(crate) fn begin_pass(&mut self, now: EngineTime) -> Option<Box<Pass>> {
        let mut pass = self.book.open_pass()?;
        self.turn_to(now);
        self.book.running.sweep(&self.book.sequences);
        self.release_arrivals(now, self.book.sees_ties(now));
        self.plan(&mut pass);
        // With nothing else to do there is no boundary to come first.
        if pass.rows.is_empty() && pass.preempted.is_empty() && self.release_arrivals(now, true) {
            self.plan(&mut pass);
        }
        self.book.launch(pass, now)
    }

    pub(crate) fn settle(&mut self, now: EngineTime) -> Option<Box<Effects>> {
        if !self.book.in_flight() {
            self.turn_to(now);
            self.release_arrivals(now, self.book.sees_ties(now));
        }
        let mut effects = self.book.open_settlement(!self.kv.events().is_empty())?;
        self.show(&mut effects, now);
        Some(effects)
    }

    /// Completes effects: the events so far and the state at this boundary.
    fn show(&mut self, effects: &mut Effects, now: EngineTime) {
        self.kv.take_events(&mut effects.kv_events);
        let pool = self.kv.pool();
        let usage = Usage {
            num_running: self.book.running.len() as u64,
            usable: u64::from(pool.num_usable()),
            used: u64::from(pool.num_usable() - pool.num_free()),
            cached: pool.num_blocks_with_hash() as u64,
        };
        self.book.show(effects, usage, now);
    }

    pub(crate) fn recycle(&mut self, effects: Box<Effects>) {
        self.book.recycle(effects);
    }

    pub(crate) fn has_work(&self) -> bool {
        self.book.has_work(self.running().any(|handle| !self.book.sequences[handle].throttled))
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = Handle> + '_ {
        self.book.running.iter(&self.book.sequences)
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        self.kv.pool()
    }

    pub(crate) fn kv_events(&self) -> &[KvEvent] {
        self.kv.events()
    }
}
