//! The bytes of a kept value: the number of parts, their lengths, then the parts. The first is the envelope.

use super::Hold;
use crate::PartData;
use crate::buffer::Buffer;
use crate::shm::{SharedPart, View as Mapped};
use bytes::Bytes;
use std::ops::Range;
use std::sync::Arc;

const WORD: usize = 8;
/// Parts begin at multiples of this, the length of a cache line, which numerical code may rely on.
const ALIGN: usize = 64;

/// Where a value's parts are.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) head: Vec<u8>,
    pub(crate) starts: Vec<usize>,
    pub(crate) len: usize,
}

impl Layout {
    pub(crate) fn of(lens: impl ExactSizeIterator<Item = usize>) -> Self {
        let mut head = (lens.len() as u64).to_le_bytes().to_vec();
        let mut at = WORD * (1 + lens.len());
        let mut starts = Vec::with_capacity(lens.len());
        for len in lens {
            head.extend_from_slice(&(len as u64).to_le_bytes());
            at = at.next_multiple_of(ALIGN);
            starts.push(at);
            at += len;
        }
        Self { head, starts, len: at }
    }

    /// Where the parts of a packed value are; none if these bytes are not one.
    fn read(raw: &[u8]) -> Option<Vec<Range<usize>>> {
        let word = |at: usize| {
            let bytes = raw.get(at..)?.first_chunk::<WORD>()?;
            usize::try_from(u64::from_le_bytes(*bytes)).ok()
        };
        let count = word(0)?;
        if count == 0 || count > raw.len() / WORD {
            return None;
        }
        let mut at = WORD * (1 + count);
        let part = |i: usize| {
            let start = at.checked_next_multiple_of(ALIGN)?;
            let end = start.checked_add(word(WORD * (1 + i))?).filter(|end| *end <= raw.len())?;
            at = end;
            Some(start..end)
        };
        (0..count).map(part).collect()
    }
}

/// Lays out a value's parts in one block of memory.
pub fn pack(parts: &[Buffer<'_>]) -> Bytes {
    let layout = Layout::of(parts.iter().map(|part| part.len()));
    let mut out = vec![0; layout.len];
    out[..layout.head.len()].copy_from_slice(&layout.head);
    for (start, part) in layout.starts.iter().zip(parts) {
        part.pieces().for_each(|(at, piece)| out[start + at..][..piece.len()].copy_from_slice(piece));
    }
    out.into()
}

#[derive(Debug)]
enum Data {
    Mapped(Mapped),
    Part(SharedPart),
    Bytes(Bytes),
}

/// A value's bytes as its reader has them. They, and the value, stay as long as this lives (REF-1).
#[derive(Debug)]
pub struct View {
    data: Data,
    parts: Vec<Range<usize>>,
    _hold: Option<Arc<Hold>>,
}

impl View {
    fn new(data: Data, hold: Option<Arc<Hold>>) -> Option<Self> {
        let raw = match &data {
            Data::Mapped(view) => raw(view.as_ptr(), view.len()),
            Data::Part(part) => raw(part.as_ptr(), part.len()),
            Data::Bytes(bytes) => bytes,
        };
        let parts = Layout::read(raw)?;
        Some(Self { data, parts, _hold: hold })
    }

    /// A mapped value.
    pub(crate) fn mapped(view: Mapped, hold: &Arc<Hold>) -> Option<Self> {
        Self::new(Data::Mapped(view), Some(Arc::clone(hold)))
    }

    /// A value made by [`pack`], or one that came in a message.
    pub fn of_bytes(bytes: Bytes) -> Option<Self> {
        Self::new(Data::Bytes(bytes), None)
    }

    /// A value that came as one part of a message.
    pub fn of_part(part: PartData) -> Option<Self> {
        match part {
            PartData::Inline(bytes) => Self::of_bytes(bytes),
            PartData::Shared(part) => Self::new(Data::Part(part), None),
        }
    }

    /// The number of parts, including the envelope.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The envelope.
    pub fn envelope(&self) -> &[u8] {
        let Range { start, end } = self.parts[0].clone();
        &self.bytes()[start..end]
    }

    /// One part, if its reader may write into it. Its writes are private.
    pub fn writable(&self, part: usize) -> Option<(*mut u8, usize)> {
        let range = self.parts.get(part)?.clone();
        let base = match &self.data {
            Data::Mapped(view) => view.as_ptr(),
            Data::Part(part) => part.as_ptr(),
            Data::Bytes(_) => return None,
        };
        Some((base.wrapping_add(range.start), range.len()))
    }

    /// One part.
    pub fn part(&self, part: usize) -> &[u8] {
        &self.bytes()[self.parts[part].clone()]
    }

    fn bytes(&self) -> &[u8] {
        match &self.data {
            Data::Mapped(view) => raw(view.as_ptr(), view.len()),
            Data::Part(part) => raw(part.as_ptr(), part.len()),
            Data::Bytes(bytes) => bytes,
        }
    }
}

fn raw<'a>(data: *mut u8, len: usize) -> &'a [u8] {
    // SAFETY: callers pass memory that stays mapped as long as the object from which they borrow it.
    unsafe { std::slice::from_raw_parts(data, len) }
}
