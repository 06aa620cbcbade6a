//! What this process has spawned below other agents than itself.

use crate::locks::lock;
use mesh_proto::control::StopProcs;
use mesh_proto::{CallId, MeshId, Placement, ProcAddr};
use mesh_topology::Region;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct RemoteSpawns {
    /// Meshes that were not stopped: their sizes and places.
    meshes: Mutex<HashMap<MeshId, (usize, Placement)>>,
    /// The processes of procs that have said that they are up, and not ended.
    pids: Mutex<HashMap<ProcAddr, u32>>,
}

impl RemoteSpawns {
    /// A mesh is about to be made.
    pub(super) fn add(&self, mesh: MeshId, whole: &Region, placement: &Placement) {
        lock(&self.meshes).insert(mesh, (whole.len(), placement.clone()));
    }

    /// So many ranks of a mesh are told to stop. Returns whether these are all of it.
    pub(super) fn stop(&self, mesh: MeshId, ranks: usize) -> bool {
        let mut meshes = lock(&self.meshes);
        let whole = meshes.get(&mesh).is_none_or(|(size, _)| *size == ranks);
        if whole {
            meshes.remove(&mesh);
        }
        whole
    }

    /// The meshes that were not stopped, with their sizes and places.
    pub(super) fn meshes(&self) -> Vec<(MeshId, usize, Placement)> {
        lock(&self.meshes).iter().map(|(mesh, (size, place))| (*mesh, *size, place.clone())).collect()
    }

    /// A proc is up, in this process.
    pub(super) fn on_up(&self, addr: ProcAddr, pid: u32) {
        lock(&self.pids).insert(addr, pid);
    }

    /// A proc has ended.
    pub(super) fn on_down(&self, addr: ProcAddr) {
        lock(&self.pids).remove(&addr);
    }

    /// A proc's process, while it runs.
    pub(super) fn pid_of(&self, addr: ProcAddr) -> Option<u32> {
        lock(&self.pids).get(&addr).copied()
    }
}

/// The order to stop ranks of a mesh, for their agents.
pub(super) fn stop_order(
    call: CallId,
    mesh: MeshId,
    ranks: &Region,
    placement: &Placement,
    within: Duration,
) -> StopProcs {
    // Each agent looks among so many of the mesh's ranks, from its place on; a single one from the first that is meant.
    let (first, per_host) = match placement {
        Placement::Spread(spread) => (0, spread.per_host),
        _ if ranks.len() == 1 => (u32::try_from(ranks.as_slice().offset()).unwrap_or(u32::MAX), 1),
        _ => (0, u32::try_from(ranks.as_slice().bounds().end).unwrap_or(u32::MAX)),
    };
    StopProcs { mesh, call, first, per_host, within, ranks: ranks.clone() }
}
