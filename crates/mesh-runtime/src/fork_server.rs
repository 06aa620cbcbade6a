//! The agent's end of a fork server: the process that forks workers.
//!
//! ```text
//! to it    op u8 | mesh u64 | rank u32 | host u32 | seat u32      (a spawn carries the worker's socket, stdout, stderr, config)
//! from it  op u8 | mesh u64 | rank u32 | pid u32 | status i32 | text
//! ```
//! One message is one packet of a sequenced-packet socket. What a fork server or a worker is told travels in files of memory,
//! so that it may be of any size, and no other user can read it, as the arguments of a command can be.
//!
//! The first fork server of a host may be its [`Standby`] instead of a new interpreter.

use crate::error::RuntimeError;
use crate::reactor::{Reactor, would_block};
use bytes::Bytes;
use mesh_proto::{Exit, HostNo, ProcAddr};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv,
    sendmsg, socketpair,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

const OP_FORK: u8 = 1;
const OP_KILL: u8 = 2;
const OP_EXEC: u8 = 3;
const OP_BECOME: u8 = 4;
const OP_FORKED: u8 = 11;
const OP_EXITED: u8 = 12;
const OP_FAILED: u8 = 13;
const OP_REFUSED: u8 = 14;
const OP_IMPORTING: u8 = 15;
const OP_IMPORTED: u8 = 16;
const HEAD: usize = 21;

/// How to start a fork server: the command of an interpreter, to which the numbers of three descriptors are appended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ForkServerSpec {
    /// The program and its arguments.
    pub argv: Vec<OsString>,
    /// Its whole environment.
    pub env: Vec<(OsString, OsString)>,
    /// What else it is told; opaque here.
    pub plan: Bytes,
}

/// What a fork server reports.
#[derive(Debug)]
pub(crate) enum Report {
    Forked(ProcAddr, u32),
    Exited(ProcAddr, Exit),
    Failed(ProcAddr, String),
    /// It can make no workers at all.
    Refused(String),
    /// It begins to import this module; until then orders wait.
    Importing(String),
    /// It follows orders again, and has imported these modules for its workers.
    Imported(String),
    /// It is gone itself.
    Closed,
}

/// What a worker is born with.
#[derive(Debug)]
pub(crate) struct WorkerFds {
    pub(crate) link: OwnedFd,
    /// Its stdout and stderr.
    pub(crate) out: OwnedFd,
    pub(crate) err: OwnedFd,
    /// What it is told, the same for all of its mesh.
    pub(crate) config: Arc<OwnedFd>,
}

/// A file of memory that says `what`, for good.
pub(crate) fn told(what: &[u8]) -> Result<OwnedFd, RuntimeError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("mesh-told", flags).map_err(RuntimeError::no_memfd)?;
    let mut at = 0;
    while at < what.len() {
        at += rustix::io::pwrite(&fd, &what[at..], at as u64).map_err(RuntimeError::os("write to shared memory"))?;
    }
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&fd, seals).map_err(RuntimeError::os("seal shared memory"))?;
    Ok(fd)
}

/// A copy of the agent, made before its first thread, that waits to become a fork server: it has imported already what an
/// interpreter of its own would import again. It decides itself whether it can stand for what is ordered; if not, it runs the
/// command that it is given.
#[derive(Debug)]
pub struct Standby {
    pid: Pid,
    socket: OwnedFd,
}

impl Standby {
    /// Takes a child of this process's main thread, and this end of its socket.
    #[must_use]
    pub fn new(pid: u32, socket: OwnedFd) -> Option<Self> {
        Some(Self { pid: Pid::from_raw(i32::try_from(pid).ok()?)?, socket })
    }

    /// Orders a fork server of it; fails if it is gone.
    fn order(&self, spec: &ForkServerSpec, board: BorrowedFd<'_>) -> Result<(), RuntimeError> {
        let mut words = u32::try_from(spec.argv.len()).unwrap_or(0).to_le_bytes().to_vec();
        for word in &spec.argv {
            words.extend_from_slice(word.as_bytes());
            words.push(0);
        }
        for (key, value) in &spec.env {
            words.extend_from_slice(key.as_bytes());
            words.push(b'=');
            words.extend_from_slice(value.as_bytes());
            words.push(0);
        }
        let (plan, words) = (told(&spec.plan)?, told(&words)?);
        let fds = [board, plan.as_fd(), words.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(&self.socket, &[IoSlice::new(&[OP_BECOME])], &mut ancillary, flags)
            .map(drop)
            .map_err(RuntimeError::os("sendmsg"))
    }
}

/// The standby of a host, until a job takes it.
pub type Spare = Arc<Mutex<Option<Standby>>>;

type Packet = (Vec<u8>, Option<WorkerFds>);

#[derive(Debug)]
pub(crate) struct ForkServer {
    socket: OwnedFd,
    pid: Pid,
    reaped: Mutex<bool>,
    waiting: Mutex<VecDeque<Packet>>,
    token: u64,
    host: HostNo,
}

impl ForkServer {
    /// Starts one. Must be called on a thread that lives as long as the fork server may: the kernel takes the end of the
    /// thread that made a child for the end of its parent.
    pub(crate) fn start(
        spec: &ForkServerSpec,
        board: BorrowedFd<'_>,
        token: u64,
        host: HostNo,
        standby: Option<Standby>,
    ) -> Result<Self, RuntimeError> {
        if let Some(standby) = standby {
            if standby.order(spec, board).is_ok() {
                let Standby { pid, socket } = standby;
                return Ok(Self { socket, pid, reaped: Mutex::default(), waiting: Mutex::default(), token, host });
            }
            // Somebody has killed it.
            reap(standby.pid);
        }
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
                .map_err(RuntimeError::os("socketpair"))?;
        let program = spec.argv.first().cloned().unwrap_or_default();
        // Duplicates without the close-on-exec flag would leak into whatever another thread starts meanwhile; so the
        // child itself clears the flag between fork and exec.
        // Not under the numbers of stdin, stdout and stderr, which are free where the script was started without them.
        let above = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(RuntimeError::os("fcntl"));
        let (theirs, board, plan) = (above(theirs.as_fd())?, above(board)?, above(told(&spec.plan)?.as_fd())?);
        let inherit = [theirs.as_raw_fd(), board.as_raw_fd(), plan.as_raw_fd()];
        let mut command = Command::new(&program);
        command
            .args(&spec.argv[1.min(spec.argv.len())..])
            .args(inherit.map(|fd| fd.to_string()))
            .env_clear()
            .envs(spec.env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null())
            // Its own process group: Ctrl-C is the script's affair.
            .process_group(0);
        // SAFETY: between fork and exec only async-signal-safe system calls are made, and nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
                for raw in inherit {
                    let fd = BorrowedFd::borrow_raw(raw);
                    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
                }
                Ok(())
            });
        }
        let child = command
            .spawn()
            .map_err(|error| RuntimeError::ForkServer { program: program.to_string_lossy().into_owned(), error })?;
        let pid = Pid::from_child(&child);
        Ok(Self { socket: ours, pid, reaped: Mutex::default(), waiting: Mutex::default(), token, host })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// A number that grows while it works: processor time, and pages that it has touched or read. `None` if it is gone.
    pub(crate) fn work(&self) -> Option<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).ok()?;
        let (_, fields) = stat.rsplit_once(')')?;
        let fields: Vec<u64> = fields.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
        // After the name: minor and major faults are the fields 7 and 9, processor times 11 and 12.
        [7, 9, 11, 12].into_iter().map(|at| fields.get(at).copied()).sum()
    }

    pub(crate) fn register(&self, reactor: &Reactor) -> Result<(), RuntimeError> {
        reactor.add(self.socket.as_fd(), self.token)
    }

    /// Asks for a worker that gets these descriptors.
    pub(crate) fn spawn(&self, reactor: &Reactor, exec: bool, addr: ProcAddr, seat: u32, worker: WorkerFds) {
        let op = if exec { OP_EXEC } else { OP_FORK };
        self.post(reactor, packet(op, addr, seat), Some(worker));
    }

    /// Kills a worker. The fork server does it, because it alone knows that the process was not reaped yet.
    pub(crate) fn kill(&self, reactor: &Reactor, addr: ProcAddr) {
        self.post(reactor, packet(OP_KILL, addr, 0), None);
    }

    fn post(&self, reactor: &Reactor, bytes: Vec<u8>, fds: Option<WorkerFds>) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push_back((bytes, fds));
        self.flush(reactor);
    }

    /// Sends what waits, as far as the socket takes it.
    pub(crate) fn flush(&self, reactor: &Reactor) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((bytes, worker)) = waiting.front() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let fds =
                worker.as_ref().map(|fds| [fds.link.as_fd(), fds.out.as_fd(), fds.err.as_fd(), fds.config.as_fd()]);
            if let Some(fds) = &fds {
                ancillary.push(SendAncillaryMessage::ScmRights(fds));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, flags) {
                Ok(_) => {
                    waiting.pop_front();
                }
                Err(errno) if would_block(errno) || errno == rustix::io::Errno::TOOMANYREFS => {
                    reactor.watch(self.socket.as_fd(), self.token, true);
                    return;
                }
                // It is gone: the reader finds that out and tells.
                Err(_) => {
                    waiting.clear();
                    break;
                }
            }
        }
        reactor.watch(self.socket.as_fd(), self.token, false);
    }

    /// What it has reported since.
    pub(crate) fn read(&self, mut take: impl FnMut(Report)) {
        let mut buffer = [0_u8; 16 * 1024];
        loop {
            match recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return take(Report::Closed),
                Ok((n, _)) => {
                    if let Some(report) = parse(&buffer[..n], self.host) {
                        take(report);
                    }
                }
                Err(errno) if would_block(errno) => return,
                // It ended before it had read all orders. The kernel says so once, ahead of what it sent before.
                Err(rustix::io::Errno::CONNRESET) => {}
                Err(_) => return take(Report::Closed),
            }
        }
    }

    /// Takes it down: its end of the socket closes, which makes it kill what is left and leave.
    pub(crate) fn close(&self, reactor: &Reactor) {
        reactor.remove(self.socket.as_fd());
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Waits for its end; kills it if that takes longer than `limit`.
    pub(crate) fn reap(&self, limit: std::time::Duration) {
        let mut reaped = self.reaped.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *reaped, true) {
            return;
        }
        if let Ok(fd) = rustix::process::pidfd_open(self.pid, rustix::process::PidfdFlags::empty()) {
            let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
            let timeout = rustix::event::Timespec {
                tv_sec: i64::try_from(limit.as_secs()).unwrap_or(1),
                tv_nsec: i64::from(limit.subsec_nanos()),
            };
            let _ = rustix::event::poll(&mut fds, Some(&timeout));
        }
        reap(self.pid);
    }
}

/// Ends a child that nobody has reaped yet, and forgets it.
fn reap(pid: Pid) {
    let _ = kill_process(pid, Signal::KILL);
    while matches!(waitpid(Some(pid), WaitOptions::empty()), Err(Errno::INTR)) {}
}

fn packet(op: u8, addr: ProcAddr, seat: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(21);
    out.push(op);
    out.extend_from_slice(&addr.mesh.to_le_bytes());
    out.extend_from_slice(&addr.rank.to_le_bytes());
    out.extend_from_slice(&addr.host.to_le_bytes());
    out.extend_from_slice(&seat.to_le_bytes());
    out
}

fn parse(raw: &[u8], host: HostNo) -> Option<Report> {
    let head = raw.get(..HEAD)?;
    let mesh = u64::from_le_bytes(head[1..9].try_into().ok()?);
    let rank = u32::from_le_bytes(head[9..13].try_into().ok()?);
    let pid = u32::from_le_bytes(head[13..17].try_into().ok()?);
    let status = i32::from_le_bytes(head[17..21].try_into().ok()?);
    let text = || String::from_utf8_lossy(&raw[HEAD..]).into_owned();
    let addr = ProcAddr { mesh, rank, host };
    Some(match head[0] {
        OP_FORKED => Report::Forked(addr, pid),
        OP_EXITED if status < 0 => Report::Exited(addr, Exit::Signal(-status)),
        OP_EXITED => Report::Exited(addr, Exit::Code(status)),
        OP_FAILED => Report::Failed(addr, text()),
        OP_REFUSED => Report::Refused(text()),
        OP_IMPORTING => Report::Importing(text()),
        OP_IMPORTED => Report::Imported(text()),
        _ => return None,
    })
}
