//! Questions to processes about themselves, and the events that they report.

use super::{Visit, body};
use crate::{Frame, Header, Kind, ProcAddr, Target};
use bytes::Bytes;

/// A question to a process about itself. It is asked by a call whose name is the question's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// To a proc: what its actors did and are doing.
    State,
    /// To a proc: the stacks of its Python threads, from its event loop.
    Stacks,
    /// To a proc: the same without the loop, which did not answer.
    Dump,
    /// To a proc: which thread works for which actor, and on what.
    Threads,
    /// To a proc: who waits there, for whom, since when.
    Waits,
    /// To an agent: the procs on its host; to the controller also the hosts, and recent failures.
    Tree,
    /// To an agent: what its host and its procs use.
    Usage,
    /// To an agent: the same with shares of memory, which takes the kernel longer.
    Shares,
}

/// The content of an inspecting frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inspect {
    /// A question, which wants a reply.
    Ask(Question),
    /// To a proc or an agent: somebody begins to follow events, or nobody does any longer. An agent tells its procs.
    Watch(bool),
    /// To the controller: an event.
    Event {
        /// As JSON.
        text: Bytes,
        /// Whether it is a failure.
        failure: bool,
    },
    /// Between an agent and the controller: somebody on another machine looks in.
    Visit(Visit),
}

impl Inspect {
    /// The frame's name on the wire. Callers may add more behind a NUL byte.
    #[must_use]
    pub fn word(&self) -> &'static [u8] {
        match self {
            Self::Ask(Question::State) => b"state",
            Self::Ask(Question::Stacks) => b"stacks",
            Self::Ask(Question::Dump) => b"dump",
            Self::Ask(Question::Threads) => b"threads",
            Self::Ask(Question::Waits) => b"waits",
            Self::Ask(Question::Tree) => b"tree",
            Self::Ask(Question::Usage) => b"usage",
            Self::Ask(Question::Shares) => b"shares",
            Self::Watch(true) => b"watch",
            Self::Watch(false) => b"rest",
            Self::Event { .. } => b"event",
            Self::Visit(_) => b"visit",
        }
    }

    /// Encodes this as a frame, to one or to many.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr, cast: Option<&Target>) -> Frame {
        let mut header = Header::new(Kind::Inspect, from, to);
        match self {
            Self::Ask(_) | Self::Watch(_) => Frame::build(header, cast, self.word(), &[]),
            Self::Event { text, failure } => {
                header.index = u32::from(*failure);
                Frame::build_plain(header, cast, self.word(), text)
            }
            Self::Visit(visit) => Frame::build_plain(header, cast, self.word(), &visit.encode()),
        }
    }

    /// Reads a frame; `None` for what this side does not know.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let word = frame.name().split(|byte| *byte == 0).next()?;
        Some(match word {
            b"state" => Self::Ask(Question::State),
            b"stacks" => Self::Ask(Question::Stacks),
            b"dump" => Self::Ask(Question::Dump),
            b"threads" => Self::Ask(Question::Threads),
            b"waits" => Self::Ask(Question::Waits),
            b"tree" => Self::Ask(Question::Tree),
            b"usage" => Self::Ask(Question::Usage),
            b"shares" => Self::Ask(Question::Shares),
            b"watch" => Self::Watch(true),
            b"rest" => Self::Watch(false),
            b"event" => Self::Event { text: body(frame)?, failure: frame.header.index != 0 },
            b"visit" => Self::Visit(Visit::decode(&body(frame)?)?),
            _ => return None,
        })
    }
}
