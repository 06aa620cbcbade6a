//! Transports written in Python, as the engine sees them.
//!
//! The engine's threads call them through `_outside.py`, which turns exceptions into the engine's kinds of errors.

use crate::door::raise;
use crate::handle::key;
use mesh_transfer::{
    Capabilities, ErrorKind, Export, Exports, Handle, Op, Peer, Segment, Segments, TransferError, Transport, Watch,
    Work,
};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One piece of memory for a transport to read or write.
#[pyclass(name = "Window", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyWindow {
    addr: u64,
    len: u64,
    readonly: bool,
    /// The number of views.
    views: Arc<AtomicUsize>,
    is_closed: Arc<AtomicBool>,
    /// Keeps offered memory.
    _export: Option<Arc<Export>>,
}

#[pymethods]
impl PyWindow {
    /// # Safety
    /// Called by the interpreter with a valid `view`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let window = slf.get();
        if window.is_closed.load(Ordering::SeqCst) {
            return Err(PyBufferError::new_err("the transfer that this memory belongs to is over"));
        }
        let at = window.addr as *mut c_void;
        let len = isize::try_from(window.len).map_err(|_| PyBufferError::new_err("the memory is too long"))?;
        // SAFETY: `view` is valid; the memory exists as long as the export that the window keeps, or during the
        // transfer; a transport that keeps a view beyond it is in error, see `Windows`.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), at, len, c_int::from(window.readonly), flags) };
        if filled == -1 {
            return Err(PyErr::fetch(slf.py()));
        }
        window.views.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// # Safety
    /// Called by the interpreter, once for each view.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.views.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Ends a transfer early.
#[pyclass(name = "Watch", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyWatch(Watch);

#[pymethods]
impl PyWatch {
    /// Raise if it is over.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.0.check().map_err(|error| raise(py, &error))
    }

    /// The seconds to its deadline; none if there is none.
    #[getter]
    fn left(&self) -> Option<f64> {
        self.0.left().map(|left| left.as_secs_f64())
    }
}

/// The windows of one transfer, closed with it.
#[derive(Default)]
struct Windows {
    views: Arc<AtomicUsize>,
    is_closed: Arc<AtomicBool>,
}

impl Windows {
    fn list<'py>(
        &self,
        py: Python<'py>,
        pieces: impl Iterator<Item = Segment>,
        readonly: bool,
        export: Option<&Arc<Export>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for Segment { addr, len } in pieces {
            let (views, is_closed) = (Arc::clone(&self.views), Arc::clone(&self.is_closed));
            let _export = export.cloned();
            list.append(Py::new(py, PyWindow { addr, len, readonly, views, is_closed, _export })?)?;
        }
        Ok(list)
    }

    /// Closes the windows. Returns the number of views left.
    fn close(&self) -> usize {
        self.is_closed.store(true, Ordering::SeqCst);
        self.views.load(Ordering::SeqCst)
    }
}

/// What `_outside.py` returns: a kind of error and a message, or none and the result.
type Answer = (Option<String>, Py<PyAny>);

fn answer(py: Python<'_>, answer: PyResult<Bound<'_, PyAny>>) -> Result<Py<PyAny>, TransferError> {
    let broken = |error: PyErr| TransferError::new(ErrorKind::Transport, format!("the transport is broken: {error}"));
    let (kind, value): Answer = answer.and_then(|answer| answer.extract()).map_err(broken)?;
    match kind {
        None => Ok(value),
        Some(word) => {
            let kind = ErrorKind::ALL.into_iter().find(|kind| kind.word() == word).unwrap_or(ErrorKind::Transport);
            Err(TransferError::new(kind, value.bind(py).to_string()))
        }
    }
}

/// The only door to the interpreter; closed while that ends.
fn attach<R>(body: impl FnOnce(Python<'_>) -> Result<R, TransferError>) -> Result<R, TransferError> {
    let ended = || Err(TransferError::new(ErrorKind::Transport, "the interpreter of this process is ending"));
    Python::try_attach(body).unwrap_or_else(ended)
}

/// A transport of another package.
pub(crate) struct PyTransport {
    name: String,
    capabilities: Capabilities,
    broken: Option<String>,
    object: Py<PyAny>,
    inside: Arc<Inside>,
}

impl fmt::Debug for PyTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PyTransport({})", self.name)
    }
}

/// Threads that are in Python for a transport: if one were when the interpreter ends, it would end the process.
#[derive(Default)]
struct Inside {
    state: Mutex<State>,
    fewer: Condvar,
}

#[derive(Default)]
struct State {
    has_ended: bool,
    next: u64,
    watches: HashMap<u64, Watch>,
}

/// How long a transport may take to notice that its transfers are cancelled.
const LEAVING: Duration = Duration::from_secs(5);

impl Inside {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `body` unless the end has come; the end cancels `watch`.
    fn during<R>(&self, watch: &Watch, body: impl FnOnce() -> Result<R, TransferError>) -> Result<R, TransferError> {
        let number = {
            let mut state = self.state();
            if state.has_ended {
                return Err(TransferError::new(ErrorKind::Transport, "the interpreter of this process is ending"));
            }
            state.next += 1;
            let number = state.next;
            state.watches.insert(number, watch.clone());
            number
        };
        let done = body();
        self.state().watches.remove(&number);
        self.fewer.notify_all();
        done
    }

    fn end(&self) {
        let mut state = self.state();
        state.has_ended = true;
        state.watches.values().for_each(Watch::give_up);
        let left = self.fewer.wait_timeout_while(state, LEAVING, |state| !state.watches.is_empty());
        drop(left.unwrap_or_else(PoisonError::into_inner));
    }
}

impl PyTransport {
    pub(crate) fn of(py: Python<'_>, object: Py<PyAny>) -> PyResult<Arc<dyn Transport>> {
        let told = object.bind(py);
        let (copies, atomics, remote, one_sided) = told.getattr("capabilities")?.extract()?;
        Ok(Arc::new(Self {
            name: told.getattr("name")?.extract()?,
            capabilities: Capabilities { copies, atomics, remote, one_sided },
            broken: told.getattr("reason")?.extract()?,
            object,
            inside: Arc::default(),
        }))
    }
}

impl Transport for PyTransport {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn probe(&self) -> Result<(), TransferError> {
        self.broken.clone().map_or(Ok(()), |why| Err(TransferError::new(ErrorKind::Transport, why)))
    }

    fn offer(&self, exports: &Arc<Exports>, export: &Arc<Export>) -> Result<Vec<u8>, TransferError> {
        attach(|py| {
            let pieces = export.segments.list().iter().copied();
            // The windows keep the memory, so a view that the transport keeps harms nobody else.
            let windows = Windows::default().list(py, pieces, !export.writable, Some(export));
            let asked = windows.and_then(|windows| {
                let whose = (PyBytes::new(py, exports.realm()), PyBytes::new(py, &export.token));
                let told = (key(export.slot, export.generation), windows, export.writable, whose);
                self.object.bind(py).call_method1("offer", told)
            });
            let said = answer(py, asked)?;
            said.extract(py)
                .map_err(|_| TransferError::new(ErrorKind::Transport, "it offers something else than bytes"))
        })
    }

    fn holds_memory(&self) -> bool {
        true
    }

    fn withdraw(&self, export: &Export) {
        // If the interpreter is ending, so is the transport.
        let _ = attach(|py| {
            let asked = self.object.bind(py).call_method1("withdraw", (key(export.slot, export.generation),));
            answer(py, asked).map(drop)
        });
    }

    fn connect(&self, handle: &Handle, section: &[u8], watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        let object = self.inside.during(watch, || {
            attach(|py| {
                let told = (PyBytes::new(py, section), handle.owner(), PyWatch(watch.clone()));
                answer(py, self.object.bind(py).call_method1("reach", told))
            })
        })?;
        Ok(Arc::new(PyPeer { name: self.name.clone(), object, inside: Arc::clone(&self.inside) }))
    }

    fn end(&self) {
        self.inside.end();
    }
}

/// An owner reached by it.
struct PyPeer {
    name: String,
    object: Py<PyAny>,
    inside: Arc<Inside>,
}

impl fmt::Debug for PyPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PyPeer({})", self.name)
    }
}

impl PyPeer {
    /// What the transport is asked for, by operation: whether it is a write, the handle's section, the offset in the
    /// export, the memory here, and the owner's realm and token.
    fn told<'py>(&self, py: Python<'py>, ops: &[Op], windows: &Windows) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for op in ops {
            let (local, is_write): (&Segments, bool) = match &op.work {
                Work::Read { local, .. } => (local, false),
                Work::Write { local, .. } => (local, true),
                _ => continue,
            };
            let section = PyBytes::new(py, op.handle.section(&self.name).unwrap_or_default());
            let start = op.handle.start + op.work.span().0;
            let memory = windows.list(py, local.list().iter().copied(), is_write, None)?;
            let whose = (PyBytes::new(py, &op.handle.realm), PyBytes::new(py, &op.handle.token));
            list.append((is_write, section, start, memory, whose))?;
        }
        Ok(list)
    }
}

impl Peer for PyPeer {
    unsafe fn run(&self, ops: &[Op], _found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        if ops.iter().any(|op| op.work.is_atomic()) {
            return Err(TransferError::new(ErrorKind::Transport, "it has no atomic operations"));
        }
        let windows = Windows::default();
        let done = self.inside.during(watch, || {
            attach(|py| {
                let asked = self
                    .told(py, ops, &windows)
                    .and_then(|told| self.object.bind(py).call_method1("run", (told, PyWatch(watch.clone()))));
                answer(py, asked).map(drop)
            })
        });
        match windows.close() {
            0 => done,
            left => Err(TransferError::new(
                ErrorKind::Invalid,
                format!(
                    "the transport {} has kept {left} views of the memory of a transfer that is over: a defect of it. \
                     Choose another with transport=, and report it to its author.",
                    self.name
                ),
            )),
        }
    }

    fn is_alive(&self) -> bool {
        attach(|py| answer(py, self.object.bind(py).call_method0("alive")))
            .is_ok_and(|alive| Python::try_attach(|py| alive.is_truthy(py).unwrap_or(false)).unwrap_or(false))
    }

    fn is_quick(&self) -> bool {
        false
    }
}
