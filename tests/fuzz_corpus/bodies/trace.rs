//! Traces: whatever the bytes, the reader gives requests that can be run, or errors that say where.

use standin::replay::trace::{TraceError, TraceFormat, TraceReader, TraceRequest};
use standin::replay::{OfflineRun, Router};
use standin::{EngineConfig, EngineTime, MAX_OUTPUT_TOKENS};

/// Rows that are run, none with more tokens than this.
const ROWS_RUN: usize = 8;
const TOKENS_RUN: usize = 600;

pub(crate) fn trace_mooncake(data: &[u8]) {
    trace(data, TraceFormat::Mooncake);
}

pub(crate) fn trace_azure(data: &[u8]) {
    trace(data, TraceFormat::Azure2023);
}

fn trace(data: &[u8], format: TraceFormat) {
    let (mut last_arrival, mut last_line, mut good) = (EngineTime::ZERO, 0, Vec::new());
    for row in TraceReader::new(data, format, "fuzz") {
        match row {
            Ok(request) => {
                assert!(request.arrival >= last_arrival && request.arrival < EngineTime::MAX);
                last_arrival = request.arrival;
                check(&request);
                good.push(request);
            }
            Err(error) => {
                let line = line_of(&error);
                assert!(line > last_line, "{error}");
                last_line = line;
                assert!(error.to_string().starts_with("fuzz:"), "{error}");
            }
        }
    }
    // Whatever the speed, arrivals are in order, and within time.
    for speed in [1e-9, 1e9] {
        let reader = TraceReader::new(data, format, "fuzz").with_speed(speed).expect("a speed");
        let arrivals: Vec<_> = reader.filter_map(Result::ok).map(|request| request.arrival).collect();
        assert!(arrivals.is_sorted() && arrivals.last().is_none_or(|last| *last < EngineTime::MAX));
    }
    run(good);
}

fn check(request: &TraceRequest) {
    let prompt = &request.prompt;
    assert_eq!(prompt.len(), request.prompt_tokens() as usize);
    assert!((1..=MAX_OUTPUT_TOKENS).contains(&request.output_tokens));
    let mut last = [u32::MAX];
    prompt.fill(prompt.len() - 1, &mut last);
    assert!(last[0] < 128_256, "the vocabulary");
}

fn line_of(error: &TraceError) -> u64 {
    match error {
        TraceError::Read { line, .. }
        | TraceError::LineTooLong { line, .. }
        | TraceError::Line { line, .. }
        | TraceError::Field { line, .. } => *line,
        TraceError::Header { .. } => 1,
        other => panic!("the reader of bytes says {other:?}"),
    }
}

fn run(mut rows: Vec<TraceRequest>) {
    rows.retain(|row| row.prompt.len() + row.output_tokens as usize <= TOKENS_RUN);
    rows.truncate(ROWS_RUN);
    let (requests, tokens) = (rows.len() as u64, rows.iter().map(|row| u64::from(row.output_tokens)).sum());
    for router in [Router::RoundRobin, Router::LeastLoaded, Router::PrefixAware] {
        let run = OfflineRun::new(EngineConfig::default()).with_workers(2).with_router(router);
        let report = run.replay(rows.iter().cloned().map(Ok)).expect("every row can be run");
        assert_eq!((report.requests, report.refused, report.output_tokens), (requests, 0, tokens));
    }
}
