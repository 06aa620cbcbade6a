//! `Extent` and `Point`.

use mesh_topology::{Extent, Point, TopologyError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::convert::{Reduced, by_name, counts, int_kwargs, raise, raise_key, same_items};

/// The ordered names and sizes of a mesh's dimensions; the last one varies fastest.
///
/// A mapping from label to size; `nelements` is the product of the sizes. Equal to another extent with the
/// same dimensions in the same order, and to a mapping with the same items.
///
/// Example:
///     >>> extent = Extent(["hosts", "gpus"], [2, 8])
///     >>> extent == Extent.of(hosts=2, gpus=8)
///     True
///     >>> extent.nelements, extent["gpus"], extent.rank(hosts=1, gpus=3)
///     (16, 8, 11)
///     >>> extent.point(11)
///     Point(hosts=1, gpus=3 of 2×8)
#[pyclass(name = "Extent", module = "mesh_core", frozen, mapping)]
pub(crate) struct PyExtent(pub(crate) Extent);

#[pymethods]
impl PyExtent {
    #[new]
    #[allow(clippy::needless_pass_by_value)] // arguments arrive owned
    fn new(labels: Vec<String>, sizes: Vec<isize>) -> PyResult<Self> {
        let sizes = counts(&labels, &sizes)?;
        Ok(Self(Extent::from_parts(&labels, &sizes).map_err(raise)?))
    }

    /// Creates an extent from keyword arguments, outermost first.
    ///
    /// Example:
    ///     >>> Extent.of(hosts=2, gpus=8)
    ///     Extent(hosts=2, gpus=8)
    #[staticmethod]
    #[pyo3(signature = (**sizes))]
    fn of(sizes: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let (labels, sizes) = int_kwargs(sizes)?.into_iter().unzip();
        Self::new(labels, sizes)
    }

    /// The labels, outermost first.
    #[getter]
    fn labels<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.labels())
    }

    /// The sizes, outermost first.
    #[getter]
    fn sizes(&self) -> Vec<usize> {
        self.0.sizes().to_vec()
    }

    /// The number of elements: the product of the sizes.
    #[getter]
    fn nelements(&self) -> usize {
        self.0.len()
    }

    /// The size of one dimension; `ValueError` with the nearest name if there is none.
    ///
    /// Example:
    ///     >>> Extent.of(hosts=2, gpus=8).size("gpus")
    ///     8
    fn size(&self, label: &str) -> PyResult<usize> {
        self.0.size(label).map_err(raise)
    }

    /// The point at a row-major rank.
    ///
    /// Example:
    ///     >>> dict(Extent.of(hosts=2, gpus=8).point(11))
    ///     {'hosts': 1, 'gpus': 3}
    fn point(&self, rank: isize) -> PyResult<PyPoint> {
        PyPoint::at(rank, &self.0)
    }

    /// The rank of the point with these coordinates, one for each dimension; negative ones count from the end.
    ///
    /// Example:
    ///     >>> Extent.of(hosts=2, gpus=8).rank(gpus=3, hosts=1)
    ///     11
    #[pyo3(signature = (**coords))]
    fn rank(&self, coords: Option<&Bound<'_, PyDict>>) -> PyResult<usize> {
        self.0.rank_of(&by_name(&int_kwargs(coords)?)).map_err(raise)
    }

    /// Iterates over all points in rank order.
    ///
    /// Example:
    ///     >>> [point["b"] for point in Extent.of(a=2, b=2).points()]
    ///     [0, 1, 0, 1]
    fn points(&self) -> PointIterator {
        PointIterator { extent: self.0.clone(), next: 0 }
    }

    /// The labels, as a mapping's keys.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.labels(py)
    }

    /// The sizes, as a mapping's values.
    fn values(&self) -> Vec<usize> {
        self.sizes()
    }

    /// Labels and sizes, as a mapping's items.
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.dims())
    }

    /// The size of a dimension, or `default` if there is no such dimension.
    #[pyo3(signature = (label, default=None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        label: &Bound<'py, PyAny>,
        default: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.axis(label) {
            Some(axis) => Ok(Some(self.0.sizes()[axis].into_pyobject(py)?.into_any())),
            None => Ok(default),
        }
    }

    fn __getitem__(&self, label: &str) -> PyResult<usize> {
        self.0.size(label).map_err(raise_key)
    }

    fn __contains__(&self, label: &Bound<'_, PyAny>) -> bool {
        self.axis(label).is_some()
    }

    fn __len__(&self) -> usize {
        self.0.ndim()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.labels(py)?.try_iter()?.into_any())
    }

    fn __eq__<'py>(&self, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        let equal = match other.cast::<Self>() {
            Ok(other) => Some(self.0 == other.get().0),
            Err(_) => same_items(self.0.dims(), other)?,
        };
        equal.map_or_else(
            || Ok(py.NotImplemented().into_bound(py)),
            |equal| Ok(equal.into_pyobject(py)?.to_owned().into_any()),
        )
    }

    fn __hash__(&self) -> u64 {
        super::convert::hash_of(&self.0)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, (Bound<'py, PyList>, Vec<usize>)>> {
        Ok((slf.get_type(), (slf.get().labels(slf.py())?, slf.get().sizes())))
    }
}

impl PyExtent {
    fn axis(&self, label: &Bound<'_, PyAny>) -> Option<usize> {
        self.0.axis(label.extract().ok()?)
    }
}

/// Iterates over the points of an extent.
#[pyclass(module = "mesh_core")]
pub(crate) struct PointIterator {
    extent: Extent,
    next: usize,
}

#[pymethods]
impl PointIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&mut self) -> Option<PyPoint> {
        let point = self.extent.point(self.next).ok()?;
        self.next += 1;
        Some(PyPoint(point))
    }

    fn __length_hint__(&self) -> usize {
        self.extent.len() - self.next
    }
}

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
        super::convert::hash_of(&self.0)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Reduced<'py, (usize, PyExtent)> {
        (slf.get_type(), (slf.get().rank(), slf.get().extent()))
    }
}
