//! Memory shared by Python and the runtime: buffers on the way in, parts of messages on the way out.

use mesh_runtime::SharedPart;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};

/// The bytes of a Python buffer.
///
/// # Safety
/// The buffer must be contiguous. It stays exported, and so in place, while it is borrowed. If another thread writes to it
/// meanwhile, a mixture of old and new bytes is read, as with any buffer.
pub(crate) unsafe fn bytes_of(buffer: &PyBuffer<u8>) -> &[u8] {
    let len = buffer.len_bytes();
    // SAFETY: see above. An empty buffer may have a null pointer.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), len) } }
}

/// Fills in a writable view of `len` bytes.
///
/// # Safety
/// `view` must be valid, and the bytes must stay in place as long as `owner` lives.
pub(crate) unsafe fn fill_view(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    (data, len): (*mut c_void, usize),
) -> PyResult<()> {
    let len = isize::try_from(len).map_err(|_| PyBufferError::new_err("the part is too long for a buffer"))?;
    // SAFETY: guaranteed by the caller; the view refers to `owner`.
    let filled = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), data, len, 0, flags) };
    if filled == -1 { Err(PyErr::fetch(owner.py())) } else { Ok(()) }
}

/// A large part of a message: writable memory that another process filled. It stays mapped while anything refers to
/// it.
#[pyclass(name = "Part", module = "mesh_core._native", frozen)]
pub(crate) struct PyPart(pub(crate) SharedPart);

#[pymethods]
impl PyPart {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// # Safety
    /// Called by the interpreter with a valid `view`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let part = &slf.get().0;
        let data = (part.as_ptr().cast::<c_void>(), part.len());
        // SAFETY: the view is valid, and the object keeps the memory mapped.
        unsafe { fill_view(slf.as_any(), view, flags, data) }
    }
}
