//! Values, references and copies of several processes on three hosts, without a runtime: random schedules of keeping,
//! sending, fetching, dropping and dying. An agent reads what a process sends in order. Between hosts, only the order
//! of one process's messages to another is kept; some of these links are much slower than others.

use super::dice::Dice;
use super::outbox::Outbox;
use crate::buffer::Buffer;
use crate::dispatch::Dispatch as _;
use crate::message::Message;
use crate::reactor::Reactor;
use crate::refs::{Around, Fetched, Hold, Kept, Opened, RefAddr, RefCounter, Refs, View};
use crate::runtime::RemoteValues;
use crate::shm::Memory;
use crate::spin_board::SpinBoard;
use crate::standing::Standing;
use bytes::Bytes;
use mesh_proto::control::{Down, Fetch, Held, Undeliverable, Watch};
use mesh_proto::messages::{Answer, Asked, Meaning, Reply, Tell};
use mesh_proto::{
    Carried, EndReason, Ended, Frame, IdMaker, Kind, Part, ProcAddr, Sharing, Target, Ticket, Undelivered,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// The budget for all values of a process.
const BUDGET: u64 = 1 << 20;
const HOSTS: usize = 3;
/// Three processes on each host. The first of each is its agent, which does not end.
const NODES: usize = 3 * HOSTS;
/// The size of what a reference says, besides its ticket: the value's length, and [`Known::via`].
const TEXT: usize = 16;

#[derive(Debug)]
struct Node {
    me: ProcAddr,
    refs: Refs,
    /// Used only by agents.
    copies: RemoteValues,
    memory: Arc<Memory>,
    outbox: Outbox,
    dead: AtomicBool,
}

impl RefCounter for Node {
    fn dropped(&self, hold: &Hold, tickets: Vec<Ticket>) {
        if !self.is_dead() {
            self.refs.dropped(hold, tickets, &self.outbox);
        }
    }

    fn came(&self, frame: &Frame) -> Vec<Arc<Hold>> {
        let hold = |one: Carried| self.hold_under(RefAddr { owner: one.owner, id: one.id }, &[one.ticket]);
        frame.carried().into_iter().map(hold).collect()
    }

    fn unsent(&self, frame: &Frame) {
        self.refs.unsent(frame, &self.outbox);
    }
}

impl Node {
    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    fn hold_under(&self, addr: RefAddr, tickets: &[Ticket]) -> Arc<Hold> {
        let (hold, fresh) = self.refs.hold(addr, tickets);
        if fresh {
            self.outbox.dispatch(Watch::of(addr.owner).frame(self.me, ProcAddr::agent(addr.owner.host)));
        }
        hold
    }
}

/// What a process has in a variable.
#[derive(Clone)]
struct Object {
    hold: Arc<Hold>,
    value: Known,
}

/// Who tells a value's owner about a process that read a reference to it from another value.
#[derive(Clone, Copy, PartialEq)]
enum Word {
    /// As in [`Refs::read`]: the keeper of the other value, and the reader.
    Both,
    /// Only the reader, which holds the other value as long as this one.
    Readers,
}

/// What a reference says of its value.
#[derive(Clone)]
struct Known {
    kept: Kept,
    /// The owners of the values that it was read from on its way here, as bits.
    via: u64,
}

struct World {
    dice: Dice,
    word: Word,
    /// With [`Word::Readers`]: what was read from another value, and the hold of that value.
    outer: Vec<(Weak<Hold>, Arc<Hold>)>,
    /// The process that got something last, which is likely to act.
    turn: usize,
    /// The most objects of a process.
    most: usize,
    /// How often, out of four times, a process drops what it has used.
    generous: u32,
    nodes: Vec<Arc<Node>>,
    objects: Vec<Vec<Object>>,
    /// What each process has sent and its agent has not read yet.
    up: Vec<VecDeque<Frame>>,
    /// What is on its way between processes on different hosts.
    links: BTreeMap<(usize, usize), VecDeque<Frame>>,
    /// Links that deliver rarely.
    slow: BTreeSet<(usize, usize)>,
    values: BTreeMap<u64, Value>,
    /// The process that has ended, or may, and the one that asks to be told.
    watchers: BTreeSet<(ProcAddr, ProcAddr)>,
    /// Fetches that wait for an answer: by whom, and for which value.
    asked: BTreeMap<(ProcAddr, u64), Object>,
    answered: usize,
    calls: u64,
    ended: Arc<Ended>,
}

struct Value {
    owner: usize,
    cost: u64,
    inner: Vec<Known>,
}

fn addr(node: usize) -> ProcAddr {
    let host = (node % HOSTS) as u32;
    if node < HOSTS { ProcAddr::agent(host) } else { ProcAddr { mesh: 7, rank: node as u32, host } }
}

fn content(id_like: u64) -> Vec<u8> {
    vec![(id_like % 251) as u8; 100 + (id_like % 900) as usize]
}

impl World {
    fn new(seed: u64, shared: bool, word: Word) -> Self {
        let reactor = Arc::new(Reactor::new().unwrap());
        let standing = Arc::new(Standing::new());
        let board = Arc::new(SpinBoard::create().unwrap());
        let node = |n: usize| {
            let origin = (seed << 20) | ((n as u64) << 10);
            let memory = match shared {
                true => Memory::new(16 << 20, origin).keeping(BUDGET, !origin),
                false => Memory::new(0, origin),
            };
            let memory = Arc::new(memory);
            let node = Arc::new_cyclic(|this: &Weak<Node>| {
                let around = Around {
                    me: addr(n),
                    reactor: Arc::clone(&reactor),
                    standing: Arc::clone(&standing),
                    memory: Arc::clone(&memory),
                    board: Arc::clone(&board),
                    ids: Arc::new(IdMaker::new(origin | 1)),
                    counter: Weak::<Node>::clone(this),
                };
                Node {
                    me: addr(n),
                    refs: Refs::new(around, BUDGET),
                    copies: RemoteValues::new(addr(n), &memory),
                    memory: Arc::clone(&memory),
                    outbox: Outbox::default(),
                    dead: AtomicBool::new(false),
                }
            });
            memory.counted_by(Arc::downgrade(&node) as Weak<dyn RefCounter>);
            node
        };
        let mut dice = Dice(seed);
        let links = (0..NODES * NODES).map(|link| (link / NODES, link % NODES));
        let slow = links.filter(|_| dice.roll(2) == 0).collect();
        let (most, generous) = (1 + dice.roll(4_usize), 1 + 2 * dice.roll(2));
        Self {
            dice,
            word,
            outer: Vec::new(),
            turn: 0,
            most,
            generous,
            nodes: (0..NODES).map(node).collect(),
            objects: vec![Vec::new(); NODES],
            up: vec![VecDeque::new(); NODES],
            links: BTreeMap::new(),
            slow,
            values: BTreeMap::new(),
            watchers: BTreeSet::new(),
            asked: BTreeMap::new(),
            answered: 0,
            calls: 1,
            ended: Arc::new(Ended::unmade(EndReason::LongAgo)),
        }
    }

    fn at(&self, who: ProcAddr) -> usize {
        (0..NODES).find(|n| addr(*n) == who).unwrap()
    }

    fn is_dead(&self, who: ProcAddr) -> bool {
        self.nodes[self.at(who)].is_dead()
    }

    fn agent_of(&self, who: ProcAddr) -> Arc<Node> {
        Arc::clone(&self.nodes[who.host as usize])
    }

    /// Puts what the processes have said on its way.
    fn flush(&mut self) {
        // Dropping one hold may free others.
        let mut before = usize::MAX;
        while self.outer.len() < before {
            before = self.outer.len();
            self.outer.retain(|(hold, _)| hold.strong_count() > 0);
        }
        for (up, node) in self.up.iter_mut().zip(&self.nodes) {
            up.extend(node.outbox.take());
        }
    }

    /// One of the objects of a process, which it may drop.
    fn any_object(&mut self, n: usize) -> Option<Object> {
        let place = self.dice.roll(self.objects[n].len());
        let goes = self.dice.roll(4) < self.generous;
        let objects = &mut self.objects[n];
        if goes && place < objects.len() { Some(objects.swap_remove(place)) } else { objects.get(place).cloned() }
    }

    fn step(&mut self) {
        let n = if self.dice.roll(2) == 0 { self.turn } else { self.dice.roll(NODES) };
        let node = Arc::clone(&self.nodes[n]);
        for up in 0..NODES {
            if self.dice.roll(2) == 0 {
                self.read_up(up);
            }
        }
        (0..4).for_each(|_| self.deliver_any(16));
        let what = self.dice.roll(11);
        if node.is_dead() {
            return;
        }
        match what {
            0 | 1 => self.keep(n),
            2..=4 => self.send(n),
            5..=7 => self.read_inner(n),
            8 => self.look(n),
            9 if !self.objects[n].is_empty() => {
                let place = self.dice.roll(self.objects[n].len());
                self.objects[n].swap_remove(place);
            }
            _ if n >= HOSTS && self.dice.roll(12) == 0 => self.die(n),
            _ => {}
        }
        if self.objects[n].len() > self.most {
            self.objects[n].remove(0);
        }
        self.flush();
    }

    fn keep(&mut self, n: usize) {
        let inner = (0..self.dice.roll(3)).filter_map(|_| self.any_object(n)).collect();
        self.keep_with(n, inner);
    }

    fn keep_with(&mut self, n: usize, inner: Vec<Object>) {
        let node = Arc::clone(&self.nodes[n]);
        let bytes = content(self.dice.roll(1000));
        let parts = [&b"envelope"[..], &bytes[..]];
        let cost = Refs::cost(&parts.map(<[u8]>::len));
        assert!(node.refs.reserve_now(cost));
        let holds = inner.iter().map(|one| Arc::clone(&one.hold)).collect();
        let (kept, hold) = node.refs.keep(&[Buffer::of(&parts[..1]), Buffer::of(&parts[1..])], cost, holds).unwrap();
        let inner = inner.into_iter().map(|one| one.value).collect();
        self.values.insert(kept.addr.id, Value { owner: n, cost, inner });
        self.objects[n].push(Object { hold, value: Known { kept, via: 0 } });
    }

    /// Sends a reference to some process, perhaps itself.
    fn send(&mut self, n: usize) {
        let to = self.dice.roll(NODES);
        self.send_to(n, to);
    }

    fn send_to(&mut self, n: usize, to: usize) {
        let node = Arc::clone(&self.nodes[n]);
        let Some(Object { hold, value: Known { kept, via } }) = self.any_object(n) else { return };
        if hold.lost().is_some() {
            return;
        }
        let to = addr(to);
        let carried = node.refs.give(&[hold], &Target::One(to), &node.outbox);
        let mut header = Tell { actor: 5, place: 0 }.header(node.me, to);
        header.set_carries_refs();
        // The reference's note on its value travels beside it.
        let text = [kept.len.to_le_bytes(), via.to_le_bytes()].concat();
        node.outbox.dispatch(Frame::build_plain(header, None, b"take", &Carried::append(&text, &carried)));
    }

    /// Reads a reference from a value that it holds.
    fn read_inner(&mut self, n: usize) {
        let nested = self.objects[n].iter().position(|one| !self.values[&one.value.kept.addr.id].inner.is_empty());
        let Some(outer) = nested.map(|place| self.objects[n].swap_remove(place)) else { return };
        let place = self.dice.roll(self.values[&outer.value.kept.addr.id].inner.len());
        if self.dice.roll(4) >= self.generous {
            self.objects[n].push(outer.clone());
        }
        self.read_from(n, outer, place);
    }

    fn read_from(&mut self, n: usize, outer: Object, place: usize) {
        let node = Arc::clone(&self.nodes[n]);
        let Value { owner, inner, .. } = &self.values[&outer.value.kept.addr.id];
        let Some(inner) = inner.get(place).cloned() else { return };
        let via = inner.via | outer.value.via | 1 << owner;
        let addr = inner.kept.addr;
        let hold = node.refs.held(&addr).unwrap_or_else(|| {
            let from = match self.word {
                Word::Both => outer.value.kept.addr,
                // So that the reader alone tells the owner.
                Word::Readers => addr,
            };
            let hold = node.hold_under(addr, &node.refs.read(addr, from, &node.outbox));
            if self.word == Word::Readers {
                self.outer.push((Arc::downgrade(&hold), outer.hold));
            }
            hold
        });
        self.objects[n].push(Object { hold, value: Known { via, ..inner } });
    }

    /// Opens a value, or asks for it if it cannot be mapped.
    fn look(&mut self, n: usize) {
        let node = Arc::clone(&self.nodes[n]);
        let Some(object) = self.any_object(n) else { return };
        let kept = &object.value.kept;
        match node.refs.view(kept, &object.hold).unwrap() {
            Opened::Here(view) => assert_eq!(view.envelope(), b"envelope"),
            Opened::Lost(_) => assert!(self.is_dead(kept.addr.owner)),
            Opened::Remote => {
                self.calls += 1;
                node.outbox.dispatch(Fetch { id: kept.addr.id, call: self.calls }.frame(node.me, kept.addr.owner));
                self.asked.insert((node.me, self.calls), object);
            }
        }
    }

    fn die(&mut self, n: usize) {
        let node = Arc::clone(&self.nodes[n]);
        node.dead.store(true, Ordering::SeqCst);
        self.objects[n].clear();
        self.asked.retain(|(by, _), _| *by != node.me);
        // The agents get back at once what it held of their memory. The notices come after what it has sent.
        for agent in 0..HOSTS {
            self.nodes[agent].memory.on_death(node.me, None);
            self.watchers.insert((node.me, addr(agent)));
        }
        self.tell_of(node.me);
    }

    /// The watchers of a process that has ended are told, once each, after what it has sent.
    fn tell_of(&mut self, dead: ProcAddr) {
        let n = self.at(dead);
        let watchers: Vec<ProcAddr> = self.watchers.iter().filter(|one| one.0 == dead).map(|one| one.1).collect();
        for watcher in watchers {
            self.watchers.remove(&(dead, watcher));
            let down = Down::notice(dead, &self.ended).frame(dead, watcher);
            self.up[n].push_back(down);
        }
    }

    /// An agent reads one frame of a process on its host.
    fn read_up(&mut self, n: usize) {
        let Some(mut frame) = self.up[n].pop_front() else { return };
        let (from, header) = (addr(n), frame.header);
        if from.host == header.dst.host {
            return self.arrive(frame);
        }
        let agent = self.agent_of(from);
        if agent.copies.answers(&frame, &agent.outbox) {
            return self.flush();
        }
        if header.sharing().shared {
            frame = unshared(frame, &agent.memory);
        }
        let link = (n, self.at(header.dst));
        self.links.entry(link).or_default().push_back(frame);
    }

    /// Some link delivers one frame; a slow one only once in `patience` times.
    fn deliver_any(&mut self, patience: u32) {
        let place = self.dice.roll(self.links.len());
        let Some(link) = self.links.keys().nth(place).copied() else { return };
        if !self.slow.contains(&link) || self.dice.roll(patience) == 0 {
            self.deliver(link);
        }
    }

    /// A link delivers one frame.
    fn deliver(&mut self, link: (usize, usize)) {
        let Some(mut frame) = self.links.get_mut(&link).and_then(VecDeque::pop_front) else { return };
        self.links.retain(|_, frames| !frames.is_empty());
        let header = frame.header;
        if matches!(header.kind, Kind::Reply | Kind::Undeliverable) {
            let agent = self.agent_of(header.dst);
            if agent.copies.awaits(&header) {
                frame = self.localized(frame, &agent);
            }
            frame = agent.copies.share(frame, &agent.outbox);
        }
        self.arrive(frame);
    }

    /// A frame has reached its receiver's host.
    fn arrive(&mut self, frame: Frame) {
        let header = frame.header;
        let to = header.dst;
        if header.carries_refs() {
            let agent = self.agent_of(to);
            for owner in agent.copies.note_carried(&frame) {
                self.watch(owner, agent.me);
            }
        }
        if header.kind == Kind::Watch {
            let Watch { mesh, rank } = Watch::read(&header);
            self.watch(ProcAddr { mesh, rank, host: to.host }, header.src);
        } else if self.is_dead(to) {
            self.bounce(&frame);
        } else {
            self.take_in(self.at(to), frame);
        }
        self.flush();
    }

    fn watch(&mut self, whom: ProcAddr, by: ProcAddr) {
        self.watchers.insert((whom, by));
        if !whom.is_agent() && self.is_dead(whom) {
            self.tell_of(whom);
        }
    }

    /// Bounces a frame, as the agent of a process that has ended does.
    fn bounce(&mut self, frame: &Frame) {
        let header = frame.header;
        if header.is_owed() || header.carries_refs() {
            self.agent_of(header.dst).memory.let_go(frame);
        }
        if let Some(Fetch { call, .. }) = Fetch::read(&header) {
            self.lose(header.src, call, header.dst);
        }
    }

    fn lose(&mut self, by: ProcAddr, call: u64, owner: ProcAddr) {
        assert!(self.is_dead(owner));
        self.asked.remove(&(by, call));
    }

    fn take_in(&mut self, n: usize, frame: Frame) {
        let node = Arc::clone(&self.nodes[n]);
        let header = frame.header;
        match header.kind {
            Kind::Held => {
                let held = Held::read(&frame).unwrap();
                node.refs.on_held(held.call, header.src, held.news, &node.outbox);
            }
            Kind::Tell => {
                let carried = frame.carried();
                self.turn = n;
                let message = Message::plain(frame.clone());
                let envelope = message.envelope();
                let (text, _) = envelope[..TEXT].as_chunks();
                let [len, via] = [text[0], text[1]].map(u64::from_le_bytes);
                for (hold, one) in node.came(&frame).into_iter().zip(carried) {
                    let kept = Kept { addr: RefAddr { owner: one.owner, id: one.id }, at: None, len };
                    self.objects[n].push(Object { hold, value: Known { kept, via } });
                }
            }
            Kind::Fetch => {
                let Fetch { id, call } = Fetch::read(&header).unwrap();
                let mut reply = Reply { actor: 0, call, place: 0, answer: Answer::Value }.header(node.me, header.src);
                let Some(fetched) = node.refs.fetch(id, header.src) else {
                    let asked = Asked::of(&header).unwrap();
                    let answer = Undeliverable::answer(&asked, Undelivered::NoActor);
                    node.outbox.dispatch(answer.frame(node.me, asked.by));
                    return;
                };
                let bytes = match fetched {
                    Fetched::Lent(at, len) => {
                        reply.set_sharing(Sharing { sole: true, shared: true });
                        let parts = [Part::Inline(Bytes::new()), Part::Shared { at, len }];
                        node.outbox.dispatch(Frame::build(reply, None, b"", &parts));
                        return;
                    }
                    // SAFETY: mapped while the view lives, and nobody writes to it.
                    Fetched::Mapped(view) => unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len()) }.to_vec(),
                    Fetched::Heap(bytes) => bytes.to_vec(),
                };
                let parts = [Part::Inline(Bytes::new()), Part::Inline(bytes.into())];
                node.outbox.dispatch(Frame::build(reply, None, b"", &parts));
            }
            Kind::Reply => {
                let call = Meaning::of(&header).unwrap().call();
                let message = Message::new(frame, &node.memory);
                let asked = self.asked.remove(&(node.me, call)).is_some();
                // The notice of the owner's end, also an answer, may be faster than the agent's.
                assert!(asked || self.is_dead(header.src), "one answer for each question");
                let (_, parts) = message.open().unwrap();
                let view = View::of_part(parts.into_iter().next().unwrap()).unwrap();
                assert_eq!(view.envelope(), b"envelope");
                self.answered += 1;
            }
            Kind::Undeliverable => {
                let call = Meaning::of(&header).unwrap().call();
                if let Some(asked) = self.asked.remove(&(node.me, call)) {
                    assert!(self.may_be_gone(&asked.value), "who asks holds it (REF-1)");
                }
            }
            Kind::Down => self.on_down(n, Down::read(&frame).unwrap().who),
            other => panic!("{other:?}"),
        }
    }

    fn on_down(&mut self, n: usize, dead: ProcAddr) {
        let node = Arc::clone(&self.nodes[n]);
        node.refs.on_ends(|one| one == dead, &self.ended);
        for fetch in node.copies.on_ends(|one| one == dead) {
            // Bypasses its own copies.
            let link = (self.at(fetch.header.src), self.at(fetch.header.dst));
            self.links.entry(link).or_default().push_back(fetch);
        }
        let lost = self.asked.iter();
        let lost = lost.filter(|((by, _), asked)| *by == node.me && asked.value.kept.addr.owner == dead);
        let lost: Vec<_> = lost.map(|(key, _)| *key).collect();
        lost.into_iter().for_each(|(by, call)| self.lose(by, call, dead));
    }

    /// Moves large parts into the agent's memory, for the receiver.
    fn localized(&self, frame: Frame, agent: &Node) -> Frame {
        let parts = frame.parts().unwrap();
        let [_, Part::Inline(bytes)] = parts.as_slice() else { return frame };
        let Some(at) = agent.memory.put(bytes, &Target::One(frame.header.dst), 0) else { return frame };
        let mut header = frame.header;
        header.set_sharing(Sharing { sole: true, shared: true });
        let len = bytes.len() as u64;
        Frame::build(header, None, b"", &[Part::Inline(Bytes::new()), Part::Shared { at, len }])
    }

    /// A reference read from a value is lost with that value, unless the owner has heard of its reader by then.
    fn may_be_gone(&self, value: &Known) -> bool {
        self.is_dead(value.kept.addr.owner) || (0..NODES).any(|n| value.via & 1 << n != 0 && self.nodes[n].is_dead())
    }

    /// REF-1 and REF-3, as far as they can be seen at any moment.
    fn check(&self) {
        for (n, node) in self.nodes.iter().enumerate().filter(|(_, node)| !node.is_dead()) {
            for Object { hold, value } in &self.objects[n] {
                let id = value.kept.addr.id;
                let owner = &self.nodes[self.values[&id].owner];
                assert!(self.may_be_gone(value) || owner.refs.keeps(id), "freed while process {n} holds it");
                assert!(hold.lost().is_none() || owner.is_dead());
            }
            let kept = self.values.iter().filter(|(id, value)| value.owner == n && node.refs.keeps(**id));
            let (count, cost) = kept.fold((0, 0), |(count, cost), (_, value)| (count + 1, cost + value.cost));
            assert_eq!(node.refs.kept(), (count, cost), "each is counted once, and freed once");
        }
    }

    /// Delivers everything except what is on some links.
    fn settle_but(&mut self, stuck: &[(usize, usize)]) {
        self.flush();
        while self.up.iter().any(|up| !up.is_empty()) || self.links.keys().any(|link| !stuck.contains(link)) {
            (0..NODES).for_each(|n| self.read_up(n));
            let free: Vec<_> = self.links.keys().copied().filter(|link| !stuck.contains(link)).collect();
            free.into_iter().for_each(|link| self.deliver(link));
        }
    }

    fn settle(&mut self) {
        self.flush();
        while !self.links.is_empty() || self.up.iter().any(|up| !up.is_empty()) {
            let n = self.dice.roll(NODES);
            self.read_up(n);
            self.deliver_any(1);
        }
    }
}

/// What came for another host, as that host gets it.
fn unshared(frame: Frame, memory: &Memory) -> Frame {
    let mut header = frame.header;
    header.set_sharing(Sharing { sole: true, shared: false });
    let parts = Message::new(frame, memory).open().unwrap().1;
    let view = parts.into_iter().next().unwrap();
    let crate::PartData::Shared(part) = view else { panic!("it was shared") };
    // SAFETY: mapped while the part lives, and nobody writes to it.
    let bytes = unsafe { std::slice::from_raw_parts(part.as_ptr(), part.len()) }.to_vec();
    Frame::build(header, None, b"", &[Part::Inline(Bytes::new()), Part::Inline(bytes.into())])
}

fn run(seed: u64, shared: bool, word: Word) -> usize {
    let mut world = World::new(seed, shared, word);
    for step in 0..250 {
        world.step();
        if step % 5 == 0 {
            world.check();
        }
    }
    world.settle();
    world.check();
    assert!(world.asked.is_empty(), "everybody who asked was answered, or told of the owner's end");
    for Object { hold, value } in world.objects.iter().flatten() {
        assert_eq!(hold.lost().is_some(), world.is_dead(value.kept.addr.owner), "REF-4");
    }
    world.objects.iter_mut().for_each(Vec::clear);
    world.settle();
    for node in world.nodes.iter().filter(|node| !node.is_dead()) {
        assert_eq!((node.refs.kept(), node.refs.foreign()), ((0, 0), 0));
        assert_eq!(node.copies.len(), 0, "CPY-3");
        assert!(!node.memory.rest(), "nobody holds any of its memory");
    }
    world.answered
}

/// REF-1, REF-3, REF-4, HLD-1, CPY-1 to CPY-3.
#[test]
fn every_value_is_freed_once_with_its_last_reference_whatever_dies() {
    let answered: usize = (0..300).map(|seed| run(seed, false, Word::Both)).sum();
    assert!(answered > 200, "only {answered} fetches were answered");
}

/// REF-1 breaks if only the reader of a reference tells the owner: the keeper of the value that it was read from may
/// let go sooner.
#[test]
#[should_panic(expected = "while process")]
fn a_readers_word_alone_may_come_too_late() {
    for seed in 0..1000 {
        run(seed, false, Word::Readers);
    }
}

/// One such schedule: A keeps a value, D a second one with a reference to it. C reads that from D's, sends it to E, and
/// drops both. All that C tells A is slow.
#[test]
fn a_reference_read_from_a_value_is_held_until_its_owner_knows_the_reader() {
    for (word, stays) in [(Word::Readers, false), (Word::Both, true)] {
        let [a, d, c, e] = [3, 4, 5, 6];
        let mut world = World::new(0, false, word);
        let held = |world: &World, n: usize| world.nodes[a].refs.kept().0 == 1 && world.nodes[n].refs.foreign() == 1;
        world.keep(a);
        world.send_to(a, d);
        world.objects[a].clear();
        world.settle();
        let inner = world.objects[d].pop().unwrap();
        world.keep_with(d, vec![inner]);
        world.send_to(d, c);
        world.objects[d].clear();
        world.settle();
        let outer = world.objects[c].pop().unwrap();
        world.read_from(c, outer, 0);
        world.send_to(c, e);
        world.objects[c].clear();
        world.settle_but(&[(c, a)]);
        assert_eq!(held(&world, e), stays);
        world.settle();
        assert_eq!(held(&world, e), stays);
        world.objects[e].clear();
        world.settle();
        assert_eq!(world.nodes[a].refs.kept(), (0, 0));
    }
}

/// The limit of REF-1: what a host had not sent when it died is told to nobody.
#[test]
fn a_reference_from_a_host_that_dies_may_be_to_nothing() {
    let [a, b, c] = [3, 4, 5];
    let mut world = World::new(0, false, Word::Both);
    world.keep(a);
    world.send_to(a, b);
    world.objects[a].clear();
    world.settle();
    let id = world.objects[b][0].value.kept.addr.id;
    world.send_to(b, c);
    world.settle_but(&[(b, a)]);
    world.links.clear();
    let host = addr(b).host;
    world.nodes[b].dead.store(true, Ordering::SeqCst);
    world.nodes[a].refs.on_ends(|one| one.host == host, &world.ended);
    assert_eq!(world.objects[c].len(), 1);
    assert!(world.nodes[a].refs.fetch(id, addr(c)).is_none());
}

/// The same with values in shared memory, and copies in the agents' memory.
#[test]
fn values_in_shared_memory_are_freed_once_whatever_dies() {
    let answered: usize = (0..30).map(|seed| run(seed, true, Word::Both)).sum();
    assert!(answered > 30, "only {answered} fetches were answered");
}

/// CPY-2: the process for which a value was fetched dies.
#[test]
fn a_value_is_fetched_again_for_the_next_one_that_waits() {
    let (agent, outbox) = (addr(1), Outbox::default());
    let memory = Arc::new(Memory::new(16 << 20, 7));
    let copies = RemoteValues::new(agent, &memory);
    let (owner, first, second, third) = (addr(3), addr(4), addr(7), ProcAddr { rank: 9, ..addr(4) });
    let fetch = |by, call| Fetch { id: 4, call }.frame(by, owner);
    assert!(!copies.answers(&fetch(first, 11), &outbox), "it goes on its way");
    assert!(copies.answers(&fetch(second, 12), &outbox) && copies.answers(&fetch(third, 13), &outbox));
    let again = copies.on_ends(|one| one == first);
    let asked: Vec<_> =
        again.iter().map(|frame| (frame.header.src, Fetch::read(&frame.header).unwrap().call)).collect();
    assert_eq!(asked, [(second, 12)]);
    let reply = |by, call| {
        let header = Reply { actor: 0, call, place: 0, answer: Answer::Value }.header(owner, by);
        Frame::build(header, None, b"", &[Part::Inline(Bytes::new()), Part::Inline(Bytes::from_static(b"value"))])
    };
    assert!(!copies.awaits(&reply(first, 11).header) && copies.awaits(&reply(second, 12).header));
    drop(copies.share(reply(second, 12), &outbox));
    let others = outbox.take();
    let answered: Vec<_> = others.iter().map(|frame| (frame.header.dst, frame.header.src)).collect();
    assert_eq!(answered, [(third, owner)]);
    // Copies outside this host's memory cannot stay.
    assert_eq!(copies.len(), 0);
    assert!(copies.on_ends(|one| one == owner).is_empty());
}
