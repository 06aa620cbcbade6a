//! A hostile host that knows the protocol: it sends well-formed packets with arbitrary contents, amid the honest
//! traffic of the host that gets them. Used by the fuzzer and by the mutation test on a stable compiler.

use super::connection::{decoded, flat};
use bytes::Bytes;
use mesh_proto::hosts::{
    Arrival, Cargo, Dest, Gap, HostSet, Lane, MAX_HOSTS, Packet, PacketKind, PeerStreams, Share, Short,
};
use std::collections::HashMap;
use std::time::Duration;

const ME: u32 = 1;
const WINDOW: u64 = 16 << 10;
/// The number of hosts with honest traffic.
const HOSTS: u32 = 48;
/// The most packets that one step of a host may make it send, for each earlier step of anybody.
const ANSWERS: usize = 8;

/// Lets them talk as the bytes say.
pub(crate) fn feed(data: &[u8]) {
    let mut table = Table::new(data);
    while !table.dice.0.is_empty() {
        table.step();
    }
    table.finish();
}

/// Decisions taken from the bytes.
struct Dice<'a>(&'a [u8]);

impl Dice<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&byte, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        byte
    }

    fn below(&mut self, sides: u32) -> u32 {
        u32::from(self.byte()) % sides
    }

    /// Usually a small number, otherwise one at the end of a range.
    fn number(&mut self) -> u64 {
        match self.byte() {
            250 => u64::MAX,
            251 => u64::MAX - 1,
            252 => 1 << 63,
            253 => u64::from(u32::MAX),
            254 => 1 << 40,
            255 => 0,
            byte => u64::from(byte) % 24,
        }
    }

    fn bytes(&mut self) -> Bytes {
        vec![7; usize::from(self.byte()) * 5].into()
    }
}

struct Table<'a> {
    dice: Dice<'a>,
    peer_streams: PeerStreams,
    now: Duration,
    steps: usize,
    /// The last number delivered from each host.
    delivered: HashMap<u32, u64>,
    ended: HostSet,
    /// Whether somebody spoke of more hosts than exist here.
    wide: bool,
}

impl<'a> Table<'a> {
    fn new(data: &'a [u8]) -> Self {
        Self {
            dice: Dice(data),
            peer_streams: PeerStreams::new(ME, WINDOW),
            now: Duration::ZERO,
            steps: 0,
            delivered: HashMap::new(),
            ended: HostSet::default(),
            wide: false,
        }
    }

    fn step(&mut self) {
        self.steps += 1;
        self.now += Duration::from_millis(1);
        match self.dice.below(12) {
            0..=4 => self.hear(),
            5 | 6 => self.post(),
            7 | 8 => self.send(),
            9 => {
                self.now += Duration::from_millis(u64::from(self.dice.byte()) * 20);
                self.tick();
            }
            10 => {
                let (hosts, via) = (self.hosts(), 2 + self.dice.below(6));
                let none = self.dice.byte() == 0;
                self.peer_streams.reroute(&hosts, &|host| (!none).then_some(if host % 3 == 0 { host } else { via }));
            }
            _ => {
                let host = 2 + self.dice.below(HOSTS - 2);
                self.end(host);
            }
        }
        // Each host may have a window held; a packet above that goes alone.
        assert!(self.peer_streams.held() <= u64::from(MAX_HOSTS) * WINDOW);
    }

    /// A run of hosts that exist here.
    fn hosts(&mut self) -> HostSet {
        let first = 2 + self.dice.below(HOSTS - 2);
        HostSet::range(first, (1 + self.dice.below(8)).min(HOSTS - first))
    }

    /// A made-up packet arrives.
    fn hear(&mut self) {
        let Some(packet) = self.made_up() else { return };
        if packet.sole().is_some_and(|dest| dest != ME) {
            let _ = self.peer_streams.pass_ack(&packet, self.now);
            return;
        }
        let mut arrivals = Vec::new();
        self.peer_streams.on_packet(packet, self.now, &mut arrivals);
        for arrival in arrivals {
            self.deliver(arrival);
        }
    }

    fn made_up(&mut self) -> Option<Packet> {
        let kind = [PacketKind::Data, PacketKind::Data, PacketKind::Ack, PacketKind::Nack][self.dice.below(4) as usize];
        let origin = self.dice.below(HOSTS);
        let dest = if self.dice.byte() < 220 { ME } else { 0 };
        if kind == PacketKind::Nack {
            let gaps: Vec<Gap> =
                (0..self.dice.below(4)).map(|_| Gap { first: self.dice.number(), count: self.dice.number() }).collect();
            return Some(decoded(&Packet::nack(origin, dest, self.dice.number(), &gaps)));
        }
        let mut packet = Packet::new(kind, origin);
        let seq = self.dice.number();
        packet.ack = self.dice.number();
        packet.dests = Short::from_iter([Dest::one(dest, seq)]);
        let mut next = self.dice.below(4);
        let mut shares = Vec::new();
        for _ in 0..self.dice.below(4) {
            let first = next + self.dice.below(12);
            let mut count = 1 + self.dice.below(6);
            if self.dice.byte() == 255 {
                count = MAX_HOSTS.saturating_sub(first);
            }
            next = first + count;
            if next > MAX_HOSTS || count == 0 {
                break;
            }
            self.wide |= next > HOSTS;
            shares.push(Share { first, count, seq: self.dice.number(), ack: self.dice.number() });
        }
        packet.shares = shares.into();
        if kind == PacketKind::Data {
            let body = self.dice.bytes();
            // Use the number as the message's, to see what was delivered.
            (packet.message, packet.offset) = (seq as u32, 0);
            packet.total = body.len() as u64;
            packet.body = if body.is_empty() { Short::new() } else { Short::from_iter([body]) };
        }
        Some(decoded(&packet))
    }

    /// Each number once, in order (STR-1), and nothing from hosts that have ended (STR-6).
    fn deliver(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Piece { origin, message, .. } => {
                assert!(!self.ended.contains(origin) && origin != ME);
                let number = self.delivered.entry(origin).or_default();
                *number += 1;
                assert_eq!(u64::from(message), *number, "of host {origin}");
            }
            Arrival::Merged { origins, .. } => {
                assert!(!origins.overlaps(&self.ended) && !origins.contains(ME));
                for host in origins.iter().take_while(|host| *host < HOSTS) {
                    *self.delivered.entry(host).or_default() += 1;
                }
            }
        }
    }

    fn post(&mut self) {
        let (hosts, via) = (self.hosts(), 2 + self.dice.below(6));
        let lane = Lane { sender: (0, self.dice.below(3), ME), mesh: 1 };
        let frame = Short::from_iter([Bytes::from(vec![1; 1 + usize::from(self.dice.byte()) * 40])]);
        let _ = self.peer_streams.post(via, hosts, Cargo { frame, lane });
    }

    fn send(&mut self) {
        let via = 2 + self.dice.below(6);
        for _ in 0..=self.dice.below(4) {
            let Some(packet) = self.peer_streams.next_packet(via, self.now) else { break };
            assert_eq!(decoded(&packet), flat(&packet));
            assert!(!packet.hosts().overlaps(&self.ended), "something goes to who has ended");
        }
    }

    fn tick(&mut self) {
        let mut out = Vec::new();
        self.peer_streams.on_tick(self.now, &mut out);
        assert!(out.len() <= ANSWERS * self.steps, "{} packets after {} steps", out.len(), self.steps);
        for packet in out {
            assert_eq!(decoded(&packet), flat(&packet));
        }
        let ready = self.peer_streams.take_ready();
        assert!(ready.len() <= HOSTS as usize);
    }

    fn end(&mut self, host: u32) {
        let lost = self.peer_streams.end(host);
        assert!(lost.iter().all(|lost| !lost.frame.is_empty()));
        self.ended = self.ended.union(&HostSet::one(host));
    }

    /// Whatever was said, nothing is kept once all others have ended.
    fn finish(mut self) {
        (0..HOSTS).filter(|host| *host != ME).for_each(|host| self.end(host));
        self.tick();
        assert!(self.wide || self.peer_streams.is_idle(), "something is kept of hosts that have ended");
    }
}
