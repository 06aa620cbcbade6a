//! Direct links between the procs of a host, under random schedules.

use crate::support::dice::Dice;
use mesh_proto::control::{Direct, may_go_direct};
use mesh_proto::messages::Tell;
use mesh_proto::{Choice, DirectPlan, Frame, Header, Heard, Incoming, Kind, LinkId, ProcAddr, Reason, choose};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// The agent, which is a script too, and procs.
const ALL: usize = 5;
const AGENT: usize = 0;

fn addr(at: usize) -> ProcAddr {
    ProcAddr { mesh: 7, rank: u32::try_from(at).unwrap_or(u32::MAX), host: 0 }
}

fn at(addr: ProcAddr) -> usize {
    addr.rank as usize
}

/// How many messages each has sent, as far as somebody knows.
type Past = [u32; ALL];

#[derive(Clone, Debug)]
enum Said {
    Message {
        to: Vec<usize>,
        past: Past,
    },
    Ask(usize),
    /// Without the socket if it was lost on its way.
    Offer(LinkId, bool),
    Ready(LinkId),
    Refused(LinkId),
    Down,
}

#[derive(Clone, Debug)]
struct Sent {
    from: usize,
    said: Said,
    /// For whom it is, if it goes by way of the agent and is no message.
    to: usize,
    when: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Lane {
    Up(usize),
    Down(usize),
    /// A link, and who sends by it.
    Link(LinkId, usize),
}

/// One way from one process to another.
#[derive(Debug, Default)]
struct Street {
    accepted: u32,
    /// What the sender still has, since the socket was full, or it is about to write.
    queued: VecDeque<Sent>,
    socket: VecDeque<Sent>,
    /// What the receiver has read.
    here: VecDeque<Sent>,
    read: u32,
    last: u64,
    /// The sender has stopped, behind all of it, or has died.
    closed: bool,
}

impl Street {
    fn has_ended(&self) -> bool {
        self.closed && self.queued.is_empty() && self.socket.is_empty()
    }

    fn look(&mut self) -> u32 {
        let accepted = self.accepted;
        self.read += u32::try_from(self.socket.len()).unwrap_or(0);
        self.here.append(&mut self.socket);
        accepted
    }

    fn incoming(&mut self, accepted: u32) -> Incoming {
        let next = self.here.front().map(|sent| sent.when);
        self.last = next.unwrap_or(self.last);
        Incoming { next, last: self.last, is_behind: accepted != self.read && !self.has_ended() }
    }
}

#[derive(Debug)]
struct World {
    dice: Dice,
    now: Duration,
    /// Of what links have accepted.
    clock: u64,
    plans: Vec<Option<DirectPlan>>,
    streets: HashMap<Lane, Street>,
    /// The links that a proc reads, and who sends there.
    reads: Vec<Vec<(LinkId, usize)>>,
    links: u32,
    /// How many frames of each proc the agent has handed on.
    handed: [u32; ALL],
    told: [bool; ALL],
    past: [Past; ALL],
    /// By receiver and sender: the numbers of the messages that it does not have yet.
    due: Vec<Vec<VecDeque<u32>>>,
    direct: usize,
}

impl World {
    fn new(seed: u64, most: usize) -> Self {
        Self {
            dice: Dice(seed),
            now: Duration::ZERO,
            clock: 0,
            plans: (0..ALL).map(|_| Some(DirectPlan::new(most))).collect(),
            streets: HashMap::new(),
            reads: vec![Vec::new(); ALL],
            links: 1,
            handed: [0; ALL],
            told: [false; ALL],
            past: [[0; ALL]; ALL],
            due: vec![vec![VecDeque::new(); ALL]; ALL],
            direct: 0,
        }
    }

    fn street(&mut self, lane: Lane) -> &mut Street {
        self.streets.entry(lane).or_default()
    }

    fn accept(&mut self, lane: Lane, from: usize, to: usize, said: Said) {
        self.clock += 1;
        let when = self.clock;
        let street = self.street(lane);
        assert!(!street.closed || !matches!(lane, Lane::Link(..)), "sent by a way that is closed");
        street.accepted += 1;
        street.queued.push_back(Sent { from, said, to, when });
    }

    /// Sends a message to some.
    fn send(&mut self, from: usize, to: Vec<usize>) {
        self.past[from][from] += 1;
        let past = self.past[from];
        to.iter().for_each(|to| self.due[*to][from].push_back(past[from]));
        if from == AGENT {
            return self.hand_out(from, &to, past);
        }
        let Some(plan) = &mut self.plans[from] else { return };
        let ways: Vec<_> = to.iter().filter_map(|to| Some((*to, plan.way(addr(*to))?))).collect();
        if ways.len() == to.len() && self.handed[from] == self.street(Lane::Up(from)).accepted {
            self.direct += 1;
            for (to, id) in ways {
                self.accept(Lane::Link(id, from), from, to, Said::Message { to: vec![to], past });
            }
            return;
        }
        for to in to.iter().copied().filter(|to| *to != AGENT) {
            match self.plans[from].as_mut().map(|plan| plan.routed(addr(to), self.now)) {
                Some(Reason::Ask) => self.accept(Lane::Up(from), from, AGENT, Said::Ask(to)),
                Some(Reason::MakeRoom(id)) => self.stop(from, id),
                _ => {}
            }
        }
        self.accept(Lane::Up(from), from, AGENT, Said::Message { to, past });
    }

    /// The agent accepts a message for all its receivers before it writes it to any.
    fn hand_out(&mut self, from: usize, to: &[usize], past: Past) {
        for to in to.iter().copied() {
            let said = Said::Message { to: vec![to], past };
            if to == AGENT {
                self.take_message(AGENT, from, past);
            } else if self.plans[to].is_some() {
                self.accept(Lane::Down(to), from, to, said);
            }
        }
    }

    /// The agent handles the next frame of a proc.
    fn agent(&mut self, of: usize) {
        let street = self.street(Lane::Up(of));
        let Some(sent) = street.socket.pop_front() else {
            if self.plans[of].is_none() && !self.told[of] {
                self.told[of] = true;
                for other in (1..ALL).filter(|other| *other != of) {
                    self.accept(Lane::Down(other), of, other, Said::Down);
                }
            }
            return;
        };
        match sent.said {
            Said::Message { to, past } => self.hand_out(of, &to, past),
            Said::Ask(other) => self.link(of, other),
            said => self.accept(Lane::Down(sent.to), of, sent.to, said),
        }
        self.handed[of] += 1;
    }

    /// The agent makes a link, unless one of the two has died; an end may be lost on its way.
    fn link(&mut self, one: usize, other: usize) {
        if self.plans[one].is_none() || self.plans[other].is_none() {
            return;
        }
        let id = self.links;
        self.links += 1;
        for (to, peer) in [(other, one), (one, other)] {
            let has_socket = self.dice.roll(20_u32) != 0;
            self.accept(Lane::Down(to), peer, to, Said::Offer(id, has_socket));
        }
    }

    fn stop(&mut self, who: usize, id: LinkId) {
        let street = self.street(Lane::Link(id, who));
        if !street.queued.is_empty() {
            return;
        }
        street.closed = true;
        if let Some(plan) = &mut self.plans[who]
            && plan.stopped(id)
        {
            self.reads[who].retain(|(one, _)| *one != id);
        }
    }

    /// DIR-1, DIR-4: nothing that was sent before is still to come, from the same sender or from those of whom it knew.
    fn take_message(&mut self, who: usize, from: usize, past: Past) {
        let due = &mut self.due[who];
        assert_eq!(due[from].pop_front(), Some(past[from]), "{who} hears {from} out of order");
        for (cause, known) in past.iter().enumerate().filter(|(cause, _)| *cause != from) {
            let missing = due[cause].front().filter(|number| *number <= known);
            assert!(missing.is_none(), "{who} hears of message {missing:?} of {cause} by {from}, before it has it");
        }
        for (mine, theirs) in self.past[who].iter_mut().zip(past) {
            *mine = (*mine).max(theirs);
        }
    }

    /// Takes what has come, as `read_in_order` does. Others go on between its looks, if they are `busy`.
    fn read(&mut self, who: usize, busy: bool) {
        for _ in 0..6 {
            if self.plans[who].is_none() {
                return;
            }
            let until = self.clock;
            let lanes: Vec<Lane> = [Lane::Down(who)]
                .into_iter()
                .chain(self.reads[who].iter().map(|(id, peer)| Lane::Link(*id, *peer)))
                .collect();
            let mut accepted = Vec::new();
            for lane in &lanes {
                accepted.push(self.street(*lane).look());
                for _ in 0..if busy { self.dice.roll(4_u32) } else { 0 } {
                    self.go_on(who);
                }
            }
            loop {
                let ways: Vec<Incoming> = lanes
                    .iter()
                    .zip(&accepted)
                    .map(|(lane, accepted)| self.street(*lane).incoming(*accepted))
                    .collect();
                match choose(ways, until) {
                    Choice::Take(at) => {
                        let Some(sent) = self.street(lanes[at]).here.pop_front() else { return };
                        if !self.take(who, sent) {
                            break;
                        }
                    }
                    Choice::LookAgain => break,
                    Choice::Nothing | Choice::Wait => {
                        return self.hear_ends(who);
                    }
                }
            }
        }
    }

    fn hear_ends(&mut self, who: usize) {
        for (id, peer) in self.reads[who].clone() {
            let street = self.street(Lane::Link(id, peer));
            if !street.has_ended() || !street.here.is_empty() {
                continue;
            }
            match self.plans[who].as_mut().map(|plan| plan.heard_end(id)) {
                Some(Heard::Stop) => self.stop(who, id),
                _ => self.reads[who].retain(|(one, _)| *one != id),
            }
        }
    }

    /// False if its links have changed.
    fn take(&mut self, who: usize, sent: Sent) -> bool {
        let Some(plan) = &mut self.plans[who] else { return false };
        let from = sent.from;
        match sent.said {
            Said::Message { past, .. } => {
                self.take_message(who, from, past);
                return true;
            }
            Said::Offer(id, has_socket) => {
                let taken = has_socket && plan.offered(id, addr(from));
                if taken {
                    self.reads[who].push((id, from));
                }
                let answer = if taken { Said::Ready(id) } else { Said::Refused(id) };
                self.accept(Lane::Up(who), who, from, answer);
            }
            Said::Ready(id) => {
                plan.ready(id, addr(from));
            }
            Said::Refused(id) => {
                if plan.refused(id, addr(from)) {
                    self.reads[who].retain(|(one, _)| *one != id);
                }
            }
            Said::Down => {
                let over = plan.lost(addr(from));
                self.reads[who].retain(|(one, _)| !over.contains(one));
            }
            Said::Ask(_) => {}
        }
        false
    }

    /// A proc dies: what it has queued is lost, what sockets have is not; then all others are told.
    fn die(&mut self, who: usize) {
        if self.plans[who].take().is_none() {
            return;
        }
        for (lane, street) in &mut self.streets {
            if !matches!(lane, Lane::Up(by) | Lane::Link(_, by) if *by == who) {
                continue;
            }
            street.closed = true;
            for sent in street.queued.drain(..) {
                if let Said::Message { to, past } = sent.said {
                    to.iter().for_each(|to| self.due[*to][who].retain(|number| *number != past[who]));
                }
            }
        }
    }

    fn write_some(&mut self) {
        let mut lanes: Vec<Lane> =
            self.streets.iter().filter(|(_, street)| !street.queued.is_empty()).map(|(lane, _)| *lane).collect();
        lanes.sort_unstable();
        if lanes.is_empty() {
            return;
        }
        let lane = lanes[self.dice.roll(lanes.len())];
        let count = 1 + self.dice.roll(8_usize);
        let street = self.street(lane);
        let count = count.min(street.queued.len());
        street.socket.extend(street.queued.drain(..count));
    }

    /// What others do while `reader` reads, if one does.
    fn go_on(&mut self, reader: usize) {
        let who = self.dice.roll(ALL);
        match self.dice.roll(12_u32) {
            0..=2 if who != reader && self.plans[who].is_some() => {
                // Most of what a proc sends is for its neighbour; some is for all.
                let next = if who + 1 == ALL { 1 } else { who + 1 };
                let to = if self.dice.roll(4_u32) == 0 { self.dice.roll(ALL) } else { next };
                let all = self.dice.roll(10_u32) == 0;
                let to = if all { (1..ALL).collect() } else { vec![to] };
                let to: Vec<usize> = to.into_iter().filter(|to| *to != who && self.plans[*to].is_some()).collect();
                if !to.is_empty() {
                    self.send(who, to);
                }
            }
            // Whatever has come, or one of it.
            4 if who != AGENT => (0..=self.street(Lane::Up(who)).socket.len()).for_each(|_| self.agent(who)),
            5 if who != AGENT => self.agent(who),
            _ => self.write_some(),
        }
    }

    /// One thing of all that may happen next.
    fn step(&mut self, dying: bool) {
        self.now += Duration::from_millis(self.dice.roll(20));
        match self.dice.roll(100_u32) {
            0..70 => self.go_on(ALL),
            70..98 => {
                let who = 1 + self.dice.roll(ALL - 1);
                self.read(who, true);
            }
            _ if dying && self.dice.roll(30_u32) == 0 => {
                let who = 1 + self.dice.roll(ALL - 1);
                self.die(who);
            }
            // An end that was asked to stop while something waited.
            _ => {
                let who = 1 + self.dice.roll(ALL - 1);
                let Some(plan) = &self.plans[who] else { return };
                let ending: Vec<LinkId> = plan.ways().map(|(_, id)| id).filter(|id| plan.is_ending(*id)).collect();
                for id in ending {
                    self.stop(who, id);
                }
            }
        }
    }

    fn settle(&mut self) {
        for _ in 0..8 {
            for street in self.streets.values_mut() {
                street.socket.append(&mut street.queued);
            }
            for who in 1..ALL {
                while !self.street(Lane::Up(who)).socket.is_empty() || self.plans[who].is_none() && !self.told[who] {
                    self.agent(who);
                }
            }
            for street in self.streets.values_mut() {
                street.socket.append(&mut street.queued);
            }
            (1..ALL).for_each(|who| self.read(who, false));
        }
    }
}

/// DIR-1, DIR-2, DIR-4.
#[test]
fn messages_keep_their_order_and_causes_come_first_and_none_is_lost() {
    let mut direct = 0;
    for seed in 0..150 {
        let mut world = World::new(seed, 1 + usize::try_from(seed % 4).unwrap_or(0));
        for _ in 0..3000 {
            world.step(false);
        }
        world.settle();
        assert!(world.due.iter().flatten().all(VecDeque::is_empty), "seed {seed}");
        direct += world.direct;
    }
    assert!(direct > 10_000, "only {direct} went by links");
}

/// DIR-1, DIR-4: of what a proc has sent before it died, the others hear a beginning.
#[test]
fn what_is_heard_of_the_dead_has_no_holes() {
    for seed in 0..150 {
        let mut world = World::new(1000 + seed, 3);
        for _ in 0..3000 {
            world.step(true);
        }
        world.settle();
        let alive: Vec<bool> = world.plans.iter().map(Option::is_some).collect();
        for who in (0..ALL).filter(|who| alive[*who]) {
            // What was lost with its sender is not due.
            assert!(world.due[who].iter().all(VecDeque::is_empty), "seed {seed}: {who} waits for {:?}", world.due[who]);
            for (peer, _) in world.plans[who].iter().flat_map(DirectPlan::ways) {
                assert!(alive[at(peer)], "seed {seed}: proc {who} has a link to one that is dead");
            }
        }
    }
}

/// DIR-4: a way that is behind holds back what is younger than its last frame, and no other does.
#[test]
fn what_is_taken_next_is_the_oldest_unless_an_older_one_may_come() {
    let here = |when| Incoming { next: Some(when), last: when, is_behind: false };
    let empty = |last, is_behind| Incoming { next: None, last, is_behind };
    assert_eq!(choose([], 9), Choice::Nothing);
    assert_eq!(choose([empty(5, true), empty(0, false)], 9), Choice::Nothing);
    assert_eq!(choose([here(7), here(4), here(5)], 9), Choice::Take(1));
    assert_eq!(choose([here(9), empty(0, false)], 9), Choice::Take(0));
    assert_eq!(choose([here(10)], 9), Choice::LookAgain);
    assert_eq!(choose([here(4), empty(5, true)], 9), Choice::Take(0));
    assert_eq!(choose([here(5), empty(5, true)], 9), Choice::Wait);
    assert_eq!(choose([here(10), empty(5, true)], 9), Choice::Wait);
    // One that has something here comes in its turn, whatever follows there.
    assert_eq!(choose([here(7), Incoming { is_behind: true, ..here(6) }], 9), Choice::Take(1));
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
                    assert!(plan.offered(link, addr(to)) && plan.ready(link, addr(to)));
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

#[test]
fn what_is_said_of_links_is_read_as_it_was_said() {
    let (from, to) = (addr(1), ProcAddr::agent(0));
    for one in [Direct::Ask(addr(2)), Direct::Offer(5, addr(2), u64::MAX), Direct::Ready(5), Direct::Refused(6)] {
        assert_eq!(Direct::read(&one.frame(from, to)), Some(one));
    }
}

#[test]
fn what_agents_read_or_mark_goes_by_them() {
    let may = |kind| may_go_direct(&Frame::build_plain(Header::new(kind, addr(1), addr(2)), None, b"", b"x"), 0);
    for kind in [
        Kind::Partial,
        Kind::Watch,
        Kind::Inspect,
        Kind::Down,
        Kind::Direct,
        Kind::StopProcs,
        Kind::Goodbye,
        Kind::Spawn,
        Kind::StopActor,
    ] {
        assert!(!may(kind), "{kind:?}");
    }
    assert!(may(Kind::Call) && may(Kind::Reply));
    let tell = Frame::build_plain(Tell { actor: 3, place: 0 }.header(addr(1), addr(2)), None, b"", b"x");
    assert!(may_go_direct(&tell, 0));
}
