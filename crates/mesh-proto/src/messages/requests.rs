//! What actors and processes are asked to do.

use super::{HAS_CALL, MessageError, NO_ACTOR, NO_CALL, flags_of, number, refused};
use crate::frame::flags;
use crate::{ActorId, CallId, Header, Kind, ProcAddr};

fn header(kind: Kind, from: ProcAddr, to: ProcAddr, (actor, call, place): (ActorId, CallId, u32)) -> Header {
    let mut header = Header::new(kind, from, to);
    (header.actor, header.call, header.index) = (actor, call, place);
    header
}

/// Which part of a spawn a frame has. If the actor's process does not read, an announcement without arguments goes
/// first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpawnPart {
    /// The whole spawn.
    #[default]
    Whole,
    /// The announcement of an actor: messages to it wait until it exists. Its arguments follow.
    Announced,
    /// The arguments of an announced actor.
    Arguments,
}

/// Make an actor. Its [`Name`](super::Name) is the actor's; the payload holds its class and arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spawn {
    /// The actor's id.
    pub actor: ActorId,
    /// The spawner's call; 0 if nobody waits.
    pub call: CallId,
    /// The receiver's place in the mesh of actors; for a cast, the place of its first receiver.
    pub place: u32,
    /// The part that the frame has.
    pub part: SpawnPart,
}

impl Spawn {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = header(Kind::Spawn, from, to, (self.actor, self.call, self.place));
        self.mark(&mut header);
        header
    }

    /// Sets in the header of this spawn which part the frame has.
    pub fn mark(&self, header: &mut Header) {
        let part = match self.part {
            SpawnPart::Whole => 0,
            SpawnPart::Announced => flags::MORE,
            SpawnPart::Arguments => flags::END,
        };
        header.flags = header.flags & flags::OF_FRAMES | part;
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        let bits = flags_of(header, Kind::Spawn, flags::MORE | flags::END)?;
        let part = if bits == 0 {
            SpawnPart::Whole
        } else if bits == flags::MORE {
            SpawnPart::Announced
        } else if bits == flags::END {
            SpawnPart::Arguments
        } else {
            return Err(refused(header, "is announced and comes in one"));
        };
        let actor = number(header, header.actor, NO_ACTOR)?;
        Ok(Self { actor, call: header.call, place: header.index, part })
    }
}

/// The kind of a task: a call that can be taken back until it has begun. Its receiver begins one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Its caller has the replies of all earlier tasks there, except for those that it wants to run concurrently.
    Next,
    /// It was sent ahead, after a task whose reply its caller does not have yet. It begins only if that reply has
    /// left the receiver, so that a caller without the reply knows that this task has not begun (TAK-2).
    Ahead,
}

/// Run an endpoint, and reply. Its [`Name`](super::Name) is the endpoint's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The actor.
    pub actor: ActorId,
    /// The caller's number of the call; not 0.
    pub call: CallId,
    /// The receiver's place in what was called; for a cast, the place of its first receiver.
    pub place: u32,
    /// Whether the caller takes any number of values.
    pub stream: bool,
    /// Whether it can be taken back.
    pub task: Option<Task>,
}

impl Call {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = header(Kind::Call, from, to, (self.actor, self.call, self.place));
        header.flags = if self.stream { flags::STREAM } else { 0 };
        header.flags |= match self.task {
            None => 0,
            Some(Task::Next) => flags::MORE,
            Some(Task::Ahead) => flags::MORE | flags::END,
        };
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        let bits = flags_of(header, Kind::Call, flags::STREAM | flags::MORE | flags::END)?;
        let task = match (bits & flags::MORE != 0, bits & flags::END != 0) {
            (false, false) => None,
            (true, false) => Some(Task::Next),
            (true, true) => Some(Task::Ahead),
            (false, true) => return Err(refused(header, "is sent ahead, and no task")),
        };
        let call = number(header, header.call, NO_CALL)?;
        Ok(Self { actor: header.actor, call, place: header.index, stream: bits & flags::STREAM != 0, task })
    }
}

/// Run an endpoint without a reply. Its [`Name`](super::Name) is the endpoint's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tell {
    /// The actor.
    pub actor: ActorId,
    /// The receiver's place in what was told; for a cast, the place of its first receiver.
    pub place: u32,
}

impl Tell {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        header(Kind::Tell, from, to, (self.actor, 0, self.place))
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        flags_of(header, Kind::Tell, 0)?;
        if header.call != 0 {
            return Err(refused(header, HAS_CALL));
        }
        Ok(Self { actor: header.actor, place: header.index })
    }
}

/// Stop an actor once it has handled earlier messages. The payload says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopActor {
    /// The actor.
    pub actor: ActorId,
    /// The call that waits for its end; 0 if nobody does.
    pub call: CallId,
    /// The receiver's place in what is stopped; for a cast, the place of its first receiver.
    pub place: u32,
}

impl StopActor {
    /// The stop of one actor, for which nobody waits.
    #[must_use]
    pub fn of(actor: ActorId) -> Self {
        Self { actor, call: 0, place: 0 }
    }

    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        header(Kind::StopActor, from, to, (self.actor, self.call, self.place))
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        flags_of(header, Kind::StopActor, 0)?;
        Ok(Self { actor: header.actor, call: header.call, place: header.index })
    }
}

/// What is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The call itself.
    Call,
    /// The call, and what its receivers have gathered of a combined reply.
    Combined,
    /// Only what they have gathered of a combined reply: it has failed, but the call runs on.
    Gathering,
    /// A task, if it has not begun. Its caller waits for the answer in any case.
    Unbegun,
    /// A task, begun or not. Its caller waits for the answer in any case.
    Task,
}

impl Cancelled {
    /// Whether the caller still waits for an answer.
    #[must_use]
    pub fn is_answered(self) -> bool {
        matches!(self, Self::Unbegun | Self::Task)
    }
}

/// The caller no longer waits, or not for this receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cancel {
    /// The actor that was called; 0 for an extension.
    pub actor: ActorId,
    /// The caller's number of the call; not 0.
    pub call: CallId,
    /// The receiver's place in what was called; for a cast, the place of its first receiver.
    pub place: u32,
    /// What is cancelled.
    pub what: Cancelled,
}

impl Cancel {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = header(Kind::Cancel, from, to, (self.actor, self.call, self.place));
        header.flags = match self.what {
            Cancelled::Call => 0,
            Cancelled::Combined => flags::TREE,
            Cancelled::Gathering => flags::TREE | flags::END,
            Cancelled::Unbegun => flags::MORE | flags::END,
            Cancelled::Task => flags::MORE,
        };
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        let bits = flags_of(header, Kind::Cancel, flags::TREE | flags::END | flags::MORE)?;
        let what = if bits == 0 {
            Cancelled::Call
        } else if bits == flags::TREE {
            Cancelled::Combined
        } else if bits == flags::TREE | flags::END {
            Cancelled::Gathering
        } else if bits == flags::MORE | flags::END {
            Cancelled::Unbegun
        } else if bits == flags::MORE {
            Cancelled::Task
        } else {
            return Err(refused(header, "gives up nothing"));
        };
        let call = number(header, header.call, NO_CALL)?;
        Ok(Self { actor: header.actor, call, place: header.index, what })
    }
}

/// An actor has failed while its proc lives on; sent to its owner. The payload is opaque here; within a process, an
/// empty one is only a prompt to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The owner; 0 for the process itself.
    pub owner: ActorId,
}

impl Failure {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        header(Kind::Failure, from, to, (self.owner, 0, 0))
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        flags_of(header, Kind::Failure, 0)?;
        if header.call != 0 {
            return Err(refused(header, HAS_CALL));
        }
        Ok(Self { owner: header.actor })
    }
}

/// A message for an extension of the process. Its [`Name`](super::Name) says which, or, after a dot, what Mesh itself
/// wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extend {
    /// The sender's number of the call; 0 if nobody waits.
    pub call: CallId,
    /// The receiver's place in what was messaged; for a cast, the place of its first receiver.
    pub place: u32,
}

impl Extend {
    /// Encodes this as a header.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        header(Kind::Extend, from, to, (0, self.call, self.place))
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it is not a header of this type (MSG-1).
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        flags_of(header, Kind::Extend, 0)?;
        if header.actor != 0 {
            return Err(refused(header, "is for an actor"));
        }
        Ok(Self { call: header.call, place: header.index })
    }
}

/// A message that programs send, with or without a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// [`Spawn`].
    Spawn,
    /// [`Call`], or [`Tell`] if nobody waits.
    Call {
        /// Whether the caller takes any number of values.
        stream: bool,
        /// Whether it can be taken back.
        task: Option<Task>,
    },
    /// [`StopActor`].
    StopActor,
    /// [`Failure`].
    Failure,
    /// A question to the process: [`crate::control::Inspect`].
    Inspect,
    /// [`Extend`].
    Extend,
}

impl Request {
    /// An ordinary call.
    pub const CALL: Self = Self::Call { stream: false, task: None };
    /// A call that can be taken back until it has begun.
    pub const TASK: Self = Self::Call { stream: false, task: Some(Task::Next) };
    /// The same, sent ahead.
    pub const TASK_AHEAD: Self = Self::Call { stream: false, task: Some(Task::Ahead) };

    /// Whether it is for an endpoint, as nearly all are.
    #[must_use]
    pub fn is_call(self) -> bool {
        matches!(self, Self::Call { .. })
    }

    /// The header of such a message. A call of 0 means none; the place is that of the (first) receiver in the target.
    #[must_use]
    pub fn header(self, actor: ActorId, call: CallId, place: u32, from: ProcAddr, to: ProcAddr) -> Header {
        match self {
            Self::Call { .. } if call == 0 => Tell { actor, place }.header(from, to),
            Self::Call { stream, task } => Call { actor, call, place, stream, task }.header(from, to),
            Self::Spawn => Spawn { actor, call, place, part: SpawnPart::Whole }.header(from, to),
            Self::StopActor => StopActor { actor, call, place }.header(from, to),
            Self::Failure => Failure { owner: actor }.header(from, to),
            Self::Inspect => header(Kind::Inspect, from, to, (actor, call, place)),
            Self::Extend => Extend { call, place }.header(from, to),
        }
    }
}
