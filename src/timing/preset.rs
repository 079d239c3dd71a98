//! Kernel tables that come with the crate.

use std::fmt;
use std::str::FromStr;

use super::KernelTable;
use crate::error::ConfigError;

/// A model on a GPU for which the crate has a kernel table. Weights and KV are bf16.
///
/// The values are derived from the measured kernel tables of aiconfigurator (AIC; NVIDIA Corporation, Apache-2.0)
/// for vLLM 0.24.0 (H100, H200) and 0.14.0 (A100): the four dense products of a layer times its layers,
/// element-wise kernels as bytes over 0.8 of the memory bandwidth plus 3 µs each, two all-reduces per layer.
/// Decode attention was fitted over at most 256 rows of 64 to 33,000 tokens, with a median error of 5 to 8 %.
/// Launch and scheduling on the CPU are not included ([`KernelTable::host_ms`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum KernelPreset {
    /// Llama-3.1-8B on one H100.
    #[default]
    Llama3_8bH100,
    /// Llama-3.1-8B on one H200.
    Llama3_8bH200,
    /// Llama-3.1-8B on one A100 with 80 GB.
    Llama3_8bA100,
    /// Llama-3.x-70B on four H100 (tensor parallel).
    Llama3_70bH100x4,
    /// Llama-3.x-70B on eight H100 (tensor parallel).
    Llama3_70bH100x8,
}

/// The token counts at which the dense kernels were measured.
const ANCHOR_TOKENS: [u32; 12] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];

/// One preset as it was measured and fitted.
struct Measured {
    linear_ms: [f64; 12],
    tail_ms_per_token: f64,
    /// Once per pass, per new token, per unit of `c² + 2cp`.
    prefill: [f64; 3],
    /// Once per pass, per row, per KV token.
    decode: [f64; 3],
    head_ms: f64,
}

const LLAMA3_8B_H100: Measured = Measured {
    linear_ms: [5.40, 5.86, 6.11, 6.18, 6.40, 6.49, 7.35, 10.75, 20.34, 40.54, 80.09, 171.2],
    tail_ms_per_token: 0.01989,
    prefill: [0.432, 3.56e-4, 3.84e-7],
    decode: [0.346, 3.54e-3, 4.37e-5],
    head_ms: 0.43,
};

const LLAMA3_8B_H200: Measured = Measured {
    linear_ms: [4.26, 4.27, 4.60, 4.68, 4.79, 4.97, 6.26, 10.24, 19.84, 42.50, 84.24, 170.6],
    tail_ms_per_token: 0.02068,
    prefill: [0.446, 3.09e-4, 3.97e-7],
    decode: [0.364, 3.99e-3, 3.15e-5],
    head_ms: 0.30,
};

const LLAMA3_8B_A100: Measured = Measured {
    linear_ms: [10.13, 10.01, 10.16, 10.38, 10.45, 12.46, 18.22, 31.77, 59.48, 113.5, 226.2, 457.8],
    tail_ms_per_token: 0.05450,
    prefill: [0.313, 1.29e-3, 1.38e-6],
    decode: [0.554, 3.28e-3, 8.53e-5],
    head_ms: 0.66,
};

const LLAMA3_70B_H100X4: Measured = Measured {
    linear_ms: [13.89, 14.91, 15.14, 15.47, 16.25, 18.19, 21.71, 34.73, 64.14, 125.6, 255.1, 550.9],
    tail_ms_per_token: 0.06274,
    prefill: [1.24, 2.94e-4, 4.82e-7],
    decode: [0.936, 1.36e-3, 2.66e-5],
    head_ms: 0.19,
};

const LLAMA3_70B_H100X8: Measured = Measured {
    linear_ms: [9.27, 9.13, 10.00, 9.86, 10.87, 11.69, 14.97, 24.14, 43.33, 81.91, 163.3, 326.0],
    tail_ms_per_token: 0.03870,
    prefill: [1.21, 4.26e-4, 2.07e-7],
    decode: [0.965, 5.83e-4, 1.33e-5],
    head_ms: 0.10,
};

impl KernelPreset {
    /// All presets.
    pub const ALL: [Self; 5] =
        [Self::Llama3_8bH100, Self::Llama3_8bH200, Self::Llama3_8bA100, Self::Llama3_70bH100x4, Self::Llama3_70bH100x8];

    /// Its name in configurations and on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama3_8bH100 => "llama3_8b_h100",
            Self::Llama3_8bH200 => "llama3_8b_h200",
            Self::Llama3_8bA100 => "llama3_8b_a100",
            Self::Llama3_70bH100x4 => "llama3_70b_h100x4",
            Self::Llama3_70bH100x8 => "llama3_70b_h100x8",
        }
    }

    /// The kernel table, made monotone: where a larger pass was measured faster than a smaller one, which is
    /// noise, it gets the time of the smaller one.
    #[must_use]
    pub fn table(self) -> KernelTable {
        let measured = match self {
            Self::Llama3_8bH100 => LLAMA3_8B_H100,
            Self::Llama3_8bH200 => LLAMA3_8B_H200,
            Self::Llama3_8bA100 => LLAMA3_8B_A100,
            Self::Llama3_70bH100x4 => LLAMA3_70B_H100X4,
            Self::Llama3_70bH100x8 => LLAMA3_70B_H100X8,
        };
        let mut highest = 0.0_f64;
        let linear_ms = ANCHOR_TOKENS.into_iter().zip(measured.linear_ms).map(|(tokens, milliseconds)| {
            highest = highest.max(milliseconds);
            (tokens, highest)
        });
        let [prefill_ms, prefill_ms_per_token, prefill_ms_per_pair] = measured.prefill;
        let [decode_ms, decode_ms_per_row, decode_ms_per_kv_token] = measured.decode;
        KernelTable {
            linear_ms: linear_ms.collect(),
            tail_ms_per_token: Some(measured.tail_ms_per_token),
            prefill_ms,
            prefill_ms_per_token,
            prefill_ms_per_pair,
            decode_ms,
            decode_ms_per_row,
            decode_ms_per_kv_token,
            head_ms: measured.head_ms,
            host_ms: 0.0,
        }
    }
}

impl fmt::Display for KernelPreset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KernelPreset {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        Self::ALL.into_iter().find(|preset| preset.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            ConfigError::new("preset", name, format!("one of {names}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing::{PassTiming, PassWork, PrefillChunk};

    #[test]
    fn names_parse_and_are_those_of_json() {
        for preset in KernelPreset::ALL {
            assert_eq!(preset.name().parse(), Ok(preset));
            #[cfg(feature = "serde")]
            assert_eq!(serde_json::to_value(preset).expect("serialises"), preset.name());
        }
        let error = "gpt".parse::<KernelPreset>().expect_err("unknown").to_string();
        assert!(error.starts_with("preset = gpt: one of llama3_8b_h100, "), "{error}");
    }

    #[test]
    fn noise_is_levelled_upwards() {
        let table = KernelPreset::Llama3_8bA100.table();
        assert_eq!(table.linear_ms[..3], [(1, 10.13), (8, 10.13), (16, 10.16)]);
    }

    /// The sanity values that came with the constants; they were printed with three digits, so half a unit of
    /// the last one or 0.5 % is allowed.
    #[test]
    fn sanity_values() {
        let expected = [
            (KernelPreset::Llama3_8bH100, [11.9, 43.7, 201.0], [6.2, 8.5, 13.5], 15.0),
            (KernelPreset::Llama3_8bA100, [33.8, 123.0, 562.0], [11.4, 14.5, 25.3], 41.1),
            (KernelPreset::Llama3_70bH100x4, [36.4, 130.0, 587.0], [15.0, 17.5, 23.0], 40.9),
        ];
        let chunk = |new_tokens, tokens_before| PrefillChunk { new_tokens, tokens_before, samples: true };
        for (preset, prefill, decode, mixed) in expected {
            let mut table = preset.table();
            let mut check = |work: &PassWork, milliseconds: f64| {
                let modelled = table.pass_duration(work).as_secs_f64() * 1e3;
                let tolerance = (milliseconds * 0.005).max(0.051);
                assert!(
                    (modelled - milliseconds).abs() <= tolerance,
                    "{preset}: {modelled}, not {milliseconds}: {work:?}"
                );
            };
            for (tokens, milliseconds) in [512, 2048, 8192].into_iter().zip(prefill) {
                let mut work = PassWork::new();
                work.push_prefill(chunk(tokens, 0));
                check(&work, milliseconds);
            }
            for (rows, milliseconds) in [1, 32, 128].into_iter().zip(decode) {
                let mut work = PassWork::new();
                (0..rows).for_each(|_| work.push_decode(1024));
                check(&work, milliseconds);
            }
            let mut work = PassWork::new();
            work.push_prefill(chunk(512, 1536));
            (0..32).for_each(|_| work.push_decode(1024));
            check(&work, mixed);
        }
    }
}
