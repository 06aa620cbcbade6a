//! The Python functions and classes that this crate calls. `mesh_core._bundle.callables` passes them ([`crate::handover`]); after
//! that nothing is looked up by module name.

use crate::codes;
use crate::handover::handed;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Each is documented in Python.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Callables {
    pub(crate) dumps: Py<PyAny>,
    pub(crate) loads: Py<PyAny>,
    /// The interpreter's own, for what it handles correctly alone.
    pub(crate) plain_dumps: Py<PyAny>,
    /// The same, for messages without buffers.
    pub(crate) plain_loads: Py<PyAny>,
    pub(crate) arrive: Py<PyAny>,
    pub(crate) too_large: Py<PyAny>,
    pub(crate) of_native: Py<PyAny>,
    pub(crate) mesh_error: Py<PyAny>,
    pub(crate) authentication_error: Py<PyAny>,
    pub(crate) alarm: Py<PyAny>,
    pub(crate) current_actor: Py<PyAny>,
    pub(crate) in_coroutine: Py<PyAny>,
    pub(crate) on_main_thread: Py<PyAny>,
    pub(crate) set_wakeup_fd: Py<PyAny>,
    pub(crate) crowded: Py<PyAny>,
    pub(crate) refusal: Py<PyAny>,
    pub(crate) unsent: Py<PyAny>,
    pub(crate) not_spawned: Py<PyAny>,
}

static CALLABLES: PyOnceLock<Callables> = PyOnceLock::new();

/// Takes what this crate calls, and the enums whose members it returns. Only the first call has an effect.
#[pyfunction]
pub(crate) fn hold(py: Python<'_>, callables: Callables, enums: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
    enums.iter().try_for_each(codes::hold)?;
    let _ = CALLABLES.set(py, callables);
    Ok(())
}

/// Returns what was passed.
pub(crate) fn callables(py: Python<'_>) -> PyResult<&Callables> {
    handed(py, &CALLABLES)
}
