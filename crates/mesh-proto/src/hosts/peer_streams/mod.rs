//! The traffic under way from one host to the others, and from them to it.
//!
//! Everything from one host to another is one numbered *peer stream*, whatever path its packets take. The receiver
//! delivers by number and the sender keeps what is not acknowledged, so connections and relays may lose or repeat
//! anything.
//!
//! - this file: types, posting, and what is due;
//! - `outbox`, `taking`: what waits for a next hop, and choosing the next packet from it;
//! - `outgoing`: what is under way to a host; `incoming`: what has arrived from it; `receiving`: packets in;
//! - `peers`: both for runs of hosts in the same state; `paths`: paths that change, hosts that end;
//! - `passing`: others' acks.
//!
//! STR-1: a receiver delivers each number of a peer stream once, in order. Early packets are held; repeated ones are
//! dropped and acknowledged again.
//!
//! STR-2: a packet gets its number when it is taken for sending, and the messages of a lane in the order in which they
//! were posted. A message for a host that an earlier one of its lane reaches by another next hop waits until the
//! earlier one is completely numbered, so lanes are in order at every receiver.
//!
//! STR-3: a numbered packet is kept until it is acknowledged. It is sent again, before anything new on that path, when
//! the path changes, when the receiver reports it missing, or after a time without progress.
//!
//! STR-4: at most a window is under way to one host, and at most a window is held early from one host. Each packet
//! counts [`PACKET_COST`] beside its bytes; a packet larger than the window goes alone.
//!
//! STR-5: when everything is acknowledged, nothing is sent.
//!
//! STR-6: when a host ends, every message that it has not acknowledged completely is reported. Afterwards nothing is
//! kept for it, and nothing from it is accepted.

mod cargo;
mod incoming;
mod outbox;
mod outgoing;
mod passing;
mod paths;
mod peers;
mod receiving;
mod taking;

use super::packet::{Dest, MAX_RUNS, Packet, PacketKind, Share};
use super::{HostSet, Short};
use crate::HostNo;
use cargo::AHEAD;
pub use cargo::{Arrival, Cargo, Lane, Lost};
use outbox::{Blocked, Hosts, Outbox, Post};
use outgoing::{Log, Patience};
use passing::Passing;
use peers::Peers;
use rustc_hash::FxHashMap;
use smallvec::smallvec;
use std::cmp::Reverse;
use std::time::Duration;

/// What a packet costs in a window beside its bytes: a flood of empty ones fills memory too.
pub const PACKET_COST: u64 = 256;
/// Frames longer than this are cut into segments of this length.
pub const SEGMENT: usize = 256 << 10;

/// How long a relay keeps others' acks in order to merge them.
const MERGE_DELAY: Duration = Duration::from_millis(5);
/// The outbox of posts that have no path.
const NOWHERE: HostNo = HostNo::MAX;

/// All peer streams of one host, both ways.
///
/// The runtime [posts](PeerStreams::post) frames, and takes [packets](PeerStreams::next_packet) for each connection
/// that has room. It passes what it reads to [`PeerStreams::on_packet`], and calls [`PeerStreams::on_tick`] when
/// [`PeerStreams::next_deadline`] is reached. The next hops in [`PeerStreams::take_ready`] may have packets again.
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
    /// The next hops at which posts of a lane wait.
    lanes: FxHashMap<Lane, Short<HostNo>>,
    log: Log,
    tickets: u64,
    messages: u32,
    /// Next hops that may have packets again.
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

    /// Sets the silence after which hosts are dead: lost packets are sent again within it, even if nothing else tells
    /// of their loss. Packets already under way keep their times.
    pub fn resend_within(&mut self, window: Duration) {
        self.patience = Patience::within(window);
    }

    /// Posts a message to `hosts` by the next hop `via`: one next hop's share of a message. Returns the hosts that have
    /// ended: nothing goes to them.
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

    /// Posts a message to one host by the next hop `via`. Returns false if the host has ended: nothing goes to it.
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

    /// Bytes that wait for the next hop `via`, not yet taken; used to slow down senders.
    #[must_use]
    pub fn waiting(&self, via: HostNo) -> u64 {
        self.outboxes.get(&via).map_or(0, |outbox| outbox.waiting)
    }

    /// Bytes under way to `host` that are not acknowledged.
    #[must_use]
    pub fn outstanding(&self, host: HostNo) -> u64 {
        self.peers.get(host).map_or(0, |peer| peer.out.outstanding)
    }

    /// Next hops that may have packets again, for another reason than a post.
    pub fn take_ready(&mut self) -> Vec<HostNo> {
        self.ready.iter().for_each(|via| {
            if let Some(outbox) = self.outboxes.get_mut(via) {
                outbox.told = false;
            }
        });
        std::mem::take(&mut self.ready)
    }

    /// Whether nothing is under way, waiting, held or to be acknowledged.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.passing.is_empty()
            && self.outboxes.values().all(Outbox::is_empty)
            && self.peers.iter().all(|(_, _, peer)| peer.out.outstanding == 0 && peer.inc.is_idle())
    }

    /// Bytes held because they came early, from all hosts.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.peers.iter().map(|(_, count, peer)| u64::from(count) * peer.inc.held_cost).sum()
    }

    /// Takes an ack for another host, to be merged with others for that host and sent on by [`PeerStreams::on_tick`].
    /// Returns false if it must be sent on unchanged.
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

    /// When to call [`PeerStreams::on_tick`] next, if ever.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        let alarm = self.peers.alarms.peek().map(|Reverse((at, _))| *at);
        [alarm, self.passing.deadline()].into_iter().flatten().min()
    }

    /// Does what is due. Appends acks and nacks to `out`, for the runtime to send to the next hops of their possibly
    /// many destinations. What must be sent again becomes [ready](PeerStreams::take_ready).
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
                    // One for the whole run, however many hosts a packet claims to speak for.
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

/// Lets a blocked lane try again.
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
