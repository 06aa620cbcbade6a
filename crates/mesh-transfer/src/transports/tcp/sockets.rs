//! The sockets of this process, which its forks must not keep open.
//!
//! TCP-5: a fork keeps no socket of its parent open, so that peers notice when the parent ends. The descriptors'
//! numbers stay taken, since their owners still exist in the fork's memory.

use crate::lock;
use rustix::fs::{Mode, OFlags, open};
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// All sockets.
#[derive(Clone, Debug, Default)]
pub(super) struct Sockets(Arc<Mutex<Vec<Weak<Entry>>>>);

#[derive(Debug)]
struct Entry(Vec<AtomicI32>);

/// Sockets in the list until this is dropped, which must be before they are closed.
#[derive(Debug)]
pub(super) struct Listed(Arc<Entry>);

impl Drop for Listed {
    fn drop(&mut self) {
        // A fork made from now on inherits them open, but nobody uses them there.
        self.0.0.iter().for_each(|fd| fd.store(-1, Ordering::SeqCst));
    }
}

impl Sockets {
    pub(super) fn list(&self, fds: impl IntoIterator<Item = RawFd>) -> Listed {
        let entry = Arc::new(Entry(fds.into_iter().map(AtomicI32::new).collect()));
        let mut all = lock(&self.0);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&entry));
        Listed(entry)
    }

    /// In a forked copy, replaces the sockets with nothing.
    pub(super) fn let_go(&self) {
        // If the lock was held by a thread that the copy lacks, the copy keeps them.
        let Ok(all) = self.0.try_lock() else { return };
        let Ok(nothing) = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else { return };
        for entry in all.iter().filter_map(Weak::upgrade) {
            for fd in entry.0.iter().map(|fd| fd.load(Ordering::SeqCst)).filter(|fd| *fd >= 0) {
                // SAFETY: the number of a socket of the engine; the threads that own it do not exist in the copy.
                unsafe { libc::dup3(nothing.as_raw_fd(), fd, libc::O_CLOEXEC) };
            }
        }
    }
}
