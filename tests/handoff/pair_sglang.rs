//! h13 on two SGLang engines: the destination goes first, chunks are sent while later ones are computed, and the
//! first token is the source's.

use standin::handoff::{HandoffFailure, HandoffOutcome};
use standin::{
    DecodeAllocationPolicy, EngineConfig, EngineKind, FinishReason, LiveEngine, LiveHandoff, Request, SglangConfig,
};

use crate::common::{FULL, at, buffered, cut, id, load, read, request, start, submit_with, whole};
use crate::kit::{Kind, assert_both_released, begin, blocks, destination, drive, pair_of, read_all, within};

const COMPLETED: Option<HandoffOutcome> = Some(HandoffOutcome::Completed);

fn sglang(options: impl FnOnce(SglangConfig) -> SglangConfig) -> EngineConfig {
    Kind::Sglang.of(|vllm| vllm, options)
}

fn pair() -> (LiveEngine, LiveEngine) {
    pair_of(Kind::Sglang.config(), Kind::Sglang.config())
}

/// Pages at the decode engine from 0 ms on, prefill 0–10 ms, transfer of 8 tokens 10–18 ms, when the first token is
/// shown, then a pass for each of the other two.
#[tokio::test(start_paused = true)]
async fn h13_destination_first_and_the_first_token_is_carried_over() {
    let (prefill, decode) = pair();
    let mut stream = begin(&prefill, &decode, request(1, 8, 3)).await;
    drive(&mut stream, &decode, 5).await;
    assert_eq!((blocks(&prefill), blocks(&decode)), ((0, 0, 0), (2, 0, 2)));
    drive(&mut stream, &decode, 15).await;
    assert_eq!((blocks(&prefill), blocks(&decode)), ((2, 2, 0), (2, 0, 2)));
    assert_eq!(read_all(&mut stream).await, whole(1, &[18.0, 28.0, 38.0]));
    assert_eq!((stream.outcome(), stream.transfer_time().map(|took| took.as_millis())), (COMPLETED, Some(8)));
    let (source, destination) = (*prefill.metrics_receiver().borrow(), *decode.metrics_receiver().borrow());
    assert_eq!((source.prompt_tokens, source.generation_tokens, source.finished.length), (8, 1, 1));
    assert_eq!((destination.generation_tokens, destination.finished.length), (2, 1), "token 2 and token 3");
    assert_both_released(&prefill, &decode).await;
}

/// Chunks of 4, 4, 4 and 4 tokens: those sent lie under the 30 ms of the later ones, which are more than 16.
#[tokio::test(start_paused = true)]
async fn h13_what_fits_under_the_prefill_is_not_waited_for() {
    for (chunk, shown_at) in [(4, 40.0), (8, 26.0), (64, 26.0)] {
        let (prefill, decode) = pair_of(Kind::Sglang.narrow(4, chunk), Kind::Sglang.config());
        let mut stream = begin(&prefill, &decode, request(1, 16, 2)).await;
        // 20 ms of prefill and 16 - 10 of transfer; 10 ms and 16.
        assert_eq!(read_all(&mut stream).await, whole(1, &[shown_at, shown_at + 10.0]), "chunks of {chunk}");
        assert_both_released(&prefill, &decode).await;
    }
}

/// Case 96: as long as the decode engine has no pages for it, the prefill engine is not even asked.
#[tokio::test(start_paused = true)]
async fn case_96_nothing_is_computed_before_there_are_pages() {
    let (prefill, decode) = pair_of(Kind::Sglang.config(), Kind::Sglang.pool(9));
    let blocker = destination(&decode, 9, 28, 1).await;
    let mut stream = begin(&prefill, &decode, request(1, 16, 2)).await;
    drive(&mut stream, &decode, 1_000).await;
    assert_eq!((load(&prefill), prefill.metrics_receiver().borrow().num_passes), ((0, 0, 0), 0));
    drop(blocker);
    assert_eq!(read_all(&mut stream).await, whole(1, &[1_026.0, 1_036.0]));
    assert_both_released(&prefill, &decode).await;
}

/// By the other allocation policy the prompt is computed meanwhile, and its pages wait at the prefill engine.
#[tokio::test(start_paused = true)]
async fn h13_pages_can_be_reserved_when_the_prompt_is_computed() {
    let late = |sglang: SglangConfig| {
        let policy = DecodeAllocationPolicy::PrefillComplete;
        sglang.with_max_total_tokens(36).with_disaggregation_decode_allocation_policy(policy)
    };
    let (prefill, decode) = pair_of(Kind::Sglang.narrow(4, 8), sglang(late).with_max_model_len(36));
    let blocker = destination(&decode, 9, 28, 1).await;
    let mut stream = begin(&prefill, &decode, request(1, 16, 2)).await;
    drive(&mut stream, &decode, 1_000).await;
    assert_eq!((blocks(&prefill), blocks(&decode)), ((4, 4, 0), (7, 0, 7)));
    drop(blocker);
    // All of the transfer is waited for: nothing was sent while there were no pages.
    assert_eq!(read_all(&mut stream).await, whole(1, &[1_016.0, 1_026.0]));
    assert_eq!(stream.outcome(), COMPLETED);
    assert_both_released(&prefill, &decode).await;
}

/// SGLang's own figures: with 512 tokens kept free a small pool serves nobody, and says so.
#[tokio::test(start_paused = true)]
async fn h13_a_pool_without_room_for_the_reserve_ends_the_request() {
    let reserving = sglang(|sglang| sglang.with_num_reserved_decode_tokens(512));
    let (prefill, decode) = pair_of(Kind::Sglang.config(), reserving);
    let mut stream = begin(&prefill, &decode, request(1, 8, 3)).await;
    assert_eq!(read_all(&mut stream).await, cut(1, &[], FinishReason::OutOfMemory, 0.0));
    assert_eq!(stream.outcome(), Some(HandoffOutcome::Failed(HandoffFailure::DestinationGone)));
    assert_both_released(&prefill, &decode).await;
}

/// More than the decode engine can hold: requests are retracted and come back, and no token is missing or doubled.
#[tokio::test(start_paused = true)]
async fn case_98_under_pressure_the_tokens_are_those_of_one_engine_alone() {
    let small = || sglang(|sglang| sglang.with_max_total_tokens(120).with_page_size(1));
    let (prefill, decode) = pair_of(small(), small());
    let alone = start(Kind::Sglang.config());
    let generated = |n: u32| {
        let prompt: Vec<u32> = (0..4 + n % 9).map(|position| 31 * n + position).collect();
        Request::new(prompt, 20 + n % 20).with_id(id(n))
    };
    let way = LiveHandoff::default().options(buffered(FULL));
    let mut readers = tokio::task::JoinSet::new();
    for n in 0..60 {
        at(&decode, u64::from(n) * 7).await;
        let mut expected = submit_with(&alone, generated(n), FULL).await;
        let mut stream = within(way.start(&prefill, &decode, generated(n))).await.expect("both take it");
        readers.spawn(async move {
            let tokens = |signals: Vec<(Option<u32>, Option<FinishReason>, f64)>| -> Vec<_> {
                signals.into_iter().map(|(token, finish, _)| (token, finish)).collect()
            };
            let got = tokens(read_all(&mut stream).await);
            assert_eq!((n, got), (n, tokens(read(&mut expected).await)));
            assert_eq!(stream.outcome(), COMPLETED);
        });
    }
    while let Some(read) = readers.join_next().await {
        read.expect("the same tokens");
    }
    let retractions = decode.metrics_receiver().borrow().num_preemptions;
    assert!(retractions >= 5, "{retractions} retractions");
    assert_both_released(&prefill, &decode).await;
}

/// Any two kinds understand each other: what is handed over is a prompt's KV and a token.
#[tokio::test(start_paused = true)]
async fn h13_kinds_can_be_mixed() {
    for (source, destination, times) in
        [(Kind::Vllm, Kind::Sglang, [18.0, 28.0, 38.0]), (Kind::Sglang, Kind::Vllm, [28.0, 38.0, 48.0])]
    {
        let (prefill, decode) = pair_of(source.config(), destination.config());
        let mut stream = begin(&prefill, &decode, request(1, 8, 3)).await;
        assert_eq!(read_all(&mut stream).await, whole(1, &times), "{source:?} to {destination:?}");
        assert_both_released(&prefill, &decode).await;
        assert!(matches!(
            (decode.config().kind.clone(), destination),
            (EngineKind::Vllm(_), Kind::Vllm) | (EngineKind::Sglang(_), Kind::Sglang)
        ));
    }
}
