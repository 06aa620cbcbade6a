//! Scripts that join the job of another process, and leave it again.

use crate::door::{leave, outside};
use crate::runtime::PyRuntime;
use crate::time::duration;
use pyo3::prelude::*;
use std::os::fd::{FromRawFd, OwnedFd};

/// Admits a script to the job of this controller, as its guest `number`: the process `pid` at the other end of the
/// descriptor `link`, which is given away. Returns its seat, and the path of the host's board.
#[pyfunction]
pub(crate) fn let_in(runtime: &PyRuntime, py: Python<'_>, link: i32, number: u32, pid: u32) -> PyResult<(u32, String)> {
    // SAFETY: the caller accepted the connection, and gives it away.
    let link = unsafe { OwnedFd::from_raw_fd(link) };
    let seat = leave(py, || runtime.0.let_in(link, number, pid))?;
    Ok((seat, runtime.0.board_path()))
}

/// Ends such a script's part in the job, whether its process is still running or not.
#[pyfunction]
pub(crate) fn dismiss(runtime: &PyRuntime, py: Python<'_>, number: u32) {
    outside(py, || runtime.0.dismiss(number));
}

/// Leaves the job that this script joined, and closes its runtime. What it sent arrives within `limit` seconds.
#[pyfunction]
pub(crate) fn leave_job(runtime: &PyRuntime, py: Python<'_>, limit: f64) -> PyResult<()> {
    let limit = duration(limit)?;
    outside(py, || runtime.0.leave(limit));
    Ok(())
}

/// Whether this script joined a job and lost it.
#[pyfunction]
pub(crate) fn has_lost_job(runtime: &PyRuntime) -> bool {
    runtime.0.has_lost_job()
}
