//! Messages as Python sees them.

use crate::callables::callables;
use crate::codes;
use crate::deferral::PyDeferral;
use crate::door::outside;
use crate::errors::OrRaise as _;
use crate::gate::in_coroutine;
use crate::lost::PyLost;
use crate::memory::PyPart;
use crate::payload::Payload;
use crate::port::PyOutlet;
use crate::target::{Addr, addr_tuple, proc_addr};
use crate::time::left;
use mesh_proto::control::StopProc;
use mesh_proto::messages::{Answer, Asked, Cancelled, Meaning, Name, Partial, Unlooked};
use mesh_proto::{Header, Kind, Target, Undelivered};
use mesh_runtime::{Completion, Deferral, Handling, Inbox, Message, PartData, Runtime, Waited, Way};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString};
use std::sync::Arc;

#[expect(clippy::large_enum_variant, reason = "the usual one is large, and boxing it would cost every message")]
enum Held {
    Own(Message),
    Shared(Arc<Message>),
}

/// A message that has arrived.
#[pyclass(name = "Message", module = "mesh_core._native", frozen)]
pub(crate) struct PyMessage {
    runtime: Arc<Runtime>,
    held: Held,
    /// How far its handling is, for a message to an actor.
    handling: Option<Handling>,
    /// Its name, if it is that of other messages too.
    name: Option<Py<PyString>>,
}

impl PyMessage {
    pub(crate) fn shared(runtime: &Arc<Runtime>, message: Arc<Message>) -> Self {
        Self { runtime: Arc::clone(runtime), held: Held::Shared(message), handling: None, name: None }
    }

    /// Wraps a message that was just taken from an inbox.
    pub(crate) fn taken(runtime: &Arc<Runtime>, inbox: &Arc<Inbox>, message: Message, name: Py<PyString>) -> Self {
        let handling = Some(Handling::new(inbox, &message));
        Self { runtime: Arc::clone(runtime), held: Held::Own(message), handling, name: Some(name) }
    }

    fn end(&self, failed: bool) {
        if let Some(handling) = &self.handling {
            handling.end(self.message(), failed);
        }
    }

    /// Pickles an endpoint's result.
    fn dump_result<'py>(value: &Bound<'py, PyAny>) -> PyResult<Payload<'py>> {
        Payload::dump(value).or_else(|_| Payload::dump_as(value, "the result"))
    }

    /// Called when more answers may be waiting for their callers, as `kept` says: a thread waits here, a coroutine gets what to
    /// wait for before it takes another message.
    fn hold_back(&self, py: Python<'_>, kept: Option<Arc<Completion>>) -> PyResult<Option<PyDeferral>> {
        let Some(kept) = kept else { return Ok(None) };
        if in_coroutine(py)? {
            let (target, actor) = (Arc::new(Target::One(self.header().src)), self.message().meaning().actor());
            return Ok(Some(PyDeferral::new(&self.runtime, Deferral::of_reply(kept), &target, actor)));
        }
        let step = || self.runtime.wait_completion(&kept, None, None, false, false, None);
        while outside(py, step) != Waited::Ready {}
        Ok(None)
    }

    /// The only out-of-band part of an answer.
    pub(crate) fn only_part(&self, py: Python<'_>) -> PyResult<Option<PartData>> {
        let (_, parts) = self.message().open().or_raise(py)?;
        Ok(parts.into_iter().next())
    }

    fn message(&self) -> &Message {
        match &self.held {
            Held::Own(message) => message,
            Held::Shared(message) => message,
        }
    }

    fn header(&self) -> &Header {
        self.message().header()
    }
}

impl Drop for PyMessage {
    fn drop(&mut self) {
        self.end(false);
    }
}

#[pymethods]
impl PyMessage {
    #[getter]
    fn kind(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        codes::kind(py, self.header().kind)
    }

    /// The name of the endpoint.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        match &self.name {
            Some(name) => name.bind(py).clone(),
            None => PyString::new(py, &String::from_utf8_lossy(Name::what(self.message().name()))),
        }
    }

    /// The shape of the messaged slice, as `label=size` with commas between; empty for a single actor.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(py, &String::from_utf8_lossy(Name::read(self.message().name()).shape))
    }

    /// The context of the trace that the message belongs to, if any.
    #[getter]
    fn trace<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyString>> {
        Name::read(self.message().name()).context.map(|text| PyString::new(py, &String::from_utf8_lossy(text)))
    }

    #[getter]
    fn actor(&self) -> u64 {
        self.message().meaning().actor()
    }

    #[getter]
    fn src(&self) -> Addr {
        addr_tuple(self.header().src)
    }

    /// The caller's number for the call; 0 if nobody waits.
    #[getter]
    fn call(&self) -> u64 {
        match self.message().meaning() {
            Meaning::Control(_) => Asked::of(self.header()).map_or(0, |asked| asked.call),
            said => said.call(),
        }
    }

    /// The receiver's place in the messaged slice; for a value for a channel, its sender's place.
    #[getter]
    fn index(&self) -> u32 {
        self.message().meaning().place()
    }

    /// For a part of a combined reply: the caller.
    #[getter]
    fn caller(&self) -> Option<Addr> {
        Partial::caller_in(self.message().name()).map(addr_tuple)
    }

    /// For a stop of this process: how many seconds it may take.
    #[getter]
    fn within(&self) -> Option<f64> {
        StopProc::of(self.header()).map(|stop| stop.within.as_secs_f64())
    }

    /// For a failure that nobody has looked at: how many other ranks failed.
    #[getter]
    fn others(&self) -> u64 {
        match self.message().meaning() {
            Meaning::Unseen(unseen) => unseen.others,
            _ => 0,
        }
    }

    /// How many seconds the caller still waits; negative once it no longer does, `None` if it set no limit.
    #[getter]
    fn left(&self) -> Option<f64> {
        self.message().due().map(left)
    }

    /// Whether the payload is an encoded exception.
    #[getter]
    fn is_error(&self) -> bool {
        match self.message().meaning() {
            Meaning::Reply(reply) => reply.answer.is_error(),
            Meaning::Post(post) => post.error,
            _ => false,
        }
    }

    /// Whether the exception concerns the actor itself rather than this call.
    #[getter]
    fn is_dead(&self) -> bool {
        matches!(self.message().meaning(), Meaning::Reply(reply) if reply.answer == Answer::Dead)
    }

    /// For a part of a combined reply: whether something was printed for it that was not shown yet.
    #[getter]
    fn has_printed(&self) -> bool {
        self.header().has_printed()
    }

    /// For a notice that a process ended: its mesh and rank, how it ended, and how many calls of this process were lost by it.
    fn down(&self) -> Option<(u64, u32, PyLost, u64)> {
        let down = self.message().down()?;
        // Owners know it by its original rank.
        let seat = self.runtime.seat(down.who);
        Some((seat.mesh, seat.rank, PyLost::called(Arc::new(down.ended), down.who), down.calls))
    }

    /// Why the answered message, or the port of its call, could not be used: a code for programs, and one line for
    /// people.
    fn undelivered(&self, py: Python<'_>) -> PyResult<Option<(Py<PyAny>, String)>> {
        let why = self.message().undelivered();
        why.map(|why| Ok((codes::undelivered(py, &why)?, why.to_string()))).transpose()
    }

    /// How many bytes a reply had that the caller's process dropped for lack of room.
    fn dropped_bytes(&self) -> u64 {
        match self.message().undelivered() {
            Some(Undelivered::NoRoom(bytes)) => bytes,
            _ => 0,
        }
    }

    /// Whether it is the end of a port rather than an answer.
    #[getter]
    fn is_end(&self) -> bool {
        match self.message().meaning() {
            Meaning::Undeliverable(returned) => returned.port_ended,
            Meaning::Unseen(unseen) => unseen.what == Unlooked::PortEnded,
            _ => false,
        }
    }

    /// For a cancellation: whether it cancels the call itself, whether it cancels the gathered parts of a combined reply, and
    /// whether the caller waits for an answer all the same.
    #[getter]
    fn cancels(&self) -> (bool, bool, bool) {
        match self.message().meaning() {
            Meaning::Cancel(cancel) => (
                cancel.what != Cancelled::Gathering,
                matches!(cancel.what, Cancelled::Combined | Cancelled::Gathering),
                cancel.what.is_answered(),
            ),
            _ => (false, false, false),
        }
    }

    /// The payload and its out-of-band buffers, still pickled.
    fn raw<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyList>)> {
        let (payload, rest) = self.message().open().or_raise(py)?;
        let buffers = PyList::empty(py);
        for part in rest {
            match part {
                PartData::Inline(bytes) => buffers.append(PyByteArray::new(py, &bytes))?,
                PartData::Shared(part) => buffers.append(PyPart(part))?,
            }
        }
        Ok((PyBytes::new(py, &payload), buffers))
    }

    /// Whether it contains references.
    #[getter]
    fn has_refs(&self) -> bool {
        self.message().has_refs()
    }

    /// The object that was sent.
    fn load<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(handling) = &self.handling {
            handling.begin(self.message());
        }
        let python = callables(py)?;
        if let Some(payload) = self.message().only_part() {
            return python.plain_loads.bind(py).call1((PyBytes::new(py, payload),));
        }
        let (payload, buffers) = self.raw(py)?;
        let value = if buffers.is_empty() {
            python.plain_loads.bind(py).call1((payload,))
        } else {
            python.loads.bind(py).call1((payload, buffers))
        }?;
        if self.message().has_refs() && matches!(self.header().kind, Kind::Call | Kind::Tell | Kind::Spawn) {
            self.message().drop_refs();
            if self.header().kind == Kind::Spawn {
                return Ok(value);
            }
            // References among the arguments are replaced by their values.
            return python.arrive.bind(py).call1((value,));
        }
        Ok(value)
    }

    /// Answers with `value`. Returns what a coroutine must wait for before it takes another message, if anything.
    fn reply(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<Option<PyDeferral>> {
        // Before the answer: its receiver may want to send the next message at once.
        self.message().done();
        if Asked::of(self.header()).is_none() {
            self.end(false);
            return Ok(None);
        }
        self.runtime.original().or_raise(py)?;
        let payload = Self::dump_result(value)?;
        self.end(false);
        let (header, due) = (self.header(), self.message().due());
        let kept = payload.ship(py, &Target::One(header.src), "", |body| {
            Ok(self.runtime.reply_by(header, due, Answer::Value, body))
        })?;
        self.hold_back(py, kept)
    }

    /// The port through which this call can be answered later, from elsewhere, or several times.
    fn outlet(&self) -> PyOutlet {
        let said = self.message().meaning();
        let stream = matches!(said, Meaning::Call(call) if call.stream);
        let way = Way::Response { call: said.call(), actor: said.actor(), index: said.place(), stream };
        PyOutlet::new(self.runtime.outlet(self.header().src, way, true))
    }

    /// Sends this rank's part of a combined reply to the rank above it, or to the caller if there is none; returns as `reply`
    /// does. `printed`: one of the parts in it has printed something.
    fn pass_on(
        &self,
        py: Python<'_>,
        value: &Bound<'_, PyAny>,
        above: Option<Addr>,
        printed: bool,
    ) -> PyResult<Option<PyDeferral>> {
        let above = above.map(proc_addr);
        if above.is_none() {
            self.message().done();
            self.runtime.original().or_raise(py)?;
        }
        let payload = Self::dump_result(value)?;
        if above.is_none() {
            self.end(false);
        }
        let (header, due) = (self.header(), self.message().due());
        let kept = payload.ship(py, &Target::One(above.unwrap_or(header.src)), "", |body| {
            Ok(self.runtime.pass_on(header, above, printed, due, body))
        })?;
        self.hold_back(py, kept)
    }

    /// Counts the message as handled and failed, without reporting why.
    fn failed(&self) {
        self.message().done();
        self.end(true);
    }

    /// Answers with an encoded exception; returns as `reply` does.
    #[pyo3(signature = (data, buffers, dead=false))]
    fn reply_error(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyBytes>,
        buffers: &Bound<'_, PyAny>,
        dead: bool,
    ) -> PyResult<Option<PyDeferral>> {
        self.runtime.original().or_raise(py)?;
        self.message().done();
        let payload = Payload::new(data.clone(), buffers)?;
        self.end(true);
        let answer = if dead { Answer::Dead } else { Answer::Raised };
        let due = self.message().due();
        let kept = payload.send(py, |body| self.runtime.reply_by(self.header(), due, answer, body));
        self.hold_back(py, kept)
    }
}
