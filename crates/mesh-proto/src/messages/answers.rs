//! Answers to messages.

use super::{MessageError, NO_CALL, Name, flags_of, number, refused};
use crate::frame::flags;
use crate::{ActorId, CallId, Frame, Header, Kind, ProcAddr};

/// What an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The value, and the only one.
    Value,
    /// The values of all that were called, combined on the way up: the only answer to its call.
    Combined,
    /// One of many values, through a port. A caller that waits for one takes the first.
    More,
    /// An encoded exception that the endpoint raised.
    Raised,
    /// An encoded exception about the actor: it could not be constructed, or is gone.
    Dead,
}

impl Answer {
    /// Whether it is an exception.
    #[must_use]
    pub fn is_error(self) -> bool {
        matches!(self, Self::Raised | Self::Dead)
    }
}

/// An answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The actor that answers; 0 for a process or an extension.
    pub actor: ActorId,
    /// The caller's number of the call; not 0.
    pub call: CallId,
    /// The place in the target that it answers for.
    pub place: u32,
    /// What it is.
    pub answer: Answer,
}

impl Reply {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = Header::new(Kind::Reply, from, to);
        (header.actor, header.call, header.index) = (self.actor, self.call, self.place);
        header.flags = match self.answer {
            Answer::Value => 0,
            Answer::Combined => flags::TREE,
            Answer::More => flags::MORE,
            Answer::Raised => flags::ERROR,
            Answer::Dead => flags::ERROR | flags::DEAD,
        };
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    #[inline]
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        let bits = flags_of(header, Kind::Reply, flags::ERROR | flags::DEAD | flags::MORE | flags::TREE)?;
        let answer = if bits == 0 {
            Answer::Value
        } else if bits == flags::TREE {
            Answer::Combined
        } else if bits == flags::MORE {
            Answer::More
        } else if bits == flags::ERROR {
            Answer::Raised
        } else if bits == flags::ERROR | flags::DEAD {
            Answer::Dead
        } else {
            return Err(refused(header, "is several answers in one"));
        };
        let call = number(header, header.call, NO_CALL)?;
        Ok(Self { actor: header.actor, call, place: header.index, answer })
    }
}

/// Whether an answer with these flags is merged with others of its call. The rest go by themselves: parts of a stream,
/// what is the only answer, memory of one host, and whatever counts against a budget.
pub(crate) fn is_mergeable(bits: u16) -> bool {
    let own = bits & !(flags::SOLE | flags::ABROAD | flags::PRINTED);
    own == 0 || own == flags::ERROR || own == flags::ERROR | flags::DEAD
}

/// A proc is up: its agent's answer to the spawner, in the proc's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcUp {
    /// The proc.
    pub proc: ProcAddr,
    /// The spawner's call; not 0.
    pub call: CallId,
    /// Its process id.
    pub pid: u32,
}

impl ProcUp {
    /// Encodes this as a frame: a reply of the proc's rank, with the mesh in place of an actor, and the process id.
    #[must_use]
    pub fn frame(&self, to: ProcAddr) -> Frame {
        let ProcAddr { mesh, rank, .. } = self.proc;
        let reply = Reply { actor: mesh, call: self.call, place: rank, answer: Answer::Value };
        Frame::build(reply.header(self.proc, to), None, &self.pid.to_le_bytes(), &[])
    }

    /// Reads a frame; `None` for any other.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let proc = frame.header.src;
        let pid = u32::from_le_bytes(frame.name().try_into().ok()?);
        let Reply { actor, call, place, answer } = Reply::read(&frame.header).ok()?;
        let fits = proc.mesh != 0 && (actor, place, answer) == (proc.mesh, proc.rank, Answer::Value);
        fits.then_some(Self { proc, call, pid })
    }
}

/// Several answers to one call, merged on the way up; [`crate::hosts::unmerge`] takes them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// The actor that gave all of them.
    pub actor: ActorId,
    /// The caller's number of the call; not 0.
    pub call: CallId,
}

impl Gathered {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = Header::new(Kind::Gathered, from, to);
        (header.actor, header.call) = (self.actor, self.call);
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        flags_of(header, Kind::Gathered, 0)?;
        let call = number(header, header.call, NO_CALL)?;
        Ok(Self { actor: header.actor, call })
    }
}

/// A call has failed, and nobody has looked: a process's notice to itself, which never travels. The payload is that of
/// the first failure; the [`Name`] is the endpoint's, with the actor's in place of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unseen {
    /// How many other ranks failed.
    pub others: u64,
    /// What the first failure is.
    pub what: Unlooked,
}

/// The kind of a failure that nobody has looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlooked {
    /// An encoded exception.
    Raised,
    /// The message came back.
    Returned,
    /// The call's port has ended.
    PortEnded,
}

impl Unseen {
    /// Encodes this as a frame of the failed rank, to its own process.
    #[must_use]
    pub fn frame(&self, rank: ProcAddr, name: Name<'_>, payload: &[u8]) -> Frame {
        let mut header = Header::new(Kind::Unseen, rank, rank);
        header.call = self.others;
        header.flags = match self.what {
            Unlooked::Raised => flags::ERROR,
            Unlooked::Returned => 0,
            Unlooked::PortEnded => flags::END,
        };
        Frame::build_plain(header, None, &name.to_bytes(), payload)
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        let bits = flags_of(header, Kind::Unseen, flags::ERROR | flags::END)?;
        let what = if bits == 0 {
            Unlooked::Returned
        } else if bits == flags::ERROR {
            Unlooked::Raised
        } else if bits == flags::END {
            Unlooked::PortEnded
        } else {
            return Err(refused(header, "is several failures in one"));
        };
        Ok(Self { others: header.call, what })
    }
}
