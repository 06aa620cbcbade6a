//! Inboxes: the messages that wait for one actor, or for the process itself.

use crate::door::{self, outside};
use crate::event_loop::PyWaker;
use crate::message::PyMessage;
use crate::runtime::PyRuntime;
use mesh_proto::messages::Name;
use mesh_runtime::{Inbox, Message, Runtime, Side};
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::sync::{Arc, Mutex, PoisonError};

/// The messages that wait for one actor.
#[pyclass(name = "Inbox", module = "mesh_core._native", frozen)]
pub(crate) struct PyInbox {
    runtime: Arc<Runtime>,
    inbox: Arc<Inbox>,
    /// The name of the last message. Most have the same, and Python finds an endpoint faster by the same string.
    last: Mutex<Option<Named>>,
}

/// A name as frames have it, and as Python does.
struct Named {
    bytes: Box<[u8]>,
    string: Py<PyString>,
}

impl PyInbox {
    fn new(runtime: &Arc<Runtime>, inbox: Arc<Inbox>) -> Self {
        Self { runtime: Arc::clone(runtime), inbox, last: Mutex::new(None) }
    }

    fn burst(&self, py: Python<'_>, limit: usize, side: Side) -> Vec<PyMessage> {
        let burst = self.inbox.lend(self.runtime.reactor(), limit, side);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = burst.into_iter().map(|message| {
            let name = name_of(py, &mut last, &message);
            PyMessage::taken(&self.runtime, &self.inbox, message, name)
        });
        taken.collect()
    }
}

/// The name of a message, as the string that the last one had if it is the same.
fn name_of(py: Python<'_>, last: &mut Option<Named>, message: &Message) -> Py<PyString> {
    let name = Name::what(message.name());
    if let Some(named) = last.as_ref().filter(|named| *named.bytes == *name) {
        return named.string.clone_ref(py);
    }
    let string = PyString::new(py, &String::from_utf8_lossy(name)).unbind();
    *last = Some(Named { bytes: name.into(), string: string.clone_ref(py) });
    string
}

#[pymethods]
impl PyInbox {
    /// Returns the next messages, waiting for the first; empty once the inbox is closed.
    fn take(&self, py: Python<'_>, limit: usize) -> Vec<PyMessage> {
        loop {
            if !self.inbox.is_due() {
                door::serves();
                outside(py, || self.runtime.wait_inbox(&self.inbox));
            }
            let burst = self.burst(py, limit, Side::Thread);
            // A task that arrived may have been taken back since.
            if !burst.is_empty() || self.inbox.is_closed() || self.runtime.is_closed() {
                return burst;
            }
        }
    }

    /// Returns the next messages without waiting; called by an event loop.
    fn take_nowait(&self, py: Python<'_>, limit: usize) -> Vec<PyMessage> {
        self.burst(py, limit, Side::Loop)
    }

    /// Leaves messages of these names to a loop, whose waker gets `token` for them; all others are for the actor's thread.
    fn divide(&self, on_loop: Vec<String>, waker: &PyWaker, token: u64) {
        self.inbox.divide(on_loop.into_iter().map(String::into_bytes), Arc::clone(&waker.0), token);
    }

    /// Leaves all messages to a loop: the thread gets nothing any more.
    fn leave_to_loop(&self) {
        self.inbox.leave_to_loop(self.runtime.reactor());
    }

    /// Whether messages for the loop are handled or wait, so that the loop has to run before a message that comes now.
    fn is_behind_loop(&self) -> bool {
        self.inbox.is_behind_loop()
    }

    fn __len__(&self) -> usize {
        self.inbox.len()
    }

    /// Notes that its actor failed: another one may be created in its place.
    fn retire(&self) {
        self.inbox.retire();
    }

    /// Closes it. Messages still waiting are returned to their senders.
    fn close(&self) {
        self.runtime.close_inbox(&self.inbox);
    }

    /// Ends it after the messages that already wait: a last message says so.
    fn finish(&self) {
        self.runtime.finish_inbox(&self.inbox);
    }

    /// Wakes the executor that waits for messages: a message of kind `failure` comes before all others.
    fn nudge(&self) {
        self.runtime.nudge_inbox(&self.inbox);
    }

    /// Notes the class of the actor, for those who inspect this process.
    fn describe(&self, class_name: &str) {
        self.inbox.gauge.describe(class_name);
    }

    /// Notes which thread works for the actor (or, for the process's own inbox, runs the event loop).
    fn worked_by(&self, thread: u64) {
        door::serves();
        self.inbox.gauge.worked_by(thread);
    }

    /// Gives `token` to a loop's waker when there are messages.
    fn attach(&self, waker: &PyWaker, token: u64) {
        self.inbox.attach(self.runtime.reactor(), Arc::clone(&waker.0), token);
    }
}

#[pymethods]
impl PyRuntime {
    /// The inbox of the process itself.
    fn system_inbox(&self) -> PyInbox {
        PyInbox::new(&self.0, self.0.system_inbox())
    }

    /// An actor's inbox.
    fn inbox(&self, actor: u64) -> Option<PyInbox> {
        self.0.inbox(actor).map(|inbox| PyInbox::new(&self.0, inbox))
    }

    /// Notices for owners at the controller.
    fn notices(&self) -> PyInbox {
        PyInbox::new(&self.0, self.0.notices())
    }

    /// Waits until there are notices, or will be none, without reading messages that arrive for others.
    fn wait_notices(&self, py: Python<'_>) {
        door::serves();
        outside(py, || self.0.notices().wait_apart(self.0.reactor()));
    }
}
