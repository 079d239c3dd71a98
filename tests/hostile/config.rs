//! Configuration: JSON, fields and the figures that are made of them.

use std::time::Duration;

use standin::timing::{Affine, KernelPreset, KernelTable, PassWork, Polynomial, PrefillChunk, TimingConfig};
use standin::{EngineConfig, EngineKind, EngineTime, FinishReason, Request, Scheduler, Speedup};

use crate::kit::{assert_refused, engine, run, small_sglang, small_vllm};

/// JSON with one field set, by its path.
fn json(path: &str, value: &str) -> String {
    path.split('.').rev().fold(value.to_owned(), |inner, name| format!("{{\"{name}\": {inner}}}"))
}

/// Every whole number of a configuration, and whether it may be null.
const WHOLE: [(&str, bool); 20] = [
    ("max_model_len", false),
    ("vocab_size", false),
    ("kind.vllm.block_size", false),
    ("kind.vllm.num_gpu_blocks", false),
    ("kind.vllm.max_num_seqs", false),
    ("kind.vllm.max_num_active_seqs", true),
    ("kind.vllm.max_num_batched_tokens", false),
    ("kind.vllm.long_prefill_token_threshold", false),
    ("kind.vllm.prefill_schedule_interval", false),
    ("kind.sglang.page_size", false),
    ("kind.sglang.max_total_tokens", false),
    ("kind.sglang.max_running_requests", false),
    ("kind.sglang.max_prefill_tokens", false),
    ("kind.sglang.chunked_prefill_size", true),
    ("kind.sglang.priority_scheduling_preemption_threshold", false),
    ("kind.sglang.prefill_max_requests", true),
    ("kind.sglang.num_reserved_decode_tokens", false),
    ("timing.kernel_table.linear_ms", false),
    ("kind.vllm", false),
    ("seed", false),
];

/// Every number with a fraction.
const FRACTIONS: [&str; 10] = [
    "kind.vllm.watermark",
    "kind.vllm.kv_lease_ms",
    "kind.vllm.transfer_guard_ms",
    "kind.sglang.schedule_conservativeness",
    "kind.sglang.disaggregation_waiting_timeout_ms",
    "kind.sglang.transfer_guard_ms",
    "speedup.factor",
    "startup_ms",
    "timing.constant_ms",
    "timing.kernel_table.tail_ms_per_token",
];

#[test]
fn every_number_refuses_what_it_cannot_hold_by_path_and_value() {
    let not_whole = ["-1", "1.5", "18446744073709551616", "-9223372036854775808", "\"7\"", "true"];
    let not_a_number = ["\"7\"", "true", "[1]", "{}"];
    let mut tried = 0;
    let mut check = |path: &str, value: &str| {
        let error = EngineConfig::from_json(&json(path, value)).expect_err(path);
        // Beyond a u64 it is shown as the double that it was read as.
        let shown = if value == "18446744073709551616" { "1.8446744073709552e+19" } else { value };
        assert_eq!((error.field.as_str(), error.value.as_str()), (path, shown), "{error}");
        assert!(!error.allowed.is_empty());
        tried += 1;
    };
    for (path, nullable) in WHOLE {
        not_whole.iter().for_each(|value| check(path, value));
        if !nullable {
            check(path, "null");
        }
        if path != "seed" {
            ["4294967296", "9007199254740993", "18446744073709551615"].iter().for_each(|value| check(path, value));
        }
    }
    for path in FRACTIONS.into_iter().filter(|path| !path.ends_with("tail_ms_per_token")) {
        not_a_number.iter().for_each(|value| check(path, value));
        check(path, "null");
    }
    assert_eq!(tried, 20 * 6 + 17 + 19 * 3 + 9 * 5);
    // What JSON has no words for, or no double for.
    for value in ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x10", "+1", "01", ".5", "1."] {
        for path in WHOLE.map(|(path, _)| path).into_iter().chain(FRACTIONS) {
            let error = EngineConfig::from_json(&json(path, value)).expect_err(value);
            assert!(!error.field.is_empty() && !error.allowed.is_empty(), "{path} = {value}: {error}");
        }
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn values_at_and_beyond_the_limits() {
    let none = "";
    let rows = [
        ("max_model_len", "0", "max_model_len = 0: at least 2: one prompt token and one output token"),
        ("max_model_len", "1", "max_model_len = 1: at least 2: one prompt token and one output token"),
        ("max_model_len", "2", none),
        (
            "max_model_len",
            "4294967295",
            "kind.vllm.num_gpu_blocks = 29205: at least 268435456: the pool must hold one sequence of max_model_len = \
             4294967295 tokens",
        ),
        ("vocab_size", "0", "vocab_size = 0: at least 1"),
        ("vocab_size", "1", none),
        ("vocab_size", "4294967295", none),
        ("seed", "18446744073709551615", none),
        ("seed", "9007199254740993", none),
        ("kind.vllm.block_size", "0", "kind.vllm.block_size = 0: at least 1"),
        ("kind.vllm.block_size", "4294967295", none),
        ("kind.vllm.num_gpu_blocks", "1", "kind.vllm.num_gpu_blocks = 1: at least 2"),
        ("kind.vllm.num_gpu_blocks", "4294967295", none),
        ("kind.vllm.max_num_seqs", "0", "kind.vllm.max_num_seqs = 0: at least 1"),
        (
            "kind.vllm.max_num_seqs",
            "4294967295",
            "kind.vllm.max_num_batched_tokens = 8192: at least max_num_seqs = 4294967295",
        ),
        ("kind.vllm.max_num_active_seqs", "0", "kind.vllm.max_num_active_seqs = 0: at least 1"),
        ("kind.vllm.max_num_batched_tokens", "0", "kind.vllm.max_num_batched_tokens = 0: at least 1"),
        ("kind.vllm.max_num_batched_tokens", "4294967295", none),
        ("kind.vllm.prefill_schedule_interval", "0", "kind.vllm.prefill_schedule_interval = 0: at least 1"),
        ("kind.vllm.watermark", "-0.0", none),
        ("kind.vllm.watermark", "1.0", "kind.vllm.watermark = 1: at least 0 and below 1"),
        ("kind.vllm.watermark", "-1e-300", "kind.vllm.watermark = -0."),
        ("kind.vllm.kv_lease_ms", "0", none),
        ("kind.vllm.kv_lease_ms", "1.8446744073709552e22", none),
        (
            "kind.vllm.kv_lease_ms",
            "1.8446744073709556e22",
            "kind.vllm.kv_lease_ms = 1.8446744073709556e+22: must be a number of milliseconds from 0 to \
             1.8446744073709552e22",
        ),
        ("startup_ms", "-1", "startup_ms = -1: must be a number of milliseconds from 0 to 1.8446744073709552e22"),
        ("speedup.factor", "0", "speedup.factor = 0: greater than 0 and finite"),
        ("speedup.factor", "5e-324", none),
        ("speedup.factor", "1.7976931348623157e308", none),
        ("timing.constant_ms", "1.7976931348623157e308", none),
        ("timing.constant_ms", "-1", "timing.constant_ms = -1: at least 0 and finite"),
        ("kind.sglang.page_size", "0", "kind.sglang.page_size = 0: at least 1"),
        (
            "kind.sglang.page_size",
            "4294967295",
            "kind.sglang.max_total_tokens = 467264: at least two pages of page_size = 4294967295",
        ),
        ("kind.sglang.max_running_requests", "0", "kind.sglang.max_running_requests = 0: at least 1"),
        ("kind.sglang.num_reserved_decode_tokens", "0", "kind.sglang.num_reserved_decode_tokens = 0: at least 1"),
        ("kind.sglang.num_reserved_decode_tokens", "4294967295", none),
        ("kind.sglang.disaggregation_waiting_timeout_ms", "1.8446744073709552e22", none),
        (
            "kind.sglang.max_running_requests",
            "4294967295",
            "kind.sglang.max_running_requests = 4294967295: at most 233632: half the tokens of the pool",
        ),
        (
            "kind.sglang.schedule_conservativeness",
            "0",
            "kind.sglang.schedule_conservativeness = 0: greater than 0 and finite",
        ),
        ("kind.sglang.schedule_conservativeness", "5e-324", none),
        ("kind.sglang.schedule_conservativeness", "1.7976931348623157e308", none),
        ("timing.preset", "\"\"", "timing.preset = \"\": unknown variant"),
        ("kind", "\"vllm\"", "kind.vllm = (JSON): invalid type: unit variant"),
        ("kind.tpu", "{}", "kind = {\"tpu\":{}}: unknown variant `tpu`"),
    ];
    for (path, value, expected) in rows {
        match EngineConfig::from_json(&json(path, value)) {
            Ok(config) => {
                assert_eq!(expected, none, "{path} = {value}");
                let written = serde_json::to_string(&config).expect("plain data");
                assert_eq!(EngineConfig::from_json(&written), Ok(config), "{path} = {value} as it is written");
            }
            Err(error) => {
                assert!(expected != none && error.to_string().starts_with(expected), "{path} = {value}: {error}");
            }
        }
    }
}

#[test]
fn json_that_is_none_too_long_or_says_a_thing_twice() {
    let fields = |count: u32| (0..count).map(|index| format!("\"f{index}\":0")).collect::<Vec<_>>().join(",");
    let rows = [
        ("nothing", String::new(), "(JSON) = (JSON): EOF while parsing a value"),
        ("blanks", " \r\n".into(), "(JSON) = (JSON): EOF while parsing a value"),
        ("a byte order mark", "\u{feff}{}".into(), "(JSON) = (JSON): expected value at line 1 column 1"),
        ("a zero byte", "{}\0".into(), "(end) = (JSON): trailing characters"),
        ("two documents", "{}{}".into(), "(end) = (JSON): trailing characters"),
        ("null", "null".into(), "(JSON) = null: invalid type: null"),
        ("no name", "{\"\": 1}".into(), "(JSON) = 1: unknown field ``"),
        ("a field twice", "{\"seed\": 1, \"seed\": 2}".into(), "(JSON) = {\"seed\":2}: duplicate field `seed`"),
        ("a field of a field twice", r#"{"kind": {"vllm": {"policy": "fcfs", "policy": "fcfs"}}}"#.into(), "kind.vllm"),
        ("two kinds", r#"{"kind": {"vllm": {}, "sglang": {}}}"#.into(), "kind"),
        ("deep lists", format!("{{\"timing\": {}", "[".repeat(100_000)), "timing = (JSON): "),
        ("deep objects", format!("{{\"kind\": {}", "{\"vllm\": ".repeat(100_000)), "kind"),
        ("50,000 fields", format!("{{{}}}", fields(50_000)), "f0 = 0: unknown field `f0`"),
        ("a million fields", format!("{{{}}}", fields(1_000_000)), "(JSON) = 11888891 bytes: at most 1048576"),
        ("a megabyte of blanks", " ".repeat(1 << 20) + "{}", "(JSON) = 1048578 bytes: at most 1048576"),
        ("a long name", format!("{{\"{}\": 1}}", "x".repeat(100_000)), "xxxx"),
        ("a long value", format!("{{\"seed\": \"{}\"}}", "x".repeat(100_000)), "seed = \"xxxx"),
    ];
    for (what, json, expected) in rows {
        let error = EngineConfig::from_json(&json).expect_err(what);
        assert!(error.to_string().starts_with(expected), "{what}: {error}");
        assert!(error.value.chars().count() <= 61, "{what}: the value is cut");
    }
    let just_fits = " ".repeat((1 << 20) - 2) + "{}";
    assert_eq!(EngineConfig::from_json(&just_fits), Ok(EngineConfig::default()));
    assert_eq!(EngineConfig::from_json("{}\r\n"), Ok(EngineConfig::default()), "the end of a line is no document");
    // An element of a list is named, too.
    let table = r#"{"timing": {"kernel_table": {"linear_ms": [[1, 1.0], [2, "x"]]}}}"#;
    let error = EngineConfig::from_json(table).expect_err("not a number");
    assert_eq!((&*error.field, &*error.value), ("timing.kernel_table.linear_ms[1][1]", "\"x\""));
}

/// The smallest and the largest of everything: the core runs with it, or says which field it cannot run with.
#[test]
fn the_core_runs_with_extremes() {
    let vllm = |config: standin::VllmConfig| engine(EngineKind::Vllm(config));
    let sglang = |config: standin::SglangConfig| engine(EngineKind::Sglang(config));
    let max = u32::MAX;
    let rows = [
        (
            "the smallest pool",
            vllm(small_vllm().with_num_gpu_blocks(2).with_block_size(1)),
            Some(FinishReason::OutOfMemory),
        ),
        ("the largest pool", vllm(small_vllm().with_num_gpu_blocks(max)), Some(FinishReason::Length)),
        ("the largest blocks", vllm(small_vllm().with_block_size(max)), Some(FinishReason::Length)),
        ("both", vllm(small_vllm().with_block_size(max).with_num_gpu_blocks(max)), Some(FinishReason::Length)),
        ("blocks of one", vllm(small_vllm().with_block_size(1)), Some(FinishReason::Length)),
        ("any number of sequences", vllm(small_vllm().with_max_num_seqs(max)), Some(FinishReason::Length)),
        ("any number of tokens", vllm(small_vllm().with_max_num_batched_tokens(max)), Some(FinishReason::Length)),
        ("one token a pass", vllm(small_vllm().with_max_num_batched_tokens(1)), Some(FinishReason::Length)),
        ("threshold", vllm(small_vllm().with_long_prefill_token_threshold(max)), Some(FinishReason::Length)),
        ("interval", vllm(small_vllm().with_prefill_schedule_interval(max)), Some(FinishReason::Length)),
        ("watermark", vllm(small_vllm().with_watermark(1.0 - f64::EPSILON)), Some(FinishReason::Length)),
        ("model length", vllm(small_vllm()).with_max_model_len(max), Some(FinishReason::Length)),
        ("vocabulary of one", vllm(small_vllm()).with_vocab_size(1), Some(FinishReason::Length)),
        ("vocabulary", vllm(small_vllm()).with_vocab_size(max), Some(FinishReason::Length)),
        ("two pages", sglang(small_sglang().with_max_total_tokens(8)), Some(FinishReason::OutOfMemory)),
        ("tokens", sglang(small_sglang().with_max_total_tokens(max)), Some(FinishReason::Length)),
        (
            "pages",
            sglang(small_sglang().with_page_size(max / 2).with_max_total_tokens(max).with_chunked_prefill_size(None)),
            Some(FinishReason::Length),
        ),
        ("requests", sglang(small_sglang().with_max_running_requests(max)), Some(FinishReason::Length)),
        ("prefill", sglang(small_sglang().with_max_prefill_tokens(max)), Some(FinishReason::Length)),
        ("chunk", sglang(small_sglang().with_chunked_prefill_size(Some(max / 4 * 4))), Some(FinishReason::Length)),
        ("reserve", sglang(small_sglang().with_num_reserved_decode_tokens(max)), Some(FinishReason::Length)),
        ("hope", sglang(small_sglang().with_schedule_conservativeness(f64::MAX)), Some(FinishReason::Length)),
        ("no hope", sglang(small_sglang().with_schedule_conservativeness(5e-324)), Some(FinishReason::Length)),
    ];
    for (what, config, expected) in rows {
        assert_eq!(run(&config, Request::new(vec![1; 9], 3), EngineTime::ZERO, 50).1, expected, "{what}");
    }
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0] {
        let shown = format!("{value}");
        let config = vllm(small_vllm()).with_speedup(Speedup::Factor(value));
        let expected = format!("speedup.factor = {shown}: greater than 0 and finite");
        assert_refused("a factor", Scheduler::new(&config), &expected);
        let config = sglang(small_sglang().with_schedule_conservativeness(value));
        let expected = format!("kind.sglang.schedule_conservativeness = {shown}: greater than 0 and finite");
        assert_refused("a share", Scheduler::new(&config), &expected);
        if value != 0.0 {
            let config = vllm(small_vllm().with_watermark(value));
            let expected = format!("kind.vllm.watermark = {shown}: at least 0 and below 1");
            assert_refused("a watermark", Scheduler::new(&config), &expected);
            let config = vllm(small_vllm()).with_timing(TimingConfig::ConstantMs(value));
            let expected = format!("timing.constant_ms = {shown}: at least 0 and finite");
            assert_refused("a time", Scheduler::new(&config), &expected);
        }
    }
}

/// Whatever stands in a model that nobody checked, a pass takes between no time and a `u64` of nanoseconds.
#[test]
fn timing_models_that_nobody_checked_give_a_time() {
    let values = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, f64::MIN, -1.0, 5e-324, 0.0];
    let mut work = PassWork::new();
    (0..3)
        .for_each(|_| work.push_prefill(PrefillChunk { new_tokens: u32::MAX, tokens_before: u32::MAX, samples: true }));
    (0..300).for_each(|_| work.push_decode(u32::MAX));
    let longest = Duration::from_nanos(u64::MAX);
    for a in values {
        for b in values {
            let table = KernelTable {
                linear_ms: vec![(5, a), (5, b), (0, a)],
                tail_ms_per_token: None,
                prefill_ms: a,
                prefill_ms_per_pair: b,
                head_ms: a,
                ..KernelPreset::default().table()
            };
            let models = [
                TimingConfig::Affine(Affine { pass_ms: a, prefill_ms_per_token: b, decode_ms_per_row: a }),
                TimingConfig::Polynomial(Polynomial { prefill_ms: [a, b, a], decode_ms: [b, a, b], decode_min_ms: a }),
                TimingConfig::ConstantMs(a),
                TimingConfig::KernelTable(KernelTable { linear_ms: Vec::new(), ..table.clone() }),
                TimingConfig::KernelTable(table),
            ];
            for model in models {
                for capacity in [0, 1, u64::MAX] {
                    assert!(model.build(capacity).pass_duration(&work) <= longest, "{model:?}");
                }
            }
            for factor in values {
                let scaled = Speedup::Factor(factor).scale(Duration::MAX);
                assert!(factor == 1.0 || scaled <= longest, "{factor}");
            }
        }
    }
    let name = "x".repeat(100_000);
    assert!(name.parse::<KernelPreset>().expect_err("unknown").to_string().len() < 400, "a name is cut");
}

#[test]
fn figures_of_a_kind_at_the_end_of_a_number() {
    for kind in
        [EngineKind::Vllm(small_vllm().with_block_size(0)), EngineKind::Sglang(small_sglang().with_page_size(0))]
    {
        assert_eq!(kind.blocks_for(u64::MAX), u64::MAX, "a size of 0 counts as 1");
        assert_eq!(kind.blocks_to_admit(u64::MAX), u64::MAX);
        assert!(Scheduler::new(&engine(kind)).is_err());
    }
    let largest = EngineKind::Sglang(small_sglang().with_page_size(1).with_max_total_tokens(u32::MAX));
    assert_eq!((largest.usable_blocks(), largest.blocks_to_admit(0)), (u64::from(u32::MAX), 3));
}
