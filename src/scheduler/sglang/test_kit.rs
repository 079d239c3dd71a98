//! A scheduler driven pass by pass, which checks after every step what must hold always.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::config::{EngineConfig, EngineKind, SglangConfig};
use crate::handoff::{HandoffId, HandoffKey};
use crate::kv_event::{BlockHash, BlockId, KvEvent};
use crate::metrics::{EngineMetrics, PassMetrics};
use crate::output::{FinishReason, PrefillStats};
use crate::request::{Request, SequenceId};
use crate::scheduler::{
    Applied, ApplyResult, Cancelled, Command, Effects, HandoffFact, Pass, RowKind, Scheduler, SequenceStatus,
    SequenceView, Submission, TokenPoolView, View,
};
use crate::time::EngineTime;
use crate::timing::TimingConfig;

/// Pools of so many pages are looked at page by page; each look walks the tree.
const LOOKED_AT: u32 = 300;

/// The options of most tests: pages of one token, 64 of them, no split prompts.
pub(super) fn small() -> SglangConfig {
    SglangConfig::default().with_max_total_tokens(64).with_max_running_requests(8).with_chunked_prefill_size(None)
}

/// A prompt of `tokens` tokens; prompts of different `kind` share none.
pub(super) fn prompt(kind: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|position| kind * 1_000_000 + position).collect()
}

/// A request that ends by length.
pub(super) fn request(kind: u32, tokens: u32, outputs: u32) -> Request {
    Request::new(prompt(kind, tokens), outputs)
}

/// A registration of a handoff.
pub(super) fn key(handoff: u128, generation: u64) -> HandoffKey {
    HandoffKey::new(HandoffId(uuid::Uuid::from_u128(handoff)), generation)
}

/// What one pass did. Sequences are given by number.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Done {
    /// `(sequence, tokens)` of the prefill batch.
    pub(super) prefill: Vec<(u64, u32)>,
    pub(super) decode: Vec<u64>,
    /// `(sequence, prefix hit)` of all admissions, first and later ones.
    pub(super) hits: Vec<(u64, u32)>,
    pub(super) preempted: Vec<u64>,
    /// Who got a token.
    pub(super) sampled: Vec<u64>,
    /// `(sequence, reason)` of those that ended.
    pub(super) finished: Vec<(u64, FinishReason)>,
    pub(super) prefills: Vec<PrefillStats>,
    pub(super) facts: Vec<HandoffFact>,
    /// First admissions.
    pub(super) admitted: Vec<u64>,
    pub(super) pass: Option<PassMetrics>,
    pub(super) events: Vec<KvEvent>,
    pub(super) metrics: EngineMetrics,
}

pub(super) struct Rig {
    pub(super) scheduler: Scheduler,
    pub(super) now: EngineTime,
    options: SglangConfig,
    next: u64,
    /// Tokens so far.
    pub(super) outputs: BTreeMap<u64, Vec<u32>>,
    ended: BTreeMap<u64, u32>,
    /// What a consumer of the events believes each page to hold.
    contents: BTreeMap<BlockId, BlockHash>,
    /// Pages are looked at one by one after every so many steps.
    pub(super) look_every: u32,
    steps: u32,
}

impl Rig {
    pub(super) fn new(options: SglangConfig) -> Self {
        let config = EngineConfig::new(EngineKind::Sglang(options.clone())).with_timing(TimingConfig::ConstantMs(10.0));
        Self {
            scheduler: Scheduler::new(&config).expect("a usable configuration").with_kv_events(),
            now: EngineTime::from_millis(1),
            options,
            next: 0,
            outputs: BTreeMap::new(),
            ended: BTreeMap::new(),
            contents: BTreeMap::new(),
            look_every: 1,
            steps: 0,
        }
    }

    pub(super) fn view(&self) -> View<'_> {
        self.scheduler.view()
    }

    pub(super) fn pool(&self) -> TokenPoolView {
        self.view().token_pool().expect("SGLang's pool")
    }

    /// Submits so that the next pass sees it; the sequence's number.
    pub(super) fn submit(&mut self, request: Request) -> u64 {
        let (sequence, tie_key) = (SequenceId(self.next), u128::from(self.next));
        let just_before = EngineTime::from_nanos(self.now.as_nanos() - 1);
        let command = Command::Submit(Submission { sequence, tie_key, request });
        assert_eq!(self.scheduler.apply(command, just_before), Ok(Applied::Submitted));
        self.next += 1;
        self.next - 1
    }

    pub(super) fn command(&mut self, command: Command) -> Applied {
        let applied = self.scheduler.apply(command, self.now).expect("a command that is taken");
        self.check();
        applied
    }

    pub(super) fn throttle(&mut self, sequence: u64, throttled: bool) {
        self.command(Command::Throttle { sequence: SequenceId(sequence), throttled });
    }

    /// How many requests were taken.
    pub(super) fn submitted(&self) -> u64 {
        self.next
    }

    /// Those that have not ended, in the order of submission.
    pub(super) fn live(&self) -> Vec<u64> {
        let lives = |&sequence: &u64| {
            let view = self.view().sequence(SequenceId(sequence));
            view.is_some_and(|view| !matches!(view.status, SequenceStatus::Held(_)))
        };
        (0..self.next).filter(lives).collect()
    }

    /// Sends a command a moment ago, so that the next pass sees it.
    pub(super) fn try_command(&mut self, command: Command) -> ApplyResult {
        let answer = self.scheduler.apply(command, EngineTime::from_nanos(self.now.as_nanos() - 1));
        self.check();
        answer
    }

    /// The next request, to be submitted under a handoff.
    pub(super) fn submission(&mut self, request: Request) -> Submission {
        self.next += 1;
        Submission { sequence: SequenceId(self.next - 1), tie_key: u128::from(self.next - 1), request }
    }

    /// Submits the source of a handoff; the sequence's number.
    pub(super) fn source(&mut self, handoff: HandoffKey, request: Request) -> u64 {
        let submission = self.submission(request);
        assert_eq!(self.try_command(Command::SubmitPrefill { handoff, submission }), Ok(Applied::Submitted));
        self.next - 1
    }

    /// Submits the destination of a handoff; the sequence's number.
    pub(super) fn destination(&mut self, handoff: HandoffKey, request: Request) -> u64 {
        let submission = self.submission(request);
        assert_eq!(self.try_command(Command::ReserveDestination { handoff, submission }), Ok(Applied::Submitted));
        self.next - 1
    }

    /// Ends a transfer well.
    pub(super) fn activate(&mut self, handoff: HandoffKey, first_token: Option<u32>) {
        let command = Command::ActivateDestination { handoff, first_token };
        assert_eq!(self.try_command(command), Ok(Applied::Handoff));
    }

    /// Goes on to a time, passes and all.
    pub(super) fn wait(&mut self, duration: Duration) -> Vec<Done> {
        self.now = self.now + duration;
        let mut done = self.run();
        done.extend(self.settle());
        done
    }

    /// Passes until there is nothing to do; what is told of handoffs.
    pub(super) fn facts(&mut self) -> Vec<HandoffFact> {
        self.wait(Duration::ZERO).into_iter().flat_map(|done| done.facts).collect()
    }

    /// Cancels one that may take part in one more pass.
    pub(super) fn cancel_or_end(&mut self, sequence: u64) {
        match self.scheduler.cancel(SequenceId(sequence), self.now) {
            Cancelled::Removed => *self.ended.entry(sequence).or_default() += 1,
            Cancelled::Ending => assert!(self.options.abort_after_next_forward && !self.ended.contains_key(&sequence)),
            Cancelled::Unknown => panic!("it has not ended"),
        }
        self.check();
    }

    /// Cancels; a second time there is nothing to cancel.
    pub(super) fn cancel(&mut self, sequence: u64) {
        assert_eq!(self.scheduler.cancel(SequenceId(sequence), self.now), Cancelled::Removed);
        assert_eq!(self.scheduler.cancel(SequenceId(sequence), self.now), Cancelled::Unknown);
        *self.ended.entry(sequence).or_default() += 1;
        self.check();
    }

    pub(super) fn begin(&mut self) -> Option<Pass> {
        let pass = self.scheduler.begin_pass(self.now)?;
        self.check();
        let prefill = &pass.rows()[..pass.num_prefill_rows];
        let tokens: u64 = pass.rows().iter().map(|row| u64::from(row.new_tokens)).sum();
        assert_eq!(pass.work().total_tokens(), tokens);
        if let Some(chunk) = self.options.chunked_prefill_size {
            assert!(tokens <= u64::from(chunk) || prefill.is_empty(), "case 5");
        }
        assert!(prefill.iter().filter(|row| !row.samples).count() <= 1, "one split prompt at a time");
        let mixes = self.options.enable_mixed_chunk;
        assert!(prefill.is_empty() || prefill.len() == pass.rows().len() || mixes, "case 46");
        assert!(self.scheduler.begin_pass(self.now).is_none(), "one pass at a time");
        Some(pass)
    }

    pub(super) fn finish(&mut self, pass: Pass) -> Done {
        self.now = pass.ends_at();
        let (prefill, decode) = pass.rows().split_at(pass.num_prefill_rows);
        let admissions = prefill.iter().filter(|row| row.kind != RowKind::Running);
        let mut done = Done {
            prefill: prefill.iter().map(|row| (row.sequence.0, row.new_tokens)).collect(),
            decode: decode.iter().map(|row| row.sequence.0).collect(),
            hits: admissions.map(|row| (row.sequence.0, row.computed_before)).collect(),
            preempted: pass.preempted().iter().map(|sequence| sequence.0).collect(),
            admitted: pass.admitted().iter().map(|admitted| admitted.sequence.0).collect(),
            ..Done::default()
        };
        let effects = self.scheduler.finish_pass(pass, self.now);
        self.take(effects, &mut done);
        done
    }

    /// Begins and ends a pass.
    pub(super) fn pass(&mut self) -> Option<Done> {
        let pass = self.begin()?;
        Some(self.finish(pass))
    }

    pub(super) fn settle(&mut self) -> Option<Done> {
        let effects = self.scheduler.settle(self.now)?;
        let mut done = Done::default();
        self.take(effects, &mut done);
        Some(done)
    }

    /// Passes until there is nothing to do.
    pub(super) fn run(&mut self) -> Vec<Done> {
        let passes: Vec<_> = std::iter::from_fn(|| self.pass()).take(10_000).collect();
        assert!(passes.len() < 10_000, "it does not end");
        passes
    }

    /// Everybody who is known ended once, and what is in use is zero.
    pub(super) fn assert_drained(&mut self) {
        self.settle();
        assert!(self.ended.values().all(|&times| times == 1));
        assert_eq!((self.ended.len() as u64, self.view().has_work()), (self.next, false));
        assert_eq!((self.view().num_handoffs(), self.view().held().count()), (0, 0));
        let (pool, usable) = (self.pool(), self.view().pool().num_usable_blocks());
        assert_eq!(pool.protected_tokens, 0);
        assert_eq!(self.view().pool().num_free_blocks(), usable, "case 8");
    }

    fn take(&mut self, effects: Effects, done: &mut Done) {
        for output in &effects.outputs {
            let sequence = output.sequence.0;
            assert!(!self.ended.contains_key(&sequence), "case 9: sequence {sequence} had ended");
            let tokens = self.outputs.entry(sequence).or_default();
            assert_eq!(output.prefill.is_some(), tokens.is_empty() && output.token.is_some());
            tokens.extend(output.token);
            done.prefills.extend(output.prefill);
            if output.token.is_some() {
                done.sampled.push(sequence);
            }
            if let Some(reason) = output.finish {
                done.finished.push((sequence, reason));
                *self.ended.entry(sequence).or_default() += 1;
            }
        }
        effects.kv_events.iter().for_each(|event| self.follow(event));
        let (running, metrics) = (self.view().running().count() as u64, effects.metrics);
        assert_eq!((metrics.num_requests_running, metrics.at), (running, self.now));
        assert_eq!(
            metrics.num_used_blocks,
            metrics.num_usable_blocks - u64::from(self.view().pool().num_free_blocks())
        );
        let pages = |sequences: &mut dyn Iterator<Item = SequenceView<'_>>| -> u64 {
            sequences.map(|sequence| sequence.block_ids.len() as u64).sum()
        };
        assert_eq!(metrics.num_held_blocks, pages(&mut self.view().held()));
        assert_eq!(metrics.num_reserved_blocks, pages(&mut self.view().loading()));
        done.facts.clone_from(&effects.facts);
        done.pass = effects.pass;
        done.metrics = metrics;
        done.events.clone_from(&effects.kv_events);
        self.scheduler.recycle(effects);
        self.steps += 1;
        self.check_contents();
        self.check();
    }

    fn looks(&self) -> bool {
        self.steps.is_multiple_of(self.look_every) && self.view().pool().num_usable_blocks() <= LOOKED_AT
    }

    fn follow(&mut self, event: &KvEvent) {
        match event {
            KvEvent::BlockStored { block_hashes, block_ids, token_ids, block_size, .. } => {
                assert_eq!(token_ids.len(), block_ids.len() * *block_size as usize);
                for (&page, &hash) in block_ids.iter().zip(block_hashes) {
                    assert_eq!(self.contents.insert(page, hash), None, "page {page} is stored once");
                }
            }
            KvEvent::BlockRemoved { block_hash, block_id } => {
                assert_eq!(self.contents.remove(block_id), Some(*block_hash), "case 10");
            }
            KvEvent::AllBlocksCleared => self.contents.clear(),
        }
    }

    /// Case 10: the events alone say what is in the tree.
    fn check_contents(&self) {
        let pool = self.view().pool();
        assert_eq!(pool.num_blocks_with_hash(), self.contents.len());
        if !self.looks() {
            return;
        }
        for (&page, &hash) in &self.contents {
            assert_eq!((pool.block_hash(page), pool.find(hash)), (Some(hash), Some(page)));
        }
    }

    /// Cases 1, 2 and 5: every page is free, in the tree or held by one; a page in the tree has as many
    /// locks as sequences hold it.
    fn check(&self) {
        let (view, pool, tokens) = (self.view(), self.view().pool(), self.pool());
        let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
        for sequence in view.running().chain(view.waiting()).chain(view.loading()).chain(view.held()) {
            sequence.block_ids.iter().for_each(|&page| *holders.entry(page).or_default() += 1);
        }
        assert!(view.running().all(|sequence| sequence.status == SequenceStatus::Running));
        assert!(view.waiting().all(|sequence| sequence.block_ids.is_empty()));
        assert!(view.running().count() <= self.options.max_running_requests as usize);
        if !self.looks() {
            return;
        }
        let mut private = 0;
        for (&page, &holders) in &holders {
            assert_eq!(pool.ref_count(page), holders, "page {page}");
            private += usize::from(pool.block_hash(page).is_none());
        }
        let free: Vec<_> = pool.free_queue().collect();
        assert!(free.iter().all(|page| !holders.contains_key(page)));
        assert!(free.first().is_none_or(|&next| pool.ref_count(next) == 0));
        let page_size = u64::from(self.options.page_size);
        assert_eq!(free.len() as u64 * page_size, tokens.available_tokens);
        assert_eq!(pool.num_blocks_with_hash() as u64 * page_size, tokens.evictable_tokens + tokens.protected_tokens);
        assert_eq!(free.len() + pool.num_blocks_with_hash() + private, pool.num_usable_blocks() as usize);
    }
}

/// Pages of one token, 64 of them, and one token a request kept free for decodes.
pub(super) fn open() -> SglangConfig {
    reserving(1)
}

pub(super) fn reserving(tokens: u32) -> SglangConfig {
    small().with_num_reserved_decode_tokens(tokens)
}

pub(super) fn num_free(rig: &Rig) -> u32 {
    rig.view().pool().num_free_blocks()
}

/// The tokens that an engine alone gives this request.
pub(super) fn alone(kind: u32, tokens: u32, outputs: u32, tie_key: u64) -> Vec<u32> {
    let mut rig = Rig::new(open());
    for _ in 0..tie_key {
        rig.submission(request(0, 1, 1));
    }
    let sequence = rig.submit(request(kind, tokens, outputs));
    rig.run();
    rig.outputs[&sequence].clone()
}
