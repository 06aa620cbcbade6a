//! What two gateways say to each other before anything else, and last.

use super::fate::Parting;
use super::packet::{Packet, PacketError, PacketKind};
use crate::HostNo;
use crate::codec::{u32_at, u64_at};
use crate::codes::codes;
use bytes::Bytes;
use smallvec::smallvec;

/// Who dials says which job it means, who it is, and whom it expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// The job.
    pub job: u64,
    /// Who dials.
    pub from: HostNo,
    /// Who is dialed; a host that does not know its number yet learns it from this.
    pub to: HostNo,
    /// Made at random when the dialing side's runtime began: a host that was started anew is another one.
    pub incarnation: u64,
    /// The other side's, as far as it is known; 0 for the first time.
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
    /// If it is no join, or a piece of one.
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

/// Who dials wants to look into a job, and not to join it.
///
/// The answer is a [`Welcome`], whose body is empty or, where no job is named, [`Look::jobs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// The job; 0 to hear which there are.
    pub job: u64,
}

impl Look {
    /// As a packet. Who looks is no host, and has no number.
    #[must_use]
    pub fn packet(&self) -> Packet {
        with_body(PacketKind::Look, 0, self.job.to_le_bytes().to_vec())
    }

    /// From a packet.
    ///
    /// # Errors
    /// If it is something else.
    pub fn read(packet: &Packet) -> Result<Self, PacketError> {
        let raw = body_of(packet, PacketKind::Look, 8)?;
        if raw.len() > 8 {
            return Err(PacketError::Malformed("a greeting that is too long"));
        }
        Ok(Self { job: u64_at(&raw, 0) })
    }

    /// The answer to who asks which jobs there are.
    #[must_use]
    pub fn welcome(jobs: &[u64]) -> Welcome {
        let body: Vec<u8> = jobs.iter().flat_map(|job| job.to_le_bytes()).collect();
        Welcome { incarnation: 0, body: body.into() }
    }

    /// The jobs that such an answer names; `None` for bytes that are none.
    #[must_use]
    pub fn jobs(welcome: &Welcome) -> Option<Vec<u64>> {
        let chunks = welcome.body.chunks_exact(8);
        chunks.remainder().is_empty().then(|| chunks.map(|raw| u64_at(raw, 0)).collect())
    }
}

/// Who was dialed takes the other in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Made at random when this side's runtime began.
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
    /// If it is no welcome, or a piece of one.
    pub fn read(packet: &Packet) -> Result<Self, PacketError> {
        let raw = body_of(packet, PacketKind::Welcome, 8)?;
        Ok(Self { incarnation: u64_at(&raw, 0), body: raw.slice(8..) })
    }
}

codes! {
    /// Why a host does not take another in.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Refusal {
        /// There is no such job here, or not any more.
        NoSuchJob = 1,
        /// The caller's credentials do not allow what it wants.
        NotAllowed = 2,
        /// This is not the host, or not the run of it, that the caller means.
        NotMe = 3,
        /// The caller was declared dead, and has to stop its work.
        Dead = 4,
        /// The caller's version is another one.
        Version = 5,
        /// The host takes no more for now; it may be asked again.
        Busy = 6,
        /// Something else; the text says what.
        Other = 255,
    }
}

/// Who was dialed does not take the other in.
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
    /// If it is no refusal, or a piece of one.
    pub fn read(packet: &Packet) -> Result<Self, PacketError> {
        let raw = body_of(packet, PacketKind::Refuse, 1)?;
        let code = Refusal::from_code(raw[0]).unwrap_or(Refusal::Other);
        Ok(Self { code, text: String::from_utf8_lossy(&raw[1..]).into_owned() })
    }
}

/// Who ends in order says so, so that the end of its connection is no failure.
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
    /// If it is no farewell.
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
