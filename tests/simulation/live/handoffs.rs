//! A client that is one side of a handoff, by hand.

use std::sync::Arc;
use std::time::Duration;

use standin::{
    HandoffError, HandoffId, LiveHandoffControl, LiveHandoffEvent, LiveHandoffEvents, Refused, SubmitOptions,
};
use uuid::Uuid;

use super::client::{Reader, Record, Submitted, took};
use super::plan::{Entry as Way, HandoffPlan, HandoffStep, Polls, Reading};
use super::world::World;

/// How long a client waits for an event that may never come.
const A_WHILE: Duration = Duration::from_millis(60);

/// What a client was told about its handoff.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) is_source: bool,
    pub(crate) events: Vec<LiveHandoffEvent>,
    /// The events ended.
    pub(crate) over: bool,
    /// What a control of an earlier registration was answered, while this one was there.
    pub(crate) stale: Option<Result<(), HandoffError>>,
    /// A command that ends it was given, or its events were dropped.
    pub(crate) given_up: bool,
    pub(crate) failed: bool,
    pub(crate) activated: bool,
}

pub(crate) fn id(n: u8) -> HandoffId {
    HandoffId(Uuid::from_u128(500_000 + u128::from(n)))
}

pub(crate) async fn run(world: &Arc<World>, client: usize) -> Record {
    let plan = &world.plan.clients[client];
    let Way::Handoff(handoff) = &plan.entry else { unreachable!("only for handoffs") };
    let mut record = Record::new(client);
    let mut told = Told { is_source: handoff.is_source, ..Told::default() };
    world.at(plan.starts).await;
    take_part(world, handoff, &mut record, &mut told).await;
    record.handoff = Some(told);
    record
}

async fn take_part(world: &Arc<World>, handoff: &HandoffPlan, record: &mut Record, told: &mut Told) {
    let client = &world.plan.clients[record.client];
    let (Some(engine), handoff_id) = (world.engine(), id(handoff.id)) else { return };
    let stale = match handoff.stale.map(|step| (step, engine.register_handoff(handoff_id))) {
        // Without events it is over, and the id free.
        Some((step, Ok((control, _events)))) => Some((step, control)),
        _ => None,
    };
    let (control, events) = match engine.register_handoff(handoff_id) {
        Ok(registered) => registered,
        Err(error) => return world.trace.say(format!("client {}: {error}", record.client)),
    };
    if let Some((step, earlier)) = stale {
        told.stale = command(world, &earlier, step, None).await;
    }
    let mut request = client.request.request(record.client, client.id.uuid(record.client));
    if handoff.is_source {
        request = request.prefill_part();
    }
    record.request = Some(request.clone());
    record.registers(world);
    let options = SubmitOptions::default().with_buffering(client.buffering);
    let prepared = engine.prepare_request_with(request, options);
    drop(engine);
    let Some((registration, stream)) = took(world, record, Some(prepared)) else { return };
    record.id = Some(stream.id());
    record.sent = Some(world.now());
    let submitted = if handoff.is_source {
        world.prompt("submit_prefill", control.submit_prefill(registration), handoff.submit).await
    } else {
        world.prompt("reserve_destination", control.reserve_destination(registration), handoff.submit).await
    };
    record.submitted = submitted_as(world, submitted);
    let mut side = Side { control, events: Some(events), told };
    let mut reader = Reader { world, stream: Some(stream), record };
    for &(step, polls) in &handoff.steps {
        match step {
            HandoffStep::Wait(micros) => tokio::time::sleep(Duration::from_micros(micros.into())).await,
            HandoffStep::Event => side.event().await,
            HandoffStep::DropEvents => {
                side.events = None;
                side.told.given_up = true;
            }
            HandoffStep::DropStream => {
                if reader.stream.take().is_some() {
                    reader.record.dropped(world);
                }
            }
            _ => side.command(world, step, polls).await,
        }
    }
    side.leave(reader).await;
}

fn submitted_as(world: &World, answer: Option<Result<(), Refused<HandoffError>>>) -> Submitted {
    match answer {
        Some(Ok(())) => Submitted::Accepted(world.now()),
        Some(Err(refused)) => Submitted::Refused(format!("{:?}", refused.error)),
        None => Submitted::Dropped,
    }
}

struct Side<'a> {
    control: LiveHandoffControl,
    events: Option<LiveHandoffEvents>,
    told: &'a mut Told,
}

impl Side<'_> {
    async fn event(&mut self) {
        let Some(events) = &mut self.events else { return };
        match tokio::time::timeout(A_WHILE, events.recv()).await {
            Ok(Some(event)) => self.told.events.push(event),
            Ok(None) => self.told.over = true,
            Err(_) => {}
        }
    }

    async fn command(&mut self, world: &World, step: HandoffStep, polls: Polls) {
        // Of a future that is dropped nobody knows whether it did something.
        let may = |answer: &Option<Result<(), HandoffError>>| !matches!(answer, Some(Err(_)));
        let answer = command(world, &self.control, step, polls).await;
        match step {
            HandoffStep::CancelSource | HandoffStep::CancelDestination => self.told.given_up |= may(&answer),
            HandoffStep::Fail(_) => self.told.failed |= may(&answer),
            HandoffStep::Activate => self.told.activated |= may(&answer),
            _ => {}
        }
        world.trace.say(format!("{:?} {step:?}: {answer:?}", self.control.handoff_id()));
    }

    /// Lets go of the control first: then everything must end by itself.
    async fn leave(self, mut reader: Reader<'_>) {
        let Self { control, events, told } = self;
        drop(control);
        if reader.stream.is_some() {
            let world = reader.world;
            if world.plan.may_stall() {
                drop(tokio::time::timeout(super::world::PATIENCE, reader.read(Reading::Prompt, None)).await);
            } else {
                reader.read(Reading::Prompt, None).await;
            }
            if reader.stream.take().is_some() {
                reader.record.dropped(world);
            }
        }
        let Some(mut events) = events else { return };
        while let Ok(event) = tokio::time::timeout(super::world::PATIENCE, events.recv()).await {
            match event {
                Some(event) => told.events.push(event),
                None => {
                    told.over = true;
                    return;
                }
            }
        }
    }
}

/// Gives one command; `None` where its future was dropped.
async fn command(
    world: &World,
    control: &LiveHandoffControl,
    step: HandoffStep,
    polls: Polls,
) -> Option<Result<(), HandoffError>> {
    match step {
        HandoffStep::Heartbeat => world.prompt("heartbeat", control.heartbeat(), polls).await,
        HandoffStep::Release => world.prompt("release_source", control.release_source(), polls).await,
        HandoffStep::CancelSource => world.prompt("cancel_source", control.cancel_source(), polls).await,
        HandoffStep::Activate => world.prompt("activate", control.activate_destination(None), polls).await,
        HandoffStep::Fail(valid) => world.prompt("fail_transfer", control.fail_transfer(valid), polls).await,
        HandoffStep::CancelDestination => world.prompt("cancel_destination", control.cancel_destination(), polls).await,
        _ => None,
    }
}
