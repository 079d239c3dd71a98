//! What streams give, in a short form, and readers that check what must hold for every stream.

use standin::{FinishReason, LiveRequest, OutputSignal};

use super::{tokens, within};

/// Token, end and production time in milliseconds of one signal.
pub(crate) type Seen = (Option<u32>, Option<FinishReason>, f64);

pub(crate) fn seen(signal: OutputSignal) -> Seen {
    (signal.token_id, signal.finish, signal.produced_at.as_nanos() as f64 / 1e6)
}

/// Reads one signal.
pub(crate) async fn next(stream: &mut LiveRequest) -> Seen {
    seen(within(stream.recv()).await.expect("the stream has not ended"))
}

/// Reads a stream to its end, and checks what holds for every stream (r13, r15, r16).
pub(crate) async fn read(stream: &mut LiveRequest) -> Vec<Seen> {
    let mut signals: Vec<OutputSignal> = Vec::new();
    while let Some(signal) = within(stream.recv()).await {
        assert_eq!(signal.request_id, stream.id());
        assert!(signal.observed_at >= signal.produced_at, "{signal:?}");
        if let Some(last) = signals.last() {
            assert_eq!(last.finish, None, "{signal:?} came after the end");
            assert!(signal.produced_at >= last.produced_at, "{signal:?} after {last:?}");
            assert_eq!(signal.cached_tokens, None, "only the first token says it");
        }
        signals.push(signal);
    }
    assert_eq!(within(stream.recv()).await, None, "once ended, always ended");
    let finish = signals.last().expect("a stream has a terminal signal").finish;
    assert_eq!((stream.finish_reason(), finish.is_some()), (finish, true));
    signals.into_iter().map(seen).collect()
}

/// What [`read`] gives for a request that produced its whole output at these milliseconds.
pub(crate) fn whole(n: u32, times: &[f64]) -> Vec<Seen> {
    let mut expected = partial(n, times);
    expected.last_mut().expect("at least one token").1 = Some(FinishReason::Length);
    expected
}

/// What [`read`] gives for one that was ended after tokens at these milliseconds.
pub(crate) fn cut(n: u32, times: &[f64], finish: FinishReason, at: f64) -> Vec<Seen> {
    partial(n, times).into_iter().chain([(None, Some(finish), at)]).collect()
}

fn partial(n: u32, times: &[f64]) -> Vec<Seen> {
    times.iter().zip(tokens(n, times.len() as u32)).map(|(&at, token)| (Some(token), None, at)).collect()
}
