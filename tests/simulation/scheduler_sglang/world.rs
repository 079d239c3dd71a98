//! One workload, driven through a core and, where it predicts the workload, the model.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::sample::Index;
use standin::{
    Applied, Cancelled, Command, CommandError, Effects, EngineConfig, EngineMetrics, EngineTime, FinishReason,
    OutputPlan, Pass, Request, RowKind, Scheduler, SchedulingState, SequenceId, SequenceStatus, SglangConfig,
    SglangPolicy, Submission,
};

use crate::scheduler::event_replay::EventReplay;
use crate::scheduler::ledger;
use crate::scheduler::workload::PASS_NANOS;
use crate::trace::Trace;

use super::invariants;
use super::model::{Entry, Model, Planned};
use super::workload::{Operation, Shape, Workload};

/// Boundaries from one look at every page to the next: each page that is looked at costs a walk of the core's tree.
const LOOK_EVERY: u32 = 16;

/// What a request was promised, and what came of it.
#[derive(Debug)]
pub(crate) struct Account {
    answer: Vec<u32>,
    finish: FinishReason,
    pub(crate) visible_from: EngineTime,
    produced: usize,
    /// How it ended; a cancelled one without an output.
    end: Option<FinishReason>,
    /// A pass has reported that it is gone.
    reported: bool,
}

/// How often what the workloads are about has happened.
#[derive(Debug, Default)]
pub(crate) struct Met {
    pub(crate) retractions: u32,
    pub(crate) chunks: u32,
    pub(crate) mixed: u32,
    pub(crate) put_off: u32,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: EngineConfig,
    pub(crate) options: SglangConfig,
    pub(crate) core: Scheduler,
    pub(crate) model: Option<Model>,
    pub(crate) accounts: BTreeMap<SequenceId, Account>,
    pub(crate) now: EngineTime,
    pub(crate) state: SchedulingState,
    pub(crate) met: Met,
    pub(crate) metrics: EngineMetrics,
    pub(crate) trace: Trace,
    events: EventReplay,
    in_flight: Option<Pass>,
    num_submitted: u64,
    num_shown: u32,
}

/// Shuffled queues and weighed branches are not predicted.
fn is_predicted(options: &SglangConfig) -> bool {
    !matches!(options.schedule_policy, SglangPolicy::Random | SglangPolicy::DfsWeight)
}

impl World {
    pub(crate) fn new(workload: &Workload, trace: Trace) -> Self {
        Self {
            config: workload.config.clone(),
            options: workload.options.clone(),
            core: Scheduler::new(&workload.config).expect("a configuration that the core takes").with_kv_events(),
            model: is_predicted(&workload.options).then(|| Model::new(&workload.options)),
            accounts: BTreeMap::new(),
            // Room for what was sent before.
            now: EngineTime::from_nanos(10 * PASS_NANOS),
            state: SchedulingState::Running,
            met: Met::default(),
            metrics: EngineMetrics::default(),
            trace,
            events: EventReplay::default(),
            in_flight: None,
            num_submitted: 0,
            num_shown: 0,
        }
    }

    pub(crate) fn perform(&mut self, operation: &Operation) {
        match operation {
            Operation::Submit(shape) => self.submit(shape),
            Operation::Cancel(index) => self.pick(*index).into_iter().for_each(|id| self.cancel(id)),
            Operation::Throttle(index, on) => self.pick(*index).into_iter().for_each(|id| self.throttle(id, *on)),
            Operation::Flush { reset_running_requests } => self.flush(*reset_running_requests),
            Operation::State(state) => self.set_state(*state),
            Operation::Begin => self.begin(),
            Operation::Finish => self.finish(),
            Operation::Pass => {
                self.begin();
                self.finish();
            }
            Operation::Settle => self.settle(),
            Operation::Wait { nanos } if self.in_flight.is_none() => self.now = self.now + Duration::from_nanos(*nanos),
            Operation::Wait { .. } => {}
        }
        invariants::check(self);
    }

    pub(crate) fn live(&self) -> Vec<SequenceId> {
        self.accounts.iter().filter(|(_, account)| account.end.is_none()).map(|(&id, _)| id).collect()
    }

    /// Those of them whose end is not just waiting to be shown.
    fn known(&self) -> Vec<SequenceId> {
        let mut live = self.live();
        live.retain(|&id| self.core.view().sequence(id).is_some());
        live
    }

    pub(crate) fn num_ended(&self) -> usize {
        self.accounts.len() - self.live().len()
    }

    /// Lets everything run to its end.
    pub(crate) fn drain(&mut self) {
        self.finish();
        self.set_state(SchedulingState::Running);
        self.live().into_iter().for_each(|id| self.throttle(id, false));
        for passes in 0.. {
            assert!(passes < 20_000, "it does not end");
            if self.live().is_empty() {
                break;
            }
            self.now = self.core.next_deadline().unwrap_or(self.now).max(self.now);
            self.perform(&Operation::Pass);
        }
    }

    /// Cancels everything, and reports it.
    pub(crate) fn clear(&mut self) {
        self.finish();
        self.set_state(SchedulingState::Stopped);
        self.known().into_iter().for_each(|id| self.cancel(id));
        self.set_state(SchedulingState::Running);
        self.perform(&Operation::Pass);
        self.settle();
        self.look_at_contents();
        let view = self.core.view();
        assert!(!view.has_work() && self.core.next_deadline().is_none() && self.in_flight.is_none());
        assert_eq!(view.pool().num_free_blocks(), view.pool().num_usable_blocks(), "case 8");
        assert_eq!(view.token_pool().map(|pool| pool.protected_tokens), Some(0));
        let open = self.accounts.iter().find(|(_, account)| account.end.is_none() || !account.reported);
        assert!(open.is_none(), "each request ends once and is reported once: {open:?}");
    }

    fn pick(&self, index: Index) -> Option<SequenceId> {
        let known = self.known();
        (!known.is_empty()).then(|| *index.get(&known))
    }

    fn shifted(&self, nanos: i64) -> EngineTime {
        EngineTime::from_nanos(self.now.as_nanos().saturating_add_signed(nanos))
    }

    fn command(&mut self, command: Command, now: EngineTime) -> Result<Applied, CommandError> {
        let answer = self.core.apply(command, now);
        self.trace.note(&answer);
        answer
    }

    fn submit(&mut self, shape: &Shape) {
        let (id, sent) = (SequenceId(self.num_submitted ^ 3), self.shifted(shape.sent_nanos));
        let mut request = shape.request();
        request.arrival = shape.arrival_nanos.map(|nanos| self.shifted(nanos));
        let (tie_key, arrival) = (u128::from(id.0), request.arrival.unwrap_or(sent));
        let submission = Submission { sequence: id, tie_key, request: request.clone() };
        let answer = self.command(Command::Submit(submission.clone()), sent);
        if let Some(refused) = ledger::refusal(&request, &self.config) {
            assert_eq!(answer, Err(CommandError::Request(refused)));
            return;
        }
        assert_eq!(answer, Ok(Applied::Submitted));
        let again = self.command(Command::Submit(submission), sent);
        assert_eq!(again, Err(CommandError::DuplicateSequence(id)));
        self.num_submitted += 1;
        let limit = self.output_limit(&request);
        let (answer, finish) = self.answer(&request, tie_key, limit);
        let visible_from = arrival.max(sent);
        let account = Account { answer, finish, visible_from, produced: 0, end: None, reported: false };
        let entry = Entry {
            prompt: shape.prompt(),
            answer: account.answer.clone(),
            finish,
            limit,
            namespace: shape.namespace,
            priority: request.priority,
            ignore_eos: request.ignore_eos,
            reads_cache: !request.skip_reading_prefix_cache,
            visible_from,
        };
        self.accounts.insert(id, account);
        self.model.iter_mut().for_each(|model| model.submit(id, entry.clone()));
    }

    /// Every token that a request produces, and why it ends with the last one. Ignoring the end token, SGLang
    /// ignores stop tokens, too; those that are made up avoid them anyway.
    fn answer(&self, request: &Request, tie_key: u128, limit: usize) -> (Vec<u32>, FinishReason) {
        let mut request = request.clone();
        if request.ignore_eos && matches!(request.output, OutputPlan::Tokens(_)) {
            request.stop_token_ids.clear();
        }
        let (mut answer, mut finish) = ledger::answer(&request, tie_key, &self.config);
        if answer.len() > limit {
            answer.truncate(limit);
            finish = FinishReason::Length;
        }
        (answer, finish)
    }

    /// What it asks for, two short of the context, and a page and a token short of the empty pool; at least one.
    fn output_limit(&self, request: &Request) -> usize {
        let (prompt, context) = (request.prompt.len() as u32, self.config.max_model_len);
        let page = self.options.page_size;
        let pool = self.options.max_total_tokens / page * page;
        let asked = match &request.output {
            OutputPlan::Tokens(tokens) => tokens.len() as u32,
            _ => request.max_output_tokens.unwrap_or(u32::MAX),
        };
        let in_context = context.min(pool).saturating_sub(prompt + 2);
        let in_pool = pool.saturating_sub(prompt.next_multiple_of(page) + page + 1);
        asked.min(context - prompt).min(in_context).min(in_pool).max(1) as usize
    }

    fn cancel(&mut self, id: SequenceId) {
        let answer = self.core.cancel(id, self.now);
        self.trace.note(&answer);
        if let Some(model) = &mut self.model {
            assert_eq!(answer, model.cancel(id), "{id}");
        }
        let account = self.accounts.get_mut(&id).expect("it was submitted");
        match answer {
            Cancelled::Removed => account.end = Some(FinishReason::Cancelled),
            Cancelled::Ending => assert!(self.options.abort_after_next_forward),
            Cancelled::Unknown => panic!("{id} has not ended"),
        }
        let again = self.core.cancel(id, self.now);
        assert_eq!(again, if answer == Cancelled::Removed { Cancelled::Unknown } else { answer });
    }

    fn throttle(&mut self, sequence: SequenceId, throttled: bool) {
        let answer = self.command(Command::Throttle { sequence, throttled }, self.now);
        if self.core.view().sequence(sequence).is_some() {
            assert_eq!(answer, Ok(Applied::ThrottleSet));
            self.model.iter_mut().for_each(|model| model.throttle(sequence, throttled));
        } else {
            // Its end is still to be shown.
            assert_eq!(answer, Err(CommandError::UnknownSequence(sequence)));
        }
    }

    fn flush(&mut self, reset_running_requests: bool) {
        let answer = self.command(Command::ResetPrefixCache { reset_running_requests }, self.now);
        if let Some(model) = &mut self.model {
            let (reset, preempted) = model.flush(reset_running_requests);
            assert_eq!(answer, Ok(Applied::PrefixCacheReset { reset, preempted }));
        }
    }

    fn set_state(&mut self, state: SchedulingState) {
        assert_eq!(self.command(Command::SetScheduling(state), self.now), Ok(Applied::SchedulingSet));
        self.model.iter_mut().for_each(|model| model.set_state(state));
        self.state = state;
    }

    fn begin(&mut self) {
        let pass = self.core.begin_pass(self.now);
        self.trace.note(&pass);
        if self.in_flight.is_some() {
            assert!(pass.is_none(), "one pass at a time");
            return;
        }
        if let Some(model) = &mut self.model {
            let planned = model.begin(self.now);
            assert_eq!(pass.is_some(), planned.is_some(), "{pass:?} instead of {planned:?}");
            pass.as_ref().zip(planned.as_ref()).into_iter().for_each(|(pass, planned)| assert_planned(pass, planned));
        }
        invariants::check_plan(self, pass.as_ref());
        let Some(pass) = pass else { return };
        for id in pass.ended() {
            let account = self.accounts.get_mut(id).expect("only what was submitted ends");
            assert!(!std::mem::replace(&mut account.reported, true), "{id} ended twice");
        }
        self.met.retractions += pass.preempted().len() as u32;
        let (work, rows) = (pass.work(), pass.rows());
        let running = rows.iter().filter(|row| row.kind == RowKind::Running).count();
        self.met.mixed += u32::from(running > 1 && running < rows.len());
        self.met.chunks += u32::from(work.prefill().iter().any(|chunk| !chunk.samples));
        self.met.put_off += u32::from(rows.is_empty());
        self.in_flight = Some(pass);
    }

    fn finish(&mut self) {
        let Some(pass) = self.in_flight.take() else { return };
        self.now = self.now.max(pass.ends_at());
        let effects = self.core.finish_pass(pass, self.now);
        let expected = self.model.as_mut().map(|model| model.finish(self.now));
        self.show(effects, expected);
    }

    fn settle(&mut self) {
        let expected = self.model.as_mut().map(|model| model.settle(self.now));
        match self.core.settle(self.now) {
            Some(effects) => {
                assert!(self.in_flight.is_none(), "a pass in flight shows everything at its end");
                self.show(effects, expected);
            }
            None => assert!(expected.unwrap_or_default().is_empty(), "an end that is not shown"),
        }
        assert!(self.core.settle(self.now).is_none(), "nothing is shown twice");
    }

    fn show(&mut self, effects: Effects, expected: Option<Vec<super::model::Output>>) {
        self.trace.note(&effects);
        if let Some(expected) = expected {
            let outputs = effects.outputs.iter().map(|output| (output.sequence, output.token, output.finish));
            assert_eq!(outputs.collect::<Vec<_>>(), expected);
        }
        for output in &effects.outputs {
            let id = output.sequence;
            let account = self.accounts.get_mut(&id).expect("only what was submitted has outputs");
            assert_eq!(account.end, None, "case 9: {id} had ended");
            if let Some(token) = output.token {
                assert_eq!(Some(&token), account.answer.get(account.produced), "token {} of {id}", account.produced);
                account.produced += 1;
            }
            assert_eq!(output.prefill.is_some(), output.token.is_some() && account.produced == 1);
            account.end = output.finish;
            if let Some(FinishReason::Length | FinishReason::Stop { .. }) = output.finish {
                assert_eq!((output.finish, account.produced), (Some(account.finish), account.answer.len()), "{id}");
            }
        }
        effects.kv_events.iter().for_each(|event| self.events.take(event));
        invariants::check_metrics(self, &effects.metrics);
        self.num_shown += 1;
        if self.num_shown.is_multiple_of(LOOK_EVERY) {
            self.look_at_contents();
        }
        self.metrics = effects.metrics;
        self.core.recycle(effects);
    }

    /// Compares page by page: the events alone, and the model, say what the core holds.
    fn look_at_contents(&self) {
        self.events.assert_equals(self.core.view().pool());
        invariants::check_contents(self);
    }

    /// Those who wait for their arrival are not runnable yet.
    pub(crate) fn somebody_can_run(&self) -> bool {
        let view = self.core.view();
        let live = self.live();
        let states: Vec<_> = live.iter().filter_map(|&id| view.sequence(id)).collect();
        let arrived = states
            .iter()
            .any(|one| one.status != SequenceStatus::Arriving || self.accounts[&one.sequence].visible_from <= self.now);
        arrived && states.iter().all(|one| !one.throttled)
    }
}

fn assert_planned(pass: &Pass, planned: &Planned) {
    let rows = pass.rows().iter();
    let rows = rows.map(|row| (row.sequence, row.kind, row.new_tokens as usize, row.computed_before as usize));
    let expected = planned.rows.iter().map(|row| (row.sequence, row.kind, row.tokens, row.computed_before));
    assert_eq!(rows.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    assert_eq!((pass.preempted(), pass.ended()), (&planned.preempted[..], &planned.ended[..]));
}
