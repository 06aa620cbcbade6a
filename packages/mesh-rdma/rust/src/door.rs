//! The ways out of the interpreter, and how errors cross it.

use mesh_transfer::TransferError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::time::Duration;

/// Turns an error into its Python exception; Python finds the class by the error's kind.
#[expect(clippy::disallowed_methods, reason = "mesh_rdma is imported in parts, the errors only when there is one")]
pub(crate) fn raise(py: Python<'_>, error: &TransferError) -> PyErr {
    let made = py
        .import("mesh_rdma._errors")
        .and_then(|errors| errors.getattr("of_native"))
        .and_then(|of_native| of_native.call1((error.kind.word(), error.message.as_str())));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}

/// Leaves the interpreter for `body`; the only way out.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn outside<T: Send>(py: Python<'_>, body: impl FnOnce() -> T + Send) -> T {
    py.detach(body)
}

/// Leaves the interpreter for work that may fail.
pub(crate) fn leave<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T, TransferError> + Send) -> PyResult<T> {
    outside(py, body).map_err(|error| raise(py, &error))
}

/// Converts a Python timeout in seconds; none for no limit.
pub(crate) fn timeout(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(seconds) if seconds > 0.0 => Ok(Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))),
        Some(seconds) => {
            Err(PyValueError::new_err(format!("timeout must be a positive number of seconds, got {seconds}")))
        }
    }
}
