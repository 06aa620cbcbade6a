//! Why the policies of meshes gave them up, for whoever calls these meshes later.
//!
//! Only the owner's process asks a policy, but any process may hold a reference. So the owner tells everybody, by the
//! same way as where repaired ranks are. What it says is opaque here.

use crate::MeshId;
use bytes::Bytes;
use std::collections::{HashMap, VecDeque};

/// How many meshes are remembered.
const KEPT: usize = 256;

/// A mesh that was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// The mesh of procs, or the actors.
    pub mesh: MeshId,
    /// Why.
    pub why: Bytes,
}

impl GivenUp {
    /// The longest reason.
    pub const LONGEST: usize = 1 << 15;

    /// Whether this names a mesh, and a reason that is not too long.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.mesh != 0 && self.why.len() <= Self::LONGEST
    }
}

/// What one process knows of meshes that were given up.
#[derive(Debug, Default)]
pub struct Reasons {
    by_mesh: HashMap<MeshId, Bytes>,
    /// The oldest first.
    in_order: VecDeque<MeshId>,
}

impl Reasons {
    /// Takes what an owner says; the latest counts. Unsound ones are dropped.
    pub fn adopt(&mut self, said: &GivenUp) {
        if !said.is_sound() {
            return;
        }
        // Nothing of the frame that it came in is kept.
        if self.by_mesh.insert(said.mesh, Bytes::copy_from_slice(&said.why)).is_none() {
            self.in_order.push_back(said.mesh);
        }
        while self.in_order.len() > KEPT {
            self.in_order.pop_front().map(|oldest| self.by_mesh.remove(&oldest));
        }
    }

    /// Why a mesh was given up, if it was.
    #[must_use]
    pub fn of(&self, mesh: MeshId) -> Option<Bytes> {
        self.by_mesh.get(&mesh).cloned()
    }

    /// Everything known, for a process that starts.
    pub fn all(&self) -> impl Iterator<Item = GivenUp> + '_ {
        self.in_order.iter().filter_map(|mesh| Some(GivenUp { mesh: *mesh, why: self.of(*mesh)? }))
    }
}
