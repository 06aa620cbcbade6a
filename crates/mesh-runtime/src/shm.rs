//! Large parts in memory that both ends map: one copy in, none out.
//!
//! A process owns slabs (anonymous memory files), each cut into chunks of one size. The head of a slab names its owner
//! and counts, for every chunk, the receivers that still hold it. A receiver that lets go counts down, and the owner
//! reuses a chunk once nobody holds it, so giving memory back costs no message. A receiver opens the slab through the
//! owner's entry in /proc, which the kernel allows among processes of one user, and keeps it mapped. A chunk whose
//! receivers have all died is free at once. The count belongs to one use of the chunk, so a late count-down of an
//! earlier use touches nothing.
//!
//! Used memory is kept for the next messages, because fresh pages are expensive. An owner that has sent nothing for a
//! while still gives it back. Memory that is then still held is given back by its last holder, so the owner need not
//! wake up to look: such slabs are marked as quiet. Receivers forget their mappings at the same time.
//!
//! SHM-1: a chunk that any living process holds is never written by its owner.
//! SHM-2: a part sent to many is mapped privately by each, so that none sees what another writes into it.
//! SHM-3: a message gives its memory back when the last of it is dropped, read or not; a forked copy of a process gives
//! back nothing.
//! SHM-4: the pages of a chunk are given back by its sole holder or, if nobody holds it, by its owner.

mod holders;
mod kept;
mod mapping;
mod room;
mod spare;

#[cfg(all(test, loom))]
pub(crate) use holders::Holders;
pub(crate) use kept::View;
pub(crate) use room::{Place, Room};

use crate::buffer::Buffer;
use crate::error::RuntimeError;
use crate::refs::RefCounter;
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use mapping::{HEAD, MAX_CHUNKS, Mapping};
use mesh_proto::{Frame, Part, ProcAddr, SharedRef, Target};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate,
    memfd_create, open,
};
use rustix::io::Errno;
use rustix::mm::MapFlags;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

const MAGIC: u64 = 0x6d65_7368_736c_6162;
const MIN_CHUNK: usize = 64 * 1024;
/// The length of slabs of small chunks; a larger chunk has its own slab.
const SLAB: usize = 8 * 1024 * 1024;
/// Idle slabs beyond this are given back to the system.
const KEEP: usize = 512 * 1024 * 1024;
/// Mappings of others' slabs beyond this are forgotten: they take address space and page tables.
const MAPPED: usize = 16 * KEEP;
/// How long nothing must have been sent before that happens.
const BREATHER: Duration = Duration::from_millis(500);

/// The receivers of a chunk, and those that have died since.
#[derive(Debug)]
struct Sent {
    to: Target,
    /// Later receivers.
    also: Vec<ProcAddr>,
    dead: Vec<ProcAddr>,
}

#[derive(Debug)]
struct Slab {
    id: u64,
    fd: OwnedFd,
    /// Shared with threads that copy into it now, outside the lock.
    map: Arc<Mapping>,
    chunk: usize,
    count: usize,
    cursor: usize,
    touched: Vec<bool>,
    /// The receivers of each chunk, so that it is not lost with receivers that die holding it.
    sent: Vec<Option<Sent>>,
}

/// A chunk that was just taken: where it is, its mapping, and whether its pages are untouched.
type Taken = (SharedRef, Arc<Mapping>, bool);

impl Slab {
    fn create(id: u64, chunk: usize, count: usize) -> Result<Self, RuntimeError> {
        let len = HEAD + chunk * count;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("mesh-slab", flags).map_err(RuntimeError::os("memfd_create"))?;
        ftruncate(&fd, len as u64).map_err(RuntimeError::os("ftruncate"))?;
        // Receivers rely on it: a file that could shrink would kill processes that read its mapping.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(RuntimeError::os("seal shared memory"))?;
        let map = Arc::new(Mapping::new(&fd, 0, len, MapFlags::SHARED)?);
        // SAFETY: the first page is mapped, only ours so far, and both words are aligned.
        unsafe {
            map.at(0).cast::<u64>().write(MAGIC);
            map.at(8).cast::<u64>().write(id);
        }
        let sent = std::iter::repeat_with(|| None).take(count).collect();
        Ok(Self { id, fd, map, chunk, count, cursor: 0, touched: vec![false; count], sent })
    }

    /// Takes a chunk that nobody holds (SHM-1), for the receivers `to`.
    fn take(&mut self, pid: u32, to: &Target, holders: u32) -> Option<Taken> {
        if self.map.quiet().load(Ordering::Relaxed) != 0 {
            self.map.quiet().store(0, Ordering::SeqCst);
            // Its holders have given back their pages.
            self.touched.fill(false);
        }
        let free = |i: &usize| self.map.holders(*i).are_none();
        let i = (0..self.count).map(|step| (self.cursor + step) % self.count).find(free)?;
        let turn = self.map.holders(i).begin(holders);
        let at = SharedRef {
            pid,
            fd: u32::try_from(self.fd.as_raw_fd()).ok()?,
            slab: self.id,
            offset: (HEAD + i * self.chunk) as u64,
            chunk: u32::try_from(i).ok()?,
            turn,
        };
        self.cursor = i + 1;
        self.sent[i] = Some(Sent { to: to.clone(), also: Vec::new(), dead: Vec::new() });
        let fresh = !std::mem::replace(&mut self.touched[i], true);
        Some((at, Arc::clone(&self.map), fresh))
    }

    /// A receiver has died: chunks whose receivers are all dead are free again.
    fn on_death(&mut self, addr: ProcAddr) {
        (0..self.count).for_each(|i| self.gone(i, addr));
    }

    /// Gives back the pages of chunks that nobody holds; holders give back the others.
    fn hush(&mut self) {
        self.map.quiet().store(1, Ordering::SeqCst);
        for (i, touched) in self.touched.iter_mut().enumerate() {
            if *touched && self.map.holders(i).are_none() {
                self.map.free_pages(HEAD + i * self.chunk, self.chunk);
                *touched = false;
            }
        }
    }

    fn idle(&self) -> bool {
        (0..self.count).all(|i| self.map.holders(i).are_none())
    }

    fn bytes(&self) -> usize {
        self.chunk * self.count
    }
}

type Slabs = HashMap<usize, Vec<Slab>>;

/// The slabs that this process owns.
#[derive(Debug)]
struct Pool {
    pid: u32,
    budget: usize,
    /// Whether nothing is taken beyond the budget; otherwise idle slabs are only given back first.
    strict: bool,
    slabs: Mutex<Slabs>,
    next: AtomicU64,
}

impl Pool {
    fn new(budget: usize, strict: bool, origin: u64) -> Self {
        Self { pid: std::process::id(), budget, strict, slabs: Mutex::default(), next: AtomicU64::new(origin) }
    }

    fn lock(&self) -> MutexGuard<'_, Slabs> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies `data` into a chunk that each of `to` will let go of. None if the budget is used up or the system gives
    /// no memory: the part then travels inside its frame.
    fn put(&self, data: Buffer<'_>, to: &Target, spare: usize) -> Option<SharedRef> {
        let holders = u32::try_from(to.receivers()).ok().filter(|n| *n > 0)?;
        let chunk = data.len().checked_next_power_of_two()?.max(MIN_CHUNK);
        let (at, map, fresh) = self.take(chunk, to, holders)?;
        let offset = usize::try_from(at.offset).ok()?;
        if fresh {
            map.populate(offset, data.len());
        }
        // SAFETY: the chunk is ours until its holders have counted down, which they do only after it was sent to them;
        // it is as long as the data, and `map` keeps it mapped.
        unsafe { map.write(offset, data, spare) };
        Some(at)
    }

    /// Takes a chunk to be written piece by piece.
    fn room(&self, len: usize, to: &Target) -> Option<Room> {
        let holders = u32::try_from(to.receivers()).ok().filter(|n| *n > 0)?;
        let chunk = len.checked_next_power_of_two()?.max(MIN_CHUNK);
        let (at, map, fresh) = self.take(chunk, to, holders)?;
        let offset = usize::try_from(at.offset).ok()?;
        Some(Room { at, map, offset, len, holders, fresh })
    }

    fn take(&self, chunk: usize, to: &Target, holders: u32) -> Option<Taken> {
        let mut slabs = self.lock();
        let found = slabs.entry(chunk).or_default().iter_mut().find_map(|slab| slab.take(self.pid, to, holders));
        if found.is_some() {
            return found;
        }
        let left = |slabs: &Slabs| self.budget.saturating_sub(total(slabs));
        if left(&slabs) < chunk {
            give_back(&mut slabs, 0);
        }
        let room = if self.strict { left(&slabs) / chunk } else { (left(&slabs) / chunk).max(1) };
        let count = (SLAB / chunk).clamp(1, MAX_CHUNKS).min(room);
        if count == 0 {
            return None;
        }
        let mut slab = Slab::create(self.next.fetch_add(1, Ordering::Relaxed), chunk, count).ok()?;
        let taken = slab.take(self.pid, to, holders);
        slabs.entry(chunk).or_default().push(slab);
        taken
    }

    /// A receiver will never hold this chunk: the message could not reach it. False if it is not ours.
    fn release(&self, at: &SharedRef) -> bool {
        let slabs = self.lock();
        let slab = slabs.values().flatten().find(|slab| at.pid == self.pid && slab.id == at.slab);
        if let Some(slab) = slab.filter(|slab| (at.chunk as usize) < slab.count) {
            slab.map.holders(at.chunk as usize).count_down(at.turn);
        }
        slab.is_some()
    }

    /// A receiver has died.
    fn on_death(&self, addr: ProcAddr) {
        self.lock().values_mut().flatten().for_each(|slab| slab.on_death(addr));
    }

    /// Gives back idle slabs beyond what is worth keeping.
    fn trim(&self) {
        give_back(&mut self.lock(), KEEP);
    }

    /// Gives back everything that nobody holds. Returns whether anything is held.
    fn rest(&self) -> bool {
        let mut slabs = self.lock();
        give_back(&mut slabs, 0);
        slabs.values_mut().flatten().for_each(Slab::hush);
        slabs.retain(|_, class| !class.is_empty());
        !slabs.is_empty()
    }

    /// Bytes in slabs.
    fn bytes(&self) -> usize {
        total(&self.lock())
    }
}

fn total(slabs: &Slabs) -> usize {
    slabs.values().flatten().map(Slab::bytes).sum()
}

/// Gives idle slabs back to the system until at most `keep` bytes of them are left.
fn give_back(slabs: &mut Slabs, keep: usize) {
    let mut idle: usize = slabs.values().flatten().filter(|s| s.idle()).map(Slab::bytes).sum();
    for class in slabs.values_mut() {
        class.retain(|slab| {
            if idle <= keep || !slab.idle() {
                return true;
            }
            idle -= slab.bytes();
            // Receivers may keep their mapping for a while; the pages go now.
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = fallocate(&slab.fd, flags, HEAD as u64, slab.bytes() as u64);
            false
        });
    }
}

#[derive(Debug)]
struct Seen {
    map: Arc<Mapping>,
    fd: OwnedFd,
    spares: Arc<spare::Spares>,
    used: u64,
}

/// The slabs of other processes that this process has mapped.
#[derive(Debug, Default)]
struct Mapped {
    seen: Mutex<HashMap<(u32, u64), Seen>>,
    clock: AtomicU64,
}

impl Mapped {
    /// The part at `at`. `sole` means that nobody else was sent it.
    fn get(&self, at: &SharedRef, len: u64, sole: bool) -> Result<SharedPart, RuntimeError> {
        self.find(at, len, |entry, fresh, offset, len| {
            let counted = Arc::clone(&entry.map);
            let (chunk, turn, reader) = (at.chunk as usize, at.turn, std::process::id());
            if sole || len == 0 {
                if fresh {
                    counted.populate(offset, len);
                }
                let data = counted.at(offset);
                return Ok(SharedPart { data, len, offset, chunk, turn, reader, counted, _private: None });
            }
            let private = Mapping::new(&entry.fd, at.offset, len, MapFlags::PRIVATE)?;
            let data = private.at(0);
            Ok(SharedPart { data, len, offset, chunk, turn, reader, counted, _private: Some(private) })
        })
    }

    /// Finds the slab of `at`. Passes to `then` whether it was newly mapped, the offset and the length.
    fn find<T>(
        &self,
        at: &SharedRef,
        len: u64,
        then: impl FnOnce(&Seen, bool, usize, usize) -> Result<T, RuntimeError>,
    ) -> Result<T, RuntimeError> {
        let gone = || RuntimeError::Os { what: "map a part that another process shares", errno: Errno::NXIO };
        let len = usize::try_from(len).map_err(|_| gone())?;
        let offset = usize::try_from(at.offset).map_err(|_| gone())?;
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (at.pid, at.slab);
        let fresh = !seen.contains_key(&key);
        if fresh {
            self.shrink(&mut seen);
            let path = format!("/proc/{}/fd/{}", at.pid, at.fd);
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
            let fd = open(&path, flags, Mode::empty())
                .or_else(|errno| match errno {
                    // Only new messages need descriptors; parts in use do not miss theirs.
                    Errno::MFILE | Errno::NFILE if !seen.is_empty() => {
                        seen.clear();
                        open(&path, flags, Mode::empty())
                    }
                    errno => Err(errno),
                })
                .map_err(RuntimeError::os("open a large part of a message, which lies in shared memory"))?;
            // Sealed by its owner: it cannot shrink below a mapping. Only such a file has seals at all.
            let sealed = fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
            if !sealed {
                return Err(gone());
            }
            let size = rustix::fs::fstat(&fd).map_err(RuntimeError::os("fstat"))?.st_size;
            let size = usize::try_from(size).map_err(|_| gone())?;
            if size < HEAD {
                return Err(gone());
            }
            let map = Mapping::new(&fd, 0, size, MapFlags::SHARED)?;
            if map.word(0) != MAGIC || map.word(8) != at.slab {
                return Err(gone());
            }
            seen.insert(key, Seen { map: Arc::new(map), fd, spares: Arc::default(), used: now });
        }
        let entry = seen.get_mut(&key).ok_or_else(gone)?;
        entry.used = now;
        let end = offset.checked_add(len).ok_or_else(gone)?;
        if offset < HEAD || end > entry.map.len || at.chunk as usize >= MAX_CHUNKS {
            return Err(gone());
        }
        then(entry, fresh, offset, len)
    }

    /// Forgets all mappings. Those in use stay with their users.
    fn clear(&self) {
        let seen = std::mem::take(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner));
        drop(seen);
    }

    /// Once there are many, forgets unused mappings, longest unused first.
    fn shrink(&self, seen: &mut HashMap<(u32, u64), Seen>) {
        let mut total: usize = seen.values().map(|s| s.map.len).sum();
        while seen.len() >= 64 || total > MAPPED {
            let idle = seen.iter().filter(|(_, s)| Arc::strong_count(&s.map) == 1).min_by_key(|(_, s)| s.used);
            let Some((&key, _)) = idle else { return };
            total -= seen.remove(&key).map_or(0, |s| s.map.len);
        }
    }

    /// Forgets what an ended process shared.
    fn forget(&self, pid: u32) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|(owner, _), _| *owner != pid);
    }
}

/// A large part as its receiver has it: writable memory that stays as long as anything refers to it.
#[derive(Debug)]
pub struct SharedPart {
    data: *mut u8,
    len: usize,
    /// Where in the slab it is.
    offset: usize,
    chunk: usize,
    turn: u32,
    /// The process that counts as its holder. A forked copy of it does not, and must not count down.
    reader: u32,
    counted: Arc<Mapping>,
    _private: Option<Mapping>,
}

// SAFETY: plain memory that only this value hands out, kept mapped by the fields beside the pointer.
unsafe impl Send for SharedPart {}
// SAFETY: as above; readers and writers through the pointer synchronise as with any buffer.
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
        if self.reader == std::process::id() {
            let map = &self.counted;
            map.holders(self.chunk).let_go(self.turn, map.quiet(), || map.free_pages(self.offset, self.len));
        }
    }
}

/// A part as its reader gets it.
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
    /// What this process keeps for references, see `kept`.
    kept: Option<Pool>,
    /// The counter of references in messages that are dropped unsent.
    counter: OnceLock<Weak<dyn RefCounter>>,
    mapped: Mapped,
    begun: Instant,
    /// When memory was last sent or received, in milliseconds since then.
    used: AtomicU64,
    /// Whether the thread that takes turns ([`Memory::turn`]) knows that memory is in use.
    known: AtomicBool,
    /// When it wants its next turn.
    next: Mutex<Option<Duration>>,
    watch: OnceLock<Watch>,
}

/// Makes unused memory be given back.
struct Watch {
    /// After this time.
    idle: Duration,
    /// Called when turns are needed.
    wake: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("idle", &self.idle).finish_non_exhaustive()
    }
}

impl Memory {
    /// Slabs are numbered from `origin`, which should be random: a mapping of a dead process's slab is then never taken
    /// for one of a later process with the same pid.
    pub(crate) fn new(budget: usize, origin: u64) -> Self {
        Self {
            pool: available().then(|| Pool::new(budget, true, origin)),
            kept: None,
            counter: OnceLock::new(),
            mapped: Mapped::default(),
            begun: Instant::now(),
            used: AtomicU64::new(0),
            known: AtomicBool::new(false),
            next: Mutex::default(),
            watch: OnceLock::new(),
        }
    }

    /// Sets `wake` to be called once memory is in use; [`Memory::turn`] must then be called, so that memory unused for
    /// `idle` is given back. Only the first call counts.
    pub(crate) fn watch(&self, idle: Duration, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.watch.set(Watch { idle, wake: Box::new(wake) });
    }

    fn touch(&self) {
        let Some(watch) = self.watch.get() else { return };
        self.used.store(u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX), Ordering::SeqCst);
        // Once for everything that is sent until it falls idle.
        if !self.known.load(Ordering::SeqCst) && !self.known.swap(true, Ordering::SeqCst) {
            (watch.wake)();
        }
    }

    /// Gives back unused memory when it is time. Returns when to look again, if anything is left. Memory held for hours
    /// is looked at ever less often; it costs only address space (see the module).
    pub(crate) fn turn(&self) -> Option<Instant> {
        let watch = self.watch.get()?;
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.begun.elapsed();
        if self.known.load(Ordering::SeqCst) || next.is_some_and(|at| at <= now) {
            let used = self.used.load(Ordering::SeqCst);
            let last = Duration::from_millis(used);
            let idle = now.saturating_sub(last);
            let breather = BREATHER.min(watch.idle);
            *next = if idle < breather {
                Some(last + breather)
            } else if idle < watch.idle {
                self.trim();
                Some(last + watch.idle)
            } else {
                self.known.store(false, Ordering::SeqCst);
                let held = self.rest();
                // Another thread that has just used it may have seen it as known.
                let again = self.used.load(Ordering::SeqCst) != used;
                self.known.fetch_or(again, Ordering::SeqCst);
                if again { Some(now + BREATHER) } else { held.then_some(now + idle.max(BREATHER)) }
            };
        }
        next.map(|at| self.begun + at)
    }

    /// Gives back everything that is not in use. Returns whether others hold memory of this process.
    pub(crate) fn rest(&self) -> bool {
        self.mapped.clear();
        let held = self.pool.as_ref().is_some_and(Pool::rest);
        self.kept.as_ref().is_some_and(Pool::rest) || held
    }

    /// See [`Pool::put`].
    pub(crate) fn put(&self, data: &[u8], to: &Target, spare: usize) -> Option<SharedRef> {
        self.put_buffer(Buffer::of(&[data]), to, spare)
    }

    /// See [`Pool::put`].
    pub(crate) fn put_buffer(&self, data: Buffer<'_>, to: &Target, spare: usize) -> Option<SharedRef> {
        let put = self.pool.as_ref()?.put(data, to, spare);
        self.touch();
        put
    }

    /// See [`Pool::room`].
    pub(crate) fn room(&self, len: usize, to: &Target) -> Option<Room> {
        let room = self.pool.as_ref()?.room(len, to);
        self.touch();
        room
    }

    /// See [`Mapped::get`].
    pub(crate) fn open(&self, at: &SharedRef, len: u64, sole: bool) -> Result<SharedPart, RuntimeError> {
        let part = self.mapped.get(at, len, sole);
        self.touch();
        part
    }

    /// Gives back the memory of a frame that will never be opened.
    pub(crate) fn let_go(&self, frame: &Frame) {
        if (frame.header.carries_refs() || frame.header.is_distant())
            && let Some(counter) = self.counter.get().and_then(Weak::upgrade)
        {
            counter.unsent(frame);
        }
        for part in frame.parts().unwrap_or_default() {
            if let Part::Shared { at, len } = part {
                self.let_go_of(&at, len);
            }
        }
    }

    /// Gives back a part that will never be opened.
    pub(crate) fn let_go_of(&self, at: &SharedRef, len: u64) {
        if !self.pool.as_ref().is_some_and(|pool| pool.release(at)) {
            // Mapping it and dropping it at once counts it down.
            drop(self.mapped.get(at, len, true));
        }
    }

    pub(crate) fn trim(&self) {
        if let Some(pool) = &self.pool {
            pool.trim();
        }
    }

    /// A process has died: what it held of ours is free again, and what it shared with us is gone.
    pub(crate) fn on_death(&self, addr: ProcAddr, pid: Option<u32>) {
        if let Some(pool) = &self.pool {
            pool.on_death(addr);
            // Nobody is left to give back what it held.
            self.touch();
        }
        if let Some(pid) = pid {
            self.mapped.forget(pid);
        }
    }

    /// How many slabs of other processes are kept mapped.
    #[cfg(test)]
    pub(crate) fn mapped(&self) -> usize {
        self.mapped.seen.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether this process has fallen idle, leaving it to others to give back what they hold.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        let quiet = |slab: &Slab| slab.map.quiet().load(Ordering::SeqCst) != 0;
        self.pool.as_ref().is_some_and(|pool| pool.lock().values().flatten().all(quiet))
    }

    /// Bytes in slabs of this process.
    pub(crate) fn bytes(&self) -> usize {
        self.pool.as_ref().map_or(0, Pool::bytes)
    }
}

/// Whether two processes of this user can share memory here, by opening each other's descriptors through /proc.
fn available() -> bool {
    let Ok(fd) = memfd_create("mesh-probe", MemfdFlags::CLOEXEC) else { return false };
    let path = format!("/proc/{}/fd/{}", std::process::id(), fd.as_fd().as_raw_fd());
    open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).is_ok()
}
