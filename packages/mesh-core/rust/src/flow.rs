//! Waiting where a receiver lags behind.

use crate::callables::callables;
use crate::door;
use crate::inbox::PyWaker;
use mesh_proto::{ActorId, Target};
use mesh_runtime::{Deferral, Fate, Meter, Runtime, Waited};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const CHANNEL: &str = "channel";

/// How a message gets past its receivers' meters.
pub(crate) enum Passage {
    /// At once; whether it is counted.
    Now(bool),
    /// Once there is room: a coroutine sends it, which nothing may block. There is a reservation for it.
    Later(Arc<[Arc<Meter>]>),
}

/// Where a sender's messages are counted.
pub(crate) struct Gate {
    actor: ActorId,
    /// What it is the gate of, if of no actor: a channel, or a stream.
    port: Option<&'static str>,
    /// Whom errors are to name; only handed through.
    who: Option<Py<PyAny>>,
    /// Of the target's mailboxes, in its order.
    meters: OnceLock<Arc<[Arc<Meter>]>>,
}

/// On whose behalf a message is let through.
#[derive(Clone, Copy)]
pub(crate) struct Bid<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) target: &'a Arc<Target>,
    /// What it counts.
    pub(crate) cost: u64,
    /// Whether its sender waits rather than having it refused.
    pub(crate) block: bool,
    /// When nobody wants it any more.
    pub(crate) until: Option<Instant>,
    /// Mesh itself sends it, and waits for it: there is no more than one for each that waits, so that it is never refused.
    pub(crate) own: bool,
}

/// Whether an event loop runs in this thread, which nothing may block.
pub(crate) fn in_coroutine(py: Python<'_>) -> PyResult<bool> {
    callables(py)?.in_coroutine.bind(py).call0()?.extract()
}

/// The actor that the calling thread works for; 0 for none.
fn current_actor(py: Python<'_>) -> PyResult<ActorId> {
    callables(py)?.current_actor.bind(py).call0()?.extract()
}

impl Gate {
    pub(crate) fn new(actor: ActorId, who: Option<Py<PyAny>>) -> Self {
        Self { actor, port: None, who, meters: OnceLock::new() }
    }

    /// The gate of a channel, or of the stream that a call is answered with.
    pub(crate) fn of_port(id: ActorId, channel: bool) -> Self {
        let port = Some(if channel { CHANNEL } else { "stream" });
        Self { actor: id, port, who: None, meters: OnceLock::new() }
    }

    /// The same gate, for another sender to the same actors.
    pub(crate) fn again(&self, py: Python<'_>) -> Self {
        Self::new(self.actor, self.who.as_ref().map(|who| who.clone_ref(py)))
    }

    /// Whether errors have somebody to name.
    pub(crate) fn is_named(&self) -> bool {
        self.who.is_some()
    }

    /// Shows the garbage collector what is held: whom errors are to name refers back to the sender.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.who)
    }

    /// What people call the receivers, as far as it is known.
    pub(crate) fn called(&self, py: Python<'_>) -> String {
        let name = self.who.as_ref().and_then(|who| who.bind(py).getattr("name").ok());
        name.and_then(|name| name.extract().ok()).unwrap_or_default()
    }

    /// Counts a message of so many bytes. Where there is no room for it a thread waits, at most until the deadline; a
    /// coroutine sends it later.
    pub(crate) fn pass(&self, py: Python<'_>, bid: Bid<'_>) -> PyResult<Passage> {
        let meters = self.meters.get_or_init(|| {
            bid.target.mailboxes(self.actor).map(|(addr, actor)| bid.runtime.meter(addr, actor)).collect()
        });
        if !bid.runtime.defers()
            && let Ok(counted) = bid.runtime.admit_all(meters, bid.cost)
        {
            return Ok(Passage::Now(counted));
        }
        self.wait(py, bid, meters)
    }

    #[cold]
    fn wait(&self, py: Python<'_>, bid: Bid<'_>, meters: &Arc<[Arc<Meter>]>) -> PyResult<Passage> {
        let Bid { runtime, cost, .. } = bid;
        runtime.original().map_err(|error| door::raise(py, &error))?;
        let python = callables(py)?;
        let who = match (&self.who, self.port) {
            (Some(who), _) => who.clone_ref(py),
            (None, Some(port)) => port.into_pyobject(py)?.into_any().unbind(),
            (None, None) => py.None(),
        };
        let who = &who;
        loop {
            // What was sent before and has not gone yet goes first (BKL-1).
            let behind = runtime.behind(bid.target, self.actor);
            let full = match behind {
                Some(index) => index,
                None => match runtime.admit_all(meters, cost) {
                    Ok(counted) => return Ok(Passage::Now(counted)),
                    Err(full) => full,
                },
            };
            let meter = &meters[full];
            let (queued, window) = meter.level();
            let place = (queued, window, cost);
            if bid.block && in_coroutine(py)? {
                if let Err((waiting, budget)) = runtime.reserve(cost, bid.own) {
                    let crowded = python.crowded.bind(py).call1((who, full, place, waiting, budget))?;
                    return Err(PyErr::from_value(crowded));
                }
                return Ok(Passage::Later(Arc::clone(meters)));
            }
            if !bid.block || meter.addr() == runtime.me() {
                // A credit may have come since: what is said of the mailbox has to be what refuses the message.
                if behind.is_none() && meter.full(cost).is_none() {
                    continue;
                }
                let how = match bid.block {
                    false => "refuse",
                    true if self.port == Some(CHANNEL) && !bid.own => "port",
                    true if runtime.on_loop_thread() => "loop",
                    true => "thread",
                };
                let refused = python.refusal.bind(py).call1((who, self.actor, full, place, how))?;
                if !refused.is_none() {
                    return Err(PyErr::from_value(refused));
                }
            }
            if behind.is_some() {
                if let Some(counted) = self.take_turn(py, bid, meters)? {
                    return Ok(Passage::Now(counted));
                }
            } else {
                let _waiting = runtime.wait_in_room(meter, current_actor(py)?);
                let step = |look, signals| {
                    if look { Waited::NotYet } else { runtime.wait_meter(meter, cost, bid.until, signals) }
                };
                if door::wait(py, runtime, step, bid.until)? {
                    continue;
                }
            }
            let (queued, window) = meter.level();
            return Err(PyErr::from_value(python.unsent.bind(py).call1((who, full, (queued, window, cost)))?));
        }
    }

    /// Waits behind messages that coroutines have sent before; none if the deadline came first.
    fn take_turn(&self, py: Python<'_>, bid: Bid<'_>, meters: &Arc<[Arc<Meter>]>) -> PyResult<Option<bool>> {
        let runtime = bid.runtime;
        let turn = runtime.turn(bid.target, self.actor, Some(Arc::clone(meters)), bid.cost);
        let turn = turn.map_err(|error| door::raise(py, &error))?;
        let step = |look, signals| runtime.wait_completion(&turn.done, None, bid.until, look, signals, None);
        let waited = door::wait(py, runtime, step, bid.until);
        if !matches!(waited, Ok(true)) && runtime.take_back(&turn) {
            return waited.map(|_| None);
        }
        let counted = turn.done.fate() == Some(Fate::Status(1));
        match waited {
            Ok(_) => Ok(Some(counted)),
            Err(error) => {
                // It had its turn just before Ctrl-C.
                if counted {
                    runtime.refund_all(meters, bid.cost);
                }
                Err(error)
            }
        }
    }
}

/// Something that is sent once there is room; made only where it was not sent at once.
#[pyclass(name = "Deferral", module = "mesh_core._native", frozen)]
pub(crate) struct PyDeferral {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) deferral: Deferral,
    pub(crate) target: Arc<Target>,
    pub(crate) actor: ActorId,
}

#[pymethods]
impl PyDeferral {
    /// Whether it waits no more.
    fn done(&self) -> bool {
        self.deferral.done.is_done()
    }

    /// Whether it was sent, rather than given up or dropped.
    fn sent(&self) -> bool {
        matches!(self.deferral.done.fate(), Some(Fate::Status(_)))
    }

    /// Whether it was given up before it was sent.
    fn given_up(&self) -> bool {
        self.deferral.done.fate() == Some(Fate::Cancelled)
    }

    /// Waits as long as looking again is cheaper than sleeping; true if it waits no more.
    #[pyo3(signature = (seen=None))]
    fn look(&self, py: Python<'_>, seen: Option<usize>) -> bool {
        let step = || self.runtime.wait_completion(&self.deferral.done, seen, None, true, false, None);
        door::outside(py, step) == Waited::Ready
    }

    /// Has a loop's waker told `token` when it waits no more.
    #[pyo3(signature = (waker, token, seen=usize::MAX))]
    fn tell(&self, waker: &PyWaker, token: u64, seen: usize) {
        self.deferral.done.tell(&waker.0, token, seen);
    }

    /// Gives it up; false if it was sent.
    fn cancel(&self, py: Python<'_>) -> bool {
        door::outside(py, || self.runtime.take_back(&self.deferral))
    }

    /// The actor that it is for.
    #[getter]
    fn actor(&self) -> u64 {
        self.actor
    }

    /// Whether that is an actor of this very process.
    fn is_local(&self) -> bool {
        self.target.index_of(self.runtime.me()).is_some()
    }
}

/// What a message's deadline leaves of time, in seconds.
pub(crate) fn left(due: Instant) -> f64 {
    let now = Instant::now();
    if due > now { (due - now).as_secs_f64() } else { -(now - due).max(Duration::from_nanos(1)).as_secs_f64() }
}
