//! The model's decode batch: one token for everybody, and who is retracted where there is no room.

use std::cmp::Reverse;
use std::mem;

use standin::{FinishReason, RowKind};

use super::model::{Model, Planned};

impl Model {
    pub(super) fn plan_decode(&mut self, planned: &mut Planned) {
        if self.running.is_empty() {
            self.full = false;
            return;
        }
        if self.running.iter().all(|id| self.sequences[id].throttled) {
            return;
        }
        if self.decode_fits() {
            self.decay();
        } else {
            self.make_decode_fit(planned);
            self.full = false;
        }
        self.push_decodes(planned);
    }

    /// Makes room for one more token of everybody.
    pub(super) fn decode_fits(&mut self) -> bool {
        let page = self.options.page_size as usize;
        let decodes = self.running.iter().map(|id| &self.sequences[id]).filter(|sequence| !sequence.throttled);
        let missing = decodes.map(|one| (one.computed + 1).div_ceil(page).saturating_sub(one.pages.len())).sum();
        self.tree.make_room(missing)
    }

    pub(super) fn push_decodes(&mut self, planned: &mut Planned) {
        let mut decodes = self.running.clone();
        decodes.retain(|id| !self.sequences[id].throttled);
        self.tree.make_room_for_tokens(decodes.len() * self.options.page_size as usize);
        for id in decodes {
            planned.rows.push(self.compute(id, RowKind::Running, 1));
        }
    }

    /// Retracts until the others fit: the fewest outputs first, then the longest prompt, then the last one.
    fn make_decode_fit(&mut self, planned: &mut Planned) {
        let mut kept = self.running.clone();
        kept.sort_by_key(|id| {
            let sequence = &self.sequences[id];
            (Reverse(sequence.produced), sequence.entry.prompt.len())
        });
        let (mut fits, mut retracted) = (false, Vec::new());
        while !fits {
            let able: Vec<_> = kept.iter().copied().filter(|id| !self.sequences[id].throttled).collect();
            let Some(&victim) = kept.iter().rev().find(|&&id| able != [id]) else { break };
            kept.retain(|&id| id != victim);
            self.leave(victim);
            if self.retract(victim) {
                retracted.push(victim);
            }
            self.tree.make_room_for_tokens(20 * kept.len());
            fits = self.decode_fits();
        }
        for &id in &retracted {
            self.enqueue(id);
        }
        planned.preempted.extend(retracted);
        if !fits {
            for id in mem::take(&mut kept) {
                self.leave(id);
                self.end(id, FinishReason::OutOfMemory);
            }
        }
        let produced: usize = kept.iter().map(|id| self.sequences[id].produced).sum();
        let limits: usize = kept.iter().map(|id| self.sequences[id].entry.limit).sum();
        self.ratio = ((produced + 20 * kept.len()) as f64 / (limits + 1) as f64).min(1.0);
    }
}
