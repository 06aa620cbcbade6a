//! Memory of values that references name: it stays where it was put, and any number of readers map it.
//!
//! Its readers do not count themselves in the slab: who holds a reference is known by tickets (`crate::refs`), and the one
//! count that a chunk has here is its owner's. Each reader maps it privately (SHM-2).

use super::{Mapping, Memory, Pool, Room, count_of, hold, turn_of};
use crate::error::RuntimeError;
use crate::refs::Hold;
use crate::runtime::Runtime;
use mesh_proto::{Frame, SharedRef, Target};
use rustix::mm::MapFlags;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// A kept value as its reader has it mapped: pages that it writes become its own.
#[derive(Debug)]
pub(crate) struct View(Mapping);

impl View {
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.0.at(0)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len
    }
}

impl Memory {
    /// The same memory, with room for kept values of so many bytes.
    pub(crate) fn keeping(mut self, bytes: u64, origin: u64) -> Self {
        // A chunk is up to twice as long as what lies in it.
        let budget = usize::try_from(bytes.saturating_mul(2)).unwrap_or(usize::MAX);
        self.kept = self.pool.is_some().then(|| Pool::new(budget, false, origin));
        self
    }

    /// Says whose memory it is. The first word counts.
    pub(crate) fn belong_to(&self, runtime: &Weak<Runtime>) {
        let _ = self.of.set(Weak::clone(runtime));
    }

    /// What a message that has come has of references in it; they are held from here on.
    pub(crate) fn take_refs(&self, frame: &Frame) -> Vec<Arc<Hold>> {
        let runtime = self.of.get().and_then(Weak::upgrade);
        runtime.map_or_else(Vec::new, |runtime| runtime.hold_carried(frame))
    }

    /// Room for a value that is to be kept; none where no memory can be shared.
    pub(crate) fn keep_room(&self, len: usize, me: &Target) -> Option<Room> {
        let room = self.kept.as_ref()?.room(len, me);
        self.touch();
        room
    }

    /// Nobody holds the value any more.
    pub(crate) fn unkeep(&self, at: &SharedRef) {
        if let Some(kept) = &self.kept {
            kept.release(at);
            self.touch();
        }
    }

    /// Lends a piece of a kept value to a message for another host; it is given back as any part of one. False if the
    /// value is not kept any more.
    pub(crate) fn lend(&self, at: &SharedRef) -> bool {
        let Some(kept) = &self.kept else { return false };
        let slabs = kept.lock();
        let slab = slabs.values().flatten().find(|slab| at.pid == kept.pid && slab.id == at.slab);
        slab.filter(|slab| (at.chunk as usize) < slab.count).is_some_and(|slab| {
            let more =
                |word| (turn_of(word) == at.turn && count_of(word) > 0).then(|| hold(at.turn, count_of(word) + 1));
            slab.map.holders(at.chunk as usize).fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
        })
    }

    /// Maps a kept value.
    pub(crate) fn view(&self, at: &SharedRef, len: u64) -> Result<View, RuntimeError> {
        let view = self
            .mapped
            .find(at, len, |entry, _, _, len| Mapping::new(&entry.fd, at.offset, len, MapFlags::PRIVATE).map(View));
        self.touch();
        view
    }
}
