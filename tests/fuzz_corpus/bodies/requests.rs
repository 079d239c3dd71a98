//! Engines and requests from bytes: small ones, so that pools run full within a few operations, with values at the
//! edges of what a field can hold among them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use standin::timing::{Affine, TimingConfig};
use standin::{
    EngineConfig, EngineKind, EngineTime, FirstToken, KvCacheReportMode, LoadFailurePolicy, MultimodalItem, OutputPlan,
    Prompt, PromptSource, RadixEvictionPolicy, Request, SglangConfig, SglangPolicy, Speedup, TieVictim, VllmConfig,
    VllmPolicy,
};

/// So few tokens that stop tokens are met and prefixes agree by chance.
const VOCABULARY: u32 = 4;
/// How long blocks are held.
const LONG: [Duration; 4] = [Duration::ZERO, Duration::from_micros(3), Duration::from_secs(30), Duration::MAX];

pub(crate) fn engine(bytes: &mut Unstructured<'_>) -> Result<EngineConfig> {
    let kind = if bytes.ratio(1, 2)? { EngineKind::Vllm(vllm(bytes)?) } else { EngineKind::Sglang(sglang(bytes)?) };
    let timing = match bytes.int_in_range(0..=5_u8)? {
        0 => TimingConfig::ConstantMs(f64::MAX),
        1 => TimingConfig::Affine(Affine { pass_ms: 0.0, prefill_ms_per_token: f64::MAX, decode_ms_per_row: 0.0 }),
        _ => TimingConfig::ConstantMs(0.001),
    };
    let speedup = *bytes.choose(&[
        Speedup::Factor(1.0),
        Speedup::Instant,
        Speedup::Factor(f64::MIN_POSITIVE),
        Speedup::Factor(f64::MAX),
    ])?;
    Ok(EngineConfig::new(kind)
        .with_max_model_len(*bytes.choose(&[2, 3, 9, 30, 64, 64, 64, u32::MAX])?)
        .with_vocab_size(*bytes.choose(&[VOCABULARY, VOCABULARY, 1, u32::MAX])?)
        .with_seed(*bytes.choose(&[0, u64::MAX])?)
        .with_timing(timing)
        .with_speedup(speedup))
}

fn vllm(bytes: &mut Unstructured<'_>) -> Result<VllmConfig> {
    Ok(VllmConfig::default()
        .with_block_size(*bytes.choose(&[1, 2, 3, 4, 4, 7, u32::MAX])?)
        .with_num_gpu_blocks(bytes.int_in_range(2..=20)?)
        .with_enable_prefix_caching(bytes.ratio(4, 5)?)
        .with_max_num_seqs(*bytes.choose(&[1, 2, 4, u32::MAX])?)
        .with_max_num_active_seqs(*bytes.choose(&[None, None, Some(1), Some(3)])?)
        .with_max_num_batched_tokens(*bytes.choose(&[1, 5, 16, 60, u32::MAX])?)
        .with_enable_chunked_prefill(bytes.ratio(4, 5)?)
        .with_long_prefill_token_threshold(*bytes.choose(&[0, 0, 3, u32::MAX])?)
        .with_long_prefill_token_threshold_adaptive(bytes.arbitrary()?)
        .with_policy(*bytes.choose(&[VllmPolicy::Fcfs, VllmPolicy::Priority])?)
        .with_tie_victim(*bytes.choose(&[TieVictim::First, TieVictim::Last])?)
        .with_watermark(*bytes.choose(&[0.0, 0.0, 0.3, 1.0 - f64::EPSILON])?)
        .with_scheduler_reserve_full_isl(bytes.arbitrary()?)
        .with_prefill_schedule_interval(*bytes.choose(&[1, 1, 3, u32::MAX])?)
        .with_end_outgrown_requests(bytes.ratio(4, 5)?)
        .with_kv_lease(*bytes.choose(&LONG)?)
        .with_transfer_guard(*bytes.choose(&LONG)?)
        .with_kv_load_failure_policy(*bytes.choose(&[LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute])?)
        .with_first_token(*bytes.choose(&[FirstToken::Recomputed, FirstToken::CarriedOver])?)
        .with_destinations_first(bytes.arbitrary()?)
        .with_reload_one_token_prompts(bytes.ratio(1, 5)?))
}

fn sglang(bytes: &mut Unstructured<'_>) -> Result<SglangConfig> {
    use RadixEvictionPolicy::{Fifo, Filo, Lfu, Lru, Mru, Priority, Slru};
    use SglangPolicy::{DfsWeight, Fcfs, Lof, Lpm, Random};
    let page = *bytes.choose(&[1, 1, 2, 4, 7, 1 << 31 >> 1])?;
    let pages = if page > 7 { 3 } else { bytes.int_in_range(2..=40)? };
    let chunk = *bytes.choose(&[None, Some(1), Some(2), Some(5)])?;
    Ok(SglangConfig::default()
        .with_page_size(page)
        .with_max_total_tokens(page * pages)
        .with_max_running_requests(*bytes.choose(&[1, 2, 6, u32::MAX])?)
        .with_chunked_prefill_size(chunk.map(|pages: u32| pages.saturating_mul(page).min(u32::MAX / page * page)))
        .with_max_prefill_tokens(*bytes.choose(&[1, 20, 200, u32::MAX])?)
        .with_prefill_max_requests(*bytes.choose(&[None, Some(1), Some(2)])?)
        .with_schedule_policy(*bytes.choose(&[Fcfs, Lpm, DfsWeight, Lof, Random])?)
        .with_radix_eviction_policy(*bytes.choose(&[Lru, Lfu, Fifo, Mru, Filo, Priority, Slru])?)
        .with_enable_mixed_chunk(bytes.arbitrary()?)
        .with_disable_radix_cache(bytes.ratio(1, 5)?)
        .with_enable_priority_scheduling(bytes.ratio(1, 4)?)
        .with_schedule_low_priority_values_first(bytes.arbitrary()?)
        .with_priority_scheduling_preemption_threshold(*bytes.choose(&[0, 10, u32::MAX])?)
        .with_abort_after_next_forward(bytes.arbitrary()?)
        .with_end_outgrown_requests(bytes.ratio(4, 5)?)
        .with_schedule_conservativeness(*bytes.choose(&[1.0, 0.01, f64::MIN_POSITIVE, f64::MAX])?)
        .with_num_reserved_decode_tokens(*bytes.choose(&[1, 1, 4, 30, u32::MAX])?)
        .with_disaggregation_decode_enable_radix_cache(bytes.arbitrary()?)
        .with_disaggregation_waiting_timeout(*bytes.choose(&LONG)?)
        .with_transfer_guard(*bytes.choose(&LONG)?))
}

/// A time near `now`, or at an edge.
pub(crate) fn time(bytes: &mut Unstructured<'_>, now: EngineTime) -> Result<EngineTime> {
    Ok(match bytes.int_in_range(0..=9_u8)? {
        0 => EngineTime::ZERO,
        1 => EngineTime::MAX,
        2 => now + Duration::from_secs(40),
        3 | 4 => now + Duration::from_nanos(bytes.int_in_range(0..=3_000)?),
        5 => EngineTime::from_nanos(now.as_nanos().saturating_sub(bytes.int_in_range(0..=3_000)?)),
        _ => now,
    })
}

pub(crate) fn request(bytes: &mut Unstructured<'_>, now: EngineTime) -> Result<Request> {
    let mut request = Request::new(prompt(bytes)?, 0);
    request.max_output_tokens = *bytes.choose(&[None, Some(0), Some(1), Some(2), Some(5), Some(9), Some(u32::MAX)])?;
    if bytes.ratio(1, 3)? {
        request.output = OutputPlan::Tokens(few_tokens(bytes, 12)?.into());
    }
    if bytes.ratio(1, 4)? {
        request.stop_token_ids = few_tokens(bytes, 3)?;
        request.stop_token_ids.push(u32::MAX);
    }
    request.eos_token_id = *bytes.choose(&[None, None, Some(1), Some(u32::MAX)])?;
    request.ignore_eos = bytes.arbitrary()?;
    request.min_output_tokens = *bytes.choose(&[0, 0, 1, u32::MAX])?;
    request.priority = *bytes.choose(&[0, 0, 1, -1, i32::MAX, i32::MIN])?;
    request.arrival = if bytes.ratio(1, 4)? { Some(time(bytes, now)?) } else { None };
    request.cache_salt = bytes.choose(&[None, None, None, Some("a"), Some("")])?.map(Arc::from);
    request.lora_name = bytes.choose(&[None, None, None, Some("a"), Some("b")])?.map(Arc::from);
    if bytes.ratio(1, 6)? {
        let (offset, num_tokens) = *bytes.choose(&[(0, 3), (2, 7), (0, u32::MAX), (u32::MAX, u32::MAX), (5, 0)])?;
        request.multimodal.push(MultimodalItem { identifier: "item".into(), offset, num_tokens });
    }
    request.skip_reading_prefix_cache = bytes.ratio(1, 8)?;
    if bytes.ratio(1, 8)? {
        request.kv_cache_report_mode = KvCacheReportMode::Full;
    }
    Ok(request)
}

fn prompt(bytes: &mut Unstructured<'_>) -> Result<Prompt> {
    let (family, length) = (bytes.int_in_range(0..=2_u32)?, bytes.int_in_range(0..=30_usize)?);
    Ok(match bytes.int_in_range(0..=9_u8)? {
        0 => Prompt::Lazy(Arc::new(Claim::of([usize::MAX, usize::MAX]))),
        1 => Prompt::Lazy(Arc::new(Claim::of([length, usize::MAX]))),
        2 | 3 => Prompt::Lazy(Arc::new(Claim::of([length, length]))),
        _ => (0..length).map(|position| shared(family, position)).collect::<Vec<u32>>().into(),
    })
}

/// No period that a block size divides.
fn shared(family: u32, position: usize) -> u32 {
    (position as u32 / 3).wrapping_add(position as u32 * family) % VOCABULARY
}

fn few_tokens(bytes: &mut Unstructured<'_>, most: usize) -> Result<Vec<u32>> {
    let length = bytes.int_in_range(0..=most)?;
    (0..length).map(|_| bytes.int_in_range(0..=VOCABULARY - 1)).collect()
}

/// A prompt of no family that claims one length when it is asked first, and another one ever after.
#[derive(Debug)]
struct Claim {
    lengths: [usize; 2],
    asked: AtomicUsize,
}

impl Claim {
    fn of(lengths: [usize; 2]) -> Self {
        Self { lengths, asked: AtomicUsize::new(0) }
    }
}

impl PromptSource for Claim {
    fn num_tokens(&self) -> usize {
        self.lengths[self.asked.fetch_add(1, Ordering::Relaxed).min(1)]
    }

    fn fill(&self, start: usize, out: &mut [u32]) {
        out.iter_mut().zip(start..).for_each(|(token, position)| *token = shared(0, position));
    }
}
