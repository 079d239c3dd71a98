//! The end of a pass: tokens, ends, and what the metrics say.

use std::mem;

use crate::output::FinishReason;
use crate::scheduler::engine_core::EngineCore;
use crate::scheduler::pass::{Effects, Output, Pass, PassRow};
use crate::scheduler::sequence::Life;
use crate::scheduler::sequences::Handle;
use crate::time::EngineTime;

use super::VllmCore;

impl VllmCore {
    pub(crate) fn finish_pass(&mut self, mut pass: Box<Pass>, now: EngineTime) -> Box<Effects> {
        let mut effects = self.book.land(&pass, now);
        let num_shown = effects.outputs.len();
        let reports = mem::take(&mut self.reports);
        let invalid: Vec<_> = reports.iter().flat_map(|report| report.invalid_blocks.iter().copied()).collect();
        let failed = self.cut_running(&mut pass.rows, &invalid);
        effects.outputs.reserve(pass.rows.len());
        for row in pass.rows.iter().filter(|row| row.samples) {
            self.sample(row, &mut effects.outputs);
        }
        self.book.metrics.generation_tokens += (effects.outputs.len() - num_shown) as u64;
        self.end_failed(failed);
        reports.iter().for_each(|report| self.apply_report(report));
        self.expire(now);
        self.book.running.sweep(&self.book.sequences);
        // What arrived during the pass is in the queue when its length is shown.
        self.release_arrivals(now, false);
        self.book.close_pass(pass, &mut effects, now);
        self.show(&mut effects, now);
        effects
    }

    /// Appends a token to a sequence. One that was cancelled or preempted while the pass was in flight
    /// gets none: the token of a preempted one is made again when its KV is.
    #[inline]
    fn sample(&mut self, row: &PassRow, outputs: &mut Vec<Output>) {
        let handle = row.handle();
        let Some(sequence) = self.book.sequences.get_mut(handle).filter(|sequence| sequence.life == Life::Running)
        else {
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
        let sequence = &self.book.sequences[handle];
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
}
