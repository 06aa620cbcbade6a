//! The control connection of the UCX transport: its handshake and its messages.

use crate::bytes::{part, u32_at, u64_at};
use crate::door::Protocol;
use crate::error::{ErrorKind, TransferError};
use crate::handle::Token;
use crate::segments::{Segment, Segments};
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};

pub(super) static PROTOCOL: Protocol = Protocol { magic: *b"MXU\x03", owner: b"ucx owner", client: b"ucx reader" };
/// The longest address of an owner's worker.
pub(super) const ADDRESS: usize = 64 * 1024;
/// The most pieces of an export; those with more are left to other transports.
pub(super) const PIECES: usize = 4096;
/// The longest key.
pub(super) const KEY: usize = 64 * 1024;
const ASK: usize = 32;
const ANSWER: usize = 32;
/// Connections get descriptors from this number on.
const HIGH: i32 = 768;
/// The most bytes that may wait to be sent.
const WAITING: usize = 64 << 20;

/// Slot and generation.
pub(super) type Name = (u32, u32);

/// A reader's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// It wants to use an export.
    Open(Name, Token),
    /// It has heard that the export is closed, but is busy with it.
    Busy(Name),
    /// It no longer uses the export: nothing that it wrote there is still on its way.
    Leave(Name),
}

impl Ask {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; ASK];
        let name = |out: &mut Vec<u8>, (slot, generation): Name| {
            out[4..8].copy_from_slice(&slot.to_le_bytes());
            out[8..12].copy_from_slice(&generation.to_le_bytes());
        };
        match self {
            Self::Open(at, token) => {
                out[0] = 1;
                name(&mut out, *at);
                out[16..32].copy_from_slice(token);
            }
            Self::Busy(at) => {
                out[0] = 2;
                name(&mut out, *at);
            }
            Self::Leave(at) => {
                out[0] = 3;
                name(&mut out, *at);
            }
        }
        out
    }

    fn decode(bytes: &[u8; ASK]) -> Option<Self> {
        let name = (u32_at(bytes, 4), u32_at(bytes, 8));
        let ask = match bytes[0] {
            1 => Self::Open(name, part(bytes, 16)),
            2 => Self::Busy(name),
            3 => Self::Leave(name),
            _ => return None,
        };
        (ask.encode() == bytes).then_some(ask)
    }

    /// The next message, once it has arrived completely.
    pub(super) fn next(wire: &mut Wire) -> Result<Option<Self>, TransferError> {
        let Some(bytes) = wire.peek::<ASK>() else { return Ok(None) };
        let ask = Self::decode(&bytes).ok_or_else(nonsense)?;
        wire.skip(ASK);
        Ok(Some(ask))
    }
}

/// An export, as its owner shows it to a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) writable: bool,
    pub(super) segments: Segments,
    pub(super) key: Vec<u8>,
}

/// An owner's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Opened(Name, Shown),
    Refused(Name, ErrorKind),
    /// The export is closed: no operation on it may start, and the reader must report when none is left.
    Revoked(Name),
}

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, (slot, generation), error) = match self {
            Self::Opened(name, _) => (1, *name, 0),
            Self::Refused(name, ErrorKind::Gone) => (2, *name, 1),
            Self::Refused(name, ErrorKind::Refused) => (2, *name, 2),
            Self::Refused(name, _) => (2, *name, 3),
            Self::Revoked(name) => (3, *name, 0),
        };
        let mut out = vec![0; ANSWER];
        (out[0], out[1]) = (kind, error);
        out[4..8].copy_from_slice(&slot.to_le_bytes());
        out[8..12].copy_from_slice(&generation.to_le_bytes());
        if let Self::Opened(_, shown) = self {
            let list = shown.segments.list();
            out[2] = u8::from(shown.writable);
            out[16..20].copy_from_slice(&(list.len() as u32).to_le_bytes());
            out[20..24].copy_from_slice(&(shown.key.len() as u32).to_le_bytes());
            for piece in list {
                out.extend_from_slice(&piece.addr.to_le_bytes());
                out.extend_from_slice(&piece.len.to_le_bytes());
            }
            out.extend_from_slice(&shown.key);
        }
        out
    }

    /// The next message, once it has arrived completely.
    pub(super) fn next(wire: &mut Wire) -> Result<Option<Self>, TransferError> {
        let Some(head) = wire.peek::<ANSWER>() else { return Ok(None) };
        let name = (u32_at(&head, 4), u32_at(&head, 8));
        let (pieces, key) = (u32_at(&head, 16) as usize, u32_at(&head, 20) as usize);
        if pieces > PIECES || key > KEY {
            return Err(nonsense());
        }
        let len = ANSWER + pieces * 16 + key;
        let Some(all) = wire.incoming.get(..len) else { return Ok(None) };
        let answer = match (head[0], head[1]) {
            (1, 0) => {
                let at = |n: usize| ANSWER + n * 16;
                let list = (0..pieces).map(|n| Segment { addr: u64_at(all, at(n)), len: u64_at(all, at(n) + 8) });
                let segments = Segments::new(list).map_err(|_| nonsense())?;
                Self::Opened(name, Shown { writable: head[2] == 1, segments, key: all[at(pieces)..].to_vec() })
            }
            (2, 1) => Self::Refused(name, ErrorKind::Gone),
            (2, 2) => Self::Refused(name, ErrorKind::Refused),
            (2, _) => Self::Refused(name, ErrorKind::Transport),
            (3, 0) => Self::Revoked(name),
            _ => return Err(nonsense()),
        };
        wire.skip(len);
        Ok(Some(answer))
    }
}

pub(super) fn nonsense() -> TransferError {
    TransferError::transport("the other end speaks another protocol")
}

/// A connection that never blocks, with what has arrived of the next message, and what could not be sent yet.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) stream: TcpStream,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
}

impl Wire {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        // When a process is killed, the kernel closes its highest descriptors first: the other end then learns of that
        // here before it does through UCX. If there is no room up there, the descriptor stays where it is.
        let stream = rustix::io::fcntl_dupfd_cloexec(&stream, HIGH).map_or(stream, TcpStream::from);
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, incoming: Vec::new(), outgoing: Vec::new() })
    }

    /// Sends the bytes, now or once there is room.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.outgoing.len() + bytes.len() > WAITING {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.outgoing.extend_from_slice(bytes);
        self.flush()
    }

    /// Whether the other end has closed it, or is gone; its earlier messages are lost.
    pub(super) fn has_closed(&self) -> bool {
        match self.stream.peek(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }

    /// Shuts the connection down. The other end notices.
    pub(super) fn close(&self) {
        // If it is closed already, that will do.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether bytes wait to be sent.
    pub(super) fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => drop(self.outgoing.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes what has arrived. Fails once the other end has closed.
    pub(super) fn receive(&mut self) -> io::Result<()> {
        let mut some = [0; 16 * 1024];
        loop {
            match self.stream.read(&mut some) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.incoming.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            // Read the rest after this has been looked at.
            if self.incoming.len() > ADDRESS {
                return Ok(());
            }
        }
    }

    /// The next bytes, if all are there.
    pub(super) fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        self.incoming.get(..N)?.try_into().ok()
    }

    /// Takes the next `len` bytes, if all are there.
    pub(super) fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        let taken = self.incoming.get(..len)?.to_vec();
        self.skip(len);
        Some(taken)
    }

    pub(super) fn skip(&mut self, len: usize) {
        self.incoming.drain(..len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn wire(bytes: &[u8]) -> Wire {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut made = Wire::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        made.incoming = bytes.to_vec();
        made
    }

    #[test]
    fn what_is_said_is_heard_when_it_is_there_as_a_whole() {
        let asks = [Ask::Open((1, 2), [3; 16]), Ask::Busy((4, 5)), Ask::Leave((6, 7))];
        for ask in asks {
            let bytes = ask.encode();
            assert_eq!(Ask::next(&mut wire(&bytes[..bytes.len() - 1])).unwrap(), None);
            assert_eq!(Ask::next(&mut wire(&bytes)).unwrap(), Some(ask));
        }
        let segments = Segments::new([Segment { addr: 8, len: 3 }, Segment { addr: 100, len: 7 }]).unwrap();
        let shown = Shown { writable: true, segments, key: vec![9; 30] };
        let answers = [
            Answer::Opened((1, 2), shown),
            Answer::Refused((1, 2), ErrorKind::Gone),
            Answer::Refused((1, 2), ErrorKind::Refused),
            Answer::Revoked((3, 4)),
        ];
        for answer in answers {
            let bytes = answer.encode();
            assert_eq!(Answer::next(&mut wire(&bytes)).unwrap(), Some(answer));
            assert_eq!(Answer::next(&mut wire(&bytes[..bytes.len() - 1])).unwrap(), None);
        }
    }

    #[test]
    fn nonsense_is_an_error_and_makes_nobody_wait_for_more() {
        let mut strange = [0; ASK];
        strange[0] = 4;
        assert!(Ask::next(&mut wire(&strange)).is_err());
        let mut padded = Ask::Leave((1, 1)).encode();
        padded[13] = 1;
        assert!(Ask::next(&mut wire(&padded)).is_err());
        let mut long = Answer::Revoked((1, 1)).encode();
        long[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Answer::next(&mut wire(&long)).is_err());
        assert!(Answer::next(&mut wire(&[7; ANSWER])).is_err());
    }
}
