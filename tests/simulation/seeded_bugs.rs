//! The harness finds what it is there to find: with each seeded bug some seed of a few fails, and without one none.
//!
//! `RUSTFLAGS="--cfg standin_seeded_bugs" cargo test --test simulation seeded_bugs`. Only these tests run then: a
//! bug is active in the whole process.

use standin::seeded_bug::{SeededBug, activate};

use crate::scheduler;

/// Seeds within which each bug must be caught.
const SEEDS: u64 = 200;

/// The row that catches a bug.
fn harness(bug: SeededBug) -> fn(u64) -> Result<(), String> {
    match bug {
        SeededBug::PreemptsTheOldest => scheduler::check,
    }
}

#[test]
fn seeded_bugs_are_each_caught_and_nothing_is_without_one() {
    let mut missed = Vec::new();
    for bug in SeededBug::ALL {
        let check = harness(bug);
        activate(Some(bug));
        let first = (0..SEEDS).find(|&seed| check(seed).is_err());
        activate(None);
        match first {
            Some(seed) => {
                println!("seeded bug {bug:?}: caught by seed {seed}");
                assert_eq!(check(seed), Ok(()), "{bug:?} is off");
            }
            None => missed.push(bug),
        }
    }
    assert_eq!(missed, [], "not caught within {SEEDS} seeds");
}
