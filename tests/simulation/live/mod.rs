//! The whole live engine under paused time, 64 clients a run, with everything that can go wrong around it.
//!
//! What each client saw is held against a model of its request alone, and what the engine showed against bounds:
//! a cancel takes no engine time, whoever is gone holds nothing at the next boundary, a token is seen within a tick
//! of its pass, nothing is left when `shutdown` resolves. Where nothing goes wrong a run equals one of the bare
//! scheduler, to the nanosecond.

mod by_hand;
mod client;
mod expected;
mod handoffs;
mod plan;
mod trace;
mod visible;
mod world;

use std::collections::BTreeMap;

use crate::seeds::{self, Row};
use plan::{Plan, plan};

pub(crate) const ROW: Row = Row { test: "live_runs", variable: "STANDIN_LIVE_SEEDS", seeds: 60 };
pub(crate) const REPLAY: Row = Row { test: "live_runs_repeat", variable: "STANDIN_REPLAY_SEEDS", seeds: 15 };

fn run(plan: &Plan) -> world::Outcome {
    let outcome = world::run(plan);
    expected::check(&outcome);
    if plan.calm {
        by_hand::check(&outcome);
    }
    outcome
}

/// One seed's run.
pub(crate) fn check(seed: u64) -> Result<(), String> {
    seeds::check(ROW, &plan(), seed, |plan| drop(run(&plan)))
}

/// One seed's run, twice: everything that can be seen is the same, in the same order and at the same times.
pub(crate) fn check_replay(seed: u64) -> Result<(), String> {
    seeds::check(REPLAY, &plan(), seed, |plan| {
        let [first, second] = [(); 2].map(|()| world::run(&plan).world.trace.hash());
        assert_eq!(first, second, "the second run differs");
    })
}

#[test]
fn live_runs() {
    seeds::run(ROW, check);
}

#[test]
fn live_runs_repeat() {
    seeds::run(REPLAY, check_replay);
}

/// Bounds hold easily where nothing happens: the runs must meet every end.
#[test]
fn the_live_runs_meet_every_end() {
    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
    let mut meet = |what: String| *ends.entry(what).or_default() += 1;
    for seed in 0..40 {
        let plan = seeds::drawn(&plan(), seed);
        let outcome = run(&plan);
        for record in &outcome.records {
            let submitted = format!("{:?}", record.submitted);
            meet(submitted.split('(').take(2).collect::<Vec<_>>().join("("));
            if let Some(finish) = record.terminal().and_then(|seen| seen.signal.finish) {
                meet(format!("{finish:?}").split(' ').next().unwrap_or_default().to_owned());
            }
            for event in record.handoff.iter().flat_map(|told| &told.events) {
                meet(format!("{event:?}").split(' ').next().unwrap_or_default().to_owned());
            }
        }
        meet(format!("{:?}", outcome.shutdown).chars().take(24).collect());
    }
    for end in [
        "Length",
        "Stop",
        "Cancelled",
        "SlowConsumer",
        "EngineStopped",
        "Failed",
        "Dropped",
        "Unused",
        "Refused(\"DuplicateId",
        "SourceHeld",
        "SourceEnded",
        "DestinationReserved",
        "DestinationEnded",
    ] {
        assert!(ends.contains_key(end), "no {end} in {ends:#?}");
    }
}

/// `STANDIN_LIVE_SHOW=17 cargo test --test simulation live_run_shown -- --ignored --nocapture`
#[test]
#[ignore = "for a look at the run of one seed"]
fn live_run_shown() {
    let seed = std::env::var(trace::SHOW).ok().and_then(|seed| seed.parse().ok()).expect("a seed in STANDIN_LIVE_SHOW");
    let plan = seeds::drawn(&plan(), seed);
    println!("{:?}\n{:?} {:?}", plan.engine, plan.others, plan.end);
    for (client, plan) in plan.clients.iter().enumerate() {
        println!("client {client}: {plan:?}");
    }
    drop(run(&plan));
}
