//! The part of an agent's runtime that talks to other hosts.
//!
//! - this file: what it is made of;
//! - `attaching`: hosts that join a job, before they are connected to;
//! - `connection`: one encrypted connection;
//! - `greeting`: how connections come about, and who is taken in;
//! - `host`: an agent, which serves jobs;
//! - `sending`: messages out, to the hosts that they are for, and on behalf of others;
//! - `arriving`: packets in, and what gateways tell each other;
//! - `releasing`: hosts that are let go;
//! - `roll`: which hosts there are, for people;
//! - `health`: whether the others live, and what follows if not;
//! - `verdict`: what became of an attempt to reach a host;
//! - `visits`: people on other machines who look into the job;
//! - `assembly`: frames out of segments, large parts straight into shared memory.
//!
//! All state is behind one lock, which is never held while a frame is dispatched or an agent's lock is taken. The order
//! of locks is: agent, gateway, connection.
//!
//! GTW-1: what has arrived is delivered in the order of its peer stream: whoever takes packets from connections holds `delivery`
//! until what they bring is delivered.

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
mod verdict;
mod visits;

pub use host::{Host, HostOptions, HostTold};
pub use roll::{HostState, HostView};
pub(crate) use visits::Visits;
pub use visits::{VisitEnd, VisitError, Visited, jobs_at, visit};

use crate::error::RuntimeError;
use crate::runtime::{Runtime, lock};
use crate::tls::{Identity, Listener};
use assembly::Assembly;
pub(crate) use assembly::is_mapped;
use attaching::Pending;
use connection::HostConnection;
use mesh_proto::control::{Attachment, Introduction};
use mesh_proto::hosts::{Fate, Heartbeat, HostMerge, Packet, PeerStreams, RelayMerge, Topology};
use mesh_proto::{HostEnd, HostNo, LinkId, MeshId, Placement, ProcAddr, Target};
use mesh_topology::{Region, Slice};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, RwLock};
use std::time::Duration;

/// What a frame came by that another host has sent.
pub(crate) const GATEWAY: LinkId = LinkId::MAX;
/// Connections' tokens begin here, above all others.
pub(crate) const CONNECTION_TOKENS: u64 = 1 << 40;
/// Bytes that may be under way to one other host.
const WINDOW: u64 = 64 << 20;
/// Bytes that wait here for a relayed packet's next hop while there is no connection to it.
const MOST_KEPT: usize = 16 << 20;

/// What a job's gateways agree on.
#[derive(Clone, Copy, Debug)]
pub struct GatewayOptions {
    /// After how much silence a host is dead.
    pub window: Duration,
    /// To how many hosts each relays.
    pub fan_out: u32,
    /// How long an agent that does not listen yet is waited for.
    pub patience: Duration,
    /// For how long the job goes on when the controller is cut off from all other hosts, where that is longer than the window.
    pub hold: Duration,
}

/// One other host, as seen from here.
#[derive(Debug, Default)]
struct Peer {
    address: Option<String>,
    connection: Option<Arc<HostConnection>>,
    heartbeat: Option<Heartbeat>,
    /// After how much silence it is dead, as the two ends of its connection have agreed.
    agreed: Option<Duration>,
    /// This side makes the connection, and makes it again.
    dials: bool,
    dialing: bool,
    redial_at: Option<Duration>,
    attempts: u32,
    /// Since when there is no connection to a host that there should be one to.
    lost_since: Option<Duration>,
    /// When the last connection to it was last heard of.
    heard: Option<Duration>,
    why: String,
    /// Why it is dead, once it is.
    verdict: Option<Arc<HostEnd>>,
    /// It is being let go, or was, and why; at the controller.
    released: Option<&'static str>,
    /// What it has said of itself; at the controller.
    introduction: Option<Introduction>,
    /// Which run of that host's runtime this side knows; 0 for none.
    incarnation: u64,
    /// What it is told when it is connected to for the first time.
    attachment: Option<Arc<Attachment>>,
    /// Others' packets that wait for a connection.
    kept: VecDeque<Packet>,
    kept_bytes: usize,
    /// The controller was asked where it is.
    asked: bool,
}

impl Peer {
    /// How long one that was never connected to may refuse connections: whatever listens there may yet be started.
    fn patience(&self) -> Duration {
        self.attachment.as_ref().filter(|_| self.incarnation == 0).map_or(Duration::ZERO, |told| told.patience)
    }

    /// After how much silence it is dead, if the job's hosts are after `window`.
    fn window(&self, window: Duration) -> Duration {
        self.agreed.or_else(|| self.attachment.as_ref().map(|told| told.window)).unwrap_or(window)
    }

    /// Whether it was let go in order.
    fn is_released(&self) -> bool {
        self.verdict.as_ref().is_some_and(|verdict| verdict.fate == Fate::Released)
    }

    /// For how long it may be out of reach.
    fn limit(&self, window: Duration) -> Duration {
        self.window(window).max(self.patience())
    }
}

#[derive(Debug)]
struct State {
    topology: Topology,
    peer_streams: PeerStreams,
    peers: BTreeMap<HostNo, Peer>,
    assemblies: HashMap<(HostNo, u32), Assembly>,
    merge: HostMerge,
    relays: RelayMerge,
    job: u64,
    incarnation: u64,
    window: Duration,
    /// For how long hosts and the controller wait for each other once all connections between them are lost.
    hold: Duration,
    /// At the controller: when it was last seen to be cut off from all others, or came back (GTW-4).
    cut_off: Option<Duration>,
    /// At the controller of a job that is held: when it last checked on its hosts.
    looked_at: Duration,
    fan_out: u32,
    next_host: HostNo,
    pending: Pending,
    /// When the I/O thread was last told to look in again.
    armed: Duration,
    /// Since when nobody above this host is connected to it.
    orphaned: Option<Duration>,
    /// The job is over, or this host was told that it is dead.
    over: bool,
    /// The controller closes: hosts that go are not missed.
    closing: bool,
    /// When certificates are looked at again.
    recheck_at: Duration,
    /// What was wrong with the credentials at the last look.
    complaint: String,
}

impl State {
    fn limit_of(&self, peer: &Peer) -> Duration {
        peer.limit(self.window)
    }

    /// After how much silence a host is dead.
    fn window_of(&self, host: HostNo) -> Duration {
        self.peers.get(&host).map_or(self.window, |peer| peer.window(self.window))
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Gateway {
    state: Mutex<State>,
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
        let state = State {
            topology: Topology::new(me),
            peer_streams: PeerStreams::new(me, WINDOW),
            peers: BTreeMap::new(),
            assemblies: HashMap::new(),
            merge: HostMerge::new(me, ProcAddr::agent(me)),
            relays: RelayMerge::new(me),
            job: incarnation,
            incarnation,
            window: Duration::from_secs(10),
            hold: Duration::ZERO,
            cut_off: None,
            looked_at: Duration::ZERO,
            fan_out: mesh_proto::hosts::DEFAULT_FAN_OUT,
            next_host: 1,
            pending: Pending::default(),
            armed: Duration::MAX,
            orphaned: None,
            over: false,
            closing: false,
            recheck_at: Duration::ZERO,
            complaint: String::new(),
        };
        Self {
            state: Mutex::new(state),
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

/// `count` hosts from `first` on, as agents.
pub fn agents(first: HostNo, count: u32) -> Target {
    let slice = Slice::new(first as usize, &[count as usize], &[1]);
    let region = slice.and_then(|slice| Region::new(&["hosts"], slice));
    match region {
        Ok(region) => Target::Many(0, region, Placement::Agents),
        Err(_) => Target::One(ProcAddr::agent(first)),
    }
}

impl Runtime {
    /// Sees to it that there is, or comes, a connection to every host that this one relays to.
    pub(crate) fn reach_out(&self) {
        let wanted: Vec<HostNo> = {
            let mut state = lock(&self.gateway.state);
            let (me, now) = (self.me.host, self.started.elapsed());
            let children = state.topology.children(me);
            let mut wanted = Vec::new();
            for host in children.iter() {
                let Some(peer) = state.peers.get_mut(&host) else { continue };
                if peer.address.is_some() && peer.connection.is_none() && !peer.dialing {
                    if !std::mem::replace(&mut peer.dials, true) {
                        // It has been this host's to reach from now on.
                        peer.lost_since = Some(now);
                    }
                    wanted.push(host);
                }
            }
            wanted
        };
        for host in wanted {
            self.dial(host);
        }
    }

    /// The hosts that are attached and not dead.
    pub fn live_hosts(&self) -> Vec<HostNo> {
        let state = lock(&self.gateway.state);
        state.topology.hosts().iter().filter(|host| *host != self.me.host).collect()
    }

    /// Notes where a mesh of another host is that this process sends to: if a host dies, its ranks there are lost.
    pub fn note_remote_mesh(&self, mesh: MeshId, placement: &Placement, ranks: usize) {
        if mesh == 0 || placement.only() == Some(self.me.host) {
            return;
        }
        lock(&self.remote_meshes).note(mesh, placement, ranks);
    }

    /// The same for one rank, whose place says nothing of where the others of its mesh are.
    pub(crate) fn note_remote_proc(&self, addr: ProcAddr) {
        if addr.mesh == 0 || addr.host == self.me.host {
            return;
        }
        lock(&self.remote_meshes).note_one(addr);
    }

    fn hosts_below(state: &State, host: HostNo) -> Vec<(HostNo, String)> {
        let mut below = state.topology.subtree(host);
        below.remove(host);
        let address = |host: HostNo| state.peers.get(&host).and_then(|peer| peer.address.clone());
        below.iter().filter_map(|host| Some((host, address(host)?))).collect()
    }

    /// The connections to all other hosts, for whoever looks in: number, whether it is up, bytes under way.
    pub fn peers(&self) -> Vec<(HostNo, bool, u64)> {
        let state = lock(&self.gateway.state);
        state
            .peers
            .iter()
            .map(|(host, peer)| (*host, peer.connection.is_some(), state.peer_streams.outstanding(*host)))
            .collect()
    }
}
