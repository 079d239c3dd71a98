//! SGLang's pure core under random workloads on random small engines (engine-semantics §7.1).
//!
//! After every operation: pages are conserved, every request is in one place or has ended once, nobody idles who
//! could run, KV events tell the cache exactly, tokens are the promised ones, and everything that can be seen, page
//! ids, queue order and the budget's numbers included, is what an independent model of the rules predicts. At the
//! end everything ends, and all pages are free.
//!
//! The model does not predict the policies `random` (it has another shuffle) and `dfs-weight`: a quarter of the
//! runs, which are held to everything else.

mod invariants;
mod model;
mod model_decode;
mod model_prefill;
mod model_tree;
mod workload;
mod world;

use crate::seeds::{self, Row};
use crate::trace::Trace;
use workload::{Workload, workload};
use world::World;

pub(crate) const ROW: Row = Row { test: "scheduler_sglang", variable: "STANDIN_SCHEDULER_SEEDS", seeds: 250 };

/// Runs a workload to its end.
fn run(workload: &Workload, trace: Trace) -> World {
    let mut world = World::new(workload, trace);
    for operation in &workload.operations {
        world.perform(operation);
    }
    if workload.options.end_outgrown_requests {
        world.drain();
    }
    world.clear();
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
fn scheduler_sglang() {
    seeds::run(ROW, check);
}

/// Properties hold easily where nothing happens: the workloads must meet what they are about.
#[test]
fn the_workloads_meet_retractions_evictions_chunks_and_mixed_batches() {
    let mut met = [0; 9];
    for seed in 0..200 {
        let world = run(&seeds::drawn(&workload(), seed), Trace::off());
        let (metrics, of_run) = (world.metrics, &world.met);
        let happened = [
            of_run.retractions > 0,
            of_run.chunks > 0,
            of_run.mixed > 0,
            of_run.put_off > 0,
            metrics.finished.out_of_memory > 0,
            metrics.finished.stop > 0,
            metrics.finished.aborted > 0,
            metrics.prefix_cache.hits > 0,
            metrics.prefix_cache.preempted_hits > 0,
        ];
        for (met, happened) in met.iter_mut().zip(happened) {
            *met += u32::from(happened);
        }
    }
    assert!(met.iter().all(|&runs| runs >= 20), "runs of 200 with retractions, chunks, …: {met:?}");
}
