//! The receiving ends of ports.

use crate::call::PyCall;
use crate::errors::OrRaise as _;
use crate::port::PyOutlet;
use crate::runtime::PyRuntime;
use mesh_proto::Target;
use mesh_runtime::{Mailbox, Runtime, Way};
use pyo3::prelude::*;
use std::sync::Arc;

/// The receiving end of a port.
#[pyclass(name = "Mailbox", module = "mesh_core._native", frozen)]
pub(crate) struct PyMailbox {
    runtime: Arc<Runtime>,
    mailbox: Arc<Mailbox>,
    target: Arc<Target>,
}

impl PyMailbox {
    pub(crate) fn new(runtime: &Arc<Runtime>, mailbox: Mailbox) -> Self {
        let target = Arc::new(Target::One(runtime.me()));
        Self { runtime: Arc::clone(runtime), mailbox: Arc::new(mailbox), target }
    }
}

#[pymethods]
impl PyMailbox {
    /// The sending end.
    fn outlet(&self, once: bool) -> PyOutlet {
        let way = Way::Channel { id: self.mailbox.id(), once };
        PyOutlet::new(self.runtime.outlet(self.runtime.me(), way, false))
    }

    /// Returns the wait for the next value.
    fn receive(&self, py: Python<'_>) -> PyResult<PyCall> {
        let receive = self.mailbox.receive().or_raise(py)?;
        Ok(PyCall::receive(&self.runtime, &self.mailbox, receive, &self.target))
    }

    /// Stops accepting values, and drops those that nobody received.
    fn close(&self) {
        self.mailbox.close();
    }

    /// Whether nothing more can be received.
    #[getter]
    fn is_over(&self) -> bool {
        self.mailbox.is_over()
    }

    fn __len__(&self) -> usize {
        self.mailbox.len()
    }
}

#[pymethods]
impl PyRuntime {
    /// Opens a port at which this process receives.
    #[pyo3(signature = (once=false))]
    fn open_port(&self, py: Python<'_>, once: bool) -> PyResult<PyMailbox> {
        let mailbox = self.0.open_port(once).or_raise(py)?;
        Ok(PyMailbox::new(&self.0, mailbox))
    }
}
