//! How an event loop is told that something is ready.

use crate::reactor::Reactor;
use crate::wait::Waiter;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tells an event loop that something is ready: one descriptor to watch, written once per burst.
#[derive(Debug)]
pub struct LoopWaker {
    fd: OwnedFd,
    ready: Mutex<Ready>,
    any: AtomicBool,
}

#[derive(Debug, Default)]
struct Ready {
    tokens: Vec<u64>,
    /// The descriptor was written and not read since.
    rung: bool,
    /// The loop's thread, while it waits in the runtime itself rather than on the descriptor.
    waiter: Option<Arc<Waiter>>,
}

impl LoopWaker {
    /// A waker whose descriptor the loop must watch.
    ///
    /// # Errors
    /// If descriptors run out.
    pub fn new() -> Result<Self, crate::RuntimeError> {
        let fd =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(crate::RuntimeError::os("eventfd"))?;
        Ok(Self { fd, ready: Mutex::default(), any: AtomicBool::new(false) })
    }

    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        self.fd.as_fd().as_raw_fd()
    }

    fn lock(&self) -> MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that `token` is ready, and wakes the loop if nobody has yet.
    pub(crate) fn push(&self, reactor: &Reactor, token: u64) {
        let mut ready = self.lock();
        ready.tokens.push(token);
        self.any.store(true, Ordering::SeqCst);
        if let Some(waiter) = ready.waiter.take() {
            drop(ready);
            waiter.notify(reactor);
        } else if !ready.rung {
            ready.rung = true;
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    /// Whether anything is ready.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    /// Everything that became ready since the last call.
    pub fn drain(&self) -> Vec<u64> {
        let mut ready = self.lock();
        if std::mem::take(&mut ready.rung) {
            let mut word = [0_u8; 8];
            let _ = rustix::io::read(&self.fd, &mut word);
        }
        self.any.store(false, Ordering::SeqCst);
        std::mem::take(&mut ready.tokens)
    }

    /// The calling thread is about to wait in the runtime instead of on the descriptor, or has done so.
    pub(crate) fn wait_here(&self, here: bool) {
        self.lock().waiter = here.then(Waiter::current);
    }
}
