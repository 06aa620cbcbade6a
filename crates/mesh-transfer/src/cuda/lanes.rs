//! Our own streams, on which copies are made.

use super::driver::{Device, Driver, Failure, Rows};
use crate::error::TransferError;
use crate::watch::Watch;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long to poll a stream before sleeping.
pub(super) const SOON: Duration = Duration::from_micros(50);

/// The most that one step starts: deadlines and cancellation are checked in between.
pub(crate) const STEP: u64 = 64 << 20;
/// The number of events that mark work on a stream.
pub(crate) const MARKS: usize = 8;

/// A stream, and events on it.
#[derive(Debug)]
pub(crate) struct Lane {
    driver: Arc<dyn Driver>,
    device: Device,
    stream: u64,
    events: Vec<u64>,
    /// Whether each event marks work that may be unfinished.
    marked: [bool; MARKS],
    /// Whether there is work that no event marks yet.
    is_open: bool,
    is_broken: bool,
    pid: u32,
}

impl Lane {
    pub(super) fn make(driver: &Arc<dyn Driver>, device: Device, pid: u32) -> Result<Self, Failure> {
        let stream = driver.make_stream(device)?;
        let driver = Arc::clone(driver);
        let (events, marked) = (Vec::with_capacity(MARKS), [false; MARKS]);
        let mut lane = Self { driver, device, stream, events, marked, is_open: false, is_broken: false, pid };
        for _ in 0..MARKS {
            lane.events.push(lane.driver.make_event(device)?);
        }
        Ok(lane)
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn is_sound(&self) -> bool {
        !self.is_broken
    }

    fn told<T>(&mut self, told: Result<T, Failure>) -> Result<T, TransferError> {
        told.map_err(|failure| {
            self.is_broken = true;
            failure.into()
        })
    }

    /// Starts a copy.
    ///
    /// # Safety
    /// Both sides must be memory of this process, including mapped memory, that stays until the work is waited for.
    pub(crate) unsafe fn begin(&mut self, rows: &Rows) -> Result<(), TransferError> {
        self.is_open = true;
        // SAFETY: as the caller vouches.
        let begun = unsafe { self.driver.copy(self.device, self.stream, rows) };
        self.told(begun)
    }

    /// Marks all that has been started so far.
    pub(crate) fn mark(&mut self, at: usize) -> Result<(), TransferError> {
        let recorded = self.driver.record(self.device, self.events[at], self.stream);
        self.told(recorded)?;
        self.marked[at] = true;
        self.is_open = false;
        Ok(())
    }

    /// Waits for the work that a mark stands for.
    pub(crate) fn wait(&mut self, at: usize) -> Result<(), TransferError> {
        if !std::mem::take(&mut self.marked[at]) {
            return Ok(());
        }
        // A short copy finishes sooner than a thread wakes up.
        let begun = Instant::now();
        while begun.elapsed() < SOON {
            let reached = self.driver.is_reached(self.device, self.events[at]);
            if self.told(reached)? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let waited = self.driver.await_event(self.device, self.events[at]);
        self.told(waited)
    }

    /// Waits for everything that has been started (CUD-5).
    pub(crate) fn finish(&mut self) -> Result<(), TransferError> {
        let marked = if self.is_open { self.mark(0) } else { Ok(()) };
        let done = (0..MARKS).fold(marked, |all, at| all.and(self.wait(at)));
        if self.is_broken {
            // Marks may be missing. A lost device fails at once.
            let _ = self.driver.await_stream(self.device, self.stream);
        }
        done
    }

    /// Performs copies, several at a time. None is under way when this returns.
    ///
    /// # Safety
    /// Both sides of all copies must be memory of this process, including mapped memory.
    pub(crate) unsafe fn run(
        &mut self,
        copies: impl Iterator<Item = Rows>,
        watch: &Watch,
    ) -> Result<(), TransferError> {
        let given = || {
            let (mut bytes, mut mark) = (0, 0);
            for rows in copies {
                // SAFETY: as the caller vouches, and waited for below.
                unsafe { self.begin(&rows)? };
                bytes += rows.len();
                if bytes >= STEP {
                    bytes = 0;
                    self.mark(mark)?;
                    mark ^= 1;
                    // Wait for the previous step while this one runs.
                    self.wait(mark)?;
                    watch.check()?;
                }
            }
            Ok(())
        };
        let done = given();
        // Also after an error: copies that were started are still under way.
        let finished = self.finish();
        done.and(finished)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // CUD-3
        if crate::realm::pid() != self.pid {
            return;
        }
        let _ = self.finish();
        for event in self.events.drain(..) {
            self.driver.end_event(self.device, event);
        }
        self.driver.end_stream(self.device, self.stream);
    }
}
