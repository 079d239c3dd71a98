//! Planning a prefill batch: the next chunk of a split prompt, then those who wait.

use crate::config::SchedulingState;
use crate::kv::Match;
use crate::output::FinishReason;
use crate::scheduler::pass::{Pass, PassRow, RowKind};
use crate::scheduler::sequences::Handle;
use crate::seeded_bug::seeded_bug;

use crate::scheduler::engine_core::EngineCore;

use super::SglangCore;
use super::budget::{Budget, Verdict, clipped};

/// Pool tokens that are kept free per sequence where nothing is cached and outputs are known to be long
/// (`IGNORE_EOS_RESERVE_TOKENS`).
const IGNORE_EOS_RESERVE_TOKENS: f64 = 1.0;

/// A prefill batch while it is planned.
struct Prefill<'a> {
    pass: &'a mut Pass,
    budget: Budget,
    grants: Vec<Grant>,
    /// Preempted for this batch; they are queued when it stands.
    preempted: Vec<Handle>,
    /// Output left and tokens held of everybody, where outputs are known to be long; made when needed.
    outlooks: Option<Vec<(f64, u64)>>,
}

/// A sequence's part in the batch.
#[derive(Debug, Clone, Copy)]
struct Grant {
    handle: Handle,
    kind: RowKind,
    /// Tokens that the pass computes.
    tokens: u32,
    /// Pages that it has before.
    pages_before: u32,
}

/// How a waiting sequence would enter the batch.
#[derive(Debug, Clone, Copy)]
struct Admission {
    found: Match,
    tokens: u32,
    max_new_tokens: u32,
    /// More than `tokens` are missing: the rest follows in chunks.
    is_chunk: bool,
}

impl SglangCore {
    pub(super) fn plan_prefill(&mut self, pass: &mut Pass) {
        // While a destination waits nobody else takes the pages that it waits for.
        let admits = self.book.state == SchedulingState::Running && self.book.queue.first_of_all().is_none();
        let preempts = self.options.enable_priority_scheduling;
        if preempts || self.book.running.len() == 0 {
            self.batch_is_full = false;
        }
        if self.chunked.is_none() {
            if !admits || self.batch_is_full || self.book.queue.num_ordinary() == 0 {
                return;
            }
            if self.num_slots() == 0 && !preempts {
                self.batch_is_full = true;
                return;
            }
        }
        if admits {
            self.order_queue();
        }
        let budget = self.budget();
        let mut batch = Prefill { pass, budget, grants: Vec::new(), preempted: Vec::new(), outlooks: None };
        self.continue_chunk(&mut batch);
        if admits {
            self.admit_waiting(&mut batch);
        }
        for &handle in &batch.preempted {
            self.queue_up(handle);
        }
        if !batch.grants.is_empty() {
            self.launch_prefill(batch);
        }
    }

    /// Running sequences that still fit.
    fn num_slots(&self) -> usize {
        (self.options.max_running_requests as usize).saturating_sub(self.book.running.len())
    }

    fn budget(&self) -> Budget {
        let offset = self.book.running.swept().iter().map(|&handle| self.expected_output(handle)).sum();
        // At most `max_running_requests`, a u32.
        let mixed = if self.mixes() { self.book.running.len() as u32 } else { 0 };
        Budget::new(&self.options, mixed, offset)
    }

    pub(super) fn mixes(&self) -> bool {
        self.options.enable_mixed_chunk && self.options.chunked_prefill_size.is_some()
    }

    /// Tokens that a running sequence is expected to take yet.
    fn expected_output(&self, handle: Handle) -> f64 {
        let sequence = &self.book.sequences[handle];
        let ratio = if sequence.ignore_eos { 1.0 } else { self.new_token_ratio.current() };
        f64::from(clipped(sequence.output_limit - sequence.num_output)) * ratio
    }

    /// Gives the split prompt its next chunk.
    fn continue_chunk(&mut self, batch: &mut Prefill<'_>) {
        let Some(handle) = self.chunked else { return };
        let sequence = &self.book.sequences[handle];
        let pages_before = sequence.blocks.len();
        // The real engine fails where the pool cannot hold the chunk; here it is cut, or sits out.
        let in_pool = self.kv.available_tokens()
            + self.kv.evictable_tokens()
            + u64::from(pages_before) * u64::from(self.kv.page_size())
            - u64::from(sequence.num_computed);
        if in_pool == 0 && self.book.running.len() == 0 && self.nothing_is_held() {
            self.chunked = None;
            return self.conclude_visibly(handle, FinishReason::OutOfMemory);
        }
        let limit = batch.budget.chunk().unwrap_or(i64::MAX);
        let spare = batch.budget.remaining_total(&self.kv).trunc() as i64;
        // A chunk must make progress to give its pages back, even where the pool is spoken for.
        let granted = if limit.min(spare) > 0 { limit.min(spare) } else { limit };
        let rest = sequence.num_tokens() - sequence.num_computed;
        // At most `rest`, a u32.
        let tokens = i64::from(rest).min(granted).min(in_pool as i64).max(0) as u32;
        if tokens == 0 || sequence.throttled {
            return;
        }
        let max_new_tokens = if tokens < rest { 0 } else { clipped(sequence.output_limit) };
        batch.budget.charge(tokens, max_new_tokens);
        batch.grants.push(Grant { handle, kind: RowKind::Running, tokens, pages_before });
        if tokens == rest {
            self.chunked = None;
        }
    }

    fn admit_waiting(&mut self, batch: &mut Prefill<'_>) {
        // A split prompt that sits out still needs its place.
        let parked = usize::from(self.chunked.is_some() && batch.grants.is_empty());
        while let Some(handle) = self.book.queue.next(None) {
            if batch.budget.verdict(&self.kv) == Verdict::Other {
                break;
            }
            if batch.grants.len() + parked >= self.num_slots() {
                self.batch_is_full = true;
            }
            if self.batch_is_full && !self.preempt_for(handle, batch) {
                break;
            }
            let verdict = self.try_admit(handle, batch);
            let nobody_else = batch.grants.is_empty() && self.book.running.len() == 0;
            if verdict == Verdict::NoToken
                && nobody_else
                && self.chunked.is_none()
                && self.nothing_is_held()
                && self.options.end_outgrown_requests
            {
                // The pool is empty but for what can be evicted: it will never be admitted.
                self.leave_queue(handle);
                self.conclude_visibly(handle, FinishReason::OutOfMemory);
                // It takes nothing, so the next one need not reckon with it.
                batch.outlooks = None;
                continue;
            }
            if verdict == Verdict::NoToken {
                self.batch_is_full = !nobody_else;
            }
            if verdict != Verdict::Continue {
                break;
            }
        }
    }

    /// Admits the head of the queue if the budget allows it, and says whether the next may be tried.
    fn try_admit(&mut self, handle: Handle, batch: &mut Prefill<'_>) -> Verdict {
        let sequence = &mut self.book.sequences[handle];
        let limit = if sequence.reads_prefix_cache { sequence.num_tokens() - 1 } else { 0 };
        let found = self.kv.match_prefix(&sequence.content, limit);
        sequence.short_of = sequence.num_tokens() - found.tokens;
        if self.options.prefill_max_requests.is_some_and(|most| batch.grants.len() >= most as usize) {
            return Verdict::Other;
        }
        // The prefix must not be counted as evictable for the sequence that needs it.
        self.kv.lock(found);
        let ignores_eos = self.book.sequences[handle].ignore_eos && !self.kv.prefix_caching();
        let admission = if ignores_eos {
            self.admission_of_known_length(handle, batch)
        } else {
            self.admission(handle, found, batch)
        };
        match admission {
            Ok(admission) => {
                self.admit(handle, admission, batch);
                batch.budget.verdict(&self.kv)
            }
            Err(verdict) => {
                self.kv.unlock(found);
                verdict
            }
        }
    }

    /// How a sequence would enter, or why it does not.
    fn admission(&self, handle: Handle, found: Match, batch: &Prefill<'_>) -> Result<Admission, Verdict> {
        let (sequence, page_size) = (&self.book.sequences[handle], self.kv.page_size());
        let missing = sequence.num_tokens() - found.tokens;
        let output = clipped(sequence.output_limit - sequence.num_output);
        let needed = f64::from(missing) + f64::from(output);
        let needed = if seeded_bug!(AdmissionForgetsThePage) { needed } else { needed + f64::from(page_size) };
        if needed >= batch.budget.remaining_total(&self.kv) {
            return Err(Verdict::NoToken);
        }
        if !batch.grants.is_empty() && batch.budget.exceeds_input(missing) {
            return Err(Verdict::Other);
        }
        let whole =
            Admission { found, tokens: missing, max_new_tokens: clipped(sequence.output_limit), is_chunk: false };
        match batch.budget.chunk() {
            Some(chunk) if batch.budget.ceil(missing) > chunk => {
                // At most `missing`, a u32. Only one prompt is split at a time.
                let tokens = chunk.max(0) as u32 / page_size * page_size;
                if tokens == 0 || self.chunked.is_some() {
                    return Err(Verdict::Other);
                }
                Ok(Admission { tokens, max_new_tokens: 0, is_chunk: true, ..whole })
            }
            _ => Ok(whole),
        }
    }

    /// The same for a sequence that will produce all its tokens, where nothing is cached: in the order of
    /// their ends, everybody must have room until the next one ends and gives its tokens back.
    fn admission_of_known_length(&self, handle: Handle, batch: &mut Prefill<'_>) -> Result<Admission, Verdict> {
        let sequence = &self.book.sequences[handle];
        let missing = sequence.num_tokens();
        let paged = batch.budget.ceil(missing) + i64::from(self.kv.page_size());
        let remaining = batch.budget.remaining_current(&self.kv);
        if paged > remaining || paged as f64 > batch.budget.remaining_total(&self.kv) {
            return Err(Verdict::NoToken);
        }
        self.add_outlook(handle, batch);
        let outlooks = batch.outlooks.as_deref().unwrap_or_default();
        let mut freed = 0;
        for (index, &(left, held)) in outlooks.iter().enumerate() {
            let count = (outlooks.len() - index) as f64;
            let lowest = (remaining - paged) as f64 + freed as f64 - left * count;
            if lowest <= IGNORE_EOS_RESERVE_TOKENS * count {
                return Err(Verdict::NoToken);
            }
            freed += held;
        }
        let whole = Admission {
            found: Match::default(),
            tokens: missing,
            max_new_tokens: clipped(sequence.output_limit),
            is_chunk: false,
        };
        match batch.budget.chunk() {
            Some(chunk) if i64::from(missing) > chunk => {
                if chunk <= 0 || self.chunked.is_some() {
                    return Err(Verdict::Other);
                }
                // Below `missing`, a u32.
                Ok(Admission { tokens: chunk as u32, max_new_tokens: 0, is_chunk: true, ..whole })
            }
            _ => Ok(whole),
        }
    }

    /// Adds a candidate to those whose ends are foreseen, sorted by the output they have left.
    fn add_outlook(&self, handle: Handle, batch: &mut Prefill<'_>) {
        let outlook = |&handle: &Handle| {
            let sequence = &self.book.sequences[handle];
            let ratio = if sequence.ignore_eos { 1.0 } else { self.new_token_ratio.current() };
            let left = f64::from(sequence.output_limit) * ratio - f64::from(sequence.num_output);
            (left > 0.0).then_some((left, u64::from(sequence.num_tokens())))
        };
        match &mut batch.outlooks {
            None => {
                let admitted: Vec<Handle> = batch.grants.iter().map(|grant| grant.handle).collect();
                let everybody = [handle].into_iter().chain(self.book.running.swept().iter().copied()).chain(admitted);
                let mut outlooks: Vec<_> = everybody.filter_map(|handle| outlook(&handle)).collect();
                outlooks.sort_by(|a, b| a.0.total_cmp(&b.0));
                batch.outlooks = Some(outlooks);
            }
            Some(outlooks) => {
                if let Some(new) = outlook(&handle) {
                    // As in the real scheduler, which puts the longest of all before the last one.
                    let behind = outlooks.iter().position(|other| new.0 <= other.0);
                    outlooks.insert(behind.unwrap_or(outlooks.len().saturating_sub(1)), new);
                }
            }
        }
    }

    /// Takes a sequence, whose prefix is locked, into the batch.
    fn admit(&mut self, handle: Handle, admission: Admission, batch: &mut Prefill<'_>) {
        let Admission { found, tokens, max_new_tokens, is_chunk } = admission;
        self.book.leave_queue(handle);
        let sequence = &mut self.book.sequences[handle];
        self.kv.adopt(&mut sequence.blocks, found);
        let reads_cache = sequence.reads_prefix_cache;
        if !sequence.was_preempted() {
            sequence.num_cached = found.tokens;
        }
        if self.kv.prefix_caching() && reads_cache {
            self.book.count_look_up(handle, found.tokens, batch.pass);
        }
        let kind = self.book.enter_batch(handle, found.tokens, batch.pass);
        if is_chunk {
            self.chunked = Some(handle);
        }
        batch.budget.charge(tokens, max_new_tokens);
        batch.grants.push(Grant { handle, kind, tokens, pages_before: 0 });
    }

    /// Preempts running sequences that are less important by more than the threshold, the least important
    /// and youngest first, until a candidate fits beside the others; `false`, changing nothing, if it cannot.
    fn preempt_for(&mut self, candidate: Handle, batch: &mut Prefill<'_>) -> bool {
        if !self.options.enable_priority_scheduling {
            return false;
        }
        let sequence = &self.book.sequences[candidate];
        let (importance, threshold) =
            (self.importance(sequence.priority), i64::from(self.options.priority_scheduling_preemption_threshold));
        // SGLang has destinations only on servers that prefill nothing, so nobody takes their places.
        let running = self.book.running.swept().iter().copied();
        let mut victims: Vec<Handle> =
            running.filter(|&handle| !self.book.sequences[handle].is_destination()).collect();
        victims.sort_by_key(|&handle| std::cmp::Reverse(self.priority_key(handle)));
        let mut missing = f64::from(sequence.short_of) + f64::from(clipped(sequence.output_limit))
            - batch.budget.remaining_total(&self.kv);
        let mut count = 0;
        for &handle in &victims {
            if self.importance(self.book.sequences[handle].priority) - importance <= threshold {
                break;
            }
            count += 1;
            missing -= self.expected_output(handle);
            if missing <= 0.0 {
                break;
            }
        }
        if count == 0 || missing > 0.0 {
            return false;
        }
        victims.truncate(count);
        for &handle in &victims {
            batch.budget.give_back(self.expected_output(handle));
            self.book.running.remove_handle(handle);
            if self.retract(handle) {
                batch.pass.preempted.push(handle.sequence);
                batch.preempted.push(handle);
            }
            self.make_room_for(self.book.running.len());
        }
        true
    }

    /// Gives everybody in the batch the pages and the rows.
    fn launch_prefill(&mut self, batch: Prefill<'_>) {
        let Prefill { pass, grants, .. } = batch;
        let page_size = self.kv.page_size();
        let tokens: u64 = grants.iter().map(|grant| u64::from(grant.tokens)).sum();
        // The paged allocator makes room for one more page per sequence than it may need.
        let slack = if page_size > 1 { grants.len() as u64 * u64::from(page_size) } else { 0 };
        self.kv.make_room_for_tokens(tokens + slack);
        let was_empty = self.book.running.len() == 0;
        for grant in &grants {
            self.push_row(*grant, pass);
        }
        pass.num_prefill_rows = pass.rows.len();
        let split = self.chunked;
        let joining = grants.iter().map(|grant| grant.handle).filter(|&handle| split != Some(handle));
        let decodes = self.mixes() && !was_empty && self.decode_fits();
        if decodes {
            self.push_decode_rows(pass);
            self.book.running.put_first(joining);
        } else {
            joining.for_each(|handle| self.book.running.push(handle));
        }
        self.chunk_unstored = grants.iter().any(|grant| split == Some(grant.handle));
        self.reopens = was_empty || decodes || self.chunk_unstored;
    }

    /// Gives a sequence pages and a row.
    fn push_row(&mut self, grant: Grant, pass: &mut Pass) {
        let Grant { handle, kind, tokens, pages_before } = grant;
        let sequence = &mut self.book.sequences[handle];
        let computed_before = sequence.num_computed;
        sequence.num_computed += tokens;
        let fits = self.kv.extend(&mut sequence.blocks, sequence.num_computed);
        assert!(fits, "the budget of a prefill batch covers every page of it");
        let samples = sequence.num_computed == sequence.num_tokens();
        sequence.mid_prefill = !samples;
        pass.push(PassRow {
            sequence: handle.sequence,
            slot: handle.slot,
            kind,
            new_tokens: tokens,
            computed_before,
            output_tokens: sequence.num_output,
            new_blocks: sequence.blocks.len() - pages_before,
            samples,
        });
    }
}
