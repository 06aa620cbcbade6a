//! Where the ranks of repaired meshes are, for whoever sends to them, and the ends that this process has heard of.

use super::{Runtime, lock, read, write};
use crate::calls::Call;
use crate::error::RuntimeError;
use crate::link::Link;
use mesh_proto::control::News;
use mesh_proto::messages::Answer;
use mesh_proto::{Frame, MeshId, Moved, Moves, ProcAddr, Seat, Target};
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// So many ends are kept in mind; of older ones a call tells.
const ENDS_KEPT: usize = 1 << 16;

/// What a process knows of repaired meshes.
#[derive(Debug, Default)]
pub(crate) struct Moving {
    moves: RwLock<Moves>,
    /// Held while news is sent to this host's procs, which wakes each of them and takes a while. Not `moves` itself, which
    /// every send looks at.
    telling: RwLock<()>,
    /// Counts news; 0 as long as no mesh was repaired, which is all that a send looks at then.
    news: AtomicU64,
    ended: Mutex<Ends>,
}

#[derive(Debug, Default)]
struct Ends {
    known: HashSet<ProcAddr>,
    in_order: VecDeque<ProcAddr>,
}

impl Runtime {
    /// How much news of repaired meshes there was: as long as that is the same, all are where they were.
    #[inline]
    pub fn news(&self) -> u64 {
        self.moving.news.load(Ordering::Acquire)
    }

    /// Where those are that a message is for.
    pub fn resolve(&self, target: &Arc<Target>) -> Arc<Target> {
        if self.news() == 0 {
            return Arc::clone(target);
        }
        let moved = read(&self.moving.moves).resolve(target);
        let Some(moved) = moved else { return Arc::clone(target) };
        self.note_target(&moved);
        Arc::new(moved)
    }

    /// Something is sent to these: if a host dies, so do those of them that are there.
    pub fn note_target(&self, target: &Target) {
        match target {
            Target::One(addr) => self.note_remote_proc(*addr),
            Target::Many(mesh, region, placement) => {
                self.note_remote_mesh(*mesh, placement, region.as_slice().bounds().end);
            }
            Target::Joined(joined) => joined.pieces().iter().for_each(|piece| self.note_target(&piece.target)),
        }
    }

    /// The proc that a rank has now.
    pub fn locate(&self, addr: ProcAddr) -> ProcAddr {
        if self.news() == 0 {
            return addr;
        }
        read(&self.moving.moves).addr(addr.mesh, addr.rank).unwrap_or(addr)
    }

    /// Whose rank a proc has, or had.
    pub fn seat(&self, addr: ProcAddr) -> Seat {
        if self.news() == 0 {
            return Seat { mesh: addr.mesh, rank: addr.rank, incarnation: 0 };
        }
        read(&self.moving.moves).seat(addr)
    }

    /// Which life of its rank there is now.
    pub fn incarnation(&self, mesh: MeshId, rank: u32) -> u32 {
        read(&self.moving.moves).incarnation(mesh, rank)
    }

    /// What is known of a mesh that was repaired.
    pub fn moved(&self, mesh: MeshId) -> Option<Moved> {
        if self.news() == 0 {
            return None;
        }
        read(&self.moving.moves).of(mesh)
    }

    /// Takes news that came with a reference.
    pub fn learn(&self, moved: &Moved) {
        self.take_news(&News { moved: moved.clone(), call: 0 }, false);
    }

    /// Takes news in; an agent passes what came as such on to its procs.
    fn take_news(&self, news: &News, pass_on: bool) {
        // While it is held no proc begins (`begin_with`): each hears of it once.
        let _telling = write(&self.moving.telling);
        if write(&self.moving.moves).adopt(&news.moved) {
            self.moving.news.fetch_add(1, Ordering::Release);
        }
        if pass_on && self.me.is_agent() {
            for link in self.switch.links() {
                link.send(&self.reactor, &News { call: 0, ..news.clone() }.frame(self.me, link.peer, None));
            }
        }
    }

    /// Tells procs that are about to begin what all others have been told, then does `open`, by which they are to be found.
    pub(crate) fn begin_with<T>(&self, fresh: &[Arc<Link>], open: impl FnOnce() -> T) -> T {
        let _telling = read(&self.moving.telling);
        let all: Vec<Moved> = read(&self.moving.moves).all().collect();
        for moved in all {
            let news = News { moved, call: 0 };
            for link in fresh {
                link.send(&self.reactor, &news.frame(self.me, link.peer, None));
            }
        }
        open()
    }

    /// Tells everybody where the ranks of a mesh are that this process has repaired. The call completes when every host
    /// knows, and with it every proc there, before anything that is sent to it later.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn publish(&self, moved: Moved) -> Result<Arc<Call>, RuntimeError> {
        self.usable()?;
        let mut news = News { moved, call: 0 };
        self.take_news(&news, true);
        if self.me != ProcAddr::CONTROLLER {
            let call = self.open(Target::One(ProcAddr::CONTROLLER), false)?;
            news.call = call.id;
            self.dispatch(news.frame(self.me, ProcAddr::CONTROLLER, None), None);
            return Ok(call);
        }
        let agents = self.gateway.other_agents();
        let nobody = || Target::Joined(Arc::new(mesh_proto::Joined::new(Vec::new(), 0)));
        let call = self.open(agents.clone().unwrap_or_else(nobody), false)?;
        news.call = call.id;
        if let Some(agents) = agents {
            let cast = matches!(agents, Target::Many(..)).then_some(&agents);
            let to = agents.place(0).filter(|_| cast.is_none()).unwrap_or(ProcAddr::CONTROLLER);
            self.dispatch(news.frame(self.me, to, cast), None);
        }
        Ok(call)
    }

    /// News of a mesh that somebody has repaired. A proc believes its agent, agents the controller, and that
    /// whoever owns the mesh.
    pub(super) fn on_news(&self, frame: &Frame) {
        let header = frame.header;
        let controller = self.me == ProcAddr::CONTROLLER;
        if self.me.is_agent() && !controller && header.src != ProcAddr::CONTROLLER {
            return;
        }
        let Some(news) = News::read(frame) else { return };
        self.take_news(&news, true);
        if controller {
            let told = News { call: 0, ..news };
            self.cast_to_agents(|agents| told.frame(self.me, ProcAddr::CONTROLLER, Some(agents)));
        }
        if self.me.is_agent() {
            self.reply(&header, Answer::Value, b"", &[]);
        }
    }

    /// Whether it comes from a proc whose rank another one has by now (MOV-2).
    #[inline]
    pub(super) fn is_outdated(&self, src: ProcAddr) -> bool {
        self.news() != 0 && read(&self.moving.moves).has_left(src)
    }

    // Ends.

    /// A proc has ended, as this process was told.
    pub(super) fn note_ended(&self, addr: ProcAddr) {
        let mut ends = lock(&self.moving.ended);
        if ends.known.insert(addr) {
            ends.in_order.push_back(addr);
            if ends.in_order.len() > ENDS_KEPT {
                let oldest = ends.in_order.pop_front();
                oldest.map(|addr| ends.known.remove(&addr));
            }
        }
    }

    /// Whether a proc has ended, as far as this process knows: an agent knows of all on its host, an owner of all that it owns.
    pub fn is_gone(&self, addr: ProcAddr) -> bool {
        let route = self.switch.route(addr);
        matches!(route, mesh_proto::Route::Gone(_)) || lock(&self.moving.ended).known.contains(&addr)
    }
}
