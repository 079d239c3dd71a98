//! Running out of blocks: victims, their return, and sequences that no pool can hold.

use super::test_kit::*;
use crate::config::{TieVictim, VllmConfig, VllmPolicy};
use crate::output::FinishReason;
use crate::scheduler::Command;
use crate::time::EngineTime;

/// Eight usable blocks: two sequences of 12 tokens fit and cannot both grow by two blocks.
fn tight() -> VllmConfig {
    small().with_num_gpu_blocks(9)
}

#[test]
fn cases_56_to_58_the_last_admitted_gives_way_and_comes_back_first() {
    let mut rig = Rig::new(tight());
    rig.submit(request(1, 12, 9));
    rig.submit(request(2, 12, 9));
    rig.pass();
    for kind in 3..5 {
        rig.submit(request(kind, 4, 1));
    }
    let passes = rig.run();
    let at = passes.iter().position(|done| done.preempted == [1]).expect("a preemption");
    assert_eq!(passes[at].rows, [(0, 1)], "case 58: nobody is admitted beside the victim, though blocks are free");
    let back = passes.iter().position(|done| done.hits.iter().any(|hit| hit.0 == 1)).expect("an admission");
    let admitted: Vec<_> = passes[at..=back].iter().flat_map(|done| &done.hits).map(|hit| hit.0).collect();
    assert_eq!(admitted[0], 1, "case 56: from the front of the queue");
    let before = passes[..at].iter().flat_map(|done| &done.sampled).filter(|&&sequence| sequence == 1).count() + 1;
    let (hit, row) = (passes[back].hits[0].1, passes[back].rows.iter().find(|row| row.0 == 1).expect("a row").1);
    assert_eq!(hit + row, 12 + before as u32, "case 57: prompt and outputs, less the hit");
    assert!(rig.outputs.values().all(|tokens| !tokens.is_empty()));
    assert_eq!(rig.outputs[&1].len(), 9, "no token twice");
}

#[test]
fn cases_58_to_60_by_priority_the_least_important_gives_way_with_what_it_was_given() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(10).with_max_num_seqs(3).with_policy(VllmPolicy::Priority));
    let least = rig.submit(request(1, 10, 9).with_priority(2));
    rig.pass();
    let most = rig.submit(request(2, 15, 9).with_priority(0));
    let middle = rig.submit(request(3, 1, 9).with_priority(1));
    let waiting = rig.submit(request(4, 4, 1).with_priority(1));
    rig.pass();
    rig.pass();
    let done = rig.pass().expect("a pass");
    assert_eq!((done.preempted, done.rows), (vec![least], vec![(most, 1), (middle, 1)]), "served, then taken back");
    assert_eq!(done.metrics.expect("metrics").num_queued_decode, 1);
    assert_eq!(rig.pass().expect("a pass").hits[0].0, waiting, "case 58: it had to wait for the next pass");
    rig.run();
    assert_eq!([rig.outputs[&least].len(), rig.outputs[&most].len()], [9, 9]);
}

#[test]
fn case_57_a_return_computes_prompt_and_outputs_again_but_for_the_hit() {
    // Both fill two blocks of four with their 32nd token. The first takes one of the second's, the tail.
    for (caching, hit) in [(false, 0), (true, 16)] {
        let mut rig = Rig::new(sixteen().with_num_gpu_blocks(5).with_enable_prefix_caching(caching));
        rig.submit(request(1, 31, 8));
        let victim = rig.submit(request(2, 31, 8));
        let passes: Vec<_> = (0..3).filter_map(|_| rig.pass()).collect();
        assert_eq!((&passes[2].preempted, &passes[2].rows), (&vec![victim], &vec![(0, 1)]));
        assert_eq!(
            (rig.outputs[&victim].len(), rig.view().waiting().next().map(|one| one.num_preemptions)),
            (2, Some(1))
        );
        let passes = rig.run();
        let back = passes.iter().find(|done| !done.hits.is_empty()).expect("an admission");
        assert_eq!((&back.hits, &back.rows), (&vec![(victim, hit)], &vec![(victim, 31 + 2 - hit)]));
    }
}

#[test]
fn case_59_what_a_served_victim_gives_back_goes_to_those_behind() {
    let options = small()
        .with_num_gpu_blocks(11)
        .with_max_num_batched_tokens(13)
        .with_long_prefill_token_threshold(8)
        .with_scheduler_reserve_full_isl(false)
        .with_policy(VllmPolicy::Priority);
    let mut rig = Rig::new(options);
    let victim = rig.submit(request(1, 30, 1).with_priority(5));
    assert_eq!(rig.pass().expect("a pass").rows, [(victim, 13)]);
    let (needy, last) = (rig.submit(request(2, 4, 9)), rig.submit(request(3, 20, 1)));
    assert_eq!(rig.pass().expect("a pass").rows, [(victim, 8), (needy, 4), (last, 1)]);
    // The victim's eight tokens took the last two blocks; without them 12 tokens are left, not 4.
    let done = rig.pass().expect("a pass");
    assert_eq!((done.preempted, done.rows), (vec![victim], vec![(needy, 1), (last, 8)]));
}

/// Three sequences of `(priority, arrival in ms)`, admitted in this order, on three blocks; the first needs a second
/// block first. Who is preempted for it, and who computes in that pass.
fn victim_among(sequences: [(i32, u64); 3]) -> (Vec<u64>, Vec<u64>) {
    let mut rig = Rig::new(small().with_num_gpu_blocks(4).with_policy(VllmPolicy::Priority));
    for ((priority, arrival), tokens) in sequences.into_iter().zip([2, 1, 1]) {
        rig.now = rig.now + PASS;
        let request = request(arrival as u32, tokens, 9).with_priority(priority);
        rig.submit(request.with_arrival(EngineTime::from_millis(arrival)));
        assert!(rig.pass().expect("a pass").preempted.is_empty());
    }
    let done = rig.pass().expect("a pass");
    (done.preempted, done.rows.iter().map(|row| row.0).collect())
}

#[test]
fn case_60_the_victim_is_the_least_important_that_arrived_last_wherever_it_stands() {
    assert_eq!(victim_among([(0, 1), (3, 2), (2, 3)]), (vec![1], vec![0, 2]));
    assert_eq!(victim_among([(0, 1), (2, 2), (2, 3)]), (vec![2], vec![0, 1]));
    assert_eq!(victim_among([(0, 1), (2, 3), (2, 2)]), (vec![1], vec![0, 2]));
}

#[test]
fn among_equals_the_first_or_the_last_in_the_list_gives_way() {
    for (tie_victim, victim) in [(TieVictim::First, 0), (TieVictim::Last, 1)] {
        let mut rig = Rig::new(tight().with_policy(VllmPolicy::Priority).with_tie_victim(tie_victim));
        rig.submit(request(1, 12, 9));
        rig.submit(request(2, 12, 9));
        let passes = rig.run();
        assert_eq!(passes.iter().find(|done| !done.preempted.is_empty()).expect("a preemption").preempted, [victim]);
    }
}

#[test]
fn two_equals_that_do_not_fit_together_both_end() {
    // With `TieVictim::First` they preempt each other for ever, as in the real engine.
    let options = tight()
        .with_policy(VllmPolicy::Priority)
        .with_scheduler_reserve_full_isl(false)
        .with_enable_prefix_caching(false)
        .with_long_prefill_token_threshold(4);
    let mut rig = Rig::new(options);
    rig.submit(request(1, 28, 4));
    rig.submit(request(2, 28, 4));
    rig.run();
    assert_eq!([rig.outputs[&0].len(), rig.outputs[&1].len()], [4, 4]);
}

#[test]
fn case_60_a_victim_that_asked_itself_leaves_the_pass_to_those_behind_it() {
    let mut rig = Rig::new(tight().with_policy(VllmPolicy::Priority));
    rig.submit(request(1, 13, 9).with_priority(1));
    rig.pass();
    rig.submit(request(2, 14, 9).with_priority(0));
    let passes = rig.run();
    let done = passes.iter().find(|done| !done.preempted.is_empty()).expect("a preemption");
    assert_eq!((&done.preempted, &done.rows), (&vec![0], &vec![(1, 1)]));
}

#[test]
fn case_65_two_that_do_not_fit_together_both_complete() {
    for policy in [VllmPolicy::Fcfs, VllmPolicy::Priority] {
        for caching in [true, false] {
            let mut rig = Rig::new(tight().with_policy(policy).with_enable_prefix_caching(caching));
            rig.submit(request(1, 13, 16));
            rig.submit(request(2, 13, 16));
            rig.run();
            assert_eq!([rig.outputs[&0].len(), rig.outputs[&1].len()], [16, 16]);
            assert_eq!(rig.view().pool().num_free_blocks(), 8, "case 8");
        }
    }
}

#[test]
fn cases_61_and_66_what_outgrows_the_pool_ends_and_blocks_nobody() {
    let mut rig = Rig::new(tight());
    let grows = rig.submit(request(1, 30, 99));
    let huge = rig.submit(request(2, 33, 1));
    let behind = rig.submit(request(3, 20, 1));
    let passes = rig.run();
    let finished: Vec<_> = passes.iter().flat_map(|done| done.finished.clone()).collect();
    let out_of_memory = FinishReason::OutOfMemory;
    assert_eq!(finished, [(huge, out_of_memory), (grows, out_of_memory), (behind, FinishReason::Length)]);
    assert_eq!(rig.outputs[&grows].len(), 3, "32 tokens fit; the 33rd would need the ninth block");
    assert_eq!(rig.view().pool().num_free_blocks(), 8);
    let metrics = rig.scheduler.settle(rig.now);
    assert!(metrics.is_none(), "everything has been shown");
}

#[test]
fn a_sequence_that_outgrows_the_pool_preempts_nobody() {
    let mut rig = Rig::new(tight().with_max_num_batched_tokens(40).with_scheduler_reserve_full_isl(false));
    let small_one = rig.submit(request(1, 4, 99));
    rig.pass();
    let huge = rig.submit(request(2, 33, 1));
    let done = rig.pass().expect("a pass");
    assert_eq!((done.finished, done.rows), (vec![(huge, FinishReason::OutOfMemory)], vec![(small_one, 1)]));
}

#[test]
fn without_the_switch_an_outgrown_sequence_waits_for_ever_as_in_the_real_engine() {
    let mut rig = Rig::new(tight().with_end_outgrown_requests(false));
    rig.submit(request(1, 30, 99));
    let passes = rig.run();
    assert_eq!(passes.last().expect("passes").preempted, [0]);
    assert!(rig.view().has_work() && rig.pass().is_none());
    assert_eq!(rig.view().waiting().count(), 1);
    rig.cancel(0);
    assert_eq!(rig.run().last().expect("a report").reported, [0]);
}

#[test]
fn a_reset_of_running_sequences_in_mid_pass_costs_only_that_pass() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 9, 4));
    rig.submit(request(2, 9, 4));
    rig.pass();
    let pass = rig.begin().expect("a pass");
    rig.command(Command::ResetPrefixCache { reset_running_requests: true });
    assert_eq!(rig.view().running().count(), 0);
    let done = rig.finish(pass);
    assert_eq!((done.rows.len(), done.sampled), (2, vec![]), "its tokens are dropped and made again");
    assert_eq!(rig.pass().expect("a pass").hits, [(0, 0), (1, 0)], "in their old order");
    rig.run();
    let (first, second) = (rig.outputs[&0].clone(), rig.outputs[&1].clone());
    let mut undisturbed = Rig::new(small());
    undisturbed.submit(request(1, 9, 4));
    undisturbed.submit(request(2, 9, 4));
    undisturbed.run();
    assert_eq!([&first, &second], [&undisturbed.outputs[&0], &undisturbed.outputs[&1]]);
}
