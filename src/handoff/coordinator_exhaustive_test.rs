//! Every state that a coordinator can reach, whatever it is told.
//!
//! In every state it is told every fact, the right and the wrong outcome of every action that it has ever issued and of one
//! that it has not, and that time has gone by. Counts are exact: a change of the machine shows in them.

use std::collections::{BTreeMap, VecDeque};

use uuid::Uuid;

use super::*;
use crate::handoff::{Refusal, TransferTimingMode};

/// What the two sides have been told, as far as a promise depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Told {
    releases: u8,
    source_cancels: u8,
    destination_cancels: u8,
    confirmed: bool,
    completes: u8,
}

#[derive(Clone)]
struct Node {
    coordinator: Coordinator,
    now: EngineTime,
    issued: Vec<IssuedAction>,
    told: Told,
}

impl Node {
    fn new(config: CoordinatorConfig) -> Self {
        let id = HandoffId(Uuid::from_u128(1));
        let coordinator = Coordinator::new(id, config, EngineTime::ZERO).expect("valid");
        let mut node = Self { coordinator, now: EngineTime::ZERO, issued: Vec::new(), told: Told::default() };
        node.drain();
        node
    }

    fn drain(&mut self) -> usize {
        let before = self.issued.len();
        while let Some(issued) = self.coordinator.poll_action() {
            assert_eq!(self.told.completes, 0, "nothing follows Complete: {issued:?}");
            assert!(self.issued.last().is_none_or(|last| last.id < issued.id), "ids ascend: {issued:?}");
            match issued.action {
                Action::ReleaseSource => {
                    assert!(self.told.confirmed, "released before the activation was confirmed");
                    self.told.releases += 1;
                }
                Action::CancelSource => self.told.source_cancels += 1,
                Action::CancelDestination { .. } => self.told.destination_cancels += 1,
                Action::Complete(outcome) => {
                    self.told.completes += 1;
                    assert_eq!(self.coordinator.outcome(), Some(outcome));
                }
                _ => {}
            }
            self.issued.push(issued);
        }
        self.issued.len() - before
    }

    fn told(&self, fact: Fact) -> Self {
        let mut next = self.clone();
        if let Fact::Outcome { action, outcome: ActionOutcome::Done } = fact {
            let taken = self.issued.iter().filter(|issued| issued.id == action);
            next.told.confirmed |= taken.clone().any(|issued| {
                matches!(issued.action, Action::ActivateDestination { .. } | Action::RecomputeDestination)
            });
        }
        next.coordinator.apply(fact, self.now);
        next.drain();
        next
    }

    /// After `wait`, with all done that is due by then.
    fn after(&self, wait: Duration) -> Self {
        let mut next = self.clone();
        next.now = self.now + wait;
        for _ in 0..3 {
            next.coordinator.tick(next.now);
        }
        next.drain();
        assert!(next.coordinator.next_deadline().is_none_or(|at| at > next.now), "still due in {}", next.key());
        next
    }

    /// At its next deadline.
    fn at_deadline(&self) -> Option<Self> {
        self.coordinator.next_deadline().map(|at| self.after(at.saturating_since(self.now)))
    }

    /// Moments before, at and long after the next deadline.
    fn later(&self) -> Vec<Self> {
        let mut later: Vec<_> = self.at_deadline().into_iter().collect();
        later.extend([1, 40].map(|secs| self.after(Duration::from_secs(secs))));
        later
    }

    /// A deadline went by and nobody has called yet.
    fn overdue(&self) -> Self {
        Self { now: self.now + Duration::from_secs(40), ..self.clone() }
    }

    /// Every fact worth telling.
    fn facts(&self) -> Vec<Fact> {
        let held = |first_token, mode| Fact::SourceHeld {
            timing: TransferTiming {
                mode,
                full_prompt_tokens: 5,
                kv_bytes_per_token: None,
                bandwidth_gb_s: None,
                setup: Duration::ZERO,
            },
            first_token,
            overlapped_prefill: Duration::ZERO,
        };
        let mut facts = vec![
            held(Some(1), TransferTimingMode::MissingTokens),
            held(None, TransferTimingMode::MissingTokens),
            held(Some(1), TransferTimingMode::FullPrompt),
            Fact::DestinationReserved { transferable_prompt_tokens: 0 },
            Fact::DestinationReserved { transferable_prompt_tokens: 5 },
            Fact::TransferCompleted,
            Fact::TransferFailed,
            Fact::SourceGone,
            Fact::DestinationGone,
            Fact::TimedOut,
            Fact::Cancelled,
        ];
        let ids = self.issued.iter().map(|issued| issued.id).chain([ActionId(u64::MAX)]);
        facts.extend(ids.flat_map(|action| {
            [ActionOutcome::Done, ActionOutcome::Refused(Refusal::Other)]
                .map(|outcome| Fact::Outcome { action, outcome })
        }));
        facts
    }

    /// The state without what only names it: ids become their place among those waited for, times are relative.
    fn key(&self) -> String {
        let mut state = self.coordinator.state;
        let none = ActionId(0);
        let until = |at: EngineTime| EngineTime::ZERO + at.saturating_since(self.now);
        let mut deadline = until(self.coordinator.deadline);
        match &mut state {
            State::Prefilling { submit: id, .. }
            | State::Activating { activate: id }
            | State::Recomputing { recompute: id, .. }
            | State::Reserving { reserve: id, .. } => *id = none,
            State::Transferring { start, started, .. } => {
                *start = none;
                // What is left of the overall time does not run; what is left of the transfer's own does.
                deadline = EngineTime::ZERO + self.coordinator.deadline.saturating_since(*started);
                let left = self.coordinator.config.transfer_timeout.map(|timeout| *started + timeout);
                *started = left.map_or(EngineTime::ZERO, until);
            }
            State::Ending(ending) => {
                ending.source = ending.source.map(|_| none);
                ending.destination = ending.destination.map(|_| none);
                ending.deadline = until(ending.deadline);
            }
            State::Ended(_) => {}
        }
        if let Some(held) = state.held_mut() {
            held.next_heartbeat = held.next_heartbeat.map(until);
            held.last_heartbeat = held.last_heartbeat.map(|_| none);
        }
        if matches!(state, State::Ending(_) | State::Ended(_)) {
            deadline = EngineTime::ZERO;
        }
        format!("{state:?} {deadline:?} {:?}", self.told)
    }

    /// The promises of the end.
    fn assert_ended(&self) {
        let Told { releases, source_cancels, destination_cancels, confirmed, completes } = self.told;
        assert_eq!(completes, 1);
        assert_eq!(self.coordinator.next_deadline(), None);
        match self.coordinator.outcome().expect("ended") {
            HandoffOutcome::Completed => assert!(confirmed && releases == 1),
            HandoffOutcome::Recomputed(_) => assert!(confirmed && source_cancels == 1),
            HandoffOutcome::Failed(_) => assert_eq!((source_cancels, destination_cancels), (1, 1)),
        }
        assert_eq!(releases + source_cancels, 1, "the source's last word");
        let failed = matches!(self.coordinator.outcome(), Some(HandoffOutcome::Failed(_)));
        assert_eq!(destination_cancels, u8::from(failed), "the destination's last word");
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    states: usize,
    transitions: usize,
    ended: usize,
}

/// Visits everything that can be reached, and checks each step.
fn explore(config: &CoordinatorConfig, counts: &mut Counts) {
    let first = Node::new(config.clone());
    let mut nodes = BTreeMap::from([(first.key(), first.clone())]);
    let mut queue = VecDeque::from([first]);
    while let Some(node) = queue.pop_front() {
        let ended = node.coordinator.outcome().is_some();
        if ended {
            node.assert_ended();
            counts.ended += 1;
        }
        let mut successors: Vec<Node> = node.facts().into_iter().map(|fact| twice(&node, fact)).collect();
        successors.extend(node.later());
        successors.push(node.overdue());
        for next in successors {
            counts.transitions += 1;
            let unchanged = (next.coordinator.state, next.issued.len()) == (node.coordinator.state, node.issued.len());
            assert!(!ended || unchanged, "an ended handoff changes: {} {}", node.key(), next.key());
            if let std::collections::btree_map::Entry::Vacant(vacant) = nodes.entry(next.key()) {
                vacant.insert(next.clone());
                queue.push_back(next);
            }
        }
        can_finish(&node);
    }
    counts.states += nodes.len();
}

/// The state after `fact`, which a second telling leaves as it is.
fn twice(node: &Node, fact: Fact) -> Node {
    let once = node.told(fact);
    let again = once.told(fact);
    assert_eq!(again.key(), once.key(), "{fact:?} twice in {}", node.key());
    assert_eq!(again.issued, once.issued, "{fact:?} twice in {}", node.key());
    once
}

/// Time alone ends every handoff, or, where a transfer may take for ever, a cancel and time.
fn can_finish(node: &Node) {
    let unbounded = node.coordinator.config.transfer_timeout.is_none();
    let mut node = if unbounded { node.told(Fact::Cancelled) } else { node.clone() };
    for _ in 0..20 {
        match node.at_deadline() {
            Some(later) => node = later,
            None => break,
        }
    }
    assert!(node.coordinator.outcome().is_some(), "never ends: {}", node.key());
    node.assert_ended();
}

/// Every option, with time-outs that leave room for two heartbeats.
fn configs() -> Vec<CoordinatorConfig> {
    let secs = Duration::from_secs;
    let mut configs = Vec::new();
    for order in [HandoffOrder::SourceFirst, HandoffOrder::DestinationFirst] {
        for first_token in [FirstToken::Recomputed, FirstToken::CarriedOver] {
            for policy in [TransferFailurePolicy::Fail, TransferFailurePolicy::Recompute] {
                for transfer_timeout in [None, Some(secs(7))] {
                    for heartbeat in [None, Some(secs(5))] {
                        let config = CoordinatorConfig::vllm()
                            .with_order(order)
                            .with_first_token(first_token)
                            .with_on_transfer_failure(policy)
                            .with_transfer_timeout(transfer_timeout)
                            .with_heartbeat(heartbeat)
                            .with_timeout(secs(12));
                        configs.push(config);
                    }
                }
            }
        }
    }
    configs
}

#[test]
fn every_state_can_finish_and_cleans_both_sides_exactly_once() {
    let mut counts = Counts::default();
    for config in configs() {
        explore(&config, &mut counts);
    }
    assert_eq!(counts, Counts { states: 43_872, transitions: 1_090_500, ended: 432 });
}
