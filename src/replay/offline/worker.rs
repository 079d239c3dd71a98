//! One engine of an offline run.

use rustc_hash::FxHashMap;

use crate::config::EngineConfig;
use crate::error::ConfigError;
use crate::metrics::EngineMetrics;
use crate::request::{Request, SequenceId};
use crate::scheduler::{Command, Effects, Pass, Scheduler, Submission};
use crate::time::EngineTime;

use super::super::{Recorder, RequestRecord};
use super::router::Load;

/// A scheduler and its place in time.
pub(super) struct Worker {
    scheduler: Scheduler,
    in_flight: Option<Box<Pass>>,
    /// No pass begins before: the end of the start-up, or of the last pass.
    free_at: EngineTime,
    records: FxHashMap<SequenceId, RequestRecord>,
    load: Load,
    num_ahead: usize,
    /// Passes and preemptions, as the last boundary showed them.
    counts: (u64, u64),
}

impl Worker {
    pub(super) fn new(config: &EngineConfig) -> Result<Self, ConfigError> {
        Ok(Self {
            scheduler: Scheduler::new(config)?,
            in_flight: None,
            free_at: EngineTime::from(config.speedup.scale(config.startup)),
            records: FxHashMap::default(),
            load: Load::default(),
            num_ahead: 0,
            counts: (0, 0),
        })
    }

    pub(super) fn load(&self) -> Load {
        self.load
    }

    /// Requests that were submitted since it last advanced.
    pub(super) fn num_ahead(&self) -> usize {
        self.num_ahead
    }

    /// Adds its passes and preemptions.
    pub(super) fn add_counts(&self, metrics: &mut EngineMetrics) {
        metrics.num_passes += self.counts.0;
        metrics.num_preemptions += self.counts.1;
    }

    /// Takes a request in, which was validated against the configuration, under a new number. `false`: it was refused
    /// all the same, as its prompt says another length now.
    #[must_use]
    pub(super) fn submit(&mut self, number: u64, request: Request, arrival: EngineTime, prompt_tokens: u32) -> bool {
        let sequence = SequenceId(number);
        let submission = Submission { sequence, tie_key: number.into(), request };
        if self.scheduler.apply(Command::Submit(submission), arrival).is_err() {
            return false;
        }
        self.records.insert(sequence, RequestRecord::new(arrival, prompt_tokens));
        self.num_ahead += 1;
        self.load.active_requests += 1;
        self.load.held_tokens += u64::from(prompt_tokens);
        true
    }

    /// Carries out everything up to the boundaries at `to`. Who arrives at `to` has yet to be submitted, so
    /// an idle engine does not begin there; but for the end of time, after which nobody comes.
    pub(super) fn advance(&mut self, to: EngineTime, recorder: &mut Recorder) {
        self.num_ahead = 0;
        loop {
            if let Some(pass) = self.in_flight.take_if(|pass| pass.ends_at() <= to) {
                self.free_at = pass.ends_at();
                self.finish(pass, recorder);
                self.begin(self.free_at);
            }
            if let Some(pass) = &self.in_flight {
                if pass.ends_at() <= to {
                    continue;
                }
                return;
            }
            match self.scheduler.next_deadline() {
                Some(arrival) if arrival < to || to == EngineTime::MAX => {
                    self.begin(arrival.max(self.free_at));
                    if self.in_flight.is_none() && self.scheduler.next_deadline() == Some(arrival) {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    fn begin(&mut self, at: EngineTime) {
        self.in_flight = self.scheduler.begin_pass_boxed(at);
        for admitted in self.in_flight.iter().flat_map(|pass| pass.admitted()) {
            if let Some(record) = self.records.get_mut(&admitted.sequence) {
                record.admitted(at, admitted.cached_tokens);
            }
        }
    }

    fn finish(&mut self, pass: Box<Pass>, recorder: &mut Recorder) {
        let effects = self.scheduler.finish_pass_boxed(pass, self.free_at);
        self.show(&effects, recorder);
        self.counts = (effects.metrics.num_passes, effects.metrics.num_preemptions);
        self.scheduler.recycle_boxed(effects);
    }

    fn show(&mut self, effects: &Effects, recorder: &mut Recorder) {
        let at = effects.at;
        // Nearly all of a pass waited equally long: for the pass.
        let mut alike = (std::time::Duration::ZERO, 0);
        for output in &effects.outputs {
            let Some(record) = self.records.get_mut(&output.sequence) else { continue };
            if output.token.is_some() {
                self.load.held_tokens += 1;
                match record.count_token(at) {
                    Some(gap) if gap == alike.0 => alike.1 += 1,
                    Some(gap) => {
                        recorder.gaps(alike.0, alike.1);
                        alike = (gap, 1);
                    }
                    None => {}
                }
            }
            if let Some(reason) = output.finish {
                recorder.ended(record, at, reason);
                self.load.active_requests -= 1;
                self.load.held_tokens -= record.tokens();
                self.records.remove(&output.sequence);
            }
        }
        recorder.gaps(alike.0, alike.1);
    }
}
