//! Where the ranks of a repaired mesh are, for everybody who may hold a reference to it.

use super::body;
use crate::codec::{Reader, Writer};
use crate::{CallId, Frame, Header, Kind, Moved, ProcAddr, Run, Target};

/// From a mesh's owner to the controller, from there to every agent, and from the agents to their procs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// What is new.
    pub moved: Moved,
    /// The call of the owner, which every agent answers; 0 for none.
    pub call: CallId,
}

impl News {
    /// Encodes this as a frame, to one or to many.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr, cast: Option<&Target>) -> Frame {
        let Moved { mesh, version, runs, left } = &self.moved;
        let mut header = Header::new(Kind::Moved, from, to);
        (header.actor, header.call) = (*mesh, self.call);
        let out = Writer::default().small(*version);
        let out = out.list(runs, |out, run| out.small(run.first).small(run.count).addr(run.at).small(run.incarnation));
        let out = out.list(left, |out, addr| out.addr(*addr));
        Frame::build_plain(header, cast, b"", &out.done())
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let raw = body(frame)?;
        let mut raw = Reader::new(&raw);
        let moved = Moved {
            mesh: frame.header.actor,
            version: raw.small()?,
            runs: raw.list(|raw| {
                let (first, count) = (raw.small()?, raw.small()?);
                Some(Run { first, count, at: raw.addr()?, incarnation: raw.small()? })
            })?,
            left: raw.list(Reader::addr)?,
        };
        moved.is_sound().then_some(Self { moved, call: frame.header.call })
    }
}
