//! Meshes of other hosts that this process has sent to. When a host dies, it finds here which ranks have died with it.
//!
//! AFR-1: a rank is reported as ended with the host that it is on, and with no other, whether a process came to know the
//! ranks of its mesh one at a time or all at once.

use crate::locks::lock;
use mesh_proto::{HostNo, MeshId, Placement, ProcAddr, Target};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Mutex;

#[derive(Debug, Default)]
struct Known {
    /// Where all of it is, if that is known.
    placement: Option<Placement>,
    /// The first ranks, this many, are where the placement says; 0 without a placement.
    ranks: usize,
    /// Ranks that are known one by one. Where one is says nothing about the others.
    single: BTreeMap<u32, HostNo>,
    ended: HashSet<u32>,
}

impl Known {
    /// Whether a rank is where the placement says. If so, it counts among `ranks` from now on.
    fn covers(&mut self, rank: u32, host: HostNo) -> bool {
        let covers = self.placement.as_ref().is_some_and(|placement| placement.host_of(rank) == host);
        if covers {
            self.ranks = self.ranks.max(rank as usize + 1);
        }
        covers
    }

    fn is_over(&self) -> bool {
        let has_ended = |rank: u32| self.ended.contains(&rank);
        // Ranks that are not known here may have ended, too.
        self.ended.len() >= self.ranks.max(self.single.len())
            && self.single.keys().all(|rank| has_ended(*rank))
            && (0..self.ranks).all(|rank| u32::try_from(rank).is_ok_and(has_ended))
    }
}

/// See the module. A mesh is forgotten with the last of its ranks that is known.
#[derive(Debug)]
pub(crate) struct RemoteMeshes {
    here: HostNo,
    meshes: Mutex<HashMap<MeshId, Known>>,
}

impl RemoteMeshes {
    /// Those of a process on the host `here`.
    pub(crate) fn new(here: HostNo) -> Self {
        Self { here, meshes: Mutex::default() }
    }

    /// Something is sent to these.
    pub(crate) fn note_target(&self, target: &Target) {
        match target {
            Target::One(addr) => self.note_one(*addr),
            Target::Many(mesh, region, placement) => self.note(*mesh, placement, region.as_slice().bounds().end),
            Target::Joined(joined) => joined.pieces().iter().for_each(|piece| self.note_target(&piece.target)),
        }
    }

    /// Something is sent to the first `ranks` of a mesh with this placement, or to some of them.
    pub(crate) fn note(&self, mesh: MeshId, placement: &Placement, ranks: usize) {
        if mesh == 0 || placement.only() == Some(self.here) {
            return;
        }
        let mut meshes = lock(&self.meshes);
        let known = meshes.entry(mesh).or_default();
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
    pub(crate) fn note_one(&self, addr: ProcAddr) {
        if addr.mesh == 0 || addr.host == self.here {
            return;
        }
        let mut meshes = lock(&self.meshes);
        let known = meshes.entry(addr.mesh).or_default();
        if !known.covers(addr.rank, addr.host) {
            known.single.insert(addr.rank, addr.host);
        }
    }

    /// A rank has ended, as its one notice says.
    pub(crate) fn ended(&self, addr: ProcAddr) {
        let mut meshes = lock(&self.meshes);
        let Some(known) = meshes.get_mut(&addr.mesh) else { return };
        known.ended.insert(addr.rank);
        if known.is_over() {
            meshes.remove(&addr.mesh);
        }
    }

    /// Nothing more is sent to a mesh: it is being stopped.
    pub(crate) fn forget(&self, mesh: MeshId) {
        lock(&self.meshes).remove(&mesh);
    }

    /// The ranks on a host.
    pub(crate) fn on(&self, host: HostNo) -> Vec<ProcAddr> {
        let mut on = Vec::new();
        for (&mesh, known) in lock(&self.meshes).iter() {
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
        lock(&self.meshes).len()
    }
}
