//! What peer streams carry, and how far they may be ahead.

use crate::HostNo;
use crate::hosts::{HostSet, Short};
use bytes::Bytes;
use std::time::Duration;

/// An ack is due so long after the first packet that it is for, if nothing carries it before.
pub(super) const ACK_DELAY: Duration = Duration::from_millis(20);

/// Or when so much has arrived.
pub(super) const ACK_COST: u64 = 256 << 10;

/// So many posts of a lane are looked at for one that may go when the first may not.
pub(super) const AHEAD: usize = 32;

/// Messages of one lane arrive in the order in which they were posted: those of one proc to one mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane {
    /// The sending proc: mesh, rank and host.
    pub sender: (u64, u32, u32),
    /// The mesh that the message is for.
    pub mesh: u64,
}

/// A frame to be sent.
#[derive(Clone, Debug)]
pub struct Cargo {
    /// Its bytes, in pieces; they are never copied.
    pub frame: Short<Bytes>,
    /// What it must not overtake.
    pub lane: Lane,
}

impl Cargo {
    pub(super) fn len(&self) -> u64 {
        self.frame.iter().map(|piece| piece.len() as u64).sum()
    }
}

/// What is delivered, in the order of its peer stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A frame, or a segment of one; the segments of a frame come in order, between other frames.
    Piece {
        /// Who sent it.
        origin: HostNo,
        /// Which of the origin's frames it belongs to, unless it is whole.
        message: u32,
        /// Where in the frame it begins.
        offset: u64,
        /// How long the frame is.
        total: u64,
        /// The bytes.
        body: Short<Bytes>,
    },
    /// A merged body, of which the parts of these hosts count now, and no others.
    Merged {
        /// Whose parts count.
        origins: HostSet,
        /// The bytes.
        body: Short<Bytes>,
    },
}

/// A message to a host that has ended: it did not arrive, or nobody knows.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The whole frame, in the pieces that it was posted in.
    pub frame: Short<Bytes>,
    /// Its lane.
    pub lane: Lane,
}
