//! The direct links of a proc, and the messages that go by them. [`mesh_proto::DirectPlan`] decides when there is one, and
//! what goes by it.
//!
//! The lock is held for reading while a message is sent by a direct link, and for writing while a way begins or ends: so
//! nothing is sent by a way that has ended. It comes before the locks of links.

use crate::link::{Hold, Link};
use crate::locks::{lock, read, write};
use crate::reactor::Reactor;
use crate::wait::Leading as _;
use mesh_proto::control::{Direct, may_go_direct};
use mesh_proto::{DirectPlan, Frame, Heard, LinkId, ProcAddr, Reason, Target};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

/// A cast to so many procs or fewer counts as a message to each of them.
const FEW: usize = 16;
/// How long a sender with a link waits until the agent has handed on what it sent there: often it has, and only was interrupted
/// before it could say so.
const CATCH_UP: Duration = Duration::from_micros(100);
/// If that was in vain, so many messages go by way of the agent before the sender waits again.
const BY_AGENT: u32 = 64;
/// What has come waits for an older message that is on its way for so many turns of the I/O thread, a second in all. By then
/// its sender stands still: it is suspended, or has died while a copy of it keeps its socket. There are no turns while this
/// process stands still itself, so what suspends all processes of a job makes none of them late.
const LATE: u32 = 10;
/// The time between two such turns.
const TURN: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct State {
    plan: DirectPlan,
    links: HashMap<LinkId, Arc<Link>>,
    /// How often either has changed.
    changes: u64,
}

/// The direct links of a proc. See the module.
#[derive(Debug)]
pub(crate) struct DirectLinks {
    me: ProcAddr,
    reactor: Arc<Reactor>,
    started: Instant,
    /// Whether there may be any.
    wanted: bool,
    /// How many there are. Usually none, and then the lock need not be taken to read.
    count: AtomicUsize,
    state: RwLock<State>,
    /// So many messages go by way of the agent, before a sender waits for it again.
    by_agent: AtomicU32,
    blocked: Mutex<Option<Blocked>>,
    /// The sockets are to be read without a word of a poll.
    is_due: AtomicBool,
}

/// Something that has come waits for something older.
#[derive(Debug)]
struct Blocked {
    /// What it waits for.
    still: Vec<Still>,
    /// So many turns has the I/O thread had meanwhile.
    turns: u32,
    /// When the next one is due.
    next: Instant,
}

/// A link whose other end stands still.
#[derive(Debug)]
struct Still {
    link: LinkId,
    /// So many bytes had come by it.
    total: u64,
    /// The number of turns at which that was first so.
    since: u32,
}

impl Blocked {
    fn is_late(&self, link: LinkId) -> bool {
        self.still.iter().any(|one| one.link == link && self.turns - one.since >= LATE)
    }
}

impl DirectLinks {
    pub(super) fn new(me: ProcAddr, reactor: &Arc<Reactor>, most: usize) -> Self {
        let most = if me.is_agent() || me.is_guest() { 0 } else { most };
        let state = State { plan: DirectPlan::new(most), links: HashMap::new(), changes: 0 };
        Self {
            me,
            reactor: Arc::clone(reactor),
            started: Instant::now(),
            wanted: most > 0,
            count: AtomicUsize::new(0),
            state: RwLock::new(state),
            by_agent: AtomicU32::new(0),
            blocked: Mutex::default(),
            is_due: AtomicBool::new(false),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = write(&self.state);
        let result = change(&mut state);
        state.changes += 1;
        self.count.store(state.links.len(), Ordering::SeqCst);
        result
    }

    /// The agent of this host.
    fn agent(&self) -> ProcAddr {
        ProcAddr::agent(self.me.host)
    }

    // Messages out.

    /// Whether a message to this process has two ways to go, one of them only possibly.
    fn is_for_neighbor(&self, to: ProcAddr, frame: &Frame) -> bool {
        let is_near = to.host == self.me.host && !to.is_agent() && !to.is_guest();
        self.wanted && is_near && may_go_direct(frame, self.me.host)
    }

    /// Whether the agent has handed on all that this process has sent there: what goes by a link now overtakes nothing.
    fn is_clear(&self, up: &Link) -> bool {
        if up.is_handed_on() {
            return true;
        }
        let fewer = |left: u32| left.checked_sub(1);
        if self.by_agent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).is_ok() {
            return false;
        }
        let end = Instant::now() + CATCH_UP;
        while Instant::now() < end {
            std::thread::yield_now();
            if up.is_handed_on() {
                return true;
            }
        }
        self.by_agent.store(BY_AGENT, Ordering::Relaxed);
        false
    }

    /// The link by which messages to a process go, if it is a direct one.
    pub(super) fn link_to(&self, to: ProcAddr) -> Option<Arc<Link>> {
        if self.is_empty() {
            return None;
        }
        let state = read(&self.state);
        state.links.get(&state.plan.way(to)?).cloned()
    }

    /// Sends a message to another process, by the link to the agent if not by a direct one. Returns how many bytes wait
    /// behind it.
    pub(super) fn send(&self, up: &Link, frame: &Frame) -> usize {
        let to = frame.header.dst;
        if !self.is_for_neighbor(to, frame) {
            return up.send(&self.reactor, frame).unwrap_or(0);
        }
        if let Some(queued) = self.send_past(up, to, frame) {
            return queued;
        }
        let queued = up.send(&self.reactor, frame).unwrap_or(0);
        self.note_routed(up, [to]);
        queued
    }

    /// Sends a message by a direct link, if there is one and it overtakes nothing there.
    fn send_past(&self, up: &Link, to: ProcAddr, frame: &Frame) -> Option<usize> {
        if self.is_empty() {
            return None;
        }
        let state = read(&self.state);
        let link = state.links.get(&state.plan.way(to)?).filter(|_| self.is_clear(up))?;
        let queued = link.send(&self.reactor, frame)?;
        let ending = (queued == 0 && !link.reads()).then_some(link.id);
        drop(state);
        ending.into_iter().for_each(|id| self.stop_ending(id));
        Some(queued)
    }

    /// Whether a cast may go by direct links, if they lead to all its receivers.
    pub(super) fn may_reach(&self, frame: &Frame) -> bool {
        self.wanted && may_go_direct(frame, self.me.host)
    }

    /// Sends a cast of this process to all others, if links lead to all of these and it overtakes nothing there. What it goes by
    /// is held until the holds are released: nobody sees an effect of it before it is on its way to all.
    pub(super) fn cast(&self, up: &Link, frame: &Frame, target: &Target) -> Option<Vec<Hold>> {
        if !self.may_reach(frame) {
            return None;
        }
        let sent = if self.is_empty() { None } else { self.cast_past(up, frame, target) };
        if sent.is_none() && target.len() <= FEW {
            self.note_routed(up, target.procs());
        }
        sent
    }

    fn cast_past(&self, up: &Link, frame: &Frame, target: &Target) -> Option<Vec<Hold>> {
        let others = target.len() - usize::from(target.index_of(self.me).is_some());
        let state = read(&self.state);
        let shares: Vec<_> = state.shares(target).collect();
        if shares.len() < others || !self.is_clear(up) {
            return None;
        }
        let holds = shares.iter().map(|(.., link)| link.hold(&self.reactor)).collect();
        for (peer, index, link) in shares {
            // A link is closed only if its other end has died, of which this process is told.
            let _ = link.send(&self.reactor, &frame.for_one(peer, u32::try_from(index).unwrap_or(u32::MAX)));
        }
        Some(holds)
    }

    /// Counts messages that went by way of the agent, and asks for links.
    fn note_routed(&self, up: &Link, to: impl IntoIterator<Item = ProcAddr>) {
        for peer in to.into_iter().filter(|peer| peer.host == self.me.host && *peer != self.me) {
            let reason = write(&self.state).plan.routed(peer, self.started.elapsed());
            match reason {
                Reason::None => {}
                Reason::Ask => {
                    up.send(&self.reactor, &Direct::Ask(peer).frame(self.me, self.agent()));
                }
                Reason::MakeRoom(id) => self.stop(id),
            }
        }
    }

    // Ways that begin and end.

    /// A link was offered. False if it is refused.
    pub(super) fn offered(&self, link: &Arc<Link>) -> bool {
        self.change(|state| {
            let taken = state.plan.offered(link.id, link.peer);
            if taken {
                state.links.insert(link.id, Arc::clone(link));
            }
            taken
        })
    }

    /// The other end is ready: from now on messages go by the link.
    pub(super) fn ready(&self, id: LinkId, peer: ProcAddr) {
        self.change(|state| state.plan.ready(id, peer));
    }

    /// The other end is not ready, and will not be.
    pub(super) fn refused(&self, id: LinkId, peer: ProcAddr) {
        self.end(|state| if state.plan.refused(id, peer) { vec![id] } else { Vec::new() });
    }

    /// Stops sending by a link, if nothing waits there.
    fn stop(&self, id: LinkId) {
        self.end(|state| {
            let Some(link) = state.links.get(&id).filter(|link| link.queued() == 0) else { return Vec::new() };
            link.hang_up();
            if state.plan.stopped(id) { vec![id] } else { Vec::new() }
        });
    }

    /// Stops sending by a link whose other end has stopped, if nothing waits there any more.
    pub(super) fn stop_ending(&self, id: LinkId) {
        if read(&self.state).plan.is_ending(id) {
            self.stop(id);
        }
    }

    /// The other end sends nothing more.
    pub(super) fn heard_end(&self, id: LinkId) {
        let mut stops = false;
        self.end(|state| match state.plan.heard_end(id) {
            Heard::Stop => {
                stops = true;
                Vec::new()
            }
            Heard::Over => vec![id],
        });
        if stops {
            self.stop(id);
        }
    }

    /// A process has ended, and what it sent was read.
    pub(super) fn lose(&self, peer: ProcAddr) {
        if !self.is_empty() {
            self.end(|state| state.plan.lost(peer));
        }
    }

    /// Drops the links that are over after a change.
    fn end(&self, change: impl FnOnce(&mut State) -> Vec<LinkId>) {
        let over = self.change(|state| {
            let ids = change(state);
            ids.into_iter().filter_map(|id| state.links.remove(&id)).collect::<Vec<_>>()
        });
        over.iter().for_each(|link| link.close(&self.reactor));
    }

    /// The process ends.
    pub(super) fn close(&self) {
        self.all().iter().for_each(|link| link.close(&self.reactor));
        self.change(|state| state.links.clear());
    }

    pub(super) fn link(&self, id: LinkId) -> Option<Arc<Link>> {
        if self.is_empty() {
            return None;
        }
        read(&self.state).links.get(&id).cloned()
    }

    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// The links that are read, and a number that changes when these do.
    pub(super) fn read_links(&self) -> (Vec<Arc<Link>>, u64) {
        let state = read(&self.state);
        (state.links.values().filter(|link| link.reads()).cloned().collect(), state.changes)
    }

    /// See [`Self::read_links`].
    pub(super) fn changes(&self) -> u64 {
        read(&self.state).changes
    }

    // What has come and waits.

    /// What has come waits for something older, which is on its way by one of these. Returns those for which it has waited too
    /// long.
    pub(super) fn wait_for<'a>(&self, links: &'a [Arc<Link>]) -> Vec<&'a Link> {
        let behind: Vec<(&Link, u64)> = links.iter().filter_map(|link| Some((&**link, link.behind()?))).collect();
        let mut state = lock(&self.blocked);
        let is_new = state.is_none();
        let blocked = state.get_or_insert_with(|| Blocked { still: Vec::new(), turns: 0, next: Instant::now() + TURN });
        blocked.still.retain(|one| behind.iter().any(|(link, total)| (link.id, *total) == (one.link, one.total)));
        for (link, total) in &behind {
            if blocked.still.iter().all(|one| one.link != link.id) {
                blocked.still.push(Still { link: link.id, total: *total, since: blocked.turns });
            }
        }
        let late = behind.iter().map(|(link, _)| *link).filter(|link| blocked.is_late(link.id)).collect();
        drop(state);
        if is_new {
            self.reactor.ring_io();
        }
        late
    }

    /// Nothing that has come waits any more.
    pub(super) fn waits_for_none(&self) {
        *lock(&self.blocked) = None;
    }

    /// Has the sockets read again, after others had their turn.
    pub(super) fn read_again(&self) {
        self.is_due.store(true, Ordering::SeqCst);
        self.reactor.wake_leader();
    }

    /// Whether the sockets are to be read, though no poll has said so.
    pub(super) fn take_due(&self) -> bool {
        self.is_due.load(Ordering::Relaxed) && self.is_due.swap(false, Ordering::SeqCst)
    }

    /// The I/O thread's turn: whoever reads looks again when something has waited for too long. Returns when that is.
    pub(super) fn turn(&self) -> Option<Instant> {
        let mut blocked = lock(&self.blocked);
        let waits = blocked.as_mut()?;
        let now = Instant::now();
        if waits.next > now {
            return Some(waits.next);
        }
        waits.turns = waits.turns.saturating_add(1);
        waits.next = now + TURN;
        let (next, is_due) = (waits.next, waits.still.iter().any(|one| waits.is_late(one.link)));
        drop(blocked);
        if is_due {
            self.read_again();
        }
        Some(next)
    }

    pub(super) fn all(&self) -> Vec<Arc<Link>> {
        read(&self.state).links.values().cloned().collect()
    }
}

impl State {
    /// The receivers of a cast that direct links lead to, and the places of these in it.
    fn shares<'a>(&'a self, target: &'a Target) -> impl Iterator<Item = (ProcAddr, usize, &'a Arc<Link>)> {
        let ways = if self.links.is_empty() { None } else { Some(self.plan.ways()) };
        ways.into_iter().flatten().filter_map(move |(peer, _)| {
            let Target::Many(mesh, _, placement) = target else { return None };
            if peer.mesh != *mesh || placement.addr(*mesh, peer.rank as usize) != peer {
                return None;
            }
            Some((peer, target.index_of(peer)?, self.links.get(&self.plan.way(peer)?)?))
        })
    }
}
