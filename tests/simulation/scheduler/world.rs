//! One workload, driven through two cores and the model at once.
//!
//! The second core gets its prompts from lazy sources and its buffers back; neither may make a difference. All
//! three see the same operations, and after each of them everything that can be seen is compared.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::sample::Index;
use standin::{
    Applied, BlockHash, Cancelled, Command, CommandError, Effects, EngineConfig, EngineMetrics, EngineTime, Pass,
    Prompt, PromptSource, Request, Scheduler, SchedulingState, SequenceId, Submission, TieVictim, VllmConfig,
    VllmPolicy,
};

use super::event_replay::EventReplay;
use super::invariants;
use super::ledger::{self, Ledger};
use super::model::{Entry, Model, Planned};
use super::workload::{Operation, PASS_NANOS, RequestShape, Workload};
use crate::trace::Trace;

/// A prompt that is made when asked for.
#[derive(Debug)]
struct LazyTokens(Vec<u32>);

impl PromptSource for LazyTokens {
    fn num_tokens(&self) -> usize {
        self.0.len()
    }

    fn fill(&self, start: usize, out: &mut [u32]) {
        out.copy_from_slice(&self.0[start..start + out.len()]);
    }
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: EngineConfig,
    pub(crate) core: Scheduler,
    twin: Scheduler,
    pub(crate) model: Model,
    pub(crate) ledger: Ledger,
    /// If events are recorded.
    events: Option<EventReplay>,
    last_shown: EngineMetrics,
    pub(crate) now: EngineTime,
    /// The latest time that the cores were told.
    told: EngineTime,
    in_flight: Option<(Pass, Pass)>,
    submitted: Vec<SequenceId>,
    /// What the core calls each content that the model has a name for, and back.
    hashes: BTreeMap<usize, BlockHash>,
    names: BTreeMap<BlockHash, usize>,
    pub(crate) trace: Trace,
}

impl World {
    pub(crate) fn new(workload: &Workload, trace: Trace) -> Self {
        let core = || {
            let core = Scheduler::new(&workload.config).expect("a configuration that the core takes");
            if workload.kv_events { core.with_kv_events() } else { core }
        };
        Self {
            config: workload.config.clone(),
            core: core(),
            twin: core(),
            model: Model::new(workload.options.clone()),
            ledger: Ledger::new(&workload.config, workload.options.enable_prefix_caching),
            events: workload.kv_events.then(EventReplay::default),
            last_shown: EngineMetrics::default(),
            // Room for what was sent before.
            now: EngineTime::from_nanos(10 * PASS_NANOS),
            told: EngineTime::ZERO,
            in_flight: None,
            submitted: Vec::new(),
            hashes: BTreeMap::new(),
            names: BTreeMap::new(),
            trace,
        }
    }

    pub(crate) fn perform(&mut self, operation: &Operation) {
        match operation {
            Operation::Submit(shape) => self.submit(shape),
            Operation::SubmitAgain(index) => self.submit_again(*index),
            Operation::Cancel(index) => self.pick(*index).into_iter().for_each(|id| self.cancel(id)),
            Operation::Throttle(index, throttled) => {
                self.pick(*index).into_iter().for_each(|id| self.throttle(id, *throttled));
            }
            Operation::Reset { reset_running_requests } => self.reset(*reset_running_requests),
            Operation::SetScheduling(state) => self.set_scheduling(*state),
            Operation::BeginPass => self.begin_pass(),
            Operation::FinishPass { late_nanos } => self.finish_pass(Duration::from_nanos(*late_nanos)),
            Operation::Pass => {
                self.begin_pass();
                self.finish_pass(Duration::ZERO);
            }
            Operation::Settle => self.settle(),
            Operation::Wait { nanos } if self.in_flight.is_none() => self.now = self.now + Duration::from_nanos(*nanos),
            Operation::Wait { .. } => {}
        }
        invariants::check(self);
    }

    /// Whether every request is certain to end. Not where outgrown ones wait for ever, and not where of two that
    /// are equal in priority and arrival the first is preempted: they can take each other's blocks for ever.
    pub(crate) fn must_drain(&self, options: &VllmConfig) -> bool {
        let mut ranks: Vec<_> =
            self.model.sequences.values().map(|one| (one.entry.priority, one.entry.arrival)).collect();
        ranks.sort_unstable();
        let are_distinct = ranks.windows(2).all(|pair| pair[0] != pair[1]);
        let first_gets_on = options.policy == VllmPolicy::Fcfs || options.tie_victim == TieVictim::Last;
        options.end_outgrown_requests && (first_gets_on || are_distinct)
    }

    /// Lets everything run to its end.
    pub(crate) fn drain(&mut self, prefill_schedule_interval: u32) {
        self.finish_pass(Duration::ZERO);
        self.set_scheduling(SchedulingState::Running);
        for id in self.live() {
            self.throttle(id, false);
        }
        let mut passes_left = self.ledger.bound_on_passes(prefill_schedule_interval);
        while !self.live().is_empty() {
            self.now = self.core.next_deadline().unwrap_or(self.now).max(self.now);
            self.begin_pass();
            invariants::check(self);
            passes_left = passes_left.checked_sub(1).expect("no request waits for ever");
            self.finish_pass(Duration::ZERO);
            invariants::check(self);
        }
    }

    /// Cancels everything.
    pub(crate) fn clear(&mut self) {
        self.finish_pass(Duration::ZERO);
        self.set_scheduling(SchedulingState::Running);
        for id in self.live() {
            self.cancel(id);
        }
        self.begin_pass();
        self.finish_pass(Duration::ZERO);
        invariants::check(self);
    }

    /// The engine's state as it was shown last.
    pub(crate) fn last_shown(&self) -> &EngineMetrics {
        &self.last_shown
    }

    pub(crate) fn live(&self) -> Vec<SequenceId> {
        self.model.sequences.keys().copied().collect()
    }

    /// A live sequence, or the first one that was submitted.
    fn pick(&self, index: Index) -> Option<SequenceId> {
        let mut candidates = self.live();
        candidates.extend(self.submitted.first());
        (!candidates.is_empty()).then(|| *index.get(&candidates))
    }

    fn shifted(&self, nanos: i64) -> EngineTime {
        EngineTime::from_nanos(self.now.as_nanos().saturating_add_signed(nanos))
    }

    fn command(&mut self, command: Command, now: EngineTime) -> Result<Applied, CommandError> {
        self.told = self.told.max(now);
        let answer = self.core.apply(command.clone(), now);
        assert_eq!(self.twin.apply(command, now), answer);
        self.trace.note(&answer);
        answer
    }

    fn submit(&mut self, shape: &RequestShape) {
        // Not ascending: a prepared request can be overtaken.
        let id = SequenceId(self.submitted.len() as u64 ^ 5);
        let sent = self.shifted(shape.sent_nanos);
        self.told = self.told.max(sent);
        let mut request = shape.request();
        request.arrival = shape.arrival_nanos.map(|nanos| self.shifted(nanos));
        let mut lazy = request.clone();
        lazy.prompt = Prompt::Lazy(Arc::new(LazyTokens(shape.prompt())));
        let submission = |request| Command::Submit(Submission { sequence: id, tie_key: shape.tie_key, request });
        let answer = self.core.apply(submission(request.clone()), sent);
        assert_eq!(self.twin.apply(submission(lazy), sent), answer);
        if let Some(refused) = ledger::refusal(&request, &self.config) {
            assert_eq!(answer, Err(CommandError::Request(refused)));
            return;
        }
        assert_eq!(answer, Ok(Applied::Submitted));
        self.submitted.push(id);
        let (answer, finish) = ledger::answer(&request, shape.tie_key, &self.config);
        let arrival = request.arrival.unwrap_or(sent);
        let entry = Entry {
            prompt: shape.prompt(),
            answer,
            finish,
            identity: shape.identity.clone(),
            priority: shape.priority,
            arrival,
            visible_from: arrival.max(sent),
            tie_key: shape.tie_key,
            reads_cache: !request.skip_reading_prefix_cache,
        };
        self.model.submit(id, entry);
        self.ledger.accepted(id, request, shape.tie_key, sent);
    }

    fn submit_again(&mut self, index: Index) {
        let live = self.live();
        if let Some(&sequence) = (!live.is_empty()).then(|| index.get(&live)) {
            let request = Request::new(vec![0], 1);
            let answer = self.command(Command::Submit(Submission { sequence, tie_key: 0, request }), self.now);
            assert_eq!(answer, Err(CommandError::DuplicateSequence(sequence)));
        }
    }

    fn cancel(&mut self, id: SequenceId) {
        let answer = self.core.cancel(id, self.now);
        assert_eq!(self.twin.cancel(id, self.now), answer);
        if self.model.remove(id) {
            assert_eq!(answer, Cancelled::Removed);
            self.ledger.cancelled(id);
        } else {
            assert_eq!(answer, Cancelled::Unknown);
        }
    }

    fn throttle(&mut self, sequence: SequenceId, throttled: bool) {
        let answer = self.command(Command::Throttle { sequence, throttled }, self.now);
        match self.model.sequences.get_mut(&sequence) {
            Some(known) => {
                known.throttled = throttled;
                assert_eq!(answer, Ok(Applied::ThrottleSet));
            }
            None => assert_eq!(answer, Err(CommandError::UnknownSequence(sequence))),
        }
    }

    fn reset(&mut self, reset_running_requests: bool) {
        let answer = self.command(Command::ResetPrefixCache { reset_running_requests }, self.now);
        let (reset, preempted) = self.model.reset(reset_running_requests);
        self.ledger.preempted_by_reset(preempted.len());
        assert_eq!(answer, Ok(Applied::PrefixCacheReset { reset, preempted }));
    }

    fn set_scheduling(&mut self, state: SchedulingState) {
        assert_eq!(self.command(Command::SetScheduling(state), self.now), Ok(Applied::SchedulingSet));
        self.model.state = state;
    }

    fn begin_pass(&mut self) {
        // Work is what could be done by the latest time that was told.
        let idle = !self.core.view().has_work() && self.now <= self.told;
        self.told = self.told.max(self.now);
        let (pass, twin) = (self.core.begin_pass(self.now), self.twin.begin_pass(self.now));
        self.trace.note(&pass);
        if self.in_flight.is_some() {
            assert!(pass.is_none() && twin.is_none(), "one pass at a time");
            return;
        }
        let planned = self.model.begin(self.now);
        assert_eq!(pass.is_some(), planned.is_some(), "{pass:?} instead of {planned:?}");
        assert_eq!(pass.is_some(), twin.is_some());
        invariants::check_work_is_conserved(self, pass.as_ref());
        let (Some(pass), Some(twin), Some(planned)) = (pass, twin, planned) else { return };
        assert!(!idle, "there was work: {pass:?}");
        assert_eq!((pass.rows(), pass.preempted(), pass.ended()), (twin.rows(), twin.preempted(), twin.ended()));
        assert_eq!((pass.admitted(), pass.ends_at()), (twin.admitted(), twin.ends_at()));
        assert_planned(&pass, &planned);
        self.ledger.began(&pass);
        self.in_flight = Some((pass, twin));
    }

    fn finish_pass(&mut self, late: Duration) {
        let Some((pass, twin)) = self.in_flight.take() else { return };
        let end = pass.ends_at() + late;
        self.now = self.now.max(end);
        let computed = pass.rows().iter().map(|row| u64::from(row.new_tokens)).sum();
        self.told = self.told.max(self.now);
        let (effects, twin_effects) = (self.core.finish_pass(pass, self.now), self.twin.finish_pass(twin, self.now));
        let outputs = effects.outputs.iter().map(|output| (output.sequence, output.token, output.finish));
        assert_eq!(outputs.collect::<Vec<_>>(), self.model.finish(self.now));
        self.show(effects, twin_effects, Some(computed));
    }

    fn settle(&mut self) {
        if self.in_flight.is_none() {
            self.model.settle(self.now);
        }
        match (self.core.settle(self.now), self.twin.settle(self.now)) {
            (Some(effects), Some(twin)) => {
                assert!(self.in_flight.is_none(), "a pass in flight shows everything at its end");
                assert!(effects.outputs.is_empty(), "outputs are made by passes");
                self.show(effects, twin, None);
            }
            (None, None) if self.in_flight.is_none() => invariants::check_metrics(self, &self.last_shown),
            (None, None) => {}
            different => panic!("{different:?}"),
        }
        assert!(self.core.settle(self.now).is_none() && self.twin.settle(self.now).is_none(), "nothing is shown twice");
    }

    fn show(&mut self, effects: Effects, twin: Effects, computed_tokens: Option<u64>) {
        self.trace.note(&effects);
        assert_eq!((&effects.kv_events, &effects.outputs), (&twin.kv_events, &twin.outputs));
        assert_eq!((effects.at, effects.pass, effects.metrics), (twin.at, twin.pass, twin.metrics));
        match &mut self.events {
            Some(replay) => {
                for event in &effects.kv_events {
                    replay.take(event);
                    self.ledger.stored(event);
                }
                replay.assert_equals(self.core.view().pool());
            }
            None => assert!(effects.kv_events.is_empty()),
        }
        self.ledger.shown(&effects, computed_tokens);
        invariants::check_metrics(self, &effects.metrics);
        self.last_shown = effects.metrics;
        self.twin.recycle(twin);
    }

    /// That the core's hash of a content stands for that content alone.
    pub(crate) fn assert_same_content(&mut self, name: usize, hash: BlockHash) {
        assert_eq!(*self.hashes.entry(name).or_insert(hash), hash, "one content, two hashes");
        assert_eq!(*self.names.entry(hash).or_insert(name), name, "two contents, one hash");
    }
}

fn assert_planned(pass: &Pass, planned: &Planned) {
    let rows = pass.rows().iter().map(|row| (row.sequence, row.new_tokens as usize, row.computed_before as usize));
    let expected = planned.rows.iter().map(|row| (row.sequence, row.tokens, row.computed_before));
    assert_eq!(rows.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    assert_eq!((pass.preempted(), pass.ended()), (&planned.preempted[..], &planned.ended[..]));
}
