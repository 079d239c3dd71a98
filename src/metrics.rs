//! Metrics: one snapshot of an engine per boundary, and one record per pass.

use crate::time::EngineTime;

/// Look-ups in the prefix cache, in tokens. Requests that were preempted are counted apart, so
/// that recomputing does not inflate the hit rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PrefixCacheStats {
    /// First admissions.
    pub requests: u64,
    /// Their tokens.
    pub queries: u64,
    /// Those found in the cache.
    pub hits: u64,
    /// Admissions after a preemption.
    pub preempted_requests: u64,
    /// Their tokens.
    pub preempted_queries: u64,
    /// Those found in the cache.
    pub preempted_hits: u64,
}

impl PrefixCacheStats {
    /// Counts one admission.
    pub(crate) fn count(&mut self, preempted: bool, queries: u64, hits: u64) {
        if preempted {
            self.preempted_requests += 1;
            self.preempted_queries += queries;
            self.preempted_hits += hits;
        } else {
            self.requests += 1;
            self.queries += queries;
            self.hits += hits;
        }
    }

    /// Adds `other`'s counts.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.queries += other.queries;
        self.hits += other.hits;
        self.preempted_requests += other.preempted_requests;
        self.preempted_queries += other.preempted_queries;
        self.preempted_hits += other.preempted_hits;
    }
}

/// Ended requests by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct FinishedCounts {
    /// By a stop or end token.
    pub stop: u64,
    /// By length.
    pub length: u64,
    /// Cancelled, dropped or cut off because their reader was slow.
    pub aborted: u64,
    /// Outgrew the pool.
    pub out_of_memory: u64,
    /// The load of their KV failed, and the policy ends a request for that.
    pub transfer_failed: u64,
}

/// Waiting requests by the stage of their load from another engine (vLLM's
/// `num_requests_kv_fetch_by_stage`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct KvFetchCounts {
    /// They wait for blocks, or for the other engine's answer.
    pub waiting_to_start: u64,
    /// KV is loaded into their blocks.
    pub in_progress: u64,
    /// It has been, and they wait for a place in a pass.
    pub completed_waiting: u64,
}

/// The state of an engine at a boundary. Counters never go back.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct EngineMetrics {
    /// The boundary.
    pub at: EngineTime,
    /// Data-parallel rank of the engine.
    pub dp_rank: u32,
    /// Requests that hold a place in the batch.
    pub num_requests_running: u64,
    /// Requests in the waiting queue, preempted ones and those that hold loaded blocks included; those that
    /// arrive later are not.
    pub num_requests_waiting: u64,
    /// Of these, requests that were passed over: those whose load is not through or not decided.
    pub num_requests_deferred: u64,
    /// Waiting requests whose KV is loaded from another engine, by stage.
    pub kv_fetch: KvFetchCounts,
    /// Ended requests whose blocks stay: held sources, and destinations that were given up during their transfer.
    pub num_requests_held: u64,
    /// KV blocks that can be handed out at all.
    pub num_usable_blocks: u64,
    /// KV blocks owned by a request.
    pub num_used_blocks: u64,
    /// Of these, blocks of ended requests; one that several of them own counts for each.
    pub num_held_blocks: u64,
    /// Of these, blocks of waiting requests, reserved for KV from another engine; likewise.
    pub num_reserved_blocks: u64,
    /// KV blocks that hold a findable content, owned or free.
    pub num_cached_blocks: u64,
    /// Used share of the usable blocks, 0 to 1.
    pub kv_cache_usage: f64,
    /// Passes that computed something.
    pub num_passes: u64,
    /// Preemptions.
    pub num_preemptions: u64,
    /// Prompt tokens of admitted requests, each request once.
    pub prompt_tokens: u64,
    /// Output tokens produced.
    pub generation_tokens: u64,
    /// Prefix-cache look-ups.
    pub prefix_cache: PrefixCacheStats,
    /// Prompt tokens that the last prefill batch found in the cache (SGLang kind). It stays until the next one.
    pub last_prefill_cached_tokens: u64,
    /// Tokens that the last prefill batch computed (SGLang kind).
    pub last_prefill_new_tokens: u64,
    /// Look-ups at another engine, of the tokens that the prefix cache did not have.
    pub remote_cache: PrefixCacheStats,
    /// Ended requests.
    pub finished: FinishedCounts,
    /// Held sources whose lease ended.
    pub expired_leases: u64,
    /// Blocks of given-up destinations that were freed without a word of their transfer's end, by request.
    pub expired_guards: u64,
    /// Requests cut off because their reader left the queue full (counted by the live engine).
    pub slow_consumers: u64,
    /// Errors that sinks returned (counted by the live engine).
    pub sink_errors: u64,
    /// Handoff facts that nobody listened to (counted by the live engine).
    pub dropped_handoff_facts: u64,
}

/// Number, sum and variance of a quantity over requests. Sums that grow too large saturate; those of four billion
/// token counts, each a `u32`, do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moments {
    count: u64,
    sum: u64,
    sum_of_squares: u128,
}

impl Moments {
    /// Adds one value.
    pub fn add(&mut self, value: u64) {
        self.count = self.count.saturating_add(1);
        self.sum = self.sum.saturating_add(value);
        self.sum_of_squares = self.sum_of_squares.saturating_add(u128::from(value) * u128::from(value));
    }

    /// Adds many values, whose sum is known.
    pub(crate) fn add_all(&mut self, values: &[u32], sum: u64) {
        debug_assert_eq!(values.iter().map(|&value| u64::from(value)).sum::<u64>(), sum);
        let square = |value: u32| u64::from(value) * u64::from(value);
        self.count += values.len() as u64;
        self.sum += sum;
        self.sum_of_squares += if sum <= u64::from(u32::MAX) {
            // The squares add up to at most the square of the sum, which fits.
            values.iter().map(|&value| square(value)).sum::<u64>().into()
        } else {
            values.iter().map(|&value| u128::from(square(value))).sum::<u128>()
        };
    }

    /// Takes one value out that was added before.
    pub fn remove(&mut self, value: u64) {
        self.count = self.count.saturating_sub(1);
        self.sum = self.sum.saturating_sub(value);
        self.sum_of_squares = self.sum_of_squares.saturating_sub(u128::from(value) * u128::from(value));
    }

    /// How many values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their sum.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Their population variance; 0 for none.
    #[must_use]
    pub fn variance(&self) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        // n·Σx² − (Σx)² is exact in integers and never negative.
        let (n, sum) = (u128::from(self.count), u128::from(self.sum));
        let scaled = n.saturating_mul(self.sum_of_squares).saturating_sub(sum * sum);
        scaled as f64 / (n as f64 * n as f64)
    }
}

/// What one pass did, in the quantities that forward-pass metrics are published in.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PassMetrics {
    /// Number of the pass, from 0.
    pub pass: u64,
    /// When it began.
    pub started_at: EngineTime,
    /// When it ended.
    pub ended_at: EngineTime,
    /// Prefill chunks.
    pub num_prefill_requests: u64,
    /// New tokens of all chunks.
    pub sum_prefill_tokens: u64,
    /// Population variance of the chunks' new tokens.
    pub var_prefill_tokens: f64,
    /// Tokens that the chunks found computed before them, in the cache or by earlier chunks.
    pub sum_prefill_kv_tokens: u64,
    /// Decode rows.
    pub num_decode_requests: u64,
    /// KV tokens that the decode rows read.
    pub sum_decode_kv_tokens: u64,
    /// Population variance of the decode rows' KV tokens.
    pub var_decode_kv_tokens: f64,
    /// Requests left in the queue that never ran.
    pub num_queued_prefill: u64,
    /// Their tokens.
    pub sum_queued_prefill_tokens: u64,
    /// Population variance of their tokens.
    pub var_queued_prefill_tokens: f64,
    /// Preempted requests left in the queue.
    pub num_queued_decode: u64,
    /// Their tokens, outputs included.
    pub sum_queued_decode_tokens: u64,
    /// Population variance of their tokens.
    pub var_queued_decode_tokens: f64,
    /// Preemptions that this pass made.
    pub num_preemptions: u64,
    /// Prefix-cache look-ups of its admissions.
    pub prefix_cache: PrefixCacheStats,
}

impl PassMetrics {
    /// How long the pass took in engine time.
    #[must_use]
    pub fn duration(&self) -> std::time::Duration {
        self.ended_at.saturating_since(self.started_at)
    }
}
