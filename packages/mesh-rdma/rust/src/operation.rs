//! Operations under way.

use crate::door::leave;
use crate::promise::NativePromise;
use mesh_transfer::Operation;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::sync::Arc;

/// Copies and atomic operations that were submitted together.
#[pyclass(name = "Operation", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyOperation(pub(crate) Arc<Operation>);

#[pymethods]
impl PyOperation {
    fn done(&self) -> bool {
        self.0.is_done()
    }

    /// Wait for the outcome, and return what each operation has found, or raise.
    fn result(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        leave(py, || self.0.wait())
    }

    fn cancel(&self) {
        self.0.cancel();
    }

    /// Finish a promise of mesh-core when the outcome is there.
    fn finishes(&self, capsule: &Bound<'_, PyCapsule>) -> PyResult<()> {
        let promise = NativePromise::of(capsule)?;
        self.0.on_done(move || promise.finish());
        Ok(())
    }
}
