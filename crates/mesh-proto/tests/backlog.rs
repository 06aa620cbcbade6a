//! The backlog under random schedules: one process that sends to several mailboxes, each with a meter and a ledger.

use crate::support::config;
use crate::support::dice::Dice;
use mesh_proto::{Admission, Backlog, Credit, Ledger, Meter, Place, ProcAddr};
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};

const ME: ProcAddr = ProcAddr { mesh: 1, rank: 0, host: 0 };

fn place(index: usize) -> Place {
    (ProcAddr { mesh: 9, rank: u32::try_from(index).unwrap(), host: 0 }, 5)
}

#[derive(Clone)]
struct Message {
    id: u64,
    to: Vec<usize>,
    cost: u64,
}

struct Mailbox {
    meter: Meter,
    marked: bool,
    ledger: Ledger,
    /// Sent but not arrived; arrived but not handled; credited but not received.
    there: VecDeque<(u64, u64)>,
    queued: VecDeque<(u64, u64)>,
    back: VecDeque<Credit>,
    ended: bool,
    /// Everything ever sent here, in order.
    got: Vec<u64>,
}

struct World {
    boxes: Vec<Mailbox>,
    backlog: Backlog<Message>,
    budget: u64,
    next: u64,
    accepted: Vec<Message>,
    refused: usize,
    waiting: BTreeSet<u64>,
    cancelled: BTreeSet<u64>,
}

impl World {
    fn new(dice: &mut Dice) -> Self {
        let count = usize::try_from(1 + dice.roll(4)).unwrap();
        let window = [4 << 10, 300_000, 4 << 20][usize::try_from(dice.roll(3)).unwrap()];
        let boxes = (0..count)
            .map(|_| Mailbox {
                meter: Meter::default(),
                marked: false,
                ledger: Ledger::new(window),
                there: VecDeque::new(),
                queued: VecDeque::new(),
                back: VecDeque::new(),
                ended: false,
                got: Vec::new(),
            })
            .collect();
        let budget = [1000, 400_000, 8 << 20][usize::try_from(dice.roll(3)).unwrap()];
        Self {
            boxes,
            backlog: Backlog::new(budget),
            budget,
            next: 0,
            accepted: Vec::new(),
            refused: 0,
            waiting: BTreeSet::new(),
            cancelled: BTreeSet::new(),
        }
    }

    fn admit(&mut self, message: &Message) -> Result<(), usize> {
        for (at, index) in message.to.iter().enumerate() {
            if self.boxes[*index].meter.admit(message.cost) == Admission::Full {
                for other in &message.to[..at] {
                    self.boxes[*other].meter.refund(message.cost);
                }
                return Err(*index);
            }
        }
        Ok(())
    }

    fn go(&mut self, message: &Message) {
        for index in &message.to {
            let one = &mut self.boxes[*index];
            one.got.push(message.id);
            if !one.ended {
                one.there.push_back((message.id, message.cost));
            }
        }
    }

    /// Like the runtime: sends what is ready, and marks the meter that holds it back.
    fn send_ready(&mut self, mut ready: Vec<u64>) {
        while let Some(number) = ready.pop() {
            let Some(message) = self.backlog.ready(number).cloned() else { continue };
            match self.admit(&message) {
                Ok(()) => {
                    self.backlog.remove(number, &mut ready).unwrap();
                    self.waiting.remove(&number);
                    self.go(&message);
                }
                Err(full) => self.boxes[full].marked = true,
            }
        }
    }

    fn send(&mut self, dice: &mut Dice) {
        let mut to: Vec<usize> = (0..self.boxes.len()).filter(|_| dice.roll(2) == 0).collect();
        if to.is_empty() {
            to.push(usize::try_from(dice.roll(self.boxes.len() as u64)).unwrap());
        }
        let most = [500, 100_000, 3_000_000][usize::try_from(dice.roll(3)).unwrap()];
        let message = Message { id: self.next, to, cost: 1 + dice.roll(most) };
        self.next += 1;
        let blocked = self.backlog.blocks(message.to.iter().map(|index| place(*index))).is_some();
        if !blocked && self.admit(&message).is_ok() {
            self.go(&message);
            self.accepted.push(message);
        } else if self.backlog.reserve(message.cost, false) {
            let places = message.to.iter().map(|index| place(*index)).collect();
            let number = self.backlog.push(places, message.cost, message.clone());
            self.accepted.push(message);
            self.waiting.insert(number);
            self.send_ready(vec![number]);
        } else {
            self.refused += 1;
            assert!(self.backlog.bytes() > 0);
        }
        assert!(self.backlog.bytes() <= self.budget || self.backlog.len() <= 1, "BKL-2");
    }

    fn cancel(&mut self, dice: &mut Dice) {
        if self.waiting.is_empty() {
            return;
        }
        let at = usize::try_from(dice.roll(self.waiting.len() as u64)).unwrap();
        let number = *self.waiting.iter().nth(at).unwrap();
        self.waiting.remove(&number);
        let mut freed = Vec::new();
        let gone = self.backlog.remove(number, &mut freed).unwrap();
        self.cancelled.insert(gone.id);
        assert!(self.backlog.remove(number, &mut freed).is_none());
        self.send_ready(freed);
    }

    /// One step of a mailbox: something arrives, is handled, or its sender gets a credit. False if nothing is due.
    fn step(&mut self, index: usize, which: u64) -> bool {
        let one = &mut self.boxes[index];
        let mut said = Vec::new();
        match which {
            0 => {
                let Some((id, cost)) = one.there.pop_front() else { return false };
                one.ledger.on_arrived(ME, cost, |_, credit| said.push(credit));
                one.queued.push_back((id, cost));
            }
            1 => {
                let Some((_, cost)) = one.queued.pop_front() else { return false };
                one.ledger.on_handled(ME, cost, |_, credit| said.push(credit));
            }
            _ => {
                let Some(credit) = one.back.pop_front() else { return false };
                one.meter.on_credit(credit);
                self.changed(index);
                return true;
            }
        }
        one.back.extend(said);
        true
    }

    fn changed(&mut self, index: usize) {
        if std::mem::take(&mut self.boxes[index].marked) {
            let ready = self.backlog.first(place(index)).into_iter().collect();
            self.send_ready(ready);
        }
    }

    fn end(&mut self, index: usize) {
        let one = &mut self.boxes[index];
        one.ended = true;
        one.there.clear();
        one.queued.clear();
        one.back.clear();
        one.meter.end();
        self.changed(index);
    }

    fn settle(&mut self) {
        while (0..self.boxes.len()).any(|index| (0..3).any(|which| self.step(index, which))) {}
    }

    fn check(&self) {
        assert!(self.backlog.is_empty(), "a message waits though everything was handled (BKL-3)");
        assert_eq!(self.backlog.bytes(), 0);
        for (index, one) in self.boxes.iter().enumerate() {
            let sent = self.accepted.iter().filter(|message| message.to.contains(&index));
            let sent: Vec<u64> = sent.map(|message| message.id).filter(|id| !self.cancelled.contains(id)).collect();
            assert_eq!(one.got, sent, "each goes once, in order (BKL-1)");
        }
    }
}

proptest! {
    #![proptest_config(config(400, 41))]

    /// BKL-1, BKL-2, BKL-3: nothing is lost, repeated or overtaken; what waits is bounded; nobody waits for ever.
    #[test]
    fn messages_leave_once_and_in_order(seed in any::<u64>(), steps in 1_usize..400) {
        let mut dice = Dice(seed);
        let mut world = World::new(&mut dice);
        for _ in 0..steps {
            let index = usize::try_from(dice.roll(world.boxes.len() as u64)).unwrap();
            match dice.roll(40) {
                0 => world.end(index),
                1..=3 => world.cancel(&mut dice),
                4..=18 => world.send(&mut dice),
                other => {
                    world.step(index, other % 3);
                }
            }
        }
        world.settle();
        world.check();
    }
}

#[test]
fn a_message_for_several_waits_for_all_and_holds_up_those_behind_it() {
    let mut backlog = Backlog::new(100);
    assert!(backlog.reserve(10, false) && backlog.reserve(10, false) && backlog.reserve(10, false));
    let first = backlog.push([place(0)].into(), 10, "first");
    let both = backlog.push([place(0), place(1)].into(), 10, "both");
    let last = backlog.push([place(1)].into(), 10, "last");
    assert_eq!(backlog.blocks([place(2), place(1)]), Some(1));
    assert_eq!((backlog.first(place(0)), backlog.first(place(1))), (Some(first), None));
    assert_eq!((backlog.ready(both), backlog.ready(last)), (None, None));
    let mut freed = Vec::new();
    assert_eq!(backlog.remove(first, &mut freed), Some("first"));
    assert_eq!(freed, [both]);
    assert_eq!(backlog.first(place(1)), Some(both));
    freed.clear();
    assert_eq!(backlog.remove(both, &mut freed), Some("both"));
    assert_eq!(freed, [last]);
    assert_eq!(backlog.clear(), ["last"]);
    assert_eq!((backlog.bytes(), backlog.blocks([place(1)])), (0, None));
}

#[test]
fn a_message_that_is_given_up_in_the_middle_is_passed_over() {
    let mut backlog = Backlog::new(100);
    assert!(backlog.reserve(100, false));
    assert!(!backlog.reserve(1, false));
    backlog.release(100);
    assert!(backlog.reserve(1_000, false), "alone, a message may be larger than the budget");
    backlog.release(1_000);
    let numbers: Vec<u64> = (0..3).map(|n| backlog.push([place(0)].into(), 0, n)).collect();
    let mut freed = Vec::new();
    assert_eq!(backlog.remove(numbers[1], &mut freed), Some(1));
    assert!(freed.is_empty());
    assert_eq!(backlog.remove(numbers[0], &mut freed), Some(0));
    assert_eq!(freed, [numbers[2]]);
}
