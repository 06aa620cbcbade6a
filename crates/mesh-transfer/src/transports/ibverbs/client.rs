//! The client's end: reads and writes an owner's memory through its own queue pairs.

use super::super::{Peer, Piece, pieces};
use super::device::Rail;
use super::link::{Door, Failure, Link, STAGE, Shut};
use super::offers::Offers;
use super::requests::{Batch, CHUNK, Known, Maker, Request, Target};
use super::scan;
use super::sys::{Sge, opcode};
use super::wire::{self, Fate, NAME, Section};
use crate::cores::in_lanes;
use crate::error::{ErrorKind, TransferError};
use crate::handle::{Handle, Token};
use crate::lock;
use crate::operation::Op;
use crate::operation::Work;
use crate::watch::Watch;
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// From this length on, all rails share the work.
const STRIPE: u64 = 4 << 20;
/// The most bytes under way on one pair of rails, alone or beside others: enough to keep the network busy, few enough
/// that a cancelled transfer ends soon and a slow pair does not hold up a fast one.
const UNDER_WAY: u64 = 8 << 20;
const UNDER_WAY_EACH: u64 = 2 << 20;
/// The most links kept for later on one pair of rails.
const IDLE: usize = 4;
/// How long to avoid a pair of rails that failed.
const AGAIN: Duration = Duration::from_secs(5);
/// How long a process may take to end after its connections break.
const DYING: Duration = Duration::from_millis(200);
/// The pause before looking at such a process again, in milliseconds.
const BREATH: libc::c_int = 5;
/// The most exports remembered as confirmed by the owner.
const VOUCHED: usize = 1 << 16;

/// An owner reached through queue pairs.
#[derive(Debug)]
pub(super) struct VerbsPeer {
    door: Door,
    /// This process's rails.
    rails: Arc<[Rail]>,
    offers: Arc<Offers>,
    /// The owner's rails.
    theirs: Vec<wire::Rail>,
    pairs: Vec<Pair>,
    vouched: Mutex<HashSet<(u32, u32, Token)>>,
    /// Whether a refused connection means that the owner has ended.
    is_certain: AtomicBool,
    has_ended: AtomicBool,
    page: u64,
}

/// A rail of the owner, and its counterpart in this process.
#[derive(Debug)]
struct Pair {
    theirs: usize,
    ours: usize,
    idle: Mutex<Vec<Link>>,
    /// When it last failed.
    broken: Mutex<Option<Instant>>,
    /// Consecutive lost transfers.
    losses: AtomicUsize,
}

/// Why operations were not performed.
enum Trouble {
    /// The error is final.
    Final(TransferError),
    /// Another attempt may succeed.
    Again(TransferError),
}

impl From<TransferError> for Trouble {
    fn from(error: TransferError) -> Self {
        Self::Final(error)
    }
}

impl Pair {
    fn is_broken(&self) -> bool {
        lock(&self.broken).is_some_and(|since| since.elapsed() < AGAIN)
    }

    fn put_back(&self, link: Link) {
        let mut idle = lock(&self.idle);
        if idle.len() < IDLE {
            idle.push(link);
        }
    }
}

/// One transfer, shared by several rails.
struct Job<'a> {
    ops: &'a [Op],
    targets: &'a [Target],
    pieces: Vec<Piece>,
    taken: AtomicUsize,
    has_failed: AtomicBool,
    /// The most bytes under way in each lane.
    under_way: u64,
}

impl Job<'_> {
    fn next(&self) -> Option<Piece> {
        if self.has_failed.load(Ordering::Relaxed) {
            return None;
        }
        self.pieces.get(self.taken.fetch_add(1, Ordering::Relaxed)).copied()
    }
}

impl VerbsPeer {
    /// `is_here` says that the owner is on this host.
    pub(super) fn new(
        handle: &Handle,
        section: Section,
        (rails, offers): (&Arc<[Rail]>, &Arc<Offers>),
        is_here: bool,
    ) -> Result<Self, TransferError> {
        let theirs: Vec<_> = section.rails.iter().map(|rail| (rail.link, rail.gid)).collect();
        let ours: Vec<_> = rails.iter().map(|rail| (rail.port.link, rail.port.gid)).collect();
        let pairs: Vec<Pair> = scan::pair(&theirs, &ours)
            .into_iter()
            .map(|(theirs, ours)| {
                let (idle, broken, losses) = (Mutex::default(), Mutex::default(), AtomicUsize::new(0));
                Pair { theirs, ours, idle, broken, losses }
            })
            .collect();
        if pairs.is_empty() {
            return Err(TransferError::transport(
                "no RDMA port of this host has the link type and subnet of one of the owner's ports",
            ));
        }
        let door = Door { addr: section.door, key: section.key, realm: handle.realm, owner: handle.owner() };
        Ok(Self {
            is_certain: AtomicBool::new(is_here && !door.addr.ip().is_loopback()),
            door,
            rails: Arc::clone(rails),
            offers: Arc::clone(offers),
            theirs: section.rails,
            pairs,
            vouched: Mutex::default(),
            has_ended: AtomicBool::new(false),
            page: rustix::param::page_size() as u64,
        })
    }

    /// Checks that the owner is there, is who it claims to be, and can be reached by a queue pair.
    pub(super) fn greet(&self, watch: &Watch) -> Result<(), TransferError> {
        let mut last = None;
        for pair in &self.pairs {
            match self.dial(pair, watch) {
                Ok(link) => {
                    pair.put_back(link);
                    return Ok(());
                }
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Again(error)) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| TransferError::transport("no rail")))
    }

    fn dial(&self, pair: &Pair, watch: &Watch) -> Result<Link, Trouble> {
        let rail = &self.rails[pair.ours];
        let number = pair.theirs as u8;
        let until = Instant::now() + DYING;
        loop {
            match Link::make(&self.door, rail, (number, &self.theirs[pair.theirs]), watch) {
                Ok(link) => {
                    self.is_certain.store(true, Ordering::Relaxed);
                    return Ok(link);
                }
                Err(Shut::Another) => return Err(Trouble::Final(self.ended())),
                Err(Shut::Nobody) if self.is_certain.load(Ordering::Relaxed) => {
                    return Err(Trouble::Final(self.ended()));
                }
                Err(Shut::Nobody) => {
                    let (owner, addr) = (&self.door.owner, self.door.addr);
                    return Err(Trouble::Final(TransferError::transport(format!(
                        "nobody listens at {addr}: the owner, {owner}, has ended, or cannot be reached at that address"
                    ))));
                }
                // A process that ends closes its connections a moment before it stops listening.
                Err(Shut::BrokeOff(_)) if Instant::now() < until => {
                    // SAFETY: it only sleeps.
                    unsafe { libc::poll(std::ptr::null_mut(), 0, BREATH) };
                }
                Err(Shut::BrokeOff(error)) => {
                    let why = format!("the connection to {} failed: {error}", self.door.owner);
                    return Err(self.note_broken(pair, TransferError::transport(why)));
                }
                Err(Shut::Failed(error)) if error.kind == ErrorKind::Transport => {
                    return Err(self.note_broken(pair, error));
                }
                Err(Shut::Failed(error)) => return Err(Trouble::Final(error)),
            }
        }
    }

    fn note_broken(&self, pair: &Pair, error: TransferError) -> Trouble {
        *lock(&pair.broken) = Some(Instant::now());
        let device = &self.rails[pair.ours].device.name;
        Trouble::Again(TransferError::transport(format!("{error} (by the RDMA device {device})")))
    }

    fn ended(&self) -> TransferError {
        self.has_ended.store(true, Ordering::Relaxed);
        TransferError::gone(format!("the process that owned the buffer, {}, has ended", self.door.owner))
    }

    fn take(&self, pair: &Pair, watch: &Watch) -> Result<Link, Trouble> {
        loop {
            let idle = lock(&pair.idle).pop();
            match idle {
                None => return self.dial(pair, watch),
                Some(link) if link.is_sound() => return Ok(link),
                Some(_) => {}
            }
        }
    }

    /// Returns a link to the pool, or ends it and finds out what went wrong.
    fn settle(
        &self,
        pair: &Pair,
        mut link: Link,
        done: Result<(), Failure>,
        ops: &[Op],
        watch: &Watch,
    ) -> Result<(), Trouble> {
        let failure = match done {
            Ok(()) => {
                pair.losses.store(0, Ordering::Relaxed);
                *lock(&pair.broken) = None;
                pair.put_back(link);
                return Ok(());
            }
            Err(failure) => failure,
        };
        // OPR-1
        link.stop();
        let why = match failure {
            Failure::Over(error) => return Err(Trouble::Final(error)),
            Failure::Refused(op) => {
                let export = export_of(&ops[op].handle);
                lock(&self.vouched).remove(&export);
                match link.ask(&[export], watch) {
                    Ok(fates) => {
                        let live = TransferError::refused(
                            "the owner's device refuses: the handle names more than the owner offers, or other memory",
                        );
                        return Err(Trouble::Final(fates.first().and_then(|fate| told(*fate)).unwrap_or(live)));
                    }
                    Err(Failure::Over(error)) => return Err(Trouble::Final(error)),
                    Err(_) => "the owner does not say what became of the buffer".to_owned(),
                }
            }
            Failure::Lost(why) => why,
        };
        drop(link);
        watch.check()?;
        // The other idle links may be as bad.
        lock(&pair.idle).clear();
        let fresh = self.dial(pair, watch)?;
        let error = TransferError::transport(format!("the transfer by RDMA failed: {why}"));
        if pair.losses.fetch_add(1, Ordering::Relaxed) > 0 {
            // A new queue pair failed as well.
            return Err(self.note_broken(pair, error));
        }
        pair.put_back(fresh);
        Err(Trouble::Again(error))
    }

    /// Makes the owner confirm, once for each handle, that it offers the export: its key may be another's by now.
    fn vouch(&self, pair: &Pair, ops: &[Op], watch: &Watch) -> Result<(), Trouble> {
        let mut asked = Vec::new();
        {
            let vouched = lock(&self.vouched);
            let mut last = None;
            for op in ops {
                let export = export_of(&op.handle);
                // An empty operation makes no request that the device could refuse.
                let is_empty = op.work.span().1 == 0;
                if last != Some(export) && (is_empty || !vouched.contains(&export)) {
                    asked.push(export);
                }
                last = Some(export);
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let link = self.take(pair, watch)?;
        let fates = watch.follow(&link.stream).map_err(Failure::from).and_then(|_followed| link.ask(&asked, watch));
        let fates = match fates {
            Ok(fates) => {
                pair.put_back(link);
                fates
            }
            Err(failure) => return self.settle(pair, link, Err(failure), ops, watch),
        };
        if let Some(error) = fates.into_iter().find_map(told) {
            return Err(Trouble::Final(error));
        }
        let mut vouched = lock(&self.vouched);
        if vouched.len() + asked.len() > VOUCHED {
            vouched.clear();
        }
        vouched.extend(asked);
        Ok(())
    }

    /// The operations' targets, and the rail nearest to them.
    fn targets(&self, ops: &[Op]) -> Result<(Vec<Target>, usize), TransferError> {
        let mut targets = Vec::with_capacity(ops.len());
        let mut read: Option<(&Arc<Handle>, Section)> = None;
        for op in ops {
            let section = match &read {
                Some((handle, section)) if Arc::ptr_eq(handle, &op.handle) => section,
                _ => {
                    let missing = || TransferError::transport("the owner does not offer this memory by ibverbs");
                    let section = Section::decode(op.handle.section(NAME).ok_or_else(missing)?)?;
                    &read.insert((&op.handle, section)).1
                }
            };
            if section.key != self.door.key || section.rails.len() != self.theirs.len() {
                return Err(mixed());
            }
            targets.push(Target::of(op, section)?);
        }
        let nearest = read.map_or(0, |(_, section)| section.nearest);
        Ok((targets, nearest))
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn attempt(
        &self,
        ops: &[Op],
        (targets, nearest): (&[Target], usize),
        found: &mut [u64],
        watch: &Watch,
    ) -> Result<(), Trouble> {
        let mut pairs: Vec<&Pair> = self.pairs.iter().filter(|pair| !pair.is_broken()).collect();
        if pairs.is_empty() {
            pairs = self.pairs.iter().collect();
        }
        pairs.sort_by_key(|pair| pair.theirs != nearest);
        let first = pairs[0];
        self.vouch(first, ops, watch)?;
        if !targets.iter().all(|target| target.is_of_handle) {
            return Err(Trouble::Final(mixed()));
        }
        let total: u64 = ops.iter().map(|op| op.work.span().1).sum();
        let staged: u64 = ops.iter().map(|op| op.work.span().1.next_multiple_of(8)).sum();
        if total == 0 {
            return Ok(());
        }
        if staged <= STAGE as u64 || ops[0].work.is_atomic() {
            let groups = ops.chunks(STAGE / 8).zip(targets.chunks(STAGE / 8)).zip(found.chunks_mut(STAGE / 8));
            for (at, ((ops, targets), found)) in groups.enumerate() {
                // SAFETY: as the caller vouches.
                let done = unsafe { self.run_staged(first, ops, targets, found, watch) };
                done.map_err(|trouble| if at > 0 && ops[0].work.is_atomic() { unknown(trouble) } else { trouble })?;
            }
            return Ok(());
        }
        let longest = pairs.iter().map(|pair| u64::from(self.rails[pair.ours].longest)).min().unwrap_or(CHUNK);
        let pieces = pieces(ops, CHUNK.min(longest.max(1)));
        let lanes = if total < STRIPE { &pairs[..1] } else { &pairs[..] };
        let under_way = if lanes.len() == 1 { UNDER_WAY } else { UNDER_WAY_EACH };
        let (taken, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let job = Job { ops, targets, pieces, taken, has_failed, under_way };
        let lane = |pair: &Pair| {
            // SAFETY: as the caller vouches: all lanes have ended when this returns.
            let done = unsafe { self.run_lane(pair, &job, watch) };
            if done.is_err() {
                job.has_failed.store(true, Ordering::Relaxed);
            }
            done
        };
        in_lanes(lanes, lane).into_iter().fold(Ok(()), worst)
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_lane(&self, pair: &Pair, job: &Job<'_>, watch: &Watch) -> Result<(), Trouble> {
        let rail = &self.rails[pair.ours];
        let mut link = self.take(pair, watch)?;
        let known = match Known::of(&rail.memory, &self.offers, job.ops, self.page) {
            Ok(known) => known,
            Err(error) => {
                pair.put_back(link);
                return Err(Trouble::Final(error));
            }
        };
        let most = rail.device.limits.pieces as usize;
        let (ops, targets) = (job.ops, job.targets);
        let mut maker = Maker { ops, targets, known: &known, rail: pair.theirs, most, ready: VecDeque::new() };
        // SAFETY: as the caller vouches. Once `settle` has ended a failed link, nothing is under way.
        let done = unsafe { exchange(&mut link, &mut || maker.next(|| job.next()), job.under_way, watch) };
        self.settle(pair, link, done, job.ops, watch)
    }

    /// Goes through memory that is already registered: for short operations and for atomic ones.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_staged(
        &self,
        pair: &Pair,
        ops: &[Op],
        targets: &[Target],
        found: &mut [u64],
        watch: &Watch,
    ) -> Result<(), Trouble> {
        let mut link = self.take(pair, watch)?;
        let mut requests = VecDeque::with_capacity(ops.len());
        let mut places = Vec::with_capacity(ops.len());
        let mut at = 0;
        for (op, (each, target)) in ops.iter().zip(targets).enumerate() {
            let (_, len) = each.work.span();
            places.push(at);
            let place = link.stage.at(at);
            let (opcode, numbers) = match &each.work {
                Work::Read { .. } => (opcode::READ, (0, 0)),
                Work::Write { local, .. } => {
                    let mut to = place;
                    for piece in local.list() {
                        // SAFETY: as the caller vouches; it was checked that all pieces fit.
                        unsafe { std::ptr::copy_nonoverlapping(piece.addr as *const u8, to, piece.len as usize) };
                        to = to.wrapping_add(piece.len as usize);
                    }
                    (opcode::WRITE, (0, 0))
                }
                Work::FetchAdd { value, .. } => (opcode::FETCH_ADD, (*value, 0)),
                Work::CompareAndSwap { expected, desired, .. } => (opcode::COMPARE_AND_SWAP, (*expected, *desired)),
            };
            if len > 0 {
                let list = vec![Sge { addr: place as u64, len: len as u32, key: link.stage.key() }];
                let (address, key) = (target.address, target.keys[pair.theirs]);
                requests.push_back(Request { op, opcode, list, address, key, numbers });
            }
            at += len.next_multiple_of(8) as usize;
        }
        let posted = link.next();
        // SAFETY: the memory is the link's own.
        let done = unsafe { exchange(&mut link, &mut || Ok(requests.pop_front()), UNDER_WAY, watch) };
        if done.is_ok() {
            for ((each, at), found) in ops.iter().zip(places).zip(found) {
                let from = link.stage.at(at);
                match &each.work {
                    Work::Read { local, .. } => {
                        let mut from = from;
                        for piece in local.list() {
                            // SAFETY: as the caller vouches; the device has filled the stage.
                            unsafe { std::ptr::copy_nonoverlapping(from, piece.addr as *mut u8, piece.len as usize) };
                            from = from.wrapping_add(piece.len as usize);
                        }
                    }
                    Work::Write { .. } => {}
                    // SAFETY: 8 bytes of the stage, at a multiple of 8.
                    _ => *found = unsafe { from.cast::<u64>().read_volatile() },
                }
            }
        }
        let is_unknown = link.next() > posted && ops.iter().any(|op| op.work.is_atomic());
        let settled = self.settle(pair, link, done, ops, watch);
        settled.map_err(|trouble| if is_unknown { unknown(trouble) } else { trouble })
    }
}

fn mixed() -> TransferError {
    TransferError::refused("the parts of the handle do not belong together")
}

/// What a failure means if an atomic operation may have been performed.
fn unknown(trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::Again(error) => Trouble::Final(TransferError::unknown(&error)),
        told => told,
    }
}

/// Which of two outcomes to report.
fn worst(a: Result<(), Trouble>, b: Result<(), Trouble>) -> Result<(), Trouble> {
    match (a, b) {
        (Ok(()), other) | (other, Ok(())) => other,
        (Err(Trouble::Again(_)), Err(Trouble::Final(error))) => Err(Trouble::Final(error)),
        (first, _) => first,
    }
}

fn export_of(handle: &Handle) -> (u32, u32, Token) {
    (handle.slot, handle.generation, handle.token)
}

fn told(fate: Fate) -> Option<TransferError> {
    match fate {
        Fate::Live => None,
        Fate::Gone => Some(TransferError::closed(None)),
        Fate::Refused => Some(TransferError::refused("the owner does not recognise this handle")),
    }
}

/// Runs requests on a link, as many at once as it has room for.
///
/// # Safety
/// The local memory of the requests must be this process's, registered, and writable where it is written to, until this
/// succeeds or the link has ended.
unsafe fn exchange(
    link: &mut Link,
    next: &mut dyn FnMut() -> Result<Option<Request>, TransferError>,
    most: u64,
    watch: &Watch,
) -> Result<(), Failure> {
    let stream = Arc::clone(&link.stream);
    let _followed = watch.follow(&stream)?;
    let depth = u64::from(link.depth);
    // Completions cost time: ask for one every few requests, and for the last of each batch.
    let every = (depth / 4).max(1);
    // The operation and the bytes of each request under way.
    let mut posted = vec![(0, 0); link.depth as usize];
    let (mut under_way, mut done) = (0, link.next());
    let mut batch = Batch::new();
    let mut ahead = next()?;
    loop {
        // A device may finish requests before `post` returns, so that this never waits.
        watch.check().map_err(Failure::Over)?;
        batch.clear();
        while under_way < most
            && !batch.is_full()
            && batch.len() < link.room()
            && let Some(request) = ahead.take()
        {
            ahead = next()?;
            let id = link.next() + batch.len() as u64;
            let bytes = request.bytes();
            under_way += bytes;
            posted[(id % depth) as usize] = (request.op, bytes);
            let is_last = ahead.is_none() || under_way >= most;
            batch.push(id, request, is_last || (id + 1).is_multiple_of(every));
        }
        if batch.len() > 0 {
            // SAFETY: as the caller vouches; the batch lives throughout the call.
            unsafe { link.post(batch.linked(), batch.len() as u64)? };
            if ahead.is_some() && under_way < most && link.room() > 0 {
                continue;
            }
        }
        if link.is_idle() {
            return Ok(());
        }
        link.wait(watch, |id| posted[(id % depth) as usize].0)?;
        while done < link.completed() {
            under_way -= posted[(done % depth) as usize].1;
            done += 1;
        }
    }
}

impl Peer for VerbsPeer {
    unsafe fn run(&self, ops: &[Op], found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        let (targets, nearest) = self.targets(ops)?;
        let mut last = TransferError::transport("no try");
        // Two attempts for each pair of rails, because pooled links may be dead.
        for attempt in 0..2 * self.pairs.len() {
            watch.check()?;
            if attempt > 0 && self.pairs.iter().all(Pair::is_broken) {
                break;
            }
            // SAFETY: as the caller vouches. Only copies are tried again, which may be done twice.
            match unsafe { self.attempt(ops, (&targets, nearest), found, watch) } {
                Ok(()) => return Ok(()),
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Again(error)) => last = error,
            }
        }
        Err(last)
    }

    fn is_alive(&self) -> bool {
        !self.has_ended.load(Ordering::Relaxed)
    }

    fn is_quick(&self) -> bool {
        false
    }
}
