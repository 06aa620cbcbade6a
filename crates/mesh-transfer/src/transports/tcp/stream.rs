//! A connection, with the reads and writes that both ends need: into and out of lists of pieces.

use crate::segments::Segment;
use rustix::event::PollFlags;
use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

const AHEAD: usize = 16 * 1024;
/// Pieces in one call.
const BATCH: usize = 256;

/// Called where a socket has nothing to read, or no room to write: waits until it has, or says why not to go on.
pub(super) type Wait<'a> = &'a dyn Fn(PollFlags) -> io::Result<()>;

/// Of a socket that blocks: the time that it was given is over.
pub(super) fn is_late(_: PollFlags) -> io::Result<()> {
    Err(ErrorKind::TimedOut.into())
}

/// Reads exactly as much as is asked for. What comes with it is kept for the next read.
#[derive(Debug)]
pub(super) struct Incoming {
    stream: Arc<TcpStream>,
    ahead: Box<[u8]>,
    at: usize,
    end: usize,
}

impl Incoming {
    pub(super) fn new(stream: Arc<TcpStream>) -> Self {
        Self { stream, ahead: vec![0; AHEAD].into(), at: 0, end: 0 }
    }

    /// Whether so many bytes are here already.
    pub(super) fn has(&self, len: usize) -> bool {
        self.end - self.at >= len
    }

    /// Fills `into`, or says that the connection has ended.
    pub(super) fn exactly(&mut self, into: &mut [u8], wait: Wait<'_>) -> io::Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            if self.at == self.end {
                self.at = 0;
                self.end = 0;
                let read = retry(wait, PollFlags::IN, || {
                    // SAFETY: into a buffer of this length.
                    unsafe { libc::recv(self.stream.as_raw_fd(), self.ahead.as_mut_ptr().cast(), AHEAD, 0) }
                })?;
                if read == 0 {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
                self.end = read;
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
            // SAFETY: as the caller vouches; the list lives throughout the call.
            let read = retry(wait, PollFlags::IN, || unsafe {
                libc::readv(self.stream.as_raw_fd(), rest.as_ptr(), i32::try_from(rest.len()).unwrap_or(i32::MAX))
            })?;
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            rest = advance(rest, read);
        }
        list.clear();
        Ok(())
    }

    /// Reads and forgets so many bytes.
    pub(super) fn skip(&mut self, mut len: u64, wait: Wait<'_>) -> io::Result<()> {
        let mut dropped = [0; 4096];
        while len > 0 {
            let step = dropped.len().min(usize::try_from(len).unwrap_or(usize::MAX));
            self.exactly(&mut dropped[..step], wait)?;
            len -= step as u64;
        }
        Ok(())
    }
}

/// Sends these pieces of memory.
///
/// # Safety
/// They must be readable memory of this process.
pub(super) unsafe fn send(stream: &TcpStream, list: &mut [libc::iovec], wait: Wait<'_>) -> io::Result<()> {
    let mut rest = advance(list, 0);
    while !rest.is_empty() {
        // SAFETY: a header of plain numbers and pointers, for which zeros are valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = rest.as_mut_ptr();
        header.msg_iovlen = rest.len().min(BATCH) as _;
        // SAFETY: as the caller vouches; header and list live throughout the call.
        let sent = retry(wait, PollFlags::OUT, || unsafe {
            libc::sendmsg(stream.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL)
        })?;
        rest = advance(rest, sent);
    }
    Ok(())
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

/// Ours, to be sent.
pub(super) fn bytes(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}
