//! How an event loop is told that something is ready.

use crate::reactor::Reactor;
use crate::wait::Waiter;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How the loop is woken.
#[derive(Debug)]
enum Bell {
    /// A descriptor that it watches.
    Descriptor(OwnedFd),
    /// Another waker of the same loop, with this token.
    Above(Arc<LoopWaker>, u64),
}

/// Tells an event loop that something is ready: one descriptor to watch, written once per burst, and not at all while the loop
/// waits in the runtime.
#[derive(Debug)]
pub struct LoopWaker {
    bell: Bell,
    ready: Mutex<Ready>,
    any: AtomicBool,
}

#[derive(Debug, Default)]
struct Ready {
    tokens: Vec<u64>,
    /// The bell was rung for what is ready.
    rung: bool,
    /// The loop looks here before it sleeps, and sleeps in the runtime: its descriptor wakes nobody.
    inside: bool,
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
        Ok(Self { bell: Bell::Descriptor(fd), ready: Mutex::default(), any: AtomicBool::new(false) })
    }

    /// A waker of a loop that has one: the loop is told by `above`, which gets `token`.
    pub fn below(above: &Arc<Self>, token: u64) -> Self {
        let bell = Bell::Above(Arc::clone(above), token);
        Self { bell, ready: Mutex::default(), any: AtomicBool::new(false) }
    }

    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        match &self.bell {
            Bell::Descriptor(fd) => fd.as_fd().as_raw_fd(),
            Bell::Above(above, _) => above.fd(),
        }
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
        } else if !ready.rung && !ready.inside {
            ready.rung = true;
            match &self.bell {
                Bell::Descriptor(fd) => {
                    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
                }
                Bell::Above(above, token) => {
                    drop(ready);
                    above.push(reactor, *token);
                }
            }
        }
    }

    /// Whether anything is ready.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    /// Everything that became ready since the last call.
    pub fn drain(&self) -> Vec<u64> {
        let mut ready = self.lock();
        if std::mem::take(&mut ready.rung)
            && let Bell::Descriptor(fd) = &self.bell
        {
            let mut word = [0_u8; 8];
            let _ = rustix::io::read(fd, &mut word);
        }
        self.any.store(false, Ordering::SeqCst);
        std::mem::take(&mut ready.tokens)
    }

    /// The calling thread is about to wait in the runtime instead of on the descriptor, or has done so. From now on it looks
    /// whether [anything](Self::any) is ready before it sleeps.
    pub(crate) fn wait_here(&self, here: bool) {
        let mut ready = self.lock();
        ready.waiter = here.then(Waiter::current);
        ready.inside = true;
    }

    /// The loop is about to sleep on the descriptor.
    pub(crate) fn wait_outside(&self) {
        self.lock().inside = false;
    }
}
