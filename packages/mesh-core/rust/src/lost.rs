//! Ranks that will never reply.

use crate::codes;
use crate::target::{Addr, addr_tuple};
use mesh_proto::hosts::Fate;
use mesh_proto::{Deserter, Ended, Exit, ProcAddr};
use pyo3::prelude::*;
use std::sync::Arc;

/// A rank that will never reply, and why.
#[pyclass(name = "Lost", module = "mesh_core._native", frozen)]
pub(crate) struct PyLost {
    ended: Arc<Ended>,
    /// Its process.
    at: ProcAddr,
    /// The actor's name, if it was not called but had the port of the call.
    holder: Option<Arc<str>>,
}

impl PyLost {
    /// Creates the loss of a rank that was called.
    pub(crate) fn called(ended: Arc<Ended>, at: ProcAddr) -> Self {
        Self { ended, at, holder: None }
    }

    /// Creates the loss of a rank that had the port of a call.
    pub(crate) fn holding(lost: Deserter) -> Self {
        Self { ended: lost.ended, at: lost.addr, holder: Some(lost.name) }
    }
}

#[pymethods]
impl PyLost {
    /// How it ended: a `FailureKind`.
    #[getter]
    fn kind(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        codes::end(py, self.ended.kind())
    }

    /// Whether its process was never created, as far as is known.
    #[getter]
    fn never_ran(&self) -> bool {
        self.ended.never_ran()
    }

    /// Why its host is dead, in one word; empty if it did not end with its host.
    #[getter]
    fn fate(&self) -> &'static str {
        self.ended.fate().map_or("", Fate::word)
    }

    #[getter]
    fn pid(&self) -> Option<u32> {
        self.ended.pid
    }

    #[getter]
    fn exitcode(&self) -> Option<i32> {
        self.ended.exit.code()
    }

    #[getter]
    fn signal(&self) -> Option<i32> {
        self.ended.exit.signal()
    }

    /// Whether the kernel killed it because memory ran out.
    #[getter]
    fn out_of_memory(&self) -> bool {
        self.ended.exit == Exit::OutOfMemory
    }

    #[getter]
    fn orderly(&self) -> bool {
        self.ended.orderly
    }

    /// What is known beyond the exit status, as text.
    #[getter]
    fn reason(&self) -> String {
        self.ended.reason.to_string()
    }

    /// The mesh and rank of its process. No other process of the job has both, although a rank may have had several processes.
    #[getter]
    fn process(&self) -> (u64, u32) {
        (self.at.mesh, self.at.rank)
    }

    /// The number of the host on which it was.
    #[getter]
    fn host(&self) -> u32 {
        self.at.host
    }

    /// The mesh, rank and host where the call's port was, and the actor's name; `None` if it was called itself.
    #[getter]
    fn holder(&self) -> Option<(u64, u32, u32, String)> {
        let name = self.holder.as_ref()?;
        let (mesh, rank, host): Addr = addr_tuple(self.at);
        Some((mesh, rank, host, name.to_string()))
    }

    #[getter]
    fn stderr_tail(&self) -> Vec<String> {
        self.ended.stderr_tail.clone()
    }
}
