//! The prefill engine and the coordinators in this process, the decode engine in another one.

use std::collections::HashMap;
use std::pin::Pin;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use standin::handoff::{
    ActionOutcome, ActionTarget, CoordinatorAction, CoordinatorConfig, CoordinatorFact, LinkSharing,
};
use standin::{
    Coordinator, EngineMetrics, EngineTime, HandoffId, LiveEngine, LiveHandoffSide, LiveLink, LiveRequest,
    LiveRequestRegistration, Request, SubmitError,
};
use tokio::io::AsyncRead;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::Options;
use crate::run::{Run, Served, wait_for};
use crate::wire::{FromDecode, ToDecode, clocks, read_lines, write_lines};

/// The second process: it ends with this one.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        // It has ended already, unless something went wrong.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Starts the second process and waits for its connection.
async fn start_worker(options: &Options, epoch: SystemTime) -> anyhow::Result<(Worker, TcpStream)> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let epoch = epoch.duration_since(SystemTime::UNIX_EPOCH)?.as_nanos().to_string();
    let child = Command::new(std::env::current_exe()?)
        .args(["--decode-worker", &listener.local_addr()?.to_string(), &epoch])
        .args(["--speedup", &options.speedup.to_string(), "--engine", options.engine_name()])
        .spawn()?;
    let worker = Worker(child);
    let connected = tokio::time::timeout(Duration::from_secs(10), listener.accept()).await;
    let (socket, _) = connected.context("the decode engine's process does not connect")??;
    socket.set_nodelay(true)?;
    Ok((worker, socket))
}

/// Where the messages for each handoff go.
type Inboxes = Arc<Mutex<HashMap<HandoffId, UnboundedSender<FromDecode>>>>;

/// What all handoffs of a run have in common.
#[derive(Clone)]
struct Shared {
    prefill: LiveEngine,
    link: LiveLink,
    config: CoordinatorConfig,
    epoch: Instant,
    time_factor: f64,
    to_decode: UnboundedSender<ToDecode>,
    inboxes: Inboxes,
}

pub(crate) async fn disaggregated(options: &Options) -> anyhow::Result<Run> {
    let (epoch, epoch_unix) = clocks();
    let (worker, mut socket) = start_worker(options, epoch_unix).await?;
    let (observer, mut admissions) = mpsc::unbounded_channel();
    let builder = LiveEngine::builder(options.engine()).epoch(epoch).admissions(observer);
    let prefill = builder.transfer_timing(options.transfer()?).start()?;
    let (to_decode, messages) = mpsc::unbounded_channel();
    let inboxes = Inboxes::default();
    let shared = Shared {
        prefill: prefill.clone(),
        link: LiveLink::new(LinkSharing::FairShare),
        config: CoordinatorConfig::of_kind(&options.engine().kind).with_speedup(options.engine().speedup),
        epoch,
        time_factor: options.time_factor(),
        to_decode,
        inboxes: Arc::clone(&inboxes),
    };
    let (input, output) = socket.split();
    // When all handoffs are over nobody sends any more; then the other process says its last line.
    let (mut run, decode, ()) =
        tokio::try_join!(hand_all_over(options, shared), route(input, &inboxes), write_lines(output, messages))?;
    drop(worker);
    run.admitted(&mut admissions);
    run.count(&prefill.metrics_receiver().borrow());
    run.count(&decode);
    prefill.shutdown().await?;
    Ok(run)
}

/// Gives each handoff its messages; what the decode engine counted comes last.
async fn route(input: impl AsyncRead + Unpin, inboxes: &Inboxes) -> anyhow::Result<EngineMetrics> {
    let mut metrics = None;
    read_lines(input, |message: FromDecode| {
        let id = match &message {
            FromDecode::Fact(id, _) => *id,
            FromDecode::Signal(signal) => HandoffId(signal.request_id),
            FromDecode::Metrics(counted) => {
                metrics = Some(**counted);
                return Ok(());
            }
        };
        let inboxes = inboxes.lock().unwrap_or_else(PoisonError::into_inner);
        // A handoff that is over listens no more.
        if let Some(inbox) = inboxes.get(&id) {
            drop(inbox.send(message));
        }
        Ok(())
    })
    .await?;
    metrics.context("the decode engine's process ended early")
}

async fn hand_all_over(options: &Options, shared: Shared) -> anyhow::Result<Run> {
    let (mut run, mut handoffs) = (Run::default(), JoinSet::new());
    for request in options.requests(options.time_factor())? {
        wait_for(&request, shared.prefill.now()).await;
        match shared.prefill.prepare_request(request.clone().prefill_part()) {
            Ok(prepared) => drop(handoffs.spawn(hand_over(shared.clone(), request, prepared))),
            Err(SubmitError::Request(error)) => run.refused(&error),
            Err(error) => return Err(error.into()),
        }
    }
    while let Some(served) = handoffs.join_next().await {
        run.served(served??);
    }
    Ok(run)
}

/// One handoff: its coordinator, the prefill engine's side, and the lines to and from the decode engine's.
async fn hand_over(
    shared: Shared,
    request: Request,
    (registration, mut source_stream): (LiveRequestRegistration, LiveRequest),
) -> anyhow::Result<Served> {
    let mut served = Served::new(&request, shared.time_factor);
    let id = HandoffId(registration.id());
    let mut source = LiveHandoffSide::source(shared.prefill.register_handoff(id)?, registration);
    let mut inbox = shared.begin(id, request)?;
    let mut coordinator = Coordinator::new(id, shared.config.clone(), shared.prefill.now())?;
    let (mut began, mut transfer) = (EngineTime::ZERO, None);
    // The activation that carries the source's token over.
    let mut carries = None;
    while coordinator.outcome().is_none() || !served.has_ended() {
        while let Some(issued) = coordinator.poll_action() {
            match issued.action.target() {
                ActionTarget::Source => {
                    let outcome = source.carry_out(issued.action).await;
                    let fact = CoordinatorFact::Outcome { action: issued.id, outcome };
                    coordinator.apply(fact, shared.prefill.now());
                }
                ActionTarget::Link => (began, transfer) = (shared.prefill.now(), shared.transfer(issued.action)),
                _ => {
                    if let CoordinatorAction::ActivateDestination { first_token: Some(_) } = issued.action {
                        carries = Some(issued.id);
                    }
                    shared.to_decode.send(ToDecode::Do(id, issued))?;
                }
            }
        }
        let due = coordinator.next_deadline().map(|at| shared.epoch + at.since_epoch());
        tokio::select! {
            biased;
            fact = source.fact() => coordinator.apply(fact, shared.prefill.now()),
            message = inbox.recv() => match message.context("the decode engine's process has gone")? {
                FromDecode::Fact(_, fact) => {
                    let now = shared.prefill.now();
                    // What the decode engine sends from here on comes after that token.
                    if let CoordinatorFact::Outcome { action, outcome: ActionOutcome::Done } = fact
                        && carries == Some(action)
                        && let Some(mut first) = source_stream.recv().await
                    {
                        (first.finish, first.produced_at) = (None, now);
                        served.signal(first);
                    }
                    coordinator.apply(fact, now);
                }
                FromDecode::Signal(signal) => served.signal(signal),
                FromDecode::Metrics(_) => {}
            },
            () = ended(&mut transfer) => {
                transfer = None;
                served.transferred(shared.prefill.now().saturating_since(began));
                coordinator.apply(CoordinatorFact::TransferCompleted, shared.prefill.now());
            }
            () = tokio::time::sleep_until(due.unwrap_or(shared.epoch)), if due.is_some() => {
                coordinator.tick(shared.prefill.now());
            }
        }
    }
    shared.inboxes().remove(&id);
    Ok(served)
}

type Transfer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Waits for a transfer; for ever if there is none.
async fn ended(transfer: &mut Option<Transfer>) {
    match transfer {
        Some(transfer) => transfer.await,
        None => std::future::pending().await,
    }
}

impl Shared {
    fn inboxes(&self) -> MutexGuard<'_, HashMap<HandoffId, UnboundedSender<FromDecode>>> {
        self.inboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the decode engine's process of a handoff.
    fn begin(&self, id: HandoffId, request: Request) -> anyhow::Result<UnboundedReceiver<FromDecode>> {
        let (inbox, messages) = mpsc::unbounded_channel();
        self.inboxes().insert(id, inbox);
        self.to_decode.send(ToDecode::Begin(Box::new(request)))?;
        Ok(messages)
    }

    fn transfer(&self, action: CoordinatorAction) -> Option<Transfer> {
        let CoordinatorAction::StartTransfer { cost, .. } = action else { return None };
        let (link, cost) = (self.link.clone(), cost.unwrap_or_default());
        Some(Box::pin(async move { link.transfer(cost).await }))
    }
}
