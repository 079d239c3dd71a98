//! Handing requests over between two live engines of one process.

use std::sync::Arc;

use crate::error::ConfigError;
use crate::handoff::{CoordinatorConfig, FaultRates, HandoffId};
use crate::live::error::{HandoffError, SubmitError};
use crate::live::handoff::driver::{Driver, Parts};
use crate::live::handoff::{LiveHandoffSide, LiveHandoffStream, LiveLink};
use crate::live::{LiveEngine, SubmitOptions};
use crate::request::Request;

/// Why a handoff did not start. Nothing is left behind on either engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartHandoffError {
    /// The options cannot be used.
    #[error("handoff: {0}")]
    Config(#[from] ConfigError),
    /// The prefill engine refused the request.
    #[error("prefill engine: {0}")]
    Prefill(SubmitError),
    /// The decode engine refused the request.
    #[error("decode engine: {0}")]
    Decode(SubmitError),
    /// One of the engines did not register the handoff.
    #[error(transparent)]
    Register(#[from] HandoffError),
}

/// Prefills on one engine, decodes on the other: [`LiveHandoff::default`] on these two.
///
/// ```
/// use standin::{EngineConfig, LiveEngine, Request, handoff};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let prefill = LiveEngine::start(EngineConfig::default())?;
/// let decode = LiveEngine::start(EngineConfig::default())?;
/// let mut stream = handoff(&prefill, &decode, Request::new(vec![7; 100], 4)).await?;
/// let mut tokens = 0;
/// while let Some(signal) = stream.recv().await {
///     tokens += usize::from(signal.token_id.is_some());
/// }
/// assert_eq!(tokens, 4);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// See [`LiveHandoff::start`].
///
/// # Cancel safety
/// Dropping the future cleans up both sides.
pub async fn handoff(
    prefill: &LiveEngine,
    decode: &LiveEngine,
    request: Request,
) -> Result<LiveHandoffStream, StartHandoffError> {
    LiveHandoff::default().start(prefill, decode, request).await
}

/// How handoffs between two live engines are made. The default is the way of the decode engine's kind, over a
/// link of their own.
#[derive(Debug, Clone, Default)]
#[must_use = "it does nothing until start"]
pub struct LiveHandoff {
    config: Option<CoordinatorConfig>,
    link: Option<LiveLink>,
    faults: Option<(FaultRates, u64)>,
    options: SubmitOptions,
}

impl LiveHandoff {
    /// Handoffs driven by these options.
    pub fn new(config: CoordinatorConfig) -> Self {
        Self { config: Some(config), ..Self::default() }
    }

    /// Transfers share this link with all others on it. Without one each has a link of its own.
    pub fn link(mut self, link: LiveLink) -> Self {
        self.link = Some(link);
        self
    }

    /// Faults on the way from the engines to the coordinator, from this seed and the handoff's id.
    pub fn faults(mut self, rates: FaultRates, seed: u64) -> Self {
        self.faults = Some((rates, seed));
        self
    }

    /// Options of the decode engine's stream.
    pub fn options(mut self, options: SubmitOptions) -> Self {
        self.options = options;
        self
    }

    /// Starts a handoff: registers it and its request on both engines, under the request's id, and takes
    /// the first step. The tokens are those that one engine alone would produce, if both have one seed.
    ///
    /// # Errors
    /// What either engine refuses at once, and a `first_token` that the decode engine's kind cannot do. What
    /// goes wrong later ends the stream.
    ///
    /// # Cancel safety
    /// Dropping the future cleans up both sides.
    pub async fn start(
        &self,
        prefill: &LiveEngine,
        decode: &LiveEngine,
        request: Request,
    ) -> Result<LiveHandoffStream, StartHandoffError> {
        let config = self.config_for(decode)?;
        config.validate()?;
        if let Some((rates, _)) = self.faults {
            rates.validate()?;
        }
        let (registration, destination_stream) =
            decode.prepare_request_with(request.clone(), self.options).map_err(StartHandoffError::Decode)?;
        // Dropped before its stream, a registration ends its route at once: the id is free again.
        let registration = registration;
        let first = request.with_id(destination_stream.id()).prefill_part();
        let (prefill_registration, source_stream) =
            prefill.prepare_request(first).map_err(StartHandoffError::Prefill)?;
        let prefill_registration = prefill_registration;
        let id = HandoffId(destination_stream.id());
        let route = Arc::clone(&registration.route);
        let source = LiveHandoffSide::source(prefill.register_handoff(id)?, prefill_registration);
        let destination = LiveHandoffSide::destination(decode.register_handoff(id)?, registration);
        let (mut driver, stream) = Driver::new(
            config,
            self.faults,
            Parts {
                source,
                source_stream,
                destination,
                destination_stream,
                destination_route: route,
                link: self.link.clone().unwrap_or_default(),
                clock: decode.inner.clock,
            },
        )?;
        driver.act().await;
        Ok(stream.driven_by(driver))
    }

    fn config_for(&self, decode: &LiveEngine) -> Result<CoordinatorConfig, ConfigError> {
        let engine = decode.config();
        let kinds_own = CoordinatorConfig::of_kind(&engine.kind).with_speedup(engine.speedup);
        let Some(config) = self.config.clone() else { return Ok(kinds_own) };
        if config.first_token != kinds_own.first_token {
            let allowed = format!("{:?}, as the decode engine does it", kinds_own.first_token);
            return Err(ConfigError::new("first_token", format!("{:?}", config.first_token), allowed));
        }
        Ok(config)
    }
}
