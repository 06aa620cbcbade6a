//! The two halves of an encrypted connection after its handshake: one thread may read while another writes.

use super::error::{Alerted, Reason, TlsError};
use super::facts::PeerFacts;
use super::record::{self, HEAD, Kernel, MOST_PLAIN, MOST_RECORD, Opened, Opener, Sealer, Truncated};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use rustls::ExtractedSecrets;
use rustls::crypto::cipher::OutboundChunks;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The most ciphertext that waits for the socket; beyond that nothing more is accepted.
pub const MOST_QUEUED: usize = 256 * 1024;
/// How much is encrypted between sends. Each send passes through all of TCP and may wake the peer, which costs more
/// than encrypting a record; a larger batch would leave the peer idle meanwhile, and overflow the caches.
const BATCH: usize = 128 * 1024;
const IOV: usize = 32;
/// The size of a read buffer: small at first, larger once a read fills it.
const FEW: usize = 2 * MOST_RECORD;
const MANY: usize = 16 * MOST_RECORD;

/// Sent by a server, in a separate record, to a client that it admits: name and version of what follows.
pub(crate) const GREETING: &[u8; 6] = b"mesh/1";

pub(crate) fn would_block(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

pub(crate) fn receive(fd: &OwnedFd, room: &mut [u8]) -> io::Result<usize> {
    loop {
        match recv(fd, &mut *room, RecvFlags::DONTWAIT) {
            Ok((n, _)) => return Ok(n),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

pub(crate) fn send(fd: &OwnedFd, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(fd, slices, &mut SendAncillaryBuffer::default(), flags) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return sent.map_err(Into::into),
        }
    }
}

/// What the two halves share.
struct Shared {
    fd: Arc<OwnedFd>,
    /// Locked only for key updates.
    kernel: Mutex<Kernel>,
    /// The reader was told that the writer must change its key.
    update_wanted: AtomicBool,
    peer: PeerFacts,
}

/// A new connection.
pub(crate) struct Made {
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) kernel: Kernel,
    pub(crate) secrets: ExtractedSecrets,
    pub(crate) peer: PeerFacts,
}

impl Made {
    /// Its two halves. `rest` is ciphertext, and `early` plaintext, that came after the handshake.
    pub(crate) fn halves(self, server: bool, rest: Vec<u8>, early: Vec<u8>) -> io::Result<(TlsReader, TlsWriter)> {
        let (sealer, opener) = record::open(&self.kernel, self.secrets)?;
        let shared = Arc::new(Shared {
            fd: self.fd,
            kernel: Mutex::new(self.kernel),
            update_wanted: AtomicBool::new(false),
            peer: self.peer,
        });
        let writer = TlsWriter::new(Arc::clone(&shared), sealer);
        let mut reader = TlsReader::new(shared, opener, rest, early);
        if server {
            reader.greeting = GREETING.len();
        }
        Ok((reader, writer))
    }
}

/// The reading half of a connection.
pub struct TlsReader {
    shared: Arc<Shared>,
    opener: Opener,
    buffer: Vec<u8>,
    /// The part of `buffer` with ciphertext not yet opened.
    cipher: Range<usize>,
    /// The part of `buffer` with plaintext not yet taken.
    plain: Range<usize>,
    /// Plaintext that came with the handshake, taken before anything else.
    early: Vec<u8>,
    /// How much of the greeting was seen.
    greeting: usize,
    /// The last read did not fill its room: the socket is empty and need not be read again.
    dry: bool,
    /// Why nothing can be read any more.
    ended: Option<(io::ErrorKind, String)>,
}

impl std::fmt::Debug for TlsReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsReader").field("peer", &self.shared.peer).finish_non_exhaustive()
    }
}

impl TlsReader {
    fn new(shared: Arc<Shared>, opener: Opener, rest: Vec<u8>, early: Vec<u8>) -> Self {
        let cipher = 0..rest.len();
        let mut buffer = rest;
        buffer.resize(FEW.max(cipher.end), 0);
        Self { shared, opener, buffer, cipher, plain: 0..0, early, greeting: 0, dry: false, ended: None }
    }

    /// The descriptor, to wait until it is readable.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.fd.as_fd()
    }

    /// The peer.
    #[must_use]
    pub fn peer(&self) -> &PeerFacts {
        &self.shared.peer
    }

    /// Whether the greeting has arrived, which tells a client that it was admitted.
    pub(crate) fn greeted(&mut self) -> Result<bool, TlsError> {
        while self.greeting < GREETING.len() {
            let mut byte = [0];
            match self.read(&mut byte) {
                Ok(0) => return Err(Reason::Left.into()),
                Ok(_) if byte[0] == GREETING[self.greeting] => self.greeting += 1,
                Ok(_) => return Err(Reason::NotTls("it does not greet as Mesh does".to_owned()).into()),
                Err(error) if would_block(&error) => return Ok(false),
                Err(error) => {
                    if let Some(alerted) = error.get_ref().and_then(|error| error.downcast_ref::<Alerted>()) {
                        return Err(alerted.reason().into());
                    }
                    return Err(match error.kind() {
                        io::ErrorKind::UnexpectedEof
                        | io::ErrorKind::ConnectionReset
                        | io::ErrorKind::ConnectionAborted => Reason::Left.into(),
                        _ => error.into(),
                    });
                }
            }
        }
        Ok(true)
    }

    /// Reads plaintext until `buf` is full or nothing more has arrived: fewer bytes than asked for mean that the socket
    /// was empty a moment ago. 0 means that the peer has announced the end.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if nothing has arrived; [`UnexpectedEof`](io::ErrorKind::UnexpectedEof)
    /// with [`Truncated`] if the connection ended without a farewell; [`ConnectionAborted`](io::ErrorKind::ConnectionAborted)
    /// if the peer ended it for a reason; [`InvalidData`](io::ErrorKind::InvalidData) if it was tampered with.
    pub fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        self.dry = false;
        while filled < buf.len() {
            if !self.early.is_empty() {
                let n = self.early.len().min(buf.len() - filled);
                buf[filled..filled + n].copy_from_slice(&self.early[..n]);
                self.early.drain(..n);
                filled += n;
                continue;
            }
            match self.next() {
                Ok(None) => return Ok(filled),
                Ok(Some(range)) => {
                    let n = range.len().min(buf.len() - filled);
                    buf[filled..filled + n].copy_from_slice(&self.buffer[range.start..range.start + n]);
                    self.plain.start += n;
                    filled += n;
                }
                // Deliver what came before the error; the next call reports it.
                Err(_) if filled > 0 => return Ok(filled),
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    /// Passes plaintext to `take` in place, record by record, until nothing more has arrived or at least `enough` bytes
    /// were taken. Returns their number; 0 means that the peer has announced the end.
    ///
    /// # Errors
    /// As [`TlsReader::read`].
    pub fn read_with(&mut self, enough: usize, mut take: impl FnMut(&[u8])) -> io::Result<usize> {
        let mut taken = self.early.len();
        self.dry = false;
        if taken > 0 {
            take(&self.early);
            self.early = Vec::new();
        }
        while taken < enough {
            match self.next() {
                Ok(None) => break,
                Ok(Some(range)) => {
                    take(&self.buffer[range.clone()]);
                    self.plain.start = range.end;
                    taken += range.len();
                }
                Err(_) if taken > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(taken)
    }

    /// Where the next plaintext is; none at the end.
    fn next(&mut self) -> io::Result<Option<Range<usize>>> {
        if !self.plain.is_empty() {
            return Ok(Some(self.plain.clone()));
        }
        if let Some((kind, why)) = &self.ended {
            return Err(match kind {
                io::ErrorKind::UnexpectedEof => io::Error::new(*kind, Truncated),
                kind => io::Error::new(*kind, why.clone()),
            });
        }
        if self.opener.closed() {
            return Ok(None);
        }
        let next = self.open_next();
        if let Err(error) = &next
            && !would_block(error)
        {
            self.ended = Some((error.kind(), error.to_string()));
        }
        next
    }

    fn open_next(&mut self) -> io::Result<Option<Range<usize>>> {
        loop {
            let waiting = &self.buffer[self.cipher.clone()];
            match record::record_len(waiting)? {
                Some(len) if len <= waiting.len() => {
                    let start = self.cipher.start;
                    self.cipher.start += len;
                    let record = &mut self.buffer[start..start + len];
                    match self.opener.open(record, &self.shared.kernel)? {
                        Opened::Data(range) => {
                            self.plain = start + range.start..start + range.end;
                            return Ok(Some(self.plain.clone()));
                        }
                        Opened::Nothing => {}
                        Opened::UpdateWanted => self.shared.update_wanted.store(true, Ordering::Release),
                        Opened::Farewell => return Ok(None),
                    }
                }
                _ => self.fill()?,
            }
        }
    }

    /// Receives more ciphertext. Fails with `WouldBlock` if there is none, or the last read emptied the socket.
    fn fill(&mut self) -> io::Result<()> {
        if self.cipher.is_empty() {
            self.cipher = 0..0;
        } else if self.buffer.len() - self.cipher.start < MOST_RECORD {
            self.buffer.copy_within(self.cipher.clone(), 0);
            self.cipher = 0..self.cipher.len();
        }
        if self.dry {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let room = self.buffer.len() - self.cipher.end;
        let n = match receive(&self.shared.fd, &mut self.buffer[self.cipher.end..])? {
            0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, Truncated)),
            n => n,
        };
        self.cipher.end += n;
        self.dry = n < room;
        if n == room && self.buffer.len() < MANY {
            self.buffer.resize(MANY, 0);
        }
        Ok(())
    }
}

/// The writing half of a connection.
pub struct TlsWriter {
    shared: Arc<Shared>,
    sealer: Sealer,
    /// Records that the socket has not taken yet.
    queue: VecDeque<Vec<u8>>,
    /// How much of the first was sent.
    sent: usize,
    queued: usize,
    closed: bool,
}

impl std::fmt::Debug for TlsWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsWriter")
            .field("queued", &self.queued)
            .field("peer", &self.shared.peer)
            .finish_non_exhaustive()
    }
}

impl TlsWriter {
    fn new(shared: Arc<Shared>, sealer: Sealer) -> Self {
        Self { shared, sealer, queue: VecDeque::new(), sent: 0, queued: 0, closed: false }
    }

    /// The descriptor, to wait until it is writable.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.fd.as_fd()
    }

    /// The peer.
    #[must_use]
    pub fn peer(&self) -> &PeerFacts {
        &self.shared.peer
    }

    /// Encrypts plaintext and sends what the socket takes at once. The rest waits for [`TlsWriter::flush`]: at most
    /// [`MOST_QUEUED`] bytes and a record. Returns how much was taken.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if nothing was taken because enough waits already; any other if the
    /// connection broke.
    pub fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.closed {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "this side has ended the connection"));
        }
        let asked: usize = slices.iter().map(|slice| slice.len()).sum();
        let mut rest = slices;
        let mut skip = 0;
        let mut taken = 0;
        let mut full = self.queued > 0 && !self.flush()?;
        while taken < asked && self.queued < MOST_QUEUED {
            self.change_key()?;
            let mut chunks = [&[][..]; IOV];
            let (mut n, mut len) = (0, 0);
            while n < IOV
                && len < MOST_PLAIN
                && let Some(slice) = rest.first()
            {
                let part = &slice[skip..];
                let fits = part.len().min(MOST_PLAIN - len);
                (chunks[n], len) = (&part[..fits], len + fits);
                n += usize::from(fits > 0);
                if fits == part.len() {
                    (rest, skip) = (&rest[1..], 0);
                } else {
                    skip += fits;
                }
            }
            let record = self.sealer.data(OutboundChunks::new(&chunks[..n]))?;
            self.push(record);
            taken += len;
            if !full && self.queued >= BATCH {
                full = !self.flush()?;
            }
        }
        if !full && self.queued > 0 {
            self.flush()?;
        }
        if taken == 0 && asked > 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(taken) }
    }

    fn change_key(&mut self) -> io::Result<()> {
        let wanted = self.shared.update_wanted.load(Ordering::Relaxed)
            && self.shared.update_wanted.swap(false, Ordering::AcqRel);
        if wanted || self.sealer.worn() {
            let mut kernel = self.shared.kernel.lock().unwrap_or_else(PoisonError::into_inner);
            let record = self.sealer.update(&mut kernel, false)?;
            drop(kernel);
            self.push(record);
        }
        Ok(())
    }

    fn push(&mut self, record: Vec<u8>) {
        self.queued += record.len();
        self.queue.push_back(record);
    }

    /// Sends as much of the queue as the socket takes. Returns whether that was all.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn flush(&mut self) -> io::Result<bool> {
        while self.queued > 0 {
            let mut slices = [IoSlice::new(&[]); IOV];
            let mut n = 0;
            for (slice, record) in slices.iter_mut().zip(&self.queue) {
                *slice = IoSlice::new(if n == 0 { &record[self.sent..] } else { record });
                n += 1;
            }
            match send(&self.shared.fd, &slices[..n]) {
                Ok(n) => self.consume(n),
                Err(error) if would_block(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn consume(&mut self, mut n: usize) {
        self.queued -= n;
        while let Some(first) = self.queue.front() {
            let left = first.len() - self.sent;
            if n < left {
                self.sent += n;
                return;
            }
            n -= left;
            self.sent = 0;
            self.queue.pop_front();
        }
    }

    /// How many bytes of ciphertext wait for [`TlsWriter::flush`].
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Whether anything waits for [`TlsWriter::flush`].
    #[must_use]
    pub fn wants_write(&self) -> bool {
        self.queued > 0
    }

    /// Announces the end to the peer, after what is queued. The peer reads everything and then 0.
    pub fn close_notify(&mut self) {
        if !self.closed {
            self.closed = true;
            if let Ok(record) = self.sealer.close_notify() {
                self.push(record);
                // The caller flushes what the socket does not take; a broken connection needs no farewell.
                let _ = self.flush();
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn sealer(&mut self) -> &mut Sealer {
        &mut self.sealer
    }

    #[cfg(test)]
    pub(crate) fn update_and_ask(&mut self) -> io::Result<Vec<u8>> {
        self.sealer.update(&mut self.shared.kernel.lock().unwrap(), true)
    }

    #[cfg(test)]
    pub(crate) fn push_raw(&mut self, record: Vec<u8>) -> io::Result<bool> {
        self.push(record);
        self.flush()
    }
}

const _: () = assert!(FEW >= MOST_RECORD + HEAD);
