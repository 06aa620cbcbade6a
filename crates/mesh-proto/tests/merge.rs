//! Replies on their way up: what goes in comes out, with random arrivals.

use crate::support::config;
use crate::support::dice::Dice;
use bytes::Bytes;
use mesh_proto::hosts::{
    Dest, HOLD, HostMerge, HostSet, MERGE_LIMIT, Packet, PacketKind, RelayMerge, Share, Short, origins, unmerge,
};
use mesh_proto::messages::{Answer, Gathered, Meaning, Reply, Tell};
use mesh_proto::{Decoder, Frame, HostNo, Kind, Part, ProcAddr, Sharing};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

fn addr(rank: u32) -> ProcAddr {
    let mut addr = ProcAddr::CONTROLLER;
    (addr.mesh, addr.rank) = (9, rank);
    addr
}

fn agent(host: HostNo) -> ProcAddr {
    ProcAddr { rank: host, ..ProcAddr::CONTROLLER }
}

fn reply(from: u32, to: ProcAddr, call: u64, payload: &[u8]) -> Frame {
    let reply = Reply { actor: 3, call, place: from, answer: Answer::Value };
    Frame::build_plain(reply.header(addr(from), to), None, b"", payload)
}

/// A frame from `host` on its way to host 0.
fn packet(host: HostNo, number: u64, frame: &Frame) -> Packet {
    let mut packet = Packet::new(PacketKind::Data, host);
    packet.dests = Short::from_iter([Dest::one(0, number)]);
    packet.body = [Bytes::copy_from_slice(&frame.header.encode()), frame.body.clone()].into();
    packet.total = packet.body_len() as u64;
    packet.ack = 40;
    packet
}

/// The frame that arrived.
fn frame_in(packet: &Packet) -> Frame {
    let mut decoder = Decoder::default();
    packet.body.iter().for_each(|piece| decoder.push(piece));
    decoder.next_frame().unwrap().unwrap()
}

fn at(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

fn is_same_answer(a: &Frame, b: &Frame) -> bool {
    let all = |frame: &Frame| {
        let header = frame.header;
        (Meaning::of(&header), header.sharing(), header.is_charged(), header.parts)
    };
    all(a) == all(b) && a.body == b.body
}

/// Reads a reply.
fn read(frame: &Frame) -> Reply {
    Reply::read(&frame.header).unwrap()
}

/// The call that a frame is about.
fn call_of(frame: &Frame) -> u64 {
    Meaning::of(&frame.header).unwrap().call()
}

/// The frames that a receiver extracts.
fn replies(frame: &Frame, places: u32) -> Vec<Frame> {
    if frame.header.kind == Kind::Gathered {
        unmerge(frame, places, |_| true, addr).unwrap().map(|(_, frame)| frame).collect()
    } else {
        vec![frame.clone()]
    }
}

#[test]
fn equal_replies_of_many_hosts_are_one_payload_and_one_run() {
    let (hosts, procs) = (100, 8);
    let mut relay = RelayMerge::new(1);
    assert!(relay.expect(0, ProcAddr::CONTROLLER, 5, &HostSet::range(1, hosts)).is_empty());
    let mut up = Vec::new();
    for host in (1..=hosts).rev() {
        let mut merge = HostMerge::new(host, agent(host));
        assert!(merge.expect(ProcAddr::CONTROLLER, 5, procs).is_empty());
        for proc in [3, 1, 0, 2, 7, 6, 5, 4] {
            let index = (host - 1) * procs + proc;
            let out = merge.on_reply(reply(index, ProcAddr::CONTROLLER, 5, &[7; 3000]), at(10));
            for frame in out {
                assert_eq!(proc, 4, "all eight at once");
                assert_eq!((frame.header.src, frame.header.dst), (agent(host), ProcAddr::CONTROLLER));
                up.extend(relay.offer(packet(host, if host > 50 { 7 } else { 9 }, &frame), at(20)));
            }
        }
        assert!(merge.is_empty() && merge.next_deadline().is_none());
    }
    let [packet] = &up[..] else { panic!("{} packets", up.len()) };
    assert_eq!((packet.origin, packet.sole()), (1, Some(0)));
    let shares = [Share { first: 1, count: 50, seq: 9, ack: 40 }, Share { first: 51, count: 50, seq: 7, ack: 40 }];
    assert_eq!(*packet.shares, shares);
    let frame = &frame_in(packet);
    assert!(frame.body.len() < 3000 + 100, "{} bytes", frame.body.len());
    assert_eq!(origins(frame).unwrap(), HostSet::range(1, hosts));
    assert_eq!(replies(frame, hosts * procs).len() as u32, hosts * procs);
    // Each host's share separately.
    let taken: Vec<u32> =
        unmerge(frame, hosts * procs, |host| host == 2 || host == 9, addr).unwrap().map(|(index, _)| index).collect();
    assert_eq!(taken, (8..16).chain(64..72).collect::<Vec<_>>());
    assert!(relay.is_empty());
}

#[test]
fn replies_of_which_no_two_are_equal_are_a_series() {
    let (hosts, procs) = (50, 8);
    let payload = |index: u32| [&index.to_le_bytes()[..], &vec![7; 4 + index as usize % 9]].concat();
    let mut relay = RelayMerge::new(1);
    assert!(relay.expect(0, ProcAddr::CONTROLLER, 5, &HostSet::range(1, hosts)).is_empty());
    let mut up = Vec::new();
    for host in (1..=hosts).rev() {
        let mut merge = HostMerge::new(host, agent(host));
        assert!(merge.expect(ProcAddr::CONTROLLER, 5, procs).is_empty());
        for proc in [3, 1, 0, 2, 7, 6, 5, 4] {
            let index = (host - 1) * procs + proc;
            for frame in merge.on_reply(reply(index, ProcAddr::CONTROLLER, 5, &payload(index)), at(10)) {
                up.extend(relay.offer(packet(host, 7, &frame), at(20)));
            }
        }
    }
    let [packet] = &up[..] else { panic!("{} packets", up.len()) };
    let frame = &frame_in(packet);
    let all: usize = (0..hosts * procs).map(|index| reply(index, agent(0), 5, &payload(index)).body.len()).sum();
    assert!(frame.body.len() < all + 4 * (hosts * procs) as usize + 60, "{} bytes for {all}", frame.body.len());
    assert_eq!(origins(frame).unwrap(), HostSet::range(1, hosts));
    let expected = |index: u32| reply(index, ProcAddr::CONTROLLER, 5, &payload(index));
    let got = replies(frame, hosts * procs);
    assert_eq!(got.iter().map(|frame| read(frame).place).collect::<Vec<_>>(), (0..hosts * procs).collect::<Vec<_>>());
    assert!(got.iter().all(|frame| *frame == expected(read(frame).place)));
    // Each host's share separately.
    let taken = unmerge(frame, hosts * procs, |host| host == 2 || host == 9, addr).unwrap();
    let taken: Vec<Frame> = taken.map(|(_, frame)| frame).collect();
    let places: Vec<u32> = taken.iter().map(|frame| read(frame).place).collect();
    assert_eq!(places, (8..16).chain(64..72).collect::<Vec<_>>());
    assert!(taken.iter().all(|frame| *frame == expected(read(frame).place)));
}

#[test]
fn replies_of_processes_that_have_printed_are_merged_and_stay_marked() {
    let mut merge = HostMerge::new(4, agent(4));
    assert!(merge.expect(ProcAddr::CONTROLLER, 1, 3).is_empty());
    let mut out = Vec::new();
    for rank in 0..3 {
        let mut frame = reply(rank, ProcAddr::CONTROLLER, 1, b"done");
        if rank == 1 {
            frame.header.set_printed();
        }
        out.extend(merge.on_reply(frame, at(0)));
    }
    assert_eq!(out.len(), 1);
    let mut marks: Vec<_> = replies(&out[0], 3).iter().map(|one| (read(one).place, one.header.has_printed())).collect();
    marks.sort_unstable();
    assert_eq!(marks, [(0, false), (1, true), (2, false)]);
}

#[test]
fn a_reply_waits_for_others_no_longer_than_the_hold() {
    let mut merge = HostMerge::new(4, agent(4));
    assert!(merge.expect(ProcAddr::CONTROLLER, 1, 2).is_empty());
    assert!(merge.on_reply(reply(0, ProcAddr::CONTROLLER, 1, b"a"), at(100)).is_empty());
    assert_eq!(merge.next_deadline(), Some(at(100) + HOLD));
    assert!(merge.on_tick(at(1_099)).is_empty());
    assert_eq!(replies(&merge.on_tick(at(1_100)).remove(0), 2).len(), 1);
    assert_eq!(merge.next_deadline(), None);
    // The last one is not held: no other is expected.
    assert_eq!(merge.on_reply(reply(1, ProcAddr::CONTROLLER, 1, b"a"), at(9_000)).len(), 1);
    assert!(merge.is_empty());
}

#[test]
fn what_is_large_streamed_or_shared_goes_by_itself_and_counts() {
    let large = vec![1; MERGE_LIMIT + 1];
    for (shared, charged, payload) in [(false, false, &large[..]), (true, false, b"x"), (false, true, b"x")] {
        let mut merge = HostMerge::new(4, agent(4));
        assert!(merge.expect(ProcAddr::CONTROLLER, 1, 2).is_empty());
        assert!(merge.on_reply(reply(0, ProcAddr::CONTROLLER, 1, b"a"), at(0)).is_empty());
        let mut apart = reply(1, ProcAddr::CONTROLLER, 1, payload);
        apart.header.set_sharing(Sharing { sole: false, shared });
        apart.header.set_charged(charged);
        let out = merge.on_reply(apart.clone(), at(1));
        assert_eq!(out.len(), 2, "it was the last: {shared} {charged}");
        assert_eq!(out[0].header.kind, Kind::Gathered);
        assert_eq!(out[1], apart);
        assert!(merge.is_empty());
    }
    // A value of a stream is not the answer.
    let mut merge = HostMerge::new(4, agent(4));
    assert!(merge.expect(ProcAddr::CONTROLLER, 1, 1).is_empty());
    let more = Reply { actor: 3, call: 1, place: 0, answer: Answer::More }.header(addr(0), ProcAddr::CONTROLLER);
    let more = Frame::build_plain(more, None, b"", b"v");
    assert_eq!(merge.on_reply(more.clone(), at(0)), [more]);
    assert!(!merge.is_empty());
}

#[test]
fn a_combined_reply_waits_for_nobody_and_is_the_last() {
    let mut merge = HostMerge::new(4, agent(4));
    assert!(merge.expect(ProcAddr::CONTROLLER, 1, 3).is_empty());
    let all = Reply { actor: 3, call: 1, place: 0, answer: Answer::Combined }.header(addr(0), ProcAddr::CONTROLLER);
    let mut all = Frame::build_plain(all, None, b"", b"6");
    all.header.set_printed();
    assert_eq!(merge.on_reply(all.clone(), at(0)), [all]);
    assert!(merge.is_empty());
    assert_eq!(merge.next_deadline(), None);
}

#[test]
fn nothing_overtakes_what_the_same_proc_sent_before() {
    let mut merge = HostMerge::new(4, agent(4));
    let caller = ProcAddr::CONTROLLER;
    for call in [1, 2] {
        assert!(merge.expect(caller, call, 3).is_empty());
    }
    // A reply to call 2 is held first; then proc 0 answers call 1, and call 2 after it.
    assert!(merge.on_reply(reply(1, caller, 2, b"a"), at(0)).is_empty());
    assert!(merge.on_reply(reply(0, caller, 1, b"b"), at(1)).is_empty());
    let out = merge.on_reply(reply(0, caller, 2, b"c"), at(2));
    assert_eq!(out.iter().map(call_of).collect::<Vec<_>>(), [2, 1], "then 0's to call 2 is held");
    // It goes when proc 0 sends something else to the same receiver.
    assert!(merge.before(addr(0), addr(77)).is_empty());
    assert!(merge.before(addr(5), caller).is_empty());
    assert_eq!(merge.before(addr(0), caller).iter().map(call_of).collect::<Vec<_>>(), [2]);
    assert!(merge.before(addr(0), caller).is_empty());
}

/// MRG-4.
#[test]
fn calls_that_are_never_answered_do_not_pile_up() {
    let mut merge = HostMerge::new(4, agent(4));
    let mut out = Vec::new();
    for call in 1..=20_000 {
        out.extend(merge.expect(ProcAddr::CONTROLLER, call, 2));
        out.extend(merge.on_reply(reply(0, ProcAddr::CONTROLLER, call, b"half"), at(call)));
    }
    // Those that had to go were sent, and late answers to them go by themselves.
    assert!(out.len() > 10_000 && out.iter().all(|frame| frame.header.kind == Kind::Gathered));
    assert_eq!(merge.on_reply(reply(1, ProcAddr::CONTROLLER, 1, b"late"), at(0))[0].header.kind, Kind::Reply);
    merge.end(|caller| caller == ProcAddr::CONTROLLER);
    assert!(merge.is_empty() && merge.next_deadline().is_none());
    let mut relay = RelayMerge::new(9);
    for call in 1..=20_000 {
        assert!(relay.expect(0, ProcAddr::CONTROLLER, call, &HostSet::range(1, 3)).is_empty());
    }
    relay.end(0);
    assert!(relay.is_empty());
}

#[test]
fn a_relay_waits_for_a_host_until_all_its_procs_have_answered() {
    let caller = ProcAddr::CONTROLLER;
    let mut relay = RelayMerge::new(1);
    let mut hosts = [1, 2].map(|host| HostMerge::new(host, agent(host)));
    assert!(relay.expect(0, caller, 1, &HostSet::range(1, 2)).is_empty());
    hosts.iter_mut().for_each(|host| assert!(host.expect(caller, 1, 2).is_empty()));
    let mut numbers = [0; 2];
    let mut up = |relay: &mut RelayMerge, host: usize, frames: Vec<Frame>, now| {
        numbers[host] += 1;
        let host_no = HostNo::try_from(host).unwrap() + 1;
        frames.iter().flat_map(|frame| relay.offer(packet(host_no, numbers[host], frame), now)).collect::<Vec<_>>()
    };
    for (host, merge) in hosts.iter_mut().enumerate() {
        assert!(merge.on_reply(reply(2 * host as u32, caller, 1, b"a"), at(0)).is_empty());
        let first = merge.on_tick(at(1_000));
        assert!(up(&mut relay, host, first, at(1_000)).is_empty(), "one proc of host {host} is awaited");
    }
    assert_eq!(relay.on_tick(at(2_000)).len(), 1);
    for (host, merge) in hosts.iter_mut().enumerate() {
        let last = merge.on_reply(reply(2 * host as u32 + 1, caller, 1, b"a"), at(3_000));
        assert_eq!(up(&mut relay, host, last, at(3_000)).len(), host, "both at once, when host 1 has answered too");
    }
    assert!(relay.is_empty());
}

#[test]
fn a_dead_host_is_not_waited_for() {
    let mut relay = RelayMerge::new(9);
    assert!(relay.expect(0, ProcAddr::CONTROLLER, 1, &HostSet::range(1, 3)).is_empty());
    for host in [1, 2] {
        let mut merge = HostMerge::new(host, agent(host));
        assert!(merge.expect(ProcAddr::CONTROLLER, 1, 1).is_empty());
        let frame = merge.on_reply(reply(host, ProcAddr::CONTROLLER, 1, b"a"), at(0)).remove(0);
        assert!(relay.offer(packet(host, host.into(), &frame), at(0)).is_empty());
    }
    let out = relay.lost(3);
    assert_eq!(*out[0].shares, [Share::one(1, 1, 40), Share::one(2, 2, 40)]);
    assert!(relay.is_empty());
}

/// One way up: procs, their hosts, relays of hosts, the receiver. What leaves one stage reaches the next at once.
struct Way {
    procs: u32,
    hosts: Vec<HostMerge>,
    /// The first takes from hosts and from the other two.
    relays: [RelayMerge; 3],
    /// By peer stream: the numbers that each host assigned.
    numbers: HashMap<HostNo, u64>,
    arrived: Vec<Packet>,
    now: Duration,
}

impl Way {
    fn relay_of(host: HostNo) -> usize {
        (host % 3) as usize
    }

    fn leave_host(&mut self, host: HostNo, frames: Vec<Frame>) {
        for frame in frames {
            let number = self.numbers.entry(host).or_insert(0);
            *number += 1;
            let number = *number;
            self.reach_relay(Self::relay_of(host), packet(host, number, &frame));
        }
    }

    fn reach_relay(&mut self, relay: usize, packet: Packet) {
        let out = self.relays[relay].offer(packet, self.now);
        self.leave_relay(relay, out);
    }

    fn leave_relay(&mut self, relay: usize, out: Vec<Packet>) {
        for packet in out {
            let count: u32 = packet.shares.iter().map(|share| share.count).sum();
            let origins = HostSet::from_iter(packet.shares.iter().flat_map(Share::hosts));
            assert_eq!(origins.len(), count as usize, "one share each (MRG-3)");
            if relay == 0 {
                self.arrived.push(packet);
            } else {
                self.reach_relay(0, packet);
            }
        }
    }

    fn tick(&mut self) {
        for host in 0..self.hosts.len() {
            let out = self.hosts[host].on_tick(self.now);
            self.leave_host(u32::try_from(host).unwrap(), out);
        }
        for relay in [1, 2, 0] {
            let out = self.relays[relay].on_tick(self.now);
            self.leave_relay(relay, out);
            assert!(self.relays[relay].next_deadline().is_none_or(|due| due > self.now));
        }
    }
}

#[test]
fn every_reply_arrives_once_and_in_order_whatever_comes_when() {
    for seed in 0..250 {
        let mut dice = Dice(seed);
        let (hosts, procs, calls) = (1 + dice.roll(9), 1 + dice.roll(6), 1 + dice.roll(5_u64));
        let places = hosts * procs;
        let payloads: Vec<Vec<u8>> = (0..1 + dice.roll(4))
            .map(|n| vec![u8::try_from(n).unwrap(); [0, 3, 500, 60_000, MERGE_LIMIT + 1][dice.roll(5) as usize]])
            .collect();
        let mut way = Way {
            procs,
            hosts: (0..hosts).map(|host| HostMerge::new(host, agent(host))).collect(),
            relays: [0, 1, 2].map(|relay| RelayMerge::new(100 + relay)),
            numbers: HashMap::new(),
            arrived: Vec::new(),
            now: Duration::ZERO,
        };
        let caller = ProcAddr::CONTROLLER;
        // What each proc will send: an answer to each call in order, and occasionally something else in between.
        let mut scripts: Vec<Vec<Frame>> = Vec::new();
        for proc in 0..places {
            let mut script = Vec::new();
            for call in 1..=calls {
                let mut frame = reply(proc, caller, call, &payloads[dice.roll(4) as usize % payloads.len()]);
                match dice.roll(5) {
                    3 => {
                        let raised = Reply { answer: Answer::Raised, ..read(&frame) }.header(addr(proc), caller);
                        frame = Frame::build(raised, None, b"", &frame.parts().unwrap());
                    }
                    4 => frame.header.set_charged(true),
                    _ => {}
                }
                script.push(frame);
                if dice.roll(6) == 0 {
                    let header = Tell { actor: 3, place: proc }.header(addr(proc), caller);
                    script.push(Frame::build_plain(header, None, b"", &call.to_le_bytes()));
                }
            }
            // Some answer twice.
            if dice.roll(10) == 0 {
                script.push(script[0].clone());
            }
            script.reverse();
            scripts.push(script);
        }
        let expected: Vec<Vec<Frame>> = scripts.iter().map(|script| script.iter().rev().cloned().collect()).collect();
        for call in 1..=calls {
            if dice.roll(8) == 0 {
                continue;
            }
            for host in &mut way.hosts {
                if dice.roll(8) > 0 {
                    assert!(host.expect(caller, call, procs).is_empty());
                }
            }
            for relay in 0..3 {
                let below: HostSet = (0..hosts).filter(|host| relay == 0 || Way::relay_of(*host) == relay).collect();
                assert!(way.relays[relay].expect(0, caller, call, &below).is_empty());
            }
        }
        while scripts.iter().any(|script| !script.is_empty()) {
            let pause = [10, 700][dice.roll(2) as usize];
            way.now += at(dice.roll(pause));
            way.tick();
            let proc = dice.roll(places);
            let Some(frame) = scripts[proc as usize].pop() else { continue };
            let host = proc / way.procs;
            let out = if frame.header.kind == Kind::Reply {
                way.hosts[host as usize].on_reply(frame, way.now)
            } else {
                let mut out = way.hosts[host as usize].before(frame.header.src, frame.header.dst);
                out.push(frame);
                out
            };
            way.leave_host(host, out);
        }
        for _ in 0..5 {
            way.now += HOLD;
            way.tick();
        }
        // The numbers of each host arrive in order, once.
        let mut next: HashMap<HostNo, u64> = HashMap::new();
        let mut got: BTreeMap<u32, Vec<Frame>> = BTreeMap::new();
        for packet in &way.arrived {
            let shares = match packet.share() {
                Some(share) => vec![share],
                None => packet.shares.to_vec(),
            };
            for share in &shares {
                for host in share.hosts() {
                    let due = next.entry(host).or_insert(1);
                    assert_eq!(share.seq, *due, "seed {seed}: host {host} (MRG-2)");
                    assert_eq!(share.ack, 40);
                    *due += 1;
                }
            }
            for frame in replies(&frame_in(packet), places) {
                got.entry(frame.header.src.rank).or_default().push(frame);
            }
        }
        assert_eq!(next.values().map(|due| due - 1).sum::<u64>(), way.numbers.values().sum::<u64>());
        for (proc, expected) in (0..).zip(expected) {
            let got = got.remove(&proc).unwrap_or_default();
            let calls = |frames: &[Frame]| frames.iter().map(call_of).collect::<Vec<_>>();
            assert_eq!(calls(&got), calls(&expected), "seed {seed}: proc {proc} (MRG-1, MRG-2)");
            assert!(got.iter().zip(&expected).all(|(got, sent)| is_same_answer(got, sent)
                && (got.header.dst, Meaning::of(&got.header)) == (sent.header.dst, Meaning::of(&sent.header))));
        }
    }
}

#[test]
fn payloads_that_look_alike_are_not_taken_for_equal() {
    let mut merge = HostMerge::new(4, agent(4));
    let count = 40;
    assert!(merge.expect(ProcAddr::CONTROLLER, 1, count).is_empty());
    let payload = |rank: u32| {
        let mut bytes = vec![0; 1000];
        bytes[500] = u8::try_from(rank % 20).unwrap();
        bytes
    };
    let mut out = Vec::new();
    for rank in 0..count {
        out.extend(merge.on_reply(reply(rank, ProcAddr::CONTROLLER, 1, &payload(rank)), at(0)));
    }
    let all = replies(&out[0], count);
    assert_eq!((out.len(), all.len() as u32), (1, count));
    for frame in all {
        let Part::Inline(bytes) = &frame.parts().unwrap()[0] else { panic!("inline") };
        assert_eq!(**bytes, payload(read(&frame).place));
    }
}

proptest! {
    #![proptest_config(config(3_000, 77))]

    /// Whatever another host sends as a merged frame (MRG-5).
    #[test]
    fn garbage_makes_no_more_replies_than_the_call_has_places(
        words in prop::collection::vec(prop_oneof![4 => 0_u32..5, 1 => Just(1 | 1 << 31), 1 => any::<u32>()], 0..40),
        cut in 0_usize..4,
        bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..4),
        places in 0_u32..64,
    ) {
        let mut table: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        table.truncate(table.len().saturating_sub(cut));
        let mut parts = vec![Part::Inline(table.into())];
        parts.extend(bodies.into_iter().map(|body| Part::Inline(Bytes::from(body))));
        let header = Gathered { actor: 3, call: 1 }.header(agent(1), ProcAddr::CONTROLLER);
        let frame = Frame::build(header, None, b"", &parts);
        if let Ok(replies) = unmerge(&frame, places, |_| true, addr) {
            let mut count = 0;
            for (index, frame) in replies {
                prop_assert!(index < places);
                crate::support::entry::look_into(&frame);
                count += 1;
            }
            prop_assert!(count <= places);
        }
        // A relay either merges it or passes it on, whole.
        let mut relay = RelayMerge::new(9);
        prop_assert!(relay.expect(0, ProcAddr::CONTROLLER, 1, &HostSet::range(1, 9)).is_empty());
        let sent = packet(1, 3, &frame);
        let mut out = relay.offer(sent.clone(), at(0));
        out.extend(relay.on_tick(at(5_000)));
        prop_assert_eq!(out.len(), 1);
        let merged = *out[0].shares == [Share::one(1, 3, 40)] && unmerge(&frame, places, |_| true, addr).is_ok();
        prop_assert!(merged || out[0] == sent);
    }

    /// Any valid data packet is merged or passed on.
    #[test]
    fn packets_of_any_kind_and_cut_pass(
        cuts in prop::collection::vec(0_usize..300, 0..4),
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        kind in prop::sample::select(vec![PacketKind::Data, PacketKind::Ack, PacketKind::Nack]),
        offset in 0_u64..2,
        runs in prop::collection::vec((0_u32..9, 1_u32..4, 0_u64..3), 0..4),
    ) {
        let mut sent = Packet::new(kind, 3);
        sent.dests = Short::from_iter([Dest::one(0, 2)]);
        sent.offset = offset;
        sent.total = bytes.len() as u64 + offset;
        let mut rest = Bytes::from(bytes);
        for cut in cuts {
            sent.body.push(rest.split_to(cut.min(rest.len())));
        }
        sent.body.push(rest);
        runs.into_iter().for_each(|(first, count, seq)| sent.shares.push(Share { first, count, seq, ack: 0 }));
        let mut relay = RelayMerge::new(9);
        prop_assert!(relay.expect(0, ProcAddr::CONTROLLER, 1, &HostSet::range(1, 9)).is_empty());
        prop_assert_eq!(relay.offer(sent.clone(), at(0)), [sent]);
    }
}
