//! The coordinator of a handoff, told facts in any order, late, twice and wrong, with time going by.
//!
//! Each side has exactly one last word, the destination's before the source's; a source is released only after the
//! activation has been confirmed; nothing follows `Complete`, which comes once; the time of a transfer does not count
//! towards the time-out; and from everywhere a cancel and time end it.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use standin::handoff::{
    ActionId, ActionOutcome, CoordinatorAction as Action, CoordinatorFact as Fact, HandoffFailure, HandoffOrder,
    HandoffOutcome, IssuedAction, Refusal, TransferFailurePolicy,
};
use standin::{Coordinator, CoordinatorConfig, EngineTime, FirstToken, HandoffId, TransferTiming, TransferTimingMode};
use uuid::Uuid;

use crate::seeds::{self, Row};

pub(crate) const ROW: Row = Row { test: "coordinator", variable: "STANDIN_SCHEDULER_SEEDS", seeds: 250 };

#[derive(Debug, Clone)]
enum Step {
    Held {
        first_token: Option<u32>,
        full: bool,
    },
    Reserved {
        missing: u32,
    },
    /// The outcome of an action, of those that were issued and one that was not.
    Outcome {
        action: Index,
        outcome: ActionOutcome,
    },
    Fact(Fact),
    Wait {
        millis: u64,
    },
    /// At the next deadline, or so long after it.
    Deadline {
        late_millis: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let refused = ActionOutcome::Refused(Refusal::Other);
    let outcome = prop_oneof![3 => Just(ActionOutcome::Done), 1 => Just(refused)];
    let gone = select(&[Fact::TransferFailed, Fact::SourceGone, Fact::DestinationGone, Fact::Cancelled][..]);
    prop_oneof![
        4 => (prop::option::weighted(0.8, 0..9_u32), any::<bool>()).prop_map(|(first_token, full)| Step::Held { first_token, full }),
        4 => (0..6_u32).prop_map(|missing| Step::Reserved { missing }),
        8 => (any::<Index>(), outcome).prop_map(|(action, outcome)| Step::Outcome { action, outcome }),
        3 => Just(Step::Fact(Fact::TransferCompleted)),
        1 => gone.prop_map(Step::Fact),
        4 => (0..6_000_u64).prop_map(|millis| Step::Wait { millis }),
        1 => select(&[0_u64, 0, 40_000][..]).prop_map(|late_millis| Step::Deadline { late_millis }),
    ]
}

fn config() -> impl Strategy<Value = CoordinatorConfig> {
    let order = select(&[HandoffOrder::SourceFirst, HandoffOrder::DestinationFirst][..]);
    let token = select(&[FirstToken::Recomputed, FirstToken::CarriedOver][..]);
    let policy = select(&[TransferFailurePolicy::Fail, TransferFailurePolicy::Recompute][..]);
    let secs = |secs| Just(Some(Duration::from_secs(secs)));
    let times = (prop_oneof![Just(None), secs(7)], prop_oneof![Just(None), secs(5)]);
    (order, token, policy, times).prop_map(|(order, token, policy, (transfer, heartbeat))| {
        CoordinatorConfig::vllm()
            .with_order(order)
            .with_first_token(token)
            .with_on_transfer_failure(policy)
            .with_transfer_timeout(transfer)
            .with_heartbeat(heartbeat)
            .with_timeout(Duration::from_secs(12))
    })
}

#[derive(Debug)]
struct World {
    coordinator: Coordinator,
    timeout: Duration,
    now: EngineTime,
    issued: Vec<IssuedAction>,
    /// When a transfer began that is not over, and how long earlier ones took.
    transferring: Option<EngineTime>,
    transferred: Duration,
    /// An activation or a recomputation was reported done.
    confirmed: bool,
    source_words: u32,
    destination_cancels: u32,
    completes: u32,
}

impl World {
    fn new(config: CoordinatorConfig) -> Self {
        let (id, timeout) = (HandoffId(Uuid::from_u128(1)), config.timeout);
        let coordinator = Coordinator::new(id, config, EngineTime::ZERO).expect("valid");
        let mut world = Self {
            coordinator,
            timeout,
            now: EngineTime::ZERO,
            issued: Vec::new(),
            transferring: None,
            transferred: Duration::ZERO,
            confirmed: false,
            source_words: 0,
            destination_cancels: 0,
            completes: 0,
        };
        world.drain();
        world
    }

    fn perform(&mut self, step: &Step) {
        match *step {
            Step::Held { first_token, full } => {
                let mode = if full { TransferTimingMode::FullPrompt } else { TransferTimingMode::MissingTokens };
                let timing = TransferTiming {
                    mode,
                    full_prompt_tokens: 5,
                    kv_bytes_per_token: None,
                    bandwidth_gb_s: None,
                    setup: Duration::ZERO,
                };
                self.tell(Fact::SourceHeld { timing, first_token, overlapped_prefill: Duration::ZERO });
            }
            Step::Reserved { missing } => {
                self.tell(Fact::DestinationReserved { transferable_prompt_tokens: missing });
            }
            Step::Outcome { action, outcome } => {
                let ids: Vec<_> = self.issued.iter().map(|issued| issued.id).chain([ActionId(u64::MAX)]).collect();
                self.tell(Fact::Outcome { action: *action.get(&ids), outcome });
            }
            Step::Fact(fact) => self.tell(fact),
            Step::Wait { millis } => self.wait(Duration::from_millis(millis)),
            Step::Deadline { late_millis } => {
                if let Some(next) = self.coordinator.next_deadline() {
                    self.wait(next.saturating_since(self.now) + Duration::from_millis(late_millis));
                }
            }
        }
    }

    fn tell(&mut self, fact: Fact) {
        if let Fact::Outcome { action, outcome: ActionOutcome::Done } = fact {
            let mut named = self.issued.iter().filter(|issued| issued.id == action);
            self.confirmed |= named.any(|issued| {
                matches!(issued.action, Action::ActivateDestination { .. } | Action::RecomputeDestination)
            });
        }
        self.coordinator.apply(fact, self.now);
        self.drain();
    }

    fn wait(&mut self, duration: Duration) {
        self.now = self.now + duration;
        while self.coordinator.next_deadline().is_some_and(|at| at <= self.now) {
            self.coordinator.tick(self.now);
            self.drain();
        }
    }

    /// How long it has waited for everything but transfers.
    fn waited(&self) -> Duration {
        let transferring = self.transferring.map_or(Duration::ZERO, |since| self.now.saturating_since(since));
        self.now.since_epoch() - self.transferred - transferring
    }

    fn drain(&mut self) {
        while let Some(issued) = self.coordinator.poll_action() {
            assert_eq!(self.completes, 0, "nothing follows Complete: {issued:?}");
            assert!(self.issued.last().is_none_or(|last| last.id < issued.id), "ids ascend: {issued:?}");
            self.take(issued.action);
            self.issued.push(issued);
        }
    }

    fn take(&mut self, action: Action) {
        match action {
            Action::StartTransfer { .. } => {
                assert!(self.transferring.replace(self.now).is_none(), "one transfer");
                return;
            }
            Action::Heartbeat => return,
            Action::ReleaseSource => {
                assert!(self.confirmed, "released before the activation was confirmed");
                self.source_words += 1;
            }
            Action::CancelSource => {
                assert!(self.confirmed || self.destination_cancels > 0, "the destination is cancelled first");
                self.source_words += 1;
            }
            Action::CancelDestination { failure, .. } => {
                if failure == HandoffFailure::TimedOut {
                    assert!(self.waited() >= self.timeout, "timed out after {:?}", self.waited());
                }
                self.destination_cancels += 1;
            }
            Action::Complete(outcome) => {
                self.completes += 1;
                assert_eq!(self.coordinator.outcome(), Some(outcome));
            }
            _ => {}
        }
        if let Some(since) = self.transferring.take() {
            self.transferred += self.now.saturating_since(since);
        }
    }

    /// A cancel and time end everything.
    fn close(&mut self) {
        self.tell(Fact::Cancelled);
        for _ in 0..3 {
            self.perform(&Step::Deadline { late_millis: 0 });
        }
        let outcome = self.coordinator.outcome().expect("a cancel and time end it");
        let failed = matches!(outcome, HandoffOutcome::Failed(_));
        assert_eq!((self.completes, self.source_words), (1, 1), "the source's last word");
        assert_eq!(self.destination_cancels, u32::from(failed), "the destination's last word");
        assert!(failed || self.confirmed);
        let num_issued = self.issued.len();
        self.tell(Fact::TransferCompleted);
        assert_eq!((self.issued.len(), self.coordinator.next_deadline()), (num_issued, None));
    }
}

/// One seed's run.
pub(crate) fn check(seed: u64) -> Result<(), String> {
    let workload = (config(), prop::collection::vec(step(), 1..60));
    seeds::check(ROW, &workload, seed, |(config, steps)| {
        let mut world = World::new(config);
        steps.iter().for_each(|step| world.perform(step));
        world.close();
    })
}

#[test]
fn coordinator() {
    seeds::run(ROW, check);
}
