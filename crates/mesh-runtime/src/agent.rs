//! The host agent's book-keeping: which procs this host has, which fork server made them, who waits for them.
//!
//! It lives inside the controller's runtime (a script that uses one machine needs no daemon) and decides nothing by
//! itself: `mesh_proto::Lifecycle` says what an event means, this file carries it out.

use crate::calls::Outcome;
use crate::error::RuntimeError;
use crate::fork_server::{ForkServer, ForkServerSpec, Report, WorkerFds, told};
use crate::inspect::{Note, ProcView, Titles};
use crate::link::Link;
use crate::oom::OomKills;
use crate::runtime::{Runtime, lock};
use bytes::Bytes;
use mesh_proto::control::{Down, Goodbye, SpawnProcs, StopProc, StopProcs, Watch, ranks_of};
use mesh_proto::messages::{Meaning, ProcUp, SpawnPart, StopActor};
use mesh_proto::{
    ActorId, CallId, EndReason, Ended, Event, Exit, Family, Frame, Header, HostNo, Kind, Lifecycle, LinkId, MeshId,
    Owned, ProcAddr, Route,
};
use mesh_topology::Region;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Fork servers' tokens begin here, above all links'.
pub(crate) const FORK_SERVER_TOKENS: u64 = 1 << 32;
/// Descriptors that a spawn leaves for everything else.
const SPARE_FDS: u64 = 64;

/// More than any mesh of procs has on one host; nobody is to count further through a number that came in a frame.
pub(crate) const MOST_PROCS: u32 = 1 << 20;

/// How long procs whose owner has died may take to stop by themselves.
const ORPHAN_GRACE: Duration = Duration::from_secs(5);

/// A mesh of procs to be made.
#[derive(Clone, Debug)]
pub struct SpawnSpec {
    /// The fork server to make them from.
    pub fork_server: ForkServerSpec,
    /// Whether each gets a fresh interpreter.
    pub exec: bool,
    /// What the workers are told; opaque here.
    pub config: Bytes,
    /// How long a worker may take until it reports.
    pub within: Duration,
    /// What people call the mesh, and its shape, for whoever looks at the whole; opaque here.
    pub title: Arc<str>,
}

#[derive(Debug)]
struct Proc {
    life: Lifecycle,
    fork_server: u64,
    seat: u32,
    /// Who spawned it, and so owns it and is told once it is up.
    ready: (ProcAddr, CallId),
}

#[derive(Debug)]
struct Order {
    addr: ProcAddr,
    exec: bool,
    seat: u32,
    worker: WorkerFds,
}

#[derive(Debug)]
enum Birth {
    /// The I/O thread is about to start it; these wait.
    Due(ForkServerSpec, Vec<Order>),
    Running(Arc<ForkServer>),
}

#[derive(Debug, Default)]
pub(crate) struct Agent {
    procs: HashMap<ProcAddr, Proc>,
    /// Who owns whom, and who hears of whose end.
    pub(crate) family: Family,
    tokens: HashMap<ForkServerSpec, u64>,
    fork_servers: HashMap<u64, Birth>,
    next_token: u64,
    next_link: LinkId,
    free_seats: Vec<u32>,
    next_seat: u32,
    /// What the meshes that live are called.
    titles: HashMap<MeshId, Arc<str>>,
    /// From the first proc on, where the kernel tells.
    oom: Option<OomKills>,
}

impl Agent {
    pub(crate) fn new(host: HostNo) -> Self {
        Self { family: Family::new(host), ..Self::default() }
    }

    fn seat(&mut self) -> u32 {
        self.free_seats.pop().unwrap_or_else(|| {
            self.next_seat += 1;
            self.next_seat
        })
    }

    /// The id of a link that is about to be made.
    pub(crate) fn next_link(&mut self) -> LinkId {
        let id = self.next_link;
        self.next_link += 1;
        id
    }

    /// Has a proc that nobody has forked: a script that has joined. Returns its seat on the board.
    pub(crate) fn take_in(
        &mut self,
        addr: ProcAddr,
        owner: ProcAddr,
        pid: u32,
        (now, within): (Duration, Duration),
    ) -> u32 {
        let seat = self.seat();
        let mut life = Lifecycle::default();
        life.on(Event::Asked { within }, now);
        life.on(Event::Forked(pid), now);
        self.family.procs_made(addr.mesh, addr.rank..addr.rank + 1, owner);
        self.titles.insert(addr.mesh, Arc::from("script\0"));
        // Of no fork server's.
        self.procs.insert(addr, Proc { life, fork_server: 0, seat, ready: (owner, 0) });
        seat
    }

    fn next_deadline(&self) -> Option<Duration> {
        self.procs.values().filter_map(|proc| proc.life.deadline()).min()
    }

    pub(crate) fn len(&self) -> usize {
        self.procs.len()
    }

    /// Every proc that has not ended, and the names of their meshes.
    pub(crate) fn overview(&self) -> (Vec<ProcView>, Titles) {
        let procs =
            self.procs.iter().map(|(at, proc)| (*at, proc.life.stage(), proc.life.pid(), proc.ready.0)).collect();
        (procs, self.titles.iter().map(|(mesh, title)| (*mesh, Arc::clone(title))).collect())
    }

    fn fork_server(&self, token: u64) -> Option<Arc<ForkServer>> {
        match self.fork_servers.get(&token) {
            Some(Birth::Running(fork_server)) => Some(Arc::clone(fork_server)),
            _ => None,
        }
    }
}

/// What a message says of who owns whom, and of who has to hear of whose end. Returns owners on other hosts that are to be
/// watched.
pub(crate) fn relate(family: &mut Family, header: &Header) -> Vec<ProcAddr> {
    let (src, dst) = (header.src, header.dst);
    match Meaning::of(header) {
        Ok(Meaning::Spawn(spawn)) => {
            family.asked(src, dst.mesh);
            // Arguments that follow an announcement may come after the actor's stop.
            if spawn.part != SpawnPart::Arguments {
                family.actor_made(dst, spawn.actor, src);
            }
            return family.to_watch();
        }
        Ok(Meaning::StopActor(stop)) => {
            family.asked(src, dst.mesh);
            family.actor_stopped(dst, stop.actor);
        }
        Ok(
            Meaning::Call(_)
            | Meaning::Post(_)
            | Meaning::Extend(_)
            | Meaning::Control(Kind::Inspect | Kind::Watch | Kind::Fetch),
        ) => {
            family.asked(src, dst.mesh);
        }
        // Who has something there that is to come back.
        Ok(said) if said.is_for_port() || header.is_owed() || header.is_charged() => {
            family.asked(src, dst.mesh);
        }
        Ok(_) | Err(_) => {}
    }
    Vec::new()
}

/// Makes room for `n` more descriptors, by raising the soft limit where the hard one allows it.
fn room_for(n: u64) -> Result<(), RuntimeError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let used = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u64;
    let limit = getrlimit(Resource::Nofile);
    let need = used.saturating_add(n).saturating_add(SPARE_FDS);
    if limit.current.is_some_and(|soft| soft < need) {
        let maximum = limit.maximum;
        if maximum.is_some_and(|hard| hard < need) {
            return Err(RuntimeError::Descriptors { need, allowed: maximum.unwrap_or_default() });
        }
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
            .map_err(RuntimeError::os("raise the limit of open files"))?;
    }
    Ok(())
}

impl Runtime {
    /// Makes these ranks of a mesh of procs below this agent. Their links exist at once, so that messages can follow at
    /// once; they wait in the sockets until the workers are there. `ready` hears of every proc when it is up.
    pub(crate) fn make_procs(
        &self,
        mesh: MeshId,
        ranks: Range<u32>,
        spec: &SpawnSpec,
        ready: (ProcAddr, CallId),
    ) -> Result<(), RuntimeError> {
        // A link and two pipes for each, both ends until the worker has its own.
        room_for(6 * ranks.len() as u64)?;
        let config = Arc::new(told(&spec.config)?);
        let mut orders = Vec::with_capacity(ranks.len());
        let mut fresh = Vec::with_capacity(ranks.len());
        let mut agent = lock(&self.agent);
        for rank in ranks.clone() {
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
                    .map_err(RuntimeError::os("socketpair"))?;
            let addr = ProcAddr { mesh, rank, host: self.me.host };
            let id = agent.next_link();
            fresh.push(Arc::new(Link::new(id, addr, ours)));
            let seat = agent.seat();
            let (out, err) = self.logs()?.open(addr)?;
            let worker = WorkerFds { link: theirs, out, err, config: Arc::clone(&config) };
            orders.push(Order { addr, exec: spec.exec, seat, worker });
        }
        for link in &fresh {
            link.register(&self.reactor)?;
        }
        let (heard, strays) = self.begin_with(&fresh, || self.open_routes(mesh, ranks.start, &fresh));
        let next = FORK_SERVER_TOKENS + agent.next_token;
        let token = *agent.tokens.entry(spec.fork_server.clone()).or_insert(next);
        if token == next {
            agent.next_token += 1;
            agent.fork_servers.insert(token, Birth::Due(spec.fork_server.clone(), Vec::new()));
        }
        let owned = agent.family.procs_made(mesh, ranks.clone(), ready.0);
        let mut to_watch = agent.family.to_watch();
        heard.iter().for_each(|header| to_watch.extend(relate(&mut agent.family, header)));
        agent.titles.insert(mesh, Arc::clone(&spec.title));
        for order in &orders {
            let mut life = Lifecycle::default();
            life.on(Event::Asked { within: spec.within }, self.started.elapsed());
            let proc = Proc { life, fork_server: token, seat: order.seat, ready };
            if agent.oom.is_none() {
                agent.oom = OomKills::from_now_on();
            }
            agent.procs.insert(order.addr, proc);
        }
        self.note_spawn(mesh, &spec.title, ready.0, &fresh);
        match agent.fork_servers.get_mut(&token) {
            Some(Birth::Due(_, waiting)) => {
                waiting.extend(orders);
                drop(agent);
                self.reactor.ring_io();
            }
            Some(Birth::Running(fork_server)) => {
                let fork_server = Arc::clone(fork_server);
                drop(agent);
                self.place(&fork_server, orders);
                // There is a deadline now.
                self.reactor.ring_io();
            }
            None => {}
        }
        self.watch_owners(to_watch);
        strays.iter().for_each(|frame| self.refuse_unknown(frame));
        if !owned {
            self.end_procs(mesh, None, ORPHAN_GRACE);
        }
        Ok(())
    }

    fn place(&self, fork_server: &ForkServer, orders: Vec<Order>) {
        for order in orders {
            fork_server.spawn(&self.reactor, order.exec, order.addr, order.seat, order.worker);
        }
    }

    // What others want of this host.

    /// Procs are to be made here.
    pub(crate) fn on_spawn_procs(&self, frame: &Frame) {
        let (Some(order), Some(ranks)) = (SpawnProcs::read(frame), ranks_of(frame, u32::MAX)) else { return };
        let (mesh, ready) = (order.mesh, (frame.header.src, order.call));
        let mut spec = SpawnSpec::ordered(order);
        // Where no interpreter is named, it is that of whatever host the procs are on.
        if spec.fork_server.argv.first().is_some_and(|program| program.is_empty()) {
            self.home.settle_in(&mut spec.fork_server);
        }
        let made = match self.leaving() {
            Some(ended) => Err(ended),
            None => self
                .make_procs(mesh, ranks.clone(), &spec, ready)
                .map_err(|error| Arc::new(Ended::unmade(EndReason::NotMade(error.to_string())))),
        };
        if let Err(ended) = made {
            for rank in ranks {
                let who = ProcAddr { mesh, rank, host: self.me.host };
                self.dispatch(Down::notice(who, &ended).frame(self.me, ready.0), None);
            }
            self.procs_failed(mesh, &ended);
        }
    }

    /// Procs of this host are to end; or all of it, as nobody's mesh says.
    pub(crate) fn on_stop_procs(&self, frame: &Frame) {
        let Some(StopProcs { mesh, within, ranks, .. }) = StopProcs::read(frame) else { return };
        let src = frame.header.src;
        if mesh == 0 {
            return self.on_release(frame.header, within);
        }
        lock(&self.agent).family.asked(src, mesh);
        if let Some(here) = ranks_of(frame, MOST_PROCS) {
            self.tell_ended(src, mesh, here.filter(|rank| ranks.contains(*rank as usize)));
        }
        self.end_procs(mesh, Some(&ranks), within);
    }

    /// Tells a proc which of these ranks of a mesh have ended already: it waits for the end of all.
    fn tell_ended(&self, to: ProcAddr, mesh: MeshId, ranks: impl Iterator<Item = u32>) {
        let long_ago = || Ended { orderly: true, ..Ended::unmade(EndReason::LongAgo) };
        for rank in ranks {
            let addr = ProcAddr { mesh, rank, host: self.me.host };
            let ended = match self.switch.route(addr) {
                Route::Gone(ended) => Some(ended),
                Route::Unknown => Some(Arc::new(long_ago())),
                Route::Here | Route::Via(_) | Route::Remote(_) => None,
            };
            if let Some(ended) = ended {
                self.dispatch(Down::answer(addr, &ended).frame(self.me, to), None);
            }
        }
    }

    /// Somebody wants to be told when a proc of this host ends. What is sent to the proc itself, its agent has seen.
    pub(crate) fn on_watch_proc(&self, header: &Header) {
        if !self.me.is_agent() {
            return;
        }
        let Watch { mesh, rank } = Watch::read(header);
        if mesh == 0 {
            // The agent itself: a proc of its host asks about all that it has.
            lock(&self.agent).family.listens(header.src);
            return;
        }
        let whom = ProcAddr { mesh, rank, host: self.me.host };
        lock(&self.agent).family.asked(header.src, whom.mesh);
        let gone = match self.switch.route(whom) {
            Route::Gone(ended) => ended,
            Route::Unknown => Arc::new(Ended::unmade(EndReason::LongAgo)),
            Route::Here | Route::Via(_) | Route::Remote(_) => return,
        };
        self.dispatch(Down::notice(whom, &gone).frame(self.me, header.src), None);
    }

    /// A proc of this host has said its last word.
    pub(crate) fn on_goodbye(&self, frame: &Frame) {
        let src = frame.header.src;
        let Goodbye { reason } = Goodbye::read(frame).unwrap_or_default();
        self.on_proc(src, Event::Goodbye(reason));
        if let Some(link) = self.switch.link_of(src) {
            link.hang_up();
        }
    }

    // Procs.

    /// Asks a mesh of this host to end, or some ranks of it; what has not ended after `within` is killed.
    pub(crate) fn end_procs(&self, mesh: MeshId, ranks: Option<&Region>, within: Duration) {
        let meant =
            |addr: &&ProcAddr| addr.mesh == mesh && ranks.is_none_or(|ranks| ranks.contains(addr.rank as usize));
        let addrs: Vec<ProcAddr> = lock(&self.agent).procs.keys().filter(meant).copied().collect();
        for addr in addrs {
            self.on_proc(addr, Event::StopAsked { within });
            self.dispatch(StopProc { within }.frame(self.me, addr), None);
        }
        self.reactor.ring_io();
    }

    /// A proc of this host is up, in this process: its spawner is told.
    pub(crate) fn on_hello(&self, addr: ProcAddr, pid: u32) {
        let (title, ready) = {
            let agent = lock(&self.agent);
            let Some(proc) = agent.procs.get(&addr) else { return };
            (agent.titles.get(&addr.mesh).cloned(), proc.ready)
        };
        self.on_proc(addr, Event::Hello);
        self.note(Note::new("proc_up", addr).text("title", title.as_deref().unwrap_or_default()), false);
        if !addr.is_guest() {
            self.dispatch(ProcUp { proc: addr, call: ready.1, pid }.frame(ready.0), None);
        }
    }

    /// Something has happened to a proc of this host.
    pub(crate) fn on_proc(&self, addr: ProcAddr, event: Event) {
        let now = self.started.elapsed();
        let (actions, fork_server, seat, deadline) = {
            let mut agent = lock(&self.agent);
            let Some(proc) = agent.procs.get_mut(&addr) else { return };
            let before = proc.life.deadline();
            let actions = proc.life.on(event, now);
            let deadline = proc.life.deadline() != before;
            let (token, seat) = (proc.fork_server, proc.seat);
            (actions, agent.fork_server(token), seat, deadline)
        };
        if deadline {
            self.reactor.ring_io();
        }
        if actions.kill
            && let Some(fork_server) = fork_server
        {
            fork_server.kill(&self.reactor, addr);
        }
        if let Some(mut ended) = actions.notice {
            if ended.exit == Exit::Signal(rustix::process::Signal::KILL.as_raw())
                && !ended.orderly
                && lock(&self.agent).oom.as_mut().is_some_and(OomKills::claim)
            {
                ended.exit = Exit::OutOfMemory;
            }
            ended.stderr_tail = self.last_words(addr);
            self.note_leaving(&mut ended);
            self.board.clear(seat);
            self.on_ended(addr, seat, Arc::new(ended));
        }
    }

    fn on_ended(&self, addr: ProcAddr, seat: u32, ended: Arc<Ended>) {
        if let Some(link) = self.switch.close_route(addr, &ended) {
            link.close(&self.reactor);
        }
        self.forget_debts(addr, &ended);
        let (aftermath, title) = {
            let mut agent = lock(&self.agent);
            agent.procs.remove(&addr);
            agent.free_seats.push(seat);
            let aftermath = agent.family.died(addr);
            let title = match agent.family.owner_of(addr.mesh) {
                Some(_) => agent.titles.get(&addr.mesh).cloned(),
                None => agent.titles.remove(&addr.mesh),
            };
            (aftermath, title)
        };
        self.note_end(addr, &ended, title.as_deref().unwrap_or_default());
        // Before anybody hears of the death: what they send then comes behind these stops (FAM-4).
        self.end_orphans(aftermath.end);
        for listener in aftermath.tell {
            self.dispatch(Down::notice(addr, &ended).frame(self.me, listener), None);
        }
        let lost = self.lose_proc(addr, &ended);
        self.notice_down(addr, &ended, lost);
    }

    /// What dead owners have left behind ends too.
    pub(crate) fn end_orphans(&self, orphans: Vec<Owned>) {
        for thing in orphans {
            match thing {
                Owned::Procs(mesh) => self.end_procs(mesh, None, ORPHAN_GRACE),
                Owned::Actor(home, actor) => self.end_actor(home, actor),
            }
        }
    }

    /// Stops an actor whose owner has died; nobody waits for that.
    fn end_actor(&self, home: ProcAddr, actor: ActorId) {
        self.dispatch(Frame::build(StopActor::of(actor).header(self.me, home), None, b"", &[]), None);
    }

    /// What a fork server had to say.
    pub(crate) fn on_fork_server(&self, token: u64, readable: bool, writable: bool) {
        let Some(fork_server) = lock(&self.agent).fork_server(token) else { return };
        if writable {
            fork_server.flush(&self.reactor);
        }
        if !readable {
            return;
        }
        let mut over = None;
        fork_server.read(|report| match report {
            Report::Forked(addr, pid) => self.on_proc(addr, Event::Forked(pid)),
            Report::Exited(addr, exit) => self.on_proc_exit(addr, exit),
            Report::Failed(addr, why) => self.on_proc(addr, Event::SpawnFailed(EndReason::NotMade(why))),
            Report::Refused(why) => over = Some(EndReason::NotMade(why)),
            Report::Closed => {
                over.get_or_insert_with(|| EndReason::ForkServerEnded(fork_server.pid()));
            }
        });
        if let Some(why) = over {
            self.bury(token, &fork_server, &why);
        }
    }

    /// A reaped proc may have sent its last words: they are read before its end is told.
    fn on_proc_exit(&self, addr: ProcAddr, exit: Exit) {
        if let Some(link) = self.switch.link_of(addr) {
            self.read_link(&link);
        }
        self.on_proc(addr, Event::Exited(exit));
    }

    fn bury(&self, token: u64, fork_server: &ForkServer, why: &EndReason) {
        fork_server.close(&self.reactor);
        let orphans: Vec<ProcAddr> = {
            let mut agent = lock(&self.agent);
            agent.fork_servers.remove(&token);
            agent.tokens.retain(|_, t| *t != token);
            agent.procs.iter().filter(|(_, p)| p.fork_server == token).map(|(a, _)| *a).collect()
        };
        // From here on a spawn starts another one.
        fork_server.reap(Duration::from_millis(200));
        for addr in orphans {
            self.on_proc(addr, Event::SpawnFailed(why.clone()));
        }
    }

    /// The I/O thread's turn: fork servers to start, deadlines to keep. Returns the next deadline.
    pub(crate) fn agent_turn(&self) -> Option<Instant> {
        let due: Vec<u64> = lock(&self.agent)
            .fork_servers
            .iter()
            .filter_map(|(token, birth)| matches!(birth, Birth::Due(..)).then_some(*token))
            .collect();
        for token in due {
            self.start_fork_server(token);
        }
        let now = self.started.elapsed();
        let late: Vec<ProcAddr> = lock(&self.agent)
            .procs
            .iter()
            .filter(|(_, proc)| proc.life.deadline().is_some_and(|at| at <= now))
            .map(|(addr, _)| *addr)
            .collect();
        for addr in late {
            self.on_proc(addr, Event::Tick);
        }
        lock(&self.agent).next_deadline().map(|at| self.started + at)
    }

    fn start_fork_server(&self, token: u64) {
        let Some(Birth::Due(spec, _)) = lock(&self.agent).fork_servers.get(&token).map(|birth| match birth {
            Birth::Due(spec, _) => Birth::Due(spec.clone(), Vec::new()),
            Birth::Running(fork_server) => Birth::Running(Arc::clone(fork_server)),
        }) else {
            return;
        };
        let started = ForkServer::start(&spec, self.board.fd(), token, self.me.host, self.home.standby_for(&spec))
            .and_then(|fork_server| fork_server.register(&self.reactor).map(|()| Arc::new(fork_server)));
        match started {
            Ok(fork_server) => {
                let waiting = match lock(&self.agent).fork_servers.get_mut(&token) {
                    Some(birth @ Birth::Due(..)) => {
                        match std::mem::replace(birth, Birth::Running(Arc::clone(&fork_server))) {
                            Birth::Due(_, waiting) => Some(waiting),
                            Birth::Running(_) => None,
                        }
                    }
                    _ => None,
                };
                match waiting {
                    Some(waiting) => self.place(&fork_server, waiting),
                    None => {
                        // The runtime was closed meanwhile, and has forgotten it.
                        fork_server.close(&self.reactor);
                        fork_server.reap(Duration::from_millis(200));
                    }
                }
            }
            Err(error) => {
                let waiting = {
                    let mut agent = lock(&self.agent);
                    agent.tokens.remove(&spec);
                    match agent.fork_servers.remove(&token) {
                        Some(Birth::Due(_, waiting)) => waiting,
                        _ => Vec::new(),
                    }
                };
                for order in waiting {
                    self.on_proc(order.addr, Event::SpawnFailed(EndReason::NotMade(error.to_string())));
                }
            }
        }
    }

    /// Takes every fork server down, and with them every worker that is left.
    pub(crate) fn close_fork_servers(&self, limit: Duration) {
        let all: Vec<Birth> = lock(&self.agent).fork_servers.drain().map(|(_, birth)| birth).collect();
        let running = all.into_iter().filter_map(|birth| match birth {
            Birth::Running(fork_server) => Some(fork_server),
            Birth::Due(..) => None,
        });
        let running: Vec<_> = running.collect();
        for fork_server in &running {
            fork_server.close(&self.reactor);
        }
        for fork_server in running {
            fork_server.reap(limit);
        }
    }

    /// The meshes that have processes here.
    pub(crate) fn meshes_here(&self) -> HashSet<MeshId> {
        lock(&self.agent).procs.keys().map(|addr| addr.mesh).collect()
    }

    /// The controller's own meshes that have not all ended. The others end with their owners.
    pub(crate) fn own_meshes(&self) -> Vec<MeshId> {
        let agent = lock(&self.agent);
        agent.family.meshes().filter(|mesh| agent.family.owner_of(*mesh) == Some(self.me)).collect()
    }

    /// The process of a proc of this agent's.
    pub(crate) fn pid_here(&self, addr: ProcAddr) -> Option<u32> {
        lock(&self.agent).procs.get(&addr).and_then(|proc| proc.life.pid())
    }
}

impl SpawnSpec {
    /// The order to make such procs, for agents.
    pub(crate) fn order(&self, mesh: MeshId, per_host: u32, call: CallId) -> SpawnProcs {
        let raw = |text: &OsString| Bytes::copy_from_slice(text.as_bytes());
        SpawnProcs {
            mesh,
            call,
            per_host,
            exec: self.exec,
            within: self.within,
            argv: self.fork_server.argv.iter().map(raw).collect(),
            env: self.fork_server.env.iter().map(|(key, value)| (raw(key), raw(value))).collect(),
            plan: self.fork_server.plan.clone(),
            config: self.config.clone(),
            title: self.title.to_string(),
        }
    }

    /// What an order says of the procs.
    pub(crate) fn ordered(order: SpawnProcs) -> Self {
        let text = |raw: Bytes| OsString::from_vec(raw.into());
        let SpawnProcs { exec, within, argv, env, plan, config, title, .. } = order;
        let argv = argv.into_iter().map(text).collect();
        let env = env.into_iter().map(|(key, value)| (text(key), text(value))).collect();
        Self { fork_server: ForkServerSpec { argv, env, plan }, exec, config, within, title: title.into() }
    }
}

/// What becomes of a call to a proc that is not there any more, or never was.
pub(crate) fn lost(reason: EndReason) -> Outcome {
    Outcome::Lost(Arc::new(Ended { orderly: true, ..Ended::unmade(reason) }))
}
