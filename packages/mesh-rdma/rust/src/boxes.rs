//! Parts of arrays that lie in many short pieces.

use crate::door::{leave, raise};
use crate::memory::PyMemory;
use mesh_transfer::{Boxes, ErrorKind, Grid, TransferError};
use pyo3::prelude::*;

/// How a part lies: where it begins, how many pieces in each dimension, from one to the next, how long each is; and what it fills.
type Part<'py> = (u64, Vec<u64>, Vec<u64>, u64, PyRef<'py, PyMemory>);

/// Such parts, and the objects whose memory they fill.
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
        // SAFETY: the memory is kept by its object, which the caller refers to, and the targets by theirs; that these are writable,
        // and apart from each other and from the source, is the caller's promise.
        leave(py, || unsafe { self.boxes.copy(addr as *const u8, len) })
    }
}
