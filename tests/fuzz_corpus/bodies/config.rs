//! Configuration and the other plain data that JSON can carry.

use standin::handoff::{CoordinatorFact, FaultRates, TransferTiming};
use standin::{
    Command, Coordinator, CoordinatorConfig, EngineConfig, EngineTime, HandoffId, Request, Scheduler, SequenceId,
    Submission,
};
use uuid::Uuid;

/// Passes that a configuration is tried with: an odd one may let its request wait for ever.
const PASSES: usize = 20;

pub(crate) fn config_json(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match EngineConfig::from_json(text) {
        Ok(config) => works(&config),
        Err(error) => {
            assert!(!error.field.is_empty() && !error.allowed.is_empty(), "{error:?}");
            assert!(error.value.chars().count() <= 61, "a value is cut: {error:?}");
        }
    }
    if let Ok(config) = serde_json::from_str::<CoordinatorConfig>(text)
        && let Ok(mut coordinator) = Coordinator::new(HandoffId(Uuid::nil()), config, EngineTime::ZERO)
    {
        coordinator.apply(CoordinatorFact::Cancelled, EngineTime::MAX);
        coordinator.tick(EngineTime::MAX);
        assert!(coordinator.outcome().is_some(), "it has had all the time there is");
    }
    if let Ok(timing) = serde_json::from_str::<TransferTiming>(text) {
        let unknown = timing.validate().is_err() || timing.kv_bytes_per_token.is_none();
        assert!(timing.delay(u32::MAX).is_none() || !unknown, "{timing:?}");
    }
    if let Ok(rates) = serde_json::from_str::<FaultRates>(text) {
        drop(rates.validate());
    }
    if let Ok(request) = serde_json::from_str::<Request>(text) {
        drop(request.validate(&EngineConfig::default()));
        let again = serde_json::to_string(&request).expect("plain data");
        assert_eq!(serde_json::from_str::<Request>(&again).expect("it was written here"), request);
    }
    drop(serde_json::from_str::<CoordinatorFact>(text));
}

/// A configuration that was taken is one that an engine runs with, and one that can be written down.
fn works(config: &EngineConfig) {
    assert_eq!(config.validate(), Ok(()));
    let written = serde_json::to_string(config).expect("plain data");
    EngineConfig::from_json(&written).unwrap_or_else(|error| panic!("{error}: {written}"));
    let mut scheduler = Scheduler::new(config).expect("strictly valid");
    let request = Request::new(vec![0; 5], 3);
    if request.validate(config).is_err() {
        return;
    }
    let submission = Submission { sequence: SequenceId(u64::MAX), tie_key: u128::MAX, request };
    scheduler.apply(Command::Submit(submission), EngineTime::ZERO).expect("validated");
    let mut now = EngineTime::ZERO;
    for _ in 0..PASSES {
        let Some(pass) = scheduler.begin_pass(now) else { break };
        assert!(pass.ends_at() >= now);
        now = pass.ends_at();
        let effects = scheduler.finish_pass(pass, now);
        scheduler.recycle(effects);
    }
}
