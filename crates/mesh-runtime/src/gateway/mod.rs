//! The gateway of an agent: its connections to other hosts.
//!
//! [`mesh_proto::hosts::Gateway`] decides; it is a state machine. This part owns the sockets, TLS and threads. It hands in
//! events ([`Gateway::on`]) and carries out actions ([`Gateway::carry_out`]). It reaches the process around it through [`Process`].
//!
//! - this file: its fields, events in and actions out;
//! - `attaching`: hosts that join a job, before they are connected to;
//! - `dialing`, `listening`: making and accepting connections; `joining`: taking them into use;
//!   `doors`: where hosts are waited for;
//! - `connection`: one encrypted connection; `connections`: all that are up;
//! - `credentials`: this side's certificates;
//! - `sending`: messages out, own and relayed; `room`: waiting for room;
//! - `arriving`: packets in, and frames between gateways;
//! - `assembly`: frames from segments, with large parts straight in shared memory;
//! - `releasing`: releasing hosts;
//! - `health`: the I/O thread's turn, connections and hosts that are lost;
//! - `ending`: the end of the job here, and of this part;
//! - `roster`: the list of hosts, for people; `teller`: other messages for people.
//!
//! Locks, in the order in which they may be taken: `delivery`, the agent's, the machine's, a connection's. The machine's lock is
//! never held while a frame is dispatched or [`Process`] is called, except for [`Process::open_call`], which takes only the
//! calls' locks. A thread that reads packets from a connection holds `delivery` until it has delivered them (GTW-1).

mod arriving;
mod assembly;
mod attaching;
mod connection;
mod connections;
mod credentials;
mod dialing;
mod doors;
mod ending;
mod health;
mod joining;
mod listening;
mod process;
mod releasing;
mod room;
mod roster;
mod sending;
mod teller;

pub(crate) use assembly::is_mapped;
pub(crate) use connections::CONNECTION_TOKENS;
pub(crate) use joining::JobBegun;
pub use mesh_proto::hosts::gateway::{GatewayOptions, HostState, HostView, agents};
pub(crate) use process::Process;
pub(crate) use releasing::{LAST, Terms as ReleaseTerms};
pub(crate) use roster::introduction;

use crate::calls::Calls;
use crate::home::Home;
use crate::locks::lock;
use crate::reactor::Reactor;
use crate::shm::Memory;
use crate::spin_board::SpinBoard;
use crate::standing::Standing;
use crate::visits::Visits;
use assembly::Assemblies;
use connection::HostConnection;
use connections::Connections;
use credentials::Credentials;
use doors::Listeners;
use mesh_proto::hosts::gateway::{Action, Event, Wire};
use mesh_proto::hosts::{Gateway as Machine, Packet};
use mesh_proto::{Frame, HostEnd, ProcAddr};
use room::Room;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};
use teller::Teller;

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

/// The parts of its process that a gateway uses.
#[derive(Debug)]
pub(crate) struct Neighbors<P> {
    pub(crate) reactor: Arc<Reactor>,
    pub(crate) standing: Arc<Standing>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) home: Arc<Home>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) board: Arc<SpinBoard>,
    pub(crate) visits: Arc<Visits<P>>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Gateway<P> {
    me: ProcAddr,
    process: Weak<P>,
    parts: Neighbors<P>,
    /// When the machine's clock began.
    started: Instant,
    machine: Mutex<Machine<Reactor>>,
    /// Wakes threads that wait for the machine's state to change.
    room: Room,
    assemblies: Assemblies,
    connections: Connections,
    credentials: Credentials,
    listeners: Listeners,
    /// Whether there are other hosts.
    active: AtomicBool,
    /// Whether this is closed: nobody wants the connections that are still being made.
    over: AtomicBool,
    /// GTW-1.
    delivery: Mutex<()>,
    /// Called when this process's part in the job is over; set by its host.
    ended: Teller,
    /// Set while this host is being released: the reason given for what ends here or cannot start.
    leaving: OnceLock<HostEnd>,
    /// Shows people what they would otherwise notice only through failures.
    log: Teller,
}

impl<P: Process> Gateway<P> {
    /// The gateway of the process at `me`. `incarnation` is made at random for each run of a process; the controller's names the
    /// job. Parts of `shm_threshold` bytes and more go into shared memory.
    pub(crate) fn new(
        me: ProcAddr,
        incarnation: u64,
        process: &Weak<P>,
        parts: Neighbors<P>,
        shm_threshold: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            me,
            process: Weak::clone(process),
            started: Instant::now(),
            machine: Mutex::new(Machine::new(me.host, incarnation)),
            room: Room::default(),
            assemblies: Assemblies::new(me, &parts.memory, &parts.board, shm_threshold),
            parts,
            connections: Connections::default(),
            credentials: Credentials::default(),
            listeners: Listeners::default(),
            active: AtomicBool::new(false),
            over: AtomicBool::new(false),
            delivery: Mutex::new(()),
            ended: Teller::default(),
            leaving: OnceLock::new(),
            log: Teller::default(),
        })
    }

    /// Whether there are other hosts, or will be.
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    fn activate(&self) {
        self.active.store(true, Ordering::SeqCst);
    }

    fn machine(&self) -> MutexGuard<'_, Machine<Reactor>> {
        lock(&self.machine)
    }

    fn reactor(&self) -> &Reactor {
        &self.parts.reactor
    }

    /// The machine's time.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn is_controller(&self) -> bool {
        self.me == ProcAddr::CONTROLLER
    }

    /// Sends a frame of this process, unless it is gone.
    fn dispatch(&self, frame: Frame) {
        if let Some(process) = self.process.upgrade() {
            process.dispatch(frame);
        }
    }

    /// Passes an event to the machine and carries out its actions.
    fn on(self: &Arc<Self>, event: Event<Arc<HostConnection>>) {
        let actions = self.machine().on(event, self.now(), self.reactor());
        self.carry_out(actions);
    }

    /// Carries out actions without the machine's lock.
    fn carry_out(self: &Arc<Self>, actions: Vec<Action<Arc<HostConnection>>>) {
        for action in actions {
            match action {
                Action::Dial { host, address, window } => self.dial(host, address, window),
                Action::Close { connection, farewell } => {
                    if let Some(farewell) = farewell {
                        connection.send(self.reactor(), &farewell.packet(self.me.host), self.now());
                        connection.flush(self.reactor());
                    }
                    self.connections.close(&connection, self.reactor());
                }
                Action::Send(frame) => self.dispatch(frame),
                Action::Died { host, end, lost } => self.host_died(host, &end, lost),
                Action::End { parting, visitors, why } => self.job_ended(parting, visitors, &why),
            }
        }
        self.room.tell();
    }
}
