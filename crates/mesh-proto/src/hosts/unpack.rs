//! Turns the bytes of a connection into packets.

use super::packet::{Head, PACKET_HEAD, Packet, PacketError};
use crate::READ_CHUNK;
use bytes::Bytes;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bodies up to this length are copied out of the buffer; longer ones are read straight to their final place.
const SMALL: usize = 4096;
/// Bodies from this length on are read into recycled buffers: fresh memory of that size comes zeroed from the system,
/// with a fault for every page.
const LONG: usize = 64 << 10;
/// How many unused buffers are kept.
const KEPT: usize = 4;

/// Unused buffers for long bodies.
#[derive(Debug, Default)]
struct BufferPool(Mutex<Vec<Vec<u8>>>);

impl BufferPool {
    fn lock(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        // A thread that panicked has at worst lost a buffer.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At least `len` bytes with arbitrary content.
    fn take(&self, len: usize) -> Vec<u8> {
        if len < LONG {
            return vec![0; len];
        }
        let kept = self.lock().pop().filter(|kept| kept.len() >= len);
        kept.unwrap_or_else(|| vec![0; len.next_multiple_of(LONG)])
    }

    fn put(&self, buffer: Vec<u8>) {
        let mut kept = self.lock();
        if buffer.len() >= LONG && kept.len() < KEPT {
            kept.push(buffer);
        }
    }
}

/// A long body. Its buffer returns to the pool when the last reference is dropped.
struct Lent {
    buffer: Vec<u8>,
    len: usize,
    pool: Arc<BufferPool>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.put(std::mem::take(&mut self.buffer));
    }
}

/// A packet whose body is arriving.
#[derive(Debug)]
struct Long {
    head: Head,
    /// As long as the body, or longer.
    buffer: Vec<u8>,
    have: usize,
}

impl Long {
    fn is_whole(&self) -> bool {
        self.have == self.head.body
    }
}

/// Cuts the bytes that a connection has read into packets.
///
/// Memory never exceeds what has arrived by more than one packet and one [`READ_CHUNK`], whatever a header claims, and
/// a long body is written once, where the runtime will pass it on from.
///
/// ```
/// # use mesh_proto::hosts::{Packet, PacketDecoder, PacketKind};
/// let ping = Packet::new(PacketKind::Ping, 3);
/// let mut decoder = PacketDecoder::default();
/// decoder.push(&ping.encode_head());
/// assert_eq!(decoder.next_packet().unwrap(), Some(ping));
/// assert_eq!(decoder.next_packet().unwrap(), None);
/// ```
#[derive(Debug, Default)]
pub struct PacketDecoder {
    buffer: Vec<u8>,
    /// The first unread byte, and the end of what has arrived.
    start: usize,
    end: usize,
    /// The header of the packet under way, until its runs have been read.
    head: Option<Head>,
    body: Option<Long>,
    pool: Arc<BufferPool>,
}

impl PacketDecoder {
    /// Room to read into; report to [`PacketDecoder::filled`] how much was used. All whole packets must be taken out
    /// first.
    pub fn room(&mut self) -> &mut [u8] {
        if let Some(long) = self.body.as_mut().filter(|long| !long.is_whole()) {
            return &mut long.buffer[long.have..long.head.body];
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.buffer.len() > READ_CHUNK {
                self.buffer = Vec::new();
            }
        }
        let have = self.end - self.start;
        // The runs of a packet to very many hosts may be longer than the buffer.
        let want = READ_CHUNK.max(self.head.as_ref().map_or(0, |head| head.runs_len() + SMALL));
        if self.buffer.len() < want {
            self.buffer.copy_within(self.start..self.end, 0);
            self.buffer.reserve_exact(want - self.buffer.len());
            self.buffer.resize(want, 0);
            (self.start, self.end) = (0, have);
        } else if self.end == self.buffer.len() || (have < PACKET_HEAD && self.start > self.buffer.len() / 2) {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, have);
        }
        &mut self.buffer[self.end..]
    }

    /// `n` bytes of [`PacketDecoder::room`] were written.
    ///
    /// # Panics
    /// If there was no such room.
    pub fn filled(&mut self, n: usize) {
        if let Some(long) = self.body.as_mut().filter(|long| !long.is_whole()) {
            assert!(long.have + n <= long.head.body, "more bytes than there was room for");
            long.have += n;
            return;
        }
        assert!(self.end + n <= self.buffer.len(), "more bytes than there was room for");
        self.end += n;
    }

    /// The next whole packet, if it has arrived.
    ///
    /// # Errors
    /// If the bytes are not a packet. Nothing after an error can be trusted.
    pub fn next_packet(&mut self) -> Result<Option<Packet>, PacketError> {
        if self.body.as_ref().is_some_and(|long| !long.is_whole()) {
            return Ok(None);
        }
        if let Some(Long { head, buffer, have }) = self.body.take() {
            let body = if have < LONG {
                Bytes::from(buffer)
            } else {
                Bytes::from_owner(Lent { buffer, len: have, pool: Arc::clone(&self.pool) })
            };
            return Ok(Some(head.finish(body)));
        }
        let mut head = match self.head.take() {
            Some(head) => head,
            None => {
                let arrived = &self.buffer[self.start..self.end];
                let Some(raw) = arrived.first_chunk::<PACKET_HEAD>() else { return Ok(None) };
                let head = Head::decode(raw)?;
                self.start += PACKET_HEAD;
                head
            }
        };
        let (have, runs) = (self.end - self.start, head.runs_len());
        if have < runs {
            self.head = Some(head);
            return Ok(None);
        }
        if have < runs + head.body && head.body <= SMALL && have < SMALL {
            // Nearly complete: not worth a separate read.
            self.head = Some(head);
            return Ok(None);
        }
        head.read_runs(&self.buffer[self.start..self.start + runs])?;
        self.start += runs;
        let (have, len) = (have - runs, head.body);
        let arrived = &self.buffer[self.start..self.start + have.min(len)];
        if have >= len {
            let body = Bytes::copy_from_slice(arrived);
            self.start += len;
            return Ok(Some(head.finish(body)));
        }
        let mut buffer = self.pool.take(len);
        buffer[..have].copy_from_slice(arrived);
        self.start = self.end;
        self.body = Some(Long { head, buffer, have });
        Ok(None)
    }

    /// Appends bytes by [`PacketDecoder::room`] and [`PacketDecoder::filled`]: as many as fit before packets must be
    /// taken out. Returns how many.
    pub fn push(&mut self, bytes: &[u8]) -> usize {
        let room = self.room();
        let n = room.len().min(bytes.len());
        room[..n].copy_from_slice(&bytes[..n]);
        self.filled(n);
        n
    }

    /// Bytes that have arrived but do not form a whole packet yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.end - self.start + self.body.as_ref().map_or(0, |long| long.have)
    }

    /// Bytes of memory that the decoder holds.
    #[must_use]
    pub fn held(&self) -> usize {
        let kept: usize = self.pool.lock().iter().map(Vec::capacity).sum();
        self.buffer.capacity() + self.body.as_ref().map_or(0, |long| long.buffer.capacity()) + kept
    }
}
