//! A strided n-dimensional view of flat ranks.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use crate::extent::row_major;
use crate::run_set::RunNumber as _;
use crate::{MAX_DIMS, RankSet, Result, TopologyError};

/// Ranks laid out as `offset + Σ index·stride`, without names.
///
/// Strides may be negative and in any order, but never include a rank twice (`TOP-1`): each stride is greater than the
/// whole reach of the smaller ones. Every view that slicing, splitting or flattening a mesh creates has this property,
/// which makes membership a few divisions. In a view without ranks all strides are zero. Clones share memory.
///
/// ```
/// # use mesh_topology::Slice;
/// let slice = Slice::new(1, &[2, 3], &[8, 2])?;
/// assert_eq!(slice.iter().collect::<Vec<_>>(), [1, 3, 5, 9, 11, 13]);
/// assert_eq!(slice.position(11), Some(4));
/// assert!(!slice.contains(2));
/// # Ok::<(), mesh_topology::TopologyError>(())
/// ```
#[derive(Clone)]
pub struct Slice {
    inner: Arc<Inner>,
}

struct Inner {
    offset: usize,
    sizes: Box<[usize]>,
    strides: Box<[isize]>,
    len: usize,
    /// The smallest and the largest rank; both equal `offset` in an empty view.
    low: usize,
    high: usize,
    /// The axes longer than one, by descending step: the order for taking a rank apart.
    nest: Box<[Axis]>,
}

struct Axis {
    /// Its position among all axes.
    index: usize,
    size: usize,
    /// The absolute stride.
    step: usize,
    reversed: bool,
    /// How far the position moves when this coordinate moves by one.
    weight: usize,
    /// How far the axes below it in the nest reach.
    inner_reach: usize,
    /// Whether this axis and those below it include every rank that they span, so that no walk is needed.
    dense: bool,
}

impl Slice {
    /// A view from its parts; refuses one that overlaps itself or leaves the range of ranks.
    pub fn new(offset: usize, sizes: &[usize], strides: &[isize]) -> Result<Self> {
        if sizes.len() > MAX_DIMS {
            return Err(TopologyError::TooManyDims { got: sizes.len() });
        }
        if strides.len() != sizes.len() {
            return Err(TopologyError::LengthMismatch { what: "strides", got: strides.len(), expected: sizes.len() });
        }
        let (weights, len) = row_major(sizes)?;
        // The strides of an empty view lead nowhere: make them all the same, so that none can overflow.
        let strides = if len == 0 { &[0; MAX_DIMS][..sizes.len()] } else { strides };
        let (low, high) = bounds(offset, sizes, strides).ok_or_else(|| TopologyError::OutOfBounds {
            offset,
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
        })?;
        let nest = if len == 0 { Some(Vec::new()) } else { nest(sizes, strides, &weights) };
        let nest =
            nest.ok_or_else(|| TopologyError::Overlapping { sizes: sizes.to_vec(), strides: strides.to_vec() })?;
        Ok(Self {
            inner: Arc::new(Inner {
                offset,
                sizes: sizes.into(),
                strides: strides.into(),
                len,
                low,
                high,
                nest: nest.into(),
            }),
        })
    }

    /// All ranks of an array of these sizes, the last index varying fastest.
    pub fn row_major(sizes: &[usize]) -> Result<Self> {
        let (weights, _) = row_major(sizes)?;
        let strides: Vec<isize> = weights.iter().map(|w| w.cast_signed()).collect();
        Self::new(0, sizes, &strides)
    }

    /// The rank at index 0 of every dimension.
    pub fn offset(&self) -> usize {
        self.inner.offset
    }

    /// The sizes, outermost first.
    pub fn sizes(&self) -> &[usize] {
        &self.inner.sizes
    }

    /// The strides, outermost first.
    pub fn strides(&self) -> &[isize] {
        &self.inner.strides
    }

    /// The number of dimensions.
    pub fn ndim(&self) -> usize {
        self.inner.sizes.len()
    }

    /// The number of ranks.
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Whether it has no rank.
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }

    /// The smallest range that contains all its ranks.
    pub fn bounds(&self) -> Range<usize> {
        if self.is_empty() { self.inner.low..self.inner.low } else { self.inner.low..self.inner.high + 1 }
    }

    /// Whether it has this rank.
    pub fn contains(&self, rank: usize) -> bool {
        self.position(rank).is_some()
    }

    /// The row-major position of a rank within the view.
    pub fn position(&self, rank: usize) -> Option<usize> {
        let mut position = 0;
        self.take_apart(rank, |axis, coord| position += coord * axis.weight).then_some(position)
    }

    /// The rank at a row-major position.
    pub fn rank_at(&self, position: usize) -> Option<usize> {
        if position >= self.inner.len {
            return None;
        }
        Some(self.inner.nest.iter().fold(self.inner.low, |rank, axis| {
            let coord = position / axis.weight % axis.size;
            rank + axis.step * if axis.reversed { axis.size - 1 - coord } else { coord }
        }))
    }

    /// The coordinates of a rank.
    pub fn coordinates(&self, rank: usize) -> Option<Vec<usize>> {
        let mut coords = vec![0; self.ndim()];
        self.take_apart(rank, |axis, coord| coords[axis.index] = coord).then_some(coords)
    }

    /// The rank at these coordinates.
    pub fn rank_of(&self, coords: &[usize]) -> Option<usize> {
        if coords.len() != self.ndim() || coords.iter().zip(self.sizes()).any(|(c, n)| c >= n) {
            return None;
        }
        // Every term stays within `low..=high` (TOP-2); only intermediate sums could dip outside.
        let rank = coords.iter().zip(self.strides()).fold(self.offset().cast_signed(), |rank, (&c, &stride)| {
            rank.wrapping_add(c.cast_signed().wrapping_mul(stride))
        });
        Some(rank.cast_unsigned())
    }

    /// Calls `found` with each axis longer than one and the coordinate of `rank` in it. False if `rank` is not in the
    /// view; then what was found means nothing.
    fn take_apart(&self, rank: usize, mut found: impl FnMut(&Axis, usize)) -> bool {
        let inner = &*self.inner;
        if inner.len == 0 || rank < inner.low || rank > inner.high {
            return false;
        }
        let mut rest = rank - inner.low;
        for axis in &inner.nest {
            let coord = rest / axis.step;
            if coord >= axis.size {
                return false;
            }
            rest -= coord * axis.step;
            found(axis, if axis.reversed { axis.size - 1 - coord } else { coord });
        }
        rest == 0
    }

    /// All its ranks as a set. Costs one entry per gap, so check [`len`](Self::len) first if the view comes from an
    /// untrusted source.
    pub fn to_set(&self) -> RankSet {
        self.within(0..usize::MAX)
    }

    /// The ranks in a range, found without visiting the others: what a cast means to a host that owns a range of ranks.
    pub fn within(&self, range: Range<usize>) -> RankSet {
        let mut set = RankSet::new();
        if !self.is_empty() {
            walk(&self.inner.nest, self.inner.low, &range, &mut set);
        }
        set
    }

    /// The ranks in both views.
    pub fn intersection(&self, other: &Self) -> RankSet {
        let (a, b) = (self.bounds(), other.bounds());
        let common = a.start.max(b.start)..a.end.min(b.end);
        self.within(common.clone()).intersection(&other.within(common))
    }

    /// The ranks in this view but not in the other.
    pub fn difference(&self, other: &Self) -> RankSet {
        self.to_set().difference(&other.within(self.bounds()))
    }

    /// Whether every rank of this view is in the other.
    pub fn is_subset(&self, other: &Self) -> bool {
        if self.is_empty() {
            return true;
        }
        let (a, b) = (self.bounds(), other.bounds());
        self.len() <= other.len()
            && a.start >= b.start
            && a.end <= b.end
            && (other.is_dense() || self.iter().all(|rank| other.contains(rank)))
    }

    /// Whether no rank is in both views.
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.intersection(other).is_empty()
    }

    /// Whether it includes every rank between its smallest and its largest.
    pub fn is_dense(&self) -> bool {
        self.inner.nest.first().is_none_or(|axis| axis.dense)
    }
}

/// The smallest and the largest rank, if they are valid ranks.
fn bounds(offset: usize, sizes: &[usize], strides: &[isize]) -> Option<(usize, usize)> {
    let start = isize::try_from(offset).ok()?;
    let (mut low, mut high) = (start, start);
    for (&size, &stride) in sizes.iter().zip(strides) {
        if size > 1 {
            let reach = (size - 1).cast_signed().checked_mul(stride)?;
            let end = if reach < 0 { &mut low } else { &mut high };
            *end = end.checked_add(reach)?;
        }
    }
    Some((usize::try_from(low).ok()?, usize::try_from(high).ok()?))
}

/// The axes by descending step, or `None` if some rank would be included twice. The sizes and strides must have passed
/// [`bounds`], so that no sum overflows.
fn nest(sizes: &[usize], strides: &[isize], weights: &[usize]) -> Option<Vec<Axis>> {
    let mut nest: Vec<Axis> = (0..sizes.len())
        .filter(|&i| sizes[i] > 1)
        .map(|index| Axis {
            index,
            size: sizes[index],
            step: strides[index].unsigned_abs(),
            reversed: strides[index] < 0,
            weight: weights[index],
            inner_reach: 0,
            dense: false,
        })
        .collect();
    nest.sort_by_key(|axis| std::cmp::Reverse(axis.step));
    let (mut reach, mut count) = (0, 1);
    for axis in nest.iter_mut().rev() {
        if axis.step <= reach {
            return None;
        }
        axis.inner_reach = reach;
        reach += (axis.size - 1) * axis.step;
        count *= axis.size;
        axis.dense = count == reach + 1;
    }
    Some(nest)
}

/// Adds the ranks in `range` of the nest at `base` to `set`, in ascending order.
fn walk(nest: &[Axis], base: usize, range: &Range<usize>, set: &mut RankSet) {
    let Some((axis, below)) = nest.split_first() else {
        if range.contains(&base) {
            set.append(base.widen(), base.widen() + 1);
        }
        return;
    };
    if axis.dense {
        let end = base + (axis.size - 1) * axis.step + axis.inner_reach + 1;
        set.append(base.max(range.start).widen(), end.min(range.end).widen());
        return;
    }
    // The block at coordinate q covers base + q·step and the next inner_reach ranks.
    let first = range.start.saturating_sub(base + axis.inner_reach).div_ceil(axis.step);
    let end = range.end.saturating_sub(base).div_ceil(axis.step).min(axis.size);
    for coord in first..end {
        walk(below, base + coord * axis.step, range, set);
    }
}

impl PartialEq for Slice {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
            || (self.inner.offset == other.inner.offset
                && self.inner.sizes == other.inner.sizes
                && self.inner.strides == other.inner.strides)
    }
}

impl Eq for Slice {}

impl Hash for Slice {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.offset.hash(state);
        self.inner.sizes.hash(state);
        self.inner.strides.hash(state);
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slice(offset={}, sizes={:?}, strides={:?})", self.offset(), self.sizes(), self.strides())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_1_views_that_name_a_rank_twice_are_refused() {
        for (sizes, strides) in [(&[2, 2][..], &[1, 1][..]), (&[4], &[0]), (&[3, 3], &[2, 1]), (&[2, 3], &[-2, 1])] {
            let error = Slice::new(10, sizes, strides).unwrap_err();
            assert!(matches!(error, TopologyError::Overlapping { .. }), "{error}");
        }
        assert!(Slice::new(0, &[3, 1], &[1, 0]).is_ok(), "a stride that is never taken does not matter");
    }

    #[test]
    fn top_2_views_that_leave_the_ranks_are_refused() {
        let max = isize::MAX.unsigned_abs();
        for (offset, size, stride) in [(0, 2, -1), (max, 2, 1), (max + 1, 1, 1), (0, 3, isize::MAX), (0, 3, isize::MIN)]
        {
            let error = Slice::new(offset, &[size], &[stride]).unwrap_err();
            assert!(matches!(error, TopologyError::OutOfBounds { .. }), "{error}");
        }
        let edge = Slice::new(0, &[2], &[isize::MAX]).unwrap();
        assert_eq!(edge.iter().collect::<Vec<_>>(), [0, max]);
        assert_eq!(edge.position(max), Some(1));
        assert_eq!(edge.to_set().len(), 2);
    }

    #[test]
    fn a_column_major_view_knows_its_positions() {
        let view = Slice::new(0, &[2, 3], &[1, 2]).unwrap();
        assert_eq!(view.iter().collect::<Vec<_>>(), [0, 2, 4, 1, 3, 5]);
        assert_eq!(view.position(4), Some(2));
        assert_eq!(view.coordinates(3), Some(vec![1, 1]));
        assert_eq!(view.rank_of(&[1, 1]), Some(3));
        assert!(view.is_dense());
    }

    #[test]
    fn a_huge_dense_view_costs_nothing_to_ask() {
        let huge = Slice::row_major(&[1 << 31, 1 << 31]).unwrap();
        assert_eq!(huge.within(5..1 << 40).runs().first(), Some(&(5, (1 << 40) - 5)));
        assert_eq!(huge.rank_at((1 << 62) - 1), Some((1 << 62) - 1));
        assert!(Slice::new(3, &[4], &[1 << 40]).unwrap().is_subset(&huge));
    }

    #[test]
    fn a_host_finds_its_part_without_visiting_the_rest() {
        // Every second one of 2^40 ranks: only those in the window are touched.
        let sparse = Slice::new(0, &[1 << 39], &[2]).unwrap();
        let window = (1 << 39) + 1..(1 << 39) + 6;
        assert_eq!(sparse.within(window).iter().collect::<Vec<_>>(), [(1 << 39) + 2, (1 << 39) + 4]);
    }
}
