use uuid::Uuid;

use super::*;
use crate::config::Speedup;
use crate::handoff::{Refusal, TransferCost, TransferTimingMode};

const TOKEN: u32 = 4_711;

fn ms(ms: u64) -> EngineTime {
    EngineTime::from_millis(ms)
}

fn secs(secs: u64) -> EngineTime {
    ms(secs * 1_000)
}

/// 1 ms per token on the wire.
fn timing(mode: TransferTimingMode) -> TransferTiming {
    TransferTiming {
        mode,
        full_prompt_tokens: 40,
        kv_bytes_per_token: Some(1_000_000),
        bandwidth_gb_s: Some(1.0),
        setup: Duration::from_millis(2),
    }
}

fn held() -> Fact {
    Fact::SourceHeld {
        timing: timing(TransferTimingMode::MissingTokens),
        first_token: Some(TOKEN),
        overlapped_prefill: Duration::from_millis(12),
    }
}

fn reserved(transferable_prompt_tokens: u32) -> Fact {
    Fact::DestinationReserved { transferable_prompt_tokens }
}

fn start(tokens: u32, setup_ms: u64, wire_ms: u64) -> Action {
    let cost = TransferCost { setup: Duration::from_millis(setup_ms), wire: Duration::from_millis(wire_ms) };
    Action::StartTransfer { tokens, cost: Some(cost) }
}

fn cancel_destination(failure: Failure, transfer_in_flight: bool) -> Action {
    Action::CancelDestination { transfer_in_flight, failure }
}

/// A coordinator and the actions it has issued and that are not answered yet.
struct Script {
    coordinator: Coordinator,
    unanswered: Vec<IssuedAction>,
}

impl Script {
    fn new(config: CoordinatorConfig) -> Self {
        let id = HandoffId(Uuid::from_u128(1));
        let coordinator = Coordinator::new(id, config, EngineTime::ZERO).expect("valid");
        Self { coordinator, unanswered: Vec::new() }
    }

    fn issued(&mut self) -> Vec<Action> {
        let issued: Vec<_> = std::iter::from_fn(|| self.coordinator.poll_action()).collect();
        self.unanswered.extend(&issued);
        issued.iter().map(|issued| issued.action).collect()
    }

    fn tell(&mut self, fact: Fact, now: EngineTime) -> Vec<Action> {
        self.coordinator.apply(fact, now);
        self.issued()
    }

    fn tick(&mut self, now: EngineTime) -> Vec<Action> {
        self.coordinator.tick(now);
        self.issued()
    }

    /// Answers the oldest unanswered action of this kind.
    fn answer(&mut self, action: Action, outcome: ActionOutcome, now: EngineTime) -> Vec<Action> {
        let place = self.unanswered.iter().position(|issued| issued.action == action).expect("was issued");
        let id = self.unanswered.remove(place).id;
        self.tell(Fact::Outcome { action: id, outcome }, now)
    }

    /// Source first, up to a running transfer of 10 tokens that started at 100 ms.
    fn transferring(config: CoordinatorConfig) -> Self {
        let mut script = Self::new(config);
        assert_eq!(script.issued(), [Action::SubmitPrefill]);
        assert_eq!(script.tell(held(), ms(50)), [Action::ReserveDestination]);
        assert_eq!(script.tell(reserved(10), ms(100)), [start(10, 2, 10)]);
        script
    }
}

const DONE: ActionOutcome = ActionOutcome::Done;
const REFUSED: ActionOutcome = ActionOutcome::Refused(Refusal::Other);

#[test]
fn h13_source_first_and_the_destination_recomputes() {
    let mut script = Script::new(CoordinatorConfig::vllm());
    assert_eq!(script.issued(), [Action::SubmitPrefill]);
    assert_eq!(script.answer(Action::SubmitPrefill, DONE, ms(0)), []);
    assert_eq!(script.tell(held(), ms(50)), [Action::ReserveDestination]);
    assert_eq!(script.answer(Action::ReserveDestination, DONE, ms(50)), []);
    assert_eq!(script.tell(reserved(10), ms(60)), [start(10, 2, 10)]);
    let activate = Action::ActivateDestination { first_token: None };
    assert_eq!(script.tell(Fact::TransferCompleted, ms(72)), [activate]);
    assert_eq!(script.answer(activate, DONE, ms(72)), [Action::ReleaseSource]);
    assert_eq!(script.coordinator.outcome(), None);
    let complete = Action::Complete(HandoffOutcome::Completed);
    assert_eq!(script.answer(Action::ReleaseSource, DONE, ms(72)), [complete]);
    assert_eq!(script.coordinator.outcome(), Some(HandoffOutcome::Completed));
    assert_eq!(script.coordinator.next_deadline(), None);
    let ids: Vec<_> = script.unanswered.iter().map(|issued| issued.id.0).collect();
    assert_eq!(ids, [2, 5], "start and complete need no answer");
}

#[test]
fn case_96_destination_first_and_the_token_is_carried_over() {
    let mut script = Script::new(CoordinatorConfig::sglang());
    assert_eq!(script.issued(), [Action::ReserveDestination]);
    assert_eq!(script.tell(held(), ms(1)), [], "nobody has asked the source yet");
    assert_eq!(script.tell(reserved(30), ms(5)), [Action::SubmitPrefill]);
    assert_eq!(script.tell(held(), ms(50)), [start(30, 0, 20)], "12 of 32 ms lay under the prefill");
    let activate = Action::ActivateDestination { first_token: Some(TOKEN) };
    assert_eq!(script.tell(Fact::TransferCompleted, ms(70)), [activate]);
    assert_eq!(script.answer(activate, DONE, ms(70)), [Action::ReleaseSource]);
}

#[test]
fn transfer_costs_are_engine_time_before_the_prefill_is_taken_off() {
    let mut script = Script::new(CoordinatorConfig::sglang().with_speedup(Speedup::Factor(2.0)));
    script.tell(reserved(30), ms(5));
    let issued = script.tell(held(), ms(50));
    assert_eq!(issued, [start(30, 0, 4)], "32 ms at twice the speed are 16, 12 of them hidden");
    let unknown = TransferTiming { bandwidth_gb_s: None, ..timing(TransferTimingMode::FullPrompt) };
    let mut script = Script::new(CoordinatorConfig::vllm());
    let held = Fact::SourceHeld { timing: unknown, first_token: None, overlapped_prefill: Duration::ZERO };
    script.tell(held, ms(1));
    script.issued();
    assert_eq!(script.tell(reserved(0), ms(2)), [Action::StartTransfer { tokens: 40, cost: None }]);
}

#[test]
fn a_missing_first_token_fails_only_where_it_is_carried_over() {
    let held = Fact::SourceHeld {
        timing: timing(TransferTimingMode::FullPrompt),
        first_token: None,
        overlapped_prefill: Duration::ZERO,
    };
    let mut vllm = Script::new(CoordinatorConfig::vllm());
    vllm.issued();
    assert_eq!(vllm.tell(held, ms(1)), [Action::ReserveDestination]);
    let mut tensorrt = Script::new(CoordinatorConfig::tensorrt_llm());
    tensorrt.issued();
    let failure = Failure::FirstTokenMissing;
    assert_eq!(tensorrt.tell(held, ms(1)), [cancel_destination(failure, false), Action::CancelSource]);
}

#[test]
fn case_91_and_92_heartbeats_keep_the_source_and_their_refusal_says_that_it_is_gone() {
    let mut script = Script::new(CoordinatorConfig::vllm());
    script.issued();
    script.tell(held(), secs(1));
    let mut beats = 0;
    while script.coordinator.next_deadline().is_some_and(|at| at <= secs(61)) {
        let at = script.coordinator.next_deadline().expect("just seen");
        assert_eq!(at, secs(1 + 5 * (beats + 1)), "every sixth of 30 s");
        assert_eq!(script.tick(at), [Action::Heartbeat]);
        assert_eq!(script.tick(at), [], "once");
        beats += 1;
    }
    assert_eq!(beats, 12, "60 s in the destination's queue");
    assert_eq!(script.tick(secs(79)), [Action::Heartbeat], "one makes up for the three that are late");
    assert_eq!(script.coordinator.next_deadline(), Some(secs(84)));
    assert_eq!(
        script.answer(Action::Heartbeat, REFUSED, secs(79)),
        [],
        "the first one's answer comes too late to count"
    );
    script.unanswered.retain(|issued| issued.id == ActionId(14));
    let expected = [cancel_destination(Failure::SourceGone, false), Action::CancelSource];
    assert_eq!(script.answer(Action::Heartbeat, REFUSED, secs(80)), expected);
}

#[test]
fn case_91_a_lost_source_is_recomputed_if_the_policy_says_so() {
    let config = CoordinatorConfig::vllm().with_on_transfer_failure(TransferFailurePolicy::Recompute);
    let mut queued = Script::new(config.clone());
    queued.issued();
    queued.tell(held(), ms(1));
    assert_eq!(queued.tell(Fact::SourceGone, ms(2)), [], "the destination still waits for its blocks");
    assert_eq!(queued.coordinator.next_deadline(), Some(secs(300)), "and nobody hears heartbeats");
    assert_eq!(queued.tell(reserved(10), ms(3)), [Action::RecomputeDestination]);
    assert_eq!(queued.answer(Action::RecomputeDestination, DONE, ms(3)), [Action::CancelSource]);
    let outcome = HandoffOutcome::Recomputed(Failure::SourceGone);
    assert_eq!(queued.answer(Action::CancelSource, REFUSED, ms(3)), [Action::Complete(outcome)]);

    for (fact, failure) in [(Fact::TransferFailed, Failure::TransferFailed), (Fact::SourceGone, Failure::SourceGone)] {
        let mut script = Script::transferring(config.clone());
        assert_eq!(script.tell(fact, ms(105)), [Action::RecomputeDestination]);
        assert_eq!(script.answer(Action::RecomputeDestination, DONE, ms(105)), [Action::CancelSource]);
        script.answer(Action::CancelSource, DONE, ms(106));
        assert_eq!(script.coordinator.outcome(), Some(HandoffOutcome::Recomputed(failure)));
    }
    let mut late = Script::transferring(config.clone().with_heartbeat(None));
    assert_eq!(late.tick(ms(480_100)), [Action::RecomputeDestination], "a transfer that timed out");
    let mut cancelled = Script::transferring(config);
    let failure = Failure::Cancelled;
    assert_eq!(
        cancelled.tell(Fact::Cancelled, ms(105)),
        [cancel_destination(failure, true), Action::CancelSource],
        "what is not the transfer's fault is not mended by computing"
    );
}

#[test]
fn case_93_a_full_local_hit_transfers_nothing_and_still_releases_the_source() {
    let mut script = Script::new(CoordinatorConfig::vllm());
    script.issued();
    script.tell(held(), ms(1));
    let activate = Action::ActivateDestination { first_token: None };
    assert_eq!(script.tell(reserved(0), ms(2)), [activate]);
    assert_eq!(script.answer(activate, DONE, ms(2)), [Action::ReleaseSource]);
}

#[test]
fn case_95_nothing_is_transferred_before_the_destination_has_its_blocks() {
    let mut script = Script::new(CoordinatorConfig::vllm().with_heartbeat(None));
    script.issued();
    assert_eq!(script.tell(reserved(10), ms(1)), [], "not asked yet");
    script.tell(held(), ms(2));
    assert_eq!(script.tell(Fact::TransferCompleted, ms(3)), [], "there is no transfer");
    assert_eq!(script.tick(secs(299)), [], "held, not lost");
    assert_eq!(script.tell(reserved(10), secs(299)), [start(10, 2, 10)]);
}

#[test]
fn case_99_and_100_the_destination_hears_whether_a_transfer_may_still_write() {
    let cases = [
        (Fact::Cancelled, Failure::Cancelled, true),
        (Fact::SourceGone, Failure::SourceGone, true),
        (Fact::DestinationGone, Failure::DestinationGone, true),
        (Fact::TimedOut, Failure::TimedOut, true),
        (Fact::TransferFailed, Failure::TransferFailed, false),
    ];
    for (fact, failure, in_flight) in cases {
        let mut script = Script::transferring(CoordinatorConfig::vllm());
        let expected = [cancel_destination(failure, in_flight), Action::CancelSource];
        assert_eq!(script.tell(fact, ms(105)), expected, "{fact:?}");
        let mut last = script.answer(Action::CancelSource, DONE, ms(105));
        last.extend(script.answer(expected[0], DONE, ms(105)));
        assert_eq!(last, [Action::Complete(HandoffOutcome::Failed(failure))], "{fact:?}");
    }
}

#[test]
fn case_101_a_prompt_shorter_than_a_block_is_transferred() {
    let mut script = Script::new(CoordinatorConfig::vllm());
    script.issued();
    let timing = TransferTiming { full_prompt_tokens: 3, ..timing(TransferTimingMode::MissingTokens) };
    script.tell(Fact::SourceHeld { timing, first_token: None, overlapped_prefill: Duration::ZERO }, ms(1));
    assert_eq!(script.tell(reserved(3), ms(2)), [start(3, 2, 3)], "tokens, not blocks, are what is moved");
}

#[test]
fn case_103_completion_after_cancel_is_ignored_and_cancel_after_completion_releases_once() {
    let mut script = Script::transferring(CoordinatorConfig::vllm());
    assert_eq!(script.tell(Fact::Cancelled, ms(105)).len(), 2);
    assert_eq!(script.tell(Fact::TransferCompleted, ms(112)), []);
    assert_eq!(script.tell(Fact::Cancelled, ms(113)), []);

    let mut script = Script::transferring(CoordinatorConfig::vllm());
    let activate = Action::ActivateDestination { first_token: None };
    script.tell(Fact::TransferCompleted, ms(112));
    assert_eq!(script.answer(activate, DONE, ms(112)), [Action::ReleaseSource]);
    assert_eq!(script.tell(Fact::Cancelled, ms(112)), [], "the request's own stream is what to cancel now");
    let complete = Action::Complete(HandoffOutcome::Completed);
    assert_eq!(script.answer(Action::ReleaseSource, DONE, ms(112)), [complete]);
    assert_eq!(script.tell(Fact::Cancelled, ms(112)), []);
}

#[test]
fn case_104_a_refused_activation_never_releases_the_source() {
    let mut script = Script::transferring(CoordinatorConfig::vllm());
    let activate = Action::ActivateDestination { first_token: None };
    assert_eq!(script.tell(Fact::TransferCompleted, ms(112)), [activate]);
    let failure = Failure::ActivationRefused(Refusal::Other);
    let expected = [cancel_destination(failure, false), Action::CancelSource];
    assert_eq!(script.answer(activate, REFUSED, ms(112)), expected);
}

#[test]
fn a_source_that_goes_after_its_kv_has_arrived_spoils_nothing() {
    let mut script = Script::transferring(CoordinatorConfig::vllm());
    let activate = Action::ActivateDestination { first_token: None };
    assert_eq!(script.tell(Fact::TransferCompleted, ms(112)), [activate]);
    assert_eq!(script.tell(Fact::SourceGone, ms(113)), []);
    assert_eq!(script.answer(activate, DONE, ms(114)), [Action::ReleaseSource], "it may be there all the same");
    let complete = Action::Complete(HandoffOutcome::Completed);
    assert_eq!(script.answer(Action::ReleaseSource, REFUSED, ms(114)), [complete]);
}

#[test]
fn the_end_waits_for_the_answers_of_both_sides_and_for_no_others() {
    let mut script = Script::transferring(CoordinatorConfig::vllm());
    let expected = [cancel_destination(Failure::Cancelled, true), Action::CancelSource];
    assert_eq!(script.tell(Fact::Cancelled, ms(105)), expected);
    for late in [Action::SubmitPrefill, Action::ReserveDestination, start(10, 2, 10)] {
        assert_eq!(script.answer(late, DONE, ms(106)), []);
    }
    assert_eq!(script.answer(Action::CancelSource, DONE, ms(107)), []);
    let complete = Action::Complete(HandoffOutcome::Failed(Failure::Cancelled));
    assert_eq!(script.answer(expected[0], DONE, ms(108)), [complete]);
}

#[test]
fn case_105_a_transfer_has_60_s_on_tensorrt_llm() {
    let mut script = Script::transferring(CoordinatorConfig::tensorrt_llm());
    let end = ms(100) + Duration::from_secs(60);
    assert_eq!(script.coordinator.next_deadline(), Some(end));
    assert_eq!(script.tick(ms(60_099)), []);
    let failure = Failure::TransferTimedOut;
    assert_eq!(script.tick(end), [cancel_destination(failure, true), Action::CancelSource]);
    assert_eq!(script.coordinator.next_deadline(), Some(end + Duration::from_secs(30)));
    let complete = Action::Complete(HandoffOutcome::Failed(failure));
    assert_eq!(script.tick(end + Duration::from_secs(30)), [complete], "nobody answered the cancels");
}

#[test]
fn h13_the_overall_timeout_does_not_count_the_transfer() {
    let mut script = Script::new(CoordinatorConfig::vllm());
    script.issued();
    assert_eq!(script.coordinator.next_deadline(), Some(secs(300)));
    let mut unanswered = Script::transferring(CoordinatorConfig::vllm().with_heartbeat(None));
    let long_after = secs(400);
    unanswered.tell(Fact::TransferCompleted, long_after);
    let end = ms(399_900) + Duration::from_secs(300);
    assert_eq!(unanswered.coordinator.next_deadline(), Some(end), "300 s and the 399.9 s of the transfer");
    let expected = [cancel_destination(Failure::TimedOut, false), Action::CancelSource];
    assert_eq!(unanswered.tick(end), expected);
}

#[cfg(feature = "serde")]
mod json {
    use super::*;

    fn round_trip<T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug>(
        value: &T,
    ) -> String {
        let json = serde_json::to_string(value).expect("serialises");
        assert_eq!(&serde_json::from_str::<T>(&json).expect(&json), value, "{json}");
        json
    }

    #[test]
    fn h14_facts_survive_json() {
        let facts = [
            held(),
            reserved(7),
            Fact::TransferCompleted,
            Fact::TransferFailed,
            Fact::SourceGone,
            Fact::DestinationGone,
            Fact::TimedOut,
            Fact::Cancelled,
            Fact::Outcome { action: ActionId(3), outcome: DONE },
            Fact::Outcome { action: ActionId(u64::MAX), outcome: ActionOutcome::Refused(Refusal::NotHeld) },
        ];
        let json: Vec<_> = facts.iter().map(round_trip).collect();
        assert_eq!(json[1], r#"{"destination_reserved":{"transferable_prompt_tokens":7}}"#);
        assert_eq!(json[2], r#""transfer_completed""#);
        assert_eq!(json[8], r#"{"outcome":{"action":3,"outcome":"done"}}"#);
    }

    #[test]
    fn h14_actions_and_ids_survive_json() {
        let failures = [
            Failure::SourceRefused(Refusal::Rejected),
            Failure::DestinationRefused(Refusal::Stopped),
            Failure::TransferRefused(Refusal::Other),
            Failure::ActivationRefused(Refusal::NotReserved),
            Failure::RecomputeRefused(Refusal::Superseded),
            Failure::FirstTokenMissing,
            Failure::SourceGone,
            Failure::DestinationGone,
            Failure::TransferFailed,
            Failure::TransferTimedOut,
            Failure::TimedOut,
            Failure::Cancelled,
        ];
        let mut actions = vec![
            Action::SubmitPrefill,
            Action::ReserveDestination,
            Action::Heartbeat,
            start(10, 2, 10),
            Action::StartTransfer { tokens: 1, cost: None },
            Action::ActivateDestination { first_token: Some(TOKEN) },
            Action::RecomputeDestination,
            Action::ReleaseSource,
            Action::CancelSource,
            Action::Complete(HandoffOutcome::Completed),
        ];
        for failure in failures {
            actions.push(cancel_destination(failure, true));
            actions.push(Action::Complete(HandoffOutcome::Failed(failure)));
            actions.push(Action::Complete(HandoffOutcome::Recomputed(failure)));
        }
        for (id, action) in (0..).map(ActionId).zip(actions) {
            round_trip(&IssuedAction { id, action });
        }
        let json = round_trip(&IssuedAction { id: ActionId(4), action: Action::ReleaseSource });
        assert_eq!(json, r#"{"id":4,"action":"release_source"}"#);
        let id = HandoffId(Uuid::from_u128(0x1234_5678));
        assert_eq!(round_trip(&id), r#""00000000-0000-0000-0000-000012345678""#);
    }
}
