//! What the classes share: values from Python, and errors for it.

use mesh_topology::TopologyError;
use pyo3::exceptions::{PyIndexError, PyKeyError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping, PyType};
use std::hash::{DefaultHasher, Hash, Hasher};

/// What `__reduce__` returns: the class, and the arguments that create an equal object.
pub(super) type Reduced<'py, Args> = (Bound<'py, PyType>, Args);

/// More ranks than this are not listed, only iterated: no mesh has as many, so something is already wrong.
const MOST_LISTED: usize = 1 << 26;

/// Converts an error: `IndexError` if something is out of range, otherwise `ValueError`.
pub(super) fn raise(error: TopologyError) -> PyErr {
    use TopologyError::{EmptySpan, IndexOutOfRange, NotInRegion, RankOutOfRange};
    match error {
        EmptySpan { .. } | IndexOutOfRange { .. } | NotInRegion { .. } | RankOutOfRange { .. } => {
            PyIndexError::new_err(error.to_string())
        }
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// Like [`raise`], for `mapping[label]`, where Python's protocols expect a `KeyError`.
pub(super) fn raise_key(error: TopologyError) -> PyErr {
    PyKeyError::new_err(error.to_string())
}

/// Checks a count from Python; a negative one is named in the error.
pub(super) fn count(what: &str, number: isize) -> PyResult<usize> {
    usize::try_from(number).map_err(|_| PyValueError::new_err(format!("{what} is {number}; it must not be negative")))
}

pub(super) fn counts(labels: &[String], sizes: &[isize]) -> PyResult<Vec<usize>> {
    let name = |i| labels.get(i).map_or("a size", String::as_str);
    sizes.iter().enumerate().map(|(i, &size)| count(name(i), size)).collect()
}

/// Keyword arguments whose values are integers.
pub(super) fn int_kwargs(kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<Vec<(String, isize)>> {
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

pub(super) fn bad_type(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    match value.get_type().name() {
        Ok(found) => PyTypeError::new_err(format!("{name} must be {expected}, not {found}")),
        Err(error) => error,
    }
}

/// Borrows the names of keyword arguments.
pub(super) fn by_name<T: Clone>(items: &[(String, T)]) -> Vec<(&str, T)> {
    items.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}

/// Refuses to list more than fits into memory.
pub(super) fn listable(len: usize) -> PyResult<()> {
    if len > MOST_LISTED {
        let message = format!("{len} ranks are too many to list (at most {MOST_LISTED}); iterate over them instead");
        return Err(PyOverflowError::new_err(message));
    }
    Ok(())
}

pub(super) fn rank_list(py: Python<'_>, set: &mesh_topology::RankSet) -> PyResult<Py<PyList>> {
    listable(set.len())?;
    Ok(PyList::new(py, set.iter().collect::<Vec<_>>())?.unbind())
}

/// A hash that is the same for equal values within one process.
pub(super) fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Whether one of our mappings has the same items as another mapping; `None` if the other is not a mapping.
pub(super) fn same_items<'a>(
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
