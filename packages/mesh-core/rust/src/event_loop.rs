//! The event loops of this process's actors.

use crate::door::{self, outside};
use crate::errors::OrRaise as _;
use crate::runtime::PyRuntime;
use crate::time::deadline;
use mesh_runtime::{EventLoop, LoopWaker, Runtime};
use pyo3::prelude::*;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The eventfd that tells an event loop that something is ready.
#[pyclass(name = "Waker", module = "mesh_core._native", frozen)]
pub(crate) struct PyWaker(pub(crate) Arc<LoopWaker>);

#[pymethods]
impl PyWaker {
    /// Below another one, it gives that `token` when something is ready.
    #[new]
    #[pyo3(signature = (above=None, token=0))]
    fn new(py: Python<'_>, above: Option<&Self>, token: u64) -> PyResult<Self> {
        Ok(Self(Arc::new(match above {
            Some(above) => LoopWaker::below(&above.0, token),
            None => LoopWaker::new().or_raise(py)?,
        })))
    }

    fn fileno(&self) -> i32 {
        self.0.fd()
    }

    /// Returns the tokens of what has become ready since the last call.
    fn drain(&self, py: Python<'_>) -> Vec<u64> {
        door::enter(py);
        self.0.drain()
    }

    /// Whether anything is ready.
    fn any(&self) -> bool {
        self.0.any()
    }
}

/// An event loop, as the runtime knows it.
#[pyclass(name = "EventLoop", module = "mesh_core._native", frozen)]
pub(crate) struct PyEventLoop {
    runtime: Arc<Runtime>,
    one: Arc<EventLoop>,
    waker: Arc<LoopWaker>,
}

#[pymethods]
impl PyEventLoop {
    #[new]
    fn new(runtime: &PyRuntime, waker: &PyWaker, runs_actors: bool) -> Self {
        let one = runtime.0.add_event_loop(runs_actors);
        Self { runtime: Arc::clone(&runtime.0), one, waker: Arc::clone(&waker.0) }
    }

    /// Whether none of the descriptors in its set is ready, as far as the runtime has seen.
    fn is_quiet(&self) -> bool {
        self.one.is_quiet() && !self.runtime.is_closed()
    }

    /// Waits in a coroutine of that loop, which has nothing else to run before `timeout` has passed: for its waker, and no
    /// longer than until one of the descriptors in the set `watched` is ready. Handlers of signals run meanwhile.
    #[pyo3(signature = (watched, timeout=None))]
    fn visit(&self, py: Python<'_>, watched: i32, timeout: Option<f64>) -> PyResult<()> {
        let until = deadline(timeout)?;
        let step = |look, interruptible| {
            // SAFETY: the caller, a coroutine of the loop, keeps its set open during this call.
            let watched = unsafe { BorrowedFd::borrow_raw(watched) };
            self.runtime.visit_loop(&self.one, &self.waker, watched, until, look, interruptible)
        };
        door::wait(py, &self.runtime, step, until)?;
        Ok(())
    }

    /// Waits as that loop: for its waker, for one of the descriptors in the set `watched` or for a signal, for at most `timeout`
    /// seconds.
    #[pyo3(signature = (watched, timeout=None))]
    fn wait(&self, py: Python<'_>, watched: i32, timeout: Option<f64>) -> PyResult<()> {
        let until = deadline(timeout)?;
        door::serves();
        outside(py, || {
            // SAFETY: the caller, a selector, keeps its set open during this call.
            let watched = unsafe { BorrowedFd::borrow_raw(watched) };
            self.runtime.wait_loop(&self.one, &self.waker, watched, until);
        });
        Ok(())
    }
}
