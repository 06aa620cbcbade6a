//! Greetings on a new connection to another machine: one packet at a time, each within a time limit, on the thread that
//! made the connection.

use crate::timespec::timespec;
use crate::tls::TlsStream;
use mesh_proto::hosts::{Packet, PacketDecoder, Refusal, Refuse};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, ErrorKind, IoSlice};
use std::time::{Duration, Instant};

/// How long a member may take to greet.
pub(crate) const GREETING: Duration = Duration::from_secs(5);
/// The shortest and longest time before a second attempt is made beside a dial that has not connected.
pub(crate) const AGAIN: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(500)];
/// How long a refusal may take to be sent.
const REFUSAL: Duration = Duration::from_secs(1);
/// The stack size of a thread that does only this.
const STACK: usize = 512 * 1024;

/// Runs `work` on a new thread.
///
/// # Errors
/// If the thread cannot be started.
pub(crate) fn on_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(work).map(drop)
}

fn wait(stream: &TlsStream, flags: PollFlags, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    let mut fds = [PollFd::from_borrowed_fd(stream.as_fd(), flags)];
    match poll(&mut fds, Some(&timespec(left))) {
        Ok(0) => Err(ErrorKind::TimedOut.into()),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Sends a packet and waits until it is written.
pub(crate) fn say(stream: &mut TlsStream, packet: &Packet, until: Instant) -> io::Result<()> {
    let mut bytes = packet.encode_head();
    packet.body.iter().for_each(|piece| bytes.extend_from_slice(piece));
    let mut sent = 0;
    loop {
        let written = if sent < bytes.len() { stream.write(&[IoSlice::new(&bytes[sent..])]) } else { Ok(0) };
        match written {
            Ok(n) => sent += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if stream.flush()? && sent == bytes.len() {
            return Ok(());
        }
        wait(stream, PollFlags::OUT, until)?;
    }
}

/// Waits for the next packet.
pub(crate) fn hear(stream: &mut TlsStream, decoder: &mut PacketDecoder, until: Instant) -> io::Result<Packet> {
    loop {
        match decoder.next_packet() {
            Ok(Some(packet)) => return Ok(packet),
            Ok(None) => {}
            Err(error) => return Err(io::Error::new(ErrorKind::InvalidData, error)),
        }
        match stream.read(decoder.room()) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => decoder.filled(n),
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(stream, PollFlags::IN, until)?,
            Err(error) => return Err(error),
        }
    }
}

/// Ends a connection in order.
pub(crate) fn hang_up(mut stream: TlsStream) {
    stream.close_notify();
    let _ = stream.flush();
}

/// Refuses with a reason and ends the connection.
pub(crate) fn refuse(mut stream: TlsStream, code: Refusal, text: String) {
    let _ = say(&mut stream, &Refuse { code, text }.packet(0), Instant::now() + REFUSAL);
    hang_up(stream);
}
