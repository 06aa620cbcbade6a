//! Operations on the memory of another process.

use crate::error::TransferError;
use crate::handle::Handle;
use crate::segments::Segments;
use std::sync::Arc;

/// One operation on the memory of another process.
#[derive(Clone, Debug)]
pub enum Work {
    /// Copy from the buffer.
    Read {
        /// To this memory.
        local: Segments,
        /// From this offset in the buffer.
        offset: u64,
    },
    /// Copy to the buffer.
    Write {
        /// From this memory.
        local: Segments,
        /// To this offset in the buffer.
        offset: u64,
    },
    /// Add, and return the previous value.
    FetchAdd {
        /// Offset of the 8 bytes in the buffer.
        offset: u64,
        /// What to add, wrapping around.
        value: u64,
    },
    /// Replace the value if it is the expected one, and return the previous value.
    CompareAndSwap {
        /// Offset of the 8 bytes in the buffer.
        offset: u64,
        /// The value to replace.
        expected: u64,
        /// The new value.
        desired: u64,
    },
}

impl Work {
    /// The offset in the buffer, and the number of bytes.
    pub fn span(&self) -> (u64, u64) {
        match self {
            Self::Read { local, offset } | Self::Write { local, offset } => (*offset, local.len()),
            Self::FetchAdd { offset, .. } | Self::CompareAndSwap { offset, .. } => (*offset, 8),
        }
    }

    /// The memory of this process, if any.
    pub fn local(&self) -> Option<&Segments> {
        match self {
            Self::Read { local, .. } | Self::Write { local, .. } => Some(local),
            _ => None,
        }
    }

    /// Whether others must see it as a single step.
    pub fn is_atomic(&self) -> bool {
        matches!(self, Self::FetchAdd { .. } | Self::CompareAndSwap { .. })
    }

    /// Whether it changes the buffer.
    pub fn writes(&self) -> bool {
        !matches!(self, Self::Read { .. })
    }
}

/// An operation, and its buffer.
#[derive(Clone, Debug)]
pub struct Op {
    /// The buffer.
    pub handle: Arc<Handle>,
    /// What to do.
    pub work: Work,
}

impl Op {
    /// Checks that the operation lies inside its buffer, is aligned, and is allowed.
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
