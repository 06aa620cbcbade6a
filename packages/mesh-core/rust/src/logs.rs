//! The output of processes.

use crate::completion::PyCompletion;
use crate::door::{self, leave, outside};
use crate::runtime::PyRuntime;
use crate::time::duration;
use mesh_proto::ProcAddr;
use mesh_proto::logs::{LogOptions, Stream};
use mesh_runtime::Logs;
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// A record: its actor's name, rank, coordinates and host, and what was logged.
type Record = (String, u32, String, String, String);

fn text(bytes: Vec<u8>) -> String {
    match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }
}

fn record(record: mesh_proto::logs::Record) -> Record {
    (text(record.name), record.rank, text(record.point), text(record.host), text(record.json))
}

/// The output of all processes of this host.
#[pyclass(name = "Logs", module = "mesh_core._native", frozen)]
pub(crate) struct PyLogs(pub(crate) Arc<Logs>);

#[pymethods]
impl PyLogs {
    /// Starts keeping lines for `next`; until then they are dropped.
    fn watch(&self) {
        self.0.watch();
    }

    /// Waits for lines. Returns whether they are for stderr, their text, and the records in them; `None` after the end.
    fn next(&self, py: Python<'_>) -> Option<Vec<(bool, String, Vec<Record>)>> {
        door::serves();
        outside(py, || {
            let chunks = self.0.next()?.into_iter();
            let told = chunks.map(|chunk| {
                let records = chunk.records.into_iter().map(record).collect();
                (chunk.stream == Stream::Err, text(chunk.text), records)
            });
            Some(told.collect())
        })
    }

    /// Sets whether records are passed on one by one, without waiting for others.
    fn hand_on_records(&self, py: Python<'_>, wanted: bool) {
        outside(py, || self.0.hand_on_records(wanted));
    }

    /// Waits until everything written before is shown; false if `limit` seconds were not enough.
    fn flush(&self, py: Python<'_>, limit: f64) -> PyResult<bool> {
        let limit = duration(limit)?;
        Ok(outside(py, || self.0.flush(limit)))
    }

    /// Sets how the lines of a mesh of processes are shown.
    fn set(&self, py: Python<'_>, mesh: u64, flags: u8, window_ms: u32, level: u32) {
        let window = Duration::from_millis(u64::from(window_ms));
        outside(py, || self.0.set(mesh, LogOptions::with(flags, window, level)));
    }
}

/// Makes the C library's stdout line-buffered.
#[pyfunction]
pub(crate) fn line_buffer_stdio() {
    mesh_runtime::line_buffer_stdio();
}

/// Flushes the C library's buffers.
#[pyfunction]
pub(crate) fn flush_stdio() {
    mesh_runtime::flush_stdio();
}

#[pymethods]
impl PyRuntime {
    /// The output of this host's processes. Only the controller has it.
    fn logs(&self, py: Python<'_>) -> PyResult<PyLogs> {
        leave(py, || self.0.logs()).map(PyLogs)
    }

    /// What is done when lines of these processes (host, mesh and rank) have been shown, or after `limit` seconds; `None` if
    /// it is of no use to wait.
    fn catch_up(&self, py: Python<'_>, procs: Vec<(u32, u64, u32)>, limit: f64) -> PyResult<Option<PyCompletion>> {
        let limit = duration(limit)?;
        let procs: Vec<ProcAddr> = procs.into_iter().map(|(host, mesh, rank)| ProcAddr { host, mesh, rank }).collect();
        let core = outside(py, || self.0.catch_up_with(&procs, limit));
        Ok(core.map(|core| PyCompletion::on(&self.0, core)))
    }
}
