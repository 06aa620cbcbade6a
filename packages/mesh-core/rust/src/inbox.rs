//! Messages as Python handles them.

use crate::call::PyLost;
use crate::callables::callables;
use crate::codes;
use crate::door;
use crate::flow::{PyDeferral, in_coroutine, left};
use crate::part::PyPart;
use crate::port::PyOutlet;
use crate::runtime::Payload;
use mesh_proto::control::StopProc;
use mesh_proto::messages::{Answer, Asked, Cancelled, Meaning, Name, Partial, Unlooked};
use mesh_proto::{Kind, ProcAddr, Target, Undelivered};
use mesh_runtime::{Completion, Deferral, Inbox, LoopWaker, Message, PartData, Runtime, Waited, Way};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The eventfd by which an event loop learns that something is ready.
#[pyclass(name = "Waker", module = "mesh_core._native", frozen)]
pub(crate) struct PyWaker(pub(crate) Arc<LoopWaker>);

#[pymethods]
impl PyWaker {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        Ok(Self(Arc::new(LoopWaker::new().map_err(|error| door::raise(py, &error))?)))
    }

    fn fileno(&self) -> i32 {
        self.0.fd()
    }

    /// Everything that became ready since the last time.
    fn drain(&self, py: Python<'_>) -> Vec<u64> {
        door::enter(py);
        self.0.drain()
    }

    /// Whether anything is ready.
    fn any(&self) -> bool {
        self.0.any()
    }
}

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
    /// Whose message it is, while it is an actor's to handle.
    inbox: Option<Arc<Inbox>>,
    /// The gauge's number of its handling; [`WAITS`] before if it counts among those that wait, 0 after.
    begun: AtomicU64,
}

/// An executor has the message, and has not come to it.
const WAITS: u64 = u64::MAX;

impl PyMessage {
    pub(crate) fn shared(runtime: &Arc<Runtime>, message: Arc<Message>) -> Self {
        Self { runtime: Arc::clone(runtime), held: Held::Shared(message), inbox: None, begun: AtomicU64::new(0) }
    }

    /// An endpoint is about to run.
    fn begin(&self) {
        if let Some(inbox) = &self.inbox
            && self.begun.load(Ordering::Relaxed) == WAITS
        {
            let serial = inbox.gauge.begin(self.message().name_bytes(), self.message().header().src);
            self.begun.store(serial, Ordering::Relaxed);
            inbox.begun(self.message());
        }
    }

    /// An endpoint has run. Before its reply is sent: whoever gets that may look at the figures at once.
    fn end(&self, failed: bool) {
        let Some(inbox) = &self.inbox else { return };
        match self.begun.swap(0, Ordering::Relaxed) {
            0 => {}
            WAITS => inbox.begun(self.message()),
            serial => inbox.gauge.end(serial, failed),
        }
    }

    /// An answer waits for its caller, and more do than may. A thread waits here; a coroutine is given what to wait for
    /// before it takes another message.
    #[cold]
    fn hold_back(&self, py: Python<'_>, done: Arc<Completion>) -> PyResult<Option<PyDeferral>> {
        if in_coroutine(py)? {
            let header = self.message().header();
            let (runtime, target) = (Arc::clone(&self.runtime), Arc::new(Target::One(header.src)));
            return Ok(Some(PyDeferral {
                runtime,
                deferral: Deferral::of_reply(done),
                target,
                actor: self.message().meaning().actor(),
            }));
        }
        let step = || self.runtime.wait_completion(&done, None, None, false, false, None);
        while door::outside(py, step) != Waited::Ready {}
        Ok(None)
    }

    /// The one out-of-band part of an answer.
    pub(crate) fn only_part(&self, py: Python<'_>) -> PyResult<Option<PartData>> {
        let (_, parts) = self.message().open().map_err(|error| door::raise(py, &error))?;
        Ok(parts.into_iter().next())
    }

    fn message(&self) -> &Message {
        match &self.held {
            Held::Own(message) => message,
            Held::Shared(message) => message,
        }
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
        codes::kind(py, self.message().header().kind)
    }

    /// The endpoint.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(py, &String::from_utf8_lossy(Name::what(self.message().name())))
    }

    /// The shape of the slice that was messaged, as `label=size` joined by commas; empty for a single actor.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(py, &String::from_utf8_lossy(Name::read(self.message().name()).shape))
    }

    /// The context of the trace that the message is part of, if it is part of one.
    #[getter]
    fn trace<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyString>> {
        Name::read(self.message().name()).context.map(|text| PyString::new(py, &String::from_utf8_lossy(text)))
    }

    #[getter]
    fn actor(&self) -> u64 {
        self.message().meaning().actor()
    }

    #[getter]
    fn src(&self) -> (u64, u32, u32) {
        let src = self.message().header().src;
        (src.mesh, src.rank, src.host)
    }

    /// The caller's number of the call; 0 if nobody waits.
    #[getter]
    fn call(&self) -> u64 {
        match self.message().meaning() {
            Meaning::Control(_) => Asked::of(self.message().header()).map_or(0, |asked| asked.call),
            said => said.call(),
        }
    }

    /// Place of the receiver in the slice that was messaged; of a value for a channel its sender's.
    #[getter]
    fn index(&self) -> u32 {
        self.message().meaning().place()
    }

    /// Of a share of a combined reply, whose call it is.
    #[getter]
    fn caller(&self) -> Option<(u64, u32, u32)> {
        let caller = Partial::caller_in(self.message().name())?;
        Some((caller.mesh, caller.rank, caller.host))
    }

    /// Of a process's stop, how many seconds it may take.
    #[getter]
    fn within(&self) -> Option<f64> {
        StopProc::of(self.message().header()).map(|stop| stop.within.as_secs_f64())
    }

    /// Of a failure that nobody has looked at, how many other ranks have failed.
    #[getter]
    fn others(&self) -> u64 {
        match self.message().meaning() {
            Meaning::Unseen(unseen) => unseen.others,
            _ => 0,
        }
    }

    /// How many seconds the caller still waits; negative once it does not, none if it set no limit.
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

    /// Whether the exception is about the actor itself, not about this call.
    #[getter]
    fn is_dead(&self) -> bool {
        matches!(self.message().meaning(), Meaning::Reply(reply) if reply.answer == Answer::Dead)
    }

    /// Of a notice that a process has ended: its mesh and rank, how it ended, and how many calls of ours it has cost.
    fn down(&self) -> Option<(u64, u32, PyLost, u64)> {
        let down = self.message().down()?;
        // Whose rank it had, for owners know it by that.
        let seat = self.runtime.seat(down.who);
        Some((seat.mesh, seat.rank, PyLost::called(Arc::new(down.ended), down.who), down.calls))
    }

    /// Why the message that this answers, or the port of its call, has come to nothing: a word for programs, and one line
    /// for people.
    fn undelivered(&self, py: Python<'_>) -> PyResult<Option<(Py<PyAny>, String)>> {
        let why = self.message().undelivered();
        why.map(|why| Ok((codes::undelivered(py, &why)?, why.to_string()))).transpose()
    }

    /// How many bytes a reply had that was dropped where it came.
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

    /// Of a cancellation, whether the call itself is given up, whether what was gathered of a combined reply is, and whether
    /// the caller waits for an answer all the same.
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

    /// The payload and its out-of-band buffers, undecoded.
    fn raw<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyList>)> {
        let (payload, rest) = self.message().open().map_err(|error| door::raise(py, &error))?;
        let buffers = PyList::empty(py);
        for part in rest {
            match part {
                PartData::Inline(bytes) => buffers.append(PyByteArray::new(py, &bytes))?,
                PartData::Shared(part) => buffers.append(PyPart(part))?,
            }
        }
        Ok((PyBytes::new(py, &payload), buffers))
    }

    /// Whether there are references in it.
    #[getter]
    fn has_refs(&self) -> bool {
        self.message().has_refs()
    }

    /// The object that was sent.
    fn load<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.begin();
        let (payload, buffers) = self.raw(py)?;
        let python = callables(py)?;
        let value = if buffers.is_empty() {
            python.plain_loads.bind(py).call1((payload,))
        } else {
            python.loads.bind(py).call1((payload, buffers))
        }?;
        if self.message().has_refs() && matches!(self.message().header().kind, Kind::Call | Kind::Tell | Kind::Spawn) {
            self.message().drop_refs();
            if self.message().header().kind == Kind::Spawn {
                return Ok(value);
            }
            // What an argument refers to arrives in its place.
            return python.arrive.bind(py).call1((value,));
        }
        Ok(value)
    }

    /// Answers with `value`. Returns what a coroutine has to wait for before it takes another message, if anything.
    fn reply(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<Option<PyDeferral>> {
        // Before the answer: whoever gets it may want to send the next message at once.
        self.message().done();
        if Asked::of(self.message().header()).is_some() {
            self.runtime.original().map_err(|error| door::raise(py, &error))?;
            let payload = Payload::dump(value).or_else(|_| Payload::dump_as(value, "the result"))?;
            self.end(false);
            let header = self.message().header();
            let due = self.message().due();
            let kept = payload.ship(py, &Target::One(header.src), String::new, |body| {
                Ok(self.runtime.reply_by(header, due, Answer::Value, body))
            })?;
            return kept.map_or(Ok(None), |done| self.hold_back(py, done));
        }
        self.end(false);
        Ok(None)
    }

    /// The port by which this call can be answered: later, often, from elsewhere.
    fn outlet(&self) -> PyOutlet {
        let said = self.message().meaning();
        let stream = matches!(said, Meaning::Call(call) if call.stream);
        let way = Way::Response { call: said.call(), actor: said.actor(), index: said.place(), stream };
        PyOutlet::new(self.runtime.outlet(self.message().header().src, way, true))
    }

    /// Sends this rank's share of a combined reply to the rank above it; returns as `reply` does.
    fn pass_on(&self, py: Python<'_>, value: &Bound<'_, PyAny>, to: (u64, u32, u32)) -> PyResult<Option<PyDeferral>> {
        let payload = Payload::dump(value).or_else(|_| Payload::dump_as(value, "the result"))?;
        let parent = ProcAddr { mesh: to.0, rank: to.1, host: to.2 };
        let kept = payload.ship(py, &Target::One(parent), String::new, |body| {
            Ok(self.runtime.pass_on(self.message().header(), parent, body))
        })?;
        kept.map_or(Ok(None), |done| self.hold_back(py, done))
    }

    /// Nobody hears how it failed: the message counts as handled, and as failed.
    fn failed(&self) {
        self.message().done();
        self.end(true);
    }

    /// Answers with an exception that was encoded before; returns as `reply` does.
    #[pyo3(signature = (data, buffers, dead=false))]
    fn reply_error(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyBytes>,
        buffers: &Bound<'_, PyAny>,
        dead: bool,
    ) -> PyResult<Option<PyDeferral>> {
        self.runtime.original().map_err(|error| door::raise(py, &error))?;
        self.message().done();
        let payload = Payload::new(data.clone(), buffers)?;
        self.end(true);
        let answer = if dead { Answer::Dead } else { Answer::Raised };
        let due = self.message().due();
        let kept = payload.send(py, |body| self.runtime.reply_by(self.message().header(), due, answer, body));
        kept.map_or(Ok(None), |done| self.hold_back(py, done))
    }
}

/// What waits for one actor.
#[pyclass(name = "Inbox", module = "mesh_core._native", frozen)]
pub(crate) struct PyInbox {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) inbox: Arc<Inbox>,
}

impl PyInbox {
    fn burst(&self, limit: usize) -> Vec<PyMessage> {
        let burst = self.inbox.lend(limit);
        burst
            .into_iter()
            .map(|message| PyMessage {
                runtime: Arc::clone(&self.runtime),
                inbox: Some(Arc::clone(&self.inbox)),
                begun: AtomicU64::new(if Inbox::counts(&message) { WAITS } else { 0 }),
                held: Held::Own(message),
            })
            .collect()
    }
}

#[pymethods]
impl PyInbox {
    /// The next messages, waiting for the first; empty once the inbox is closed.
    fn take(&self, py: Python<'_>, limit: usize) -> Vec<PyMessage> {
        loop {
            if self.inbox.is_empty() {
                door::serves();
                door::outside(py, || self.runtime.wait_inbox(&self.inbox));
            }
            let burst = self.burst(limit);
            // A task that had come may have been taken back since.
            if !burst.is_empty() || self.inbox.is_closed() || self.runtime.is_closed() {
                return burst;
            }
        }
    }

    /// The messages that are there.
    fn take_nowait(&self, limit: usize) -> Vec<PyMessage> {
        self.burst(limit)
    }

    fn __len__(&self) -> usize {
        self.inbox.len()
    }

    /// Says that its actor has failed: another one may be made in its place.
    fn retire(&self) {
        self.inbox.retire();
    }

    /// Closes it: what still waits there goes back to its senders.
    fn close(&self) {
        self.runtime.close_inbox(&self.inbox);
    }

    /// Ends the inbox behind what waits already: a last message says so.
    fn finish(&self) {
        self.runtime.finish_inbox(&self.inbox);
    }

    /// Has whoever works through the inbox look up from it: a message of kind `failure`, before all others.
    fn nudge(&self) {
        self.runtime.nudge_inbox(&self.inbox);
    }

    /// Says what the actor is, for whoever looks from outside.
    fn describe(&self, class_name: &str) {
        self.inbox.gauge.describe(class_name);
    }

    /// Says which thread works for the actor (or, for the process's own inbox, runs its loop).
    fn worked_by(&self, thread: u64) {
        door::serves();
        self.inbox.gauge.worked_by(thread);
    }

    /// Tells no loop any more.
    fn detach(&self) {
        self.inbox.detach();
    }

    /// Has a loop's waker told `token` when there are messages.
    fn attach(&self, waker: &PyWaker, token: u64) {
        self.runtime.attach_loop(&self.inbox, &waker.0, token);
    }
}
