//! Pickled objects to be sent.

use crate::block::PyBlock;
use crate::callables::callables;
use crate::door::outside;
use crate::errors::OrRaise as _;
use crate::memory::bytes_of;
use crate::packing::{Packing, Packs};
use mesh_proto::Target;
use mesh_runtime::{Body, Hold, Later, Packed, RuntimeError};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict as _, PyBool, PyBytes, PyDict, PyFloat, PyInt, PyString, PyTuple};
use std::sync::Arc;

/// Messages with at least this many bytes out of band are copied outside the interpreter.
const LARGE: usize = 256 * 1024;

/// Maximum out-of-band buffers of a message: the envelope is a part too, and a frame counts its parts in 16 bits.
const MOST_BUFFERS: usize = u16::MAX as usize - 1;

/// Of what is pickled here.
const PROTOCOL: u8 = 5;
/// Longer arguments are left to `dumps`.
const MOST_ARGUMENTS: usize = 32;

/// What C pickle handles correctly alone, and what needs no look inside.
fn is_atom(value: &Bound<'_, PyAny>) -> bool {
    value.is_none()
        || value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyString>()
        || value.is_exact_instance_of::<PyFloat>()
        || value.is_exact_instance_of::<PyBool>()
}

/// Whether `value` is a small result, or a call with few and small arguments: by far the most frequent messages. `dumps` knows
/// more that is plain.
fn is_plain(value: &Bound<'_, PyAny>) -> bool {
    let Ok(call) = value.cast_exact::<PyTuple>() else { return is_atom(value) };
    if call.len() != 2 {
        return false;
    }
    let (Ok(args), Ok(kwargs)) = (call.get_borrowed_item(0), call.get_borrowed_item(1)) else { return false };
    let (Ok(args), Ok(kwargs)) = (args.cast_exact::<PyTuple>(), kwargs.cast_exact::<PyDict>()) else { return false };
    kwargs.is_empty() && args.len() <= MOST_ARGUMENTS && args.iter_borrowed().all(|one| is_atom(&one))
}

/// An out-of-band buffer of a pickled object.
pub(crate) enum Beside {
    One(PyBuffer<u8>),
    Block(Py<PyBlock>),
}

impl Beside {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(block) = object.cast::<PyBlock>() {
            return Ok(Self::Block(block.clone().unbind()));
        }
        let buffer = PyBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("an out-of-band buffer must be contiguous"));
        }
        Ok(Self::One(buffer))
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::One(buffer) => buffer.len_bytes(),
            Self::Block(block) => block.get().len(),
        }
    }
}

/// The memory of buffers: their pieces, and how many of them, in turn, each has.
pub(crate) fn pieces(buffers: &[Beside]) -> (Vec<&[u8]>, Vec<usize>) {
    let mut pieces = Vec::with_capacity(buffers.len());
    let counts = buffers.iter().map(|buffer| {
        let before = pieces.len();
        match buffer {
            // SAFETY: contiguous, as `Beside::of` has checked, and not used for longer than it is borrowed.
            Beside::One(buffer) => pieces.push(unsafe { bytes_of(buffer) }),
            Beside::Block(block) => pieces.extend(block.get().pieces()),
        }
        pieces.len() - before
    });
    let counts = counts.collect();
    (pieces, counts)
}

/// A pickled object: its envelope, and buffers that remain the caller's memory.
pub(crate) struct Payload<'py> {
    envelope: Bound<'py, PyBytes>,
    buffers: Vec<Beside>,
    /// The ports of calls that it contains.
    ports: Vec<Packed>,
    /// Keeps the values that its references point to; `None` without references.
    refs: Option<Vec<Arc<Hold>>>,
}

impl<'py> Payload<'py> {
    pub(crate) fn new(envelope: Bound<'py, PyBytes>, buffers: &Bound<'py, PyAny>) -> PyResult<Self> {
        let count = buffers.len()?;
        if count > MOST_BUFFERS {
            return Err(PyValueError::new_err(format!(
                "a message carries at most {MOST_BUFFERS} out-of-band buffers, not {count}; join small arrays into larger ones"
            )));
        }
        let buffers = if count == 0 {
            Vec::new()
        } else {
            buffers.try_iter()?.map(|one| Beside::of(&one?)).collect::<PyResult<Vec<_>>>()?
        };
        Ok(Self { envelope, buffers, ports: Vec::new(), refs: None })
    }

    /// Pickles `value` for sending.
    pub(crate) fn dump(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        if is_plain(value) {
            let pickled = callables(value.py())?.plain_dumps.bind(value.py()).call1((value, PROTOCOL))?;
            return Ok(Self { envelope: pickled.cast_into()?, buffers: Vec::new(), ports: Vec::new(), refs: None });
        }
        let dumps = callables(value.py())?.dumps.bind(value.py());
        Self::pack(false, || dumps.call1((value,)))
    }

    /// Pickles `value`, which errors call `root`.
    pub(crate) fn dump_as(value: &Bound<'py, PyAny>, root: &str) -> PyResult<Self> {
        Self::dump_named(value, root, false)
    }

    /// Pickles `value` for keeping.
    pub(crate) fn dump_kept(value: &Bound<'py, PyAny>, root: &str) -> PyResult<Self> {
        Self::dump_named(value, root, true)
    }

    fn dump_named(value: &Bound<'py, PyAny>, root: &str, loose: bool) -> PyResult<Self> {
        let py = value.py();
        let named = [("root", root)].into_py_dict(py)?;
        let dumps = callables(py)?.dumps.bind(py);
        Self::pack(loose, || dumps.call((value,), Some(&named)))
    }

    fn pack(loose: bool, dump: impl FnOnce() -> PyResult<Bound<'py, PyAny>>) -> PyResult<Self> {
        let packing = Packing::begin(loose);
        let (envelope, buffers): (Bound<'py, PyBytes>, Bound<'py, PyAny>) = dump()?.extract()?;
        let Packs { ports, refs, has_refs, .. } = packing.end();
        let refs = has_refs.then_some(refs);
        Ok(Self { ports, refs, ..Self::new(envelope, &buffers)? })
    }

    /// Returns its envelope and buffers, and what keeps the values that its references point to.
    pub(crate) fn into_parts(self) -> (Bound<'py, PyBytes>, Vec<Beside>, Vec<Arc<Hold>>) {
        (self.envelope, self.buffers, self.refs.unwrap_or_default())
    }

    /// Its size in bytes.
    pub(crate) fn len(&self) -> usize {
        let refs = Body { refs: self.refs.as_deref(), ..Body::default() }.len();
        self.envelope.as_bytes().len() + refs + self.buffers.iter().map(Beside::len).sum::<usize>()
    }

    /// Sends it to `to` with `send`; errors name `who`.
    pub(crate) fn ship<T: Send>(
        &self,
        py: Python<'py>,
        to: &Target,
        who: &str,
        send: impl FnOnce(Body<'_>) -> Result<T, RuntimeError> + Send,
    ) -> PyResult<T> {
        self.ports.iter().for_each(Packed::begin);
        let sent = self.send(py, send);
        match &sent {
            Ok(_) => self.ports.iter().for_each(|port| port.sent(to, who)),
            Err(_) => self.ports.iter().for_each(Packed::unsent),
        }
        sent.or_raise(py)
    }

    /// Like [`Self::ship`], for a message that is sent later: `send` is told what to do then.
    pub(crate) fn entrust<T: Send>(
        mut self,
        py: Python<'py>,
        mut later: Later,
        who: &str,
        send: impl FnOnce(Body<'_>, Later) -> Result<T, RuntimeError> + Send,
    ) -> PyResult<T> {
        later.ports = std::mem::take(&mut self.ports);
        if !later.ports.is_empty() {
            later.ports.iter().for_each(Packed::begin);
            later.who = who.to_owned();
        }
        self.send(py, |body| send(body, later)).or_raise(py)
    }

    /// Passes the bytes to `send`, outside the interpreter if there are many.
    pub(crate) fn send<T: Send>(&self, py: Python<'py>, send: impl FnOnce(Body<'_>) -> T + Send) -> T {
        let (pieces, counts) = pieces(&self.buffers);
        let payload = self.envelope.as_bytes();
        let body = Body { payload, buffers: &pieces, joined: &counts, refs: self.refs.as_deref() };
        if pieces.iter().map(|piece| piece.len()).sum::<usize>() >= LARGE {
            outside(py, || send(body))
        } else {
            send(body)
        }
    }
}
