//! The ranks of this process's own meshes whose processes have died. They are seen until they are respawned or told to
//! stop, however many other ranks their mesh still has.

use crate::locks::lock;
use mesh_proto::{HostNo, MeshId, ProcAddr};
use mesh_topology::Region;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};

#[derive(Debug)]
struct Own {
    title: Arc<str>,
    size: usize,
    dead: BTreeMap<u32, HostNo>,
    /// Ranks that were told to stop, or that another process has now.
    over: HashSet<u32>,
}

impl Own {
    /// Forgets ranks. Returns whether all of the mesh is over.
    fn end(&mut self, ranks: impl IntoIterator<Item = u32>) -> bool {
        for rank in ranks {
            self.dead.remove(&rank);
            self.over.insert(rank);
        }
        self.over.len() >= self.size
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct DeadRanks(Mutex<HashMap<MeshId, Own>>);

impl DeadRanks {
    /// A mesh is about to be made.
    pub(super) fn add(&self, mesh: MeshId, size: usize, title: &Arc<str>) {
        let own = Own { title: Arc::clone(title), size, dead: BTreeMap::new(), over: HashSet::new() };
        lock(&self.0).insert(mesh, own);
    }

    /// A process has died.
    pub(super) fn died(&self, addr: ProcAddr) {
        if let Some(own) = lock(&self.0).get_mut(&addr.mesh)
            && !own.over.contains(&addr.rank)
        {
            own.dead.insert(addr.rank, addr.host);
        }
    }

    /// Ranks are told to stop: they are meant to end.
    pub(super) fn stop(&self, mesh: MeshId, ranks: &Region) {
        let mut meshes = lock(&self.0);
        let numbers = ranks.into_iter().filter_map(|rank| u32::try_from(rank).ok());
        if meshes.get_mut(&mesh).is_some_and(|own| ranks.len() >= own.size || own.end(numbers)) {
            meshes.remove(&mesh);
        }
    }

    /// Those that no other process has now, with the titles of their meshes; the others are forgotten.
    pub(super) fn now(&self, is_replaced: impl Fn(ProcAddr) -> bool) -> Vec<(ProcAddr, Arc<str>)> {
        let mut found = Vec::new();
        lock(&self.0).retain(|&mesh, own| {
            let of = |(&rank, &host): (&u32, &HostNo)| ProcAddr { mesh, rank, host };
            let (gone, here): (Vec<_>, Vec<_>) = own.dead.iter().map(of).partition(|addr| is_replaced(*addr));
            found.extend(here.into_iter().map(|addr| (addr, Arc::clone(&own.title))));
            !own.end(gone.into_iter().map(|addr| addr.rank))
        });
        found
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

    use super::*;
    use mesh_topology::{Extent, Slice};

    const fn addr(rank: u32) -> ProcAddr {
        ProcAddr { mesh: 7, rank, host: 3 }
    }

    fn now(ranks: &DeadRanks) -> Vec<u32> {
        ranks.now(|_| false).into_iter().map(|(addr, _)| addr.rank).collect()
    }

    fn two() -> DeadRanks {
        let ranks = DeadRanks::default();
        ranks.add(7, 2, &Arc::from("workers"));
        ranks
    }

    #[test]
    fn all_ranks_of_a_mesh_may_be_dead() {
        let ranks = two();
        ranks.died(addr(1));
        ranks.died(addr(0));
        ranks.died(ProcAddr { mesh: 8, ..addr(0) });
        assert_eq!(now(&ranks), [0, 1], "another's mesh is no concern of this one");
        ranks.stop(7, &Region::whole(&Extent::new([("procs", 2)]).unwrap()));
        assert_eq!(now(&ranks), []);
        ranks.died(addr(0));
        assert_eq!(now(&ranks), [], "it was meant to end");
    }

    #[test]
    fn a_rank_is_forgotten_once_another_process_has_it() {
        let ranks = two();
        ranks.died(addr(0));
        ranks.died(addr(1));
        assert_eq!(ranks.now(|at| at.rank == 0).len(), 1);
        assert_eq!(now(&ranks), [1], "for good");
        ranks.stop(7, &Region::new::<&str>(&[], Slice::new(1, &[], &[]).unwrap()).unwrap());
        assert!(lock(&ranks.0).is_empty(), "a mesh is forgotten with the last of its ranks");
    }
}
