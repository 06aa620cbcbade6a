//! One Unix socket to a neighbour.

use crate::error::RuntimeError;
use crate::reactor::{Reactor, would_block};
use bytes::Bytes;
use mesh_proto::{Decoder, EndReason, Frame, HEADER_LEN, LinkId, ProcAddr};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Frames up to this length are written from one small buffer; longer ones from where they are.
const SMALL: usize = 4096;
/// Queued small frames are joined into chunks of this size.
const CHUNK: usize = 64 * 1024;
const IOV: usize = 32;
/// Bytes read from one link before others get a turn. More than a socket holds, so that a dead peer's last messages are read
/// at once.
const MOST_READ: usize = 4 * 1024 * 1024;

/// How a read ended.
pub(crate) enum ReadEnd {
    /// Everything that arrived was read, or enough for others to get a turn.
    Drained,
    /// The peer closed or broke the protocol; nothing more will come.
    Closed(EndReason),
}

#[derive(Debug, Default)]
struct Tx {
    queue: VecDeque<Bytes>,
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

/// The link. Any thread may send; the thread that holds the reactor's lock reads.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: LinkId,
    pub(crate) peer: ProcAddr,
    fd: OwnedFd,
    tx: Mutex<Tx>,
    rx: Mutex<Decoder>,
    /// Senders that wait for the queue to shrink.
    room: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    pub(crate) fn new(id: LinkId, peer: ProcAddr, fd: OwnedFd) -> Self {
        Self { id, peer, fd, tx: Mutex::new(Tx::default()), rx: Mutex::new(Decoder::default()), room: Condvar::new() }
    }

    /// Starts reading.
    pub(crate) fn register(&self, reactor: &Reactor) -> Result<(), RuntimeError> {
        reactor.add(self.fd.as_fd(), u64::from(self.id))
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
                    Err(errno) if would_block(errno) => 0,
                    Err(_) => return self.broken(reactor, &mut tx),
                }
            } else {
                match self.write(&[IoSlice::new(&head), IoSlice::new(body)]) {
                    Some(n) => n,
                    None => return self.broken(reactor, &mut tx),
                }
            };
            if done == total {
                return Some(0);
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
            tx.queue.push_back(body.slice(done - HEADER_LEN..));
        }
        if tx.tail.len() >= CHUNK {
            tx.close_tail();
        }
        if tx.holds == 0 {
            self.watch(reactor, &mut tx);
        }
        Some(tx.queued)
    }

    /// Makes the reactor write the queue once the socket has room.
    fn watch(&self, reactor: &Reactor, tx: &mut Tx) {
        if !tx.watching {
            tx.watching = true;
            reactor.watch(self.fd.as_fd(), u64::from(self.id), true);
        }
    }

    /// Queues frames in order, without writing them, until the returned value is dropped.
    pub(crate) fn hold<'a>(&'a self, reactor: &'a Reactor) -> Hold<'a> {
        lock(&self.tx).holds += 1;
        Hold { link: self, reactor }
    }

    /// Handles a failed write. Accepts nothing more; the reader will find the link's end and report it.
    fn broken(&self, reactor: &Reactor, tx: &mut Tx) -> Option<usize> {
        tx.shut();
        // Whatever the cause, such as a shortage of memory, both ends must see the link's end.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
        reactor.watch(self.fd.as_fd(), u64::from(self.id), false);
        self.room.notify_all();
        None
    }

    fn write(&self, slices: &[IoSlice<'_>]) -> Option<usize> {
        let mut none = SendAncillaryBuffer::default();
        match sendmsg(&self.fd, slices, &mut none, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => Some(n),
            Err(errno) if would_block(errno) => Some(0),
            Err(_) => None,
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
            let skip = tx.written;
            let slices: Vec<IoSlice<'_>> = tx
                .queue
                .iter()
                .take(IOV)
                .enumerate()
                .map(|(i, chunk)| IoSlice::new(if i == 0 { &chunk[skip..] } else { chunk }))
                .collect();
            let asked: usize = slices.iter().map(|s| s.len()).sum();
            let Some(n) = self.write(&slices) else {
                self.broken(reactor, tx);
                return;
            };
            tx.consume(n);
            if n < asked {
                break;
            }
        }
        if tx.queued == 0 && tx.watching {
            tx.watching = false;
            reactor.watch(self.fd.as_fd(), u64::from(self.id), false);
        }
        self.room.notify_all();
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

    /// Reads what arrived and passes every frame to `take`.
    pub(crate) fn read(&self, mut take: impl FnMut(Frame)) -> ReadEnd {
        let mut rx = lock(&self.rx);
        let mut total = 0;
        loop {
            let room = rx.room();
            let asked = room.len();
            let n = match recv(&self.fd, room, RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    return ReadEnd::Closed(EndReason::ConnectionClosed(rx.pending() as u64));
                }
                Ok((n, _)) => n,
                Err(errno) if would_block(errno) => return ReadEnd::Drained,
                Err(errno) => return ReadEnd::Closed(EndReason::ConnectionBroke(errno.raw_os_error())),
            };
            rx.filled(n);
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
        let end = std::time::Instant::now() + limit;
        loop {
            self.flush(reactor);
            let left = end.saturating_duration_since(std::time::Instant::now());
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
pub(crate) struct Hold<'a> {
    link: &'a Link,
    reactor: &'a Reactor,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut tx = lock(&self.link.tx);
        tx.holds -= 1;
        // If the socket is full, the thread that polls it writes.
        if tx.holds == 0 && tx.queued > 0 && !tx.watching {
            self.link.write_queue(self.reactor, &mut tx);
            if tx.queued > 0 {
                self.link.watch(self.reactor, &mut tx);
            }
        }
    }
}

impl Tx {
    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            self.queue.push_back(std::mem::take(&mut self.tail).into());
        }
    }

    fn consume(&mut self, mut n: usize) {
        self.queued -= n;
        while n > 0 {
            let Some(first) = self.queue.front() else { return };
            let left = first.len() - self.written;
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
