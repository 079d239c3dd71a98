//! KV that moves between engines: loads and their ends, blocks that stay after an end, and reports.

use rustc_hash::FxHashMap;

use crate::config::{LoadFailurePolicy, VllmPolicy};
use crate::kv_event::BlockId;
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::engine_core::EngineCore;
use crate::scheduler::handoff::HandoffCommands;
use crate::scheduler::pass::PassRow;
use crate::scheduler::remote::{CopyState, TransferReport};
use crate::scheduler::sequence::{Life, Load, Transfer};
use crate::scheduler::sequences::Handle;
use crate::scheduler::waiting::QueueKey;

use super::VllmCore;

impl VllmCore {
    /// A place among those that hold blocks.
    pub(super) fn load_place(&mut self, handle: Handle) -> QueueKey {
        match self.options.policy {
            VllmPolicy::Fcfs => self.book.loads.back(handle.sequence),
            VllmPolicy::Priority => self.priority_key(handle),
        }
    }

    /// Makes what a load brought findable. The last token is computed again if it is there, to sample from;
    /// a load that brought nothing gives its blocks back.
    pub(super) fn take_load(&mut self, handle: Handle) {
        let before = self.share(handle);
        let sequence = &mut self.book.sequences[handle];
        if sequence.num_computed == 0 {
            self.kv.release(&mut sequence.blocks);
        } else {
            self.kv.publish(&mut sequence.blocks, &sequence.content, sequence.num_computed, handle.sequence);
            if sequence.num_computed == sequence.num_tokens() {
                sequence.num_computed -= 1;
            }
            if let Some(remote) = sequence.remote.as_mut()
                && sequence.num_computed == 0
                && !self.options.reload_one_token_prompts
            {
                remote.copy = CopyState::None;
            }
        }
        if let Life::Loading { load, .. } = &mut sequence.life {
            *load = Load::Tried;
        }
        let after = self.share(handle);
        self.book.loads.exchange(before, after);
        self.book.note_change();
    }

    /// Does what a report says of all but the running sequences.
    pub(super) fn apply_report(&mut self, report: &TransferReport) {
        self.cut_loads(&report.invalid_blocks);
        for &sequence in &report.failed {
            let Some(handle) = self.reported(sequence) else { continue };
            if matches!(self.book.sequences[handle].life, Life::Loading { load: Load::InFlight | Load::Done, .. }) {
                self.book.sequences[handle].num_computed = 0;
                self.fail_load(handle);
            }
        }
        for &sequence in &report.received {
            let Some(handle) = self.reported(sequence) else { continue };
            match self.book.sequences[handle].life {
                Life::Ended { transfer: Transfer::Receive, .. } => self.let_go(handle),
                _ => self.book.end_load(handle),
            }
        }
        for &sequence in &report.sent {
            let Some(handle) = self.reported(sequence) else { continue };
            if matches!(self.book.sequences[handle].life, Life::Ended { transfer: Transfer::Send, .. }) {
                self.let_go(handle);
            }
        }
    }

    /// The sequence that a report is about. What belongs to a handoff has commands of its own.
    fn reported(&self, sequence: SequenceId) -> Option<Handle> {
        self.book.sequences.find(sequence).filter(|&handle| self.handoff_of(handle).is_none())
    }

    /// Cuts the loads in flight at their first invalid block.
    fn cut_loads(&mut self, invalid: &[BlockId]) {
        if invalid.is_empty() {
            return;
        }
        let mut cut = Vec::new();
        let mut marked = Vec::new();
        for handle in self.book.loads.iter() {
            let sequence = &self.book.sequences[handle];
            if matches!(sequence.life, Life::Loading { load: Load::InFlight | Load::Done, .. }) {
                let blocks = &sequence.blocks.ids()[..self.blocks_for(sequence.num_computed)];
                if let Some(Cut::At(block)) = first_invalid(blocks, invalid, &mut marked) {
                    cut.push((handle, block));
                }
            }
        }
        for (handle, block) in cut {
            self.book.sequences[handle].num_computed = block * self.options.block_size;
            self.fail_load(handle);
        }
    }

    /// Cuts the running sequences at the first invalid block that they had before the pass with these rows:
    /// they get no token from it. Of several that share a block only the first computes it again; the others
    /// keep what they had. By the policy they end; the answer is who.
    pub(super) fn cut_running(&mut self, rows: &mut [PassRow], invalid: &[BlockId]) -> Vec<Handle> {
        if invalid.is_empty() {
            return Vec::new();
        }
        let mut rows: FxHashMap<Handle, &mut PassRow> = rows.iter_mut().map(|row| (row.handle(), row)).collect();
        let fails = self.options.kv_load_failure_policy == LoadFailurePolicy::Fail;
        let (mut failed, mut marked) = (Vec::new(), Vec::new());
        let running: Vec<Handle> = self.book.running.iter(&self.book.sequences).collect();
        for handle in running {
            let sequence = &self.book.sequences[handle];
            let row = rows.get_mut(&handle);
            let computed_before = row.as_ref().map_or(sequence.num_computed, |row| row.computed_before);
            let blocks = &sequence.blocks.ids()[..self.blocks_for(computed_before)];
            let Some(cut) = first_invalid(blocks, invalid, &mut marked) else { continue };
            let sequence = &mut self.book.sequences[handle];
            sequence.quiet_until = 0;
            match cut {
                Cut::Shared => sequence.num_computed = computed_before,
                Cut::At(block) => {
                    sequence.num_computed = block * self.options.block_size;
                    if fails {
                        self.kv.withdraw(&mut sequence.blocks, block);
                    }
                }
            }
            sequence.mid_prefill = sequence.num_tokens() - sequence.num_computed > 1;
            if let Some(row) = row {
                row.samples = false;
            }
            if fails {
                failed.push(handle);
            }
        }
        failed
    }

    /// Ends the running sequences whose loads have failed.
    pub(super) fn end_failed(&mut self, failed: Vec<Handle>) {
        for handle in failed {
            self.book.running.one_is_gone();
            self.conclude(handle, FinishReason::TransferFailed, None);
            self.book.show_end(handle.sequence, FinishReason::TransferFailed);
        }
    }

    fn blocks_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.options.block_size) as usize
    }
}

/// Where a run of blocks is cut.
#[derive(Clone, Copy)]
enum Cut {
    /// At this block, which its sequence computes again.
    At(u32),
    /// Nowhere: others before it compute the blocks in question again.
    Shared,
}

/// Looks for invalid blocks and marks those that nobody has marked before.
fn first_invalid(blocks: &[BlockId], invalid: &[BlockId], marked: &mut Vec<BlockId>) -> Option<Cut> {
    let mut cut = None;
    for (index, block) in (0..).zip(blocks) {
        if !invalid.contains(block) {
            continue;
        }
        if marked.contains(block) {
            cut = cut.or(Some(Cut::Shared));
        } else {
            marked.push(*block);
            cut = match cut {
                Some(Cut::At(first)) => Some(Cut::At(first)),
                _ => Some(Cut::At(index)),
            };
        }
    }
    cut
}
