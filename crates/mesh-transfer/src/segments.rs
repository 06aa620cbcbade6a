//! Memory as a list of pieces: one for contiguous memory, several for strided arrays.

use crate::error::TransferError;
use std::sync::Arc;

/// The most pieces that an array may have.
pub const MAX_SEGMENTS: usize = 1 << 20;

/// One contiguous piece of a process's memory. The address is only a number: it may be another process's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// The kind of memory at an address. CUDA gives each address of a process to only one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Space {
    /// Memory that the processor reads and writes.
    #[default]
    Host,
    /// Memory of a GPU, which only the CUDA driver copies.
    Cuda {
        /// The stream whose queued work must finish before the memory is used; none if there is no such work.
        stream: Option<u64>,
    },
}

/// Pieces of memory in the order of their bytes. None is empty, and none continues the previous one. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    repr: Repr,
    space: Space,
}

/// A single piece, nearly always the case, needs no allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Repr {
    Few(Option<Segment>),
    Many(Arc<Many>),
}

impl Default for Repr {
    fn default() -> Self {
        Self::Few(None)
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Many {
    list: Vec<Segment>,
    /// Where each piece ends, counted from the first byte of all.
    ends: Vec<u64>,
}

impl Many {
    fn push(&mut self, segment: Segment) -> Result<(), TransferError> {
        if segment.len == 0 {
            return Ok(());
        }
        let end = self.ends.last().copied().unwrap_or(0).checked_add(segment.len).ok_or_else(too_large)?;
        segment.addr.checked_add(segment.len).ok_or_else(too_large)?;
        if let (Some(last), Some(last_end)) = (self.list.last_mut(), self.ends.last_mut())
            && last.addr + last.len == segment.addr
        {
            last.len += segment.len;
            *last_end = end;
            return Ok(());
        }
        self.list.push(segment);
        self.ends.push(end);
        Ok(())
    }
}

impl From<Many> for Segments {
    fn from(many: Many) -> Self {
        match many.list[..] {
            [] => Self::default(),
            [one] => Self::of(Repr::Few(Some(one))),
            _ => Self::of(Repr::Many(Arc::new(many))),
        }
    }
}

impl Segments {
    fn of(repr: Repr) -> Self {
        Self { repr, space: Space::Host }
    }

    /// The same addresses, as memory of this kind.
    pub fn within(self, space: Space) -> Self {
        Self { space, ..self }
    }

    /// The kind of memory.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Whether only the CUDA driver may read or write it.
    pub fn is_cuda(&self) -> bool {
        matches!(self.space, Space::Cuda { .. })
    }

    /// Fails for memory that the processor cannot reach.
    pub fn check_host(&self) -> Result<(), TransferError> {
        if self.is_cuda() {
            return Err(TransferError::invalid(
                "the memory must be the processor's, got memory of a GPU; copy it first",
            ));
        }
        Ok(())
    }

    /// One contiguous piece.
    pub fn one(addr: u64, len: u64) -> Self {
        let fits = len > 0 && addr.checked_add(len).is_some();
        Self::of(Repr::Few(fits.then_some(Segment { addr, len })))
    }

    /// Makes segments of these pieces, merging adjacent ones.
    pub fn new(list: impl IntoIterator<Item = Segment>) -> Result<Self, TransferError> {
        let mut made = Many::default();
        for segment in list {
            made.push(segment)?;
        }
        Ok(made.into())
    }

    /// The elements of an array, in row-major order; `shape` and `strides` (in bytes) are as in the buffer protocol.
    pub fn strided(addr: u64, shape: &[u64], strides: &[i64], item: u64) -> Result<Self, TransferError> {
        if shape.len() != strides.len() {
            return Err(TransferError::invalid("an array must have as many strides as dimensions"));
        }
        if item == 0 || shape.contains(&0) {
            return Ok(Self::default());
        }
        // Merge the contiguous innermost dimensions into one run.
        let (mut run, mut outer) = (item, shape.len());
        while outer > 0 && (shape[outer - 1] == 1 || i64::try_from(run).is_ok_and(|run| strides[outer - 1] == run)) {
            run = run.checked_mul(shape[outer - 1]).ok_or_else(too_large)?;
            outer -= 1;
        }
        let count = shape[..outer].iter().try_fold(1_u64, |all, n| all.checked_mul(*n)).ok_or_else(too_large)?;
        if count > MAX_SEGMENTS as u64 {
            return Err(TransferError::invalid(format!(
                "an array of {count} separate pieces cannot be transferred; the limit is {MAX_SEGMENTS}. \
                 Make a contiguous copy of it."
            )));
        }
        let mut made = Many::default();
        let mut index = vec![0_u64; outer];
        for _ in 0..count {
            let offset = index.iter().zip(strides).fold(0_i64, |sum, (i, stride)| {
                sum.wrapping_add(stride.wrapping_mul(i64::try_from(*i).unwrap_or(i64::MAX)))
            });
            made.push(Segment { addr: addr.wrapping_add_signed(offset), len: run })?;
            for dim in (0..outer).rev() {
                index[dim] += 1;
                if index[dim] < shape[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
        Ok(made.into())
    }

    /// The total number of bytes.
    pub fn len(&self) -> u64 {
        match &self.repr {
            Repr::Few(piece) => piece.map_or(0, |piece| piece.len),
            Repr::Many(many) => many.ends.last().copied().unwrap_or(0),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pieces.
    pub fn list(&self) -> &[Segment] {
        match &self.repr {
            Repr::Few(piece) => piece.as_slice(),
            Repr::Many(many) => &many.list,
        }
    }

    /// The pieces that hold `len` bytes from `start` on, which must lie inside.
    pub fn window(&self, start: u64, len: u64) -> impl Iterator<Item = Segment> + '_ {
        debug_assert!(start.checked_add(len).is_some_and(|end| end <= self.len()), "a window lies inside");
        let (list, before) = match &self.repr {
            Repr::Few(piece) => (piece.as_slice(), 0),
            Repr::Many(many) => {
                let first = many.ends.partition_point(|end| *end <= start);
                (&many.list[first..], if first == 0 { 0 } else { many.ends[first - 1] })
            }
        };
        let mut left = len;
        let mut skip = start - before;
        list.iter().map_while(move |segment| {
            if left == 0 {
                return None;
            }
            let len = (segment.len - skip).min(left);
            let piece = Segment { addr: segment.addr + skip, len };
            left -= len;
            skip = 0;
            Some(piece)
        })
    }

    /// Whether they share any byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        let sorted = |segments: &Self| {
            let mut list = segments.list().to_vec();
            list.sort_unstable_by_key(|segment| segment.addr);
            list
        };
        let (ours, theirs) = (sorted(self), sorted(other));
        let (mut ours, mut theirs) = (ours.iter().peekable(), theirs.iter().peekable());
        while let (Some(one), Some(other)) = (ours.peek(), theirs.peek()) {
            if one.addr + one.len <= other.addr {
                ours.next();
            } else if other.addr + other.len <= one.addr {
                theirs.next();
            } else {
                return true;
            }
        }
        false
    }

    /// Whether each piece of the other lies inside one of these.
    pub fn contains(&self, other: &Self) -> bool {
        let inside = |one: &Segment, other: &Segment| {
            one.addr <= other.addr && other.addr - one.addr <= one.len && other.len <= one.len - (other.addr - one.addr)
        };
        other.list().iter().all(|piece| self.list().iter().any(|each| inside(each, piece)))
    }

    /// Returns `len` bytes from `start` on, or an error if they are not inside.
    pub fn part(&self, start: u64, len: u64) -> Result<Self, TransferError> {
        if start.checked_add(len).is_none_or(|end| end > self.len()) {
            let text = format!("{len} bytes from {start} on are not within memory of {} bytes", self.len());
            return Err(TransferError::invalid(text));
        }
        Ok(self.cut(start, len))
    }

    /// A window as separate segments.
    pub fn cut(&self, start: u64, len: u64) -> Self {
        let mut made = Many::default();
        for segment in self.window(start, len) {
            // Cannot overflow: it is part of a list whose sum fits.
            let _ = made.push(segment);
        }
        Self::from(made).within(self.space)
    }
}

fn too_large() -> TransferError {
    TransferError::invalid("the memory must end inside the address space; this array's shape and strides do not")
}
