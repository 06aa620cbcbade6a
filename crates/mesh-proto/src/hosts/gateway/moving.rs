//! Packets in, out and through.
//!
//! This is the data path: nothing here allocates for a packet, and packets go into the [`Wire`] as they come up.

use super::{Gateway, Wire};
use crate::control::{HostStanding, host_of};
use crate::hosts::{Arrival, Cargo, HostSet, Packet, PacketKind, Standing};
use crate::messages::merged_call;
use crate::{Frame, Header, HostNo, Kind, ProcAddr};
use std::time::Duration;

/// The most bytes kept for a next hop that has no connection.
const MOST_KEPT: usize = 16 << 20;

impl<W: Wire> Gateway<W> {
    /// Posts a message to the peer streams of these hosts, and packets from there to the connections. Returns how many
    /// bytes wait for the fullest next hop. Dead and unknown hosts are added to `unreached`.
    pub fn post(
        &mut self,
        cargo: Cargo,
        mut hosts: HostSet,
        unreached: &mut HostSet,
        now: Duration,
        wire: &W,
    ) -> usize {
        let me = self.me;
        // Elsewhere than at the controller, an unknown host may be one that the controller has not announced yet.
        let is_lost =
            |host: &HostNo| self.standing(*host) == Standing::Dead || (me == 0 && !self.topology.knows(*host));
        let lost: HostSet = hosts.iter().filter(is_lost).collect();
        if !lost.is_empty() {
            hosts.reduce_by(&lost);
            *unreached = unreached.union(&lost);
        }
        let mut most = 0;
        if let (1, Some(host)) = (hosts.len(), hosts.first()) {
            let Some(via) = self.topology.next_hop(me, host) else { return 0 };
            if !self.peer_streams.post_one(via, host, cargo) {
                *unreached = unreached.union(&hosts);
                return 0;
            }
            self.pump(wire, via, now);
            most = self.peer_streams.waiting(via);
        } else {
            for (via, share) in self.topology.plan(me, &hosts) {
                let gone = self.peer_streams.post(via, share, cargo.clone());
                *unreached = unreached.union(&gone);
                self.pump(wire, via, now);
                most = most.max(self.peer_streams.waiting(via));
            }
        }
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Asks for a tick if streams and merges need one earlier than planned: once after each burst of posts and packets.
    pub fn arm(&mut self, wire: &W) {
        if let Some(next) = self.next_deadline()
            && next < self.armed
        {
            self.armed = next;
            wire.wake();
        }
    }

    // Merging the replies of this host's procs to one call.

    /// Whether replies of this host wait for others.
    #[must_use]
    pub fn merges_replies(&self) -> bool {
        !self.merge.is_empty()
    }

    /// Takes a reply to another host that may wait for others. Returns what goes now, to be posted.
    pub fn merge_reply(&mut self, frame: Frame, now: Duration) -> Vec<Frame> {
        self.merge.on_reply(frame, now)
    }

    /// Returns what a message from `src` to `dst` must not overtake, to be posted before it.
    pub fn merged_before(&mut self, src: ProcAddr, dst: ProcAddr) -> Vec<Frame> {
        self.merge.before(src, dst)
    }

    /// A call from another host arrived for `count` procs of this one: merges their replies. Returns what goes now, to
    /// be posted.
    pub fn expect_replies(&mut self, caller: ProcAddr, call: u64, count: u32) -> Vec<Frame> {
        self.merge.expect(caller, call, count)
    }

    /// Moves packets from the peer streams into a connection while it has room.
    pub(super) fn pump(&mut self, wire: &W, via: HostNo, now: Duration) {
        let connection = self.peers.get(&via).and_then(|peer| peer.connection.clone());
        let Some(connection) = connection.filter(|connection| wire.is_open(connection)) else {
            self.want(wire, via, now);
            return;
        };
        while wire.has_room(&connection) {
            let Some(packet) = self.peer_streams.next_packet(via, now) else { break };
            if self.relays.is_empty() || packet.sole().is_none() {
                wire.send(&connection, &packet, now);
            } else {
                // This host's own answer to a call that it has relayed is merged with the others.
                let (alone, casts) = self.relays.offer(packet, now).into_iter().partition(|one| one.sole().is_some());
                self.send_on(wire, alone, now);
                for cast in casts {
                    wire.send(&connection, &cast, now);
                }
            }
        }
    }

    /// Notes that something waits for a host that is not connected.
    fn want(&mut self, wire: &W, via: HostNo, now: Duration) {
        if self.standing(via) == Standing::Dead {
            return;
        }
        let peer = self.peer(via);
        let is_lost = peer.connection.is_none() && peer.lost_since.is_none();
        if is_lost {
            peer.lost_since = Some(now);
        }
        let is_wanted = !peer.dialing && peer.redial_at.is_none();
        if is_wanted {
            // The next tick dials it, or asks for its address.
            peer.redial_at = Some(now);
        }
        if is_lost || is_wanted {
            self.plan_look(via, now);
        }
        if is_wanted {
            self.look_soon();
            wire.wake();
        }
    }

    /// Sends a packet on, whatever its kind.
    fn forward(&mut self, wire: &W, via: HostNo, packet: Packet, now: Duration) {
        let connection = self.peers.get(&via).and_then(|peer| peer.connection.as_ref());
        if let Some(connection) = connection.filter(|connection| wire.is_open(connection)) {
            wire.send(connection, &packet, now);
            return;
        }
        let peer = self.peer(via);
        // The origin sends again what is dropped here.
        let len = packet.wire_len();
        if peer.kept_bytes + len <= MOST_KEPT {
            peer.kept_bytes += len;
            peer.kept.push_back(packet);
        }
        self.want(wire, via, now);
    }

    /// Sends on others' packets, or what was merged from them.
    pub(super) fn send_on(&mut self, wire: &W, packets: Vec<Packet>, now: Duration) {
        for packet in packets {
            if let Some(dest) = packet.sole() {
                if let Some(via) = self.topology.next_hop(packet.origin, dest) {
                    self.forward(wire, via, packet, now);
                }
                continue;
            }
            // An ack for many hosts.
            for (via, share) in self.topology.plan(packet.origin, &packet.hosts()) {
                self.forward(wire, via, packet.for_hosts(&share), now);
            }
        }
    }

    /// Sends again what these hosts have not acknowledged, by the route that leads there now.
    pub(super) fn reroute(&mut self, wire: &W, hosts: &HostSet, now: Duration) {
        let Self { peer_streams, topology, me, .. } = self;
        peer_streams.reroute(hosts, &|host| topology.next_hop(*me, host));
        self.pump_ready(wire, now);
        self.arm(wire);
    }

    fn pump_ready(&mut self, wire: &W, now: Duration) {
        for via in self.peer_streams.take_ready() {
            self.pump(wire, via, now);
        }
    }

    /// Does what streams and merges have due.
    pub(super) fn tick_streams(&mut self, wire: &W, now: Duration) {
        let mut unreached = HostSet::default();
        for frame in self.merge.on_tick(now) {
            let host = HostSet::one(frame.header.dst.host);
            self.post(Cargo::of(&frame), host, &mut unreached, now, wire);
        }
        let merged = self.relays.on_tick(now);
        self.send_on(wire, merged, now);
        self.acknowledge(wire, now);
        self.pump_ready(wire, now);
    }

    fn acknowledge(&mut self, wire: &W, now: Duration) {
        let mut packets = Vec::new();
        self.peer_streams.on_tick(now, &mut packets);
        self.send_on(wire, packets, now);
    }

    /// Takes a packet from a connection. What is for this host is appended to `arrivals`, in order (GTW-1). Call
    /// [`Gateway::packets_done`] after each burst. Greetings and farewells are not for the machine.
    pub fn on_packet(
        &mut self,
        connection: &W::Connection,
        packet: Packet,
        now: Duration,
        wire: &W,
        arrivals: &mut Vec<Arrival>,
    ) {
        match packet.kind {
            PacketKind::Data | PacketKind::Ack | PacketKind::Nack => {
                // The controller has numbered all hosts: no packet may speak for others.
                let speaks = |share: &crate::hosts::Share| self.topology.knows_all(share.first, share.count);
                if self.me == 0 && !packet.shares.iter().all(speaks) {
                    return;
                }
                if packet.sole() == Some(self.me) {
                    self.peer_streams.on_packet(packet, now, arrivals);
                    return;
                }
                self.relay(wire, packet, now, arrivals);
            }
            PacketKind::Ping => wire.send(connection, &Packet::new(PacketKind::Pong, self.me), now),
            PacketKind::Pong
            | PacketKind::Farewell
            | PacketKind::Join
            | PacketKind::Welcome
            | PacketKind::Refuse
            | PacketKind::Look
            | PacketKind::Said => {}
        }
    }

    /// Ends a burst of packets: sends what follows from it, including acks, so that heavy traffic does not ask for a
    /// tick per packet.
    pub fn packets_done(&mut self, now: Duration, wire: &W) {
        self.pump_ready(wire, now);
        if self.peer_streams.next_deadline().is_some_and(|at| at <= now) {
            self.acknowledge(wire, now);
        }
        self.arm(wire);
    }

    /// Relays a packet that is not, or not only, for this host.
    fn relay(&mut self, wire: &W, packet: Packet, now: Duration, arrivals: &mut Vec<Arrival>) {
        let me = self.me;
        if let Some(dest) = packet.sole() {
            // Acks for the controller come from all hosts below: merge them.
            if packet.kind == PacketKind::Ack && dest == 0 && self.peer_streams.pass_ack(&packet, now) {
                return;
            }
            let out = self.relays.offer(packet, now);
            self.send_on(wire, out, now);
            return;
        }
        let mut others = packet.hosts();
        self.heed(wire, &packet, now);
        self.expect_to_merge(wire, &packet, &others, now);
        let mine = others.remove(me);
        for (via, share) in self.topology.plan(packet.origin, &others) {
            self.forward(wire, via, packet.for_hosts(&share), now);
        }
        if mine {
            self.peer_streams.on_packet(packet.for_hosts(&HostSet::one(me)), now, arrivals);
        }
    }

    /// A notice that a host is dead or suspect must not be relayed by that very host: it takes effect before the routes
    /// are looked up. Its other consequences wait for their turn.
    fn heed(&mut self, wire: &W, packet: &Packet, now: Duration) {
        // A repeated packet may carry news long out of date.
        let is_news = packet.kind == PacketKind::Data && packet.is_whole() && self.peer_streams.is_new(packet);
        if packet.origin != 0 || !is_news {
            return;
        }
        let header = packet.body.first().and_then(|first| Header::decode(first.first_chunk()?).ok());
        let Some(header) = header.filter(|header| matches!(header.kind, Kind::HostDown | Kind::Standing)) else {
            return;
        };
        let well = header.kind == Kind::Standing
            && Frame::from_pieces(&packet.body)
                .and_then(|frame| HostStanding::read(&frame))
                .is_none_or(|told| told.live);
        if let Some(host) = host_of(&header)
            && host != self.me
            && !well
            && self.standing(host) == Standing::Live
        {
            self.stand(wire, host, Standing::Suspect, now);
        }
    }

    /// Notes the call in a packet that goes on to several hosts: their answers are merged on the way back.
    fn expect_to_merge(&mut self, wire: &W, packet: &Packet, hosts: &HostSet, now: Duration) {
        // Answers to other hosts than the controller go there directly: none would pass here.
        if packet.origin != 0 || !packet.is_first() || packet.kind != PacketKind::Data || hosts.len() < 2 {
            return;
        }
        let Some(first) = packet.body.first() else { return };
        let Some(header) = first.first_chunk().and_then(|raw| Header::decode(raw).ok()) else { return };
        let Some(call) = merged_call(&header) else { return };
        let out = self.relays.expect(packet.origin, header.src, call, hosts);
        self.send_on(wire, out, now);
    }

    // The load under way.

    /// Bytes that wait for the busiest next hop of these hosts.
    #[must_use]
    pub fn waiting(&self, hosts: &HostSet) -> u64 {
        let waits = |host: HostNo| {
            let via = self.topology.next_hop(self.me, host).unwrap_or(host);
            self.peer_streams.waiting(via)
        };
        hosts.iter().map(waits).max().unwrap_or(0)
    }

    /// Whether nothing waits, and everything was acknowledged.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.peer_streams.is_idle()
    }

    /// Whether what was sent to these hosts has arrived, except for up to `small` bytes under way to each.
    #[must_use]
    pub fn is_heard(&self, hosts: &HostSet, small: u64) -> bool {
        hosts.iter().all(|host| {
            let via = self.topology.next_hop(self.me, host);
            let large = self.peer_streams.outstanding(host) > small;
            !large && via.is_none_or(|via| self.peer_streams.waiting(via) == 0)
        })
    }

    /// Whether everything sent from here has arrived, or never will.
    #[must_use]
    pub fn has_arrived(&self) -> bool {
        let waits = |host: &HostNo| self.peer_streams.outstanding(*host) + self.peer_streams.waiting(*host) > 0;
        self.merge.next_deadline().is_none() && !self.peers.keys().any(waits)
    }
}
