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
        /// A pass gives out one token more than it may.
        BudgetIsOneTooMany,
        /// A preempted sequence keeps its blocks.
        PreemptionKeepsBlocks,
        /// A prompt that is cached whole leaves no token to compute.
        FullHitComputesNothing,
        /// What a resumed request finds in the cache is taken for what it found at first.
        ResumedHitIsTheFirst,
        /// A hit block that is free is not counted as needed.
        FreeHitsNeedNoRoom,
        /// Of a sequence's cached blocks the first is evicted first.
        FreesHeadFirst,
        /// The blocks of a request that is cancelled while it loads are free at once.
        FreesWhatIsStillWritten,
        /// A registration takes another one's place, and then its request is refused.
        SupersedesBeforeItChecks,
        /// A source can be released while its request runs.
        ReleasesBeforeItIsHeld,
        /// A command is taken for whatever registration its handoff has.
        GenerationIsNotCompared,
        /// A heartbeat sets the lease's end, even to an earlier time.
        HeartbeatShortensTheLease,
        /// SGLang's LRU evicts what was used last.
        EvictsTheYoungest,
        /// The first half of a split node was never stored.
        SplitForgetsHits,
        /// The pages of an evicted node are listed in the order of a map.
        ListsEvictionsInHashOrder,
        /// The longest prompt is retracted, however much it has produced.
        RetractsByPromptAlone,
        /// SGLang's admission does not reckon with the page that rounding up takes.
        AdmissionForgetsThePage,
        /// A prompt can be found when its request has ended, not when it is computed.
        StoresPromptsAtTheEnd,
        /// Whatever action was done, the activation counts as confirmed.
        AnyAnswerConfirms,
        /// A failed handoff cancels its source first.
        CancelsTheSourceFirst,
        /// The time of a transfer counts towards the handoff's time-out.
        TransfersCountAsWaiting,
        // The live engine.
        /// A last token that finds the queue full is delivered, and the request has ended by length.
        OverflowOnTheLastTokenEndsLength,
        /// A dropped stream leaves no entry in the cancellation lane.
        DropDoesNotCancel,
        /// A dropped `submit` leaves none, if the actor has not taken the request yet.
        ForgetsDroppedSubmits,
        /// A cancel during a pass is answered at once and carried out at its end.
        FreesAfterTheAnswer,
        /// A cancel of a request that another one removed says that it did.
        TwoCancelsRemove,
        /// Cancels are read between passes alone.
        CancelsWaitForTheBoundary,
        /// Which lane is read first is a matter of luck.
        ReadsTheLanesAtRandom,
        /// A cancel does not stop forwarding.
        ForwardsAfterACancel,
        /// The terminal signal has no place of its own.
        FullQueueRefusesTheEnd,
        /// Nobody is told that a throttled reader has made room.
        RoomIsNotTold,
        /// The metrics are shown before the outputs of their pass.
        ShowsMetricsBeforeOutputs,
        /// A pass begins when its timer has fired, not where the last one was modelled to end.
        AnchorsAtWakeUp,
        /// Passes that are due already wait for a timer each.
        OneDuePassATick,
        /// Requests that were prepared and not submitted keep their streams open when the engine stops.
        ForgetsPreparedAtTheStop,
        /// Streams that the engine's end ends, end in the order of a map.
        StopsInMapOrder,
        /// All registrations of a handoff have one generation.
        GenerationNotBumped,
        /// The drop of a handoff's last control releases nothing.
        LostControlKeepsItsBlocks,
        // Races, which only another order of threads shows.
        /// A terminal signal can be read before its route leaves the map.
        EndIsReadBeforeTheIdIsFree,
        /// A registration looks for the stop cause before it enters the map.
        LooksForTheStopTooEarly,
    }

    impl SeededBug {
        /// All that a simulation on one thread can see.
        pub const ALL: [Self; 38] = [
            Self::PreemptsTheOldest,
            Self::BudgetIsOneTooMany,
            Self::PreemptionKeepsBlocks,
            Self::FullHitComputesNothing,
            Self::ResumedHitIsTheFirst,
            Self::FreeHitsNeedNoRoom,
            Self::FreesHeadFirst,
            Self::FreesWhatIsStillWritten,
            Self::SupersedesBeforeItChecks,
            Self::ReleasesBeforeItIsHeld,
            Self::GenerationIsNotCompared,
            Self::HeartbeatShortensTheLease,
            Self::EvictsTheYoungest,
            Self::SplitForgetsHits,
            Self::ListsEvictionsInHashOrder,
            Self::RetractsByPromptAlone,
            Self::AdmissionForgetsThePage,
            Self::StoresPromptsAtTheEnd,
            Self::AnyAnswerConfirms,
            Self::CancelsTheSourceFirst,
            Self::TransfersCountAsWaiting,
            Self::OverflowOnTheLastTokenEndsLength,
            Self::DropDoesNotCancel,
            Self::ForgetsDroppedSubmits,
            Self::FreesAfterTheAnswer,
            Self::TwoCancelsRemove,
            Self::CancelsWaitForTheBoundary,
            Self::ReadsTheLanesAtRandom,
            Self::ForwardsAfterACancel,
            Self::FullQueueRefusesTheEnd,
            Self::RoomIsNotTold,
            Self::ShowsMetricsBeforeOutputs,
            Self::AnchorsAtWakeUp,
            Self::OneDuePassATick,
            Self::ForgetsPreparedAtTheStop,
            Self::StopsInMapOrder,
            Self::GenerationNotBumped,
            Self::LostControlKeepsItsBlocks,
        ];
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
