//! Messages that wait for room, without a runtime: one process sends to several mailboxes.

use super::collector::Collector;
use super::dice::Dice;
use crate::dispatch::Dispatch;
use crate::meter::Meters;
use crate::reactor::Reactor;
use crate::runtime::{Deferred, Delayed, Ways};
use crate::shm::Memory;
use crate::standing::Standing;
use crate::{Deferral, Fate, Later, Meter, Packed};
use mesh_proto::messages::Call;
use mesh_proto::{Frame, INITIAL_WINDOW, Ledger, Placement, ProcAddr, Target};
use mesh_topology::{Region, Slice};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ACTOR: u64 = 5;
const MESH: u64 = 7;
const RANKS: usize = 4;
const BUDGET: usize = 2 << 20;
const ME: ProcAddr = ProcAddr { mesh: 9, rank: 0, host: 0 };

/// Collects what is sent; its queues may be full.
#[derive(Debug, Default)]
struct Queues {
    sent: Collector,
    full: AtomicBool,
}

impl Dispatch for Queues {
    fn dispatch(&self, frame: Frame) -> usize {
        self.sent.dispatch(frame)
    }
}

impl Ways for Queues {
    type Enclosed = Packed;

    fn is_clear(&self, _: &Target) -> bool {
        !self.full.load(Ordering::Relaxed)
    }
}

fn proc(rank: u32) -> ProcAddr {
    ProcAddr { mesh: MESH, rank, host: 0 }
}

/// A mailbox, as its process sees it.
struct Mailbox {
    addr: ProcAddr,
    ledger: Ledger,
    /// Messages that it must still get, in order.
    due: VecDeque<u64>,
    /// Messages that it has not handled.
    unhandled: Vec<u64>,
}

/// How a message waits.
enum Waits {
    Told(Deferral),
    Called(u64),
    /// A thread that sends by itself when its turn has come.
    Turn(Deferral),
}

struct World {
    part: Deferred<Packed>,
    standing: Arc<Standing>,
    meters: Arc<Meters>,
    ways: Queues,
    mailboxes: Vec<Mailbox>,
    serial: u64,
    waiting: Vec<(u64, Target, u64, Waits)>,
}

impl World {
    fn new() -> Self {
        let (reactor, standing) = (Arc::new(Reactor::new().unwrap()), Arc::new(Standing::new()));
        let (memory, meters) = (Arc::new(Memory::new(1 << 20, 1)), Arc::new(Meters::new(&reactor)));
        let mailbox = |rank| Mailbox {
            addr: proc(rank),
            ledger: Ledger::new(4 << 20),
            due: VecDeque::new(),
            unhandled: Vec::new(),
        };
        Self {
            part: Deferred::new(BUDGET, &reactor, &standing, &memory, &meters),
            standing,
            meters,
            ways: Queues::default(),
            mailboxes: (0..RANKS as u32).map(mailbox).collect(),
            serial: 0,
            waiting: Vec::new(),
        }
    }

    fn meters(&self, target: &Target) -> Arc<[Arc<Meter>]> {
        target.procs().map(|addr| self.meters.of(addr, ACTOR).0).collect()
    }

    fn frame(&self, target: &Target, serial: u64, len: usize) -> Frame {
        let dst = target.place(0).unwrap();
        let header = Call { actor: ACTOR, call: serial, place: 0, stream: false, task: None }.header(ME, dst);
        Frame::build_plain(header, matches!(target, Target::Many(..)).then_some(target), b"", &vec![0; len])
    }

    /// Sends, blocking or not: at once if nothing is ahead and there is room; else later, or not at all.
    fn send(&mut self, dice: &mut Dice) {
        let first = dice.roll(RANKS);
        let count = 1 + dice.roll(RANKS - first);
        let target = if count == 1 {
            Target::One(proc(first as u32))
        } else {
            let region = Region::new(&["procs"], Slice::new(first, &[count], &[1]).unwrap()).unwrap();
            Target::Many(MESH, region, Placement::On(0))
        };
        let (serial, frame, meters) = {
            self.serial += 1;
            let frame = self.frame(&target, self.serial, [10, 1000, 100_000, 500_000][dice.roll(4_usize)]);
            (self.serial, frame, self.meters(&target))
        };
        let cost = frame.cost();
        if self.part.behind(&target, ACTOR).is_none()
            && let Ok(counted) = self.meters.admit_all(&meters, cost)
        {
            let mut frame = frame;
            frame.header.set_charged(counted);
            self.owe(&target, serial);
            self.ways.dispatch(frame);
            return;
        }
        let to = Arc::new(target.clone());
        let later = Later { meters: Some(meters), cost, ..Later::default() };
        let waits = match dice.roll(3) {
            0 => Waits::Turn(self.part.send(&self.ways, Vec::new(), &to, ACTOR, later)),
            _ if self.part.reserve(cost, false).is_err() => return,
            1 => {
                let frames = vec![frame];
                self.owe(&target, serial);
                let delayed = Delayed { target: to, later, frames, call: serial, done: None };
                self.part.add(&self.ways, ACTOR, delayed);
                Waits::Called(serial)
            }
            _ => {
                self.owe(&target, serial);
                Waits::Told(self.part.send(&self.ways, vec![frame], &to, ACTOR, later))
            }
        };
        self.waiting.push((serial, target, cost, waits));
    }

    fn owe(&mut self, target: &Target, serial: u64) {
        for addr in target.procs() {
            self.mailboxes[addr.rank as usize].due.push_back(serial);
        }
    }

    fn disown(&mut self, target: &Target, serial: u64) {
        for addr in target.procs() {
            self.mailboxes[addr.rank as usize].due.retain(|one| *one != serial);
        }
    }

    /// Takes in what was sent: each message once for each receiver, and in order (BKL-1).
    fn absorb(&mut self, seed: u64) {
        for frame in self.ways.sent.take() {
            let serial = Call::read(&frame.header).unwrap().call;
            let target = frame.target().unwrap();
            for addr in target.procs() {
                let one = &mut self.mailboxes[addr.rank as usize];
                assert_eq!(one.due.pop_front(), Some(serial), "seed {seed}: at rank {}", addr.rank);
                assert!(frame.header.is_charged(), "it went through meters");
                one.unhandled.push(frame.cost());
                one.ledger.on_arrived(ME, frame.cost(), |_, credit| self.meters.on_credit(addr, ACTOR, credit));
            }
        }
        // Threads whose turn has come return what was counted, instead of sending.
        for (_, target, cost, waits) in &self.waiting {
            if let Waits::Turn(turn) = waits
                && turn.done.fate() == Some(Fate::Status(1))
            {
                self.meters.refund_all(&self.meters(target), *cost);
            }
        }
        self.waiting.retain(|(_, _, _, waits)| match waits {
            Waits::Told(deferral) | Waits::Turn(deferral) => !deferral.done.is_done(),
            Waits::Called(call) => self.part.has_call(*call),
        });
    }

    fn handle(&mut self, at: usize, dice: &mut Dice) -> bool {
        let one = &mut self.mailboxes[at];
        if one.unhandled.is_empty() {
            return false;
        }
        let cost = one.unhandled.swap_remove(dice.roll(one.unhandled.len()));
        one.ledger.on_handled(ME, cost, |_, credit| self.meters.on_credit(one.addr, ACTOR, credit));
        true
    }

    fn take_back(&mut self, dice: &mut Dice) {
        if self.waiting.is_empty() {
            return;
        }
        let (serial, target, _, waits) = self.waiting.swap_remove(dice.roll(self.waiting.len()));
        let fate = match &waits {
            Waits::Told(deferral) | Waits::Turn(deferral) => {
                assert!(self.part.take_back(&self.ways, deferral));
                assert!(!self.part.take_back(&self.ways, deferral), "only once");
                deferral.done.fate()
            }
            Waits::Called(call) => {
                assert!(self.part.take_back_call(&self.ways, *call));
                assert!(!self.part.has_call(*call));
                Some(Fate::Cancelled)
            }
        };
        assert_eq!(fate, Some(Fate::Cancelled));
        self.disown(&target, serial);
    }

    /// The other process ends: its mailboxes let everything through, and nobody gets credits for what is sent there.
    fn check_empty(&self, seed: u64) {
        assert_eq!((self.part.size(), self.part.any()), ((0, 0), false), "seed {seed}: messages are left");
        for (_, _, _, waits) in &self.waiting {
            if let Waits::Told(deferral) | Waits::Turn(deferral) = waits {
                assert_eq!(deferral.done.fate(), Some(Fate::Broken), "seed {seed}");
            }
        }
    }
}

/// BKL-1 to BKL-3: a waiting message is sent once and in order, or is dropped for a reason; nobody waits for ever.
#[test]
fn each_message_is_sent_once_and_in_order_or_taken_back() {
    for seed in 0..400 {
        let (mut dice, mut world) = (Dice(seed), World::new());
        for _ in 0..60 {
            match dice.roll(10) {
                0..5 => world.send(&mut dice),
                5..8 => drop(world.handle(dice.roll(RANKS), &mut dice)),
                8 => world.take_back(&mut dice),
                _ => world.ways.full.store(dice.roll(2) == 0, Ordering::Relaxed),
            }
            let (len, bytes) = world.part.size();
            assert!(bytes <= BUDGET as u64 || len <= 1, "seed {seed}: BKL-2");
            if dice.roll(3) == 0 {
                world.part.turn(&world.ways);
            }
            world.absorb(seed);
        }
        if dice.roll(4) == 0 {
            world.standing.close();
            world.part.close();
            world.check_empty(seed);
            let to = Arc::new(Target::One(proc(0)));
            let late = world.part.send(&world.ways, Vec::new(), &to, ACTOR, Later::default());
            assert!(late.done.is_done(), "whoever comes after the end does not wait");
            world.check_empty(seed);
            continue;
        }
        world.ways.full.store(false, Ordering::Relaxed);
        loop {
            world.part.turn(&world.ways);
            world.absorb(seed);
            if !(0..RANKS).any(|at| world.handle(at, &mut dice)) {
                break;
            }
        }
        world.check_empty(seed);
        assert!(world.waiting.is_empty());
        assert!(world.mailboxes.iter().all(|one| one.due.is_empty()), "seed {seed}: a message was lost");
    }
}

/// BKL-3 with queues: nothing tells when they have room, so the I/O thread looks again.
#[test]
fn a_message_behind_a_full_queue_has_the_io_thread_look_again() {
    let world = World::new();
    let to = Arc::new(Target::One(proc(0)));
    world.ways.full.store(true, Ordering::Relaxed);
    let turn = world.part.send(&world.ways, Vec::new(), &to, ACTOR, Later::default());
    assert!(world.part.turn(&world.ways).is_some_and(|at| at <= Instant::now() + Duration::from_secs(1)));
    assert!(!turn.done.is_done());
    world.ways.full.store(false, Ordering::Relaxed);
    assert_eq!(world.part.turn(&world.ways), None);
    assert_eq!(turn.done.fate(), Some(Fate::Status(0)));
}

/// FLW-3: a mailbox that ends lets everything through; the sender gets the answer.
#[test]
fn what_waits_for_a_process_that_ends_is_let_go() {
    let world = World::new();
    let (target, meters) = (Arc::new(Target::One(proc(0))), world.meters(&Target::One(proc(0))));
    assert_eq!(world.meters.admit_all(&meters, INITIAL_WINDOW), Ok(true));
    let later = Later { meters: Some(Arc::clone(&meters)), cost: 1000, ..Later::default() };
    world.part.reserve(1000, false).unwrap();
    let frame = world.frame(&target, 1, 700);
    let waits = world.part.send(&world.ways, vec![frame], &target, ACTOR, later);
    assert!(!waits.done.is_done());
    world.meters.end(|addr| addr == proc(0));
    world.part.turn(&world.ways);
    assert_eq!(waits.done.fate(), Some(Fate::Status(0)), "it is sent, and nobody counts it");
    assert_eq!(world.ways.sent.take().len(), 1);
}

/// A forked copy sends nothing, and gives up nothing of the original's.
#[test]
fn a_forked_copy_leaves_the_backlog_alone() {
    let world = World::new();
    let to = Arc::new(Target::One(proc(0)));
    world.ways.full.store(true, Ordering::Relaxed);
    let turn = world.part.send(&world.ways, Vec::new(), &to, ACTOR, Later::default());
    assert_eq!(world.part.behind(&to, ACTOR), Some(0));
    world.standing.mark_forked();
    assert_eq!(world.part.behind(&to, ACTOR), None);
    assert!(!world.part.take_back(&world.ways, &turn));
}
