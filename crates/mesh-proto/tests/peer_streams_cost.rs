//! The cost of peer streams: `cargo test --release -p mesh-proto --test all peer_streams_cost -- --ignored --nocapture`.

use bytes::Bytes;
use mesh_proto::hosts::{Cargo, HostSet, Lane, PacketDecoder, PeerStreams, Short};
use std::time::{Duration, Instant};

const LANE: Lane = Lane { sender: (3, 1, 0), mesh: 9 };

fn per(name: &str, n: u32, mut act: impl FnMut(u32)) {
    (0..n / 10).for_each(&mut act);
    let start = Instant::now();
    (0..n).for_each(&mut act);
    println!("{name:<60} {:>10.0} ns", start.elapsed().as_nanos() as f64 / f64::from(n));
}

fn frame() -> Short<Bytes> {
    Short::from([Bytes::from(vec![1; 80]), Bytes::from(vec![2; 120])])
}

#[test]
#[ignore = "measures, asserts nothing"]
fn figures() {
    per("a frame of 200 bytes made, cloned and dropped (not ours)", 1_000_000, |_| {
        let frame = frame();
        std::hint::black_box(frame.clone());
    });

    let (mut a, mut b) = (PeerStreams::new(0, 8 << 20), PeerStreams::new(1, 8 << 20));
    let mut out = Vec::new();
    let mut now = Duration::ZERO;
    per("ping-pong of 200 bytes: each way post, next_packet, on_packet", 500_000, |_| {
        now += Duration::from_micros(20);
        for (from, to, dest) in [(0, 1, 1), (1, 0, 0)] {
            let (from, to) = if from < to { (&mut a, &mut b) } else { (&mut b, &mut a) };
            assert!(from.post_one(dest, dest, Cargo { frame: frame(), lane: LANE }));
            let packet = from.next_packet(dest, now).unwrap();
            to.on_packet(packet, now, &mut out);
            out.clear();
        }
        if a.next_deadline().is_some_and(|at| at <= now) {
            a.on_tick(now, &mut Vec::new());
        }
        if b.next_deadline().is_some_and(|at| at <= now) {
            b.on_tick(now, &mut Vec::new());
        }
    });

    let mut acks = Vec::new();
    per("stream of 200 bytes: post, next_packet, on_packet, acks", 1_000_000, |_| {
        now += Duration::from_nanos(500);
        assert!(a.post_one(1, 1, Cargo { frame: frame(), lane: LANE }));
        if let Some(packet) = a.next_packet(1, now) {
            b.on_packet(packet, now, &mut out);
            out.clear();
        }
        if b.next_deadline().is_some_and(|at| at <= now) {
            b.on_tick(now, &mut acks);
            acks.drain(..).for_each(|ack| a.on_packet(ack, now, &mut out));
        }
    });

    let mut head = Vec::new();
    let mut decoder = PacketDecoder::default();
    assert!(b.post_one(0, 0, Cargo { frame: frame(), lane: LANE }));
    let packet = b.next_packet(0, now).unwrap();
    per("a packet of 200 bytes written and decoded", 1_000_000, |_| {
        head.clear();
        packet.write_head(&mut head);
        packet.body.iter().for_each(|piece| head.extend_from_slice(piece));
        decoder.push(&head);
        std::hint::black_box(decoder.next_packet().unwrap().unwrap());
    });

    for hosts in [16, 1_000, 10_000, 100_000] {
        let mut root = PeerStreams::new(0, 8 << 20);
        let mut ack = 0;
        let n = 2_000_000 / (hosts + 1_000);
        per(&format!("cast to {hosts} hosts: post and next_packet"), n, |_| {
            assert!(root.post(1, HostSet::range(1, hosts), Cargo { frame: frame(), lane: LANE }).is_empty());
            assert_eq!(root.next_packet(1, now).unwrap().dests.len(), 1);
        });
        per(&format!("one merged ack of {hosts} hosts"), n, |_| {
            ack += 1;
            let mut packet = mesh_proto::hosts::Packet::new(mesh_proto::hosts::PacketKind::Ack, 1);
            packet.shares = Short::from_iter([mesh_proto::hosts::Share { first: 1, count: hosts, seq: 0, ack }]);
            root.on_packet(packet, now, &mut out);
        });
        assert!(root.is_idle());
    }

    let body = Bytes::from(vec![0; 256 << 20]);
    let start = Instant::now();
    assert!(a.post_one(1, 1, Cargo { frame: Short::from_iter([body]), lane: LANE }));
    let mut packets = 0;
    while a.waiting(1) > 0 {
        now += Duration::from_micros(50);
        while let Some(packet) = a.next_packet(1, now) {
            packets += 1;
            b.on_packet(packet, now, &mut out);
            out.clear();
            if b.next_deadline().is_some_and(|at| at <= now) {
                b.on_tick(now, &mut acks);
                acks.drain(..).for_each(|ack| a.on_packet(ack, now, &mut out));
            }
        }
    }
    println!("256 MiB in {packets} segments without a wire: {:?}", start.elapsed());
}
