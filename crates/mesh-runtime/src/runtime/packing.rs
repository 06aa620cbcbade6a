//! How the payload and the buffers of a message become its parts. Large ones are put into shared memory.

use crate::buffer::Buffer;
use crate::shm::Memory;
use crate::spin_board::SpinBoard;
use bytes::Bytes;
use mesh_proto::{Part, ProcAddr, Sharing, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// After this many messages, unused memory is given back.
const TRIM_AFTER: u32 = 64;

/// See the module.
#[derive(Debug)]
pub(super) struct Packing {
    me: ProcAddr,
    memory: Arc<Memory>,
    board: Arc<SpinBoard>,
    /// Parts of this length and more go into shared memory.
    threshold: usize,
    packed: AtomicU32,
}

impl Packing {
    pub(super) fn new(me: ProcAddr, memory: &Arc<Memory>, board: &Arc<SpinBoard>, threshold: usize) -> Self {
        Self { me, memory: Arc::clone(memory), board: Arc::clone(board), threshold, packed: AtomicU32::new(0) }
    }

    /// The parts of a message. Buffers that are `distant` already have theirs.
    pub(super) fn pack<'a>(
        &self,
        target: &Target,
        payload: &[u8],
        buffers: impl Iterator<Item = Buffer<'a>>,
        distant: Vec<Option<Part>>,
    ) -> (Vec<Part>, Sharing) {
        let mut parts = Vec::with_capacity(1 + buffers.size_hint().0);
        parts.push(Part::Inline(Bytes::copy_from_slice(payload)));
        let mut sharing = Sharing { sole: target.len() == 1, shared: false };
        let agent = Target::One(ProcAddr::agent(self.me.host));
        // What goes to other hosts passes through this host's agent. A message for this host and others is written out:
        // nobody here maps it.
        let near = match target.is_on(self.me.host) {
            true => Some(target),
            false if !self.me.is_agent() && target.hosts().contains(self.me.host) => None,
            false => Some(&agent),
        };
        let mut distant = distant.into_iter();
        for data in buffers {
            if let Some(part) = distant.next().flatten() {
                parts.push(part);
                continue;
            }
            let near = near.filter(|_| data.len() >= self.threshold);
            let shared = near.and_then(|near| self.memory.put_buffer(data, near, self.board.spare()));
            parts.push(match shared {
                Some(at) => {
                    sharing.shared = true;
                    Part::Shared { at, len: data.len() as u64 }
                }
                None => Part::Inline(data.to_bytes()),
            });
        }
        if self.packed.fetch_add(1, Ordering::Relaxed) % TRIM_AFTER == TRIM_AFTER - 1 {
            self.memory.trim();
        }
        (parts, sharing)
    }
}
