//! Stages memory of this process's GPUs for transports that take only host memory. It goes through pinned memory in two
//! chunks: the GPU copies one while the other is transferred.

use super::{Cuda, Lane, Slot, rows_of};
use crate::error::TransferError;
use crate::operation::Op;
use crate::operation::Work;
use crate::segments::Segments;
use crate::transports::Peer;
use crate::watch::Watch;

/// The largest chunk.
const CHUNK: u64 = 8 << 20;
/// The smallest chunk: keeping shorter slots does not pay off.
const LEAST: u64 = 64 << 10;
/// The most operations transferred together.
const TOGETHER: usize = 1000;

/// Part of an operation on GPU memory.
#[derive(Clone, Copy)]
struct Part {
    op: usize,
    /// Offset from the operation's first byte.
    at: u64,
    len: u64,
    /// Offset in the slot.
    place: u64,
}

/// Parts that are transferred together.
type Batch = Vec<Part>;

fn local_of(op: &Op) -> Option<(&Segments, bool)> {
    match &op.work {
        Work::Read { local, .. } => Some((local, false)),
        Work::Write { local, .. } => Some((local, true)),
        _ => None,
    }
}

/// Splits the operations on GPU memory into batches.
fn batches(ops: &[Op], chunk: u64) -> Vec<Batch> {
    let mut made = Vec::new();
    let (mut batch, mut used) = (Batch::new(), 0);
    for (op, each) in ops.iter().enumerate() {
        let Some((local, _)) = local_of(each).filter(|(local, _)| local.is_cuda()) else { continue };
        let mut at = 0;
        while at < local.len() {
            if used == chunk || batch.len() == TOGETHER {
                made.push(std::mem::take(&mut batch));
                used = 0;
            }
            let len = (local.len() - at).min(chunk - used);
            batch.push(Part { op, at, len, place: used });
            at += len;
            // Keep parts from sharing a cache line.
            used = (used + len).next_multiple_of(64).min(chunk);
        }
    }
    if !batch.is_empty() {
        made.push(batch);
    }
    made
}

struct Stage<'a> {
    ops: &'a [Op],
    lane: Lane,
    slots: [Slot; 2],
}

impl Stage<'_> {
    /// Starts copying between the slot and the GPU: before the transfer for writes, after it for reads.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn copy(&mut self, batch: &Batch, side: usize, is_write: bool) -> Result<(), TransferError> {
        for part in batch {
            let Some((local, writes)) = local_of(&self.ops[part.op]) else { continue };
            if writes != is_write {
                continue;
            }
            let slot = Segments::one(self.slots[side].addr() + part.place, part.len);
            let (here, there) = (slot.window(0, part.len), local.window(part.at, part.len));
            let copies: Vec<_> = if is_write {
                rows_of(here, there, part.len).collect()
            } else {
                rows_of(there, here, part.len).collect()
            };
            for rows in &copies {
                // SAFETY: the user's memory, which stays until the operation is over, and a slot, which is waited for.
                unsafe { self.lane.begin(rows)? };
            }
        }
        self.lane.mark(side)
    }

    /// Waits until the slot is free, then starts filling it with the bytes to write.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn prepare(&mut self, batch: &Batch, side: usize) -> Result<(), TransferError> {
        self.lane.wait(side)?;
        // SAFETY: as the caller vouches.
        unsafe { self.copy(batch, side, true) }
    }

    /// The batch as operations on the slot.
    fn staged(&self, batch: &Batch, side: usize) -> Vec<Op> {
        let staged = batch.iter().map(|part| {
            let op = &self.ops[part.op];
            let slot = Segments::one(self.slots[side].addr() + part.place, part.len);
            let work = match &op.work {
                Work::Read { offset, .. } => Work::Read { local: slot, offset: offset + part.at },
                Work::Write { offset, .. } => Work::Write { local: slot, offset: offset + part.at },
                other => other.clone(),
            };
            Op { handle: op.handle.clone(), work }
        });
        staged.collect()
    }
}

/// Performs [`Peer::run`] for a peer that takes only host memory.
///
/// # Safety
/// As for [`Peer::run`].
pub(crate) unsafe fn run_staged(
    cuda: &Cuda,
    peer: &dyn Peer,
    ops: &[Op],
    found: &mut [u64],
    watch: &Watch,
) -> Result<(), TransferError> {
    let staged = |op: &&Op| local_of(op).is_some_and(|(local, _)| local.is_cuda() && !local.is_empty());
    let Some((first, _)) = ops.iter().find(staged).and_then(local_of) else {
        // SAFETY: as the caller vouches.
        return unsafe { peer.run(ops, found, watch) };
    };
    let rest: Vec<Op> = ops.iter().filter(|op| !staged(op)).cloned().collect();
    if !rest.is_empty() {
        let mut nothing = vec![0; rest.len()];
        // SAFETY: as the caller vouches.
        unsafe { peer.run(&rest, &mut nothing, watch)? };
    }
    let total: u64 = ops.iter().filter(staged).map(|op| op.work.span().1.next_multiple_of(64)).sum();
    let chunk = total.next_power_of_two().clamp(LEAST, CHUNK);
    let batches = batches(ops, chunk);
    let device = cuda.about(first)?.map_or(0, |about| about.device);
    let slots = [cuda.slot(device, chunk)?, cuda.slot(device, chunk)?];
    let mut stage = Stage { ops, lane: cuda.lane(device)?, slots };
    let mut run = || {
        for (at, batch) in batches.iter().enumerate() {
            watch.check()?;
            // SAFETY: as the caller vouches.
            unsafe {
                if at == 0 {
                    stage.prepare(batch, 0)?;
                }
                if let Some(next) = batches.get(at + 1) {
                    stage.prepare(next, (at + 1) % 2)?;
                }
                stage.lane.wait(at % 2)?;
                let staged = stage.staged(batch, at % 2);
                peer.run(&staged, &mut vec![0; staged.len()], watch)?;
                stage.copy(batch, at % 2, false)?;
            }
        }
        Ok(())
    };
    let done = run();
    // CUD-5
    let finished = stage.lane.finish();
    let Stage { lane, slots, .. } = stage;
    if finished.is_ok() {
        cuda.give_lane(lane);
        slots.into_iter().for_each(|slot| cuda.give_slot(slot));
    }
    done.and(finished)
}
