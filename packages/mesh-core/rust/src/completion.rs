//! A completion that any thread can finish, and the handle by which native code does.

use crate::door;
use crate::inbox::PyWaker;
use mesh_runtime::{Completion, Fate, Finisher, Runtime, Waited};
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::ffi::CStr;
use std::os::fd::{IntoRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A promise's state, or a list of what has finished among others.
#[pyclass(name = "Completion", module = "mesh_core._native", frozen)]
pub(crate) struct PyCompletion {
    runtime: Arc<Runtime>,
    pub(crate) core: Arc<Completion>,
    /// The value, or what stands for the error.
    value: Mutex<Option<Py<PyAny>>>,
    /// The thread that has set it, as `threading.get_ident` has it.
    setter: AtomicU64,
    /// Who waited was interrupted: an error is of no interest any more.
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

    /// One that others finish.
    pub(crate) fn on(runtime: &Arc<Runtime>, core: Arc<Completion>) -> Self {
        Self { core, ..Self::new(runtime) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn original(&self, py: Python<'_>) -> PyResult<()> {
        self.runtime.original().map_err(|error| door::raise(py, &error))
    }
}

/// A fate as Python reads it, and the status of one that has it.
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
    /// Whether the outcome is there.
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

    /// Has it shown to those who look into this process, while somebody waits for it.
    fn show(&self, name: &str) {
        self.runtime.show_promise(name, &self.core);
    }

    /// Notes when it is finished, from now on.
    fn time(&self) {
        self.core.time();
    }

    /// When it was finished, in nanoseconds since the epoch; `None` if it is not, or if that was not noted.
    fn finished(&self) -> Option<u64> {
        self.core.finished()
    }

    /// All tokens of a list, which begins anew.
    fn take(&self) -> Vec<u64> {
        self.core.take()
    }

    /// Waits until a list has tokens, is done, or for `timeout`; in nobody's way, as it never reads what comes.
    #[pyo3(signature = (timeout=None))]
    fn wait_aside(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        door::serves();
        let until = door::deadline(timeout)?;
        door::outside(py, || self.runtime.wait_aside(&self.core, until));
        Ok(())
    }

    /// Waits until it is done (or, with `seen`, has more than so many tokens); false if `timeout` came first. Failures
    /// that the script has to be told of are raised meanwhile, unless `heed` says that another wait is to do that.
    #[pyo3(signature = (timeout=None, seen=None, heed=true))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, seen: Option<usize>, heed: bool) -> PyResult<bool> {
        door::enter(py);
        if self.core.is_done() || seen.is_some_and(|seen| self.core.arrived() > seen) {
            return Ok(true);
        }
        self.original(py)?;
        let until = door::deadline(timeout)?;
        let (runtime, core) = (&*self.runtime, &*self.core);
        let _waiting = core.block();
        let heard = AtomicU64::new(runtime.alarms_heard());
        let step = |look, signals| {
            let alarms = runtime.alarms();
            let since = heed.then(|| heard.load(Ordering::Relaxed));
            let waited = runtime.wait_completion(core, seen, until, look, signals, since);
            if waited == Waited::Alarm {
                // Not one that has come since: it ends the next wait at once.
                heard.store(alarms, Ordering::Relaxed);
            }
            waited
        };
        door::wait(py, runtime, step, until)
    }

    /// Waits as long as looking again is cheaper than sleeping; true if it has progressed.
    #[pyo3(signature = (seen=None))]
    fn look(&self, py: Python<'_>, seen: Option<usize>) -> bool {
        let step = || self.runtime.wait_completion(&self.core, seen, None, true, false, None);
        door::outside(py, step) == Waited::Ready
    }

    /// Has a loop's waker told `token` when it is done (or has more than `seen` tokens).
    #[pyo3(signature = (waker, token, seen=usize::MAX))]
    fn tell(&self, py: Python<'_>, waker: &PyWaker, token: u64, seen: usize) -> PyResult<()> {
        self.original(py)?;
        self.core.tell(&waker.0, token, seen);
        Ok(())
    }

    /// Has a list, `listener`, get `token` when it is done (or has more than `seen` tokens).
    #[pyo3(signature = (listener, token, seen=usize::MAX))]
    fn note(&self, py: Python<'_>, listener: &PyCompletion, token: u64, seen: usize) -> PyResult<()> {
        self.original(py)?;
        self.core.note(&listener.core, token, seen);
        Ok(())
    }

    /// The list wants to know no more.
    fn forget(&self, listener: &PyCompletion) {
        if self.runtime.original().is_ok() {
            self.core.forget(&listener.core);
        }
    }

    /// Gives the outcome: a value, or what stands for an error. False if there is one.
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

    /// The outcome: 0 with a value, 1 with what stands for an error, 2 cancelled, 3 broken, 4 with a status; `None` if
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

    /// The thread that has set the outcome; 0 for none.
    #[getter]
    fn setter(&self) -> u64 {
        self.setter.load(Ordering::Relaxed)
    }

    /// Whether who waited has given it up.
    #[getter]
    fn cancelled(&self) -> bool {
        self.core.fate() == Some(Fate::Cancelled)
    }

    /// Who waited was interrupted: an error is of no interest any more.
    fn look_away(&self) {
        self.away.store(true, Ordering::Relaxed);
    }

    #[getter]
    fn away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }

    /// Gives up waiting; false if there is an outcome.
    fn cancel(&self) -> bool {
        self.core.finish(Fate::Cancelled)
    }

    /// Says which actor is about to wait for it.
    fn asked_by(&self, actor: u64) {
        self.core.asked_by(actor);
    }

    /// Nobody in particular is asked, so nobody is missing, and no actor is.
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

    /// What may finish it; once it has gone there is an outcome.
    fn finisher(&self) -> PyFinisher {
        PyFinisher(Finisher::new(&self.core))
    }

    /// The write end of a pipe by which the promise can be finished; the caller's to close.
    fn descriptor(&self, py: Python<'_>, finisher: &PyFinisher) -> PyResult<RawFd> {
        let made = self.runtime.finish_by_descriptor(&finisher.0);
        made.map(IntoRawFd::into_raw_fd).map_err(|error| door::raise(py, &error))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Held by another thread it is being filled or read, and so in use.
        match self.value.try_lock() {
            Ok(value) => value.as_ref().map_or(Ok(()), |value| visit.call(value)),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        let value = self.lock().take();
        // Not under the lock: it may run anything.
        drop(value);
    }
}

/// The right to finish a completion: with the last reference to it, native code's included, the promise is broken.
#[pyclass(name = "Finisher", module = "mesh_core._native", frozen)]
pub(crate) struct PyFinisher(Arc<Finisher>);

/// What native code of other extensions finishes a promise by. The fields up to `release` are public: `docs` has them in
/// C.
#[repr(C)]
struct Handle {
    version: u32,
    finish: unsafe extern "C" fn(*const Handle, i32) -> i32,
    retain: unsafe extern "C" fn(*const Handle),
    release: unsafe extern "C" fn(*const Handle),
    finisher: Arc<Finisher>,
}

const VERSION: u32 = 1;
const NAME: &CStr = c"mesh_core.promise";

const FINISHED: i32 = 0;
const HAD_AN_OUTCOME: i32 = 1;
const IN_A_FORKED_COPY: i32 = -1;

unsafe extern "C" fn finish(handle: *const Handle, status: i32) -> i32 {
    // SAFETY: whoever calls holds a reference to the handle, which keeps it alive and unchanged.
    let finisher = unsafe { &(*handle).finisher };
    if finisher.is_copy() {
        IN_A_FORKED_COPY
    } else if finisher.finish(Fate::Status(status)) {
        FINISHED
    } else {
        HAD_AN_OUTCOME
    }
}

unsafe extern "C" fn retain(handle: *const Handle) {
    // SAFETY: handles come from `Arc::into_raw`, and whoever calls holds a reference.
    unsafe { Arc::increment_strong_count(handle) };
}

unsafe extern "C" fn release(handle: *const Handle) {
    // SAFETY: handles come from `Arc::into_raw`, and whoever calls gives away a reference of its own.
    unsafe { Arc::decrement_strong_count(handle) };
}

unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule being destroyed is valid, and this destructor belongs to capsules of this name alone.
    let handle = unsafe { ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()) };
    if !handle.is_null() {
        // SAFETY: the capsule has had one reference since it was made.
        unsafe { release(handle.cast_const().cast()) };
    }
}

#[pymethods]
impl PyFinisher {
    /// A capsule with a handle for native code.
    fn handle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let handle = Arc::new(Handle { version: VERSION, finish, retain, release, finisher: Arc::clone(&self.0) });
        let raw = Arc::into_raw(handle);
        let Some(pointer) = NonNull::new(raw.cast_mut().cast()) else {
            return Err(PyMemoryError::new_err("no memory for a handle"));
        };
        // SAFETY: the pointer is good until its last reference goes; the capsule has one, which `drop_capsule` returns,
        // on any thread.
        let made = unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, NAME, Some(drop_capsule)) };
        if made.is_err() {
            // SAFETY: no capsule has taken the reference.
            unsafe { release(raw) };
        }
        made
    }
}
