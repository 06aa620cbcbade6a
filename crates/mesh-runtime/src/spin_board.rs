//! One page of memory that all processes of a host share: how many of them are running just now.
//!
//! A thread that waits looks again for a while before it blocks, which is worth its while only where a core would idle
//! otherwise. Nobody can tell that from inside one process, so every process says here when it runs and when it blocks.

#[cfg_attr(loom, path = "models/page.rs")]
mod page;

use crate::error::RuntimeError;
use crate::sync::{AtomicU32, Ordering, thread_local};
use page::Page;
use std::cell::Cell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Bits of a seat.
const RUNNING: u8 = 1;
const LOOKING: u8 = 2;

/// The page, and this process's seat on it.
#[derive(Debug)]
pub(crate) struct SpinBoard {
    page: Page,
    seat: u32,
    cores: u32,
    /// Threads of this process that run; the process shows itself while there is one.
    running: AtomicU32,
}

thread_local! {
    static PRESENCE: Presence = const { Presence { counts_on: Cell::new(None) } };
}

/// Whether this thread counts among its process's running ones, and where. It begins to with its first wait, and
/// ceases to when it ends.
struct Presence {
    counts_on: Cell<Option<Weak<SpinBoard>>>,
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
        Ok(Self::at(Page::create()?, 0))
    }

    /// The page that another process made.
    pub(crate) fn join(fd: OwnedFd, seat: u32) -> Result<Self, RuntimeError> {
        Ok(Self::at(Page::open(fd)?, seat))
    }

    pub(crate) fn at(page: Page, seat: u32) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX));
        Self { page, seat, cores, running: AtomicU32::new(0) }
    }

    /// The page's descriptor, to be inherited.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.page.fd()
    }

    /// Whether every core has something to do without this thread.
    pub(crate) fn crowded(&self) -> bool {
        count(self.page.active()) > self.cores
    }

    /// How many cores have nothing better to do than to help this thread, as far as this host's processes know.
    pub(crate) fn spare(&self) -> usize {
        let busy = count(self.page.active()).saturating_sub(count(self.page.looking()));
        self.cores.saturating_sub(busy.max(1)) as usize
    }

    /// Whether looking again can ever be worth while here.
    pub(crate) fn single_core(&self) -> bool {
        self.cores < 2
    }

    /// This thread runs.
    pub(crate) fn enter(self: &Arc<Self>) {
        let counted = PRESENCE.with(|presence| presence.counts_on.replace(Some(Arc::downgrade(self))).is_some());
        if !counted && self.running.fetch_add(1, Ordering::AcqRel) == 0 {
            self.show();
        }
    }

    /// This thread blocks, or ends.
    pub(crate) fn leave(&self) {
        if PRESENCE.with(|presence| presence.counts_on.take()).is_some() {
            self.one_less();
        }
    }

    fn one_less(&self) {
        if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.show();
        }
    }

    /// Shows whether a thread of this process runs. Another may begin or cease to meanwhile: the last one to change the
    /// seat looks again, and sees what the others did before they changed it.
    fn show(&self) {
        loop {
            let runs = self.running.load(Ordering::Acquire) > 0;
            if runs {
                self.raise(RUNNING, self.page.active());
            } else {
                self.lower(self.seat, RUNNING, self.page.active());
            }
            if (self.running.load(Ordering::Acquire) > 0) == runs {
                return;
            }
        }
    }

    /// This thread, its process's only one that does, begins or ends to look for something to do.
    pub(crate) fn look(&self, looks: bool) {
        if looks {
            self.raise(LOOKING, self.page.looking());
        } else {
            self.lower(self.seat, LOOKING, self.page.looking());
        }
    }

    /// Takes a process off the page: it has ended, perhaps while it ran.
    pub(crate) fn clear(&self, seat: u32) {
        self.lower(seat, RUNNING, self.page.active());
        self.lower(seat, LOOKING, self.page.looking());
    }

    #[cfg(loom)]
    pub(crate) fn page(&self) -> &Page {
        &self.page
    }

    /// Whether this process shows itself as one that runs.
    #[cfg(loom)]
    pub(crate) fn shows(&self) -> bool {
        self.page.flag(self.seat).is_some_and(|flag| flag.load(Ordering::SeqCst) & RUNNING != 0)
    }

    fn raise(&self, bit: u8, counter: &AtomicU32) {
        if let Some(flag) = self.page.flag(self.seat)
            && flag.fetch_or(bit, Ordering::AcqRel) & bit == 0
        {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn lower(&self, seat: u32, bit: u8, counter: &AtomicU32) {
        if let Some(flag) = self.page.flag(seat)
            && flag.fetch_and(!bit, Ordering::AcqRel) & bit != 0
        {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A counter of the page. It follows the seats that it counts, and is below zero for a moment if one is left just after
/// it was taken.
fn count(counter: &AtomicU32) -> u32 {
    counter.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned()
}

impl Drop for SpinBoard {
    fn drop(&mut self) {
        self.clear(self.seat);
    }
}
