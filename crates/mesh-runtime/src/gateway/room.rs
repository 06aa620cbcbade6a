//! Waiting for the machine's state to change, mostly for fewer bytes in flight.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

/// A waiter calls [`Room::want`], checks the state, then waits, so it misses no change in between. A change costs a
/// notification only if somebody waits.
#[derive(Debug, Default)]
pub(super) struct Room {
    wanted: AtomicBool,
    changed: Condvar,
}

impl Room {
    /// Announces that the caller is about to check the state and wait.
    pub(super) fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }

    /// Waits for a change, for at most `limit`.
    pub(super) fn wait<'a, T>(&self, state: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes the waiters: the state has changed.
    pub(super) fn tell(&self) {
        if self.wanted.swap(false, Ordering::SeqCst) {
            self.changed.notify_all();
        }
    }
}
