//! SIGTERM: what calls Python's handler, and kills the process if that takes too long.

use crate::errors::raise;
use crate::time::duration;
use mesh_runtime::sigterm;
use pyo3::prelude::*;

/// Installs a handler before the one that Python just installed: a second signal, or `grace` seconds, kill the process.
#[pyfunction]
pub(crate) fn guard_sigterm(py: Python<'_>, grace: f64) -> PyResult<()> {
    sigterm::guard(duration(grace)?).map_err(|error| raise(py, &error))
}

/// Called when Python's handler runs.
#[pyfunction]
pub(crate) fn begin_sigterm(py: Python<'_>, grace: f64) -> PyResult<()> {
    sigterm::begin(duration(grace)?).map_err(|error| raise(py, &error))
}

/// Runs Python's handler again: the exception it raised was lost.
#[pyfunction]
pub(crate) fn repeat_sigterm() {
    sigterm::repeat();
}

/// Ends the wait for SIGTERM.
#[pyfunction]
pub(crate) fn release_sigterm() {
    sigterm::release();
}
