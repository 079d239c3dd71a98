//! What is found again, what is stored when, and how much of the pool that takes.

use super::test_kit::*;
use crate::config::{EngineConfig, EngineKind, RadixEvictionPolicy, SglangConfig, Speedup};
use crate::kv_event::KvEvent;
use crate::request::{MultimodalItem, Request, SequenceId};
use crate::scheduler::{Applied, Command, Scheduler, Submission};
use crate::time::EngineTime;

/// `(tokens, first page of the sequence)` of what was stored.
fn stored(done: &Done) -> Vec<(usize, u32)> {
    let stored = |event: &KvEvent| match event {
        KvEvent::BlockStored { token_ids, first_block_index, .. } => Some((token_ids.len(), *first_block_index)),
        _ => None,
    };
    done.events.iter().filter_map(stored).collect()
}

#[test]
fn case_27_an_identical_prompt_computes_one_token_or_the_last_page() {
    for (page_size, tokens, hit) in [(1, 20, 19), (16, 32, 16), (16, 33, 32), (32, 40, 32), (64, 64, 0)] {
        let pages = SglangConfig::default().with_page_size(page_size).with_max_total_tokens(512);
        let mut rig = Rig::new(pages.with_max_running_requests(8));
        rig.submit(request(1, tokens, 1));
        rig.run();
        let again = rig.submit(request(1, tokens, 1));
        assert_eq!(rig.run()[0].hits, [(again, hit)], "page size {page_size}");
        rig.assert_drained();
    }
}

#[test]
fn prompt_and_output_are_stored_apart_and_the_last_token_is_not() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 10, 4));
    let passes = rig.run();
    assert_eq!(stored(&passes[0]), [(10, 0)], "with the prefill");
    assert_eq!(stored(&passes[1]), [], "nothing while it decodes");
    assert_eq!(stored(&passes[3]), [(3, 10)], "three of four outputs at the end");
    // Turn 2 repeats prompt and answer.
    let answer = rig.outputs[&0].clone();
    let mut turn = prompt(1, 10);
    turn.extend(answer);
    turn.push(7);
    let second = rig.submit(Request::new(turn, 1));
    assert_eq!(rig.run()[0].hits, [(second, 13)]);
}

#[test]
fn case_31_those_of_one_pass_do_not_hit_each_other_and_duplicates_are_freed() {
    let mut rig = Rig::new(small());
    for _ in 0..3 {
        rig.submit(request(1, 14, 2));
    }
    let pass = rig.begin().expect("a pass");
    assert_eq!(rig.pool().available_tokens, 64 - 3 * 14);
    let done = rig.finish(pass);
    assert_eq!(
        (done.hits, stored(&Done { events: done.events, ..Done::default() })),
        (vec![(0, 0), (1, 0), (2, 0)], vec![(14, 0)])
    );
    assert_eq!((rig.pool().available_tokens, rig.pool().protected_tokens), (50, 14));
    rig.run();
    rig.assert_drained();
}

#[test]
fn a_chunk_can_be_found_as_soon_as_the_next_one_is_planned() {
    let mut rig = Rig::new(small().with_page_size(4).with_chunked_prefill_size(Some(8)));
    rig.submit(request(1, 22, 1));
    let passes = rig.run();
    let all: Vec<_> = passes.iter().map(stored).collect();
    assert_eq!(all[..3], [vec![], vec![(8, 0)], vec![(8, 2), (4, 4)]], "22 tokens are five pages and a half");
    rig.assert_drained();
}

#[test]
fn a_prompt_that_was_stored_in_chunks_was_stored_once() {
    let lfu = small().with_radix_eviction_policy(RadixEvictionPolicy::Lfu).with_chunked_prefill_size(Some(8));
    let mut rig = Rig::new(lfu);
    rig.submit(request(1, 24, 1));
    rig.run();
    for _ in 0..2 {
        rig.submit(request(2, 8, 1));
        rig.run();
    }
    // 51 of 64 are wanted: all chunks of the first, each stored once, go before the second, stored twice.
    rig.submit(request(3, 32, 20));
    rig.run();
    for (kind, tokens, hit) in [(2, 8, 7), (1, 24, 0)] {
        let sequence = rig.submit(request(kind, tokens, 1));
        assert_eq!(rig.run()[0].hits, [(sequence, hit)]);
    }
}

#[test]
fn keys_and_items_keep_equal_prompts_apart() {
    let mut rig = Rig::new(small());
    let mut requests = vec![request(1, 8, 1); 5];
    requests[1].cache_salt = Some("a".into());
    requests[2].lora_name = Some("a".into());
    let item = |identifier: &str| MultimodalItem { identifier: identifier.into(), offset: 2, num_tokens: 4 };
    requests[3].multimodal = vec![item("cat")];
    requests[4].multimodal = vec![item("dog")];
    for (request, hit) in requests.iter().zip([0, 0, 0, 2, 2]).chain(requests.iter().zip([7; 5])) {
        let sequence = rig.submit(request.clone());
        let done = &rig.run()[0];
        assert_eq!(done.hits, [(sequence, hit)]);
        if let Some(KvEvent::BlockStored { lora_name, extra_keys, .. }) = done.events.first() {
            assert_eq!(lora_name, &request.lora_name);
            assert_eq!(!extra_keys.is_empty(), request.cache_salt.is_some() || request.lora_name.is_some());
        }
    }
    rig.assert_drained();
}

#[test]
fn who_does_not_read_the_cache_still_fills_it() {
    let mut rig = Rig::new(small());
    for hit in [0, 0, 7] {
        let mut request = request(1, 8, 1);
        request.skip_reading_prefix_cache = hit == 0;
        let sequence = rig.submit(request);
        assert_eq!(rig.run()[0].hits, [(sequence, hit)]);
    }
}

#[test]
fn without_a_cache_nothing_is_kept() {
    let mut rig = Rig::new(small().with_disable_radix_cache(true).with_chunked_prefill_size(Some(8)));
    for _ in 0..2 {
        rig.submit(request(1, 20, 3));
        let passes = rig.run();
        assert_eq!(passes.iter().map(|done| done.prefill.len()).sum::<usize>(), 3);
        assert!(passes.iter().all(|done| done.events.is_empty()));
    }
    assert_eq!(rig.pool().available_tokens, 64);
    rig.assert_drained();
}

#[test]
fn a_flush_needs_an_idle_engine_unless_it_retracts() {
    let mut rig = Rig::new(small());
    let flush =
        |rig: &mut Rig, reset_running_requests| rig.command(Command::ResetPrefixCache { reset_running_requests });
    rig.submit(request(1, 8, 4));
    rig.pass();
    assert_eq!(flush(&mut rig, false), Applied::PrefixCacheReset { reset: false, preempted: vec![] });
    let pass = rig.begin().expect("a pass");
    let applied = flush(&mut rig, true);
    assert_eq!(applied, Applied::PrefixCacheReset { reset: true, preempted: vec![SequenceId(0)] });
    assert!(rig.finish(pass).sampled.is_empty(), "its token is made again");
    assert_eq!(rig.pass().expect("a pass").hits, [(0, 0)]);
    rig.run();
    assert_eq!(rig.outputs[&0].len(), 4);
    assert_eq!(flush(&mut rig, false), Applied::PrefixCacheReset { reset: true, preempted: vec![] });
    assert_eq!(rig.settle().expect("it is shown").events, [KvEvent::AllBlocksCleared]);
    assert_eq!(rig.pool().available_tokens, 64);
}

/// The events of a request that runs alone.
fn events_of(scheduler: &mut Scheduler, sequence: u64, request: Request) -> Vec<KvEvent> {
    let mut now = EngineTime::from_millis(sequence);
    let submission = Submission { sequence: SequenceId(sequence), tie_key: 0, request };
    scheduler.apply(Command::Submit(submission), now).expect("taken");
    let mut events = Vec::new();
    while let Some(pass) = scheduler.begin_pass(now) {
        now = pass.ends_at();
        events.extend(scheduler.finish_pass(pass, now).kv_events);
    }
    events
}

#[test]
fn events_that_are_asked_for_late_are_the_same() {
    let config = EngineConfig::new(EngineKind::Sglang(small())).with_speedup(Speedup::Instant);
    let events = [false, true].map(|early| {
        let mut scheduler = Scheduler::new(&config).expect("valid");
        if early {
            scheduler = scheduler.with_kv_events();
        }
        let first = events_of(&mut scheduler, 1, request(1, 8, 3));
        assert_eq!(first.is_empty(), !early);
        let mut scheduler = scheduler.with_kv_events();
        events_of(&mut scheduler, 2, Request::new([prompt(1, 6), prompt(2, 9)].concat(), 2))
    });
    assert_eq!(events[0], events[1]);
    assert_eq!(events[0].len(), 2);
}

#[test]
fn case_89_usage_counts_what_can_be_evicted_as_free() {
    let mut rig = Rig::new(small());
    rig.submit(request(1, 10, 2));
    let done = rig.pass().expect("a pass");
    assert_eq!((done.metrics.num_used_blocks, done.metrics.num_cached_blocks), (10, 10));
    assert_eq!(done.metrics.kv_cache_usage, 10.0 / 64.0);
    let done = rig.pass().expect("a pass");
    assert_eq!((done.metrics.num_used_blocks, done.metrics.num_cached_blocks), (0, 11));
}

#[test]
fn what_the_last_prefill_found_stays_until_the_next_one() {
    let mut rig = Rig::new(small().with_chunked_prefill_size(Some(8)));
    let seen = |done: &Done| (done.metrics.last_prefill_cached_tokens, done.metrics.last_prefill_new_tokens);
    rig.submit(request(1, 12, 3));
    let passes = rig.run();
    assert_eq!(passes.iter().map(seen).collect::<Vec<_>>()[..4], [(0, 8), (0, 4), (0, 4), (0, 4)]);
    rig.submit(request(1, 12, 3));
    let passes = rig.run();
    assert_eq!(passes.iter().map(seen).collect::<Vec<_>>()[..2], [(11, 1), (11, 1)]);
}
