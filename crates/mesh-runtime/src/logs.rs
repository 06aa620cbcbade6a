//! The reading end of what the procs of this host print.
//!
//! Each proc has two pipes for its stdout and stderr. One thread, `mesh-logs`, reads them all, apart from the links: a
//! flood of lines never stands between a call and its answer. What it makes of them (`mesh_proto::logs`) waits in a
//! queue for whoever shows it, a thread of the program's ([`Logs::next`]).
//!
//! On another host than the controller's the same thread reads, and sends what the taps have found to the controller in
//! batches (`mesh_proto::logs::Batch`), of which one is under way at a time: the controller asks for the next once it
//! has dealt with the last, in its own thread of this name. `Lines` frames carry this:
//!
//! | name | from, to | is |
//! | --- | --- | --- |
//! | `found` | agent, controller | a batch |
//! | `more` | controller, agent | it was dealt with |
//! | `flush` | controller, agents | what was written so far is wanted, and the number (the header's actor) after it |
//! | `set` | controller, agents | what is done with the lines of a mesh (the header's actor) |
//!
//! LOG-4: when the queue is full nobody reads, so that the pipes fill and those who print wait; the runtime does not.
//! LOG-5: what a proc has written before its end is read before its end is told.
//! LOG-6: a host has one batch under way, and reads no more than one beyond it: a flood there fills nobody's memory, and
//! stands in nobody's way but that of its printers.

use crate::error::RuntimeError;
use crate::reactor::would_block;
use crate::runtime::{Runtime, lock};
use bytes::Bytes;
use mesh_proto::logs::{Aggregator, Batch, Chunk, Found, LogOptions, Stream, Tap, Told, read_batch};
use mesh_proto::{Frame, Header, HostNo, Kind, MeshId, Part, ProcAddr};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
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
/// Bytes of a batch above which nothing more is read before it is asked for (LOG-6).
const MOST_FOUND: usize = 64 * 1024;
/// With so many a flush does not read more.
const MOST_FLUSHED: usize = 4 << 20;
/// Meshes whose options may come before their procs.
const MOST_EARLY: usize = 1024;
/// How long the end of a job waits for what other hosts have still to tell.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long new options wait for what other hosts have still to tell.
const BEFORE_OPTIONS: Duration = Duration::from_secs(1);
/// What holds for a mesh that nobody has said anything of.
const DEFAULTS: LogOptions = LogOptions { shown: true, window: Duration::ZERO, level: 0 };

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
    sink: Sink,
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
    /// At the controller: the other hosts that have procs of a mesh.
    elsewhere: HashMap<MeshId, HashSet<HostNo>>,
    /// The flushes that other hosts have been asked for, and the latest that each has done.
    asked_away: u64,
    done_away: HashMap<HostNo, u64>,
    dead: HashSet<HostNo>,
    /// What is to be sent once the lock is let go.
    mail: Vec<Mail>,
}

/// Where findings go.
#[derive(Debug)]
enum Sink {
    /// To be shown here; what a process has set for a mesh of its own, other hosts are to know.
    Shown(Aggregator, Vec<(MeshId, LogOptions)>),
    /// To the controller.
    Sent(Sending),
}

#[derive(Debug, Default)]
struct Sending {
    batch: Batch,
    under_way: bool,
    options: HashMap<MeshId, LogOptions>,
}

/// What others have said, for the thread.
#[derive(Debug)]
enum Order {
    Found(HostNo, Bytes),
    More,
    Flush(u64),
    Set(MeshId, LogOptions),
    Dead(HostNo),
}

/// What the thread says to others.
#[derive(Debug)]
enum Mail {
    Found(Vec<u8>),
    More(HostNo),
    Set(MeshId, LogOptions),
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
    /// Apart from the desk, which is held while pipes are read: whoever brings an order reads links.
    orders: Mutex<VecDeque<Order>>,
    runtime: Weak<Runtime>,
}

impl Logs {
    /// Starts the thread; `started` is when the clock began, `away` says that the lines are shown on another host.
    pub(crate) fn start(started: Instant, runtime: Weak<Runtime>, away: bool) -> Result<Arc<Self>, RuntimeError> {
        let os = RuntimeError::os;
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os("eventfd"))?;
        epoll::add(&epoll, &wake, EventData::new_u64(TOKEN_WAKE), EventFlags::IN).map_err(os("epoll_ctl"))?;
        let logs = Arc::new(Self {
            desk: Mutex::new(Desk {
                pipes: HashMap::new(),
                tokens: HashMap::new(),
                open: HashMap::new(),
                next: 0,
                sink: match away {
                    true => Sink::Sent(Sending::default()),
                    false => Sink::Shown(Aggregator::new(DEFAULTS), Vec::new()),
                },
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
                elsewhere: HashMap::new(),
                asked_away: 0,
                done_away: HashMap::new(),
                dead: HashSet::new(),
                mail: Vec::new(),
            }),
            epoll,
            wake,
            changed: Condvar::new(),
            started,
            thread: Mutex::new(None),
            orders: Mutex::default(),
            runtime,
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
        if lock(&self.desk).elsewhere.contains_key(&mesh) {
            // What other hosts have not told yet is under the options of before, too.
            self.collect(Instant::now() + BEFORE_OPTIONS);
        }
        let mut desk = lock(&self.desk);
        let mut buffer = vec![0_u8; READ];
        desk.set(mesh, options, self.started.elapsed(), &mut buffer);
        desk.publish();
        drop(desk);
        self.send(vec![Mail::Set(mesh, options)]);
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
        if std::mem::take(&mut desk.waiting) > MOST_WAITING {
            self.ring();
        }
        desk.taken = desk.put;
        Some(desk.queue.drain(..).collect())
    }

    /// Reads and shows everything that was written before, counts and begun lines included; returns whether that was
    /// done within `limit`.
    pub fn flush(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let all = self.collect(until);
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
                return all;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            desk = self.changed.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// At the controller: has other hosts tell what was written there before; false if one has not by then.
    fn collect(&self, until: Instant) -> bool {
        let Some(runtime) = self.runtime.upgrade().filter(|runtime| runtime.me() == ProcAddr::CONTROLLER) else {
            return true;
        };
        let mut hosts = runtime.hosts_in_reach();
        if hosts.is_empty() {
            return true;
        }
        let ticket = {
            let mut desk = lock(&self.desk);
            desk.asked_away += 1;
            desk.asked_away
        };
        runtime.cast_lines(b"flush", ticket, &[]);
        let mut desk = lock(&self.desk);
        loop {
            hosts
                .retain(|host| !desk.dead.contains(host) && desk.done_away.get(host).is_none_or(|done| *done < ticket));
            if hosts.is_empty() || desk.closed {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            desk = self.changed.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Something for the thread, from whoever reads links: it does not wait.
    fn order(&self, order: Order) {
        lock(&self.orders).push_back(order);
        self.ring();
    }

    /// Sends what the thread has to say. With no lock held.
    fn send(&self, mail: Vec<Mail>) {
        if mail.is_empty() {
            return;
        }
        let Some(runtime) = self.runtime.upgrade().filter(|runtime| !runtime.is_closed()) else { return };
        for one in mail {
            match one {
                Mail::Found(batch) => runtime.send_lines(0, b"found", &[Part::Inline(batch.into())]),
                Mail::More(host) => runtime.send_lines(host, b"more", &[]),
                Mail::Set(mesh, options) => {
                    let told = Part::Inline(Bytes::copy_from_slice(&options.encode()));
                    runtime.cast_lines(b"set", mesh, &[told]);
                }
            }
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
        let mut full = false;
        loop {
            let ready = if full { self.sleep() } else { self.ready(&mut events) };
            let mut read = 0;
            let mut desk = lock(&self.desk);
            // First: what is read now may have been written after an order was given.
            desk.obey(&self.orders, self.started.elapsed(), &mut buffer, full);
            for token in ready {
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
            let done = desk.closing;
            if done || !desk.is_full() && desk.asked > desk.flushed {
                desk.everything(now, &mut buffer);
            }
            desk.publish();
            desk.closed |= done;
            if done {
                // The pipes close: whoever still writes hears of it.
                desk.pipes.clear();
            }
            let mail = desk.mail();
            full = desk.is_full();
            drop(desk);
            self.changed.notify_all();
            self.send(mail);
            if done {
                return;
            }
            if read > 0 && read < MOST_READS * READ / 8 {
                let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&PAUSE));
            }
        }
    }

    /// The pipes that can be read, once there are any, or something else is to be done.
    fn ready(&self, events: &mut [MaybeUninit<Event>]) -> Vec<u64> {
        let deadline = lock(&self.desk).deadline();
        let timeout = deadline.map(|at| timespec(at.saturating_sub(self.started.elapsed())));
        let mut ready: Vec<u64> = match epoll::wait(&self.epoll, events, timeout.as_ref()) {
            Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
            Err(_) => Vec::new(),
        };
        ready.retain(|token| *token != TOKEN_WAKE || rustix::io::read(&self.wake, &mut [0_u8; 8]).is_err());
        ready
    }

    /// Waits for what is read already to become less.
    fn sleep(&self) -> Vec<u64> {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        Vec::new()
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
            let mut found = lines_to(&mut self.sink, mesh, now);
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
                self.left(mesh);
            }
        }
    }

    /// No process of a mesh is left here, or on another host.
    fn left(&mut self, mesh: MeshId) {
        match &mut self.sink {
            Sink::Shown(aggregator, _) => {
                if !self.open.contains_key(&mesh) && !self.elsewhere.contains_key(&mesh) {
                    aggregator.forget(mesh);
                }
            }
            Sink::Sent(sending) => {
                sending.options.remove(&mesh);
                sending.batch.closed(mesh);
            }
        }
    }

    /// Nothing more is read before something was shown, or sent.
    fn is_full(&self) -> bool {
        let full = match &self.sink {
            Sink::Shown(..) => self.waiting > MOST_WAITING,
            Sink::Sent(sending) => sending.under_way && sending.batch.len() > MOST_FOUND,
        };
        full && !self.closing
    }

    /// What is to be said to others.
    fn mail(&mut self) -> Vec<Mail> {
        match &mut self.sink {
            Sink::Shown(_, set) => self.mail.extend(set.drain(..).map(|(mesh, options)| Mail::Set(mesh, options))),
            Sink::Sent(sending) if !sending.under_way && !sending.batch.is_empty() => {
                sending.under_way = true;
                self.mail.push(Mail::Found(sending.batch.take()));
            }
            Sink::Sent(_) => {}
        }
        std::mem::take(&mut self.mail)
    }

    /// Does what others have said. Where this host is full already, their lines wait.
    fn obey(&mut self, orders: &Mutex<VecDeque<Order>>, now: Duration, buffer: &mut [u8], full: bool) {
        let mut all = std::mem::take(&mut *lock(orders));
        if full && matches!(self.sink, Sink::Shown(..)) && self.is_full() {
            let (later, at_once) = all.into_iter().partition(|order| matches!(order, Order::Found(..)));
            let mut orders = lock(orders);
            let since = std::mem::replace(&mut *orders, later);
            orders.extend(since);
            all = at_once;
        }
        for order in all {
            match order {
                Order::Found(host, raw) => self.heard(host, &raw, now),
                Order::Set(mesh, options) => self.set(mesh, options, now, buffer),
                Order::Dead(host) => {
                    self.dead.insert(host);
                    self.done_away.remove(&host);
                    let theirs: Vec<MeshId> = self
                        .elsewhere
                        .iter()
                        .filter(|(_, hosts)| hosts.contains(&host))
                        .map(|(mesh, _)| *mesh)
                        .collect();
                    for mesh in theirs {
                        self.left_there(mesh, host);
                    }
                }
                Order::More => {
                    if let Sink::Sent(sending) = &mut self.sink {
                        sending.under_way = false;
                    }
                }
                Order::Flush(ticket) => {
                    if !matches!(&self.sink, Sink::Sent(sending) if sending.batch.len() > MOST_FLUSHED) {
                        self.everything(now, buffer);
                    }
                    if let Sink::Sent(sending) = &mut self.sink {
                        sending.batch.flushed(ticket);
                    }
                }
            }
        }
    }

    /// Another host has told something.
    fn heard(&mut self, host: HostNo, raw: &[u8], now: Duration) {
        if self.dead.contains(&host) {
            return;
        }
        let mut left = Vec::new();
        read_batch(raw, &mut |told| match told {
            Told::Found(mesh, found) => {
                if !matches!(found, Found::Options(..)) {
                    self.elsewhere.entry(mesh).or_default().insert(host);
                }
                match (&mut self.sink, found) {
                    // It was not left out there, by the options that held when it was written.
                    (Sink::Shown(aggregator, _), Found::Line(line)) => aggregator.kept(mesh, &line, now),
                    (sink, found) => lines_to(sink, mesh, now)(found),
                }
            }
            Told::Closed(mesh) => left.push(mesh),
            Told::Flushed(ticket) => {
                let done = self.done_away.entry(host).or_default();
                *done = ticket.max(*done);
            }
        });
        for mesh in left {
            self.left_there(mesh, host);
        }
        self.mail.push(Mail::More(host));
    }

    fn left_there(&mut self, mesh: MeshId, host: HostNo) {
        if let Some(hosts) = self.elsewhere.get_mut(&mesh) {
            hosts.remove(&host);
            if hosts.is_empty() {
                self.elsewhere.remove(&mesh);
                self.left(mesh);
            }
        }
    }

    /// Sets what is done with the lines of a mesh. What was written before is under the options of before.
    fn set(&mut self, mesh: MeshId, options: LogOptions, now: Duration, buffer: &mut [u8]) {
        let tokens: Vec<u64> = self.pipes.iter().filter(|(_, p)| p.addr.mesh == mesh).map(|(t, _)| *t).collect();
        for token in tokens {
            for stream in [Stream::Out, Stream::Err] {
                self.read(token, stream, now, buffer, MOST_READS);
            }
        }
        match &mut self.sink {
            Sink::Shown(aggregator, _) => aggregator.set(mesh, options),
            Sink::Sent(sending) => {
                if self.open.contains_key(&mesh) || sending.options.len() < MOST_EARLY {
                    sending.options.insert(mesh, options);
                }
            }
        }
    }

    fn deadline(&self) -> Option<Duration> {
        let begun = self.pipes.values().filter_map(|pipes| pipes.tap.deadline()).min();
        let counted = match &self.sink {
            Sink::Shown(aggregator, _) => aggregator.deadline(),
            Sink::Sent(_) => None,
        };
        begun.into_iter().chain(counted).min()
    }

    fn tick(&mut self, now: Duration) {
        for pipes in self.pipes.values_mut() {
            if pipes.tap.deadline().is_some_and(|at| at <= now) {
                pipes.tap.tick(now, &mut lines_to(&mut self.sink, pipes.addr.mesh, now));
            }
        }
        if let Sink::Shown(aggregator, _) = &mut self.sink {
            aggregator.tick(now);
        }
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
                let mut found = lines_to(&mut self.sink, pipes.addr.mesh, now);
                if self.closing {
                    pipes.tap.end(&mut found);
                } else {
                    pipes.tap.flush(&mut found);
                }
            }
        }
        if let Sink::Shown(aggregator, _) = &mut self.sink {
            aggregator.flush();
        }
    }

    /// Puts what is ready into the queue; where nobody looks, it is dropped.
    fn publish(&mut self) {
        let Sink::Shown(aggregator, _) = &mut self.sink else { return };
        if aggregator.ready() == 0 {
            return;
        }
        let chunks = aggregator.take();
        if self.watched {
            self.put += chunks.len() as u64;
            self.waiting += chunks.iter().map(|chunk| chunk.text.len()).sum::<usize>();
            self.queue.extend(chunks);
        }
    }
}

/// Where a tap's findings go.
fn lines_to(sink: &mut Sink, mesh: MeshId, now: Duration) -> impl FnMut(Found<'_>) {
    move |found| match sink {
        Sink::Shown(aggregator, set) => match found {
            Found::Line(line) => aggregator.line(mesh, &line, now),
            Found::Introduced(procs, options) => aggregator.introduce(mesh, procs, options),
            Found::Options(mesh, options) => {
                aggregator.set(mesh, options);
                set.push((mesh, options));
            }
        },
        Sink::Sent(sending) => {
            match found {
                Found::Line(line) if sending.options.get(&mesh).unwrap_or(&DEFAULTS).omit(&line) => return,
                Found::Line(_) => {}
                Found::Introduced(_, options) => {
                    sending.options.entry(mesh).or_insert(options);
                }
                Found::Options(mesh, options) => {
                    sending.options.insert(mesh, options);
                }
            }
            sending.batch.found(mesh, &found);
        }
    }
}

impl Runtime {
    /// What hosts tell each other of lines; see the module.
    pub(crate) fn on_lines(&self, frame: &Frame) {
        let header = frame.header;
        if !header.src.is_agent() || !self.me.is_agent() || header.src == self.me {
            return;
        }
        let part = || match frame.parts().ok()?.into_iter().next()? {
            Part::Inline(bytes) => Some(bytes),
            Part::Shared { .. } => None,
        };
        let order = match frame.name() {
            b"found" if self.me == ProcAddr::CONTROLLER => part().map(|raw| Order::Found(header.src.host, raw)),
            b"more" if header.src == ProcAddr::CONTROLLER => Some(Order::More),
            b"flush" if header.src == ProcAddr::CONTROLLER => Some(Order::Flush(header.actor)),
            b"set" if header.src == ProcAddr::CONTROLLER => {
                part().and_then(|raw| LogOptions::decode(&raw)).map(|options| Order::Set(header.actor, options))
            }
            _ => None,
        };
        if let Some(order) = order
            && let Ok(logs) = self.logs()
        {
            logs.order(order);
        }
    }

    /// A host is dead: nothing of it is waited for.
    pub(crate) fn forget_lines_of(&self, host: HostNo) {
        if let Some(logs) = self.logs_made() {
            logs.order(Order::Dead(host));
        }
    }

    /// Before the end: what other hosts have still to tell is wanted.
    pub(crate) fn collect_lines(&self) {
        if let Some(logs) = self.logs_made() {
            logs.collect(Instant::now() + LAST_WORDS);
        }
    }

    fn send_lines(&self, host: HostNo, name: &[u8], parts: &[Part]) {
        let header = Header::new(Kind::Lines, self.me, ProcAddr::agent(host));
        self.dispatch(Frame::build(header, None, name, parts), None);
    }

    fn cast_lines(&self, name: &[u8], about: u64, parts: &[Part]) {
        let Some(target) = self.other_agents().filter(|_| self.me == ProcAddr::CONTROLLER) else { return };
        let mut header = Header::new(Kind::Lines, self.me, ProcAddr::CONTROLLER);
        header.actor = about;
        self.dispatch(Frame::build(header, Some(&target), name, parts), None);
    }
}

fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(d.subsec_nanos()) }
}
