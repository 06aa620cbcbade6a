//! Event loops, as the reactor sees them: threads that wait here for their own descriptors too. Those of this process's actors
//! always sleep here; others of asyncio's visit while a coroutine of theirs is all that waits.

use crate::locks::lock;
use crate::loop_waker::LoopWaker;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

/// The reactor does not watch the loop's descriptors yet.
const UNWATCHED: u8 = 0;
/// It will report the next one that is ready.
const QUIET: u8 = 1;
/// It has reported one.
const READY: u8 = 2;

/// One loop.
#[derive(Debug)]
pub struct EventLoop {
    token: u64,
    /// It runs this process's actors.
    runs_actors: bool,
    /// The set of its descriptors known to the reactor; -1 before there is one.
    watched: AtomicI32,
    /// [`UNWATCHED`], [`QUIET`] or [`READY`].
    descriptors: AtomicU8,
    /// Its thread, while it waits.
    waiter: Mutex<Option<Arc<Waiter>>>,
    thread: Mutex<Option<ThreadId>>,
}

impl EventLoop {
    fn new(token: u64, runs_actors: bool) -> Self {
        let (watched, descriptors) = (AtomicI32::new(-1), AtomicU8::new(UNWATCHED));
        Self { token, runs_actors, watched, descriptors, waiter: Mutex::default(), thread: Mutex::default() }
    }

    /// Whether one of its descriptors was ready since this was last asked: the loop must look.
    pub(super) fn was_ready(&self) -> bool {
        self.descriptors.compare_exchange(READY, UNWATCHED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The calling thread is the loop's. It waits by `wait`, with the set `watched` announced to `reactor`.
    pub(super) fn wait<T>(
        &self,
        reactor: &Reactor,
        waker: &LoopWaker,
        watched: BorrowedFd<'_>,
        wait: impl FnOnce() -> T,
    ) -> T {
        *lock(&self.waiter) = Some(Waiter::current());
        *lock(&self.thread) = Some(std::thread::current().id());
        waker.wait_here(true);
        let first = self.watched.swap(watched.as_raw_fd(), Ordering::SeqCst) != watched.as_raw_fd();
        if self.descriptors.swap(QUIET, Ordering::SeqCst) != QUIET || first {
            reactor.watch_once(watched, self.token, first);
        }
        let waited = wait();
        waker.wait_here(false);
        *lock(&self.waiter) = None;
        waited
    }

    /// Whether one of its descriptors is ready.
    pub(super) fn is_ready(&self) -> bool {
        self.descriptors.load(Ordering::SeqCst) == READY
    }

    /// Whether none of its descriptors is ready, as far as the reactor has seen: it would have reported one.
    pub fn is_quiet(&self) -> bool {
        self.descriptors.load(Ordering::SeqCst) == QUIET
    }

    /// Notes that one of its descriptors is ready. It is not polled again until the loop waits again.
    fn on_ready(&self, reactor: &Reactor) {
        self.descriptors.store(READY, Ordering::SeqCst);
        self.wake(reactor);
    }

    /// Makes its thread check again what it waits for.
    fn wake(&self, reactor: &Reactor) {
        let waiter = lock(&self.waiter).clone();
        if let Some(waiter) = waiter {
            waiter.notify(reactor);
        }
    }

    fn is_mine(&self) -> bool {
        let me = std::thread::current().id();
        lock(&self.thread).is_some_and(|thread| thread == me)
    }
}

/// The loops of a process that live. The place of one that is gone is used again.
#[derive(Debug, Default)]
pub struct EventLoops(Mutex<Vec<Weak<EventLoop>>>);

impl EventLoops {
    /// Another one; the first is announced to the reactor under `tokens`, the next under the number after it.
    pub(super) fn add(&self, tokens: u64, runs_actors: bool) -> Arc<EventLoop> {
        let mut all = lock(&self.0);
        let at = all.iter().position(|one| one.strong_count() == 0).unwrap_or(all.len());
        let one = Arc::new(EventLoop::new(tokens + at as u64, runs_actors));
        match all.get_mut(at) {
            Some(place) => *place = Arc::downgrade(&one),
            None => all.push(Arc::downgrade(&one)),
        }
        one
    }

    fn all(&self) -> Vec<Arc<EventLoop>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }

    /// Notes that one of the descriptors of the loop with this number is ready.
    pub(super) fn on_ready(&self, reactor: &Reactor, number: u64) {
        let one = usize::try_from(number).ok().and_then(|number| lock(&self.0).get(number).and_then(Weak::upgrade));
        if let Some(one) = one {
            one.on_ready(reactor);
        }
    }

    /// Makes all their threads check again what they wait for.
    pub(super) fn wake(&self, reactor: &Reactor) {
        for one in self.all() {
            one.wake(reactor);
        }
    }

    /// Whether the calling thread is that of a loop that runs actors: it may not wait for what runs there.
    pub fn is_mine(&self) -> bool {
        self.all().iter().any(|one| one.runs_actors && one.is_mine())
    }
}
