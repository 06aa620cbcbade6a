//! SIGTERM: Python's handler, and what kills the process if that takes too long.

use crate::errors::raise;
use crate::time::duration;
use mesh_runtime::sigterm;
use pyo3::prelude::*;

/// Puts a handler before the one that Python has just installed: a second signal, or `grace` seconds, kill.
#[pyfunction]
pub(crate) fn guard_sigterm(py: Python<'_>, grace: f64) -> PyResult<()> {
    sigterm::guard(duration(grace)?).map_err(|error| raise(py, &error))
}

/// Called when Python's handler runs.
#[pyfunction]
pub(crate) fn begin_sigterm(py: Python<'_>, grace: f64) -> PyResult<()> {
    sigterm::begin(duration(grace)?).map_err(|error| raise(py, &error))
}

/// What Python's handler raised was lost: has the handler run again.
#[pyfunction]
pub(crate) fn repeat_sigterm() {
    sigterm::repeat();
}

/// Nothing waits for SIGTERM any longer.
#[pyfunction]
pub(crate) fn release_sigterm() {
    sigterm::release();
}
