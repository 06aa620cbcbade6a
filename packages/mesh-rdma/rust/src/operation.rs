//! Operations under way.

use crate::door::leave;
use crate::promise::NativePromise;
use mesh_transfer::Operation;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::sync::Arc;

/// Copies and atomic operations submitted together.
#[pyclass(name = "Operation", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyOperation {
    operation: Arc<Operation>,
    /// Which operations are atomic, if there are several. Not the operations: their memory is released once done.
    atomics: Option<Box<[bool]>>,
}

impl PyOperation {
    pub(crate) fn new(operation: Arc<Operation>, atomics: Option<Box<[bool]>>) -> Self {
        Self { operation, atomics }
    }
}

#[pymethods]
impl PyOperation {
    fn done(&self) -> bool {
        self.operation.is_done()
    }

    /// Wait for the outcome. Return what each atomic operation found, none for copies; or raise.
    fn result(&self, py: Python<'_>) -> PyResult<Vec<Option<u64>>> {
        let found = leave(py, || self.operation.wait())?;
        let Some(atomics) = &self.atomics else { return Ok(found.into_iter().map(Some).collect()) };
        Ok(found.into_iter().zip(atomics).map(|(value, is_atomic)| is_atomic.then_some(value)).collect())
    }

    fn cancel(&self) {
        self.operation.cancel();
    }

    /// Finish a promise of mesh-core when there is an outcome.
    fn finishes(&self, capsule: &Bound<'_, PyCapsule>) -> PyResult<()> {
        let promise = NativePromise::of(capsule)?;
        self.operation.on_done(move || promise.finish());
        Ok(())
    }
}
