//! The ways in and out of the interpreter, and how errors cross it.
//!
//! EXIT-1: a thread that is under way here when the interpreter ends does not come back into it. The interpreter ends
//! such threads by unwinding their stacks, which aborts the whole process where there are frames of Rust. Threads of
//! the script that call or wait while it ends are held until the process is gone instead, as any blocked daemon thread.

use crate::callables::callables;
use crate::codes;
use mesh_runtime::{Runtime, RuntimeError, Waited};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::cell::Cell;
use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// The fields of an error, as the exception that stands for it has them.
fn fields<'py>(py: Python<'py>, error: &RuntimeError) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    match error {
        RuntimeError::Full { addr, budget, .. } => {
            fields.set_item("rank", addr.rank)?;
            fields.set_item("budget", *budget)?;
        }
        RuntimeError::NoSuchProc(addr) => fields.set_item("rank", addr.rank)?,
        RuntimeError::PortClosed(why) => fields.set_item("reason", why.to_string())?,
        _ => {}
    }
    Ok(fields)
}

/// A runtime error as the Python exception that stands for it. Python knows the class by the error's kind.
pub(crate) fn raise(py: Python<'_>, error: &RuntimeError) -> PyErr {
    let made = fields(py, error).and_then(|fields| {
        let of_native = callables(py)?.of_native.bind(py);
        of_native.call1((codes::error(py, error.kind())?, error.to_string(), fields))
    });
    made.map_or_else(|failed| failed, PyErr::from_value)
}

/// Leaves the interpreter for `body`; the one way out.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn outside<T: Send>(py: Python<'_>, body: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        let out = body();
        stay_out();
        out
    })
}

/// Leaves the interpreter for what may fail.
pub(crate) fn leave<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T, RuntimeError> + Send) -> PyResult<T> {
    outside(py, body).map_err(|error| raise(py, &error))
}

const RUNNING: u8 = 0;
const ENDING: u8 = 1;
const ENDED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(RUNNING);
/// Should the end not come by then (it may wait for something that a held thread has), the held go on, to an error.
static UNTIL: OnceLock<Instant> = OnceLock::new();

thread_local! {
    /// Works for actors of this process, or for the runtime: last messages are handled while that closes.
    static SERVES: Cell<bool> = const { Cell::new(false) };
    /// Ends the interpreter.
    static ENDS: Cell<bool> = const { Cell::new(false) };
}

/// Called by the threads of actors, of notices and of the console wherever they wait.
pub(crate) fn serves() {
    SERVES.set(true);
}

/// The same, for threads of Python code that tell others of the runtime's end.
#[pyfunction]
pub(crate) fn serve_to_the_end() {
    serves();
}

/// Holds a thread that has nowhere to return to. Not to be called inside the interpreter.
fn stay_out() {
    let state = STATE.load(Ordering::Relaxed);
    if state == RUNNING || ENDS.get() || (state == ENDING && SERVES.get()) {
        return;
    }
    if let Some(left) = UNTIL.get().and_then(|until| until.checked_duration_since(Instant::now())) {
        std::thread::sleep(left);
    }
}

/// The same for a thread that is inside the interpreter, before it does anything here.
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn enter(py: Python<'_>) {
    if STATE.load(Ordering::Relaxed) != RUNNING {
        py.detach(stay_out);
    }
}

/// The calling thread ends the interpreter: no other that comes here returns, for at most `limit` seconds. Threads that
/// serve do until `done`.
#[pyfunction]
pub(crate) fn begin_exit(limit: f64, done: bool) -> PyResult<()> {
    let limit = duration(limit)?.min(Duration::from_secs(3600));
    ENDS.set(true);
    let _ = UNTIL.set(Instant::now() + limit);
    STATE.store(if done { ENDED } else { ENDING }, Ordering::SeqCst);
    Ok(())
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
    let known = callables(py)?.on_main_thread.bind(py).call0()?.extract()?;
    MAIN.set(Some(known));
    Ok(known)
}

/// An alarm has ended a wait: raises what this thread is to be told, if anything.
fn alarmed(py: Python<'_>) -> PyResult<()> {
    let told = callables(py)?.alarm.bind(py).call0()?;
    if told.is_none() { Ok(()) } else { Err(PyErr::from_value(told)) }
}

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
        let own = runtime.signal_fd();
        let before: i32 = set.call1(py, (own,))?.extract(py)?;
        runtime.forward_signals(if before == own { -1 } else { before });
        // A signal before this point is handled here, a later one wakes the wait.
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

/// Has the kernel kill this process when its parent ends; at once if the parent is not `parent` any more.
#[pyfunction]
pub(crate) fn die_with_parent(parent: u32) {
    mesh_runtime::die_with_parent(parent);
}

/// Has this process, once the interpreter has come to its end, exit with `status` whatever status that gives.
#[pyfunction]
pub(crate) fn exit_with(status: i32) {
    mesh_runtime::exit_with(status);
}

/// Has `ps` call this process `title`, and `top` call it `short`.
#[pyfunction]
pub(crate) fn name_process(title: &str, short: &str) {
    mesh_runtime::name_process(title, short);
}

/// Has the orphans below this process become its children.
#[pyfunction]
pub(crate) fn adopt_orphans() -> PyResult<()> {
    Ok(mesh_runtime::adopt_orphans()?)
}

/// Starts a program in a session of its own and returns its pid; `mark` is the soft limit, to which the pid is added, and
/// the hard one.
#[pyfunction]
pub(crate) fn start_marked(
    py: Python<'_>,
    argv: Vec<OsString>,
    env: Option<Vec<(OsString, OsString)>>,
    cwd: Option<PathBuf>,
    mark: Option<(u64, u64)>,
    stdio: [i32; 3],
) -> PyResult<u32> {
    let name = argv.first().cloned();
    let program = mesh_runtime::Program { argv, env, cwd, mark };
    // SAFETY: the caller's three descriptors stay open while it waits for this call.
    let stdio = stdio.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
    outside(py, || mesh_runtime::start_marked(program, stdio)).map_err(|error| {
        let text = error.to_string();
        // The interpreter chooses the class by the number.
        let said = text.split(" (os error").next().unwrap_or_default().to_owned();
        PyOSError::new_err((error.raw_os_error(), said, name))
    })
}

/// Stands before the handler that Python has just installed for SIGTERM: a second one, or `grace` seconds, kill.
#[pyfunction]
pub(crate) fn guard_sigterm(py: Python<'_>, grace: f64) -> PyResult<()> {
    mesh_runtime::sigterm::guard(duration(grace)?).map_err(|error| raise(py, &error))
}

/// Python's handler of SIGTERM runs.
#[pyfunction]
pub(crate) fn begin_sigterm(py: Python<'_>, grace: f64) -> PyResult<()> {
    mesh_runtime::sigterm::begin(duration(grace)?).map_err(|error| raise(py, &error))
}

/// What Python's handler of SIGTERM raised is lost: it is to run again.
#[pyfunction]
pub(crate) fn repeat_sigterm() {
    mesh_runtime::sigterm::repeat();
}

/// SIGTERM is not waited for any more.
#[pyfunction]
pub(crate) fn release_sigterm() {
    mesh_runtime::sigterm::release();
}
