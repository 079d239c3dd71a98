//! The shipped trace through the bare scheduler, without any runtime, and through the live engine, which must agree.
#![cfg(feature = "serde")]

use std::collections::BTreeMap;

use standin::replay::trace::{TRACE_BLOCK_TOKENS, TraceReader, TraceRequest};
use standin::replay::{EndlessCache, Recorder, Report, RequestRecord};
use standin::timing::{KernelPreset, TimingConfig};
use standin::{Command, Effects, EngineConfig, EngineMetrics, EngineTime, Pass, Scheduler, SequenceId, Submission};

/// One scheduler fed with a trace. A boundary comes before an arrival at the same instant, as in the live engine.
struct Offline {
    scheduler: Scheduler,
    in_flight: BTreeMap<SequenceId, RequestRecord>,
    submitted: u64,
    recorder: Recorder,
    cache: EndlessCache,
    metrics: EngineMetrics,
}

impl Offline {
    fn new(config: &EngineConfig) -> Self {
        Self {
            scheduler: Scheduler::new(config).expect("a valid configuration"),
            in_flight: BTreeMap::new(),
            submitted: 0,
            recorder: Recorder::new(),
            cache: EndlessCache::new(),
            metrics: EngineMetrics::default(),
        }
    }

    fn run(mut self, trace: impl Iterator<Item = TraceRequest>) -> Report {
        let mut trace = trace.peekable();
        let mut now = EngineTime::ZERO;
        loop {
            while let Some(request) = trace.next_if(|request| request.arrival <= now) {
                self.submit(request);
            }
            if let Some(pass) = self.scheduler.begin_pass(now) {
                now = pass.ends_at();
                self.finish(pass, now);
            } else if let Some(next) = trace.peek() {
                now = next.arrival;
            } else {
                break;
            }
        }
        assert!(self.in_flight.is_empty(), "{} requests never ended", self.in_flight.len());
        self.recorder.report(&self.metrics, self.cache.bound())
    }

    fn submit(&mut self, request: TraceRequest) {
        let (sequence, arrival, prompt_tokens) = (SequenceId(self.submitted), request.arrival, request.prompt_tokens());
        self.cache.observe(prompt_tokens, &request.hash_ids, TRACE_BLOCK_TOKENS);
        let submission = Submission { sequence, tie_key: self.submitted.into(), request: request.into() };
        self.scheduler.apply(Command::Submit(submission), arrival).expect("the trace fits the engine");
        self.submitted += 1;
        self.in_flight.insert(sequence, RequestRecord::new(arrival, prompt_tokens));
    }

    fn finish(&mut self, pass: Pass, now: EngineTime) {
        for admitted in pass.admitted() {
            let record = self.in_flight.get_mut(&admitted.sequence).expect("admitted, so in flight");
            record.admitted(pass.started_at(), admitted.cached_tokens);
        }
        let effects = self.scheduler.finish_pass(pass, now);
        self.show(&effects, now);
        self.scheduler.recycle(effects);
    }

    fn show(&mut self, effects: &Effects, now: EngineTime) {
        for output in &effects.outputs {
            let record = self.in_flight.get_mut(&output.sequence).expect("an output, so in flight");
            if output.token.is_some() {
                record.token(now);
            }
            if let Some(reason) = output.finish {
                self.recorder.ended(record, now, reason);
                self.in_flight.remove(&output.sequence);
            }
        }
        self.metrics = effects.metrics;
    }
}

fn shipped(speed: f64) -> impl Iterator<Item = TraceRequest> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/mooncake_conversation_500.jsonl");
    let reader = TraceReader::open(path, None).expect("the file is part of the crate");
    reader.with_speed(speed).expect("a valid speed").map(|request| request.expect("a valid line"))
}

fn report(config: &EngineConfig, speed: f64, requests: usize) -> Report {
    Offline::new(config).run(shipped(speed).take(requests))
}

#[test]
fn every_request_completes_with_all_its_tokens() {
    let (prompt_tokens, output_tokens) = shipped(1.0).fold((0, 0), |(prompt, output), request| {
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
        let standin::EngineKind::Vllm(vllm) = &mut config.kind else { unreachable!("the default kind") };
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

/// The live engine adds nothing and loses nothing: tokens, times and counts are those of the bare scheduler.
#[cfg(feature = "live")]
#[tokio::test(start_paused = true)]
async fn r39_the_live_engine_in_virtual_time_measures_the_same_to_the_nanosecond() {
    use standin::{LiveEngine, LiveRequest, OutputBuffering};

    /// The trace starts so much after the engine, so that all of it can be submitted ahead of time.
    const HEAD_START: std::time::Duration = std::time::Duration::from_secs(1);

    async fn read(mut stream: LiveRequest, mut record: RequestRecord) -> (LiveRequest, RequestRecord, EngineTime) {
        let mut last = EngineTime::ZERO;
        while let Some(signal) = stream.recv().await {
            last = signal.produced_at;
            signal.token_id.inspect(|_| record.token(last));
        }
        (stream, record, last)
    }

    let config = EngineConfig::default();
    let (observer, mut admissions) = tokio::sync::mpsc::unbounded_channel();
    let builder = LiveEngine::builder(config.clone()).admissions(observer);
    let engine = builder.output_buffering(OutputBuffering::FullResponse).start().expect("a valid configuration");
    let (mut recorder, mut cache) = (Recorder::new(), EndlessCache::new());
    let mut streams = tokio::task::JoinSet::new();
    for mut request in shipped(1.0).take(200) {
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
    let live = recorder.report(&metrics.borrow(), cache.bound());
    assert_eq!(live, report(&config, 1.0, 200));
}
