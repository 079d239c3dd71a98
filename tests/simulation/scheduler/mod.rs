//! The pure core under random workloads on random small engines (engine-semantics §7.1).
//!
//! After every operation: blocks are conserved and owned as often as they are counted, every request is in one
//! place or has ended once, budget and slots keep their limits, nobody is left out who could run, KV events tell
//! the cache exactly, counters add up, and everything that can be seen, block ids included, is what an
//! independent model of the rules predicts. At the end everything ends, and all blocks are free.

pub(crate) mod event_replay;
mod invariants;
pub(crate) mod ledger;
mod model;
mod model_blocks;
pub(crate) mod workload;
mod world;

use crate::seeds::{self, Row};
use crate::trace::Trace;
use workload::{Workload, workload};
use world::World;

pub(crate) const ROW: Row = Row { test: "scheduler_vllm", variable: "STANDIN_SCHEDULER_SEEDS", seeds: 250 };

/// Runs a workload to its end.
fn run(workload: &Workload, trace: Trace) -> World {
    let mut world = World::new(workload, trace);
    for operation in &workload.operations {
        world.perform(operation);
    }
    if world.must_drain(&workload.options) {
        world.drain(workload.options.prefill_schedule_interval);
    }
    world.clear();
    world.ledger.assert_closed();
    let pool = world.core.view().pool();
    assert_eq!(pool.num_free_blocks(), pool.num_usable_blocks());
    assert!(!world.core.view().has_work() && world.core.next_deadline().is_none());
    world
}

/// One seed's run.
pub(crate) fn check(seed: u64) -> Result<(), String> {
    seeds::check(ROW, &workload(), seed, |workload| _ = run(&workload, Trace::off()))
}

/// The hash of everything that one seed's run gave out.
pub(crate) fn trace(seed: u64) -> u64 {
    run(&seeds::drawn(&workload(), seed), Trace::on()).trace.hash()
}

#[test]
fn scheduler_vllm() {
    seeds::run(ROW, check);
}

/// Properties hold easily where nothing happens: the workloads must meet what they are about.
#[test]
fn the_workloads_meet_every_end_preemptions_and_hits() {
    let mut met = [0; 7];
    for seed in 0..300 {
        let metrics = *run(&seeds::drawn(&workload(), seed), Trace::off()).last_shown();
        let (finished, cache) = (metrics.finished, metrics.prefix_cache);
        let happened =
            [finished.stop, finished.length, finished.aborted, finished.out_of_memory, metrics.num_preemptions];
        for (met, happened) in met.iter_mut().zip(happened.into_iter().chain([cache.hits, cache.preempted_hits])) {
            *met += u32::from(happened > 0);
        }
    }
    assert!(met.iter().all(|&cases| cases >= 30), "cases of 300 with stops, lengths, aborts, …: {met:?}");
}
