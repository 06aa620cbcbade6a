//! What can go wrong around the protocol.

use mesh_proto::{FrameError, PortEnd, ProcAddr};
use rustix::io::Errno;
use thiserror::Error;

/// An error of the runtime.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The runtime has been shut down.
    #[error("the runtime has been shut down, and can no longer send anything")]
    Closed,
    /// This script has joined a job, and has no part in it any more.
    #[error(
        "this script is no longer part of its job: another process has taken the job over, or it has ended. Nothing that was sent \
         since then has been done. Call shutdown() before you use Mesh here again; `mesh jobs` lists the running jobs"
    )]
    JobLost,
    /// This process is a fork of the one that owns the runtime.
    #[error(
        "process {pid} is a fork of process {owner}, which already uses Mesh, and Mesh's threads and connections do not \
         survive a fork. Spawn after the fork instead of before it (with preforking servers: in their hook that runs \
         in each worker), or start a new interpreter rather than a fork"
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
    #[error("can no longer send to this port: {0}")]
    PortClosed(PortEnd),
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
    /// The kernel, or what filters system calls, gives no shared memory.
    #[error(
        "memfd_create: {0}. Mesh needs it for every process: use Linux 5.3 or later, with memfd_create allowed in the \
         container's seccomp profile; `mesh doctor` checks what else is needed"
    )]
    NoMemfd(Errno),
    /// The limit of open files is too low for so many procs.
    #[error(
        "cannot spawn that many processes: this needs {need} open files, and the hard limit is {allowed}. Raise that limit \
         (`ulimit -n`, LimitNOFILE= of a service, --ulimit nofile= of a container), or spawn fewer on this host"
    )]
    Descriptors {
        /// What the spawn takes, with what is open already.
        need: u64,
        /// The hard limit.
        allowed: u64,
    },
    /// This process, or the whole machine, may open no more files.
    #[error(
        "{what}: no more files can be opened: {whose}. Raise the limit (`ulimit -n`, LimitNOFILE= of a systemd unit, \
         --ulimit nofile= of a container), or close what is not needed"
    )]
    Files {
        /// What was tried.
        what: &'static str,
        /// Which limit that is.
        whose: String,
        /// Whether processes were to be made.
        spawning: bool,
    },
    /// Only the controller attaches hosts.
    #[error(
        "only the script that drives a job can attach hosts, not one of its workers. Attach them there, and pass the mesh"
    )]
    NotController,
    /// One job has one authority.
    #[error(
        "this job's hosts were attached with the credentials in {dir}; all hosts of one job must use the \
         same ones. To use others, release these hosts with `stop()`, or end the job with `shutdown()`"
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
    /// The fork server could not be started.
    #[error("cannot start the process that forks workers ({program}): {error}")]
    ForkServer {
        /// The interpreter.
        program: String,
        /// Why not.
        error: std::io::Error,
    },
}

/// What an error is, for programs: each becomes a class of exceptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// [`RuntimeError::Closed`] or [`RuntimeError::JobLost`].
    Closed,
    /// [`RuntimeError::Forked`].
    Forked,
    /// [`RuntimeError::NoSuchProc`].
    NoSuchProc,
    /// [`RuntimeError::PortClosed`].
    PortClosed,
    /// [`RuntimeError::Full`].
    Full,
    /// [`RuntimeError::Frame`].
    Frame,
    /// [`RuntimeError::Os`], or [`RuntimeError::Files`] where no process was to be made.
    Os,
    /// Processes cannot be made: [`RuntimeError::NoMemfd`], [`RuntimeError::Descriptors`], [`RuntimeError::Fork server`], or
    /// [`RuntimeError::Files`] where processes were to be made.
    Spawn,
    /// [`RuntimeError::NotController`].
    NotController,
    /// [`RuntimeError::Credentials`] or [`RuntimeError::OtherCredentials`].
    Credentials,
    /// [`RuntimeError::Address`].
    Address,
}

impl ErrorKind {
    /// Every kind.
    pub const ALL: [Self; 11] = [
        Self::Closed,
        Self::Forked,
        Self::NoSuchProc,
        Self::PortClosed,
        Self::Full,
        Self::Frame,
        Self::Os,
        Self::Spawn,
        Self::NotController,
        Self::Credentials,
        Self::Address,
    ];

    /// In one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Forked => "forked",
            Self::NoSuchProc => "no_such_proc",
            Self::PortClosed => "port_closed",
            Self::Full => "full",
            Self::Frame => "frame",
            Self::Os => "os",
            Self::Spawn => "spawn",
            Self::NotController => "not_controller",
            Self::Credentials => "credentials",
            Self::Address => "address",
        }
    }
}

impl RuntimeError {
    /// What it is, for programs.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Closed | Self::JobLost => ErrorKind::Closed,
            Self::Forked { .. } => ErrorKind::Forked,
            Self::NoSuchProc(_) => ErrorKind::NoSuchProc,
            Self::PortClosed(_) => ErrorKind::PortClosed,
            Self::Full { .. } => ErrorKind::Full,
            Self::Frame(_) => ErrorKind::Frame,
            Self::ForkServer { .. }
            | Self::NoMemfd(_)
            | Self::Descriptors { .. }
            | Self::Files { spawning: true, .. } => ErrorKind::Spawn,
            Self::Os { .. } | Self::Files { spawning: false, .. } => ErrorKind::Os,
            Self::NotController => ErrorKind::NotController,
            Self::OtherCredentials { .. } | Self::Credentials(_) => ErrorKind::Credentials,
            Self::Address(_) => ErrorKind::Address,
        }
    }

    pub(crate) fn thread(error: &std::io::Error) -> Self {
        Self::Os { what: "start a thread", errno: Errno::from_io_error(error).unwrap_or(Errno::AGAIN) }
    }

    pub(crate) fn os(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| match errno {
            Errno::MFILE | Errno::NFILE => Self::files(what, errno),
            errno => Self::Os { what, errno },
        }
    }

    pub(crate) fn no_memfd(errno: Errno) -> Self {
        match errno {
            Errno::MFILE | Errno::NFILE => Self::files("memfd_create", errno),
            errno => Self::NoMemfd(errno),
        }
    }

    /// There are too many open files, of this process or (`NFILE`) of all.
    fn files(what: &'static str, errno: Errno) -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let limit = limit.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string());
        let whose = match errno {
            Errno::NFILE => "the machine has reached its limit of open files (fs.file-max; ENFILE)".to_owned(),
            _ => format!("this process has reached its limit of open files ({limit}; RLIMIT_NOFILE, EMFILE)"),
        };
        Self::Files { what, whose, spawning: false }
    }

    /// The same error, of the making of processes.
    pub(crate) fn while_spawning(self) -> Self {
        match self {
            Self::Files { what, whose, .. } => Self::Files { what, whose, spawning: true },
            other => other,
        }
    }
}
