//! The parts of a message, and the memory that they may lie in.

use crate::Ticket;
use bytes::Bytes;
use std::borrow::Cow;

// Flags of an entry in the part table.
const SHARED: u64 = 1 << 63;
const DISTANT: u64 = 1 << 62;

const SHARED_LEN: usize = 32;
/// Before a distant part's ticket: its number, the number under which it is held, and the ticket's length.
const DISTANT_HEAD: usize = 20;

fn u32_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}

fn u64_at(raw: &[u8], at: usize) -> u64 {
    u64::from(u32_at(raw, at)) | u64::from(u32_at(raw, at + 4)) << 32
}

/// Memory of another process on this host, named so that anyone on the host can map it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SharedRef {
    /// The process that owns the memory.
    pub pid: u32,
    /// Its descriptor of the slab there.
    pub fd: u32,
    /// The slab's number, never reused by its owner: receivers key their mappings by it.
    pub slab: u64,
    /// Where in the slab the part begins.
    pub offset: u64,
    /// The chunk's number in the slab; its count of holders stands at the beginning of the slab.
    pub chunk: u32,
    /// The number of this use of the chunk: letting go of an earlier use does not touch this one.
    pub turn: u32,
}

impl SharedRef {
    fn encode(&self) -> [u8; SHARED_LEN] {
        let mut out = [0; SHARED_LEN];
        out[0..4].copy_from_slice(&self.pid.to_le_bytes());
        out[4..8].copy_from_slice(&self.fd.to_le_bytes());
        out[8..16].copy_from_slice(&self.slab.to_le_bytes());
        out[16..24].copy_from_slice(&self.offset.to_le_bytes());
        out[24..28].copy_from_slice(&self.chunk.to_le_bytes());
        out[28..32].copy_from_slice(&self.turn.to_le_bytes());
        out
    }

    fn decode(raw: &[u8]) -> Self {
        Self {
            pid: u32_at(raw, 0),
            fd: u32_at(raw, 4),
            slab: u64_at(raw, 8),
            offset: u64_at(raw, 16),
            chunk: u32_at(raw, 24),
            turn: u32_at(raw, 28),
        }
    }
}

/// One part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The bytes themselves.
    Inline(Bytes),
    /// Memory that the receiver maps.
    Shared {
        /// Where it is.
        at: SharedRef,
        /// How long it is.
        len: u64,
    },
    /// Memory of the sender on another host, from which the receiver gets it.
    Distant {
        /// The number under which the sender keeps it, like any value that has references.
        id: u64,
        /// The ticket under which it is held for the receiver; see [`crate::Holders`].
        held: Ticket,
        /// How long it is.
        len: u64,
        /// How to get it past the gateways.
        ticket: Bytes,
    },
}

impl Part {
    /// Bytes of the part as its reader sees them.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Shared { len, .. } | Self::Distant { len, .. } => *len,
        }
    }

    /// Whether the part has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its entry in the part table.
    #[must_use]
    pub fn entry(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Shared { len, .. } => len | SHARED,
            Self::Distant { len, .. } => len | DISTANT,
        }
    }

    /// The bytes that represent it in a frame.
    #[must_use]
    pub fn wire(&self) -> Cow<'_, [u8]> {
        match self {
            Self::Inline(bytes) => Cow::Borrowed(bytes),
            Self::Shared { at, .. } => Cow::Owned(at.encode().to_vec()),
            Self::Distant { id, held, ticket, .. } => {
                let mut out = Vec::with_capacity(DISTANT_HEAD + ticket.len());
                out.extend_from_slice(&id.to_le_bytes());
                out.extend_from_slice(&held.to_le_bytes());
                out.extend_from_slice(&(ticket.len() as u32).to_le_bytes());
                out.extend_from_slice(ticket);
                Cow::Owned(out)
            }
        }
    }

    /// The length of [`Part::wire`].
    pub(crate) fn wire_len(&self) -> usize {
        match self {
            Self::Inline(bytes) => bytes.len(),
            Self::Shared { .. } => SHARED_LEN,
            Self::Distant { ticket, .. } => DISTANT_HEAD + ticket.len(),
        }
    }

    /// The part at the beginning of `raw`, given its entry in the table, and how many bytes represent it.
    pub(crate) fn read(entry: u64, raw: &Bytes) -> Option<(Self, usize)> {
        if entry & SHARED != 0 {
            let at = SharedRef::decode(raw.get(..SHARED_LEN)?);
            return Some((Self::Shared { at, len: entry & !SHARED }, SHARED_LEN));
        }
        if entry & DISTANT != 0 {
            let head = raw.get(..DISTANT_HEAD)?;
            let end = DISTANT_HEAD.checked_add(u32_at(head, 16) as usize).filter(|end| *end <= raw.len())?;
            let (id, held) = (u64_at(head, 0), u64_at(head, 8));
            let part = Self::Distant { id, held, len: entry & !DISTANT, ticket: raw.slice(DISTANT_HEAD..end) };
            return Some((part, end));
        }
        let end = usize::try_from(entry).ok().filter(|end| *end <= raw.len())?;
        Some((Self::Inline(raw.slice(..end)), end))
    }
}
