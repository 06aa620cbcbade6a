//! How workers are forked: fork servers that start, report and end.

use super::HostAgent;
use super::fork_servers::Order;
use crate::fork_server::{ForkServer, ForkServerSpec, Report};
use crate::locks::lock;
use mesh_proto::{EndReason, Event, ProcAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a fork server whose socket is closed may take to exit before it is killed.
const REAPED_WITHIN: Duration = Duration::from_millis(200);

impl HostAgent {
    /// Has a fork server fork workers, which are already in the table of procs.
    pub(super) fn order(&self, token: u64, orders: Vec<Order>) {
        let ready = lock(&self.state).fork_servers.order(token, orders);
        if let Some((fork_server, orders)) = ready {
            self.place(&fork_server, orders);
        }
        // To start the fork server, or for the new deadline.
        self.reactor.ring_io();
    }

    fn place(&self, fork_server: &ForkServer, orders: Vec<Order>) {
        for order in orders {
            fork_server.spawn(&self.reactor, order.exec, order.addr, order.seat, order.worker);
        }
    }

    /// Reads from or writes to a fork server. Returns what happened to procs, in order.
    #[must_use]
    pub(crate) fn on_fork_server(&self, token: u64, readable: bool, writable: bool) -> Vec<(ProcAddr, Event)> {
        let Some(fork_server) = lock(&self.state).fork_servers.running(token) else { return Vec::new() };
        if writable {
            fork_server.flush(&self.reactor);
        }
        let (mut events, mut over) = (Vec::new(), None);
        if readable {
            fork_server.read(|report| match report {
                Report::Forked(addr, pid) => events.push((addr, Event::Forked(pid))),
                Report::Exited(addr, exit) => events.push((addr, Event::Exited(exit))),
                Report::Failed(addr, why) => events.push((addr, Event::SpawnFailed(EndReason::NotMade(why)))),
                Report::Refused(why) => over = Some(EndReason::NotMade(why)),
                Report::Importing(module) => {
                    lock(&self.state).fork_servers.importing(token, module, self.now());
                }
                Report::Imported(modules) => {
                    let mut state = lock(&self.state);
                    state.fork_servers.imported(token, modules);
                    let its = state.procs.of_fork_server(token).into_iter();
                    events.extend(its.map(|addr| (addr, Event::Imported)));
                }
                Report::Closed => {
                    over.get_or_insert_with(|| EndReason::ForkServerEnded(fork_server.pid()));
                }
            });
        }
        if let Some(why) = over {
            fork_server.close(&self.reactor);
            events.extend(self.fork_server_ended(token, &why));
            fork_server.reap(REAPED_WITHIN);
        }
        events
    }

    /// A fork server ended or failed to start. Its workers are lost with it.
    fn fork_server_ended(&self, token: u64, why: &EndReason) -> Vec<(ProcAddr, Event)> {
        let mut state = lock(&self.state);
        // Under one lock, so that no later spawn relies on it.
        state.fork_servers.forget(token);
        let orphans = state.procs.of_fork_server(token).into_iter();
        orphans.map(|addr| (addr, Event::SpawnFailed(why.clone()))).collect()
    }

    /// Takes a turn on the I/O thread: starts fork servers that are due. Returns what happened to procs.
    #[must_use]
    pub(crate) fn turn(&self) -> Vec<(ProcAddr, Event)> {
        let due = lock(&self.state).fork_servers.due();
        let mut events: Vec<_> = due.iter().flat_map(|(token, spec)| self.start(*token, spec)).collect();
        let mut state = lock(&self.state);
        let now = self.now();
        let late = state.procs.late(now);
        events.extend(late.into_iter().map(|(addr, fork_server, allowed)| {
            (addr, fork_server.map_or(Event::Tick, |token| state.fork_servers.tick(token, now, allowed)))
        }));
        events
    }

    /// When the next turn is due.
    pub(crate) fn next_turn(&self) -> Option<Instant> {
        lock(&self.state).procs.next_deadline().map(|at| self.started + at)
    }

    fn start(&self, token: u64, spec: &ForkServerSpec) -> Vec<(ProcAddr, Event)> {
        let standby = self.home.standby_for(spec);
        let started = ForkServer::start(spec, self.board.fd(), token, self.me.host, standby)
            .and_then(|fork_server| fork_server.register(&self.reactor).map(|()| Arc::new(fork_server)));
        let fork_server = match started {
            Ok(fork_server) => fork_server,
            Err(error) => return self.fork_server_ended(token, &EndReason::NotMade(error.to_string())),
        };
        let waiting = lock(&self.state).fork_servers.started(token, &fork_server);
        match waiting {
            Some(waiting) => self.place(&fork_server, waiting),
            None => {
                // The runtime was closed meanwhile and has forgotten it.
                fork_server.close(&self.reactor);
                fork_server.reap(REAPED_WITHIN);
            }
        }
        Vec::new()
    }

    /// Ends all fork servers, and with them all remaining workers.
    pub(crate) fn close(&self, limit: Duration) {
        let running = lock(&self.state).fork_servers.take_all();
        for fork_server in &running {
            fork_server.close(&self.reactor);
        }
        for fork_server in running {
            fork_server.reap(limit);
        }
    }
}
