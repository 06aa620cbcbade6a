//! A connection that reads into, and writes from, lists of pieces. Users need not know whether it is encrypted, except
//! that an encrypted one does not block.

use super::sockets::{Listed, Sockets};
use crate::segments::Segment;
use crate::watch::timespec;
use mesh_tls::{TlsReader, TlsWriter};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, ErrorKind, IoSlice};
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::Duration;

const AHEAD: usize = 16 * 1024;
/// The most pieces in one call.
const BATCH: usize = 256;

/// Called when a socket has nothing to read, or no room to write: waits until it has, or fails to stop the caller.
pub(super) type Wait<'a> = &'a dyn Fn(PollFlags) -> io::Result<()>;

/// The [`Wait`] of a blocking socket: its time is over.
pub(super) fn is_late(_: PollFlags) -> io::Result<()> {
    Err(ErrorKind::TimedOut.into())
}

/// How long the other end may take, for blocking and non-blocking sockets.
pub(super) struct Patience {
    socket: Arc<TcpStream>,
    blocks: bool,
    read: Option<Duration>,
    write: Duration,
}

impl Patience {
    pub(super) fn new(wire: &Wire, write: Duration) -> io::Result<Self> {
        let (socket, blocks) = (Arc::clone(&wire.socket), wire.tls.is_none());
        socket.set_write_timeout(Some(write))?;
        Ok(Self { socket, blocks, read: None, write })
    }

    /// The limit for each read from now on; none for no limit.
    pub(super) fn set_read(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.read = limit;
        if self.blocks { self.socket.set_read_timeout(limit) } else { Ok(()) }
    }

    /// The limit for each write from now on.
    pub(super) fn set_write(&mut self, limit: Duration) -> io::Result<()> {
        self.write = limit;
        self.socket.set_write_timeout(Some(limit))
    }

    pub(super) fn wait(&self, flags: PollFlags) -> io::Result<()> {
        if self.blocks {
            return is_late(flags);
        }
        let limit = if flags == PollFlags::OUT { Some(self.write) } else { self.read };
        let limit = limit.map(timespec);
        match poll(&mut [PollFd::new(&*self.socket, flags)], limit.as_ref()) {
            Ok(0) => Err(ErrorKind::TimedOut.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// A connection. Reads return exactly as much as was asked for; surplus bytes are kept for the next read.
#[derive(Debug)]
pub(super) struct Wire {
    /// First, since fields are dropped in order.
    _listed: Listed,
    socket: Arc<TcpStream>,
    tls: Option<Box<(TlsReader, TlsWriter)>>,
    ahead: Box<[u8]>,
    at: usize,
    end: usize,
}

impl Wire {
    pub(super) fn plain(socket: Arc<TcpStream>, sockets: &Sockets) -> Self {
        let _listed = sockets.list([socket.as_raw_fd()]);
        Self { _listed, socket, tls: None, ahead: vec![0; AHEAD].into(), at: 0, end: 0 }
    }

    /// `socket` is the halves' socket, which does not block.
    pub(super) fn sealed(socket: Arc<TcpStream>, halves: (TlsReader, TlsWriter), sockets: &Sockets) -> Self {
        let _listed = sockets.list([socket.as_raw_fd(), halves.0.as_fd().as_raw_fd()]);
        Self { _listed, tls: Some(Box::new(halves)), ..Self::plain(socket, sockets) }
    }

    pub(super) fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Whether this many bytes are buffered.
    pub(super) fn has(&self, len: usize) -> bool {
        self.end - self.at >= len
    }

    /// Whether it is open and nothing has arrived unasked; for non-blocking sockets.
    pub(super) fn is_sound(&self) -> bool {
        match self.socket.peek(&mut [0]) {
            Err(error) => error.kind() == ErrorKind::WouldBlock && !self.has(1),
            Ok(_) => false,
        }
    }

    /// Reads what is there, at least one byte.
    fn look_ahead(&mut self, wait: Wait<'_>) -> io::Result<()> {
        (self.at, self.end) = (0, 0);
        let read = match &mut self.tls {
            Some(halves) => loop {
                match halves.0.read(&mut self.ahead) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => wait(PollFlags::IN)?,
                    read => break read?,
                }
            },
            None => retry(wait, PollFlags::IN, || {
                // SAFETY: into a buffer of this length.
                unsafe { libc::recv(self.socket.as_raw_fd(), self.ahead.as_mut_ptr().cast(), AHEAD, 0) }
            })?,
        };
        if read == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.end = read;
        Ok(())
    }

    /// Fills `into`, or fails if the connection has ended.
    pub(super) fn exactly(&mut self, into: &mut [u8], wait: Wait<'_>) -> io::Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            if self.at == self.end {
                self.look_ahead(wait)?;
            }
            let step = (into.len() - filled).min(self.end - self.at);
            into[filled..filled + step].copy_from_slice(&self.ahead[self.at..self.at + step]);
            filled += step;
            self.at += step;
        }
        Ok(())
    }

    /// Fills these pieces of memory.
    ///
    /// # Safety
    /// They must be writable memory of this process.
    pub(super) unsafe fn pieces(&mut self, pieces: impl Iterator<Item = Segment>, wait: Wait<'_>) -> io::Result<()> {
        let mut list: Vec<libc::iovec> = Vec::new();
        for mut piece in pieces {
            let step = (self.end - self.at).min(piece.len as usize);
            // SAFETY: as the caller vouches; the source is this buffer's own.
            unsafe { std::ptr::copy(self.ahead.as_ptr().add(self.at), piece.addr as *mut u8, step) };
            self.at += step;
            piece.addr += step as u64;
            piece.len -= step as u64;
            if piece.len > 0 {
                list.push(libc::iovec { iov_base: piece.addr as *mut libc::c_void, iov_len: piece.len as usize });
            }
            if list.len() == BATCH {
                // SAFETY: as the caller vouches.
                unsafe { self.fill(&mut list, wait)? };
            }
        }
        // SAFETY: as the caller vouches.
        unsafe { self.fill(&mut list, wait) }
    }

    /// # Safety
    /// As for [`Self::pieces`].
    unsafe fn fill(&mut self, list: &mut Vec<libc::iovec>, wait: Wait<'_>) -> io::Result<()> {
        let mut rest = &mut list[..];
        while !rest.is_empty() {
            if let Some(halves) = &mut self.tls {
                let wanted = rest.iter().map(|piece| piece.iov_len).sum();
                // The buffer is empty, or it would have been used first.
                (self.at, self.end) = (0, 0);
                let (ahead, end) = (&mut self.ahead, &mut self.end);
                let read = halves.0.read_with(wanted, |mut bytes| {
                    while let (Some(piece), false) = (rest.first(), bytes.is_empty()) {
                        let step = piece.iov_len.min(bytes.len());
                        // SAFETY: as the caller vouches; the source is the connection's own.
                        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), piece.iov_base.cast(), step) };
                        bytes = &bytes[step..];
                        rest = advance(std::mem::take(&mut rest), step);
                    }
                    // The rest of the last record, if the pieces have no room for it.
                    ahead[*end..*end + bytes.len()].copy_from_slice(bytes);
                    *end += bytes.len();
                });
                match read {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => wait(PollFlags::IN)?,
                    read => drop(read?),
                }
                continue;
            }
            // SAFETY: as the caller vouches; the list lives throughout the call.
            let read = retry(wait, PollFlags::IN, || unsafe {
                libc::readv(self.socket.as_raw_fd(), rest.as_ptr(), i32::try_from(rest.len()).unwrap_or(i32::MAX))
            })?;
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            rest = advance(rest, read);
        }
        list.clear();
        Ok(())
    }

    /// Reads and discards this many bytes.
    pub(super) fn skip(&mut self, mut len: u64, wait: Wait<'_>) -> io::Result<()> {
        let mut dropped = [0; 4096];
        while len > 0 {
            let step = dropped.len().min(usize::try_from(len).unwrap_or(usize::MAX));
            self.exactly(&mut dropped[..step], wait)?;
            len -= step as u64;
        }
        Ok(())
    }

    /// Sends these pieces of memory.
    ///
    /// # Safety
    /// They must be readable memory of this process.
    pub(super) unsafe fn send(&mut self, list: &mut [libc::iovec], wait: Wait<'_>) -> io::Result<()> {
        let mut rest = advance(list, 0);
        if let Some(halves) = &mut self.tls {
            let pieces = rest.iter().filter(|piece| piece.iov_len > 0);
            // SAFETY: as the caller vouches; each byte is read once, when it is sealed.
            let slice = |piece: &libc::iovec| unsafe {
                IoSlice::new(std::slice::from_raw_parts(piece.iov_base.cast(), piece.iov_len))
            };
            let mut slices: Vec<IoSlice<'_>> = pieces.map(slice).collect();
            let mut rest = &mut slices[..];
            while !rest.is_empty() {
                match halves.1.write(rest) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => wait(PollFlags::OUT)?,
                    taken => IoSlice::advance_slices(&mut rest, taken?),
                }
            }
            return self.flush(wait);
        }
        while !rest.is_empty() {
            // SAFETY: a header of plain numbers and pointers, for which zeros are valid.
            let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
            header.msg_iov = rest.as_mut_ptr();
            header.msg_iovlen = rest.len().min(BATCH) as _;
            // SAFETY: as the caller vouches; header and list live throughout the call.
            let sent = retry(wait, PollFlags::OUT, || unsafe {
                libc::sendmsg(self.socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL)
            })?;
            rest = advance(rest, sent);
        }
        Ok(())
    }

    /// Sends what is sealed but not yet sent.
    pub(super) fn flush(&mut self, wait: Wait<'_>) -> io::Result<()> {
        while let Some(halves) = &mut self.tls
            && !halves.1.flush()?
        {
            wait(PollFlags::OUT)?;
        }
        Ok(())
    }
}

/// The list without its first `moved` bytes, and without empty pieces at its head.
fn advance(mut list: &mut [libc::iovec], mut moved: usize) -> &mut [libc::iovec] {
    while let Some(first) = list.first_mut() {
        if first.iov_len > moved {
            first.iov_base = first.iov_base.wrapping_byte_add(moved);
            first.iov_len -= moved;
            break;
        }
        moved -= first.iov_len;
        list = &mut list[1..];
    }
    list
}

fn retry(wait: Wait<'_>, flags: PollFlags, mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(count) => return Ok(count),
            Err(_) => {
                let error = io::Error::last_os_error();
                match error.kind() {
                    ErrorKind::Interrupted => {}
                    ErrorKind::WouldBlock => wait(flags)?,
                    _ => return Err(error),
                }
            }
        }
    }
}

pub(super) fn iovec(piece: Segment) -> libc::iovec {
    libc::iovec { iov_base: piece.addr as *mut libc::c_void, iov_len: piece.len as usize }
}

/// A piece for our own bytes, to send.
pub(super) fn bytes(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}
