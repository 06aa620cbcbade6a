//! The gateway of one host: which other hosts there are, how to reach them, and whether they live.
//!
//! The machine only decides; its owner has the sockets, the threads and the clock. [`Gateway::on`] takes an [`Event`]
//! and returns [`Action`]s. Packets go straight into a [`Wire`]: the data path neither allocates nor hands over.
//!
//! - this file: what the machine is made of, events and actions;
//! - `schedule` and `ticks`: which host is due for a look when, and what is done then;
//! - `health`: lost connections, and deaths;
//! - `cut_off`: a controller that is itself the missing one;
//! - `joining`: hosts that are attached, greetings, and new connections;
//! - `moving`: packets in, out and through;
//! - `roster`: which hosts there are, for people, and hosts that are released.
//!
//! GTW-1: arrivals are delivered once, in the order of their peer stream: the machine's owner delivers what
//! [`Gateway::on_packet`] returns before it hands in more.
//!
//! GTW-2: only the controller declares a host dead, once, and everybody acts on it: calls there fail, what was owned
//! from there ends, and the host itself, if still alive, is refused and stops its work.
//!
//! GTW-3: a host that no host above it can reach for the window ends its work for the job by itself.
//!
//! GTW-4: in a job with a hold, that takes as long as the hold. A controller that hears none of its hosts any more
//! assumes that it is itself cut off, and declares none of them dead for that time.
//!
//! ATT-1: no host is connected to before the credentials of its attachment are read and the addresses of it and all
//! hosts below it are known. Until then its silence does not count.

mod absence;
mod cut_off;
mod health;
mod joining;
mod moving;
mod roster;
mod schedule;
mod ticks;

use super::{
    DEFAULT_FAN_OUT, Farewell, Fate, Heartbeat, HostMerge, HostSet, Lost, Packet, Parting, PeerStreams, RelayMerge,
    Standing, Topology,
};
use crate::control::{Attachment, EndJob, Introduction, Terms};
use crate::{Frame, HostEnd, HostNo, Placement, ProcAddr, Target};
use mesh_topology::{Region, Slice};
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use absence::CutOff;
pub use joining::Caller;
pub use roster::{HostState, HostView};
use schedule::Schedule;

/// Bytes that may be under way to one other host.
const WINDOW: u64 = 64 << 20;

/// What a job's gateways agree on.
#[derive(Clone, Copy, Debug)]
pub struct GatewayOptions {
    /// The silence after which a host is dead.
    pub window: Duration,
    /// To how many hosts each relays.
    pub fan_out: u32,
    /// How long to wait for an agent that does not listen yet.
    pub patience: Duration,
    /// How long the job goes on when the controller is cut off from all other hosts, if longer than the window.
    pub hold: Duration,
}

/// What carries packets: the sockets, as the machine sees them.
pub trait Wire {
    /// A connection to another host, with complete greetings.
    type Connection: Clone + Debug;

    /// Sends a packet, or queues it.
    fn send(&self, connection: &Self::Connection, packet: &Packet, now: Duration);
    /// Whether it can be written to.
    fn is_open(&self, connection: &Self::Connection) -> bool;
    /// Whether it takes more of what can still be sent by another path.
    fn has_room(&self, connection: &Self::Connection) -> bool;
    /// When something last arrived.
    fn heard_at(&self, connection: &Self::Connection) -> Duration;
    /// When something was last sent.
    fn sent_at(&self, connection: &Self::Connection) -> Duration;
    /// Whether two are the same connection.
    fn is_same(&self, one: &Self::Connection, other: &Self::Connection) -> bool;
    /// Asks for an [`Event::Tick`] soon, or at [`Gateway::next_tick`].
    fn wake(&self);
}

/// Why dialing a host failed. Programs decide by codes; texts are for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// For the program.
    pub fate: Fate,
    /// For people.
    pub why: String,
    /// It is certainly not there, or no longer: trying again is useless.
    pub gone: bool,
}

impl Missed {
    /// A later attempt may succeed.
    #[must_use]
    pub fn for_now(why: impl Into<String>) -> Self {
        Self { fate: Fate::Unreachable, why: why.into(), gone: false }
    }

    /// No later attempt can succeed.
    #[must_use]
    pub fn for_good(fate: Fate, why: impl Into<String>) -> Self {
        Self { fate, why: why.into(), gone: true }
    }
}

/// What happens to a gateway.
#[derive(Clone, Debug)]
pub enum Event<C> {
    /// Time has passed: see [`Gateway::next_tick`].
    Tick,
    /// The greetings of a connection are done.
    Connected {
        /// The other end.
        host: HostNo,
        /// The connection.
        connection: C,
        /// The incarnation of the other end's runtime.
        incarnation: u64,
        /// What the other end wants of connections.
        terms: Option<Terms>,
        /// Whether this side has dialed.
        dialed: bool,
    },
    /// A connection has ended, or is of no use any more.
    Closed {
        /// The other end.
        host: HostNo,
        /// The connection.
        connection: C,
        /// Why, for people.
        why: String,
    },
    /// A dial requested by [`Action::Dial`] failed.
    Missed {
        /// The host.
        host: HostNo,
        /// Why.
        missed: Missed,
    },
    /// A connection takes more.
    Writable {
        /// The other end.
        host: HostNo,
    },
    /// A frame between gateways, addressed to this host's agent.
    Told(Frame),
    /// The other end of a connection said farewell. Only after everything it sent before was delivered.
    Parted {
        /// The other end.
        host: HostNo,
        /// What it has said.
        farewell: Farewell,
    },
    /// At the controller: a host cannot be attached, or is being released.
    Lost {
        /// The host.
        host: HostNo,
        /// Why, for the program.
        fate: Fate,
        /// Why, for people.
        why: String,
    },
    /// This host begins its part in a job.
    Begun {
        /// The job.
        job: u64,
        /// The controller's description of it.
        told: Arc<Attachment>,
    },
    /// At the controller: the credentials for these hosts are read.
    Proven(HostSet),
    /// At the controller: a host's address is now known.
    Placed {
        /// The host.
        host: HostNo,
        /// Where it is.
        address: String,
    },
    /// At the controller: these hosts cannot be attached.
    GivenUp {
        /// The hosts.
        hosts: HostSet,
        /// Why, for the program.
        fate: Fate,
        /// Why, for people.
        why: String,
    },
    /// This host's part in the job ends.
    Ended {
        /// Why, for the program.
        parting: Parting,
        /// Why, for people.
        why: String,
    },
}

/// What to do, in this order.
#[derive(Clone, Debug)]
pub enum Action<C> {
    /// Connect to a host; then hand in [`Event::Connected`] or [`Event::Missed`].
    Dial {
        /// The host.
        host: HostNo,
        /// Where it is.
        address: String,
        /// The silence after which it is dead: a longer attempt is useless.
        window: Duration,
    },
    /// Close a connection that is no longer in use.
    Close {
        /// The connection.
        connection: C,
        /// What to say to the other end before.
        farewell: Option<Farewell>,
    },
    /// Send a frame of this host's agent.
    Send(Frame),
    /// The controller declared a host dead.
    Died {
        /// The host.
        host: HostNo,
        /// Why.
        end: Arc<HostEnd>,
        /// What was sent to it and never acknowledged.
        lost: Vec<Lost>,
    },
    /// This host's part in the job is over. Returned once.
    End {
        /// Why, for the program.
        parting: Parting,
        /// The same for those that look into the job here.
        visitors: Parting,
        /// Why, for people.
        why: String,
    },
}

/// One other host, as seen from here.
#[derive(Debug)]
struct Peer<C> {
    address: Option<String>,
    connection: Option<C>,
    heartbeat: Option<Heartbeat>,
    /// The silence after which it is dead, as both ends of its connection have agreed.
    agreed: Option<Duration>,
    /// Whether this side makes the connection, and restores it.
    dials: bool,
    dialing: bool,
    redial_at: Option<Duration>,
    attempts: u32,
    /// Since when a connection that should exist is missing.
    lost_since: Option<Duration>,
    /// When the last connection to it last received anything.
    heard: Option<Duration>,
    /// When this host last reported it as well.
    well_at: Option<Duration>,
    why: String,
    /// Why it is dead, once it is.
    verdict: Option<Arc<HostEnd>>,
    /// At the controller: why it is being or was released.
    released: Option<&'static str>,
    /// At the controller: what it said of itself.
    introduction: Option<Introduction>,
    /// The incarnation of its runtime that this side knows; 0 for none.
    incarnation: u64,
    /// What to tell it on the first connection.
    attachment: Option<Arc<Attachment>>,
    /// Others' packets that wait for a connection.
    kept: VecDeque<Packet>,
    kept_bytes: usize,
    /// The controller was asked for its address.
    asked: bool,
}

impl<C> Default for Peer<C> {
    fn default() -> Self {
        Self {
            address: None,
            connection: None,
            heartbeat: None,
            agreed: None,
            dials: false,
            dialing: false,
            redial_at: None,
            attempts: 0,
            lost_since: None,
            heard: None,
            well_at: None,
            why: String::new(),
            verdict: None,
            released: None,
            introduction: None,
            incarnation: 0,
            attachment: None,
            kept: VecDeque::new(),
            kept_bytes: 0,
            asked: false,
        }
    }
}

impl<C> Peer<C> {
    /// How long a host that was never connected to may refuse connections: its listener may yet be started.
    fn patience(&self) -> Duration {
        self.attachment.as_ref().filter(|_| self.incarnation == 0).map_or(Duration::ZERO, |told| told.patience)
    }

    /// The silence after which it is dead; `window` is the job's default.
    fn window(&self, window: Duration) -> Duration {
        self.agreed.or_else(|| self.attachment.as_ref().map(|told| told.window)).unwrap_or(window)
    }

    /// Whether it was released in order.
    fn is_released(&self) -> bool {
        self.verdict.as_ref().is_some_and(|verdict| verdict.fate == Fate::Released)
    }

    /// How long it may be out of reach.
    fn limit(&self, window: Duration) -> Duration {
        self.window(window).max(self.patience())
    }
}

/// Hosts that are not connected to yet (ATT-1).
#[derive(Debug, Default)]
struct Pending {
    /// The credentials of their attachment are being read.
    unproven: HostSet,
    /// Their addresses are unknown.
    unplaced: HostSet,
}

/// One turn of the machine: its time, and where its packets and actions go.
struct Turn<'a, W: Wire> {
    now: Duration,
    wire: &'a W,
    out: Vec<Action<W::Connection>>,
}

/// See the module.
#[derive(Debug)]
pub struct Gateway<W: Wire> {
    me: HostNo,
    topology: Topology,
    peer_streams: PeerStreams,
    peers: BTreeMap<HostNo, Peer<W::Connection>>,
    /// When to look at which of them.
    schedule: Schedule,
    merge: HostMerge,
    relays: RelayMerge,
    job: u64,
    incarnation: u64,
    window: Duration,
    /// How long hosts and the controller wait for each other once all connections between them are lost.
    hold: Duration,
    cut_off: CutOff,
    fan_out: u32,
    next_host: HostNo,
    pending: Pending,
    /// When the next tick is expected; anything due earlier calls [`Wire::wake`].
    armed: Duration,
    /// Since when no host above this one is connected to it.
    orphaned: Option<Duration>,
    /// The job is over, or this host was told that it is dead.
    over: bool,
    /// The controller is closing: hosts that leave are not missed.
    closing: bool,
}

/// The agents of `count` hosts from `first` on.
#[must_use]
pub fn agents(first: HostNo, count: u32) -> Target {
    let slice = Slice::new(first as usize, &[count as usize], &[1]);
    let region = slice.and_then(|slice| Region::new(&["hosts"], slice));
    match region {
        Ok(region) => Target::Many(0, region, Placement::Agents),
        Err(_) => Target::One(ProcAddr::agent(first)),
    }
}

impl<W: Wire> Gateway<W> {
    /// The gateway of host `me`, whose job has no other host yet. `incarnation` is random for each run of a host's
    /// runtime; the controller's names the job.
    #[must_use]
    pub fn new(me: HostNo, incarnation: u64) -> Self {
        Self {
            me,
            topology: Topology::new(me),
            peer_streams: PeerStreams::new(me, WINDOW),
            peers: BTreeMap::new(),
            schedule: Schedule::default(),
            merge: HostMerge::new(me, ProcAddr::agent(me)),
            relays: RelayMerge::new(me),
            job: incarnation,
            incarnation,
            window: Duration::from_secs(10),
            hold: Duration::ZERO,
            cut_off: CutOff::default(),
            fan_out: DEFAULT_FAN_OUT,
            next_host: 1,
            pending: Pending::default(),
            armed: Duration::MAX,
            orphaned: None,
            over: false,
            closing: false,
        }
    }

    /// Handles an event. Returns what to do because of it, in order.
    #[must_use]
    pub fn on(&mut self, event: Event<W::Connection>, now: Duration, wire: &W) -> Vec<Action<W::Connection>> {
        let mut turn = Turn { now, wire, out: Vec::new() };
        let at = &mut turn;
        match event {
            Event::Tick => self.tick(at),
            Event::Connected { host, connection, incarnation, terms, dialed } => {
                self.connected(at, host, connection, (incarnation, terms), dialed);
            }
            Event::Closed { host, connection, why } => {
                self.closed(at, host, &connection, &why);
            }
            Event::Missed { host, missed } => self.missed(at, host, missed),
            Event::Writable { host } => self.pump(at.wire, host, at.now),
            Event::Told(frame) => self.told(at, &frame),
            Event::Parted { host, farewell } => self.parted(at, host, &farewell),
            Event::Lost { host, fate, why } => self.lost(at, host, fate, why),
            Event::Begun { job, told } => self.begin(at, job, &told),
            Event::Proven(hosts) => self.proven(at, &hosts),
            Event::Placed { host, address } => self.placed(at, host, address),
            Event::GivenUp { hosts, fate, why } => self.give_up(at, &hosts, fate, &why),
            Event::Ended { parting, why } => self.end(at, parting, parting, &why),
        }
        turn.out
    }

    /// Whether the job is over here, or this host was told that it is dead.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// At the controller: begins to close, so that hosts that leave are not missed. Returns the message for its agents.
    pub fn close(&mut self) -> Option<Frame> {
        self.closing = true;
        let agents = self.agents()?;
        Some(EndJob::frame(ProcAddr::agent(self.me), ProcAddr::CONTROLLER, Some(&agents)))
    }

    /// At the controller: the agents of all hosts ever attached; none if there were none.
    #[must_use]
    pub fn agents(&self) -> Option<Target> {
        (self.next_host > 1).then(|| agents(1, self.next_host - 1))
    }

    /// Stops doing anything, without telling anybody.
    pub fn stop(&mut self) {
        self.over = true;
    }

    /// The job.
    #[must_use]
    pub fn job(&self) -> u64 {
        self.job
    }

    /// The number of the next host attached here.
    #[must_use]
    pub fn next_host(&self) -> HostNo {
        self.next_host
    }

    /// How long a host hears from no host above it before it ends its work (GTW-3, GTW-4).
    #[must_use]
    pub fn orphan_limit(&self) -> Duration {
        self.window.max(self.hold)
    }

    fn standing(&self, host: HostNo) -> Standing {
        self.topology.standing(host)
    }

    /// The silence after which a host is dead.
    fn window_of(&self, host: HostNo) -> Duration {
        self.peers.get(&host).map_or(self.window, |peer| peer.window(self.window))
    }

    fn peer(&mut self, host: HostNo) -> &mut Peer<W::Connection> {
        self.peers.entry(host).or_default()
    }

    /// Sends a frame from the controller to every other agent.
    fn cast(&self, turn: &mut Turn<'_, W>, frame: impl FnOnce(ProcAddr, &Target) -> Frame) {
        if let Some(agents) = self.agents() {
            turn.out.push(Action::Send(frame(ProcAddr::agent(self.me), &agents)));
        }
    }
}
