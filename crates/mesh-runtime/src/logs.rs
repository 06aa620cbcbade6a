//! The reading end of what the procs of this host print.
//!
//! Each proc has two pipes for its stdout and stderr. One thread, `mesh-logs`, reads them all, apart from the links: a
//! flood of lines never stands between a call and its answer. What it makes of them (`mesh_proto::logs`) waits in a
//! queue for whoever shows it, a thread of the program's ([`Logs::next`]).
//!
//! LOG-4: when the queue is full nobody reads, so that the pipes fill and those who print wait; the runtime does not.
//! LOG-5: what a proc has written before its end is read before its end is told.

use crate::error::RuntimeError;
use crate::reactor::would_block;
use crate::runtime::lock;
use mesh_proto::logs::{Aggregator, Chunk, Found, LogOptions, Stream, Tap};
use mesh_proto::{MeshId, ProcAddr};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use std::collections::{HashMap, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that may wait to be shown (LOG-4).
const MOST_WAITING: usize = 4 << 20;
/// Bytes that are read from one pipe before the next one's turn.
const READ: usize = 64 * 1024;
/// A pipe is read so many times in a row where all of it is wanted; more is written meanwhile.
const MOST_READS: usize = 64;
/// After reading the thread lets lines gather for so long: a flood is then read in few gulps, not line by line.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// A pipe that was found full grows to this size.
const GROWN: usize = 1 << 20;
const TOKEN_WAKE: u64 = u64::MAX;
const BATCH: usize = 64;

/// One proc's pipes; closed ones are gone.
#[derive(Debug)]
struct Pipes {
    addr: ProcAddr,
    fds: [Option<OwnedFd>; 2],
    grown: [bool; 2],
    tap: Tap,
    /// Its process has ended; only children that it has left may still write.
    ended: bool,
}

#[derive(Debug)]
struct Desk {
    pipes: HashMap<u64, Pipes>,
    tokens: HashMap<ProcAddr, u64>,
    /// Procs with open pipes, by mesh.
    open: HashMap<MeshId, usize>,
    next: u64,
    aggregator: Aggregator,
    queue: VecDeque<Chunk>,
    waiting: usize,
    /// Chunks so far: put into the queue, taken from it, and shown.
    put: u64,
    taken: u64,
    shown: u64,
    /// Somebody shows what is in the queue.
    watched: bool,
    /// Flushes so far: asked for, and done.
    asked: u64,
    flushed: u64,
    closing: bool,
    closed: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Logs {
    desk: Mutex<Desk>,
    epoll: OwnedFd,
    wake: OwnedFd,
    /// The queue has something, has room again, or has ended; a flush is done.
    changed: Condvar,
    started: Instant,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Logs {
    /// Starts the thread; `started` is when the clock began.
    pub(crate) fn start(started: Instant) -> Result<Arc<Self>, RuntimeError> {
        let os = RuntimeError::os;
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os("eventfd"))?;
        epoll::add(&epoll, &wake, EventData::new_u64(TOKEN_WAKE), EventFlags::IN).map_err(os("epoll_ctl"))?;
        let defaults = LogOptions { shown: true, window: Duration::ZERO, level: 0 };
        let logs = Arc::new(Self {
            desk: Mutex::new(Desk {
                pipes: HashMap::new(),
                tokens: HashMap::new(),
                open: HashMap::new(),
                next: 0,
                aggregator: Aggregator::new(defaults),
                queue: VecDeque::new(),
                waiting: 0,
                put: 0,
                taken: 0,
                shown: 0,
                watched: false,
                asked: 0,
                flushed: 0,
                closing: false,
                closed: false,
            }),
            epoll,
            wake,
            changed: Condvar::new(),
            started,
            thread: Mutex::new(None),
        });
        let reader = Arc::clone(&logs);
        let thread = std::thread::Builder::new()
            .name("mesh-logs".to_owned())
            .stack_size(512 * 1024)
            .spawn(move || reader.run())
            .map_err(|error| RuntimeError::Os {
                what: "start the thread that reads logs",
                errno: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN),
            })?;
        *lock(&logs.thread) = Some(thread);
        Ok(logs)
    }

    /// The writing ends of a new proc's stdout and stderr.
    pub(crate) fn open(&self, addr: ProcAddr) -> Result<(OwnedFd, OwnedFd), RuntimeError> {
        let pipe = || {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
            // The reading end alone: programs do not expect to write to anything that does not block.
            fcntl_setfl(&read, OFlags::NONBLOCK)?;
            Ok((read, write))
        };
        let os = || RuntimeError::os("pipe");
        let ((out, to_out), (err, to_err)) = (pipe().map_err(os())?, pipe().map_err(os())?);
        let mut desk = lock(&self.desk);
        let token = desk.next;
        desk.next += 1;
        for (which, fd) in [&out, &err].into_iter().enumerate() {
            let data = EventData::new_u64(token * 2 + which as u64);
            epoll::add(&self.epoll, fd, data, EventFlags::IN).map_err(RuntimeError::os("epoll_ctl"))?;
        }
        let fds = [Some(out), Some(err)];
        desk.pipes.insert(token, Pipes { addr, fds, grown: [false; 2], tap: Tap::new(addr.rank), ended: false });
        desk.tokens.insert(addr, token);
        *desk.open.entry(addr.mesh).or_default() += 1;
        Ok((to_out, to_err))
    }

    /// A proc's process has ended: reads the rest of what it wrote (LOG-5). Returns its last lines on stderr.
    pub(crate) fn ended(&self, addr: ProcAddr) -> Vec<String> {
        let mut desk = lock(&self.desk);
        let Some(token) = desk.tokens.remove(&addr) else { return Vec::new() };
        let now = self.started.elapsed();
        let mut buffer = vec![0_u8; READ];
        for stream in [Stream::Out, Stream::Err] {
            desk.read(token, stream, now, &mut buffer, MOST_READS);
        }
        let Some(pipes) = desk.pipes.get_mut(&token) else { return Vec::new() };
        pipes.ended = true;
        let tail = pipes.tap.tail();
        desk.forget_ended(token);
        desk.publish();
        drop(desk);
        self.changed.notify_all();
        // What it has begun to gather has a deadline.
        self.ring();
        tail
    }

    /// Sets what is done with the lines of a mesh from now on.
    pub fn set(&self, mesh: MeshId, options: LogOptions) {
        let mut desk = lock(&self.desk);
        let mut buffer = vec![0_u8; READ];
        let now = self.started.elapsed();
        // What was written before is under the options of before.
        let tokens: Vec<u64> = desk.pipes.iter().filter(|(_, p)| p.addr.mesh == mesh).map(|(t, _)| *t).collect();
        for token in tokens {
            for stream in [Stream::Out, Stream::Err] {
                desk.read(token, stream, now, &mut buffer, MOST_READS);
            }
        }
        desk.aggregator.set(mesh, options);
        desk.publish();
        drop(desk);
        self.changed.notify_all();
        self.ring();
    }

    /// Says that somebody is going to show what there is; until then it is dropped.
    pub fn watch(&self) {
        lock(&self.desk).watched = true;
    }

    /// What is to be shown next; blocks until there is something. None after the end. Asking again says that the last
    /// answer has been shown.
    pub fn next(&self) -> Option<Vec<Chunk>> {
        let mut desk = lock(&self.desk);
        desk.shown = desk.taken;
        self.changed.notify_all();
        while desk.queue.is_empty() && !desk.closed {
            desk = self.changed.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
        if desk.queue.is_empty() {
            return None;
        }
        desk.waiting = 0;
        desk.taken = desk.put;
        Some(desk.queue.drain(..).collect())
    }

    /// Reads and shows everything that was written before, counts and begun lines included; returns whether that was
    /// done within `limit`.
    pub fn flush(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut desk = lock(&self.desk);
        desk.asked += 1;
        let ticket = desk.asked;
        self.ring();
        let mut mark = None;
        loop {
            if mark.is_none() && (desk.flushed >= ticket || desk.closed) {
                mark = Some(desk.put);
            }
            if mark.is_some_and(|mark| desk.shown >= mark || !desk.watched) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            desk = self.changed.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Reads what is left and ends the thread; what is in the queue can still be taken.
    pub(crate) fn close(&self) {
        lock(&self.desk).closing = true;
        self.changed.notify_all();
        self.ring();
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }

    fn ring(&self) {
        // Full means rung already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn run(&self) {
        let mut buffer = vec![0_u8; READ];
        let mut events = [MaybeUninit::<Event>::uninit(); BATCH];
        loop {
            let deadline = lock(&self.desk).deadline();
            let timeout = deadline.map(|at| timespec(at.saturating_sub(self.started.elapsed())));
            let ready: Vec<u64> = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
                Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
                Err(_) => Vec::new(),
            };
            let mut read = 0;
            let mut desk = lock(&self.desk);
            for token in ready {
                if token == TOKEN_WAKE {
                    let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
                    continue;
                }
                let stream = if token % 2 == 0 { Stream::Out } else { Stream::Err };
                read += desk.read(token / 2, stream, self.started.elapsed(), &mut buffer, 1);
                self.changed.notify_all();
                desk.publish();
                // A death, or whoever sets an option, does not wait for all of a flood.
                drop(desk);
                desk = lock(&self.desk);
            }
            let now = self.started.elapsed();
            desk.tick(now);
            if desk.closing || desk.asked > desk.flushed {
                desk.everything(now, &mut buffer);
            }
            let done = desk.closing;
            desk.publish();
            desk.closed |= done;
            self.changed.notify_all();
            if done {
                // The pipes close: whoever still writes hears of it.
                desk.pipes.clear();
                return;
            }
            while desk.waiting > MOST_WAITING && !desk.closing {
                desk = self.changed.wait(desk).unwrap_or_else(PoisonError::into_inner);
            }
            drop(desk);
            if read > 0 && read < MOST_READS * READ / 8 {
                let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&PAUSE));
            }
        }
    }
}

impl Desk {
    /// Reads from one pipe at most `times` times. Returns how many bytes there were.
    fn read(&mut self, token: u64, stream: Stream, now: Duration, buffer: &mut [u8], times: usize) -> usize {
        let which = stream as usize;
        let mut total = 0;
        for _ in 0..times {
            let Some(pipes) = self.pipes.get_mut(&token) else { break };
            let Some(fd) = &pipes.fds[which] else { break };
            let mesh = pipes.addr.mesh;
            let mut found = lines_to(&mut self.aggregator, mesh, now);
            match rustix::io::read(fd, &mut *buffer) {
                Ok(0) => {}
                Ok(n) => {
                    total += n;
                    pipes.tap.feed(stream, &buffer[..n], now, &mut found);
                    if n == buffer.len() && !std::mem::replace(&mut pipes.grown[which], true) {
                        // The kernel may say no, to a user who has many pipes: then it stays as it is.
                        let _ = fcntl_setpipe_size(fd, GROWN);
                    }
                    continue;
                }
                Err(errno) if would_block(errno) => break,
                Err(_) => {}
            }
            // Closed by all who could write.
            pipes.fds[which] = None;
            if pipes.fds.iter().all(Option::is_none) {
                pipes.tap.end(&mut found);
                drop(found);
                self.forget_ended(token);
            }
            break;
        }
        total
    }

    /// Forgets a proc that has ended and whose pipes are closed.
    fn forget_ended(&mut self, token: u64) {
        let over = |pipes: &Pipes| pipes.ended && pipes.fds.iter().all(Option::is_none);
        if !self.pipes.get(&token).is_some_and(over) {
            return;
        }
        let Some(pipes) = self.pipes.remove(&token) else { return };
        let mesh = pipes.addr.mesh;
        if let Some(open) = self.open.get_mut(&mesh) {
            *open -= 1;
            if *open == 0 {
                self.open.remove(&mesh);
                self.aggregator.forget(mesh);
            }
        }
    }

    fn deadline(&self) -> Option<Duration> {
        let begun = self.pipes.values().filter_map(|pipes| pipes.tap.deadline()).min();
        begun.into_iter().chain(self.aggregator.deadline()).min()
    }

    fn tick(&mut self, now: Duration) {
        for pipes in self.pipes.values_mut() {
            if pipes.tap.deadline().is_some_and(|at| at <= now) {
                pipes.tap.tick(now, &mut lines_to(&mut self.aggregator, pipes.addr.mesh, now));
            }
        }
        self.aggregator.tick(now);
    }

    /// Reads all pipes to where they are empty, and lets nothing wait for more.
    fn everything(&mut self, now: Duration, buffer: &mut [u8]) {
        self.flushed = self.asked;
        let tokens: Vec<u64> = self.pipes.keys().copied().collect();
        for token in tokens {
            for stream in [Stream::Out, Stream::Err] {
                self.read(token, stream, now, buffer, MOST_READS);
            }
            if let Some(pipes) = self.pipes.get_mut(&token) {
                let mut found = lines_to(&mut self.aggregator, pipes.addr.mesh, now);
                if self.closing {
                    pipes.tap.end(&mut found);
                } else {
                    pipes.tap.flush(&mut found);
                }
            }
        }
        self.aggregator.flush();
    }

    /// Puts what is ready into the queue; where nobody looks, it is dropped.
    fn publish(&mut self) {
        if self.aggregator.ready() == 0 {
            return;
        }
        let chunks = self.aggregator.take();
        if self.watched {
            self.put += chunks.len() as u64;
            self.waiting += chunks.iter().map(|chunk| chunk.text.len()).sum::<usize>();
            self.queue.extend(chunks);
        }
    }
}

/// Where a tap's findings go.
fn lines_to(aggregator: &mut Aggregator, mesh: MeshId, now: Duration) -> impl FnMut(Found<'_>) {
    move |found| match found {
        Found::Line(line) => aggregator.line(mesh, &line, now),
        Found::Introduced(procs, options) => aggregator.introduce(mesh, procs, options),
        Found::Options(mesh, options) => aggregator.set(mesh, options),
    }
}

fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(d.subsec_nanos()) }
}
