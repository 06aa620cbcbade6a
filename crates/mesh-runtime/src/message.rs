//! A frame that has reached its receiver.

use crate::error::RuntimeError;
use crate::shm::{Memory, PartData};
use mesh_proto::{Frame, Header, Part, flags};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A delivered frame. It owns the shared memory that it refers to: opened or not, the memory goes back to its owner
/// when the last of it is dropped (SHM-3).
#[derive(Debug)]
pub struct Message {
    frame: Frame,
    opened: AtomicBool,
    memory: Option<Arc<Memory>>,
}

impl Message {
    pub(crate) fn new(frame: Frame, memory: &Arc<Memory>) -> Self {
        let shared = frame.header.flags & flags::SHARED != 0;
        Self { frame, opened: AtomicBool::new(false), memory: shared.then(|| Arc::clone(memory)) }
    }

    /// The fixed part.
    pub fn header(&self) -> &Header {
        &self.frame.header
    }

    /// The endpoint, or the reason that comes with an error.
    pub fn name(&self) -> &[u8] {
        self.frame.name()
    }

    /// The envelope and the out-of-band parts. Shared ones can be had once.
    ///
    /// # Errors
    /// If the frame is malformed, or its shared memory cannot be mapped: its owner has died, say.
    pub fn open(&self) -> Result<(bytes::Bytes, Vec<PartData>), RuntimeError> {
        let mut parts = self.frame.parts()?.into_iter();
        let payload = match parts.next() {
            Some(Part::Inline(bytes)) => bytes,
            _ => bytes::Bytes::new(),
        };
        let taken = self.opened.swap(true, Ordering::SeqCst);
        let rest = parts
            .map(|part| match part {
                Part::Inline(bytes) => Ok(PartData::Inline(bytes)),
                Part::Shared { at, len } => match &self.memory {
                    Some(memory) if !taken => {
                        memory.open(&at, len, self.frame.header.flags & flags::SOLE != 0).map(PartData::Shared)
                    }
                    _ => Err(RuntimeError::Os {
                        what: "open a message's shared part twice",
                        errno: rustix::io::Errno::NXIO,
                    }),
                },
            })
            .collect::<Result<_, _>>()?;
        Ok((payload, rest))
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take()
            && !self.opened.load(Ordering::SeqCst)
        {
            memory.let_go(&self.frame);
        }
    }
}
