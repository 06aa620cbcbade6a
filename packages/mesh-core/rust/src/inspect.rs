//! Looking into processes: the journal, visitors, stacks.

use crate::door::{self, leave, outside};
use crate::errors::OrRaise as _;
use crate::event_loop::PyWaker;
use crate::runtime::PyRuntime;
use crate::time::deadline;
use mesh_runtime::{ClockStop, Runtime};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::{Arc, Mutex, PoisonError};

/// While one exists, the time that this process's actors spend on messages counts as waiting for others.
#[pyclass(name = "ClockStop", module = "mesh_core._native", frozen)]
pub(crate) struct PyClockStop(Mutex<Option<ClockStop>>);

#[pymethods]
impl PyClockStop {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(Some(ClockStop::begin())))
    }

    /// Ends it. A second call does nothing.
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

/// A reader of the controller's journal. While one with `actors` exists, processes report what their actors do.
#[pyclass(name = "Journal", module = "mesh_core._native", frozen)]
pub(crate) struct PyJournal(Arc<Runtime>, bool);

#[pymethods]
impl PyJournal {
    #[new]
    fn new(py: Python<'_>, runtime: &PyRuntime, actors: bool) -> Self {
        let runtime = Arc::clone(&runtime.0);
        if actors {
            outside(py, || runtime.watch(true));
        }
        Self(runtime, actors)
    }

    /// The number of the next event.
    fn next(&self) -> u64 {
        self.0.journal().next()
    }

    /// Whether no more events will come.
    fn over(&self) -> bool {
        self.0.journal().is_closed()
    }

    /// Returns at most `limit` events from number `first` on, where to read on, and how many were dropped before being read.
    fn read(&self, first: u64, limit: usize) -> (Vec<String>, u64, u64) {
        let got = self.0.journal().read(first, limit);
        (got.entries.iter().map(ToString::to_string).collect(), got.next, got.missed)
    }

    /// Waits until there are more events than `seen`, or no more will come; false if `timeout` passed first.
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, seen: u64) -> PyResult<bool> {
        let until = deadline(timeout)?;
        let runtime = &*self.0;
        door::wait(py, runtime, |look, signals| runtime.wait_events(seen, until, look, signals), until)
    }

    /// Whether there are more events than `seen`, or no more will come.
    fn look(&self, seen: u64) -> bool {
        self.next() > seen || self.over()
    }

    /// Gives `token` to a loop's waker when there are more events than `seen`.
    fn tell(&self, waker: &PyWaker, token: u64, seen: u64) {
        self.0.journal().tell(self.0.reactor(), &waker.0, token, seen);
    }
}

impl Drop for PyJournal {
    fn drop(&mut self) {
        if self.1 {
            self.0.watch(false);
        }
    }
}

#[pymethods]
impl PyRuntime {
    /// Announces the next connection to the job's inspection socket by a notice. The descriptor is duplicated.
    fn watch_inspection(&self, py: Python<'_>, fd: i32) -> PyResult<()> {
        // SAFETY: the caller keeps its descriptor open during this call; only a duplicate is kept.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        leave(py, || self.0.watch_inspection_socket(socket))
    }

    /// The next connection from another machine that looks into the job; the caller owns the descriptor.
    fn take_visitor(&self) -> Option<i32> {
        self.0.take_visitor().map(IntoRawFd::into_raw_fd)
    }

    /// Lets the handler registered for `signal` write stacks to `file`.
    fn catch_dumps(&self, py: Python<'_>, signal: i32, file: i32) -> PyResult<()> {
        // SAFETY: as above.
        let file = unsafe { BorrowedFd::borrow_raw(file) }.try_clone_to_owned()?;
        self.0.catch_dumps(signal, file).or_raise(py)
    }

    /// Adds an event, as JSON, to the controller's journal.
    fn note_text(&self, text: &str, failure: bool) {
        self.0.note_text(text, failure);
    }
}
