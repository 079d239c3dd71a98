//! The bodies of the fuzz targets, which a stable compiler runs too: `tests/fuzz_corpus`.

#[path = "../../tests/fuzz_corpus/bodies/mod.rs"]
mod bodies;

/// Feeds a target with bytes.
pub fn run(target: &str, data: &[u8]) {
    bodies::body(target)(data);
}
