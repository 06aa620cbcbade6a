//! Arriving packets: what is delivered, held or dropped, and what an ack or a nack means for sent packets.

use super::incoming::{Held, Verdict};
use super::{Arrival, PACKET_COST, PeerStreams, tell, unblock};
use crate::HostNo;
use crate::hosts::packet::{Dest, Gap, Packet, PacketKind, Share};
use crate::hosts::{HostSet, Short};
use std::time::Duration;

impl PeerStreams {
    /// Whether a data packet is also for this host, and new.
    #[must_use]
    pub fn is_new(&self, packet: &Packet) -> bool {
        let run = self.peers.run(packet.origin);
        packet.seq_for(self.me).is_some_and(|seq| run.is_none_or(|(.., peer)| peer.inc.is_new(seq)))
    }

    /// Takes a data, ack or nack packet of which this host is a destination. Appends what can be delivered to `out`.
    pub fn on_packet(&mut self, packet: Packet, now: Duration, out: &mut Vec<Arrival>) {
        match packet.kind {
            PacketKind::Data if packet.shares.is_empty() => self.on_data(packet, now, out),
            PacketKind::Data => self.on_merged(packet, now, out),
            PacketKind::Ack if packet.shares.is_empty() => {
                if let Some(ack) = packet.seq_for(self.me) {
                    self.on_acks(packet.origin, 1, ack, now);
                }
            }
            PacketKind::Ack => {
                for share in &packet.shares {
                    self.on_acks(share.first, share.count, share.ack, now);
                }
                self.join(&packet.shares);
            }
            PacketKind::Nack => {
                self.on_acks(packet.origin, 1, packet.ack, now);
                self.on_nack(packet.origin, packet.gaps());
            }
            _ => {}
        }
    }

    /// Hosts that were heard of together may be in the same state again.
    fn join(&mut self, shares: &[Share]) {
        for share in shares {
            self.peers.join(share.first, share.count);
        }
    }

    fn on_data(&mut self, packet: Packet, now: Duration, out: &mut Vec<Arrival>) {
        let origin = packet.origin;
        if origin == self.me || (!self.ended.is_empty() && self.ended.contains(origin)) {
            return;
        }
        let Some(seq) = packet.seq_for(self.me).filter(|seq| *seq > 0) else { return };
        if packet.ack > 0 {
            self.on_acks(origin, 1, packet.ack, now);
        }
        let cost = packet.body_len() as u64 + PACKET_COST;
        let window = self.window;
        let (peer, alarms) = self.peers.one_or_new(origin);
        match peer.inc.judge(seq, cost, window, now) {
            Verdict::Now => {
                let Packet { message, offset, total, body, .. } = packet;
                out.push(Arrival::Piece { origin, message, offset, total, body });
                peer.inc.release(origin, 1, out);
            }
            Verdict::Early => {
                let Packet { message, offset, total, body, .. } = packet;
                peer.inc.hold(seq, cost, Held::Piece { message, offset, total, body });
            }
            Verdict::Never => {}
        }
        if let Some(at) = peer.inc.deadline() {
            peer.arm(alarms, origin, at);
        }
    }

    fn on_merged(&mut self, packet: Packet, now: Duration, out: &mut Vec<Arrival>) {
        if packet.sole() != Some(self.me) {
            return;
        }
        let cost = packet.body_len() as u64 + PACKET_COST;
        let at = out.len();
        let mut origins = HostSet::default();
        let window = self.window;
        for share in packet.shares.iter().filter(|share| share.seq > 0) {
            self.on_acks(share.first, share.count, share.ack, now);
            for &(first, count) in self.living(share).runs() {
                self.peers.make(first, count);
                let (runs, alarms) = self.peers.range_and_alarms(first, count);
                for (first, count, peer) in runs {
                    match peer.inc.judge(share.seq, cost, window, now) {
                        Verdict::Now => {
                            origins.push_run(first, count);
                            peer.inc.release(first, count, out);
                        }
                        Verdict::Early => peer.inc.hold(share.seq, cost, Held::Merged(packet.body.clone())),
                        Verdict::Never => {}
                    }
                    if let Some(at) = peer.inc.deadline() {
                        peer.arm(alarms, first, at);
                    }
                }
            }
        }
        self.join(&packet.shares);
        if !origins.is_empty() {
            // What was held behind a host's part comes after it.
            out.insert(at, Arrival::Merged { origins, body: packet.body });
        }
    }

    /// The hosts of a share, without this host and those that have ended.
    fn living(&self, share: &Share) -> HostSet {
        let mut hosts = HostSet::range(share.first, share.count);
        hosts.remove(self.me);
        if self.ended.is_empty() { hosts } else { hosts.difference(&self.ended) }
    }

    /// Notes that the `count` hosts from `first` on have received everything up to the number `ack`.
    fn on_acks(&mut self, first: HostNo, count: u32, ack: u64, now: Duration) {
        let mut news = Short::new();
        for (first, count, peer) in self.peers.among(first, count) {
            if peer.out.is_news(ack) {
                news.push((first, count));
            }
        }
        for &(first, count) in &news {
            for (first, count, peer) in self.peers.range(first, count) {
                let more = peer.out.acknowledge(ack, count, &mut self.log, now, self.patience);
                if peer.out.outstanding <= self.window / 4 * 3 {
                    for (via, lane) in peer.out.blocked.drain(..) {
                        unblock(&mut self.outboxes, &mut self.ready, via, lane);
                    }
                }
                let path = peer.out.path;
                for seq in more {
                    let Some(sent) = peer.out.flight(seq).and_then(|flight| self.log.get(flight.sent)) else {
                        continue;
                    };
                    let outbox = self.outboxes.entry(path).or_default();
                    outbox.send_again(sent.order, Dest { first, count, seq });
                    tell(&mut self.ready, path, outbox);
                }
            }
        }
    }

    fn on_nack(&mut self, host: HostNo, gaps: impl Iterator<Item = Gap>) {
        let Some(peer) = self.peers.get(host) else { return };
        let mut again = Vec::new();
        for gap in gaps {
            peer.out.within(gap, &mut again);
        }
        self.resend(host, 1, &again);
    }

    /// Queues packets of a run's peer streams to be sent again by the next hop last used.
    pub(super) fn resend(&mut self, first: HostNo, count: u32, seqs: &[u64]) {
        let Some(peer) = self.peers.get(first) else { return };
        let path = peer.out.path;
        for &seq in seqs {
            let Some(sent) = peer.out.flight(seq).and_then(|flight| self.log.get(flight.sent)) else { continue };
            let outbox = self.outboxes.entry(path).or_default();
            outbox.send_again(sent.order, Dest { first, count, seq });
            tell(&mut self.ready, path, outbox);
        }
    }
}
