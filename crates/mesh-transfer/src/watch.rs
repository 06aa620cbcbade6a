//! What ends an operation early: its deadline, or cancellation by its caller.

use crate::error::{ErrorKind, TransferError};
use crate::lock;
use rustix::event::Timespec;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A time as `poll` takes it.
pub(crate) fn timespec(limit: Duration) -> Timespec {
    Timespec { tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: limit.subsec_nanos().into() }
}

/// Seen by those who work on an operation.
#[derive(Clone, Debug, Default)]
pub struct Watch(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    deadline: Option<Instant>,
    given_up: AtomicBool,
    /// Connections to shut down on cancellation, which interrupts their waiters.
    streams: Mutex<Vec<Arc<TcpStream>>>,
}

impl Watch {
    /// Ends at `deadline`, if any.
    pub fn new(deadline: Option<Instant>) -> Self {
        Self(Arc::new(Shared { deadline, ..Shared::default() }))
    }

    /// Makes those who work on it stop soon.
    pub fn give_up(&self) {
        self.0.given_up.store(true, Ordering::SeqCst);
        for stream in self.streams().iter() {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Fails once the operation must end.
    pub fn check(&self) -> Result<(), TransferError> {
        if self.0.given_up.load(Ordering::SeqCst) {
            return Err(TransferError::new(ErrorKind::Cancelled, "the transfer was cancelled by its caller"));
        }
        match self.0.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(TransferError::new(
                ErrorKind::TimedOut,
                "the transfer did not finish within its deadline; its target may have been written in part",
            )),
            _ => Ok(()),
        }
    }

    /// The time to the deadline; none if there is no deadline.
    pub fn left(&self) -> Option<Duration> {
        self.0.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Shuts the connection down if the operation is given up.
    pub(crate) fn add(&self, stream: &Arc<TcpStream>) -> Result<(), TransferError> {
        self.streams().push(Arc::clone(stream));
        // It may have been given up before the connection was in the list.
        self.check()
    }

    /// Shuts the connection down if the operation is given up while the result lives.
    pub(crate) fn follow(&self, stream: &Arc<TcpStream>) -> Result<Followed<'_>, TransferError> {
        let followed = Followed(self, Arc::clone(stream));
        self.add(stream)?;
        Ok(followed)
    }

    pub(crate) fn remove(&self, stream: &Arc<TcpStream>) {
        self.streams().retain(|other| !Arc::ptr_eq(other, stream));
    }

    fn streams(&self) -> std::sync::MutexGuard<'_, Vec<Arc<TcpStream>>> {
        lock(&self.0.streams)
    }
}

/// A connection that ends with an operation, until this is dropped.
pub(crate) struct Followed<'a>(&'a Watch, Arc<TcpStream>);

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        self.0.remove(&self.1);
    }
}
