//! Ways to reach another process's memory, behind one trait.

pub(crate) mod cuda;
pub(crate) mod ibverbs;
mod same_host;
pub(crate) mod shm;
pub(crate) mod tcp;
pub(crate) mod ucx;

use crate::error::TransferError;
use crate::exports::{Export, Exports};
use crate::handle::Handle;
use crate::membership::Membership;
use crate::operation::Op;
use crate::watch::Watch;
use std::fmt::Debug;
use std::sync::Arc;

/// What a transport can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Reads and writes.
    pub copies: bool,
    /// `fetch_add` and `compare_and_swap`.
    pub atomics: bool,
    /// Reaches processes of other hosts.
    pub remote: bool,
    /// Costs the owner's processor nothing.
    pub one_sided: bool,
}

/// Part of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) op: usize,
    /// Offset from the operation's first byte.
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// Splits the operations into pieces of at most `longest` bytes, in order.
pub(crate) fn pieces(ops: &[Op], longest: u64) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(ops.len());
    for (op, each) in ops.iter().enumerate() {
        let (_, len) = each.work.span();
        let mut at = 0;
        while at < len {
            let step = longest.min(len - at);
            pieces.push(Piece { op, at, len: step });
            at += step;
        }
    }
    pieces
}

/// Operations submitted together, with everything that keeps their local memory in place.
pub trait Ops: Send + Sync {
    /// The operations; the same at each call.
    fn ops(&self) -> &[Op];
}

impl<T: Send + Sync> Ops for (Vec<Op>, T) {
    fn ops(&self) -> &[Op] {
        &self.0
    }
}

impl<T: Send + Sync> Ops for ([Op; 1], T) {
    fn ops(&self) -> &[Op] {
        &self.0
    }
}

/// A way to reach other processes' memory.
pub trait Transport: Send + Sync + Debug {
    /// The name by which users select it.
    fn name(&self) -> &str;

    /// What it can do where it works.
    fn capabilities(&self) -> Capabilities;

    /// Whether it performs atomic operations if requested by name. They are atomic with respect to each other, but not
    /// to those of other transports, so nothing else chooses it for them (ATM-1).
    fn atomics_by_name(&self) -> bool {
        false
    }

    /// Whether it offers GPU memory too.
    fn takes_cuda(&self) -> bool {
        false
    }

    /// Whether it offers host memory.
    fn takes_host(&self) -> bool {
        true
    }

    /// Whether it can work in this process: tried, not guessed.
    fn probe(&self) -> Result<(), TransferError>;

    /// What others need to know to reach this export. The first call may start what serves them.
    fn offer(&self, exports: &Arc<Exports>, export: &Arc<Export>) -> Result<Vec<u8>, TransferError>;

    /// Tells it that this process now belongs to this job of several hosts.
    fn join(&self, _membership: &Membership) {}

    /// Tells it that this is a forked copy of the process, which must not keep connections of its parent open.
    fn forked(&self) {}

    /// Why it cannot reach a handle's owner, as far as is known without trying.
    fn why_not(&self, _handle: &Handle, _section: &[u8]) -> Option<String> {
        None
    }

    /// Whether it must be told of closed exports, because it was given their memory and does not ask [`Exports::find`]
    /// for it.
    fn holds_memory(&self) -> bool {
        false
    }

    /// Withdraws a closed export: nobody reaches its memory by this transport afterwards. Blocks.
    fn withdraw(&self, _export: &Export) {}

    /// Ends what must not outlive the program, as the process ends, and waits for it.
    fn end(&self) {}

    /// Reaches a handle's owner. Blocks; after an error of kind [`ErrorKind::Transport`](crate::ErrorKind::Transport),
    /// others are tried.
    fn connect(&self, handle: &Handle, section: &[u8], watch: &Watch) -> Result<Arc<dyn Peer>, TransferError>;
}

/// A process whose memory can be reached by one transport.
pub trait Peer: Send + Sync + Debug {
    /// Performs all operations, in any order. Blocks. `found` has a place for each operation, which atomic ones fill.
    /// After an error of kind [`ErrorKind::Transport`](crate::ErrorKind::Transport), all may be tried again, also by
    /// another transport.
    ///
    /// # Safety
    /// The local memory of all operations must be this process's, and writable where it is written to, throughout.
    unsafe fn run(&self, ops: &[Op], found: &mut [u64], watch: &Watch) -> Result<(), TransferError>;

    /// Whether the local memory may be a GPU's. If not, it is staged in host memory.
    fn takes_cuda(&self) -> bool {
        false
    }

    /// Whether the owner is alive, as far as is known without waiting.
    fn is_alive(&self) -> bool;

    /// Whether performing a short operation takes less time than handing it to another thread.
    fn is_quick(&self) -> bool;
}
