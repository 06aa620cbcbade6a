//! The ways in and out of the interpreter.
//!
//! EXIT-1: a thread that is outside when the interpreter ends does not return to it. The interpreter ends such threads by
//! unwinding their stacks, which aborts the whole process if there are Rust frames on them. Threads of the script that
//! call or wait while it ends are instead held until the process is gone, like any blocked daemon thread.

use crate::callables::callables;
use crate::errors::raise;
use crate::time::end_limit;
use mesh_runtime::{Runtime, RuntimeError, Waited};
use pyo3::prelude::*;
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

/// Leaves the interpreter to run `body`; the only way out.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn outside<T: Send>(py: Python<'_>, body: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        let out = body();
        stay_out();
        out
    })
}

/// Leaves the interpreter for something that may fail.
pub(crate) fn leave<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T, RuntimeError> + Send) -> PyResult<T> {
    outside(py, body).map_err(|error| raise(py, &error))
}

const RUNNING: u8 = 0;
const ENDING: u8 = 1;
const ENDED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(RUNNING);
/// After this time, held threads continue, with an error: the end may be waiting for something that one of them holds.
static UNTIL: OnceLock<Instant> = OnceLock::new();

thread_local! {
    /// This thread works for this process's actors or for the runtime: last messages are handled while that closes.
    static SERVES: Cell<bool> = const { Cell::new(false) };
    /// This thread ends the interpreter.
    static ENDS: Cell<bool> = const { Cell::new(false) };
}

/// Called by the threads of actors, notices and the console at each of their waits.
pub(crate) fn serves() {
    SERVES.set(true);
}

/// The same, for Python threads that notify others of the end of the runtime.
#[pyfunction]
pub(crate) fn serve_to_the_end() {
    serves();
}

/// Holds a thread that has no interpreter to return to. Must not be called inside the interpreter.
fn stay_out() {
    let state = STATE.load(Ordering::Relaxed);
    if state == RUNNING || ENDS.get() || (state == ENDING && SERVES.get()) {
        return;
    }
    if let Some(left) = UNTIL.get().and_then(|until| until.checked_duration_since(Instant::now())) {
        std::thread::sleep(left);
    }
}

/// The same, for a thread inside the interpreter that is about to do something here.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn enter(py: Python<'_>) {
    if STATE.load(Ordering::Relaxed) != RUNNING {
        py.detach(stay_out);
    }
}

/// Marks that the calling thread ends the interpreter: for at most `limit` seconds, no other thread that comes here returns.
/// Threads that serve still do, until `done`.
#[pyfunction]
pub(crate) fn begin_exit(limit: f64, done: bool) -> PyResult<()> {
    let limit = end_limit(limit)?;
    ENDS.set(true);
    let _ = UNTIL.set(Instant::now() + limit);
    STATE.store(if done { ENDED } else { ENDING }, Ordering::SeqCst);
    Ok(())
}

thread_local! {
    static MAIN: Cell<Option<bool>> = const { Cell::new(None) };
}

fn is_main(py: Python<'_>) -> PyResult<bool> {
    if let Some(known) = MAIN.get() {
        return Ok(known);
    }
    let known = callables(py)?.on_main_thread.bind(py).call0()?.extract()?;
    MAIN.set(Some(known));
    Ok(known)
}

/// After an alarm ended a wait: raises the failure that this thread must be notified of, if any.
fn alarmed(py: Python<'_>) -> PyResult<()> {
    let told = callables(py)?.alarm.bind(py).call0()?;
    if told.is_none() { Ok(()) } else { Err(PyErr::from_value(told)) }
}

/// Waits outside the interpreter, in steps that are told whether just to look, and whether signals may end them. On the main
/// thread a signal ends the wait, and its handler runs. If the handler raises (`KeyboardInterrupt`), that is raised here;
/// otherwise the wait continues.
pub(crate) fn wait(
    py: Python<'_>,
    runtime: &Runtime,
    step: impl Fn(bool, bool) -> Waited + Sync + Send,
    until: Option<Instant>,
) -> PyResult<bool> {
    let main = is_main(py)?;
    if !main {
        loop {
            match outside(py, || step(false, false)) {
                Waited::Alarm => alarmed(py)?,
                waited => return Ok(waited == Waited::Ready),
            }
        }
    }
    match outside(py, || step(true, false)) {
        Waited::Ready => return Ok(true),
        Waited::Alarm => alarmed(py)?,
        Waited::Interrupted | Waited::NotYet => {}
    }
    let set = &callables(py)?.set_wakeup_fd;
    loop {
        let own = runtime.signals().fd();
        let before: i32 = set.call1(py, (own,))?.extract(py)?;
        runtime.signals().forward_to(if before == own { -1 } else { before });
        // A signal before this point is handled here; a later one ends the wait.
        let waited = py.check_signals().map(|()| outside(py, || step(false, true)));
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
