//! What a request costs in memory: every allocation is counted.
#![cfg(feature = "live")]

mod counting;

use std::sync::{Arc, Mutex, PoisonError};

use counting::counted;
use standin::timing::TimingConfig;
use standin::{
    Command, EngineConfig, EngineKind, EngineTime, LiveEngine, LiveRequest, OutputBuffering, Prompt, PromptSource,
    Request, Scheduler, SchedulingState, SequenceId, SglangConfig, Speedup, Submission, SubmitOptions, VllmConfig,
};

/// The tally is one for all threads: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

const REQUESTS: usize = 1_000;
const PROMPT: usize = 64;
/// So many that every sequence's list of blocks has grown to 32 places, which hold 512 tokens.
const WARM_UP: usize = 260;
const MEASURED: usize = 150;

fn engine() -> LiveEngine {
    let vllm = VllmConfig::default().with_num_gpu_blocks(40_000).with_max_num_batched_tokens(65_536);
    let config = EngineConfig::new(EngineKind::Vllm(vllm)).with_timing(TimingConfig::ConstantMs(10.0));
    LiveEngine::start(config.with_speedup(Speedup::Instant)).expect("the configuration is valid")
}

/// Keeps pace: Tokio would have one task that reads so many streams pause after 128 signals.
async fn read(requests: &mut [LiveRequest], tokens: usize) {
    tokio::task::unconstrained(async {
        for _ in 0..tokens {
            for request in &mut *requests {
                let signal = request.recv().await.expect("a token");
                assert!(signal.token_id.is_some() && signal.finish.is_none());
            }
        }
    })
    .await;
}

/// Per request: allocations and bytes.
#[derive(Debug)]
struct Cost {
    allocations: f64,
    bytes: f64,
}

impl Cost {
    fn since((allocations, bytes, _): (u64, i64, i64)) -> Self {
        let (allocations_now, bytes_now, _) = counted();
        Self {
            allocations: (allocations_now - allocations) as f64 / REQUESTS as f64,
            bytes: (bytes_now - bytes) as f64 / REQUESTS as f64,
        }
    }

    fn is_at_most(&self, allocations: f64, bytes: f64) -> bool {
        self.allocations <= allocations && self.bytes <= bytes
    }
}

/// The caller's own data are the prompts and the streams'
/// handles; what the engine keeps in common (pages, queues, the pool) counts as the requests'.
#[tokio::test(start_paused = true)]
#[expect(clippy::await_holding_lock, reason = "the runtime has one thread, and nobody in it wants the lock")]
async fn a_request_costs_at_most_4_kb_and_8_allocations_and_a_token_none() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let engine = engine();
    let prompt = |n: u32| (0..PROMPT as u32).map(|i| n * 100 + i).collect();
    let prompts: Vec<Arc<[u32]>> = (0..REQUESTS as u32).map(prompt).collect();
    let options = SubmitOptions::default().with_buffering(OutputBuffering::FullResponse);
    let mut requests = Vec::with_capacity(REQUESTS);
    let mut left_behind = Vec::new();
    for round in 0..5 {
        engine.set_scheduling(SchedulingState::Stopped).await.expect("it runs");
        let start = counted();
        for prompt in &prompts {
            let request = Request::new(Arc::clone(prompt), 448);
            requests.push(engine.submit_with(request, options).await.expect("a valid request"));
        }
        let queued = Cost::since(start);
        assert!(queued.is_at_most(4.0, 1_024.0), "round {round}, queued: {queued:?}");
        engine.set_scheduling(SchedulingState::Running).await.expect("it runs");
        read(&mut requests, WARM_UP).await;
        let decoding = Cost::since(start);
        assert!(decoding.is_at_most(8.0, 4_096.0), "round {round}, with {WARM_UP} tokens: {decoding:?}");
        let warm = counted();
        read(&mut requests, MEASURED).await;
        assert_eq!(counted().0 - warm.0, 0, "round {round}: allocations of {MEASURED} tokens each");
        requests.clear();
        while engine.active_request_count() > 0 {
            tokio::task::yield_now().await;
        }
        left_behind.push(counted().1);
    }
    assert!(left_behind[4] - left_behind[3] < 1_024, "once all of the pool was used, memory is flat: {left_behind:?}");
    engine.shutdown().await.expect("a clean end");
}

/// A prompt that nobody holds: its tokens are their positions.
#[derive(Debug)]
struct Positions(usize);

impl PromptSource for Positions {
    fn num_tokens(&self) -> usize {
        self.0
    }

    fn fill(&self, start: usize, out: &mut [u32]) {
        out.iter_mut().zip(start..).for_each(|(token, position)| *token = position as u32);
    }
}

/// Where the model's length allows a prompt of ten million tokens, it costs bytes that grow with its blocks alone; with
/// SGLang also its tokens, which the prefix tree keeps. Blocks of one token are tried with a million of them.
#[test]
fn a_prompt_of_ten_million_tokens_costs_a_few_bytes_a_token() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let vllm = |tokens: u32, block_size: u32| {
        let vllm = VllmConfig::default().with_block_size(block_size).with_num_gpu_blocks(tokens / block_size + 9);
        (tokens, EngineKind::Vllm(vllm))
    };
    let sglang = |tokens: u32, page_size: u32| {
        let sglang =
            SglangConfig::default().with_page_size(page_size).with_max_total_tokens(tokens + 9 * page_size + 9);
        (tokens, EngineKind::Sglang(sglang))
    };
    // Bytes for each token of the prompt, at the most.
    let rows = [
        (vllm(10_000_000, 16), 10.0),
        (vllm(1_000_000, 1), 150.0),
        (sglang(10_000_000, 64), 8.0),
        (sglang(1_000_000, 1), 20.0),
    ];
    for ((prompt_tokens, kind), most) in rows {
        let what = format!("{prompt_tokens} tokens in blocks of {}", kind.block_size());
        let config =
            EngineConfig::new(kind).with_max_model_len(prompt_tokens + 5).with_timing(TimingConfig::ConstantMs(1.0));
        let mut scheduler = Scheduler::new(&config).expect("valid");
        let before = counted().1;
        let request = Request::new(Prompt::Lazy(Arc::new(Positions(prompt_tokens as usize))), 3);
        assert_eq!(request.validate(&config), Ok(()));
        let submission = Submission { sequence: SequenceId(0), tie_key: 0, request };
        scheduler.apply(Command::Submit(submission), EngineTime::ZERO).expect("valid");
        let (mut now, mut tokens) = (EngineTime::ZERO, 0);
        while let Some(pass) = scheduler.begin_pass(now) {
            now = pass.ends_at();
            let effects = scheduler.finish_pass(pass, now);
            tokens += effects.outputs.len();
            scheduler.recycle(effects);
        }
        let bytes = (counted().2 - before) as f64 / f64::from(prompt_tokens);
        println!("{what}: {bytes:.1} bytes a token");
        assert!(tokens == 3 && bytes <= most, "{what}: {tokens} outputs, {bytes} bytes for each");
    }
}
