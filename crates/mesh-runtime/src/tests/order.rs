//! ORD-1 if sender and receiver share a process, or a host: casts and single messages keep one order.

use super::dice::Dice;
use super::pair::{ACTOR, Host, MESH, out};
use super::{SOON, options};
use crate::{Inbox, Outgoing, Runtime, Waited};
use mesh_proto::messages::Request;
use mesh_proto::{Kind, Placement, ProcAddr, Target};
use mesh_topology::{Region, Slice};
use std::sync::Arc;
use std::time::Instant;

/// An actor that handles nothing: the tests read its inboxes.
pub(super) const LISTENER: u64 = 6;
const RANKS: usize = 3;
const ROUNDS: u64 = 400;

pub(super) fn one(rank: usize) -> Target {
    Target::One(ProcAddr { mesh: MESH, rank: u32::try_from(rank).unwrap(), host: 0 })
}

fn many(first: usize, count: usize) -> Target {
    let region = Region::new(&["procs"], Slice::new(first, &[count], &[1]).unwrap()).unwrap();
    Target::Many(MESH, region, Placement::On(0))
}

fn send(from: &Runtime, request: Request, target: &Target, payload: &[u8], buffers: &[&[u8]]) {
    from.tell(&Outgoing { actor: LISTENER, ..out(request, target, payload, buffers) }).unwrap();
}

/// Spawns the listener on every rank, and returns its inboxes.
pub(super) fn listeners(host: &Host) -> Vec<Arc<Inbox>> {
    send(&host.controller, Request::Spawn, &many(0, host.workers.len()), b"", &[]);
    host.workers.iter().map(|(worker, _)| soon(|| worker.inbox(LISTENER))).collect()
}

/// Waits for something that appears before long.
pub(super) fn soon<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "it never came");
        std::thread::yield_now();
    }
}

/// The next message in an inbox: its kind and payload.
pub(super) fn next(inbox: &Inbox) -> (Kind, Vec<u8>) {
    let message = soon(|| inbox.take(1).pop());
    (message.header().kind, message.open().unwrap().0.to_vec())
}

/// Each thread of each process sends to all ranks, to some, or to one, by casts and single messages, small and large.
#[test]
fn whatever_the_adverb_each_sender_is_heard_in_order() {
    let host = Host::new(u32::try_from(RANKS).unwrap(), options());
    let inboxes = listeners(&host);
    let senders: Vec<&Runtime> =
        host.workers.iter().flat_map(|(worker, _)| [&**worker, &**worker]).chain([&*host.controller]).collect();
    let large = vec![7; 70_000];
    std::thread::scope(|scope| {
        for (sender, runtime) in senders.iter().enumerate() {
            let large = &large;
            scope.spawn(move || {
                let mut dice = Dice(sender as u64);
                let mut sent = [0_u64; RANKS];
                for _ in 0..ROUNDS {
                    let first = dice.roll(RANKS);
                    let count = 1 + dice.roll(RANKS - first);
                    let target = if dice.roll(2) == 0 { one(first) } else { many(first, count) };
                    let ranks = first..first + target.len();
                    // Each receiver has its own count: nothing may be missing, come twice, or out of turn.
                    let mut payload = (sender as u64).to_le_bytes().to_vec();
                    for (rank, sent) in sent.iter_mut().enumerate() {
                        payload.extend_from_slice(&sent.to_le_bytes());
                        *sent += u64::from(ranks.contains(&rank));
                    }
                    let buffers: &[&[u8]] = if dice.roll(8) == 0 { &[large] } else { &[] };
                    send(runtime, Request::CALL, &target, &payload, buffers);
                }
                for rank in 0..RANKS {
                    send(runtime, Request::CALL, &one(rank), b"end", &[]);
                }
            });
        }
        for (rank, inbox) in inboxes.iter().enumerate() {
            let senders = senders.len();
            scope.spawn(move || {
                let mut heard = vec![0_u64; senders];
                let mut ended = 0;
                while ended < senders {
                    let (_, payload) = next(inbox);
                    if payload == b"end" {
                        ended += 1;
                        continue;
                    }
                    let word = |at: usize| u64::from_le_bytes(payload[8 * at..8 * at + 8].try_into().unwrap());
                    let sender = usize::try_from(word(0)).unwrap();
                    assert_eq!(word(1 + rank), heard[sender], "rank {rank} heard sender {sender} out of order");
                    heard[sender] += 1;
                }
            });
        }
    });
    let linked = host.workers.iter().map(|(worker, _)| worker.counts().links).max();
    assert!(linked > Some(1), "nothing went by a direct link");
    drop(inboxes);
    host.close();
}

#[test]
fn a_call_does_not_overtake_the_spawn_nor_a_stop_the_call() {
    let host = Host::new(2, options());
    // Each serving thread waits for its process's first spawn, which must be its own actor's.
    host.workers.iter().for_each(|(worker, _)| drop(soon(|| worker.inbox(ACTOR))));
    let worker = &host.workers[0].0;
    let mine = one(0);
    for actor in 100..200 {
        let whole = many(0, 2);
        let to = |request, target| Outgoing { actor, ..out(request, target, b"", &[]) };
        worker.tell(&to(Request::Spawn, &whole)).unwrap();
        let (call, _) = worker.call(&to(Request::CALL, &mine), false).unwrap();
        worker.tell(&to(Request::CALL, &whole)).unwrap();
        worker.tell(&to(Request::StopActor, &mine)).unwrap();
        let inbox = worker.inbox(actor).unwrap();
        let kinds: Vec<Kind> = (0..3).map(|_| next(&inbox).0).collect();
        assert_eq!(kinds, [Kind::Call, Kind::Tell, Kind::StopActor]);
        let there = soon(|| host.workers[1].0.inbox(actor));
        assert_eq!(next(&there).0, Kind::Tell);
        assert!(worker.cancel(&call, &mine, actor));
    }
    host.close();
}

/// What a receiver sends because of a cast comes after that cast, in the sender's process as in any other.
#[test]
fn nobody_on_the_host_sees_the_effect_of_a_cast_before_the_cast() {
    let host = Host::new(2, options());
    let inboxes = listeners(&host);
    let both = many(0, 2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                send(&host.workers[0].0, Request::CALL, &both, &round.to_le_bytes(), &[]);
            }
        });
        for (rank, inbox) in inboxes.iter().enumerate() {
            let (runtime, other) = (&host.workers[rank].0, one(1 - rank));
            scope.spawn(move || {
                let (mut casts, mut effects) = (0, 0);
                while casts < ROUNDS || effects < ROUNDS {
                    let (_, payload) = next(inbox);
                    if let Ok(round) = payload[..].try_into().map(u64::from_le_bytes) {
                        assert_eq!(round, casts);
                        casts += 1;
                        send(runtime, Request::CALL, &other, &[&payload[..], b"!"].concat(), &[]);
                    } else {
                        effects += 1;
                        assert!(effects <= casts, "rank {rank} heard of cast {effects} before it came");
                    }
                }
            });
        }
    });
    drop(inboxes);
    host.close();
}

#[test]
fn a_cast_to_its_sender_alone_takes_no_detour() {
    let host = Host::new(2, options());
    let inboxes = listeners(&host);
    let worker = &host.workers[0].0;
    // Nobody reads the controller's links, so nothing could come back from there.
    let gate = host.controller.reactor.stall();
    send(worker, Request::CALL, &many(0, 1), b"mine", &[]);
    send(worker, Request::CALL, &many(0, 2), b"ours", &[]);
    assert_eq!(next(&inboxes[0]).1, b"mine");
    assert_eq!(next(&inboxes[0]).1, b"ours");
    assert!(inboxes[1].is_empty());
    drop(gate);
    assert_eq!(next(&inboxes[1]).1, b"ours");
    assert!(inboxes[0].is_empty());
    host.close();
}

/// A call to many that include the caller's own process: one answer from each, in its place.
#[test]
fn a_call_to_many_that_includes_the_caller_has_every_answer_once() {
    let host = Host::new(3, options());
    let worker = &host.workers[1].0;
    soon(|| worker.inbox(ACTOR));
    for _ in 0..50 {
        for (first, count) in [(0, 3), (1, 2), (0, 2), (1, 1)] {
            let target = many(first, count);
            let (call, _) = worker.call(&out(Request::CALL, &target, b"hi", &[]), false).unwrap();
            assert_eq!(worker.wait_call(&call, None, super::soon(), false, false), Waited::Ready);
            let outcomes = call.take_outcomes().unwrap();
            assert_eq!(outcomes.len(), count);
            for (place, outcome) in outcomes.iter().enumerate() {
                let crate::Outcome::Replied(message) = outcome else { panic!("{outcome:?}") };
                assert_eq!(message.header().src.rank as usize, first + place);
                assert_eq!(message.open().unwrap().0, &b"hi"[..]);
            }
        }
    }
    host.close();
}
