//! A large part of a message as a Python buffer.

use mesh_runtime::SharedPart;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};

/// Writable memory that another process has filled. It stays mapped as long as anything refers to it.
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
        let len =
            isize::try_from(part.len()).map_err(|_| PyBufferError::new_err("the part is too long for a buffer"))?;
        // SAFETY: `view` is valid, the memory is `len` bytes long and outlives the view, which refers to `slf`.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), part.as_ptr().cast::<c_void>(), len, 0, flags) };
        if filled == -1 { Err(PyErr::fetch(slf.py())) } else { Ok(()) }
    }
}
