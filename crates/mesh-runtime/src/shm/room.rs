//! Chunks of this process's memory that are written piece by piece.

use super::mapping::Mapping;
use crate::buffer::Buffer;
use mesh_proto::SharedRef;
use std::sync::Arc;

/// Where a chunk is mapped.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) at: *mut u8,
    _map: Arc<Mapping>,
}

// SAFETY: only an address; code that reads or writes there says why it may.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

/// A chunk of this process's memory that is being written. It is given back if dropped before [`Room::done`].
#[derive(Debug)]
pub(crate) struct Room {
    pub(super) at: SharedRef,
    pub(super) map: Arc<Mapping>,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) holders: u32,
    pub(super) fresh: bool,
}

impl Room {
    /// Writes bytes at a place in the chunk.
    ///
    /// # Panics
    /// If they do not fit.
    pub(crate) fn write(&self, place: usize, bytes: &[u8]) {
        self.fill(place, bytes, 0);
    }

    /// The same, on up to `spare` cores beside this one.
    ///
    /// # Panics
    /// If they do not fit.
    pub(crate) fn fill(&self, place: usize, bytes: &[u8], spare: usize) {
        self.lay(place, Buffer::of(&[bytes]), spare);
    }

    /// The same for a buffer.
    ///
    /// # Panics
    /// If it does not fit.
    pub(crate) fn lay(&self, place: usize, buffer: Buffer<'_>, spare: usize) {
        let len = buffer.len();
        assert!(place.checked_add(len).is_some_and(|end| end <= self.len), "a part is as long as it says");
        if self.fresh {
            self.map.populate(self.offset + place, len);
        }
        // SAFETY: the range is in the chunk, as asserted, which is ours until its holders hear of it; the map keeps it
        // mapped, and the bytes are not in it.
        unsafe { self.map.write(self.offset + place, buffer, spare) };
    }

    /// Where it is, for code that writes there by other means. It stays there as long as the returned value lives.
    pub(crate) fn place(&self) -> Place {
        if self.fresh {
            self.map.populate(self.offset, self.len);
        }
        Place { at: self.map.at(self.offset), _map: Arc::clone(&self.map) }
    }

    /// How many bytes it is for.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Ends the writing: its holders are about to hear of it.
    pub(crate) fn done(mut self) -> SharedRef {
        self.holders = 0;
        self.at
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        for _ in 0..self.holders {
            self.map.holders(self.at.chunk as usize).count_down(self.at.turn);
        }
    }
}
