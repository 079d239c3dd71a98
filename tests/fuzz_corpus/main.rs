//! Replays the corpora of the fuzz targets, and mutations of every entry, on a stable compiler.
//!
//! `STANDIN_FUZZ_MUTATIONS` sets how many mutations of each entry are tried (32 if it is not set),
//! `STANDIN_FUZZ_SEED` which ones (0). A failure prints the target, and the input as a file that `cargo fuzz run`
//! takes.

mod bodies;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use bodies::{BODIES, Body};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// What parsers trip over.
const TEXTS: [&str; 14] = [
    "0",
    "-1",
    "1e999",
    "18446744073709551616",
    "4294967296",
    "NaN",
    "null",
    "[",
    "{",
    "\"",
    "\u{feff}",
    "\r\n",
    ",",
    "\0",
];

fn mutate(input: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        let at = random.below(input.len() + 1);
        let until = at + random.below(input.len() + 1 - at).min(1 << random.below(8));
        match random.below(6) {
            0 => input.splice(at..until, []).for_each(drop),
            1 => input.splice(at..at, TEXTS[random.below(TEXTS.len())].bytes()).for_each(drop),
            2 => {
                let copy = input[at..until].to_vec();
                let to = random.below(input.len() + 1);
                input.splice(to..to, copy).for_each(drop);
            }
            3 => input.insert(at, random.next() as u8),
            _ => {
                if let Some(byte) = input.get_mut(at) {
                    *byte = if random.below(2) == 0 { random.next() as u8 } else { *byte ^ (1 << random.below(8)) };
                }
            }
        }
    }
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    files
}

fn run(target: &str, body: Body, input: &[u8], name: &str) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(input))) {
        let file = std::env::temp_dir().join(format!("standin-{target}-{name}"));
        fs::write(&file, input).expect("a folder for temporary files");
        eprintln!("{target} fails: cargo +nightly fuzz run {target} {}", file.display());
        resume_unwind(panic);
    }
}

/// Every entry of one corpus, and mutations of it.
fn replay(target: &str) {
    let (mutations, seed) = (variable("STANDIN_FUZZ_MUTATIONS", 32), variable("STANDIN_FUZZ_SEED", 0));
    let (body, files) = (bodies::body(target), corpus(target));
    assert!(files.len() >= 5, "the corpus of {target} has {} entries", files.len());
    for (index, file) in files.iter().enumerate() {
        let entry = fs::read(file).expect("readable");
        let name = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        run(target, body, &entry, &name);
        for mutation in 0..mutations {
            let mut random = Random(seed ^ (index as u64) << 32 ^ mutation);
            let mut input = entry.clone();
            mutate(&mut input, &mut random);
            run(target, body, &input, &format!("{name}-{mutation}"));
        }
    }
}

/// One test per target, so that they run side by side; the last one says that none was forgotten.
macro_rules! replayed {
    ($($target:ident)*) => {
        $(#[test] fn $target() { replay(stringify!($target)); })*

        #[test]
        fn every_target_is_replayed() {
            let replayed = [$(stringify!($target)),*];
            assert!(BODIES.iter().map(|(name, _)| *name).eq(replayed), "{replayed:?}");
        }
    };
}

replayed! {
    config_json trace_mooncake trace_azure recording core_operations handoff_operations coordinator_operations
}
