//! A way around the gateways for large parts of messages, which another package provides in a capsule.

use crate::runtime::PyRuntime;
use mesh_runtime::{BYPASS_VERSION, Bypass, RawBypass};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Sends parts of at least `from_bytes` bytes around the gateways, using the functions in the capsule; without one, none.
#[pyfunction]
#[pyo3(signature = (runtime, capsule, from_bytes))]
pub(crate) fn set_bypass(
    runtime: &PyRuntime,
    capsule: Option<&Bound<'_, PyCapsule>>,
    from_bytes: usize,
) -> PyResult<()> {
    let Some(capsule) = capsule else {
        runtime.0.set_bypass(None);
        return Ok(());
    };
    let raw = capsule.pointer_checked(Some(c"mesh_core.bypass"))?.cast::<RawBypass>();
    // SAFETY: the contents of a capsule with this name begin with the version.
    let version = unsafe { raw.cast::<u32>().read() };
    if version != BYPASS_VERSION {
        return Err(PyRuntimeError::new_err(format!(
            "mesh-core speaks version {BYPASS_VERSION} of mesh_core/bypass.h, but the plugin speaks version {version}; install \
             matching versions of both"
        )));
    }
    // SAFETY: it has this version, and the header requires that it stays valid until the process ends.
    runtime.0.set_bypass(Some((unsafe { Bypass::new(raw) }, from_bytes)));
    Ok(())
}
