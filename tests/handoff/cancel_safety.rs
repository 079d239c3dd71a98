//! r09, r28, r44: every public future, dropped after each of its steps, leaves two engines as they were.
//!
//! A step is a poll or a turn for everybody else, by turns. So each future is dropped before it was polled, right
//! after each poll, and when the engine has answered and nobody has looked.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use standin::handoff::{CoordinatorAction, TransferCost};
use standin::{FinishReason, LiveEngine, LiveHandoff, LiveHandoffSide, LiveLink, SchedulingState, handoff};

use crate::common::{FULL, buffered, id, request, turns};
use crate::kit::{assert_both_released, destination, pair, read_all, register, source, within};

/// More than any of them takes.
const STEPS: usize = 12;

struct Engines {
    prefill: LiveEngine,
    decode: LiveEngine,
}

type Run<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;
/// A function by its type and name, and how it is called and dropped after so many steps.
type Case = (&'static str, for<'a> fn(&'a Engines, usize) -> Run<'a>);

/// A call, dropped after so many steps.
async fn dropped<F: Future>(call: F, steps: usize) {
    let mut call = pin!(call);
    for step in 0..steps {
        if step.is_multiple_of(2) {
            let done = poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_ready())).await;
            if done {
                return;
            }
        } else {
            tokio::task::yield_now().await;
        }
    }
}

const CASES: [Case; 25] = [
    ("LiveEngine::submit", |engines, steps| {
        Box::pin(async move { dropped(engines.prefill.submit(request(1, 8, 3)), steps).await })
    }),
    ("LiveEngine::submit_with", |engines, steps| {
        Box::pin(async move { dropped(engines.prefill.submit_with(request(1, 8, 3), buffered(FULL)), steps).await })
    }),
    ("LiveEngine::submit_prepared", |engines, steps| {
        Box::pin(async move {
            let (registration, _stream) = engines.prefill.prepare_request(request(1, 8, 3)).expect("valid");
            dropped(engines.prefill.submit_prepared(registration), steps).await;
        })
    }),
    ("LiveEngine::submit_decode", |engines, steps| {
        Box::pin(async move { dropped(engines.prefill.submit_decode(request(1, 8, 3)), steps).await })
    }),
    ("LiveEngine::cancel", |engines, steps| {
        Box::pin(async move {
            let _stream = within(engines.prefill.submit(request(1, 8, 3))).await.expect("valid");
            dropped(engines.prefill.cancel(id(1)), steps).await;
        })
    }),
    ("LiveEngine::reset_prefix_cache", |engines, steps| {
        Box::pin(async move { dropped(engines.prefill.reset_prefix_cache(), steps).await })
    }),
    ("LiveEngine::set_scheduling", |engines, steps| {
        Box::pin(async move {
            dropped(engines.prefill.set_scheduling(SchedulingState::Stopped), steps).await;
            within(engines.prefill.set_scheduling(SchedulingState::Running)).await.expect("it runs");
        })
    }),
    ("LiveEngine::shutdown", |engines, steps| {
        Box::pin(async move {
            // An engine of its own: the other two go on.
            let engine = crate::common::start(crate::common::config());
            let mut stream = within(engine.submit(request(1, 8, 3))).await.expect("valid");
            dropped(engine.shutdown(), steps).await;
            drop(engine);
            while within(stream.recv()).await.is_some() {}
            let stopped = stream.finish_reason() == Some(FinishReason::EngineStopped);
            assert!(stopped && engines.prefill.active_request_count() == 0);
        })
    }),
    ("LiveRequest::recv", |engines, steps| {
        Box::pin(async move {
            let mut stream = within(engines.prefill.submit(request(1, 8, 3))).await.expect("valid");
            dropped(stream.recv(), steps).await;
        })
    }),
    ("LiveRequest::cancel", |engines, steps| {
        Box::pin(async move {
            let stream = within(engines.prefill.submit(request(1, 8, 3))).await.expect("valid");
            dropped(stream.cancel(), steps).await;
        })
    }),
    ("LiveHandoffControl::submit_prefill", |engines, steps| {
        Box::pin(async move {
            let (control, _events) = register(&engines.prefill, 1);
            let (registration, _stream) = engines.prefill.prepare_request(request(1, 8, 1)).expect("valid");
            dropped(control.submit_prefill(registration), steps).await;
        })
    }),
    ("LiveHandoffControl::reserve_destination", |engines, steps| {
        Box::pin(async move {
            let (control, _events) = register(&engines.decode, 1);
            let (registration, _stream) = engines.decode.prepare_request(request(1, 8, 3)).expect("valid");
            dropped(control.reserve_destination(registration), steps).await;
        })
    }),
    ("LiveHandoffControl::activate_destination", |engines, steps| {
        Box::pin(async move {
            let mut side = destination(&engines.decode, 1, 8, 3).await;
            side.event().await;
            dropped(side.control.activate_destination(None), steps).await;
        })
    }),
    ("LiveHandoffControl::fail_transfer", |engines, steps| {
        Box::pin(async move {
            let mut side = destination(&engines.decode, 1, 8, 3).await;
            side.event().await;
            dropped(side.control.fail_transfer(4), steps).await;
        })
    }),
    ("LiveHandoffControl::heartbeat", |engines, steps| {
        Box::pin(async move {
            let mut side = source(&engines.prefill, 1, 8).await;
            side.event().await;
            dropped(side.control.heartbeat(), steps).await;
        })
    }),
    ("LiveHandoffControl::release_source", |engines, steps| {
        Box::pin(async move {
            let mut side = source(&engines.prefill, 1, 8).await;
            side.event().await;
            dropped(side.control.release_source(), steps).await;
        })
    }),
    ("LiveHandoffControl::cancel_source", |engines, steps| {
        Box::pin(async move {
            let side = source(&engines.prefill, 1, 8).await;
            dropped(side.control.cancel_source(), steps).await;
        })
    }),
    ("LiveHandoffControl::cancel_destination", |engines, steps| {
        Box::pin(async move {
            let side = destination(&engines.decode, 1, 8, 3).await;
            dropped(side.control.cancel_destination(), steps).await;
        })
    }),
    ("LiveHandoffEvents::recv", |engines, steps| {
        Box::pin(async move {
            let mut side = source(&engines.prefill, 1, 8).await;
            dropped(side.events.recv(), steps).await;
        })
    }),
    ("LiveHandoffStream::recv", |engines, steps| {
        Box::pin(async move {
            let started = handoff(&engines.prefill, &engines.decode, request(1, 8, 3)).await;
            dropped(started.expect("valid").recv(), steps).await;
        })
    }),
    ("LiveHandoff::start", |engines, steps| {
        Box::pin(async move {
            let way = LiveHandoff::default();
            dropped(way.start(&engines.prefill, &engines.decode, request(1, 8, 3)), steps).await;
        })
    }),
    ("handoff", |engines, steps| {
        Box::pin(async move { dropped(handoff(&engines.prefill, &engines.decode, request(1, 8, 3)), steps).await })
    }),
    ("LiveHandoffSide::carry_out", |engines, steps| {
        Box::pin(async move {
            let (registration, _stream) = engines.prefill.prepare_request(request(1, 8, 1)).expect("valid");
            let mut side = LiveHandoffSide::source(register(&engines.prefill, 1), registration);
            dropped(side.carry_out(CoordinatorAction::SubmitPrefill), steps).await;
        })
    }),
    ("LiveHandoffSide::fact", |engines, steps| {
        Box::pin(async move {
            let (registration, _stream) = engines.prefill.prepare_request(request(1, 8, 1)).expect("valid");
            let mut side = LiveHandoffSide::source(register(&engines.prefill, 1), registration);
            within(side.carry_out(CoordinatorAction::SubmitPrefill)).await;
            dropped(side.fact(), steps).await;
        })
    }),
    ("LiveLink::transfer", |_, steps| {
        Box::pin(async move {
            let (link, cost) =
                (LiveLink::default(), TransferCost { wire: Duration::from_millis(5), ..TransferCost::default() });
            dropped(link.transfer(cost), steps).await;
            assert_eq!(link.in_flight(), 0, "a transfer is left on the link");
        })
    }),
];

#[tokio::test(start_paused = true)]
async fn r44_every_public_future_dropped_after_each_step_leaves_nothing_behind() {
    for (name, run) in CASES {
        for steps in 0..STEPS {
            let (prefill, decode) = pair();
            let engines = Engines { prefill, decode };
            within(run(&engines, steps)).await;
            turns().await;
            let active = (engines.prefill.active_request_count(), engines.decode.active_request_count());
            assert_eq!(active, (0, 0), "{name}, dropped after {steps} steps: a route is left");
            // The pass in flight shows what it began with; everything else is over.
            tokio::time::sleep(Duration::from_millis(30)).await;
            assert_both_released(&engines.prefill, &engines.decode).await;
            // Ids are free, and both serve as before.
            let mut stream = handoff(&engines.prefill, &engines.decode, request(1, 8, 2)).await.expect(name);
            let tokens: Vec<_> = read_all(&mut stream).await.into_iter().filter_map(|seen| seen.0).collect();
            assert_eq!(tokens, [101, 102], "{name}, dropped after {steps} steps");
            for engine in [engines.prefill, engines.decode] {
                assert_eq!(within(engine.shutdown()).await, Ok(()), "{name}, dropped after {steps} steps");
            }
        }
    }
}

/// The public futures by their types and names, from the text of the source.
fn public_futures(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("the source is there") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            public_futures(&path, found);
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("readable");
        let mut of = "";
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("impl ") {
                of = name.split([' ', '<']).next().expect("a name");
            }
            let Some((before, name)) = line.split_once("pub async fn ") else { continue };
            let name = name.split(['(', '<']).next().expect("a name");
            let is_method = before.starts_with(' ');
            found.insert(if is_method { format!("{of}::{name}") } else { name.to_owned() });
        }
    }
}

#[test]
fn r44_no_public_future_is_missing_from_the_list() {
    let mut found = BTreeSet::new();
    public_futures(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    let listed: BTreeSet<String> = CASES.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(found, listed, "the source's public futures, and those that are dropped after each step");
}
