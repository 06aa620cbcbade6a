//! References that travel: what is sent, and in which order.

use super::options;
use crate::Runtime;
use crate::refs::RefCounter as _;
use crate::runtime::{Body, Outgoing};
use mesh_proto::control::{Held, Holding};
use mesh_proto::messages::{Request, Tell};
use mesh_proto::{Carried, Decoder, Frame, Kind, ProcAddr, Target};
use rustix::io::read;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::time::Duration;

const ME: ProcAddr = ProcAddr { mesh: 8, rank: 0, host: 0 };
const OWNER: ProcAddr = ProcAddr { mesh: 9, rank: 0, host: 0 };
const RECEIVER: ProcAddr = ProcAddr { mesh: 9, rank: 1, host: 0 };

/// What a process has said to its agent since the last call.
fn said(agent: &OwnedFd, decoder: &mut Decoder) -> Vec<Frame> {
    let mut bytes = [0; 4096];
    while let Ok(length) = read(agent, &mut bytes) {
        decoder.push(&bytes[..length]);
    }
    std::iter::from_fn(|| decoder.next_frame().unwrap()).collect()
}

/// REF-2: the owner hears who is about to hold its value before the message with the reference goes.
#[test]
fn an_owner_hears_of_a_holder_before_the_message_goes() {
    let controller = Runtime::controller(options()).unwrap();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (up, agent) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let board = controller.board.fd().try_clone_to_owned().unwrap();
    let runtime = Runtime::worker(ME, up, board, 1, options()).unwrap();
    let mut decoder = Decoder::default();
    let mut header = Tell { actor: 5, place: 0 }.header(OWNER, ME);
    header.set_carries_refs();
    let came = Carried::append(b"", &[Carried { owner: OWNER, id: 3, ticket: 7 }]);
    let holds = runtime.came(&Frame::build_plain(header, None, b"take", &came));
    said(&agent, &mut decoder);
    let body = Body { refs: Some(&holds), ..Body::default() };
    let target = Target::One(RECEIVER);
    runtime.tell(&Outgoing { request: Request::CALL, target: &target, actor: 5, name: b"take", body }).unwrap();
    let frames = said(&agent, &mut decoder);
    let kinds: Vec<Kind> = frames.iter().map(|frame| frame.header.kind).collect();
    assert_eq!(kinds, [Kind::Held, Kind::Tell]);
    let given = Held::read(&frames[0]).unwrap();
    assert_eq!((frames[0].header.dst, given.call), (OWNER, 3));
    assert!(matches!(given.news, Holding::Given { to, .. } if to == [RECEIVER]));
    // A process whose agent is gone ends itself.
    std::mem::forget(agent);
    runtime.close(Duration::ZERO);
    controller.close(Duration::ZERO);
}
