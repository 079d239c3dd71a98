//! Small engines of the vLLM kind that take part in handoffs, and what happens to them.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use standin::timing::TimingConfig;
use standin::{
    EngineConfig, EngineKind, FirstToken, LoadFailurePolicy, LoadTiming, Request, SchedulingState, VllmConfig,
};

use crate::operations::operations;
use crate::scheduler::workload::PASS_NANOS;

pub(crate) const BLOCK: u32 = 4;
const VOCABULARY: u32 = 50;
/// Handoff ids that registrations take turns on.
pub(crate) const HANDOFFS: usize = 5;

#[derive(Debug, Clone)]
pub(crate) struct Workload {
    pub(crate) config: EngineConfig,
    pub(crate) options: VllmConfig,
    pub(crate) operations: Vec<Operation>,
}

/// Which registration of a handoff a command names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named {
    Last,
    /// The one before, as a late command would.
    Stale,
    /// One that has no request yet.
    Next,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Verb {
    Activate { with_token: bool },
    Fail { valid_tokens: u32 },
    Release,
    CancelSource,
    CancelDestination,
    Heartbeat,
}

/// One thing that happens.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Submit(Shape),
    Register {
        handoff: usize,
        source: bool,
        named: Named,
        shape: Shape,
        id_is_taken: bool,
    },
    Command {
        handoff: usize,
        named: Named,
        verb: Verb,
    },
    /// A request with KV elsewhere that belongs to no handoff, and reports about transfers.
    SubmitRemote {
        shape: Shape,
        tokens: u32,
        load: LoadTiming,
        keeps: bool,
    },
    Report {
        received: Index,
        sent: Index,
    },
    Cancel(Index),
    Throttle(Index, bool),
    Reset {
        reset_running_requests: bool,
    },
    State(SchedulingState),
    Begin,
    Finish,
    Pass,
    Settle,
    /// Time goes by, if no pass is in flight.
    Wait {
        nanos: u64,
    },
}

/// A request; prompts of one family begin alike.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    family: u32,
    pub(crate) tokens: u32,
    outputs: u32,
}

impl Shape {
    pub(crate) fn request(self) -> Request {
        let prompt: Vec<u32> = (0..self.tokens).map(|position| (position * 7 + self.family) % VOCABULARY).collect();
        Request::new(prompt, self.outputs)
    }
}

pub(crate) fn workload() -> impl Strategy<Value = Workload> {
    (options(), any::<u64>(), operations(operation())).prop_map(|(options, seed, operations)| {
        let config = EngineConfig::new(EngineKind::Vllm(options.clone()))
            .with_max_model_len(40)
            .with_vocab_size(VOCABULARY)
            .with_seed(seed)
            .with_timing(TimingConfig::ConstantMs(PASS_NANOS as f64 / 1e6));
        Workload { config, options, operations }
    })
}

fn shape() -> impl Strategy<Value = Shape> {
    (0..3_u32, 1..25_u32, prop_oneof![2 => Just(1_u32), 3 => 1..14_u32]).prop_map(|(family, tokens, outputs)| Shape {
        family,
        tokens,
        outputs,
    })
}

/// A pool that can hold each request alone, and no two of them for sure.
fn options() -> impl Strategy<Value = VllmConfig> {
    let pool = (11..30_u32, 1..7_u32, prop_oneof![1 => Just(64_u32), 1 => 4..27_u32]);
    let rules = (any::<bool>(), prop::bool::weighted(0.3), any::<bool>(), prop::bool::weighted(0.7));
    let chunks = (select(&[0_u32, 0, 3, 8][..]), select(&[0.0, 0.0, 0.1, 0.3][..]), 1..4_u32);
    let ends = (2..40_u64, 2..40_u64);
    (pool, rules, chunks, ends).prop_map(|(pool, rules, chunks, ends)| {
        let (fails, carries_over, first, caching) = rules;
        VllmConfig::default()
            .with_block_size(BLOCK)
            .with_num_gpu_blocks(pool.0)
            .with_max_num_seqs(pool.1)
            .with_max_num_batched_tokens(pool.2)
            .with_enable_prefix_caching(caching)
            .with_kv_load_failure_policy(if fails { LoadFailurePolicy::Fail } else { LoadFailurePolicy::Recompute })
            .with_first_token(if carries_over { FirstToken::CarriedOver } else { FirstToken::Recomputed })
            .with_destinations_first(first)
            .with_long_prefill_token_threshold(chunks.0)
            .with_watermark(chunks.1)
            // Without it a sequence that does not fit beside those that load takes its place and loses it, until
            // they have loaded.
            .with_scheduler_reserve_full_isl(true)
            .with_prefill_schedule_interval(chunks.2)
            .with_kv_lease(Duration::from_nanos(ends.0 * PASS_NANOS))
            .with_transfer_guard(Duration::from_nanos(ends.1 * PASS_NANOS))
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    let named = || prop_oneof![12 => Just(Named::Last), 2 => Just(Named::Stale), 1 => Just(Named::Next)];
    let verb = prop_oneof![
        6 => any::<bool>().prop_map(|with_token| Verb::Activate { with_token }),
        4 => (0..26_u32).prop_map(|valid_tokens| Verb::Fail { valid_tokens }),
        3 => Just(Verb::Release),
        1 => Just(Verb::CancelSource),
        1 => Just(Verb::CancelDestination),
        2 => Just(Verb::Heartbeat),
    ];
    let renamed = prop_oneof![12 => Just(Named::Next), 1 => Just(Named::Last), 1 => Just(Named::Stale)];
    let register = (0..HANDOFFS, any::<bool>(), renamed, shape(), prop::bool::weighted(0.05));
    let remote = (shape(), 0..30_u32, any::<bool>(), any::<bool>());
    let state = select(&[SchedulingState::NoNewAdmissions, SchedulingState::Stopped][..]);
    prop_oneof![
        3 => shape().prop_map(Operation::Submit),
        4 => register.prop_map(|(handoff, source, named, shape, id_is_taken)| {
            Operation::Register { handoff, source, named, shape, id_is_taken }
        }),
        16 => (0..HANDOFFS, named(), verb).prop_map(|(handoff, named, verb)| {
            Operation::Command { handoff, named, verb }
        }),
        1 => remote.prop_map(|(shape, tokens, within, keeps)| {
            let load = if within { LoadTiming::WithinPass } else { LoadTiming::BetweenPasses };
            Operation::SubmitRemote { shape, tokens, load, keeps }
        }),
        2 => any::<(Index, Index)>().prop_map(|(received, sent)| Operation::Report { received, sent }),
        2 => any::<Index>().prop_map(Operation::Cancel),
        2 => any::<(Index, bool)>().prop_map(|(pick, on)| Operation::Throttle(pick, on)),
        1 => any::<bool>().prop_map(|reset_running_requests| Operation::Reset { reset_running_requests }),
        1 => state.prop_map(Operation::State),
        3 => Just(Operation::State(SchedulingState::Running)),
        6 => Just(Operation::Begin),
        6 => Just(Operation::Finish),
        20 => Just(Operation::Pass),
        3 => Just(Operation::Settle),
        4 => (0..12 * PASS_NANOS).prop_map(|nanos| Operation::Wait { nanos }),
    ]
}
