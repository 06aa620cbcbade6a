//! Bytes that no honest peer sends: nothing panics, nothing grows. The fuzzer runs the same entries without end.

use crate::support::dice::Dice;
use crate::support::{config, connection, entry, frame, on_the_wire, peer};
use bytes::Bytes;
use mesh_proto::hosts::{
    Cargo, Dest, Farewell, Gap, HostMerge, HostSet, Join, Lane, Look, MAX_HOSTS, Packet, PacketKind, Parting,
    PeerStreams, Refusal, Refuse, RelayMerge, Share, Short, Welcome,
};
use mesh_proto::messages::{Answer, Reply};
use mesh_proto::{Frame, Header, Kind, Part, Placement, ProcAddr, Target};
use proptest::prelude::*;
use std::time::Duration;

proptest! {
    #![proptest_config(config(400, 3))]

    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        entry::feed(&bytes);
    }

    #[test]
    fn truncated_flipped_and_spliced_frames(
        frames in prop::collection::vec(frame(), 1..4),
        piece in any::<u8>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        splice in prop::option::of((any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 0..64))),
    ) {
        let mut bytes = on_the_wire(&frames);
        for (at, mask) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
        }
        if let Some((at, extra)) = splice {
            let at = at.index(bytes.len());
            bytes.splice(at..at, extra);
        }
        bytes.truncate(cut.index(bytes.len() + 1));
        bytes.insert(0, piece);
        entry::feed(&bytes);
    }

    /// The header is valid, so that every byte of the body is taken seriously: random tables, regions and parts.
    #[test]
    fn hostile_bodies_behind_a_sound_header(
        body in prop::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(255), Just(128)], 0..600),
        name in 0_u16..40,
        target in 0_u16..80,
        parts in 0_u16..30,
    ) {
        let me = ProcAddr::CONTROLLER;
        let mut header = Header::new(Kind::Call, me, me);
        header.body_len = body.len() as u64;
        (header.name_len, header.target_len, header.parts) = (name, target, parts);
        if Header::decode(&header.encode()).is_ok() {
            entry::look_into(&Frame { header, body: body.clone().into() });
        }
        let mut bytes = vec![9];
        bytes.extend_from_slice(&header.encode());
        bytes.extend_from_slice(&body);
        entry::feed(&bytes);
    }
}

/// Where bytes go in.
type Entry = fn(&[u8]);

/// What the fuzzer does, for a fixed number of rounds and on any compiler: inputs evolve from each other.
fn mutate(target: &str, rounds: usize, seeds: Vec<Vec<u8>>, feed: Entry) {
    seeds.iter().enumerate().for_each(|(number, seed)| keep(target, &format!("seed-{number}"), seed));
    let mut pool = seeds;
    let kept = pool.len();
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    for round in 0..rounds {
        let mut bytes = pool[dice.roll(pool.len())].clone();
        for _ in 0..=dice.roll(4) {
            let at = dice.roll(bytes.len());
            match dice.roll(6) {
                0 => bytes[at] = u8::try_from(dice.roll(256)).unwrap(),
                1 => bytes[at] ^= 1 << dice.roll(8),
                2 => bytes[at] = [0, 1, 127, 128, 255][dice.roll(5)],
                3 => drop(bytes.drain(at..(at + dice.roll(20)).min(bytes.len()))),
                4 => bytes.extend_from_within(at..),
                _ => bytes.insert(at, u8::try_from(dice.roll(256)).unwrap()),
            }
            if bytes.is_empty() {
                bytes.push(1);
            }
            bytes.truncate(4096);
        }
        keep(target, &round.to_string(), &bytes);
        feed(&bytes);
        if pool.len() < 64 {
            pool.push(bytes);
        } else {
            let at = kept + dice.roll(64 - kept);
            pool[at] = bytes;
        }
    }
}

/// Hands an input to the fuzzer, which begins with those that differ in what they reach (`tools/fuzzing.py`).
fn keep(target: &str, name: &str, bytes: &[u8]) {
    if let Some(folder) = std::env::var_os("MESH_KEEP_INPUTS") {
        let folder = std::path::Path::new(&folder).join(target);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), bytes).unwrap();
    }
}

/// What the fuzzer found worth keeping (`fuzz/corpus`), and what has ever broken something.
#[test]
fn inputs_that_the_fuzzer_has_kept() {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let entries: [(&str, Entry); 3] = [("decode", entry::feed), ("connection", connection::feed), ("peer", peer::feed)];
    for (target, feed) in entries {
        let mut count = 0;
        for file in std::fs::read_dir(corpus.join(target)).unwrap() {
            feed(&std::fs::read(file.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 10, "{target} has {count}");
    }
}

#[test]
fn thousands_of_mutations() {
    let me = ProcAddr::CONTROLLER;
    let extent = mesh_topology::Extent::new([("procs", 8_usize)]).unwrap();
    let region = mesh_topology::Region::whole(&extent);
    let cast = Target::Many(0, region, Placement::On(0));
    let parts = [Part::Inline(vec![1; 30].into()), Part::Inline(vec![2; 300].into())];
    let seeds = [
        Frame::build(Header::new(Kind::Hello, me, me), None, b"", &[]),
        Frame::build(Header::new(Kind::Call, me, me), Some(&cast), b"step", &parts),
        Frame::build_plain(Header::new(Kind::Reply, me, me), None, b"", &[5; 90]),
    ];
    mutate("decode", 4_000, vec![[vec![3], on_the_wire(&seeds)].concat()], entry::feed);
}

/// Two hosts' answers to call 1, as their relay gets them, and what else arrives on a connection.
fn connection_seeds() -> Vec<Vec<u8>> {
    let (caller, now) = (ProcAddr::CONTROLLER, Duration::ZERO);
    let mut packets = Vec::new();
    // Two hosts with some equal answers, and two without.
    for (host, kinds) in [(2, 2), (3, 2), (4, 9), (5, 9)] {
        let mut merge = HostMerge::new(host, ProcAddr::agent(host));
        let mut frames = merge.expect(caller, 1, 3);
        for index in 3 * host..3 * host + 3 {
            let reply = Reply { actor: 3, call: 1, place: index, answer: Answer::Value };
            let header = reply.header(ProcAddr { rank: index, ..caller }, caller);
            let reply = Frame::build_plain(header, None, b"", &[u8::try_from(index % kinds).unwrap(); 20]);
            frames.extend(merge.on_reply(reply, now));
        }
        let frame = frames.remove(0);
        let pieces = [Bytes::copy_from_slice(&frame.header.encode()), frame.body].into();
        let mut peer_streams = PeerStreams::new(host, 1 << 20);
        assert!(peer_streams.post_one(1, 0, Cargo { frame: pieces, lane: Lane { sender: (0, host, host), mesh: 0 } }));
        packets.extend(peer_streams.next_packet(1, now));
    }
    let mut relay = RelayMerge::new(1);
    let mut merged = relay.expect(0, caller, 1, &HostSet::range(2, 4));
    packets.iter().for_each(|packet| merged.extend(relay.offer(packet.clone(), now)));
    assert_eq!(merged.len(), 1);
    let mut ack = Packet::new(PacketKind::Ack, 2);
    ack.dests = Short::from_iter([Dest::one(0, 0)]);
    ack.shares = vec![Share::one(4, 0, 9), Share { first: 6, count: 20, seq: 0, ack: 7 }].into();
    let mut cast = Packet::new(PacketKind::Data, 0);
    cast.dests = vec![Dest { first: 1, count: 9, seq: 4 }, Dest { first: 20, count: 30, seq: 5 }].into();
    cast.body = Short::from_iter([Bytes::from(vec![3; 70_000])]);
    cast.total = 70_000;
    let join = Join { job: 5, from: 2, to: 1, incarnation: 7, expected: 0, body: Bytes::from_static(b"more") };
    let greetings = [
        join.packet(),
        Look { job: 5 }.packet(),
        Look::welcome(&[5, 6]).packet(1),
        Welcome { incarnation: 9, body: Bytes::new() }.packet(1),
        Refuse { code: Refusal::Busy, text: "not now".to_owned() }.packet(1),
        Farewell { parting: Parting::YouAreDead, text: "done".to_owned() }.packet(2),
    ];
    let nack = Packet::nack(3, 1, 4, &[Gap { first: 5, count: 2 }]);
    [vec![ack, nack], greetings.to_vec(), packets, merged, vec![cast]]
        .iter()
        .map(|packets| {
            let mut bytes = vec![3];
            for packet in packets {
                packet.write_head(&mut bytes);
                packet.body.iter().for_each(|piece| bytes.extend_from_slice(piece));
            }
            bytes
        })
        .collect()
}

#[test]
fn thousands_of_mutations_of_what_comes_on_a_connection() {
    let seeds = connection_seeds();
    seeds.iter().for_each(|seed| connection::feed(seed));
    mutate("connection", 4_000, seeds, connection::feed);
}

#[test]
fn thousands_of_talks_with_a_hostile_host() {
    let mut dice = Dice(7);
    let seeds = (0..8).map(|_| (0..400).map(|_| u8::try_from(dice.roll(256)).unwrap()).collect()).collect();
    mutate("peer", 1_000, seeds, peer::feed);
}

fn merged_for_me(shares: Vec<Share>) -> Packet {
    Packet::merged(2, 0, shares, Short::from_iter([Bytes::from_static(b"merged")]))
}

#[test]
fn the_highest_of_all_numbers_is_a_number_that_came_early() {
    let mut peer_streams = PeerStreams::new(0, 1 << 20);
    peer_streams.on_packet(merged_for_me(vec![Share::one(2, u64::MAX, 0)]), Duration::ZERO, &mut Vec::new());
    let mut out = Vec::new();
    peer_streams.on_tick(Duration::from_secs(1), &mut out);
    let gaps: Vec<Gap> = out.iter().flat_map(Packet::gaps).collect();
    assert_eq!(gaps, [Gap { first: 1, count: u64::MAX - 1 }]);
}

#[test]
fn who_speaks_for_a_million_hosts_is_answered_with_a_packet() {
    let mut peer_streams = PeerStreams::new(0, 1 << 20);
    let all = Share { first: 2, count: MAX_HOSTS - 2, seq: 5, ack: 0 };
    peer_streams.on_packet(merged_for_me(vec![all]), Duration::ZERO, &mut Vec::new());
    let mut out = Vec::new();
    peer_streams.on_tick(Duration::from_secs(1), &mut out);
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].hosts(), HostSet::range(2, MAX_HOSTS - 2));
    assert_eq!(out[0].gaps().collect::<Vec<_>>(), [Gap { first: 1, count: 4 }]);
}

#[test]
fn acks_for_a_million_hosts_are_as_much_work_as_for_one() {
    let mut peer_streams = PeerStreams::new(1, 1 << 20);
    for round in 0..500 {
        let mut ack = Packet::new(PacketKind::Ack, 2);
        ack.dests = Short::from_iter([Dest::one(0, 0)]);
        ack.shares = Short::from_iter([Share { first: 2, count: MAX_HOSTS - 2, seq: 0, ack: round % 7 }]);
        assert!(peer_streams.pass_ack(&ack, Duration::ZERO));
    }
    let mut out = Vec::new();
    peer_streams.on_tick(Duration::from_secs(1), &mut out);
    assert_eq!(out.len(), 1);
    assert_eq!(*out[0].shares, [Share { first: 2, count: MAX_HOSTS - 2, seq: 0, ack: 6 }]);
}
