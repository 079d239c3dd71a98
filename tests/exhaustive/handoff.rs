//! Breadth-first exploration of both sides of handoffs in the pure core, with re-registration and a pool too
//! small for everybody.
//!
//! A state is what can be seen of a scheduler, block ids and absolute times left out. Every action is tried in
//! every state: its answer is the one in the transition tables, a refusal changes nothing, no block is lost or
//! taken from whoever holds it for a transfer, and from every state everything ends, exactly once.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use standin::timing::TimingConfig;
use standin::{
    Applied, Cancelled, Command, CommandError, DestinationState, Effects, EngineConfig, EngineKind, EngineTime,
    HandoffFact, HandoffId, HandoffKey, HandoffRefusal, HandoffSide, LoadFailurePolicy, Pass, Request, Scheduler,
    SequenceId, SequenceStatus, SglangConfig, SourceState, Speedup, Submission, VllmConfig,
};
use uuid::Uuid;

use super::explore::{Did, Explored, World, explore};

/// Blocks that can be handed out. Two registrations and the ordinary request need up to eight.
const USABLE_BLOCKS: u32 = 5;
const HANDOFFS: u8 = 2;
/// Half a lease, so that heartbeats have something to extend.
const A_WHILE: Duration = Duration::from_secs(15);
const ORDINARY: SequenceId = SequenceId(0);

/// A registration: which handoff, which generation of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Reg(u8, u8);

impl Reg {
    fn key(self) -> HandoffKey {
        HandoffKey::new(HandoffId(Uuid::from_u128(u128::from(self.0))), u64::from(self.1))
    }

    fn sequence(self) -> SequenceId {
        SequenceId(1 + u64::from(self.0) * 10 + u64::from(self.1))
    }

    fn of(key: HandoffKey) -> Self {
        Self(key.id.0.as_u128() as u8, key.generation as u8)
    }
}

/// All registrations of the largest space.
const REGISTRATIONS: [Reg; 4] = [Reg(0, 1), Reg(0, 2), Reg(1, 1), Reg(1, 2)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Begin,
    Finish,
    Settle,
    Wait,
    SubmitOrdinary,
    CancelOrdinary,
    Prefill(Reg),
    Reserve(Reg),
    Activate(Reg),
    Release(Reg),
    CancelSource(Reg),
    CancelDestination(Reg),
    Fail(Reg, u32),
    Heartbeat(Reg),
    /// The client gives its request up.
    Cancel(Reg),
}

/// Whose scheduler is explored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    Vllm(LoadFailurePolicy),
    Sglang,
}

impl Engine {
    fn kind(self) -> EngineKind {
        match self {
            Self::Vllm(policy) => EngineKind::Vllm(
                VllmConfig::default()
                    .with_block_size(4)
                    .with_num_gpu_blocks(USABLE_BLOCKS + 1)
                    .with_max_num_seqs(2)
                    .with_max_num_batched_tokens(16)
                    .with_enable_prefix_caching(false)
                    .with_kv_load_failure_policy(policy),
            ),
            // With the leases of the other one.
            Self::Sglang => EngineKind::Sglang(
                SglangConfig::default()
                    .with_page_size(4)
                    .with_max_total_tokens(USABLE_BLOCKS * 4)
                    .with_max_running_requests(2)
                    .with_disable_radix_cache(true)
                    .with_num_reserved_decode_tokens(1)
                    .with_disaggregation_waiting_timeout(A_WHILE * 2),
            ),
        }
    }

    /// What a source hands over, where that is of interest.
    fn first_token(self) -> Option<u32> {
        (self == Self::Sglang).then_some(7)
    }
}

/// What is explored.
struct Space {
    engine: Engine,
    /// Registrations that can take either side.
    both: &'static [Reg],
    /// Registrations that are sources.
    sources: &'static [Reg],
}

impl Space {
    fn actions(&self) -> Vec<Action> {
        use Action::*;
        let mut all = vec![Begin, Finish, Settle, Wait, SubmitOrdinary, CancelOrdinary];
        for &reg in self.both {
            all.extend([Reserve(reg), Activate(reg), CancelDestination(reg), Fail(reg, 0)]);
            // A part of a load counts only where the rest is computed.
            all.extend((self.engine == Engine::Vllm(LoadFailurePolicy::Recompute)).then_some(Fail(reg, 4)));
        }
        for &reg in self.both.iter().chain(self.sources) {
            all.extend([Prefill(reg), Release(reg), CancelSource(reg), Heartbeat(reg), Cancel(reg)]);
        }
        all
    }
}

/// What has been said about one registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Told {
    submitted: bool,
    there: bool,
    ended: bool,
}

struct Handoffs {
    engine: Engine,
    scheduler: Scheduler,
    pass: Option<Pass>,
    now: EngineTime,
    told: BTreeMap<Reg, Told>,
    ordinary_submitted: bool,
}

impl Handoffs {
    fn new(engine: Engine) -> Self {
        let config = EngineConfig::new(engine.kind())
            .with_max_model_len(64)
            .with_timing(TimingConfig::ConstantMs(1.0))
            .with_speedup(Speedup::Instant);
        Self {
            engine,
            scheduler: Scheduler::new(&config).expect("a usable configuration"),
            pass: None,
            now: EngineTime::from_millis(1),
            told: BTreeMap::new(),
            ordinary_submitted: false,
        }
    }

    fn side(&self, reg: Reg) -> Option<(HandoffKey, HandoffSide)> {
        self.scheduler.view().handoff(reg.key().id).map(|(key, _, side)| (key, side))
    }

    fn submission(sequence: SequenceId, prompt_tokens: u32, outputs: u32) -> Submission {
        let prompt: Vec<u32> = (0..prompt_tokens).map(|token| token + sequence.0 as u32 * 100).collect();
        Submission { sequence, tie_key: u128::from(sequence.0), request: Request::new(prompt, outputs) }
    }

    fn told(&self, reg: Reg) -> Told {
        self.told.get(&reg).copied().unwrap_or_default()
    }

    /// A submission under a registration that is over is refused only while a later one is there.
    fn superseded_or_nothing(&mut self, action: Action, reg: Reg) -> Did {
        match self.side(reg) {
            Some((key, _)) if key.generation > reg.key().generation => self.handoff(action),
            _ => Did::Nothing,
        }
    }

    fn handoff(&mut self, action: Action) -> Did {
        use Action::*;
        let (Prefill(reg)
        | Reserve(reg)
        | Activate(reg)
        | Release(reg)
        | CancelSource(reg)
        | CancelDestination(reg)
        | Fail(reg, _)
        | Heartbeat(reg)) = action
        else {
            panic!("{action:?} is no command of a handoff");
        };
        let handoff = reg.key();
        let command = match action {
            Prefill(_) => Command::SubmitPrefill { handoff, submission: Self::submission(reg.sequence(), 8, 1) },
            Reserve(_) => Command::ReserveDestination { handoff, submission: Self::submission(reg.sequence(), 8, 2) },
            Activate(_) => Command::ActivateDestination { handoff, first_token: self.engine.first_token() },
            Release(_) => Command::ReleaseSource { handoff },
            CancelSource(_) => Command::CancelSource { handoff },
            CancelDestination(_) => Command::CancelDestination { handoff },
            Fail(_, valid_tokens) => Command::FailTransfer { handoff, valid_tokens },
            _ => Command::Heartbeat { handoff },
        };
        let expected = self.expected(action, reg);
        let answer = self.scheduler.apply(command, self.now);
        assert_eq!(answer, expected.map_err(CommandError::Handoff), "{action:?}");
        if answer == Ok(Applied::Submitted) {
            assert!(!self.told(reg).submitted);
            self.told.entry(reg).or_default().submitted = true;
        }
        // A guard that ends is the only thing that an answer of "over" may change.
        let guarded = matches!(action, Activate(_) | Fail(..) | CancelDestination(_));
        match answer {
            Err(_) => Did::Nothing,
            Ok(Applied::HandoffOver) if !guarded => Did::Nothing,
            Ok(_) => Did::Something,
        }
    }

    /// The transition tables, written down once more.
    fn expected(&self, action: Action, reg: Reg) -> Result<Applied, HandoffRefusal> {
        use Action::*;
        let handoff = reg.key();
        let side = match self.side(reg) {
            Some((known, _)) if known.generation > handoff.generation => {
                return Err(HandoffRefusal::Superseded { handoff, current: known.generation });
            }
            Some((known, side)) if known == handoff => Some(side),
            _ => None,
        };
        let source = match side {
            Some(HandoffSide::Source(source)) => Some(source),
            _ => None,
        };
        let destination = match side {
            Some(HandoffSide::Destination(destination)) => Some(destination),
            _ => None,
        };
        match action {
            Prefill(_) | Reserve(_) if side.is_some() => Err(HandoffRefusal::AlreadySubmitted(handoff)),
            Prefill(_) | Reserve(_) => Ok(Applied::Submitted),
            Release(_) | CancelSource(_) | Heartbeat(_) if destination.is_some() => {
                Err(HandoffRefusal::NotASource(handoff))
            }
            Activate(_) | Fail(..) | CancelDestination(_) if source.is_some() => {
                Err(HandoffRefusal::NotADestination(handoff))
            }
            Release(_) if source == Some(SourceState::Prefilling) => Err(HandoffRefusal::NotHeld(handoff)),
            Release(_) | CancelSource(_) | Heartbeat(_) if source.is_some() => Ok(Applied::Handoff),
            Activate(_) | Fail(..) => match destination {
                None => Err(HandoffRefusal::NoDestination(handoff)),
                Some(DestinationState::Waiting) => Err(HandoffRefusal::NotReserved(handoff)),
                Some(DestinationState::Active) => Err(HandoffRefusal::AlreadyActive(handoff)),
                Some(DestinationState::Reserved) => Ok(Applied::Handoff),
                Some(_) => Ok(Applied::HandoffOver),
            },
            CancelDestination(_) if !matches!(destination, None | Some(DestinationState::Guarded)) => {
                Ok(Applied::Handoff)
            }
            _ => Ok(Applied::HandoffOver),
        }
    }

    fn cancel(&mut self, sequence: SequenceId) -> Did {
        match self.scheduler.cancel(sequence, self.now) {
            Cancelled::Removed => Did::Something,
            Cancelled::Unknown => Did::Nothing,
            Cancelled::Ending => unreachable!("it is configured to free at once"),
        }
    }

    fn begin(&mut self) -> Did {
        if self.pass.is_some() {
            assert!(self.scheduler.begin_pass(self.now).is_none(), "one pass at a time");
            return Did::Nothing;
        }
        self.pass = self.scheduler.begin_pass(self.now);
        // Grants are made also where there is no pass.
        Did::Something
    }

    fn finish(&mut self) -> Did {
        let Some(pass) = self.pass.take() else { return Did::Nothing };
        let effects = self.scheduler.finish_pass(pass, self.now);
        self.take(effects);
        Did::Something
    }

    fn settle(&mut self) -> Did {
        match self.scheduler.settle(self.now) {
            None => Did::Nothing,
            Some(effects) => {
                self.take(effects);
                Did::Something
            }
        }
    }

    fn wait(&mut self) -> Did {
        // Otherwise nothing but the clock moves.
        if self.pass.is_some() || self.scheduler.next_deadline().is_none() {
            return Did::Nothing;
        }
        self.now = self.now + A_WHILE;
        // What is due is done by the first call from then on.
        self.settle();
        Did::Something
    }

    fn take(&mut self, effects: Effects) {
        for fact in &effects.facts {
            let told = self.told.entry(Reg::of(fact.handoff())).or_default();
            assert!(told.submitted && !told.ended, "{fact:?} is told of one that has ended");
            match fact {
                HandoffFact::SourceHeld { .. } | HandoffFact::DestinationReserved { .. } => {
                    assert!(!told.there, "{fact:?} is told twice");
                    told.there = true;
                }
                _ => told.ended = true,
            }
            assert_eq!(fact.is_last(), told.ended);
        }
        self.scheduler.recycle(effects);
    }

    /// The blocks of those that hold them for a transfer.
    fn held_blocks(&self) -> BTreeMap<SequenceId, Vec<u32>> {
        let view = self.scheduler.view();
        view.loading().chain(view.held()).map(|sequence| (sequence.sequence, sequence.block_ids.to_vec())).collect()
    }

    /// Planning and finishing passes takes blocks from nobody who holds them for a transfer, unless time is up.
    fn nobody_lost_blocks(&self, before: &BTreeMap<SequenceId, Vec<u32>>) {
        let view = self.scheduler.view();
        for (&sequence, blocks) in before {
            match view.sequence(sequence) {
                Some(now) if now.block_ids.is_empty() => assert_eq!(now.num_computed_tokens, 0, "a void load gave up"),
                Some(now) => assert!(now.block_ids.starts_with(blocks) || now.num_computed_tokens > 0, "{sequence}"),
                // Its lease or its guard has ended.
                None => assert!(self.now.since_epoch() >= A_WHILE * 2),
            }
        }
    }

    fn check(&self) {
        let view = self.scheduler.view();
        let all = view.running().chain(view.waiting()).chain(view.loading()).chain(view.held());
        let owned: u32 = all.map(|sequence| sequence.block_ids.len() as u32).sum();
        assert_eq!(owned + view.pool().num_free_blocks(), USABLE_BLOCKS, "a block is free or owned");
        for reg in REGISTRATIONS {
            let Some((key, side)) = self.side(reg).filter(|(key, _)| *key == reg.key()) else { continue };
            let status = view.sequence(reg.sequence()).expect("a registration has its sequence").status;
            let holds = matches!(
                side,
                HandoffSide::Source(SourceState::Held) | HandoffSide::Destination(DestinationState::Guarded)
            );
            assert_eq!(holds, matches!(status, SequenceStatus::Held(_)), "{key}: {side:?} {status:?}");
            let reserved = side == HandoffSide::Destination(DestinationState::Reserved);
            assert_eq!(reserved, status == SequenceStatus::Loading, "{key}: {side:?} {status:?}");
        }
    }
}

impl World for Handoffs {
    type Action = Action;

    /// Everything that can be seen.
    fn state(&self) -> u64 {
        let view = self.scheduler.view();
        let mut hasher = DefaultHasher::new();
        for sequences in [
            view.running().collect::<Vec<_>>(),
            view.waiting().collect(),
            view.loading().collect(),
            view.held().collect(),
        ] {
            sequences.len().hash(&mut hasher);
            for sequence in sequences {
                let counts = (sequence.num_computed_tokens, sequence.num_tokens, sequence.num_preemptions > 0);
                (sequence.sequence, sequence.status, counts, sequence.block_ids.len()).hash(&mut hasher);
            }
        }
        for handoff in 0..HANDOFFS {
            view.handoff(Reg(handoff, 1).key().id).hash(&mut hasher);
        }
        let arriving =
            REGISTRATIONS.map(Reg::sequence).into_iter().chain([ORDINARY]).filter(|&id| view.sequence(id).is_some());
        arriving.collect::<Vec<_>>().hash(&mut hasher);
        let deadline = self.scheduler.next_deadline().map(|next| next.saturating_since(self.now));
        view.token_pool().map(|pool| (pool.batch_is_full, pool.chunked)).hash(&mut hasher);
        (view.pool().num_free_blocks(), deadline, self.pass.is_some(), &self.told).hash(&mut hasher);
        let rows: Option<Vec<_>> = self.pass.as_ref().map(|pass| pass.rows().iter().map(|row| row.sequence).collect());
        (rows, self.ordinary_submitted).hash(&mut hasher);
        hasher.finish()
    }

    fn act(&mut self, action: Action) -> Did {
        use Action::*;
        match action {
            Begin => self.begin(),
            Finish => self.finish(),
            Settle => self.settle(),
            Wait => self.wait(),
            SubmitOrdinary if self.ordinary_submitted => Did::Nothing,
            SubmitOrdinary => {
                let submission = Self::submission(ORDINARY, 8, 2);
                assert_eq!(self.scheduler.apply(Command::Submit(submission), self.now), Ok(Applied::Submitted));
                self.ordinary_submitted = true;
                Did::Something
            }
            CancelOrdinary => self.cancel(ORDINARY),
            Cancel(reg) => self.cancel(reg.sequence()),
            // The caller never uses a registration twice, and the core forgets those that are over.
            Prefill(reg) | Reserve(reg)
                if self.told(reg).submitted && self.side(reg).is_none_or(|(key, _)| key != reg.key()) =>
            {
                self.superseded_or_nothing(action, reg)
            }
            _ => self.handoff(action),
        }
    }

    fn act_and_check(&mut self, action: Action) -> Did {
        let before = self.held_blocks();
        let did = self.act(action);
        self.check();
        if matches!(action, Action::Begin | Action::Finish | Action::SubmitOrdinary) {
            self.nobody_lost_blocks(&before);
        }
        did
    }

    /// Gives everything up and waits: all ends, each exactly once, and nothing stays.
    fn close(&mut self) {
        self.finish();
        for reg in REGISTRATIONS {
            for command in
                [Command::CancelSource { handoff: reg.key() }, Command::CancelDestination { handoff: reg.key() }]
            {
                // Refused where it is of the other side, or superseded.
                drop(self.scheduler.apply(command, self.now));
            }
        }
        for turn in 0.. {
            assert!(turn < 200, "it does not end");
            self.pass = self.scheduler.begin_pass(self.now);
            self.finish();
            self.settle();
            match self.scheduler.next_deadline() {
                Some(next) => self.now = self.now.max(next),
                None if !self.scheduler.view().has_work() => break,
                None => {}
            }
        }
        let view = self.scheduler.view();
        assert_eq!((view.pool().num_free_blocks(), view.num_handoffs()), (USABLE_BLOCKS, 0));
        assert_eq!((view.held().count(), view.loading().count(), view.waiting().count()), (0, 0, 0));
        for (reg, told) in &self.told {
            assert!(told.submitted && told.ended, "{reg:?} has not ended: {told:?}");
        }
    }
}

fn explore_all(space: &Space) -> Explored {
    let explored = explore(|| Handoffs::new(space.engine), &space.actions());
    println!("{explored:?}");
    explored
}

#[test]
fn both_machines_are_explored_and_everything_ends_from_everywhere() {
    let both = &[Reg(0, 1), Reg(0, 2)];
    let Explored { states, transitions } =
        explore_all(&Space { engine: Engine::Vllm(LoadFailurePolicy::Fail), both, sources: &[Reg(1, 1)] });
    assert!(states >= 20_000, "{states} states");
    assert!(transitions >= 600_000, "{transitions} transitions");
}

#[test]
fn failed_loads_that_are_computed_again_are_explored() {
    let both = &[Reg(0, 1), Reg(0, 2)];
    let Explored { states, transitions } =
        explore_all(&Space { engine: Engine::Vllm(LoadFailurePolicy::Recompute), both, sources: &[] });
    assert!(states >= 3_000, "{states} states");
    assert!(transitions >= 70_000, "{transitions} transitions");
}

#[test]
fn sglangs_machines_are_explored_and_everything_ends_from_everywhere() {
    let both = &[Reg(0, 1), Reg(0, 2)];
    let Explored { states, transitions } = explore_all(&Space { engine: Engine::Sglang, both, sources: &[Reg(1, 1)] });
    assert!(states >= 19_000, "{states} states");
    assert!(transitions >= 560_000, "{transitions} transitions");
}

/// Two handoffs registered twice each, on either side: 1,640,000 states and 72 million transitions. Minutes
/// with `cargo test --profile checked --test exhaustive -- --ignored`.
#[test]
#[ignore = "minutes, and only in release"]
fn two_handoffs_on_either_side_are_explored() {
    for engine in [Engine::Vllm(LoadFailurePolicy::Fail), Engine::Vllm(LoadFailurePolicy::Recompute), Engine::Sglang] {
        let Explored { states, transitions } = explore_all(&Space { engine, both: &REGISTRATIONS, sources: &[] });
        let (least_states, least_transitions) =
            if engine == Engine::Sglang { (380_000, 16_000_000) } else { (500_000, 20_000_000) };
        assert!(states >= least_states, "{states} states");
        assert!(transitions >= least_transitions, "{transitions} transitions");
    }
}
