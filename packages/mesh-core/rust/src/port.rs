//! The sending ends of ports.

use crate::deferral::PyDeferral;
use crate::gate;
use crate::packing::pack_port;
use crate::payload::Payload;
use crate::runtime::PyRuntime;
use mesh_proto::{ProcAddr, Target};
use mesh_runtime::{Gate, Outlet, Posted, Posting, Runtime, Said, Way};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;

/// A port as it is sent: its owner's mesh, rank and host, then the contents of `Way`; for the port of a call, its ticket.
#[derive(FromPyObject, IntoPyObject)]
pub(crate) enum PyAddress {
    Channel(u64, u32, u32, u64, bool),
    Response(u64, u32, u32, u64, u64, u32, bool, u64),
}

/// The sending end of a port.
#[pyclass(name = "Outlet", module = "mesh_core._native", frozen)]
pub(crate) struct PyOutlet {
    outlet: Outlet,
    /// Where it leads.
    target: Arc<Target>,
    gate: Gate,
}

impl PyOutlet {
    pub(crate) fn new(outlet: Outlet) -> Self {
        let target = Arc::new(Target::One(outlet.owner()));
        let gate = Gate::of_port(&outlet);
        Self { outlet, target, gate }
    }

    pub(crate) fn from_address(runtime: &Arc<Runtime>, address: PyAddress) -> Self {
        Self::new(match address {
            PyAddress::Channel(mesh, rank, host, id, once) => {
                runtime.outlet(ProcAddr { mesh, rank, host }, Way::Channel { id, once }, false)
            }
            PyAddress::Response(mesh, rank, host, call, actor, index, stream, ticket) => {
                let way = Way::Response { call, actor, index, stream };
                runtime.outlet_under(ProcAddr { mesh, rank, host }, way, ticket)
            }
        })
    }

    fn post(
        &self,
        py: Python<'_>,
        payload: Payload<'_>,
        error: bool,
        place: Option<(u32, String)>,
        own: bool,
    ) -> PyResult<Option<PyDeferral>> {
        let (outlet, to) = (&self.outlet, &self.target);
        let said = Said { error, place: place.as_ref().map(|(rank, shape)| (*rank, shape.as_bytes())) };
        let admission = outlet.admission(to, &said, payload.len(), own);
        let posted = match gate::admit(py, &self.gate, None, admission)? {
            Ok(counted) => payload.ship(py, to, "", |body| outlet.send(said, body, Posting::Now(counted))),
            Err(later) => payload.entrust(py, later, "", |body, later| outlet.send(said, body, Posting::Later(later))),
        }?;
        match posted {
            Posted::Waits(deferral) => Ok(Some(PyDeferral::new(outlet.runtime(), deferral, to, 0))),
            Posted::Sent(queued) if queued > outlet.runtime().link_budget() => {
                gate::hold_back(py, outlet.runtime(), to, self.gate.mailbox())
            }
            Posted::Sent(_) => Ok(None),
        }
    }
}

#[pymethods]
impl PyOutlet {
    /// Sends a value, with the sender's rank and the shape of its mesh if `place` is given. Returns what to wait for if it
    /// could not be sent at once. With `own`, Mesh itself sends it, and waits for it.
    #[pyo3(signature = (value, place=None, own=false))]
    fn send(
        &self,
        py: Python<'_>,
        value: &Bound<'_, PyAny>,
        place: Option<(u32, String)>,
        own: bool,
    ) -> PyResult<Option<PyDeferral>> {
        let payload = Payload::dump_as(value, "the value")?;
        self.post(py, payload, false, place, own)
    }

    /// Sends an encoded exception, like `send`.
    #[pyo3(signature = (data, buffers, place=None))]
    fn send_error(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyBytes>,
        buffers: &Bound<'_, PyAny>,
        place: Option<(u32, String)>,
    ) -> PyResult<Option<PyDeferral>> {
        let payload = Payload::new(data.clone(), buffers)?;
        self.post(py, payload, true, place, true)
    }

    /// Ends a stream.
    fn end(&self) {
        self.outlet.end();
    }

    /// Whether messages would still be sent.
    #[getter]
    fn is_open(&self) -> bool {
        self.outlet.is_open()
    }

    /// Whether it is the port of a call, rather than of a channel.
    #[getter]
    fn is_response(&self) -> bool {
        matches!(self.outlet.way(), Way::Response { .. })
    }

    /// Whether anybody waits at the other end.
    #[getter]
    fn is_awaited(&self) -> bool {
        !matches!(self.outlet.way(), Way::Response { call: 0, .. })
    }

    /// Returns what another process recreates the port from. Once that is sent, the port outlives this object.
    fn hand_on(&self) -> PyAddress {
        let owner = self.outlet.owner();
        match self.outlet.way() {
            Way::Channel { id, once } => PyAddress::Channel(owner.mesh, owner.rank, owner.host, id, once),
            Way::Response { call, actor, index, stream } => {
                let ticket = pack_port(&self.outlet);
                PyAddress::Response(owner.mesh, owner.rank, owner.host, call, actor, index, stream, ticket)
            }
        }
    }
}

#[pymethods]
impl PyRuntime {
    /// Returns the sending end of a port that came from another process.
    fn outlet(&self, address: PyAddress) -> PyOutlet {
        PyOutlet::from_address(&self.0, address)
    }
}
