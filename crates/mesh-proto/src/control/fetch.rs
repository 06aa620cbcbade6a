//! Getting a kept value that cannot be mapped, because its owner is on another host or shares no memory.

use crate::{CallId, Frame, Header, Kind, ProcAddr};

/// Asks a process for the bytes of a value that it keeps. The answer is a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// The value's number.
    pub id: u64,
    /// The call that waits for it; not 0.
    pub call: CallId,
}

impl Fetch {
    /// Encodes this as a frame to the process that keeps the value.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let mut header = Header::new(Kind::Fetch, from, to);
        (header.actor, header.call) = (self.id, self.call);
        Frame::build(header, None, b"", &[])
    }

    /// Reads a header; `None` if it is of another kind, or nobody is waiting.
    #[must_use]
    pub fn read(header: &Header) -> Option<Self> {
        let fetch = Self { id: header.actor, call: header.call };
        (header.kind == Kind::Fetch && header.call != 0).then_some(fetch)
    }
}
