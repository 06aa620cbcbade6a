//! `Region`, also called `Shape`.

use mesh_topology::{Region, Selector, Span, TopologyError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySlice as PyBuiltinSlice};

use super::convert::{Reduced, bad_type, by_name, count, listable, raise, rank_list};
use super::slice::RankIterator;
use super::{PyExtent, PyPoint, PySlice};

/// A part of a mesh that messages can be sent to: labels over a strided view of the mesh's ranks.
///
/// Ranks are always those of the whole mesh, however often the region is sliced. Iterating yields
/// ranks, `in` tests for a rank, and `len` counts them. `Shape` is another name for this class.
///
/// Example:
///     >>> mesh = Region.whole(Extent.of(hosts=2, gpus=8))
///     >>> mesh.slice(hosts=1, gpus=slice(0, 8, 2)).ranks()
///     [8, 10, 12, 14]
///     >>> mesh.split(gpus=("pair", "member"), member=2).extent
///     Extent(hosts=2, pair=4, member=2)
#[pyclass(name = "Region", module = "mesh_core", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyRegion(Region);

impl PyRegion {
    /// Wraps a region, for other bindings.
    pub(crate) fn wrap(region: Region) -> Self {
        Self(region)
    }

    /// Returns the region itself, for other bindings. Cloning it is cheap.
    pub(crate) fn inner(&self) -> &Region {
        &self.0
    }
}

#[pymethods]
impl PyRegion {
    #[new]
    #[pyo3(signature = (labels, ndslice))]
    #[allow(clippy::needless_pass_by_value)] // arguments arrive owned
    fn new(labels: Vec<String>, ndslice: &PySlice) -> PyResult<Self> {
        Region::new(&labels, ndslice.0.clone()).map(Self).map_err(raise)
    }

    /// Creates the region of a whole mesh.
    ///
    /// Example:
    ///     >>> len(Region.whole(Extent.of(hosts=2, gpus=8)))
    ///     16
    #[staticmethod]
    fn whole(extent: &PyExtent) -> Self {
        Self::wrap(Region::whole(&extent.0))
    }

    /// The names and sizes of the region's dimensions.
    #[getter]
    fn extent(&self) -> PyExtent {
        PyExtent(self.0.extent().clone())
    }

    /// The labels, outermost first.
    #[getter]
    fn labels<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.extent().labels())
    }

    /// The sizes, outermost first.
    #[getter]
    fn sizes(&self) -> Vec<usize> {
        self.0.extent().sizes().to_vec()
    }

    /// The strides, outermost first; negative where the region runs backwards.
    #[getter]
    fn strides(&self) -> Vec<isize> {
        self.0.as_slice().strides().to_vec()
    }

    /// The rank at index 0 of every dimension.
    #[getter]
    fn offset(&self) -> usize {
        self.0.as_slice().offset()
    }

    /// The view without labels.
    #[getter]
    fn ndslice(&self) -> PySlice {
        PySlice(self.0.as_slice().clone())
    }

    /// The size of one dimension; `ValueError` with the nearest name if there is none.
    fn size(&self, label: &str) -> PyResult<usize> {
        self.0.extent().size(label).map_err(raise)
    }

    /// Keeps part of some dimensions: an int drops its dimension, a slice keeps it.
    ///
    /// Slices work as for a list, except that selecting nothing is an `IndexError`.
    ///
    /// Example:
    ///     >>> Region.whole(Extent.of(hosts=2, gpus=8)).slice(gpus=slice(-2, None)).ranks()
    ///     [6, 7, 14, 15]
    #[pyo3(signature = (**dims))]
    fn slice(&self, dims: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut selectors = Vec::new();
        for (name, value) in dims.into_iter().flat_map(|dims| dims.iter()) {
            let name: String = name.extract()?;
            let selector = selector(&name, &value)?;
            selectors.push((name, selector));
        }
        self.0.slice(&by_name(&selectors)).map(Self).map_err(raise)
    }

    /// Splits dimensions: `dim=("outer", "inner")`, with sizes by name, one of which may be inferred.
    ///
    /// Example:
    ///     >>> Region.whole(Extent.of(gpus=8)).split(gpus=("dp", "tp"), tp=4).extent
    ///     Extent(dp=2, tp=4)
    #[pyo3(signature = (**dims))]
    fn split(&self, dims: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let (mut splits, mut sizes) = (Vec::new(), Vec::new());
        for (name, value) in dims.into_iter().flat_map(|dims| dims.iter()) {
            let name: String = name.extract()?;
            if let Ok(size) = value.extract() {
                let size = count(&name, size)?;
                sizes.push((name, size));
            } else {
                let expected = "a tuple of new names, or the int size of a new dimension";
                let parts: Vec<String> = value.extract().map_err(|_| bad_type(&name, expected, &value))?;
                splits.push((name, parts));
            }
        }
        let splits: Vec<(&str, Vec<&str>)> =
            splits.iter().map(|(name, parts)| (name.as_str(), parts.iter().map(String::as_str).collect())).collect();
        self.0.split_named(&splits, &by_name(&sizes)).map(Self).map_err(raise)
    }

    /// Merges all dimensions into one; `ValueError` if the ranks are not evenly spaced.
    ///
    /// Example:
    ///     >>> Region.whole(Extent.of(hosts=2, gpus=8)).flatten("workers").extent
    ///     Extent(workers=16)
    fn flatten(&self, name: &str) -> PyResult<Self> {
        self.0.flatten(name).map(Self).map_err(raise)
    }

    /// Renames dimensions, all at once.
    ///
    /// Example:
    ///     >>> Region.whole(Extent.of(hosts=2, gpus=8)).rename(gpus="workers").extent
    ///     Extent(hosts=2, workers=8)
    #[pyo3(signature = (**names))]
    fn rename(&self, names: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut pairs = Vec::new();
        for (from, to) in names.into_iter().flat_map(|names| names.iter()) {
            let from: String = from.extract()?;
            let name: String = to.extract().map_err(|_| bad_type(&from, "the new name, a str", &to))?;
            pairs.push((from, name));
        }
        let pairs: Vec<(&str, &str)> = pairs.iter().map(|(from, to)| (from.as_str(), to.as_str())).collect();
        self.0.rename(&pairs).map(Self).map_err(raise)
    }

    /// The ranks, in row-major order of the region.
    fn ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        listable(self.0.len())?;
        PyList::new(py, self.0.iter())
    }

    /// The coordinates of a mesh rank within the region; `IndexError` if it is not in the region.
    ///
    /// Example:
    ///     >>> Region.whole(Extent.of(hosts=2, gpus=8)).slice(hosts=1).point_of(11)
    ///     Point(gpus=3 of 8)
    fn point_of(&self, rank: isize) -> PyResult<PyPoint> {
        let point = match usize::try_from(rank) {
            Ok(rank) => self.0.point_of(rank),
            Err(_) => Err(TopologyError::NotInRegion { rank, region: self.0.to_string() }),
        };
        point.map(PyPoint).map_err(raise)
    }

    /// The position of a rank within the region; `IndexError` if it is not in the region.
    ///
    /// Example:
    ///     >>> Region.whole(Extent.of(hosts=2, gpus=8)).slice(hosts=1).position(11)
    ///     3
    fn position(&self, rank: isize) -> PyResult<usize> {
        Ok(self.point_of(rank)?.0.rank())
    }

    /// The rank at a position within the region.
    ///
    /// Example:
    ///     >>> Region.whole(Extent.of(hosts=2, gpus=8)).slice(hosts=1).rank_at(3)
    ///     11
    fn rank_at(&self, position: isize) -> PyResult<usize> {
        let rank = match usize::try_from(position) {
            Ok(position) => self.0.rank_at(position),
            Err(_) => Err(TopologyError::RankOutOfRange {
                what: "position",
                index: position,
                len: self.0.len(),
                mesh: self.0.extent().to_string(),
            }),
        };
        rank.map_err(raise)
    }

    /// The ranks in both regions, ascending. Only meaningful if both belong to the same mesh.
    ///
    /// Example:
    ///     >>> mesh = Region.whole(Extent.of(hosts=2, gpus=4))
    ///     >>> mesh.slice(hosts=1).intersection(mesh.slice(gpus=slice(0, 2)))
    ///     [4, 5]
    fn intersection(&self, py: Python<'_>, other: &Self) -> PyResult<Py<PyList>> {
        listable(self.0.len().min(other.inner().len()))?;
        rank_list(py, &self.0.as_slice().intersection(other.inner().as_slice()))
    }

    /// The ranks in this region but not in the other, ascending.
    ///
    /// Example:
    ///     >>> mesh = Region.whole(Extent.of(hosts=2, gpus=4))
    ///     >>> mesh.slice(hosts=1).difference(mesh.slice(gpus=0))
    ///     [5, 6, 7]
    fn difference(&self, py: Python<'_>, other: &Self) -> PyResult<Py<PyList>> {
        listable(self.0.len())?;
        rank_list(py, &self.0.as_slice().difference(other.inner().as_slice()))
    }

    /// Whether every rank of this region is in the other.
    fn issubset(&self, other: &Self) -> bool {
        self.0.as_slice().is_subset(other.inner().as_slice())
    }

    /// Whether no rank is in both regions.
    fn isdisjoint(&self, other: &Self) -> bool {
        self.0.as_slice().is_disjoint(other.inner().as_slice())
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

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, (Bound<'py, PyList>, PySlice)>> {
        Ok((slf.get_type(), (slf.get().labels(slf.py())?, slf.get().ndslice())))
    }
}

/// What a keyword argument selects from its dimension.
fn selector(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Selector> {
    if let Ok(index) = value.extract() {
        return Ok(Selector::At(index));
    }
    let Ok(slice) = value.cast::<PyBuiltinSlice>() else {
        return Err(bad_type(name, "an int or a slice", value));
    };
    let end = |which: &str| -> PyResult<Option<isize>> {
        let end = slice.getattr(which)?;
        end.extract().map_err(|_| bad_type(&format!("the {which} of {name}'s slice"), "an int or None", &end))
    };
    Ok(Selector::Span(Span::new(end("start")?, end("stop")?, end("step")?)))
}
