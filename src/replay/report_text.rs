//! A report as people read it.

use std::fmt;
use std::time::Duration;

use super::{Report, Summary};

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "requests", grouped(self.requests), &self.endings())?;
        line(f, "prompt tokens", grouped(self.prompt_tokens), &self.hits())?;
        line(f, "output tokens", grouped(self.output_tokens), "")?;
        line(f, "preemptions", grouped(self.preemptions), &format!("in {} passes", grouped(self.passes)))?;
        writeln!(f)?;
        writeln!(f, "{:LABEL$}{:>12}{:>12}{:>12}{:>12}{:>12}", "", "mean", "p50", "p90", "p99", "max")?;
        latency(f, "time in queue", self.queue_ms)?;
        latency(f, "TTFT", self.ttft_ms)?;
        latency(f, "ITL", self.itl_ms)?;
        latency(f, "end to end", self.end_to_end_ms)?;
        writeln!(f)?;
        let throughput =
            format!("{:.1} output tokens/s, {:.2} requests/s", self.output_tokens_per_s, self.requests_per_s);
        line(f, "modelled time", time(self.modelled_s * 1e3), &throughput)?;
        if let Some(wall) = self.wall {
            line(f, "wall time", time(wall.as_secs_f64() * 1e3), &self.pace(wall))?;
        }
        Ok(())
    }
}

/// Width of the first column.
const LABEL: usize = 15;

impl Report {
    fn endings(&self) -> String {
        let refused = (self.refused > 0).then_some(("refused", self.refused));
        let ended = self.ended.iter().map(|(&name, &count)| (name, count));
        let counts = ended.chain(refused).map(|(name, count)| format!("{} {}", grouped(count), name.replace('_', " ")));
        counts.collect::<Vec<_>>().join(", ")
    }

    fn hits(&self) -> String {
        let hits = format!("{:.1} % from the prefix cache", self.prefix_hit_rate * 100.0);
        match &self.endless_cache {
            None => hits,
            Some(bound) => {
                let (tokens, blocks) = (bound.token_hit_rate * 100.0, bound.block_hit_rate * 100.0);
                format!("{hits} (endless cache: {tokens:.1} % of tokens, {blocks:.1} % of blocks)")
            }
        }
    }

    fn pace(&self, wall: Duration) -> String {
        if wall.is_zero() {
            return String::new();
        }
        format!("{:.1} times as fast as modelled", self.modelled_s / wall.as_secs_f64())
    }
}

fn line(f: &mut fmt::Formatter<'_>, label: &str, value: String, note: &str) -> fmt::Result {
    let line = format!("{label:LABEL$}{value:>12}   {note}");
    writeln!(f, "{}", line.trim_end())
}

fn latency(f: &mut fmt::Formatter<'_>, label: &str, summary: Option<Summary>) -> fmt::Result {
    match summary {
        None => line(f, label, "none".to_owned(), ""),
        Some(summary) => writeln!(f, "{label:LABEL$}{summary}"),
    }
}

impl fmt::Display for Summary {
    /// Mean, median, 90th and 99th percentile and maximum, each with its unit, 12 columns wide.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mean, p50, p90, p99, max, .. } = *self;
        [mean, p50, p90, p99, max].into_iter().try_for_each(|milliseconds| write!(f, "{:>12}", time(milliseconds)))
    }
}

/// Milliseconds in the unit that suits them.
fn time(milliseconds: f64) -> String {
    match milliseconds {
        0.0 => "0 s".to_owned(),
        _ if milliseconds < 1.0 => format!("{:.1} µs", milliseconds * 1e3),
        _ if milliseconds < 1e3 => format!("{milliseconds:.2} ms"),
        _ => format!("{:.2} s", milliseconds / 1e3),
    }
}

/// `1234567` as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_times_have_their_unit() {
        let numbers = [(0, "0"), (999, "999"), (1000, "1,000"), (144_795_211, "144,795,211")];
        for (number, text) in numbers {
            assert_eq!(grouped(number), text);
        }
        let times = [(0.0, "0 s"), (0.0123, "12.3 µs"), (1.0, "1.00 ms"), (999.5, "999.50 ms"), (61_234.0, "61.23 s")];
        for (milliseconds, text) in times {
            assert_eq!(time(milliseconds), text);
        }
    }
}
