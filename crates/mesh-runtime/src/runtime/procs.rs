//! The procs that this process makes, stops, or has as their agent: connects the host agent (`agent/`) to the switch,
//! the calls, the logs, the gateway and the inspector.

use super::Runtime;
use super::spawned::stop_order;
use crate::agent::{SpawnSpec, Surroundings};
use crate::call::Call;
use crate::call::Outcome;
use crate::calls;
use crate::error::RuntimeError;
use crate::inspect::Note;
use crate::link::Link;
use mesh_proto::control::StopProcs;
use mesh_proto::{EndReason, Ended, Event, Frame, Header, MeshId, Piece, Placement, ProcAddr, Route, Target};
use mesh_topology::{Region, Slice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Surroundings for Runtime {
    fn route(&self, addr: ProcAddr) -> Route {
        self.switch.route(addr)
    }

    fn open_routes(&self, mesh: MeshId, base: u32, links: &[Arc<Link>]) -> (Vec<Header>, Vec<Frame>) {
        self.begin_with(links, || self.early.open(&self.switch, &self.reactor, (mesh, base), links))
    }

    fn refuse(&self, frame: &Frame) {
        self.refuse_unknown(frame);
    }

    fn open_output(&self, addr: ProcAddr) -> Result<(OwnedFd, OwnedFd), RuntimeError> {
        self.logs()?.open(addr)
    }

    fn forget_output(&self, addr: ProcAddr) {
        self.last_words(addr);
    }

    fn note_spawn(&self, mesh: MeshId, title: &str, owner: ProcAddr, links: &[Arc<Link>]) {
        self.note_spawn(mesh, title, owner, links);
    }

    fn note_up(&self, addr: ProcAddr, title: &str) {
        self.note(Note::new("proc_up", addr).text("title", title), false);
    }
}

impl Runtime {
    // At their agent.

    /// Something has happened to a proc of this host.
    pub(crate) fn on_proc(&self, addr: ProcAddr, event: Event) {
        if let Some(mut ended) = self.agent.on_proc(addr, event) {
            ended.stderr_tail = self.last_words(addr);
            self.gateway.note_leaving(&mut ended);
            self.on_ended(addr, &Arc::new(ended));
        }
    }

    /// A proc of this host has ended; this is its one notice (LIF-1).
    fn on_ended(&self, addr: ProcAddr, ended: &Arc<Ended>) {
        if let Some(link) = self.switch.close_route(addr, ended) {
            link.close(&self.reactor);
        }
        self.forget_debts(addr, ended);
        let death = self.agent.bury(addr);
        self.note_end(addr, ended, &death.title);
        self.agent.carry_out(self, addr, ended, death.aftermath);
        self.note_death(addr, ended);
        let lost = self.lose_proc(addr, ended);
        self.notice_down(addr, ended, lost);
    }

    /// A process has ended: if it was not meant to and is of this process's own meshes, its rank is dead.
    pub(super) fn note_death(&self, addr: ProcAddr, ended: &Ended) {
        if !ended.orderly {
            self.dead_ranks.died(addr);
        }
    }

    /// Handles what the agent has learnt of its procs, in this order.
    pub(super) fn on_procs(&self, events: Vec<(ProcAddr, Event)>) {
        for (addr, event) in events {
            // A reaped proc may have sent last messages: read them before its end is reported.
            if matches!(event, Event::Exited(_))
                && let Some(link) = self.switch.link_of(addr)
            {
                self.read_link(&link, false);
            }
            self.on_proc(addr, event);
        }
    }

    /// The I/O thread's turn. Returns when it wants the next one.
    pub(super) fn agent_turn(&self) -> Option<Instant> {
        self.on_procs(self.agent.turn());
        self.agent.next_turn()
    }

    /// Makes procs here.
    pub(super) fn on_spawn_procs(&self, frame: &Frame) {
        if let Err((mesh, ended)) = self.agent.on_spawn_procs(self, frame, self.gateway.leaving()) {
            self.procs_failed(mesh, &ended);
        }
    }

    /// Stops procs of this host; mesh 0 means the whole host.
    pub(super) fn on_stop_procs(&self, frame: &Frame) {
        match StopProcs::read(frame) {
            Some(order) if order.mesh == 0 => self.gateway.on_release(frame.header, order.within),
            Some(order) => self.agent.on_stop_procs(self, &order, frame),
            None => {}
        }
    }

    /// A proc of this host has sent its last message.
    pub(super) fn on_goodbye(&self, frame: &Frame) {
        self.agent.on_goodbye(frame);
        if let Some(link) = self.switch.link_of(frame.header.src) {
            link.hang_up();
        }
    }

    // At their owner.

    /// Makes a mesh of procs. Returns the call that completes as they come up.
    ///
    /// # Errors
    /// If the runtime is closed, or descriptors run out.
    pub fn spawn_procs(
        &self,
        mesh: MeshId,
        whole: &Region,
        placement: &Placement,
        spec: &SpawnSpec,
    ) -> Result<Arc<Call>, RuntimeError> {
        self.usable()?;
        let call = self.open(Target::Many(mesh, whole.clone(), placement.clone()), false)?;
        let per_host = placement.per_host(whole.len());
        self.dead_ranks.add(mesh, whole.len(), &spec.title);
        if self.is_agent_of(placement) {
            if let Err(error) = self.agent.spawn(self, mesh, 0..per_host, spec, (self.me, call.id)) {
                self.calls.cancel(&self.reactor, &call);
                self.dead_ranks.stop(mesh, whole);
                return Err(error.while_spawning());
            }
        } else if let Some(agents) = placement.agents() {
            self.remote_spawns.add(mesh, whole, placement);
            // If their host dies, this process hears of their end, whether or not anything else was sent to them.
            self.remote_meshes.note(mesh, placement, whole.len());
            self.dispatch(spec.order(mesh, per_host, call.id).frame(self.me, &agents), None);
        }
        Ok(call)
    }

    /// Whether everything is on this host, and this process is the host's agent.
    fn is_agent_of(&self, placement: &Placement) -> bool {
        self.me.is_agent() && placement.only() == Some(self.me.host)
    }

    /// Asks procs to end. The call completes when all have.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn stop_procs(&self, target: &Target, within: Duration) -> Result<Arc<Call>, RuntimeError> {
        self.usable()?;
        let call = self.open(target.clone(), false)?;
        for Piece { first, target, .. } in target.pieces().iter() {
            match target {
                Target::One(addr) => {
                    let rank = addr.rank as usize;
                    let only = Slice::new(rank, &[], &[]).and_then(|slice| Region::new::<&str>(&[], slice));
                    if let Ok(only) = only {
                        self.stop_some(&call, *first, (addr.mesh, &only, &Placement::On(addr.host)), within);
                    }
                }
                Target::Many(mesh, ranks, placement) => {
                    self.stop_some(&call, *first, (*mesh, ranks, placement), within);
                }
                Target::Joined(_) => {}
            }
        }
        Ok(call)
    }

    fn stop_some(
        &self,
        call: &Call,
        first: usize,
        (mesh, ranks, placement): (MeshId, &Region, &Placement),
        within: Duration,
    ) {
        self.dead_ranks.stop(mesh, ranks);
        if self.is_agent_of(placement) {
            for (index, rank) in (first..).zip(ranks) {
                let gone = match self.switch.route(placement.addr(mesh, rank)) {
                    Route::Gone(ended) => Outcome::Lost(ended),
                    Route::Unknown => calls::lost(EndReason::NeverKnown),
                    Route::Here | Route::Via(_) | Route::Remote(_) => continue,
                };
                self.calls.on_outcome(&self.reactor, call.id, index, gone);
            }
            self.agent.end_procs(self, mesh, Some(ranks), within);
        } else if let Some(agents) = placement.agents() {
            if self.remote_spawns.stop(mesh, ranks.len()) {
                self.remote_meshes.forget(mesh);
            }
            self.dispatch(stop_order(call.id, mesh, ranks, placement, within).frame(self.me, &agents), None);
        }
    }

    /// The meshes of procs that this process owns and that have not all ended, with their sizes and places.
    pub fn live(&self) -> Vec<(MeshId, usize, Placement)> {
        let here = |mesh| Some((mesh, self.switch.local(mesh)?.len(), Placement::On(self.me.host)));
        self.agent.own_meshes().into_iter().filter_map(here).chain(self.remote_spawns.meshes()).collect()
    }

    /// The pid of a proc, if it is known here.
    pub fn pid_of(&self, addr: ProcAddr) -> Option<u32> {
        if self.me.is_agent() && addr.host == self.me.host {
            // The agent knows which have ended.
            return self.agent.pid_of(addr);
        }
        self.remote_spawns.pid_of(addr)
    }
}
