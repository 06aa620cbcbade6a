//! A call that waits for its replies.

use crate::codes;
use crate::completion::PyCompletion;
use crate::door;
use crate::inbox::{PyMessage, PyWaker};
use mesh_proto::hosts::Fate;
use mesh_proto::{ActorId, Deserter, Ended, Exit, ProcAddr, Target};
use mesh_runtime::{Call, Mailbox, Outcome, Receive, Runtime, Waited};
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A rank that will never reply, and why.
#[pyclass(name = "Lost", module = "mesh_core._native", frozen)]
pub(crate) struct PyLost {
    pub(crate) ended: Arc<Ended>,
    /// Its process.
    at: ProcAddr,
    /// Of one that had the port of the call, rather than being called: its address, and what people call it.
    holder: Option<(ProcAddr, Arc<str>)>,
}

impl PyLost {
    pub(crate) fn called(ended: Arc<Ended>, at: ProcAddr) -> Self {
        Self { ended, at, holder: None }
    }
}

impl PyCall {
    /// A call of this process's own, for whom it names.
    pub(crate) fn of(runtime: &Arc<Runtime>, call: Arc<Call>, target: Target) -> Self {
        Self { runtime: Arc::clone(runtime), call, target: Arc::new(target), actor: 0, port: None }
    }

    /// The process at a place of the target.
    fn place(&self, index: usize) -> ProcAddr {
        self.target.place(index).unwrap_or(self.runtime.me())
    }
}

/// What the kernel kills with, on every machine that Linux runs on.
const SIGKILL: i32 = 9;

#[pymethods]
impl PyLost {
    /// What kind of end it came to: a `FailureKind`.
    #[getter]
    fn kind(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        codes::end(py, self.ended.kind())
    }

    /// Whether its process was never made, as far as anybody knows.
    #[getter]
    fn never_ran(&self) -> bool {
        self.ended.never_ran()
    }

    /// Why its host is dead, in one word; empty if it did not end with its host.
    #[getter]
    fn fate(&self) -> &'static str {
        self.ended.fate().map_or("", Fate::word)
    }

    #[getter]
    fn pid(&self) -> Option<u32> {
        self.ended.pid
    }

    #[getter]
    fn exitcode(&self) -> Option<i32> {
        match self.ended.exit {
            Exit::Code(code) => Some(code),
            _ => None,
        }
    }

    #[getter]
    fn signal(&self) -> Option<i32> {
        match self.ended.exit {
            Exit::Signal(signal) => Some(signal),
            Exit::OutOfMemory => Some(SIGKILL),
            _ => None,
        }
    }

    /// Whether the kernel killed it as memory was short.
    #[getter]
    fn out_of_memory(&self) -> bool {
        self.ended.exit == Exit::OutOfMemory
    }

    #[getter]
    fn orderly(&self) -> bool {
        self.ended.orderly
    }

    /// What is known beyond the status, in words.
    #[getter]
    fn reason(&self) -> String {
        self.ended.reason.to_string()
    }

    /// The mesh and rank of its process: those of no other process of the job, where a rank may have had several.
    #[getter]
    fn process(&self) -> (u64, u32) {
        (self.at.mesh, self.at.rank)
    }

    /// Where it had the port of the call, rather than being called: its mesh, rank and host, and what the actor there is
    /// called.
    #[getter]
    fn holder(&self) -> Option<(u64, u32, u32, String)> {
        let (addr, name) = self.holder.as_ref()?;
        Some((addr.mesh, addr.rank, addr.host, name.to_string()))
    }

    #[getter]
    fn stderr_tail(&self) -> Vec<String> {
        self.ended.stderr_tail.clone()
    }
}

/// A call from its sending to its last reply.
#[pyclass(name = "Call", module = "mesh_core._native", frozen)]
pub(crate) struct PyCall {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) call: Arc<Call>,
    pub(crate) target: Arc<Target>,
    pub(crate) actor: ActorId,
    /// Where the one value comes from, if this is a wait for a port rather than a call.
    pub(crate) port: Option<(Arc<Mailbox>, Arc<Receive>)>,
}

impl Drop for PyCall {
    fn drop(&mut self) {
        match &self.port {
            Some((mailbox, receive)) => mailbox.give_up(receive),
            None => self.runtime.abandon(&self.call),
        }
    }
}

fn deserted(lost: Deserter) -> PyLost {
    PyLost { ended: lost.ended, at: lost.addr, holder: Some((lost.addr, lost.name)) }
}

/// A reply as Python sees it: a message, a loss, or None for a call that was cancelled.
fn outcome(py: Python<'_>, runtime: &Arc<Runtime>, outcome: Outcome, at: ProcAddr) -> PyResult<Py<PyAny>> {
    Ok(match outcome {
        Outcome::Replied(message) => PyMessage::shared(runtime, message).into_pyobject(py)?.into_any().unbind(),
        Outcome::Lost(ended) => PyLost::called(ended, at).into_pyobject(py)?.into_any().unbind(),
        Outcome::Deserted(lost) => deserted(lost).into_pyobject(py)?.into_any().unbind(),
        Outcome::Cancelled => py.None(),
    })
}

#[pymethods]
impl PyCall {
    /// Whether every outcome is there.
    fn done(&self) -> bool {
        self.call.is_done()
    }

    /// How many outcomes a streamed call has.
    fn arrived(&self) -> usize {
        self.call.arrived()
    }

    /// Waits until all outcomes are there (or, with `seen`, more than so many); false if `timeout` came first. Failures
    /// that the script has to be told of are raised meanwhile, unless `heed` says that another wait is to do that.
    #[pyo3(signature = (timeout=None, seen=None, heed=true))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, seen: Option<usize>, heed: bool) -> PyResult<bool> {
        door::enter(py);
        if self.call.is_done() || seen.is_some_and(|seen| self.call.arrived() > seen) {
            return Ok(true);
        }
        let until = door::deadline(timeout)?;
        let (runtime, call) = (&*self.runtime, &*self.call);
        let _waiting = call.block();
        if !heed {
            let step = |look, signals| runtime.wait_call(call, seen, until, look, signals);
            return door::wait(py, runtime, step, until);
        }
        let heard = AtomicU64::new(runtime.alarms_heard());
        let step = |look, signals| {
            let alarms = runtime.alarms();
            let waited = runtime.wait_call_or_alarm(call, seen, until, look, signals, heard.load(Ordering::Relaxed));
            if waited == Waited::Alarm {
                // Not one that has come since: it ends the next wait at once.
                heard.store(alarms, Ordering::Relaxed);
            }
            waited
        };
        door::wait(py, runtime, step, until)
    }

    /// Who waited was interrupted: of a failure nobody is to be told.
    fn look_away(&self) {
        self.call.look_away();
    }

    /// Waits as long as looking again is cheaper than sleeping; true if the call has progressed.
    #[pyo3(signature = (seen=None))]
    fn look(&self, py: Python<'_>, seen: Option<usize>) -> bool {
        door::outside(py, || self.runtime.wait_call(&self.call, seen, None, true, false)) == Waited::Ready
    }

    /// All outcomes in the order of the target; once only.
    fn outcomes(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let all = self.call.take_outcomes().unwrap_or_default();
        all.into_iter().enumerate().map(|(index, one)| outcome(py, &self.runtime, one, self.place(index))).collect()
    }

    /// The first rank whose process has died, while others have not answered yet.
    fn lost(&self) -> Option<(usize, PyLost)> {
        match self.call.lost()? {
            (index, Outcome::Lost(ended)) => Some((index, PyLost::called(ended, self.place(index)))),
            (index, Outcome::Deserted(lost)) => Some((index, deserted(lost))),
            (_, Outcome::Replied(_) | Outcome::Cancelled) => None,
        }
    }

    /// The `n`th outcome of a stream, in order of arrival, with its place in the target.
    fn nth(&self, py: Python<'_>, n: usize) -> PyResult<Option<(usize, Py<PyAny>)>> {
        match self.call.nth(n) {
            Some((index, one)) => Ok(Some((index, outcome(py, &self.runtime, one, self.place(index))?))),
            None => Ok(None),
        }
    }

    /// Whoever reads the stream has come to its `n`th outcome.
    fn hand_out(&self, n: usize) {
        self.call.hand_out(n);
    }

    /// As `nth`, and lets go of it: it cannot be had again.
    fn take_nth(&self, py: Python<'_>, n: usize) -> PyResult<Option<(usize, Py<PyAny>)>> {
        match self.call.take_nth(n) {
            Some((index, one)) => Ok(Some((index, outcome(py, &self.runtime, one, self.place(index))?))),
            None => Ok(None),
        }
    }

    /// Has a loop's waker told `token` when the call is complete (or, streamed, has more than `seen` outcomes).
    #[pyo3(signature = (waker, token, seen=usize::MAX))]
    fn tell(&self, waker: &PyWaker, token: u64, seen: usize) {
        self.runtime.tell_loop(&self.call, &waker.0, token, seen);
    }

    /// Has a list, `listener`, get `token` when the call is complete (or has more than `seen` outcomes).
    #[pyo3(signature = (listener, token, seen=usize::MAX))]
    fn note(&self, py: Python<'_>, listener: &PyCompletion, token: u64, seen: usize) -> PyResult<()> {
        self.runtime.original().map_err(|error| door::raise(py, &error))?;
        self.runtime.tell_list(&self.call, &listener.core, token, seen);
        Ok(())
    }

    /// The list wants to know no more.
    fn forget(&self, listener: &PyCompletion) {
        if self.runtime.original().is_ok() {
            self.call.forget(&listener.core);
        }
    }

    /// Says which actor is about to wait for it.
    fn asked_by(&self, actor: u64) {
        self.call.asked_by(actor);
    }

    /// Whether it was not sent yet, since a receiver lags behind.
    fn waits_here(&self) -> bool {
        self.runtime.waits_here(self.call.id)
    }

    /// Places in the target of those that have not answered.
    fn missing(&self) -> Vec<usize> {
        self.call.missing()
    }

    /// The actor that was called; 0 for none.
    #[getter]
    fn actor(&self) -> u64 {
        self.actor
    }

    /// Whether an actor of this very process was called.
    fn is_local(&self) -> bool {
        self.target.index_of(self.runtime.me()).is_some()
    }

    /// Gives up waiting; false if the call was complete.
    fn cancel(&self, py: Python<'_>) -> bool {
        if let Some((mailbox, receive)) = &self.port {
            return mailbox.cancel(receive);
        }
        door::outside(py, || self.runtime.cancel(&self.call, &self.target, self.actor))
    }

    /// Takes a task back: it is answered that it has not begun, or goes on; with `begun` a coroutine is cancelled then.
    fn take_back(&self, py: Python<'_>, begun: bool) {
        door::outside(py, || self.runtime.take_back_task(&self.call, &self.target, self.actor, begun));
    }

    /// When the last outcome came, in nanoseconds since the epoch; only where the call was to note it.
    fn finished(&self) -> Option<u64> {
        self.call.finished()
    }

    /// Makes outcomes complete that were given to no one: how many receivers there are.
    fn __len__(&self) -> usize {
        self.target.len()
    }
}
