//! Some hosts, each with a gateway, and a failing network, in virtual time.
//!
//! Connections are like TCP: what is sent arrives in order, late while the path is cut, and is lost when the connection
//! breaks.

use super::dice::Dice;
use mesh_proto::control::{Attachment, Introduction, Terms};
use mesh_proto::hosts::gateway::{Action, Caller, Event, Gateway, GatewayOptions, Missed, Wire};
use mesh_proto::hosts::{Arrival, Cargo, Farewell, Fate, HostSet, Packet, PacketKind, Topology};
use mesh_proto::{Frame, Header, HostNo, Kind, Part, ProcAddr, Target};
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// How many packets a connection holds.
const ROOM: usize = 8;

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct End {
    id: usize,
    /// The end's own host, and the other.
    own: HostNo,
    peer: HostNo,
}

/// A connection, as seen by the host at one end.
#[derive(Debug)]
struct Side {
    host: HostNo,
    is_open: bool,
    heard: Duration,
    sent: Duration,
    /// What is in flight to this end, in order of arrival. `None` is the end of the connection.
    under_way: VecDeque<Option<Packet>>,
}

/// A connection.
#[derive(Debug)]
struct Line([Side; 2]);

impl Line {
    fn side(&self, host: HostNo) -> &Side {
        &self.0[usize::from(self.0[0].host != host)]
    }

    fn side_mut(&mut self, host: HostNo) -> &mut Side {
        &mut self.0[usize::from(self.0[0].host != host)]
    }

    fn is_between(&self, one: HostNo, other: HostNo) -> bool {
        let [a, b] = &self.0;
        (a.host, b.host) == (one, other) || (a.host, b.host) == (other, one)
    }
}

/// The network as one host's gateway sees it.
#[derive(Debug, Default)]
struct Net {
    lines: Rc<RefCell<Vec<Line>>>,
    /// The ends that were sent on since the world last looked.
    touched: RefCell<Vec<End>>,
    woken: Cell<bool>,
}

impl Wire for Net {
    type Connection = End;

    fn send(&self, end: &End, packet: &Packet, now: Duration) {
        let mut lines = self.lines.borrow_mut();
        let line = &mut lines[end.id];
        let own = line.side_mut(end.own);
        own.sent = now;
        if own.is_open {
            line.side_mut(end.peer).under_way.push_back(Some(packet.clone()));
            self.touched.borrow_mut().push(*end);
        }
    }

    fn is_open(&self, end: &End) -> bool {
        self.lines.borrow()[end.id].side(end.own).is_open
    }

    fn has_room(&self, end: &End) -> bool {
        self.is_open(end) && self.lines.borrow()[end.id].side(end.peer).under_way.len() < ROOM
    }

    fn heard_at(&self, end: &End) -> Duration {
        self.lines.borrow()[end.id].side(end.own).heard
    }

    fn sent_at(&self, end: &End) -> Duration {
        self.lines.borrow()[end.id].side(end.own).sent
    }

    fn is_same(&self, one: &End, other: &End) -> bool {
        one.id == other.id
    }

    fn wake(&self) {
        self.woken.set(true);
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    /// Besides the controller.
    pub(crate) hosts: u32,
    pub(crate) fan_out: u32,
    pub(crate) window: u64,
    pub(crate) hold: u64,
    pub(crate) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// Something in flight reaches this host's end.
    Arrives {
        end: End,
    },
    /// This end accepts more.
    Takes {
        end: End,
    },
    Tick,
    /// An attempt to connect has reached the other side.
    Knocks {
        to: HostNo,
        until: Duration,
    },
    /// The attempt has timed out.
    Missed {
        to: HostNo,
    },
    Resumes,
}

struct Node {
    gateway: Gateway<Net>,
    net: Net,
    incarnation: u64,
    begun: bool,
    over: bool,
    alive: bool,
    paused_until: Duration,
    /// When its clock stands still: from and until.
    asleep: [Duration; 2],
    /// How far its clock is ahead of the world's, and behind it.
    ahead: Duration,
    behind: Duration,
    tick_at: Option<Duration>,
    /// The hosts of whose death it has heard.
    dead: BTreeSet<HostNo>,
    /// The hosts above it.
    above: Vec<HostNo>,
    /// When a host above it could last reach it.
    reached: Duration,
}

/// All hosts, and what is promised about them.
pub(crate) struct World {
    setup: Setup,
    name: u64,
    dice: Dice,
    now: Duration,
    heap: BinaryHeap<Reverse<(Duration, u64, HostNo, Happening)>>,
    turns: u64,
    nodes: Vec<Node>,
    lines: Rc<RefCell<Vec<Line>>>,
    /// Until when nothing passes from one host to another, for all pairs.
    cuts: Vec<Duration>,
    /// Messages by sender and receiver: how many were sent, and how many have arrived.
    book: BTreeMap<(HostNo, HostNo), (u64, u64)>,
    /// The hosts that the controller has declared dead, and why.
    verdicts: BTreeMap<HostNo, String>,
}

impl World {
    pub(crate) fn new(setup: Setup, name: u64) -> Self {
        let lines = Rc::<RefCell<Vec<Line>>>::default();
        let mut tree = Topology::new(0);
        tree.add_group(1, setup.hosts, setup.fan_out);
        let node = |host: HostNo| Node {
            gateway: Gateway::new(host, u64::from(host) + 100),
            net: Net { lines: Rc::clone(&lines), ..Net::default() },
            incarnation: u64::from(host) + 100,
            begun: host == 0,
            over: false,
            alive: true,
            paused_until: Duration::ZERO,
            asleep: [Duration::ZERO; 2],
            ahead: ms(1),
            behind: Duration::ZERO,
            tick_at: None,
            dead: BTreeSet::new(),
            above: (0..=setup.hosts).filter(|above| tree.is_above(*above, host)).collect(),
            reached: Duration::ZERO,
        };
        let nodes: Vec<Node> = (0..=setup.hosts).map(node).collect();
        let cuts = vec![Duration::ZERO; nodes.len() * nodes.len()];
        Self {
            setup,
            name,
            dice: Dice(setup.seed),
            now: Duration::ZERO,
            heap: BinaryHeap::new(),
            turns: 0,
            nodes,
            lines: Rc::clone(&lines),
            cuts,
            book: BTreeMap::new(),
            verdicts: BTreeMap::new(),
        }
    }

    /// How many hosts there are, including the controller.
    pub(crate) fn hosts(&self) -> u32 {
        self.setup.hosts + 1
    }

    pub(crate) fn window(&self) -> u64 {
        self.setup.window
    }

    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    pub(crate) fn events(&self) -> u64 {
        self.turns
    }

    pub(crate) fn is_over(&self, host: HostNo) -> bool {
        self.nodes[host as usize].over
    }

    pub(crate) fn attach(&mut self) {
        let Setup { hosts, fan_out, window, hold, .. } = self.setup;
        let options = GatewayOptions { window: ms(window), fan_out, patience: Duration::ZERO, hold: ms(hold) };
        let addresses: Vec<Option<String>> = (1..=hosts).map(|host| Some(format!("host{host}"))).collect();
        self.nodes[0].gateway.attach(1, &addresses, &options);
        self.happens(0, Event::Proven(HostSet::range(1, hosts)));
    }

    // Faults.

    pub(crate) fn cut_one_way(&mut self, from: HostNo, to: HostNo, long: u64) {
        let until = self.now + ms(long);
        let cut = self.cut_at(from, to);
        self.cuts[cut] = until.max(self.cuts[cut]);
    }

    fn cut_at(&self, from: HostNo, to: HostNo) -> usize {
        from as usize * self.nodes.len() + to as usize
    }

    pub(crate) fn cut(&mut self, one: HostNo, other: HostNo, long: u64) {
        self.cut_one_way(one, other, long);
        self.cut_one_way(other, one, long);
    }

    /// A host does nothing for a while. If it sleeps, its clock stands still.
    pub(crate) fn pause(&mut self, host: HostNo, long: u64, sleeps: bool) {
        let node = &mut self.nodes[host as usize];
        let until = (self.now + ms(long)).max(node.paused_until);
        if sleeps {
            node.asleep = [self.now.max(node.paused_until), until];
            node.behind += node.asleep[1] - node.asleep[0];
        }
        node.paused_until = until;
        self.push(until, host, Happening::Resumes);
    }

    /// A host's clock leaps.
    pub(crate) fn step(&mut self, host: HostNo, by: u64) {
        self.nodes[host as usize].ahead += ms(by);
        self.push(self.now, host, Happening::Resumes);
    }

    /// Connections between two hosts break: what is in flight is lost.
    pub(crate) fn break_connections(&mut self, one: HostNo, other: HostNo) {
        let between: Vec<usize> = {
            let lines = self.lines.borrow();
            (0..lines.len()).filter(|id| one != other && lines[*id].is_between(one, other)).collect()
        };
        for id in between {
            for (own, peer) in [(one, other), (other, one)] {
                self.lines.borrow_mut()[id].side_mut(own).under_way = VecDeque::from([None]);
                self.push(self.now + ms(1), own, Happening::Arrives { end: End { id, own, peer } });
            }
        }
    }

    /// A host's process ends at once; its kernel reports that where it can.
    pub(crate) fn kill(&mut self, host: HostNo) {
        let node = &mut self.nodes[host as usize];
        (node.alive, node.over) = (false, true);
        self.close_all(host);
    }

    /// All faults are over; the dead stay dead.
    pub(crate) fn heal(&mut self) {
        self.cuts.fill(Duration::ZERO);
        for host in 0..self.hosts() {
            let node = &mut self.nodes[host as usize];
            // A host that was to sleep for longer has slept for less.
            node.behind -= node.asleep[1].saturating_sub(node.asleep[0].max(self.now));
            node.asleep[1] = node.asleep[1].min(self.now);
            node.paused_until = node.paused_until.min(self.now);
            self.push(self.now, host, Happening::Resumes);
        }
    }

    /// Every host sends something to some others.
    pub(crate) fn chatter(&mut self, each: u32) {
        for from in 0..self.hosts() {
            for _ in 0..each {
                let to = self.dice.roll(self.hosts());
                let node = &self.nodes[from as usize];
                let speaks = node.begun && !node.over && self.now >= node.paused_until;
                // A host that was never heard of is unknown.
                if from != to && speaks && self.nodes[to as usize].begun {
                    self.say(from, to);
                }
            }
        }
    }

    fn say(&mut self, from: HostNo, to: HostNo) {
        let (sent, _) = self.book.entry((from, to)).or_default();
        *sent += 1;
        let number = *sent;
        let header = Header::new(Kind::Tell, ProcAddr::agent(from), ProcAddr { mesh: 9, rank: 0, host: to });
        let frame = Frame::build_plain(header, None, b"", &number.to_le_bytes());
        self.post(from, &frame, HostSet::one(to));
    }

    fn post(&mut self, from: HostNo, frame: &Frame, hosts: HostSet) {
        let now = self.clock(from);
        let Node { gateway, net, .. } = &mut self.nodes[from as usize];
        gateway.post(Cargo::of(frame), hosts, &mut HostSet::default(), now, net);
        gateway.arm(net);
        self.after(from);
    }

    // The event loop.

    fn push(&mut self, at: Duration, host: HostNo, happening: Happening) {
        self.turns += 1;
        self.heap.push(Reverse((at, self.turns, host, happening)));
    }

    fn clock(&self, host: HostNo) -> Duration {
        let node = &self.nodes[host as usize];
        self.now + node.ahead - node.behind.min(self.now)
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, long: u64) {
        let end = self.now + ms(long);
        while let Some(Reverse((at, ..))) = self.heap.peek().filter(|Reverse((at, ..))| *at <= end) {
            self.now = self.now.max(*at);
            let Some(Reverse((_, _, host, happening))) = self.heap.pop() else { break };
            let node = &self.nodes[host as usize];
            if self.now < node.paused_until {
                // It is done when the host resumes; ticks come last, after everything that arrived was read.
                let late = u64::from(happening == Happening::Tick || happening == Happening::Resumes);
                let at = node.paused_until + Duration::from_micros(late);
                self.push(at, host, happening);
                continue;
            }
            if node.alive {
                self.turn(host, happening);
                self.note_reach(host);
            }
        }
        self.now = end;
    }

    fn turn(&mut self, host: HostNo, happening: Happening) {
        match happening {
            Happening::Arrives { end } => self.arrives(end),
            Happening::Takes { end } => self.happens(end.own, Event::Writable { host: end.peer }),
            Happening::Tick | Happening::Resumes => {
                let node = &mut self.nodes[host as usize];
                if happening == Happening::Tick && node.tick_at.is_none_or(|at| at > self.now) {
                    return;
                }
                node.tick_at = None;
                if node.begun && !node.over {
                    self.happens(host, Event::Tick);
                    let now = self.clock(host);
                    let next = self.nodes[host as usize].gateway.next_tick(now);
                    self.tick_in(host, next.saturating_sub(now));
                }
            }
            Happening::Knocks { to, until } => self.knocks(host, to, until),
            Happening::Missed { to } => {
                let missed = Missed::for_now("no answer");
                self.happens(host, Event::Missed { host: to, missed });
            }
        }
    }

    fn tick_in(&mut self, host: HostNo, long: Duration) {
        if long > ms(1_000_000) {
            return;
        }
        let at = self.now + long;
        let node = &mut self.nodes[host as usize];
        if node.tick_at.is_none_or(|before| at < before) {
            node.tick_at = Some(at);
            self.push(at, host, Happening::Tick);
        }
    }

    fn is_cut(&self, from: HostNo, to: HostNo) -> Option<Duration> {
        Some(self.cuts[self.cut_at(from, to)]).filter(|until| *until > self.now)
    }

    /// Sends what the gateway has put into its connections.
    fn after(&mut self, host: HostNo) {
        let touched = self.nodes[host as usize].net.touched.take();
        for end in touched {
            let late = Duration::from_micros(200 + self.dice.roll(400_u64));
            let there = End { id: end.id, own: end.peer, peer: end.own };
            self.push(self.now + late, end.peer, Happening::Arrives { end: there });
        }
        if self.nodes[host as usize].net.woken.take() {
            self.tick_in(host, Duration::from_micros(200));
        }
    }

    fn happens(&mut self, host: HostNo, event: Event<End>) {
        let now = self.clock(host);
        let Node { gateway, net, .. } = &mut self.nodes[host as usize];
        let actions = gateway.on(event, now, net);
        self.after(host);
        for action in actions {
            self.act(host, action);
        }
    }

    fn act(&mut self, host: HostNo, action: Action<End>) {
        match action {
            Action::Dial { host: to, window, .. } => {
                let timeout = window.clamp(ms(200), ms(5000));
                let until = self.now + timeout;
                let late = ms(1 + self.dice.roll(3_u64));
                self.push(self.now + late, host, Happening::Knocks { to, until });
            }
            Action::Close { connection, farewell } => {
                if let Some(farewell) = farewell {
                    self.put(connection, Some(farewell.packet(host)));
                }
                self.close(connection);
            }
            Action::Send(frame) => {
                let to = match frame.target().unwrap() {
                    Target::Many(..) => frame.target().unwrap().procs().map(|agent| agent.host).collect(),
                    _ => HostSet::one(frame.header.dst.host),
                };
                self.post(host, &frame, to);
            }
            Action::Died { host: dead, end, .. } => {
                assert!(self.nodes[host as usize].dead.insert(dead), "{}: {host} heard twice of {dead}", self.name);
                if host == 0 {
                    let before = self.verdicts.insert(dead, end.to_string());
                    assert_eq!(before, None, "{}: {dead} was declared dead twice", self.name);
                }
                let word = self.verdicts.get(&dead);
                assert_eq!(word, Some(&end.to_string()), "{}: not the controller's word at {host}", self.name);
            }
            Action::End { parting, why, .. } => {
                assert!(!self.nodes[host as usize].over, "{}: {host} has ended twice", self.name);
                self.nodes[host as usize].over = true;
                let ends = self.ends_of(host);
                let farewell = Farewell { parting, text: why }.packet(host);
                ends.into_iter().for_each(|end| self.put(end, Some(farewell.clone())));
                self.close_all(host);
            }
        }
    }

    // Connections.

    fn ends_of(&self, host: HostNo) -> Vec<End> {
        let lines = self.lines.borrow();
        let end = |(id, Line([a, b])): (usize, &Line)| {
            let (own, peer) = if a.host == host { (a, b) } else { (b, a) };
            (own.host == host && own.is_open).then_some(End { id, own: host, peer: peer.host })
        };
        lines.iter().enumerate().filter_map(end).collect()
    }

    fn put(&mut self, end: End, what: Option<Packet>) {
        self.lines.borrow_mut()[end.id].side_mut(end.peer).under_way.push_back(what);
        let late = Duration::from_micros(200 + self.dice.roll(400_u64));
        let there = End { id: end.id, own: end.peer, peer: end.own };
        self.push(self.now + late, end.peer, Happening::Arrives { end: there });
    }

    /// Closes an end: the other end is told after everything that was sent.
    fn close(&mut self, end: End) {
        let was_open = std::mem::replace(&mut self.lines.borrow_mut()[end.id].side_mut(end.own).is_open, false);
        if was_open {
            self.put(end, None);
        }
    }

    fn close_all(&mut self, host: HostNo) {
        self.ends_of(host).into_iter().for_each(|end| self.close(end));
    }

    fn arrives(&mut self, end: End) {
        if let Some(until) = self.is_cut(end.peer, end.own) {
            // Resent once possible, as late as TCP does.
            let late = ms(self.dice.roll(1 + self.setup.window / 20));
            return self.push(until + late, end.own, Happening::Arrives { end });
        }
        let host = end.own;
        let now = self.clock(host);
        let (next, left) = {
            let mut lines = self.lines.borrow_mut();
            let side = lines[end.id].side_mut(host);
            let next = side.under_way.pop_front();
            if !side.is_open {
                return;
            }
            if matches!(next, Some(Some(_))) {
                side.heard = now;
            }
            (next, side.under_way.len())
        };
        if left + 1 == ROOM {
            let there = End { id: end.id, own: end.peer, peer: host };
            self.push(self.now, end.peer, Happening::Takes { end: there });
        }
        match next {
            None => {}
            Some(None) => {
                self.close(end);
                self.happens(host, Event::Closed { host: end.peer, connection: end, why: "it ended".to_owned() });
            }
            Some(Some(packet)) if packet.kind == PacketKind::Farewell => {
                let farewell = Farewell::read(&packet).unwrap();
                self.happens(host, Event::Parted { host: end.peer, farewell });
            }
            Some(Some(packet)) => {
                let mut arrivals = Vec::new();
                let Node { gateway, net, .. } = &mut self.nodes[host as usize];
                gateway.on_packet(&end, packet, now, net, &mut arrivals);
                gateway.packets_done(now, net);
                self.after(host);
                arrivals.into_iter().for_each(|arrival| self.deliver(host, arrival));
            }
        }
    }

    fn deliver(&mut self, host: HostNo, arrival: Arrival) {
        let Arrival::Piece { body, .. } = arrival else { return };
        let frame = Frame::from_pieces(&body).unwrap();
        if frame.header.kind != Kind::Tell {
            if !self.nodes[host as usize].over {
                self.happens(host, Event::Told(frame));
            }
            return;
        }
        let Some(Part::Inline(raw)) = frame.parts().unwrap().pop() else { panic!("a message without its number") };
        let number = u64::from_le_bytes(raw.as_ref().try_into().unwrap());
        let (sent, come) = self.book.get_mut(&(frame.header.src.host, host)).unwrap();
        *come += 1;
        assert!(number == *come && *come <= *sent, "{}: message {number} where {come} is due at {host}", self.name);
    }

    /// An attempt to connect has reached the other side, if it can.
    fn knocks(&mut self, from: HostNo, to: HostNo, until: Duration) {
        let cut = self.is_cut(from, to).into_iter().chain(self.is_cut(to, from)).max();
        let hears_at = cut.unwrap_or(self.now).max(self.nodes[to as usize].paused_until);
        if self.nodes[from as usize].over {
            return;
        }
        if hears_at >= until {
            return self.push(until, from, Happening::Missed { to });
        }
        if hears_at > self.now {
            return self.push(hears_at + ms(1), from, Happening::Knocks { to, until });
        }
        let refused = |why: &str| Missed::for_good(Fate::Unreachable, why);
        if !self.nodes[to as usize].alive {
            return self.happens(from, Event::Missed { host: to, missed: refused("nobody listens") });
        }
        let join = self.nodes[from as usize].gateway.join(to);
        if !self.nodes[to as usize].begun {
            let Some(told) = Attachment::decode(&join.body) else {
                let missed = Missed::for_good(Fate::Restarted, "there is no such job");
                return self.happens(from, Event::Missed { host: to, missed });
            };
            self.nodes[to as usize].begun = true;
            self.nodes[to as usize].reached = self.now;
            self.happens(to, Event::Begun { job: join.job, told: told.into() });
            // Its first answer; only its existence matters here.
            self.nodes[0].gateway.introduce(to, 1, || Some(Introduction::default()));
            self.tick_in(to, Duration::ZERO);
        }
        let caller = if from == 0 { Caller::Controller } else { Caller::Host };
        let (answer, terms) = match self.nodes[to as usize].gateway.admit(&join, caller) {
            Ok(welcome) => {
                let theirs = Attachment::decode(&join.body);
                let terms = theirs.map(|told| Terms { window: told.window });
                (welcome.packet(to), terms.or_else(|| Terms::decode(&join.body)))
            }
            Err((code, text)) => (mesh_proto::hosts::Refuse { code, text }.packet(to), None),
        };
        let (answered, action) = self.nodes[from as usize].gateway.answered(to, "there", &answer);
        action.into_iter().for_each(|action| self.act(from, action));
        match answered {
            Err(missed) => self.happens(from, Event::Missed { host: to, missed }),
            Ok(None) => self.happens(from, Event::Missed { host: to, missed: Missed::for_now("") }),
            Ok(Some((incarnation, theirs))) => {
                let id = self.lines.borrow().len();
                let side = |host: HostNo| {
                    let now = self.clock(host);
                    Side { host, is_open: true, heard: now, sent: now, under_way: VecDeque::new() }
                };
                self.lines.borrow_mut().push(Line([from, to].map(side)));
                for (own, peer, incarnation, terms, dialed) in [
                    (to, from, self.nodes[from as usize].incarnation, terms, false),
                    (from, to, incarnation, theirs, true),
                ] {
                    let connection = End { id, own, peer };
                    self.happens(own, Event::Connected { host: peer, connection, incarnation, terms, dialed });
                }
            }
        }
    }

    // The promises.

    /// GTW-3: a host that nobody above it can reach for the window, or for the job's hold, has ended.
    fn note_reach(&mut self, host: HostNo) {
        if host == 0 || !self.nodes[host as usize].begun {
            return;
        }
        let is_reached = self.nodes[host as usize].above.iter().any(|above| {
            let cut = self.is_cut(*above, host).is_some() || self.is_cut(host, *above).is_some();
            let node = &self.nodes[*above as usize];
            !cut && !node.over && self.now >= node.paused_until
        });
        let (now, limit) = (self.now, ms(self.setup.window.max(self.setup.hold)));
        let slack = ms(2 * self.setup.window);
        let name = self.name;
        let node = &mut self.nodes[host as usize];
        if is_reached || now < node.paused_until + slack {
            node.reached = now;
        }
        assert!(node.over || now <= node.reached + limit + slack, "{name}: host {host}, cut off, works on");
    }

    pub(crate) fn check_nobody_died(&self) {
        let over: Vec<HostNo> = (0..self.hosts()).filter(|host| self.nodes[*host as usize].over).collect();
        assert!(self.verdicts.is_empty() && over.is_empty(), "{}: {:?}, {over:?}", self.name, self.verdicts);
    }

    /// All faults are over: before long, the living agree with the controller, and have received everything.
    pub(crate) fn settles(&mut self) {
        // What was lost behind a relay is sent again after a quarter of the window, or after twice or four times that.
        // In a chain of dead hosts, each counts from the end of the one above it.
        let holds = u64::from(self.hosts()) * self.setup.hold;
        let end = self.now + ms(30_000 + 3 * self.setup.window + holds);
        while let Err(why) = self.disagreement() {
            assert!(self.now < end, "{}: {why}", self.name);
            self.run(500);
        }
    }

    fn disagreement(&self) -> Result<(), String> {
        let dead: BTreeSet<HostNo> = self.verdicts.keys().copied().collect();
        let hold = |is_true: bool, why: &dyn Fn() -> String| if is_true { Ok(()) } else { Err(why()) };
        for host in 0..self.hosts() {
            let node = &self.nodes[host as usize];
            hold(node.begun || dead.contains(&host), &|| format!("{host} was never attached"))?;
            if dead.contains(&host) {
                hold(node.over || !node.begun, &|| format!("{host} is dead, and works on"))?;
            } else {
                hold(!node.over, &|| format!("{host} has ended, and the controller does not know"))?;
                hold(node.dead == dead, &|| format!("{host} has heard of {:?}, dead are {dead:?}", node.dead))?;
            }
        }
        for ((from, to), (sent, come)) in &self.book {
            let lives = !dead.contains(from) && !dead.contains(to);
            hold(!lives || sent == come, &|| format!("{sent} messages from {from} to {to}, {come} have come"))?;
        }
        Ok(())
    }
}
