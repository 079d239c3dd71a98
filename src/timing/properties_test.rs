//! Properties of all models over grids of passes. The case numbers are those of the project's list of
//! engine test cases.

use std::time::Duration;

use super::{Affine, KernelPreset, PassWork, Polynomial, PrefillChunk, TimingConfig};
use crate::config::Speedup;

const KV_CAPACITY: u64 = 29_204 * 16;

fn kernel_tables() -> impl Iterator<Item = TimingConfig> {
    KernelPreset::ALL.into_iter().map(TimingConfig::Preset)
}

fn models() -> Vec<TimingConfig> {
    let mut custom = KernelPreset::Llama3_8bH200.table();
    custom.linear_ms = vec![(1, 0.0), (300, 2.0), (301, 2.5)];
    custom.tail_ms_per_token = None;
    custom.host_ms = 0.7;
    let affine = Affine { pass_ms: 12.601, prefill_ms_per_token: 0.07642, decode_ms_per_row: 0.06684 };
    let others = [
        TimingConfig::KernelTable(custom),
        TimingConfig::Affine(affine),
        TimingConfig::Polynomial(Polynomial::default()),
        TimingConfig::ConstantMs(3.0),
    ];
    kernel_tables().chain(others).collect()
}

fn work(chunks: &[(u32, u32)], rows: u32, kv_len: u32) -> PassWork {
    let mut work = PassWork::new();
    for &(new_tokens, tokens_before) in chunks {
        work.push_prefill(PrefillChunk { new_tokens, tokens_before, samples: true });
    }
    (0..rows).for_each(|_| work.push_decode(kv_len));
    work
}

fn duration(model: &TimingConfig, work: &PassWork) -> Duration {
    model.build(KV_CAPACITY).pass_duration(work)
}

const TOKENS: [u32; 17] = [1, 2, 7, 8, 9, 16, 31, 64, 100, 255, 256, 300, 513, 2048, 5000, 8192, 20_000];
const ROWS: [u32; 13] = [0, 1, 2, 8, 33, 64, 127, 128, 129, 256, 400, 1024, 4096];
const KV_LENGTHS: [u32; 6] = [1, 64, 1024, 4096, 33_000, 131_072];

#[test]
fn case_106_a_pass_never_gets_shorter_by_more_work() {
    for model in models() {
        for rows in ROWS {
            let durations = TOKENS.map(|tokens| duration(&model, &work(&[(tokens, 100)], rows, 1024)));
            assert!(durations.is_sorted(), "{model:?}: tokens at {rows} rows: {durations:?}");
        }
        for tokens in TOKENS {
            let chunk = [(tokens, 0)];
            for chunks in [&chunk[..], &[]] {
                let by_rows = ROWS.map(|rows| duration(&model, &work(chunks, rows.max(1), 1024)));
                assert!(by_rows.is_sorted(), "{model:?}: rows at {chunks:?}: {by_rows:?}");
                let by_kv = KV_LENGTHS.map(|kv_len| duration(&model, &work(chunks, 64, kv_len)));
                assert!(by_kv.is_sorted(), "{model:?}: KV at {chunks:?}: {by_kv:?}");
            }
        }
    }
}

#[test]
fn a_kernel_table_tells_one_row_more_apart() {
    for model in kernel_tables() {
        for rows in ROWS {
            let (fewer, more) = (work(&[], rows + 1, 500), work(&[], rows + 2, 500));
            assert!(duration(&model, &fewer) < duration(&model, &more), "{model:?}: {rows}");
        }
    }
}

/// Where the dense kernels alone do not gain by the cut, the pass does not gain either.
#[test]
fn case_107_cutting_a_prefill_saves_nothing_where_the_table_is_convex() {
    let mut checked = 0;
    for preset in KernelPreset::ALL {
        let table = TimingConfig::Preset(preset);
        let mut dense = preset.table();
        dense.prefill_ms = 0.0;
        dense.prefill_ms_per_token = 0.0;
        dense.prefill_ms_per_pair = 0.0;
        dense.head_ms = 0.0;
        let dense = TimingConfig::KernelTable(dense);
        for total in TOKENS {
            for parts in [2, 3, 4, 16] {
                let step = total.div_ceil(parts);
                let chunks: Vec<(u32, u32)> =
                    (0..total).step_by(step as usize).map(|before| (step.min(total - before), before)).collect();
                let sum = |model| chunks.iter().map(|&chunk| duration(model, &work(&[chunk], 0, 0))).sum::<Duration>();
                let whole = [(total, 0)];
                if sum(&dense) >= duration(&dense, &work(&whole, 0, 0)) {
                    checked += 1;
                    assert!(sum(&table) >= duration(&table, &work(&whole, 0, 0)), "{preset}: {total} in {parts}");
                }
            }
        }
    }
    assert!(checked > 250, "only {checked} of 340 cuts were on a convex part");
}

#[test]
fn case_107_the_measured_exception_is_kept() {
    let table = TimingConfig::default();
    let whole = duration(&table, &work(&[(8192, 0)], 0, 0));
    let halves = duration(&table, &work(&[(4096, 0)], 0, 0)) + duration(&table, &work(&[(4096, 4096)], 0, 0));
    assert!(halves < whole, "the measured dense kernels take 171 ms for 8192 tokens and 160 ms for twice 4096");
}

#[test]
fn case_109_a_mixed_pass_costs_less_than_its_parts_and_more_than_either() {
    for model in kernel_tables() {
        for tokens in TOKENS {
            for rows in ROWS.into_iter().filter(|rows| (1..=256).contains(rows)) {
                for kv_len in KV_LENGTHS {
                    let prefill = duration(&model, &work(&[(tokens, 700)], 0, 0));
                    let decode = duration(&model, &work(&[], rows, kv_len));
                    let mixed = duration(&model, &work(&[(tokens, 700)], rows, kv_len));
                    let at = format!("{model:?}: {tokens} tokens, {rows} rows of {kv_len}");
                    assert!(mixed < prefill + decode, "{at}: {mixed:?} of {prefill:?} and {decode:?}");
                    assert!(mixed > prefill && mixed > decode, "{at}: {mixed:?} of {prefill:?} and {decode:?}");
                }
            }
        }
    }
}

#[test]
fn case_110_speedup_scales_every_duration_and_keeps_their_order() {
    let mut durations: Vec<Duration> = Vec::new();
    for model in models() {
        durations.extend(TOKENS.map(|tokens| duration(&model, &work(&[(tokens, 0)], 3, 1000))));
    }
    durations.sort_unstable();
    for factor in [0.25, 3.0, 1000.0] {
        let scaled: Vec<Duration> = durations.iter().map(|&long| Speedup::Factor(factor).scale(long)).collect();
        assert!(scaled.is_sorted(), "{factor}");
        for (scaled, long) in scaled.iter().zip(&durations) {
            assert!((scaled.as_secs_f64() * factor - long.as_secs_f64()).abs() <= 1e-9 * factor.max(1.0));
        }
    }
    assert!(durations.iter().all(|&long| Speedup::Instant.scale(long) == Duration::ZERO));
}

#[test]
fn the_largest_pass_and_the_largest_coefficients_saturate() {
    let longest = Duration::from_nanos(u64::MAX);
    let mut table = KernelPreset::default().table();
    table.linear_ms = vec![(0, f64::MAX), (u32::MAX, f64::MAX)];
    table.prefill_ms_per_pair = f64::MAX;
    table.decode_ms_per_kv_token = f64::MAX;
    let affine = Affine { pass_ms: f64::MAX, prefill_ms_per_token: f64::MAX, decode_ms_per_row: f64::MAX };
    let polynomial = Polynomial { prefill_ms: [f64::MAX; 3], decode_ms: [f64::MAX; 3], decode_min_ms: 0.0 };
    let huge = work(&[(u32::MAX, u32::MAX); 50], 5000, u32::MAX);
    for model in [TimingConfig::KernelTable(table), TimingConfig::Affine(affine), TimingConfig::Polynomial(polynomial)]
    {
        assert_eq!(model.validate(), Ok(()));
        assert_eq!(duration(&model, &huge), longest, "{model:?}");
    }
    for model in models() {
        assert!(duration(&model, &huge) <= longest, "{model:?}");
        assert!(duration(&model, &PassWork::new()) < Duration::from_secs(1), "{model:?}");
    }
    let downwards =
        Polynomial { prefill_ms: [f64::MAX, f64::MAX, -f64::MAX], decode_ms: [-1.0; 3], decode_min_ms: 0.0 };
    assert_eq!(duration(&TimingConfig::Polynomial(downwards), &huge), Duration::ZERO);
    let empty_pool = TimingConfig::Polynomial(Polynomial::default()).build(0).pass_duration(&work(&[], 1, 1));
    assert_eq!(empty_pool, Duration::from_nanos(34_010_000), "a pool of nothing counts as full");
}
