//! Waiting where a receiver lags behind.

use crate::door;
use mesh_proto::{ActorId, MESSAGE_COST, Target};
use mesh_runtime::{Meter, Runtime, Waited};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Where a sender's messages are counted.
pub(crate) struct Gate {
    actor: ActorId,
    /// Whom errors are to name; only handed through.
    who: Option<Py<PyAny>>,
    /// Of the target's mailboxes, in its order.
    meters: OnceLock<Box<[Arc<Meter>]>>,
}

impl Gate {
    pub(crate) fn new(actor: ActorId, who: Option<Py<PyAny>>) -> Self {
        Self { actor, who, meters: OnceLock::new() }
    }

    /// The same gate, for another sender to the same actors.
    pub(crate) fn again(&self, py: Python<'_>) -> Self {
        Self::new(self.actor, self.who.as_ref().map(|who| who.clone_ref(py)))
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

    /// Counts a message of so many bytes, or waits until there is room for it, at most until `until`.
    pub(crate) fn pass(
        &self,
        py: Python<'_>,
        runtime: &Runtime,
        target: &Target,
        bytes: usize,
        block: bool,
        until: Option<Instant>,
    ) -> PyResult<bool> {
        let meters = self.meters.get_or_init(|| target.procs().map(|addr| runtime.meter(addr, self.actor)).collect());
        // As `Outgoing::cost` has it.
        let cost = MESSAGE_COST + bytes as u64;
        loop {
            let full = match runtime.admit_all(meters, cost) {
                Ok(counted) => return Ok(counted),
                Err(full) => full,
            };
            self.wait(py, runtime, full, &meters[full], cost, block, until)?;
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the rest of `pass`, which is to be small")]
    #[cold]
    fn wait(
        &self,
        py: Python<'_>,
        runtime: &Runtime,
        index: usize,
        meter: &Meter,
        cost: u64,
        block: bool,
        until: Option<Instant>,
    ) -> PyResult<()> {
        let local = meter.addr() == runtime.me();
        let flow = py.import("mesh_core._flow")?;
        if !block || local {
            // A credit may have come since: what is said of the mailbox has to be what refuses the message.
            let Some((queued, window)) = meter.full(cost) else { return Ok(()) };
            let place = (queued, window, cost);
            let refusal = flow.getattr("refusal")?;
            let how = match block {
                false => "refuse",
                true if runtime.on_loop_thread() => "loop",
                true => "thread",
            };
            let refused = refusal.call1((&self.who, self.actor, index, place, how))?;
            if !refused.is_none() {
                return Err(PyErr::from_value(refused));
            }
        }
        let step = |look, signals| if look { Waited::NotYet } else { runtime.wait_meter(meter, cost, until, signals) };
        if door::wait(py, runtime, step, until)? {
            return Ok(());
        }
        let Some((queued, window)) = meter.full(cost) else { return Ok(()) };
        let place = (queued, window, cost);
        Err(PyErr::from_value(flow.getattr("unsent")?.call1((&self.who, index, place))?))
    }
}

/// A deadline as messages carry it: rounded up, and never 0, which means none.
pub(crate) fn millis(until: Instant) -> u32 {
    let left = until.saturating_duration_since(Instant::now());
    u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX).max(1)
}

/// What a message's deadline leaves of time, in seconds.
pub(crate) fn left(due: Instant) -> f64 {
    let now = Instant::now();
    if due > now { (due - now).as_secs_f64() } else { -(now - due).max(Duration::from_nanos(1)).as_secs_f64() }
}
