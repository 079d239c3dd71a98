//! What the core keeps beside its rules: the sequences and where they are, ends that are still to be reported,
//! the counters, and the buffers that go round with passes and effects.

use std::mem;

use crate::config::{EngineConfig, SchedulingState};
use crate::error::CommandError;
use crate::kv::SequencePages;
use crate::metrics::EngineMetrics;
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::time::EngineTime;
use crate::timing::PassTiming;

use crate::scheduler::command::{Applied, ApplyResult, Submission};
use crate::scheduler::pass::{Effects, Output, Pass};
use crate::scheduler::sequence::{Life, Sequence};
use crate::scheduler::sequences::{Handle, Sequences};
use crate::scheduler::waiting::{Arrivals, QueueKey, WaitingQueue};

/// The state that no rule of SGLang's is about.
#[derive(Debug)]
pub(super) struct Book {
    pub(super) engine: EngineConfig,
    pub(super) sequences: Sequences<SequencePages>,
    pub(super) arrivals: Arrivals,
    pub(super) queue: WaitingQueue,
    pub(super) state: SchedulingState,
    /// The counters; the rest is filled in when a snapshot is taken.
    pub(super) metrics: EngineMetrics,
    pub(super) timing: Box<dyn PassTiming>,
    /// Ends that no pass has reported yet.
    ended: Vec<SequenceId>,
    /// Ends that the next effects will show before all else: planning or a command made them.
    due_outputs: Vec<Output>,
    in_flight: bool,
    /// Start and end of the last pass.
    last_pass: Option<(EngineTime, EngineTime)>,
    /// The latest time that was told.
    clock: EngineTime,
    /// A snapshot would differ from the last one that was given out.
    unshown: bool,
    spare_pass: Option<Box<Pass>>,
    spare_effects: Option<Box<Effects>>,
}

/// What a snapshot says of the batch and of the KV pool, whose use is counted in blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Usage {
    pub(super) num_running: u64,
    pub(super) usable: u64,
    pub(super) used: u64,
    pub(super) cached: u64,
}

impl Book {
    pub(super) fn new(engine: &EngineConfig) -> Self {
        let kv_capacity_tokens = engine.kind.usable_blocks() * u64::from(engine.kind.block_size());
        Self {
            timing: engine.timing.build(kv_capacity_tokens),
            engine: engine.clone(),
            sequences: Sequences::default(),
            arrivals: Arrivals::default(),
            queue: WaitingQueue::default(),
            state: SchedulingState::Running,
            metrics: EngineMetrics::default(),
            ended: Vec::new(),
            due_outputs: Vec::new(),
            in_flight: false,
            last_pass: None,
            clock: EngineTime::ZERO,
            unshown: false,
            spare_pass: None,
            spare_effects: None,
        }
    }

    /// Notes what time it is.
    pub(super) fn hear(&mut self, now: EngineTime) {
        self.clock = self.clock.max(now);
    }

    /// Says that a snapshot would differ from the last one.
    pub(super) fn note_change(&mut self) {
        self.unshown = true;
    }

    /// Takes a request in; it waits for its arrival.
    pub(super) fn submit(&mut self, submission: Submission, now: EngineTime) -> Result<Handle, CommandError> {
        let id = submission.sequence;
        if self.sequences.find(id).is_some() {
            return Err(CommandError::DuplicateSequence(id));
        }
        submission.request.validate_core(&self.engine)?;
        let arrival = submission.request.arrival.unwrap_or(now);
        let key = self.arrivals.place(arrival.max(now));
        let handle = self.sequences.insert(Sequence::new(submission, &self.engine, arrival, key));
        self.arrivals.insert(key, handle);
        Ok(handle)
    }

    /// Leaves a sequence out of the queue, or takes it back in.
    pub(super) fn throttle(&mut self, sequence: SequenceId, throttled: bool) -> ApplyResult {
        let handle = self.sequences.find(sequence).ok_or(CommandError::UnknownSequence(sequence))?;
        let sequence = &mut self.sequences[handle];
        sequence.throttled = throttled && !sequence.cancelled;
        match (sequence.life, throttled) {
            (Life::Queued { key, .. }, true) => {
                self.queue.remove(&key);
                sequence.life = Life::Aside { key };
            }
            (Life::Aside { key }, false) => {
                self.queue.insert(key, handle);
                sequence.life = Life::Queued { key, deferred: false };
            }
            _ => {}
        }
        Ok(Applied::ThrottleSet)
    }

    /// Puts a sequence into its place in the queue, or beside it.
    pub(super) fn enter_queue(&mut self, handle: Handle, key: QueueKey) {
        let sequence = &mut self.sequences[handle];
        self.queue.tokens_mut(sequence.was_preempted()).add(u64::from(sequence.num_tokens()));
        if sequence.throttled {
            sequence.life = Life::Aside { key };
        } else {
            sequence.life = Life::Queued { key, deferred: false };
            self.queue.insert(key, handle);
        }
        self.unshown = true;
    }

    /// Takes a sequence out of the queue, or from beside it. Its new life is the caller's to set.
    pub(super) fn leave_queue(&mut self, handle: Handle) {
        let sequence = &self.sequences[handle];
        self.queue.tokens_mut(sequence.was_preempted()).remove(u64::from(sequence.num_tokens()));
        if let Life::Queued { key, .. } = sequence.life {
            self.queue.remove(&key);
        }
    }

    /// Removes a sequence that holds nothing any more, and notes its end for the next pass.
    pub(super) fn remove(&mut self, handle: Handle) {
        self.sequences.remove(handle);
        self.ended.push(handle.sequence);
        self.unshown = true;
    }

    /// Removes a sequence that holds nothing any more, for a reason that the next effects will show.
    pub(super) fn end(&mut self, handle: Handle, finish: FinishReason) {
        self.remove(handle);
        self.due_outputs.push(Output { sequence: handle.sequence, token: None, finish: Some(finish), prefill: None });
    }

    /// A pass to plan that begins now; `None` while one is in flight.
    pub(super) fn open_pass(&mut self, now: EngineTime) -> Option<Box<Pass>> {
        if self.in_flight {
            return None;
        }
        self.hear(now);
        Some(self.spare_pass.take().unwrap_or_default())
    }

    /// Whether a pass that begins now sees the arrivals of this very instant: a boundary comes before them.
    pub(super) fn sees_ties(&self, now: EngineTime) -> bool {
        !self.last_pass.is_some_and(|(began, ended)| ended == now && began < now)
    }

    /// When the last pass ended.
    pub(super) fn last_end(&self) -> Option<EngineTime> {
        self.last_pass.map(|(_, ended)| ended)
    }

    /// Sets a planned pass in flight; `None` if it would do nothing.
    pub(super) fn launch(&mut self, mut pass: Box<Pass>, now: EngineTime) -> Option<Box<Pass>> {
        if pass.rows.is_empty() && pass.preempted.is_empty() && self.ended.is_empty() {
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

    /// Lands a pass: the effects to fill.
    pub(super) fn land(&mut self, pass: &Pass, now: EngineTime) -> Box<Effects> {
        debug_assert!(self.in_flight, "a pass is finished once, by the scheduler that began it");
        self.in_flight = false;
        self.hear(now);
        self.last_pass = Some((pass.started_at, now));
        let mut effects = self.spare_effects.take().unwrap_or_default();
        effects.outputs.append(&mut self.due_outputs);
        effects
    }

    /// Completes the effects of a pass, whose buffers are used again.
    pub(super) fn close_pass(&mut self, mut pass: Box<Pass>, effects: &mut Effects, usage: Usage, now: EngineTime) {
        self.metrics.prefix_cache.add(&pass.prefix_cache);
        if !pass.is_empty() {
            self.metrics.num_passes += 1;
            effects.pass = Some(pass.metrics(&self.queue, now));
        }
        self.show(effects, usage, now);
        pass.clear();
        self.spare_pass = Some(pass);
    }

    /// Effects for what changed outside a pass; `None` if nothing did.
    pub(super) fn open_settlement(&mut self, now: EngineTime, has_events: bool) -> Option<Box<Effects>> {
        self.hear(now);
        if self.in_flight || !(self.unshown || has_events) {
            return None;
        }
        let mut effects = self.spare_effects.take().unwrap_or_default();
        effects.outputs.append(&mut self.due_outputs);
        Some(effects)
    }

    /// Puts the state at this boundary into effects.
    pub(super) fn show(&mut self, effects: &mut Effects, usage: Usage, now: EngineTime) {
        effects.at = now;
        effects.metrics = EngineMetrics {
            at: now,
            num_requests_running: usage.num_running,
            num_requests_waiting: self.queue.num_waiting(),
            num_usable_blocks: usage.usable,
            num_used_blocks: usage.used,
            num_cached_blocks: usage.cached,
            kv_cache_usage: usage.used as f64 / usage.usable as f64,
            ..self.metrics
        };
        self.unshown = false;
    }

    /// Takes the buffers of effects back.
    pub(super) fn recycle(&mut self, mut effects: Box<Effects>) {
        effects.clear();
        self.spare_effects = Some(effects);
    }

    /// Whether an engine loop would call the scheduler, given whether something in the batch can run.
    pub(super) fn has_work(&self, runnable: bool) -> bool {
        let due = || self.arrivals.next().is_some_and(|visible_from| visible_from <= self.clock);
        !self.ended.is_empty()
            || match self.state {
                SchedulingState::Running => runnable || !self.queue.is_empty() || due(),
                SchedulingState::NoNewAdmissions => runnable,
                SchedulingState::Stopped => false,
            }
    }
}
