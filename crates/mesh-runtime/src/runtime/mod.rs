//! A process's runtime: the object that ties links, calls, inboxes and the agent together.
//!
//! - this file: its members, and its end;
//! - `procs`: the procs that it makes and stops, or has as their agent; `guests`: scripts that join and leave;
//! - `outgoing`: what a call, a tell, a reply and a cancellation do; `later`: the same once there is room for them;
//! - `incoming`: what arriving messages do; `early`: those that come before the spawn that they depend on;
//! - `answers`: replies, and arguments of spawns (`arguments`), that wait here until their receivers read;
//! - `backlog`: messages that wait here for room at their receivers;
//! - `offering`, `landing`: large parts that travel by a bypass, at their senders and at their receivers;
//! - `direct`, `direct_links`: links between procs of one host;
//! - `descriptors`: promises that are finished by a write to a descriptor;
//! - `hosts`: connects the gateway to the other parts;
//! - `port_handles`: ports as their holders use them; `call_ends`: calls that nobody looks at any more;
//! - `values`: values that are kept here, and references; `copies`: copies of other hosts' values;
//! - `repairs`: repaired meshes; `moving`: where their ranks are; `ended`: which processes have ended;
//! - `inspection`: questions about this process, and events; `lines`: what processes print;
//! - `waiting`: how threads wait for calls and messages, and how signals reach them.

mod alarms;
mod announced;
mod answers;
mod arguments;
mod backlog;
mod blocking;
mod bundles;
mod call_ends;
mod copies;
mod counts;
mod dead_ranks;
mod deliver;
mod descriptors;
mod direct;
mod direct_links;
mod early;
mod ended;
mod event_loop;
mod flow;
mod guests;
mod host_logs;
mod hosts;
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
mod port_handles;
mod procs;
mod repairs;
mod returns;
mod road;
mod signals;
mod spawned;
mod switch;
mod values;
mod waiting;

pub(crate) use announced::Announced;
pub(crate) use answers::Answering;
pub use arguments::Spawned;
pub use backlog::Deferral;
#[cfg(test)]
pub(crate) use backlog::Delayed;
pub(crate) use backlog::{Deferred, Ways, millis};
pub use blocking::Wait;
pub use counts::Counts;
pub use event_loop::{EventLoop, EventLoops};
#[cfg(test)]
pub(crate) use landing::Ground;
pub(crate) use landing::Landings;
pub use later::Calling;
pub use lines::Which;
pub use outgoing::{Body, Outgoing, Terms};
pub use port_handles::{Later, Mailbox, Outlet, Packed, Posted, Posting, Said};
#[cfg(test)]
pub(crate) use switch::Parts;
pub(crate) use switch::{GATEWAY, Switch};
use waiting::Patience;
pub use waiting::Waited;

use crate::agent::{FORK_SERVER_TOKENS, HostAgent};
use crate::call::Call;
use crate::calls::Calls;
use crate::completion::{Completion, Finisher};
use crate::dispatch::Dispatch;
use crate::error::RuntimeError;
use crate::fork_server::{Spare, Standby};
use crate::gateway::{CONNECTION_TOKENS, Gateway, Neighbors};
use crate::gauge::Gauge;
use crate::home::{AgentEnvironment, Home};
use crate::inbox::Inbox;
use crate::inspect::Inspector;
use crate::link::Link;
pub(crate) use crate::locks::lock;
use crate::meter::{MailboxCredits, Meters};
use crate::ports::Ports;
use crate::promises::Promises;
use crate::reactor::{Handler, Reactor, TOKEN_PIPES};
use crate::refs::{Around, Hold, Refs};
use crate::remote_meshes::RemoteMeshes;
use crate::shm::Memory;
use crate::spin_board::SpinBoard;
use crate::standing::Standing;
use crate::unseen::Unseen;
use crate::visits::Visits;
pub(crate) use copies::RemoteValues;
use dead_ranks::DeadRanks;
use descriptors::Descriptors;
use early::EarlyFrames;
#[cfg(test)]
pub(crate) use ended::ENDS_KEPT;
pub(crate) use ended::EndedProcs;
use host_logs::HostLogs;
use inboxes::Inboxes;
use inspection_socket::InspectionSocket;
use mesh_proto::control::{Goodbye, Hello};
use mesh_proto::messages::Extend;
use mesh_proto::{EndReason, Ended, Frame, HostNo, IdMaker, LinkId, MeshId, ProcAddr, REPLIES, Router, SPAWNS, Target};
use mesh_topology::Region;
pub(crate) use moving::Moving;
use road::Road;
use spawned::RemoteSpawns;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use waiting::Waiting;

const TOKEN_SIGNAL: u64 = 1 << 34;
const TOKEN_INSPECTION: u64 = TOKEN_SIGNAL + 1;
/// Those of the event loops begin here.
const TOKEN_LOOPS: u64 = 1 << 35;
/// The name of the notice that somebody wants to look in.
const VISITOR: &str = ".inspect";
/// The link of a proc to its agent.
const UP: LinkId = 0;

/// The settings of a runtime.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a waiting thread spins before it blocks.
    pub spin: Duration,
    /// Bytes that may wait for one process before its senders do.
    pub link_budget: usize,
    /// Bytes that may wait in one mailbox before its senders do.
    pub mailbox_budget: u64,
    /// Bytes of replies that this process may hold before they are looked at.
    pub reply_budget: u64,
    /// Bytes of values that this process may keep for references.
    pub ref_budget: u64,
    /// Bytes of shared memory that this process may own.
    pub shm_budget: usize,
    /// Parts of this length and more travel through shared memory.
    pub shm_threshold: usize,
    /// How long unused shared memory is kept.
    pub shm_idle: Duration,
    /// How many links to other procs of its host a proc may have.
    pub direct_links: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Runtime {
    pub(crate) me: ProcAddr,
    pub(crate) reactor: Arc<Reactor>,
    pub(crate) board: Arc<SpinBoard>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) ports: Ports,
    pub(crate) refs: Refs,
    /// At an agent: copies of values of other hosts.
    pub(crate) remote_values: RemoteValues,
    pub(crate) promises: Promises,
    pub(crate) memory: Arc<Memory>,
    pub(crate) agent: HostAgent,
    logs: HostLogs,
    pub(crate) started: Instant,
    pub(crate) meters: Arc<Meters>,
    deferred: Deferred<<Self as Ways>::Enclosed>,
    /// Replies that wait, and arguments of spawns.
    answering: Answering,
    spawning: Answering,
    /// Bytes of replies that have arrived and that nobody has looked at.
    held_replies: Arc<AtomicU64>,
    announced: Announced,
    packing: packing::Packing,
    /// Itself, for the mailboxes that send credits by themselves.
    this: Weak<Self>,
    pub(crate) standing: Arc<Standing>,
    options: Options,
    pub(crate) switch: Switch,
    pub(crate) inboxes: Inboxes,
    pub(crate) gateway: Arc<Gateway<Self>>,
    early: EarlyFrames,
    pub(crate) landings: Landings<Arc<Hold>>,
    road: Road,
    /// The host that this process is on.
    pub(crate) home: Arc<Home>,
    /// Meshes of other hosts that this process has sent to.
    pub(crate) remote_meshes: RemoteMeshes,
    /// What this process has spawned below agents other than itself.
    remote_spawns: RemoteSpawns,
    dead_ranks: DeadRanks,
    ids: Arc<IdMaker>,
    io: Mutex<Option<JoinHandle<()>>>,
    waiting: Waiting,
    /// See `inspection_socket`.
    inspection_socket: InspectionSocket,
    descriptors: Descriptors,
    /// Visits from other machines.
    pub(crate) visits: Arc<Visits<Self>>,
    pub(crate) inspector: Inspector,
    /// Where the ranks of repaired meshes are.
    moving: Moving,
    /// Processes that have ended, as far as this one was told.
    ended: EndedProcs,
}

impl Runtime {
    /// The controller's runtime, which is also its host's agent.
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
    pub(crate) fn host_agent(
        host: HostNo,
        name: String,
        home: AgentEnvironment,
        options: Options,
    ) -> Result<Arc<Self>, RuntimeError> {
        let me = ProcAddr::agent(host);
        let runtime = Self::build(me, Router::agent(me), SpinBoard::create()?, options)?;
        runtime.home.set(name, home);
        Ok(runtime)
    }

    /// Sets this host's name, and the interpreter and environment for processes that another host asks for here. Only
    /// the first call counts.
    pub fn be_host(
        &self,
        name: String,
        python: Vec<OsString>,
        env: Vec<(OsString, OsString)>,
        scratch: Option<PathBuf>,
    ) {
        self.home.set(name, AgentEnvironment { python, env, scratch, standby: Spare::default() });
    }

    /// Keeps a copy of this process, made before it had threads, to be its first fork server.
    pub fn stand_by(&self, standby: Standby) {
        self.home.keep_standby(standby);
    }

    /// Itself, for code that must not keep it.
    pub(crate) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    /// Itself, unless it is about to be dropped.
    pub(crate) fn this(&self) -> Option<Arc<Self>> {
        self.this.upgrade()
    }

    /// The name of this process's host for people.
    pub(crate) fn host_name(&self) -> String {
        self.home.called(self.me.host)
    }

    /// The ranks of a mesh that are, or were, on this host.
    pub(crate) fn local_ranks(&self, mesh: MeshId) -> std::ops::Range<u32> {
        self.switch.local(mesh).unwrap_or(0..0)
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
        let up = Arc::new(Link::with_descriptors(UP, agent, link));
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
        let switch = Switch::with_direct_links(me, &reactor, router, options.direct_links);
        let waiting = Waiting::new(&reactor, &board, options.spin, &standing, TOKEN_SIGNAL)?;
        let origin = u64::from_ne_bytes(seed).rotate_left(32);
        let memory = Arc::new(Memory::new(options.shm_budget, origin).keeping(options.ref_budget, !origin));
        let for_parts = (Arc::clone(&reactor), Arc::clone(&standing));
        let (home, started) = (Arc::<Home>::default(), Instant::now());
        let agent = HostAgent::new(me, &reactor, &board, &home, started);
        let ids = Arc::new(IdMaker::new(u64::from_ne_bytes(seed)));
        let meters = Arc::new(Meters::new(&reactor));
        let answering = |what| Answering::new((me, what, options.link_budget), &reactor, &standing, &memory);
        let (answering, spawning) = (answering(REPLIES), answering(SPAWNS));
        let packing = packing::Packing::new(me, &memory, &board, options.shm_threshold);
        let landings = Landings::new(me, &memory, &standing);
        let deferred = Deferred::new(options.link_budget, &reactor, &standing, &memory, &meters);
        let runtime = Arc::new_cyclic(|this| {
            // What is sent to the process itself counts against no budget, except messages of extensions.
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
            let calls = Arc::new(Calls::telling(unseen));
            let visits = Arc::new(Visits::new(me, this));
            let for_gateway = Neighbors {
                reactor: Arc::clone(&reactor),
                standing: Arc::clone(&standing),
                calls: Arc::clone(&calls),
                home: Arc::clone(&home),
                memory: Arc::clone(&memory),
                board: Arc::clone(&board),
                visits: Arc::clone(&visits),
            };
            let incarnation = u64::from_ne_bytes(seed).rotate_left(16) | 1;
            let gateway = Gateway::new(me, incarnation, this, for_gateway, options.shm_threshold);
            let around = Around {
                me,
                reactor: Arc::clone(&reactor),
                standing: Arc::clone(&standing),
                memory: Arc::clone(&memory),
                board: Arc::clone(&board),
                ids: Arc::clone(&ids),
                counter: Weak::<Self>::clone(this),
            };
            Self {
                me,
                reactor,
                board,
                calls,
                ports: Ports::new(me, &for_parts.0, &for_parts.1),
                promises: Promises::default(),
                memory: Arc::clone(&memory),
                refs: Refs::new(around, options.ref_budget),
                remote_values: RemoteValues::new(me, &memory),
                agent,
                logs: HostLogs::new(me, started, Weak::<Self>::clone(this)),
                started,
                meters,
                deferred,
                answering,
                spawning,
                held_replies: Arc::default(),
                announced: Announced::default(),
                packing,
                this: Weak::clone(this),
                standing,
                options,
                switch,
                inboxes: Inboxes::new(me, &for_parts.0, &memory, (system, notices)),
                gateway,
                early: EarlyFrames::default(),
                landings,
                road: Road::default(),
                home,
                remote_meshes: RemoteMeshes::new(me.host),
                remote_spawns: RemoteSpawns::default(),
                dead_ranks: DeadRanks::default(),
                ids,
                io: Mutex::new(None),
                waiting,
                inspection_socket: InspectionSocket::new(&for_parts.0, &for_parts.1),
                descriptors: Descriptors::new(&for_parts.0, &for_parts.1),
                visits,
                inspector: Inspector::new(me, &for_parts.0),
                moving: Moving::new(me, &for_parts.0),
                ended: EndedProcs::default(),
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
                    // Without this thread a process would learn nothing any more, and wait forever. At least the others
                    // learn of its end.
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

    /// A unique id.
    pub fn new_id(&self) -> u64 {
        self.ids.next()
    }

    /// A completion for those who wait in this runtime.
    pub fn completion(&self) -> Arc<Completion> {
        Completion::new(&self.reactor, &self.standing)
    }

    /// Shows a promise under a name to observers of this process, while somebody waits for it.
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

    /// Opens a call. It either completes or is refused, even while the runtime closes.
    pub(crate) fn open(&self, target: Target, stream: bool) -> Result<Arc<Call>, RuntimeError> {
        let call = self.calls.open(target, stream);
        if let Err(error) = self.usable() {
            // A closing thread may have passed over the open calls just before this one.
            self.calls.cancel(&self.reactor, &call);
            return Err(error);
        }
        Ok(call)
    }

    /// Makes a descriptor to finish a promise by. The caller owns it, and the promise is kept until it is closed.
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

    /// Notes among the controller's notices that somebody wants to look in.
    pub(crate) fn notice_visitor(&self) {
        let header = Extend { call: 0, place: 0 }.header(self.me, self.me);
        self.inboxes.notice(Frame::build(header, None, VISITOR.as_bytes(), &[]));
    }

    /// Takes a frame one step on its way. Returns how many bytes wait behind it.
    pub(crate) fn dispatch(&self, frame: Frame, from: Option<LinkId>) -> usize {
        self.switch.dispatch(self, frame, from)
    }

    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        self.switch.links()
    }

    /// Whether it no longer takes part in the mesh.
    pub fn is_closed(&self) -> bool {
        self.standing.is_closed()
    }

    // The end.

    /// Says that what follows is no failure (a worker's last message), or why it is one, and writes out what still
    /// waits.
    pub fn goodbye(&self, limit: Duration, reason: EndReason) {
        if let Some(up) = self.switch.link(UP).filter(|_| !self.me.is_agent()) {
            self.drain_answers(limit);
            self.drain_links(limit);
            // First: the agent may hang up before the next line runs, which is no reason to die.
            self.standing.close();
            up.send(&self.reactor, &Goodbye { reason }.frame(self.me, up.peer));
            up.drain(&self.reactor, limit);
            // What it shares lives as long as this process: the agent hangs up once it has read and mapped all of it.
            up.wait_end(limit);
        }
    }

    /// Ends the runtime: stops what it owns (killing what has not stopped after `within`), then its threads. Calls that
    /// still wait get an error. Further calls do nothing.
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
            self.logs.collect();
        }
        if !self.standing.close() {
            return;
        }
        self.inspection_socket.forget();
        self.descriptors.close();
        self.gateway.close(Duration::from_secs(1));
        self.visits.close();
        self.waiting.event_loops.wake(&self.reactor);
        self.agent.close(within);
        let ended = Arc::new(Ended { orderly: true, ..Ended::unmade(EndReason::Shutdown) });
        self.calls.fail_all(&self.reactor, &ended);
        self.inspector.journal.close(&self.reactor);
        self.deferred.close();
        self.answering.close();
        self.spawning.close();
        self.landings.close(self);
        self.refs.close();
        self.meters.end(|_| true);
        for inbox in self.inboxes.all() {
            self.close_inbox(&inbox);
        }
        self.inboxes.system.close(&self.reactor);
        // Their reader may not have come to the last ones yet.
        self.inboxes.notices.seal(&self.reactor);
        self.switch.close();
        self.reactor.close();
        let thread = lock(&self.io).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
        // One that the I/O thread was just starting.
        self.agent.close(within);
        self.logs.close();
        // Meshes and futures that a program keeps also keep the runtime.
        self.memory.rest();
        self.board.leave();
    }
}

impl Dispatch for Runtime {
    fn dispatch(&self, frame: Frame) -> usize {
        Self::dispatch(self, frame, None)
    }
}

impl Handler for Runtime {
    fn on_ready(&self, token: u64, readable: bool, writable: bool) {
        if token == TOKEN_PIPES {
            if let Some(logs) = self.logs.get() {
                logs.pipe_watch().written();
            }
        } else if token >= CONNECTION_TOKENS {
            self.gateway.on_connection(token, readable, writable);
        } else if token >= descriptors::DESCRIPTOR_TOKENS {
            self.descriptors.on_ready(token);
        } else if token >= TOKEN_LOOPS {
            self.waiting.event_loops.on_ready(&self.reactor, token - TOKEN_LOOPS);
        } else if token == TOKEN_SIGNAL {
            self.waiting.signals.on_ready(&self.reactor);
        } else if token == TOKEN_INSPECTION {
            if self.inspection_socket.forget() {
                self.notice_visitor();
            }
        } else if token >= FORK_SERVER_TOKENS {
            self.on_procs(self.agent.on_fork_server(token, readable, writable));
        } else if let Some(link) = self.switch.direct.link(token as LinkId) {
            self.on_direct_ready(&link, readable, writable);
        } else if let Some(link) = self.switch.link(token as LinkId) {
            if writable {
                link.flush(&self.reactor);
            }
            if readable && (self.me.is_agent() || !link.has_page()) {
                self.read_link(&link, true);
            } else if readable {
                link.note_readable();
                self.read_in_order();
            }
        }
    }

    fn on_poll(&self) {
        if self.switch.direct.take_due() {
            self.read_in_order();
        }
        self.switch.bundles.settle();
        if let Some(logs) = self.logs.get() {
            logs.pipe_watch().poll();
        }
    }

    fn on_turn(&self) -> Option<Instant> {
        let turns = [
            self.agent_turn(),
            self.gateway.turn(),
            self.early_turn(),
            self.memory.turn(),
            self.deferred.turn(self),
            self.answering.turn(self),
            self.switch.direct.turn(),
            self.switch.bundles.turn(),
        ];
        turns.into_iter().flatten().min()
    }
}
