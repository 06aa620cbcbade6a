//! How a signal reaches the waiting main thread: Python's handler writes a byte to a pipe, which the reactor reads.

use crate::error::RuntimeError;
use crate::locks::lock;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};

/// See the module.
#[derive(Debug)]
pub struct Signals {
    pipe: (OwnedFd, OwnedFd),
    came: AtomicBool,
    /// Where such bytes are forwarded: to the previous listener for signals.
    forward: AtomicI32,
    /// The main thread, while it waits.
    main: Mutex<Option<Arc<Waiter>>>,
}

/// The main thread waits, and is woken by signals, until this is dropped.
#[must_use]
pub(crate) struct Heeding<'a>(&'a Signals);

impl Drop for Heeding<'_> {
    fn drop(&mut self) {
        *lock(&self.0.main) = None;
    }
}

impl Heeding<'_> {
    /// Whether a signal has arrived.
    pub(crate) fn came(&self) -> bool {
        self.0.came.load(Ordering::SeqCst)
    }

    /// The same, but resets it.
    pub(crate) fn take(&self) -> bool {
        self.0.came.swap(false, Ordering::SeqCst)
    }
}

impl Signals {
    /// Bytes are announced to `reactor` under `token`.
    pub(super) fn new(reactor: &Reactor, token: u64) -> Result<Self, RuntimeError> {
        let pipe = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(RuntimeError::os("pipe"))?;
        reactor.add(pipe.0.as_fd(), token)?;
        Ok(Self { pipe, came: AtomicBool::new(false), forward: AtomicI32::new(-1), main: Mutex::default() })
    }

    /// Makes signals wake the calling thread, if it is `interruptible`: only the main thread is.
    pub(crate) fn heed(&self, interruptible: bool) -> Option<Heeding<'_>> {
        interruptible.then(|| {
            *lock(&self.main) = Some(Waiter::current());
            Heeding(self)
        })
    }

    /// Where a signal handler must write.
    pub fn fd(&self) -> RawFd {
        self.pipe.1.as_raw_fd()
    }

    /// Where to forward such bytes; -1 for nowhere.
    pub fn forward_to(&self, fd: RawFd) {
        self.forward.store(fd, Ordering::SeqCst);
    }

    pub(super) fn on_ready(&self, reactor: &Reactor) {
        let mut bytes = [0_u8; 64];
        let n = rustix::io::read(&self.pipe.0, &mut bytes).unwrap_or(0);
        let forward = self.forward.load(Ordering::SeqCst);
        if forward >= 0 && n > 0 {
            // SAFETY: the descriptor belongs to the code that set it as the process's signal descriptor. If it is
            // closed meanwhile the write fails, as it would have for the interpreter itself.
            let fd = unsafe { BorrowedFd::borrow_raw(forward) };
            let _ = rustix::io::write(fd, &bytes[..n]);
        }
        self.came.store(true, Ordering::SeqCst);
        let main = lock(&self.main).clone();
        if let Some(main) = main {
            main.notify(reactor);
        }
    }
}
