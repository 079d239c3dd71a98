//! Traces through bare schedulers, without any runtime, and through the live engine, which must agree.
#![cfg(feature = "serde")]

use std::collections::BTreeMap;

use standin::replay::trace::{TraceError, TraceFormat, TraceReader, TraceRequest};
use standin::replay::{OfflineError, OfflineRun, Report, Router};
use standin::timing::{KernelPreset, TimingConfig};
use standin::{EngineConfig, EngineKind};

fn shipped(speed: f64) -> impl Iterator<Item = Result<TraceRequest, TraceError>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/mooncake_conversation_500.jsonl");
    let reader = TraceReader::open(path, None).expect("the file is part of the crate");
    reader.with_speed(speed).expect("a valid speed")
}

fn run(config: &EngineConfig, trace: impl Iterator<Item = Result<TraceRequest, TraceError>>) -> Report {
    OfflineRun::new(config.clone()).replay(trace).expect("a good trace for a good configuration")
}

fn report(config: &EngineConfig, speed: f64, requests: usize) -> Report {
    run(config, shipped(speed).take(requests))
}

#[test]
fn every_request_completes_with_all_its_tokens() {
    let (prompt_tokens, output_tokens) =
        shipped(1.0).map(|request| request.expect("a valid line")).fold((0, 0), |(prompt, output), request| {
            (prompt + u64::from(request.prompt_tokens()), output + u64::from(request.output_tokens))
        });
    let report = report(&EngineConfig::default(), 1.0, 500);
    assert_eq!((report.requests, report.refused), (500, 0));
    assert_eq!(report.ended, BTreeMap::from([("length", 500)]));
    assert_eq!((report.prompt_tokens, report.output_tokens), (prompt_tokens, output_tokens));
    let gaps = report.itl_ms.expect("gaps").count;
    assert_eq!(gaps, output_tokens - 500, "one gap less than tokens for each request");
    assert!(report.modelled_s > 165.0, "the last request arrives at 165 s");
}

#[test]
fn the_hit_rate_stays_below_that_of_an_endless_cache_and_comes_near_it_with_a_huge_pool() {
    for blocks in [9_000, 29_205, 1_000_000] {
        let mut config = EngineConfig::default();
        let EngineKind::Vllm(vllm) = &mut config.kind else { unreachable!("the default kind") };
        vllm.num_gpu_blocks = blocks;
        let report = report(&config, 1.0, 500);
        let bound = report.endless_cache.expect("the trace has block ids");
        assert!(report.prefix_hit_rate <= bound.token_hit_rate, "{blocks} blocks: {report}");
        if blocks == 1_000_000 {
            // Nothing is evicted, so all is found but up to a block at the end of a prompt that is a whole prefix. (In
            // tokens this is above the rate in blocks, where part-filled ones count as whole ones.)
            assert!(bound.token_hits - report.cached_tokens < 16 * 500, "{report}");
        } else {
            assert!(report.prefix_hit_rate < bound.block_hit_rate, "{blocks} blocks: {report}");
        }
    }
}

#[test]
fn two_runs_give_the_same_json() {
    let json = || serde_json::to_string_pretty(&report(&EngineConfig::default(), 2.0, 150)).expect("serialises");
    assert_eq!(json(), json());
}

#[test]
fn a_faster_gpu_and_slower_arrivals_shorten_the_wait() {
    let ttft = |preset, speed| {
        let config = EngineConfig::default().with_timing(TimingConfig::Preset(preset));
        report(&config, speed, 100).ttft_ms.expect("tokens").mean
    };
    let base = ttft(KernelPreset::Llama3_8bH100, 1.0);
    assert!(ttft(KernelPreset::Llama3_8bA100, 1.0) > base);
    assert!(ttft(KernelPreset::Llama3_8bH100, 0.25) < base);
    assert!(ttft(KernelPreset::Llama3_8bH100, 4.0) > base);
}

/// What four engines do in turn is what each of them does alone with every fourth request.
#[test]
fn engines_behind_a_round_robin_router_know_nothing_of_each_other() {
    let config = EngineConfig::default();
    let together = OfflineRun::new(config.clone()).with_workers(4).replay(shipped(2.0)).expect("a good trace");
    let alone: Vec<Report> = (0..4).map(|first| run(&config, shipped(2.0).skip(first).step_by(4))).collect();
    let sum = |count: fn(&Report) -> u64| alone.iter().map(count).sum::<u64>();
    assert_eq!(together.requests, sum(|report| report.requests));
    assert_eq!(together.cached_tokens, sum(|report| report.cached_tokens));
    assert_eq!(together.output_tokens, sum(|report| report.output_tokens));
    assert_eq!(together.passes, sum(|report| report.passes));
    assert_eq!(together.preemptions, sum(|report| report.preemptions));
    let longest = |report: &Report| report.end_to_end_ms.expect("ends").max;
    assert_eq!(longest(&together), alone.iter().map(longest).fold(0.0, f64::max));
}

#[test]
fn a_router_that_looks_at_engines_does_better_than_one_that_does_not() {
    let mut roomy = EngineConfig::default();
    let EngineKind::Vllm(vllm) = &mut roomy.kind else { unreachable!("the default kind") };
    vllm.num_gpu_blocks = 100_000;
    let routed = |router| {
        let run = OfflineRun::new(roomy.clone()).with_workers(4).with_router(router);
        run.replay(shipped(1.0)).expect("a good trace")
    };
    let [round_robin, least_loaded, prefix_aware] =
        [Router::RoundRobin, Router::LeastLoaded, Router::PrefixAware].map(routed);
    for report in [&round_robin, &least_loaded, &prefix_aware] {
        assert_eq!(report.ended, BTreeMap::from([("length", 500)]));
    }
    let wait = |report: &Report| report.end_to_end_ms.expect("ends").mean;
    assert!(wait(&least_loaded) < wait(&round_robin), "{least_loaded}{round_robin}");
    assert!(prefix_aware.cached_tokens > least_loaded.cached_tokens * 5 / 4, "{prefix_aware}{least_loaded}");
    assert_eq!(prefix_aware, routed(Router::PrefixAware), "it repeats");
}

#[test]
fn what_cannot_be_served_is_refused_and_what_cannot_be_run_is_an_error() {
    let short = EngineConfig::default().with_max_model_len(8_000);
    let refused = report(&short, 1.0, 100);
    assert_eq!(refused.requests, 100);
    let long = shipped(1.0).take(100).filter(|request| request.as_ref().is_ok_and(|row| row.prompt_tokens() >= 8_000));
    assert_eq!(refused.refused, long.count() as u64);

    let none = OfflineRun::new(EngineConfig::default()).with_workers(0).replay(shipped(1.0));
    assert!(matches!(none, Err(OfflineError::Config(error)) if error.field == "workers"));
    let bad = TraceReader::new(&b"{}"[..], TraceFormat::Mooncake, "inline");
    assert!(matches!(OfflineRun::new(EngineConfig::default()).replay(bad), Err(OfflineError::Trace(_))));

    // Two requests that outgrow the pool together, in an engine that lets them block the queue.
    let mut stuck = EngineConfig::default().with_max_model_len(160);
    let EngineKind::Vllm(vllm) = &mut stuck.kind else { unreachable!("the default kind") };
    (vllm.num_gpu_blocks, vllm.end_outgrown_requests) = (10, false);
    let row = br#"{"timestamp": 0, "input_length": 140, "output_length": 15, "hash_ids": [1]}"#;
    let trace = TraceReader::new(&row[..], TraceFormat::Mooncake, "inline");
    assert_eq!(OfflineRun::new(stuck).replay(trace), Err(OfflineError::Unfinished { requests: 1 }));
}

/// The live engine adds nothing and loses nothing: tokens, times and counts are those of the bare scheduler.
#[cfg(feature = "live")]
mod live {
    use std::fmt::Write;
    use std::io::Cursor;
    use std::time::Duration;

    use standin::replay::trace::TRACE_BLOCK_TOKENS;
    use standin::replay::{EndlessCache, Recorder, RequestRecord};
    use standin::{EngineTime, LiveEngine, LiveRequest, OutputBuffering};

    use super::*;

    /// Requests whose stamps have seven digits of a second, as Azure's have, some of them at one instant.
    fn azure(requests: u64) -> impl Iterator<Item = Result<TraceRequest, TraceError>> {
        let mut csv = String::from("TIMESTAMP,ContextTokens,GeneratedTokens\n");
        let mut at = 0_u64;
        for request in 0..requests {
            let bits = (request + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            at += if request % 7 == 3 { 0 } else { (bits >> 33) % 1_234_567 };
            let (second, fraction) = (at / 10_000_000, at % 10_000_000);
            let (prompt, output) = (1 + (bits >> 8) % 3_000, 1 + (bits >> 50) % 60);
            writeln!(csv, "2023-11-16 18:17:{second:02}.{fraction:07},{prompt},{output}").expect("a string takes all");
        }
        TraceReader::new(Cursor::new(csv), TraceFormat::Azure2023, "inline")
    }

    /// The trace starts so much after the engine, so that all of it can be submitted ahead of time.
    const HEAD_START: Duration = Duration::from_secs(1);

    async fn read(mut stream: LiveRequest, mut record: RequestRecord) -> (LiveRequest, RequestRecord, EngineTime) {
        let mut last = EngineTime::ZERO;
        while let Some(signal) = stream.recv().await {
            last = signal.produced_at;
            signal.token_id.inspect(|_| record.token(last));
        }
        (stream, record, last)
    }

    async fn live(config: &EngineConfig, trace: impl Iterator<Item = Result<TraceRequest, TraceError>>) -> Report {
        let (observer, mut admissions) = tokio::sync::mpsc::unbounded_channel();
        let builder = LiveEngine::builder(config.clone()).admissions(observer);
        let engine = builder.output_buffering(OutputBuffering::FullResponse).start().expect("a valid configuration");
        let (mut recorder, mut cache) = (Recorder::new(), EndlessCache::new());
        let mut streams = tokio::task::JoinSet::new();
        for request in trace {
            let mut request = request.expect("a valid line");
            request.arrival = request.arrival + HEAD_START;
            cache.observe(request.prompt_tokens(), &request.hash_ids, TRACE_BLOCK_TOKENS);
            let record = RequestRecord::new(request.arrival, request.prompt_tokens());
            streams.spawn(read(engine.submit(request.into()).await.expect("the trace fits the engine"), record));
        }
        let mut admitted = BTreeMap::new();
        while let Some(ended) = streams.join_next().await {
            let (stream, mut record, at) = ended.expect("no panic");
            while let Ok(admission) = admissions.try_recv() {
                admitted.insert(admission.request_id, admission);
            }
            let admission = admitted.remove(&stream.id()).expect("shown before the end");
            record.admitted(admission.admitted_at, admission.cached_tokens);
            recorder.ended(&record, at, stream.finish_reason().expect("a terminal signal"));
        }
        let metrics = engine.metrics_receiver();
        engine.shutdown().await.expect("a clean end");
        recorder.report(&metrics.borrow(), cache.bound())
    }

    #[tokio::test(start_paused = true)]
    async fn r39_the_live_engine_in_virtual_time_measures_the_same_to_the_nanosecond() {
        let config = EngineConfig::default();
        assert_eq!(live(&config, shipped(1.0).take(200)).await, report(&config, 1.0, 200));
    }

    #[tokio::test(start_paused = true)]
    async fn r39_r43_also_where_requests_arrive_between_the_ticks_of_the_timer_and_blocks_run_short() {
        let mut config = EngineConfig::default().with_max_model_len(4_000);
        let EngineKind::Vllm(vllm) = &mut config.kind else { unreachable!("the default kind") };
        vllm.num_gpu_blocks = 700;
        let offline = run(&config, azure(400));
        assert!(offline.preemptions > 0, "{offline}");
        assert_eq!(live(&config, azure(400)).await, offline);
    }
}
