//! The end of a pass: tokens, ends, and what the metrics say.

use std::mem;

use crate::metrics::{EngineMetrics, KvFetchCounts};
use crate::output::FinishReason;
use crate::scheduler::pass::{Effects, Output, Pass, PassRow};
use crate::scheduler::sequence::Life;
use crate::scheduler::sequences::Handle;
use crate::time::EngineTime;

use super::VllmCore;

impl VllmCore {
    pub(crate) fn finish_pass(&mut self, mut pass: Box<Pass>, now: EngineTime) -> Box<Effects> {
        debug_assert!(self.in_flight, "a pass is finished once, by the scheduler that began it");
        self.in_flight = false;
        (self.now, self.clock) = (now, self.clock.max(now));
        self.last_pass = Some((pass.started_at, now));
        let mut effects = self.spare_effects.take().unwrap_or_default();
        effects.outputs.append(&mut self.ends);
        let (num_ended, num_shown) = (self.ended.len(), effects.outputs.len());
        let reports = mem::take(&mut self.reports);
        let invalid: Vec<_> = reports.iter().flat_map(|report| report.invalid_blocks.iter().copied()).collect();
        let failed = self.cut_running(&mut pass.rows, &invalid);
        effects.outputs.reserve(pass.rows.len());
        for row in pass.rows.iter().filter(|row| row.samples) {
            self.sample(row, &mut effects.outputs);
        }
        self.metrics.generation_tokens += (effects.outputs.len() - num_shown) as u64;
        self.end_failed(failed);
        reports.iter().for_each(|report| self.apply_report(report));
        self.expire(now);
        if self.ended.len() > num_ended {
            self.running.sweep(&self.sequences);
        }
        // What arrived during the pass is in the queue when its length is shown.
        self.release_arrivals(now, false);
        if !pass.is_empty() {
            self.metrics.num_passes += 1;
            effects.pass = Some(pass.metrics(&self.queue, now));
        }
        self.show(&mut effects, now);
        pass.clear();
        self.spare_pass = Some(pass);
        effects
    }

    /// Appends a token to a sequence. One that was cancelled or preempted while the pass was in flight
    /// gets none: the token of a preempted one is made again when its KV is.
    #[inline]
    fn sample(&mut self, row: &PassRow, outputs: &mut Vec<Output>) {
        let handle = row.handle();
        let Some(sequence) = self.sequences.get_mut(handle).filter(|sequence| sequence.life == Life::Running) else {
            return;
        };
        let position = sequence.num_output;
        sequence.num_output += 1;
        let at_limit = sequence.num_output >= sequence.output_limit;
        // The first token that it samples is its second where the first was carried over.
        if position > u32::from(sequence.content.is_carried())
            && !at_limit
            && let Some(token) = sequence.content.generated(position)
        {
            outputs.push(Output { sequence: handle.sequence, token: Some(token), finish: None, prefill: None });
        } else {
            let (token, stop) = sequence.content.output(position);
            let mut output = Output { sequence: handle.sequence, token: Some(token), finish: stop, prefill: None };
            self.complete(&mut output, handle, at_limit);
            outputs.push(output);
        }
    }

    /// Adds what only the first and the last output of a sequence have, and ends it with its last.
    #[cold]
    fn complete(&mut self, output: &mut Output, handle: Handle, at_limit: bool) {
        let sequence = &self.sequences[handle];
        if sequence.num_output == 1 + u32::from(sequence.content.is_carried()) {
            output.prefill = Some(sequence.prefill_stats(self.options.block_size, self.kv.prefix_caching()));
        }
        if output.finish.is_none() && at_limit {
            output.finish = Some(FinishReason::Length);
        }
        if let Some(finish) = output.finish {
            self.end(handle, finish);
        }
    }

    /// Completes effects: the events so far and the state at this boundary.
    pub(super) fn show(&mut self, effects: &mut Effects, now: EngineTime) {
        effects.at = now;
        effects.outputs.append(&mut self.ends);
        self.handoffs.take_facts(&mut effects.facts);
        self.kv.take_events(&mut effects.kv_events);
        effects.metrics = self.snapshot(now);
        self.unshown = false;
    }

    fn snapshot(&self, now: EngineTime) -> EngineMetrics {
        let pool = self.kv.pool();
        let used = pool.num_usable() - pool.num_free();
        EngineMetrics {
            at: now,
            num_requests_running: self.running.len() as u64,
            num_requests_waiting: self.queue.num_waiting(),
            num_requests_deferred: self.queue.num_deferred() + self.loads.len(),
            kv_fetch: KvFetchCounts {
                waiting_to_start: self.queue.num_wanting(),
                in_progress: self.loads.num_in_flight(),
                completed_waiting: self.loads.len() - self.loads.num_in_flight(),
            },
            num_requests_held: self.holds.len() as u64,
            num_usable_blocks: u64::from(pool.num_usable()),
            num_used_blocks: u64::from(used),
            num_held_blocks: self.holds.num_blocks(),
            num_reserved_blocks: self.loads.total().held,
            num_cached_blocks: pool.num_blocks_with_hash() as u64,
            kv_cache_usage: f64::from(used) / f64::from(pool.num_usable()),
            ..self.metrics
        }
    }
}
