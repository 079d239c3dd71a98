//! The timing models by name.

use super::{Affine, Constant, KernelPreset, KernelTable, PassTiming, Polynomial, PolynomialTiming};
use crate::error::ConfigError;

/// The timing models that can be named in a configuration.
///
/// In JSON: `{"preset": "llama3_8b_h100"}`, `{"kernel_table": {…}}`, `{"affine": {…}}`,
/// `{"polynomial": {}}`, `{"constant_ms": 10.0}`.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum TimingConfig {
    /// A kernel table that comes with the crate.
    Preset(KernelPreset),
    /// A kernel table of the caller's; [`KernelPreset::table`] is a good start for one.
    KernelTable(KernelTable),
    /// A sum of a constant, a term per prefill token and one per decode row.
    Affine(Affine),
    /// A prefill polynomial plus a decode polynomial, for parity with other simulators.
    Polynomial(Polynomial),
    /// Every pass takes so many milliseconds; at least 0 and finite.
    ConstantMs(f64),
}

impl Default for TimingConfig {
    /// Llama-3.1-8B on one H100.
    fn default() -> Self {
        Self::Preset(KernelPreset::default())
    }
}

impl TimingConfig {
    /// Checks the model's values.
    ///
    /// # Errors
    /// The first value that is out of range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::Preset(_) => Ok(()),
            Self::KernelTable(table) => table.validate().map_err(|error| error.within("kernel_table")),
            Self::Affine(affine) => affine.validate().map_err(|error| error.within("affine")),
            Self::Polynomial(polynomial) => polynomial.validate().map_err(|error| error.within("polynomial")),
            Self::ConstantMs(milliseconds) => non_negative("constant_ms", *milliseconds),
        }
    }

    /// The model itself. `kv_capacity_tokens` is what the engine's KV pool holds.
    #[must_use]
    pub fn build(&self, kv_capacity_tokens: u64) -> Box<dyn PassTiming> {
        match self {
            Self::Preset(preset) => Box::new(preset.table()),
            Self::KernelTable(table) => Box::new(table.clone()),
            Self::Affine(affine) => Box::new(*affine),
            Self::Polynomial(polynomial) => Box::new(PolynomialTiming::new(*polynomial, kv_capacity_tokens)),
            Self::ConstantMs(milliseconds) => Box::new(Constant::from_ms(*milliseconds)),
        }
    }
}

/// Refuses what cannot be a time or a time per something.
pub(super) fn non_negative(field: impl Into<String>, value: f64) -> Result<(), ConfigError> {
    if value.is_finite() && value >= 0.0 {
        Ok(())
    } else {
        Err(ConfigError::new(field, value, "at least 0 and finite"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> KernelTable {
        KernelPreset::default().table()
    }

    fn refused(config: TimingConfig) -> String {
        config.validate().expect_err("must be refused").to_string()
    }

    #[test]
    fn every_preset_is_a_valid_custom_table() {
        for preset in KernelPreset::ALL {
            assert_eq!(TimingConfig::KernelTable(preset.table()).validate(), Ok(()), "{preset}");
        }
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        let with = |change: fn(&mut KernelTable)| {
            let mut changed = table();
            change(&mut changed);
            refused(TimingConfig::KernelTable(changed))
        };
        let cases = [
            (with(|t| t.linear_ms.truncate(1)), "kernel_table.linear_ms = 1 anchors: at least 2"),
            (
                with(|t| t.linear_ms[2].0 = 8),
                "kernel_table.linear_ms[2] = 8 tokens: more tokens than the anchor before, 8",
            ),
            (
                with(|t| t.linear_ms[1].1 = 0.1),
                "kernel_table.linear_ms[1] = 0.1: at least the time of the anchor before, 5.4",
            ),
            (with(|t| t.linear_ms[0].1 = f64::NAN), "kernel_table.linear_ms[0] = NaN: at least 0 and finite"),
            (with(|t| t.linear_ms[0].1 = -1.0), "kernel_table.linear_ms[0] = -1: at least 0 and finite"),
            (
                with(|t| t.tail_ms_per_token = Some(f64::INFINITY)),
                "kernel_table.tail_ms_per_token = inf: at least 0 and finite",
            ),
            (
                with(|t| t.decode_ms_per_row = -1e-9),
                "kernel_table.decode_ms_per_row = -0.000000001: at least 0 and finite",
            ),
            (with(|t| t.head_ms = f64::NAN), "kernel_table.head_ms = NaN: at least 0 and finite"),
            (with(|t| t.host_ms = -1.0), "kernel_table.host_ms = -1: at least 0 and finite"),
            (refused(TimingConfig::ConstantMs(-0.5)), "constant_ms = -0.5: at least 0 and finite"),
            (
                refused(TimingConfig::Affine(Affine {
                    pass_ms: 1.0,
                    prefill_ms_per_token: -1.0,
                    decode_ms_per_row: 0.0,
                })),
                "affine.prefill_ms_per_token = -1: at least 0 and finite",
            ),
            (
                refused(TimingConfig::Polynomial(Polynomial {
                    prefill_ms: [0.0, f64::NAN, 0.0],
                    ..Polynomial::default()
                })),
                "polynomial.prefill_ms[1] = NaN: finite",
            ),
            (
                refused(TimingConfig::Polynomial(Polynomial { decode_min_ms: -1.0, ..Polynomial::default() })),
                "polynomial.decode_min_ms = -1: at least 0 and finite",
            ),
        ];
        for (message, expected) in cases {
            assert_eq!(message, expected);
        }
    }

    #[cfg(feature = "serde")]
    mod json {
        use super::*;
        use crate::EngineConfig;

        #[test]
        fn every_variant_survives_a_round_trip() {
            let mut configs: Vec<TimingConfig> = KernelPreset::ALL.map(TimingConfig::Preset).to_vec();
            configs.extend([
                TimingConfig::KernelTable(table()),
                TimingConfig::Affine(Affine {
                    pass_ms: 6.472,
                    prefill_ms_per_token: 0.0198,
                    decode_ms_per_row: 0.00284,
                }),
                TimingConfig::Polynomial(Polynomial::default()),
                TimingConfig::ConstantMs(0.35),
            ]);
            for config in configs {
                let json = serde_json::to_string(&config).expect("serialises");
                let back: TimingConfig = serde_json::from_str(&json).expect(&json);
                assert_eq!(back, config, "{json}");
            }
        }

        #[test]
        fn the_documented_spellings_are_read() {
            let read = |json: &str| serde_json::from_str::<TimingConfig>(json).expect(json);
            assert_eq!(read(r#"{"preset": "llama3_8b_h100"}"#), TimingConfig::default());
            assert_eq!(
                read(r#"{"preset": "llama3_70b_h100x8"}"#),
                TimingConfig::Preset(KernelPreset::Llama3_70bH100x8)
            );
            assert_eq!(read(r#"{"polynomial": {}}"#), TimingConfig::Polynomial(Polynomial::default()));
            assert_eq!(read(r#"{"constant_ms": 10}"#), TimingConfig::ConstantMs(10.0));
        }

        #[test]
        fn unknown_and_bad_fields_are_named_by_their_path() {
            let message = |json: &str| EngineConfig::from_json(json).expect_err("must be refused").to_string();
            let unknown = message(r#"{"timing": {"affine": {"pass_us": 3}}}"#);
            assert!(unknown.contains("timing") && unknown.contains("unknown field `pass_us`"), "{unknown}");
            let preset = message(r#"{"timing": {"preset": "llama3_8b_tpu"}}"#);
            assert!(preset.contains("llama3_8b_tpu") && preset.contains("llama3_8b_h200"), "{preset}");
            let negative = message(r#"{"timing": {"constant_ms": -1}}"#);
            assert_eq!(negative, "timing.constant_ms = -1: at least 0 and finite");
        }
    }
}
