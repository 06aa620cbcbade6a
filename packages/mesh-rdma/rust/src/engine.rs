//! A process's part in transfers.

use crate::action::PyAction;
use crate::door::{leave, outside, raise, timeout as limit};
use crate::handle::{PyHandle, key};
use crate::memory::{PyBlock, PyMemory};
use crate::operation::PyOperation;
use crate::transport::PyTransport;
use mesh_transfer::{Block, Closing, Ending, Engine, Export, Keep, Libraries, Membership, Need, Op, Ops as _, Work};
use pyo3::prelude::*;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Offers memory, and transfers.
#[pyclass(name = "Engine", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyEngine(Arc<Engine>);

/// Keeps memory offered. Dropping it closes the export, unless it was entrusted to the memory's owner.
#[pyclass(name = "Export", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyExport {
    engine: Arc<Engine>,
    /// None while it is being dropped.
    export: Option<Arc<Export>>,
    is_entrusted: AtomicBool,
    lasts: AtomicBool,
    /// The memory itself, if it is of `empty`: nobody has to wait for its end then.
    block: OnceLock<Arc<Block>>,
}

impl Drop for PyExport {
    fn drop(&mut self) {
        let Some(export) = self.export.take() else { return };
        if !self.is_entrusted.load(Ordering::SeqCst) || !self.engine.exports().is_live(&export) {
            return self.engine.close(&export, Closing::Freed, false);
        }
        let block = self.block.take().map(|block| Box::new(block) as Keep);
        // SAFETY: the block, or the owner's `PyTie`, whose `ended` is called before the owner frees the memory (EXP-2).
        let kept = unsafe { export.entrust(block) };
        // In this order: to let go of the memory may free it, which waits for all who hold the export.
        drop(export);
        drop(kept);
    }
}

#[pymethods]
impl PyExport {
    fn close(&self, py: Python<'_>) {
        if let Some(export) = &self.export {
            outside(py, || self.engine.close(export, Closing::Dropped, true));
        }
    }

    #[getter]
    fn key(&self) -> u64 {
        self.export.as_ref().map_or(0, |export| key(export.slot, export.generation))
    }

    /// The object that keeps the memory.
    fn kept(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let keep = self.export.as_ref()?.keep();
        keep.as_ref()?.downcast_ref::<Py<PyAny>>().map(|kept| kept.clone_ref(py))
    }

    /// Let another object keep the memory: one that keeps `memory`, or the one that does already. Return whether that has
    /// all of the export's bytes; otherwise nothing changes.
    #[pyo3(signature = (holder, memory=None))]
    fn keep(&self, holder: Py<PyAny>, memory: Option<&PyMemory>) -> bool {
        let Some(export) = &self.export else { return false };
        if memory.is_some_and(|memory| !memory.segments.contains(&export.segments)) {
            return false;
        }
        // SAFETY: the holder keeps the memory, as the caller vouches, and that is the export's.
        let kept = unsafe { export.entrust(Some(Box::new(holder))) };
        drop(kept);
        true
    }

    /// Whether it outlasts its buffers.
    #[getter]
    fn lasts(&self) -> bool {
        self.lasts.load(Ordering::SeqCst)
    }

    #[setter]
    fn set_lasts(&self, lasts: bool) {
        self.lasts.store(lasts, Ordering::SeqCst);
    }

    /// What the memory's owner needs to end the export before it frees the memory.
    fn tie(&self) -> Option<PyTie> {
        let export = self.export.as_ref()?;
        Some(PyTie { engine: Arc::clone(&self.engine), export: Arc::downgrade(export), ending: export.ending() })
    }

    /// Leave the export to the memory's owner once this object is gone: it will call `ended` of a tie before it frees
    /// the memory. That of a block of `empty` lasts as long as the export.
    #[pyo3(signature = (block=None))]
    fn entrust(&self, block: Option<&Bound<'_, PyBlock>>) {
        if let Some(block) = block {
            // It is the same one if there is one already.
            let _ = self.block.set(Arc::clone(&block.get().0));
        }
        self.is_entrusted.store(true, Ordering::SeqCst);
    }
}

/// Ends an export before its memory is freed by those whose memory it is.
#[pyclass(name = "Tie", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyTie {
    engine: Arc<Engine>,
    export: Weak<Export>,
    ending: Arc<Ending>,
}

#[pymethods]
impl PyTie {
    /// Stop offering the memory; with `wait` nobody can reach it when this returns.
    fn close(&self, py: Python<'_>, wait: bool) {
        outside(py, || {
            if let Some(export) = self.export.upgrade() {
                self.engine.close(&export, Closing::Freed, wait);
            }
        });
    }

    /// Whether nobody works on the memory any more.
    #[getter]
    fn is_over(&self) -> bool {
        self.export.strong_count() == 0
    }

    /// Wait until nobody works on the memory, at most so many seconds. Return whether it is so.
    #[pyo3(signature = (seconds=None))]
    fn ended(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        let limit = limit(seconds)?;
        // In a forked copy, nobody works on it, and those who did in the parent will not end here.
        if self.export.strong_count() == 0 || self.engine.realm().check_fork().is_err() {
            return Ok(true);
        }
        Ok(outside(py, || self.ending.wait(limit)))
    }
}

/// Keeps memory that was offered, whether or not it still is.
#[pyclass(frozen)]
struct PyHeld {
    _export: Arc<Export>,
    /// After the export: to let go of the memory may free it, which waits for all who hold the export.
    _owner: Option<Py<PyAny>>,
}

type Standing = (String, bool, bool, bool, bool, Option<String>);
type Candidates = (Vec<String>, Vec<(String, String)>);

#[pymethods]
impl PyEngine {
    /// Make an engine with these transports besides the native ones, with UCX if there are places to look for it, and
    /// with these libraries (CUDA's driver and libibverbs) instead of the system's, if given. `told` is called with an
    /// owner, the transports for its memory, and those that were passed over, with the reason.
    #[new]
    #[pyo3(signature = (others, told, libucp=None, libcuda=None, libibverbs=None))]
    fn new(
        py: Python<'_>,
        others: Vec<Py<PyAny>>,
        told: Py<PyAny>,
        libucp: Option<Vec<String>>,
        libcuda: Option<String>,
        libibverbs: Option<String>,
    ) -> PyResult<Self> {
        let others = others.into_iter().map(|each| PyTransport::of(py, each)).collect::<PyResult<_>>()?;
        let libraries = Libraries { ucp: libucp, cuda: libcuda, verbs: libibverbs };
        let engine = leave(py, || Engine::new_with(others, libraries))?;
        engine.on_choice(move |handle, choice| {
            // If the interpreter is ending, nobody listens. A listener's exception is shown; the transfer goes on.
            Python::try_attach(|py| {
                let (candidates, passed) = (choice.candidates.clone(), choice.passed.clone());
                if let Err(error) = told.call1(py, (handle.owner(), candidates, passed)) {
                    error.write_unraisable(py, None);
                }
            });
        });
        Ok(Self(engine))
    }

    /// The name, the four capabilities, and why it does not work here.
    fn transports(&self) -> Vec<Standing> {
        let standing = self.0.transports().into_iter();
        standing
            .map(|each| {
                let can = each.capabilities;
                (each.name, can.copies, can.atomics, can.remote, can.one_sided, each.broken)
            })
            .collect()
    }

    /// In a forked copy: let go of what others wait for.
    fn forked(&self) {
        self.0.forked();
    }

    /// Join this process to a job of several hosts.
    fn join(&self, credentials: PathBuf, revocations: Option<PathBuf>, addresses: Vec<IpAddr>, silence: Duration) {
        self.0.join(&Membership { credentials, revocations, addresses, silence });
    }

    fn export(&self, py: Python<'_>, memory: &PyMemory) -> PyResult<(PyExport, PyHandle)> {
        let (segments, keep) = (memory.segments.clone(), Box::new(memory.keep.clone_ref(py)));
        // SAFETY: the memory of the object that `keep` refers to, which an exported buffer keeps in place; users of
        // arrays that state their own address are told not to move them.
        let made = leave(py, || unsafe { self.0.export(segments, memory.writable, keep) })?;
        let (export, handle) = made;
        let made = PyExport {
            engine: Arc::clone(&self.0),
            export: Some(export),
            is_entrusted: AtomicBool::new(false),
            lasts: AtomicBool::new(false),
            block: OnceLock::new(),
        };
        Ok((made, PyHandle(Arc::new(handle))))
    }

    /// The memory of this process that a handle names. It stays in place while the result lives (EXP-1), which keeps
    /// the owner of the memory if the export was entrusted to it.
    fn own(&self, py: Python<'_>, handle: &PyHandle, owner: Option<Py<PyAny>>) -> PyResult<PyMemory> {
        // Without leaving the interpreter, which might free the memory, and so wait for this thread.
        let (export, segments) = self.0.own(&handle.0).map_err(|error| raise(py, &error))?;
        let writable = handle.0.writable;
        let held = PyHeld { _export: export, _owner: owner };
        Ok(PyMemory { segments, writable, keep: Py::new(py, held)?.into_any() })
    }

    /// Stop offering the memory of this process that a handle names. The caller keeps its owner.
    fn drop_own(&self, py: Python<'_>, handle: &PyHandle) -> PyResult<()> {
        leave(py, || {
            let (export, _) = self.0.own(&handle.0)?;
            self.0.close(&export, Closing::Dropped, true);
            Ok(())
        })
    }

    /// Allocate memory that other processes of this host can map.
    fn empty(&self, py: Python<'_>, nbytes: u64) -> PyResult<PyBlock> {
        Ok(PyBlock(Arc::new(leave(py, || self.0.exports().allocate(nbytes))?)))
    }

    /// The descriptor and offset of memory from `empty`; none for other memory.
    fn pooled(&self, memory: &PyMemory) -> Option<(u32, u64)> {
        let [one] = memory.segments.list() else { return None };
        if memory.segments.is_cuda() {
            return None;
        }
        self.0.exports().pooled(one.addr, one.len).map(|pooled| (pooled.fd, pooled.offset))
    }

    /// The number of arenas.
    fn arenas(&self) -> usize {
        self.0.exports().arenas()
    }

    /// The number of exports, and of closed ones that are still being read.
    fn counts(&self) -> (usize, usize) {
        self.0.exports().counts()
    }

    /// The number of owners for which routes are remembered.
    fn owners(&self) -> usize {
        self.0.owners()
    }

    /// Stop offering anything. The owners of memory are never freed, since others may still work on it.
    fn close_all(&self, py: Python<'_>, owners: Vec<Py<PyAny>>) {
        std::mem::forget(owners);
        outside(py, || self.0.close_all());
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

    /// Fill memory of this process. Return none if that has succeeded already, else the operation.
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

    /// Copy memory of this process to the owner's; otherwise as `read`.
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

    /// Submit many operations together, as they are listed now.
    #[pyo3(signature = (action, timeout, forced=None))]
    fn submit(
        &self,
        py: Python<'_>,
        action: &PyAction,
        timeout: Option<f64>,
        forced: Option<&str>,
    ) -> PyResult<PyOperation> {
        let (listed, timeout) = (action.listed(), limit(timeout)?);
        let atomics = listed.ops().iter().map(|op| op.work.is_atomic()).collect();
        // SAFETY: as for `copy`; the list keeps the objects of all operations.
        let operation = outside(py, || unsafe { self.0.submit(listed, timeout, forced) });
        Ok(PyOperation::new(operation, Some(atomics)))
    }

    /// Perform one atomic operation: add the number, or replace the first number by the second.
    #[pyo3(signature = (handle, numbers, offset, timeout, forced=None))]
    fn atomic(
        &self,
        py: Python<'_>,
        handle: &PyHandle,
        numbers: (u64, Option<u64>),
        offset: u64,
        timeout: Option<f64>,
        forced: Option<&str>,
    ) -> PyResult<PyOperation> {
        let work = match numbers {
            (value, None) => Work::FetchAdd { offset, value },
            (expected, Some(desired)) => Work::CompareAndSwap { offset, expected, desired },
        };
        let op = Op::new(&handle.0, work).map_err(|error| raise(py, &error))?;
        let timeout = limit(timeout)?;
        // SAFETY: it uses no memory of this process.
        let operation = outside(py, || unsafe { self.0.submit(([op], ()), timeout, forced) });
        Ok(PyOperation::new(operation, None))
    }
}

impl PyEngine {
    pub(crate) fn shared(&self) -> &Arc<Engine> {
        &self.0
    }

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
        let (keep, timeout) = (memory.keep.clone_ref(py), limit(timeout)?);
        // SAFETY: the memory of the object that `keep` refers to; Python has checked that it is writable for a read.
        let operation = outside(py, || unsafe { self.0.submit(([op], keep), timeout, forced) });
        Ok(if operation.has_succeeded() { None } else { Some(PyOperation::new(operation, None)) })
    }
}
