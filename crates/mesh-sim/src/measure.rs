//! What the state machines and sockets cost on this machine, as inputs for the model.

use crate::model::Costs;
use bytes::Bytes;
use mesh_proto::hosts::{
    Arrival, Cargo, HostMerge, HostSet, Lane, Packet, PacketDecoder, PeerStreams, RelayMerge, Share, Short, Topology,
    unmerge,
};
use mesh_proto::messages::{Answer, Reply};
use mesh_proto::{Frame, HostNo, ProcAddr};
use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const HOSTS: u32 = 10_000;
const PROCS: u32 = 8;

/// Measures for a few seconds. Returns the name and the cost of each step.
///
/// # Errors
/// If there is no loopback network.
pub fn measure() -> std::io::Result<Vec<(&'static str, Duration)>> {
    let mut out = vec![
        ("a run of destinations numbered by its origin", number()),
        ("a copy of a cast made by a relay, to 16 next hops of 625 hosts", relay()),
        ("a run of shares taken", share()),
        ("a reply merged by its agent", merged()),
        ("an answer of a host merged by a relay", relay_merged(true)),
        ("what each of its replies adds, if no two are equal", distinct(relay_merged(true))),
        ("a reply unmerged and put in its place, of 80,000", outcome(true)),
        ("the same, if no two are equal", outcome(false)),
        ("a small packet encoded and decoded", packet()),
    ];
    out.push(("300 bytes through a loopback socket, one way, without TLS", socket()?));
    Ok(out)
}

/// The defaults, with costs measured here where that is possible.
#[must_use]
pub fn costs() -> Costs {
    let (plan, merge) = (relay(), relay_merged(true));
    Costs {
        number: number(),
        plan,
        merge,
        distinct: distinct(merge),
        share: share(),
        outcome: outcome(true),
        ..Costs::default()
    }
}

/// The median of some rounds of `step`, which does `count` things.
fn each(count: u32, mut step: impl FnMut() -> Duration) -> Duration {
    let mut rounds: Vec<Duration> = (0..9).map(|_| step()).collect();
    rounds.sort_unstable();
    rounds[rounds.len() / 2] / count
}

fn whole() -> Topology {
    let mut topology = Topology::new(0);
    topology.add_group(1, HOSTS, 16);
    topology
}

fn cast(peer_streams: &mut PeerStreams, topology: &Topology, hosts: &HostSet) -> Vec<Packet> {
    let mut packets = Vec::new();
    for (hop, share) in topology.plan(0, hosts) {
        let cargo = Cargo { frame: Short::from_iter([Bytes::from_static(&[1; 300])]), lane: lane(0) };
        let _ = peer_streams.post(hop, share, cargo);
        packets.extend(peer_streams.next_packet(hop, Duration::ZERO));
    }
    packets
}

/// Every second host, so that no host shares a run with its neighbour.
fn odd() -> HostSet {
    (1..HOSTS).step_by(2).collect()
}

fn number() -> Duration {
    let topology = whole();
    each(HOSTS / 2, || {
        let mut peer_streams = PeerStreams::new(0, 1 << 20);
        cast(&mut peer_streams, &topology, &odd());
        // By the second time all hosts are known, as nearly always.
        let begun = Instant::now();
        black_box(cast(&mut peer_streams, &topology, &odd()));
        begun.elapsed()
    })
}

fn relay() -> Duration {
    let packets = cast(&mut PeerStreams::new(0, 1 << 20), &whole(), &HostSet::range(1, HOSTS));
    let mut topology = Topology::new(1);
    topology.add_group(1, HOSTS, 16);
    each(16, || {
        let begun = Instant::now();
        let packet = &packets[0];
        for (_, share) in topology.plan(0, &packet.hosts()) {
            black_box(packet.for_hosts(&share));
        }
        begun.elapsed()
    })
}

fn share() -> Duration {
    let mut peer_streams = PeerStreams::new(0, 1 << 20);
    let mut number = 0;
    each(HOSTS / 2, || {
        number += 1;
        let shares = odd().iter().map(|host| Share::one(host, number, 0)).collect();
        let packet = Packet::merged(1, 0, shares, Short::from_iter([Bytes::from_static(b"merged")]));
        let mut arrivals: Vec<Arrival> = Vec::new();
        let begun = Instant::now();
        peer_streams.on_packet(packet, Duration::ZERO, &mut arrivals);
        black_box(arrivals);
        begun.elapsed()
    })
}

fn reply(index: u32, equal: bool) -> Frame {
    let src = ProcAddr { rank: index, ..ProcAddr::agent(1) };
    let reply = Reply { actor: 3, call: 1, place: index, answer: Answer::Value };
    let header = reply.header(src, ProcAddr::CONTROLLER);
    let mut payload = [3; 32];
    if !equal {
        payload[..4].copy_from_slice(&index.to_le_bytes());
    }
    Frame::build_plain(header, None, b"", &payload)
}

fn answer(host: u32, equal: bool) -> Frame {
    let mut merge = HostMerge::new(host, ProcAddr::agent(host));
    let mut out = merge.expect(ProcAddr::CONTROLLER, 1, PROCS);
    for index in (host - 1) * PROCS..host * PROCS {
        out.extend(merge.on_reply(reply(index, equal), Duration::ZERO));
    }
    out.remove(0)
}

fn merged() -> Duration {
    each(1000 * PROCS, || {
        let mut merge = HostMerge::new(1, ProcAddr::agent(1));
        let replies: Vec<Frame> = (0..PROCS).map(|index| reply(index, true)).collect();
        let begun = Instant::now();
        for _ in 0..1000 {
            black_box(merge.expect(ProcAddr::CONTROLLER, 1, PROCS));
            for reply in &replies {
                black_box(merge.on_reply(reply.clone(), Duration::ZERO));
            }
        }
        begun.elapsed()
    })
}

fn answers(hosts: u32, equal: bool) -> Vec<Packet> {
    (1..=hosts)
        .filter_map(|host| {
            let frame = answer(host, equal);
            let mut peer_streams = PeerStreams::new(host, 1 << 20);
            let pieces = [Bytes::copy_from_slice(&frame.header.encode()), frame.body].into();
            let _ = peer_streams.post_one(0, 0, Cargo { frame: pieces, lane: lane(host) });
            peer_streams.next_packet(0, Duration::ZERO)
        })
        .collect()
}

fn relay_merged(equal: bool) -> Duration {
    let packets = answers(625, equal);
    each(625, || {
        let packets = packets.clone();
        let mut relay = RelayMerge::new(1);
        let begun = Instant::now();
        black_box(relay.expect(0, ProcAddr::CONTROLLER, 1, &HostSet::range(1, 625)));
        packets.into_iter().for_each(|packet| drop(black_box(relay.offer(packet, Duration::ZERO))));
        begun.elapsed()
    })
}

/// What each reply adds to an answer that takes `equal` when all are equal, if no two are.
fn distinct(equal: Duration) -> Duration {
    relay_merged(false).saturating_sub(equal) / PROCS
}

fn outcome(equal: bool) -> Duration {
    let mut relay = RelayMerge::new(1);
    let mut out = relay.expect(0, ProcAddr::CONTROLLER, 1, &HostSet::range(1, HOSTS));
    for packet in answers(HOSTS, equal) {
        out.extend(relay.offer(packet, Duration::ZERO));
    }
    let frames: Vec<Frame> = out.iter().filter_map(|packet| Frame::from_pieces(&packet.body)).collect();
    each(HOSTS * PROCS, || {
        let mut places: Vec<Option<Frame>> = vec![None; (HOSTS * PROCS) as usize];
        let begun = Instant::now();
        for frame in &frames {
            // As the gateway does it.
            let Ok(replies) = unmerge(frame, HOSTS * PROCS, |_| true, ProcAddr::agent) else { continue };
            for (place, reply) in replies {
                places[place as usize] = Some(reply);
            }
        }
        let took = begun.elapsed();
        black_box(places);
        took
    })
}

fn packet() -> Duration {
    let packet = answers(1, true).remove(0);
    each(10_000, || {
        let mut decoder = PacketDecoder::default();
        let mut bytes = Vec::new();
        let begun = Instant::now();
        for _ in 0..10_000 {
            bytes.clear();
            packet.write_head(&mut bytes);
            packet.body.iter().for_each(|piece| bytes.extend_from_slice(piece));
            decoder.push(&bytes);
            let _ = black_box(decoder.next_packet());
        }
        begun.elapsed()
    })
}

/// Writing and reading by turns: what one message costs both ends together.
fn socket() -> std::io::Result<Duration> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut there = TcpStream::connect(listener.local_addr()?)?;
    let (mut here, _) = listener.accept()?;
    here.set_nodelay(true)?;
    let mut buffer = [0; 300];
    let begun = Instant::now();
    for _ in 0..10_000 {
        there.write_all(&buffer)?;
        here.read_exact(&mut buffer)?;
    }
    Ok(begun.elapsed() / 10_000)
}

fn lane(host: HostNo) -> Lane {
    Lane { sender: (0, host, host), mesh: 1 }
}
