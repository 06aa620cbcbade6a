//! Messages to meshes that were repaired.

use super::dice::Dice;
use super::pair::{ACTOR, Host, MESH, out};
use super::{options, procs, soon};
use crate::call::Outcome;
use crate::link::Link;
use crate::reactor::Reactor;
use crate::runtime::{ENDS_KEPT, EndedProcs, Moving, Switch};
use crate::{Runtime, Waited};
use mesh_proto::control::{News, Told};
use mesh_proto::messages::{Request, Tell};
use mesh_proto::{Decoder, Frame, GivenUp, Moved, Placement, ProcAddr, Router, Run, Seat, Target};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn addr(rank: u32) -> ProcAddr {
    ProcAddr { mesh: MESH, rank, host: 0 }
}

/// Rank 1 has moved to where rank 3 was.
fn moved() -> Moved {
    let run = Run { first: 1, count: 1, at: addr(3), incarnation: 1 };
    Moved { mesh: MESH, version: 1, runs: vec![run], left: vec![addr(1)] }
}

fn sources(runtime: &Runtime, target: &Target, payload: &[u8], buffers: &[&[u8]]) -> Vec<ProcAddr> {
    let (call, _) = runtime.call(&out(Request::CALL, target, payload, buffers), false).unwrap();
    assert_eq!(runtime.wait_call(&call, None, soon(), false, false), Waited::Ready, "no answer");
    let source = |outcome: &Outcome| match outcome {
        Outcome::Replied(message) => message.header().src,
        other => panic!("{other:?} where a reply was due"),
    };
    call.take_outcomes().unwrap().iter().map(source).collect()
}

#[test]
fn a_call_to_a_repaired_mesh_has_an_answer_for_each_place() {
    let host = Host::new(4, options());
    let three = Arc::new(Target::Many(MESH, procs(3), Placement::On(0)));
    assert!(Arc::ptr_eq(&host.controller.resolve(&three), &three), "nothing is looked up where nothing was repaired");
    let told = host.controller.publish(Told::Moved(moved())).unwrap();
    assert_eq!(host.controller.wait_call(&told, None, soon(), false, false), Waited::Ready);
    let target = host.controller.resolve(&three);
    let large = vec![7; 200_000];
    for buffers in [&[][..], &[&large[..], b"small"][..]] {
        assert_eq!(sources(&host.controller, &target, b"all", buffers), [addr(0), addr(3), addr(2)]);
    }
    // A worker that was sent something since has been told before.
    let (worker, _) = &host.workers[0];
    let target = worker.resolve(&three);
    assert_eq!(sources(worker, &target, b"all", &[&large]), [addr(0), addr(3), addr(2)]);
    assert_eq!(worker.locate(addr(1)), addr(3));
    assert_eq!(worker.seat(addr(3)), Seat { mesh: MESH, rank: 1, incarnation: 1 });
    assert_eq!(worker.incarnation(MESH, 1), 1);
    host.close();
}

#[test]
fn what_an_earlier_life_of_a_rank_has_sent_is_dropped() {
    let host = Host::new(4, options());
    let controller = &host.controller;
    controller.tell(&out(Request::Spawn, &Target::One(ProcAddr::CONTROLLER), b"", &[])).unwrap();
    let inbox = controller.inbox(ACTOR).unwrap();
    let send = |rank: u32| {
        let header = Tell { actor: ACTOR, place: 0 }.header(addr(rank), ProcAddr::CONTROLLER);
        controller.deliver(Frame::build_plain(header, None, b"hear", b""));
        inbox.take(9).len()
    };
    assert_eq!((send(1), send(3)), (1, 1));
    // A reference may tell of a repair before its news comes, which says which processes have left.
    controller.learn(&Moved { left: Vec::new(), ..moved() });
    assert_eq!((send(1), send(3)), (1, 1));
    drop(controller.publish(Told::Moved(moved())).unwrap());
    assert_eq!((send(1), send(3)), (0, 1), "MOV-2");
    controller.close_inbox(&inbox);
    host.close();
}

#[test]
fn all_learn_why_a_mesh_was_given_up() {
    let host = Host::new(2, options());
    let said = |why: &'static str| Told::GivenUp(GivenUp { mesh: MESH, why: why.into() });
    let told = host.controller.publish(said("by the script")).unwrap();
    assert_eq!(host.controller.wait_call(&told, None, soon(), false, false), Waited::Ready);
    let known = |runtime: &Runtime| runtime.given_up(MESH).map(|why| String::from_utf8(why.to_vec()).unwrap());
    assert_eq!(known(&host.controller).as_deref(), Some("by the script"));
    // A worker tells the controller, and is answered once all others have been told.
    let (worker, other) = (&host.workers[0].0, &host.workers[1].0);
    let told = worker.publish(said("by a worker")).unwrap();
    assert_eq!(worker.wait_call(&told, None, soon(), false, false), Waited::Ready);
    for _ in 0..2 {
        // Whatever it is sent afterwards comes later.
        let target = Target::One(ProcAddr { mesh: MESH, rank: 1, host: 0 });
        assert_eq!(sources(&host.controller, &target, b"", &[]).len(), 1);
    }
    for runtime in [&*host.controller, worker, other] {
        assert_eq!(known(runtime).as_deref(), Some("by a worker"));
        assert_eq!(runtime.news(), 0, "nothing was repaired");
    }
    host.close();
}

#[test]
fn a_call_to_nobody_s_places_waits_for_the_others_only() {
    let host = Host::new(2, options());
    let piece = mesh_proto::Piece { first: 2, target: Target::One(addr(1)), actor: None };
    let sparse = Target::Joined(Arc::new(mesh_proto::Joined::new(vec![piece], 4)));
    let (call, _) = host.controller.call(&out(Request::CALL, &sparse, b"", &[]), false).unwrap();
    assert_eq!(host.controller.wait_call(&call, None, soon(), false, false), Waited::Ready);
    let outcomes = call.take_outcomes().unwrap();
    assert_eq!(outcomes.len(), 4);
    for (place, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Outcome::Replied(message) => assert_eq!((place, message.meaning().place()), (2, 2)),
            other => assert!(matches!(other, Outcome::Cancelled) && place != 2, "{other:?}"),
        }
    }
    host.close();
}

// Without a runtime: agents and their workers, and the links between them.

/// What a worker knows, and its end of the link.
struct Hearer {
    moving: Moving,
    link: OwnedFd,
    decoder: Decoder,
    news: usize,
}

impl Hearer {
    /// Takes in what its agent has said.
    fn read(&mut self, nowhere: &Switch) {
        let mut bytes = [0; 4096];
        while let Ok(length) = rustix::io::read(&self.link, &mut bytes) {
            self.decoder.push(&bytes[..length]);
        }
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            self.moving.spread(&News::read(&frame).unwrap(), nowhere);
            self.news += 1;
        }
    }
}

struct Agents {
    reactor: Arc<Reactor>,
    moving: Moving,
    switch: Switch,
    links: std::sync::atomic::AtomicU32,
}

impl Agents {
    fn new(host: u32, reactor: &Arc<Reactor>) -> Self {
        let me = ProcAddr::agent(host);
        let (moving, switch) = (Moving::new(me, reactor), Switch::new(me, reactor, Router::agent(me)));
        Self { reactor: Arc::clone(reactor), moving, switch, links: 0.into() }
    }

    fn begin(&self) -> Hearer {
        self.begin_while(|| {})
    }

    /// Starts a worker; `meanwhile` runs after it was told what is known, and before others find it.
    fn begin_while(&self, meanwhile: impl FnOnce()) -> Hearer {
        let n = self.links.fetch_add(1, Ordering::Relaxed);
        let who = ProcAddr { mesh: 1000 + u64::from(n), rank: 0, host: self.host() };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let links = [Arc::new(Link::new(n, who, ours))];
        self.moving.begin_with(&links, || {
            meanwhile();
            self.switch.add(who.mesh, 0, &links);
        });
        let moving = Moving::new(who, &self.reactor);
        Hearer { moving, link: theirs, decoder: Decoder::default(), news: 0 }
    }

    fn host(&self) -> u32 {
        if self.moving.believes(ProcAddr { mesh: 1, rank: 0, host: 0 }) { 0 } else { 1 }
    }
}

/// The process of a one-rank mesh at that version: each repair gives it a new one.
fn life(version: u32) -> ProcAddr {
    ProcAddr { mesh: 50 + u64::from(version), rank: 0, host: version % 2 }
}

fn repair(version: u32) -> News {
    let run = Run { first: 0, count: 1, at: life(version), incarnation: version };
    let moved = Moved { mesh: 50, version, runs: vec![run], left: vec![life(version - 1)] };
    News { told: Told::Moved(moved), call: 0 }
}

/// MOV-1, MOV-2: whatever the order of news, nobody takes messages of a rank's earlier life once it knows of its
/// successor, and in the end all know the newest.
#[test]
fn news_of_repairs_reaches_all_in_any_order() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let nowhere = Switch::new(life(0), &reactor, Router::leaf(life(0), 0));
    for seed in 0..150 {
        let mut dice = Dice(seed);
        let (controller, other) = (Agents::new(0, &reactor), Agents::new(1, &reactor));
        let mut workers: Vec<Hearer> = [&controller, &other].map(Agents::begin).into();
        let (mut version, mut under_way) = (0, Vec::new());
        for _ in 0..40 {
            match dice.roll(8) {
                0 | 1 => {
                    version += 1;
                    let news = repair(version);
                    controller.moving.spread(&news, &controller.switch);
                    under_way.push(news);
                }
                2 | 3 if !under_way.is_empty() => {
                    let news = under_way.swap_remove(dice.roll(under_way.len()));
                    other.moving.spread(&news, &other.switch);
                }
                4 => {
                    let agent = if dice.roll(2) == 0 { &controller } else { &other };
                    workers.push(agent.begin());
                }
                5 => {
                    // A reference carries what its sender knows.
                    let (from, to) = (dice.roll(workers.len()), dice.roll(workers.len()));
                    if let Some(known) = workers[from].moving.moved(50) {
                        workers[to].moving.learn(&known);
                        assert!(workers[to].moving.incarnation(50, 0) >= known.version);
                    }
                }
                _ => {
                    let n = dice.roll(workers.len());
                    workers[n].read(&nowhere);
                }
            }
            for moving in workers.iter().map(|one| &one.moving).chain([&controller.moving, &other.moving]) {
                let known = moving.incarnation(50, 0);
                assert!(!moving.is_outdated(life(known)), "seed {seed}: the newest that it knows of is taken");
                assert_eq!(moving.news() == 0, known == 0);
            }
            assert!((0..version).all(|old| controller.moving.is_outdated(life(old))), "MOV-2");
        }
        for news in under_way.drain(..) {
            other.moving.spread(&news, &other.switch);
        }
        workers.iter_mut().for_each(|one| one.read(&nowhere));
        let old_timers = workers[..2].iter().map(|one| (&one.moving, one.news));
        for (moving, news) in old_timers {
            assert_eq!(news, version as usize, "each repair is told once");
            assert!((0..version).all(|old| moving.is_outdated(life(old))), "MOV-2");
        }
        for moving in workers.iter().map(|one| &one.moving).chain([&controller.moving, &other.moving]) {
            assert_eq!(moving.incarnation(50, 0), version, "seed {seed}");
            if version > 0 {
                let first = ProcAddr { mesh: 50, rank: 0, host: 0 };
                assert_eq!(moving.locate(first), life(version));
                assert_eq!(moving.seat(life(version)), Seat { mesh: 50, rank: 0, incarnation: version });
            }
        }
    }
}

#[test]
fn a_process_that_begins_later_is_told_why_meshes_were_given_up() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let nowhere = Switch::new(life(0), &reactor, Router::leaf(life(0), 0));
    let agent = Agents::new(0, &reactor);
    let told = Told::GivenUp(GivenUp { mesh: 7, why: "it was".into() });
    agent.moving.spread(&News { told, call: 0 }, &agent.switch);
    let mut worker = agent.begin();
    worker.read(&nowhere);
    assert_eq!(worker.moving.given_up(7).as_deref(), Some(&b"it was"[..]));
    assert_eq!((worker.moving.given_up(8), worker.news), (None, 1));
}

#[test]
fn a_process_that_begins_amid_news_misses_none() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let nowhere = Switch::new(life(0), &reactor, Router::leaf(life(0), 0));
    let agent = Agents::new(0, &reactor);
    let mut worker = std::thread::scope(|scope| {
        agent.begin_while(|| {
            let before = agent.moving.news();
            scope.spawn(|| agent.moving.spread(&repair(1), &agent.switch));
            // The news is about to be told to existing processes; the new one is not among them yet.
            for _ in 0..10_000 {
                if agent.moving.news() != before {
                    break;
                }
                std::thread::yield_now();
            }
        })
    });
    worker.read(&nowhere);
    assert_eq!((worker.moving.incarnation(50, 0), worker.news), (1, 1));
}

#[test]
fn an_agent_believes_the_controller_alone() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let owner = ProcAddr { mesh: 9, rank: 0, host: 1 };
    let believes = |me: ProcAddr, src: ProcAddr| Moving::new(me, &reactor).believes(src);
    assert!(believes(ProcAddr::CONTROLLER, owner));
    assert!(!believes(ProcAddr::agent(1), owner) && believes(ProcAddr::agent(1), ProcAddr::CONTROLLER));
    assert!(believes(owner, ProcAddr::agent(1)));
}

#[test]
fn the_oldest_ends_are_forgotten() {
    let ended = EndedProcs::default();
    let one = |rank: usize| ProcAddr { mesh: 3, rank: rank as u32, host: 0 };
    for rank in 0..=ENDS_KEPT {
        ended.note(one(rank));
        ended.note(one(rank));
    }
    assert!(!ended.contains(one(0)) && ended.contains(one(1)) && ended.contains(one(ENDS_KEPT)));
}
