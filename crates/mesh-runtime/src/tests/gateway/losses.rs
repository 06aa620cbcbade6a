//! Connections and hosts that are lost.

use super::member::{Job, LARGE, Member, Site, attach, is_up, options};
use super::road::{Road, Way};
use super::{Arc, Trio};
use crate::call::Outcome;
use crate::gateway::agents;
use crate::tests::SOON;
use mesh_proto::Target;
use mesh_proto::control::StopProcs;
use mesh_proto::hosts::{Fate, HostSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Messages up to this length arrive in the order in which they were sent.
const SMALL: usize = 20 << 10;

/// A trio whose controller reaches the first host through a road.
fn by_road(fan_out: u32) -> (Trio, Road) {
    let made = Mutex::new(None);
    let trio = Trio::new(fan_out, |nth, address| {
        if nth > 0 {
            return address;
        }
        let road = Road::to(&address);
        let address = road.address();
        *made.lock().unwrap() = Some(road);
        address
    });
    (trio, made.into_inner().unwrap().unwrap())
}

#[test]
fn hosts_that_join_reach_each_other_through_others() {
    // A chain: the second host is reached through the first.
    let trio = Trio::plain(1);
    let [first, second] = &trio.sites;
    trio.controller.until("both names", |heard| heard.attached.len() == 2);
    for number in 0..200 {
        let len = if number % 10 == 0 { SMALL } else { 100 };
        trio.controller.tell(2, number, len);
        second.member.tell(0, number, len);
        first.member.tell(2, number, len);
    }
    let all: Vec<u32> = (0..200).collect();
    second.member.until("messages", |heard| heard.from(0).len() == 200 && heard.from(1).len() == 200);
    trio.controller.until("messages", |heard| heard.from(2).len() == 200);
    assert_eq!(second.member.heard(|heard| (heard.from(0), heard.from(1))), (all.clone(), all.clone()));
    assert_eq!(trio.controller.heard(|heard| heard.from(2)), all);
    // In segments, and put together again.
    second.member.tell(0, 7, 40 * LARGE);
    trio.controller.until("a large message", |heard| heard.told.iter().any(|(.., len)| *len >= 40 * LARGE));
    trio.all_well();
}

/// A host that was connected before is dialed again if bytes of a handshake were damaged on the way.
#[test]
fn a_damaged_handshake_costs_no_host() {
    let (trio, road) = by_road(2);
    for number in 0..6 {
        road.damage(if number % 2 == 0 { Way::There } else { Way::Back });
        trio.controller.tell(1, number, 10);
        trio.sites[0]
            .member
            .until("a message", |heard| heard.from(0).len() > number as usize || !heard.ended.is_empty());
        assert!(road.has_damaged());
    }
    trio.all_well();
}

/// An address at which something else answers is wrong, and the host is not waited for.
#[test]
fn a_host_that_never_was_one_is_not_dialed_again() {
    let job = Job::new();
    let controller = Member::controller();
    let site = Site::new(&job.host, 1);
    let road = Road::to(&site.address());
    road.damage(Way::Back);
    let outcomes = attach(&controller, &job, &[road.address()], 2);
    assert!(matches!(outcomes[..], [Outcome::Lost(_)]), "{outcomes:?}");
    controller.close();
}

#[test]
fn messages_arrive_once_and_in_order_though_connections_break() {
    let (trio, road) = by_road(2);
    let [first, second] = &trio.sites;
    for number in 0..400 {
        if number % 50 == 25 {
            road.cut();
        }
        trio.controller.tell(1, number, 3000);
        first.member.tell(0, number, 3000);
        first.member.tell(2, number, 10);
    }
    let all: Vec<u32> = (0..400).collect();
    first.member.until("messages", |heard| heard.from(0).len() >= 400);
    trio.controller.until("messages", |heard| heard.from(1).len() >= 400);
    second.member.until("messages", |heard| heard.from(1).len() >= 400);
    assert_eq!(first.member.heard(|heard| heard.from(0)), all);
    assert_eq!(trio.controller.heard(|heard| heard.from(1)), all);
    assert_eq!(second.member.heard(|heard| heard.from(1)), all);
    trio.all_well();
}

/// GTW-1: whatever happens to connections within the window, and whatever is written into them.
#[test]
fn random_blocks_breaks_and_garbage_lose_and_reorder_nothing() {
    for seed in 1..=6_u64 {
        let (trio, road) = by_road(1 + (seed % 2) as u32);
        let first = &trio.sites[0].member;
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut sent = 0;
        for _ in 0..60 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            match random % 10 {
                0 => road.cut(),
                1 => {
                    // Only on a connection that is up: a garbled handshake counts as a refusal.
                    road.block(false);
                    trio.controller.tell(1, sent, 10);
                    first.tell(0, sent, 10);
                    sent += 1;
                    first.until("messages", |heard| heard.told.len() == sent as usize);
                    trio.controller.until("messages", |heard| heard.told.len() == sent as usize);
                    road.garble();
                }
                2 => road.block(true),
                3 => road.block(false),
                _ => {
                    for number in sent..sent + 5 {
                        trio.controller.tell(1, number, (random >> 32) as usize % SMALL);
                        first.tell(0, number, (random >> 40) as usize % SMALL);
                    }
                    sent += 5;
                }
            }
        }
        road.block(false);
        let all: Vec<u32> = (0..sent).collect();
        first.until("messages", |heard| heard.told.len() >= all.len());
        trio.controller.until("messages", |heard| heard.told.len() >= all.len());
        assert_eq!((first.heard(|heard| heard.from(0)), seed), (all.clone(), seed));
        assert_eq!((trio.controller.heard(|heard| heard.from(1)), seed), (all, seed));
        trio.all_well();
    }
}

/// GTW-2
#[test]
fn a_host_that_dies_is_dead_for_everybody_and_what_was_sent_to_it_comes_back() {
    let (trio, road) = by_road(2);
    let second = &trio.sites[1].member;
    road.block(true);
    for number in 0..10 {
        trio.controller.tell(1, number, SMALL);
    }
    let Target::Many(_, ranks, _) = agents(1, 1) else { panic!("a region") };
    let call = trio.controller.calls.open(agents(1, 1), false);
    let within = Duration::from_secs(9);
    let stop = StopProcs { mesh: 5, call: call.id, first: 0, per_host: 1, within, ranks };
    crate::dispatch::Dispatch::dispatch(&*trio.controller, stop.frame(trio.controller.me, &agents(1, 1)));
    // Its machine is there, and nobody listens, so there is no need to wait.
    drop(road);
    trio.controller.until("the death", |heard| heard.lost == [1]);
    let outcomes = trio.controller.outcomes(&call);
    assert!(matches!(outcomes[..], [Outcome::Lost(_)]), "{outcomes:?}");
    trio.controller.until("what was lost", |heard| heard.bounced.len() == 10);
    second.until("the death", |heard| heard.lost == [1]);
    for member in [&trio.controller, second] {
        assert_eq!(member.heard(|heard| heard.died.clone()), [(1, Fate::Unreachable)]);
    }
    // What is sent from now on comes back at once, and the others go on.
    trio.controller.tell(1, 10, 10);
    second.tell(1, 11, 10);
    assert_eq!(trio.controller.heard(|heard| heard.bounced.last().copied()), Some((1, 10)));
    assert_eq!(second.heard(|heard| heard.bounced.clone()), [(1, 11)]);
    second.tell(0, 12, 10);
    trio.controller.until("a message", |heard| heard.from(2) == [12]);
    assert_eq!(trio.controller.gateway.live_hosts(), [2]);
}

#[test]
fn a_sender_waits_for_a_peer_that_does_not_read() {
    let (trio, road) = by_road(2);
    let hosts = HostSet::one(1);
    let budget = 1 << 20;
    assert!(trio.controller.gateway.wait_for_room(&hosts, budget, Instant::now()));
    road.block(true);
    // More than sockets hold.
    let count = 400;
    for number in 0..count {
        trio.controller.tell(1, number, LARGE);
    }
    assert!(trio.controller.gateway.outstanding_to(&hosts) > budget);
    assert!(!trio.controller.gateway.wait_for_room(&hosts, budget, Instant::now() + Duration::from_millis(1)));
    // There is room for others.
    assert!(trio.controller.gateway.wait_for_room(&HostSet::one(2), budget, Instant::now()));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| trio.controller.gateway.wait_for_room(&hosts, budget, Instant::now() + SOON));
        road.block(false);
        assert!(waiting.join().unwrap(), "room was made, and the sender goes on waiting");
    });
    trio.sites[0].member.until("all messages", |heard| heard.from(0).len() == count as usize);
    trio.all_well();
}

#[test]
fn a_host_with_credentials_of_another_job_is_not_attached_and_the_others_are() {
    let (job, other) = (Job::new(), Job::new());
    let controller = Member::controller();
    let (good, bad) = (Site::new(&job.host, 1), Site::new(&other.host, 2));
    let outcomes = attach(&controller, &job, &[good.address(), bad.address()], 2);
    assert!(is_up(&outcomes[0]) && matches!(outcomes[1], Outcome::Lost(_)), "{outcomes:?}");
    assert_eq!(controller.heard(|heard| heard.died.clone()), [(2, Fate::NotAuthenticated)]);
    controller.tell(1, 1, 10);
    good.member.until("a message", |heard| heard.from(0) == [1]);
    assert_eq!(bad.member.heard(|heard| heard.ended.len() + heard.told.len()), 0);
    controller.close();
}

#[test]
fn credentials_that_cannot_be_read_fail_the_call_and_not_the_next_one() {
    let job = Job::new();
    let controller = Member::controller();
    let site = Site::new(&job.host, 2);
    let nothing = || Err(crate::RuntimeError::Address("no such folder".to_owned()));
    let (base, call) = controller.gateway.attach(&[None], nothing, options(2)).unwrap();
    let outcomes = controller.outcomes(&call);
    assert!(base == 1 && matches!(outcomes[..], [Outcome::Lost(_)]), "{outcomes:?}");
    assert!(is_up(&attach(&controller, &job, &[site.address()], 2)[0]));
    controller.close();
}

/// ATT-1
#[test]
fn a_host_whose_address_comes_later_gets_what_was_sent_before() {
    let job = Job::new();
    let controller = Member::controller();
    let sites = [1, 2].map(|host| Site::new(&job.host, host));
    let identity = Arc::clone(&job.controller);
    let (_, call) = controller.gateway.attach(&[None, None], move || Ok(identity), options(1)).unwrap();
    controller.tell(2, 5, 10);
    controller.gateway.place_host(2, sites[1].address());
    controller.gateway.place_host(1, sites[0].address());
    assert!(controller.outcomes(&call).iter().all(is_up));
    sites[1].member.until("what was sent before", |heard| heard.from(0) == [5]);
    let identity = Arc::clone(&job.controller);
    let (base, call) = controller.gateway.attach(&[None], move || Ok(identity), options(1)).unwrap();
    controller.gateway.displace_host(base, "the launcher has given up");
    assert!(matches!(controller.outcomes(&call)[..], [Outcome::Lost(_)]));
    controller.close();
}
