//! Load on a live engine, one `key=value` line per run, each beside its floor in the same process.
//!
//! ```text
//! load tput N PROMPT OUTPUT    N requests at once, zero-duration passes: tokens per second, and those of bare channels
//! load seq N                   N requests of one token, one after the other: latency, and that of two bare hops
//! load busy N PASS_MS          N submissions during passes of PASS_MS: latency, and that of an idle engine
//! load cancel N PASS_MS        N cancels during passes of PASS_MS: latency, and that of an idle engine
//! load mem N PROMPT            N requests in the queue: resident bytes per request
//! ```
//!
//! `STANDIN_REPEAT` (default 5) sets how often engine and floor are measured in turns; medians are printed.

use std::error::Error;
use std::time::{Duration, Instant};

use standin::timing::TimingConfig;
use standin::{
    EngineConfig, EngineKind, FinishReason, LiveEngine, LiveRequest, OutputBuffering, OutputSignal, Request,
    SchedulingState, Speedup, SubmitOptions, VllmConfig,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let numbers = arguments.iter().skip(1).map(|argument| argument.parse()).collect::<Result<Vec<u64>, _>>()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mode = arguments.first().map_or("", String::as_str);
    let line =
        runtime.block_on(async {
            match (mode, numbers.as_slice()) {
                ("tput", &[n, prompt, output]) => throughput(n, prompt, output).await,
                ("seq", &[n]) => sequential(n).await,
                ("busy", &[n, pass_ms]) => busy(n, pass_ms).await,
                ("cancel", &[n, pass_ms]) => cancels(n, pass_ms).await,
                ("mem", &[n, prompt]) => memory(n, prompt).await,
                _ => Err("usage: load tput N PROMPT OUTPUT | seq N | busy N PASS_MS | cancel N PASS_MS | mem N PROMPT"
                    .into()),
            }
        })?;
    println!("{mode} {line}");
    Ok(())
}

fn repeats() -> usize {
    std::env::var("STANDIN_REPEAT").ok().and_then(|text| text.parse().ok()).unwrap_or(5)
}

#[expect(clippy::disallowed_methods, reason = "a load generator measures real time")]
fn clock() -> Instant {
    Instant::now()
}

fn config(pass: Duration, requests: u64, tokens: u64) -> EngineConfig {
    let slots = u32::try_from(requests.max(1)).unwrap_or(u32::MAX);
    let blocks = u32::try_from(requests * tokens.div_ceil(16) + 16_384).unwrap_or(u32::MAX);
    let vllm = VllmConfig::default()
        .with_num_gpu_blocks(blocks)
        .with_max_num_seqs(slots)
        .with_max_num_batched_tokens(slots.max(8_192));
    let speedup = if pass.is_zero() { Speedup::Instant } else { Speedup::default() };
    EngineConfig::new(EngineKind::Vllm(vllm))
        .with_timing(TimingConfig::ConstantMs(pass.as_secs_f64() * 1e3))
        .with_speedup(speedup)
}

fn prompt(request: u64, tokens: u64) -> Vec<u32> {
    (0..tokens).map(|token| (request * 7_919 + token) as u32 % 100_000).collect()
}

fn whole_response() -> SubmitOptions {
    SubmitOptions::default().with_buffering(OutputBuffering::FullResponse)
}

async fn read_all(mut request: LiveRequest) -> (u64, Option<FinishReason>) {
    let mut tokens = 0;
    while let Some(signal) = request.recv().await {
        tokens += u64::from(signal.token_id.is_some());
    }
    (tokens, request.finish_reason())
}

/// Tokens per second of the engine and of bare channels, in turns.
async fn throughput(n: u64, prompt_tokens: u64, output: u64) -> Outcome<String> {
    let engine = LiveEngine::start(config(Duration::ZERO, n, prompt_tokens + output))?;
    let mut probe = engine.submit(Request::new(vec![1], 1)).await?;
    let template = probe.recv().await.ok_or("the probe has one signal")?;
    let (mut live, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..repeats() {
        live.push(live_round(&engine, n, prompt_tokens, output).await?);
        floor.push(floor_round(template, n, output).await?);
    }
    engine.shutdown().await?;
    let tokens = (n * output) as f64;
    let rate = |costs: &[Cost]| tokens / median(costs.iter().map(|cost| cost.elapsed.as_secs_f64()).collect());
    let cpu = |costs: &[Cost]| median(costs.iter().map(|cost| cost.cpu.as_nanos() as f64).collect()) / tokens;
    let (rate, floor_rate, cpu, floor_cpu) = (rate(&live), rate(&floor), cpu(&live), cpu(&floor));
    Ok(format!(
        "n={n} tok_per_s={rate:.0} floor_tok_per_s={floor_rate:.0} ratio={:.3} cpu_ns_per_tok={cpu:.0} \
         floor_cpu_ns_per_tok={floor_cpu:.0} cpu_ratio={:.3}",
        rate / floor_rate,
        floor_cpu / cpu
    ))
}

/// What a round took.
struct Cost {
    elapsed: Duration,
    /// Processor time of all threads: what is left of a measurement on a machine that others use too.
    cpu: Duration,
}

struct Meter {
    start: Instant,
    cpu: Duration,
}

impl Meter {
    fn start() -> Outcome<Self> {
        Ok(Self { cpu: cpu_time()?, start: clock() })
    }

    fn stop(self) -> Outcome<Cost> {
        Ok(Cost { elapsed: self.start.elapsed(), cpu: cpu_time()?.saturating_sub(self.cpu) })
    }
}

/// Processor time of this process so far.
fn cpu_time() -> Outcome<Duration> {
    let mut nanos = 0;
    for thread in std::fs::read_dir("/proc/self/task")? {
        let schedstat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        let on_cpu = schedstat.split_whitespace().next().ok_or("an empty schedstat")?;
        nanos += on_cpu.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(nanos))
}

/// All requests are registered and their readers wait before the clock starts.
async fn live_round(engine: &LiveEngine, n: u64, prompt_tokens: u64, output: u64) -> Outcome<Cost> {
    engine.reset_prefix_cache().await?;
    engine.set_scheduling(SchedulingState::Stopped).await?;
    let mut readers = JoinSet::new();
    for request in 0..n {
        let request = Request::new(prompt(request, prompt_tokens), u32::try_from(output)?);
        readers.spawn(read_all(engine.submit_with(request, whole_response()).await?));
    }
    tokio::task::yield_now().await;
    let meter = Meter::start()?;
    engine.set_scheduling(SchedulingState::Running).await?;
    let ends = readers.join_all().await;
    let cost = meter.stop()?;
    let whole = ends.iter().all(|end| *end == (output, Some(FinishReason::Length)));
    if whole { Ok(cost) } else { Err("a request lost tokens".into()) }
}

/// One task sends the same signals round by round, yielding only through the cooperative budget.
async fn floor_round(template: OutputSignal, n: u64, output: u64) -> Outcome<Cost> {
    let mut readers = JoinSet::new();
    let mut senders = Vec::new();
    for _ in 0..n {
        let (sender, mut receiver) = mpsc::channel::<OutputSignal>(usize::try_from(output)?);
        senders.push(sender);
        readers.spawn(async move {
            let mut tokens = 0_u64;
            while receiver.recv().await.is_some() {
                tokens += 1;
            }
            tokens
        });
    }
    tokio::task::yield_now().await;
    let meter = Meter::start()?;
    let mut sender = JoinSet::new();
    sender.spawn(async move {
        for _ in 0..output {
            for sender in &senders {
                if sender.try_send(template).is_err() {
                    return;
                }
                tokio::task::consume_budget().await;
            }
        }
    });
    let tokens: u64 = readers.join_all().await.into_iter().sum();
    let cost = meter.stop()?;
    if tokens == n * output { Ok(cost) } else { Err("the floor lost tokens".into()) }
}

/// One-token requests one after the other, and two bare hops with a oneshot reply.
async fn sequential(n: u64) -> Outcome<String> {
    let engine = LiveEngine::start(config(Duration::ZERO, 1, 64))?;
    let (mut live, mut floor) = (Vec::new(), Vec::new());
    let (first, mut second) = mpsc::channel::<oneshot::Sender<u32>>(8);
    let (forward, mut last) = mpsc::channel::<oneshot::Sender<u32>>(8);
    let mut hops = JoinSet::new();
    hops.spawn(async move {
        while let Some(reply) = second.recv().await {
            if forward.send(reply).await.is_err() {
                return;
            }
        }
    });
    hops.spawn(async move {
        while let Some(reply) = last.recv().await {
            let _: Result<(), u32> = reply.send(1);
        }
    });
    for request in 0..n {
        let prompt = prompt(request, 16);
        let start = clock();
        let (tokens, _) = read_all(engine.submit(Request::new(prompt, 1)).await?).await;
        live.push(start.elapsed());
        if tokens != 1 {
            return Err("a request lost its token".into());
        }
        let start = clock();
        let (reply, answer) = oneshot::channel();
        first.send(reply).await?;
        answer.await?;
        floor.push(start.elapsed());
    }
    engine.shutdown().await?;
    Ok(format!("n={n} {} {}", percentiles("", &mut live), percentiles("floor_", &mut floor)))
}

/// Submissions to an engine whose pass is under way, and to an idle one.
async fn busy(n: u64, pass_ms: u64) -> Outcome<String> {
    let engine = busy_engine(n, pass_ms).await?;
    let idle = LiveEngine::start(config(Duration::ZERO, n, 64))?;
    let (mut during, mut floor) = (Vec::new(), Vec::new());
    let mut kept = Vec::new();
    for request in 0..n {
        for (engine, latencies) in [(&engine.0, &mut during), (&idle, &mut floor)] {
            let request = Request::new(prompt(request + 1, 16), 1);
            let start = clock();
            kept.push(engine.submit_with(request, whole_response()).await?);
            latencies.push(start.elapsed());
        }
    }
    drop(kept);
    Ok(format!("n={n} pass_ms={pass_ms} {} {}", percentiles("", &mut during), percentiles("idle_", &mut floor)))
}

/// Cancels during a pass, and on an idle engine that keeps its requests in the queue.
async fn cancels(n: u64, pass_ms: u64) -> Outcome<String> {
    let engine = busy_engine(n, pass_ms).await?;
    let idle = LiveEngine::start(config(Duration::ZERO, n, 64))?;
    idle.set_scheduling(SchedulingState::Stopped).await?;
    let (mut during, mut floor) = (Vec::new(), Vec::new());
    for request in 0..n {
        for (engine, latencies) in [(&engine.0, &mut during), (&idle, &mut floor)] {
            let live = engine.submit_with(Request::new(prompt(request + 1, 16), 1), whole_response()).await?;
            let start = clock();
            if !live.cancel().await? {
                return Err("a cancel came too late".into());
            }
            latencies.push(start.elapsed());
        }
    }
    Ok(format!("n={n} pass_ms={pass_ms} {} {}", percentiles("", &mut during), percentiles("idle_", &mut floor)))
}

/// An engine that one long request keeps busy.
async fn busy_engine(n: u64, pass_ms: u64) -> Outcome<(LiveEngine, LiveRequest)> {
    let engine = LiveEngine::start(config(Duration::from_millis(pass_ms), n + 1, 4_096))?;
    let keeper = engine.submit_with(Request::new(vec![1; 16], 100_000), whole_response()).await?;
    // Its first pass is under way when the metrics say so at the next boundary, or now, in a pass this long.
    tokio::task::yield_now().await;
    Ok((engine, keeper))
}

/// Resident memory of requests that wait in the queue.
async fn memory(n: u64, prompt_tokens: u64) -> Outcome<String> {
    let engine = LiveEngine::start(config(Duration::ZERO, n, prompt_tokens + 64))?;
    engine.set_scheduling(SchedulingState::Stopped).await?;
    let prompt: std::sync::Arc<[u32]> = prompt(0, prompt_tokens).into();
    let mut requests = Vec::with_capacity(usize::try_from(n)?);
    let before = resident_bytes()?;
    for _ in 0..n {
        requests.push(engine.submit(Request::new(std::sync::Arc::clone(&prompt), 64)).await?);
    }
    let per_request = resident_bytes()?.saturating_sub(before) as f64 / n as f64;
    drop(requests);
    engine.shutdown().await?;
    Ok(format!("n={n} bytes_per_req={per_request:.0}"))
}

fn resident_bytes() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS in /proc/self/status")?;
    let kib: u64 = line.split_whitespace().nth(1).ok_or("VmRSS has no value")?.parse()?;
    Ok(kib * 1024)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn percentiles(prefix: &str, latencies: &mut [Duration]) -> String {
    latencies.sort_unstable();
    let at = |share: usize| latencies[(latencies.len() - 1) * share / 100].as_secs_f64() * 1e6;
    format!("{prefix}p50_us={:.1} {prefix}p99_us={:.1}", at(50), at(99))
}
