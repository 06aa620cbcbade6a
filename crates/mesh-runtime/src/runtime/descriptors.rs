//! Promises that are finished by a descriptor: the write end of a pipe, for code that can only write to one.
//!
//! The read end is in the links' set, so it costs no thread, and whichever thread reads the links reads it (CMP-2).
//! Four bytes are a status in native byte order; the end of the file before them breaks the promise. What is written
//! after the status stays in the pipe, and the read end stays open until the last copy of the write end is closed: no
//! late writer is killed by SIGPIPE.

use crate::completion::{Fate, Finisher};
use crate::error::RuntimeError;
use crate::locks::lock;
use crate::reactor::Reactor;
use crate::standing::Standing;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Above the tokens of fork servers and of the runtime's own descriptors, below those of connections.
pub(super) const DESCRIPTOR_TOKENS: u64 = 1 << 36;

/// The read ends of a process.
#[derive(Debug)]
pub(super) struct Descriptors {
    reactor: Arc<Reactor>,
    standing: Arc<Standing>,
    next: AtomicU64,
    open: Mutex<HashMap<u64, Reading>>,
}

#[derive(Debug)]
struct Reading {
    pipe: OwnedFd,
    /// None once the status has arrived.
    finisher: Option<Arc<Finisher>>,
    status: [u8; 4],
    filled: usize,
}

impl Reading {
    /// The outcome of the promise; none if it is still to come.
    fn read(&mut self) -> Option<Fate> {
        while self.filled < self.status.len() {
            match rustix::io::read(&self.pipe, &mut self.status[self.filled..]) {
                Ok(0) => return Some(Fate::Broken),
                Ok(n) => self.filled += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return None,
                Err(_) => return Some(Fate::Broken),
            }
        }
        Some(Fate::Status(i32::from_ne_bytes(self.status)))
    }
}

impl Descriptors {
    pub(super) fn new(reactor: &Arc<Reactor>, standing: &Arc<Standing>) -> Self {
        let (reactor, standing) = (Arc::clone(reactor), Arc::clone(standing));
        Self { reactor, standing, next: AtomicU64::new(DESCRIPTOR_TOKENS), open: Mutex::default() }
    }

    /// Makes a descriptor to finish a promise by. The caller owns it, and the promise is kept until it is closed.
    pub(super) fn open(&self, finisher: &Arc<Finisher>) -> Result<OwnedFd, RuntimeError> {
        self.standing.usable()?;
        let (pipe, theirs) = pipe_with(PipeFlags::CLOEXEC).map_err(RuntimeError::os("pipe"))?;
        // The caller's end blocks, as most writers expect.
        rustix::io::ioctl_fionbio(&pipe, true).map_err(RuntimeError::os("ioctl"))?;
        {
            let mut open = lock(&self.open);
            let token = self.next.fetch_add(1, Ordering::Relaxed);
            self.reactor.add(pipe.as_fd(), token)?;
            open.insert(token, Reading { pipe, finisher: Some(Arc::clone(finisher)), status: [0; 4], filled: 0 });
        }
        if self.standing.is_closed() {
            self.close();
            return Err(RuntimeError::Closed);
        }
        Ok(theirs)
    }

    pub(super) fn on_ready(&self, token: u64) {
        let mut open = lock(&self.open);
        let Some(reading) = open.get_mut(&token) else { return };
        let fate = if reading.finisher.is_some() { reading.read() } else { Some(Fate::Broken) };
        let Some(fate) = fate else { return };
        let finisher = reading.finisher.take();
        if matches!(fate, Fate::Status(_)) {
            self.reactor.watch_end(reading.pipe.as_fd(), token);
        } else if let Some(reading) = open.remove(&token) {
            self.reactor.remove(reading.pipe.as_fd());
        }
        // Closed before anybody hears of it, and not under the lock: the last finisher may go.
        drop(open);
        if let Some(finisher) = finisher {
            finisher.finish(fate);
        }
    }

    /// Stops reading: what was not written by now never comes.
    pub(super) fn close(&self) {
        let open = std::mem::take(&mut *lock(&self.open));
        for mut reading in open.into_values() {
            self.reactor.remove(reading.pipe.as_fd());
            if let Some(finisher) = reading.finisher.take() {
                let fate = reading.read().unwrap_or(Fate::Broken);
                drop(reading);
                finisher.finish(fate);
            }
        }
    }
}
