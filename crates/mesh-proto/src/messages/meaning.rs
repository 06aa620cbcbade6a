//! The meaning of a frame of any kind, from its header.

use super::{
    Call, Cancel, Extend, Failure, Gathered, MessageError, NO_CALL, Partial, Post, Reply, Spawn, StopActor, Tell,
    Unseen, flags_of, number, refused,
};
use crate::control::StopProc;
use crate::frame::flags;
use crate::{ActorId, CallId, Flow, Frame, Header, Kind, ProcAddr};

/// A message came back: what the header of a [`crate::control::Undeliverable`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returned {
    /// The actor that was called.
    pub actor: ActorId,
    /// The caller's number of the call; not 0.
    pub call: CallId,
    /// The place in the target that this is the outcome of.
    pub place: u32,
    /// Whether the call's port has ended.
    pub port_ended: bool,
}

impl Returned {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = Header::new(Kind::Undeliverable, from, to);
        (header.actor, header.call, header.index) = (self.actor, self.call, self.place);
        header.flags = if self.port_ended { flags::END } else { 0 };
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        let port_ended = flags_of(header, Kind::Undeliverable, flags::END)? != 0;
        let call = number(header, header.call, NO_CALL)?;
        Ok(Self { actor: header.actor, call, place: header.index, port_ended })
    }
}

/// What a header says: a message of some kind, or a control frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Make an actor.
    Spawn(Spawn),
    /// Run an endpoint and reply.
    Call(Call),
    /// Run an endpoint without a reply.
    Tell(Tell),
    /// An answer.
    Reply(Reply),
    /// A message came back.
    Undeliverable(Returned),
    /// Stop an actor.
    StopActor(StopActor),
    /// The caller no longer waits.
    Cancel(Cancel),
    /// Several answers.
    Gathered(Gathered),
    /// A value for a port.
    Post(Post),
    /// A mailbox gives bytes back, or is asked to.
    Credit(Flow),
    /// An actor has failed.
    Failure(Failure),
    /// A share of a combined reply.
    Partial(Partial),
    /// A message for an extension.
    Extend(Extend),
    /// A call has failed, and nobody has looked.
    Unseen(Unseen),
    /// A frame of another kind, which has its type in [`crate::control`].
    Control(Kind),
}

impl Meaning {
    /// Reads a header.
    ///
    /// # Errors
    /// If it is a header that no process makes (MSG-1).
    #[inline]
    pub fn of(header: &Header) -> Result<Self, MessageError> {
        Ok(match header.kind {
            Kind::Call => Self::Call(Call::read(header)?),
            Kind::Reply => Self::Reply(Reply::read(header)?),
            Kind::Tell => Self::Tell(Tell::read(header)?),
            Kind::Post => Self::Post(Post::read(header)?),
            Kind::Credit => Self::Credit(Flow::read(header)?),
            Kind::Spawn => Self::Spawn(Spawn::read(header)?),
            Kind::Undeliverable => Self::Undeliverable(Returned::read(header)?),
            Kind::StopActor => Self::StopActor(StopActor::read(header)?),
            Kind::Cancel => Self::Cancel(Cancel::read(header)?),
            Kind::Gathered => Self::Gathered(Gathered::read(header)?),
            Kind::Failure => Self::Failure(Failure::read(header)?),
            Kind::Partial => Self::Partial(Partial::read(header)?),
            Kind::Extend => Self::Extend(Extend::read(header)?),
            Kind::Unseen => Self::Unseen(Unseen::read(header)?),
            control => Self::Control(control),
        })
    }

    /// Reads a frame that has reached its receiver, including its name.
    ///
    /// # Errors
    /// If it is a frame that no process makes (MSG-1).
    #[inline]
    pub fn read(frame: &Frame) -> Result<Self, MessageError> {
        let said = Self::of(&frame.header)?;
        let legible = match said {
            Self::Partial(_) => Partial::caller_in(frame.name()).is_some(),
            Self::Post(_) => frame.header.name_len == 0 || Post::shape_in(frame.name()).is_some(),
            _ => true,
        };
        if legible { Ok(said) } else { Err(refused(&frame.header, "has a name that says something else")) }
    }

    /// Encodes this as a header; `None` for control frames, whose types make whole frames, and for what never travels.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Option<Header> {
        Some(match self {
            Self::Spawn(spawn) => spawn.header(from, to),
            Self::Call(call) => call.header(from, to),
            Self::Tell(tell) => tell.header(from, to),
            Self::Reply(reply) => reply.header(from, to),
            Self::Undeliverable(returned) => returned.header(from, to),
            Self::StopActor(stop) => stop.header(from, to),
            Self::Cancel(cancel) => cancel.header(from, to),
            Self::Gathered(gathered) => gathered.header(from, to),
            Self::Post(post) => post.header(from, to),
            Self::Credit(flow) => flow.header(from, to),
            Self::Failure(failure) => failure.header(from, to),
            Self::Partial(partial) => partial.header(from, to),
            Self::Extend(extend) => extend.header(from, to),
            Self::Unseen(_) | Self::Control(_) => return None,
        })
    }

    /// The actor that it is for, from, or about; 0 for none.
    #[must_use]
    pub fn actor(&self) -> ActorId {
        match self {
            Self::Spawn(Spawn { actor, .. })
            | Self::Call(Call { actor, .. })
            | Self::Tell(Tell { actor, .. })
            | Self::Reply(Reply { actor, .. })
            | Self::Undeliverable(Returned { actor, .. })
            | Self::StopActor(StopActor { actor, .. })
            | Self::Cancel(Cancel { actor, .. })
            | Self::Gathered(Gathered { actor, .. })
            | Self::Partial(Partial { actor, .. })
            | Self::Failure(Failure { owner: actor }) => *actor,
            Self::Post(_) | Self::Credit(_) | Self::Extend(_) | Self::Unseen(_) | Self::Control(_) => 0,
        }
    }

    /// The call that it begins, answers or is part of; 0 for none.
    #[must_use]
    pub fn call(&self) -> CallId {
        match self {
            Self::Spawn(Spawn { call, .. })
            | Self::Call(Call { call, .. })
            | Self::Reply(Reply { call, .. })
            | Self::Undeliverable(Returned { call, .. })
            | Self::StopActor(StopActor { call, .. })
            | Self::Cancel(Cancel { call, .. })
            | Self::Gathered(Gathered { call, .. })
            | Self::Partial(Partial { call, .. })
            | Self::Extend(Extend { call, .. }) => *call,
            Self::Tell(_) | Self::Post(_) | Self::Credit(_) | Self::Failure(_) | Self::Unseen(_) | Self::Control(_) => {
                0
            }
        }
    }

    /// The place in the target that it is for or from; for a value to a channel, the sender's rank; else 0.
    #[must_use]
    pub fn place(&self) -> u32 {
        match self {
            Self::Spawn(Spawn { place, .. })
            | Self::Call(Call { place, .. })
            | Self::Tell(Tell { place, .. })
            | Self::Reply(Reply { place, .. })
            | Self::Undeliverable(Returned { place, .. })
            | Self::StopActor(StopActor { place, .. })
            | Self::Cancel(Cancel { place, .. })
            | Self::Partial(Partial { place, .. })
            | Self::Extend(Extend { place, .. })
            | Self::Post(Post { rank: place, .. }) => *place,
            Self::Gathered(_) | Self::Credit(_) | Self::Failure(_) | Self::Unseen(_) | Self::Control(_) => 0,
        }
    }

    /// Whether it is a value for a port, whose sender must be told if nobody receives there.
    #[must_use]
    pub fn is_for_port(&self) -> bool {
        use super::Answer;
        matches!(self, Self::Post(_) | Self::Reply(Reply { answer: Answer::More, .. }))
    }
}

/// What an answer repeats of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Who gets the answer.
    pub by: ProcAddr,
    /// The actor that was asked; for an order about procs, their mesh.
    pub actor: ActorId,
    /// The caller's number of the call; not 0.
    pub call: CallId,
    /// The place in the target.
    pub place: u32,
}

impl Asked {
    /// Reads any frame that can begin a call; `None` if nobody waits for an answer.
    #[must_use]
    pub fn of(header: &Header) -> Option<Self> {
        let asks = matches!(
            header.kind,
            Kind::Call
                | Kind::Spawn
                | Kind::StopActor
                | Kind::Inspect
                | Kind::Extend
                | Kind::Moved
                | Kind::GivenUp
                | Kind::Fetch
                | Kind::SpawnProcs
                | Kind::StopProcs
        );
        let asked = Self { by: header.src, actor: header.actor, call: header.call, place: header.index };
        (asks && header.call != 0).then_some(asked)
    }
}

/// The call that a frame begins, if answers to it are merged on their way back from other hosts.
#[must_use]
pub fn merged_call(header: &Header) -> Option<CallId> {
    let merges = matches!(header.kind, Kind::Call | Kind::Spawn | Kind::Extend) && header.call != 0;
    merges.then_some(header.call)
}

impl StopProc {
    /// Reads a header, if it is of this kind.
    #[must_use]
    pub fn of(header: &Header) -> Option<Self> {
        (header.kind == Kind::StopProc).then(|| Self::read(header))
    }
}
