//! The host agent: a host's procs, the fork servers that forked them, and who is notified of their ends.
//!
//! It is part of the process that all others on its host connect to: the controller, or the agent process of another host.
//! It decides little itself. `mesh_proto::Lifecycle` decides what an event means for a proc, and `mesh_proto::Family` knows
//! who owns what and who is notified; the agent holds both and does what they say.
//!
//! - [`procs`]: the table of procs and their lives, without I/O;
//! - [`fork_servers`]: which fork servers there are; [`forking`]: how they start, report and end;
//! - [`spawning`], [`stopping`], [`guests`]: procs that start and end;
//! - [`watching`]: who is notified of whose end.
//!
//! An end concerns many parts of a process. The agent only reports what ended ([`HostAgent::on_proc`]) and what follows
//! ([`HostAgent::bury`]); `runtime/procs.rs` carries it out.
//!
//! There is one lock. It is held while the routes to new procs are opened, so it comes before the locks of moves, early
//! frames, the router and links. Only the reading end of a link may be held when it is taken. Fork servers are started and
//! written to without it.

mod fork_servers;
mod forking;
mod guests;
mod procs;
mod spawning;
mod stopping;
mod watching;

pub(crate) use fork_servers::FORK_SERVER_TOKENS;
pub(crate) use procs::{Death, Procs, Spawn};
pub use spawning::SpawnSpec;

use crate::dispatch::Dispatch;
use crate::error::RuntimeError;
use crate::home::Home;
use crate::inspect::{ForkServerView, ProcView, Titles};
use crate::link::Link;
use crate::locks::lock;
use crate::oom::OomKills;
use crate::reactor::Reactor;
use crate::spin_board::SpinBoard;
use fork_servers::ForkServers;
use mesh_proto::control::{Goodbye, Hello};
use mesh_proto::messages::ProcUp;
use mesh_proto::{Ended, Event, Exit, Frame, Header, LinkId, MeshId, ProcAddr, Route};
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// More procs than any mesh has on one host. Bounds loops over a number that came in a frame.
pub(crate) const MOST_PROCS: u32 = 1 << 20;
/// A proc knows its link to the agent as 0.
const FIRST_LINK: LinkId = 1;

/// What the host agent needs of its process.
pub(crate) trait Surroundings: Dispatch {
    /// Where a process is.
    fn route(&self, addr: ProcAddr) -> Route;
    /// Opens the routes to new procs, and sends them what each must know first and what has waited for them. Returns the
    /// headers of the latter, and messages for ranks that are not among them. The agent's lock is held.
    fn open_routes(&self, mesh: MeshId, base: u32, links: &[Arc<Link>]) -> (Vec<Header>, Vec<Frame>);
    /// Refuses a message for a rank that will never exist.
    fn refuse(&self, frame: &Frame);
    /// Returns the write ends of a new proc's stdout and stderr.
    fn open_output(&self, addr: ProcAddr) -> Result<(OwnedFd, OwnedFd), RuntimeError>;
    /// Drops them: that proc will not be spawned.
    fn forget_output(&self, addr: ProcAddr);
    /// Records an event: procs are being spawned. The agent's lock is held.
    fn note_spawn(&self, mesh: MeshId, title: &str, owner: ProcAddr, links: &[Arc<Link>]);
    /// Records an event: a proc is up.
    fn note_up(&self, addr: ProcAddr, title: &str);
}

#[derive(Debug)]
struct State {
    procs: Procs,
    fork_servers: ForkServers,
    /// Set with the first proc, if the kernel counts such kills.
    oom: Option<OomKills>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct HostAgent {
    me: ProcAddr,
    reactor: Arc<Reactor>,
    board: Arc<SpinBoard>,
    home: Arc<Home>,
    /// When the process's clock started.
    started: Instant,
    next_link: AtomicU32,
    state: Mutex<State>,
}

impl HostAgent {
    pub(crate) fn new(
        me: ProcAddr,
        reactor: &Arc<Reactor>,
        board: &Arc<SpinBoard>,
        home: &Arc<Home>,
        started: Instant,
    ) -> Self {
        let state = State { procs: Procs::new(me.host), fork_servers: ForkServers::default(), oom: None };
        Self {
            me,
            reactor: Arc::clone(reactor),
            board: Arc::clone(board),
            home: Arc::clone(home),
            started,
            next_link: AtomicU32::new(FIRST_LINK),
            state: Mutex::new(state),
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns an id for a new link.
    fn new_link(&self) -> LinkId {
        self.next_link.fetch_add(1, Ordering::Relaxed)
    }

    /// Two procs get a link to each other, by which they may ask anything of one another: each is told of the other's end.
    /// Returns the id of the link; none if one of them has ended.
    pub(crate) fn join(&self, one: ProcAddr, other: ProcAddr) -> Option<LinkId> {
        let mut state = lock(&self.state);
        // One that is still here has not been told of to anybody.
        if !state.procs.is_here(one) || !state.procs.is_here(other) {
            return None;
        }
        state.procs.family.asked(one, other.mesh);
        state.procs.family.asked(other, one.mesh);
        Some(self.new_link())
    }

    // The lives of procs.

    /// Handles an event of a proc of this host. Returns the proc's end if this is it; each proc has one (LIF-1).
    #[must_use]
    pub(crate) fn on_proc(&self, addr: ProcAddr, event: Event) -> Option<Ended> {
        let (turn, killer) = {
            let mut state = lock(&self.state);
            let mut turn = state.procs.on(addr, event, self.now())?;
            if let Some(ended) = &mut turn.ended
                && ended.exit == Exit::Signal(rustix::process::Signal::KILL.as_raw())
                && !ended.orderly
                && state.oom.as_mut().is_some_and(OomKills::claim)
            {
                ended.exit = Exit::OutOfMemory;
            }
            let killer = turn.kill.and_then(|token| state.fork_servers.running(token));
            (turn, killer)
        };
        if turn.new_deadline {
            self.reactor.ring_io();
        }
        if let Some(fork_server) = killer {
            fork_server.kill(&self.reactor, addr);
        }
        turn.ended
    }

    /// A proc is up: notifies its spawner.
    pub(crate) fn on_hello(&self, around: &impl Surroundings, header: &Header) {
        let (addr, Hello { pid }) = (header.src, Hello::read(header));
        let Some((title, (spawner, call))) = lock(&self.state).procs.hello(addr, pid, self.now()) else { return };
        around.note_up(addr, &title);
        if !addr.is_guest() {
            around.dispatch(ProcUp { proc: addr, call, pid }.frame(spawner));
        }
    }

    /// A proc said goodbye: its end is no failure, or it gave the reason for one.
    pub(crate) fn on_goodbye(&self, frame: &Frame) {
        let Goodbye { reason } = Goodbye::read(frame).unwrap_or_default();
        let ended = self.on_proc(frame.header.src, Event::Goodbye(reason));
        debug_assert!(ended.is_none());
    }

    /// Forgets a proc that ended ([`Self::on_proc`]) and whose route is closed. Returns what follows.
    pub(crate) fn bury(&self, addr: ProcAddr) -> Death {
        let mut state = lock(&self.state);
        let Some(mut death) = state.procs.remove(addr) else { return Death::default() };
        // Under the lock, before anybody else gets the seat.
        self.board.clear(death.seat);
        // This process knows already; it needs no message.
        death.aftermath.tell.retain(|listener| *listener != self.me);
        death
    }

    // Queries.

    /// Returns the number of procs of this host.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).procs.len()
    }

    /// Returns the process id of a proc of this host.
    pub(crate) fn pid_of(&self, addr: ProcAddr) -> Option<u32> {
        lock(&self.state).procs.pid_of(addr)
    }

    /// Returns the meshes that have procs here.
    pub(crate) fn meshes(&self) -> HashSet<MeshId> {
        lock(&self.state).procs.meshes()
    }

    /// Returns this process's own meshes that have not ended. The others end with their owners.
    pub(crate) fn own_meshes(&self) -> Vec<MeshId> {
        lock(&self.state).procs.owned_by(self.me)
    }

    /// Returns the running fork servers, the first one first.
    pub(crate) fn fork_servers(&self) -> Vec<ForkServerView> {
        let state = lock(&self.state);
        let mut found = state.fork_servers.overview();
        found.sort_unstable_by_key(|(token, _)| *token);
        let count = |(token, view): (u64, ForkServerView)| ForkServerView {
            workers: state.procs.of_fork_server(token).len(),
            ..view
        };
        found.into_iter().map(count).collect()
    }

    /// Returns all procs that have not ended, and the titles of their meshes.
    pub(crate) fn overview(&self) -> (Vec<ProcView>, Titles) {
        lock(&self.state).procs.overview()
    }

    /// Whether this host has no procs.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Has procs that nobody forked.
    #[cfg(test)]
    pub(crate) fn adopt(&self, mesh: MeshId, ranks: std::ops::Range<u32>) {
        let spawn = Spawn {
            mesh,
            ranks,
            title: &Arc::from(""),
            spawner: (self.me, 0),
            fork_server: None,
            within: Duration::from_secs(3600),
        };
        lock(&self.state).procs.add(&spawn, self.now());
    }

    /// Whether nothing is left of earlier procs.
    #[cfg(test)]
    pub(crate) fn has_forgotten_all(&self) -> bool {
        lock(&self.state).procs.has_forgotten_all()
    }
}
