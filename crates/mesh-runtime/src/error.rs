//! What can go wrong around the protocol.

use mesh_proto::{FrameError, ProcAddr};
use rustix::io::Errno;
use thiserror::Error;

/// An error of the runtime.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The runtime has been shut down.
    #[error("the runtime has been shut down; nothing can be sent any more")]
    Closed,
    /// This process is a fork of the one that owns the runtime.
    #[error(
        "process {pid} is a fork of process {owner}, which owns this runtime; \
         threads and sockets do not survive a fork: start a process of its own, or use Mesh before forking only"
    )]
    Forked {
        /// The process that asked.
        pid: u32,
        /// The process that owns the runtime.
        owner: u32,
    },
    /// Nothing with this address was ever known here.
    #[error("no process {0} is known here")]
    NoSuchProc(ProcAddr),
    /// A port's receiver is gone, or has what it takes.
    #[error("nothing can be sent to this port any more: {0}")]
    PortClosed(String),
    /// The queue towards a process is full, and the sender asked not to wait.
    #[error("{queued} bytes are queued towards process {addr}, above its budget of {budget}")]
    Full {
        /// Who is slow.
        addr: ProcAddr,
        /// What waits for it.
        queued: usize,
        /// What may wait for it.
        budget: usize,
    },
    /// A peer sent what it may not.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The operating system said no.
    #[error("{what}: {errno}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What it said.
        errno: Errno,
    },
    /// Only the controller attaches hosts.
    #[error(
        "hosts are attached by the script that drives the job, not by a worker of it; do it there, and pass the mesh"
    )]
    NotController,
    /// One job has one authority.
    #[error(
        "this job's hosts were attached with the credentials in {dir}; all hosts of one job use the same ones, and \
         `shutdown()` ends the job, so that another may begin"
    )]
    OtherCredentials {
        /// Those that came first.
        dir: std::path::PathBuf,
    },
    /// Credentials cannot be used.
    #[error(transparent)]
    Credentials(#[from] crate::tls::CredentialError),
    /// An address cannot be had, or is none.
    #[error("{0}")]
    Address(String),
    /// The nursery could not be started.
    #[error("cannot start the process that forks workers ({program}): {error}")]
    Nursery {
        /// The interpreter.
        program: String,
        /// Why not.
        error: std::io::Error,
    },
}

impl RuntimeError {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Os { what, errno }
    }
}
