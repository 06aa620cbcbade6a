//! The next packet for a next hop: first what is sent again, then the lanes in turn (STR-2, STR-4).

use super::outbox::{Blocked, in_order};
use super::outgoing::Sent;
use super::{AHEAD, Lane, PACKET_COST, PeerStreams, SEGMENT, add_dest, continues, unblock};
use crate::HostNo;
use crate::hosts::packet::{Dest, MAX_RUNS, Packet};
use crate::hosts::{HostSet, Short};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

impl PeerStreams {
    /// The next packet for the next hop `via`, numbered; none if nothing waits or nothing may go now. It counts as
    /// sent: if it is lost, it is sent again in time.
    pub fn next_packet(&mut self, via: HostNo, now: Duration) -> Option<Packet> {
        let outbox = loop {
            let outbox = self.outboxes.get_mut(&via)?;
            let Some((order, hosts)) = outbox.resend.pop_first() else { break outbox };
            if let Some(packet) = self.again(via, order, hosts) {
                return Some(packet);
            }
        };
        let mut lane = outbox.ring.pop_front()?;
        loop {
            match self.next_of_lane(via, lane, now) {
                Ok(packet) => return Some(packet),
                Err(full) => {
                    for &(first, count) in full.runs() {
                        self.peers.range(first, count).for_each(|(_, _, peer)| peer.out.blocked.push((via, lane)));
                    }
                }
            }
            lane = self.outboxes.get_mut(&via)?.ring.pop_front()?;
        }
    }

    /// A packet to send again, for the hosts that have not acknowledged it.
    fn again(&mut self, via: HostNo, order: u64, mut hosts: Vec<Dest>) -> Option<Packet> {
        in_order(&mut hosts);
        let mut missing = Vec::new();
        let mut index = None;
        for dest in hosts {
            for (first, count, peer) in self.peers.among(dest.first, dest.count) {
                if let Some(flight) = peer.out.flight(dest.seq) {
                    index = Some(flight.sent);
                    missing.push((Dest { first, count, seq: dest.seq }, flight.via != via));
                }
            }
        }
        let mut dests = Short::new();
        let mut rest = Vec::new();
        for (dest, moved) in missing {
            if dests.len() == MAX_RUNS && !continues(&dests, dest.first, dest.seq) {
                rest.push(dest);
                continue;
            }
            if moved {
                self.peers.range(dest.first, dest.count).for_each(|(_, _, peer)| peer.out.goes(dest.seq, via));
            }
            add_dest(&mut dests, dest);
        }
        if !rest.is_empty()
            && let Some(outbox) = self.outboxes.get_mut(&via)
        {
            outbox.resend.insert(order, rest);
        }
        let sent = self.log.get(index?)?;
        let mut packet = sent.packet(self.me);
        packet.dests = dests;
        self.carry_ack(&mut packet);
        Some(packet)
    }

    /// Chooses the post of a lane that may go now, split so that it may go to all its hosts; else the hosts whose
    /// windows are full.
    ///
    /// A host that is behind delays only what is for itself: the others get their share of a cast, and the first few
    /// posts that are not for it.
    fn choose(&mut self, via: HostNo, lane: Lane) -> Result<usize, HostSet> {
        let mut full = HostSet::default();
        let mut order = false;
        let mut barred: Vec<HostSet> = Vec::new();
        let mut chosen = None;
        let Some(queue) = self.outboxes.get(&via).and_then(|outbox| outbox.queues.get(&lane)) else { return Err(full) };
        let vias = self.lanes.get(&lane).filter(|vias| vias.len() > 1);
        for (at, post) in queue.posts.iter().take(AHEAD).enumerate() {
            let earlier = vias.into_iter().flatten().filter(|other| **other != via).any(|other| {
                let queue = self.outboxes.get(other).and_then(|outbox| outbox.queues.get(&lane));
                queue.is_some_and(|queue| queue.has_earlier(*other, post.ticket, &post.hosts))
            });
            if earlier {
                order = true;
                barred.push(post.hosts.to_set());
                continue;
            }
            let cost = post.left().min(SEGMENT as u64) + PACKET_COST;
            let mut late = HostSet::default();
            for (first, count) in post.hosts.runs() {
                let among = self.peers.among(first, count);
                let without_room = among.filter(|(_, _, peer)| !peer.out.has_room(cost, self.window));
                without_room.for_each(|(first, count, _)| late.push_run(first, count));
            }
            if barred.is_empty() && late.is_empty() {
                chosen = Some((at, None));
                break;
            }
            let ready = barred.iter().chain([&late]).fold(post.hosts.to_set(), |hosts, less| hosts.difference(less));
            if !ready.is_empty() {
                chosen = Some((at, (ready.len() < post.hosts.len()).then_some(ready)));
                break;
            }
            full = full.iter().chain(late.iter()).collect();
            barred.push(post.hosts.to_set());
        }
        let Some(outbox) = self.outboxes.get_mut(&via) else { return Err(full) };
        let Some(queue) = outbox.queues.get_mut(&lane) else { return Err(full) };
        match chosen {
            None => {
                queue.blocked = if order { Blocked::Order } else { Blocked::Window };
                Err(full)
            }
            Some((at, None)) => Ok(at),
            Some((at, Some(ready))) => {
                outbox.waiting += queue.split(at, ready, via);
                Ok(at)
            }
        }
    }

    /// The next segment of a lane; else the hosts whose windows are full, if that is the reason.
    fn next_of_lane(&mut self, via: HostNo, lane: Lane, now: Duration) -> Result<Packet, HostSet> {
        let at = self.choose(via, lane)?;
        let Some(outbox) = self.outboxes.get_mut(&via) else { return Err(HostSet::default()) };
        let Some(queue) = outbox.queues.get_mut(&lane) else { return Err(HostSet::default()) };
        let Some(post) = queue.posts.get_mut(at) else { return Err(HostSet::default()) };
        let len = post.left().min(SEGMENT as u64);
        let cost = len + PACKET_COST;
        let whole = len == post.total;
        if !whole && post.offset == 0 {
            self.messages = self.messages.wrapping_add(1).max(1);
            post.message = self.messages;
            post.whole = Some(Arc::new(post.cargo.frame.clone()));
        }
        let sent = Sent {
            order: 0,
            refs: 0,
            message: post.message,
            offset: post.offset,
            total: post.total,
            cost,
            body: if whole { post.cargo.frame.clone() } else { cut(&post.cargo.frame, post.offset, len) },
            whole: post.whole.clone(),
            lane,
        };
        let mut packet = sent.packet(self.me);
        let index = self.log.insert(sent);
        let mut left = None;
        let mut refs = 0;
        'hosts: for (first, count) in post.hosts.runs() {
            let Self { peers, .. } = self;
            peers.make(first, count);
            let (runs, alarms) = peers.range_and_alarms(first, count);
            for (first, count, peer) in runs {
                let seq = peer.out.next_seq();
                if packet.dests.len() == MAX_RUNS && !continues(&packet.dests, first, seq) {
                    left = Some(first);
                    break 'hosts;
                }
                add_dest(&mut packet.dests, Dest { first, count, seq });
                refs += count;
                if peer.out.take(index, via, cost, now, self.patience) {
                    peer.arm(alarms, first, now + self.patience.first);
                }
            }
        }
        self.log.set_refs(index, refs);
        let rest = left.map(|first| post.split_from(first));
        post.offset += len;
        let finished = post.offset == post.total;
        outbox.waiting = outbox.waiting.saturating_sub(len);
        if finished {
            queue.remove(at, via);
        }
        if let Some(rest) = rest {
            outbox.waiting += rest.left();
            queue.put(at + usize::from(!finished), rest, via);
        }
        let emptied = queue.posts.is_empty();
        if emptied {
            outbox.drop_queue(lane);
        } else {
            queue.blocked = Blocked::No;
            outbox.ring.push_back(lane);
        }
        if finished {
            self.lane_moved(via, lane, emptied);
        }
        self.carry_ack(&mut packet);
        Ok(packet)
    }

    /// Notes that a post of the lane, perhaps the last, is done at `via`: others of the lane may have waited for it.
    fn lane_moved(&mut self, via: HostNo, lane: Lane, emptied: bool) {
        let Some(vias) = self.lanes.get_mut(&lane) else { return };
        if emptied {
            if vias.len() <= 1 {
                self.lanes.remove(&lane);
                return;
            }
            vias.retain(|other| *other != via);
        }
        for other in vias.iter().filter(|other| **other != via) {
            let queue = self.outboxes.get(other).and_then(|outbox| outbox.queues.get(&lane));
            if queue.is_some_and(|queue| queue.blocked == Blocked::Order) {
                unblock(&mut self.outboxes, &mut self.ready, *other, lane);
            }
        }
    }

    /// Lets a packet to one host carry the pending ack.
    fn carry_ack(&mut self, packet: &mut Packet) {
        if let Some((peer, _)) = packet.sole().and_then(|host| self.peers.one(host)) {
            packet.ack = peer.inc.say();
        }
    }
}

/// `len` bytes from `offset` on in the concatenated pieces.
fn cut(pieces: &[Bytes], offset: u64, len: u64) -> Short<Bytes> {
    let (mut skip, mut left) = (offset, len);
    let mut out = Short::new();
    for piece in pieces {
        let size = piece.len() as u64;
        if skip >= size {
            skip -= size;
            continue;
        }
        let take = left.min(size - skip);
        if take == 0 {
            break;
        }
        // Both are within a piece, which is in memory.
        out.push(piece.slice(skip as usize..(skip + take) as usize));
        left -= take;
        skip = 0;
    }
    out
}
