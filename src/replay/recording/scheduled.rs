//! A planned pass in a recording's own types.

use std::mem;

use super::replay::{Replay, pool_use, sorted};
use super::step::{Call, NewRow, ResumedRow, RunningRow, Schedule};
use crate::scheduler::{Pass, RowKind};

impl Replay<'_> {
    pub(super) fn schedule(&mut self, pass: &Pass) -> Schedule {
        let (mut new, mut resumed, mut running_scheduled) = (Vec::new(), Vec::new(), Vec::new());
        for row in pass.rows() {
            let (id, num_computed_tokens) = (self.id(row.sequence), row.computed_before);
            let block_ids = self.scheduler.view().sequence(row.sequence).map_or(&[][..], |sequence| sequence.block_ids);
            let (num_blocks, num_output_tokens) = (row.new_blocks, row.output_tokens);
            match row.kind {
                RowKind::New => new.push(NewRow { id, num_computed_tokens, num_blocks, block_ids: block_ids.to_vec() }),
                RowKind::Resumed => {
                    let block_ids = block_ids.to_vec();
                    resumed.push(ResumedRow { id, num_computed_tokens, num_output_tokens, num_blocks, block_ids });
                }
                RowKind::Running => {
                    let held_before = block_ids.len().saturating_sub(num_blocks as usize);
                    running_scheduled.push(RunningRow {
                        id,
                        num_computed_tokens,
                        num_output_tokens,
                        num_new_blocks: num_blocks,
                        new_block_ids: block_ids[held_before..].to_vec(),
                    });
                }
            }
        }
        let calls = self.has_connector().then(|| {
            let mut calls = self.take_calls();
            calls.push(Call::BuildConnectorMeta {});
            calls
        });
        let reset_preempted = mem::take(&mut self.reset_preempted);
        let reported = self.ids(pass.preempted().iter().copied().chain(reset_preempted));
        let view = self.scheduler.view();
        Schedule {
            num_scheduled_tokens: pass.rows().iter().map(|row| (self.id(row.sequence), row.new_tokens)).collect(),
            total_num_scheduled_tokens: pass.work().total_tokens(),
            new,
            resumed,
            running_scheduled,
            preempted: self.ids(pass.preempted().iter().copied()),
            preempted_reported: sorted(reported),
            finished_req_ids: sorted(self.ids(pass.ended().iter().copied())),
            sync_loads: calls.as_ref().map(|calls| calls.iter().any(|call| self.is_load_within_step(call))),
            connector: calls,
            running: self.ids_of(view.running()),
            waiting: self.ids_of(view.waiting()),
            kv_holding_waiting: self.has_connector().then(|| self.ids_of(view.loading())),
            deferred: self.has_connector().then(|| self.deferred()),
            pool: pool_use(view.pool()),
        }
    }

    fn is_load_within_step(&self, call: &Call) -> bool {
        match call {
            Call::UpdateStateAfterAlloc { id, num_external_tokens, .. } => {
                *num_external_tokens > 0 && !self.add_of(self.sequences[id.as_str()]).load_async
            }
            _ => false,
        }
    }

    /// Those of the waiting that were passed over, sorted.
    pub(super) fn deferred(&self) -> Vec<String> {
        let view = self.scheduler.view();
        let waiting = view.waiting().filter(|sequence| sequence.deferred);
        sorted(self.ids_of(view.loading().chain(waiting)))
    }

    /// What the model is asked for: a token for every sequence that this pass computes to its end.
    pub(super) fn sampled(&self, pass: &Pass) -> Vec<(String, u32)> {
        let rows = pass.rows().iter().filter(|row| {
            let sequence = self.scheduler.view().sequence(row.sequence);
            sequence.is_some_and(|sequence| row.computed_before + row.new_tokens == sequence.num_tokens)
        });
        rows.map(|row| {
            let add = self.requests[row.sequence.0 as usize].add;
            (add.id.clone(), add.output_token(row.output_tokens))
        })
        .collect()
    }
}
