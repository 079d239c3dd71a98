//! h16: a request whose prompt is taken as transferred.

use std::sync::{Arc, Mutex};

use standin::{FinishReason, HandoffError, LiveEngine, PassMetrics, RequestError, SchedulingState, SubmitError};

use crate::common::{at, cut, id, load, poll_once, read, refused, request, start, submit, turns, whole};
use crate::kit::{Kind, assert_released, blocks, destination, for_every_kind, reserved, within};

async fn h16_it_decodes_without_a_prefill(kind: Kind) {
    let computed = Arc::new(Mutex::new(Vec::new()));
    let in_sink = Arc::clone(&computed);
    let sink = move |_: u32, pass: &PassMetrics| {
        in_sink.lock().expect("not poisoned").push((pass.sum_prefill_tokens, pass.num_decode_requests));
        Ok(())
    };
    let engine = LiveEngine::builder(kind.config()).pass_metrics_sink(sink).start().expect("valid");
    let mut stream = within(engine.submit_decode(request(1, 40, 3))).await.expect("valid");
    assert_eq!(read(&mut stream).await, whole(1, &[10.0, 20.0, 30.0]));
    assert_eq!(*computed.lock().expect("not poisoned"), [(1, 0), (0, 1), (0, 1)]);
    // A computed prompt of 40 tokens takes one pass of 40 tokens.
    assert_eq!(read(&mut submit(&engine, request(2, 40, 1)).await).await, whole(2, &[40.0]));
    assert_eq!(computed.lock().expect("not poisoned")[3], (40, 0));
    assert_released(&engine).await;
}

/// Dropped, cancelled, or left alone while it waits for its blocks.
async fn h16_it_waits_for_its_blocks_and_can_be_cancelled_and_dropped_meanwhile(kind: Kind) {
    for end in ["drop", "cancel", "cancel by id", "none"] {
        let engine = start(kind.pool(9));
        let mut running = submit(&engine, request(9, 20, 3)).await;
        at(&engine, 5).await;
        let mut stream = within(engine.submit_decode(request(1, 24, 2))).await.expect("valid");
        at(&engine, 15).await;
        assert_eq!((load(&engine), engine.active_request_count()), ((1, 1, 5), 2), "{end}");
        assert!(poll_once(&mut Box::pin(stream.recv())).is_none());
        match end {
            "drop" => drop(stream),
            "cancel" | "cancel by id" => {
                let cancelled =
                    if end == "cancel" { within(stream.cancel()).await } else { within(engine.cancel(id(1))).await };
                assert_eq!((cancelled, engine.now().as_nanos()), (Ok(true), 15_000_000), "{end}");
                assert_eq!(read(&mut stream).await, cut(1, &[], FinishReason::Cancelled, 15.0));
            }
            _ => assert_eq!(read(&mut stream).await, whole(1, &[40.0, 50.0])),
        }
        turns().await;
        assert_eq!(engine.active_request_count(), if end == "none" { 0 } else { 1 }, "{end}");
        assert_eq!(read(&mut running).await, whole(9, &[10.0, 20.0, 30.0]));
        assert_released(&engine).await;
    }
}

/// It needs no registration, and waits behind the destinations that are ahead of it: with vLLM as an ordinary request,
/// with SGLang as one of them.
async fn h16_it_takes_its_turn_among_destinations(kind: Kind) {
    let engine = start(kind.pool(9));
    let mut first = destination(&engine, 1, 20, 1).await;
    let mut decode = within(engine.submit_decode(request(2, 20, 1))).await.expect("valid");
    let second = destination(&engine, 3, 16, 1).await;
    assert_eq!(first.event().await, reserved(0, 20));
    at(&engine, 100).await;
    assert!(poll_once(&mut Box::pin(decode.recv())).is_none(), "9 blocks: 5 are taken");
    let reserved = if kind == Kind::Vllm { 9 } else { 5 };
    assert_eq!(blocks(&engine), (reserved, 0, reserved), "4 are the next destination's, or kept for the decode");
    drop((first, second));
    assert_eq!(read(&mut decode).await, whole(2, &[110.0]));
}

async fn h16_what_is_refused_at_submit_is_refused_here(kind: Kind) {
    let engine = start(kind.config());
    let too_long = refused(within(engine.submit_decode(request(1, 64, 1))).await);
    assert_eq!(too_long, RequestError::PromptTooLong { prompt_tokens: 64, max_model_len: 64 }.into());
    let _first = within(engine.submit_decode(request(1, 8, 1))).await.expect("valid");
    let again = refused(within(engine.submit_decode(request(1, 8, 1))).await);
    assert_eq!(again, SubmitError::DuplicateId(id(1)));
    let mut dropped = Box::pin(engine.submit_decode(request(2, 8, 1)));
    assert!(poll_once(&mut dropped).is_none());
    drop(dropped);
    within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
    turns().await;
    assert!(engine.cancel(id(1)).await.is_ok());
    assert_released(&engine).await;
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert!(matches!(refused(within(engine.submit_decode(request(3, 8, 1))).await), SubmitError::Stopped(_)));
    let unregistered = engine.register_handoff(id(4).into()).expect_err("stopped");
    assert!(matches!(unregistered, HandoffError::Stopped(_)));
}

for_every_kind! {
    h16_it_decodes_without_a_prefill,
    h16_it_waits_for_its_blocks_and_can_be_cancelled_and_dropped_meanwhile,
    h16_it_takes_its_turn_among_destinations,
    h16_what_is_refused_at_submit_is_refused_here,
}
