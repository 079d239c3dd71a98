//! What crosses between the two processes, as lines of JSON, and the process of the decode engine.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use standin::handoff::{CoordinatorAction, CoordinatorFact, IssuedAction};
use standin::{
    EngineMetrics, HandoffId, LiveEngine, LiveHandoffSide, LiveRequest, OutputBuffering, OutputSignal, Request,
};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use crate::{Options, real_time};

/// To the decode engine.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToDecode {
    /// A handoff begins, under its request's id.
    Begin(Box<Request>),
    /// Its coordinator wants something done.
    Do(HandoffId, IssuedAction),
}

/// From the decode engine.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromDecode {
    /// The coordinator of this handoff is to be told.
    Fact(HandoffId, CoordinatorFact),
    /// A token or an end, for the reader of its request.
    Signal(OutputSignal),
    /// What the engine counted: the last line.
    Metrics(Box<EngineMetrics>),
}

/// Sends every message as a line, until nobody can send any more.
pub(crate) async fn write_lines<T: Serialize>(
    to: impl AsyncWrite + Unpin,
    mut messages: UnboundedReceiver<T>,
) -> anyhow::Result<()> {
    let mut to = BufWriter::new(to);
    while let Some(message) = messages.recv().await {
        let mut line = serde_json::to_vec(&message)?;
        line.push(b'\n');
        to.write_all(&line).await?;
        if messages.is_empty() {
            to.flush().await?;
        }
    }
    Ok(to.shutdown().await?)
}

/// Gives every line that comes to `take`, until the other process sends no more.
pub(crate) async fn read_lines<T: DeserializeOwned>(
    from: impl AsyncRead + Unpin,
    mut take: impl FnMut(T) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut lines = BufReader::new(from).lines();
    while let Some(line) = lines.next_line().await? {
        take(serde_json::from_str(&line).with_context(|| format!("a line of {} bytes", line.len()))?)?;
    }
    Ok(())
}

/// The decode engine's process: connects to the coordinators' and serves until that has nothing more to say.
pub(crate) fn decode_worker(options: &Options, address: &str, epoch_unix_ns: &str) -> anyhow::Result<()> {
    let epoch = SystemTime::UNIX_EPOCH + Duration::from_nanos(epoch_unix_ns.parse()?);
    real_time()?.block_on(async {
        let socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        serve(options, socket, epoch).await
    })
}

async fn serve(options: &Options, mut socket: TcpStream, epoch: SystemTime) -> anyhow::Result<()> {
    // Engine time begins at the same moment in both processes, so that their times can be compared.
    let (now, now_unix) = clocks();
    let epoch = now.checked_sub(now_unix.duration_since(epoch)?).context("the machine has just been started")?;
    let builder = LiveEngine::builder(options.engine()).epoch(epoch);
    let engine = builder.output_buffering(OutputBuffering::FullResponse).start()?;
    let (input, output) = socket.split();
    let (to_coordinators, messages) = mpsc::unbounded_channel();
    let mut inboxes: HashMap<Uuid, UnboundedSender<IssuedAction>> = HashMap::new();
    let mut handoffs = JoinSet::new();
    let read = async move {
        read_lines(input, |message| {
            match message {
                ToDecode::Begin(request) => {
                    let (inbox, actions) = mpsc::unbounded_channel();
                    inboxes.insert(request.id.context("a handoff's request has an id")?, inbox);
                    handoffs.spawn(decode(engine.clone(), *request, actions, to_coordinators.clone()));
                }
                // The end of a handoff takes its inbox along.
                ToDecode::Do(HandoffId(id), IssuedAction { action: CoordinatorAction::Complete(_), .. }) => {
                    inboxes.remove(&id);
                }
                ToDecode::Do(HandoffId(id), issued) => {
                    inboxes.get(&id).context("an action of an unknown handoff")?.send(issued)?;
                }
            }
            Ok(())
        })
        .await?;
        drop(inboxes);
        while handoffs.join_next().await.is_some() {}
        let metrics = *engine.metrics_receiver().borrow();
        to_coordinators.send(FromDecode::Metrics(Box::new(metrics)))?;
        drop(to_coordinators);
        anyhow::Ok(engine.shutdown().await?)
    };
    tokio::try_join!(read, write_lines(output, messages)).map(drop)
}

/// The decode engine's part in one handoff.
async fn decode(
    engine: LiveEngine,
    request: Request,
    mut actions: UnboundedReceiver<IssuedAction>,
    to_coordinator: UnboundedSender<FromDecode>,
) {
    let id = HandoffId(request.id.unwrap_or_default());
    // Nobody listens any more: the other process has gone, and this one follows.
    let tell = |fact| drop(to_coordinator.send(FromDecode::Fact(id, fact)));
    let (Ok((registration, stream)), Ok(registered)) = (engine.prepare_request(request), engine.register_handoff(id))
    else {
        return tell(CoordinatorFact::DestinationGone);
    };
    let mut side = LiveHandoffSide::destination(registered, registration);
    let mut stream: Option<LiveRequest> = Some(stream);
    loop {
        tokio::select! {
            biased;
            action = actions.recv() => {
                let Some(IssuedAction { id: action, action: what }) = action else { break };
                let outcome = side.carry_out(what).await;
                tell(CoordinatorFact::Outcome { action, outcome });
            }
            fact = side.fact() => tell(fact),
            Some(signal) = next(&mut stream) => drop(to_coordinator.send(FromDecode::Signal(signal))),
        }
    }
    // The handoff is over; the request goes on if it was activated.
    drop(side);
    while let Some(signal) = next(&mut stream).await {
        drop(to_coordinator.send(FromDecode::Signal(signal)));
    }
}

/// The next signal; for ever nothing after the last one.
async fn next(stream: &mut Option<LiveRequest>) -> Option<OutputSignal> {
    stream.as_mut()?.recv().await
}

/// Now, on the clock of this process and on the one that both processes have.
#[expect(clippy::disallowed_methods, reason = "where engine time begins, in both processes")]
pub(crate) fn clocks() -> (Instant, SystemTime) {
    (Instant::now(), SystemTime::now())
}
