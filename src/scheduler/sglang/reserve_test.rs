//! Destinations: what is reserved when, and in which order, also for those that were retracted.

use super::test_kit::*;
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::handoff::told::*;
use crate::scheduler::{Applied, Command, DestinationEnd, SequenceStatus};

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
            assert_eq!(
                destination_ends(&told),
                [(key(1, 1), DestinationEnd::OutOfMemory)],
                "not even the empty pool holds it"
            );
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
