//! The ends that bytes of a visit pass between: a local socket, a connection to another machine, and a tunnel of frames.

use super::pump::{End, Over};
use crate::runtime::{Runtime, lock};
use crate::tls::TlsStream;
use bytes::Bytes;
use mesh_proto::ProcAddr;
use mesh_proto::control::{Inspect, Step, Visit};
use mesh_proto::hosts::{Farewell, Packet, PacketDecoder, PacketKind, Parting, Refusal, Refuse, Short};
use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// The most that one packet or frame of a visit carries.
pub(super) const PIECE: usize = 32 << 10;
/// So many bytes of a visit may be under way through the job, each way.
pub(super) const WINDOW: u32 = 256 << 10;
/// What was taken is told in portions of this size.
const PORTION: u32 = WINDOW / 4;
/// How long a last word may take.
const LAST_WORD: Duration = Duration::from_secs(2);

/// One end of a pair of local sockets, whose other end Python has.
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
            // It hears no more, and may still have something to say: its own end tells when that is all.
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(bytes.len()),
            Err(errno) => Err(Over::Broke(errno.to_string())),
        }
    }

    fn flush(&mut self) -> Result<bool, Over> {
        Ok(true)
    }
}

/// A connection between who looks in and whom they have dialed, on which bytes travel in packets: so that the end of a job, a
/// refusal and a broken connection are different things.
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

    /// Says why it is over, unless the other has said so, and ends the connection.
    pub(super) fn finish(mut self, over: &Over) {
        if !super::pump::drain(&mut self, LAST_WORD) {
            // What it does not read it is not sent more of.
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

    /// Hands what waits to the connection; whether it has taken all.
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
                _ => return Err(Over::Broke("it says what is not due".to_owned())),
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

/// What has arrived by frames, for the thread that passes it on.
#[derive(Debug)]
pub(crate) struct Tunnel {
    state: Mutex<Inside>,
    bell: OwnedFd,
}

#[derive(Debug)]
struct Inside {
    arrived: VecDeque<u8>,
    /// Bytes that have arrived and were not told to be taken.
    held: u32,
    /// Bytes that the other end has room for.
    room: u32,
    over: Option<Over>,
}

impl Tunnel {
    pub(super) fn new() -> Result<Arc<Self>, Errno> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let inside = Inside { arrived: VecDeque::new(), held: 0, room: WINDOW, over: None };
        Ok(Arc::new(Self { state: Mutex::new(inside), bell }))
    }

    /// Something has arrived.
    pub(super) fn on(&self, step: Step) {
        let mut inside = lock(&self.state);
        match step {
            Step::Begin => {}
            Step::Said(bytes) => match u32::try_from(bytes.len()).ok().and_then(|n| inside.held.checked_add(n)) {
                Some(held) if held <= WINDOW => {
                    inside.held = held;
                    inside.arrived.extend(bytes);
                }
                _ => inside.over = Some(Over::Broke("more was said than there was room for".to_owned())),
            },
            Step::Taken(bytes) => inside.room = inside.room.saturating_add(bytes).min(WINDOW),
            Step::End => {
                inside.over.get_or_insert(Over::Left);
            }
        }
        drop(inside);
        self.ring();
    }

    /// Nothing arrives any more.
    pub(super) fn end(&self, over: Over) {
        lock(&self.state).over.get_or_insert(over);
        self.ring();
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

/// One end of a visit's way through the job.
pub(super) struct TunnelEnd {
    runtime: Weak<Runtime>,
    tunnel: Arc<Tunnel>,
    peer: ProcAddr,
    number: u64,
    /// What was taken and not told yet.
    taken: u32,
}

impl TunnelEnd {
    pub(super) fn new(runtime: Weak<Runtime>, tunnel: Arc<Tunnel>, peer: ProcAddr, number: u64) -> Self {
        Self { runtime, tunnel, peer, number, taken: 0 }
    }

    pub(super) fn tell(&self, step: Step) {
        if let Some(runtime) = self.runtime.upgrade() {
            Self::send(&runtime, self.peer, self.number, step);
        }
    }

    /// Tells an agent that somebody cannot be taken.
    pub(super) fn refuse(runtime: &Runtime, peer: ProcAddr, number: u64) {
        Self::send(runtime, peer, number, Step::End);
    }

    fn send(runtime: &Runtime, peer: ProcAddr, number: u64, step: Step) {
        let visit = Inspect::Visit(Visit { number, step });
        runtime.dispatch(visit.frame(runtime.me, peer, None), None);
    }
}

impl End for TunnelEnd {
    fn fd(&self) -> BorrowedFd<'_> {
        self.tunnel.bell.as_fd()
    }

    fn begin(&mut self) {
        // Also where nothing is read for the moment: a bell that has rung is ready until somebody has heard it.
        let _ = rustix::io::read(&self.tunnel.bell, &mut [0; 8]);
    }

    fn interest(&self, _reads: bool, _writes: bool) -> PollFlags {
        PollFlags::IN
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Over> {
        let mut inside = lock(&self.tunnel.state);
        let n = std::io::Read::read(&mut inside.arrived, buffer).unwrap_or_default();
        if n == 0 {
            return inside.over.clone().map_or(Ok(0), Err);
        }
        // No more than one chunk, which fits.
        let count = u32::try_from(n).unwrap_or(u32::MAX);
        self.taken += count;
        if self.taken >= PORTION || inside.arrived.is_empty() {
            inside.held = inside.held.saturating_sub(self.taken);
            drop(inside);
            let taken = std::mem::take(&mut self.taken);
            self.tell(Step::Taken(taken));
        }
        Ok(n)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Over> {
        let n = {
            let mut inside = lock(&self.tunnel.state);
            if inside.over.is_some() {
                // What has arrived before the end is still read.
                return Ok(bytes.len());
            }
            let n = bytes.len().min(PIECE).min(inside.room as usize);
            inside.room -= u32::try_from(n).unwrap_or(inside.room);
            n
        };
        if n > 0 {
            self.tell(Step::Said(Bytes::copy_from_slice(&bytes[..n])));
        }
        Ok(n)
    }

    fn flush(&mut self) -> Result<bool, Over> {
        Ok(true)
    }
}
