//! What is to be done to the memory of another process.

use crate::error::TransferError;
use crate::handle::Handle;
use crate::segments::Segments;
use std::sync::Arc;

/// One thing to be done to the memory of another process.
#[derive(Clone, Debug)]
pub enum Work {
    /// Copy from there.
    Read {
        /// To here.
        local: Segments,
        /// From here on, inside the buffer.
        offset: u64,
    },
    /// Copy to there.
    Write {
        /// From here.
        local: Segments,
        /// To here, inside the buffer.
        offset: u64,
    },
    /// Add, and return what was there.
    FetchAdd {
        /// Where the 8 bytes are, inside the buffer.
        offset: u64,
        /// What to add, wrapping around.
        value: u64,
    },
    /// Replace what is expected, and return what was there.
    CompareAndSwap {
        /// Where the 8 bytes are, inside the buffer.
        offset: u64,
        /// Only if they are this.
        expected: u64,
        /// What they become.
        desired: u64,
    },
}

impl Work {
    /// Where in the buffer it is done, and to how many bytes.
    pub fn span(&self) -> (u64, u64) {
        match self {
            Self::Read { local, offset } | Self::Write { local, offset } => (*offset, local.len()),
            Self::FetchAdd { offset, .. } | Self::CompareAndSwap { offset, .. } => (*offset, 8),
        }
    }

    /// The memory of this process, if there is any.
    pub fn local(&self) -> Option<&Segments> {
        match self {
            Self::Read { local, .. } | Self::Write { local, .. } => Some(local),
            _ => None,
        }
    }

    /// Whether it must be one step for everybody who looks.
    pub fn is_atomic(&self) -> bool {
        matches!(self, Self::FetchAdd { .. } | Self::CompareAndSwap { .. })
    }

    /// Whether the memory there is changed.
    pub fn writes(&self) -> bool {
        !matches!(self, Self::Read { .. })
    }
}

/// One thing to be done, and to which buffer.
#[derive(Clone, Debug)]
pub struct Op {
    /// The buffer.
    pub handle: Arc<Handle>,
    /// What to do.
    pub work: Work,
}

impl Op {
    /// An operation that lies inside its buffer, is aligned and allowed.
    pub fn new(handle: &Arc<Handle>, work: Work) -> Result<Self, TransferError> {
        let (offset, len) = work.span();
        handle.check(offset, len)?;
        if work.is_atomic() && !(handle.start + offset).is_multiple_of(8) {
            return Err(TransferError::invalid(format!(
                "an atomic operation must be at a multiple of 8 bytes from the beginning of the owner's memory, got {}",
                handle.start + offset
            )));
        }
        if work.writes() && !handle.writable {
            return Err(TransferError::invalid("the buffer is read-only: its owner made it of read-only memory"));
        }
        Ok(Self { handle: Arc::clone(handle), work })
    }
}
