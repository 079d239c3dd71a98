//! Properties under random workloads on random small engines (engine-semantics §7.1); the rig checks what must
//! hold after every step. `PROPTEST_CASES` sets the number of cases.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::test_kit::*;
use crate::config::{RadixEvictionPolicy, SchedulingState, SglangConfig, SglangPolicy};
use crate::metrics::EngineMetrics;
use crate::request::Request;
use crate::scheduler::{Command, Pass};

#[derive(Debug, Clone)]
enum Operation {
    Submit(Shape),
    Cancel(Index),
    Throttle(Index, bool),
    Flush(bool),
    State(SchedulingState),
    Begin,
    Finish,
    /// Begins and finishes so many passes.
    Passes(u8),
    Settle,
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
    let switches = (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.2), any::<bool>());
    (pool, limits, policies, switches, select(&[0.01, 0.01, 0.3, 1.0][..])).prop_map(
        |(
            (page, pages, slots),
            (chunk, prefill, most),
            (policy, eviction),
            (mixed, off, by_priority, once_more),
            hope,
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
        },
    )
}

/// One engine under a workload.
struct World {
    rig: Rig,
    in_flight: Option<Pass>,
    state: SchedulingState,
    throttled: bool,
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
            Operation::Begin => self.begin(),
            Operation::Finish => self.finish(),
            Operation::Passes(count) => {
                for _ in 0..*count {
                    self.begin();
                    self.finish();
                }
            }
            Operation::Settle => self.log.extend(self.rig.settle()),
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
        let could_run = self.state == SchedulingState::Running && !self.throttled && !self.rig.live().is_empty();
        assert!(self.in_flight.is_some() || !could_run, "case 7: it idles");
    }

    fn finish(&mut self) {
        if let Some(pass) = self.in_flight.take() {
            self.log.push(self.rig.finish(pass));
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
        while !self.rig.live().is_empty() {
            self.perform(&Operation::Passes(1));
            passes += 1;
            assert!(passes < 20_000, "it does not end");
        }
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
    fn the_core_keeps_its_promises(options in options(), operations in vec(operation(), 1..40)) {
        let world = run(&options, &operations);
        for (&sequence, tokens) in &world.rig.outputs {
            let mut limits = operations.iter().filter_map(|operation| match operation {
                Operation::Submit(shape) => Some(shape.outputs as usize),
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
    let workload = (options(), vec(operation(), 1..40));
    let mut met = [0; 7];
    for _ in 0..200 {
        let (options, operations) = workload.new_tree(&mut runner).expect("a workload").current();
        let log = run(&options, &operations).log;
        let last = log.last().map_or(EngineMetrics::default(), |done| done.metrics);
        let happened = [
            log.iter().any(|done| !done.preempted.is_empty()),
            log.iter().any(|done| done.events.iter().any(|event| matches!(event, crate::KvEvent::BlockRemoved { .. }))),
            log.iter().any(|done| done.prefill.len() > done.sampled.len()),
            log.iter().any(|done| !done.prefill.is_empty() && !done.decode.is_empty()),
            last.finished.out_of_memory > 0,
            last.prefix_cache.hits > 0,
            last.prefix_cache.preempted_hits > 0,
        ];
        for (met, happened) in met.iter_mut().zip(happened) {
            *met += u32::from(happened);
        }
    }
    assert!(met.iter().all(|&cases| cases >= 10), "cases of 200 with retractions, evictions, …: {met:?}");
}
