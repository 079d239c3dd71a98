//! Runs a scenario through the pure core and writes down what it decides, in a recording's own types.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::check::{Disagreement, Replaying};
use super::connector::Connector;
use super::contents::Contents;
use super::input::{Add, Input, Phase, Scenario};
use super::step::{Done, End, EndKind, EndReason, Pool, PoolUse, Report, Step, StepKind};
use crate::config::SchedulingState;
use crate::metrics::EngineMetrics;
use crate::request::{Request, SequenceId};
use crate::scheduler::{
    Applied, Cancelled, Command, Effects, Pass, PoolView, Scheduler, SequenceStatus, SequenceView, Submission,
};
use crate::time::EngineTime;

/// Blocks of the free queue that a recording shows.
const FREE_QUEUE_SHOWN: usize = 64;

/// The engine loop of a recording, over the pure core.
#[derive(Debug)]
pub(super) struct Replay<'a> {
    scenario: &'a Scenario,
    inputs: Inputs<'a>,
    pub(super) scheduler: Scheduler,
    now: EngineTime,
    pub(super) step: u32,
    /// By sequence id.
    pub(super) requests: Vec<Replayed<'a>>,
    /// The sequence that has an id now; a finished request's id may be used again.
    pub(super) sequences: FxHashMap<&'a str, SequenceId>,
    pub(super) contents: Contents,
    pub(super) connector: Connector,
    /// Sequences that ended in this step with their blocks kept; the blocks of their computed tokens.
    pub(super) params: Vec<(SequenceId, Vec<u32>, u32)>,
    pub(super) reset_preempted: Vec<SequenceId>,
    pub(super) metrics: EngineMetrics,
}

/// The inputs of a scenario, found without a look at all of them.
#[derive(Debug, Default)]
struct Inputs<'a> {
    by_step: BTreeMap<u32, Vec<&'a Input>>,
    /// Ids and arrivals of all requests, sorted.
    ids: Vec<&'a str>,
    arrivals: Vec<f64>,
}

impl<'a> Inputs<'a> {
    fn new(inputs: &'a [Input]) -> Self {
        let mut these = Self::default();
        for input in inputs {
            these.by_step.entry(input.when().0).or_default().push(input);
            if let Input::Add(add) = input {
                these.ids.push(&add.id);
                these.arrivals.push(add.arrival_time);
            }
        }
        these.ids.sort_unstable();
        these.arrivals.sort_unstable_by(f64::total_cmp);
        these
    }

    /// Those of one step, in order.
    fn of(&self, step: u32) -> impl Iterator<Item = &'a Input> + use<'a> {
        self.by_step.get(&step).cloned().unwrap_or_default().into_iter()
    }

    /// Ids are compared as strings and arrivals as seconds: their ranks have the same order.
    fn ranks(&self, add: &Add) -> (u128, u64) {
        let tie_key = self.ids.partition_point(|id| *id < add.id.as_str()) as u128;
        (tie_key, self.arrivals.partition_point(|arrival| *arrival < add.arrival_time) as u64)
    }
}

/// A request and the tokens that came out.
#[derive(Debug)]
pub(super) struct Replayed<'a> {
    pub(super) add: &'a Add,
    pub(super) tokens: Vec<u32>,
}

impl<'a> Replay<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> Result<Self, Disagreement> {
        let mut scheduler = Scheduler::new(&scenario.config.engine_config())?;
        if scenario.config.kv_events {
            scheduler = scheduler.with_kv_events();
        }
        if scenario.config.kv_role.is_some() {
            scheduler = scheduler.with_connector_log();
        }
        Ok(Self {
            scenario,
            inputs: Inputs::new(&scenario.inputs),
            scheduler,
            // Later than every arrival, which are ranks: the inputs alone say when a request is seen.
            now: EngineTime::from_nanos(scenario.inputs.len() as u64),
            step: 0,
            requests: Vec::new(),
            sequences: FxHashMap::default(),
            contents: Contents::new(scenario.config.block_size),
            connector: Connector::default(),
            params: Vec::new(),
            reset_preempted: Vec::new(),
            metrics: EngineMetrics::default(),
        })
    }

    /// Blocks that can be handed out at all.
    pub(super) fn num_usable_blocks(&self) -> u32 {
        self.scheduler.view().pool().num_usable_blocks()
    }

    /// Whether no input is to come, no request is unfinished and no end is unreported.
    fn is_drained(&self) -> bool {
        let to_come = self.inputs.by_step.range(self.step..).next().is_some();
        let unfinished = (0..self.requests.len() as u64).any(|index| self.is_unfinished(index));
        !to_come && !unfinished && !self.scheduler.view().has_work()
    }

    fn is_unfinished(&self, index: u64) -> bool {
        let state = self.scheduler.view().sequence(SequenceId(index));
        state.is_some_and(|state| !matches!(state.status, SequenceStatus::Held(_)))
    }

    /// Whether the engine has a KV connector, and the recording says what it was asked and told.
    pub(super) fn has_connector(&self) -> bool {
        self.scenario.config.kv_role.is_some()
    }

    fn run_pass(&mut self, step: &mut Step) -> Result<(), Disagreement> {
        // After the inputs, so that no rule about ties between them and a pass comes into play.
        self.now = self.now + Duration::from_nanos(1);
        let pass = self.scheduler.begin_pass(self.now);
        let (schedule, sampled) = match &pass {
            Some(pass) => (self.schedule(pass), self.sampled(pass)),
            // The head of the queue is blocked: the real scheduler plans nothing, and reports no end either.
            None => (self.schedule(&Pass::default()), Vec::new()),
        };
        (step.schedule, step.sampled) = (Some(schedule), Some(sampled));
        step.mid = self.apply_inputs(Phase::Mid)?;
        step.kv_done = self.apply_report()?;
        let effects = match pass {
            Some(pass) => {
                self.now = pass.ends_at();
                Some(self.scheduler.finish_pass(pass, self.now))
            }
            None => self.scheduler.settle(self.now),
        };
        let effects = effects.unwrap_or_else(|| Effects { metrics: self.metrics, ..Effects::default() });
        step.update = Some(self.update(&effects, step.kv_done.is_some()));
        self.metrics = effects.metrics;
        self.scheduler.recycle(effects);
        Ok(())
    }

    fn apply_report(&mut self) -> Result<Option<Report>, Disagreement> {
        let done = self.inputs.of(self.step).find_map(|input| match input {
            Input::KvDone(done) => Some(done),
            _ => None,
        });
        let Some((transfers, report)) = self.take_report(done) else { return Ok(None) };
        self.command(Command::Transfers(transfers))?;
        Ok(Some(report))
    }

    fn apply_inputs(&mut self, phase: Phase) -> Result<Vec<Done>, Disagreement> {
        self.inputs.of(self.step).filter(|input| input.when().1 == phase).map(|input| self.apply(input)).collect()
    }

    fn apply(&mut self, input: &'a Input) -> Result<Done, Disagreement> {
        let done = match input {
            Input::Add(add) => {
                self.add(add)?;
                Done::Add { id: add.id.clone(), connector: Vec::new() }
            }
            Input::Abort(abort) => {
                let aborted = abort.ids.iter().filter(|id| self.abort(id)).cloned().collect();
                Done::Abort { ids: abort.ids.clone(), aborted, connector: Vec::new() }
            }
            Input::ResetPrefixCache(reset) => {
                let reset_running_requests = reset.reset_running_requests;
                let applied = self.command(Command::ResetPrefixCache { reset_running_requests })?;
                let Applied::PrefixCacheReset { reset: result, preempted } = applied else {
                    unreachable!("a reset is answered as a reset, not with {applied:?}");
                };
                self.reset_preempted.extend(&preempted);
                Done::ResetPrefixCache { result, preempted: self.ids(preempted) }
            }
            Input::Pause(_) => {
                self.command(Command::SetScheduling(SchedulingState::Stopped))?;
                Done::Pause {}
            }
            Input::PauseNew(_) => {
                self.command(Command::SetScheduling(SchedulingState::NoNewAdmissions))?;
                Done::PauseNew {}
            }
            Input::Unpause(_) => {
                self.command(Command::SetScheduling(SchedulingState::Running))?;
                Done::Unpause {}
            }
            Input::PendingFrees(frees) => {
                self.command(Command::ExpectFrees(frees.value))?;
                Done::PendingFrees {}
            }
            Input::KvDone(_) => unreachable!("reports come with the output alone"),
        };
        Ok(self.with_calls(done))
    }

    fn command(&mut self, command: Command) -> Result<Applied, Disagreement> {
        let step = self.step;
        self.scheduler.apply(command, self.now).map_err(|refused| Disagreement::Refused { step, refused })
    }

    fn add(&mut self, add: &'a Add) -> Result<(), Disagreement> {
        let sequence = SequenceId(self.requests.len() as u64);
        let (tie_key, arrival) = self.inputs.ranks(add);
        let mut request = Request::new(add.prompt_token_ids.clone(), add.max_tokens)
            .with_output_tokens(add.output_tokens(self.scenario.config.max_model_len))
            .with_arrival(EngineTime::from_nanos(arrival))
            .with_priority(add.priority);
        request.cache_salt = add.cache_salt.as_deref().map(Into::into);
        request.stop_token_ids.clone_from(&add.stop_token_ids);
        request.eos_token_id = add.eos_token_id;
        request.ignore_eos = add.ignore_eos;
        request.min_output_tokens = add.min_tokens;
        request.skip_reading_prefix_cache = add.skip_reading_prefix_cache.unwrap_or(false);
        request.kv_cache_report_mode = add.kv_cache_report_mode;
        let submission = Submission { sequence, tie_key, request };
        self.command(if self.has_connector() {
            Command::SubmitRemote { submission, remote: add.remote_kv() }
        } else {
            Command::Submit(submission)
        })?;
        self.requests.push(Replayed { add, tokens: Vec::new() });
        self.contents.add(&add.id, add.cache_salt.as_deref(), &add.prompt_token_ids);
        self.sequences.insert(&add.id, sequence);
        Ok(())
    }

    /// Whether there was something to abort.
    fn abort(&mut self, id: &str) -> bool {
        let sequence = self.sequences.get(id).copied();
        sequence.is_some_and(|sequence| self.scheduler.cancel(sequence, self.now) == Cancelled::Removed)
    }

    pub(super) fn pool(&self) -> Pool {
        let pool = self.scheduler.view().pool();
        let PoolUse { num_free_blocks, num_used_blocks, kv_usage } = pool_use(pool);
        Pool {
            num_free_blocks,
            num_used_blocks,
            kv_usage,
            free_queue: pool.free_queue().take(FREE_QUEUE_SHOWN).collect(),
            num_cached_hashes: pool.num_cached_hashes(),
            num_blocks_with_hash: pool.num_blocks_with_hash(),
        }
    }

    pub(super) fn add_of(&self, sequence: SequenceId) -> &'a Add {
        self.requests[sequence.0 as usize].add
    }

    pub(super) fn id(&self, sequence: SequenceId) -> String {
        self.add_of(sequence).id.clone()
    }

    pub(super) fn ids(&self, sequences: impl IntoIterator<Item = SequenceId>) -> Vec<String> {
        sequences.into_iter().map(|sequence| self.id(sequence)).collect()
    }

    pub(super) fn ids_of<'v>(&self, sequences: impl Iterator<Item = SequenceView<'v>>) -> Vec<String> {
        self.ids(sequences.map(|sequence| sequence.sequence))
    }
}

impl Replaying for Replay<'_> {
    type Step = Step;
    type End = End;

    fn next_step(&mut self) -> Result<Option<Step>, Disagreement> {
        if self.step >= self.scenario.max_steps || self.is_drained() {
            return Ok(None);
        }
        let mut step = Step {
            kind: StepKind::Step,
            step: self.step,
            pre: self.apply_inputs(Phase::Pre)?,
            idle: false,
            schedule: None,
            sampled: None,
            kv_done: None,
            mid: Vec::new(),
            update: None,
            pool: None,
        };
        if self.scheduler.view().has_work() {
            self.run_pass(&mut step)?;
        } else {
            step.idle = true;
            step.pool = Some(self.pool());
        }
        self.step += 1;
        Ok(Some(step))
    }

    fn end(&self) -> End {
        let reason = if self.is_drained() { EndReason::Drained } else { EndReason::MaxSteps };
        let unfinished = self.requests.iter().zip(0..).filter(|&(_, index)| self.is_unfinished(index));
        End {
            kind: EndKind::End,
            reason,
            steps: self.step,
            unfinished: unfinished.map(|(request, _)| request.add.id.clone()).collect(),
            outputs: self.requests.iter().map(|request| (request.add.id.clone(), request.tokens.clone())).collect(),
        }
    }
}

/// Each id once, as strings are sorted.
pub(super) fn sorted(ids: Vec<String>) -> Vec<String> {
    ids.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

pub(super) fn pool_use(pool: PoolView<'_>) -> PoolUse {
    let (usable, free) = (u64::from(pool.num_usable_blocks()), u64::from(pool.num_free_blocks()));
    let used = usable.saturating_sub(free);
    PoolUse { num_free_blocks: free, num_used_blocks: used, kv_usage: rounded(used as f64 / usable as f64) }
}

/// To nine decimals, as recorded.
pub(super) fn rounded(share: f64) -> f64 {
    (share * 1e9).round() / 1e9
}
