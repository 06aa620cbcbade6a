//! The reader's end: a thread for each owner, which reads and writes for all threads of this process.
//!
//! UCX-4: an operation has its outcome when UCX has ended all that it has begun for it. What is given up is waited for a
//! moment; then the endpoint is closed by force, which ends all that goes through it. Those of other operations are begun
//! again, over a new connection.

use super::super::Op;
use super::library::{OK, Status};
use super::objects::{Context, Endpoint, Mapped, Request, Worker};
use super::owner::{SPIN, STACK, TURNS, timespec};
use super::plan::{Export, Part, Plan, State, Verb, Way, dropped, is_write, name_of, plan};
use super::pulls::MOST;
use super::signal::Signal;
use super::wire::{Answer, Ask, Name, Pull, Shown, Wire};
use crate::error::{ErrorKind, TransferError};
use crate::watch::Watch;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Requests of UCX that one operation has under way, and bytes.
pub(super) const WINDOW: usize = 64;
pub(super) const BYTES: u64 = 64 << 20;
/// How often an operation that makes no progress is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How long what was given up may take to end by itself.
const GRACE: Duration = Duration::from_millis(100);
/// How long a process may take to end once its connections have.
const DYING: Duration = Duration::from_millis(200);

/// How an operation ended. `None`: through no fault of its own, it is to be begun again.
pub(super) type Done = Option<Result<(), TransferError>>;

/// A connection to an owner.
#[derive(Debug)]
pub(super) struct Driver {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

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
    /// Why it could not begin.
    failed: Option<TransferError>,
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
        let mut place = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        place.get_or_insert(done);
        drop(place);
        self.told.notify_all();
    }
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Driver {
    /// `address` is the owner's worker, `process` the owner, where it can be seen.
    pub(super) fn start(
        wire: Wire,
        address: Vec<u8>,
        process: Option<OwnedFd>,
        pid: u32,
        context: &Arc<Context>,
    ) -> Result<Self, TransferError> {
        let shared =
            Arc::new(Shared { wake: Signal::new()?, inbox: Mutex::default(), is_stopping: AtomicBool::new(false) });
        let (theirs, context) = (Arc::clone(&shared), Arc::clone(context));
        let thread = std::thread::Builder::new().name("mesh-ucx".to_owned()).stack_size(STACK);
        let thread = thread.spawn(move || {
            let _ended = Ended(&theirs);
            let failed = |error| theirs.inbox().failed = Some(error);
            let worker = match Worker::new(&context) {
                Ok(worker) => worker,
                Err(error) => return failed(error),
            };
            let (here, endpoint) = match (worker.address(), Endpoint::new(&worker, &address)) {
                (Ok(here), Ok(endpoint)) => (here, endpoint),
                (Err(error), _) | (_, Err(error)) => return failed(error),
            };
            let mut driving = Driving {
                endpoint: Some(endpoint),
                wire,
                process,
                pid,
                shared: &theirs,
                context: &context,
                entries: HashMap::new(),
                active: Vec::new(),
                address: here,
                way: None,
                last: 0,
            };
            let ended = driving.run(&worker);
            drop(driving);
            // UCX-4: what it still had to send of the memory of writers, it has forgotten.
            drop(worker);
            for (job, done) in ended {
                job.finish(done);
            }
        });
        let thread = thread.map_err(|error| TransferError::transport(format!("cannot start a thread: {error}")))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Does them, and waits until they are done.
    ///
    /// # Safety
    /// As for [`Peer::run`](super::super::Peer::run).
    pub(super) unsafe fn carry(&self, ops: &[Op], watch: &Watch) -> Done {
        let (done, told) = (Mutex::default(), Condvar::new());
        let job = Arc::new(Job { ops: ops.to_vec(), watch: watch.clone(), done, told });
        {
            let mut inbox = self.shared.inbox();
            if inbox.has_ended {
                return inbox.failed.clone().map(Err);
            }
            inbox.jobs.push(Arc::clone(&job));
        }
        self.shared.wake.set();
        let mut done = job.done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(done) = done.take() {
                return done;
            }
            done = job.told.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.shared.inbox().has_ended
    }

    /// Ends it, with what is under way. Blocks.
    pub(super) fn stop(&self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        self.shared.wake.set();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // One that has panicked has ended as well.
        let _ = thread.map(JoinHandle::join);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        self.shared.wake.set();
    }
}

/// Nobody waits for a thread that has ended, whatever has ended it.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut inbox = self.0.inbox();
        inbox.has_ended = true;
        let failed = inbox.failed.clone();
        for job in inbox.jobs.drain(..) {
            job.finish(failed.clone().map(Err));
        }
    }
}

/// Operations under way.
#[derive(Debug)]
struct Active {
    job: Arc<Job>,
    names: Vec<Name>,
    /// Whether all exports were shown, and the parts are known.
    is_planned: bool,
    parts: VecDeque<Part>,
    under_way: Vec<(Request, u64)>,
    /// What the owner was asked to read, and how much it is.
    pulled: HashMap<u32, u64>,
    /// For that, this process's memory.
    mapped: Vec<Mapped>,
    bytes: u64,
    /// Something was written that may not be in the owner's memory yet.
    has_written: bool,
    failed: Option<TransferError>,
    /// Since when it has only been waited for.
    given_up: Option<Instant>,
}

/// What the thread has.
struct Driving<'a> {
    endpoint: Option<Endpoint<'a>>,
    wire: Wire,
    process: Option<OwnedFd>,
    pid: u32,
    shared: &'a Shared,
    context: &'a Arc<Context>,
    entries: HashMap<Name, Export>,
    active: Vec<Active>,
    /// Where this worker is.
    address: Vec<u8>,
    /// None before the first write.
    way: Option<Way>,
    /// The number of the last part that it was asked to read.
    last: u32,
}

/// Why the connection ends.
enum End {
    /// As it is wanted to.
    Wanted,
    /// It has failed: for all that is under way.
    Failed(TransferError),
    /// An operation that was given up does not end: for the others through no fault of theirs.
    GivenUp,
}

impl Driving<'_> {
    /// How all operations have ended, to be told when the worker has.
    fn run(&mut self, worker: &Worker) -> Vec<(Arc<Job>, Done)> {
        let end = self.drive(worker);
        self.close(end)
    }

    /// UCX-4: ends all that is under way.
    fn close(&mut self, end: End) -> Vec<(Arc<Job>, Done)> {
        // Nothing more is to be read from here.
        self.wire.close();
        let mut requests = Vec::new();
        for active in &mut self.active {
            requests.extend(active.under_way.drain(..).map(|(request, _)| request));
        }
        if let Some(endpoint) = self.endpoint.take() {
            endpoint.close(&mut requests);
        }
        self.entries.clear();
        // From now on nobody else comes.
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
        // Interrupted or not, all are looked at.
        let _ = poll(&mut list, limit.as_ref());
        self.shared.wake.clear();
    }

    /// What the owner has said, and whether it is there.
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
            Answer::Pulled(number, outcome) => {
                let Some(active) = self.active.iter_mut().find(|active| active.pulled.contains_key(&number)) else {
                    return Ok(());
                };
                active.bytes -= active.pulled.remove(&number).unwrap_or(0);
                if let Err(kind) = outcome {
                    let error = match kind {
                        ErrorKind::Gone => dropped(),
                        kind => TransferError::new(kind, "the owner does not let this be written"),
                    };
                    active.failed.get_or_insert(error);
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
            pulled: HashMap::new(),
            mapped: Vec::new(),
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

    /// Goes on with all operations; whether anything has moved.
    fn step(&mut self) -> Result<bool, End> {
        let is_new = |active: &Active| !active.is_planned && active.job.ops.iter().any(is_write);
        if self.way.is_none() && self.active.iter().any(is_new) {
            self.way = Some(self.find_way().map_err(End::Failed)?);
        }
        let mut pulled = self.active.iter().map(|active| active.pulled.len()).sum();
        let mut has_moved = false;
        // Whether the owner is to say something.
        let mut asks = pulled > 0;
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
                match plan(&active.job.ops, &self.entries, self.way, self.context) {
                    Ok(Some(Plan { parts, mapped })) => {
                        (active.parts, active.mapped, active.is_planned) = (parts, mapped, true);
                    }
                    Ok(None) => asks = true,
                    Err(error) => {
                        active.failed = Some(error);
                        continue;
                    }
                }
            }
            let mut asking = Asking { wire: &mut self.wire, last: &mut self.last, under_way: &mut pulled };
            match active.advance(endpoint, &self.entries, &mut asking) {
                Ok(Advance::Moved) => has_moved = true,
                Ok(Advance::Waits) => {}
                Ok(Advance::Ended) => {
                    has_moved = true;
                    let mut active = self.active.swap_remove(at);
                    active.mapped.clear();
                    if let Err(error) = self.leave(&active.names) {
                        active.job.finish(Some(active.failed.map_or(Ok(()), Err)));
                        return Err(End::Failed(error));
                    }
                    active.job.finish(Some(active.failed.map_or(Ok(()), Err)));
                    continue;
                }
                Err(Broken::Ucx(status)) => {
                    let why = self.context.library().say(status);
                    return Err(End::Failed(self.lost(&why)));
                }
                Err(Broken::Wire(error)) => return Err(End::Failed(self.lost(&error.to_string()))),
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

    fn find_way(&mut self) -> Result<Way, TransferError> {
        Ok(match self.endpoint.as_ref().and_then(Endpoint::uses_tcp) {
            Some(false) => Way::Put,
            None => Way::Unknown,
            Some(true) => {
                self.say(&Ask::Address(self.address.clone()))?;
                Way::Pull
            }
        })
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
        TransferError::gone(format!("process {}, which owned the buffer, has ended", self.pid))
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

/// What does not work any longer.
enum Broken {
    Ucx(Status),
    Wire(io::Error),
}

/// What is needed to ask the owner.
struct Asking<'a> {
    wire: &'a mut Wire,
    last: &'a mut u32,
    /// What it was asked for, by all operations.
    under_way: &'a mut usize,
}

impl Asking<'_> {
    fn pull(&mut self, part: &Part, key: &Arc<[u8]>) -> Result<u32, Broken> {
        *self.last = self.last.wrapping_add(1);
        *self.under_way += 1;
        let (number, key) = (*self.last, Arc::clone(key));
        let pull = Pull { number, name: part.name, from: part.here, to: part.there, len: part.len, key };
        self.wire.send(&Ask::Pull(pull).encode()).map_err(Broken::Wire)?;
        Ok(number)
    }
}

impl Active {
    fn advance(
        &mut self,
        endpoint: &Endpoint<'_>,
        entries: &HashMap<Name, Export>,
        asking: &mut Asking<'_>,
    ) -> Result<Advance, Broken> {
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
            return Err(Broken::Ucx(failed));
        }
        let mut has_moved = self.under_way.len() != before;
        while let Some(part) = self.parts.front()
            && self.under_way.len() + self.pulled.len() < WINDOW
            && self.bytes < BYTES
            && *asking.under_way < MOST
        {
            let Some(Export { state: State::Shown { key: Some(key), .. }, .. }) = entries.get(&part.name) else {
                break;
            };
            // SAFETY: the caller's memory, who waits until the job is finished, which is when this list is empty; the
            // remote addresses are those that the owner has shown for this export, which the job uses.
            let begun = unsafe {
                match &part.verb {
                    Verb::Get => endpoint.get(part.here, part.there, part.len, key),
                    Verb::Put => endpoint.put(part.here, part.there, part.len, key),
                    Verb::Pull(key) => {
                        self.pulled.insert(asking.pull(part, key)?, part.len);
                        self.bytes += part.len;
                        Ok(None)
                    }
                }
            };
            self.has_written |= matches!(part.verb, Verb::Put);
            if let Some(request) = begun.map_err(Broken::Ucx)? {
                self.under_way.push((request, part.len));
                self.bytes += part.len;
            }
            self.parts.pop_front();
            has_moved = true;
        }
        let is_idle = self.under_way.is_empty() && self.pulled.is_empty() && self.parts.is_empty();
        if is_idle && (self.is_planned || self.failed.is_some()) {
            if !self.has_written {
                return Ok(Advance::Ended);
            }
            // What has left this process is not there yet.
            self.has_written = false;
            if let Some(request) = endpoint.flush().map_err(Broken::Ucx)? {
                self.under_way.push((request, 0));
            }
            has_moved = true;
        }
        Ok(if has_moved { Advance::Moved } else { Advance::Waits })
    }
}
