//! A descriptor with which one thread wakes another.

use crate::error::TransferError;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[derive(Debug)]
pub(super) struct Signal(OwnedFd);

impl Signal {
    pub(super) fn new() -> Result<Self, TransferError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags).map_err(TransferError::os("make a descriptor to wake a thread by"))?))
    }

    /// Makes it readable.
    pub(super) fn set(&self) {
        // A full counter is set, too.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it unreadable again.
    pub(super) fn clear(&self) {
        // It is no error if it was not set.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
