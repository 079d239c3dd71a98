//! One engine, and two engines in one process: a handoff is one line.

use standin::handoff::LinkSharing;
use standin::{LiveEngine, LiveHandoff, LiveLink, OutputBuffering, StartHandoffError, SubmitError, SubmitOptions};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::Options;
use crate::run::{Run, Served, wait_for};

/// Everything on one engine, in virtual time.
pub(crate) async fn aggregated(options: &Options) -> anyhow::Result<Run> {
    let (observer, mut admissions) = mpsc::unbounded_channel();
    let builder = LiveEngine::builder(options.engine_alone()).admissions(observer);
    let engine = builder.output_buffering(OutputBuffering::FullResponse).start()?;
    let (mut run, mut readers) = (Run::default(), JoinSet::new());
    for request in options.requests(1.0)? {
        wait_for(&request, engine.now()).await;
        let mut served = Served::new(&request, 1.0);
        match engine.submit(request).await {
            Ok(mut stream) => drop(readers.spawn(async move {
                served.read(&mut stream).await;
                served
            })),
            Err(SubmitError::Request(error)) => run.refused(&error),
            Err(error) => return Err(error.into()),
        }
    }
    while let Some(served) = readers.join_next().await {
        run.served(served?);
    }
    run.admitted(&mut admissions);
    run.count(&engine.metrics_receiver().borrow());
    engine.shutdown().await?;
    Ok(run)
}

/// A prefill and a decode engine, and one link that all transfers share.
pub(crate) async fn disaggregated(options: &Options) -> anyhow::Result<Run> {
    let (observer, mut admissions) = mpsc::unbounded_channel();
    let prefill =
        LiveEngine::builder(options.engine()).admissions(observer).transfer_timing(options.transfer()?).start()?;
    let decode = LiveEngine::start(options.engine())?;
    let way = LiveHandoff::default()
        .link(LiveLink::new(LinkSharing::FairShare))
        .options(SubmitOptions::default().with_buffering(OutputBuffering::FullResponse));
    let (mut run, mut readers) = (Run::default(), JoinSet::new());
    for request in options.requests(1.0)? {
        wait_for(&request, decode.now()).await;
        let mut served = Served::new(&request, 1.0);
        match way.start(&prefill, &decode, request).await {
            Ok(mut stream) => drop(readers.spawn(async move {
                served.read(&mut stream).await;
                if let Some(took) = stream.transfer_time() {
                    served.transferred(took);
                }
                served
            })),
            Err(StartHandoffError::Decode(SubmitError::Request(error))) => run.refused(&error),
            Err(error) => return Err(error.into()),
        }
    }
    while let Some(served) = readers.join_next().await {
        run.served(served?);
    }
    run.admitted(&mut admissions);
    for engine in [prefill, decode] {
        run.count(&engine.metrics_receiver().borrow());
        engine.shutdown().await?;
    }
    Ok(run)
}
