//! The bare scheduler, driven by hand: what a live engine must do to the nanosecond where nothing goes wrong.

use std::collections::BTreeMap;
use std::time::Duration;

use standin::timing::{PassTiming, PassWork};
use standin::{
    Admitted, Command, EngineTime, FinishReason, KvEvent, Output, Pass, PassMetrics, Scheduler, SequenceId, Submission,
};
use uuid::Uuid;

use super::client::{Record, Submitted};
use super::plan::Plan;
use super::trace::Entry;
use super::world::Outcome;

/// Token, end, cached tokens, and the end of the pass.
type Shown = (Option<u32>, Option<FinishReason>, Option<u32>, EngineTime);

/// What a run shows of requests and passes.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    streams: BTreeMap<Uuid, Vec<Shown>>,
    /// Who, cached tokens, and when.
    admissions: Vec<(Uuid, u32, EngineTime)>,
    kv_events: Vec<(EngineTime, Vec<KvEvent>)>,
    passes: Vec<PassMetrics>,
}

pub(crate) fn check(outcome: &Outcome) {
    let (live, by_hand) = (seen(outcome), driven(outcome));
    // Passes first: what differs earliest is shown.
    assert_same(&live.passes, &by_hand.passes);
    assert_same(&live.admissions, &by_hand.admissions);
    assert_same(&live.kv_events, &by_hand.kv_events);
    assert_eq!(live.streams, by_hand.streams, "live, and by hand");
}

fn assert_same<T: PartialEq + std::fmt::Debug>(live: &[T], by_hand: &[T]) {
    for (index, pair) in live.iter().zip(by_hand).enumerate() {
        assert_eq!(pair.0, pair.1, "number {index}, live and by hand");
    }
    assert_eq!(live.len(), by_hand.len(), "live, and by hand");
}

fn seen(outcome: &Outcome) -> Seen {
    let mut seen = Seen::default();
    for record in &outcome.records {
        let shown = record.seen.iter().map(|seen| {
            let signal = seen.signal;
            (signal.token_id, signal.finish, signal.cached_tokens, signal.produced_at)
        });
        seen.streams.insert(record.id.expect("accepted"), shown.collect());
    }
    for (_, entry) in outcome.world.trace.entries() {
        match entry {
            Entry::Admission(it) => seen.admissions.push((it.request_id, it.cached_tokens, it.admitted_at)),
            Entry::KvEvents(at, events) => seen.kv_events.push((at, events)),
            Entry::Pass(pass) => seen.passes.push(pass),
            _ => {}
        }
    }
    seen
}

/// The same submissions, stamped with the times at which they were sent.
fn driven(outcome: &Outcome) -> Seen {
    let world = &outcome.world;
    let timing = Durations { micros: world.plan.engine.passes.clone(), passes: 0 };
    let mut scheduler = Scheduler::new(&world.config).expect("valid").with_timing(Box::new(timing)).with_kv_events();
    let mut ids = BTreeMap::new();
    let mut records: Vec<_> = outcome.records.iter().collect();
    records.sort_by_key(|record| order_of_submission(outcome, record.client));
    let registered = |record: &Record| record.registered.map(|(_, position)| position);
    for record in records {
        assert!(matches!(record.submitted, Submitted::Accepted(_)), "{record:?}");
        let (id, request) = (record.id.expect("accepted"), record.request.clone().expect("accepted"));
        let before = outcome.records.iter().filter(|other| registered(other) < registered(record)).count();
        let sequence = SequenceId(before as u64);
        ids.insert(sequence, id);
        let submission = Submission { sequence, tie_key: id.as_u128(), request };
        scheduler.apply(Command::Submit(submission), record.sent.expect("sent")).expect("valid");
    }
    drive(scheduler, &ids, startup(&world.plan))
}

/// The place at which it says that it was accepted: answers come in the order of the command lane.
fn order_of_submission(outcome: &Outcome, client: usize) -> Option<usize> {
    let said = format!("client {client}: Accepted");
    let entries = outcome.world.trace.entries();
    // A prepared one says so twice; the second time it is submitted.
    entries.iter().rposition(|(_, entry)| matches!(entry, Entry::Note(note) if note.starts_with(&said)))
}

fn startup(plan: &Plan) -> EngineTime {
    EngineTime::from_nanos(u64::from(plan.engine.startup) * 1_000)
}

fn drive(mut scheduler: Scheduler, ids: &BTreeMap<SequenceId, Uuid>, mut free_at: EngineTime) -> Seen {
    let mut seen = Seen::default();
    seen.streams.extend(ids.values().map(|id| (*id, Vec::new())));
    while let Some(pass) = next_pass(&mut scheduler, free_at) {
        let admitted =
            |&Admitted { sequence, cached_tokens, .. }: &Admitted| (ids[&sequence], cached_tokens, pass.started_at());
        seen.admissions.extend(pass.admitted().iter().map(admitted));
        free_at = pass.ends_at();
        let effects = scheduler.finish_pass(pass, free_at);
        if !effects.kv_events.is_empty() {
            seen.kv_events.push((effects.at, effects.kv_events.clone()));
        }
        seen.passes.extend(effects.pass);
        for Output { sequence, token, finish, prefill, .. } in effects.outputs.iter().copied() {
            let cached = prefill.map(|prefill| prefill.num_cached_tokens);
            seen.streams.get_mut(&ids[&sequence]).expect("known").push((token, finish, cached, effects.at));
        }
        scheduler.recycle(effects);
    }
    seen
}

/// At the end of the last one, or at the next arrival.
fn next_pass(scheduler: &mut Scheduler, free_at: EngineTime) -> Option<Pass> {
    let mut at = free_at;
    loop {
        if let Some(pass) = scheduler.begin_pass(at) {
            return Some(pass);
        }
        at = scheduler.next_deadline().filter(|next| *next > at)?;
    }
}

#[derive(Debug)]
struct Durations {
    micros: Vec<u32>,
    passes: usize,
}

impl PassTiming for Durations {
    fn pass_duration(&mut self, _: &PassWork) -> Duration {
        self.passes += 1;
        Duration::from_micros(self.micros[(self.passes - 1) % self.micros.len()].into())
    }
}
