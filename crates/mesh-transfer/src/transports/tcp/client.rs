//! The client's end: asks an owner to read and write its memory.

use super::super::{Peer, Piece, pieces};
use super::member::Guard;
use super::remote::{Remote, is_silence};
use super::sockets::Sockets;
use super::stream::{Wire, bytes, iovec};
use super::wire::{PIECE, PROTOCOL, REQUEST, RESPONSE, Request, Response, Verb};
use crate::cores::{in_lanes, spare};
use crate::door::{Side, WELCOME};
use crate::error::{Closing, ErrorKind, TransferError, advice};
use crate::handle::{RealmId, Token};
use crate::lock;
use crate::operation::Op;
use crate::operation::Work;
use crate::realm::random;
use crate::watch::{Watch, timespec};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most requests under way on one connection.
const WINDOW: usize = 16;
/// From this length on, several connections share the work.
const SEVERAL: u64 = 32 << 20;
/// The same for another host, where each connection waits for the network.
const SEVERAL_REMOTE: u64 = 4 << 20;
/// More connections than this do not help.
const STREAMS: usize = 4;
/// The most connections kept for later.
const IDLE: usize = 4;
/// How long to wait for a connection and the owner's proof.
pub(super) const CONNECT: Duration = Duration::from_secs(5);
/// How long a process may take to end after it has closed its connections.
const DYING: Duration = Duration::from_millis(200);

/// Where an owner is.
#[derive(Debug)]
pub(super) enum Way {
    /// In this process's network.
    Here(SocketAddr),
    /// On another host, or equivalent to that.
    Remote(Remote),
}

/// An owner reached by TCP.
#[derive(Debug)]
pub(super) struct TcpPeer {
    way: Way,
    realm: RealmId,
    door: Token,
    pid: u32,
    /// The owner's process, if visible: a forked copy of it may keep its connections open.
    process: Option<OwnedFd>,
    idle: Mutex<Vec<Connection>>,
    sockets: Sockets,
}

#[derive(Debug)]
struct Connection {
    wire: Wire,
    /// The member at the other end, for an owner on another host.
    guard: Option<Guard>,
}

impl Connection {
    /// TCP-4
    fn check(&mut self) -> Result<(), TransferError> {
        let Some(guard) = &mut self.guard else { return Ok(()) };
        guard.check().map_err(|reason| {
            TransferError::transport(format!("the owner is no longer allowed to stay connected: {reason}"))
        })
    }
}

impl TcpPeer {
    /// `is_here` says that its pid means the same process here.
    pub(super) fn new(way: Way, (realm, door): (RealmId, Token), pid: u32, is_here: bool, sockets: &Sockets) -> Self {
        // Opened before the owner proves that it lives, so that it is not a later process with the same pid.
        let process = Pid::from_raw(pid.cast_signed()).filter(|_| is_here);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { way, realm, door, pid, process, idle: Mutex::default(), sockets: sockets.clone() }
    }

    /// Checks that the owner is there and is who it claims to be.
    pub(super) fn greet(&self, watch: &Watch) -> Result<(), TransferError> {
        let connection = self.dial(watch)?;
        self.put_back(connection);
        Ok(())
    }

    fn take(&self, watch: &Watch) -> Result<Connection, TransferError> {
        loop {
            let idle = lock(&self.idle).pop();
            let Some(mut connection) = idle else { return self.dial(watch) };
            if connection.wire.is_sound() && connection.check().is_ok() {
                return Ok(connection);
            }
        }
    }

    fn put_back(&self, connection: Connection) {
        let mut idle = lock(&self.idle);
        if idle.len() < IDLE {
            idle.push(connection);
        }
    }

    fn dial(&self, watch: &Watch) -> Result<Connection, TransferError> {
        watch.check()?;
        let limit = watch.left().unwrap_or(CONNECT).clamp(Duration::from_millis(1), CONNECT);
        let hello = Watch::new(Some(Instant::now() + limit));
        let dialed = match &self.way {
            Way::Here(addr) => self.dial_here(*addr, limit, watch, &hello),
            Way::Remote(remote) => self.dial_remote(remote, watch, &hello),
        };
        dialed.or_else(|error| {
            watch.check()?;
            Err(match error.kind {
                ErrorKind::TimedOut => TransferError::transport(format!(
                    "process {} did not answer within {limit:?}: it may be stopped, or out of descriptors{}",
                    self.pid,
                    if matches!(self.way, Way::Remote(_)) { ", or a firewall is in between" } else { "" }
                )),
                _ => error,
            })
        })
    }

    fn dial_here(
        &self,
        addr: SocketAddr,
        limit: Duration,
        watch: &Watch,
        hello: &Watch,
    ) -> Result<Connection, TransferError> {
        let stream = TcpStream::connect_timeout(&addr, limit).map_err(|error| self.failed(&error))?;
        stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true)).map_err(|error| self.failed(&error))?;
        let stream = Arc::new(stream);
        let mut connection = Connection { wire: Wire::plain(Arc::clone(&stream), &self.sockets), guard: None };
        let _followed = watch.follow(&stream)?;
        self.prove(&mut connection, hello).map(|()| connection)
    }

    /// Dials all its addresses at once, since nobody can tell which of them lead to it from here.
    fn dial_remote(&self, remote: &Remote, watch: &Watch, hello: &Watch) -> Result<Connection, TransferError> {
        let identity = remote.identity()?;
        let mut failed = Vec::new();
        for addrs in remote.rounds() {
            let mut dialing = remote.begin(addrs, watch, &mut failed)?;
            loop {
                let (addr, stream) = match dialing.next(hello, &mut failed) {
                    Ok(Some(next)) => next,
                    Ok(None) => break,
                    // The other addresses' errors say more.
                    Err(error) if error.kind == ErrorKind::TimedOut && !failed.is_empty() => {
                        failed.extend(dialing.unanswered());
                        return Err(remote.sum_up(self.pid, failed));
                    }
                    Err(error) => return Err(error),
                };
                let wait = |flags| self.wait(&stream, flags, hello);
                let shaken = remote.shake(&stream, &identity, &wait).map_err(|error| match error {
                    Ok(error) => self.failed(&error),
                    Err(reason) => TransferError::transport(format!("{addr} is not authenticated: {reason}")),
                });
                let proven = shaken.and_then(|(halves, guard)| {
                    let wire = Wire::sealed(Arc::clone(&stream), halves, &self.sockets);
                    let mut connection = Connection { wire, guard: Some(guard) };
                    self.prove(&mut connection, hello).map(|()| connection)
                });
                match proven {
                    Ok(connection) => {
                        remote.leads(addr);
                        return Ok(connection);
                    }
                    Err(error) if matches!(error.kind, ErrorKind::TimedOut | ErrorKind::Cancelled) => {
                        return Err(error);
                    }
                    Err(error) => failed.push((addr, error)),
                }
            }
        }
        Err(remote.sum_up(self.pid, failed))
    }

    /// TCP-1
    fn prove(&self, connection: &mut Connection, watch: &Watch) -> Result<(), TransferError> {
        let wire = &mut connection.wire;
        let stream = Arc::clone(wire.socket());
        let wait = |flags| self.wait(&stream, flags, watch);
        let client = random()?;
        // SAFETY: it lives until the end of the statement.
        unsafe { wire.send(&mut [bytes(&PROTOCOL.hello(&client, &self.realm))], &wait) }
            .map_err(|error| self.failed(&error))?;
        let mut welcome = [0; WELCOME];
        wire.exactly(&mut welcome, &wait).map_err(|error| self.failed(&error))?;
        let talk = PROTOCOL.recognise(&welcome, self.door, self.realm, client).ok_or_else(|| self.ended())?;
        let mine = talk.prove(Side::Client);
        // SAFETY: it lives in this frame.
        unsafe { wire.send(&mut [bytes(&mine)], &wait) }.map_err(|error| self.failed(&error))
    }

    /// Waits for the socket, the owner's end, the deadline or the caller, whichever comes first.
    fn wait(&self, stream: &TcpStream, flags: PollFlags, watch: &Watch) -> io::Result<()> {
        watch.check().map_err(io::Error::other)?;
        let limit = watch.left().map(timespec);
        let mut list = vec![PollFd::new(stream, flags)];
        if let Some(process) = &self.process {
            list.push(PollFd::new(process, PollFlags::IN));
        }
        match poll(&mut list, limit.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => watch.check().map_err(io::Error::other),
            Ok(_) if list[0].revents().is_empty() => Err(io::Error::other(self.ended())),
            Ok(_) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Whether the owner has ended, or ends within that time.
    fn has_ended(&self, wait: Duration) -> bool {
        let end = Instant::now() + wait;
        let closes = |what: &dyn AsFd| {
            let left = end.saturating_duration_since(Instant::now());
            poll(&mut [PollFd::new(&what.as_fd(), PollFlags::IN)], Some(&timespec(left))).is_ok_and(|n| n > 0)
        };
        if let Some(process) = &self.process {
            return closes(process);
        }
        let addr = match &self.way {
            Way::Here(addr) => *addr,
            Way::Remote(remote) => match remote.known() {
                Some(addr) => addr,
                None => return false,
            },
        };
        loop {
            match TcpStream::connect_timeout(&addr, CONNECT) {
                Err(error) => return error.kind() == io::ErrorKind::ConnectionRefused,
                // A living server waits for a stranger's message; one that is ending does not.
                Ok(stream) if closes(&stream) && Instant::now() < end => {}
                Ok(_) => return false,
            }
        }
    }

    fn ended(&self) -> TransferError {
        TransferError::ended(self.pid)
    }

    /// What a connection's error means; asks whether the owner lives where that matters.
    fn failed(&self, error: &io::Error) -> TransferError {
        if let Some(said) = error.get_ref().and_then(|inner| inner.downcast_ref::<TransferError>()) {
            return said.clone();
        }
        match error.kind() {
            io::ErrorKind::ConnectionRefused => self.ended(),
            _ if is_silence(error) => {
                if let Way::Remote(remote) = &self.way {
                    remote.fell_silent();
                }
                TransferError::transport(format!(
                    "the host of process {} no longer responds ({error}): the host or the network is down, or the \
                     process is stopped",
                    self.pid
                ))
            }
            // A process that ends closes its connections a moment before it has ended.
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof
                if self.has_ended(DYING) =>
            {
                self.ended()
            }
            _ => {
                let advice = advice(error.raw_os_error());
                TransferError::transport(format!("the connection to process {} failed: {error}{advice}", self.pid))
            }
        }
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn stream(
        &self,
        ops: &[Op],
        next: &(dyn Fn() -> Option<Piece> + Sync),
        found: &Mutex<Vec<(usize, u64)>>,
        watch: &Watch,
    ) -> Result<(), TransferError> {
        let mut connection = self.take(watch)?;
        let stream = Arc::clone(connection.wire.socket());
        // SAFETY: as the caller vouches.
        let done = watch
            .follow(&stream)
            .and_then(|_followed| unsafe { self.exchange(&mut connection, &stream, ops, next, found, watch) });
        if done.is_ok() {
            self.put_back(connection);
        }
        done
    }

    /// Sends requests and takes answers, `WINDOW` ahead. After an error, the connection is in the middle of something
    /// and cannot be used again.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn exchange(
        &self,
        connection: &mut Connection,
        stream: &TcpStream,
        ops: &[Op],
        next: &(dyn Fn() -> Option<Piece> + Sync),
        found: &Mutex<Vec<(usize, u64)>>,
        watch: &Watch,
    ) -> Result<(), TransferError> {
        let wait = |flags| self.wait(stream, flags, watch);
        let failed = |error: io::Error| self.failed(&error);
        let mut asked: VecDeque<Piece> = VecDeque::new();
        let mut ahead = next();
        let mut refused = None;
        let mut heads: Vec<[u8; REQUEST]> = Vec::with_capacity(WINDOW);
        loop {
            connection.check()?;
            let wire = &mut connection.wire;
            heads.clear();
            let mut is_held = false;
            while let Some(piece) = ahead
                && asked.len() < WINDOW
                && refused.is_none()
            {
                let op = &ops[piece.op];
                let is_write = matches!(op.work, Work::Write { .. });
                // Reads under way must not fill both directions while neither end reads.
                if is_write && asked.iter().any(|piece| matches!(ops[piece.op].work, Work::Read { .. })) {
                    is_held = true;
                    break;
                }
                heads.push(request(op, piece).encode());
                asked.push_back(piece);
                ahead = next();
                if let Work::Write { local, .. } = &op.work {
                    let mut list: Vec<_> = heads.iter().map(|head| bytes(head)).collect();
                    list.extend(local.window(piece.at, piece.len).map(iovec));
                    // SAFETY: the heads live in this frame; the caller vouches for the rest.
                    unsafe { wire.send(&mut list, &wait) }.map_err(failed)?;
                    heads.clear();
                }
            }
            if !heads.is_empty() {
                let mut list: Vec<_> = heads.iter().map(|head| bytes(head)).collect();
                // SAFETY: the heads live in this frame.
                unsafe { wire.send(&mut list, &wait) }.map_err(failed)?;
            }
            // Half of the window at once, so that requests go out together.
            let rest = if ahead.is_some() && refused.is_none() && !is_held { WINDOW / 2 } else { 0 };
            if asked.is_empty() {
                return refused.map_or(Ok(()), Err);
            }
            while asked.len() > rest {
                let Some(piece) = asked.pop_front() else { break };
                let mut head = [0; RESPONSE];
                wire.exactly(&mut head, &wait).map_err(failed)?;
                let response = Response::decode(&head)?;
                if let Some(kind) = response.refused {
                    refused = Some(said(kind, response.found));
                    continue;
                }
                match &ops[piece.op].work {
                    // SAFETY: the caller's memory, writable.
                    Work::Read { local, .. } => unsafe {
                        wire.pieces(local.window(piece.at, piece.len), &wait).map_err(failed)?;
                    },
                    Work::Write { .. } => {}
                    _ => {
                        lock(found).push((piece.op, response.found));
                    }
                }
            }
        }
    }
}

fn request(op: &Op, piece: Piece) -> Request {
    let (offset, _) = op.work.span();
    let (first, second) = match op.work {
        Work::FetchAdd { value, .. } => (value, 0),
        Work::CompareAndSwap { expected, desired, .. } => (expected, desired),
        _ => (0, 0),
    };
    Request {
        verb: Verb::of(&op.work),
        slot: op.handle.slot,
        generation: op.handle.generation,
        token: op.handle.token,
        offset: op.handle.start + offset + piece.at,
        len: piece.len,
        first,
        second,
    }
}

fn said(kind: ErrorKind, found: u64) -> TransferError {
    let message = match kind {
        ErrorKind::Gone => return TransferError::closed(Closing::of_code(found)),
        ErrorKind::Refused => "the owner refuses: the handle is not its own, or names more than it offers",
        ErrorKind::Transport => "the driver of the owner's GPU has refused to copy the memory",
        _ => {
            "the owner cannot do this there: the 8 bytes of an atomic operation must lie together at a multiple of 8, and in memory \
             of the processor"
        }
    };
    TransferError::new(kind, message)
}

impl Peer for TcpPeer {
    unsafe fn run(&self, ops: &[Op], found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        // SAFETY: as the caller vouches.
        match unsafe { self.run_once(ops, found, watch) } {
            // The network may have broken the connection to a living owner: between hosts, another one is worth a try.
            Err(error)
                if error.kind == ErrorKind::Transport
                    && matches!(&self.way, Way::Remote(remote) if remote.answers()) =>
            {
                lock(&self.idle).clear();
                // SAFETY: as above.
                unsafe { self.run_once(ops, found, watch) }
            }
            done => done,
        }
    }

    fn is_alive(&self) -> bool {
        !self.has_ended(Duration::ZERO)
    }

    fn is_quick(&self) -> bool {
        false
    }
}

impl TcpPeer {
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_once(&self, ops: &[Op], found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        if let Way::Remote(remote) = &self.way {
            remote.begins_again();
        }
        let pieces = pieces(ops, PIECE);
        let total: u64 = pieces.iter().map(|piece| piece.len).sum();
        let streams = match &self.way {
            Way::Remote(_) => usize::try_from(total / SEVERAL_REMOTE).unwrap_or(STREAMS).clamp(1, STREAMS),
            Way::Here(_) if total < SEVERAL => 1,
            Way::Here(_) => (spare() / 2 + 1).min(STREAMS),
        };
        let values = Mutex::default();
        let (taken, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let next = || {
            if failed.load(Ordering::Relaxed) {
                return None;
            }
            pieces.get(taken.fetch_add(1, Ordering::Relaxed)).copied()
        };
        let one = || {
            // SAFETY: as the caller vouches.
            let done = unsafe { self.stream(ops, &next, &values, watch) };
            if done.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            done
        };
        let done: Result<(), TransferError> = in_lanes(&vec![(); streams], |()| one()).into_iter().collect();
        // Connections often end because the operation was cancelled.
        let done = done.or_else(|error| watch.check().and(Err(error)));
        let values: Vec<(usize, u64)> = values.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (op, value) in values {
            found[op] = value;
        }
        match done {
            Err(error) if error.kind == ErrorKind::Transport && taken.load(Ordering::Relaxed) > 0 => {
                Err(self.after_a_loss(error, ops, watch))
            }
            done => done,
        }
    }

    /// What a lost connection means: the owner may have ended, and an atomic operation may have been performed.
    fn after_a_loss(&self, error: TransferError, ops: &[Op], watch: &Watch) -> TransferError {
        let is_silent = matches!(&self.way, Way::Remote(remote) if remote.is_silent());
        // A silent host would not answer now either.
        let again = if is_silent { Err(error.clone()) } else { self.dial(watch) };
        let error = match again {
            Ok(connection) => {
                if let Way::Remote(remote) = &self.way {
                    remote.answered();
                }
                self.put_back(connection);
                error
            }
            // The reason why it cannot be made again is also why it was lost.
            Err(why) if matches!(why.kind, ErrorKind::Gone | ErrorKind::Transport) => why,
            Err(_) => error,
        };
        if error.kind != ErrorKind::Gone && ops.iter().any(|op| op.work.is_atomic()) {
            return TransferError::unknown(&error);
        }
        error
    }
}
