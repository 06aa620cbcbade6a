//! Calls: outcomes, cancellation and closing from many threads at once; inboxes and how they close.

use super::procs;
use crate::call::Outcome;
use crate::calls::Calls;
use crate::inbox::Inbox;
use crate::loop_waker::LoopWaker;
use crate::message::Message;
use crate::reactor::Reactor;
use crate::shm::Memory;
use mesh_proto::{Ended, Exit, Frame, Placement, ProcAddr, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn memory() -> Memory {
    Memory::new(0, 1)
}

fn message(call: u64) -> Message {
    let me = ProcAddr::CONTROLLER;
    let header = mesh_proto::messages::Call { actor: 5, call, place: 0, stream: false, task: None }.header(me, me);
    Message::new(Frame::build_plain(header, None, b"", b"x"), &memory())
}

fn ended() -> Arc<Ended> {
    Arc::new(Ended {
        pid: None,
        exit: Exit::Unknown,
        orderly: true,
        reason: mesh_proto::EndReason::NotMade("closed".to_owned()),
        stderr_tail: Vec::new(),
    })
}

#[test]
fn a_call_has_its_time_also_if_the_reply_is_quicker_than_the_one_who_asks_for_it() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    for late in [false, true] {
        let call = calls.open(Target::One(ProcAddr { mesh: 7, rank: 0, host: 0 }), false);
        if !late {
            call.keep_time();
        }
        calls.on_outcome(&reactor, call.id, 0, Outcome::Replied(Arc::new(message(call.id))));
        if late {
            assert!(call.finished().is_none());
            call.keep_time();
        }
        assert!(call.finished().is_some());
    }
}

#[test]
fn a_call_completes_once_whoever_races() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    for round in 0..300 {
        let call = calls.open(Target::Many(7, procs(4), Placement::On(0)), round % 2 == 0);
        let cancelled = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let (calls, reactor, id) = (&calls, &reactor, call.id);
                scope.spawn(move || {
                    calls.on_outcome(reactor, id, rank, Outcome::Replied(Arc::new(message(id))));
                    // Late and hostile outcomes are dropped.
                    calls.on_outcome(reactor, id, rank, Outcome::Lost(ended()));
                    calls.on_outcome(reactor, id, usize::MAX, Outcome::Lost(ended()));
                });
            }
            let (calls, reactor, call, cancelled) = (&calls, &reactor, &call, &cancelled);
            for _ in 0..2 {
                scope.spawn(move || {
                    cancelled.fetch_add(usize::from(calls.cancel(reactor, call)), Ordering::SeqCst);
                });
            }
            scope.spawn(move || calls.on_down(reactor, ProcAddr { mesh: 7, rank: 2, host: 0 }, &ended()));
        });
        assert!(call.is_done());
        assert!(cancelled.load(Ordering::SeqCst) <= 1);
        let outcomes = call.take_outcomes().unwrap();
        assert_eq!(outcomes.len(), 4);
        let lost: Vec<usize> = (0..4).filter(|i| matches!(outcomes[*i], Outcome::Lost(_))).collect();
        assert!(lost.is_empty() || lost == [2], "only rank 2 died: {lost:?}");
        if cancelled.load(Ordering::SeqCst) == 0 {
            assert!(outcomes.iter().all(|one| !matches!(one, Outcome::Cancelled)));
        }
        assert!(call.take_outcomes().is_none(), "once only");
    }
    assert_eq!(calls.len(), 0);
}

/// GTH-1: only a loss that the call still waits for counts.
#[test]
fn whoever_has_answered_may_die() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    let addr = |rank| ProcAddr { mesh: 7, rank, host: 0 };
    let died = Arc::new(Ended { orderly: false, ..(*ended()).clone() });
    let call = calls.open(Target::Many(7, procs(3), Placement::On(0)), false);
    calls.on_outcome(&reactor, call.id, 1, Outcome::Replied(Arc::new(message(1))));
    assert_eq!(calls.on_down(&reactor, addr(1), &died), 0, "nobody waits for it");
    calls.on_outcome(&reactor, call.id, 1, Outcome::Lost(Arc::clone(&died)));
    assert!(call.lost().is_none() && call.arrived() == 0);
    assert_eq!(calls.on_down(&reactor, addr(2), &died), 1);
    calls.on_outcome(&reactor, call.id, 2, Outcome::Replied(Arc::new(message(1))));
    assert!(matches!(call.lost(), Some((2, Outcome::Lost(_)))));
    calls.on_outcome(&reactor, call.id, 0, Outcome::Replied(Arc::new(message(1))));
    let outcomes = call.take_outcomes().unwrap();
    assert!(matches!(outcomes[..], [Outcome::Replied(_), Outcome::Replied(_), Outcome::Lost(_)]));
    // A complete call has no further loss, whatever comes.
    calls.on_outcome(&reactor, call.id, 0, Outcome::Lost(died));
    assert!(matches!(call.lost(), Some((2, _))));
}

#[test]
fn a_stream_hands_out_each_outcome_in_the_order_of_arrival() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    let call = calls.open(Target::Many(7, procs(4), Placement::On(0)), true);
    let waker = Arc::new(LoopWaker::new().unwrap());
    for (n, rank) in [2, 0, 3, 1].into_iter().enumerate() {
        call.tell(&reactor, &waker, n as u64, n);
        assert!(waker.drain().is_empty(), "nothing came yet");
        calls.on_outcome(&reactor, call.id, rank, Outcome::Replied(Arc::new(message(1))));
        assert_eq!(call.arrived(), n + 1);
        assert_eq!(call.nth(n).unwrap().0, rank);
        assert_eq!(waker.drain(), [n as u64]);
    }
    assert!(call.is_done() && call.nth(4).is_none());
    call.tell(&reactor, &waker, 9, usize::MAX);
    assert_eq!(waker.drain(), [9], "a call that is over tells at once");
}

#[test]
fn closing_fails_what_waits_and_nothing_else() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    let open: Vec<_> = (0..20).map(|_| calls.open(Target::Many(7, procs(2), Placement::On(0)), false)).collect();
    calls.on_outcome(&reactor, open[3].id, 1, Outcome::Replied(Arc::new(message(1))));
    calls.fail_all(&reactor, &ended());
    assert_eq!(calls.len(), 0);
    for (i, call) in open.iter().enumerate() {
        let outcomes = call.take_outcomes().unwrap();
        assert!(matches!(outcomes[0], Outcome::Lost(_)));
        assert_eq!(matches!(outcomes[1], Outcome::Replied(_)), i == 3);
    }
    let nobody = calls.open(Target::Many(7, procs(0), Placement::On(0)), false);
    assert!(nobody.is_done() && nobody.take_outcomes().unwrap().is_empty());
}

#[test]
fn an_inbox_keeps_order_and_gives_back_what_is_left() {
    let reactor = Reactor::new().unwrap();
    let inbox = Inbox::new(5, crate::Gauge::new(None));
    for call in 1..=10 {
        assert!(inbox.push(&reactor, message(call)));
    }
    let numbers = |burst: Vec<Message>| burst.iter().map(|one| one.meaning().call()).collect::<Vec<_>>();
    assert_eq!(numbers(inbox.take(3)), [1, 2, 3]);
    assert_eq!(numbers(inbox.take(0)), []);
    assert_eq!(inbox.len(), 7);
    assert_eq!(numbers(inbox.close(&reactor)), [4, 5, 6, 7, 8, 9, 10]);
    assert!(inbox.is_closed() && inbox.is_empty());
    assert!(!inbox.push(&reactor, message(11)), "a closed inbox takes no more");
    assert!(inbox.take(9).is_empty() && inbox.close(&reactor).is_empty());
}

#[test]
fn a_loop_is_told_once_a_burst_also_where_a_thread_waited_before() {
    let reactor = Reactor::new().unwrap();
    let inbox = Inbox::new(5, crate::Gauge::new(None));
    // A thread prepared to wait, found something, and left its registration behind.
    inbox.expect(&reactor);
    let waker = Arc::new(LoopWaker::new().unwrap());
    inbox.attach(&reactor, Arc::clone(&waker), 8);
    assert!(waker.drain().is_empty());
    for call in 0..3 {
        inbox.push(&reactor, message(call));
    }
    assert_eq!(waker.drain(), [8]);
    inbox.take(2);
    inbox.push(&reactor, message(3));
    assert!(waker.drain().is_empty(), "the loop has not emptied it since it was told");
    inbox.take(9);
    inbox.push(&reactor, message(4));
    assert_eq!(waker.drain(), [8]);
}

#[test]
fn messages_are_lost_nowhere_between_pushing_and_closing() {
    let reactor = Reactor::new().unwrap();
    for _ in 0..200 {
        let inbox = Inbox::new(1, crate::Gauge::new(None));
        let (pushed, got) = std::thread::scope(|scope| {
            let (inbox, reactor) = (&inbox, &reactor);
            let push = scope.spawn(move || (0..50).filter(|call| inbox.push(reactor, message(*call))).count());
            let take = scope.spawn(move || (0..10).map(|_| inbox.take(7).len()).sum::<usize>());
            let close = scope.spawn(move || inbox.close(reactor).len());
            (push.join().unwrap(), take.join().unwrap() + close.join().unwrap())
        });
        assert_eq!(pushed, got);
    }
}
