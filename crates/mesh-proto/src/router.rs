//! Where a frame goes next.
//!
//! Within a host the links form a star. The agent has a link to every proc; a proc has one to its agent. The agent hands
//! frames for other hosts to its gateway. Procs that talk much have direct links besides ([`crate::DirectPlan`]), of
//! which this table knows nothing.
//!
//! ORD-1: one sender's messages to one receiver keep their order, casts and single messages alike.
//!
//! What a proc sends to itself never leaves it, whether it is a single message or its own share of a cast.

use crate::{Ended, HostNo, MeshId, ProcAddr};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// A live connection to a neighbour in the tree.
pub type LinkId = u32;

/// How many ended meshes are remembered, so that the sender of a late message is told how its receiver ended. For older
/// meshes it is told only that nobody knows them.
const REMEMBERED: usize = 1024;

#[derive(Clone, Debug)]
enum Door {
    Link(LinkId),
    Closed(Arc<Ended>),
}

/// The ranks of a mesh that are on this host.
#[derive(Debug)]
struct Local {
    /// The first of them.
    base: u32,
    doors: Vec<Door>,
}

impl Local {
    fn door(&self, rank: u32) -> Option<&Door> {
        self.doors.get(rank.checked_sub(self.base)? as usize)
    }
}

/// Where one receiver is.
#[derive(Clone, Debug)]
pub enum Route {
    /// In this process.
    Here,
    /// Behind this link.
    Via(LinkId),
    /// On another host, behind the gateway.
    Remote(HostNo),
    /// It ended; nothing reaches it any longer.
    Gone(Arc<Ended>),
    /// Nobody here knows it.
    Unknown,
}

/// The routing table of one process.
#[derive(Debug)]
pub struct Router {
    me: ProcAddr,
    up: Option<LinkId>,
    meshes: FxHashMap<MeshId, Local>,
    /// Meshes whose procs have all ended, the oldest first.
    ended: VecDeque<MeshId>,
}

impl Router {
    /// A host agent's table: it knows every proc of its host.
    #[must_use]
    pub fn agent(me: ProcAddr) -> Self {
        Self { me, up: None, meshes: FxHashMap::default(), ended: VecDeque::new() }
    }

    /// A proc's table: everything that is not here goes up.
    #[must_use]
    pub fn leaf(me: ProcAddr, up: LinkId) -> Self {
        Self { me, up: Some(up), meshes: FxHashMap::default(), ended: VecDeque::new() }
    }

    /// The address of this process.
    #[must_use]
    pub fn me(&self) -> ProcAddr {
        self.me
    }

    /// Adds a mesh whose rank `base + i` is on this host behind `links[i]`.
    pub fn add_mesh(&mut self, mesh: MeshId, base: u32, links: impl IntoIterator<Item = LinkId>) {
        self.meshes.insert(mesh, Local { base, doors: links.into_iter().map(Door::Link).collect() });
    }

    /// Marks a proc as ended. Returns the link that led to it, the first time.
    pub fn close(&mut self, addr: ProcAddr, ended: &Arc<Ended>) -> Option<LinkId> {
        let Local { base, doors } = self.meshes.get_mut(&addr.mesh)?;
        let door = doors.get_mut(addr.rank.checked_sub(*base)? as usize)?;
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
        if let Some(up) = self.up {
            return Route::Via(up);
        }
        if addr.host != self.me.host {
            return Route::Remote(addr.host);
        }
        match self.meshes.get(&addr.mesh).and_then(|local| local.door(addr.rank)) {
            Some(Door::Link(link)) => Route::Via(*link),
            Some(Door::Closed(ended)) => Route::Gone(Arc::clone(ended)),
            None => Route::Unknown,
        }
    }

    /// The link to the agent, in a process that is not an agent: everything goes there, casts as a whole.
    #[must_use]
    pub fn up(&self) -> Option<LinkId> {
        self.up
    }

    /// The ranks of a mesh on this host, including those of a mesh that ended recently.
    #[must_use]
    pub fn local(&self, mesh: MeshId) -> Option<std::ops::Range<u32>> {
        self.meshes.get(&mesh).map(|local| local.base..local.base + u32::try_from(local.doors.len()).unwrap_or(0))
    }
}
