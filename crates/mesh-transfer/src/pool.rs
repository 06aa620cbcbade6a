//! Memory that is shared from the beginning, so that other processes map it instead of having the kernel copy it.
//!
//! An arena is sealed, so it never shrinks below a mapping. Freed memory goes back to the system at once, even if
//! another process still maps the arena: a process that reads there has no lease, and no right to.
//!
//! ARN-1: nothing is given back when the process ends; the kernel does that when the last mapping is gone. A process
//! that was lent a version of published weights therefore has all of it, although the publisher has ended.

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

/// What an arena has at least. Of it only what is used takes memory.
const ARENA: u64 = 64 << 20;
/// Blocks begin at a multiple of this, so that no two share a line of a cache.
const LINE: u64 = 64;

/// Where in an arena something is, as others find it.
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
    /// The process ends.
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
    /// Where it is free, and how far; no two touch each other.
    free: Mutex<BTreeMap<u64, u64>>,
}

/// Part of an arena, free again when this is dropped.
#[derive(Debug)]
pub struct Block {
    arena: Arc<Arena>,
    pool: Arc<Pool>,
    at: u64,
    room: u64,
    len: u64,
    pid: u32,
}

/// Shared memory of a file that never becomes shorter.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: only addresses; who reads and writes there says why they may.
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

    /// Another process's arena, if that is what lies under this descriptor of it.
    pub(crate) fn attach(owner: u32, pooled: Pooled) -> Result<Self, TransferError> {
        let path = format!("/proc/{owner}/fd/{}", pooled.fd);
        let missing = || TransferError::transport(format!("process {owner} shares no such memory"));
        // Looked at before it is opened: to open a device may have effects.
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

    /// Where `len` bytes at `offset` are, if they are inside.
    pub(crate) fn at(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        (end <= self.len as u64).then(|| self.base.cast::<u8>().wrapping_add(offset as usize))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; who uses it holds this.
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

    /// The first free place that has room at a multiple of `align`.
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

    /// Has a place free again; returns whether all of it is.
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
        // The pages of the block that nothing else is on.
        let from = start.next_multiple_of(self.page).max(at / self.page * self.page);
        let to = (end / self.page * self.page).min((at + room).next_multiple_of(self.page));
        if from < to {
            // A kernel that cannot gives the memory back with the arena.
            let _ = fallocate(&self.fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, to - from);
        }
        free.insert(start, end - start);
        (start, end) == (0, self.map.len as u64)
    }
}

impl Pool {
    /// Memory for so many bytes, whatever is in it.
    pub(crate) fn allocate(self: &Arc<Self>, len: u64) -> Result<Block, TransferError> {
        let page = rustix::param::page_size() as u64;
        // What has pages of its own is given back page by page.
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

    /// Where these bytes are in an arena, if they are in one.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Pooled> {
        self.lock().list.iter().find_map(|arena| {
            let offset = addr.checked_sub(arena.map.base as u64)?;
            arena.map.at(offset, len)?;
            Some(Pooled { fd: arena.fd.as_raw_fd().unsigned_abs(), id: arena.id, offset })
        })
    }

    /// The process ends (ARN-1).
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    /// How many arenas there are.
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

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // A forked copy shares the arena with its parent, to whom it belongs.
        if pid() != self.pid || self.pool.ended.load(Ordering::SeqCst) {
            return;
        }
        let mut arenas = self.pool.lock();
        if self.arena.give(self.at, self.room) && arenas.list.len() > 1 {
            arenas.list.retain(|arena| !Arc::ptr_eq(arena, &self.arena));
        }
    }
}
