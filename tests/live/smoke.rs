//! A few hundred requests on a multi-threaded runtime in real time, dropped and cancelled at random by a
//! fixed seed. What happens to each is a matter of luck; that all of it adds up is not.

use std::time::Duration;

use standin::{EngineConfig, EngineKind, FinishReason, LiveEngine, Speedup};
use tokio::task::JoinSet;

use crate::common::{
    FULL, buffered, cancel_on_overflow, config_of, config_of_kind, id, request, sglang, throttle, vllm,
};

#[derive(Debug, Default)]
struct Counts {
    ended: u64,
    cancelled: u64,
    slow: u64,
    dropped: u64,
}

#[test]
fn random_readers_on_many_threads_add_up() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
    let checked = runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(20), async {
            for seed in 0..4 {
                one_engine(config_of(vllm().with_num_gpu_blocks(60)), seed).await;
            }
            for seed in 0..4 {
                let small = sglang().with_max_total_tokens(236).with_schedule_conservativeness(0.1);
                let small = small.with_abort_after_next_forward(seed % 2 == 0).with_enable_mixed_chunk(seed / 2 == 0);
                one_engine(config_of_kind(EngineKind::Sglang(small)), seed).await;
            }
        })
        .await
    });
    assert!(checked.is_ok(), "somebody waits for ever");
    drop(runtime);
}

async fn one_engine(config: EngineConfig, seed: u64) {
    const REQUESTS: u32 = 400;
    let engine = LiveEngine::builder(config.with_speedup(Speedup::Instant)).start().expect("valid");
    let mut tasks = JoinSet::new();
    for n in 0..REQUESTS {
        let bits = u64::from(n).wrapping_add(seed << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
        tasks.spawn(one_request(engine.clone(), n, bits));
    }
    let mut counts = Counts::default();
    while let Some(result) = tasks.join_next().await {
        let one = result.expect("no panic");
        counts.ended += one.ended;
        counts.cancelled += one.cancelled;
        counts.slow += one.slow;
        counts.dropped += one.dropped;
    }
    assert_eq!(counts.ended + counts.cancelled + counts.slow + counts.dropped, u64::from(REQUESTS), "{counts:?}");
    // Drops are served in the background: the lane's last entry is behind all of them.
    let (registration, last) = engine.prepare_request(request(REQUESTS, 4, 1)).expect("valid");
    assert_eq!(last.cancel().await, Ok(true));
    drop(registration);
    let mut metrics = engine.metrics_receiver();
    let settled =
        metrics.wait_for(|now| (now.num_requests_running, now.num_requests_waiting, now.num_used_blocks) == (0, 0, 0));
    let settled = *settled.await.expect("alive");
    assert_eq!(engine.active_request_count(), 0);
    // One that was dropped may have ended by itself before.
    assert!(settled.slow_consumers >= counts.slow && settled.finished.length >= counts.ended, "{settled:?} {counts:?}");
    assert_eq!(settled.finished.length + settled.finished.aborted, u64::from(REQUESTS));
    assert_eq!(engine.shutdown().await, Ok(()));
}

async fn one_request(engine: LiveEngine, n: u32, bits: u64) -> Counts {
    let capacity = 1 + bits as usize % 3;
    let buffering = [FULL, throttle(capacity), cancel_on_overflow(capacity)][(bits >> 8) as usize % 3];
    let request = request(n, 1 + (bits >> 16) as u32 % 20, 1 + (bits >> 24) as u32 % 30);
    let mut stream = engine.submit_with(request, buffered(buffering)).await.expect("in any order");
    let mut reads = (bits >> 32) % 40;
    let mut one = Counts::default();
    while let Some(signal) = stream.recv().await {
        match signal.finish {
            Some(FinishReason::Length) => one.ended = 1,
            Some(FinishReason::Cancelled) => one.cancelled = 1,
            Some(FinishReason::SlowConsumer) => one.slow = 1,
            Some(other) => panic!("{other:?}"),
            None => {}
        }
        if reads == 0 && signal.finish.is_none() {
            if bits.is_multiple_of(2) {
                one.dropped = 1;
                return one;
            }
            // Two at once, by different ways: at most one of them did it.
            let (by_id, by_stream) = tokio::join!(engine.cancel(id(n)), stream.cancel());
            assert!(!(by_id.expect("no failure") && by_stream.expect("no failure")));
        }
        reads = reads.saturating_sub(1);
    }
    one
}

/// Real time: submits and cancels that are sent at the very moment at which the lanes close.
#[test]
fn r10_r36_whoever_calls_while_the_engine_stops_is_answered() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
    let instant = config_of(vllm()).with_speedup(Speedup::Instant);
    let stopping = async {
        for round in 0..std::env::var("ROUNDS").map_or(1_000_u32, |rounds| rounds.parse().expect("a number")) {
            let engine = LiveEngine::start(instant.clone()).expect("valid");
            let mut callers = JoinSet::new();
            for caller in 0..4 {
                let engine = engine.clone();
                callers.spawn(async move {
                    for n in 0.. {
                        let request = request(caller * 1_000_000 + n, 4, 1);
                        let Ok(stream) = engine.submit(request).await else { return };
                        drop(stream.cancel().await);
                    }
                });
            }
            for _ in 0..round % 50 {
                tokio::task::yield_now().await;
            }
            assert_eq!(engine.shutdown().await, Ok(()));
            while let Some(done) = callers.join_next().await {
                done.expect("no panic");
            }
            assert_eq!(engine.active_request_count(), 0);
        }
    };
    let answered = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), stopping).await });
    assert!(answered.is_ok(), "somebody waits for ever");
}
