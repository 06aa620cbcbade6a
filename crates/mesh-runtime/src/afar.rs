//! Meshes of other hosts that this process has sent to: if a host dies, so have their ranks there.

use mesh_proto::{HostNo, MeshId, Placement, ProcAddr};
use std::collections::{HashMap, HashSet};

#[derive(Debug)]
struct Known {
    placement: Placement,
    /// It has at least so many ranks.
    ranks: usize,
    ended: HashSet<u32>,
}

/// The meshes that have not ended, as far as this process knows of them.
#[derive(Debug, Default)]
pub(crate) struct Afar(HashMap<MeshId, Known>);

impl Afar {
    /// Something is sent to the first `ranks` of a mesh, or some of these.
    pub(crate) fn note(&mut self, mesh: MeshId, placement: &Placement, ranks: usize) {
        let fresh = || Known { placement: placement.clone(), ranks, ended: HashSet::new() };
        let known = self.0.entry(mesh).or_insert_with(fresh);
        known.ranks = known.ranks.max(ranks);
    }

    /// A rank has ended, by the one notice of that. With the last that is known the mesh is forgotten.
    pub(crate) fn ended(&mut self, addr: ProcAddr) {
        let Some(known) = self.0.get_mut(&addr.mesh) else { return };
        known.ended.insert(addr.rank);
        let ranks = known.ranks;
        // Others than those that are known here may end too.
        if known.ended.len() >= ranks && known.ended.iter().filter(|rank| (**rank as usize) < ranks).count() == ranks {
            self.forget(addr.mesh);
        }
    }

    /// Nothing more is sent to a mesh: it is to end.
    pub(crate) fn forget(&mut self, mesh: MeshId) {
        self.0.remove(&mesh);
    }

    /// The ranks on a host.
    pub(crate) fn on(&self, host: HostNo) -> Vec<ProcAddr> {
        let on = |(mesh, known): (&MeshId, &Known)| {
            let ranks = known.placement.ranks_on(host, known.ranks);
            ranks.map(|rank| known.placement.addr(*mesh, rank)).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(on).collect()
    }

    /// How many meshes are remembered.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
