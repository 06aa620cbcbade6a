//! The host agent alone: the test plays its fork server, its switch, and the receivers of its frames.

use super::procs;
use crate::agent::{FORK_SERVER_TOKENS, HostAgent, SpawnSpec, Surroundings};
use crate::dispatch::Dispatch;
use crate::fork_server::Standby;
use crate::home::AgentEnvironment;
use crate::home::Home;
use crate::link::Link;
use crate::locks::lock;
use crate::reactor::Reactor;
use crate::runtime::Switch;
use crate::spin_board::SpinBoard;
use crate::{ForkServerSpec, RuntimeError, Spare};
use bytes::Bytes;
use mesh_proto::control::{Down, Goodbye, Hello, StopProcs, Watch};
use mesh_proto::messages::{ProcUp, Spawn, SpawnPart};
use mesh_proto::{
    EndReason, Ended, Event, Exit, Frame, GUEST_MESHES, Header, Kind, MeshId, ProcAddr, Route, Router, Target,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown, socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};
use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const HOST: u32 = 3;
const ME: ProcAddr = ProcAddr::agent(HOST);
const MESH: MeshId = 7;
/// A proc on another host that has spawned everything here, unless a test says otherwise, and its call.
const SPAWNER: (ProcAddr, u64) = (ProcAddr { mesh: 5, rank: 0, host: 1 }, 99);
const LONG: Duration = Duration::from_secs(600);
/// Reports of a fork server, as `fork_server.rs` reads them.
const FORKED: u8 = 11;
const EXITED: u8 = 12;
const FAILED: u8 = 13;
const REFUSED: u8 = 14;

fn proc(mesh: MeshId, rank: u32) -> ProcAddr {
    ProcAddr { mesh, rank, host: HOST }
}

/// What the agent said, and to whom.
#[derive(Debug, PartialEq)]
enum Said {
    Up(ProcAddr, ProcAddr),
    Down(ProcAddr, ProcAddr),
    /// An answer to a message, not the notice of the end.
    Gone(ProcAddr, ProcAddr),
    Stop(ProcAddr),
    StopActor(ProcAddr),
    Watch(ProcAddr),
    Other(Kind),
}

fn said(frame: &Frame) -> Said {
    let to = frame.header.dst;
    if let Some(up) = ProcUp::read(frame) {
        return Said::Up(up.proc, to);
    }
    match frame.header.kind {
        Kind::Down => match Down::read(frame).unwrap() {
            Down { who, answer: true, .. } => Said::Gone(who, to),
            Down { who, .. } => Said::Down(who, to),
        },
        Kind::StopProc => Said::Stop(to),
        Kind::StopActor => Said::StopActor(to),
        Kind::Watch => {
            let Watch { mesh, rank } = Watch::read(&frame.header);
            Said::Watch(ProcAddr { mesh, rank, host: to.host })
        }
        kind => Said::Other(kind),
    }
}

/// The process that the agent is part of.
struct Around {
    switch: Switch,
    frames: RefCell<Vec<Frame>>,
    /// Procs whose stdout and stderr are open.
    outputs: RefCell<Vec<ProcAddr>>,
    /// The rank for which there is no pipe.
    no_pipe_for: Cell<Option<u32>>,
    /// Messages that waited for the next procs, and those that were for none of them.
    early: RefCell<(Vec<Header>, Vec<Frame>)>,
    refused: Cell<usize>,
    ups: RefCell<Vec<String>>,
}

impl Dispatch for Around {
    fn dispatch(&self, frame: Frame) -> usize {
        self.frames.borrow_mut().push(frame);
        0
    }
}

impl Surroundings for Around {
    fn route(&self, addr: ProcAddr) -> Route {
        self.switch.route(addr)
    }
    fn open_routes(&self, mesh: MeshId, base: u32, links: &[Arc<Link>]) -> (Vec<Header>, Vec<Frame>) {
        self.switch.add(mesh, base, links);
        self.early.take()
    }
    fn refuse(&self, _: &Frame) {
        self.refused.set(self.refused.get() + 1);
    }
    fn open_output(&self, addr: ProcAddr) -> Result<(OwnedFd, OwnedFd), RuntimeError> {
        if self.no_pipe_for.get() == Some(addr.rank) {
            return Err(RuntimeError::os("pipe")(rustix::io::Errno::MFILE));
        }
        self.outputs.borrow_mut().push(addr);
        Ok(pipe_with(PipeFlags::CLOEXEC).unwrap())
    }
    fn forget_output(&self, addr: ProcAddr) {
        self.outputs.borrow_mut().retain(|one| *one != addr);
    }
    fn note_spawn(&self, _: MeshId, _: &str, _: ProcAddr, _: &[Arc<Link>]) {}
    fn note_up(&self, _: ProcAddr, title: &str) {
        self.ups.borrow_mut().push(title.to_owned());
    }
}

/// A fork server: the test speaks for it, and an idle process stands in for it.
struct Server {
    socket: OwnedFd,
    /// The process lives until this is closed.
    _life: ChildStdin,
}

impl Server {
    fn report(&self, op: u8, addr: ProcAddr, (pid, status): (u32, i32), text: &str) {
        let mut packet = vec![op];
        packet.extend_from_slice(&addr.mesh.to_le_bytes());
        packet.extend_from_slice(&addr.rank.to_le_bytes());
        packet.extend_from_slice(&pid.to_le_bytes());
        packet.extend_from_slice(&status.to_le_bytes());
        packet.extend_from_slice(text.as_bytes());
        send(&self.socket, &packet, SendFlags::NOSIGNAL).unwrap();
    }

    /// Ends it. Another test may be forking just now, so closing the socket alone might not be noticed at once.
    fn end(self) {
        shutdown(&self.socket, Shutdown::Both).unwrap();
    }

    /// The orders that it has received: what to do with which rank.
    fn orders(&self) -> Vec<(u8, u32)> {
        let mut packet = [0; 64];
        let next = || match recv(&self.socket, &mut packet, RecvFlags::DONTWAIT) {
            Ok((n, _)) if n > 0 => Some((packet[0], u32::from_le_bytes(packet[9..13].try_into().unwrap()))),
            _ => None,
        };
        std::iter::from_fn(next).filter(|order| order.0 != 4).collect()
    }
}

struct World {
    agent: HostAgent,
    around: Around,
    reactor: Arc<Reactor>,
    spare: Spare,
}

impl World {
    fn new() -> Self {
        Self::of(ME)
    }

    fn of(me: ProcAddr) -> Self {
        let (reactor, board) = (Arc::new(Reactor::new().unwrap()), Arc::new(SpinBoard::create().unwrap()));
        let (home, spare) = (Arc::<Home>::default(), Spare::default());
        let environment = AgentEnvironment {
            python: vec!["here".into()],
            env: Vec::new(),
            scratch: None,
            standby: Arc::clone(&spare),
        };
        home.set("somewhere".to_owned(), environment);
        let around = Around {
            switch: Switch::new(me, &reactor, Router::agent(me)),
            frames: RefCell::default(),
            outputs: RefCell::default(),
            no_pipe_for: Cell::new(None),
            early: RefCell::default(),
            refused: Cell::new(0),
            ups: RefCell::default(),
        };
        Self { agent: HostAgent::new(me, &reactor, &board, &home, Instant::now()), around, reactor, spare }
    }

    /// Makes this the next fork server to be started.
    #[allow(clippy::zombie_processes, reason = "the agent waits for it")]
    fn server(&self) -> Server {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
                .unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        *lock(&self.spare) = Standby::new(child.id(), ours);
        Server { socket: theirs, _life: child.stdin.take().unwrap() }
    }

    fn spec(program: &str) -> SpawnSpec {
        let fork_server = ForkServerSpec { argv: vec![program.into()], env: Vec::new(), plan: Bytes::new() };
        SpawnSpec { fork_server, exec: false, config: Bytes::from_static(b"config"), within: LONG, title: "t".into() }
    }

    /// Makes procs, and has their fork server started.
    fn spawn(&self, mesh: MeshId, n: u32, spawner: (ProcAddr, u64)) {
        self.agent.spawn(&self.around, mesh, 0..n, &Self::spec("here"), spawner).unwrap();
        self.turn();
    }

    fn turn(&self) {
        let events = self.agent.turn();
        self.take(events);
    }

    fn read(&self, token: u64) {
        let events = self.agent.on_fork_server(token, true, false);
        self.take(events);
    }

    fn take(&self, events: Vec<(ProcAddr, Event)>) {
        for (addr, event) in events {
            self.on(addr, event);
        }
    }

    /// Handles an event as a runtime does.
    fn on(&self, addr: ProcAddr, event: Event) -> Option<Ended> {
        let ended = Arc::new(self.agent.on_proc(addr, event)?);
        if let Some(link) = self.around.switch.close_route(addr, &ended) {
            link.close(&self.reactor);
        }
        let death = self.agent.bury(addr);
        self.around.forget_output(addr);
        self.agent.carry_out(&self.around, addr, &ended, death.aftermath);
        Some((*ended).clone())
    }

    fn hello(&self, addr: ProcAddr) {
        self.agent.on_hello(&self.around, &Hello { pid: 40 + addr.rank }.frame(addr, ME).header);
    }

    /// What the agent has said since the last call.
    fn said(&self) -> Vec<Said> {
        self.around.frames.take().iter().map(said).collect()
    }

    /// The reason that the agent gave for each end.
    fn reasons(&self) -> Vec<EndReason> {
        self.around.frames.take().iter().map(|frame| Down::read(frame).unwrap().ended.reason).collect()
    }

    fn assert_empty(&self) {
        assert!(self.agent.has_forgotten_all(), "{:?}", self.agent);
        assert_eq!((self.agent.len(), self.around.outputs.borrow().len(), self.around.switch.links().len()), (0, 0, 0));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.agent.close(Duration::ZERO);
    }
}

const DIED: Event = Event::Exited(Exit::Signal(11));

/// LIF-1.
#[test]
fn a_proc_comes_up_once_and_ends_once() {
    let world = World::new();
    let server = world.server();
    world.spawn(MESH, 2, SPAWNER);
    assert_eq!(server.orders(), [(1, 0), (1, 1)]);
    assert_eq!(world.said(), [Said::Watch(SPAWNER.0)], "its owner's end is to be told, once");
    for rank in [0, 1] {
        server.report(FORKED, proc(MESH, rank), (40 + rank, 0), "");
    }
    world.read(FORK_SERVER_TOKENS);
    assert_eq!(world.agent.pid_of(proc(MESH, 1)), Some(41));
    world.hello(proc(MESH, 0));
    world.hello(proc(MESH, 0));
    assert_eq!(world.said(), [Said::Up(proc(MESH, 0), SPAWNER.0)]);
    assert_eq!(*world.around.ups.borrow(), ["t"]);
    world.agent.on_goodbye(&Goodbye { reason: EndReason::Unstated }.frame(proc(MESH, 0), ME));
    server.report(EXITED, proc(MESH, 0), (0, 0), "");
    server.report(EXITED, proc(MESH, 0), (0, 0), "");
    world.read(FORK_SERVER_TOKENS);
    let Down { ended, .. } = Down::read(&world.around.frames.borrow()[0]).unwrap();
    assert!(ended.orderly && ended.pid == Some(40));
    assert_eq!(world.said(), [Said::Down(proc(MESH, 0), SPAWNER.0)]);
    // The other one never comes up.
    server.report(EXITED, proc(MESH, 1), (0, -9), "");
    world.read(FORK_SERVER_TOKENS);
    assert_eq!(world.said(), [Said::Down(proc(MESH, 1), SPAWNER.0)]);
    world.hello(proc(MESH, 1));
    assert_eq!(world.said(), []);
    world.assert_empty();
}

#[test]
fn the_process_of_a_proc_that_is_up_is_known() {
    let world = World::new();
    let server = world.server();
    world.spawn(MESH, 1, SPAWNER);
    // The fork server's report is on its way still: it comes by another socket.
    world.hello(proc(MESH, 0));
    assert_eq!(world.agent.pid_of(proc(MESH, 0)), Some(40));
    server.report(FORKED, proc(MESH, 0), (40, 0), "");
    world.read(FORK_SERVER_TOKENS);
    assert_eq!(world.agent.pid_of(proc(MESH, 0)), Some(40));
}

#[test]
fn a_spawn_that_fails_half_way_leaves_nothing() {
    let world = World::new();
    world.around.no_pipe_for.set(Some(2));
    let error = world.agent.spawn(&world.around, MESH, 0..4, &World::spec("here"), SPAWNER).unwrap_err();
    assert!(error.to_string().contains("pipe"), "{error}");
    world.assert_empty();
    assert_eq!(world.said(), []);
}

#[test]
fn orders_for_procs_that_cannot_be_made_are_answered_for_each() {
    let world = World::new();
    let order = |spec: &SpawnSpec| spec.order(MESH, 2, SPAWNER.1).frame(SPAWNER.0, &Target::One(ME));
    let here = order(&World::spec("here"));
    let leaving = Some(Arc::new(Ended::unmade(EndReason::Shutdown)));
    let (mesh, why) = world.agent.on_spawn_procs(&world.around, &here, leaving).unwrap_err();
    assert_eq!((mesh, &why.reason), (MESH, &EndReason::Shutdown));
    assert_eq!(world.reasons(), [EndReason::Shutdown, EndReason::Shutdown]);
    world.around.no_pipe_for.set(Some(1));
    world.agent.on_spawn_procs(&world.around, &here, None).unwrap_err();
    assert_eq!(world.said(), [0, 1].map(|rank| Said::Down(proc(MESH, rank), SPAWNER.0)));
    world.assert_empty();
    // The program does not exist, which the I/O thread finds out.
    world.around.no_pipe_for.set(None);
    world.agent.on_spawn_procs(&world.around, &order(&World::spec("/nonexistent/program")), None).unwrap();
    world.around.frames.take();
    world.turn();
    let reasons = world.reasons();
    assert!(matches!(reasons.as_slice(), [EndReason::NotMade(_), EndReason::NotMade(_)]), "{reasons:?}");
    world.assert_empty();
}

#[test]
fn orders_that_nobody_gives_make_nothing() {
    let order = World::spec("here").order(MESH, 2, SPAWNER.1).frame(SPAWNER.0, &Target::One(ME));
    let worker = World::of(proc(9, 0));
    worker.agent.on_spawn_procs(&worker.around, &order, None).unwrap();
    worker.assert_empty();
    let world = World::new();
    let server = world.server();
    for _ in 0..2 {
        world.agent.on_spawn_procs(&world.around, &order, None).unwrap();
        world.turn();
    }
    assert_eq!((server.orders().len(), world.agent.len()), (2, 2), "the same mesh is made once");
    world.around.frames.take();
    let torn = Frame::build_plain(order.header, None, b"", b"\xff\xff\xff");
    world.agent.on_spawn_procs(&world.around, &torn, None).unwrap();
    world.agent.on_goodbye(&Frame::build_plain(Header::new(Kind::Goodbye, proc(8, 1), ME), None, b"", b"\xff"));
    world.hello(proc(8, 1));
    assert!(world.on(proc(8, 1), DIED).is_none());
    assert_eq!((world.said(), world.agent.len()), (vec![], 2));
}

#[test]
fn what_the_dead_owned_is_stopped_before_anybody_is_told() {
    let world = World::new();
    let _server = world.server();
    world.spawn(MESH, 2, SPAWNER);
    world.spawn(8, 1, (proc(MESH, 0), 1));
    // An actor of rank 0 on rank 1, and a watcher.
    let spawn = Spawn { actor: 50, call: 0, place: 0, part: SpawnPart::Whole };
    world.agent.overhear(&world.around, &spawn.header(proc(MESH, 0), proc(MESH, 1)));
    world.agent.on_watch(&world.around, &Watch::of(proc(MESH, 0)).frame(proc(8, 0), ME).header);
    world.around.frames.take();
    world.on(proc(MESH, 0), DIED);
    let told = world.said();
    // FAM-4.
    assert_eq!(told[..2], [Said::StopActor(proc(MESH, 1)), Said::Stop(proc(8, 0))]);
    assert_eq!(told[2..], [SPAWNER.0, proc(8, 0)].map(|to| Said::Down(proc(MESH, 0), to)));
    // Its owner is dead: what it spawned must not live.
    world.spawn(10, 2, (proc(MESH, 0), 2));
    assert_eq!(world.said(), [Said::Stop(proc(10, 0)), Said::Stop(proc(10, 1))]);
    assert!(world.on(proc(10, 1), Event::Exited(Exit::Code(0))).is_some_and(|ended| ended.orderly));
}

#[test]
fn owners_on_other_hosts_take_their_procs_with_them() {
    let world = World::new();
    let _server = world.server();
    let other = ProcAddr { mesh: 6, rank: 4, host: 2 };
    world.spawn(MESH, 1, SPAWNER);
    world.spawn(8, 1, (other, 1));
    assert_eq!(world.said(), [Said::Watch(SPAWNER.0), Said::Watch(other)]);
    // Only the agent itself knows when its procs end.
    world.agent.owner_died(&world.around, proc(MESH, 0));
    world.agent.owner_died(&world.around, ProcAddr { rank: 1, ..SPAWNER.0 });
    assert_eq!(world.said(), []);
    world.agent.owner_died(&world.around, SPAWNER.0);
    assert_eq!(world.said(), [Said::Stop(proc(MESH, 0))]);
    world.agent.host_died(&world.around, 2);
    assert_eq!(world.said(), [Said::Stop(proc(8, 0))]);
    assert_eq!(world.on(proc(MESH, 0), DIED).unwrap().exit, Exit::Signal(11));
    assert_eq!(world.said(), [], "the dead are not told");
}

#[test]
fn whoever_watches_is_told_once_and_at_once_of_what_has_ended() {
    let world = World::new();
    let _server = world.server();
    world.spawn(MESH, 3, (ME, 1));
    let (watcher, far) = (proc(MESH, 2), ProcAddr { mesh: 6, rank: 0, host: 1 });
    let watch = |from: ProcAddr, whom: ProcAddr| {
        world.agent.on_watch(&world.around, &Watch::of(whom).frame(from, ME).header);
    };
    watch(far, proc(MESH, 0));
    watch(far, proc(MESH, 0));
    // The agent itself is told without a message.
    watch(ME, proc(MESH, 0));
    // This one listens for the end of every proc on this host.
    watch(watcher, ME);
    assert_eq!(world.said(), []);
    world.on(proc(MESH, 0), DIED);
    assert_eq!(world.said(), [Said::Down(proc(MESH, 0), far), Said::Down(proc(MESH, 0), watcher)]);
    assert!(world.on(proc(MESH, 0), DIED).is_none());
    watch(far, proc(MESH, 0));
    watch(far, proc(77, 0));
    assert_eq!(world.said(), [Said::Down(proc(MESH, 0), far), Said::Down(proc(77, 0), far)]);
    world.on(proc(MESH, 1), DIED);
    world.on(proc(MESH, 2), DIED);
    assert_eq!(world.said().len(), 3, "two are told of the first, one of the second: it listened itself");
    world.assert_empty();
}

#[test]
fn a_stop_is_answered_for_those_that_have_ended_and_ends_with_a_kill() {
    let world = World::new();
    let server = world.server();
    world.spawn(MESH, 2, SPAWNER);
    world.on(proc(MESH, 0), DIED);
    server.orders();
    world.around.frames.take();
    let order = |mesh| StopProcs { mesh, call: 5, first: 0, per_host: 2, within: Duration::ZERO, ranks: procs(2) };
    let stop = |mesh| {
        let order = order(mesh);
        let frame = order.frame(SPAWNER.0, &Target::One(ME));
        world.agent.on_stop_procs(&world.around, &order, &frame);
    };
    stop(MESH);
    assert_eq!(world.said(), [Said::Gone(proc(MESH, 0), SPAWNER.0), Said::Stop(proc(MESH, 1))]);
    // An unknown mesh.
    stop(77);
    assert_eq!(world.said(), [0, 1].map(|rank| Said::Gone(proc(77, rank), SPAWNER.0)));
    world.turn();
    assert_eq!(server.orders(), [(2, 1)], "it has not stopped in time");
    server.report(EXITED, proc(MESH, 1), (0, -9), "");
    world.read(FORK_SERVER_TOKENS);
    let Down { ended, .. } = Down::read(&world.around.frames.borrow()[0]).unwrap();
    assert!(ended.orderly, "it was asked to");
    assert_eq!(world.said(), [Said::Down(proc(MESH, 1), SPAWNER.0)]);
    world.assert_empty();
}

#[test]
fn procs_end_with_their_fork_server_and_the_next_spawn_starts_another() {
    let world = World::new();
    let server = world.server();
    world.spawn(MESH, 2, SPAWNER);
    server.report(FORKED, proc(MESH, 0), (40, 0), "");
    // Reports that nobody sends, or that are not about these procs.
    send(&server.socket, b"\x0bshort", SendFlags::NOSIGNAL).unwrap();
    server.report(200, proc(MESH, 0), (1, 1), "");
    server.report(EXITED, proc(MESH, 9), (1, 1), "");
    server.report(FAILED, proc(MESH, 1), (0, 0), "no more");
    world.around.frames.take();
    world.read(FORK_SERVER_TOKENS);
    assert_eq!(world.reasons(), [EndReason::NotMade("no more".to_owned())]);
    server.end();
    world.read(FORK_SERVER_TOKENS);
    let reasons = world.reasons();
    assert!(matches!(reasons.as_slice(), [EndReason::ForkServerEnded(_)]), "{reasons:?}");
    world.read(FORK_SERVER_TOKENS);
    assert_eq!(world.said(), []);
    let next = world.server();
    world.spawn(8, 1, SPAWNER);
    assert_eq!(next.orders(), [(1, 0)]);
    // A fork server that can make no procs says why, and ends.
    world.around.frames.take();
    next.report(REFUSED, proc(0, 0), (0, 0), "no interpreter");
    next.end();
    world.read(FORK_SERVER_TOKENS + 1);
    assert_eq!(world.reasons(), [EndReason::NotMade("no interpreter".to_owned())]);
    world.assert_empty();
}

#[test]
fn a_spawn_waits_until_its_fork_server_is_started() {
    let world = World::new();
    let server = world.server();
    for mesh in [MESH, 8] {
        world.agent.spawn(&world.around, mesh, 0..1, &World::spec("here"), SPAWNER).unwrap();
    }
    assert_eq!(server.orders(), []);
    world.turn();
    assert_eq!(server.orders(), [(1, 0), (1, 0)]);
    // A close ends it, and keeps others from starting later.
    world.agent.spawn(&world.around, 9, 0..1, &World::spec("there"), SPAWNER).unwrap();
    world.agent.close(Duration::ZERO);
    let mut byte = [0; 1];
    assert_eq!(recv(&server.socket, &mut byte, RecvFlags::empty()).unwrap().0, 0, "its socket is closed");
    world.around.frames.take();
    world.turn();
    assert_eq!(world.said(), []);
}

#[test]
fn what_waited_for_new_procs_tells_who_watches_them() {
    let world = World::new();
    let _server = world.server();
    let far = ProcAddr { mesh: 6, rank: 0, host: 1 };
    let early = Spawn { actor: 50, call: 0, place: 0, part: SpawnPart::Whole }.header(far, proc(MESH, 0));
    let stray = Frame::build_plain(early, None, b"", b"");
    *world.around.early.borrow_mut() = (vec![early], vec![stray]);
    world.spawn(MESH, 1, (ME, 1));
    assert_eq!((world.said(), world.around.refused.get()), (vec![Said::Watch(far)], 1));
    world.agent.owner_died(&world.around, far);
    assert_eq!(world.said(), [Said::StopActor(proc(MESH, 0))]);
}

/// GST-2, FAM-5.
#[test]
fn guests_come_without_a_fork_server_and_leave_what_they_own() {
    let world = World::of(ProcAddr::CONTROLLER);
    let _server = world.server();
    let guest = ProcAddr { mesh: GUEST_MESHES, rank: 0, host: 0 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, _theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let seat = world.agent.admit(&world.around, guest, ours, 321).unwrap();
    assert_eq!((seat, world.agent.pid_of(guest)), (1, Some(321)));
    world.hello(guest);
    assert_eq!(world.said(), [], "nobody has spawned it");
    let owned = |rank| ProcAddr { mesh: MESH, rank, host: 0 };
    world.spawn(MESH, 1, (guest, 1));
    world.hello(owned(0));
    assert_eq!(world.said(), [Said::Up(owned(0), guest)]);
    world.on(guest, Event::Goodbye(EndReason::Unstated));
    world.on(guest, Event::Exited(Exit::Unknown));
    assert_eq!((world.said(), world.agent.len()), (vec![], 1));
    world.on(owned(0), DIED);
    world.assert_empty();
}

#[test]
fn a_proc_that_never_says_hello_is_killed_and_told_of() {
    let world = World::new();
    let server = world.server();
    let spec = SpawnSpec { within: Duration::ZERO, ..World::spec("here") };
    world.agent.spawn(&world.around, MESH, 0..1, &spec, SPAWNER).unwrap();
    world.around.frames.take();
    world.turn();
    assert_eq!(server.orders(), [(1, 0), (2, 0)]);
    assert_eq!(world.reasons(), [EndReason::Late(Duration::ZERO, String::new())]);
    world.assert_empty();
}

#[test]
fn what_a_fork_server_imports_is_known_and_named_to_those_who_wait() {
    let world = World::new();
    let server = world.server();
    let spec = SpawnSpec { within: Duration::from_millis(300), ..World::spec("here") };
    world.agent.spawn(&world.around, MESH, 0..1, &spec, SPAWNER).unwrap();
    world.turn();
    world.around.frames.take();
    let imports = || {
        let view = world.agent.fork_servers().remove(0);
        (view.workers, view.importing, view.imported)
    };
    assert_eq!(imports(), (1, String::new(), String::new()));
    server.report(15, proc(0, 0), (0, 0), "torch");
    world.read(FORK_SERVER_TOKENS);
    assert_eq!(imports(), (1, "torch".to_owned(), String::new()));
    // The process that stands for it is idle, unlike one that imports.
    let told = loop {
        world.turn();
        if let Some(told) = world.reasons().pop() {
            break told;
        }
    };
    assert!(matches!(told, EndReason::Late(_, module) if module == "torch"));
    server.report(16, proc(0, 0), (0, 0), "numpy,torch");
    world.read(FORK_SERVER_TOKENS);
    assert_eq!(imports(), (0, String::new(), "numpy,torch".to_owned()));
    world.assert_empty();
}

#[test]
fn what_is_on_a_host_can_be_asked() {
    let world = World::new();
    let _server = world.server();
    world.spawn(MESH, 2, (ME, 1));
    world.spawn(8, 1, (proc(MESH, 0), 1));
    assert_eq!(world.agent.own_meshes(), [MESH]);
    assert_eq!(world.agent.meshes(), [MESH, 8].into());
    let (mut procs, titles) = world.agent.overview();
    procs.sort_unstable_by_key(|one| one.0);
    assert_eq!(
        procs.iter().map(|one| (one.0, one.3)).collect::<Vec<_>>(),
        [(proc(MESH, 0), ME), (proc(MESH, 1), ME), (proc(8, 0), proc(MESH, 0))]
    );
    assert_eq!(titles.len(), 2);
    assert!(world.agent.next_turn().is_some(), "they are to say hello");
    for addr in [proc(MESH, 0), proc(MESH, 1), proc(8, 0)] {
        world.hello(addr);
    }
    assert!(world.agent.next_turn().is_none());
}
