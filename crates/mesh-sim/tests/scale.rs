//! What the tree promises for many hosts, in virtual time.

use mesh_proto::hosts::{Standing, Topology};
use mesh_sim::{Model, Purpose, World, figures};
use std::time::Duration;

fn model(hosts: u32) -> Model {
    Model { hosts, ..Model::default() }
}

#[test]
fn a_call_to_ten_times_as_many_hosts_takes_a_level_more_and_no_more_of_a_relay() {
    let [small, large] = [100, 1000].map(|hosts| figures(&model(hosts)));
    assert!(large.gather < Duration::from_millis(3), "{:?}", large.gather);
    assert!(large.cast < Duration::from_millis(1), "{:?}", large.cast);
    let (few, many) = (small.call, large.call);
    assert!(many.controller.connections <= 16 && many.busiest.connections <= 17 && many.median.connections <= 2);
    // Flat: only a few bytes of numbers are added, not packets.
    assert!(many.controller.packets <= few.controller.packets + 64, "{:?} {:?}", few.controller, many.controller);
    assert!(many.busiest.packets <= few.busiest.packets + 64, "{:?} {:?}", few.busiest, many.busiest);
    assert!(many.median.packets <= 4, "{:?}", many.median);
    // Nobody waits for the whole 1 MiB: sixteen times on one wire, and a little at each level.
    assert!(large.large < Duration::from_millis(60), "{:?}", large.large);
    assert!(large.leaf_dead < Duration::from_millis(2), "{:?}", large.leaf_dead);
    assert!(large.relay_dead < Duration::from_millis(30), "{:?}", large.relay_dead);
    assert!(large.silent_dead < Duration::from_millis(10_100), "{:?}", large.silent_dead);
}

#[test]
fn a_narrow_tree_is_deeper_and_slower() {
    let [narrow, wide] = [2, 16].map(|fan_out| figures(&Model { fan_out, ..model(200) }));
    assert!(narrow.cast > wide.cast + Duration::from_micros(300));
    assert!(narrow.call.controller.connections == 2 && narrow.call.busiest.connections <= 3);
}

#[test]
fn a_relay_that_dies_in_the_middle_of_a_call_costs_no_reply_and_repeats_none() {
    let (hosts, procs) = (300_u32, 8);
    for after in [0, 50, 150, 220, 260, 300, 340, 400, 450, 500, 600, 800, 2_000] {
        let mut world = World::new(model(hosts));
        world.attach();
        world.settle();
        let begun = world.now();
        world.call(2, Purpose::Endpoint);
        let end = begun + Duration::from_micros(after);
        world.run(|world| world.now() >= end);
        world.kill(1, true);
        world.settle();
        let progress = world.progress(2);
        assert_eq!(progress.repeated, 0, "after {after} us");
        let owed = u64::from((hosts - 1) * procs);
        // What was lost with the relay is sent again once its death is known, not after a time without progress.
        let took = progress.last_reply - begun;
        assert!(took < Duration::from_millis(50), "{took:?} after {after} us");
        // The dead host's own replies may have been under way already.
        let replies = progress.replies;
        assert!(replies == owed || replies == owed + u64::from(procs), "{replies} of {owed} after {after} us");
    }
}

#[test]
fn a_relay_that_falls_silent_in_the_middle_of_a_call_is_routed_around_when_it_is_suspect() {
    let (hosts, procs) = (300_u32, 8);
    for after in [0, 150, 300, 400, 600] {
        let mut world = World::new(model(hosts));
        world.attach();
        world.settle();
        let begun = world.now();
        world.call(2, Purpose::Endpoint);
        let end = begun + Duration::from_micros(after);
        world.run(|world| world.now() >= end);
        world.kill(1, false);
        world.settle();
        let progress = world.progress(2);
        let owed = u64::from((hosts - 1) * procs);
        assert_eq!(progress.repeated, 0, "after {after} us");
        assert!(progress.replies >= owed, "{} of {owed} after {after} us", progress.replies);
        // A quarter of the window of 10 s, and a little.
        assert!(progress.last_reply - begun < Duration::from_millis(2_600), "{:?}", progress.last_reply - begun);
        let (count, last) = world.told(1, Standing::Dead);
        assert_eq!(count, hosts);
        let known = last - end;
        // The window counts from the last sign of life, of which there is one in every tenth of the window.
        assert!(known > Duration::from_secs(9) && known < Duration::from_millis(10_100), "{known:?}");
        assert_eq!(world.told(1, Standing::Suspect).0, hosts);
    }
}

/// Numbers from a seed, the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % u64::from(sides)) as u32
    }
}

#[test]
fn whoever_dies_when_in_some_calls_those_that_live_answer_each_once() {
    for seed in 0..60 {
        let mut dice = Dice(seed);
        let hosts = 20 + dice.roll(300);
        let fan_out = [2, 4, 16][dice.roll(3) as usize];
        let payload = [256, 700_000][usize::from(dice.roll(6) == 0)];
        let mut world = World::new(Model { fan_out, payload, equal: seed % 2 == 0, ..model(hosts) });
        world.attach();
        world.settle();
        let calls = 2..2 + u64::from(1 + dice.roll(4));
        for call in calls.clone() {
            world.call(call, Purpose::Endpoint);
            let end = world.now() + Duration::from_micros(dice.roll(400).into());
            world.run(|world| world.now() >= end);
        }
        for _ in 0..1 + dice.roll(5) {
            let end = world.now() + Duration::from_micros(dice.roll(1_500).into());
            world.run(|world| world.now() >= end);
            // The first hosts relay the most.
            let below = [8, hosts][dice.roll(2) as usize];
            let dead = 1 + dice.roll(below.min(hosts));
            if world.lives(dead) {
                world.kill(dead, dice.roll(3) > 0);
            }
        }
        world.settle();
        for call in calls {
            assert_eq!(world.progress(call).repeated, 0, "seed {seed}");
            for host in (1..=hosts).filter(|host| world.lives(*host)) {
                assert_eq!(world.answered(call, host), 8, "seed {seed}: call {call} at host {host}");
            }
        }
        // A host below two that died at the same time is out of reach for longer than the window, and ends (GTW-3).
        let mut tree = Topology::new(0);
        tree.add_group(1, hosts, fan_out);
        let killed: Vec<u32> = (1..=hosts).filter(|host| !world.lives(*host)).collect();
        for ended in world.ended_alone() {
            let above = killed.iter().filter(|host| tree.is_above(**host, *ended)).count();
            assert!(above > 1, "seed {seed}: {ended} has ended below {above} dead hosts");
        }
        for dead in killed.into_iter().filter(|host| !world.ended_alone().contains(host)) {
            let (told, living) = (world.told(dead, Standing::Dead).0, world.living());
            assert!(told >= living, "seed {seed}: {told} of {living} know of the death of {dead}");
        }
    }
}

#[test]
fn attaching_goes_by_levels() {
    let [small, large] = [16, 272].map(|hosts| {
        let mut world = World::new(model(hosts));
        let attach = world.attach();
        world.settle();
        assert_eq!(world.progress(attach).replies, u64::from(hosts));
        world.progress(attach).last_reply
    });
    assert!(large < 3 * small, "{small:?} for one level, {large:?} for two");
}

#[test]
fn answers_to_an_attachment_are_merged_on_their_way() {
    let hosts = 1000;
    let mut world = World::new(model(hosts));
    let attach = world.attach();
    world.settle();
    let progress = world.progress(attach);
    assert_eq!((progress.replies, progress.repeated), (u64::from(hosts), 0));
    let packets = world.load(0).packets;
    assert!(packets < u64::from(hosts), "{packets} packets at the controller for {hosts} hosts");
}

/// The target of the design; takes some seconds in a debug build.
#[test]
fn ten_thousand_hosts_answer_within_ten_milliseconds() {
    let mut world = World::new(model(10_000));
    world.attach();
    for (call, equal) in [(2, true), (3, false)] {
        world.settle();
        world.vary(|model| model.equal = equal);
        world.call(call, Purpose::Endpoint);
        let begun = world.now();
        world.run(|world| world.progress(call).replies == 80_000);
        let progress = world.progress(call);
        assert_eq!((progress.replies, progress.repeated, progress.reached), (80_000, 0, 10_000));
        let took = progress.last_reply - begun;
        assert!(took < Duration::from_millis(10), "{took:?}, replies equal: {equal}");
    }
}
