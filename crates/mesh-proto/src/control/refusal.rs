//! What senders are told about messages and ports that nobody takes, and callers about who may still answer.

use super::body;
use crate::codec::{Reader, Writer};
use crate::frame::flags;
use crate::messages::{Asked, Returned};
use crate::{ActorId, CallId, Carried, Frame, Header, Kind, PortEnd, ProcAddr, Ticket, Undelivered};

/// A message came back, or the port of a call ended: an outcome of the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undeliverable {
    /// The caller's number of the call.
    pub call: CallId,
    /// The place in the call's target that has this outcome.
    pub place: u32,
    /// The actor that was called.
    pub actor: ActorId,
    /// Why.
    pub why: Undelivered,
}

impl Undeliverable {
    /// The answer to a message.
    #[must_use]
    pub fn answer(to: &Asked, why: Undelivered) -> Self {
        Self { call: to.call, place: to.place, actor: to.actor, why }
    }

    /// Encodes this as a frame to the caller. The end of a port is flagged (`END`), since streams look at nothing else.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let &Self { call, place, actor, .. } = self;
        let header = Returned { actor, call, place, port_ended: self.why.is_end_of_port() }.header(from, to);
        Frame::build_plain(header, None, b"", &self.why.write(Writer::default()).done())
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let Returned { actor, call, place, .. } = Returned::read(&frame.header).ok()?;
        Some(Self { call, place, actor, why: Self::read_why(&body(frame)?)? })
    }

    /// Reads the body of a frame.
    #[must_use]
    pub fn read_why(body: &[u8]) -> Option<Undelivered> {
        Undelivered::read(&mut Reader::new(body))
    }
}

/// A port: a channel's, or a call's at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortAddr {
    /// The process that receives there.
    pub owner: ProcAddr,
    /// The channel's id, or the caller's number of the call.
    pub id: u64,
    /// For a call, the place that answers.
    pub place: u32,
    /// Whether it is the port of a call.
    pub response: bool,
}

/// Nobody receives from a port any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// The port.
    pub port: PortAddr,
    /// Why.
    pub why: PortEnd,
}

impl Closed {
    /// Encodes this as a frame to a process that has sent to the port.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let mut header = Header::new(Kind::Closed, from, to);
        (header.actor, header.index) = (self.port.id, self.port.place);
        header.flags = if self.port.response { flags::MORE } else { 0 };
        let body = Writer::default().addr(self.port.owner).byte(self.why.code()).done();
        Frame::build_plain(header, None, b"", &body)
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let header = &frame.header;
        let raw = body(frame)?;
        let mut raw = Reader::new(&raw);
        let (owner, why) = (raw.addr()?, PortEnd::of(raw.byte()?));
        let response = header.flags & flags::MORE != 0;
        Some(Self { port: PortAddr { owner, id: header.actor, place: header.index, response }, why })
    }
}

/// What a caller is told about the holders of its call's port, or the owner of a kept value about the value's holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// It went where nobody can follow it.
    Loose,
    /// It was sent to these processes, which hold it under this ticket.
    Given {
        /// The ticket, which travels with the port.
        ticket: Ticket,
        /// To whom.
        to: Vec<ProcAddr>,
        /// The name of the actor there.
        name: String,
    },
    /// The sender let go of what came to it under these tickets.
    LetGo(Vec<Ticket>),
    /// What travelled under this ticket never reached these processes. Only for references: a lost port is noticed
    /// through its message.
    Unsent {
        /// The ticket.
        ticket: Ticket,
        /// To whom.
        to: Vec<ProcAddr>,
    },
    /// The sender read this reference from a kept value. The process that keeps that value gives it to the sender.
    Read(Carried),
}

/// News of a holder, for a caller or for the owner of a kept value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The caller's number of the call, or the owner's number of the value.
    pub call: CallId,
    /// The place of the call that the port answers for.
    pub place: u32,
    /// The news.
    pub news: Holding,
}

impl Held {
    /// Encodes this as a frame to the caller.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let mut header = Header::new(Kind::Held, from, to);
        (header.call, header.index) = (self.call, self.place);
        let out = match &self.news {
            Holding::Loose => Writer::default().byte(0),
            Holding::Given { ticket, to, name } => {
                Writer::default().byte(1).number(*ticket).list(to, |out, addr| out.addr(*addr)).text(name)
            }
            Holding::LetGo(tickets) => Writer::default().byte(2).list(tickets, |out, ticket| out.number(*ticket)),
            Holding::Unsent { ticket, to } => {
                Writer::default().byte(3).number(*ticket).list(to, |out, addr| out.addr(*addr))
            }
            Holding::Read(Carried { owner, id, ticket }) => {
                Writer::default().byte(4).addr(*owner).number(*id).number(*ticket)
            }
        };
        Frame::build_plain(header, None, b"", &out.done())
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let raw = body(frame)?;
        let mut raw = Reader::new(&raw);
        let news = match raw.byte()? {
            0 => Holding::Loose,
            1 => Holding::Given { ticket: raw.number()?, to: raw.list(Reader::addr)?, name: raw.text()? },
            2 => Holding::LetGo(raw.list(Reader::number)?),
            3 => Holding::Unsent { ticket: raw.number()?, to: raw.list(Reader::addr)? },
            4 => Holding::Read(Carried { owner: raw.addr()?, id: raw.number()?, ticket: raw.number()? }),
            _ => return None,
        };
        Some(Self { call: frame.header.call, place: frame.header.index, news })
    }
}
