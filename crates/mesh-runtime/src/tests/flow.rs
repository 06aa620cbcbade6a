//! Flow control and giving up, with threads: nobody who waits is forgotten.

use super::dice::Dice;
use super::{options, procs, soon};
use crate::call::Outcome;
use crate::calls::Calls;
use crate::inbox::Inbox;
use crate::meter::MailboxCredits;
use crate::reactor::Reactor;
use crate::{Body, Outgoing, Runtime, Terms, Waited};
use mesh_proto::messages::{Request, Tell};
use mesh_proto::{Ended, Exit, Frame, INITIAL_WINDOW, Placement, ProcAddr, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const ACTOR: u64 = 5;
const HERE: Target = Target::One(ProcAddr::CONTROLLER);

/// A runtime with one actor in it, and the actor's inbox.
fn host() -> (Arc<Runtime>, Arc<Inbox>) {
    let runtime = Runtime::controller(options()).unwrap();
    runtime.tell(&out(Request::Spawn, b"")).unwrap();
    let inbox = runtime.inbox(ACTOR).unwrap();
    (runtime, inbox)
}

fn out(request: Request, payload: &[u8]) -> Outgoing<'_> {
    Outgoing { request, target: &HERE, actor: ACTOR, name: b"echo", body: Body::new(payload, &[]) }
}

/// Sends as Python does: waits for room, then sends what was counted.
fn send(runtime: &Runtime, payload: &[u8]) -> bool {
    let meters = [runtime.meter(ProcAddr::CONTROLLER, ACTOR)];
    let message = out(Request::CALL, payload);
    loop {
        match runtime.admit_all(&meters, message.cost()) {
            Ok(charged) => return runtime.tell_on(&message, Terms { charged, ..Terms::default() }).is_ok(),
            Err(_) => {
                let waited = runtime.wait_meter(&meters[0], message.cost(), soon(), false);
                assert_eq!(waited, Waited::Ready, "waits for room that is not made");
            }
        }
    }
}

fn close(runtime: &Runtime) {
    let inbox = runtime.inbox(ACTOR).unwrap();
    runtime.close_inbox(&inbox);
}

#[test]
fn what_a_sender_counts_is_what_its_frame_costs() {
    let (runtime, inbox) = host();
    let meter = runtime.meter(ProcAddr::CONTROLLER, ACTOR);
    assert!(send(&runtime, &[1; 5000]));
    assert_eq!(meter.outstanding(), out(Request::CALL, &[1; 5000]).cost());
    let messages = inbox.take(9);
    assert_eq!(messages[0].cost(), meter.outstanding());
    runtime.close(Duration::ZERO);
}

#[test]
fn senders_and_a_slow_receiver_in_threads() {
    for seed in 0..20 {
        let (runtime, inbox) = host();
        let handled = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let runtime = &runtime;
                scope.spawn(move || {
                    let mut dice = Dice(seed * 100 + thread);
                    for _ in 0..200 {
                        let len = [10, 1000, 60_000, 900_000][dice.roll(4)];
                        assert!(send(runtime, &vec![0; len]));
                    }
                });
            }
            let mut dice = Dice(seed);
            let mut kept = Vec::new();
            while handled.load(Ordering::Relaxed) < 800 {
                runtime.wait_inbox(&inbox);
                kept.extend(inbox.take(1 + dice.roll(20)));
                // They end in any order, and two stay behind while there are more.
                while kept.len() > if inbox.is_empty() { 0 } else { 2 } {
                    let message = kept.swap_remove(dice.roll(kept.len()));
                    message.done();
                    handled.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        runtime.close(Duration::ZERO);
    }
}

/// FLW-3.
#[test]
fn a_mailbox_that_closes_lets_everybody_through() {
    let (runtime, _inbox) = host();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..100).for_each(|_| assert!(send(&runtime, &[0; 300_000]))));
        }
        let meter = runtime.meter(ProcAddr::CONTROLLER, ACTOR);
        while meter.has_room(300_300) {
            std::thread::yield_now();
        }
        close(&runtime);
    });
    runtime.close(Duration::ZERO);
}

#[test]
fn closing_the_runtime_lets_everybody_go() {
    let (runtime, _inbox) = host();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| while send(&runtime, &[0; 300_000]) {});
        let meter = runtime.meter(ProcAddr::CONTROLLER, ACTOR);
        while meter.has_room(300_300) {
            std::thread::yield_now();
        }
        runtime.close(Duration::ZERO);
        waiting.join().unwrap();
    });
}

#[test]
fn a_cast_that_does_not_fit_takes_nothing() {
    let (runtime, _inbox) = host();
    let free = runtime.meter(ProcAddr { mesh: 7, rank: 1, host: 0 }, ACTOR);
    let full = runtime.meter(ProcAddr { mesh: 7, rank: 2, host: 0 }, ACTOR);
    let both = [Arc::clone(&free), Arc::clone(&full)];
    assert_eq!(runtime.admit_all(&both[1..], INITIAL_WINDOW), Ok(true));
    assert_eq!(runtime.admit_all(&both, 1000), Err(1));
    assert_eq!((free.outstanding(), full.outstanding()), (0, INITIAL_WINDOW));
    runtime.close(Duration::ZERO);
}

#[test]
fn meters_that_nobody_uses_are_forgotten_once_they_are_settled() {
    let (runtime, _inbox) = host();
    let used = runtime.meter(ProcAddr::CONTROLLER, ACTOR);
    for mailbox in 0..100_000 {
        // Of actors that never existed: the first message reveals that, and the meter goes.
        let meter = runtime.meter(ProcAddr::CONTROLLER, 1000 + mailbox);
        if mailbox % 3 == 0 {
            assert_eq!(runtime.admit_all(&[meter], 500), Ok(true));
        }
    }
    assert!(runtime.counts().meters < 5000, "{} are kept", runtime.counts().meters);
    assert!(Arc::ptr_eq(&used, &runtime.meter(ProcAddr::CONTROLLER, ACTOR)));
    runtime.close(Duration::ZERO);
}

/// An inbox hands out few large messages at a time, or many small ones.
#[test]
fn a_burst_is_bounded_in_bytes() {
    let reactor = Reactor::new().unwrap();
    let memory = crate::shm::Memory::new(1 << 20, 1);
    let inbox = Inbox::of(MailboxCredits::new(ACTOR, 64 << 20, None), crate::gauge::Gauge::new(None));
    for len in [600_000, 10, 10] {
        let mut header = Tell { actor: ACTOR, place: 0 }.header(ProcAddr::CONTROLLER, ProcAddr::CONTROLLER);
        header.set_charged(true);
        let frame = Frame::build_plain(header, None, b"", &vec![0; len]);
        assert!(inbox.push(&reactor, crate::Message::new(frame, &memory)));
    }
    assert_eq!(inbox.take(256).len(), 1);
    assert_eq!(inbox.take(256).len(), 2);
    assert!(inbox.is_empty());
}

/// GTH-1 with threads: answers, deaths, cancellation and waiting meet in any order, thousands of times.
#[test]
fn whoever_waits_for_a_call_is_woken_whatever_ends_it() {
    let host = Runtime::controller(options()).unwrap();
    let calls = &host.calls;
    let reactor = &host.reactor;
    let ended = Arc::new(Ended {
        pid: None,
        exit: Exit::Unknown,
        orderly: false,
        reason: mesh_proto::EndReason::NotMade("gone".to_owned()),
        stderr_tail: Vec::new(),
    });
    for seed in 0..3000 {
        let mut dice = Dice(seed);
        let ranks = 1 + dice.roll(4);
        let call = calls.open(Target::Many(7, procs(ranks), Placement::On(0)), dice.roll(2) == 0);
        let orders: Vec<usize> = (0..6).map(|_| dice.roll(ranks + 2)).collect();
        std::thread::scope(|scope| {
            let (ended, call) = (&ended, &call);
            let (first, second) = orders.split_at(3);
            for part in [first, second] {
                scope.spawn(move || {
                    for order in part {
                        if *order < ranks {
                            calls.on_outcome(reactor, call.id, *order, Outcome::Lost(Arc::clone(ended)));
                        } else if *order == ranks {
                            let addr = ProcAddr { mesh: 7, rank: u32::try_from(ranks - 1).unwrap(), host: 0 };
                            calls.on_down(reactor, addr, ended);
                        } else {
                            std::thread::yield_now();
                        }
                    }
                    // In the end, both give up.
                    calls.cancel(reactor, call);
                });
            }
            let waited = host.wait_call(call, None, soon(), false, false);
            assert_eq!(waited, Waited::Ready, "seed {seed}: waits for a call that is over");
        });
        assert_eq!(call.take_outcomes().map(|outcomes| outcomes.len()), Some(ranks), "seed {seed}");
        assert!(call.missing().is_empty());
    }
    assert_eq!(Calls::len(calls), 0);
    host.close(Duration::ZERO);
}

#[test]
fn a_message_knows_until_when_its_answer_is_wanted() {
    let (runtime, inbox) = host();
    runtime.tell_on(&out(Request::CALL, b""), Terms { deadline_ms: 60_000, ..Terms::default() }).unwrap();
    runtime.tell(&out(Request::CALL, b"")).unwrap();
    let messages = inbox.take(9);
    assert!(messages[0].due().is_some_and(|due| due > std::time::Instant::now() + Duration::from_secs(30)));
    assert_eq!(messages[1].due(), None);
    drop(messages);
    runtime.close(Duration::ZERO);
}
