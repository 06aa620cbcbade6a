//! Large parts in memory that both ends map: one copy in, none out.
//!
//! A process owns slabs (anonymous memory files), each cut into chunks of one size. The first page of a slab says whose
//! it is and counts, for every chunk, the receivers that still hold it; a receiver that lets go counts down, and the
//! owner uses a chunk again when nobody holds it. So giving memory back costs no message. A receiver opens the slab
//! through the owner's entry in /proc, which the kernel allows among processes of one user, and keeps it mapped.
//!
//! SHM-1: a chunk that anybody holds is never written by its owner.
//! SHM-2: where a part goes to many, each maps it privately, so that none sees what another writes into it.

use crate::error::RuntimeError;
use mesh_proto::{Frame, Part, SharedRef};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, ftruncate, memfd_create, open};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const PAGE: usize = 4096;
const MAGIC: u64 = 0x6d65_7368_736c_6162;
const HOLDERS_AT: usize = 16;
const MAX_CHUNKS: usize = (PAGE - HOLDERS_AT) / 4;
const MIN_CHUNK: usize = 64 * 1024;
/// Slabs of small chunks are this long; a larger chunk has a slab to itself.
const SLAB: usize = 8 * 1024 * 1024;
/// Idle slabs beyond this are given back to the system.
const KEEP: usize = 512 * 1024 * 1024;

/// A mapping of (a piece of) a memory file.
#[derive(Debug)]
struct Mapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: a mapping is plain memory; who may write which part of it, and when, is SHM-1.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: &OwnedFd, offset: u64, len: usize, flags: MapFlags) -> Result<Self, RuntimeError> {
        // SAFETY: a fresh mapping at an address of the kernel's choosing; nothing else refers to it.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, fd, offset)
                .map_err(RuntimeError::os("mmap of shared memory"))?
        };
        Ok(Self { base, len })
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} is beyond a mapping of {} bytes", self.len);
        // SAFETY: inside the mapping (or one past its end), as just checked.
        unsafe { self.base.cast::<u8>().add(offset) }
    }

    fn word(&self, offset: usize) -> u64 {
        let mut bytes = [0_u8; 8];
        // SAFETY: `at` checks the offset; callers read from the first page, which is always mapped whole.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset), bytes.as_mut_ptr(), 8) };
        u64::from_ne_bytes(bytes)
    }

    fn holders(&self, chunk: usize) -> &AtomicU32 {
        assert!(chunk < MAX_CHUNKS, "no slab has a chunk {chunk}");
        // SAFETY: aligned, inside the first page, and only ever used as an atomic.
        unsafe { &*self.at(HOLDERS_AT + 4 * chunk).cast::<AtomicU32>() }
    }

    /// Asks for the pages at once instead of one fault each.
    fn populate(&self, offset: usize, len: usize) {
        let start = offset / PAGE * PAGE;
        // SAFETY: the range is inside the mapping; populating changes no contents. Kernels that cannot are no worse.
        let _ = unsafe { madvise(self.at(start).cast(), len + offset - start, Advice::LinuxPopulateWrite) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; whoever uses the memory holds the mapping.
        let _ = unsafe { munmap(self.base, self.len) };
    }
}

#[derive(Debug)]
struct Slab {
    id: u64,
    fd: OwnedFd,
    map: Mapping,
    chunk: usize,
    count: usize,
    cursor: usize,
    touched: Vec<bool>,
    /// Where each chunk was sent, so that it is not lost with a receiver that dies holding it.
    sent_to: Vec<u32>,
}

impl Slab {
    fn create(id: u64, chunk: usize) -> Result<Self, RuntimeError> {
        let count = (SLAB / chunk).clamp(1, MAX_CHUNKS);
        let len = PAGE + chunk * count;
        let fd = memfd_create("mesh-slab", MemfdFlags::CLOEXEC).map_err(RuntimeError::os("memfd_create"))?;
        ftruncate(&fd, len as u64).map_err(RuntimeError::os("ftruncate"))?;
        let map = Mapping::new(&fd, 0, len, MapFlags::SHARED)?;
        // SAFETY: the first page is mapped, ours alone so far, and both words are aligned.
        unsafe {
            map.at(0).cast::<u64>().write(MAGIC);
            map.at(8).cast::<u64>().write(id);
        }
        Ok(Self { id, fd, map, chunk, count, cursor: 0, touched: vec![false; count], sent_to: vec![0; count] })
    }

    fn free_chunk(&mut self) -> Option<usize> {
        for step in 0..self.count {
            let i = (self.cursor + step) % self.count;
            if self.map.holders(i).load(Ordering::Acquire) == 0 {
                self.cursor = i + 1;
                return Some(i);
            }
        }
        None
    }

    fn idle(&self) -> bool {
        (0..self.count).all(|i| self.map.holders(i).load(Ordering::Acquire) == 0)
    }

    fn bytes(&self) -> usize {
        self.chunk * self.count
    }
}

/// The slabs that this process owns.
#[derive(Debug)]
struct Pool {
    pid: u32,
    budget: usize,
    slabs: Mutex<HashMap<usize, Vec<Slab>>>,
    next: AtomicU64,
}

impl Pool {
    pub(crate) fn new(budget: usize) -> Self {
        Self { pid: std::process::id(), budget, slabs: Mutex::default(), next: AtomicU64::new(1) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Vec<Slab>>> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies `data` into a chunk that `holders` receivers are going to let go of. None if the budget is used up or the
    /// system gives no memory: the part then travels inside its frame.
    pub(crate) fn put(&self, data: &[u8], holders: u32) -> Option<SharedRef> {
        let chunk = data.len().checked_next_power_of_two()?.max(MIN_CHUNK);
        let (at, place, fresh) = {
            let mut slabs = self.lock();
            let total: usize = slabs.values().flatten().map(Slab::bytes).sum();
            let class = slabs.entry(chunk).or_default();
            let found = class.iter_mut().find_map(|slab| slab.free_chunk().map(|i| (slab.id, i)));
            let (id, i) = match found {
                Some(found) => found,
                None => {
                    if total + chunk > self.budget {
                        return None;
                    }
                    let mut slab = Slab::create(self.next.fetch_add(1, Ordering::Relaxed), chunk).ok()?;
                    let i = slab.free_chunk()?;
                    let id = slab.id;
                    class.push(slab);
                    (id, i)
                }
            };
            let slab = class.iter_mut().find(|slab| slab.id == id)?;
            // Taken from here on (SHM-1); the copy itself happens without the lock.
            slab.map.holders(i).store(holders, Ordering::Release);
            slab.sent_to[i] = holders;
            let fresh = !std::mem::replace(&mut slab.touched[i], true);
            let offset = PAGE + i * chunk;
            let at = SharedRef {
                pid: self.pid,
                fd: u32::try_from(slab.fd.as_raw_fd()).ok()?,
                slab: id,
                offset: offset as u64,
                chunk: u32::try_from(i).ok()?,
            };
            if fresh {
                slab.map.populate(offset, data.len());
            }
            (at, slab.map.at(offset), fresh)
        };
        let _ = fresh;
        // SAFETY: the chunk is ours until its holders have counted down, which they do only once they were sent it; it
        // is as long as the data; slabs with a held chunk are never unmapped.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), place, data.len()) };
        Some(at)
    }

    /// A receiver of this chunk will never hold it: the message could not reach it.
    pub(crate) fn release(&self, at: &SharedRef) {
        if at.pid != self.pid {
            return;
        }
        let slabs = self.lock();
        if let Some(slab) = slabs.values().flatten().find(|slab| slab.id == at.slab)
            && (at.chunk as usize) < slab.count
        {
            count_down(slab.map.holders(at.chunk as usize));
        }
    }

    /// Gives idle slabs back beyond what is worth keeping.
    pub(crate) fn trim(&self) {
        let mut slabs = self.lock();
        let mut idle: usize = slabs.values().flatten().filter(|s| s.idle()).map(Slab::bytes).sum();
        for class in slabs.values_mut() {
            class.retain(|slab| {
                if idle <= KEEP || !slab.idle() {
                    return true;
                }
                idle -= slab.bytes();
                // Receivers may keep their mapping a while; the pages go now.
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(&slab.fd, flags, PAGE as u64, slab.bytes() as u64);
                false
            });
        }
    }

    /// Bytes in slabs.
    pub(crate) fn bytes(&self) -> usize {
        self.lock().values().flatten().map(Slab::bytes).sum()
    }
}

fn count_down(holders: &AtomicU32) {
    // Never below zero, whatever the other side did.
    let _ = holders.fetch_update(Ordering::Release, Ordering::Relaxed, |n| n.checked_sub(1));
}

#[derive(Debug)]
struct Seen {
    map: Arc<Mapping>,
    fd: OwnedFd,
    used: u64,
}

/// The slabs of other processes that this process has mapped.
#[derive(Debug, Default)]
struct Mapped {
    seen: Mutex<HashMap<(u32, u64), Seen>>,
    clock: AtomicU64,
}

impl Mapped {
    /// The part at `at`. `sole` says that nobody else was sent it.
    pub(crate) fn get(&self, at: &SharedRef, len: u64, sole: bool) -> Result<SharedPart, RuntimeError> {
        let gone =
            || RuntimeError::Os { what: "map a part that another process shares", errno: rustix::io::Errno::NXIO };
        let len = usize::try_from(len).map_err(|_| gone())?;
        let offset = usize::try_from(at.offset).map_err(|_| gone())?;
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (at.pid, at.slab);
        let fresh = !seen.contains_key(&key);
        if fresh {
            self.shrink(&mut seen);
            let path = format!("/proc/{}/fd/{}", at.pid, at.fd);
            let fd = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                .map_err(RuntimeError::os("open another process's shared memory"))?;
            let size = rustix::fs::fstat(&fd).map_err(RuntimeError::os("fstat"))?.st_size;
            let size = usize::try_from(size).map_err(|_| gone())?;
            if size < PAGE {
                return Err(gone());
            }
            let map = Mapping::new(&fd, 0, size, MapFlags::SHARED)?;
            if map.word(0) != MAGIC || map.word(8) != at.slab {
                return Err(gone());
            }
            seen.insert(key, Seen { map: Arc::new(map), fd, used: now });
        }
        let entry = seen.get_mut(&key).ok_or_else(gone)?;
        entry.used = now;
        let end = offset.checked_add(len).ok_or_else(gone)?;
        if offset < PAGE || end > entry.map.len || at.chunk as usize >= MAX_CHUNKS {
            return Err(gone());
        }
        let counted = Arc::clone(&entry.map);
        if sole || len == 0 {
            if fresh {
                counted.populate(offset, len);
            }
            return Ok(SharedPart { data: counted.at(offset), len, chunk: at.chunk as usize, counted, _private: None });
        }
        let private = Mapping::new(&entry.fd, at.offset, len, MapFlags::PRIVATE)?;
        Ok(SharedPart { data: private.at(0), len, chunk: at.chunk as usize, counted, _private: Some(private) })
    }

    /// Forgets mappings that nobody uses, the longest unused first, once there are many.
    fn shrink(&self, seen: &mut HashMap<(u32, u64), Seen>) {
        let mut total: usize = seen.values().map(|s| s.map.len).sum();
        while seen.len() >= 64 || total > KEEP {
            let idle = seen.iter().filter(|(_, s)| Arc::strong_count(&s.map) == 1).min_by_key(|(_, s)| s.used);
            let Some((&key, _)) = idle else { return };
            total -= seen.remove(&key).map_or(0, |s| s.map.len);
        }
    }

    /// Forgets what a process shared that has ended.
    pub(crate) fn forget(&self, pid: u32) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|(owner, _), _| *owner != pid);
    }
}

/// A large part as its receiver has it: writable memory that stays as long as anything refers to it.
#[derive(Debug)]
pub struct SharedPart {
    data: *mut u8,
    len: usize,
    chunk: usize,
    counted: Arc<Mapping>,
    _private: Option<Mapping>,
}

// SAFETY: plain memory that this value alone hands out, kept mapped by the fields beside the pointer.
unsafe impl Send for SharedPart {}
// SAFETY: as above; whoever reads and writes through the pointer synchronises as with any buffer.
unsafe impl Sync for SharedPart {}

impl SharedPart {
    /// Where it begins.
    pub fn as_ptr(&self) -> *mut u8 {
        self.data
    }

    /// How long it is.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for SharedPart {
    fn drop(&mut self) {
        count_down(self.counted.holders(self.chunk));
    }
}

/// A part as it reaches its reader.
#[derive(Debug)]
pub enum PartData {
    /// It came inside its frame.
    Inline(bytes::Bytes),
    /// It is mapped.
    Shared(SharedPart),
}

/// Both sides of shared memory in one process: what it owns and what it has mapped.
#[derive(Debug)]
pub(crate) struct Memory {
    pool: Option<Pool>,
    mapped: Mapped,
}

impl Memory {
    pub(crate) fn new(budget: usize) -> Self {
        Self { pool: available().then(|| Pool::new(budget)), mapped: Mapped::default() }
    }

    /// See [`Pool::put`].
    pub(crate) fn put(&self, data: &[u8], holders: u32) -> Option<SharedRef> {
        self.pool.as_ref()?.put(data, holders)
    }

    /// See [`Mapped::get`].
    pub(crate) fn open(&self, at: &SharedRef, len: u64, sole: bool) -> Result<SharedPart, RuntimeError> {
        self.mapped.get(at, len, sole)
    }

    /// A frame will never be opened: its memory goes back.
    pub(crate) fn let_go(&self, frame: &Frame) {
        for part in frame.parts().unwrap_or_default() {
            if let Part::Shared { at, len } = part {
                match &self.pool {
                    Some(pool) if pool.pid == at.pid => pool.release(&at),
                    // Mapping it and letting go of it at once counts it down.
                    _ => drop(self.mapped.get(&at, len, true)),
                }
            }
        }
    }

    pub(crate) fn trim(&self) {
        if let Some(pool) = &self.pool {
            pool.trim();
        }
    }

    /// Forgets what a process shared that has ended.
    pub(crate) fn forget(&self, pid: u32) {
        self.mapped.forget(pid);
    }

    /// Bytes in slabs of this process.
    pub(crate) fn bytes(&self) -> usize {
        self.pool.as_ref().map_or(0, Pool::bytes)
    }
}

/// Whether two processes of this user can share memory here: one opens the other's descriptor through /proc.
fn available() -> bool {
    let Ok(fd) = memfd_create("mesh-probe", MemfdFlags::CLOEXEC) else { return false };
    let path = format!("/proc/{}/fd/{}", std::process::id(), fd.as_fd().as_raw_fd());
    open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).is_ok()
}
