//! One page of memory that all processes of a host share: how many of them are running just now.
//!
//! A thread that waits looks again for a while before it blocks, which is worth its while only where a core would idle
//! otherwise. Nobody can tell that from inside one process, so every process says here when it runs and when it blocks.

use crate::error::RuntimeError;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::cell::RefCell;
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

const LEN: usize = 64 * 1024;
const FLAGS_AT: usize = 64;
/// Bits of a seat.
const RUNNING: u8 = 1;
const LOOKING: u8 = 2;
/// How many processes can show themselves; the rest simply never look twice.
pub(crate) const SEATS: u32 = (LEN - FLAGS_AT) as u32;

/// The page, and this process's seat on it.
#[derive(Debug)]
pub(crate) struct SpinBoard {
    base: *mut c_void,
    fd: OwnedFd,
    seat: u32,
    cores: u32,
    /// Threads of this process that run; the process shows itself while there is one.
    running: AtomicU32,
}

// SAFETY: the page is only reached through atomics, and stays mapped until the board is dropped.
unsafe impl Send for SpinBoard {}
// SAFETY: as above.
unsafe impl Sync for SpinBoard {}

thread_local! {
    static PRESENCE: RefCell<Presence> = const { RefCell::new(Presence { counts_on: None }) };
}

/// Whether this thread counts among its process's running ones, and where. It begins to with its first wait, and
/// ceases to when it ends.
struct Presence {
    counts_on: Option<Weak<SpinBoard>>,
}

impl Drop for Presence {
    fn drop(&mut self) {
        if let Some(board) = self.counts_on.take().and_then(|board| board.upgrade()) {
            board.one_less();
        }
    }
}

impl SpinBoard {
    /// A fresh page, with this process in the first seat.
    pub(crate) fn create() -> Result<Self, RuntimeError> {
        let fd = memfd_create("mesh-board", MemfdFlags::CLOEXEC).map_err(RuntimeError::NoMemfd)?;
        ftruncate(&fd, LEN as u64).map_err(RuntimeError::os("ftruncate"))?;
        Self::join(fd, 0)
    }

    /// The page that another process made.
    pub(crate) fn join(fd: OwnedFd, seat: u32) -> Result<Self, RuntimeError> {
        // SAFETY: a fresh shared mapping at an address of the kernel's choosing; nothing else refers to it.
        let base = unsafe {
            mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)
                .map_err(RuntimeError::os("mmap of the host's board"))?
        };
        let cores = std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX));
        Ok(Self { base, fd, seat, cores, running: AtomicU32::new(0) })
    }

    /// The page's descriptor, to be inherited.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn counter(&self, index: usize) -> &AtomicU32 {
        assert!(index < 2, "the page has two counters");
        // SAFETY: the page begins with two u32 that are only used atomically; mappings are page-aligned.
        unsafe { &*self.base.cast::<AtomicU32>().add(index) }
    }

    /// Processes that run.
    fn active(&self) -> &AtomicU32 {
        self.counter(0)
    }

    /// Those of them that only look whether there is something to do.
    fn looking(&self) -> &AtomicU32 {
        self.counter(1)
    }

    fn flag(&self, seat: u32) -> Option<&AtomicU8> {
        // SAFETY: inside the mapping, since the seat is below SEATS.
        (seat < SEATS).then(|| unsafe { &*self.base.cast::<AtomicU8>().add(FLAGS_AT + seat as usize) })
    }

    /// Whether every core has something to do without this thread.
    pub(crate) fn crowded(&self) -> bool {
        self.active().load(Ordering::Relaxed) > self.cores
    }

    /// How many cores have nothing better to do than to help this thread, as far as this host's processes know.
    pub(crate) fn spare(&self) -> usize {
        let busy = self.active().load(Ordering::Relaxed).saturating_sub(self.looking().load(Ordering::Relaxed));
        self.cores.saturating_sub(busy.max(1)) as usize
    }

    /// Whether looking again can ever be worth while here.
    pub(crate) fn single_core(&self) -> bool {
        self.cores < 2
    }

    /// This thread runs.
    pub(crate) fn enter(self: &Arc<Self>) {
        let counted = PRESENCE.with_borrow_mut(|presence| presence.counts_on.replace(Arc::downgrade(self)).is_some());
        if !counted && self.running.fetch_add(1, Ordering::Relaxed) == 0 {
            self.raise(RUNNING, self.active());
        }
    }

    /// This thread blocks, or ends.
    pub(crate) fn leave(&self) {
        if PRESENCE.with_borrow_mut(|presence| presence.counts_on.take()).is_some() {
            self.one_less();
        }
    }

    fn one_less(&self) {
        if self.running.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.lower(self.seat, RUNNING, self.active());
        }
    }

    /// This thread, its process's only one that does, begins or ends to look for something to do.
    pub(crate) fn look(&self, looks: bool) {
        if looks {
            self.raise(LOOKING, self.looking());
        } else {
            self.lower(self.seat, LOOKING, self.looking());
        }
    }

    /// Takes a process off the page: it has ended, perhaps while it ran.
    pub(crate) fn clear(&self, seat: u32) {
        self.lower(seat, RUNNING, self.active());
        self.lower(seat, LOOKING, self.looking());
    }

    fn raise(&self, bit: u8, counter: &AtomicU32) {
        if let Some(flag) = self.flag(self.seat)
            && flag.fetch_or(bit, Ordering::Relaxed) & bit == 0
        {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn lower(&self, seat: u32, bit: u8, counter: &AtomicU32) {
        if let Some(flag) = self.flag(seat)
            && flag.fetch_and(!bit, Ordering::Relaxed) & bit != 0
        {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for SpinBoard {
    fn drop(&mut self) {
        self.clear(self.seat);
        // SAFETY: mapped by `join` with this length; no reference outlives `self`.
        let _ = unsafe { munmap(self.base, LEN) };
    }
}
