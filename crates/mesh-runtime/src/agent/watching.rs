//! Who is notified of whose end. The agent learns this from passing messages and from requests.

use super::{HostAgent, Surroundings};
use crate::dispatch::Dispatch;
use crate::locks::lock;
use mesh_proto::control::{Down, Watch};
use mesh_proto::messages::{Meaning, SpawnPart};
use mesh_proto::{EndReason, Ended, Family, Header, HostNo, Kind, ProcAddr, Route};
use std::sync::Arc;

/// Notes what a message says of who owns what, and of who is to be told of whose end. Returns owners on other hosts that are
/// to be watched.
pub(super) fn relate(family: &mut Family, header: &Header) -> Vec<ProcAddr> {
    let (src, dst) = (header.src, header.dst);
    match Meaning::of(header) {
        Ok(Meaning::Spawn(spawn)) => {
            family.asked(src, dst.mesh);
            // Arguments that follow an announcement may come after the actor's stop.
            if spawn.part != SpawnPart::Arguments {
                family.actor_made(dst, spawn.actor, src);
            }
            return family.to_watch();
        }
        Ok(Meaning::StopActor(stop)) => {
            family.asked(src, dst.mesh);
            family.actor_stopped(dst, stop.actor);
        }
        Ok(
            Meaning::Call(_)
            | Meaning::Post(_)
            | Meaning::Extend(_)
            | Meaning::Control(Kind::Inspect | Kind::Watch | Kind::Fetch),
        ) => {
            family.asked(src, dst.mesh);
        }
        // Its sender lent something that is to come back.
        Ok(said) if said.is_for_port() || header.is_owed() || header.is_charged() => {
            family.asked(src, dst.mesh);
        }
        Ok(_) | Err(_) => {}
    }
    Vec::new()
}

impl HostAgent {
    /// Notes what a message for a process of this host says.
    pub(crate) fn overhear(&self, around: &impl Dispatch, header: &Header) {
        let unwatched = relate(&mut lock(&self.state).procs.family, header);
        self.watch(around, unwatched);
    }

    /// Asks the agents of owners on other hosts to report their ends.
    pub(super) fn watch(&self, around: &impl Dispatch, owners: Vec<ProcAddr>) {
        for owner in owners {
            around.dispatch(Watch::of(owner).frame(self.me, ProcAddr::agent(owner.host)));
        }
    }

    /// Somebody wants to be told when a proc of this host ends. What is sent to the proc itself, its agent has seen.
    pub(crate) fn on_watch(&self, around: &impl Surroundings, header: &Header) {
        if !self.me.is_agent() {
            return;
        }
        let Watch { mesh, rank } = Watch::read(header);
        if mesh == 0 {
            // The agent itself: a proc of its host asks about all procs here.
            lock(&self.state).procs.family.listens(header.src);
            return;
        }
        let whom = ProcAddr { mesh, rank, host: self.me.host };
        // Before the route is looked up, so that a death in between is reported either way.
        lock(&self.state).procs.family.asked(header.src, mesh);
        let gone = match around.route(whom) {
            Route::Gone(ended) => ended,
            Route::Unknown => Arc::new(Ended::unmade(EndReason::LongAgo)),
            Route::Here | Route::Via(_) | Route::Remote(_) => return,
        };
        around.dispatch(Down::notice(whom, &gone).frame(self.me, header.src));
    }

    /// A process of another host ended. It may own something here.
    pub(crate) fn owner_died(&self, around: &impl Dispatch, owner: ProcAddr) {
        // The agent knows the ends on its own host.
        if owner.host != self.me.host {
            let aftermath = lock(&self.state).procs.family.died(owner);
            self.end_orphans(around, aftermath.end);
        }
    }

    /// A host died, and with it its processes that own something here.
    pub(crate) fn host_died(&self, around: &impl Dispatch, host: HostNo) {
        let aftermath = lock(&self.state).procs.family.host_died(host);
        self.end_orphans(around, aftermath.end);
    }
}
