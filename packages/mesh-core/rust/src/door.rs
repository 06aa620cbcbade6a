//! The ways in and out of the interpreter, and how errors cross it.

use mesh_runtime::{Errno, Runtime, RuntimeError, Waited};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// The Python class that stands for an error: its name in `mesh_core._errors`.
fn class_of(error: &RuntimeError) -> &'static str {
    match error {
        RuntimeError::Full { .. } => "MailboxFull",
        RuntimeError::NoSuchProc(_) => "Undeliverable",
        RuntimeError::Nursery { .. } => "SpawnError",
        RuntimeError::Os { errno, .. } if *errno == Errno::MFILE => "SpawnError",
        _ => "MeshError",
    }
}

/// A runtime error as the Python exception that stands for it.
pub(crate) fn raise(py: Python<'_>, error: &RuntimeError) -> PyErr {
    let made = py
        .import("mesh_core._errors")
        .and_then(|module| module.getattr(class_of(error)))
        .and_then(|class| class.call1((error.to_string(),)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}

/// Leaves the interpreter for `body`; the one way out.
pub(crate) fn leave<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T, RuntimeError> + Send) -> PyResult<T> {
    py.detach(body).map_err(|error| raise(py, &error))
}

/// Seconds as Python gives them, as a deadline; none for "for ever".
pub(crate) fn deadline(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else { return Ok(None) };
    Ok(Instant::now().checked_add(duration(seconds)?))
}

pub(crate) fn duration(seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() {
        return Err(PyValueError::new_err("a timeout is a number of seconds, not NaN"));
    }
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
}

thread_local! {
    static MAIN: Cell<Option<bool>> = const { Cell::new(None) };
}

fn is_main(py: Python<'_>) -> PyResult<bool> {
    if let Some(known) = MAIN.get() {
        return Ok(known);
    }
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?.getattr("ident")?;
    let known = main.eq(threading.call_method0("get_ident")?)?;
    MAIN.set(Some(known));
    Ok(known)
}

/// An alarm has ended a wait: raises what this thread is to be told, if anything.
fn alarmed(py: Python<'_>) -> PyResult<()> {
    let told = py.import("mesh_core._supervision")?.getattr("alarm")?.call0()?;
    if told.is_none() { Ok(()) } else { Err(PyErr::from_value(told)) }
}

static SET_WAKEUP_FD: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Waits outside the interpreter. On the main thread a signal ends the wait, its handler runs, and what it raises
/// (`KeyboardInterrupt`) is raised here; if it raises nothing the wait goes on.
pub(crate) fn wait(
    py: Python<'_>,
    runtime: &Runtime,
    step: impl Fn(bool, bool) -> Waited + Sync + Send,
    until: Option<Instant>,
) -> PyResult<bool> {
    let main = is_main(py)?;
    if !main {
        loop {
            match py.detach(|| step(false, false)) {
                Waited::Alarm => alarmed(py)?,
                waited => return Ok(waited == Waited::Ready),
            }
        }
    }
    match py.detach(|| step(true, false)) {
        Waited::Ready => return Ok(true),
        Waited::Alarm => alarmed(py)?,
        Waited::Interrupted | Waited::NotYet => {}
    }
    let set = SET_WAKEUP_FD
        .get_or_try_init(py, || Ok::<_, PyErr>(py.import("signal")?.getattr("set_wakeup_fd")?.unbind()))?;
    loop {
        let own = runtime.own_signal_fd();
        let before: i32 = set.call1(py, (own,))?.extract(py)?;
        runtime.signal_fd(if before == own { -1 } else { before });
        // A signal before this point is handled here, a later one wakes the wait.
        let waited = py.check_signals().map(|()| py.detach(|| step(false, true)));
        set.call1(py, (before,))?;
        let waited = waited?;
        py.check_signals()?;
        match waited {
            Waited::Ready => return Ok(true),
            Waited::Interrupted => {}
            Waited::Alarm => alarmed(py)?,
            Waited::NotYet if until.is_some_and(|at| Instant::now() < at) => {}
            Waited::NotYet => return Ok(false),
        }
    }
}

/// Has the kernel kill this process when its parent ends; at once if the parent is not `parent` any more.
#[pyfunction]
pub(crate) fn die_with_parent(parent: u32) {
    mesh_runtime::die_with_parent(parent);
}
