//! The first and last packets that two gateways exchange.

use super::fate::Parting;
use super::packet::{Packet, PacketError, PacketKind};
use crate::HostNo;
use crate::codec::{u32_at, u64_at};
use crate::codes::codes;
use bytes::Bytes;
use smallvec::smallvec;

/// Sent by the dialing host: which job it means, who it is, and whom it expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// The job.
    pub job: u64,
    /// The dialing host.
    pub from: HostNo,
    /// The dialed host. A host that does not know its number yet learns it from this.
    pub to: HostNo,
    /// Drawn at random when the dialing side's runtime started, so a restarted host is recognised as a new one.
    pub incarnation: u64,
    /// The other side's incarnation as far as it is known; 0 the first time.
    pub expected: u64,
    /// What the runtimes tell each other.
    pub body: Bytes,
}

const JOIN_LEN: usize = 32;

impl Join {
    /// As a packet.
    #[must_use]
    pub fn packet(&self) -> Packet {
        let mut raw = Vec::with_capacity(JOIN_LEN + self.body.len());
        raw.extend_from_slice(&self.job.to_le_bytes());
        raw.extend_from_slice(&self.from.to_le_bytes());
        raw.extend_from_slice(&self.to.to_le_bytes());
        raw.extend_from_slice(&self.incarnation.to_le_bytes());
        raw.extend_from_slice(&self.expected.to_le_bytes());
        raw.extend_from_slice(&self.body);
        with_body(PacketKind::Join, self.from, raw)
    }

    /// From a packet.
    ///
    /// # Errors
    /// If it is not a join, or too short.
    pub fn read(packet: &Packet) -> Result<Self, PacketError> {
        let raw = body_of(packet, PacketKind::Join, JOIN_LEN)?;
        Ok(Self {
            job: u64_at(&raw, 0),
            from: u32_at(&raw, 8),
            to: u32_at(&raw, 12),
            incarnation: u64_at(&raw, 16),
            expected: u64_at(&raw, 24),
            body: raw.slice(JOIN_LEN..),
        })
    }
}

/// The dialing side wants to look into a job, not to join it.
///
/// The answer is a [`Welcome`]. Its body is empty or, if no job is named, read by [`Look::jobs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// The job; 0 to ask which jobs there are.
    pub job: u64,
}

impl Look {
    /// As a packet. An observer is not a host and has no number.
    #[must_use]
    pub fn packet(&self) -> Packet {
        with_body(PacketKind::Look, 0, self.job.to_le_bytes().to_vec())
    }

    /// From a packet.
    ///
    /// # Errors
    /// If it is not a look, or has the wrong length.
    pub fn read(packet: &Packet) -> Result<Self, PacketError> {
        let raw = body_of(packet, PacketKind::Look, 8)?;
        if raw.len() > 8 {
            return Err(PacketError::Malformed("a greeting that is too long"));
        }
        Ok(Self { job: u64_at(&raw, 0) })
    }

    /// The answer to the question which jobs there are.
    #[must_use]
    pub fn welcome(jobs: &[u64]) -> Welcome {
        let body: Vec<u8> = jobs.iter().flat_map(|job| job.to_le_bytes()).collect();
        Welcome { incarnation: 0, body: body.into() }
    }

    /// The jobs that such an answer names; `None` if its body is malformed.
    #[must_use]
    pub fn jobs(welcome: &Welcome) -> Option<Vec<u64>> {
        let chunks = welcome.body.chunks_exact(8);
        chunks.remainder().is_empty().then(|| chunks.map(|raw| u64_at(raw, 0)).collect())
    }
}

/// The dialed host accepts the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Drawn at random when this side's runtime started.
    pub incarnation: u64,
    /// What the runtimes tell each other.
    pub body: Bytes,
}

impl Welcome {
    /// As a packet of host `me`.
    #[must_use]
    pub fn packet(&self, me: HostNo) -> Packet {
        with_body(PacketKind::Welcome, me, [&self.incarnation.to_le_bytes()[..], &self.body].concat())
    }

    /// From a packet.
    ///
    /// # Errors
    /// If it is not a welcome, or too short.
    pub fn read(packet: &Packet) -> Result<Self, PacketError> {
        let raw = body_of(packet, PacketKind::Welcome, 8)?;
        Ok(Self { incarnation: u64_at(&raw, 0), body: raw.slice(8..) })
    }
}

codes! {
    /// Why a host refuses another.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Refusal {
        /// There is no such job here, or no longer.
        NoSuchJob = 1,
        /// The caller's credentials do not allow what it wants.
        NotAllowed = 2,
        /// This is not the host, or not the incarnation, that the caller means.
        NotMe = 3,
        /// The caller was declared dead and must stop its work.
        Dead = 4,
        /// The caller's version differs.
        Version = 5,
        /// The host accepts no more for now; the caller may ask again.
        Busy = 6,
        /// Any other reason, given in the text.
        Other = 255,
    }
}

/// The dialed host refuses the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refuse {
    /// For the program.
    pub code: Refusal,
    /// For people.
    pub text: String,
}

impl Refuse {
    /// As a packet of host `me`.
    #[must_use]
    pub fn packet(&self, me: HostNo) -> Packet {
        with_body(PacketKind::Refuse, me, [&[self.code as u8], self.text.as_bytes()].concat())
    }

    /// From a packet. A code that this side does not know is [`Refusal::Other`].
    ///
    /// # Errors
    /// If it is not a refusal, or too short.
    pub fn read(packet: &Packet) -> Result<Self, PacketError> {
        let raw = body_of(packet, PacketKind::Refuse, 1)?;
        let code = Refusal::from_code(raw[0]).unwrap_or(Refusal::Other);
        Ok(Self { code, text: String::from_utf8_lossy(&raw[1..]).into_owned() })
    }
}

/// Sent by a host that ends in order, so that losing its connection does not count as a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Farewell {
    /// Why, for the program.
    pub parting: Parting,
    /// Why, for people.
    pub text: String,
}

impl Farewell {
    /// As a packet of host `me`.
    #[must_use]
    pub fn packet(&self, me: HostNo) -> Packet {
        with_body(PacketKind::Farewell, me, [&[self.parting as u8], self.text.as_bytes()].concat())
    }

    /// From a packet.
    ///
    /// # Errors
    /// If it is not a farewell, or too short.
    pub fn read(packet: &Packet) -> Result<Self, PacketError> {
        let raw = body_of(packet, PacketKind::Farewell, 1)?;
        Ok(Self { parting: Parting::of(raw[0]), text: String::from_utf8_lossy(&raw[1..]).into_owned() })
    }
}

fn with_body(kind: PacketKind, origin: HostNo, body: Vec<u8>) -> Packet {
    let mut packet = Packet::new(kind, origin);
    if !body.is_empty() {
        packet.body = smallvec![Bytes::from(body)];
    }
    packet
}

fn body_of(packet: &Packet, kind: PacketKind, least: usize) -> Result<Bytes, PacketError> {
    let raw = match &*packet.body {
        [] => Bytes::new(),
        [one] => one.clone(),
        many => many.concat().into(),
    };
    if packet.kind != kind {
        return Err(PacketError::Malformed("it is of another kind than the one that is due"));
    }
    if raw.len() < least {
        return Err(PacketError::Malformed("a greeting that is too short"));
    }
    Ok(raw)
}
