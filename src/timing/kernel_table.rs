//! The default model: measured dense kernels by number of tokens, plus attention and the output head.

use std::time::Duration;

use super::config::non_negative;
use super::{PassTiming, PassWork, PrefillChunk, rounded};
use crate::error::ConfigError;

/// Rows up to which the output head is bound by reading its weights, so that its time is constant.
const HEAD_FLAT_ROWS: u64 = 128;

/// One fused time per pass from measured kernels. In milliseconds, with
/// `N` all tokens of the pass, `c` new tokens of a chunk after `p` earlier ones,
/// `B` decode rows, `ΣKV` tokens that they read, and `S` rows for which a token is sampled:
///
/// ```text
/// T = host + linear(N)
///   + [prefill + prefill_per_token · Σc + prefill_per_pair · Σ(c² + 2cp)]     if there is prefill
///   + [decode + decode_per_row · B + decode_per_kv_token · ΣKV]               if there is decode
///   + head(S)
/// ```
///
/// `linear` is interpolated between its anchors, constant below the first and a straight line with the
/// tail slope after the last. `head` is 0 where nothing is sampled, and `head_ms` up to 128 rows, as it was
/// measured. Above that it is `head_ms · linear(S) / linear(128)`, never less than `head_ms`: it is one more
/// dense product over `S` rows, and leaves the flat part of its curve where the others do.
///
/// The time never goes down when a chunk or a row is added or grows. A mixed pass takes longer than either of
/// its parts and less than both passes together, as long as its decode rows are few enough
/// (about 256 with the presets; a measured table may rise more steeply from 4,096 to 8,192 tokens than from 0 to 1,024).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct KernelTable {
    /// Anchors `(tokens, ms)` of all dense and element-wise kernels and the all-reduces. At least 2; tokens
    /// strictly rising; times at least 0, finite, never going down.
    pub linear_ms: Vec<(u32, f64)>,
    /// Milliseconds per token after the last anchor; `None`: the slope of the last two. At least 0.
    #[cfg_attr(feature = "serde", serde(default))]
    pub tail_ms_per_token: Option<f64>,
    /// Prefill attention, once per pass with prefill; at least 0.
    pub prefill_ms: f64,
    /// Prefill attention per new token; at least 0.
    pub prefill_ms_per_token: f64,
    /// Prefill attention per unit of `c² + 2cp`; at least 0.
    pub prefill_ms_per_pair: f64,
    /// Decode attention, once per pass with decode rows; at least 0.
    pub decode_ms: f64,
    /// Decode attention per row; at least 0.
    pub decode_ms_per_row: f64,
    /// Decode attention per KV token read; at least 0.
    pub decode_ms_per_kv_token: f64,
    /// Output head for 1 to 128 sampled rows; at least 0.
    pub head_ms: f64,
    /// Launch and scheduling on the CPU, as far as it is not hidden; at least 0. The presets have 0, which
    /// is right with overlapped scheduling; 0.3 to 2 ms is usual without.
    #[cfg_attr(feature = "serde", serde(default))]
    pub host_ms: f64,
}

impl KernelTable {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        self.validate_anchors()?;
        let coefficients = [
            ("tail_ms_per_token", self.tail_ms_per_token.unwrap_or(0.0)),
            ("prefill_ms", self.prefill_ms),
            ("prefill_ms_per_token", self.prefill_ms_per_token),
            ("prefill_ms_per_pair", self.prefill_ms_per_pair),
            ("decode_ms", self.decode_ms),
            ("decode_ms_per_row", self.decode_ms_per_row),
            ("decode_ms_per_kv_token", self.decode_ms_per_kv_token),
            ("head_ms", self.head_ms),
            ("host_ms", self.host_ms),
        ];
        coefficients.into_iter().try_for_each(|(field, value)| non_negative(field, value))
    }

    fn validate_anchors(&self) -> Result<(), ConfigError> {
        let anchors = &self.linear_ms;
        if anchors.len() < 2 {
            return Err(ConfigError::new("linear_ms", format!("{} anchors", anchors.len()), "at least 2"));
        }
        for (index, &(_, milliseconds)) in anchors.iter().enumerate() {
            non_negative(format!("linear_ms[{index}]"), milliseconds)?;
        }
        for (index, pair) in anchors.windows(2).enumerate() {
            let (field, (tokens, milliseconds), before) = (format!("linear_ms[{}]", index + 1), pair[1], pair[0]);
            if tokens <= before.0 {
                let allowed = format!("more tokens than the anchor before, {}", before.0);
                return Err(ConfigError::new(field, format!("{tokens} tokens"), allowed));
            }
            if milliseconds < before.1 {
                let allowed = format!("at least the time of the anchor before, {}", before.1);
                return Err(ConfigError::new(field, milliseconds, allowed));
            }
        }
        Ok(())
    }

    /// The dense part of a pass over `tokens` tokens, in milliseconds.
    fn linear(&self, tokens: u64) -> f64 {
        let anchors = &self.linear_ms;
        let above = anchors.partition_point(|&(anchor, _)| u64::from(anchor) < tokens);
        match (above.checked_sub(1).and_then(|below| anchors.get(below)), anchors.get(above)) {
            (Some(&(x0, y0)), Some(&(x1, y1))) => {
                let along = (tokens as f64 - f64::from(x0)) / (f64::from(x1) - f64::from(x0));
                y0 + (y1 - y0) * along
            }
            (Some(&(last, y)), None) => y + self.tail_slope() * (tokens as f64 - f64::from(last)),
            (None, Some(&(_, first))) => first,
            // Only a table that was never validated has no anchor.
            (None, None) => 0.0,
        }
    }

    fn tail_slope(&self) -> f64 {
        match (self.tail_ms_per_token, self.linear_ms.as_slice()) {
            (Some(slope), _) => slope,
            (None, [.., (x0, y0), (x1, y1)]) => (y1 - y0) / (f64::from(*x1) - f64::from(*x0)),
            (None, _) => 0.0,
        }
    }

    fn head(&self, rows: u64) -> f64 {
        match rows {
            0 => 0.0,
            1..=HEAD_FLAT_ROWS => self.head_ms,
            _ => {
                let growth = self.linear(rows) / self.linear(HEAD_FLAT_ROWS);
                // `max` also answers the NaN of a table that is zero here.
                self.head_ms * growth.max(1.0)
            }
        }
    }

    fn prefill_attention(&self, work: &PassWork) -> f64 {
        if work.prefill().is_empty() {
            return 0.0;
        }
        let pairs: u128 = work.prefill().iter().map(attention_pairs).sum();
        self.prefill_ms
            + self.prefill_ms_per_token * work.prefill_tokens() as f64
            + self.prefill_ms_per_pair * pairs as f64
    }

    fn decode_attention(&self, work: &PassWork) -> f64 {
        if work.decode_kv().is_empty() {
            return 0.0;
        }
        self.decode_ms
            + self.decode_ms_per_row * work.decode_kv().len() as f64
            + self.decode_ms_per_kv_token * work.decode_kv_tokens() as f64
    }
}

impl PassTiming for KernelTable {
    fn pass_duration(&mut self, work: &PassWork) -> Duration {
        rounded(
            self.host_ms
                + self.linear(work.total_tokens())
                + self.prefill_attention(work)
                + self.decode_attention(work)
                + self.head(work.sampled_rows()),
        )
    }
}

/// `c² + 2cp`, twice the number of token pairs that causal attention over a chunk looks at. Summed over the
/// chunks of one prompt of `n` tokens it is `n²`, however the prompt is cut.
fn attention_pairs(chunk: &PrefillChunk) -> u128 {
    let (new, before) = (u128::from(chunk.new_tokens), u128::from(chunk.tokens_before));
    new * new + 2 * new * before
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing::KernelPreset;

    fn small() -> KernelTable {
        KernelTable {
            linear_ms: vec![(10, 1.0), (20, 3.0), (40, 4.0)],
            tail_ms_per_token: None,
            prefill_ms: 0.0,
            prefill_ms_per_token: 0.0,
            prefill_ms_per_pair: 0.0,
            decode_ms: 0.0,
            decode_ms_per_row: 0.0,
            decode_ms_per_kv_token: 0.0,
            head_ms: 0.5,
            host_ms: 0.0,
        }
    }

    #[test]
    fn interpolation_is_constant_below_linear_between_and_sloped_above() {
        let mut table = small();
        let at = |table: &KernelTable, tokens| table.linear(tokens);
        let expected = [(0, 1.0), (1, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (30, 3.5), (40, 4.0), (60, 5.0)];
        for (tokens, milliseconds) in expected {
            assert_eq!(at(&table, tokens), milliseconds, "{tokens} tokens");
        }
        table.tail_ms_per_token = Some(0.1);
        assert_eq!(at(&table, 60), 6.0);
    }

    #[test]
    fn the_head_is_flat_to_128_rows_and_grows_with_the_dense_kernels_after() {
        let table = KernelPreset::Llama3_8bH100.table();
        assert_eq!([table.head(0), table.head(1), table.head(128)], [0.0, 0.43, 0.43]);
        assert!((table.head(1024) - 0.43 * 20.34 / 6.49).abs() < 1e-12);
        let mut flat = small();
        flat.linear_ms = vec![(1, 0.0), (4096, 0.0)];
        assert_eq!(flat.head(1024), 0.5, "a table without dense kernels has a constant head");
    }

    #[test]
    fn case_108_attention_over_the_chunks_of_a_prompt_is_the_square_of_its_length() {
        for total in [1_u32, 17, 512, 8_191, u32::MAX] {
            for step in [1_000_000_u32, 1_999_999_999, total / 3 + 1, total] {
                let (mut before, mut pairs) = (0, 0);
                while before < total {
                    let new_tokens = step.min(total - before);
                    pairs += attention_pairs(&PrefillChunk { new_tokens, tokens_before: before, samples: false });
                    before += new_tokens;
                }
                assert_eq!(pairs, u128::from(total) * u128::from(total), "{total} in steps of {step}");
            }
        }
    }
}
