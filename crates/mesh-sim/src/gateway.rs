//! What a host's gateway and agent do: the part that a runtime plays around the state machines.

use crate::model::Costs;
use crate::queue::Event;
use crate::world::{Purpose, World};
use bytes::Bytes;
use mesh_proto::control::{HostDown, HostLost, HostStanding, Report};
use mesh_proto::hosts::{Arrival, Beat, Cargo, Fate, HostSet, Lane, Packet, PacketKind, Short, Standing, unmerge};
use mesh_proto::messages::{Answer, Call, Meaning, Reply, merged_call};
use mesh_proto::{CallId, Frame, HEADER_LEN, Header, HostEnd, HostNo, Kind, ProcAddr};
use std::time::Duration;

/// Who is called, as far as frames say it.
const ACTOR: u64 = 77;
/// The call that attaching is.
const ATTACH: CallId = 1;

impl World {
    /// The controller tells every host its place; the hosts say that they are there. Connections are made on the way.
    pub fn attach(&mut self) -> CallId {
        self.begin(ATTACH, Purpose::Attach);
        let all = self.all();
        self.welcome(0, &all);
        self.arm(0);
        ATTACH
    }

    /// The controller calls every proc of every host, or has them made.
    pub fn call(&mut self, call: CallId, purpose: Purpose) {
        self.begin(call, purpose);
        let payload = vec![7; self.model.payload];
        let message = Call { actor: ACTOR, call, place: 0, stream: false, task: None };
        let header = message.header(ProcAddr::CONTROLLER, ProcAddr::agent(1));
        let frame = Frame::build_plain(header, None, b"", &payload);
        let all = self.all();
        self.nodes[0].cpu = self.nodes[0].cpu.max(self.now);
        self.cast(&frame, &all);
        self.arm(0);
    }

    fn cast(&mut self, frame: &Frame, hosts: &HostSet) {
        let pieces = Self::pieces(frame);
        let plan = self.nodes[0].topology.plan(0, hosts);
        for (hop, share) in &plan {
            let cargo = Cargo { frame: pieces.clone(), lane: lane(0) };
            let _ = self.nodes[0].peer_streams.post(*hop, share.clone(), cargo);
        }
        for (hop, _) in plan {
            self.pump(0, hop, self.now);
        }
    }

    /// Tells the hosts below their places, each next hop with the addresses of its share.
    fn welcome(&mut self, host: HostNo, hosts: &HostSet) {
        let plan = self.nodes[host as usize].topology.plan(0, hosts);
        for (hop, share) in plan {
            let mut packet = Packet::new(PacketKind::Welcome, 0);
            packet.body = Short::from_iter([Bytes::from(vec![0; self.model.costs.address * share.len()])]);
            share.runs().iter().for_each(|&(first, count)| {
                packet.dests.push(mesh_proto::hosts::Dest { first, count, seq: 0 });
            });
            self.transmit(host, hop, packet);
        }
    }

    pub(crate) fn arrived(&mut self, host: HostNo, packet: Packet) {
        if packet.kind == PacketKind::Welcome {
            self.welcomed(host, &packet);
            return;
        }
        let runs = packet.dests.len() + packet.shares.len();
        self.nodes[host as usize].spend(Costs::times(self.model.costs.run, runs));
        let mine = packet.seq_for(host).is_some();
        if packet.sole().is_some() {
            if mine {
                self.take(host, packet);
            } else {
                self.relay_one(host, packet);
            }
            return;
        }
        let mut rest = packet.hosts();
        if packet.is_first() && packet.kind == PacketKind::Data {
            self.expect(host, &packet, &rest);
        }
        rest.remove(host);
        // First what it says to this host: that another is dead changes where it goes from here.
        if mine {
            self.take(host, packet.for_hosts(&HostSet::one(host)));
        }
        let plan = self.nodes[host as usize].topology.plan(packet.origin, &rest);
        for (hop, share) in plan {
            let part = packet.for_hosts(&share);
            self.nodes[host as usize].spend(self.model.costs.plan);
            self.transmit(host, hop, part);
        }
    }

    fn relay_one(&mut self, host: HostNo, packet: Packet) {
        let hosts: u32 = packet.shares.iter().map(|share| share.count).sum();
        let distinct = if self.model.equal { 0 } else { hosts.max(1) * self.model.procs };
        let node = &mut self.nodes[host as usize];
        if packet.kind == PacketKind::Ack && packet.sole() == Some(0) {
            // Acks for the controller come from all below: they are merged.
            if node.peer_streams.pass_ack(&packet, node.cpu) {
                return;
            }
        }
        if packet.kind == PacketKind::Data {
            node.spend(self.model.costs.merge + distinct * self.model.costs.distinct);
        }
        let out = node.relay.offer(packet, node.cpu);
        self.forward(host, out);
    }

    /// A relay that hands a call on waits for the answers of those below, and of its own host.
    fn expect(&mut self, host: HostNo, packet: &Packet, hosts: &HostSet) {
        if let Some(header) = header_of(&packet.body).filter(|_| hosts.len() > 1)
            && let Some(call) = merged_call(&header)
        {
            let out = self.nodes[host as usize].relay.expect(packet.origin, header.src, call, hosts);
            self.forward(host, out);
        }
    }

    fn welcomed(&mut self, host: HostNo, packet: &Packet) {
        let mut hosts = packet.hosts();
        let model = self.model.clone();
        let node = &mut self.nodes[host as usize];
        node.join(&model);
        if hosts.len() > 1 {
            let out = node.relay.expect(0, ProcAddr::CONTROLLER, ATTACH, &hosts);
            self.forward(host, out);
        }
        hosts.remove(host);
        self.welcome(host, &hosts);
        self.called(host, ATTACH);
    }

    /// Takes a packet that is for this host.
    fn take(&mut self, host: HostNo, packet: Packet) {
        let node = &mut self.nodes[host as usize];
        node.spend(Costs::times(self.model.costs.share, packet.shares.len()));
        let mut arrivals = Vec::new();
        node.peer_streams.on_packet(packet, node.cpu, &mut arrivals);
        for arrival in arrivals {
            match arrival {
                Arrival::Piece { origin, message, offset, total, body } => {
                    let len: u64 = body.iter().map(|piece| piece.len() as u64).sum();
                    let partial = &mut self.nodes[host as usize].partial;
                    if offset > 0 {
                        // All that counts of a call with large arguments is when its last segment is there.
                        if offset + len == total
                            && let Some(header) = partial.remove(&(origin, message))
                        {
                            self.deliver(host, Frame { header, body: Bytes::new() }, &HostSet::one(origin));
                        }
                    } else if len < total {
                        partial.extend(header_of(&body).map(|header| ((origin, message), header)));
                    } else if let Some(frame) = frame_of(&body) {
                        self.deliver(host, frame, &HostSet::one(origin));
                    }
                }
                Arrival::Merged { origins, body } => {
                    if let Some(frame) = frame_of(&body) {
                        self.deliver(host, frame, &origins);
                    }
                }
            }
        }
        let node = &mut self.nodes[host as usize];
        let now = node.cpu;
        node.peer_streams.take_ready().into_iter().for_each(|via| self.pump(host, via, now));
    }

    fn deliver(&mut self, host: HostNo, frame: Frame, origins: &HostSet) {
        match Meaning::of(&frame.header) {
            Ok(Meaning::Call(call)) => self.called(host, call.call),
            Ok(Meaning::Control(Kind::HostDown)) => {
                let Some(down) = HostDown::read(&frame) else { return };
                self.hear(host, down.host, Standing::Dead);
            }
            Ok(Meaning::Control(Kind::Standing)) => {
                let Some(told) = HostStanding::read(&frame) else { return };
                self.hear(host, told.host, told.standing());
            }
            // The controller decides, and tells everybody, itself first.
            Ok(Meaning::Control(Kind::HostLost)) => {
                let Some(HostLost { host, report }) = HostLost::read(&frame) else { return };
                let dead = matches!(report, Report::Dead { .. });
                self.declare(host, if dead { Standing::Dead } else { Standing::Suspect });
            }
            Ok(Meaning::Gathered(gathered)) => {
                let Some(call) = self.calls.get_mut(&gathered.call) else { return };
                let places = self.model.hosts * if call.purpose == Purpose::Attach { 1 } else { self.model.procs };
                let node = &mut self.nodes[host as usize];
                let replies = unmerge(&frame, places, |origin| origins.contains(origin), ProcAddr::agent);
                for (place, _) in replies.into_iter().flatten() {
                    node.cpu += self.model.costs.outcome;
                    node.load.busy += self.model.costs.outcome;
                    call.reply(place, node.cpu);
                }
            }
            Ok(Meaning::Reply(reply)) => {
                if let Some(call) = self.calls.get_mut(&reply.call) {
                    let node = &mut self.nodes[host as usize];
                    node.spend(self.model.costs.outcome);
                    call.reply(reply.place, node.cpu);
                }
            }
            _ => {}
        }
    }

    /// A call is here: it goes to the procs.
    fn called(&mut self, host: HostNo, id: CallId) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let purpose = call.purpose;
        let count = if purpose == Purpose::Attach { 1 } else { self.model.procs };
        let costs = self.model.costs.clone();
        let node = &mut self.nodes[host as usize];
        let out = node.merge.expect(ProcAddr::CONTROLLER, id, count);
        node.spend(if purpose == Purpose::Endpoint { Costs::times(costs.local, count as usize) } else { costs.local });
        let now = node.cpu;
        call.progress.reached += 1;
        call.progress.last_reached = call.progress.last_reached.max(now);
        self.send(host, out);
        let mut made = now;
        for proc in 0..count {
            let (first, spread) = match purpose {
                Purpose::Attach => (now, 0),
                // Procs of one host run at the same time, not at the same speed.
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

    /// A proc's reply is at its agent.
    pub(crate) fn replied(&mut self, host: HostNo, call: CallId, index: u32) {
        let mut payload = vec![3; self.model.reply];
        if !self.model.equal {
            payload.iter_mut().zip(index.to_le_bytes()).for_each(|(byte, own)| *byte = own);
        }
        let src = ProcAddr { rank: index, ..ProcAddr::agent(host) };
        let reply = Reply { actor: ACTOR, call, place: index, answer: Answer::Value };
        let header = reply.header(src, ProcAddr::CONTROLLER);
        let node = &mut self.nodes[host as usize];
        let out = node.merge.on_reply(Frame::build_plain(header, None, b"", &payload), node.cpu);
        self.send(host, out);
    }

    /// Sends frames of this host to the controller.
    fn send(&mut self, host: HostNo, frames: Vec<Frame>) {
        let node = &mut self.nodes[host as usize];
        let Some(hop) = node.topology.next_hop(host, 0).filter(|_| !frames.is_empty()) else { return };
        for frame in frames {
            let _ = node.peer_streams.post_one(hop, 0, Cargo { frame: Self::pieces(&frame), lane: lane(host) });
        }
        let now = node.cpu;
        self.pump(host, hop, now);
    }

    pub(crate) fn tick(&mut self, host: HostNo) {
        let node = &mut self.nodes[host as usize];
        let now = node.cpu;
        let frames = node.merge.on_tick(now);
        self.send(host, frames);
        let node = &mut self.nodes[host as usize];
        let packets = node.relay.on_tick(now);
        self.forward(host, packets);
        let node = &mut self.nodes[host as usize];
        let mut packets = Vec::new();
        node.peer_streams.on_tick(now, &mut packets);
        for packet in packets {
            let node = &mut self.nodes[host as usize];
            match packet.sole() {
                Some(dest) => {
                    if let Some(hop) = node.topology.next_hop(host, dest) {
                        self.transmit(host, hop, packet);
                    }
                }
                None => {
                    for (hop, share) in node.topology.plan(host, &packet.hosts()) {
                        let part = packet.for_hosts(&share);
                        self.transmit(host, hop, part);
                    }
                }
            }
        }
        let node = &mut self.nodes[host as usize];
        let ready = node.peer_streams.take_ready();
        ready.into_iter().for_each(|via| self.pump(host, via, now));
    }

    /// The connection to a host has ended: connecting anew is refused, and that is reported. Who hung on it goes to
    /// the next ancestor.
    pub(crate) fn closed(&mut self, host: HostNo, dead: HostNo) {
        let node = &mut self.nodes[host as usize];
        node.cpu = node.cpu.max(self.now);
        let refused = node.cpu + 2 * self.model.latency;
        let orphan = node.topology.parent(host) == Some(dead);
        // Nothing goes by it from now on, whatever the controller says and when: the notice itself may have to come
        // around it, and its acknowledgement.
        self.hear(host, dead, Standing::Suspect);
        if !orphan {
            self.queue.push(refused, host, Event::Report(dead, Standing::Dead));
        } else if let Some(next) = self.nodes[host as usize].topology.parent(host) {
            self.queue.push(refused, host, Event::Dial(next));
        }
    }

    /// A host that cannot be reached is reported to the controller.
    pub(crate) fn report(&mut self, host: HostNo, of: HostNo, standing: Standing) {
        let node = &mut self.nodes[host as usize];
        node.cpu = node.cpu.max(self.now);
        if host == 0 {
            self.declare(of, standing);
            return;
        }
        let dead = standing == Standing::Dead;
        let report = if dead { Report::dead(Fate::Unreachable, "") } else { Report::Suspect };
        self.send(host, vec![HostLost { host: of, report }.frame(ProcAddr::agent(host))]);
    }

    /// The controller decides how a host stands, and tells all others.
    fn declare(&mut self, of: HostNo, standing: Standing) {
        if self.nodes[0].topology.standing(of) == Standing::Dead {
            return;
        }
        self.hear(0, of, standing);
        let (from, to) = (ProcAddr::CONTROLLER, ProcAddr::agent(1));
        let frame = if standing == Standing::Dead {
            let end = HostEnd { fate: Fate::Unreachable, label: String::new(), why: String::new() };
            HostDown { host: of, end }.frame(from, to, None)
        } else {
            HostStanding { host: of, live: standing == Standing::Live }.frame(from, to, None)
        };
        let all = self.all();
        self.cast(&frame, &all);
        self.arm(0);
    }

    /// Looks at a connection whose other end is silent.
    pub(crate) fn beat(&mut self, host: HostNo, silent: HostNo) {
        let node = &mut self.nodes[host as usize];
        node.cpu = node.cpu.max(self.now);
        let now = self.now;
        let Some(heartbeat) = self.heartbeats.get_mut(&(host, silent)) else { return };
        match heartbeat.on_tick(now) {
            Beat::Dead => {
                self.heartbeats.remove(&(host, silent));
                self.closed(host, silent);
            }
            beat => {
                let next = heartbeat.next_deadline();
                self.queue.push(next.max(now + Duration::from_nanos(1)), host, Event::Beat(silent));
                // Who hangs on it hears by another way.
                if beat == Beat::Suspect && node.topology.parent(host) != Some(silent) {
                    self.report(host, silent, Standing::Suspect);
                }
            }
        }
    }
}

pub(crate) fn lane(host: HostNo) -> Lane {
    Lane { sender: (0, host, host), mesh: 1 }
}

/// The header of the frame that these bytes begin.
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

/// The frame that these bytes are: a header and a body, as they were posted.
pub(crate) fn frame_of(body: &Short<Bytes>) -> Option<Frame> {
    let header = header_of(body)?;
    match &**body {
        [head] if head.len() == HEADER_LEN => Some(Frame { header, body: Bytes::new() }),
        [head, rest] if head.len() == HEADER_LEN => Some(Frame { header, body: rest.clone() }),
        _ => None,
    }
}
