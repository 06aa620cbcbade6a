//! The reader's end: one thread for each owner, which reads and writes for all threads of this process.
//!
//! UCX-4: an operation gets its outcome only after UCX has ended everything that was started for it. A cancelled
//! operation is waited for briefly. Then the endpoint is closed by force, which ends everything that uses it; the other
//! operations are started again over a new connection.

use super::library::{OK, Status};
use super::objects::{Context, Endpoint, Request, Worker};
use super::owner::{SPIN, STACK, TURNS};
use super::plan::{Export, Part, State, Verb, dropped, name_of, plan};
use super::signal::Signal;
use super::wire::{Answer, Ask, Name, Shown, Wire};
use crate::error::TransferError;
use crate::lock;
use crate::operation::Op;
use crate::watch::{Watch, timespec};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most UCX requests, and bytes, that one operation has under way.
const WINDOW: usize = 64;
const BYTES: u64 = 64 << 20;
/// How often to check an operation that makes no progress.
const LOOK: Duration = Duration::from_millis(20);
/// How long a cancelled operation may take to end by itself.
const GRACE: Duration = Duration::from_millis(100);
/// How long a process may take to end after its connections.
const DYING: Duration = Duration::from_millis(200);

/// How an operation ended. `None`: it was interrupted through no fault of its own, and must be started again.
pub(super) type Done = Option<Result<(), TransferError>>;

/// This process's threads that read and write, including unused ones that are about to end. None may be in UCX when the
/// process ends, which tears the library down.
#[derive(Debug, Default)]
pub(super) struct Drivers {
    list: Mutex<Vec<(Arc<Shared>, JoinHandle<()>)>>,
    has_stopped: AtomicBool,
}

impl Drivers {
    pub(super) fn check(&self) -> Result<(), TransferError> {
        if self.has_stopped.load(Ordering::SeqCst) {
            return Err(TransferError::transport("this process is ending"));
        }
        Ok(())
    }

    fn list(&self) -> MutexGuard<'_, Vec<(Arc<Shared>, JoinHandle<()>)>> {
        lock(&self.list)
    }

    fn spawn(&self, shared: &Arc<Shared>, body: impl FnOnce() + Send + 'static) -> Result<(), TransferError> {
        let mut list = self.list();
        self.check()?;
        list.retain(|(_, thread)| !thread.is_finished());
        let thread = std::thread::Builder::new().name("mesh-ucx".to_owned()).stack_size(STACK).spawn(body);
        let thread = thread.map_err(|error| TransferError::transport(format!("cannot start a thread: {error}")))?;
        list.push((Arc::clone(shared), thread));
        Ok(())
    }

    /// Ends all threads, with what is under way, and lets no others start. Blocks.
    pub(super) fn stop(&self) {
        let threads = {
            let mut list = self.list();
            self.has_stopped.store(true, Ordering::SeqCst);
            std::mem::take(&mut *list)
        };
        threads.iter().for_each(|(shared, _)| shared.stop());
        for (_, thread) in threads {
            // One that panicked has ended, too.
            let _ = thread.join();
        }
    }
}

/// A connection to an owner.
#[derive(Debug)]
pub(super) struct Driver(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    wake: Signal,
    inbox: Mutex<Inbox>,
    is_stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct Inbox {
    jobs: Vec<Arc<Job>>,
    has_ended: bool,
}

/// UCX-5. If UCX does not say what it uses to reach the owner, it may be tcp, so it is refused.
fn refuse_tcp(uses_tcp: Option<bool>) -> Result<(), TransferError> {
    match uses_tcp {
        Some(false) => Ok(()),
        Some(true) => Err(TransferError::transport(
            "UCX would use its own tcp, which kills a process whose peer goes away during a transfer: leave tcp out \
             of UCX_TLS, or use the transport 'tcp'",
        )),
        None => {
            Err(TransferError::transport("UCX does not say how it reaches the owner, and its tcp must not be used"))
        }
    }
}

/// Operations that somebody waits for.
#[derive(Debug)]
struct Job {
    ops: Vec<Op>,
    watch: Watch,
    done: Mutex<Option<Done>>,
    told: Condvar,
}

impl Job {
    fn finish(&self, done: Done) {
        let mut place = lock(&self.done);
        place.get_or_insert(done);
        drop(place);
        self.told.notify_all();
    }
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        lock(&self.inbox)
    }

    fn stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.wake.set();
    }
}

impl Driver {
    /// `address` is the owner's worker, `process` the owner, if visible. Blocks until UCX has looked for a route.
    pub(super) fn start(
        wire: Wire,
        address: Vec<u8>,
        process: Option<OwnedFd>,
        pid: u32,
        context: &Arc<Context>,
        drivers: &Drivers,
    ) -> Result<Self, TransferError> {
        let shared =
            Arc::new(Shared { wake: Signal::new()?, inbox: Mutex::default(), is_stopping: AtomicBool::new(false) });
        let (theirs, context) = (Arc::clone(&shared), Arc::clone(context));
        let (tell, begun) = mpsc::sync_channel(1);
        drivers.spawn(&shared, move || {
            let _ended = Ended(&theirs);
            // The receiver waits for this thread.
            let failed = |error| drop(tell.send(Err(error)));
            let worker = match Worker::new(&context) {
                Ok(worker) => worker,
                Err(error) => return failed(error),
            };
            let endpoint = match Endpoint::new(&worker, &address) {
                Ok(endpoint) => endpoint,
                Err(error) => return failed(error),
            };
            // UCX-5
            if let Err(error) = refuse_tcp(endpoint.uses_tcp()) {
                endpoint.close(&mut Vec::new());
                return failed(error);
            }
            drop(tell.send(Ok(())));
            let mut driving = Driving {
                endpoint: Some(endpoint),
                wire,
                process,
                pid,
                shared: &theirs,
                context: &context,
                entries: HashMap::new(),
                active: Vec::new(),
            };
            let ended = driving.run(&worker);
            drop(driving);
            // UCX-4: this drops writes from callers' memory that were still unsent.
            drop(worker);
            for (job, done) in ended {
                job.finish(done);
            }
        })?;
        begun.recv().unwrap_or_else(|_| Err(TransferError::transport("its thread has ended")))?;
        Ok(Self(shared))
    }

    /// Performs the operations, and waits for them.
    ///
    /// # Safety
    /// As for [`Peer::run`](super::super::Peer::run).
    pub(super) unsafe fn carry(&self, ops: &[Op], watch: &Watch) -> Done {
        let (done, told) = (Mutex::default(), Condvar::new());
        let job = Arc::new(Job { ops: ops.to_vec(), watch: watch.clone(), done, told });
        {
            let mut inbox = self.0.inbox();
            if inbox.has_ended {
                return None;
            }
            inbox.jobs.push(Arc::clone(&job));
        }
        self.0.wake.set();
        let mut done = lock(&job.done);
        loop {
            if let Some(done) = done.take() {
                return done;
            }
            done = job.told.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.0.inbox().has_ended
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Finishes the jobs of a thread that has ended, for whatever reason.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut inbox = self.0.inbox();
        inbox.has_ended = true;
        for job in inbox.jobs.drain(..) {
            job.finish(None);
        }
    }
}

/// Operations under way.
#[derive(Debug)]
struct Active {
    job: Arc<Job>,
    names: Vec<Name>,
    /// Whether all exports have been shown, so that the parts are known.
    is_planned: bool,
    parts: VecDeque<Part>,
    under_way: Vec<(Request, u64)>,
    bytes: u64,
    /// Something was written that may not be in the owner's memory yet.
    has_written: bool,
    failed: Option<TransferError>,
    /// Since when it has only been waited for.
    given_up: Option<Instant>,
}

/// The thread's state.
struct Driving<'a> {
    endpoint: Option<Endpoint<'a>>,
    wire: Wire,
    process: Option<OwnedFd>,
    pid: u32,
    shared: &'a Shared,
    context: &'a Arc<Context>,
    entries: HashMap<Name, Export>,
    active: Vec<Active>,
}

/// Why the connection ends.
enum End {
    /// On request.
    Wanted,
    /// It failed, for everything under way.
    Failed(TransferError),
    /// A cancelled operation does not end; the others are not at fault.
    GivenUp,
}

impl Driving<'_> {
    /// Returns how all operations ended, to report once the worker has ended.
    fn run(&mut self, worker: &Worker) -> Vec<(Arc<Job>, Done)> {
        let end = self.drive(worker);
        self.close(end)
    }

    /// Ends everything under way (UCX-4).
    fn close(&mut self, end: End) -> Vec<(Arc<Job>, Done)> {
        // Nothing more will be read from here.
        self.wire.close();
        let mut requests = Vec::new();
        for active in &mut self.active {
            requests.extend(active.under_way.drain(..).map(|(request, _)| request));
        }
        if let Some(endpoint) = self.endpoint.take() {
            endpoint.close(&mut requests);
        }
        self.entries.clear();
        // From now on, no more jobs arrive.
        let left: Vec<Arc<Job>> = {
            let mut inbox = self.shared.inbox();
            inbox.has_ended = true;
            std::mem::take(&mut inbox.jobs)
        };
        let error = match end {
            End::Wanted => Some(TransferError::transport("this process has stopped using UCX")),
            End::Failed(error) => Some(error),
            End::GivenUp => None,
        };
        let ended = self.active.drain(..).map(|active| {
            let own = active.given_up.and(active.failed);
            (active.job, own.or(error.clone()).map(Err))
        });
        ended.chain(left.into_iter().map(|job| (job, None))).collect()
    }

    fn drive(&mut self, worker: &Worker) -> End {
        let mut busy_at = Instant::now();
        loop {
            let jobs = std::mem::take(&mut self.shared.inbox().jobs);
            let mut has_moved = !jobs.is_empty();
            for job in jobs {
                if let Err(error) = self.admit(job) {
                    return End::Failed(error);
                }
            }
            let mut turns = 0;
            while turns < TURNS && worker.progress() {
                turns += 1;
            }
            has_moved |= turns > 0;
            match self.step() {
                Ok(moved) => has_moved |= moved,
                Err(end) => return end,
            }
            if has_moved {
                busy_at = Instant::now();
                continue;
            }
            if busy_at.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            match worker.arm() {
                Ok(false) => {}
                Ok(true) => self.sleep(worker),
                Err(error) => return End::Failed(error),
            }
            if self.shared.is_stopping.load(Ordering::SeqCst) {
                return End::Wanted;
            }
            if let Err(error) = self.listen() {
                return End::Failed(error);
            }
        }
    }

    fn sleep(&self, worker: &Worker) {
        let out = if self.wire.has_outgoing() { PollFlags::OUT } else { PollFlags::empty() };
        let mut list = vec![
            PollFd::new(&self.wire.stream, PollFlags::IN | out),
            PollFd::from_borrowed_fd(worker.descriptor(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.shared.wake.as_fd(), PollFlags::IN),
        ];
        if let Some(process) = &self.process {
            list.push(PollFd::new(process, PollFlags::IN));
        }
        let limit = (!self.active.is_empty()).then(|| timespec(LOOK));
        // Check everything, whether interrupted or not.
        let _ = poll(&mut list, limit.as_ref());
        self.shared.wake.clear();
    }

    /// Takes the owner's messages, and checks that it is alive.
    fn listen(&mut self) -> Result<(), TransferError> {
        if self.has_process_ended(Duration::ZERO) {
            return Err(self.ended());
        }
        if self.endpoint.as_ref().is_some_and(Endpoint::has_failed) {
            return Err(self.lost("UCX lost the other end"));
        }
        let heard = self.wire.flush().and_then(|()| self.wire.receive());
        while let Some(answer) = Answer::next(&mut self.wire)? {
            self.hear(answer)?;
        }
        heard.map_err(|error| self.lost(&error.to_string()))
    }

    fn hear(&mut self, answer: Answer) -> Result<(), TransferError> {
        match answer {
            Answer::Opened(name, Shown { writable, segments, key }) => {
                let key = match (&self.endpoint, key.is_empty()) {
                    (Some(endpoint), false) => Some(endpoint.unpack(&key)?),
                    _ => None,
                };
                if let Some(entry) = self.entries.get_mut(&name) {
                    entry.state = State::Shown { writable, segments, key };
                }
            }
            Answer::Refused(name, kind) => {
                if let Some(entry) = self.entries.get_mut(&name) {
                    entry.state = State::Refused(kind);
                }
            }
            Answer::Revoked(name) => {
                let is_used = match self.entries.get_mut(&name) {
                    Some(entry) => {
                        entry.is_revoked = true;
                        entry.users > 0
                    }
                    None => false,
                };
                if is_used {
                    self.say(&Ask::Busy(name))?;
                } else {
                    self.entries.remove(&name);
                    self.say(&Ask::Leave(name))?;
                }
            }
        }
        Ok(())
    }

    fn say(&mut self, ask: &Ask) -> Result<(), TransferError> {
        self.wire.send(&ask.encode()).map_err(|error| self.lost(&error.to_string()))
    }

    fn admit(&mut self, job: Arc<Job>) -> Result<(), TransferError> {
        let mut names: Vec<Name> = job.ops.iter().map(|op| name_of(&op.handle)).collect();
        names.sort_unstable();
        names.dedup();
        let mut active = Active {
            job: Arc::clone(&job),
            names,
            is_planned: false,
            parts: VecDeque::new(),
            under_way: Vec::new(),
            bytes: 0,
            has_written: false,
            failed: None,
            given_up: None,
        };
        for name in &active.names {
            if let Some(entry) = self.entries.get_mut(name) {
                entry.users += 1;
                if entry.is_revoked {
                    active.failed = Some(dropped());
                }
                continue;
            }
            self.entries.insert(*name, Export { state: State::Asked, users: 1, is_revoked: false });
            if let Some(op) = job.ops.iter().find(|op| name_of(&op.handle) == *name) {
                let ask = Ask::Open(*name, op.handle.token);
                if let Err(error) = self.wire.send(&ask.encode()) {
                    self.active.push(active);
                    return Err(self.lost(&error.to_string()));
                }
            }
        }
        self.active.push(active);
        Ok(())
    }

    /// Advances all operations; returns whether anything has moved.
    fn step(&mut self) -> Result<bool, End> {
        let mut has_moved = false;
        // Whether an answer of the owner is missing.
        let mut asks = false;
        let mut at = 0;
        while at < self.active.len() {
            let Some(endpoint) = &self.endpoint else { return Err(End::Wanted) };
            let active = &mut self.active[at];
            if active.failed.is_none()
                && let Err(error) = active.job.watch.check()
            {
                active.failed = Some(error);
            }
            if active.failed.is_some() && active.given_up.is_none() {
                active.given_up = Some(Instant::now());
                active.parts.clear();
            }
            if active.failed.is_none() && !active.is_planned {
                match plan(&active.job.ops, &self.entries) {
                    Ok(Some(parts)) => (active.parts, active.is_planned) = (parts, true),
                    Ok(None) => asks = true,
                    Err(error) => {
                        active.failed = Some(error);
                        continue;
                    }
                }
            }
            match active.advance(endpoint, &self.entries) {
                Ok(Advance::Moved) => has_moved = true,
                Ok(Advance::Waits) => {}
                Ok(Advance::Ended) => {
                    has_moved = true;
                    let active = self.active.swap_remove(at);
                    if let Err(error) = self.leave(&active.names) {
                        active.job.finish(Some(active.failed.map_or(Ok(()), Err)));
                        return Err(End::Failed(error));
                    }
                    active.job.finish(Some(active.failed.map_or(Ok(()), Err)));
                    continue;
                }
                Err(status) => {
                    let why = self.context.library().say(status);
                    return Err(End::Failed(self.lost(&why)));
                }
            }
            if self.active[at].given_up.is_some_and(|since| since.elapsed() > GRACE) {
                return Err(End::GivenUp);
            }
            at += 1;
        }
        if asks {
            self.listen().map_err(End::Failed)?;
        }
        Ok(has_moved)
    }

    fn leave(&mut self, names: &[Name]) -> Result<(), TransferError> {
        for name in names {
            let Some(entry) = self.entries.get_mut(name) else { continue };
            entry.users -= 1;
            if entry.users > 0 {
                continue;
            }
            if entry.is_revoked {
                self.entries.remove(name);
                self.say(&Ask::Leave(*name))?;
            } else if matches!(entry.state, State::Refused(_)) {
                self.entries.remove(name);
            }
        }
        Ok(())
    }

    fn has_process_ended(&self, wait: Duration) -> bool {
        self.process.as_ref().is_some_and(|process| {
            poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timespec(wait))).is_ok_and(|count| count > 0)
        })
    }

    fn ended(&self) -> TransferError {
        TransferError::ended(self.pid)
    }

    /// A process that ends closes its connections a moment before it has ended.
    fn lost(&self, why: &str) -> TransferError {
        if self.has_process_ended(DYING) {
            return self.ended();
        }
        TransferError::transport(format!("the connection to process {} failed: {why}", self.pid))
    }
}

enum Advance {
    Moved,
    Waits,
    Ended,
}

impl Active {
    fn advance(&mut self, endpoint: &Endpoint<'_>, entries: &HashMap<Name, Export>) -> Result<Advance, Status> {
        let before = self.under_way.len();
        let mut failed = OK;
        let bytes = &mut self.bytes;
        self.under_way.retain(|(request, len)| match endpoint.ended(request) {
            None => true,
            Some(status) => {
                *bytes -= len;
                if status != OK {
                    failed = status;
                }
                false
            }
        });
        if failed != OK {
            return Err(failed);
        }
        let mut has_moved = self.under_way.len() != before;
        while let Some(part) = self.parts.front()
            && self.under_way.len() < WINDOW
            && self.bytes < BYTES
        {
            let Some(Export { state: State::Shown { key: Some(key), .. }, .. }) = entries.get(&part.name) else {
                break;
            };
            // SAFETY: the memory is the caller's, who waits until the job is finished, which is when this list is
            // empty; the remote addresses are those that the owner showed for this export, which the job uses.
            let begun = unsafe {
                match &part.verb {
                    Verb::Get => endpoint.get(part.here, part.there, part.len, key),
                    Verb::Put => endpoint.put(part.here, part.there, part.len, key),
                }
            };
            self.has_written |= matches!(part.verb, Verb::Put);
            if let Some(request) = begun? {
                self.under_way.push((request, part.len));
                self.bytes += part.len;
            }
            self.parts.pop_front();
            has_moved = true;
        }
        let is_idle = self.under_way.is_empty() && self.parts.is_empty();
        if is_idle && (self.is_planned || self.failed.is_some()) {
            if !self.has_written {
                return Ok(Advance::Ended);
            }
            // Bytes that have left this process may not have arrived yet.
            self.has_written = false;
            if let Some(request) = endpoint.flush()? {
                self.under_way.push((request, 0));
            }
            has_moved = true;
        }
        Ok(if has_moved { Advance::Moved } else { Advance::Waits })
    }
}
