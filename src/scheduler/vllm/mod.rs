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
mod handoffs;
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

use crate::config::{EngineConfig, SchedulingState, VllmConfig};
use crate::kv::{BlockPool, KvCache};
use crate::kv_event::KvEvent;
use crate::metrics::EngineMetrics;
use crate::request::SequenceId;
use crate::time::EngineTime;
use crate::timing::PassTiming;

use super::handoff::HandoffTable;
use super::holds::Holds;
use super::load_queue::LoadQueue;
use super::pass::{Effects, Output, Pass};
use super::remote::{ConnectorCall, TransferReport};
use super::running::RunningList;
use super::sequences::Sequences;
use super::view::SequenceView;
use super::waiting::{Arrivals, WaitingQueue};

/// The core of one engine.
#[derive(Debug)]
pub(crate) struct VllmCore {
    engine: EngineConfig,
    options: VllmConfig,
    timing: Box<dyn PassTiming>,
    kv: KvCache,
    sequences: Sequences,
    arrivals: Arrivals,
    queue: WaitingQueue,
    running: RunningList,
    state: SchedulingState,
    /// The last pass that could have admitted left somebody in the queue (`prefill_schedule_interval`).
    left_waiting: bool,
    /// Ends that no pass has reported yet.
    ended: Vec<SequenceId>,
    /// Ends to be shown that no row of a pass shows.
    ends: Vec<Output>,
    /// Those that wait with blocks.
    loads: LoadQueue,
    /// Those that have ended while their blocks stay.
    holds: Holds,
    handoffs: HandoffTable,
    /// Transfers will free blocks soon.
    expects_frees: bool,
    /// Reports that count when the pass in flight ends.
    reports: Vec<TransferReport>,
    connector_log: Option<Vec<ConnectorCall>>,
    in_flight: bool,
    /// Start and end of the last pass.
    last_pass: Option<(EngineTime, EngineTime)>,
    /// The latest time that was told.
    clock: EngineTime,
    /// The time that was told last, which facts and deadlines go by.
    now: EngineTime,
    /// The counters; the rest is filled in when a snapshot is taken.
    metrics: EngineMetrics,
    /// A snapshot would differ from the last one that was given out.
    unshown: bool,
    spare_pass: Option<Box<Pass>>,
    spare_effects: Option<Box<Effects>>,
}

impl VllmCore {
    /// A core for a configuration that was checked ([`EngineConfig::validate_core`]).
    pub(crate) fn new(engine: &EngineConfig, options: &VllmConfig) -> Self {
        let kv_capacity_tokens = engine.kind.usable_blocks() * u64::from(options.block_size);
        Self {
            timing: engine.timing.build(kv_capacity_tokens),
            kv: KvCache::new(options),
            engine: engine.clone(),
            options: options.clone(),
            sequences: Sequences::default(),
            arrivals: Arrivals::default(),
            queue: WaitingQueue::default(),
            running: RunningList::default(),
            state: SchedulingState::Running,
            left_waiting: false,
            ended: Vec::new(),
            ends: Vec::new(),
            loads: LoadQueue::default(),
            holds: Holds::default(),
            handoffs: HandoffTable::default(),
            expects_frees: false,
            reports: Vec::new(),
            connector_log: None,
            in_flight: false,
            last_pass: None,
            clock: EngineTime::ZERO,
            now: EngineTime::ZERO,
            metrics: EngineMetrics::default(),
            unshown: false,
            spare_pass: None,
            spare_effects: None,
        }
    }

    pub(crate) fn set_timing(&mut self, timing: Box<dyn PassTiming>) {
        self.timing = timing;
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
        if self.in_flight {
            return None;
        }
        self.turn_to(now);
        self.running.sweep(&self.sequences);
        // A boundary comes before the arrivals of its instant.
        let boundary_first = self.last_pass.is_some_and(|(began, ended)| ended == now && began < now);
        self.release_arrivals(now, !boundary_first);
        let mut pass = self.spare_pass.take().unwrap_or_default();
        self.plan(&mut pass);
        // With nothing else to do there is no boundary to come first.
        if pass.rows.is_empty() && pass.preempted.is_empty() && self.release_arrivals(now, true) {
            self.plan(&mut pass);
        }
        if pass.rows.is_empty() && pass.preempted.is_empty() && self.ended.is_empty() {
            pass.clear();
            self.spare_pass = Some(pass);
            return None;
        }
        mem::swap(&mut pass.ended, &mut self.ended);
        pass.number = self.metrics.num_passes;
        pass.started_at = now;
        if !pass.work.is_empty() {
            pass.duration = self.engine.speedup.scale(self.timing.pass_duration(&pass.work));
        }
        self.in_flight = true;
        Some(pass)
    }

    /// Notes the time and does what is due by then.
    fn turn_to(&mut self, now: EngineTime) {
        (self.now, self.clock) = (now, self.clock.max(now));
        self.expire(now);
    }

    pub(crate) fn settle(&mut self, now: EngineTime) -> Option<Box<Effects>> {
        if self.in_flight {
            return None;
        }
        self.turn_to(now);
        if !(self.unshown || !self.kv.events().is_empty() || self.handoffs.has_facts()) {
            return None;
        }
        let mut effects = self.spare_effects.take().unwrap_or_default();
        self.show(&mut effects, now);
        Some(effects)
    }

    pub(crate) fn recycle(&mut self, mut effects: Box<Effects>) {
        effects.clear();
        self.spare_effects = Some(effects);
    }

    pub(crate) fn next_deadline(&self) -> Option<EngineTime> {
        self.arrivals.next().into_iter().chain(self.holds.next_deadline()).min()
    }

    pub(crate) fn has_work(&self) -> bool {
        let runnable = || self.running().any(|sequence| !sequence.throttled);
        let due = || self.arrivals.next().is_some_and(|visible_from| visible_from <= self.clock);
        !self.ended.is_empty()
            || !self.holds.is_empty()
            || match self.state {
                SchedulingState::Running => runnable() || !self.queue.is_empty() || !self.loads.is_empty() || due(),
                SchedulingState::NoNewAdmissions => runnable() || !self.loads.is_empty(),
                SchedulingState::Stopped => false,
            }
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = SequenceView<'_>> + '_ {
        self.running.iter(&self.sequences).map(|handle| self.sequences[handle].view())
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = SequenceView<'_>> + '_ {
        self.queue.iter().map(|handle| self.sequences[handle].view())
    }

    pub(crate) fn loading(&self) -> impl Iterator<Item = SequenceView<'_>> + '_ {
        self.loads.iter().map(|handle| self.sequences[handle].view())
    }

    pub(crate) fn held(&self) -> impl Iterator<Item = SequenceView<'_>> + '_ {
        self.holds.iter().map(|handle| self.sequences[handle].view())
    }

    pub(crate) fn sequence(&self, sequence: SequenceId) -> Option<SequenceView<'_>> {
        self.sequences.find(sequence).map(|handle| self.sequences[handle].view())
    }

    pub(crate) fn handoffs(&self) -> &HandoffTable {
        &self.handoffs
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        self.kv.pool()
    }

    pub(crate) fn kv_events(&self) -> &[KvEvent] {
        self.kv.events()
    }
}
