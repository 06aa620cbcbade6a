//! Values for ports, and shares of combined replies.

use super::{HAS_CALL, MessageError, NO_CALL, Name, flags_of, number, refused};
use crate::frame::flags;
use crate::{ActorId, CallId, Header, Kind, ProcAddr};

/// The name of a value whose sender's place is stated.
const RANKED: &[u8] = b"ranked";

/// A value for a channel's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Post {
    /// The port's id; not 0.
    pub port: u64,
    /// Whether the payload is an encoded exception.
    pub error: bool,
    /// The sender's rank, if the name gives the mesh's shape ([`Post::name`]); else 0.
    pub rank: u32,
}

impl Post {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = Header::new(Kind::Post, from, to);
        (header.actor, header.index) = (self.port, self.rank);
        header.flags = if self.error { flags::ERROR } else { 0 };
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        let error = flags_of(header, Kind::Post, flags::ERROR)? != 0;
        if header.call != 0 {
            return Err(refused(header, HAS_CALL));
        }
        let port = number(header, header.actor, "names no port")?;
        Ok(Self { port, error, rank: header.index })
    }

    /// The name of a value whose sender is a rank of a mesh of this shape.
    #[must_use]
    pub fn name(shape: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::name_len(shape));
        out.extend_from_slice(RANKED);
        out.push(0);
        out.extend_from_slice(shape);
        out
    }

    /// The length of [`Post::name`].
    #[must_use]
    pub fn name_len(shape: &[u8]) -> usize {
        RANKED.len() + 1 + shape.len()
    }

    /// The shape of the mesh that the sender is a rank of, if the name gives it.
    #[must_use]
    pub fn shape_in(name: &[u8]) -> Option<&[u8]> {
        let Name { what, shape, .. } = Name::read(name);
        (what == RANKED).then_some(shape)
    }
}

/// A rank's share of a combined reply, for the rank above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partial {
    /// The actor that was called, on the sender and the receiver.
    pub actor: ActorId,
    /// The caller's number of the call; not 0.
    pub call: CallId,
    /// The sender's place in the target.
    pub place: u32,
}

impl Partial {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = Header::new(Kind::Partial, from, to);
        (header.actor, header.call, header.index) = (self.actor, self.call, self.place);
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        flags_of(header, Kind::Partial, 0)?;
        let call = number(header, header.call, NO_CALL)?;
        Ok(Self { actor: header.actor, call, place: header.index })
    }

    /// The name of a share: whose call it is.
    #[must_use]
    pub fn name(caller: ProcAddr) -> String {
        format!("{}.{}.{}", caller.mesh, caller.rank, caller.host)
    }

    /// Whose call a share belongs to; `None` if the name does not tell.
    #[must_use]
    pub fn caller_in(name: &[u8]) -> Option<ProcAddr> {
        let mut numbers = std::str::from_utf8(name).ok()?.split('.');
        let mesh = numbers.next()?.parse().ok()?;
        let rank = numbers.next()?.parse().ok()?;
        let host = numbers.next()?.parse().ok()?;
        numbers.next().is_none().then_some(ProcAddr { mesh, rank, host })
    }
}
