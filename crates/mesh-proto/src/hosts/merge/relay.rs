//! Merging the replies of several hosts.

use super::pending_calls::{Entry, Key, PendingCalls};
use super::pending_replies::PendingReplies;
use super::table::{Entry as Merged, done_in, origins_of, read, write};
use super::{MERGED_MAX, PAYLOADS_MAX};
use crate::hosts::{Dest, HostSet, MAX_RUNS, Packet, PacketKind, Share, Short};
use crate::{CallId, Frame, HEADER_LEN, Header, HostNo, Kind, ProcAddr};
use bytes::{Bytes, BytesMut};
use smallvec::smallvec;
use std::time::Duration;

/// Merges the packets in which hosts answer one call, at a host that relayed the call to them.
///
/// It must be told of each call that is relayed, and given every data packet that goes on to another host, including
/// the relay's own. Send what a method returns at once, in its order. A packet merged from several names the relay as
/// its origin, and lists each host and its number among the shares.
///
/// ```
/// # use mesh_proto::hosts::{Cargo, HostMerge, HostSet, Lane, RelayMerge, PeerStreams};
/// # use mesh_proto::messages::{Answer, Reply};
/// # use mesh_proto::{Frame, ProcAddr};
/// # use bytes::Bytes;
/// # use std::time::Duration;
/// let (caller, now) = (ProcAddr::CONTROLLER, Duration::ZERO);
/// let mut relay = RelayMerge::new(1);
/// assert!(relay.expect(0, caller, 9, &HostSet::range(1, 2)).is_empty());
/// let mut out = Vec::new();
/// for host in [2, 1] {
///     let mut merge = HostMerge::new(host, ProcAddr { rank: host, ..caller });
///     assert!(merge.expect(caller, 9, 1).is_empty());
///     let reply = Reply { actor: 3, call: 9, place: host - 1, answer: Answer::Value };
///     let frame = merge.on_reply(Frame::build_plain(reply.header(caller, caller), None, b"", b"done"), now).remove(0);
///     // As it comes from the host: numbered, for host 0.
///     let pieces = [Bytes::copy_from_slice(&frame.header.encode()), frame.body].into();
///     let mut peer_streams = PeerStreams::new(host, 1 << 20);
///     assert!(peer_streams.post_one(1, 0, Cargo { frame: pieces, lane: Lane { sender: (0, host, host), mesh: 0 } }));
///     out.extend(relay.offer(peer_streams.next_packet(1, now).unwrap(), now));
/// }
/// assert_eq!(out.len(), 1, "one packet of both");
/// assert_eq!((out[0].shares[0].first, out[0].shares[0].count), (1, 2));
/// ```
#[derive(Debug)]
pub struct RelayMerge {
    me: HostNo,
    /// Awaited: the hosts that have not answered.
    calls: PendingCalls<HostSet, Shares>,
}

#[derive(Debug, Default)]
struct Shares {
    /// The host that everything goes to.
    dest: HostNo,
    of: Vec<Share>,
    origins: HostSet,
}

impl RelayMerge {
    /// For the relay `me`.
    #[must_use]
    pub fn new(me: HostNo) -> Self {
        Self { me, calls: PendingCalls::default() }
    }

    /// A call of `caller`, on host `dest`, was relayed to `hosts`, possibly including the relay: merges their answers
    /// from now on.
    #[must_use = "packets have to be sent"]
    pub fn expect(&mut self, dest: HostNo, caller: ProcAddr, call: CallId, hosts: &HostSet) -> Vec<Packet> {
        let mut out = Vec::new();
        if hosts.is_empty() {
            return out;
        }
        if let Some(oldest) = self.calls.surplus() {
            self.flush(oldest, &mut out);
            self.calls.forget(&oldest);
        }
        let entry = self.calls.place((caller, call));
        entry.sources.dest = dest;
        entry.awaited.extend_by(hosts);
        out
    }

    /// Takes a packet that goes on to another host. Returns what to send now: nothing if it is held, else what must go
    /// before it, then the packet itself or the merged one.
    #[must_use = "packets have to be sent"]
    pub fn offer(&mut self, packet: Packet, now: Duration) -> Vec<Packet> {
        let mut out = Vec::new();
        if self.calls.is_empty() || packet.kind != PacketKind::Data {
            out.push(packet);
            return out;
        }
        let from = origins_in(&packet);
        let head = header_of(&packet).filter(|head| matches!(head.kind, Kind::Gathered | Kind::Reply));
        let key = head.map(|head| (head.dst, head.call));
        if let Some(key) = key
            && let Some(dest) = packet.sole()
            && let Some(entry) = self.calls.get(&key).filter(|entry| entry.sources.dest == dest)
        {
            match readable(entry, &packet, &from) {
                Some((header, merged)) => {
                    entry.awaited.reduce_by(&done_in(&merged));
                    self.hold(key, header, merged, (&packet, from), now, &mut out);
                }
                None => {
                    // Its host does not merge these, so more packets may follow: do not wait for it.
                    entry.awaited.reduce_by(&from);
                    self.pass(packet, &from, &mut out);
                }
            }
            if self.calls.get(&key).is_some_and(|entry| entry.awaited.is_empty()) {
                self.flush(key, &mut out);
                self.calls.forget(&key);
            }
        } else {
            self.pass(packet, &from, &mut out);
        }
        out
    }

    /// A host is dead, or its answers take another route: stops waiting for it.
    #[must_use = "packets have to be sent"]
    pub fn lost(&mut self, host: HostNo) -> Vec<Packet> {
        let mut out = Vec::new();
        for key in self.calls.all(|_| true) {
            let done = self.calls.get(&key).is_some_and(|entry| entry.awaited.remove(host) && entry.awaited.is_empty());
            if done {
                self.flush(key, &mut out);
                self.calls.forget(&key);
            }
        }
        out
    }

    /// Forgets everything that was to go to a dead host.
    pub fn end(&mut self, dest: HostNo) {
        for key in self.calls.all(|_| true) {
            if self.calls.get(&key).is_some_and(|entry| entry.sources.dest == dest) {
                self.calls.forget(&key);
            }
        }
    }

    /// When to call [`RelayMerge::on_tick`].
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.calls.next_deadline()
    }

    /// Releases what was held long enough.
    #[must_use = "packets have to be sent"]
    pub fn on_tick(&mut self, now: Duration) -> Vec<Packet> {
        let mut out = Vec::new();
        while let Some(key) = self.calls.due(now) {
            self.flush(key, &mut out);
        }
        out
    }

    /// Whether no call is awaited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    fn hold(
        &mut self,
        key: Key,
        header: Header,
        merged: Vec<Merged>,
        (packet, from): (&Packet, HostSet),
        now: Duration,
        out: &mut Vec<Packet>,
    ) {
        let Some(entry) = self.calls.get(&key) else { return };
        let dest = entry.sources.dest;
        let again = entry.sources.origins.overlaps(&from);
        let sizes = merged.iter().map(Merged::size);
        let size = sizes.map(|(bytes, runs)| PendingReplies::size(bytes, runs)).sum();
        let payloads = merged.iter().map(Merged::count).sum();
        let many = entry.sources.of.len() + packet.shares.len() >= MAX_RUNS;
        if again || many || entry.replies.is_full_for(payloads, size) {
            self.flush(key, out);
        }
        let of_these = |sources: &Shares| sources.dest == dest && sources.origins.overlaps(&from);
        if let Some(later) = self.calls.held_after(&key, |_, entry| of_these(&entry.sources)) {
            self.flush(later, out);
        }
        let Some(entry) = self.calls.get(&key) else { return };
        entry.header.get_or_insert(header);
        match packet.share() {
            Some(share) => entry.sources.of.push(share),
            None => entry.sources.of.extend_from_slice(&packet.shares),
        }
        entry.sources.origins.extend_by(&from);
        merged.into_iter().for_each(|one| entry.replies.add_entry(one));
        self.calls.hold(key, now);
    }

    /// Passes the packet on unchanged, after what is held of its origins for the same host.
    fn pass(&mut self, packet: Packet, from: &HostSet, out: &mut Vec<Packet>) {
        if !self.calls.holds_nothing() {
            let held = self
                .calls
                .held(|_, entry| packet.seq_for(entry.sources.dest).is_some() && entry.sources.origins.overlaps(from));
            held.into_iter().for_each(|key| self.flush(key, out));
        }
        out.push(packet);
    }

    /// Releases what is held of a call, after what was held earlier for the same host.
    fn flush(&mut self, key: Key, out: &mut Vec<Packet>) {
        let Some(dest) = self.calls.get(&key).map(|entry| entry.sources.dest) else { return };
        for key in self.calls.held_until(&key, |_, entry| entry.sources.dest == dest) {
            if let Some(entry) = self.calls.release(&key) {
                entry.sources.origins = HostSet::default();
                let mut shares = std::mem::take(&mut entry.sources.of);
                shares.sort_unstable_by_key(|share| share.first);
                shares.dedup_by(|next, share| {
                    let same = (share.first + share.count, share.seq, share.ack) == (next.first, next.seq, next.ack);
                    share.count += if same { next.count } else { 0 };
                    same
                });
                let (payloads, series) = entry.replies.take();
                if let Some(header) = entry.header.take() {
                    let frame = write(header, payloads, &series);
                    let body = Short::from([Bytes::copy_from_slice(&frame.header.encode()), frame.body]);
                    out.push(sealed(self.me, dest, shares, body));
                }
            }
        }
    }
}

/// The packet with these shares. With a single origin, it becomes that origin's own packet.
fn sealed(me: HostNo, dest: HostNo, shares: Vec<Share>, body: Short<Bytes>) -> Packet {
    let mut packet = Packet::merged(me, dest, shares, body);
    if let [only] = packet.shares[..]
        && only.count == 1
    {
        (packet.origin, packet.ack) = (only.first, only.ack);
        packet.dests = smallvec![Dest::one(dest, only.seq)];
        packet.shares = Short::new();
    }
    packet
}

/// The hosts whose bytes are in a packet.
fn origins_in(packet: &Packet) -> HostSet {
    if packet.shares.is_empty() {
        return HostSet::one(packet.origin);
    }
    HostSet::from_runs(packet.shares.iter().map(|share| (share.first, share.count)).collect())
}

/// The mergeable content of a packet. Nothing in it is trusted.
fn readable(entry: &Entry<HostSet, Shares>, packet: &Packet, from: &HostSet) -> Option<(Header, Vec<Merged>)> {
    let frame = frame_of(packet).filter(|frame| frame.header.kind == Kind::Gathered)?;
    let ours = entry.header.is_none_or(|first| first.actor == frame.header.actor)
        && frame.body.len() <= MERGED_MAX
        // A mere ack is not a share of a reply.
        && packet.shares.iter().all(|share| share.seq > 0);
    let merged = if ours { read(&frame).ok()? } else { return None };
    // Every part must name a host that the packet names, and no frame of ours has more payloads.
    let count: usize = merged.iter().map(Merged::count).sum();
    (count <= PAYLOADS_MAX && origins_of(&merged) == *from).then_some((frame.header, merged))
}

/// The header of the frame that begins in a packet.
fn header_of(packet: &Packet) -> Option<Header> {
    if !packet.is_first() {
        return None;
    }
    let mut raw = [0; HEADER_LEN];
    let mut at = 0;
    for piece in &packet.body {
        let taken = piece.len().min(HEADER_LEN - at);
        raw[at..at + taken].copy_from_slice(&piece[..taken]);
        at += taken;
    }
    if at == HEADER_LEN { Header::decode(&raw).ok() } else { None }
}

/// The frame that a packet consists of. Its body is shared, unless it lies in several pieces.
fn frame_of(packet: &Packet) -> Option<Frame> {
    let header = header_of(packet).filter(|_| packet.is_whole())?;
    let mut skip = HEADER_LEN;
    let mut pieces = Vec::new();
    for piece in &packet.body {
        let cut = skip.min(piece.len());
        skip -= cut;
        if cut < piece.len() {
            pieces.push(piece.slice(cut..));
        }
    }
    let body = match &pieces[..] {
        [body] => body.clone(),
        _ => pieces
            .iter()
            .fold(BytesMut::new(), |mut all, piece| {
                all.extend_from_slice(piece);
                all
            })
            .freeze(),
    };
    (header.body_len == body.len() as u64).then_some(Frame { header, body })
}
