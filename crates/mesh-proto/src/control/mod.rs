//! Frames by which Mesh's processes control each other: one type each, with the only codec, which both ends use.
//!
//! A type's `frame` makes the frame; its `read` takes one apart, and returns `None` for other bytes. What a header's
//! fields mean depends on the kind; only these types know it.

mod direct;
mod fetch;
mod hosts;
mod life;
mod lines;
mod looks;
mod news;
mod orders;
mod refusal;
mod traits;
mod visit;

pub use direct::{Direct, may_go_direct};
pub use fetch::Fetch;
pub use hosts::{
    Attachment, EndJob, HostDown, HostLost, HostStanding, Introduction, Report, Revoked, Terms, Whereabouts, host_of,
};
pub use life::{Down, Goodbye, down_of};
pub use lines::Lines;
pub use looks::{Inspect, Question};
pub use news::{News, Told};
pub use orders::{Hello, SpawnProcs, StopProc, StopProcs, Watch, mesh_of, ranks_at, ranks_of};
pub use refusal::{Closed, Held, Holding, PortAddr, Undeliverable};
pub use traits::Traits;
pub use visit::{Step, Visit};

use crate::{Frame, Part};
use bytes::Bytes;

/// The first part, which control frames never share.
fn body(frame: &Frame) -> Option<Bytes> {
    match frame.parts().ok()?.into_iter().next()? {
        Part::Inline(bytes) => Some(bytes),
        Part::Shared { .. } | Part::Distant { .. } => None,
    }
}
