//! The owner's end: a thread and a UCX worker for each reader.
//!
//! The thread makes UCX progress, since most UCX transports need the owner's processor, and sleeps when there is
//! nothing to do. No other reader shares the worker, so it can be destroyed when its reader ends (UCX-3).

use super::objects::{Context, Mapped, Worker};
use super::signal::Signal;
use super::wire::{Answer, Ask, Name, PIECES, PROTOCOL, Shown, Wire};
use crate::door::{HELLO, PROOF, Side};
use crate::error::{ErrorKind, TransferError, advice};
use crate::exports::{Export, Exports};
use crate::handle::Token;
use crate::lock;
use crate::realm::random;
use crate::watch::timespec;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most readers at once, including strangers, and the most strangers, who have not proved who they are.
const READERS: usize = 256;
const STRANGERS: usize = 16;
/// How long a stranger may take for its part of the greeting.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a reader may take to say that it has left an export or is busy with it; and how long it may be busy.
const PATIENCE: Duration = Duration::from_millis(500);
const BUSY: Duration = Duration::from_secs(30);
/// How long to wait before the next reader when descriptors have run out.
const BREATH: Duration = Duration::from_millis(50);
/// How long to poll before sleeping.
pub(super) const SPIN: Duration = Duration::from_micros(50);
/// How often UCX is polled before anything else is looked at.
pub(super) const TURNS: usize = 64;
pub(super) const STACK: usize = 1 << 20;

/// Serves this process's exports until stopped.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) port: u16,
    pub(super) door: Token,
    shared: Arc<Shared>,
    listening: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    exports: Arc<Exports>,
    context: Arc<Context>,
    door: Token,
    readers: Mutex<Vec<(Arc<Reader>, JoinHandle<()>)>>,
    strangers: AtomicUsize,
    /// Registered memory of exports that readers have opened.
    mapped: Mutex<HashMap<Name, Arc<Mapped>>>,
    stopping: AtomicBool,
    stop: Signal,
}

/// One connection, as seen by those who close exports.
#[derive(Debug)]
struct Reader {
    wake: Signal,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// What it may be reading and writing. None while it is being looked up.
    opened: HashMap<Name, Option<Opened>>,
    /// Revoked exports that the reader has not been told of.
    revoked: Vec<Name>,
    /// The reader is to be disconnected.
    is_unwanted: bool,
    has_ended: bool,
}

/// Kept until the reader has left it, or its worker has ended (UCX-2).
#[derive(Debug)]
struct Opened {
    _mapped: Option<Arc<Mapped>>,
    _export: Arc<Export>,
    is_busy: bool,
}

impl Reader {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Service {
    pub(super) fn start(exports: &Arc<Exports>, context: &Arc<Context>) -> Result<Self, TransferError> {
        let failed = |error: io::Error| {
            TransferError::transport(format!("cannot listen for readers: {error}{}", advice(error.raw_os_error())))
        };
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0));
        let listener = listener.or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let door = random()?;
        let shared = Arc::new(Shared {
            exports: Arc::clone(exports),
            context: Arc::clone(context),
            door,
            readers: Mutex::default(),
            strangers: AtomicUsize::new(0),
            mapped: Mutex::default(),
            stopping: AtomicBool::new(false),
            stop: Signal::new()?,
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("mesh-ucx".to_owned()).stack_size(128 * 1024);
        let listening = thread.spawn(move || listen(&listener, &theirs)).map_err(failed)?;
        Ok(Self { port, door, shared, listening: Mutex::new(Some(listening)) })
    }

    /// Makes all readers leave the export. Blocks.
    pub(super) fn withdraw(&self, export: &Export) {
        let name = (export.slot, export.generation);
        let readers: Vec<_> = lock(&self.shared.readers).iter().map(|(reader, _)| Arc::clone(reader)).collect();
        let mut asked = Vec::new();
        for reader in readers {
            let mut state = reader.state();
            if state.opened.contains_key(&name) && !state.has_ended {
                state.revoked.push(name);
                drop(state);
                reader.wake.set();
                asked.push(reader);
            }
        }
        let begun = Instant::now();
        for reader in asked {
            let mut state = reader.state();
            while state.opened.contains_key(&name) && !state.has_ended {
                let is_busy = state.opened.get(&name).is_some_and(|at| at.as_ref().is_some_and(|at| at.is_busy));
                let left = if is_busy { BUSY } else { PATIENCE }.saturating_sub(begun.elapsed());
                if left.is_zero() && !state.is_unwanted {
                    // UCX-3
                    state.is_unwanted = true;
                    reader.wake.set();
                }
                let wait = if left.is_zero() { BUSY } else { left };
                state = reader.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        lock(&self.shared.mapped).remove(&name);
    }

    /// Ends the service. Blocks.
    pub(super) fn stop(&self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.stop.set();
        let listening = lock(&self.listening).take();
        // A thread that panicked has ended, too.
        let _ = listening.map(JoinHandle::join);
        let readers = std::mem::take(&mut *lock(&self.shared.readers));
        for (_, thread) in readers {
            let _ = thread.join();
        }
        lock(&self.shared.mapped).clear();
    }
}

fn listen(listener: &TcpListener, shared: &Arc<Shared>) {
    while !shared.stopping.load(Ordering::SeqCst) {
        let has_room = shared.strangers.load(Ordering::SeqCst) < STRANGERS;
        let mut list = vec![PollFd::new(&shared.stop, PollFlags::IN)];
        if has_room {
            list.push(PollFd::new(listener, PollFlags::IN));
        }
        let limit = timespec(BREATH);
        // Whatever ends the wait, the loop checks everything.
        let _ = poll(&mut list, if has_room { None } else { Some(&limit) });
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(_) => {
                // Most likely out of descriptors. New connections wait meanwhile.
                let _ = poll(&mut [PollFd::new(&shared.stop, PollFlags::IN)], Some(&limit));
                continue;
            }
        };
        // Without a thread or a descriptor, the connection ends, and its other end reports that.
        let _ = admit(stream, shared);
    }
}

fn admit(stream: TcpStream, shared: &Arc<Shared>) -> Result<(), TransferError> {
    let mut readers = lock(&shared.readers);
    readers.retain(|(_, thread)| !thread.is_finished());
    if readers.len() >= READERS {
        return Err(TransferError::transport("too many readers"));
    }
    let reader = Arc::new(Reader { wake: Signal::new()?, state: Mutex::default(), changed: Condvar::new() });
    let (theirs, whole) = (Arc::clone(&reader), Arc::clone(shared));
    shared.strangers.fetch_add(1, Ordering::SeqCst);
    let thread = std::thread::Builder::new().name("mesh-ucx".to_owned()).stack_size(STACK);
    let thread = thread.spawn(move || {
        let _ended = Ended(&theirs);
        let greeted = greet(stream, &whole);
        whole.strangers.fetch_sub(1, Ordering::SeqCst);
        // However it ends, the other end notices.
        let _ = greeted.and_then(|wire| serve(wire, &theirs, &whole));
    });
    match thread {
        Ok(thread) => readers.push((reader, thread)),
        Err(_) => drop(shared.strangers.fetch_sub(1, Ordering::SeqCst)),
    }
    Ok(())
}

/// Notes that a reader's worker has ended, for whatever reason.
struct Ended<'a>(&'a Reader);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.has_ended = true;
        let opened = std::mem::take(&mut state.opened);
        drop(state);
        // Release memory that Python keeps without holding a lock.
        drop(opened);
        self.0.changed.notify_all();
    }
}

/// Makes a reader prove that it knows the door key. Trickling single bytes buys no time.
fn greet(stream: TcpStream, shared: &Shared) -> Result<Wire, TransferError> {
    let refused = || TransferError::refused("it has not proved who it is");
    let mut wire = Wire::new(stream).map_err(lost)?;
    let end = Instant::now() + HANDSHAKE;
    let hello = await_bytes::<HELLO>(&mut wire, shared, end)?;
    let answer = PROTOCOL.answer(&hello, shared.door, shared.exports.realm());
    let (talk, welcome) = answer.ok_or_else(refused)?;
    wire.send(&welcome).map_err(lost)?;
    let theirs = await_bytes::<PROOF>(&mut wire, shared, end)?;
    if talk.proves(Side::Client, &theirs) { Ok(wire) } else { Err(refused()) }
}

fn await_bytes<const N: usize>(wire: &mut Wire, shared: &Shared, end: Instant) -> Result<[u8; N], TransferError> {
    loop {
        if let Some(bytes) = wire.peek() {
            wire.skip(N);
            return Ok(bytes);
        }
        let limit = timespec(end.saturating_duration_since(Instant::now()));
        let mut list = [PollFd::new(&wire.stream, PollFlags::IN), PollFd::new(&shared.stop, PollFlags::IN)];
        let count = poll(&mut list, Some(&limit)).map_err(TransferError::os("wait for a reader"))?;
        if count == 0 || shared.stopping.load(Ordering::SeqCst) {
            return Err(TransferError::transport("the reader is late"));
        }
        wire.receive().map_err(lost)?;
    }
}

fn lost(error: io::Error) -> TransferError {
    TransferError::transport(format!("the connection failed: {error}{}", advice(error.raw_os_error())))
}

fn serve(mut wire: Wire, reader: &Reader, shared: &Shared) -> Result<(), TransferError> {
    let worker = Worker::new(&shared.context)?;
    let address = worker.address()?;
    wire.send(&[(address.len() as u32).to_le_bytes().as_slice(), &address].concat()).map_err(lost)?;
    let mut busy_at = Instant::now();
    loop {
        let mut turns = 0;
        loop {
            // A reader that dies closes its connection to us before those of UCX. Then do nothing more for it.
            if wire.has_closed() {
                return Ok(());
            }
            if turns == TURNS || !worker.progress() {
                break;
            }
            turns += 1;
        }
        let is_quiet = turns == 0;
        if !is_quiet {
            busy_at = Instant::now();
        }
        if is_quiet && busy_at.elapsed() < SPIN {
            std::hint::spin_loop();
            continue;
        }
        if is_quiet && worker.arm()? {
            let out = if wire.has_outgoing() { PollFlags::OUT } else { PollFlags::empty() };
            let mut list = [
                PollFd::new(&wire.stream, PollFlags::IN | out),
                PollFd::from_borrowed_fd(worker.descriptor(), PollFlags::IN),
                PollFd::from_borrowed_fd(reader.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(shared.stop.as_fd(), PollFlags::IN),
            ];
            // Check everything, whether interrupted or not.
            let _ = poll(&mut list, None);
        }
        if shared.stopping.load(Ordering::SeqCst) {
            return Ok(());
        }
        reader.wake.clear();
        let revoked = {
            let mut state = reader.state();
            if state.is_unwanted {
                return Ok(());
            }
            std::mem::take(&mut state.revoked)
        };
        for name in revoked {
            wire.send(&Answer::Revoked(name).encode()).map_err(lost)?;
        }
        wire.flush().map_err(lost)?;
        wire.receive().map_err(lost)?;
        while let Some(ask) = Ask::next(&mut wire)? {
            match ask {
                Ask::Open(name, token) => {
                    let answer = open(name, &token, reader, shared);
                    wire.send(&answer.encode()).map_err(lost)?;
                }
                Ask::Busy(name) => {
                    if let Some(Some(opened)) = reader.state().opened.get_mut(&name) {
                        opened.is_busy = true;
                    }
                }
                Ask::Leave(name) => {
                    // Release it without holding a lock.
                    let left = reader.state().opened.remove(&name);
                    drop(left);
                    reader.changed.notify_all();
                }
            }
        }
    }
}

/// Shows an export to a reader, if the reader may see it.
fn open(name: Name, token: &Token, reader: &Reader, shared: &Shared) -> Answer {
    // UCX-2: list it first, for those who close the export; then look for it among those that are offered.
    if let Entry::Vacant(place) = reader.state().opened.entry(name) {
        place.insert(None);
    } else {
        return Answer::Refused(name, ErrorKind::Transport);
    }
    let shown = shared.exports.find(name.0, name.1, token).and_then(|export| {
        let mapped = map(name, &export, shared)?;
        let key = mapped.as_ref().map(|mapped| mapped.key().to_vec()).unwrap_or_default();
        let shown = Shown { writable: export.writable, segments: export.segments.clone(), key };
        let opened = Opened { _mapped: mapped, _export: export, is_busy: false };
        reader.state().opened.insert(name, Some(opened));
        Ok(shown)
    });
    match shown {
        Ok(shown) => Answer::Opened(name, shown),
        Err(error) => {
            reader.state().opened.remove(&name);
            reader.changed.notify_all();
            Answer::Refused(name, error.kind)
        }
    }
}

/// Registers an export; none if it is empty. For memory in pieces, registers everything from the first to the last.
fn map(name: Name, export: &Export, shared: &Shared) -> Result<Option<Arc<Mapped>>, TransferError> {
    let list = export.segments.list();
    if list.len() > PIECES {
        return Err(TransferError::transport("the memory has too many pieces"));
    }
    let mut mapped = lock(&shared.mapped);
    if let Some(found) = mapped.get(&name) {
        return Ok(Some(Arc::clone(found)));
    }
    // SAFETY: memory of the export, which outlives its registration: whoever holds that holds the export, and
    // `withdraw` takes it out of this list before the export ends.
    let made = unsafe { Mapped::covering(&shared.context, list)? }.map(Arc::new);
    if let Some(made) = &made {
        mapped.insert(name, Arc::clone(made));
    }
    Ok(made)
}
