//! Parts of arrays that consist of many short pieces.

use crate::door::{leave, raise};
use crate::memory::PyMemory;
use mesh_transfer::{Boxes, ErrorKind, Grid, TransferError};
use pyo3::prelude::*;

/// The layout of a part: offset, counts and steps by dimension, length of a piece; and the memory that it fills.
type Part<'py> = (u64, Vec<u64>, Vec<u64>, u64, PyRef<'py, PyMemory>);

/// Parts, and the objects whose memory they fill.
#[pyclass(name = "Boxes", module = "mesh_rdma._native", frozen)]
pub(crate) struct PyBoxes {
    boxes: Boxes,
    _keep: Vec<Py<PyAny>>,
}

#[pymethods]
impl PyBoxes {
    #[new]
    fn new(py: Python<'_>, parts: Vec<Part<'_>>) -> PyResult<Self> {
        let (mut boxes, mut keep) = (Boxes::default(), Vec::with_capacity(parts.len()));
        for (offset, counts, steps, run, target) in parts {
            let grid = Grid { offset, counts, steps, run };
            target.segments.check_host().map_err(|error| raise(py, &error))?;
            boxes.add(grid, target.segments.clone()).map_err(|error| raise(py, &error))?;
            keep.push(target.keep.clone_ref(py));
        }
        Ok(Self { boxes, _keep: keep })
    }

    /// Fill all targets from contiguous memory.
    fn copy(&self, py: Python<'_>, source: &PyMemory) -> PyResult<()> {
        source.segments.check_host().map_err(|error| raise(py, &error))?;
        let (addr, len) = match source.segments.list() {
            [] => (1, 0),
            [one] => (one.addr as usize, one.len),
            _ => return Err(raise(py, &TransferError::new(ErrorKind::Invalid, "the memory must be contiguous"))),
        };
        // SAFETY: the caller refers to the object that keeps the memory, and the targets are kept by theirs; the caller
        // promises that these are writable, and apart from each other and from the source.
        leave(py, || unsafe { self.boxes.copy(addr as *const u8, len) })
    }
}
