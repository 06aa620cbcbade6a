//! The direct links of a proc, and the messages that go by them. [`mesh_proto::DirectPlan`] decides when there is one, and
//! what goes by it.
//!
//! The lock is held for reading while a message is sent, whichever way it goes, and for writing while a way begins or
//! ends: so nothing is sent by the old way once the new one is open (DIR-1). It comes before the locks of links.

use crate::link::{Hold, Link};
use crate::locks::{read, write};
use crate::reactor::Reactor;
use mesh_proto::control::{Direct, heard_of, may_go_direct};
use mesh_proto::{DirectPlan, Frame, Header, Heard, LinkId, ProcAddr, Reason, Target};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Instant;

/// A cast to so many procs or fewer counts as a message to each of them.
const FEW: usize = 16;

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

    /// Whether a message has two ways to go, one of them only possibly.
    fn is_for_neighbor(&self, header: &Header) -> bool {
        let to = header.dst;
        self.wanted && to.host == self.me.host && !to.is_agent() && !to.is_guest() && may_go_direct(header.kind)
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
        if !self.is_for_neighbor(&frame.header) {
            return up.send(&self.reactor, frame).unwrap_or(0);
        }
        let to = frame.header.dst;
        let state = read(&self.state);
        if let Some(link) = state.plan.way(to).and_then(|id| state.links.get(&id)) {
            if let Some(heard) = heard_of(frame, self.me.host) {
                up.send(&self.reactor, &Direct::Passed(Vec::new(), heard).frame(self.me, self.agent()));
            }
            if let Some(queued) = self.send_by(link, frame.clone()) {
                let link = (queued == 0 && !link.reads()).then(|| link.id);
                drop(state);
                link.into_iter().for_each(|id| self.stop_ending(id));
                return queued;
            }
        }
        let queued = up.send(&self.reactor, frame).unwrap_or(0);
        drop(state);
        self.note_routed(up, [to]);
        queued
    }

    fn send_by(&self, link: &Link, mut frame: Frame) -> Option<usize> {
        // As between hosts, it may come before the spawn of what it is for.
        frame.header.set_abroad();
        link.send(&self.reactor, &frame)
    }

    /// Whether a cast to ranks of a mesh may go by direct links in part.
    pub(super) fn may_reach(&self, frame: &Frame) -> bool {
        self.wanted && may_go_direct(frame.header.kind)
    }

    /// Sends a cast of this proc to all but itself. The direct links that it goes by are held, if somebody wants the holds.
    /// Returns how many bytes wait behind it.
    pub(super) fn cast(&self, up: &Link, frame: &Frame, target: &Target, holds: Option<&mut Vec<Hold>>) -> usize {
        let state = read(&self.state);
        let mut reached: Vec<u32> = state.shares(target).map(|(peer, ..)| peer.rank).collect();
        reached.sort_unstable();
        if let Some(holds) = holds {
            holds.extend(state.shares(target).map(|(.., link)| link.hold(&self.reactor)));
        }
        let others = target.len() - reached.len() - usize::from(target.index_of(self.me).is_some());
        let routed = if others > 0 && target.len() <= FEW { target.procs().collect() } else { Vec::new() };
        let rest = if others > 0 { Some(frame.clone()) } else { heard_of(frame, self.me.host) };
        let mut most = 0;
        if reached.is_empty() {
            most = up.send(&self.reactor, frame).unwrap_or(0);
        } else if let Some(rest) = rest {
            // First: whatever is made by the message, its owner must be known if this process dies now.
            let passed = Direct::Passed(reached, rest).frame(self.me, self.agent());
            most = up.send(&self.reactor, &passed).unwrap_or(0);
        }
        for (peer, index, link) in state.shares(target) {
            let share = frame.for_one(peer, u32::try_from(index).unwrap_or(u32::MAX));
            // A link is closed only if its other end has died, of which this process is told.
            most = most.max(self.send_by(link, share).unwrap_or(0));
        }
        drop(state);
        self.note_routed(up, routed);
        most
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

    /// The other end is ready: from now on messages go by the link, behind a word of that by way of the agent.
    pub(super) fn begin(&self, up: &Link, id: LinkId, peer: ProcAddr) {
        self.change(|state| {
            if state.plan.ready(id, peer) {
                up.send(&self.reactor, &Direct::Begun(id).frame(self.me, peer));
            }
        });
    }

    /// The other end has begun: it is read from now on.
    pub(super) fn begun(&self, id: LinkId, peer: ProcAddr) {
        self.change(|state| {
            if state.plan.begun(id, peer)
                && let Some(link) = state.links.get(&id)
            {
                link.start_reading(&self.reactor);
            }
        });
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
