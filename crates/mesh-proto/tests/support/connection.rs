//! Entry for hostile bytes of another host: used by the fuzzer and by the mutation test on a stable compiler.

use super::entry;
use mesh_proto::hosts::{
    Farewell, HostSet, Join, Look, MAX_HOSTS, MAX_PACKET, MAX_RUNS, Packet, PacketDecoder, PacketKind, Refuse,
    RelayMerge, Topology, Welcome, origins, unmerge,
};
use mesh_proto::{Frame, HEADER_LEN, Header, Kind, ProcAddr, READ_CHUNK};
use std::cell::RefCell;
use std::time::Duration;

/// What a decoder may hold beyond twice what has arrived: a packet, its runs, and room to read into.
const AHEAD: usize = 2 * MAX_PACKET + 40 * MAX_RUNS + 2 * READ_CHUNK;
/// The number of places in the call to which merged replies belong.
const PLACES: u32 = 500;

/// Everything that a gateway does with bytes of a connection. Panics if a promise is broken.
pub(crate) fn feed(data: &[u8]) {
    // The first byte sets the size of the pieces in which the rest arrives.
    let Some((&piece, bytes)) = data.split_first() else { return };
    let piece = usize::from(piece) * 97 + 1;
    let mut decoder = PacketDecoder::default();
    let mut relay = Relay::new();
    let (mut received, mut given) = (0, 0);
    'connection: for mut chunk in bytes.chunks(piece) {
        received += chunk.len();
        while !chunk.is_empty() {
            let taken = decoder.push(chunk);
            assert!(taken > 0, "whoever takes packets out can put bytes in");
            chunk = &chunk[taken..];
            let arrived = received - chunk.len();
            assert!(decoder.held() <= 2 * arrived + AHEAD, "{} bytes held of {arrived}", decoder.held());
            loop {
                match decoder.next_packet() {
                    Ok(Some(packet)) => {
                        given += packet.wire_len();
                        look_into(&packet);
                        relay.take(packet);
                    }
                    Ok(None) => break,
                    Err(error) => {
                        assert!(!error.to_string().is_empty());
                        break 'connection;
                    }
                }
            }
            assert!(given + decoder.pending() <= arrived, "more came out than went in");
        }
    }
    relay.finish();
}

/// Reads everything in a packet.
pub(crate) fn look_into(packet: &Packet) {
    let hosts = packet.hosts();
    assert_eq!(hosts.len(), packet.dests.iter().map(|dest| dest.count as usize).sum::<usize>());
    for host in [hosts.first().unwrap_or(3), 0, MAX_HOSTS - 1] {
        assert_eq!(packet.seq_for(host).is_some(), hosts.contains(host));
    }
    // What a relay makes of it for its next hops is complete, and nothing more.
    let pieces = hosts.split(3);
    let parts: Vec<Packet> = pieces.iter().map(|share| packet.for_hosts(share)).collect();
    assert!(parts.iter().zip(&pieces).all(|(part, share)| part.hosts() == *share));
    assert_eq!(parts.iter().fold(HostSet::default(), |all, part| all.union(&part.hosts())), hosts);
    assert_eq!(packet.is_whole(), packet.is_first() && packet.is_last());
    let _ = (packet.share(), packet.gaps().count());
    assert_eq!(decoded(packet), *packet, "it says the same once more");
    greetings(packet);
    if let Some(frame) = frame_of(packet) {
        entry::look_into(&frame);
        merged(&frame);
    }
}

fn greetings(packet: &Packet) {
    if let Ok(join) = Join::read(packet) {
        assert_eq!(Join::read(&join.packet()), Ok(join));
    }
    if let Ok(look) = Look::read(packet) {
        assert_eq!(Look::read(&look.packet()), Ok(look));
    }
    if let Ok(welcome) = Welcome::read(packet) {
        if let Some(jobs) = Look::jobs(&welcome) {
            assert_eq!(Look::welcome(&jobs).body, welcome.body);
        }
        assert_eq!(Welcome::read(&welcome.packet(packet.origin)), Ok(welcome));
    }
    if let Ok(refuse) = Refuse::read(packet) {
        assert_eq!(Refuse::read(&refuse.packet(packet.origin)), Ok(refuse));
    }
    if let Ok(farewell) = Farewell::read(packet) {
        assert_eq!(Farewell::read(&farewell.packet(packet.origin)), Ok(farewell));
    }
}

/// The place in its raw header: a merged frame may name a call that no reply can answer.
fn place_of(reply: &Frame) -> u32 {
    u32::from_le_bytes(*reply.header.encode()[60..].first_chunk().expect("a header is longer"))
}

/// Takes merged replies apart, as their caller does (MRG-5).
pub(crate) fn merged(frame: &Frame) {
    if frame.header.kind != Kind::Gathered {
        return;
    }
    let whose = origins(frame);
    let Ok(replies) = unmerge(frame, PLACES, |host| host % 5 != 4, ProcAddr::agent) else {
        assert!(whose.is_err());
        return;
    };
    assert!(whose.is_ok());
    let mut count = 0;
    for (place, reply) in replies {
        count += 1;
        assert!(place < PLACES && place_of(&reply) == place && count <= PLACES);
        entry::look_into(&reply);
    }
}

/// A host that relays packets: it has passed calls on, and merges what looks like answers to them.
struct Relay {
    merge: RelayMerge,
    topology: Topology,
    now: Duration,
    /// Bytes taken in to be forwarded, and bytes forwarded.
    taken: usize,
    given: usize,
}

impl Relay {
    fn new() -> Self {
        let mut merge = RelayMerge::new(1);
        for call in 0..3 {
            let out = merge.expect(0, ProcAddr::CONTROLLER, call, &HostSet::range(1, 40));
            assert!(out.is_empty());
        }
        let mut topology = Topology::new(1);
        assert!(topology.add_group(1, 60, 3));
        Self { merge, topology, now: Duration::ZERO, taken: 0, given: 0 }
    }

    fn take(&mut self, packet: Packet) {
        self.now += Duration::from_micros(100);
        if !matches!(packet.kind, PacketKind::Data | PacketKind::Ack | PacketKind::Nack) {
            return;
        }
        match packet.sole() {
            Some(1) => {}
            Some(dest) => {
                let _ = self.topology.next_hop(packet.origin, dest);
                self.taken += packet.wire_len();
                let out = self.merge.offer(packet, self.now);
                self.give(out);
            }
            None => {
                let mut hosts = packet.hosts();
                hosts.remove(1);
                // A packet to a million hosts that do not exist is the sender's to plan, not the fuzzer's.
                if hosts.len() < 1000 {
                    let plan = self.topology.plan(packet.origin, &hosts);
                    let all = plan.iter().fold(HostSet::default(), |all, (_, share)| all.union(share));
                    assert_eq!(all, hosts, "each of them goes somewhere");
                    plan.iter().for_each(|(_, share)| drop(decoded(&packet.for_hosts(share))));
                }
            }
        }
        let out = self.merge.on_tick(self.now);
        self.give(out);
    }

    /// Forwarded packets can be sent, and are not much longer than what came.
    fn give(&mut self, out: Vec<Packet>) {
        for packet in out {
            assert_eq!(decoded(&packet), flat(&packet));
            if let Some(frame) = frame_of(&flat(&packet)) {
                merged(&frame);
            }
            self.given += packet.wire_len();
            // The table for equal payloads may be longer than the payloads.
            assert!(self.given <= 4 * self.taken, "{} bytes are sent on where {} came", self.given, self.taken);
        }
    }

    fn finish(mut self) {
        let out = self.merge.on_tick(self.now + Duration::from_secs(1));
        self.give(out);
        assert!(self.merge.next_deadline().is_none(), "nothing waits longer than the hold");
    }
}

thread_local! {
    /// Shared, so that its buffer is not allocated for each packet.
    static NEXT: RefCell<PacketDecoder> = RefCell::default();
}

/// The packet as the next host gets it.
pub(crate) fn decoded(packet: &Packet) -> Packet {
    let mut bytes = packet.encode_head();
    packet.body.iter().for_each(|piece| bytes.extend_from_slice(piece));
    NEXT.with_borrow_mut(|decoder| {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let taken = decoder.push(rest);
            rest = &rest[taken..];
            if let Some(packet) = decoder.next_packet().expect("what is sent can be read") {
                assert!(rest.is_empty() && decoder.pending() == 0);
                return packet;
            }
        }
        panic!("what is sent is whole");
    })
}

/// The packet with its body in one piece.
pub(crate) fn flat(packet: &Packet) -> Packet {
    let body = packet.body.concat();
    let body = if body.is_empty() {
        Default::default()
    } else {
        mesh_proto::hosts::Short::from_iter([bytes::Bytes::from(body)])
    };
    Packet { body, ..packet.clone() }
}

/// The frame in a packet whose body is in one piece.
fn frame_of(packet: &Packet) -> Option<Frame> {
    let body = packet.body.first().filter(|_| packet.is_whole() && packet.kind == PacketKind::Data)?;
    let header = Header::decode(body.first_chunk()?).ok()?;
    let body = body.slice(HEADER_LEN..);
    (header.body_len == body.len() as u64).then_some(Frame { header, body })
}
