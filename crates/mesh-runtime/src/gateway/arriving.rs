//! Incoming packets, and frames between gateways.

use super::connection::{HostConnection, HostConnectionEnd};
use super::{Event, Gateway, Process};
use crate::locks::lock;
use mesh_proto::control::Revoked;
use mesh_proto::hosts::{Arrival, Farewell, HostSet, PacketKind, unmerge};
use mesh_proto::messages::{Gathered, merged_call};
use mesh_proto::{CallId, Frame, HostNo, Kind, Target};
use std::sync::Arc;

/// The most replies that one merged frame may hold.
const MOST_PLACES: u32 = 1 << 24;

impl<P: Process> Gateway<P> {
    /// Handles a connection that is readable or writable.
    pub(crate) fn on_connection(self: &Arc<Self>, token: u64, readable: bool, writable: bool) {
        let Some(connection) = self.connections.get(token) else { return };
        if writable {
            connection.flush(self.reactor());
            if connection.has_room() {
                self.on(Event::Writable { host: connection.peer });
            }
        }
        if readable {
            self.read(&connection);
        }
    }

    /// Reads what arrived and delivers it.
    pub(super) fn read(self: &Arc<Self>, connection: &Arc<HostConnection>) {
        let Some(process) = self.process.upgrade() else { return };
        let _in_order = lock(&self.delivery);
        let mut packets = Vec::new();
        let mut arrivals = Vec::new();
        let mut farewells = Vec::new();
        loop {
            let end = connection.read(&mut packets, self.now());
            if !packets.is_empty() {
                {
                    let now = self.now();
                    let mut machine = self.machine();
                    for packet in packets.drain(..) {
                        if packet.kind == PacketKind::Farewell {
                            farewells.push(Farewell::read(&packet).unwrap_or_default());
                            continue;
                        }
                        machine.on_packet(connection, packet, now, self.reactor(), &mut arrivals);
                    }
                    machine.packets_done(now, self.reactor());
                }
                self.room.tell();
                for arrival in arrivals.drain(..) {
                    self.take(&*process, arrival);
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
        for farewell in farewells {
            self.on(Event::Parted { host: connection.peer, farewell });
        }
    }

    /// Takes what arrived for this host, in order.
    fn take(&self, process: &P, arrival: Arrival) {
        match arrival {
            Arrival::Piece { origin, message, offset, total, body } => {
                let frame = if offset == 0 && body.iter().map(|piece| piece.len() as u64).sum::<u64>() == total {
                    Frame::from_pieces(&body)
                } else {
                    self.assemblies.take(process, (origin, message), offset, total, &body)
                };
                if let Some(frame) = frame {
                    self.take_frame(process, frame, None);
                }
            }
            Arrival::Merged { origins, body } => {
                if let Some(frame) = Frame::from_pieces(&body) {
                    self.take_frame(process, frame, Some(&origins));
                }
            }
        }
    }

    fn take_frame(&self, process: &P, frame: Frame, origins: Option<&HostSet>) {
        let header = frame.header;
        if header.kind == Kind::Gathered {
            self.take_gathered(process, &frame, origins);
            return;
        }
        if let Some(call) = merged_call(&header).filter(|_| header.target_len != 0) {
            self.note_call(process, &frame, call);
        }
        if header.kind == Kind::Reply && header.src.is_agent() && self.is_controller() {
            self.note_introduction(process, &frame);
        }
        let mut frame = self.assemblies.localized(process, frame);
        if matches!(header.kind, Kind::Reply | Kind::Undeliverable) && header.target_len == 0 {
            frame = process.share_copy(frame);
        }
        process.arrived(frame);
    }

    /// A cast arrived: counts the processes of this host that will answer it.
    fn note_call(&self, process: &P, frame: &Frame, call: CallId) {
        let Ok(target) = frame.target() else { return };
        let Target::Many(mesh, region, placement) = &target else { return };
        let here = self.me.host;
        let count = match placement.only() {
            Some(only) if only == here => region.len(),
            Some(_) => 0,
            None => {
                let local = process.local_ranks(*mesh);
                let on = placement.ranks_on(here, region.len());
                if on.len() > local.len().max(1) { 0 } else { on.filter(|rank| region.contains(*rank)).count() }
            }
        };
        if count > 1 {
            self.expect_replies(frame.header.src, call, u32::try_from(count).unwrap_or(0));
        }
    }

    /// Delivers replies that were merged on their way, one by one.
    fn take_gathered(&self, process: &P, frame: &Frame, origins: Option<&HostSet>) {
        let header = frame.header;
        let Ok(Gathered { call, .. }) = Gathered::read(&header) else { return };
        let target = if header.dst == self.me { self.parts.calls.target_of(call) } else { None };
        let places = target.as_ref().map_or(MOST_PLACES, |target| u32::try_from(target.len()).unwrap_or(u32::MAX));
        let place = |index: u32| match &target {
            Some(target) => target.place(index as usize).unwrap_or(header.src),
            None => header.src,
        };
        let counts = |host: HostNo| origins.is_none_or(|origins| origins.contains(host));
        let Ok(replies) = unmerge(frame, places, counts, place) else { return };
        for (_, reply) in replies {
            if reply.header.src.is_agent() && self.is_controller() {
                self.note_introduction(process, &reply);
            }
            process.arrived(reply);
        }
    }

    /// Handles a frame from another gateway, or from the controller to all gateways.
    pub(crate) fn on_frame(self: &Arc<Self>, frame: Frame) {
        if frame.header.kind != Kind::Revoked {
            return self.on(Event::Told(frame));
        }
        let (Some(identity), Some(Revoked { list })) = (self.credentials.get(), Revoked::read(&frame)) else { return };
        match identity.adopt_revocations(&list) {
            Ok(true) => {
                self.credentials.recheck_soon();
                if let Err(error) = self.parts.home.hand_on_revocations(&list) {
                    let what = "failed to hand the list of revoked certificates on to this host's processes";
                    self.log.tell(format!("{what}: {error}"));
                }
            }
            Ok(false) => {}
            Err(error) => self.log.tell(format!("rejected a list of revoked certificates: {error}")),
        }
    }
}
