//! One scheduler of either kind, and what must hold of it after every operation.

use std::collections::{BTreeMap, BTreeSet};

use arbitrary::Unstructured;
use standin::{
    Applied, Cancelled, Command, CommandError, Effects, EngineConfig, EngineKind, EngineTime, FinishReason,
    HandoffFact, HandoffId, HandoffKey, HandoffSide, OutputPlan, Pass, Request, Scheduler, SchedulingState, SequenceId,
    SequenceStatus, Submission, TokenGenerator,
};
use uuid::Uuid;

use super::requests;

/// Ids of handoffs that are used.
pub(crate) const HANDOFFS: u128 = 3;

/// One accepted request.
struct Account {
    request: Request,
    produced: u32,
    /// A first token was offered to be carried over; it may have been the last one.
    offered: bool,
    ended: bool,
}

/// What has been told of one registration.
#[derive(Default)]
struct Told {
    there: bool,
    ended: bool,
}

pub(crate) struct World {
    pub(crate) config: EngineConfig,
    pub(crate) scheduler: Scheduler,
    pub(crate) now: EngineTime,
    pass: Option<Pass>,
    accounts: BTreeMap<SequenceId, Account>,
    told: BTreeMap<HandoffKey, Told>,
    submitted: u64,
}

impl World {
    /// `None`: the core refuses the configuration.
    pub(crate) fn new(config: EngineConfig) -> Option<Self> {
        let scheduler = Scheduler::new(&config).ok()?.with_kv_events().with_connector_log();
        Some(Self {
            config,
            scheduler,
            now: EngineTime::ZERO,
            pass: None,
            accounts: BTreeMap::new(),
            told: BTreeMap::new(),
            submitted: 0,
        })
    }

    /// A request under a new id, or now and then under one that is in use.
    pub(crate) fn submission(&mut self, bytes: &mut Unstructured<'_>) -> arbitrary::Result<Submission> {
        let request = requests::request(bytes, self.now)?;
        let last = self.scheduler.view().sequence(SequenceId(u64::MAX - self.submitted));
        // One that is held may be over by the time of the command.
        let is_over = last.is_none_or(|last| matches!(last.status, SequenceStatus::Held(_)));
        if is_over || !bytes.ratio(1, 20)? {
            self.submitted += 1;
        }
        // From the top down, so that ids are no order.
        Ok(Submission { sequence: SequenceId(u64::MAX - self.submitted), tie_key: u128::from(self.submitted), request })
    }

    /// An id that is or was in use, or one that never was.
    pub(crate) fn pick(&self, bytes: &mut Unstructured<'_>) -> arbitrary::Result<SequenceId> {
        Ok(SequenceId(u64::MAX - bytes.int_in_range(0..=self.submitted)?))
    }

    pub(crate) fn wait(&mut self, until: EngineTime) {
        if self.pass.is_none() {
            self.now = self.now.max(until);
        }
    }

    /// Gives a command. A refused one must change nothing.
    pub(crate) fn command(&mut self, command: Command, now: EngineTime) -> Option<Applied> {
        let submission = match &command {
            Command::Submit(submission)
            | Command::SubmitDecode(submission)
            | Command::SubmitRemote { submission, .. }
            | Command::SubmitPrefill { submission, .. }
            | Command::ReserveDestination { submission, .. } => Some(submission.clone()),
            _ => None,
        };
        // What is due by then is done by whatever comes first.
        let nobody = Command::Throttle { sequence: SequenceId(0), throttled: true };
        assert!(self.scheduler.apply(nobody, now).is_err());
        if let Command::ActivateDestination { handoff, first_token: Some(_) } = &command
            && let Some((_, id, _)) = self.scheduler.view().handoff(handoff.id)
        {
            self.account(id).offered = true;
        }
        let before = self.look();
        let answer = self.scheduler.apply(command.clone(), now);
        match (&answer, submission) {
            (Err(CommandError::DuplicateSequence(id)), Some(_)) => {
                assert!(self.scheduler.view().sequence(*id).is_some())
            }
            (Ok(applied), Some(Submission { sequence, request, .. })) => {
                assert_eq!(*applied, Applied::Submitted);
                self.accounts.insert(sequence, Account { request, produced: 0, offered: false, ended: false });
            }
            _ => {}
        }
        if answer.is_err() {
            assert_eq!(self.look(), before, "{command:?} was refused: {answer:?}");
        }
        if let (Ok(_), Command::ActivateDestination { handoff, first_token: Some(_) }) = (&answer, &command) {
            self.note_carried(*handoff);
        }
        self.check();
        answer.ok()
    }

    fn account(&mut self, id: SequenceId) -> &mut Account {
        self.accounts.get_mut(&id).expect("only what was submitted is there")
    }

    /// A first token that was carried over is no output of this engine.
    fn note_carried(&mut self, handoff: HandoffKey) {
        let view = self.scheduler.view();
        let Some((_, id, _)) = view.handoff(handoff.id) else { return };
        let carried = view.sequence(id).map_or(0, |sequence| sequence.num_output_tokens);
        let account = self.account(id);
        account.produced = account.produced.max(carried);
    }

    pub(crate) fn cancel(&mut self, id: SequenceId, now: EngineTime) {
        let cancelled = self.scheduler.cancel(id, now);
        match self.accounts.get_mut(&id) {
            None => assert_eq!(cancelled, Cancelled::Unknown),
            Some(account) => match cancelled {
                Cancelled::Removed => assert!(!std::mem::replace(&mut account.ended, true), "{id} had ended"),
                Cancelled::Ending => assert!(!account.ended),
                Cancelled::Unknown => {}
            },
        }
        self.check();
    }

    pub(crate) fn begin(&mut self) {
        let in_flight = self.pass.is_some();
        let pass = self.scheduler.begin_pass(self.now);
        if in_flight {
            assert!(pass.is_none(), "one pass at a time");
            return;
        }
        if let Some(pass) = &pass {
            assert!(pass.started_at() == self.now && pass.ends_at() >= self.now);
            let mut rows: Vec<SequenceId> = pass.rows().iter().map(|row| row.sequence).collect();
            rows.sort_unstable();
            assert!(rows.windows(2).all(|pair| pair[0] != pair[1]), "one row each: {rows:?}");
            assert!(pass.rows().iter().all(|row| row.new_tokens > 0));
        }
        self.pass = pass;
        self.check();
    }

    pub(crate) fn finish(&mut self, late: bool) {
        let Some(pass) = self.pass.take() else { return };
        self.now =
            if late { EngineTime::from_nanos(pass.ends_at().as_nanos().saturating_add(7)) } else { pass.ends_at() };
        let effects = self.scheduler.finish_pass(pass, self.now);
        self.take(effects);
        self.check();
    }

    pub(crate) fn settle(&mut self) {
        if let Some(effects) = self.scheduler.settle(self.now) {
            assert!(self.pass.is_none(), "a pass in flight shows everything at its end");
            self.take(effects);
            assert!(self.scheduler.settle(self.now).is_none(), "nothing is shown twice");
        }
        self.check();
    }

    fn take(&mut self, effects: Effects) {
        for output in &effects.outputs {
            let account = self.accounts.get_mut(&output.sequence).expect("only what was submitted is there");
            assert!(!account.ended, "{output:?} comes after the end");
            if let Some(token) = output.token {
                assert_eq!(token, expected(account, output.sequence, &self.config), "{output:?}");
                account.produced += 1;
            }
            account.ended = output.finish.is_some();
            if output.finish == Some(FinishReason::Length) {
                assert!(account.produced > 0 || account.offered, "{output:?}");
            }
        }
        for fact in &effects.facts {
            let told = self.told.entry(fact.handoff()).or_default();
            assert!(!told.ended, "{fact:?} is told of one that has ended");
            if matches!(fact, HandoffFact::SourceHeld { .. } | HandoffFact::DestinationReserved { .. }) {
                assert!(!std::mem::replace(&mut told.there, true), "{fact:?} is told twice");
            }
            told.ended = fact.is_last();
        }
        let (view, metrics) = (self.scheduler.view(), effects.metrics);
        let pool = view.pool();
        assert_eq!(metrics.num_requests_running, view.running().count() as u64);
        assert_eq!(metrics.num_used_blocks, u64::from(pool.num_usable_blocks() - pool.num_free_blocks()));
        assert!((0.0..=1.0).contains(&metrics.kv_cache_usage), "{metrics:?}");
        self.scheduler.recycle(effects);
        self.scheduler.take_connector_calls();
    }

    /// Everything that a refused command must leave as it is.
    fn look(&self) -> String {
        let view = self.scheduler.view();
        let queues = [
            view.running().collect::<Vec<_>>(),
            view.waiting().collect(),
            view.loading().collect(),
            view.held().collect(),
        ];
        let handoffs: Vec<_> = (0..HANDOFFS).map(|id| view.handoff(HandoffId(Uuid::from_u128(id)))).collect();
        let free = (view.pool().num_free_blocks(), view.num_handoffs(), view.has_work());
        format!("{queues:?} {handoffs:?} {free:?} {:?} {}", self.scheduler.next_deadline(), view.kv_events().len())
    }

    fn check(&self) {
        let view = self.scheduler.view();
        let pool = view.pool();
        let mut owners: BTreeMap<u32, u32> = BTreeMap::new();
        for &id in self.accounts.keys() {
            let Some(sequence) = view.sequence(id) else { continue };
            sequence.block_ids.iter().for_each(|&block| *owners.entry(block).or_insert(0) += 1);
            let capacity = sequence.block_ids.len() as u64 * u64::from(self.config.kind.block_size());
            assert!(sequence.num_computed_tokens <= sequence.num_tokens, "{sequence:?}");
            assert!(u64::from(sequence.num_computed_tokens) <= capacity, "{sequence:?}");
            assert!(sequence.num_output_tokens <= sequence.max_output_tokens, "{sequence:?}");
            assert!(sequence.num_tokens <= self.config.max_model_len, "{sequence:?}");
        }
        assert_eq!(owners.len() as u32 + pool.num_free_blocks(), pool.num_usable_blocks(), "a block is free or owned");
        // With SGLang free pages may lie in the prefix tree.
        let mut free = BTreeSet::new();
        assert!(pool.free_queue().take(100).all(|block| free.insert(block) && !owners.contains_key(&block)));
        if let EngineKind::Vllm(options) = &self.config.kind {
            assert!(view.running().count() <= options.max_num_seqs as usize);
            owners.iter().for_each(|(&block, &count)| assert_eq!(pool.ref_count(block), count, "block {block}"));
        }
        for id in (0..HANDOFFS).map(|id| HandoffId(Uuid::from_u128(id))) {
            let Some((key, sequence, side)) = view.handoff(id) else { continue };
            assert!(view.sequence(sequence).is_some(), "{key}: {side:?} without a sequence");
            let told = self.told.get(&key).is_some_and(|told| told.ended);
            let guarded = side == HandoffSide::Destination(standin::DestinationState::Guarded);
            assert!(!told || guarded, "{key} has ended and is {side:?}");
        }
    }

    /// Gives everything up: nothing may be left, and everything must have ended.
    pub(crate) fn close(mut self) {
        self.finish(false);
        for id in self.accounts.keys().copied().collect::<Vec<_>>() {
            self.cancel(id, self.now);
        }
        self.command(Command::SetScheduling(SchedulingState::Running), self.now);
        for turn in 0.. {
            assert!(turn < 1_000, "it does not end");
            self.begin();
            self.finish(false);
            self.settle();
            match self.scheduler.next_deadline() {
                Some(next) => self.now = self.now.max(next),
                None if !self.scheduler.view().has_work() => break,
                None => {}
            }
        }
        let view = self.scheduler.view();
        assert_eq!(view.pool().num_free_blocks(), view.pool().num_usable_blocks());
        assert_eq!((view.running().count(), view.waiting().count(), view.loading().count()), (0, 0, 0));
        assert_eq!((view.held().count(), view.num_handoffs()), (0, 0));
        for (id, account) in &self.accounts {
            assert!(account.ended && view.sequence(*id).is_none(), "{id} has not ended");
        }
        assert!(self.told.values().all(|told| told.ended), "a handoff was never over");
    }
}

/// The token at the next position of a request.
fn expected(account: &Account, id: SequenceId, config: &EngineConfig) -> u32 {
    let Account { request, produced, .. } = account;
    match &request.output {
        OutputPlan::Tokens(tokens) => tokens[*produced as usize],
        _ => {
            let mut forbidden: Vec<u32> = request.stop_token_ids.iter().copied().chain(request.eos_token_id).collect();
            forbidden.sort_unstable();
            forbidden.dedup();
            TokenGenerator::new(config.seed, u128::from(u64::MAX - id.0), config.vocab_size)
                .token(*produced, &forbidden)
        }
    }
}
