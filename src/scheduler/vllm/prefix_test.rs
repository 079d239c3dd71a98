//! Prefix cache and KV events, as a whole scheduler shows them.

use super::test_kit::*;
use crate::config::VllmConfig;
use crate::kv_event::KvEvent;
use crate::output::PrefillStats;
use crate::request::{KvCacheReportMode, MultimodalItem, Request};
use crate::scheduler::{Applied, Command};

const RESET: Command = Command::ResetPrefixCache { reset_running_requests: false };

/// Runs requests one after the other; the prefix hit of the last.
fn last_hit(options: VllmConfig, requests: impl IntoIterator<Item = Request>) -> u32 {
    let mut rig = Rig::new(options);
    let mut hit = 0;
    for request in requests {
        rig.submit(request);
        hit = rig.run()[0].hits[0].1;
    }
    hit
}

fn stored(events: &[KvEvent]) -> Vec<(usize, u32, bool)> {
    let stored = events.iter().filter_map(|event| match event {
        KvEvent::BlockStored { block_hashes, first_block_index, parent_block_hash, .. } => {
            Some((block_hashes.len(), *first_block_index, parent_block_hash.is_some()))
        }
        _ => None,
    });
    stored.collect()
}

#[test]
fn cases_11_to_14_a_hit_is_whole_blocks_and_leaves_one_token_to_compute() {
    for (tokens, hit) in [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (49, 48)] {
        let again = last_hit(sixteen(), [request(1, tokens, 1), request(1, tokens, 1)]);
        assert_eq!(again, hit, "{tokens} tokens twice");
    }
    assert_eq!(last_hit(sixteen(), [request(1, 33, 1), request(1, 16, 1)]), 0, "case 13, another one's blocks");
}

#[test]
fn case_15_a_prompt_hits_what_the_same_pass_will_compute() {
    let mut rig = Rig::new(sixteen());
    rig.submit(request(1, 64, 2));
    rig.submit(request(1, 64, 2));
    let prefill = |num_computed_tokens: u32, num_cached_tokens: u32| PrefillStats {
        num_external_cached_tokens: 0,
        num_prompt_tokens: 64,
        num_computed_tokens,
        num_cached_tokens,
        num_cache_creation_tokens: num_computed_tokens,
    };
    let done = rig.pass().expect("a pass");
    assert_eq!((done.hits, done.rows), (vec![(0, 0), (1, 48)], vec![(0, 64), (1, 16)]));
    assert_eq!(done.prefills, [prefill(64, 0), prefill(16, 48)]);
    let (pass, all) = (done.metrics.expect("metrics"), 64);
    assert_eq!((pass.prefix_cache.queries, pass.prefix_cache.hits), (2 * all, 48), "case 84");
    assert_eq!((pass.sum_prefill_tokens, pass.sum_prefill_kv_tokens, pass.var_prefill_tokens), (80, 48, 576.0));
}

#[test]
fn case_16_one_token_decides_from_its_block_on() {
    for (position, hit) in [(0, 0), (20, 16), (47, 32)] {
        let mut other = prompt(1, 49);
        other[position] = 7;
        assert_eq!(last_hit(sixteen(), [request(1, 49, 1), Request::new(other, 1)]), hit);
    }
}

#[test]
fn case_17_other_salt_adapter_or_image_is_another_prefix() {
    let image = |id: &str| vec![MultimodalItem { identifier: id.into(), offset: 3, num_tokens: 4 }];
    let plain = || request(1, 33, 1);
    let (mut salted, mut adapted, mut pictured) = (plain(), plain(), plain());
    salted.cache_salt = Some("x".into());
    adapted.lora_name = Some("x".into());
    pictured.multimodal = image("x");
    let mut other_picture = plain();
    other_picture.multimodal = image("y");
    for (first, second, hit) in [
        (plain(), salted.clone(), 0),
        (plain(), adapted.clone(), 0),
        (plain(), pictured.clone(), 0),
        (pictured.clone(), other_picture, 0),
        (salted.clone(), salted, 32),
        (adapted.clone(), adapted, 32),
        (pictured.clone(), pictured, 32),
    ] {
        assert_eq!(last_hit(sixteen(), [first, second]), hit);
    }
}

#[test]
fn case_18_copies_are_stored_and_removed_one_by_one() {
    // Three usable blocks: both copies of the one full block, and one to spare.
    let mut rig = Rig::new(small().with_num_gpu_blocks(4));
    rig.submit(request(1, 4, 1));
    rig.submit(request(1, 4, 1));
    assert_eq!(stored(&rig.pass().expect("a pass").events), [(1, 0, false), (1, 0, false)]);
    let removed =
        |events: &[KvEvent]| events.iter().filter(|event| matches!(event, KvEvent::BlockRemoved { .. })).count();
    rig.submit(request(2, 7, 1));
    assert_eq!(removed(&rig.pass().expect("a pass").events), 1);
    rig.submit(request(1, 5, 1));
    assert_eq!(rig.pass().expect("a pass").hits, [(3, 4)], "the other copy still serves");
}

#[test]
fn case_19_a_second_turn_hits_what_was_computed_and_not_the_last_sampled_token() {
    for (outputs, hit) in [(6, 12), (7, 16)] {
        let mut rig = Rig::new(small());
        rig.submit(request(1, 10, outputs));
        rig.run();
        let mut turn = prompt(1, 10);
        turn.extend(&rig.outputs[&0]);
        turn.extend(prompt(2, 5));
        rig.submit(Request::new(turn, 1));
        assert_eq!(rig.run()[0].hits[0].1, hit, "10 + {outputs} tokens, all but one computed");
    }
}

#[test]
fn case_20_who_ended_first_is_evicted_first_and_from_the_tail() {
    let mut rig = Rig::new(sixteen().with_num_gpu_blocks(7));
    for kind in 1..3 {
        rig.submit(request(kind, 48, 1));
        rig.run();
    }
    rig.submit(request(3, 96, 1));
    let events = rig.pass().expect("a pass").events;
    let removed = events.iter().filter_map(|event| match event {
        KvEvent::BlockRemoved { block_id, .. } => Some(*block_id),
        _ => None,
    });
    assert_eq!(removed.collect::<Vec<_>>(), [3, 2, 1, 6, 5, 4]);
}

#[test]
fn case_22_a_hit_block_that_is_free_counts_as_needed() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(11));
    rig.submit(request(1, 16, 1));
    rig.run();
    rig.submit(request(2, 12, 9));
    rig.pass();
    // Seven blocks are free, four of them hold the prefix; this one needs eight.
    rig.submit(request(1, 32, 1));
    assert_eq!(rig.pass().expect("a pass").rows, [(1, 1)]);
    assert_eq!(rig.run().last().expect("passes").reported, [2], "it ran in the end");
}

#[test]
fn case_24_a_reset_needs_an_idle_pool_and_shows_one_event() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 9, 2));
    rig.pass();
    assert_eq!(rig.command(RESET), Applied::PrefixCacheReset { reset: false, preempted: vec![] });
    rig.run();
    assert_eq!(rig.command(RESET), Applied::PrefixCacheReset { reset: true, preempted: vec![] });
    assert_eq!(rig.pass().map(|done| done.rows), None);
    assert_eq!(rig.settle().expect("an event to show").events, [KvEvent::AllBlocksCleared]);
    assert!(rig.settle().is_none());
    rig.submit(request(1, 9, 1));
    assert_eq!(rig.run()[0].hits, [(1, 0)]);
}

#[test]
fn case_25_without_caching_nothing_is_found_and_nothing_shown() {
    let options = || sixteen().with_enable_prefix_caching(false);
    assert_eq!(last_hit(options(), [request(1, 33, 1), request(1, 33, 1)]), 0);
    let mut rig = Rig::new(options());
    rig.submit(request(1, 33, 20));
    let (passes, pool) = (rig.run(), rig.view().pool());
    assert!(passes.iter().all(|done| done.events.is_empty()));
    assert_eq!((pool.num_cached_hashes(), pool.free_queue().take(5).collect::<Vec<_>>()), (0, vec![4, 3, 2, 1, 5]));
}

#[test]
fn cases_79_80_and_83_events_name_full_blocks_once_with_their_parent() {
    let mut rig = Rig::new(sixteen());
    rig.submit(request(1, 33, 40));
    let passes = rig.run();
    assert_eq!(stored(&passes[0].events), [(2, 0, false)]);
    let KvEvent::BlockStored { block_hashes, token_ids, .. } = &passes[0].events[0] else { panic!("stored") };
    assert_eq!(*token_ids, prompt(1, 32));
    let next = passes.iter().position(|done| done.events.len() == 1 && stored(&done.events) == [(1, 2, true)]);
    assert_eq!(next, Some(15), "the pass that computes token 48");
    let KvEvent::BlockStored { parent_block_hash, .. } = &passes[15].events[0] else { panic!("stored") };
    assert_eq!(*parent_block_hash, Some(block_hashes[1]));
    // A hit and the end of a sequence show nothing.
    rig.submit(request(1, 33, 1));
    assert_eq!(rig.run().iter().map(|done| done.events.len()).sum::<usize>(), 0);
}

#[test]
fn case_81_a_block_is_removed_before_it_is_stored_again() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(4));
    rig.submit(request(1, 8, 1));
    rig.run();
    rig.submit(request(2, 12, 1));
    let events = rig.pass().expect("a pass").events;
    let kinds: Vec<_> = events.iter().map(|event| matches!(event, KvEvent::BlockRemoved { .. })).collect();
    assert_eq!(kinds, [true, true, false]);
}

#[test]
fn case_84_a_return_after_a_preemption_counts_apart() {
    let mut rig = Rig::new(sixteen().with_num_gpu_blocks(5));
    rig.submit(request(1, 31, 8));
    rig.submit(request(2, 31, 8));
    let look_ups = |done: &Done| {
        let stats = done.metrics?.prefix_cache;
        Some([
            [stats.requests, stats.queries, stats.hits],
            [stats.preempted_requests, stats.preempted_queries, stats.preempted_hits],
        ])
    };
    let look_ups: Vec<_> = rig.run().iter().filter_map(look_ups).filter(|counts| *counts != [[0; 3]; 2]).collect();
    assert_eq!(look_ups, [[[2, 62, 0], [0; 3]], [[0; 3], [1, 33, 16]]]);
}

#[test]
fn a_blocked_head_in_report_mode_full_reports_at_every_try_also_with_no_pass() {
    let mut rig = Rig::new(small().with_num_gpu_blocks(9));
    rig.submit(request(1, 8, 1));
    rig.run();
    rig.submit(request(1, 29, 9));
    rig.pass();
    rig.throttle(1, true);
    let mut full = request(1, 30, 1);
    full.kv_cache_report_mode = KvCacheReportMode::Full;
    rig.submit(full);
    for _ in 0..2 {
        assert!(rig.pass().is_none());
        assert_eq!(stored(&rig.settle().expect("a report").events), [(7, 0, false)]);
    }
}
