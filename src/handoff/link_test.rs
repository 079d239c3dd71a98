use std::time::Duration;

use super::*;
use crate::output::mix;

const fn wire(ms: u64) -> TransferCost {
    TransferCost { setup: Duration::ZERO, wire: Duration::from_millis(ms) }
}

fn ms(ms: u64) -> EngineTime {
    EngineTime::from_millis(ms)
}

/// Who finished, and at which millisecond.
fn finished(link: &mut Link) -> Vec<(u64, f64)> {
    while let Some(at) = link.next_deadline() {
        link.advance(at);
    }
    std::iter::from_fn(|| link.poll_finished()).map(|(id, at)| (id.0, at.as_nanos() as f64 / 1e6)).collect()
}

#[test]
fn the_unit_is_the_least_common_multiple_it_claims() {
    let gcd = |mut a: u128, mut b: u128| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let least = (1..=46).fold(1, |multiple, n| multiple / gcd(multiple, n) * n);
    assert_eq!(least, UNITS_PER_NANO);
    assert!(u128::from(u64::MAX).checked_mul(least).is_some(), "all of time fits");
    assert!(u128::from(u64::MAX).checked_mul(least * 47).is_none(), "47 is the next that would matter");
}

#[test]
fn case_102_two_equal_transfers_take_twice_as_long() {
    let mut link = Link::new(LinkSharing::FairShare);
    for _ in 0..2 {
        link.start(wire(10), ms(0));
    }
    assert_eq!(finished(&mut link), [(0, 20.0), (1, 20.0)]);
    let mut unshared = Link::new(LinkSharing::Unshared);
    for _ in 0..2 {
        unshared.start(wire(10), ms(0));
    }
    assert_eq!(finished(&mut unshared), [(0, 10.0), (1, 10.0)]);
}

#[test]
fn staggered_transfers_share_only_while_they_overlap() {
    let mut link = Link::new(LinkSharing::FairShare);
    let first = link.start(wire(10), ms(0));
    assert_eq!(link.expected_finish(first), Some(ms(10)));
    let second = link.start(wire(10), ms(5));
    assert_eq!(link.expected_finish(first), Some(ms(15)), "half of its work at half the speed");
    assert_eq!(link.expected_finish(second), Some(ms(20)));
    assert_eq!(finished(&mut link), [(0, 15.0), (1, 20.0)]);
    assert_eq!((link.in_flight(), link.expected_finish(first)), (0, None));
}

#[test]
fn one_that_leaves_makes_the_others_faster() {
    let mut link = Link::new(LinkSharing::FairShare);
    let ids: Vec<_> = (0..3).map(|_| link.start(wire(9), ms(0))).collect();
    assert!(link.abort(ids[1], ms(9)), "it was under way");
    assert!(!link.abort(ids[1], ms(9)), "and is not any more");
    assert_eq!(finished(&mut link), [(0, 21.0), (2, 21.0)], "3 of 9 ms by then, the other 6 at half the speed");
}

#[test]
fn setup_takes_time_and_no_bandwidth() {
    let mut link = Link::new(LinkSharing::FairShare);
    link.start(wire(10), ms(0));
    let late = link.start(TransferCost { setup: Duration::from_millis(4), ..wire(2) }, ms(2));
    assert_eq!(link.next_deadline(), Some(ms(6)), "when the second one joins");
    assert!(!link.clone().abort(TransferId(7), ms(3)), "unknown");
    let mut aborted = link.clone();
    assert!(aborted.abort(late, ms(3)), "in its setup");
    assert_eq!(finished(&mut aborted), [(0, 10.0)]);
    assert_eq!(finished(&mut link), [(1, 10.0), (0, 12.0)]);
}

#[test]
fn a_transfer_of_nothing_finishes_where_it_starts() {
    let mut link = Link::new(LinkSharing::FairShare);
    link.start(wire(5), ms(0));
    let nothing = link.start(wire(0), ms(3));
    assert_eq!((link.poll_finished(), link.in_flight()), (Some((nothing, ms(3))), 1));
    assert_eq!(finished(&mut link), [(0, 5.0)]);
}

#[test]
fn times_are_rounded_up_and_late_or_early_calls_change_nothing() {
    let mut link = Link::new(LinkSharing::FairShare);
    for nanos in [3, 1, 4] {
        link.start(TransferCost { setup: Duration::ZERO, wire: Duration::from_nanos(nanos) }, ms(0));
    }
    let mut late = link.clone();
    late.advance(ms(1));
    late.advance(EngineTime::ZERO);
    let in_order = |link: &mut Link| finished(link).iter().map(|(id, at)| (*id, at * 1e6)).collect::<Vec<_>>();
    assert_eq!(in_order(&mut late), [(1, 3.0), (0, 7.0), (2, 8.0)]);
    assert_eq!(in_order(&mut link), [(1, 3.0), (0, 7.0), (2, 8.0)]);
}

#[test]
fn the_end_of_time_ends_every_call() {
    let forever = TransferCost { setup: Duration::MAX, wire: Duration::MAX };
    let mut link = Link::new(LinkSharing::FairShare);
    let never = link.start(TransferCost { setup: Duration::ZERO, ..forever }, ms(1));
    link.start(forever, ms(1));
    assert_eq!(link.expected_finish(never), None);
    link.advance(EngineTime::MAX);
    assert_eq!((link.poll_finished(), link.next_deadline(), link.in_flight()), (None, None, 2));
}

/// A second implementation: remaining work of each, lowered step by step in floating point.
fn reference(jobs: &[(u64, u64, u64)]) -> Vec<(u64, f64)> {
    let mut waiting: Vec<(f64, f64, u64)> = jobs.iter().map(|&(id, at, work)| (at as f64, work as f64, id)).collect();
    let (mut now, mut active, mut done) = (0.0_f64, Vec::<(f64, u64)>::new(), Vec::new());
    while !waiting.is_empty() || !active.is_empty() {
        let shares = active.len() as f64;
        let joins = waiting.iter().map(|job| job.0).fold(f64::INFINITY, f64::min);
        let finishes = active.iter().map(|job| now + job.0 * shares).fold(f64::INFINITY, f64::min);
        let next = joins.min(finishes);
        active.iter_mut().for_each(|job| job.0 -= (next - now) / shares);
        now = next;
        active.extend(waiting.extract_if(.., |job| job.0 <= now).map(|job| (job.1, job.2)));
        done.extend(active.extract_if(.., |job| job.0 < 1e-3).map(|job| (job.1, now)));
    }
    done.sort_by_key(|job| job.0);
    done
}

#[test]
fn a_thousand_random_schedules_agree_with_a_second_implementation() {
    for seed in 0..1_000_u64 {
        let draw = |n: u64, below: u64| mix(mix(seed) ^ n) % below;
        let mut jobs: Vec<_> =
            (0..2 + draw(0, 40)).map(|n| (draw(3 * n + 1, 1_000_000), draw(3 * n + 2, 100_000) + 1)).collect();
        jobs.sort_unstable();
        let jobs: Vec<_> = jobs.iter().enumerate().map(|(id, &(at, work))| (id as u64, at, work)).collect();
        let mut link = Link::new(LinkSharing::FairShare);
        for &(_, at, work) in &jobs {
            let cost = TransferCost { setup: Duration::ZERO, wire: Duration::from_nanos(work) };
            link.start(cost, EngineTime::from_nanos(at));
        }
        let mut found: Vec<_> = finished(&mut link).iter().map(|(id, at)| (*id, at * 1e6)).collect();
        found.sort_by_key(|job| job.0);
        for ((id, at), (_, expected)) in found.iter().zip(reference(&jobs)) {
            // Rounding up each of at most 41 ends delays the others by less than a nanosecond each.
            let late = at - expected;
            assert!((-0.01..42.0).contains(&late), "seed {seed}, transfer {id}: {at} ns, expected {expected}");
        }
        assert_eq!(found.len(), jobs.len(), "seed {seed}");
    }
}
