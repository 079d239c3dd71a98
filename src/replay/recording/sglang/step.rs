//! The other lines: what an engine did in a step, and how it ended.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::replay::recording::check::StepLine;
use crate::replay::recording::step::{StepKind, present};

pub(in crate::replay::recording) use crate::replay::recording::step::End;

/// One turn of the engine loop.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(in crate::replay::recording) struct Step {
    pub(super) kind: StepKind,
    pub(super) step: u32,
    /// Inputs that were applied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) pre: Vec<Done>,
    pub(super) schedule: Schedule,
    /// The tokens that were taken, if there was a batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sampled: Option<Vec<(String, u32)>>,
    /// Without a batch: whether nobody waited or ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) idle: Option<bool>,
    pub(super) update: Update,
}

impl StepLine for Step {
    fn number(&self) -> u32 {
        self.step
    }

    /// One line about it.
    fn in_short(&self) -> String {
        let Schedule { mode, retracted, reqs, waiting, running, available_tokens, evictable_tokens, .. } =
            &self.schedule;
        let mut parts: Vec<String> = self.pre.iter().map(Done::to_string).collect();
        let rows: Vec<String> = reqs.iter().flatten().map(|req| format!("{}:{}", req.id, req.tokens)).collect();
        let mode = mode.map_or("no batch", Mode::name);
        let lists = [(mode, &rows), ("retracted", retracted), ("running", running), ("waiting", waiting)];
        let lists = lists.iter().filter(|(name, ids)| !ids.is_empty() || *name == mode);
        parts.extend(lists.map(|(name, ids)| format!("{name} {}", ids.join(" "))));
        parts.push(format!("{available_tokens} tokens free, {evictable_tokens} evictable"));
        format!("step {}: {}", self.step, parts.join(", "))
    }
}

/// An input with its result.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Done {
    Add {
        id: String,
        /// The limit on output tokens, where it was cut.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_tokens_capped: Option<u32>,
    },
    Abort {
        id: String,
        /// Those that waited and left at once.
        aborted_from_queue: Vec<String>,
    },
    FlushCache {
        result: bool,
    },
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add { id, .. } => write!(f, "add {id}"),
            Self::Abort { id, .. } => write!(f, "abort {id}"),
            Self::FlushCache { result } => write!(f, "flush ({result})"),
        }
    }
}

/// What kind of batch runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mode {
    /// Prefill alone.
    Extend,
    Decode,
    /// Prefill, and decodes that ride along.
    Mixed,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Extend => "extend",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
        }
    }
}

/// The batch, and the state after it was made.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Schedule {
    #[serde(deserialize_with = "present")]
    pub(super) mode: Option<Mode>,
    /// Retracted or preempted for it, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) retracted: Vec<String>,
    /// Ended for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) aborted: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) reqs: Option<Vec<Row>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) total_tokens: Option<u64>,
    pub(super) waiting: Vec<String>,
    pub(super) running: Vec<String>,
    #[serde(deserialize_with = "present")]
    pub(super) chunked: Option<String>,
    pub(super) batch_is_full: bool,
    pub(super) available_tokens: u64,
    pub(super) evictable_tokens: u64,
    pub(super) protected_tokens: u64,
    pub(super) new_token_ratio: f64,
    pub(super) kv_events: Vec<Event>,
}

/// A request in the batch.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Row {
    pub(super) id: String,
    pub(super) decode: bool,
    pub(super) tokens: u32,
    /// Of a prefill: tokens in the cache, or computed by earlier chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) prefix_len: Option<u32>,
}

/// What came of it, and the state after that.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Update {
    pub(super) finished: Vec<Finished>,
    pub(super) waiting: Vec<String>,
    pub(super) running: Vec<String>,
    #[serde(deserialize_with = "present")]
    pub(super) chunked: Option<String>,
    pub(super) batch_is_full: bool,
    pub(super) available_tokens: u64,
    pub(super) evictable_tokens: u64,
    pub(super) protected_tokens: u64,
    pub(super) new_token_ratio: f64,
    pub(super) kv_events: Vec<Event>,
}

/// A request that finished.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Finished {
    pub(super) id: String,
    pub(super) reason: String,
    /// The token that matched a stop or end token.
    #[serde(deserialize_with = "present")]
    pub(super) matched: Option<u32>,
    pub(super) num_output_tokens: usize,
    pub(super) cached_tokens: u32,
    pub(super) retraction_count: u32,
}

/// A KV event. Pages are numbered in the order in which their content first appears.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", deny_unknown_fields)]
pub(super) enum Event {
    BlockStored {
        num_blocks: usize,
        block_size: u32,
        token_ids: Vec<u32>,
        blocks: Vec<usize>,
        #[serde(deserialize_with = "present")]
        parent: Option<usize>,
    },
    /// Evictions that follow each other are one event.
    BlockRemoved {
        blocks: Vec<usize>,
    },
    AllBlocksCleared {},
}
