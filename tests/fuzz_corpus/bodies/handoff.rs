//! Operations on both sides of handoffs, and what a KV connector says, on the pure core of either kind.

use arbitrary::{Result, Unstructured};
use standin::{Command, HandoffId, HandoffKey, KeepBlocks, LoadTiming, RemoteCopy, RemoteKv, TransferReport};
use uuid::Uuid;

use super::core::{OPERATIONS, operate};
use super::requests;
use super::world::{HANDOFFS, World};

pub(crate) fn handoff_operations(data: &[u8]) {
    let mut bytes = Unstructured::new(data);
    let Some(world) = requests::engine(&mut bytes).ok().and_then(World::new) else { return };
    let mut handoffs = Handoffs { world, generations: [1; HANDOFFS as usize] };
    for _ in 0..OPERATIONS {
        let Ok(own) = bytes.ratio(2, 3) else { break };
        let done = if own { handoffs.operate(&mut bytes) } else { operate(&mut handoffs.world, &mut bytes) };
        if bytes.is_empty() || done.is_err() {
            break;
        }
    }
    handoffs.world.close();
}

struct Handoffs {
    world: World,
    /// The next registration of each handoff. A caller uses none twice.
    generations: [u64; HANDOFFS as usize],
}

impl Handoffs {
    /// A registration that was or will be used, or one that never is.
    fn key(&self, bytes: &mut Unstructured<'_>) -> Result<HandoffKey> {
        let id = bytes.int_in_range(0..=HANDOFFS - 1)?;
        let back = bytes.int_in_range(0..=3)?;
        let generation = if back == 3 { u64::MAX } else { self.generations[id as usize].saturating_sub(back) };
        Ok(HandoffKey::new(HandoffId(Uuid::from_u128(id)), generation))
    }

    fn new_key(&mut self, bytes: &mut Unstructured<'_>) -> Result<HandoffKey> {
        let id = bytes.int_in_range(0..=HANDOFFS - 1)?;
        let generation = &mut self.generations[id as usize];
        *generation += 1;
        Ok(HandoffKey::new(HandoffId(Uuid::from_u128(id)), *generation))
    }

    fn operate(&mut self, bytes: &mut Unstructured<'_>) -> Result<()> {
        let now = requests::time(bytes, self.world.now)?;
        let command = match bytes.int_in_range(0..=15_u8)? {
            0 | 1 => {
                Command::SubmitPrefill { handoff: self.new_key(bytes)?, submission: self.world.submission(bytes)? }
            }
            2..=4 => {
                Command::ReserveDestination { handoff: self.new_key(bytes)?, submission: self.world.submission(bytes)? }
            }
            5 | 6 => {
                let first_token = *bytes.choose(&[None, Some(0), Some(1), Some(u32::MAX)])?;
                Command::ActivateDestination { handoff: self.key(bytes)?, first_token }
            }
            7 => Command::ReleaseSource { handoff: self.key(bytes)? },
            8 => Command::CancelSource { handoff: self.key(bytes)? },
            9 => Command::CancelDestination { handoff: self.key(bytes)? },
            10 => Command::FailTransfer {
                handoff: self.key(bytes)?,
                valid_tokens: *bytes.choose(&[0, 1, 4, 9, u32::MAX])?,
            },
            11 => Command::Heartbeat { handoff: self.key(bytes)? },
            12 => Command::SubmitDecode(self.world.submission(bytes)?),
            13 => Command::SubmitRemote { submission: self.world.submission(bytes)?, remote: remote(bytes)? },
            14 => Command::Transfers(self.report(bytes)?),
            _ => Command::ExpectFrees(bytes.arbitrary()?),
        };
        self.world.command(command, now);
        Ok(())
    }

    fn report(&self, bytes: &mut Unstructured<'_>) -> Result<TransferReport> {
        let mut report = TransferReport::default();
        for _ in 0..bytes.int_in_range(0..=3_u8)? {
            match bytes.int_in_range(0..=3_u8)? {
                0 => report.invalid_blocks.push(*bytes.choose(&[0, 1, 2, 3, 5, 8, u32::MAX])?),
                1 => report.failed.push(self.world.pick(bytes)?),
                2 => report.received.push(self.world.pick(bytes)?),
                _ => report.sent.push(self.world.pick(bytes)?),
            }
        }
        Ok(report)
    }
}

fn remote(bytes: &mut Unstructured<'_>) -> Result<RemoteKv> {
    let copy = RemoteCopy {
        tokens: *bytes.choose(&[0, 1, 4, 7, 20, u32::MAX])?,
        load: *bytes.choose(&[LoadTiming::BetweenPasses, LoadTiming::WithinPass])?,
        lasting: bytes.arbitrary()?,
        undecided_look_ups: *bytes.choose(&[0, 0, 1, u32::MAX])?,
    };
    let copy = if bytes.ratio(3, 4)? { Some(copy) } else { None };
    Ok(RemoteKv { copy, keep: *bytes.choose(&[KeepBlocks::Never, KeepBlocks::WhenFinished, KeepBlocks::Always])? })
}
