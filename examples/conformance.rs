//! Does this crate decide what the real engine decided?
//!
//! `cargo run --release --example conformance -- DIR_OR_FILES…`

use std::path::Path;
use std::process::ExitCode;

use standin::replay::recording::{ReadError, Recording, recording_files};

/// How many recordings came out how.
#[derive(Default)]
struct Count {
    passed: u32,
    failed: u32,
    skipped: u32,
}

impl Count {
    fn file(&mut self, path: &Path) {
        let shown = path.display();
        match Recording::read(path) {
            Ok(recording) => {
                let steps = recording.num_steps();
                match recording.check() {
                    Ok(()) => {
                        self.passed += 1;
                        println!("{shown}  {steps} steps  ok");
                    }
                    Err(disagreement) => {
                        self.failed += 1;
                        println!("{shown}  {steps} steps  FAIL\n{disagreement}");
                    }
                }
            }
            Err(ReadError::NotSupported { feature, .. }) => {
                self.skipped += 1;
                println!("{shown}  not supported: {feature}");
            }
            Err(error) => self.unreadable(&error),
        }
    }

    fn unreadable(&mut self, error: &ReadError) {
        self.failed += 1;
        println!("FAIL cannot be read: {error}");
    }
}

fn main() -> ExitCode {
    let mut count = Count::default();
    for argument in std::env::args_os().skip(1) {
        match recording_files(Path::new(&argument)) {
            Ok(files) => files.iter().for_each(|file| count.file(file)),
            Err(error) => count.unreadable(&error),
        }
    }
    let Count { passed, failed, skipped } = count;
    let nothing_given = passed + failed + skipped == 0;
    if nothing_given {
        eprintln!("usage: conformance DIR_OR_FILES…");
    }
    match skipped {
        0 => println!("{passed} passed, {failed} failed"),
        _ => println!("{passed} passed, {failed} failed, {skipped} skipped"),
    }
    if failed > 0 || nothing_given { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
