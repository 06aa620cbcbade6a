//! What peer streams carry, and their limits.

use crate::HostNo;
use crate::hosts::{HostSet, Short};
use bytes::Bytes;
use std::time::Duration;

/// How long an ack waits after the first packet that it is for, if no other packet carries it.
pub(super) const ACK_DELAY: Duration = Duration::from_millis(20);

/// An ack is sent early once this much has arrived.
pub(super) const ACK_COST: u64 = 256 << 10;

/// How many posts of a lane are examined for one that may go when the first may not.
pub(super) const AHEAD: usize = 32;

/// Messages from one proc to one mesh: they arrive in the order in which they were posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane {
    /// The sending proc: mesh, rank and host.
    pub sender: (u64, u32, u32),
    /// The mesh that the message is for.
    pub mesh: u64,
}

/// A frame to send.
#[derive(Clone, Debug)]
pub struct Cargo {
    /// Its bytes, in pieces. They are never copied.
    pub frame: Short<Bytes>,
    /// The messages that it must not overtake.
    pub lane: Lane,
}

impl Cargo {
    pub(super) fn len(&self) -> u64 {
        self.frame.iter().map(|piece| piece.len() as u64).sum()
    }
}

/// A delivery, in the order of its peer stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A frame or a segment of one. A frame's segments come in order, perhaps with other frames in between.
    Piece {
        /// The sender.
        origin: HostNo,
        /// Which of the origin's frames it belongs to, unless it is whole.
        message: u32,
        /// Where in the frame it begins.
        offset: u64,
        /// The frame's length.
        total: u64,
        /// The bytes.
        body: Short<Bytes>,
    },
    /// A merged body. Only the parts of these hosts count now.
    Merged {
        /// Whose parts count.
        origins: HostSet,
        /// The bytes.
        body: Short<Bytes>,
    },
}

/// A message to a host that has ended: it did not arrive, or that is unknown.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The whole frame, in the pieces that were posted.
    pub frame: Short<Bytes>,
    /// Its lane.
    pub lane: Lane,
}
