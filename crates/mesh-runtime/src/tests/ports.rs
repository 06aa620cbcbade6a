//! Ports: values and receives meet once whoever races (PRT-1), and senders learn of the end (PRT-2).

use super::{options, procs};
use crate::call::Outcome;
use crate::calls::Calls;
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::ports::{Inlet, Taken};
use crate::reactor::Reactor;
use crate::shm::Memory;
use crate::{Body, Posting, Runtime, RuntimeError, Said, Way};
use mesh_proto::messages::{Answer, Post, Reply, Returned};
use mesh_proto::{Ended, Exit, Frame, Header, Kind, Placement, ProcAddr, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SAID: Said<'static> = Said { error: false, place: None };

fn message(header: Header, payload: u64) -> Message {
    Message::new(Frame::build_plain(header, None, b"", &payload.to_le_bytes()), &Memory::new(0, 1))
}

fn post(payload: u64) -> Message {
    let me = ProcAddr::CONTROLLER;
    message(Post { port: 1, error: false, rank: 0 }.header(me, me), payload)
}

fn reply(answer: Answer, payload: u64) -> Outcome {
    let me = ProcAddr::CONTROLLER;
    let header = Reply { actor: 5, call: 1, place: 0, answer }.header(me, me);
    Outcome::Replied(Arc::new(message(header, payload)))
}

fn value(outcome: &Outcome) -> Option<u64> {
    let Outcome::Replied(message) = outcome else { return None };
    let (payload, _) = message.open().unwrap();
    Some(u64::from_le_bytes(payload.as_ref().try_into().unwrap()))
}

fn taken(call: &crate::Call) -> Option<u64> {
    value(call.take_outcomes()?.first()?)
}

#[test]
fn values_and_receives_meet_in_order() {
    let runtime = Runtime::controller(options()).unwrap();
    let mailbox = runtime.open_port(false).unwrap();
    let outlet = runtime.outlet(runtime.me(), Way::Channel { id: mailbox.id(), once: false }, false);
    let early = [mailbox.receive().unwrap(), mailbox.receive().unwrap()];
    for n in 0..4_u64 {
        outlet.send(SAID, Body::new(&n.to_le_bytes(), &[]), Posting::Now(false)).unwrap();
    }
    let late = [mailbox.receive().unwrap(), mailbox.receive().unwrap()];
    assert_eq!(mailbox.len(), 0);
    // A value that nobody looked at is the next one again, ahead of later ones.
    outlet.send(SAID, Body::new(&4_u64.to_le_bytes(), &[]), Posting::Now(false)).unwrap();
    mailbox.give_up(&late[1]);
    mailbox.give_up(&late[0]);
    assert_eq!(mailbox.len(), 3);
    assert_eq!(early.map(|receive| taken(&receive.call)), [Some(0), Some(1)]);
    for n in 2..5 {
        assert_eq!(taken(&mailbox.receive().unwrap().call), Some(n));
    }
    let waiting = mailbox.receive().unwrap();
    assert!(mailbox.cancel(&waiting) && !mailbox.cancel(&waiting));
    outlet.send(SAID, Body::new(&5_u64.to_le_bytes(), &[]), Posting::Now(false)).unwrap();
    assert_eq!(taken(&mailbox.receive().unwrap().call), Some(5));
    drop(mailbox);
    assert!(matches!(outlet.send(SAID, Body::new(b"", &[]), Posting::Now(false)), Err(RuntimeError::PortClosed(_))));
    drop(outlet);
    assert_eq!((runtime.counts().ports, runtime.counts().calls), (0, 0));
    runtime.close(Duration::ZERO);
}

#[test]
fn a_port_for_one_value_is_over_when_it_was_received() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    let inlet = Inlet::new(true, Account::new(1, 1 << 20, None));
    assert_eq!(inlet.push(&reactor, &calls, post(7)), Taken::Last);
    assert_eq!(inlet.push(&reactor, &calls, post(8)), Taken::Refused);
    assert_eq!(inlet.close(&reactor, &calls).len(), 1);
    assert!(inlet.close(&reactor, &calls).is_empty());
}

#[test]
fn nothing_is_lost_between_giving_up_and_receiving() {
    let runtime = Runtime::controller(options()).unwrap();
    let mailbox = runtime.open_port(false).unwrap();
    const COUNT: u64 = 3000;
    let done = AtomicBool::new(false);
    let mut got = Vec::new();
    std::thread::scope(|scope| {
        let (runtime, mailbox, done) = (&runtime, &mailbox, &done);
        scope.spawn(move || {
            let outlet = runtime.outlet(runtime.me(), Way::Channel { id: mailbox.id(), once: false }, false);
            for n in 0..COUNT {
                outlet.send(SAID, Body::new(&n.to_le_bytes(), &[]), Posting::Now(false)).unwrap();
            }
            done.store(true, Ordering::SeqCst);
        });
        while got.len() < COUNT as usize {
            let receive = mailbox.receive().unwrap();
            if mailbox.cancel(&receive) {
                mailbox.give_up(&receive);
            } else {
                got.extend(taken(&receive.call));
            }
        }
    });
    assert!(done.load(Ordering::SeqCst));
    assert!(got.into_iter().eq(0..COUNT), "in order, once each");
    drop(mailbox);
    runtime.close(Duration::ZERO);
}

#[test]
fn a_stream_takes_what_comes_until_its_ranks_have_ended() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    let call = calls.open(Target::Many(7, procs(2), Placement::On(0)), true);
    for n in 0..3 {
        calls.on_outcome(&reactor, call.id, 1, reply(Answer::More, n));
    }
    assert_eq!(call.arrived(), 3);
    let me = ProcAddr::CONTROLLER;
    let ended = Returned { actor: 5, call: 1, place: 1, port_ended: true }.header(me, me);
    calls.on_outcome(&reactor, call.id, 1, Outcome::Replied(Arc::new(message(ended, 0))));
    calls.on_outcome(&reactor, call.id, 1, reply(Answer::More, 9));
    assert_eq!(call.arrived(), 3, "what comes after the end is dropped");
    assert!(!call.is_done());
    calls.on_outcome(&reactor, call.id, 0, reply(Answer::Raised, 5));
    assert!(call.is_done());
    assert_eq!(call.arrived(), 4);
    assert_eq!(call.take_nth(0).and_then(|(_, one)| value(&one)), Some(0));
    assert!(matches!(call.nth(0), Some((1, Outcome::Cancelled))), "it was taken");
    assert_eq!(calls.len(), 0);
}

#[test]
fn the_first_of_several_answers_completes_a_plain_call() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    let call = calls.open(Target::Many(7, procs(1), Placement::On(0)), false);
    let more = |n| reply(Answer::More, n);
    assert!(calls.offer(&reactor, call.id, 0, more(1)));
    assert!(!calls.offer(&reactor, call.id, 0, more(2)), "nobody waits any more");
    assert_eq!(taken(&call), Some(1));
}

#[test]
fn one_reply_or_one_failure_speaks_for_all_of_a_combined_call() {
    let reactor = Reactor::new().unwrap();
    let calls = Calls::default();
    let target = Target::Many(7, procs(3), Placement::On(0));
    let ended = Arc::new(Ended {
        pid: None,
        exit: Exit::Unknown,
        orderly: false,
        reason: mesh_proto::EndReason::NotMade("died".to_owned()),
        stderr_tail: Vec::new(),
    });
    let open = || {
        let call = calls.open(target.clone(), false);
        call.mark_reduced(target.clone(), 5);
        call
    };
    let call = open();
    calls.on_outcome(&reactor, call.id, 0, reply(Answer::Value, 6));
    assert!(call.is_done() && calls.take_fallen().is_empty());
    assert_eq!(taken(&call), Some(6));

    let call = open();
    calls.on_outcome(&reactor, call.id, 2, reply(Answer::Raised, 6));
    calls.on_outcome(&reactor, call.id, 0, reply(Answer::Value, 6));
    let outcomes = call.take_outcomes().unwrap();
    assert!(matches!(outcomes[..], [Outcome::Cancelled, Outcome::Cancelled, Outcome::Replied(_)]));
    let fallen = calls.take_fallen();
    assert_eq!(fallen.iter().map(|call| call.id).collect::<Vec<_>>(), [call.id], "its ranks are to be told, once");

    let call = open();
    calls.on_down(&reactor, ProcAddr { mesh: 7, rank: 1, host: 0 }, &ended);
    assert!(matches!(call.take_outcomes().unwrap()[1], Outcome::Lost(_)));
    assert_eq!(calls.take_fallen().len(), 1);
    assert_eq!(calls.len(), 0);
}

/// PRT-3: the caller learns that the port was let go of, unless it was handed on.
#[test]
fn a_port_that_an_endpoint_lets_go_of_ends_its_call() {
    let runtime = Runtime::controller(options()).unwrap();
    let me = runtime.me();
    for (handed_on, ends) in [(false, true), (true, false)] {
        let call = runtime.calls.open(Target::One(me), false);
        let way = Way::Response { call: call.id, actor: 1, index: 0, stream: false };
        let port = runtime.outlet(me, way, true);
        let copy = handed_on.then(|| {
            port.hand_on();
            runtime.outlet(me, way, false)
        });
        drop(port);
        drop(copy);
        assert_eq!(call.is_done(), ends);
        runtime.calls.cancel(&runtime.reactor, &call);
    }
    assert_eq!(runtime.counts().ports, 0);
    runtime.close(Duration::ZERO);
}

#[test]
fn a_closed_notice_that_is_garbage_harms_nobody() {
    let runtime = Runtime::controller(options()).unwrap();
    let me = runtime.me();
    let outlet = runtime.outlet(me, Way::Channel { id: 1, once: false }, false);
    for payload in [&b""[..], b"short", &[0; 13], &[255; 12]] {
        let header = Header::new(Kind::Closed, me, me);
        runtime.dispatch(Frame::build_plain(header, None, b"why", payload), None);
    }
    runtime.dispatch(Frame::build(Header::new(Kind::Closed, me, me), None, b"", &[]), None);
    assert!(outlet.is_open());
    // A value for a port that was never opened is refused, not kept.
    assert!(outlet.send(SAID, Body::new(b"x", &[]), Posting::Now(false)).is_err() && !outlet.is_open());
    drop(outlet);
    runtime.close(Duration::ZERO);
}

/// Tidings about ports that nobody sends: they end nothing, and nothing is kept.
#[test]
fn nonsense_about_holders_does_no_harm() {
    let runtime = Runtime::controller(options()).unwrap();
    let call = runtime.open(Target::One(ProcAddr { mesh: 7, rank: 0, host: 0 }), false).unwrap();
    let stranger = ProcAddr { mesh: 9, rank: 9, host: 9 };
    for id in [0, call.id, call.id + 1, u64::MAX] {
        for index in [1, u32::MAX] {
            for bits in [0_u16, 1 << 8, 1 << 9, 3 << 8] {
                for list in [&b""[..], b"short", &[0xff; 16], &[1; 33], &[7; 16 * 2000]] {
                    let mut raw = Header::new(Kind::Held, stranger, runtime.me()).encode();
                    raw[4..6].copy_from_slice(&bits.to_le_bytes());
                    raw[48..56].copy_from_slice(&u64::to_le_bytes(id));
                    raw[60..64].copy_from_slice(&u32::to_le_bytes(index));
                    let header = Header::decode(&raw).unwrap();
                    runtime.deliver(Frame::build_plain(header, None, b"\xff\x00", list));
                }
            }
        }
    }
    assert!(!call.is_done());
    runtime.calls.cancel(&runtime.reactor, &call);
    runtime.close(Duration::ZERO);
}
