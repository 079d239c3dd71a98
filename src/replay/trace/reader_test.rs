//! What the readers take, what they refuse, and how the errors read.

use std::io::{self, BufRead, BufReader, Read};
use std::time::Duration;

use super::{TraceError, TraceFormat, TraceReader, TraceRequest};
use crate::request::Request;
use crate::time::EngineTime;

fn mooncake(text: &str) -> Vec<Result<TraceRequest, TraceError>> {
    TraceReader::new(text.as_bytes(), TraceFormat::Mooncake, "t.jsonl").collect()
}

fn azure(text: &str) -> Vec<Result<TraceRequest, TraceError>> {
    TraceReader::new(text.as_bytes(), TraceFormat::Azure2023, "t.csv").collect()
}

fn message(result: &Result<TraceRequest, TraceError>) -> String {
    result.as_ref().expect_err("must be refused").to_string()
}

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

#[test]
fn mooncake_rows_become_requests() {
    let rows = mooncake(concat!(
        r#"{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}"#,
        "\n\r\n",
        r#"{"hash_ids": [0, 9], "output_length": 7, "timestamp": 27.1234567, "input_length": 513, "extra": null}"#,
        "\r\n",
        r#"{"timestamp": 27.1234567, "input_length": 1, "output_length": 10000000, "hash_ids": [18446744073709551615]}"#,
    ));
    let rows: Vec<TraceRequest> = rows.into_iter().map(|row| row.expect("valid")).collect();
    assert_eq!(rows.iter().map(|row| row.prompt.len()).collect::<Vec<_>>(), [512, 513, 1]);
    assert_eq!(rows.iter().map(|row| row.output_tokens).collect::<Vec<_>>(), [1, 7, 10_000_000]);
    assert_eq!(rows[1].arrival, EngineTime::from_nanos(27_123_457), "rounded to a nanosecond");
    assert_eq!(rows[0].prompt.to_tokens()[..], rows[1].prompt.to_tokens()[..512]);
    assert_eq!(rows[2].hash_ids[..], [u64::MAX]);

    let request = Request::from(rows[1].clone());
    assert_eq!((request.arrival, request.max_output_tokens), (Some(rows[1].arrival), Some(7)));
    assert_eq!(request.output_length(10_000), 7);
}

#[test]
fn azure_rows_become_requests_whose_prompts_share_nothing() {
    let rows = azure(&format!(
        "{}2023-11-16 18:17:03.9799600,600,10\r\n2023-11-16 18:17:04.0319600,600,8\r\n2023-11-17 00:00:00,5,1",
        HEADER.replace('\n', "\r\n")
    ));
    let rows: Vec<TraceRequest> = rows.into_iter().map(|row| row.expect("valid")).collect();
    let arrivals: Vec<u64> = rows.iter().map(|row| row.arrival.as_nanos()).collect();
    assert_eq!(arrivals, [0, 52_000_000, 20_576_020_040_000]);
    assert_eq!(rows.iter().map(|row| row.output_tokens).collect::<Vec<_>>(), [10, 8, 1]);
    let (first, second) = (rows[0].prompt.to_tokens(), rows[1].prompt.to_tokens());
    assert_ne!(first[..16], second[..16]);
    assert!(rows.iter().all(|row| row.hash_ids.is_empty()));
}

#[test]
fn speed_and_vocabulary_are_applied() {
    let text = r#"{"timestamp": 3000, "input_length": 900, "output_length": 1, "hash_ids": [5, 6]}"#;
    let reader = || TraceReader::new(text.as_bytes(), TraceFormat::Mooncake, "t");
    let mut fast = reader().with_speed(2.5).expect("valid").with_vocab_size(10).expect("valid");
    let request = fast.next().expect("one row").expect("valid");
    assert_eq!(request.arrival, EngineTime::ZERO + Duration::from_millis(1200));
    assert!(request.prompt.to_tokens().iter().all(|&token| token < 10));
    assert!(fast.next().is_none());
    for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(reader().with_speed(speed).expect_err("refused").to_string().starts_with("speed = "), "{speed}");
    }
    assert_eq!(reader().with_vocab_size(0).expect_err("refused").to_string(), "vocab_size = 0: at least 1");
}

#[test]
fn bad_mooncake_lines_name_file_line_field_value_and_what_is_allowed() {
    let row = |timestamp: &str, input: &str, output: &str, ids: &str| {
        format!(
            r#"{{"timestamp": {timestamp}, "input_length": {input}, "output_length": {output}, "hash_ids": {ids}}}"#
        )
    };
    let cases = [
        (row("-1", "1", "1", "[0]"), "timestamp = -1: a number of milliseconds, at least 0"),
        (row("\"0\"", "1", "1", "[0]"), "timestamp = \"0\": a number of milliseconds, at least 0"),
        (
            row("1e20", "1", "1", "[0]"),
            "timestamp = 100000000000000000000 ms from the start: at most 18446744073709 ms from the start",
        ),
        (
            row("18446744073710", "1", "1", "[0]"),
            "timestamp = 18446744073710 ms from the start: at most 18446744073709 ms from the start",
        ),
        (row("0", "0", "1", "[]"), "input_length = 0: a whole number from 1 to 4294967295"),
        (row("0", "-5", "1", "[0]"), "input_length = -5: a whole number from 1 to 4294967295"),
        (row("0", "4294967296", "1", "[0]"), "input_length = 4294967296: a whole number from 1 to 4294967295"),
        (row("0", "5.5", "1", "[0]"), "input_length = 5.5: a whole number from 1 to 4294967295"),
        (row("0", "1", "0", "[0]"), "output_length = 0: a whole number from 1 to 10000000"),
        (row("0", "1", "10000001", "[0]"), "output_length = 10000001: a whole number from 1 to 10000000"),
        (row("0", "1", "null", "[0]"), "output_length = null: a whole number from 1 to 10000000"),
        (row("0", "513", "1", "[0]"), "hash_ids = 1 ids: 2, one per 512 tokens of input_length = 513"),
        (row("0", "512", "1", "[0, 1]"), "hash_ids = 2 ids: 1, one per 512 tokens of input_length = 512"),
        (row("0", "1", "1", "[-1]"), "hash_ids = -1: whole numbers from 0 to 2^64 - 1"),
        (row("0", "1", "1", "7"), "hash_ids = 7: a list of block ids"),
        (r#"{"timestamp": 0, "input_length": 1, "hash_ids": [0]}"#.into(), "output_length = (missing): required"),
        (r#"{"input_length": 1, "output_length": 1, "hash_ids": [0]}"#.into(), "timestamp = (missing): required"),
    ];
    for (line, expected) in cases {
        let rows = mooncake(&format!("\n{line}\n"));
        assert_eq!(rows.len(), 1, "{line}");
        assert_eq!(message(&rows[0]), format!("t.jsonl:2: {expected}"));
        assert!(matches!(rows[0], Err(TraceError::Field { line: 2, .. })));
    }
    for line in ["[1]", "{", "timestamp,1", "{} {}"] {
        let rows = mooncake(line);
        assert!(message(&rows[0]).starts_with("t.jsonl:1: not a JSON object of a Mooncake trace: "), "{line}");
    }
    let long = row("0", "1", "1", &format!("\"{}\"", "x".repeat(5000)));
    assert!(message(&mooncake(&long)[0]).len() < 200, "a value is cut where an error repeats it");
}

#[test]
fn bad_azure_lines_name_file_line_field_value_and_what_is_allowed() {
    let when = "2023-11-16 18:17:03.9799600";
    let cases = [
        (format!("{when},0,1"), "ContextTokens = 0: a whole number from 1 to 4294967295"),
        (format!("{when},-3,1"), "ContextTokens = -3: a whole number from 1 to 4294967295"),
        (format!("{when},+3,1"), "ContextTokens = +3: a whole number from 1 to 4294967295"),
        (
            format!("{when},99999999999999999999,1"),
            "ContextTokens = 99999999999999999999: a whole number from 1 to 4294967295",
        ),
        (format!("{when},3,"), "GeneratedTokens = : a whole number from 1 to 10000000"),
        (format!("{when},3,0"), "GeneratedTokens = 0: a whole number from 1 to 10000000"),
        (
            "16.11.2023,3,1".to_owned(),
            "TIMESTAMP = 16.11.2023: a UTC time from 1970 on, as in 2023-11-16 18:17:03.9799600",
        ),
        (format!("{when},3"), "2 columns: 3 are required: TIMESTAMP,ContextTokens,GeneratedTokens"),
        (format!("{when},3,1,"), "4 columns: 3 are required: TIMESTAMP,ContextTokens,GeneratedTokens"),
    ];
    for (line, expected) in cases {
        let rows = azure(&format!("{HEADER}{line}"));
        assert_eq!(message(&rows[0]), format!("t.csv:2: {expected}"));
    }
}

#[test]
fn arrivals_that_go_back_are_refused_and_the_next_line_is_read() {
    let line = |timestamp: u32| {
        format!("{{\"timestamp\": {timestamp}, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]}}\n")
    };
    let rows = mooncake(&[line(10), line(9), line(10)].concat());
    assert_eq!(rows.len(), 3);
    assert_eq!(
        message(&rows[1]),
        "t.jsonl:2: timestamp = 9 ms from the start: at least that of the row above, 10 ms from the start"
    );
    assert!(rows[2].is_ok());

    let rows = azure(&format!("{HEADER}2023-11-16 18:17:03,5,5\n2023-11-16 18:17:02.5,5,5\n2023-11-16 18:17:03,5,5\n"));
    assert_eq!(
        message(&rows[1]),
        "t.csv:3: TIMESTAMP = -500 ms from the start: at least that of the row above, 0 ms from the start"
    );
    assert!(rows[2].is_ok());
}

#[test]
fn the_header_is_required() {
    for text in ["", "2023-11-16 18:17:03,5,5\n", "timestamp,ContextTokens,GeneratedTokens\n1,2,3"] {
        let rows = azure(text);
        assert_eq!(rows.len(), 1, "the reader has ended");
        assert!(matches!(rows[0], Err(TraceError::Header { .. })), "{text}");
    }
    assert!(mooncake("").is_empty());
    assert!(azure(HEADER).is_empty());
}

#[test]
fn lines_without_end_and_failing_files_end_the_reader() {
    let endless = BufReader::new(io::repeat(b'['));
    let mut reader = TraceReader::new(endless, TraceFormat::Mooncake, "endless");
    let error = reader.next().expect("an error").expect_err("too long");
    assert_eq!(error.to_string(), "endless:1: the line is longer than 1048576 bytes");
    assert!(reader.next().is_none());

    /// Fails at the second read.
    struct Failing(&'static [u8]);
    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            unreachable!("read through BufRead")
        }
    }
    impl BufRead for Failing {
        fn fill_buf(&mut self) -> io::Result<&[u8]> {
            if self.0.is_empty() { Err(io::Error::other("disk on fire")) } else { Ok(self.0) }
        }
        fn consume(&mut self, amount: usize) {
            self.0 = &self.0[amount..];
        }
    }
    let line = b"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]}\n";
    let rows: Vec<_> = TraceReader::new(Failing(line), TraceFormat::Mooncake, "f").collect();
    assert_eq!(rows.len(), 2);
    assert_eq!(message(&rows[1]), "f:2: disk on fire");
    assert_eq!(message(&mooncake("{\"a\": \"\u{fffd}\"}")[0]), "t.jsonl:1: input_length = (missing): required");
    let not_utf8: Vec<_> = TraceReader::new(&b"\xff\n"[..], TraceFormat::Mooncake, "u").collect();
    assert!(message(&not_utf8[0]).starts_with("u:1: invalid utf-8"));
}

#[test]
fn the_format_comes_from_the_extension_or_the_caller() {
    let error = |path: &str, format| TraceReader::open(path, format).expect_err("no such file");
    assert!(matches!(error("no/such/trace.parquet", None), TraceError::UnknownFormat { .. }));
    assert!(matches!(error("no/such/trace", Some(TraceFormat::Mooncake)), TraceError::Open { .. }));
    assert!(matches!(error("no/such/trace.csv", None), TraceError::Open { .. }));
    for format in [TraceFormat::Mooncake, TraceFormat::Azure2023] {
        assert_eq!(format.to_string().parse(), Ok(format));
    }
    assert_eq!(
        "vidur".parse::<TraceFormat>().expect_err("unknown").to_string(),
        "format = vidur: mooncake or azure2023"
    );
}
