//! The check: a replay beside its recording.

use std::fmt;

use serde::Serialize;
use serde_json::json;

use super::difference::{Difference, differences};
use super::replay::Replay;
use super::{Lines, Recorded, Recording, sglang};
use crate::error::{CommandError, ConfigError};

/// Steps that are shown before the one that differs.
const STEPS_BEFORE: usize = 3;
/// Differences of a step that are shown; the first causes the others.
const DIFFERENCES_SHOWN: usize = 8;

/// How a replay parted from its recording.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Disagreement {
    /// The real engine ran with this configuration, this one cannot.
    #[error("the configuration is refused: {0}")]
    Config(#[from] ConfigError),
    /// The real engine took an input, this one refuses it.
    #[error("step {step}: an input is refused: {refused}")]
    Refused {
        /// The step of the input.
        step: u32,
        /// Why.
        refused: CommandError,
    },
    /// A recorded value is not what the replay gave.
    #[error("{0}")]
    Differs(Box<Mismatch>),
}

/// The first line of a recording that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Which one.
    pub place: Place,
    /// Every field in which it differs, those that were decided first at the front.
    pub differences: Vec<Difference>,
    /// The recorded steps before it in short.
    pub before: Vec<String>,
}

/// A line of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The scenario, the first line.
    Scenario,
    /// A step.
    Step(u32),
    /// The end, the last line.
    End,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scenario => f.write_str("scenario"),
            Self::Step(step) => write!(f, "step {step}"),
            Self::End => f.write_str("end"),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} differing", self.place, self.differences.len())?;
        for difference in self.differences.iter().take(DIFFERENCES_SHOWN) {
            write!(f, "\n{difference}")?;
        }
        if self.differences.len() > DIFFERENCES_SHOWN {
            write!(f, "\n  … and {} more", self.differences.len() - DIFFERENCES_SHOWN)?;
        }
        for step in &self.before {
            write!(f, "\n  before: {step}")?;
        }
        Ok(())
    }
}

/// A step of a recording.
pub(super) trait StepLine: PartialEq + Serialize {
    /// Its number, from 0.
    fn number(&self) -> u32;

    /// One line about it.
    fn in_short(&self) -> String;
}

/// A scenario on its way through the pure core.
pub(super) trait Replaying {
    type Step: StepLine;
    type End: PartialEq + Serialize;

    /// The next step; `None` when there is none.
    fn next_step(&mut self) -> Result<Option<Self::Step>, Disagreement>;

    /// How it ended, once there is no next step.
    fn end(&self) -> Self::End;
}

impl Recording {
    /// Replays the inputs through the pure core and compares every recorded value.
    ///
    /// # Errors
    /// The first line that differs, and in what.
    pub fn check(&self) -> Result<(), Disagreement> {
        match &self.lines {
            Lines::Vllm(recorded) => {
                let replay = Replay::new(&recorded.scenario)?;
                let config = |usable: u32| json!({"config": {"usable_gpu_blocks": usable}});
                let expected = config(recorded.scenario.config.usable_gpu_blocks);
                recorded.compare(Place::Scenario, Some(&expected), Some(&config(replay.num_usable_blocks())))?;
                recorded.check(replay)
            }
            Lines::Sglang(recorded) => recorded.check(sglang::Replay::new(&recorded.scenario)?),
        }
    }
}

impl<S, T: StepLine, E: PartialEq + Serialize> Recorded<S, T, E> {
    fn check(&self, mut replay: impl Replaying<Step = T, End = E>) -> Result<(), Disagreement> {
        for recorded in &self.steps {
            let replayed = replay.next_step()?;
            self.compare(Place::Step(recorded.number()), Some(recorded), replayed.as_ref())?;
        }
        if let Some(step) = replay.next_step()? {
            self.compare(Place::Step(step.number()), None, Some(&step))?;
        }
        self.compare(Place::End, Some(&self.end), Some(&replay.end()))
    }

    fn compare<V: PartialEq + Serialize>(
        &self,
        place: Place,
        expected: Option<&V>,
        got: Option<&V>,
    ) -> Result<(), Disagreement> {
        if expected == got {
            return Ok(());
        }
        let value = |side: Option<&V>| serde_json::to_value(side).expect("the types of a recording are plain data");
        let mut differences = differences(&value(expected), &value(got));
        differences.sort_by_key(|difference| decided(&difference.path));
        let end = match place {
            Place::Scenario => 0,
            Place::Step(step) => self.steps.len().min(step as usize),
            Place::End => self.steps.len(),
        };
        let before = self.steps[end.saturating_sub(STEPS_BEFORE)..end].iter().map(StepLine::in_short).collect();
        Err(Disagreement::Differs(Box::new(Mismatch { place, differences, before })))
    }
}

/// Rank of a field in the order in which a step decides.
fn decided(path: &str) -> usize {
    let part = path.split('/').nth(1).unwrap_or_default();
    ["pre", "idle", "schedule", "sampled", "mid", "update"].iter().position(|&name| name == part).unwrap_or(usize::MAX)
}
