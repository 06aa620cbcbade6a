//! A chunk's word in the head of its slab: which use of the chunk this is, and how many hold it.
//!
//! The owner's threads change it under the lock of their pool; holders change it at any time, from other processes.
//! Nothing here knows that it is in shared memory, so that `models/holders.rs` can try all schedules.

use crate::sync::{AtomicU64, Ordering};

/// The count while the last holder, which still holds the chunk, gives its pages back. Nobody else may take it any
/// more.
const LEAVING: u32 = u32::MAX;

fn word(turn: u32, count: u32) -> u64 {
    u64::from(turn) << 32 | u64::from(count)
}

fn turn_of(word: u64) -> u32 {
    (word >> 32) as u32
}

fn count_of(word: u64) -> u32 {
    word as u32
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Holders<'a>(pub(crate) &'a AtomicU64);

impl Holders<'_> {
    /// Whether nobody holds it. Everything that its holders did with it happened before (SHM-1).
    pub(crate) fn are_none(self) -> bool {
        count_of(self.0.load(Ordering::SeqCst)) == 0
    }

    /// Whether `turn` is the current use of the chunk.
    pub(crate) fn are_of(self, turn: u32) -> bool {
        turn_of(self.0.load(Ordering::Acquire)) == turn
    }

    /// The owner begins a new use of the chunk, which nobody holds, with this many holders.
    pub(crate) fn begin(self, count: u32) -> u32 {
        let turn = turn_of(self.0.load(Ordering::Relaxed)).wrapping_add(1);
        self.0.store(word(turn, count), Ordering::Release);
        turn
    }

    /// The owner ends this use: all possible holders are dead.
    pub(crate) fn end(self) {
        let turn = turn_of(self.0.load(Ordering::Acquire));
        self.0.store(word(turn, 0), Ordering::Release);
    }

    /// Adds a holder in the same use. False if nobody holds it any more, or the last holder is leaving.
    pub(crate) fn lend(self, turn: u32) -> bool {
        self.change(turn, |count| count + 1)
    }

    /// Removes a holder; never goes below zero, whatever the other side did.
    pub(crate) fn count_down(self, turn: u32) {
        self.change(turn, |count| count - 1);
    }

    /// Like [`Holders::count_down`], for a holder that has the chunk mapped: if the owner is quiet, the last to let go
    /// gives the pages back (SHM-4).
    pub(crate) fn let_go(self, turn: u32, quiet: &AtomicU64, free_pages: impl FnOnce()) {
        let alone = word(turn, 1);
        if quiet.load(Ordering::SeqCst) != 0
            && self.0.compare_exchange(alone, word(turn, LEAVING), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            free_pages();
            self.0.store(word(turn, 0), Ordering::Release);
        } else {
            self.count_down(turn);
        }
    }

    fn change(self, turn: u32, change: impl Fn(u32) -> u32) -> bool {
        let held = |count| 0 < count && count < LEAVING;
        let changed = |now| (turn_of(now) == turn && held(count_of(now))).then(|| word(turn, change(count_of(now))));
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, changed).is_ok()
    }
}
