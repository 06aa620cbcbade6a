//! Values, references and copies of several processes on two hosts, without a runtime: random schedules of keeping, sending,
//! fetching, dropping and dying, over a network that keeps the order of what one process sends.

use super::dice::Dice;
use super::outbox::Outbox;
use crate::message::Message;
use crate::reactor::Reactor;
use crate::refs::{Around, Fetched, Hold, Kept, Opened, RefAddr, RefCounter, Refs, View};
use crate::runtime::{Dispatch as _, RemoteValues};
use crate::shm::Memory;
use crate::spin_board::SpinBoard;
use crate::standing::Standing;
use bytes::Bytes;
use mesh_proto::control::{Down, Fetch, Held, Watch};
use mesh_proto::messages::{Answer, Meaning, Reply, Tell};
use mesh_proto::{Carried, EndReason, Ended, Frame, IdMaker, Kind, Part, ProcAddr, Sharing, Target, Ticket};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// What values of one process may take together.
const BUDGET: u64 = 1 << 20;

#[derive(Debug)]
struct Node {
    me: ProcAddr,
    refs: Refs,
    /// Used at agents alone.
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
        let hold = |one: Carried| self.hold_under(RefAddr { owner: one.owner, id: one.id }, one.ticket, None);
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

    fn hold_under(&self, addr: RefAddr, ticket: Ticket, within: Option<Arc<Hold>>) -> Arc<Hold> {
        let (hold, fresh) = self.refs.hold(addr, ticket, within);
        if fresh {
            self.outbox.dispatch(Watch::of(addr.owner).frame(self.me, ProcAddr::agent(addr.owner.host)));
        }
        hold
    }
}

/// What a process has in its variables: what it holds a value by, and what it knows of it.
type Object = (Arc<Hold>, Kept);

struct World {
    dice: Dice,
    nodes: Vec<Arc<Node>>,
    objects: Vec<Vec<Object>>,
    /// What each process has sent and what was not delivered yet.
    ways: Vec<VecDeque<Frame>>,
    values: BTreeMap<u64, Value>,
    /// By the process that has ended, or may: who asks to be told.
    watchers: BTreeSet<(ProcAddr, ProcAddr)>,
    /// Fetches that wait for an answer: by whom, and for which value.
    asked: BTreeMap<(ProcAddr, u64), RefAddr>,
    answered: usize,
    calls: u64,
    ended: Arc<Ended>,
}

struct Value {
    owner: usize,
    cost: u64,
    inner: Vec<Kept>,
}

/// Three processes on each of two hosts. The first two are the agents, which do not end.
fn addr(node: usize) -> ProcAddr {
    let host = (node % 2) as u32;
    if node < 2 { ProcAddr::agent(host) } else { ProcAddr { mesh: 7, rank: node as u32, host } }
}

fn content(id_like: u64) -> Vec<u8> {
    vec![(id_like % 251) as u8; 100 + (id_like % 900) as usize]
}

impl World {
    fn new(seed: u64, shared: bool) -> Self {
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
        Self {
            dice: Dice(seed),
            nodes: (0..6).map(node).collect(),
            objects: (0..6).map(|_| Vec::new()).collect(),
            ways: (0..6).map(|_| VecDeque::new()).collect(),
            values: BTreeMap::new(),
            watchers: BTreeSet::new(),
            asked: BTreeMap::new(),
            answered: 0,
            calls: 1,
            ended: Arc::new(Ended::unmade(EndReason::LongAgo)),
        }
    }

    fn at(&self, who: ProcAddr) -> usize {
        (0..6).find(|n| addr(*n) == who).unwrap()
    }

    fn is_dead(&self, who: ProcAddr) -> bool {
        self.nodes[self.at(who)].is_dead()
    }

    fn agent_of(&self, who: ProcAddr) -> Arc<Node> {
        Arc::clone(&self.nodes[who.host as usize])
    }

    /// Puts what the processes have said on its way.
    fn flush(&mut self) {
        for (way, node) in self.ways.iter_mut().zip(&self.nodes) {
            way.extend(node.outbox.take());
        }
    }

    fn any_object(&mut self, n: usize) -> Option<(usize, Object)> {
        let place = self.dice.roll(self.objects[n].len());
        self.objects[n].get(place).cloned().map(|object| (place, object))
    }

    fn step(&mut self) {
        let n = self.dice.roll(6_usize);
        let node = Arc::clone(&self.nodes[n]);
        let what = self.dice.roll(20);
        if what < 9 {
            return self.deliver(n);
        }
        if node.is_dead() {
            return;
        }
        match what {
            9 | 10 => self.keep(n),
            11..=13 => self.send(n),
            14 => self.read_inner(n),
            15 | 16 => self.look(n),
            17 | 18 => {
                if let Some((place, _)) = self.any_object(n) {
                    self.objects[n].swap_remove(place);
                }
            }
            _ if n >= 2 && self.dice.roll(12) == 0 => self.die(n),
            _ => {}
        }
        self.flush();
    }

    fn keep(&mut self, n: usize) {
        let node = Arc::clone(&self.nodes[n]);
        let inner: Vec<Object> = (0..self.dice.roll(3)).filter_map(|_| Some(self.any_object(n)?.1)).collect();
        let bytes = content(self.dice.roll(1000));
        let parts = [&b"envelope"[..], &bytes[..]];
        let cost = Refs::cost(&parts.map(<[u8]>::len));
        assert!(node.refs.reserve_now(cost));
        let holds = inner.iter().map(|one| Arc::clone(&one.0)).collect();
        let (kept, hold) = node.refs.keep(&parts, cost, holds).unwrap();
        let inner = inner.into_iter().map(|one| one.1).collect();
        self.values.insert(kept.addr.id, Value { owner: n, cost, inner });
        self.objects[n].push((hold, kept));
    }

    /// Sends a reference to some process, itself perhaps.
    fn send(&mut self, n: usize) {
        let node = Arc::clone(&self.nodes[n]);
        let Some((_, (hold, kept))) = self.any_object(n) else { return };
        if hold.lost().is_some() {
            return;
        }
        let to = addr(self.dice.roll(6));
        let carried = node.refs.give(&[hold], &Target::One(to), &node.outbox);
        let mut header = Tell { actor: 5, place: 0 }.header(node.me, to);
        header.set_carries_refs();
        // What a reference says of where its value lies travels beside it.
        let len = kept.len.to_le_bytes();
        node.outbox.dispatch(Frame::build_plain(header, None, b"take", &Carried::append(&len, &carried)));
    }

    /// Reads a reference from a value that it holds.
    fn read_inner(&mut self, n: usize) {
        let node = Arc::clone(&self.nodes[n]);
        let Some((_, (hold, kept))) = self.any_object(n) else { return };
        let inner = &self.values[&kept.addr.id].inner;
        let Some(inner) = inner.get(self.dice.roll(inner.len())).cloned() else { return };
        let inner_hold = node.refs.held(&inner.addr).unwrap_or_else(|| {
            let ticket = node.refs.give_to_self(inner.addr, &node.outbox);
            node.hold_under(inner.addr, ticket, Some(hold))
        });
        self.objects[n].push((inner_hold, inner));
    }

    /// Opens a value, or asks for it where it cannot be mapped.
    fn look(&mut self, n: usize) {
        let node = Arc::clone(&self.nodes[n]);
        let Some((_, (hold, kept))) = self.any_object(n) else { return };
        match node.refs.view(&kept, &hold).unwrap() {
            Opened::Here(view) => assert_eq!(view.envelope(), b"envelope"),
            Opened::Lost(_) => assert!(self.is_dead(kept.addr.owner)),
            Opened::Remote => {
                self.calls += 1;
                self.asked.insert((node.me, self.calls), kept.addr);
                node.outbox.dispatch(Fetch { id: kept.addr.id, call: self.calls }.frame(node.me, kept.addr.owner));
            }
        }
    }

    fn die(&mut self, n: usize) {
        let node = Arc::clone(&self.nodes[n]);
        node.dead.store(true, Ordering::SeqCst);
        self.objects[n].clear();
        self.asked.retain(|(by, _), _| *by != node.me);
        // Its agents hear at once, all others behind what it has sent.
        for agent in 0..2 {
            self.nodes[agent].memory.on_death(node.me, None);
            self.watchers.insert((node.me, addr(agent)));
        }
        self.tell_of(node.me);
    }

    /// Those who watch a process that has ended are told, once each, behind what it has sent.
    fn tell_of(&mut self, dead: ProcAddr) {
        let n = self.at(dead);
        let watchers: Vec<ProcAddr> = self.watchers.iter().filter(|one| one.0 == dead).map(|one| one.1).collect();
        for watcher in watchers {
            self.watchers.remove(&(dead, watcher));
            let down = Down::notice(dead, &self.ended).frame(dead, watcher);
            self.ways[n].push_back(down);
        }
    }

    fn deliver(&mut self, n: usize) {
        let Some(mut frame) = self.ways[n].pop_front() else { return };
        let (from, header) = (addr(n), frame.header);
        let to = header.dst;
        if from.host != to.host {
            let agent = self.agent_of(from);
            if agent.copies.answers(&frame, &agent.outbox) {
                return self.flush();
            }
            if header.sharing().shared {
                frame = unshared(frame, &agent.memory);
            }
            let agent = self.agent_of(to);
            if matches!(header.kind, Kind::Reply | Kind::Undeliverable) {
                if agent.copies.awaits(&header) {
                    frame = self.localized(frame, &agent);
                }
                frame = agent.copies.share(frame, &agent.outbox);
            }
        }
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

    /// As the agent of a process does that has ended.
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
                let len = u64::from_le_bytes(*Message::plain(frame.clone()).envelope().first_chunk().unwrap());
                for (hold, one) in node.came(&frame).into_iter().zip(carried) {
                    let addr = RefAddr { owner: one.owner, id: one.id };
                    self.objects[n].push((hold, Kept { addr, at: None, len }));
                }
            }
            Kind::Fetch => {
                let Fetch { id, call } = Fetch::read(&header).unwrap();
                let mut reply = Reply { actor: 0, call, place: 0, answer: Answer::Value }.header(node.me, header.src);
                let bytes = match node.refs.fetch(id, header.src).expect("who asks holds it (REF-1)") {
                    Fetched::Lent(at, len) => {
                        reply.set_sharing(Sharing { sole: true, shared: true });
                        let parts = [Part::Inline(Bytes::new()), Part::Shared { at, len }];
                        node.outbox.dispatch(Frame::build(reply, None, b"", &parts));
                        return;
                    }
                    // SAFETY: mapped while the view lives, and written by nobody.
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
                // The notice of the owner's end, which is an answer too, may be quicker than the agent's.
                assert!(asked || self.is_dead(header.src), "one answer for each question");
                let (_, parts) = message.open().unwrap();
                let view = View::of_part(parts.into_iter().next().unwrap()).unwrap();
                assert_eq!(view.envelope(), b"envelope");
                self.answered += 1;
            }
            Kind::Down => self.on_down(n, Down::read(&frame).unwrap().who),
            other => panic!("{other:?}"),
        }
    }

    fn on_down(&mut self, n: usize, dead: ProcAddr) {
        let node = Arc::clone(&self.nodes[n]);
        node.refs.on_ends(|one| one == dead, &self.ended);
        for fetch in node.copies.on_ends(|one| one == dead) {
            // Past its own copies, and in order with what it sends.
            let owner = self.at(fetch.header.dst);
            let to = Arc::clone(&self.nodes[owner]);
            if to.is_dead() {
                self.bounce(&fetch);
            } else {
                self.take_in(owner, fetch);
            }
        }
        let lost = self.asked.iter().filter(|((by, _), value)| *by == node.me && value.owner == dead);
        let lost: Vec<_> = lost.map(|(key, _)| *key).collect();
        lost.into_iter().for_each(|(by, call)| self.lose(by, call, dead));
    }

    /// Its large parts are put into the agent's memory, for its receiver.
    fn localized(&self, frame: Frame, agent: &Node) -> Frame {
        let parts = frame.parts().unwrap();
        let [_, Part::Inline(bytes)] = parts.as_slice() else { return frame };
        let Some(at) = agent.memory.put(bytes, &Target::One(frame.header.dst), 0) else { return frame };
        let mut header = frame.header;
        header.set_sharing(Sharing { sole: true, shared: true });
        let len = bytes.len() as u64;
        Frame::build(header, None, b"", &[Part::Inline(Bytes::new()), Part::Shared { at, len }])
    }

    /// REF-1 and REF-3, as far as they can be seen at any moment.
    fn check(&self) {
        for (n, node) in self.nodes.iter().enumerate().filter(|(_, node)| !node.is_dead()) {
            for (hold, kept) in &self.objects[n] {
                let owner = &self.nodes[self.values[&kept.addr.id].owner];
                assert!(owner.is_dead() || owner.refs.keeps(kept.addr.id), "freed while process {n} holds it");
                assert!(hold.lost().is_none() || owner.is_dead());
            }
            let kept = self.values.iter().filter(|(id, value)| value.owner == n && node.refs.keeps(**id));
            let (count, cost) = kept.fold((0, 0), |(count, cost), (_, value)| (count + 1, cost + value.cost));
            assert_eq!(node.refs.kept(), (count, cost), "each is counted once, and freed once");
        }
    }

    fn settle(&mut self) {
        self.flush();
        while self.ways.iter().any(|way| !way.is_empty()) {
            let n = self.dice.roll(6);
            self.deliver(n);
        }
    }
}

/// What came for another host, as that gets it.
fn unshared(frame: Frame, memory: &Memory) -> Frame {
    let mut header = frame.header;
    header.set_sharing(Sharing { sole: true, shared: false });
    let parts = Message::new(frame, memory).open().unwrap().1;
    let view = parts.into_iter().next().unwrap();
    let crate::PartData::Shared(part) = view else { panic!("it was shared") };
    // SAFETY: mapped while the part lives, and written by nobody.
    let bytes = unsafe { std::slice::from_raw_parts(part.as_ptr(), part.len()) }.to_vec();
    Frame::build(header, None, b"", &[Part::Inline(Bytes::new()), Part::Inline(bytes.into())])
}

fn run(seed: u64, shared: bool) -> usize {
    let mut world = World::new(seed, shared);
    for step in 0..250 {
        world.step();
        if step % 5 == 0 {
            world.check();
        }
    }
    world.settle();
    world.check();
    assert!(world.asked.is_empty(), "everybody who asked was answered, or told of the owner's end");
    for n in 0..6 {
        for (hold, kept) in &world.objects[n] {
            assert_eq!(hold.lost().is_some(), world.is_dead(kept.addr.owner), "REF-4");
        }
    }
    for n in 0..6 {
        world.objects[n].clear();
    }
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
    let answered: usize = (0..200).map(|seed| run(seed, false)).sum();
    assert!(answered > 200, "only {answered} fetches were answered");
}

/// The same with values in shared memory, and copies in that of the agents.
#[test]
fn values_in_shared_memory_are_freed_once_whatever_dies() {
    let answered: usize = (0..30).map(|seed| run(seed, true)).sum();
    assert!(answered > 30, "only {answered} fetches were answered");
}

/// CPY-2: the process dies that a value was fetched for.
#[test]
fn a_value_is_fetched_again_for_the_next_one_that_waits() {
    let (agent, outbox) = (addr(1), Outbox::default());
    let memory = Arc::new(Memory::new(16 << 20, 7));
    let copies = RemoteValues::new(agent, &memory);
    let (owner, first, second, third) = (addr(2), addr(3), addr(5), ProcAddr { rank: 9, ..addr(3) });
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
    // Nothing can stay that is in no memory of this host.
    assert_eq!(copies.len(), 0);
    assert!(copies.on_ends(|one| one == owner).is_empty());
}
