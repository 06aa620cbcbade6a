//! Copies parts of arrays, each consisting of many short pieces of one memory, to other arrays.
//!
//! GRD-1: nothing outside the given memory and the targets is read or written: both are checked when a part is added.

use crate::cma::in_lanes;
use crate::copy::copy;
use crate::error::TransferError;
use crate::segments::Segments;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a core takes at once.
const TURN: u64 = 1 << 20;
/// Short pieces are gathered here, in the first-level cache, and leave it by streaming stores.
const STAGE: usize = 16 << 10;
/// The most pieces gathered at once.
const PIECES: usize = 256;
/// Pieces of at least this length go straight to their target.
const LONG: u64 = 4 << 10;
/// How far ahead of the reads to prefetch into the second-level cache: the processor cannot predict the next piece.
const AHEAD: u64 = 48 << 10;
const CACHE_LINE: u64 = 64;

/// The pieces of one part: `counts` of them in each dimension, `steps` bytes apart.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Where in the memory the first piece begins.
    pub offset: u64,
    /// The number of pieces in each dimension, outermost first.
    pub counts: Vec<u64>,
    /// The distance in bytes between the starts of neighbouring pieces, in each dimension.
    pub steps: Vec<u64>,
    /// The length of each piece.
    pub run: u64,
}

impl Grid {
    /// The number of bytes, and the offset where the last piece ends; none if they overflow.
    fn extent(&self) -> Option<(u64, u64)> {
        let (mut bytes, mut last) = (self.run, self.offset);
        for (count, step) in self.counts.iter().zip(&self.steps) {
            bytes = bytes.checked_mul(*count)?;
            last = last.checked_add(count.checked_sub(1)?.checked_mul(*step)?)?;
        }
        Some((bytes, last.checked_add(self.run)?))
    }
}

#[derive(Debug)]
struct Part {
    grid: Grid,
    target: Segments,
}

/// Parts that are planned once and can be copied any number of times.
#[derive(Debug, Default)]
pub struct Boxes {
    parts: Vec<Part>,
    /// Where each part ends, counted from the first byte of all parts.
    ends: Vec<u64>,
    /// The least length that the memory must have.
    reach: u64,
}

impl Boxes {
    /// Adds a part, which fills the target.
    ///
    /// # Errors If the part and the target differ in length.
    pub fn add(&mut self, grid: Grid, target: Segments) -> Result<(), TransferError> {
        let is_one = grid.counts.len() == grid.steps.len() && grid.run > 0;
        let Some((bytes, end)) = grid.extent().filter(|(bytes, _)| is_one && *bytes == target.len()) else {
            let text = format!("a part of {:?} pieces of {} bytes does not fill its target", grid.counts, grid.run);
            return Err(TransferError::invalid(text));
        };
        self.reach = self.reach.max(end);
        self.ends.push(self.len() + bytes);
        self.parts.push(Part { grid, target });
        Ok(())
    }

    /// The bytes of all parts together.
    pub fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills all targets from the memory of `len` bytes at `source`, on several cores where that is faster.
    ///
    /// # Safety
    /// `source` must be readable, and the targets writable memory of this process, throughout; they must not overlap.
    ///
    /// # Errors
    /// If the parts reach beyond the memory.
    pub unsafe fn copy(&self, source: *const u8, len: u64) -> Result<(), TransferError> {
        if len < self.reach {
            let text = format!("the parts reach to byte {}, beyond memory of {len} bytes", self.reach);
            return Err(TransferError::invalid(text));
        }
        let (all, next, source) = (self.len(), AtomicU64::new(0), Shared(source));
        in_lanes(all, || {
            let at = next.fetch_add(TURN, Ordering::Relaxed);
            if at >= all {
                return Ok(false);
            }
            // SAFETY: as the caller vouches; GRD-1.
            unsafe { self.turn(source, at, (at + TURN).min(all)) };
            Ok(true)
        })
    }

    /// # Safety
    /// As for [`Self::copy`]; `from..to` must lie inside.
    unsafe fn turn(&self, source: Shared, from: u64, to: u64) {
        let mut stage = Stage { bytes: [0; STAGE], pieces: [(std::ptr::null(), 0); PIECES], count: 0, filled: 0 };
        let mut at = from;
        let first = self.ends.partition_point(|end| *end <= from);
        for (part, end) in self.parts[first..].iter().zip(&self.ends[first..]) {
            if at >= to {
                break;
            }
            let (begin, stop) = (end - part.target.len(), to.min(*end));
            // SAFETY: as the caller vouches.
            unsafe { part.copy(source, at - begin, stop - begin, &mut stage) };
            at = stop;
        }
    }
}

/// The source address, shared by all cores.
#[derive(Clone, Copy)]
struct Shared(*const u8);

// SAFETY: all threads of the process may read the memory throughout, as the caller of `Boxes::copy` promises.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// Pieces that are copied together: first one word of each cache line is read, then the pieces are copied from the
/// cache. Alternating reads and writes is slower, because the writes hold up the reads under way.
struct Stage {
    bytes: [u8; STAGE],
    pieces: [(*const u8, usize); PIECES],
    count: usize,
    /// The bytes of all pieces together.
    filled: usize,
}

impl Stage {
    fn has_room(&self, len: u64) -> bool {
        self.count < PIECES && self.filled + len as usize <= STAGE
    }

    /// Adds a piece and touches each of its lines. There must be room.
    ///
    /// # Safety
    /// The piece must be readable until the stage is emptied.
    unsafe fn add(&mut self, piece: *const u8, len: u64) {
        for at in (0..len).step_by(CACHE_LINE as usize).chain([len - 1]) {
            // SAFETY: inside the piece.
            unsafe { piece.add(at as usize).read_volatile() };
        }
        self.pieces[self.count] = (piece, len as usize);
        self.count += 1;
        self.filled += len as usize;
    }

    /// Empties the stage: returns all pieces, side by side.
    ///
    /// # Safety
    /// As for [`Self::add`].
    unsafe fn take(&mut self) -> &[u8] {
        let mut at = 0;
        for (piece, len) in &self.pieces[..self.count] {
            // SAFETY: `add` had room for it.
            unsafe { std::ptr::copy_nonoverlapping(*piece, self.bytes.as_mut_ptr().add(at), *len) };
            at += len;
        }
        (self.count, self.filled) = (0, 0);
        &self.bytes[..at]
    }
}

impl Part {
    /// Copies bytes `from..to` of the part from the source to the target.
    ///
    /// # Safety
    /// As for [`Boxes::copy`].
    unsafe fn copy(&self, source: Shared, from: u64, to: u64, stage: &mut Stage) {
        let Grid { offset, counts, steps, run } = &self.grid;
        let (mut number, mut skip) = (from / run, from % run);
        let mut index = vec![0; counts.len()];
        let mut place = *offset;
        for dim in (0..counts.len()).rev() {
            index[dim] = number % counts[dim];
            number /= counts[dim];
            place += index[dim] * steps[dim];
        }
        // A few pieces ahead in the innermost dimension.
        let ahead = steps.last().map_or(0, |step| step * (AHEAD / run).max(1));
        let (mut at, mut flushed) = (from, from);
        while at < to {
            let len = (run - skip).min(to - at);
            // SAFETY: inside, as `add` and `copy` checked (GRD-1).
            let piece = unsafe { source.0.add((place + skip) as usize) };
            if *run >= LONG {
                // SAFETY: as the caller vouches.
                unsafe { self.put(piece, at, len) };
            } else {
                fetch(piece.wrapping_add(ahead as usize), len);
                if !stage.has_room(len) {
                    // SAFETY: as the caller vouches.
                    unsafe { self.flush(stage, flushed) };
                    flushed = at;
                }
                // SAFETY: as the caller vouches; `has_room` was checked above.
                unsafe { stage.add(piece, len) };
            }
            (at, skip) = (at + len, 0);
            for dim in (0..counts.len()).rev() {
                index[dim] += 1;
                place += steps[dim];
                if index[dim] < counts[dim] {
                    break;
                }
                place -= counts[dim] * steps[dim];
                index[dim] = 0;
            }
        }
        // SAFETY: as the caller vouches.
        unsafe { self.flush(stage, flushed) };
    }

    /// Writes the staged bytes to the target at `at`.
    ///
    /// # Safety
    /// As for [`Boxes::copy`].
    unsafe fn flush(&self, stage: &mut Stage, at: u64) {
        // SAFETY: as the caller vouches.
        unsafe {
            let bytes = stage.take();
            self.put(bytes.as_ptr(), at, bytes.len() as u64);
        }
    }

    /// Writes bytes to the target at `at`.
    ///
    /// # Safety
    /// As for [`Boxes::copy`]; `from` has `len` bytes.
    unsafe fn put(&self, mut from: *const u8, at: u64, len: u64) {
        for piece in self.target.window(at, len) {
            // SAFETY: inside both, as the caller vouches.
            unsafe {
                copy(from, piece.addr as *mut u8, piece.len as usize, true);
                from = from.add(piece.len as usize);
            }
        }
    }
}

/// Prefetches what is copied soon. Addresses that are not mapped do no harm.
fn fetch(at: *const u8, len: u64) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..len + CACHE_LINE).step_by(CACHE_LINE as usize) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: part of SSE; a hint, which may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(line as usize).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, len, CACHE_LINE);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segments::Segment;

    /// Every byte of a grid, computed one by one.
    fn bytes_of(grid: &Grid, source: &[u8]) -> Vec<u8> {
        let mut starts = vec![grid.offset];
        for (count, step) in grid.counts.iter().zip(&grid.steps) {
            starts = starts.iter().flat_map(|at| (0..*count).map(move |n| at + n * step)).collect();
        }
        starts.iter().flat_map(|at| &source[*at as usize..(*at + grid.run) as usize]).copied().collect()
    }

    /// GRD-1.
    #[test]
    fn every_grid_is_copied_byte_by_byte_and_nothing_else_is_written() {
        let source: Vec<u8> = (0..9 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
        let grid = |offset, counts: &[u64], steps: &[u64], run| Grid {
            offset,
            counts: counts.into(),
            steps: steps.into(),
            run,
        };
        let grids = [
            grid(5, &[], &[], 3),
            grid(0, &[1], &[7], 7),
            grid(3, &[3000], &[2232], 372),
            grid(64, &[40, 50], &[130_000, 700], 513),
            grid(1, &[7, 3, 11], &[40_000, 5000, 37], 37),
            grid(9, &[700], &[9001], 6000),
            grid(0, &[200_000], &[3], 1),
        ];
        let mut boxes = Boxes::default();
        let mut targets: Vec<Vec<u8>> = Vec::new();
        for (n, grid) in grids.iter().enumerate() {
            let len = bytes_of(grid, &source).len();
            targets.push(vec![0xEE; 2 * len + 200]);
            let base = targets[n].as_mut_ptr() as u64 + 100;
            // Every second target is two pieces that lie apart.
            let segments = if n % 2 == 0 {
                Segments::one(base, len as u64)
            } else {
                let half = len as u64 / 2;
                let list = [(base, half), (base + half + 50, len as u64 - half)];
                Segments::new(list.map(|(addr, len)| Segment { addr, len })).unwrap()
            };
            boxes.add(grid.clone(), segments).unwrap();
        }
        // SAFETY: all of it is this test's.
        unsafe { boxes.copy(source.as_ptr(), source.len() as u64).unwrap() };
        for (n, (grid, target)) in grids.iter().zip(&targets).enumerate() {
            let expected = bytes_of(grid, &source);
            let mut wanted = vec![0xEE; target.len()];
            let half = if n % 2 == 0 { expected.len() } else { expected.len() / 2 };
            let gap = if n % 2 == 0 { 0 } else { 50 };
            wanted[100..100 + half].copy_from_slice(&expected[..half]);
            wanted[100 + half + gap..100 + gap + expected.len()].copy_from_slice(&expected[half..]);
            assert!(*target == wanted, "grid {n}");
        }
    }

    /// GRD-1, checked when a part is added.
    #[test]
    fn what_does_not_fit_is_refused() {
        let mut target = vec![0_u8; 100];
        let base = target.as_mut_ptr() as u64;
        let to = |len| Segments::one(base, len);
        let grid = |counts: &[u64], run| Grid { offset: 8, counts: counts.into(), steps: vec![20; counts.len()], run };
        let mut boxes = Boxes::default();
        assert!(boxes.is_empty());
        for (grid, len) in [
            (grid(&[5], 10), 51),
            (grid(&[5], 0), 0),
            (grid(&[0], 10), 0),
            (grid(&[u64::MAX, 3], 10), 10),
            (Grid { steps: vec![], ..grid(&[5], 10) }, 50),
            (Grid { offset: u64::MAX, ..grid(&[5], 10) }, 50),
        ] {
            assert!(boxes.add(grid, to(len)).is_err());
        }
        boxes.add(grid(&[5], 10), to(50)).unwrap();
        let source = [7_u8; 98];
        // SAFETY: all of it is this test's.
        let copied = unsafe { (boxes.copy(source.as_ptr(), 97), boxes.copy(source.as_ptr(), 98)) };
        assert!(copied.0.is_err() && copied.1.is_ok());
        assert_eq!(target[..51], [[7; 50].as_slice(), &[0]].concat());
    }
}
