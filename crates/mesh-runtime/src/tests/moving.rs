//! Messages to meshes that were repaired.

use super::pair::{ACTOR, Host, MESH, out};
use super::{options, procs, soon};
use crate::calls::Outcome;
use crate::{Runtime, Waited};
use mesh_proto::messages::{Request, Tell};
use mesh_proto::{Frame, Moved, Placement, ProcAddr, Run, Seat, Target};
use std::sync::Arc;

fn addr(rank: u32) -> ProcAddr {
    ProcAddr { mesh: MESH, rank, host: 0 }
}

/// Rank 1 is what rank 3 was.
fn moved() -> Moved {
    let run = Run { first: 1, count: 1, at: addr(3), incarnation: 1 };
    Moved { mesh: MESH, version: 1, runs: vec![run], left: vec![addr(1)] }
}

fn sources(runtime: &Runtime, target: &Target, payload: &[u8], buffers: &[&[u8]]) -> Vec<ProcAddr> {
    let (call, _) = runtime.call(&out(Request::CALL, target, payload, buffers), false).unwrap();
    assert_eq!(runtime.wait_call(&call, None, soon(), false, false), Waited::Ready, "no answer");
    let source = |outcome: &Outcome| match outcome {
        Outcome::Replied(message) => message.header().src,
        other => panic!("{other:?} where a reply was due"),
    };
    call.take_outcomes().unwrap().iter().map(source).collect()
}

#[test]
fn a_call_to_a_repaired_mesh_has_an_answer_for_each_place() {
    let host = Host::new(4, options());
    let three = Arc::new(Target::Many(MESH, procs(3), Placement::On(0)));
    assert!(Arc::ptr_eq(&host.controller.resolve(&three), &three), "nothing is looked up where nothing was repaired");
    let told = host.controller.publish(moved()).unwrap();
    assert_eq!(host.controller.wait_call(&told, None, soon(), false, false), Waited::Ready);
    let target = host.controller.resolve(&three);
    let large = vec![7; 200_000];
    for buffers in [&[][..], &[&large[..], b"small"][..]] {
        assert_eq!(sources(&host.controller, &target, b"all", buffers), [addr(0), addr(3), addr(2)]);
    }
    // Whoever was sent something since has been told before.
    let (worker, _) = &host.workers[0];
    let target = worker.resolve(&three);
    assert_eq!(sources(worker, &target, b"all", &[&large]), [addr(0), addr(3), addr(2)]);
    assert_eq!(worker.locate(addr(1)), addr(3));
    assert_eq!(worker.seat(addr(3)), Seat { mesh: MESH, rank: 1, incarnation: 1 });
    assert_eq!(worker.incarnation(MESH, 1), 1);
    host.close();
}

#[test]
fn what_an_earlier_life_of_a_rank_has_sent_is_dropped() {
    let host = Host::new(4, options());
    let controller = &host.controller;
    controller.tell(&out(Request::Spawn, &Target::One(ProcAddr::CONTROLLER), b"", &[])).unwrap();
    let inbox = controller.inbox(ACTOR).unwrap();
    let send = |rank: u32| {
        let header = Tell { actor: ACTOR, place: 0 }.header(addr(rank), ProcAddr::CONTROLLER);
        controller.deliver(Frame::build_plain(header, None, b"hear", b""));
        inbox.take(9).len()
    };
    assert_eq!((send(1), send(3)), (1, 1));
    // A reference may tell of a repair before the news of it comes, which says who has left.
    controller.learn(&Moved { left: Vec::new(), ..moved() });
    assert_eq!((send(1), send(3)), (1, 1));
    drop(controller.publish(moved()).unwrap());
    assert_eq!((send(1), send(3)), (0, 1), "MOV-2");
    controller.close_inbox(&inbox);
    host.close();
}

#[test]
fn a_call_to_nobody_s_places_waits_for_the_others_only() {
    let host = Host::new(2, options());
    let piece = mesh_proto::Piece { first: 2, target: Target::One(addr(1)), actor: None };
    let sparse = Target::Joined(Arc::new(mesh_proto::Joined::new(vec![piece], 4)));
    let (call, _) = host.controller.call(&out(Request::CALL, &sparse, b"", &[]), false).unwrap();
    assert_eq!(host.controller.wait_call(&call, None, soon(), false, false), Waited::Ready);
    let outcomes = call.take_outcomes().unwrap();
    assert_eq!(outcomes.len(), 4);
    for (place, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Outcome::Replied(message) => assert_eq!((place, message.meaning().place()), (2, 2)),
            other => assert!(matches!(other, Outcome::Cancelled) && place != 2, "{other:?}"),
        }
    }
    host.close();
}
