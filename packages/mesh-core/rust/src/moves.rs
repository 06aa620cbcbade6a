//! Where the ranks of repaired meshes are.

use crate::call::PyCall;
use crate::door;
use crate::runtime::PyRuntime;
use crate::target::PyTarget;
use mesh_proto::{Moved, ProcAddr, Run, Target};
use mesh_runtime::Runtime;
use pyo3::prelude::*;
use std::sync::Arc;

/// A run of ranks: the first, how many, the mesh, rank and host of the first's process, and which life of theirs it is.
type RunFields = (u32, u32, u64, u32, u32, u32);

fn moved(mesh: u64, version: u32, runs: &[RunFields], left: &[(u64, u32, u32)]) -> Moved {
    let run = |&(first, count, mesh, rank, host, incarnation): &RunFields| Run {
        first,
        count,
        at: ProcAddr { mesh, rank, host },
        incarnation,
    };
    let addr = |&(mesh, rank, host): &(u64, u32, u32)| ProcAddr { mesh, rank, host };
    Moved { mesh, version, runs: runs.iter().map(run).collect(), left: left.iter().map(addr).collect() }
}

fn runtime(runtime: &PyRuntime) -> &Arc<Runtime> {
    runtime.shared()
}

/// Tells everybody where the ranks of a mesh are that this process has repaired; completes when all hosts know.
#[pyfunction]
pub(crate) fn publish_moves(
    py: Python<'_>,
    at: &PyRuntime,
    mesh: u64,
    version: u32,
    runs: Vec<RunFields>,
    left: Vec<(u64, u32, u32)>,
) -> PyResult<PyCall> {
    let news = moved(mesh, version, &runs, &left);
    let call = door::leave(py, || runtime(at).publish(news))?;
    Ok(PyCall::of(runtime(at), call, Target::One(ProcAddr::CONTROLLER)))
}

/// Takes what came with a reference.
#[pyfunction]
pub(crate) fn learn_moves(at: &PyRuntime, mesh: u64, version: u32, runs: Vec<RunFields>) {
    runtime(at).learn(&moved(mesh, version, &runs, &[]));
}

/// What is known of a repaired mesh: how often it was, and its runs; nothing of any other.
#[pyfunction]
pub(crate) fn known_moves(at: &PyRuntime, mesh: u64) -> Option<(u32, Vec<RunFields>)> {
    let known = runtime(at).moved(mesh)?;
    let fields = |run: &Run| (run.first, run.count, run.at.mesh, run.at.rank, run.at.host, run.incarnation);
    Some((known.version, known.runs.iter().map(fields).collect()))
}

/// The address of the process that a rank has now.
#[pyfunction]
pub(crate) fn locate(at: &PyRuntime, mesh: u64, rank: u32, host: u32) -> (u64, u32, u32) {
    let addr = runtime(at).locate(ProcAddr { mesh, rank, host });
    (addr.mesh, addr.rank, addr.host)
}

/// Whose rank a process has: the mesh and rank that references name, and which life of that rank.
#[pyfunction]
pub(crate) fn seat(at: &PyRuntime, mesh: u64, rank: u32, host: u32) -> (u64, u32, u32) {
    let seat = runtime(at).seat(ProcAddr { mesh, rank, host });
    (seat.mesh, seat.rank, seat.incarnation)
}

/// Which life of a rank there is now.
#[pyfunction]
pub(crate) fn incarnation(at: &PyRuntime, mesh: u64, rank: u32) -> u32 {
    runtime(at).incarnation(mesh, rank)
}

/// Places of a target whose processes have ended, as far as is known here.
#[pyfunction]
pub(crate) fn gone(at: &PyRuntime, target: &PyTarget) -> Vec<usize> {
    let target = runtime(at).resolve(&target.target);
    let places = (0..target.len()).filter(|place| target.place(*place).is_some_and(|addr| runtime(at).is_gone(addr)));
    places.collect()
}
