//! A second scheduler, written from the description of SGLang's rules with plain lists and loops: slow, and meant to
//! be obviously right. It shares no code with the core.

use std::collections::BTreeMap;
use std::mem;

use standin::{
    Cancelled, EngineTime, FinishReason, RowKind, SchedulingState, SequenceId, SequenceStatus, SglangConfig,
};

use super::model_tree::{Prefix, Tree};

/// What the rules need to know of a request.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) prompt: Vec<u32>,
    /// Every token that it will produce, and why it ends with the last one.
    pub(crate) answer: Vec<u32>,
    pub(crate) finish: FinishReason,
    /// Tokens at which it would end by length.
    pub(crate) limit: usize,
    pub(crate) namespace: Option<&'static str>,
    pub(crate) priority: i32,
    pub(crate) ignore_eos: bool,
    pub(crate) reads_cache: bool,
    /// No pass that begins earlier sees it.
    pub(crate) visible_from: EngineTime,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) entry: Entry,
    pub(crate) status: SequenceStatus,
    pub(crate) throttled: bool,
    /// It ends with its next pass.
    pub(crate) cancelled: bool,
    pub(crate) computed: usize,
    pub(crate) produced: usize,
    pub(crate) preemptions: u32,
    pub(crate) pages: Vec<u32>,
    /// Of its tokens, how many are in the tree and locked there; and how many it has entered there itself.
    stored: usize,
    counted: usize,
    /// Its place in the queue, and how many entered the queue before it.
    pub(super) place: u64,
    pub(super) queued_at: u64,
    /// Tokens that the last attempt to admit it would have computed.
    pub(super) short_of: usize,
}

impl Sequence {
    pub(crate) fn num_tokens(&self) -> usize {
        self.entry.prompt.len() + self.produced
    }

    /// Its first tokens.
    pub(crate) fn prefix(&self, len: usize) -> Prefix {
        let tokens = self.entry.prompt.iter().chain(&self.entry.answer).copied().take(len).collect();
        Prefix { namespace: self.entry.namespace, tokens }
    }
}

pub(crate) type Output = (SequenceId, Option<u32>, Option<FinishReason>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) sequence: SequenceId,
    pub(crate) kind: RowKind,
    pub(crate) tokens: usize,
    pub(crate) computed_before: usize,
}

/// A pass, as it should be.
#[derive(Debug, Default, Clone)]
pub(crate) struct Planned {
    pub(crate) rows: Vec<Row>,
    /// How many of them are the prefill batch.
    pub(crate) num_prefill: usize,
    pub(crate) preempted: Vec<SequenceId>,
    pub(crate) ended: Vec<SequenceId>,
}

impl Planned {
    fn is_idle(&self) -> bool {
        self.rows.is_empty() && self.preempted.is_empty()
    }
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) options: SglangConfig,
    pub(crate) sequences: BTreeMap<SequenceId, Sequence>,
    arriving: Vec<SequenceId>,
    /// Those that stand aside have their places in it, too.
    pub(crate) waiting: Vec<SequenceId>,
    pub(crate) running: Vec<SequenceId>,
    pub(crate) chunked: Option<SequenceId>,
    pub(super) chunk_unstored: bool,
    /// Admission is closed; it opens when the batch after this one stands, or somebody has left.
    pub(crate) full: bool,
    pub(super) reopens: bool,
    somebody_left: bool,
    pub(crate) ratio: f64,
    pub(crate) state: SchedulingState,
    pub(crate) tree: Tree,
    ended: Vec<SequenceId>,
    /// Ends that no row will show.
    due: Vec<Output>,
    in_flight: Option<Planned>,
    last_pass: Option<(EngineTime, EngineTime)>,
    pub(super) num_places: u64,
    num_queued: u64,
    pub(super) attempts: u64,
}

impl Model {
    pub(crate) fn new(options: &SglangConfig) -> Self {
        let num_pages = options.max_total_tokens / options.page_size;
        let mut model = Self {
            tree: Tree::new(options.page_size as usize, num_pages, options.radix_eviction_policy),
            options: options.clone(),
            sequences: BTreeMap::new(),
            arriving: Vec::new(),
            waiting: Vec::new(),
            running: Vec::new(),
            chunked: None,
            chunk_unstored: false,
            full: false,
            reopens: false,
            somebody_left: false,
            ratio: 0.0,
            state: SchedulingState::Running,
            ended: Vec::new(),
            due: Vec::new(),
            in_flight: None,
            last_pass: None,
            num_places: 0,
            num_queued: 0,
            attempts: 0,
        };
        model.ratio = model.first_ratio();
        model
    }

    fn first_ratio(&self) -> f64 {
        (0.7 * self.options.schedule_conservativeness).min(1.0)
    }

    pub(super) fn decay(&mut self) {
        let (first, last) = (self.first_ratio(), (self.first_ratio() * 0.14).min(1.0));
        self.ratio = (self.ratio - (first - last) / 600.0).max(last);
    }

    pub(crate) fn submit(&mut self, id: SequenceId, entry: Entry) {
        let sequence = Sequence {
            entry,
            status: SequenceStatus::Arriving,
            throttled: false,
            cancelled: false,
            computed: 0,
            produced: 0,
            preemptions: 0,
            pages: Vec::new(),
            stored: 0,
            counted: 0,
            place: 0,
            queued_at: 0,
            short_of: 0,
        };
        self.sequences.insert(id, sequence);
        self.arriving.push(id);
    }

    pub(crate) fn cancel(&mut self, id: SequenceId) -> Cancelled {
        let once_more = self.options.abort_after_next_forward && self.state != SchedulingState::Stopped;
        match self.sequences.get_mut(&id) {
            None => Cancelled::Unknown,
            Some(sequence) if sequence.status == SequenceStatus::Running && once_more => {
                (sequence.cancelled, sequence.throttled) = (true, false);
                Cancelled::Ending
            }
            Some(_) => {
                self.remove(id);
                Cancelled::Removed
            }
        }
    }

    pub(crate) fn throttle(&mut self, id: SequenceId, throttled: bool) {
        let sequence = self.sequence(id);
        sequence.throttled = throttled && !sequence.cancelled;
    }

    pub(crate) fn set_state(&mut self, state: SchedulingState) {
        self.state = state;
        if state == SchedulingState::Stopped {
            // No pass will come for them to take part in.
            for id in self.batch() {
                if self.sequences[&id].cancelled {
                    self.end(id, FinishReason::Cancelled);
                }
            }
        }
    }

    /// Whether the cache was reset, and who was retracted for it.
    pub(crate) fn flush(&mut self, reset_running: bool) -> (bool, Vec<SequenceId>) {
        let mut retracted = Vec::new();
        if reset_running {
            self.somebody_left = false;
            while let Some(id) = self.chunked.or(self.running.last().copied()) {
                self.leave(id);
                if self.retract(id) {
                    self.enqueue(id);
                    retracted.push(id);
                }
            }
        }
        let idle = self.batch().is_empty() && (reset_running || self.waiting.is_empty());
        if idle {
            self.tree.reset();
        }
        (idle, retracted)
    }

    pub(crate) fn begin(&mut self, now: EngineTime) -> Option<Planned> {
        let next = self.arriving.iter().map(|id| self.sequences[id].entry.visible_from).min();
        if next > self.last_pass.map(|(_, ended)| ended) {
            self.note_idle_turn();
        }
        self.arrive_between_passes(now);
        let mut planned = self.plan();
        if planned.is_idle() && self.arrive(|visible_from| visible_from <= now) {
            planned = self.plan();
        }
        planned.ended.clone_from(&self.ended);
        if planned.is_idle() && planned.ended.is_empty() {
            return None;
        }
        self.ended.clear();
        self.last_pass = Some((now, now));
        self.in_flight = Some(planned.clone());
        Some(planned)
    }

    /// Tokens and ends of the pass.
    pub(crate) fn finish(&mut self, now: EngineTime) -> Vec<Output> {
        let pass = self.in_flight.take().expect("a pass in flight");
        self.last_pass = self.last_pass.map(|(began, _)| (began, now));
        let mut outputs = mem::take(&mut self.due);
        for (index, row) in pass.rows.iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(&row.sequence) else { continue };
            let last = row.computed_before + row.tokens == sequence.num_tokens();
            if sequence.status != SequenceStatus::Running || !last {
                continue;
            }
            let token = sequence.entry.answer[sequence.produced];
            sequence.produced += 1;
            let mut finish = (sequence.produced == sequence.entry.answer.len()).then_some(sequence.entry.finish);
            if sequence.cancelled {
                finish = Some(FinishReason::Cancelled);
            }
            outputs.push((row.sequence, Some(token), finish));
            if index < pass.num_prefill || finish.is_some() {
                self.store(row.sequence);
            }
            if finish.is_some() {
                self.remove(row.sequence);
            }
        }
        if pass.rows.is_empty() {
            self.note_idle_turn();
        }
        self.arrive(|visible_from| visible_from < now);
        outputs
    }

    /// Ends to be shown at an instant without a pass.
    pub(crate) fn settle(&mut self, now: EngineTime) -> Vec<Output> {
        self.note_idle_turn();
        if self.in_flight.is_some() {
            return Vec::new();
        }
        self.arrive_between_passes(now);
        mem::take(&mut self.due)
    }

    /// A boundary comes before the arrivals of its instant.
    fn arrive_between_passes(&mut self, now: EngineTime) {
        let boundary_first = self.last_pass.is_some_and(|(began, ended)| ended == now && began < now);
        self.arrive(|visible_from| visible_from < now || (visible_from == now && !boundary_first));
    }

    /// The running ones, then the one whose prompt is split.
    pub(crate) fn batch(&self) -> Vec<SequenceId> {
        self.running.iter().copied().chain(self.chunked).collect()
    }

    fn note_idle_turn(&mut self) {
        if self.batch().is_empty() && self.waiting.is_empty() {
            self.ratio = self.first_ratio();
        }
    }

    fn arrive(&mut self, is_due: impl Fn(EngineTime) -> bool) -> bool {
        let mut due = self.arriving.clone();
        due.retain(|id| is_due(self.sequences[id].entry.visible_from));
        // Stable: at one instant the order of submission counts.
        due.sort_by_key(|id| self.sequences[id].entry.visible_from);
        self.arriving.retain(|id| !due.contains(id));
        due.iter().for_each(|&id| self.enqueue(id));
        !due.is_empty()
    }

    pub(super) fn enqueue(&mut self, id: SequenceId) {
        self.num_places += 1;
        self.num_queued += 1;
        let (place, queued_at) = (self.num_places, self.num_queued);
        let sequence = self.sequence(id);
        let preempted = sequence.preemptions > 0;
        sequence.status = if preempted { SequenceStatus::Preempted } else { SequenceStatus::Waiting };
        (sequence.place, sequence.queued_at) = (place, queued_at);
        self.waiting.push(id);
    }

    /// Those that can be tried, in order.
    pub(crate) fn queue(&self) -> Vec<SequenceId> {
        let mut queue: Vec<_> = self.waiting.iter().copied().filter(|id| !self.sequences[id].throttled).collect();
        queue.sort_by_key(|id| self.sequences[id].place);
        queue
    }

    fn plan(&mut self) -> Planned {
        let mut planned = Planned::default();
        if self.state == SchedulingState::Stopped {
            return planned;
        }
        if let Some(id) = self.chunked {
            if self.sequences[&id].cancelled {
                self.end(id, FinishReason::Cancelled);
            } else if mem::take(&mut self.chunk_unstored) {
                self.store(id);
            }
        }
        if mem::take(&mut self.reopens) || self.somebody_left {
            self.full = false;
        }
        self.somebody_left = false;
        self.plan_prefill(&mut planned);
        if planned.rows.is_empty() {
            self.plan_decode(&mut planned);
        }
        planned
    }

    pub(super) fn whole(&self, tokens: usize) -> usize {
        let page = self.options.page_size as usize;
        tokens / page * page
    }

    /// Takes from a sequence of the batch what it holds; `false`: it was cancelled and has ended.
    pub(super) fn retract(&mut self, id: SequenceId) -> bool {
        if self.sequences[&id].cancelled {
            self.end(id, FinishReason::Cancelled);
            return false;
        }
        self.release(id);
        let sequence = self.sequence(id);
        sequence.computed = 0;
        sequence.short_of = sequence.num_tokens();
        sequence.preemptions += 1;
        true
    }

    /// Takes a sequence out of the batch, which is not a leaving that opens admission again.
    pub(super) fn leave(&mut self, id: SequenceId) {
        self.running.retain(|&other| other != id);
        self.chunked = self.chunked.filter(|&other| other != id);
    }

    /// Ends a sequence for a reason that no row shows.
    pub(super) fn end(&mut self, id: SequenceId, reason: FinishReason) {
        self.remove(id);
        self.due.push((id, None, Some(reason)));
    }

    fn remove(&mut self, id: SequenceId) {
        self.release(id);
        self.somebody_left |= self.running.contains(&id);
        self.leave(id);
        self.arriving.retain(|&other| other != id);
        self.waiting.retain(|&other| other != id);
        self.sequences.remove(&id);
        self.ended.push(id);
    }

    fn release(&mut self, id: SequenceId) {
        let page = self.options.page_size as usize;
        let sequence = self.sequences.get_mut(&id).expect("a live sequence");
        let prefix = sequence.prefix(sequence.stored);
        self.tree.free(&sequence.pages[sequence.stored / page..]);
        self.tree.unlock(&prefix);
        sequence.pages.clear();
        (sequence.stored, sequence.counted) = (0, 0);
    }

    /// Enters what a sequence has computed into the tree.
    pub(super) fn store(&mut self, id: SequenceId) {
        if self.options.disable_radix_cache {
            return;
        }
        let sequence = &self.sequences[&id];
        let (end, prompt_end) = (self.whole(sequence.computed), self.whole(sequence.entry.prompt.len()));
        let sequence = self.sequences.get_mut(&id).expect("a live sequence");
        let (prefix, held) = (sequence.prefix(end), sequence.prefix(sequence.stored));
        let priority = i64::from(sequence.entry.priority);
        self.tree.enter(&prefix, held.len()..sequence.counted, priority, &mut sequence.pages);
        if 0 < prompt_end && prompt_end < end {
            self.tree.end_node_at(&prefix.cut(prompt_end), priority + 1);
        }
        self.tree.unlock(&held);
        self.tree.lock(prefix);
        sequence.stored = end;
        sequence.counted = sequence.counted.max(end);
    }

    /// Gives a sequence of which `tokens` more are computed its row and its pages.
    pub(super) fn compute(&mut self, id: SequenceId, kind: RowKind, tokens: usize) -> Row {
        let page = self.options.page_size as usize;
        let sequence = self.sequences.get_mut(&id).expect("a live sequence");
        let computed_before = sequence.computed;
        sequence.computed += tokens;
        let missing = sequence.computed.div_ceil(page).saturating_sub(sequence.pages.len());
        sequence.pages.extend(self.tree.allocate(missing));
        Row { sequence: id, kind, tokens, computed_before }
    }

    /// Takes a waiting sequence into the batch behind a prefix that is locked for it.
    pub(super) fn adopt(&mut self, id: SequenceId, prefix: &Prefix) {
        self.waiting.retain(|&other| other != id);
        let pages = self.tree.pages_of(prefix);
        let sequence = self.sequence(id);
        sequence.status = SequenceStatus::Running;
        (sequence.computed, sequence.stored, sequence.pages) = (prefix.len(), prefix.len(), pages);
    }

    pub(super) fn sequence(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("queues hold live sequences alone")
    }
}
