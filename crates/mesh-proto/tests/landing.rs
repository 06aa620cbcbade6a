//! LND-1 to LND-3 under random schedules.

use mesh_proto::{Landing, ProcAddr};
use proptest::prelude::*;
use std::collections::HashMap;

fn addr(rank: u32) -> ProcAddr {
    ProcAddr { mesh: 7, rank, host: 2 }
}

#[derive(Clone, Debug)]
enum Step {
    Arrive { sender: u32, distant: bool },
    Land { which: usize, dropped: bool },
    GiveUp { sender: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..3_u32, any::<bool>()).prop_map(|(sender, distant)| Step::Arrive { sender, distant }),
        4 => (any::<usize>(), prop::bool::weighted(0.2)).prop_map(|(which, dropped)| Step::Land { which, dropped }),
        1 => (0..3_u32).prop_map(|sender| Step::GiveUp { sender }),
    ]
}

#[derive(Default)]
struct World {
    landing: Landing<(u32, u64)>,
    open: Vec<(u32, u64, u64)>,
    passed: HashMap<u32, Vec<u64>>,
    wanted: HashMap<u32, Vec<u64>>,
}

impl World {
    fn land(&mut self, (sender, number, serial): (u32, u64, u64), dropped: bool) {
        let message = (!dropped).then_some((sender, serial));
        if dropped {
            self.wanted.entry(sender).or_default().retain(|one| *one != serial);
        }
        assert!(self.landing.is_open(addr(sender), number));
        if self.landing.land(addr(sender), number, message) {
            while let Some((from, serial)) = self.landing.next(addr(sender)) {
                assert_eq!(from, sender, "one of another sender");
                self.passed.entry(sender).or_default().push(serial);
                // Meanwhile nobody else may be told to pass on the sender's messages (LND-3).
                let again = self.landing.open(addr(sender));
                assert!(!self.landing.land(addr(sender), again, None), "two let through what one has sent");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn each_sender_is_heard_in_its_order(steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::default();
        for (serial, step) in (1_u64..).zip(steps) {
            match step {
                Step::Arrive { sender, distant: true } => {
                    let number = world.landing.open(addr(sender));
                    world.open.push((sender, number, serial));
                    world.wanted.entry(sender).or_default().push(serial);
                }
                Step::Arrive { sender, distant: false } => {
                    let waits = world.open.iter().any(|(from, ..)| *from == sender);
                    let passes = world.landing.arrive(addr(sender), (sender, serial));
                    // LND-2: it waits if and only if something of its own sender does.
                    prop_assert_eq!(passes.is_none(), waits);
                    world.wanted.entry(sender).or_default().push(serial);
                    if passes.is_some() {
                        world.passed.entry(sender).or_default().push(serial);
                    }
                }
                Step::Land { which, dropped } => {
                    if !world.open.is_empty() {
                        let open = world.open.remove(which % world.open.len());
                        world.land(open, dropped);
                    }
                }
                Step::GiveUp { sender } => {
                    world.landing.give_up(|one| one == addr(sender));
                    let late: Vec<_> = world.open.extract_if(.., |(from, ..)| *from == sender).collect();
                    for (from, number, _) in late {
                        prop_assert!(!world.landing.is_open(addr(from), number));
                        prop_assert!(!world.landing.land(addr(from), number, Some((from, 0))), "of one that was given up");
                    }
                    let passed = world.passed.get(&sender).cloned().unwrap_or_default();
                    world.wanted.insert(sender, passed);
                }
            }
            for (sender, passed) in &world.passed {
                let wanted = world.wanted.get(sender).cloned().unwrap_or_default();
                prop_assert_eq!(&wanted[..passed.len()], &passed[..]);
            }
        }
        for open in std::mem::take(&mut world.open) {
            world.land(open, false);
        }
        prop_assert!(world.landing.is_empty());
        prop_assert_eq!(world.passed, world.wanted.into_iter().filter(|(_, all)| !all.is_empty()).collect::<HashMap<_, _>>());
    }
}
