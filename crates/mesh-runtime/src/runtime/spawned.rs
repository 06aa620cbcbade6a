//! What this process has spawned below agents other than itself.

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
    /// Meshes not yet stopped: their sizes and places.
    meshes: Mutex<HashMap<MeshId, (usize, Placement)>>,
    /// The pids of procs that have reported being up, and have not ended.
    pids: Mutex<HashMap<ProcAddr, u32>>,
}

impl RemoteSpawns {
    /// A mesh is about to be made.
    pub(super) fn add(&self, mesh: MeshId, whole: &Region, placement: &Placement) {
        lock(&self.meshes).insert(mesh, (whole.len(), placement.clone()));
    }

    /// This many ranks of a mesh are told to stop. Returns whether these are all of it.
    pub(super) fn stop(&self, mesh: MeshId, ranks: usize) -> bool {
        let mut meshes = lock(&self.meshes);
        let whole = meshes.get(&mesh).is_none_or(|(size, _)| *size == ranks);
        if whole {
            meshes.remove(&mesh);
        }
        whole
    }

    /// The meshes not yet stopped, with their sizes and places.
    pub(super) fn meshes(&self) -> Vec<(MeshId, usize, Placement)> {
        lock(&self.meshes).iter().map(|(mesh, (size, place))| (*mesh, *size, place.clone())).collect()
    }

    /// A proc is up, with this pid.
    pub(super) fn on_up(&self, addr: ProcAddr, pid: u32) {
        lock(&self.pids).insert(addr, pid);
    }

    /// A proc has ended.
    pub(super) fn on_down(&self, addr: ProcAddr) {
        lock(&self.pids).remove(&addr);
    }

    /// The pid of a proc, while it runs.
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
    // Each agent looks among this many of the mesh's ranks, from its place on; a single rank from that rank on.
    let (first, per_host) = match placement {
        Placement::Spread(spread) => (0, spread.per_host),
        _ if ranks.len() == 1 => (u32::try_from(ranks.as_slice().offset()).unwrap_or(u32::MAX), 1),
        _ => (0, u32::try_from(ranks.as_slice().bounds().end).unwrap_or(u32::MAX)),
    };
    StopProcs { mesh, call, first, per_host, within, ranks: ranks.clone() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

    use super::*;
    use mesh_topology::{Extent, Slice};

    fn whole(n: usize) -> Region {
        Region::whole(&Extent::new([("procs", n)]).unwrap())
    }

    #[test]
    fn a_mesh_lives_until_all_of_it_is_told_to_stop() {
        let (spawns, place) = (RemoteSpawns::default(), Placement::On(3));
        spawns.add(7, &whole(4), &place);
        assert!(!spawns.stop(7, 1), "a part of it");
        assert_eq!(spawns.meshes(), [(7, 4, place)]);
        assert!(spawns.stop(7, 4));
        assert_eq!(spawns.meshes(), []);
        assert!(spawns.stop(7, 2), "of one that is not known, what is told to stop is all");
    }

    #[test]
    fn a_process_is_known_while_it_runs() {
        let (spawns, addr) = (RemoteSpawns::default(), ProcAddr { mesh: 7, rank: 1, host: 3 });
        spawns.on_up(addr, 40);
        assert_eq!(spawns.pid_of(addr), Some(40));
        spawns.on_down(addr);
        assert_eq!(spawns.pid_of(addr), None);
    }

    #[test]
    fn agents_look_among_the_ranks_that_they_have() {
        let ranks = |region: &Region, place: &Placement| {
            let order = stop_order(5, 7, region, place, Duration::ZERO);
            (order.first, order.per_host)
        };
        let only = Region::new::<&str>(&[], Slice::new(6, &[], &[]).unwrap()).unwrap();
        assert_eq!(ranks(&whole(4), &Placement::On(3)), (0, 4));
        assert_eq!(ranks(&only, &Placement::On(3)), (6, 1));
    }
}
