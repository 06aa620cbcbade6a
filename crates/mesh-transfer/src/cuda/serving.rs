//! Serves an owner's GPU memory to those who cannot map it: through pinned memory, several pieces at once, so that the
//! GPU copies one while another is on the wire.

use super::lanes::MARKS;
use super::{Cuda, Device, Lane, OnDevice, Slot, rows_of};
use crate::error::TransferError;
use crate::segments::Segments;
use std::sync::Arc;

/// The longest piece.
pub(crate) const PIECE: u64 = 1 << 20;

/// The staging memory of one connection.
#[derive(Debug, Default)]
pub(crate) struct Stages(Vec<Stage>);

#[derive(Debug)]
struct Stage {
    cuda: Arc<Cuda>,
    device: Device,
    /// None once returned.
    lane: Option<Lane>,
    slots: Vec<Slot>,
    /// The number of slots whose pieces have not been answered yet.
    used: usize,
    next: usize,
}

/// A piece that is staged, until it has been waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Staged {
    stage: usize,
    slot: usize,
}

impl Stage {
    fn lane(&mut self) -> Result<&mut Lane, TransferError> {
        self.lane.as_mut().ok_or_else(|| TransferError::transport("its stream was given back"))
    }
}

impl Stages {
    fn of(&mut self, on: &OnDevice) -> Result<usize, TransferError> {
        if let Some(at) = self.0.iter().position(|stage| stage.device == on.device) {
            return Ok(at);
        }
        let lane = Some(on.cuda.lane(on.device)?);
        let (cuda, device) = (Arc::clone(&on.cuda), on.device);
        self.0.push(Stage { cuda, device, lane, slots: Vec::new(), used: 0, next: 0 });
        Ok(self.0.len() - 1)
    }

    /// Whether there is room for another piece of that device before the staged ones are answered.
    pub(crate) fn has_room(&self, on: &OnDevice) -> bool {
        self.0.iter().find(|stage| stage.device == on.device).is_none_or(|stage| stage.used < MARKS)
    }

    /// Takes a slot for a piece of that device. There must be room.
    pub(crate) fn take(&mut self, on: &OnDevice) -> Result<Staged, TransferError> {
        let at = self.of(on)?;
        let stage = &mut self.0[at];
        if stage.slots.len() < MARKS && stage.next == stage.slots.len() {
            stage.slots.push(stage.cuda.slot(stage.device, PIECE)?);
        }
        let slot = stage.next;
        stage.next = (slot + 1) % MARKS;
        stage.used += 1;
        // Wait for earlier writes from this slot.
        stage.lane()?.wait(slot)?;
        Ok(Staged { stage: at, slot })
    }

    /// The staged piece's memory.
    pub(crate) fn memory(&self, staged: Staged, len: u64) -> Segments {
        Segments::one(self.0[staged.stage].slots[staged.slot].addr(), len)
    }

    /// Starts copying from or to the GPU.
    ///
    /// # Safety
    /// The memory must be an export's that is kept until the piece has been waited for, or the stages are dropped.
    pub(crate) unsafe fn begin(
        &mut self,
        staged: Staged,
        memory: &Segments,
        (offset, len): (u64, u64),
        is_read: bool,
    ) -> Result<(), TransferError> {
        let slot = self.memory(staged, len);
        let (here, there) = (slot.window(0, len), memory.window(offset, len));
        let copies: Vec<_> =
            if is_read { rows_of(here, there, PIECE).collect() } else { rows_of(there, here, PIECE).collect() };
        let lane = self.0[staged.stage].lane()?;
        for rows in &copies {
            // SAFETY: as the caller vouches; the slot is released after the lane's work.
            unsafe { lane.begin(rows)? };
        }
        lane.mark(staged.slot)
    }

    /// Waits until the GPU has copied the piece.
    pub(crate) fn wait(&mut self, staged: Staged) -> Result<(), TransferError> {
        self.0[staged.stage].lane()?.wait(staged.slot)
    }

    /// Notes that all pieces have been answered.
    pub(crate) fn answered(&mut self) {
        self.0.iter_mut().for_each(|stage| stage.used = 0);
    }

    /// Returns all streams and slots until they are needed again.
    pub(crate) fn rest(&mut self) {
        self.0.clear();
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let Some(mut lane) = self.lane.take() else { return };
        // CUD-5
        if lane.finish().is_ok() {
            self.cuda.give_lane(lane);
            self.slots.drain(..).for_each(|slot| self.cuda.give_slot(slot));
        }
    }
}
