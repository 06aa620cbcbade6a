//! Messages that arrive before the thing that they are for.

use mesh_proto::{Early, MESSAGE_COST};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// What keeping a message takes besides its bytes.
const EACH: usize = MESSAGE_COST as usize;

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// ERL-1: messages that wait for the same thing keep their order.
#[test]
fn what_waits_is_handed_over_in_order_once() {
    let mut early = Early::new(ms(100), 4000);
    for item in 0..4 {
        assert_eq!(early.keep(item % 2, item, 10, None, ms(0)), Ok(()));
    }
    assert_eq!(early.bytes(), 4 * (10 + EACH));
    assert_eq!(early.come(0), [0, 2]);
    assert_eq!(early.come(0), [0; 0]);
    assert_eq!(early.on_tick(ms(100)), [1, 3]);
    assert_eq!(early.bytes(), 0);
    assert_eq!(early.next_deadline(), None);
}

/// ERL-3.
#[test]
fn nothing_waits_for_what_was_there() {
    let mut early = Early::new(ms(100), 4000);
    assert_eq!(early.come(7), [""; 0]);
    assert_eq!(early.keep(7, "late", 1, None, ms(0)), Err("late"));
}

#[test]
fn room_and_time_are_bounded() {
    let mut early = Early::new(ms(100), 25 + 2 * EACH);
    assert_eq!(early.keep(1, 'a', 20, Some(ms(10)), ms(0)), Ok(()));
    assert_eq!(early.keep(2, 'b', 6, None, ms(0)), Err('b'));
    assert_eq!(early.keep(2, 'c', 5, Some(ms(900)), ms(0)), Ok(()));
    assert_eq!(early.next_deadline(), Some(ms(10)));
    assert_eq!(early.on_tick(ms(9)), []);
    assert_eq!(early.on_tick(ms(10)), ['a']);
    assert_eq!(early.next_deadline(), Some(ms(100)));
    assert_eq!(early.keep(2, 'b', 20, None, ms(10)), Ok(()));
    assert_eq!(early.come(2), ['c', 'b']);
}

#[test]
fn of_everything_that_waits_one_thing_becomes() {
    for seed in 0..300_u64 {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = move |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let mut early = Early::new(ms(50), 25 * (20 + EACH));
        let (mut now, mut kept, mut came) = (0, HashMap::new(), HashSet::new());
        for item in 0..400_u64 {
            now += next(8);
            match next(10) {
                0 => {
                    let key = next(20);
                    came.insert(key);
                    let got = early.come(key);
                    assert!(got.is_sorted());
                    for one in got {
                        assert_eq!(kept.remove(&one), Some(key));
                    }
                }
                1 => {
                    for late in early.on_tick(ms(now)) {
                        assert!(kept.remove(&late).is_some());
                    }
                }
                _ => {
                    let key = next(20);
                    if early.keep(key, item, 20, Some(ms(next(80))), ms(now)) == Ok(()) {
                        assert!(!came.contains(&key));
                        kept.insert(item, key);
                    }
                }
            }
            assert_eq!(early.bytes(), (20 + EACH) * kept.len());
            assert!(kept.len() <= 25);
        }
        for late in early.on_tick(ms(now + 50)) {
            assert!(kept.remove(&late).is_some());
        }
        assert!(kept.is_empty() && early.next_deadline().is_none());
    }
}

/// What has come is remembered until 65,536 other things have.
#[test]
fn of_what_has_come_the_oldest_is_forgotten_for_one_too_many() {
    let mut early = Early::new(ms(100), 4000);
    for key in 0..65_536_u32 {
        early.come(key);
    }
    assert_eq!(early.keep(0, "late", 1, None, ms(0)), Err("late"));
    early.come(65_536);
    assert_eq!(early.keep(0, "late", 1, None, ms(0)), Ok(()));
    assert_eq!(early.keep(1, "late", 1, None, ms(0)), Err("late"));
}

#[test]
fn a_flood_of_empty_messages_for_ever_other_things_is_bounded() {
    // ERL-2: from whomever they come, and whatever they are for.
    let mut early = Early::new(ms(100), 100 * EACH);
    let kept = (0..10_000_u32).filter(|key| early.keep(*key, (), 0, None, ms(0)).is_ok()).count();
    assert_eq!((kept, early.bytes()), (100, 100 * EACH));
    assert_eq!(early.on_tick(ms(100)).len(), 100);
    assert_eq!(early.keep(10_001, (), 0, None, ms(100)), Ok(()));
}
