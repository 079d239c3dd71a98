//! What a pass did, in a recording's own types.

use super::replay::{Replay, rounded};
use super::step::{
    AliveStatus, Call, Event, KvFetch, Output, Pool, Prefill, PrefixCache, RequestState, Stats, Status, Update,
};
use crate::kv_event::{BlockExtraKeys, KvEvent};
use crate::metrics::PrefixCacheStats;
use crate::output::{FinishReason, PrefillStats};
use crate::request::SequenceId;
use crate::scheduler::{Effects, Output as CoreOutput, SequenceStatus};

impl Replay<'_> {
    pub(super) fn update(&mut self, effects: &Effects, reported: bool) -> Update {
        let connector = self.has_connector().then(|| {
            let mut calls = self.take_calls();
            calls.extend(reported.then_some(Call::UpdateConnectorOutput {}));
            calls
        });
        for output in &effects.outputs {
            if let Some(token) = output.token {
                self.requests[output.sequence.0 as usize].tokens.push(token);
                self.contents.push(output.sequence, token);
            }
        }
        let kv_events = effects.kv_events.iter().map(|event| self.event(event)).collect();
        let view = self.scheduler.view();
        let metrics = &effects.metrics;
        let skipped = metrics.num_requests_deferred;
        let update = Update {
            outputs: effects.outputs.iter().map(|output| self.output(output)).collect(),
            running: self.ids_of(view.running()),
            waiting: self.ids_of(view.waiting()),
            kv_holding_waiting: self.has_connector().then(|| self.ids_of(view.loading())),
            deferred: self.has_connector().then(|| self.deferred()),
            requests: (0..self.requests.len() as u64)
                .filter_map(|index| self.request_state(SequenceId(index)))
                .collect(),
            pool: Pool {
                num_used_blocks: metrics.num_used_blocks,
                kv_usage: rounded(metrics.kv_cache_usage),
                ..self.pool()
            },
            stats: Stats {
                num_running_reqs: metrics.num_requests_running,
                num_waiting_reqs: metrics.num_requests_waiting.saturating_sub(skipped),
                num_skipped_waiting_reqs: skipped,
                prefix_cache: prefix_cache(&metrics.prefix_cache, &self.metrics.prefix_cache),
                kv_fetch: self.has_connector().then_some(KvFetch {
                    waiting_to_start: metrics.kv_fetch.waiting_to_start,
                    in_progress: metrics.kv_fetch.in_progress,
                    completed_waiting: metrics.kv_fetch.completed_waiting,
                }),
                connector_cache: self
                    .has_connector()
                    .then(|| prefix_cache(&metrics.remote_cache, &self.metrics.remote_cache)),
            },
            held: self.has_connector().then(|| self.ids_of(view.held())),
            connector,
            kv_events,
        };
        self.params.clear();
        update
    }

    fn output(&self, output: &CoreOutput) -> Output {
        let (finish_reason, stop_reason) = match output.finish {
            None => (None, None),
            Some(FinishReason::Stop { stop_token }) => (Some("stop".to_owned()), stop_token),
            Some(FinishReason::Length) => (Some("length".to_owned()), None),
            Some(FinishReason::Cancelled) => (Some("abort".to_owned()), None),
            Some(FinishReason::TransferFailed) => (Some("error".to_owned()), None),
            // vLLM has no word for the others.
            Some(other) => (Some(format!("{other:?}")), None),
        };
        Output {
            id: self.id(output.sequence),
            new_token_ids: output.token.into_iter().collect(),
            finish_reason,
            stop_reason,
            prefill_stats: output.prefill.map(|stats| self.prefill(stats)),
            kv_transfer_params: self
                .kv_transfer_params(output.sequence, output.prefill.map(|stats| stats.num_cached_tokens)),
        }
    }

    fn request_state(&self, sequence: SequenceId) -> Option<RequestState> {
        let state = self.scheduler.view().sequence(sequence)?;
        let status = match state.status {
            SequenceStatus::Arriving => return None,
            // Where it has no blocks it is as it was when it came.
            SequenceStatus::Waiting if state.block_ids.is_empty() => return None,
            SequenceStatus::Waiting => Status::Alive(AliveStatus::Waiting),
            SequenceStatus::Loading | SequenceStatus::Loaded => Status::Alive(AliveStatus::WaitingForRemoteKvs),
            SequenceStatus::Running => Status::Alive(AliveStatus::Running),
            SequenceStatus::Preempted => Status::Alive(AliveStatus::Preempted),
            SequenceStatus::Held(finish) => Status::Finished(finish.into()),
        };
        Some(RequestState {
            id: self.id(sequence),
            status,
            num_computed_tokens: state.num_computed_tokens,
            num_tokens: state.num_tokens,
            num_output_tokens: state.num_output_tokens,
            num_blocks: state.block_ids.len(),
            num_preemptions: state.num_preemptions,
            block_ids: self.has_connector().then(|| state.block_ids.to_vec()),
        })
    }

    fn event(&mut self, event: &KvEvent) -> Event {
        match event {
            KvEvent::AllBlocksCleared => Event::AllBlocksCleared {},
            KvEvent::BlockRemoved { block_hash, block_id } => {
                Event::BlockRemoved { blocks: vec![self.contents.name(*block_hash)], block_ids: vec![*block_id] }
            }
            KvEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                lora_name: _,
                extra_keys,
                block_ids,
                sequence,
                first_block_index,
            } => {
                if let &Some(sequence) = sequence {
                    self.contents.stored(sequence, *first_block_index, block_hashes);
                }
                let req = sequence.map(|sequence| self.id(sequence));
                Event::BlockStored {
                    num_blocks: block_hashes.len(),
                    block_size: *block_size,
                    blocks: block_hashes.iter().map(|&hash| self.contents.name(hash)).collect(),
                    parent: parent_block_hash.map(|hash| self.contents.name(hash)),
                    token_ids: token_ids.clone(),
                    extra_keys: (!extra_keys.is_empty())
                        .then(|| extra_keys.iter().map(|keys| keys.as_ref().map(key_texts)).collect()),
                    first_block_index: req.is_some().then_some(*first_block_index),
                    block_ids: req.is_some().then(|| block_ids.clone()),
                    req,
                }
            }
        }
    }

    fn prefill(&self, stats: PrefillStats) -> Prefill {
        let external = stats.num_external_cached_tokens;
        Prefill {
            num_prompt_tokens: stats.num_prompt_tokens,
            num_computed_tokens: stats.num_computed_tokens,
            num_cached_tokens: stats.num_cached_tokens,
            num_cache_creation_tokens: stats.num_cache_creation_tokens,
            num_local_cached_tokens: self.has_connector().then_some(stats.num_cached_tokens - external),
            num_external_cached_tokens: self.has_connector().then_some(external),
        }
    }
}

/// What was counted since `before`.
fn prefix_cache(now: &PrefixCacheStats, before: &PrefixCacheStats) -> PrefixCache {
    PrefixCache {
        requests: now.requests - before.requests,
        queries: now.queries - before.queries,
        hits: now.hits - before.hits,
        preempted_requests: now.preempted_requests - before.preempted_requests,
        preempted_queries: now.preempted_queries - before.preempted_queries,
        preempted_hits: now.preempted_hits - before.preempted_hits,
    }
}

fn key_texts(keys: &BlockExtraKeys) -> Vec<String> {
    let items = keys.multimodal.iter().map(|(identifier, offset)| format!("{identifier}@{offset}"));
    let lora = keys.lora_name.iter().map(ToString::to_string);
    lora.chain(items).chain(keys.cache_salt.iter().map(ToString::to_string)).collect()
}
