//! Known-wrong variants of this crate, so that its tests can prove that they would see them.
//!
//! They exist under `--cfg standin_seeded_bugs` alone; in every other build [`seeded_bug!`] is the constant
//! `false`, and nothing here can be named. At most one is active, in the whole process: one build serves all.

/// Whether this build is to be wrong in the named way.
#[cfg(standin_seeded_bugs)]
macro_rules! seeded_bug {
    ($name:ident) => {
        $crate::seeded_bug::is_active($crate::seeded_bug::SeededBug::$name)
    };
}

/// Whether this build is to be wrong in the named way: it never is.
#[cfg(not(standin_seeded_bugs))]
macro_rules! seeded_bug {
    ($name:ident) => {
        false
    };
}

pub(crate) use seeded_bug;

#[cfg(standin_seeded_bugs)]
mod switches {
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// One thing done wrongly.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum SeededBug {
        /// Under FCFS the oldest running sequence is preempted, not the newest.
        PreemptsTheOldest,
    }

    impl SeededBug {
        /// All of them.
        pub const ALL: [Self; 1] = [Self::PreemptsTheOldest];
    }

    /// 0 for none, else one more than the place in `ALL`.
    static ACTIVE: AtomicUsize = AtomicUsize::new(0);

    /// Makes one bug active in this process, or none.
    pub fn activate(bug: Option<SeededBug>) {
        ACTIVE.store(bug.map_or(0, |bug| bug as usize + 1), Ordering::SeqCst);
    }

    pub(crate) fn is_active(bug: SeededBug) -> bool {
        ACTIVE.load(Ordering::Relaxed) == bug as usize + 1
    }
}

#[cfg(standin_seeded_bugs)]
pub(crate) use switches::is_active;
#[cfg(standin_seeded_bugs)]
pub use switches::{SeededBug, activate};
