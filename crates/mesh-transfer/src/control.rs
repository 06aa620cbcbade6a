//! The page that an owner shares with its readers: what is offered, and who is reading it at the moment.
//!
//! LSE-1: whoever copies bytes holds a lease, and a closed export keeps its memory until no lease names it. A reader
//! first writes the lease and then checks whether the export is live; an owner first closes the export and then looks
//! for leases. Both are in one total order, so at least one of them sees the other.
//! LSE-4: a lease may name every export at once; its holder checks each export that it copies from or to. It is held
//! only for short copies, because nothing that closes meanwhile is released.
//! LSE-2: a lease names its holder by pid and start time in one word, so that leases of dead processes can be found and
//! taken back.
//!
//! The owner acts only on whether leases exist; it never follows what others write here.

use crate::error::{Closing, TransferError};
use crate::handle::{RealmId, Token};
use crate::pool::Pooled;
use crate::realm::{Realm, pid, started};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create, open,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

const MAGIC: u64 = u64::from_le_bytes(*b"MXCTRL\0\x02");
/// The most operations of other processes under way at once.
pub(crate) const LEASES: usize = 4096;
/// The most exports offered at once; the file only takes memory for slots in use.
pub(crate) const SLOTS: usize = 1 << 18;
const HEAD: usize = 4096;
const LEASES_AT: usize = HEAD;
const ENTRIES_AT: usize = LEASES_AT + LEASES * size_of::<Lease>();
const LEN: usize = ENTRIES_AT + SLOTS * size_of::<Entry>();

const LIVE: u64 = 1;
const WRITABLE: u64 = 1;
/// The memory is one piece, and `pieces_at` is its address.
const ONE_PIECE: u64 = 2;
/// The memory is in an arena; `pool` and `pieces` say where.
const POOLED: u64 = 4;
/// The memory is a GPU's, and the owner keeps a record of it at `pieces_at`.
const CUDA: u64 = 8;
/// What a lease of all exports names: no export has generation 0.
const EVERY: u64 = 1;
/// How often an owner that waits for leases checks whether their holders are alive.
const LOOK: Duration = Duration::from_millis(100);

#[repr(C)]
struct Head {
    magic: AtomicU64,
    realm: [AtomicU64; 2],
    witness: AtomicU64,
    pid: AtomicU64,
    /// One more than the highest lease ever taken.
    high: AtomicU64,
    /// Changes whenever a lease of a closing export is returned.
    drained: AtomicU32,
    /// Not 0 while the owner waits for leases of closing exports.
    draining: AtomicU32,
}

#[repr(C)]
struct Lease {
    /// The pid and start time of the holder; 0 if the lease is free.
    holder: AtomicU64,
    /// Slot and generation; 0 if not set yet.
    what: AtomicU64,
}

#[repr(C, align(64))]
struct Entry {
    /// Generation and state: live, or why it is closed, which stays until the slot is used again.
    word: AtomicU64,
    token: [AtomicU64; 2],
    length: AtomicU64,
    /// Address in the owner's memory of its list of pieces, or of its only piece.
    pieces_at: AtomicU64,
    pieces: AtomicU64,
    flags: AtomicU64,
    /// The owner's descriptor of the arena, and the arena's number.
    pool: AtomicU64,
}

/// What an entry says of an export, for the holder of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offered {
    pub(crate) token: Token,
    pub(crate) length: u64,
    pub(crate) pieces_at: u64,
    pub(crate) pieces: u64,
    pub(crate) writable: bool,
    /// `pieces_at` is the address of the memory itself, not of a list.
    pub(crate) one_piece: bool,
    /// Where it can be mapped from.
    pub(crate) pooled: Option<Pooled>,
    /// It is memory of a GPU, described by a record at `pieces_at`.
    pub(crate) cuda: bool,
}

/// A mapping of the page, the owner's own or a reader's.
#[derive(Debug)]
pub(crate) struct Control {
    base: *mut c_void,
    fd: Option<OwnedFd>,
}

// SAFETY: the page is only reached through atomics, and stays mapped until this is dropped.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

impl Control {
    /// Creates the page of this process.
    pub(crate) fn create(realm: &Realm, witness: u64) -> Result<Self, TransferError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("mesh-transfer", flags).map_err(TransferError::os("make shared memory"))?;
        ftruncate(&fd, LEN as u64).map_err(TransferError::os("size shared memory"))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(TransferError::os("seal shared memory"))?;
        let mut made = Self::map(fd.as_fd())?;
        let head = made.head();
        for (word, half) in head.realm.iter().zip(halves(&realm.id)) {
            word.store(half, Ordering::Relaxed);
        }
        head.witness.store(witness, Ordering::Relaxed);
        head.pid.store(u64::from(realm.pid), Ordering::Relaxed);
        head.magic.store(MAGIC, Ordering::Release);
        made.fd = Some(fd);
        Ok(made)
    }

    /// Maps another process's page, if this descriptor of that process is one.
    pub(crate) fn attach(owner: u32, fd: u32, realm: &RealmId) -> Result<Self, TransferError> {
        let path = format!("/proc/{owner}/fd/{fd}");
        let gone = || TransferError::gone(format!("process {owner} no longer offers this memory"));
        // Check before opening: opening a device may have effects.
        match std::fs::read_link(&path) {
            Ok(name) if name.as_os_str().to_string_lossy().starts_with("/memfd:mesh-transfer") => {}
            Ok(_) => return Err(gone()),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Err(denied(owner)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(gone()),
            Err(error) => return Err(TransferError::transport(format!("cannot look at {path}: {error}"))),
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let fd = open(&path, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT | Errno::SRCH => gone(),
            Errno::ACCESS | Errno::PERM => denied(owner),
            errno => TransferError::os("open the memory that its owner shares")(errno),
        })?;
        // Sealed by its owner, so it cannot shrink below a mapping. Only such files have seals.
        let sealed = fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let size = fstat(&fd).map_err(TransferError::os("look at shared memory"))?.st_size;
        if !sealed || u64::try_from(size) != Ok(LEN as u64) {
            return Err(gone());
        }
        let made = Self::map(fd.as_fd())?;
        let head = made.head();
        let named: [u64; 2] = std::array::from_fn(|i| head.realm[i].load(Ordering::Relaxed));
        let same_pid = head.pid.load(Ordering::Relaxed) == u64::from(owner);
        if head.magic.load(Ordering::Acquire) != MAGIC || named != halves(realm) || !same_pid {
            return Err(gone());
        }
        Ok(made)
    }

    fn map(fd: impl AsFd) -> Result<Self, TransferError> {
        // SAFETY: a fresh shared mapping at an address of the kernel's choosing; nothing else refers to it.
        let base = unsafe {
            mmap(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
                .map_err(TransferError::os("map shared memory"))?
        };
        Ok(Self { base, fd: None })
    }

    /// The number of the owner's descriptor.
    pub(crate) fn descriptor(&self) -> u32 {
        self.fd.as_ref().map_or(0, |fd| fd.as_raw_fd().unsigned_abs())
    }

    pub(crate) fn witness(&self) -> u64 {
        self.head().witness.load(Ordering::Relaxed)
    }

    fn head(&self) -> &Head {
        // SAFETY: the mapping begins with it, is page-aligned, and is only used atomically.
        unsafe { &*self.base.cast::<Head>() }
    }

    fn leases(&self) -> &[Lease] {
        // SAFETY: inside the mapping and aligned; atomics only.
        unsafe { std::slice::from_raw_parts(self.base.byte_add(LEASES_AT).cast::<Lease>(), LEASES) }
    }

    fn entries(&self) -> &[Entry] {
        // SAFETY: inside the mapping and aligned; atomics only.
        unsafe { std::slice::from_raw_parts(self.base.byte_add(ENTRIES_AT).cast::<Entry>(), SLOTS) }
    }

    fn entry(&self, slot: u32) -> Result<&Entry, TransferError> {
        self.entries().get(slot as usize).ok_or_else(|| TransferError::gone("no such memory is offered"))
    }

    // The owner's side.

    /// Offers this in the slot from now on.
    pub(crate) fn open(&self, slot: u32, generation: u32, offered: &Offered) -> Result<(), TransferError> {
        let entry = self.entry(slot)?;
        for (word, half) in entry.token.iter().zip(halves(&offered.token)) {
            word.store(half, Ordering::Relaxed);
        }
        entry.length.store(offered.length, Ordering::Relaxed);
        entry.pieces_at.store(offered.pieces_at, Ordering::Relaxed);
        let pieces = offered.pooled.map_or(offered.pieces, |pooled| pooled.offset);
        entry.pieces.store(pieces, Ordering::Relaxed);
        let pool = offered.pooled.map_or(0, |pooled| u64::from(pooled.fd) << 32 | u64::from(pooled.id));
        entry.pool.store(pool, Ordering::Relaxed);
        let is_pooled = offered.pooled.is_some();
        let flags =
            [(offered.writable, WRITABLE), (offered.one_piece, ONE_PIECE), (is_pooled, POOLED), (offered.cuda, CUDA)];
        let flags = flags.into_iter().filter_map(|(is_so, flag)| is_so.then_some(flag)).sum();
        entry.flags.store(flags, Ordering::Relaxed);
        entry.word.store(pack(generation, LIVE), Ordering::SeqCst);
        Ok(())
    }

    /// Lets no new lease begin. Returns whether none is under way either.
    pub(crate) fn close(&self, slot: u32, generation: u32, closing: Closing) -> bool {
        if let Ok(entry) = self.entry(slot) {
            entry.word.store(pack(generation, closing.code()), Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
        !self.is_leased(slot, generation)
    }

    /// Why this export is not offered; none if that is not known any more.
    pub(crate) fn closing(&self, slot: u32, generation: u32) -> Option<Closing> {
        let word = self.entry(slot).ok()?.word.load(Ordering::SeqCst);
        Closing::ALL.into_iter().find(|closing| word == pack(generation, closing.code()))
    }

    /// Whether a lease names this export.
    pub(crate) fn is_leased(&self, slot: u32, generation: u32) -> bool {
        let name = name(slot, generation);
        self.used().iter().any(|lease| {
            let what = lease.what.load(Ordering::SeqCst);
            (what == name || what == EVERY) && lease.holder.load(Ordering::SeqCst) != 0
        })
    }

    /// Says whether this owner waits for leases. Set before looking for them.
    pub(crate) fn set_draining(&self, is_so: bool) {
        self.head().draining.store(u32::from(is_so), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Makes those who wait for leases look again.
    pub(crate) fn look_again(&self) {
        self.head().drained.fetch_add(1, Ordering::SeqCst);
        // It is no error if nobody waits.
        let _ = futex::wake(&self.head().drained, futex::Flags::empty(), i32::MAX.unsigned_abs());
    }

    fn used(&self) -> &[Lease] {
        let high = usize::try_from(self.head().high.load(Ordering::SeqCst)).unwrap_or(LEASES);
        &self.leases()[..high.min(LEASES)]
    }

    /// How often leases of closing exports were returned. Read it before looking for leases.
    pub(crate) fn drained(&self) -> u32 {
        self.head().drained.load(Ordering::SeqCst)
    }

    /// Waits until another lease is returned, or it is time to look for dead holders.
    pub(crate) fn await_drain(&self, seen: u32) {
        self.await_change(seen, LOOK);
    }

    /// Waits until a leased export is closed, a lease of a closed one is returned, or the time is over.
    pub(crate) fn await_change(&self, seen: u32, limit: Duration) {
        let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
        let limit = futex::Timespec { tv_sec: seconds, tv_nsec: i64::from(limit.subsec_nanos()) };
        // A wake-up, an earlier change and a timeout all end the wait.
        let _ = futex::wait(&self.head().drained, futex::Flags::empty(), seen, Some(&limit));
    }

    /// Takes back the leases of dead processes (LSE-2).
    pub(crate) fn bury(&self) -> usize {
        self.used().iter().filter(|lease| Self::bury_one(lease)).count()
    }

    fn bury_one(lease: &Lease) -> bool {
        let holder = lease.holder.load(Ordering::SeqCst);
        if holder == 0 || is_alive(holder) {
            return false;
        }
        let me = identity(pid(), started(pid()).unwrap_or(0));
        // Only one of several processes that find it takes it back.
        if lease.holder.compare_exchange(holder, me, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return false;
        }
        lease.what.store(0, Ordering::SeqCst);
        lease.holder.store(0, Ordering::SeqCst);
        true
    }

    // The readers' side.

    /// Leases an export, which keeps its memory until the lease is dropped.
    pub(crate) fn lease(&self, me: u64, slot: u32, generation: u32) -> Result<(Leased<'_>, Offered), TransferError> {
        let leased = self.take(me, name(slot, generation))?;
        let offered = leased.offered(slot, generation)?;
        Ok((leased, offered))
    }

    /// Leases an export beyond this call, until the result is dropped.
    pub(crate) fn hold(
        self: &Arc<Self>,
        me: u64,
        slot: u32,
        generation: u32,
    ) -> Result<(Held, Offered), TransferError> {
        let (leased, offered) = self.lease(me, slot, generation)?;
        let index = self.leases().iter().position(|lease| std::ptr::eq(lease, leased.lease)).unwrap_or(LEASES);
        std::mem::forget(leased);
        Ok((Held { control: Arc::clone(self), index, what: (slot, generation), pid: pid() }, offered))
    }

    /// Leases all exports (LSE-4).
    pub(crate) fn lease_every(&self, me: u64) -> Result<Leased<'_>, TransferError> {
        self.take(me, EVERY)
    }

    fn take(&self, me: u64, what: u64) -> Result<Leased<'_>, TransferError> {
        let lease = self.claim(me).or_else(|| {
            self.bury();
            self.claim(me)
        });
        let Some(lease) = lease else {
            return Err(TransferError::transport(format!(
                "all {LEASES} places for operations on the owner's memory are taken"
            )));
        };
        lease.what.store(what, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(Leased { control: self, lease })
    }

    fn claim(&self, me: u64) -> Option<&Lease> {
        let index = self.leases().iter().position(|lease| {
            lease.holder.load(Ordering::Relaxed) == 0
                && lease.holder.compare_exchange(0, me, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        })?;
        self.head().high.fetch_max(index as u64 + 1, Ordering::SeqCst);
        Some(&self.leases()[index])
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; no reference outlives `self`.
        let _ = unsafe { munmap(self.base, LEN) };
    }
}

/// A lease under way.
pub(crate) struct Leased<'a> {
    control: &'a Control,
    lease: &'a Lease,
}

impl Leased<'_> {
    /// What is offered there, if live. The lease must name it, which keeps the owner from changing the entry.
    pub(crate) fn offered(&self, slot: u32, generation: u32) -> Result<Offered, TransferError> {
        let entry = self.control.entry(slot)?;
        // LSE-1: checked after the lease was written.
        if entry.word.load(Ordering::SeqCst) != pack(generation, LIVE) {
            return Err(TransferError::closed(self.control.closing(slot, generation)));
        }
        let halves: [u64; 2] = std::array::from_fn(|i| entry.token[i].load(Ordering::Relaxed));
        let mut token = [0; 16];
        token[..8].copy_from_slice(&halves[0].to_le_bytes());
        token[8..].copy_from_slice(&halves[1].to_le_bytes());
        let flags = entry.flags.load(Ordering::Relaxed);
        let (pieces, pool) = (entry.pieces.load(Ordering::Relaxed), entry.pool.load(Ordering::Relaxed));
        let is_pooled = flags & POOLED != 0;
        Ok(Offered {
            token,
            length: entry.length.load(Ordering::Relaxed),
            pieces_at: entry.pieces_at.load(Ordering::Relaxed),
            pieces: if is_pooled { 1 } else { pieces },
            writable: flags & WRITABLE != 0,
            one_piece: flags & ONE_PIECE != 0,
            pooled: is_pooled.then_some(Pooled { fd: (pool >> 32) as u32, id: pool as u32, offset: pieces }),
            cuda: flags & CUDA != 0,
        })
    }
}

impl Drop for Leased<'_> {
    fn drop(&mut self) {
        self.lease.what.store(0, Ordering::SeqCst);
        self.lease.holder.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.control.head().draining.load(Ordering::SeqCst) != 0 {
            self.control.look_again();
        }
    }
}

/// A lease that outlasts calls, for what stays open in between. It keeps the page mapped.
#[derive(Debug)]
pub(crate) struct Held {
    control: Arc<Control>,
    index: usize,
    /// Slot and generation of an export that was live.
    what: (u32, u32),
    pid: u32,
}

impl Held {
    /// Whether its export is still offered. If not, the owner is waiting for this lease.
    pub(crate) fn is_offered(&self) -> bool {
        let (slot, generation) = self.what;
        let live = |entry: &Entry| entry.word.load(Ordering::SeqCst) == pack(generation, LIVE);
        self.control.entry(slot).is_ok_and(live)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // In a forked copy, the lease is the parent's.
        if pid() == self.pid
            && let Some(lease) = self.control.leases().get(self.index)
        {
            drop(Leased { control: &self.control, lease });
        }
    }
}

/// Identifies a process in one word.
pub(crate) fn identity(pid: u32, started: u64) -> u64 {
    u64::from(pid) << 32 | (started & 0xffff_ffff)
}

fn is_alive(identity: u64) -> bool {
    let holder = (identity >> 32) as u32;
    started(holder).is_some_and(|started| started & 0xffff_ffff == identity & 0xffff_ffff)
}

fn name(slot: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(slot)
}

fn pack(generation: u32, state: u64) -> u64 {
    u64::from(generation) << 32 | state
}

fn halves(id: &[u8; 16]) -> [u64; 2] {
    let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| id[at + i]));
    [half(0), half(8)]
}

fn denied(owner: u32) -> TransferError {
    TransferError::transport(format!(
        "the kernel does not let this process look into process {owner}: another user's, in a container, or forbidden by \
         Yama (kernel.yama.ptrace_scope)"
    ))
}
