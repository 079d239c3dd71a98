//! The pure core: a scheduler as a value.
//!
//! A [`Scheduler`] is told what happened and what time it is, and answers with what to do. It reads no
//! clock, starts no task, takes no lock and logs nothing, so the same code runs behind the live engine,
//! in offline runs and against recorded decisions of the real engine:
//!
//! ```
//! use standin::{Command, EngineConfig, EngineTime, Request, Scheduler, SequenceId, Submission};
//!
//! let mut scheduler = Scheduler::new(&EngineConfig::default())?;
//! let submission = Submission { sequence: SequenceId(0), tie_key: 0, request: Request::new(vec![1; 100], 3) };
//! scheduler.apply(Command::Submit(submission), EngineTime::ZERO)?;
//!
//! let (mut now, mut tokens) = (EngineTime::ZERO, 0);
//! while let Some(pass) = scheduler.begin_pass(now) {
//!     now = pass.ends_at();
//!     let effects = scheduler.finish_pass(pass, now);
//!     tokens += effects.outputs.iter().filter(|output| output.token.is_some()).count();
//!     scheduler.recycle(effects);
//! }
//! assert_eq!(tokens, 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod book;
mod command;
mod engine_core;
mod handoff;
mod holds;
mod load_queue;
mod pass;
mod remote;
mod running;
mod sequence;
mod sequences;
mod sglang;
mod view;
mod vllm;
mod waiting;

pub use command::{Applied, ApplyResult, Cancelled, Command, Submission};
pub use handoff::{DestinationEnd, DestinationState, HandoffFact, HandoffSide, SourceEnd, SourceState};
pub use pass::{Admitted, Effects, Output, Pass, PassRow, RowKind};
pub use remote::{ConnectorCall, KeepBlocks, LoadTiming, RemoteCopy, RemoteKv, TransferReport};
pub use view::{PoolView, SequenceStatus, SequenceView, TokenPoolView};

use crate::config::{EngineConfig, EngineKind};
use crate::error::ConfigError;
use crate::handoff::{HandoffId, HandoffKey};
use crate::kv_event::KvEvent;
use crate::request::SequenceId;
use crate::time::EngineTime;
use crate::timing::PassTiming;

use engine_core::EngineCore;
use handoff::HandoffTable;

/// One scheduler rank: queues, KV blocks and the plan of the next pass.
#[derive(Debug)]
pub struct Scheduler {
    core: Core,
    /// The boxes of a pass and of effects that were given out without them.
    pass_box: Option<Box<Pass>>,
    effects_box: Option<Box<Effects>>,
}

/// The engine kinds. Matched in this file alone.
#[derive(Debug)]
enum Core {
    Vllm(Box<vllm::VllmCore>),
    Sglang(Box<sglang::SglangCore>),
}

impl Scheduler {
    /// A scheduler with the timing model that the configuration names.
    ///
    /// Odd values are accepted where they cannot make the scheduler panic; use
    /// [`EngineConfig::validate`] for the checks of a real engine's start.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn new(config: &EngineConfig) -> Result<Self, ConfigError> {
        config.validate_core()?;
        let core = match &config.kind {
            EngineKind::Vllm(options) => Core::Vllm(Box::new(vllm::VllmCore::new(config, options))),
            EngineKind::Sglang(options) => Core::Sglang(Box::new(sglang::SglangCore::new(config, options))),
        };
        Ok(Self { core, pass_box: None, effects_box: None })
    }

    /// Uses the caller's timing model.
    #[must_use]
    pub fn with_timing(mut self, timing: Box<dyn PassTiming>) -> Self {
        match &mut self.core {
            Core::Vllm(core) => core.book_mut().timing = timing,
            Core::Sglang(core) => core.book_mut().timing = timing,
        }
        self
    }

    /// Records KV events (off at first: they cost memory and time).
    #[must_use]
    pub fn with_kv_events(mut self) -> Self {
        match &mut self.core {
            Core::Vllm(core) => core.record_kv_events(),
            Core::Sglang(core) => core.record_kv_events(),
        }
        self
    }

    /// Records the calls on the KV connector, for checks and tools (off at first).
    #[must_use]
    pub fn with_connector_log(mut self) -> Self {
        match &mut self.core {
            Core::Vllm(core) => core.log_connector_calls(),
            Core::Sglang(_) => {}
        }
        self
    }

    /// The calls on the KV connector since they were last taken, in order.
    pub fn take_connector_calls(&mut self) -> Vec<ConnectorCall> {
        match &mut self.core {
            Core::Vllm(core) => core.take_connector_calls(),
            Core::Sglang(_) => Vec::new(),
        }
    }

    /// Takes a command.
    ///
    /// `now` is when the command was sent. It may lie before or after the start of the pass that is
    /// planned next: a submission is seen by passes that begin at or after both `now` and the
    /// request's arrival (at a tie the boundary of a pass comes first).
    ///
    /// # Errors
    /// Why it was refused; nothing has changed then.
    pub fn apply(&mut self, command: Command, now: EngineTime) -> ApplyResult {
        match &mut self.core {
            Core::Vllm(core) => core.apply(command, now),
            Core::Sglang(core) => core.apply(command, now),
        }
    }

    /// Removes a sequence, wherever it is, and frees its blocks at once. A pass in flight goes on and
    /// shows nothing of it. Blocks into which KV of another engine is loaded just then stay until that has
    /// ended or the guard's deadline passes; a source that is held has ended and is unknown here. `now`
    /// is when it is removed; a guard counts from then.
    pub fn cancel(&mut self, sequence: SequenceId, now: EngineTime) -> Cancelled {
        match &mut self.core {
            Core::Vllm(core) => core.cancel(sequence, now),
            Core::Sglang(core) => core.cancel(sequence, now),
        }
    }

    /// Plans a pass that begins now and allocates its blocks. `None`: there is nothing to do, or a
    /// pass is still in flight.
    ///
    /// A pass can be empty ([`Pass::is_empty`]): it reports ends since the last one, or planning could do
    /// no more than preempt or end a sequence that outgrew the pool.
    ///
    /// `now` must not be before the end of the last pass.
    pub fn begin_pass(&mut self, now: EngineTime) -> Option<Pass> {
        let mut boxed = self.begin_pass_boxed(now)?;
        let pass = std::mem::take(&mut *boxed);
        self.pass_box = Some(boxed);
        Some(pass)
    }

    /// Ends a pass and returns what it did, in the order in which it is to be shown.
    pub fn finish_pass(&mut self, pass: Pass, now: EngineTime) -> Effects {
        let mut boxed = self.pass_box.take().unwrap_or_default();
        *boxed = pass;
        let effects = self.finish_pass_boxed(boxed, now);
        self.unbox(effects)
    }

    /// What happened that no pass will show: arrivals, KV events of a reset, ends, changed metrics. For
    /// the instants at which [`Scheduler::begin_pass`] had nothing to do; `None` if nothing changed
    /// since the last effects.
    pub fn settle(&mut self, now: EngineTime) -> Option<Effects> {
        self.settle_boxed(now).map(|effects| self.unbox(effects))
    }

    /// Takes the buffers of effects back for reuse.
    pub fn recycle(&mut self, effects: Effects) {
        let mut boxed = self.effects_box.take().unwrap_or_default();
        *boxed = effects;
        self.recycle_boxed(boxed);
    }

    fn unbox(&mut self, mut boxed: Box<Effects>) -> Effects {
        let effects = std::mem::take(&mut *boxed);
        self.effects_box = Some(boxed);
        effects
    }

    /// [`Scheduler::begin_pass`] for loops that keep the pass: it is half a kilobyte, and would be moved
    /// several times on its way.
    pub(crate) fn begin_pass_boxed(&mut self, now: EngineTime) -> Option<Box<Pass>> {
        match &mut self.core {
            Core::Vllm(core) => core.begin_pass(now),
            Core::Sglang(core) => core.begin_pass(now),
        }
    }

    /// [`Scheduler::finish_pass`], likewise.
    pub(crate) fn finish_pass_boxed(&mut self, pass: Box<Pass>, now: EngineTime) -> Box<Effects> {
        match &mut self.core {
            Core::Vllm(core) => core.finish_pass(pass, now),
            Core::Sglang(core) => core.finish_pass(pass, now),
        }
    }

    /// [`Scheduler::settle`], likewise.
    pub(crate) fn settle_boxed(&mut self, now: EngineTime) -> Option<Box<Effects>> {
        match &mut self.core {
            Core::Vllm(core) => core.settle(now),
            Core::Sglang(core) => core.settle(now),
        }
    }

    /// [`Scheduler::recycle`], likewise.
    pub(crate) fn recycle_boxed(&mut self, effects: Box<Effects>) {
        match &mut self.core {
            Core::Vllm(core) => core.book_mut().recycle(effects),
            Core::Sglang(core) => core.book_mut().recycle(effects),
        }
    }

    /// When to call [`Scheduler::begin_pass`] and [`Scheduler::settle`] again although nothing arrived: at the
    /// next arrival of a request that was submitted ahead of its time, or the end of the next lease or guard. It
    /// may lie in the past. What is due is done by whatever is called with a time from then on.
    #[must_use]
    pub fn next_deadline(&self) -> Option<EngineTime> {
        match &self.core {
            Core::Vllm(core) => core.book().next_deadline(),
            Core::Sglang(core) => core.book().next_deadline(),
        }
    }

    /// A look inside.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        View { core: &self.core }
    }
}

/// A look inside a [`Scheduler`].
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    core: &'a Core,
}

impl<'a> View<'a> {
    /// Whether an engine loop would call the scheduler: something is unfinished that the scheduling
    /// state lets run, an end has not been reported in a pass yet, or blocks are held for a transfer. It
    /// does not say that there is a pass to do.
    #[must_use]
    pub fn has_work(&self) -> bool {
        match self.core {
            Core::Vllm(core) => core.has_work(),
            Core::Sglang(core) => core.has_work(),
        }
    }

    /// The running sequences, in the scheduler's order.
    pub fn running(&self) -> impl Iterator<Item = SequenceView<'a>> + 'a {
        match self.core {
            Core::Vllm(core) => core.book().look(core.running()),
            Core::Sglang(core) => core.book().look(core.running()),
        }
    }

    /// The waiting queue, in the order in which it would be admitted; without those that hold blocks
    /// ([`View::loading`]).
    pub fn waiting(&self) -> impl Iterator<Item = SequenceView<'a>> + 'a {
        match self.core {
            Core::Vllm(core) => core.book().look(core.book().queue.iter()),
            Core::Sglang(core) => core.book().look(core.book().queue.iter()),
        }
    }

    /// Those that wait and hold blocks, into which KV of another engine is loaded or was; they go before
    /// the waiting queue, in this order.
    pub fn loading(&self) -> impl Iterator<Item = SequenceView<'a>> + 'a {
        match self.core {
            Core::Vllm(core) => core.book().look(core.book().loads.iter()),
            Core::Sglang(core) => core.book().look(core.book().loads.iter()),
        }
    }

    /// Those that have ended while their blocks stay for a transfer, by their ids.
    pub fn held(&self) -> impl Iterator<Item = SequenceView<'a>> + 'a {
        match self.core {
            Core::Vllm(core) => core.book().look(core.book().holds.iter()),
            Core::Sglang(core) => core.book().look(core.book().holds.iter()),
        }
    }

    /// One sequence; `None` if it is not known (any more).
    #[must_use]
    pub fn sequence(&self, sequence: SequenceId) -> Option<SequenceView<'a>> {
        match self.core {
            Core::Vllm(core) => core.book().sequence(sequence),
            Core::Sglang(core) => core.book().sequence(sequence),
        }
    }

    /// What SGLang's admission reckons with; `None` for another kind.
    #[must_use]
    pub fn token_pool(&self) -> Option<TokenPoolView> {
        match self.core {
            Core::Vllm(_) => None,
            Core::Sglang(core) => Some(core.token_pool()),
        }
    }

    /// The KV events that the next effects will show.
    #[must_use]
    pub fn kv_events(&self) -> &'a [KvEvent] {
        match self.core {
            Core::Vllm(core) => core.kv_events(),
            Core::Sglang(core) => core.kv_events(),
        }
    }

    /// Under which registration a handoff has a request, whose it is and how far it is; `None` if it is
    /// over or has none yet.
    #[must_use]
    pub fn handoff(&self, id: HandoffId) -> Option<(HandoffKey, SequenceId, HandoffSide)> {
        let registration = self.handoffs().get(id)?;
        Some((registration.key, registration.handle.sequence, registration.side))
    }

    /// How many handoffs have a request.
    #[must_use]
    pub fn num_handoffs(&self) -> usize {
        self.handoffs().len()
    }

    fn handoffs(&self) -> &'a HandoffTable {
        match self.core {
            Core::Vllm(core) => &core.book().handoffs,
            Core::Sglang(core) => &core.book().handoffs,
        }
    }

    /// The KV block pool.
    #[must_use]
    pub fn pool(&self) -> PoolView<'a> {
        match self.core {
            Core::Vllm(core) => PoolView { pool: core.pool() },
            Core::Sglang(core) => PoolView { pool: core.pool() },
        }
    }
}
