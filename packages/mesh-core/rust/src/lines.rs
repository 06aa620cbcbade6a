//! Lines printed by a worker in the usual way: first the text, then its end. `_system/streams.py` handles everything else.

use crate::door::outside;
use mesh_runtime::write_whole;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{ThreadId, current};

/// Longer lines are left to Python.
const LONGEST: usize = 64 * 1024;

type Instance = Option<Py<PyAny>>;

#[derive(Default)]
struct State {
    /// The beginning of each thread's unfinished line, and the actor that wrote it.
    pending: HashMap<ThreadId, (String, Instance)>,
    /// The actor that wrote last, and its mark.
    last: Option<(Instance, Vec<u8>)>,
    /// Set if a line was sent in part; every line then goes through Python.
    begun: bool,
}

/// One of a worker's two streams. The locks `state` and `lock` are held briefly, inside the interpreter. The lock within `lock`
/// is held outside the interpreter, while a line is written.
#[pyclass(name = "LineWriter", module = "mesh_core._native", frozen)]
pub(crate) struct PyLineWriter {
    fd: i32,
    /// Returns an actor and its message, or nothing, as `ContextVar.get` does.
    context: Py<PyAny>,
    /// Creates the mark of an actor.
    mark: Py<PyAny>,
    /// Writes text that is not a single line, given the unfinished line before it and its actor.
    other: Py<PyAny>,
    state: Mutex<State>,
    lock: Mutex<Arc<Mutex<()>>>,
}

fn same(py: Python<'_>, one: &Instance, other: Option<&Bound<'_, PyAny>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.bind(py).is(other),
        (None, None) => true,
        _ => false,
    }
}

fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PyLineWriter {
    fn put(&self, py: Python<'_>, data: &[u8]) -> PyResult<()> {
        let lock = Arc::clone(&hold(&self.lock));
        let mut done = 0;
        loop {
            let written = outside(py, || {
                let _guard = hold(&lock);
                write_whole(self.fd, &data[done..])
            });
            match written {
                Ok(()) => return Ok(()),
                // A signal: its handler runs here, and may itself print.
                Err((n, mesh_runtime::Errno::INTR)) => {
                    done += n;
                    py.check_signals()?;
                }
                // The controller is gone, and this process will end too.
                Err((_, mesh_runtime::Errno::PIPE)) => return Ok(()),
                Err((_, errno)) => return Err(PyOSError::new_err((errno.raw_os_error(), errno.to_string()))),
            }
        }
    }
}

#[pymethods]
impl PyLineWriter {
    #[new]
    fn new(fd: i32, context: Py<PyAny>, mark: Py<PyAny>, other: Py<PyAny>) -> Self {
        Self { fd, context, mark, other, state: Mutex::default(), lock: Mutex::default() }
    }

    /// Writes text; the beginning of a line is kept until its end comes.
    fn write(&self, py: Python<'_>, text: &Bound<'_, PyString>) -> PyResult<usize> {
        let context = self.context.bind(py).call0()?;
        let instance = match context.is_none() {
            true => None,
            false => Some(context.cast_into::<PyTuple>()?.get_item(0)?),
        };
        let thread = current().id();
        let plain = text.to_str().ok();
        let mut state = hold(&self.state);
        let known = state.last.as_ref().is_some_and(|(last, _)| same(py, last, instance.as_ref()));
        let begun = state.pending.remove(&thread);
        let usual = begun.as_ref().is_none_or(|(begun, by)| same(py, by, instance.as_ref()) && begun.len() <= LONGEST);
        if let Some(plain) = plain
            && usual
            && plain.len() <= LONGEST
        {
            match plain.bytes().position(|byte| byte == b'\n') {
                None => {
                    let whole = match begun {
                        Some((mut begun, by)) => {
                            begun.push_str(plain);
                            (begun, by)
                        }
                        None => (plain.to_owned(), instance.map(Bound::unbind)),
                    };
                    state.pending.insert(thread, whole);
                    return text.len();
                }
                Some(at) if at + 1 == plain.len() && known && !state.begun => {
                    let begun = begun.map_or_else(String::new, |(begun, _)| begun);
                    let mark = state.last.as_ref().map_or(&[][..], |(_, mark)| mark.as_slice());
                    let data = [mark, begun.as_bytes(), plain.as_bytes()].concat();
                    drop(state);
                    self.put(py, &data)?;
                    return text.len();
                }
                Some(_) => {}
            }
        }
        drop(state);
        if !known {
            let mark: Vec<u8> = self.mark.bind(py).call1((instance.as_ref(),))?.extract()?;
            let last = (instance.as_ref().map(|instance| instance.clone().unbind()), mark);
            let before = hold(&self.state).last.replace(last);
            drop(before);
        }
        let (begun, by) = begun.map_or((None, None), |(begun, by)| (Some(begun), by));
        self.other.bind(py).call1((text, instance, begun, by))?;
        text.len()
    }

    /// Keeps the beginning of a line until its end comes.
    fn wait(&self, text: String, instance: Option<Py<PyAny>>) {
        hold(&self.state).pending.insert(current().id(), (text, instance));
    }

    /// Takes the unfinished line of this thread, and its actor.
    fn take(&self) -> Option<(String, Option<Py<PyAny>>)> {
        hold(&self.state).pending.remove(&current().id())
    }

    /// Takes the unfinished lines of all threads.
    fn take_all(&self) -> Vec<(String, Option<Py<PyAny>>)> {
        std::mem::take(&mut hold(&self.state).pending).into_values().collect()
    }

    /// Sets whether a line was sent in part.
    fn begun(&self, begun: bool) {
        hold(&self.state).begun = begun;
    }

    /// Writes bytes in one piece.
    fn send(&self, py: Python<'_>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        self.put(py, data.as_bytes())
    }

    /// In a forked child, drops the locks and lines of other threads.
    fn forked(&self) {
        *hold(&self.lock) = Arc::default();
        hold(&self.state).pending.clear();
    }
}
