//! Waiting for the machine's state to change: for less to be under way, above all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

/// Whoever waits calls [`Room::want`], then looks at the state, then waits: what changes in between is told. Whoever changes the
/// state pays for a notification only if somebody waits.
#[derive(Debug, Default)]
pub(super) struct Room {
    wanted: AtomicBool,
    changed: Condvar,
}

impl Room {
    /// Somebody is about to look at the state, and will wait.
    pub(super) fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }

    /// Waits for a change, for at most `limit`.
    pub(super) fn wait<'a, T>(&self, state: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// The state has changed.
    pub(super) fn tell(&self) {
        if self.wanted.swap(false, Ordering::SeqCst) {
            self.changed.notify_all();
        }
    }
}
