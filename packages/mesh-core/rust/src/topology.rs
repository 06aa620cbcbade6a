//! `mesh_topology` as Python classes: conversions and error mapping, no decisions.
//!
//! All classes are frozen, hashable, picklable and cheap to copy: each is a pointer or two to shared parts.

mod extent;
mod point;
mod region;
mod slice;

use std::hash::{DefaultHasher, Hash, Hasher};

use mesh_topology::TopologyError;
use pyo3::exceptions::{PyIndexError, PyKeyError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping, PyType};

pub(crate) use extent::PyExtent;
pub(crate) use point::PyPoint;
pub(crate) use region::PyRegion;
pub(crate) use slice::PySlice;

/// What `__reduce__` returns: the class, and the arguments that create an equal object.
type Reduced<'py, Args> = (Bound<'py, PyType>, Args);

/// More ranks than this are not listed, only iterated: no mesh has as many, so something is already wrong.
const MOST_LISTED: usize = 1 << 26;

/// Adds the classes to the native module.
pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyExtent>()?;
    m.add_class::<PyPoint>()?;
    m.add_class::<PySlice>()?;
    m.add_class::<PyRegion>()?;
    m.add("Shape", m.py().get_type::<PyRegion>())?;
    PyMapping::register::<PyExtent>(m.py())?;
    PyMapping::register::<PyPoint>(m.py())
}

/// Converts an error: `IndexError` if something is out of range, otherwise `ValueError`.
pub(crate) fn raise(error: TopologyError) -> PyErr {
    use TopologyError::{EmptySpan, IndexOutOfRange, NotInRegion, RankOutOfRange};
    match error {
        EmptySpan { .. } | IndexOutOfRange { .. } | NotInRegion { .. } | RankOutOfRange { .. } => {
            PyIndexError::new_err(error.to_string())
        }
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// Like [`raise`], for `mapping[label]`, where Python's protocols expect a `KeyError`.
fn raise_key(error: TopologyError) -> PyErr {
    PyKeyError::new_err(error.to_string())
}

/// Checks a count from Python; a negative one is named in the error.
fn count(what: &str, number: isize) -> PyResult<usize> {
    usize::try_from(number).map_err(|_| PyValueError::new_err(format!("{what} is {number}; it must not be negative")))
}

fn counts(labels: &[String], sizes: &[isize]) -> PyResult<Vec<usize>> {
    let name = |i| labels.get(i).map_or("a size", String::as_str);
    sizes.iter().enumerate().map(|(i, &size)| count(name(i), size)).collect()
}

/// Keyword arguments whose values are integers.
fn int_kwargs(kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<Vec<(String, isize)>> {
    let Some(kwargs) = kwargs else {
        return Ok(Vec::new());
    };
    kwargs
        .iter()
        .map(|(name, value)| {
            let name: String = name.extract()?;
            let number = value.extract().map_err(|_| bad_type(&name, "an int", &value))?;
            Ok((name, number))
        })
        .collect()
}

fn bad_type(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    match value.get_type().name() {
        Ok(found) => PyTypeError::new_err(format!("{name} must be {expected}, not {found}")),
        Err(error) => error,
    }
}

/// Borrows the names of keyword arguments.
fn by_name<T: Clone>(items: &[(String, T)]) -> Vec<(&str, T)> {
    items.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}

/// Refuses to list more than fits into memory.
fn listable(len: usize) -> PyResult<()> {
    if len > MOST_LISTED {
        let message = format!("{len} ranks are too many to list (at most {MOST_LISTED}); iterate over them instead");
        return Err(PyOverflowError::new_err(message));
    }
    Ok(())
}

fn rank_list(py: Python<'_>, set: &mesh_topology::RankSet) -> PyResult<Py<PyList>> {
    listable(set.len())?;
    Ok(PyList::new(py, set.iter().collect::<Vec<_>>())?.unbind())
}

/// A hash that is the same for equal values within one process.
fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Whether one of our mappings has the same items as another mapping; `None` if the other is not a mapping.
fn same_items<'a>(
    ours: impl ExactSizeIterator<Item = (&'a str, usize)>,
    other: &Bound<'_, PyAny>,
) -> PyResult<Option<bool>> {
    let Ok(other) = other.cast::<PyMapping>() else {
        return Ok(None);
    };
    if other.len()? != ours.len() {
        return Ok(Some(false));
    }
    for (label, number) in ours {
        if !other.contains(label)? || !other.get_item(label)?.eq(number)? {
            return Ok(Some(false));
        }
    }
    Ok(Some(true))
}
