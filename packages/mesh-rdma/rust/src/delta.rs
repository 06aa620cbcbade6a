//! The changes between two versions of memory.

use crate::door::{leave, raise};
use crate::memory::PyMemory;
use mesh_transfer::{ErrorKind, TransferError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Returns the changes between the two, in units of `unit` bytes; none if they take more than `limit` bytes. Nobody may
/// write to either meanwhile.
#[pyfunction]
pub(crate) fn find_changes<'py>(
    py: Python<'py>,
    old: &PyMemory,
    new: &PyMemory,
    unit: usize,
    limit: usize,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let (old, new) = (piece(py, old)?, piece(py, new)?);
    let made = leave(py, move || {
        // SAFETY: the caller refers to the objects that keep the memory, and vouches that nobody writes to it.
        unsafe { mesh_transfer::find_changes(old.bytes(), new.bytes(), unit, limit) }
    })?;
    Ok(made.map(|made| PyBytes::new(py, &made)))
}

/// Turns the old version, in `memory`, into the new one. Nobody else may use it meanwhile.
#[pyfunction]
pub(crate) fn apply_changes(py: Python<'_>, memory: &PyMemory, changes: &PyMemory) -> PyResult<()> {
    let (memory, changes) = (piece(py, memory)?, piece(py, changes)?);
    leave(py, move || {
        // SAFETY: as above; the caller vouches that the two are separate, and that nobody else uses the first.
        unsafe { mesh_transfer::apply_changes(memory.bytes_mut(), changes.bytes()) }
    })
}

/// The address of contiguous memory of this process.
#[derive(Clone, Copy)]
struct Piece {
    addr: usize,
    len: usize,
}

impl Piece {
    /// # Safety
    /// The memory must exist, and not be written to, while the slice lives.
    unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: as the caller vouches.
        unsafe { std::slice::from_raw_parts(self.addr as *const u8, self.len) }
    }

    /// # Safety
    /// The memory must exist, be writable, and be used by nobody else, while the slice lives.
    unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as the caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.addr as *mut u8, self.len) }
    }
}

fn piece(py: Python<'_>, memory: &PyMemory) -> PyResult<Piece> {
    memory.segments.check_host().map_err(|error| raise(py, &error))?;
    match memory.segments.list() {
        [] => Ok(Piece { addr: 0, len: 0 }),
        [one] => Ok(Piece { addr: one.addr as usize, len: one.len as usize }),
        _ => Err(raise(py, &TransferError::new(ErrorKind::Invalid, "the memory must be contiguous".to_owned()))),
    }
}
