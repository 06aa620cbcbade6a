//! Iteration over a view.

use std::iter::FusedIterator;

use crate::{MAX_DIMS, Slice};

/// The ranks of a [`Slice`] in row-major order of the view. Within a row, a step is one addition.
#[derive(Debug, Clone)]
pub struct Ranks {
    slice: Slice,
    /// The next rank to yield.
    rank: usize,
    /// How many ranks are left.
    left: usize,
    /// How many ranks are left in this row, after `rank`.
    left_in_row: usize,
    /// The indices of the row, outermost first; the last dimension is counted by `left_in_row`.
    coords: [usize; MAX_DIMS],
}

impl Ranks {
    pub(crate) fn new(slice: Slice) -> Self {
        Self {
            rank: slice.offset(),
            left: slice.len(),
            left_in_row: slice.sizes().last().map_or(0, |size| size.saturating_sub(1)),
            coords: [0; MAX_DIMS],
            slice,
        }
    }

    /// Moves to the start of the next row. Only called while a next row exists.
    fn next_row(&mut self) {
        let (sizes, strides) = (self.slice.sizes(), self.slice.strides());
        let Some(last) = sizes.len().checked_sub(1) else {
            return;
        };
        // Wrapping, because intermediate sums may dip outside; the final sum never does (TOP-2).
        let back =
            |rank: usize, axis: usize| rank.wrapping_sub((sizes[axis] - 1).wrapping_mul(strides[axis].cast_unsigned()));
        self.rank = back(self.rank, last);
        self.left_in_row = sizes[last] - 1;
        for axis in (0..last).rev() {
            if self.coords[axis] + 1 < sizes[axis] {
                self.coords[axis] += 1;
                self.rank = self.rank.wrapping_add_signed(strides[axis]);
                return;
            }
            self.coords[axis] = 0;
            self.rank = back(self.rank, axis);
        }
    }
}

impl Iterator for Ranks {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.left == 0 {
            return None;
        }
        let rank = self.rank;
        self.left -= 1;
        if self.left_in_row > 0 {
            self.left_in_row -= 1;
            let stride = self.slice.strides().last().copied().unwrap_or(0);
            self.rank = rank.wrapping_add_signed(stride);
        } else if self.left > 0 {
            self.next_row();
        }
        Some(rank)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Ranks {}
impl FusedIterator for Ranks {}

impl Slice {
    /// The ranks in row-major order of the view.
    pub fn iter(&self) -> Ranks {
        Ranks::new(self.clone())
    }
}

impl IntoIterator for &Slice {
    type Item = usize;
    type IntoIter = Ranks;

    fn into_iter(self) -> Ranks {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_knows_how_many_are_left() {
        let mut ranks = Slice::new(5, &[2, 1, 2], &[-4, 7, 1]).unwrap().iter();
        assert_eq!(ranks.len(), 4);
        assert_eq!(ranks.by_ref().collect::<Vec<_>>(), [5, 6, 1, 2]);
        assert_eq!(ranks.len(), 0);
        assert_eq!(ranks.next(), None);
    }

    #[test]
    fn no_dimensions_yield_one_rank_and_an_empty_one_yields_none() {
        assert_eq!(Slice::new(7, &[], &[]).unwrap().iter().collect::<Vec<_>>(), [7]);
        assert_eq!(Slice::new(7, &[2, 0, 3], &[3, 3, 1]).unwrap().iter().count(), 0);
    }
}
