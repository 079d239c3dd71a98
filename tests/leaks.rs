//! Engines come and go, and nothing stays: no task, no byte.
#![cfg(feature = "live")]

mod counting;

use std::time::Duration;

use counting::counted;
use standin::timing::TimingConfig;
use standin::{
    EngineConfig, EngineKind, HandoffId, KvEventBatch, LiveEngine, LiveRequest, OutputBuffering, Request, SglangConfig,
    SubmitOptions, VllmConfig,
};
use tokio::runtime::Handle;
use uuid::Uuid;

/// How often the bytes in use are looked at.
const LOOKS: usize = 10;

fn config(engine: usize) -> EngineConfig {
    let kind = if engine.is_multiple_of(3) {
        EngineKind::Sglang(SglangConfig::default().with_max_total_tokens(256).with_max_running_requests(8))
    } else {
        EngineKind::Vllm(VllmConfig::default().with_block_size(4).with_num_gpu_blocks(64).with_max_num_seqs(8))
    };
    EngineConfig::new(kind).with_max_model_len(64).with_timing(TimingConfig::ConstantMs(10.0))
}

async fn submit(engine: &LiveEngine, n: u32, buffering: OutputBuffering) -> LiveRequest {
    let options = SubmitOptions::default().with_buffering(buffering);
    engine.submit_with(Request::new(vec![n; 9], 6), options).await.expect("a valid request")
}

/// One engine, from its start to one of its ends.
async fn live_and_end(number: usize) {
    let panics = number % 5 == 4;
    let sink = move |_: KvEventBatch<'_>| {
        assert!(!panics, "the sink fails");
        Ok(())
    };
    let engine = LiveEngine::builder(config(number)).kv_event_sink(sink).start().expect("valid");
    if number % 7 == 6 {
        // Its tasks never ran.
        return drop(engine);
    }
    let mut read = submit(&engine, 1, OutputBuffering::FullResponse).await;
    let unread = submit(&engine, 2, OutputBuffering::default()).await;
    let handoff = engine.register_handoff(HandoffId(Uuid::from_u128(1))).expect("the id is free");
    let prepared = engine.prepare_request(Request::new(vec![3; 5], 2)).expect("valid");
    match number % 5 {
        0 => {
            while read.recv().await.is_some() {}
            drop((unread, handoff, prepared));
            engine.shutdown().await.expect("a clean end");
        }
        1 => {
            engine.shutdown().await.expect("a clean end");
            drop((read, unread, handoff, prepared));
        }
        2 => {
            drop(engine);
            while read.recv().await.is_some() {}
            drop((unread, handoff, prepared));
        }
        3 => {
            tokio::time::sleep(Duration::from_millis(15)).await;
            drop((read, unread, handoff, prepared, engine));
        }
        _ => {
            while read.recv().await.is_some() {}
            drop((unread, handoff, prepared));
            engine.shutdown().await.expect_err("its sink panicked");
        }
    }
}

/// `STANDIN_ENGINES` says how many engines. One test, for the tally is one for all threads.
#[tokio::test(start_paused = true)]
async fn engines_come_and_go_and_leave_no_task_and_no_byte() {
    let engines: usize = std::env::var("STANDIN_ENGINES").ok().map_or(1_000, |text| text.parse().expect("a number"));
    std::panic::set_hook(Box::new(|_| {}));
    // One of each kind and end, over and over.
    let round = 3 * 5 * 7;
    let rounds = engines.div_ceil(round * LOOKS);
    let mut bytes = Vec::with_capacity(LOOKS);
    for _ in 0..LOOKS {
        for number in 0..rounds * round {
            live_and_end(number).await;
            while Handle::current().metrics().num_alive_tasks() > 0 {
                tokio::task::yield_now().await;
            }
        }
        bytes.push(counted().1);
    }
    drop(std::panic::take_hook());
    println!("{} engines: {bytes:?}", LOOKS * rounds * round);
    assert!(bytes[1..].iter().all(|&now| now == bytes[1]), "bytes stay: {bytes:?}");
}
