//! What everybody who may hold a reference to a mesh must know: where the ranks of a repaired one are, and why the policy
//! of one gave it up.

use super::body;
use crate::codec::{Reader, Writer};
use crate::{CallId, Frame, GivenUp, Header, Kind, Moved, ProcAddr, Run, Target};
use bytes::Bytes;

/// From a mesh's owner to the controller, from there to every agent, and from the agents to their procs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// What is new.
    pub told: Told,
    /// The call of the owner, which every agent answers; 0 for none.
    pub call: CallId,
}

/// What news is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// Where the ranks of a mesh are.
    Moved(Moved),
    /// Why a mesh was given up.
    GivenUp(GivenUp),
}

impl News {
    /// Encodes this as a frame, to one or to many.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr, cast: Option<&Target>) -> Frame {
        let (kind, mesh, body) = match &self.told {
            Told::Moved(moved) => (Kind::Moved, moved.mesh, write_moved(moved)),
            Told::GivenUp(GivenUp { mesh, why }) => (Kind::GivenUp, *mesh, Writer::default().bytes(why).done()),
        };
        let mut header = Header::new(kind, from, to);
        (header.actor, header.call) = (mesh, self.call);
        Frame::build_plain(header, cast, b"", &body)
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let raw = body(frame)?;
        let (header, mut raw) = (frame.header, Reader::new(&raw));
        let told = match header.kind {
            Kind::Moved => Told::Moved(read_moved(header.actor, &mut raw)?),
            Kind::GivenUp => Told::GivenUp(GivenUp { mesh: header.actor, why: Bytes::copy_from_slice(raw.bytes()?) }),
            _ => return None,
        };
        told.is_sound().then_some(Self { told, call: header.call })
    }
}

impl Told {
    fn is_sound(&self) -> bool {
        match self {
            Self::Moved(moved) => moved.is_sound(),
            Self::GivenUp(given_up) => given_up.is_sound(),
        }
    }
}

fn write_moved(moved: &Moved) -> Bytes {
    let Moved { mesh: _, version, runs, left } = moved;
    let out = Writer::default().small(*version);
    let out = out.list(runs, |out, run| out.small(run.first).small(run.count).addr(run.at).small(run.incarnation));
    out.list(left, |out, addr| out.addr(*addr)).done()
}

fn read_moved(mesh: u64, raw: &mut Reader<'_>) -> Option<Moved> {
    Some(Moved {
        mesh,
        version: raw.small()?,
        runs: raw.list(|raw| {
            let (first, count) = (raw.small()?, raw.small()?);
            Some(Run { first, count, at: raw.addr()?, incarnation: raw.small()? })
        })?,
        left: raw.list(Reader::addr)?,
    })
}
