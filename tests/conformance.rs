//! Step-exact agreement with decisions recorded from the real engine, and the proof that the check can fail.
#![cfg(feature = "serde")]

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use standin::replay::recording::{Disagreement, Place, ReadError, Recording, recording_files};

/// The recordings of one engine that are checked in, and every field that they have.
struct Engine {
    folders: &'static [&'static str],
    fields: &'static [&'static str],
    /// A parent of a stored block, where the recording has none.
    parent: fn() -> Value,
}

const ENGINES: [Engine; 2] = [
    Engine { folders: &["", "connector"], fields: VLLM_FIELDS, parent: || json!(["a", 0]) },
    Engine { folders: &["sglang"], fields: SGLANG_FIELDS, parent: || json!(0) },
];

impl Engine {
    fn files(&self) -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/recordings");
        let files = |folder: &&str| recording_files(&root.join(folder)).expect("recordings are checked in");
        self.folders.iter().flat_map(files).collect()
    }
}

fn checked_in() -> Vec<PathBuf> {
    ENGINES.iter().flat_map(Engine::files).collect()
}

/// Checks every file and says which ones part and where, not only the first.
fn assert_agreement(files: &[PathBuf]) {
    let failed: Vec<String> = files
        .iter()
        .filter_map(|file| match Recording::read(file) {
            Ok(recording) => recording.check().err().map(|error| format!("{}: {error}", file.display())),
            Err(error) => Some(error.to_string()),
        })
        .collect();
    assert!(failed.is_empty(), "{} of {} recordings differ\n{}", failed.len(), files.len(), failed.join("\n"));
}

#[test]
fn checked_in_recordings_agree() {
    assert_agreement(&checked_in());
}

#[test]
fn every_recording_of_the_oracle_agrees() {
    for folder in env::var_os("STANDIN_ORACLE").iter().flat_map(env::split_paths) {
        assert_agreement(&recording_files(&folder).expect("STANDIN_ORACLE names folders of recordings"));
    }
}

/// Every field that a step or the end of a recording of vLLM has; lists are `*`.
const VLLM_FIELDS: &[&str] = &[
    "/idle",
    "/kind",
    "/kv_done/failed/*",
    "/kv_done/invalid_block_ids/*",
    "/kv_done/invalid_blocks/*/*",
    "/kv_done/received/*",
    "/kv_done/sent/*",
    "/mid/*/aborted/*",
    "/mid/*/ids/*",
    "/mid/*/op",
    "/outputs/*/*",
    "/pool/free_queue/*",
    "/pool/kv_usage",
    "/pool/num_blocks_with_hash",
    "/pool/num_cached_hashes",
    "/pool/num_free_blocks",
    "/pool/num_used_blocks",
    "/pre/*/aborted/*",
    "/pre/*/connector/*/block_ids/*",
    "/pre/*/connector/*/call",
    "/pre/*/connector/*/delay_free",
    "/pre/*/connector/*/id",
    "/pre/*/connector/*/status",
    "/pre/*/id",
    "/pre/*/ids/*",
    "/pre/*/op",
    "/pre/*/preempted/*",
    "/pre/*/result",
    "/reason",
    "/sampled/*/*",
    "/schedule/connector/*/answer/*",
    "/schedule/connector/*/block_ids/*",
    "/schedule/connector/*/call",
    "/schedule/connector/*/id",
    "/schedule/connector/*/num_computed_tokens",
    "/schedule/connector/*/num_external_tokens",
    "/schedule/deferred/*",
    "/schedule/finished_req_ids/*",
    "/schedule/kv_holding_waiting/*",
    "/schedule/new/*/block_ids/*",
    "/schedule/new/*/id",
    "/schedule/new/*/num_blocks",
    "/schedule/new/*/num_computed_tokens",
    "/schedule/num_scheduled_tokens/*/*",
    "/schedule/pool/kv_usage",
    "/schedule/pool/num_free_blocks",
    "/schedule/pool/num_used_blocks",
    "/schedule/preempted/*",
    "/schedule/preempted_reported/*",
    "/schedule/resumed/*/block_ids/*",
    "/schedule/resumed/*/id",
    "/schedule/resumed/*/num_blocks",
    "/schedule/resumed/*/num_computed_tokens",
    "/schedule/resumed/*/num_output_tokens",
    "/schedule/running/*",
    "/schedule/running_scheduled/*/id",
    "/schedule/running_scheduled/*/new_block_ids/*",
    "/schedule/running_scheduled/*/num_computed_tokens",
    "/schedule/running_scheduled/*/num_new_blocks",
    "/schedule/running_scheduled/*/num_output_tokens",
    "/schedule/sync_loads",
    "/schedule/total_num_scheduled_tokens",
    "/schedule/waiting/*",
    "/step",
    "/steps",
    "/unfinished/*",
    "/update/connector/*/block_ids/*",
    "/update/connector/*/call",
    "/update/connector/*/delay_free",
    "/update/connector/*/id",
    "/update/connector/*/status",
    "/update/deferred/*",
    "/update/held/*",
    "/update/kv_events/*/block_ids/*",
    "/update/kv_events/*/block_size",
    "/update/kv_events/*/blocks/*/*",
    "/update/kv_events/*/extra_keys/*",
    "/update/kv_events/*/extra_keys/*/*",
    "/update/kv_events/*/first_block_index",
    "/update/kv_events/*/num_blocks",
    "/update/kv_events/*/parent",
    "/update/kv_events/*/parent/*",
    "/update/kv_events/*/req",
    "/update/kv_events/*/token_ids/*",
    "/update/kv_events/*/type",
    "/update/kv_holding_waiting/*",
    "/update/outputs/*/finish_reason",
    "/update/outputs/*/id",
    "/update/outputs/*/kv_transfer_params/do_remote_prefill",
    "/update/outputs/*/kv_transfer_params/remote_block_ids/*",
    "/update/outputs/*/kv_transfer_params/remote_num_tokens",
    "/update/outputs/*/kv_transfer_params/remote_prefill_cached_tokens",
    "/update/outputs/*/new_token_ids/*",
    "/update/outputs/*/prefill_stats/num_cache_creation_tokens",
    "/update/outputs/*/prefill_stats/num_cached_tokens",
    "/update/outputs/*/prefill_stats/num_computed_tokens",
    "/update/outputs/*/prefill_stats/num_external_cached_tokens",
    "/update/outputs/*/prefill_stats/num_local_cached_tokens",
    "/update/outputs/*/prefill_stats/num_prompt_tokens",
    "/update/outputs/*/stop_reason",
    "/update/pool/free_queue/*",
    "/update/pool/kv_usage",
    "/update/pool/num_blocks_with_hash",
    "/update/pool/num_cached_hashes",
    "/update/pool/num_free_blocks",
    "/update/pool/num_used_blocks",
    "/update/requests/*/block_ids/*",
    "/update/requests/*/id",
    "/update/requests/*/num_blocks",
    "/update/requests/*/num_computed_tokens",
    "/update/requests/*/num_output_tokens",
    "/update/requests/*/num_preemptions",
    "/update/requests/*/num_tokens",
    "/update/requests/*/status",
    "/update/running/*",
    "/update/stats/connector_cache/hits",
    "/update/stats/connector_cache/preempted_hits",
    "/update/stats/connector_cache/preempted_queries",
    "/update/stats/connector_cache/preempted_requests",
    "/update/stats/connector_cache/queries",
    "/update/stats/connector_cache/requests",
    "/update/stats/kv_fetch/completed_waiting",
    "/update/stats/kv_fetch/in_progress",
    "/update/stats/kv_fetch/waiting_to_start",
    "/update/stats/num_running_reqs",
    "/update/stats/num_skipped_waiting_reqs",
    "/update/stats/num_waiting_reqs",
    "/update/stats/prefix_cache/hits",
    "/update/stats/prefix_cache/preempted_hits",
    "/update/stats/prefix_cache/preempted_queries",
    "/update/stats/prefix_cache/preempted_requests",
    "/update/stats/prefix_cache/queries",
    "/update/stats/prefix_cache/requests",
    "/update/waiting/*",
];

/// The same for SGLang.
const SGLANG_FIELDS: &[&str] = &[
    "/idle",
    "/kind",
    "/outputs/*/*",
    "/pre/*/aborted_from_queue/*",
    "/pre/*/id",
    "/pre/*/max_tokens_capped",
    "/pre/*/op",
    "/pre/*/result",
    "/reason",
    "/sampled/*/*",
    "/schedule/available_tokens",
    "/schedule/batch_is_full",
    "/schedule/chunked",
    "/schedule/evictable_tokens",
    "/schedule/kv_events/*/block_size",
    "/schedule/kv_events/*/blocks/*",
    "/schedule/kv_events/*/num_blocks",
    "/schedule/kv_events/*/parent",
    "/schedule/kv_events/*/token_ids/*",
    "/schedule/kv_events/*/type",
    "/schedule/mode",
    "/schedule/new_token_ratio",
    "/schedule/protected_tokens",
    "/schedule/reqs/*/decode",
    "/schedule/reqs/*/id",
    "/schedule/reqs/*/prefix_len",
    "/schedule/reqs/*/tokens",
    "/schedule/retracted/*",
    "/schedule/running/*",
    "/schedule/total_tokens",
    "/schedule/waiting/*",
    "/step",
    "/steps",
    "/unfinished/*",
    "/update/available_tokens",
    "/update/batch_is_full",
    "/update/chunked",
    "/update/evictable_tokens",
    "/update/finished/*/cached_tokens",
    "/update/finished/*/id",
    "/update/finished/*/matched",
    "/update/finished/*/num_output_tokens",
    "/update/finished/*/reason",
    "/update/finished/*/retraction_count",
    "/update/kv_events/*/block_size",
    "/update/kv_events/*/blocks/*",
    "/update/kv_events/*/num_blocks",
    "/update/kv_events/*/parent",
    "/update/kv_events/*/token_ids/*",
    "/update/kv_events/*/type",
    "/update/new_token_ratio",
    "/update/protected_tokens",
    "/update/running/*",
    "/update/waiting/*",
];

/// How many values of one field are changed, one at a time.
const PLACES_TRIED: u32 = 6;

/// Fields that say what a line is: changed, the line cannot be read.
const DISCRIMINANTS: [&str; 5] = ["/call", "/kind", "/op", "/step", "/type"];

#[test]
fn a_change_of_any_field_is_reported_as_that_field() {
    for engine in ENGINES {
        let mut seen: BTreeMap<String, u32> = BTreeMap::new();
        for file in engine.files() {
            let lines = json_lines(&file);
            for (field, (line, pointer)) in first_and_last(&lines) {
                let times = seen.entry(field.clone()).or_default();
                if *times >= PLACES_TRIED {
                    continue;
                }
                *times += 1;
                let mut changed = lines.clone();
                let leaf = changed[line].pointer_mut(&pointer).expect("the leaf that was found");
                match leaf {
                    Value::Null if field.ends_with("/parent") => *leaf = (engine.parent)(),
                    _ => change(leaf, &field),
                }
                let unreadable = DISCRIMINANTS.iter().any(|name| field.ends_with(name));
                assert_reported(&file, &changed, line, &pointer, unreadable);
            }
        }
        let seen: Vec<&str> = seen.keys().map(String::as_str).collect();
        assert_eq!(seen, engine.fields, "the checked-in recordings cover every field");
    }
}

#[test]
fn order_and_length_of_every_list_are_compared() {
    let mut tried = BTreeSet::new();
    for file in checked_in() {
        let lines = json_lines(&file);
        for (line, value) in lines.iter().enumerate().skip(1) {
            let mut lists = Vec::new();
            visit(value, "", "", &mut |value, pointer, field| {
                if let Value::Array(list) = value
                    && list.len() > 1
                    && list[0] != list[1]
                    && !is_pair(field)
                    && tried.insert((file.clone(), field.to_owned()))
                {
                    lists.push((list.clone(), pointer.to_owned()));
                }
            });
            for (list, pointer) in lists {
                let mut swapped = list.clone();
                swapped.swap(0, 1);
                for other in [swapped, list[1..].to_vec()] {
                    let mut changed = lines.clone();
                    *changed[line].pointer_mut(&pointer).expect("the list that was found") = Value::Array(other);
                    assert_reported(&file, &changed, line, &pointer, false);
                }
            }
        }
    }
    assert!(tried.len() > 100, "only {} lists were tried", tried.len());
}

#[test]
fn a_step_too_few_or_too_many_and_another_pool_are_reported() {
    for file in checked_in() {
        let lines = json_lines(&file);
        let steps = lines.len() as u32 - 2;
        let mut short = lines.clone();
        short.remove(steps as usize);
        assert_eq!(place(&file, &short), Place::Step(steps - 1));
        let mut long = lines.clone();
        let mut again = lines[steps as usize].clone();
        again["step"] = json!(steps);
        long.insert(lines.len() - 1, again);
        assert_eq!(place(&file, &long), Place::Step(steps));
        let mut pool = lines;
        if let Some(blocks) = pool[0].pointer_mut("/config/usable_gpu_blocks") {
            *blocks = json!(1);
            assert_eq!(place(&file, &pool), Place::Scenario);
        }
    }
}

/// A list whose places have different meanings: `[id, tokens]`, `[id, block index]`.
fn is_pair(field: &str) -> bool {
    let pairs = ["/num_scheduled_tokens/*", "/sampled/*", "/blocks/*", "/parent", "/answer", "/invalid_blocks/*"];
    pairs.iter().any(|pair| field.ends_with(pair))
}

/// For each field the first and the last place of all lines after the scenario's that has it.
fn first_and_last(lines: &[Value]) -> Vec<(String, (usize, String))> {
    let mut places: BTreeMap<String, Vec<(usize, String)>> = BTreeMap::new();
    for (line, value) in lines.iter().enumerate().skip(1) {
        visit(value, "", "", &mut |value, pointer, field| {
            if !value.is_array() && !value.is_object() {
                let places = places.entry(field.to_owned()).or_default();
                places.truncate(1);
                places.push((line, pointer.to_owned()));
            }
        });
    }
    places.into_iter().flat_map(|(field, places)| places.into_iter().map(move |place| (field.clone(), place))).collect()
}

/// Calls `found` with every value below, its JSON pointer, and the pointer with `*` for places in lists.
fn visit(value: &Value, pointer: &str, field: &str, found: &mut impl FnMut(&Value, &str, &str)) {
    found(value, pointer, field);
    match value {
        Value::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                visit(value, &format!("{pointer}/{index}"), &format!("{field}/*"), found);
            }
        }
        Value::Object(object) => {
            for (key, value) in object {
                // The outputs of the end are by request id.
                let name = if field == "/outputs" { "*" } else { key };
                visit(value, &format!("{pointer}/{key}"), &format!("{field}/{name}"), found);
            }
        }
        _ => {}
    }
}

/// Another value of the same kind.
fn change(value: &mut Value, field: &str) {
    *value = match value {
        Value::Null if field.ends_with("/finish_reason") => json!("stop"),
        Value::Null if field.ends_with("/mode") => json!("decode"),
        Value::Null if field.ends_with("/chunked") => json!("a"),
        Value::Null if field.ends_with("/extra_keys/*") => json!(["salt"]),
        Value::Null => json!(1),
        Value::Bool(value) => json!(!*value),
        Value::Number(number) => number.as_u64().map_or_else(|| json!(0.123_456_789), |number| json!(number + 1)),
        Value::String(text) => match text.as_str() {
            "RUNNING" => json!("PREEMPTED"),
            "PREEMPTED" | "WAITING" | "WAITING_FOR_REMOTE_KVS" => json!("RUNNING"),
            "FINISHED_STOPPED" => json!("FINISHED_ERROR"),
            "FINISHED_ABORTED" | "FINISHED_ERROR" | "FINISHED_LENGTH_CAPPED" => json!("FINISHED_STOPPED"),
            "extend" => json!("decode"),
            "decode" | "mixed" => json!("extend"),
            "drained" => json!("max_steps"),
            "max_steps" => json!("drained"),
            other => json!(format!("{other}'")),
        },
        Value::Array(_) | Value::Object(_) => panic!("{field} is not a leaf"),
    };
}

/// Asserts that the check of `lines` reports exactly `pointer` in exactly `line`.
fn assert_reported(file: &Path, lines: &[Value], line: usize, pointer: &str, unreadable: bool) {
    let at = format!("{}, line {}, {pointer}", file.display(), line + 1);
    let recording = match recording(file, lines) {
        Err(ReadError::Line { line: named, .. }) if unreadable => return assert_eq!(named, line + 1, "{at}"),
        other => other.expect(&at),
    };
    let Err(Disagreement::Differs(mismatch)) = recording.check() else { panic!("{at}: not reported") };
    let place = if line + 1 == lines.len() { Place::End } else { Place::Step(line as u32 - 1) };
    assert_eq!(mismatch.place, place, "{at}");
    let paths: Vec<&str> = mismatch.differences.iter().map(|difference| difference.path.as_str()).collect();
    let within = |path: &&str| path.strip_prefix(pointer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    assert!(!paths.is_empty() && paths.iter().all(within), "{at}: {paths:?}");
}

/// Where the check of `lines` finds the first difference.
fn place(file: &Path, lines: &[Value]) -> Place {
    match recording(file, lines).expect("a recording").check() {
        Err(Disagreement::Differs(mismatch)) => mismatch.place,
        other => panic!("{}: {other:?}", file.display()),
    }
}

fn recording(file: &Path, lines: &[Value]) -> Result<Recording, ReadError> {
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    Recording::parse(file, &text.join("\n"))
}

fn json_lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).expect("a recording");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}
