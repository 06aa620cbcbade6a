//! Direct links: how two procs of one host come to have a link to each other, and which messages never go by it.

use super::body;
use crate::codec::{Reader, Writer};
use crate::{Frame, Header, HostNo, Kind, LinkId, ProcAddr};

/// See the module. [`crate::DirectPlan`] decides who says what when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Direct {
    /// From a proc to its agent: it sends much to this proc.
    Ask(ProcAddr),
    /// From an agent to a proc, with the socket of this number and what belongs to it: one end of a link to this proc, which
    /// gets the other.
    Offer(LinkId, ProcAddr, u64),
    /// From a proc to the other end, by way of the agent: it has its end, and will read it.
    Ready(LinkId),
    /// From a proc to the other end, by way of the agent: it has no use for the link.
    Refused(LinkId),
}

impl Direct {
    /// Encodes this as a frame.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let out = Writer::default();
        let out = match self {
            Self::Ask(peer) => out.byte(0).addr(*peer),
            Self::Offer(link, peer, socket) => out.byte(1).small(*link).addr(*peer).number(*socket),
            Self::Ready(link) => out.byte(2).small(*link),
            Self::Refused(link) => out.byte(3).small(*link),
        };
        Frame::build_plain(Header::new(Kind::Direct, from, to), None, b"", &out.done())
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let whole = body(frame)?;
        let mut raw = Reader::new(&whole);
        Some(match raw.byte()? {
            0 => Self::Ask(raw.addr()?),
            1 => Self::Offer(raw.small()?, raw.addr()?, raw.number()?),
            2 => Self::Ready(raw.small()?),
            3 => Self::Refused(raw.small()?),
            _ => return None,
        })
    }
}

/// Whether a message may go by a direct link. What agents read themselves or mark as it passes goes by the agent of `host`,
/// and so does what it must hear of: who owns what, and who holds values of other hosts.
#[must_use]
pub fn may_go_direct(frame: &Frame, host: HostNo) -> bool {
    let is_plain = matches!(
        frame.header.kind,
        Kind::Call
            | Kind::Tell
            | Kind::Reply
            | Kind::Undeliverable
            | Kind::Cancel
            | Kind::Post
            | Kind::Closed
            | Kind::Credit
            | Kind::Held
            | Kind::Fetch
            | Kind::Extend
            | Kind::Failure
    );
    let may_have_refs = frame.header.carries_refs() || frame.header.is_distant();
    is_plain && !(may_have_refs && frame.carried().iter().any(|one| one.owner.host != host))
}
