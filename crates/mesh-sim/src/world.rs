//! Hosts and what is under way between them, in virtual time.

use crate::model::{Costs, Model};
use crate::node::{Load, Node};
use crate::queue::{Event, Queue};
use mesh_proto::hosts::{Heartbeat, HostSet, Packet, Short, Standing};
use mesh_proto::{CallId, Frame, HostNo};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// How a call went, as its caller sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Hosts that the call has reached.
    pub reached: u32,
    /// When it reached the last.
    pub last_reached: Duration,
    /// Places that have replied.
    pub replies: u64,
    /// When the last did.
    pub last_reply: Duration,
    /// Replies that came for a place that had one; there must be none.
    pub repeated: u64,
}

/// What a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Every host says that it is there.
    Attach,
    /// Every host makes its procs; a proc that is up replies.
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
    pub(crate) queue: Queue,
    pub(crate) now: Duration,
    /// When each connection is up.
    connections: HashMap<(HostNo, HostNo), Duration>,
    pub(crate) calls: HashMap<CallId, Call>,
    /// Of the connections to hosts that have fallen silent.
    pub(crate) heartbeats: HashMap<(HostNo, HostNo), Heartbeat>,
    /// Who has found out by sending to it that a host is dead.
    refused: HashSet<(HostNo, HostNo)>,
    /// How many have heard how each host stands, and when the last has.
    pub(crate) told: HashMap<(HostNo, Standing), (u32, Duration)>,
    /// Numbers from a seed, the same with every run.
    dice: u64,
}

impl World {
    /// A job of the controller alone; the hosts are there but not attached.
    #[must_use]
    pub fn new(model: Model) -> Self {
        let nodes = (0..=model.hosts).map(Node::new).collect();
        let mut world = Self {
            model,
            nodes,
            queue: Queue::default(),
            now: Duration::ZERO,
            connections: HashMap::new(),
            calls: HashMap::new(),
            heartbeats: HashMap::new(),
            refused: HashSet::new(),
            told: HashMap::new(),
            dice: 1,
        };
        world.nodes[0].join(&world.model);
        world
    }

    /// The inputs.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Changes the inputs for what follows; hosts and fan-out stay.
    pub fn vary(&mut self, change: impl FnOnce(&mut Model)) {
        let (hosts, fan_out) = (self.model.hosts, self.model.fan_out);
        change(&mut self.model);
        (self.model.hosts, self.model.fan_out) = (hosts, fan_out);
    }

    /// How many hosts live, the controller's too.
    #[must_use]
    pub fn living(&self) -> u32 {
        u32::try_from(self.nodes.iter().filter(|node| node.alive).count()).unwrap_or(u32::MAX)
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

    /// How a call went so far.
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

    /// How many hosts have heard that a host is suspect or dead, and when the last of them has.
    #[must_use]
    pub fn told(&self, host: HostNo, standing: Standing) -> (u32, Duration) {
        self.told.get(&(host, standing)).copied().unwrap_or_default()
    }

    /// Lets time pass until nothing is left to be done, or `done`.
    pub fn run(&mut self, mut done: impl FnMut(&Self) -> bool) {
        while !done(self) {
            let Some((at, host, event)) = self.queue.pop() else { break };
            self.now = self.now.max(at);
            if self.nodes[host as usize].alive {
                self.happen(host, event);
            }
        }
    }

    /// Lets time pass until nothing is left to be done.
    pub fn settle(&mut self) {
        self.run(|_| false);
    }

    /// A host stops: its connections end at once if `closed`, else it is silent.
    pub fn kill(&mut self, host: HostNo, closed: bool) {
        let node = &mut self.nodes[host as usize];
        (node.alive, node.silent) = (false, !closed);
        let mut peers: Vec<HostNo> = self
            .connections
            .keys()
            .filter(|(a, b)| *a == host || *b == host)
            .map(|(a, b)| if *a == host { *b } else { *a })
            .collect();
        peers.sort_unstable();
        for peer in peers {
            if closed {
                self.queue.push(self.now + self.model.latency, peer, Event::Closed(host));
            } else {
                // It was heard just now: the whole window is before it.
                let heartbeat = Heartbeat::new(self.model.window, self.now);
                self.queue.push(heartbeat.next_deadline(), peer, Event::Beat(host));
                self.heartbeats.insert((peer, host), heartbeat);
            }
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
        match event {
            Event::Arrive(packet) => {
                let len = packet.wire_len() + self.model.costs.around;
                node.wire_in = at.max(node.wire_in + self.model.wire(len));
                node.cpu = node.cpu.max(node.wire_in);
                node.spend(self.model.costs.packet_in + self.model.costs.bytes(len));
                node.load.packets += 1;
                node.load.bytes += len as u64;
                self.arrived(host, *packet);
            }
            Event::Depart(to, packet) => self.depart(host, to, packet),
            Event::Tick => {
                node.cpu = node.cpu.max(at);
                // An earlier tick was asked for since.
                if node.armed == Some(at) {
                    node.armed = None;
                }
                self.tick(host);
            }
            Event::Replied { call, index } => {
                node.cpu = node.cpu.max(at);
                node.spend(self.model.costs.local);
                self.replied(host, call, index);
            }
            Event::Closed(dead) => self.closed(host, dead),
            Event::Report(of, standing) => self.report(host, of, standing),
            Event::Beat(silent) => self.beat(host, silent),
            Event::Dial(to) => self.connect(host, to),
        }
        self.arm(host);
    }

    /// Asks for a tick when the host's state machines want one.
    pub(crate) fn arm(&mut self, host: HostNo) {
        let node = &mut self.nodes[host as usize];
        let Some(at) = node.next_deadline() else { return };
        let at = at.max(self.now);
        if node.armed.is_none_or(|armed| at < armed) {
            node.armed = Some(at);
            self.queue.push(at, host, Event::Tick);
        }
    }

    /// When the connection between two hosts is up; it is made if there is none.
    pub(crate) fn connect(&mut self, from: HostNo, to: HostNo) {
        self.connection(from, to);
    }

    fn connection(&mut self, from: HostNo, to: HostNo) -> Duration {
        let key = (from.min(to), from.max(to));
        if let Some(up) = self.connections.get(&key) {
            return *up;
        }
        // Connecting, the handshake, and a packet each way that says for which job it is.
        let costs = &self.model.costs;
        let mut up = self.nodes[from as usize].cpu.max(self.now) + 6 * self.model.latency;
        for host in [from, to] {
            let node = &mut self.nodes[host as usize];
            node.cpu = node.cpu.max(self.now);
            node.spend(costs.handshake);
            node.load.connections += 1;
            up = up.max(node.cpu + 3 * self.model.latency);
        }
        self.connections.insert(key, up);
        up
    }

    /// A packet is written to the connection to `to`.
    pub(crate) fn transmit(&mut self, from: HostNo, to: HostNo, packet: Packet) {
        let up = self.connection(from, to);
        let runs = packet.dests.len() + packet.shares.len();
        let node = &mut self.nodes[from as usize];
        let len = packet.wire_len() + self.model.costs.around;
        node.spend(self.model.costs.packet_out + self.model.costs.bytes(len));
        node.spend(Costs::times(self.model.costs.run, runs));
        node.load.packets += 1;
        node.load.bytes += len as u64;
        if up > node.cpu {
            self.queue.push(up, from, Event::Depart(to, Box::new(packet)));
        } else {
            self.depart(from, to, Box::new(packet));
        }
    }

    fn depart(&mut self, from: HostNo, to: HostNo, packet: Box<Packet>) {
        let node = &mut self.nodes[from as usize];
        let len = packet.wire_len() + self.model.costs.around;
        node.wire_out = node.wire_out.max(node.cpu).max(self.now) + self.model.wire(len);
        let at = node.wire_out + self.model.latency;
        if self.nodes[to as usize].alive {
            self.queue.push(at, to, Event::Arrive(packet));
        } else if self.refused.insert((from, to)) {
            // Connecting is refused, or nobody answers; who hangs on the dead host goes elsewhere by itself.
            let silence = if self.nodes[to as usize].silent { self.model.window } else { Duration::ZERO };
            if self.nodes[from as usize].topology.parent(from) != Some(to) {
                self.queue.push(at + self.model.latency + silence, from, Event::Report(to, Standing::Dead));
            }
        }
    }

    /// What a host holds of another is set, and what follows from it is done.
    pub(crate) fn hear(&mut self, host: HostNo, of: HostNo, standing: Standing) {
        let node = &mut self.nodes[host as usize];
        let Some(changed) = node.topology.set(of, standing) else { return };
        let now = node.cpu;
        let told = self.told.entry((of, standing)).or_default();
        *told = (told.0 + 1, told.1.max(now));
        if standing == Standing::Dead {
            node.peer_streams.end(of);
            node.merge.end(|_| of == 0);
        }
        let topology = &node.topology;
        node.peer_streams.reroute(&changed, &|to| topology.next_hop(host, to));
        let out = node.relay.lost(of);
        self.forward(host, out);
        let ready = self.nodes[host as usize].peer_streams.take_ready();
        ready.into_iter().for_each(|via| self.pump(host, via, now));
    }

    /// Packets that go on to their one destination.
    pub(crate) fn forward(&mut self, host: HostNo, packets: Vec<Packet>) {
        for packet in packets {
            let hop = packet.sole().and_then(|dest| self.nodes[host as usize].topology.next_hop(packet.origin, dest));
            if let Some(hop) = hop {
                self.transmit(host, hop, packet);
            }
        }
    }

    /// Takes what the peer streams have for a next hop.
    pub(crate) fn pump(&mut self, host: HostNo, via: HostNo, now: Duration) {
        loop {
            let node = &mut self.nodes[host as usize];
            let Some(packet) = node.peer_streams.next_packet(via, now.max(node.cpu)) else { return };
            node.spend(Costs::times(self.model.costs.number, packet.dests.len()));
            if packet.sole().is_some() {
                // A relay's own answers go with those of the hosts below it.
                let out = node.relay.offer(packet, node.cpu);
                self.forward(host, out);
            } else {
                self.transmit(host, via, packet);
            }
        }
    }

    /// The bytes of a frame as a packet carries them.
    pub(crate) fn pieces(frame: &Frame) -> Short<bytes::Bytes> {
        let header = bytes::Bytes::copy_from_slice(&frame.header.encode());
        if frame.body.is_empty() { Short::from_iter([header]) } else { Short::from([header, frame.body.clone()]) }
    }

    /// A number below `sides`.
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.dice;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides.max(1)
    }

    /// Every host beside the controller's that is attached and lives.
    #[must_use]
    pub fn all(&self) -> HostSet {
        let mut all = self.nodes[0].topology.hosts();
        all.remove(0);
        all
    }
}
