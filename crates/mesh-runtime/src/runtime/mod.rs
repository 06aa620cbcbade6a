//! One process's runtime: the one object that ties links, calls, inboxes and the agent together.
//!
//! - this file: what it is made of, its procs, its end;
//! - `outgoing`: what a call, a tell, a reply and a cancellation do; `later`: the same once there is room for them;
//! - `incoming`: what messages that arrive do; `early`: those that come before the spawn that they depend on;
//! - `answers`: replies, and arguments of spawns (`arguments`), that wait here until their receivers read;
//! - `backlog`: messages that wait here for room at their receivers;
//! - `offering`, `landing`: large parts that travel past the gateways, at their senders and at their receivers;
//! - `descriptors`: promises that are finished by a write to a descriptor;
//! - `ports`: values for ports, and the notice that nobody listens there any more;
//! - `refs`: values that are kept here, and references to those of others; `copies`: what is here of other hosts' values;
//! - `waiting`: how threads wait for calls and messages, and how signals reach them.

mod alarms;
mod answers;
mod api;
mod arguments;
mod backlog;
mod copies;
mod counts;
mod deliver;
mod descriptors;
mod dispatch;
mod early;
mod event_loop;
mod flow;
mod home;
mod inboxes;
mod incoming;
mod inspection;
mod inspection_socket;
mod landing;
mod later;
mod lines;
mod moving;
mod offering;
mod outgoing;
mod packing;
mod ports;
mod refs;
mod returns;
mod signals;
mod switch;
mod waiting;

pub(crate) use answers::Answering;
#[cfg(test)]
pub(crate) use arguments::Announced;
pub use arguments::Spawned;
pub(crate) use backlog::Deferred;
#[cfg(test)]
pub(crate) use backlog::{Delayed, Ways};
pub use counts::Counts;
pub(crate) use dispatch::Dispatch;
#[cfg(test)]
pub(crate) use landing::Ground;
pub(crate) use landing::Landings;
pub use later::{Calling, Deferral, Later, millis};
pub use outgoing::{Body, Outgoing, Terms};
pub(crate) use ports::STREAM;
pub use ports::{Posted, Posting, Said};
pub use refs::Opened;
#[cfg(test)]
pub(crate) use switch::Parts;
pub(crate) use switch::{GATEWAY, Switch};
pub(crate) use waiting::Patience;
pub use waiting::Waited;

use crate::agent::{self, Agent, FORK_SERVER_TOKENS, SpawnSpec};
use crate::calls::{Call, Calls, Outcome};
use crate::completion::{Completion, Finisher};
use crate::error::RuntimeError;
use crate::fork_server::Spare;
use crate::gateway::{CONNECTION_TOKENS, Gateway, HostOptions, Visits};
use crate::gauge::Gauge;
use crate::inbox::Inbox;
use crate::inspect::Inspector;
use crate::link::Link;
pub(crate) use crate::locks::lock;
use crate::locks::{read, write};
use crate::logs::Logs;
use crate::meter::{MailboxCredits, Meters};
use crate::ports::Ports;
use crate::promises::Promises;
use crate::reactor::{Handler, Reactor};
use crate::refs::{Hold, Refs};
use crate::remote_meshes::RemoteMeshes;
use crate::shm::Memory;
use crate::spin_board::SpinBoard;
use crate::standing::Standing;
use crate::unseen::Unseen;
use descriptors::Descriptors;
use early::EarlyFrames;
use home::{AgentEnvironment, Home};
use inboxes::Inboxes;
use inspection_socket::InspectionSocket;
use mesh_proto::control::{Goodbye, Hello, StopProcs};
use mesh_proto::messages::Extend;
use mesh_proto::{
    CallId, EndReason, Ended, Frame, Header, HostNo, IdMaker, LinkId, MeshId, Piece, Placement, ProcAddr, REPLIES,
    Route, Router, SPAWNS, Target,
};
use mesh_topology::{Region, Slice};
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use waiting::Waiting;

const TOKEN_SIGNAL: u64 = 1 << 34;
const TOKEN_LOOP: u64 = TOKEN_SIGNAL + 1;
const TOKEN_INSPECTION: u64 = TOKEN_SIGNAL + 2;
/// What the notice is called that somebody wants to look in.
const VISITOR: &str = ".inspect";
/// The link of a proc to its agent.
const UP: LinkId = 0;

/// What can be set.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a thread that waits looks again before it blocks.
    pub spin: Duration,
    /// Bytes that may wait for one process before its senders do.
    pub link_budget: usize,
    /// Bytes that may wait in one mailbox before its senders do.
    pub mailbox_budget: u64,
    /// Bytes of replies that this process may hold and not have looked at.
    pub reply_budget: u64,
    /// Bytes of values that this process may keep for references.
    pub ref_budget: u64,
    /// Bytes of shared memory that this process may own.
    pub shm_budget: usize,
    /// Parts of this length and more travel through shared memory.
    pub shm_threshold: usize,
    /// How long shared memory is kept that is not used.
    pub shm_idle: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Runtime {
    pub(crate) me: ProcAddr,
    pub(crate) reactor: Arc<Reactor>,
    pub(crate) board: Arc<SpinBoard>,
    pub(crate) calls: Calls,
    pub(crate) ports: Ports,
    pub(crate) refs: Refs,
    /// At an agent: copies of values of other hosts.
    remote_values: copies::RemoteValues,
    pub(crate) promises: Promises,
    pub(crate) memory: Arc<Memory>,
    pub(crate) agent: Mutex<Agent>,
    /// What the procs of this host print; made with the first of them.
    logs: OnceLock<Arc<Logs>>,
    pub(crate) started: Instant,
    pub(crate) meters: Arc<Meters>,
    deferred: Deferred,
    /// Replies that wait, and arguments of spawns.
    answering: Answering,
    spawning: Answering,
    /// Bytes of replies that have arrived and that nobody has looked at.
    held_replies: Arc<AtomicU64>,
    announced: arguments::Announced,
    packing: packing::Packing,
    /// Itself, for the mailboxes that send credits on their own.
    this: Weak<Self>,
    pub(crate) standing: Arc<Standing>,
    options: Options,
    pub(crate) switch: Switch,
    pub(crate) inboxes: Inboxes,
    pub(crate) gateway: Gateway,
    early: EarlyFrames,
    pub(crate) landings: Landings<Arc<Hold>>,
    road: offering::Road,
    /// The host that this process is on.
    pub(crate) home: Home,
    /// Meshes of other hosts that this process has sent to.
    pub(crate) remote_meshes: Mutex<RemoteMeshes>,
    /// Meshes that this process has spawned elsewhere and not stopped: their shapes and places.
    remote_spawns: Mutex<HashMap<MeshId, (Region, Placement)>>,
    /// The processes of procs that this one has spawned, where it is not their agent.
    pids: Mutex<HashMap<ProcAddr, u32>>,
    ids: IdMaker,
    io: Mutex<Option<JoinHandle<()>>>,
    waiting: Waiting,
    /// See `inspection_socket`.
    inspection_socket: InspectionSocket,
    descriptors: Descriptors,
    /// See `gateway/visits`.
    pub(crate) visits: Visits,
    pub(crate) inspector: Inspector,
    /// Where the ranks of repaired meshes are.
    moving: moving::Moving,
}

impl Runtime {
    /// The controller's runtime, which is its host's agent too.
    ///
    /// # Errors
    /// If descriptors, memory or threads run out.
    pub fn controller(options: Options) -> Result<Arc<Self>, RuntimeError> {
        let me = ProcAddr::CONTROLLER;
        Self::build(me, Router::agent(me), SpinBoard::create()?, options)
    }

    /// The runtime of a job's agent on another host than the controller's.
    ///
    /// # Errors
    /// As for the controller.
    pub(crate) fn host_agent(host: HostNo, options: &HostOptions, scratch: PathBuf) -> Result<Arc<Self>, RuntimeError> {
        let me = ProcAddr::agent(host);
        let runtime = Self::build(me, Router::agent(me), SpinBoard::create()?, options.runtime)?;
        let home = AgentEnvironment {
            python: options.python.clone(),
            env: options.env.clone(),
            scratch: Some(scratch),
            standby: Arc::clone(&options.standby),
        };
        runtime.home.set(options.name.clone(), home);
        Ok(runtime)
    }

    /// Says what this host is called, and what is to be started with here when somebody on another host asks for it: this
    /// interpreter and this environment. The first word counts.
    pub fn be_host(
        &self,
        name: String,
        python: Vec<OsString>,
        env: Vec<(OsString, OsString)>,
        scratch: Option<PathBuf>,
    ) {
        self.home.set(name, AgentEnvironment { python, env, scratch, standby: Spare::default() });
    }

    /// Itself, for those who must not keep it.
    pub(crate) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    /// Itself, unless it is about to go.
    pub(crate) fn this(&self) -> Option<Arc<Self>> {
        self.this.upgrade()
    }

    /// What people call the host that this process is on.
    pub(crate) fn host_name(&self) -> String {
        self.home.name().map_or_else(|| format!("host {}", self.me.host), str::to_owned)
    }

    pub(crate) fn shm_threshold(&self) -> usize {
        self.options.shm_threshold
    }

    /// The ranks of a mesh that are, or were, on this host.
    pub(crate) fn local_ranks(&self, mesh: MeshId) -> std::ops::Range<u32> {
        self.switch.local(mesh).unwrap_or(0..0)
    }

    /// Whom a call of this process that waits was for.
    pub(crate) fn call_target(&self, call: CallId) -> Option<Target> {
        self.calls.target_of(call)
    }

    /// A proc's runtime: `link` leads to its agent, `board` is the host's.
    ///
    /// # Errors
    /// As for the controller.
    pub fn worker(
        me: ProcAddr,
        link: OwnedFd,
        board: OwnedFd,
        seat: u32,
        options: Options,
    ) -> Result<Arc<Self>, RuntimeError> {
        let _ = rustix::io::ioctl_fionbio(&link, true);
        let runtime = Self::build(me, Router::leaf(me, UP), SpinBoard::join(board, seat)?, options)?;
        let agent = ProcAddr::agent(me.host);
        let up = Arc::new(Link::new(UP, agent, link));
        runtime.switch.add_link(&up);
        up.send(&runtime.reactor, &Hello { pid: runtime.standing.pid() }.frame(me, agent));
        up.register(&runtime.reactor)?;
        Ok(runtime)
    }

    fn build(me: ProcAddr, router: Router, board: SpinBoard, options: Options) -> Result<Arc<Self>, RuntimeError> {
        let mut seed = [0_u8; 8];
        rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())
            .map_err(RuntimeError::os("getrandom"))?;
        let (reactor, board, standing) = (Arc::new(Reactor::new()?), Arc::new(board), Arc::new(Standing::new()));
        let switch = Switch::new(me, &reactor, router);
        let waiting = Waiting::new(&reactor, &board, options.spin, &standing, TOKEN_SIGNAL)?;
        let origin = u64::from_ne_bytes(seed).rotate_left(32);
        let memory = Arc::new(Memory::new(options.shm_budget, origin).keeping(options.ref_budget, !origin));
        let for_parts = (Arc::clone(&reactor), Arc::clone(&standing));
        let meters = Arc::new(Meters::new(&reactor));
        let answering = |what| Answering::new((me, what, options.link_budget), &reactor, &standing, &memory);
        let (answering, spawning) = (answering(REPLIES), answering(SPAWNS));
        let packing = packing::Packing::new(me, &memory, &board, options.shm_threshold);
        let landings = Landings::new(me, &memory, &standing);
        let deferred = Deferred::new(options.link_budget, &reactor, &standing, &memory, &meters);
        let runtime = Arc::new_cyclic(|this| {
            // What is said to the process itself counts against nobody's budget, but for messages of extensions.
            let own = || {
                let mailbox = MailboxCredits::new(0, options.mailbox_budget, Some(Weak::<Self>::clone(this)));
                Arc::new(Inbox::of(mailbox, Gauge::new(None)))
            };
            let (system, notices) = (own(), own());
            let unseen = match me {
                _ if me.is_script() => Unseen::told_to(Arc::clone(&notices)),
                _ if me.is_agent() => Unseen::default(),
                _ => Unseen::told_to(Arc::clone(&system)),
            };
            Self {
                me,
                reactor,
                board,
                calls: Calls::telling(unseen),
                ports: Ports::default(),
                promises: Promises::default(),
                memory: Arc::clone(&memory),
                refs: Refs::new(options.ref_budget),
                remote_values: copies::RemoteValues::default(),
                agent: Mutex::new(Agent::new(me.host)),
                logs: OnceLock::new(),
                started: Instant::now(),
                meters,
                deferred,
                answering,
                spawning,
                held_replies: Arc::default(),
                announced: arguments::Announced::default(),
                packing,
                this: Weak::clone(this),
                standing,
                options,
                switch,
                inboxes: Inboxes::new(me, &for_parts.0, &memory, (system, notices)),
                gateway: Gateway::new(me.host, u64::from_ne_bytes(seed).rotate_left(16) | 1),
                early: EarlyFrames::default(),
                landings,
                road: offering::Road::default(),
                home: Home::default(),
                remote_meshes: Mutex::default(),
                remote_spawns: Mutex::default(),
                pids: Mutex::default(),
                ids: IdMaker::new(u64::from_ne_bytes(seed)),
                io: Mutex::new(None),
                waiting,
                inspection_socket: InspectionSocket::new(&for_parts.0, &for_parts.1),
                descriptors: Descriptors::new(&for_parts.0, &for_parts.1),
                visits: Visits::default(),
                inspector: Inspector::new(me, &for_parts.0),
                moving: moving::Moving::default(),
            }
        });
        runtime.memory.counted_by(runtime.weak());
        let this = runtime.weak();
        runtime.memory.watch(options.shm_idle, move || {
            if let Some(runtime) = this.upgrade() {
                runtime.reactor.ring_io();
            }
        });
        let for_io = Arc::clone(&runtime);
        let thread = std::thread::Builder::new()
            .name("mesh-io".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || {
                let life = AssertUnwindSafe(|| for_io.reactor.run_io(&*for_io));
                if catch_unwind(life).is_err() {
                    // A process without this thread would hear of nothing any more, and wait for ever. Its end, at
                    // least, is heard by the others.
                    std::process::abort();
                }
            })
            .map_err(|error| RuntimeError::Os {
                what: "start the I/O thread",
                errno: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN),
            })?;
        *lock(&runtime.io) = Some(thread);
        Ok(runtime)
    }

    /// This process's address.
    pub fn me(&self) -> ProcAddr {
        self.me
    }

    /// An id that nobody else makes.
    pub fn new_id(&self) -> u64 {
        self.ids.next()
    }

    /// Something that any thread can finish, for those who wait in this runtime.
    pub fn completion(&self) -> Arc<Completion> {
        Completion::new(&self.reactor, &self.standing)
    }

    /// Has a promise shown to those who look into this process, under a name, while somebody waits for it.
    pub fn show_promise(&self, name: &str, completion: &Arc<Completion>) {
        self.promises.show(name, completion);
    }

    /// Marks the runtime as copied into a forked child, where nothing of it works.
    pub fn mark_forked(&self) {
        self.standing.mark_forked();
    }

    /// Whether this is a copy in a forked child.
    pub(crate) fn is_forked(&self) -> bool {
        self.standing.is_forked()
    }

    /// Refuses a forked copy.
    ///
    /// # Errors
    /// In a copy: what it sends would be taken for the original's.
    pub fn original(&self) -> Result<(), RuntimeError> {
        self.standing.original()
    }

    pub(crate) fn usable(&self) -> Result<(), RuntimeError> {
        self.standing.usable()
    }

    /// Opens a call; it either completes or is refused, also while the runtime closes.
    pub(crate) fn open(&self, target: Target, stream: bool) -> Result<Arc<Call>, RuntimeError> {
        let call = self.calls.open(target, stream);
        if let Err(error) = self.usable() {
            // Whoever closes may have passed over the open calls just before this one.
            self.calls.cancel(&self.reactor, &call);
            return Err(error);
        }
        Ok(call)
    }

    /// Makes a descriptor to finish a promise by. It belongs to the caller, and the promise is kept until it is closed.
    ///
    /// # Errors
    /// If the runtime is closed, or descriptors run out.
    pub fn finish_by_descriptor(&self, finisher: &Arc<Finisher>) -> Result<OwnedFd, RuntimeError> {
        self.descriptors.open(finisher)
    }

    /// Announces the next connection to this socket by a notice.
    ///
    /// # Errors
    /// If the runtime is closed, or the socket cannot be watched.
    pub fn watch_inspection_socket(&self, socket: OwnedFd) -> Result<(), RuntimeError> {
        self.inspection_socket.watch(socket, TOKEN_INSPECTION)
    }

    /// Somebody wants to look in: the controller's notices say so.
    pub(crate) fn notice_visitor(&self) {
        let header = Extend { call: 0, place: 0 }.header(self.me, self.me);
        self.inboxes.notice(Frame::build(header, None, VISITOR.as_bytes(), &[]));
    }

    // Procs.

    /// Makes a mesh of procs. Returns the call that completes as they come up.
    ///
    /// # Errors
    /// If the runtime is closed, or descriptors run out.
    pub fn spawn_procs(
        &self,
        mesh: MeshId,
        whole: &Region,
        placement: &Placement,
        spec: &SpawnSpec,
    ) -> Result<Arc<Call>, RuntimeError> {
        self.usable()?;
        let call = self.open(Target::Many(mesh, whole.clone(), placement.clone()), false)?;
        let per_host = placement.per_host(whole.len());
        if self.me.is_agent() && placement.only() == Some(self.me.host) {
            if let Err(error) = self.make_procs(mesh, 0..per_host, spec, (self.me, call.id)) {
                self.calls.cancel(&self.reactor, &call);
                return Err(error.while_spawning());
            }
        } else if let Some(agents) = placement.agents() {
            lock(&self.remote_spawns).insert(mesh, (whole.clone(), placement.clone()));
            self.dispatch(spec.order(mesh, per_host, call.id).frame(self.me, &agents), None);
        }
        Ok(call)
    }

    /// Asks procs to end. The call completes when all have.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn stop_procs(&self, target: &Target, within: Duration) -> Result<Arc<Call>, RuntimeError> {
        self.usable()?;
        let call = self.open(target.clone(), false)?;
        for Piece { first, target, .. } in target.pieces().iter() {
            match target {
                Target::One(addr) => {
                    let rank = addr.rank as usize;
                    let only = Slice::new(rank, &[], &[]).and_then(|slice| Region::new::<&str>(&[], slice));
                    if let Ok(only) = only {
                        self.stop_some(&call, *first, (addr.mesh, &only, &Placement::On(addr.host)), within);
                    }
                }
                Target::Many(mesh, ranks, placement) => {
                    self.stop_some(&call, *first, (*mesh, ranks, placement), within)
                }
                Target::Joined(_) => {}
            }
        }
        Ok(call)
    }

    fn stop_some(
        &self,
        call: &Call,
        first: usize,
        (mesh, ranks, placement): (MeshId, &Region, &Placement),
        within: Duration,
    ) {
        if self.me.is_agent() && placement.only() == Some(self.me.host) {
            for (index, rank) in (first..).zip(ranks) {
                let addr = placement.addr(mesh, rank);
                match self.switch.route(addr) {
                    Route::Gone(ended) => self.calls.on_outcome(&self.reactor, call.id, index, Outcome::Lost(ended)),
                    Route::Unknown => {
                        let gone = agent::lost(EndReason::NeverKnown);
                        self.calls.on_outcome(&self.reactor, call.id, index, gone);
                    }
                    Route::Here | Route::Via(_) | Route::Remote(_) => {}
                }
            }
            self.end_procs(mesh, Some(ranks), within);
            return;
        }
        let Some(agents) = placement.agents() else { return };
        let whole = lock(&self.remote_spawns).get(&mesh).is_none_or(|(whole, _)| whole.len() == ranks.len());
        if whole {
            lock(&self.remote_spawns).remove(&mesh);
            lock(&self.remote_meshes).forget(mesh);
        }
        // To one agent: from which of the mesh's ranks on it is to look.
        let (place, per_host) = match placement {
            Placement::Spread(spread) => (0, spread.per_host),
            _ if ranks.len() == 1 => (ranks.as_slice().offset(), 1),
            _ => (0, u32::try_from(ranks.as_slice().bounds().end).unwrap_or(u32::MAX)),
        };
        let first = u32::try_from(place).unwrap_or(u32::MAX);
        let order = StopProcs { mesh, call: call.id, first, per_host, within, ranks: ranks.clone() };
        self.dispatch(order.frame(self.me, &agents), None);
    }

    /// Takes a frame one step on its way. Returns how many bytes wait behind it.
    pub(crate) fn dispatch(&self, frame: Frame, from: Option<LinkId>) -> usize {
        self.switch.dispatch(self, frame, from)
    }

    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        self.switch.links()
    }

    /// Makes these links the procs of a mesh, and gives them what has waited for them. Returns what it was about, and what
    /// was for ranks that are not among them.
    pub(crate) fn open_routes(&self, mesh: MeshId, base: u32, fresh: &[Arc<Link>]) -> (Vec<Header>, Vec<Frame>) {
        self.early.open(&self.switch, &self.reactor, (mesh, base), fresh)
    }

    /// Whether it takes no part in the mesh any more.
    pub fn is_closed(&self) -> bool {
        self.standing.is_closed()
    }

    // The end.

    /// Says that what follows is no failure (a worker's last message), or why it is one, and writes out what still waits.
    pub fn goodbye(&self, limit: Duration, reason: EndReason) {
        if let Some(up) = self.switch.link(UP).filter(|_| !self.me.is_agent()) {
            self.drain_answers(limit);
            // First: the agent may hang up before the next line runs, and that is no reason to die of.
            self.standing.close();
            up.send(&self.reactor, &Goodbye { reason }.frame(self.me, up.peer));
            up.drain(&self.reactor, limit);
            // What it shares lives as long as this process: the agent hangs up once it has read, and mapped, all of it.
            up.wait_end(limit);
        }
    }

    /// The meshes of procs that this controller owns and that have not all ended, with their sizes and places.
    pub fn live(&self) -> Vec<(MeshId, usize, Placement)> {
        let here = Placement::On(self.me.host);
        let live = self.own_meshes().into_iter();
        let live = live.filter_map(|mesh| self.switch.local(mesh).map(|on| (mesh, on.len(), here.clone())));
        let remote_spawns = lock(&self.remote_spawns);
        live.chain(remote_spawns.iter().map(|(mesh, (whole, place))| (*mesh, whole.len(), place.clone()))).collect()
    }

    /// Ends the runtime: stops what it owns (killing what has not stopped after `within`), then its threads. Whoever
    /// still waits gets an error. Calling it again does nothing.
    pub fn close(&self, within: Duration) {
        if self.is_closed() {
            return;
        }
        if self.me == ProcAddr::CONTROLLER {
            let ended: Vec<Arc<Call>> = self
                .live()
                .iter()
                .filter_map(|(mesh, n, placement)| {
                    let extent = mesh_topology::Extent::new([("procs", *n)]).ok()?;
                    let whole = Target::Many(*mesh, Region::whole(&extent), placement.clone());
                    self.stop_procs(&whole, within).ok()
                })
                .collect();
            let deadline = Instant::now() + within + Duration::from_secs(1);
            for call in ended {
                self.wait_call(&call, None, Some(deadline), false, false);
            }
            self.collect_lines();
        }
        if !self.standing.close() {
            return;
        }
        self.inspection_socket.forget();
        self.descriptors.close();
        self.close_gateway(Duration::from_secs(1));
        self.close_visits();
        self.waiting.event_loop.wake(&self.reactor);
        self.close_fork_servers(within);
        let ended = Arc::new(Ended { orderly: true, ..Ended::unmade(EndReason::Shutdown) });
        self.calls.fail_all(&self.reactor, &ended);
        self.inspector.journal.close(&self.reactor);
        self.deferred.close();
        self.answering.close();
        self.spawning.close();
        self.landings.close(self);
        self.close_refs();
        self.meters.end(|_| true);
        for inbox in self.inboxes.all() {
            self.close_inbox(&inbox);
        }
        self.inboxes.system.close(&self.reactor);
        // Whoever takes them may not have come to the last ones yet.
        self.inboxes.notices.seal(&self.reactor);
        self.switch.close();
        self.reactor.close();
        let thread = lock(&self.io).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
        // One that the I/O thread was starting just then.
        self.close_fork_servers(within);
        if let Some(logs) = self.logs.get() {
            logs.close();
        }
        // Meshes and futures that a program keeps keep the runtime.
        self.memory.rest();
        self.board.leave();
    }
}

impl Handler for Runtime {
    fn on_ready(&self, token: u64, readable: bool, writable: bool) {
        if token >= CONNECTION_TOKENS {
            self.on_connection(token, readable, writable);
        } else if token >= descriptors::DESCRIPTOR_TOKENS {
            self.descriptors.on_ready(token);
        } else if token == TOKEN_SIGNAL {
            self.waiting.signals.on_ready(&self.reactor);
        } else if token == TOKEN_LOOP {
            self.waiting.event_loop.on_ready(&self.reactor);
        } else if token == TOKEN_INSPECTION {
            if self.inspection_socket.forget() {
                self.notice_visitor();
            }
        } else if token >= FORK_SERVER_TOKENS {
            self.on_fork_server(token, readable, writable);
        } else if let Some(link) = self.switch.link(token as LinkId) {
            if writable {
                link.flush(&self.reactor);
            }
            if readable {
                self.read_link(&link);
            }
        }
    }

    fn on_turn(&self) -> Option<Instant> {
        let turns = [
            self.agent_turn(),
            self.gateway_turn(),
            self.early_turn(),
            self.memory.turn(),
            self.deferred.turn(self),
            self.answering.turn(self),
        ];
        turns.into_iter().flatten().min()
    }
}
