//! Direct links between the procs of a host, under random schedules.

use crate::support::dice::Dice;
use mesh_proto::control::{Direct, heard_of, may_go_direct};
use mesh_proto::messages::{Spawn, SpawnPart, Tell};
use mesh_proto::{DirectPlan, Frame, Header, Heard, Kind, LinkId, Placement, ProcAddr, Reason, Target};
use mesh_topology::{Extent, Region};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

const PROCS: usize = 4;

fn addr(at: usize) -> ProcAddr {
    ProcAddr { mesh: 7, rank: u32::try_from(at).unwrap_or(u32::MAX), host: 0 }
}

fn at(addr: ProcAddr) -> usize {
    addr.rank as usize
}

/// What the agent hands on, always in order.
#[derive(Clone, Copy, Debug)]
enum Routed {
    Message(u32),
    Offer(LinkId),
    Ready(LinkId),
    Refused(LinkId),
    Begun(LinkId),
    Down,
}

/// One way of a link.
#[derive(Debug, Default)]
struct Street {
    /// What the sender still has, since the socket was full.
    queued: VecDeque<u32>,
    /// What the socket has.
    sent: VecDeque<u32>,
    /// The sender has stopped, behind all of it.
    closed: bool,
}

#[derive(Debug)]
struct World {
    dice: Dice,
    now: Duration,
    procs: Vec<Option<DirectPlan>>,
    /// From the agent to each proc, by whom they are.
    routed: Vec<VecDeque<(ProcAddr, Routed)>>,
    /// By the link and its sender.
    streets: HashMap<(LinkId, usize), Street>,
    links: u32,
    told: [[u32; PROCS]; PROCS],
    heard: [[u32; PROCS]; PROCS],
    direct: usize,
}

impl World {
    fn new(seed: u64, most: usize) -> Self {
        Self {
            dice: Dice(seed),
            now: Duration::ZERO,
            procs: (0..PROCS).map(|_| Some(DirectPlan::new(most))).collect(),
            routed: vec![VecDeque::new(); PROCS],
            streets: HashMap::new(),
            links: 1,
            told: [[0; PROCS]; PROCS],
            heard: [[0; PROCS]; PROCS],
            direct: 0,
        }
    }

    fn send(&mut self, from: usize, to: usize) {
        let Some(plan) = &mut self.procs[from] else { return };
        let word = self.told[from][to];
        self.told[from][to] += 1;
        if let Some(id) = plan.way(addr(to)) {
            self.direct += 1;
            let street = self.streets.entry((id, from)).or_default();
            assert!(!street.closed, "sent by a way that is closed");
            street.queued.push_back(word);
            return;
        }
        self.routed[to].push_back((addr(from), Routed::Message(word)));
        match plan.routed(addr(to), self.now) {
            Reason::None => {}
            Reason::Ask => self.link(from, to),
            Reason::MakeRoom(id) => self.stop(from, id),
        }
    }

    /// The agent makes a link, unless one of the two has died; an end may be lost on its way.
    fn link(&mut self, one: usize, other: usize) {
        if self.procs[one].is_none() || self.procs[other].is_none() {
            return;
        }
        let id = self.links;
        self.links += 1;
        for (to, peer) in [(other, one), (one, other)] {
            let word = if self.dice.roll(20_u32) == 0 { None } else { Some(Routed::Offer(id)) };
            match word {
                Some(word) => self.routed[to].push_back((addr(peer), word)),
                // The proc gets no socket, and says so.
                None => self.routed[peer].push_back((addr(to), Routed::Refused(id))),
            }
        }
    }

    fn stop(&mut self, who: usize, id: LinkId) {
        let street = self.streets.entry((id, who)).or_default();
        if !street.queued.is_empty() {
            return;
        }
        street.closed = true;
        if let Some(plan) = &mut self.procs[who] {
            plan.stopped(id);
        }
    }

    fn hear(&mut self, who: usize, from: ProcAddr, word: u32) {
        let heard = &mut self.heard[at(from)][who];
        assert_eq!(*heard, word, "proc {who} hears {from:?} out of order");
        *heard += 1;
    }

    /// Reads a link to what the socket has.
    fn read(&mut self, who: usize, id: LinkId, peer: ProcAddr) {
        let street = self.streets.entry((id, at(peer))).or_default();
        let words: Vec<u32> = street.sent.drain(..).collect();
        let ended = street.closed || self.procs[at(peer)].is_none();
        for word in words {
            self.hear(who, peer, word);
        }
        if ended
            && let Some(plan) = &mut self.procs[who]
            && plan.heard_end(id) == Heard::Stop
        {
            self.stop(who, id);
        }
    }

    fn read_all_of(&mut self, who: usize, peer: ProcAddr) {
        let ids: Vec<LinkId> = self.procs[who].iter().flat_map(|plan| plan.from(peer)).collect();
        for id in ids {
            self.read(who, id, peer);
        }
    }

    fn take_routed(&mut self, who: usize) {
        if self.procs[who].is_none() {
            return;
        }
        let Some((from, word)) = self.routed[who].pop_front() else { return };
        self.read_all_of(who, from);
        let Some(plan) = &mut self.procs[who] else { return };
        match word {
            Routed::Message(word) => self.hear(who, from, word),
            Routed::Offer(id) => {
                let word = if plan.offered(id, from) { Routed::Ready(id) } else { Routed::Refused(id) };
                self.routed[at(from)].push_back((addr(who), word));
            }
            Routed::Ready(id) => {
                if plan.ready(id, from) {
                    self.routed[at(from)].push_back((addr(who), Routed::Begun(id)));
                }
            }
            Routed::Refused(id) => {
                plan.refused(id, from);
            }
            Routed::Begun(id) => {
                plan.begun(id, from);
            }
            Routed::Down => {
                plan.lost(from);
            }
        }
    }

    /// A proc dies: what it has queued is lost, what sockets have is not; then all others are told.
    fn die(&mut self, who: usize) {
        if self.procs[who].take().is_some() {
            self.streets.iter_mut().filter(|((_, by), _)| *by == who).for_each(|(_, street)| street.queued.clear());
            for other in (0..PROCS).filter(|other| *other != who) {
                self.routed[other].push_back((addr(who), Routed::Down));
            }
        }
    }

    fn write_some(&mut self) {
        let Some(key) = self.streets.keys().copied().nth(self.dice.roll(self.streets.len())) else { return };
        if let Some(street) = self.streets.get_mut(&key)
            && let Some(word) = street.queued.pop_front()
        {
            street.sent.push_back(word);
        }
    }

    /// One thing of all that may happen next.
    fn step(&mut self, dying: bool) {
        self.now += Duration::from_millis(self.dice.roll(20));
        let who = self.dice.roll(PROCS);
        match self.dice.roll(100_u32) {
            0..50 => {
                // Most of what a proc sends is for its neighbour.
                let to = if self.dice.roll(5_u32) == 0 { self.dice.roll(PROCS) } else { (who + 1) % PROCS };
                if to != who {
                    self.send(who, to);
                }
            }
            50..75 => self.take_routed(who),
            75..85 => self.write_some(),
            85..99 => {
                let peer = addr(self.dice.roll(PROCS));
                self.read_all_of(who, peer);
            }
            _ if dying && self.dice.roll(20_u32) == 0 => self.die(who),
            // An end that was asked to stop while something waited.
            _ => {
                let Some(plan) = &self.procs[who] else { return };
                let ending: Vec<LinkId> = plan.ways().map(|(_, id)| id).filter(|id| plan.is_ending(*id)).collect();
                for id in ending {
                    self.stop(who, id);
                }
            }
        }
    }

    fn settle(&mut self) {
        for street in self.streets.values_mut() {
            street.sent.append(&mut street.queued);
        }
        for _ in 0..3 {
            for who in 0..PROCS {
                while !self.routed[who].is_empty() && self.procs[who].is_some() {
                    self.take_routed(who);
                }
                for peer in 0..PROCS {
                    self.read_all_of(who, addr(peer));
                }
            }
        }
    }
}

/// DIR-1, DIR-2.
#[test]
fn messages_keep_their_order_and_none_is_lost() {
    let mut direct = 0;
    for seed in 0..300 {
        let mut world = World::new(seed, 1 + usize::try_from(seed % 3).unwrap_or(0));
        for _ in 0..3000 {
            world.step(false);
        }
        world.settle();
        assert_eq!(world.heard, world.told, "seed {seed}");
        direct += world.direct;
    }
    assert!(direct > 50_000, "only {direct} went by links");
}

/// DIR-1: of what a proc has sent before it died, the others hear a beginning.
#[test]
fn what_is_heard_of_the_dead_has_no_holes() {
    for seed in 0..300 {
        let mut world = World::new(1000 + seed, 2);
        for _ in 0..3000 {
            world.step(true);
        }
        let alive: Vec<bool> = world.procs.iter().map(Option::is_some).collect();
        world.settle();
        for from in 0..PROCS {
            for to in (0..PROCS).filter(|to| alive[*to]) {
                let (heard, told) = (world.heard[from][to], world.told[from][to]);
                assert!(heard == told || (heard < told && !alive[from]), "seed {seed}: {heard} of {told}");
            }
        }
        for (who, plan) in world.procs.iter().enumerate().filter_map(|(who, plan)| Some((who, plan.as_ref()?))) {
            for (peer, _) in plan.ways() {
                assert!(alive[at(peer)], "seed {seed}: proc {who} has a link to one that is dead");
            }
        }
    }
}

/// DIR-3.
#[test]
fn there_are_at_most_so_many_links_and_unused_ones_give_way() {
    let mut plan = DirectPlan::new(2);
    let mut link = 0;
    let mut open = |plan: &mut DirectPlan, to: usize, now: Duration| {
        let mut given_way = Vec::new();
        for _ in 0..10_000 {
            match plan.routed(addr(to), now) {
                Reason::None => {}
                Reason::MakeRoom(id) => {
                    given_way.push(id);
                    plan.stopped(id);
                    plan.heard_end(id);
                }
                Reason::Ask => {
                    link += 1;
                    assert!(plan.offered(link, addr(to)) && plan.ready(link, addr(to)) && plan.begun(link, addr(to)));
                    return (Some(link), given_way);
                }
            }
        }
        (None, given_way)
    };
    let second = Duration::from_secs(1);
    assert_eq!(open(&mut plan, 1, second), (Some(1), vec![]));
    assert_eq!(open(&mut plan, 2, second), (Some(2), vec![]));
    assert!(!plan.offered(9, addr(3)), "one too many");
    // Both are in use.
    assert_eq!(open(&mut plan, 3, 10 * second), (None, vec![]));
    assert_eq!(plan.way(addr(1)), Some(1));
    assert_eq!(open(&mut plan, 3, 10 * second + second / 2), (None, vec![]));
    assert_eq!(open(&mut plan, 3, 11 * second), (Some(3), vec![2]));
    assert_eq!((plan.way(addr(1)), plan.way(addr(2)), plan.way(addr(3))), (Some(1), None, Some(3)));
}

#[test]
fn without_links_nothing_is_asked_for() {
    let mut plan = DirectPlan::new(0);
    for _ in 0..10_000 {
        assert_eq!(plan.routed(addr(1), Duration::ZERO), Reason::None);
    }
    assert!(!plan.offered(1, addr(1)));
}

fn cast(kind: Kind, from: ProcAddr) -> Frame {
    let region = Region::whole(&Extent::new([("gpus", 4)]).expect("a small extent"));
    let target = Target::Many(7, region, Placement::On(0));
    Frame::build_plain(Header::new(kind, from, addr(0)), Some(&target), b"endpoint", b"arguments")
}

#[test]
fn what_is_said_of_links_is_read_as_it_was_said() {
    let (from, to) = (addr(1), ProcAddr::agent(0));
    let said = [
        Direct::Ask(addr(2)),
        Direct::Offer(5, addr(2), u64::MAX),
        Direct::Ready(5),
        Direct::Refused(6),
        Direct::Begun(7),
        Direct::Passed(vec![], cast(Kind::Tell, from)),
        Direct::Passed((0..4096).collect(), cast(Kind::Tell, from)),
    ];
    for one in said {
        assert_eq!(Direct::read(&one.frame(from, to)), Some(one));
    }
}

#[test]
fn an_agent_hands_on_only_what_a_proc_can_have_sent() {
    let (from, to) = (addr(1), ProcAddr::agent(0));
    let read = |ranks: Vec<u32>, frame: Frame| Direct::read(&Direct::Passed(ranks, frame).frame(from, to));
    assert!(read((0..4097).collect(), cast(Kind::Tell, from)).is_none(), "more than there are links");
    assert!(read(vec![2, 1], cast(Kind::Tell, from)).is_none(), "out of order");
    assert!(read(vec![], cast(Kind::Tell, addr(2))).is_none(), "another's");
    assert!(read(vec![], Direct::Ask(addr(2)).frame(from, to)).is_none(), "one in another");
    let mut short = cast(Kind::Tell, from);
    short.body = short.body.slice(1..);
    assert!(read(vec![], short).is_none(), "not whole");
}

#[test]
fn agents_hear_who_owns_what_and_not_what_is_said() {
    let (owner, home) = (addr(1), addr(2));
    assert_eq!(
        heard_of(&Frame::build_plain(Tell { actor: 3, place: 0 }.header(owner, home), None, b"", b"x"), 0),
        None
    );
    let spawn = Spawn { actor: 3, call: 4, place: 0, part: SpawnPart::Whole };
    let frame = Frame::build_plain(spawn.header(owner, home), None, b"name", b"arguments");
    let heard = heard_of(&frame, 0).expect("a spawn makes an owner");
    assert_eq!((Spawn::read(&heard.header), heard.body.len(), heard.target()), (Ok(spawn), 0, frame.target()));
    let many = heard_of(&cast(Kind::StopActor, owner), 0).expect("a stop ends what somebody owns");
    assert_eq!((many.target(), many.name()), (cast(Kind::StopActor, owner).target(), &b""[..]));
    assert!(many.wire_len() < cast(Kind::StopActor, owner).wire_len());
}

#[test]
fn what_agents_read_or_mark_goes_by_them() {
    for kind in [Kind::Partial, Kind::Watch, Kind::Inspect, Kind::Down, Kind::Direct, Kind::StopProcs, Kind::Goodbye] {
        assert!(!may_go_direct(kind), "{kind:?}");
    }
    assert!(may_go_direct(Kind::Call) && may_go_direct(Kind::Reply));
}
