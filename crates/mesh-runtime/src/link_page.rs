//! A page of memory that the two ends of a link share: how far each of them is.

use crate::error::RuntimeError;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

const LEN: usize = 4096;
/// Counters that different processes write are not on one line of a cache.
const APART: usize = 64;
/// Without these, the other end could take the memory away.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Which end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    First,
    Second,
}

impl End {
    fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

/// The page, at one end. All counts are numbers of frames, and begin anew after the last number.
#[derive(Debug)]
pub(crate) struct LinkPage {
    base: *mut c_void,
    end: End,
}

// SAFETY: the page is only reached through atomics, and stays mapped until this is dropped.
unsafe impl Send for LinkPage {}
// SAFETY: as above.
unsafe impl Sync for LinkPage {}

impl LinkPage {
    /// The memory of a fresh page.
    pub(crate) fn create() -> Result<OwnedFd, RuntimeError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("mesh-link", flags).map_err(RuntimeError::no_memfd)?;
        ftruncate(&fd, LEN as u64).map_err(RuntimeError::os("ftruncate"))?;
        fcntl_add_seals(&fd, SEALS).map_err(RuntimeError::os("F_ADD_SEALS"))?;
        Ok(fd)
    }

    /// The page as it is seen from one end.
    pub(crate) fn open(fd: impl AsFd, end: End) -> Result<Self, RuntimeError> {
        let os = RuntimeError::os;
        let seals = fcntl_get_seals(&fd).map_err(os("F_GET_SEALS"))?;
        let length = rustix::fs::fstat(&fd).map_err(os("fstat"))?.st_size;
        if !seals.contains(SEALS) || usize::try_from(length).unwrap_or(0) < LEN {
            return Err(os("mmap of what is no page of a link")(rustix::io::Errno::INVAL));
        }
        // SAFETY: a fresh shared mapping at an address of the kernel's choosing; nothing else refers to it.
        let base = unsafe {
            mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)
                .map_err(os("mmap of a link's page"))?
        };
        Ok(Self { base, end })
    }

    fn counter(&self, number: usize, end: End) -> &AtomicU32 {
        let at = APART * (2 * number + usize::from(end == End::Second));
        // SAFETY: inside the mapping and aligned, since there are two counters for each end; they are only used atomically.
        unsafe { &*self.base.byte_add(at).cast::<AtomicU32>() }
    }

    /// This end has accepted so many frames for the other.
    pub(crate) fn accept(&self, count: u32) {
        self.counter(0, self.end).store(count, Ordering::SeqCst);
    }

    /// How many frames the other end has accepted for this one.
    pub(crate) fn accepted_there(&self) -> u32 {
        self.counter(0, self.end.other()).load(Ordering::SeqCst)
    }

    /// This end has handed on so many frames of the other.
    pub(crate) fn hand_on(&self, count: u32) {
        self.counter(1, self.end).store(count, Ordering::SeqCst);
    }

    /// Whether the other end has handed on all that this one has accepted.
    pub(crate) fn is_handed_on(&self) -> bool {
        self.counter(1, self.end.other()).load(Ordering::SeqCst) == self.counter(0, self.end).load(Ordering::SeqCst)
    }
}

impl Drop for LinkPage {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length; no reference outlives `self`.
        let _ = unsafe { munmap(self.base, LEN) };
    }
}
