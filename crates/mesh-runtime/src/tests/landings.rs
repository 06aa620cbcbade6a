//! Messages that land, without a runtime: parts bypass the gateways, come through them, or do not come at all.

use super::collector::Collector;
use super::dice::Dice;
use super::landing::{Road, road};
use crate::bypass::Bypass;
use crate::dispatch::Dispatch;
use crate::refs::RefAddr;
use crate::runtime::{Ground, Landings};
use crate::shm::{Memory, Room};
use crate::standing::Standing;
use bytes::Bytes;
use mesh_proto::control::{Down, Fetch, down_of};
use mesh_proto::messages::{Answer, Reply, Tell};
use mesh_proto::{EndReason, Ended, Frame, Header, Kind, Part, ProcAddr, Target, Ticket};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

const ME: ProcAddr = ProcAddr { mesh: 8, rank: 0, host: 0 };
/// One slab of shared memory, so that leaks are noticed.
const SHM: usize = 8 << 20;
/// The length of a part: each takes a piece of shared memory.
const LEN: usize = 64 * 1024;

#[derive(Debug)]
struct Field {
    this: Weak<Self>,
    landings: Landings<Arc<()>>,
    memory: Arc<Memory>,
    standing: Arc<Standing>,
    road: Option<&'static Road>,
    sent: Collector,
    taken: Mutex<Vec<Frame>>,
    lost: Mutex<Vec<Header>>,
    ids: AtomicU64,
    /// One clone for each part that is held.
    hold: Arc<()>,
}

impl Dispatch for Field {
    fn dispatch(&self, frame: Frame) -> usize {
        self.sent.dispatch(frame)
    }
}

impl Ground for Field {
    type Hold = Arc<()>;

    fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }
    fn landings(&self) -> &Landings<Arc<()>> {
        &self.landings
    }
    fn road(&self) -> Option<Bypass> {
        self.road.map(Road::bypass)
    }
    fn new_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }
    fn hold(&self, _: RefAddr, _: Ticket) -> Arc<()> {
        Arc::clone(&self.hold)
    }
    fn take_in(&self, frame: Frame) {
        self.taken.lock().unwrap().push(frame);
    }
    fn lose(&self, header: &Header) {
        self.lost.lock().unwrap().push(*header);
    }
}

impl Field {
    fn new(road: Option<&'static Road>) -> Arc<Self> {
        let (memory, standing) = (Arc::new(Memory::new(SHM, 1)), Arc::new(Standing::new()));
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            landings: Landings::new(ME, &memory, &standing),
            memory,
            standing,
            road,
            sent: Collector::default(),
            taken: Mutex::default(),
            lost: Mutex::default(),
            ids: AtomicU64::new(1),
            hold: Arc::default(),
        })
    }

    /// Delivers a frame as a runtime does.
    fn deliver(&self, frame: Frame) {
        if self.landings.concerns(&frame) {
            self.landings.land(self, frame);
        } else {
            self.take_in(frame);
        }
    }

    fn pieces(&self) -> Vec<Room> {
        std::iter::from_fn(|| self.memory.room(LEN, &Target::One(ME))).collect()
    }

    fn is_empty(&self) -> bool {
        self.landings.len() == 0 && Arc::strong_count(&self.hold) == 1
    }
}

fn sender(rank: u32) -> ProcAddr {
    ProcAddr { mesh: 9, rank, host: 3 }
}

fn message(from: ProcAddr, serial: u64, distant: usize) -> Frame {
    let mut header = Tell { actor: 5, place: 0 }.header(from, ME);
    header.set_distant(distant > 0);
    let mut parts = vec![Part::Inline(Bytes::copy_from_slice(&serial.to_le_bytes()))];
    for nth in 0..distant as u64 {
        let ticket = Bytes::from(vec![serial as u8]);
        parts.push(Part::Distant { id: 100 * serial + nth, held: nth + 1, len: LEN as u64, ticket });
    }
    Frame::build(header, None, b"echo", &parts)
}

fn serial_of(frame: &Frame) -> u64 {
    let Some(Part::Inline(bytes)) = frame.parts().unwrap_or_default().into_iter().next() else { panic!("{frame:?}") };
    u64::from_le_bytes(bytes[..].try_into().unwrap())
}

fn end_of(who: ProcAddr) -> Frame {
    Down::notice(who, &Ended::unmade(EndReason::LongAgo)).frame(ProcAddr::agent(who.host), ME)
}

/// The answer to a question for a part: its bytes, too few of them, or that it is not there.
fn answer(question: &Frame, dice: &mut Dice) -> Frame {
    let Fetch { call, .. } = Fetch::read(&question.header).unwrap();
    let header = Reply { actor: 0, call, place: 0, answer: Answer::Value }.header(question.header.dst, ME);
    let len = [LEN, LEN, LEN, LEN - 1][dice.roll(4_usize)];
    let parts: &[Part] = &[Part::Inline(Bytes::new()), Part::Inline(Bytes::from(vec![9; len]))];
    Frame::build(header, None, b"", &parts[..1 + usize::from(dice.roll(8) > 0)])
}

#[derive(Default)]
struct World {
    serial: u64,
    ranks: u32,
    living: Vec<u32>,
    sent: HashMap<ProcAddr, Vec<u64>>,
    /// Processes given up with their whole host: their messages may be missing.
    given_up: HashSet<ProcAddr>,
    taken: HashMap<ProcAddr, Vec<u64>>,
    ended: HashSet<ProcAddr>,
    lost: HashMap<ProcAddr, usize>,
    /// Questions that nobody has answered.
    questions: Vec<Frame>,
}

impl World {
    fn absorb(&mut self, field: &Field, seed: u64) {
        self.questions.extend(field.sent.take());
        for frame in field.taken.lock().unwrap().drain(..) {
            if let Some(who) = down_of(&frame.header) {
                self.ended.insert(who);
                continue;
            }
            if frame.header.kind == Kind::Reply {
                continue; // To a question of one that was given up; it might be any call's.
            }
            let who = frame.header.src;
            assert!(!self.ended.contains(&who), "seed {seed}: heard after its end");
            assert!(!frame.header.is_distant());
            self.taken.entry(who).or_default().push(serial_of(&frame));
            field.memory.let_go(&frame);
        }
        for header in field.lost.lock().unwrap().drain(..) {
            assert_eq!(header.kind, Kind::Tell);
            *self.lost.entry(header.src).or_default() += 1;
        }
    }
}

/// DST-1 to DST-3, whatever comes in whatever order.
#[test]
fn each_message_is_taken_in_once_and_in_order_and_nothing_is_left() {
    for seed in 0..300 {
        let (mut dice, road) = (Dice(seed), road());
        let field = Field::new((dice.roll(4) > 0).then_some(road));
        let room = field.pieces().len();
        let mut world = World { living: vec![0, 1, 2], ranks: 3, ..World::default() };
        for _ in 0..60 {
            match dice.roll(16) {
                0..7 => {
                    world.serial += 1;
                    let from = sender(world.living[dice.roll(3_usize)]);
                    world.sent.entry(from).or_default().push(world.serial);
                    field.deliver(message(from, world.serial, [0, 0, 1, 2][dice.roll(4_usize)]));
                }
                7..11 if road.asked() > 0 => road.take(dice.roll(road.asked())).come(),
                11..13 if road.asked() > 0 => road.take(dice.roll(road.asked())).fail(),
                13..15 if !world.questions.is_empty() => {
                    let question = world.questions.swap_remove(dice.roll(world.questions.len()));
                    field.deliver(answer(&question, &mut dice));
                }
                15 if dice.roll(3) == 0 => {
                    let gone = sender(std::mem::replace(&mut world.living[dice.roll(3_usize)], world.ranks));
                    world.ranks += 1;
                    if dice.roll(2) == 0 {
                        field.deliver(end_of(gone));
                    } else {
                        field.landings.end(&*field, |addr| addr == gone);
                        world.given_up.insert(gone);
                        field.deliver(end_of(gone));
                    }
                }
                _ => {}
            }
            world.absorb(&field, seed);
        }
        if dice.roll(4) == 0 {
            field.standing.close();
            field.landings.close(&*field);
        }
        while road.asked() > 0 || !world.questions.is_empty() {
            if road.asked() > 0 {
                let asked = road.take(dice.roll(road.asked()));
                if dice.roll(2) == 0 { asked.come() } else { asked.fail() }
            }
            if let Some(question) = world.questions.pop() {
                field.deliver(answer(&question, &mut dice));
            }
            world.absorb(&field, seed);
        }
        assert!(field.is_empty(), "seed {seed}: {} land, {}", field.landings.len(), Arc::strong_count(&field.hold));
        let closed = field.standing.is_closed();
        for (who, sent) in &world.sent {
            // In order, each once; missing ones were lost.
            let taken = world.taken.get(who).map_or(&[][..], |taken| taken);
            let lost = world.lost.get(who).copied().unwrap_or(0);
            if !closed && !world.given_up.contains(who) {
                assert_eq!(taken.len() + lost, sent.len(), "seed {seed}: {taken:?} of {sent:?}");
            }
            assert!(taken.iter().is_sorted_by(|one, other| one < other), "seed {seed}: {taken:?} of {sent:?}");
            assert!(taken.iter().all(|serial| sent.contains(serial)));
        }
        assert_eq!(field.pieces().len(), room, "seed {seed}: memory was not given back");
    }
}

/// A part being filled when its sender was given up: its memory is returned.
#[test]
fn a_part_that_comes_after_its_sender_was_given_up_is_given_back() {
    let road = road();
    let field = Field::new(Some(road));
    let room = field.pieces().len();
    field.deliver(message(sender(0), 1, 2));
    road.take(0).come();
    field.landings.end(&*field, |addr| addr == sender(0));
    road.take(0).come();
    assert!(field.is_empty() && field.taken.lock().unwrap().is_empty());
    assert_eq!(field.pieces().len(), room);
}

/// A part that fails after its sender was given up: nobody is asked for it.
#[test]
fn nobody_is_asked_for_parts_of_a_sender_that_was_given_up() {
    let road = road();
    let field = Field::new(Some(road));
    field.deliver(message(sender(0), 1, 1));
    field.landings.end(&*field, |addr| addr == sender(0));
    road.take(0).fail();
    assert!(field.is_empty() && field.sent.take().is_empty());
}
