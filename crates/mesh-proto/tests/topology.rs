//! The paths of messages between hosts, followed to their ends over random trees and standings.

use crate::support::dice::Dice;
use mesh_proto::HostNo;
use mesh_proto::hosts::{HostSet, Standing, Topology};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Every host's view of the job.
struct World(Vec<Topology>);

impl World {
    /// A few groups and hosts that dialed, all live; every host sees the same.
    fn new(dice: &mut Dice) -> Self {
        let mut groups = Vec::new();
        let mut next = 1;
        for _ in 0..=dice.roll(3) {
            let count = [1, 3, 20, 60][dice.roll(4) as usize] + dice.roll(10);
            groups.push((next, count, [1, 2, 3, 16, u32::MAX][dice.roll(5) as usize]));
            next += count;
        }
        let topologies = (0..next).map(|me| {
            let mut topology = Topology::new(me);
            for &(base, count, fan_out) in &groups {
                if fan_out == u32::MAX {
                    assert!((base..base + count).all(|host| topology.add_dialed(host)));
                } else {
                    assert!(topology.add_group(base, count, fan_out));
                }
            }
            topology
        });
        Self(topologies.collect())
    }

    fn hosts(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap()
    }

    /// One in `rarity` hosts is in trouble.
    fn trouble(&mut self, dice: &mut Dice, rarity: u32) {
        for host in 1..self.hosts() {
            if dice.roll(rarity) == 0 {
                let standing = [Standing::Suspect, Standing::Dead][dice.roll(2) as usize];
                self.0.iter_mut().for_each(|topology| drop(topology.set(host, standing)));
            }
        }
    }

    /// Pairs without a direct path.
    fn walls(&mut self, dice: &mut Dice, rarity: u32) {
        for a in 1..self.hosts() {
            for b in (1..a).filter(|_| dice.roll(rarity) == 0).collect::<Vec<_>>() {
                self.0[a as usize].unreachable(b);
                self.0[b as usize].unreachable(a);
            }
        }
    }

    fn some(&self, dice: &mut Dice) -> HostSet {
        let most = 1 + dice.roll(self.hosts());
        HostSet::from_iter((0..most).map(|_| dice.roll(self.hosts())).collect::<Vec<_>>())
    }

    /// Follows a message to its ends, and checks each step.
    fn follow(&self, origin: HostNo, dests: &HostSet) -> Followed {
        let mut followed = Followed::default();
        let mut under_way = VecDeque::from([(origin, dests.clone(), 0)]);
        while let Some((at, dests, hops)) = under_way.pop_front() {
            let here = &self.0[at as usize];
            followed.hops = followed.hops.max(hops);
            followed.steps += 1;
            assert!(followed.steps < 50_000, "in circles");
            if at != origin && dests.contains(at) {
                *followed.got.entry(at).or_default() += 1;
            }
            let plan = here.plan(origin, &dests);
            followed.most_sent = followed.most_sent.max(plan.len());
            let mut planned = HostSet::default();
            for (hop, share) in plan {
                assert_ne!(hop, at);
                assert!(!share.is_empty() && share.intersection(&planned).is_empty(), "one copy each (TOP-1)");
                planned = planned.union(&share);
                match here.standing(hop) {
                    Standing::Live => {}
                    Standing::Suspect => assert_eq!(share, HostSet::one(hop), "it relays (TOP-2)"),
                    Standing::Dead => panic!("{at} sends to the dead {hop}"),
                }
                under_way.push_back((hop, share, hops + 1));
            }
            let mut left: HostSet = dests.iter().filter(|dest| here.standing(*dest) != Standing::Dead).collect();
            left.remove(at);
            assert_eq!(planned, left, "from {origin} at {at}");
        }
        followed
    }

    /// The hosts that a single message passes, including its destination.
    fn way(&self, origin: HostNo, dest: HostNo) -> Vec<HostNo> {
        let mut way = Vec::new();
        let mut at = origin;
        while let Some(hop) = self.0[at as usize].next_hop(origin, dest) {
            way.push(hop);
            assert!(way.len() < 200, "from {origin} to {dest} in circles: {way:?}");
            at = hop;
        }
        way
    }
}

#[derive(Default)]
struct Followed {
    got: BTreeMap<HostNo, u32>,
    steps: u32,
    hops: u32,
    most_sent: usize,
}

#[test]
fn every_destination_that_lives_gets_one_copy_by_live_relays() {
    for seed in 0..800 {
        let mut dice = Dice(seed);
        let mut world = World::new(&mut dice);
        if seed % 4 > 0 {
            world.trouble(&mut dice, [2, 5, 30][seed as usize % 3]);
        }
        if seed % 3 > 0 {
            world.walls(&mut dice, [2, 8][seed as usize % 2]);
        }
        for _ in 0..6 {
            let (dests, origin) = (world.some(&mut dice), [0, dice.roll(world.hosts())][dice.roll(2) as usize]);
            let followed = world.follow(origin, &dests);
            let alive = |host: &HostNo| world.0[0].standing(*host) != Standing::Dead && *host != origin;
            let expected: BTreeMap<HostNo, u32> = dests.iter().filter(alive).map(|host| (host, 1)).collect();
            assert_eq!(followed.got, expected, "seed {seed}: from {origin} (TOP-1)");
            for dest in dests.iter() {
                let way = world.way(origin, dest);
                assert_eq!(way.last(), expected.get(&dest).map(|_| &dest), "seed {seed}: from {origin} to {dest}");
                let mut relays = way.iter().rev().skip(1);
                assert!(relays.all(|hop| world.0[0].standing(*hop) == Standing::Live), "{way:?} (TOP-2)");
            }
        }
    }
}

#[test]
fn hosts_that_differ_about_the_standings_send_nothing_in_circles() {
    for seed in 0..600 {
        let mut dice = Dice(10_000 + seed);
        let mut world = World::new(&mut dice);
        for topology in &mut world.0 {
            for _ in 0..dice.roll(12) {
                let host = dice.roll(30);
                topology.set(host, [Standing::Suspect, Standing::Dead][dice.roll(2) as usize]);
            }
        }
        world.walls(&mut dice, 4);
        for _ in 0..5 {
            let (dests, origin) = (world.some(&mut dice), [0, dice.roll(world.hosts())][dice.roll(2) as usize]);
            // The walk itself fails if it never ends (TOP-3).
            let followed = world.follow(origin, &dests);
            assert!(followed.got.values().all(|copies| *copies == 1), "seed {seed} (TOP-1)");
            dests.iter().for_each(|dest| drop(world.way(origin, dest)));
        }
    }
}

#[test]
fn a_healthy_tree_is_narrow_and_flat() {
    for (count, fan_out, deepest) in [(15, 16, 1), (272, 16, 2), (3_000, 16, 3), (3_000, 4, 6), (100, 1, 100)] {
        let mut world = World((0..=count).map(Topology::new).collect());
        world.0.iter_mut().for_each(|topology| assert!(topology.add_group(1, count, fan_out)));
        let all = HostSet::range(1, count);
        for origin in [0, 1, count / 2, count] {
            let followed = world.follow(origin, &all);
            assert_eq!(followed.got.len(), count as usize - usize::from(origin > 0));
            assert!(followed.most_sent <= fan_out as usize, "{} copies by one host (TOP-4)", followed.most_sent);
            assert!(followed.hops <= deepest, "{} hops from {origin} to {count} by {fan_out}", followed.hops);
        }
    }
}

#[test]
fn children_and_parents_are_two_views_of_one_tree() {
    for seed in 0..500 {
        let mut dice = Dice(20_000 + seed);
        let mut world = World::new(&mut dice);
        world.trouble(&mut dice, 3);
        let topology = &world.0[0];
        let alive = |host: &HostNo| topology.standing(*host) != Standing::Dead;
        assert!(topology.parent(0).is_none() && topology.ancestors(0).is_empty());
        assert_eq!(topology.hosts(), (0..world.hosts()).filter(alive).collect());
        for host in 0..world.hosts() {
            let children = (1..world.hosts()).filter(alive).filter(|child| topology.parent(*child) == Some(host));
            assert_eq!(topology.children(host), children.collect(), "seed {seed}: of {host}");
            let ancestors = topology.ancestors(host);
            let chain: Vec<HostNo> = std::iter::successors(topology.parent(host), |at| topology.parent(*at)).collect();
            assert_eq!(ancestors, chain, "seed {seed}: above {host}");
            let mut subtree = BTreeSet::from_iter(alive(&host).then_some(host));
            let mut look = vec![host];
            while let Some(at) = look.pop() {
                look.extend(topology.children(at).iter().filter(|child| subtree.insert(*child)));
            }
            assert_eq!(topology.subtree(host), subtree.into_iter().collect(), "seed {seed}: below {host}");
        }
    }
}

#[test]
fn who_has_another_way_is_told_and_nobody_else() {
    for seed in 0..300 {
        let mut dice = Dice(30_000 + seed);
        let mut world = World::new(&mut dice);
        world.trouble(&mut dice, 10);
        world.walls(&mut dice, 10);
        for _ in 0..8 {
            let host = dice.roll(world.hosts());
            let standing = [Standing::Live, Standing::Suspect, Standing::Dead][dice.roll(3) as usize];
            let watched = [0, dice.roll(world.hosts())];
            // Between hosts a relay may itself go around: only this host's part of the path is known here.
            let ways = |world: &World, me: HostNo| -> Vec<Vec<HostNo>> {
                (0..world.hosts()).map(|dest| world.way(me, dest)).collect()
            };
            let before = watched.map(|me| ways(&world, me));
            let held = world.0[0].standing(host);
            let told: Vec<Option<HostSet>> = world.0.iter_mut().map(|topology| topology.set(host, standing)).collect();
            let changes = host > 0 && held != standing && held != Standing::Dead;
            assert!(told.iter().all(|told| told.is_some() == changes));
            for (me, before) in watched.into_iter().zip(before) {
                let after = ways(&world, me);
                let differ: HostSet =
                    (0..world.hosts()).filter(|dest| before[*dest as usize] != after[*dest as usize]).collect();
                let told = told[me as usize].clone().unwrap_or_default();
                assert!(differ.difference(&told).is_empty(), "seed {seed}: {me} is not told of {differ:?}: {told:?}");
                if me == 0 {
                    assert_eq!(differ, told, "seed {seed}: {host} becomes {standing:?}");
                }
            }
        }
    }
}

#[test]
fn the_dead_do_not_come_back_and_the_controller_does_not_die() {
    let mut topology = Topology::new(3);
    assert!(topology.add_group(1, 5, 2));
    assert_eq!(topology.set(1, Standing::Dead), Some(HostSet::from_iter([0, 1])), "the parent of 3, and 1 itself");
    assert_eq!(topology.set(1, Standing::Live), None);
    assert_eq!(topology.set(0, Standing::Dead), None);
    assert_eq!(topology.set(2, Standing::Live), None, "it is already");
    assert_eq!(topology.parent(3), Some(0));
    assert_eq!(topology.unwell().collect::<Vec<_>>(), [(1, Standing::Dead)]);
}

#[test]
fn numbers_that_are_taken_or_none_of_hosts_make_no_group() {
    let mut topology = Topology::new(0);
    assert!(topology.add_group(10, 5, 2));
    for (base, count) in [(10, 5), (9, 2), (14, 1), (12, 1), (0, 3), (20, 0), (u32::MAX, 2)] {
        assert!(!topology.add_group(base, count, 16), "{base} and {count}");
    }
    assert!(!topology.add_dialed(12) && !topology.add_dialed(0));
    assert!(topology.add_dialed(15) && topology.add_dialed(16) && topology.add_dialed(9));
    assert!(!topology.add_dialed(16));
    assert_eq!(topology.groups().collect::<Vec<_>>(), [(9, 1, u32::MAX), (10, 5, 2), (15, 2, u32::MAX)]);
    assert!(topology.knows(16) && topology.knows(0) && !topology.knows(17));
    assert_eq!(topology.children(0), HostSet::from_iter([9, 10, 11, 15, 16]));
    // A host that is unknown here: messages to it are not withheld.
    assert_eq!(topology.next_hop(0, 99), Some(99));
}

#[test]
fn a_tree_of_a_hundred_thousand_is_known_from_a_few_numbers() {
    let mut controller = Topology::new(0);
    assert!(controller.add_group(1, 100_000, 16));
    let all = HostSet::range(1, 100_000);
    let plan = controller.plan(0, &all);
    assert_eq!(plan.len(), 16);
    assert_eq!(plan.iter().map(|(_, share)| share.len()).sum::<usize>(), 100_000);
    assert!(plan.iter().all(|(_, share)| share.runs().len() <= 6), "a run for each level");
    assert_eq!(controller.ancestors(100_000).len(), 5);
    controller.set(3, Standing::Dead);
    assert_eq!(controller.plan(0, &all).len(), 15 + 16);
}

#[test]
fn what_is_for_a_host_that_is_neither_known_nor_reachable_goes_up() {
    // Two hosts that have dialed the controller: each knows only itself, and can connect to nobody.
    let mut topology = Topology::new(1);
    topology.add_dialed(1);
    assert_eq!(topology.next_hop(1, 2), Some(2));
    topology.unreachable(2);
    assert_eq!(topology.next_hop(1, 2), Some(0));
    assert_eq!(topology.plan(1, &HostSet::from_iter([0, 2])), [(0, HostSet::from_iter([0, 2]))]);
    topology.reachable(2);
    assert_eq!(topology.next_hop(1, 2), Some(2));
}

#[test]
fn hosts_are_known_by_the_groups_that_they_came_in() {
    let mut topology = Topology::new(0);
    assert!(topology.add_group(1, 10, 4) && topology.add_dialed(11) && topology.add_group(20, 5, 2));
    for (first, count, known) in [(0, 1, true), (0, 12, true), (1, 11, true), (5, 8, false), (20, 5, true)] {
        assert_eq!(topology.knows_all(first, count), known, "{count} from {first} on");
        assert_eq!((first..first + count).all(|host| topology.knows(host)), known);
    }
    assert!(!topology.knows_all(20, 6) && !topology.knows_all(12, 1) && !topology.knows_all(u32::MAX, u32::MAX));
}
