//! h07–h10: a destination waits for blocks, is activated, and gives back what it has.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use standin::{
    DestinationEnd, FinishReason, HandoffError, LiveEngine, LiveHandoffEvent, LoadFailurePolicy, OutputBuffering,
    PassMetrics, SchedulingState, VllmConfig,
};

use crate::common::{
    at, buffered, config_of, cut, durations, load, poll_once, read, request, start, submit, turns, vllm, whole,
};
use crate::kit::{
    Event, Kind, OK, Side, assert_released, blocks, destination, destination_of, for_every_kind, ms, register,
    reserved, within,
};

const CANCELLED: FinishReason = FinishReason::Cancelled;

fn ended(at: u64, end: DestinationEnd) -> Event {
    Some(LiveHandoffEvent::DestinationEnded { at: ms(at), end })
}

/// 9 usable blocks of 4 tokens.
fn nine() -> VllmConfig {
    vllm().with_num_gpu_blocks(10)
}

/// It reserves, is told so, and its reservation shows.
async fn reserved_now(engine: &LiveEngine, n: u32, prompt_tokens: u32, outputs: u32) -> Side {
    let mut side = destination(engine, n, prompt_tokens, outputs).await;
    let Some(LiveHandoffEvent::DestinationReserved { .. }) = side.event().await else { panic!("there is room") };
    turns().await;
    side
}

async fn h07_on_an_idle_engine_it_is_granted_at_once(kind: Kind) {
    let engine = start(kind.config());
    at(&engine, 3).await;
    let mut side = destination(&engine, 1, 10, 2).await;
    assert_eq!(side.event().await, reserved(3, 10));
    assert_eq!((engine.now(), blocks(&engine), load(&engine)), (ms(3), (3, 0, 3), (0, 1, 3)));
    at(&engine, 10_000).await;
    assert_eq!(blocks(&engine), (3, 0, 3), "for as long as its transfer takes");
}

/// The reservation is accepted during the pass and granted when the next one begins; the fact comes at the end of that.
async fn h07_it_is_accepted_at_once_and_granted_at_a_boundary(kind: Kind) {
    let engine = start(kind.config());
    let _running = submit(&engine, request(9, 8, 4)).await;
    at(&engine, 5).await;
    let mut side = destination(&engine, 1, 8, 1).await;
    assert_eq!(engine.now(), ms(5), "accepted at once");
    assert_eq!(side.event().await, reserved(10, 8));
    assert!(engine.now() <= ms(20), "{}", engine.now());
}

async fn h07_grants_are_made_in_the_order_of_acceptance(kind: Kind) {
    let engine = start(kind.pool(9));
    // 9 blocks: the first gets 5, the second needs 5 and waits, and the third, which needs 1, waits behind it.
    let mut first = reserved_now(&engine, 1, 20, 1).await;
    let mut second = destination(&engine, 2, 20, 1).await;
    let mut third = destination(&engine, 3, 4, 1).await;
    at(&engine, 1_000).await;
    assert_eq!(blocks(&engine), (5, 0, 5));
    for side in [&mut second, &mut third] {
        assert!(poll_once(&mut Box::pin(side.events.recv())).is_none());
        assert_eq!(within(side.control.activate_destination(None)).await, Err(HandoffError::NotReserved));
    }
    assert_eq!(within(first.control.cancel_destination()).await, OK);
    assert_eq!(first.event().await, ended(1_000, DestinationEnd::Cancelled));
    assert_eq!((second.event().await, third.event().await), (reserved(1_000, 20), reserved(1_000, 4)));
    assert_eq!(blocks(&engine), (6, 0, 6));
}

async fn h07_what_is_in_its_cache_is_not_transferred(kind: Kind) {
    let finding = kind.of(|vllm| vllm, |sglang| sglang.with_disaggregation_decode_enable_radix_cache(true));
    let engine = start(finding);
    let prompt: Vec<u32> = (0..13).collect();
    let same = |n: u32| standin::Request::new(prompt.clone(), 1).with_id(crate::common::id(n));
    read(&mut submit(&engine, same(1)).await).await;
    let mut side = destination_of(&engine, 2, same(2)).await;
    // 3 full blocks of 4 are cached: 13 - 12 tokens are missing, the last one, which vLLM computes again anyway.
    assert_eq!(side.event().await, reserved(10, if kind == Kind::Vllm { 0 } else { 1 }));
    let longer: Vec<u32> = prompt.iter().copied().chain(100..110).collect();
    let mut longer = destination_of(&engine, 3, standin::Request::new(longer, 1)).await;
    assert_eq!(longer.event().await, reserved(10, 11));
    assert_eq!(within(side.control.activate_destination(None)).await, OK);
    let first = within(side.stream.recv()).await.expect("a token");
    assert_eq!((first.cached_tokens, first.finish), (Some(13), Some(FinishReason::Length)), "transferred ones count");
}

/// 9 blocks: 4 are used until 30 ms, the destination needs 7, and fresh requests of 2 blocks keep coming.
async fn h08_while_a_destination_waits_at_the_head_nobody_takes_its_blocks(kind: Kind) {
    let engine = start(kind.pool(9));
    let mut running = submit(&engine, request(9, 13, 3)).await;
    let mut side = destination(&engine, 1, 28, 1).await;
    let mut fresh = Vec::new();
    // SGLang admits none that leaves no page free.
    let prompt_tokens = if kind == Kind::Vllm { 7 } else { 2 };
    for n in 0..3 {
        at(&engine, 3 + 10 * n).await;
        fresh.push(submit(&engine, request(100 + n as u32, prompt_tokens, 1)).await);
    }
    at(&engine, 29).await;
    // As of 20 ms, the last one still on its way.
    assert_eq!(load(&engine), (1, 3, 4), "5 blocks are free, and kept so");
    assert_eq!(read(&mut running).await.len(), 3);
    assert_eq!(side.event().await, reserved(30, 28), "as soon as they are there");
    // 2 blocks are left: one after the other.
    for (n, produced_at) in [(0, 40.0), (1, 50.0), (2, 60.0)] {
        assert_eq!(read(&mut fresh[n]).await, whole(100 + n as u32, &[produced_at]));
    }
    assert_eq!(within(side.control.activate_destination(None)).await, OK);
}

/// Requests that wait already: destinations go before them, or after them as in the real engine.
#[tokio::test(start_paused = true)]
async fn h08_a_destination_goes_before_fresh_requests_unless_it_is_switched_off() {
    for destinations_first in [true, false] {
        let engine = start(config_of(nine().with_destinations_first(destinations_first)).with_max_model_len(36));
        let mut running = submit(&engine, request(9, 13, 3)).await;
        at(&engine, 1).await;
        let mut fresh = submit(&engine, request(8, 28, 1)).await;
        let mut side = destination(&engine, 1, 28, 1).await;
        assert_eq!(read(&mut running).await.len(), 3);
        if destinations_first {
            assert_eq!(side.event().await, reserved(30, 28));
            assert!(poll_once(&mut Box::pin(fresh.recv())).is_none());
            assert_eq!(within(side.control.cancel_destination()).await, OK);
        }
        assert_eq!(read(&mut fresh).await, whole(8, &[40.0]), "first: {destinations_first}");
        if !destinations_first {
            assert_eq!(side.event().await, reserved(40, 28));
        }
    }
}

async fn h09_activation_before_the_grant_or_twice_says_which(kind: Kind) {
    let engine = start(kind.pool(9));
    let blocker = reserved_now(&engine, 9, 20, 1).await;
    let mut side = destination(&engine, 1, 20, 3).await;
    assert_eq!(within(side.control.activate_destination(None)).await, Err(HandoffError::NotReserved));
    assert_eq!(within(side.control.fail_transfer(0)).await, Err(HandoffError::NotReserved));
    drop(blocker);
    assert_eq!(side.event().await, reserved(0, 20));
    assert_eq!(within(side.control.activate_destination(None)).await, OK);
    for _ in 0..2 {
        assert_eq!(within(side.control.activate_destination(None)).await, Err(HandoffError::AlreadyActive));
        assert_eq!(within(side.control.fail_transfer(0)).await, Err(HandoffError::AlreadyActive));
    }
    assert_eq!(read(&mut side.stream).await, whole(1, &[10.0, 20.0, 30.0]));
    assert_eq!(side.event().await, ended(30, DestinationEnd::Finished));
    assert_eq!(within(side.control.activate_destination(None)).await, Err(HandoffError::Over));
    assert_eq!(within(side.control.cancel_destination()).await, OK, "over already");
    assert_released(&engine).await;
}

/// The passes say what was computed: the last prompt token again, and then one token a pass; with SGLang no prompt
/// token at all, and the first token is the source's.
async fn h09_an_active_destination_goes_on_after_its_prompt_or_after_the_first_token(kind: Kind) {
    let computed = Arc::new(Mutex::new(Vec::new()));
    let in_sink = Arc::clone(&computed);
    let sink = move |_: u32, pass: &PassMetrics| {
        let tokens = (pass.sum_prefill_tokens, pass.num_decode_requests);
        in_sink.lock().expect("not poisoned").push(tokens);
        Ok(())
    };
    let engine = LiveEngine::builder(kind.config()).pass_metrics_sink(sink).start().expect("valid");
    for prompt_tokens in [12, 13] {
        let mut side = reserved_now(&engine, prompt_tokens, prompt_tokens, 3).await;
        // With vLLM its first token is the engine's own, whatever the source says.
        assert_eq!(within(side.control.activate_destination(Some(77))).await, OK);
        let signals = read(&mut side.stream).await;
        let (first, passes): (usize, &[(u64, u64)]) = match kind {
            Kind::Vllm => (0, &[(1, 0), (0, 1), (0, 1)]),
            Kind::Sglang => (1, &[(0, 1), (0, 1)]),
        };
        assert_eq!(
            signals.iter().filter_map(|signal| signal.0).collect::<Vec<_>>(),
            crate::common::tokens(prompt_tokens, 3)[first..]
        );
        assert_eq!(std::mem::take(&mut *computed.lock().expect("not poisoned")), passes);
    }
    assert_released(&engine).await;
}

async fn h09_a_failed_transfer_ends_the_request_or_is_computed_by_the_policy(kind: Kind) {
    for (policy, valid_tokens, expected) in [
        (LoadFailurePolicy::Fail, 0, cut(1, &[], FinishReason::TransferFailed, 0.0)),
        (LoadFailurePolicy::Fail, 16, whole(1, &[10.0, 20.0])),
        (LoadFailurePolicy::Recompute, 0, whole(1, &[20.0, 30.0])),
        (LoadFailurePolicy::Recompute, 9, whole(1, &[10.0, 20.0])),
    ] {
        if kind == Kind::Sglang && policy == LoadFailurePolicy::Recompute {
            // It has no such policy.
            continue;
        }
        // 8 tokens a pass: a prompt of 16 tokens takes two.
        let options = |vllm: VllmConfig| {
            vllm.with_max_num_seqs(8).with_max_num_batched_tokens(8).with_kv_load_failure_policy(policy)
        };
        let engine = start(kind.of(options, |sglang| sglang));
        let mut side = reserved_now(&engine, 1, 16, 2).await;
        assert_eq!(within(side.control.fail_transfer(valid_tokens)).await, OK);
        assert_eq!(read(&mut side.stream).await, expected, "{policy:?}, {valid_tokens} valid tokens");
        let fails = expected[0].1 == Some(FinishReason::TransferFailed);
        let end = if fails { DestinationEnd::TransferFailed } else { DestinationEnd::Finished };
        let Some(LiveHandoffEvent::DestinationEnded { end: told, .. }) = side.event().await else { panic!("an end") };
        assert_eq!((told, side.event().await), (end, None));
        assert_released(&engine).await;
        assert_eq!(engine.metrics_receiver().borrow().finished.transfer_failed, u64::from(fails));
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Prepared,
    Waiting,
    Reserved,
    Active,
    Decoding,
    Throttled,
}

const STATES: [State; 6] =
    [State::Prepared, State::Waiting, State::Reserved, State::Active, State::Decoding, State::Throttled];

/// A destination of 20 tokens in that state, on an engine of 9 blocks.
async fn in_state(engine: &LiveEngine, state: State) -> (Side, Option<Side>, Option<standin::LiveRequestRegistration>) {
    let capacity = NonZeroUsize::MIN;
    let options = buffered(OutputBuffering::Throttle { capacity });
    let (control, events) = register(engine, 1);
    let blocker = if state == State::Waiting { Some(reserved_now(engine, 9, 24, 1).await) } else { None };
    let (registration, stream) = engine.prepare_request_with(request(1, 20, 9), options).expect("valid");
    let mut side = Side { control, events, stream };
    if state == State::Prepared {
        return (side, None, Some(registration));
    }
    within(side.control.reserve_destination(registration)).await.expect("taken");
    if state != State::Waiting {
        assert_eq!(side.event().await, reserved(0, 20));
    }
    if matches!(state, State::Active | State::Decoding | State::Throttled) {
        assert_eq!(within(side.control.activate_destination(None)).await, OK);
    }
    match state {
        State::Decoding => at(engine, 5).await,
        State::Throttled => at(engine, 50).await,
        _ => turns().await,
    }
    (side, blocker, None)
}

/// By the stream's own `cancel` or by its drop, with the control still there.
async fn h10_the_end_of_the_stream_releases_the_reservation_in_every_state(kind: Kind) {
    for state in STATES {
        for drops in [true, false] {
            let engine = start(kind.pool(9));
            let (mut side, blocker, registration) = in_state(&engine, state).await;
            let now = engine.now();
            if drops {
                drop(side.stream);
            } else {
                assert_eq!(within(side.stream.cancel()).await, Ok(true), "{state:?}");
                let tokens: &[f64] = if state == State::Throttled { &[10.0] } else { &[] };
                let now = now.as_nanos() as f64 / 1e6;
                assert_eq!(read(&mut side.stream).await, cut(1, tokens, CANCELLED, now), "{state:?}");
            }
            turns().await;
            assert_eq!(
                (engine.now(), engine.active_request_count()),
                (now, usize::from(blocker.is_some())),
                "{state:?}"
            );
            if state != State::Prepared {
                let Some(LiveHandoffEvent::DestinationEnded { end, .. }) = within(side.events.recv()).await else {
                    panic!("{state:?}: it must be told")
                };
                assert_eq!((end, within(side.events.recv()).await), (DestinationEnd::Cancelled, None), "{state:?}");
            }
            if state == State::Reserved {
                // A transfer may still write into its blocks: they are guarded until its end is told.
                assert_eq!(blocks(&engine), (5, 5, 0), "{state:?}");
                assert_eq!(within(side.control.cancel_destination()).await, OK);
            }
            drop(blocker);
            at(&engine, 100).await;
            assert_released(&engine).await;
            drop(registration);
            assert_eq!(within(side.control.cancel_destination()).await, OK, "{state:?}: over already");
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Word {
    Activate,
    Fail,
    Cancel,
    None,
}

/// Given up during its transfer: the blocks wait for a word of its end, whatever the word, or for the guard's time.
async fn h10_guarded_blocks_are_freed_by_the_end_of_the_transfer_or_its_deadline(kind: Kind) {
    for word in [Word::Activate, Word::Fail, Word::Cancel, Word::None] {
        let guard = Duration::from_secs(3);
        let config = kind.of(
            |vllm| vllm.with_num_gpu_blocks(10).with_transfer_guard(guard),
            |sglang| sglang.with_max_total_tokens(36).with_transfer_guard(guard),
        );
        let engine = start(config.with_max_model_len(36));
        let side = reserved_now(&engine, 1, 20, 9).await;
        drop(side.stream);
        at(&engine, 2_000).await;
        assert_eq!(blocks(&engine), (5, 5, 0), "{word:?}");
        let mut next = destination(&engine, 2, 20, 1).await;
        let answer = match word {
            Word::Activate => Some(within(side.control.activate_destination(None)).await),
            Word::Fail => Some(within(side.control.fail_transfer(0)).await),
            Word::Cancel => Some(within(side.control.cancel_destination()).await),
            Word::None => None,
        };
        assert!(answer.as_ref().is_none_or(|answer| *answer == OK), "{word:?}");
        let expected = if answer.is_some() { 2_000 } else { 3_000 };
        assert_eq!(next.event().await, reserved(expected, 20), "{word:?}");
        turns().await;
        assert_eq!(engine.metrics_receiver().borrow().expired_guards, u64::from(answer.is_none()), "{word:?}");
    }
}

/// The stream of an earlier registration ends: a later one of the same id keeps what it has.
async fn h10_only_its_own_reservation_is_released(kind: Kind) {
    for activate in [false, true] {
        let engine = start(kind.pool(9));
        let earlier = reserved_now(&engine, 1, 12, 2).await;
        if activate {
            within(engine.set_scheduling(SchedulingState::Stopped)).await.expect("running");
            assert_eq!(within(earlier.control.activate_destination(None)).await, OK);
        }
        drop(earlier.events);
        turns().await;
        let (control, mut events) = register(&engine, 1);
        let (registration, _stream) = engine.prepare_request(request(2, 12, 1)).expect("valid");
        within(control.reserve_destination(registration)).await.expect("it takes the place");
        if activate {
            within(engine.set_scheduling(SchedulingState::Running)).await.expect("running");
        }
        assert!(matches!(within(events.recv()).await, Some(LiveHandoffEvent::DestinationReserved { .. })));
        drop(earlier.stream);
        drop(earlier.control);
        turns().await;
        at(&engine, 500).await;
        // The guard of the earlier one's blocks may last; the later one's are its own.
        assert_eq!(engine.metrics_receiver().borrow().num_reserved_blocks, 3, "active: {activate}");
        assert_eq!(within(control.activate_destination(None)).await, OK);
        at(&engine, 60_000).await;
        assert_released(&engine).await;
    }
}

async fn h10_a_destination_that_overflows_or_ends_gives_its_blocks_back_once(kind: Kind) {
    let engine = start(kind.config());
    let (control, mut events) = register(&engine, 1);
    let options = buffered(crate::common::cancel_on_overflow(2));
    let (registration, mut stream) = engine.prepare_request_with(request(1, 8, 9), options).expect("valid");
    within(control.reserve_destination(registration)).await.expect("taken");
    assert_eq!(within(events.recv()).await, reserved(0, 8));
    assert_eq!(within(control.activate_destination(None)).await, OK);
    at(&engine, 200).await;
    assert_eq!(read(&mut stream).await, cut(1, &[10.0, 20.0], FinishReason::SlowConsumer, 30.0));
    assert_eq!(within(events.recv()).await, ended(30, DestinationEnd::Cancelled));
    assert_eq!(within(events.recv()).await, None);
    assert_released(&engine).await;
}

/// A grant that is made when a long pass begins is told at its end; the activation waits for no boundary.
async fn h09_activation_is_answered_during_a_long_pass(kind: Kind) {
    let passes = durations(vec![Duration::from_secs(10), Duration::from_millis(10)]);
    let engine = LiveEngine::builder(kind.config()).pass_timing(passes).start().expect("valid");
    let mut side = reserved_now(&engine, 1, 8, 1).await;
    let _long = submit(&engine, request(2, 8, 1)).await;
    at(&engine, 4_000).await;
    assert_eq!(within(side.control.activate_destination(None)).await, OK);
    assert_eq!(engine.now(), ms(4_000));
    assert_eq!(read(&mut side.stream).await, whole(1, &[10_010.0]), "in the next pass");
}

for_every_kind! {
    h07_on_an_idle_engine_it_is_granted_at_once,
    h07_it_is_accepted_at_once_and_granted_at_a_boundary,
    h07_grants_are_made_in_the_order_of_acceptance,
    h07_what_is_in_its_cache_is_not_transferred,
    h08_while_a_destination_waits_at_the_head_nobody_takes_its_blocks,
    h09_activation_before_the_grant_or_twice_says_which,
    h09_an_active_destination_goes_on_after_its_prompt_or_after_the_first_token,
    h09_a_failed_transfer_ends_the_request_or_is_computed_by_the_policy,
    h10_the_end_of_the_stream_releases_the_reservation_in_every_state,
    h10_guarded_blocks_are_freed_by_the_end_of_the_transfer_or_its_deadline,
    h10_only_its_own_reservation_is_released,
    h10_a_destination_that_overflows_or_ends_gives_its_blocks_back_once,
    h09_activation_is_answered_during_a_long_pass,
}
