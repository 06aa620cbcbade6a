//! Packets in, and what gateways tell each other in frames.

use super::connection::{HostConnection, HostConnectionEnd};
use super::{Event, GATEWAY};
use crate::runtime::{Runtime, lock};
use mesh_proto::control::{HostDown, Revoked};
use mesh_proto::hosts::{Arrival, Farewell, HostSet, PacketKind, unmerge};
use mesh_proto::messages::{Gathered, merged_call};
use mesh_proto::{CallId, Frame, HostNo, Kind, ProcAddr};
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
                self.on_gateway(Event::Writable { host: connection.peer });
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
                    let now = self.started.elapsed();
                    let machine = &mut lock(&self.gateway.state).machine;
                    for packet in packets.drain(..) {
                        if packet.kind == PacketKind::Farewell {
                            orders.push(Farewell::read(&packet).unwrap_or_default());
                            continue;
                        }
                        machine.on_packet(connection, packet, now, &self.reactor, &mut arrivals);
                    }
                    machine.packets_done(now, &self.reactor);
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
            self.on_gateway(Event::Parted { host: connection.peer, farewell });
        }
    }

    /// What has arrived for this host, in order.
    fn take(&self, arrival: Arrival) {
        match arrival {
            Arrival::Piece { origin, message, offset, total, body } => {
                let frame = if offset == 0 && body.iter().map(|piece| piece.len() as u64).sum::<u64>() == total {
                    Frame::from_pieces(&body)
                } else {
                    self.assemble(origin, message, offset, total, &body)
                };
                if let Some(frame) = frame {
                    self.take_frame(frame, None);
                }
            }
            Arrival::Merged { origins, body } => {
                if let Some(frame) = Frame::from_pieces(&body) {
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
            frame = self.remote_values.share(frame, self);
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
        match frame.header.kind {
            Kind::HostDown if !self.me.is_agent() => {
                if let Some(HostDown { host, end }) = HostDown::read(&frame) {
                    self.ranks_lost_with(host, &end);
                }
            }
            Kind::Revoked if self.me.is_agent() => {
                if let (Some(identity), Some(Revoked { list })) = (self.gateway.identity.get(), Revoked::read(&frame)) {
                    match identity.adopt_revocations(&list) {
                        Ok(true) => {
                            lock(&self.gateway.recheck).at = std::time::Duration::ZERO;
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
            _ if self.me.is_agent() => self.on_gateway(Event::Told(frame)),
            _ => {}
        }
    }
}
