//! Tokens per second through the live engine, beside a bare channel fan-out as the floor.
//!
//! The floor is one task that sends the same signals into as many bounded channels, and the same
//! readers: what the streams would cost if there were no engine.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use standin::timing::TimingConfig;
use standin::{
    EngineConfig, EngineKind, LiveEngine, OutputBuffering, OutputSignal, Request, Speedup, SubmitOptions, VllmConfig,
};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

const PROMPT_TOKENS: usize = 64;
const OUTPUT_TOKENS: u32 = 256;

fn config(streams: u32) -> EngineConfig {
    let vllm = VllmConfig::default()
        .with_num_gpu_blocks(2_000_000)
        .with_max_num_seqs(streams)
        .with_max_num_batched_tokens(streams.max(8_192));
    EngineConfig::new(EngineKind::Vllm(vllm)).with_timing(TimingConfig::ConstantMs(1.0)).with_speedup(Speedup::Instant)
}

async fn live(engine: &LiveEngine, streams: u32) -> u64 {
    let options = SubmitOptions::default().with_buffering(OutputBuffering::FullResponse);
    let mut readers = JoinSet::new();
    for stream in 0..streams {
        let prompt: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|token| token + stream * 1_000).collect();
        let request = Request::new(prompt, OUTPUT_TOKENS);
        let mut request = engine.submit_with(request, options).await.expect("the request is valid");
        readers.spawn(async move {
            let mut tokens = 0_u64;
            while let Some(signal) = request.recv().await {
                tokens += u64::from(signal.token_id.is_some());
            }
            tokens
        });
    }
    total(readers).await
}

async fn floor(template: OutputSignal, streams: u32) -> u64 {
    let mut readers = JoinSet::new();
    let mut senders = Vec::new();
    for _ in 0..streams {
        let (sender, mut receiver) = mpsc::channel::<OutputSignal>(OUTPUT_TOKENS as usize);
        senders.push(sender);
        readers.spawn(async move {
            let mut tokens = 0_u64;
            while let Some(signal) = receiver.recv().await {
                tokens += u64::from(signal.token_id.is_some());
            }
            tokens
        });
    }
    for _ in 0..OUTPUT_TOKENS {
        for sender in &senders {
            sender.try_send(template).expect("the channel holds the whole response");
            tokio::task::consume_budget().await;
        }
    }
    drop(senders);
    total(readers).await
}

async fn total(readers: JoinSet<u64>) -> u64 {
    readers.join_all().await.into_iter().sum()
}

fn live_stream(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let mut group = criterion.benchmark_group("live_stream");
    group.sample_size(10).measurement_time(Duration::from_secs(5));
    for streams in [1_u32, 64, 256, 1_024, 4_096, 16_384] {
        let tokens = u64::from(streams) * u64::from(OUTPUT_TOKENS);
        group.throughput(Throughput::Elements(tokens));
        let engine =
            runtime.block_on(async { LiveEngine::start(config(streams)) }).expect("the configuration is valid");
        group.bench_function(BenchmarkId::new("engine", streams), |bencher| {
            bencher.iter(|| assert_eq!(runtime.block_on(live(&engine, streams)), tokens));
        });
        let template = runtime.block_on(async {
            let mut request =
                engine.submit(Request::new(vec![1; PROMPT_TOKENS], 1)).await.expect("the request is valid");
            request.recv().await.expect("one signal")
        });
        group.bench_function(BenchmarkId::new("floor", streams), |bencher| {
            bencher.iter(|| assert_eq!(runtime.block_on(floor(template, streams)), tokens));
        });
        runtime.block_on(engine.shutdown()).expect("a clean shutdown");
    }
    group.finish();
}

criterion_group!(benches, live_stream);
criterion_main!(benches);
