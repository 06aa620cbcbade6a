//! Packets on a connection: what is written is read, and what no honest peer sends is refused.

use crate::support::config;
use bytes::Bytes;
use mesh_proto::READ_CHUNK;
use mesh_proto::hosts::{
    Dest, Farewell, Gap, HostSet, Join, Look, MAX_HOSTS, MAX_PACKET, MAX_RUNS, PACKET_HEAD, Packet, PacketDecoder,
    PacketError, PacketKind, Parting, Refusal, Refuse, Share, Short, Welcome,
};
use proptest::prelude::*;

fn runs(most: usize) -> impl Strategy<Value = Vec<(u32, u32)>> {
    prop::collection::vec((1_u32..50, 1_u32..2000), 1..most).prop_map(|steps| {
        let mut next = 0;
        let run = |(gap, count)| {
            let first = next + gap;
            next = first + count;
            (first, count)
        };
        steps.into_iter().map(run).collect()
    })
}

fn dests() -> impl Strategy<Value = Short<Dest>> {
    let one = (0..MAX_HOSTS, any::<u64>()).prop_map(|(host, seq)| Short::from_iter([Dest::one(host, seq)]));
    let many = (runs(20), any::<u64>()).prop_map(|(runs, seq)| {
        runs.into_iter().map(|(first, count)| Dest { first, count, seq: seq ^ u64::from(first) }).collect()
    });
    prop_oneof![2 => one, 1 => many]
}

fn body() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 1..300).prop_map(Bytes::from),
        2 => (1_usize..20_000, any::<u8>()).prop_map(|(len, byte)| Bytes::from(vec![byte; len])),
        1 => (1_usize..=MAX_PACKET, any::<u8>()).prop_map(|(len, byte)| Bytes::from(vec![byte; len])),
    ]
}

fn packet() -> impl Strategy<Value = Packet> {
    let data = (0..MAX_HOSTS, dests(), body(), any::<(u32, u16, u16, u64)>()).prop_map(
        |(origin, dests, body, (message, before, behind, ack))| {
            let mut packet = Packet::new(PacketKind::Data, origin);
            packet.offset = u64::from(before);
            packet.total = u64::from(before) + body.len() as u64 + u64::from(behind);
            (packet.message, packet.ack) = (message, ack);
            (packet.dests, packet.body) = (dests, Short::from_iter([body]));
            packet
        },
    );
    let merged = (0..MAX_HOSTS, runs(20), body(), any::<(u64, u64)>()).prop_map(|(dest, runs, body, (seq, ack))| {
        let share = |(first, count)| Share { first, count, seq: seq ^ u64::from(count), ack };
        Packet::merged(3, dest, runs.into_iter().map(share).collect(), Short::from_iter([body]))
    });
    let join = (any::<(u64, u64, u64)>(), 0..MAX_HOSTS, body()).prop_map(|(numbers, from, body)| {
        Join {
            job: numbers.0,
            from,
            to: 1,
            incarnation: numbers.1,
            expected: numbers.2,
            body: body.slice(..body.len().min(900)),
        }
        .packet()
    });
    let nack = prop::collection::vec(any::<(u64, u64)>(), 1..32).prop_map(|gaps| {
        let gaps: Vec<Gap> = gaps.into_iter().map(|(first, count)| Gap { first, count }).collect();
        let packet = Packet::nack(5, 6, 7, &gaps);
        assert_eq!(packet.gaps().collect::<Vec<_>>(), gaps);
        packet
    });
    let plain = prop::sample::select(vec![PacketKind::Ping, PacketKind::Pong]).prop_map(|kind| Packet::new(kind, 9));
    prop_oneof![6 => data, 2 => merged, 1 => join, 1 => nack, 1 => plain]
}

fn on_the_wire(packets: &[Packet]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for packet in packets {
        let before = bytes.len();
        packet.write_head(&mut bytes);
        packet.body.iter().for_each(|piece| bytes.extend_from_slice(piece));
        assert_eq!(bytes.len() - before, packet.wire_len());
    }
    bytes
}

/// Everything that a gateway does with unknown bytes. Panics if a promise is broken.
fn feed(bytes: &[u8], piece: usize) -> Result<Vec<Packet>, PacketError> {
    let mut decoder = PacketDecoder::default();
    let (mut packets, mut received) = (Vec::new(), 0);
    for mut chunk in bytes.chunks(piece) {
        while !chunk.is_empty() {
            let n = decoder.push(chunk);
            assert!(n > 0, "no room after all packets were taken");
            chunk = &chunk[n..];
            received += n;
            while let Some(packet) = decoder.next_packet()? {
                look_into(&packet);
                packets.push(packet);
            }
            let most = MAX_RUNS * 40 + MAX_PACKET + 2 * READ_CHUNK;
            assert!(decoder.held() <= most, "{} bytes are held after {received} arrived", decoder.held());
            assert!(decoder.pending() <= received);
        }
    }
    Ok(packets)
}

/// Reads everything that a packet states.
fn look_into(packet: &Packet) {
    let hosts = packet.hosts();
    assert_eq!(packet.sole().is_some(), hosts.len() == 1);
    for host in hosts.iter().take(50) {
        assert!(packet.seq_for(host).is_some());
    }
    assert_eq!(packet.seq_for(MAX_HOSTS), None);
    let half: HostSet = hosts.iter().take(1000).step_by(2).collect();
    assert_eq!(packet.for_hosts(&half).hosts(), half);
    let _ = (packet.is_first(), packet.is_last(), packet.share(), packet.gaps().count());
    let _ = (Join::read(packet), Welcome::read(packet), Refuse::read(packet), Farewell::read(packet));
    let again = feed_one(&on_the_wire(std::slice::from_ref(packet)));
    assert_eq!(again.as_ref(), Some(packet), "what was read can be sent on");
}

fn feed_one(bytes: &[u8]) -> Option<Packet> {
    let mut decoder = PacketDecoder::default();
    let mut rest = bytes;
    loop {
        rest = &rest[decoder.push(rest)..];
        match decoder.next_packet() {
            Ok(None) if !rest.is_empty() => {}
            other => return other.unwrap(),
        }
    }
}

proptest! {
    #![proptest_config(config(150, 11))]

    #[test]
    fn what_is_written_is_read(packets in prop::collection::vec(packet(), 1..5), piece in 1_usize..100_000) {
        let read = feed(&on_the_wire(&packets), piece).unwrap();
        prop_assert_eq!(read.len(), packets.len());
        for (read, sent) in read.iter().zip(&packets) {
            prop_assert_eq!(read, sent);
            prop_assert!(read.body.len() <= 1, "a body is one piece");
        }
    }

    #[test]
    fn a_share_of_the_hosts_keeps_their_numbers(packet in packet(), picked in prop::collection::vec(any::<prop::sample::Index>(), 0..30)) {
        let all: Vec<u32> = packet.hosts().iter().collect();
        if !all.is_empty() {
            let some: HostSet = picked.iter().map(|at| all[at.index(all.len())]).collect();
            let share = packet.for_hosts(&some);
            prop_assert_eq!(share.hosts(), some.clone());
            prop_assert!(some.iter().all(|host| share.seq_for(host) == packet.seq_for(host)));
        }
    }

    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000), piece in 1_usize..3000) {
        let _ = feed(&bytes, piece);
    }

    /// The fixed header is valid, so that runs and lengths are taken seriously.
    #[test]
    fn hostile_runs_behind_a_sound_header(
        packet in packet(),
        rest in prop::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(255)], 0..4000),
        piece in 1_usize..3000,
    ) {
        let mut bytes = packet.encode_head();
        bytes.truncate(PACKET_HEAD);
        bytes.extend(rest);
        let _ = feed(&bytes, piece);
    }

    #[test]
    fn truncated_flipped_and_spliced_packets(
        packets in prop::collection::vec(packet(), 1..3),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        early in any::<bool>(),
        cut in any::<prop::sample::Index>(),
        piece in 1_usize..100_000,
    ) {
        let mut bytes = on_the_wire(&packets);
        for (at, mask) in flips {
            let len = if early { bytes.len().min(200) } else { bytes.len() };
            let at = at.index(len);
            bytes[at] ^= mask;
        }
        bytes.truncate(cut.index(bytes.len() + 1));
        let _ = feed(&bytes, piece);
    }
}

fn refused(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut packet = Packet::new(PacketKind::Data, 1);
    packet.total = 3;
    packet.dests = Short::from([Dest::one(4, 9), Dest { first: 6, count: 2, seq: 8 }]);
    packet.body = Short::from_iter([Bytes::from_static(b"abc")]);
    let mut bytes = on_the_wire(&[packet]);
    assert_eq!(feed(&bytes, 1000).unwrap().len(), 1);
    change(&mut bytes);
    feed(&bytes, 1000).unwrap_err().to_string()
}

#[test]
fn what_is_not_ours_is_refused_with_its_reason() {
    assert!(refused(|bytes| bytes[0] = 0x16).contains("not a mesh packet"));
    assert!(refused(|bytes| bytes[2] = 9).contains("packet version 9, this side 2"));
    assert!(refused(|bytes| bytes[3] = 99).contains("kind 99"));
    assert!(refused(|bytes| bytes[43] = 1).contains("above the limit of 524288"));
    assert!(refused(|bytes| bytes[5] = 200).contains("destinations"));
    assert!(refused(|bytes| bytes[11] = 1).contains("origin's number"));
    assert!(refused(|bytes| bytes[31] = 1).contains("bytes in its frame"));
    assert!(refused(|bytes| bytes[24] = 2).contains("does not fit its frame"));
    assert!(refused(|bytes| bytes[16] = 1).contains("does not fit its frame"));
    assert!(refused(|bytes| bytes[44] = 1).contains("last word"));
    assert!(refused(|bytes| bytes[6] = 1).contains("more than one destination"));
    assert!(refused(|bytes| bytes[4] = 0).contains("do not fit its kind"));
    assert!(refused(|bytes| bytes[PACKET_HEAD + 4] = 0).contains("empty, overlap"));
    assert!(refused(|bytes| bytes[PACKET_HEAD + 4] = 3).contains("empty, overlap"));
    assert!(refused(|bytes| bytes[PACKET_HEAD + 16 + 7] = 255).contains("reach too far"));
}

#[test]
fn numbers_are_taken_up_to_their_limits() {
    let last = Dest { first: MAX_HOSTS - 2, count: 2, seq: 1 };
    let mut packet = Packet::new(PacketKind::Data, MAX_HOSTS - 1);
    packet.total = (1 << 40) + 4096;
    packet.dests = (0..MAX_RUNS as u32 - 1).map(|n| Dest { first: 2 * n, count: 1, seq: 1 }).chain([last]).collect();
    packet.body = Short::from_iter([Bytes::from(vec![7; MAX_PACKET])]);
    assert_eq!(feed(&on_the_wire(&[packet.clone()]), READ_CHUNK).unwrap()[0].dests.len(), MAX_RUNS);
    let refused = |at: std::ops::Range<usize>, number: u64| {
        let mut bytes = on_the_wire(&[packet.clone()]);
        let len = at.len();
        bytes[at].copy_from_slice(&number.to_le_bytes()[..len]);
        feed(&bytes, READ_CHUNK).unwrap_err().to_string()
    };
    assert!(refused(4..6, MAX_RUNS as u64 + 1).contains("destinations"));
    assert!(refused(8..12, u64::from(MAX_HOSTS)).contains("origin's number"));
    assert!(refused(24..32, (1 << 40) + 4097).contains("bytes in its frame"));
    assert!(refused(40..44, MAX_PACKET as u64 + 1).contains("bytes"));
    let end = PACKET_HEAD + 16 * (MAX_RUNS - 1);
    assert!(refused(end + 4..end + 8, 3).contains("reach too far"));
}

#[test]
fn a_long_body_is_read_to_where_it_stays() {
    let mut packet = Packet::new(PacketKind::Data, 1);
    packet.total = MAX_PACKET as u64;
    packet.dests = Short::from_iter([Dest::one(4, 9)]);
    packet.body = Short::from_iter([Bytes::from(vec![7; MAX_PACKET])]);
    let bytes = on_the_wire(&[packet]);
    let mut decoder = PacketDecoder::default();
    let n = decoder.push(&bytes);
    assert_eq!(decoder.next_packet(), Ok(None));
    assert_eq!(decoder.room().len(), bytes.len() - n, "the rest of the body, and nothing behind it");
    let at = decoder.room().as_ptr() as usize - (n - PACKET_HEAD - 16);
    decoder.push(&bytes[n..]);
    let read = decoder.next_packet().unwrap().unwrap();
    assert_eq!(read.body[0].as_ptr() as usize, at, "it was moved");
}

#[test]
fn the_buffer_of_a_long_body_is_used_again_once_nobody_has_it() {
    let long = |fill: u8| {
        let mut packet = Packet::new(PacketKind::Data, 1);
        packet.total = 256 << 10;
        packet.dests = Short::from_iter([Dest::one(4, 9)]);
        packet.body = Short::from_iter([Bytes::from(vec![fill; 256 << 10])]);
        packet
    };
    let mut decoder = PacketDecoder::default();
    let mut read = |fill| {
        let bytes = on_the_wire(&[long(fill)]);
        let n = decoder.push(&bytes);
        assert_eq!(decoder.next_packet(), Ok(None));
        assert_eq!(n + decoder.push(&bytes[n..]), bytes.len());
        let body = decoder.next_packet().unwrap().unwrap().body[0].clone();
        assert!(body.len() == 256 << 10 && body.iter().all(|byte| *byte == fill), "the body of {fill}");
        body
    };
    let first = read(1);
    let second = read(2);
    let (one, two) = (first.as_ptr(), second.as_ptr());
    assert_ne!(one, two, "a buffer that somebody has");
    assert_eq!(first[0], 1);
    let part = first.slice(7..9);
    drop(first);
    let third = read(3);
    assert_ne!(third.as_ptr(), one, "somebody has a part of it");
    assert_eq!(part[..], [1, 1]);
    drop((part, second));
    let (fourth, fifth) = (read(4), read(5));
    let mut again = [fourth.as_ptr(), fifth.as_ptr()];
    again.sort();
    let mut before = [one, two];
    before.sort();
    assert_eq!(again, before);
}

#[test]
fn greetings_are_read_back() {
    let body = Bytes::from_static(b"opaque");
    let join = Join { job: 1 << 60, from: 3, to: 4, incarnation: 5, expected: 0, body: body.clone() };
    assert_eq!(Join::read(&join.packet()), Ok(join));
    let welcome = Welcome { incarnation: 8, body };
    assert_eq!(Welcome::read(&welcome.packet(4)), Ok(welcome.clone()));
    assert!(Join::read(&welcome.packet(4)).is_err());
    for code in [
        Refusal::NoSuchJob,
        Refusal::NotAllowed,
        Refusal::NotMe,
        Refusal::Dead,
        Refusal::Version,
        Refusal::Busy,
        Refusal::Other,
    ] {
        let refuse = Refuse { code, text: "because".into() };
        assert_eq!(Refuse::read(&refuse.packet(4)), Ok(refuse));
    }
    for parting in [Parting::Other, Parting::JobOver, Parting::Stopped, Parting::CutOff, Parting::YouAreDead] {
        let farewell = Farewell { parting, text: String::new() };
        assert_eq!(Farewell::read(&farewell.packet(4)), Ok(farewell));
    }
    let look = Look { job: u64::MAX - 1 };
    assert_eq!(Look::read(&look.packet()), Ok(look));
    assert_eq!(Look::jobs(&Look::welcome(&[1, 7])), Some(vec![1, 7]));
    assert_eq!(Look::jobs(&Look::welcome(&[])), Some(vec![]));
    assert_eq!(Look::jobs(&Welcome { incarnation: 0, body: Bytes::from_static(&[0; 12]) }), None);
    let mut long = look.packet();
    long.body = Short::from_iter([Bytes::from_static(&[0; 9])]);
    assert!(Look::read(&long).is_err() && Join::read(&look.packet()).is_err());
    let mut unknown = Packet::new(PacketKind::Farewell, 1);
    unknown.body = Short::from_iter([Bytes::from_static(&[200])]);
    assert_eq!(Farewell::read(&unknown).unwrap().parting, Parting::Other);
    let bare = Packet::new(PacketKind::Farewell, 1);
    assert!(Farewell::read(&bare).is_err());
    let mut short = Packet::new(PacketKind::Join, 1);
    short.body = Short::from_iter([Bytes::from_static(&[0; 31])]);
    assert!(Join::read(&short).unwrap_err().to_string().contains("too short"));
}
