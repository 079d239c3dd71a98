//! Handoffs as SGLang does them: what is reserved when, and how transferred requests come into the batch.

use std::time::Duration;

use super::test_kit::*;
use crate::config::SglangConfig;
use crate::handoff::HandoffKey;
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::{Applied, Command, DestinationEnd, HandoffFact, RowKind, SequenceStatus, SourceEnd};

/// Pages of one token, 64 of them, and one token a request kept free for decodes.
fn open() -> SglangConfig {
    reserving(1)
}

fn reserving(tokens: u32) -> SglangConfig {
    small().with_num_reserved_decode_tokens(tokens)
}

/// The registrations whose pages were granted, and the tokens to be transferred.
fn granted(facts: &[HandoffFact]) -> Vec<(HandoffKey, u32)> {
    let grants = facts.iter().filter_map(|fact| match fact {
        HandoffFact::DestinationReserved { handoff, transferable_prompt_tokens, .. } => {
            Some((*handoff, *transferable_prompt_tokens))
        }
        _ => None,
    });
    grants.collect()
}

fn ends(facts: &[HandoffFact]) -> Vec<(HandoffKey, DestinationEnd)> {
    let ends = facts.iter().filter_map(|fact| match fact {
        HandoffFact::DestinationEnded { handoff, end, .. } => Some((*handoff, *end)),
        _ => None,
    });
    ends.collect()
}

fn num_free(rig: &Rig) -> u32 {
    rig.view().pool().num_free_blocks()
}

/// The tokens that an engine alone gives this request.
fn alone(kind: u32, tokens: u32, outputs: u32, tie_key: u64) -> Vec<u32> {
    let mut rig = Rig::new(open());
    for _ in 0..tie_key {
        rig.submission(request(0, 1, 1));
    }
    let sequence = rig.submit(request(kind, tokens, outputs));
    rig.run();
    rig.outputs[&sequence].clone()
}

#[test]
fn h05_a_source_gives_one_token_and_is_held_whatever_was_asked_for() {
    let mut rig = Rig::new(open());
    let mut asked = request(1, 10, 5).with_output_tokens(vec![3, 4, 5]);
    asked.stop_token_ids = vec![3];
    let source = rig.source(key(1, 1), asked);
    let done = rig.pass().expect("a prefill pass");
    assert_eq!(done.finished, [(source, FinishReason::Length)], "a stop is for the destination to find");
    let HandoffFact::SourceHeld { at, first_token, expires_at, prompt_tokens, .. } = done.facts[0] else {
        panic!("{:?}", done.facts);
    };
    assert_eq!((at, first_token, prompt_tokens), (rig.now, 3, 10));
    assert_eq!(expires_at.saturating_since(at), Duration::from_secs(300), "SGLang's waiting time-out");
    assert_eq!((num_free(&rig), rig.view().held().count()), (54, 1), "not even evictable");
    assert_eq!(rig.try_command(Command::ReleaseSource { handoff: key(1, 1) }), Ok(Applied::Handoff));
    let told = rig.facts();
    assert!(matches!(told[..], [HandoffFact::SourceEnded { end: SourceEnd::Released, .. }]), "{told:?}");
    let pool = rig.pool();
    assert_eq!((pool.available_tokens, pool.evictable_tokens), (54, 10), "its prompt stays in the tree");
    rig.submit(request(1, 10, 1));
    assert_eq!(rig.pass().expect("a pass").hits[0].1, 9);
}

#[test]
fn h05_a_source_in_chunks_is_held_after_the_last_one() {
    let mut rig = Rig::new(open().with_chunked_prefill_size(Some(4)));
    rig.source(key(1, 1), request(1, 10, 1));
    let facts: Vec<usize> = rig.run().iter().map(|done| done.facts.len()).collect();
    assert_eq!(facts, [0, 0, 1, 0], "three chunks, and the end is reported");
    assert_eq!(num_free(&rig), 54);
}

#[test]
fn case_90_a_source_is_freed_once_by_release_cancel_or_the_end_of_its_lease() {
    for word in
        [Some(Command::ReleaseSource { handoff: key(1, 1) }), Some(Command::CancelSource { handoff: key(1, 1) }), None]
    {
        let mut rig = Rig::new(open().with_disaggregation_waiting_timeout(Duration::from_secs(3)));
        rig.source(key(1, 1), request(1, 10, 1));
        rig.run();
        if let Some(word) = word.clone() {
            assert_eq!(rig.try_command(word), Ok(Applied::Handoff));
        } else {
            rig.wait(Duration::from_secs(2));
            assert_eq!(rig.try_command(Command::Heartbeat { handoff: key(1, 1) }), Ok(Applied::Handoff));
            assert_eq!(rig.scheduler.next_deadline(), Some(rig.now + Duration::from_nanos(1_999_999_999)));
            rig.wait(Duration::from_secs(2));
        }
        assert_eq!((num_free(&rig), rig.scheduler.next_deadline()), (64, None));
        for again in [Command::ReleaseSource { handoff: key(1, 1) }, Command::CancelSource { handoff: key(1, 1) }] {
            assert_eq!(rig.try_command(again), Ok(Applied::HandoffOver));
        }
        rig.settle();
        rig.assert_drained();
    }
}

/// The reserve is kept free for each request that runs or has pages, and for the one that is to get some.
#[test]
fn case_96_pages_are_reserved_by_the_formula_and_counted_while_the_destination_waits() {
    // 64 tokens. The first: 10 + 15 ≤ 64. The second: 10 + 15 ≤ 54 - 15. The third: 10 + 15 > 44 - 30.
    let mut rig = Rig::new(reserving(15));
    for handoff in 1..=3 {
        rig.destination(key(handoff, 1), request(handoff as u32, 10, 2));
    }
    assert_eq!(granted(&rig.facts()), [(key(1, 1), 10), (key(2, 1), 10)]);
    assert_eq!((num_free(&rig), rig.view().loading().count(), rig.view().waiting().count()), (44, 2, 1));
    let metrics = rig.scheduler.settle(rig.now).map(|effects| effects.metrics);
    assert_eq!(metrics.map(|metrics| metrics.num_reserved_blocks), None, "told with the facts");
    // One token less is kept free: 10 + 14 ≤ 44 - 28 does not hold either, 10 + 11 ≤ 44 - 22 does.
    for (reserve, fits) in [(14, 2), (12, 2), (11, 3), (1, 3)] {
        let mut rig = Rig::new(reserving(reserve));
        for handoff in 1..=3 {
            rig.destination(key(handoff, 1), request(handoff as u32, 10, 2));
        }
        assert_eq!(granted(&rig.facts()).len(), fits, "{reserve}");
    }
}

/// Its whole output must fit when everybody else has been retracted: P + min(max_new, 4096) - retractable.
#[test]
fn case_96_the_output_of_the_request_itself_and_of_the_largest_that_runs_count() {
    for (outputs, fits) in [(39, true), (40, false)] {
        // 20 tokens are held for a transfer and one is kept free for it: 43 are left for 4 + max_new.
        let mut rig = Rig::new(open().with_max_total_tokens(64));
        rig.destination(key(1, 1), request(1, 20, 1));
        rig.destination(key(2, 1), request(2, 4, outputs));
        assert_eq!(granted(&rig.facts()).len(), 1 + usize::from(fits), "{outputs}");
    }
    // One that runs has 11 tokens, 10 of them with KV, and may grow to 10 + 30: 29 more. 54 - 29 are left for tokens + 1.
    for (tokens, fits) in [(24, true), (25, false)] {
        let mut rig = Rig::new(open());
        rig.submit(request(1, 10, 30));
        rig.pass();
        rig.destination(key(2, 1), request(2, tokens, 1));
        let pass = rig.begin().expect("a decode pass");
        assert_eq!(rig.view().loading().count(), usize::from(fits), "{tokens}");
        rig.finish(pass);
    }
}

#[test]
fn case_96_pages_are_counted_as_a_whole() {
    // 4 pages of 16: a prompt of 17 needs two, and 0 to 32 tokens can be kept free beside them.
    for (reserve, fits) in [(32, true), (33, false)] {
        let mut rig = Rig::new(reserving(reserve).with_page_size(16));
        let destination = rig.destination(key(1, 1), request(1, 17, 1));
        let told = rig.facts();
        assert_eq!(granted(&told).len(), usize::from(fits), "{reserve}");
        if fits {
            assert_eq!(rig.view().sequence(SequenceId(destination)).map(|view| view.block_ids.len()), Some(2));
        } else {
            assert_eq!(ends(&told), [(key(1, 1), DestinationEnd::OutOfMemory)], "not even the empty pool holds it");
        }
    }
}

#[test]
fn without_the_switch_what_the_empty_pool_cannot_hold_waits_as_in_the_real_engine() {
    let mut rig = Rig::new(reserving(60).with_end_outgrown_requests(false));
    rig.destination(key(1, 1), request(1, 10, 1));
    rig.destination(key(2, 1), request(2, 1, 1));
    assert_eq!((rig.facts(), rig.view().waiting().count()), (vec![], 2));
}

#[test]
fn case_97_the_first_that_does_not_fit_stops_the_others() {
    let mut rig = Rig::new(open());
    let first = rig.destination(key(1, 1), request(1, 40, 1));
    rig.destination(key(2, 1), request(2, 40, 1));
    rig.destination(key(3, 1), request(3, 1, 1));
    assert_eq!(granted(&rig.facts()), [(key(1, 1), 40)], "the third would fit and waits");
    // Nor does a request that is computed here take the pages: h08.
    let ordinary = rig.submit(request(4, 4, 1));
    assert!(rig.pass().is_none());
    rig.cancel(first);
    assert_eq!(rig.try_command(Command::CancelDestination { handoff: key(1, 1) }), Ok(Applied::HandoffOver));
    let done = rig.pass().expect("the ordinary one comes in when no destination waits");
    assert_eq!(done.prefill, [(ordinary, 4)]);
    assert_eq!(granted(&done.facts), [(key(2, 1), 40), (key(3, 1), 1)]);
}

/// Case 94's counterpart: nothing is computed again, the pass computes the KV of the first token and gives the second.
#[test]
fn case_98_the_second_token_comes_first_and_none_is_missing_or_doubled() {
    for tokens in [1, 3, 10] {
        let expected = alone(1, tokens, 5, 0);
        let mut source = Rig::new(open());
        source.source(key(1, 1), request(1, tokens, 1));
        let told = source.run().remove(0).facts;
        let HandoffFact::SourceHeld { first_token, .. } = told[0] else { panic!("{told:?}") };

        let mut rig = Rig::new(open());
        let destination = rig.destination(key(1, 1), request(1, tokens, 5));
        assert_eq!(granted(&rig.facts()), [(key(1, 1), tokens)]);
        rig.activate(key(1, 1), Some(first_token));
        let done = rig.pass().expect("a decode pass");
        assert_eq!((done.prefill.len(), done.decode.as_slice(), done.admitted.as_slice()), (0, &[0][..], &[0][..]));
        let metrics = done.pass.expect("metrics");
        assert_eq!((metrics.num_prefill_requests, metrics.sum_decode_kv_tokens), (0, u64::from(tokens) + 1));
        let stats = done.prefills[0];
        assert_eq!((stats.num_cached_tokens, stats.num_external_cached_tokens), (tokens, tokens));
        let pass = rig.begin().expect("another one");
        assert_eq!(pass.rows()[0].kind, RowKind::Running, "it came in with the first");
        rig.finish(pass);
        rig.run();
        let all: Vec<u32> = [first_token].into_iter().chain(rig.outputs[&destination].iter().copied()).collect();
        assert_eq!(all, expected);
        assert_eq!(num_free(&rig), 64);
        assert_eq!(rig.pool().evictable_tokens, 0, "a decode server keeps no prefixes");
    }
}

#[test]
fn case_98_a_first_token_that_is_the_last_ends_the_request_without_a_pass() {
    let mut rig = Rig::new(open());
    let limit = rig.destination(key(1, 1), request(1, 10, 1));
    let mut stops = request(2, 10, 3).with_output_tokens(vec![5, 6, 7]);
    stops.stop_token_ids = vec![5];
    let stop = rig.destination(key(2, 1), stops);
    rig.facts();
    rig.activate(key(1, 1), Some(9));
    rig.activate(key(2, 1), Some(5));
    let done = rig.pass().expect("a pass that reports the ends");
    let reason = FinishReason::Stop { stop_token: Some(5) };
    assert_eq!((done.decode.len(), done.finished), (0, vec![(limit, FinishReason::Length), (stop, reason)]));
    assert_eq!((num_free(&rig), ends(&done.facts).len()), (64, 2));
}

#[test]
fn without_a_first_token_the_last_prompt_token_is_computed_again() {
    let mut rig = Rig::new(open());
    let destination = rig.destination(key(1, 1), request(1, 10, 3));
    rig.facts();
    rig.activate(key(1, 1), None);
    let done = rig.pass().expect("a pass");
    let metrics = done.pass.expect("metrics");
    assert_eq!((metrics.sum_prefill_tokens, metrics.num_decode_requests), (1, 0));
    let view = rig.view().sequence(SequenceId(destination)).expect("it runs");
    assert_eq!((view.num_computed_tokens, view.num_tokens, view.block_ids.len()), (10, 11, 10));
    rig.run();
    assert_eq!(rig.outputs[&destination], alone(1, 10, 3, 0));
}

#[test]
fn h16_a_decode_waits_for_pages_like_a_destination_and_needs_no_transfer() {
    let mut rig = Rig::new(reserving(20));
    let mut all = Vec::new();
    for kind in 0..3 {
        let submission = rig.submission(request(kind, 12, 5));
        all.push(submission.sequence.0);
        rig.command(Command::SubmitDecode(submission));
    }
    rig.now = rig.now + Duration::from_millis(1);
    // 12 + 20 ≤ 64, then 12 + 20 ≤ 52 - 20, then 12 + 20 > 40 - 40.
    assert_eq!(rig.pass().expect("a pass").decode, [0, 1]);
    rig.cancel(2);
    rig.run();
    for kind in 0..2 {
        assert_eq!(rig.outputs[&u64::from(kind)], alone(kind, 12, 5, u64::from(kind)));
    }
    rig.assert_drained();
}

/// Four that grow together: the youngest loses its pages, keeps its tokens, and comes back before a fresh one.
#[test]
fn a_retracted_destination_comes_back_without_computing_and_nothing_fresh_is_reserved_before_it() {
    let mut rig = Rig::new(open());
    let mut expected = Vec::new();
    for kind in 1..=3 {
        expected.push(alone(kind, 12, 16, u64::from(kind) - 1));
        rig.destination(key(u128::from(kind), 1), request(kind, 12, 16));
    }
    rig.facts();
    for kind in 1..=3_u32 {
        let first_token = expected[kind as usize - 1][0];
        rig.activate(key(u128::from(kind), 1), Some(first_token));
    }
    let mut log = Vec::new();
    while log.last().is_none_or(|done: &Done| done.preempted.is_empty()) {
        log.push(rig.pass().expect("a decode pass"));
    }
    assert_eq!(log.last().map(|done| done.preempted.clone()), Some(vec![2]), "the one that came last");
    let view = rig.view().waiting().next().expect("it waits");
    assert_eq!((view.sequence.0, view.status), (2, SequenceStatus::Preempted));
    // It would fit; the retracted one does not, and goes first.
    rig.destination(key(4, 1), request(4, 1, 1));
    log.extend(rig.run());
    let told: Vec<_> = log.iter().flat_map(|done| done.facts.clone()).collect();
    let back =
        log.iter().position(|done| done.decode.contains(&2) && done.preempted.is_empty() && done.decode.len() < 3);
    assert!(back.is_some(), "it decodes again");
    assert!(log.iter().all(|done| done.prefill.is_empty()), "its KV was on the host");
    assert_eq!(granted(&told), [(key(4, 1), 1)]);
    let reserved_in = log.iter().position(|done| !granted(&done.facts).is_empty());
    let first_back =
        log.iter().skip_while(|done| done.preempted.is_empty()).skip(1).position(|done| done.decode.contains(&2));
    let retracted_in = log.iter().position(|done| !done.preempted.is_empty()).expect("it was");
    assert!(reserved_in.expect("granted") >= retracted_in + 1 + first_back.expect("back"), "in its turn");
    for (sequence, expected) in expected.iter().enumerate() {
        assert_eq!(rig.outputs[&(sequence as u64)], expected[1..], "sequence {sequence}");
    }
}

/// Three that fill 99 pages; the one that came last is retracted with 27 tokens of KV, the second ends in the same
/// pass, and the first has 36. The third is back if 27 and the reserve for two fit beside those.
#[test]
fn a_retracted_destination_needs_the_reserve_again() {
    for (reserve, expected) in [(18, 1), (19, 14)] {
        let mut rig = Rig::new(reserving(reserve).with_max_total_tokens(99));
        let reserve = |rig: &mut Rig, kind: u32, tokens: u32, outputs: u32| {
            let handoff = key(u128::from(kind), 1);
            rig.destination(handoff, request(kind, tokens, outputs));
            let told = rig.begin().map(|pass| rig.finish(pass).facts).or_else(|| rig.settle().map(|done| done.facts));
            assert_eq!(granted(&told.unwrap_or_default()), [(handoff, tokens)]);
            rig.activate(handoff, Some(1));
        };
        reserve(&mut rig, 1, 10, 40);
        rig.throttle(0, true);
        reserve(&mut rig, 2, 10, 27);
        rig.throttle(0, false);
        rig.pass();
        reserve(&mut rig, 3, 4, 40);
        let log = rig.run();
        let retracted = log.iter().position(|done| done.preempted == [2]).expect("they do not fit");
        let alone = log[retracted..].iter().take_while(|done| !done.decode.contains(&2)).count();
        assert_eq!(alone, expected);
        assert!(log.iter().flat_map(|done| &done.finished).all(|end| end.1 == FinishReason::Length));
    }
}

/// The real engine ends the last one that runs when it finds no page, whoever holds the others.
#[test]
fn the_last_one_that_runs_waits_where_pages_are_held_for_transfers() {
    let mut rig = Rig::new(open().with_disaggregation_waiting_timeout(Duration::from_secs(3)));
    rig.source(key(1, 1), request(1, 30, 1));
    let grows = rig.submit(request(2, 10, 20));
    let log = rig.run();
    assert_eq!(rig.view().held().count(), 1);
    assert!(log.iter().all(|done| done.finished.iter().all(|end| end.1 == FinishReason::Length)), "nobody ran out");
    assert_eq!(rig.outputs[&grows].len(), 20);
    let mut rig = Rig::new(
        open().with_disaggregation_waiting_timeout(Duration::from_secs(3)).with_schedule_conservativeness(0.01),
    );
    let grows = rig.submit(request(2, 10, 45));
    rig.pass();
    rig.source(key(1, 1), request(1, 30, 1));
    let log = rig.run();
    assert_eq!(log.iter().filter(|done| done.preempted == [grows]).count(), 1, "it is retracted, alone as it is");
    assert_eq!(rig.view().waiting().count(), 1);
    rig.wait(Duration::from_secs(3));
    assert_eq!(rig.outputs[&grows].len(), 45, "and goes on when the lease has ended");
}

#[test]
fn case_99_pages_are_guarded_until_the_end_of_the_transfer_or_thirty_seconds() {
    let words = [
        Some(Command::ActivateDestination { handoff: key(1, 1), first_token: Some(1) }),
        Some(Command::FailTransfer { handoff: key(1, 1), valid_tokens: 0 }),
        Some(Command::CancelDestination { handoff: key(1, 1) }),
        None,
    ];
    for word in words {
        let mut rig = Rig::new(open());
        let destination = rig.destination(key(1, 1), request(1, 40, 3));
        rig.facts();
        rig.cancel(destination);
        assert_eq!(ends(&rig.facts()), [(key(1, 1), DestinationEnd::Cancelled)]);
        rig.destination(key(2, 1), request(2, 40, 1));
        assert_eq!((num_free(&rig), rig.facts()), (24, vec![]), "nobody gets the pages");
        match word {
            Some(word) => assert_eq!(rig.try_command(word), Ok(Applied::HandoffOver), "case 103"),
            None => rig.now = rig.now + Duration::from_secs(30),
        }
        assert_eq!(granted(&rig.facts()), [(key(2, 1), 40)]);
    }
}

#[test]
fn case_100_a_failed_transfer_ends_the_request_and_another_source_can_be_tried() {
    let mut rig = Rig::new(open());
    let first = rig.destination(key(1, 1), request(1, 10, 3));
    rig.facts();
    assert_eq!(rig.try_command(Command::FailTransfer { handoff: key(1, 1), valid_tokens: 9 }), Ok(Applied::Handoff));
    let done = rig.pass().expect("its end");
    assert_eq!((done.finished, num_free(&rig)), (vec![(first, FinishReason::TransferFailed)], 64));
    let second = rig.destination(key(1, 2), request(1, 10, 3));
    rig.facts();
    rig.activate(key(1, 2), Some(1));
    rig.run();
    assert_eq!(rig.outputs[&second].len(), 2);
}

#[test]
fn case_101_a_prompt_shorter_than_a_page_is_transferred() {
    let mut rig = Rig::new(open().with_page_size(16));
    rig.source(key(1, 1), request(1, 3, 1));
    rig.destination(key(2, 1), request(2, 3, 2));
    assert_eq!(granted(&rig.facts()), [(key(2, 1), 3)]);
    assert_eq!(num_free(&rig), 2, "a page each");
}

#[test]
fn with_a_decode_radix_cache_only_what_is_missing_is_transferred_and_pages_are_evicted_for_it() {
    let options = open().with_page_size(4).with_disaggregation_decode_enable_radix_cache(true);
    let mut rig = Rig::new(options);
    for (handoff, tokens, missing) in [(1, 16, 16), (2, 16, 0), (3, 23, 7)] {
        rig.destination(key(handoff, 1), request(1, tokens, 3));
        assert_eq!(granted(&rig.facts()), [(key(handoff, 1), missing)]);
        rig.activate(key(handoff, 1), Some(1));
        rig.run();
    }
    assert_eq!((num_free(&rig), rig.pool().evictable_tokens), (16, 24), "the last one stored 23 + 1 tokens");
    rig.destination(key(4, 1), request(4, 60, 3));
    assert_eq!(granted(&rig.facts()), [(key(4, 1), 60)], "what can be evicted counts as free");
    assert_eq!(rig.pool().evictable_tokens, 0);
}

#[test]
fn slots_are_taken_in_the_order_of_the_transfers_reservations() {
    let mut rig = Rig::new(open().with_max_running_requests(1));
    for kind in 1..=2 {
        rig.destination(key(kind, 1), request(kind as u32, 5, 3));
    }
    rig.facts();
    rig.activate(key(2, 1), Some(1));
    rig.activate(key(1, 1), Some(1));
    let decodes: Vec<_> = rig.run().into_iter().map(|done| done.decode).filter(|decode| !decode.is_empty()).collect();
    assert_eq!(decodes, [[0], [0], [1], [1]]);
}

#[test]
fn a_reset_spares_pages_that_are_held_for_a_transfer() {
    for reset_running_requests in [false, true] {
        let mut rig = Rig::new(open());
        rig.source(key(1, 1), request(1, 10, 1));
        rig.run();
        let refused = Applied::PrefixCacheReset { reset: false, preempted: Vec::new() };
        assert_eq!(rig.command(Command::ResetPrefixCache { reset_running_requests }), refused);
        let mut rig = Rig::new(open());
        rig.destination(key(1, 1), request(1, 10, 1));
        rig.facts();
        assert_eq!(rig.command(Command::ResetPrefixCache { reset_running_requests }), refused);
    }
}

/// Preempted, it would come back before the one that preempted it, and so on for ever.
#[test]
fn by_priority_nobody_takes_the_place_of_a_destination() {
    let options = open().with_max_running_requests(1).with_enable_priority_scheduling(true);
    let mut rig = Rig::new(options);
    rig.destination(key(1, 1), request(1, 5, 5));
    rig.facts();
    rig.activate(key(1, 1), Some(1));
    rig.pass();
    let important = rig.submit(request(2, 5, 1).with_priority(100));
    let log = rig.run();
    assert!(log.iter().all(|done| done.preempted.is_empty()));
    assert_eq!(log.iter().position(|done| done.prefill == [(important, 5)]), Some(3), "when it has all its tokens");
}

#[test]
fn cancels_of_a_handoff_take_no_last_step() {
    let mut rig = Rig::new(open().with_abort_after_next_forward(true));
    let destination = rig.destination(key(1, 1), request(1, 5, 5));
    rig.facts();
    rig.activate(key(1, 1), Some(1));
    rig.pass();
    assert_eq!(rig.try_command(Command::CancelDestination { handoff: key(1, 1) }), Ok(Applied::Handoff));
    assert_eq!(num_free(&rig), 64);
    assert_eq!(rig.pass().expect("the end").finished, [(destination, FinishReason::Cancelled)]);
    // The request's own cancel takes it, and its pages with it.
    let destination = rig.destination(key(1, 2), request(1, 5, 5));
    rig.facts();
    rig.activate(key(1, 2), Some(1));
    rig.pass();
    rig.cancel_or_end(destination);
    assert_ne!(num_free(&rig), 64);
    let done = rig.pass().expect("the last step");
    assert_eq!((done.finished, num_free(&rig)), (vec![(destination, FinishReason::Cancelled)], 64));
    assert_eq!(ends(&done.facts), [(key(1, 2), DestinationEnd::Cancelled)]);
}

/// One that waits already is behind it, too.
#[test]
fn a_retracted_destination_goes_before_those_that_came_earlier() {
    let mut rig = Rig::new(open());
    for kind in 1..=2 {
        rig.destination(key(kind, 1), request(kind as u32, 14, 30));
    }
    rig.facts();
    for kind in 1..=2 {
        rig.activate(key(kind, 1), Some(1));
    }
    // 50 and its reserve fit when nobody else has pages.
    rig.destination(key(3, 1), request(3, 50, 1));
    let mut log = rig.run();
    let retracted = log.iter().position(|done| done.preempted == [1]).expect("two of 44 do not fit into 64");
    log.extend(rig.settle());
    let back = log[retracted..].iter().position(|done| done.decode.contains(&1));
    let told = log[retracted..].iter().position(|done| granted(&done.facts) == [(key(3, 1), 50)]);
    assert!(back.is_some() && back < told, "{back:?} {told:?}");
}

#[test]
fn what_is_left_of_a_split_prompt_is_not_reserved_for_others() {
    // 8 of 40 tokens are computed: 56 are free, 32 of them spoken for, and a token for each of two is kept free.
    for (tokens, fits) in [(22, true), (23, false)] {
        let mut rig = Rig::new(open().with_chunked_prefill_size(Some(8)));
        rig.submit(request(1, 40, 1));
        rig.pass();
        rig.destination(key(1, 1), request(2, tokens, 1));
        let pass = rig.begin().expect("the next chunk");
        assert_eq!(rig.view().loading().count(), usize::from(fits), "{tokens}");
        rig.finish(pass);
    }
}

#[test]
fn a_destination_that_finds_no_room_is_not_computed_here_instead() {
    let mut rig = Rig::new(reserving(30));
    rig.submit(request(1, 10, 5));
    rig.pass();
    rig.destination(key(1, 1), request(2, 10, 2));
    let ordinary = rig.submit(request(3, 4, 1));
    let log = rig.run();
    let joins = log.iter().position(|done| done.prefill == [(ordinary, 4)]);
    let granted_in = log.iter().position(|done| !granted(&done.facts).is_empty());
    assert!(log.iter().flat_map(|done| &done.prefill).all(|(sequence, _)| *sequence != 1));
    assert!(joins.is_some() && joins >= granted_in, "nobody is let in before it: {joins:?} {granted_in:?}");
}

#[test]
fn case_91_a_source_that_expires_during_a_pass_is_told_at_its_end() {
    let mut rig = Rig::new(open());
    rig.source(key(1, 1), request(1, 10, 1));
    rig.run();
    rig.submit(request(2, 8, 1));
    rig.now = rig.now + Duration::from_millis(299_995);
    let pass = rig.begin().expect("a pass of 10 ms");
    let done = rig.finish(pass);
    assert!(matches!(done.facts[..], [HandoffFact::SourceEnded { end: SourceEnd::Expired, .. }]), "{:?}", done.facts);
    assert_eq!(num_free(&rig), 64);
}
