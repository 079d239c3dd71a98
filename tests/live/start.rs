//! r01–r03: start and configuration.

use std::sync::Arc;
use std::time::Duration;

use standin::timing::TimingConfig;
use standin::{
    ConfigError, EngineConfig, EngineTime, KvEventBatch, LiveEngine, Scheduler, Speedup, StartError, VllmConfig,
};
use tokio::runtime::Handle;

use crate::common::{
    at, config, config_of, id, next, read, refused, request, start, submit, turns, vllm, whole, within,
};

#[test]
fn r01_start_without_a_runtime_is_an_error() {
    assert_eq!(refused(LiveEngine::start(config())), StartError::NoRuntime);
    // A bad configuration does not hide it, and the other way round nothing panics.
    assert_eq!(refused(LiveEngine::start(config().with_vocab_size(0))), StartError::NoRuntime);
}

#[test]
fn r01_start_needs_only_the_context_of_a_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let engine = {
        let _entered = runtime.enter();
        start(config())
    };
    let mut stream = runtime.block_on(engine.submit(request(1, 8, 1))).expect("valid");
    assert_eq!(runtime.block_on(stream.recv()).expect("a token").token_id, Some(101));
    assert_eq!(runtime.block_on(engine.shutdown()), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn r02_a_bad_value_is_named_with_its_limit_and_nothing_is_spawned() {
    let with = |change: fn(VllmConfig) -> VllmConfig| config_of(change(vllm()));
    let cases: [(EngineConfig, &str, &str, &str); 12] = [
        (config().with_max_model_len(1), "max_model_len", "1", "at least 2"),
        (config().with_max_model_len(405), "kind.vllm.num_gpu_blocks", "101", "at least 102"),
        (config().with_vocab_size(0), "vocab_size", "0", "at least 1"),
        (config().with_speedup(Speedup::Factor(0.0)), "speedup.factor", "0", "greater than 0"),
        (config().with_speedup(Speedup::Factor(f64::NAN)), "speedup.factor", "NaN", "finite"),
        (config().with_timing(TimingConfig::ConstantMs(-1.0)), "timing.constant_ms", "-1", "at least 0"),
        (with(|vllm| vllm.with_block_size(0)), "kind.vllm.block_size", "0", "at least 1"),
        (with(|vllm| vllm.with_num_gpu_blocks(1)), "kind.vllm.num_gpu_blocks", "1", "at least 2"),
        (with(|vllm| vllm.with_max_num_seqs(0)), "kind.vllm.max_num_seqs", "0", "at least 1"),
        (
            with(|vllm| vllm.with_max_num_batched_tokens(15)),
            "kind.vllm.max_num_batched_tokens",
            "15",
            "max_num_seqs = 16",
        ),
        (
            with(|vllm| vllm.with_enable_chunked_prefill(false).with_max_num_batched_tokens(63)),
            "kind.vllm.max_num_batched_tokens",
            "63",
            "max_model_len = 64",
        ),
        (with(|vllm| vllm.with_watermark(1.0)), "kind.vllm.watermark", "1", "below 1"),
    ];
    let tasks = Handle::current().metrics().num_alive_tasks();
    for (config, field, value, allowed) in cases {
        let held = Arc::new(());
        let sink_holds = Arc::clone(&held);
        let sink = move |_: KvEventBatch<'_>| {
            let _ = &sink_holds;
            Ok(())
        };
        let StartError::Config(error) = refused(LiveEngine::builder(config).kv_event_sink(sink).start()) else {
            panic!("{field} is a matter of configuration")
        };
        assert_eq!((error.field.as_str(), error.value.as_str()), (field, value), "{error}");
        assert!(error.allowed.contains(allowed), "{error}");
        assert_eq!(Arc::strong_count(&held), 1, "the refused engine keeps nothing");
    }
    assert_eq!(Handle::current().metrics().num_alive_tasks(), tasks);
}

/// The strictness is the live engine's: recordings and experiments may use odd values.
#[tokio::test(start_paused = true)]
async fn r02_the_pure_core_takes_what_only_a_real_start_refuses() {
    let odd = config_of(vllm().with_num_gpu_blocks(8).with_max_num_batched_tokens(2));
    assert!(Scheduler::new(&odd).is_ok());
    let StartError::Config(ConfigError { field, .. }) = refused(LiveEngine::start(odd)) else {
        panic!("a matter of configuration")
    };
    assert_eq!(field, "kind.vllm.num_gpu_blocks");
}

#[tokio::test(start_paused = true)]
async fn r03_start_returns_at_once_and_start_up_delays_the_first_pass() {
    let engine = start(config().with_startup(Duration::from_millis(500)));
    assert_eq!(engine.now(), EngineTime::ZERO);
    let mut first = submit(&engine, request(1, 8, 2)).await;
    assert_eq!(engine.now(), EngineTime::ZERO, "the answer does not wait for the start-up");
    at(&engine, 495).await;
    let mut second = submit(&engine, request(2, 8, 1)).await;
    turns().await;
    let metrics = *engine.metrics_receiver().borrow();
    assert_eq!((metrics.num_passes, metrics.num_requests_waiting), (0, 2), "who waits can be seen");
    assert_eq!(read(&mut first).await, whole(1, &[510.0, 520.0]));
    assert_eq!(read(&mut second).await, whole(2, &[510.0]));
    // It delays the first pass alone.
    at(&engine, 1_000).await;
    let mut third = submit(&engine, request(3, 8, 1)).await;
    assert_eq!(read(&mut third).await, whole(3, &[1_010.0]));
    assert_eq!(within(engine.shutdown()).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn r40_who_came_during_the_start_up_begins_at_its_end_though_somebody_else_wakes_the_engine() {
    let engine = start(config().with_startup(Duration::from_micros(1_001)));
    let mut first = submit(&engine, request(1, 8, 1)).await;
    turns().await;
    // Past the start-up, and before the tick at which the timer for its end fires.
    tokio::time::advance(Duration::from_micros(1_002)).await;
    let mut second = submit(&engine, request(2, 8, 1)).await;
    assert_eq!(read(&mut first).await, whole(1, &[11.001]));
    assert_eq!(read(&mut second).await, whole(2, &[21.001]));
}

#[tokio::test(start_paused = true)]
async fn r03_requests_are_cancelled_and_the_engine_stops_during_start_up() {
    let engine = start(config().with_startup(Duration::from_secs(60)));
    let stream = submit(&engine, request(1, 8, 2)).await;
    let mut other = submit(&engine, request(2, 8, 2)).await;
    assert_eq!(within(engine.cancel(id(1))).await, Ok(true));
    assert_eq!((engine.now(), engine.active_request_count()), (EngineTime::ZERO, 1));
    drop(stream);
    assert_eq!(within(engine.shutdown()).await, Ok(()));
    assert_eq!(engine.now(), EngineTime::ZERO);
    assert_eq!(next(&mut other).await, (None, Some(standin::FinishReason::EngineStopped), 0.0));
}
