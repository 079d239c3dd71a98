//! Handoffs: the cases of engine-semantics.md §7.7, and what else can befall either side.

use std::time::Duration;

use super::test_kit::*;
use crate::config::{LoadFailurePolicy, SchedulingState};
use crate::handoff::HandoffKey;
use crate::output::FinishReason;
use crate::scheduler::handoff::told::*;
use crate::scheduler::{Applied, ApplyResult, Command, DestinationEnd, HandoffFact, SourceEnd};

#[test]
fn case_90_and_91_a_source_is_freed_at_the_end_of_its_lease_and_only_once() {
    let (mut rig, handoff) = held();
    let expires_at = rig.now + LEASE;
    assert_eq!(rig.scheduler.next_deadline(), Some(expires_at));
    assert_eq!(rig.wait(LEASE - Duration::from_nanos(1)).len(), 0);
    assert_eq!(num_free(&rig), 29);
    let done = rig.wait(Duration::from_secs(1));
    assert_eq!(source_ends(&done[0].facts), [(handoff, SourceEnd::Expired)]);
    assert_eq!((num_free(&rig), rig.scheduler.next_deadline()), (32, None));
    assert_eq!(release(&mut rig, handoff), Ok(Applied::HandoffOver));
    assert_eq!(facts(&mut rig), []);
    assert_eq!(num_free(&rig), 32);
}

#[test]
fn case_91_a_lease_ends_during_a_pass_and_whatever_the_scheduling_state_is() {
    let (mut rig, handoff) = held();
    rig.submit(request(2, 8, 1));
    let pass = rig.begin().expect("a pass");
    rig.now = rig.now + LEASE;
    rig.command(Command::SetScheduling(SchedulingState::Stopped));
    assert_eq!(num_free(&rig), 30, "the command saw the time");
    rig.now = pass.ends_at();
    assert_eq!(source_ends(&rig.finish(pass).facts), [(handoff, SourceEnd::Expired)]);
}

#[test]
fn case_91_a_failed_load_ends_its_request_or_is_computed_by_the_policy() {
    for policy in [LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute] {
        let mut rig = Rig::new(small().with_kv_load_failure_policy(policy));
        let [none, some, all] = [1, 2, 3].map(|kind| rig.destination(key(u128::from(kind), 1), request(kind, 10, 3)));
        facts(&mut rig);
        for (handoff, valid) in [(key(1, 1), 0), (key(2, 1), 7), (key(3, 1), 10)] {
            assert_eq!(fail(&mut rig, handoff, valid), Ok(Applied::Handoff));
        }
        let done = rig.pass().expect("a pass");
        let all_done = rig.run();
        if policy == LoadFailurePolicy::Fail {
            assert_eq!(done.finished, [(none, FinishReason::TransferFailed), (some, FinishReason::TransferFailed)]);
            assert_eq!(done.rows, [(all, 1)], "all of it is valid");
            let ends = destination_ends(&done.facts);
            assert_eq!(ends, [1, 2].map(|handoff| (key(handoff, 1), DestinationEnd::TransferFailed)));
        } else {
            assert_eq!(done.rows, [(none, 10), (some, 6), (all, 1)], "whole blocks count");
            assert!(all_done.iter().any(|done| destination_ends(&done.facts).len() == 3));
        }
        assert_eq!(num_free(&rig), 32);
    }
}

#[test]
fn case_92_heartbeats_keep_a_source_for_as_long_as_they_come() {
    let (mut rig, handoff) = held();
    for _ in 0..12 {
        assert_eq!(rig.wait(Duration::from_secs(5)).len(), 0);
        assert_eq!(rig.try_command(Command::Heartbeat { handoff }), Ok(Applied::Handoff));
    }
    assert_eq!(num_free(&rig), 29, "a minute later");
    let ahead = rig.scheduler.next_deadline().expect("a lease").saturating_since(rig.now);
    assert_eq!(ahead.as_secs_f64().round(), 20.0, "two thirds of the lease");
    rig.wait(Duration::from_secs(20));
    assert_eq!((num_free(&rig), rig.try_command(Command::Heartbeat { handoff })), (32, Ok(Applied::HandoffOver)));
}

#[test]
fn case_92_a_heartbeat_never_shortens_a_lease_and_waits_for_no_hold() {
    let mut rig = Rig::new(small());
    rig.source(key(1, 1), request(1, 10, 1));
    assert_eq!(rig.try_command(Command::Heartbeat { handoff: key(1, 1) }), Ok(Applied::Handoff));
    rig.run();
    assert_eq!(rig.try_command(Command::Heartbeat { handoff: key(1, 1) }), Ok(Applied::Handoff));
    assert_eq!(rig.scheduler.next_deadline(), Some(rig.now + LEASE));
}

#[test]
fn case_93_a_prompt_that_is_cached_but_for_its_last_token_needs_no_transfer() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 13, 1));
    rig.run();
    rig.destination(key(1, 1), request(1, 13, 2));
    rig.destination(key(2, 1), request(1, 12, 2));
    assert_eq!(granted(&facts(&mut rig)), [(key(1, 1), 0), (key(2, 1), 4)], "an aligned one lacks its last block");
    activate(&mut rig, key(1, 1)).expect("reserved");
    let done = rig.pass().expect("a pass");
    assert_eq!((done.rows[0].1, done.prefills[0].num_external_cached_tokens), (1, 1));
}

#[test]
fn case_95_a_destination_without_blocks_waits_and_is_granted_when_there_are_some() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(5));
    rig.submit(request(1, 12, 3));
    rig.pass();
    rig.destination(key(1, 1), request(2, 12, 1));
    let done = rig.pass().expect("a pass");
    assert_eq!((done.facts, rig.view().loading().count()), (vec![], 0));
    assert_eq!(granted(&facts(&mut rig)), [(key(1, 1), 12)]);
}

#[test]
fn case_99_blocks_stay_guarded_until_the_transfer_or_the_guard_ends() {
    let ends: [fn(&mut Rig, HandoffKey) -> ApplyResult; 3] = [
        activate,
        |rig, handoff| fail(rig, handoff, 0),
        |rig, handoff| rig.try_command(Command::CancelDestination { handoff }),
    ];
    for end in ends {
        let mut rig = Rig::new(small());
        let destination = rig.destination(key(1, 1), request(1, 10, 3));
        facts(&mut rig);
        rig.cancel(destination);
        assert_eq!(destination_ends(&facts(&mut rig)), [(key(1, 1), DestinationEnd::Cancelled)], "it is over at once");
        assert_eq!(num_free(&rig), 29, "its blocks are not");
        assert_eq!(end(&mut rig, key(1, 1)), Ok(Applied::HandoffOver), "case 103");
        assert_eq!((num_free(&rig), rig.scheduler.next_deadline()), (32, None));
        assert_eq!(facts(&mut rig), [], "nothing is told twice");
    }
    let mut rig = Rig::new(small().with_transfer_guard(Duration::from_secs(3)));
    let destination = rig.destination(key(1, 1), request(1, 10, 3));
    facts(&mut rig);
    rig.cancel(destination);
    facts(&mut rig);
    rig.wait(Duration::from_secs(3));
    assert_eq!((num_free(&rig), rig.view().num_handoffs()), (32, 0));
}

#[test]
fn case_99_a_guard_counts_from_when_its_request_was_given_up() {
    let mut rig = Rig::new(small());
    let destination = rig.destination(key(1, 1), request(1, 10, 3));
    facts(&mut rig);
    rig.submit(request(2, 4, 1));
    let pass = rig.begin().expect("a pass");
    rig.now = rig.now + PASS / 2;
    let given_up = rig.now;
    rig.cancel(destination);
    let HandoffFact::DestinationEnded { at, .. } = rig.finish(pass).facts[0] else { panic!("no end") };
    assert_eq!((at, rig.scheduler.next_deadline()), (given_up, Some(given_up + LEASE)));
}

#[test]
fn case_100_after_a_lost_transfer_another_source_can_be_tried() {
    let mut rig = Rig::new(small());
    let first = rig.destination(key(1, 1), request(1, 10, 3));
    facts(&mut rig);
    fail(&mut rig, key(1, 1), 0).expect("reserved");
    let done = rig.pass().expect("its end");
    assert_eq!((done.finished, num_free(&rig)), (vec![(first, FinishReason::TransferFailed)], 32));
    let second = rig.destination(key(1, 2), request(1, 10, 3));
    facts(&mut rig);
    activate(&mut rig, key(1, 2)).expect("reserved");
    rig.run();
    assert_eq!(rig.outputs[&second].len(), 3);
}

#[test]
fn case_101_a_prompt_shorter_than_a_block_is_transferred() {
    let mut rig = Rig::new(small());
    rig.source(key(1, 1), request(1, 3, 1));
    rig.destination(key(2, 1), request(2, 3, 2));
    let told = facts(&mut rig);
    assert_eq!(granted(&told), [(key(2, 1), 3)]);
    activate(&mut rig, key(2, 1)).expect("reserved");
    assert_eq!(rig.pass().expect("a pass").rows, [(1, 1)]);
}

#[test]
fn a_source_that_outgrows_the_pool_is_over_without_having_been_held() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(3));
    rig.source(key(1, 1), request(1, 20, 1));
    rig.destination(key(2, 1), request(2, 20, 1));
    let told = facts(&mut rig);
    assert_eq!(source_ends(&told), [(key(1, 1), SourceEnd::OutOfMemory)]);
    assert_eq!(destination_ends(&told), [(key(2, 1), DestinationEnd::OutOfMemory)]);
}

#[test]
fn a_throttled_destination_keeps_its_blocks_and_blocks_nobody() {
    let mut rig = Rig::new(small());
    let destination = rig.destination(key(1, 1), request(1, 10, 3));
    facts(&mut rig);
    rig.throttle(destination, true);
    activate(&mut rig, key(1, 1)).expect("reserved");
    let other = rig.submit(request(2, 4, 1));
    assert_eq!(rig.pass().expect("a pass").rows, [(other, 4)]);
    rig.throttle(destination, false);
    assert_eq!(rig.pass().expect("a pass").rows, [(destination, 1)]);
}

#[test]
fn a_preempted_destination_computes_again_what_its_cache_has_lost() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(8));
    rig.submit(request(1, 12, 12));
    let destination = rig.destination(key(1, 1), request(2, 12, 9));
    rig.pass();
    activate(&mut rig, key(1, 1)).expect("reserved");
    let passes = rig.run();
    assert!(passes.iter().any(|done| done.preempted == [destination]));
    let ends: Vec<_> = passes.iter().flat_map(|done| destination_ends(&done.facts)).collect();
    assert_eq!((ends, rig.outputs[&destination].len()), (vec![(key(1, 1), DestinationEnd::Finished)], 9));
}
