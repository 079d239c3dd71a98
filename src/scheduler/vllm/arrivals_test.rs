//! Arrivals (rule r43), throttled sequences (r21) and cancels in every state.

use std::time::Duration;

use super::test_kit::*;
use crate::config::{SchedulingState, VllmPolicy};
use crate::scheduler::{Command, SequenceStatus};
use crate::time::EngineTime;

fn at(millis: u64) -> EngineTime {
    EngineTime::from_millis(millis)
}

#[test]
fn r43_a_pass_sees_what_arrived_before_it_and_at_a_tie_the_boundary_comes_first() {
    let mut rig = Rig::new(small());
    rig.now = at(10);
    rig.submit_at(request(1, 4, 9), at(10));
    assert_eq!(rig.pass().expect("at a tie with nothing before it").rows, [(0, 4)]);
    rig.submit_at(request(2, 4, 9), at(20));
    rig.submit_at(request(3, 4, 9), at(19));
    rig.submit_at(request(4, 4, 9).with_arrival(at(21)), at(12));
    assert_eq!(rig.scheduler.next_deadline(), Some(at(19)));
    assert_eq!(rig.pass().expect("the boundary at 20").rows, [(0, 1), (2, 4)]);
    assert_eq!(rig.pass().expect("the boundary at 30").rows, [(0, 1), (2, 1), (1, 4), (3, 4)]);
    assert_eq!(rig.scheduler.next_deadline(), None);
}

#[test]
fn r43_a_tie_waits_for_nothing_when_nothing_else_runs() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 4, 1));
    let pass = rig.begin().expect("a pass");
    rig.submit_at(request(2, 4, 1), pass.ends_at());
    rig.finish(pass);
    let done = rig.pass().expect("planned again with the tie");
    assert_eq!((done.rows, done.reported), (vec![(1, 4)], vec![0]));
}

#[test]
fn r43_passes_without_duration_do_not_starve_ties() {
    let mut rig = Rig::new(small());
    rig.scheduler = std::mem::replace(
        &mut rig.scheduler,
        crate::scheduler::Scheduler::new(&crate::config::EngineConfig::default()).expect("the default"),
    )
    .with_timing(Box::new(Immediate));
    rig.submit_at(request(1, 4, 50), rig.now);
    rig.pass();
    rig.submit_at(request(2, 4, 1), rig.now);
    assert_eq!(rig.pass().expect("a pass").rows, [(0, 1), (1, 4)]);
}

#[derive(Debug)]
struct Immediate;

impl crate::timing::PassTiming for Immediate {
    fn pass_duration(&mut self, _: &crate::timing::PassWork) -> Duration {
        Duration::ZERO
    }
}

#[test]
fn r43_an_arrival_ahead_of_time_is_waited_for_and_ordered_by_it() {
    let mut rig = Rig::new(small().with_max_num_seqs(1));
    rig.now = at(5);
    rig.submit_at(request(1, 4, 1).with_arrival(at(40)), at(5));
    rig.submit_at(request(2, 4, 1).with_arrival(at(30)), at(5));
    rig.submit_at(request(3, 4, 1).with_arrival(at(1)), at(5));
    let status = |rig: &Rig| rig.view().running().chain(rig.view().waiting()).count();
    assert_eq!(rig.run().iter().flat_map(|done| done.sampled.clone()).collect::<Vec<_>>(), [2]);
    assert_eq!((rig.scheduler.next_deadline(), status(&rig)), (Some(at(30)), 0));
    rig.now = at(40);
    assert_eq!(rig.run().iter().flat_map(|done| done.sampled.clone()).collect::<Vec<_>>(), [1, 0]);
}

#[test]
fn the_length_of_the_queue_is_true_at_a_boundary() {
    let mut rig = Rig::new(small().with_max_num_seqs(1));
    rig.submit(request(1, 4, 9));
    let pass = rig.begin().expect("a pass");
    let (before, end) = (EngineTime::from_nanos(pass.ends_at().as_nanos() - 1), pass.ends_at());
    rig.submit_at(request(2, 6, 9), before);
    rig.submit_at(request(3, 4, 9), end);
    let effects = rig.scheduler.finish_pass(pass, end);
    assert_eq!(effects.metrics.num_requests_waiting, 1);
    let metrics = effects.pass.expect("metrics");
    assert_eq!((metrics.num_queued_prefill, metrics.sum_queued_prefill_tokens), (1, 6));
}

#[test]
fn by_priority_arrival_then_id_decide() {
    let mut rig = Rig::new(small().with_max_num_seqs(1).with_policy(VllmPolicy::Priority));
    rig.now = at(100);
    for (priority, arrival) in [(1, 3), (0, 9), (1, 2), (1, 2), (0, 8)] {
        rig.submit_at(request(1, 4, 1).with_priority(priority).with_arrival(at(arrival)), at(50));
    }
    assert_eq!(rig.run().iter().flat_map(|done| done.sampled.clone()).collect::<Vec<_>>(), [4, 1, 2, 3, 0]);
}

#[test]
fn r21_a_throttled_sequence_keeps_its_blocks_and_is_left_out() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 9, 9));
    rig.submit(request(2, 9, 9));
    rig.pass();
    rig.throttle(0, true);
    assert_eq!(rig.pass().expect("a pass").rows, [(1, 1)]);
    rig.throttle(1, true);
    assert!(rig.pass().is_none() && !rig.view().has_work());
    assert_eq!(rig.view().running().map(|sequence| sequence.block_ids.len()).collect::<Vec<_>>(), [3, 3]);
    rig.throttle(0, false);
    assert_eq!(rig.pass().expect("a pass").rows, [(0, 1)]);
    rig.throttle(1, false);
    rig.run();
    assert_eq!([rig.outputs[&0].len(), rig.outputs[&1].len()], [9, 9]);
}

#[test]
fn r21_preempted_and_throttled_it_stands_aside_and_returns_to_the_front() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(9));
    rig.submit(request(1, 12, 14));
    rig.submit(request(2, 12, 9));
    rig.pass();
    rig.throttle(1, true);
    while rig.pass().expect("a pass").preempted != [1] {}
    rig.submit(request(3, 4, 3));
    assert_eq!(rig.pass().expect("a pass").hits, [(2, 0)], "it blocks nobody in the queue");
    rig.run();
    let aside = rig.view().sequence(crate::request::SequenceId(1)).expect("it waits");
    assert_eq!((aside.status, aside.throttled, aside.block_ids), (SequenceStatus::Preempted, true, &[][..]));
    assert_eq!((rig.view().waiting().count(), rig.view().has_work()), (0, false));
    rig.submit(request(5, 4, 1));
    rig.throttle(1, false);
    let admitted: Vec<_> = rig.pass().expect("a pass").hits.iter().map(|hit| hit.0).collect();
    assert_eq!(admitted, [1, 3]);
    rig.run();
    assert_eq!(rig.outputs[&1].len(), 9);
}

#[test]
fn r21_throttled_before_it_ever_ran() {
    let mut rig = Rig::new(small());
    rig.submit_at(request(1, 4, 1).with_arrival(at(50)), rig.now);
    rig.submit(request(2, 4, 1));
    rig.throttle(0, true);
    rig.run();
    rig.now = at(60);
    assert!(rig.pass().is_none());
    let shown = rig.scheduler.settle(rig.now).expect("one more waits");
    assert_eq!(shown.metrics.num_requests_waiting, 1);
    rig.throttle(0, false);
    assert_eq!(rig.run()[0].rows, [(0, 4)]);
}

#[test]
fn case_72_a_cancel_frees_at_once_in_every_state() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(9).with_max_num_batched_tokens(16));
    let free = |rig: &Rig| rig.view().pool().num_free_blocks();
    // Still to arrive, and waiting.
    let arriving = rig.submit_at(request(1, 4, 1).with_arrival(at(900)), rig.now);
    rig.cancel(arriving);
    assert_eq!(rig.scheduler.next_deadline(), None);
    rig.command(Command::SetScheduling(SchedulingState::NoNewAdmissions));
    let waiting = rig.submit(request(1, 4, 1));
    assert_eq!(rig.run()[0].reported, [arriving]);
    rig.cancel(waiting);
    rig.command(Command::SetScheduling(SchedulingState::Running));
    // In mid prefill, between passes and in one; decoding likewise.
    for passes in [1, 2, 3, 4] {
        let chunked = rig.submit(request(passes, 24, 9));
        for _ in 1..passes {
            rig.pass();
        }
        let pass = rig.begin().expect("a pass");
        rig.cancel(chunked);
        assert_eq!(free(&rig), 8);
        assert!(rig.finish(pass).sampled.is_empty());
    }
    // Preempted, and beside the queue.
    for throttled in [false, true] {
        let stays = rig.submit(request(7, 12, 99));
        let victim = rig.submit(request(8, 4, 99));
        while rig.pass().expect("a pass").preempted.is_empty() {}
        rig.throttle(victim, throttled);
        rig.cancel(victim);
        rig.cancel(stays);
        assert_eq!(free(&rig), 8);
    }
    rig.run();
    let metrics = rig.scheduler.settle(rig.now);
    assert!(metrics.is_none() && !rig.view().has_work());
}

#[test]
fn case_74_a_sharer_is_not_disturbed() {
    let mut rig = Rig::new(small());
    let first = rig.submit(request(1, 17, 3));
    rig.pass();
    let sharer = rig.submit(request(1, 17, 3));
    assert_eq!(rig.pass().expect("a pass").hits, [(sharer, 16)]);
    rig.cancel(first);
    rig.run();
    assert_eq!(rig.outputs[&sharer].len(), 3);
}

#[test]
fn r25_a_slot_used_again_in_mid_pass_is_another_sequence() {
    let mut rig = Rig::new(small());
    let cancelled = rig.submit(request(1, 4, 9));
    let other = rig.submit(request(2, 4, 9));
    let pass = rig.begin().expect("a pass");
    rig.cancel(cancelled);
    let newcomer = rig.submit(request(3, 4, 9));
    let done = rig.finish(pass);
    assert_eq!(done.sampled, [other], "everyone else's part is unchanged, the newcomer has none");
    let done = rig.pass().expect("a pass");
    assert_eq!((done.rows, done.reported), (vec![(other, 1), (newcomer, 4)], vec![cancelled]));
}

#[test]
fn an_empty_pass_takes_no_time_and_shows_no_pass() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 4, 1));
    rig.pass();
    let before = rig.now;
    let done = rig.pass().expect("a report");
    assert_eq!((done.reported, rig.now, done.metrics), (vec![0], before, None));
    assert!(rig.pass().is_none() && rig.settle().is_none());
}
