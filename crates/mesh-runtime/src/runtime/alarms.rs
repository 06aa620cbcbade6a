//! What everybody who waits in this process must be told: a failure that has reached the script.

use crate::locks::lock;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// See the module.
#[derive(Debug, Default)]
pub struct Alarms {
    count: AtomicU64,
    /// Whether anyone is still to be told.
    on: AtomicBool,
    /// Threads that wait for something other than a call, and must hear of alarms.
    watchers: Mutex<Vec<Arc<Waiter>>>,
}

/// A thread hears of alarms until this is dropped.
#[must_use]
pub(super) struct Watching<'a>(&'a Alarms, Arc<Waiter>);

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        let mut watchers = lock(&self.0.watchers);
        if let Some(place) = watchers.iter().position(|one| Arc::ptr_eq(one, &self.1)) {
            watchers.swap_remove(place);
        }
    }
}

impl Alarms {
    /// Counts another alarm. Wake the waiters after this.
    pub(super) fn begin(&self) {
        // Before it is counted, so that whoever sees the count also sees that it is on.
        self.on.store(true, Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Everybody was told: alarms end no waits that begin from now on.
    pub fn calm(&self) {
        self.on.store(false, Ordering::SeqCst);
    }

    /// Which alarms count as heard at the beginning of a wait: all but the last one, if that is still on.
    pub(crate) fn heard(&self) -> u64 {
        let alarms = self.count();
        if self.on.load(Ordering::SeqCst) { alarms.wrapping_sub(1) } else { alarms }
    }

    /// How many alarms there were.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// The calling thread is about to wait for something other than a call.
    pub(super) fn watch(&self) -> Watching<'_> {
        let me = Waiter::current();
        lock(&self.watchers).push(Arc::clone(&me));
        Watching(self, me)
    }

    pub(super) fn wake(&self, reactor: &Reactor) {
        let watchers = lock(&self.watchers).clone();
        for watcher in watchers {
            watcher.notify(reactor);
        }
    }
}
