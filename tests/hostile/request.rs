//! Requests: what is refused, what it costs to find out, and prompts whose source misbehaves.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use standin::{
    Command, EngineConfig, EngineTime, FinishReason, MAX_KEY_BYTES, MAX_MULTIMODAL_ITEMS, MAX_OUTPUT_TOKENS,
    MultimodalItem, OutputPlan, Prompt, Request, Scheduler, TokenGenerator,
};

use crate::kit::{Claim, assert_refused, engine, kinds, run, small_vllm, submission, untouchable};

fn text(bytes: usize) -> Option<Arc<str>> {
    Some("x".repeat(bytes).into())
}

fn item(offset: u32, num_tokens: u32) -> MultimodalItem {
    MultimodalItem { identifier: "i".into(), offset, num_tokens }
}

/// A request of 10 tokens for 3 with one thing changed.
fn with(change: impl FnOnce(&mut Request)) -> Request {
    let mut request = Request::new(vec![1; 10], 3);
    change(&mut request);
    request
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn values_at_and_beyond_the_limits() {
    let none = "";
    let pool = |blocks: u64| format!("prompt needs {blocks} KV blocks: the pool has 100 usable ones");
    let large = engine(standin::EngineKind::Vllm(small_vllm())).with_max_model_len(u32::MAX);
    let [vllm, sglang] = kinds();
    let rows: Vec<(&str, &EngineConfig, Request, String)> = vec![
        ("no prompt", &vllm, Request::new(vec![], 1), "prompt is empty: at least one token is required".into()),
        ("one token", &vllm, Request::new(vec![1], 1), none.into()),
        ("one short of the model's length", &vllm, Request::new(vec![1; 63], 1), none.into()),
        (
            "the model's length",
            &vllm,
            Request::new(untouchable(64), 1),
            "prompt has 64 tokens: must be below max_model_len = 64".into(),
        ),
        (
            "ten million tokens",
            &vllm,
            Request::new(untouchable(10_000_000), 1),
            "prompt has 10000000 tokens: must be below max_model_len = 64".into(),
        ),
        (
            "a u32 of tokens",
            &large,
            Request::new(untouchable(u32::MAX as usize), 1),
            "prompt has 4294967295 tokens: must be below max_model_len = 4294967295".into(),
        ),
        (
            "a usize of tokens",
            &sglang,
            Request::new(untouchable(usize::MAX), 1),
            "prompt has 18446744073709551615 tokens: must be below max_model_len = 64".into(),
        ),
        ("the whole pool", &large, Request::new(untouchable(400), 1), none.into()),
        ("a block more", &large, Request::new(untouchable(401), 1), pool(101)),
        ("ten million where they are allowed", &large, Request::new(untouchable(10_000_000), 1), pool(2_500_000)),
        ("no output", &vllm, Request::new(vec![1], 0), none.into()),
        ("the longest output", &vllm, Request::new(vec![1], MAX_OUTPUT_TOKENS), none.into()),
        (
            "one more",
            &vllm,
            Request::new(vec![1], MAX_OUTPUT_TOKENS + 1),
            "output length is 10000001: at most MAX_OUTPUT_TOKENS = 10000000 is allowed".into(),
        ),
        (
            "a u32 of output",
            &vllm,
            Request::new(vec![1], u32::MAX),
            "output length is 4294967295: at most MAX_OUTPUT_TOKENS = 10000000 is allowed".into(),
        ),
        ("all that fits", &vllm, with(|request| request.max_output_tokens = None), none.into()),
        (
            "a plan that is too long",
            &vllm,
            with(|request| request.output = OutputPlan::Tokens(vec![0; MAX_OUTPUT_TOKENS as usize + 1].into())),
            "output length is 10000001: at most MAX_OUTPUT_TOKENS = 10000000 is allowed".into(),
        ),
        ("as many at the least", &vllm, with(|request| request.min_output_tokens = 3), none.into()),
        (
            "more at the least",
            &vllm,
            with(|request| request.min_output_tokens = u32::MAX),
            "min_output_tokens = 4294967295: must be at most the output length 3".into(),
        ),
        ("an item at the end", &vllm, with(|request| request.multimodal.push(item(9, 1))), none.into()),
        (
            "an item beyond it",
            &vllm,
            with(|request| request.multimodal.push(item(9, 2))),
            "multimodal item \"i\" covers tokens 9..11: the prompt has 10".into(),
        ),
        (
            "an item at the end of a number",
            &vllm,
            with(|request| request.multimodal.push(item(u32::MAX, u32::MAX))),
            "multimodal item \"i\" covers tokens 4294967295..8589934590: the prompt has 10".into(),
        ),
        (
            "an item of nothing",
            &vllm,
            with(|request| request.multimodal.push(item(3, 0))),
            "multimodal item \"i\" covers tokens 3..3: the prompt has 10".into(),
        ),
        ("all items", &vllm, with(|request| request.multimodal = vec![item(0, 9); MAX_MULTIMODAL_ITEMS]), none.into()),
        (
            "a million items",
            &vllm,
            with(|request| request.multimodal = vec![item(0, 9); 1_000_000]),
            "multimodal has 1000000 items: at most MAX_MULTIMODAL_ITEMS = 1024 are allowed".into(),
        ),
        ("a long salt", &vllm, with(|request| request.cache_salt = text(MAX_KEY_BYTES)), none.into()),
        (
            "a longer one",
            &vllm,
            with(|request| request.cache_salt = text(MAX_KEY_BYTES + 1)),
            "cache_salt has 4097 bytes: at most MAX_KEY_BYTES = 4096 are allowed".into(),
        ),
        (
            "an adapter of ten megabytes",
            &sglang,
            with(|request| request.lora_name = text(10 << 20)),
            "lora_name has 10485760 bytes: at most MAX_KEY_BYTES = 4096 are allowed".into(),
        ),
        (
            "a long identifier",
            &vllm,
            with(|request| {
                let identifier = "x".repeat(MAX_KEY_BYTES + 1).into();
                request.multimodal.push(MultimodalItem { identifier, offset: 0, num_tokens: 1 });
            }),
            "multimodal.identifier has 4097 bytes: at most MAX_KEY_BYTES = 4096 are allowed".into(),
        ),
        ("a million stop tokens", &vllm, with(|request| request.stop_token_ids = (0..1_000_000).collect()), {
            "stop_token_ids and eos_token_id cover all 128256 tokens of the vocabulary: one must stay free".into()
        }),
        ("all but one", &vllm, with(|request| request.stop_token_ids = (1..1_000_000).collect()), none.into()),
        (
            "the last one",
            &vllm,
            with(|request| {
                request.stop_token_ids = (1..1_000_000).collect();
                request.eos_token_id = Some(0);
            }),
            "stop_token_ids and eos_token_id cover all 128256 tokens of the vocabulary: one must stay free".into(),
        ),
        ("stop tokens that are none", &vllm, with(|request| request.stop_token_ids = vec![u32::MAX; 9]), none.into()),
        ("priority", &vllm, with(|request| request.priority = i32::MIN), none.into()),
        ("arrival", &vllm, with(|request| request.arrival = Some(EngineTime::MAX)), none.into()),
    ];
    for (what, config, request, expected) in rows {
        assert_refused(what, request.validate(config), &expected);
    }
    let error = Request::new(untouchable(usize::MAX), 1).validate(&sglang.with_max_model_len(u32::MAX));
    assert!(error.expect_err("too long").to_string().starts_with("prompt has 18446744073709551615 tokens"));
}

/// What the strict check refuses, the core takes where it can live with it, and lives with it.
#[test]
fn the_core_lives_with_requests_that_a_server_refuses() {
    let rows: Vec<(&str, Request, FinishReason)> = vec![
        (
            "items beyond the prompt",
            with(|r| r.multimodal = vec![item(u32::MAX, u32::MAX), item(0, u32::MAX)]),
            FinishReason::Length,
        ),
        ("a long adapter", with(|r| r.lora_name = text(1 << 20)), FinishReason::Length),
        ("output without end", with(|r| r.max_output_tokens = Some(u32::MAX)), FinishReason::Length),
        ("at least more than at most", with(|r| r.min_output_tokens = u32::MAX), FinishReason::Length),
        (
            "tokens outside the vocabulary",
            with(|r| r.output = OutputPlan::Tokens(vec![u32::MAX; 2].into())),
            FinishReason::Length,
        ),
        (
            "a million stop tokens, in no order",
            with(|r| {
                r.output = OutputPlan::Tokens(vec![7, 8, 9].into());
                r.stop_token_ids = (8..1_000_000).rev().collect();
            }),
            FinishReason::Stop { stop_token: Some(8) },
        ),
    ];
    for config in kinds() {
        for (what, request, expected) in &rows {
            assert_eq!(run(&config, request.clone(), EngineTime::ZERO, 80).1, Some(*expected), "{what}");
        }
    }
}

/// A length that is claimed is checked before a token is made, by the core too.
#[test]
fn a_prompt_that_claims_too_much_is_never_made() {
    for config in kinds() {
        for max_model_len in [64, u32::MAX] {
            let config = config.clone().with_max_model_len(max_model_len);
            let mut scheduler = Scheduler::new(&config).expect("a configuration");
            for length in [max_model_len as usize, u32::MAX as usize, u32::MAX as usize + 1, usize::MAX] {
                let request = Request::new(untouchable(length), 1);
                let answer = scheduler.apply(Command::Submit(submission(1, request.clone())), EngineTime::ZERO);
                let expected = format!("prompt has {length} tokens: must be below max_model_len = {max_model_len}");
                assert_refused("a claim", answer, &expected);
                assert_refused("a claim", request.validate(&config), &expected);
            }
        }
    }
}

/// A source that names one length when it is asked first and another one later cannot break the core: the length
/// that counts is asked for once, and lies between 1 and that of the model.
#[test]
fn a_prompt_whose_length_changes_after_it_was_checked_is_held_to_the_model() {
    for config in kinds() {
        for before in 1..12 {
            for length in [0, 1, 9, 65, u32::MAX as usize, u32::MAX as usize + 1, usize::MAX] {
                let mut lengths = vec![10; before];
                lengths.push(length);
                let mut scheduler = Scheduler::new(&config).expect("a configuration");
                let request = Request::new(Claim::prompt(lengths), 3);
                let answer = scheduler.apply(Command::Submit(submission(1, request)), EngineTime::ZERO);
                if answer.is_err() {
                    continue;
                }
                let sequence = scheduler.view().sequence(standin::SequenceId(1)).map(|sequence| sequence.num_tokens);
                assert!(sequence.is_some_and(|tokens| (1..64).contains(&tokens)), "asked {before} times: {sequence:?}");
                let mut now = EngineTime::ZERO;
                let mut ended = None;
                while let Some(pass) = scheduler.begin_pass(now) {
                    now = pass.ends_at();
                    let effects = scheduler.finish_pass(pass, now);
                    ended = effects.outputs.iter().find_map(|output| output.finish).or(ended);
                }
                assert_eq!(ended, Some(FinishReason::Length), "asked {before} times, then {length}");
                assert_eq!(scheduler.view().pool().num_free_blocks(), scheduler.view().pool().num_usable_blocks());
            }
        }
    }
}

#[test]
fn ranges_of_a_prompt_at_the_end_of_a_number() {
    let prompts: [Prompt; 2] = [vec![1, 2, 3].into(), Claim::prompt([3])];
    for prompt in &prompts {
        for (start, len) in [(0, 4), (3, 1), (4, 0), (usize::MAX, 0), (usize::MAX, 1), (usize::MAX - 1, 3)] {
            let panic = catch_unwind(AssertUnwindSafe(|| prompt.fill(start, &mut vec![0; len])));
            let message = *panic.expect_err("as documented").downcast::<String>().expect("a text");
            assert_eq!(message, format!("prompt range {start}+{len} of 3"));
        }
        prompt.fill(3, &mut []);
    }
    // Two prompts of a billion tokens are compared without being held.
    let long = |length: usize| Prompt::Lazy(Arc::new(FirstDiffers(length)));
    assert_ne!(long(1_000_000_000), long(1_000_000_000));
    assert_ne!(long(usize::MAX), long(usize::MAX - 1));
    assert_eq!(Claim::prompt([5_000]), (0..5_000).collect::<Vec<u32>>().into());
    let json = serde_json::to_string(&Claim::prompt([5_000])).expect("a list");
    assert_eq!(serde_json::from_str::<Prompt>(&json).expect("as it was written"), Claim::prompt([5_000]));
}

/// No two of them are equal, and none can be held.
#[derive(Debug)]
struct FirstDiffers(usize);

impl standin::PromptSource for FirstDiffers {
    fn num_tokens(&self) -> usize {
        self.0
    }

    fn fill(&self, _: usize, out: &mut [u32]) {
        assert!(out.len() < 1 << 20, "{} tokens at once", out.len());
        out.fill(std::ptr::from_ref(self) as usize as u32);
    }
}

/// What is documented as a precondition does no harm where it is not kept.
#[test]
fn a_generator_with_nothing_left_gives_a_number() {
    for vocab_size in [0, 1, 5, u32::MAX] {
        let generator = TokenGenerator::new(u64::MAX, u128::MAX, vocab_size);
        for forbidden in [&[][..], &[0, 1, 2, 3, 4], &[4, 3, 2, 1, 0], &[0; 9], &[u32::MAX; 3], &[u32::MAX, 0]] {
            for position in [0, 1, u32::MAX] {
                let token = generator.token(position, forbidden);
                assert!(token <= vocab_size.saturating_add(9), "{vocab_size} without {forbidden:?}: {token}");
            }
        }
    }
}

#[test]
fn json_of_a_request() {
    let rows = [
        (r#"{}"#, "missing field `prompt`"),
        (r#"{"prompt": []}"#, ""),
        (r#"{"prompt": [-1]}"#, "invalid value: integer `-1`, expected u32"),
        (r#"{"prompt": [4294967296]}"#, "invalid value: integer `4294967296`, expected u32"),
        (r#"{"prompt": [1.0]}"#, "invalid type: floating point `1.0`, expected u32"),
        (r#"{"prompt": [1], "prompt": [1]}"#, "duplicate field `prompt`"),
        (r#"{"prompt": [1], "max_output_tokens": -1}"#, "invalid value: integer `-1`, expected u32"),
        (r#"{"prompt": [1], "priority": 2147483648}"#, "invalid value: integer `2147483648`, expected i32"),
        (r#"{"prompt": [1], "priority": -2147483648}"#, ""),
        (r#"{"prompt": [1], "arrival": 18446744073709551615}"#, ""),
        (r#"{"prompt": [1], "arrival": -1}"#, "invalid value: integer `-1`, expected u64"),
        (r#"{"prompt": [1], "id": "7"}"#, "UUID parsing failed"),
        (r#"{"prompt": [1], "stop": [1]}"#, "unknown field `stop`"),
    ];
    for (json, expected) in rows {
        match serde_json::from_str::<Request>(json) {
            Ok(request) => assert!(expected.is_empty(), "{json} is {request:?}"),
            Err(error) => assert!(!expected.is_empty() && error.to_string().contains(expected), "{json}: {error}"),
        }
    }
    let million = format!("{{\"prompt\": [{}1]}}", "1,".repeat(1_000_000));
    assert_eq!(serde_json::from_str::<Request>(&million).expect("many tokens").prompt.len(), 1_000_001);
}
