//! Budget, slots, memory tests of admission, and how sequences end.

use super::test_kit::*;
use crate::config::{EngineConfig, EngineKind, SchedulingState, Speedup};
use crate::error::{CommandError, RequestError};
use crate::output::{FinishReason, TokenGenerator};
use crate::request::{Request, SequenceId};
use crate::scheduler::{Command, Scheduler, Submission};
use crate::time::EngineTime;

const STOP: FinishReason = FinishReason::Stop { stop_token: None };

fn rows(rig: &mut Rig, passes: usize) -> Vec<Vec<(u64, u32)>> {
    (0..passes).map(|_| rig.pass().expect("a pass").rows).collect()
}

#[test]
fn case_35_the_budget_cuts_the_last_admission() {
    let mut rig = Rig::new(sixteen().with_num_gpu_blocks(1000));
    rig.submit(request(1, 1500, 9));
    rig.submit(request(2, 1500, 9));
    assert_eq!(rows(&mut rig, 2), [[(0, 1500), (1, 548)], [(0, 1), (1, 952)]]);
}

#[test]
fn case_36_without_chunks_a_prompt_waits_for_budget_and_is_not_overtaken() {
    let mut rig = Rig::new(small().with_enable_chunked_prefill(false));
    for (kind, tokens) in [(1, 40), (2, 30), (3, 5)] {
        rig.submit(request(kind, tokens, 9));
    }
    assert_eq!(rows(&mut rig, 2), [vec![(0, 40)], vec![(0, 1), (1, 30), (2, 5)]]);
}

#[test]
fn cases_37_and_41_decodes_can_use_up_the_budget_or_the_slots() {
    for options in [small().with_max_num_batched_tokens(2), small().with_max_num_seqs(2)] {
        let mut rig = Rig::new(options);
        for kind in 1..3 {
            rig.submit(request(kind, 1, 9));
        }
        rig.pass();
        rig.submit(request(3, 1, 9));
        assert_eq!(rows(&mut rig, 1), [[(0, 1), (1, 1)]]);
        rig.cancel(0);
        assert_eq!(rows(&mut rig, 1), [[(1, 1), (2, 1)]]);
    }
}

#[test]
fn case_38_the_long_prefill_threshold_needs_company() {
    let options = || sixteen().with_num_gpu_blocks(1000).with_long_prefill_token_threshold(512);
    let mut rig = Rig::new(options());
    rig.submit(request(1, 1500, 9));
    assert_eq!(rows(&mut rig, 1), [[(0, 1500)]]);
    rig.submit(request(2, 1500, 9));
    rig.submit(request(3, 600, 9));
    assert_eq!(rows(&mut rig, 2), [[(0, 1), (1, 512), (2, 512)], [(0, 1), (1, 512), (2, 88)]]);

    let mut adaptive = Rig::new(options().with_long_prefill_token_threshold_adaptive(true));
    adaptive.submit(request(1, 1500, 9));
    adaptive.submit(request(2, 1500, 9));
    assert_eq!(rows(&mut adaptive, 1), [[(0, 1024), (1, 1024)]]);
}

#[test]
fn case_39_only_the_last_chunk_gives_a_token() {
    let mut rig = Rig::new(small().with_max_num_batched_tokens(16));
    rig.submit(request(1, 50, 2));
    let passes: Vec<_> = rig.run().iter().map(|done| (done.rows.clone(), done.sampled.len())).collect();
    let expected = [(16, 0), (16, 0), (16, 0), (2, 1), (1, 1)].map(|(tokens, sampled)| (vec![(0, tokens)], sampled));
    assert_eq!(passes[..5], expected);
    assert_eq!(passes[5..], [(vec![], 0)], "an empty pass reports the end");
}

/// A running sequence always has a token to compute here. It is passed over while it is throttled, and between the
/// beats of the prefill interval.
#[test]
fn case_40_a_running_sequence_that_is_passed_over_does_not_stop_those_behind() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 5, 9));
    rig.submit(request(2, 5, 9));
    rig.pass();
    rig.throttle(0, true);
    assert_eq!(rows(&mut rig, 1), [[(1, 1)]]);

    let options = small().with_prefill_schedule_interval(3).with_long_prefill_token_threshold(4);
    let mut rig = Rig::new(options);
    rig.submit(request(1, 40, 9));
    rig.submit(request(2, 3, 9));
    assert_eq!(rows(&mut rig, 4), [vec![(0, 4), (1, 3)], vec![(1, 1)], vec![(1, 1)], vec![(0, 4), (1, 1)]]);
}

#[test]
fn case_42_max_model_len_ends_by_length_and_leaves_room_for_one_token() {
    let mut rig = Rig::with_max_model_len(small(), 20);
    for (tokens, outputs) in [(19, 1), (15, 5)] {
        let sequence = rig.submit(request(1, tokens, 99));
        let finished: Vec<_> = rig.run().into_iter().flat_map(|done| done.finished).collect();
        assert_eq!(finished, [(sequence, FinishReason::Length)]);
        assert_eq!(rig.outputs[&sequence].len(), outputs);
    }
}

#[test]
fn case_43_admission_wants_room_for_the_whole_prompt_unless_told_otherwise() {
    for (reserve, admitted) in [(true, 1), (false, 2)] {
        let mut rig = Rig::new(small().with_max_num_batched_tokens(12).with_scheduler_reserve_full_isl(reserve));
        rig.submit(request(1, 100, 1));
        for _ in 0..8 {
            rig.pass();
        }
        // 24 blocks are held, one chunk of 4 and one of 8 tokens come next; 8 blocks are free.
        rig.submit(request(2, 60, 1));
        assert_eq!(rig.pass().expect("a pass").rows.len(), admitted);
    }
}

#[test]
fn case_44_the_watermark_is_kept_only_while_something_runs() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(100).with_watermark(0.1).with_max_num_batched_tokens(1024));
    rig.submit(request(1, 4 * 95, 1));
    assert_eq!(rig.run()[0].rows.len(), 1);
    rig.submit(request(2, 4 * 80, 3));
    rig.submit(request(3, 4 * 10, 1));
    rig.submit(request(4, 4 * 9, 1));
    assert_eq!(rig.pass().expect("a pass").rows, [(1, 320)], "19 are free, 10 + 10 would be needed");
    rig.run();
    assert_eq!(rig.outputs.len(), 4);
}

#[test]
fn case_44_beside_one_of_99_blocks_a_tenth_of_the_raw_100_stays_free() {
    for (blocks, admitted) in [(88, true), (89, false)] {
        let mut rig = Rig::new(small().with_num_gpu_blocks(100).with_watermark(0.1).with_max_num_batched_tokens(1024));
        rig.submit(request(1, 1, 3));
        rig.pass();
        rig.submit(request(2, 4 * blocks, 1));
        assert_eq!(rig.pass().expect("a pass").rows.len() == 2, admitted, "{blocks} of 98 free ones");
    }
}

#[test]
fn case_54_first_come_first_served() {
    let mut rig = Rig::new(small().with_max_num_seqs(1));
    for kind in 0..5 {
        rig.submit(request(kind, 4, 1));
    }
    let order: Vec<_> = rig.run().into_iter().flat_map(|done| done.sampled).collect();
    assert_eq!(order, [0, 1, 2, 3, 4]);
}

#[test]
fn case_55_and_r42_what_cannot_be_served_is_refused_and_changes_nothing() {
    let config = EngineConfig::new(EngineKind::Vllm(small())).with_max_model_len(20).with_vocab_size(2);
    let mut scheduler = Scheduler::new(&config).expect("a usable configuration");
    let mut submit = |sequence: u64, request: Request| {
        let submission = Submission { sequence: SequenceId(sequence), tie_key: 0, request };
        scheduler.apply(Command::Submit(submission), EngineTime::ZERO)
    };
    let mut cornered = request(1, 4, 1);
    (cornered.stop_token_ids, cornered.eos_token_id) = (vec![0, 900], Some(1));
    for (request, error) in [
        (request(1, 0, 1), RequestError::EmptyPrompt),
        (request(1, 4, 0), RequestError::ZeroOutput),
        (request(1, 4, 9).with_output_tokens(vec![]), RequestError::ZeroOutput),
        (request(1, 20, 1), RequestError::PromptTooLong { prompt_tokens: 20, max_model_len: 20 }),
        (cornered.clone(), RequestError::NoTokenLeft { vocab_size: 2 }),
    ] {
        assert_eq!(submit(5, request), Err(CommandError::Request(error)));
    }
    assert!(submit(5, cornered.with_output_tokens(vec![3])).is_ok(), "a plan needs no vocabulary");
    assert_eq!(submit(5, request(1, 4, 1)), Err(CommandError::DuplicateSequence(SequenceId(5))));
    let (sequence, last) = (SequenceId(4), SequenceId(5));
    let throttle = Command::Throttle { sequence, throttled: true };
    assert_eq!(scheduler.apply(throttle, EngineTime::ZERO), Err(CommandError::UnknownSequence(sequence)));
    assert_eq!((scheduler.view().sequence(last).is_some(), scheduler.view().sequence(sequence)), (true, None));
}

#[test]
fn cases_67_to_70_and_78_ends_are_checked_in_order() {
    let planned = |tokens: Vec<u32>| request(1, 4, 99).with_output_tokens(tokens);
    let with_ends = |mut request: Request| {
        (request.eos_token_id, request.stop_token_ids, request.min_output_tokens) = (Some(2), vec![2, 3], 3);
        request
    };
    let ignoring = |mut request: Request| {
        request.ignore_eos = true;
        request.stop_token_ids = vec![3];
        request
    };
    let stop = |token| FinishReason::Stop { stop_token: Some(token) };
    for (request, outputs, reason) in [
        (request(1, 4, 1), 1, FinishReason::Length),
        (with_ends(planned(vec![2, 9])), 1, STOP),
        (ignoring(with_ends(planned(vec![2, 9]))), 2, FinishReason::Length),
        (with_ends(planned(vec![9, 2])), 2, STOP),
        (with_ends(planned(vec![9, 3, 9])), 2, stop(3)),
        (with_ends(planned(vec![9, 9, 3])), 3, stop(3)),
    ] {
        let mut rig = Rig::new(small());
        rig.submit(request);
        let finished: Vec<_> = rig.run().into_iter().flat_map(|done| done.finished).collect();
        assert_eq!((finished, rig.outputs[&0].len()), (vec![(0, reason)], outputs));
    }
}

#[test]
fn generated_tokens_are_those_of_the_documented_formula_also_after_a_preemption() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(9));
    let first = rig.submit(request(1, 12, 12));
    let second = rig.submit(request(2, 12, 12));
    assert!(rig.run().iter().any(|done| done.preempted == [second]));
    for sequence in [first, second] {
        let generator = TokenGenerator::new(0, u128::from(sequence), 128_256);
        let expected: Vec<_> = (0..12).map(|position| generator.token(position, &[])).collect();
        assert_eq!(rig.outputs[&sequence], expected);
    }
}

#[test]
fn between_the_beats_of_the_prefill_interval_only_decodes_run() {
    let mut rig = Rig::new(small().with_prefill_schedule_interval(3));
    rig.submit(request(1, 5, 20));
    rig.pass();
    rig.submit(request(2, 5, 20));
    assert_eq!(rows(&mut rig, 3), [vec![(0, 1)], vec![(0, 1)], vec![(0, 1), (1, 5)]]);
    // With every decode throttled nothing would ever run if prefill still waited for a beat.
    rig.throttle(0, true);
    rig.throttle(1, true);
    rig.submit(request(3, 5, 20));
    assert_eq!(rows(&mut rig, 1), [[(2, 5)]]);
}

#[test]
fn scheduling_states_hold_back_passes_or_admissions() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 4, 9));
    rig.pass();
    rig.submit(request(2, 4, 9));
    rig.command(Command::SetScheduling(SchedulingState::Stopped));
    assert!(!rig.view().has_work() && rig.pass().is_none());
    rig.command(Command::SetScheduling(SchedulingState::NoNewAdmissions));
    assert_eq!(rows(&mut rig, 1), [[(0, 1)]]);
    rig.cancel(0);
    assert!(rig.view().has_work(), "an end is to be reported");
    assert_eq!(rig.pass().expect("a report").reported, [0]);
    assert!(!rig.view().has_work() && rig.pass().is_none());
    rig.command(Command::SetScheduling(SchedulingState::Running));
    assert!(rig.view().has_work());
    assert_eq!(rows(&mut rig, 1), [[(1, 4)]]);
}

#[test]
fn case_86_usage_counts_neither_the_null_block_nor_free_blocks_that_are_cached() {
    let config = EngineConfig::new(EngineKind::Vllm(sixteen().with_num_gpu_blocks(5)));
    let mut scheduler = Scheduler::new(&config).expect("a usable configuration");
    let submission = Submission { sequence: SequenceId(0), tie_key: 0, request: request(1, 32, 2) };
    scheduler.apply(Command::Submit(submission), EngineTime::ZERO).expect("taken");
    let mut usage = Vec::new();
    while let Some(pass) = scheduler.begin_pass(EngineTime::ZERO) {
        let metrics = scheduler.finish_pass(pass, EngineTime::ZERO).metrics;
        usage.push((metrics.num_used_blocks, metrics.num_cached_blocks, metrics.kv_cache_usage));
    }
    assert_eq!(usage, [(2, 2, 0.5), (0, 2, 0.0), (0, 2, 0.0)]);
}

#[test]
fn a_reset_shows_in_the_metrics_also_without_events() {
    let mut scheduler = Scheduler::new(&EngineConfig::default()).expect("the default");
    let submission = Submission { sequence: SequenceId(0), tie_key: 0, request: request(1, 40, 1) };
    scheduler.apply(Command::Submit(submission), EngineTime::ZERO).expect("taken");
    let mut now = EngineTime::ZERO;
    while let Some(pass) = scheduler.begin_pass(now) {
        now = pass.ends_at();
        assert_eq!(scheduler.finish_pass(pass, now).metrics.num_cached_blocks, 2);
    }
    assert!(scheduler.settle(now).is_none());
    scheduler.apply(Command::ResetPrefixCache { reset_running_requests: false }, now).expect("taken");
    assert_eq!(scheduler.settle(now).expect("a change").metrics.num_cached_blocks, 0);
}

#[test]
fn the_largest_values_do_not_overflow() {
    const MAX: u32 = u32::MAX;
    for reserve in [true, false] {
        let options = small()
            .with_block_size(MAX)
            .with_num_gpu_blocks(MAX)
            .with_max_num_seqs(MAX)
            .with_max_num_batched_tokens(MAX)
            .with_long_prefill_token_threshold(MAX)
            .with_prefill_schedule_interval(MAX)
            .with_watermark(0.999)
            .with_scheduler_reserve_full_isl(reserve);
        let config = EngineConfig::new(EngineKind::Vllm(options))
            .with_max_model_len(MAX)
            .with_vocab_size(MAX)
            .with_speedup(Speedup::Factor(f64::MIN_POSITIVE));
        let mut scheduler = Scheduler::new(&config).expect("a usable configuration").with_kv_events();
        for sequence in 0..2 {
            let mut request = request(1, 9, MAX).with_arrival(EngineTime::MAX).with_priority(i32::MIN);
            request.max_output_tokens = None;
            let submission = Submission { sequence: SequenceId(sequence), tie_key: u128::MAX, request };
            scheduler.apply(Command::Submit(submission), EngineTime::MAX).expect("taken");
        }
        for _ in 0..3 {
            let pass = scheduler.begin_pass(EngineTime::MAX).expect("a pass");
            let ends_at = pass.ends_at();
            assert_eq!(scheduler.finish_pass(pass, ends_at).outputs.len(), 2);
        }
    }
}
