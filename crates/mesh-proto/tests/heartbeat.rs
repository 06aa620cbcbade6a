//! Liveness of one connection.

use mesh_proto::hosts::{Beat, Heartbeat};
use std::time::Duration;

const WINDOW: Duration = Duration::from_secs(10);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Ticks when due until `end`. Returns what happened and when, without the pings, and the number of pings.
fn silence(heartbeat: &mut Heartbeat, end: Duration) -> (Vec<(Duration, Beat)>, usize) {
    let (mut seen, mut pings) = (Vec::new(), 0);
    while heartbeat.next_deadline() <= end {
        let now = heartbeat.next_deadline();
        match heartbeat.on_tick(now) {
            Beat::Quiet => panic!("asked for a tick at {now:?} for nothing"),
            Beat::Ping => pings += 1,
            Beat::Dead => {
                seen.push((now, Beat::Dead));
                break;
            }
            beat => seen.push((now, beat)),
        }
    }
    (seen, pings)
}

#[test]
fn a_silent_peer_is_suspect_then_dead() {
    let mut heartbeat = Heartbeat::new(WINDOW, ms(0));
    let (seen, pings) = silence(&mut heartbeat, ms(60_000));
    assert_eq!(seen, [(ms(2_500), Beat::Suspect), (ms(10_000), Beat::Dead)]);
    assert_eq!(pings, 9, "PLS-3: a ping each tenth of the window");
    heartbeat.heard(ms(10_001));
    assert_eq!(heartbeat.on_tick(ms(10_002)), Beat::Dead, "dead is for ever");
}

#[test]
fn any_byte_is_a_sign_of_life_and_a_suspect_recovers() {
    // PLS-1
    let mut heartbeat = Heartbeat::new(WINDOW, ms(0));
    for second in 1..100 {
        heartbeat.heard(ms(second * 1000));
        assert_eq!(silence(&mut heartbeat, ms(second * 1000 + 999)).0, []);
    }
    let (seen, _) = silence(&mut heartbeat, ms(104_000));
    assert_eq!(seen, [(ms(101_500), Beat::Suspect)]);
    assert!(heartbeat.is_suspect());
    assert!(heartbeat.heard(ms(104_000)));
    assert!(!heartbeat.heard(ms(104_001)) && !heartbeat.is_suspect());
    assert_eq!(silence(&mut heartbeat, ms(106_600)).0, [(ms(106_501), Beat::Suspect)]);
}

#[test]
fn a_busy_connection_carries_no_pings() {
    // PLS-3
    let mut heartbeat = Heartbeat::new(WINDOW, ms(0));
    for at in 1..1000 {
        heartbeat.sent(ms(at * 100));
        heartbeat.heard(ms(at * 100));
        assert_eq!(heartbeat.on_tick(ms(at * 100)), Beat::Quiet);
    }
}

#[test]
fn an_own_pause_is_not_the_peers_silence() {
    // PLS-2
    let mut heartbeat = Heartbeat::new(WINDOW, ms(0));
    assert_eq!(silence(&mut heartbeat, ms(2_000)).0, []);
    // Stopped for an hour, in the middle of a second.
    let back = ms(3_602_500);
    assert_eq!(heartbeat.on_tick(back), Beat::Ping);
    assert_eq!(heartbeat.on_tick(back), Beat::Quiet);
    let (seen, _) = silence(&mut heartbeat, back + ms(60_000));
    assert_eq!(seen.len(), 2);
    assert!(seen[0].0 <= back + ms(1_000) && seen[0].1 == Beat::Suspect, "what was silent before counts: {seen:?}");
    assert!(seen[1].0 >= back + ms(7_500) && seen[1].0 <= back + ms(8_500), "{seen:?}");
}

#[test]
fn time_that_goes_backwards_does_no_harm() {
    let mut heartbeat = Heartbeat::new(WINDOW, ms(50_000));
    heartbeat.heard(ms(49_000));
    heartbeat.sent(ms(10));
    assert_eq!(heartbeat.on_tick(ms(20)), Beat::Quiet);
    assert_eq!(heartbeat.silent(ms(20)), ms(0));
    assert_eq!(heartbeat.on_tick(heartbeat.next_deadline()), Beat::Ping);
}

/// Two idle sides with any delay up to a tenth of the window never suspect each other.
#[test]
fn two_idle_sides_keep_each_other_alive() {
    for delay in [0, 1, 100, 499, 1000] {
        let mut sides = [Heartbeat::new(WINDOW, ms(0)), Heartbeat::new(WINDOW, ms(0))];
        let mut pings: Vec<(Duration, usize)> = Vec::new();
        let (mut now, mut sent) = (ms(0), 0);
        while now < ms(200_000) {
            let next = sides.iter().map(Heartbeat::next_deadline).chain(pings.iter().map(|ping| ping.0)).min();
            now = next.unwrap_or(now).max(now);
            for (side, heartbeat) in sides.iter_mut().enumerate() {
                match heartbeat.on_tick(now) {
                    Beat::Ping => {
                        sent += 1;
                        pings.push((now + ms(delay), 1 - side));
                    }
                    Beat::Quiet => {}
                    beat => panic!("{beat:?} at {now:?} with a delay of {delay} ms"),
                }
            }
            pings.retain(|(at, side)| {
                if *at <= now {
                    sides[*side].heard(now);
                }
                *at > now
            });
        }
        assert!(sent <= 402, "{sent} pings");
    }
}
