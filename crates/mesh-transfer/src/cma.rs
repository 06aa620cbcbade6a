//! Copies between processes of one host with the kernel's cross-memory calls.

use crate::cores;
use crate::error::{ErrorKind, TransferError};
use crate::handle::RealmId;
use crate::segments::{Segment, Segments};
use crate::watch::Watch;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The most that one call moves: deadlines and cancellation are checked in between.
const STEP: u64 = 8 << 20;
/// From this length on, waking a second core pays off.
const SHARE: u64 = 8 << 20;
/// More threads than this do not copy faster.
const LANES: usize = 4;
/// The most pieces that the kernel takes in one call.
const IOV_MAX: usize = 1024;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the other process.
    Read,
    /// To the other process.
    Write,
}

/// Another process, identified by its pid and its witness page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Other {
    pub(crate) pid: u32,
    pub(crate) witness: u64,
    pub(crate) realm: RealmId,
}

impl Other {
    /// Checks that the process is there, by reading its realm from its memory.
    pub(crate) fn check(&self) -> Result<(), TransferError> {
        let mut nothing = [PLACE; 2];
        let (ours, theirs) = nothing.split_at_mut(1);
        self.call(Way::Read, ours, theirs, 0).map(|_| ())
    }

    /// Moves bytes between two windows of the same length, on several cores where that is faster.
    ///
    /// # Safety
    /// `local` must be memory of this process, writable for [`Way::Read`], throughout the call.
    pub(crate) unsafe fn carry(
        &self,
        way: Way,
        local: (&Segments, u64),
        remote: (&Segments, u64),
        len: u64,
        watch: &Watch,
    ) -> Result<(), TransferError> {
        if lanes(len) == 1 {
            let mut at = 0;
            while at < len {
                watch.check()?;
                let step = STEP.min(len - at);
                self.step(way, local.0.window(local.1 + at, step), remote.0.window(remote.1 + at, step))?;
                at += step;
            }
            return Ok(());
        }
        // Each lane takes the next piece, so one that loses its core delays nobody.
        let next = AtomicU64::new(0);
        in_lanes(len, || {
            let at = next.fetch_add(STEP / 2, Ordering::Relaxed);
            if at >= len {
                return Ok(false);
            }
            watch.check()?;
            let step = (STEP / 2).min(len - at);
            self.step(way, local.0.window(local.1 + at, step), remote.0.window(remote.1 + at, step))?;
            Ok(true)
        })
    }

    /// Moves bytes between two lists of pieces of equal total length.
    pub(crate) fn step(
        &self,
        way: Way,
        local: impl Iterator<Item = Segment>,
        remote: impl Iterator<Item = Segment>,
    ) -> Result<(), TransferError> {
        let (mut local, mut remote) = (Pieces::new(local), Pieces::new(remote));
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        loop {
            let (mine, want) = local.fill(&mut ours);
            let (yours, have) = remote.fill(&mut theirs);
            let len = want.min(have);
            if len == 0 {
                return Ok(());
            }
            shorten(&mut ours, mine, len);
            shorten(&mut theirs, yours, len);
            let moved = self.call(way, &mut ours, &mut theirs, len)?;
            local.advance(moved);
            remote.advance(moved);
        }
    }

    /// One system call; both lists begin with the witness's place. Returns the bytes moved, at least one of `len`.
    fn call(
        &self,
        way: Way,
        ours: &mut [libc::iovec],
        theirs: &mut [libc::iovec],
        len: u64,
    ) -> Result<u64, TransferError> {
        // WIT-1: the witness comes first. A write stores the bytes that it already has.
        let mut seen = if way == Way::Read { [0; 16] } else { self.realm };
        let witness = seen.len() as u64;
        ours[0] = iovec(seen.as_mut_ptr() as u64, witness);
        theirs[0] = iovec(self.witness, witness);
        let pid = self.pid.cast_signed();
        // The kernel writes to it through the pointer, which the compiler cannot see.
        std::hint::black_box(&mut seen);
        // SAFETY: the caller vouches for the local pieces, and the lists live throughout the call. The kernel checks
        // the remote ones.
        let moved = unsafe {
            let (ours, count) = (ours.as_ptr(), ours.len() as libc::c_ulong);
            let (theirs, their_count) = (theirs.as_ptr(), theirs.len() as libc::c_ulong);
            match way {
                Way::Read => libc::process_vm_readv(pid, ours, count, theirs, their_count, 0),
                Way::Write => libc::process_vm_writev(pid, ours, count, theirs, their_count, 0),
            }
        };
        let seen = std::hint::black_box(seen);
        match u64::try_from(moved) {
            Err(_) => Err(self.failed(&io::Error::last_os_error())),
            Ok(moved) if moved < witness || seen != self.realm => Err(self.replaced()),
            Ok(moved) if moved == witness && len > 0 => Err(self.unmapped()),
            Ok(moved) => Ok(moved - witness),
        }
    }

    fn failed(&self, error: &io::Error) -> TransferError {
        match error.raw_os_error() {
            Some(libc::ESRCH) => TransferError::ended(self.pid),
            Some(libc::EFAULT) => self.replaced(),
            Some(libc::EPERM | libc::ENOSYS) => TransferError::transport(format!(
                "the kernel does not let this process access the memory of process {} ({error}): it is another user's, in \
                 a container, or protected by Yama (kernel.yama.ptrace_scope) or seccomp",
                self.pid
            )),
            _ => TransferError::transport(format!("cannot access the memory of process {}: {error}", self.pid)),
        }
    }

    fn replaced(&self) -> TransferError {
        TransferError::gone(format!(
            "process {} is no longer the program that owned the buffer: that has ended, or was replaced",
            self.pid
        ))
    }

    fn unmapped(&self) -> TransferError {
        TransferError::new(
            ErrorKind::Invalid,
            format!("memory of the transfer is unmapped in process {} or in this one, or is not writable", self.pid),
        )
    }
}

/// The witness's place, at the beginning of a list.
const PLACE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// The pieces of many copies, moved by one call.
pub(crate) struct Lists<'a> {
    other: &'a Other,
    way: Way,
    ours: Vec<libc::iovec>,
    theirs: Vec<libc::iovec>,
    len: u64,
}

impl<'a> Lists<'a> {
    pub(crate) fn new(other: &'a Other, way: Way, copies: usize) -> Self {
        let list = || {
            let mut list = Vec::with_capacity((1 + copies).min(IOV_MAX));
            list.push(PLACE);
            list
        };
        Self { other, way, ours: list(), theirs: list(), len: 0 }
    }

    /// Adds a copy of `len` bytes from the given place on each side. Flushes first if there is no room.
    pub(crate) fn add(
        &mut self,
        local: (&Segments, u64),
        remote: (&Segments, u64),
        len: u64,
    ) -> Result<(), TransferError> {
        let pieces = local.0.list().len().max(remote.0.list().len());
        if self.ours.len().max(self.theirs.len()) + pieces > IOV_MAX {
            self.flush()?;
            if 1 + pieces > IOV_MAX {
                return self.other.step(self.way, local.0.window(local.1, len), remote.0.window(remote.1, len));
            }
        }
        self.ours.extend(local.0.window(local.1, len).map(|piece| iovec(piece.addr, piece.len)));
        self.theirs.extend(remote.0.window(remote.1, len).map(|piece| iovec(piece.addr, piece.len)));
        self.len += len;
        Ok(())
    }

    /// Moves what has been added.
    pub(crate) fn flush(&mut self) -> Result<(), TransferError> {
        if self.len > 0 {
            let moved = self.other.call(self.way, &mut self.ours, &mut self.theirs, self.len)?;
            if moved < self.len {
                // The kernel stopped at an unmapped piece; retrying the rest yields the error.
                let rest = |list: &[libc::iovec]| {
                    let mut skip = moved;
                    let pieces = list[1..].iter().map(move |piece| {
                        let step = skip.min(piece.iov_len as u64);
                        skip -= step;
                        Segment { addr: piece.iov_base as u64 + step, len: piece.iov_len as u64 - step }
                    });
                    pieces.filter(|piece| piece.len > 0).collect::<Vec<_>>()
                };
                let (ours, theirs) = (rest(&self.ours), rest(&self.theirs));
                self.other.step(self.way, ours.into_iter(), theirs.into_iter())?;
            }
        }
        self.ours.truncate(1);
        self.theirs.truncate(1);
        self.len = 0;
        Ok(())
    }
}

/// The number of threads worth using for `len` bytes at the moment.
fn lanes(len: u64) -> usize {
    if len < SHARE { 1 } else { (cores::spare() + 1).min(LANES) }
}

/// Calls `turn` until it returns false, on several cores where that is faster for `len` bytes.
pub(crate) fn in_lanes(len: u64, turn: impl Fn() -> Result<bool, TransferError> + Sync) -> Result<(), TransferError> {
    let failed = AtomicBool::new(false);
    let lane = || {
        while !failed.load(Ordering::Relaxed) {
            match turn() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
        Ok(())
    };
    cores::in_lanes(&vec![(); lanes(len)], |()| lane()).into_iter().collect()
}

fn iovec(addr: u64, len: u64) -> libc::iovec {
    libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len as usize }
}

/// Pieces of which some have been moved.
struct Pieces<I: Iterator<Item = Segment>> {
    rest: I,
    /// Taken from `rest`, not yet moved.
    ahead: std::collections::VecDeque<Segment>,
}

impl<I: Iterator<Item = Segment>> Pieces<I> {
    fn new(rest: I) -> Self {
        Self { rest, ahead: std::collections::VecDeque::new() }
    }

    /// Writes the next pieces into `list`, after the witness's place, up to the limit. Returns their number and bytes.
    fn fill(&mut self, list: &mut Vec<libc::iovec>) -> (usize, u64) {
        let room = (IOV_MAX - 1).saturating_sub(self.ahead.len());
        self.ahead.extend(self.rest.by_ref().take(room));
        list.clear();
        list.push(PLACE);
        list.extend(self.ahead.iter().map(|segment| iovec(segment.addr, segment.len)));
        (list.len() - 1, self.ahead.iter().map(|segment| segment.len).sum())
    }

    fn advance(&mut self, mut moved: u64) {
        while moved > 0
            && let Some(first) = self.ahead.front_mut()
        {
            let step = first.len.min(moved);
            moved -= step;
            first.addr += step;
            first.len -= step;
            if first.len == 0 {
                self.ahead.pop_front();
            }
        }
    }
}

/// Cuts a list to `len` bytes, not counting the witness's place.
fn shorten(list: &mut Vec<libc::iovec>, count: usize, len: u64) {
    let mut left = len as usize;
    for at in 1..=count {
        list[at].iov_len = list[at].iov_len.min(left);
        left -= list[at].iov_len;
        if left == 0 {
            list.truncate(at + 1);
            return;
        }
    }
}
