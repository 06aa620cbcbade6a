//! One encrypted connection to the gateway of another host.

use crate::locks::lock;
use crate::reactor::Reactor;
use crate::timespec::timespec;
use crate::tls::{PeerFacts, TlsReader, TlsStream, TlsWriter};
use bytes::Bytes;
use mesh_proto::HostNo;
use mesh_proto::hosts::{Packet, PacketDecoder};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that may wait in a connection. The rest waits where it can still take another path.
const ROOM: usize = 1 << 20;
/// Bytes that are read before they are handed on; few enough to still be in the core's cache.
const MOST_READ: usize = 512 << 10;
const IOV: usize = 64;

/// How reading ended.
pub(super) enum HostConnectionEnd {
    /// Everything that arrived was read.
    Drained,
    /// There is more, but other connections go first.
    More,
    /// The other end closed or broke the protocol; the reason, for people.
    Closed(String),
}

/// Part of a packet that is not fully written yet.
#[derive(Debug)]
struct Piece {
    bytes: Bytes,
    written: usize,
}

#[derive(Debug)]
struct Tx {
    writer: TlsWriter,
    queue: VecDeque<Piece>,
    queued: usize,
    watching: bool,
    closed: bool,
}

#[derive(Debug)]
struct Rx {
    reader: TlsReader,
    decoder: PacketDecoder,
}

/// See the module. Any thread may send; the thread that holds the reactor's lock reads.
#[derive(Debug)]
pub struct HostConnection {
    pub(super) token: u64,
    pub(super) peer: HostNo,
    pub(super) facts: PeerFacts,
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    /// The same socket, for epoll.
    fd: OwnedFd,
    /// Queued bytes, readable without the lock.
    waiting: AtomicU64,
    /// When bytes last arrived and were last sent, in microseconds of the gateway's clock.
    heard: AtomicU64,
    sent: AtomicU64,
    open: AtomicBool,
}

fn micros(at: Duration) -> u64 {
    u64::try_from(at.as_micros()).unwrap_or(u64::MAX)
}

impl HostConnection {
    /// Creates a connection from a finished handshake. `decoder` holds bytes that were read after it.
    pub(super) fn new(
        token: u64,
        peer: HostNo,
        facts: PeerFacts,
        stream: TlsStream,
        decoder: PacketDecoder,
        now: Duration,
    ) -> io::Result<Self> {
        let fd = stream.as_fd().try_clone_to_owned()?;
        let (reader, writer) =
            stream.into_split().map_err(|_| io::Error::other("the handshake of a connection is not finished"))?;
        let tx = Tx { writer, queue: VecDeque::new(), queued: 0, watching: false, closed: false };
        Ok(Self {
            token,
            peer,
            facts,
            tx: Mutex::new(tx),
            rx: Mutex::new(Rx { reader, decoder }),
            fd,
            waiting: AtomicU64::new(0),
            heard: AtomicU64::new(micros(now)),
            sent: AtomicU64::new(micros(now)),
            open: AtomicBool::new(true),
        })
    }

    /// Starts reading and writes what is queued. Returns false if the reactor cannot watch the socket.
    pub(super) fn register(&self, reactor: &Reactor) -> bool {
        let added = reactor.add(self.fd.as_fd(), self.token).is_ok();
        self.flush(reactor);
        added
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Whether it takes more.
    pub(super) fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < ROOM as u64 && self.is_open()
    }

    pub(super) fn heard_at(&self) -> Duration {
        Duration::from_micros(self.heard.load(Ordering::Relaxed))
    }

    pub(super) fn sent_at(&self) -> Duration {
        Duration::from_micros(self.sent.load(Ordering::Relaxed))
    }

    /// Writes a packet if the socket has room, otherwise queues it.
    pub(super) fn send(&self, reactor: &Reactor, packet: &Packet, now: Duration) {
        self.sent.store(micros(now), Ordering::Relaxed);
        let head = packet.encode_head();
        let mut tx = lock(&self.tx);
        if tx.closed {
            return;
        }
        let total = head.len() + packet.body_len();
        let mut done = 0;
        if tx.queued == 0 {
            let mut slices = [IoSlice::new(&[]); 8];
            slices[0] = IoSlice::new(&head);
            let body = packet.body.iter().take(slices.len() - 1);
            let used = 1 + body.zip(&mut slices[1..]).map(|(bytes, slot)| *slot = IoSlice::new(bytes)).count();
            match tx.writer.write(&slices[..used]) {
                Ok(n) => done = n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return self.broken(reactor, &mut tx),
            }
            if done == total && !tx.writer.wants_write() {
                return;
            }
        }
        let mut skip = done;
        for bytes in std::iter::once(Bytes::from(head)).chain(packet.body.iter().cloned()) {
            if skip >= bytes.len() {
                skip -= bytes.len();
                continue;
            }
            tx.queue.push_back(Piece { bytes, written: skip });
            skip = 0;
        }
        tx.queued += total - done;
        self.note_queue(reactor, &mut tx);
    }

    fn note_queue(&self, reactor: &Reactor, tx: &mut Tx) {
        self.waiting.store(tx.queued as u64, Ordering::Relaxed);
        let watch = tx.queued > 0 || tx.writer.wants_write();
        if watch != tx.watching {
            tx.watching = watch;
            reactor.watch(self.fd.as_fd(), self.token, watch);
        }
    }

    /// Writes as much of the queue as the socket takes.
    pub(super) fn flush(&self, reactor: &Reactor) {
        let mut tx = lock(&self.tx);
        if tx.closed {
            return;
        }
        loop {
            match tx.writer.flush() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return self.broken(reactor, &mut tx),
            }
            if tx.queued == 0 {
                break;
            }
            let Tx { writer, queue, .. } = &mut *tx;
            let slices: Vec<IoSlice<'_>> =
                queue.iter().take(IOV).map(|piece| IoSlice::new(&piece.bytes[piece.written..])).collect();
            match writer.write(&slices) {
                Ok(n) => tx.consume(n),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return self.broken(reactor, &mut tx),
            }
        }
        self.note_queue(reactor, &mut tx);
    }

    /// A write failed. Accepts nothing more; the reader will find the end and report it.
    fn broken(&self, reactor: &Reactor, tx: &mut Tx) {
        tx.shut();
        self.waiting.store(0, Ordering::Relaxed);
        self.open.store(false, Ordering::Relaxed);
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
        reactor.watch(self.fd.as_fd(), self.token, false);
    }

    /// Reads what arrived into `packets`.
    pub(super) fn read(&self, packets: &mut Vec<Packet>, now: Duration) -> HostConnectionEnd {
        let mut rx = lock(&self.rx);
        let Rx { reader, decoder } = &mut *rx;
        let (mut total, mut dry) = (0, false);
        loop {
            loop {
                match decoder.next_packet() {
                    Ok(Some(packet)) => packets.push(packet),
                    Ok(None) => break,
                    Err(error) => return HostConnectionEnd::Closed(format!("it broke the protocol: {error}")),
                }
            }
            if dry {
                return HostConnectionEnd::Drained;
            }
            if total >= MOST_READ {
                return HostConnectionEnd::More;
            }
            let room = decoder.room();
            let asked = room.len();
            match reader.read(room) {
                Ok(0) => return HostConnectionEnd::Closed("it closed the connection".to_owned()),
                Ok(n) => {
                    self.heard.store(micros(now), Ordering::Relaxed);
                    decoder.filled(n);
                    total += n;
                    // The socket was empty a moment ago; epoll reports when there is more.
                    dry = n < asked;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return HostConnectionEnd::Drained,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return HostConnectionEnd::Closed(format!("the connection broke: {error}")),
            }
        }
    }

    /// Closes the connection.
    pub(super) fn close(&self, reactor: &Reactor) {
        self.open.store(false, Ordering::Relaxed);
        reactor.remove(self.fd.as_fd());
        let mut tx = lock(&self.tx);
        if !tx.closed {
            tx.writer.close_notify();
            let _ = tx.writer.flush();
            tx.shut();
        }
        self.waiting.store(0, Ordering::Relaxed);
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// Writes what is queued, for at most `limit`.
    pub(super) fn drain(&self, reactor: &Reactor, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            self.flush(reactor);
            let left = end.saturating_duration_since(Instant::now());
            let done = {
                let tx = lock(&self.tx);
                tx.closed || (tx.queued == 0 && !tx.writer.wants_write())
            };
            if done || left.is_zero() {
                return;
            }
            let timeout = timespec(left);
            let mut fds = [rustix::event::PollFd::new(&self.fd, rustix::event::PollFlags::OUT)];
            let _ = rustix::event::poll(&mut fds, Some(&timeout));
        }
    }
}

impl Tx {
    fn consume(&mut self, mut n: usize) {
        self.queued -= n;
        while n > 0 {
            let Some(first) = self.queue.front_mut() else { return };
            let left = first.bytes.len() - first.written;
            if n < left {
                first.written += n;
                return;
            }
            n -= left;
            self.queue.pop_front();
        }
    }

    fn shut(&mut self) {
        self.closed = true;
        self.queue.clear();
        self.queued = 0;
    }
}
