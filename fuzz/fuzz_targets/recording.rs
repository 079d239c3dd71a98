#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| standin_fuzz::run("recording", data));
