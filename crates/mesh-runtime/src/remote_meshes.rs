//! Meshes of other hosts that this process has sent to: if a host dies, so have their ranks there.
//!
//! AFR-1: a rank is told of as ended with the host that it is on, and with no other, in whatever order a process has come
//! to know the ranks of its mesh: one at a time, or all of them.

use mesh_proto::{HostNo, MeshId, Placement, ProcAddr};
use std::collections::{BTreeMap, HashMap, HashSet};

#[derive(Debug, Default)]
struct Known {
    /// Where all of it is, if that is known.
    placement: Option<Placement>,
    /// It has at least so many ranks, which are where the placement says; none without one.
    ranks: usize,
    /// Ranks that are known by themselves: where one is says nothing of the others.
    single: BTreeMap<u32, HostNo>,
    ended: HashSet<u32>,
}

impl Known {
    /// Whether a rank is where the placement has it; it counts as one of those from now on.
    fn covers(&mut self, rank: u32, host: HostNo) -> bool {
        let covers = self.placement.as_ref().is_some_and(|placement| placement.host_of(rank) == host);
        if covers {
            self.ranks = self.ranks.max(rank as usize + 1);
        }
        covers
    }

    fn is_over(&self) -> bool {
        let has_ended = |rank: u32| self.ended.contains(&rank);
        // Others than those that are known here may have ended, too.
        self.ended.len() >= self.ranks.max(self.single.len())
            && self.single.keys().all(|rank| has_ended(*rank))
            && (0..self.ranks).all(|rank| u32::try_from(rank).is_ok_and(has_ended))
    }
}

/// The meshes that have not ended, as far as this process knows of them.
#[derive(Debug, Default)]
pub(crate) struct RemoteMeshes(HashMap<MeshId, Known>);

impl RemoteMeshes {
    /// Something is sent to the first `ranks` of a mesh that is placed so, or some of these.
    pub(crate) fn note(&mut self, mesh: MeshId, placement: &Placement, ranks: usize) {
        let known = self.0.entry(mesh).or_default();
        if known.placement.is_none() {
            known.placement = Some(placement.clone());
            for (rank, host) in std::mem::take(&mut known.single) {
                if !known.covers(rank, host) {
                    known.single.insert(rank, host);
                }
            }
        }
        known.ranks = known.ranks.max(ranks);
    }

    /// Something is sent to one rank of a mesh.
    pub(crate) fn note_one(&mut self, addr: ProcAddr) {
        let known = self.0.entry(addr.mesh).or_default();
        if !known.covers(addr.rank, addr.host) {
            known.single.insert(addr.rank, addr.host);
        }
    }

    /// A rank has ended, by the one notice of that. With the last that is known the mesh is forgotten.
    pub(crate) fn ended(&mut self, addr: ProcAddr) {
        let Some(known) = self.0.get_mut(&addr.mesh) else { return };
        known.ended.insert(addr.rank);
        if known.is_over() {
            self.forget(addr.mesh);
        }
    }

    /// Nothing more is sent to a mesh: it is to end.
    pub(crate) fn forget(&mut self, mesh: MeshId) {
        self.0.remove(&mesh);
    }

    /// The ranks on a host.
    pub(crate) fn on(&self, host: HostNo) -> Vec<ProcAddr> {
        let mut on = Vec::new();
        for (&mesh, known) in &self.0 {
            if let Some(placement) = &known.placement {
                on.extend(placement.ranks_on(host, known.ranks).map(|rank| placement.addr(mesh, rank)));
            }
            let single = known.single.iter().filter(|(_, at)| **at == host);
            on.extend(single.map(|(&rank, _)| ProcAddr { mesh, rank, host }));
        }
        on
    }

    /// How many meshes are remembered.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
