//! Which part of a dimension to keep.

use std::fmt;

use crate::{Result, TopologyError};

/// One index, which drops the dimension, or a span, which keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selector {
    /// The element at an index; negative ones count from the end.
    At(isize),
    /// A range with a step.
    Span(Span),
}

/// A range with Python's meaning: absent ends mean "all the way", negative ones count from the end, ends past the edge
/// are clamped, and a negative step goes backwards.
///
/// ```
/// # use mesh_topology::Span;
/// assert_eq!(Span::new(Some(1), Some(-1), None).to_string(), "1:-1");
/// assert_eq!(Span::every(2).to_string(), "::2");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    /// Where to begin.
    pub start: Option<isize>,
    /// Where to stop, exclusive.
    pub stop: Option<isize>,
    /// The step; absent means one.
    pub step: Option<isize>,
}

/// A span applied to a size: `count` indices from `first`, `step` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Picked {
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) step: isize,
}

impl Span {
    /// `start:stop:step`
    pub const fn new(start: Option<isize>, stop: Option<isize>, step: Option<isize>) -> Self {
        Self { start, stop, step }
    }

    /// `start:stop`
    pub const fn range(start: isize, stop: isize) -> Self {
        Self::new(Some(start), Some(stop), None)
    }

    /// `::step`
    pub const fn every(step: isize) -> Self {
        Self::new(None, None, Some(step))
    }

    /// The indices that it picks in a dimension. Picking nothing from a nonempty dimension is an error, because nobody
    /// wants a mesh without elements.
    pub(crate) fn pick(self, dim: &str, size: usize) -> Result<Picked> {
        let step = self.step.unwrap_or(1);
        if step == 0 {
            return Err(TopologyError::ZeroStep { dim: dim.to_owned() });
        }
        // Sizes fit in `isize` (TOP-2), so no sum below overflows.
        let n = size.cast_signed();
        let (lowest, highest) = if step > 0 { (0, n) } else { (-1, n - 1) };
        let resolve = |end: Option<isize>, default: isize| match end {
            None => default,
            Some(i) if i < 0 => (i.saturating_add(n)).clamp(lowest, highest),
            Some(i) => i.clamp(lowest, highest),
        };
        let (start, stop) = if step > 0 {
            (resolve(self.start, lowest), resolve(self.stop, highest))
        } else {
            (resolve(self.start, highest), resolve(self.stop, lowest))
        };
        let distance = if step > 0 { stop - start } else { start - stop };
        if distance <= 0 && size > 0 {
            return Err(TopologyError::EmptySpan { dim: dim.to_owned(), span: self.to_string(), size });
        }
        let count = if distance <= 0 { 0 } else { (distance.unsigned_abs() - 1) / step.unsigned_abs() + 1 };
        Ok(Picked { first: if count == 0 { 0 } else { start.unsigned_abs() }, count, step })
    }
}

/// Formatted as between brackets in Python.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(start) = self.start {
            write!(f, "{start}")?;
        }
        write!(f, ":")?;
        if let Some(stop) = self.stop {
            write!(f, "{stop}")?;
        }
        if let Some(step) = self.step {
            write!(f, ":{step}")?;
        }
        Ok(())
    }
}

/// The absolute index for an index that may be negative.
pub(crate) fn pick_index(index: isize, dim: &str, size: usize) -> Result<usize> {
    let absolute = if index < 0 { size.checked_sub(index.unsigned_abs()) } else { Some(index.unsigned_abs()) };
    absolute.filter(|&i| i < size).ok_or_else(|| TopologyError::IndexOutOfRange { dim: dim.to_owned(), index, size })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picks(span: Span, size: usize) -> Vec<usize> {
        let picked = span.pick("d", size).unwrap();
        (0..picked.count).map(|i| picked.first.checked_add_signed(picked.step * i.cast_signed()).unwrap()).collect()
    }

    #[test]
    fn spans_mean_what_they_mean_in_python() {
        assert_eq!(picks(Span::default(), 4), [0, 1, 2, 3]);
        assert_eq!(picks(Span::range(1, -1), 5), [1, 2, 3]);
        assert_eq!(picks(Span::range(2, 99), 5), [2, 3, 4]);
        assert_eq!(picks(Span::range(-99, 2), 5), [0, 1]);
        assert_eq!(picks(Span::every(3), 7), [0, 3, 6]);
        assert_eq!(picks(Span::every(-1), 3), [2, 1, 0]);
        assert_eq!(picks(Span::new(Some(-2), Some(0), Some(-2)), 6), [4, 2]);
        assert_eq!(picks(Span::new(None, None, Some(isize::MIN)), 3), [2]);
        assert_eq!(picks(Span::new(None, None, Some(isize::MAX)), 3), [0]);
        assert_eq!(picks(Span::default(), 0), [] as [usize; 0]);
    }

    #[test]
    fn a_span_that_picks_nothing_is_an_error() {
        assert_eq!(
            Span::range(8, 10).pick("gpus", 8).unwrap_err().to_string(),
            "gpus=8:10 selects nothing of gpus=8; a slice of a mesh holds at least one element"
        );
        assert!(Span::range(2, 2).pick("d", 4).is_err());
        assert!(matches!(Span::every(0).pick("d", 4), Err(TopologyError::ZeroStep { .. })));
    }

    #[test]
    fn indices_count_from_either_end() {
        assert_eq!(pick_index(-1, "d", 4), Ok(3));
        assert_eq!(pick_index(3, "d", 4), Ok(3));
        for index in [4, -5, isize::MIN, isize::MAX] {
            assert!(pick_index(index, "d", 4).is_err(), "{index}");
        }
        assert_eq!(
            pick_index(8, "gpus", 8).unwrap_err().to_string(),
            "index 8 is out of range for gpus=8; valid are 0 to 7 and -8 to -1"
        );
    }
}
