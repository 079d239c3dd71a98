//! One workload, driven through a core and the model of its handoffs.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::sample::Index;
use standin::{
    Applied, BlockId, Cancelled, Command, CommandError, DestinationState, Effects, EngineConfig, EngineMetrics,
    EngineTime, FinishReason, FirstToken, HandoffFact, HandoffId, HandoffKey, HandoffSide, KeepBlocks, LoadTiming,
    Pass, RemoteCopy, RemoteKv, Scheduler, SchedulingState, SequenceId, SequenceStatus, SourceState, Submission,
    TransferReport, VllmConfig,
};
use uuid::Uuid;

use crate::scheduler::event_replay::EventReplay;
use crate::scheduler::ledger;
use crate::scheduler::workload::PASS_NANOS;
use crate::trace::Trace;

use super::invariants;
use super::model::{Model, Party, Rules};
use super::workload::{HANDOFFS, Named, Operation, Shape, Verb, Workload};

/// The token that sources send where the first one is carried over.
const CARRIED: u32 = 7;

#[derive(Debug, Default)]
pub(crate) struct Account {
    answer: Vec<u32>,
    produced: usize,
    ended: bool,
}

/// What was told of a registration: that its blocks are there, and its end.
#[derive(Debug, Default)]
struct Told {
    there: bool,
    ended: bool,
}

/// How often what the workloads are about has happened.
#[derive(Debug, Default)]
pub(crate) struct Met {
    pub(crate) answers: BTreeMap<&'static str, u32>,
    pub(crate) facts: BTreeMap<String, u32>,
}

#[derive(Debug)]
pub(crate) struct World {
    config: EngineConfig,
    pub(crate) options: VllmConfig,
    pub(crate) core: Scheduler,
    pub(crate) model: Model,
    accounts: BTreeMap<SequenceId, Account>,
    told: BTreeMap<HandoffKey, Told>,
    /// Of each handoff the generation that was registered last.
    last: [u64; HANDOFFS],
    remotes: Vec<SequenceId>,
    pub(crate) now: EngineTime,
    pub(crate) state: SchedulingState,
    /// The blocks of those that held some for a transfer when that was looked at last.
    pub(crate) kept: Vec<((SequenceId, SequenceStatus), Vec<BlockId>)>,
    events: EventReplay,
    in_flight: Option<Pass>,
    next: u64,
    pub(crate) trace: Trace,
    pub(crate) met: Met,
    pub(crate) metrics: EngineMetrics,
}

pub(crate) fn id(handoff: usize) -> HandoffId {
    HandoffId(Uuid::from_u128(handoff as u128))
}

impl World {
    pub(crate) fn new(workload: &Workload, trace: Trace) -> Self {
        let options = workload.options.clone();
        let rules = Rules {
            lease: options.kv_lease,
            guard: options.transfer_guard,
            failure: options.kv_load_failure_policy,
            carries_over: options.first_token == FirstToken::CarriedOver,
        };
        Self {
            config: workload.config.clone(),
            options,
            core: Scheduler::new(&workload.config).expect("a configuration that the core takes").with_kv_events(),
            model: Model::new(rules),
            accounts: BTreeMap::new(),
            told: BTreeMap::new(),
            last: [0; HANDOFFS],
            remotes: Vec::new(),
            now: EngineTime::from_nanos(PASS_NANOS),
            state: SchedulingState::Running,
            kept: Vec::new(),
            events: EventReplay::default(),
            in_flight: None,
            next: 0,
            trace,
            met: Met::default(),
            metrics: EngineMetrics::default(),
        }
    }

    pub(crate) fn perform(&mut self, operation: &Operation) {
        match operation {
            Operation::Submit(shape) => {
                let submission = self.submission(*shape);
                assert_eq!(self.command(Command::Submit(submission.clone())), Ok(Applied::Submitted));
                self.opened(&submission);
            }
            Operation::Register { handoff, source, named, shape, id_is_taken } => {
                self.register(self.key(*handoff, *named), *source, *shape, *id_is_taken);
            }
            Operation::Command { handoff, named, verb } => self.hand_off(self.key(*handoff, *named), *verb),
            Operation::SubmitRemote { shape, tokens, load, keeps } => {
                self.submit_remote(*shape, *tokens, *load, *keeps)
            }
            Operation::Report { received, sent } => self.report(*received, *sent),
            Operation::Cancel(index) => self.pick(*index).into_iter().for_each(|id| self.cancel(id)),
            Operation::Throttle(index, on) => self.pick(*index).into_iter().for_each(|id| self.throttle(id, *on)),
            Operation::Reset { reset_running_requests } => {
                let command = Command::ResetPrefixCache { reset_running_requests: *reset_running_requests };
                self.command(command).expect("a reset is always taken");
            }
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

    /// Gives everything up that only a handoff would end, and runs the rest to its end.
    pub(crate) fn drain(&mut self) {
        self.finish();
        self.set_state(SchedulingState::Running);
        for turn in 0.. {
            assert!(turn < 100, "it does not end");
            for id in self.known() {
                self.throttle(id, false);
            }
            let report =
                TransferReport { received: self.remotes.clone(), sent: self.remotes.clone(), ..<_>::default() };
            assert_eq!(self.command(Command::Transfers(report)), Ok(Applied::Transfers));
            for registration in self.model.table.values().copied().collect::<Vec<_>>() {
                if matches!(registration.side, HandoffSide::Destination(_)) {
                    self.hand_off(registration.key, Verb::CancelDestination);
                }
            }
            while self.in_flight.is_none() {
                self.begin();
                if self.in_flight.is_none() {
                    break;
                }
                self.finish();
                invariants::check(self);
            }
            self.settle();
            match self.core.next_deadline() {
                Some(next) => self.now = self.now.max(next),
                None if self.known().is_empty() => break,
                None => {}
            }
        }
        let view = self.core.view();
        assert_eq!(view.pool().num_free_blocks(), view.pool().num_usable_blocks());
        assert_eq!((view.num_handoffs(), view.held().count(), view.has_work()), (0, 0, false));
        assert!(self.accounts.values().all(|account| account.ended), "each request ends");
        let open = self.told.iter().find(|(_, told)| !told.ended);
        assert!(open.is_none(), "each registration ends: {open:?}");
    }

    /// Those that have not ended.
    fn known(&self) -> Vec<SequenceId> {
        let view = self.core.view();
        let lives =
            |id: &SequenceId| view.sequence(*id).is_some_and(|one| !matches!(one.status, SequenceStatus::Held(_)));
        self.accounts.keys().copied().filter(lives).collect()
    }

    /// One of them, or the first one of all.
    fn pick(&self, index: Index) -> Option<SequenceId> {
        let mut known = self.known();
        known.extend(self.accounts.keys().next());
        (!known.is_empty()).then(|| *index.get(&known))
    }

    fn key(&self, handoff: usize, named: Named) -> HandoffKey {
        let last = self.last[handoff];
        let generation = match named {
            Named::Last => last,
            Named::Stale => last.saturating_sub(1),
            Named::Next => last + 1,
        };
        HandoffKey::new(id(handoff), generation)
    }

    fn command(&mut self, command: Command) -> Result<Applied, CommandError> {
        self.model.turn_to(self.now);
        let answer = self.core.apply(command, self.now);
        self.trace.note(&answer);
        answer
    }

    fn submission(&self, shape: Shape) -> Submission {
        let sequence = SequenceId(self.next);
        Submission { sequence, tie_key: u128::from(self.next), request: shape.request() }
    }

    /// Takes note of a submission that was taken.
    fn opened(&mut self, submission: &Submission) -> Party {
        let (request, sequence) = (&submission.request, submission.sequence);
        self.next += 1;
        let (answer, _) = ledger::answer(request, submission.tie_key, &self.config);
        let party = Party { prompt_tokens: request.prompt.len() as u32, answer: answer.clone(), cached_tokens: 0 };
        self.accounts.insert(sequence, Account { answer, ..Account::default() });
        party
    }

    fn register(&mut self, handoff: HandoffKey, source: bool, shape: Shape, id_is_taken: bool) {
        // Tells both what time it is: a lease may end by that.
        assert_eq!(self.command(Command::ExpectFrees(false)), Ok(Applied::ExpectFrees));
        let known = self.model.table.get(&handoff.id);
        let last = self.last[handoff.id.0.as_u128() as usize];
        if handoff.generation <= last && known.is_none() {
            // The caller uses no registration twice, and the core forgets those that are over.
            return;
        }
        let mut submission = self.submission(shape);
        let taken = self.known().first().copied().filter(|_| id_is_taken);
        submission.sequence = taken.unwrap_or(submission.sequence);
        let expected = match (self.model.may_submit(handoff), taken) {
            (Err(refusal), _) => Err(CommandError::Handoff(refusal)),
            (Ok(()), Some(taken)) => Err(CommandError::DuplicateSequence(taken)),
            (Ok(()), None) => Ok(Applied::Submitted),
        };
        let (command, side) = if source {
            let side = HandoffSide::Source(SourceState::Prefilling);
            (Command::SubmitPrefill { handoff, submission: submission.clone() }, side)
        } else {
            let side = HandoffSide::Destination(DestinationState::Waiting);
            (Command::ReserveDestination { handoff, submission: submission.clone() }, side)
        };
        let answer = self.command(command);
        assert_eq!(answer, expected, "{handoff}");
        if answer.is_ok() {
            let party = self.opened(&submission);
            self.model.submit(handoff, submission.sequence, side, party);
            self.last[handoff.id.0.as_u128() as usize] = handoff.generation;
            self.told.insert(handoff, Told::default());
        }
    }

    fn hand_off(&mut self, handoff: HandoffKey, verb: Verb) {
        self.model.turn_to(self.now);
        let first_token = Some(CARRIED).filter(|_| matches!(verb, Verb::Activate { with_token: true }));
        let known = self.model.table.get(&handoff.id).copied();
        let (command, expected) = match verb {
            Verb::Activate { .. } => {
                (Command::ActivateDestination { handoff, first_token }, self.model.activate(handoff, first_token))
            }
            Verb::Fail { valid_tokens } => {
                (Command::FailTransfer { handoff, valid_tokens }, self.model.fail(handoff, valid_tokens))
            }
            Verb::Release => (Command::ReleaseSource { handoff }, self.model.release(handoff)),
            Verb::CancelSource => (Command::CancelSource { handoff }, self.model.cancel_source(handoff)),
            Verb::CancelDestination => (Command::CancelDestination { handoff }, self.model.cancel_destination(handoff)),
            Verb::Heartbeat => (Command::Heartbeat { handoff }, self.model.heartbeat(handoff)),
        };
        let answer = self.command(command);
        let label = match &answer {
            Ok(Applied::Handoff) => "done",
            Ok(_) => "over",
            Err(_) => "refused",
        };
        *self.met.answers.entry(label).or_default() += 1;
        assert_eq!(answer, expected.map_err(CommandError::Handoff), "{verb:?} {handoff} of {known:?}");
        if let (Ok(Applied::Handoff), Some(token), Some(known), FirstToken::CarriedOver) =
            (answer, first_token, known, self.options.first_token)
        {
            let account = self.accounts.get_mut(&known.sequence).expect("its request");
            (account.answer[0], account.produced) = (token, 1);
        }
    }

    fn submit_remote(&mut self, shape: Shape, tokens: u32, load: LoadTiming, keeps: bool) {
        let submission = self.submission(shape);
        let keep = if keeps { KeepBlocks::WhenFinished } else { KeepBlocks::Never };
        let copy = (tokens > 0).then_some(RemoteCopy { tokens, load, lasting: false, undecided_look_ups: 0 });
        let command = Command::SubmitRemote { submission: submission.clone(), remote: RemoteKv { copy, keep } };
        assert_eq!(self.command(command), Ok(Applied::Submitted));
        self.opened(&submission);
        self.remotes.push(submission.sequence);
    }

    fn report(&mut self, received: Index, sent: Index) {
        if self.remotes.is_empty() {
            return;
        }
        let pick = |index: Index| vec![*index.get(&self.remotes)];
        let report = TransferReport { received: pick(received), sent: pick(sent), ..TransferReport::default() };
        assert_eq!(self.command(Command::Transfers(report)), Ok(Applied::Transfers));
    }

    fn cancel(&mut self, id: SequenceId) {
        self.model.turn_to(self.now);
        let lives = self.known().contains(&id);
        let answer = self.core.cancel(id, self.now);
        self.trace.note(&answer);
        assert_eq!(answer, if lives { Cancelled::Removed } else { Cancelled::Unknown });
        if lives {
            self.model.cancelled(id);
            let account = self.accounts.get_mut(&id).expect("it was submitted");
            assert!(!std::mem::replace(&mut account.ended, true), "{id} ended twice");
        }
    }

    fn throttle(&mut self, sequence: SequenceId, throttled: bool) {
        let lives = self.known().contains(&sequence);
        let answer = self.command(Command::Throttle { sequence, throttled });
        let expected = if lives { Ok(Applied::ThrottleSet) } else { Err(CommandError::UnknownSequence(sequence)) };
        assert_eq!(answer, expected);
    }

    fn set_state(&mut self, state: SchedulingState) {
        assert_eq!(self.command(Command::SetScheduling(state)), Ok(Applied::SchedulingSet));
        self.state = state;
    }

    fn begin(&mut self) {
        if self.in_flight.is_some() {
            assert!(self.core.begin_pass(self.now).is_none(), "one pass at a time");
            return;
        }
        self.model.turn_to(self.now);
        let before: Vec<_> = self.core.view().loading().map(|one| one.sequence).collect();
        let pass = self.core.begin_pass(self.now);
        self.trace.note(&pass);
        // First come, first served: they are in the order of their grants.
        let view = self.core.view();
        for one in view.loading().filter(|one| !before.contains(&one.sequence)) {
            let pool = view.pool();
            let found = one.block_ids.iter().take_while(|&&block| pool.block_hash(block).is_some()).count();
            self.model.granted(one.sequence, found as u32 * self.options.block_size);
        }
        invariants::check_grants(self, pass.as_ref());
        for admitted in pass.iter().flat_map(Pass::admitted) {
            self.model.admitted(admitted.sequence, admitted.cached_tokens);
        }
        self.in_flight = pass;
    }

    fn finish(&mut self) {
        let Some(pass) = self.in_flight.take() else { return };
        self.now = self.now.max(pass.ends_at());
        let effects = self.core.finish_pass(pass, self.now);
        let ends = self.model.take_ends();
        for output in &effects.outputs[ends.len()..] {
            assert!(output.token.is_some(), "an end that nobody asked for: {output:?}");
            if output.finish.is_some() {
                self.model.finished(output.sequence, self.now);
            }
        }
        self.model.turn_to(self.now);
        self.show(effects, &ends);
    }

    fn settle(&mut self) {
        if self.in_flight.is_some() {
            assert!(self.core.settle(self.now).is_none(), "a pass in flight shows everything at its end");
            return;
        }
        self.model.turn_to(self.now);
        match self.core.settle(self.now) {
            Some(effects) => {
                let ends = self.model.take_ends();
                assert_eq!(effects.outputs.len(), ends.len());
                self.show(effects, &ends);
            }
            None => assert_eq!((self.model.take_ends(), self.model.take_facts()), (vec![], vec![]), "not shown"),
        }
        assert!(self.core.settle(self.now).is_none(), "nothing is shown twice");
    }

    fn show(&mut self, effects: Effects, ends: &[(SequenceId, FinishReason)]) {
        self.trace.note(&effects);
        for (output, &(id, finish)) in effects.outputs.iter().zip(ends) {
            assert_eq!((output.sequence, output.token, output.finish), (id, None, Some(finish)));
        }
        for output in &effects.outputs {
            let account = self.accounts.get_mut(&output.sequence).expect("only what was submitted has outputs");
            assert!(!account.ended, "{} has ended", output.sequence);
            if let Some(token) = output.token {
                assert_eq!(account.answer.get(account.produced), Some(&token), "{}", output.sequence);
                account.produced += 1;
                assert_eq!(output.finish.is_some(), account.produced == account.answer.len());
            }
            account.ended = output.finish.is_some();
        }
        assert_eq!(effects.facts, self.model.take_facts());
        effects.facts.iter().for_each(|fact| self.told(fact));
        effects.kv_events.iter().for_each(|event| self.events.take(event));
        self.events.assert_equals(self.core.view().pool());
        invariants::check_metrics(self, &effects.metrics);
        self.metrics = effects.metrics;
        self.core.recycle(effects);
    }

    fn told(&mut self, fact: &HandoffFact) {
        let told = self.told.get_mut(&fact.handoff()).expect("a registration");
        assert!(!told.ended, "{fact:?} comes after the end");
        if fact.is_last() {
            told.ended = true;
        } else {
            assert!(!std::mem::replace(&mut told.there, true), "{fact:?} is told twice");
        }
        let name = format!("{fact:?}");
        let kind: String = name.chars().take_while(|character| character.is_alphanumeric()).collect();
        let end = name.rfind("end: ").map(|at| name[at..].trim_end_matches([' ', '}']).to_owned());
        *self.met.facts.entry(format!("{kind} {}", end.unwrap_or_default())).or_default() += 1;
    }
}
