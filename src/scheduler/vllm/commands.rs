//! What this engine kind has to say for itself, and the steps of a sequence's life outside a pass.

use crate::config::VllmPolicy;
use crate::kv::SequenceBlocks;
use crate::kv_event::KvEvent;
use crate::output::FinishReason;
use crate::scheduler::book::{Book, Usage};
use crate::scheduler::command::{Applied, ApplyResult, Submission};
use crate::scheduler::engine_core::{EngineCore, HandoffTerms};
use crate::scheduler::pass::{Effects, Pass};
use crate::scheduler::remote::{ConnectorCall, RemoteKv, TransferReport};
use crate::scheduler::sequences::Handle;
use crate::scheduler::waiting::QueueKey;
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

use super::VllmCore;

impl EngineCore for VllmCore {
    type Blocks = SequenceBlocks;

    fn book(&self) -> &Book<SequenceBlocks> {
        &self.book
    }

    fn book_mut(&mut self) -> &mut Book<SequenceBlocks> {
        &mut self.book
    }

    fn terms(&self) -> HandoffTerms {
        HandoffTerms {
            lease: self.options.kv_lease,
            guard: self.options.transfer_guard,
            first_token: self.options.first_token,
            on_failed_load: self.options.kv_load_failure_policy,
            reloads: false,
        }
    }

    fn queue_up(&mut self, handle: Handle) {
        let key = match self.options.policy {
            _ if self.goes_first(handle) => self.book.queue.destination(handle.sequence),
            VllmPolicy::Fcfs => self.book.queue.back(handle.sequence),
            VllmPolicy::Priority => self.priority_key(handle),
        };
        self.book.enter_queue(handle, key);
    }

    fn reset_prefix_cache(&mut self, reset_running_requests: bool) -> Applied {
        let mut preempted = Vec::new();
        if reset_running_requests {
            self.book.running.sweep(&self.book.sequences);
            while let Some(handle) = self.book.running.pop() {
                self.preempt(handle);
                preempted.push(handle.sequence);
            }
        }
        let reset = self.kv.reset();
        if reset {
            self.book.note_change();
        }
        Applied::PrefixCacheReset { reset, preempted }
    }

    fn plan(&mut self, pass: &mut Pass) {
        self.book.running.sweep(&self.book.sequences);
        self.plan_pass(pass);
    }

    fn running(&self) -> impl Iterator<Item = Handle> + '_ {
        self.book.running.iter(&self.book.sequences)
    }

    fn kv_events(&self) -> &[KvEvent] {
        self.kv.events()
    }

    fn show(&mut self, effects: &mut Effects, now: EngineTime) {
        self.kv.take_events(&mut effects.kv_events);
        let pool = self.kv.pool();
        let usage = Usage {
            num_running: self.book.running.len() as u64,
            usable: u64::from(pool.num_usable()),
            used: u64::from(pool.num_usable() - pool.num_free()),
            cached: pool.num_blocks_with_hash() as u64,
        };
        self.book.show(effects, usage, now);
    }

    fn missing_blocks(&self, handle: Handle) -> u64 {
        let sequence = &self.book.sequences[handle];
        self.kv.missing(&sequence.blocks, sequence.num_tokens())
    }

    fn release_blocks(&mut self, handle: Handle) {
        self.kv.release(&mut self.book.sequences[handle].blocks);
    }

    fn leave_batch(&mut self, _handle: Handle) {
        self.book.running.one_is_gone();
    }

    fn submit_remote(&mut self, submission: Submission, remote: RemoteKv, now: EngineTime) -> ApplyResult {
        self.submit(submission, Some((remote, None)), now)
    }

    /// Takes a report, or keeps it until the pass in flight ends.
    fn take_report(&mut self, report: TransferReport) -> ApplyResult {
        if self.book.in_flight() {
            self.reports.push(report);
        } else {
            let failed = self.cut_running(&mut [], &report.invalid_blocks);
            self.end_failed(failed);
            self.apply_report(&report);
        }
        Ok(Applied::Transfers)
    }

    fn expect_frees(&mut self, expected: bool) -> ApplyResult {
        self.expects_frees = expected;
        Ok(Applied::ExpectFrees)
    }

    fn log_end(&mut self, handle: Handle, finish: FinishReason) {
        let Some(log) = &mut self.connector_log else { return };
        let sequence = &self.book.sequences[handle];
        let computed_tokens = sequence.num_computed;
        let computed_blocks = computed_tokens.div_ceil(self.options.block_size) as usize;
        log.push(ConnectorCall::Finished {
            sequence: handle.sequence,
            finish,
            blocks: sequence.blocks.ids().iter().take(computed_blocks).copied().collect(),
            computed_tokens,
            kept: sequence.remote.as_ref().is_some_and(|remote| remote.keeps(finish)),
        });
    }
}

impl VllmCore {
    fn goes_first(&self, handle: Handle) -> bool {
        let remote = self.book.sequences[handle].remote.as_ref().filter(|_| self.options.destinations_first);
        remote.is_some_and(|remote| remote.handoff.is_some() && remote.copy.is_wanted())
    }

    /// Takes all blocks from a sequence that is not in the batch any more and queues it again: at the
    /// front, or by priority where it was.
    pub(super) fn preempt(&mut self, handle: Handle) {
        let key = match self.options.policy {
            VllmPolicy::Fcfs => self.book.queue.front(handle.sequence),
            VllmPolicy::Priority => self.priority_key(handle),
        };
        let sequence = &mut self.book.sequences[handle];
        if !seeded_bug!(PreemptionKeepsBlocks) {
            self.kv.release(&mut sequence.blocks);
        }
        sequence.num_computed = 0;
        sequence.quiet_until = 0;
        sequence.num_preemptions += 1;
        self.book.metrics.num_preemptions += 1;
        self.book.enter_queue(handle, key);
    }

    pub(super) fn priority_key(&self, handle: Handle) -> QueueKey {
        let sequence = &self.book.sequences[handle];
        QueueKey::by_priority(sequence.priority, sequence.arrival, sequence.tie_key, sequence.id)
    }
}
