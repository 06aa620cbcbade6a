//! The part of an agent's runtime that talks to other hosts.
//!
//! What is decided is decided by [`mesh_proto::hosts::Gateway`], a state machine. Here are the sockets, TLS and threads: they
//! hand in events ([`Runtime::on_gateway`]) and carry out actions ([`Runtime::carry_out`]).
//!
//! - this file: what it is made of, events in and actions out;
//! - `attaching`: hosts that join a job, before they are connected to;
//! - `connection`: one encrypted connection;
//! - `greeting`: how connections come about;
//! - `host`: an agent, which serves jobs;
//! - `sending`: messages out, to the hosts that they are for, and on behalf of others;
//! - `arriving`: packets in, and what gateways tell each other;
//! - `releasing`: hosts that are let go;
//! - `roll`: which hosts there are, for people;
//! - `health`: the I/O thread's turn, connections that end, and what this process does about deaths;
//! - `visits`: people on other machines who look into the job;
//! - `assembly`: frames out of segments, large parts straight into shared memory.
//!
//! The machine is behind one lock, which is never held while a frame is dispatched or an agent's lock is taken. The order
//! of locks is: agent, gateway, connection. Whoever takes packets from connections holds `delivery` until what they bring is
//! delivered (GTW-1).

mod arriving;
mod assembly;
mod attaching;
mod connection;
mod greeting;
mod health;
mod host;
mod releasing;
mod roll;
mod sending;
mod visits;

pub use host::{Host, HostOptions, HostTold};
pub(crate) use visits::Visits;
pub use visits::{VisitEnd, VisitError, Visited, jobs_at, visit};

use crate::error::RuntimeError;
use crate::reactor::Reactor;
use crate::runtime::{GATEWAY, Runtime, lock};
use crate::tls::{Identity, Listener};
use assembly::Assembly;
pub(crate) use assembly::is_mapped;
use connection::HostConnection;
use mesh_proto::hosts::gateway::{Action, Event, Wire};
pub use mesh_proto::hosts::gateway::{GatewayOptions, HostState, HostView, agents};
use mesh_proto::hosts::{Gateway as Machine, Packet};
use mesh_proto::{HostEnd, HostNo};
use std::collections::HashMap;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, RwLock};
use std::time::Duration;

/// Connections' tokens begin here, above all others.
pub(crate) const CONNECTION_TOKENS: u64 = 1 << 40;
impl Wire for Reactor {
    type Connection = Arc<HostConnection>;

    fn send(&self, connection: &Arc<HostConnection>, packet: &Packet, now: Duration) {
        connection.send(self, packet, now);
    }

    fn is_open(&self, connection: &Arc<HostConnection>) -> bool {
        connection.is_open()
    }

    fn has_room(&self, connection: &Arc<HostConnection>) -> bool {
        connection.has_room()
    }

    fn heard_at(&self, connection: &Arc<HostConnection>) -> Duration {
        connection.heard_at()
    }

    fn sent_at(&self, connection: &Arc<HostConnection>) -> Duration {
        connection.sent_at()
    }

    fn is_same(&self, one: &Arc<HostConnection>, other: &Arc<HostConnection>) -> bool {
        one.token == other.token
    }

    fn wake(&self) {
        self.ring_io();
    }
}

/// What is behind the lock.
#[derive(Debug)]
struct State {
    machine: Machine<Reactor>,
    /// Frames of which segments have arrived.
    assemblies: HashMap<(HostNo, u32), Assembly>,
}

/// When certificates are looked at again.
#[derive(Debug, Default)]
struct Recheck {
    at: Duration,
    /// What was wrong with the credentials at the last look.
    complaint: String,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Gateway {
    state: Mutex<State>,
    recheck: Mutex<Recheck>,
    connections: RwLock<HashMap<u64, Arc<HostConnection>>>,
    next_token: AtomicU64,
    identity: OnceLock<Arc<Identity>>,
    /// Whether there are other hosts at all.
    active: AtomicBool,
    /// GTW-1.
    delivery: Mutex<()>,
    /// Senders that wait for what is under way to become less.
    room: Condvar,
    room_wanted: AtomicBool,
    /// What becomes of this runtime's process when the job is over; set by its host.
    ended: OnceLock<Teller>,
    /// This host is let go: what is said of processes that end here, or that cannot begin.
    leaving: OnceLock<HostEnd>,
    /// Who is told what people should know.
    log: OnceLock<Teller>,
    /// Where hosts that can only dial out find this one, and which are wanted there.
    listeners: Mutex<Vec<(SocketAddr, Arc<greeting::Seats>, Listener)>>,
}

/// Somebody who is told something.
pub(super) struct Teller(pub(super) Box<dyn Fn(String) + Send + Sync>);

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Teller")
    }
}

/// Whether two folders are one, whatever they are called.
fn same_folder(one: &Path, other: &Path) -> bool {
    one == other || matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

impl Gateway {
    /// What this side proves itself with: that which it was given first, in the same folder.
    pub(super) fn known_as(&self, identity: &Arc<Identity>) -> Result<&Arc<Identity>, RuntimeError> {
        let known = self.identity.get_or_init(|| Arc::clone(identity));
        if same_folder(known.dir(), identity.dir()) {
            Ok(known)
        } else {
            Err(RuntimeError::OtherCredentials { dir: known.dir().to_owned() })
        }
    }

    pub(crate) fn new(me: HostNo, incarnation: u64) -> Self {
        let state = State { machine: Machine::new(me, incarnation), assemblies: HashMap::new() };
        Self {
            state: Mutex::new(state),
            recheck: Mutex::default(),
            connections: RwLock::default(),
            next_token: AtomicU64::new(CONNECTION_TOKENS),
            identity: OnceLock::new(),
            active: AtomicBool::new(false),
            delivery: Mutex::new(()),
            room: Condvar::new(),
            room_wanted: AtomicBool::new(false),
            ended: OnceLock::new(),
            leaving: OnceLock::new(),
            log: OnceLock::new(),
            listeners: Mutex::default(),
        }
    }

    fn connection(&self, token: u64) -> Option<Arc<HostConnection>> {
        self.connections.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(&token).cloned()
    }

    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Something that who runs a host should know; a script hears of it by its failures.
    fn tell(&self, text: String) {
        if let Some(log) = self.log.get() {
            (log.0)(text);
        }
    }

    /// Something that nobody would hear of otherwise.
    fn warn(&self, text: String) {
        match self.log.get() {
            Some(log) => (log.0)(text),
            None => {
                let _ = writeln!(std::io::stderr(), "mesh: {text}");
            }
        }
    }
}

impl Runtime {
    /// Something has happened that the machine is to hear of.
    fn on_gateway(&self, event: Event<Arc<HostConnection>>) {
        let actions = lock(&self.gateway.state).machine.on(event, self.started.elapsed(), &self.reactor);
        self.carry_out(actions);
    }

    /// Does what the machine asks for, without its lock.
    fn carry_out(&self, actions: Vec<Action<Arc<HostConnection>>>) {
        for action in actions {
            match action {
                Action::Dial { host, address, window } => self.dial(host, address, window),
                Action::Close { connection, farewell } => {
                    if let Some(farewell) = farewell {
                        connection.send(&self.reactor, &farewell.packet(self.me.host), self.started.elapsed());
                        connection.flush(&self.reactor);
                    }
                    self.close_connection(&connection);
                }
                Action::Send(frame) => {
                    self.dispatch(frame, None);
                }
                Action::Died { host, end, lost } => self.host_died(host, &end, lost),
                Action::End { parting, visitors, why } => self.job_ended(parting, visitors, &why),
            }
        }
        self.tell_room();
    }

    /// The hosts that are attached and not dead.
    pub fn live_hosts(&self) -> Vec<HostNo> {
        lock(&self.gateway.state).machine.live_hosts()
    }

    /// The connections to all other hosts, for whoever looks in: number, whether it is up, bytes under way.
    pub fn peers(&self) -> Vec<(HostNo, bool, u64)> {
        lock(&self.gateway.state).machine.peers()
    }
}
