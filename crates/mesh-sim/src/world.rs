//! Hosts and what is in flight between them, in virtual time.

use crate::model::{Costs, Model};
use crate::node::{End, Load, Node};
use crate::queue::{Event, Queue};
use mesh_proto::hosts::{HostSet, Standing};
use mesh_proto::{CallId, HostNo};
use std::collections::HashMap;
use std::time::Duration;

/// What takes longer than this will never happen.
const LONGEST: Duration = Duration::from_secs(300);

/// How a call went, as its caller sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Hosts that the call has reached.
    pub reached: u32,
    /// When it reached the last of them.
    pub last_reached: Duration,
    /// How many places have replied.
    pub replies: u64,
    /// When the last of them replied.
    pub last_reply: Duration,
    /// Replies for a place that had one already; there must be none.
    pub repeated: u64,
}

/// What a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Every host reports that it is up.
    Attach,
    /// Every host makes its procs; each proc replies when it is up.
    Spawn,
    /// Every proc runs an endpoint and replies.
    Endpoint,
}

#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) purpose: Purpose,
    pub(crate) progress: Progress,
    replied: Vec<bool>,
}

impl Call {
    pub(crate) fn reply(&mut self, place: u32, now: Duration) {
        let Some(place) = self.replied.get_mut(place as usize) else { return };
        self.progress.repeated += u64::from(*place);
        self.progress.replies += u64::from(!std::mem::replace(place, true));
        self.progress.last_reply = now;
    }
}

/// All hosts of a job.
#[derive(Debug)]
pub struct World {
    pub(crate) model: Model,
    pub(crate) nodes: Vec<Node>,
    /// How many hosts live.
    alive: u32,
    pub(crate) queue: Queue,
    pub(crate) now: Duration,
    /// How many connections were made.
    pub(crate) connections: u64,
    pub(crate) calls: HashMap<CallId, Call>,
    /// The hosts that were killed.
    killed: Vec<HostNo>,
    ended: Vec<HostNo>,
    /// How many hosts know how each host stands, and when the last of them learned it.
    pub(crate) told: HashMap<(HostNo, Standing), (u32, Duration)>,
    /// The state of random numbers, which are the same in every run.
    dice: u64,
}

impl World {
    /// A job of the controller alone; the hosts exist but are not attached.
    #[must_use]
    pub fn new(model: Model) -> Self {
        let nodes = (0..=model.hosts).map(Node::new).collect();
        let alive = model.hosts + 1;
        Self {
            model,
            nodes,
            alive,
            queue: Queue::default(),
            now: Duration::ZERO,
            connections: 0,
            calls: HashMap::new(),
            killed: Vec::new(),
            ended: Vec::new(),
            told: HashMap::new(),
            dice: 1,
        }
    }

    /// The inputs.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Changes the inputs from now on, except for hosts and fan-out.
    pub fn vary(&mut self, change: impl FnOnce(&mut Model)) {
        let (hosts, fan_out) = (self.model.hosts, self.model.fan_out);
        change(&mut self.model);
        (self.model.hosts, self.model.fan_out) = (hosts, fan_out);
    }

    /// How many hosts live, including the controller's.
    #[must_use]
    pub fn living(&self) -> u32 {
        self.alive
    }

    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.now
    }

    /// What a host has done so far.
    #[must_use]
    pub fn load(&self, host: HostNo) -> Load {
        self.nodes[host as usize].load
    }

    /// The progress of a call so far.
    #[must_use]
    pub fn progress(&self, call: CallId) -> Progress {
        self.calls.get(&call).map(|call| call.progress).unwrap_or_default()
    }

    /// How many replies to a call came from the procs of a host.
    #[must_use]
    pub fn answered(&self, call: CallId, host: HostNo) -> usize {
        let Some(call) = self.calls.get(&call) else { return 0 };
        let each = self.places_of_host(call.purpose) as usize;
        let from = host.saturating_sub(1) as usize * each;
        call.replied.iter().skip(from).take(each).filter(|replied| **replied).count()
    }

    /// Whether a host lives.
    #[must_use]
    pub fn lives(&self, host: HostNo) -> bool {
        self.nodes.get(host as usize).is_some_and(|node| node.alive)
    }

    /// How many hosts have heard that a host is suspect or dead, and when the last of them did.
    #[must_use]
    pub fn told(&self, host: HostNo, standing: Standing) -> (u32, Duration) {
        self.told.get(&(host, standing)).copied().unwrap_or_default()
    }

    /// Lets time pass until `done`, or until it clearly never will be.
    pub fn run(&mut self, mut done: impl FnMut(&Self) -> bool) {
        let end = self.now + LONGEST;
        while !done(self) && self.now < end {
            let Some((at, host, event)) = self.queue.pop() else { break };
            self.now = self.now.max(at);
            if self.nodes[host as usize].alive {
                self.happen(host, event);
            }
        }
    }

    /// Lets time pass until nothing is left but signs of life, and everybody knows who is dead.
    pub fn settle(&mut self) {
        self.run(|world| {
            let living = world.living();
            world.queue.is_idle() && world.killed.iter().all(|dead| world.told(*dead, Standing::Dead).0 >= living)
        });
    }

    /// A host stops: its connections end at once if `closed`, otherwise it falls silent.
    pub fn kill(&mut self, host: HostNo, closed: bool) {
        self.nodes[host as usize].silent = !closed;
        self.killed.push(host);
        self.gone(host);
        self.hang_up(host, closed);
    }

    /// A host ended its work on its own, because nobody above it could reach it, or was told to.
    pub(crate) fn ended(&mut self, host: HostNo) {
        self.ended.push(host);
        self.gone(host);
        self.hang_up(host, true);
    }

    /// The hosts that ended without being killed: nobody above them could reach them for the window.
    #[must_use]
    pub fn ended_alone(&self) -> &[HostNo] {
        &self.ended
    }

    /// The host does nothing more.
    fn gone(&mut self, host: HostNo) {
        let node = &mut self.nodes[host as usize];
        if std::mem::replace(&mut node.alive, false) {
            self.alive -= 1;
        }
    }

    fn hang_up(&mut self, host: HostNo, closed: bool) {
        let node = &self.nodes[host as usize];
        let mut peers: Vec<End> = node.net.open.borrow().iter().map(|(peer, signs)| (*peer, signs.id)).collect();
        peers.sort_unstable();
        for (peer, id) in peers.into_iter().filter(|_| closed) {
            self.queue.push(self.now + self.model.latency, peer, Event::Closed((host, id)));
        }
    }

    pub(crate) fn begin(&mut self, call: CallId, purpose: Purpose) {
        let places = self.model.hosts as usize * self.places_of_host(purpose) as usize;
        self.calls.insert(call, Call { purpose, progress: Progress::default(), replied: vec![false; places] });
    }

    /// How many replies each host owes.
    pub(crate) fn places_of_host(&self, purpose: Purpose) -> u32 {
        if purpose == Purpose::Attach { 1 } else { self.model.procs }
    }

    fn happen(&mut self, host: HostNo, event: Event) {
        let at = self.now;
        let node = &mut self.nodes[host as usize];
        node.cpu = node.cpu.max(at);
        match event {
            Event::Arrive(from, packet) => {
                let len = packet.wire_len() + self.model.costs.around;
                node.wire_in = at.max(node.wire_in + self.model.wire(len));
                node.cpu = node.cpu.max(node.wire_in);
                node.spend(self.model.costs.packet_in + self.model.costs.bytes(len));
                node.load.packets += 1;
                node.load.bytes += len as u64;
                self.arrived(host, from, *packet);
            }
            Event::Tick { .. } => {
                // An earlier tick was asked for meanwhile.
                if node.armed != Some(at) {
                    return;
                }
                node.armed = None;
                self.tick(host);
            }
            Event::Replied { call, index } => {
                node.spend(self.model.costs.local);
                self.replied(host, call, index);
            }
            Event::Closed(end) => self.closed(host, end),
            Event::Connected(to) => self.connected(host, to),
            Event::Missed(to, gone) => self.missed(host, to, gone),
        }
        self.note(host);
    }

    /// Notes how a host thinks that the killed hosts stand.
    fn note(&mut self, host: HostNo) {
        let node = &mut self.nodes[host as usize];
        for dead in &self.killed {
            let standing = node.gateway.stands(*dead);
            if standing != Standing::Live && node.holds.insert(*dead, standing) != Some(standing) {
                let told = self.told.entry((*dead, standing)).or_default();
                *told = (told.0 + 1, told.1.max(node.cpu));
            }
        }
    }

    /// Lets the gateway tick at `at`, unless it does so earlier.
    pub(crate) fn arm(&mut self, host: HostNo, at: Duration, busy: bool) {
        let node = &mut self.nodes[host as usize];
        if node.armed.is_none_or(|armed| at < armed) {
            node.armed = Some(at);
            self.queue.push(at, host, Event::Tick { busy });
        }
    }

    /// Sends what a gateway has put out, and charges for it.
    pub(crate) fn flush(&mut self, host: HostNo) {
        let sent = self.nodes[host as usize].net.sent.take();
        for (to, packet) in sent {
            let node = &mut self.nodes[host as usize];
            let runs = packet.dests.len() + packet.shares.len();
            if packet.origin == host {
                node.spend(Costs::times(self.model.costs.number, packet.dests.len()));
            } else if packet.sole().is_none() {
                node.spend(self.model.costs.plan);
            }
            let len = packet.wire_len() + self.model.costs.around;
            node.spend(self.model.costs.packet_out + self.model.costs.bytes(len));
            node.spend(Costs::times(self.model.costs.run, runs));
            node.load.packets += 1;
            node.load.bytes += len as u64;
            node.wire_out = node.wire_out.max(node.cpu).max(self.now) + self.model.wire(len);
            let at = node.wire_out + self.model.latency;
            if self.nodes[to as usize].alive {
                self.queue.push(at, to, Event::Arrive(host, Box::new(packet)));
            }
        }
        if self.nodes[host as usize].net.woken.take() {
            let at = self.nodes[host as usize].cpu.max(self.now);
            self.arm(host, at, true);
        }
    }

    /// A number below `sides`.
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.dice;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides.max(1)
    }

    /// Every living, attached host besides the controller's.
    #[must_use]
    pub fn all(&self) -> HostSet {
        self.nodes[0].gateway.live_hosts().into_iter().collect()
    }
}
