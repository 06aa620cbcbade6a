//! Memory that is shared from the start, so that other processes map it instead of having the kernel copy it.
//!
//! An arena is sealed, so it never shrinks below a mapping. Freed memory returns to the system at once, even while
//! another process maps the arena: without a lease, that process has no right to read there.
//!
//! ARN-1: nothing is returned when the process ends; the kernel frees it with the last mapping. So a process that was
//! lent a version of published weights keeps all of it after the publisher has ended.

use crate::error::TransferError;
use crate::lock;
use crate::realm::pid;
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create, open,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The least size of an arena. Only the parts in use take memory.
const ARENA: u64 = 64 << 20;
/// Blocks begin at a multiple of this, so that no two share a cache line.
const LINE: u64 = 64;

/// A place in an arena, as others find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooled {
    /// The owner's descriptor of the arena.
    pub fd: u32,
    /// Tells the arena from others that had the same descriptor.
    pub id: u32,
    /// The first byte.
    pub offset: u64,
}

/// The arenas of a process.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    arenas: Mutex<Arenas>,
    /// Whether the process is ending.
    ended: AtomicBool,
}

#[derive(Debug, Default)]
struct Arenas {
    list: Vec<Arc<Arena>>,
    made: u32,
}

#[derive(Debug)]
struct Arena {
    map: Mapping,
    fd: OwnedFd,
    id: u32,
    page: u64,
    /// Start and length of each free range; no two touch.
    free: Mutex<BTreeMap<u64, u64>>,
}

/// Part of an arena, freed when dropped.
#[derive(Debug)]
pub struct Block {
    arena: Arc<Arena>,
    pool: Arc<Pool>,
    at: u64,
    room: u64,
    len: u64,
    pid: u32,
}

/// Shared memory of a file that never shrinks.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: only addresses; those who read and write there say why they may.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: impl AsFd, len: u64) -> Result<Self, TransferError> {
        let len = usize::try_from(len).map_err(|_| TransferError::invalid("more than the address space holds"))?;
        // SAFETY: a fresh shared mapping at an address of the kernel's choosing; nothing else refers to it.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
                .map_err(TransferError::os("map shared memory"))?
        };
        Ok(Self { base, len })
    }

    /// Maps another process's arena, if this descriptor of that process is one.
    pub(crate) fn attach(owner: u32, pooled: Pooled) -> Result<Self, TransferError> {
        let path = format!("/proc/{owner}/fd/{}", pooled.fd);
        let missing = || TransferError::transport(format!("process {owner} shares no such memory"));
        // Check before opening: opening a device may have effects.
        let name = std::fs::read_link(&path).map_err(|_| missing())?;
        if name.as_os_str().to_string_lossy() != format!("/memfd:{} (deleted)", name_of(pooled.id)) {
            return Err(missing());
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let fd =
            open(&path, flags, Mode::empty()).map_err(TransferError::os("open the memory that its owner shares"))?;
        if !fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(missing());
        }
        let size = fstat(&fd).map_err(TransferError::os("look at shared memory"))?.st_size;
        Self::new(&fd, u64::try_from(size).map_err(|_| missing())?)
    }

    /// Returns the address of `len` bytes at `offset`, if they are inside.
    pub(crate) fn at(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= self.len as u64).then(|| self.base.cast::<u8>().wrapping_add(offset as usize))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; its users hold this.
        let _ = unsafe { munmap(self.base, self.len) };
    }
}

fn name_of(id: u32) -> String {
    format!("mesh-pool-{id}")
}

impl Arena {
    fn new(id: u32, room: u64, page: u64) -> Result<Self, TransferError> {
        let len = room.max(ARENA).checked_next_multiple_of(page).filter(|len| i64::try_from(*len).is_ok());
        let len =
            len.ok_or_else(|| TransferError::invalid(format!("{room} bytes are more than a process can have")))?;
        let fd = memfd_create(name_of(id), MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(TransferError::os("make shared memory"))?;
        ftruncate(&fd, len).map_err(TransferError::os("size shared memory"))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(TransferError::os("seal shared memory"))?;
        let map = Mapping::new(&fd, len)?;
        Ok(Self { map, fd, id, page, free: Mutex::new(BTreeMap::from([(0, len)])) })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        lock(&self.free)
    }

    /// Takes the first free range that has room at a multiple of `align`.
    fn take(&self, room: u64, align: u64) -> Option<u64> {
        let mut free = self.lock();
        let (start, len, at) = free.iter().find_map(|(&start, &len)| {
            let at = start.next_multiple_of(align);
            (at + room <= start + len).then_some((start, len, at))
        })?;
        free.remove(&start);
        if at > start {
            free.insert(start, at - start);
        }
        if at + room < start + len {
            free.insert(at + room, start + len - at - room);
        }
        Some(at)
    }

    /// Frees a range; returns whether the whole arena is free.
    fn give(&self, at: u64, room: u64) -> bool {
        let mut free = self.lock();
        let (mut start, mut end) = (at, at + room);
        if let Some((&before, &len)) = free.range(..at).next_back()
            && before + len == at
        {
            start = before;
        }
        if let Some(len) = free.remove(&end) {
            end += len;
        }
        // The block's pages that nothing else is on.
        let from = start.next_multiple_of(self.page).max(at / self.page * self.page);
        let to = (end / self.page * self.page).min((at + room).next_multiple_of(self.page));
        if from < to {
            // A kernel that cannot do this returns the memory with the arena.
            let _ = fallocate(&self.fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, to - from);
        }
        free.insert(start, end - start);
        (start, end) == (0, self.map.len as u64)
    }
}

impl Pool {
    /// Allocates `len` uninitialized bytes.
    pub(crate) fn allocate(self: &Arc<Self>, len: u64) -> Result<Block, TransferError> {
        let page = rustix::param::page_size() as u64;
        // Blocks with whole pages are returned page by page.
        let align = if len < page { LINE } else { page };
        let too_long = || TransferError::invalid(format!("{len} bytes are more than a process can have"));
        let room = len.max(1).checked_next_multiple_of(align).ok_or_else(too_long)?;
        let mut arenas = self.lock();
        let found = arenas.list.iter().find_map(|arena| Some((Arc::clone(arena), arena.take(room, align)?)));
        let (arena, at) = match found {
            Some(found) => found,
            None => {
                arenas.made = arenas.made.wrapping_add(1);
                let arena = Arc::new(Arena::new(arenas.made, room, page)?);
                let at = arena.take(room, align).ok_or_else(too_long)?;
                arenas.list.push(Arc::clone(&arena));
                (arena, at)
            }
        };
        Ok(Block { arena, pool: Arc::clone(self), at, room, len, pid: pid() })
    }

    /// Finds the arena that contains these bytes, if any.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Pooled> {
        self.lock().list.iter().find_map(|arena| {
            let offset = addr.checked_sub(arena.map.base as u64)?;
            arena.map.at(offset, len)?;
            Some(Pooled { fd: arena.fd.as_raw_fd().unsigned_abs(), id: arena.id, offset })
        })
    }

    /// Notes that the process ends (ARN-1).
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    /// The number of arenas.
    pub(crate) fn arenas(&self) -> usize {
        self.lock().list.len()
    }

    fn lock(&self) -> MutexGuard<'_, Arenas> {
        lock(&self.arenas)
    }
}

impl Block {
    /// Its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.arena.map.base.cast::<u8>().wrapping_add(self.at as usize)
    }

    /// Its length.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // A forked copy shares the arena with its parent, who owns it.
        if pid() != self.pid || self.pool.ended.load(Ordering::SeqCst) {
            return;
        }
        let mut arenas = self.pool.lock();
        if self.arena.give(self.at, self.room) && arenas.list.len() > 1 {
            arenas.list.retain(|arena| !Arc::ptr_eq(arena, &self.arena));
        }
    }
}
