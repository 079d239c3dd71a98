//! A second scheduler, written from the description of vLLM's rules with plain lists and loops: slow, and meant
//! to be obviously right. It shares no code with the core.

use std::collections::BTreeMap;
use std::mem;

use standin::{
    EngineTime, FinishReason, SchedulingState, SequenceId, SequenceStatus, TieVictim, VllmConfig, VllmPolicy,
};

use super::model_blocks::{Blocks, Identity};

/// What the rules need to know of a request.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) prompt: Vec<u32>,
    /// Every token that it will produce, and why it ends with the last one.
    pub(crate) answer: Vec<u32>,
    pub(crate) finish: FinishReason,
    pub(crate) identity: Identity,
    pub(crate) priority: i32,
    pub(crate) arrival: EngineTime,
    /// No pass that begins earlier sees it.
    pub(crate) visible_from: EngineTime,
    pub(crate) tie_key: u128,
    pub(crate) reads_cache: bool,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) entry: Entry,
    pub(crate) status: SequenceStatus,
    pub(crate) throttled: bool,
    pub(crate) computed: usize,
    pub(crate) produced: usize,
    pub(crate) blocks: Vec<u32>,
    pub(crate) preemptions: u32,
    /// Its last pass did not reach its last token.
    mid_prefill: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) sequence: SequenceId,
    pub(crate) tokens: usize,
    pub(crate) computed_before: usize,
}

/// A pass, as it should be.
#[derive(Debug, Default)]
pub(crate) struct Planned {
    pub(crate) rows: Vec<Row>,
    pub(crate) preempted: Vec<SequenceId>,
    pub(crate) ended: Vec<SequenceId>,
}

#[derive(Debug)]
pub(crate) struct Model {
    options: VllmConfig,
    pub(crate) sequences: BTreeMap<SequenceId, Sequence>,
    arriving: Vec<SequenceId>,
    /// Those that stand aside have their places in it, too.
    pub(crate) waiting: Vec<SequenceId>,
    pub(crate) running: Vec<SequenceId>,
    pub(crate) state: SchedulingState,
    pub(crate) blocks: Blocks,
    ended: Vec<SequenceId>,
    /// Ends that the pass in flight will show.
    pub(crate) outgrown: Vec<SequenceId>,
    in_flight: Vec<Row>,
    last_pass: Option<(EngineTime, EngineTime)>,
    num_passes: u32,
    left_waiting: bool,
}

impl Model {
    pub(crate) fn new(options: VllmConfig) -> Self {
        Self {
            blocks: Blocks::new(options.num_gpu_blocks, options.block_size),
            options,
            sequences: BTreeMap::new(),
            arriving: Vec::new(),
            waiting: Vec::new(),
            running: Vec::new(),
            state: SchedulingState::Running,
            ended: Vec::new(),
            outgrown: Vec::new(),
            in_flight: Vec::new(),
            last_pass: None,
            num_passes: 0,
            left_waiting: false,
        }
    }

    pub(crate) fn submit(&mut self, id: SequenceId, entry: Entry) {
        let sequence = Sequence {
            entry,
            status: SequenceStatus::Arriving,
            throttled: false,
            computed: 0,
            produced: 0,
            blocks: Vec::new(),
            preemptions: 0,
            mid_prefill: false,
        };
        self.sequences.insert(id, sequence);
        self.arriving.push(id);
    }

    /// Ends a sequence wherever it is; `false` if there is none.
    pub(crate) fn remove(&mut self, id: SequenceId) -> bool {
        if !self.sequences.contains_key(&id) {
            return false;
        }
        self.release(id);
        self.sequences.remove(&id);
        for queue in [&mut self.arriving, &mut self.waiting, &mut self.running] {
            queue.retain(|&other| other != id);
        }
        self.ended.push(id);
        true
    }

    /// Whether the cache was reset, and who was preempted for it.
    pub(crate) fn reset(&mut self, reset_running: bool) -> (bool, Vec<SequenceId>) {
        let mut preempted = Vec::new();
        while let (true, Some(&last)) = (reset_running, self.running.last()) {
            self.preempt(last);
            preempted.push(last);
        }
        (self.blocks.reset(), preempted)
    }

    pub(crate) fn begin(&mut self, now: EngineTime) -> Option<Planned> {
        self.settle(now);
        let mut planned = self.plan();
        let idle = |planned: &Planned| planned.rows.is_empty() && planned.preempted.is_empty();
        if idle(&planned) && self.arrive(|visible_from| visible_from <= now) {
            planned = self.plan();
        }
        planned.ended = mem::take(&mut self.ended);
        if idle(&planned) && planned.ended.is_empty() {
            return None;
        }
        self.in_flight.clone_from(&planned.rows);
        self.last_pass = Some((now, now));
        Some(planned)
    }

    /// Between passes: a boundary comes before the arrivals of its instant.
    pub(crate) fn settle(&mut self, now: EngineTime) {
        let boundary_first = self.last_pass.is_some_and(|(began, ended)| ended == now && began < now);
        self.arrive(|visible_from| visible_from < now || (visible_from == now && !boundary_first));
    }

    /// Tokens and ends of the pass.
    pub(crate) fn finish(&mut self, now: EngineTime) -> Vec<(SequenceId, Option<u32>, Option<FinishReason>)> {
        let out_of_memory = |id| (id, None, Some(FinishReason::OutOfMemory));
        let mut outputs: Vec<_> = mem::take(&mut self.outgrown).into_iter().map(out_of_memory).collect();
        let rows = mem::take(&mut self.in_flight);
        for Row { sequence: id, tokens, computed_before } in &rows {
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            let reaches_the_end = computed_before + tokens == sequence.num_tokens();
            if sequence.status != SequenceStatus::Running || !reaches_the_end {
                continue;
            }
            let token = sequence.entry.answer[sequence.produced];
            sequence.produced += 1;
            let finish = (sequence.produced == sequence.entry.answer.len()).then_some(sequence.entry.finish);
            if finish.is_some() {
                self.remove(*id);
            }
            outputs.push((*id, Some(token), finish));
        }
        self.num_passes += u32::from(!rows.is_empty());
        self.last_pass = self.last_pass.map(|(began, _)| (began, now));
        self.arrive(|visible_from| visible_from < now);
        outputs
    }

    fn arrive(&mut self, is_due: impl Fn(EngineTime) -> bool) -> bool {
        let mut due = self.arriving.clone();
        due.retain(|id| is_due(self.sequences[id].entry.visible_from));
        // Stable: at one instant the order of submission counts.
        due.sort_by_key(|id| self.sequences[id].entry.visible_from);
        self.arriving.retain(|id| !due.contains(id));
        for &id in &due {
            self.sequence(id).status = SequenceStatus::Waiting;
            self.waiting.push(id);
        }
        self.sort_waiting();
        !due.is_empty()
    }

    fn sort_waiting(&mut self) {
        if self.options.policy == VllmPolicy::Priority {
            let sequences = &self.sequences;
            self.waiting.sort_by_key(|id| {
                let entry = &sequences[id].entry;
                (entry.priority, entry.arrival, entry.tie_key, *id)
            });
        }
    }

    fn plan(&mut self) -> Planned {
        let mut planned = Planned::default();
        if self.state == SchedulingState::Stopped {
            return planned;
        }
        let mut budget = self.options.max_num_batched_tokens as usize;
        let cap = self.chunk_cap();
        let defer = self.defers_prefills();
        for id in self.running.clone() {
            let Some(sequence) = self.sequences.get(&id) else { continue };
            let left_out = sequence.throttled || (defer && sequence.mid_prefill);
            if !self.running.contains(&id) || left_out || budget == 0 {
                continue;
            }
            let tokens = (sequence.num_tokens() - sequence.computed).min(cap).min(budget);
            if self.make_room(id, tokens, &mut budget, &mut planned) {
                planned.rows.push(self.compute(id, tokens));
                budget -= tokens;
            }
        }
        if planned.preempted.is_empty() && self.state == SchedulingState::Running {
            while let Some(row) = self.admit_head(budget, cap, defer) {
                planned.rows.push(row);
                budget -= row.tokens;
            }
            if !defer {
                self.left_waiting = self.head().is_some();
            }
        }
        planned
    }

    fn chunk_cap(&self) -> usize {
        let threshold = self.options.long_prefill_token_threshold as usize;
        let num_sequences = self.running.len() + self.waiting.len();
        if threshold == 0 || num_sequences <= 1 {
            usize::MAX
        } else if self.options.long_prefill_token_threshold_adaptive {
            threshold.max(self.options.max_num_batched_tokens as usize / num_sequences)
        } else {
            threshold
        }
    }

    fn defers_prefills(&self) -> bool {
        let decodes = self.running.iter().map(|id| &self.sequences[id]).any(|one| !one.throttled && !one.mid_prefill);
        !self.num_passes.is_multiple_of(self.options.prefill_schedule_interval) && decodes && !self.left_waiting
    }

    /// Preempts until `id` has blocks for `tokens` more tokens; `false` if it went itself.
    fn make_room(&mut self, id: SequenceId, tokens: usize, budget: &mut usize, planned: &mut Planned) -> bool {
        let sequence = &self.sequences[&id];
        let missing = self.blocks.needed_for(sequence.computed + tokens).saturating_sub(sequence.blocks.len());
        if missing > self.blocks.free.len() && self.end_if_outgrown(id) {
            return false;
        }
        while missing > self.blocks.free.len() {
            let victim = self.victim();
            if let Some(row) = planned.rows.iter().find(|row| row.sequence == victim) {
                *budget += row.tokens;
            }
            planned.rows.retain(|row| row.sequence != victim);
            planned.preempted.push(victim);
            self.preempt(victim);
            if victim == id {
                return false;
            }
        }
        self.allocate(id, missing);
        true
    }

    /// The last of the batch; by priority the largest `(priority, arrival)`.
    fn victim(&self) -> SequenceId {
        let mut victim = self.running[self.running.len() - 1];
        if self.options.policy == VllmPolicy::Priority {
            for &id in self.running.iter().rev() {
                let rank = |id| (self.sequences[id].entry.priority, self.sequences[id].entry.arrival);
                let first_among_equals = self.options.tie_victim == TieVictim::First && rank(&id) == rank(&victim);
                if rank(&id) > rank(&victim) || first_among_equals {
                    victim = id;
                }
            }
        }
        victim
    }

    fn preempt(&mut self, id: SequenceId) {
        self.release(id);
        let sequence = self.sequence(id);
        sequence.status = SequenceStatus::Preempted;
        sequence.computed = 0;
        sequence.preemptions += 1;
        self.running.retain(|&other| other != id);
        self.waiting.insert(0, id);
        self.sort_waiting();
    }

    fn head(&self) -> Option<SequenceId> {
        self.waiting.iter().copied().find(|id| !self.sequences[id].throttled)
    }

    fn admit_head(&mut self, budget: usize, cap: usize, defer: bool) -> Option<Row> {
        let slots = self.options.max_num_seqs.min(self.options.max_num_active_seqs.unwrap_or(u32::MAX)) as usize;
        let id = self.head().filter(|_| self.running.len() < slots && budget > 0)?;
        if self.end_if_outgrown(id) {
            return self.admit_head(budget, cap, defer);
        }
        let found = self.find_prefix(id);
        let hit = found.len() * self.options.block_size as usize;
        let num_tokens = self.sequences[&id].num_tokens();
        let wanted = (num_tokens - hit).min(cap);
        if (defer && num_tokens - hit > 1) || (!self.options.enable_chunked_prefill && wanted > budget) {
            return None;
        }
        let tokens = wanted.min(budget);
        let must_fit = if self.options.scheduler_reserve_full_isl { num_tokens } else { hit + tokens };
        let watermark = self.options.watermark * f64::from(self.options.num_gpu_blocks);
        let headroom = if self.running.is_empty() { 0 } else { watermark as usize };
        if self.blocks.needed_for(must_fit) - found.len() + self.blocks.count_free(&found) + headroom
            > self.blocks.free.len()
        {
            return None;
        }
        self.blocks.acquire(&found);
        self.waiting.retain(|&other| other != id);
        self.running.push(id);
        let sequence = self.sequence(id);
        sequence.status = SequenceStatus::Running;
        sequence.computed = hit;
        sequence.blocks = found;
        let missing = self.blocks.needed_for(hit + tokens) - self.sequences[&id].blocks.len();
        self.allocate(id, missing);
        Some(self.compute(id, tokens))
    }

    /// Its longest cached prefix, which leaves at least one token to compute.
    fn find_prefix(&mut self, id: SequenceId) -> Vec<u32> {
        let sequence = &self.sequences[&id];
        if !self.options.enable_prefix_caching || !sequence.entry.reads_cache {
            return Vec::new();
        }
        let names = self.blocks.names(&sequence.tokens(sequence.num_tokens() - 1), &sequence.entry.identity);
        self.blocks.find_prefix(&names)
    }

    /// Counts `tokens` more tokens as computed and enters the blocks that they fill into the cache.
    fn compute(&mut self, id: SequenceId, tokens: usize) -> Row {
        let sequence = self.sequence(id);
        let computed_before = sequence.computed;
        sequence.computed += tokens;
        sequence.mid_prefill = sequence.computed < sequence.num_tokens();
        if self.options.enable_prefix_caching {
            let sequence = &self.sequences[&id];
            let names = self.blocks.names(&sequence.tokens(sequence.computed), &sequence.entry.identity);
            self.blocks.enter(&sequence.blocks, &names);
        }
        Row { sequence: id, tokens, computed_before }
    }

    fn allocate(&mut self, id: SequenceId, count: usize) {
        let blocks = self.blocks.allocate(count);
        self.sequence(id).blocks.extend(blocks);
    }

    fn release(&mut self, id: SequenceId) {
        let blocks = mem::take(&mut self.sequence(id).blocks);
        self.blocks.release(blocks);
    }

    fn end_if_outgrown(&mut self, id: SequenceId) -> bool {
        let needed = self.blocks.needed_for(self.sequences[&id].num_tokens());
        let outgrown = self.options.end_outgrown_requests && needed > self.options.num_gpu_blocks as usize - 1;
        if outgrown {
            self.remove(id);
            self.outgrown.push(id);
        }
        outgrown
    }

    fn sequence(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("queues hold live sequences alone")
    }
}

impl Sequence {
    pub(crate) fn num_tokens(&self) -> usize {
        self.entry.prompt.len() + self.produced
    }

    /// The first `count` of its tokens.
    fn tokens(&self, count: usize) -> Vec<u32> {
        self.entry.prompt.iter().chain(&self.entry.answer).copied().take(count).collect()
    }
}
