//! Replies under random schedules: one process that answers several callers, some of which stop reading.

use crate::support::config;
use crate::support::dice::Dice;
use mesh_proto::{Answer, Answers, Flow, Kept, ProcAddr, Progress, REPLIES, REPLY_WINDOW};
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

const ME: ProcAddr = ProcAddr { mesh: 1, rank: 0, host: 0 };

enum Sent {
    Reply(u64, u64),
    Question(u64),
}

struct Caller {
    addr: ProcAddr,
    ended: bool,
    there: VecDeque<Sent>,
    back: VecDeque<u64>,
    given: Vec<u64>,
    got: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Reply {
    id: u64,
    cost: u64,
    giver: usize,
}

struct World {
    answers: Answers<Reply>,
    callers: Vec<Caller>,
    /// The reply that each replier waits for, before it gives another.
    blocked: Vec<Option<u64>>,
    waiting: BTreeSet<u64>,
    dropped: BTreeSet<u64>,
    budget: u64,
    now: u64,
    next: u64,
    largest: u64,
}

impl World {
    fn new(dice: &mut Dice) -> Self {
        let callers = (0..=dice.roll(3)).map(|rank| Caller {
            addr: ProcAddr { mesh: 9, rank: u32::try_from(rank).unwrap(), host: 0 },
            ended: false,
            there: VecDeque::new(),
            back: VecDeque::new(),
            given: Vec::new(),
            got: Vec::new(),
        });
        let budget = [1000, 400_000, 8 << 20][usize::try_from(dice.roll(3)).unwrap()];
        let blocked = vec![None; usize::try_from(1 + dice.roll(3)).unwrap()];
        Self {
            answers: Answers::new(budget),
            callers: callers.collect(),
            blocked,
            waiting: BTreeSet::new(),
            dropped: BTreeSet::new(),
            budget,
            now: 0,
            next: 0,
            largest: 0,
        }
    }

    fn give(&mut self, dice: &mut Dice) {
        let to = usize::try_from(dice.roll(self.callers.len() as u64)).unwrap();
        let giver = usize::try_from(dice.roll(self.blocked.len() as u64)).unwrap();
        if self.blocked[giver].is_some() || self.callers[to].ended {
            return;
        }
        let cost = [300, 70_000, 300_000, 3 << 20][usize::try_from(dice.roll(4)).unwrap()];
        let id = self.next;
        self.next += 1;
        self.largest = self.largest.max(cost);
        self.callers[to].given.push(id);
        let reply = Reply { id, cost, giver };
        match self.answers.admit(self.callers[to].addr, cost) {
            Answer::Go(question) => self.go(to, vec![reply], question),
            Answer::Wait => {
                let due = (dice.roll(4) == 0).then(|| Duration::from_millis(self.now + dice.roll(20)));
                let kept = Kept { cost, call: id, due, item: reply };
                let (_, over) = self.answers.keep(self.callers[to].addr, kept);
                self.waiting.insert(id);
                self.blocked[giver] = over.then_some(id);
            }
        }
    }

    fn go(&mut self, to: usize, replies: Vec<Reply>, question: Option<u64>) {
        for reply in replies {
            self.left(reply);
            self.callers[to].there.push_back(Sent::Reply(reply.id, reply.cost));
        }
        self.callers[to].there.extend(question.map(Sent::Question));
    }

    fn left(&mut self, reply: Reply) {
        self.waiting.remove(&reply.id);
        if self.blocked[reply.giver] == Some(reply.id) {
            self.blocked[reply.giver] = None;
        }
    }

    fn drop_all(&mut self, gone: Vec<Reply>) {
        for reply in gone {
            self.left(reply);
            assert!(self.dropped.insert(reply.id));
        }
    }

    fn cancel(&mut self, dice: &mut Dice) {
        let id = dice.roll(self.next.max(1));
        let Some(to) = self.callers.iter().position(|caller| caller.given.contains(&id)) else { return };
        let mut go = Vec::new();
        let (gone, question) = self.answers.cancel(self.callers[to].addr, id, &mut go);
        self.drop_all(gone);
        self.go(to, go, question);
    }

    fn expire(&mut self, later: u64) {
        self.now += later;
        let (gone, who) = self.answers.expire(Duration::from_millis(self.now));
        self.drop_all(gone);
        for addr in who {
            let to = self.callers.iter().position(|caller| caller.addr == addr).unwrap();
            let mut go = Vec::new();
            let question = self.answers.settle(addr, &mut go);
            self.go(to, go, question);
        }
    }

    fn end(&mut self, index: usize) {
        self.callers[index].ended = true;
        let ended = self.callers[index].addr;
        let gone = self.answers.on_ends(|addr| addr == ended);
        self.drop_all(gone);
        self.callers[index].there.clear();
        self.callers[index].back.clear();
    }

    /// A caller reads, or its answer arrives; false if there is nothing to do.
    fn step(&mut self, index: usize, reads: bool) -> bool {
        let caller = &mut self.callers[index];
        if reads {
            match caller.there.pop_front() {
                None => return false,
                Some(Sent::Reply(id, _)) => caller.got.push(id),
                Some(Sent::Question(count)) => caller.back.push_back(count),
            }
        } else {
            let Some(count) = caller.back.pop_front() else { return false };
            let addr = caller.addr;
            let mut go = Vec::new();
            let question = self.answers.on_read(addr, count, &mut go);
            self.go(index, go, question);
        }
        true
    }

    /// ANS-1, ANS-3: what is in flight and what waits is bounded at all times.
    fn check_bounds(&self) {
        for caller in &self.callers {
            let unread: u64 =
                caller.there.iter().map(|sent| if let Sent::Reply(_, cost) = sent { *cost } else { 0 }).sum();
            assert!(unread <= REPLY_WINDOW / 4 + REPLY_WINDOW.max(self.largest), "{unread}");
            assert!(unread <= self.answers.unread(caller.addr) || caller.ended);
        }
        assert_eq!(self.answers.len(), self.waiting.len());
        let waiters = self.blocked.iter().flatten().count() as u64;
        assert!(self.answers.bytes() <= self.budget + waiters * self.largest);
    }

    fn check_end(&self) {
        assert_eq!((self.answers.len(), self.answers.bytes()), (0, 0), "a reply waits for ever");
        assert!(self.blocked.iter().all(Option::is_none));
        for caller in self.callers.iter().filter(|caller| !caller.ended) {
            let due: Vec<u64> = caller.given.iter().filter(|id| !self.dropped.contains(id)).copied().collect();
            assert_eq!(caller.got, due, "lost, repeated or overtaken");
        }
    }
}

proptest! {
    #![proptest_config(config(400, 53))]

    /// ANS-1 to ANS-4, whoever stops reading, and for however long.
    #[test]
    fn replies_arrive_once_in_order_and_within_bounds(seed in any::<u64>(), steps in 1_usize..500) {
        let mut dice = Dice(seed);
        let mut world = World::new(&mut dice);
        for _ in 0..steps {
            let index = usize::try_from(dice.roll(world.callers.len() as u64)).unwrap();
            match dice.roll(40) {
                0 => world.end(index),
                1 | 2 => world.cancel(&mut dice),
                3 | 4 => world.expire(dice.roll(5)),
                5..=22 => world.give(&mut dice),
                // The first caller has stopped.
                other if index > 0 => { world.step(index, other % 2 == 0); }
                _ => {}
            }
            world.check_bounds();
        }
        while (0..world.callers.len()).any(|index| world.step(index, true) || world.step(index, false)) {
            world.check_bounds();
        }
        world.check_end();
    }
}

fn kept(cost: u64, call: u64) -> Kept<u64> {
    Kept { cost, call, due: None, item: call }
}

#[test]
fn a_reply_larger_than_the_window_goes_alone_and_those_behind_it_wait() {
    let mut answers = Answers::new(1000);
    assert_eq!(answers.admit(ME, 9 * REPLY_WINDOW), Answer::Go(Some(9 * REPLY_WINDOW)));
    assert_eq!(answers.admit(ME, 300), Answer::Wait);
    assert_eq!(answers.keep(ME, kept(300, 1)), (true, false));
    assert_eq!(answers.admit(ME, 300), Answer::Wait);
    assert_eq!(answers.keep(ME, kept(900, 2)), (false, true));
    let mut go = Vec::new();
    assert_eq!(answers.on_read(ME, 9 * REPLY_WINDOW, &mut go), None);
    assert_eq!(go, [1, 2]);
}

#[test]
fn small_replies_ask_once_in_a_quarter_of_the_window() {
    let mut answers = Answers::<u64>::new(1000);
    let mut questions = 0;
    for _ in 0..10_000 {
        let mut go = Vec::new();
        match answers.admit(ME, 300) {
            Answer::Go(None) => {}
            Answer::Go(Some(count)) => {
                questions += 1;
                answers.on_read(ME, count, &mut go);
            }
            Answer::Wait => panic!("its caller reads"),
        }
    }
    assert_eq!(questions, 10_000 / (REPLY_WINDOW / 4).div_ceil(300));
}

#[test]
fn callers_that_owe_no_answer_are_forgotten() {
    let mut answers = Answers::<u64>::new(1000);
    for rank in 0..10_000 {
        assert_eq!(answers.admit(ProcAddr { rank, ..ME }, 300), Answer::Go(None));
    }
    assert!(answers.callers() < 3_000, "{}", answers.callers());
}

#[test]
fn questions_and_their_answers_are_frames() {
    let caller = ProcAddr { rank: 4, ..ME };
    let progress = Progress { what: REPLIES, count: 12_345 };
    for (frame, said) in [
        (progress.question(ME, caller), Flow::Asks(progress)),
        (progress.answer(caller, ME), Flow::HasRead(progress)),
        (progress.last(caller, ME), Flow::ReaderEnded(progress)),
    ] {
        assert_eq!(Flow::read(&frame.header), Ok(said));
    }
    let mailbox = mesh_proto::Credit::LAST.frame(5, ME, caller);
    assert!(matches!(Flow::read(&mailbox.header), Ok(Flow::Credit { mailbox: 5, .. })));
}
