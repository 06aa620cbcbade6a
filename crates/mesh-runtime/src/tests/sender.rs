//! Senders: where their messages go, and what must happen before.

use super::pair::{ACTOR, Host, MESH};
use super::{options, procs, soon};
use crate::gate::Admission;
use crate::sender::{Sender, SenderSpec, Taken, TooLong};
use crate::{Body, Outcome, Runtime, Waited};
use mesh_proto::messages::{Name, Request};
use mesh_proto::{MESSAGE_COST, Moved, Placement, ProcAddr, Run, Target};
use std::sync::Arc;
use std::time::Duration;

fn addr(rank: u32) -> ProcAddr {
    ProcAddr { mesh: MESH, rank, host: 0 }
}

fn many(mesh: u64, n: usize) -> Arc<Target> {
    Arc::new(Target::Many(mesh, procs(n), Placement::On(0)))
}

fn spec(target: &Arc<Target>, request: Request) -> SenderSpec<'_> {
    let (shape, endpoint, called) = ("procs=3", "echo", Some("trainers"));
    SenderSpec { target, shape, actor: ACTOR, endpoint, request, reduce: false, block: true, called }
}

fn sender(runtime: &Arc<Runtime>, target: &Arc<Target>, request: Request) -> Sender {
    Sender::new(runtime, spec(target, request)).unwrap()
}

/// Rank 1 has moved to where rank 3 was.
fn moved() -> Moved {
    let run = Run { first: 1, count: 1, at: addr(3), incarnation: 1 };
    Moved { mesh: MESH, version: 1, runs: vec![run], left: vec![addr(1)] }
}

fn sources(sender: &Sender) -> Vec<ProcAddr> {
    let road = sender.road();
    let (call, _) = sender.call(&road, Body::new(b"hello", &[]), false, sender.terms(None)).unwrap();
    assert_eq!(sender.runtime().wait_call(&call, None, soon(), false, false), Waited::Ready, "no answer");
    let source = |outcome: &Outcome| match outcome {
        Outcome::Replied(message) => message.header().src,
        other => panic!("{other:?} where a reply was due"),
    };
    call.take_outcomes().unwrap().iter().map(source).collect()
}

#[test]
fn a_sender_follows_its_receivers_when_their_mesh_is_repaired() {
    let host = Host::new(4, options());
    let (target, other) = (many(MESH, 3), many(MESH + 1, 3));
    let here = sender(&host.controller, &target, Request::CALL);
    let elsewhere = sender(&host.controller, &other, Request::CALL);
    assert_eq!(sources(&here), [addr(0), addr(1), addr(2)]);
    assert!(here.road().is_whole());
    host.controller.learn(&moved());
    assert_eq!(sources(&here), [addr(0), addr(3), addr(2)]);
    let (Taken::Moved(one), Taken::Moved(two)) = (here.road(), here.road()) else { panic!("they have moved") };
    assert!(Arc::ptr_eq(&one, &two), "they are looked up once for each news");
    assert!(!here.road().is_whole(), "and are no region any longer");
    assert!(matches!(elsewhere.road(), Taken::First(road) if Arc::ptr_eq(road.target(), &other)));
    host.close();
}

#[test]
fn senders_derived_from_another_follow_the_receivers_too() {
    let host = Host::new(4, options());
    let target = many(MESH, 3);
    let first = sender(&host.controller, &target, Request::CALL);
    host.controller.learn(&moved());
    let traced = first.traced("00-12-34-01").unwrap();
    assert_eq!(sources(&traced), [addr(0), addr(3), addr(2)]);
    let reading = traced.reading(1000);
    assert_eq!((reading.terms(None).ahead, traced.terms(None).ahead), (1000, 0));
    assert_eq!((reading.called(), reading.actor()), ("trainers", ACTOR));
    host.close();
}

#[test]
fn names_that_no_frame_can_hold_are_refused() {
    let runtime = Runtime::controller(options()).unwrap();
    let (target, long) = (many(MESH, 3), "x".repeat(70_000));
    let new = |spec| Sender::new(&runtime, spec).map(drop);
    let base = spec(&target, Request::CALL);
    assert_eq!(new(SenderSpec { endpoint: &long, ..base }), Err(TooLong::Name));
    assert_eq!(new(SenderSpec { shape: &long, ..base }), Err(TooLong::Name));
    assert_eq!(sender(&runtime, &target, Request::CALL).traced(&long).map(drop), Err(TooLong::Context));
    let text = "a trace's context and the endpoint's name together must be at most 65535 bytes long to be sent";
    assert_eq!(TooLong::Context.to_string(), text);
    runtime.close(Duration::ZERO);
}

#[test]
fn what_is_for_actors_is_counted_and_what_is_for_processes_is_not() {
    let runtime = Runtime::controller(options()).unwrap();
    let (target, own) = (many(MESH, 3), Arc::new(Target::One(ProcAddr::CONTROLLER)));
    let counted = |spec: SenderSpec<'_>| {
        let sender = Sender::new(&runtime, spec).unwrap();
        let road = sender.road();
        match sender.admission(&road, 1000, None).unwrap() {
            Admission::Bid(bid) => {
                let name = Name { shape: spec.shape.as_bytes(), ..Name::of(spec.endpoint.as_bytes()) };
                assert_eq!(bid.cost, MESSAGE_COST + (name.to_bytes().len() + 1000) as u64);
                true
            }
            Admission::Free => false,
            Admission::Later(_) => panic!("nothing waits before it"),
        }
    };
    assert!(counted(spec(&target, Request::CALL)));
    assert!(counted(spec(&target, Request::TASK)));
    for request in [Request::Spawn, Request::StopActor, Request::Failure, Request::Inspect] {
        assert!(!counted(spec(&target, request)), "{request:?}");
    }
    let extension = spec(&target, Request::Extend);
    assert!(counted(extension));
    assert!(!counted(SenderSpec { endpoint: ".internal", ..extension }), "Mesh's own message");
    assert!(!counted(SenderSpec { called: None, ..extension }), "Mesh itself sends");
    assert!(!counted(SenderSpec { target: &own, ..extension }), "to this very process");
    runtime.close(Duration::ZERO);
}

#[test]
fn a_stop_does_not_overtake_what_waits_for_the_same_actor() {
    let runtime = Runtime::controller(options()).unwrap();
    let target = many(MESH, 3);
    let stop = sender(&runtime, &target, Request::StopActor);
    let meters: Arc<[_]> = [runtime.meter(addr(1), ACTOR)].into();
    // The first message fills the mailbox, the second waits for room.
    let cost = mesh_proto::INITIAL_WINDOW;
    assert_eq!(runtime.admit_all(&meters, cost), Ok(true));
    let waits = runtime.turn(&target, ACTOR, Some(meters), cost).unwrap();
    let road = stop.road();
    assert!(matches!(stop.admission(&road, 0, soon()), Ok(Admission::Later(later)) if later.until.is_some()));
    assert!(runtime.take_back(&waits));
    assert!(matches!(stop.admission(&road, 0, None), Ok(Admission::Free)));
    runtime.close(Duration::ZERO);
}

#[test]
fn only_calls_that_people_make_name_whom_they_called() {
    let host = Host::new(1, options());
    let target = many(MESH, 1);
    let people = sender(&host.controller, &target, Request::CALL);
    let mesh = Sender::new(&host.controller, SenderSpec { called: None, ..spec(&target, Request::CALL) }).unwrap();
    for (sender, named) in [(&people, true), (&mesh, false)] {
        let road = sender.road();
        let (call, _) = sender.call(&road, Body::new(b"", &[]), false, sender.terms(None)).unwrap();
        assert_eq!(call.callee.get().map(|callee| callee.actor.as_str()), named.then_some("trainers"));
        assert_eq!(host.controller.wait_call(&call, None, soon(), false, false), Waited::Ready);
        drop(call.take_outcomes());
    }
    host.close();
}
