//! The named sizes of a mesh.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::select::pick_index;
use crate::{MAX_DIMS, Result, TopologyError, label};

/// The ordered names and sizes of a mesh's dimensions; the last one varies fastest.
///
/// Cloning shares: an extent is one pointer. An extent without dimensions holds one element; one with a
/// dimension of size zero holds none.
///
/// ```
/// # use mesh_topology::Extent;
/// let extent = Extent::new([("hosts", 2), ("gpus", 8)])?;
/// assert_eq!(extent.len(), 16);
/// assert_eq!(extent.rank_of(&[("hosts", 1), ("gpus", 3)])?, 11);
/// # Ok::<(), mesh_topology::TopologyError>(())
/// ```
#[derive(Clone)]
pub struct Extent {
    inner: Arc<Inner>,
}

struct Inner {
    labels: Box<[Box<str>]>,
    sizes: Box<[usize]>,
    /// Row-major weights: how far the rank moves when a coordinate moves by one.
    weights: Box<[usize]>,
    len: usize,
}

impl Extent {
    /// An extent of the given dimensions, outermost first.
    pub fn new<S: AsRef<str>>(dims: impl IntoIterator<Item = (S, usize)>) -> Result<Self> {
        let (labels, sizes): (Vec<S>, Vec<usize>) = dims.into_iter().unzip();
        Self::from_parts(&labels, &sizes)
    }

    /// An extent from parallel lists of labels and sizes.
    pub fn from_parts<S: AsRef<str>>(labels: &[S], sizes: &[usize]) -> Result<Self> {
        if labels.len() > MAX_DIMS {
            return Err(TopologyError::TooManyDims { got: labels.len() });
        }
        if sizes.len() != labels.len() {
            return Err(TopologyError::LengthMismatch { what: "sizes", got: sizes.len(), expected: labels.len() });
        }
        labels.iter().try_for_each(|l| label::check(l.as_ref()))?;
        label::check_unique(labels)?;
        let (weights, len) = row_major(sizes)?;
        Ok(Self {
            inner: Arc::new(Inner {
                labels: labels.iter().map(|l| l.as_ref().into()).collect(),
                sizes: sizes.into(),
                weights: weights.into(),
                len,
            }),
        })
    }

    /// The number of dimensions.
    pub fn ndim(&self) -> usize {
        self.inner.sizes.len()
    }

    /// The number of elements: the product of the sizes.
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Whether some dimension has size zero.
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }

    /// The labels, outermost first.
    pub fn labels(&self) -> impl ExactSizeIterator<Item = &str> + DoubleEndedIterator + Clone {
        self.inner.labels.iter().map(AsRef::as_ref)
    }

    /// The sizes, outermost first.
    pub fn sizes(&self) -> &[usize] {
        &self.inner.sizes
    }

    /// Labels and sizes, outermost first.
    pub fn dims(&self) -> impl ExactSizeIterator<Item = (&str, usize)> + DoubleEndedIterator + Clone {
        self.labels().zip(self.sizes().iter().copied())
    }

    /// How far the rank moves when the coordinate in each dimension moves by one.
    pub fn weights(&self) -> &[usize] {
        &self.inner.weights
    }

    /// The position of a dimension among the others, if it exists.
    pub fn axis(&self, label: &str) -> Option<usize> {
        self.labels().position(|l| l == label)
    }

    /// Like [`axis`](Self::axis), but with an error that lists the existing dimensions.
    pub fn expect_axis(&self, label: &str) -> Result<usize> {
        self.axis(label).ok_or_else(|| TopologyError::UnknownDim {
            name: label.chars().take(crate::MAX_LABEL_LEN).collect(),
            mesh: self.describe(),
            nearest: label::nearest(label, self.labels()).map(str::to_owned),
        })
    }

    /// The size of one dimension.
    pub fn size(&self, label: &str) -> Result<usize> {
        Ok(self.sizes()[self.expect_axis(label)?])
    }

    /// The rank of the point with these coordinates, one for each dimension, in any order; negative ones count from the
    /// end.
    pub fn rank_of(&self, coords: &[(&str, isize)]) -> Result<usize> {
        let mut by_axis = [None; MAX_DIMS];
        for &(label, coord) in coords {
            let axis = self.expect_axis(label)?;
            if by_axis[axis].replace(coord).is_some() {
                return Err(TopologyError::DuplicateLabel { label: label.to_owned() });
            }
        }
        let mut rank = 0;
        for (axis, (label, size)) in self.dims().enumerate() {
            let coord = by_axis[axis]
                .ok_or_else(|| TopologyError::MissingCoord { dim: label.to_owned(), mesh: self.describe() })?;
            let coord = pick_index(coord, label, size)?;
            rank += coord * self.weights()[axis];
        }
        Ok(rank)
    }

    /// The coordinate along `axis` of a rank of this extent.
    pub(crate) fn coord(&self, rank: usize, axis: usize) -> usize {
        rank / self.inner.weights[axis] % self.inner.sizes[axis]
    }

    /// The dimensions, or words for having none, for messages.
    pub(crate) fn describe(&self) -> String {
        if self.ndim() == 0 { "no dimensions".to_owned() } else { self.to_string() }
    }
}

/// Row-major weights and the product of sizes; refuses whatever does not fit in `isize` (`TOP-2`).
///
/// Zeros count as one in the check, so that weights do not overflow in an empty extent either.
pub(crate) fn row_major(sizes: &[usize]) -> Result<(Vec<usize>, usize)> {
    let mut weights = vec![1; sizes.len()];
    let mut product = 1_usize;
    for (weight, &size) in weights.iter_mut().zip(sizes).rev() {
        *weight = product;
        product = product
            .checked_mul(size.max(1))
            .filter(|&p| p <= isize::MAX.unsigned_abs())
            .ok_or_else(|| TopologyError::TooLarge { sizes: sizes.to_vec() })?;
    }
    Ok((weights, if sizes.contains(&0) { 0 } else { product }))
}

impl PartialEq for Extent {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
            || (self.inner.sizes == other.inner.sizes && self.inner.labels == other.inner.labels)
    }
}

impl Eq for Extent {}

impl Hash for Extent {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.labels.hash(state);
        self.inner.sizes.hash(state);
    }
}

/// `hosts=2, gpus=8`
impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (label, size)) in self.dims().enumerate() {
            write!(f, "{}{label}={size}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extent({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_dimension_varies_fastest() {
        let extent = Extent::new([("a", 2), ("b", 3), ("c", 4)]).unwrap();
        assert_eq!(extent.weights(), [12, 4, 1]);
        assert_eq!(extent.rank_of(&[("c", 3), ("a", 1), ("b", 2)]).unwrap(), 23);
        assert_eq!(extent.rank_of(&[("c", -1), ("a", -1), ("b", -3)]).unwrap(), 15);
    }

    #[test]
    fn no_dimensions_hold_one_element_and_a_zero_holds_none() {
        let none: [(&str, usize); 0] = [];
        assert_eq!(Extent::new(none).unwrap().len(), 1);
        let empty = Extent::new([("a", 3), ("b", 0)]).unwrap();
        assert!(empty.is_empty());
        assert_eq!(empty.points().len(), 0);
        assert!(empty.point(0).is_err());
    }

    #[test]
    fn top_2_a_product_that_does_not_fit_is_refused() {
        let half = 1_usize << 32;
        assert!(Extent::new([("a", half), ("b", half / 4)]).is_ok());
        for sizes in [[half, half], [half, half / 2], [usize::MAX, 0]] {
            let error = Extent::from_parts(&["a", "b"], &sizes).unwrap_err();
            assert!(matches!(error, TopologyError::TooLarge { .. }), "{error}");
        }
    }

    #[test]
    fn an_unknown_dimension_is_told_what_exists() {
        let extent = Extent::new([("hosts", 2), ("gpus", 8)]).unwrap();
        assert_eq!(
            extent.size("gpu").unwrap_err().to_string(),
            "no dimension 'gpu'; this mesh has hosts=2, gpus=8 — did you mean 'gpus'?"
        );
        assert_eq!(
            extent.size("tensor").unwrap_err().to_string(),
            "no dimension 'tensor'; this mesh has hosts=2, gpus=8"
        );
    }

    #[test]
    fn coordinates_must_be_complete_in_range_and_given_once() {
        let extent = Extent::new([("hosts", 2), ("gpus", 8)]).unwrap();
        let error = |coords: &[(&str, isize)]| extent.rank_of(coords).unwrap_err();
        assert!(matches!(error(&[("hosts", 1)]), TopologyError::MissingCoord { dim, .. } if dim == "gpus"));
        assert!(matches!(error(&[("hosts", 2), ("gpus", 0)]), TopologyError::IndexOutOfRange { .. }));
        assert!(matches!(error(&[("hosts", 1), ("hosts", 0)]), TopologyError::DuplicateLabel { .. }));
    }

    #[test]
    fn too_many_and_mismatched_dimensions_are_refused() {
        let many: Vec<_> = (0..=MAX_DIMS).map(|i| (format!("d{i}"), 1)).collect();
        assert_eq!(Extent::new(many[1..].to_vec()).unwrap().ndim(), MAX_DIMS);
        assert_eq!(Extent::new(many).unwrap_err(), TopologyError::TooManyDims { got: MAX_DIMS + 1 });
        assert!(matches!(Extent::from_parts(&["a"], &[1, 2]), Err(TopologyError::LengthMismatch { .. })));
    }
}
