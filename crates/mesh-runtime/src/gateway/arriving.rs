//! Packets in, and what gateways tell each other in frames.

use super::connection::{HostConnection, HostConnectionEnd};
use super::{GATEWAY, State};
use crate::runtime::{Runtime, lock};
use mesh_proto::control::{HostDown, HostLost, HostStanding, Revoked, Whereabouts, host_of};
use mesh_proto::hosts::{Arrival, Farewell, HostSet, Packet, PacketKind, Parting, Standing, unmerge};
use mesh_proto::messages::{Gathered, merged_call};
use mesh_proto::{CallId, Frame, Header, HostNo, Kind, ProcAddr};
use std::sync::Arc;

/// More replies than this no merged frame is taken apart into.
const MOST_PLACES: u32 = 1 << 24;

impl Runtime {
    /// Something has arrived on, or can be written to, a connection.
    pub(crate) fn on_connection(&self, token: u64, readable: bool, writable: bool) {
        let Some(connection) = self.gateway.connection(token) else { return };
        if writable {
            connection.flush(&self.reactor);
            if connection.has_room() {
                let mut state = lock(&self.gateway.state);
                self.pump(&mut state, connection.peer);
                drop(state);
                self.tell_room();
            }
        }
        if readable {
            self.read_connection(&connection);
        }
    }

    pub(super) fn read_connection(&self, connection: &Arc<HostConnection>) {
        let _in_order = lock(&self.gateway.delivery);
        let mut packets = Vec::new();
        let mut arrivals = Vec::new();
        let mut orders = Vec::new();
        loop {
            let end = connection.read(&mut packets, self.started.elapsed());
            if !packets.is_empty() {
                {
                    let mut state = lock(&self.gateway.state);
                    for packet in packets.drain(..) {
                        self.on_packet(&mut state, connection, packet, &mut arrivals, &mut orders);
                    }
                    for via in state.peer_streams.take_ready() {
                        self.pump(&mut state, via);
                    }
                    self.acknowledge(&mut state);
                    self.arm(&mut state);
                }
                self.tell_room();
                for arrival in arrivals.drain(..) {
                    self.take(arrival);
                }
            }
            match end {
                HostConnectionEnd::Drained => break,
                HostConnectionEnd::More => {}
                HostConnectionEnd::Closed(why) => {
                    self.connection_lost(connection, &why);
                    break;
                }
            }
        }
        for farewell in orders {
            self.on_farewell(connection, &farewell);
        }
    }

    /// Sends the acks that are due by what has just arrived. Where much comes the I/O thread would be woken for each.
    fn acknowledge(&self, state: &mut State) {
        let now = self.started.elapsed();
        if state.peer_streams.next_deadline().is_some_and(|at| at <= now) {
            let mut packets = Vec::new();
            state.peer_streams.on_tick(now, &mut packets);
            self.send_on(state, packets);
        }
    }

    fn on_packet(
        &self,
        state: &mut State,
        connection: &Arc<HostConnection>,
        packet: Packet,
        arrivals: &mut Vec<Arrival>,
        orders: &mut Vec<Farewell>,
    ) {
        let me = self.me.host;
        let now = self.started.elapsed();
        match packet.kind {
            PacketKind::Data | PacketKind::Ack | PacketKind::Nack => {
                // The controller has numbered them all: nobody speaks for hosts that there are not.
                if me == 0 && !packet.shares.iter().all(|share| state.topology.knows_all(share.first, share.count)) {
                    return;
                }
                if packet.sole() == Some(me) {
                    state.peer_streams.on_packet(packet, now, arrivals);
                    return;
                }
                self.relay(state, packet, arrivals);
            }
            PacketKind::Ping => connection.send(&self.reactor, &Packet::new(PacketKind::Pong, me), now),
            PacketKind::Farewell => {
                orders.push(Farewell::read(&packet).unwrap_or_default());
            }
            // Greetings come before a connection is one.
            PacketKind::Pong
            | PacketKind::Join
            | PacketKind::Welcome
            | PacketKind::Refuse
            | PacketKind::Look
            | PacketKind::Said => {}
        }
    }

    /// A packet that is not, or not only, for this host.
    fn relay(&self, state: &mut State, packet: Packet, arrivals: &mut Vec<Arrival>) {
        let me = self.me.host;
        let now = self.started.elapsed();
        let origin = packet.origin;
        if let Some(dest) = packet.sole() {
            // Acks for the controller come from all below: they are merged.
            if packet.kind == PacketKind::Ack && dest == 0 && state.peer_streams.pass_ack(&packet, now) {
                return;
            }
            let out = state.relays.offer(packet, now);
            self.send_on(state, out);
            return;
        }
        let mut others = packet.hosts();
        self.heed(state, &packet);
        self.expect_to_merge(state, &packet, &others);
        let mine = others.remove(me);
        let plan = state.topology.plan(origin, &others);
        for (via, share) in plan {
            self.forward(state, via, packet.for_hosts(&share));
        }
        if mine {
            let own = packet.for_hosts(&HostSet::one(me));
            state.peer_streams.on_packet(own, now, arrivals);
        }
    }

    /// A notice that a host is dead or suspect must not be relayed by that very host: it counts before the ways are
    /// looked up. What else follows from it waits for its turn.
    fn heed(&self, state: &mut State, packet: &Packet) {
        if packet.origin != 0 || !packet.is_whole() || packet.kind != PacketKind::Data {
            return;
        }
        let header = packet.body.first().and_then(|first| Header::decode(first.first_chunk()?).ok());
        let Some(header) = header.filter(|header| matches!(header.kind, Kind::HostDown | Kind::Standing)) else {
            return;
        };
        let well = header.kind == Kind::Standing
            && super::sending::frame_of(&packet.body)
                .and_then(|frame| HostStanding::read(&frame))
                .is_none_or(|told| told.live);
        if let Some(host) = host_of(&header)
            && host != self.me.host
            && !well
            && state.topology.standing(host) == Standing::Live
        {
            self.stand(state, host, Standing::Suspect);
        }
    }

    /// Notes which call a packet carries that goes on to several hosts: their answers are merged on the way back.
    fn expect_to_merge(&self, state: &mut State, packet: &Packet, hosts: &HostSet) {
        // Answers to another host than the controller's go there directly: none would come by.
        if packet.origin != 0 || !packet.is_first() || packet.kind != PacketKind::Data || hosts.len() < 2 {
            return;
        }
        let Some(first) = packet.body.first() else { return };
        let Some(header) = first.first_chunk().and_then(|raw| Header::decode(raw).ok()) else { return };
        let Some(call) = merged_call(&header) else { return };
        let out = state.relays.expect(packet.origin, header.src, call, hosts);
        self.send_on(state, out);
    }

    /// Sends packets of others on, or what is merged of them.
    pub(super) fn send_on(&self, state: &mut State, packets: Vec<Packet>) {
        for packet in packets {
            if let Some(dest) = packet.sole() {
                if let Some(via) = state.topology.next_hop(packet.origin, dest) {
                    self.forward(state, via, packet);
                }
                continue;
            }
            // An ack for many hosts.
            for (via, share) in state.topology.plan(packet.origin, &packet.hosts()) {
                self.forward(state, via, packet.for_hosts(&share));
            }
        }
    }

    /// What has arrived for this host, in order.
    fn take(&self, arrival: Arrival) {
        match arrival {
            Arrival::Piece { origin, message, offset, total, body } => {
                let frame = if offset == 0 && body.iter().map(|piece| piece.len() as u64).sum::<u64>() == total {
                    super::sending::frame_of(&body)
                } else {
                    self.assemble(origin, message, offset, total, &body)
                };
                if let Some(frame) = frame {
                    self.take_frame(frame, None);
                }
            }
            Arrival::Merged { origins, body } => {
                if let Some(frame) = super::sending::frame_of(&body) {
                    self.take_frame(frame, Some(&origins));
                }
            }
        }
    }

    fn take_frame(&self, frame: Frame, origins: Option<&HostSet>) {
        let header = frame.header;
        if header.kind == Kind::Gathered {
            self.take_gathered(&frame, origins);
            return;
        }
        if let Some(call) = merged_call(&header).filter(|_| header.target_len != 0) {
            self.note_call(&frame, call);
        }
        if header.kind == Kind::Reply && header.src.is_agent() && self.me == ProcAddr::CONTROLLER {
            self.note_introduction(&frame);
        }
        let mut frame = self.localized(frame);
        if matches!(header.kind, Kind::Reply | Kind::Undeliverable) && header.target_len == 0 {
            frame = self.share_copy(frame);
        }
        self.dispatch(frame, Some(GATEWAY));
    }

    /// A cast has come: how many procs of this host will answer it.
    fn note_call(&self, frame: &Frame, call: CallId) {
        let Ok(target) = frame.target() else { return };
        let mesh_proto::Target::Many(mesh, region, placement) = &target else { return };
        let here = self.me.host;
        let count = match placement.only() {
            Some(only) if only == here => region.len(),
            Some(_) => 0,
            None => {
                let local = self.local_ranks(*mesh);
                let on = placement.ranks_on(here, region.len());
                if on.len() > local.len().max(1) { 0 } else { on.filter(|rank| region.contains(*rank)).count() }
            }
        };
        if count > 1 {
            self.expect_replies(frame.header.src, call, u32::try_from(count).unwrap_or(0));
        }
    }

    fn take_gathered(&self, frame: &Frame, origins: Option<&HostSet>) {
        let header = frame.header;
        let to = header.dst;
        let Ok(Gathered { call, .. }) = Gathered::read(&header) else { return };
        let target = if to == self.me { self.call_target(call) } else { None };
        let places = target.as_ref().map_or(MOST_PLACES, |target| u32::try_from(target.len()).unwrap_or(u32::MAX));
        let place = |index: u32| match &target {
            Some(target) => target.place(index as usize).unwrap_or(header.src),
            None => header.src,
        };
        let counts = |host: HostNo| origins.is_none_or(|origins| origins.contains(host));
        let Ok(replies) = unmerge(frame, places, counts, place) else { return };
        for (_, reply) in replies {
            self.dispatch(reply, Some(GATEWAY));
        }
    }

    // What agents tell each other.

    pub(crate) fn on_gateway_frame(&self, frame: Frame) {
        let header = frame.header;
        // What ends or reroutes the work of others counts from the controller alone, and a report on a host from those above it.
        let ordered = header.src == ProcAddr::CONTROLLER;
        match header.kind {
            Kind::HostDown if ordered || !self.me.is_agent() => match HostDown::read(&frame) {
                Some(HostDown { host, end }) if self.me.is_agent() => self.host_down(host, end),
                Some(HostDown { host, end }) => self.ranks_lost_with(host, &end),
                None => {}
            },
            Kind::HostLost if self.me == ProcAddr::CONTROLLER => {
                let Some(HostLost { host, report }) = HostLost::read(&frame) else { return };
                let reporter = header.src.host;
                if header.src.is_agent() && lock(&self.gateway.state).topology.is_above(reporter, host) {
                    self.on_host_lost(host, report);
                }
            }
            Kind::Revoked if self.me.is_agent() => {
                if let (Some(identity), Some(Revoked { list })) = (self.gateway.identity.get(), Revoked::read(&frame)) {
                    match identity.adopt_revocations(&list) {
                        Ok(true) => {
                            lock(&self.gateway.state).recheck_at = std::time::Duration::ZERO;
                            if let Err(error) = self.home.hand_on_revocations(&list) {
                                let text = "a list of revocations was not handed on to this host's processes";
                                self.gateway.tell(format!("{text}: {error}"));
                            }
                        }
                        Ok(false) => {}
                        Err(error) => self.gateway.tell(format!("a list of revocations was not taken: {error}")),
                    }
                }
            }
            Kind::Standing if self.me.is_agent() && ordered => {
                if let Some(told) = HostStanding::read(&frame) {
                    self.set_standing(told.host, told.standing());
                }
            }
            Kind::Whereabouts if self.me.is_agent() => match Whereabouts::read(&frame) {
                Some(Whereabouts { host, address: Some(address) }) => self.on_whereabouts(host, address),
                Some(Whereabouts { host, address: None }) if self.me == ProcAddr::CONTROLLER => {
                    self.tell_whereabouts(header.src, host);
                }
                Some(_) | None => {}
            },
            Kind::EndJob if self.me.is_agent() && ordered => {
                self.end_job(Parting::JobOver, "the controller has ended the job");
            }
            _ => {}
        }
    }
}
