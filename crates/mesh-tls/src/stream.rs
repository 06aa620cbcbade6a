//! An encrypted connection between two members of a job, driven by its user. It has no thread and never blocks.
//!
//! The server greets a client that it admits. In TLS 1.3 a client that has finished its part of the handshake does not
//! know yet whether its certificate was accepted; the greeting tells it.

use super::error::{Reason, TlsError};
use super::facts::PeerFacts;
use super::identity::Identity;
use super::record::Kernel;
use super::role::Role;
use super::split_stream::{GREETING, Made, TlsReader, TlsWriter, receive, send, would_block};
use rustix::net::sockopt;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The most bytes that a peer may send before it has authenticated: four times what a handshake takes.
pub const MOST_HANDSHAKE: usize = 16 * 1024;

/// The progress of a handshake.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Both sides have authenticated each other.
    Done(PeerFacts),
    /// Continue when the descriptor is readable.
    WantRead,
    /// Continue when it is writable.
    WantWrite,
}

/// An encrypted connection; see the module.
///
/// After the handshake, [`TlsStream::into_split`] takes it apart, so that one thread reads while another writes.
pub struct TlsStream {
    state: State,
}

enum State {
    Shaking(Box<Shaking>),
    Open(Box<(TlsReader, TlsWriter)>),
    Failed(Arc<OwnedFd>),
}

impl std::fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match &self.state {
            State::Shaking(_) => "shaking",
            State::Open(_) => "open",
            State::Failed(_) => "failed",
        };
        f.debug_struct("TlsStream").field("state", &state).field("fd", &self.as_fd()).finish_non_exhaustive()
    }
}

enum Side {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

impl Side {
    fn has_output(&self) -> bool {
        match self {
            Self::Client(conn) => conn.wants_write(),
            Self::Server(conn) => conn.wants_write(),
        }
    }
}

/// A handshake under way.
struct Shaking {
    fd: Arc<OwnedFd>,
    side: Option<Side>,
    incoming: Vec<u8>,
    /// Bytes that the peer has sent so far.
    received: usize,
    outgoing: Vec<u8>,
    /// How much of `outgoing` was sent.
    sent: usize,
    /// Plaintext that came right after the handshake.
    early: Vec<u8>,
    /// The handshake is done, and the client waits for the greeting.
    done: Option<(Box<(TlsReader, TlsWriter)>, PeerFacts)>,
}

/// The result of one step of the handshake.
enum Step {
    Again,
    NeedsInput,
    Finished,
}

impl TlsStream {
    /// The dialing end. `expect` is the role that the other end must have; none for any.
    ///
    /// # Errors
    /// If the identity cannot be used.
    pub fn client(fd: OwnedFd, identity: &Identity, expect: Option<Role>) -> Result<Self, TlsError> {
        let (config, name) = identity.client(expect)?;
        let side = UnbufferedClientConnection::new(config, name).map_err(|error| Reason::of(&error))?;
        Ok(Self::new(fd, Side::Client(side)))
    }

    /// The dialed end. It admits anyone with a certificate of the job, whatever the role.
    ///
    /// # Errors
    /// If the identity cannot be used.
    pub fn server(fd: OwnedFd, identity: &Identity) -> Result<Self, TlsError> {
        let side = UnbufferedServerConnection::new(identity.server()).map_err(|error| Reason::of(&error))?;
        Ok(Self::new(fd, Side::Server(side)))
    }

    fn new(fd: OwnedFd, side: Side) -> Self {
        // Meshes send small messages. A socket other than TCP has no such option, and works without.
        let _ = sockopt::set_tcp_nodelay(&fd, true);
        Self {
            state: State::Shaking(Box::new(Shaking {
                fd: Arc::new(fd),
                side: Some(side),
                incoming: Vec::new(),
                received: 0,
                outgoing: Vec::new(),
                sent: 0,
                early: Vec::new(),
                done: None,
            })),
        }
    }

    /// The descriptor, to wait until it is ready.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.state {
            State::Shaking(shaking) => shaking.fd.as_fd(),
            State::Open(halves) => halves.0.as_fd(),
            State::Failed(fd) => fd.as_fd(),
        }
    }

    /// How many bytes of the handshake the peer has sent.
    pub(crate) fn heard(&self) -> usize {
        match &self.state {
            State::Shaking(shaking) => shaking.received,
            _ => usize::MAX,
        }
    }

    /// Continues the handshake as far as possible without waiting. A refused peer gets an alert and nothing else.
    ///
    /// # Errors
    /// If either side refuses the other, or the connection ends. Then nothing works any more.
    pub fn handshake(&mut self) -> Result<Progress, TlsError> {
        let shaking = match &mut self.state {
            State::Shaking(shaking) => shaking,
            State::Open(halves) => return Ok(Progress::Done(halves.0.peer().clone())),
            State::Failed(_) => return Err(Reason::Left.into()),
        };
        match shaking.advance() {
            Ok(Progress::Done(facts)) => {
                if let Some((halves, _)) = shaking.done.take() {
                    self.state = State::Open(halves);
                }
                Ok(Progress::Done(facts))
            }
            Ok(wants) => Ok(wants),
            Err(error) => {
                self.state = State::Failed(Arc::clone(&shaking.fd));
                Err(error)
            }
        }
    }

    /// Splits the connection for two threads.
    ///
    /// # Errors
    /// The stream itself, if the handshake is not done.
    pub fn into_split(self) -> Result<(TlsReader, TlsWriter), Self> {
        match self.state {
            State::Open(halves) => Ok(*halves),
            state => Err(Self { state }),
        }
    }

    fn halves(&mut self) -> io::Result<&mut (TlsReader, TlsWriter)> {
        match &mut self.state {
            State::Open(halves) => Ok(halves),
            _ => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// See [`TlsReader::read`].
    ///
    /// # Errors
    /// As there.
    pub fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.halves()?.0.read(buf)
    }

    /// See [`TlsWriter::write`].
    ///
    /// # Errors
    /// As there.
    pub fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.halves()?.1.write(slices)
    }

    /// See [`TlsWriter::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&mut self) -> io::Result<bool> {
        self.halves()?.1.flush()
    }

    /// See [`TlsWriter::wants_write`].
    #[must_use]
    pub fn wants_write(&self) -> bool {
        match &self.state {
            State::Open(halves) => halves.1.wants_write(),
            State::Shaking(shaking) => shaking.sent < shaking.outgoing.len(),
            State::Failed(_) => false,
        }
    }

    /// See [`TlsWriter::close_notify`].
    pub fn close_notify(&mut self) {
        if let Ok(halves) = self.halves() {
            halves.1.close_notify();
        }
    }
}

impl Shaking {
    fn advance(&mut self) -> Result<Progress, TlsError> {
        loop {
            if let Some((halves, facts)) = &mut self.done {
                // The server's greeting may wait in its writer; it is sent like anything else.
                let facts = facts.clone();
                return match halves.0.greeted()? {
                    true => Ok(Progress::Done(facts)),
                    false => Ok(Progress::WantRead),
                };
            }
            match self.step() {
                Ok(Step::Again) => {}
                Ok(Step::Finished) => {
                    if !self.send()? {
                        return Ok(Progress::WantWrite);
                    }
                    self.finish()?;
                }
                Ok(Step::NeedsInput) => {
                    if !self.send()? {
                        return Ok(Progress::WantWrite);
                    }
                    if !self.receive()? {
                        return Ok(Progress::WantRead);
                    }
                }
                Err(error) => {
                    self.send_alert();
                    return Err(Reason::of(&error).into());
                }
            }
        }
    }

    fn step(&mut self) -> Result<Step, rustls::Error> {
        let Self { side, incoming, outgoing, early, .. } = self;
        let (discard, step) = match side {
            Some(Side::Client(conn)) => {
                let handshaking = conn.is_handshaking();
                look(conn.process_tls_records(incoming), outgoing, early, handshaking)
            }
            Some(Side::Server(conn)) => {
                let handshaking = conn.is_handshaking();
                look(conn.process_tls_records(incoming), outgoing, early, handshaking)
            }
            None => return Err(rustls::Error::HandshakeNotComplete),
        };
        incoming.drain(..discard);
        step
    }

    /// Sends rustls's alert about its last error, as far as the socket takes it.
    fn send_alert(&mut self) {
        // Only while there is output: the input still contains what caused the error, and must not be processed again.
        while self.side.as_ref().is_some_and(Side::has_output) {
            if self.step().is_err() {
                break;
            }
        }
        let _ = self.send();
    }

    /// Sends what is queued. Returns whether that was all.
    fn send(&mut self) -> io::Result<bool> {
        while self.sent < self.outgoing.len() {
            match send(&self.fd, &[IoSlice::new(&self.outgoing[self.sent..])]) {
                Ok(n) => self.sent += n,
                Err(error) if would_block(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Receives from the peer. Returns whether anything came.
    fn receive(&mut self) -> Result<bool, TlsError> {
        // One byte more than allowed, to detect the excess.
        let room = (MOST_HANDSHAKE + 1).saturating_sub(self.received);
        let old = self.incoming.len();
        self.incoming.resize(old + room.min(4096), 0);
        let got = receive(&self.fd, &mut self.incoming[old..]);
        self.incoming.truncate(old + *got.as_ref().unwrap_or(&0));
        match got {
            Ok(0) => Err(Reason::Left.into()),
            Ok(n) => {
                self.received += n;
                if self.received > MOST_HANDSHAKE { Err(Reason::TooMuch(MOST_HANDSHAKE).into()) } else { Ok(true) }
            }
            Err(error) if would_block(&error) => Ok(false),
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted) => {
                Err(Reason::Left.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Both sides have authenticated: from now on, records are handled here.
    fn finish(&mut self) -> Result<(), TlsError> {
        let side = self.side.take().ok_or(Reason::Left)?;
        let server = matches!(side, Side::Server(_));
        let certificate = match &side {
            Side::Client(conn) => conn.peer_certificates(),
            Side::Server(conn) => conn.peer_certificates(),
        }
        .and_then(<[_]>::first)
        .ok_or(Reason::NoCertificate)?;
        let facts = PeerFacts::of(certificate).map_err(|error| Reason::BadCertificate(error.to_string()))?;
        let (secrets, kernel) = match side {
            Side::Client(conn) => {
                let (secrets, kernel) = conn.dangerous_into_kernel_connection().map_err(|error| Reason::of(&error))?;
                (secrets, Kernel::Client(kernel))
            }
            Side::Server(conn) => {
                let (secrets, kernel) = conn.dangerous_into_kernel_connection().map_err(|error| Reason::of(&error))?;
                (secrets, Kernel::Server(kernel))
            }
        };
        let made = Made { fd: Arc::clone(&self.fd), kernel, secrets, peer: facts.clone() };
        let (reader, mut writer) =
            made.halves(server, std::mem::take(&mut self.incoming), std::mem::take(&mut self.early))?;
        if server {
            writer.write(&[IoSlice::new(GREETING)])?;
        }
        self.done = Some((Box::new((reader, writer)), facts));
        Ok(())
    }
}

/// Handles the result of one step: how much input was used, and what comes next.
fn look<D>(
    status: UnbufferedStatus<'_, '_, D>,
    outgoing: &mut Vec<u8>,
    early: &mut Vec<u8>,
    handshaking: bool,
) -> (usize, Result<Step, rustls::Error>) {
    let mut discard = status.discard;
    let step = match status.state {
        Ok(ConnectionState::EncodeTlsData(mut data)) => encode(&mut data, outgoing),
        Ok(ConnectionState::TransmitTlsData(data)) => {
            // What was encoded is kept here until the socket takes it.
            data.done();
            Ok(Step::Again)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::NeedsInput),
        Ok(ConnectionState::WriteTraffic(_)) if handshaking => Ok(Step::Again),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(Step::Finished),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                Some(Ok(record)) => {
                    discard += record.discard;
                    early.extend_from_slice(record.payload);
                }
                Some(Err(error)) => break Err(error),
                None => break Ok(Step::Again),
            }
        },
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => {
            Err(rustls::Error::AlertReceived(rustls::AlertDescription::CloseNotify))
        }
        Ok(other) => Err(rustls::Error::General(format!("{other:?}"))),
        Err(error) => Err(error),
    };
    (discard, step)
}

fn encode<D>(data: &mut EncodeTlsData<'_, D>, outgoing: &mut Vec<u8>) -> Result<Step, rustls::Error> {
    let old = outgoing.len();
    let mut room = 0;
    loop {
        outgoing.resize(old + room, 0);
        match data.encode(&mut outgoing[old..]) {
            Ok(n) => {
                outgoing.truncate(old + n);
                return Ok(Step::Again);
            }
            Err(EncodeError::InsufficientSize(needs)) if needs.required_size > room => room = needs.required_size,
            Err(error) => {
                outgoing.truncate(old);
                return Err(rustls::Error::General(error.to_string()));
            }
        }
    }
}
