//! Handoffs between two modelled sides over one shared link, with every fault that there is.
//!
//! Rule h13: whatever goes wrong, each handoff ends, its blocks are freed exactly once on both sides, and a request that is
//! said to decode does.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use standin::handoff::{
    ActionOutcome, CoordinatorAction, CoordinatorConfig, CoordinatorFact, FaultRates, Faults, HandoffFailure,
    HandoffOutcome, IssuedAction, Link, LinkSharing, Refusal, TransferFailurePolicy, TransferId, TransferTiming,
    TransferTimingMode,
};
use standin::{Coordinator, EngineTime, HandoffId};
use uuid::Uuid;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Idle,
    Prefilling,
    Held,
    Freed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Destination {
    Idle,
    Waiting,
    Reserved,
    Active,
    Freed,
}

#[derive(Debug)]
struct Handoff {
    coordinator: Coordinator,
    faults: Faults,
    source: Source,
    destination: Destination,
    transfer: Option<TransferId>,
    missing: u32,
    outcome: Option<(HandoffOutcome, EngineTime)>,
}

/// What the modelled engines are busy with.
#[derive(Debug, Clone, Copy)]
enum Due {
    Prefilled,
    Granted,
    CallerCancels,
}

struct World {
    now: EngineTime,
    draws: u64,
    /// Probability in per mille that an engine refuses a command for no reason.
    refusals: u64,
    due: BTreeMap<(EngineTime, u64), (usize, Due)>,
    link: Link,
    handoffs: Vec<Handoff>,
}

impl World {
    fn new(seed: u64, configs: &[CoordinatorConfig], rates: FaultRates, refusals: u64) -> Self {
        let handoffs = configs.iter().enumerate().map(|(number, config)| {
            let id = HandoffId(Uuid::from_u64_pair(seed, number as u64));
            Handoff {
                coordinator: Coordinator::new(id, config.clone(), EngineTime::ZERO).expect("valid"),
                faults: Faults::new(rates, seed, id, EngineTime::ZERO).expect("valid"),
                source: Source::Idle,
                destination: Destination::Idle,
                transfer: None,
                missing: 0,
                outcome: None,
            }
        });
        Self {
            now: EngineTime::ZERO,
            draws: seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1,
            refusals,
            due: BTreeMap::new(),
            link: Link::new(LinkSharing::FairShare),
            handoffs: handoffs.collect(),
        }
    }

    /// Xorshift: enough for picking moments.
    fn draw(&mut self, below: u64) -> u64 {
        self.draws ^= self.draws << 13;
        self.draws ^= self.draws >> 7;
        self.draws ^= self.draws << 17;
        self.draws % below
    }

    fn schedule(&mut self, handoff: usize, due: Due, after_ms: u64) {
        let number = self.due.len() as u64 + (self.draw(u64::MAX >> 8) << 8);
        self.due.insert((self.now + Duration::from_millis(after_ms), number), (handoff, due));
    }

    fn run(&mut self) {
        for turn in 0.. {
            assert!(turn < 10_000, "no end: {:?}", self.handoffs);
            self.serve();
            if self.handoffs.iter().all(|handoff| handoff.outcome.is_some()) {
                return;
            }
            let times = self.handoffs.iter().flat_map(|handoff| {
                [handoff.coordinator.next_deadline(), handoff.faults.next_deadline()].into_iter().flatten()
            });
            let engines = self.due.first_key_value().map(|(&(at, _), _)| at);
            self.now = times.chain(engines).chain(self.link.next_deadline()).min().expect("somebody waits for a time");
        }
    }

    /// All that happens now.
    fn serve(&mut self) {
        self.link.advance(self.now);
        while let Some((transfer, _)) = self.link.poll_finished() {
            let handoff = self.handoffs.iter_mut().find(|handoff| handoff.transfer == Some(transfer)).expect("known");
            handoff.transfer = None;
            handoff.missing = 0;
            handoff.faults.push(CoordinatorFact::TransferCompleted, self.now);
        }
        while let Some(entry) = self.due.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let (number, due) = entry.remove();
            self.engine_is_done(number, due);
        }
        for number in 0..self.handoffs.len() {
            self.coordinate(number);
        }
    }

    fn engine_is_done(&mut self, number: usize, due: Due) {
        let first_token = Some(self.draw(1_000) as u32);
        let missing = self.draw(3) as u32 * 700;
        let handoff = &mut self.handoffs[number];
        let fact = match due {
            Due::Prefilled if handoff.source == Source::Prefilling => {
                handoff.source = Source::Held;
                let timing = TransferTiming {
                    mode: TransferTimingMode::MissingTokens,
                    full_prompt_tokens: 4_096,
                    kv_bytes_per_token: Some(131_072),
                    bandwidth_gb_s: Some(0.02),
                    setup: Duration::from_millis(1),
                };
                CoordinatorFact::SourceHeld { timing, first_token, overlapped_prefill: Duration::from_secs(1) }
            }
            Due::Granted if handoff.destination == Destination::Waiting => {
                handoff.destination = Destination::Reserved;
                handoff.missing = missing;
                CoordinatorFact::DestinationReserved { transferable_prompt_tokens: missing }
            }
            Due::CallerCancels => CoordinatorFact::Cancelled,
            // Cancelled before it came to that.
            _ => return,
        };
        handoff.faults.push(fact, self.now);
    }

    fn coordinate(&mut self, number: usize) {
        loop {
            let now = self.now;
            let handoff = &mut self.handoffs[number];
            while let Some(fact) = handoff.faults.poll(now) {
                handoff.coordinator.apply(fact, now);
            }
            while handoff.coordinator.next_deadline().is_some_and(|at| at <= now) {
                handoff.coordinator.tick(now);
            }
            let Some(issued) = handoff.coordinator.poll_action() else { return };
            let outcome = self.carry_out(number, issued);
            self.handoffs[number].faults.push(CoordinatorFact::Outcome { action: issued.id, outcome }, now);
        }
    }

    fn carry_out(&mut self, number: usize, issued: IssuedAction) -> ActionOutcome {
        let refused = self.draw(1_000) < self.refusals;
        let (prefill_ms, grant_ms) = (self.draw(20_000), self.draw(40_000));
        let handoff = &mut self.handoffs[number];
        match issued.action {
            // The last words are never refused for no reason: that would be a leak that no coordinator could see.
            CoordinatorAction::ReleaseSource => {
                assert_eq!(handoff.destination, Destination::Active, "activation before release");
                handoff.free_source();
            }
            CoordinatorAction::CancelSource => handoff.free_source(),
            CoordinatorAction::CancelDestination { .. } => {
                handoff.free_destination();
                if let Some(transfer) = handoff.transfer.take() {
                    self.link.abort(transfer, self.now);
                }
            }
            CoordinatorAction::Complete(outcome) => {
                assert_eq!(handoff.outcome.replace((outcome, self.now)), None, "completed twice");
            }
            _ if refused => return ActionOutcome::Refused(Refusal::Other),
            CoordinatorAction::SubmitPrefill => {
                handoff.source = Source::Prefilling;
                self.schedule(number, Due::Prefilled, prefill_ms);
            }
            CoordinatorAction::ReserveDestination => {
                handoff.destination = Destination::Waiting;
                self.schedule(number, Due::Granted, grant_ms);
            }
            CoordinatorAction::Heartbeat => assert_eq!(handoff.source, Source::Held, "nobody beats for a lost source"),
            CoordinatorAction::StartTransfer { cost, .. } => {
                assert_eq!((handoff.source, handoff.destination), (Source::Held, Destination::Reserved));
                handoff.transfer = Some(self.link.start(cost.expect("known"), self.now));
            }
            CoordinatorAction::ActivateDestination { .. } => {
                assert_eq!(
                    (handoff.destination, handoff.missing),
                    (Destination::Reserved, 0),
                    "activated without its KV"
                );
                handoff.destination = Destination::Active;
            }
            CoordinatorAction::RecomputeDestination => {
                assert_eq!(handoff.destination, Destination::Reserved);
                handoff.destination = Destination::Active;
                if let Some(transfer) = handoff.transfer.take() {
                    self.link.abort(transfer, self.now);
                }
            }
            other => panic!("unknown action {other:?}"),
        }
        ActionOutcome::Done
    }

    fn assert_clean(&self, seed: u64) {
        assert_eq!(self.link.in_flight(), 0, "seed {seed}");
        for handoff in &self.handoffs {
            let decodes =
                matches!(handoff.outcome, Some((HandoffOutcome::Completed | HandoffOutcome::Recomputed(_), _)));
            assert_eq!(handoff.source, Source::Freed, "seed {seed}: {handoff:?}");
            let expected = if decodes { Destination::Active } else { Destination::Freed };
            assert_eq!(handoff.destination, expected, "seed {seed}: {handoff:?}");
        }
    }
}

impl Handoff {
    fn free_source(&mut self) {
        assert_ne!(self.source, Source::Freed, "freed twice");
        self.source = Source::Freed;
    }

    fn free_destination(&mut self) {
        assert_ne!(self.destination, Destination::Freed, "freed twice");
        self.destination = Destination::Freed;
    }
}

fn six_of_each_kind() -> Vec<CoordinatorConfig> {
    let recompute = CoordinatorConfig::vllm().with_on_transfer_failure(TransferFailurePolicy::Recompute);
    let kinds = [CoordinatorConfig::vllm(), recompute, CoordinatorConfig::sglang(), CoordinatorConfig::tensorrt_llm()];
    kinds.into_iter().cycle().take(6).collect()
}

#[test]
fn h13_without_faults_every_handoff_completes() {
    for seed in 0..200 {
        let mut world = World::new(seed, &six_of_each_kind(), FaultRates::default(), 0);
        world.run();
        world.assert_clean(seed);
        for handoff in &world.handoffs {
            let (outcome, at) = handoff.outcome.expect("ended");
            assert_eq!(outcome, HandoffOutcome::Completed, "seed {seed}");
            // At most 20 s of prefill, 40 s in the queue, and six transfers of at most 9.2 s on one link.
            assert!(at <= EngineTime::from_millis(60_000 + 6 * 9_200), "seed {seed}: {at}");
        }
    }
}

#[test]
fn h13_with_every_fault_each_handoff_ends_and_frees_both_sides_once() {
    let rates = FaultRates::default()
        .with_lost(0.03)
        .with_duplicated(0.1)
        .with_delayed(0.2)
        .with_max_delay(Duration::from_secs(60))
        .with_transfer_failed(0.1)
        .with_source_gone(0.1)
        .with_destination_gone(0.05)
        .with_gone_within(Duration::from_secs(90));
    let (mut seen, mut completed, mut ended) = (BTreeSet::new(), 0, 0);
    for seed in 0..2_000 {
        let mut world = World::new(seed, &six_of_each_kind(), rates, 10);
        for number in 0..world.handoffs.len() {
            if world.draw(10) == 0 {
                let after = world.draw(90_000);
                world.schedule(number, Due::CallerCancels, after);
            }
        }
        world.run();
        world.assert_clean(seed);
        for handoff in &world.handoffs {
            let (outcome, _) = handoff.outcome.expect("ended");
            ended += 1;
            completed += u32::from(outcome == HandoffOutcome::Completed);
            seen.insert(format!("{outcome:?}"));
        }
    }
    assert_eq!(ended, 12_000);
    assert!(
        (3_000..9_000).contains(&completed),
        "{completed} of {ended} completed: the faults are too rare or too many"
    );
    let every = [
        HandoffOutcome::Completed,
        HandoffOutcome::Recomputed(HandoffFailure::SourceGone),
        HandoffOutcome::Recomputed(HandoffFailure::TransferFailed),
        HandoffOutcome::Recomputed(HandoffFailure::TransferTimedOut),
        HandoffOutcome::Recomputed(HandoffFailure::TransferRefused(Refusal::Other)),
        HandoffOutcome::Failed(HandoffFailure::SourceRefused(Refusal::Other)),
        HandoffOutcome::Failed(HandoffFailure::DestinationRefused(Refusal::Other)),
        HandoffOutcome::Failed(HandoffFailure::TransferRefused(Refusal::Other)),
        HandoffOutcome::Failed(HandoffFailure::ActivationRefused(Refusal::Other)),
        HandoffOutcome::Failed(HandoffFailure::RecomputeRefused(Refusal::Other)),
        HandoffOutcome::Failed(HandoffFailure::SourceGone),
        HandoffOutcome::Failed(HandoffFailure::DestinationGone),
        HandoffOutcome::Failed(HandoffFailure::TransferFailed),
        HandoffOutcome::Failed(HandoffFailure::TransferTimedOut),
        HandoffOutcome::Failed(HandoffFailure::TimedOut),
        HandoffOutcome::Failed(HandoffFailure::Cancelled),
    ];
    assert_eq!(seen, every.iter().map(|outcome| format!("{outcome:?}")).collect());
}
