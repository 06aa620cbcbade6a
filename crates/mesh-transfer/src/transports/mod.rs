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
    /// Counted from the operation's first byte.
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// The operations in pieces of at most `longest` bytes, in their order.
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

/// Operations that are submitted together, with all that keeps their local memory where it is.
pub trait Ops: Send + Sync {
    /// The same ones whenever it is called.
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
    /// What users select it by.
    fn name(&self) -> &str;

    /// What it can do where it works.
    fn capabilities(&self) -> Capabilities;

    /// Whether it carries out atomic operations where it is asked for by name. They are atomic towards each other, and not towards
    /// those of other transports, so that nothing else chooses it for them (ATM-1).
    fn atomics_by_name(&self) -> bool {
        false
    }

    /// Whether it offers memory of GPUs too; else that is offered by others only.
    fn takes_cuda(&self) -> bool {
        false
    }

    /// Whether it offers memory of the processor.
    fn takes_host(&self) -> bool {
        true
    }

    /// Whether it can work in this process: tried, not guessed.
    fn probe(&self) -> Result<(), TransferError>;

    /// What others need to know to reach this export. The first call may start what serves them.
    fn offer(&self, exports: &Arc<Exports>, export: &Arc<Export>) -> Result<Vec<u8>, TransferError>;

    /// This process belongs to this job of several hosts from now on.
    fn join(&self, _membership: &Membership) {}

    /// This is a forked copy of the process: who is connected to that must not be kept by it.
    fn forked(&self) {}

    /// Why it cannot reach the owner of a handle, as far as that can be told without trying.
    fn why_not(&self, _handle: &Handle, _section: &[u8]) -> Option<String> {
        None
    }

    /// Whether it has to be told of exports that are closed: it has been given their memory, and does not ask
    /// [`Exports::find`] for it.
    fn holds_memory(&self) -> bool {
        false
    }

    /// The export was closed: when this returns nobody reaches its memory by this transport. Blocks.
    fn withdraw(&self, _export: &Export) {}

    /// The process ends: gives up what is under way, if that must not outlive the program, and waits for it.
    fn end(&self) {}

    /// Reaches the owner of a handle. Blocks; an error of kind [`ErrorKind::Transport`](crate::ErrorKind::Transport) has others tried.
    fn connect(&self, handle: &Handle, section: &[u8], watch: &Watch) -> Result<Arc<dyn Peer>, TransferError>;
}

/// A process whose memory can be reached by one transport.
pub trait Peer: Send + Sync + Debug {
    /// Does all of it, in any order, and blocks meanwhile; `found` has a place for each operation, which atomic ones fill. After an error of kind [`ErrorKind::Transport`](crate::ErrorKind::Transport) the whole
    /// may be tried again, also by another transport.
    ///
    /// # Safety
    /// The local memory of all operations must be this process's, and writable where it is written to, throughout.
    unsafe fn run(&self, ops: &[Op], found: &mut [u64], watch: &Watch) -> Result<(), TransferError>;

    /// Whether the local memory may be a GPU's. If not, it is staged in memory of the processor.
    fn takes_cuda(&self) -> bool {
        false
    }

    /// Whether the owner is there, as far as can be told without waiting.
    fn is_alive(&self) -> bool;

    /// Whether a short operation is sooner done than handed to another thread.
    fn is_quick(&self) -> bool;
}
