//! The events of a job, kept at the controller for those who follow them, in a ring of bounded size.
//!
//! JRN-1: recording an event never waits for a reader. A reader that falls behind misses the oldest events, and is told
//! how many.

use crate::loop_waker::LoopWaker;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many entries are kept for readers.
pub(crate) const KEPT: usize = 2048;
/// How many failures are kept for the overview of a job.
const KEPT_FAILURES: usize = 64;

#[derive(Debug, Default)]
struct Ring {
    entries: VecDeque<Arc<str>>,
    failures: VecDeque<Arc<str>>,
    waiters: Vec<Arc<Waiter>>,
    wakers: Vec<(Arc<LoopWaker>, u64)>,
}

/// The ring. Entries are numbered from 0 in order of arrival.
#[derive(Debug, Default)]
pub struct Journal {
    ring: Mutex<Ring>,
    next: AtomicU64,
    closed: AtomicBool,
}

/// The result of a read.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Entries {
    /// The entries, oldest first.
    pub entries: Vec<Arc<str>>,
    /// Where to read on.
    pub next: u64,
    /// How many of the requested entries were no longer kept.
    pub missed: u64,
}

impl Journal {
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, reactor: &Reactor, entry: Arc<str>, failure: bool) {
        let mut ring = self.lock();
        if failure {
            if ring.failures.len() == KEPT_FAILURES {
                ring.failures.pop_front();
            }
            ring.failures.push_back(Arc::clone(&entry));
        }
        if ring.entries.len() == KEPT {
            ring.entries.pop_front();
        }
        ring.entries.push_back(entry);
        self.next.fetch_add(1, Ordering::SeqCst);
        wake(ring, reactor);
    }

    /// The number that the next entry will have.
    pub fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Whether no more entries will come.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// At most `limit` entries from number `from` on.
    pub fn read(&self, from: u64, limit: usize) -> Entries {
        let ring = self.lock();
        let next = self.next();
        let oldest = next - ring.entries.len() as u64;
        let first = from.clamp(oldest, next);
        let entries: Vec<_> = ring.entries.iter().skip((first - oldest) as usize).take(limit).cloned().collect();
        Entries { next: first + entries.len() as u64, entries, missed: first.saturating_sub(from) }
    }

    pub(crate) fn failures(&self) -> Vec<Arc<str>> {
        self.lock().failures.iter().cloned().collect()
    }

    /// Makes the next entry wake the calling thread.
    pub(crate) fn expect(&self) {
        let me = Waiter::current();
        let mut ring = self.lock();
        if !ring.waiters.iter().any(|waiter| Arc::ptr_eq(waiter, &me)) {
            ring.waiters.push(me);
        }
    }

    /// Tells an event loop when there are more than `seen` entries; at once if there are.
    pub fn tell(&self, reactor: &Reactor, waker: &Arc<LoopWaker>, token: u64, seen: u64) {
        let mut ring = self.lock();
        if self.next() > seen || self.is_closed() {
            drop(ring);
            waker.push(reactor, token);
        } else {
            ring.wakers.push((Arc::clone(waker), token));
        }
    }

    /// Ends the journal, and wakes all who wait.
    pub(crate) fn close(&self, reactor: &Reactor) {
        let ring = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        wake(ring, reactor);
    }
}

fn wake(mut ring: MutexGuard<'_, Ring>, reactor: &Reactor) {
    let waiters = std::mem::take(&mut ring.waiters);
    let wakers = std::mem::take(&mut ring.wakers);
    drop(ring);
    for waiter in waiters {
        waiter.notify(reactor);
    }
    for (waker, token) in wakers {
        waker.push(reactor, token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// JRN-1.
    #[test]
    fn a_slow_reader_misses_the_oldest_and_is_told_how_many() {
        let reactor = Reactor::new().unwrap();
        let journal = Journal::default();
        for n in 0..KEPT + 10 {
            journal.push(&reactor, n.to_string().into(), n % 2 == 0);
        }
        let got = journal.read(0, 3);
        assert_eq!((got.missed, got.next), (10, 13));
        assert_eq!(got.entries, ["10".into(), "11".into(), "12".into()]);
        let rest = journal.read(got.next, usize::MAX);
        assert_eq!((rest.missed, rest.next, rest.entries.len()), (0, (KEPT + 10) as u64, KEPT - 3));
        assert_eq!(journal.read(rest.next, 5), Entries { next: rest.next, ..Entries::default() });
        // A number from the future is no reason to wait forever.
        assert_eq!(journal.read(u64::MAX, 5).next, rest.next);
        assert_eq!(journal.failures().len(), KEPT_FAILURES);
    }

    #[test]
    fn a_loop_is_told_once_and_at_the_close() {
        let reactor = Reactor::new().unwrap();
        let journal = Journal::default();
        let waker = Arc::new(LoopWaker::new().unwrap());
        journal.tell(&reactor, &waker, 7, 0);
        assert!(!waker.any());
        journal.push(&reactor, "a".into(), false);
        journal.push(&reactor, "b".into(), false);
        assert_eq!(waker.drain(), [7]);
        journal.tell(&reactor, &waker, 8, 2);
        journal.close(&reactor);
        assert_eq!(waker.drain(), [8]);
        journal.tell(&reactor, &waker, 9, 2);
        assert_eq!(waker.drain(), [9]);
    }
}
