//! Small engines of the SGLang kind, and what happens to them.

use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use standin::timing::TimingConfig;
use standin::{
    EngineConfig, EngineKind, OutputPlan, RadixEvictionPolicy, Request, SchedulingState, SglangConfig, SglangPolicy,
};

use crate::operations::operations;
use crate::scheduler::workload::{PASS_NANOS, near};

const VOCABULARY: u32 = 50;

#[derive(Debug, Clone)]
pub(crate) struct Workload {
    pub(crate) config: EngineConfig,
    pub(crate) options: SglangConfig,
    pub(crate) operations: Vec<Operation>,
}

/// One thing that happens. A sequence is picked among the live ones.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Submit(Box<Shape>),
    Cancel(Index),
    Throttle(Index, bool),
    Flush {
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

/// A request. Prompts of one stem begin alike.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    stem: u32,
    shared: u32,
    own: Vec<u32>,
    outputs: u32,
    planned: Option<Vec<u32>>,
    stop_token_ids: Vec<u32>,
    eos_token_id: Option<u32>,
    ignore_eos: bool,
    priority: i32,
    pub(crate) namespace: Option<&'static str>,
    skips: bool,
    /// When it was sent, and when it arrives, from now.
    pub(crate) sent_nanos: i64,
    pub(crate) arrival_nanos: Option<i64>,
}

impl Shape {
    pub(crate) fn prompt(&self) -> Vec<u32> {
        let shared = (0..self.shared).map(|position| (position * (self.stem + 1) + position / 5) % VOCABULARY);
        shared.chain(self.own.iter().copied()).collect()
    }

    pub(crate) fn request(&self) -> Request {
        let mut request = Request::new(self.prompt(), self.outputs).with_priority(self.priority);
        if let Some(tokens) = &self.planned {
            request.output = OutputPlan::Tokens(tokens.as_slice().into());
        }
        request.stop_token_ids.clone_from(&self.stop_token_ids);
        request.eos_token_id = self.eos_token_id;
        request.cache_salt = self.namespace.map(Into::into);
        (request.ignore_eos, request.skip_reading_prefix_cache) = (self.ignore_eos, self.skips);
        request
    }
}

pub(crate) fn workload() -> impl Strategy<Value = Workload> {
    let model_len = prop_oneof![1 => 24..60_u32, 4 => Just(4096_u32)];
    (options(), model_len, any::<u64>(), operations(operation())).prop_map(
        |(options, max_model_len, seed, operations)| {
            let config = EngineConfig::new(EngineKind::Sglang(options.clone()))
                .with_max_model_len(max_model_len)
                .with_vocab_size(VOCABULARY)
                .with_seed(seed)
                .with_timing(TimingConfig::ConstantMs(PASS_NANOS as f64 / 1e6));
            Workload { config, options, operations }
        },
    )
}

fn operation() -> impl Strategy<Value = Operation> {
    let pauses = select(&[SchedulingState::NoNewAdmissions, SchedulingState::Stopped][..]);
    prop_oneof![
        7 => shape().prop_map(|shape| Operation::Submit(Box::new(shape))),
        3 => any::<Index>().prop_map(Operation::Cancel),
        2 => (any::<Index>(), prop::bool::weighted(0.4)).prop_map(|(index, on)| Operation::Throttle(index, on)),
        1 => any::<bool>().prop_map(|reset_running_requests| Operation::Flush { reset_running_requests }),
        1 => pauses.prop_map(Operation::State),
        3 => Just(Operation::State(SchedulingState::Running)),
        6 => Just(Operation::Begin),
        6 => Just(Operation::Finish),
        34 => Just(Operation::Pass),
        1 => Just(Operation::Settle),
        2 => (0..2 * PASS_NANOS).prop_map(|nanos| Operation::Wait { nanos }),
    ]
}

fn shape() -> impl Strategy<Value = Shape> {
    let prompt = (0..3_u32, prop_oneof![6 => 0..20_u32, 1 => 20..44_u32], prop::collection::vec(0..VOCABULARY, 0..16));
    let planned = option::weighted(0.3, prop::collection::vec(0..VOCABULARY, 0..12));
    let stops = prop_oneof![3 => Just(vec![]), 1 => prop::collection::vec(0..VOCABULARY, 1..8)];
    let output = (0..40_u32, planned, stops, option::weighted(0.3, 0..VOCABULARY), prop::bool::weighted(0.3));
    let extras = (-20..20, option::weighted(0.2, select(&["a", "b"][..])), prop::bool::weighted(0.1));
    let order = (near(-1), option::weighted(0.3, near(-2)));
    (prompt, output, extras, order).prop_map(
        |((stem, shared, own), output, (priority, namespace, skips), (sent_nanos, arrival_nanos))| Shape {
            stem,
            shared,
            own,
            outputs: output.0,
            planned: output.1,
            stop_token_ids: output.2,
            eos_token_id: output.3,
            ignore_eos: output.4,
            priority,
            namespace,
            skips,
            sent_nanos,
            arrival_nanos,
        },
    )
}

fn options() -> impl Strategy<Value = SglangConfig> {
    use RadixEvictionPolicy::{Fifo, Filo, Lfu, Lru, Mru, Priority, Slru};
    use SglangPolicy::{DfsWeight, Fcfs, Lof, Lpm, Random};
    let pool = (select(&[1, 1, 2, 4, 7, 16][..]), 8..60_u32, 1..7_u32);
    let limits = (option::weighted(0.7, 1..5_u32), 1..200_u32, option::weighted(0.2, 1..3_u32));
    let policies = (
        select(&[Fcfs, Fcfs, Fcfs, Lpm, Lpm, Lof, DfsWeight, Random][..]),
        select(&[Lru, Lru, Lfu, Fifo, Mru, Filo, Priority, Slru][..]),
    );
    let priorities = (prop::bool::weighted(0.3), any::<bool>(), select(&[0, 10][..]));
    let switches = (any::<bool>(), prop::bool::weighted(0.2), any::<bool>(), prop::bool::weighted(0.9));
    let hope = select(&[0.01, 0.01, 0.3, 1.0][..]);
    (pool, limits, policies, priorities, switches, hope).prop_map(
        |((page, pages, slots), (chunk, prefill, most), (policy, eviction), priorities, switches, hope)| {
            SglangConfig::default()
                .with_page_size(page)
                .with_max_total_tokens(page * pages)
                .with_max_running_requests(slots)
                .with_chunked_prefill_size(chunk.map(|pages| pages * page.max(4).next_multiple_of(page)))
                .with_max_prefill_tokens(prefill)
                .with_prefill_max_requests(most)
                .with_schedule_policy(policy)
                .with_radix_eviction_policy(eviction)
                .with_enable_priority_scheduling(priorities.0)
                .with_schedule_low_priority_values_first(priorities.1)
                .with_priority_scheduling_preemption_threshold(priorities.2)
                .with_enable_mixed_chunk(switches.0)
                .with_disable_radix_cache(switches.1)
                .with_abort_after_next_forward(switches.2)
                .with_end_outgrown_requests(switches.3)
                .with_schedule_conservativeness(hope)
        },
    )
}
