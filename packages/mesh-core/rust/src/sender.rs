//! Senders: the way to one endpoint of some actors.

use crate::call::PyCall;
use crate::callables::callables;
use crate::codes;
use crate::deferral::PyDeferral;
use crate::door;
use crate::errors::OrRaise as _;
use crate::gate::{self, in_coroutine};
use crate::payload::Payload;
use crate::runtime::PyRuntime;
use crate::target::PyTarget;
use crate::time::deadline;
use mesh_proto::control::Inspect;
use mesh_proto::messages::Request;
use mesh_runtime::{Later, Road, Sender, SenderSpec, Terms, TooLong};
use pyo3::exceptions::{PyLookupError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Instant;

/// The way to one endpoint of some actors: everything about a message but its arguments.
#[pyclass(name = "Sender", module = "mesh_core._native", frozen)]
pub(crate) struct PySender {
    sender: Sender,
    /// The receiver to name in errors; it refers back to this.
    who: Option<Py<PyAny>>,
}

fn too_long(error: TooLong) -> PyErr {
    PyValueError::new_err(error.to_string())
}

impl PySender {
    fn like(&self, py: Python<'_>, sender: Sender) -> Self {
        Self { sender, who: self.who.as_ref().map(|who| who.clone_ref(py)) }
    }

    fn begun(&self, road: &Road, call: Arc<mesh_runtime::Call>) -> PyCall {
        PyCall::to_actor(self.sender.runtime(), call, Arc::clone(road.target()), self.sender.actor())
    }

    /// Counts the message against its receivers' budgets. Returns whether it was counted, or how it is to be sent later.
    fn admit(
        &self,
        py: Python<'_>,
        road: &Road,
        payload: &Payload<'_>,
        until: Option<Instant>,
    ) -> PyResult<Result<bool, Later>> {
        let admission = self.sender.admission(road, payload.len(), until).or_raise(py)?;
        gate::admit(py, road.gate(), self.who.as_ref(), admission)
    }

    /// A thread that outruns a connection waits here; a coroutine gets something to wait for.
    fn hold_back(&self, py: Python<'_>, road: &Road, queued: usize) -> PyResult<Option<PyDeferral>> {
        if !self.sender.has_outrun(queued) {
            return Ok(None);
        }
        gate::hold_back(py, self.sender.runtime(), road.target(), self.sender.actor())
    }

    #[cold]
    fn call_later(
        &self,
        py: Python<'_>,
        road: &Road,
        payload: Payload<'_>,
        stream: bool,
        later: Later,
    ) -> PyResult<PyCall> {
        let send = |body: mesh_runtime::Body<'_>, later| self.sender.call_later(road, body, stream, later);
        let call = payload.entrust(py, later, self.sender.called(), send)?;
        Ok(self.begun(road, call))
    }

    /// If too many arguments of spawns wait to be sent, a thread waits here and a coroutine is refused.
    fn spawn(&self, py: Python<'_>, road: &Road, payload: &Payload<'_>, terms: Terms) -> PyResult<PyCall> {
        let runtime = self.sender.runtime();
        if let Some(sizes) = runtime.spawns_wait()
            && in_coroutine(py)?
        {
            let refused = callables(py)?.not_spawned.bind(py).call1(sizes)?;
            return Err(PyErr::from_value(refused));
        }
        let send = |body: mesh_runtime::Body<'_>| self.sender.call_spawn(road, body, terms);
        let (call, queued, held) = payload.ship(py, road.target(), self.sender.called(), send)?;
        let call = self.begun(road, call);
        if let Some(held) = held
            && !in_coroutine(py)?
        {
            let step = |look, signals| runtime.wait_completion(&held, None, None, look, signals, None);
            door::wait(py, runtime, step, None)?;
        }
        self.hold_back(py, road, queued)?;
        Ok(call)
    }
}

#[pymethods]
impl PySender {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.who)
    }

    /// Returns the same sender, with a trace's context in every message.
    fn traced(&self, py: Python<'_>, context: &str) -> PyResult<Self> {
        Ok(self.like(py, self.sender.traced(context).map_err(too_long)?))
    }

    /// Returns the same sender, for streams whose generators are at most `ahead` bytes ahead of their reader.
    fn reading(&self, py: Python<'_>, ahead: u64) -> Self {
        self.like(py, self.sender.reading(ahead))
    }

    /// Sends `value` and returns the call that waits for the replies; after `limit` seconds they are no longer wanted.
    #[pyo3(signature = (value, stream=false, limit=None))]
    fn call(&self, py: Python<'_>, value: &Bound<'_, PyAny>, stream: bool, limit: Option<f64>) -> PyResult<PyCall> {
        door::enter(py);
        let payload = Payload::dump(value)?;
        let road = self.sender.road();
        let until = deadline(limit)?;
        let terms = self.sender.terms(until);
        if self.sender.is_spawn() {
            return self.spawn(py, &road, &payload, terms);
        }
        if self.sender.reduces() && !road.is_whole() {
            return Err(PyLookupError::new_err("its receivers are no longer a region of one mesh"));
        }
        let charged = match self.admit(py, &road, &payload, until)? {
            Ok(charged) => charged,
            Err(later) => return self.call_later(py, &road, payload, stream, later),
        };
        let send = |body: mesh_runtime::Body<'_>| self.sender.call(&road, body, stream, Terms { charged, ..terms });
        let (call, queued) = payload.ship(py, road.target(), self.sender.called(), send)?;
        let call = self.begun(&road, call);
        self.hold_back(py, &road, queued)?;
        Ok(call)
    }

    /// Sends `value` without expecting an answer. Returns what to wait for if it could not be sent at once.
    fn tell(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<Option<PyDeferral>> {
        door::enter(py);
        let payload = Payload::dump(value)?;
        let road = self.sender.road();
        match self.admit(py, &road, &payload, None)? {
            Ok(charged) => {
                let terms = Terms { charged, ..Terms::default() };
                let send = |body: mesh_runtime::Body<'_>| self.sender.tell(&road, body, terms);
                let queued = payload.ship(py, road.target(), self.sender.called(), send)?;
                self.hold_back(py, &road, queued)
            }
            Err(later) => {
                let send = |body: mesh_runtime::Body<'_>, later| self.sender.tell_later(&road, body, later);
                let deferral = payload.entrust(py, later, self.sender.called(), send)?;
                let (runtime, actor) = (self.sender.runtime(), self.sender.actor());
                Ok(Some(PyDeferral::new(runtime, deferral, road.target(), actor)))
            }
        }
    }

    /// Whether the receivers are still exactly the region that was named: only then can their replies be combined.
    fn is_whole(&self) -> bool {
        self.sender.road().is_whole()
    }
}

#[pymethods]
impl PyRuntime {
    /// Returns the way to an endpoint. Errors name `who`; without it, Mesh itself is the sender.
    #[pyo3(signature = (target, actor, name, request, block=true, who=None))]
    fn sender(
        &self,
        target: &PyTarget,
        actor: u64,
        name: &str,
        request: &Bound<'_, PyAny>,
        block: bool,
        who: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PySender> {
        let (request, reduce) = codes::request(request)?;
        let called: Option<String> =
            who.as_ref().map(|who| who.getattr("name").and_then(|name| name.extract()).unwrap_or_default());
        let PyTarget { target, shape } = target;
        let called = called.as_deref();
        let spec = SenderSpec { target, shape, actor, endpoint: name, request, reduce, block, called };
        let sender = Sender::new(&self.0, spec).map_err(too_long)?;
        Ok(PySender { sender, who: who.map(Bound::unbind) })
    }

    /// Returns a sender of questions to a process about itself.
    fn asker(&self, target: &PyTarget, question: &Bound<'_, PyAny>) -> PyResult<PySender> {
        let question = Inspect::Ask(codes::question(question)?);
        let endpoint = std::str::from_utf8(question.word()).unwrap_or_default();
        let PyTarget { target, shape } = target;
        let request = Request::Inspect;
        let spec = SenderSpec { target, shape, actor: 0, endpoint, request, reduce: false, block: true, called: None };
        let sender = Sender::new(&self.0, spec).map_err(too_long)?;
        Ok(PySender { sender, who: None })
    }
}
