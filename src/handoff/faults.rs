//! Faults on the way from the engines to a coordinator, for tests and for whoever wants to see how his system copes.

use std::collections::BTreeMap;
use std::time::Duration;

use super::ids::HandoffId;
use super::protocol::CoordinatorFact;
use crate::config::setters;
use crate::error::ConfigError;
use crate::output::mix;
use crate::time::EngineTime;

/// How often what goes wrong. Probabilities are from 0 to 1; the default is that nothing goes wrong.
///
/// `lost`, `duplicated` and `delayed` strike each fact, answers to actions included. Time-outs and cancels are the caller's
/// own and always arrive.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct FaultRates {
    /// A fact never arrives.
    pub lost: f64,
    /// A fact arrives twice.
    pub duplicated: f64,
    /// A fact arrives late.
    pub delayed: f64,
    /// The most that one arrives late by; the delay is uniform up to that.
    #[cfg_attr(feature = "serde", serde(rename = "max_delay_ms", with = "crate::time::duration_ms"))]
    pub max_delay: Duration,
    /// A transfer that completed is reported to have failed.
    pub transfer_failed: f64,
    /// The source is reported gone.
    pub source_gone: f64,
    /// The destination is reported gone.
    pub destination_gone: f64,
    /// The time from the handoff's start in which a side goes; uniform.
    #[cfg_attr(feature = "serde", serde(rename = "gone_within_ms", with = "crate::time::duration_ms"))]
    pub gone_within: Duration,
}

impl FaultRates {
    setters! {
        /// Sets `lost`.
        with_lost, lost: f64;
        /// Sets `duplicated`.
        with_duplicated, duplicated: f64;
        /// Sets `delayed`.
        with_delayed, delayed: f64;
        /// Sets `max_delay`.
        with_max_delay, max_delay: Duration;
        /// Sets `transfer_failed`.
        with_transfer_failed, transfer_failed: f64;
        /// Sets `source_gone`.
        with_source_gone, source_gone: f64;
        /// Sets `destination_gone`.
        with_destination_gone, destination_gone: f64;
        /// Sets `gone_within`.
        with_gone_within, gone_within: Duration;
    }

    /// Checks the probabilities.
    ///
    /// # Errors
    /// The first one that is not between 0 and 1.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let rates = [
            ("lost", self.lost),
            ("duplicated", self.duplicated),
            ("delayed", self.delayed),
            ("transfer_failed", self.transfer_failed),
            ("source_gone", self.source_gone),
            ("destination_gone", self.destination_gone),
        ];
        match rates.into_iter().find(|(_, rate)| !(0.0..=1.0).contains(rate)) {
            Some((field, rate)) => Err(ConfigError::new(field, rate, "from 0 to 1")),
            None => Ok(()),
        }
    }
}

/// The way of one handoff's facts: [`Faults::push`] what the engines tell, give the coordinator what [`Faults::poll`]
/// returns.
///
/// What goes wrong depends on seed, handoff and the order of its facts alone, not on other handoffs. Only facts are touched:
/// a side that is reported gone is still there, and holds its blocks until the coordinator cleans it up.
#[derive(Debug, Clone)]
pub struct Faults {
    rates: FaultRates,
    stream: u64,
    drawn: u64,
    pushed: u64,
    /// By time of arrival, then in the order in which they were pushed.
    on_the_way: BTreeMap<(EngineTime, u64), CoordinatorFact>,
}

impl Faults {
    /// Faults for the handoff `id`, which starts at `now`.
    ///
    /// # Errors
    /// What [`FaultRates::validate`] finds.
    pub fn new(rates: FaultRates, seed: u64, id: HandoffId, now: EngineTime) -> Result<Self, ConfigError> {
        rates.validate()?;
        let (hi, lo) = id.0.as_u64_pair();
        let stream = mix(mix(mix(seed) ^ lo) ^ hi);
        let mut faults = Self { rates, stream, drawn: 0, pushed: 0, on_the_way: BTreeMap::new() };
        let gone = [
            (rates.source_gone, CoordinatorFact::SourceGone),
            (rates.destination_gone, CoordinatorFact::DestinationGone),
        ];
        for (rate, fact) in gone {
            if faults.strikes(rate) {
                let after = faults.up_to(rates.gone_within);
                faults.deliver(fact, now + after);
            }
        }
        Ok(faults)
    }

    /// Takes in a fact that happens at `now`.
    pub fn push(&mut self, fact: CoordinatorFact, now: EngineTime) {
        let fact = match fact {
            CoordinatorFact::Cancelled | CoordinatorFact::TimedOut => return self.deliver(fact, now),
            CoordinatorFact::TransferCompleted if self.strikes(self.rates.transfer_failed) => {
                CoordinatorFact::TransferFailed
            }
            fact => fact,
        };
        let copies = if self.strikes(self.rates.duplicated) { 2 } else { 1 };
        for _ in 0..copies {
            if !self.strikes(self.rates.lost) {
                let late = self.strikes(self.rates.delayed);
                let by = if late { self.up_to(self.rates.max_delay) } else { Duration::ZERO };
                self.deliver(fact, now + by);
            }
        }
    }

    /// The next fact that has arrived by `now`.
    pub fn poll(&mut self, now: EngineTime) -> Option<CoordinatorFact> {
        let first = self.on_the_way.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(first.remove())
    }

    /// When the next fact arrives.
    #[must_use]
    pub fn next_deadline(&self) -> Option<EngineTime> {
        self.on_the_way.first_key_value().map(|(&(at, _), _)| at)
    }

    fn deliver(&mut self, fact: CoordinatorFact, at: EngineTime) {
        self.on_the_way.insert((at, self.pushed), fact);
        self.pushed += 1;
    }

    /// Uniform from 0 to below 1, with the 53 bits of a double's fraction.
    fn draw(&mut self) -> f64 {
        self.drawn += 1;
        let bits = mix(self.stream.wrapping_add(self.drawn.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        (bits >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn strikes(&mut self, rate: f64) -> bool {
        self.draw() < rate
    }

    fn up_to(&mut self, longest: Duration) -> Duration {
        // The cast saturates.
        Duration::from_nanos((longest.as_nanos() as f64 * self.draw()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const START: EngineTime = EngineTime::from_millis(1_000);

    /// When and as what 10,000 completed transfers arrive.
    fn arrivals(rates: FaultRates, seed: u64) -> Vec<(EngineTime, CoordinatorFact)> {
        let mut faults = Faults::new(rates, seed, HandoffId(Uuid::from_u128(5)), START).expect("valid");
        for _ in 0..10_000 {
            faults.push(CoordinatorFact::TransferCompleted, START);
        }
        assert_eq!(faults.poll(EngineTime::ZERO), None, "nothing arrives before it happens");
        let mut arrivals = Vec::new();
        while let Some(at) = faults.next_deadline() {
            arrivals.push((at, faults.poll(at).expect("due")));
        }
        arrivals
    }

    fn near(count: usize, expected: usize) -> bool {
        // Five standard deviations of 10,000 draws, at most.
        count.abs_diff(expected) < 250
    }

    #[test]
    fn without_rates_everything_arrives_at_once_and_in_order() {
        let arrivals = arrivals(FaultRates::default(), 1);
        assert_eq!(arrivals, vec![(START, CoordinatorFact::TransferCompleted); 10_000]);
    }

    #[test]
    fn each_fault_strikes_as_often_as_its_rate_says() {
        let none = FaultRates::default();
        assert!(near(arrivals(none.with_lost(0.3), 1).len(), 7_000));
        assert!(near(arrivals(none.with_duplicated(0.2), 1).len(), 12_000));
        let failed = arrivals(none.with_transfer_failed(0.4), 1);
        assert!(near(failed.iter().filter(|(_, fact)| *fact == CoordinatorFact::TransferFailed).count(), 4_000));
        let late = arrivals(none.with_delayed(0.5).with_max_delay(Duration::from_secs(8)), 1);
        assert!(near(late.iter().filter(|(at, _)| *at == START).count(), 5_000));
        assert!(near(late.iter().filter(|(at, _)| *at > START + Duration::from_secs(4)).count(), 2_500));
        assert!(late.iter().all(|(at, _)| *at <= START + Duration::from_secs(8)));
    }

    #[test]
    fn sides_go_within_the_time_allowed_and_local_facts_always_arrive() {
        let rates = FaultRates::default()
            .with_source_gone(1.0)
            .with_destination_gone(1.0)
            .with_gone_within(Duration::from_secs(1))
            .with_lost(1.0);
        let mut faults = Faults::new(rates, 3, HandoffId(Uuid::from_u128(5)), START).expect("valid");
        faults.push(CoordinatorFact::Cancelled, START);
        faults.push(CoordinatorFact::TimedOut, START);
        faults.push(CoordinatorFact::TransferCompleted, START);
        let end = START + Duration::from_secs(1);
        let mut found: Vec<_> = std::iter::from_fn(|| faults.poll(end)).collect();
        assert_eq!(found.drain(..2).collect::<Vec<_>>(), [CoordinatorFact::Cancelled, CoordinatorFact::TimedOut]);
        assert!(found.contains(&CoordinatorFact::SourceGone) && found.contains(&CoordinatorFact::DestinationGone));
        assert_eq!((found.len(), faults.next_deadline()), (2, None));
    }

    #[test]
    fn a_seed_repeats_and_another_one_differs() {
        let rates = FaultRates::default().with_lost(0.5);
        assert_eq!(arrivals(rates, 9), arrivals(rates, 9));
        assert_ne!(arrivals(rates, 9).len(), arrivals(rates, 10).len());
    }

    #[test]
    fn rates_that_are_no_probability_are_refused_by_name() {
        for (rate, shown) in [(-0.1, "-0.1"), (1.5, "1.5"), (f64::NAN, "NaN")] {
            let message = FaultRates::default().with_delayed(rate).validate().expect_err("must be refused").to_string();
            assert_eq!(message, format!("delayed = {shown}: from 0 to 1"));
        }
    }
}
