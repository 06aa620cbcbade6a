//! `Point`.

use mesh_topology::{Extent, Point, TopologyError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::{PyExtent, Reduced, raise, raise_key, same_items};

/// A place in an extent: a mapping from label to coordinate, with a `rank`.
///
/// Equal to another point with the same rank in an equal extent, and to a mapping with the same items.
///
/// Example:
///     >>> point = Extent.of(hosts=2, gpus=8).point(11)
///     >>> point["gpus"], point.rank, point.size("gpus")
///     (3, 11, 8)
///     >>> point == {"hosts": 1, "gpus": 3}
///     True
#[pyclass(name = "Point", module = "mesh_core", frozen, mapping)]
pub(crate) struct PyPoint(pub(crate) Point);

impl PyPoint {
    /// Creates the point at a rank given by Python.
    pub(crate) fn at(rank: isize, extent: &Extent) -> PyResult<Self> {
        let point = match usize::try_from(rank) {
            Ok(rank) => extent.point(rank),
            Err(_) => Err(TopologyError::RankOutOfRange {
                what: "rank",
                index: rank,
                len: extent.len(),
                mesh: extent.to_string(),
            }),
        };
        point.map(Self).map_err(raise)
    }

    fn items_iter(&self) -> impl ExactSizeIterator<Item = (&str, usize)> {
        self.0.extent().labels().zip(self.0.coords())
    }
}

#[pymethods]
impl PyPoint {
    #[new]
    fn new(rank: isize, extent: &PyExtent) -> PyResult<Self> {
        Self::at(rank, &extent.0)
    }

    /// The row-major index.
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank()
    }

    /// The extent that it is a place in.
    #[getter]
    fn extent(&self) -> PyExtent {
        PyExtent(self.0.extent().clone())
    }

    /// The size of one dimension of the extent.
    ///
    /// Example:
    ///     >>> Extent.of(hosts=2, gpus=8).point(0).size("gpus")
    ///     8
    fn size(&self, label: &str) -> PyResult<usize> {
        self.0.extent().size(label).map_err(raise)
    }

    /// The labels, as a mapping's keys.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.extent().labels())
    }

    /// The coordinates, as a mapping's values.
    fn values(&self) -> Vec<usize> {
        self.0.coords().collect()
    }

    /// Labels and coordinates, as a mapping's items.
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.items_iter())
    }

    /// The coordinate in a dimension, or `default` if there is no such dimension.
    #[pyo3(signature = (label, default=None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        label: &Bound<'py, PyAny>,
        default: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match label.extract().ok().and_then(|label: &str| self.0.coord(label).ok()) {
            Some(coord) => Ok(Some(coord.into_pyobject(py)?.into_any())),
            None => Ok(default),
        }
    }

    fn __getitem__(&self, label: &str) -> PyResult<usize> {
        self.0.coord(label).map_err(raise_key)
    }

    fn __contains__(&self, label: &Bound<'_, PyAny>) -> bool {
        label.extract().is_ok_and(|label| self.0.extent().axis(label).is_some())
    }

    fn __len__(&self) -> usize {
        self.0.extent().ndim()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.keys(py)?.try_iter()?.into_any())
    }

    fn __eq__<'py>(&self, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        let equal = match other.cast::<Self>() {
            Ok(other) => Some(self.0 == other.get().0),
            Err(_) => same_items(self.items_iter(), other)?,
        };
        equal.map_or_else(
            || Ok(py.NotImplemented().into_bound(py)),
            |equal| Ok(equal.into_pyobject(py)?.to_owned().into_any()),
        )
    }

    fn __hash__(&self) -> u64 {
        super::hash_of(&self.0)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Reduced<'py, (usize, PyExtent)> {
        (slf.get_type(), (slf.get().rank(), slf.get().extent()))
    }
}
