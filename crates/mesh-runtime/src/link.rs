//! One Unix socket to a neighbour.

use crate::error::RuntimeError;
use crate::intake::{CameWith, DESCRIPTORS, Intake, MOST_READ};
use crate::link_page::{End, LinkPage};
use crate::reactor::{Reactor, would_block};
use crate::timespec::now;
use bytes::Bytes;
use mesh_proto::{EndReason, Frame, HEADER_LEN, Header, Incoming, LinkId, ProcAddr};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Frames up to this length are written from one small buffer; longer ones from where they are.
const SMALL: usize = 4096;
/// Queued small frames are joined into chunks of this size.
const CHUNK: usize = 64 * 1024;
const IOV: usize = 32;
/// What rests in a link is due once there are so many bytes of it, or the first has waited for so many nanoseconds.
const BUNDLE: usize = 16 * 1024;
const LONGEST: u64 = 200_000;

/// How a read ended.
pub(crate) enum ReadEnd {
    /// Everything that arrived was read, or enough for others to get a turn.
    Drained,
    /// The other end's page has come: what is left is read in the order of all links.
    HasPage,
    /// The peer closed or broke the protocol; nothing more will come.
    Closed(EndReason),
}

/// Bytes that wait, and descriptors that go with the first of them.
#[derive(Debug)]
struct Chunk {
    bytes: Bytes,
    with: Vec<OwnedFd>,
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
    /// All that is queued is a bundle: the socket has room, but somebody is to write it a moment later.
    rests: bool,
    rests_since: u64,
    closed: bool,
}

/// Whether a frame rests in a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// It does not, and was not accepted.
    Refused,
    /// Somebody must write it. `first`: nothing has rested here before it.
    Begun { first: bool },
    /// It is to be written now.
    Due,
}

/// The link. Any thread may send; the thread that holds the reactor's lock reads.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: LinkId,
    pub(crate) peer: ProcAddr,
    fd: OwnedFd,
    tx: Mutex<Tx>,
    rx: Mutex<Intake>,
    /// Descriptors that have come, by the frames that they belong to; none if the peer may send none.
    came_with: Option<CameWith>,
    /// Where both ends show each other how far they are, if there have been direct links.
    page: OnceLock<LinkPage>,
    /// At an agent: its memory, until the other end has it.
    page_memory: Mutex<Option<OwnedFd>>,
    offers_page: AtomicBool,
    /// Something can be read, as a poll has said.
    is_readable: AtomicBool,
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
            came_with: None,
            page: OnceLock::new(),
            page_memory: Mutex::default(),
            offers_page: AtomicBool::new(false),
            is_readable: AtomicBool::new(false),
            reads: AtomicBool::new(true),
            is_direct: false,
            room: Condvar::new(),
        }
    }

    /// A link to another proc.
    pub(crate) fn direct(id: LinkId, peer: ProcAddr, fd: OwnedFd, page: LinkPage) -> Self {
        let page = OnceLock::from(page);
        Self { is_direct: true, page, ..Self::new(id, peer, fd) }
    }

    /// A link by which descriptors come too: that to an agent.
    pub(crate) fn with_descriptors(id: LinkId, peer: ProcAddr, fd: OwnedFd) -> Self {
        Self { came_with: Some(Mutex::default()), ..Self::new(id, peer, fd) }
    }

    /// The descriptors that have come with a frame, by the number of the first of them, a socket ([`socket_number`]).
    pub(crate) fn take_with(&self, number: u64) -> Option<Vec<OwnedFd>> {
        let mut came = lock(self.came_with.as_ref()?);
        let is_it = |one: &Vec<OwnedFd>| one.first().and_then(|socket| socket_number(socket.as_fd())) == Some(number);
        let at = came.iter().position(is_it)?;
        came.remove(at)
    }

    // The page.

    /// At an agent: the memory of the page, which is made if there is none; nothing if the other end has it already.
    pub(crate) fn offer_page(&self) -> Result<Option<OwnedFd>, RuntimeError> {
        if self.page.get().is_none() {
            let memory = LinkPage::create()?;
            self.set_page(LinkPage::open(&memory, End::First)?);
            *lock(&self.page_memory) = Some(memory);
            self.offers_page.store(true, Ordering::SeqCst);
        }
        let copy = lock(&self.page_memory).as_ref().map(OwnedFd::try_clone).transpose();
        copy.map_err(|error| RuntimeError::os("dup")(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))
    }

    /// Something has come from the other end: if that shows itself on the page, it has it.
    fn note_page(&self, page: &LinkPage) {
        if self.offers_page.load(Ordering::Relaxed) && page.accepted_there() != 0 {
            self.offers_page.store(false, Ordering::SeqCst);
            lock(&self.page_memory).take();
        }
    }

    /// Shows the other end from now on how far this one is.
    pub(crate) fn set_page(&self, page: LinkPage) {
        // Under the lock: what is accepted from now on is shown by whoever accepts it.
        let tx = lock(&self.tx);
        self.page.get_or_init(|| page).accept(tx.seq);
    }

    /// Whether it has one.
    pub(crate) fn has_page(&self) -> bool {
        self.page.get().is_some()
    }

    /// Whether the other end has handed on all that this one has accepted. False if nobody can tell.
    pub(crate) fn is_handed_on(&self) -> bool {
        self.page.get().is_some_and(LinkPage::is_handed_on)
    }

    /// Starts to watch it.
    pub(crate) fn register(&self, reactor: &Reactor) -> Result<(), RuntimeError> {
        reactor.add(self.fd.as_fd(), u64::from(self.id))
    }

    /// Whether it is read when something comes.
    pub(crate) fn reads(&self) -> bool {
        self.reads.load(Ordering::SeqCst)
    }

    /// Reads nothing more.
    pub(crate) fn stop_reading(&self, reactor: &Reactor) {
        // Under the lock, which orders it with changes of what is watched for writing.
        let tx = lock(&self.tx);
        self.reads.store(false, Ordering::SeqCst);
        self.watch_as(reactor, tx.watching);
    }

    fn watch_as(&self, reactor: &Reactor, write: bool) {
        reactor.watch_ways(self.fd.as_fd(), u64::from(self.id), self.reads(), write);
    }

    /// Bytes that are queued.
    pub(crate) fn queued(&self) -> usize {
        lock(&self.tx).waiting()
    }

    /// Writes a frame if the socket has room, otherwise queues it. Returns how many bytes are now queued, or `None` if
    /// the link is closed.
    pub(crate) fn send(&self, reactor: &Reactor, frame: &Frame) -> Option<usize> {
        let mut tx = lock(&self.tx);
        if tx.closed {
            return None;
        }
        let head = self.accept(&mut tx, frame, now()).encode();
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
            tx.queue.push_back(Chunk::plain(body.slice(done - HEADER_LEN..)));
        }
        if tx.tail.len() >= CHUNK {
            tx.close_tail();
        }
        if tx.holds == 0 {
            if tx.rests {
                self.write_out(reactor, &mut tx);
            } else {
                self.watch(reactor, &mut tx);
            }
        }
        Some(tx.queued)
    }

    /// Accepts a short frame that is to be written a moment later, with others, unless it must not wait for that. The caller
    /// has [`Link::write_bundle`] called in time, and before anything that depends on the frame. `sent` is now.
    pub(crate) fn rest(&self, frame: &Frame, sent: u64) -> Rest {
        let mut tx = lock(&self.tx);
        let is_free = tx.rests || (tx.queued == 0 && tx.holds == 0);
        // Whoever has direct links waits for what was accepted.
        if !is_free || tx.closed || self.has_page() || frame.wire_len() > SMALL {
            return Rest::Refused;
        }
        let first = !tx.rests;
        if first {
            tx.rests = true;
            tx.rests_since = sent;
        }
        let head = self.accept(&mut tx, frame, sent).encode();
        tx.tail.extend_from_slice(&head);
        tx.tail.extend_from_slice(&frame.body);
        tx.queued += frame.wire_len();
        if tx.queued >= BUNDLE || sent.saturating_sub(tx.rests_since) >= LONGEST {
            Rest::Due
        } else {
            Rest::Begun { first }
        }
    }

    /// Writes what rests here. Without `more`, the rush seems to be over.
    pub(crate) fn write_bundle(&self, reactor: &Reactor, more: bool) {
        let mut tx = lock(&self.tx);
        if tx.rests && tx.holds == 0 {
            self.write_out(reactor, &mut tx);
            if !more && tx.tail.is_empty() {
                tx.tail = Vec::new();
            }
        }
    }

    /// Accepts a frame: from now on the other end knows of it, and waits for it before it takes what is younger.
    fn accept(&self, tx: &mut Tx, frame: &Frame, sent: u64) -> Header {
        let mut header = frame.header;
        header.seq = tx.seq;
        header.sent = sent;
        tx.seq = tx.seq.wrapping_add(1);
        if let Some(page) = self.page.get() {
            page.accept(tx.seq);
        }
        header
    }

    /// Sends a short frame and descriptors with it, behind what waits. The peer gets the frame alone if the system cannot
    /// send descriptors at the moment.
    pub(crate) fn send_with(&self, reactor: &Reactor, frame: &Frame, with: Vec<OwnedFd>) {
        let mut tx = lock(&self.tx);
        if tx.closed {
            return;
        }
        let head = self.accept(&mut tx, frame, now()).encode();
        tx.close_tail();
        let bytes = Bytes::from([&head, &frame.body[..]].concat());
        tx.queued += bytes.len();
        tx.queue.push_back(Chunk { bytes, with });
        if tx.holds == 0 {
            self.write_out(reactor, &mut tx);
        }
    }

    /// Writes the queue, and leaves what the socket does not take to the thread that polls it.
    fn write_out(&self, reactor: &Reactor, tx: &mut Tx) {
        self.write_queue(reactor, tx);
        if tx.queued > 0 {
            self.watch(reactor, tx);
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

    /// Writes bytes with descriptors, which are gone with the first of them.
    fn write_with(&self, bytes: &[u8], with: &mut Vec<OwnedFd>) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = with.iter().map(AsFd::as_fd).collect();
        message.push(SendAncillaryMessage::ScmRights(&descriptors));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut message, flags) {
            Ok(n) => {
                with.clear();
                Ok(n)
            }
            Err(errno) if would_block(errno) => Ok(0),
            Err(Errno::TOOMANYREFS | Errno::NOMEM | Errno::NOBUFS) => {
                with.clear();
                self.write(&[IoSlice::new(bytes)])
            }
            Err(errno) => Err(errno),
        }
    }

    /// Writes as much of the queue as the socket takes.
    pub(crate) fn flush(&self, reactor: &Reactor) {
        let mut tx = lock(&self.tx);
        if tx.holds == 0 {
            self.write_out(reactor, &mut tx);
        }
    }

    fn write_queue(&self, reactor: &Reactor, tx: &mut Tx) {
        if tx.queue.is_empty() && !tx.tail.is_empty() {
            // Usually all that there is, and taken as a whole: then the buffer is used again.
            match self.write(&[IoSlice::new(&tx.tail)]) {
                Ok(n) => {
                    tx.tail.drain(..n);
                    tx.queued -= n;
                    if tx.tail.is_empty() && tx.tail.capacity() > 2 * BUNDLE {
                        tx.tail = Vec::new();
                    }
                }
                Err(errno) => {
                    self.broken(reactor, tx, errno);
                    return;
                }
            }
        }
        tx.rests = false;
        tx.close_tail();
        while tx.queued > 0 && !tx.closed {
            let (asked, written) = match tx.queue.front_mut() {
                Some(Chunk { bytes, with }) if !with.is_empty() => (bytes.len(), self.write_with(bytes, with)),
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

    /// Writes the first chunks, up to one with descriptors. Returns how many bytes they have, and how many were written.
    fn write_plain(&self, tx: &Tx) -> (usize, Result<usize, Errno>) {
        let skip = tx.written;
        let plain = tx.queue.iter().take(IOV).take_while(|chunk| chunk.with.is_empty());
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
            .wait_timeout_while(tx, limit, |tx| tx.waiting() > budget && !tx.closed)
            .unwrap_or_else(PoisonError::into_inner);
        tx.waiting() <= budget || tx.closed
    }

    // Messages in.

    /// Reads what arrived and passes every frame to `take`.
    pub(crate) fn read(&self, mut take: impl FnMut(Frame)) -> ReadEnd {
        let mut rx = lock(&self.rx);
        let mut total = 0;
        loop {
            let (n, asked) = match rx.receive(self.fd.as_fd(), self.came_with.as_ref()) {
                Ok(Some(read)) => read,
                Ok(None) => return ReadEnd::Drained,
                Err(why) => return ReadEnd::Closed(why),
            };
            loop {
                match rx.next_frame() {
                    Ok(Some(frame)) => {
                        let count = frame.header.seq.wrapping_add(1);
                        take(frame);
                        if let Some(page) = self.page.get() {
                            page.hand_on(count);
                            self.note_page(page);
                            if self.came_with.is_some() {
                                return ReadEnd::HasPage;
                            }
                        }
                    }
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

    /// A poll has said that something can be read.
    pub(crate) fn note_readable(&self) {
        self.is_readable.store(true, Ordering::SeqCst);
    }

    /// Looks how much the other end has accepted until now, and reads what has come of it. It is kept for [`Link::take`].
    pub(crate) fn look(&self, reactor: &Reactor) -> Incoming {
        let accepted = self.page.get().map(LinkPage::accepted_there);
        let readable = self.is_readable.swap(false, Ordering::SeqCst);
        let mut rx = lock(&self.rx);
        let incoming = rx.look(self.fd.as_fd(), self.came_with.as_ref(), accepted, readable);
        if readable && rx.has_end() {
            // There is nothing more to be told of, while what came before waits for something older.
            reactor.watch_ways(self.fd.as_fd(), u64::from(self.id), false, lock(&self.tx).watching);
        }
        incoming
    }

    /// What is here of this way, and what may still come.
    pub(crate) fn incoming(&self) -> Incoming {
        lock(&self.rx).incoming()
    }

    /// How many bytes have come of what this end waits for; none if it waits for nothing.
    pub(crate) fn behind(&self) -> Option<u64> {
        lock(&self.rx).behind()
    }

    /// The other end stands still: it is not waited for until all is here that it has accepted by now.
    pub(crate) fn give_up(&self) {
        let accepted = self.page.get().map(LinkPage::accepted_there);
        lock(&self.rx).give_up(accepted);
    }

    /// The frame that was looked at last.
    pub(crate) fn take(&self) -> Option<Frame> {
        lock(&self.rx).take()
    }

    /// Why nothing more comes, once all that came was taken.
    pub(crate) fn take_end(&self) -> Option<EndReason> {
        lock(&self.rx).take_end()
    }

    // Ends.

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
            self.link.write_out(&self.reactor, &mut tx);
        }
    }
}

impl Chunk {
    fn plain(bytes: Bytes) -> Self {
        Self { bytes, with: Vec::new() }
    }
}

impl Tx {
    /// Bytes for which the socket has no room.
    fn waiting(&self) -> usize {
        if self.rests { 0 } else { self.queued }
    }

    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            self.queue.push_back(Chunk::plain(std::mem::take(&mut self.tail).into()));
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
        self.rests = false;
    }
}
