//! h06: leases of held sources, in engine time that no speedup divides.

use std::time::Duration;

use standin::timing::TimingConfig;
use standin::{HandoffError, LiveEngine, LiveHandoffEvent, SourceEnd, Speedup};

use crate::common::{at, durations, request, start, submit};
use crate::kit::{Event, Kind, OK, assert_released, blocks, for_every_kind, ms, source, within};

fn expired(at: u64) -> Event {
    Some(LiveHandoffEvent::SourceEnded { at: ms(at), end: SourceEnd::Expired })
}

fn expires_at(held: Event) -> u64 {
    let Some(LiveHandoffEvent::SourceHeld { expires_at, .. }) = held else { panic!("{held:?}") };
    expires_at.as_nanos() / 1_000_000
}

fn expired_leases(engine: &LiveEngine) -> u64 {
    engine.metrics_receiver().borrow().expired_leases
}

/// Nothing else runs: the actor wakes up for it, whatever the speedup.
async fn h06_a_lease_that_ends_frees_the_blocks_and_is_counted(kind: Kind) {
    for speedup in [Speedup::Factor(1.0), Speedup::Factor(10.0), Speedup::Instant] {
        let engine = start(kind.config().with_speedup(speedup));
        let mut side = source(&engine, 1, 8).await;
        let end = expires_at(side.event().await);
        let pass = match speedup {
            Speedup::Factor(factor) => (10.0 / factor) as u64,
            Speedup::Instant => 0,
        };
        assert_eq!(end, pass + 30_000, "{speedup:?}");
        at(&engine, end - 1).await;
        assert_eq!(blocks(&engine), (2, 2, 0));
        assert_eq!(side.event().await, expired(end));
        assert_eq!((engine.now(), expired_leases(&engine)), (ms(end), 1));
        assert_eq!(side.event().await, None);
        assert_eq!(within(side.control.release_source()).await, OK, "over already");
        assert_eq!(within(side.control.heartbeat()).await, Err(HandoffError::Over));
        assert_released(&engine).await;
    }
}

async fn h06_heartbeats_keep_a_source_for_as_long_as_they_come(kind: Kind) {
    let engine = start(kind.config());
    let mut side = source(&engine, 1, 8).await;
    assert_eq!(within(side.control.heartbeat()).await, OK, "not held yet: nothing to extend");
    assert_eq!(expires_at(side.event().await), 30_010);
    // Every 5 s for 60 s; the last one extends it to 80 s.
    for beat in 1..=12 {
        at(&engine, beat * 5_000).await;
        assert_eq!(within(side.control.heartbeat()).await, OK);
        assert_eq!(blocks(&engine), (2, 2, 0), "at {beat} × 5 s");
    }
    assert_eq!(side.event().await, expired(80_000));
    assert_released(&engine).await;
}

async fn h06_an_early_heartbeat_never_shortens_a_lease(kind: Kind) {
    let engine = start(kind.config());
    let mut side = source(&engine, 1, 8).await;
    assert_eq!(expires_at(side.event().await), 30_010);
    at(&engine, 1_000).await;
    assert_eq!(within(side.control.heartbeat()).await, OK);
    assert_eq!(side.event().await, expired(30_010));
}

/// It is seen at the boundary, and any command before it finds the source over.
async fn h06_a_lease_that_ends_during_a_long_pass(kind: Kind) {
    for command_at in [None, Some(20_000)] {
        let passes = durations(vec![Duration::from_millis(10), Duration::from_secs(60)]);
        let engine =
            LiveEngine::builder(kind.leased(Duration::from_secs(15))).pass_timing(passes).start().expect("valid");
        let mut side = source(&engine, 1, 8).await;
        assert_eq!(expires_at(side.event().await), 15_010);
        let _long = submit(&engine, request(2, 8, 1)).await;
        if let Some(command_at) = command_at {
            at(&engine, command_at).await;
            assert_eq!(within(side.control.heartbeat()).await, Err(HandoffError::Over));
            assert_eq!(engine.now(), ms(command_at));
        }
        let end = side.event().await;
        assert_eq!(end, expired(command_at.unwrap_or(60_010)));
        assert_eq!(engine.now(), ms(60_010), "told at the boundary");
        assert_released(&engine).await;
    }
}

async fn h06_a_lease_of_zero_holds_nothing_beyond_its_pass(kind: Kind) {
    let engine = start(kind.leased(Duration::ZERO));
    let mut side = source(&engine, 1, 8).await;
    assert_eq!(expires_at(side.event().await), 10);
    assert_eq!((side.event().await, side.event().await), (expired(10), None));
    assert_released(&engine).await;
    assert_eq!(expired_leases(&engine), 1);
}

/// Hundreds of leases that end at different times while passes run and after the last one.
async fn h06_many_leases_end_each_at_its_time(kind: Kind) {
    let lease = Duration::from_millis(55);
    let engine = start(kind.leased(lease).with_timing(TimingConfig::ConstantMs(7.0)));
    let mut sides = Vec::new();
    for n in 0..60 {
        at(&engine, u64::from(n) * 5).await;
        sides.push(source(&engine, n, 4).await);
    }
    for side in &mut sides {
        let end = expires_at(side.event().await);
        let Some(LiveHandoffEvent::SourceEnded { at, end: SourceEnd::Expired }) = side.event().await else {
            panic!("it must expire")
        };
        assert!(at >= ms(end) && at <= ms(end + 7), "{at} {end}");
        assert_eq!(side.event().await, None);
    }
    assert_released(&engine).await;
    assert_eq!(expired_leases(&engine), 60);
}

for_every_kind! {
    h06_a_lease_that_ends_frees_the_blocks_and_is_counted,
    h06_heartbeats_keep_a_source_for_as_long_as_they_come,
    h06_an_early_heartbeat_never_shortens_a_lease,
    h06_a_lease_that_ends_during_a_long_pass,
    h06_a_lease_of_zero_holds_nothing_beyond_its_pass,
    h06_many_leases_end_each_at_its_time,
}
