//! Waiting for receivers that lag behind.

use crate::callables::callables;
use crate::deferral::PyDeferral;
use crate::door::{self, outside};
use crate::errors::OrRaise as _;
use mesh_proto::{ActorId, Target};
use mesh_runtime::{Admission, Bid, Full, Gate, Later, Receivers, Runtime, Verdict, Waited};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// How often a thread that waits for a connection checks for signals.
const LOOK_AROUND: Duration = Duration::from_millis(100);

/// Whether an event loop runs in this thread, which must not be blocked.
pub(crate) fn in_coroutine(py: Python<'_>) -> PyResult<bool> {
    callables(py)?.in_coroutine.bind(py).call0()?.extract()
}

/// The actor that the calling thread works for; 0 for none.
fn current_actor(py: Python<'_>) -> PyResult<ActorId> {
    callables(py)?.current_actor.bind(py).call0()?.extract()
}

/// Lets a message through. Returns whether it was counted, or how to send it later. Errors name `who`.
pub(crate) fn admit(
    py: Python<'_>,
    gate: &Gate,
    who: Option<&Py<PyAny>>,
    admission: Admission<'_>,
) -> PyResult<Result<bool, Later>> {
    match admission {
        Admission::Free => Ok(Ok(false)),
        Admission::Later(later) => Ok(Err(later)),
        Admission::Bid(bid) => match gate.pass(bid) {
            Some(counted) => Ok(Ok(counted)),
            None => wait(py, gate, who, bid),
        },
    }
}

/// If there is no room for a message, a thread waits, at most until its deadline; a coroutine sends it later.
#[cold]
fn wait(py: Python<'_>, gate: &Gate, who: Option<&Py<PyAny>>, bid: Bid<'_>) -> PyResult<Result<bool, Later>> {
    let python = callables(py)?;
    let who = match (who, gate.receivers()) {
        (Some(who), _) => who.clone_ref(py),
        (None, Receivers::Channel) => "channel".into_pyobject(py)?.into_any().unbind(),
        (None, Receivers::Stream) => "stream".into_pyobject(py)?.into_any().unbind(),
        (None, Receivers::Actors) => py.None(),
    };
    let place = |(queued, window): (u64, u64)| (queued, window, bid.cost);
    let coroutine = bid.block && in_coroutine(py)?;
    loop {
        let full = match gate.ask(bid, coroutine).or_raise(py)? {
            Verdict::Passes(counted) => return Ok(Ok(counted)),
            Verdict::Later(later) => return Ok(Err(later)),
            Verdict::Crowded { full, waiting, budget } => {
                let told = (&who, full.index, place(full.level), waiting, budget);
                return Err(PyErr::from_value(python.crowded.bind(py).call1(told)?));
            }
            Verdict::Full(full) => full,
        };
        if let Some(doubt) = full.doubt {
            let told = (&who, gate.mailbox(), full.index, place(full.level), doubt.word());
            let refused = python.refusal.bind(py).call1(told)?;
            if !refused.is_none() {
                return Err(PyErr::from_value(refused));
            }
        }
        if full.is_behind {
            if let Some(counted) = take_turn(py, gate, bid)? {
                return Ok(Ok(counted));
            }
        } else if wait_for_room(py, &full, bid)? {
            continue;
        }
        let told = (&who, full.index, place(full.meter.level()));
        return Err(PyErr::from_value(python.unsent.bind(py).call1(told)?));
    }
}

/// Waits until the mailbox may have room; false if the deadline passed first.
fn wait_for_room(py: Python<'_>, full: &Full<'_>, bid: Bid<'_>) -> PyResult<bool> {
    let Bid { runtime, cost, until, .. } = bid;
    let _waiting = full.meter.block(current_actor(py)?);
    let step = |look, signals| {
        if look { Waited::NotYet } else { runtime.wait_meter(full.meter, cost, until, signals) }
    };
    door::wait(py, runtime, step, until)
}

/// Waits behind messages that coroutines sent before. Returns whether it was counted; `None` if the deadline passed first.
fn take_turn(py: Python<'_>, gate: &Gate, bid: Bid<'_>) -> PyResult<Option<bool>> {
    let turn = gate.turn(bid).or_raise(py)?;
    let waited = door::wait(py, bid.runtime, |look, signals| turn.wait(look, signals), bid.until);
    let counted = turn.leave(waited.is_err());
    waited.map(|_| counted)
}

/// Handles a sender that has outrun a connection. A thread waits here, where Ctrl-C still works; a coroutine gets something
/// to wait for, and later messages to the same place queue behind that.
#[cold]
pub(crate) fn hold_back(
    py: Python<'_>,
    runtime: &Arc<Runtime>,
    target: &Arc<Target>,
    actor: ActorId,
) -> PyResult<Option<PyDeferral>> {
    if in_coroutine(py)? {
        let turn = runtime.turn(target, actor, None, 0).or_raise(py)?;
        return Ok(Some(PyDeferral::new(runtime, turn, target, actor)));
    }
    while !outside(py, || runtime.wait_room(target, LOOK_AROUND)) {
        py.check_signals()?;
    }
    Ok(None)
}
