//! Peer streams between hosts: order and exactly-once delivery.

use bytes::Bytes;
use mesh_proto::hosts::{Arrival, Cargo, HostSet, Lane, Packet, PacketKind, PeerStreams, SEGMENT, Share, Short};
use std::time::Duration;

const T0: Duration = Duration::ZERO;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn lane(n: u64) -> Lane {
    Lane { sender: (n, 0, 0), mesh: 9 }
}

fn cargo(n: u64, bytes: impl Into<Bytes>) -> Cargo {
    Cargo { frame: Short::from_iter([bytes.into()]), lane: lane(n) }
}

/// The arrivals, each as contiguous bytes.
fn bytes(arrivals: &[Arrival]) -> Vec<Vec<u8>> {
    let join = |body: &Short<Bytes>| body.concat();
    arrivals
        .iter()
        .map(|arrival| match arrival {
            Arrival::Piece { body, .. } | Arrival::Merged { body, .. } => join(body),
        })
        .collect()
}

fn take(to: &mut PeerStreams, packet: &Packet, now: Duration) -> Vec<Arrival> {
    let mut out = Vec::new();
    to.on_packet(packet.clone(), now, &mut out);
    out
}

#[test]
fn what_comes_twice_or_early_is_delivered_once_and_in_order() {
    // STR-1
    let (mut a, mut b) = (PeerStreams::new(0, 1 << 20), PeerStreams::new(1, 1 << 20));
    let packets: Vec<Packet> = (0..4_u8)
        .map(|n| {
            assert!(a.post_one(1, 1, cargo(0, vec![n; 10])));
            a.next_packet(1, T0).unwrap()
        })
        .collect();
    let mut seen = Vec::new();
    for at in [2, 0, 0, 2, 3, 1, 1, 3] {
        seen.extend(bytes(&take(&mut b, &packets[at], T0)));
    }
    assert_eq!(seen, (0..4).map(|n| vec![n; 10]).collect::<Vec<_>>());
    assert_eq!(b.held(), 0);
    let mut acks = Vec::new();
    b.on_tick(ms(20), &mut acks);
    assert_eq!(acks.len(), 1);
    assert!(a.outstanding(1) > 0);
    take(&mut a, &acks[0], ms(21));
    assert_eq!(a.outstanding(1), 0);
    assert!(a.is_idle() && b.is_idle());
}

#[test]
fn a_reply_carries_the_ack() {
    let (mut a, mut b) = (PeerStreams::new(0, 1 << 20), PeerStreams::new(1, 1 << 20));
    assert!(a.post_one(1, 1, cargo(0, "call")));
    take(&mut b, &a.next_packet(1, T0).unwrap(), T0);
    assert!(b.post_one(0, 0, cargo(0, "reply")));
    take(&mut a, &b.next_packet(0, T0).unwrap(), T0);
    assert_eq!(a.outstanding(1), 0);
    let mut out = Vec::new();
    b.on_tick(ms(500), &mut out);
    assert!(out.is_empty(), "STR-5: the ack was said with the reply");
}

#[test]
fn a_long_frame_is_cut_and_does_not_hold_up_another_lane() {
    let (mut a, mut b) = (PeerStreams::new(0, 64 << 20), PeerStreams::new(1, 64 << 20));
    let long: Vec<u8> = (0..3 * SEGMENT + 7).map(|n| n as u8).collect();
    let frame = Short::from([Bytes::from(long[..80].to_vec()), Bytes::from(long[80..].to_vec())]);
    assert!(a.post_one(1, 1, Cargo { frame, lane: lane(1) }));
    assert!(a.post_one(1, 1, cargo(2, "small")));
    assert_eq!(a.waiting(1), long.len() as u64 + 5);
    let mut whole = Vec::new();
    let mut order = Vec::new();
    while let Some(packet) = a.next_packet(1, T0) {
        for arrival in take(&mut b, &packet, T0) {
            let Arrival::Piece { message, offset, total, body, .. } = arrival else { panic!("merged") };
            if message == 0 {
                order.push("small");
            } else {
                assert_eq!((offset, total), (whole.len() as u64, long.len() as u64));
                whole.extend(body.concat());
                order.push("segment");
            }
        }
    }
    assert_eq!(order, ["segment", "small", "segment", "segment", "segment"]);
    assert_eq!(whole, long);
    assert_eq!(a.waiting(1), 0);
}

#[test]
fn a_cast_has_one_run_where_numbers_are_equal() {
    let mut a = PeerStreams::new(0, 1 << 20);
    assert!(a.post(1, HostSet::range(1, 10_000), cargo(0, "all")).is_empty());
    assert_eq!(a.next_packet(1, T0).unwrap().dests.len(), 1);
    assert!(a.post_one(1, 500, cargo(0, "one")));
    a.next_packet(1, T0).unwrap();
    assert!(a.post(1, HostSet::range(1, 10_000), cargo(0, "all")).is_empty());
    let packet = a.next_packet(1, T0).unwrap();
    assert_eq!(
        packet.dests.iter().map(|dest| (dest.first, dest.count, dest.seq)).collect::<Vec<_>>(),
        [(1, 499, 2), (500, 1, 3), (501, 9500, 2)]
    );
}

#[test]
fn the_window_holds_back_one_host_and_an_ack_opens_it() {
    // STR-4
    let (mut a, mut b) = (PeerStreams::new(0, 10_000), PeerStreams::new(1, 10_000));
    for _ in 0..10 {
        assert!(a.post_one(1, 1, cargo(0, vec![0; 3000])));
    }
    let mut sent = Vec::new();
    while let Some(packet) = a.next_packet(1, T0) {
        sent.push(packet);
    }
    assert_eq!(sent.len(), 3);
    assert!(a.outstanding(1) <= 10_000);
    assert!(a.post_one(2, 2, cargo(0, "other")));
    assert!(a.next_packet(2, T0).is_some());
    sent.iter().for_each(|packet| drop(take(&mut b, packet, T0)));
    let mut acks = Vec::new();
    b.on_tick(ms(20), &mut acks);
    assert!(a.take_ready().is_empty());
    take(&mut a, &acks[0], ms(20));
    assert_eq!(a.take_ready(), [1]);
    assert!(a.next_packet(1, ms(20)).is_some());
}

#[test]
fn a_lane_does_not_overtake_itself_by_another_way() {
    // STR-2
    let mut a = PeerStreams::new(5, 1 << 20);
    assert!(a.post(1, HostSet::range(1, 3), cargo(0, "cast")).is_empty());
    assert!(a.post_one(2, 2, cargo(0, "single")));
    assert!(a.post_one(2, 2, cargo(1, "another lane")));
    assert_eq!(a.next_packet(2, T0).unwrap().body.concat(), b"another lane");
    assert!(a.next_packet(2, T0).is_none());
    a.next_packet(1, T0).unwrap();
    assert_eq!(a.take_ready(), [2]);
    let packet = a.next_packet(2, T0).unwrap();
    assert_eq!((packet.seq_for(2), &*packet.body.concat()), (Some(3), &b"single"[..]));
}

#[test]
fn what_was_lost_is_sent_again_when_the_path_changes() {
    // STR-3
    let (mut a, mut b) = (PeerStreams::new(0, 1 << 20), PeerStreams::new(7, 1 << 20));
    for n in 0..3_u8 {
        assert!(a.post(1, HostSet::from_iter([7, 8]), cargo(0, vec![n])).is_empty());
    }
    a.next_packet(1, T0).unwrap();
    a.next_packet(1, T0).unwrap();
    assert_eq!(a.through(1), HostSet::from_iter([7, 8]));
    a.reroute(&HostSet::one(7), &|_| Some(2));
    assert_eq!(a.take_ready().into_iter().collect::<HostSet>(), HostSet::from_iter([1, 2]));
    let mut seen = Vec::new();
    while let Some(packet) = a.next_packet(2, T0) {
        seen.extend(bytes(&take(&mut b, &packet, T0)));
    }
    assert_eq!(seen, [[0], [1], [2]]);
    assert_eq!(a.next_packet(1, T0).unwrap().hosts(), HostSet::one(8));
}

#[test]
fn what_was_lost_silently_is_found_out_in_time() {
    // STR-3
    let (mut a, mut b) = (PeerStreams::new(0, 1 << 20), PeerStreams::new(1, 1 << 20));
    for n in 0..100_u8 {
        assert!(a.post_one(1, 1, cargo(0, vec![n])));
        a.next_packet(1, T0).unwrap();
    }
    let mut seen = Vec::new();
    let mut packets = 0;
    while a.outstanding(1) > 0 {
        let now = [a.next_deadline(), b.next_deadline()].into_iter().flatten().min().unwrap();
        assert!(now < ms(3000), "still under way at {now:?}");
        let (mut forth, mut back) = (Vec::new(), Vec::new());
        a.on_tick(now, &mut forth);
        b.on_tick(now, &mut back);
        back.iter().for_each(|ack| drop(take(&mut a, ack, now)));
        while let Some(packet) = a.next_packet(1, now) {
            packets += 1;
            seen.extend(bytes(&take(&mut b, &packet, now)));
        }
    }
    assert_eq!(seen, (0..100).map(|n| vec![n]).collect::<Vec<_>>());
    assert_eq!(packets, 100, "nothing was sent more often than needed");
}

#[test]
fn what_an_ended_host_did_not_acknowledge_is_told() {
    // STR-6
    let mut a = PeerStreams::new(0, 1 << 20);
    let frame = Short::from([Bytes::from(vec![1; 80]), Bytes::from(vec![2; 2 * SEGMENT])]);
    assert!(a.post_one(1, 1, cargo(0, "small")));
    assert!(a.post_one(1, 1, Cargo { frame: frame.clone(), lane: lane(0) }));
    assert!(a.post(1, HostSet::range(1, 2), cargo(0, "cast")).is_empty());
    for _ in 0..3 {
        a.next_packet(1, T0).unwrap();
    }
    let lost: Vec<Vec<u8>> = a.end(1).iter().map(|lost| lost.frame.concat()).collect();
    assert_eq!(lost, [b"small".to_vec(), frame.concat(), b"cast".to_vec()]);
    assert!(!a.post_one(1, 1, cargo(0, "late")));
    assert_eq!(a.post(1, HostSet::range(1, 2), cargo(0, "late")), HostSet::one(1));
    assert_eq!(a.next_packet(1, T0).unwrap().hosts(), HostSet::one(2));
    let mut late = PeerStreams::new(1, 1 << 20);
    assert!(late.post_one(0, 0, cargo(0, "late")));
    assert!(take(&mut a, &late.next_packet(0, T0).unwrap(), T0).is_empty());
}

#[test]
fn parts_of_a_merged_packet_count_each_by_its_own_number() {
    // STR-1
    let mut root = PeerStreams::new(0, 1 << 20);
    let mut hosts: Vec<PeerStreams> = (1..=4).map(|me| PeerStreams::new(me, 1 << 20)).collect();
    assert!(root.post(1, HostSet::range(1, 4), cargo(0, "call")).is_empty());
    let call = root.next_packet(1, T0).unwrap();
    hosts.iter_mut().for_each(|host| drop(take(host, &call, T0)));
    // An earlier message of host 3 is still on its way, and host 4's reply has arrived by itself already.
    assert!(hosts[2].post_one(1, 0, cargo(0, "earlier")));
    let earlier = hosts[2].next_packet(1, T0).unwrap();
    let replies: Vec<Packet> = hosts
        .iter_mut()
        .map(|host| {
            assert!(host.post_one(1, 0, cargo(0, "reply")));
            host.next_packet(1, T0).unwrap()
        })
        .collect();
    assert_eq!(take(&mut root, &replies[3], T0).len(), 1);
    let shares: Vec<Share> = replies.iter().map(|reply| reply.share().unwrap()).collect();
    let merged = Packet::merged(1, 0, shares, Short::from_iter([Bytes::from_static(b"merged")]));
    assert_eq!(merged.kind, PacketKind::Data);
    let body = Short::from_iter([Bytes::from_static(b"merged")]);
    let now = take(&mut root, &merged, T0);
    assert_eq!(now, [Arrival::Merged { origins: HostSet::range(1, 2), body: body.clone() }]);
    assert!((1..=4).all(|host| root.outstanding(host) == 0), "shares acknowledge");
    let then = take(&mut root, &earlier, T0);
    assert!(matches!(&then[..], [Arrival::Piece { origin: 3, .. }, Arrival::Merged { origins, .. }]
        if *origins == HostSet::one(3)));
    assert!(take(&mut root, &merged, T0).is_empty());
}

#[test]
fn acks_become_one_on_the_way_up() {
    let mut root = PeerStreams::new(0, 1 << 20);
    assert!(root.post(1, HostSet::range(1, 50), cargo(0, "all")).is_empty());
    let cast = root.next_packet(1, T0).unwrap();
    let mut relay = PeerStreams::new(1, 1 << 20);
    take(&mut relay, &cast, T0);
    for me in 2..=50 {
        let mut leaf = PeerStreams::new(me, 1 << 20);
        take(&mut leaf, &cast, T0);
        let mut acks = Vec::new();
        leaf.on_tick(ms(20), &mut acks);
        assert!(relay.pass_ack(&acks[0], ms(20)));
    }
    let mut acks = Vec::new();
    relay.on_tick(ms(25), &mut acks);
    assert_eq!(acks.len(), 1);
    assert_eq!(&*acks[0].shares, [Share { first: 1, count: 50, seq: 0, ack: 1 }]);
    take(&mut root, &acks[0], ms(25));
    assert!(root.is_idle());
}

#[test]
fn a_gap_is_told_and_filled_long_before_a_timeout() {
    // STR-3
    let (mut a, mut b) = (PeerStreams::new(0, 1 << 20), PeerStreams::new(1, 1 << 20));
    let mut packets: Vec<Packet> = Vec::new();
    for n in 0..10_u8 {
        assert!(a.post_one(1, 1, cargo(0, vec![n])));
        packets.push(a.next_packet(1, T0).unwrap());
    }
    for at in [0, 2, 5, 6, 9] {
        take(&mut b, &packets[at], T0);
    }
    let mut told = Vec::new();
    b.on_tick(ms(20), &mut told);
    take(&mut a, &told.remove(0), ms(20));
    b.on_tick(b.next_deadline().unwrap(), &mut told);
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].gaps().map(|gap| (gap.first, gap.count)).collect::<Vec<_>>(), [(2, 1), (4, 2), (8, 2)]);
    take(&mut a, &told[0], ms(100));
    let mut seen = Vec::new();
    while let Some(packet) = a.next_packet(1, ms(100)) {
        seen.extend(bytes(&take(&mut b, &packet, ms(100))));
    }
    assert_eq!(seen, (1..10).map(|n| vec![n]).collect::<Vec<_>>());
}

#[test]
fn what_comes_early_is_held_within_the_window_whatever_the_sender_does() {
    // STR-4
    let (mut a, mut b) = (PeerStreams::new(0, 64 << 20), PeerStreams::new(1, 100_000));
    let mut packets: Vec<Packet> = Vec::new();
    for n in 0..100_u8 {
        assert!(a.post_one(1, 1, cargo(0, vec![n; 10_000])));
        packets.push(a.next_packet(1, T0).unwrap());
    }
    for packet in &packets[1..] {
        assert!(take(&mut b, packet, T0).is_empty());
        assert!(b.held() <= 100_000);
    }
    let mut seen = bytes(&take(&mut b, &packets[0], T0)).len();
    for packet in &packets {
        seen += take(&mut b, packet, T0).len();
    }
    assert_eq!(seen, 100, "what there was no room for is taken when it comes again");
}

#[test]
fn acks_and_gaps_of_what_was_never_sent_are_not_believed() {
    let mut a = PeerStreams::new(0, 1 << 20);
    assert!(a.post_one(1, 1, cargo(0, "one")));
    a.next_packet(1, T0).unwrap();
    let mut lie = Packet::new(PacketKind::Ack, 1);
    lie.dests = Short::from_iter([mesh_proto::hosts::Dest::one(0, 1000)]);
    take(&mut a, &lie, T0);
    lie.shares = Short::from_iter([Share { first: 0, count: 1 << 20, seq: 0, ack: u64::MAX }]);
    take(&mut a, &lie, T0);
    assert!(a.outstanding(1) > 0);
    let gaps = [(0, u64::MAX), (u64::MAX, u64::MAX), (5, 0)];
    let gaps = gaps.map(|(first, count)| mesh_proto::hosts::Gap { first, count });
    take(&mut a, &Packet::nack(1, 0, u64::MAX, &gaps), T0);
    assert_eq!(a.next_packet(1, T0).unwrap().seq_for(1), Some(1));
    assert!(a.next_packet(1, T0).is_none());
}

#[test]
fn numbers_that_all_differ_take_several_packets() {
    let hosts = 3 * mesh_proto::hosts::MAX_RUNS as u32;
    let mut a = PeerStreams::new(0, 64 << 20);
    for host in (1..=hosts).step_by(2) {
        assert!(a.post_one(9, host, cargo(0, "one")));
        a.next_packet(9, T0).unwrap();
    }
    let frame = Bytes::from(vec![5; SEGMENT + 1]);
    assert!(a.post(9, HostSet::range(1, hosts), cargo(0, frame.clone())).is_empty());
    let check = |a: &mut PeerStreams| {
        let mut got = std::collections::BTreeMap::<u32, usize>::new();
        while let Some(packet) = a.next_packet(9, T0) {
            assert!(packet.encode_head().len() < 512 << 10);
            for host in packet.hosts().iter().filter(|_| packet.total > 3) {
                let have = got.entry(host).or_default();
                assert_eq!(*have as u64, packet.offset, "host {host}");
                *have += packet.body_len();
            }
        }
        assert!((1..=hosts).all(|host| got.get(&host) == Some(&frame.len())));
        assert_eq!(got.len() as u32, hosts);
    };
    check(&mut a);
    assert_eq!(a.waiting(9), 0);
    a.reroute(&HostSet::range(1, hosts), &|_| Some(9));
    check(&mut a);
}

#[test]
fn an_ack_that_is_due_is_not_forgotten_when_hosts_become_alike() {
    // Hosts 1 and 2 acknowledge together while only host 2 is still owed an acknowledgement.
    let mut root = PeerStreams::new(0, 1 << 20);
    let mut hosts = [PeerStreams::new(1, 1 << 20), PeerStreams::new(2, 1 << 20)];
    assert!(hosts.iter_mut().all(|host| host.post_one(0, 0, cargo(0, "up"))));
    let up: Vec<Packet> = hosts.iter_mut().map(|host| host.next_packet(0, T0).unwrap()).collect();
    take(&mut root, &up[0], T0);
    assert!(root.post_one(1, 1, cargo(0, "down")));
    root.next_packet(1, T0).unwrap();
    take(&mut root, &up[1], T0);
    assert!(root.post_one(2, 2, cargo(1, "down")));
    let second = root.next_packet(2, T0).unwrap();
    take(&mut root, &up[1], T0);
    assert_eq!(second.ack, 1);
    let mut both = Packet::new(PacketKind::Ack, 1);
    both.shares = Short::from_iter([Share { first: 1, count: 2, seq: 0, ack: 1 }]);
    take(&mut root, &both, T0);
    let mut out = Vec::new();
    root.on_tick(ms(20), &mut out);
    assert!(out.iter().any(|packet| packet.seq_for(2) == Some(1)), "{out:?}");
}

#[test]
fn a_host_that_is_behind_holds_up_nobody_else() {
    // STR-2, STR-4
    let mut a = PeerStreams::new(0, 3_000);
    let mut hosts: Vec<PeerStreams> = (1..=4).map(|me| PeerStreams::new(me, 3_000)).collect();
    let mut came = vec![Vec::new(); 4];
    for n in 0..20_u8 {
        assert!(a.post(1, HostSet::range(1, 4), cargo(0, vec![n; 500])).is_empty());
        assert!(a.post_one(1, 1 + u32::from(n) % 4, cargo(0, vec![100 + n; 100])));
        // Host 3 is never heard from.
        let mut packets = Vec::new();
        while let Some(packet) = a.next_packet(1, T0) {
            packets.push(packet);
        }
        for packet in packets {
            for me in packet.hosts().iter().filter(|me| *me != 3) {
                let arrived = take(&mut hosts[me as usize - 1], &packet, T0);
                came[me as usize - 1].extend(bytes(&arrived).iter().map(|bytes| bytes[0]));
                let mut ack = Packet::new(PacketKind::Ack, me);
                ack.shares = Short::from_iter([Share::one(me, 0, packet.seq_for(me).unwrap())]);
                take(&mut a, &ack, T0);
            }
        }
    }
    let all = |me: u8| (0..20).flat_map(move |n| [Some(n), (n % 4 + 1 == me).then_some(100 + n)]).flatten();
    for me in [1, 2, 4] {
        assert_eq!(came[usize::from(me) - 1], all(me).collect::<Vec<u8>>());
    }
    assert!(a.outstanding(3) <= 3_000);
    // Then it is, and gets everything in order too.
    a.reroute(&HostSet::one(3), &|_| Some(1));
    while let Some(packet) = a.next_packet(1, T0) {
        came[2].extend(bytes(&take(&mut hosts[2], &packet, T0)).iter().map(|bytes| bytes[0]));
        let mut ack = Packet::new(PacketKind::Ack, 3);
        ack.shares = Short::from_iter([Share::one(3, 0, packet.seq_for(3).unwrap())]);
        take(&mut a, &ack, T0);
    }
    assert_eq!(came[2], all(3).collect::<Vec<u8>>());
    assert!(a.is_idle());
}

#[test]
fn what_is_lost_is_sent_again_in_time_for_a_short_window_too() {
    for (window, first) in [(10_000, 2_000), (1_000, 250), (50, 100)] {
        let mut streams = PeerStreams::new(0, 1 << 20);
        streams.resend_within(ms(window));
        assert!(streams.post_one(1, 1, cargo(0, "lost")));
        let lost = streams.next_packet(1, T0).unwrap();
        assert!(streams.next_packet(1, T0).is_none());
        let mut due = T0;
        // Each wait is twice as long, up to four times the first.
        for wait in [first, 2 * first, 4 * first, 4 * first] {
            due += ms(wait);
            assert_eq!(streams.next_deadline(), Some(due), "for a window of {window} ms");
            streams.on_tick(due, &mut Vec::new());
            assert_eq!(streams.take_ready(), [1]);
            assert_eq!(streams.next_packet(1, due).unwrap(), lost);
        }
    }
}
