//! The other end: asks an owner to read and write its memory.

use super::super::{Op, Peer, Work};
use super::stream::{Incoming, bytes, iovec, send};
use super::wire::{MAGIC, PIECE, REQUEST, RESPONSE, Request, Response, Side, Verb, WELCOME, prove, proves};
use crate::error::{ErrorKind, TransferError, advice};
use crate::handle::{RealmId, Token};
use crate::realm::random;
use crate::watch::Watch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Requests that are under way on one connection.
const WINDOW: usize = 16;
/// From this length on, several connections share the work.
const SEVERAL: u64 = 32 << 20;
/// More than this do not help.
const STREAMS: usize = 4;
/// Connections that are kept for later.
const IDLE: usize = 4;
/// How long to wait for a connection and the owner's proof.
const CONNECT: Duration = Duration::from_secs(5);

/// How long a process may take to end once it has closed its connections.
const DYING: Duration = Duration::from_millis(200);

/// An owner that is reached by TCP.
#[derive(Debug)]
pub(super) struct TcpPeer {
    addr: SocketAddr,
    realm: RealmId,
    door: Token,
    pid: u32,
    /// The owner as a process, where it can be seen: a forked copy of it may keep its connections open.
    process: Option<OwnedFd>,
    idle: Mutex<Vec<Connection>>,
}

#[derive(Debug)]
struct Connection {
    stream: Arc<TcpStream>,
    incoming: Incoming,
}

/// Part of an operation, in one request.
#[derive(Clone, Copy, Debug)]
struct Piece {
    op: usize,
    /// Counted from the operation's first byte.
    at: u64,
    len: u64,
}

impl TcpPeer {
    /// `is_here` says that its number means the same process here.
    pub(super) fn new(addr: SocketAddr, realm: RealmId, door: Token, pid: u32, is_here: bool) -> Self {
        // Opened before the owner proves that it lives, so that this is no later process of the same number.
        let process = Pid::from_raw(pid.cast_signed()).filter(|_| is_here);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { addr, realm, door, pid, process, idle: Mutex::default() }
    }

    /// Makes sure that it is there and who it says.
    pub(super) fn greet(&self, watch: &Watch) -> Result<(), TransferError> {
        let connection = self.dial(watch)?;
        self.put_back(connection);
        Ok(())
    }

    fn take(&self, watch: &Watch) -> Result<Connection, TransferError> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                None => return self.dial(watch),
                Some(connection) if connection.is_sound() => return Ok(connection),
                Some(_) => {}
            }
        }
    }

    fn put_back(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE {
            idle.push(connection);
        }
    }

    fn dial(&self, watch: &Watch) -> Result<Connection, TransferError> {
        watch.check()?;
        let limit = watch.left().unwrap_or(CONNECT).clamp(Duration::from_millis(1), CONNECT);
        let stream = TcpStream::connect_timeout(&self.addr, limit).map_err(|error| self.failed(&error))?;
        stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true)).map_err(|error| self.failed(&error))?;
        let stream = Arc::new(stream);
        let mut connection = Connection { incoming: Incoming::new(Arc::clone(&stream)), stream };
        let hello = Watch::new(Some(Instant::now() + limit));
        watch.add(&connection.stream)?;
        let greeted = self.prove(&mut connection, &hello);
        watch.remove(&connection.stream);
        match greeted {
            Ok(()) => Ok(connection),
            Err(error) => {
                watch.check()?;
                Err(match error.kind {
                    ErrorKind::TimedOut => TransferError::transport(format!(
                        "process {} did not answer within {limit:?}: it may be stopped, or out of descriptors",
                        self.pid
                    )),
                    _ => error,
                })
            }
        }
    }

    /// TCP-1
    fn prove(&self, connection: &mut Connection, watch: &Watch) -> Result<(), TransferError> {
        let wait = |flags| self.wait(&connection.stream, flags, watch);
        let client = random()?;
        // SAFETY: all three live in this frame or in `self`.
        unsafe { send(&connection.stream, &mut [bytes(&MAGIC), bytes(&client), bytes(&self.realm)], &wait) }
            .map_err(|error| self.failed(&error))?;
        let mut welcome = [0; WELCOME];
        connection.incoming.exactly(&mut welcome, &wait).map_err(|error| self.failed(&error))?;
        let server = std::array::from_fn(|i| welcome[i]);
        let proof = std::array::from_fn(|i| welcome[16 + i]);
        if !proves(&self.door, Side::Server, &self.realm, &client, &server, &proof) {
            return Err(TransferError::gone(format!("process {}, which owned the buffer, has ended", self.pid)));
        }
        let mine = prove(&self.door, Side::Client, &self.realm, &client, &server);
        // SAFETY: lives in this frame.
        unsafe { send(&connection.stream, &mut [bytes(&mine)], &wait) }.map_err(|error| self.failed(&error))
    }

    /// Waits for the socket, the owner's end, the deadline or the caller, whichever comes first.
    fn wait(&self, stream: &TcpStream, flags: PollFlags, watch: &Watch) -> io::Result<()> {
        watch.check().map_err(io::Error::other)?;
        let limit = watch.left().map(|left| Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
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

    /// Whether the owner has ended, or does within that time.
    fn has_ended(&self, wait: Duration) -> bool {
        let end = Instant::now() + wait;
        let closes = |what: &dyn AsFd| {
            let left = end.saturating_duration_since(Instant::now());
            let limit = Timespec { tv_sec: 0, tv_nsec: left.as_nanos().try_into().unwrap_or(0) };
            poll(&mut [PollFd::new(&what.as_fd(), PollFlags::IN)], Some(&limit)).is_ok_and(|n| n > 0)
        };
        if let Some(process) = &self.process {
            return closes(process);
        }
        loop {
            match TcpStream::connect_timeout(&self.addr, CONNECT) {
                Err(error) => return error.kind() == io::ErrorKind::ConnectionRefused,
                // A server that lives waits for what a stranger says; one that ends has nobody to wait.
                Ok(stream) if closes(&stream) && Instant::now() < end => {}
                Ok(_) => return false,
            }
        }
    }

    fn ended(&self) -> TransferError {
        TransferError::gone(format!("process {}, which owned the buffer, has ended", self.pid))
    }

    fn failed(&self, error: &io::Error) -> TransferError {
        if let Some(said) = error.get_ref().and_then(|inner| inner.downcast_ref::<TransferError>()) {
            return said.clone();
        }
        match error.kind() {
            io::ErrorKind::ConnectionRefused => self.ended(),
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
        watch.add(&connection.stream)?;
        // SAFETY: as the caller vouches.
        let done = unsafe { self.exchange(&mut connection, ops, next, found, watch) };
        watch.remove(&connection.stream);
        if done.is_ok() {
            self.put_back(connection);
        }
        done
    }

    /// Sends requests and takes answers, `WINDOW` ahead. Whoever leaves early has left the connection in the middle of
    /// something.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn exchange(
        &self,
        connection: &mut Connection,
        ops: &[Op],
        next: &(dyn Fn() -> Option<Piece> + Sync),
        found: &Mutex<Vec<(usize, u64)>>,
        watch: &Watch,
    ) -> Result<(), TransferError> {
        let Connection { stream, incoming } = connection;
        let wait = |flags| self.wait(stream, flags, watch);
        let failed = |error: io::Error| self.failed(&error);
        let mut asked: VecDeque<Piece> = VecDeque::new();
        let mut ahead = next();
        let mut refused = None;
        let mut heads: Vec<[u8; REQUEST]> = Vec::with_capacity(WINDOW);
        loop {
            heads.clear();
            let mut is_held = false;
            while let Some(piece) = ahead
                && asked.len() < WINDOW
                && refused.is_none()
            {
                let op = &ops[piece.op];
                let is_write = matches!(op.work, Work::Write { .. });
                // What is read must not fill both directions while neither end reads.
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
                    // SAFETY: the heads live in this frame, the rest is the caller's to vouch for.
                    unsafe { send(stream, &mut list, &wait) }.map_err(failed)?;
                    heads.clear();
                }
            }
            if !heads.is_empty() {
                let mut list: Vec<_> = heads.iter().map(|head| bytes(head)).collect();
                // SAFETY: the heads live in this frame.
                unsafe { send(stream, &mut list, &wait) }.map_err(failed)?;
            }
            // Half of the window at once, so that requests go out together.
            let rest = if ahead.is_some() && refused.is_none() && !is_held { WINDOW / 2 } else { 0 };
            if asked.is_empty() {
                return refused.map_or(Ok(()), Err);
            }
            while asked.len() > rest {
                let Some(piece) = asked.pop_front() else { break };
                let mut head = [0; RESPONSE];
                incoming.exactly(&mut head, &wait).map_err(failed)?;
                let response = Response::decode(&head)?;
                if let Some(kind) = response.refused {
                    refused = Some(said(kind));
                    continue;
                }
                match &ops[piece.op].work {
                    // SAFETY: the caller's memory, writable.
                    Work::Read { local, .. } => unsafe {
                        incoming.pieces(local.window(piece.at, piece.len), &wait).map_err(failed)?;
                    },
                    Work::Write { .. } => {}
                    _ => {
                        found.lock().unwrap_or_else(PoisonError::into_inner).push((piece.op, response.found));
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

fn said(kind: ErrorKind) -> TransferError {
    let message = match kind {
        ErrorKind::Gone => "the buffer was dropped by its owner",
        ErrorKind::Refused => "the owner refuses: the handle is not its own, or names more than it offers",
        _ => "the owner cannot do this there: the 8 bytes of an atomic operation must lie together at a multiple of 8",
    };
    TransferError::new(kind, message)
}

impl Connection {
    /// Whether it is open, and nothing has come that nobody has asked for.
    fn is_sound(&self) -> bool {
        let mut byte = [0];
        match self.stream.peek(&mut byte) {
            Err(error) => error.kind() == io::ErrorKind::WouldBlock && !self.incoming.has(1),
            Ok(_) => false,
        }
    }
}

impl Peer for TcpPeer {
    unsafe fn run(&self, ops: &[Op], found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        let mut pieces = Vec::new();
        for (op, each) in ops.iter().enumerate() {
            let (_, len) = each.work.span();
            let mut at = 0;
            while at < len {
                pieces.push(Piece { op, at, len: PIECE.min(len - at) });
                at += PIECE;
            }
        }
        let total: u64 = pieces.iter().map(|piece| piece.len).sum();
        let streams = if total < SEVERAL { 1 } else { (crate::cores::spare() / 2 + 1).min(STREAMS) };
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
        let done = std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..streams)
                .filter_map(|_| {
                    let helper = std::thread::Builder::new().name("mesh-copy".to_owned()).stack_size(128 * 1024);
                    helper.spawn_scoped(scope, one).ok()
                })
                .collect();
            let mine = one();
            helpers.into_iter().fold(mine, |all, helper| {
                all.and(helper.join().unwrap_or_else(|_| Err(TransferError::transport("a thread has panicked"))))
            })
        });
        // What ends connections is often that the operation was given up.
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

    fn is_alive(&self) -> bool {
        !self.has_ended(Duration::ZERO)
    }

    fn is_quick(&self) -> bool {
        false
    }
}

impl TcpPeer {
    /// What a lost connection means: the owner may have ended, and an atomic operation may have been carried out.
    fn after_a_loss(&self, error: TransferError, ops: &[Op], watch: &Watch) -> TransferError {
        let error = match self.dial(watch) {
            Err(why) if why.kind == ErrorKind::Gone => why,
            _ => error,
        };
        if error.kind != ErrorKind::Gone && ops.iter().any(|op| op.work.is_atomic()) {
            return TransferError::new(
                ErrorKind::Unknown,
                format!("{error}; nobody knows whether the atomic operation was carried out"),
            );
        }
        error
    }
}
