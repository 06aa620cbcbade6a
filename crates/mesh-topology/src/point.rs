//! One coordinate in an extent.

use std::fmt;

use crate::error::saturated;
use crate::{Extent, Result, TopologyError};

/// A place in an [`Extent`], stored as its rank; coordinates are computed on demand.
///
/// ```
/// # use mesh_topology::Extent;
/// let point = Extent::new([("hosts", 2), ("gpus", 8)])?.point(11)?;
/// assert_eq!(point.coord("gpus")?, 3);
/// assert_eq!(point.to_string(), "hosts=1, gpus=3 of 2×8");
/// # Ok::<(), mesh_topology::TopologyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Point {
    extent: Extent,
    rank: usize,
}

impl Point {
    /// The point at `rank` of `extent`.
    pub fn new(extent: Extent, rank: usize) -> Result<Self> {
        if rank >= extent.len() {
            return Err(TopologyError::RankOutOfRange {
                what: "rank",
                index: saturated(rank),
                len: extent.len(),
                mesh: extent.describe(),
            });
        }
        Ok(Self { extent, rank })
    }

    /// For callers that know `rank < extent.len()`.
    pub(crate) fn trusted(extent: Extent, rank: usize) -> Self {
        debug_assert!(rank < extent.len());
        Self { extent, rank }
    }

    /// The extent that it is a place of.
    pub fn extent(&self) -> &Extent {
        &self.extent
    }

    /// The row-major index.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The coordinate in one dimension.
    pub fn coord(&self, label: &str) -> Result<usize> {
        Ok(self.extent.coord(self.rank, self.extent.expect_axis(label)?))
    }

    /// The coordinates, outermost first.
    pub fn coords(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        (0..self.extent.ndim()).map(|axis| self.extent.coord(self.rank, axis))
    }
}

impl Extent {
    /// The point at a row-major rank.
    pub fn point(&self, rank: usize) -> Result<Point> {
        Point::new(self.clone(), rank)
    }

    /// All points in rank order.
    pub fn points(&self) -> impl ExactSizeIterator<Item = Point> + use<> {
        let extent = self.clone();
        (0..self.len()).map(move |rank| Point::trusted(extent.clone(), rank))
    }
}

/// `hosts=1, gpus=3 of 2×8`
impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (label, coord)) in self.extent.labels().zip(self.coords()).enumerate() {
            write!(f, "{}{label}={coord}", if i == 0 { "" } else { ", " })?;
        }
        for (i, size) in self.extent.sizes().iter().enumerate() {
            write!(f, "{}{size}", if i == 0 { " of " } else { "×" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Point({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_past_the_end_says_how_many_there_are() {
        let extent = Extent::new([("hosts", 2), ("gpus", 8)]).unwrap();
        assert_eq!(
            extent.point(16).unwrap_err().to_string(),
            "rank 16 is out of range for a mesh of 16 (hosts=2, gpus=8)"
        );
    }

    #[test]
    fn the_only_point_of_no_dimensions_has_rank_zero() {
        let extent = Extent::from_parts::<&str>(&[], &[]).unwrap();
        let point = extent.point(0).unwrap();
        assert_eq!(point.coords().len(), 0);
        assert_eq!(format!("{point:?}"), "Point()");
    }
}
