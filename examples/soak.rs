//! A long run in mixed modes, and whether it stays flat.
//!
//! `cargo run --release --example soak -- --requests 1000000`
//!
//! Two engines of the vLLM kind hand requests over to each other and serve others beside that; a third one is of the
//! SGLang kind. Clients read, read slowly, go away, cancel, drop calls and streams. Ten times everybody stops for a
//! moment: what the engines keep then must not depend on how much they have done. The exit code says whether it does.

#[path = "../tests/counting/mod.rs"]
mod counting;

use std::fs;
use std::future::{Future, poll_fn};
use std::num::NonZeroUsize;
use std::pin::pin;
use std::process::ExitCode;
use std::task::Poll;

use clap::Parser;
use standin::{
    EngineConfig, EngineKind, LiveEngine, LiveRequest, OutputBuffering, Request, SglangConfig, Speedup, SubmitOptions,
    VllmConfig, handoff,
};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use uuid::Uuid;

/// Clients at a time.
const CLIENTS: u64 = 64;
/// How often everything is looked at.
const POINTS: u64 = 10;
/// Bytes per request by which memory may grow: less than one in a hundred would keep.
const FLAT: f64 = 0.5;

#[derive(Debug, Parser)]
struct Options {
    /// Requests in all.
    #[arg(long, default_value_t = 1_000_000)]
    requests: u64,
}

/// What is looked at when nothing is under way.
#[derive(Debug, Clone, Copy)]
struct Point {
    requests: u64,
    resident: Option<u64>,
    allocated: i64,
    tasks: usize,
}

#[derive(Debug, Clone)]
struct Engines {
    prefill: LiveEngine,
    decode: LiveEngine,
    sglang: LiveEngine,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let options = Options::parse();
    let engines = Engines {
        prefill: start(vllm())?,
        decode: start(vllm())?,
        sglang: start(EngineKind::Sglang(
            SglangConfig::default().with_page_size(4).with_max_total_tokens(8_192).with_max_running_requests(32),
        ))?,
    };
    let mut points: Vec<Point> = Vec::with_capacity(POINTS as usize);
    let begun = tokio::time::Instant::from_std(now());
    for point in 1..=POINTS {
        let requests = options.requests * point / POINTS;
        let done = points.last().map_or(0, |point| point.requests);
        serve(&engines, done..requests).await;
        let rate = requests as f64 / begun.elapsed().as_secs_f64();
        let now = look(&engines, requests).await;
        println!("{}", line(now, rate));
        points.push(now);
    }
    for engine in [&engines.prefill, &engines.decode, &engines.sglang] {
        engine.shutdown().await?;
    }
    Ok(verdict(&points))
}

#[expect(clippy::disallowed_methods, reason = "how fast it is in real time")]
fn now() -> std::time::Instant {
    std::time::Instant::now()
}

fn vllm() -> EngineKind {
    let vllm = VllmConfig::default().with_block_size(4).with_num_gpu_blocks(2_049).with_max_num_seqs(32);
    EngineKind::Vllm(vllm.with_max_num_batched_tokens(512))
}

fn start(kind: EngineKind) -> Result<LiveEngine, standin::StartError> {
    LiveEngine::start(EngineConfig::new(kind).with_max_model_len(256).with_speedup(Speedup::Instant))
}

/// Serves these requests, by so many clients as there are.
async fn serve(engines: &Engines, requests: std::ops::Range<u64>) {
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (engines, requests) = (engines.clone(), requests.clone());
        clients.spawn(async move {
            for number in requests.skip(client as usize).step_by(CLIENTS as usize) {
                one(&engines, number).await;
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.expect("no client panics");
    }
}

/// One request, in the mode of its number.
async fn one(engines: &Engines, number: u64) {
    let engine = [&engines.prefill, &engines.decode, &engines.sglang][(number / 16 % 3) as usize];
    let request = request(number);
    match number % 16 {
        0 => {
            // One after the other under one id.
            let request = request.with_id(Uuid::from_u128(u128::from(number % CLIENTS) + 1));
            read(submit(engine, request, OutputBuffering::FullResponse).await, usize::MAX).await;
        }
        1 | 2 => read(submit(engine, request, throttle()).await, usize::MAX).await,
        3 | 4 => drop(submit(engine, request, OutputBuffering::default()).await),
        5 | 6 => read(submit(engine, request, OutputBuffering::FullResponse).await, 2).await,
        7 => {
            let stream = submit(engine, request, OutputBuffering::FullResponse).await;
            engine.cancel(stream.id()).await.expect("never fails");
            read(stream, usize::MAX).await;
        }
        8 => {
            let mut stream = submit(engine, request, throttle()).await;
            stream.recv().await;
            stream.cancel().await.expect("never fails");
        }
        9 => {
            let mut submit = pin!(engine.submit(request));
            poll_fn(|context| Poll::Ready(submit.as_mut().poll(context).is_ready())).await;
        }
        10 => drop(engine.prepare_request(request).expect("valid")),
        11 | 12 => {
            let request = request.with_id(Uuid::from_u128(1_000_000 + u128::from(number % CLIENTS)));
            let mut stream = handoff(&engines.prefill, &engines.decode, request).await.expect("both take it");
            let tokens = if number.is_multiple_of(32) { 2 } else { usize::MAX };
            let mut read = 0;
            while read < tokens && stream.recv().await.is_some() {
                read += 1;
            }
        }
        _ => read(submit(engine, request, OutputBuffering::FullResponse).await, usize::MAX).await,
    }
}

fn throttle() -> OutputBuffering {
    OutputBuffering::Throttle { capacity: NonZeroUsize::MIN }
}

/// Some begin as others do; most are short, some are long.
fn request(number: u64) -> Request {
    let (family, own) = ((number % 7) as u32, number as u32);
    let shared = (0..(number % 40) as u32).map(|position| family * 1_000 + position);
    let prompt: Vec<u32> = shared.chain([own, own.wrapping_mul(31)]).collect();
    let tokens = if number.is_multiple_of(50) { 120 } else { 1 + (number % 12) as u32 };
    Request::new(prompt, tokens)
}

async fn submit(engine: &LiveEngine, request: Request, buffering: OutputBuffering) -> LiveRequest {
    let options = SubmitOptions::default().with_buffering(buffering);
    engine.submit_with(request, options).await.expect("a valid request")
}

async fn read(mut stream: LiveRequest, signals: usize) {
    for _ in 0..signals {
        if stream.recv().await.is_none() {
            return;
        }
    }
}

async fn look(engines: &Engines, requests: u64) -> Point {
    let all = [&engines.prefill, &engines.decode, &engines.sglang];
    while all.iter().any(|engine| engine.active_request_count() > 0) {
        tokio::task::yield_now().await;
    }
    let tasks = Handle::current().metrics().num_alive_tasks();
    Point { requests, resident: resident_bytes(), allocated: counting::counted().1, tasks }
}

/// Resident memory, where the system tells.
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1_024)
}

fn line(point: Point, rate: f64) -> String {
    let resident = point.resident.map_or("unknown".to_owned(), |bytes| format!("{:.2} MiB", mib(bytes as f64)));
    let (allocated, tasks) = (mib(point.allocated as f64), point.tasks);
    format!(
        "{:>8} requests  {resident} resident  {allocated:.3} MiB allocated  {tasks} tasks  {rate:.0} requests/s",
        point.requests
    )
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

/// Bytes per request by which something grows, by least squares over the second half: by then pools and caches are full.
fn slope(points: &[Point], bytes: impl Fn(&Point) -> f64) -> f64 {
    let warm = &points[points.len() / 2..];
    let mean = |value: &dyn Fn(&Point) -> f64| warm.iter().map(value).sum::<f64>() / warm.len() as f64;
    let requests = |point: &Point| point.requests as f64;
    let (x, y) = (mean(&requests), mean(&bytes));
    let covariance: f64 = warm.iter().map(|point| (requests(point) - x) * (bytes(point) - y)).sum();
    let variance: f64 = warm.iter().map(|point| (requests(point) - x).powi(2)).sum();
    covariance / variance.max(1.0)
}

fn verdict(points: &[Point]) -> ExitCode {
    let allocated = slope(points, |point| point.allocated as f64);
    let resident = slope(points, |point| point.resident.unwrap_or(0) as f64);
    let steady = points.iter().all(|point| point.tasks == points[0].tasks);
    println!(
        "slope: {allocated:+.4} bytes allocated and {resident:+.4} bytes resident a request; tasks steady: {steady}"
    );
    if allocated < FLAT && steady { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
