//! Traces: bytes that are none, rows at the edges, and runs of them.

use std::time::Duration;

use standin::replay::trace::{TraceFormat, TraceReader, TraceRequest};
use standin::replay::{Distribution, EndlessCache, OfflineError, OfflineRun, Recorder, RequestRecord, Router};
use standin::{EngineConfig, EngineTime, FinishReason, Moments, Prompt};

use crate::kit::{Claim, assert_refused, untouchable};

const GOOD: &str = r#"{"timestamp": 1, "input_length": 3, "output_length": 2, "hash_ids": [7]}"#;
const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";
const MEBIBYTE: usize = 1 << 20;

/// What a reader says of each row.
fn read(format: TraceFormat, bytes: impl AsRef<[u8]>) -> Vec<String> {
    let rows = TraceReader::new(bytes.as_ref(), format, "t");
    rows.map(|row| row.map_or_else(|error| error.to_string(), |_| "ok".to_owned())).collect()
}

#[track_caller]
fn check(format: TraceFormat, what: &str, bytes: impl AsRef<[u8]>, expected: &[&str]) {
    let said = read(format, bytes);
    assert_eq!(said.len(), expected.len(), "{what}: {said:?}");
    for (said, expected) in said.iter().zip(expected) {
        assert!(said.starts_with(expected), "{what}: {said}, not {expected}");
        assert!(said.len() < 300, "{what}: a value is cut");
    }
}

/// A row with one field changed.
fn row(field: &str, value: &str) -> String {
    let fields = [("timestamp", "1"), ("input_length", "3"), ("output_length", "2"), ("hash_ids", "[7]")];
    let fields = fields.map(|(name, usual)| format!("\"{name}\": {}", if name == field { value } else { usual }));
    format!("{{{}}}", fields.join(", "))
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn bytes_of_a_mooncake_trace() {
    let fits = format!("{}{}", GOOD, " ".repeat(MEBIBYTE - GOOD.len()));
    let too_long = "t:1: the line is longer than 1048576 bytes";
    let twice = |field: &str| format!("{}, \"{field}\": 1}}", &GOOD[..GOOD.len() - 1]);
    let no_object = "t:1: not a JSON object of a Mooncake trace: ";
    let rows: Vec<(&str, Vec<u8>, Vec<&str>)> = vec![
        ("nothing", vec![], vec![]),
        ("blank lines", b"\n \r\n\t\n".to_vec(), vec![]),
        ("no final newline", GOOD.into(), vec!["ok"]),
        ("CRLF", format!("{GOOD}\r\n{GOOD}\r\n").into(), vec!["ok", "ok"]),
        ("CR alone", format!("{GOOD}\r{GOOD}").into(), vec![no_object]),
        ("a byte order mark", format!("\u{feff}{GOOD}").into(), vec![no_object]),
        ("invalid UTF-8, then a row", [b"\xff\xfe\n", GOOD.as_bytes()].concat(), vec!["t:1: invalid utf-8", "ok"]),
        ("zero bytes", vec![0; 9], vec![no_object]),
        ("two rows on a line", format!("{GOOD}{GOOD}").into(), vec![no_object]),
        ("a line that just fits", fits.clone().into(), vec!["ok"]),
        ("and its newline", format!("{fits}\n{GOOD}").into(), vec!["ok", "ok"]),
        ("and CRLF", format!("{fits}\r\n{GOOD}").into(), vec!["ok", "ok"]),
        ("a byte more", format!("{fits} ").into(), vec![too_long]),
        ("a line of ten megabytes", vec![b'['; 10 * MEBIBYTE], vec![too_long]),
        ("deep lists", vec![b'['; MEBIBYTE], vec![no_object]),
        (
            "deep extras",
            row("extra", "").replace('}', &format!(", \"x\": {}", "[".repeat(100_000))).into(),
            vec![no_object],
        ),
        ("positions for names", "[1, 3, 2, [7]]".into(), vec![no_object]),
        ("a name", "\"timestamp\"".into(), vec![no_object]),
        ("an empty object", "{}".into(), vec!["t:1: input_length = (missing): required"]),
        (
            "a time twice",
            twice("timestamp").into(),
            vec!["t:1: not a JSON object of a Mooncake trace: duplicate field `timestamp`"],
        ),
        (
            "a length twice",
            twice("input_length").into(),
            vec!["t:1: not a JSON object of a Mooncake trace: duplicate field `input_length`"],
        ),
        (
            "an output twice",
            twice("output_length").into(),
            vec!["t:1: not a JSON object of a Mooncake trace: duplicate field `output_length`"],
        ),
        (
            "ids twice",
            twice("hash_ids").into(),
            vec!["t:1: not a JSON object of a Mooncake trace: duplicate field `hash_ids`"],
        ),
        (
            "80,000 other fields",
            format!(
                "{}{}}}",
                &GOOD[..GOOD.len() - 1],
                (0..80_000).map(|n| format!(", \"f{n}\":0")).collect::<String>()
            )
            .into(),
            vec!["ok"],
        ),
        (
            "400,000 ids",
            row("hash_ids", &format!("[{}1]", "1,".repeat(399_999))).into(),
            vec!["t:1: hash_ids = 400000 ids: 1, one per 512 tokens of input_length = 3"],
        ),
        ("a million ids", row("hash_ids", &format!("[{}1]", "1,".repeat(999_999))).into(), vec![too_long]),
    ];
    for (what, bytes, expected) in rows {
        check(TraceFormat::Mooncake, what, bytes, &expected);
    }
}

#[test]
fn values_of_a_mooncake_trace() {
    let time = "timestamp";
    let latest = "at most 18446744073709 ms from the start";
    let input = "a whole number from 1 to 4294967295";
    let output = "a whole number from 1 to 10000000";
    let rows: Vec<(&str, &str, String)> = vec![
        (time, "0", "ok".into()),
        (time, "-0.0", "ok".into()),
        (time, "5e-324", "ok".into()),
        (time, "-1", "t:1: timestamp = -1: a number of milliseconds, at least 0".into()),
        (time, "-9223372036854775808", "t:1: timestamp = -9223372036854775808: a number of milliseconds".into()),
        (time, "9007199254740993", format!("t:1: timestamp = 9007199254740994 ms from the start: {latest}")),
        (time, "18446744073709", "ok".into()),
        (time, "18446744073709.5517", format!("t:1: timestamp = 18446744073709.55 ms from the start: {latest}")),
        (time, "18446744073710", format!("t:1: timestamp = 18446744073710 ms from the start: {latest}")),
        (time, "18446744073709551615", format!("t:1: timestamp = 18446744073709552000 ms from the start: {latest}")),
        (time, "1.7976931348623157e308", "t:1: timestamp = 3402823669209384".into()),
        (time, "1e999", "t:1: not a JSON object of a Mooncake trace: number out of range".into()),
        (time, "NaN", "t:1: not a JSON object of a Mooncake trace: expected value".into()),
        (time, "null", "t:1: timestamp = null: a number of milliseconds, at least 0".into()),
        ("input_length", "0", format!("t:1: input_length = 0: {input}")),
        ("input_length", "512", "ok".into()),
        ("input_length", "3.0", format!("t:1: input_length = 3.0: {input}")),
        ("input_length", "4294967295", "t:1: hash_ids = 1 ids: 8388608, one per 512 tokens".into()),
        ("input_length", "4294967296", format!("t:1: input_length = 4294967296: {input}")),
        ("input_length", "18446744073709551616", format!("t:1: input_length = 1.8446744073709552e+19: {input}")),
        ("input_length", "-9223372036854775808", format!("t:1: input_length = -9223372036854775808: {input}")),
        ("output_length", "10000000", "ok".into()),
        ("output_length", "10000001", format!("t:1: output_length = 10000001: {output}")),
        ("hash_ids", "[18446744073709551615]", "ok".into()),
        ("hash_ids", "[18446744073709551616]", "t:1: hash_ids = 1.8446744073709552e+19: whole numbers".into()),
        ("hash_ids", "[7.0]", "t:1: hash_ids = 7.0: whole numbers".into()),
        ("hash_ids", "[]", "t:1: hash_ids = 0 ids: 1, one per 512 tokens of input_length = 3".into()),
        ("hash_ids", "{}", "t:1: hash_ids = {}: a list of block ids".into()),
    ];
    for (field, value, expected) in rows {
        check(TraceFormat::Mooncake, &format!("{field} = {value}"), row(field, value), &[&expected]);
    }
    let long = row("input_length", &format!("\"{}\"", "x".repeat(1_000_000)));
    check(TraceFormat::Mooncake, "a long text", long, &["t:1: input_length = \"xxxx"]);
}

#[test]
fn bytes_and_values_of_an_azure_trace() {
    let (at, no_header) = ("2023-11-16 18:17:03", "t:1: header = ");
    let lines = |row: &str| format!("{HEADER}\n{row}\n").into_bytes();
    let context = "a whole number from 1 to 4294967295";
    let when = "a UTC time from 1970 on";
    let rows: Vec<(&str, Vec<u8>, Vec<String>)> = vec![
        ("nothing", vec![], vec![format!("{no_header}\"\": must be")]),
        ("a byte order mark", format!("\u{feff}{HEADER}\n").into(), vec![format!("{no_header}\"\\u{{feff}}TIME")]),
        ("a long header", vec![b'x'; 900_000], vec![format!("{no_header}\"xxxx")]),
        ("a longer one", vec![b'x'; 2_000_000], vec!["t:1: the line is longer than 1048576 bytes".into()]),
        ("no final newline", format!("{HEADER}\r\n{at},1,1").into(), vec!["ok".into()]),
        ("invalid UTF-8", [HEADER.as_bytes(), b"\n\xff,1,1\n"].concat(), vec!["t:2: invalid utf-8".into()]),
        ("a million columns", lines(&",".repeat(1_000_000)), vec!["t:2: 1000001 columns: 3 are required".into()]),
        ("quotes", lines(&format!("\"{at}\",1,1")), vec![format!("t:2: TIMESTAMP = \"{at}\": {when}")]),
        ("0 tokens", lines(&format!("{at},0,1")), vec![format!("t:2: ContextTokens = 0: {context}")]),
        ("a u32", lines(&format!("{at},4294967295,10000000")), vec!["ok".into()]),
        ("one more", lines(&format!("{at},4294967296,1")), vec![format!("t:2: ContextTokens = 4294967296: {context}")]),
        ("a fraction", lines(&format!("{at},1.0,1")), vec![format!("t:2: ContextTokens = 1.0: {context}")]),
        ("a blank", lines(&format!("{at}, 1,1")), vec![format!("t:2: ContextTokens =  1: {context}")]),
        ("other digits", lines(&format!("{at},١,1")), vec![format!("t:2: ContextTokens = ١: {context}")]),
        ("the year 0", lines("0000-01-01 00:00:00,1,1"), vec![format!("t:2: TIMESTAMP = 0000-01-01 00:00:00: {when}")]),
        (
            "from the first day to the last",
            lines("1970-01-01 00:00:00,1,1\n9999-12-31 23:59:59,1,1\n2554-07-21 23:34:33.709551614,1,1"),
            vec!["ok".into(), "t:3: TIMESTAMP = 253402300799000 ms from the start: at most".into(), "ok".into()],
        ),
        (
            "the end of time",
            lines("1970-01-01 00:00:00,1,1\n2554-07-21 23:34:33.709551615,1,1"),
            vec!["ok".into(), "t:3: TIMESTAMP = 18446744073709.55 ms from the start: at most".into()],
        ),
    ];
    for (what, bytes, expected) in rows {
        let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
        check(TraceFormat::Azure2023, what, bytes, &expected);
    }
}

#[test]
fn speeds_and_vocabularies() {
    let reader = || TraceReader::new(GOOD.as_bytes(), TraceFormat::Mooncake, "t");
    for (speed, shown) in [(0.0, "0"), (-0.0, "-0"), (-1.0, "-1"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
        let expected = format!("speed = {shown}: greater than 0 and finite");
        assert_refused("a speed", reader().with_speed(speed), &expected);
    }
    assert_refused("no vocabulary", reader().with_vocab_size(0), "vocab_size = 0: at least 1");
    let first = |speed: f64| reader().with_speed(speed).expect("valid").next().expect("a row");
    assert_eq!(first(f64::MAX).expect("fast").arrival, EngineTime::ZERO);
    assert_eq!(first(1e-12).expect("slow").arrival, EngineTime::from_nanos(1_000_000_000_000_000_000));
    for speed in [f64::MIN_POSITIVE, 5e-324, 1e-14] {
        let expected = format!(
            "t:1: timestamp = 1 ms from the start: at most 18446744073709 ms from the start after a division \
                     by speed = {speed}"
        );
        assert_refused("beyond time", first(speed), &expected);
    }
    for vocab_size in [1, u32::MAX] {
        let row = reader().with_vocab_size(vocab_size).expect("valid").next().expect("a row").expect("valid");
        assert!(row.prompt.to_tokens().iter().all(|token| *token < vocab_size));
        let Prompt::Lazy(source) = &row.prompt else { panic!("made when asked for") };
        for (start, len) in [(0, usize::MAX), (usize::MAX, 2), (usize::MAX, usize::MAX), (511, 2)] {
            assert_eq!(source.content_key(start, len), None, "{start}+{len}");
        }
    }
}

fn good() -> TraceRequest {
    TraceReader::new(GOOD.as_bytes(), TraceFormat::Mooncake, "t").next().expect("a row").expect("valid")
}

#[test]
fn runs_of_rows_that_a_reader_does_not_give() {
    let run = |rows: Vec<TraceRequest>, router: Router| {
        OfflineRun::new(EngineConfig::default()).with_workers(2).with_router(router).replay(rows.into_iter().map(Ok))
    };
    for router in [Router::RoundRobin, Router::LeastLoaded, Router::PrefixAware] {
        // The last instant, and then one before it.
        let mut late = good();
        late.arrival = EngineTime::MAX;
        let report = run(vec![late.clone(), good(), late], router).expect("all end");
        assert_eq!((report.requests, report.refused, report.output_tokens), (3, 0, 6), "{router}");
        let mut long = good();
        long.prompt = untouchable(usize::MAX);
        assert_eq!(long.prompt_tokens(), u32::MAX, "as it says");
        let mut greedy = good();
        greedy.output_tokens = u32::MAX;
        let report = run(vec![long, greedy], router).expect("refused and counted");
        assert_eq!((report.requests, report.refused), (2, 2), "{router}");
        // A prompt that says other lengths later, however late.
        for before in 1..12 {
            let mut liar = good();
            liar.prompt = Claim::prompt([vec![3; before], vec![usize::MAX]].concat());
            let report = run(vec![liar, good()], router).expect("served or refused");
            // One that is held to the model's length has room for one token.
            let tokens = report.output_tokens - 2 + report.refused;
            assert!(report.requests == 2 && (1..=2).contains(&tokens), "{router} {before}: {report:?}");
        }
    }
    for workers in [0, 65_537, usize::MAX] {
        let run = OfflineRun::new(EngineConfig::default()).with_workers(workers);
        let expected = format!("workers = {workers}: from 1 to 65536");
        assert_refused("workers", run.replay([Ok(good())]), &expected);
    }
    let bad = OfflineRun::new(EngineConfig::default().with_vocab_size(0)).replay([Ok(good())]);
    assert!(matches!(bad, Err(OfflineError::Config(_))));
    let slow = EngineConfig::default().with_startup(Duration::MAX);
    let report = OfflineRun::new(slow).replay([Ok(good())]).expect("it begins at the end of time, and ends there");
    assert_eq!(report.output_tokens, 2);
}

#[cfg(unix)]
#[test]
fn paths_that_are_no_traces() {
    let folder = env!("CARGO_MANIFEST_DIR");
    let rows = [
        ("no name", "", None, ": the extension names no trace format"),
        ("a folder", folder, Some(TraceFormat::Mooncake), "Is a directory"),
        ("a zero byte", "a\0b.csv", None, "file name contained an unexpected NUL byte"),
        ("a long name", &"x".repeat(10_000), Some(TraceFormat::Azure2023), "File name too long"),
        ("a device without end", "/dev/zero", Some(TraceFormat::Mooncake), "the line is longer than 1048576 bytes"),
    ];
    for (what, path, format, expected) in rows {
        let said = match TraceReader::open(path, format) {
            Err(error) => error.to_string(),
            Ok(mut reader) => reader.next().expect("an error").expect_err(what).to_string(),
        };
        assert!(said.contains(expected), "{what}: {said}");
    }
}

/// Tallies of a report take the largest numbers there are.
#[test]
fn tallies_saturate() {
    let mut distribution = Distribution::default();
    for _ in 0..3 {
        distribution.add_many(Duration::MAX, u64::MAX);
        distribution.add_many(Duration::ZERO, 0);
    }
    assert_eq!(distribution.count(), u64::MAX);
    for percent in [0, 1, 100, 101, u32::MAX] {
        assert!(distribution.percentile(percent).is_none_or(|longest| longest == Duration::from_nanos(u64::MAX)));
    }
    assert!(distribution.summary().expect("values").mean.is_finite());

    let mut moments = Moments::default();
    moments.remove(7);
    (0..5).for_each(|_| moments.add(u64::MAX));
    assert_eq!((moments.count(), moments.sum()), (5, u64::MAX));
    assert!(moments.variance().is_finite());

    let mut recorder = Recorder::new();
    let mut record = RequestRecord::new(EngineTime::MAX, u32::MAX);
    record.admitted(EngineTime::ZERO, u32::MAX);
    record.token(EngineTime::MAX);
    record.token(EngineTime::ZERO);
    recorder.ended(&record, EngineTime::ZERO, FinishReason::Length);
    (0..3).for_each(|_| recorder.gaps(Duration::MAX, u64::MAX));
    assert_eq!(recorder.report(&standin::EngineMetrics::default(), None).requests, 1);

    let mut cache = EndlessCache::new();
    for block_tokens in [0, 1, u32::MAX] {
        cache.observe(u32::MAX, &[u64::MAX; 3], block_tokens);
        cache.observe(0, &[1, 2, 3], block_tokens);
    }
    assert!(cache.bound().is_some_and(|bound| bound.token_hit_rate <= 1.0));
}
