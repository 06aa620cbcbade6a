//! Scripts that join the job of another process, and leave it again.

use crate::door::{duration, leave, outside};
use crate::runtime::PyRuntime;
use pyo3::prelude::*;
use std::os::fd::{FromRawFd, OwnedFd};

/// Takes a script into the job of this controller, as the `number`th that comes: the process `pid`, at the other end of the
/// descriptor `link`, which is given away. Returns its seat, and where it finds the host's board.
#[pyfunction]
pub(crate) fn let_in(runtime: &PyRuntime, py: Python<'_>, link: i32, number: u32, pid: u32) -> PyResult<(u32, String)> {
    // SAFETY: the caller has taken the connection in, and gives it away.
    let link = unsafe { OwnedFd::from_raw_fd(link) };
    let runtime = runtime.shared();
    let seat = leave(py, || runtime.let_in(link, number, pid))?;
    Ok((seat, runtime.board_path()))
}

/// Ends such a script's part in the job, whether its process lives or not.
#[pyfunction]
pub(crate) fn dismiss(runtime: &PyRuntime, py: Python<'_>, number: u32) {
    let runtime = runtime.shared();
    outside(py, || runtime.dismiss(number));
}

/// Leaves the job that this script has joined, and ends its runtime; what it has said arrives within `limit` seconds.
#[pyfunction]
pub(crate) fn leave_job(runtime: &PyRuntime, py: Python<'_>, limit: f64) -> PyResult<()> {
    let limit = duration(limit)?;
    let runtime = runtime.shared();
    outside(py, || runtime.leave(limit));
    Ok(())
}

/// Whether this script had joined a job, and has lost it.
#[pyfunction]
pub(crate) fn has_lost_job(runtime: &PyRuntime) -> bool {
    runtime.shared().has_lost_job()
}
