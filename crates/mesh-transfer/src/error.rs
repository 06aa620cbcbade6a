//! Errors of transfers, and what they mean to the caller.

use std::fmt;

/// What an error means to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// A wrong argument: out of bounds, not aligned, not writable, not a handle.
    Invalid,
    /// The memory is no longer offered: dropped, or its owner has ended or been restarted.
    Gone,
    /// The owner does not recognise the handle.
    Refused,
    /// The deadline has passed.
    TimedOut,
    /// The caller cancelled the transfer.
    Cancelled,
    /// This transport cannot do it now; another one, or this one later, may.
    Transport,
    /// The connection ended after an atomic operation was sent: nobody knows whether it was carried out.
    Unknown,
    /// No transport that both ends share can do it.
    NoTransport,
    /// In a forked child, which cannot transfer.
    Forked,
}

impl ErrorKind {
    /// All kinds, for tables.
    pub const ALL: [Self; 9] = [
        Self::Invalid,
        Self::Gone,
        Self::Refused,
        Self::TimedOut,
        Self::Cancelled,
        Self::Transport,
        Self::Unknown,
        Self::NoTransport,
        Self::Forked,
    ];

    /// The name of the kind.
    pub fn word(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Gone => "gone",
            Self::Refused => "refused",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Transport => "transport",
            Self::Unknown => "unknown",
            Self::NoTransport => "no_transport",
            Self::Forked => "forked",
        }
    }
}

/// Why memory is no longer offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// Its owner has dropped it.
    Dropped = 2,
    /// Its owner has let go of it.
    Freed = 3,
}

impl Closing {
    pub(crate) const ALL: [Self; 2] = [Self::Dropped, Self::Freed];

    /// As a number for other processes, which is neither 0 nor 1.
    pub(crate) fn code(self) -> u64 {
        self as u64
    }

    /// Of a number that another process has sent.
    pub(crate) fn of_code(code: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|each| each.code() == code)
    }
}

/// A transfer that failed, as a whole or in part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TransferError {
    /// What the error means to the caller.
    pub kind: ErrorKind,
    /// What happened to whom, and what to do about it.
    pub message: String,
}

impl TransferError {
    /// An error of this kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Refused, message)
    }

    /// The process that offered the memory has ended.
    pub(crate) fn ended(pid: u32) -> Self {
        Self::gone(format!("process {pid}, which owned the buffer, has ended"))
    }

    /// The connection failed after an atomic operation was sent.
    pub(crate) fn unknown(error: &Self) -> Self {
        Self::new(ErrorKind::Unknown, format!("{error}; nobody knows whether the atomic operation was carried out"))
    }

    pub(crate) fn gone(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Gone, message)
    }

    /// The export is no longer offered, for this reason if it is known.
    pub(crate) fn closed(closing: Option<Closing>) -> Self {
        Self::gone(match closing {
            Some(Closing::Dropped) => "the buffer was dropped by its owner",
            Some(Closing::Freed) => {
                "the owner has let go of the buffer and of the array, tensor or bytes that it was made of: keep one of them \
                 there, for example in self"
            }
            None => "the buffer was dropped by its owner, or the owner has let go of its memory",
        })
    }

    pub(crate) fn transport(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Transport, message)
    }

    /// A failed system call, as a failure of the transport.
    pub(crate) fn os(what: &'static str) -> impl Fn(rustix::io::Errno) -> Self {
        move |errno| Self::transport(format!("cannot {what}: {errno}{}", advice(Some(errno.raw_os_error()))))
    }
}

/// What to do when the system runs out of something; nothing for other errors.
pub(crate) fn advice(code: Option<i32>) -> &'static str {
    match code {
        Some(libc::EMFILE) => ". Raise the limit of open files of this process (ulimit -n), or close some.",
        Some(libc::ENFILE) => ". Raise the limit of open files of this machine (sysctl fs.file-max).",
        Some(libc::ENOMEM) => ". Free memory, or raise what this process may have (ulimit -v, ulimit -l, its cgroup).",
        _ => "",
    }
}

/// A number of bytes, for people.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1 byte"),
            n => write!(f, "{n} bytes"),
        }
    }
}
