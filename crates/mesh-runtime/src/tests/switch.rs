//! The switch alone: where frames go, with parts that only record what they get.

use crate::call::Outcome;
use crate::link::Link;
use crate::reactor::Reactor;
use crate::runtime::{GATEWAY, Parts, Switch};
use mesh_proto::hosts::HostSet;
use mesh_proto::messages::{Call, Tell};
use mesh_proto::{Decoder, EndReason, Ended, Frame, Kind, LinkId, Placement, ProcAddr, Router, Target};
use mesh_topology::{Extent, Region};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MESH: u64 = 7;
const AGENT: ProcAddr = ProcAddr::CONTROLLER;

#[derive(Debug, PartialEq)]
enum Handed {
    Overheard(bool),
    Delivered(ProcAddr),
    Remote(HostSet),
    Awaited(Option<LinkId>),
    Unknown,
    Bounced,
}

/// Records what it gets.
#[derive(Default)]
struct Scribe {
    abroad: bool,
    answers: bool,
    handed: RefCell<Vec<Handed>>,
}

impl Scribe {
    fn note(&self, handed: Handed) {
        self.handed.borrow_mut().push(handed);
    }

    fn said(&self) -> Vec<Handed> {
        self.handed.take()
    }
}

impl Parts for Scribe {
    fn is_abroad(&self) -> bool {
        self.abroad
    }
    fn expects_early(&self) -> bool {
        self.abroad
    }
    fn overhear(&self, _: &Frame, came: bool) {
        self.note(Handed::Overheard(came));
    }
    fn deliver(&self, frame: Frame) {
        self.note(Handed::Delivered(frame.header.dst));
    }
    fn send_remote(&self, _: &Frame, hosts: HostSet) -> usize {
        self.note(Handed::Remote(hosts));
        5
    }
    fn has_output(&self, _: &Frame) -> bool {
        false
    }

    fn answers_for(&self, _: &Frame) -> bool {
        self.answers
    }
    fn await_procs(&self, _: Frame, from: Option<LinkId>) {
        self.note(Handed::Awaited(from));
    }
    fn refuse_unknown(&self, _: &Frame) {
        self.note(Handed::Unknown);
    }
    fn bounce(&self, _: &Frame, _: Outcome) {
        self.note(Handed::Bounced);
    }
}

fn proc(rank: u32) -> ProcAddr {
    ProcAddr { mesh: MESH, rank, host: 0 }
}

fn to(target: &Target) -> Frame {
    let dst = target.place(0).unwrap();
    let header = Call { actor: 3, call: 5, place: 0, stream: false, task: None }.header(AGENT, dst);
    Frame::build(header, matches!(target, Target::Many(..)).then_some(target), b"f", &[])
}

fn one(dst: ProcAddr) -> Frame {
    to(&Target::One(dst))
}

fn whole(ranks: usize, placement: Placement) -> Target {
    Target::Many(MESH, Region::whole(&Extent::new([("procs", ranks)]).unwrap()), placement)
}

fn switch(me: ProcAddr, router: Router) -> (Switch, Arc<Reactor>) {
    let reactor = Arc::new(Reactor::new().unwrap());
    (Switch::new(me, &reactor, router), reactor)
}

fn link(id: LinkId, peer: ProcAddr) -> (Arc<Link>, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    (Arc::new(Link::new(id, peer, ours)), theirs)
}

/// The receivers of the frames that came over a link, of which nothing was read before.
fn came(theirs: &OwnedFd) -> Vec<ProcAddr> {
    let mut decoder = Decoder::default();
    more_came(theirs, &mut decoder).map(|frame| frame.header.dst).collect()
}

fn more_came<'a>(theirs: &OwnedFd, decoder: &'a mut Decoder) -> impl Iterator<Item = Frame> + 'a {
    while let n @ 1.. = rustix::io::read(theirs, decoder.room()).unwrap_or(0) {
        decoder.filled(n);
    }
    std::iter::from_fn(|| decoder.next_frame().unwrap())
}

#[test]
fn what_is_for_this_process_is_delivered_and_what_passes_is_overheard() {
    let (switch, _reactor) = switch(AGENT, Router::agent(AGENT));
    let scribe = Scribe::default();
    assert_eq!(switch.dispatch(&scribe, one(AGENT), None), 0);
    assert_eq!(scribe.said(), [Handed::Overheard(false), Handed::Delivered(AGENT)]);
    let (near, theirs) = link(1, proc(0));
    switch.add(MESH, 0, &[near]);
    switch.dispatch(&scribe, one(proc(0)), Some(9));
    assert_eq!((scribe.said(), came(&theirs)), (vec![Handed::Overheard(true)], vec![proc(0)]));
}

#[test]
fn what_is_for_nobody_waits_only_where_a_spawn_may_be_under_way() {
    let (switch, _reactor) = switch(AGENT, Router::agent(AGENT));
    let mut scribe = Scribe::default();
    switch.dispatch(&scribe, one(proc(0)), Some(9));
    assert_eq!(scribe.said().pop(), Some(Handed::Unknown));
    scribe.abroad = true;
    switch.dispatch(&scribe, one(proc(0)), Some(9));
    assert_eq!(scribe.said().pop(), Some(Handed::Awaited(Some(9))));
    // A known mesh without such a rank will not get one.
    switch.add(MESH, 0, &[link(1, proc(0)).0]);
    switch.dispatch(&scribe, one(proc(4)), Some(9));
    assert_eq!(scribe.said().pop(), Some(Handed::Unknown));
}

#[test]
fn what_is_for_the_dead_comes_back() {
    let (switch, _reactor) = switch(AGENT, Router::agent(AGENT));
    let scribe = Scribe::default();
    switch.add(MESH, 0, &[link(1, proc(0)).0]);
    let ended = Arc::new(Ended::unmade(EndReason::LongAgo));
    assert!(switch.close_route(proc(0), &ended).is_some());
    assert!(switch.close_route(proc(0), &ended).is_none(), "its route is closed once");
    switch.dispatch(&scribe, one(proc(0)), None);
    assert_eq!(scribe.said().pop(), Some(Handed::Bounced));
}

#[test]
fn what_came_from_other_hosts_goes_to_none() {
    let (switch, _reactor) = switch(AGENT, Router::agent(AGENT));
    let mut scribe = Scribe { abroad: true, ..Scribe::default() };
    let there = ProcAddr { host: 3, ..proc(0) };
    assert_eq!(switch.dispatch(&scribe, one(there), None), 5);
    assert_eq!(scribe.said(), [Handed::Remote(HostSet::one(3))]);
    assert_eq!(switch.dispatch(&scribe, one(there), Some(GATEWAY)), 0);
    assert_eq!(scribe.said(), []);
    scribe.answers = true;
    assert_eq!(switch.dispatch(&scribe, one(there), None), 0);
    assert_eq!(scribe.said(), [], "it is answered here, in the other host's name");
}

#[test]
fn an_agent_makes_a_frame_for_each_of_its_ranks_but_the_sender() {
    let (switch, _reactor) = switch(AGENT, Router::agent(AGENT));
    let scribe = Scribe::default();
    let (links, theirs): (Vec<_>, Vec<_>) = (0..3).map(|rank| link(1 + rank, proc(rank))).unzip();
    switch.add(MESH, 0, &links);
    let mut cast = to(&whole(3, Placement::On(0)));
    cast.header.src = proc(1);
    switch.dispatch(&scribe, cast, Some(2));
    let seen: Vec<_> = theirs.iter().map(came).collect();
    assert_eq!(seen, [vec![proc(0)], vec![], vec![proc(2)]]);
    // A cast to more ranks than exist was not made in the usual way.
    assert_eq!(switch.dispatch(&scribe, to(&whole(4, Placement::On(0))), Some(2)), 0);
    assert!(theirs.iter().all(|fd| came(fd).is_empty()));
}

/// ORD-1: its own share of a cast does not travel up and back.
#[test]
fn a_worker_takes_its_own_share_and_sends_the_cast_up() {
    let me = proc(1);
    let (switch, _reactor) = switch(me, Router::leaf(me, 0));
    let (up, theirs) = link(0, AGENT);
    switch.add_link(&up);
    let scribe = Scribe::default();
    switch.dispatch(&scribe, to(&whole(3, Placement::On(0))), None);
    assert_eq!((scribe.said(), came(&theirs).len()), (vec![Handed::Delivered(me)], 1));
}

fn tell(dst: ProcAddr, place: u32) -> Frame {
    Frame::build(Tell { actor: 3, place }.header(AGENT, dst), None, b"f", &[])
}

/// Sends so many messages to a process, without a pause.
fn rush(switch: &Switch, scribe: &Scribe, dst: ProcAddr, count: u32) {
    (0..count).for_each(|place| assert_eq!(switch.dispatch(scribe, tell(dst, place), None), 0));
}

/// BND-1: whoever learns of what the script has sent before finds it there.
#[test]
fn whatever_leaves_is_behind_what_rests_on_all_links() {
    const COUNT: u32 = 40;
    let (switch, _reactor) = switch(AGENT, Router::agent(AGENT));
    let scribe = Scribe::default();
    let (links, theirs): (Vec<_>, Vec<_>) = (0..3).map(|rank| link(1 + rank, proc(rank))).unzip();
    switch.add(MESH, 0, &links);
    let mut decoders = [(); 3].map(|()| Decoder::default());
    let mut tells = |rank: usize| {
        more_came(&theirs[rank], &mut decoders[rank]).filter(|frame| frame.header.kind == Kind::Tell).count()
    };
    let mut rested = false;
    for round in 0..99 {
        rush(&switch, &scribe, proc(0), COUNT);
        rush(&switch, &scribe, proc(1), COUNT);
        let at_once = tells(0);
        rested |= at_once < COUNT as usize;
        // A call to a third process, a frame that another process has sent to it, or a cast from another host.
        match round % 3 {
            0 => switch.dispatch(&scribe, one(proc(2)), None),
            1 => switch.dispatch(&scribe, one(proc(2)), Some(9)),
            _ => switch.dispatch(&scribe, to(&whole(3, Placement::On(0))), Some(GATEWAY)),
        };
        assert_eq!(at_once + tells(0), COUNT as usize);
        assert_eq!((tells(1), tells(2)), (COUNT as usize, 0));
    }
    assert!(rested, "nothing was ever written together");
}

#[test]
fn what_rests_is_written_though_its_sender_turns_to_something_else() {
    let (switch, _reactor) = switch(AGENT, Router::agent(AGENT));
    let scribe = Scribe::default();
    let (near, theirs) = link(1, proc(0));
    switch.add(MESH, 0, &[near]);
    rush(&switch, &scribe, proc(0), 40);
    let end = Instant::now() + super::SOON;
    while let Some(at) = switch.bundles_turn() {
        assert!(Instant::now() < end, "{:?} came", came(&theirs));
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
    }
    assert_eq!(came(&theirs).len(), 40);
}

#[test]
fn a_message_after_a_pause_never_rests_and_in_a_rush_the_first_ones_do_not() {
    let (switch, _reactor) = switch(AGENT, Router::agent(AGENT));
    let scribe = Scribe::default();
    let (near, theirs) = link(1, proc(0));
    switch.add(MESH, 0, &[near]);
    let mut decoder = Decoder::default();
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(1));
        rush(&switch, &scribe, proc(0), 8);
        assert_eq!(more_came(&theirs, &mut decoder).count(), 8);
    }
    assert_eq!(switch.bundles_turn(), None);
}
