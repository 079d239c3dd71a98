//! The end of a pass: tokens, ends, and what enters the prefix tree.

use crate::kv::Computed;
use crate::output::FinishReason;
use crate::scheduler::engine_core::EngineCore;
use crate::scheduler::pass::{Effects, Output, Pass, PassRow, RowKind};
use crate::scheduler::sequence::Life;
use crate::scheduler::sequences::Handle;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

use super::SglangCore;

impl SglangCore {
    pub(crate) fn finish_pass(&mut self, pass: Box<Pass>, now: EngineTime) -> Box<Effects> {
        let mut effects = self.book.land(&pass, now);
        let (prefill, decode) = pass.rows.split_at(pass.num_prefill_rows);
        for row in prefill.iter().filter(|row| row.samples) {
            if let Some(handle) = self.sample(row, &mut effects.outputs).filter(|_| !seeded_bug!(StoresPromptsAtTheEnd))
            {
                self.store(handle);
            }
        }
        for row in decode {
            self.sample(row, &mut effects.outputs);
        }
        if !prefill.is_empty() {
            self.latch(prefill);
        }
        if pass.is_empty() {
            self.idle_turn();
        }
        self.expire(now);
        // What arrived during the pass is in the queue when its length is shown.
        self.release_arrivals(now, false);
        self.book.close_pass(pass, &mut effects, now);
        self.show(&mut effects, now);
        effects
    }

    /// Appends a token to a sequence, and returns it unless it has ended. One that was cancelled or retracted
    /// while the pass was in flight gets none.
    fn sample(&mut self, row: &PassRow, outputs: &mut Vec<Output>) -> Option<Handle> {
        let handle = row.handle();
        let sequence = self.book.sequences.get_mut(handle).filter(|sequence| sequence.life == Life::Running)?;
        let (token, stop) = sequence.content.output(sequence.num_output);
        // Whether a source's token ends the request is for the destination to say.
        let stop = stop.filter(|_| !sequence.is_source());
        sequence.num_output += 1;
        let is_first = sequence.num_output == 1 + u32::from(sequence.content.is_carried());
        let prefill = is_first.then(|| sequence.prefill_stats(self.kv.page_size(), self.kv.prefix_caching()));
        let finish = if sequence.cancelled {
            Some(FinishReason::Cancelled)
        } else {
            stop.or((sequence.num_output >= sequence.output_limit).then_some(FinishReason::Length))
        };
        self.book.metrics.generation_tokens += 1;
        outputs.push(Output { sequence: handle.sequence, token: Some(token), finish, prefill });
        let Some(finish) = finish else { return Some(handle) };
        self.store(handle);
        self.end(handle, finish);
        None
    }

    /// Enters into the prefix tree what a sequence has computed. A destination keeps its KV to itself, unless it
    /// is told otherwise.
    pub(super) fn store(&mut self, handle: Handle) {
        let sequence = &mut self.book.sequences[handle];
        if sequence.is_destination() && !self.options.disaggregation_decode_enable_radix_cache {
            return;
        }
        let computed = Computed {
            content: &sequence.content,
            tokens: sequence.num_computed,
            prompt_tokens: sequence.num_prompt,
            priority: sequence.priority,
            owner: handle.sequence,
        };
        self.kv.store(&mut sequence.blocks, &computed);
    }

    /// What the metrics say of the last prefill batch until the next one.
    fn latch(&mut self, prefill: &[PassRow]) {
        let sum = |tokens: &dyn Fn(&PassRow) -> u32| prefill.iter().map(|row| u64::from(tokens(row))).sum();
        self.book.metrics.last_prefill_new_tokens = sum(&|row| row.new_tokens);
        self.book.metrics.last_prefill_cached_tokens =
            sum(&|row| if row.kind == RowKind::Running { 0 } else { row.computed_before });
    }
}
