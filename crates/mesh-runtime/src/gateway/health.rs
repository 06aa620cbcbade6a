//! The I/O thread's turn, and lost connections and hosts. The machine decides who is alive: GTW-2 to GTW-4 are in
//! `mesh_proto::hosts::gateway`.

use super::connection::HostConnection;
use super::{Event, Gateway, Process};
use mesh_proto::control::Revoked;
use mesh_proto::hosts::Lost;
use mesh_proto::{HostEnd, HostNo, ProcAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

impl<P: Process> Gateway<P> {
    /// Does what is due, on the I/O thread. Returns when to call it next.
    pub(crate) fn turn(self: &Arc<Self>) -> Option<Instant> {
        if !self.is_active() {
            return None;
        }
        let now = self.now();
        if self.machine().is_over() {
            return None;
        }
        self.recheck(now);
        let (actions, next) = {
            let mut machine = self.machine();
            let actions = machine.on(Event::Tick, now, self.reactor());
            (actions, machine.next_tick(now))
        };
        self.carry_out(actions);
        let next = if self.connections.is_empty() { next } else { next.min(self.credentials.due()) };
        self.started.checked_add(next)
    }

    /// Checks the credentials of both sides again, if it is time.
    fn recheck(self: &Arc<Self>, now: Duration) {
        let Some(looked) = self.credentials.recheck(now) else { return };
        if let Some(complaint) = looked.complaint {
            self.log.warn(complaint);
        }
        for connection in self.connections.all() {
            if let Err(reason) = looked.identity.check_peer(&connection.facts, SystemTime::now()) {
                self.connection_lost(&connection, &format!("its certificate is no longer valid: {reason}"));
            }
        }
        if let Some(list) = looked.revoked.filter(|_| self.is_controller())
            && let Some(agents) = self.other_agents()
        {
            let revoked = Revoked { list: list.into() };
            self.dispatch(revoked.frame(self.me, ProcAddr::CONTROLLER, Some(&agents)));
        }
    }

    /// A connection ended or is no longer usable.
    pub(super) fn connection_lost(self: &Arc<Self>, connection: &Arc<HostConnection>, why: &str) {
        self.connections.close(connection, self.reactor());
        let (host, connection) = (connection.peer, Arc::clone(connection));
        self.on(Event::Closed { host, connection, why: why.to_owned() });
    }

    /// The controller declared a host dead.
    pub(super) fn host_died(&self, host: HostNo, end: &HostEnd, lost: Vec<Lost>) {
        self.assemblies.forget(host);
        self.parts.visits.end_through(host);
        self.room.tell();
        let Some(process) = self.process.upgrade() else { return };
        process.host_died(host, end);
        self.bounce_lost(host, lost);
        process.ranks_lost(host, end);
    }
}
