//! A mapping of (a piece of) a memory file.

use super::holders::Holders;
use crate::buffer::Buffer;
use crate::error::RuntimeError;
use crate::sync::AtomicU64;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::OwnedFd;

/// The length of a slab's head. A multiple of every page size, since what follows is mapped separately.
pub(super) const HEAD: usize = 64 * 1024;
pub(super) const HOLDERS_AT: usize = 16;
pub(super) const MAX_CHUNKS: usize = 1020;
/// After the counts: nonzero while the owner sends nothing.
pub(super) const QUIET_AT: usize = HOLDERS_AT + 8 * MAX_CHUNKS;

/// A mapping of (a piece of) a memory file.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) base: *mut c_void,
    pub(super) len: usize,
}

// SAFETY: a mapping is plain memory; SHM-1 says who may write which part of it, and when.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(fd: &OwnedFd, offset: u64, len: usize, flags: MapFlags) -> Result<Self, RuntimeError> {
        // SAFETY: a fresh mapping at an address of the kernel's choosing; nothing else refers to it.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, fd, offset)
                .map_err(RuntimeError::os("mmap of shared memory"))?
        };
        Ok(Self { base, len })
    }

    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} is beyond a mapping of {} bytes", self.len);
        // SAFETY: inside the mapping (or one past its end), as just checked.
        unsafe { self.base.cast::<u8>().add(offset) }
    }

    pub(super) fn word(&self, offset: usize) -> u64 {
        let mut bytes = [0_u8; 8];
        // SAFETY: `at` checks the offset; callers read from the head, which is always mapped completely.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset), bytes.as_mut_ptr(), 8) };
        u64::from_ne_bytes(bytes)
    }

    pub(super) fn holders(&self, chunk: usize) -> Holders<'_> {
        assert!(chunk < MAX_CHUNKS, "no slab has a chunk {chunk}");
        // SAFETY: aligned, inside the head, which is always mapped completely, and only ever used as an atomic.
        Holders(unsafe { &*self.at(HOLDERS_AT + 8 * chunk).cast() })
    }

    pub(super) fn quiet(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { &*self.at(QUIET_AT).cast() }
    }

    /// Gives pages back to the system. Later readers see zeros.
    pub(super) fn free_pages(&self, offset: usize, len: usize) {
        // SAFETY: the range is inside the mapping, after the head, and nobody reads or writes there (SHM-4). If the
        // system refuses, the pages stay.
        let _ = unsafe { madvise(self.at(offset).cast(), len, Advice::LinuxRemove) };
    }

    /// Copies a buffer to `offset`, on up to `spare` cores beside this one.
    ///
    /// # Safety
    /// Nobody else reads or writes there meanwhile, and the bytes are not in it.
    pub(super) unsafe fn write(&self, offset: usize, buffer: Buffer<'_>, spare: usize) {
        assert!(
            offset.checked_add(buffer.len()).is_some_and(|end| end <= self.len),
            "a buffer is as long as its place"
        );
        // SAFETY: inside the mapping, as just checked; otherwise as the caller vouches.
        buffer.pieces().for_each(|(at, piece)| unsafe { crate::copy::copy(piece, self.at(offset + at), spare) });
    }

    /// Asks for all pages at once, to avoid a fault for each.
    pub(super) fn populate(&self, offset: usize, len: usize) {
        let start = offset / HEAD * HEAD;
        // SAFETY: the range is inside the mapping; populating changes no contents. Kernels that lack this do no harm.
        let _ = unsafe { madvise(self.at(start).cast(), len + offset - start, Advice::LinuxPopulateWrite) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; users of the memory hold the mapping.
        let _ = unsafe { munmap(self.base, self.len) };
    }
}
