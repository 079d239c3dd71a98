//! What a run may have shown: a model of each request by itself, and the bounds between them.

use std::collections::BTreeMap;
use std::time::Duration;

use standin::{
    EngineConfig, EngineKind, EngineTime, FinishReason, LiveHandoffEvent, OutputBuffering, OutputPlan, Request,
    TokenGenerator,
};
use uuid::Uuid;

use super::client::{Left, Record, Submitted};
use super::handoffs::Told;
use super::plan::{Disturbance, Entry as Way, Id, Plan, Reading, Sink};
use super::trace::{Cause, Entry, Visible};
use super::world::{CancelRecord, Outcome, agrees};

/// Tokio's timers count in milliseconds: so much later than modelled something may be seen.
const TICK: Duration = Duration::from_millis(1);

/// Every token of a request, and why it ends with the last one.
pub(crate) fn answer(request: &Request, key: u128, config: &EngineConfig) -> (Vec<u32>, FinishReason) {
    let generator = TokenGenerator::new(config.seed, key, config.vocab_size);
    let mut tokens = Vec::new();
    while tokens.len() < limit(request, config) {
        let token = match &request.output {
            OutputPlan::Tokens(plan) => plan[tokens.len()],
            _ => generator.token(tokens.len() as u32, &request.stop_token_ids),
        };
        tokens.push(token);
        if request.stop_token_ids.contains(&token) {
            return (tokens, FinishReason::Stop { stop_token: Some(token) });
        }
    }
    (tokens, FinishReason::Length)
}

/// How many tokens it may have. SGLang leaves room in context and pool (see `engine-semantics.md`).
fn limit(request: &Request, config: &EngineConfig) -> usize {
    let (prompt, context) = (request.prompt.len(), config.max_model_len as usize);
    let asked = match (&request.output, request.max_output_tokens) {
        (OutputPlan::Tokens(plan), _) => plan.len(),
        (_, Some(max)) => max as usize,
        (_, None) => context - prompt,
    };
    match &config.kind {
        EngineKind::Sglang(sglang) => {
            let page = sglang.page_size as usize;
            let pool = config.kind.usable_blocks() as usize * page;
            let in_context = context.min(pool).saturating_sub(prompt + 2);
            let in_pool = pool.saturating_sub(prompt.next_multiple_of(page) + page + 1);
            asked.min(in_context).min(in_pool).max(1)
        }
        _ => asked.min(context - prompt),
    }
}

/// All that must hold for a run.
pub(crate) fn check(outcome: &Outcome) {
    let checked = Checked::new(outcome);
    checked.ends();
    for record in &outcome.records {
        checked.stream(record);
        checked.finish(record);
        checked.buffer(record);
        checked.refusal(record);
        checked.cancels(record);
        if let Some(told) = &record.handoff {
            checked.handoff(record, told);
        }
    }
    checked.order_of_stopped_streams();
    super::visible::check(outcome);
}

struct Checked<'a> {
    outcome: &'a Outcome,
    plan: &'a Plan,
    entries: Vec<(EngineTime, Entry)>,
    /// What ended the engine, or could have.
    causes: Vec<(EngineTime, Cause)>,
    jumps: bool,
}

impl<'a> Checked<'a> {
    fn new(outcome: &'a Outcome) -> Self {
        let entries = outcome.world.trace.entries();
        let causes = entries.iter().filter_map(|(at, entry)| match entry {
            Entry::Ends(cause) => Some((*at, *cause)),
            _ => None,
        });
        let causes = causes.collect();
        let plan = &outcome.world.plan;
        let jumps = plan.others.iter().any(|(_, other)| matches!(other, Disturbance::Jump(_)));
        Self { outcome, plan, entries, causes, jumps }
    }

    /// One cause, the first one; one error in the log where something panicked, and else none.
    fn ends(&self) {
        let errors = &self.outcome.errors;
        let first = self.causes.first().map(|(_, cause)| *cause);
        let panicked = self.causes.iter().any(|(_, cause)| *cause == Cause::Panic);
        assert!(errors.len() <= usize::from(panicked), "errors in the log: {errors:?}");
        assert!(first != Some(Cause::Panic) || errors.len() == 1, "a failure is logged once: {errors:?}");
        let Some(answer) = &self.outcome.shutdown else { return };
        let fits = |cause: Cause| match answer {
            Ok(()) => matches!(cause, Cause::Shutdown | Cause::HandleDropped),
            Err(standin::ShutdownError::Stopped(stopped)) => agrees(stopped, cause),
            Err(other) => panic!("{other:?}"),
        };
        assert!(self.causes.iter().any(|(_, cause)| fits(*cause)), "{answer:?} of {:?}", self.causes);
        let alone = self.causes.len() == 1 || self.causes[0].0 < self.causes[1].0;
        if alone && !self.jumps && first != Some(Cause::HandleDropped) {
            assert!(first.is_some_and(fits), "{answer:?}, and not {:?}", self.causes);
        }
    }

    fn answer(&self, record: &Record) -> (Vec<u32>, FinishReason) {
        let key = record.id.map_or(0, |id| id.as_u128());
        let Some(request) = &record.request else { return (Vec::new(), FinishReason::Length) };
        let (mut tokens, finish) = answer(request, key, &self.outcome.world.config);
        let is_source = record.handoff.as_ref().is_some_and(|told| told.is_source);
        if is_source && matches!(self.plan.engine.kind, EngineKind::Sglang(_)) {
            // A prefill server gives one token and looks for no end in it.
            tokens.truncate(1);
            return (tokens, FinishReason::Length);
        }
        (tokens, finish)
    }

    /// A stream's tokens are its request's, in order, and it says everything once (r13, r15, r16).
    fn stream(&self, record: &Record) {
        let client = record.client;
        let (answer, natural) = self.answer(record);
        let tokens = record.tokens();
        assert!(answer.starts_with(&tokens), "client {client}: {tokens:?}, and not {answer:?}");
        let mut latest = EngineTime::ZERO;
        for (index, seen) in record.seen.iter().enumerate() {
            let signal = &seen.signal;
            assert_eq!(Some(signal.request_id), record.id, "client {client}");
            assert!(latest <= signal.produced_at && signal.produced_at <= signal.observed_at, "client {client}");
            assert!(signal.observed_at <= seen.at, "client {client}: {signal:?} read at {:?}", seen.at);
            latest = signal.produced_at;
            let (is_last, is_first) = (index + 1 == record.seen.len(), index == 0);
            assert!(signal.finish.is_none() || is_last, "client {client}: {signal:?} is not the last");
            assert!(signal.token_id.is_some() || signal.finish.is_some(), "client {client}: {signal:?}");
            assert_eq!(signal.cached_tokens.is_some(), is_first && signal.token_id.is_some(), "client {client}");
            if !self.plan.may_lag() && signal.token_id.is_some() {
                let late = signal.observed_at.saturating_since(signal.produced_at);
                assert!(late <= TICK, "client {client}: seen {late:?} after its pass");
            }
            self.woken(record, index);
        }
        if record.left == Left::Read {
            let finish = record.terminal().and_then(|seen| seen.signal.finish).expect("read to its end");
            let whole = matches!(finish, FinishReason::Length | FinishReason::Stop { .. });
            assert!(!whole || (tokens == answer && finish == natural), "client {client}: {finish:?} after {tokens:?}");
        }
    }

    /// A reader is woken for a token between the metrics of its pass and those of the engine (r29).
    fn woken(&self, record: &Record, index: usize) {
        let seen = &record.seen[index];
        let (Some(visible), Some(_)) = (seen.woken, seen.signal.token_id) else { return };
        if !matches!(self.plan.engine.pass_sink, Sink::None) {
            let pass = Visible::Pass(seen.signal.produced_at);
            assert_eq!(visible, pass, "client {}: woken for {:?}", record.client, seen.signal);
        }
    }

    /// Why it ended is something that was done to it.
    fn finish(&self, record: &Record) {
        let Some(terminal) = record.terminal() else { return };
        let (client, signal) = (record.client, &terminal.signal);
        let finish = signal.finish.expect("terminal");
        let had =
            |wanted: fn(&Cause) -> bool| self.causes.iter().any(|(at, cause)| wanted(cause) && *at <= terminal.at);
        let told = record.handoff.as_ref();
        let allowed = match finish {
            FinishReason::Length | FinishReason::Stop { .. } => {
                matches!(record.submitted, Submitted::Accepted(_) | Submitted::Dropped)
            }
            FinishReason::Cancelled => self.may_be_cancelled(record),
            FinishReason::SlowConsumer => {
                matches!(self.buffering(record), OutputBuffering::CancelOnOverflow { .. }) && !self.keeps_pace(record)
            }
            FinishReason::TransferFailed => told.is_some_and(|told| told.failed),
            FinishReason::EngineStopped => had(|cause| *cause != Cause::Panic),
            FinishReason::Failed => had(|cause| *cause == Cause::Panic),
            _ => false,
        };
        assert!(allowed, "client {client}: {signal:?} of {record:?}");
    }

    fn may_be_cancelled(&self, record: &Record) -> bool {
        let unsubmitted = matches!(record.submitted, Submitted::Unused | Submitted::Refused(_) | Submitted::Never);
        let by_handoff = record.handoff.is_some();
        unsubmitted || by_handoff || record.submitted == Submitted::Dropped || self.calls(record).next().is_some()
    }

    /// Whether its reader was there whenever a token came.
    fn keeps_pace(&self, record: &Record) -> bool {
        record.handoff.is_none() && matches!(self.plan.clients[record.client].reading, Reading::Prompt)
    }

    fn buffering(&self, record: &Record) -> OutputBuffering {
        let plan = &self.plan.clients[record.client];
        // `submit_decode` takes no options: the engine's own.
        if matches!(plan.entry, Way::Decode(_)) { OutputBuffering::default() } else { plan.buffering }
    }

    /// No more is kept for a reader than it allows (r14, r19, r21), and one is cut off with a full queue alone.
    fn buffer(&self, record: &Record) {
        let (OutputBuffering::CancelOnOverflow { capacity } | OutputBuffering::Throttle { capacity }) =
            self.buffering(record)
        else {
            return;
        };
        let tokens: Vec<_> = record.seen.iter().filter(|seen| seen.signal.token_id.is_some()).collect();
        let longest = record
            .request
            .as_ref()
            .map_or(0, |request| request.output_limit(self.outcome.world.config.max_model_len) as usize);
        let capacity = capacity.get().min(longest.max(1));
        for (index, seen) in tokens.iter().enumerate() {
            let unread = tokens[..=index].iter().filter(|earlier| earlier.at > seen.signal.observed_at).count();
            assert!(unread <= capacity, "client {}: {unread} unread of {capacity}", record.client);
        }
        if let Some(terminal) = record.terminal()
            && terminal.signal.finish == Some(FinishReason::SlowConsumer)
        {
            let unread = tokens.iter().filter(|seen| seen.at >= terminal.signal.observed_at).count();
            assert!(unread >= capacity, "client {}: cut off with {unread} of {capacity} unread", record.client);
        }
    }

    /// What is refused has a reason, and an id is free as soon as its request has ended (r06).
    fn refusal(&self, record: &Record) {
        let (client, Submitted::Refused(error)) = (record.client, &record.submitted) else { return };
        let now = record.registered.map_or(EngineTime::ZERO, |(at, _)| at);
        let stopped = self.causes.first().is_some_and(|(at, _)| record.sent.unwrap_or(now).max(now) >= *at);
        let allowed = if error.starts_with("DuplicateId") {
            let others = self.outcome.records.iter().filter(|other| other.client != client);
            let same = |other: &&Record| self.id(other) == self.id(record) && self.id(record).is_some();
            others.filter(same).any(|other| self.jumps || self.is_active(other, now))
        } else if error == "Cancelled" {
            self.calls(record).next().is_some()
        } else {
            error.starts_with("Stopped") && stopped
        };
        assert!(allowed, "client {client}: {error}");
    }

    fn id(&self, record: &Record) -> Option<Uuid> {
        self.plan.clients[record.client].id.uuid(record.client)
    }

    /// Whether its route may have been there at this time.
    fn is_active(&self, record: &Record, at: EngineTime) -> bool {
        let ended = match record.left {
            Left::Read => record.terminal().map_or(EngineTime::ZERO, |seen| seen.signal.observed_at),
            Left::Dropped(gone) | Left::Refused(gone) => gone,
            Left::Nothing => return false,
        };
        record.registered.is_some_and(|(registered, _)| registered <= at && at <= ended)
    }

    /// When a cancel of this request was called for, and the answer. Of an id that several use, maybe.
    fn calls(&self, record: &Record) -> impl Iterator<Item = (EngineTime, Option<bool>)> {
        let by_engine = self.outcome.cancels.iter().filter(|cancel| Some(cancel.id) == self.id(record));
        let by_engine = by_engine.map(|CancelRecord { called, answer, .. }| (*called, answer.map(|(is, _)| is)));
        record.cancel.into_iter().chain(by_engine).collect::<Vec<_>>().into_iter()
    }

    /// One call removes a request at the most, nothing is forwarded after any (r23–r26).
    fn cancels(&self, record: &Record) {
        let client = record.client;
        if matches!(self.plan.clients[client].id, Id::Shared(_)) {
            return;
        }
        let calls: Vec<_> = self.calls(record).collect();
        let removed = calls.iter().filter(|(_, answer)| *answer == Some(true)).count();
        assert!(removed <= 1, "client {client}: {removed} calls removed it");
        let Some(terminal) = record.terminal() else { return };
        let is_cancelled = terminal.signal.finish == Some(FinishReason::Cancelled);
        assert!(removed == 0 || is_cancelled, "client {client}: removed, and {terminal:?}");
        let answered = calls.iter().all(|(_, answer)| answer.is_some());
        let accepted = matches!(record.submitted, Submitted::Accepted(_));
        // One that is to take part in one more pass may see the engine end first.
        if is_cancelled && answered && accepted && record.handoff.is_none() && !self.plan.aborts_late() {
            // None did where its last token was on its way, or the engine ended before it answered.
            let ended = || record.tokens().len() + 1 == self.answer(record).0.len();
            let stopped = || self.causes.first().is_some_and(|(at, _)| *at <= terminal.signal.observed_at);
            assert!(removed == 1 || ended() || stopped(), "client {client}: one call removed it: {calls:?}");
        }
        if self.jumps || self.plan.aborts_late() {
            return;
        }
        let since = record.registered.map_or(EngineTime::ZERO, |(at, _)| at);
        for (called, answer) in calls.iter().filter(|(called, answer)| *called > since && answer.is_some()) {
            let last = terminal.signal.observed_at;
            assert!(last <= *called, "client {client}: cancelled at {called:?} ({answer:?}), ended at {last:?}");
        }
    }

    fn handoff(&self, record: &Record, told: &Told) {
        use LiveHandoffEvent::*;
        let client = record.client;
        if let Some(answer) = &told.stale {
            let told = matches!(answer, Err(standin::HandoffError::Superseded | standin::HandoffError::Stopped(_)));
            assert!(told, "client {client}: a control of an earlier registration was answered {answer:?}");
        }
        let legal = matches!(
            (told.is_source, &told.events[..]),
            (_, [])
                | (true, [SourceHeld { .. }] | [SourceEnded { .. }] | [SourceHeld { .. }, SourceEnded { .. }])
                | (false, [DestinationReserved { .. }] | [DestinationEnded { .. }])
                | (false, [DestinationReserved { .. }, DestinationEnded { .. }])
        );
        assert!(legal, "client {client}: {:?}", told.events);
        let came_far = record.id.is_some() && !told.given_up;
        assert!(told.over || !came_far || self.plan.may_stall(), "client {client}: its events never end");
    }

    /// Streams that the end of the engine ends, end in the order of their sequences (r39).
    fn order_of_stopped_streams(&self) {
        let mut woken = BTreeMap::new();
        for (position, (_, entry)) in self.entries.iter().enumerate() {
            if let Entry::Woken(client) = entry {
                woken.insert(*client, position);
            }
        }
        // One whose submission is still in its lane ends with that.
        let accepted = |record: &&Record| matches!(record.submitted, Submitted::Accepted(_));
        let stopped = self.outcome.records.iter().filter(accepted).filter(|record| {
            record.terminal().is_some_and(|seen| {
                let finish = seen.signal.finish;
                seen.woken.is_some() && matches!(finish, Some(FinishReason::EngineStopped | FinishReason::Failed))
            })
        });
        let mut order: Vec<_> =
            stopped.filter_map(|record| Some((record.registered?.1, *woken.get(&record.client)?))).collect();
        order.sort_unstable();
        assert!(order.is_sorted_by_key(|(_, woken)| *woken), "streams ended out of order: {order:?}");
    }
}
