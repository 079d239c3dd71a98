//! What happens when the pool runs out, and when requests are cancelled or not read.

use super::test_kit::*;
use crate::config::{SchedulingState, SglangConfig};
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::{Cancelled, Command, SequenceStatus};

/// Admission hopes for short outputs, so that the pool runs out.
fn hopeful() -> SglangConfig {
    small().with_schedule_conservativeness(0.01)
}

#[test]
fn case_62_and_64_the_fewest_outputs_are_retracted_among_equals_the_longest_prompt() {
    let mut rig = Rig::new(hopeful());
    rig.submit(request(1, 8, 30));
    rig.pass();
    rig.pass();
    // Two with equal outputs, one prompt longer.
    rig.submit(request(2, 9, 14));
    rig.submit(request(3, 8, 14));
    rig.pass();
    rig.submit(request(4, 4, 99));
    let done = loop {
        let done = rig.pass().expect("a pass");
        if !done.preempted.is_empty() {
            break done;
        }
    };
    assert_eq!(done.preempted[0], 1, "as few outputs as sequence 2, a longer prompt");
    let waiting: Vec<_> = rig.view().waiting().map(|sequence| (sequence.sequence.0, sequence.status)).collect();
    assert_eq!(waiting[0], (3, SequenceStatus::Waiting), "behind whom it queues");
    assert_eq!(waiting[1], (1, SequenceStatus::Preempted));
    assert!(rig.pool().new_token_ratio > 0.1, "admission has become careful");
    rig.run();
    assert_eq!([0, 1, 2].map(|sequence| rig.outputs[&sequence].len()), [30, 14, 14], "nothing is lost or repeated");
    rig.assert_drained();
}

#[test]
fn a_retracted_sequence_computes_its_outputs_again_unless_they_are_cached() {
    let mut rig = Rig::new(hopeful().with_max_total_tokens(48));
    rig.submit(request(1, 8, 24));
    rig.pass();
    rig.submit(request(2, 8, 24));
    let passes = rig.run();
    let again = passes.iter().flat_map(|done| done.hits.clone()).filter(|hit| hit.0 == 1).collect::<Vec<_>>();
    assert_eq!(again.len(), 2, "first admission and the one after its retraction");
    assert_eq!(rig.outputs[&1].len(), 24);
    rig.assert_drained();
}

#[test]
fn case_63_the_last_one_that_cannot_fit_ends_with_an_error() {
    // The cut of the output keeps a sequence from outgrowing the pool alone. A throttled one that holds its
    // pages brings it about, but then that one goes first.
    let mut rig = Rig::new(hopeful().with_max_total_tokens(28));
    rig.submit(request(1, 4, 14));
    rig.submit(request(2, 4, 14));
    (0..10).for_each(|_| drop(rig.pass()));
    rig.throttle(0, true);
    let passes = rig.run();
    let preempted: Vec<_> = passes.iter().flat_map(|done| done.preempted.clone()).collect();
    assert_eq!(preempted, [0], "not the only one that can decode");
    assert_eq!(rig.outputs[&1].len(), 14);
    rig.throttle(0, false);
    rig.run();
    assert_eq!(rig.outputs[&0].len(), 14);
    rig.assert_drained();
}

#[test]
fn case_63_beside_a_split_prompt_that_stands_still_too() {
    let mut rig = Rig::new(hopeful().with_max_total_tokens(32).with_chunked_prefill_size(Some(8)));
    rig.submit(request(1, 4, 14));
    rig.pass();
    let split = rig.submit(request(2, 20, 1));
    rig.pass();
    rig.pass();
    rig.throttle(split, true);
    let finished: Vec<_> = rig.run().iter().flat_map(|done| done.finished.clone()).collect();
    assert_eq!(finished, [(0, FinishReason::OutOfMemory)]);
    assert_eq!(rig.outputs[&0].len(), 13, "all that the pool could give");
    rig.throttle(split, false);
    rig.run();
    assert_eq!(rig.outputs[&split].len(), 1);
    rig.assert_drained();
}

#[test]
fn case_65_two_that_do_not_fit_together_both_end() {
    for page_size in [1, 4, 16] {
        let mut rig = Rig::new(hopeful().with_page_size(page_size).with_max_total_tokens(96));
        rig.submit(request(1, 20, 40));
        rig.submit(request(2, 20, 40));
        rig.run();
        assert_eq!([rig.outputs[&0].len(), rig.outputs[&1].len()], [40, 40]);
        rig.assert_drained();
    }
}

#[test]
fn case_72_a_cancel_frees_at_once_in_every_state() {
    let mut rig = Rig::new(hopeful().with_chunked_prefill_size(Some(8)));
    let free = |rig: &Rig| rig.view().pool().num_free_blocks();
    // Still to arrive, and waiting.
    let later = rig.now + std::time::Duration::from_secs(9);
    let arriving = rig.submit(request(1, 4, 1).with_arrival(later));
    rig.cancel(arriving);
    assert_eq!(rig.scheduler.next_deadline(), None);
    rig.command(Command::SetScheduling(SchedulingState::NoNewAdmissions));
    let waiting = rig.submit(request(1, 4, 1));
    rig.run();
    rig.cancel(waiting);
    rig.command(Command::SetScheduling(SchedulingState::Running));
    // In mid prefill, between passes and in one; decoding likewise.
    for passes in 1..6 {
        let sequence = rig.submit(request(passes, 20, 9));
        for _ in 1..passes {
            rig.pass();
        }
        if passes.is_multiple_of(2) {
            rig.cancel(sequence);
        } else {
            let pass = rig.begin().expect("a pass");
            rig.cancel(sequence);
            assert_eq!(free(&rig), 64);
            assert!(rig.finish(pass).sampled.is_empty());
        }
        assert_eq!((free(&rig), rig.pool().chunked), (64, None));
        rig.run();
    }
    // Retracted, and beside the queue.
    for throttled in [false, true] {
        let stays = rig.submit(request(7, 10, 30));
        rig.pass();
        rig.submit(request(8, 10, 30));
        let victim = loop {
            if let Some(&victim) = rig.pass().expect("a pass").preempted.first() {
                break victim;
            }
        };
        rig.throttle(victim, throttled);
        rig.cancel(victim);
        rig.cancel(if victim == stays { stays + 1 } else { stays });
        assert_eq!(free(&rig), 64);
        rig.run();
    }
    rig.assert_drained();
}

#[test]
fn case_73_a_cancelled_sequence_that_runs_takes_part_in_one_more_pass() {
    let once_more = small().with_abort_after_next_forward(true).with_chunked_prefill_size(Some(8));
    let mut rig = Rig::new(once_more);
    let ending = rig.submit(request(1, 4, 9));
    let other = rig.submit(request(2, 4, 9));
    rig.pass();
    let cancel = |rig: &mut Rig, sequence| rig.scheduler.cancel(SequenceId(sequence), rig.now);
    rig.throttle(ending, true);
    assert_eq!(cancel(&mut rig, ending), Cancelled::Ending);
    assert_eq!(cancel(&mut rig, ending), Cancelled::Ending);
    let done = rig.pass().expect("a pass");
    assert_eq!((done.sampled, done.finished), (vec![ending, other], vec![(ending, FinishReason::Cancelled)]));
    assert_eq!(cancel(&mut rig, ending), Cancelled::Unknown);
    // One that waits leaves at once, one that is split when the next pass is planned.
    let split = rig.submit(request(3, 20, 9));
    rig.pass();
    let waits = rig.submit(request(4, 20, 9));
    assert_eq!(cancel(&mut rig, split), Cancelled::Ending);
    rig.cancel(waits);
    let done = rig.pass().expect("a pass");
    assert_eq!((done.decode, done.finished), (vec![other], vec![(split, FinishReason::Cancelled)]));
    // Where no pass is planned it ends now.
    assert_eq!(cancel(&mut rig, other), Cancelled::Ending);
    rig.command(Command::SetScheduling(SchedulingState::Stopped));
    let settled = rig.settle().expect("its end is shown");
    assert_eq!(settled.finished, [(other, FinishReason::Cancelled)]);
    rig.command(Command::SetScheduling(SchedulingState::Running));
    let last = rig.submit(request(5, 4, 9));
    rig.pass();
    rig.command(Command::SetScheduling(SchedulingState::Stopped));
    rig.cancel(last);
    rig.command(Command::SetScheduling(SchedulingState::Running));
    rig.run();
    rig.assert_drained();
}

#[test]
fn a_cancelled_sequence_that_is_retracted_ends_instead() {
    let mut rig = Rig::new(hopeful().with_abort_after_next_forward(true).with_max_total_tokens(32));
    rig.submit(request(1, 9, 12));
    rig.pass();
    rig.submit(request(2, 9, 12));
    while rig.pool().available_tokens > 1 {
        rig.pass();
    }
    assert_eq!(rig.scheduler.cancel(SequenceId(1), rig.now), Cancelled::Ending);
    let done = rig.pass().expect("a pass");
    assert_eq!((done.preempted, done.finished), (vec![], vec![(1, FinishReason::Cancelled)]));
    rig.run();
    rig.assert_drained();
}

#[test]
fn r21_a_throttled_sequence_keeps_its_pages_and_is_left_out() {
    let mut rig = Rig::new(small().with_chunked_prefill_size(Some(8)));
    rig.submit(request(1, 5, 6));
    rig.submit(request(2, 3, 6));
    rig.pass();
    rig.throttle(0, true);
    assert_eq!(rig.pass().expect("a pass").decode, [1]);
    rig.throttle(1, true);
    assert!(rig.pass().is_none() && !rig.view().has_work());
    assert_eq!(rig.view().running().map(|sequence| sequence.block_ids.len()).collect::<Vec<_>>(), [5, 4]);
    // A split prompt stays where it is; whole ones pass it by, another one that needs to be split waits.
    let split = rig.submit(request(3, 20, 2));
    rig.pass();
    rig.throttle(split, true);
    let whole = rig.submit(request(4, 5, 1));
    rig.submit(request(5, 12, 1));
    assert_eq!(rig.pass().expect("a pass").prefill, [(whole, 5)]);
    assert!(rig.run().iter().all(|done| done.prefill.is_empty()));
    for sequence in [0, 1, split] {
        rig.throttle(sequence, false);
    }
    rig.run();
    rig.assert_drained();
}

#[test]
fn r21_a_split_prompt_that_stands_still_keeps_its_slot() {
    let mut rig = Rig::new(small().with_chunked_prefill_size(Some(8)).with_max_running_requests(1));
    let split = rig.submit(request(1, 20, 2));
    rig.pass();
    rig.throttle(split, true);
    rig.submit(request(2, 5, 1));
    assert!(rig.pass().is_none());
    rig.throttle(split, false);
    rig.run();
    rig.assert_drained();
}

#[test]
fn r25_a_slot_used_again_in_mid_pass_is_another_sequence() {
    let mut rig = Rig::new(small());
    let cancelled = rig.submit(request(1, 4, 9));
    let other = rig.submit(request(2, 4, 9));
    let pass = rig.begin().expect("a pass");
    rig.cancel(cancelled);
    let newcomer = rig.submit(request(3, 4, 1));
    assert_eq!(rig.finish(pass).sampled, [other]);
    assert_eq!(rig.pass().expect("a pass").prefill, [(newcomer, 4)]);
    rig.run();
    rig.assert_drained();
}
