//! What one host has under way to the others, and what of theirs is under way to it.
//!
//! Everything from one host to another is one numbered *peer stream*, whatever path its packets take. The receiver delivers
//! by number, the sender keeps what is not acknowledged, so that connections and relays may lose or repeat anything.
//!
//! STR-1: a receiver delivers each number of a peer stream once, in order; what comes early is held, what comes again is
//! dropped and acknowledged once more.
//!
//! STR-2: a number is given when a packet is taken for sending, to the messages of a lane in the order in which they
//! were posted. A message of which another host is told by another next hop than an earlier one of its lane waits until
//! the earlier one is numbered to its end; so lanes are in order at every receiver.
//!
//! STR-3: what has a number is kept until it is acknowledged, and sent again when the path has changed, when the receiver
//! says that it misses it, or after a time without progress; before anything new on that path.
//!
//! STR-4: to one host at most a window is under way, and at most a window is held early from one host, each packet
//! counted with [`PACKET_COST`] beside its bytes; a packet larger than the window goes alone.
//!
//! STR-5: when everything is acknowledged, nothing is sent.
//!
//! STR-6: the end of a host is told for every message that it has not acknowledged whole; afterwards nothing is kept of
//! it, and nothing of it is taken.

mod incoming;
mod outbox;
mod outgoing;
mod passing;
mod paths;
mod peers;

use super::packet::{Dest, Gap, MAX_RUNS, Packet, PacketKind, Share};
use super::{HostSet, Short};
use crate::HostNo;
use bytes::Bytes;
use incoming::{Held, Verdict};
use outbox::{Blocked, Hosts, Outbox, Post, in_order};
use outgoing::{Log, Patience, Sent};
use passing::Passing;
use peers::Peers;
use rustc_hash::FxHashMap;
use smallvec::smallvec;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

/// What a packet counts for against a window beside its bytes: a flood of empty ones fills memory too.
pub const PACKET_COST: u64 = 256;
/// Frames above this are cut into segments of this length.
pub const SEGMENT: usize = 256 << 10;

/// An ack is due so long after the first packet that it is for, if nothing carries it before.
const ACK_DELAY: Duration = Duration::from_millis(20);
/// Or when so much has arrived.
const ACK_COST: u64 = 256 << 10;
/// For so long a relay keeps others' acks, so that many become one.
const MERGE_DELAY: Duration = Duration::from_millis(5);
/// So many posts of a lane are looked at for one that may go when the first may not.
const AHEAD: usize = 32;
/// Where what cannot go anywhere waits for a path.
const NOWHERE: HostNo = HostNo::MAX;

/// Messages of one lane arrive in the order in which they were posted: those of one proc to one mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane {
    /// The sending proc: mesh, rank and host.
    pub sender: (u64, u32, u32),
    /// The mesh that the message is for.
    pub mesh: u64,
}

/// A frame to be sent.
#[derive(Clone, Debug)]
pub struct Cargo {
    /// Its bytes, in pieces; they are never copied.
    pub frame: Short<Bytes>,
    /// What it must not overtake.
    pub lane: Lane,
}

impl Cargo {
    fn len(&self) -> u64 {
        self.frame.iter().map(|piece| piece.len() as u64).sum()
    }
}

/// What is delivered, in the order of its peer stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A frame, or a segment of one; the segments of a frame come in order, between other frames.
    Piece {
        /// Who sent it.
        origin: HostNo,
        /// Which of the origin's frames it belongs to, unless it is whole.
        message: u32,
        /// Where in the frame it begins.
        offset: u64,
        /// How long the frame is.
        total: u64,
        /// The bytes.
        body: Short<Bytes>,
    },
    /// A merged body, of which the parts of these hosts count now, and no others.
    Merged {
        /// Whose parts count.
        origins: HostSet,
        /// The bytes.
        body: Short<Bytes>,
    },
}

/// A message to a host that has ended: it did not arrive, or nobody knows.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The whole frame, in the pieces that it was posted in.
    pub frame: Short<Bytes>,
    /// Its lane.
    pub lane: Lane,
}

/// All peer streams of one host, both ways.
///
/// The runtime [posts](PeerStreams::post) frames, and for each connection that has room takes [packets](PeerStreams::next_packet);
/// what it reads it hands to [`PeerStreams::on_packet`], and it calls [`PeerStreams::on_tick`] when
/// [`PeerStreams::next_deadline`] is reached. Vias in [`PeerStreams::take_ready`] have become worth asking for packets.
///
/// ```
/// # use mesh_proto::hosts::{Arrival, Cargo, Lane, PeerStreams};
/// # use std::time::Duration;
/// let (mut here, mut there) = (PeerStreams::new(0, 1 << 20), PeerStreams::new(1, 1 << 20));
/// let lane = Lane { sender: (0, 0, 0), mesh: 7 };
/// let frame = [bytes::Bytes::from_static(b"hello")].into_iter().collect();
/// assert!(here.post_one(1, 1, Cargo { frame, lane }));
/// let packet = here.next_packet(1, Duration::ZERO).unwrap();
/// let mut arrived = Vec::new();
/// there.on_packet(packet.clone(), Duration::ZERO, &mut arrived);
/// there.on_packet(packet, Duration::ZERO, &mut arrived);
/// assert!(matches!(&arrived[..], [Arrival::Piece { origin: 0, total: 5, .. }]));
/// ```
#[derive(Debug)]
pub struct PeerStreams {
    me: HostNo,
    window: u64,
    patience: Patience,
    peers: Peers,
    ended: HostSet,
    outboxes: FxHashMap<HostNo, Outbox>,
    /// By which next hops something of a lane waits.
    lanes: FxHashMap<Lane, Short<HostNo>>,
    log: Log,
    tickets: u64,
    messages: u32,
    /// Next hops that have become worth a look.
    ready: Vec<HostNo>,
    passing: Passing,
}

impl PeerStreams {
    /// The peer streams of host `me`, with at most `window` bytes under way to each other host.
    #[must_use]
    pub fn new(me: HostNo, window: u64) -> Self {
        Self {
            me,
            window,
            patience: Patience::default(),
            peers: Peers::default(),
            ended: HostSet::default(),
            outboxes: FxHashMap::default(),
            lanes: FxHashMap::default(),
            log: Log::default(),
            tickets: 0,
            messages: 0,
            ready: Vec::new(),
            passing: Passing::default(),
        }
    }

    /// Hosts are dead after so much silence: what was lost is sent again within that, if nothing else tells of its loss.
    /// What is under way already keeps its time.
    pub fn resend_within(&mut self, window: Duration) {
        self.patience = Patience::within(window);
    }

    /// Posts a message to `hosts` by the next hop `via`: one next hop's share of a message. Those of the hosts are
    /// returned that have ended: nothing goes to them.
    #[must_use = "whoever sent it has to hear of those that have ended"]
    pub fn post(&mut self, via: HostNo, mut hosts: HostSet, cargo: Cargo) -> HostSet {
        let mut gone = HostSet::default();
        if !self.ended.is_empty() {
            let living = hosts.difference(&self.ended);
            gone = hosts.difference(&living);
            hosts = living;
        }
        if !hosts.is_empty() {
            self.queue(via, Hosts::Many(hosts), cargo);
        }
        gone
    }

    /// Posts a message to one host by the next hop `via`; false if the host has ended: nothing goes to it.
    #[must_use]
    pub fn post_one(&mut self, via: HostNo, host: HostNo, cargo: Cargo) -> bool {
        if !self.ended.is_empty() && self.ended.contains(host) {
            return false;
        }
        self.queue(via, Hosts::One(host), cargo);
        true
    }

    fn queue(&mut self, via: HostNo, hosts: Hosts, cargo: Cargo) {
        self.tickets += 1;
        let post = Post { ticket: self.tickets, hosts, message: 0, offset: 0, total: cargo.len(), whole: None, cargo };
        self.enqueue(via, post);
    }

    fn enqueue(&mut self, via: HostNo, post: Post) {
        let lane = post.cargo.lane;
        let vias = self.lanes.entry(lane).or_default();
        if !vias.contains(&via) {
            vias.push(via);
        }
        self.outboxes.entry(via).or_default().insert(via, post);
    }

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

    /// What is sent again, to those that have not acknowledged it.
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

    /// Which post of a lane may go now, split so that all of its hosts may; or the hosts whose windows are in the way.
    ///
    /// A host that is behind holds up what is for itself: the others get their share of a cast, and the first few posts
    /// that are not for it.
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

    /// The next segment of a lane; or the hosts whose windows are full, if it is that.
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

    /// A post of the lane is done with at `via`, or the last one: others of the lane that waited for it may go.
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

    /// A packet to one host carries what there is to acknowledge.
    fn carry_ack(&mut self, packet: &mut Packet) {
        if let Some((peer, _)) = packet.sole().and_then(|host| self.peers.one(host)) {
            packet.ack = peer.inc.say();
        }
    }

    /// Bytes that wait for the next hop `via` and were not taken: what it takes to hold back whoever posts.
    #[must_use]
    pub fn waiting(&self, via: HostNo) -> u64 {
        self.outboxes.get(&via).map_or(0, |outbox| outbox.waiting)
    }

    /// Bytes under way to `host`, and not acknowledged.
    #[must_use]
    pub fn outstanding(&self, host: HostNo) -> u64 {
        self.peers.get(host).map_or(0, |peer| peer.out.outstanding)
    }

    /// Next hops that may have packets since they last had none, for another reason than a post.
    pub fn take_ready(&mut self) -> Vec<HostNo> {
        self.ready.iter().for_each(|via| {
            if let Some(outbox) = self.outboxes.get_mut(via) {
                outbox.told = false;
            }
        });
        std::mem::take(&mut self.ready)
    }

    /// Whether there is nothing under way, waiting, held or to be said.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.passing.is_empty()
            && self.outboxes.values().all(Outbox::is_empty)
            && self.peers.iter().all(|(_, _, peer)| peer.out.outstanding == 0 && peer.inc.is_idle())
    }

    /// Bytes held that came early, of all hosts.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.peers.iter().map(|(_, count, peer)| u64::from(count) * peer.inc.held_cost).sum()
    }

    /// Whether a packet of kind data is for this host too, and has not been here before.
    #[must_use]
    pub fn is_new(&self, packet: &Packet) -> bool {
        let run = self.peers.run(packet.origin);
        packet.seq_for(self.me).is_some_and(|seq| run.is_none_or(|(.., peer)| peer.inc.is_new(seq)))
    }

    /// Takes a packet of kind data, ack or nack of which this host is a destination; what can be delivered is
    /// appended to `out`.
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

    /// Hosts that were heard of together may stand alike again.
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

    /// Those of a share that are others and have not ended.
    fn living(&self, share: &Share) -> HostSet {
        let mut hosts = HostSet::range(share.first, share.count);
        hosts.remove(self.me);
        if self.ended.is_empty() { hosts } else { hosts.difference(&self.ended) }
    }

    /// The `count` hosts from `first` on have received everything up to the number `ack`.
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

    /// Puts packets of the peer streams of a run up to be sent again, the way that was used last.
    fn resend(&mut self, first: HostNo, count: u32, seqs: &[u64]) {
        let Some(peer) = self.peers.get(first) else { return };
        let path = peer.out.path;
        for &seq in seqs {
            let Some(sent) = peer.out.flight(seq).and_then(|flight| self.log.get(flight.sent)) else { continue };
            let outbox = self.outboxes.entry(path).or_default();
            outbox.send_again(sent.order, Dest { first, count, seq });
            tell(&mut self.ready, path, outbox);
        }
    }

    /// Takes a packet of kind ack that is for another host, to be merged with others for that host and sent on by
    /// [`PeerStreams::on_tick`]; false if it is to be sent on as it is.
    #[must_use]
    pub fn pass_ack(&mut self, packet: &Packet, now: Duration) -> bool {
        let Some(dest) = packet.sole().filter(|dest| *dest != self.me && packet.kind == PacketKind::Ack) else {
            return false;
        };
        let own = [Share::one(packet.origin, 0, packet.dests[0].seq)];
        let shares = if packet.shares.is_empty() { &own[..] } else { &packet.shares };
        self.passing.add(dest, shares, now + MERGE_DELAY);
        true
    }

    /// When [`PeerStreams::on_tick`] is wanted next, if ever.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        let alarm = self.peers.alarms.peek().map(|Reverse((at, _))| *at);
        [alarm, self.passing.deadline()].into_iter().flatten().min()
    }

    /// Does what is due: acks and nacks are appended to `out`, for the runtime to send on the next hops of their
    /// destinations, of which they may have many; what is to be sent again becomes [ready](PeerStreams::take_ready).
    pub fn on_tick(&mut self, now: Duration, out: &mut Vec<Packet>) {
        let patience = self.patience;
        let mut acks: Vec<Dest> = Vec::new();
        while let Some(Reverse((at, host))) = self.peers.alarms.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            self.peers.alarms.pop();
            let Some((first, count)) =
                self.peers.run(host).filter(|(_, _, peer)| peer.alarm == Some(at)).map(|run| (run.0, run.1))
            else {
                continue;
            };
            let (runs, alarms) = self.peers.range_and_alarms(first, count);
            let mut again = Vec::new();
            for (first, count, peer) in runs {
                peer.alarm = None;
                if let Some(gaps) = peer.inc.gaps(now) {
                    let ack = peer.inc.say();
                    // One for all of the run, however many a packet claims to speak for.
                    let mut nack = Packet::nack(self.me, first, ack, &gaps);
                    nack.dests = smallvec![Dest { first, count, seq: 0 }];
                    out.push(nack);
                }
                if peer.inc.ack_at.is_some_and(|at| at <= now) {
                    acks.push(Dest { first, count, seq: peer.inc.say() });
                }
                again = peer.out.on_tick(now, patience);
                if let Some(next) = [peer.inc.deadline(), peer.out.deadline()].into_iter().flatten().min() {
                    peer.arm(alarms, first, next);
                }
            }
            self.resend(first, count, &again);
        }
        acks.sort_unstable_by_key(|dest| dest.first);
        let mut direct: Short<Dest> = Short::new();
        for dest in acks {
            self.peers.join(dest.first, dest.count);
            if dest.count == 1 && self.passing.add_own(dest.first, Share::one(self.me, 0, dest.seq)) {
                continue;
            }
            if direct.len() == MAX_RUNS && !continues(&direct, dest.first, dest.seq) {
                out.push(self.ack(std::mem::take(&mut direct), Short::new()));
            }
            add_dest(&mut direct, dest);
        }
        if !direct.is_empty() {
            out.push(self.ack(direct, Short::new()));
        }
        while let Some((dest, shares)) = self.passing.next_due(now) {
            for shares in shares.chunks(MAX_RUNS) {
                out.push(self.ack(smallvec![Dest::one(dest, 0)], shares.to_vec().into()));
            }
        }
    }

    fn ack(&self, dests: Short<Dest>, shares: Short<Share>) -> Packet {
        let mut packet = Packet::new(PacketKind::Ack, self.me);
        packet.dests = dests;
        packet.shares = shares;
        packet
    }
}

fn tell(ready: &mut Vec<HostNo>, via: HostNo, outbox: &mut Outbox) {
    if !outbox.told && via != NOWHERE {
        outbox.told = true;
        ready.push(via);
    }
}

/// A lane that could not go may try again.
fn unblock(outboxes: &mut FxHashMap<HostNo, Outbox>, ready: &mut Vec<HostNo>, via: HostNo, lane: Lane) {
    if let Some(outbox) = outboxes.get_mut(&via)
        && let Some(queue) = outbox.queues.get_mut(&lane)
        && std::mem::take(&mut queue.blocked) != Blocked::No
    {
        outbox.ring.push_back(lane);
        tell(ready, via, outbox);
    }
}

fn continues(dests: &[Dest], host: HostNo, seq: u64) -> bool {
    dests.last().is_some_and(|last| last.first + last.count == host && last.seq == seq)
}

fn add_dest(dests: &mut Short<Dest>, dest: Dest) {
    if continues(dests, dest.first, dest.seq)
        && let Some(last) = dests.last_mut()
    {
        last.count += dest.count;
    } else {
        dests.push(dest);
    }
}

/// `len` bytes from `offset` on of what the pieces hold together.
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
