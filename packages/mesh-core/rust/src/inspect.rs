//! Events, as Python reads them.

use crate::door::{self, outside};
use crate::inbox::PyWaker;
use crate::runtime::PyRuntime;
use mesh_runtime::{ClockStop, Runtime};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::{Arc, Mutex, PoisonError};

/// While one lasts, time that actors of this process spend on messages counts as waiting for others.
#[pyclass(name = "ClockStop", module = "mesh_core._native", frozen)]
pub(crate) struct PyClockStop(Mutex<Option<ClockStop>>);

#[pymethods]
impl PyClockStop {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(Some(ClockStop::begin())))
    }

    /// The clocks go on; a second time it does nothing.
    fn end(&self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) {
        self.end();
    }
}

/// A reader of the controller's journal; while one lives that asks for it, processes tell of their actors.
#[pyclass(name = "Journal", module = "mesh_core._native", frozen)]
pub(crate) struct PyJournal(Arc<Runtime>, bool);

#[pymethods]
impl PyJournal {
    #[new]
    fn new(py: Python<'_>, runtime: &PyRuntime, actors: bool) -> Self {
        let runtime = Arc::clone(runtime.shared());
        if actors {
            outside(py, || runtime.watch(true));
        }
        Self(runtime, actors)
    }

    /// The number that the next event will have.
    fn next(&self) -> u64 {
        self.0.next_event()
    }

    /// Whether no more events come.
    fn over(&self) -> bool {
        self.0.events_over()
    }

    /// At most `limit` events from number `first` on, where to read on, and how many came too early to be among them.
    fn read(&self, first: u64, limit: usize) -> (Vec<String>, u64, u64) {
        let got = self.0.events(first, limit);
        (got.entries.iter().map(ToString::to_string).collect(), got.next, got.missed)
    }

    /// Waits until there are more events than were `seen`, or none will come; false if `timeout` came first.
    #[pyo3(signature = (timeout, seen))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, seen: u64) -> PyResult<bool> {
        let until = door::deadline(timeout)?;
        let runtime = &*self.0;
        door::wait(py, runtime, |look, signals| runtime.wait_events(seen, until, look, signals), until)
    }

    /// Whether there are more events than were `seen`; never waits.
    #[pyo3(signature = (seen))]
    fn look(&self, seen: u64) -> bool {
        self.0.next_event() > seen || self.0.events_over()
    }

    /// Has a loop's waker told `token` when there are more events than were `seen`.
    fn tell(&self, waker: &PyWaker, token: u64, seen: u64) {
        self.0.tell_events(&waker.0, token, seen);
    }
}

impl Drop for PyJournal {
    fn drop(&mut self) {
        if self.1 {
            self.0.watch(false);
        }
    }
}
