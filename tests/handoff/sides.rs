//! h14: a coordinator that is somewhere else. Facts, actions and outcomes cross as JSON lines.

use serde::Serialize;
use serde::de::DeserializeOwned;
use standin::handoff::{
    ActionOutcome, ActionTarget, CoordinatorAction, CoordinatorConfig, CoordinatorFact, HandoffOrder, HandoffOutcome,
    IssuedAction, Refusal, TransferCost,
};
use standin::{
    Coordinator, FinishReason, LiveEngine, LiveHandoffEvent, LiveHandoffSide, LiveLink, LiveRequest, OutputSignal,
};

use crate::common::{at, buffered, cancel_on_overflow, poll_once, read, request, seen, start, turns, whole};
use crate::kit::{
    Kind, assert_both_released, assert_released, for_every_kind, handoff_id, ms, pair_of, register, within,
};

/// Through the wire and back.
fn sent<T: Serialize + DeserializeOwned>(value: T) -> T {
    let line = serde_json::to_string(&value).expect("it serialises");
    assert!(!line.contains('\n'));
    serde_json::from_str(&line).expect(&line)
}

fn sides(prefill: &LiveEngine, decode: &LiveEngine, outputs: u32) -> ([LiveHandoffSide; 2], [LiveRequest; 2]) {
    let (source, source_stream) = prefill.prepare_request(request(1, 8, 1)).expect("valid");
    let (destination, stream) = decode.prepare_request(request(1, 8, outputs)).expect("valid");
    let source = LiveHandoffSide::source(register(prefill, 1), source);
    let destination = LiveHandoffSide::destination(register(decode, 1), destination);
    ([source, destination], [source_stream, stream])
}

enum Happened {
    Fact(CoordinatorFact),
    Transferred,
    Signal(Option<OutputSignal>),
}

/// Drives a handoff whose coordinator sees nothing but lines; each action is sent twice.
async fn drive(
    coordinator: &mut Coordinator,
    [source, destination]: &mut [LiveHandoffSide; 2],
    stream: &mut LiveRequest,
    engine: &LiveEngine,
) -> (Vec<OutputSignal>, HandoffOutcome) {
    let (mut signals, mut transfer) = (Vec::new(), None::<TransferCost>);
    let link = LiveLink::default();
    loop {
        while let Some(issued) = coordinator.poll_action() {
            let IssuedAction { id, action } = sent(issued);
            let side = match action.target() {
                ActionTarget::Source => &mut *source,
                ActionTarget::Destination => &mut *destination,
                ActionTarget::Link => {
                    let CoordinatorAction::StartTransfer { cost, .. } = action else { panic!("{action:?}") };
                    transfer = cost;
                    continue;
                }
                _ => {
                    let CoordinatorAction::Complete(outcome) = action else { panic!("{action:?}") };
                    while let Some(signal) = within(stream.recv()).await {
                        signals.push(sent(signal));
                    }
                    return (signals, outcome);
                }
            };
            for _ in 0..2 {
                let outcome = side.carry_out(action).await;
                assert_eq!(outcome, ActionOutcome::Done, "{action:?}");
                coordinator.apply(sent(CoordinatorFact::Outcome { action: id, outcome }), engine.now());
            }
        }
        let moved = async {
            match transfer {
                Some(cost) => link.transfer(cost).await,
                None => std::future::pending().await,
            }
        };
        let happened = tokio::select! {
            biased;
            fact = source.fact() => Happened::Fact(fact),
            fact = destination.fact() => Happened::Fact(fact),
            () = moved => Happened::Transferred,
            signal = stream.recv() => Happened::Signal(signal),
        };
        match happened {
            Happened::Fact(fact) => coordinator.apply(sent(fact), engine.now()),
            Happened::Transferred => {
                transfer = None;
                coordinator.apply(CoordinatorFact::TransferCompleted, engine.now());
            }
            Happened::Signal(signal) => signals.push(sent(signal.expect("not before its end"))),
        }
    }
}

async fn h14_a_handoff_by_lines_of_json_is_as_one_in_a_process(kind: Kind) {
    for order in [HandoffOrder::SourceFirst, HandoffOrder::DestinationFirst] {
        let (prefill, decode) = pair_of(kind.config(), kind.config());
        let (mut sides, [_source_stream, mut stream]) = sides(&prefill, &decode, 3);
        let config: CoordinatorConfig = sent(kind.way().with_order(order));
        let mut coordinator = Coordinator::new(sent(handoff_id(1)), config, decode.now()).expect("valid");
        let (signals, outcome) = drive(&mut coordinator, &mut sides, &mut stream, &decode).await;
        let signals: Vec<_> = signals.into_iter().map(seen).collect();
        assert_eq!(sent(outcome), HandoffOutcome::Completed, "{order:?}");
        match kind {
            Kind::Vllm => assert_eq!(signals, whole(1, &[28.0, 38.0, 48.0])),
            // The first token is the source's to show.
            Kind::Sglang => {
                assert_eq!(signals, [(Some(102), None, 28.0), (Some(103), Some(FinishReason::Length), 38.0)])
            }
        }
        drop(sides);
        assert_both_released(&prefill, &decode).await;
    }
}

async fn h14_events_of_both_sides_cross_as_json(kind: Kind) {
    let engine = start(kind.config());
    let mut source = crate::kit::source(&engine, 1, 8).await;
    let mut destination = crate::kit::destination(&engine, 2, 8, 1).await;
    at(&engine, 25).await;
    drop((source.control, destination.control));
    let mut lines = Vec::new();
    for events in [&mut source.events, &mut destination.events] {
        while let Some(event) = within(events.recv()).await {
            assert_eq!(sent(event), event);
            lines.push(serde_json::to_string(&event).expect("it serialises"));
        }
    }
    let held = r#"{"source_held":{"at":10000000,"timing":{"mode":"full_prompt","full_prompt_tokens":8,"#.to_owned()
        + r#""kv_bytes_per_token":null,"bandwidth_gb_s":null,"setup_ms":0.0},"first_token":101,"overlapped_prefill_ms":0.0,"#
        + r#""expires_at":30010000000}}"#;
    assert_eq!(lines[0], held);
    assert!(
        lines[1].contains(r#""end":"released""#) && lines[2].starts_with(r#"{"destination_reserved":"#),
        "{lines:?}"
    );
    assert!(lines[3].contains(r#""end":"cancelled""#), "{lines:?}");
    let event: LiveHandoffEvent = serde_json::from_str(&lines[1]).expect("it reads");
    assert!(matches!(event, LiveHandoffEvent::SourceEnded { .. }));
}

/// A side says what it is told, and no more than once: after the last fact there is none.
async fn h14_a_side_tells_its_end_once(kind: Kind) {
    let (prefill, decode) = pair_of(kind.config(), kind.config());
    let ([mut source, mut destination], [_source_stream, mut stream]) = sides(&prefill, &decode, 2);
    assert_eq!((source.handoff_id(), destination.handoff_id()), (handoff_id(1), handoff_id(1)));
    assert_eq!(source.carry_out(CoordinatorAction::SubmitPrefill).await, ActionOutcome::Done);
    assert!(matches!(within(source.fact()).await, CoordinatorFact::SourceHeld { first_token: Some(101), .. }));
    assert_eq!(source.carry_out(CoordinatorAction::ReleaseSource).await, ActionOutcome::Done);
    assert_eq!(destination.carry_out(CoordinatorAction::ReserveDestination).await, ActionOutcome::Done);
    let reserved = within(destination.fact()).await;
    assert_eq!(reserved, CoordinatorFact::DestinationReserved { transferable_prompt_tokens: 8 });
    let activate = CoordinatorAction::ActivateDestination { first_token: None };
    assert_eq!(destination.carry_out(activate).await, ActionOutcome::Done);
    assert_eq!(read(&mut stream).await.len(), 2);
    turns().await;
    for side in [&mut source, &mut destination] {
        assert_eq!(poll_once(&mut Box::pin(side.fact())), None, "a good end is no fact");
        let link = side.carry_out(CoordinatorAction::StartTransfer { tokens: 8, cost: None }).await;
        assert_eq!(link, ActionOutcome::Refused(Refusal::Other), "that is the link's");
    }
    assert_eq!(source.carry_out(CoordinatorAction::Heartbeat).await, ActionOutcome::Refused(Refusal::NotReserved));
    assert_both_released(&prefill, &decode).await;

    let ([mut source, mut destination], _streams) = sides(&prefill, &decode, 2);
    assert_eq!(destination.carry_out(activate).await, ActionOutcome::Refused(Refusal::NotReserved));
    assert_eq!(source.carry_out(CoordinatorAction::ReleaseSource).await, ActionOutcome::Done, "nothing to release");
    within(prefill.shutdown()).await.expect("it stops");
    within(decode.shutdown()).await.expect("it stops");
    assert_eq!(within(source.fact()).await, CoordinatorFact::SourceGone);
    assert_eq!(within(destination.fact()).await, CoordinatorFact::DestinationGone);
    for side in [&mut source, &mut destination] {
        assert_eq!(poll_once(&mut Box::pin(side.fact())), None, "once");
    }
    let stopped = source.carry_out(CoordinatorAction::SubmitPrefill).await;
    assert_eq!(stopped, ActionOutcome::Refused(Refusal::Stopped));
}

/// What ends a side's request by itself is told as gone.
async fn h14_a_side_whose_request_ends_badly_is_gone(kind: Kind) {
    let engine = start(kind.config());
    let (registration, stream) = engine.prepare_request(request(1, 8, 9)).expect("valid");
    let mut source = LiveHandoffSide::source(register(&engine, 1), registration);
    assert_eq!(source.carry_out(CoordinatorAction::SubmitPrefill).await, ActionOutcome::Done);
    at(&engine, 5).await;
    drop(stream);
    assert_eq!(within(source.fact()).await, CoordinatorFact::SourceGone);
    let options = buffered(cancel_on_overflow(1));
    let (registration, _slow) = engine.prepare_request_with(request(2, 8, 9), options).expect("valid");
    let mut destination = LiveHandoffSide::destination(register(&engine, 2), registration);
    assert_eq!(destination.carry_out(CoordinatorAction::ReserveDestination).await, ActionOutcome::Done);
    assert!(matches!(within(destination.fact()).await, CoordinatorFact::DestinationReserved { .. }));
    let activate = CoordinatorAction::ActivateDestination { first_token: None };
    assert_eq!(destination.carry_out(activate).await, ActionOutcome::Done);
    assert_eq!(within(destination.fact()).await, CoordinatorFact::DestinationGone, "its reader was too slow");
    assert!(engine.now() > ms(20));
    assert_released(&engine).await;
}

/// A request of another engine is no side's.
async fn h14_a_side_with_a_foreign_request_is_refused(kind: Kind) {
    let (engine, other) = pair_of(kind.config(), kind.config());
    let (registration, _stream) = other.prepare_request(request(1, 8, 9)).expect("valid");
    let mut side = LiveHandoffSide::source(register(&engine, 1), registration);
    let refused = side.carry_out(CoordinatorAction::SubmitPrefill).await;
    assert_eq!(refused, ActionOutcome::Refused(Refusal::Other));
    assert_eq!(other.active_request_count(), 0, "it was given back and dropped");
}

for_every_kind! {
    h14_a_handoff_by_lines_of_json_is_as_one_in_a_process,
    h14_events_of_both_sides_cross_as_json,
    h14_a_side_tells_its_end_once,
    h14_a_side_whose_request_ends_badly_is_gone,
    h14_a_side_with_a_foreign_request_is_refused,
}
