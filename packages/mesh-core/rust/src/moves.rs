//! What everybody is told of meshes: where the ranks of repaired ones are, and why others were given up.

use crate::call::PyCall;
use crate::door::leave;
use crate::runtime::PyRuntime;
use crate::target::{Addr, PyTarget, addr_tuple, proc_addr};
use bytes::Bytes;
use mesh_proto::control::Told;
use mesh_proto::{GivenUp, Moved, ProcAddr, Run, Target};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A run of ranks: the first, how many, the mesh, rank and host of the first one's process, and their incarnation.
type RunFields = (u32, u32, u64, u32, u32, u32);

fn moved(mesh: u64, version: u32, runs: Vec<RunFields>, left: Vec<Addr>) -> Moved {
    let run = |(first, count, mesh, rank, host, incarnation)| Run {
        first,
        count,
        at: ProcAddr { mesh, rank, host },
        incarnation,
    };
    let (runs, left) = (runs.into_iter().map(run).collect(), left.into_iter().map(proc_addr).collect());
    Moved { mesh, version, runs, left }
}

/// Tells all processes where the ranks of a mesh are that this process repaired; completes when all hosts know.
#[pyfunction]
pub(crate) fn publish_moves(
    py: Python<'_>,
    at: &PyRuntime,
    mesh: u64,
    version: u32,
    runs: Vec<RunFields>,
    left: Vec<Addr>,
) -> PyResult<PyCall> {
    let news = Told::Moved(moved(mesh, version, runs, left));
    let call = leave(py, || at.0.publish(news))?;
    Ok(PyCall::of(&at.0, call, Target::One(ProcAddr::CONTROLLER)))
}

/// Takes the moves that came with a reference to a mesh.
#[pyfunction]
pub(crate) fn learn_moves(at: &PyRuntime, mesh: u64, version: u32, runs: Vec<RunFields>) {
    at.0.learn(&moved(mesh, version, runs, Vec::new()));
}

/// What is known about a repaired mesh: how often it was repaired, and its runs; `None` for any other mesh.
#[pyfunction]
pub(crate) fn known_moves(at: &PyRuntime, mesh: u64) -> Option<(u32, Vec<RunFields>)> {
    let known = at.0.moved(mesh)?;
    let fields = |run: &Run| (run.first, run.count, run.at.mesh, run.at.rank, run.at.host, run.incarnation);
    Some((known.version, known.runs.iter().map(fields).collect()))
}

/// Tells all processes why the policy of a mesh gave it up; completes when the controller has told all hosts.
#[pyfunction]
pub(crate) fn publish_given_up(py: Python<'_>, at: &PyRuntime, mesh: u64, why: Vec<u8>) -> PyResult<PyCall> {
    let news = Told::GivenUp(GivenUp { mesh, why: Bytes::from(why) });
    let call = leave(py, || at.0.publish(news))?;
    Ok(PyCall::of(&at.0, call, Target::One(ProcAddr::CONTROLLER)))
}

/// Why the policy of a mesh gave it up, as its owner has said; `None` if it did not.
#[pyfunction]
pub(crate) fn given_up<'py>(py: Python<'py>, at: &PyRuntime, mesh: u64) -> Option<Bound<'py, PyBytes>> {
    at.0.given_up(mesh).map(|why| PyBytes::new(py, &why))
}

/// The address of the process that has a rank now.
#[pyfunction]
pub(crate) fn locate(at: &PyRuntime, mesh: u64, rank: u32, host: u32) -> Addr {
    addr_tuple(at.0.locate(ProcAddr { mesh, rank, host }))
}

/// The rank of a process: the mesh and rank that references name, and its incarnation.
#[pyfunction]
pub(crate) fn seat(at: &PyRuntime, mesh: u64, rank: u32, host: u32) -> (u64, u32, u32) {
    let seat = at.0.seat(ProcAddr { mesh, rank, host });
    (seat.mesh, seat.rank, seat.incarnation)
}

/// The current incarnation of a rank.
#[pyfunction]
pub(crate) fn incarnation(at: &PyRuntime, mesh: u64, rank: u32) -> u32 {
    at.0.incarnation(mesh, rank)
}

/// The places of a target whose processes are known here to have ended.
#[pyfunction]
pub(crate) fn gone(at: &PyRuntime, target: &PyTarget) -> Vec<usize> {
    let target = at.0.resolve(&target.target);
    (0..target.len()).filter(|place| target.place(*place).is_some_and(|addr| at.0.is_gone(addr))).collect()
}
