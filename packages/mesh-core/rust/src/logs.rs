//! What processes print.

use crate::door::{self, duration};
use mesh_proto::logs::{LogOptions, Stream};
use mesh_runtime::Logs;
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// The lines of all processes of this host.
#[pyclass(name = "Logs", module = "mesh_core._native", frozen)]
pub(crate) struct PyLogs(pub(crate) Arc<Logs>);

#[pymethods]
impl PyLogs {
    /// Says that `next` is going to be called; until then everything is dropped.
    fn watch(&self) {
        self.0.watch();
    }

    /// Waits for lines: pairs of whether they are for stderr and their text. None after the end.
    fn next(&self, py: Python<'_>) -> Option<Vec<(bool, String)>> {
        let text = |bytes: Vec<u8>| match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        };
        door::serves();
        door::outside(py, || {
            let chunks = self.0.next()?;
            Some(chunks.into_iter().map(|chunk| (chunk.stream == Stream::Err, text(chunk.text))).collect())
        })
    }

    /// Has everything shown that was written before; false if `limit` seconds were not enough.
    fn flush(&self, py: Python<'_>, limit: f64) -> PyResult<bool> {
        let limit = duration(limit)?;
        Ok(py.detach(|| self.0.flush(limit)))
    }

    /// Sets what is done with the lines of a mesh of processes.
    fn set(&self, py: Python<'_>, mesh: u64, shown: bool, window_ms: u32, level: u32) {
        let window = Duration::from_millis(u64::from(window_ms));
        py.detach(|| self.0.set(mesh, LogOptions { shown, window, level }));
    }
}

/// Has the C library write out its stdout line by line.
#[pyfunction]
pub(crate) fn line_buffer_stdio() {
    mesh_runtime::line_buffer_stdio();
}

/// Writes out what the C library has buffered.
#[pyfunction]
pub(crate) fn flush_stdio() {
    mesh_runtime::flush_stdio();
}
