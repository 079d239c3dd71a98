//! The shipped trace through four engines in virtual time, by router.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use standin::EngineConfig;
use standin::replay::trace::{TraceReader, TraceRequest};
use standin::replay::{OfflineRun, Router};

const WORKERS: usize = 4;

fn offline_run(criterion: &mut Criterion) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/mooncake_conversation_500.jsonl");
    let reader = TraceReader::open(path, None).expect("the file is part of the crate");
    let trace: Vec<TraceRequest> = reader.map(|request| request.expect("a valid line")).collect();
    let mut group = criterion.benchmark_group("offline_run");
    group.sample_size(10).measurement_time(Duration::from_secs(5));
    group.throughput(Throughput::Elements(trace.len() as u64));
    for router in [Router::RoundRobin, Router::LeastLoaded, Router::PrefixAware] {
        let run = OfflineRun::new(EngineConfig::default()).with_workers(WORKERS).with_router(router);
        group.bench_function(BenchmarkId::from_parameter(router), |bencher| {
            bencher.iter(|| run.replay(trace.iter().cloned().map(Ok)).expect("a good trace").requests);
        });
    }
    group.finish();
}

criterion_group!(benches, offline_run);
criterion_main!(benches);
