//! Gateways under random schedules: partitions, broken connections, pauses, sleeps, clock steps and deaths.
//!
//! GTW-1 to GTW-4. `MESH_SCHEDULES` sets the number of schedules; the long run is
//! `MESH_SCHEDULES=1000000 cargo test --release -p mesh-proto --test all gateway_sim`. `MESH_SEED` sets the first seed.

use crate::support::dice::Dice;
use crate::support::hosts::{Setup, World};

/// The seeds of the schedules.
fn schedules(few: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let first = number("MESH_SEED").unwrap_or(0);
    first..first + number("MESH_SCHEDULES").map_or(few, |many| many.div_ceil(3))
}

/// What was lost behind a relay is sent again after a quarter of this.
const WINDOW: u64 = 8000;
const SHORT_WINDOWS: [u64; 2] = [1000, 3000];

fn setup(dice: &mut Dice, window: u64) -> Setup {
    let hosts = 2 + dice.roll(4_u32);
    let fan_out = 1 + dice.roll(3_u32);
    Setup { hosts, fan_out, window, hold: 0, seed: dice.roll(u64::MAX) }
}

/// One random fault, on random hosts, that lasts at most `most`.
fn harm(world: &mut World, dice: &mut Dice, most: u64, deadly: bool) {
    let hosts = world.hosts();
    let window = world.window();
    let (one, other) = (dice.roll(hosts), dice.roll(hosts));
    let long = 1 + dice.roll(most);
    match dice.roll(if deadly { 9_u32 } else { 8 }) {
        0 => world.cut(one, other, long),
        1 => world.cut_one_way(one, other, long),
        2 => (0..hosts).filter(|host| *host != one).for_each(|host| world.cut(one, host, long)),
        3 => {
            // The hosts fall into two parts.
            let part: Vec<bool> = (0..hosts).map(|_| dice.roll(2_u32) == 0).collect();
            for (a, b) in (0..hosts).flat_map(|a| (0..a).map(move |b| (a, b))) {
                if part[a as usize] != part[b as usize] {
                    world.cut(a, b, long);
                }
            }
        }
        4 => world.pause(one, long, false),
        5 => world.pause(one, long, true),
        6 => world.step(one, dice.roll(3 * window)),
        7 => world.break_connections(one, other),
        _ => world.kill(1 + dice.roll(hosts - 1)),
    }
}

/// A schedule of arbitrary faults; once they are over, all agree before long.
fn whatever(seed: u64, window: u64) {
    let mut dice = Dice(seed.wrapping_mul(3));
    let mut setup = setup(&mut dice, window);
    setup.hold = [0, 0, 0, 4 * window][dice.roll(4_usize)];
    let mut world = World::new(setup, seed);
    world.attach();
    world.run(50 + dice.roll(window / 3));
    for _ in 0..1 + dice.roll(5_u32) {
        world.chatter(dice.roll(6_u32));
        harm(&mut world, &mut dice, 3 * window / 2, true);
        world.run(dice.roll(window));
    }
    world.heal();
    world.settles();
    world.chatter(3);
    world.settles();
}

/// GTW-1, GTW-2, GTW-3: whatever happens, messages arrive once and in order, only the controller declares hosts dead,
/// all hear of it, and hosts that are cut off or dead stop their work.
#[test]
fn whatever_happens_all_agree_in_the_end_on_who_is_dead() {
    schedules(300).for_each(|seed| whatever(seed, WINDOW));
}

/// The same in jobs with short windows.
#[test]
fn whatever_happens_all_agree_in_the_end_where_the_window_is_short() {
    for window in SHORT_WINDOWS {
        schedules(100).for_each(|seed| whatever(seed, window));
    }
}

/// A schedule of faults shorter than the window.
fn shorter(seed: u64, window: u64) {
    let mut dice = Dice(seed.wrapping_mul(3).wrapping_add(1));
    let mut world = World::new(setup(&mut dice, window), seed);
    world.attach();
    world.run(300);
    for _ in 0..1 + dice.roll(4_u32) {
        world.chatter(dice.roll(6_u32));
        harm(&mut world, &mut dice, window / 3, false);
        // It lasts, and then there is time for another connection.
        world.run(window / 3);
        world.heal();
        world.run(window);
    }
    world.settles();
    world.check_nobody_died();
}

/// GTW-1, PLS-2: faults that are shorter than the window, and leave time to recover, cost nothing: no host, and no
/// message.
#[test]
fn what_is_shorter_than_the_window_kills_nobody() {
    schedules(300).for_each(|seed| shorter(seed, WINDOW));
}

/// The same in jobs with short windows: what was lost is sent again in time.
#[test]
fn what_is_shorter_than_a_short_window_kills_nobody() {
    for window in SHORT_WINDOWS {
        schedules(100).for_each(|seed| shorter(seed, window));
    }
}

/// A schedule of a job with a hold, whose controller is cut off from all of its hosts.
fn outlasts(seed: u64, window: u64) {
    let mut dice = Dice(seed.wrapping_mul(3).wrapping_add(2));
    let hold = 5 * window;
    let mut world = World::new(Setup { hold, ..setup(&mut dice, window) }, seed);
    let long = dice.roll(8_u32) == 0;
    world.attach();
    world.run(300);
    world.chatter(dice.roll(6_u32));
    // A host below another counts from the end of that one.
    let lasts = if long { 7 * hold } else { 1 + dice.roll(hold - window) };
    let hosts = world.hosts();
    (1..hosts).for_each(|host| world.cut(0, host, lasts));
    let first = dice.roll(lasts);
    world.run(first);
    if !long && dice.roll(2_u32) == 0 {
        world.pause(0, lasts - first, dice.roll(2_u32) == 0);
    }
    world.run(lasts - first);
    if long {
        assert!((1..hosts).all(|host| world.is_over(host)), "seed {seed}: a host works on");
    }
    world.heal();
    world.settles();
    world.chatter(3);
    world.settles();
    if !long {
        world.check_nobody_died();
    }
}

/// GTW-3, GTW-4: a controller that is cut off from all of its hosts, or sleeps, for less than the hold loses nobody. If
/// it takes longer, it loses all, each of which has stopped its work by then.
#[test]
fn a_job_that_is_held_outlasts_its_controller_being_cut_off() {
    schedules(300).for_each(|seed| outlasts(seed, WINDOW));
}

/// The same in jobs with short windows: a host is dialed again in the time that remains after the first one is back.
#[test]
fn a_job_that_is_held_outlasts_it_where_the_window_is_short() {
    for window in SHORT_WINDOWS {
        schedules(100).for_each(|seed| outlasts(seed, window));
    }
}

/// Schedules that have found bugs.
#[test]
fn schedules_that_once_failed_go_well() {
    // A host's way up leads through a dead host, of whose death it does not hear, because its answer waits for that
    // host.
    whatever(8346, WINDOW);
    // The controller connects to a host that another one relays to and has called suspect, and then that one dies.
    whatever(11_870, WINDOW);
    // A host's parent has ended and refuses every attempt to connect, and the host hears of its end only when it goes
    // around it.
    whatever(43_269, WINDOW);
    // A controller is cut off from all for less than the window, and hears from the first again when the window is
    // over.
    outlasts(11_313, WINDOW);
    // A host's parent is suspect for a moment, and lost the controller long ago.
    shorter(12_333, WINDOW);
    shorter(1833, SHORT_WINDOWS[1]);
    // A host clings to a parent that is suspect, and heard, but leads nowhere.
    whatever(6_003_832, WINDOW);
    for (seed, window) in [5_006_044, 6_005_751].into_iter().flat_map(|seed| SHORT_WINDOWS.map(|window| (seed, window)))
    {
        whatever(seed, window);
    }
}

#[test]
fn a_schedule_is_the_same_every_time() {
    let run = || {
        let mut world = World::new(Setup { hosts: 4, fan_out: 2, window: WINDOW, hold: 0, seed: 7 }, 7);
        world.attach();
        world.run(300);
        world.chatter(4);
        world.kill(1);
        world.run(3 * WINDOW);
        world.settles();
        (world.events(), world.now())
    };
    assert_eq!(run(), run());
}
