//! What hosts tell each other about the lines that procs print.

use crate::codec::{Reader, Writer};
use crate::logs::LogOptions;
use crate::{Frame, Header, Kind, MeshId, Part, ProcAddr, Target};
use bytes::Bytes;

/// One such message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lines {
    /// To the controller: a batch of lines, opaque here.
    Found(Bytes),
    /// From the controller: the batch was taken, another may come.
    More,
    /// From the controller to all: send whatever is left now; the answer bears this ticket.
    Flush(u64),
    /// From the controller: send what the processes of a mesh have written so far; the answer bears this ticket.
    Report(MeshId, u64),
    /// From the controller to all: how to show the lines of a mesh.
    Set(MeshId, LogOptions),
}

impl Lines {
    /// Encodes this as a frame, to one or to many.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr, cast: Option<&Target>) -> Frame {
        let mut parts = Vec::with_capacity(2);
        let out = match self {
            Self::Found(batch) => {
                // A part of its own, which is not copied.
                parts.push(Part::Inline(batch.clone()));
                Writer::default().byte(0)
            }
            Self::More => Writer::default().byte(1),
            Self::Flush(ticket) => Writer::default().byte(2).number(*ticket),
            Self::Report(mesh, ticket) => Writer::default().byte(4).number(*mesh).number(*ticket),
            Self::Set(mesh, options) => Writer::default().byte(3).number(*mesh).bytes(&options.encode()),
        };
        parts.insert(0, Part::Inline(out.done()));
        Frame::build(Header::new(Kind::Lines, from, to), cast, b"", &parts)
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let mut parts = frame.parts().ok()?.into_iter();
        let Some(Part::Inline(raw)) = parts.next() else { return None };
        let mut raw = Reader::new(&raw);
        Some(match raw.byte()? {
            0 => match parts.next()? {
                Part::Inline(batch) => Self::Found(batch),
                Part::Shared { .. } | Part::Distant { .. } => return None,
            },
            1 => Self::More,
            2 => Self::Flush(raw.number()?),
            4 => Self::Report(raw.number()?, raw.number()?),
            3 => Self::Set(raw.number()?, LogOptions::decode(raw.bytes()?)?),
            _ => return None,
        })
    }
}
