//! A scheduler driven pass by pass, which checks after every step what must hold always.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::config::{EngineConfig, EngineKind, VllmConfig};
use crate::error::{CommandError, HandoffRefusal};
use crate::handoff::{HandoffId, HandoffKey};
use crate::kv_event::{BlockHash, BlockId, KvEvent};
use crate::metrics::PassMetrics;
use crate::output::{FinishReason, PrefillStats};
use crate::request::{Request, SequenceId};
use crate::scheduler::{
    Applied, ApplyResult, Cancelled, Command, Effects, HandoffFact, Pass, Scheduler, SequenceStatus, SequenceView,
    Submission, View,
};
use crate::time::EngineTime;
use crate::timing::{PassTiming, PassWork};

/// Every pass takes so long.
pub(super) const PASS: Duration = Duration::from_millis(10);

#[derive(Debug)]
struct Steady;

impl PassTiming for Steady {
    fn pass_duration(&mut self, work: &PassWork) -> Duration {
        assert!(!work.is_empty(), "a pass that computes nothing is not timed");
        PASS
    }
}

/// The options of most tests: blocks of 4 tokens, 32 of them usable, a budget of 64.
pub(super) fn small() -> VllmConfig {
    VllmConfig::default()
        .with_block_size(4)
        .with_num_gpu_blocks(33)
        .with_max_num_seqs(8)
        .with_max_num_batched_tokens(64)
}

/// The options of the cases in engine-semantics.md that count in blocks of 16.
pub(super) fn sixteen() -> VllmConfig {
    small().with_block_size(16).with_max_num_batched_tokens(2048)
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
#[derive(Debug, Default)]
pub(super) struct Done {
    /// `(sequence, tokens)` in schedule order.
    pub(super) rows: Vec<(u64, u32)>,
    /// `(sequence, prefix hit)` of all admissions, first and later ones.
    pub(super) hits: Vec<(u64, u32)>,
    pub(super) preempted: Vec<u64>,
    pub(super) reported: Vec<u64>,
    /// `(sequence, reason)` of those that ended.
    pub(super) finished: Vec<(u64, FinishReason)>,
    /// Who got a token.
    pub(super) sampled: Vec<u64>,
    pub(super) prefills: Vec<PrefillStats>,
    pub(super) events: Vec<KvEvent>,
    pub(super) metrics: Option<PassMetrics>,
    pub(super) facts: Vec<HandoffFact>,
}

pub(super) struct Rig {
    pub(super) scheduler: Scheduler,
    pub(super) now: EngineTime,
    options: VllmConfig,
    next: u64,
    /// Tokens so far, of sequences that have not ended too.
    pub(super) outputs: BTreeMap<u64, Vec<u32>>,
    ended: Vec<u64>,
    /// What a consumer of the events believes each block to hold.
    contents: BTreeMap<BlockId, BlockHash>,
}

impl Rig {
    pub(super) fn new(options: VllmConfig) -> Self {
        Self::with_max_model_len(options, 4096)
    }

    pub(super) fn with_max_model_len(options: VllmConfig, max_model_len: u32) -> Self {
        let config = EngineConfig::new(EngineKind::Vllm(options.clone())).with_max_model_len(max_model_len);
        let scheduler = Scheduler::new(&config).expect("a usable configuration");
        Self {
            scheduler: scheduler.with_timing(Box::new(Steady)).with_kv_events(),
            now: EngineTime::from_millis(1),
            options,
            next: 0,
            outputs: BTreeMap::new(),
            ended: Vec::new(),
            contents: BTreeMap::new(),
        }
    }

    pub(super) fn view(&self) -> View<'_> {
        self.scheduler.view()
    }

    /// How many requests were taken.
    pub(super) fn submitted(&self) -> u64 {
        self.next
    }

    /// How many ended, by themselves or by a cancel.
    pub(super) fn num_ended(&self) -> u64 {
        self.ended.len() as u64
    }

    pub(super) fn try_submit_at(&mut self, request: Request, now: EngineTime) -> ApplyResult {
        let sequence = SequenceId(self.next);
        let tie_key = u128::from(self.next);
        self.scheduler.apply(Command::Submit(Submission { sequence, tie_key, request }), now)
    }

    /// Submits at a time; the sequence's number.
    pub(super) fn submit_at(&mut self, request: Request, now: EngineTime) -> u64 {
        assert_eq!(self.try_submit_at(request, now), Ok(Applied::Submitted));
        self.next += 1;
        self.next - 1
    }

    /// Submits a moment ago, so that the next pass sees it.
    pub(super) fn submit(&mut self, request: Request) -> u64 {
        let just_before = EngineTime::from_nanos(self.now.as_nanos() - 1);
        self.submit_at(request, just_before)
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
        let command = Command::SubmitPrefill { handoff, submission };
        assert_eq!(self.try_command(command), Ok(Applied::Submitted));
        self.next - 1
    }

    /// Submits the destination of a handoff; the sequence's number.
    pub(super) fn destination(&mut self, handoff: HandoffKey, request: Request) -> u64 {
        let submission = self.submission(request);
        let command = Command::ReserveDestination { handoff, submission };
        assert_eq!(self.try_command(command), Ok(Applied::Submitted));
        self.next - 1
    }

    /// Goes on to a time, passes and all.
    pub(super) fn wait(&mut self, duration: Duration) -> Vec<Done> {
        self.now = self.now + duration;
        let mut done = self.run();
        done.extend(self.settle());
        done
    }

    pub(super) fn command(&mut self, command: Command) -> Applied {
        let applied = self.scheduler.apply(command, self.now).expect("a command that is taken");
        self.check();
        applied
    }

    pub(super) fn throttle(&mut self, sequence: u64, throttled: bool) {
        self.command(Command::Throttle { sequence: SequenceId(sequence), throttled });
    }

    pub(super) fn cancel(&mut self, sequence: u64) {
        assert_eq!(self.scheduler.cancel(SequenceId(sequence), self.now), Cancelled::Removed);
        assert_eq!(self.scheduler.cancel(SequenceId(sequence), self.now), Cancelled::Unknown);
        self.ended.push(sequence);
        self.check();
    }

    pub(super) fn begin(&mut self) -> Option<Pass> {
        let pass = self.scheduler.begin_pass(self.now)?;
        self.check();
        let budget = u64::from(self.options.max_num_batched_tokens);
        assert!(pass.work().total_tokens() <= budget, "case 5");
        assert_eq!(pass.work().total_tokens(), pass.rows().iter().map(|row| u64::from(row.new_tokens)).sum::<u64>());
        assert!(self.scheduler.begin_pass(self.now).is_none(), "one pass at a time");
        Some(pass)
    }

    pub(super) fn finish(&mut self, pass: Pass) -> Done {
        use crate::scheduler::RowKind::Running;
        self.now = pass.ends_at();
        let number = |sequence: &SequenceId| sequence.0;
        let mut done = Done {
            rows: pass.rows().iter().map(|row| (row.sequence.0, row.new_tokens)).collect(),
            hits: pass
                .rows()
                .iter()
                .filter(|row| row.kind != Running)
                .map(|row| (row.sequence.0, row.computed_before))
                .collect(),
            preempted: pass.preempted().iter().map(number).collect(),
            reported: pass.ended().iter().map(number).collect(),
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

    fn take(&mut self, effects: Effects, done: &mut Done) {
        for output in &effects.outputs {
            let sequence = output.sequence.0;
            assert!(!self.ended.contains(&sequence), "case 9: sequence {sequence} had ended");
            let tokens = self.outputs.entry(sequence).or_default();
            assert_eq!(output.prefill.is_some(), tokens.is_empty() && output.token.is_some());
            tokens.extend(output.token);
            done.prefills.extend(output.prefill);
            if output.token.is_some() {
                done.sampled.push(sequence);
            }
            if let Some(reason) = output.finish {
                done.finished.push((sequence, reason));
                self.ended.push(sequence);
            }
        }
        for event in &effects.kv_events {
            self.follow(event);
        }
        self.check_contents();
        let running = self.view().running().count() as u64;
        let metrics = effects.metrics;
        assert_eq!((metrics.num_requests_running, metrics.at), (running, self.now));
        assert_eq!(
            metrics.num_used_blocks,
            u64::from(metrics.num_usable_blocks as u32 - self.view().pool().num_free_blocks())
        );
        let blocks = |sequences: &mut dyn Iterator<Item = SequenceView<'_>>| -> u64 {
            sequences.map(|sequence| sequence.block_ids.len() as u64).sum()
        };
        assert_eq!(metrics.num_held_blocks, blocks(&mut self.view().held()));
        assert_eq!(metrics.num_reserved_blocks, blocks(&mut self.view().loading()));
        assert_eq!(metrics.num_requests_held, self.view().held().count() as u64);
        let fetch = metrics.kv_fetch;
        assert_eq!(fetch.in_progress + fetch.completed_waiting, self.view().loading().count() as u64);
        done.facts.clone_from(&effects.facts);
        done.metrics = effects.pass;
        done.events.clone_from(&effects.kv_events);
        self.scheduler.recycle(effects);
        self.check();
    }

    fn follow(&mut self, event: &KvEvent) {
        match event {
            KvEvent::BlockStored { block_hashes, block_ids, sequence, token_ids, block_size, .. } => {
                assert_eq!(token_ids.len(), block_ids.len() * *block_size as usize);
                for (&block, &hash) in block_ids.iter().zip(block_hashes) {
                    let before = self.contents.insert(block, hash);
                    assert_eq!(before.is_some(), sequence.is_none(), "block {block} is stored once, reported again");
                }
            }
            KvEvent::BlockRemoved { block_hash, block_id } => {
                assert_eq!(self.contents.remove(block_id), Some(*block_hash), "case 10");
            }
            KvEvent::AllBlocksCleared => self.contents.clear(),
        }
    }

    /// Case 10: the events alone say what the pool holds.
    fn check_contents(&self) {
        let pool = self.view().pool();
        assert_eq!(pool.num_blocks_with_hash(), self.contents.len());
        for (&block, &hash) in &self.contents {
            assert_eq!(pool.block_hash(block), Some(hash));
        }
    }

    /// Cases 1, 2 and 5: every block is free or owned, as often as sequences hold it.
    fn check(&self) {
        let (view, pool) = (self.view(), self.view().pool());
        let mut owners: BTreeMap<BlockId, u32> = BTreeMap::new();
        for sequence in view.running().chain(view.waiting()).chain(view.loading()).chain(view.held()) {
            sequence.block_ids.iter().for_each(|&block| *owners.entry(block).or_default() += 1);
        }
        assert!(view.waiting().all(|sequence| sequence.block_ids.is_empty()));
        assert!(view.running().all(|sequence| sequence.status == SequenceStatus::Running));
        assert!(view.running().count() <= self.options.max_num_seqs as usize);
        let free: Vec<_> = pool.free_queue().collect();
        assert_eq!(free.len() + owners.len(), pool.num_usable_blocks() as usize);
        assert_eq!(free.len(), pool.num_free_blocks() as usize);
        assert!(free.iter().all(|block| pool.ref_count(*block) == 0));
        for (block, owners) in owners {
            assert_eq!(pool.ref_count(block), owners, "block {block}");
        }
    }
}

pub(super) const LEASE: Duration = Duration::from_secs(30);

pub(super) fn refused(refusal: HandoffRefusal) -> ApplyResult {
    Err(CommandError::Handoff(refusal))
}

pub(super) fn activate(rig: &mut Rig, handoff: HandoffKey) -> ApplyResult {
    rig.try_command(Command::ActivateDestination { handoff, first_token: None })
}

pub(super) fn fail(rig: &mut Rig, handoff: HandoffKey, valid_tokens: u32) -> ApplyResult {
    rig.try_command(Command::FailTransfer { handoff, valid_tokens })
}

pub(super) fn release(rig: &mut Rig, handoff: HandoffKey) -> ApplyResult {
    rig.try_command(Command::ReleaseSource { handoff })
}

/// What is told when there is no pass to do.
pub(super) fn facts(rig: &mut Rig) -> Vec<HandoffFact> {
    let mut facts: Vec<_> = rig.run().into_iter().flat_map(|done| done.facts).collect();
    facts.extend(rig.settle().into_iter().flat_map(|done| done.facts));
    facts
}

pub(super) fn num_free(rig: &Rig) -> u32 {
    rig.view().pool().num_free_blocks()
}

/// A rig with a held source of 10 prompt tokens, which are three blocks.
pub(super) fn held() -> (Rig, HandoffKey) {
    let mut rig = Rig::new(small());
    rig.source(key(1, 1), request(1, 10, 1));
    rig.run();
    (rig, key(1, 1))
}
