//! Runs a scenario through the pure core and writes down what it decides, in a recording's own types.

use std::time::Duration;

use super::input::{Add, Input, Scenario};
use super::pages::Pages;
use super::step::{Done, End, Finished, Mode, Row, Schedule, Step, Update};
use crate::output::FinishReason;
use crate::replay::recording::check::{Disagreement, Replaying};
use crate::replay::recording::step::{EndKind, EndReason, StepKind};
use crate::request::{Request, SequenceId};
use crate::scheduler::{Applied, Cancelled, Command, Effects, Output, Pass, Scheduler, Submission, TokenPoolView};
use crate::time::EngineTime;

/// The engine loop of a recording, over the pure core.
#[derive(Debug)]
pub(in crate::replay::recording) struct Replay<'a> {
    scenario: &'a Scenario,
    scheduler: Scheduler,
    now: EngineTime,
    step: u32,
    /// The last step found nothing to do.
    was_idle: bool,
    /// By sequence id.
    requests: Vec<Progress<'a>>,
    pages: Pages,
}

/// A request and what came of it.
#[derive(Debug)]
struct Progress<'a> {
    add: &'a Add,
    tokens: Vec<u32>,
    cached_tokens: u32,
    retractions: u32,
    is_finished: bool,
}

impl<'a> Replay<'a> {
    pub(in crate::replay::recording) fn new(scenario: &'a Scenario) -> Result<Self, Disagreement> {
        let mut scheduler = Scheduler::new(&scenario.config.engine_config())?;
        if scenario.config.kv_events {
            scheduler = scheduler.with_kv_events();
        }
        Ok(Self {
            scenario,
            scheduler,
            now: EngineTime::ZERO,
            step: 0,
            was_idle: false,
            requests: Vec::new(),
            pages: Pages::default(),
        })
    }

    fn run_step(&mut self, pre: Vec<Done>) -> Step {
        // After the inputs, so that no rule about ties between them and a pass comes into play.
        self.now = self.now + Duration::from_nanos(1);
        let pass = self.scheduler.begin_pass(self.now);
        let num_events = self.scheduler.view().kv_events().len();
        let mut schedule = self.schedule(pass.as_ref().unwrap_or(&Pass::default()));
        let idle = schedule.mode.is_none().then(|| self.is_idle());
        let effects = match pass {
            Some(pass) => {
                self.now = pass.ends_at();
                Some(self.scheduler.finish_pass(pass, self.now))
            }
            None => self.scheduler.settle(self.now),
        };
        let effects = effects.unwrap_or_default();
        let (planned, later) = effects.kv_events.split_at(num_events);
        schedule.kv_events = self.pages.name(planned);
        let without_token = effects.outputs.iter().filter(|output| output.token.is_none());
        schedule.aborted = without_token.map(|output| self.id(output.sequence)).collect();
        let sampled = schedule.mode.is_some().then(|| self.take_tokens(&effects));
        let mut update = self.update(&schedule, &effects);
        update.kv_events = self.pages.name(later);
        self.scheduler.recycle(effects);
        self.was_idle = idle == Some(true);
        Step { kind: StepKind::Step, step: self.step, pre, schedule, sampled, idle, update }
    }

    fn apply(&mut self, input: &'a Input) -> Result<Done, Disagreement> {
        Ok(match input {
            Input::Add(add) => {
                let sequence = self.add(add)?;
                let limit = self.scheduler.view().sequence(sequence).map(|sequence| sequence.max_output_tokens);
                Done::Add { id: add.id.clone(), max_tokens_capped: limit.filter(|&limit| limit != add.max_tokens) }
            }
            Input::Abort(abort) => {
                let begins = |progress: &Progress<'_>| progress.add.id.starts_with(&abort.id);
                let sequences = (0..).map(SequenceId).zip(&self.requests).filter(|(_, progress)| begins(progress));
                let sequences: Vec<SequenceId> = sequences.map(|(sequence, _)| sequence).collect();
                let mut aborted_from_queue = Vec::new();
                for sequence in sequences {
                    if self.scheduler.cancel(sequence, self.now) == Cancelled::Removed {
                        aborted_from_queue.push(self.id(sequence));
                    }
                }
                Done::Abort { id: abort.id.clone(), aborted_from_queue }
            }
            Input::FlushCache(_) => {
                let applied = self.command(Command::ResetPrefixCache { reset_running_requests: false })?;
                Done::FlushCache { result: matches!(applied, Applied::PrefixCacheReset { reset: true, .. }) }
            }
        })
    }

    fn command(&mut self, command: Command) -> Result<Applied, Disagreement> {
        let step = self.step;
        self.scheduler.apply(command, self.now).map_err(|refused| Disagreement::Refused { step, refused })
    }

    fn add(&mut self, add: &'a Add) -> Result<SequenceId, Disagreement> {
        let sequence = SequenceId(self.requests.len() as u64);
        let mut request = Request::new(add.prompt_token_ids.clone(), add.max_tokens)
            .with_output_tokens(add.output_tokens(self.scenario.config.context_length))
            .with_priority(add.priority.unwrap_or(0));
        request.cache_salt = add.cache_salt.as_deref().map(Into::into);
        request.lora_name = add.extra_key.as_deref().map(Into::into);
        request.stop_token_ids = add.stop_token_ids.iter().chain(&add.eos_token_ids).copied().collect();
        request.ignore_eos = add.ignore_eos;
        self.command(Command::Submit(Submission { sequence, tie_key: 0, request }))?;
        let progress = Progress { add, tokens: Vec::new(), cached_tokens: 0, retractions: 0, is_finished: false };
        self.requests.push(progress);
        Ok(sequence)
    }

    fn schedule(&mut self, pass: &Pass) -> Schedule {
        for admitted in pass.admitted() {
            self.progress(admitted.sequence).cached_tokens = admitted.cached_tokens;
        }
        for &sequence in pass.preempted() {
            self.progress(sequence).retractions += 1;
        }
        let prefill = pass.num_prefill_rows;
        let mode = match pass.rows().len() {
            0 => None,
            _ if prefill == 0 => Some(Mode::Decode),
            rows if rows == prefill => Some(Mode::Extend),
            _ => Some(Mode::Mixed),
        };
        let rows = pass.rows().iter().enumerate().map(|(index, row)| Row {
            id: self.id(row.sequence),
            decode: index >= prefill,
            tokens: row.new_tokens,
            prefix_len: (index < prefill).then_some(row.computed_before),
        });
        let pool = self.pool();
        // A prefill joins the running ones in the next step, and takes those along that decode with it.
        let apart = |sequence| prefill > 0 && pass.rows().iter().any(|row| row.sequence == sequence);
        let running = self.running().into_iter().filter(|&sequence| !apart(sequence) && pool.chunked != Some(sequence));
        Schedule {
            mode,
            retracted: pass.preempted().iter().map(|&sequence| self.id(sequence)).collect(),
            aborted: Vec::new(),
            reqs: mode.is_some().then(|| rows.collect()),
            total_tokens: mode.is_some().then(|| pass.work().total_tokens()),
            waiting: self.waiting(),
            running: running.map(|sequence| self.id(sequence)).collect(),
            chunked: pool.chunked.map(|sequence| self.id(sequence)),
            batch_is_full: pool.batch_is_full,
            available_tokens: pool.available_tokens,
            evictable_tokens: pool.evictable_tokens,
            protected_tokens: pool.protected_tokens,
            new_token_ratio: rounded(pool.new_token_ratio),
            kv_events: Vec::new(),
        }
    }

    /// Takes the tokens of a pass down.
    fn take_tokens(&mut self, effects: &Effects) -> Vec<(String, u32)> {
        let mut sampled = Vec::new();
        for output in &effects.outputs {
            if let Some(token) = output.token {
                self.progress(output.sequence).tokens.push(token);
                sampled.push((self.id(output.sequence), token));
            }
        }
        sampled
    }

    fn update(&mut self, schedule: &Schedule, effects: &Effects) -> Update {
        let ends = effects.outputs.iter().filter(|output| output.token.is_some() && output.finish.is_some());
        let mut ends: Vec<&Output> = ends.collect();
        // The recorder goes through the requests in the order in which they were added.
        ends.sort_by_key(|output| output.sequence);
        let finished: Vec<Finished> = ends.into_iter().map(|output| self.finished(output)).collect();
        let pool = self.pool();
        let rows = schedule.reqs.iter().flatten();
        let prefill: Vec<&String> = rows.filter(|_| schedule.mode != Some(Mode::Decode)).map(|row| &row.id).collect();
        let still: Vec<String> = self.running().into_iter().map(|sequence| self.id(sequence)).collect();
        // The real scheduler drops those that finished when it plans the next batch.
        let left = |id: &&String| still.contains(id) || finished.iter().any(|end| end.id == **id);
        let chunked = pool.chunked.map(|sequence| self.id(sequence));
        let joined =
            |id: &&String| !schedule.running.contains(id) && !prefill.contains(id) && chunked.as_ref() != Some(*id);
        Update {
            waiting: self.waiting(),
            running: schedule.running.iter().filter(left).chain(still.iter().filter(joined)).cloned().collect(),
            chunked,
            batch_is_full: pool.batch_is_full,
            available_tokens: pool.available_tokens,
            evictable_tokens: pool.evictable_tokens,
            protected_tokens: pool.protected_tokens,
            new_token_ratio: rounded(pool.new_token_ratio),
            kv_events: Vec::new(),
            finished,
        }
    }

    fn finished(&mut self, output: &Output) -> Finished {
        let (reason, matched) = match output.finish {
            Some(FinishReason::Stop { .. }) => ("stop".to_owned(), output.token),
            Some(FinishReason::Length) => ("length".to_owned(), None),
            Some(FinishReason::Cancelled) => ("abort".to_owned(), None),
            // SGLang has no word for the others.
            other => (format!("{other:?}"), None),
        };
        let id = self.id(output.sequence);
        let progress = self.progress(output.sequence);
        progress.is_finished = true;
        Finished {
            id,
            reason,
            matched,
            num_output_tokens: progress.tokens.len(),
            cached_tokens: progress.cached_tokens,
            retraction_count: progress.retractions,
        }
    }

    fn is_idle(&self) -> bool {
        let view = self.scheduler.view();
        view.running().next().is_none() && view.waiting().next().is_none()
    }

    fn pool(&self) -> TokenPoolView {
        self.scheduler.view().token_pool().expect("the configuration is SGLang's")
    }

    fn running(&self) -> Vec<SequenceId> {
        self.scheduler.view().running().map(|sequence| sequence.sequence).collect()
    }

    fn waiting(&self) -> Vec<String> {
        self.scheduler.view().waiting().map(|sequence| self.id(sequence.sequence)).collect()
    }

    fn progress(&mut self, sequence: SequenceId) -> &mut Progress<'a> {
        &mut self.requests[sequence.0 as usize]
    }

    fn id(&self, sequence: SequenceId) -> String {
        self.requests[sequence.0 as usize].add.id.clone()
    }
}

impl Replaying for Replay<'_> {
    type Step = Step;
    type End = End;

    fn next_step(&mut self) -> Result<Option<Step>, Disagreement> {
        if self.step >= self.scenario.max_steps || self.is_drained() {
            return Ok(None);
        }
        let (scenario, step) = (self.scenario, self.step);
        let inputs = scenario.inputs.iter().filter(|input| input.step() == step);
        let pre = inputs.map(|input| self.apply(input)).collect::<Result<_, _>>()?;
        let step = self.run_step(pre);
        self.step += 1;
        Ok(Some(step))
    }

    fn end(&self) -> End {
        let reason = if self.is_drained() { EndReason::Drained } else { EndReason::MaxSteps };
        let unfinished = self.requests.iter().filter(|progress| !progress.is_finished);
        let outputs = self.requests.iter().map(|progress| (progress.add.id.clone(), progress.tokens.clone()));
        End {
            kind: EndKind::End,
            reason,
            steps: self.step,
            unfinished: unfinished.map(|progress| progress.add.id.clone()).collect(),
            outputs: outputs.collect(),
        }
    }
}

impl Replay<'_> {
    /// Whether no input is to come and the last step found nothing to do.
    fn is_drained(&self) -> bool {
        self.was_idle && !self.scenario.inputs.iter().any(|input| input.step() >= self.step)
    }
}

/// To twelve decimals, as recorded.
fn rounded(ratio: f64) -> f64 {
    (ratio * 1e12).round() / 1e12
}
