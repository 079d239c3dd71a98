//! Handoffs: the rules of the contract that are the core's.

use super::test_kit::*;
use crate::config::{FirstToken, VllmPolicy};
use crate::error::HandoffRefusal;
use crate::output::FinishReason;
use crate::scheduler::handoff::told::*;
use crate::scheduler::{Applied, Command, DestinationEnd, HandoffFact, SequenceStatus, SourceEnd};

#[test]
fn h05_a_source_is_held_after_the_pass_that_gives_its_last_token() {
    let mut rig = Rig::new(small());
    let before = rig.submit(request(1, 9, 1));
    rig.run();
    let source = rig.source(key(7, 3), request(1, 10, 1));
    let done = rig.pass().expect("a pass");
    assert_eq!((done.finished, done.sampled), (vec![(source, FinishReason::Length)], vec![source]));
    let first_token = rig.outputs[&source][0];
    let HandoffFact::SourceHeld { handoff, at, prompt_tokens, cached_tokens, first_token: told, expires_at, .. } =
        done.facts[0]
    else {
        panic!("{:?}", done.facts);
    };
    assert_eq!((handoff, at, told, expires_at), (key(7, 3), rig.now, first_token, rig.now + LEASE));
    assert_eq!((prompt_tokens, cached_tokens), (10, 8), "it hits what sequence {before} left");
    let view = rig.view().held().next().expect("a held sequence");
    assert_eq!((view.status, view.block_ids.len()), (SequenceStatus::Held(FinishReason::Length), 3));
    assert_eq!(rig.pass().expect("its end is reported").reported, [source]);
    assert!(rig.pass().is_none(), "nothing to do while it is held");
    assert_eq!(num_free(&rig), 29);
}

#[test]
fn h06_release_and_cancel_answer_by_what_there_is() {
    let mut rig = Rig::new(small());
    let (source, cancel) =
        (Command::ReleaseSource { handoff: key(1, 1) }, Command::CancelSource { handoff: key(1, 1) });
    assert_eq!(rig.try_command(source.clone()), Ok(Applied::HandoffOver), "none is submitted");
    rig.source(key(1, 1), request(1, 10, 1));
    assert_eq!(rig.try_command(source.clone()), refused(HandoffRefusal::NotHeld(key(1, 1))));
    let destination = Command::CancelDestination { handoff: key(1, 1) };
    assert_eq!(rig.try_command(destination), refused(HandoffRefusal::NotADestination(key(1, 1))));
    rig.run();
    assert_eq!(rig.try_command(source.clone()), Ok(Applied::Handoff));
    assert_eq!(source_ends(&facts(&mut rig)), [(key(1, 1), SourceEnd::Released)]);
    for command in [source, cancel] {
        assert_eq!(rig.try_command(command), Ok(Applied::HandoffOver), "already over");
    }
    assert_eq!((num_free(&rig), facts(&mut rig)), (32, vec![]));
}

#[test]
fn h06_and_h15_cancelling_a_source_removes_it_wherever_it_is() {
    for passes in 0..3 {
        let mut rig = Rig::new(small().with_max_num_batched_tokens(8));
        let source = rig.source(key(1, 1), request(1, 10, 1));
        let mut all: Vec<_> = (0..passes).filter_map(|_| rig.pass()).collect();
        assert_eq!(rig.command(Command::CancelSource { handoff: key(1, 1) }), Applied::Handoff);
        assert_eq!(num_free(&rig), 32, "after {passes} passes");
        all.extend(rig.run());
        all.extend(rig.settle());
        let ends: Vec<_> = all.iter().flat_map(|done| source_ends(&done.facts)).collect();
        assert_eq!(ends, [(key(1, 1), SourceEnd::Cancelled)]);
        let finished: Vec<_> = all.iter().flat_map(|done| done.finished.clone()).collect();
        let reason = if passes == 2 { FinishReason::Length } else { FinishReason::Cancelled };
        assert_eq!(finished, [(source, reason)], "its reader is told, once");
    }
}

#[test]
fn h06_a_cancel_during_the_pass_that_would_end_the_source_leaves_nothing_held() {
    let mut rig = Rig::new(small());
    let source = rig.source(key(1, 1), request(1, 10, 1));
    let pass = rig.begin().expect("a pass");
    assert_eq!(rig.command(Command::CancelSource { handoff: key(1, 1) }), Applied::Handoff);
    let done = rig.finish(pass);
    assert_eq!((done.sampled, done.finished), (vec![], vec![(source, FinishReason::Cancelled)]));
    assert_eq!((source_ends(&done.facts), num_free(&rig)), (vec![(key(1, 1), SourceEnd::Cancelled)], 32));
}

#[test]
fn h03_a_later_registration_supersedes_and_ends_the_earlier_one() {
    let (mut rig, old) = held();
    rig.source(key(1, 2), request(2, 10, 1));
    let superseded = refused(HandoffRefusal::Superseded { handoff: old, current: 2 });
    for command in [
        Command::ReleaseSource { handoff: old },
        Command::CancelSource { handoff: old },
        Command::CancelDestination { handoff: old },
        Command::ActivateDestination { handoff: old, first_token: None },
        Command::Heartbeat { handoff: old },
    ] {
        assert_eq!(rig.try_command(command), superseded);
    }
    let told = facts(&mut rig);
    assert_eq!(source_ends(&told), [(old, SourceEnd::Superseded)]);
    assert_eq!((told.last().map(HandoffFact::handoff), num_free(&rig)), (Some(key(1, 2)), 29));
    let again = Command::SubmitPrefill { handoff: key(1, 2), submission: rig.submission(request(3, 4, 1)) };
    assert_eq!(rig.try_command(again), refused(HandoffRefusal::AlreadySubmitted(key(1, 2))));
}

#[test]
fn h03_what_runs_already_outlives_its_registration_and_what_waits_does_not() {
    let mut rig = Rig::new(small());
    let active = rig.destination(key(1, 1), request(1, 8, 4));
    facts(&mut rig);
    activate(&mut rig, key(1, 1)).expect("reserved");
    rig.pass();
    let waits = rig.destination(key(1, 2), request(2, 8, 4));
    rig.source(key(1, 3), request(3, 8, 1));
    let all = rig.run();
    let ends: Vec<_> = all.iter().flat_map(|done| destination_ends(&done.facts)).collect();
    assert_eq!(ends, [(key(1, 1), DestinationEnd::Superseded), (key(1, 2), DestinationEnd::Superseded)]);
    let finished: Vec<_> = all.iter().flat_map(|done| done.finished.clone()).collect();
    assert!(finished.contains(&(active, FinishReason::Length)) && finished.contains(&(waits, FinishReason::Cancelled)));
    assert_eq!(num_free(&rig), 30, "the last one is held, with two blocks");
}

#[test]
fn h07_destinations_are_granted_in_the_order_of_acceptance_as_soon_as_they_fit() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(9));
    rig.submit(request(1, 9, 1));
    rig.run();
    let first = rig.destination(key(1, 1), request(1, 21, 2));
    rig.destination(key(2, 1), request(2, 20, 2));
    rig.destination(key(3, 1), request(3, 1, 2));
    let told = facts(&mut rig);
    assert_eq!(granted(&told), [(key(1, 1), 13)], "two blocks were in its cache; the third would fit and waits");
    assert_eq!(activate(&mut rig, key(2, 1)), refused(HandoffRefusal::NotReserved(key(2, 1))));
    activate(&mut rig, key(1, 1)).expect("reserved");
    let told = facts(&mut rig);
    assert_eq!(destination_ends(&told), [(key(1, 1), DestinationEnd::Finished)]);
    assert_eq!(granted(&told), [(key(2, 1), 20), (key(3, 1), 0)]);
    assert_eq!(rig.outputs[&first].len(), 2);
    assert!(told.iter().is_sorted_by_key(|fact| match fact {
        HandoffFact::DestinationReserved { at, .. } | HandoffFact::DestinationEnded { at, .. } => *at,
        _ => rig.now,
    }));
}

#[test]
fn h08_no_fresh_request_takes_the_blocks_that_a_destination_waits_for() {
    let admitted = |first: bool| {
        let options = small().with_num_gpu_blocks(11).with_policy(VllmPolicy::Priority).with_destinations_first(first);
        let mut rig = Rig::new(options);
        rig.submit(request(1, 20, 9));
        rig.pass();
        rig.destination(key(1, 1), request(2, 24, 1).with_priority(5));
        rig.pass();
        // More important, and small enough for what is free.
        let fresh = rig.submit(request(3, 4, 1).with_priority(-5));
        let before = rig.view().waiting().count();
        let done = rig.pass().expect("a pass");
        assert_eq!(before, 1, "the destination waits");
        (done.hits.iter().any(|hit| hit.0 == fresh), rig)
    };
    let (taken, mut rig) = admitted(true);
    assert!(!taken, "it leaves them free");
    let told = facts(&mut rig);
    assert_eq!(granted(&told).len(), 1, "which lets the destination in when the other ends");
    let (taken, _) = admitted(false);
    assert!(taken, "as the real engine does");
}

#[test]
fn h08_preemption_takes_nothing_that_is_held_or_reserved() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(13));
    rig.source(key(1, 1), request(1, 8, 1));
    rig.destination(key(2, 1), request(2, 8, 1));
    rig.submit(request(3, 12, 12));
    rig.submit(request(4, 12, 12));
    let passes = rig.run();
    assert!(passes.iter().any(|done| done.preempted == [3]), "two that grow do not fit beside them");
    let kept: Vec<_> = rig.view().held().chain(rig.view().loading()).map(|kept| kept.block_ids.len()).collect();
    assert_eq!((kept, num_free(&rig)), (vec![2, 2], 8));
}

#[test]
fn h09_an_activated_destination_computes_its_last_prompt_token_and_decodes() {
    for tokens in [1, 3, 4, 10, 12, 13] {
        let mut aggregated = Rig::new(small());
        aggregated.submit(request(1, tokens, 5));
        aggregated.run();

        let mut rig = Rig::new(small());
        let destination = rig.destination(key(1, 1), request(1, tokens, 5));
        assert_eq!(activate(&mut rig, key(1, 1)), refused(HandoffRefusal::NotReserved(key(1, 1))));
        assert_eq!(granted(&facts(&mut rig)), [(key(1, 1), if tokens == 1 { 0 } else { tokens })]);
        assert_eq!(activate(&mut rig, key(1, 1)), Ok(Applied::Handoff));
        assert_eq!(activate(&mut rig, key(1, 1)), refused(HandoffRefusal::AlreadyActive(key(1, 1))));
        assert_eq!(fail(&mut rig, key(1, 1), 0), refused(HandoffRefusal::AlreadyActive(key(1, 1))));
        let done = rig.pass().expect("case 94");
        assert_eq!((done.rows, done.hits), (vec![(destination, 1)], vec![(destination, tokens - 1)]));
        let stats = done.prefills[0];
        assert_eq!(stats.num_cached_tokens, if tokens == 1 { 0 } else { tokens });
        rig.run();
        assert_eq!(rig.outputs, aggregated.outputs, "the same tokens as without a handoff");
        assert_eq!(activate(&mut rig, key(1, 1)), refused(HandoffRefusal::NoDestination(key(1, 1))));
    }
}

#[test]
fn h09_and_case_98_a_carried_first_token_is_followed_by_the_second() {
    let mut source = Rig::new(small());
    source.source(key(1, 1), request(1, 10, 1));
    let told = source.run().remove(0).facts;
    let HandoffFact::SourceHeld { first_token, .. } = told[0] else { panic!("{told:?}") };

    let mut aggregated = Rig::new(small());
    aggregated.submit(request(1, 10, 5));
    aggregated.run();

    let mut rig = Rig::new(small().with_first_token(FirstToken::CarriedOver));
    let destination = rig.destination(key(1, 1), request(1, 10, 5));
    facts(&mut rig);
    let command = Command::ActivateDestination { handoff: key(1, 1), first_token: Some(first_token) };
    assert_eq!(rig.try_command(command), Ok(Applied::Handoff));
    let done = rig.pass().expect("a pass");
    assert_eq!((done.rows, done.hits), (vec![(destination, 1)], vec![(destination, 10)]), "the KV of the first token");
    assert_eq!((done.prefills.len(), done.metrics.expect("metrics").num_decode_requests), (1, 1));
    rig.run();
    let tokens: Vec<u32> = [first_token].into_iter().chain(rig.outputs[&destination].iter().copied()).collect();
    assert_eq!(tokens, aggregated.outputs[&0], "none is missing and none is there twice");
}

#[test]
fn h09_a_carried_token_that_is_the_last_ends_the_request_without_a_pass() {
    let mut rig = Rig::new(small().with_first_token(FirstToken::CarriedOver));
    let limit = rig.destination(key(1, 1), request(1, 10, 1));
    let mut stops = request(2, 10, 3).with_output_tokens(vec![5, 6, 7]);
    stops.stop_token_ids = vec![5];
    let stop = rig.destination(key(2, 1), stops);
    facts(&mut rig);
    for (handoff, token) in [(key(1, 1), 9), (key(2, 1), 5)] {
        rig.try_command(Command::ActivateDestination { handoff, first_token: Some(token) }).expect("reserved");
    }
    let done = rig.pass().expect("a pass that reports the ends");
    let reason = FinishReason::Stop { stop_token: Some(5) };
    assert_eq!((done.rows, done.finished), (vec![], vec![(limit, FinishReason::Length), (stop, reason)]));
    assert_eq!((num_free(&rig), destination_ends(&done.facts).len()), (32, 2));
}

#[test]
fn h10_giving_a_destination_up_releases_only_its_own() {
    let mut rig = Rig::new(small());
    let old = rig.destination(key(1, 1), request(1, 10, 2));
    facts(&mut rig);
    rig.cancel(old);
    let new = rig.destination(key(1, 2), request(2, 10, 2));
    let told = facts(&mut rig);
    assert_eq!(
        (destination_ends(&told), granted(&told)),
        (vec![(key(1, 1), DestinationEnd::Cancelled)], vec![(key(1, 2), 10)])
    );
    let cancel = Command::CancelDestination { handoff: key(1, 1) };
    assert!(rig.try_command(cancel).is_err(), "superseded");
    assert_eq!(rig.view().loading().map(|sequence| sequence.sequence.0).collect::<Vec<_>>(), [new]);
    rig.cancel(new);
    rig.wait(LEASE);
    assert_eq!(num_free(&rig), 32, "both guards have ended");
}

#[test]
fn h10_a_destination_that_waits_or_runs_is_given_up_at_once() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(5));
    let running = rig.destination(key(1, 1), request(1, 10, 9));
    facts(&mut rig);
    activate(&mut rig, key(1, 1)).expect("reserved");
    rig.pass();
    let waiting = rig.destination(key(2, 1), request(2, 10, 9));
    rig.pass();
    rig.cancel(waiting);
    assert_eq!(rig.try_command(Command::CancelDestination { handoff: key(1, 1) }), Ok(Applied::Handoff));
    assert_eq!(num_free(&rig), 4);
    let done = rig.pass().expect("the ends");
    let ends = [(key(2, 1), DestinationEnd::Cancelled), (key(1, 1), DestinationEnd::Cancelled)];
    assert_eq!(
        (destination_ends(&done.facts), done.finished),
        (ends.to_vec(), vec![(running, FinishReason::Cancelled)])
    );
}

#[test]
fn h16_a_decode_whose_prompt_is_there_waits_for_blocks_and_computes_one_token() {
    let mut aggregated = Rig::new(small());
    for kind in 0..3 {
        aggregated.submit(request(kind, 12, 5));
    }
    aggregated.run();

    let mut rig = Rig::new(small().with_num_gpu_blocks(9));
    for kind in 0..3 {
        let submission = rig.submission(request(kind, 12, 5));
        assert_eq!(rig.try_command(Command::SubmitDecode(submission)), Ok(Applied::Submitted));
    }
    let done = rig.pass().expect("a pass");
    assert_eq!((done.rows, done.hits), (vec![(0, 1), (1, 1)], vec![(0, 11), (1, 11)]), "the third finds no blocks");
    let cancelled = rig.submission(request(9, 12, 5));
    rig.try_command(Command::SubmitDecode(cancelled)).expect("taken");
    rig.pass();
    rig.cancel(3);
    rig.run();
    assert_eq!(rig.outputs, aggregated.outputs);
    assert_eq!(num_free(&rig), 8);
}
