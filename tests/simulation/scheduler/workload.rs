//! What the properties are tried with: small engines, and what happens to them. Everything is small so that
//! pools run full, prefixes are shared and ends come together within a few operations.

use std::ops::Range;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use standin::timing::TimingConfig;
use standin::{
    EngineConfig, EngineKind, KvCacheReportMode, MultimodalItem, OutputPlan, Request, SchedulingState, Speedup,
    TieVictim, VllmConfig, VllmPolicy,
};

use super::model_blocks::Identity;
use crate::operations::operations;

/// So few tokens that stop tokens are met, prefixes agree by chance, and a request can forbid them all.
const VOCABULARY: u32 = 4;

/// What a pass takes, unless it takes no time, in nanoseconds.
pub(crate) const PASS_NANOS: u64 = 1_000;

#[derive(Debug, Clone)]
pub(crate) struct Workload {
    pub(crate) config: EngineConfig,
    pub(crate) options: VllmConfig,
    pub(crate) kv_events: bool,
    pub(crate) operations: Vec<Operation>,
}

/// One thing that happens. A sequence is picked among the live ones and the one that was submitted first.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Submit(Box<RequestShape>),
    /// A submission under an id that was used before.
    SubmitAgain(Index),
    Cancel(Index),
    Throttle(Index, bool),
    Reset {
        reset_running_requests: bool,
    },
    SetScheduling(SchedulingState),
    BeginPass,
    FinishPass {
        late_nanos: u64,
    },
    /// A whole pass with nothing in between.
    Pass,
    Settle,
    /// Time goes by, if no pass is in flight.
    Wait {
        nanos: u64,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct RequestShape {
    /// Family, and how many of its tokens the prompt starts with.
    shared: (u32, usize),
    /// The rest of the prompt.
    own: Vec<u32>,
    max_output_tokens: Option<u32>,
    planned: Option<Vec<u32>>,
    stop_token_ids: Vec<u32>,
    eos_token_id: Option<u32>,
    ignore_eos: bool,
    pub(crate) priority: i32,
    /// When it was sent and when it arrives, relative to the time at which it is submitted.
    pub(crate) sent_nanos: i64,
    pub(crate) arrival_nanos: Option<i64>,
    pub(crate) tie_key: u128,
    pub(crate) identity: Identity,
    skip_reading_prefix_cache: bool,
    report_full: bool,
}

impl RequestShape {
    pub(crate) fn prompt(&self) -> Vec<u32> {
        let (family, count) = self.shared;
        // No period that a block size divides.
        let shared = (0..count as u32).map(|position| (position / 3 + position * family) % VOCABULARY);
        shared.chain(self.own.iter().copied()).collect()
    }

    pub(crate) fn request(&self) -> Request {
        let mut request = Request::new(self.prompt(), 0);
        request.max_output_tokens = self.max_output_tokens;
        if let Some(tokens) = &self.planned {
            request.output = OutputPlan::Tokens(tokens.as_slice().into());
        }
        request.stop_token_ids.clone_from(&self.stop_token_ids);
        request.eos_token_id = self.eos_token_id;
        request.ignore_eos = self.ignore_eos;
        request.priority = self.priority;
        request.cache_salt = self.identity.salt.map(Arc::from);
        request.lora_name = self.identity.lora.map(Arc::from);
        request.multimodal.clone_from(&self.identity.items);
        request.skip_reading_prefix_cache = self.skip_reading_prefix_cache;
        if self.report_full {
            request.kv_cache_report_mode = KvCacheReportMode::Full;
        }
        request
    }
}

pub(crate) fn workload() -> impl Strategy<Value = Workload> {
    let model_len = prop_oneof![1 => 2..10_u32, 9 => 16..64_u32];
    let (takes_time, kv_events) = (prop::bool::weighted(0.8), prop::bool::weighted(0.9));
    (options(), model_len, any::<u64>(), (takes_time, kv_events), operations(operation())).prop_map(
        |(mut options, max_model_len, seed, (takes_time, kv_events), operations)| {
            if !options.enable_chunked_prefill {
                // As vLLM demands it at start: a prompt over the budget would never run.
                options.max_num_batched_tokens = options.max_num_batched_tokens.max(max_model_len);
            }
            let config = EngineConfig::new(EngineKind::Vllm(options.clone()))
                .with_max_model_len(max_model_len)
                .with_vocab_size(VOCABULARY)
                .with_seed(seed)
                .with_timing(TimingConfig::ConstantMs(PASS_NANOS as f64 / 1e6))
                .with_speedup(if takes_time { Speedup::Factor(1.0) } else { Speedup::Instant });
            Workload { config, options, kv_events, operations }
        },
    )
}

fn options() -> impl Strategy<Value = VllmConfig> {
    let blocks = (1..=8_u32, prop_oneof![4 => 1..8_u32, 4 => 8..20_u32, 1 => Just(64_u32)], prop::bool::weighted(0.8));
    let slots = (1..=6_u32, prop::option::weighted(0.2, 1..=6_u32));
    let budget = prop_oneof![3 => 1..10_u32, 4 => 10..60_u32];
    let chunks = (prop::bool::weighted(0.8), prop_oneof![2 => Just(0_u32), 1 => 1..10_u32], any::<bool>());
    let policy = prop_oneof![Just(VllmPolicy::Fcfs), Just(VllmPolicy::Priority)];
    let order = (policy, prop_oneof![Just(TieVictim::First), Just(TieVictim::Last)]);
    let admission = (
        prop_oneof![3 => Just(0.0), 1 => 0.0..0.6],
        any::<bool>(),
        prop_oneof![3 => Just(1_u32), 1 => 2..5_u32],
        prop::bool::weighted(0.9),
    );
    (blocks, slots, budget, chunks, order, admission).prop_map(|(blocks, slots, budget, chunks, order, admission)| {
        VllmConfig::default()
            .with_block_size(blocks.0)
            .with_num_gpu_blocks(blocks.1 + 1)
            .with_enable_prefix_caching(blocks.2)
            .with_max_num_seqs(slots.0)
            .with_max_num_active_seqs(slots.1)
            .with_max_num_batched_tokens(budget)
            .with_enable_chunked_prefill(chunks.0)
            .with_long_prefill_token_threshold(chunks.1)
            .with_long_prefill_token_threshold_adaptive(chunks.2)
            .with_policy(order.0)
            .with_tie_victim(order.1)
            .with_watermark(admission.0)
            .with_scheduler_reserve_full_isl(admission.1)
            .with_prefill_schedule_interval(admission.2)
            .with_end_outgrown_requests(admission.3)
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    let state = prop_oneof![
        6 => Just(SchedulingState::Running),
        1 => Just(SchedulingState::NoNewAdmissions),
        1 => Just(SchedulingState::Stopped),
    ];
    prop_oneof![
        6 => request().prop_map(|shape| Operation::Submit(Box::new(shape))),
        1 => any::<Index>().prop_map(Operation::SubmitAgain),
        3 => any::<Index>().prop_map(Operation::Cancel),
        3 => (any::<Index>(), any::<bool>()).prop_map(|(pick, on)| Operation::Throttle(pick, on)),
        2 => any::<bool>().prop_map(|reset_running_requests| Operation::Reset { reset_running_requests }),
        2 => state.prop_map(Operation::SetScheduling),
        6 => Just(Operation::BeginPass),
        6 => prop_oneof![4 => Just(0), 1 => 1..100_u64].prop_map(|late_nanos| Operation::FinishPass { late_nanos }),
        20 => Just(Operation::Pass),
        2 => Just(Operation::Settle),
        2 => (0..2 * PASS_NANOS).prop_map(|nanos| Operation::Wait { nanos }),
    ]
}

fn request() -> impl Strategy<Value = RequestShape> {
    let prompt = ((0..3_u32, 0..24_usize), prop_oneof![1 => Just(vec![]), 3 => vec(0..VOCABULARY, 1..8)]);
    let planned = prop::option::weighted(0.4, prop_oneof![1 => Just(vec![]), 19 => vec(0..VOCABULARY, 1..16)]);
    let output = (prop::option::weighted(0.8, prop_oneof![1 => Just(0_u32), 19 => 1..24_u32]), planned);
    let stops = prop_oneof![3 => Just(vec![]), 1 => vec(0..VOCABULARY, 1..4)];
    let ends = (stops, prop::option::weighted(0.3, 0..VOCABULARY), any::<bool>());
    let order = (-2..3_i32, near(-1), prop::option::weighted(0.4, near(-2)), 0..3_u128);
    let extras = (identity(), prop::bool::weighted(0.1), prop::bool::weighted(0.15));
    (prompt, output, ends, order, extras).prop_map(|(prompt, output, ends, order, extras)| RequestShape {
        shared: prompt.0,
        own: prompt.1,
        max_output_tokens: output.0,
        planned: output.1,
        stop_token_ids: ends.0,
        eos_token_id: ends.1,
        ignore_eos: ends.2,
        priority: order.0,
        sent_nanos: order.1,
        arrival_nanos: order.2,
        tie_key: order.3,
        identity: extras.0,
        skip_reading_prefix_cache: extras.1,
        report_full: extras.2,
    })
}

/// Nanoseconds around the present, from so many passes on; the edges of passes are met often.
pub(crate) fn near(passes: i64) -> impl Strategy<Value = i64> {
    let pass = PASS_NANOS as i64;
    let around: Range<i64> = passes * pass..2 * pass;
    prop_oneof![3 => Just(0), 1 => Just(pass), 2 => around]
}

fn identity() -> impl Strategy<Value = Identity> {
    let name = |weight| prop::option::weighted(weight, prop_oneof![Just("a"), Just("b")]);
    let item = (prop_oneof![Just("a"), Just("b")], 0..12_u32, 1..8_u32).prop_map(|(identifier, offset, num_tokens)| {
        MultimodalItem { identifier: identifier.into(), offset, num_tokens }
    });
    let items = prop_oneof![6 => Just(vec![]), 1 => vec(item, 1..3)];
    (name(0.1), name(0.1), items).prop_map(|(salt, lora, items)| Identity { salt, lora, items })
}
