//! What one decode pass costs the pure core, against the number of running sequences.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use standin::timing::TimingConfig;
use standin::{
    Command, EngineConfig, EngineKind, EngineTime, Request, Scheduler, SequenceId, SglangConfig, Submission,
    VllmConfig, VllmPolicy,
};

const PROMPT_TOKENS: usize = 64;
const OUTPUT_TOKENS: u32 = 100_000;

/// The engine kind for so many sequences.
type Kind = fn(u32) -> EngineKind;

fn vllm(batch: u32, policy: VllmPolicy) -> EngineKind {
    let vllm = VllmConfig::default()
        .with_num_gpu_blocks(4_000_000)
        .with_max_num_seqs(batch)
        .with_max_num_batched_tokens(1 << 20)
        .with_policy(policy);
    EngineKind::Vllm(vllm)
}

fn sglang(batch: u32, page_size: u32) -> EngineKind {
    let sglang = SglangConfig::default()
        .with_page_size(page_size)
        .with_max_total_tokens(1 << 31)
        .with_max_running_requests(batch)
        .with_max_prefill_tokens(1 << 20)
        .with_chunked_prefill_size(None);
    EngineKind::Sglang(sglang)
}

/// A scheduler whose `batch` sequences have all been prefilled.
fn decoding(batch: u32, kind: EngineKind) -> (Scheduler, EngineTime, u64) {
    let config = EngineConfig::new(kind).with_timing(TimingConfig::ConstantMs(1.0));
    let mut scheduler = Scheduler::new(&config).expect("the configuration is valid");
    for sequence in 0..u64::from(batch) {
        submit(&mut scheduler, sequence, EngineTime::ZERO);
    }
    let mut now = EngineTime::ZERO;
    pass(&mut scheduler, &mut now);
    (scheduler, now, u64::from(batch))
}

fn submit(scheduler: &mut Scheduler, sequence: u64, now: EngineTime) {
    let prompt: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|token| token + sequence as u32 * 1_000).collect();
    let submission = Submission {
        sequence: SequenceId(sequence),
        tie_key: u128::from(sequence),
        request: Request::new(prompt, OUTPUT_TOKENS),
    };
    scheduler.apply(Command::Submit(submission), now).expect("the request is valid");
}

/// One pass; returns how many tokens it produced.
fn pass(scheduler: &mut Scheduler, now: &mut EngineTime) -> usize {
    let pass = scheduler.begin_pass(*now).expect("there is work");
    *now = pass.ends_at();
    let effects = scheduler.finish_pass(pass, *now);
    let tokens = effects.outputs.len();
    scheduler.recycle(effects);
    tokens
}

fn scheduler_pass(criterion: &mut Criterion) {
    let kinds: [(&str, Kind); 4] = [
        ("Fcfs", |batch| vllm(batch, VllmPolicy::Fcfs)),
        ("Priority", |batch| vllm(batch, VllmPolicy::Priority)),
        ("sglang/page_1", |batch| sglang(batch, 1)),
        ("sglang/page_16", |batch| sglang(batch, 16)),
    ];
    for (name, kind) in kinds {
        let mut group = criterion.benchmark_group(format!("scheduler_pass/{name}"));
        for batch in [1_u32, 16, 64, 256, 1_024, 4_096] {
            group.throughput(Throughput::Elements(u64::from(batch)));
            group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
                let (mut scheduler, mut now, _) = decoding(batch, kind(batch));
                let mut passes = 0;
                bencher.iter(|| {
                    passes += 1;
                    if passes == OUTPUT_TOKENS - 1 {
                        // Before the sequences end; amortised over a hundred thousand passes.
                        (scheduler, now, _) = decoding(batch, kind(batch));
                        passes = 1;
                    }
                    assert_eq!(pass(&mut scheduler, &mut now), batch as usize);
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, scheduler_pass);
criterion_main!(benches);
