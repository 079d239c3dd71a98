//! Facts, times and faults in any order, to a coordinator with its link.

use std::time::Duration;

use arbitrary::{Result, Unstructured};
use standin::handoff::{
    ActionId, ActionOutcome, CoordinatorAction as Action, CoordinatorFact as Fact, FaultRates, Faults, HandoffOrder,
    Link, LinkSharing, Refusal, TransferFailurePolicy, TransferOverlap, TransferTiming, TransferTimingMode,
};
use standin::{Coordinator, CoordinatorConfig, EngineTime, FirstToken, HandoffId, Speedup};
use uuid::Uuid;

use super::requests::time;

const ID: HandoffId = HandoffId(Uuid::from_u128(7));

pub(crate) fn coordinator_operations(data: &[u8]) {
    let mut bytes = Unstructured::new(data);
    let Ok(Some(mut run)) = Run::new(&mut bytes) else { return };
    for _ in 0..300 {
        if bytes.is_empty() || run.operate(&mut bytes).is_err() {
            break;
        }
    }
    run.close();
}

struct Run {
    coordinator: Coordinator,
    link: Link,
    faults: Faults,
    now: EngineTime,
    issued: Vec<(ActionId, Action)>,
    /// Transfers of the link that have been seen to finish, and how many were started.
    finished: Vec<standin::handoff::TransferId>,
    last_finish: EngineTime,
    started: usize,
    aborted: usize,
}

impl Run {
    fn new(bytes: &mut Unstructured<'_>) -> Result<Option<Self>> {
        let config = config(bytes)?;
        let sharing = *bytes.choose(&[LinkSharing::Unshared, LinkSharing::FairShare])?;
        let rate = |bytes: &mut Unstructured<'_>| bytes.choose(&[0.0, 0.0, 0.0, 0.5, 1.0, f64::NAN]).copied();
        let rates = FaultRates::default()
            .with_lost(rate(bytes)?)
            .with_duplicated(rate(bytes)?)
            .with_delayed(rate(bytes)?)
            .with_max_delay(span(bytes)?)
            .with_source_gone(rate(bytes)?)
            .with_gone_within(span(bytes)?);
        let now = time(bytes, EngineTime::from_millis(1))?;
        let Ok(faults) = Faults::new(rates, 3, ID, now) else { return Ok(None) };
        let Ok(coordinator) = Coordinator::new(ID, config, now) else { return Ok(None) };
        Ok(Some(Self {
            coordinator,
            link: Link::new(sharing),
            faults,
            now,
            issued: Vec::new(),
            finished: Vec::new(),
            last_finish: EngineTime::ZERO,
            started: 0,
            aborted: 0,
        }))
    }

    fn operate(&mut self, bytes: &mut Unstructured<'_>) -> Result<()> {
        self.now = self.now.max(time(bytes, self.now)?);
        match bytes.int_in_range(0..=9_u8)? {
            0..=3 => {
                let fact = self.fact(bytes)?;
                self.coordinator.apply(fact, self.now);
            }
            4 => {
                let fact = self.fact(bytes)?;
                self.faults.push(fact, self.now);
            }
            5 => self.coordinator.tick(self.now),
            6 => {
                let cost = standin::handoff::TransferCost { setup: span(bytes)?, wire: span(bytes)? };
                let id = self.link.start(cost, self.now);
                self.started += 1;
                assert!(self.link.expected_finish(id).is_none_or(|at| at >= self.now));
            }
            7 => {
                let id = standin::handoff::TransferId(bytes.int_in_range(0..=self.started as u64)?);
                let before = self.link.in_flight();
                // The ends by now come first.
                let aborted = self.link.abort(id, self.now);
                self.aborted += usize::from(aborted);
                assert!(self.link.in_flight() <= before);
            }
            8 => self.now = self.coordinator.next_deadline().unwrap_or(self.now).max(self.now),
            _ => self.now = self.link.next_deadline().unwrap_or(self.now).max(self.now),
        }
        self.turn();
        Ok(())
    }

    /// What an owner does in between, and what must hold then.
    fn turn(&mut self) {
        while let Some(fact) = self.faults.poll(self.now) {
            self.coordinator.apply(fact, self.now);
        }
        self.link.advance(self.now);
        while let Some((id, at)) = self.link.poll_finished() {
            assert!(at <= self.now && at >= self.last_finish && !self.finished.contains(&id), "{id:?} at {at}");
            self.last_finish = at;
            self.finished.push(id);
        }
        assert_eq!(self.finished.len() + self.aborted + self.link.in_flight(), self.started);
        while let Some(issued) = self.coordinator.poll_action() {
            assert!(!self.is_complete(), "{issued:?} comes after the last word");
            assert!(self.issued.last().is_none_or(|(last, _)| *last < issued.id), "ids ascend");
            self.issued.push((issued.id, issued.action));
        }
        let count = |is: fn(&Action) -> bool| self.issued.iter().filter(|(_, action)| is(action)).count();
        assert!(count(|action| matches!(action, Action::ReleaseSource | Action::CancelSource)) <= 1);
        assert!(count(|action| matches!(action, Action::CancelDestination { .. })) <= 1);
        assert!(count(|action| matches!(action, Action::StartTransfer { .. })) <= 1);
        assert!(count(|action| matches!(action, Action::SubmitPrefill)) <= 1);
        assert_eq!(self.is_complete(), self.coordinator.outcome().is_some());
    }

    fn is_complete(&self) -> bool {
        self.issued.iter().any(|(_, action)| matches!(action, Action::Complete(_)))
    }

    fn fact(&self, bytes: &mut Unstructured<'_>) -> Result<Fact> {
        Ok(match bytes.int_in_range(0..=9_u8)? {
            0 => Fact::SourceHeld {
                timing: timing(bytes)?,
                first_token: *bytes.choose(&[None, Some(0), Some(u32::MAX)])?,
                overlapped_prefill: span(bytes)?,
            },
            1 => Fact::DestinationReserved { transferable_prompt_tokens: *bytes.choose(&[0, 1, 9, u32::MAX])? },
            2 => Fact::TransferCompleted,
            3 => *bytes.choose(&[Fact::TransferFailed, Fact::TimedOut])?,
            4 => Fact::SourceGone,
            5 => Fact::DestinationGone,
            6 if bytes.ratio(1, 4)? => Fact::Cancelled,
            _ => {
                let last = self.issued.last().map_or(0, |(id, _)| id.0);
                let action = ActionId(if bytes.ratio(1, 8)? { u64::MAX } else { bytes.int_in_range(0..=last)? });
                let refused = [Refusal::Stopped, Refusal::NotHeld, Refusal::Other];
                let outcome = match bytes.int_in_range(0..=5_usize)? {
                    index @ 0..=2 => ActionOutcome::Refused(refused[index]),
                    _ => ActionOutcome::Done,
                };
                Fact::Outcome { action, outcome }
            }
        })
    }

    /// A cancel and the time for the last answers end it, however it stands.
    fn close(mut self) {
        self.coordinator.apply(Fact::Cancelled, self.now);
        self.turn();
        for turn in 0.. {
            assert!(turn < 10, "it does not end");
            let Some(deadline) = self.coordinator.next_deadline() else { break };
            self.now = self.now.max(deadline);
            self.coordinator.tick(self.now);
            self.turn();
        }
        assert!(self.is_complete());
    }
}

fn config(bytes: &mut Unstructured<'_>) -> Result<CoordinatorConfig> {
    let some = |bytes: &mut Unstructured<'_>| Ok(if bytes.ratio(1, 3)? { None } else { Some(span(bytes)?) });
    Ok(CoordinatorConfig::default()
        .with_order(*bytes.choose(&[HandoffOrder::SourceFirst, HandoffOrder::DestinationFirst])?)
        .with_first_token(*bytes.choose(&[FirstToken::Recomputed, FirstToken::CarriedOver])?)
        .with_on_transfer_failure(*bytes.choose(&[TransferFailurePolicy::Fail, TransferFailurePolicy::Recompute])?)
        .with_overlap(*bytes.choose(&[TransferOverlap::AfterPrefill, TransferOverlap::ChunkWise])?)
        .with_speedup(*bytes.choose(&[Speedup::Factor(1.0), Speedup::Instant, Speedup::Factor(f64::MIN_POSITIVE)])?)
        .with_timeout(span(bytes)?)
        .with_transfer_timeout(some(bytes)?)
        .with_heartbeat(some(bytes)?)
        .with_settle_timeout(span(bytes)?))
}

fn timing(bytes: &mut Unstructured<'_>) -> Result<TransferTiming> {
    Ok(TransferTiming {
        mode: *bytes.choose(&[TransferTimingMode::FullPrompt, TransferTimingMode::MissingTokens])?,
        full_prompt_tokens: *bytes.choose(&[0, 1, 9, u32::MAX])?,
        kv_bytes_per_token: *bytes.choose(&[None, Some(0), Some(131_072), Some(u64::MAX)])?,
        bandwidth_gb_s: *bytes.choose(&[None, Some(25.0), Some(f64::MIN_POSITIVE), Some(f64::NAN), Some(-1.0)])?,
        setup: span(bytes)?,
    })
}

fn span(bytes: &mut Unstructured<'_>) -> Result<Duration> {
    let spans =
        [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(7), Duration::from_secs(300), Duration::MAX];
    bytes.choose(&spans).copied()
}
