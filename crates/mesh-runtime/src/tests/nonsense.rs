//! Frames that no process of Mesh makes (MSG-1).

use super::options;
use crate::runtime::{Body, Outgoing};
use crate::{Inbox, Runtime};
use mesh_proto::messages::{Answer, Partial, Reply, Request, Tell};
use mesh_proto::{Frame, Header, Kind, ProcAddr, Target};
use std::sync::Arc;
use std::time::Duration;

const ACTOR: u64 = 5;
const ME: ProcAddr = ProcAddr::CONTROLLER;
const MORE: u16 = 1 << 8;
const END: u16 = 1 << 9;
/// Bits that mean something in some kind of frame.
const FLAGS: [u16; 9] = [1, 4, MORE, END, 1 << 10, 1 << 11, 1 << 13, 1 << 14, 5];

/// A header with these flags, actor and call, as bytes may have it.
fn raw(kind: Kind, flags: u16, actor: u64, call: u64) -> Header {
    let mut bytes = Header::new(kind, ME, ME).encode();
    bytes[4..6].copy_from_slice(&flags.to_le_bytes());
    bytes[40..48].copy_from_slice(&actor.to_le_bytes());
    bytes[48..56].copy_from_slice(&call.to_le_bytes());
    Header::decode(&bytes).unwrap()
}

fn deliver(runtime: &Runtime, header: Header, name: &[u8]) {
    runtime.deliver(Frame::build_plain(header, None, name, b"x"));
}

#[test]
fn frames_that_nobody_makes_reach_nobody() {
    let runtime = Runtime::controller(options()).unwrap();
    let here = Target::One(ME);
    let spawn = Outgoing { request: Request::Spawn, target: &here, actor: ACTOR, name: b"a", body: Body::default() };
    runtime.tell(&spawn).unwrap();
    let inbox = runtime.inbox(ACTOR).unwrap();
    let (system, notices) = (runtime.system_inbox(), runtime.notices());
    let take = |inbox: &Arc<Inbox>| inbox.take(99).len();
    assert_eq!(take(&system), 1);
    let call = runtime.open(Target::One(ProcAddr { mesh: 7, rank: 0, host: 0 }), false).unwrap();
    for flags in FLAGS {
        for kind in [Kind::Tell, Kind::StopActor, Kind::Spawn, Kind::Failure, Kind::Extend, Kind::Partial] {
            // For a spawn these mark an announcement, or the arguments that follow it.
            if !(kind == Kind::Spawn && matches!(flags, MORE | END)) {
                deliver(&runtime, raw(kind, flags, ACTOR, 0), b"echo");
            }
        }
    }
    // A call without a number, one that nobody waits for, several answers in one, a share of nobody's call.
    deliver(&runtime, raw(Kind::Call, 0, ACTOR, 0), b"echo");
    deliver(&runtime, raw(Kind::Tell, 0, ACTOR, 9), b"echo");
    deliver(&runtime, raw(Kind::Reply, 1 | 1 << 8, ACTOR, call.id), b"");
    deliver(&runtime, raw(Kind::Reply, 4, ACTOR, call.id), b"");
    deliver(&runtime, raw(Kind::Undeliverable, 1, ACTOR, call.id), b"");
    deliver(&runtime, Partial { actor: ACTOR, call: 9, place: 0 }.header(ME, ME), b"nobody");
    deliver(&runtime, raw(Kind::Cancel, 1 << 9, ACTOR, 9), b"");
    assert_eq!((take(&inbox), take(&system), take(&notices)), (0, 0, 0));
    assert!(!call.is_done());
    // A proper frame still arrives.
    deliver(&runtime, Tell { actor: ACTOR, place: 0 }.header(ME, ME), b"echo");
    assert_eq!(take(&inbox), 1);
    deliver(&runtime, Reply { actor: ACTOR, call: call.id, place: 0, answer: Answer::Value }.header(ME, ME), b"");
    assert!(call.is_done());
    runtime.close(Duration::ZERO);
}
