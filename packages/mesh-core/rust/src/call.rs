//! Calls that wait for their replies.

use crate::completion::PyCompletion;
use crate::door::{self, outside};
use crate::errors::OrRaise as _;
use crate::event_loop::PyWaker;
use crate::lost::PyLost;
use crate::message::PyMessage;
use crate::runtime::PyRuntime;
use crate::time::{deadline, duration};
use mesh_proto::{ActorId, ProcAddr, Target};
use mesh_runtime::{Call, Mailbox, Outcome, Receive, Runtime, Waited, Which};
use pyo3::prelude::*;
use std::sync::Arc;

/// A call, from sending it to its last reply.
#[pyclass(name = "Call", module = "mesh_core._native", frozen)]
pub(crate) struct PyCall {
    runtime: Arc<Runtime>,
    pub(crate) call: Arc<Call>,
    target: Arc<Target>,
    actor: ActorId,
    /// The source of the one value, if this waits for a port rather than for replies.
    port: Option<(Arc<Mailbox>, Arc<Receive>)>,
}

impl Drop for PyCall {
    fn drop(&mut self) {
        match &self.port {
            Some((mailbox, receive)) => mailbox.give_up(receive),
            None => self.runtime.abandon(&self.call),
        }
    }
}

impl PyCall {
    /// A call to an actor.
    pub(crate) fn to_actor(runtime: &Arc<Runtime>, call: Arc<Call>, target: Arc<Target>, actor: ActorId) -> Self {
        Self { runtime: Arc::clone(runtime), call, target, actor, port: None }
    }

    /// A call to processes.
    pub(crate) fn of(runtime: &Arc<Runtime>, call: Arc<Call>, target: impl Into<Arc<Target>>) -> Self {
        Self::to_actor(runtime, call, target.into(), 0)
    }

    /// The wait for the next value of a port.
    pub(crate) fn receive(
        runtime: &Arc<Runtime>,
        mailbox: &Arc<Mailbox>,
        receive: Arc<Receive>,
        target: &Arc<Target>,
    ) -> Self {
        let (runtime, call, target) = (Arc::clone(runtime), Arc::clone(&receive.call), Arc::clone(target));
        Self { runtime, call, target, actor: 0, port: Some((Arc::clone(mailbox), receive)) }
    }

    fn which(&self, nth: Option<usize>) -> Which {
        match (nth, &self.port) {
            (Some(nth), _) => Which::Nth(nth),
            (None, Some(_)) => Which::Sender,
            (None, None) => Which::All,
        }
    }

    /// The process at a place of the target.
    fn place(&self, index: usize) -> ProcAddr {
        self.target.place(index).unwrap_or(self.runtime.me())
    }

    /// Converts an outcome for Python: a message, a loss, or `None` for a call that was cancelled.
    fn outcome(&self, py: Python<'_>, index: usize, outcome: Outcome) -> PyResult<Py<PyAny>> {
        Ok(match outcome {
            Outcome::Replied(message) => Py::new(py, PyMessage::shared(&self.runtime, message))?.into_any(),
            Outcome::Lost(ended) => Py::new(py, PyLost::called(ended, self.place(index)))?.into_any(),
            Outcome::Deserted(lost) => Py::new(py, PyLost::holding(lost))?.into_any(),
            Outcome::Cancelled => py.None(),
        })
    }
}

#[pymethods]
impl PyCall {
    /// Whether all outcomes have arrived.
    fn done(&self) -> bool {
        self.call.is_done()
    }

    /// How many outcomes a streamed call has.
    fn arrived(&self) -> usize {
        self.call.arrived()
    }

    /// Waits until all outcomes have arrived (or, with `seen`, more than that many); false if `timeout` passed first. Failures
    /// that the script must be notified of are raised meanwhile, unless `heed` is false because another wait does so.
    #[pyo3(signature = (timeout=None, seen=None, heed=true))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>, seen: Option<usize>, heed: bool) -> PyResult<bool> {
        door::enter(py);
        if self.call.is_done() || seen.is_some_and(|seen| self.call.arrived() > seen) {
            return Ok(true);
        }
        let until = deadline(timeout)?;
        let wait = self.runtime.wait_for(&*self.call, seen, until, heed);
        door::wait(py, &self.runtime, |look, signals| wait.step(look, signals), until)
    }

    /// Whether processes that have answered have printed something that was not shown yet: those that were called or, with
    /// `nth`, the one that gave this outcome of a stream.
    #[pyo3(signature = (nth=None))]
    fn is_behind(&self, nth: Option<usize>) -> bool {
        self.runtime.is_behind(&self.call, &self.target, self.which(nth))
    }

    /// Those processes that have reported so when they answered: host, mesh and rank.
    #[pyo3(signature = (nth=None))]
    fn printed(&self, nth: Option<usize>) -> Vec<(u32, u64, u32)> {
        let procs = self.runtime.printed(&self.call, &self.target, self.which(nth));
        procs.into_iter().map(|addr| (addr.host, addr.mesh, addr.rank)).collect()
    }

    /// What is done when that has been shown, or after `limit` seconds; `None` if it is of no use to wait.
    #[pyo3(signature = (limit, nth=None))]
    fn catch_up(&self, py: Python<'_>, limit: f64, nth: Option<usize>) -> PyResult<Option<PyCompletion>> {
        let (which, limit) = (self.which(nth), duration(limit)?);
        let core = outside(py, || self.runtime.catch_up(&self.call, &self.target, which, limit));
        Ok(core.map(|core| PyCompletion::on(&self.runtime, core)))
    }

    /// Marks the waiter as interrupted: a failure is not reported to anybody.
    fn look_away(&self) {
        self.call.look_away();
    }

    /// Spins as long as that is cheaper than sleeping; true if the call has progressed.
    #[pyo3(signature = (seen=None))]
    fn look(&self, py: Python<'_>, seen: Option<usize>) -> bool {
        outside(py, || self.runtime.wait_call(&self.call, seen, None, true, false)) == Waited::Ready
    }

    /// Takes all outcomes, in the order of the target. Works once.
    fn outcomes(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let all = self.call.take_outcomes().unwrap_or_default();
        all.into_iter().enumerate().map(|(index, one)| self.outcome(py, index, one)).collect()
    }

    /// The first rank whose process died while others have not answered.
    fn lost(&self) -> Option<(usize, PyLost)> {
        match self.call.lost()? {
            (index, Outcome::Lost(ended)) => Some((index, PyLost::called(ended, self.place(index)))),
            (index, Outcome::Deserted(lost)) => Some((index, PyLost::holding(lost))),
            (_, Outcome::Replied(_) | Outcome::Cancelled) => None,
        }
    }

    /// The `n`th outcome of a stream, in order of arrival, with its place in the target.
    fn nth(&self, py: Python<'_>, n: usize) -> PyResult<Option<(usize, Py<PyAny>)>> {
        let nth = self.call.nth(n);
        nth.map(|(index, one)| Ok((index, self.outcome(py, index, one)?))).transpose()
    }

    /// Notes that the reader of the stream reached its `n`th outcome.
    fn hand_out(&self, n: usize) {
        self.call.hand_out(n);
    }

    /// Like `nth`, but removes the outcome.
    fn take_nth(&self, py: Python<'_>, n: usize) -> PyResult<Option<(usize, Py<PyAny>)>> {
        let nth = self.call.take_nth(n);
        nth.map(|(index, one)| Ok((index, self.outcome(py, index, one)?))).transpose()
    }

    /// Gives `token` to a loop's waker when the call is complete (or, streamed, has more than `seen` outcomes).
    #[pyo3(signature = (waker, token, seen=usize::MAX))]
    fn tell(&self, waker: &PyWaker, token: u64, seen: usize) {
        self.call.tell(self.runtime.reactor(), &waker.0, token, seen);
    }

    /// Gives `token` to a list, `listener`, when the call is complete (or has more than `seen` outcomes).
    #[pyo3(signature = (listener, token, seen=usize::MAX))]
    fn note(&self, py: Python<'_>, listener: &PyCompletion, token: u64, seen: usize) -> PyResult<()> {
        self.runtime.original().or_raise(py)?;
        self.call.note(self.runtime.reactor(), &listener.core, token, seen);
        Ok(())
    }

    /// Stops notifying the list.
    fn forget(&self, listener: &PyCompletion) {
        if self.runtime.original().is_ok() {
            self.call.forget(&listener.core);
        }
    }

    /// Notes which actor is about to wait for it.
    fn asked_by(&self, actor: u64) {
        self.call.asked_by(actor);
    }

    /// Whether it has not been sent yet because a receiver lags behind.
    fn waits_here(&self) -> bool {
        self.runtime.waits_here(self.call.id)
    }

    /// The places in the target that have not answered.
    fn missing(&self) -> Vec<usize> {
        self.call.missing()
    }

    /// The actor that was called; 0 for none.
    #[getter]
    fn actor(&self) -> u64 {
        self.actor
    }

    /// Whether an actor of this process was called.
    fn is_local(&self) -> bool {
        self.target.index_of(self.runtime.me()).is_some()
    }

    /// Cancels the call; false if it was complete.
    fn cancel(&self, py: Python<'_>) -> bool {
        if let Some((mailbox, receive)) = &self.port {
            return mailbox.cancel(receive);
        }
        outside(py, || self.runtime.cancel(&self.call, &self.target, self.actor))
    }

    /// Takes a task back. If it has begun, it continues unless it is a coroutine and `begun` says to cancel it.
    fn take_back(&self, py: Python<'_>, begun: bool) {
        outside(py, || self.runtime.take_back_task(&self.call, &self.target, self.actor, begun));
    }

    /// When the last outcome arrived, in nanoseconds since the epoch, if the call records it.
    fn finished(&self) -> Option<u64> {
        self.call.finished()
    }

    /// How many receivers there are.
    fn __len__(&self) -> usize {
        self.target.len()
    }
}

#[pymethods]
impl PyRuntime {
    /// Makes every call that a thread waits for raise the result of `Callables::alarm`.
    fn alarm(&self, py: Python<'_>) {
        outside(py, || self.0.alarm());
    }

    /// Ends the alarm for waits that begin later.
    fn calm(&self) {
        self.0.alarms().calm();
    }

    /// Takes the notices of failed calls that are held by somebody but were never looked at.
    fn unseen(&self) -> Vec<PyMessage> {
        self.0.unseen().into_iter().map(|message| PyMessage::shared(&self.0, Arc::new(message))).collect()
    }
}
