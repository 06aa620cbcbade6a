//! How a thread waits, and how it is woken.

use crate::sync::{AtomicU8, AtomicU32, Ordering, Thread, current, park, park_timeout, thread_local};
use std::sync::Arc;
use std::time::Duration;

const RUNNING: u8 = 0;
const PARKED: u8 = 1;
const LEADING: u8 = 2;

/// What leads the waiting threads of a process: the reactor.
pub(crate) trait Leading {
    /// Notes that a blocked thread is served.
    fn note_served(&self);
    /// Wakes the thread that reads for the others.
    fn wake_leader(&self);
}

/// A waiting thread, as seen by threads that may wake it. One per thread.
#[derive(Debug)]
pub(crate) struct Waiter {
    thread: Thread,
    mode: AtomicU8,
    /// How many times in a row spinning found nothing before the thread had to block.
    misses: AtomicU32,
}

thread_local! {
    static ME: Arc<Waiter> = Arc::new(Waiter {
        thread: current(),
        mode: AtomicU8::new(RUNNING),
        misses: AtomicU32::new(0),
    });
}

impl Waiter {
    /// The calling thread's waiter.
    pub(crate) fn current() -> Arc<Self> {
        ME.with(Arc::clone)
    }

    /// Wakes the thread if it blocks. Store what it waits for before, with any ordering: this exchange and that of a
    /// thread about to block are ordered, and the later one sees what the other thread did before.
    pub(crate) fn notify(&self, leading: &impl Leading) {
        match self.mode.swap(RUNNING, Ordering::SeqCst) {
            PARKED => {
                leading.note_served();
                self.thread.unpark();
            }
            LEADING => leading.wake_leader(),
            _ => {}
        }
    }

    /// Blocks until notified, for at most `limit`, unless `ready` already.
    pub(crate) fn park(&self, limit: Option<Duration>, ready: &dyn Fn() -> bool) {
        self.mode.swap(PARKED, Ordering::SeqCst);
        if !ready() {
            match limit {
                Some(limit) => park_timeout(limit),
                None => park(),
            }
        }
        self.mode.store(RUNNING, Ordering::SeqCst);
    }

    /// Notes that the thread is about to block as the leader. False if it need not.
    pub(crate) fn begin_lead(&self, ready: &dyn Fn() -> bool) -> bool {
        self.mode.swap(LEADING, Ordering::SeqCst);
        if ready() {
            self.mode.store(RUNNING, Ordering::SeqCst);
            return false;
        }
        true
    }

    pub(crate) fn end_lead(&self) {
        self.mode.store(RUNNING, Ordering::SeqCst);
    }

    /// Whether spinning has paid off lately. After some misses in a row it is only tried now and then.
    pub(crate) fn may_spin(&self) -> bool {
        let misses = self.misses.load(Ordering::Relaxed);
        if misses < 8 {
            return true;
        }
        self.misses.store(misses.wrapping_add(1).max(8), Ordering::Relaxed);
        misses % 16 == 15
    }

    pub(crate) fn spun(&self, found: bool) {
        if found {
            self.misses.store(0, Ordering::Relaxed);
        } else {
            self.misses.fetch_add(1, Ordering::Relaxed);
        }
    }
}
