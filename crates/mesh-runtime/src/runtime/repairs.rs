//! Meshes that were repaired or given up: connects [`super::moving`], [`super::ended`] and [`crate::remote_meshes`] to the switch, the calls
//! and the gateway.

use super::Runtime;
use crate::call::Call;
use crate::error::RuntimeError;
use crate::link::Link;
use bytes::Bytes;
use mesh_proto::control::{News, Told};
use mesh_proto::messages::Answer;
use mesh_proto::{Frame, Joined, MeshId, Moved, ProcAddr, Route, Seat, Target};
use std::sync::Arc;

impl Runtime {
    /// How many times there was news of repaired meshes. While this does not change, all ranks are where they were.
    #[inline]
    pub fn news(&self) -> u64 {
        self.moving.news()
    }

    /// Where the receivers of a message are now.
    pub fn resolve(&self, target: &Arc<Target>) -> Arc<Target> {
        let Some(moved) = self.moving.resolve(target) else { return Arc::clone(target) };
        self.note_target(&moved);
        Arc::new(moved)
    }

    /// Something is sent to these: if their host dies, this process is told of their end.
    pub fn note_target(&self, target: &Target) {
        self.remote_meshes.note_target(target);
    }

    /// The process that has a rank now.
    pub fn locate(&self, addr: ProcAddr) -> ProcAddr {
        self.moving.locate(addr)
    }

    /// The rank that a process has, or had.
    pub fn seat(&self, addr: ProcAddr) -> Seat {
        self.moving.seat(addr)
    }

    /// The current incarnation of a rank.
    pub fn incarnation(&self, mesh: MeshId, rank: u32) -> u32 {
        self.moving.incarnation(mesh, rank)
    }

    /// What is known of a repaired mesh.
    pub fn moved(&self, mesh: MeshId) -> Option<Moved> {
        self.moving.moved(mesh)
    }

    /// Why the policy of a mesh gave it up, as its owner has told everybody.
    pub fn given_up(&self, mesh: MeshId) -> Option<Bytes> {
        self.moving.given_up(mesh)
    }

    /// Adopts news that came with a reference.
    pub fn learn(&self, moved: &Moved) {
        self.moving.learn(moved);
    }

    /// Tells processes that are about to begin what all others were told, then calls `open`.
    pub(crate) fn begin_with<T>(&self, fresh: &[Arc<Link>], open: impl FnOnce() -> T) -> T {
        self.moving.begin_with(fresh, open)
    }

    /// Tells everybody about a mesh that this process owns. The call completes when every host knows, or, in a worker,
    /// when the controller has told them. Every process of a host then knows it before anything that is sent to it later.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn publish(&self, told: Told) -> Result<Arc<Call>, RuntimeError> {
        self.usable()?;
        let mut news = News { told, call: 0 };
        self.moving.spread(&news, &self.switch);
        if self.me != ProcAddr::CONTROLLER {
            let call = self.open(Target::One(ProcAddr::CONTROLLER), false)?;
            news.call = call.id;
            self.dispatch(news.frame(self.me, ProcAddr::CONTROLLER, None), None);
            return Ok(call);
        }
        let agents = self.gateway.other_agents();
        let nobody = || Target::Joined(Arc::new(Joined::new(Vec::new(), 0)));
        let call = self.open(agents.clone().unwrap_or_else(nobody), false)?;
        news.call = call.id;
        if let Some(agents) = agents {
            let cast = matches!(agents, Target::Many(..)).then_some(&agents);
            let to = agents.place(0).filter(|_| cast.is_none()).unwrap_or(ProcAddr::CONTROLLER);
            self.dispatch(news.frame(self.me, to, cast), None);
        }
        Ok(call)
    }

    /// Handles news of a mesh.
    pub(super) fn on_news(&self, frame: &Frame) {
        let header = frame.header;
        if !self.moving.believes(header.src) {
            return;
        }
        let Some(news) = News::read(frame) else { return };
        self.moving.spread(&news, &self.switch);
        if self.me == ProcAddr::CONTROLLER {
            let told = News { call: 0, ..news };
            self.cast_to_agents(|agents| told.frame(self.me, ProcAddr::CONTROLLER, Some(agents)));
        }
        if self.me.is_agent() {
            self.reply(&header, Answer::Value, b"", &[]);
        }
    }

    /// Whether a process is known here to have ended: an agent knows of all on its host, an owner of all that it owns.
    pub fn is_gone(&self, addr: ProcAddr) -> bool {
        matches!(self.switch.route(addr), Route::Gone(_)) || self.ended.contains(addr)
    }
}
