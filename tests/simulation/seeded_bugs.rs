//! The harness finds what it is there to find: each seeded bug is caught by the row and at the seed that
//! `docs/testing.md` says, and without a bug that very seed passes.
//!
//! `RUSTFLAGS="--cfg standin_seeded_bugs" cargo test --profile checked --test simulation seeded_bugs`. Only these
//! tests run then: a bug is active in the whole process.

use standin::seeded_bug::{SeededBug, activate};

use crate::{coordinator, live, replay, scheduler, scheduler_handoff, scheduler_sglang, seeds};

/// Seeds within which each bug must be caught.
const SEEDS: u64 = 200;

/// A row that can be run seed by seed.
struct Harness {
    name: &'static str,
    check: fn(u64) -> Result<(), String>,
}

const VLLM: Harness = Harness { name: scheduler::ROW.test, check: scheduler::check };
const SGLANG: Harness = Harness { name: scheduler_sglang::ROW.test, check: scheduler_sglang::check };
const HANDOFF: Harness = Harness { name: scheduler_handoff::ROW.test, check: scheduler_handoff::check };
const COORDINATOR: Harness = Harness { name: coordinator::ROW.test, check: coordinator::check };
const REPLAY: Harness = Harness { name: replay::ROW.test, check: replay::check };
const LIVE: Harness = Harness { name: live::ROW.test, check: live::check };
const LIVE_TWICE: Harness = Harness { name: live::REPLAY.test, check: live::check_replay };

/// The row that catches a bug, and the first seed at which it does.
fn caught(bug: SeededBug) -> (Harness, u64) {
    use SeededBug::*;
    match bug {
        PreemptsTheOldest => (VLLM, 5),
        BudgetIsOneTooMany => (VLLM, 2),
        PreemptionKeepsBlocks => (VLLM, 0),
        FullHitComputesNothing => (VLLM, 6),
        ResumedHitIsTheFirst => (VLLM, 11),
        FreeHitsNeedNoRoom => (VLLM, 0),
        FreesHeadFirst => (VLLM, 0),
        FreesWhatIsStillWritten => (HANDOFF, 2),
        SupersedesBeforeItChecks => (HANDOFF, 5),
        ReleasesBeforeItIsHeld => (HANDOFF, 0),
        GenerationIsNotCompared => (HANDOFF, 0),
        HeartbeatShortensTheLease => (HANDOFF, 16),
        EvictsTheYoungest => (SGLANG, 2),
        SplitForgetsHits => (SGLANG, 4),
        ListsEvictionsInHashOrder => (REPLAY, 0),
        RetractsByPromptAlone => (SGLANG, 20),
        AdmissionForgetsThePage => (SGLANG, 3),
        StoresPromptsAtTheEnd => (SGLANG, 0),
        AnyAnswerConfirms => (COORDINATOR, 7),
        CancelsTheSourceFirst => (COORDINATOR, 0),
        TransfersCountAsWaiting => (COORDINATOR, 7),
        OverflowOnTheLastTokenEndsLength => (LIVE, 14),
        DropDoesNotCancel => (LIVE, 0),
        ForgetsDroppedSubmits => (LIVE, 8),
        FreesAfterTheAnswer => (LIVE, 1),
        TwoCancelsRemove => (LIVE, 0),
        CancelsWaitForTheBoundary => (LIVE, 0),
        ReadsTheLanesAtRandom => (LIVE_TWICE, 1),
        ForwardsAfterACancel => (LIVE, 43),
        FullQueueRefusesTheEnd => (LIVE, 0),
        RoomIsNotTold => (LIVE, 0),
        ShowsMetricsBeforeOutputs => (LIVE, 0),
        AnchorsAtWakeUp => (LIVE, 6),
        OneDuePassATick => (LIVE, 0),
        ForgetsPreparedAtTheStop => (LIVE, 4),
        StopsInMapOrder => (LIVE, 3),
        GenerationNotBumped => (LIVE, 0),
        LostControlKeepsItsBlocks => (LIVE, 0),
        EndIsReadBeforeTheIdIsFree | LooksForTheStopTooEarly => {
            unreachable!("races: src/live/actor/interleavings_test.rs")
        }
    }
}

fn first_seed(bug: SeededBug, harness: &Harness, seeds: u64) -> Option<u64> {
    activate(Some(bug));
    let first = (0..seeds).find(|&seed| (harness.check)(seed).is_err());
    activate(None);
    first
}

/// A bug that is caught later than before has become harder to see, and one that is caught earlier has its seed to
/// be written down.
#[test]
fn seeded_bugs_are_each_caught_where_the_table_says() {
    seeds::never_shrink();
    let table = include_str!("../../docs/testing.md");
    let mut wrong = Vec::new();
    for bug in SeededBug::ALL {
        let (harness, expected) = caught(bug);
        assert_eq!((harness.check)(expected), Ok(()), "{bug:?} is off");
        let first = first_seed(bug, &harness, SEEDS);
        let line = table.lines().find(|line| line.starts_with(&format!("| `{bug:?}` |")));
        let end = format!("| `{}` | {expected} |", harness.name);
        if first != Some(expected) || !line.is_some_and(|line| line.ends_with(&end)) {
            wrong.push((bug, harness.name, first, line));
        }
    }
    assert!(wrong.is_empty(), "first seeds, and the lines of docs/testing.md: {wrong:#?}");
}

/// Which rows see which bug, for the table: `cargo test … seeded_bugs -- --ignored --nocapture`.
#[test]
#[ignore = "for whoever writes the table"]
fn seeded_bugs_by_row() {
    seeds::never_shrink();
    for bug in SeededBug::ALL {
        let rows = [VLLM, SGLANG, HANDOFF, COORDINATOR, REPLAY, LIVE, LIVE_TWICE];
        let seen = rows.map(|row| first_seed(bug, &row, SEEDS).map(|seed| (row.name, seed)));
        println!("{bug:?}: {:?}", seen.into_iter().flatten().collect::<Vec<_>>());
    }
}
