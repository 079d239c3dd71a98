//! Operations on the pure core of either kind.

use arbitrary::{Result, Unstructured};
use standin::{Command, SchedulingState};

use super::requests;
use super::world::World;

/// Operations of one input at the most.
pub(crate) const OPERATIONS: usize = 200;

pub(crate) fn core_operations(data: &[u8]) {
    let mut bytes = Unstructured::new(data);
    let Some(mut world) = requests::engine(&mut bytes).ok().and_then(World::new) else { return };
    for _ in 0..OPERATIONS {
        if bytes.is_empty() || operate(&mut world, &mut bytes).is_err() {
            break;
        }
    }
    world.close();
}

/// One operation that every kind knows.
pub(crate) fn operate(world: &mut World, bytes: &mut Unstructured<'_>) -> Result<()> {
    let now = requests::time(bytes, world.now)?;
    match bytes.int_in_range(0..=15_u8)? {
        0..=3 => {
            let submission = world.submission(bytes)?;
            world.command(Command::Submit(submission), now);
        }
        4 => {
            let id = world.pick(bytes)?;
            world.cancel(id, now);
        }
        5 => {
            let (sequence, throttled) = (world.pick(bytes)?, bytes.arbitrary()?);
            world.command(Command::Throttle { sequence, throttled }, now);
        }
        6 => {
            world.command(Command::ResetPrefixCache { reset_running_requests: bytes.arbitrary()? }, now);
        }
        7 => {
            use SchedulingState::{NoNewAdmissions, Running, Stopped};
            world.command(Command::SetScheduling(*bytes.choose(&[Running, Running, NoNewAdmissions, Stopped])?), now);
        }
        8 => world.begin(),
        9 => world.finish(bytes.arbitrary()?),
        10 => world.settle(),
        11 => world.wait(now),
        _ => {
            world.begin();
            world.finish(false);
        }
    }
    Ok(())
}
