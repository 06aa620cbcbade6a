//! Operations under way.

use crate::action::Listed;
use crate::door::leave;
use crate::promise::NativePromise;
use mesh_transfer::{Operation, Ops as _};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::sync::Arc;

/// Copies and atomic operations that were submitted together.
#[pyclass(name = "Operation", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyOperation {
    operation: Arc<Operation>,
    /// The operations, if they are several.
    listed: Option<Listed>,
}

impl PyOperation {
    pub(crate) fn new(operation: Arc<Operation>, listed: Option<Listed>) -> Self {
        Self { operation, listed }
    }
}

#[pymethods]
impl PyOperation {
    fn done(&self) -> bool {
        self.operation.is_done()
    }

    /// Wait for the outcome, and return what each atomic operation has found, none for copies, or raise.
    fn result(&self, py: Python<'_>) -> PyResult<Vec<Option<u64>>> {
        let found = leave(py, || self.operation.wait())?;
        let Some(listed) = &self.listed else { return Ok(found.into_iter().map(Some).collect()) };
        let is_atomic = listed.ops().iter().map(|op| op.work.is_atomic());
        Ok(found.into_iter().zip(is_atomic).map(|(value, is_atomic)| is_atomic.then_some(value)).collect())
    }

    fn cancel(&self) {
        self.operation.cancel();
    }

    /// Finish a promise of mesh-core when the outcome is there.
    fn finishes(&self, capsule: &Bound<'_, PyCapsule>) -> PyResult<()> {
        let promise = NativePromise::of(capsule)?;
        self.operation.on_done(move || promise.finish());
        Ok(())
    }
}
