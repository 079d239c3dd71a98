//! Runs that follow from a seed, and how a failing one is shown.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::thread;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// One row of the table in `docs/testing.md`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    /// Name of the test.
    pub(crate) test: &'static str,
    /// What sets the number of seeds.
    pub(crate) variable: &'static str,
    /// The number of seeds, if it is not set.
    pub(crate) seeds: u64,
}

/// Draws what follows from a seed.
fn runner(seed: u64) -> TestRunner {
    // Neighbouring seeds have little in common after this, and none gives the all-zero state.
    let mut state = [0; 16];
    state[..8].copy_from_slice(&seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    state[8..].copy_from_slice(&(seed ^ 0x5851_F42D_4C95_7F2D).to_le_bytes());
    let config = Config { failure_persistence: None, max_shrink_iters: 4_000, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::XorShift, &state))
}

/// What the strategy draws from a seed.
pub(crate) fn drawn<S: Strategy>(strategy: &S, seed: u64) -> S::Value {
    strategy.new_tree(&mut runner(seed)).expect("a strategy that always draws").current()
}

/// Whether what fails is made smaller. Where it only counts that something fails, that would be lost time.
static SHRINKS: AtomicBool = AtomicBool::new(true);

#[cfg(standin_seeded_bugs)]
pub(crate) fn never_shrink() {
    SHRINKS.store(false, Ordering::Relaxed);
}

/// Runs `test` on what the strategy draws from a seed. An error is the smallest failing run that was found.
pub(crate) fn check<S: Strategy>(row: Row, strategy: &S, seed: u64, test: impl Fn(S::Value)) -> Result<(), String>
where
    S::Value: Debug,
{
    let mut runner = runner(seed);
    let tree = strategy.new_tree(&mut runner).expect("a strategy that always draws");
    let drawn = tree.current();
    let Err(reason) = caught(|| test(drawn)) else { return Ok(()) };
    if !SHRINKS.load(Ordering::Relaxed) {
        return Err(reason);
    }
    let outcome = runner.run_one(tree, |value| caught(|| test(value)).map_err(TestCaseError::fail));
    let found = match outcome {
        Err(TestError::Fail(reason, value)) => format!("{reason}\n{value:#?}"),
        Err(TestError::Abort(reason)) => format!("shrinking was given up: {reason}"),
        Ok(_) => "it failed once and not again: it does not follow from its seed alone".to_owned(),
    };
    Err(format!("{}={seed}.. cargo test --test simulation {}\n{found}", row.variable, row.test))
}

/// Threads that share the seeds of a row.
const THREADS: usize = 2;

/// Runs the seeds of a row: 0, 1, … up to the number that its variable says, or from `SEED` on one alone with
/// `SEED..`. Of those that fail the smallest is shown, whatever the threads did first.
pub(crate) fn run(row: Row, check: impl Fn(u64) -> Result<(), String> + Sync) {
    let text = std::env::var(row.variable).ok();
    let text = text.as_deref().map(str::trim);
    let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("{} = {text}: N, or SEED..", row.variable));
    let seeds = match text.map(|text| (text, text.strip_suffix(".."))) {
        Some((_, Some(only))) => number(only)..number(only) + 1,
        Some((count, None)) => 0..number(count),
        None => 0..row.seeds,
    };
    let (next, end) = (AtomicU64::new(seeds.start), AtomicU64::new(seeds.end));
    let failures = Mutex::new(BTreeMap::new());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::SeqCst);
            if seed >= end.load(Ordering::SeqCst) {
                return;
            }
            if let Err(failure) = check(seed) {
                end.fetch_min(seed, Ordering::SeqCst);
                failures.lock().expect("no check panics").insert(seed, failure);
            }
        }
    };
    thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(work))));
    if let Some((_, failure)) = failures.into_inner().expect("no check panics").pop_first() {
        panic!("{failure}");
    }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs something, and gives back what it says where it panics; the panic prints nothing.
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    let was = QUIET.replace(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(run));
    QUIET.set(was);
    outcome.map_err(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        text.or_else(|| payload.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
    })
}
