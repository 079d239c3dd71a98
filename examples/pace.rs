//! How well the live engine keeps modelled time in real time: the gaps between tokens, and how late each token is.
//!
//! ```text
//! pace [PASS_US PASSES]...        default: 5000 10000 350 10000, which takes 54 s
//! ```
//!
//! One line per pair: the mean gap between tokens as a reader sees it, its error against the modelled pass, how
//! late tokens are against the end of their pass (`p50`, `p99`, `max`), and how much of one processor that took.

use std::error::Error;
use std::time::{Duration, Instant};

use standin::timing::TimingConfig;
use standin::{EngineConfig, EngineTime, LiveEngine, OutputBuffering, Request, SubmitOptions};

type Outcome<T> = Result<T, Box<dyn Error>>;

const DEFAULT: [u64; 4] = [5_000, 10_000, 350, 10_000];

fn main() -> Outcome<()> {
    let arguments = std::env::args().skip(1).map(|argument| argument.parse()).collect::<Result<Vec<u64>, _>>()?;
    let pairs = if arguments.is_empty() { DEFAULT.to_vec() } else { arguments };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    for pair in pairs.chunks(2) {
        let &[pass_us, passes] = pair else { return Err("usage: pace [PASS_US PASSES]...".into()) };
        println!("{}", runtime.block_on(runtime.spawn(async move { pace(pass_us, passes).await }))??);
    }
    Ok(())
}

async fn pace(pass_us: u64, passes: u64) -> Result<String, String> {
    let pass = Duration::from_micros(pass_us);
    let config = EngineConfig::default().with_timing(TimingConfig::ConstantMs(pass.as_secs_f64() * 1e3));
    let engine = LiveEngine::start(config).map_err(|error| error.to_string())?;
    let request = Request::new(vec![1; 64], u32::try_from(passes).map_err(|error| error.to_string())?);
    let options = SubmitOptions::default().with_buffering(OutputBuffering::FullResponse);
    let mut stream = engine.submit_with(request, options).await.map_err(|error| error.to_string())?;
    let (start, cpu) = (clock(), cpu_time().map_err(|error| error.to_string())?);
    let mut received: Vec<EngineTime> = Vec::new();
    let mut lateness = Vec::new();
    while let Some(signal) = stream.recv().await {
        let now = engine.now();
        received.push(now);
        lateness.push(now.saturating_since(signal.produced_at));
    }
    let cpu = cpu_time().map_err(|error| error.to_string())?.saturating_sub(cpu);
    let share = 100.0 * cpu.as_secs_f64() / start.elapsed().as_secs_f64();
    engine.shutdown().await.map_err(|error| error.to_string())?;
    let (Some(&first), Some(&last)) = (received.first(), received.last()) else { return Err("no token came".into()) };
    if received.len() as u64 != passes {
        return Err(format!("{} of {passes} tokens came", received.len()));
    }
    let gap = last.saturating_since(first).as_secs_f64() / (passes - 1).max(1) as f64;
    lateness.sort_unstable();
    let late = |percent: usize| lateness[(lateness.len() - 1) * percent / 100].as_secs_f64() * 1e3;
    Ok(format!(
        "pace pass_us={pass_us} passes={passes} mean_itl_us={:.2} error_percent={:.3} \
         late_p50_ms={:.3} late_p99_ms={:.3} late_max_ms={:.3} cpu_percent={share:.1}",
        gap * 1e6,
        100.0 * (gap / pass.as_secs_f64() - 1.0),
        late(50),
        late(99),
        late(100),
    ))
}

/// Processor time of this process so far.
fn cpu_time() -> std::io::Result<Duration> {
    let mut nanos = 0;
    for thread in std::fs::read_dir("/proc/self/task")? {
        let schedstat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        nanos += schedstat.split_whitespace().next().and_then(|on_cpu| on_cpu.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(Duration::from_nanos(nanos))
}

#[expect(clippy::disallowed_methods, reason = "it measures real time")]
fn clock() -> Instant {
    Instant::now()
}
