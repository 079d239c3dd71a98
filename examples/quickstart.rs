//! One request through a live engine, its tokens printed as they come.

use standin::{EngineConfig, LiveEngine, Request};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Llama-3.1-8B on one H100, as vLLM would schedule it. No GPU, no model.
    let engine = LiveEngine::start(EngineConfig::default())?;

    let prompt: Vec<u32> = (0..2_000).collect();
    let mut request = engine.submit(Request::new(prompt, 8)).await?;
    while let Some(signal) = request.recv().await {
        let at = signal.produced_at;
        match (signal.token_id, signal.finish) {
            (Some(token), None) => println!("{at:>12}  token {token}"),
            (Some(token), Some(reason)) => println!("{at:>12}  token {token}, the last: {reason:?}"),
            (None, reason) => println!("{at:>12}  ended: {reason:?}"),
        }
    }
    engine.shutdown().await?;
    Ok(())
}
