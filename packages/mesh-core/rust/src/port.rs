//! Ports: what sends to them and what receives.

use crate::call::PyCall;
use crate::door::{outside, raise};
use crate::flow::{Bid, Gate, Passage, PyDeferral, in_coroutine};
use crate::runtime::Payload;
use mesh_proto::{ProcAddr, Target, Ticket};
use mesh_runtime::{Deferral, Hold, Kept, Later, Mailbox, Outlet, Packed, Posted, Posting, Runtime, Said, Way};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

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

    /// Begins to wait for the next value.
    fn receive(&self, py: Python<'_>) -> PyResult<PyCall> {
        let receive = self.mailbox.receive().map_err(|error| raise(py, &error))?;
        Ok(PyCall {
            runtime: Arc::clone(&self.runtime),
            call: Arc::clone(&receive.call),
            target: Arc::clone(&self.target),
            actor: 0,
            port: Some((Arc::clone(&self.mailbox), receive)),
        })
    }

    /// Takes no more in, and drops what nobody has received.
    fn close(&self) {
        self.mailbox.close();
    }

    /// Whether nothing can be received any more.
    #[getter]
    fn is_over(&self) -> bool {
        self.mailbox.is_over()
    }

    fn __len__(&self) -> usize {
        self.mailbox.len()
    }
}

/// A port as it travels: its owner's mesh, rank and host, then what `Way` holds, and that of a call its ticket.
#[derive(FromPyObject, IntoPyObject)]
pub(crate) enum PyAddress {
    Channel(u64, u32, u32, u64, bool),
    Response(u64, u32, u32, u64, u64, u32, bool, u64),
}

/// The sending end of a port.
#[pyclass(name = "Outlet", module = "mesh_core._native", frozen)]
pub(crate) struct PyOutlet {
    outlet: Outlet,
    /// To whom it leads.
    target: Arc<Target>,
    gate: Gate,
}

impl PyOutlet {
    pub(crate) fn new(outlet: Outlet) -> Self {
        let target = Arc::new(Target::One(outlet.owner()));
        let channel = matches!(outlet.way(), Way::Channel { .. });
        let gate = Gate::of_port(outlet.counted().unwrap_or(0), channel);
        Self { outlet, target, gate }
    }

    /// Makes the port of a call part of the message that is being pickled; the ticket under which it travels.
    fn pack(&self) -> Ticket {
        PACKING.with_borrow_mut(|packing| {
            let Some(Packs { ports, loose: false, .. }) = packing else {
                // Pickled by other hands, for whatever: who is to have it nobody knows.
                self.outlet.hand_on();
                return self.outlet.new_ticket();
            };
            // In one message it travels under one ticket, however often it is in it or is pickled.
            if let Some(port) = ports.iter().find(|port| port.is_of(&self.outlet)) {
                return port.ticket();
            }
            let port = self.outlet.packed();
            let ticket = port.ticket();
            ports.push(port);
            ticket
        })
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

    fn post(&self, py: Python<'_>, payload: Payload<'_>, said: Said<'_>, own: bool) -> PyResult<Option<PyDeferral>> {
        let how = self.admit(py, &said, payload.len(), own)?;
        let to = &self.target;
        let posted = match how {
            Posting::Now(_) => payload.ship(py, to, String::new, |body| self.outlet.send(said, body, how)),
            Posting::Later(later) => payload
                .entrust(py, later, String::new, |body, later| self.outlet.send(said, body, Posting::Later(later))),
        }?;
        let queued = match posted {
            Posted::Waits(deferral) => return Ok(Some(self.deferral(deferral))),
            Posted::Sent(queued) => queued,
        };
        if queued > self.outlet.budget() && in_coroutine(py)? {
            let place = self.outlet.counted().unwrap_or(0);
            let turn = self.outlet.turn(place).map_err(|error| raise(py, &error))?;
            return Ok(Some(self.deferral(turn)));
        }
        // A sender that outruns the connection waits here, where Ctrl-C still works.
        while queued > self.outlet.budget() && !outside(py, || self.outlet.wait_room(Duration::from_millis(100))) {
            py.check_signals()?;
        }
        Ok(None)
    }

    /// Counts a value against its receiver's budget, if it has one.
    fn admit(&self, py: Python<'_>, said: &Said<'_>, bytes: usize, own: bool) -> PyResult<Posting> {
        let (runtime, target) = (self.outlet.runtime(), &self.target);
        let Some(place) = self.outlet.counted().filter(|_| self.outlet.is_open()) else {
            return Ok(Posting::Now(false));
        };
        if said.error && matches!(self.outlet.way(), Way::Response { .. }) {
            // How a call has failed waits for no room; but it overtakes nothing.
            let behind = runtime.behind(target, place).is_some();
            return Ok(if behind { Posting::Later(Later::default()) } else { Posting::Now(false) });
        }
        let cost = self.outlet.cost(said, bytes);
        let bid = Bid { runtime, target, cost, block: true, until: None, own };
        Ok(match self.gate.pass(py, bid)? {
            Passage::Now(counted) => Posting::Now(counted),
            Passage::Later(meters) => Posting::Later(Later { meters: Some(meters), cost, ..Later::default() }),
        })
    }

    fn deferral(&self, deferral: Deferral) -> PyDeferral {
        let runtime = Arc::clone(self.outlet.runtime());
        PyDeferral { runtime, deferral, target: Arc::clone(&self.target), actor: 0 }
    }
}

#[pymethods]
impl PyOutlet {
    /// Sends a value, with the sender's rank and the shape of its mesh if `place` is given. Returns what to wait for where
    /// it could not be sent at once. `own` says that somebody is going to wait for it.
    #[pyo3(signature = (value, place=None, own=false))]
    fn send(
        &self,
        py: Python<'_>,
        value: &Bound<'_, PyAny>,
        place: Option<(u32, String)>,
        own: bool,
    ) -> PyResult<Option<PyDeferral>> {
        let payload = Payload::dump_as(value, "the value")?;
        let place = place.as_ref().map(|(rank, shape)| (*rank, shape.as_bytes()));
        self.post(py, payload, Said { error: false, place }, own)
    }

    /// Sends an exception that was encoded before; as `send`, by somebody who goes on.
    #[pyo3(signature = (data, buffers, place=None))]
    fn send_error(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyBytes>,
        buffers: &Bound<'_, PyAny>,
        place: Option<(u32, String)>,
    ) -> PyResult<Option<PyDeferral>> {
        let payload = Payload::new(data.clone(), buffers)?;
        let place = place.as_ref().map(|(rank, shape)| (*rank, shape.as_bytes()));
        self.post(py, payload, Said { error: true, place }, true)
    }

    /// Says that no more comes: the end of a stream.
    fn end(&self) {
        self.outlet.end();
    }

    /// Whether a message would still be sent.
    #[getter]
    fn is_open(&self) -> bool {
        self.outlet.is_open()
    }

    /// Whether it is the port of a call, rather than of a channel.
    #[getter]
    fn is_response(&self) -> bool {
        matches!(self.outlet.way(), Way::Response { .. })
    }

    /// Whether anybody waits at the other end at all.
    #[getter]
    fn is_awaited(&self) -> bool {
        !matches!(self.outlet.way(), Way::Response { call: 0, .. })
    }

    /// What another process makes the same port of. Where that is sent, the end of this one is not the end of all.
    fn hand_on(&self) -> PyAddress {
        let owner = self.outlet.owner();
        match self.outlet.way() {
            Way::Channel { id, once } => PyAddress::Channel(owner.mesh, owner.rank, owner.host, id, once),
            Way::Response { call, actor, index, stream } => {
                let ticket = self.pack();
                PyAddress::Response(owner.mesh, owner.rank, owner.host, call, actor, index, stream, ticket)
            }
        }
    }
}

thread_local! {
    /// What is in what this thread is pickling for a message, or to be kept.
    static PACKING: RefCell<Option<Packs>> = const { RefCell::new(None) };
}

/// What a pickled object has in it.
#[derive(Default)]
pub(crate) struct Packs {
    /// The ports of calls.
    pub(crate) ports: Vec<Packed>,
    /// What holds the values that references are to, each once.
    pub(crate) refs: Vec<Arc<Hold>>,
    /// Whether there are references at all: those to small values need no holding.
    pub(crate) has_refs: bool,
    /// Where these lie.
    pub(crate) kept: Vec<Kept>,
    /// Whether it is to be kept as it is, for nobody knows whom, rather than sent.
    loose: bool,
}

/// Makes a reference part of what is being pickled; false if nobody could count it there.
pub(crate) fn pack_ref(held: Option<(&Arc<Hold>, &Kept)>) -> bool {
    PACKING.with_borrow_mut(|packing| {
        let Some(packs) = packing else { return held.is_none() };
        packs.has_refs = true;
        let Some((hold, kept)) = held else { return true };
        if !packs.refs.iter().any(|one| one.addr() == hold.addr()) {
            packs.refs.push(Arc::clone(hold));
            packs.kept.push(kept.clone());
        }
        true
    })
}

/// Whether this thread is pickling a message just now, rather than something of the user's own.
#[pyfunction]
pub(crate) fn packing() -> bool {
    PACKING.with_borrow(|packing| packing.as_ref().is_some_and(|packs| !packs.loose))
}

/// While it lives, ports and references that this thread pickles are part of one message, or of something that is kept.
pub(crate) struct Packing(Option<Packs>);

impl Packing {
    pub(crate) fn begin(loose: bool) -> Self {
        Self(PACKING.replace(Some(Packs { loose, ..Packs::default() })))
    }

    /// What was found.
    pub(crate) fn end(self) -> Packs {
        PACKING.take().unwrap_or_default()
    }
}

impl Drop for Packing {
    fn drop(&mut self) {
        // A message that is sent while another is being pickled is one of its own.
        PACKING.set(self.0.take());
    }
}
