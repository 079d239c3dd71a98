//! What must hold after every operation: first what every caller can see, then that it is what the model predicts.

use std::collections::BTreeMap;

use standin::{BlockId, EngineMetrics, Pass, RowKind, SchedulingState, SequenceStatus};

use super::world::World;

pub(crate) fn check(world: &World) {
    check_pages(world);
    check_accounts(world);
    check_against_model(world);
}

/// Cases 1, 2 and 5: every page is free, in the tree or held by one.
fn check_pages(world: &World) {
    let view = world.core.view();
    let (pool, tokens) = (view.pool(), view.token_pool().expect("SGLang's pool"));
    let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
    for sequence in view.running().chain(view.waiting()) {
        sequence.block_ids.iter().for_each(|&page| *holders.entry(page).or_default() += 1);
        assert!(sequence.status == SequenceStatus::Running || sequence.block_ids.is_empty());
        assert!(sequence.num_computed_tokens <= sequence.block_ids.len() as u32 * world.options.page_size);
    }
    let free: Vec<_> = pool.free_queue().collect();
    assert!(free.iter().all(|page| !holders.contains_key(page)), "a free page has no owner");
    let page_size = u64::from(world.options.page_size);
    assert_eq!(free.len() as u64 * page_size, tokens.available_tokens);
    let stored = pool.num_blocks_with_hash();
    assert_eq!(stored as u64 * page_size, tokens.evictable_tokens + tokens.protected_tokens);
    let in_use = holders.len() + free.len();
    let unused = (tokens.evictable_tokens / page_size) as usize;
    assert_eq!(in_use + unused, pool.num_usable_blocks() as usize, "case 1");
    assert_eq!(pool.num_free_blocks() as usize, free.len() + unused);
}

/// Case 3: every request is in one place, or has ended.
fn check_accounts(world: &World) {
    let view = world.core.view();
    let (live, states): (Vec<_>, Vec<_>) =
        world.live().into_iter().map(|id| (id, view.sequence(id).map(|one| (one.status, one.throttled)))).unzip();
    let count =
        |statuses: &[SequenceStatus]| states.iter().flatten().filter(|(status, _)| statuses.contains(status)).count();
    let (running, waiting) = (view.running().count(), view.waiting().count());
    assert!(running <= world.options.max_running_requests as usize);
    assert_eq!(running, count(&[SequenceStatus::Running]));
    let queued = [SequenceStatus::Waiting, SequenceStatus::Preempted];
    let aside = states.iter().flatten().filter(|(status, throttled)| *throttled && queued.contains(status)).count();
    assert_eq!(waiting + aside, count(&queued));
    let to_be_shown = states.iter().filter(|state| state.is_none()).count();
    let known = running + waiting + aside + count(&[SequenceStatus::Arriving]) + to_be_shown;
    assert_eq!((known, live.len() + world.num_ended()), (live.len(), world.accounts.len()));
}

/// Queues, sequences, pages, contents and what admission reckons with are those of the model.
fn check_against_model(world: &World) {
    let Some(model) = &world.model else { return };
    let view = world.core.view();
    assert!(view.running().map(|one| one.sequence).eq(model.batch()), "{:?}", model.batch());
    assert!(view.waiting().map(|one| one.sequence).eq(model.queue()), "{:?}", model.queue());
    for (&id, expected) in &model.sequences {
        let found = view.sequence(id).expect("the model says that it is live");
        assert_eq!((found.status, found.throttled), (expected.status, expected.throttled), "{id}");
        assert_eq!(found.num_computed_tokens as usize, expected.computed, "{id}");
        assert_eq!(found.num_output_tokens as usize, expected.produced, "{id}");
        assert_eq!(found.max_output_tokens as usize, expected.entry.limit, "{id}");
        assert_eq!((found.block_ids, found.num_preemptions), (&expected.pages[..], expected.preemptions), "{id}");
    }
    let (pool, tree) = (view.token_pool().expect("SGLang's pool"), &model.tree);
    assert_eq!(pool.evictable_tokens as usize, tree.evictable());
    assert_eq!(pool.protected_tokens as usize, tree.protected());
    assert_eq!((pool.batch_is_full, pool.chunked), (model.full, model.chunked));
    assert!((pool.new_token_ratio - model.ratio).abs() < 1e-12, "{} and {}", pool.new_token_ratio, model.ratio);
    assert!(view.pool().free_queue().eq(tree.free.iter().copied()), "{:?}", tree.free);
}

/// Case 7, and what a pass may hold.
pub(crate) fn check_plan(world: &World, pass: Option<&Pass>) {
    let can_run = world.state == SchedulingState::Running && world.somebody_can_run();
    assert!(pass.is_some() || !can_run || !world.options.end_outgrown_requests, "case 7: it idles");
    let Some(pass) = pass else { return };
    let (work, tokens) = (pass.work(), pass.rows().iter().map(|row| u64::from(row.new_tokens)).sum::<u64>());
    assert_eq!(work.total_tokens(), tokens);
    assert!(pass.rows().iter().all(|row| row.new_tokens > 0));
    assert!(work.prefill().iter().filter(|chunk| !chunk.samples).count() <= 1, "one split prompt at a time");
    let prefills = !work.prefill().is_empty();
    if let Some(chunk) = world.options.chunked_prefill_size {
        assert!(tokens <= u64::from(chunk) || !prefills, "case 5");
    }
    let running = pass.rows().iter().filter(|row| row.kind == RowKind::Running).count();
    let admits = running < pass.rows().len();
    // The next chunk of the split prompt may be one of them.
    assert!(!admits || running <= 1 || world.options.enable_mixed_chunk, "case 46");
}

/// Gauges say what a look inside says.
pub(crate) fn check_metrics(world: &World, metrics: &EngineMetrics) {
    let view = world.core.view();
    let pool = view.pool();
    assert_eq!((metrics.at, metrics.num_requests_running), (world.now, view.running().count() as u64));
    assert_eq!(metrics.num_used_blocks, u64::from(pool.num_usable_blocks() - pool.num_free_blocks()));
    assert_eq!(metrics.num_cached_blocks, pool.num_blocks_with_hash() as u64);
    if let Some(model) = &world.model {
        assert_eq!(metrics.num_requests_waiting, model.waiting.len() as u64);
    }
}

/// Each page holds what the model says.
pub(crate) fn check_contents(world: &World) {
    let Some(model) = &world.model else { return };
    let pool = world.core.view().pool();
    assert_eq!(pool.num_blocks_with_hash(), model.tree.pages().count());
    let mut named = BTreeMap::new();
    for (page, prefix, locks) in model.tree.pages() {
        let hash = pool.block_hash(page).expect("the model says that it is stored");
        assert_eq!(pool.ref_count(page), locks, "page {page}");
        let text = format!("{prefix:?}");
        assert_eq!(*named.entry(hash).or_insert_with(|| text.clone()), text, "two contents, one hash");
    }
}
