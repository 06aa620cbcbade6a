//! Looking into jobs from another machine.

use crate::door::outside;
use crate::errors::{raise_as, raise_credentials};
use crate::time::duration;
use mesh_runtime::tls::Identity;
use mesh_runtime::{VisitEnd, VisitError, jobs_at, visit};
use pyo3::prelude::*;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn ask<T: Send>(
    py: Python<'_>,
    credentials: &Path,
    timeout: f64,
    body: impl FnOnce(&Identity, Duration) -> Result<T, VisitError> + Send,
) -> PyResult<T> {
    let limit = duration(timeout)?;
    let loaded = outside(py, || Identity::load_to_look(credentials));
    let identity = loaded.map_err(|error| raise_credentials(py, &error))?;
    outside(py, || body(&identity, limit)).map_err(|error| match error.is_credentials() {
        true => raise_as(py, |python| &python.authentication_error, error),
        false => raise_as(py, |python| &python.mesh_error, error),
    })
}

/// The jobs that a host takes part in.
#[pyfunction]
pub(crate) fn jobs_of_host(py: Python<'_>, address: &str, credentials: PathBuf, timeout: f64) -> PyResult<Vec<u64>> {
    ask(py, &credentials, timeout, |identity, limit| jobs_at(address, identity, limit))
}

/// Opens a socket into a job; also returns what tells why the visit ended. The caller owns the descriptor.
#[pyfunction]
pub(crate) fn visit_job(
    py: Python<'_>,
    address: &str,
    credentials: PathBuf,
    job: u64,
    timeout: f64,
) -> PyResult<(i32, PyVisitEnd)> {
    let visited = ask(py, &credentials, timeout, |identity, limit| visit(address, identity, job, limit))?;
    Ok((visited.socket.into_raw_fd(), PyVisitEnd(visited.end)))
}

/// Why a visit ended.
#[pyclass(name = "VisitEnd", module = "mesh_core._native", frozen)]
pub(crate) struct PyVisitEnd(VisitEnd);

#[pymethods]
impl PyVisitEnd {
    /// What went wrong; `None` if the job ended in order, or the visit has not ended.
    #[getter]
    fn why(&self) -> Option<String> {
        self.0.why()
    }
}
