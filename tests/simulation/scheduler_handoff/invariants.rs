//! What must hold after every operation.

use std::collections::BTreeMap;

use standin::{
    BlockId, DestinationState, EngineMetrics, HandoffSide, Pass, SchedulingState, SequenceStatus, SequenceView,
    SourceState,
};

use super::workload::HANDOFFS;
use super::world::{World, id};

pub(crate) fn check(world: &mut World) {
    check_blocks(world);
    check_registrations(world);
    check_nobody_lost_blocks(world);
}

/// Cases 1, 2 and 5: every block is free or owned, as often as sequences hold it.
fn check_blocks(world: &World) {
    let (view, pool) = (world.core.view(), world.core.view().pool());
    let mut owners: BTreeMap<BlockId, u32> = BTreeMap::new();
    for sequence in view.running().chain(view.waiting()).chain(view.loading()).chain(view.held()) {
        sequence.block_ids.iter().for_each(|&block| *owners.entry(block).or_default() += 1);
    }
    assert!(view.waiting().all(|sequence| sequence.block_ids.is_empty()));
    assert!(view.running().all(|sequence| sequence.status == SequenceStatus::Running));
    assert!(view.running().count() <= world.options.max_num_seqs as usize);
    let mut free: Vec<_> = pool.free_queue().collect();
    assert_eq!(
        (free.len(), free.len() + owners.len()),
        (pool.num_free_blocks() as usize, pool.num_usable_blocks() as usize)
    );
    free.extend(owners.keys());
    free.sort_unstable();
    assert!(free.into_iter().eq(1..=pool.num_usable_blocks()), "a block is free or owned");
    for (block, owners) in owners {
        assert_eq!(pool.ref_count(block), owners, "block {block}");
    }
}

/// The core's registrations are the model's, and their sequences are where they say.
fn check_registrations(world: &World) {
    let (view, model) = (world.core.view(), &world.model);
    for handoff in 0..HANDOFFS {
        let expected = model.table.get(&id(handoff)).map(|known| (known.key, known.sequence, known.side));
        assert_eq!(view.handoff(id(handoff)), expected);
    }
    assert_eq!(view.num_handoffs(), model.table.len());
    for known in model.table.values() {
        let status = view.sequence(known.sequence).expect("a registration has its sequence").status;
        let held = matches!(status, SequenceStatus::Held(_));
        match known.side {
            HandoffSide::Source(SourceState::Held) | HandoffSide::Destination(DestinationState::Guarded) => {
                assert!(held)
            }
            HandoffSide::Destination(DestinationState::Reserved) => assert_eq!(status, SequenceStatus::Loading),
            side => assert!(!held && status != SequenceStatus::Loading, "{side:?} {status:?}"),
        }
    }
    for sequence in model.held() {
        let status = view.sequence(sequence).map(|one| one.status);
        assert!(matches!(status, Some(SequenceStatus::Held(_))), "{sequence} is held: {status:?}");
    }
    if let Some(deadline) = model.next_deadline() {
        assert!(world.core.next_deadline().is_some_and(|next| next <= deadline), "a hold without an end");
    }
}

/// Blocks that a transfer reads or writes stay what they are until it is over.
fn check_nobody_lost_blocks(world: &mut World) {
    let now: Vec<_> = {
        let view = world.core.view();
        let keeping = view.loading().filter(|one| one.status == SequenceStatus::Loading).chain(view.held());
        keeping.map(|one| ((one.sequence, one.status), one.block_ids.to_vec())).collect()
    };
    for (kept, before) in &world.kept {
        assert!(now.iter().all(|(keeps, blocks)| keeps != kept || blocks == before), "{kept:?} had {before:?}");
    }
    world.kept = now;
}

/// The next destination in the queue waits for blocks and for nothing else.
pub(crate) fn check_grants(world: &World, pass: Option<&Pass>) {
    let (view, options) = (world.core.view(), &world.options);
    let tokens: u32 = pass.iter().flat_map(|pass| pass.rows()).map(|row| row.new_tokens).sum();
    assert!(tokens <= options.max_num_batched_tokens, "case 5");
    let slots = view.running().count() < options.max_num_seqs as usize;
    let preempted = pass.is_some_and(|pass| !pass.preempted().is_empty());
    let others = view.loading().any(|one| one.status != SequenceStatus::Loading && !one.throttled);
    let tries = slots && tokens < options.max_num_batched_tokens && !preempted && !others;
    let Some(head) = view.waiting().next().filter(|_| tries && world.state == SchedulingState::Running) else { return };
    let waits = HandoffSide::Destination(DestinationState::Waiting);
    if !world.model.table.values().any(|known| known.sequence == head.sequence && known.side == waits) {
        return;
    }
    let missing =
        |one: SequenceView<'_>| one.num_tokens.div_ceil(options.block_size).saturating_sub(one.block_ids.len() as u32);
    let prefills = view.running().filter(|one| one.num_computed_tokens < one.num_tokens);
    let in_flight: u32 = prefills.chain(view.loading()).map(missing).sum();
    let headroom =
        if view.running().count() == 0 { 0.0 } else { options.watermark * f64::from(options.num_gpu_blocks) };
    // What is found in the cache can only lessen the need.
    let needed = missing(head) + headroom as u32 + in_flight;
    assert!(needed > view.pool().num_free_blocks(), "{head:?} waits although there is room");
}

/// Gauges say what a look inside says.
pub(crate) fn check_metrics(world: &World, metrics: &EngineMetrics) {
    let view = world.core.view();
    let pool = view.pool();
    let blocks = |sequences: &mut dyn Iterator<Item = SequenceView<'_>>| -> u64 {
        sequences.map(|sequence| sequence.block_ids.len() as u64).sum()
    };
    assert_eq!((metrics.num_requests_running, metrics.at), (view.running().count() as u64, world.now));
    assert_eq!(metrics.num_used_blocks, u64::from(pool.num_usable_blocks() - pool.num_free_blocks()));
    assert_eq!(metrics.num_held_blocks, blocks(&mut view.held()));
    assert_eq!(metrics.num_reserved_blocks, blocks(&mut view.loading()));
    assert_eq!(metrics.num_requests_held, view.held().count() as u64);
    let fetch = metrics.kv_fetch;
    assert_eq!(fetch.in_progress + fetch.completed_waiting, view.loading().count() as u64);
}
