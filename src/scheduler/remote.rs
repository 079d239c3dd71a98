//! KV of a request that is, or will be, at another engine.
//!
//! This is what an engine's KV connector says to its scheduler. The handoff commands are made of it, and
//! recorded decisions of the real engine are replayed through it.

use crate::handoff::HandoffKey;
use crate::kv_event::BlockId;
use crate::output::FinishReason;
use crate::request::SequenceId;

/// What another engine has for a request, and what is kept for another one at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoteKv {
    /// KV that can be loaded; `None`: there is none.
    pub copy: Option<RemoteCopy>,
    /// Whether the blocks stay after the end.
    pub keep: KeepBlocks,
}

/// KV at another engine that can be loaded in place of computing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteCopy {
    /// Leading prompt tokens that it covers.
    pub tokens: u32,
    /// When it is loaded.
    pub load: LoadTiming,
    /// Whether it is still there after a load.
    pub lasting: bool,
    /// So many look-ups are answered with "ask again in the next pass".
    pub undecided_look_ups: u32,
}

/// When remote KV is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadTiming {
    /// Between passes: the request waits with its blocks until the end of the load is reported.
    BetweenPasses,
    /// Within the pass that admits the request; the rest of its prompt is computed in the same pass.
    WithinPass,
}

/// Whether a request's blocks stay after its end, to be read by another engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeepBlocks {
    /// They are freed.
    #[default]
    Never,
    /// They stay if it has all its tokens, and are freed if it is cancelled.
    WhenFinished,
    /// They stay, also if it is cancelled while it runs.
    Always,
}

/// What the worker that transfers KV reports. What is said of others than those concerned is ignored, and of
/// requests that belong to a handoff: those have commands of their own.
///
/// A report belongs to the end of the pass in flight, or to now if there is none: invalid blocks count before the
/// pass gives its tokens, then come the ends of that pass, failures, the ends of loads and those of sends, each
/// in the order of its list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TransferReport {
    /// Blocks of loads whose content is not valid.
    pub invalid_blocks: Vec<BlockId>,
    /// Loads of which nothing is valid.
    pub failed: Vec<SequenceId>,
    /// Loads that have ended.
    pub received: Vec<SequenceId>,
    /// Sends that have ended: what was kept for them can be freed.
    pub sent: Vec<SequenceId>,
}

/// A call on the KV connector, as the real engine makes it. For checks and tools
/// ([`crate::Scheduler::with_connector_log`]).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectorCall {
    /// How many tokens can be loaded beyond those that are in the own cache?
    Matched {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens in the own cache.
        local_tokens: u32,
        /// Tokens that can be loaded; `None`: ask again later.
        answer: Option<u32>,
        /// Whether they are loaded between passes.
        between_passes: bool,
    },
    /// Blocks were given to a sequence at the start of its load or of its run.
    Allocated {
        /// The sequence.
        sequence: SequenceId,
        /// All its blocks.
        blocks: Vec<BlockId>,
        /// Tokens to be loaded into them.
        external_tokens: u32,
    },
    /// A sequence has ended.
    Finished {
        /// The sequence.
        sequence: SequenceId,
        /// How.
        finish: FinishReason,
        /// The blocks of its computed tokens.
        blocks: Vec<BlockId>,
        /// Its computed tokens.
        computed_tokens: u32,
        /// Whether the connector keeps the blocks for another engine.
        kept: bool,
    },
}

/// One sequence's dealings with other engines.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) copy: CopyState,
    pub(crate) keep: KeepBlocks,
    /// Prompt tokens that the first run took over from a copy.
    pub(crate) num_external: u32,
    /// The handoff that it takes part in.
    pub(crate) handoff: Option<HandoffKey>,
}

impl Remote {
    /// The dealings of a request whose prompt has `prompt_tokens` tokens.
    pub(crate) fn new(remote: RemoteKv, handoff: Option<HandoffKey>, prompt_tokens: u32) -> Box<Self> {
        let copy = match remote.copy {
            None => CopyState::None,
            Some(copy) => CopyState::Unasked(RemoteCopy { tokens: copy.tokens.min(prompt_tokens), ..copy }),
        };
        Box::new(Self { copy, keep: remote.keep, num_external: 0, handoff })
    }

    /// Whether the blocks stay at an end like this one.
    pub(crate) fn keeps(&self, finish: FinishReason) -> bool {
        match self.keep {
            KeepBlocks::Never => false,
            KeepBlocks::WhenFinished => matches!(finish, FinishReason::Stop { .. } | FinishReason::Length),
            KeepBlocks::Always => {
                matches!(finish, FinishReason::Stop { .. } | FinishReason::Length | FinishReason::Cancelled)
            }
        }
    }
}

/// How far a sequence is with the copy of its KV at another engine.
///
/// ```text
///             │ a look-up …                                     │ blocks were
///             │ is undecided   finds tokens to    finds nothing │ given to the
///             │                load between       to wait for   │ sequence
///             │                passes                           │
///  ───────────┼─────────────────────────────────────────────────┼──────────────────────────
///  None       │ cannot be      cannot be          None          │ None
///  any other  │ Undecided      Loadable           Settled       │ Settled if the copy lasts,
///             │                                                 │ else None: it is used up
/// ```
/// `Unasked`, `Undecided` and `Loadable` count as waiting to start a load. A `Settled` copy that lasts is `Unasked` again
/// when the blocks are taken away, where the engine kind loads it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyState {
    /// There is none, or it is used up.
    None,
    /// No look-up has asked for it.
    Unasked(RemoteCopy),
    /// The last look-up was told to ask again later.
    Undecided(RemoteCopy),
    /// The last look-up found tokens to load between passes, and had no room for them.
    Loadable(RemoteCopy),
    /// There is nothing to wait for: the last look-up said so, or blocks have been given since.
    Settled(RemoteCopy),
}

/// What a look-up found in a copy beyond the tokens in the own cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Not known yet.
    Undecided,
    /// So many tokens.
    Tokens(u32, LoadTiming),
}

impl CopyState {
    fn copy(self) -> Option<RemoteCopy> {
        match self {
            Self::None => None,
            Self::Unasked(copy) | Self::Undecided(copy) | Self::Loadable(copy) | Self::Settled(copy) => Some(copy),
        }
    }

    /// Whether the sequence waits to start a load.
    pub(crate) fn is_wanted(self) -> bool {
        matches!(self, Self::Unasked(_) | Self::Undecided(_) | Self::Loadable(_))
    }

    /// Whether there is one, asked for or not.
    pub(crate) fn exists(self) -> bool {
        self.copy().is_some()
    }

    /// Asks what can be loaded beyond `local` tokens of a sequence of `num_tokens`.
    pub(crate) fn ask(&mut self, local: u32, num_tokens: u32) -> Answer {
        let Some(mut copy) = self.copy() else {
            return Answer::Tokens(0, LoadTiming::WithinPass);
        };
        if let Some(left) = copy.undecided_look_ups.checked_sub(1) {
            copy.undecided_look_ups = left;
            *self = Self::Undecided(copy);
            return Answer::Undecided;
        }
        // What is loaded within a pass is followed by a token to compute in it.
        let most = match copy.load {
            LoadTiming::BetweenPasses => copy.tokens,
            LoadTiming::WithinPass => copy.tokens.min(num_tokens - 1),
        };
        let tokens = most.saturating_sub(local);
        let waits = tokens > 0 && copy.load == LoadTiming::BetweenPasses;
        *self = if waits { Self::Loadable(copy) } else { Self::Settled(copy) };
        Answer::Tokens(tokens, copy.load)
    }

    /// Whether a load takes no time.
    pub(crate) fn loads_at_once(self) -> bool {
        self.copy().is_some_and(|copy| copy.load == LoadTiming::WithinPass)
    }

    /// Notes that blocks were taken away again: a copy that lasts is wanted again.
    pub(crate) fn taken_away(&mut self) {
        if let Self::Settled(copy) = *self {
            *self = Self::Unasked(copy);
        }
    }

    /// Notes that blocks were given to the sequence.
    pub(crate) fn allocated(&mut self) {
        *self = match self.copy() {
            Some(copy) if copy.lasting => Self::Settled(copy),
            _ => Self::None,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: RemoteCopy =
        RemoteCopy { tokens: 10, load: LoadTiming::BetweenPasses, lasting: false, undecided_look_ups: 1 };

    #[test]
    fn a_copy_is_asked_for_until_it_answers_and_is_used_up_by_the_first_blocks() {
        let mut copy = CopyState::Unasked(COPY);
        assert_eq!((copy.ask(4, 12), copy.is_wanted()), (Answer::Undecided, true));
        assert_eq!((copy.ask(4, 12), copy.is_wanted()), (Answer::Tokens(6, LoadTiming::BetweenPasses), true));
        assert_eq!((copy.ask(12, 16), copy.is_wanted()), (Answer::Tokens(0, LoadTiming::BetweenPasses), false));
        copy.allocated();
        assert_eq!((copy, copy.ask(0, 12)), (CopyState::None, Answer::Tokens(0, LoadTiming::WithinPass)));
    }

    #[test]
    fn a_lasting_copy_stays_but_is_not_wanted_before_it_is_asked_for_again() {
        let mut copy = CopyState::Unasked(RemoteCopy { lasting: true, undecided_look_ups: 0, ..COPY });
        copy.ask(0, 12);
        copy.allocated();
        assert!(!copy.is_wanted());
        assert_eq!((copy.ask(8, 14), copy.is_wanted()), (Answer::Tokens(2, LoadTiming::BetweenPasses), true));
    }

    #[test]
    fn a_lasting_copy_is_wanted_again_when_its_blocks_are_taken_away() {
        let lasting = RemoteCopy { lasting: true, undecided_look_ups: 0, ..COPY };
        let mut copy = CopyState::Unasked(lasting);
        copy.allocated();
        assert!(copy.exists() && !copy.is_wanted() && !copy.loads_at_once());
        copy.taken_away();
        assert_eq!((copy, copy.is_wanted()), (CopyState::Unasked(lasting), true));
        let mut used_up = CopyState::None;
        used_up.taken_away();
        assert!(!used_up.exists());
    }

    #[test]
    fn a_load_within_a_pass_leaves_a_token_to_compute_and_a_copy_is_no_longer_than_the_prompt() {
        let copy = RemoteCopy { tokens: 99, load: LoadTiming::WithinPass, lasting: false, undecided_look_ups: 0 };
        let mut remote = Remote::new(RemoteKv { copy: Some(copy), keep: KeepBlocks::Never }, None, 12);
        assert_eq!(remote.copy.ask(4, 12), Answer::Tokens(7, LoadTiming::WithinPass));
        assert!(!remote.copy.is_wanted());
    }

    #[test]
    fn what_is_kept_depends_on_the_end() {
        let kept = |keep| {
            let remote = Remote::new(RemoteKv { copy: None, keep }, None, 1);
            let ends = [
                FinishReason::Stop { stop_token: None },
                FinishReason::Length,
                FinishReason::Cancelled,
                FinishReason::OutOfMemory,
                FinishReason::TransferFailed,
            ];
            ends.map(|finish| remote.keeps(finish))
        };
        assert_eq!(kept(KeepBlocks::Never), [false; 5]);
        assert_eq!(kept(KeepBlocks::WhenFinished), [true, true, false, false, false]);
        assert_eq!(kept(KeepBlocks::Always), [true, true, true, false, false]);
    }
}
