//! Prefill on one engine, decode on another: a trace through both, beside one engine that does all of it.
//!
//! `cargo run --release --example disaggregated` runs both engines in this process, in virtual time. With
//! `--two-processes` the decode engine runs in a process of its own, in real time, and facts and actions cross as
//! lines of JSON over a socket. Either way every token is compared with those of the one engine.

mod one_process;
mod run;
mod two_processes;
mod wire;

use std::io::BufReader;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use standin::replay::trace::TraceReader;
use standin::{EngineConfig, EngineKind, SglangConfig, Speedup, TransferTiming, TransferTimingMode, VllmConfig};
use tokio::runtime::{Builder, Runtime};

use crate::run::Run;

const SHIPPED_TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/mooncake_conversation_500.jsonl");

/// The engines that can be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Engine {
    Vllm,
    Sglang,
}

/// Replays a trace through a prefill and a decode engine, and compares with one engine.
#[derive(Debug, Clone, Parser)]
#[command(name = "disaggregated")]
struct Options {
    /// Trace file, .jsonl (Mooncake) or .csv (Azure) [default: 500 requests of the Mooncake conversation trace]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Replay only the first N requests
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Arrival speed: 2 sends the requests twice as fast
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    speed: f64,
    /// The engines that are imitated, serving Llama-3.1-8B on one H100 each
    #[arg(long, value_enum, default_value_t = Engine::Vllm)]
    engine: Engine,
    /// Bandwidth of the link between the engines, in GB/s
    #[arg(long, value_name = "GB/S", default_value_t = 25.0)]
    bandwidth: f64,
    /// Setup of a transfer, in ms
    #[arg(long, value_name = "MS", default_value_t = 0.05)]
    setup: f64,
    /// Run the decode engine in a second process, in real time
    #[arg(long)]
    two_processes: bool,
    /// With two processes: how much faster than modelled
    #[arg(long, value_name = "FACTOR", default_value_t = 10.0)]
    speedup: f64,
    /// What the second process is started with: where to connect to, and the start of engine time in ns since 1970
    #[arg(long, value_names = ["ADDRESS", "NS"], num_args = 2, hide = true)]
    decode_worker: Option<Vec<String>>,
}

impl Options {
    /// Both engines.
    fn engine(&self) -> EngineConfig {
        self.engine_alone().with_speedup(Speedup::Factor(self.time_factor()))
    }

    /// The one beside them.
    fn engine_alone(&self) -> EngineConfig {
        EngineConfig::new(match self.engine {
            Engine::Vllm => EngineKind::Vllm(VllmConfig::default()),
            Engine::Sglang => EngineKind::Sglang(SglangConfig::default()),
        })
    }

    /// What the second process is told of the engine.
    fn engine_name(&self) -> &'static str {
        match self.engine {
            Engine::Vllm => "vllm",
            Engine::Sglang => "sglang",
        }
    }

    /// How many times as fast as modelled the time of the engines goes by.
    fn time_factor(&self) -> f64 {
        if self.two_processes || self.decode_worker.is_some() { self.speedup } else { 1.0 }
    }

    /// 131,072 bytes of KV per token: Llama-3.1-8B at 16 bits.
    fn transfer(&self) -> anyhow::Result<TransferTiming> {
        let setup = Duration::try_from_secs_f64(self.setup / 1e3).context("--setup")?;
        let timing = TransferTiming {
            mode: TransferTimingMode::MissingTokens,
            kv_bytes_per_token: Some(131_072),
            bandwidth_gb_s: Some(self.bandwidth),
            setup,
            ..TransferTiming::default()
        };
        timing.validate().context("--bandwidth")?;
        Ok(timing)
    }

    fn requests(&self, time_factor: f64) -> anyhow::Result<run::Requests> {
        let path = self.trace.clone().unwrap_or_else(|| SHIPPED_TRACE.into());
        let trace: TraceReader<BufReader<_>> = TraceReader::open(path, None)?
            .with_speed(self.speed * time_factor)?
            .with_vocab_size(EngineConfig::default().vocab_size)?;
        trace.take(self.limit.unwrap_or(usize::MAX)).zip(1..).map(run::numbered).collect()
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match &options.decode_worker {
        Some(worker) => wire::decode_worker(&options, &worker[0], &worker[1]),
        None => compare(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn compare(options: &Options) -> anyhow::Result<()> {
    // Virtual time is Tokio's paused clock: it jumps to the next timer whenever no task has anything to do.
    let virtual_time = || Builder::new_current_thread().enable_time().start_paused(true).build();
    let alone = virtual_time()?.block_on(one_process::aggregated(options))?;
    let apart = if options.two_processes {
        real_time()?.block_on(two_processes::disaggregated(options))?
    } else {
        virtual_time()?.block_on(one_process::disaggregated(options))?
    };
    println!("one engine\n\n{}", alone.report());
    let processes = if options.two_processes { "in two processes" } else { "in one process" };
    println!("a prefill and a decode engine, {processes}\n\n{}", apart.report());
    match apart.transfers().summary() {
        Some(summary) => println!("{:15}{summary}   {} transfers", "transfer", summary.count),
        None => println!("nothing was transferred"),
    }
    let tokens = same_tokens(&alone, &apart)?;
    println!("the same {tokens} tokens in {} requests", apart.requests());
    Ok(())
}

fn real_time() -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

/// How many tokens both runs produced; an error that names the first request where they differ.
fn same_tokens(alone: &Run, apart: &Run) -> anyhow::Result<usize> {
    anyhow::ensure!(
        alone.requests() == apart.requests(),
        "one engine served {} requests, two served {}",
        alone.requests(),
        apart.requests()
    );
    let mut count = 0;
    for (id, expected) in alone.tokens() {
        let got = apart.tokens_of(id);
        anyhow::ensure!(
            got == Some(expected),
            "request {}: one engine gave {} tokens, two gave {}, and they are not the same",
            id.as_u128(),
            expected.len(),
            got.map_or(0, <[u32]>::len)
        );
        count += expected.len();
    }
    Ok(count)
}
