//! Properties under random workloads on random small engines (engine-semantics §7.1); the rig checks what must
//! hold after every step. `PROPTEST_CASES` sets the number of cases.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::test_kit::*;
use crate::config::{RadixEvictionPolicy, SchedulingState, SglangConfig, SglangPolicy};
use crate::handoff::HandoffKey;
use crate::metrics::EngineMetrics;
use crate::request::Request;
use crate::scheduler::{Applied, Command, DestinationEnd, DestinationState, HandoffFact, HandoffSide, Pass};

const HANDOFFS: u128 = 6;

#[derive(Debug, Clone)]
enum Operation {
    Submit(Shape),
    Cancel(Index),
    Throttle(Index, bool),
    Flush(bool),
    State(SchedulingState),
    /// Something about one of a few handoffs.
    Handoff(u8, Verb),
    SubmitDecode(Shape),
    Wait(u8),
    Begin,
    Finish,
    /// Begins and finishes so many passes.
    Passes(u8),
    Settle,
}

#[derive(Debug, Clone)]
enum Verb {
    /// Registers anew, at times in the place of a registration that lives.
    Prefill(Shape),
    Reserve(Shape),
    Activate(Option<u32>),
    Fail(u32),
    Release,
    CancelSource,
    CancelDestination,
    Heartbeat,
}

fn verb() -> impl Strategy<Value = Verb> {
    prop_oneof![
        3 => shape().prop_map(Verb::Prefill),
        4 => shape().prop_map(Verb::Reserve),
        6 => option::weighted(0.9, 0..50_u32).prop_map(Verb::Activate),
        1 => (0..40_u32).prop_map(Verb::Fail),
        1 => Just(Verb::Release),
        1 => Just(Verb::CancelSource),
        1 => Just(Verb::CancelDestination),
        1 => Just(Verb::Heartbeat),
    ]
}

/// A request. Prompts of one stem begin alike.
#[derive(Debug, Clone)]
struct Shape {
    stem: u32,
    shared: u32,
    own: u32,
    outputs: u32,
    priority: i32,
    salted: bool,
    ignore_eos: bool,
    skips: bool,
}

impl Shape {
    fn request(&self, number: u64) -> Request {
        let own = (0..self.own).map(|position| 1000 * (number as u32 + 1) + position);
        let prompt: Vec<u32> = (0..self.shared).map(|position| self.stem * 100 + position).chain(own).collect();
        let mut request = Request::new(prompt, self.outputs).with_priority(self.priority);
        request.cache_salt = self.salted.then(|| "salt".into());
        (request.ignore_eos, request.skip_reading_prefix_cache) = (self.ignore_eos, self.skips);
        request
    }
}

fn shape() -> impl Strategy<Value = Shape> {
    let flags = (prop::bool::weighted(0.2), prop::bool::weighted(0.3), prop::bool::weighted(0.1));
    (0..3_u32, 0..20_u32, 1..20_u32, 1..40_u32, -20..20, flags).prop_map(
        |(stem, shared, own, outputs, priority, (salted, ignore_eos, skips))| Shape {
            stem,
            shared,
            own,
            outputs,
            priority,
            salted,
            ignore_eos,
            skips,
        },
    )
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        14 => shape().prop_map(Operation::Submit),
        2 => any::<Index>().prop_map(Operation::Cancel),
        2 => (any::<Index>(), prop::bool::weighted(0.4)).prop_map(|(index, throttled)| Operation::Throttle(index, throttled)),
        1 => any::<bool>().prop_map(Operation::Flush),
        1 => select(&[SchedulingState::NoNewAdmissions, SchedulingState::Stopped][..]).prop_map(Operation::State),
        2 => Just(Operation::State(SchedulingState::Running)),
        16 => (0..HANDOFFS as u8, verb()).prop_map(|(id, verb)| Operation::Handoff(id, verb)),
        1 => shape().prop_map(Operation::SubmitDecode),
        1 => (0..90_u8).prop_map(Operation::Wait),
        4 => Just(Operation::Begin),
        4 => Just(Operation::Finish),
        8 => (1..9_u8).prop_map(Operation::Passes),
        1 => Just(Operation::Settle),
    ]
}

fn options() -> impl Strategy<Value = SglangConfig> {
    use RadixEvictionPolicy::{Fifo, Filo, Lfu, Lru, Mru, Priority, Slru};
    use SglangPolicy::{DfsWeight, Fcfs, Lof, Lpm, Random};
    let pool = (select(&[1, 1, 2, 4, 7, 16][..]), 8..60_u32, 1..7_u32);
    let limits = (option::weighted(0.7, 1..5_u32), 1..200_u32, option::weighted(0.2, 1..3_u32));
    let policies = (
        select(&[Fcfs, Fcfs, Lpm, DfsWeight, Lof, Random][..]),
        select(&[Lru, Lru, Lfu, Fifo, Mru, Filo, Priority, Slru][..]),
    );
    let switches = (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.2), any::<bool>(), any::<bool>());
    let reserve = select(&[1, 1, 5, 20][..]);
    (pool, limits, policies, switches, select(&[0.01, 0.01, 0.3, 1.0][..]), reserve).prop_map(
        |(
            (page, pages, slots),
            (chunk, prefill, most),
            (policy, eviction),
            (mixed, off, by_priority, once_more, decode_cache),
            hope,
            reserve,
        )| {
            SglangConfig::default()
                .with_page_size(page)
                .with_max_total_tokens(page * pages)
                .with_max_running_requests(slots)
                .with_chunked_prefill_size(chunk.map(|pages| pages * page.max(4).next_multiple_of(page)))
                .with_max_prefill_tokens(prefill)
                .with_prefill_max_requests(most)
                .with_schedule_policy(policy)
                .with_radix_eviction_policy(eviction)
                .with_enable_mixed_chunk(mixed)
                .with_disable_radix_cache(off)
                .with_enable_priority_scheduling(by_priority)
                .with_abort_after_next_forward(once_more)
                .with_schedule_conservativeness(hope)
                .with_num_reserved_decode_tokens(reserve)
                .with_disaggregation_decode_enable_radix_cache(decode_cache)
                .with_disaggregation_waiting_timeout(Duration::from_millis(300))
                .with_transfer_guard(Duration::from_millis(200))
        },
    )
}

/// One engine under a workload.
struct World {
    rig: Rig,
    in_flight: Option<Pass>,
    state: SchedulingState,
    throttled: bool,
    /// What was told of each registration: that its pages are there, and its end.
    told: BTreeMap<HandoffKey, (u32, u32)>,
    log: Vec<Done>,
}

impl World {
    fn perform(&mut self, operation: &Operation) {
        match operation {
            Operation::Submit(shape) => {
                let number = self.rig.submitted();
                self.rig.submit(shape.request(number));
            }
            Operation::Cancel(index) => {
                self.pick(*index).into_iter().for_each(|sequence| self.rig.cancel_or_end(sequence))
            }
            Operation::Throttle(index, throttled) => {
                if let Some(sequence) = self.pick(*index) {
                    self.throttled |= throttled;
                    self.rig.throttle(sequence, *throttled);
                }
            }
            Operation::Flush(reset_running_requests) => {
                let reset_running_requests = *reset_running_requests;
                self.rig.command(Command::ResetPrefixCache { reset_running_requests });
            }
            Operation::State(state) => {
                self.state = *state;
                self.rig.command(Command::SetScheduling(*state));
            }
            Operation::Handoff(id, verb) => self.hand_off(u128::from(*id), verb),
            Operation::SubmitDecode(shape) => {
                let request = shape.request(self.rig.submitted());
                let submission = self.rig.submission(request);
                self.rig.command(Command::SubmitDecode(submission));
            }
            Operation::Wait(milliseconds) if self.in_flight.is_none() => {
                self.rig.now = self.rig.now + Duration::from_millis(u64::from(*milliseconds));
            }
            Operation::Wait(_) => {}
            Operation::Begin => self.begin(),
            Operation::Finish => self.finish(),
            Operation::Passes(count) => {
                for _ in 0..*count {
                    self.begin();
                    self.finish();
                }
            }
            Operation::Settle => self.settle(),
        }
    }

    fn hand_off(&mut self, id: u128, verb: &Verb) {
        let id = match verb {
            Verb::Activate(_) => {
                let reserved = Some(HandoffSide::Destination(DestinationState::Reserved));
                self.find(id, reserved).unwrap_or(id)
            }
            // Where all live, one loses its place.
            Verb::Prefill(_) | Verb::Reserve(_) => self.find(id, None).unwrap_or(id),
            _ => id,
        };
        let last = self.rig.view().handoff(key(id, 0).id).map_or(0, |(known, ..)| known.generation);
        let (handoff, next) = (key(id, last), key(id, 1 + self.told.len() as u64));
        let command = match verb {
            Verb::Prefill(shape) | Verb::Reserve(shape) => {
                let request = shape.request(self.rig.submitted());
                let submission = self.rig.submission(request);
                self.told.insert(next, (0, 0));
                let command = match verb {
                    Verb::Prefill(_) => Command::SubmitPrefill { handoff: next, submission },
                    _ => Command::ReserveDestination { handoff: next, submission },
                };
                assert_eq!(self.rig.try_command(command), Ok(Applied::Submitted));
                return;
            }
            Verb::Activate(first_token) => Command::ActivateDestination { handoff, first_token: *first_token },
            Verb::Fail(valid_tokens) => Command::FailTransfer { handoff, valid_tokens: *valid_tokens },
            Verb::Release => Command::ReleaseSource { handoff },
            Verb::CancelSource => Command::CancelSource { handoff },
            Verb::CancelDestination => Command::CancelDestination { handoff },
            Verb::Heartbeat => Command::Heartbeat { handoff },
        };
        // Refused where it is not its time.
        drop(self.rig.try_command(command));
    }

    /// A handoff in this state, the first from this one on.
    fn find(&self, from: u128, state: Option<HandoffSide>) -> Option<u128> {
        let side = |id: u128| self.rig.view().handoff(key(id, 0).id).map(|(_, _, side)| side);
        (from..from + HANDOFFS).map(|id| id % HANDOFFS).find(|&id| side(id) == state)
    }

    fn note(&mut self, done: Done) {
        for fact in &done.facts {
            let (there, ended) = self.told.get_mut(&fact.handoff()).expect("a registration");
            assert_eq!(*ended, 0, "{fact:?} comes after the end");
            match fact {
                HandoffFact::SourceHeld { .. } | HandoffFact::DestinationReserved { .. } => *there += 1,
                HandoffFact::SourceEnded { .. } | HandoffFact::DestinationEnded { .. } => *ended += 1,
            }
            assert!(*there <= 1);
        }
        self.log.push(done);
    }

    /// Whether one that got pages for transferred KV was retracted.
    fn retracted_a_destination(&self) -> bool {
        let mut reserved = std::collections::BTreeSet::new();
        self.log.iter().any(|done| {
            reserved.extend(done.facts.iter().filter_map(|fact| match fact {
                HandoffFact::DestinationReserved { sequence, .. } => Some(sequence.0),
                _ => None,
            }));
            done.preempted.iter().any(|sequence| reserved.contains(sequence))
        })
    }

    fn settle(&mut self) {
        if let Some(done) = self.rig.settle() {
            self.note(done);
        }
    }

    fn pick(&self, index: Index) -> Option<u64> {
        let live = self.rig.live();
        (!live.is_empty()).then(|| *index.get(&live))
    }

    fn begin(&mut self) {
        if self.in_flight.is_some() {
            return;
        }
        self.in_flight = self.rig.begin();
        // Whoever waits for a transfer may keep the others from the pages.
        let could_run = self.state == SchedulingState::Running
            && !self.throttled
            && !self.rig.live().is_empty()
            && self.rig.view().loading().next().is_none()
            && self.rig.view().held().next().is_none();
        assert!(self.in_flight.is_some() || !could_run, "case 7: it idles");
    }

    fn finish(&mut self) {
        if let Some(pass) = self.in_flight.take() {
            let done = self.rig.finish(pass);
            self.note(done);
        }
    }

    /// Lets everything run to its end.
    fn drain(&mut self) {
        self.finish();
        self.perform(&Operation::State(SchedulingState::Running));
        for sequence in self.rig.live() {
            self.rig.throttle(sequence, false);
        }
        self.throttled = false;
        let mut passes = 0;
        while !self.rig.live().is_empty() || self.rig.view().num_handoffs() > 0 {
            for id in 0..HANDOFFS {
                self.hand_off(id, &Verb::Activate(Some(3)));
            }
            self.perform(&Operation::Passes(1));
            self.settle();
            if let Some(next) = self.rig.scheduler.next_deadline() {
                self.rig.now = self.rig.now.max(next);
            }
            passes += 1;
            assert!(passes < 20_000, "it does not end");
        }
        self.settle();
        assert!(self.told.values().all(|(_, ended)| *ended == 1), "each registration ends once");
        self.perform(&Operation::Passes(1));
        self.rig.assert_drained();
    }
}

fn run(options: &SglangConfig, operations: &[Operation]) -> World {
    let mut world = World {
        rig: Rig::new(options.clone()),
        in_flight: None,
        state: SchedulingState::Running,
        throttled: false,
        told: BTreeMap::new(),
        log: Vec::new(),
    };
    world.rig.look_every = 4;
    operations.iter().for_each(|operation| world.perform(operation));
    world.drain();
    world
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_core_keeps_its_promises(options in options(), operations in vec(operation(), 1..60)) {
        let world = run(&options, &operations);
        for (&sequence, tokens) in &world.rig.outputs {
            let mut limits = operations.iter().filter_map(|operation| match operation {
                Operation::Submit(shape)
                | Operation::SubmitDecode(shape)
                | Operation::Handoff(_, Verb::Prefill(shape) | Verb::Reserve(shape)) => Some(shape.outputs as usize),
                _ => None,
            });
            let limit = limits.nth(sequence as usize).expect("one that was submitted");
            prop_assert!(tokens.len() <= limit, "case 9");
        }
        // Case 6: the same input gives the same log.
        prop_assert!(world.log == run(&options, &operations).log);
    }
}

/// Properties hold easily where nothing happens: the workloads must meet what they are about.
#[test]
fn the_workloads_meet_retractions_evictions_chunks_and_mixed_batches() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let workload = (options(), vec(operation(), 1..60));
    let mut met = [0; 12];
    for _ in 0..200 {
        let (options, operations) = workload.new_tree(&mut runner).expect("a workload").current();
        let world = run(&options, &operations);
        let log = &world.log;
        let tells = |what: &dyn Fn(&HandoffFact) -> bool| log.iter().any(|done| done.facts.iter().any(what));
        let last = log.last().map_or(EngineMetrics::default(), |done| done.metrics);
        let happened = [
            log.iter().any(|done| !done.preempted.is_empty()),
            log.iter().any(|done| done.events.iter().any(|event| matches!(event, crate::KvEvent::BlockRemoved { .. }))),
            log.iter().any(|done| done.prefill.len() > done.sampled.len()),
            log.iter().any(|done| !done.prefill.is_empty() && !done.decode.is_empty()),
            last.finished.out_of_memory > 0,
            last.prefix_cache.hits > 0,
            last.prefix_cache.preempted_hits > 0,
            tells(&|fact| matches!(fact, HandoffFact::SourceHeld { .. })),
            tells(&|fact| matches!(fact, HandoffFact::DestinationReserved { .. })),
            tells(&|fact| matches!(fact, HandoffFact::DestinationEnded { end: DestinationEnd::Finished, .. })),
            last.expired_leases > 0 || last.expired_guards > 0,
            world.retracted_a_destination(),
        ];
        for (met, happened) in met.iter_mut().zip(happened) {
            *met += u32::from(happened);
        }
    }
    assert!(met.iter().all(|&cases| cases >= 10), "cases of 200 with retractions, evictions, …: {met:?}");
}
