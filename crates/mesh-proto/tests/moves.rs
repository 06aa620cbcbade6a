//! Meshes that are repaired while messages are in flight, under random schedules.

use crate::support::config;
use crate::support::dice::Dice;
use mesh_proto::control::{News, Told};
use mesh_proto::{
    Frame, Gather, GivenUp, Joined, Moved, Moves, Outcome, Piece, Placement, ProcAddr, Reasons, Run, Seat, Target,
};
use mesh_topology::{Extent, Region, Selector, Span};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

const MESH: u64 = 7;
const RANKS: u32 = 12;

fn whole() -> Region {
    Region::whole(&Extent::new([("rows", 3), ("columns", 4)]).unwrap())
}

fn run(first: u32, count: u32, mesh: u64, rank: u32, host: u32, incarnation: u32) -> Run {
    Run { first, count, at: ProcAddr { mesh, rank, host }, incarnation }
}

fn news(version: u32, runs: Vec<Run>) -> Moved {
    Moved { mesh: MESH, version, runs, left: Vec::new() }
}

/// A caller: what it knows, its sent messages that nobody has taken yet, and its calls.
#[derive(Default)]
struct Caller {
    moves: Moves,
    outbox: VecDeque<(ProcAddr, usize, u64)>,
    calls: BTreeMap<u64, (Region, Gather<()>)>,
    untold: Vec<Moved>,
}

/// A mesh, its owner, and processes that send to it: news of repairs reaches each in any order, and arbitrarily late.
struct World {
    dice: Dice,
    callers: Vec<Caller>,
    owner: Moves,
    version: u32,
    /// Who has each rank now, and its incarnation.
    now: Vec<(ProcAddr, u32)>,
    dead: HashSet<ProcAddr>,
    /// What each process has taken: the caller, its message, the place.
    taken: HashMap<ProcAddr, Vec<(usize, u64, usize)>>,
    next_mesh: u64,
    next_call: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            dice: Dice(seed | 1),
            callers: (0..3).map(|_| Caller::default()).collect(),
            owner: Moves::default(),
            version: 0,
            now: (0..RANKS).map(|rank| (ProcAddr { mesh: MESH, rank, host: 0 }, 0)).collect(),
            dead: HashSet::new(),
            taken: HashMap::new(),
            next_mesh: 100,
            next_call: 0,
        }
    }

    fn region(&mut self) -> Region {
        let all = whole();
        let span = |from: usize| Selector::Span(Span { start: Some(from as isize), stop: None, step: None });
        match self.dice.roll(4) {
            0 => all,
            1 => all.slice(&[("rows", Selector::At(self.dice.roll(3) as isize))]).unwrap(),
            2 => all.slice(&[("columns", Selector::At(self.dice.roll(4) as isize))]).unwrap(),
            _ => all.slice(&[("rows", span(1)), ("columns", span(self.dice.roll(3)))]).unwrap(),
        }
    }

    fn send(&mut self) {
        let region = self.region();
        let at = self.dice.roll(self.callers.len());
        self.next_call += 1;
        let caller = &mut self.callers[at];
        let target = Target::Many(MESH, region.clone(), Placement::On(0));
        let target = caller.moves.resolve(&target).unwrap_or(target);
        for piece in target.pieces().iter() {
            for (index, addr) in piece.target.procs().enumerate() {
                caller.outbox.push_back((addr, piece.first + index, self.next_call));
            }
        }
        caller.calls.insert(self.next_call, (region, Gather::new(target)));
    }

    fn deliver(&mut self, at: usize) -> bool {
        let Some((addr, place, call)) = self.callers[at].outbox.pop_front() else { return false };
        let outcome = if self.dead.contains(&addr) {
            let ended = mesh_proto::Ended::unmade(mesh_proto::EndReason::LongAgo);
            Outcome::Lost(Arc::new(ended))
        } else {
            self.taken.entry(addr).or_default().push((at, call, place));
            Outcome::Replied(())
        };
        // Its call may have been given up when its receiver died.
        if let Some((_, gather)) = self.callers[at].calls.get_mut(&call) {
            gather.on_outcome(place, outcome);
        }
        true
    }

    fn kill(&mut self) {
        let rank = self.dice.roll(RANKS as usize);
        let addr = self.now[rank].0;
        if self.dead.insert(addr) {
            let ended = Arc::new(mesh_proto::Ended::unmade(mesh_proto::EndReason::LongAgo));
            for caller in &mut self.callers {
                for (_, gather) in caller.calls.values_mut() {
                    gather.on_down(addr, &ended);
                }
            }
        }
    }

    fn repair(&mut self) {
        let dead: Vec<usize> = (0..RANKS as usize).filter(|rank| self.dead.contains(&self.now[*rank].0)).collect();
        if dead.is_empty() {
            return;
        }
        let some: Vec<usize> = dead.into_iter().filter(|_| self.dice.roll(3) > 0).collect();
        let mut left = Vec::new();
        self.next_mesh += 1;
        let host = self.dice.roll(2) as u32;
        for (place, rank) in (0..).zip(some) {
            let (before, life) = self.now[rank];
            left.push(before);
            self.now[rank] = (ProcAddr { mesh: self.next_mesh, rank: place, host }, life + 1);
        }
        self.version += 1;
        let moved = |(rank, (at, life)): (usize, &(ProcAddr, u32))| {
            (*life > 0).then_some(Run { first: rank as u32, count: 1, at: *at, incarnation: *life })
        };
        let runs = self.now.iter().enumerate().filter_map(moved).collect();
        let news = Moved { mesh: MESH, version: self.version, runs, left };
        assert!(self.owner.adopt(&news));
        for caller in &mut self.callers {
            caller.untold.push(news.clone());
        }
    }

    fn tell(&mut self, at: usize) -> bool {
        if self.callers[at].untold.is_empty() {
            return false;
        }
        let which = self.dice.roll(self.callers[at].untold.len());
        let caller = &mut self.callers[at];
        let news = caller.untold.swap_remove(which);
        let newer = caller.moves.of(MESH).is_none_or(|known| known.version < news.version);
        assert_eq!(caller.moves.adopt(&news), newer, "MOV-1");
        if newer {
            assert!(news.left.iter().all(|addr| caller.moves.has_left(*addr)), "MOV-2");
        }
        true
    }

    fn step(&mut self) {
        let at = self.dice.roll(self.callers.len());
        match self.dice.roll(10) {
            0..3 => self.send(),
            3..7 => drop(self.deliver(at)),
            7 => self.kill(),
            8 => self.repair(),
            _ => drop(self.tell(at)),
        }
    }

    fn settle(&mut self) {
        for at in 0..self.callers.len() {
            while self.tell(at) {}
            while self.deliver(at) {}
        }
    }
}

#[test]
fn calls_across_repairs_complete_once_in_order_and_never_reach_two_lives() {
    for seed in 1..400_u64 {
        let mut world = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        (0..300).for_each(|_| world.step());
        world.settle();
        let mut seen = HashSet::new();
        for (addr, taken) in &world.taken {
            let mut last = HashMap::new();
            for (caller, call, place) in taken {
                let rank = whole_rank(&world.callers[*caller].calls[call].0, *place);
                let seat = world.owner.seat(*addr);
                assert_eq!((seat.mesh, seat.rank), (MESH, rank), "each has what was meant for its rank");
                assert!(seen.insert((*caller, *call, *place)), "once, and by one life of a rank");
                let before = last.insert(*caller, *call);
                assert!(before.is_none_or(|before| before < *call), "in the order in which it was sent");
            }
        }
        for caller in &world.callers {
            for (region, gather) in caller.calls.values() {
                assert!(gather.is_complete());
                assert_eq!(gather.target().len(), region.len());
            }
        }
        // Once all news is in, a cast reaches everybody who lives, and each knows its place.
        for caller in &world.callers {
            let all = Target::Many(MESH, whole(), Placement::On(0));
            let all = caller.moves.resolve(&all).unwrap_or(all);
            let found: Vec<ProcAddr> = all.procs().collect();
            assert_eq!(found, world.now.iter().map(|(addr, _)| *addr).collect::<Vec<_>>());
            for (place, addr) in found.iter().enumerate() {
                assert_eq!((all.index_of(*addr), all.place(place)), (Some(place), Some(*addr)));
                let seat = Seat { mesh: MESH, rank: place as u32, incarnation: world.now[place].1 };
                assert_eq!(caller.moves.seat(*addr), seat);
            }
        }
    }
}

fn whole_rank(region: &Region, place: usize) -> u32 {
    u32::try_from(region.rank_at(place).unwrap()).unwrap()
}

#[test]
fn ranks_that_did_not_move_stay_one_cast() {
    let mut moves = Moves::default();
    assert!(moves.adopt(&news(1, vec![run(5, 1, 9, 0, 0, 1)])));
    let all = Target::Many(MESH, Region::whole(&Extent::new([("gpus", 1000)]).unwrap()), Placement::On(0));
    let Some(Target::Joined(joined)) = moves.resolve(&all) else { panic!("rank 5 has moved") };
    assert_eq!(joined.pieces().len(), 3);
    assert_eq!(joined.pieces()[1], Piece { first: 5, target: Target::One(run(5, 1, 9, 0, 0, 1).at), actor: None });
    assert_eq!(joined.pieces()[2].target.len(), 994);
    // Ranks that it does not concern are unchanged, and so is a single rank.
    let others = Region::whole(&Extent::new([("gpus", 5)]).unwrap());
    assert_eq!(moves.resolve(&Target::Many(MESH, others, Placement::On(0))), None);
    assert_eq!(moves.resolve(&Target::One(ProcAddr { mesh: MESH, rank: 4, host: 0 })), None);
    let five = Target::One(ProcAddr { mesh: MESH, rank: 5, host: 0 });
    assert_eq!(moves.resolve(&five), Some(Target::One(ProcAddr { mesh: 9, rank: 0, host: 0 })));
}

#[test]
fn places_that_are_nobodys_are_not_waited_for() {
    let one = |rank| Target::One(ProcAddr { mesh: MESH, rank, host: 0 });
    let pieces =
        vec![Piece { first: 1, target: one(4), actor: None }, Piece { first: 3, target: one(9), actor: Some(77) }];
    let joined = Arc::new(Joined::new(pieces, 5));
    assert_eq!((joined.len(), joined.receivers(), joined.places().collect::<Vec<_>>()), (5, 2, vec![1, 3]));
    let mut gather = Gather::new(Target::Joined(Arc::clone(&joined)));
    assert_eq!(gather.missing_places().collect::<Vec<_>>(), [1, 3]);
    assert!(!gather.on_outcome(1, Outcome::Replied(())));
    assert!(!gather.on_outcome(0, Outcome::Replied(())), "nobody is there");
    assert!(gather.on_outcome(3, Outcome::Replied(())));
    // If one of them has moved, the others stay, and keep their actors.
    let mut moves = Moves::default();
    assert!(moves.adopt(&news(1, vec![run(9, 1, 50, 0, 2, 1)])));
    let Some(Target::Joined(moved)) = moves.resolve(&Target::Joined(joined)) else { panic!("rank 9 has moved") };
    assert_eq!(moved.pieces()[1].target, Target::One(ProcAddr { mesh: 50, rank: 0, host: 2 }));
    assert_eq!((moved.len(), moved.pieces()[1].actor), (5, Some(77)));
}

/// MOV-2: of those that have left, the last 4096 are known.
#[test]
fn the_oldest_that_has_left_is_forgotten_for_one_too_many() {
    let left = |ranks: std::ops::Range<u32>| ranks.map(|rank| ProcAddr { mesh: MESH, rank, host: 0 }).collect();
    let mut moves = Moves::default();
    moves.adopt(&Moved { left: left(0..4096), ..news(1, Vec::new()) });
    let has_left = |moves: &Moves, rank| moves.has_left(ProcAddr { mesh: MESH, rank, host: 0 });
    assert!(has_left(&moves, 0) && has_left(&moves, 4095) && !has_left(&moves, 4096));
    moves.adopt(&Moved { left: left(4095..4097), ..news(2, Vec::new()) });
    assert!(!has_left(&moves, 0) && has_left(&moves, 1) && has_left(&moves, 4096), "one is told twice");
}

#[test]
fn what_is_old_or_makes_no_sense_is_not_taken_and_little_is_kept_of_the_past() {
    let mut moves = Moves::default();
    assert!(moves.adopt(&news(1, vec![run(5, 2, 9, 0, 0, 1)])));
    assert!(!moves.adopt(&news(1, Vec::new())), "old");
    let overlapping = vec![run(1, 3, 10, 0, 0, 1), run(3, 1, 11, 0, 0, 1)];
    for runs in
        [overlapping, vec![run(1, 0, 9, 0, 0, 1)], vec![run(u32::MAX, 2, 9, 0, 0, 1)], vec![run(0, 1, 0, 0, 0, 1)]]
    {
        assert!(!moves.adopt(&news(2, runs)));
    }
    assert_eq!(moves.all().count(), 1);
    let late = ProcAddr { mesh: 9, rank: 1, host: 0 };
    for version in 2..10_000 {
        assert!(moves.adopt(&news(version, vec![run(5, 2, 9 + u64::from(version), 0, 0, version)])));
        if version == 100 {
            assert_eq!(moves.seat(late), Seat { mesh: MESH, rank: 6, incarnation: 1 }, "its end may come late");
        }
    }
    assert_eq!(moves.seat(late).mesh, 9, "long ago");
    assert_eq!(moves.seat(ProcAddr { mesh: 10_008, rank: 1, host: 0 }).rank, 6);
}

fn moved() -> impl Strategy<Value = Moved> {
    let runs = prop::collection::vec((0_u32..9, 1_u32..9, 1_u64.., any::<u16>(), any::<u32>(), any::<u32>()), 0..6);
    let addr = || (1_u64.., any::<u32>(), any::<u32>()).prop_map(|(mesh, rank, host)| ProcAddr { mesh, rank, host });
    (1_u64.., 0..u32::MAX, runs, prop::collection::vec(addr(), 0..4)).prop_map(|(mesh, version, gaps, left)| {
        let mut next = 0;
        let runs = gaps
            .into_iter()
            .map(|(gap, count, mesh, rank, host, incarnation)| {
                let first = next + gap;
                next = first + count;
                run(first, count, mesh, rank.into(), host, incarnation)
            })
            .collect();
        Moved { mesh, version, runs, left }
    })
}

proptest! {
    #![proptest_config(config(500, 11))]

    #[test]
    fn news_arrives_as_it_was_sent(moved in moved(), call in any::<u64>()) {
        let (from, to) = (ProcAddr { mesh: 5, rank: 1, host: 2 }, ProcAddr::CONTROLLER);
        let news = News { told: Told::Moved(moved), call };
        prop_assert_eq!(News::read(&news.frame(from, to, None)), Some(news));
    }

    #[test]
    fn reasons_arrive_as_they_were_sent(mesh in 0_u64..3, why in prop::collection::vec(any::<u8>(), 0..200), long in any::<bool>()) {
        let why = if long { vec![1; GivenUp::LONGEST + why.len()] } else { why };
        let said = GivenUp { mesh, why: why.into() };
        let news = News { told: Told::GivenUp(said.clone()), call: 7 };
        let frame = news.frame(ProcAddr { mesh: 5, rank: 1, host: 2 }, ProcAddr::CONTROLLER, None);
        prop_assert_eq!(News::read(&frame), said.is_sound().then_some(news));
    }

    #[test]
    fn whatever_arrives_as_a_reason_is_sound_or_none(mesh in any::<u64>(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let header = mesh_proto::Header::new(mesh_proto::Kind::GivenUp, ProcAddr::CONTROLLER, ProcAddr::CONTROLLER);
        let header = crate::support::raw(header, (0, mesh, 0, 0, 0));
        if let Some(News { told: Told::GivenUp(said), .. }) = News::read(&Frame::build_plain(header, None, b"", &bytes)) {
            prop_assert!(said.is_sound() && said.why.len() <= bytes.len());
        }
    }

    #[test]
    fn whatever_arrives_as_news_is_sound_or_none(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let header = mesh_proto::Header::new(mesh_proto::Kind::Moved, ProcAddr::CONTROLLER, ProcAddr::CONTROLLER);
        let header = crate::support::raw(header, (0, 3, 0, 0, 0));
        if let Some(news) = News::read(&Frame::build_plain(header, None, b"", &bytes)) {
            let Told::Moved(moved) = news.told else { panic!("{news:?}") };
            prop_assert!(moved.is_sound());
            let mut moves = Moves::default();
            moves.adopt(&moved);
            let all = Target::Many(3, whole(), Placement::On(0));
            prop_assert_eq!(moves.resolve(&all).unwrap_or(all).len(), 12);
        }
    }
}

#[test]
fn reasons_of_the_oldest_are_forgotten_and_the_latest_count() {
    let mut reasons = Reasons::default();
    let said = |mesh: u64, why: &'static str| GivenUp { mesh, why: why.into() };
    for mesh in 1..=256 {
        reasons.adopt(&said(mesh, "first"));
    }
    reasons.adopt(&said(1, "again"));
    assert_eq!(reasons.of(1).as_deref(), Some(&b"again"[..]));
    reasons.adopt(&said(300, "new"));
    reasons.adopt(&said(0, "of nothing"));
    reasons.adopt(&GivenUp { mesh: 301, why: vec![0; GivenUp::LONGEST + 1].into() });
    assert_eq!((reasons.of(1), reasons.of(0), reasons.of(301)), (None, None, None));
    let all: Vec<u64> = reasons.all().map(|each| each.mesh).collect();
    assert_eq!((all.len(), all[0], all[255]), (256, 2, 300));
}
