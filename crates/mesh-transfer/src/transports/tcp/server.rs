//! The owner's end: threads that read and write its exports for others and never enter the interpreter.

use super::member::{Guard, Member};
use super::section::{MOST, Why};
use super::sockets::{Listed, Sockets};
use super::stream::{Patience, Wire, bytes, iovec};
use super::wire::{PROTOCOL, REQUEST, Request, Response, Verb};
use crate::cuda::{Staged, Stages};
use crate::door::{HELLO, PROOF, Place, Side, Strangers, pause};
use crate::error::{Closing, ErrorKind, TransferError};
use crate::exports::{Export, Exports};
use crate::handle::Token;
use mesh_tls::{Identity, Limits, Listener, ListenerEvent, PeerFacts, TlsStream};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// The most connections served at once.
const CONNECTIONS: usize = 256;
/// How long a stranger may take for each of its two messages.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a peer may stall while it receives an answer or sends a write.
const STALLED: Duration = Duration::from_secs(60);
/// The most answers sent together.
const TOGETHER: usize = 64;

/// Serves this process's exports. Ends with the process.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) port: u16,
    pub(super) door: Token,
    _listed: Listed,
}

#[derive(Debug, Default)]
struct Places {
    strangers: Strangers,
    served: AtomicUsize,
}

impl Server {
    pub(super) fn start(exports: &Arc<Exports>, door: Token, sockets: &Sockets) -> Result<Self, TransferError> {
        let failed = |error: io::Error| TransferError::transport(format!("cannot listen on 127.0.0.1: {error}"));
        // TCP-3
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let (exports, places, sockets) = (Arc::clone(exports), Arc::new(Places::default()), sockets.clone());
        let thread = std::thread::Builder::new().name("mesh-serve".to_owned()).stack_size(128 * 1024);
        let listed = sockets.list([listener.as_raw_fd()]);
        thread.spawn(move || listen(&listener, &exports, door, (&places, &sockets))).map_err(failed)?;
        Ok(Self { port, door, _listed: listed })
    }
}

fn listen(listener: &TcpListener, exports: &Arc<Exports>, door: Token, (places, sockets): (&Arc<Places>, &Sockets)) {
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(_) => {
                pause();
                continue;
            }
        };
        let wire = Wire::plain(Arc::new(stream), sockets);
        admit(wire, None, exports, door, places);
    }
}

/// Serves a connection on a new thread, once there is a place for a stranger.
fn admit(wire: Wire, guard: Option<Guard>, exports: &Arc<Exports>, door: Token, places: &Arc<Places>) {
    places.strangers.wait();
    let (exports, places, counted) = (Arc::clone(exports), Arc::clone(places), Arc::clone(places));
    let thread = std::thread::Builder::new().name("mesh-serve".to_owned()).stack_size(256 * 1024);
    // Without a thread, the connection ends, and its other end reports that.
    let served = thread.spawn(move || {
        let mut wire = wire;
        let greeted = greet(&mut wire, &exports, &door);
        places.strangers.one_fewer();
        if let Ok(patience) = greeted {
            // However it ends, the other end notices.
            let _ = serve(wire, patience, guard, &exports, &places);
        }
    });
    if served.is_err() {
        counted.strangers.one_fewer();
    }
}

/// Where members of the job on other hosts connect. Dropping it stops listening; existing connections stay.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) addrs: Vec<SocketAddr>,
    /// Before the listener, since fields are dropped in order.
    _listed: Listed,
    _listener: Listener,
}

impl Remote {
    pub(super) fn open(
        exports: &Arc<Exports>,
        door: Token,
        member: &Arc<Member>,
        sockets: &Sockets,
    ) -> Result<Self, Why> {
        let identity = member.identity().map_err(|_| Why::Credentials)?;
        // Skip addresses that cannot be bound, such as one still checked for duplicates.
        let had = member.said.addresses.iter().filter(|ip| TcpListener::bind((**ip, 0)).is_ok());
        let wanted: Vec<SocketAddr> = had.map(|ip| SocketAddr::new(*ip, 0)).take(MOST).collect();
        let (exports, member, places) = (Arc::clone(exports), Arc::clone(member), Arc::new(Places::default()));
        let (checked, all) = (Arc::clone(&identity), sockets.clone());
        // The listener has its own limits for peers that have not shown a certificate (TLS-3).
        let on_event = move |event| {
            if let ListenerEvent::Joined { stream, peer, .. } = event {
                // A peer that is not let in sees the connection end.
                let _ = join(stream, peer, (&checked, &member), &exports, door, (&places, &all));
            }
        };
        let listener = Listener::bind(&wanted, identity, Limits::default(), on_event).map_err(|_| Why::NoPort)?;
        let _listed = sockets.list(listener.descriptors().iter().copied());
        Ok(Self { addrs: listener.addrs().to_vec(), _listed, _listener: listener })
    }
}

/// TCP-4
fn join(
    stream: TlsStream,
    peer: PeerFacts,
    (identity, member): (&Arc<Identity>, &Member),
    exports: &Arc<Exports>,
    door: Token,
    (places, sockets): (&Arc<Places>, &Sockets),
) -> io::Result<()> {
    let guard = Guard::new(identity, peer).map_err(io::Error::other)?;
    let socket = Arc::new(TcpStream::from(stream.as_fd().try_clone_to_owned()?));
    member.limit_silence(&*socket)?;
    let halves = stream.into_split().map_err(|_| io::ErrorKind::NotConnected)?;
    admit(Wire::sealed(socket, halves, sockets), Some(guard), exports, door, places);
    Ok(())
}

fn serve(
    wire: Wire,
    mut patience: Patience,
    guard: Option<Guard>,
    exports: &Exports,
    places: &Places,
) -> io::Result<()> {
    let full = || io::Error::from(io::ErrorKind::ConnectionRefused);
    let _served = Place::take(&places.served, CONNECTIONS).ok_or_else(full)?;
    patience.set_write(STALLED)?;
    let (answers, kept, stages) = (Vec::new(), Vec::new(), Stages::default());
    Session { wire, patience, guard, exports, answers, stages, kept }.run()
}

const _: () = assert!(super::wire::PIECE <= crate::cuda::PIECE, "each piece has room where it is staged");

/// TCP-1. Trickling single bytes buys no time: each whole message must arrive within the limit.
fn greet(wire: &mut Wire, exports: &Exports, door: &Token) -> io::Result<Patience> {
    wire.socket().set_nodelay(true)?;
    let mut patience = Patience::new(wire, HANDSHAKE)?;
    // The last bytes of the TLS handshake may still be unsent.
    wire.flush(&|flags| patience.wait(flags))?;
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let mut hello = [0; HELLO];
    whole(wire, &mut patience, &mut hello)?;
    let (talk, welcome) = PROTOCOL.answer(&hello, *door, exports.realm()).ok_or_else(refused)?;
    // SAFETY: of this frame.
    unsafe { wire.send(&mut [bytes(&welcome)], &|flags| patience.wait(flags))? };
    let mut theirs = [0; PROOF];
    whole(wire, &mut patience, &mut theirs)?;
    if talk.proves(Side::Client, &theirs) { Ok(patience) } else { Err(refused()) }
}

fn whole(wire: &mut Wire, patience: &mut Patience, into: &mut [u8]) -> io::Result<()> {
    let end = std::time::Instant::now() + HANDSHAKE;
    for byte in into.chunks_mut(1) {
        if !wire.has(1) {
            let left = end.saturating_duration_since(std::time::Instant::now());
            // Zero would mean no limit.
            patience.set_read(Some(left.max(Duration::from_millis(1))))?;
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        wire.exactly(byte, &|flags| patience.wait(flags))?;
    }
    Ok(())
}

/// A connection whose other end has proved who it is.
struct Session<'a> {
    wire: Wire,
    patience: Patience,
    /// The member at the other end, if on another host.
    guard: Option<Guard>,
    exports: &'a Exports,
    /// Not sent yet.
    answers: Vec<Answer>,
    /// Where GPU memory is staged. Before `kept`, from and to which it is copied.
    stages: Stages,
    /// The exports that answers are read from, and that GPUs are still writing to (EXP-1).
    kept: Vec<Arc<Export>>,
}

struct Answer {
    response: Response,
    /// What follows its head.
    payload: Vec<libc::iovec>,
    /// What the GPU must copy before it is sent.
    staged: Option<Staged>,
}

impl Session<'_> {
    fn run(&mut self) -> io::Result<()> {
        loop {
            if !self.wire.has(REQUEST) || self.answers.len() >= TOGETHER {
                self.flush()?;
            }
            let mut next = [0; REQUEST];
            if !self.wire.has(1) {
                // Between requests, the peer may be silent for as long as it likes.
                self.stages.rest();
                self.patience.set_read(None)?;
                self.wire.exactly(&mut next[..1], &|flags| self.patience.wait(flags))?;
                self.patience.set_read(Some(STALLED))?;
                self.wire.exactly(&mut next[1..], &|flags| self.patience.wait(flags))?;
            } else {
                self.wire.exactly(&mut next, &|flags| self.patience.wait(flags))?;
            }
            if let Some(guard) = &mut self.guard {
                guard.check().map_err(io::Error::other)?;
            }
            self.answer(&next)?;
        }
    }

    fn answer(&mut self, bytes: &[u8; REQUEST]) -> io::Result<()> {
        let request = Request::decode(bytes).ok_or(io::ErrorKind::InvalidData)?;
        // TCP-2
        let found = self.exports.find(request.slot, request.generation, &request.token);
        let found = found.and_then(|export| within(&export, &request).map(|()| export));
        let mut answer = Answer { response: Response { refused: None, found: 0 }, payload: Vec::new(), staged: None };
        match (found, request.verb) {
            (Err(error), verb) => {
                if verb == Verb::Write {
                    self.wire.skip(request.len, &|flags| self.patience.wait(flags))?;
                }
                answer.response.refused = Some(error.kind);
                let closing = self.exports.closing(request.slot, request.generation);
                answer.response.found = closing.map_or(0, Closing::code);
            }
            (Ok(export), Verb::Read | Verb::Write) if export.on_device.is_some() => {
                return self.answer_staged(export, &request, answer);
            }
            (Ok(export), Verb::Read) => {
                answer.payload = export.segments.window(request.offset, request.len).map(iovec).collect();
                self.kept.push(export);
            }
            (Ok(export), Verb::Write) => {
                // SAFETY: the export's memory, kept by it; checked to be writable.
                unsafe {
                    let pieces = export.segments.window(request.offset, request.len);
                    self.wire.pieces(pieces, &|flags| self.patience.wait(flags))?;
                };
            }
            (Ok(export), Verb::FetchAdd | Verb::CompareAndSwap) => match atomic(&export, &request) {
                Some(found) => answer.response.found = found,
                None => answer.response.refused = Some(ErrorKind::Invalid),
            },
        }
        self.answers.push(answer);
        Ok(())
    }

    /// Serves GPU memory, which only the driver copies (CUD-1), through a stage.
    fn answer_staged(&mut self, export: Arc<Export>, request: &Request, mut answer: Answer) -> io::Result<()> {
        let Some(on) = &export.on_device else { return Err(io::ErrorKind::InvalidInput.into()) };
        if !self.stages.has_room(on) {
            self.flush()?;
        }
        let (span, is_read) = ((request.offset, request.len), request.verb == Verb::Read);
        let staged = self.stages.take(on);
        if !is_read {
            let wait = |flags| self.patience.wait(flags);
            match &staged {
                // SAFETY: a slot of ours, which nothing else uses.
                Ok(staged) => unsafe {
                    self.wire.pieces(self.stages.memory(*staged, request.len).window(0, request.len), &wait)?;
                },
                Err(_) => self.wire.skip(request.len, &wait)?,
            }
        }
        let begun = staged.and_then(|staged| {
            // SAFETY: the export is kept until the answer is sent, which waits for the GPU.
            unsafe { self.stages.begin(staged, &export.segments, span, is_read)? };
            Ok(staged)
        });
        self.kept.push(Arc::clone(&export));
        match begun {
            Ok(staged) => {
                if is_read {
                    answer.payload =
                        self.stages.memory(staged, request.len).list().iter().copied().map(iovec).collect();
                }
                answer.staged = Some(staged);
            }
            Err(error) => answer.response.refused = Some(error.kind),
        }
        self.answers.push(answer);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut answers = std::mem::take(&mut self.answers);
        // Send the ready answers while the GPU works on the next one.
        let mut ready = 0;
        for at in 0..answers.len() {
            let Some(staged) = answers[at].staged else { continue };
            self.send(&answers[ready..at])?;
            ready = at;
            if let Err(error) = self.stages.wait(staged) {
                answers[at].response.refused = Some(error.kind);
                answers[at].payload.clear();
            }
        }
        self.send(&answers[ready..])?;
        self.stages.answered();
        self.kept.clear();
        answers.clear();
        self.answers = answers;
        Ok(())
    }

    fn send(&mut self, answers: &[Answer]) -> io::Result<()> {
        if answers.is_empty() {
            return Ok(());
        }
        let heads: Vec<_> = answers.iter().map(|answer| answer.response.encode()).collect();
        let mut list: Vec<libc::iovec> = Vec::with_capacity(2 * answers.len());
        for (head, answer) in heads.iter().zip(answers) {
            list.push(bytes(head));
            list.extend_from_slice(&answer.payload);
        }
        // SAFETY: the heads are of this frame, the rest is memory of the exports in `kept`, or of the stages.
        unsafe { self.wire.send(&mut list, &|flags| self.patience.wait(flags)) }
    }
}

fn within(export: &Export, request: &Request) -> Result<(), TransferError> {
    let end = request.offset.checked_add(request.len);
    if end.is_none_or(|end| end > export.segments.len()) {
        return Err(TransferError::refused("out of bounds"));
    }
    if request.verb != Verb::Read && !export.writable {
        return Err(TransferError::refused("read-only"));
    }
    Ok(())
}

/// ATM-1: atomic operations on an export, from all processes and transports, are performed here, by the owner's
/// processor on the owner's memory. So they are atomic with respect to each other and to the owner's own.
fn atomic(export: &Export, request: &Request) -> Option<u64> {
    // CUD-1
    if export.on_device.is_some() {
        return None;
    }
    let mut window = export.segments.window(request.offset, 8);
    let word = window.next().filter(|piece| piece.len == 8 && piece.addr.is_multiple_of(8))?;
    // SAFETY: aligned, inside the export's memory, which is kept by it, and checked to be writable.
    let word = unsafe { AtomicU64::from_ptr(word.addr as *mut u64) };
    Some(match request.verb {
        Verb::CompareAndSwap => {
            match word.compare_exchange(request.first, request.second, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(found) | Err(found) => found,
            }
        }
        _ => word.fetch_add(request.first, Ordering::SeqCst),
    })
}
