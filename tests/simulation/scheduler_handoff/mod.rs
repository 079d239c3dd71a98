//! The pure core's sides of handoffs under random commands: late, early, twice, of the other side, of a registration
//! that is over or superseded, among ordinary requests, loads, resets, throttles and cancels.
//!
//! After every operation: each command's answer, the registrations, who is held until when, and the facts in their
//! order are what the model of the contract predicts; blocks are conserved, and nobody loses a block that a transfer
//! reads or writes; the next destination in the queue waits for blocks alone. At the end every registration has
//! ended once, and all blocks are free. Which requests a pass serves is not predicted here but in `scheduler`.

mod invariants;
mod model;
mod workload;
mod world;

use std::collections::BTreeMap;

use crate::seeds::{self, Row};
use crate::trace::Trace;
use workload::{Workload, workload};
use world::World;

pub(crate) const ROW: Row = Row { test: "scheduler_handoff", variable: "STANDIN_SCHEDULER_SEEDS", seeds: 250 };

/// Runs a workload to its end.
fn run(workload: &Workload, trace: Trace) -> World {
    let mut world = World::new(workload, trace);
    for operation in &workload.operations {
        world.perform(operation);
    }
    world.drain();
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
fn scheduler_handoff() {
    seeds::run(ROW, check);
}

/// Properties hold easily where nothing happens: the workloads must meet every answer and every end.
#[test]
fn the_workloads_meet_every_fact_and_every_answer() {
    let (mut met, mut preemptions) = (BTreeMap::new(), 0);
    for seed in 0..300 {
        let world = run(&seeds::drawn(&workload(), seed), Trace::off());
        preemptions += world.metrics.num_preemptions;
        let answers = world.met.answers.into_iter().map(|(answer, count)| (answer.to_owned(), count));
        for (name, count) in answers.chain(world.met.facts) {
            *met.entry(name).or_insert(0) += count;
        }
    }
    assert!(met.len() == 3 + 2 + 4 + 4 && met.values().all(|&count| count >= 20), "{met:?}");
    assert!(preemptions > 100, "{preemptions} preemptions");
}
