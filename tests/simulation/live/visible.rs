//! What the sinks and the metrics showed: in which order, and how much at the most.

use standin::{EngineMetrics, EngineTime, FinishReason, PassMetrics};

use super::client::{Left, Record, Submitted};
use super::plan::Sink;
use super::trace::Entry;
use super::world::Outcome;

pub(crate) fn check(outcome: &Outcome) {
    let entries = outcome.world.trace.entries();
    passes(outcome, &entries);
    admissions(outcome, &entries);
    metrics(outcome, &entries);
}

/// Passes follow each other, and each batch is shown in order: KV events, then the pass (r29, r40).
fn passes(outcome: &Outcome, entries: &[(EngineTime, Entry)]) {
    let shown = |sink: Sink| !matches!(sink, Sink::None);
    let engine = &outcome.world.plan.engine;
    let mut last: Option<PassMetrics> = None;
    let mut kv_events_of = None;
    for (at, entry) in entries {
        match entry {
            Entry::KvEvents(boundary, events) => {
                assert!(!events.is_empty() && boundary <= at);
                assert!(last.is_none_or(|last| last.ended_at <= *boundary), "KV events of {boundary:?} come late");
                kv_events_of = Some(*boundary);
            }
            Entry::Pass(pass) => {
                assert_eq!(pass.pass, last.map_or(0, |last| last.pass + 1), "a pass is missing");
                assert!(last.is_none_or(|last| last.ended_at <= pass.started_at), "{pass:?} overlaps");
                if shown(engine.kv_sink) {
                    assert!(kv_events_of.is_none_or(|events| events <= pass.ended_at), "KV events of a later pass");
                }
                last = Some(*pass);
            }
            _ => {}
        }
    }
}

/// A request is admitted once, before its first token and not before its arrival; the pass that admits it is the
/// next one that is shown (r29, r30, r43).
fn admissions(outcome: &Outcome, entries: &[(EngineTime, Entry)]) {
    let mut pending: Vec<EngineTime> = Vec::new();
    for (at, entry) in entries {
        match entry {
            Entry::Admission(admission) => {
                assert!(admission.admitted_at <= admission.observed_at && admission.observed_at <= *at);
                pending.push(admission.admitted_at);
            }
            Entry::Pass(pass) => {
                assert!(pending.iter().all(|at| *at == pass.started_at), "{pending:?} before {pass:?}");
                pending.clear();
            }
            _ => {}
        }
    }
    if !outcome.world.plan.engine.admissions {
        return;
    }
    let closed = entries.iter().any(|(_, entry)| *entry == Entry::Ends(super::trace::Cause::AdmissionsClosed));
    for record in outcome.records.iter().filter(|record| !is_shared(outcome, record)) {
        let of = |admission: &standin::Admission| Some(admission.request_id) == record.id;
        let admitted = entries.iter().enumerate().filter_map(|(position, (_, entry))| match entry {
            Entry::Admission(admission) if of(admission) => Some((position, admission)),
            _ => None,
        });
        let admitted: Vec<_> = admitted.collect();
        let client = record.client;
        assert!(admitted.len() <= 1, "client {client} is admitted {} times", admitted.len());
        let first = record.seen.first().filter(|seen| seen.signal.token_id.is_some());
        let Some((position, admission)) = admitted.first() else {
            let is_destination = record.handoff.as_ref().is_some_and(|told| !told.is_source);
            assert!(first.is_none() || closed || is_destination, "client {client} has a token and was not admitted");
            continue;
        };
        let arrival = record.request.as_ref().and_then(|request| request.arrival);
        let not_before = arrival.max(record.sent).unwrap_or_default();
        assert!(admission.admitted_at >= not_before, "client {client}: {admission:?} before {not_before:?}");
        if let Some(first) = first {
            let read =
                entries.iter().position(|(_, entry)| matches!(entry, Entry::Read(reader, _) if *reader == client));
            assert!(read.is_some_and(|read| *position < read) && admission.admitted_at <= first.signal.produced_at);
        }
    }
}

fn is_shared(outcome: &Outcome, record: &Record) -> bool {
    matches!(outcome.world.plan.clients[record.client].id, super::plan::Id::Shared(_))
}

/// The metrics never show more than can be there: whoever was cancelled, cut off or dropped is gone at the next
/// boundary, with all blocks.
fn metrics(outcome: &Outcome, entries: &[(EngineTime, Entry)]) {
    let plan = &outcome.world.plan;
    let jumps: Vec<EngineTime> =
        entries.iter().filter(|(_, entry)| matches!(entry, Entry::Jump(_))).map(|(at, _)| *at).collect();
    let mut last = EngineMetrics::default();
    for (position, (_, entry)) in entries.iter().enumerate() {
        let Entry::Metrics(metrics) = entry else { continue };
        assert!(metrics.at >= last.at && metrics.num_passes >= last.num_passes, "{metrics:?} after {last:?}");
        assert!(metrics.num_used_blocks <= metrics.num_usable_blocks);
        last = *metrics;
        if plan.aborts_late() {
            continue;
        }
        let inside: Vec<_> = outcome
            .records
            .iter()
            .filter(|record| record.registered.is_some_and(|(_, registered)| registered < position))
            .filter(|record| may_be_inside(record, metrics.at, outcome, &jumps))
            .collect();
        let requests = metrics.num_requests_running + metrics.num_requests_waiting;
        assert!(requests <= inside.len() as u64, "{requests} requests at {:?}, of {}", metrics.at, inside.len());
        if !plan.has_handoffs() {
            let blocks: u64 = inside.iter().map(|record| most_blocks(outcome, record)).sum();
            assert!(metrics.num_used_blocks <= blocks, "{blocks} blocks at most: {metrics:?}");
        }
    }
}

/// Whether the scheduler may know it at this boundary.
fn may_be_inside(record: &Record, boundary: EngineTime, outcome: &Outcome, jumps: &[EngineTime]) -> bool {
    if matches!(record.submitted, Submitted::Refused(_) | Submitted::Never | Submitted::Unused) {
        return false;
    }
    let gone = match (record.left, record.terminal()) {
        (_, Some(terminal)) => match terminal.signal.finish {
            // Its last pass does not count it any more. Several may end at one instant.
            Some(FinishReason::Length | FinishReason::Stop { .. })
                if terminal.signal.token_id.is_some() && !outcome.world.plan.engine.passes.contains(&0) =>
            {
                return boundary < terminal.signal.produced_at;
            }
            _ => terminal.signal.produced_at,
        },
        (Left::Dropped(at), None) => at,
        _ => return true,
    };
    boundary <= gone || jumps.contains(&gone)
}

fn most_blocks(outcome: &Outcome, record: &Record) -> u64 {
    let config = &outcome.world.config;
    let tokens = record
        .request
        .as_ref()
        .map_or(0, |request| request.prompt.len() as u64 + u64::from(request.output_limit(config.max_model_len)));
    config.kind.blocks_for(tokens) + 1
}
