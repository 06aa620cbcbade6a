//! The I/O thread's turn, connections that end, and what this process does about deaths. Who lives, the machine says: GTW-2
//! to GTW-4 are in `mesh_proto::hosts::gateway`.

use super::connection::HostConnection;
use super::{Event, Gateway};
use crate::runtime::{Runtime, lock};
use crate::tls::Identity;
use mesh_proto::control::{Down, HostDown, Introduction, Revoked, Traits};
use mesh_proto::hosts::{Farewell, Lost, Parting};
use mesh_proto::{Frame, HostEnd, HostNo, ProcAddr, Target};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How often certificates of connected hosts are looked at again.
const RECHECK: Duration = Duration::from_secs(1);

impl Gateway {
    /// Looks again at the credentials, if it is time. Returns those to check connections by, and a new list of revocations
    /// that all hosts are to hear of.
    fn recheck(&self, controller: bool, now: Duration) -> (Option<&Arc<Identity>>, Option<Vec<u8>>) {
        let mut recheck = lock(&self.recheck);
        let Some(identity) = self.identity.get().filter(|_| now >= recheck.at) else { return (None, None) };
        recheck.at = now + RECHECK;
        let mut complaint = String::new();
        let mut revoked = None;
        match identity.reload_if_changed() {
            Ok(true) if controller => revoked = identity.revocations(),
            Ok(_) => {}
            Err(error) => complaint = format!("the credentials cannot be read again: {error}"),
        }
        // What stays wrong is told once.
        if !complaint.is_empty() && complaint != recheck.complaint {
            self.warn(complaint.clone());
        }
        recheck.complaint = complaint;
        (Some(identity), revoked)
    }
}

impl Runtime {
    /// The I/O thread's turn: what is due. Returns when it wants to be called next.
    pub(crate) fn gateway_turn(&self) -> Option<Instant> {
        if !self.gateway.is_active() {
            return None;
        }
        let now = self.started.elapsed();
        if lock(&self.gateway.state).machine.is_over() {
            return None;
        }
        let (identity, revoked) = self.gateway.recheck(self.me == ProcAddr::CONTROLLER, now);
        for connection in identity.map(|_| self.connections()).unwrap_or_default() {
            if let Some(identity) = identity
                && let Err(reason) = identity.check_peer(&connection.facts, std::time::SystemTime::now())
            {
                self.connection_lost(&connection, &format!("its certificate holds no more: {reason}"));
            }
        }
        if let Some(list) = revoked {
            let revoked = Revoked { list: list.into() };
            self.cast_to_agents(|agents| revoked.frame(self.me, ProcAddr::CONTROLLER, Some(agents)));
        }
        let (actions, next) = {
            let machine = &mut lock(&self.gateway.state).machine;
            let actions = machine.on(Event::Tick, now, &self.reactor);
            (actions, machine.next_tick(now))
        };
        self.carry_out(actions);
        let is_connected = !self.gateway.connections.read().unwrap_or_else(PoisonError::into_inner).is_empty();
        let next = if is_connected { next.min(lock(&self.gateway.recheck).at) } else { next };
        self.started.checked_add(next)
    }

    /// A connection has ended, or is of no use any more.
    pub(super) fn connection_lost(&self, connection: &Arc<HostConnection>, why: &str) {
        self.close_connection(connection);
        let (host, connection) = (connection.peer, Arc::clone(connection));
        self.on_gateway(Event::Closed { host, connection, why: why.to_owned() });
    }

    pub(super) fn close_connection(&self, connection: &HostConnection) {
        connection.close(&self.reactor);
        self.gateway.connections.write().unwrap_or_else(PoisonError::into_inner).remove(&connection.token);
    }

    /// From the controller to every other agent.
    pub(crate) fn cast_to_agents(&self, frame: impl FnOnce(&Target) -> Frame) {
        if let Some(agents) = self.other_agents() {
            self.dispatch(frame(&agents), None);
        }
    }

    /// A host is dead, by the controller's word.
    pub(super) fn host_died(&self, host: HostNo, end: &HostEnd, lost: Vec<Lost>) {
        lock(&self.gateway.state).assemblies.retain(|(origin, _), _| *origin != host);
        self.end_visits_through(host);
        self.note_host_died(host, end);
        self.tell_room();
        let aftermath = lock(&self.agent).family.host_died(host);
        self.end_orphans(aftermath.end);
        self.bounce_lost(host, lost);
        let down = HostDown { host, end: end.clone() };
        for link in self.links() {
            link.send(&self.reactor, &down.frame(self.me, link.peer, None));
        }
        self.ranks_lost_with(host, end);
    }

    /// What this process has to do with a host that is dead: its calls there are lost, its meshes have lost ranks.
    pub(super) fn ranks_lost_with(&self, host: HostNo, verdict: &HostEnd) {
        let ended = verdict.ended();
        self.landings.end(self, |one| one.host == host);
        let known = lock(&self.remote_meshes).on(host);
        for addr in known {
            self.deliver(Down::notice(addr, &ended).frame(ProcAddr::agent(host), self.me));
        }
        let ended = Arc::new(ended);
        self.calls.on_host_down(&self.reactor, host, &ended);
        self.forget_lines_of(host);
        self.forget_fallen();
        self.ports.on_host_down(host);
        self.refs_end(|one| one.host == host, &ended);
        self.meters.end(|one| one.host == host);
        self.answers_end(|one| one.host == host);
    }

    /// This host's part in the job ends, for a reason that the machine does not know.
    pub(super) fn end_job(&self, parting: Parting, why: &str) {
        self.on_gateway(Event::Ended { parting, why: why.to_owned() });
    }

    /// This host's part in the job is over: its process, or what holds this runtime, sees to the rest.
    pub(super) fn job_ended(&self, parting: Parting, visitors: Parting, why: &str) {
        self.end_visits(visitors, why);
        if parting == Parting::CutOff {
            self.gateway.tell(format!("host {} stops its work: {why}", self.me.host));
        }
        let farewell = Farewell { parting, text: why.to_owned() }.packet(self.me.host);
        for connection in self.connections() {
            connection.send(&self.reactor, &farewell, self.started.elapsed());
            connection.flush(&self.reactor);
        }
        if let Some(ended) = self.gateway.ended.get() {
            (ended.0)(why.to_owned());
        }
    }

    /// The runtime closes: the others are told.
    pub(crate) fn close_gateway(&self, limit: Duration) {
        if !self.gateway.is_active() {
            return;
        }
        let until = Instant::now() + limit;
        // They refer to this runtime, and would keep it.
        self.close_listeners();
        if self.me == ProcAddr::CONTROLLER {
            let order = lock(&self.gateway.state).machine.close();
            if let Some(order) = order {
                self.dispatch(order, None);
            }
            // What was said before the end is to arrive; a host that does not answer holds up nobody for long.
            let mut state = lock(&self.gateway.state);
            while !state.machine.is_idle() && Instant::now() < until {
                self.gateway.room_wanted.store(true, Ordering::SeqCst);
                let wait = self.gateway.room.wait_timeout(state, Duration::from_millis(5));
                state = wait.unwrap_or_else(PoisonError::into_inner).0;
            }
            state.machine.stop();
        }
        let parting = Parting::JobOver;
        let farewell = Farewell { parting, text: parting.to_string() }.packet(self.me.host);
        let connections: Vec<Arc<HostConnection>> = {
            let mut all = self.gateway.connections.write().unwrap_or_else(PoisonError::into_inner);
            all.drain().map(|(_, connection)| connection).collect()
        };
        for connection in connections {
            connection.send(&self.reactor, &farewell, self.started.elapsed());
            connection
                .drain(&self.reactor, until.saturating_duration_since(Instant::now()).min(Duration::from_millis(200)));
            connection.close(&self.reactor);
        }
        self.gateway.active.store(false, Ordering::SeqCst);
    }

    pub(super) fn close_listeners(&self) {
        let listeners = std::mem::take(&mut *lock(&self.gateway.listeners));
        listeners.iter().for_each(|(.., listener)| listener.close());
    }

    /// What an agent says of itself when it is attached.
    pub(super) fn introduction(name: &str, traits: &Traits) -> Introduction {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
        Introduction { name: name.to_owned(), pid: u64::from(std::process::id()), cpus, traits: traits.clone() }
    }
}
