//! The bytes of the TCP transport. All are of fixed length, so that a stranger can make nobody wait for more.

use super::super::Work;
use crate::error::{ErrorKind, TransferError};
use crate::handle::{RealmId, Token};
use ring::hmac;

pub(super) const MAGIC: [u8; 4] = *b"MXT\x01";
/// What a client says first: the magic, a nonce, and whom it wants.
pub(super) const HELLO: usize = 4 + 16 + 16;
/// What the server answers: its nonce, and its proof.
pub(super) const WELCOME: usize = 16 + PROOF;
/// The client's proof.
pub(super) const PROOF: usize = 32;
pub(super) const REQUEST: usize = 64;
pub(super) const RESPONSE: usize = 16;
/// The most that one request moves.
pub(super) const PIECE: u64 = 1 << 20;

pub(super) type Nonce = [u8; 16];

/// Who proves it; so that nobody can send another's proof back.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Server,
    Client,
}

fn said(side: Side, realm: &RealmId, client: &Nonce, server: &Nonce) -> Vec<u8> {
    let side: &[u8] = match side {
        Side::Server => b"server",
        Side::Client => b"client",
    };
    [side, realm, client, server].concat()
}

pub(super) fn prove(door: &Token, side: Side, realm: &RealmId, client: &Nonce, server: &Nonce) -> [u8; PROOF] {
    let key = hmac::Key::new(hmac::HMAC_SHA256, door);
    let tag = hmac::sign(&key, &said(side, realm, client, server));
    std::array::from_fn(|i| tag.as_ref()[i])
}

pub(super) fn proves(
    door: &Token,
    side: Side,
    realm: &RealmId,
    client: &Nonce,
    server: &Nonce,
    proof: &[u8; PROOF],
) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, door);
    hmac::verify(&key, &said(side, realm, client, server), proof).is_ok()
}

/// What is asked for.
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
    /// What to add; what is expected.
    pub(super) first: u64,
    /// What it becomes.
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

    /// None if nobody who speaks this protocol has written it.
    pub(super) fn decode(bytes: &[u8; REQUEST]) -> Option<Self> {
        let verb = match bytes[0] {
            1 => Verb::Read,
            2 => Verb::Write,
            3 => Verb::FetchAdd,
            4 => Verb::CompareAndSwap,
            _ => return None,
        };
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let request = Self {
            verb,
            slot: word(4),
            generation: word(8),
            token: std::array::from_fn(|i| bytes[16 + i]),
            offset: long(32),
            len: long(40),
            first: long(48),
            second: long(56),
        };
        let fits = match verb {
            Verb::Read | Verb::Write => request.len <= PIECE,
            Verb::FetchAdd | Verb::CompareAndSwap => request.len == 8,
        };
        (fits && request.encode() == *bytes).then_some(request)
    }
}

/// The answer to a request; what was read follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) refused: Option<ErrorKind>,
    /// What an atomic operation has found.
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
        Ok(Self { refused, found: u64::from_le_bytes(std::array::from_fn(|i| bytes[8 + i])) })
    }
}
