//! What every engine kind keeps beside its rules: the sequences and where they are, ends that are still to be
//! reported, the counters, and the buffers that go round with passes and effects.

use std::mem;

use crate::config::{EngineConfig, SchedulingState};
use crate::error::CommandError;
use crate::kv::HeldBlocks;
use crate::metrics::{EngineMetrics, KvFetchCounts};
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::time::EngineTime;
use crate::timing::PassTiming;

use super::command::Submission;
use super::handoff::HandoffTable;
use super::holds::Holds;
use super::load_queue::LoadQueue;
use super::pass::{Admitted, Effects, Output, Pass, RowKind};
use super::running::RunningList;
use super::sequence::{Life, Load, Sequence};
use super::sequences::{Handle, Sequences};
use super::view::SequenceView;
use super::waiting::{Arrivals, QueueKey, WaitingQueue};

/// The state of a core that no rule of one engine kind is about; its sequences hold `B`.
#[derive(Debug)]
pub(crate) struct Book<B> {
    pub(crate) engine: EngineConfig,
    pub(crate) timing: Box<dyn PassTiming>,
    pub(crate) sequences: Sequences<B>,
    pub(crate) arrivals: Arrivals,
    pub(crate) queue: WaitingQueue,
    pub(crate) running: RunningList,
    /// Those that wait with blocks.
    pub(crate) loads: LoadQueue,
    /// Those that have ended while their blocks stay.
    pub(crate) holds: Holds,
    pub(crate) handoffs: HandoffTable,
    pub(crate) state: SchedulingState,
    /// The counters; the rest is filled in when a snapshot is taken.
    pub(crate) metrics: EngineMetrics,
    /// Ends that no pass has reported yet.
    ended: Vec<SequenceId>,
    /// Ends to be shown that no row of a pass shows.
    ends: Vec<Output>,
    in_flight: bool,
    /// Start and end of the last pass.
    last_pass: Option<(EngineTime, EngineTime)>,
    /// The latest time that was told.
    clock: EngineTime,
    /// The time that was told last, which facts and deadlines go by.
    now: EngineTime,
    /// A snapshot would differ from the last one that was given out.
    unshown: bool,
    spare_pass: Option<Box<Pass>>,
    spare_effects: Option<Box<Effects>>,
}

/// What a snapshot says of the batch and of the KV pool, whose use is counted in blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) num_running: u64,
    pub(crate) usable: u64,
    pub(crate) used: u64,
    pub(crate) cached: u64,
}

impl<B: HeldBlocks> Book<B> {
    pub(crate) fn new(engine: &EngineConfig) -> Self {
        let kv_capacity_tokens = engine.kind.usable_blocks() * u64::from(engine.kind.block_size());
        Self {
            timing: engine.timing.build(kv_capacity_tokens),
            engine: engine.clone(),
            sequences: Sequences::default(),
            arrivals: Arrivals::default(),
            queue: WaitingQueue::default(),
            running: RunningList::default(),
            loads: LoadQueue::default(),
            holds: Holds::default(),
            handoffs: HandoffTable::default(),
            state: SchedulingState::Running,
            metrics: EngineMetrics::default(),
            ended: Vec::new(),
            ends: Vec::new(),
            in_flight: false,
            last_pass: None,
            clock: EngineTime::ZERO,
            now: EngineTime::ZERO,
            unshown: false,
            spare_pass: None,
            spare_effects: None,
        }
    }

    /// The time that was told last.
    pub(crate) fn now(&self) -> EngineTime {
        self.now
    }

    /// Notes what time it is.
    pub(crate) fn hear(&mut self, now: EngineTime) {
        (self.now, self.clock) = (now, self.clock.max(now));
    }

    /// Whether a pass is in flight.
    pub(crate) fn in_flight(&self) -> bool {
        self.in_flight
    }

    /// Says that a snapshot would differ from the last one.
    pub(crate) fn note_change(&mut self) {
        self.unshown = true;
    }

    /// Whether a request can be taken in.
    pub(crate) fn check(&self, submission: &Submission) -> Result<(), CommandError> {
        if self.sequences.find(submission.sequence).is_some() {
            return Err(CommandError::DuplicateSequence(submission.sequence));
        }
        Ok(submission.request.validate_core(&self.engine)?)
    }

    /// Takes a request in that was checked; it waits for its arrival.
    pub(crate) fn enter(&mut self, submission: Submission, now: EngineTime) -> Handle {
        let arrival = submission.request.arrival.unwrap_or(now);
        let key = self.arrivals.place(arrival.max(now));
        let handle = self.sequences.insert(Sequence::new(submission, &self.engine, arrival, key));
        self.arrivals.insert(key, handle);
        handle
    }

    /// A sequence that has not ended.
    pub(crate) fn alive(&self, sequence: SequenceId) -> Option<Handle> {
        let handle = self.sequences.find(sequence)?;
        (!matches!(self.sequences[handle].life, Life::Ended { .. })).then_some(handle)
    }

    /// Leaves a sequence out of passes, or takes it back in: one that waits stands aside.
    pub(crate) fn throttle(&mut self, sequence: SequenceId, throttled: bool) -> Result<(), CommandError> {
        let handle = self.alive(sequence).ok_or(CommandError::UnknownSequence(sequence))?;
        let sequence = &mut self.sequences[handle];
        sequence.throttled = throttled && !sequence.cancelled;
        sequence.quiet_until = 0;
        match (sequence.life, throttled) {
            (Life::Queued { key, deferred }, true) => {
                self.queue.count_deferred(deferred, false);
                self.queue.remove(&key);
                sequence.life = Life::Aside { key };
            }
            (Life::Aside { key }, false) => {
                self.queue.insert(key, handle);
                sequence.life = Life::Queued { key, deferred: false };
            }
            (Life::Loading { key, load: Load::Done | Load::Tried }, _) => self.loads.set_ready(key, handle, !throttled),
            _ => {}
        }
        Ok(())
    }

    /// Puts a sequence into its place in the queue, or beside it.
    pub(crate) fn enter_queue(&mut self, handle: Handle, key: QueueKey) {
        let sequence = &mut self.sequences[handle];
        self.queue.tokens_mut(sequence.was_preempted()).add(u64::from(sequence.num_tokens()));
        self.queue.count_wanting(false, sequence.wants_copy());
        if sequence.throttled {
            sequence.life = Life::Aside { key };
        } else {
            sequence.life = Life::Queued { key, deferred: false };
            self.queue.insert(key, handle);
        }
        self.unshown = true;
    }

    /// Takes a sequence out of the queue, or from beside it. Its new life is the caller's to set.
    pub(crate) fn leave_queue(&mut self, handle: Handle) {
        let sequence = &self.sequences[handle];
        self.queue.tokens_mut(sequence.was_preempted()).remove(u64::from(sequence.num_tokens()));
        match sequence.life {
            Life::Queued { key, deferred } => {
                self.queue.count_deferred(deferred, false);
                self.queue.count_wanting(sequence.wants_copy(), false);
                self.queue.remove(&key);
            }
            Life::Aside { .. } => self.queue.count_wanting(sequence.wants_copy(), false),
            Life::Arriving { .. } | Life::Loading { .. } | Life::Running | Life::Ended { .. } => {}
        }
    }

    /// Counts a look-up that led to blocks.
    pub(crate) fn count_look_up(&mut self, handle: Handle, hits: u32, pass: &mut Pass) {
        let sequence = &self.sequences[handle];
        let (preempted, tokens, hits) = (sequence.was_preempted(), u64::from(sequence.num_tokens()), u64::from(hits));
        pass.prefix_cache.count(preempted, tokens, hits);
        self.metrics.prefix_cache.count(preempted, tokens, hits);
    }

    /// Notes that the load of a sequence has ended: it is tried when the next pass is planned.
    pub(crate) fn end_load(&mut self, handle: Handle) {
        let sequence = &mut self.sequences[handle];
        if let Life::Loading { key, load: load @ Load::InFlight } = &mut sequence.life {
            *load = Load::Done;
            self.loads.landed();
            self.loads.set_ready(*key, handle, !sequence.throttled);
            self.unshown = true;
        }
    }

    /// Makes a sequence, the KV of so many of whose tokens is there, part of a pass. Its place among the
    /// running ones is the caller's to give.
    pub(crate) fn enter_batch(&mut self, handle: Handle, present: u32, pass: &mut Pass) -> RowKind {
        let sequence = &mut self.sequences[handle];
        sequence.life = Life::Running;
        sequence.num_computed = present;
        note_admission(sequence, &mut self.metrics, pass)
    }

    /// Counts the end of a sequence, which the next pass reports.
    pub(crate) fn note_end(&mut self, sequence: SequenceId, finish: FinishReason) {
        let finished = &mut self.metrics.finished;
        *match finish {
            FinishReason::Stop { .. } => &mut finished.stop,
            FinishReason::Length => &mut finished.length,
            FinishReason::OutOfMemory => &mut finished.out_of_memory,
            FinishReason::TransferFailed => &mut finished.transfer_failed,
            _ => &mut finished.aborted,
        } += 1;
        self.ended.push(sequence);
        self.unshown = true;
    }

    /// Removes a sequence that holds nothing any more, and counts its end.
    pub(crate) fn remove(&mut self, handle: Handle, finish: FinishReason) {
        self.sequences.remove(handle);
        self.note_end(handle.sequence, finish);
    }

    /// Shows the end of a sequence that no row of a pass shows.
    pub(crate) fn show_end(&mut self, sequence: SequenceId, finish: FinishReason) {
        self.ends.push(Output { sequence, token: None, finish: Some(finish), prefill: None });
    }

    /// A pass to plan; `None` while one is in flight.
    pub(crate) fn open_pass(&mut self) -> Option<Box<Pass>> {
        (!self.in_flight).then(|| self.spare_pass.take().unwrap_or_default())
    }

    /// Whether a pass that begins now sees the arrivals of this very instant: a boundary comes before them.
    pub(crate) fn sees_ties(&self, now: EngineTime) -> bool {
        !self.last_pass.is_some_and(|(began, ended)| ended == now && began < now)
    }

    /// When the last pass ended.
    pub(crate) fn last_end(&self) -> Option<EngineTime> {
        self.last_pass.map(|(_, ended)| ended)
    }

    /// Sets a planned pass in flight; `None` if it would do nothing.
    pub(crate) fn launch(&mut self, mut pass: Box<Pass>, now: EngineTime) -> Option<Box<Pass>> {
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

    /// Lands a pass: the effects to fill, with the ends that were there before it.
    pub(crate) fn land(&mut self, pass: &Pass, now: EngineTime) -> Box<Effects> {
        debug_assert!(self.in_flight, "a pass is finished once, by the scheduler that began it");
        self.in_flight = false;
        self.hear(now);
        self.last_pass = Some((pass.started_at, now));
        let mut effects = self.spare_effects.take().unwrap_or_default();
        effects.outputs.append(&mut self.ends);
        effects
    }

    /// Puts the metrics of a pass into its effects; its buffers are used again.
    pub(crate) fn close_pass(&mut self, mut pass: Box<Pass>, effects: &mut Effects, now: EngineTime) {
        if !pass.is_empty() {
            self.metrics.num_passes += 1;
            effects.pass = Some(pass.metrics(&self.queue, now));
        }
        pass.clear();
        self.spare_pass = Some(pass);
    }

    /// Effects for what changed outside a pass; `None` while one is in flight, or if nothing changed.
    pub(crate) fn open_settlement(&mut self, has_events: bool) -> Option<Box<Effects>> {
        let is_due = !self.in_flight && (self.unshown || has_events || self.handoffs.has_facts());
        is_due.then(|| self.spare_effects.take().unwrap_or_default())
    }

    /// Completes effects: the ends and facts that are still to be shown, and the state at this boundary.
    pub(crate) fn show(&mut self, effects: &mut Effects, usage: Usage, now: EngineTime) {
        effects.at = now;
        effects.outputs.append(&mut self.ends);
        self.handoffs.take_facts(&mut effects.facts);
        effects.metrics = self.snapshot(usage, now);
        self.unshown = false;
    }

    fn snapshot(&self, usage: Usage, now: EngineTime) -> EngineMetrics {
        let (loads, in_progress) = (self.loads.len(), self.loads.num_in_flight());
        EngineMetrics {
            at: now,
            num_requests_running: usage.num_running,
            num_requests_waiting: self.queue.num_waiting(),
            num_requests_deferred: self.queue.num_deferred() + loads,
            kv_fetch: KvFetchCounts {
                waiting_to_start: self.queue.num_wanting(),
                in_progress,
                completed_waiting: loads - in_progress,
            },
            num_requests_held: self.holds.len() as u64,
            num_usable_blocks: usage.usable,
            num_used_blocks: usage.used,
            num_held_blocks: self.holds.num_blocks(),
            num_reserved_blocks: self.loads.total().held,
            num_cached_blocks: usage.cached,
            kv_cache_usage: usage.used as f64 / usage.usable as f64,
            ..self.metrics
        }
    }

    /// Takes the buffers of effects back.
    pub(crate) fn recycle(&mut self, mut effects: Box<Effects>) {
        effects.clear();
        self.spare_effects = Some(effects);
    }

    /// When something is due although nothing arrives.
    pub(crate) fn next_deadline(&self) -> Option<EngineTime> {
        self.arrivals.next().into_iter().chain(self.holds.next_deadline()).min()
    }

    /// Whether an engine loop would call the scheduler, given whether something in the batch can run.
    pub(crate) fn has_work(&self, runnable: bool) -> bool {
        let due = || self.arrivals.next().is_some_and(|visible_from| visible_from <= self.clock);
        let runnable = runnable || !self.loads.is_empty();
        !self.ended.is_empty()
            || !self.holds.is_empty()
            || match self.state {
                SchedulingState::Running => runnable || !self.queue.is_empty() || due(),
                SchedulingState::NoNewAdmissions => runnable,
                SchedulingState::Stopped => false,
            }
    }

    /// One sequence, for those who look inside.
    pub(crate) fn sequence(&self, sequence: SequenceId) -> Option<SequenceView<'_>> {
        self.sequences.find(sequence).map(|handle| self.sequences[handle].view())
    }

    /// Some sequences, likewise. Boxed: its callers show them for every engine kind.
    pub(crate) fn look<'a>(
        &'a self,
        handles: impl Iterator<Item = Handle> + 'a,
    ) -> Box<dyn Iterator<Item = SequenceView<'a>> + 'a> {
        Box::new(handles.map(|handle| self.sequences[handle].view()))
    }
}

/// Shows that a sequence comes into a pass for the first time, if it does.
pub(crate) fn note_admission<B>(sequence: &mut Sequence<B>, metrics: &mut EngineMetrics, pass: &mut Pass) -> RowKind {
    if mem::replace(&mut sequence.admitted, true) {
        return RowKind::Resumed;
    }
    metrics.prompt_tokens += u64::from(sequence.num_prompt);
    pass.admitted.push(Admitted { sequence: sequence.id, cached_tokens: sequence.num_cached });
    RowKind::New
}
