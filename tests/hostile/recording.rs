//! Recordings: lines that are none, and scenarios that no engine was ever given.

use std::path::Path;

use serde_json::{Value, json};
use standin::replay::recording::{Recording, recording_files};

/// A scenario of vLLM's with these inputs and one change to its configuration.
fn vllm(inputs: Value, change: (&str, Value)) -> String {
    let mut config = json!({"block_size": 4, "num_gpu_blocks": 9, "usable_gpu_blocks": 8, "max_num_seqs": 8,
        "max_num_active_seqs": null, "max_num_batched_tokens": 64, "max_model_len": 32, "enable_prefix_caching": true,
        "enable_chunked_prefill": true, "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": false, "policy": "priority", "watermark": 0.0,
        "scheduler_reserve_full_isl": true, "prefill_schedule_interval": 1, "kv_events": true, "kv_role": "kv_both"});
    config[change.0] = change.1;
    json!({"kind": "scenario", "format": "vllm-oracle-pd/1", "name": "n", "description": "d", "engine": "vllm",
        "engine_version": "0", "config": config, "max_steps": 4_294_967_295_u32, "inputs": inputs})
    .to_string()
}

fn sglang(inputs: Value, change: (&str, Value)) -> String {
    let mut config = json!({"page_size": 1, "max_total_tokens": 100, "max_running_requests": 8,
        "max_prefill_tokens": 64, "chunked_prefill_size": null, "context_length": 32, "disable_radix_cache": false,
        "schedule_policy": "fcfs", "schedule_conservativeness": 1.0, "eviction_policy": "lru",
        "enable_mixed_chunk": false, "enable_priority_scheduling": false, "schedule_low_priority_values_first": false,
        "priority_scheduling_preemption_threshold": 10, "prefill_max_requests": null, "tree_core": "python",
        "kv_events": true});
    config[change.0] = change.1;
    json!({"kind": "scenario", "format": "sglang-oracle/1", "name": "n", "description": "d", "engine": "sglang",
        "engine_version": "0", "config": config, "max_steps": 4_294_967_295_u32, "inputs": inputs})
    .to_string()
}

fn add(id: &str, change: (&str, Value)) -> Value {
    let mut add = json!({"op": "add", "step": 0, "id": id, "prompt_token_ids": [1, 2, 3, 4, 5],
        "output_token_ids": [7], "max_tokens": 4, "priority": 0, "arrival_time": 0.5, "cache_salt": null,
        "stop_token_ids": [], "eos_token_id": null, "ignore_eos": false, "min_tokens": 0,
        "skip_reading_prefix_cache": null, "kv_cache_report_mode": "incremental"});
    add[change.0] = change.1;
    add
}

fn add_sglang(id: &str, change: (&str, Value)) -> Value {
    let mut add = json!({"op": "add", "step": 0, "id": id, "prompt_token_ids": [1, 2, 3], "output_token_ids": [],
        "max_tokens": 4, "priority": null, "stop_token_ids": [], "eos_token_ids": [], "ignore_eos": false,
        "cache_salt": null, "extra_key": null});
    add[change.0] = change.1;
    add
}

fn done(step: u32, phase: &str, change: (&str, Value)) -> Value {
    let mut done = json!({"op": "kv_done", "step": step, "phase": phase, "sent": [], "received": [], "failed": [],
        "invalid_blocks": []});
    done[change.0] = change.1;
    done
}

const END: &str = r#"{"kind":"end","reason":"drained","steps":0,"unfinished":[],"outputs":{}}"#;

/// The error, or that of the check, which every one of these fails: it says that nothing happened.
fn said(scenario: &str) -> String {
    match Recording::parse(Path::new("r"), &format!("{scenario}\n{END}\n")) {
        Err(error) => error.to_string(),
        Ok(recording) => recording.check().err().map_or_else(|| "agrees".to_owned(), |error| error.to_string()),
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn scenarios_that_no_engine_was_given() {
    let none = || ("step", json!(0));
    let with = |inputs: Value| vllm(inputs, ("block_size", json!(4)));
    let differs = "step 0: ";
    let field = |index: usize, field: &str| format!("r, line 1, field inputs[{index}].{field}: ");
    let most = "output tokens so far: all inputs may have MAX_OUTPUT_TOKENS = 10000000";
    let max = u32::MAX;
    let rows: Vec<(&str, String, String)> = vec![
        ("nothing", with(json!([])), "agrees".into()),
        ("one request", with(json!([add("a", none())])), differs.into()),
        ("a name of nothing", with(json!([add("", none())])), differs.into()),
        ("a name twice", with(json!([add("a", none()), add("a", none())])), differs.into()),
        (
            "a report before its step's output",
            with(json!([done(0, "pre", none())])),
            field(0, "phase") + "must be output",
        ),
        (
            "a report within it",
            with(json!([add("a", none()), done(0, "mid", none())])),
            field(1, "phase") + "must be output",
        ),
        (
            "an abort with the output",
            with(json!([{"op": "abort", "step": 0, "phase": "output", "ids": []}])),
            field(0, "phase") + "must be pre or mid",
        ),
        (
            "a report about nobody",
            with(json!([done(0, "output", ("sent", json!(["a"])))])),
            field(0, "op") + "no request \"a\" has been added by then",
        ),
        (
            "a report about somebody to come",
            with(json!([done(0, "output", ("received", json!(["a"]))), add("a", ("step", json!(1)))])),
            field(0, "op") + "no request \"a\" has been added by then",
        ),
        (
            "a block of nobody",
            with(json!([add("a", none()), done(0, "output", ("invalid_blocks", json!([["b", 0]])))])),
            field(1, "op") + "no request \"b\" has been added by then",
        ),
        (
            "a block that is none",
            with(json!([add("a", none()), done(0, "output", ("invalid_blocks", json!([["a", max]])))])),
            differs.into(),
        ),
        (
            "two reports of a step",
            with(json!([add("a", none()), done(0, "output", none()), done(0, "output", none())])),
            field(2, "step") + "step 0 has a report already",
        ),
        (
            "no output",
            with(json!([add("a", ("max_tokens", json!(0)))])),
            "step 0: an input is refused: output length is 0".into(),
        ),
        (
            "no prompt",
            with(json!([add("a", ("prompt_token_ids", json!([])))])),
            "step 0: an input is refused: prompt is".into(),
        ),
        ("output without end", with(json!([add("a", ("max_tokens", json!(max)))])), differs.into()),
        (
            "output without end in a model without end",
            vllm(json!([add("a", ("max_tokens", json!(max)))]), ("max_model_len", json!(max))),
            field(0, "max_tokens") + "4294967290 " + most,
        ),
        (
            "much output of many",
            vllm(
                json!([add("a", ("max_tokens", json!(6_000_000))), add("b", ("max_tokens", json!(4_000_001)))]),
                ("max_model_len", json!(max)),
            ),
            field(1, "max_tokens") + "10000001 " + most,
        ),
        (
            "a load that takes for ever",
            with(json!([{"op": "pause", "step": 0, "phase": "pre"}, add_loading("recv_after", max)])),
            differs.into(),
        ),
        ("a send that takes for ever", with(json!([add_loading("sent_after", max)])), differs.into()),
        ("a copy without end", with(json!([add_loading("remote_tokens", max)])), differs.into()),
        ("undecided for ever", with(json!([add_loading("match_pending", max)])), differs.into()),
        (
            "no blocks",
            vllm(json!([]), ("block_size", json!(0))),
            "the configuration is refused: kind.vllm.block_size = 0".into(),
        ),
        (
            "no pool",
            vllm(json!([]), ("num_gpu_blocks", json!(0))),
            "the configuration is refused: kind.vllm.num_gpu".into(),
        ),
        ("any pool", vllm(json!([]), ("num_gpu_blocks", json!(max))), "scenario: 1 differing".into()),
        (
            "no share",
            vllm(json!([]), ("watermark", json!(-1e300))),
            "the configuration is refused: kind.vllm.watermark".into(),
        ),
        ("sglang", sglang(json!([]), ("page_size", json!(1))), "step 0: ".into()),
        (
            "sglang without pages",
            sglang(json!([]), ("page_size", json!(0))),
            "the configuration is refused: kind.sglang.page_size = 0".into(),
        ),
        (
            "sglang without end",
            sglang(json!([add_sglang("a", ("max_tokens", json!(max)))]), ("context_length", json!(max))),
            field(0, "max_tokens") + "4294967292 " + most,
        ),
        (
            "everybody is aborted",
            sglang(json!([add_sglang("a", none()), {"op": "abort", "step": 0, "id": ""}]), ("page_size", json!(1))),
            "step 0: ".into(),
        ),
    ];
    for (what, scenario, expected) in rows {
        let said = said(&scenario);
        assert!(said.starts_with(&expected), "{what}: {said}");
    }
}

/// A request whose KV is loaded between steps, with one figure of that.
fn add_loading(field: &str, value: u32) -> Value {
    let mut add = add("a", ("load_async", json!(true)));
    (add["remote_tokens"], add["send"]) = (json!(3), json!("always"));
    add[field] = json!(value);
    add
}

#[test]
fn lines_that_are_none() {
    let good = vllm(json!([add("a", ("step", json!(9)))]), unchanged());
    let text = |lines: &[&str]| lines.join("\n");
    let line = |line: usize, field: &str| format!("r, line {line}, field {field}: ");
    let end = |outputs: &str| END.replace("{}}", outputs);
    let rows: Vec<(&str, String, String)> = vec![
        ("nothing", String::new(), line(1, "kind") + "a recording has a scenario line and an end line"),
        ("one line", good.clone(), line(2, "kind") + "a recording has a scenario line and an end line"),
        ("a byte order mark", text(&[&format!("\u{feff}{good}"), END]), line(1, "(JSON)") + "expected value"),
        ("CRLF", format!("{good}\r\n{END}\r\n"), String::new()),
        ("no final newline", text(&[&good, END]), String::new()),
        ("a blank line", text(&[&good, "", END]), line(2, "(JSON)") + "EOF while parsing a value"),
        ("an end twice", text(&[&good, END, END]), line(2, "kind")),
        ("deep lists", text(&[&good, &"[".repeat(1_000_000), END]), line(2, "[0]") + "expected value"),
        ("a line of ten megabytes", text(&[&good, &" ".repeat(10 << 20), END]), line(2, "(JSON)") + "EOF"),
        (
            "a million ids",
            text(&[&good, &format!("{{\"kind\":\"step\",\"step\":0,\"pool\":[{}0]}}", "0,".repeat(1_000_000)), END]),
            line(2, "pool[3]"),
        ),
        (
            "another step",
            text(&[&good, r#"{"kind":"step","step":4294967295}"#, END]),
            line(2, "step") + "is 4294967295",
        ),
        ("a step that is none", text(&[&good, r#"{"kind":"step","step":4294967296}"#, END]), line(2, "step")),
        (
            "a field twice",
            text(&[&good, r#"{"kind":"step","kind":"step"}"#, END]),
            line(2, "(JSON)") + "duplicate field `kind`",
        ),
        ("a name of nothing", text(&[&good, r#"{"":1}"#, END]), line(2, "(JSON)") + "unknown field ``"),
        ("outputs twice", text(&[&good, &end(r#"{"a":[],"a":[]}}"#)]), line(2, "outputs") + "\"a\" is there twice"),
        ("a format to come", text(&[r#"{"format":"vllm-oracle/2"}"#, END]), "r: not supported: ".into()),
    ];
    for (what, text, expected) in rows {
        match Recording::parse(Path::new("r"), &text) {
            Ok(_) => assert!(expected.is_empty(), "{what}"),
            Err(error) => {
                let said = error.to_string();
                assert!(!expected.is_empty() && said.starts_with(&expected), "{what}: {said}");
            }
        }
    }
}

/// No change.
fn unchanged() -> (&'static str, Value) {
    ("block_size", json!(4))
}

/// Inputs are found without a look at all of them: time grows with the file, not with its square.
#[test]
fn many_inputs_are_replayed_in_time() {
    let adds: Vec<Value> = (0..10_000)
        .map(|index| {
            let mut add = add(&format!("r{index}"), ("step", json!(index)));
            add["arrival_time"] = json!(index);
            add
        })
        .collect();
    let scenario = vllm(Value::Array(adds), ("max_num_seqs", json!(1)));
    let idle = r#"{"kind":"step","step":0,"idle":true}"#;
    let recording = Recording::parse(Path::new("r"), &format!("{scenario}\n{idle}\n{END}")).expect("a recording");
    assert!(recording.check().expect_err("it was not idle").to_string().starts_with("step 0: "));
}

#[cfg(unix)]
#[test]
fn paths_that_are_no_recordings() {
    let folder = env!("CARGO_MANIFEST_DIR");
    let binary = std::env::current_exe().expect("this test");
    let rows = [
        ("no name", "".to_owned(), "No such file"),
        ("a folder", folder.to_owned(), "Is a directory"),
        ("a device without end", "/dev/zero".to_owned(), "the file is larger than 16777216 bytes"),
        ("no text", binary.display().to_string(), "valid UTF-8"),
    ];
    for (what, path, expected) in rows {
        let error = Recording::read(Path::new(&path)).expect_err(what).to_string();
        assert!(error.contains(expected), "{what}: {error}");
    }
    assert!(recording_files(Path::new(&format!("{folder}/src"))).is_err(), "a folder without recordings");
}
