//! Whether a process may still take part in its job.

use crate::error::RuntimeError;
use std::sync::atomic::{AtomicBool, Ordering};

/// What has become of a process's part in the job. It only ever gets worse.
#[derive(Debug)]
pub(crate) struct Standing {
    pid: u32,
    closed: AtomicBool,
    lost: AtomicBool,
    leaving: AtomicBool,
    forked: AtomicBool,
}

impl Standing {
    pub(crate) fn new() -> Self {
        Self {
            pid: std::process::id(),
            closed: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            forked: AtomicBool::new(false),
        }
    }

    /// The process whose part it is.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// This is a copy in a forked child, where nothing works.
    pub(crate) fn mark_forked(&self) {
        self.forked.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.forked.load(Ordering::SeqCst)
    }

    /// Takes no further part. False if it took none before.
    pub(crate) fn close(&self) -> bool {
        !self.closed.swap(true, Ordering::SeqCst)
    }

    /// Whether the runtime itself is closed, a copy aside.
    pub(crate) fn is_over(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Whether it takes no part in the mesh any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_over() || self.is_forked()
    }

    /// A script leaves the job that it had joined: the end of its link is no loss.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::SeqCst);
    }

    /// A script has lost the job that it had joined (GST-1). False if that is known, or no loss.
    pub(crate) fn lose(&self) -> bool {
        !(self.leaving.load(Ordering::SeqCst) || self.is_closed() || self.lost.swap(true, Ordering::SeqCst))
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// Refuses a forked copy: what it sends would be taken for the original's.
    pub(crate) fn original(&self) -> Result<(), RuntimeError> {
        if self.forked.load(Ordering::Relaxed) {
            return Err(RuntimeError::Forked { pid: std::process::id(), owner: self.pid });
        }
        Ok(())
    }

    pub(crate) fn usable(&self) -> Result<(), RuntimeError> {
        self.original()?;
        if self.lost.load(Ordering::Relaxed) {
            return Err(RuntimeError::JobLost);
        }
        if self.closed.load(Ordering::Relaxed) {
            return Err(RuntimeError::Closed);
        }
        Ok(())
    }
}
