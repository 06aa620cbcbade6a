//! Replies to a process that does not read, and spawns there (ANS-1 to ANS-4, SPW-1).

use super::pair::{ACTOR, Host, MESH, out};
use super::{SOON, options, soon};
use crate::{Body, Completion, Outgoing, Runtime, Terms, Waited};
use mesh_proto::messages::{Answer, Request};
use mesh_proto::{INITIAL_WINDOW, ProcAddr, Target};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

const QUIET: u64 = 6;
const THERE: Target = Target::One(ProcAddr { mesh: MESH, rank: 0, host: 0 });
const SIZE: usize = 300_000;

fn until(what: impl Fn() -> bool) {
    let end = Instant::now() + SOON;
    while !what() {
        assert!(Instant::now() < end, "it does not come about");
        std::thread::yield_now();
    }
}

/// Calls from the controller to an actor that answers nothing by itself.
fn calls(host: &Host, count: usize) -> Vec<Arc<crate::Call>> {
    let quiet = |kind| Outgoing { actor: QUIET, ..out(kind, &THERE, b"", &[]) };
    host.controller.tell(&quiet(Request::Spawn)).unwrap();
    let calls = (0..count).map(|_| host.controller.call(&quiet(Request::CALL), false).unwrap().0).collect();
    let worker = &host.workers[0].0;
    until(|| worker.inbox(QUIET).is_some_and(|inbox| inbox.len() == count));
    calls
}

/// Answers all of them; returns the completions of replies beyond the budget.
fn answer(worker: &Runtime) -> Vec<Arc<Completion>> {
    let inbox = worker.inbox(QUIET).unwrap();
    let due = |message: &crate::Message| message.due();
    let reply = |message: &crate::Message| {
        worker.reply_by(message.header(), due(message), Answer::Value, Body::new(&[7; SIZE], &[]))
    };
    inbox.take(99).iter().filter_map(reply).collect()
}

#[test]
fn replies_wait_for_the_reading_and_leave_with_it() {
    let host = Host::new(1, options());
    let calls = calls(&host, 12);
    let worker = Arc::clone(&host.workers[0].0);
    let stall = host.controller.reactor.stall();
    let held = answer(&worker);
    let (waiting, bytes) = worker.counts().replies;
    // Of 12, as many as fit the window have gone; those that wait exceed the budget of 1 MiB.
    assert_eq!(waiting, 12 - (INITIAL_WINDOW as usize) / SIZE);
    assert!(bytes > options().link_budget as u64);
    assert_eq!(held.len(), waiting - options().link_budget / SIZE);
    assert!(held.iter().all(|done| !done.is_done()));
    drop(stall);
    for call in &calls {
        assert_eq!(host.controller.wait_call(call, None, soon(), false, false), Waited::Ready);
    }
    until(|| held.iter().all(|done| done.is_done()));
    assert_eq!(worker.counts().replies, (0, 0));
    host.close();
}

#[test]
fn replies_to_cancelled_calls_and_after_their_deadlines_are_dropped() {
    let host = Host::new(1, options());
    let calls = calls(&host, 12);
    let quiet = Outgoing { actor: QUIET, ..out(Request::CALL, &THERE, b"", &[]) };
    let limited = host.controller.call_on(&quiet, false, Terms { deadline_ms: 3000, ..Terms::default() }).unwrap().0;
    let worker = Arc::clone(&host.workers[0].0);
    until(|| worker.inbox(QUIET).unwrap().len() == 13);
    let stall = host.controller.reactor.stall();
    answer(&worker);
    let (before, _) = worker.counts().replies;
    // The last one reaches its deadline.
    until(|| worker.counts().replies.0 == before - 1);
    for call in &calls[8..] {
        assert!(host.controller.cancel(call, &THERE, QUIET));
    }
    until(|| worker.counts().replies.0 == before - 5);
    drop(stall);
    for call in &calls[..8] {
        assert_eq!(host.controller.wait_call(call, None, soon(), false, false), Waited::Ready);
    }
    until(|| worker.counts().replies == (0, 0));
    host.controller.cancel(&limited, &THERE, QUIET);
    host.close();
}

#[test]
fn a_runtime_that_closes_drops_what_waits() {
    let host = Host::new(1, options());
    calls(&host, 12);
    let worker = Arc::clone(&host.workers[0].0);
    let stall = host.controller.reactor.stall();
    let held = answer(&worker);
    assert!(!held.is_empty());
    worker.close(Duration::ZERO);
    assert!(held.iter().all(|done| done.is_done()));
    assert_eq!(worker.counts().replies, (0, 0));
    drop(stall);
    host.close();
}

#[test]
fn an_actor_is_there_before_its_arguments() {
    let host = Host::new(1, options());
    let worker = Arc::clone(&host.workers[0].0);
    let stall = worker.reactor.stall();
    let large = vec![1; SIZE];
    let spawn = |actor| {
        let out = Outgoing { actor, ..out(Request::Spawn, &THERE, &large, &[]) };
        host.controller.call_spawn(&out, Terms::default()).unwrap()
    };
    let spawned: Vec<_> = (10..20).map(spawn).collect();
    assert!(host.controller.counts().spawns.0 > 0);
    assert!(host.controller.spawns_wait().is_some());
    let call = host.controller.call(&Outgoing { actor: 19, ..out(Request::CALL, &THERE, b"", &[]) }, false).unwrap().0;
    drop(stall);
    until(|| worker.inbox(19).is_some_and(|inbox| inbox.len() == 1));
    until(|| host.controller.counts().spawns == (0, 0));
    until(|| spawned.iter().all(|(_, _, held)| held.as_ref().is_none_or(|done| done.is_done())));
    let system = worker.system_inbox();
    let made = RefCell::new(Vec::new());
    until(|| {
        // The host's own actor may not have been taken from here yet.
        let new = system.take(99).into_iter().map(|message| message.meaning().actor()).filter(|actor| *actor != ACTOR);
        made.borrow_mut().extend(new);
        made.borrow().len() >= 10
    });
    let made = made.into_inner();
    assert_eq!(made, (10..20).collect::<Vec<_>>());
    host.controller.cancel(&call, &THERE, 19);
    host.close();
}
