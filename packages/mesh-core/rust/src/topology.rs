//! `mesh_topology` as Python classes: conversions and error mapping, no decisions.
//!
//! All classes are frozen, hashable, picklable and cheap to copy: each is a pointer or two to shared parts.

mod convert;
mod extent;
mod region;
mod slice;

use pyo3::prelude::*;
use pyo3::types::PyMapping;

pub(crate) use extent::{PyExtent, PyPoint};
pub(crate) use region::PyRegion;
pub(crate) use slice::PySlice;

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
