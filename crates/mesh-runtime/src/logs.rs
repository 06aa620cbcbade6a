//! The reading end of what the procs of this host print.
//!
//! Each proc has two pipes for its stdout and stderr. One thread, `mesh-logs`, reads them all, apart from the links: a
//! flood of lines never stands between a call and its answer. What it makes of them (`mesh_proto::logs`) waits in a
//! queue for a thread of the program that shows it ([`Logs::next`]).
//!
//! On hosts other than the controller's, the same thread reads and sends what the taps have found to the controller in
//! batches (`mesh_proto::logs::Batch`), one under way at a time: the controller's `mesh-logs` thread asks for the next
//! one once it has handled the last. `Lines` frames carry this:
//!
//! | name | from, to | meaning |
//! | --- | --- | --- |
//! | `found` | agent, controller | a batch |
//! | `more` | controller, agent | the batch was handled |
//! | `flush` | controller, agents | send what was written so far, then the number (the header's actor) |
//! | `report` | controller, agent | send what processes of a mesh have written so far, then the number |
//! | `set` | controller, agents | what to do with the lines of a mesh (the header's actor) |
//!
//! LOG-4: when the queue is full nobody reads, so the pipes fill and those who print wait; the runtime does not.
//! LOG-5: what a proc wrote before its end is read before its end is reported.
//! LOG-6: a host has one batch under way, and reads at most one more: a flood there fills nobody's memory, and delays
//! only those who print.

mod behind;
mod messages;
pub(crate) mod quiet;
mod reader;

use crate::completion::{Completion, Fate};
use crate::error::RuntimeError;
use crate::locks::lock;
use crate::timespec::timespec;
use behind::{Behind, Source, Stage};
pub(crate) use behind::{CatchUp, Look, Looks};
use mesh_proto::control::Lines;
use mesh_proto::hosts::HostSet;
use mesh_proto::logs::{Chunk, LogOptions, Stream, Tap};
use mesh_proto::{HostNo, MeshId, ProcAddr, Target};
use messages::Mail;
pub(crate) use messages::{LogPeers, Order};
use quiet::PipeWatch;
use reader::{LogReader, MOST_READS, MOST_WAITING, Pipes};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::{HashSet, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How many bytes to read from one pipe before the next one's turn.
const READ: usize = 64 * 1024;
/// How long lines may gather after a read: a flood is then read in few large pieces, not line by line.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
const TOKEN_WAKE: u64 = u64::MAX;
const BATCH: usize = 64;
/// How long new options wait for what other hosts have still to report.
const BEFORE_OPTIONS: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub struct Logs {
    reader: Mutex<LogReader>,
    epoll: OwnedFd,
    wake: OwnedFd,
    /// The queue has something, has room again, or has ended; or a flush is done.
    changed: Condvar,
    started: Instant,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Separate from the reader, which is locked while pipes are read: orders come from threads that read links.
    orders: Mutex<VecDeque<Order>>,
    peers: Weak<dyn LogPeers>,
    behind: Arc<Behind>,
    watch: PipeWatch,
    /// The thread takes no more orders.
    over: AtomicBool,
}

impl Logs {
    /// Starts the thread. `started` is when the clock began; `remote` means that the lines are shown on another host.
    pub(crate) fn start(started: Instant, peers: Weak<dyn LogPeers>, remote: bool) -> Result<Arc<Self>, RuntimeError> {
        let os = RuntimeError::os;
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os("eventfd"))?;
        epoll::add(&epoll, &wake, EventData::new_u64(TOKEN_WAKE), EventFlags::IN).map_err(os("epoll_ctl"))?;
        let behind = Arc::<Behind>::default();
        let logs = Arc::new(Self {
            reader: Mutex::new(LogReader::new(remote, &behind)),
            epoll,
            wake,
            changed: Condvar::new(),
            started,
            thread: Mutex::new(None),
            orders: Mutex::default(),
            peers,
            behind,
            watch: PipeWatch::default(),
            over: AtomicBool::new(false),
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
            // Only the reading end: programs do not expect a write that does not block.
            fcntl_setfl(&read, OFlags::NONBLOCK)?;
            Ok((read, write))
        };
        let os = || RuntimeError::os("pipe");
        let ((out, to_out), (err, to_err)) = (pipe().map_err(os())?, pipe().map_err(os())?);
        let mut reader = lock(&self.reader);
        let token = reader.next;
        reader.next += 1;
        for (which, fd) in [&out, &err].into_iter().enumerate() {
            let data = EventData::new_u64(token * 2 + which as u64);
            epoll::add(&self.epoll, fd, data, EventFlags::IN).map_err(RuntimeError::os("epoll_ctl"))?;
        }
        let fds = [Some(out), Some(err)];
        self.behind.opened(token, addr);
        reader.pipes.insert(token, Pipes { addr, fds, grown: [false; 2], tap: Tap::new(addr.rank), ended: false });
        reader.tokens.insert(addr, token);
        *reader.open.entry(addr.mesh).or_default() += 1;
        Ok((to_out, to_err))
    }

    /// A proc's process has ended: reads the rest of its output (LOG-5). Returns its last lines on stderr.
    pub(crate) fn ended(&self, addr: ProcAddr) -> Vec<String> {
        let mut reader = lock(&self.reader);
        let Some(token) = reader.tokens.remove(&addr) else { return Vec::new() };
        let now = self.started.elapsed();
        let mut buffer = vec![0_u8; READ];
        for stream in [Stream::Out, Stream::Err] {
            reader.read(token, stream, now, &mut buffer, MOST_READS);
        }
        let Some(pipes) = reader.pipes.get_mut(&token) else { return Vec::new() };
        pipes.ended = true;
        let tail = pipes.tap.tail();
        reader.forget_ended(token);
        reader.publish();
        drop(reader);
        self.changed.notify_all();
        // What it has begun to gather has a deadline.
        self.ring();
        tail
    }

    /// Sets what to do with the lines of a mesh from now on.
    pub fn set(&self, mesh: MeshId, options: LogOptions) {
        if lock(&self.reader).elsewhere.contains_key(&mesh) {
            // What other hosts have not reported yet falls under the old options, too.
            self.collect(Instant::now() + BEFORE_OPTIONS);
        }
        let mut reader = lock(&self.reader);
        let mut buffer = vec![0_u8; READ];
        reader.set(mesh, options, self.started.elapsed(), &mut buffer);
        reader.publish();
        drop(reader);
        self.send(vec![Mail::Set(mesh, options)]);
        self.changed.notify_all();
        self.ring();
    }

    /// Announces that someone will show the lines; until then they are dropped.
    pub fn watch(&self) {
        lock(&self.reader).watched = true;
        self.behind.watched();
    }

    /// Sets whether someone takes records one by one.
    pub fn hand_on_records(&self, wanted: bool) {
        lock(&self.reader).hand_on_records(wanted);
    }

    /// Returns what to show next, blocking until there is something. None after the end. The next call means that the
    /// last answer has been shown.
    pub fn next(&self) -> Option<Vec<Chunk>> {
        self.behind.showing();
        let mut reader = lock(&self.reader);
        reader.shown = reader.taken;
        self.behind.shown(reader.shown);
        let done = reader.caught_up();
        self.changed.notify_all();
        if !done.is_empty() {
            drop(reader);
            finish(done);
            reader = lock(&self.reader);
        }
        while reader.queue.is_empty() && !reader.closed {
            reader = self.changed.wait(reader).unwrap_or_else(PoisonError::into_inner);
        }
        if reader.queue.is_empty() {
            return None;
        }
        if std::mem::take(&mut reader.waiting) > MOST_WAITING {
            self.ring();
        }
        reader.taken = reader.put;
        Some(reader.queue.drain(..).collect())
    }

    /// Reads and shows everything written before, including counts and incomplete lines. Returns whether that was done
    /// within `limit`.
    pub fn flush(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let all = self.collect(until);
        let mut reader = lock(&self.reader);
        reader.asked += 1;
        let ticket = reader.asked;
        self.ring();
        let mut mark = None;
        loop {
            if mark.is_none() && (reader.flushed >= ticket || reader.closed) {
                mark = Some(reader.put);
            }
            if mark.is_some_and(|mark| reader.shown >= mark || !reader.watched) {
                return all;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            reader = self.changed.wait_timeout(reader, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// At the controller: makes other hosts report what was written there before. False if one has not in time.
    pub(crate) fn collect(&self, until: Instant) -> bool {
        let Some(peers) = self.peers.upgrade() else { return true };
        let mut hosts = peers.hosts();
        if hosts.is_empty() {
            return true;
        }
        let ticket = {
            let mut reader = lock(&self.reader);
            reader.asked_remote += 1;
            reader.asked_remote
        };
        peers.cast(&Lines::Flush(ticket));
        let mut reader = lock(&self.reader);
        loop {
            hosts.retain(|host| {
                !reader.dead.contains(host) && reader.done_away.get(host).is_none_or(|done| *done < ticket)
            });
            if hosts.is_empty() || reader.closed {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            reader = self.changed.wait_timeout(reader, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    // What results wait for (LOG-8).

    /// Whether processes have written something here that was not shown, or reported, yet. Costs a system call.
    pub(crate) fn look(&self, target: &Target) -> Look {
        self.look_for(|source| source.is_of(target))
    }

    /// As [`Logs::look`], for all processes of a mesh, wherever they are.
    pub(crate) fn look_for_mesh(&self, mesh: MeshId) -> Look {
        self.look_for(|source| source.mesh() == mesh)
    }

    /// Whether what was read of these processes, or came from other hosts, is still to be shown, or reported.
    pub(crate) fn is_on_its_way(&self, target: &Target) -> bool {
        self.behind.look(|source| source.is_of(target), []) == Look::OfThese
    }

    /// As [`Logs::is_on_its_way`], for all processes of a mesh.
    pub(crate) fn is_on_its_way_for_mesh(&self, mesh: MeshId) -> bool {
        self.behind.look(|source| source.mesh() == mesh, []) == Look::OfThese
    }

    /// What polls of the links say about the pipes.
    pub(crate) fn pipe_watch(&self) -> &PipeWatch {
        &self.watch
    }

    fn look_for(&self, is_wanted: impl Fn(Source) -> bool) -> Look {
        let mut events = [MaybeUninit::<Event>::uninit(); BATCH];
        match epoll::wait(&self.epoll, &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            // So many at once: perhaps more.
            Ok((events, _)) if events.len() == BATCH => Look::OfThese,
            Ok((events, _)) => {
                let pipes = events.iter().map(|event| event.data.u64()).filter(|at| *at != TOKEN_WAKE);
                self.behind.look(is_wanted, pipes)
            }
            Err(_) => Look::OfThese,
        }
    }

    /// Finishes `done` when what processes wrote before has been shown, or after `limit`. `printed` are those of their
    /// hosts that had something to report. False if it is of no use to wait.
    pub(crate) fn catch_up(&self, target: Target, printed: &HostSet, limit: Duration, done: &Arc<Completion>) -> bool {
        if !self.behind.can_wait() {
            return false;
        }
        let mut ask: Vec<(HostNo, MeshId)> = Vec::new();
        if !printed.is_empty() {
            let reached = self.peers.upgrade().map_or_else(Vec::new, |peers| peers.hosts());
            let hosts: HashSet<HostNo> = reached.into_iter().filter(|host| printed.contains(*host)).collect();
            ask.extend(target.procs().map(|addr| (addr.host, addr.mesh)).filter(|(host, _)| hosts.contains(host)));
            ask.sort_unstable();
            ask.dedup();
        }
        let (until, done) = (self.started.elapsed() + limit, Arc::clone(done));
        self.order(Order::CatchUp(CatchUp { target, ask, until, done, stage: Stage::Begun }));
        if self.over.load(Ordering::SeqCst) {
            self.refuse_orders();
        }
        true
    }

    /// Gives the thread an order from a thread that reads links, without waiting.
    pub(crate) fn order(&self, order: Order) {
        lock(&self.orders).push_back(order);
        self.ring();
    }

    /// Sends what the thread has to say. Call with no lock held.
    fn send(&self, mail: Vec<Mail>) {
        if mail.is_empty() {
            return;
        }
        let Some(peers) = self.peers.upgrade() else { return };
        for one in mail {
            match one {
                Mail::Found(batch) => peers.send(0, &Lines::Found(batch.into())),
                Mail::More(host) => peers.send(host, &Lines::More),
                Mail::Report(host, mesh, ticket) => peers.send(host, &Lines::Report(mesh, ticket)),
                Mail::Set(mesh, options) => peers.cast(&Lines::Set(mesh, options)),
            }
        }
    }

    /// Reads what is left and ends the thread. What is in the queue can still be taken.
    pub(crate) fn close(&self) {
        lock(&self.reader).closing = true;
        self.changed.notify_all();
        self.ring();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    /// After the end: nobody waits for lines any more.
    fn refuse_orders(&self) {
        let orders = std::mem::take(&mut *lock(&self.orders));
        finish(orders.into_iter().filter_map(Order::waits).collect());
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
            let mut reader = lock(&self.reader);
            // First: what is read now may have been written after an order was given.
            reader.obey(&self.orders, self.started.elapsed(), &mut buffer, full);
            for token in ready {
                let stream = if token % 2 == 0 { Stream::Out } else { Stream::Err };
                read += reader.read(token / 2, stream, self.started.elapsed(), &mut buffer, 1);
                self.changed.notify_all();
                reader.publish();
                // A death, or a change of options, does not wait for all of a flood.
                drop(reader);
                reader = lock(&self.reader);
            }
            let now = self.started.elapsed();
            reader.tick(now);
            let done = reader.closing;
            if done || !reader.is_full() && reader.asked > reader.flushed {
                reader.everything(now, &mut buffer);
            }
            reader.catch_up(now, &mut buffer);
            reader.publish();
            reader.closed |= done;
            if done {
                // The pipes close, so processes that still write learn of it.
                reader.pipes.clear();
            }
            let (mail, caught_up) = (reader.mail(), reader.caught_up());
            let late = reader.late(now);
            full = reader.is_full();
            drop(reader);
            self.changed.notify_all();
            self.send(mail);
            finish(caught_up);
            if !late.is_empty() {
                self.behind.stuck();
                finish(late);
            }
            if done {
                self.over.store(true, Ordering::SeqCst);
                return self.refuse_orders();
            }
            if read > 0 && read < MOST_READS * READ / 8 {
                let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&PAUSE));
            }
        }
    }

    /// The readable pipes, once there are any or something else is to do.
    fn ready(&self, events: &mut [MaybeUninit<Event>]) -> Vec<u64> {
        let deadline = lock(&self.reader).deadline();
        let timeout = self.left(deadline);
        if let Some(peers) = self.peers.upgrade() {
            self.watch.begin(|first| peers.watch_pipes(self.epoll.as_fd(), first));
        }
        let mut ready: Vec<u64> = match epoll::wait(&self.epoll, events, timeout.as_ref()) {
            Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
            Err(_) => Vec::new(),
        };
        ready.retain(|token| *token != TOKEN_WAKE || rustix::io::read(&self.wake, &mut [0_u8; 8]).is_err());
        ready
    }

    fn left(&self, deadline: Option<Duration>) -> Option<Timespec> {
        deadline.map(|at| timespec(at.saturating_sub(self.started.elapsed())))
    }

    /// Waits for the queue to shrink.
    fn sleep(&self) -> Vec<u64> {
        let deadline = lock(&self.reader).given_up();
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        let _ = poll(&mut fds, self.left(deadline).as_ref());
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        Vec::new()
    }
}

fn finish(all: Vec<Arc<Completion>>) {
    for one in all {
        one.finish(Fate::Value);
    }
}
