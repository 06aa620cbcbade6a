//! Values that stay where they were created, and references to them.

use crate::call::PyCall;
use crate::callables::callables;
use crate::completion::PyCompletion;
use crate::door::leave;
use crate::errors::OrRaise as _;
use crate::lost::PyLost;
use crate::memory::fill_view;
use crate::message::PyMessage;
use crate::packing::{Packing, Packs, pack_ref};
use crate::payload::{Beside, Payload, pieces};
use crate::runtime::PyRuntime;
use bytes::Bytes;
use mesh_proto::{ProcAddr, SharedRef, Target};
use mesh_runtime::{Buffer, Hold, Kept, Opened, RefAddr, Refs, Runtime, View, pack};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList};
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A packed value up to this size travels with its references: no process has to keep it.
const SMALL: usize = 4096;

thread_local! {
    /// The kept value that this thread is unpickling, for the references in it.
    static WITHIN: RefCell<Option<Arc<Hold>>> = const { RefCell::new(None) };
}

/// Where a value is on its owner's host: process, descriptor, slab, offset, chunk, turn.
type At = (u32, u32, u64, u64, u32, u32);

/// A reference as it is sent: its owner's mesh, rank and host, the value's number, length and place; or the value itself.
#[derive(FromPyObject, IntoPyObject)]
pub(crate) enum PyRefAddress {
    Kept(u64, u32, u32, u64, u64, Option<At>),
    Small(u64, Vec<u8>),
}

enum Place {
    Kept(Kept, Arc<Hold>),
    /// The packed value, and its own number.
    Small(u64, Bytes),
}

/// A reference to a value.
#[pyclass(name = "Kept", module = "mesh_core._native", frozen)]
pub(crate) struct PyKept {
    runtime: Arc<Runtime>,
    place: Place,
}

/// Part of a kept value, as a buffer that its reader may write to. It keeps the value while anything refers to it.
#[pyclass(name = "RefPart", module = "mesh_core._native", frozen)]
pub(crate) struct PyRefPart {
    view: Arc<View>,
    part: usize,
}

#[pymethods]
impl PyRefPart {
    fn __len__(&self) -> usize {
        self.view.part(self.part).len()
    }

    /// # Safety
    /// Called by the interpreter with a valid `view`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let part = this.view.writable(this.part);
        let (data, len) = part.ok_or_else(|| PyBufferError::new_err("the part cannot be written to"))?;
        // SAFETY: the view is valid, and the object keeps the value.
        unsafe { fill_view(slf.as_any(), view, flags, (data.cast::<c_void>(), len)) }
    }
}

/// Unpickles a value that is held by `hold`.
fn load<'py>(py: Python<'py>, view: View, hold: Option<&Arc<Hold>>) -> PyResult<Bound<'py, PyAny>> {
    let view = Arc::new(view);
    let buffers = PyList::empty(py);
    for part in 1..view.parts() {
        if view.writable(part).is_some() {
            buffers.append(PyRefPart { view: Arc::clone(&view), part })?;
        } else {
            buffers.append(PyByteArray::new(py, view.part(part)))?;
        }
    }
    let envelope = PyBytes::new(py, view.envelope());
    let loads = callables(py)?.loads.bind(py);
    let before = WITHIN.replace(hold.cloned());
    let value = loads.call1((envelope, buffers));
    WITHIN.set(before);
    value
}

#[pymethods]
impl PyKept {
    /// Identifies the value: the same for all references to it.
    #[getter]
    fn key(&self) -> (u64, u32, u32, u64) {
        match &self.place {
            Place::Kept(kept, _) => {
                let owner = kept.addr.owner;
                (owner.mesh, owner.rank, owner.host, kept.addr.id)
            }
            Place::Small(id, _) => (0, 0, 0, *id),
        }
    }

    /// Whether a process keeps it; otherwise it is part of the reference.
    #[getter]
    fn is_kept(&self) -> bool {
        matches!(self.place, Place::Kept(..))
    }

    /// Its packed size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        match &self.place {
            Place::Kept(kept, _) => kept.len,
            Place::Small(_, bytes) => bytes.len() as u64,
        }
    }

    /// How the process that kept it ended, if it did.
    #[getter]
    fn lost(&self) -> Option<PyLost> {
        match &self.place {
            Place::Kept(kept, hold) => hold.lost().map(|ended| PyLost::called(Arc::clone(ended), kept.addr.owner)),
            Place::Small(..) => None,
        }
    }

    /// Opens it: 0 with the value, 1 if it must be fetched, 2 if it is lost.
    fn open<'py>(&self, py: Python<'py>) -> PyResult<(u8, Option<Bound<'py, PyAny>>)> {
        let (view, hold) = match &self.place {
            Place::Kept(kept, hold) => match leave(py, || self.runtime.refs().view(kept, hold))? {
                Opened::Here(view) => (view, Some(hold)),
                Opened::Remote => return Ok((1, None)),
                Opened::Lost(_) => return Ok((2, None)),
            },
            Place::Small(_, bytes) => (packed(bytes.clone())?, None),
        };
        Ok((0, Some(load(py, view, hold)?)))
    }

    /// Asks its owner for the value.
    fn fetch(&self, py: Python<'_>) -> PyResult<Option<PyCall>> {
        let Place::Kept(kept, _) = &self.place else { return Ok(None) };
        let call = self.runtime.fetch_ref(kept.addr).or_raise(py)?;
        Ok(Some(PyCall::of(&self.runtime, call, Target::One(kept.addr.owner))))
    }

    /// Returns the value from the message by which it was fetched.
    fn fetched<'py>(&self, py: Python<'py>, message: &PyMessage) -> PyResult<Bound<'py, PyAny>> {
        let part = message.only_part(py)?;
        let view = part.and_then(View::of_part).ok_or_else(unreadable)?;
        let hold = match &self.place {
            Place::Kept(_, hold) => Some(hold),
            Place::Small(..) => None,
        };
        load(py, view, hold)
    }

    /// Adds it to what is being pickled; `None` if it could not be counted there.
    fn pack(&self) -> Option<PyRefAddress> {
        match &self.place {
            Place::Kept(kept, hold) => pack_ref(Some((hold, kept))).then(|| {
                let owner = kept.addr.owner;
                let at = kept.at.map(|at| (at.pid, at.fd, at.slab, at.offset, at.chunk, at.turn));
                PyRefAddress::Kept(owner.mesh, owner.rank, owner.host, kept.addr.id, kept.len, at)
            }),
            Place::Small(id, bytes) => pack_ref(None).then(|| PyRefAddress::Small(*id, bytes.to_vec())),
        }
    }
}

fn unreadable() -> PyErr {
    PyValueError::new_err("a kept value cannot be read: its bytes are damaged")
}

fn packed(bytes: Bytes) -> PyResult<View> {
    View::of_bytes(bytes).ok_or_else(unreadable)
}

/// A pickled value that will be kept once there is room.
#[pyclass(name = "Putting", module = "mesh_core._native", frozen)]
pub(crate) struct PyPutting {
    runtime: Arc<Runtime>,
    envelope: Py<PyBytes>,
    buffers: Mutex<Vec<Beside>>,
    inner: Mutex<Vec<Arc<Hold>>>,
    lens: Vec<usize>,
    cost: u64,
    /// Finished once there is room.
    room: Option<Py<PyCompletion>>,
    /// Whether the room was used or given back.
    over: AtomicBool,
}

impl PyPutting {
    fn is_small(&self) -> bool {
        self.cost == 0
    }

    fn drop_room(&self, waited: Option<&PyCompletion>) {
        if !self.over.swap(true, Ordering::SeqCst) && !self.is_small() && self.runtime.original().is_ok() {
            self.runtime.refs().unreserve(self.cost, waited.map(|room| &room.core));
        }
    }
}

impl Drop for PyPutting {
    fn drop(&mut self) {
        // Nothing else refers to it any longer.
        let room = self.room.take();
        self.drop_room(room.as_ref().map(Py::get));
    }
}

#[pymethods]
impl PyPutting {
    /// What to wait for before it can be kept; `None` if there is room.
    #[getter]
    fn room(&self, py: Python<'_>) -> Option<Py<PyCompletion>> {
        self.room.as_ref().map(|room| room.clone_ref(py))
    }

    /// Gives the room back, or stops waiting for it.
    fn give_up(&self) {
        self.drop_room(self.room.as_ref().map(Py::get));
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.lens.iter().sum()
    }

    /// Copies the value to where it is kept.
    fn keep(&self, py: Python<'_>) -> PyResult<PyKept> {
        if self.over.swap(true, Ordering::SeqCst) {
            return Err(PyValueError::new_err("the value has already been kept or given up"));
        }
        let buffers = std::mem::take(&mut *self.buffers.lock().unwrap_or_else(PoisonError::into_inner));
        let inner = std::mem::take(&mut *self.inner.lock().unwrap_or_else(PoisonError::into_inner));
        let (pieces, counts) = pieces(&buffers);
        let envelope = [self.envelope.as_bytes(py)];
        let mut parts = vec![Buffer::of(&envelope)];
        let mut rest = &pieces[..];
        for count in counts {
            let (part, others) = rest.split_at(count);
            parts.push(Buffer::of(part));
            rest = others;
        }
        let runtime = Arc::clone(&self.runtime);
        if self.is_small() {
            return Ok(PyKept { place: Place::Small(runtime.new_id(), pack(&parts)), runtime });
        }
        let (kept, hold) = leave(py, || runtime.refs().keep(&parts, self.cost, inner))?;
        Ok(PyKept { runtime, place: Place::Kept(kept, hold) })
    }
}

/// Pickles a value to keep, and asks for room.
#[pyfunction]
pub(crate) fn putting(py: Python<'_>, runtime: &PyRuntime, value: &Bound<'_, PyAny>) -> PyResult<PyPutting> {
    let runtime = Arc::clone(&runtime.0);
    runtime.original().or_raise(py)?;
    let (envelope, buffers, inner) = Payload::dump_kept(value, "the value")?.into_parts();
    let lens: Vec<usize> = std::iter::once(envelope.as_bytes().len()).chain(buffers.iter().map(Beside::len)).collect();
    let small = inner.is_empty() && lens.iter().sum::<usize>() <= SMALL;
    let cost = if small { 0 } else { Refs::cost(&lens) };
    let budget = runtime.refs().budget();
    if cost > budget {
        let refused = callables(py)?.too_large.bind(py).call1((cost, budget))?;
        return Err(PyErr::from_value(refused));
    }
    let wait = if small { None } else { runtime.refs().reserve(cost).or_raise(py)? };
    let room = wait.map(|core| Py::new(py, PyCompletion::on(&runtime, core))).transpose()?;
    Ok(PyPutting {
        runtime,
        envelope: envelope.unbind(),
        buffers: Mutex::new(buffers),
        inner: Mutex::new(inner),
        lens,
        cost,
        room,
        over: AtomicBool::new(false),
    })
}

/// Creates a reference that arrived, or is in a value that was opened; `None` if it was not counted on its way.
#[pyfunction]
pub(crate) fn kept(runtime: &PyRuntime, address: PyRefAddress) -> Option<PyKept> {
    let runtime = Arc::clone(&runtime.0);
    let place = match address {
        PyRefAddress::Small(id, bytes) => Place::Small(id, bytes.into()),
        PyRefAddress::Kept(mesh, rank, host, id, len, at) => {
            let addr = RefAddr { owner: ProcAddr { mesh, rank, host }, id };
            let hold = WITHIN.with_borrow(|within| runtime.hold_of(addr, within.as_ref()))?;
            let at = at.map(|(pid, fd, slab, offset, chunk, turn)| SharedRef { pid, fd, slab, offset, chunk, turn });
            Place::Kept(Kept { addr, at, len }, hold)
        }
    };
    Some(PyKept { runtime, place })
}

/// Calls `dump`, which pickles something for receivers that are not known yet. Returns its result,
/// and the references in it, which must be kept as long.
#[pyfunction]
pub(crate) fn capture<'py>(
    runtime: &PyRuntime,
    dump: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, Vec<PyKept>)> {
    let packing = Packing::begin(true);
    let out = dump.call0()?;
    let Packs { refs, kept, .. } = packing.end();
    let runtime = &runtime.0;
    let refs = refs.into_iter().zip(kept);
    let refs = refs.map(|(hold, kept)| PyKept { runtime: Arc::clone(runtime), place: Place::Kept(kept, hold) });
    Ok((out, refs.collect()))
}
