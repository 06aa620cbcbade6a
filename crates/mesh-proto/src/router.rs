//! Where a frame goes next.
//!
//! One host: a star. The agent (here: the controller) knows a link for every proc; a proc knows only the way up.
//! Because everything passes the agent in the order it was sent, one sender's messages to one receiver keep their
//! order, casts and single ones alike (ORD-1), and a message can never overtake the spawn that it depends on.

use crate::{Ended, MeshId, ProcAddr, Target};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// A live connection to a neighbour in the tree.
pub type LinkId = u32;

/// So many ended meshes are kept in mind, so that a late message hears how its receiver ended; of older ones it hears
/// only that nobody knows them.
const REMEMBERED: usize = 1024;

#[derive(Clone, Debug)]
enum Door {
    Link(LinkId),
    Closed(Arc<Ended>),
}

/// Where one receiver is.
#[derive(Clone, Debug)]
pub enum Route {
    /// In this process.
    Here,
    /// Behind this link.
    Via(LinkId),
    /// It has ended; nothing reaches it any more.
    Gone(Arc<Ended>),
    /// Nobody here has heard of it.
    Unknown,
}

/// The routing table of one process.
#[derive(Debug)]
pub struct Router {
    me: ProcAddr,
    up: Option<LinkId>,
    meshes: HashMap<MeshId, Vec<Door>>,
    /// Meshes all of whose procs have ended, the oldest first.
    ended: VecDeque<MeshId>,
}

impl Router {
    /// A host agent's table: it knows every proc of its host.
    #[must_use]
    pub fn agent(me: ProcAddr) -> Self {
        Self { me, up: None, meshes: HashMap::new(), ended: VecDeque::new() }
    }

    /// A proc's table: everything that is not here goes up.
    #[must_use]
    pub fn leaf(me: ProcAddr, up: LinkId) -> Self {
        Self { me, up: Some(up), meshes: HashMap::new(), ended: VecDeque::new() }
    }

    /// The address of this process.
    #[must_use]
    pub fn me(&self) -> ProcAddr {
        self.me
    }

    /// Adds a mesh whose rank `i` is behind `links[i]`.
    pub fn add_mesh(&mut self, mesh: MeshId, links: impl IntoIterator<Item = LinkId>) {
        self.meshes.insert(mesh, links.into_iter().map(Door::Link).collect());
    }

    /// Marks a proc as ended. Returns the link it was behind, the first time.
    pub fn close(&mut self, addr: ProcAddr, ended: &Arc<Ended>) -> Option<LinkId> {
        let doors = self.meshes.get_mut(&addr.mesh)?;
        let door = doors.get_mut(addr.rank as usize)?;
        match door {
            Door::Link(link) => {
                let link = *link;
                *door = Door::Closed(Arc::clone(ended));
                if doors.iter().all(|door| matches!(door, Door::Closed(_))) {
                    self.ended.push_back(addr.mesh);
                    if self.ended.len() > REMEMBERED {
                        let oldest = self.ended.pop_front();
                        oldest.map(|mesh| self.meshes.remove(&mesh));
                    }
                }
                Some(link)
            }
            Door::Closed(_) => None,
        }
    }

    /// Where `addr` is.
    #[must_use]
    pub fn route(&self, addr: ProcAddr) -> Route {
        if addr == self.me {
            return Route::Here;
        }
        if let Some(doors) = self.meshes.get(&addr.mesh) {
            return match doors.get(addr.rank as usize) {
                Some(Door::Link(link)) => Route::Via(*link),
                Some(Door::Closed(ended)) => Route::Gone(Arc::clone(ended)),
                None => Route::Unknown,
            };
        }
        self.up.map_or(Route::Unknown, Route::Via)
    }

    /// Whether a cast can be handed on whole, because all of it lies the same way.
    #[must_use]
    pub fn relay_whole(&self, target: &Target) -> Option<LinkId> {
        match target {
            Target::Many(mesh, _) if *mesh != self.me.mesh || self.up.is_some() => {
                if self.meshes.contains_key(mesh) {
                    None
                } else {
                    self.up
                }
            }
            _ => None,
        }
    }

    /// Size of a mesh whose procs are children of this process.
    #[must_use]
    pub fn mesh_len(&self, mesh: MeshId) -> Option<usize> {
        self.meshes.get(&mesh).map(Vec::len)
    }
}
