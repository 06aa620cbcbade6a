//! Looking into jobs from another machine.

use crate::callables::callables;
use crate::credentials;
use crate::door::{duration, outside};
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
    let identity = loaded.map_err(|error| credentials::raise(py, &error))?;
    outside(py, || body(&identity, limit)).map_err(|error| {
        let made = callables(py).and_then(|python| {
            let class = if error.is_credentials() { &python.authentication_error } else { &python.mesh_error };
            class.bind(py).call1((error.to_string(),))
        });
        made.map_or_else(|failed| failed, PyErr::from_value)
    })
}

/// The jobs that a host has a part in.
#[pyfunction]
pub(crate) fn jobs_of_host(py: Python<'_>, address: &str, credentials: PathBuf, timeout: f64) -> PyResult<Vec<u64>> {
    ask(py, &credentials, timeout, |identity, limit| jobs_at(address, identity, limit))
}

/// A socket that leads into a job, as a descriptor that is the caller's, and what tells why it has ended.
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

/// Why a visit is over.
#[pyclass(name = "VisitEnd", module = "mesh_core._native", frozen)]
pub(crate) struct PyVisitEnd(VisitEnd);

#[pymethods]
impl PyVisitEnd {
    /// What has gone wrong; none if the job has ended in order, or nothing has ended yet.
    #[getter]
    fn why(&self) -> Option<String> {
        self.0.why()
    }
}
