//! The state machine over both sides of one handoff.

use std::collections::VecDeque;
use std::time::Duration;

use super::config::{CoordinatorConfig, HandoffOrder, TransferFailurePolicy, TransferOverlap};
use super::ids::HandoffId;
use super::protocol::{
    ActionId, ActionOutcome, CoordinatorAction as Action, CoordinatorFact as Fact, HandoffFailure as Failure,
    HandoffOutcome, IssuedAction,
};
use super::transfer::TransferTiming;
use crate::config::FirstToken;
use crate::error::ConfigError;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

/// Drives one handoff: facts and the time go in, actions come out.
///
/// The owner carries out each action of [`Coordinator::poll_action`], reports its outcome as
/// [`CoordinatorFact::Outcome`](super::CoordinatorFact::Outcome), passes on what the engines tell, and calls
/// [`Coordinator::tick`] at [`Coordinator::next_deadline`]. It may do so in any order, late, twice or not at all:
///
/// ```text
///            source first                                       destination first
///  ┌────────────┐ SourceHeld ┌───────────┐        ┌───────────┐ DestinationReserved ┌────────────┐
///  │ Prefilling ├───────────▶│ Reserving │        │ Reserving ├────────────────────▶│ Prefilling │
///  └────────────┘            └─────┬─────┘        └───────────┘                     └─────┬──────┘
///                                  │ DestinationReserved                       SourceHeld │
///                                  └────────────────────────┬─────────────────────────────┘
///                       there is something to transfer      │      the destination has it all
///                                  ┌────────────────────────┴────────────────────┐
///                                  ▼                                             │
///                          ┌──────────────┐         TransferCompleted            ▼
///                          │ Transferring ├───────────────────────────────▶ Activating ──Done──▶ ReleaseSource ─┐
///                          └───────┬──────┘                                                                      │
///                                  │ failed, timed out or source gone, and the policy is Recompute               │
///                                  └───────────────────────────────────────▶ Recomputing ──Done──▶ CancelSource ─┤
///                                                                                                                ▼
///  in all of them: refused, gone, timed out, cancelled ──▶ CancelDestination, CancelSource ─────────────────▶ Ending
///                                                                                                                │
///                                both sides have answered, are gone, or have had their time ──▶ Complete ──▶ Ended
/// ```
///
/// 1. Each side has exactly one last word: `ReleaseSource` or `CancelSource`; a confirmed `ActivateDestination` or
///    `RecomputeDestination`, or `CancelDestination`. `Complete` comes after both, once, and last. A side that was never
///    asked for anything, or is reported gone, is cancelled all the same: a report may be wrong, and cancels are idempotent.
/// 2. The source is released only after the activation has been confirmed.
/// 3. A fact that does not fit the state changes nothing, and neither does an outcome of another action.
/// 4. Every state has a deadline, `Transferring` without a `transfer_timeout` excepted; from there too a cancel ends it.
/// 5. The destination is cancelled before the source, so that a reader stops before its blocks go.
///
/// ```
/// use standin::{Coordinator, CoordinatorConfig, EngineTime, HandoffId};
/// use standin::handoff::{CoordinatorAction, CoordinatorFact};
/// # let id = HandoffId(uuid::Uuid::from_u128(7));
///
/// let mut coordinator = Coordinator::new(id, CoordinatorConfig::vllm(), EngineTime::ZERO)?;
/// let first = coordinator.poll_action().expect("the source goes first");
/// assert_eq!(first.action, CoordinatorAction::SubmitPrefill);
/// coordinator.apply(CoordinatorFact::Cancelled, EngineTime::from_millis(3));
/// let both: Vec<_> = std::iter::from_fn(|| coordinator.poll_action()).map(|issued| issued.action).collect();
/// assert!(matches!(both[..], [CoordinatorAction::CancelDestination { .. }, CoordinatorAction::CancelSource]));
/// # Ok::<(), standin::ConfigError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Coordinator {
    id: HandoffId,
    config: CoordinatorConfig,
    state: State,
    /// When the whole handoff times out; a transfer moves it on by its own length.
    deadline: EngineTime,
    outbox: Outbox,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// `reserved`: the tokens that the destination lacks, where it went first.
    Prefilling {
        submit: ActionId,
        reserved: Option<u32>,
    },
    Reserving {
        reserve: ActionId,
        source: SourceSoFar,
    },
    Transferring {
        start: ActionId,
        started: EngineTime,
        held: Held,
    },
    Activating {
        activate: ActionId,
    },
    Recomputing {
        recompute: ActionId,
        cause: Failure,
    },
    Ending(Ending),
    Ended(HandoffOutcome),
}

/// What is known of the source while the destination waits for its blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
enum SourceSoFar {
    /// Nothing: the destination goes first.
    NotAsked,
    Held(Held),
    /// It was held and is gone; the destination computes the prompt itself when it can.
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Held {
    timing: TransferTiming,
    first_token: Option<u32>,
    overlapped: Duration,
    next_heartbeat: Option<EngineTime>,
    last_heartbeat: Option<ActionId>,
}

/// `None` where nothing is waited for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ending {
    source: Option<ActionId>,
    destination: Option<ActionId>,
    outcome: HandoffOutcome,
    deadline: EngineTime,
}

#[derive(Debug, Clone, Default)]
struct Outbox {
    next_id: u64,
    waiting: VecDeque<IssuedAction>,
}

impl Coordinator {
    /// A coordinator of this handoff, which begins at `now`. Its first action is ready.
    ///
    /// # Errors
    /// What [`CoordinatorConfig::validate`] finds.
    pub fn new(id: HandoffId, config: CoordinatorConfig, now: EngineTime) -> Result<Self, ConfigError> {
        config.validate()?;
        let mut outbox = Outbox::default();
        let state = match config.order {
            HandoffOrder::SourceFirst => outbox.prefill(None),
            HandoffOrder::DestinationFirst => outbox.reserve(SourceSoFar::NotAsked),
        };
        Ok(Self { id, state, deadline: now + config.timeout, config, outbox })
    }

    /// The handoff.
    #[must_use]
    pub fn id(&self) -> HandoffId {
        self.id
    }

    /// Takes a fact in at `now`. Never fails: what does not fit changes nothing.
    pub fn apply(&mut self, fact: Fact, now: EngineTime) {
        self.state = self.transition(fact, now);
    }

    /// Times out, or sends a heartbeat, if that is due at `now`; call it while [`Coordinator::next_deadline`] is not later.
    pub fn tick(&mut self, now: EngineTime) {
        if self.times_out_at().is_some_and(|at| at <= now) {
            self.state = self.time_out(now);
        } else if let Some(interval) = self.config.heartbeat
            && let Some(held) = self.state.held_mut()
            && let Some(due) = held.next_heartbeat.filter(|due| *due <= now)
        {
            // One is enough however late it is; the rhythm is kept where that is still possible.
            let next = due + interval;
            held.next_heartbeat = Some(if next > now { next } else { now + interval });
            held.last_heartbeat = Some(self.outbox.issue(Action::Heartbeat));
        }
    }

    /// When to call [`Coordinator::tick`]; `None` if only a fact can change anything.
    #[must_use]
    pub fn next_deadline(&self) -> Option<EngineTime> {
        let heartbeat = self.state.held().and_then(|held| held.next_heartbeat);
        self.times_out_at().into_iter().chain(heartbeat).min()
    }

    /// The next action to carry out, in order.
    pub fn poll_action(&mut self) -> Option<IssuedAction> {
        self.outbox.waiting.pop_front()
    }

    /// How the handoff ended; `None` while it has not. Nothing changes any more once it has.
    #[must_use]
    pub fn outcome(&self) -> Option<HandoffOutcome> {
        match self.state {
            State::Ended(outcome) => Some(outcome),
            _ => None,
        }
    }

    fn time_out(&mut self, now: EngineTime) -> State {
        match self.state {
            State::Transferring { .. } => self.fail(Failure::TransferTimedOut, now),
            State::Ending(ending) => self.settle(Ending { source: None, destination: None, ..ending }),
            _ => self.transition(Fact::TimedOut, now),
        }
    }

    fn times_out_at(&self) -> Option<EngineTime> {
        match self.state {
            State::Transferring { started, .. } => self.config.transfer_timeout.map(|timeout| started + timeout),
            State::Ending(ending) => Some(ending.deadline),
            State::Ended(_) => None,
            _ => Some(self.deadline),
        }
    }

    /// The state after `fact`: one arm per arrow of the diagram that leads on, and the last one for those that fail.
    fn transition(&mut self, fact: Fact, now: EngineTime) -> State {
        use ActionOutcome::Done;
        match (self.state, fact) {
            (state @ State::Ended(_), _) => state,
            (State::Ending(ending), fact) => self.settle(ending.after(fact)),

            (State::Prefilling { reserved, .. }, Fact::SourceHeld { timing, first_token, overlapped_prefill }) => {
                self.source_held(Held::new(timing, first_token, overlapped_prefill), reserved, now)
            }
            (State::Reserving { source, .. }, Fact::DestinationReserved { transferable_prompt_tokens: missing }) => {
                match source {
                    SourceSoFar::NotAsked => self.outbox.prefill(Some(missing)),
                    SourceSoFar::Held(held) => self.transfer(held, missing, now),
                    SourceSoFar::Lost => self.outbox.recompute(Failure::SourceGone),
                }
            }
            (State::Transferring { started, held, .. }, Fact::TransferCompleted) => {
                self.do_not_count_since(started, now);
                self.outbox.activate(held.first_token)
            }
            (State::Activating { activate }, Fact::Outcome { action, outcome: Done })
                if action == activate || seeded_bug!(AnyAnswerConfirms) =>
            {
                let source = self.outbox.issue(Action::ReleaseSource);
                self.end(HandoffOutcome::Completed, Some(source), None, now)
            }
            (State::Recomputing { recompute, cause }, Fact::Outcome { action, outcome: Done })
                if action == recompute =>
            {
                let source = self.outbox.issue(Action::CancelSource);
                self.end(HandoffOutcome::Recomputed(cause), Some(source), None, now)
            }
            (state, fact) => match state.failure(fact) {
                Some(failure) => self.fail(failure, now),
                None => state,
            },
        }
    }

    fn source_held(&mut self, mut held: Held, reserved: Option<u32>, now: EngineTime) -> State {
        if self.config.first_token == FirstToken::Recomputed {
            held.first_token = None;
        } else if held.first_token.is_none() {
            return self.fail(Failure::FirstTokenMissing, now);
        }
        held.next_heartbeat = self.config.heartbeat.map(|interval| now + interval);
        match reserved {
            None => self.outbox.reserve(SourceSoFar::Held(held)),
            Some(missing) => self.transfer(held, missing, now),
        }
    }

    /// Both sides are ready.
    fn transfer(&mut self, held: Held, missing_tokens: u32, now: EngineTime) -> State {
        let tokens = held.timing.tokens(missing_tokens);
        if tokens == 0 {
            return self.outbox.activate(held.first_token);
        }
        let overlapped = match self.config.overlap {
            TransferOverlap::AfterPrefill => Duration::ZERO,
            TransferOverlap::ChunkWise => held.overlapped,
        };
        let cost = held.timing.cost(missing_tokens).map(|cost| cost.scaled(self.config.speedup).exposed(overlapped));
        let start = self.outbox.issue(Action::StartTransfer { tokens, cost });
        State::Transferring { start, started: now, held }
    }

    fn do_not_count_since(&mut self, started: EngineTime, now: EngineTime) {
        if !seeded_bug!(TransfersCountAsWaiting) {
            self.deadline = self.deadline + now.saturating_since(started);
        }
    }

    fn fail(&mut self, failure: Failure, now: EngineTime) -> State {
        if self.config.on_transfer_failure == TransferFailurePolicy::Recompute && failure.is_of_transfer() {
            match self.state {
                State::Reserving { reserve, source: SourceSoFar::Held(_) } => {
                    return State::Reserving { reserve, source: SourceSoFar::Lost };
                }
                State::Transferring { started, .. } => {
                    self.do_not_count_since(started, now);
                    return self.outbox.recompute(failure);
                }
                _ => {}
            }
        }
        let reported_over = matches!(failure, Failure::TransferFailed | Failure::TransferRefused(_));
        let transfer_in_flight = matches!(self.state, State::Transferring { .. }) && !reported_over;
        let early = seeded_bug!(CancelsTheSourceFirst).then(|| self.outbox.issue(Action::CancelSource));
        let destination = self.outbox.issue(Action::CancelDestination { transfer_in_flight, failure });
        let source = early.unwrap_or_else(|| self.outbox.issue(Action::CancelSource));
        // Who is gone need not answer.
        let destination = Some(destination).filter(|_| failure != Failure::DestinationGone);
        let source = Some(source).filter(|_| failure != Failure::SourceGone);
        self.end(HandoffOutcome::Failed(failure), source, destination, now)
    }

    /// The last words are said; their answers are waited for, but not for ever.
    fn end(
        &mut self,
        outcome: HandoffOutcome,
        source: Option<ActionId>,
        destination: Option<ActionId>,
        now: EngineTime,
    ) -> State {
        State::Ending(Ending { source, destination, outcome, deadline: now + self.config.settle_timeout })
    }

    fn settle(&mut self, ending: Ending) -> State {
        if ending.source.is_some() || ending.destination.is_some() {
            return State::Ending(ending);
        }
        self.outbox.issue(Action::Complete(ending.outcome));
        State::Ended(ending.outcome)
    }
}

impl Ending {
    fn after(mut self, fact: Fact) -> Self {
        match fact {
            // A refused last word finds nothing to end, so every answer will do.
            Fact::Outcome { action, .. } => {
                self.source = self.source.filter(|waited| *waited != action);
                self.destination = self.destination.filter(|waited| *waited != action);
            }
            Fact::SourceGone => self.source = None,
            Fact::DestinationGone => self.destination = None,
            _ => {}
        }
        self
    }
}

impl State {
    /// What `fact` breaks in this state, if anything.
    fn failure(self, fact: Fact) -> Option<Failure> {
        match (self, fact) {
            (state, Fact::Outcome { action, outcome: ActionOutcome::Refused(why) }) => match state {
                Self::Prefilling { submit, .. } if submit == action => Some(Failure::SourceRefused(why)),
                Self::Reserving { reserve, .. } if reserve == action => Some(Failure::DestinationRefused(why)),
                Self::Transferring { start, .. } if start == action => Some(Failure::TransferRefused(why)),
                Self::Activating { activate } if activate == action => Some(Failure::ActivationRefused(why)),
                Self::Recomputing { recompute, .. } if recompute == action => Some(Failure::RecomputeRefused(why)),
                state => state.held().filter(|held| held.last_heartbeat == Some(action)).map(|_| Failure::SourceGone),
            },
            // The destination does not need it any more.
            (Self::Activating { .. } | Self::Recomputing { .. }, Fact::SourceGone) => None,
            (Self::Reserving { source: SourceSoFar::Lost, .. }, Fact::SourceGone) => None,
            (_, Fact::SourceGone) => Some(Failure::SourceGone),
            (_, Fact::DestinationGone) => Some(Failure::DestinationGone),
            (Self::Transferring { .. }, Fact::TransferFailed) => Some(Failure::TransferFailed),
            (_, Fact::TimedOut) => Some(Failure::TimedOut),
            (_, Fact::Cancelled) => Some(Failure::Cancelled),
            _ => None,
        }
    }

    /// The source's blocks, while they are held and still needed.
    fn held(&self) -> Option<&Held> {
        match self {
            Self::Reserving { source: SourceSoFar::Held(held), .. } | Self::Transferring { held, .. } => Some(held),
            _ => None,
        }
    }

    fn held_mut(&mut self) -> Option<&mut Held> {
        match self {
            Self::Reserving { source: SourceSoFar::Held(held), .. } | Self::Transferring { held, .. } => Some(held),
            _ => None,
        }
    }
}

impl Held {
    fn new(timing: TransferTiming, first_token: Option<u32>, overlapped: Duration) -> Self {
        Self { timing, first_token, overlapped, next_heartbeat: None, last_heartbeat: None }
    }
}

impl Outbox {
    fn issue(&mut self, action: Action) -> ActionId {
        let id = ActionId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(IssuedAction { id, action });
        id
    }

    fn prefill(&mut self, reserved: Option<u32>) -> State {
        State::Prefilling { submit: self.issue(Action::SubmitPrefill), reserved }
    }

    fn reserve(&mut self, source: SourceSoFar) -> State {
        State::Reserving { reserve: self.issue(Action::ReserveDestination), source }
    }

    fn activate(&mut self, first_token: Option<u32>) -> State {
        State::Activating { activate: self.issue(Action::ActivateDestination { first_token }) }
    }

    fn recompute(&mut self, cause: Failure) -> State {
        State::Recomputing { recompute: self.issue(Action::RecomputeDestination), cause }
    }
}

#[cfg(test)]
#[path = "coordinator_test.rs"]
mod tests;

#[cfg(test)]
#[path = "coordinator_exhaustive_test.rs"]
mod exhaustive;
