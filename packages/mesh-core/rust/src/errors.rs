//! Errors of the runtime as Python exceptions.

use crate::callables::{Callables, callables};
use crate::codes;
use mesh_runtime::RuntimeError;
use mesh_runtime::tls::CredentialError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::fmt::Display;

/// The fields of an error, named as in its Python exception.
fn fields<'py>(py: Python<'py>, error: &RuntimeError) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    match error {
        RuntimeError::Full { addr, budget, .. } => {
            fields.set_item("rank", addr.rank)?;
            fields.set_item("budget", *budget)?;
        }
        RuntimeError::NoSuchProc(addr) => fields.set_item("rank", addr.rank)?,
        RuntimeError::PortClosed(why) => fields.set_item("reason", why.to_string())?,
        _ => {}
    }
    Ok(fields)
}

/// Creates the exception for an error of the runtime. Python chooses the class by the kind of the error.
pub(crate) fn raise(py: Python<'_>, error: &RuntimeError) -> PyErr {
    let made = fields(py, error).and_then(|fields| {
        let of_native = callables(py)?.of_native.bind(py);
        of_native.call1((codes::error(py, error.kind())?, error.to_string(), fields))
    });
    made.map_or_else(|failed| failed, PyErr::from_value)
}

/// Creates an exception of a class that Python passed to this crate.
pub(crate) fn raise_as(py: Python<'_>, class: impl FnOnce(&Callables) -> &Py<PyAny>, text: impl Display) -> PyErr {
    let made = callables(py).and_then(|python| class(python).bind(py).call1((text.to_string(),)));
    made.map_or_else(|failed| failed, PyErr::from_value)
}

/// Creates the exception for credentials that cannot be used, created or shown.
pub(crate) fn raise_credentials(py: Python<'_>, error: &CredentialError) -> PyErr {
    raise_as(py, |python| &python.authentication_error, error)
}

/// Converts errors of the runtime to exceptions.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, RuntimeError> {
    #[inline]
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}
