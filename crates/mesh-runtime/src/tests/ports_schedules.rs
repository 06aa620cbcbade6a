//! Ports of calls and of channels in several processes, without a runtime: random schedules of answering, handing on,
//! letting go and dying.

use super::dice::Dice;
use super::outbox::Outbox;
use crate::Call;
use crate::call::Outcome;
use crate::calls::Calls;
use crate::dispatch::Dispatch as _;
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::ports::{Inlet, Ports, SendingEnd, Way};
use crate::reactor::Reactor;
use crate::shm::Memory;
use crate::standing::Standing;
use mesh_proto::control::{Closed, Down, Held, Watch};
use mesh_proto::messages::{Answer, Meaning, Post, Reply};
use mesh_proto::{EndReason, Ended, Frame, Holders, Kind, PortEnd, ProcAddr, Target, Ticket};
use std::collections::VecDeque;
use std::sync::Arc;

const NODES: usize = 4;

/// Node 0 is the caller, which is told of the others' ends without asking.
fn addr(node: usize) -> ProcAddr {
    if node == 0 { ProcAddr::CONTROLLER } else { ProcAddr { mesh: 7, rank: node as u32, host: 0 } }
}

fn node_of(who: ProcAddr) -> usize {
    (0..NODES).find(|node| addr(*node) == who).unwrap()
}

struct Node {
    ports: Ports,
    ends: Vec<SendingEnd>,
    outbox: Outbox,
    dead: bool,
}

/// Frames and ports on their way, in the order in which they were sent; a port has a receiver and a ticket.
enum Sent {
    Frame(Frame),
    Port(usize, Way, Ticket),
}

struct World {
    dice: Dice,
    reactor: Arc<Reactor>,
    calls: Calls,
    nodes: Vec<Node>,
    ways: Vec<VecDeque<Sent>>,
    tickets: Ticket,
    answers: usize,
    ended: Arc<Ended>,
}

impl World {
    fn new(seed: u64, reactor: &Arc<Reactor>) -> Self {
        let standing = Arc::new(Standing::new());
        let node = |node: usize| Node {
            ports: Ports::new(addr(node), reactor, &standing),
            ends: Vec::new(),
            outbox: Outbox::default(),
            dead: false,
        };
        Self {
            dice: Dice(seed),
            reactor: Arc::clone(reactor),
            calls: Calls::default(),
            nodes: (0..NODES).map(node).collect(),
            ways: (0..NODES).map(|_| VecDeque::new()).collect(),
            tickets: 1,
            answers: 0,
            ended: Arc::new(Ended::unmade(EndReason::LongAgo)),
        }
    }

    fn flush(&mut self) {
        for (way, node) in self.ways.iter_mut().zip(&self.nodes) {
            way.extend(node.outbox.take().into_iter().map(Sent::Frame));
        }
    }

    fn port(&mut self, node: usize, way: Way, how: (bool, Option<Ticket>)) {
        let ports = &self.nodes[node].ports;
        let end = SendingEnd::new(ports, addr(node), addr(0), way, how);
        self.nodes[node].ends.push(end);
    }

    fn step(&mut self) {
        let n = self.dice.roll(NODES);
        match self.dice.roll(12) {
            0..=4 => self.deliver(n),
            5 => self.answer(n),
            6 | 7 => self.hand_on(n),
            8..=10 => self.drop_one(n),
            _ if n > 0 && !self.nodes[n].dead && self.dice.roll(8) == 0 => self.die(n),
            _ => {}
        }
        self.flush();
    }

    fn any_end(&mut self, n: usize) -> Option<usize> {
        let len = self.nodes[n].ends.len();
        (len > 0).then(|| self.dice.roll(len))
    }

    fn answer(&mut self, n: usize) {
        let Some(at) = self.any_end(n) else { return };
        let (node, error) = (&self.nodes[n], self.dice.roll(2) == 0);
        let end = &node.ends[at];
        if end.begin(error) != Ok(true) {
            assert!(!end.is_open());
            return;
        }
        let Way::Response { call, actor, index, .. } = end.way() else { panic!("a port of a call") };
        let answer = if error { Answer::Raised } else { Answer::More };
        let header = Reply { actor, call, place: index, answer }.header(addr(n), addr(0));
        node.outbox.dispatch(Frame::build_plain(header, None, b"", b"value"));
        self.answers += 1;
    }

    fn hand_on(&mut self, n: usize) {
        let Some(at) = self.any_end(n) else { return };
        let to = self.dice.roll(NODES);
        self.tickets += 1;
        let (ticket, node) = (self.tickets, &self.nodes[n]);
        let end = &node.ends[at];
        end.begin_handing_on();
        if self.dice.roll(5) == 0 {
            return end.not_handed_on();
        }
        let way = end.way();
        let told = end.handed_on(ticket, &Target::One(addr(to)), "somebody");
        self.ways[n].extend(told.map(Sent::Frame));
        self.ways[n].push_back(Sent::Port(to, way, ticket));
    }

    fn drop_one(&mut self, n: usize) {
        let Some(at) = self.any_end(n) else { return };
        let node = &mut self.nodes[n];
        let end = node.ends.swap_remove(at);
        let told = end.on_dropped(&node.ports);
        self.ways[n].extend(told.map(Sent::Frame));
    }

    fn die(&mut self, n: usize) {
        self.nodes[n].dead = true;
        self.nodes[n].ends.clear();
        // Its caller is told after all that it has sent.
        self.ways[n].push_back(Sent::Frame(Down::notice(addr(n), &self.ended).frame(addr(n), addr(0))));
    }

    fn deliver(&mut self, n: usize) {
        match self.ways[n].pop_front() {
            None => {}
            // Nobody lets go of what is sent to the dead: their end covers it.
            Some(Sent::Port(to, ..)) if self.nodes[to].dead => {}
            Some(Sent::Port(to, way, ticket)) => self.port(to, way, (false, Some(ticket))),
            Some(Sent::Frame(frame)) => self.take_in(frame),
        }
        self.flush();
    }

    fn take_in(&mut self, frame: Frame) {
        let (header, caller) = (frame.header, &self.nodes[0]);
        match header.kind {
            Kind::Held => {
                caller.ports.on_held(Held::read(&frame).unwrap(), header.src, &self.calls, &caller.outbox);
            }
            Kind::Watch => {
                let Watch { rank, .. } = Watch::read(&header);
                // If it lives, or its notice is under way, that will come by itself.
                if self.nodes[rank as usize].dead && self.ways[rank as usize].is_empty() {
                    self.calls.on_down(&self.reactor, addr(rank as usize), &self.ended);
                }
            }
            Kind::Down => {
                let Down { who, .. } = Down::read(&frame).unwrap();
                self.calls.on_down(&self.reactor, who, &self.ended);
            }
            Kind::Reply | Kind::Undeliverable => {
                let said = Meaning::of(&header).unwrap();
                let message = Message::new(frame, &Memory::new(0, 1));
                let outcome = Outcome::Replied(Arc::new(message));
                if !self.calls.offer(&self.reactor, said.call(), said.place() as usize, outcome) {
                    caller.ports.refuse(&header, PortEnd::CallerGone, &caller.outbox);
                }
            }
            Kind::Closed => {
                let node = node_of(header.dst);
                self.nodes[node].ports.on_closed(Closed::read(&frame).unwrap());
            }
            other => panic!("{other:?}"),
        }
    }

    fn settle(&mut self) {
        self.flush();
        while self.ways.iter().any(|way| !way.is_empty()) {
            let n = self.dice.roll(NODES);
            self.deliver(n);
        }
    }
}

/// One call to node 1, whose port is handed around. True if it got an answer, false if it got an end.
fn run(seed: u64, reactor: &Arc<Reactor>) -> bool {
    let mut world = World::new(seed, reactor);
    let call: Arc<Call> = world.calls.open(Target::One(addr(1)), false);
    let way = Way::Response { call: call.id, actor: 5, index: 0, stream: false };
    world.port(1, way, (true, Some(Holders::FIRST)));
    for _ in 0..60 {
        world.step();
        let held = world.nodes.iter().any(|node| node.ends.iter().any(SendingEnd::is_open));
        let died = world.nodes.iter().any(|node| node.dead);
        assert!(!call.is_done() || !held || world.answers > 0 || died, "seed {seed}: ended while somebody may answer");
    }
    for n in 0..NODES {
        while !world.nodes[n].ends.is_empty() {
            world.drop_one(n);
        }
    }
    world.settle();
    for n in 0..NODES {
        while !world.nodes[n].ends.is_empty() {
            world.drop_one(n);
        }
    }
    world.settle();
    assert!(call.is_done(), "seed {seed}: nobody is left that could answer");
    let outcomes = call.take_outcomes().unwrap();
    assert_eq!(outcomes.len(), 1);
    assert_eq!(world.calls.len(), 0);
    for node in world.nodes.iter().filter(|node| !node.dead) {
        assert_eq!(node.ports.len(), 0, "seed {seed}");
    }
    matches!(&outcomes[0], Outcome::Replied(message) if message.header().kind == Kind::Reply)
}

/// PRT-3, HLD-1: a call ends with the first answer, or once nobody is left to answer; never without either, or earlier.
#[test]
fn a_call_whose_port_is_handed_around_has_one_answer_or_one_end() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let answered = (0..2000).filter(|seed| run(*seed, &reactor)).count();
    assert!((200..1800).contains(&answered), "{answered} of 2000 calls were answered");
}

/// PRT-1, PRT-2: each value sent to a channel is received once and in order, or its sender learns that it was not.
#[test]
fn every_value_for_a_channel_is_received_once_or_refused() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let standing = Arc::new(Standing::new());
    let (receiver, sender) = (addr(0), addr(1));
    for seed in 0..2000 {
        let mut dice = Dice(seed);
        let (calls, outbox) = (Calls::default(), Outbox::default());
        let ports = Ports::new(receiver, &reactor, &standing);
        let theirs = Ports::new(sender, &reactor, &standing);
        let once = dice.roll(4) == 0;
        let inlet = Arc::new(Inlet::new(once, Account::new(9, 1 << 20, None)));
        ports.open(&inlet);
        let end = SendingEnd::new(&theirs, sender, receiver, Way::Channel { id: 9, once }, (false, None));
        let mut receives = VecDeque::new();
        let (mut sent, mut way, mut got) = (0_u32, VecDeque::new(), Vec::new());
        let mut open = true;
        for _ in 0..40 {
            match dice.roll(12) {
                0..=3 => match end.begin(false) {
                    Ok(waits) => {
                        assert!(waits && end.closed().is_none());
                        let header = Post { port: 9, error: false, rank: 0 }.header(sender, receiver);
                        way.push_back(Frame::build_plain(header, None, b"", &sent.to_le_bytes()));
                        sent += 1;
                    }
                    Err(_) => assert!(!end.is_open()),
                },
                4..=6 => {
                    let Some(frame) = way.pop_front() else { continue };
                    let header = frame.header;
                    if !ports.take(9, Message::new(frame, &Memory::new(0, 1)), &calls) {
                        ports.refuse(&header, PortEnd::Closed, &outbox);
                    }
                }
                7 | 8 if open => {
                    receives.push_back(inlet.receive(&reactor, &calls, calls.open(Target::One(receiver), false)));
                }
                9 => {
                    // The newest: a value that goes back after a later one was received would be out of order.
                    if let Some(receive) = receives.pop_back() {
                        inlet.give_up(&reactor, &calls, &receive);
                    }
                }
                10 => {
                    let Some(receive) = receives.pop_front() else { continue };
                    match receive.call.take_outcomes().and_then(|all| all.into_iter().next()) {
                        Some(Outcome::Replied(message)) => got.push(number(&message)),
                        Some(_) => {}
                        None => receives.push_front(receive),
                    }
                }
                _ if dice.roll(6) == 0 => {
                    open = false;
                    ports.close(&inlet, &calls, &outbox);
                }
                _ => {}
            }
            for frame in outbox.take() {
                theirs.on_closed(Closed::read(&frame).unwrap());
            }
        }
        // The remaining values are received to the end.
        while let Some(receive) = receives.pop_front() {
            if let Some(Outcome::Replied(message)) = receive.call.take_outcomes().and_then(|all| all.into_iter().next())
            {
                got.push(number(&message));
            } else {
                inlet.give_up(&reactor, &calls, &receive);
            }
        }
        assert!(got.is_sorted_by(|a, b| a < b), "seed {seed}: {got:?}");
        if open {
            for frame in way {
                ports.take(9, Message::new(frame, &Memory::new(0, 1)), &calls);
            }
            while inlet.len() > 0 {
                let receive = inlet.receive(&reactor, &calls, calls.open(Target::One(receiver), false));
                let Some(Outcome::Replied(message)) = receive.call.take_outcomes().unwrap().pop() else { panic!() };
                got.push(number(&message));
            }
            assert!(got.iter().copied().eq(0..sent), "seed {seed}: {got:?} of {sent}");
            ports.close(&inlet, &calls, &outbox);
        } else if got.len() < sent as usize && way.is_empty() {
            assert!(!end.is_open(), "seed {seed}: its sender was told");
        }
        assert_eq!(calls.len(), 0, "seed {seed}");
        drop(end.on_dropped(&theirs));
        assert_eq!((ports.len(), theirs.len()), (0, 0));
    }
}

fn number(message: &Message) -> u32 {
    u32::from_le_bytes(message.open().unwrap().0.as_ref().try_into().unwrap())
}
