//! What must hold after every operation. The first half needs nothing but the look inside that every caller
//! has; the second half compares with the model.

use std::collections::BTreeMap;

use standin::{EngineKind, EngineMetrics, Pass, SchedulingState, SequenceStatus, VllmConfig};

use super::world::World;

pub(crate) fn check(world: &mut World) {
    check_blocks(world);
    check_accounts(world);
    check_against_model(world);
}

/// Blocks are conserved; owners, reference counts and free list agree.
fn check_blocks(world: &World) {
    let view = world.core.view();
    let pool = view.pool();
    let mut owners = BTreeMap::new();
    for id in world.live() {
        let Some(sequence) = view.sequence(id) else { continue };
        assert!(sequence.status == SequenceStatus::Running || sequence.block_ids.is_empty(), "{sequence:?}");
        let capacity = sequence.block_ids.len() as u32 * options(world).block_size;
        assert!(sequence.num_computed_tokens <= sequence.num_tokens.min(capacity), "{sequence:?}");
        sequence.block_ids.iter().for_each(|&block| *owners.entry(block).or_insert(0) += 1);
    }
    let mut free: Vec<_> = pool.free_queue().collect();
    free.sort_unstable();
    let unowned = (1..=pool.num_usable_blocks()).filter(|block| !owners.contains_key(block));
    assert_eq!(free, unowned.collect::<Vec<_>>(), "the free list holds each block without an owner, once");
    assert_eq!(pool.num_free_blocks() as usize, free.len());
    for block in 1..=pool.num_usable_blocks() {
        assert_eq!(pool.ref_count(block), owners.get(&block).copied().unwrap_or(0), "owners of block {block}");
    }
}

/// Every submitted request is in exactly one place, or has ended once.
fn check_accounts(world: &World) {
    let view = world.core.view();
    let live = world.live();
    let with = |status| live.iter().filter(move |&&id| view.sequence(id).is_some_and(|one| one.status == status));
    let running: Vec<_> = view.running().map(|sequence| sequence.sequence).collect();
    assert_eq!(running.len(), with(SequenceStatus::Running).count());
    assert!(running.len() <= options(world).max_num_seqs as usize);
    let aside = live
        .iter()
        .filter_map(|&id| view.sequence(id))
        .filter(|one| one.throttled && matches!(one.status, SequenceStatus::Waiting | SequenceStatus::Preempted));
    let waiting = view.waiting().count() + aside.count();
    assert_eq!(waiting, with(SequenceStatus::Waiting).count() + with(SequenceStatus::Preempted).count());
    let arriving = with(SequenceStatus::Arriving).count();
    let ended = world.ledger.num_ended() + world.model.outgrown.len();
    assert_eq!(world.ledger.num_submitted(), ended + running.len() + waiting + arriving);
}

/// Queues, sequences, blocks and contents are those of the model.
fn check_against_model(world: &mut World) {
    let (view, model) = (world.core.view(), &world.model);
    assert!(view.running().map(|one| one.sequence).eq(model.running.iter().copied()), "{:?}", model.running);
    let in_queue = model.waiting.iter().copied().filter(|id| !model.sequences[id].throttled);
    assert!(view.waiting().map(|one| one.sequence).eq(in_queue), "{:?}", model.waiting);
    assert!(view.pool().free_queue().eq(model.blocks.free.iter().copied()), "{:?}", model.blocks.free);
    for (&id, expected) in &model.sequences {
        let found = view.sequence(id).expect("the model says that it is live");
        assert_eq!((found.status, found.throttled), (expected.status, expected.throttled), "{id}");
        assert_eq!(found.num_computed_tokens as usize, expected.computed, "{id}");
        assert_eq!(found.num_tokens as usize, expected.num_tokens(), "{id}");
        assert_eq!(found.num_output_tokens as usize, expected.produced, "{id}");
        assert_eq!((found.block_ids, found.num_preemptions), (&expected.blocks[..], expected.preemptions), "{id}");
    }
    let pool = view.pool();
    let mut pairs = Vec::new();
    for (id, block) in (0..).zip(&model.blocks.all) {
        match (block.content, pool.block_hash(id)) {
            (None, None) => {}
            (Some((name, _)), Some(hash)) => {
                assert_eq!(pool.find(hash), model.blocks.find(name), "the oldest copy of block {id}");
                pairs.push((name, hash));
            }
            different => panic!("content of block {id}: {different:?}"),
        }
    }
    for (name, hash) in pairs {
        world.assert_same_content(name, hash);
    }
}

/// Nobody who could run is left out, and tokens and slots keep to their limits.
pub(crate) fn check_work_is_conserved(world: &World, pass: Option<&Pass>) {
    let (view, options) = (world.core.view(), options(world));
    let rows = pass.map_or(&[][..], Pass::rows);
    let tokens: u32 = rows.iter().map(|row| row.new_tokens).sum();
    assert!(tokens <= options.max_num_batched_tokens && rows.iter().all(|row| row.new_tokens > 0));
    let left = options.max_num_batched_tokens - tokens;
    // Between its beats prefill stands back for decodes, if any runs.
    let defers = options.prefill_schedule_interval > 1 && pass.is_some();
    if left == 0 || defers || world.model.state == SchedulingState::Stopped {
        return;
    }
    for sequence in view.running().filter(|sequence| !sequence.throttled) {
        assert!(rows.iter().any(|row| row.sequence == sequence.sequence), "{sequence:?} is left out: {rows:?}");
    }
    let slots = options.max_num_seqs.min(options.max_num_active_seqs.unwrap_or(u32::MAX)) as usize;
    let num_running = view.running().count();
    let preempted = pass.is_some_and(|pass| !pass.preempted().is_empty());
    let admits = world.model.state == SchedulingState::Running && num_running < slots && !preempted;
    let Some(head) = view.waiting().next().filter(|_| admits) else { return };
    let headroom = if num_running == 0 { 0.0 } else { options.watermark * f64::from(options.num_gpu_blocks) };
    // What is found in the cache can only lessen the need.
    let needed = head.num_tokens.div_ceil(options.block_size) + headroom as u32;
    let too_long = !options.enable_chunked_prefill && head.num_tokens > left;
    assert!(too_long || needed > view.pool().num_free_blocks(), "{head:?} is not admitted: {rows:?}");
}

/// Gauges say what a look inside says.
pub(crate) fn check_metrics(world: &World, metrics: &EngineMetrics) {
    let view = world.core.view();
    let pool = view.pool();
    let used = u64::from(pool.num_usable_blocks() - pool.num_free_blocks());
    assert_eq!(metrics.num_requests_running, view.running().count() as u64);
    assert_eq!(metrics.num_requests_waiting, world.model.waiting.len() as u64);
    assert_eq!(metrics.num_used_blocks, used);
    assert_eq!(metrics.num_cached_blocks, pool.num_blocks_with_hash() as u64);
    assert!((metrics.kv_cache_usage - used as f64 / f64::from(pool.num_usable_blocks())).abs() < 1e-12);
}

fn options(world: &World) -> &VllmConfig {
    let EngineKind::Vllm(options) = &world.config.kind else { panic!("not vLLM") };
    options
}
