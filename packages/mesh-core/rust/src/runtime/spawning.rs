//! Sending spawns, whose arguments may have to wait.

use super::{Payload, PySender, Road};
use crate::call::PyCall;
use crate::callables::callables;
use crate::door;
use crate::flow::in_coroutine;
use mesh_runtime::{Terms, millis};
use pyo3::prelude::*;
use std::time::Instant;

impl PySender {
    /// Where too much waits to be spawned, a thread waits here, and a coroutine is refused.
    pub(super) fn spawn(
        &self,
        py: Python<'_>,
        road: &Road<'_>,
        payload: &Payload<'_>,
        until: Option<Instant>,
    ) -> PyResult<PyCall> {
        let runtime = &*self.runtime;
        if let Some(sizes) = runtime.spawns_wait()
            && in_coroutine(py)?
        {
            let refused = callables(py)?.not_spawned.bind(py).call1(sizes)?;
            return Err(PyErr::from_value(refused));
        }
        let terms = Terms { deadline_ms: until.map_or(0, millis), ..Terms::default() };
        let (call, queued, held) = payload.ship(
            py,
            road.target(),
            || self.gate.called(py),
            |body| runtime.call_spawn(&self.outgoing(road, body), terms),
        )?;
        let call = self.waited_for(call, road.target());
        if let Some(done) = held
            && !in_coroutine(py)?
        {
            let step = |look, signals| runtime.wait_completion(&done, None, None, look, signals, None);
            door::wait(py, runtime, step, None)?;
        }
        self.hold_back(py, road.target(), queued)?;
        Ok(call)
    }
}
