//! Why something ended, came back or was closed, as closed sets of types. Programs decide by the type; the text for
//! people is made from it where it is shown.
//!
//! A code that is unknown here (from a newer peer) becomes the type's `Unknown`, which says so.

use crate::ProcAddr;
use crate::codec::{Reader, Writer};
use crate::hosts::Fate;
use std::fmt;
use std::time::Duration;

/// Why a proc ended, beyond its exit status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EndReason {
    /// Its exit status says everything.
    #[default]
    Unstated,
    /// It could not be made: what the operating system or the fork server said.
    NotMade(String),
    /// It did not say hello within this time, in which its fork server may still have been importing a module.
    Late(Duration, String),
    /// The fork server with this pid ended, and with it all workers that it had made.
    ForkServerEnded(u32),
    /// Its bootstrap or the start of an extension failed: which one, and the exception, in one line.
    Bootstrap(String),
    /// It was killed, but its status was not reported in time.
    Unreaped,
    /// Its connection closed after this many bytes of an incomplete message.
    ConnectionClosed(u64),
    /// Its connection failed with this error number.
    ConnectionBroke(i32),
    /// It sent what no Mesh process sends.
    Protocol(String),
    /// It ended so long ago that nothing else is known of it.
    LongAgo,
    /// It was never known to its agent.
    NeverKnown,
    /// No such proc is known on the host that the address names.
    NoSuchProc(ProcAddr),
    /// The runtime of the asking process has been shut down.
    Shutdown,
    /// It ended with its whole host.
    Host(HostEnd),
    /// The asking script is no longer part of its job: another script has taken the job over, or it has ended.
    JobLost,
    /// A reason with this code, unknown here.
    Unknown(u8),
}

impl EndReason {
    /// Whether only the exit status is known.
    #[must_use]
    pub fn is_unstated(&self) -> bool {
        *self == Self::Unstated
    }

    pub(crate) fn write(&self, out: Writer) -> Writer {
        match self {
            Self::Unstated => out.byte(0),
            Self::NotMade(why) => out.byte(1).text(why),
            Self::Late(within, module) => out.byte(2).time(*within).text(module),
            Self::ForkServerEnded(pid) => out.byte(3).small(*pid),
            Self::Bootstrap(raised) => out.byte(4).text(raised),
            Self::Unreaped => out.byte(5),
            Self::ConnectionClosed(unread) => out.byte(6).number(*unread),
            Self::ConnectionBroke(errno) => out.byte(7).signed(*errno),
            Self::Protocol(why) => out.byte(8).text(why),
            Self::LongAgo => out.byte(9),
            Self::NeverKnown => out.byte(10),
            Self::NoSuchProc(addr) => out.byte(11).addr(*addr),
            Self::Shutdown => out.byte(12),
            Self::Host(end) => end.write(out.byte(13)),
            Self::JobLost => out.byte(14),
            Self::Unknown(code) => out.byte(*code),
        }
    }

    pub(crate) fn read(raw: &mut Reader<'_>) -> Option<Self> {
        Some(match raw.byte()? {
            0 => Self::Unstated,
            1 => Self::NotMade(raw.text()?),
            2 => Self::Late(raw.time()?, raw.text()?),
            3 => Self::ForkServerEnded(raw.small()?),
            4 => Self::Bootstrap(raw.text()?),
            5 => Self::Unreaped,
            6 => Self::ConnectionClosed(raw.number()?),
            7 => Self::ConnectionBroke(raw.signed()?),
            8 => Self::Protocol(raw.text()?),
            9 => Self::LongAgo,
            10 => Self::NeverKnown,
            11 => Self::NoSuchProc(raw.addr()?),
            12 => Self::Shutdown,
            13 => Self::Host(HostEnd::read(raw)?),
            14 => Self::JobLost,
            other => Self::Unknown(other),
        })
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unstated => Ok(()),
            Self::NotMade(why) | Self::Bootstrap(why) => f.write_str(why),
            Self::Late(within, module) => {
                write!(f, "it has not reported within {} s of its spawn", within.as_secs_f64())?;
                if !module.is_empty() {
                    write!(f, ": the process that forks workers is still importing {module:?}")?;
                }
                f.write_str("; if its host is only slow, raise the setting spawn_timeout (MESH_SPAWN_TIMEOUT)")
            }
            Self::ForkServerEnded(pid) => {
                write!(f, "the process that forks workers (pid {pid}) has ended, and with it its workers")
            }
            Self::Unreaped => f.write_str("it was killed, and nobody has reported its end"),
            Self::ConnectionClosed(0) => f.write_str("its connection closed"),
            Self::ConnectionClosed(unread) => {
                write!(f, "its connection closed within a message ({unread} bytes of it had arrived)")
            }
            Self::ConnectionBroke(errno) => {
                write!(f, "its connection broke: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Self::Protocol(why) => write!(f, "it broke the protocol: {why}"),
            Self::LongAgo => f.write_str("it ended long ago"),
            Self::NeverKnown => f.write_str("it was never known here"),
            Self::NoSuchProc(addr) => write!(f, "no process {addr} is known on this host"),
            Self::Shutdown => f.write_str("the runtime has been shut down"),
            Self::Host(end) => end.fmt(f),
            Self::JobLost => f.write_str("this script is no longer part of its job"),
            Self::Unknown(code) => unknown(f, *code),
        }
    }
}

fn unknown(f: &mut fmt::Formatter<'_>, code: u8) -> fmt::Result {
    write!(f, "for a reason that this version of Mesh does not know (code {code})")
}

/// Why a host is no longer part of the job, as everybody is told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostEnd {
    /// The reason, for programs.
    pub fate: Fate,
    /// What people call the host; empty if it has no name.
    pub label: String,
    /// Details for people.
    pub why: String,
}

impl HostEnd {
    /// What its own log is to say of it. A host that was let go in order is not dead.
    pub(crate) fn verdict(&self) -> String {
        if self.fate == Fate::Released { self.to_string() } else { format!("declared dead: {self}") }
    }

    pub(crate) fn write(&self, out: Writer) -> Writer {
        out.byte(self.fate.code()).text(&self.label).text(&self.why)
    }

    pub(crate) fn read(raw: &mut Reader<'_>) -> Option<Self> {
        Some(Self { fate: Fate::of(raw.byte()?.into()), label: raw.text()?, why: raw.text()? })
    }
}

impl fmt::Display for HostEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fate, label, why } = self;
        match fate {
            _ if label.is_empty() => f.write_str(why),
            Fate::Released => write!(f, "its host ({label}) was let go: {why}"),
            Fate::NotAttached | Fate::NotAuthenticated => write!(f, "its host ({label}) cannot be used: {why}"),
            _ => write!(f, "its host ({label}) is dead: {why}"),
        }
    }
}

/// The kind of a proc's end: one word for programs, derived from its exit status and its [`EndReason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndKind {
    /// It exited with a status.
    Exited,
    /// A signal killed it.
    Killed,
    /// The kernel killed it because memory was short.
    OutOfMemory,
    /// It could not be made.
    SpawnFailed,
    /// It did not say hello in time.
    SpawnTimeout,
    /// Its bootstrap, or the start of an extension, raised.
    BootstrapFailed,
    /// The process that forked it ended.
    ForkServerDied,
    /// Its connection ended, and its exit status is not known.
    ConnectionLost,
    /// Its whole host is dead.
    HostDead,
    /// Its host was lost and could not be reached again.
    HostUnreachable,
    /// Its host could never be attached.
    HostNotAttached,
    /// Its host was never part of the job, because one side does not accept the other's credentials.
    HostNotAuthenticated,
    /// Its host is not part of the job, or not yet.
    HostAbsent,
    /// Nothing else is known.
    Unknown,
}

impl EndKind {
    /// Every kind.
    pub const ALL: [Self; 14] = [
        Self::Exited,
        Self::Killed,
        Self::OutOfMemory,
        Self::SpawnFailed,
        Self::SpawnTimeout,
        Self::BootstrapFailed,
        Self::ForkServerDied,
        Self::ConnectionLost,
        Self::HostDead,
        Self::HostUnreachable,
        Self::HostNotAttached,
        Self::HostNotAuthenticated,
        Self::HostAbsent,
        Self::Unknown,
    ];

    /// The kind as one word, for programs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Exited => "exited",
            Self::Killed => "killed",
            Self::OutOfMemory => "out_of_memory",
            Self::SpawnFailed => "spawn_failed",
            Self::SpawnTimeout => "spawn_timeout",
            Self::BootstrapFailed => "bootstrap_failed",
            Self::ForkServerDied => "fork_server_died",
            Self::ConnectionLost => "connection_lost",
            Self::HostDead => "host_dead",
            Self::HostUnreachable => "host_unreachable",
            Self::HostNotAttached => "host_not_attached",
            Self::HostNotAuthenticated => "host_not_authenticated",
            Self::HostAbsent => "host_absent",
            Self::Unknown => "unknown",
        }
    }
}

impl From<Fate> for EndKind {
    fn from(fate: Fate) -> Self {
        match fate {
            Fate::Unreachable => Self::HostUnreachable,
            Fate::NotAttached => Self::HostNotAttached,
            Fate::NotAuthenticated => Self::HostNotAuthenticated,
            Fate::Absent => Self::HostAbsent,
            Fate::Other
            | Fate::Silent
            | Fate::Refused
            | Fate::Restarted
            | Fate::Left
            | Fate::Expelled
            | Fate::Released => Self::HostDead,
        }
    }
}

/// Why a message came back to its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undelivered {
    /// The actor has stopped, or never existed.
    NoActor,
    /// The actor was not spawned while the message waited for it.
    NeverSpawned,
    /// The actor stopped while the message waited in its mailbox.
    ActorStopped,
    /// The receiving process has ended.
    Ended(EndReason),
    /// The endpoint let go of the call's port.
    PortDropped,
    /// All processes that were handed the call's port let go of it.
    PortHandedOn,
    /// The receiver does not know this question.
    UnknownQuestion,
    /// The receiver could not start a thread to answer on.
    NoThread,
    /// The receiver is a host's agent, which runs no extensions.
    NoExtensions,
    /// The caller already held as many unlooked-at replies as it may; this many bytes were dropped.
    NoRoom(u64),
    /// A task that has not begun and will not: its caller took it back, or it may not begin now.
    NotBegun,
    /// A reason with this code, unknown here.
    Unknown(u8),
}

impl Undelivered {
    /// Whether this is the end of a call's port rather than the fate of a message.
    #[must_use]
    pub fn is_end_of_port(&self) -> bool {
        matches!(self, Self::PortDropped | Self::PortHandedOn)
    }

    /// The reason as one word, for programs.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::NoActor => "no_actor",
            Self::NeverSpawned => "never_spawned",
            Self::ActorStopped => "actor_stopped",
            Self::Ended(_) => "ended",
            Self::PortDropped => "port_dropped",
            Self::PortHandedOn => "port_handed_on",
            Self::UnknownQuestion => "unknown_question",
            Self::NoThread => "no_thread",
            Self::NoExtensions => "no_extensions",
            Self::NoRoom(_) => "no_room",
            Self::NotBegun => "not_begun",
            Self::Unknown(_) => "unknown",
        }
    }

    pub(crate) fn write(&self, out: Writer) -> Writer {
        match self {
            Self::NoActor => out.byte(0),
            Self::NeverSpawned => out.byte(1),
            Self::ActorStopped => out.byte(2),
            Self::Ended(reason) => reason.write(out.byte(3)),
            Self::PortDropped => out.byte(4),
            Self::PortHandedOn => out.byte(5),
            Self::UnknownQuestion => out.byte(6),
            Self::NoThread => out.byte(7),
            Self::NoExtensions => out.byte(8),
            Self::NoRoom(bytes) => out.byte(9).number(*bytes),
            Self::NotBegun => out.byte(10),
            Self::Unknown(code) => out.byte(*code),
        }
    }

    pub(crate) fn read(raw: &mut Reader<'_>) -> Option<Self> {
        Some(match raw.byte()? {
            0 => Self::NoActor,
            1 => Self::NeverSpawned,
            2 => Self::ActorStopped,
            3 => Self::Ended(EndReason::read(raw)?),
            4 => Self::PortDropped,
            5 => Self::PortHandedOn,
            6 => Self::UnknownQuestion,
            7 => Self::NoThread,
            8 => Self::NoExtensions,
            9 => Self::NoRoom(raw.number()?),
            10 => Self::NotBegun,
            other => Self::Unknown(other),
        })
    }
}

impl fmt::Display for Undelivered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoActor => "the actor has stopped, or was never spawned there",
            Self::NeverSpawned => "the actor was never spawned there",
            Self::ActorStopped => "the actor stopped before it came to this message",
            Self::Ended(reason) => return reason.fmt(f),
            Self::PortDropped => "it let go of the port of the call without an answer",
            Self::PortHandedOn => "all that were handed the port of the call let go of it without an answer",
            Self::UnknownQuestion => "it does not know this question",
            Self::NoThread => "no thread could be started to look",
            Self::NoExtensions => "the agent of a host runs no extensions",
            Self::NotBegun => "it was taken back before it had begun",
            Self::NoRoom(bytes) => {
                return write!(f, "its reply of {bytes} bytes was dropped, as the caller had no room for it");
            }
            Self::Unknown(code) => return unknown(f, *code),
        })
    }
}

/// Why nothing more can be sent to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortEnd {
    /// Its receiver is closed.
    Closed,
    /// Its receiver was closed while a message waited there.
    ClosedBefore,
    /// The receiving process has ended.
    ReceiverEnded,
    /// The port is a call's, and the caller no longer waits.
    CallerGone,
    /// It takes one message, and has received it.
    Used,
    /// The port is a call's, which has been answered.
    Answered,
    /// A reason with this code, unknown here.
    Unknown(u8),
}

impl PortEnd {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Closed => 0,
            Self::ClosedBefore => 1,
            Self::ReceiverEnded => 2,
            Self::CallerGone => 3,
            Self::Used => 4,
            Self::Answered => 5,
            Self::Unknown(code) => code,
        }
    }

    pub(crate) fn of(code: u8) -> Self {
        match code {
            0 => Self::Closed,
            1 => Self::ClosedBefore,
            2 => Self::ReceiverEnded,
            3 => Self::CallerGone,
            4 => Self::Used,
            5 => Self::Answered,
            other => Self::Unknown(other),
        }
    }

    /// The reason as one word, for programs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::ClosedBefore => "closed_before",
            Self::ReceiverEnded => "receiver_ended",
            Self::CallerGone => "caller_gone",
            Self::Used => "used",
            Self::Answered => "answered",
            Self::Unknown(_) => "unknown",
        }
    }
}

impl fmt::Display for PortEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "its receiver is closed",
            Self::ClosedBefore => "its receiver was closed before it came to a message",
            Self::ReceiverEnded => "the process that received there has ended",
            Self::CallerGone => "the caller no longer waits for this call",
            Self::Used => "it takes one message, and has had it",
            Self::Answered => "the call has been answered already",
            Self::Unknown(code) => return unknown(f, *code),
        })
    }
}
