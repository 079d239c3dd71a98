//! The model's prefill batch: in which order those who wait are tried, how many tokens there are to give, and who
//! gets them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use standin::{FinishReason, RadixEvictionPolicy, RowKind, SchedulingState, SequenceId, SglangPolicy};

use super::model::{Model, Planned};
use super::model_tree::Prefix;

/// Why the next one is not tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// The pool is spoken for.
    NoToken,
    /// The batch has what it may have.
    BatchIsLarge,
}

/// What is left for one prefill batch, in tokens. Sums are made in the engine's order: its comparisons hang on them.
struct Budget {
    page: usize,
    spoken_for: f64,
    taken: i64,
    input: i64,
    chunk: Option<i64>,
}

impl Budget {
    fn charge(&mut self, tokens: usize, outputs: usize) {
        let whole = self.ceil(tokens) as i64;
        self.spoken_for += (whole + self.page as i64 + outputs as i64) as f64;
        self.taken += whole + self.page as i64;
        self.input -= whole;
        self.chunk = self.chunk.map(|chunk| chunk - whole);
    }

    fn ceil(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page) * self.page
    }
}

/// A prefill batch on its way.
struct Batch {
    budget: Budget,
    grants: Vec<(SequenceId, RowKind, usize)>,
    retracted: Vec<SequenceId>,
    /// Output left and tokens held of everybody, by their ends; made when a candidate's own end counts.
    ends: Option<Vec<(f64, f64)>>,
}

fn clipped(outputs: usize) -> usize {
    outputs.min(4096)
}

impl Model {
    pub(super) fn plan_prefill(&mut self, planned: &mut Planned) {
        let admits = self.state == SchedulingState::Running;
        let preempts = self.options.enable_priority_scheduling;
        self.full &= !(preempts || self.running.is_empty());
        if self.chunked.is_none() {
            if !admits || self.full || self.queue().is_empty() {
                return;
            }
            if self.slots() == 0 && !preempts {
                self.full = true;
                return;
            }
        }
        if admits {
            self.order_queue();
        }
        let mut batch = Batch { budget: self.budget(), grants: Vec::new(), retracted: Vec::new(), ends: None };
        self.continue_chunk(&mut batch);
        if admits {
            self.admit(&mut batch);
        }
        batch.retracted.iter().for_each(|&id| self.enqueue(id));
        planned.preempted.append(&mut batch.retracted);
        if !batch.grants.is_empty() {
            self.launch(&batch, planned);
        }
    }

    /// Brings the queue into the policy's order.
    fn order_queue(&mut self) {
        let mut queue = self.queue();
        let policy = self.options.schedule_policy;
        let looks = policy == SglangPolicy::Lpm && !self.options.disable_radix_cache && queue.len() <= 128;
        if looks {
            self.sort_by_prefix(&mut queue);
        } else {
            let by_priority = self.options.enable_priority_scheduling;
            queue.sort_by_key(|id| {
                let sequence = &self.sequences[id];
                let rank = if by_priority { self.rank(*id) } else { 0 };
                let lof = policy == SglangPolicy::Lof;
                let longest = Reverse(if lof { sequence.entry.limit } else { 0 });
                (rank, longest, if by_priority && !lof { sequence.queued_at } else { 0 })
            });
        }
        for &id in &queue {
            // First come, first served leaves everybody in place.
            if looks || policy == SglangPolicy::Lof || self.options.enable_priority_scheduling {
                self.num_places += 1;
                let place = self.num_places;
                self.sequence(id).place = place;
            }
        }
        let lru = self.options.radix_eviction_policy == RadixEvictionPolicy::Lru;
        if !looks && lru && !self.options.disable_radix_cache && !queue.is_empty() {
            self.attempts += 1;
            if self.attempts % 32 == 1 {
                for id in queue.into_iter().take(128).rev() {
                    self.look_up_all(id);
                }
            }
        }
    }

    fn look_up_all(&mut self, id: SequenceId) -> usize {
        let sequence = &self.sequences[&id];
        let wanted = sequence.prefix(self.whole(sequence.num_tokens()));
        self.tree.look_up(&wanted)
    }

    /// Longest stored prefix first; last those whose first 32 tokens an earlier one is about to store.
    fn sort_by_prefix(&mut self, queue: &mut [SequenceId]) {
        let (mut starts, mut ranks) = (Vec::new(), BTreeMap::new());
        // One alone needs no order and is not looked up.
        for &id in queue.iter().filter(|_| queue.len() > 1) {
            let found = self.look_up_all(id);
            let tokens = self.sequences[&id].num_tokens();
            let start = self.sequences[&id].prefix(32);
            let is_small = found <= 32 && tokens >= 32;
            let put_off = is_small && starts.contains(&start);
            starts.extend((is_small && !put_off).then_some(start));
            ranks.insert(id, (put_off, Reverse(found.min(tokens - 1))));
        }
        queue.sort_by_key(|id| match ranks.get(id) {
            Some((true, _)) => (true, Reverse(0)),
            Some(&rank) => rank,
            None => (false, Reverse(0)),
        });
    }

    /// The smallest is the most important.
    fn rank(&self, id: SequenceId) -> i64 {
        let priority = i64::from(self.sequences[&id].entry.priority);
        if self.options.schedule_low_priority_values_first { priority } else { -priority }
    }

    fn slots(&self) -> usize {
        (self.options.max_running_requests as usize).saturating_sub(self.running.len())
    }

    fn mixes(&self) -> bool {
        self.options.enable_mixed_chunk && self.options.chunked_prefill_size.is_some()
    }

    fn budget(&self) -> Budget {
        let mixed = if self.mixes() { self.running.len() as i64 } else { 0 };
        Budget {
            page: self.options.page_size as usize,
            spoken_for: mixed as f64 + self.running.iter().map(|&id| self.expected(id)).sum::<f64>(),
            taken: mixed,
            input: i64::from(self.options.max_prefill_tokens) - mixed,
            chunk: self.options.chunked_prefill_size.map(|size| i64::from(size) - mixed),
        }
    }

    /// Tokens that a running sequence is expected to take yet.
    fn expected(&self, id: SequenceId) -> f64 {
        let sequence = &self.sequences[&id];
        let ratio = if sequence.entry.ignore_eos { 1.0 } else { self.ratio };
        clipped(sequence.entry.limit - sequence.produced) as f64 * ratio
    }

    fn unspoken(&self, budget: &Budget) -> f64 {
        (self.tree.available() + self.tree.evictable()) as f64 - budget.spoken_for
    }

    fn untaken(&self, budget: &Budget) -> i64 {
        (self.tree.available() + self.tree.evictable()) as i64 - budget.taken
    }

    fn stop(&self, budget: &Budget) -> Option<Stop> {
        if self.unspoken(budget) <= 0.0 || self.untaken(budget) <= 0 {
            Some(Stop::NoToken)
        } else {
            let large = budget.input <= 0 || budget.chunk.is_some_and(|chunk| chunk <= 0);
            large.then_some(Stop::BatchIsLarge)
        }
    }

    /// The split prompt gets its next chunk. One that nothing can be found for ends when it is alone.
    fn continue_chunk(&mut self, batch: &mut Batch) {
        let Some(id) = self.chunked else { return };
        let sequence = &self.sequences[&id];
        let own = sequence.pages.len() * batch.budget.page - sequence.computed;
        let in_pool = self.tree.available() + self.tree.evictable() + own;
        if in_pool == 0 && self.running.is_empty() {
            return self.end(id, FinishReason::OutOfMemory);
        }
        let limit = batch.budget.chunk.unwrap_or(i64::MAX);
        let hoped = limit.min(self.unspoken(&batch.budget).trunc() as i64);
        let granted = if hoped > 0 { hoped } else { limit };
        let sequence = &self.sequences[&id];
        let rest = sequence.num_tokens() - sequence.computed;
        let tokens = (rest as i64).min(granted).min(in_pool as i64).max(0) as usize;
        if tokens == 0 || sequence.throttled {
            return;
        }
        batch.budget.charge(tokens, if tokens < rest { 0 } else { clipped(sequence.entry.limit) });
        batch.grants.push((id, RowKind::Running, tokens));
        self.chunked = self.chunked.filter(|_| tokens < rest);
    }

    fn admit(&mut self, batch: &mut Batch) {
        // A split prompt without a chunk keeps its place.
        let parked = usize::from(self.chunked.is_some() && batch.grants.is_empty());
        while let Some(&id) = self.queue().first() {
            if self.stop(&batch.budget) == Some(Stop::BatchIsLarge) {
                return;
            }
            self.full |= batch.grants.len() + parked >= self.slots();
            if self.full && !self.preempt_for(id, batch) {
                return;
            }
            let stop = self.try_admit(id, batch);
            let nobody_else = batch.grants.is_empty() && self.running.is_empty();
            if stop == Some(Stop::NoToken) {
                if nobody_else && self.chunked.is_none() && self.options.end_outgrown_requests {
                    self.end(id, FinishReason::OutOfMemory);
                    batch.ends = None;
                    continue;
                }
                self.full = !nobody_else;
            }
            if stop.is_some() {
                return;
            }
        }
    }

    /// Admits one if it can be, and says why nobody else can.
    fn try_admit(&mut self, id: SequenceId, batch: &mut Batch) -> Option<Stop> {
        let sequence = &self.sequences[&id];
        let readable = if sequence.entry.reads_cache { sequence.num_tokens() - 1 } else { 0 };
        let wanted = sequence.prefix(self.whole(readable));
        let found = if self.options.disable_radix_cache { 0 } else { self.tree.look_up(&wanted) };
        let found = wanted.cut(found);
        let sequence = self.sequence(id);
        sequence.short_of = sequence.num_tokens() - found.len();
        if self.options.prefill_max_requests.is_some_and(|most| batch.grants.len() >= most as usize) {
            return Some(Stop::BatchIsLarge);
        }
        // What it will use cannot be evicted for it.
        self.tree.lock(found.clone());
        let of_known_length = self.sequences[&id].entry.ignore_eos && self.options.disable_radix_cache;
        let tokens = if of_known_length { self.fits_by_ends(id, batch) } else { self.fits(id, &found, batch) };
        match tokens {
            Ok(tokens) => {
                let sequence = &self.sequences[&id];
                let whole = tokens == sequence.num_tokens() - found.len();
                let kind = if sequence.preemptions > 0 { RowKind::Resumed } else { RowKind::New };
                batch.budget.charge(tokens, if whole { clipped(sequence.entry.limit) } else { 0 });
                batch.grants.push((id, kind, tokens));
                self.chunked = if whole { self.chunked } else { Some(id) };
                self.adopt(id, &found);
                self.stop(&batch.budget)
            }
            Err(stop) => {
                self.tree.unlock(&found);
                Some(stop)
            }
        }
    }

    /// The tokens that it would get: all, or a chunk.
    fn fits(&self, id: SequenceId, found: &Prefix, batch: &Batch) -> Result<usize, Stop> {
        let (sequence, budget) = (&self.sequences[&id], &batch.budget);
        let missing = sequence.num_tokens() - found.len();
        let needed = missing + clipped(sequence.entry.limit - sequence.produced) + budget.page;
        if needed as f64 >= self.unspoken(budget) {
            return Err(Stop::NoToken);
        }
        let over_input = budget.chunk.is_none() && budget.ceil(missing) as i64 >= budget.input;
        if !batch.grants.is_empty() && over_input {
            return Err(Stop::BatchIsLarge);
        }
        let Some(chunk) = budget.chunk.filter(|&chunk| budget.ceil(missing) as i64 > chunk) else { return Ok(missing) };
        let tokens = self.whole(chunk.max(0) as usize);
        if tokens == 0 || self.chunked.is_some() { Err(Stop::BatchIsLarge) } else { Ok(tokens) }
    }

    /// The same where nothing is cached and it produces all its tokens: in the order of their ends, everybody needs
    /// room until the next one gives its own back.
    fn fits_by_ends(&self, id: SequenceId, batch: &mut Batch) -> Result<usize, Stop> {
        let budget = &batch.budget;
        let missing = self.sequences[&id].num_tokens();
        let paged = (budget.ceil(missing) + budget.page) as i64;
        let room = self.untaken(budget);
        if paged > room || paged as f64 > self.unspoken(budget) {
            return Err(Stop::NoToken);
        }
        let mut freed = 0.0;
        self.foresee_end(id, batch);
        let ends = batch.ends.as_deref().unwrap_or_default();
        for (index, &(left, held)) in ends.iter().enumerate() {
            let count = (ends.len() - index) as f64;
            if (room - paged) as f64 + freed - left * count <= count {
                return Err(Stop::NoToken);
            }
            freed += held;
        }
        let Some(chunk) = batch.budget.chunk.filter(|&chunk| missing as i64 > chunk) else { return Ok(missing) };
        if chunk <= 0 || self.chunked.is_some() { Err(Stop::BatchIsLarge) } else { Ok(chunk as usize) }
    }

    /// Adds a candidate to those whose ends are foreseen, by the output that they have left.
    fn foresee_end(&self, id: SequenceId, batch: &mut Batch) {
        let end = |id: SequenceId| {
            let sequence = &self.sequences[&id];
            let ratio = if sequence.entry.ignore_eos { 1.0 } else { self.ratio };
            let left = sequence.entry.limit as f64 * ratio - sequence.produced as f64;
            (left > 0.0).then_some((left, sequence.num_tokens() as f64))
        };
        if let Some(ends) = &mut batch.ends {
            let Some(new) = end(id) else { return };
            // The engine puts the longest of all before the last one.
            let at = ends.iter().position(|other| new.0 <= other.0).unwrap_or(ends.len().saturating_sub(1));
            ends.insert(at, new);
        } else {
            let admitted = batch.grants.iter().map(|grant| grant.0);
            let everybody = [id].into_iter().chain(self.running.iter().copied()).chain(admitted);
            let mut ends: Vec<_> = everybody.filter_map(end).collect();
            ends.sort_by(|a, b| a.0.total_cmp(&b.0));
            batch.ends = Some(ends);
        }
    }

    /// Who is preempted for a candidate that does not fit beside the others: the least important and youngest first.
    fn preempt_for(&mut self, candidate: SequenceId, batch: &mut Batch) -> bool {
        if !self.options.enable_priority_scheduling {
            return false;
        }
        let threshold = i64::from(self.options.priority_scheduling_preemption_threshold);
        let mut victims = self.running.clone();
        victims.sort_by_key(|&id| Reverse((self.rank(id), self.sequences[&id].queued_at)));
        victims.retain(|&id| self.rank(id) - self.rank(candidate) > threshold);
        let sequence = &self.sequences[&candidate];
        let mut missing =
            sequence.short_of as f64 + clipped(sequence.entry.limit) as f64 - self.unspoken(&batch.budget);
        let mut count = 0;
        while count < victims.len() && (count == 0 || missing > 0.0) {
            missing -= self.expected(victims[count]);
            count += 1;
        }
        if count == 0 || missing > 0.0 {
            return false;
        }
        for &id in &victims[..count] {
            batch.budget.spoken_for -= self.expected(id);
            self.leave(id);
            if self.retract(id) {
                batch.retracted.push(id);
            }
            self.tree.make_room_for_tokens(20 * self.running.len());
        }
        true
    }

    fn launch(&mut self, batch: &Batch, planned: &mut Planned) {
        let page = self.options.page_size as usize;
        let tokens: usize = batch.grants.iter().map(|grant| grant.2).sum();
        let slack = if page > 1 { batch.grants.len() * page } else { 0 };
        self.tree.make_room_for_tokens(tokens + slack);
        for &(id, kind, tokens) in &batch.grants {
            planned.rows.push(self.compute(id, kind, tokens));
        }
        planned.num_prefill = planned.rows.len();
        let joining: Vec<_> = batch.grants.iter().map(|grant| grant.0).filter(|&id| self.chunked != Some(id)).collect();
        let was_empty = self.running.is_empty();
        let decodes = self.mixes() && !was_empty && self.decode_fits();
        if decodes {
            self.push_decodes(planned);
            self.running.splice(0..0, joining);
        } else {
            self.running.extend(joining);
        }
        self.chunk_unstored = batch.grants.iter().any(|grant| self.chunked == Some(grant.0));
        self.reopens = was_empty || decodes || self.chunk_unstored;
    }
}
