//! The switch: where a frame goes from here, over a link, to another host, or to a part of this process.
//!
//! It knows routes and links, and nothing of the contents of frames. The parts around it are [`Parts`]; frames of this
//! process and arriving frames pass through it in the same way.

use super::bundles::{Bundles, Shares};
use super::direct_links::DirectLinks;
use crate::call::Outcome;
use crate::link::{Hold, Link};
use crate::locks::{read, write};
use crate::reactor::Reactor;
use mesh_proto::hosts::HostSet;
use mesh_proto::{Ended, Frame, Header, Kind, LinkId, MeshId, Placement, ProcAddr, Route, Router, Target};
use mesh_topology::Region;
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

/// How many receivers a cast to a mesh unknown here may name; each is answered for.
const MOST_UNKNOWN: usize = 1 << 20;

/// The source of frames from other hosts.
pub(crate) const GATEWAY: LinkId = LinkId::MAX;

/// Where the switch hands frames.
pub(crate) trait Parts {
    /// Whether the job has other hosts.
    fn is_abroad(&self) -> bool;
    /// Whether a message may come before the spawn of its receiver.
    fn expects_early(&self) -> bool;
    /// Sees a passing frame for a process of this host; `came` means that it is not from this process. Called before
    /// the route is looked up: a death in between is then reported one way or the other.
    fn overhear(&self, frame: &Frame, came: bool);
    /// Takes a frame for this process.
    fn deliver(&self, frame: Frame);
    /// Sends a frame to other hosts. Returns how many bytes wait behind it.
    fn send_remote(&self, frame: &Frame, hosts: HostSet) -> usize;
    /// Whether a frame of a process of this host goes to a script that is to see first what the process has printed.
    fn has_output(&self, frame: &Frame) -> bool;
    /// Whether a frame for another host is answered here, on its behalf.
    fn answers_for(&self, frame: &Frame) -> bool;
    /// Keeps a frame for a mesh that is not known here, but may become so.
    fn await_procs(&self, frame: Frame, from: Option<LinkId>);
    /// Refuses a frame for a process that never existed.
    fn refuse_unknown(&self, frame: &Frame);
    /// Handles a frame that cannot reach its receiver.
    fn bounce(&self, frame: &Frame, outcome: Outcome);
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Switch {
    me: ProcAddr,
    reactor: Arc<Reactor>,
    router: RwLock<Router>,
    links: RwLock<FxHashMap<LinkId, Arc<Link>>>,
    /// At a proc: its links to others.
    pub(super) direct: DirectLinks,
    /// At an agent: what its own process sends in a rush.
    pub(super) bundles: Bundles,
    /// At an agent: there have been links between its procs.
    joins: AtomicBool,
}

impl Switch {
    #[cfg(test)]
    pub(crate) fn new(me: ProcAddr, reactor: &Arc<Reactor>, router: Router) -> Self {
        Self::with_direct_links(me, reactor, router, 0)
    }

    /// One that may have so many direct links, if it is a proc's.
    pub(super) fn with_direct_links(me: ProcAddr, reactor: &Arc<Reactor>, router: Router, most: usize) -> Self {
        Self {
            me,
            reactor: Arc::clone(reactor),
            router: RwLock::new(router),
            links: RwLock::default(),
            direct: DirectLinks::new(me, reactor, most),
            bundles: Bundles::new(reactor),
            joins: AtomicBool::new(false),
        }
    }

    /// At an agent: procs get a link to each other.
    pub(super) fn expect_links(&self) {
        self.joins.store(true, Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn bundles_turn(&self) -> Option<std::time::Instant> {
        self.bundles.turn()
    }

    // Routes and links.

    /// The route to a process.
    pub(crate) fn route(&self, addr: ProcAddr) -> Route {
        // The lock is released at once: two locks are taken in one order only, and a caller's next would be another.
        read(&self.router).route(addr)
    }

    /// The ranks of a mesh that are, or were, on this host; none for a mesh that is not known here.
    pub(crate) fn local(&self, mesh: MeshId) -> Option<Range<u32>> {
        read(&self.router).local(mesh)
    }

    /// Makes these links the ranks of a mesh from `base` on.
    pub(crate) fn add(&self, mesh: MeshId, base: u32, fresh: &[Arc<Link>]) {
        write(&self.links).extend(fresh.iter().map(|link| (link.id, Arc::clone(link))));
        write(&self.router).add_mesh(mesh, base, fresh.iter().map(|link| link.id));
    }

    /// Adds a link that the router already knows.
    pub(crate) fn add_link(&self, link: &Arc<Link>) {
        write(&self.links).insert(link.id, Arc::clone(link));
    }

    /// A process has ended: whatever is sent to it from now on comes back.
    pub(crate) fn close_route(&self, addr: ProcAddr, ended: &Arc<Ended>) -> Option<Arc<Link>> {
        let id = write(&self.router).close(addr, ended)?;
        write(&self.links).remove(&id)
    }

    pub(crate) fn link(&self, id: LinkId) -> Option<Arc<Link>> {
        read(&self.links).get(&id).cloned()
    }

    /// The link by which what is sent to a process leaves this one.
    pub(crate) fn link_of(&self, addr: ProcAddr) -> Option<Arc<Link>> {
        let direct = self.direct.link_to(addr);
        if direct.is_some() {
            return direct;
        }
        match self.route(addr) {
            Route::Via(id) => self.link(id),
            _ => None,
        }
    }

    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        read(&self.links).values().cloned().chain(self.direct.all()).collect()
    }

    pub(super) fn len(&self) -> usize {
        read(&self.links).len() + self.direct.len()
    }

    pub(super) fn close(&self) {
        let links: Vec<Arc<Link>> = write(&self.links).drain().map(|(_, link)| link).collect();
        for link in links {
            link.close(&self.reactor);
        }
        self.direct.close();
    }

    // Frames.

    /// Takes a frame one step on its way. Returns how many bytes wait behind it.
    pub(crate) fn dispatch(&self, parts: &impl Parts, frame: Frame, from: Option<LinkId>) -> usize {
        let header = frame.header;
        self.in_order(&header, from, |rests| self.dispatch_now(parts, frame, from, rests))
    }

    /// At an agent: sends a message of this process to ranks of a mesh that are all on this host. Nobody on the way needs
    /// the region, so the frame does not have it. Returns how many bytes wait behind it.
    pub(super) fn cast_here(
        &self,
        parts: &impl Parts,
        frame: &Frame,
        mesh: MeshId,
        (region, placement): (&Region, &Placement),
    ) -> usize {
        let each = |act: &mut dyn FnMut(u32, ProcAddr)| {
            (0..=u32::MAX).zip(region).for_each(|(nth, rank)| act(nth, placement.addr(mesh, rank)));
        };
        self.in_order(&frame.header, None, |rests| {
            self.spread(None, rests, each, |nth, to, rests| {
                self.dispatch_one(parts, frame.for_one(to, nth), None, rests)
            })
        })
    }

    /// Sends a frame by `send`, behind what rests (BND-1). If it may rest itself, that puts down what goes by which link instead.
    /// Returns how many bytes wait behind it.
    fn in_order(
        &self,
        header: &Header,
        from: Option<LinkId>,
        send: impl FnOnce(Option<&mut Shares>) -> usize,
    ) -> usize {
        if !self.me.is_agent() || from.is_some() || header.kind != Kind::Tell {
            self.bundles.settle();
            return send(None);
        }
        let queued = match self.bundles.begin() {
            None => send(None),
            Some(sent) => {
                let mut shares = Shares::new();
                let queued = send(Some(&mut shares));
                queued.max(self.bundles.leave(&shares, sent))
            }
        };
        self.bundles.end();
        queued
    }

    /// Sends a cast by `send` to each of these procs of this host. Nobody sees an effect of it before it: it is on its way to
    /// all before any of them has it. What the procs here send is read by the thread that reads their links, which may be doing
    /// so while another one makes a cast, and what they send each other by direct links is read by none here. Returns how many
    /// bytes wait behind it.
    fn spread(
        &self,
        from: Option<LinkId>,
        mut rests: Option<&mut Shares>,
        each: impl Fn(&mut dyn FnMut(u32, ProcAddr)),
        mut send: impl FnMut(u32, ProcAddr, Option<&mut Shares>) -> usize,
    ) -> usize {
        let mut holds = Vec::new();
        let is_own = from.is_none();
        if rests.is_none() && (is_own || self.joins.load(Ordering::SeqCst)) {
            let held = |to| self.link_of(to).filter(|link| is_own || link.has_page());
            each(&mut |_, to| holds.extend(held(to).map(|link| link.hold(&self.reactor))));
        }
        let mut most = 0;
        each(&mut |nth, to| most = most.max(send(nth, to, rests.as_deref_mut())));
        if !holds.is_empty() {
            drop(holds);
            most = 0;
            each(&mut |_, to| most = most.max(self.link_of(to).map_or(0, |link| link.queued())));
        }
        most
    }

    /// `rests`: see [`Self::in_order`].
    fn dispatch_now(
        &self,
        parts: &impl Parts,
        frame: Frame,
        from: Option<LinkId>,
        rests: Option<&mut Shares>,
    ) -> usize {
        if frame.header.target_len == 0 {
            return self.dispatch_one(parts, frame, from, rests);
        }
        let up = read(&self.router).up();
        if let Some(up) = up {
            return self.cast_up(parts, &frame, up);
        }
        let Ok(target) = frame.target() else { return 0 };
        let Target::Many(mesh, region, placement) = &target else { return 0 };
        let here = self.me.host;
        // A proc takes its own share of its casts itself.
        let taken = from.filter(|link| *link != GATEWAY).map(|_| frame.header.src);
        let mut remote = 0;
        if from != Some(GATEWAY) && placement.only() != Some(here) {
            let mut hosts = placement.hosts_of(region);
            hosts.remove(here);
            remote = parts.send_remote(&frame, hosts);
        }
        let on = placement.ranks_on(here, region.len());
        let is_all_here = placement.only() == Some(here);
        if is_all_here && region.len() > self.local(*mesh).map_or(MOST_UNKNOWN, |ranks| ranks.len()) {
            // No region of that mesh: no regular sender made this cast, and it must not cause a long count.
            return 0;
        }
        let each_here = |act: &mut dyn FnMut(u32, ProcAddr)| {
            let mut act = |nth, to| {
                if Some(to) != taken {
                    act(nth, to);
                }
            };
            if is_all_here {
                (0..=u32::MAX).zip(region).for_each(|(nth, rank)| act(nth, placement.addr(*mesh, rank)));
            } else if on.len() <= MOST_UNKNOWN {
                let places = on.clone().filter_map(|rank| Some((region.position(rank)?, placement.addr(*mesh, rank))));
                places.for_each(|(nth, to)| act(u32::try_from(nth).unwrap_or(u32::MAX), to));
            }
        };
        remote.max(self.spread(from, rests, each_here, |nth, to, rests| {
            self.dispatch_one(parts, frame.for_one(to, nth), from, rests)
        }))
    }

    /// A proc's cast goes to its agent as a whole, if not by direct links. The proc's own share, if it has one, is delivered
    /// at once, like single messages to its own actors, which would otherwise overtake it on the way up and back (ORD-1).
    fn cast_up(&self, parts: &impl Parts, frame: &Frame, up: LinkId) -> usize {
        let Some(link) = self.link(up) else { return 0 };
        let is_near = frame.header.dst.mesh == self.me.mesh || self.direct.may_reach(frame);
        let Some(target) = Some(frame).filter(|_| is_near).and_then(|frame| frame.target().ok()) else {
            return link.send(&self.reactor, frame).unwrap_or(0);
        };
        let index = target.index_of(self.me);
        let share = index.map(|index| frame.for_one(self.me, u32::try_from(index).unwrap_or(u32::MAX)));
        if let Some(share) = share.clone().filter(|_| target.len() == 1) {
            parts.deliver(share);
            return 0;
        }
        // Nobody sees an effect of one part before the others are on their way: what the receiver here sends is behind the
        // rest of the cast, which is written only after the receiver here has its share.
        let holds = self.direct.cast(&link, frame, &target).unwrap_or_else(|| {
            let hold = share.is_some().then(|| link.hold(&self.reactor));
            link.send(&self.reactor, frame);
            Vec::from_iter(hold)
        });
        if let Some(share) = share {
            parts.deliver(share);
        }
        if holds.is_empty() { link.queued() } else { holds.into_iter().map(Hold::release).max().unwrap_or(0) }
    }

    /// `rests`: see [`Self::in_order`].
    fn dispatch_one(
        &self,
        parts: &impl Parts,
        mut frame: Frame,
        from: Option<LinkId>,
        rests: Option<&mut Shares>,
    ) -> usize {
        if parts.is_abroad() {
            frame.header.set_abroad();
        }
        let to = frame.header.dst;
        if self.me.is_agent() && to.host == self.me.host {
            parts.overhear(&frame, from.is_some());
        }
        match self.route(to) {
            Route::Via(id) => {
                if (to.is_guest() || frame.header.kind == Kind::Partial) && parts.has_output(&frame) {
                    frame.header.set_printed();
                }
                let Some(link) = self.link(id) else { return 0 };
                match rests {
                    Some(shares) => {
                        shares.push((link, frame));
                        0
                    }
                    None => self.direct.send(&link, &frame),
                }
            }
            Route::Remote(_) if from == Some(GATEWAY) => 0, // Not for here, and nobody relays at this level.
            Route::Remote(_) if parts.answers_for(&frame) => 0,
            Route::Remote(host) => {
                if parts.has_output(&frame) {
                    frame.header.set_printed();
                }
                parts.send_remote(&frame, HostSet::one(host))
            }
            Route::Here => {
                parts.deliver(frame);
                0
            }
            Route::Gone(ended) => {
                parts.bounce(&frame, Outcome::Lost(ended));
                0
            }
            Route::Unknown if parts.expects_early() && self.local(to.mesh).is_none() => {
                parts.await_procs(frame, from);
                0
            }
            Route::Unknown => {
                parts.refuse_unknown(&frame);
                0
            }
        }
    }
}
