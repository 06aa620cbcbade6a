//! One Unix socket to a neighbour.

use crate::error::RuntimeError;
use crate::reactor::{Reactor, would_block};
use bytes::Bytes;
use mesh_proto::{Decoder, EndReason, Frame, HEADER_LEN, LinkId, ProcAddr};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv,
    recvmsg, send, sendmsg,
};
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Frames up to this length are written from one small buffer; longer ones from where they are.
const SMALL: usize = 4096;
/// Queued small frames are joined into chunks of this size.
const CHUNK: usize = 64 * 1024;
const IOV: usize = 32;
/// Bytes read from one link before others get a turn. More than a socket holds, so that a dead peer's last messages are read
/// at once.
const MOST_READ: usize = 4 * 1024 * 1024;
/// How long a sender waits for the other end of a direct link, which always reads.
const MOMENT: Duration = Duration::from_millis(50);
/// Sockets that came by a link and were not taken yet. Their frames are behind them, so more than one is rare.
const MOST_SOCKETS: usize = 16;

/// How a read ended.
pub(crate) enum ReadEnd {
    /// Everything that arrived was read, or enough for others to get a turn.
    Drained,
    /// The peer closed or broke the protocol; nothing more will come.
    Closed(EndReason),
}

/// Bytes that wait, and a socket that goes with the first of them.
#[derive(Debug)]
struct Chunk {
    bytes: Bytes,
    socket: Option<OwnedFd>,
}

#[derive(Debug, Default)]
struct Tx {
    queue: VecDeque<Chunk>,
    /// Small frames at the end of the queue, still open for more.
    tail: Vec<u8>,
    /// Bytes of the first chunk that are already written.
    written: usize,
    queued: usize,
    seq: u32,
    watching: bool,
    /// The number of holds: while there are any, frames are only queued.
    holds: u32,
    closed: bool,
}

/// What has been read.
#[derive(Debug, Default)]
struct Rx {
    decoder: Decoder,
    /// The next frame, which was looked at.
    next: Option<Frame>,
    /// Nothing comes behind what was read.
    end: Option<EndReason>,
}

/// The link. Any thread may send; the thread that holds the reactor's lock reads.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: LinkId,
    pub(crate) peer: ProcAddr,
    fd: OwnedFd,
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    /// Sockets that have come; none if the peer may send none.
    sockets: Option<Mutex<VecDeque<OwnedFd>>>,
    /// Whether it is read when something comes.
    reads: AtomicBool,
    /// Whether it leads to another proc.
    is_direct: bool,
    /// Senders that wait for the queue to shrink.
    room: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The clock of this host, the same for all its processes.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// What tells a socket from all others of its machine, whichever process looks at it.
pub(crate) fn socket_number(socket: BorrowedFd<'_>) -> Option<u64> {
    rustix::fs::fstat(socket).ok().map(|stat| stat.st_ino)
}

impl Link {
    pub(crate) fn new(id: LinkId, peer: ProcAddr, fd: OwnedFd) -> Self {
        Self {
            id,
            peer,
            fd,
            tx: Mutex::new(Tx::default()),
            rx: Mutex::default(),
            sockets: None,
            reads: AtomicBool::new(true),
            is_direct: false,
            room: Condvar::new(),
        }
    }

    /// A link to another proc, which is not read yet.
    pub(crate) fn direct(id: LinkId, peer: ProcAddr, fd: OwnedFd) -> Self {
        Self { reads: AtomicBool::new(false), is_direct: true, ..Self::new(id, peer, fd) }
    }

    /// A link by which sockets come too: that to an agent.
    pub(crate) fn with_sockets(id: LinkId, peer: ProcAddr, fd: OwnedFd) -> Self {
        Self { sockets: Some(Mutex::default()), ..Self::new(id, peer, fd) }
    }

    /// The socket with this number ([`socket_number`]), if it has come.
    pub(crate) fn take_socket(&self, number: u64) -> Option<OwnedFd> {
        let mut sockets = lock(self.sockets.as_ref()?);
        let at = sockets.iter().position(|socket| socket_number(socket.as_fd()) == Some(number))?;
        sockets.remove(at)
    }

    /// Starts to watch it.
    pub(crate) fn register(&self, reactor: &Reactor) -> Result<(), RuntimeError> {
        reactor.add(self.fd.as_fd(), u64::from(self.id))?;
        if !self.reads() {
            self.watch_as(reactor, false);
        }
        Ok(())
    }

    /// Whether it is read when something comes.
    pub(crate) fn reads(&self) -> bool {
        self.reads.load(Ordering::SeqCst)
    }

    /// Reads from now on.
    pub(crate) fn start_reading(&self, reactor: &Reactor) {
        self.set_reading(reactor, true);
    }

    /// Reads nothing more.
    pub(crate) fn stop_reading(&self, reactor: &Reactor) {
        self.set_reading(reactor, false);
    }

    fn set_reading(&self, reactor: &Reactor, reads: bool) {
        // Under the lock, which orders it with changes of what is watched for writing.
        let tx = lock(&self.tx);
        self.reads.store(reads, Ordering::SeqCst);
        self.watch_as(reactor, tx.watching);
    }

    fn watch_as(&self, reactor: &Reactor, write: bool) {
        reactor.watch_ways(self.fd.as_fd(), u64::from(self.id), self.reads(), write);
    }

    /// Bytes that are queued.
    pub(crate) fn queued(&self) -> usize {
        lock(&self.tx).queued
    }

    /// Writes a frame if the socket has room, otherwise queues it. Returns how many bytes are now queued, or `None` if
    /// the link is closed.
    pub(crate) fn send(&self, reactor: &Reactor, frame: &Frame) -> Option<usize> {
        let mut tx = lock(&self.tx);
        if tx.closed {
            return None;
        }
        let mut header = frame.header;
        header.seq = tx.seq;
        header.sent = now();
        tx.seq = tx.seq.wrapping_add(1);
        let head = header.encode();
        let body = &frame.body;
        let total = HEADER_LEN + body.len();
        let mut done = 0;
        if tx.queued == 0 && tx.holds == 0 {
            done = if total <= SMALL {
                let mut small = [0_u8; SMALL];
                small[..HEADER_LEN].copy_from_slice(&head);
                small[HEADER_LEN..total].copy_from_slice(body);
                match send(&self.fd, &small[..total], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                    Ok(n) => n,
                    Err(errno) if self.may_go_on(errno) => 0,
                    Err(errno) => return self.broken(reactor, &mut tx, errno),
                }
            } else {
                match self.write(&[IoSlice::new(&head), IoSlice::new(body)]) {
                    Ok(n) => n,
                    Err(errno) => return self.broken(reactor, &mut tx, errno),
                }
            };
            if done == total {
                return Some(0);
            }
            if self.is_direct {
                done = match self.write_on(&head, body, done) {
                    Ok(done) => done,
                    Err(errno) => return self.broken(reactor, &mut tx, errno),
                };
                if done == total {
                    return Some(0);
                }
            }
        }
        tx.queued += total - done;
        if done < HEADER_LEN {
            tx.tail.extend_from_slice(&head[done..]);
            done = HEADER_LEN;
        }
        let rest = &body[done - HEADER_LEN..];
        if rest.len() <= SMALL {
            tx.tail.extend_from_slice(rest);
        } else {
            tx.close_tail();
            tx.queue.push_back(Chunk { bytes: body.slice(done - HEADER_LEN..), socket: None });
        }
        if tx.tail.len() >= CHUNK {
            tx.close_tail();
        }
        if tx.holds == 0 {
            self.watch(reactor, &mut tx);
        }
        Some(tx.queued)
    }

    /// Sends a short frame and a socket with it, behind what waits. The peer gets the frame alone if the system cannot
    /// send sockets at the moment.
    pub(crate) fn send_with(&self, reactor: &Reactor, frame: &Frame, socket: OwnedFd) {
        let mut tx = lock(&self.tx);
        if tx.closed {
            return;
        }
        let mut header = frame.header;
        header.seq = tx.seq;
        header.sent = now();
        tx.seq = tx.seq.wrapping_add(1);
        tx.close_tail();
        let bytes = Bytes::from([&header.encode(), &frame.body[..]].concat());
        tx.queued += bytes.len();
        tx.queue.push_back(Chunk { bytes, socket: Some(socket) });
        if tx.holds == 0 {
            self.write_queue(reactor, &mut tx);
            if tx.queued > 0 {
                self.watch(reactor, &mut tx);
            }
        }
    }

    /// Makes the reactor write the queue once the socket has room.
    fn watch(&self, reactor: &Reactor, tx: &mut Tx) {
        if !tx.watching {
            tx.watching = true;
            self.watch_as(reactor, true);
        }
    }

    /// Queues frames in order, without writing them, until the returned value is dropped.
    pub(crate) fn hold(self: &Arc<Self>, reactor: &Arc<Reactor>) -> Hold {
        lock(&self.tx).holds += 1;
        Hold { link: Arc::clone(self), reactor: Arc::clone(reactor) }
    }

    /// Handles a failed write. Accepts nothing more; the reader will find the link's end and report it.
    fn broken(&self, reactor: &Reactor, tx: &mut Tx, errno: Errno) -> Option<usize> {
        if self.is_direct && !matches!(errno, Errno::PIPE | Errno::CONNRESET) {
            // Both ends live, and what this one has accepted would be lost without a word (DIR-2).
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
        tx.shut();
        // Whatever the cause, such as a shortage of memory, both ends must see the link's end.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
        self.watch_as(reactor, false);
        self.room.notify_all();
        None
    }

    /// Goes on with a frame for which the socket had no room, for a moment. Whoever learns of what waits in this process could
    /// be heard before it (DIR-4).
    #[cold]
    fn write_on(&self, head: &[u8], body: &[u8], mut done: usize) -> Result<usize, Errno> {
        let end = Instant::now() + MOMENT;
        while done < head.len() + body.len() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut fds = [rustix::event::PollFd::new(&self.fd, rustix::event::PollFlags::OUT)];
            let _ = rustix::event::poll(&mut fds, Some(&timeout));
            done += match done.checked_sub(head.len()) {
                None => self.write(&[IoSlice::new(&head[done..]), IoSlice::new(body)])?,
                Some(at) => self.write(&[IoSlice::new(&body[at..])])?,
            };
        }
        Ok(done)
    }

    /// Whether a write that failed is only to be tried again. Both ends of a direct link live on, so that a shortage of memory
    /// must not end it.
    fn may_go_on(&self, errno: Errno) -> bool {
        would_block(errno) || self.is_direct && matches!(errno, Errno::NOMEM | Errno::NOBUFS)
    }

    fn write(&self, slices: &[IoSlice<'_>]) -> Result<usize, Errno> {
        let mut none = SendAncillaryBuffer::default();
        match sendmsg(&self.fd, slices, &mut none, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(errno) if self.may_go_on(errno) => Ok(0),
            sent => sent,
        }
    }

    /// Writes bytes with a socket, which is gone with the first of them.
    fn write_with(&self, bytes: &[u8], socket: &mut Option<OwnedFd>) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let sockets: Vec<_> = socket.iter().map(AsFd::as_fd).collect();
        with.push(SendAncillaryMessage::ScmRights(&sockets));
        let sent = sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut with, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        match sent {
            Ok(n) => {
                *socket = None;
                Ok(n)
            }
            Err(errno) if would_block(errno) => Ok(0),
            Err(Errno::TOOMANYREFS | Errno::NOMEM | Errno::NOBUFS) => {
                *socket = None;
                self.write(&[IoSlice::new(bytes)])
            }
            Err(errno) => Err(errno),
        }
    }

    /// Writes as much of the queue as the socket takes.
    pub(crate) fn flush(&self, reactor: &Reactor) {
        let mut tx = lock(&self.tx);
        if tx.holds == 0 {
            self.write_queue(reactor, &mut tx);
        }
    }

    fn write_queue(&self, reactor: &Reactor, tx: &mut Tx) {
        tx.close_tail();
        while tx.queued > 0 && !tx.closed {
            let (asked, written) = match tx.queue.front_mut() {
                Some(Chunk { bytes, socket: socket @ Some(_) }) => (bytes.len(), self.write_with(bytes, socket)),
                _ => self.write_plain(tx),
            };
            let n = match written {
                Ok(n) => n,
                Err(errno) => {
                    self.broken(reactor, tx, errno);
                    return;
                }
            };
            tx.consume(n);
            if n < asked {
                break;
            }
        }
        if tx.queued == 0 && tx.watching {
            tx.watching = false;
            self.watch_as(reactor, false);
        }
        self.room.notify_all();
    }

    /// Writes the first chunks, up to one with a socket. Returns how many bytes they have, and how many were written.
    fn write_plain(&self, tx: &Tx) -> (usize, Result<usize, Errno>) {
        let skip = tx.written;
        let plain = tx.queue.iter().take(IOV).take_while(|chunk| chunk.socket.is_none());
        let slices: Vec<IoSlice<'_>> = plain
            .enumerate()
            .map(|(i, chunk)| IoSlice::new(if i == 0 { &chunk.bytes[skip..] } else { &chunk.bytes }))
            .collect();
        (slices.iter().map(|s| s.len()).sum(), self.write(&slices))
    }

    /// Blocks until at most `budget` bytes are queued, for at most `limit`. Returns whether that is so.
    pub(crate) fn wait_room(&self, budget: usize, limit: Duration) -> bool {
        let tx = lock(&self.tx);
        let (tx, _) = self
            .room
            .wait_timeout_while(tx, limit, |tx| tx.queued > budget && !tx.closed)
            .unwrap_or_else(PoisonError::into_inner);
        tx.queued <= budget || tx.closed
    }

    /// Reads once. Returns how many bytes came and for how many there was room; none if there is nothing now.
    fn receive(&self, rx: &mut Decoder) -> Result<Option<(usize, usize)>, EndReason> {
        let room = rx.room();
        let asked = room.len();
        let received = match &self.sockets {
            None => recv(&self.fd, room, RecvFlags::DONTWAIT).map(|(n, _)| (n, asked)),
            Some(sockets) => self.receive_with(room, sockets),
        };
        match received {
            Ok((0, _)) => Err(EndReason::ConnectionClosed(rx.pending() as u64)),
            Ok((n, asked)) => {
                rx.filled(n);
                Ok(Some((n, asked)))
            }
            Err(errno) if would_block(errno) => Ok(None),
            Err(errno) => Err(EndReason::ConnectionBroke(errno.raw_os_error())),
        }
    }

    /// A read ends where a socket comes, however much more there is: then it counts as a whole one.
    fn receive_with(&self, room: &mut [u8], sockets: &Mutex<VecDeque<OwnedFd>>) -> Result<(usize, usize), Errno> {
        let mut asked = room.len();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.fd, &mut [IoSliceMut::new(room)], &mut with, flags)?;
        for message in with.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                asked = received.bytes;
                let mut sockets = lock(sockets);
                let left = MOST_SOCKETS.saturating_sub(sockets.len());
                sockets.extend(came.take(left));
            }
        }
        Ok((received.bytes, asked))
    }

    /// Reads what has come, and keeps it for [`Link::take`].
    pub(crate) fn fill(&self) {
        let mut rx = lock(&self.rx);
        let mut total = 0;
        while rx.end.is_none() && total < MOST_READ {
            match self.receive(&mut rx.decoder) {
                Ok(Some((n, asked))) => {
                    total += n;
                    if n < asked {
                        return;
                    }
                }
                Ok(None) => return,
                Err(why) => rx.end = Some(why),
            }
        }
    }

    /// When the next frame of what was read was sent.
    pub(crate) fn next_sent(&self) -> Option<u64> {
        let mut rx = lock(&self.rx);
        if rx.next.is_none() {
            match rx.decoder.next_frame() {
                Ok(next) => rx.next = next,
                Err(error) => rx.end = Some(EndReason::Protocol(error.to_string())),
            }
        }
        rx.next.as_ref().map(|frame| frame.header.sent)
    }

    /// The frame that was looked at last.
    pub(crate) fn take(&self) -> Option<Frame> {
        lock(&self.rx).next.take()
    }

    /// Why nothing more comes, once all that came was taken.
    pub(crate) fn take_end(&self) -> Option<EndReason> {
        let mut rx = lock(&self.rx);
        if rx.next.is_none() { rx.end.take() } else { None }
    }

    /// The socket, to be polled.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Reads what arrived and passes every frame to `take`.
    pub(crate) fn read(&self, mut take: impl FnMut(Frame)) -> ReadEnd {
        let rx = &mut lock(&self.rx).decoder;
        let mut total = 0;
        loop {
            let (n, asked) = match self.receive(rx) {
                Ok(Some(read)) => read,
                Ok(None) => return ReadEnd::Drained,
                Err(why) => return ReadEnd::Closed(why),
            };
            loop {
                match rx.next_frame() {
                    Ok(Some(frame)) => take(frame),
                    Ok(None) => break,
                    Err(error) => return ReadEnd::Closed(EndReason::Protocol(error.to_string())),
                }
            }
            total += n;
            if n < asked || total >= MOST_READ {
                return ReadEnd::Drained;
            }
        }
    }

    /// Closes the link: nothing is sent or read any more.
    pub(crate) fn close(&self, reactor: &Reactor) {
        lock(&self.tx).shut();
        self.room.notify_all();
        reactor.remove(self.fd.as_fd());
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// Ends the sending side. What the peer sends is still read.
    pub(crate) fn hang_up(&self) {
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Write);
    }

    /// Blocks until the peer has hung up, for at most `limit`.
    pub(crate) fn wait_end(&self, limit: Duration) {
        let timeout = rustix::event::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(1),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        let mut fds = [rustix::event::PollFd::new(&self.fd, rustix::event::PollFlags::RDHUP)];
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
    }

    /// Writes what is queued, for at most `limit`.
    pub(crate) fn drain(&self, reactor: &Reactor, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            self.flush(reactor);
            let left = end.saturating_duration_since(Instant::now());
            if self.queued() == 0 || lock(&self.tx).closed || left.is_zero() {
                return;
            }
            let timeout = rustix::event::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(1),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let mut fds = [rustix::event::PollFd::new(&self.fd, rustix::event::PollFlags::OUT)];
            let _ = rustix::event::poll(&mut fds, Some(&timeout));
        }
    }
}

/// See [`Link::hold`].
#[derive(Debug)]
pub(crate) struct Hold {
    link: Arc<Link>,
    reactor: Arc<Reactor>,
}

impl Hold {
    /// Ends it. Returns how many bytes now wait.
    pub(crate) fn release(self) -> usize {
        let link = Arc::clone(&self.link);
        drop(self);
        link.queued()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut tx = lock(&self.link.tx);
        tx.holds -= 1;
        // If the socket is full, the thread that polls it writes.
        if tx.holds == 0 && tx.queued > 0 && !tx.watching {
            self.link.write_queue(&self.reactor, &mut tx);
            if tx.queued > 0 {
                self.link.watch(&self.reactor, &mut tx);
            }
        }
    }
}

impl Tx {
    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            self.queue.push_back(Chunk { bytes: std::mem::take(&mut self.tail).into(), socket: None });
        }
    }

    fn consume(&mut self, mut n: usize) {
        self.queued -= n;
        while n > 0 {
            let Some(first) = self.queue.front() else { return };
            let left = first.bytes.len() - self.written;
            if n < left {
                self.written += n;
                return;
            }
            n -= left;
            self.written = 0;
            self.queue.pop_front();
        }
    }

    fn shut(&mut self) {
        self.closed = true;
        self.queue.clear();
        self.tail = Vec::new();
        self.queued = 0;
        self.written = 0;
    }
}
