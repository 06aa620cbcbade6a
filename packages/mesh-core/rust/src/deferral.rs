//! Messages that are sent once there is room for them.

use crate::door::outside;
use crate::event_loop::PyWaker;
use mesh_proto::{ActorId, Target};
use mesh_runtime::{Deferral, Fate, Runtime, Waited};
use pyo3::prelude::*;
use std::sync::Arc;

/// A message that is sent once there is room.
#[pyclass(name = "Deferral", module = "mesh_core._native", frozen)]
pub(crate) struct PyDeferral {
    runtime: Arc<Runtime>,
    deferral: Deferral,
    target: Arc<Target>,
    actor: ActorId,
}

impl PyDeferral {
    pub(crate) fn new(runtime: &Arc<Runtime>, deferral: Deferral, target: &Arc<Target>, actor: ActorId) -> Self {
        Self { runtime: Arc::clone(runtime), deferral, target: Arc::clone(target), actor }
    }
}

#[pymethods]
impl PyDeferral {
    /// Whether it no longer waits.
    fn done(&self) -> bool {
        self.deferral.done.is_done()
    }

    /// Whether it was sent rather than given up or dropped.
    fn sent(&self) -> bool {
        matches!(self.deferral.done.fate(), Some(Fate::Status(_)))
    }

    /// Whether it was given up before it was sent.
    fn given_up(&self) -> bool {
        self.deferral.done.fate() == Some(Fate::Cancelled)
    }

    /// Spins as long as that is cheaper than sleeping; true if the message no longer waits.
    #[pyo3(signature = (seen=None))]
    fn look(&self, py: Python<'_>, seen: Option<usize>) -> bool {
        let step = || self.runtime.wait_completion(&self.deferral.done, seen, None, true, false, None);
        outside(py, step) == Waited::Ready
    }

    /// Gives `token` to a loop's waker when it no longer waits.
    #[pyo3(signature = (waker, token, seen=usize::MAX))]
    fn tell(&self, waker: &PyWaker, token: u64, seen: usize) {
        self.deferral.done.tell(&waker.0, token, seen);
    }

    /// Gives it up; false if it was sent.
    fn cancel(&self, py: Python<'_>) -> bool {
        outside(py, || self.runtime.take_back(&self.deferral))
    }

    /// The actor that it is for; 0 for none.
    #[getter]
    fn actor(&self) -> u64 {
        self.actor
    }

    /// Whether it is for this process itself.
    fn is_local(&self) -> bool {
        self.target.index_of(self.runtime.me()).is_some()
    }
}
