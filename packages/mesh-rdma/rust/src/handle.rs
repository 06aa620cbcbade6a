//! What travels instead of the memory.

use crate::door::raise;
use mesh_transfer::Handle;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;

/// The number of an export.
pub(crate) fn key(slot: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(slot)
}

/// Names memory of a process.
#[pyclass(name = "Handle", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyHandle(pub(crate) Arc<Handle>);

#[pymethods]
impl PyHandle {
    #[staticmethod]
    fn decode(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        Handle::decode(data).map(|handle| Self(Arc::new(handle))).map_err(|error| raise(py, &error))
    }

    fn encode<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.encode())
    }

    fn slice(&self, py: Python<'_>, start: u64, length: u64) -> PyResult<Self> {
        self.0.slice(start, length).map(|handle| Self(Arc::new(handle))).map_err(|error| raise(py, &error))
    }

    /// The number of its export, which no other export of the owner ever has.
    #[getter]
    fn key(&self) -> u64 {
        key(self.0.slot, self.0.generation)
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len
    }

    #[getter]
    fn writable(&self) -> bool {
        self.0.writable
    }

    #[getter]
    fn pid(&self) -> u32 {
        self.0.pid
    }

    #[getter]
    fn host(&self) -> &str {
        &self.0.host
    }

    #[getter]
    fn realm<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.realm)
    }

    #[getter]
    fn sections(&self) -> Vec<String> {
        self.0.sections.iter().map(|section| section.name.clone()).collect()
    }
}
