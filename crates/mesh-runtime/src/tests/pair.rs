//! A controller and its workers as threads of one process: everything but the processes is real.

use super::{SOON, options, procs, soon};
use crate::call::Outcome;
use crate::link::Link;
use crate::{Body, ForkServerSpec, Inbox, Options, Outgoing, PartData, Runtime, RuntimeError, SpawnSpec, Waited};
use mesh_proto::messages::{Answer, Request};
use mesh_proto::{Kind, Placement, ProcAddr, Target};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(super) const MESH: u64 = 77;
pub(super) const ACTOR: u64 = 5;

/// A worker's thread: serves one actor, which echoes its messages, until its inbox closes.
fn serve(worker: &Runtime) {
    let system = worker.system_inbox();
    let inbox = loop {
        worker.wait_inbox(&system);
        if system.is_closed() {
            return;
        }
        if system.take(9).iter().any(|message| message.header().kind == Kind::Spawn) {
            // There is none if the worker was closed meanwhile.
            let Some(inbox) = worker.inbox(ACTOR) else { return };
            break inbox;
        }
    };
    answer(worker, &inbox);
}

fn answer(worker: &Runtime, inbox: &Inbox) {
    while !inbox.is_closed() {
        worker.wait_inbox(inbox);
        for message in inbox.take(64) {
            let (payload, parts) = message.open().unwrap();
            let buffers: Vec<&[u8]> = parts
                .iter()
                .map(|part| match part {
                    PartData::Inline(bytes) => &bytes[..],
                    // SAFETY: mapped while the part lives, and nobody writes to it.
                    PartData::Shared(part) => unsafe { std::slice::from_raw_parts(part.as_ptr(), part.len()) },
                })
                .collect();
            worker.reply(message.header(), Answer::Value, &payload, &buffers);
        }
    }
}

pub(super) struct Host {
    pub(super) controller: Arc<Runtime>,
    pub(super) workers: Vec<(Arc<Runtime>, JoinHandle<()>)>,
}

impl Host {
    pub(super) fn new(n: u32, options: Options) -> Self {
        let controller = Runtime::controller(options).unwrap();
        let mut links = Vec::new();
        let mut workers = Vec::new();
        for rank in 0..n {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
            let addr = ProcAddr { mesh: MESH, rank, host: 0 };
            let link = Arc::new(Link::new(rank, addr, ours));
            links.push(link);
            let board = controller.board.fd().try_clone_to_owned().unwrap();
            let worker = Runtime::worker(addr, theirs, board, rank + 1, options).unwrap();
            let serving = Arc::clone(&worker);
            workers.push((worker, std::thread::spawn(move || serve(&serving))));
        }
        for link in &links {
            link.register(&controller.reactor).unwrap();
        }
        controller.switch.add(MESH, 0, &links);
        controller.agent.adopt(MESH, 0..n);
        let host = Self { controller, workers };
        let whole = Target::Many(MESH, procs(n as usize), Placement::On(0));
        host.controller.tell(&out(Request::Spawn, &whole, b"", &[])).unwrap();
        host
    }

    fn call(&self, target: &Target, payload: &[u8], buffers: &[&[u8]]) -> Vec<Outcome> {
        let (call, _) = self.controller.call(&out(Request::CALL, target, payload, buffers), false).unwrap();
        assert_eq!(self.controller.wait_call(&call, None, soon(), false, false), Waited::Ready, "no answer");
        call.take_outcomes().unwrap()
    }

    /// Workers first: one whose controller is gone kills its process, which here is the test's.
    pub(super) fn close(self) {
        for (worker, thread) in self.workers {
            worker.close(Duration::ZERO);
            thread.join().unwrap();
        }
        self.controller.close(Duration::ZERO);
        let counts = self.controller.counts();
        assert_eq!((counts.links, counts.calls, counts.actors), (0, 0, 0));
    }
}

pub(super) fn out<'a>(
    request: Request,
    target: &'a Target,
    payload: &'a [u8],
    buffers: &'a [&'a [u8]],
) -> Outgoing<'a> {
    Outgoing { request, target, actor: ACTOR, name: b"echo", body: Body::new(payload, buffers) }
}

fn one(rank: u32) -> Target {
    Target::One(ProcAddr { mesh: MESH, rank, host: 0 })
}

fn payload(outcome: &Outcome) -> Vec<u8> {
    let Outcome::Replied(message) = outcome else { panic!("{outcome:?} where a reply was due") };
    message.open().unwrap().0.to_vec()
}

#[test]
fn calls_and_casts_come_back_in_the_order_of_their_target() {
    let host = Host::new(3, options());
    assert_eq!(payload(&host.call(&one(1), b"hello", &[])[0]), b"hello");
    let all = host.call(&Target::Many(MESH, procs(3), Placement::On(0)), b"all", &[]);
    assert_eq!(all.len(), 3);
    for (index, outcome) in all.iter().enumerate() {
        let Outcome::Replied(message) = outcome else { panic!("{outcome:?}") };
        assert_eq!(message.header().src, ProcAddr { mesh: MESH, rank: u32::try_from(index).unwrap(), host: 0 });
    }
    host.close();
}

#[test]
fn large_parts_travel_there_and_back_and_their_memory_is_used_again() {
    let host = Host::new(2, options());
    let large: Vec<u8> = (0..300_000_u32).map(|i| (i % 251) as u8).collect();
    for round in 0..100 {
        let target = if round % 2 == 0 { one(0) } else { Target::Many(MESH, procs(2), Placement::On(0)) };
        for outcome in host.call(&target, b"", &[&large, b"small"]) {
            let Outcome::Replied(message) = outcome else { panic!("{outcome:?}") };
            let (_, parts) = message.open().unwrap();
            let [PartData::Shared(part), PartData::Inline(small)] = parts.as_slice() else { panic!("{parts:?}") };
            // SAFETY: mapped while the part lives, and nobody writes to it.
            let bytes = unsafe { std::slice::from_raw_parts(part.as_ptr(), part.len()) };
            assert!(bytes == large && small == &b"small"[..]);
            assert!(message.open().is_err(), "shared parts can be had once");
        }
    }
    assert!(host.controller.counts().shm_bytes <= 16 << 20);
    host.close();
}

/// LDR-1, LDR-2: threads that wait for different answers hand over reading duty, and none is forgotten.
#[test]
fn many_threads_wait_for_different_answers_and_none_hangs() {
    for spin in [Duration::ZERO, Duration::from_micros(30)] {
        let host = Host::new(3, Options { spin, ..options() });
        std::thread::scope(|scope| {
            for thread in 0..8_u32 {
                let host = &host;
                scope.spawn(move || {
                    for round in 0..400_u32 {
                        let text = format!("{thread} {round}");
                        let target = if round % 7 == 0 {
                            Target::Many(MESH, procs(3), Placement::On(0))
                        } else {
                            one((thread + round) % 3)
                        };
                        for outcome in host.call(&target, text.as_bytes(), &[]) {
                            assert_eq!(payload(&outcome), text.as_bytes());
                        }
                    }
                });
            }
        });
        assert_eq!(host.controller.counts().calls, 0);
        host.close();
    }
}

/// Brief waits, mere looks and giving up, all at once: a leader that stops leaves another one armed.
#[test]
fn leaders_that_give_up_leave_the_links_read() {
    let host = Host::new(2, Options { spin: Duration::from_micros(5), ..options() });
    std::thread::scope(|scope| {
        for thread in 0..6_u32 {
            let host = &host;
            scope.spawn(move || {
                for round in 0..500_u32 {
                    let target = one((thread + round) % 2);
                    let (call, _) = host.controller.call(&out(Request::CALL, &target, b"x", &[]), false).unwrap();
                    let look = round % 3 == 0;
                    let brief = Instant::now() + Duration::from_micros(u64::from(round % 50));
                    host.controller.wait_call(&call, None, Some(brief), look, false);
                    if round % 5 == 0 {
                        host.controller.cancel(&call, &target, ACTOR);
                        assert!(call.is_done());
                    } else {
                        let waited = host.controller.wait_call(&call, None, soon(), false, false);
                        assert_eq!(waited, Waited::Ready, "thread {thread}, round {round}");
                    }
                }
            });
        }
    });
    assert_eq!(host.controller.counts().calls, 0);
    host.close();
}

#[test]
fn a_worker_calls_another_through_the_controller() {
    let host = Host::new(2, options());
    let worker = &host.workers[0].0;
    let target = one(1);
    let large = vec![3; 100_000];
    let (call, _) = worker.call(&out(Request::CALL, &target, b"hi", &[&large]), false).unwrap();
    assert_eq!(worker.wait_call(&call, None, soon(), false, false), Waited::Ready);
    assert_eq!(payload(&call.take_outcomes().unwrap()[0]), b"hi");
    // If nobody is there, the answer says so at once.
    for target in [one(9), Target::One(ProcAddr { mesh: 1234, rank: 0, host: 0 })] {
        let (call, _) = worker.call(&out(Request::CALL, &target, b"hi", &[&large]), false).unwrap();
        assert_eq!(worker.wait_call(&call, None, soon(), false, false), Waited::Ready);
        assert!(call.take_outcomes().unwrap().iter().all(|outcome| match outcome {
            Outcome::Replied(message) => message.header().kind == Kind::Undeliverable,
            Outcome::Lost(_) | Outcome::Deserted(_) => true,
            Outcome::Cancelled => false,
        }));
    }
    host.close();
}

#[test]
fn an_actor_that_is_not_there_answers_nothing_and_its_callers_hear_of_it() {
    let host = Host::new(1, options());
    let target = one(0);
    let wrong = Outgoing { actor: 999, ..out(Request::CALL, &target, b"", &[]) };
    let (call, _) = host.controller.call(&wrong, false).unwrap();
    assert_eq!(host.controller.wait_call(&call, None, soon(), false, false), Waited::Ready);
    let outcomes = call.take_outcomes().unwrap();
    let Outcome::Replied(message) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert_eq!(message.header().kind, Kind::Undeliverable);
    host.close();
}

#[test]
fn closing_while_threads_call_leaves_nobody_waiting() {
    for _ in 0..20 {
        let host = Host::new(1, options());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    let controller = &host.controller;
                    scope.spawn(move || {
                        loop {
                            let target = one(0);
                            let Ok((call, _)) = controller.call(&out(Request::CALL, &target, b"", &[]), false) else {
                                return;
                            };
                            let waited = controller.wait_call(&call, None, soon(), false, false);
                            assert_eq!(waited, Waited::Ready, "a call was left behind");
                        }
                    })
                })
                .collect();
            host.call(&one(0), b"first", &[]);
            // The worker must not notice that its controller is gone.
            let (worker, _) = &host.workers[0];
            worker.close(Duration::ZERO);
            host.controller.close(Duration::ZERO);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let target = one(0);
        let refused = host.controller.call(&out(Request::CALL, &target, b"", &[]), false);
        assert!(matches!(refused, Err(RuntimeError::Closed)));
        for (_, thread) in host.workers {
            thread.join().unwrap();
        }
    }
}

#[test]
fn a_sender_that_outruns_its_receiver_is_told() {
    let host = Host::new(1, Options { link_budget: 100_000, ..options() });
    let target = one(0);
    // A reader that does not read: reading duty is taken and kept.
    let gate = host.workers[0].0.reactor.stall();
    let mut refused = None;
    for _ in 0..1000 {
        if let Err(error) = host.controller.admit(&target) {
            refused = Some(error);
            break;
        }
        host.controller.tell(&out(Request::CALL, &target, &[0; 10_000], &[])).unwrap();
    }
    assert!(matches!(refused, Some(RuntimeError::Full { queued, budget: 100_000, .. }) if queued > 100_000));
    assert!(!host.controller.wait_room(&target, Duration::ZERO));
    drop(gate);
    assert!(host.controller.wait_room(&target, SOON), "room was made, and nobody let in");
    host.controller.admit(&target).unwrap();
    assert_eq!(payload(&host.call(&target, b"after", &[])[0]), b"after");
    host.close();
}

#[test]
fn procs_that_cannot_be_made_are_lost_with_the_reason() {
    let controller = Runtime::controller(options()).unwrap();
    let region = procs(4);
    for (mesh, program) in [(1, "/bin/false"), (2, "/nonexistent/program")] {
        let fork_server = ForkServerSpec { argv: vec![program.into()], env: Vec::new(), plan: bytes::Bytes::new() };
        let spec = SpawnSpec { fork_server, exec: false, config: bytes::Bytes::new(), within: SOON, title: "".into() };
        let call = controller.spawn_procs(mesh, &region, &Placement::On(0), &spec).unwrap();
        // Messages may follow at once; they fail at once, too.
        let target = Target::Many(mesh, region.clone(), Placement::On(0));
        let (early, _) = controller.call(&out(Request::CALL, &target, b"", &[&[1; 100_000]]), false).unwrap();
        for call in [call, early] {
            assert_eq!(controller.wait_call(&call, None, soon(), false, false), Waited::Ready);
            for outcome in call.take_outcomes().unwrap() {
                let Outcome::Lost(ended) = outcome else { panic!("{outcome:?}") };
                assert!(!ended.reason.is_unstated());
            }
        }
    }
    let counts = controller.counts();
    assert_eq!((counts.links, counts.calls, counts.procs), (0, 0, 0));
    controller.close(Duration::ZERO);
}

#[test]
fn spawning_and_asking_at_once_does_not_lock_up() {
    let controller = Runtime::controller(options()).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (done, controller) = (&done, &controller);
        let asking = scope.spawn(move || {
            let target = Target::Many(3, procs(2), Placement::On(0));
            while !done.load(std::sync::atomic::Ordering::SeqCst) {
                controller.counts();
                let _ = controller.admit(&target);
            }
        });
        for mesh in 3..23 {
            let fork_server = ForkServerSpec {
                argv: vec!["/nonexistent/program".into()],
                env: Vec::new(),
                plan: bytes::Bytes::new(),
            };
            let spec =
                SpawnSpec { fork_server, exec: false, config: bytes::Bytes::new(), within: SOON, title: "".into() };
            let call = controller.spawn_procs(mesh, &procs(2), &Placement::On(0), &spec).unwrap();
            assert_eq!(controller.wait_call(&call, None, soon(), false, false), Waited::Ready);
        }
        done.store(true, std::sync::atomic::Ordering::SeqCst);
        asking.join().unwrap();
    });
    controller.close(Duration::ZERO);
}
