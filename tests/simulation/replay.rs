//! The same seed twice: everything that the core gives out, answers, passes and effects, is the same to the letter.

use std::collections::BTreeSet;

use crate::seeds::{self, Row};
use crate::{scheduler, scheduler_handoff, scheduler_sglang};

pub(crate) const ROW: Row = Row { test: "replay_core", variable: "STANDIN_REPLAY_SEEDS", seeds: 50 };

/// A row's name, and the hash of what one seed's run of it gave out.
type Traced = (&'static str, fn(u64) -> u64);

const TRACED: [Traced; 3] = [
    (scheduler::ROW.test, scheduler::trace),
    (scheduler_sglang::ROW.test, scheduler_sglang::trace),
    (scheduler_handoff::ROW.test, scheduler_handoff::trace),
];

/// One seed's run of every row, twice.
pub(crate) fn check(seed: u64) -> Result<(), String> {
    for (row, trace) in TRACED {
        // What fails in its own row is that row's to show.
        let run = || seeds::caught(|| trace(seed)).unwrap_or_default();
        let (first, second) = (run(), run());
        if first != second {
            return Err(format!("{row}: seed {seed} gave {first:#018x}, then {second:#018x}"));
        }
    }
    Ok(())
}

#[test]
fn replay_core() {
    seeds::run(ROW, check);
}

/// Equal hashes say something only if other runs have others.
#[test]
fn other_seeds_give_other_traces() {
    for (row, trace) in TRACED {
        let traces: BTreeSet<u64> = (0..20).map(trace).collect();
        assert_eq!(traces.len(), 20, "{row}");
    }
}
