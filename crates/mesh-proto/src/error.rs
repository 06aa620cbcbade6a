//! What can be wrong with bytes from a link.

use thiserror::Error;

/// The longest allowed body of a frame; a peer that claims more is not Mesh.
pub const MAX_BODY: u64 = 1 << 40;

/// A frame that cannot be read. The link that it came from must not be trusted any further.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// The first bytes are not Mesh's.
    #[error("not a mesh frame: it begins with {0:#06x}")]
    Magic(u16),
    /// The peer speaks another version.
    #[error("the peer speaks frame version {theirs}, this side {ours}; install the same mesh-core on both")]
    Version {
        /// What the frame says.
        theirs: u8,
        /// What this side reads.
        ours: u8,
    },
    /// No kind has this byte.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// The frame claims to be longer than any frame may be.
    #[error("a frame of {0} bytes exceeds the limit of {limit} bytes", limit = MAX_BODY)]
    TooLong(u64),
    /// Parts, names and target do not fit the length in the header.
    #[error("the frame's {what} extends beyond its end")]
    Overrun {
        /// What does not fit.
        what: &'static str,
    },
    /// Bytes remain after the last part.
    #[error("{0} bytes follow the frame's last part")]
    Trailing(u64),
    /// The cast's region cannot be read.
    #[error("the cast's region is malformed: {0}")]
    Region(String),
    /// Frames were lost, repeated or reordered on a link.
    #[error("frame {got} arrived where {expected} was due")]
    Sequence {
        /// The number that was due.
        expected: u32,
        /// The number that came.
        got: u32,
    },
}
