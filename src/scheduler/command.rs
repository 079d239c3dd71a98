//! What a scheduler is told, and what it answers.

use crate::config::SchedulingState;
use crate::error::CommandError;
use crate::handoff::HandoffKey;
use crate::request::{Request, SequenceId};

use super::remote::{RemoteKv, TransferReport};

/// A request on its way into a scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submission {
    /// Id given at the edge, never used again. Requests are served in the order of their submission,
    /// whatever their ids.
    pub sequence: SequenceId,
    /// The request's id as 128 bits: the bytes of its `Uuid`, or of a short string, big endian. It
    /// seeds generated tokens, and breaks ties where an engine compares ids as strings.
    pub tie_key: u128,
    /// The request.
    pub request: Request,
}

/// What a scheduler can be told. Legal at any time, also while a pass is in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// Take a request in.
    Submit(Submission),
    /// Forget every cached prefix. Fails, changing nothing, while any block is in use; with
    /// `reset_running_requests` the running requests are preempted first.
    ResetPrefixCache {
        /// Preempt every running request first.
        reset_running_requests: bool,
    },
    /// Change whether passes are planned and requests admitted.
    SetScheduling(SchedulingState),
    /// Leave a sequence out of the passes, or take it back in, because its reader has no room. It
    /// keeps its blocks; preempted, it stands aside and blocks nobody in the queue.
    Throttle {
        /// The sequence.
        sequence: SequenceId,
        /// Leave it out (true) or take it back in (false).
        throttled: bool,
    },
    /// Take in the source of a handoff: its blocks are held after its last token, until they are
    /// released or the lease ends.
    SubmitPrefill {
        /// The registration.
        handoff: HandoffKey,
        /// The request; usually for one output token.
        submission: Submission,
    },
    /// Take in the destination of a handoff. Blocks for its prompt are reserved when a pass begins and they
    /// fit, in the order of acceptance.
    ReserveDestination {
        /// The registration.
        handoff: HandoffKey,
        /// The request.
        submission: Submission,
    },
    /// The transfer to a reserved destination has ended well: its request can run.
    ///
    /// Where the destination's request is gone and its blocks are guarded, this ends the guard.
    ActivateDestination {
        /// The registration.
        handoff: HandoffKey,
        /// The token that the source sampled, which a destination that carries it over goes on after. One
        /// that computes the last prompt token again takes no notice of it.
        first_token: Option<u32>,
    },
    /// Free what a held source holds: its transfer has ended. Nothing to do if it is over.
    ReleaseSource {
        /// The registration.
        handoff: HandoffKey,
    },
    /// Remove a source wherever it is and free what it holds. Nothing to do if it is over.
    CancelSource {
        /// The registration.
        handoff: HandoffKey,
    },
    /// Remove a destination wherever it is and free what it holds, at once: no transfer writes there any
    /// more. Nothing to do if it is over.
    CancelDestination {
        /// The registration.
        handoff: HandoffKey,
    },
    /// The transfer to a reserved destination has ended badly. By the load-failure policy its request ends
    /// with [`crate::FinishReason::TransferFailed`], or computes what is missing.
    FailTransfer {
        /// The registration.
        handoff: HandoffKey,
        /// Leading prompt tokens whose KV is there and valid, those of its own cache included; whole
        /// blocks of them count. 0: nothing is.
        valid_tokens: u32,
    },
    /// Somebody still wants what a source holds: its lease is extended.
    Heartbeat {
        /// The registration.
        handoff: HandoffKey,
    },
    /// Take in a request whose prompt counts as transferred: it waits for its blocks and decodes, after
    /// computing its last prompt token.
    SubmitDecode(Submission),
    /// Take in a request with KV at another engine.
    SubmitRemote {
        /// The request.
        submission: Submission,
        /// Its KV elsewhere.
        remote: RemoteKv,
    },
    /// Transfers have ended or failed.
    Transfers(TransferReport),
    /// Say whether blocks will be freed soon by transfers in flight. While they will, and some are held, a
    /// running sequence that finds no block waits for one and nobody is preempted.
    ExpectFrees(bool),
}

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Applied {
    /// The request is in the queue, or waits for its arrival.
    Submitted,
    /// The prefix cache was asked to reset.
    PrefixCacheReset {
        /// Whether it was; `false` while blocks are in use.
        reset: bool,
        /// Whom it preempted, in order.
        preempted: Vec<SequenceId>,
    },
    /// The scheduling state is set.
    SchedulingSet,
    /// The sequence is throttled, or not any more.
    ThrottleSet,
    /// The command did what it says to this registration, or had to do nothing (a heartbeat for a source
    /// that is not held yet).
    Handoff,
    /// There is nothing under this registration: it is over, or no request was submitted under it.
    HandoffOver,
    /// The reports are taken.
    Transfers,
    /// The expectation is set.
    ExpectFrees,
}

/// What a cancel found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "whether the cancel removed something decides what its caller is told"]
pub enum Cancelled {
    /// The sequence was removed; its blocks are free.
    Removed,
    /// The sequence takes part in one more pass, as the engine's own rule wants it
    /// ([`crate::SglangConfig::abort_after_next_forward`]), and still holds its blocks. Whatever its tokens
    /// are, it ends there: the pass shows an output of it with [`crate::FinishReason::Cancelled`], and
    /// then its blocks are free. Cancelling it again gives the same answer.
    Ending,
    /// There was no such sequence: it has ended, or never was.
    Unknown,
}

/// The result of [`crate::Scheduler::apply`].
pub type ApplyResult = Result<Applied, CommandError>;
