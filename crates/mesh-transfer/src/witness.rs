//! A page by which the kernel itself tells one process from another.
//!
//! WIT-1: every cross-memory call names the owner's witness page first. The kernel processes the pieces of a call in
//! order and stops at the first that is not mapped. The page lies at a random address, is not inherited by forks, and
//! disappears with the program that made it. A call that meets another process with the owner's pid, or another program
//! in the same process, therefore stops before it has moved a byte.

use crate::error::TransferError;
use crate::handle::RealmId;
use crate::realm::random;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;

const PAGE: usize = 4096;
const TRIES: usize = 64;

/// The page of this process.
#[derive(Debug)]
pub(crate) struct Witness {
    base: *mut c_void,
    len: usize,
    pid: u32,
}

// SAFETY: written once, before anybody else knows of it; other processes only write the same bytes there.
unsafe impl Send for Witness {}
// SAFETY: as above.
unsafe impl Sync for Witness {}

impl Witness {
    pub(crate) fn raise(realm: &RealmId, pid: u32) -> Result<Self, TransferError> {
        let page = rustix::param::page_size().max(PAGE);
        let mut last = rustix::io::Errno::NOMEM;
        for attempt in 0..TRIES {
            let drawn = u64::from_le_bytes(random()?[..8].try_into().unwrap_or_default());
            // 46 bits of address, or 38 where the machine has fewer; never in the lowest part, where programs lie.
            let bits = if attempt < TRIES / 2 { 46 } else { 38 };
            let at = ((drawn & ((1 << bits) - 1)) | (1 << (bits - 3))) as usize & !(page - 1);
            // SAFETY: a fresh mapping that replaces none (FIXED_NOREPLACE).
            let made = unsafe {
                mmap_anonymous(
                    at as *mut c_void,
                    page,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE,
                )
            };
            match made {
                Ok(base) => {
                    let witness = Self { base, len: page, pid };
                    if base as usize != at {
                        // A kernel that does not know the flag takes the address as a hint.
                        last = rustix::io::Errno::EXIST;
                        continue;
                    }
                    // SAFETY: the whole mapping, which nobody else knows.
                    unsafe { madvise(base, page, Advice::LinuxDontFork) }
                        .map_err(TransferError::os("keep a page out of forked copies"))?;
                    // SAFETY: inside the fresh mapping.
                    unsafe { base.cast::<RealmId>().write(*realm) };
                    return Ok(witness);
                }
                Err(errno) => last = errno,
            }
        }
        Err(TransferError::os("map a page at a random address")(last))
    }

    pub(crate) fn addr(&self) -> u64 {
        self.base as u64
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        if crate::realm::pid() == self.pid {
            // SAFETY: mapped by `raise` with this length; not there in a forked copy, whose addresses may be reused.
            let _ = unsafe { munmap(self.base, self.len) };
        }
    }
}
