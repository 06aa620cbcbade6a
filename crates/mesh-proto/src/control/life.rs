//! Procs from their first frame to the notice of their end.

use super::body;
use crate::codec::{Reader, Writer};
use crate::frame::flags;
use crate::{EndReason, Ended, Exit, Frame, Header, Kind, ProcAddr};

/// The last frame of a proc that ends on its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Goodbye {
    /// Why its exit status signals a failure, if it does.
    pub reason: EndReason,
}

impl Goodbye {
    /// Encodes this as a frame from the proc to its agent.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let body = self.reason.write(Writer::default()).done();
        Frame::build_plain(Header::new(Kind::Goodbye, from, to), None, b"", &body)
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let raw = body(frame)?;
        Some(Self { reason: EndReason::read(&mut Reader::new(&raw))? })
    }
}

/// The process whose end a frame reports, from its header alone; `None` for any other frame.
#[must_use]
pub fn down_of(header: &Header) -> Option<ProcAddr> {
    let who = ProcAddr { mesh: header.actor, rank: header.index, host: header.src.host };
    (header.kind == Kind::Down).then_some(who)
}

/// The notice of a proc's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Down {
    /// The proc. Only the agent of its host reports its end, so the host is the sender's.
    pub who: ProcAddr,
    /// How it ended.
    pub ended: Ended,
    /// Whether it answers one message, instead of being the only notice of that end.
    pub answer: bool,
    /// How many calls of the receiver failed with it; set within a process only.
    pub calls: u64,
}

impl Down {
    /// The one notice of an end.
    #[must_use]
    pub fn notice(who: ProcAddr, ended: &Ended) -> Self {
        Self { who, ended: ended.clone(), answer: false, calls: 0 }
    }

    /// The answer to a message that came too late.
    #[must_use]
    pub fn answer(who: ProcAddr, ended: &Ended) -> Self {
        Self { answer: true, ..Self::notice(who, ended) }
    }

    /// Encodes this as a frame.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let mut header = Header::new(Kind::Down, from, to);
        (header.actor, header.index, header.call) = (self.who.mesh, self.who.rank, self.calls);
        header.flags = if self.answer { flags::DEAD } else { 0 };
        let Ended { pid, exit, orderly, reason, stderr_tail } = &self.ended;
        let (tag, value) = match *exit {
            Exit::Code(code) => (0, code),
            Exit::Signal(signal) => (1, signal),
            Exit::OutOfMemory => (2, 0),
            Exit::Unknown => (3, 0),
        };
        let out = Writer::default().byte(tag).signed(value).small(pid.unwrap_or(0)).byte(u8::from(*orderly));
        // The reason comes last: nothing can be read behind one whose code is not known.
        let out = reason.write(out.list(stderr_tail, |out, line| out.text(line)));
        Frame::build_plain(header, None, b"", &out.done())
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let header = &frame.header;
        let raw = body(frame)?;
        let mut raw = Reader::new(&raw);
        let (tag, value) = (raw.byte()?, raw.signed()?);
        let exit = match tag {
            0 => Exit::Code(value),
            1 => Exit::Signal(value),
            2 => Exit::OutOfMemory,
            _ => Exit::Unknown,
        };
        let pid = Some(raw.small()?).filter(|pid| *pid != 0);
        let orderly = raw.byte()? != 0;
        let stderr_tail = raw.list(Reader::text)?;
        let reason = EndReason::read(&mut raw)?;
        Some(Self {
            who: down_of(header)?,
            ended: Ended { pid, exit, orderly, reason, stderr_tail },
            answer: header.flags & flags::DEAD != 0,
            calls: header.call,
        })
    }
}
