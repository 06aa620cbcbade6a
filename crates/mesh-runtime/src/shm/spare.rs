//! Mappings of kept values whose readers are done, for the next reader.
//!
//! Mapping a large value afresh costs its reader more than copying it: a fault for every few pages, and as much again
//! to unmap it. (Populating all pages at once, huge pages and several threads make little or no difference.) A used
//! mapping has its pages in place. Those that a reader has written are private (SHM-2) and are dropped first; from
//! Linux 6.7 on, the system says which they are. On older systems mappings are not reused.

use super::mapping::Mapping;
use rustix::fs::{Mode, OFlags, open};
use rustix::mm::{Advice, madvise};
use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Shorter values are as cheap to map afresh.
const WORTH: usize = 1 << 20;
/// The most written places that are undone; beyond that a new mapping is cheaper.
const PLACES: usize = 64;

/// The spare mappings of one slab, by their offset in it.
#[derive(Debug, Default)]
pub(super) struct Spares(Mutex<HashMap<u64, Mapping>>);

impl Spares {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Mapping>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A mapping at `offset` that is long enough.
    pub(super) fn take(&self, offset: u64, len: usize) -> Option<Mapping> {
        self.lock().remove(&offset).filter(|map| map.len >= len)
    }

    /// Takes back a mapping at `offset` whose reader is done.
    pub(super) fn give(&self, offset: u64, map: Mapping) {
        // One is enough, unless many look at a value at once.
        let known = self.lock().get(&offset).is_some_and(|other| other.len >= map.len);
        if map.len >= WORTH && !known && forget_writes(&map) {
            // The mapping that it replaces is unmapped outside the lock.
            let _other = self.lock().insert(offset, map);
        }
    }
}

/// `struct page_region`: pages of the same kind.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Pages {
    start: u64,
    end: u64,
    kinds: u64,
}

/// `struct pm_scan_arg`, see the kernel's description of pagemap.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    found: u64,
    room: u64,
    max_pages: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
/// `PAGEMAP_SCAN`. On the few architectures with another number, this one is refused.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;

/// Drops the private pages of a mapping, so that it shows its file's contents. False if that cannot be done.
fn forget_writes(map: &Mapping) -> bool {
    // Opened each time: after a fork it is a different file.
    let Ok(pagemap) = open("/proc/self/pagemap", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else { return false };
    let mut found = [Pages::default(); PLACES];
    let start = map.base as u64;
    let mut scan = Scan {
        size: size_of::<Scan>() as u64,
        start,
        end: start + (map.len as u64).next_multiple_of(rustix::param::page_size() as u64),
        found: found.as_mut_ptr() as u64,
        room: PLACES as u64,
        // Present, and not of the file.
        inverted: FILE,
        all_of: FILE,
        any_of: PRESENT | SWAPPED,
        returned: PRESENT,
        ..Scan::default()
    };
    // SAFETY: the request and `found` have the stated lengths and outlive the call, which changes no page.
    let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
    let Some(written) = usize::try_from(count).ok().filter(|count| *count < PLACES) else { return false };
    found[..written].iter().all(|pages| {
        // SAFETY: inside the mapping, as the scan was, and nobody reads it any more.
        unsafe { madvise(pages.start as *mut _, (pages.end - pages.start) as usize, Advice::LinuxDontNeed) }.is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::MapFlags;

    const LEN: usize = 4 * WORTH;

    fn byte(map: &Mapping, at: usize) -> *mut u8 {
        map.at(at)
    }

    #[test]
    fn a_mapping_that_is_used_again_shows_nothing_of_its_last_reader() {
        let fd = memfd_create("spare", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, LEN as u64).unwrap();
        let owner = Mapping::new(&fd, 0, LEN, MapFlags::SHARED).unwrap();
        let reader = Mapping::new(&fd, 0, LEN, MapFlags::PRIVATE).unwrap();
        let places = [0, 4096, LEN / 2 + 17, LEN - 1];
        // SAFETY: inside both mappings, which only this thread has.
        unsafe {
            places.iter().for_each(|at| byte(&owner, *at).write(1));
            places.iter().for_each(|at| byte(&reader, *at).write(2));
        }
        let (base, spares) = (reader.base, Spares::default());
        spares.give(0, reader);
        let Some(again) = spares.take(0, LEN - 100) else { return assert!(!told(), "it is kept") };
        assert_eq!(again.base, base);
        // SAFETY: as above.
        unsafe {
            assert!(places.iter().all(|at| byte(&again, *at).read() == 1));
            // It shows what its owner writes there next.
            places.iter().for_each(|at| byte(&owner, *at).write(3));
            assert!(places.iter().all(|at| byte(&again, *at).read() == 3));
        }
        assert!(spares.take(0, 1).is_none(), "each goes to one reader");
        spares.give(0, again);
        assert!(spares.take(0, LEN + 1).is_none(), "too short");
    }

    #[test]
    fn a_mapping_with_many_written_places_is_not_kept() {
        let fd = memfd_create("spare", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, LEN as u64).unwrap();
        let reader = Mapping::new(&fd, 0, LEN, MapFlags::PRIVATE).unwrap();
        // SAFETY: inside the mapping, which only this thread has.
        unsafe { (0..2 * PLACES).for_each(|i| byte(&reader, 2 * i * rustix::param::page_size()).write(2)) };
        let spares = Spares::default();
        spares.give(0, reader);
        assert!(spares.take(0, 1).is_none());
    }

    /// Whether this system reports which pages were written.
    fn told() -> bool {
        let fd = memfd_create("spare", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, LEN as u64).unwrap();
        forget_writes(&Mapping::new(&fd, 0, LEN, MapFlags::PRIVATE).unwrap())
    }
}
