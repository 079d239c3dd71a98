//! The output stream of one request: unread signals, and how far the request is. Its lock is the route's.

use std::collections::VecDeque;
use std::task::Waker;

use uuid::Uuid;

use crate::live::signal::{OutputBuffering, OutputSignal};
use crate::seeded_bug::seeded_bug;
use crate::time::EngineTime;

/// A buffer that has held more tokens than this is given back once it is empty.
const KEPT_CAPACITY: usize = 32;

/// A signal that is not the last one, as short as it can be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) token_id: u32,
    pub(super) cached_tokens: Option<u32>,
    pub(super) produced_at: EngineTime,
    pub(super) observed_at: EngineTime,
}

impl Token {
    fn signal(self, request_id: Uuid) -> OutputSignal {
        OutputSignal {
            request_id,
            token_id: Some(self.token_id),
            finish: None,
            cached_tokens: self.cached_tokens,
            produced_at: self.produced_at,
            observed_at: self.observed_at,
        }
    }
}

/// ```text
/// Prepared ──submit applied──▶ Scheduled ──▶ Ended
///     └──────── cancelled, dropped, engine stopped ──▲
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// The scheduler does not know it yet; its registration is with the caller or in the command lane.
    Prepared,
    /// The scheduler has taken it.
    Scheduled,
    /// The terminal signal is in its place, or on its way there.
    Ended,
}

/// What became of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Forwarded {
    /// It is in the queue.
    Queued,
    /// It is in the queue, which is full now; the sequence is to be throttled.
    Filled,
    /// The queue was full.
    Overflow,
    /// Nobody will read it.
    Gone,
}

/// Tokens first in, first out, then the terminal signal, which has a place of its own.
///
/// With many streams a token costs the cache lines that it touches. The fields are in this order so that
/// the first of them fill one line together with the lock, and a reader that keeps pace needs no other:
/// it leaves one token at the most, which lies in `next`.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Stream {
    /// The oldest unread token.
    next: Option<Token>,
    /// Waits for a signal.
    pub(super) reader: Option<Waker>,
    pub(super) life: Life,
    /// Forwarding has stopped: a cancel is on its way, or the reader is gone.
    pub(super) muted: bool,
    /// A full queue throttles the sequence; else it ends the route.
    throttles: bool,
    /// Throttle only: the queue was full, and nobody has read since.
    pub(super) full: bool,
    /// The other unread tokens; empty where there is no next one.
    later: VecDeque<Token>,
    /// Unread tokens that may wait.
    capacity: usize,
    end: Option<OutputSignal>,
}

impl Stream {
    /// An empty one for `capacity` unread tokens, at least 1.
    pub(super) fn new(buffering: OutputBuffering, capacity: usize) -> Self {
        Self {
            next: None,
            reader: None,
            life: Life::Prepared,
            muted: false,
            throttles: matches!(buffering, OutputBuffering::Throttle { .. }),
            full: false,
            later: VecDeque::new(),
            capacity,
            end: None,
        }
    }

    /// Whether one more token may wait.
    pub(super) fn has_room(&self) -> bool {
        self.next.is_none() || 1 + self.later.len() < self.capacity
    }

    /// Puts a token into the queue.
    pub(super) fn push(&mut self, token: Token) -> Forwarded {
        if self.muted && !seeded_bug!(ForwardsAfterACancel) {
            return Forwarded::Gone;
        }
        if self.next.is_none() {
            self.next = Some(token);
        } else if self.has_room() {
            self.later.push_back(token);
        } else {
            return Forwarded::Overflow;
        }
        self.full = self.throttles && !self.has_room();
        if self.full { Forwarded::Filled } else { Forwarded::Queued }
    }

    /// Puts the terminal signal into its place.
    pub(super) fn push_end(&mut self, terminal: OutputSignal) {
        if seeded_bug!(FullQueueRefusesTheEnd) && !self.has_room() {
            return;
        }
        self.end = Some(terminal);
    }

    /// Takes the next signal out. The terminal one comes last, whatever is pushed later.
    pub(super) fn pop(&mut self, request_id: Uuid) -> Option<OutputSignal> {
        let Some(token) = self.next.take() else { return self.end.take() };
        if !self.later.is_empty() {
            self.next = self.later.pop_front();
            if self.later.is_empty() && self.later.capacity() > KEPT_CAPACITY {
                self.later = VecDeque::new();
            }
        }
        Some(token.signal(request_id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::FinishReason;

    fn token(number: u64) -> Token {
        Token {
            token_id: 7,
            cached_tokens: None,
            produced_at: EngineTime::from_nanos(number),
            observed_at: EngineTime::ZERO,
        }
    }

    fn stream(capacity: usize) -> Stream {
        Stream::new(OutputBuffering::FullResponse, capacity)
    }

    fn throttled(capacity: usize) -> Stream {
        Stream { throttles: true, ..stream(capacity) }
    }

    fn pop(stream: &mut Stream) -> Option<u64> {
        stream.pop(Uuid::nil()).map(|signal| signal.produced_at.as_nanos())
    }

    #[test]
    fn what_a_token_touches_is_one_cache_line() {
        let with_lock = std::mem::size_of::<std::sync::Mutex<()>>().next_multiple_of(8);
        assert!(with_lock + std::mem::offset_of!(Stream, later) <= 64);
    }

    #[test]
    fn tokens_come_out_in_order_however_pushes_and_pops_alternate() {
        let mut stream = stream(1_000);
        let (mut pushed, mut popped) = (0, 0);
        for round in 0..200_u64 {
            for _ in 0..round % 7 {
                assert_eq!(stream.push(token(pushed)), Forwarded::Queued);
                pushed += 1;
            }
            for _ in 0..round * 5 % 8 {
                let expected = (popped < pushed).then_some(popped);
                assert_eq!(pop(&mut stream), expected);
                popped += u64::from(expected.is_some());
            }
        }
        assert!(popped > 500);
    }

    #[test]
    fn a_full_queue_takes_the_end_and_nothing_else_and_nothing_follows_the_end() {
        for capacity in [1, 2, 5] {
            let mut stream = stream(capacity);
            for number in 0..capacity as u64 {
                assert!(stream.has_room());
                assert_eq!(stream.push(token(number)), Forwarded::Queued);
            }
            assert!(!stream.has_room());
            assert_eq!(stream.push(token(99)), Forwarded::Overflow);
            let terminal = OutputSignal { finish: Some(FinishReason::Cancelled), ..token(100).signal(Uuid::nil()) };
            stream.push_end(terminal);
            let unread: Vec<_> = std::iter::from_fn(|| pop(&mut stream)).collect();
            assert_eq!(unread, (0..capacity as u64).chain([100]).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_throttled_queue_says_when_it_is_full() {
        for capacity in [1, 3] {
            let mut stream = throttled(capacity);
            for number in 1..capacity as u64 {
                assert_eq!((stream.push(token(number)), stream.full), (Forwarded::Queued, false));
            }
            assert_eq!((stream.push(token(0)), stream.full), (Forwarded::Filled, true));
            assert!(pop(&mut stream).is_some());
            assert_eq!(stream.push(token(0)), Forwarded::Filled);
            stream.muted = true;
            assert_eq!(stream.push(token(0)), Forwarded::Gone);
        }
    }

    #[test]
    fn a_reader_that_keeps_pace_needs_no_memory_and_a_late_one_gives_it_back() {
        let mut stream = stream(1_000);
        for number in 0..100 {
            stream.push(token(number));
            assert_eq!(pop(&mut stream), Some(number));
        }
        assert_eq!(stream.later.capacity(), 0);
        (0..100).for_each(|number| assert_eq!(stream.push(token(number)), Forwarded::Queued));
        (0..100).for_each(|number| assert_eq!(pop(&mut stream), Some(number)));
        assert_eq!((pop(&mut stream), stream.later.capacity()), (None, 0));
    }
}
