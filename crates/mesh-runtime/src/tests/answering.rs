//! Replies that wait, without a runtime: one process answers callers, some of which stop reading.

use super::SOON;
use super::collector::Collector;
use super::dice::Dice;
use crate::reactor::Reactor;
use crate::runtime::{Announced, Answering};
use crate::shm::Memory;
use crate::standing::Standing;
use crate::{Completion, Fate};
use mesh_proto::messages::{Answer, Meaning, Reply, StopActor};
use mesh_proto::{Flow, Frame, Kind, ProcAddr, REPLIES, REPLY_WINDOW};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ME: ProcAddr = ProcAddr { mesh: 7, rank: 0, host: 0 };
const BUDGET: usize = 1 << 20;
const HOUR: Duration = Duration::from_secs(3600);

fn caller(rank: u32) -> ProcAddr {
    ProcAddr { mesh: 8, rank, host: 0 }
}

fn reply(call: u64, to: ProcAddr, len: usize) -> Frame {
    let header = Reply { actor: 0, call, place: 0, answer: Answer::Value }.header(ME, to);
    Frame::build_plain(header, None, b"", &vec![0; len])
}

fn part() -> (Answering, Arc<Standing>) {
    let (reactor, standing) = (Arc::new(Reactor::new().unwrap()), Arc::new(Standing::new()));
    let memory = Arc::new(Memory::new(1 << 20, 1));
    (Answering::new((ME, REPLIES, BUDGET), &reactor, &standing, &memory), standing)
}

/// A calling process: what it is owed, and how far it has got.
#[derive(Default)]
struct Caller {
    rank: u32,
    /// Calls whose replies were given but have neither come nor been dropped, and whether they are past their deadline.
    owed: VecDeque<(u64, bool)>,
    /// Questions that it has not answered.
    asked: VecDeque<u64>,
    watched: bool,
}

struct World {
    part: Answering,
    standing: Arc<Standing>,
    way: Collector,
    callers: Vec<Caller>,
    ranks: u32,
    calls: u64,
    waiting: Vec<Arc<Completion>>,
}

impl World {
    fn new() -> Self {
        let (part, standing) = part();
        let callers = (0..3).map(|rank| Caller { rank, ..Caller::default() }).collect();
        Self { part, standing, way: Collector::default(), callers, ranks: 3, calls: 0, waiting: Vec::new() }
    }

    /// Takes in what was sent: each reply once, in the order in which they were given (ANS-2).
    fn absorb(&mut self) {
        for frame in self.way.take() {
            if frame.header.kind == Kind::Watch {
                let whom = mesh_proto::control::Watch::read(&frame.header);
                let one = self.callers.iter_mut().find(|one| one.rank == whom.rank).unwrap();
                assert!(!std::mem::replace(&mut one.watched, true), "one end is asked for once");
                continue;
            }
            let Some(one) = self.callers.iter_mut().find(|one| caller(one.rank) == frame.header.dst) else {
                panic!("sent to a process that has ended");
            };
            match Meaning::of(&frame.header).unwrap() {
                Meaning::Reply(reply) => assert_eq!(one.owed.pop_front().map(|(call, _)| call), Some(reply.call)),
                Meaning::Credit(Flow::Asks(progress)) => one.asked.push_back(progress.count),
                said => panic!("{said:?}"),
            }
        }
    }

    fn give(&mut self, dice: &mut Dice) {
        self.calls += 1;
        let call = self.calls;
        let one = &mut self.callers[dice.roll(3_usize)];
        let len = [10, 1000, 100_000, 300_000][dice.roll(4_usize)];
        let late = dice.roll(8) == 0;
        // In the past, so that the next turn drops it; or never.
        let due = late.then(Instant::now).or((dice.roll(4) == 0).then(|| Instant::now() + HOUR));
        one.owed.push_back((call, late));
        let sent = self.part.send(&self.way, reply(call, caller(one.rank), len), due, true);
        self.waiting.extend(sent.full);
    }

    fn read(&mut self, dice: &mut Dice) -> bool {
        let at = dice.roll(3_usize);
        self.read_of(at)
    }

    fn read_of(&mut self, at: usize) -> bool {
        let one = &mut self.callers[at];
        let Some(count) = one.asked.pop_front() else { return false };
        self.part.on_read(&self.way, caller(one.rank), count);
        true
    }

    fn cancel(&mut self, dice: &mut Dice) {
        let one = &mut self.callers[dice.roll(3_usize)];
        if one.owed.is_empty() {
            return;
        }
        let (call, _) = one.owed.remove(dice.roll(one.owed.len())).unwrap();
        self.part.cancel(&self.way, caller(one.rank), call);
    }

    fn expire(&mut self) {
        self.callers.iter_mut().for_each(|one| one.owed.retain(|(_, late)| !late));
        let again = self.part.turn(&self.way);
        assert!(again.is_none_or(|at| at > Instant::now()), "it would be looked at again and again");
    }

    fn end(&mut self, dice: &mut Dice) {
        let at = dice.roll(3_usize);
        let gone = caller(self.callers[at].rank);
        self.part.end(|addr| addr == gone);
        self.callers[at] = Caller { rank: self.ranks, ..Caller::default() };
        self.ranks += 1;
    }

    fn check_empty(&self, seed: u64) {
        assert_eq!(self.part.size(), (0, 0), "seed {seed}: replies are left");
        assert!(self.waiting.iter().all(|done| done.is_done()), "seed {seed}: an actor waits forever");
        // Must return at once.
        let begun = Instant::now();
        self.part.drain(begun + SOON);
        assert!(begun.elapsed() < SOON);
    }
}

/// ANS-2 to ANS-4, whatever happens in whatever order.
#[test]
fn each_reply_is_sent_once_and_in_order_or_dropped_for_a_reason() {
    for seed in 0..400 {
        let (mut dice, mut world) = (Dice(seed), World::new());
        for _ in 0..80 {
            match dice.roll(12) {
                0..6 => world.give(&mut dice),
                6..9 => drop(world.read(&mut dice)),
                9 => world.cancel(&mut dice),
                10 => world.expire(),
                _ if dice.roll(4) == 0 => world.end(&mut dice),
                _ => {}
            }
            world.absorb();
        }
        if dice.roll(4) == 0 {
            world.standing.close();
            world.part.close();
            world.check_empty(seed);
            world.give(&mut dice);
            world.check_empty(seed);
            continue;
        }
        while (0..3).any(|at| world.read_of(at)) {
            world.absorb();
        }
        assert!(world.callers.iter().all(|one| one.owed.is_empty()), "seed {seed}: a reply was lost");
        world.check_empty(seed);
    }
}

/// ANS-4: replies behind one that nobody wants any more go as soon as that is dropped.
#[test]
fn a_reply_behind_one_whose_time_is_over_goes_when_that_is_dropped() {
    let (part, _standing) = part();
    let way = Collector::default();
    part.send(&way, reply(1, caller(0), 900_000), None, false);
    part.send(&way, reply(2, caller(0), 300_000), Some(Instant::now()), false);
    part.send(&way, reply(3, caller(0), 10), None, false);
    assert_eq!(part.size().0, 2);
    part.turn(&way);
    let calls = way.take().into_iter().filter(|frame| frame.header.kind == Kind::Reply);
    assert_eq!(calls.map(|frame| Reply::read(&frame.header).unwrap().call).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(part.size(), (0, 0));
}

#[test]
fn nothing_is_kept_after_the_end() {
    let (part, standing) = part();
    let way = Collector::default();
    standing.close();
    part.close();
    for call in 0..8 {
        assert!(part.send(&way, reply(call, caller(0), 300_000), None, true).full.is_none());
    }
    assert_eq!(part.size(), (0, 0));
}

/// ANS-3: a thread whose reply exceeds the budget waits until that reply has gone or was dropped.
#[test]
fn a_reply_beyond_the_budget_holds_up_its_actor_until_it_has_gone() {
    let (part, _standing) = part();
    let way = Collector::default();
    let large = 300_000;
    let (mut calls, mut full) = (1_u64.., Vec::new());
    while full.is_empty() {
        full.extend(part.send(&way, reply(calls.next().unwrap(), caller(0), large), None, true).full);
    }
    let (bytes, budget) = part.excess().unwrap();
    assert!(bytes > budget && bytes - budget <= large as u64 + 1000);
    assert!(part.send(&way, reply(99, caller(0), large), None, false).full.is_none(), "nobody can wait for it");
    assert!(!full[0].is_done());
    let frames = way.take();
    let count = frames.iter().filter_map(|frame| match Meaning::of(&frame.header) {
        Ok(Meaning::Credit(Flow::Asks(progress))) => Some(progress.count),
        _ => None,
    });
    part.on_read(&way, caller(0), count.max().unwrap());
    assert_eq!(part.excess(), None);
    part.end(|_| true);
    assert!(matches!(full[0].fate(), Some(Fate::Status(0) | Fate::Broken)));
}

/// Threads that answer while others read: nobody is forgotten, and each thread's replies stay in order.
#[test]
fn threads_that_answer_while_their_caller_reads_are_all_heard() {
    const EACH: u64 = 300;
    let (part, _standing) = part();
    let (way, over) = (Collector::default(), AtomicBool::new(false));
    let (part, way, over) = (&part, &way, &over);
    let mut heard: [Vec<u64>; 3] = Default::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3_u64)
            .map(|thread| {
                scope.spawn(move || {
                    for nth in 0..EACH {
                        let len = if nth % 3 == 0 { 50_000 } else { 10 };
                        part.send(way, reply(1 + thread * EACH + nth, caller(0), len), None, false);
                    }
                })
            })
            .collect();
        scope.spawn(move || {
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            over.store(true, Ordering::SeqCst);
        });
        loop {
            let last = over.load(Ordering::SeqCst);
            let frames = way.take();
            if last && frames.is_empty() {
                break;
            }
            for frame in frames {
                match Meaning::of(&frame.header).unwrap() {
                    Meaning::Reply(reply) => heard[((reply.call - 1) / EACH) as usize].push((reply.call - 1) % EACH),
                    Meaning::Credit(Flow::Asks(progress)) => part.on_read(way, caller(0), progress.count),
                    _ => {}
                }
            }
            std::thread::yield_now();
        }
    });
    for one in heard {
        assert_eq!(one, (0..EACH).collect::<Vec<_>>());
    }
    assert_eq!(part.size(), (0, 0));
}

#[test]
fn a_question_that_was_never_asked_is_no_answer() {
    let (part, _standing) = part();
    let way = Collector::default();
    part.on_read(&way, caller(5), u64::MAX);
    for call in 0..8 {
        part.send(&way, reply(call, caller(0), 300_000), None, false);
    }
    assert!(part.size().0 > 0);
    // Garbage releases no more than there is.
    part.on_read(&way, caller(0), u64::MAX);
    part.on_read(&way, caller(0), u64::MAX);
    part.on_read(&way, caller(0), u64::MAX);
    let bytes: u64 = way.take().iter().filter(|frame| frame.header.kind == Kind::Reply).map(Frame::cost).sum();
    assert!(bytes <= 3 * (REPLY_WINDOW + 301_000));
    assert_eq!(part.size(), (0, 0));
}

/// SPW-1: arguments that will never come are noticed when the agent stops the actor, and only then.
#[test]
fn only_an_agent_that_cleans_up_finds_an_actor_without_arguments() {
    let (agent, spawner) = (ProcAddr::CONTROLLER, caller(0));
    let clean_up = StopActor::of(5);
    let announced = Announced::default();
    announced.add(5, spawner);
    announced.add(6, agent);
    assert!(!announced.is_orphan(clean_up, spawner), "its owner stops it behind the arguments");
    assert!(!announced.is_orphan(StopActor { call: 7, ..clean_up }, agent), "somebody waits for the stop");
    assert!(!announced.is_orphan(StopActor::of(6), agent), "the agent has spawned it itself");
    assert!(announced.is_orphan(clean_up, agent));
    assert!(!announced.is_orphan(clean_up, agent));
    announced.complete(6);
    assert_eq!(announced.len(), 0);
}
