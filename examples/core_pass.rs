//! Decode passes of the bare core: time per sequence and pass, and a fixed amount of work for instruction counters.
//!
//! ```text
//! core_pass fcfs|priority BATCH PASSES
//! ```
//!
//! What a sequence costs in a pass, without start and prefill, is the difference of two runs:
//!
//! ```text
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null core_pass fcfs 1024 100     (Collected : A)
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null core_pass fcfs 1024 1100    (Collected : B)
//! instructions per sequence and pass = (B - A) / (1000 * 1024)
//! ```

use std::error::Error;
use std::time::Instant;

use standin::timing::TimingConfig;
use standin::{
    Command, EngineConfig, EngineKind, EngineTime, Request, Scheduler, SequenceId, Submission, VllmConfig, VllmPolicy,
};

const PROMPT_TOKENS: u32 = 64;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [policy, batch, passes] = arguments.as_slice() else {
        return Err("usage: core_pass fcfs|priority BATCH PASSES".into());
    };
    let policy = match policy.as_str() {
        "fcfs" => VllmPolicy::Fcfs,
        "priority" => VllmPolicy::Priority,
        other => return Err(format!("policy = {other}: fcfs or priority").into()),
    };
    let (batch, passes) = (batch.parse()?, passes.parse()?);
    let (mut scheduler, mut now) = prefilled(batch, passes, policy)?;
    let start = clock();
    for _ in 0..passes {
        if pass(&mut scheduler, &mut now)? != batch as usize {
            return Err("a sequence was left out of a pass".into());
        }
    }
    let nanos = start.elapsed().as_nanos() as f64 / (f64::from(batch) * f64::from(passes));
    println!("core_pass batch={batch} passes={passes} ns_per_sequence={nanos:.1}");
    Ok(())
}

/// A scheduler whose sequences have all been prefilled and outlive the passes.
fn prefilled(batch: u32, passes: u32, policy: VllmPolicy) -> Outcome<(Scheduler, EngineTime)> {
    let tokens = PROMPT_TOKENS + passes + 2;
    let vllm = VllmConfig::default()
        .with_num_gpu_blocks(batch * tokens.div_ceil(16) + 1)
        .with_max_num_seqs(batch)
        .with_max_num_batched_tokens(batch * PROMPT_TOKENS)
        .with_policy(policy);
    let config = EngineConfig::new(EngineKind::Vllm(vllm)).with_timing(TimingConfig::ConstantMs(1.0));
    let mut scheduler = Scheduler::new(&config)?;
    let mut now = EngineTime::ZERO;
    for sequence in 0..batch {
        let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|token| token + sequence * 1_000).collect();
        let request = Request::new(prompt, passes + 2);
        let submission = Submission { sequence: SequenceId(sequence.into()), tie_key: sequence.into(), request };
        scheduler.apply(Command::Submit(submission), now)?;
    }
    pass(&mut scheduler, &mut now)?;
    Ok((scheduler, now))
}

/// One pass; returns how many tokens it produced.
fn pass(scheduler: &mut Scheduler, now: &mut EngineTime) -> Outcome<usize> {
    let pass = scheduler.begin_pass(*now).ok_or("nothing to do")?;
    *now = pass.ends_at();
    let effects = scheduler.finish_pass(pass, *now);
    let tokens = effects.outputs.len();
    scheduler.recycle(effects);
    Ok(tokens)
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn clock() -> Instant {
    Instant::now()
}
