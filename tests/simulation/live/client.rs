//! One client: how it comes by its stream, how it reads it, and what it saw.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use standin::{EngineTime, LiveRequest, OutputSignal, Request, SubmitError, SubmitOptions};
use uuid::Uuid;

use super::plan::{Entry as Way, Polls, Reading};
use super::trace::{Entry, Visible, noting};
use super::world::{PATIENCE, World};

/// What became of a submission.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Submitted {
    /// The client never came so far.
    Never,
    /// At this time.
    Accepted(EngineTime),
    Refused(String),
    /// The future was dropped; the request may be anywhere.
    Dropped,
    /// Its registration was dropped.
    Unused,
}

/// How a client left its stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Left {
    /// It had none.
    Nothing,
    /// It was refused one.
    Refused(EngineTime),
    /// It read it to its end.
    Read,
    /// It dropped it before it had read the end.
    Dropped(EngineTime),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) signal: OutputSignal,
    pub(crate) at: EngineTime,
    /// What was visible when the reader was woken for it; `None` where it was there already.
    pub(crate) woken: Option<Visible>,
}

#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) client: usize,
    pub(crate) id: Option<Uuid>,
    pub(crate) request: Option<Request>,
    /// When its route came to be, and the place in the trace; where it may have.
    pub(crate) registered: Option<(EngineTime, usize)>,
    pub(crate) sent: Option<EngineTime>,
    pub(crate) submitted: Submitted,
    pub(crate) seen: Vec<Seen>,
    pub(crate) left: Left,
    /// When its stream was cancelled by itself, and the answer.
    pub(crate) cancel: Option<(EngineTime, Option<bool>)>,
    pub(crate) handoff: Option<super::handoffs::Told>,
}

impl Record {
    pub(crate) fn new(client: usize) -> Self {
        Self {
            client,
            id: None,
            request: None,
            registered: None,
            sent: None,
            submitted: Submitted::Never,
            seen: Vec::new(),
            left: Left::Nothing,
            cancel: None,
            handoff: None,
        }
    }

    /// Notes that its route comes to be now.
    pub(crate) fn registers(&mut self, world: &World) {
        self.registered = Some((world.now(), world.trace.len()));
        world.trace.note(Entry::Calls(self.client));
    }

    pub(crate) fn dropped(&mut self, world: &World) {
        self.left = Left::Dropped(world.now());
        world.trace.say(format!("client {} drops its stream", self.client));
    }

    pub(crate) fn tokens(&self) -> Vec<u32> {
        self.seen.iter().filter_map(|seen| seen.signal.token_id).collect()
    }

    pub(crate) fn terminal(&self) -> Option<&Seen> {
        self.seen.last().filter(|seen| seen.signal.finish.is_some())
    }
}

pub(crate) async fn run(world: &Arc<World>, client: usize) -> Record {
    let plan = &world.plan.clients[client];
    let mut record = Record::new(client);
    world.at(plan.starts).await;
    let mut request = plan.request.request(client, plan.id.uuid(client));
    request.arrival = plan.request.arrival(world.now());
    record.request = Some(request.clone());
    if let Some(stream) = enter(world, &mut record, request, &plan.entry).await {
        world.trace.say(format!("client {client} is {}", stream.id()));
        record.id = Some(stream.id());
        let mut reader = Reader { world, stream: Some(stream), record: &mut record };
        if world.plan.may_stall() {
            drop(tokio::time::timeout(PATIENCE, reader.read(plan.reading, plan.stream_cancel)).await);
        } else {
            reader.read(plan.reading, plan.stream_cancel).await;
        }
        if let Some(stream) = reader.stream.take() {
            drop(stream);
            record.dropped(world);
        }
    }
    record
}

/// Submits the request in the client's way; gives its stream.
async fn enter(world: &Arc<World>, record: &mut Record, request: Request, entry: &Way) -> Option<LiveRequest> {
    let engine = world.engine()?;
    let options = SubmitOptions::default().with_buffering(world.plan.clients[record.client].buffering);
    match *entry {
        Way::Submit(polls) => {
            announced(world, record, polls);
            let submitted = world.prompt("submit", engine.submit_with(request, options), polls).await;
            return took(world, record, submitted);
        }
        Way::Decode(polls) => {
            announced(world, record, polls);
            let submitted = world.prompt("submit_decode", engine.submit_decode(request), polls).await;
            return took(world, record, submitted);
        }
        Way::Prepared(..) | Way::NeverSubmitted(_) => {}
        Way::Handoff(_) => unreachable!("handoffs have clients of their own"),
    }
    record.registers(world);
    let prepared = engine.prepare_request_with(request, options);
    drop(engine);
    let (registration, stream) = took(world, record, Some(prepared))?;
    match *entry {
        Way::Prepared(wait, polls) => {
            tokio::time::sleep(Duration::from_micros(wait.into())).await;
            let Some(engine) = world.engine() else {
                record.dropped(world);
                return None;
            };
            record.sent = Some(world.now());
            let submitted = world.prompt("submit_prepared", engine.submit_prepared(registration), polls).await;
            let submitted = submitted.map(|answer| answer.map_err(|refused| refused.error));
            // Its stream is still here and says what became of it.
            let _taken: Option<()> = took(world, record, submitted);
        }
        _ => {
            let wait = if let Way::NeverSubmitted(wait) = *entry { wait } else { 0 };
            tokio::time::sleep(Duration::from_micros(wait.into())).await;
            drop(registration);
            record.submitted = Submitted::Unused;
        }
    }
    Some(stream)
}

fn announced(world: &World, record: &mut Record, polls: Polls) {
    if polls != Some(0) {
        record.registers(world);
        record.sent = Some(world.now());
    }
}

/// Notes what became of a submission.
pub(crate) fn took<T>(world: &World, record: &mut Record, answer: Option<Result<T, SubmitError>>) -> Option<T> {
    let (submitted, taken) = match answer {
        Some(Ok(taken)) => (Submitted::Accepted(world.now()), Some(taken)),
        Some(Err(error)) => (Submitted::Refused(format!("{error:?}")), None),
        None => (Submitted::Dropped, None),
    };
    world.trace.say(format!("client {}: {submitted:?}", record.client));
    match submitted {
        Submitted::Dropped => record.left = Left::Dropped(world.now()),
        Submitted::Refused(_) => record.left = Left::Refused(world.now()),
        _ => {}
    }
    record.submitted = submitted;
    taken
}

pub(crate) struct Reader<'a> {
    pub(crate) world: &'a Arc<World>,
    pub(crate) stream: Option<LiveRequest>,
    pub(crate) record: &'a mut Record,
}

impl Reader<'_> {
    pub(crate) async fn read(&mut self, reading: Reading, cancel: Option<(usize, Polls)>) {
        let micros = |micros: u32| Duration::from_micros(micros.into());
        if let Reading::Late(after) = reading {
            tokio::time::sleep(micros(after)).await;
        }
        loop {
            let read = self.record.seen.len();
            if cancel.is_some_and(|(after, _)| after == read) && self.record.cancel.is_none() {
                self.cancel(cancel.and_then(|(_, polls)| polls)).await;
            }
            match reading {
                Reading::Every(pause) => tokio::time::sleep(micros(pause)).await,
                Reading::Stalls(after, pause) if after == read => tokio::time::sleep(micros(pause)).await,
                Reading::Dropped(after, pause) if after == read => {
                    tokio::time::sleep(micros(pause)).await;
                    return;
                }
                _ => {}
            }
            if !self.next().await {
                return;
            }
        }
    }

    /// Reads one signal; `false` after the end.
    async fn next(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let (world, client) = (self.world, self.record.client);
        world.trace.take_waking(client);
        // Each poll is of a future of its own: dropping one loses nothing.
        let signal = poll_fn(|context| {
            let waker = noting(&world.trace, Entry::Woken(client), context.waker());
            pin!(stream.recv()).poll(&mut Context::from_waker(&waker))
        })
        .await;
        let Some(signal) = signal else {
            assert!(self.record.terminal().is_some(), "client {client}: None without an end");
            self.stream = None;
            self.record.left = Left::Read;
            return false;
        };
        world.trace.note(Entry::Read(client, signal));
        let woken = world.trace.take_waking(client);
        self.record.seen.push(Seen { signal, at: world.now(), woken });
        true
    }

    async fn cancel(&mut self, polls: Polls) {
        let Some(stream) = &self.stream else { return };
        let called = self.world.now();
        self.record.cancel = Some((called, None));
        let call = stream.cancel();
        let answer = self.world.cancelled("cancel by the stream", call, polls).await;
        self.world.trace.say(format!("client {} cancels: {answer:?}", self.record.client));
        self.record.cancel = Some((called, answer));
    }
}
