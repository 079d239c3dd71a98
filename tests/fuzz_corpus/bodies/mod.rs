//! What a fuzzer feeds with bytes. Each body panics where a promise is broken, and never otherwise.
//!
//! They are here, and not in `fuzz/`, so that a stable compiler replays the corpora (`tests/fuzz_corpus`).

mod config;
mod coordinator;
mod core;
mod handoff;
mod recording;
mod requests;
mod trace;
mod world;

/// Takes any bytes.
pub(crate) type Body = fn(&[u8]);

/// All of them, by the names of their targets and corpora.
pub(crate) const BODIES: [(&str, Body); 7] = [
    ("config_json", config::config_json),
    ("trace_mooncake", trace::trace_mooncake),
    ("trace_azure", trace::trace_azure),
    ("recording", recording::recording),
    ("core_operations", core::core_operations),
    ("handoff_operations", handoff::handoff_operations),
    ("coordinator_operations", coordinator::coordinator_operations),
];

/// The body of a target.
///
/// # Panics
/// If there is no such target.
pub(crate) fn body(target: &str) -> Body {
    let found = BODIES.iter().find(|(name, _)| *name == target);
    found.unwrap_or_else(|| panic!("there is no target {target}")).1
}
