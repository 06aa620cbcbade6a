//! A process's part in transfers.

use crate::door::{leave, raise, timeout as limit};
use crate::handle::PyHandle;
use crate::memory::PyMemory;
use crate::operation::PyOperation;
use mesh_transfer::{Engine, Export, Need, Op, Work};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// Offers memory, and transfers.
#[pyclass(name = "Engine", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyEngine(Arc<Engine>);

/// What keeps memory offered. To drop it is to close it.
#[pyclass(name = "Export", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyExport {
    engine: Arc<Engine>,
    export: Arc<Export>,
}

impl Drop for PyExport {
    fn drop(&mut self) {
        self.engine.exports().close(&self.export);
    }
}

#[pymethods]
impl PyExport {
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.engine.exports().close(&self.export));
    }
}

type Standing = (&'static str, bool, bool, bool, bool, Option<String>);
type Candidates = (Vec<String>, Vec<(String, String)>);

/// One operation as Python has it: which, on what, with what memory, at what offset, and two numbers.
type Asked = (String, Py<PyHandle>, Option<Py<PyMemory>>, u64, u64, u64);

fn work(kind: &str, memory: Option<&PyMemory>, offset: u64, first: u64, second: u64) -> PyResult<Work> {
    let local = || {
        let memory = memory.ok_or_else(|| PyValueError::new_err("a copy must have memory of this process"))?;
        Ok::<_, PyErr>(memory.segments.clone())
    };
    Ok(match kind {
        "read" => Work::Read { local: local()?, offset },
        "write" => Work::Write { local: local()?, offset },
        "fetch_add" => Work::FetchAdd { offset, value: first },
        "compare_and_swap" => Work::CompareAndSwap { offset, expected: first, desired: second },
        other => return Err(PyValueError::new_err(format!("no operation is called {other:?}"))),
    })
}

#[pymethods]
impl PyEngine {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        Ok(Self(leave(py, Engine::new)?))
    }

    /// Name, the four capabilities, and why it does not work here.
    fn transports(&self) -> Vec<Standing> {
        let standing = self.0.transports().iter();
        standing
            .map(|each| {
                let can = each.capabilities;
                (each.name, can.copies, can.atomics, can.remote, can.one_sided, each.broken.clone())
            })
            .collect()
    }

    fn export(&self, py: Python<'_>, memory: &PyMemory) -> PyResult<(PyExport, PyHandle)> {
        let (segments, keep) = (memory.segments.clone(), Box::new(memory.keep.clone_ref(py)));
        // SAFETY: the memory of the object that `keep` refers to, which an exported buffer keeps in its place; for arrays
        // that say themselves where they are, their users are told not to move it.
        let made = leave(py, || unsafe { self.0.export(segments, memory.writable, keep) })?;
        let (export, handle) = made;
        Ok((PyExport { engine: Arc::clone(&self.0), export }, PyHandle(Arc::new(handle))))
    }

    /// How many exports there are, and how many closed ones are still being read.
    fn counts(&self) -> (usize, usize) {
        self.0.exports().counts()
    }

    /// How many owners are known, and how they are reached.
    fn owners(&self) -> usize {
        self.0.owners()
    }

    /// Offer nothing any longer.
    fn close_all(&self, py: Python<'_>) {
        py.detach(|| self.0.exports().close_all());
    }

    fn realm(&self) -> [u8; 16] {
        self.0.realm().id
    }

    /// The transports that would be tried, and the others with the reason.
    #[pyo3(signature = (handle, atomics=false, forced=None))]
    fn explain(&self, handle: &PyHandle, atomics: bool, forced: Option<&str>) -> Candidates {
        let choice = self.0.explain(&handle.0, Need { copies: !atomics, atomics }, forced);
        (choice.candidates, choice.passed)
    }

    /// Fill memory of this process. None if that is done already, and well, else the operation.
    #[pyo3(signature = (handle, memory, offset, timeout, forced=None))]
    fn read(
        &self,
        py: Python<'_>,
        handle: &PyHandle,
        memory: &PyMemory,
        offset: u64,
        timeout: Option<f64>,
        forced: Option<&str>,
    ) -> PyResult<Option<PyOperation>> {
        let work = Work::Read { local: memory.segments.clone(), offset };
        self.copy(py, handle, work, memory, timeout, forced)
    }

    /// Copy memory of this process to the owner's; as `read`.
    #[pyo3(signature = (handle, memory, offset, timeout, forced=None))]
    fn write(
        &self,
        py: Python<'_>,
        handle: &PyHandle,
        memory: &PyMemory,
        offset: u64,
        timeout: Option<f64>,
        forced: Option<&str>,
    ) -> PyResult<Option<PyOperation>> {
        let work = Work::Write { local: memory.segments.clone(), offset };
        self.copy(py, handle, work, memory, timeout, forced)
    }

    /// Many operations together.
    #[pyo3(signature = (asked, timeout, forced=None))]
    fn submit(
        &self,
        py: Python<'_>,
        asked: Vec<Asked>,
        timeout: Option<f64>,
        forced: Option<&str>,
    ) -> PyResult<PyOperation> {
        let mut ops = Vec::with_capacity(asked.len());
        let mut keep = Vec::new();
        for (kind, handle, memory, offset, first, second) in &asked {
            let work = work(kind, memory.as_ref().map(Py::get), *offset, *first, *second)?;
            ops.push(Op::new(&handle.get().0, work).map_err(|error| raise(py, &error))?);
            keep.extend(memory.as_ref().map(|memory| memory.get().keep.clone_ref(py)));
        }
        let timeout = limit(timeout)?;
        // SAFETY: as for `copy`.
        let operation = py.detach(|| unsafe { self.0.submit(ops, Box::new(keep), timeout, forced) });
        Ok(PyOperation(operation))
    }
}

impl PyEngine {
    fn copy(
        &self,
        py: Python<'_>,
        handle: &PyHandle,
        work: Work,
        memory: &PyMemory,
        timeout: Option<f64>,
        forced: Option<&str>,
    ) -> PyResult<Option<PyOperation>> {
        let op = Op::new(&handle.0, work).map_err(|error| raise(py, &error))?;
        let (keep, timeout) = (Box::new(memory.keep.clone_ref(py)), limit(timeout)?);
        // SAFETY: the memory of the object that `keep` refers to; that it is writable for a read, Python has checked.
        let operation = py.detach(|| unsafe { self.0.submit(vec![op], keep, timeout, forced) });
        Ok(if operation.has_succeeded() { None } else { Some(PyOperation(operation)) })
    }
}
