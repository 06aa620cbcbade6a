//! Memory of values that references name: it stays where it was put, and any number of readers map it.
//!
//! Readers are not counted in the slab: tickets say who holds a reference (`crate::refs`), and a chunk's only count
//! here is its owner's. Each reader maps it privately (SHM-2), if possible with what an earlier one has left (`spare`).

use super::mapping::Mapping;
use super::spare::Spares;
use super::{Memory, Pool, Room, Sent, Slab};
use crate::error::RuntimeError;
use crate::refs::{Hold, RefCounter};
use mesh_proto::{Frame, ProcAddr, SharedRef, Target};
use rustix::mm::MapFlags;
use std::sync::{Arc, Weak};

/// A kept value as mapped by its reader, which gets its own copy of pages that it writes.
#[derive(Debug)]
pub(crate) struct View {
    /// Taken out on drop.
    map: Option<Mapping>,
    data: *mut u8,
    len: usize,
    /// Where the mapping goes then, unless the slab is forgotten.
    home: Weak<Spares>,
    offset: u64,
    /// The process that mapped it. A forked copy of it touches no lock.
    pid: u32,
}

// SAFETY: plain memory, kept mapped by the field beside the pointer.
unsafe impl Send for View {}
// SAFETY: as above; readers and writers through the pointer synchronise as with any buffer.
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
    /// A holder of a chunk has let go or died. Ends the use if it was the last possible holder.
    pub(super) fn gone(&mut self, i: usize, addr: ProcAddr) {
        let holders = self.map.holders(i);
        let held = |place: &&mut Sent| !holders.are_none() && place.concerns(addr);
        let Some(place) = self.sent[i].as_mut().filter(held) else { return };
        // This may be reported more than once.
        if !place.dead.contains(&addr) {
            place.dead.push(addr);
        }
        if place.dead.len() == place.to.len() + place.also.len() {
            holders.end();
            self.sent[i] = None;
        }
    }

    /// Adds a holder of a chunk, in the same use. False if nobody holds it any more.
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
    /// The same memory, with room for kept values of this many bytes.
    pub(crate) fn keeping(mut self, bytes: u64, origin: u64) -> Self {
        // A chunk is up to twice as long as its contents.
        let budget = usize::try_from(bytes.saturating_mul(2)).unwrap_or(usize::MAX);
        self.kept = self.pool.is_some().then(|| Pool::new(budget, false, origin));
        self
    }

    /// Sets what counts references in messages. Only the first call counts.
    pub(crate) fn counted_by(&self, counter: Weak<dyn RefCounter>) {
        let _ = self.counter.set(counter);
    }

    /// Takes the references in a message that has arrived. They are held from now on.
    pub(crate) fn take_refs(&self, frame: &Frame) -> Vec<Arc<Hold>> {
        let counter = self.counter.get().and_then(Weak::upgrade);
        counter.map_or_else(Vec::new, |counter| counter.came(frame))
    }

    /// Room for a value to be kept; none if memory cannot be shared.
    pub(crate) fn keep_room(&self, len: usize, me: &Target) -> Option<Room> {
        let room = self.kept.as_ref()?.room(len, me);
        self.touch();
        room
    }

    /// Frees a value that nobody holds any more.
    pub(crate) fn unkeep(&self, at: &SharedRef) {
        if let Some(kept) = &self.kept {
            kept.release(at);
            self.touch();
        }
    }

    /// Lends a piece of a kept value to a message for another host, which gives it back like any part. False if the
    /// value is no longer kept.
    pub(crate) fn lend(&self, at: &SharedRef) -> bool {
        let Some(kept) = &self.kept else { return false };
        let slabs = kept.lock();
        let slab = slabs.values().flatten().find(|slab| at.pid == kept.pid && slab.id == at.slab);
        slab.is_some_and(|slab| slab.lend(at))
    }

    /// Lends a part that came from another host to one more receiver. False if it is not in this process's memory.
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

    /// Takes a part back from a receiver that has let go without mapping it.
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
