//! Planning a pass: who of those that wait comes into it, or begins to load KV of another engine.

use crate::config::SchedulingState;
use crate::kv::{KvCache, Room};
use crate::output::FinishReason;
use crate::scheduler::engine_core::EngineCore;
use crate::scheduler::handoff::HandoffCommands;
use crate::scheduler::remote::{Answer, ConnectorCall, LoadTiming};
use crate::scheduler::sequence::{Life, Load, Sequence};
use crate::scheduler::sequences::Handle;
use crate::scheduler::waiting::QueueKey;
use crate::seeded_bug::seeded_bug;

use super::VllmCore;
use super::plan::{Grant, Plan};

/// Tokens of a sequence whose KV need not be computed.
#[derive(Clone, Copy)]
struct Found {
    /// In the own cache.
    local: u32,
    /// At another engine, beyond those.
    external: u32,
    source: FoundIn,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FoundIn {
    /// The sequence's own blocks: it was not looked up.
    Blocks,
    /// The cache, and a copy that is loaded then.
    LookUp(LoadTiming),
}

impl Found {
    fn tokens(self) -> u32 {
        self.local + self.external
    }
}

/// What became of one that waits.
enum Tried {
    /// It waits no longer, or not here.
    Gone,
    /// It keeps its place, those behind it are tried.
    PassedOver(QueueKey),
    /// It stays, and everybody behind it with it: nobody overtakes.
    NoRoom,
}

impl VllmCore {
    pub(super) fn plan_waiting(&mut self, plan: &mut Plan<'_>) {
        let slots = self.options.max_num_seqs.min(self.options.max_num_active_seqs.unwrap_or(u32::MAX));
        let mut behind = None;
        while plan.budget > 0
            && self.book.running.len() < slots as usize
            && let Some(handle) = self.next_to_try(behind)
        {
            match self.try_one(handle, plan) {
                Tried::Gone => {}
                Tried::PassedOver(key) => behind = Some(key),
                Tried::NoRoom => break,
            }
        }
        // A pass that lets nobody in has left nobody out.
        if !plan.defer_prefills && self.book.state == SchedulingState::Running {
            self.left_waiting = !self.book.queue.is_empty();
        }
    }

    /// Who holds blocks goes first, also where nobody else is admitted.
    fn next_to_try(&self, behind: Option<QueueKey>) -> Option<Handle> {
        self.book.loads.next_ready().or_else(|| match self.book.state {
            SchedulingState::Running => self.book.queue.next(behind),
            SchedulingState::NoNewAdmissions | SchedulingState::Stopped => None,
        })
    }

    fn try_one(&mut self, handle: Handle, plan: &mut Plan<'_>) -> Tried {
        if self.outgrows_pool(handle) {
            self.leave_queue(handle);
            self.conclude_visibly(handle, FinishReason::OutOfMemory);
            return Tried::Gone;
        }
        if matches!(self.book.sequences[handle].life, Life::Loading { load: Load::Done, .. }) {
            self.take_load(handle);
        }
        match self.find(handle) {
            None => self.pass_over(handle),
            Some(found) if found.external > 0 && found.source == FoundIn::LookUp(LoadTiming::BetweenPasses) => {
                self.try_load(handle, found, plan)
            }
            Some(found) => self.try_admit(handle, found, plan),
        }
    }

    /// What need not be computed; `None`: it is not known yet.
    fn find(&mut self, handle: Handle) -> Option<Found> {
        let sequence = &mut self.book.sequences[handle];
        if sequence.num_computed > 0 {
            let local = sequence.num_computed + self.kv.skip_look_up();
            return Some(Found { local, external: 0, source: FoundIn::Blocks });
        }
        let local = look_up(&mut self.kv, sequence);
        let num_tokens = sequence.num_tokens();
        let (queued, wanted) = (matches!(sequence.life, Life::Queued { .. }), sequence.wants_copy());
        let Some(remote) = &mut sequence.remote else {
            return Some(Found { local, external: 0, source: FoundIn::LookUp(LoadTiming::WithinPass) });
        };
        let answer = remote.copy.ask(local, num_tokens);
        if queued {
            self.book.queue.count_wanting(wanted, remote.copy.is_wanted());
        }
        let (found, call) = match answer {
            Answer::Undecided => (None, (None, false)),
            Answer::Tokens(external, load) => {
                let between_passes = external > 0 && load == LoadTiming::BetweenPasses;
                let found = Found { local, external, source: FoundIn::LookUp(load) };
                (Some(found), (Some(external), between_passes))
            }
        };
        if let Some(log) = &mut self.connector_log {
            let (sequence, (answer, between_passes)) = (handle.sequence, call);
            log.push(ConnectorCall::Matched { sequence, local_tokens: local, answer, between_passes });
        }
        found
    }

    fn pass_over(&mut self, handle: Handle) -> Tried {
        match &mut self.book.sequences[handle].life {
            Life::Queued { key, deferred } => {
                self.book.queue.count_deferred(*deferred, true);
                *deferred = true;
                let key = *key;
                self.book.note_change();
                Tried::PassedOver(key)
            }
            // A copy is decided before it is loaded, so this one's load cannot have been undecided.
            _ => Tried::NoRoom,
        }
    }

    /// Begins a load: blocks for what is found and no more, neither budget nor slot.
    fn try_load(&mut self, handle: Handle, found: Found, plan: &mut Plan<'_>) -> Tried {
        // What it needs itself, if it waits with blocks, is not what others need.
        let own = if self.waits_with_blocks(handle) { self.share(handle).missing } else { 0 };
        let room = Room { reserved: self.needs_in_flight() - own, ..self.room(handle, found.tokens()) };
        if !self.allocate(handle, room) {
            return Tried::NoRoom;
        }
        self.log_allocation(handle, found.external);
        let key = match self.book.sequences[handle].life {
            Life::Loading { key, .. } => key,
            _ => self.load_place(handle),
        };
        self.leave_queue(handle);
        self.count_look_up(handle, found, plan);
        self.book.sequences[handle].num_computed = found.tokens();
        self.enter_load_queue(handle, key);
        // The last token is computed again: if it alone is missing, there is nothing to transfer.
        let missing = self.book.sequences[handle].num_prompt - found.local;
        self.tell_reserved(handle, if missing > 1 { missing } else { 0 });
        Tried::Gone
    }

    /// Admits one if budget and blocks allow it.
    fn try_admit(&mut self, handle: Handle, found: Found, plan: &mut Plan<'_>) -> Tried {
        let num_tokens = self.book.sequences[handle].num_tokens();
        let present = found.tokens();
        if plan.defer_prefills && present < num_tokens - 1 {
            return Tried::NoRoom;
        }
        let short_of = (num_tokens - present).min(plan.chunk_cap);
        if !self.options.enable_chunked_prefill && short_of > plan.budget {
            return Tried::NoRoom;
        }
        let granted = short_of.min(plan.budget);
        let room = self.room(handle, present + granted);
        if !self.allocate(handle, room) {
            return Tried::NoRoom;
        }
        self.log_allocation(handle, found.external);
        self.leave_queue(handle);
        self.count_look_up(handle, found, plan);
        let kind = self.book.enter_batch(handle, present, plan.pass);
        self.book.running.push(handle);
        let sequence = &mut self.book.sequences[handle];
        plan.grant(&mut self.kv, sequence, Grant { handle, kind, tokens: granted, blocks_before: 0 });
        Tried::Gone
    }

    fn room(&self, handle: Handle, tokens: u32) -> Room {
        let whole =
            if self.options.scheduler_reserve_full_isl { self.book.sequences[handle].num_tokens() } else { tokens };
        let watermark = self.options.watermark * f64::from(self.options.num_gpu_blocks);
        Room {
            tokens,
            must_fit: whole,
            // A share below 1 of a u32, rounded down.
            headroom: if self.book.running.len() == 0 { 0 } else { watermark as u32 },
            reserved: 0,
        }
    }

    /// Gives one that waits its blocks, if there is room.
    fn allocate(&mut self, handle: Handle, room: Room) -> bool {
        let before = self.waits_with_blocks(handle).then(|| self.share(handle));
        let allocated = self.kv.admit(&mut self.book.sequences[handle].blocks, room);
        if let Some(before) = before {
            self.book.loads.exchange(before, self.share(handle));
        }
        allocated
    }

    fn waits_with_blocks(&self, handle: Handle) -> bool {
        matches!(self.book.sequences[handle].life, Life::Loading { .. })
    }

    /// Blocks that prefills and loads in flight still need for the tokens that they have.
    fn needs_in_flight(&self) -> u64 {
        let running = self.book.running.swept().iter().map(|&handle| &self.book.sequences[handle]);
        let prefills = running.filter(|sequence| sequence.mid_prefill);
        let missing = prefills.map(|sequence| self.kv.missing(&sequence.blocks, sequence.num_tokens()));
        missing.sum::<u64>() + self.book.loads.total().missing
    }

    fn log_allocation(&mut self, handle: Handle, external_tokens: u32) {
        if let Some(log) = &mut self.connector_log {
            let sequence = &self.book.sequences[handle];
            if sequence.remote.is_some() {
                let blocks = sequence.blocks.ids().to_vec();
                log.push(ConnectorCall::Allocated { sequence: handle.sequence, blocks, external_tokens });
            }
        }
    }

    /// Counts a look-up that led to blocks.
    fn count_look_up(&mut self, handle: Handle, found: Found, plan: &mut Plan<'_>) {
        if found.source == FoundIn::Blocks {
            return;
        }
        let sequence = &self.book.sequences[handle];
        let (preempted, num_tokens) = (sequence.was_preempted(), sequence.num_tokens());
        if self.kv.prefix_caching() && sequence.reads_prefix_cache {
            self.book.count_look_up(handle, found.local, plan.pass);
        }
        let sequence = &mut self.book.sequences[handle];
        if !preempted || seeded_bug!(ResumedHitIsTheFirst) {
            sequence.num_cached = found.tokens();
        }
        if let Some(remote) = &mut sequence.remote {
            let missing = u64::from(num_tokens - found.local);
            self.book.metrics.remote_cache.count(preempted, missing, u64::from(found.external));
            remote.copy.allocated();
            if !preempted {
                remote.num_external = found.external;
            }
        }
    }

    /// Whether a sequence can never get the blocks for the tokens that it already has, and is ended for it.
    pub(super) fn outgrows_pool(&self, handle: Handle) -> bool {
        self.options.end_outgrown_requests && self.kv.outgrown_by(self.book.sequences[handle].num_tokens())
    }
}

/// The cached prefix of a sequence, one token short of all at the most: a token must be computed to
/// sample from.
fn look_up(kv: &mut KvCache, sequence: &mut Sequence) -> u32 {
    if !kv.prefix_caching() || !sequence.reads_prefix_cache {
        return kv.skip_look_up();
    }
    let max_tokens = sequence.num_tokens() - u32::from(!seeded_bug!(FullHitComputesNothing));
    let hit = kv.look_up(&mut sequence.blocks, &sequence.content, max_tokens);
    if sequence.reports_hits {
        kv.report_hits(&sequence.blocks, &sequence.content);
    }
    hit
}
