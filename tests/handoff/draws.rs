//! What a seeded run draws: engines, requests, ways to hand over, and pauses.

use std::time::Duration;

use standin::handoff::{CoordinatorConfig, FaultRates, FirstToken, HandoffOrder, LinkSharing, TransferFailurePolicy};
use standin::timing::PassWork;
use standin::{
    EngineKind, LiveEngine, LiveHandoff, LiveLink, LoadFailurePolicy, Request, TransferTiming, TransferTimingMode,
};

use crate::common::{
    FULL, Timing, buffered, cancel_on_overflow, config_of, config_of_kind, id, sglang, throttle, tokens, vllm,
};

/// SplitMix64 (Steele et al., OOPSLA 2014): enough for picking moments.
#[derive(Debug, Clone)]
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (bits ^ (bits >> 31)) % limit
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// Two engines, a third one that shows what each request produces alone, and a link.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) draws: Draws,
    pub(crate) prefill: LiveEngine,
    pub(crate) decode: LiveEngine,
    pub(crate) alone: LiveEngine,
    pub(crate) link: LiveLink,
    seed: u64,
    faults: Option<FaultRates>,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut draws = Draws(seed);
        let sharing = draws.pick(&[LinkSharing::Unshared, LinkSharing::FairShare]);
        let (prefill, decode) = (engine(&mut draws), engine(&mut draws));
        let alone = LiveEngine::builder(config_of(vllm())).output_buffering(FULL).start().expect("valid");
        let faults = draws.chance(40).then(|| fault_rates(&mut draws));
        Self { draws, prefill, decode, alone, link: LiveLink::new(sharing), seed, faults }
    }

    /// The same engines, and draws of its own.
    pub(crate) fn fork(&self, n: u64) -> Self {
        Self {
            draws: Draws(self.seed ^ (n + 1).wrapping_mul(0xD1B5_4A32_D192_ED03)),
            prefill: self.prefill.clone(),
            decode: self.decode.clone(),
            alone: self.alone.clone(),
            link: self.link.clone(),
            seed: self.seed,
            faults: self.faults,
        }
    }

    pub(crate) async fn pause(&mut self, up_to_ms: u64) {
        tokio::time::sleep(Duration::from_millis(self.draws.below(up_to_ms))).await;
    }

    /// Longer than any pass takes, and much shorter than any lease or guard that could hide a leak.
    pub(crate) async fn settle(&self) {
        tokio::time::sleep(Duration::from_millis(150)).await;
    }

    /// Request `n`, with a prompt that may begin as others do and an output that may stop early.
    pub(crate) fn request(&mut self, n: u32) -> Request {
        let (prompt_tokens, outputs) = (1 + self.draws.below(40) as u32, 1 + self.draws.below(12) as u32);
        let base = if self.draws.chance(50) { 0 } else { n * 1_000 };
        let prompt: Vec<u32> = (0..prompt_tokens).map(|position| base + position).collect();
        let mut request = Request::new(prompt, outputs).with_id(id(n));
        if self.draws.chance(50) {
            request = request.with_output_tokens(tokens(n, outputs));
            if self.draws.chance(30) {
                request.stop_token_ids = vec![n * 100 + 1 + self.draws.below(u64::from(outputs)) as u32];
            }
        }
        request
    }

    /// A way to hand over, with the run's faults.
    pub(crate) fn way(&mut self) -> LiveHandoff {
        let draws = &mut self.draws;
        let seconds = Duration::from_secs;
        // A transfer whose end is lost is waited for for ever without a time-out.
        let no_time_out = if self.faults.is_none() { None } else { Some(seconds(480)) };
        let config = CoordinatorConfig::of_kind(&self.decode.config().kind)
            .with_order(draws.pick(&[HandoffOrder::SourceFirst, HandoffOrder::DestinationFirst]))
            .with_on_transfer_failure(draws.pick(&[TransferFailurePolicy::Fail, TransferFailurePolicy::Recompute]))
            .with_timeout(draws.pick(&[Duration::from_millis(40), seconds(1), seconds(300)]))
            .with_transfer_timeout(draws.pick(&[Some(Duration::from_millis(15)), Some(seconds(480)), no_time_out]))
            .with_heartbeat(draws.pick(&[Some(Duration::from_millis(50)), Some(seconds(5)), None]))
            .with_settle_timeout(draws.pick(&[Duration::from_millis(20), seconds(30)]));
        let buffering = draws.pick(&[FULL, FULL, throttle(1), cancel_on_overflow(1), cancel_on_overflow(8)]);
        let way = LiveHandoff::new(config).link(self.link.clone()).options(buffered(buffering));
        match self.faults {
            Some(rates) => way.faults(rates, self.seed),
            None => way,
        }
    }
}

/// Of either kind, so the two of a run may differ. 16 blocks hold one request of the greatest length.
fn kind(draws: &mut Draws) -> EngineKind {
    let (blocks, running) = (16 + draws.below(50) as u32, 1 + draws.below(16) as u32);
    let lease = draws.pick(&[Duration::from_secs(30), Duration::from_millis(100), Duration::ZERO]);
    if draws.chance(50) {
        let sglang = sglang()
            .with_max_total_tokens(blocks * 4)
            .with_max_running_requests(running)
            .with_chunked_prefill_size(draws.pick(&[Some(8), Some(16), Some(64)]))
            .with_enable_mixed_chunk(draws.chance(30))
            .with_abort_after_next_forward(draws.chance(30))
            .with_num_reserved_decode_tokens(draws.pick(&[1, 1, 8, 30]))
            .with_disaggregation_decode_enable_radix_cache(draws.chance(30))
            .with_disaggregation_waiting_timeout(lease);
        return EngineKind::Sglang(sglang);
    }
    let vllm = vllm()
        .with_num_gpu_blocks(blocks + 1)
        .with_max_num_seqs(running)
        .with_max_num_batched_tokens(16 + draws.below(48) as u32)
        .with_kv_load_failure_policy(draws.pick(&[LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute]))
        .with_first_token(draws.pick(&[FirstToken::Recomputed, FirstToken::CarriedOver]))
        .with_destinations_first(draws.chance(70))
        .with_kv_lease(lease);
    EngineKind::Vllm(vllm)
}

fn engine(draws: &mut Draws) -> LiveEngine {
    let kind = kind(draws);
    let timing = TransferTiming {
        mode: draws.pick(&[TransferTimingMode::FullPrompt, TransferTimingMode::MissingTokens]),
        kv_bytes_per_token: draws.pick(&[Some(500_000), None]),
        bandwidth_gb_s: Some(1.0),
        setup: Duration::from_micros(draws.below(2_000)),
        ..TransferTiming::default()
    };
    let (longest, fails) = (draws.pick(&[1, 20, 100]), draws.chance(5));
    let mut passes = draws.clone();
    let pass_timing = Timing(move |_: &PassWork| {
        assert!(!(fails && passes.chance(3)), "the modelled hardware fails");
        Duration::from_micros(passes.below(longest * 1_000))
    });
    LiveEngine::builder(config_of_kind(kind)).transfer_timing(timing).pass_timing(pass_timing).start().expect("valid")
}

fn fault_rates(draws: &mut Draws) -> FaultRates {
    let mut rate = |percent: u64| draws.below(percent) as f64 / 100.0;
    FaultRates::default()
        .with_lost(rate(10))
        .with_duplicated(rate(30))
        .with_delayed(rate(40))
        .with_max_delay(Duration::from_millis(300))
        .with_transfer_failed(rate(40))
        .with_source_gone(rate(30))
        .with_destination_gone(rate(20))
        .with_gone_within(Duration::from_millis(100))
}
