//! Handoffs as SGLang does them: sources, and how transferred requests come into the batch.

use std::time::Duration;

use super::test_kit::*;
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::handoff::told::*;
use crate::scheduler::{Applied, Command, DestinationEnd, HandoffFact, RowKind, SourceEnd};

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
    assert_eq!((num_free(&rig), destination_ends(&done.facts).len()), (64, 2));
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
        assert_eq!(destination_ends(&rig.facts()), [(key(1, 1), DestinationEnd::Cancelled)]);
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
    assert_eq!(destination_ends(&done.facts), [(key(1, 2), DestinationEnd::Cancelled)]);
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
