//! Messages as Python handles them.

use crate::call::{is_error, kind_name};
use crate::door;
use crate::flow::left;
use crate::part::PyPart;
use crate::runtime::Payload;
use mesh_proto::flags;
use mesh_runtime::{Inbox, LoopWaker, Message, PartData, Runtime};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString};
use std::sync::Arc;

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
    fn drain(&self) -> Vec<u64> {
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
}

static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static LOADS_RICH: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

fn cached<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyAny>>,
    module: &str,
    name: &str,
) -> PyResult<&'py Bound<'py, PyAny>> {
    Ok(cell.get_or_try_init(py, || Ok::<_, PyErr>(py.import(module)?.getattr(name)?.unbind()))?.bind(py))
}

impl PyMessage {
    pub(crate) fn shared(runtime: &Arc<Runtime>, message: Arc<Message>) -> Self {
        Self { runtime: Arc::clone(runtime), held: Held::Shared(message) }
    }

    fn message(&self) -> &Message {
        match &self.held {
            Held::Own(message) => message,
            Held::Shared(message) => message,
        }
    }
}

#[pymethods]
impl PyMessage {
    #[getter]
    fn kind(&self, py: Python<'_>) -> Py<PyString> {
        PyString::intern(py, kind_name(self.message().header().kind)).unbind()
    }

    /// The endpoint, or what an error says.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        let name = self.message().name();
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        PyString::new(py, &String::from_utf8_lossy(&name[..end]))
    }

    /// The shape of the slice that was messaged, as `label=size` joined by commas; empty for a single actor.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        let name = self.message().name();
        let start = name.iter().position(|byte| *byte == 0).map_or(name.len(), |at| at + 1);
        PyString::new(py, &String::from_utf8_lossy(&name[start..]))
    }

    #[getter]
    fn actor(&self) -> u64 {
        self.message().header().actor
    }

    #[getter]
    fn src(&self) -> (u64, u32) {
        let src = self.message().header().src;
        (src.mesh, src.rank)
    }

    /// The caller's number of the call; 0 if nobody waits.
    #[getter]
    fn call(&self) -> u64 {
        self.message().header().call
    }

    /// Place of the receiver in the slice that was messaged.
    #[getter]
    fn index(&self) -> u32 {
        self.message().header().index
    }

    /// How many seconds the caller still waits; negative once it does not, none if it set no limit.
    #[getter]
    fn left(&self) -> Option<f64> {
        self.message().due().map(left)
    }

    /// Whether the payload is an encoded exception.
    #[getter]
    fn is_error(&self) -> bool {
        is_error(self.message().header().flags)
    }

    /// Whether the exception is about the actor itself, not about this call.
    #[getter]
    fn is_dead(&self) -> bool {
        self.message().header().flags & flags::DEAD != 0
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

    /// The object that was sent.
    fn load<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (payload, buffers) = self.raw(py)?;
        if buffers.is_empty() {
            cached(py, &LOADS, "_pickle", "loads")?.call1((payload,))
        } else {
            cached(py, &LOADS_RICH, "mesh_core._serialize", "loads")?.call1((payload, buffers))
        }
    }

    /// Says that the message was handled, where no answer does.
    fn done(&self) {
        self.message().done();
    }

    /// Answers with `value`.
    fn reply(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        // Before the answer: whoever gets it may want to send the next message at once.
        self.message().done();
        if self.message().header().call != 0 {
            let payload = Payload::dump(value).or_else(|_| Payload::dump_as(value, "the result"))?;
            payload.send(py, |bytes, buffers| {
                self.runtime.reply(self.message().header(), 0, bytes, buffers);
            });
        }
        Ok(())
    }

    /// Answers with an exception that was encoded before.
    #[pyo3(signature = (data, buffers, dead=false))]
    fn reply_error(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyBytes>,
        buffers: &Bound<'_, PyAny>,
        dead: bool,
    ) -> PyResult<()> {
        self.message().done();
        let payload = Payload::new(data.clone(), buffers)?;
        let bits = if dead { flags::ERROR | flags::DEAD } else { flags::ERROR };
        payload.send(py, |bytes, buffers| {
            self.runtime.reply(self.message().header(), bits, bytes, buffers);
        });
        Ok(())
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
        let burst = self.inbox.take(limit);
        burst
            .into_iter()
            .map(|message| PyMessage { runtime: Arc::clone(&self.runtime), held: Held::Own(message) })
            .collect()
    }
}

#[pymethods]
impl PyInbox {
    /// The next messages, waiting for the first; empty once the inbox is closed.
    fn take(&self, py: Python<'_>, limit: usize) -> Vec<PyMessage> {
        if self.inbox.is_empty() {
            py.detach(|| self.runtime.wait_inbox(&self.inbox));
        }
        self.burst(limit)
    }

    /// The messages that are there.
    fn take_nowait(&self, limit: usize) -> Vec<PyMessage> {
        self.burst(limit)
    }

    fn __len__(&self) -> usize {
        self.inbox.len()
    }

    /// Ends the inbox behind what waits already: a last message says so.
    fn finish(&self) {
        self.runtime.finish_inbox(&self.inbox);
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
