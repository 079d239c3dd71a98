//! Planning a decode batch: one token for everybody, and who is retracted when the pool cannot give it.

use crate::output::FinishReason;
use crate::scheduler::book::{Book, note_admission};
use crate::scheduler::engine_core::EngineCore;
use crate::scheduler::pass::{Pass, PassRow, RowKind};
use crate::scheduler::sequences::Handle;
use crate::seeded_bug::seeded_bug;

use super::SglangCore;
use super::budget::RETRACT_DECODE_STEPS;

impl SglangCore {
    pub(super) fn plan_decode(&mut self, pass: &mut Pass) {
        if self.book.running.len() == 0 {
            self.batch_is_full = false;
            return;
        }
        if !self.book.running.swept().iter().any(|&handle| self.decodes(handle)) {
            return;
        }
        if self.decode_fits() {
            self.new_token_ratio.decay();
        } else {
            self.make_decode_fit(pass);
            self.batch_is_full = false;
        }
        self.push_decode_rows(pass);
    }

    /// Whether a running sequence takes part: its reader has room.
    fn decodes(&self, handle: Handle) -> bool {
        !self.book.sequences[handle].throttled
    }

    /// Whether the pool has the pages for one more token of everybody; evicts what it takes.
    pub(super) fn decode_fits(&mut self) -> bool {
        let missing = self.book.running.swept().iter().map(|&handle| self.pages_to_decode(handle)).sum();
        self.kv.make_room(missing)
    }

    /// Pages that a running sequence misses for its next token.
    fn pages_to_decode(&self, handle: Handle) -> u32 {
        let sequence = &self.book.sequences[handle];
        if sequence.throttled { 0 } else { self.kv.missing(&sequence.blocks, sequence.num_computed + 1) }
    }

    /// Gives everybody the page for the next token, which must be there, and a row.
    pub(super) fn push_decode_rows(&mut self, pass: &mut Pass) {
        // The paged allocator makes room for a page of everybody, needed or not.
        let rows = self.book.running.swept().iter().filter(|&&handle| self.decodes(handle)).count() as u64;
        self.kv.make_room_for_tokens(rows * u64::from(self.kv.page_size()));
        let Book { running, sequences, metrics, .. } = &mut self.book;
        for &handle in running.swept() {
            let sequence = &mut sequences[handle];
            if sequence.throttled {
                continue;
            }
            let pages_before = sequence.blocks.len();
            let computed_before = sequence.num_computed;
            sequence.num_computed += 1;
            let fits = self.kv.extend(&mut sequence.blocks, sequence.num_computed);
            assert!(fits, "decodes are planned when their pages are free");
            let comes_in = std::mem::take(&mut sequence.prebuilt);
            let kind = if comes_in { note_admission(sequence, metrics, pass) } else { RowKind::Running };
            pass.push(PassRow {
                sequence: handle.sequence,
                slot: handle.slot,
                kind,
                new_tokens: 1,
                computed_before,
                output_tokens: sequence.num_output,
                new_blocks: sequence.blocks.len() - pages_before,
                samples: true,
            });
        }
    }

    /// Retracts until the others fit: those with the fewest outputs first, among equals the longest prompt,
    /// then the one admitted last. One that can decode stays; if not even that one fits, it ends. Where pages are
    /// held for transfers it is retracted instead: they will be free again.
    fn make_decode_fit(&mut self, pass: &mut Pass) {
        let mut kept = self.book.running.swept().to_vec();
        kept.sort_by_key(|&handle| {
            let sequence = &self.book.sequences[handle];
            let num_output = if seeded_bug!(RetractsByPromptAlone) { 0 } else { sequence.num_output };
            std::cmp::Reverse((num_output, std::cmp::Reverse(sequence.num_prompt)))
        });
        let (mut fits, mut retracted) = (false, Vec::new());
        while let Some(index) = (!fits).then(|| self.next_victim(&kept)).flatten() {
            let victim = kept.remove(index);
            self.book.running.remove_handle(victim);
            if self.retract(victim) {
                retracted.push(victim);
            }
            self.make_room_for(kept.len());
            fits = self.decode_fits();
        }
        for handle in retracted {
            pass.preempted.push(handle.sequence);
            self.queue_up(handle);
        }
        if !fits {
            for handle in kept.drain(..) {
                self.book.running.remove_handle(handle);
                self.conclude_visibly(handle, FinishReason::OutOfMemory);
            }
        }
        let sequences = kept.iter().map(|&handle| &self.book.sequences[handle]);
        let (outputs, limits) = sequences.fold((0, 0), |(outputs, limits), sequence| {
            (outputs + u64::from(sequence.num_output), limits + u64::from(sequence.output_limit))
        });
        self.new_token_ratio.estimate(kept.len(), outputs, limits);
    }

    /// Whom to retract next, by index; `None` if only one is left that can decode.
    fn next_victim(&self, kept: &[Handle]) -> Option<usize> {
        let only_decode = self.nothing_is_held() && kept.iter().filter(|&&handle| self.decodes(handle)).count() == 1;
        kept.iter().rposition(|&handle| !(only_decode && self.decodes(handle)))
    }

    /// Makes the room at once that a few decodes of those who stay will need.
    pub(super) fn make_room_for(&mut self, num_staying: usize) {
        self.kv.make_room_for_tokens(RETRACT_DECODE_STEPS * num_staying as u64);
    }
}
