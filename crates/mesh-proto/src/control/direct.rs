//! Direct links: how two procs of one host come to have a link to each other, and what their agent still hears of the
//! messages that pass by it.

use super::body;
use crate::codec::{Reader, Writer};
use crate::{Frame, HEADER_LEN, Header, HostNo, Kind, LinkId, ProcAddr};

/// See the module. [`crate::DirectPlan`] decides who says what when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Direct {
    /// From a proc to its agent: it sends much to this proc.
    Ask(ProcAddr),
    /// From an agent to a proc, with the socket of this number: one end of a link to this proc, which gets the other.
    Offer(LinkId, ProcAddr, u64),
    /// From a proc to the other end, by way of the agent: it has its end, and will read it.
    Ready(LinkId),
    /// From a proc to the other end, by way of the agent: it has no use for the link.
    Refused(LinkId),
    /// From a proc to the other end, by way of the agent: what it sends from now on comes by the link.
    Begun(LinkId),
    /// From a proc to its agent: a message that these ranks of its receivers, in order, have already been sent. The others
    /// get it from the agent.
    Passed(Vec<u32>, Frame),
}

/// More receivers than a proc may have links to.
const MOST_PASSED: usize = 4096;

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
            Self::Begun(link) => out.byte(4).small(*link),
            Self::Passed(ranks, frame) => {
                out.byte(5).list(ranks, |out, rank| out.small(*rank)).bytes(&frame.header.encode()).bytes(&frame.body)
            }
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
            4 => Self::Begun(raw.small()?),
            5 => {
                let ranks = raw.list(Reader::small)?;
                let header = Header::decode(raw.bytes()?.first_chunk::<HEADER_LEN>()?).ok()?;
                let body = whole.slice_ref(raw.bytes()?);
                let passed = Frame { header, body };
                // Only what the sender itself has sent, and what is whole.
                let sound = ranks.len() <= MOST_PASSED
                    && ranks.is_sorted()
                    && header.src == frame.header.src
                    && header.body_len == passed.body.len() as u64
                    && header.kind != Kind::Direct;
                sound.then_some(Self::Passed(ranks, passed))?
            }
            _ => return None,
        })
    }
}

/// Whether a message of this kind may go by a direct link. What agents read themselves, or mark as it passes, goes by the
/// agent; nothing depends on its order among the others.
#[must_use]
pub fn may_go_direct(kind: Kind) -> bool {
    matches!(
        kind,
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
            | Kind::Spawn
            | Kind::StopActor
    )
}

/// What the agent of `host` must hear of a message that goes by a direct link: who owns what, and who holds values of other
/// hosts. `None` if nothing.
#[must_use]
pub fn heard_of(frame: &Frame, host: HostNo) -> Option<Frame> {
    let has_refs = frame.header.carries_refs() || frame.header.is_distant();
    if has_refs && frame.carried().iter().any(|one| one.owner.host != host) {
        return Some(frame.clone());
    }
    if !matches!(frame.header.kind, Kind::Spawn | Kind::StopActor) {
        return None;
    }
    // Its header says it; what it carries is for its receivers.
    let mut header = frame.header;
    header.empty();
    Some(Frame { header, body: frame.body.slice(..header.target_len as usize) })
}
