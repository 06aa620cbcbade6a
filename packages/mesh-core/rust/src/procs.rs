//! Processes of meshes: spawning, stopping and watching them.

use crate::call::PyCall;
use crate::door::leave;
use crate::runtime::PyRuntime;
use crate::target::{PyPlacement, PyTarget};
use crate::time::duration;
use crate::topology::PyRegion;
use bytes::Bytes;
use mesh_proto::{ProcAddr, Target};
use mesh_runtime::{ForkServerSpec, SpawnSpec};
use pyo3::prelude::*;
use std::ffi::OsString;

#[pymethods]
impl PyRuntime {
    /// Spawns a mesh of processes; the call completes as they come up.
    #[pyo3(signature = (mesh, region, placement, *, argv, env, plan, fresh, config, within, title=""))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, and called in one place")]
    fn spawn_procs(
        &self,
        py: Python<'_>,
        mesh: u64,
        region: &PyRegion,
        placement: &PyPlacement,
        argv: Vec<OsString>,
        env: Vec<(OsString, OsString)>,
        plan: &[u8],
        fresh: bool,
        config: &[u8],
        within: f64,
        title: &str,
    ) -> PyResult<PyCall> {
        let spec = SpawnSpec {
            fork_server: ForkServerSpec { argv, env, plan: Bytes::copy_from_slice(plan) },
            exec: fresh,
            config: Bytes::copy_from_slice(config),
            within: duration(within)?,
            title: title.into(),
        };
        let (region, placement) = (region.inner(), &placement.0);
        let call = leave(py, || self.0.spawn_procs(mesh, region, placement, &spec))?;
        Ok(PyCall::of(&self.0, call, Target::Many(mesh, region.clone(), placement.clone())))
    }

    /// Asks processes to end, and kills those still running after `within` seconds; completes when all have ended.
    fn stop_procs(&self, py: Python<'_>, target: &PyTarget, within: f64) -> PyResult<PyCall> {
        let within = duration(within)?;
        let target = self.0.resolve(&target.target);
        let call = leave(py, || self.0.stop_procs(&target, within))?;
        Ok(PyCall::of(&self.0, call, target))
    }

    /// Notifies this process of the ends of others; at once for those that have ended.
    fn watch_procs(&self, target: &PyTarget) {
        self.0.watch_procs(&self.0.resolve(&target.target));
    }

    /// Whether a process is known here to have ended.
    fn is_gone(&self, mesh: u64, rank: u32, host: u32) -> bool {
        self.0.is_gone(self.0.locate(ProcAddr { mesh, rank, host }))
    }

    /// The pid of a process, if it is known here.
    fn pid_of(&self, mesh: u64, rank: u32, host: u32) -> Option<u32> {
        self.0.pid_of(self.0.locate(ProcAddr { mesh, rank, host }))
    }

    /// The meshes of processes that this process spawned and that have not all ended, with their sizes and placements.
    fn live_meshes(&self) -> Vec<(u64, usize, PyPlacement)> {
        self.0.live().into_iter().map(|(mesh, n, placement)| (mesh, n, PyPlacement(placement))).collect()
    }
}
