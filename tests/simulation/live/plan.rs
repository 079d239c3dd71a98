//! What a run of the live engine is: an engine, 64 clients, and what else happens. All of it is data, drawn before
//! anything runs, so that a failing run can be shrunk.

use std::num::NonZeroUsize;

use proptest::collection::vec;
use proptest::prelude::*;
use standin::timing::TimingConfig;
use standin::{
    EngineConfig, EngineKind, EngineTime, OutputBuffering, Request, SchedulingState, SglangConfig, VllmConfig,
    VllmPolicy,
};
use uuid::Uuid;

pub(crate) const CLIENTS: usize = 64;
const BLOCK: u32 = 4;
const MODEL_LEN: u32 = 48;
/// Microseconds within which clients come and things happen.
const SPAN: u32 = 120_000;

#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) engine: EnginePlan,
    pub(crate) clients: Vec<ClientPlan>,
    /// When, in microseconds, and what.
    pub(crate) others: Vec<(u32, Disturbance)>,
    pub(crate) end: End,
    /// Nothing goes wrong: the run must equal one of the bare scheduler.
    pub(crate) calm: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct EnginePlan {
    pub(crate) kind: EngineKind,
    pub(crate) seed: u64,
    /// Durations of passes in microseconds, over and over.
    pub(crate) passes: Vec<u32>,
    pub(crate) startup: u32,
    /// The pass whose timing model panics.
    pub(crate) timing_panics: Option<u32>,
    pub(crate) kv_sink: Sink,
    pub(crate) pass_sink: Sink,
    pub(crate) admissions: bool,
    pub(crate) gate: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Sink {
    None,
    Good,
    /// Every so many batches it returns an error.
    Fails(u32),
    /// It panics at this batch.
    Panics(u32),
}

#[derive(Debug, Clone)]
pub(crate) struct ClientPlan {
    pub(crate) starts: u32,
    pub(crate) id: Id,
    pub(crate) request: RequestPlan,
    pub(crate) buffering: OutputBuffering,
    pub(crate) entry: Entry,
    pub(crate) reading: Reading,
    /// By the stream, after so many tokens were read.
    pub(crate) stream_cancel: Option<(usize, Polls)>,
    /// By the engine, so many microseconds after the client starts.
    pub(crate) cancels: Vec<(u32, Polls)>,
}

/// After how many steps a future is dropped, polls and turns of everybody else by turns; `None`: never.
pub(crate) type Polls = Option<u8>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Id {
    /// The engine makes one.
    Made,
    /// Nobody else has it.
    Own,
    /// Several clients use it, one after the other or at once.
    Shared(u8),
}

#[derive(Debug, Clone)]
pub(crate) struct RequestPlan {
    shared: (u32, u32),
    own: u32,
    planned: Option<u32>,
    max_output_tokens: Option<u32>,
    stop_at: Option<u32>,
    priority: i32,
    /// Microseconds after it is sent, or before.
    pub(crate) arrival: Option<i32>,
}

#[derive(Debug, Clone)]
pub(crate) enum Entry {
    Submit(Polls),
    Decode(Polls),
    /// Prepared, so many microseconds ahead.
    Prepared(u32, Polls),
    /// Prepared, and its registration dropped after so many microseconds.
    NeverSubmitted(u32),
    Handoff(HandoffPlan),
}

#[derive(Debug, Clone)]
pub(crate) struct HandoffPlan {
    pub(crate) id: u8,
    pub(crate) is_source: bool,
    /// An earlier registration of the same handoff, whose control is still there and commands this.
    pub(crate) stale: Option<HandoffStep>,
    pub(crate) submit: Polls,
    pub(crate) steps: Vec<(HandoffStep, Polls)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandoffStep {
    /// Microseconds.
    Wait(u32),
    /// The next event, for a while.
    Event,
    Heartbeat,
    Release,
    CancelSource,
    Activate,
    Fail(u32),
    CancelDestination,
    DropEvents,
    DropStream,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Reading {
    /// Always there.
    Prompt,
    /// So many microseconds before each signal.
    Every(u32),
    /// So many microseconds before the first.
    Late(u32),
    /// Dropped after so many tokens and microseconds.
    Dropped(usize, u32),
    /// Nothing for so many microseconds after so many tokens, then the rest.
    Stalls(usize, u32),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Disturbance {
    Jump(u32),
    CancelAll(Polls),
    Reset(Polls),
    Scheduling(SchedulingState, Polls),
    Gate(bool),
}

/// How the engine is ended, and when in microseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    Natural,
    Shutdown(u32, Polls),
    DropHandle(u32),
    CloseAdmissions(u32),
    DropGate(u32),
}

impl Plan {
    pub(crate) fn config(&self) -> EngineConfig {
        EngineConfig::new(self.engine.kind.clone())
            .with_max_model_len(MODEL_LEN)
            .with_vocab_size(1_000)
            .with_seed(self.engine.seed)
            .with_timing(TimingConfig::ConstantMs(1.0))
            .with_startup(std::time::Duration::from_micros(self.engine.startup.into()))
    }

    /// Whether requests may be left that nothing ends: the engine is held for ever.
    pub(crate) fn may_stall(&self) -> bool {
        let (mut gate_open, mut runs) = (true, true);
        let mut others = self.others.clone();
        others.sort_by_key(|(at, _)| *at);
        for (_, other) in others {
            match other {
                Disturbance::Gate(open) => gate_open = open,
                // A future that is dropped may or may not have set it.
                Disturbance::Scheduling(state, None) => runs = state == SchedulingState::Running,
                Disturbance::Scheduling(state, Some(_)) => runs &= state == SchedulingState::Running,
                _ => {}
            }
        }
        (self.engine.gate && !gate_open) || !runs
    }

    /// Whether engine time can run ahead of what is modelled: a jump, a closed gate.
    pub(crate) fn may_lag(&self) -> bool {
        self.others.iter().any(|(_, other)| matches!(other, Disturbance::Jump(_) | Disturbance::Gate(_)))
    }

    pub(crate) fn has_handoffs(&self) -> bool {
        self.clients.iter().any(|client| matches!(client.entry, Entry::Handoff(_)))
    }

    /// A cancelled request may take part in one more pass.
    pub(crate) fn aborts_late(&self) -> bool {
        matches!(&self.engine.kind, EngineKind::Sglang(sglang) if sglang.abort_after_next_forward)
    }
}

impl Id {
    pub(crate) fn uuid(self, client: usize) -> Option<Uuid> {
        match self {
            Self::Made => None,
            Self::Own => Some(Uuid::from_u128(1_000 + client as u128)),
            Self::Shared(n) => Some(Uuid::from_u128(1 + u128::from(n))),
        }
    }
}

impl RequestPlan {
    pub(crate) fn request(&self, client: usize, id: Option<Uuid>) -> Request {
        let (family, shared) = self.shared;
        let prompt: Vec<u32> = (0..shared)
            .map(|position| family * 100 + position)
            .chain((0..self.own).map(|position| 10_000 + client as u32 * 100 + position))
            .collect();
        let mut request = Request::new(prompt, 0);
        request.max_output_tokens = self.max_output_tokens;
        request.id = id;
        request.priority = self.priority;
        if let Some(length) = self.planned {
            request = request.with_output_tokens((1..=length).collect::<Vec<_>>());
        }
        request.stop_token_ids = self.stop_at.into_iter().collect();
        request
    }

    pub(crate) fn arrival(&self, sent: EngineTime) -> Option<EngineTime> {
        self.arrival
            .map(|offset| EngineTime::from_nanos(sent.as_nanos().saturating_add_signed(i64::from(offset) * 1_000)))
    }
}

pub(crate) fn plan() -> impl Strategy<Value = Plan> {
    prop_oneof![1 => calm(), 4 => wild()]
}

/// Nothing goes wrong: everybody reads, nobody cancels.
fn calm() -> impl Strategy<Value = Plan> {
    (engine(Just(Sink::Good).boxed(), false), clients(calm_entry(), calm_reading(), false)).prop_map(
        |(mut engine, mut clients)| {
            engine.passes.iter_mut().for_each(|pass| *pass = (*pass).max(100));
            (engine.timing_panics, engine.admissions, engine.gate) = (None, true, false);
            for client in &mut clients {
                client.id = if let Id::Shared(_) = client.id { Id::Own } else { client.id };
                client.stream_cancel = None;
            }
            Plan { engine, clients, others: Vec::new(), end: End::Natural, calm: true }
        },
    )
}

fn wild() -> impl Strategy<Value = Plan> {
    let others = vec((when(), disturbance()), 0..8);
    let sink = prop_oneof![
        1 => Just(Sink::None),
        6 => Just(Sink::Good),
        1 => (1..5_u32).prop_map(Sink::Fails),
        1 => (0..60_u32).prop_map(Sink::Panics),
    ];
    (engine(sink.boxed(), true), clients(entry(), reading(), true), others, end())
        .prop_map(|(engine, clients, others, end)| Plan { engine, clients, others, end, calm: false })
}

fn engine(sink: BoxedStrategy<Sink>, faulty: bool) -> impl Strategy<Value = EnginePlan> {
    let passes = vec(prop_oneof![1 => Just(0), 4 => 100..2_000_u32, 3 => 2_000..20_000_u32, 2 => Just(350)], 1..6);
    let times = (passes, prop_oneof![3 => Just(0), 1 => 0..30_000_u32]);
    let panics = if faulty { prop::option::weighted(0.06, 0..60_u32).boxed() } else { Just(None).boxed() };
    let lookers = (sink.clone(), sink, prop::bool::weighted(0.8), prop::bool::weighted(0.4));
    (kind(), any::<u64>(), times, panics, lookers).prop_map(
        |(kind, seed, (passes, startup), timing_panics, (kv_sink, pass_sink, admissions, gate))| EnginePlan {
            kind,
            seed,
            passes,
            startup,
            timing_panics,
            kv_sink,
            pass_sink,
            admissions,
            gate,
        },
    )
}

fn kind() -> impl Strategy<Value = EngineKind> {
    // The pool holds one request of the greatest length, so none outgrows it.
    let sizes = (13..60_u32, 1..=12_u32, 12..80_u32);
    let vllm =
        (sizes, any::<bool>(), prop::bool::weighted(0.3)).prop_map(|((blocks, seqs, budget), caching, priority)| {
            let vllm = VllmConfig::default()
                .with_block_size(BLOCK)
                .with_num_gpu_blocks(blocks)
                .with_max_num_seqs(seqs)
                .with_max_num_batched_tokens(budget)
                .with_enable_prefix_caching(caching)
                .with_kv_lease(std::time::Duration::from_millis(40))
                .with_transfer_guard(std::time::Duration::from_millis(40));
            EngineKind::Vllm(if priority { vllm.with_policy(VllmPolicy::Priority) } else { vllm })
        });
    let switches = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.2));
    let sglang = (14..60_u32, 1..=12_u32, 1..20_u32, 1..8_u32, switches).prop_map(
        |(pages, requests, chunk, reserved, (no_cache, mixed, aborts_late))| {
            EngineKind::Sglang(
                SglangConfig::default()
                    .with_page_size(BLOCK)
                    .with_max_total_tokens(pages * BLOCK)
                    .with_max_running_requests(requests)
                    .with_chunked_prefill_size(Some(chunk * BLOCK))
                    .with_num_reserved_decode_tokens(reserved)
                    .with_disaggregation_waiting_timeout(std::time::Duration::from_millis(40))
                    .with_transfer_guard(std::time::Duration::from_millis(40))
                    .with_disable_radix_cache(no_cache)
                    .with_enable_mixed_chunk(mixed)
                    .with_abort_after_next_forward(aborts_late),
            )
        },
    );
    prop_oneof![3 => vllm, 2 => sglang]
}

fn when() -> impl Strategy<Value = u32> {
    // Many at one instant, at the edges of timer ticks, and anywhere.
    prop_oneof![2 => Just(0), 3 => (0..SPAN / 10_000).prop_map(|n| n * 10_000), 4 => 0..SPAN]
}

fn polls() -> impl Strategy<Value = Polls> {
    prop_oneof![3 => Just(None), 1 => (0..7_u8).prop_map(Some)]
}

/// As many as there are; shrinking leaves some out.
fn clients(
    entry: BoxedStrategy<Entry>,
    reading: BoxedStrategy<Reading>,
    cancels: bool,
) -> impl Strategy<Value = Vec<ClientPlan>> {
    let client = prop::option::weighted(0.999_999, client(entry, reading, cancels));
    vec(client, CLIENTS).prop_map(|clients| clients.into_iter().flatten().collect())
}

fn client(
    entry: BoxedStrategy<Entry>,
    reading: BoxedStrategy<Reading>,
    cancels: bool,
) -> impl Strategy<Value = ClientPlan> {
    let id = prop_oneof![1 => Just(Id::Made), 6 => Just(Id::Own), 2 => (0..4_u8).prop_map(Id::Shared)];
    let stream_cancel = prop::option::weighted(0.08, (0..6_usize, polls()));
    let at_most = if cancels { 3 } else { 1 };
    let cancel = (prop_oneof![1 => Just(0), 3 => 0..60_000_u32], polls());
    let cancels = prop_oneof![5 => Just(Vec::new()), 2 => vec(cancel, 0..at_most)];
    ((when(), id), request(), buffering(), (entry, reading), (stream_cancel, cancels)).prop_map(
        |((starts, id), request, buffering, (entry, reading), (stream_cancel, cancels))| ClientPlan {
            starts,
            id,
            request,
            buffering,
            entry,
            reading,
            stream_cancel,
            cancels,
        },
    )
}

fn request() -> impl Strategy<Value = RequestPlan> {
    let prompt = ((0..3_u32, prop_oneof![1 => Just(0), 2 => 0..20_u32]), 1..12_u32);
    let length = (prop::option::weighted(0.5, 1..16_u32), prop::option::weighted(0.9, 1..16_u32));
    let extras = (prop::option::weighted(0.2, 1..16_u32), 0..3_i32, prop::option::weighted(0.2, -5_000..15_000_i32));
    (prompt, length, extras).prop_map(|((shared, own), (planned, max_output_tokens), extras)| RequestPlan {
        shared,
        own,
        planned,
        max_output_tokens,
        stop_at: extras.0,
        priority: extras.1,
        arrival: extras.2,
    })
}

fn buffering() -> impl Strategy<Value = OutputBuffering> {
    let capacity = || {
        prop_oneof![2 => Just(1_usize), 2 => 2..5_usize, 1 => Just(8_usize)]
            .prop_map(|capacity| NonZeroUsize::new(capacity).expect("not 0"))
    };
    prop_oneof![
        2 => Just(OutputBuffering::FullResponse),
        3 => capacity().prop_map(|capacity| OutputBuffering::CancelOnOverflow { capacity }),
        3 => capacity().prop_map(|capacity| OutputBuffering::Throttle { capacity }),
    ]
}

fn calm_entry() -> BoxedStrategy<Entry> {
    prop_oneof![4 => Just(Entry::Submit(None)), 1 => (0..9_000_u32).prop_map(|wait| Entry::Prepared(wait, None))]
        .boxed()
}

fn entry() -> BoxedStrategy<Entry> {
    prop_oneof![
        10 => polls().prop_map(Entry::Submit),
        1 => polls().prop_map(Entry::Decode),
        2 => (0..20_000_u32, polls()).prop_map(|(wait, polls)| Entry::Prepared(wait, polls)),
        1 => (0..20_000_u32).prop_map(Entry::NeverSubmitted),
        3 => handoff().prop_map(Entry::Handoff),
    ]
    .boxed()
}

fn handoff() -> impl Strategy<Value = HandoffPlan> {
    let stale = prop::option::weighted(0.3, handoff_step());
    (0..8_u8, any::<bool>(), stale, polls(), vec((handoff_step(), polls()), 0..7))
        .prop_map(|(id, is_source, stale, submit, steps)| HandoffPlan { id, is_source, stale, submit, steps })
}

fn handoff_step() -> impl Strategy<Value = HandoffStep> {
    use HandoffStep::*;
    prop_oneof![
        3 => (0..30_000_u32).prop_map(Wait),
        6 => Just(Event),
        1 => Just(Heartbeat),
        2 => Just(Release),
        1 => Just(CancelSource),
        4 => Just(Activate),
        1 => (0..20_u32).prop_map(Fail),
        1 => Just(CancelDestination),
        1 => Just(DropEvents),
        1 => Just(DropStream),
    ]
}

fn calm_reading() -> BoxedStrategy<Reading> {
    Just(Reading::Prompt).boxed()
}

fn reading() -> BoxedStrategy<Reading> {
    let tokens = || 0..6_usize;
    prop_oneof![
        8 => Just(Reading::Prompt),
        2 => (500..15_000_u32).prop_map(Reading::Every),
        2 => (1_000..200_000_u32).prop_map(Reading::Late),
        3 => (tokens(), prop_oneof![Just(0), 0..50_000_u32]).prop_map(|(tokens, after)| Reading::Dropped(tokens, after)),
        2 => (tokens(), 1_000..300_000_u32).prop_map(|(tokens, pause)| Reading::Stalls(tokens, pause)),
    ]
    .boxed()
}

fn disturbance() -> impl Strategy<Value = Disturbance> {
    let state = prop_oneof![
        3 => Just(SchedulingState::Running),
        1 => Just(SchedulingState::NoNewAdmissions),
        1 => Just(SchedulingState::Stopped),
    ];
    prop_oneof![
        1 => (1..500_000_u32).prop_map(Disturbance::Jump),
        1 => polls().prop_map(Disturbance::CancelAll),
        1 => polls().prop_map(Disturbance::Reset),
        2 => (state, polls()).prop_map(|(state, polls)| Disturbance::Scheduling(state, polls)),
        3 => any::<bool>().prop_map(Disturbance::Gate),
    ]
}

fn end() -> impl Strategy<Value = End> {
    let at = || prop_oneof![1 => Just(0), 6 => 0..SPAN + 60_000];
    prop_oneof![
        5 => Just(End::Natural),
        2 => (at(), polls()).prop_map(|(at, polls)| End::Shutdown(at, polls)),
        1 => at().prop_map(End::DropHandle),
        1 => at().prop_map(End::CloseAdmissions),
        1 => at().prop_map(End::DropGate),
    ]
}
