//! What Python hands to this crate: the functions of [`crate::callables`] and the enums of [`crate::codes`], when either is
//! first needed. That is after the import of mesh_core, which therefore need not import the modules that have them.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Returns what is kept in `here`, and has Python hand over everything first if that is nothing.
pub(crate) fn handed<'a, T>(py: Python<'_>, here: &'a PyOnceLock<T>) -> PyResult<&'a T> {
    if let Some(kept) = here.get(py) {
        return Ok(kept);
    }
    #[expect(clippy::disallowed_methods, reason = "the one module that hands over everything else")]
    let callables = py.import("mesh_core._bundle.callables")?;
    callables.call_method0("hand_over")?;
    here.get(py).ok_or_else(|| PyRuntimeError::new_err("hand_over() did not hand everything to the native layer"))
}
