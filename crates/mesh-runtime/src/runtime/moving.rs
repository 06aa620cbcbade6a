//! What everybody is told of meshes: where the ranks of repaired ones are, for senders, and why the policies of others gave
//! them up.
//!
//! Every send looks here first. As long as no mesh has been repaired that costs one atomic load ([`Moving::news`]).

use super::switch::Switch;
use crate::link::Link;
use crate::locks::{lock, read, write};
use crate::reactor::Reactor;
use bytes::Bytes;
use mesh_proto::control::{News, Told};
use mesh_proto::{MeshId, Moved, Moves, ProcAddr, Reasons, Seat, Target};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// What a process knows of repaired meshes, and of those that were given up.
#[derive(Debug)]
pub(crate) struct Moving {
    me: ProcAddr,
    reactor: Arc<Reactor>,
    moves: RwLock<Moves>,
    given_up: Mutex<Reasons>,
    /// Held while news is sent to this host's processes, which wakes each of them and takes a while. Separate from
    /// `moves`, which every send reads.
    telling: RwLock<()>,
    /// Counts news of repairs; 0 until the first.
    news: AtomicU64,
}

impl Moving {
    pub(crate) fn new(me: ProcAddr, reactor: &Arc<Reactor>) -> Self {
        Self {
            me,
            reactor: Arc::clone(reactor),
            moves: RwLock::default(),
            given_up: Mutex::default(),
            telling: RwLock::default(),
            news: AtomicU64::new(0),
        }
    }

    /// How many times there was news of repairs. While this does not change, all ranks are where they were.
    #[inline]
    pub(crate) fn news(&self) -> u64 {
        self.news.load(Ordering::Acquire)
    }

    /// Where the receivers of a message are now; none if they are where it says.
    pub(crate) fn resolve(&self, target: &Target) -> Option<Target> {
        if self.news() == 0 {
            return None;
        }
        read(&self.moves).resolve(target)
    }

    /// The process that has a rank now.
    pub(crate) fn locate(&self, addr: ProcAddr) -> ProcAddr {
        if self.news() == 0 {
            return addr;
        }
        read(&self.moves).addr(addr.mesh, addr.rank).unwrap_or(addr)
    }

    /// The rank that a process has, or had.
    pub(crate) fn seat(&self, addr: ProcAddr) -> Seat {
        if self.news() == 0 {
            return Seat { mesh: addr.mesh, rank: addr.rank, incarnation: 0 };
        }
        read(&self.moves).seat(addr)
    }

    /// The current incarnation of a rank.
    pub(crate) fn incarnation(&self, mesh: MeshId, rank: u32) -> u32 {
        read(&self.moves).incarnation(mesh, rank)
    }

    /// What is known of a repaired mesh.
    pub(crate) fn moved(&self, mesh: MeshId) -> Option<Moved> {
        if self.news() == 0 {
            return None;
        }
        read(&self.moves).of(mesh)
    }

    /// Why a mesh was given up, if it was.
    pub(crate) fn given_up(&self, mesh: MeshId) -> Option<Bytes> {
        lock(&self.given_up).of(mesh)
    }

    /// Whether another process now has the rank of this one (MOV-2).
    #[inline]
    pub(crate) fn is_outdated(&self, src: ProcAddr) -> bool {
        self.news() != 0 && read(&self.moves).has_left(src)
    }

    /// Adopts news that came with a reference.
    pub(crate) fn learn(&self, moved: &Moved) {
        let _telling = write(&self.telling);
        self.adopt(moved);
    }

    /// Adopts news meant for everybody. An agent passes it on to the processes of its host.
    pub(crate) fn spread(&self, news: &News, switch: &Switch) {
        // No process begins while this is held (`begin_with`), so each hears of the news exactly once.
        let _telling = write(&self.telling);
        match &news.told {
            Told::Moved(moved) => self.adopt(moved),
            Told::GivenUp(said) => lock(&self.given_up).adopt(said),
        }
        if self.me.is_agent() {
            for link in switch.links() {
                link.send(&self.reactor, &News { call: 0, ..news.clone() }.frame(self.me, link.peer, None));
            }
        }
    }

    fn adopt(&self, moved: &Moved) {
        if write(&self.moves).adopt(moved) {
            self.news.fetch_add(1, Ordering::Release);
        }
    }

    /// Tells processes that are about to begin what all others were told, then calls `open`, which adds them to the
    /// processes of this host.
    pub(crate) fn begin_with<T>(&self, fresh: &[Arc<Link>], open: impl FnOnce() -> T) -> T {
        let _telling = read(&self.telling);
        let mut all: Vec<Told> = read(&self.moves).all().map(Told::Moved).collect();
        all.extend(lock(&self.given_up).all().map(Told::GivenUp));
        for told in all {
            let news = News { told, call: 0 };
            for link in fresh {
                link.send(&self.reactor, &news.frame(self.me, link.peer, None));
            }
        }
        open()
    }

    /// Whether this process believes news from another one: a process believes its agent, an agent the controller, and
    /// the controller everyone, since only owners send it news.
    pub(crate) fn believes(&self, src: ProcAddr) -> bool {
        self.me == ProcAddr::CONTROLLER || !self.me.is_agent() || src == ProcAddr::CONTROLLER
    }
}
