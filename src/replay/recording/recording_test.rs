//! The reader: what it takes, what it refuses and how it says so.

use std::path::Path;

use serde_json::Value;

use super::*;

const SCENARIO: &str = concat!(
    r#"{"kind":"scenario","format":"vllm-oracle/1","name":"tiny","description":"One token.","engine":"vllm","#,
    r#""engine_version":"0.33.0","config":{"block_size":4,"num_gpu_blocks":9,"max_num_seqs":8,"#,
    r#""max_num_batched_tokens":64,"max_model_len":32,"enable_prefix_caching":true,"enable_chunked_prefill":true,"#,
    r#""long_prefill_token_threshold":0,"long_prefill_token_threshold_adaptive":false,"policy":"priority","#,
    r#""watermark":0.25,"scheduler_reserve_full_isl":true,"max_num_active_seqs":null,"prefill_schedule_interval":1,"#,
    r#""kv_events":true,"usable_gpu_blocks":8},"max_steps":9,"inputs":[{"step":0,"op":"add","id":"a","#,
    r#""prompt_token_ids":[5,6],"output_token_ids":[7,8],"max_tokens":40,"priority":-1,"arrival_time":0.5,"#,
    r#""cache_salt":"s","stop_token_ids":[9],"eos_token_id":3,"ignore_eos":false,"min_tokens":0,"#,
    r#""skip_reading_prefix_cache":null,"kv_cache_report_mode":"full"},"#,
    r#"{"step":1,"op":"reset_prefix_cache","reset_running_requests":true,"phase":"mid"}]}"#
);
const STEP: &str = concat!(
    r#"{"kind":"step","step":0,"idle":true,"pool":{"num_free_blocks":8,"num_used_blocks":0,"kv_usage":0.0,"#,
    r#""free_queue":[1,2],"num_cached_hashes":0,"num_blocks_with_hash":0}}"#
);
const END: &str = r#"{"kind":"end","reason":"max_steps","steps":1,"unfinished":["a"],"outputs":{"a":[]}}"#;

fn parse(lines: &[&str]) -> Result<Recording, ReadError> {
    Recording::parse(Path::new("tiny.jsonl"), &lines.join("\n"))
}

/// The error's text for three lines of which one is changed.
fn error(line: usize, from: &str, to: &str) -> String {
    let mut lines = [SCENARIO, STEP, END].map(str::to_owned);
    assert!(lines[line - 1].contains(from), "{from}");
    lines[line - 1] = lines[line - 1].replacen(from, to, 1);
    parse(&lines.each_ref().map(String::as_str)).expect_err(to).to_string()
}

#[test]
fn reads_names_inputs_and_outputs() {
    let recording = parse(&[SCENARIO, STEP, END]).expect("a recording");
    assert_eq!((recording.name(), recording.num_steps()), ("tiny", 1));
    let Lines::Vllm(recorded) = &recording.lines else { panic!("a recording of vLLM") };
    let [input::Input::Add(add), reset] = recorded.scenario.inputs.as_slice() else { panic!("two inputs") };
    assert_eq!(reset.when(), (1, input::Phase::Mid));
    let tokens = add.output_tokens(32);
    assert_eq!(tokens[..3], [7, 8, 100_002]);
    assert_eq!(tokens.len(), 30, "max_model_len leaves room for so many after two prompt tokens");
    assert_eq!(add.output_tokens(1).len(), 1, "a request that cannot even hold its prompt still asks for a token");
}

#[test]
fn an_error_names_file_line_and_field() {
    let cases = [
        (1, r#""block_size":4"#, r#""block_size":-4"#, "tiny.jsonl, line 1, field config.block_size: "),
        (1, r#""block_size":4,"#, "", "line 1, field config: missing field `block_size`"),
        (1, r#""kv_events":true"#, r#""kv_events":true,"drafts":null"#, "field config.drafts: unknown field `drafts`"),
        (1, r#""op":"add""#, r#""op":"kv_lost""#, "line 1, field inputs[0].op: unknown variant `kv_lost`"),
        (1, r#""priority":-1,"#, r#""priority":-1,"lora":null,"#, "field inputs[0]: unknown field `lora`"),
        (1, r#""phase":"mid""#, r#""phase":"mid","x":1"#, "field inputs[1]: unknown field `x`"),
        (1, r#""engine":"vllm""#, r#""engine":"other""#, "field engine: unknown variant `other`"),
        (
            2,
            r#""free_queue""#,
            r#""deferred":[],"free_queue""#,
            "line 2, field pool.deferred: unknown field `deferred`",
        ),
        (2, r#""step":0"#, r#""step":1"#, "line 2, field step: is 1, but this is the line of step 0"),
        (2, r#""idle":true"#, r#""in_flight":[]"#, "line 2, field in_flight: unknown field `in_flight`"),
        (2, r#"}}"#, r#"}"#, "line 2, field "),
        (3, r#""reason":"max_steps""#, r#""reason":"bored""#, "line 3, field reason: unknown variant `bored`"),
        (3, r#"]}}"#, r#"]}} 1"#, "line 3, field (end of line): "),
    ];
    for (line, from, to, expected) in cases {
        let error = error(line, from, to);
        assert!(error.contains(expected), "{error}\nhas no {expected}");
    }
}

#[test]
fn a_recorded_field_may_be_null_but_not_left_out() {
    let step =
        |output: &str| STEP.replace(r#""idle":true"#, &format!(r#""sampled":[],"update":{{"outputs":[{output}]}}"#));
    let error = |output: &str| parse(&[SCENARIO, &step(output), END]).expect_err("no recording").to_string();
    let full = r#"{"id":"a","new_token_ids":[1],"finish_reason":null,"stop_reason":null}"#;
    assert!(error(full).contains("missing field `running`"), "{}", error(full));
    let short = error(r#"{"id":"a","new_token_ids":[1],"finish_reason":null}"#);
    assert!(short.contains("field update.outputs[0]: missing field `stop_reason`"), "{short}");
}

#[test]
fn a_file_that_was_cut_off_is_an_error() {
    let cut_off = parse(&[SCENARIO, STEP]).expect_err("no end").to_string();
    assert!(cut_off.contains("line 2, field kind: unknown variant `step`, expected `end`"), "{cut_off}");
    for (lines, line) in [(&[][..], 1), (&[SCENARIO], 2)] {
        let error = parse(lines).expect_err("too short");
        assert!(matches!(error, ReadError::Line { line: named, .. } if named == line), "{error}");
    }
}

#[test]
fn what_is_not_supported_is_said_before_anything_else() {
    for (format, expected) in [
        ("vllm-oracle-async/1", "two batches in flight"),
        ("vllm-oracle-spec/1", "draft tokens"),
        ("vllm-oracle/2", "a format that is not known, format vllm-oracle/2"),
    ] {
        let scenario = SCENARIO.replace("vllm-oracle/1", format).replace("block_size", "unheard_of");
        let error = parse(&[&scenario, "not even JSON", END]).expect_err("not supported");
        let ReadError::NotSupported { feature, .. } = &error else { panic!("{error}") };
        assert!(feature.contains(expected), "{feature}");
    }
}

#[test]
fn nothing_of_a_recorded_line_is_lost_by_reading_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/recordings");
    let files = [folder.clone(), folder.join("connector"), folder.join("sglang")];
    for file in files.iter().flat_map(|folder| recording_files(folder).expect("checked-in recordings")) {
        let recording = Recording::read(&file).expect("a recording");
        let text = fs::read_to_string(&file).expect("a file");
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let read = match &recording.lines {
            Lines::Vllm(recorded) => written(&recorded.steps, &recorded.end),
            Lines::Sglang(recorded) => written(&recorded.steps, &recorded.end),
        };
        assert_eq!(lines[1..], read, "{}", file.display());
    }
}

fn written(steps: &[impl serde::Serialize], end: &impl serde::Serialize) -> Vec<Value> {
    let steps = steps.iter().map(|step| serde_json::to_value(step).expect("plain data"));
    steps.chain([serde_json::to_value(end).expect("plain data")]).collect()
}

#[test]
fn a_folder_without_recordings_and_a_missing_path_are_errors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    assert!(matches!(recording_files(&folder), Err(ReadError::Unreadable { .. })));
    assert!(matches!(recording_files(Path::new("nowhere")), Err(ReadError::Unreadable { .. })));
    assert!(matches!(Recording::read(Path::new("nowhere.jsonl")), Err(ReadError::Unreadable { .. })));
}
