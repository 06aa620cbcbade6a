//! Flow control under random schedules: senders, a mailbox, and what is on its way between them.

use crate::support::config;
use crate::support::dice::Dice;
use mesh_proto::{
    Admission, Credit, Flow, Frame, Header, INITIAL_WINDOW, Ledger, MESSAGE_COST, Meter, Part, Placement, ProcAddr,
    SharedRef, Sharing, Target,
};
use proptest::prelude::*;
use std::collections::VecDeque;

#[derive(Default)]
struct Sender {
    meter: Meter,
    /// Messages that it has yet to send, and whether it waits for room: only a credit makes it look again.
    script: VecDeque<u64>,
    waits: bool,
    /// On their way to the mailbox, and credits on their way back.
    there: VecDeque<u64>,
    back: VecDeque<Credit>,
    /// Arrived but not handled.
    queued: Vec<u64>,
    /// The window that the ledger last told.
    told: u64,
    sent: usize,
}

struct World {
    senders: Vec<Sender>,
    ledger: Ledger,
    budget: u64,
    closed: bool,
}

fn addr(index: usize) -> ProcAddr {
    ProcAddr { mesh: 9, rank: u32::try_from(index).unwrap(), host: 0 }
}

impl World {
    fn new(dice: &mut Dice) -> Self {
        let budget = [64 << 10, 300_000, 1 << 20, 4 << 20, 64 << 20][usize::try_from(dice.roll(5)).unwrap()];
        let count = usize::try_from(1 + dice.roll(6)).unwrap();
        let large = [100, 70_000, 1 << 20, 2 * budget][usize::try_from(dice.roll(4)).unwrap()];
        let mut senders: Vec<Sender> = Vec::new();
        for _ in 0..count {
            let script = (0..dice.roll(60))
                .map(|_| {
                    let most = if dice.roll(3) == 0 { 200 } else { large };
                    1 + dice.roll(most)
                })
                .collect();
            senders.push(Sender { script, told: INITIAL_WINDOW, ..Sender::default() });
        }
        Self { senders, ledger: Ledger::new(budget), budget, closed: false }
    }

    fn send(&mut self, who: usize) -> bool {
        let sender = &mut self.senders[who];
        let Some(cost) = sender.script.front().copied().filter(|_| !sender.waits) else { return false };
        let before = sender.meter.outstanding();
        let window = sender.meter.window();
        match sender.meter.admit(cost) {
            Admission::Counted => {
                assert!(before < (window / 4).max(1) || before + cost <= window, "above the window");
                sender.there.push_back(cost);
            }
            // It reaches nobody.
            Admission::Free => assert!(self.closed),
            Admission::Full => {
                sender.waits = true;
                return true;
            }
        }
        sender.sent += 1;
        sender.script.pop_front();
        true
    }

    fn tell(&mut self, act: impl FnOnce(&mut Ledger, &mut dyn FnMut(ProcAddr, Credit))) {
        let senders = &mut self.senders;
        act(&mut self.ledger, &mut |to, credit| {
            let sender = &mut senders[to.rank as usize];
            sender.told = credit.window;
            sender.back.push_back(credit);
        });
    }

    fn arrive(&mut self, who: usize) -> bool {
        let Some(cost) = self.senders[who].there.pop_front() else { return false };
        if self.closed {
            self.senders[who].back.push_back(Credit::LAST);
            return true;
        }
        self.senders[who].queued.push(cost);
        self.tell(|ledger, tell| ledger.on_arrived(addr(who), cost, tell));
        true
    }

    fn handle(&mut self, who: usize, dice: &mut Dice) -> bool {
        let queued = &mut self.senders[who].queued;
        if queued.is_empty() {
            return false;
        }
        // Concurrent endpoints end in any order.
        let cost = queued.swap_remove(usize::try_from(dice.roll(queued.len() as u64)).unwrap());
        self.tell(|ledger, tell| ledger.on_handled(addr(who), cost, tell));
        true
    }

    fn hear(&mut self, who: usize) -> bool {
        let sender = &mut self.senders[who];
        let Some(credit) = sender.back.pop_front() else { return false };
        sender.meter.on_credit(credit);
        let room = sender.script.front().is_none_or(|cost| sender.meter.has_room(*cost));
        sender.waits = sender.waits && !room;
        true
    }

    fn check(&self) {
        if self.closed {
            return;
        }
        let base = self.budget.min(INITIAL_WINDOW);
        let wide: u64 =
            self.senders.iter().map(|sender| sender.told.saturating_sub(base.max(1024) / 1024 * 1024)).sum();
        let fresh = self.senders.iter().filter(|sender| sender.told == INITIAL_WINDOW && base < INITIAL_WINDOW).count();
        if fresh == 0 {
            assert!(wide <= self.budget - base, "{wide} promised out of {}", self.budget - base);
        }
        for (who, sender) in self.senders.iter().enumerate() {
            let way: u64 = sender.there.iter().sum::<u64>() + sender.queued.iter().sum::<u64>();
            let said: u64 = sender.back.iter().map(|credit| credit.handled).sum();
            assert!(sender.meter.outstanding() >= way + said, "sender {who} counts less than is under way");
        }
    }

    /// Lets everything happen that can.
    fn settle(&mut self, dice: &mut Dice) {
        loop {
            let mut moved = false;
            for who in 0..self.senders.len() {
                moved |= self.send(who) | self.arrive(who) | self.handle(who, dice) | self.hear(who);
            }
            if !moved {
                return;
            }
        }
    }
}

/// FLW-1, FLW-2, FLW-3.
#[test]
fn whoever_waits_is_let_in_and_every_byte_comes_back() {
    for seed in 0..20_000 {
        let mut dice = Dice(seed);
        let mut world = World::new(&mut dice);
        let closes = dice.roll(4) == 0;
        for _ in 0..dice.roll(400) {
            let who = usize::try_from(dice.roll(world.senders.len() as u64)).unwrap();
            match dice.roll(if closes { 200 } else { 199 }) {
                0..=69 => _ = world.send(who),
                70..=119 => _ = world.arrive(who),
                120..=149 => _ = world.handle(who, &mut dice),
                150..=194 => _ = world.hear(who),
                195..=198 => world.tell(|ledger, tell| ledger.on_question(addr(who), tell)),
                _ => {
                    world.closed = true;
                    world.tell(|ledger, tell| ledger.close(tell));
                    world.senders.iter_mut().for_each(|sender| sender.queued.clear());
                }
            }
            world.check();
        }
        world.settle(&mut dice);
        world.check();
        for who in 0..world.senders.len() {
            let sender = &world.senders[who];
            assert!(sender.script.is_empty(), "seed {seed}: sender {who} waits for ever with {:?}", sender.meter);
            world.tell(|ledger, tell| ledger.on_question(addr(who), tell));
        }
        world.settle(&mut dice);
        for (who, sender) in world.senders.iter().enumerate() {
            assert_eq!(sender.meter.outstanding(), 0, "seed {seed}: not all of sender {who}'s bytes came back");
        }
        assert_eq!((world.ledger.held(), world.ledger.queued(), world.ledger.senders()), (0, 0, 0), "seed {seed}");
    }
}

/// A repeated call with its reply needs no further frame for a long time.
#[test]
fn small_messages_that_are_answered_need_no_credit() {
    let mut ledger = Ledger::new(64 << 20);
    let mut credits = 0;
    for _ in 0..1000 {
        ledger.on_arrived(addr(0), 150, |_, _| credits += 1);
        ledger.on_handled(addr(0), 150, |_, _| credits += 1);
    }
    assert_eq!(credits, 0);
}

/// FLW-2: a mailbox that nobody serves holds its budget, plus what every sender may send unasked.
#[test]
fn many_senders_share_one_budget() {
    for count in [1_usize, 2, 3, 8, 100, 1000] {
        let budget = 64 << 20;
        let mut ledger = Ledger::new(budget);
        let mut meters = vec![Meter::default(); count];
        let cost = 10_000;
        loop {
            let mut sent = false;
            for who in 0..count {
                if meters[who].admit(cost) == Admission::Counted {
                    sent = true;
                    ledger.on_arrived(addr(who), cost, |to, credit| meters[to.rank as usize].on_credit(credit));
                }
            }
            if !sent {
                break;
            }
        }
        let most = budget + count as u64 * INITIAL_WINDOW;
        assert!(ledger.queued() <= most, "{} of {most} bytes from {count} senders", ledger.queued());
        assert!(ledger.queued() >= budget / 4, "only {} bytes from {count} senders", ledger.queued());
    }
}

/// Senders that have ended do not accumulate; living ones get back all that was handled.
#[test]
fn idle_senders_are_forgotten_and_given_their_bytes_back() {
    let mut ledger = Ledger::new(64 << 20);
    let mut back = 0;
    for who in 0..50_000 {
        ledger.on_arrived(addr(who), 300, |_, credit| back += credit.handled);
        ledger.on_handled(addr(who), 300, |_, credit| back += credit.handled);
    }
    assert!(ledger.senders() <= 1024, "{} senders are kept", ledger.senders());
    assert_eq!(back, 300 * (50_000 - ledger.senders() as u64));
}

/// A budget that went to the first senders is shared with later ones, once some of it is free.
#[test]
fn late_senders_get_their_share() {
    let mut ledger = Ledger::new(64 << 20);
    let mut meters = [Meter::default(); 2];
    let mut queued = [VecDeque::new(), VecDeque::new()];
    for round in 0..100_000 {
        for who in 0..2 {
            if (who == 0 || round > 20_000) && meters[who].admit(10_000) == Admission::Counted {
                queued[who].push_back(10_000);
                ledger.on_arrived(addr(who), 10_000, |to, credit| meters[to.rank as usize].on_credit(credit));
            }
            if round > 30_000
                && let Some(cost) = queued[who].pop_front()
            {
                ledger.on_handled(addr(who), cost, |to, credit| meters[to.rank as usize].on_credit(credit));
            }
        }
    }
    let wide = (63 << 20) / 2;
    assert!(meters.iter().all(|meter| meter.window() >= wide), "{meters:?}");
}

proptest! {
    #![proptest_config(config(500, 3))]

    #[test]
    fn a_credit_is_read_as_it_was_written(handled in any::<u64>(), units in any::<u32>(), last in any::<bool>()) {
        let credit = Credit { handled, window: u64::from(units) * 1024, last };
        let frame = credit.frame(5, addr(1), addr(2));
        let raw = Header::decode(&frame.header.encode()).unwrap();
        prop_assert_eq!(Flow::read(&raw), Ok(Flow::Credit { mailbox: 5, credit }));
        prop_assert_eq!((raw.src, raw.dst), (addr(1), addr(2)));
    }

    /// A message costs the same for the sender of a cast and for each of its receivers.
    #[test]
    fn both_ends_count_alike(header in crate::support::header(), lens in prop::collection::vec(0_u64..9_000, 0..4), shared in any::<bool>()) {
        let at = SharedRef { pid: 1, fd: 1, slab: 1, offset: 0, chunk: 0, turn: 0 };
        let parts: Vec<Part> = lens.iter().map(|len| match shared {
            true => Part::Shared { at, len: *len },
            false => Part::Inline(vec![0; usize::try_from(*len).unwrap()].into()),
        }).collect();
        let mut header = header;
        header.set_sharing(Sharing { sole: false, shared });
        let region = mesh_topology::Region::whole(&mesh_topology::Extent::new([("procs", 3)]).unwrap());
        let cast = Target::Many(9, region, Placement::On(0));
        let frame = Frame::build(header, Some(&cast), b"name", &parts);
        prop_assert_eq!(frame.cost(), MESSAGE_COST + 4 + lens.iter().sum::<u64>());
        prop_assert_eq!(frame.for_one(addr(1), 1).cost(), frame.cost());
    }
}
