//! Replays a workload trace through a live engine, or through bare schedulers, and prints a report.
//!
//! `cargo run --release --example trace_replay`, and `-- --help` for the options.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Parser, ValueEnum};
use standin::replay::trace::{TRACE_BLOCK_TOKENS, TraceFormat, TraceReader, TraceRequest};
use standin::replay::{EndlessCache, OfflineRun, Recorder, Report, RequestRecord, Router};
use standin::timing::{KernelPreset, TimingConfig};
use standin::{
    Admission, EngineConfig, EngineKind, EngineTime, FinishReason, LiveEngine, LiveRequest, OutputBuffering,
    SglangConfig, SubmitError, VllmConfig,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use uuid::Uuid;

const SHIPPED_TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/mooncake_conversation_500.jsonl");

/// How long before its arrival a request is handed over; the engine holds it until then, so that requests that arrive
/// together are seen together. More than a tick of Tokio's timers (1 ms), so that none comes late, and so little that
/// few are held. The trace starts that much after the engine.
const LEAD: Duration = Duration::from_millis(100);

/// Replays a workload trace through a live engine, or through bare schedulers, in virtual time, and prints a report.
#[derive(Debug, Parser)]
#[command(name = "trace_replay")]
struct Options {
    /// Trace file [default: the first 500 requests of the Mooncake conversation trace, which come with the crate]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Format of the trace: mooncake or azure2023 [default: by extension, .jsonl or .csv]
    #[arg(long)]
    format: Option<TraceFormat>,
    /// The engine that is imitated, serving Llama-3.1-8B on one H100
    #[arg(long, value_enum, default_value_t = Engine::Vllm)]
    engine: Engine,
    /// Configuration of the engine as JSON, in place of that
    #[arg(long, value_name = "FILE", conflicts_with = "engine")]
    config: Option<PathBuf>,
    /// Model and GPU, in place of the configuration's timing: llama3_8b_h100, llama3_8b_h200, llama3_8b_a100,
    /// llama3_70b_h100x4, llama3_70b_h100x8
    #[arg(long, value_name = "NAME")]
    preset: Option<KernelPreset>,
    /// Arrival speed: 2 sends the requests twice as fast
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    speed: f64,
    /// Replay only the first N requests
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Let the modelled time really go by
    #[arg(long, conflicts_with = "offline")]
    realtime: bool,
    /// Drive the bare scheduler instead of the live engine: the same report, faster
    #[arg(long)]
    offline: bool,
    /// Engines behind a router
    #[arg(long, value_name = "N", default_value_t = 1, requires = "offline")]
    workers: usize,
    /// How requests are given to engines: round-robin, least-loaded or prefix-aware
    #[arg(long, value_name = "NAME", default_value_t, requires = "offline")]
    router: Router,
    /// Print the report as JSON: the same to the byte for the same trace and configuration in virtual time
    #[arg(long)]
    json: bool,
}

/// The engines that can be named.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Engine {
    Vllm,
    Sglang,
}

impl Engine {
    fn kind(self) -> EngineKind {
        match self {
            Self::Vllm => EngineKind::Vllm(VllmConfig::default()),
            Self::Sglang => EngineKind::Sglang(SglangConfig::default()),
        }
    }
}

impl Options {
    fn config(&self) -> anyhow::Result<EngineConfig> {
        let mut config = match &self.config {
            None => EngineConfig::new(self.engine.kind()),
            Some(path) => {
                let json = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
                EngineConfig::from_json(&json).with_context(|| path.display().to_string())?
            }
        };
        if let Some(preset) = self.preset {
            config.timing = TimingConfig::Preset(preset);
        }
        Ok(config)
    }

    fn trace(&self, vocab_size: u32) -> anyhow::Result<std::iter::Take<TraceReader<BufReader<File>>>> {
        let path = self.trace.clone().unwrap_or_else(|| SHIPPED_TRACE.into());
        let reader = TraceReader::open(path, self.format)?.with_speed(self.speed)?.with_vocab_size(vocab_size)?;
        Ok(reader.take(self.limit.unwrap_or(usize::MAX)))
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<()> {
    let report = if options.offline { replay_offline(options)? } else { replay_live(options)? };
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

fn replay_offline(options: &Options) -> anyhow::Result<Report> {
    let started = wall_clock();
    let config = options.config()?;
    let trace = options.trace(config.vocab_size)?;
    let run = OfflineRun::new(config).with_workers(options.workers).with_router(options.router);
    let mut report = run.replay(trace)?;
    report.wall = Some(wall_clock().duration_since(started));
    Ok(report)
}

fn replay_live(options: &Options) -> anyhow::Result<Report> {
    // Virtual time is Tokio's paused clock: it jumps to the next timer whenever no task has anything to do.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(!options.realtime).build()?;
    runtime.block_on(replay(options))
}

async fn replay(options: &Options) -> anyhow::Result<Report> {
    let config = options.config()?;
    let mut trace = options.trace(config.vocab_size)?;
    let (observer, admissions) = mpsc::unbounded_channel();
    // A replay reads every stream at once, so the queues stay short whatever they may hold.
    let builder = LiveEngine::builder(config).admissions(observer).output_buffering(OutputBuffering::FullResponse);
    let engine = builder.start()?;
    let mut replay = Replay::new(engine, admissions);

    let mut next = trace.next().transpose()?.map(delayed);
    loop {
        let due_in = next.as_ref().map_or(Duration::ZERO, |request| {
            request.arrival.saturating_since(replay.engine.now()).saturating_sub(LEAD)
        });
        tokio::select! {
            biased;
            Some(ended) = replay.streams.join_next() => replay.end(ended?),
            () = tokio::time::sleep(due_in), if next.is_some() => {
                if let Some(request) = next.take() {
                    replay.submit(request).await?;
                }
                next = trace.next().transpose()?.map(delayed);
            }
            else => break,
        }
    }
    replay.finish().await
}

fn delayed(mut request: TraceRequest) -> TraceRequest {
    request.arrival = request.arrival + LEAD;
    request
}

/// A replay under way.
struct Replay {
    engine: LiveEngine,
    admissions: mpsc::UnboundedReceiver<Admission>,
    /// Those of requests in flight.
    admitted: HashMap<Uuid, Admission>,
    streams: JoinSet<Ended>,
    recorder: Recorder,
    cache: EndlessCache,
    progress: Progress,
}

/// A request whose stream has ended.
struct Ended {
    id: Uuid,
    record: RequestRecord,
    at: EngineTime,
    reason: FinishReason,
}

impl Replay {
    fn new(engine: LiveEngine, admissions: mpsc::UnboundedReceiver<Admission>) -> Self {
        Self {
            engine,
            admissions,
            admitted: HashMap::new(),
            streams: JoinSet::new(),
            recorder: Recorder::new(),
            cache: EndlessCache::new(),
            progress: Progress::start(),
        }
    }

    async fn submit(&mut self, request: TraceRequest) -> anyhow::Result<()> {
        let (arrival, prompt_tokens, hash_ids) = (request.arrival, request.prompt_tokens(), request.hash_ids.clone());
        match self.engine.submit(request.into()).await {
            Ok(stream) => {
                self.cache.observe(prompt_tokens, &hash_ids, TRACE_BLOCK_TOKENS);
                self.streams.spawn(read(stream, RequestRecord::new(arrival, prompt_tokens)));
            }
            Err(SubmitError::Request(error)) => {
                eprintln!("refused: {error}");
                self.recorder.refused();
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn end(&mut self, mut ended: Ended) {
        while let Ok(admission) = self.admissions.try_recv() {
            self.admitted.insert(admission.request_id, admission);
        }
        if let Some(admission) = self.admitted.remove(&ended.id) {
            ended.record.admitted(admission.admitted_at, admission.cached_tokens);
        }
        self.recorder.ended(&ended.record, ended.at, ended.reason);
        self.progress.show(self.recorder.requests(), self.streams.len(), ended.at);
    }

    async fn finish(self) -> anyhow::Result<Report> {
        let metrics = self.engine.metrics_receiver();
        self.engine.shutdown().await?;
        let mut report = self.recorder.report(&metrics.borrow(), self.cache.bound());
        report.wall = Some(self.progress.end());
        Ok(report)
    }
}

/// Reads a stream to its end.
async fn read(mut stream: LiveRequest, mut record: RequestRecord) -> Ended {
    while let Some(signal) = stream.recv().await {
        if signal.token_id.is_some() {
            record.token(signal.produced_at);
        }
        if let Some(reason) = signal.finish {
            return Ended { id: signal.request_id, record, at: signal.produced_at, reason };
        }
    }
    unreachable!("a stream ends with a signal that says why")
}

/// What is shown on standard error while a replay runs.
struct Progress {
    started: Instant,
    shown: Instant,
    terminal: bool,
}

impl Progress {
    fn start() -> Self {
        let now = wall_clock();
        Self { started: now, shown: now, terminal: std::io::stderr().is_terminal() }
    }

    /// Shows a line, not too often; on a terminal in place of the one before.
    fn show(&mut self, ended: u64, in_flight: usize, at: EngineTime) {
        let (pause, line_end) = if self.terminal { (0.2, '\r') } else { (5.0, '\n') };
        let now = wall_clock();
        if now.duration_since(self.shown).as_secs_f64() >= pause {
            self.shown = now;
            eprint!(
                "{ended} requests ended, {in_flight} in flight, modelled time {:.1} s   {line_end}",
                at.as_secs_f64()
            );
        }
    }

    /// Clears the line and tells how long it all took.
    fn end(self) -> Duration {
        if self.terminal {
            eprint!("\r{:80}\r", "");
        }
        wall_clock().duration_since(self.started)
    }
}

#[expect(clippy::disallowed_methods, reason = "how long the replay itself takes; no modelled time comes from it")]
fn wall_clock() -> Instant {
    Instant::now()
}
