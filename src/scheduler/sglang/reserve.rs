//! The decode side of handoffs: pages for those whose KV comes from elsewhere, and their way into the batch.
//!
//! A destination gets pages before its KV is sent, in the order of the queue, and only if everybody who runs or has
//! pages can still decode for a while. When its KV is there it joins the batch without a prefill pass. One that is
//! retracted keeps a copy on the host, and goes before all who never had pages.

use crate::config::SchedulingState;
use crate::kv::Match;
use crate::output::FinishReason;
use crate::scheduler::engine_core::EngineCore;
use crate::scheduler::handoff::HandoffCommands;
use crate::scheduler::pass::Pass;
use crate::scheduler::sequence::Life;
use crate::scheduler::sequences::Handle;

use super::SglangCore;
use super::budget::clipped;

/// What the running sequences mean for those that want pages. Counts are in tokens.
#[derive(Debug, Clone, Copy)]
struct Running {
    /// What retracting all of them would free.
    retractable: i64,
    /// What the largest of them alone would need beyond that; `None`: nobody runs.
    largest_need: Option<i64>,
}

impl SglangCore {
    /// Gives pages to destinations. The first that does not fit stops the rest, so while a retracted one waits no
    /// fresh one gets any; that is why the pages that retracted ones will need are nowhere subtracted.
    pub(super) fn reserve_destinations(&mut self, pass: &mut Pass) {
        if self.book.state != SchedulingState::Running || self.book.queue.first_of_all().is_none() {
            return;
        }
        let running = self.weigh_running();
        while let Some(handle) = self.book.queue.first_of_all() {
            if self.try_reserve(handle, running, pass) {
                continue;
            }
            let nobody_else = self.num_in_batch() == 0 && self.nothing_is_held();
            if !(nobody_else && self.options.end_outgrown_requests) {
                break;
            }
            // The pool is empty but for what can be evicted: it will never fit.
            self.leave_queue(handle);
            self.conclude_visibly(handle, FinishReason::OutOfMemory);
        }
    }

    fn weigh_running(&self) -> Running {
        let running = || self.book.running.swept().iter().map(|&handle| &self.book.sequences[handle]);
        let retractable = running().map(|sequence| i64::from(sequence.num_tokens())).sum();
        let needs =
            running().map(|sequence| i64::from(sequence.num_prompt) + i64::from(clipped(sequence.output_limit)));
        Running { retractable, largest_need: needs.max().map(|need| need - retractable) }
    }

    /// Gives a destination its pages if it can have them. One that was retracted has its KV at once.
    fn try_reserve(&mut self, handle: Handle, running: Running, pass: &mut Pass) -> bool {
        let found = self.match_transferred(handle);
        // The prefix must not be counted as evictable for the sequence that needs it.
        self.kv.lock(found);
        let sequence = &self.book.sequences[handle];
        // The last output token has no KV yet.
        let present = sequence.num_prompt + sequence.num_output.saturating_sub(1);
        let page_size = self.kv.page_size();
        let missing_pages = present.div_ceil(page_size) - found.tokens / page_size;
        let missing = i64::from(missing_pages) * i64::from(page_size);
        let with_reserve = missing + i64::from(self.options.num_reserved_decode_tokens);
        let is_resumed = sequence.was_preempted();
        let (needed, allocatable) = if is_resumed {
            (with_reserve, self.allocatable(None))
        } else {
            let in_the_end = i64::from(sequence.num_prompt - found.tokens) + i64::from(clipped(sequence.output_limit));
            (with_reserve.max(in_the_end - running.retractable), self.allocatable(running.largest_need))
        };
        if needed > allocatable || !self.kv.make_room(missing_pages) {
            self.kv.unlock(found);
            return false;
        }
        self.leave_queue(handle);
        let sequence = &mut self.book.sequences[handle];
        self.kv.adopt(&mut sequence.blocks, found);
        let fits = self.kv.extend(&mut sequence.blocks, present);
        assert!(fits, "room was made for every page");
        sequence.num_computed = present;
        self.note_reserved(handle, found, pass);
        let key = self.book.loads.back(handle.sequence);
        self.enter_load_queue(handle, key);
        let comes_at_once =
            is_resumed || self.book.sequences[handle].remote.as_ref().is_some_and(|remote| remote.copy.loads_at_once());
        if comes_at_once {
            self.book.end_load(handle);
        } else {
            self.tell_reserved(handle, self.book.sequences[handle].num_prompt - found.tokens);
        }
        true
    }

    /// The stored prefix of a transferred prompt, where such prefixes are used. A host copy is taken as a whole.
    fn match_transferred(&mut self, handle: Handle) -> Match {
        let sequence = &self.book.sequences[handle];
        let looks = self.options.disaggregation_decode_enable_radix_cache
            && sequence.reads_prefix_cache
            && !sequence.was_preempted();
        if looks { self.kv.match_prefix(&sequence.content, sequence.num_prompt) } else { Match::default() }
    }

    /// Tokens that can be reserved: the pool's, without what those who run or have pages will soon need, or the
    /// largest of them in the end, and without the rest of a split prompt.
    fn allocatable(&self, largest_need: Option<i64>) -> i64 {
        let num_active = self.num_in_batch() as u64 + self.book.loads.len();
        let reserved = (num_active * u64::from(self.options.num_reserved_decode_tokens)) as i64;
        let rest = self.chunked.map_or(0, |handle| {
            let sequence = &self.book.sequences[handle];
            i64::from(sequence.num_tokens() - sequence.num_computed)
        });
        let in_pool = (self.kv.available_tokens() + self.kv.evictable_tokens()) as i64;
        in_pool - reserved.max(largest_need.unwrap_or(0)) - rest
    }

    /// Counts what a destination got.
    fn note_reserved(&mut self, handle: Handle, found: Match, pass: &mut Pass) {
        let sequence = &mut self.book.sequences[handle];
        let (is_resumed, num_prompt) = (sequence.was_preempted(), sequence.num_prompt);
        let external = num_prompt - found.tokens;
        if let Some(remote) = &mut sequence.remote {
            remote.copy.allocated();
            if !is_resumed {
                remote.num_external = external;
            }
        }
        if is_resumed {
            return;
        }
        sequence.num_cached = num_prompt;
        let looked = self.options.disaggregation_decode_enable_radix_cache && sequence.reads_prefix_cache;
        if looked {
            self.book.count_look_up(handle, found.tokens, pass);
        }
        self.book.metrics.remote_cache.count(false, u64::from(external), u64::from(external));
    }

    /// Puts those into the batch whose KV is there, in their order, as long as there are places. They are SGLang's
    /// "prebuilt" batch, which takes no forward pass.
    pub(super) fn merge_prebuilt(&mut self) {
        while let Some(handle) = self.book.loads.next_ready()
            && self.num_in_batch() < self.options.max_running_requests as usize
        {
            self.leave_queue(handle);
            let sequence = &mut self.book.sequences[handle];
            if sequence.num_computed == sequence.num_tokens() {
                // Without a token to go on from, the last one is computed again.
                sequence.num_computed -= 1;
            }
            (sequence.life, sequence.prebuilt) = (Life::Running, true);
            self.book.running.push(handle);
            self.book.note_change();
            self.store(handle);
        }
    }
}
