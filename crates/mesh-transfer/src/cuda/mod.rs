//! GPU memory, through CUDA's driver.
//!
//! CUD-1: only the driver touches a GPU's memory. [`Segments`](crate::Segments) say which memory is a GPU's; a
//! transport is given such memory only if it says that it takes it, and otherwise copies of it in pinned host memory.
//! CUD-2: while a process maps another's allocation, it holds a lease (LSE-1) of an export in it. So no owner
//! frees memory that is mapped elsewhere, which CUDA does not allow.
//! CUD-3: a forked copy calls nothing of CUDA, destructors included.
//! CUD-4: addresses from another process are used only inside what the driver says is mapped.
//! CUD-5: work given to a stream has ended before its memory is released, also after an error.

mod copies;
mod driver;
mod lanes;
mod library;
mod local;
mod offered;
mod serving;
mod slots;
#[cfg(test)]
mod tests;

pub(crate) use copies::rows_of;
pub(crate) use driver::{Device, Driver};
use lanes::SOON;
pub(crate) use lanes::{Lane, STEP};
pub(crate) use local::run_staged;
pub(crate) use offered::{OnDevice, Record, Why};
pub(crate) use serving::{PIECE, Staged, Stages};
pub(crate) use slots::Slot;

use crate::error::TransferError;
use crate::lock;
use crate::operation::Op;
use crate::operation::Work;
use crate::realm::Realm;
use crate::segments::{Segments, Space};
use crate::watch::Watch;
use driver::{About, INVALID_VALUE};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The most streams kept for later, on all devices together.
const LANES: usize = 16;
/// The most pinned memory kept for later.
const PINNED: u64 = 64 << 20;
/// The pause between checks of a user's stream.
const PAUSE: Duration = Duration::from_micros(100);

/// CUDA in this process, opened when GPU memory is first used.
#[derive(Debug)]
pub(crate) struct Cuda {
    realm: Realm,
    /// The path of the library, if not the system's.
    path: Option<String>,
    driver: OnceLock<Result<Arc<dyn Driver>, TransferError>>,
    lanes: Mutex<Vec<Lane>>,
    slots: Mutex<Vec<Slot>>,
}

impl Cuda {
    pub(crate) fn new(realm: &Realm, path: Option<String>) -> Arc<Self> {
        let (lanes, slots) = (Mutex::default(), Mutex::default());
        Arc::new(Self { realm: realm.clone(), path, driver: OnceLock::new(), lanes, slots })
    }

    /// With the given driver.
    #[cfg(test)]
    pub(crate) fn with(realm: &Realm, driver: Arc<dyn Driver>) -> Arc<Self> {
        let made = Self::new(realm, None);
        let _ = made.driver.set(Ok(driver));
        made
    }

    /// Whether there is a driver. Initialises nothing, so a process may ask before it forks.
    pub(crate) fn probe(&self) -> Result<(), TransferError> {
        match self.driver.get() {
            Some(found) => found.as_ref().map(|_| ()).map_err(Clone::clone),
            None => library::Found::open(self.path.as_deref()).map(|_| ()),
        }
    }

    /// The driver; starts it in this process on first use.
    pub(crate) fn driver(&self) -> Result<&Arc<dyn Driver>, TransferError> {
        // CUD-3
        self.realm.check_fork()?;
        let start = || {
            let started = library::Found::open(self.path.as_deref())?.start()?;
            Ok(Arc::new(started) as Arc<dyn Driver>)
        };
        self.driver.get_or_init(start).as_ref().map_err(Clone::clone)
    }

    /// The number in this process of the device with that UUID, if this process may use it.
    pub(crate) fn find(&self, uuid: &[u8; 16]) -> Result<Option<Device>, TransferError> {
        Ok(self.driver()?.uuids().iter().position(|each| each == uuid))
    }

    /// Describes memory that the user says is a GPU's. All of it must be.
    pub(crate) fn about(&self, segments: &Segments) -> Result<Option<About>, TransferError> {
        let list = segments.list();
        let Some(first) = list.first() else { return Ok(None) };
        let (low, high) = list.iter().fold((first.addr, first.addr), |(low, high), piece| {
            (low.min(piece.addr), high.max(piece.addr + piece.len - 1))
        });
        let driver = self.driver()?;
        let look = |addr| {
            driver.about(addr).map_err(|failure| match failure.code {
                INVALID_VALUE => TransferError::invalid(format!(
                    "the array says that it lies in memory of a GPU, but there is none of this process at {addr:#x}"
                )),
                _ => failure.into(),
            })
        };
        let about = look(low)?;
        let end = if high < about.base + about.len { about } else { look(high)? };
        if end.device != about.device {
            return Err(TransferError::invalid("memory on several GPUs cannot be transferred at once"));
        }
        Ok(Some(about))
    }

    /// Records events on the streams of the operations' local memory, on the calling thread.
    pub(crate) fn note(&self, ops: &[Op]) -> Result<Vec<Ready>, TransferError> {
        let mut noted: Vec<(Device, u64)> = Vec::new();
        for op in ops {
            if let Work::Read { local, .. } | Work::Write { local, .. } = &op.work
                && let Space::Cuda { stream } = local.space()
                && let Some(about) = self.about(local)?
                && let Some(stream) = stream
                && !noted.contains(&(about.device, stream))
            {
                noted.push((about.device, stream));
            }
        }
        noted.into_iter().map(|(device, stream)| self.ready(device, stream)).collect()
    }

    fn ready(&self, device: Device, stream: u64) -> Result<Ready, TransferError> {
        let driver = self.driver()?;
        let event = driver.make_event(device)?;
        let made = Ready { driver: Arc::clone(driver), device, event, pid: self.realm.pid };
        driver.record(device, event, stream)?;
        Ok(made)
    }

    /// Waits for the work on this memory's stream, if it has one.
    pub(crate) fn settle(&self, segments: &Segments) -> Result<(), TransferError> {
        let Space::Cuda { stream: Some(stream) } = segments.space() else { return Ok(()) };
        match self.about(segments)? {
            Some(about) => self.ready(about.device, stream)?.wait(&Watch::default()),
            None => Ok(()),
        }
    }

    /// A stream on that device, with its events, for the caller's exclusive use.
    pub(crate) fn lane(&self, device: Device) -> Result<Lane, TransferError> {
        let driver = self.driver()?;
        let found = {
            let mut lanes = lock(&self.lanes);
            let at = lanes.iter().position(|lane| lane.device() == device);
            at.map(|at| lanes.swap_remove(at))
        };
        match found {
            Some(lane) => Ok(lane),
            None => Ok(Lane::make(driver, device, self.realm.pid)?),
        }
    }

    /// Returns a lane whose work has finished without errors.
    pub(crate) fn give_lane(&self, lane: Lane) {
        let mut lanes = lock(&self.lanes);
        if lanes.len() < LANES && lane.is_sound() {
            lanes.push(lane);
        }
    }

    /// Host memory of this length that the device can access; pinned if possible.
    pub(crate) fn slot(&self, device: Device, len: u64) -> Result<Slot, TransferError> {
        let found = {
            let mut slots = lock(&self.slots);
            let at = slots.iter().position(|slot| slot.len() == len);
            at.map(|at| slots.swap_remove(at))
        };
        match found {
            Some(slot) => Ok(slot),
            None => Ok(Slot::make(self.driver()?, device, len, self.realm.pid)),
        }
    }

    /// Returns a slot that no stream uses any more.
    pub(crate) fn give_slot(&self, slot: Slot) {
        let mut slots = lock(&self.slots);
        let kept: u64 = slots.iter().map(Slot::len).sum();
        if kept + slot.len() <= PINNED {
            slots.push(slot);
        }
    }
}

/// Work on a user's stream that must finish before a transfer starts.
#[derive(Debug)]
pub(crate) struct Ready {
    driver: Arc<dyn Driver>,
    device: Device,
    event: u64,
    pid: u32,
}

impl Ready {
    /// Waits for it within the transfer's deadline: the user's work may take any time.
    pub(crate) fn wait(&self, watch: &Watch) -> Result<(), TransferError> {
        let begun = Instant::now();
        while !self.driver.is_reached(self.device, self.event)? {
            watch.check()?;
            if begun.elapsed() > SOON {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        // CUD-3
        if crate::realm::pid() == self.pid {
            self.driver.end_event(self.device, self.event);
        }
    }
}
