//! One line of an Azure LLM inference trace of 2023.

use super::{Problem, Row, token_count};
use crate::request::MAX_OUTPUT_TOKENS;

/// The first line of every file.
pub(super) const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

const NANOS_PER_SECOND: u128 = 1_000_000_000;

/// Parses a line after the header.
pub(super) fn parse(line: &str) -> Result<Row, Problem> {
    let columns: Vec<&str> = line.split(',').collect();
    let &[timestamp, context, generated] = columns.as_slice() else {
        return Err(Problem::Shape(format!("{} columns: 3 are required: {HEADER}", columns.len())));
    };
    let at_nanos = nanos_since_1970(timestamp).ok_or_else(|| {
        Problem::field("TIMESTAMP", timestamp, "a UTC time from 1970 on, as in 2023-11-16 18:17:03.9799600")
    })?;
    Ok(Row {
        at_nanos,
        prompt_tokens: token_count("ContextTokens", whole(context), context, u32::MAX)?,
        output_tokens: token_count("GeneratedTokens", whole(generated), generated, MAX_OUTPUT_TOKENS)?,
        hash_ids: Vec::new(),
    })
}

/// Digits only: `u64::from_str` would take a plus sign.
fn whole(digits: &str) -> Option<u64> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// `YYYY-MM-DD hh:mm:ss`, with up to nine digits of a fraction.
fn nanos_since_1970(text: &str) -> Option<u128> {
    let (date, time) = text.split_once(' ')?;
    let mut date = date.split('-');
    let (year, month, day) = (digits(date.next()?, 4)?, digits(date.next()?, 2)?, digits(date.next()?, 2)?);
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut time = time.split(':');
    let (hour, minute, second) = (digits(time.next()?, 2)?, digits(time.next()?, 2)?, digits(time.next()?, 2)?);
    if date.next().is_some() || time.next().is_some() || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let seconds = ((days_since_1970(year, month, day)? * 24 + hour) * 60 + minute) * 60 + second;
    Some(u128::from(seconds) * NANOS_PER_SECOND + u128::from(nanos(fraction)?))
}

/// A number of exactly so many digits.
fn digits(text: &str, length: usize) -> Option<u64> {
    (text.len() == length).then(|| whole(text)).flatten()
}

/// The digits after the decimal point of a second, one to nine.
fn nanos(fraction: &str) -> Option<u64> {
    let missing = u32::try_from(9_usize.checked_sub(fraction.len())?).ok()?;
    if fraction.is_empty() {
        return None;
    }
    Some(whole(fraction)? * 10_u64.pow(missing))
}

/// Days of the Gregorian calendar; `None` for a day that does not exist or is before 1970.
fn days_since_1970(year: u64, month: u64, day: u64) -> Option<u64> {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let february = if leap { 29 } else { 28 };
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let month = usize::try_from(month.checked_sub(1)?).ok()?;
    if !(1..=*lengths.get(month)?).contains(&day) {
        return None;
    }
    let past_years = year.checked_sub(1970)?;
    let leap_days = |year: u64| year / 4 - year / 100 + year / 400;
    let past_leap_days = leap_days(year - 1) - leap_days(1969);
    Some(past_years * 365 + past_leap_days + lengths[..month].iter().sum::<u64>() + day - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_exact() {
        // Seconds as `date -u -d … +%s` gives them.
        let cases = [
            ("1970-01-01 00:00:00", 0, 0),
            ("2023-11-16 18:17:03.9799600", 1_700_158_623, 979_960_000),
            ("2000-02-29 23:59:59.5", 951_868_799, 500_000_000),
            ("2024-03-01 00:00:00.000000001", 1_709_251_200, 1),
            ("2100-03-01 12:00:00", 4_107_585_600, 0),
        ];
        for (text, seconds, nanos) in cases {
            assert_eq!(nanos_since_1970(text), Some(seconds * NANOS_PER_SECOND + nanos), "{text}");
        }
    }

    #[test]
    fn times_that_do_not_exist_are_refused() {
        for text in [
            "",
            "2023-11-16",
            "2023-11-16T18:17:03",
            "2023-11-16 18:17",
            "2023-11-16 18:17:03.",
            "2023-11-16 18:17:03.1234567890",
            "2023-11-16 18:17:03.1Z",
            "2023-11-16 18:17:60",
            "2023-11-16 24:00:00",
            "2023-02-29 00:00:00",
            "2100-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-00-01 00:00:00",
            "2023-01-00 00:00:00",
            "1969-12-31 23:59:59",
            "2023-1-16 18:17:03",
            "+023-11-16 18:17:03",
            "2023-11-16-1 18:17:03",
            "2023-11-16 18:17:03:1",
        ] {
            assert_eq!(nanos_since_1970(text), None, "{text}");
        }
    }
}
