//! The pure core of each engine kind: four requests that share prefixes, a pool that cannot hold them all, and
//! submissions, cancels, resets and halves of passes in every order.
//!
//! A state is what can be seen of a scheduler, who holds which block, contents and the order of the free list
//! included; interchangeable block ids, times and counters are left out, and of the ratio that SGLang's admission learns only its hundredths. What is hidden,
//! as the order in which SGLang's tree would evict, takes one of its values in each state: the first that was met.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use standin::timing::TimingConfig;
use standin::{
    Applied, BlockId, Cancelled, Command, Effects, EngineConfig, EngineKind, EngineTime, FinishReason, Pass, Request,
    Scheduler, SchedulingState, SequenceId, SequenceStatus, SglangConfig, Speedup, Submission, TokenGenerator,
    VllmConfig,
};

use super::explore::{Did, Explored, World, explore};

const BLOCK: u32 = 2;
const USABLE_BLOCKS: u32 = 4;
const NOW: EngineTime = EngineTime::from_millis(1);
const VOCABULARY: u32 = 9;
const SEED: u64 = 7;

/// Prompt and outputs of each request. Two begin alike, one is cached whole when they have run, one fills the pool.
const REQUESTS: [(&[u32], u32); 4] = [(&[1, 1, 2], 2), (&[1, 1, 2, 2], 1), (&[1, 1], 1), (&[3], 3)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Begin,
    Finish,
    Submit(u64),
    Cancel(u64),
    Reset { reset_running_requests: bool },
    State(SchedulingState),
}

/// How far a request is for whoever sent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Told {
    submitted: bool,
    produced: u32,
    ended: bool,
    /// A pass has reported that it is gone.
    reported: bool,
}

struct Engine {
    core: Scheduler,
    kind: EngineKind,
    pass: Option<Pass>,
    state: SchedulingState,
    told: [Told; REQUESTS.len()],
    /// Outputs that each request gets at the most.
    limits: [u32; REQUESTS.len()],
}

impl Engine {
    fn new(kind: &EngineKind) -> Self {
        let config = EngineConfig::new(kind.clone())
            .with_max_model_len(16)
            .with_vocab_size(VOCABULARY)
            .with_seed(SEED)
            .with_timing(TimingConfig::ConstantMs(1.0))
            .with_speedup(Speedup::Instant);
        let core = Scheduler::new(&config).expect("a usable configuration").with_kv_events();
        let (pass, state, told) = (None, SchedulingState::Running, [Told::default(); REQUESTS.len()]);
        let limits = REQUESTS.map(|(prompt, outputs)| match kind {
            // A page and a token short of the empty pool.
            EngineKind::Sglang(_) => {
                outputs.min(USABLE_BLOCKS * BLOCK - (prompt.len() as u32).next_multiple_of(BLOCK) - BLOCK - 1)
            }
            _ => outputs,
        });
        Self { core, kind: kind.clone(), pass, state, told, limits }
    }

    fn submit(&mut self, id: u64) -> Did {
        if self.told[id as usize].submitted {
            return Did::Nothing;
        }
        let (prompt, outputs) = REQUESTS[id as usize];
        let request = Request::new(prompt, outputs);
        let submission = Submission { sequence: SequenceId(id), tie_key: u128::from(id), request };
        assert_eq!(self.core.apply(Command::Submit(submission), NOW), Ok(Applied::Submitted));
        self.told[id as usize].submitted = true;
        Did::Something
    }

    fn cancel(&mut self, id: u64) -> Did {
        let told = &mut self.told[id as usize];
        let lives = told.submitted && !told.ended;
        match self.core.cancel(SequenceId(id), NOW) {
            Cancelled::Removed => {
                assert!(lives);
                told.ended = true;
                Did::Something
            }
            // An end that no pass shows may still be on its way.
            Cancelled::Unknown => Did::Nothing,
            Cancelled::Ending => panic!("cancelled sequences are gone at once"),
        }
    }

    fn begin(&mut self) -> Did {
        if self.pass.is_some() {
            assert!(self.core.begin_pass(NOW).is_none(), "one pass at a time");
            return Did::Nothing;
        }
        self.pass = self.core.begin_pass(NOW);
        for id in self.pass.iter().flat_map(|pass| pass.ended()) {
            let reported = &mut self.told[id.0 as usize].reported;
            assert!(!std::mem::replace(reported, true), "{id} is reported twice");
        }
        let view = self.core.view();
        let lives = (0..).map(SequenceId).take(REQUESTS.len()).any(|id| view.sequence(id).is_some());
        let can_run = self.state == SchedulingState::Running && lives;
        assert!(self.pass.is_some() || !can_run, "it idles");
        Did::Something
    }

    fn finish(&mut self) -> Did {
        let Some(pass) = self.pass.take() else { return Did::Nothing };
        let effects = self.core.finish_pass(pass, NOW);
        self.take(effects);
        Did::Something
    }

    fn take(&mut self, effects: Effects) {
        for output in &effects.outputs {
            let (id, told) = (output.sequence.0, &mut self.told[output.sequence.0 as usize]);
            assert!(told.submitted && !told.ended, "{id} has an output after its end");
            if let Some(token) = output.token {
                let generator = TokenGenerator::new(SEED, u128::from(id), VOCABULARY);
                assert_eq!(token, generator.token(told.produced, &[]));
                told.produced += 1;
            }
            told.ended = output.finish.is_some();
            let all = told.produced == self.limits[id as usize];
            assert_eq!(output.finish == Some(FinishReason::Length), all, "{output:?}");
        }
        self.core.recycle(effects);
    }

    fn reset(&mut self, reset_running_requests: bool) -> Did {
        match self.core.apply(Command::ResetPrefixCache { reset_running_requests }, NOW) {
            Ok(Applied::PrefixCacheReset { reset: false, preempted }) if preempted.is_empty() => Did::Nothing,
            Ok(Applied::PrefixCacheReset { .. }) => Did::Something,
            other => panic!("{other:?}"),
        }
    }

    /// The blocks in an order that does not depend on their ids, which are interchangeable: as sequences hold them,
    /// then as the free list has them, then by their contents.
    fn names(&self) -> Vec<BlockId> {
        let view = self.core.view();
        let pool = view.pool();
        let held = (0..).map(SequenceId).take(REQUESTS.len()).filter_map(|id| view.sequence(id));
        let mut cached: Vec<_> = (1..=USABLE_BLOCKS).collect();
        cached.sort_by_key(|&block| pool.block_hash(block));
        let mut names: Vec<BlockId> = Vec::new();
        for block in held.flat_map(|one| one.block_ids.to_vec()).chain(pool.free_queue()).chain(cached) {
            if !names.contains(&block) {
                names.push(block);
            }
        }
        names
    }

    /// Every block is free, cached or owned as often as it is counted; every request is in one place or has ended.
    fn check(&self) {
        let view = self.core.view();
        let pool = view.pool();
        let mut owners: BTreeMap<BlockId, u32> = BTreeMap::new();
        for one in view.running().chain(view.waiting()) {
            assert!(one.status == SequenceStatus::Running || one.block_ids.is_empty(), "{one:?}");
            assert!(one.num_computed_tokens <= one.num_tokens.min(one.block_ids.len() as u32 * BLOCK), "{one:?}");
            one.block_ids.iter().for_each(|&block| *owners.entry(block).or_default() += 1);
        }
        for block in 1..=USABLE_BLOCKS {
            let owned = owners.get(&block).copied().unwrap_or(0);
            assert_eq!(pool.ref_count(block), owned, "owners of block {block}");
            let free = pool.free_queue().filter(|&free| free == block).count();
            // A cached block without an owner is free with vLLM, and in the tree alone with SGLang.
            let cached = matches!(self.kind, EngineKind::Sglang(_)) && pool.block_hash(block).is_some();
            assert_eq!(free, usize::from(owned == 0 && !cached), "block {block}");
        }
        assert_eq!(pool.num_free_blocks() as usize + owners.len(), USABLE_BLOCKS as usize);
        let rows = self.pass.iter().flat_map(|pass| pass.rows()).map(|row| row.new_tokens).sum::<u32>();
        assert!(rows <= 4, "the budget");
        assert!(view.running().count() <= 2, "the slots");
        for (id, told) in (0..).map(SequenceId).zip(&self.told) {
            let lives = view.sequence(id).is_some();
            let places = view.running().chain(view.waiting()).filter(|one| one.sequence == id).count();
            assert!(places <= usize::from(lives) && (!lives || (told.submitted && !told.ended)), "{id}: {told:?}");
            assert!(told.produced <= self.limits[id.0 as usize]);
        }
    }
}

impl World for Engine {
    type Action = Action;

    fn state(&self) -> u64 {
        let (view, mut hasher) = (self.core.view(), DefaultHasher::new());
        let order: [Vec<_>; 2] =
            [view.running().map(|one| one.sequence).collect(), view.waiting().map(|one| one.sequence).collect()];
        (order, self.told, self.state == SchedulingState::Stopped).hash(&mut hasher);
        let pool = view.pool();
        let names = self.names();
        for id in (0..).map(SequenceId).take(REQUESTS.len()) {
            let one = view.sequence(id).map(|one| {
                let blocks: Vec<_> =
                    one.block_ids.iter().map(|block| names.iter().position(|name| name == block)).collect();
                (one.status, one.num_computed_tokens, one.num_output_tokens, blocks)
            });
            one.hash(&mut hasher);
        }
        pool.free_queue().count().hash(&mut hasher);
        for &block in &names {
            let hash = pool.block_hash(block);
            let is_found = hash.and_then(|hash| pool.find(hash)) == Some(block);
            (pool.ref_count(block), hash, is_found).hash(&mut hasher);
        }
        let rows = self.pass.as_ref().map(|pass| {
            pass.rows().iter().map(|row| (row.sequence, row.new_tokens, row.computed_before)).collect::<Vec<_>>()
        });
        rows.hash(&mut hasher);
        let tokens = view.token_pool().map(|pool| {
            let hundredths = (pool.new_token_ratio * 100.0).round() as u32;
            (pool.evictable_tokens, pool.protected_tokens, hundredths, pool.batch_is_full, pool.chunked)
        });
        tokens.hash(&mut hasher);
        hasher.finish()
    }

    fn act(&mut self, action: Action) -> Did {
        match action {
            Action::Begin => self.begin(),
            Action::Finish => self.finish(),
            Action::Submit(id) => self.submit(id),
            Action::Cancel(id) => self.cancel(id),
            Action::Reset { reset_running_requests } => self.reset(reset_running_requests),
            Action::State(state) if state == self.state => Did::Nothing,
            Action::State(state) => {
                self.state = state;
                assert_eq!(self.core.apply(Command::SetScheduling(state), NOW), Ok(Applied::SchedulingSet));
                Did::Something
            }
        }
    }

    fn act_and_check(&mut self, action: Action) -> Did {
        let did = self.act(action);
        self.check();
        did
    }

    /// Lets everything run to its end.
    fn close(&mut self) {
        self.finish();
        self.act(Action::State(SchedulingState::Running));
        for passes in 0.. {
            assert!(passes < 60, "it does not end");
            self.begin();
            if self.finish() == Did::Nothing {
                break;
            }
            self.check();
        }
        let pool = self.core.view().pool();
        assert_eq!(pool.num_free_blocks(), USABLE_BLOCKS);
        assert!(!self.core.view().has_work());
        for told in &self.told {
            assert_eq!((told.ended, told.reported), (told.submitted, told.submitted));
        }
    }
}

/// How many of the requests are there to submit: all in the gate, three in a debug build's time.
fn num_requests() -> u64 {
    match std::env::var("STANDIN_EXHAUSTIVE").as_deref() {
        Ok("full") => REQUESTS.len() as u64,
        Ok(other) => panic!("STANDIN_EXHAUSTIVE = {other}: full, or unset"),
        Err(_) => 3,
    }
}

fn explored(kind: &EngineKind, states: &[SchedulingState]) -> Explored {
    let mut actions = vec![Action::Begin, Action::Finish];
    actions.extend(states.iter().copied().map(Action::State));
    actions.extend([false, true].map(|reset_running_requests| Action::Reset { reset_running_requests }));
    actions.extend((0..num_requests()).flat_map(|id| [Action::Submit(id), Action::Cancel(id)]));
    let explored = explore(|| Engine::new(kind), &actions);
    println!("{explored:?}");
    explored
}

#[test]
fn vllms_core_is_explored_and_everything_ends_from_everywhere() {
    let vllm = VllmConfig::default()
        .with_block_size(BLOCK)
        .with_num_gpu_blocks(USABLE_BLOCKS + 1)
        .with_max_num_seqs(2)
        .with_max_num_batched_tokens(4);
    let [few, all] = [(3_546, 35_460), (69_317, 831_804)];
    let (states, transitions) = if num_requests() == 3 { few } else { all };
    assert_eq!(explored(&EngineKind::Vllm(vllm), &[]), Explored { states, transitions });
}

/// There are fewer of its states, so a closed gate is added to them.
#[test]
fn sglangs_core_is_explored_and_everything_ends_from_everywhere() {
    let sglang = SglangConfig::default()
        .with_page_size(BLOCK)
        .with_max_total_tokens(USABLE_BLOCKS * BLOCK)
        .with_max_running_requests(2)
        .with_chunked_prefill_size(Some(4))
        .with_schedule_conservativeness(0.001);
    let gate = [SchedulingState::Stopped, SchedulingState::Running];
    let [few, all] = [(4_832, 57_984), (132_480, 1_854_720)];
    let (states, transitions) = if num_requests() == 3 { few } else { all };
    assert_eq!(explored(&EngineKind::Sglang(sglang), &gate), Explored { states, transitions });
}
