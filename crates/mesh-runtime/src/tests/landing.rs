//! Messages whose large parts bypass the gateways (DST-1 to DST-3), on a path that the test delays and breaks.

use super::dice::Dice;
use super::options;
use crate::bypass::{Bypass, RawBypass};
use crate::runtime::{Body, Outgoing};
use crate::{BYPASS_VERSION, Inbox, PartData, Runtime};
use bytes::Bytes;
use mesh_proto::control::Down;
use mesh_proto::messages::{Request, Tell};
use mesh_proto::{EndReason, Ended, Frame, Part, ProcAddr, Target};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ACTOR: u64 = 5;
const ME: ProcAddr = ProcAddr::CONTROLLER;
/// The length of the parts that arrive.
const LEN: usize = 4096;
/// The length of a part worth offering.
const LARGE: usize = 1 << 20;

fn sender(rank: u32) -> ProcAddr {
    ProcAddr { mesh: 9, rank, host: 3 }
}

type Done = unsafe extern "C" fn(*mut c_void, i32);
type Freed = unsafe extern "C" fn(*mut c_void);

/// A requested part: its ticket, its target, and who is told.
#[derive(Debug)]
pub(super) struct Asked {
    ticket: u8,
    into: usize,
    len: usize,
    done: Done,
    arg: usize,
}

impl Asked {
    pub(super) fn come(self) {
        // SAFETY: by the header, this memory is ours until `done` is called, once.
        unsafe {
            std::slice::from_raw_parts_mut(self.into as *mut u8, self.len).fill(self.ticket);
            (self.done)(self.arg as *mut c_void, 0);
        }
    }

    pub(super) fn fail(self) {
        // SAFETY: as above.
        unsafe { (self.done)(self.arg as *mut c_void, 1) };
    }
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct Road {
    raw: RawBypass,
    asked: Mutex<Vec<Asked>>,
    /// What is offered, and whom to tell that nobody reads it.
    offered: Mutex<Vec<(u64, Freed, usize)>>,
    withdrawn: Mutex<Vec<u64>>,
}

unsafe extern "C" fn offer(
    this: *const RawBypass,
    data: *const c_void,
    length: u64,
    ticket: *mut u8,
    room: u32,
    number: *mut u64,
    freed: Freed,
    arg: *mut c_void,
) -> u32 {
    // SAFETY: made by `road`; the rest is as the header demands.
    unsafe {
        let this = &*this.cast::<Road>();
        assert!(room > 0 && length >= LARGE as u64);
        *ticket = *data.cast::<u8>();
        let mut offered = this.offered.lock().unwrap();
        *number = offered.len() as u64;
        offered.push((*number, freed, arg as usize));
    }
    1
}

unsafe extern "C" fn withdraw(this: *const RawBypass, number: u64) {
    // SAFETY: made by `road`.
    unsafe { &*this.cast::<Road>() }.withdrawn.lock().unwrap().push(number);
}

unsafe extern "C" fn fetch(
    this: *const RawBypass,
    ticket: *const u8,
    size: u32,
    into: *mut c_void,
    length: u64,
    done: Done,
    arg: *mut c_void,
) {
    assert_eq!(size, 1);
    // SAFETY: made by `road`; the ticket has one byte.
    let (this, ticket) = unsafe { (&*this.cast::<Road>(), *ticket) };
    let asked = Asked { ticket, into: into as usize, len: length as usize, done, arg: arg as usize };
    this.asked.lock().unwrap().push(asked);
}

pub(super) fn road() -> &'static Road {
    let raw = RawBypass { version: BYPASS_VERSION, offer, withdraw, fetch };
    Box::leak(Box::new(Road { raw, asked: Mutex::default(), offered: Mutex::default(), withdrawn: Mutex::default() }))
}

impl Road {
    pub(super) fn bypass(&'static self) -> Bypass {
        // SAFETY: never freed, and of this version.
        unsafe { Bypass::new(NonNull::from(self).cast()) }
    }

    fn open(&'static self, runtime: &Runtime) {
        runtime.set_bypass(Some((self.bypass(), LARGE)));
    }

    pub(super) fn take(&self, which: usize) -> Asked {
        self.asked.lock().unwrap().remove(which)
    }

    pub(super) fn asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

/// A controller with an actor's inbox on which nobody works.
fn receiver() -> (Arc<Runtime>, Arc<Inbox>, &'static Road) {
    let runtime = Runtime::controller(options()).unwrap();
    let here = Target::One(ME);
    let spawn = Outgoing { request: Request::Spawn, target: &here, actor: ACTOR, name: b"a", body: Body::default() };
    runtime.tell(&spawn).unwrap();
    let inbox = runtime.inbox(ACTOR).unwrap();
    let road = road();
    road.open(&runtime);
    (runtime, inbox, road)
}

/// A message with `distant` distant parts, each to be filled with `serial`.
fn message(from: ProcAddr, serial: u8, distant: usize) -> Frame {
    let mut header = Tell { actor: ACTOR, place: 0 }.header(from, ME);
    header.set_distant(distant > 0);
    let mut parts = vec![Part::Inline(Bytes::from(vec![serial]))];
    for nth in 0..distant as u64 {
        let (id, held) = (1000 * u64::from(serial) + nth, nth + 1);
        parts.push(Part::Distant { id, held, len: LEN as u64, ticket: Bytes::from(vec![serial]) });
    }
    Frame::build(header, None, b"echo", &parts)
}

/// The messages in an inbox: each one's number, and its number of parts, all of which must be filled with that number.
fn taken(inbox: &Inbox) -> Vec<(u8, usize)> {
    let look = |message: &crate::Message| {
        let (envelope, parts) = message.open().unwrap();
        for part in &parts {
            let bytes = match part {
                PartData::Inline(bytes) => &bytes[..],
                // SAFETY: mapped while the part lives, and nobody writes to it.
                PartData::Shared(part) => unsafe { std::slice::from_raw_parts(part.as_ptr(), part.len()) },
            };
            assert!(bytes.len() == LEN && bytes.iter().all(|byte| *byte == envelope[0]), "another's bytes");
        }
        (envelope[0], parts.len())
    };
    inbox.take(999).iter().map(look).collect()
}

fn end_of(who: ProcAddr) -> Frame {
    Down::notice(who, &Ended::unmade(EndReason::LongAgo)).frame(ProcAddr::agent(who.host), ME)
}

#[test]
fn a_message_waits_for_its_parts_and_what_is_behind_for_it() {
    let (runtime, inbox, road) = receiver();
    runtime.deliver(message(sender(0), 1, 2));
    runtime.deliver(message(sender(0), 2, 0));
    runtime.deliver(message(sender(0), 3, 1));
    runtime.deliver(message(sender(1), 4, 0));
    assert_eq!(taken(&inbox), [(4, 0)], "another sender waits for nobody");
    assert_eq!((road.asked(), runtime.counts().landing), (3, 2));
    road.take(2).come();
    road.take(1).come();
    assert_eq!(taken(&inbox), [], "one part is missing");
    road.take(0).come();
    assert_eq!(taken(&inbox), [(1, 2), (2, 0), (3, 1)]);
    assert_eq!((runtime.counts().landing, runtime.counts().bypassed.1, runtime.counts().refs), (0, 3, 0));
    runtime.deliver(message(sender(0), 5, 0));
    assert_eq!(taken(&inbox), [(5, 0)], "nothing waits any longer");
    runtime.close(Duration::ZERO);
}

/// BYP-2: what keeps the memory lives until the other side is done.
#[test]
fn what_is_being_filled_is_kept_until_the_other_side_is_done() {
    let (road, kept) = (road(), Arc::new(()));
    let bypass = road.bypass();
    let (mut room, keeps) = (vec![0_u8; LEN], Arc::clone(&kept));
    // SAFETY: the memory exists until the end of the test.
    unsafe { bypass.fetch(&[1], room.as_mut_ptr(), LEN as u64, Box::new(move |_| drop(keeps))) };
    assert_eq!(Arc::strong_count(&kept), 2);
    road.take(0).come();
    assert_eq!((Arc::strong_count(&kept), room), (1, vec![1; LEN]));
}

#[test]
fn what_does_not_come_is_asked_for_and_its_senders_end_is_the_answer() {
    let (runtime, inbox, road) = receiver();
    runtime.deliver(message(sender(0), 1, 0));
    runtime.deliver(message(sender(0), 2, 2));
    runtime.deliver(message(sender(0), 3, 0));
    runtime.deliver(end_of(sender(0)));
    road.take(0).come();
    // The controller has no such host: questions to it come back at once, as from a dead one.
    road.take(0).fail();
    assert_eq!(taken(&inbox), [(1, 0), (3, 0)], "half a message is none");
    assert_eq!((runtime.counts().landing, runtime.counts().refs), (0, 0));
    runtime.close(Duration::ZERO);
}

#[test]
fn a_host_that_is_gone_leaves_nothing_behind() {
    let (runtime, inbox, road) = receiver();
    runtime.deliver(message(sender(0), 1, 1));
    runtime.deliver(message(sender(0), 2, 0));
    runtime.landings.end(&*runtime, |one| one.host == 3);
    runtime.deliver(message(sender(1), 3, 0));
    assert_eq!(taken(&inbox), [(3, 0)]);
    road.take(0).come();
    assert_eq!(taken(&inbox), [], "of a sender that is gone");
    assert_eq!(runtime.counts().landing, 0);
    runtime.close(Duration::ZERO);
}

#[test]
fn whatever_comes_first_each_sender_is_heard_in_order() {
    let mut dice = Dice(7);
    let mut roll = |sides: usize| dice.roll(sides);
    let (runtime, inbox, road) = receiver();
    for _ in 0..20 {
        let mut sent: [Vec<u8>; 3] = Default::default();
        let mut came: [Vec<u8>; 3] = Default::default();
        let mut serial = 0;
        while serial < 60 || road.asked() > 0 {
            if serial < 60 && roll(2) == 0 {
                serial += 1;
                let from = roll(3);
                sent[from].push(serial);
                runtime.deliver(message(sender(from as u32), serial, [0, 0, 1, 2][roll(4)]));
            } else if road.asked() > 0 {
                road.take(roll(road.asked())).come();
            }
            for (serial, _) in taken(&inbox) {
                let from = sent.iter().position(|all| all.contains(&serial)).unwrap();
                came[from].push(serial);
            }
        }
        assert_eq!(came, sent);
    }
    runtime.close(Duration::ZERO);
}

/// BYP-1.
#[test]
fn what_is_offered_is_kept_until_nobody_reads_it() {
    // A worker asks through its agent to be told of the receiver's end; the agent says nothing here.
    let controller = Runtime::controller(options()).unwrap();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (up, agent) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    // A process whose agent is gone ends itself, even if an assertion has failed.
    std::mem::forget(agent);
    let board = controller.board.fd().try_clone_to_owned().unwrap();
    let runtime = Runtime::worker(ProcAddr { mesh: 8, rank: 0, host: 0 }, up, board, 1, options()).unwrap();
    let road = road();
    road.open(&runtime);
    let (data, there) = (vec![3; LARGE], Target::One(sender(0)));
    let buffers: [&[u8]; 2] = [&data, b"short"];
    let parts = runtime.carry_past(mesh_proto::Kind::Tell, &there, &Body::new(b"", &buffers)).unwrap();
    assert!(matches!(&parts[..], [Some(Part::Distant { .. }), None]));
    assert_eq!(runtime.counts().kept.0, 1);
    let mut header = Tell { actor: ACTOR, place: 0 }.header(runtime.me, sender(0));
    header.set_distant(true);
    let whole = [Part::Inline(Bytes::new()), parts[0].clone().unwrap()];
    // Dropping the message returns the part.
    runtime.memory.let_go(&Frame::build(header, None, b"", &whole));
    assert_eq!(*road.withdrawn.lock().unwrap(), [0]);
    assert!(runtime.counts().kept.1 > 0, "somebody may still read it");
    let (_, freed, arg) = road.offered.lock().unwrap().remove(0);
    // SAFETY: called once, as the header demands.
    unsafe { freed(arg as *mut c_void) };
    assert_eq!(runtime.counts().kept, (0, 0));
    // Nothing is offered on one host, or to many.
    let near = Target::One(ProcAddr { mesh: 9, rank: 0, host: 0 });
    assert!(runtime.carry_past(mesh_proto::Kind::Tell, &near, &Body::new(b"", &buffers)).is_none());
    runtime.close(Duration::ZERO);
    controller.close(Duration::ZERO);
}
