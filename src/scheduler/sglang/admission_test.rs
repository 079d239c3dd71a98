//! Who enters a prefill batch, in which order, and with how many tokens.

use super::test_kit::*;
use crate::config::{EngineConfig, EngineKind, SchedulingState, SglangConfig, SglangPolicy};
use crate::error::{CommandError, RequestError};
use crate::output::FinishReason;
use crate::request::{Request, SequenceId};
use crate::scheduler::{Command, Scheduler, Submission};
use crate::time::EngineTime;

/// Ids in the order of their first prefill.
fn admitted(passes: &[Done]) -> Vec<u64> {
    passes.iter().flat_map(|done| done.hits.iter().map(|hit| hit.0)).collect()
}

fn large() -> SglangConfig {
    SglangConfig::default()
}

/// One request at a time.
fn one_slot(policy: SglangPolicy) -> SglangConfig {
    small().with_max_running_requests(1).with_schedule_policy(policy)
}

#[test]
fn case_45_a_long_prompt_is_split_and_a_short_one_waits_for_room_in_a_chunk() {
    let mut rig = Rig::new(large());
    rig.submit(request(1, 20_000, 1));
    rig.submit(request(2, 100, 1));
    let batches: Vec<_> = rig.run().into_iter().map(|done| done.prefill).filter(|rows| !rows.is_empty()).collect();
    assert_eq!(batches, [vec![(0, 8192)], vec![(0, 8192)], vec![(0, 3616), (1, 100)]]);
    rig.assert_drained();
}

#[test]
fn the_rest_of_a_chunk_goes_to_the_next_prompt_which_may_be_split_in_turn() {
    let mut rig = Rig::new(small().with_chunked_prefill_size(Some(16)).with_max_total_tokens(256));
    rig.submit(request(1, 24, 1));
    rig.submit(request(2, 21, 1));
    let batches: Vec<_> = rig.run().into_iter().map(|done| done.prefill).filter(|rows| !rows.is_empty()).collect();
    assert_eq!(batches, [vec![(0, 16)], vec![(0, 8), (1, 8)], vec![(1, 13)]]);
}

#[test]
fn a_chunk_is_whole_pages_and_an_empty_one_is_left_for_the_next_batch() {
    let pages = small().with_page_size(4).with_max_total_tokens(256).with_chunked_prefill_size(Some(16));
    let mut rig = Rig::new(pages);
    rig.submit(request(1, 9, 1));
    rig.submit(request(2, 9, 1));
    rig.submit(request(3, 9, 1));
    let batches: Vec<_> = rig.run().into_iter().map(|done| done.prefill).filter(|rows| !rows.is_empty()).collect();
    // 9 tokens take 12 of 16; 4 are left.
    assert_eq!(batches, [vec![(0, 9), (1, 4)], vec![(1, 5), (2, 8)], vec![(2, 1)]]);
}

#[test]
fn case_46_decodes_stall_for_prefills_unless_they_are_mixed() {
    for mixed in [false, true] {
        let chunk = small().with_max_total_tokens(256).with_chunked_prefill_size(Some(16));
        let mut rig = Rig::new(chunk.with_enable_mixed_chunk(mixed));
        rig.submit(request(1, 5, 20));
        rig.pass();
        rig.submit(request(2, 30, 2));
        let passes: Vec<_> = (0..3).filter_map(|_| rig.pass()).collect();
        let rows: Vec<_> = passes.into_iter().map(|done| (done.prefill, done.decode)).collect();
        let expected = if mixed {
            [(vec![(1, 15)], vec![0]), (vec![(1, 15)], vec![0]), (vec![], vec![1, 0])]
        } else {
            [(vec![(1, 16)], vec![]), (vec![(1, 14)], vec![]), (vec![], vec![0, 1])]
        };
        assert_eq!(rows, expected);
        rig.run();
        rig.assert_drained();
    }
}

#[test]
fn with_chunks_off_the_first_prompt_of_a_batch_may_exceed_the_limit() {
    let mut rig = Rig::new(small().with_max_prefill_tokens(20).with_max_total_tokens(256));
    for (kind, tokens) in [(1, 30), (2, 5), (3, 12), (4, 7)] {
        rig.submit(request(kind, tokens, 1));
    }
    let batches: Vec<_> = rig.run().into_iter().map(|done| done.prefill).filter(|rows| !rows.is_empty()).collect();
    assert_eq!(batches, [vec![(0, 30)], vec![(1, 5), (2, 12)], vec![(3, 7)]]);
}

#[test]
fn a_batch_has_at_most_prefill_max_requests() {
    let mut rig = Rig::new(small().with_prefill_max_requests(Some(2)));
    for kind in 1..6 {
        rig.submit(request(kind, 3, 1));
    }
    assert_eq!(rig.run().iter().map(|done| done.prefill.len()).collect::<Vec<_>>(), [2, 2, 1, 0]);
}

#[test]
fn case_47_longest_prefix_first_while_128_wait_and_first_come_first_served_above() {
    for (others, expected) in [(127, 128), (128, 1)] {
        let mut rig = Rig::new(one_slot(SglangPolicy::Lpm).with_max_total_tokens(4096));
        rig.submit(request(1, 20, 1));
        rig.run();
        for kind in 0..others {
            rig.submit(request(2 + kind, 5, 1));
        }
        let hit = rig.submit(request(1, 20, 1));
        let first = rig.pass().expect("a pass").hits;
        assert_eq!(first[0].0, if expected == 1 { 1 } else { hit }, "{others} others");
    }
}

#[test]
fn what_an_earlier_one_is_about_to_store_is_waited_for() {
    let two_at_once = small().with_max_running_requests(2).with_max_total_tokens(512);
    let mut rig = Rig::new(two_at_once.with_schedule_policy(SglangPolicy::Lpm));
    // 0 and 1 share 40 tokens, 2 shares only 31 with 3, 4 is salted.
    rig.submit(Request::new([prompt(1, 40), prompt(2, 4)].concat(), 1));
    rig.submit(Request::new([prompt(1, 40), prompt(3, 4)].concat(), 1));
    rig.submit(Request::new([prompt(4, 31), prompt(5, 4)].concat(), 1));
    rig.submit(Request::new([prompt(4, 31), prompt(6, 4)].concat(), 1));
    let mut salted = Request::new([prompt(1, 40), prompt(2, 4)].concat(), 1);
    salted.cache_salt = Some("x".into());
    rig.submit(salted);
    let passes = rig.run();
    let batches: Vec<_> = passes.iter().map(|done| done.hits.clone()).filter(|hits| !hits.is_empty()).collect();
    assert_eq!(batches, [vec![(0, 0), (2, 0)], vec![(1, 40), (3, 31)], vec![(4, 0)]]);
}

#[test]
fn the_longest_output_goes_first() {
    let mut rig = Rig::new(one_slot(SglangPolicy::Lof));
    for outputs in [3, 9, 5, 9] {
        rig.submit(request(outputs, 4, outputs));
    }
    assert_eq!(admitted(&rig.run()), [1, 3, 2, 0]);
}

#[test]
fn the_branch_that_most_wait_for_goes_first() {
    let mut rig = Rig::new(one_slot(SglangPolicy::DfsWeight).with_max_total_tokens(256));
    for kind in [1, 2] {
        rig.submit(request(kind, 8, 1));
    }
    rig.run();
    for kind in [3, 1, 2, 2] {
        rig.submit(request(kind, 12, 1));
    }
    // When the first of two has stored its prompt, the other waits for a branch of its own.
    assert_eq!(admitted(&rig.run()), [4, 3, 5, 2]);
}

#[test]
fn a_random_order_repeats_with_the_seed() {
    let order = || {
        let mut rig = Rig::new(one_slot(SglangPolicy::Random));
        for kind in 0..20 {
            rig.submit(request(kind, 2, 1));
        }
        admitted(&rig.run())
    };
    let mut sorted = order();
    assert_eq!(sorted, order());
    assert!(!sorted.is_sorted());
    sorted.sort_unstable();
    assert_eq!(sorted, (0..20).collect::<Vec<_>>());
}

#[test]
fn larger_priorities_go_first_and_preempt_beyond_the_threshold() {
    for smaller_first in [false, true] {
        let by_priority = small().with_max_running_requests(2).with_enable_priority_scheduling(true);
        let mut rig = Rig::new(by_priority.with_schedule_low_priority_values_first(smaller_first));
        let sign = if smaller_first { -1 } else { 1 };
        let submit = |rig: &mut Rig, kind, priority| rig.submit(request(kind, 5, 8).with_priority(sign * priority));
        submit(&mut rig, 1, 1);
        submit(&mut rig, 2, 2);
        assert_eq!(rig.pass().expect("a pass").prefill, [(1, 5), (0, 5)]);
        submit(&mut rig, 3, 11);
        assert_eq!(rig.pass().expect("a pass").decode, [1, 0], "10 above 1 is not beyond the threshold");
        submit(&mut rig, 4, 12);
        let done = rig.pass().expect("a pass");
        assert_eq!((done.preempted, done.prefill), (vec![0], vec![(3, 5)]), "the least important gives way");
        rig.run();
        assert_eq!(rig.outputs[&0].len(), 8);
        rig.assert_drained();
    }
}

#[test]
fn what_a_preempted_one_was_expected_to_take_is_free_for_the_other() {
    let by_priority = one_slot(SglangPolicy::Fcfs).with_enable_priority_scheduling(true);
    let mut rig = Rig::new(by_priority.with_max_total_tokens(40));
    rig.submit(request(1, 5, 20));
    rig.pass();
    // 27 tokens of 40 are enough, of 40 - 0.7 * 19 they are not.
    let urgent = rig.submit(request(2, 10, 16).with_priority(99));
    assert_eq!(rig.pass().expect("a pass").prefill, [(urgent, 10)]);
}

#[test]
fn prefixes_of_those_who_wait_are_kept_young_at_every_32nd_attempt() {
    for (attempts_before, hit) in [(31, 0), (32, 10), (33, 0)] {
        let mut rig = Rig::new(one_slot(SglangPolicy::Fcfs));
        rig.submit(request(1, 10, 1));
        rig.submit(request(2, 10, 1));
        (2..attempts_before).for_each(|kind| _ = rig.submit(request(1 + kind, 1, 1)));
        rig.run();
        // The first one needs most of the pool; the second waits for the slot, and its prefix is the oldest.
        rig.submit(request(90, 10, 40));
        let waits = rig.submit(Request::new([prompt(1, 10), prompt(91, 2)].concat(), 1));
        let hits: Vec<_> = rig.run().iter().flat_map(|done| done.hits.clone()).collect();
        assert_eq!(hits[1], (waits, hit), "after {attempts_before} attempts");
    }
}

#[test]
fn case_48_a_very_long_output_is_reckoned_with_as_4096_tokens() {
    let mut rig = Rig::new(small().with_max_total_tokens(8300));
    for kind in 1..4 {
        rig.submit(request(kind, 10, 100_000));
    }
    assert_eq!(rig.pass().expect("a pass").prefill, [(0, 10), (1, 10)]);
    assert!(rig.pool().batch_is_full);
}

#[test]
fn case_49_the_ratio_falls_and_is_reset_when_the_engine_runs_dry() {
    let mut rig = Rig::new(small().with_max_total_tokens(2048));
    rig.submit(request(1, 4, 601));
    (0..601).for_each(|_| drop(rig.pass()));
    assert!((rig.pool().new_token_ratio - 0.098).abs() < 1e-12);
    // One that comes with the boundary keeps the engine from idling, one that comes later does not.
    rig.submit(request(2, 4, 1));
    rig.pass();
    assert!((rig.pool().new_token_ratio - 0.098).abs() < 1e-12);
    let later = rig.now + std::time::Duration::from_millis(5);
    rig.submit(request(3, 4, 1).with_arrival(later));
    rig.now = later;
    rig.pass();
    assert_eq!(rig.pool().new_token_ratio, 0.7);
}

#[test]
fn admission_needs_strictly_more_than_prompt_output_and_a_page() {
    for (pool, admitted) in [(30, 1), (31, 2)] {
        let mut rig = Rig::new(small().with_max_total_tokens(pool));
        // Each needs 10 + 4 + 1, and takes as much.
        rig.submit(request(1, 10, 4));
        rig.submit(request(2, 10, 4));
        assert_eq!(rig.pass().expect("a pass").prefill.len(), admitted);
        assert_eq!(rig.pool().batch_is_full, admitted == 1);
        rig.run();
        rig.assert_drained();
    }
}

#[test]
fn a_closed_batch_opens_when_somebody_leaves() {
    let mut rig = Rig::new(small().with_max_running_requests(2));
    for outputs in [4, 8, 2] {
        rig.submit(request(outputs, 5, outputs));
    }
    rig.pass();
    for _ in 0..3 {
        assert!(rig.pool().batch_is_full);
        assert_eq!(rig.pass().expect("a pass").prefill, []);
    }
    assert_eq!(rig.pass().expect("the first has left").prefill, [(2, 5)]);
}

#[test]
fn case_54_equal_arrivals_keep_the_order_of_submission() {
    let mut rig = Rig::new(one_slot(SglangPolicy::Fcfs));
    for kind in 0..5 {
        rig.submit(request(kind, 3, 2));
    }
    assert_eq!(admitted(&rig.run()), [0, 1, 2, 3, 4]);
}

#[test]
fn case_55_no_prompt_and_no_output_are_refused() {
    let config = EngineConfig::new(EngineKind::Sglang(small()));
    let mut scheduler = Scheduler::new(&config).expect("valid");
    for (request, error) in
        [(Request::new(vec![], 1), RequestError::EmptyPrompt), (Request::new(vec![1], 0), RequestError::ZeroOutput)]
    {
        let command = Command::Submit(Submission { sequence: SequenceId(0), tie_key: 0, request });
        assert_eq!(scheduler.apply(command, EngineTime::ZERO), Err(CommandError::Request(error)));
    }
}

#[test]
fn case_66_what_the_pool_cannot_hold_ends_and_blocks_nobody() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 5, 3));
    rig.pass();
    let too_large = rig.submit(request(2, 64, 1));
    let behind = rig.submit(request(3, 5, 1));
    let passes = rig.run();
    let finished: Vec<_> = passes.iter().flat_map(|done| done.finished.clone()).collect();
    assert!(finished.contains(&(too_large, FinishReason::OutOfMemory)));
    assert!(finished.contains(&(behind, FinishReason::Length)));
    rig.assert_drained();
}

/// Among requests that ignore the end token, where nothing is cached, admission looks at everybody's end.
#[test]
fn case_66_what_has_ended_for_want_of_room_is_not_reckoned_with() {
    let mut rig = Rig::new(small().with_disable_radix_cache(true));
    let never_ends = |kind, tokens, outputs| Request { ignore_eos: true, ..request(kind, tokens, outputs) };
    let too_large = rig.submit(never_ends(1, 62, 1));
    let behind = rig.submit(never_ends(2, 5, 40));
    let finished: Vec<_> = rig.run().iter().flat_map(|done| done.finished.clone()).collect();
    assert_eq!(finished, [(too_large, FinishReason::OutOfMemory), (behind, FinishReason::Length)]);
    rig.assert_drained();
}

#[test]
fn case_66_validation_refuses_exactly_what_could_never_be_admitted() {
    for page_size in [1, 4, 16] {
        let sglang = SglangConfig::default().with_page_size(page_size).with_max_total_tokens(64);
        let config = EngineConfig::new(EngineKind::Sglang(sglang.clone()));
        for tokens in 1..=64 {
            let mut rig = Rig::new(sglang.clone().with_chunked_prefill_size(None));
            rig.submit(request(1, tokens, 1000));
            let is_ended = rig.run().iter().any(|done| done.finished == [(0, FinishReason::OutOfMemory)]);
            let is_refused = request(1, tokens, 1000).validate(&config).is_err();
            assert_eq!(is_ended, is_refused, "{tokens} tokens, pages of {page_size}");
            rig.assert_drained();
        }
    }
}

#[test]
fn outputs_are_cut_to_the_context_and_to_the_empty_pool() {
    // 36 - 2 - 10 by the context, 40 - 16 - 8 - 1 by a pool of pages of 8.
    for (page_size, context, expected) in [(1, 36, 24), (8, 1000, 15), (1, 1000, 28)] {
        let sglang = small().with_page_size(page_size).with_max_total_tokens(40);
        let config = EngineConfig::new(EngineKind::Sglang(sglang)).with_max_model_len(context);
        let mut scheduler = Scheduler::new(&config).expect("valid");
        let submission = Submission { sequence: SequenceId(0), tie_key: 0, request: request(1, 10, 100) };
        scheduler.apply(Command::Submit(submission), EngineTime::ZERO).expect("taken");
        let limit = scheduler.view().sequence(SequenceId(0)).map(|sequence| sequence.max_output_tokens);
        assert_eq!(limit, Some(expected));
    }
}

#[test]
fn case_67_one_token_needs_no_decode() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 6, 1));
    let passes = rig.run();
    assert_eq!(
        (passes[0].prefill.clone(), passes[0].finished.clone()),
        (vec![(0, 6)], vec![(0, FinishReason::Length)])
    );
    assert!(passes.iter().all(|done| done.decode.is_empty()));
}

#[test]
fn stop_tokens_stop_unless_the_end_is_ignored() {
    for (ignore_eos, reason, count) in
        [(false, FinishReason::Stop { stop_token: Some(7) }, 2), (true, FinishReason::Length, 3)]
    {
        let mut rig = Rig::new(small());
        let mut request = request(1, 4, 3).with_output_tokens(vec![5, 7, 9]);
        (request.stop_token_ids, request.ignore_eos) = (vec![7], ignore_eos);
        rig.submit(request);
        let passes = rig.run();
        assert_eq!(passes.iter().flat_map(|done| done.finished.clone()).collect::<Vec<_>>(), [(0, reason)]);
        assert_eq!(rig.outputs[&0].len(), count);
    }
}

#[test]
fn outputs_of_known_length_are_foreseen_where_nothing_is_cached() {
    let known = |kind, tokens, outputs| {
        let mut request = request(kind, tokens, outputs);
        request.ignore_eos = true;
        request
    };
    let mut rig = Rig::new(small().with_disable_radix_cache(true));
    // The second has gone when the first has grown; the third would grow with it.
    rig.submit(known(1, 10, 25));
    rig.submit(known(2, 20, 4));
    rig.submit(known(3, 10, 25));
    assert_eq!(rig.pass().expect("a pass").prefill, [(0, 10), (1, 20)]);
    let passes = rig.run();
    assert!(passes.iter().all(|done| done.preempted.is_empty()), "nobody had to be retracted");
    rig.assert_drained();
}

#[test]
fn scheduling_states_hold_admissions_and_passes() {
    let mut rig = Rig::new(small().with_chunked_prefill_size(Some(4)));
    rig.submit(request(1, 10, 2));
    rig.pass();
    rig.submit(request(2, 3, 1));
    rig.command(Command::SetScheduling(SchedulingState::Stopped));
    assert!(rig.pass().is_none() && !rig.view().has_work());
    rig.command(Command::SetScheduling(SchedulingState::NoNewAdmissions));
    let passes = rig.run();
    assert_eq!(passes.iter().flat_map(|done| done.prefill.clone()).collect::<Vec<_>>(), [(0, 4), (0, 2)]);
    assert!(!rig.view().has_work());
    rig.command(Command::SetScheduling(SchedulingState::Running));
    rig.run();
    rig.assert_drained();
}

#[test]
fn r43_arrivals_are_waited_for_and_a_boundary_comes_before_its_ties() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 4, 3));
    let pass = rig.begin().expect("a pass");
    let end = pass.ends_at();
    rig.submit(request(2, 4, 1).with_arrival(end));
    rig.submit(request(3, 4, 1).with_arrival(EngineTime::from_nanos(end.as_nanos() - 1)));
    rig.finish(pass);
    assert_eq!(rig.pass().expect("a pass").prefill, [(2, 4)]);
    assert_eq!(rig.pass().expect("a pass").prefill, [(1, 4)]);
    rig.run();
    rig.assert_drained();
}
