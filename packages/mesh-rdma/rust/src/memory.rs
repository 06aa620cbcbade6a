//! Memory of this process that belongs to Python objects.

use crate::door::raise;
use mesh_transfer::{Block, Segments, Space};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Pieces of memory, and the object that keeps them in place.
#[pyclass(name = "Memory", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyMemory {
    pub(crate) segments: Segments,
    pub(crate) writable: bool,
    pub(crate) keep: Py<PyAny>,
}

#[pymethods]
impl PyMemory {
    /// The memory of an object with a buffer. `view` is a memoryview, which keeps the object from moving it.
    #[staticmethod]
    fn of_view(py: Python<'_>, view: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(view)?;
        if buffer.suboffsets().is_some_and(|offsets| offsets.iter().any(|offset| *offset >= 0)) {
            return Err(PyBufferError::new_err("a buffer of pointers to memory cannot be transferred; copy it first"));
        }
        let shape: Vec<u64> = buffer.shape().iter().map(|n| *n as u64).collect();
        let strides: Vec<i64> = buffer.strides().iter().map(|n| *n as i64).collect();
        let (at, item) = (buffer.buf_ptr() as u64, buffer.item_size() as u64);
        let made = Self::make(py, view, (at, &shape, &strides, item), !buffer.readonly());
        buffer.release(py);
        made
    }

    /// The memory of an array that states its own address.
    #[staticmethod]
    fn of_array(
        py: Python<'_>,
        address: u64,
        shape: Vec<u64>,
        strides: Vec<i64>,
        itemsize: u64,
        writable: bool,
        keep: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        Self::make(py, keep, (address, &shape, &strides, itemsize), writable)
    }

    /// The same for an array in GPU memory. A transfer waits for the work queued on `stream`, if there is one.
    #[staticmethod]
    #[pyo3(signature = (address, shape, strides, itemsize, writable, stream, keep))]
    #[expect(clippy::too_many_arguments, reason = "what an array says of itself")]
    fn of_cuda(
        py: Python<'_>,
        address: u64,
        shape: Vec<u64>,
        strides: Vec<i64>,
        itemsize: u64,
        writable: bool,
        stream: Option<u64>,
        keep: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let made = Self::make(py, keep, (address, &shape, &strides, itemsize), writable)?;
        Ok(Self { segments: made.segments.within(Space::Cuda { stream }), ..made })
    }

    /// Whether it is GPU memory.
    #[getter]
    fn on_cuda(&self) -> bool {
        self.segments.is_cuda()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.segments.len()
    }

    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    #[getter]
    fn pieces(&self) -> usize {
        self.segments.list().len()
    }

    /// Part of its bytes.
    fn part(&self, py: Python<'_>, start: u64, length: u64) -> PyResult<Self> {
        let segments = self.segments.part(start, length).map_err(|error| raise(py, &error))?;
        Ok(Self { segments, writable: self.writable, keep: self.keep.clone_ref(py) })
    }

    /// Whether they share any byte.
    fn overlaps(&self, other: &Self) -> bool {
        self.segments.overlaps(&other.segments)
    }
}

impl PyMemory {
    fn make(
        py: Python<'_>,
        keep: &Bound<'_, PyAny>,
        (at, shape, strides, item): (u64, &[u64], &[i64], u64),
        writable: bool,
    ) -> PyResult<Self> {
        let segments = Segments::strided(at, shape, strides, item).map_err(|error| raise(py, &error))?;
        Ok(Self { segments, writable, keep: keep.clone().unbind() })
    }
}

/// Writable memory that other processes of this host can map. It exists as long as anything refers to it.
#[pyclass(name = "Block", module = "mesh_rdma._native", frozen, weakref)]
pub(crate) struct PyBlock(pub(crate) Arc<Block>);

#[pymethods]
impl PyBlock {
    /// # Safety
    /// Called by the interpreter with a valid `view`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let block = &slf.get().0;
        let len =
            isize::try_from(block.len()).map_err(|_| PyBufferError::new_err("the memory is too long for a buffer"))?;
        // SAFETY: `view` is valid, the memory is `len` bytes long and outlives the view, which refers to `slf`.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), block.as_ptr().cast::<c_void>(), len, 0, flags) };
        if filled == -1 { Err(PyErr::fetch(slf.py())) } else { Ok(()) }
    }
}
