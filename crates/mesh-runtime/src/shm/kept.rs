//! Memory of values that references name: it stays where it was put, and any number of readers map it.
//!
//! Its readers do not count themselves in the slab: who holds a reference is known by tickets (`crate::refs`), and the one
//! count that a chunk has here is its owner's. Each reader maps it privately (SHM-2), where it can with what an earlier one
//! has left (`spare`).

use super::mapping::Mapping;
use super::spare::Spares;
use super::{Memory, Pool, Room, Sent, Slab};
use crate::error::RuntimeError;
use crate::refs::{Hold, RefCounter};
use mesh_proto::{Frame, ProcAddr, SharedRef, Target};
use rustix::mm::MapFlags;
use std::sync::{Arc, Weak};

/// A kept value as its reader has it mapped: pages that it writes become its own.
#[derive(Debug)]
pub(crate) struct View {
    /// Taken out when it is dropped.
    map: Option<Mapping>,
    data: *mut u8,
    len: usize,
    /// Where the mapping goes then, unless the slab is forgotten.
    home: Weak<Spares>,
    offset: u64,
    /// The process that mapped it; a forked copy of it touches no lock.
    pid: u32,
}

// SAFETY: plain memory, kept mapped by the field beside the pointer.
unsafe impl Send for View {}
// SAFETY: as above; whoever reads and writes through the pointer synchronises as with any buffer.
unsafe impl Sync for View {}

impl View {
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.data
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Some(map) = self.map.take()
            && self.pid == std::process::id()
            && let Some(home) = self.home.upgrade()
        {
            home.give(self.offset, map);
        }
    }
}

impl Slab {
    /// Somebody holds a chunk no more, or has died: nobody else can be left that does.
    pub(super) fn gone(&mut self, i: usize, addr: ProcAddr) {
        let holders = self.map.holders(i);
        let held = |place: &&mut Sent| !holders.are_none() && place.concerns(addr);
        let Some(place) = self.sent[i].as_mut().filter(held) else { return };
        // It may be told more than once.
        if !place.dead.contains(&addr) {
            place.dead.push(addr);
        }
        if place.dead.len() == place.to.len() + place.also.len() {
            holders.end();
            self.sent[i] = None;
        }
    }

    /// One more holds a chunk, in the same use of it. False if nobody does any more.
    fn lend(&self, at: &SharedRef) -> bool {
        let chunk = at.chunk as usize;
        chunk < self.count && self.map.holders(chunk).lend(at.turn)
    }
}

impl Sent {
    fn concerns(&self, addr: ProcAddr) -> bool {
        self.to.index_of(addr).is_some() || self.also.contains(&addr)
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

    /// Says who keeps account of references in messages. The first word counts.
    pub(crate) fn counted_by(&self, counter: Weak<dyn RefCounter>) {
        let _ = self.counter.set(counter);
    }

    /// What a message that has come has of references in it; they are held from here on.
    pub(crate) fn take_refs(&self, frame: &Frame) -> Vec<Arc<Hold>> {
        let counter = self.counter.get().and_then(Weak::upgrade);
        counter.map_or_else(Vec::new, |counter| counter.came(frame))
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
        slab.is_some_and(|slab| slab.lend(at))
    }

    /// Sends a part that has come from another host to one more. False if it does not lie in memory of this process.
    pub(crate) fn lend_to(&self, at: &SharedRef, who: ProcAddr) -> bool {
        let Some(pool) = self.pool.as_ref().filter(|pool| pool.pid == at.pid) else { return false };
        let mut slabs = pool.lock();
        let Some(slab) = slabs.values_mut().flatten().find(|slab| slab.id == at.slab) else { return false };
        if !slab.lend(at) {
            return false;
        }
        let sent = slab.sent.get_mut(at.chunk as usize).and_then(Option::as_mut);
        if let Some(sent) = sent.filter(|sent| !sent.concerns(who)) {
            sent.also.push(who);
        }
        true
    }

    /// One of those it was lent to has it no more, without having mapped it.
    pub(crate) fn take_back(&self, at: &SharedRef, from: ProcAddr) {
        let Some(pool) = self.pool.as_ref().filter(|pool| pool.release(at)) else { return };
        if let Some(slab) = pool.lock().values_mut().flatten().find(|slab| slab.id == at.slab)
            && (at.chunk as usize) < slab.count
            && slab.map.holders(at.chunk as usize).are_of(at.turn)
        {
            slab.gone(at.chunk as usize, from);
        }
    }

    /// Maps a kept value.
    pub(crate) fn view(&self, at: &SharedRef, len: u64) -> Result<View, RuntimeError> {
        let view = self.mapped.find(at, len, |entry, _, _, len| {
            let offset = at.offset;
            let map = match entry.spares.take(offset, len) {
                Some(map) => map,
                None => Mapping::new(&entry.fd, offset, len, MapFlags::PRIVATE)?,
            };
            let home = Arc::downgrade(&entry.spares);
            Ok(View { data: map.at(0), map: Some(map), len, home, offset, pid: std::process::id() })
        });
        self.touch();
        view
    }
}
