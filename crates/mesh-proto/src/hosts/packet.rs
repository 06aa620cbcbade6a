//! Packets: what travels on a connection.
//!
//! ```text
//! header (48 bytes) | destinations (16 bytes each) | shares (24 bytes each) | body
//! ```
//!
//! A packet is a frame, a segment of one, or a message between two gateways. Relays look only at the destinations and
//! pass the body on unchanged.

use super::{HostSet, Short};
use crate::HostNo;
use crate::codec::{u16_at, u32_at, u64_at};
use crate::codes::codes;
use bytes::Bytes;
use smallvec::smallvec;
use thiserror::Error;

/// Length of a packet's fixed header.
pub const PACKET_HEAD: usize = 48;
/// The longest body of a packet. A peer that claims more is not trusted.
pub const MAX_PACKET: usize = 512 << 10;
/// The most runs of destinations, or of shares, in a packet.
pub const MAX_RUNS: usize = 8192;
/// Host numbers are below this.
pub const MAX_HOSTS: u32 = 1 << 20;

const MAGIC: u16 = 0x4d74;
const VERSION: u8 = 2;
const DEST_LEN: usize = 16;
const SHARE_LEN: usize = 24;
const GAP_LEN: usize = 16;
/// A frame is a header and at most [`crate::MAX_BODY`] bytes; nothing allocates for more.
const MAX_FRAME: u64 = crate::MAX_BODY + 4096;

codes! {
    /// What a packet is for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum PacketKind {
        /// The first packet of the dialing host: see [`Join`](super::Join).
        Join = 1,
        /// The answer of the dialed host: see [`Welcome`](super::Welcome).
        Welcome = 2,
        /// The other answer, and the last packet: see [`Refuse`](super::Refuse).
        Refuse = 3,
        /// A mere sign of life.
        Ping = 4,
        /// An answer to a ping.
        Pong = 5,
        /// A frame, a segment of one, or merged replies of several hosts.
        Data = 6,
        /// The shares say what their hosts have received from the destination.
        Ack = 7,
        /// What the origin is missing from the destination: the body is a list of [`Gap`]s.
        Nack = 8,
        /// The last packet of a host that ends in order: see [`Farewell`](super::Farewell).
        Farewell = 9,
        /// The first packet of an observer, who looks into a job without joining it: see [`Look`](super::Look).
        Look = 10,
        /// Bytes between an observer and the job's controller.
        Said = 11,
    }
}

/// A packet that cannot be read. Its connection can no longer be trusted.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PacketError {
    /// The first bytes are not ours.
    #[error("not a mesh packet: it begins with {0:#06x}")]
    Magic(u16),
    /// The peer speaks another version.
    #[error("the peer speaks packet version {theirs}, this side {ours}; install the same mesh-core on both hosts")]
    Version {
        /// What the packet says.
        theirs: u8,
        /// What this side reads.
        ours: u8,
    },
    /// The kind byte names nothing.
    #[error("unknown packet kind {0}")]
    Kind(u8),
    /// A length exceeds its limit.
    #[error("a packet with {got} {what} is above the limit of {limit}")]
    TooLong {
        /// What there is too much of.
        what: &'static str,
        /// How much the packet claims.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// The fields contradict each other.
    #[error("malformed packet: {0}")]
    Malformed(&'static str),
}

/// Neighbouring hosts that get a packet under the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dest {
    /// The first of them.
    pub first: HostNo,
    /// How many there are.
    pub count: u32,
    /// The packet's number in the peer stream from the origin to each; 0 if the packet has none.
    pub seq: u64,
}

impl Dest {
    /// One host.
    #[must_use]
    pub fn one(host: HostNo, seq: u64) -> Self {
        Self { first: host, count: 1, seq }
    }

    fn contains(&self, host: HostNo) -> bool {
        host.wrapping_sub(self.first) < self.count
    }
}

/// Neighbouring hosts that contribute to a packet of several: merged replies or merged acks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    /// The first of them.
    pub first: HostNo,
    /// How many there are.
    pub count: u32,
    /// The packet's number in the peer stream of each; 0 for an ack alone.
    pub seq: u64,
    /// How far each has received the destination's peer stream.
    pub ack: u64,
}

impl Share {
    /// One host.
    #[must_use]
    pub fn one(host: HostNo, seq: u64, ack: u64) -> Self {
        Self { first: host, count: 1, seq, ack }
    }

    /// The hosts.
    pub fn hosts(&self) -> impl Iterator<Item = HostNo> + use<> {
        self.first..self.first + self.count
    }
}

/// Numbers of a peer stream that have not arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gap {
    /// The first.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// One packet. Its body is never inspected, and never copied on the way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// What it is for.
    pub kind: PacketKind,
    /// The host that sent the packet, whoever relays it.
    pub origin: HostNo,
    /// Which of the origin's frames a segment belongs to; 0 for a frame that was not cut.
    pub message: u32,
    /// Where in the frame the body begins.
    pub offset: u64,
    /// The frame's length.
    pub total: u64,
    /// How far the origin has received the peer stream of the sole destination; 0 for nothing or if there are several,
    /// except in a nack that says the same to all.
    pub ack: u64,
    /// The hosts that it is for; ascending.
    pub dests: Short<Dest>,
    /// The hosts that contribute to it, unless it is the origin alone; ascending.
    pub shares: Short<Share>,
    /// The bytes.
    pub body: Short<Bytes>,
}

impl Packet {
    /// An empty packet.
    #[must_use]
    pub fn new(kind: PacketKind, origin: HostNo) -> Self {
        Self {
            kind,
            origin,
            message: 0,
            offset: 0,
            total: 0,
            ack: 0,
            dests: Short::new(),
            shares: Short::new(),
            body: Short::new(),
        }
    }

    /// Replies of several hosts to one host, merged by `relay`, each under its own number.
    #[must_use]
    pub fn merged(relay: HostNo, dest: HostNo, shares: Vec<Share>, body: Short<Bytes>) -> Self {
        let mut packet = Self::new(PacketKind::Data, relay);
        packet.dests = smallvec![Dest::one(dest, 0)];
        packet.shares = shares.into();
        packet.total = body.iter().map(|piece| piece.len() as u64).sum();
        packet.body = body;
        packet
    }

    /// Bytes of the body.
    #[must_use]
    pub fn body_len(&self) -> usize {
        self.body.iter().map(Bytes::len).sum()
    }

    /// Whether the body is the first part of its frame.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.offset == 0
    }

    /// Whether the body is the last part of its frame.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.offset + self.body_len() as u64 >= self.total
    }

    /// Whether the body is a whole frame.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_first() && self.is_last()
    }

    /// The hosts that it is for.
    #[must_use]
    pub fn hosts(&self) -> HostSet {
        let mut set = HostSet::default();
        self.dests.iter().for_each(|dest| set.push_run(dest.first, dest.count));
        set
    }

    /// The host that it is for, if there is exactly one.
    #[must_use]
    pub fn sole(&self) -> Option<HostNo> {
        match &*self.dests {
            [dest] if dest.count == 1 => Some(dest.first),
            _ => None,
        }
    }

    /// The packet's number for `host`, if it is for that host.
    #[must_use]
    pub fn seq_for(&self, host: HostNo) -> Option<u64> {
        let at = self.dests.partition_point(|dest| dest.first <= host);
        at.checked_sub(1).map(|at| self.dests[at]).filter(|dest| dest.contains(host)).map(|dest| dest.seq)
    }

    /// What a relay notes for this packet in a merged one: its origin, number and ack.
    #[must_use]
    pub fn share(&self) -> Option<Share> {
        match &*self.dests {
            [dest] if dest.count == 1 && self.shares.is_empty() => Some(Share::one(self.origin, dest.seq, self.ack)),
            _ => None,
        }
    }

    /// The same packet for some of its hosts, as a relay sends it to one of its next hops. The body is shared.
    #[must_use]
    pub fn for_hosts(&self, hosts: &HostSet) -> Self {
        let mut dests = Short::new();
        for &(first, count) in hosts.runs() {
            let end = first + count;
            let from = self.dests.partition_point(|dest| dest.first + dest.count <= first);
            for dest in self.dests[from..].iter().take_while(|dest| dest.first < end) {
                let (low, high) = (dest.first.max(first), (dest.first + dest.count).min(end));
                dests.push(Dest { first: low, count: high - low, seq: dest.seq });
            }
        }
        Self { dests, ..self.clone() }
    }

    /// Encodes everything before the body.
    #[must_use]
    pub fn encode_head(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(PACKET_HEAD + DEST_LEN * self.dests.len() + SHARE_LEN * self.shares.len());
        self.write_head(&mut out);
        out
    }

    /// Appends everything before the body.
    ///
    /// # Panics
    /// If the packet is too long or has too many runs: whoever builds packets must cut them.
    pub fn write_head(&self, out: &mut Vec<u8>) {
        let mut head = [0; PACKET_HEAD];
        head[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        head[2] = VERSION;
        head[3] = self.kind as u8;
        let body = self.body_len();
        assert!(body <= MAX_PACKET && self.dests.len() <= MAX_RUNS && self.shares.len() <= MAX_RUNS);
        head[4..6].copy_from_slice(&(self.dests.len() as u16).to_le_bytes());
        head[6..8].copy_from_slice(&(self.shares.len() as u16).to_le_bytes());
        head[8..12].copy_from_slice(&self.origin.to_le_bytes());
        head[12..16].copy_from_slice(&self.message.to_le_bytes());
        head[16..24].copy_from_slice(&self.offset.to_le_bytes());
        head[24..32].copy_from_slice(&self.total.to_le_bytes());
        head[32..40].copy_from_slice(&self.ack.to_le_bytes());
        head[40..44].copy_from_slice(&(body as u32).to_le_bytes());
        out.extend_from_slice(&head);
        for dest in &self.dests {
            out.extend_from_slice(&dest.first.to_le_bytes());
            out.extend_from_slice(&dest.count.to_le_bytes());
            out.extend_from_slice(&dest.seq.to_le_bytes());
        }
        for share in &self.shares {
            out.extend_from_slice(&share.first.to_le_bytes());
            out.extend_from_slice(&share.count.to_le_bytes());
            out.extend_from_slice(&share.seq.to_le_bytes());
            out.extend_from_slice(&share.ack.to_le_bytes());
        }
    }

    /// Bytes that the packet takes on a connection.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        PACKET_HEAD + DEST_LEN * self.dests.len() + SHARE_LEN * self.shares.len() + self.body_len()
    }

    /// A list of gaps as a packet for the host that must fill them.
    #[must_use]
    pub fn nack(origin: HostNo, dest: HostNo, ack: u64, gaps: &[Gap]) -> Self {
        let mut packet = Self::new(PacketKind::Nack, origin);
        packet.dests = smallvec![Dest::one(dest, 0)];
        packet.ack = ack;
        let mut body = Vec::with_capacity(GAP_LEN * gaps.len());
        for gap in gaps {
            body.extend_from_slice(&gap.first.to_le_bytes());
            body.extend_from_slice(&gap.count.to_le_bytes());
        }
        packet.body = smallvec![Bytes::from(body)];
        packet
    }

    /// The gaps of a nack; empty for any other packet.
    pub fn gaps(&self) -> impl Iterator<Item = Gap> + '_ {
        let body: &[u8] = match (&self.kind, &*self.body) {
            (PacketKind::Nack, [body]) => body,
            _ => &[],
        };
        body.chunks_exact(GAP_LEN).map(|raw| Gap { first: u64_at(raw, 0), count: u64_at(raw, 8) })
    }
}

/// The fixed header, and how much follows it.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    packet: Packet,
    dests: usize,
    shares: usize,
    pub(crate) body: usize,
}

impl Head {
    /// Reads the fixed header and checks what can be checked without the rest.
    pub(crate) fn decode(raw: &[u8; PACKET_HEAD]) -> Result<Self, PacketError> {
        let magic = u16_at(raw, 0);
        if magic != MAGIC {
            return Err(PacketError::Magic(magic));
        }
        if raw[2] != VERSION {
            return Err(PacketError::Version { theirs: raw[2], ours: VERSION });
        }
        let mut packet = Packet::new(PacketKind::from_code(raw[3]).ok_or(PacketError::Kind(raw[3]))?, u32_at(raw, 8));
        packet.message = u32_at(raw, 12);
        packet.offset = u64_at(raw, 16);
        packet.total = u64_at(raw, 24);
        packet.ack = u64_at(raw, 32);
        let (dests, shares) = (usize::from(u16_at(raw, 4)), usize::from(u16_at(raw, 6)));
        let body = u32_at(raw, 40);
        let limits = [
            ("bytes", u64::from(body), MAX_PACKET as u64),
            ("destinations", dests as u64, MAX_RUNS as u64),
            ("shares", shares as u64, MAX_RUNS as u64),
            ("bytes in its frame", packet.total, MAX_FRAME),
            ("as its origin's number", u64::from(packet.origin), u64::from(MAX_HOSTS - 1)),
        ];
        for (what, got, limit) in limits {
            if got > limit {
                return Err(PacketError::TooLong { what, got, limit });
            }
        }
        if raw[44..48] != [0; 4] {
            return Err(PacketError::Malformed("its last word is not zero"));
        }
        let end = packet.offset.checked_add(u64::from(body));
        let fits = match packet.kind {
            PacketKind::Data => end.is_some_and(|end| end <= packet.total) && (body > 0 || packet.total == 0),
            _ => packet.offset == 0 && packet.total == 0 && packet.message == 0,
        };
        if !fits {
            return Err(PacketError::Malformed("its body does not fit its frame"));
        }
        let routed = matches!(packet.kind, PacketKind::Data | PacketKind::Ack | PacketKind::Nack);
        if routed != (dests > 0) || (shares > 0 && !matches!(packet.kind, PacketKind::Data | PacketKind::Ack)) {
            return Err(PacketError::Malformed("destinations or shares do not fit its kind"));
        }
        if shares > 0 && dests != 1 {
            return Err(PacketError::Malformed("shares for more than one destination"));
        }
        if packet.kind == PacketKind::Nack && !(body as usize).is_multiple_of(GAP_LEN) {
            return Err(PacketError::Malformed("a list of gaps that ends in the middle of one"));
        }
        Ok(Self { packet, dests, shares, body: body as usize })
    }

    /// Bytes between the fixed header and the body.
    pub(crate) fn runs_len(&self) -> usize {
        self.dests * DEST_LEN + self.shares * SHARE_LEN
    }

    /// Reads the runs from [`Head::runs_len`] bytes.
    pub(crate) fn read_runs(&mut self, raw: &[u8]) -> Result<(), PacketError> {
        let (dests, shares) = raw.split_at(self.dests * DEST_LEN);
        let mut end = 0;
        for raw in dests.chunks_exact(DEST_LEN) {
            let dest = Dest { first: u32_at(raw, 0), count: u32_at(raw, 4), seq: u64_at(raw, 8) };
            end = after(end, dest.first, dest.count)?;
            self.packet.dests.push(dest);
        }
        end = 0;
        for raw in shares.chunks_exact(SHARE_LEN) {
            let (first, count) = (u32_at(raw, 0), u32_at(raw, 4));
            end = after(end, first, count)?;
            self.packet.shares.push(Share { first, count, seq: u64_at(raw, 8), ack: u64_at(raw, 16) });
        }
        if !self.packet.shares.is_empty() && self.packet.sole().is_none() {
            return Err(PacketError::Malformed("shares for more than one destination"));
        }
        Ok(())
    }

    /// The packet with its body.
    pub(crate) fn finish(self, body: Bytes) -> Packet {
        let mut packet = self.packet;
        if !body.is_empty() {
            packet.body = smallvec![body];
        }
        packet
    }
}

/// The end of a run, which must begin at `end` or later.
fn after(end: HostNo, first: HostNo, count: u32) -> Result<HostNo, PacketError> {
    match first.checked_add(count) {
        Some(next) if count > 0 && first >= end && next <= MAX_HOSTS => Ok(next),
        _ => Err(PacketError::Malformed("runs of hosts that are empty, overlap or reach too far")),
    }
}
