//! Bytes of a link becoming frames.
//!
//! LNK-1: the frames of a link are numbered, and a lost or repeated frame ends the link.

use crate::{Frame, FrameError, HEADER_LEN, Header};
use bytes::Bytes;

/// How much a link asks its socket for at a time, and how far the buffer grows ahead of what has arrived.
pub const READ_CHUNK: usize = 64 * 1024;

/// Cuts what a link has read into frames.
///
/// The buffer never runs ahead of the bytes that really arrived by more than they are themselves (plus one
/// [`READ_CHUNK`]), whatever length a header claims.
///
/// ```
/// # use mesh_proto::{Decoder, Frame, Header, Kind, ProcAddr};
/// let me = ProcAddr::CONTROLLER;
/// let frame = Frame::build(Header::new(Kind::Hello, me, me), None, b"", &[]);
/// let mut decoder = Decoder::default();
/// decoder.push(&frame.header.encode());
/// assert_eq!(decoder.next_frame().unwrap(), Some(frame));
/// assert_eq!(decoder.next_frame().unwrap(), None);
/// ```
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Where the first unread byte is, and where the arrived bytes end.
    start: usize,
    end: usize,
    /// The header of the incomplete frame, so that it is not decoded again with every read of a long body.
    header: Option<Header>,
    due: u32,
}

impl Decoder {
    /// Room to read into; [`Decoder::filled`] says how much of it was used.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            if self.buffer.len() > 4 * READ_CHUNK {
                self.buffer = Vec::new();
            }
        }
        let have = self.end - self.start;
        let missing = match self.header {
            Some(header) => usize::try_from(header.body_len).unwrap_or(usize::MAX).saturating_sub(have),
            None => 0,
        };
        let want = missing.min(have).max(READ_CHUNK);
        if self.buffer.len() - self.end < want {
            self.buffer.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = have;
            if self.buffer.len() < have + want {
                // Exactly: the vector's own growth would go beyond what has arrived.
                self.buffer.reserve_exact(have + want - self.buffer.len());
                self.buffer.resize(have + want, 0);
            }
        }
        &mut self.buffer[self.end..]
    }

    /// `n` bytes of [`Decoder::room`] were written.
    ///
    /// # Panics
    /// If there was no such room.
    pub fn filled(&mut self, n: usize) {
        assert!(self.end + n <= self.buffer.len(), "more bytes than there was room for");
        self.end += n;
    }

    /// Appends bytes: what [`Decoder::room`] and [`Decoder::filled`] do without the copy.
    pub fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = self.room();
            let n = room.len().min(bytes.len());
            room[..n].copy_from_slice(&bytes[..n]);
            self.filled(n);
            bytes = &bytes[n..];
        }
    }

    /// How many frames there were; after the last number it begins anew.
    #[must_use]
    pub fn due(&self) -> u32 {
        self.due
    }

    /// The next whole frame, if it has arrived.
    ///
    /// # Errors
    /// If the bytes are no frame, or not the frame that is due (LNK-1). Nothing after an error can be trusted.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let header = match self.header {
            Some(header) => header,
            None => {
                let Some(raw) = self.buffer[self.start..self.end].first_chunk::<HEADER_LEN>() else {
                    return Ok(None);
                };
                let header = Header::decode(raw)?;
                if header.seq != self.due {
                    return Err(FrameError::Sequence { expected: self.due, got: header.seq });
                }
                self.start += HEADER_LEN;
                self.header = Some(header);
                header
            }
        };
        let have = self.end - self.start;
        if (have as u64) < header.body_len {
            return Ok(None);
        }
        let len = header.body_len as usize;
        let body = if len > READ_CHUNK && self.start == 0 && have == len {
            // A long body that fills the buffer exactly is handed over instead of copied.
            let mut whole = std::mem::take(&mut self.buffer);
            whole.truncate(len);
            self.end = 0;
            Bytes::from(whole)
        } else {
            let body = Bytes::copy_from_slice(&self.buffer[self.start..self.start + len]);
            self.start += len;
            body
        };
        self.header = None;
        self.due = self.due.wrapping_add(1);
        Ok(Some(Frame { header, body }))
    }

    /// Bytes that have arrived but do not make a whole frame yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.end - self.start
    }

    /// Bytes of memory that the decoder holds.
    #[must_use]
    pub fn held(&self) -> usize {
        self.buffer.capacity()
    }
}
