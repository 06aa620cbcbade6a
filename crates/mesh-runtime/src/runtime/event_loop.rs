//! The event loop of this process's actors, as the reactor sees it: a thread that waits here for its own descriptors.

use crate::locks::lock;
use crate::loop_waker::LoopWaker;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

/// See the module.
#[derive(Debug)]
pub struct EventLoop {
    /// The set of its descriptors known to the reactor; -1 before there is one.
    watched: AtomicI32,
    ready: AtomicBool,
    /// Its thread, while it waits.
    waiter: Mutex<Option<Arc<Waiter>>>,
    thread: Mutex<Option<ThreadId>>,
}

impl Default for EventLoop {
    fn default() -> Self {
        let (waiter, thread) = (Mutex::default(), Mutex::default());
        Self { watched: AtomicI32::new(-1), ready: AtomicBool::new(false), waiter, thread }
    }
}

impl EventLoop {
    /// The calling thread is the loop's. It waits by `wait`, with the set `watched` announced to `reactor` under
    /// `token`.
    pub(super) fn wait(
        &self,
        reactor: &Reactor,
        token: u64,
        waker: &LoopWaker,
        watched: BorrowedFd<'_>,
        wait: impl FnOnce(),
    ) {
        self.ready.store(false, Ordering::SeqCst);
        *lock(&self.waiter) = Some(Waiter::current());
        *lock(&self.thread) = Some(std::thread::current().id());
        waker.wait_here(true);
        let first = self.watched.swap(watched.as_raw_fd(), Ordering::SeqCst) != watched.as_raw_fd();
        reactor.watch_once(watched, token, first);
        wait();
        waker.wait_here(false);
        *lock(&self.waiter) = None;
    }

    /// Whether one of its descriptors is ready.
    pub(super) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    /// Notes that one of its descriptors is ready. It is not polled again until the loop waits again.
    pub(super) fn on_ready(&self, reactor: &Reactor) {
        self.ready.store(true, Ordering::SeqCst);
        self.wake(reactor);
    }

    /// Makes its thread check again what it waits for.
    pub(super) fn wake(&self, reactor: &Reactor) {
        if let Some(waiter) = lock(&self.waiter).clone() {
            waiter.notify(reactor);
        }
    }

    /// Whether the calling thread is the loop's, which may not wait for what runs on it.
    pub fn is_mine(&self) -> bool {
        let me = std::thread::current().id();
        lock(&self.thread).is_some_and(|thread| thread == me)
    }
}
