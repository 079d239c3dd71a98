//! What several tables need.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use standin::timing::TimingConfig;
use standin::{
    Command, EngineConfig, EngineKind, EngineTime, FinishReason, Prompt, PromptSource, Request, Scheduler, SequenceId,
    SglangConfig, Submission, VllmConfig,
};

/// That what was refused says so, and what was not was not expected to be.
#[track_caller]
pub(crate) fn assert_refused<T: Debug, E: ToString>(what: &str, result: Result<T, E>, expected: &str) {
    match result {
        Ok(value) => assert_eq!(expected, "", "{what}: {value:?} was taken"),
        Err(error) => assert_eq!(error.to_string(), expected, "{what}"),
    }
}

/// 100 blocks of 4 tokens, 16 sequences, 64 tokens a pass and a request.
pub(crate) fn small_vllm() -> VllmConfig {
    VllmConfig::default()
        .with_block_size(4)
        .with_num_gpu_blocks(101)
        .with_max_num_seqs(16)
        .with_max_num_batched_tokens(64)
}

/// The same sizes.
pub(crate) fn small_sglang() -> SglangConfig {
    SglangConfig::default()
        .with_page_size(4)
        .with_max_total_tokens(400)
        .with_max_running_requests(16)
        .with_chunked_prefill_size(Some(64))
}

pub(crate) fn engine(kind: EngineKind) -> EngineConfig {
    EngineConfig::new(kind).with_max_model_len(64).with_timing(TimingConfig::ConstantMs(10.0))
}

/// A small engine of each kind.
pub(crate) fn kinds() -> [EngineConfig; 2] {
    [engine(EngineKind::Vllm(small_vllm())), engine(EngineKind::Sglang(small_sglang()))]
}

pub(crate) fn submission(id: u64, request: Request) -> Submission {
    Submission { sequence: SequenceId(id), tie_key: u128::from(id), request }
}

/// Runs one request on the bare scheduler, from `now` on: how many tokens it had, and how it ended; `None` where it has
/// not ended after so many passes.
pub(crate) fn run(
    config: &EngineConfig,
    request: Request,
    mut now: EngineTime,
    passes: usize,
) -> (usize, Option<FinishReason>) {
    let mut scheduler = Scheduler::new(config).expect("a configuration that the core takes");
    scheduler.apply(Command::Submit(submission(u64::MAX, request)), now).expect("a request that the core takes");
    let mut tokens = 0;
    for _ in 0..passes {
        now = now.max(scheduler.next_deadline().unwrap_or(now));
        let Some(pass) = scheduler.begin_pass(now) else { continue };
        now = pass.ends_at();
        for output in scheduler.finish_pass(pass, now).outputs {
            tokens += usize::from(output.token.is_some());
            if output.finish.is_some() {
                return (tokens, output.finish);
            }
        }
    }
    (tokens, None)
}

/// A prompt that claims these lengths one after the other, the last one ever after. Its tokens are positions.
#[derive(Debug)]
pub(crate) struct Claim {
    lengths: Vec<usize>,
    asked: AtomicUsize,
}

impl Claim {
    pub(crate) fn prompt(lengths: impl Into<Vec<usize>>) -> Prompt {
        Prompt::Lazy(Arc::new(Self { lengths: lengths.into(), asked: AtomicUsize::new(0) }))
    }
}

impl PromptSource for Claim {
    fn num_tokens(&self) -> usize {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        self.lengths[asked.min(self.lengths.len() - 1)]
    }

    fn fill(&self, start: usize, out: &mut [u32]) {
        out.iter_mut().zip(start..).for_each(|(token, position)| *token = position as u32);
    }
}

/// A prompt that must not be made.
#[derive(Debug)]
pub(crate) struct Untouchable(pub(crate) usize);

impl PromptSource for Untouchable {
    fn num_tokens(&self) -> usize {
        self.0
    }

    fn fill(&self, start: usize, out: &mut [u32]) {
        panic!("{} tokens from {start} on were asked for", out.len());
    }
}

pub(crate) fn untouchable(num_tokens: usize) -> Prompt {
    Prompt::Lazy(Arc::new(Untouchable(num_tokens)))
}
