//! The ends between which bytes of a visit pass: a local socket, and a connection to another machine.

use super::pump::{End, Over};
use crate::tls::TlsStream;
use bytes::Bytes;
use mesh_proto::hosts::{Farewell, Packet, PacketDecoder, PacketKind, Parting, Refusal, Refuse, Short};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// The most bytes in one packet or frame of a visit.
pub(super) const PIECE: usize = 32 << 10;
/// How long the last message may take.
const LAST_WORD: Duration = Duration::from_secs(2);

/// One end of a pair of local sockets; Python has the other.
pub(super) struct LocalEnd {
    socket: OwnedFd,
}

impl LocalEnd {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }
}

impl End for LocalEnd {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn interest(&self, reads: bool, writes: bool) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, reads);
        flags.set(PollFlags::OUT, writes);
        flags
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Over> {
        match recv(&self.socket, buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Err(Over::Left),
            Ok((n, _)) => Ok(n),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(Over::Broke(errno.to_string())),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Over> {
        match send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => Ok(n),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            // It reads no more, but may still send: the end of its own writing says when that is all.
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(bytes.len()),
            Err(errno) => Err(Over::Broke(errno.to_string())),
        }
    }

    fn flush(&mut self) -> Result<bool, Over> {
        Ok(true)
    }
}

/// The connection between a visitor and the dialed host. Bytes travel in packets, so that the end of a job, a refusal
/// and a broken connection can be told apart.
pub(super) struct PacketEnd {
    stream: TlsStream,
    decoder: PacketDecoder,
    arrived: Bytes,
    leaving: Vec<u8>,
    sent: usize,
}

impl PacketEnd {
    pub(super) fn new(stream: TlsStream, decoder: PacketDecoder) -> Self {
        Self { stream, decoder, arrived: Bytes::new(), leaving: Vec::new(), sent: 0 }
    }

    /// Sends the reason for the end, and ends the connection.
    pub(super) fn finish(mut self, over: &Over) {
        if !super::pump::drain(&mut self, LAST_WORD) {
            // It does not read: send no more.
            return;
        }
        let packet = match over {
            Over::Left => Farewell { parting: Parting::JobOver, text: String::new() }.packet(0),
            Over::Refused(refuse) => refuse.packet(0),
            Over::Broke(why) => Refuse { code: Refusal::Other, text: why.clone() }.packet(0),
        };
        self.put(&packet);
        super::pump::drain(&mut self, LAST_WORD);
        self.stream.close_notify();
        let _ = self.stream.flush();
    }

    fn put(&mut self, packet: &Packet) {
        self.leaving.clear();
        self.sent = 0;
        packet.write_head(&mut self.leaving);
        packet.body.iter().for_each(|piece| self.leaving.extend_from_slice(piece));
    }

    fn broke(error: &io::Error) -> Over {
        Over::Broke(error.to_string())
    }

    /// Hands what waits to the connection. Returns whether it took everything.
    fn hand_over(&mut self) -> Result<bool, Over> {
        while self.sent < self.leaving.len() {
            match self.stream.write(&[IoSlice::new(&self.leaving[self.sent..])]) {
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(Self::broke(&error)),
            }
        }
        Ok(true)
    }

    fn next(&mut self) -> Result<Option<Bytes>, Over> {
        loop {
            let packet = self.decoder.next_packet().map_err(|error| Over::Broke(error.to_string()))?;
            let Some(packet) = packet else {
                match self.stream.read(self.decoder.room()) {
                    Ok(0) => return Err(Over::Left),
                    Ok(n) => self.decoder.filled(n),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(Self::broke(&error)),
                }
                continue;
            };
            match packet.kind {
                PacketKind::Said if (1..=PIECE).contains(&packet.body_len()) => {
                    return Ok(Some(match &*packet.body {
                        [one] => one.clone(),
                        many => many.concat().into(),
                    }));
                }
                PacketKind::Farewell => return Err(Over::Left),
                PacketKind::Refuse => {
                    let told = Refuse::read(&packet).map_err(|error| Over::Broke(error.to_string()))?;
                    return Err(Over::Refused(told));
                }
                _ => return Err(Over::Broke("it sent a packet that is not expected here".to_owned())),
            }
        }
    }
}

impl End for PacketEnd {
    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn interest(&self, reads: bool, writes: bool) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, reads);
        flags.set(PollFlags::OUT, writes || self.sent < self.leaving.len() || self.stream.wants_write());
        flags
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Over> {
        if self.arrived.is_empty() {
            let Some(arrived) = self.next()? else { return Ok(0) };
            self.arrived = arrived;
        }
        let n = self.arrived.len().min(buffer.len());
        buffer[..n].copy_from_slice(&self.arrived.split_to(n));
        Ok(n)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Over> {
        if !self.hand_over()? {
            return Ok(0);
        }
        let n = bytes.len().min(PIECE);
        let mut packet = Packet::new(PacketKind::Said, 0);
        packet.body = Short::from_iter([Bytes::copy_from_slice(&bytes[..n])]);
        self.put(&packet);
        self.hand_over()?;
        Ok(n)
    }

    fn flush(&mut self) -> Result<bool, Over> {
        let all = self.hand_over()?;
        let gone = self.stream.flush().map_err(|error| Self::broke(&error))?;
        Ok(all && gone)
    }
}
