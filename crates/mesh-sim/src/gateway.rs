//! What a runtime does around the gateway's state machine, modelled: connections, and the agent's part in calls.

use crate::model::Costs;
use crate::node::{End, Signs};
use crate::queue::Event;
use crate::world::{Purpose, World};
use bytes::Bytes;
use mesh_proto::control::{Attachment, Introduction, Terms};
use mesh_proto::hosts::gateway::{self, Action, Caller, GatewayOptions, Missed};
use mesh_proto::hosts::{Arrival, Cargo, Fate, HostSet, Packet, PacketKind, Refuse, Short, unmerge};
use mesh_proto::messages::{Answer, Call, Meaning, Reply};
use mesh_proto::{CallId, Frame, HEADER_LEN, Header, HostNo, Kind, ProcAddr, Target};
use std::sync::Arc;
use std::time::Duration;

/// The actor that frames name.
const ACTOR: u64 = 77;
/// The call of an attachment.
const ATTACH: CallId = 1;
/// How long an attempt to connect may take: the shortest and the longest time.
const ATTEMPT: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(5)];

impl World {
    /// The controller attaches all hosts, which report that they are up.
    pub fn attach(&mut self) -> CallId {
        self.begin(ATTACH, Purpose::Attach);
        let model = &self.model;
        let address = |host: u32| Some(format!("{host:0>width$}", width = model.costs.address.saturating_sub(8)));
        let addresses: Vec<Option<String>> = (1..=model.hosts).map(address).collect();
        let (window, fan_out) = (model.window, model.fan_out);
        let options = GatewayOptions { window, fan_out, patience: Duration::ZERO, hold: Duration::ZERO };
        self.nodes[0].gateway.attach(ATTACH, &addresses, &options);
        self.on(0, gateway::Event::Proven(HostSet::range(1, self.model.hosts)));
        ATTACH
    }

    /// The controller calls every proc of every host, or spawns the procs.
    pub fn call(&mut self, call: CallId, purpose: Purpose) {
        self.begin(call, purpose);
        let payload = vec![7; self.model.payload];
        let message = Call { actor: ACTOR, call, place: 0, stream: false, task: None };
        let header = message.header(ProcAddr::CONTROLLER, ProcAddr::agent(1));
        let frame = Frame::build_plain(header, None, b"", &payload);
        let all = self.all();
        self.nodes[0].cpu = self.nodes[0].cpu.max(self.now);
        self.post(0, &frame, all);
    }

    fn post(&mut self, host: HostNo, frame: &Frame, hosts: HostSet) {
        let node = &mut self.nodes[host as usize];
        let now = node.cpu;
        node.gateway.post(Cargo::of(frame), hosts, &mut HostSet::default(), now, &node.net);
        node.gateway.arm(&node.net);
        self.flush(host);
    }

    /// Handles an event at a host's gateway, and its consequences.
    fn on(&mut self, host: HostNo, event: gateway::Event<End>) {
        let node = &mut self.nodes[host as usize];
        let now = node.cpu;
        let actions = node.gateway.on(event, now, &node.net);
        self.flush(host);
        for action in actions {
            match action {
                Action::Dial { host: to, window, .. } => self.dial(host, to, window),
                Action::Close { connection, .. } => self.close(host, connection),
                Action::Send(frame) => {
                    let hosts = match frame.target() {
                        Ok(Target::Many(..)) => self.all(),
                        _ => HostSet::one(frame.header.dst.host),
                    };
                    self.post(host, &frame, hosts);
                }
                // The simulator queries what a host knows of others.
                Action::Died { .. } => {}
                Action::End { .. } => self.ended(host),
            }
        }
    }

    pub(crate) fn tick(&mut self, host: HostNo) {
        self.on(host, gateway::Event::Tick);
        let node = &mut self.nodes[host as usize];
        let now = node.cpu;
        let at = node.gateway.next_tick(now);
        let busy = node.gateway.next_deadline().is_some_and(|due| due <= at);
        if at < Duration::MAX {
            self.arm(host, at, busy);
        }
    }

    // Connections.

    /// Connecting, the handshake, and a packet each way that names the job.
    fn dial(&mut self, from: HostNo, to: HostNo, window: Duration) {
        let now = self.nodes[from as usize].cpu.max(self.now);
        if !self.nodes[to as usize].alive {
            let silent = self.nodes[to as usize].silent;
            let after = if silent { window.clamp(ATTEMPT[0], ATTEMPT[1]) } else { 2 * self.model.latency };
            return self.queue.push(now + after, from, Event::Missed(to, !silent));
        }
        let mut up = now + 6 * self.model.latency;
        for host in [from, to] {
            let node = &mut self.nodes[host as usize];
            node.cpu = node.cpu.max(self.now);
            node.spend(self.model.costs.handshake);
            node.load.connections += 1;
            up = up.max(node.cpu + 3 * self.model.latency);
        }
        self.queue.push(up, from, Event::Connected(to));
    }

    pub(crate) fn missed(&mut self, host: HostNo, to: HostNo, gone: bool) {
        let missed = Missed { fate: Fate::Unreachable, why: String::new(), gone };
        self.on(host, gateway::Event::Missed { host: to, missed });
    }

    /// Two hosts greet each other.
    pub(crate) fn connected(&mut self, from: HostNo, to: HostNo) {
        if !self.nodes[to as usize].alive {
            let silent = self.nodes[to as usize].silent;
            return self.missed(from, to, !silent);
        }
        let join = self.nodes[from as usize].gateway.join(to);
        for host in [from, to] {
            let node = &mut self.nodes[host as usize];
            node.cpu = node.cpu.max(self.now);
            node.load.bytes += join.body.len() as u64;
            node.spend(self.model.costs.bytes(join.body.len()));
        }
        let attachment = Attachment::decode(&join.body);
        let terms = attachment.as_ref().map(|told| Terms { window: told.window }).or_else(|| Terms::decode(&join.body));
        if let Some(told) = attachment.filter(|_| !self.nodes[to as usize].attached) {
            self.nodes[to as usize].attached = true;
            self.on(to, gateway::Event::Begun { job: join.job, told: Arc::new(told) });
            self.called(to, ATTACH);
        }
        let caller = if from == 0 { Caller::Controller } else { Caller::Host };
        let answer = match self.nodes[to as usize].gateway.admit(&join, caller) {
            Ok(welcome) => welcome.packet(to),
            Err((code, text)) => Refuse { code, text }.packet(to),
        };
        let (answered, _) = self.nodes[from as usize].gateway.answered(to, "", &answer);
        match answered {
            Ok(Some((incarnation, theirs))) => {
                self.connections += 1;
                let id = self.connections;
                for (own, peer, incarnation, terms, dialed) in
                    [(to, from, join.incarnation, terms, false), (from, to, incarnation, theirs, true)]
                {
                    let node = &mut self.nodes[own as usize];
                    node.net.open.borrow_mut().insert(peer, Signs { id, heard: node.cpu, sent: node.cpu });
                    let connection = (peer, id);
                    let up = gateway::Event::Connected { host: peer, connection, incarnation, terms, dialed };
                    self.on(own, up);
                }
            }
            Ok(None) => self.on(from, gateway::Event::Missed { host: to, missed: Missed::for_now("") }),
            Err(missed) => self.on(from, gateway::Event::Missed { host: to, missed }),
        }
    }

    /// A host closes a connection; the other end is told.
    fn close(&mut self, host: HostNo, (peer, id): End) {
        let net = &self.nodes[host as usize].net;
        let is_open = net.open.borrow().get(&peer).is_some_and(|signs| signs.id == id);
        if is_open {
            net.open.borrow_mut().remove(&peer);
            self.queue.push(self.now + self.model.latency, peer, Event::Closed((host, id)));
        }
    }

    /// A connection has ended at its other end.
    pub(crate) fn closed(&mut self, host: HostNo, end: End) {
        let event = gateway::Event::Closed { host: end.0, connection: end, why: String::new() };
        let now = self.nodes[host as usize].cpu;
        if let Some(signs) = self.nodes[host as usize].net.open.borrow_mut().get_mut(&end.0) {
            signs.heard = now;
        }
        let ended = self.nodes[host as usize].net.open.borrow_mut().get(&end.0).is_some_and(|signs| signs.id == end.1);
        self.on(host, event);
        if ended {
            self.nodes[host as usize].net.open.borrow_mut().remove(&end.0);
        }
    }

    // Packets.

    pub(crate) fn arrived(&mut self, host: HostNo, from: HostNo, packet: Packet) {
        let costs = self.model.costs.clone();
        let runs = packet.dests.len() + packet.shares.len();
        let node = &mut self.nodes[host as usize];
        node.spend(Costs::times(costs.run, runs));
        let now = node.cpu;
        let id = {
            let mut open = node.net.open.borrow_mut();
            let Some(signs) = open.get_mut(&from) else { return };
            signs.heard = now;
            signs.id
        };
        if packet.seq_for(host).is_some() {
            node.spend(Costs::times(costs.share, packet.shares.len()));
        } else if packet.sole().is_some() && packet.kind == PacketKind::Data {
            let hosts: u32 = packet.shares.iter().map(|share| share.count).sum();
            let distinct = if self.model.equal { 0 } else { hosts.max(1) * self.model.procs };
            node.spend(costs.merge + distinct * costs.distinct);
        }
        let mut arrivals = Vec::new();
        let now = node.cpu;
        node.gateway.on_packet(&(from, id), packet, now, &node.net, &mut arrivals);
        node.gateway.packets_done(now, &node.net);
        self.flush(host);
        arrivals.into_iter().for_each(|arrival| self.take(host, arrival));
    }

    fn take(&mut self, host: HostNo, arrival: Arrival) {
        match arrival {
            Arrival::Piece { origin, message, offset, total, body } => {
                let len: u64 = body.iter().map(|piece| piece.len() as u64).sum();
                let partial = &mut self.nodes[host as usize].partial;
                if offset > 0 {
                    // Of a call with large arguments, only the arrival of the last segment matters.
                    if offset + len == total
                        && let Some(header) = partial.remove(&(origin, message))
                    {
                        self.deliver(host, Frame { header, body: Bytes::new() }, &HostSet::one(origin));
                    }
                } else if len < total {
                    partial.extend(header_of(&body).map(|header| ((origin, message), header)));
                } else if let Some(frame) = Frame::from_pieces(&body) {
                    self.deliver(host, frame, &HostSet::one(origin));
                }
            }
            Arrival::Merged { origins, body } => {
                if let Some(frame) = Frame::from_pieces(&body) {
                    self.deliver(host, frame, &origins);
                }
            }
        }
    }

    fn deliver(&mut self, host: HostNo, frame: Frame, origins: &HostSet) {
        match Meaning::of(&frame.header) {
            Ok(Meaning::Call(call)) => self.called(host, call.call),
            Ok(Meaning::Control(Kind::HostDown | Kind::Standing | Kind::HostLost | Kind::Whereabouts)) => {
                self.on(host, gateway::Event::Told(frame));
            }
            Ok(Meaning::Gathered(gathered)) => {
                let Some(call) = self.calls.get_mut(&gathered.call) else { return };
                let places = self.model.hosts * if call.purpose == Purpose::Attach { 1 } else { self.model.procs };
                let node = &mut self.nodes[host as usize];
                let replies = unmerge(&frame, places, |origin| origins.contains(origin), ProcAddr::agent);
                for (place, _) in replies.into_iter().flatten() {
                    if call.purpose == Purpose::Attach {
                        node.gateway.introduce(place + 1, gathered.call, || Some(Introduction::default()));
                    }
                    node.cpu += self.model.costs.outcome;
                    node.load.busy += self.model.costs.outcome;
                    call.reply(place, node.cpu);
                }
            }
            Ok(Meaning::Reply(reply)) => {
                let from = frame.header.src.host;
                self.nodes[host as usize].gateway.introduce(from, reply.call, || Some(Introduction::default()));
                if let Some(call) = self.calls.get_mut(&reply.call) {
                    let node = &mut self.nodes[host as usize];
                    node.spend(self.model.costs.outcome);
                    call.reply(reply.place, node.cpu);
                }
            }
            _ => {}
        }
    }

    /// A call has arrived: it goes to the procs.
    fn called(&mut self, host: HostNo, id: CallId) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let purpose = call.purpose;
        let count = if purpose == Purpose::Attach { 1 } else { self.model.procs };
        let costs = self.model.costs.clone();
        let node = &mut self.nodes[host as usize];
        let out = node.gateway.expect_replies(ProcAddr::CONTROLLER, id, count);
        node.spend(if purpose == Purpose::Endpoint { Costs::times(costs.local, count as usize) } else { costs.local });
        let now = node.cpu;
        call.progress.reached += 1;
        call.progress.last_reached = call.progress.last_reached.max(now);
        self.send(host, out);
        let mut made = now;
        for proc in 0..count {
            let (first, spread) = match purpose {
                Purpose::Attach => (now, 0),
                // Procs of one host run at the same time, but not at the same speed.
                Purpose::Endpoint => (now + costs.endpoint, costs.endpoint.as_nanos() / 2),
                Purpose::Spawn => {
                    made += costs.spawn;
                    (made, costs.spawn.as_nanos() / 4)
                }
            };
            let late = self.roll(u64::try_from(spread).unwrap_or(0));
            let index = (host - 1) * count + proc;
            self.queue.push(first + Duration::from_nanos(late), host, Event::Replied { call: id, index });
        }
    }

    /// A proc's reply has reached its agent.
    pub(crate) fn replied(&mut self, host: HostNo, call: CallId, index: u32) {
        let mut payload = vec![3; self.model.reply];
        if !self.model.equal {
            payload.iter_mut().zip(index.to_le_bytes()).for_each(|(byte, own)| *byte = own);
        }
        let src = ProcAddr { rank: index, ..ProcAddr::agent(host) };
        let reply = Reply { actor: ACTOR, call, place: index, answer: Answer::Value };
        let header = reply.header(src, ProcAddr::CONTROLLER);
        let node = &mut self.nodes[host as usize];
        let out = node.gateway.merge_reply(Frame::build_plain(header, None, b"", &payload), node.cpu);
        self.send(host, out);
    }

    /// Sends frames of this host to the controller.
    fn send(&mut self, host: HostNo, frames: Vec<Frame>) {
        for frame in frames {
            self.post(host, &frame, HostSet::one(0));
        }
        let node = &mut self.nodes[host as usize];
        node.gateway.arm(&node.net);
        self.flush(host);
    }
}

/// The header of the frame at the start of these bytes.
fn header_of(body: &Short<Bytes>) -> Option<Header> {
    let mut raw = [0; HEADER_LEN];
    let mut at = 0;
    for piece in body {
        let taken = piece.len().min(HEADER_LEN - at);
        raw[at..at + taken].copy_from_slice(&piece[..taken]);
        at += taken;
    }
    if at == HEADER_LEN { Header::decode(&raw).ok() } else { None }
}
