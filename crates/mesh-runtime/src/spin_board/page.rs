//! The page as it lies in shared memory. In the models `models/page.rs` takes the place of this file.

use crate::error::RuntimeError;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32};

const LEN: usize = 64 * 1024;
const FLAGS_AT: usize = 64;
/// How many processes can show themselves; the rest simply never look twice.
pub(crate) const SEATS: u32 = (LEN - FLAGS_AT) as u32;

#[derive(Debug)]
pub(crate) struct Page {
    base: *mut c_void,
    fd: OwnedFd,
}

// SAFETY: the page is only reached through atomics, and stays mapped until this is dropped.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    pub(crate) fn create() -> Result<Self, RuntimeError> {
        let fd = memfd_create("mesh-board", MemfdFlags::CLOEXEC).map_err(RuntimeError::no_memfd)?;
        ftruncate(&fd, LEN as u64).map_err(RuntimeError::os("ftruncate"))?;
        Self::open(fd)
    }

    pub(crate) fn open(fd: OwnedFd) -> Result<Self, RuntimeError> {
        // SAFETY: a fresh shared mapping at an address of the kernel's choosing; nothing else refers to it.
        let base = unsafe {
            mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)
                .map_err(RuntimeError::os("mmap of the host's board"))?
        };
        Ok(Self { base, fd })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn counter(&self, index: usize) -> &AtomicU32 {
        assert!(index < 2, "the page has two counters");
        // SAFETY: the page begins with two u32 that are only used atomically; mappings are page-aligned.
        unsafe { &*self.base.cast::<AtomicU32>().add(index) }
    }

    /// Processes that run.
    pub(crate) fn active(&self) -> &AtomicU32 {
        self.counter(0)
    }

    /// Those of them that only look whether there is something to do.
    pub(crate) fn looking(&self) -> &AtomicU32 {
        self.counter(1)
    }

    pub(crate) fn flag(&self, seat: u32) -> Option<&AtomicU8> {
        // SAFETY: inside the mapping, since the seat is below SEATS.
        (seat < SEATS).then(|| unsafe { &*self.base.cast::<AtomicU8>().add(FLAGS_AT + seat as usize) })
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length; no reference outlives `self`.
        let _ = unsafe { munmap(self.base, LEN) };
    }
}
