//! The other lines of a recording: what an engine did in a step, and how it ended.
//!
//! The replay fills in the very types that the reader reads, so a field that is recorded is compared.
//! Ids of requests stand for sequences, and `(id, block index)` of the request that had it first for a
//! block's content.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::check::StepLine;

/// One step of the engine loop: idle with its `pool`, or `schedule`, `sampled` and `update`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Step {
    pub(super) kind: StepKind,
    pub(super) step: u32,
    /// Inputs that were applied before the pass was planned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) pre: Vec<Done>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) idle: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) schedule: Option<Schedule>,
    /// The tokens of the requests whose tokens are all computed after this pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sampled: Option<Vec<(String, u32)>>,
    /// What was reported about transfers with the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kv_done: Option<Report>,
    /// Inputs that were applied while the pass was in flight.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) mid: Vec<Done>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) update: Option<Update>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) pool: Option<Pool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StepKind {
    Step,
}

/// An input with its result.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Done {
    Add {
        id: String,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        connector: Vec<Call>,
    },
    Abort {
        ids: Vec<String>,
        /// Those that were there to be aborted.
        aborted: Vec<String>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        connector: Vec<Call>,
    },
    ResetPrefixCache {
        result: bool,
        preempted: Vec<String>,
    },
    Pause {},
    PauseNew {},
    Unpause {},
    PendingFrees {},
}

impl StepLine for Step {
    fn number(&self) -> u32 {
        self.step
    }

    /// One line about it.
    fn in_short(&self) -> String {
        let mut parts: Vec<String> = self.pre.iter().chain(&self.mid).map(Done::to_string).collect();
        if self.idle {
            parts.push("idle".to_owned());
        }
        if let Some(schedule) = &self.schedule {
            let rows: Vec<String> =
                schedule.num_scheduled_tokens.iter().map(|(id, tokens)| format!("{id}:{tokens}")).collect();
            let lists = [
                ("scheduled", &rows),
                ("preempted", &schedule.preempted_reported),
                ("ended", &schedule.finished_req_ids),
                ("running", &schedule.running),
                ("waiting", &schedule.waiting),
            ];
            let lists = lists.iter().filter(|(_, ids)| !ids.is_empty());
            parts.extend(lists.map(|(name, ids)| format!("{name} {}", ids.join(" "))));
            parts.push(format!("{} blocks free", schedule.pool.num_free_blocks));
        }
        format!("step {}: {}", self.step, parts.join(", "))
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add { id, .. } => write!(f, "add {id}"),
            Self::Abort { ids, .. } => write!(f, "abort {}", ids.join(" ")),
            Self::ResetPrefixCache { result, .. } => write!(f, "reset of the prefix cache ({result})"),
            Self::Pause {} => f.write_str("pause"),
            Self::PauseNew {} => f.write_str("pause admissions"),
            Self::Unpause {} => f.write_str("unpause"),
            Self::PendingFrees {} => f.write_str("pending frees"),
        }
    }
}

/// What was planned.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Schedule {
    pub(super) num_scheduled_tokens: Vec<(String, u32)>,
    pub(super) total_num_scheduled_tokens: u64,
    pub(super) new: Vec<NewRow>,
    pub(super) resumed: Vec<ResumedRow>,
    pub(super) running_scheduled: Vec<RunningRow>,
    /// Preempted while this was planned, in order.
    pub(super) preempted: Vec<String>,
    /// The same and those that a reset preempted since the last plan, sorted.
    pub(super) preempted_reported: Vec<String>,
    /// Ended since the last plan, sorted.
    pub(super) finished_req_ids: Vec<String>,
    /// Calls on the connector; this and the other options are there if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) connector: Option<Vec<Call>>,
    /// A load within the step is among these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sync_loads: Option<bool>,
    pub(super) running: Vec<String>,
    pub(super) waiting: Vec<String>,
    /// The queue of those that hold blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kv_holding_waiting: Option<Vec<String>>,
    /// Those that were passed over, sorted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) deferred: Option<Vec<String>>,
    pub(super) pool: PoolUse,
}

/// A call on the connector.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "call", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Call {
    OnNewRequest {
        id: String,
    },
    GetNumNewMatchedTokens {
        id: String,
        num_computed_tokens: u32,
        /// Tokens, null for "ask again", and whether they are loaded between steps.
        answer: (Option<u32>, bool),
    },
    UpdateStateAfterAlloc {
        id: String,
        block_ids: Vec<u32>,
        num_external_tokens: u32,
    },
    BuildConnectorMeta {},
    RequestFinished {
        id: String,
        status: FinishedStatus,
        block_ids: Vec<u32>,
        delay_free: bool,
    },
    UpdateConnectorOutput {},
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub(super) enum FinishedStatus {
    #[serde(rename = "FINISHED_STOPPED")]
    Stopped,
    #[serde(rename = "FINISHED_LENGTH_CAPPED")]
    LengthCapped,
    #[serde(rename = "FINISHED_ABORTED")]
    Aborted,
    #[serde(rename = "FINISHED_ERROR")]
    Error,
}

/// What was reported about transfers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Report {
    pub(super) sent: Vec<String>,
    pub(super) received: Vec<String>,
    pub(super) failed: Vec<String>,
    pub(super) invalid_blocks: Vec<(String, u32)>,
    pub(super) invalid_block_ids: Vec<u32>,
}

/// A first admission.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewRow {
    pub(super) id: String,
    pub(super) num_computed_tokens: u32,
    pub(super) num_blocks: u32,
    pub(super) block_ids: Vec<u32>,
}

/// An admission after a preemption.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ResumedRow {
    pub(super) id: String,
    pub(super) num_computed_tokens: u32,
    pub(super) num_output_tokens: u32,
    pub(super) num_blocks: u32,
    pub(super) block_ids: Vec<u32>,
}

/// A request that was running already.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunningRow {
    pub(super) id: String,
    pub(super) num_computed_tokens: u32,
    pub(super) num_output_tokens: u32,
    pub(super) num_new_blocks: u32,
    pub(super) new_block_ids: Vec<u32>,
}

/// How full the block pool is.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PoolUse {
    pub(super) num_free_blocks: u64,
    pub(super) num_used_blocks: u64,
    /// Used share of the usable blocks, rounded to nine decimals.
    pub(super) kv_usage: f64,
}

/// How full it is, and what is in it.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pool {
    pub(super) num_free_blocks: u64,
    pub(super) num_used_blocks: u64,
    pub(super) kv_usage: f64,
    /// Next to be handed out first, cut at 64.
    pub(super) free_queue: Vec<u32>,
    pub(super) num_cached_hashes: usize,
    pub(super) num_blocks_with_hash: usize,
}

/// What the pass did.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Update {
    pub(super) outputs: Vec<Output>,
    pub(super) running: Vec<String>,
    pub(super) waiting: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kv_holding_waiting: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) deferred: Option<Vec<String>>,
    /// Every unfinished request that has run, in the order in which they were added.
    pub(super) requests: Vec<RequestState>,
    pub(super) pool: Pool,
    pub(super) stats: Stats,
    /// Those that have ended while their blocks are held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) held: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) connector: Option<Vec<Call>>,
    pub(super) kv_events: Vec<Event>,
}

/// What one request got.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Output {
    pub(super) id: String,
    pub(super) new_token_ids: Vec<u32>,
    #[serde(deserialize_with = "present")]
    pub(super) finish_reason: Option<String>,
    #[serde(deserialize_with = "present")]
    pub(super) stop_reason: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) prefill_stats: Option<Prefill>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kv_transfer_params: Option<KvTransferParams>,
}

/// What a source hands on.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KvTransferParams {
    pub(super) do_remote_prefill: bool,
    pub(super) remote_block_ids: Vec<u32>,
    pub(super) remote_num_tokens: u32,
    /// Its own prefix hit, if this is its first output too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) remote_prefill_cached_tokens: Option<u32>,
}

/// Counts of a prefill, with the first token.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Prefill {
    pub(super) num_prompt_tokens: u32,
    pub(super) num_computed_tokens: u32,
    pub(super) num_cached_tokens: u32,
    pub(super) num_cache_creation_tokens: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) num_local_cached_tokens: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) num_external_cached_tokens: Option<u32>,
}

/// One request after the update.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RequestState {
    pub(super) id: String,
    pub(super) status: Status,
    pub(super) num_computed_tokens: u32,
    pub(super) num_tokens: u32,
    pub(super) num_output_tokens: u32,
    pub(super) num_blocks: usize,
    pub(super) num_preemptions: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) block_ids: Option<Vec<u32>>,
}

/// Where a request is that has run or holds blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(untagged)]
pub(super) enum Status {
    Alive(AliveStatus),
    Finished(FinishedStatus),
}

/// Where one is that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub(super) enum AliveStatus {
    Waiting,
    WaitingForRemoteKvs,
    Running,
    Preempted,
}

/// Statistics of the step.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stats {
    pub(super) num_running_reqs: u64,
    /// Without those that are passed over.
    pub(super) num_waiting_reqs: u64,
    pub(super) num_skipped_waiting_reqs: u64,
    pub(super) prefix_cache: PrefixCache,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kv_fetch: Option<KvFetch>,
    /// Look-ups at the connector, counted where blocks were given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) connector_cache: Option<PrefixCache>,
}

/// Requests by the stage of their load.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KvFetch {
    pub(super) waiting_to_start: u64,
    pub(super) in_progress: u64,
    pub(super) completed_waiting: u64,
}

/// Look-ups in the prefix cache by the admissions of the step.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PrefixCache {
    pub(super) requests: u64,
    pub(super) queries: u64,
    pub(super) hits: u64,
    pub(super) preempted_requests: u64,
    pub(super) preempted_queries: u64,
    pub(super) preempted_hits: u64,
}

/// The name of a block's content: the request that had it first, and the index of its block.
pub(super) type Content = (String, u32);

/// A KV event.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", deny_unknown_fields)]
pub(super) enum Event {
    BlockStored {
        num_blocks: usize,
        block_size: u32,
        blocks: Vec<Content>,
        #[serde(deserialize_with = "present")]
        parent: Option<Content>,
        token_ids: Vec<u32>,
        /// What beside the tokens is in each block's hash, if there is anything.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<Vec<String>>>>,
        /// Who stored them; this and what follows is left out where a reused prefix is only repeated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        req: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        first_block_index: Option<u32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        block_ids: Option<Vec<u32>>,
    },
    BlockRemoved {
        blocks: Vec<Content>,
        block_ids: Vec<u32>,
    },
    AllBlocksCleared {},
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct End {
    pub(super) kind: EndKind,
    pub(super) reason: EndReason,
    pub(super) steps: u32,
    /// In the order in which they were added.
    pub(super) unfinished: Vec<String>,
    /// All output tokens of every request.
    #[serde(deserialize_with = "unique")]
    pub(super) outputs: BTreeMap<String, Vec<u32>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum EndKind {
    End,
}

/// Why nothing follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum EndReason {
    /// No inputs and no requests were left.
    Drained,
    /// The scenario's limit.
    MaxSteps,
}

/// A map in which no key comes twice; serde's own would keep the last of two.
fn unique<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, T>, D::Error> {
    struct Unique<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Unique<T> {
        type Value = BTreeMap<String, T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some((key, value)) = entries.next_entry::<String, T>()? {
                if map.contains_key(&key) {
                    return Err(A::Error::custom(format!("{key:?} is there twice")));
                }
                map.insert(key, value);
            }
            Ok(map)
        }
    }
    deserializer.deserialize_map(Unique(PhantomData))
}

/// A field that may be null but not left out; serde's default would take the one for the other.
pub(super) fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    Option::deserialize(deserializer)
}
