//! Completions: promises, and lists of finished things, which any thread can finish.

use crate::door::{self, outside};
use crate::errors::OrRaise as _;
use crate::event_loop::PyWaker;
use crate::finisher::PyFinisher;
use crate::runtime::PyRuntime;
use crate::time::deadline;
use mesh_runtime::{Completion, Fate, Finisher, Runtime, Waited};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A promise's state, or a list of which among several things have finished.
#[pyclass(name = "Completion", module = "mesh_core._native", frozen)]
pub(crate) struct PyCompletion {
    runtime: Arc<Runtime>,
    pub(crate) core: Arc<Completion>,
    /// The value, or what represents the error.
    value: Mutex<Option<Py<PyAny>>>,
    /// The thread that set it, as in `threading.get_ident`.
    setter: AtomicU64,
    /// Set when the waiter was interrupted: an error no longer matters.
    away: AtomicBool,
}

impl PyCompletion {
    pub(crate) fn new(runtime: &Arc<Runtime>) -> Self {
        Self {
            runtime: Arc::clone(runtime),
            core: runtime.completion(),
            value: Mutex::default(),
            setter: AtomicU64::new(0),
            away: AtomicBool::new(false),
        }
    }

    /// A completion that others finish.
    pub(crate) fn on(runtime: &Arc<Runtime>, core: Arc<Completion>) -> Self {
        Self { core, ..Self::new(runtime) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn original(&self, py: Python<'_>) -> PyResult<()> {
        self.runtime.original().or_raise(py)
    }
}

/// Converts a fate for Python, with its status.
fn described(fate: Fate) -> (u8, i32) {
    match fate {
        Fate::Value => (0, 0),
        Fate::Error => (1, 0),
        Fate::Cancelled => (2, 0),
        Fate::Broken => (3, 0),
        Fate::Status(status) => (4, status),
    }
}

#[pymethods]
impl PyCompletion {
    /// Whether there is an outcome.
    fn done(&self) -> bool {
        self.core.is_done()
    }

    /// How many tokens a list has.
    fn arrived(&self) -> usize {
        self.core.arrived()
    }

    /// The `n`th token of a list.
    fn token(&self, n: usize) -> Option<u64> {
        self.core.token(n)
    }

    /// Shows it to those who inspect this process while somebody waits for it.
    fn show(&self, name: &str) {
        self.runtime.show_promise(name, &self.core);
    }

    /// Makes it record when it is finished.
    fn time(&self) {
        self.core.time();
    }

    /// When it was finished, in nanoseconds since the epoch; `None` if it is not finished or that was not recorded.
    fn finished(&self) -> Option<u64> {
        self.core.finished()
    }

    /// Takes all tokens of a list.
    fn take(&self) -> Vec<u64> {
        self.core.take()
    }

    /// Waits until a list has tokens or is done, for at most `timeout`, without reading messages that arrive for others.
    #[pyo3(signature = (timeout=None))]
    fn wait_aside(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        door::serves();
        let until = deadline(timeout)?;
        outside(py, || self.core.wait_aside(until));
        Ok(())
    }

    /// Waits until it is done (or, with `seen`, has more than that many tokens); false if `timeout` passed first. Failures
    /// that the script must be notified of are raised meanwhile, unless `heed` is false because another wait does so.
    #[pyo3(signature = (timeout=None, seen=None, heed=true))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, seen: Option<usize>, heed: bool) -> PyResult<bool> {
        door::enter(py);
        if self.core.is_done() || seen.is_some_and(|seen| self.core.arrived() > seen) {
            return Ok(true);
        }
        self.original(py)?;
        let until = deadline(timeout)?;
        let wait = self.runtime.wait_for(&*self.core, seen, until, heed);
        door::wait(py, &self.runtime, |look, signals| wait.step(look, signals), until)
    }

    /// False: this process finishes it, and it follows no other's output.
    fn is_behind(&self) -> bool {
        false
    }

    /// Spins as long as that is cheaper than sleeping; true if it has progressed.
    #[pyo3(signature = (seen=None))]
    fn look(&self, py: Python<'_>, seen: Option<usize>) -> bool {
        let step = || self.runtime.wait_completion(&self.core, seen, None, true, false, None);
        outside(py, step) == Waited::Ready
    }

    /// Gives `token` to a loop's waker when it is done (or has more than `seen` tokens).
    #[pyo3(signature = (waker, token, seen=usize::MAX))]
    fn tell(&self, py: Python<'_>, waker: &PyWaker, token: u64, seen: usize) -> PyResult<()> {
        self.original(py)?;
        self.core.tell(&waker.0, token, seen);
        Ok(())
    }

    /// Gives `token` to a list, `listener`, when it is done (or has more than `seen` tokens).
    #[pyo3(signature = (listener, token, seen=usize::MAX))]
    fn note(&self, py: Python<'_>, listener: &PyCompletion, token: u64, seen: usize) -> PyResult<()> {
        self.original(py)?;
        self.core.note(&listener.core, token, seen);
        Ok(())
    }

    /// Stops notifying the list.
    fn forget(&self, listener: &PyCompletion) {
        if self.runtime.original().is_ok() {
            self.core.forget(&listener.core);
        }
    }

    /// Sets the outcome: a value, or what represents an error. False if there is one already.
    fn set(&self, py: Python<'_>, value: Py<PyAny>, failed: bool, thread: u64) -> PyResult<bool> {
        self.original(py)?;
        if !self.core.begin(if failed { Fate::Error } else { Fate::Value }) {
            return Ok(false);
        }
        *self.lock() = Some(value);
        self.setter.store(thread, Ordering::Relaxed);
        self.core.end();
        Ok(true)
    }

    /// The outcome: 0 with a value, 1 with what represents an error, 2 cancelled, 3 broken, 4 with a status; `None` if
    /// there is none.
    fn outcome(&self, py: Python<'_>) -> PyResult<Option<(u8, Py<PyAny>)>> {
        let Some(fate) = self.core.fate() else { return Ok(None) };
        let (kind, status) = described(fate);
        let value = self.lock().as_ref().map(|value| value.clone_ref(py));
        let value = match value {
            Some(value) => value,
            None => status.into_pyobject(py)?.into_any().unbind(),
        };
        Ok(Some((kind, value)))
    }

    /// The thread that set the outcome; 0 for none.
    #[getter]
    fn setter(&self) -> u64 {
        self.setter.load(Ordering::Relaxed)
    }

    /// Whether the waiter gave it up.
    #[getter]
    fn cancelled(&self) -> bool {
        self.core.fate() == Some(Fate::Cancelled)
    }

    /// Marks the waiter as interrupted: an error no longer matters.
    fn look_away(&self) {
        self.away.store(true, Ordering::Relaxed);
    }

    #[getter]
    fn away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }

    /// Gives it up; false if it has an outcome.
    fn cancel(&self) -> bool {
        self.core.finish(Fate::Cancelled)
    }

    /// Notes which actor is about to wait for it.
    fn asked_by(&self, actor: u64) {
        self.core.asked_by(actor);
    }

    /// The ranks that have not answered; none, because no particular rank was asked.
    fn missing(&self) -> Vec<usize> {
        Vec::new()
    }

    #[getter]
    fn actor(&self) -> u64 {
        0
    }

    fn is_local(&self) -> bool {
        false
    }

    /// The right to finish it. Dropping the right gives it an outcome.
    fn finisher(&self) -> PyFinisher {
        PyFinisher::new(Finisher::new(&self.core))
    }

    /// The write end of a pipe through which the promise can be finished. The caller closes it.
    fn descriptor(&self, py: Python<'_>, finisher: &PyFinisher) -> PyResult<RawFd> {
        let made = self.runtime.finish_by_descriptor(finisher.inner());
        made.map(IntoRawFd::into_raw_fd).or_raise(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // If another thread holds the lock, the value is in use.
        match self.value.try_lock() {
            Ok(value) => value.as_ref().map_or(Ok(()), |value| visit.call(value)),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        let value = self.lock().take();
        // Not under the lock: dropping it may run any code.
        drop(value);
    }
}

#[pymethods]
impl PyRuntime {
    /// Creates a completion that any thread can finish.
    fn completion(&self, py: Python<'_>) -> PyResult<PyCompletion> {
        self.0.original().or_raise(py)?;
        Ok(PyCompletion::new(&self.0))
    }
}
