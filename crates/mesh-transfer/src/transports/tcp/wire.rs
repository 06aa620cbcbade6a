//! The bytes of the TCP transport. All messages have a fixed length, so that a stranger cannot make anyone wait for
//! more.

use crate::bytes::{part, u32_at, u64_at};
use crate::door::Protocol;
use crate::error::{ErrorKind, TransferError};
use crate::handle::Token;
use crate::operation::Work;

/// TCP-1
pub(super) static PROTOCOL: Protocol = Protocol { magic: *b"MXT\x01", owner: b"server", client: b"client" };
pub(super) const REQUEST: usize = 64;
pub(super) const RESPONSE: usize = 16;
/// The most that one request moves.
pub(super) const PIECE: u64 = 1 << 20;

/// The kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Read,
    Write,
    FetchAdd,
    CompareAndSwap,
}

impl Verb {
    pub(super) fn of(work: &Work) -> Self {
        match work {
            Work::Read { .. } => Self::Read,
            Work::Write { .. } => Self::Write,
            Work::FetchAdd { .. } => Self::FetchAdd,
            Work::CompareAndSwap { .. } => Self::CompareAndSwap,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) verb: Verb,
    pub(super) slot: u32,
    pub(super) generation: u32,
    pub(super) token: Token,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The summand, or the expected value.
    pub(super) first: u64,
    /// The desired value.
    pub(super) second: u64,
}

impl Request {
    pub(super) fn encode(&self) -> [u8; REQUEST] {
        let mut out = [0; REQUEST];
        out[0] = self.verb as u8 + 1;
        out[4..8].copy_from_slice(&self.slot.to_le_bytes());
        out[8..12].copy_from_slice(&self.generation.to_le_bytes());
        out[16..32].copy_from_slice(&self.token);
        for (at, number) in [(32, self.offset), (40, self.len), (48, self.first), (56, self.second)] {
            out[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        out
    }

    /// None if no speaker of this protocol wrote it.
    pub(super) fn decode(bytes: &[u8; REQUEST]) -> Option<Self> {
        let verb = match bytes[0] {
            1 => Verb::Read,
            2 => Verb::Write,
            3 => Verb::FetchAdd,
            4 => Verb::CompareAndSwap,
            _ => return None,
        };
        let request = Self {
            verb,
            slot: u32_at(bytes, 4),
            generation: u32_at(bytes, 8),
            token: part(bytes, 16),
            offset: u64_at(bytes, 32),
            len: u64_at(bytes, 40),
            first: u64_at(bytes, 48),
            second: u64_at(bytes, 56),
        };
        let fits = match verb {
            Verb::Read | Verb::Write => request.len <= PIECE,
            Verb::FetchAdd | Verb::CompareAndSwap => request.len == 8,
        };
        (fits && request.encode() == *bytes).then_some(request)
    }
}

/// The answer to a request, followed by the bytes read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) refused: Option<ErrorKind>,
    /// What an atomic operation found; for memory that is gone, why.
    pub(super) found: u64,
}

impl Response {
    pub(super) fn encode(&self) -> [u8; RESPONSE] {
        let mut out = [0; RESPONSE];
        out[0] = match self.refused {
            None => 0,
            Some(ErrorKind::Gone) => 1,
            Some(ErrorKind::Refused) => 2,
            Some(ErrorKind::Transport) => 4,
            Some(_) => 3,
        };
        out[8..].copy_from_slice(&self.found.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; RESPONSE]) -> Result<Self, TransferError> {
        let refused = match bytes[0] {
            0 => None,
            1 => Some(ErrorKind::Gone),
            2 => Some(ErrorKind::Refused),
            3 => Some(ErrorKind::Invalid),
            4 => Some(ErrorKind::Transport),
            _ => return Err(TransferError::transport("the owner answers in another protocol")),
        };
        Ok(Self { refused, found: u64_at(bytes, 8) })
    }
}
