//! One process's part in transfers: the memory that it offers, and its transfers to and from the memory of others.

use crate::choice::{Choice, Distance, Need, Ours, choose};
use crate::completion::{Operation, Outcome};
use crate::cuda::{Cuda, Ready, run_staged};
use crate::error::{Closing, ErrorKind, TransferError};
use crate::exports::{Export, Exports, Keep};
use crate::handle::{Handle, MAX_SECTIONS, REFUSALS, RealmId, Section, refusal};
use crate::lock;
use crate::membership::Membership;
use crate::operation::Op;
use crate::realm::Realm;
use crate::segments::{Segments, Space};
use crate::transports::cuda::{self, CudaIpc};
use crate::transports::ibverbs::Ibverbs;
use crate::transports::shm::Shm;
use crate::transports::tcp::Tcp;
use crate::transports::ucx::Ucx;
use crate::transports::{Capabilities, Ops, Peer, Transport};
use crate::watch::Watch;
use crate::workers::Workers;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// Up to this many bytes, the calling thread transfers, if the transport does not wait for anybody.
pub const QUICK: u64 = 256 * 1024;
/// The same limit, in operations.
const QUICK_OPS: usize = 64;
/// The most bytes that all transports together may put into a handle.
const SAID: usize = 3072;
/// Why a transport does not offer a GPU's memory.
const NO_CUDA: &str = "it does not transfer GPU memory";
/// How long a transport that failed for an owner is passed over, if there is another.
const DISTRUST: Duration = Duration::from_secs(5);
/// The most owners remembered; beyond that all are forgotten, and those in use found again.
const OWNERS: usize = 1024;

/// A transport's state in this process.
#[derive(Clone, Debug)]
pub struct Standing {
    /// Its name.
    pub name: String,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Why it does not work here; none if it does.
    pub broken: Option<String>,
}

/// Libraries opened at run time, if not the system's.
#[derive(Clone, Debug, Default)]
pub struct Libraries {
    /// Paths of libucp, or names for the system to find; the first that opens is used. None for no UCX.
    pub ucp: Option<Vec<String>>,
    /// CUDA's driver; none for the system's `libcuda.so.1`.
    pub cuda: Option<String>,
    /// libibverbs; none for the system's.
    pub verbs: Option<String>,
}

/// Offers memory, and transfers.
#[derive(Debug)]
pub struct Engine {
    realm: Realm,
    exports: Arc<Exports>,
    cuda: Arc<Cuda>,
    transports: Vec<Arc<dyn Transport>>,
    /// Whether each transport works in this process; asked once.
    standing: Vec<Standing>,
    routes: Mutex<HashMap<RealmId, HashMap<String, Route>>>,
    workers: Workers,
    told: Told,
}

/// Called with the choice made for an owner's memory.
type Listener = Box<dyn Fn(&Handle, &Choice) + Send + Sync>;

/// The listener to choices, and the transport last reported to it for each owner.
#[derive(Default)]
struct Told {
    listener: OnceLock<Listener>,
    last: Mutex<HashMap<RealmId, String>>,
}

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Told")
    }
}

/// What one transport knows of one owner.
#[derive(Clone, Debug)]
enum Route {
    Open(Arc<dyn Peer>),
    Failed(Instant, String),
}

impl Engine {
    /// Creates the engine of this process, with these transports besides the native ones; one replaces a native one of
    /// its name.
    pub fn new(others: Vec<Arc<dyn Transport>>) -> Result<Arc<Self>, TransferError> {
        Self::new_with(others, Libraries::default())
    }

    /// The same, with these libraries.
    pub fn new_with(others: Vec<Arc<dyn Transport>>, libraries: Libraries) -> Result<Arc<Self>, TransferError> {
        let realm = Realm::draw()?;
        let cuda = Cuda::new(&realm, libraries.cuda);
        let mut transports: Vec<Arc<dyn Transport>> = vec![
            Arc::new(Shm::new(&realm)),
            Arc::new(CudaIpc::new(&realm, &cuda)),
            Arc::new(Ucx::new(&realm, libraries.ucp)),
            Arc::new(Tcp::new(&realm)),
            Arc::new(Ibverbs::new(&realm, libraries.verbs)),
        ];
        transports.retain(|own| others.iter().all(|other| other.name() != own.name()));
        transports.extend(others);
        Self::made_of(realm, cuda, transports)
    }

    #[cfg(test)]
    pub(crate) fn with(realm: Realm, transports: Vec<Arc<dyn Transport>>) -> Result<Arc<Self>, TransferError> {
        let cuda = Cuda::new(&realm, None);
        Self::made_of(realm, cuda, transports)
    }

    pub(crate) fn made_of(
        realm: Realm,
        cuda: Arc<Cuda>,
        transports: Vec<Arc<dyn Transport>>,
    ) -> Result<Arc<Self>, TransferError> {
        let standing = transports
            .iter()
            .map(|each| Standing {
                name: each.name().to_owned(),
                capabilities: each.capabilities(),
                broken: each.probe().err().map(|error| error.message),
            })
            .collect();
        let exports = Arc::new(Exports::new(&realm)?);
        let (routes, workers, told) = (Mutex::default(), Workers::default(), Told::default());
        Ok(Arc::new(Self { realm, exports, cuda, transports, standing, routes, workers, told }))
    }

    /// Calls `listener` when a transport is first used for an owner's reads and writes, and whenever another one is, on
    /// the thread that transfers. Only the first listener counts.
    pub fn on_choice(&self, listener: impl Fn(&Handle, &Choice) + Send + Sync + 'static) {
        let _ = self.told.listener.set(Box::new(listener));
    }

    fn tell(&self, handle: &Handle, name: &str, need: Need, forced: Option<&str>) {
        let Some(listener) = self.told.listener.get().filter(|_| forced.is_none() && need.copies) else { return };
        {
            let mut last = lock(&self.told.last);
            if last.get(&handle.realm).is_some_and(|last| last == name) {
                return;
            }
            if last.len() >= OWNERS {
                last.clear();
            }
            last.insert(handle.realm, name.to_owned());
        }
        listener(handle, &self.explain(handle, need, None));
    }

    /// This process.
    pub fn realm(&self) -> &Realm {
        &self.realm
    }

    /// What this process offers.
    pub fn exports(&self) -> &Arc<Exports> {
        &self.exports
    }

    /// The transports, and whether they work here.
    pub fn transports(&self) -> Vec<Standing> {
        let standing = self.transports.iter().zip(&self.standing);
        // Capabilities change when the process joins a job.
        standing.map(|(each, standing)| Standing { capabilities: each.capabilities(), ..standing.clone() }).collect()
    }

    /// Tells the engine that it is a forked copy, which cannot use it: it lets go of what others wait for.
    pub fn forked(&self) {
        self.transports.iter().for_each(|transport| transport.forked());
    }

    /// Joins this process to a job of several hosts: later exports are offered to those hosts, too.
    pub fn join(&self, membership: &Membership) {
        self.transports.iter().for_each(|transport| transport.join(membership));
    }

    /// Offers memory. Returns what keeps it offered, and the handle by which others reach it.
    ///
    /// # Safety
    /// As for [`Exports::open`].
    pub unsafe fn export(
        self: &Arc<Self>,
        segments: Segments,
        writable: bool,
        keep: Keep,
    ) -> Result<(Arc<Export>, Handle), TransferError> {
        self.realm.check_fork()?;
        let on_device = self.cuda.offer(&segments)?;
        // The stream has been waited for, once and for all.
        let space = if on_device.is_some() { Space::Cuda { stream: None } } else { Space::Host };
        // SAFETY: as the caller vouches.
        let export = unsafe { self.exports.open_on(segments.within(space), on_device, writable, keep)? };
        let mut sections = Vec::new();
        let (mut reasons, mut refusals) = (Vec::new(), String::new());
        let mut room = SAID;
        for (transport, standing) in self.transports.iter().zip(&self.standing) {
            let is_meant = if export.on_device.is_some() { transport.takes_cuda() } else { transport.takes_host() };
            let offered = match &standing.broken {
                Some(why) => Err(TransferError::transport(why.clone())),
                // CUD-1
                None if export.on_device.is_some() && !transport.takes_cuda() => Err(TransferError::transport(NO_CUDA)),
                None => transport.offer(&self.exports, &export),
            };
            match offered {
                Ok(data) if data.len() <= room && sections.len() < MAX_SECTIONS => {
                    room -= data.len();
                    sections.push(Section { name: transport.name().to_owned(), data });
                }
                Ok(_) => reasons.push(format!("{}: a handle has no room for it", transport.name())),
                Err(error) => {
                    // The transport works here but fails for this memory: tell readers why.
                    if standing.broken.is_none() && is_meant {
                        refusals.push_str(&refusal(transport.name(), &error.message));
                    }
                    reasons.push(format!("{}: {error}", transport.name()));
                }
            }
        }
        if sections.is_empty() {
            self.close(&export, Closing::Dropped, true);
            return Err(TransferError::new(
                ErrorKind::NoTransport,
                format!("no transport can offer memory of this process: {}", reasons.join("; ")),
            ));
        }
        if !refusals.is_empty() && refusals.len() <= room && sections.len() < MAX_SECTIONS {
            sections.push(Section { name: REFUSALS.to_owned(), data: refusals.into_bytes() });
        }
        let length = export.segments.len();
        let handle = Handle {
            realm: self.realm.id,
            boot: self.realm.boot,
            pid: self.realm.pid,
            host: self.realm.host.clone(),
            token: export.token,
            slot: export.slot,
            generation: export.generation,
            length,
            start: 0,
            len: length,
            writable,
            sections,
        };
        Ok((export, handle))
    }

    /// Returns the memory of this process that a handle names. It is kept while the export is held (EXP-1).
    pub fn own(&self, handle: &Handle) -> Result<(Arc<Export>, Segments), TransferError> {
        if handle.realm != self.realm.id {
            return Err(TransferError::invalid(format!("the memory belongs to another process, {}", handle.owner())));
        }
        let export = self.exports.find(handle.slot, handle.generation, &handle.token)?;
        if handle.writable && !export.writable {
            return Err(TransferError::refused("the handle says that the memory is writable"));
        }
        let segments = export.segments.part(handle.start, handle.len)?;
        Ok((export, segments))
    }

    /// Stops offering the export, on all transports; a second call has no effect. With `wait`, returns once no
    /// transport can reach the memory; otherwise that happens soon after. The memory is kept until then (EXP-1).
    pub fn close(self: &Arc<Self>, export: &Arc<Export>, closing: Closing, wait: bool) {
        if !self.exports.close(export, closing) || !self.transports.iter().any(|transport| transport.holds_memory()) {
            return;
        }
        let (engine, export) = (Arc::clone(self), Arc::clone(export));
        let withdraw = move || engine.transports.iter().for_each(|transport| transport.withdraw(&export));
        if wait {
            withdraw();
        } else {
            // Without a thread, the transports keep it until the process ends.
            let _ = self.workers.run(withdraw);
        }
    }

    /// Stops offering anything, as the process ends.
    pub fn close_all(self: &Arc<Self>) {
        for export in self.exports.live() {
            self.close(&export, Closing::Dropped, true);
        }
        self.transports.iter().for_each(|transport| transport.end());
        self.exports.end();
    }

    /// Returns what would be tried for a handle now, in which order, and why not the rest.
    pub fn explain(&self, handle: &Handle, need: Need, forced: Option<&str>) -> Choice {
        let distance = if handle.realm == self.realm.id {
            Distance::Process
        } else if handle.boot == self.realm.boot {
            Distance::Host
        } else {
            Distance::Elsewhere
        };
        let is_cuda = handle.section(cuda::NAME).is_some();
        let routes = self.routes().get(&handle.realm).cloned();
        let ours: Vec<Ours> = self
            .transports()
            .into_iter()
            .zip(&self.transports)
            .map(|(Standing { name, mut capabilities, broken }, transport)| {
                let lately = || match routes.as_ref().and_then(|routes| routes.get(&name)) {
                    Some(Route::Failed(since, why)) if since.elapsed() < DISTRUST => Some(why.clone()),
                    _ => None,
                };
                let never = || handle.section(&name).and_then(|section| transport.why_not(handle, section));
                // Processors cannot update GPU memory atomically, and the owner's GPU does not take our instructions.
                let steps = (is_cuda && need.atomics).then(|| "memory of a GPU has no atomic operations".to_owned());
                let broken = broken.or(steps).or_else(lately).or_else(never);
                capabilities.atomics |= need.atomics && forced == Some(name.as_str()) && transport.atomics_by_name();
                Ours { name, capabilities, broken }
            })
            .collect();
        let theirs = handle.sections.iter().map(|section| section.name.as_str()).filter(|name| *name != REFUSALS);
        let mut choice = choose(&ours, &theirs.collect::<Vec<_>>(), distance, need, forced);
        for (name, why) in &mut choice.passed {
            if handle.section(name).is_some() || forced.is_some_and(|forced| forced != name) {
                continue;
            }
            let takes_cuda = |each: &Arc<dyn Transport>| each.name() == name && each.takes_cuda();
            if let Some(refusal) = handle.refusal(name) {
                *why = format!("{why}: {refusal}");
            } else if is_cuda && !self.transports.iter().any(takes_cuda) {
                NO_CUDA.clone_into(why);
            }
        }
        choice
    }

    /// Starts operations. Short ones that wait for nobody are done when this returns.
    ///
    /// # Safety
    /// The local memory of all operations must be this process's, and writable where it is written to, for as long as
    /// `asked` lives.
    pub unsafe fn submit(
        self: &Arc<Self>,
        asked: impl Ops + 'static,
        timeout: Option<Duration>,
        forced: Option<&str>,
    ) -> Arc<Operation> {
        let operation = Operation::new(timeout.and_then(|timeout| Instant::now().checked_add(timeout)));
        let noted = match self.note_streams(asked.ops()) {
            Ok(noted) => noted,
            Err(error) => {
                drop(asked);
                operation.finish(Err(error));
                return operation;
            }
        };
        if self.is_quick(asked.ops(), forced) {
            // SAFETY: as the caller vouches.
            let outcome = unsafe { self.run(asked.ops(), &operation.watch, forced) };
            drop(asked);
            operation.finish(outcome);
            return operation;
        }
        // A forked copy lacks the threads that it believes to be waiting for work.
        if let Err(error) = self.realm.check_fork() {
            drop(asked);
            operation.finish(Err(error));
            return operation;
        }
        let (engine, at_work) = (Arc::clone(self), Unfinished(Arc::clone(&operation)));
        let forced = forced.map(str::to_owned);
        let started = self.workers.run(move || {
            let watch = &at_work.0.watch;
            let ready = noted.iter().try_for_each(|each| each.wait(watch));
            drop(noted);
            // SAFETY: as the caller vouches.
            let outcome = ready.and_then(|()| unsafe { engine.run(asked.ops(), watch, forced.as_deref()) });
            // OPR-1: once told, the caller may do with the memory as it likes.
            drop(asked);
            at_work.0.finish(outcome);
        });
        if let Err(error) = started {
            operation.finish(Err(error));
        }
        operation
    }

    /// Notes what must finish on the user's streams before local GPU memory is used.
    fn note_streams(&self, ops: &[Op]) -> Result<Vec<Ready>, TransferError> {
        if ops.iter().any(|op| op.work.local().is_some_and(Segments::is_cuda)) {
            self.cuda.note(ops)
        } else {
            Ok(Vec::new())
        }
    }

    fn is_quick(&self, ops: &[Op], forced: Option<&str>) -> bool {
        let mut bytes = 0;
        let is_short = ops.len() <= QUICK_OPS
            && ops.iter().all(|op| {
                bytes += op.work.span().1;
                bytes <= QUICK && !op.work.is_atomic() && !op.work.local().is_some_and(Segments::is_cuda)
            });
        if !is_short {
            return false;
        }
        let routes = self.routes();
        let mut last = None;
        ops.iter().all(|op| {
            // Some of an owner's buffers may be a GPU's.
            let of = (op.handle.realm, op.handle.section(cuda::NAME).is_some());
            if last == Some(of) {
                return true;
            }
            last = Some(of);
            let is_quick = |(name, route): (&String, &Route)| match route {
                Route::Open(peer) => {
                    peer.is_quick() && forced.is_none_or(|forced| forced == name) && op.handle.section(name).is_some()
                }
                Route::Failed(..) => false,
            };
            // A first connection to an owner may take a while, so another thread makes it.
            routes.get(&op.handle.realm).is_some_and(|routes| routes.iter().any(is_quick))
        })
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run(&self, ops: &[Op], watch: &Watch, forced: Option<&str>) -> Outcome {
        self.realm.check_fork()?;
        watch.check()?;
        let mut found = vec![0; ops.len()];
        let Some(first) = ops.first() else { return Ok(found) };
        let kind = |op: &Op| (op.handle.realm, op.work.is_atomic(), op.handle.section(cuda::NAME).is_some());
        let same = |a: &Op, b: &Op| kind(a) == kind(b);
        // Nearly always one owner and one kind; otherwise group by owner, with atomics apart.
        if ops.iter().all(|op| same(first, op)) {
            // SAFETY: as the caller vouches.
            unsafe { self.run_group(ops, &mut found, watch, forced)? };
            return Ok(found);
        }
        let mut order: Vec<usize> = (0..ops.len()).collect();
        order.sort_by_key(|&at| kind(&ops[at]));
        let sorted: Vec<Op> = order.iter().map(|&at| ops[at].clone()).collect();
        let mut order = order.into_iter();
        for group in sorted.chunk_by(same) {
            let mut theirs = vec![0; group.len()];
            // SAFETY: as the caller vouches.
            unsafe { self.run_group(group, &mut theirs, watch, forced)? };
            for (at, value) in order.by_ref().take(group.len()).zip(theirs) {
                found[at] = value;
            }
        }
        Ok(found)
    }

    /// Performs operations on one owner, by the first transport that can.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_group(
        &self,
        ops: &[Op],
        found: &mut [u64],
        watch: &Watch,
        forced: Option<&str>,
    ) -> Result<(), TransferError> {
        let Some(first) = ops.first() else { return Ok(()) };
        let handle = Arc::clone(&first.handle);
        let atomics = first.work.is_atomic();
        let need = Need { copies: !atomics, atomics };
        let quick = if atomics { None } else { self.open_quick(&handle, forced) };
        let mut has_failed = false;
        if let Some((name, peer)) = quick {
            // SAFETY: as the caller vouches.
            match unsafe { self.run_on(peer.as_ref(), ops, found, watch) } {
                Err(error) if error.kind == ErrorKind::Transport => {
                    self.distrust(&handle, &name, &error);
                    has_failed = true;
                }
                done => {
                    if done.is_ok() {
                        self.tell(&handle, &name, need, forced);
                    }
                    return self.note_end(&handle, peer.as_ref(), done);
                }
            }
        }
        // Ask again after each failure, which may have ruled out more than one transport.
        loop {
            let mut choice = self.explain(&handle, need, forced);
            if choice.candidates.is_empty() && !has_failed && self.trust_again(&handle) {
                choice = self.explain(&handle, need, forced);
            }
            let Some(name) = choice.candidates.first() else {
                return Err(TransferError::new(ErrorKind::NoTransport, choice.nothing(&handle.owner(), forced)));
            };
            let peer = self.reach(&handle, name, watch);
            let done = match &peer {
                // SAFETY: as the caller vouches.
                Ok(peer) => unsafe { self.run_on(peer.as_ref(), ops, found, watch) },
                Err(error) => Err(error.clone()),
            };
            match (done, peer) {
                (Err(error), _) if error.kind == ErrorKind::Transport => {
                    watch.check()?;
                    self.distrust(&handle, name, &error);
                    has_failed = true;
                }
                (done, Ok(peer)) => {
                    if done.is_ok() {
                        self.tell(&handle, name, need, forced);
                    }
                    return self.note_end(&handle, peer.as_ref(), done);
                }
                (done, Err(_)) => return done,
            }
        }
    }

    /// Performs operations on one transport, staging GPU memory if the transport does not take it.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_on(
        &self,
        peer: &dyn Peer,
        ops: &[Op],
        found: &mut [u64],
        watch: &Watch,
    ) -> Result<(), TransferError> {
        if peer.takes_cuda() || !ops.iter().any(|op| op.work.local().is_some_and(Segments::is_cuda)) {
            // SAFETY: as the caller vouches.
            return unsafe { peer.run(ops, found, watch) };
        }
        // SAFETY: as the caller vouches.
        unsafe { run_staged(&self.cuda, peer, ops, found, watch) }
    }

    /// Returns a transport that was chosen before and leaves the owner's processor alone: none is better.
    fn open_quick(&self, handle: &Handle, forced: Option<&str>) -> Option<(String, Arc<dyn Peer>)> {
        let routes = self.routes();
        routes.get(&handle.realm)?.iter().find_map(|(name, route)| match route {
            Route::Open(peer) if peer.is_quick() && forced.is_none_or(|forced| forced == name) => {
                handle.section(name).map(|_| (name.clone(), Arc::clone(peer)))
            }
            _ => None,
        })
    }

    fn reach(&self, handle: &Handle, name: &str, watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        if let Some(Route::Open(peer)) = self.routes().get(&handle.realm).and_then(|routes| routes.get(name)) {
            return Ok(Arc::clone(peer));
        }
        let transport = self.transports.iter().find(|transport| transport.name() == name);
        let (Some(transport), Some(section)) = (transport, handle.section(name)) else {
            return Err(TransferError::transport(format!("there is no transport {name}")));
        };
        let peer = transport.connect(handle, section, watch)?;
        self.note(handle, name, Route::Open(Arc::clone(&peer)));
        Ok(peer)
    }

    /// Forgets an owner that has ended, and all that it holds open here.
    fn note_end(&self, handle: &Handle, peer: &dyn Peer, done: Result<(), TransferError>) -> Result<(), TransferError> {
        if matches!(&done, Err(error) if error.kind == ErrorKind::Gone) && !peer.is_alive() {
            self.routes().remove(&handle.realm);
        }
        done
    }

    /// With no other left, a transport that failed recently is better than none.
    fn trust_again(&self, handle: &Handle) -> bool {
        let mut routes = self.routes();
        let Some(routes) = routes.get_mut(&handle.realm) else { return false };
        let before = routes.len();
        routes.retain(|_, route| matches!(route, Route::Open(_)));
        routes.len() < before
    }

    /// The number of known owners.
    pub fn owners(&self) -> usize {
        self.routes().len()
    }

    fn distrust(&self, handle: &Handle, name: &str, error: &TransferError) {
        self.note(handle, name, Route::Failed(Instant::now(), error.message.clone()));
    }

    fn note(&self, handle: &Handle, name: &str, route: Route) {
        let mut routes = self.routes();
        if routes.len() >= OWNERS && !routes.contains_key(&handle.realm) {
            // Routes in use are held by their users, and found again.
            routes.clear();
        }
        routes.entry(handle.realm).or_default().insert(name.to_owned(), route);
    }

    fn routes(&self) -> MutexGuard<'_, HashMap<RealmId, HashMap<String, Route>>> {
        lock(&self.routes)
    }
}

/// Tells waiters if the thread that works on the operation panics.
struct Unfinished(Arc<Operation>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.finish(Err(TransferError::transport("the thread that transferred has panicked; please report it")));
    }
}
