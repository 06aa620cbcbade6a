//! `Slice`.

use mesh_topology::{Ranks, Slice};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use super::convert::{Reduced, count, counts, raise};

/// A strided n-dimensional view of flat ranks, `offset + Σ index·stride`, without names.
///
/// Row-major without strides. It never contains a rank twice. Iterating yields ranks, `in` tests for a
/// rank, and `slice[i]` is the rank at a position.
///
/// Example:
///     >>> view = Slice(offset=1, sizes=[2, 3], strides=[8, 2])
///     >>> list(view), 11 in view, view[-1]
///     ([1, 3, 5, 9, 11, 13], True, 13)
#[pyclass(name = "Slice", module = "mesh_core", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PySlice(pub(crate) Slice);

#[pymethods]
impl PySlice {
    #[new]
    #[pyo3(signature = (offset, sizes, strides=None))]
    #[allow(clippy::needless_pass_by_value)] // arguments arrive owned
    fn new(offset: isize, sizes: Vec<isize>, strides: Option<Vec<isize>>) -> PyResult<Self> {
        let (offset, sizes) = (count("offset", offset)?, counts(&[], &sizes)?);
        let strides = match strides {
            Some(strides) => strides,
            None => Slice::row_major(&sizes).map_err(raise)?.strides().to_vec(),
        };
        Ok(Self(Slice::new(offset, &sizes, &strides).map_err(raise)?))
    }

    /// The rank at index 0 of every dimension.
    #[getter]
    fn offset(&self) -> usize {
        self.0.offset()
    }

    /// The sizes, outermost first.
    #[getter]
    fn sizes(&self) -> Vec<usize> {
        self.0.sizes().to_vec()
    }

    /// The strides, outermost first; negative where the view runs backwards.
    #[getter]
    fn strides(&self) -> Vec<isize> {
        self.0.strides().to_vec()
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.0.ndim()
    }

    /// The index of a rank in each dimension; `IndexError` if the view does not contain it.
    ///
    /// Example:
    ///     >>> Slice(offset=1, sizes=[2, 3], strides=[8, 2]).coordinates(11)
    ///     [1, 1]
    fn coordinates(&self, rank: isize) -> PyResult<Vec<usize>> {
        usize::try_from(rank).ok().and_then(|rank| self.0.coordinates(rank)).ok_or_else(|| self.missing(rank))
    }

    /// The position of a rank within the view; `IndexError` if the view does not contain it.
    ///
    /// Example:
    ///     >>> Slice(offset=1, sizes=[2, 3], strides=[8, 2]).position(11)
    ///     4
    fn position(&self, rank: isize) -> PyResult<usize> {
        usize::try_from(rank).ok().and_then(|rank| self.0.position(rank)).ok_or_else(|| self.missing(rank))
    }

    fn __getitem__(&self, position: isize) -> PyResult<usize> {
        let absolute = if position < 0 { position.saturating_add_unsigned(self.0.len()) } else { position };
        usize::try_from(absolute).ok().and_then(|position| self.0.rank_at(position)).ok_or_else(|| {
            PyIndexError::new_err(format!("position {position} is out of range for a slice of {} ranks", self.0.len()))
        })
    }

    fn __contains__(&self, rank: &Bound<'_, PyAny>) -> bool {
        rank.extract().is_ok_and(|rank| self.0.contains(rank))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __iter__(&self) -> RankIterator {
        RankIterator(self.0.iter())
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Reduced<'py, (usize, Vec<usize>, Vec<isize>)> {
        let slice = slf.get();
        (slf.get_type(), (slice.offset(), slice.sizes(), slice.strides()))
    }
}

impl PySlice {
    fn missing(&self, rank: isize) -> PyErr {
        PyIndexError::new_err(format!("rank {rank} is not in {:?}", self.0))
    }
}

/// Iterates over the ranks of a view.
#[pyclass(module = "mesh_core")]
pub(crate) struct RankIterator(pub(crate) Ranks);

#[pymethods]
impl RankIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self) -> Option<usize> {
        self.0.next()
    }

    fn __length_hint__(&self) -> usize {
        self.0.len()
    }
}
