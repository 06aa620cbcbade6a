//! Data of tensors and arrays on its way into a message: in the pickle, side by side in blocks, or each as a part.
//!
//! A message of thousands of small tensors would otherwise have as many parts, each with a Python object and a copy of its own.
//! A receiver that keeps one tensor of a block keeps the block, so blocks are short, and what is very small is copied out of them.

use crate::memory::fill_view;
use bytes::Bytes;
use mesh_runtime::Buffer;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Shorter data is copied: into its block at once, so that its owner need not be kept, and out of it on arrival.
pub(crate) const COPIED: usize = 4 * 1024;
/// Data of less than this, and of a message that Mesh sends no more than this in all, travels in the pickle.
const IN_BAND: usize = 16 * 1024;
/// The length of a block, unless its only piece is longer.
const BLOCK: usize = 256 * 1024;

/// What keeps memory in place.
enum Owner {
    Object { _object: Py<PyAny> },
    Export(Box<ffi::Py_buffer>),
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Self::Export(view) = self {
            // SAFETY: filled by the interpreter, and released once. Blocks are dropped by Python, so it is attached.
            unsafe { ffi::PyBuffer_Release(&raw mut **view) };
        }
    }
}

/// Memory of the sender.
struct Lent {
    at: *const u8,
    len: usize,
    _owner: Owner,
}

// SAFETY: plain memory, which its owner keeps in place.
unsafe impl Send for Lent {}
// SAFETY: as above; it is only read. If another thread writes to it meanwhile, a mixture of old and new bytes is sent, as with any
// buffer.
unsafe impl Sync for Lent {}

impl Lent {
    fn bytes(&self) -> &[u8] {
        // SAFETY: as long as it says, and in place as long as its owner lives. Empty memory may have a null pointer.
        if self.len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(self.at, self.len) } }
    }
}

enum Piece {
    Lent(Lent),
    /// A range of `Laid::copied`.
    Copied(Range<usize>),
}

/// What has been laid into a block.
#[derive(Default)]
struct Laid {
    pieces: Vec<Piece>,
    copied: Vec<u8>,
    end: usize,
}

impl Laid {
    /// Lays memory behind what is there. Returns its place.
    fn push(&mut self, memory: Lent) -> usize {
        let len = memory.len;
        let at = if len < COPIED {
            let start = self.copied.len();
            self.copied.extend_from_slice(memory.bytes());
            match self.pieces.last_mut() {
                Some(Piece::Copied(run)) => {
                    run.end += len;
                    self.end
                }
                _ => {
                    self.pieces.push(Piece::Copied(start..start + len));
                    Buffer::after(self.end)
                }
            }
        } else {
            self.pieces.push(Piece::Lent(memory));
            Buffer::after(self.end)
        };
        self.end = at + len;
        at
    }

    fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(|piece| match piece {
            Piece::Lent(memory) => memory.bytes(),
            Piece::Copied(run) => &self.copied[run.clone()],
        })
    }
}

/// One part of a message that is being pickled. Read as a buffer, it is its pieces side by side.
#[pyclass(name = "Block", module = "mesh_core._native", frozen)]
#[derive(Default)]
pub(crate) struct PyBlock {
    open: Mutex<Laid>,
    /// What was laid into it once it has been read: it takes nothing more.
    closed: OnceLock<Laid>,
    joined: OnceLock<Bytes>,
}

impl PyBlock {
    /// Lays memory into it; gives it back if there is no room.
    fn push(&self, memory: Lent) -> Result<usize, Lent> {
        let mut laid = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = laid.pieces.is_empty() || Buffer::after(laid.end) + memory.len <= BLOCK;
        if fits && self.closed.get().is_none() { Ok(laid.push(memory)) } else { Err(memory) }
    }

    fn closed(&self) -> &Laid {
        self.closed.get_or_init(|| std::mem::take(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Its pieces. It takes no more of them.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.closed().pieces()
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.closed().end
    }

    fn bytes(&self) -> &[u8] {
        match &self.closed().pieces[..] {
            [Piece::Lent(memory)] => memory.bytes(),
            _ => self.joined.get_or_init(|| Buffer::of(&self.pieces().collect::<Vec<_>>()).to_bytes()),
        }
    }
}

#[pymethods]
impl PyBlock {
    fn __len__(&self) -> usize {
        self.len()
    }

    /// Writable, so that what is rebuilt on it is; nothing here writes to it.
    ///
    /// # Safety
    /// Called by the interpreter with a valid `view`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = slf.get().bytes();
        let data = (bytes.as_ptr().cast_mut().cast::<c_void>(), bytes.len());
        // SAFETY: the view is valid, and the object keeps the memory in place.
        unsafe { fill_view(slf.as_any(), view, flags, data) }
    }
}

struct State {
    /// How many bytes the pickle may still take.
    left: usize,
    last: Option<Py<PyBlock>>,
}

/// Where the data of one message's tensors and arrays is put while it is pickled.
#[pyclass(name = "Blocks", module = "mesh_core._native", frozen)]
pub(crate) struct PyBlocks {
    state: Mutex<State>,
    /// Data from this length on is a part of its own.
    alone: usize,
}

/// Data in the pickle, or a block; and the place in it.
type Put<'py> = (Bound<'py, PyAny>, usize);

impl PyBlocks {
    fn put<'py>(&self, py: Python<'py>, memory: Lent) -> PyResult<Put<'py>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.len < IN_BAND && memory.len <= state.left {
            state.left -= memory.len;
            return Ok((PyBytes::new(py, memory.bytes()).into_any(), 0));
        }
        let alone = memory.len >= self.alone;
        let last = if alone { None } else { state.last.as_ref() };
        let memory = match last.map(|block| (block, block.get())) {
            Some((block, inner)) => match inner.push(memory) {
                Ok(at) => return Ok((block.bind(py).clone().into_any(), at)),
                Err(memory) => memory,
            },
            None => memory,
        };
        let block = Bound::new(py, PyBlock::default())?;
        let at = block.get().push(memory).unwrap_or_default();
        if !alone {
            state.last = Some(block.clone().unbind());
        }
        Ok((block.into_any(), at))
    }
}

#[pymethods]
impl PyBlocks {
    /// Data of `alone` bytes and more has a block of its own. If that is more than what may travel in the pickle, the rest is
    /// laid side by side, for a message that Mesh sends itself.
    #[new]
    fn new(alone: usize) -> Self {
        let left = if alone > IN_BAND { IN_BAND } else { usize::MAX };
        Self { state: Mutex::new(State { left, last: None }), alone }
    }

    /// Puts `nbytes` at `address`, which `owner` keeps in place unless they are copied.
    fn put_memory<'py>(
        &self,
        py: Python<'py>,
        address: usize,
        nbytes: usize,
        owner: Bound<'py, PyAny>,
    ) -> PyResult<Put<'py>> {
        if address == 0 && nbytes != 0 {
            return Err(PyValueError::new_err("its memory has been freed"));
        }
        let owner = Owner::Object { _object: owner.unbind() };
        self.put(py, Lent { at: address as *const u8, len: nbytes, _owner: owner })
    }

    /// Puts the elements of an array that are contiguous in any order.
    fn put_array<'py>(&self, py: Python<'py>, array: &Bound<'py, PyAny>) -> PyResult<Put<'py>> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: attached, and `view` is valid for writing. No format is asked for: not every type of element has one.
        let got = unsafe { ffi::PyObject_GetBuffer(array.as_ptr(), &raw mut *view, ffi::PyBUF_ANY_CONTIGUOUS) };
        if got == -1 {
            return Err(PyErr::fetch(py));
        }
        let (at, len) = (view.buf.cast::<u8>().cast_const(), usize::try_from(view.len).unwrap_or_default());
        self.put(py, Lent { at, len, _owner: Owner::Export(view) })
    }
}
