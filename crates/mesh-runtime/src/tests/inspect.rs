//! A process answers questions about itself even if nobody works through its inboxes.

use super::outbox::Outbox;
use super::{options, soon};
use crate::call::Outcome;
use crate::inbox::Side;
use crate::inspect::Inspector;
use crate::link::Link;
use crate::reactor::Reactor;
use crate::{Body, Gauge, Outgoing, Runtime, Waited};
use mesh_proto::control::Inspect;
use mesh_proto::messages::Request;
use mesh_proto::{Decoder, EndReason, Ended, Exit, Frame, Kind, ProcAddr, Target};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::Arc;
use std::time::Duration;

const ACTOR: u64 = 5;

fn out<'a>(request: Request, target: &'a Target, name: &'a [u8]) -> Outgoing<'a> {
    Outgoing { request, target, actor: ACTOR, name, body: Body::default() }
}

fn ask(runtime: &Runtime, question: &[u8]) -> Result<String, Vec<u8>> {
    let here = Target::One(ProcAddr::CONTROLLER);
    let (call, _) = runtime.call(&out(Request::Inspect, &here, question), false).unwrap();
    assert_eq!(runtime.wait_call(&call, None, soon(), false, false), Waited::Ready, "no answer");
    let outcomes = call.take_outcomes().unwrap();
    let [Outcome::Replied(message)] = outcomes.as_slice() else { panic!("{outcomes:?}") };
    if message.header().kind == Kind::Undeliverable {
        return Err(message.name().to_vec());
    }
    Ok(String::from_utf8(message.open().unwrap().0.to_vec()).unwrap())
}

fn with_actor() -> (Arc<Runtime>, Arc<crate::Inbox>) {
    let runtime = Runtime::controller(options()).unwrap();
    let here = Target::One(ProcAddr::CONTROLLER);
    runtime.tell(&out(Request::Spawn, &here, b"tra\"iners\0gpus=2")).unwrap();
    let inbox = runtime.inbox(ACTOR).unwrap();
    (runtime, inbox)
}

fn close(runtime: &Runtime) {
    let inbox = runtime.inbox(ACTOR).unwrap();
    runtime.close_inbox(&inbox);
}

/// GAU-1: questions are answered in the middle of a message.
#[test]
fn what_waits_and_what_runs_is_told() {
    let (runtime, inbox) = with_actor();
    let here = Target::One(ProcAddr::CONTROLLER);
    for _ in 0..3 {
        runtime.tell(&out(Request::CALL, &here, b"step\0gpus=2\0trace")).unwrap();
    }
    let taken = inbox.take(1);
    let serial = inbox.gauge.begin(taken[0].name_bytes(), taken[0].header().src);
    inbox.gauge.describe("Trainer");
    inbox.gauge.worked_by(99);
    let told = ask(&runtime, b"state").unwrap();
    for part in [
        r#""title":"tra\"iners\u0000gpus=2""#,
        r#""class":"Trainer""#,
        r#""thread":99,"up":false"#,
        r#""queue":2"#,
        r#""received":3"#,
        r#""running":[["step","#,
    ] {
        assert!(told.contains(part), "no {part} in {told}");
    }
    inbox.gauge.end(serial, true);
    assert!(ask(&runtime, b"state").unwrap().contains(r#""handled":1,"failed":1"#));
    runtime.close(Duration::ZERO);
}

#[test]
fn what_an_executor_has_taken_and_not_begun_waits_still() {
    let (runtime, inbox) = with_actor();
    let here = Target::One(ProcAddr::CONTROLLER);
    for _ in 0..3 {
        runtime.tell(&out(Request::CALL, &here, b"step")).unwrap();
    }
    let told = |part: &str| {
        let state = ask(&runtime, b"state").unwrap();
        assert!(state.contains(part), "no {part} in {state}");
    };
    let taken = inbox.lend(runtime.reactor(), 256, Side::Thread);
    assert_eq!((taken.len(), inbox.len()), (3, 0));
    told(r#""queue":3,"queue_bytes""#);
    inbox.begun(&taken[0]);
    runtime.tell(&out(Request::CALL, &here, b"step")).unwrap();
    told(r#""queue":3,"#);
    taken[1..].iter().for_each(|message| inbox.begun(message));
    told(r#""queue":1,"#);
    // Nobody will begin what is taken in any other way.
    inbox.take(9);
    told(r#""queue":0,"queue_bytes":0,"#);
    runtime.close(Duration::ZERO);
}

#[test]
fn an_unknown_question_is_refused_not_left_open() {
    let (runtime, _) = with_actor();
    assert!(ask(&runtime, b"nonsense").is_err());
    assert!(ask(&runtime, b"").is_err());
    assert!(ask(&runtime, b"dump").unwrap().contains(r#""error":"this process has not set up"#));
    runtime.close(Duration::ZERO);
}

#[test]
fn actors_tell_of_themselves_only_while_somebody_watches() {
    let (runtime, _) = with_actor();
    let here = Target::One(ProcAddr::CONTROLLER);
    close(&runtime);
    assert_eq!(runtime.journal().next(), 0);
    runtime.watch(true);
    runtime.watch(true);
    runtime.watch(false);
    runtime.tell(&out(Request::Spawn, &here, b"again")).unwrap();
    close(&runtime);
    let got = runtime.journal().read(0, 10);
    assert_eq!(got.entries.len(), 1);
    assert!(got.entries[0].contains(r#""kind":"actor_stopped""#), "{:?}", got.entries);
    runtime.watch(false);
    runtime.tell(&out(Request::Spawn, &here, b"thrice")).unwrap();
    close(&runtime);
    assert_eq!(runtime.journal().next(), 1);
    assert_eq!(runtime.wait_events(0, soon(), false, false), Waited::Ready);
    runtime.close(Duration::ZERO);
    assert_eq!(runtime.wait_events(1, None, false, false), Waited::Ready, "the end is an answer");
}

#[test]
fn a_meter_of_many_threads_loses_nothing() {
    let gauge = Gauge::new(None);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for n in 0..1000 {
                    let serial = gauge.begin(bytes::Bytes::from_static(b"step"), ProcAddr::CONTROLLER);
                    gauge.end(serial, n % 2 == 0);
                }
            });
        }
    });
    let reading = gauge.read();
    assert_eq!((reading.handled, reading.failed, reading.running.len()), (4000, 2000, 0));
}

// The inspector alone.

/// An event as it travels to the controller, and whether it is a failure.
fn text(frame: &Frame) -> (String, bool) {
    match Inspect::read(frame) {
        Some(Inspect::Event { text, failure }) => (String::from_utf8(text.to_vec()).unwrap(), failure),
        other => panic!("{other:?} where an event was due"),
    }
}

#[test]
fn events_of_a_host_go_to_the_controller_and_its_own_into_the_journal() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let (agent, outbox) = (ProcAddr::agent(2), Outbox::default());
    let inspector = Inspector::new(agent, &reactor);
    let who = ProcAddr { mesh: 3, rank: 1, host: 2 };
    let died = Ended { pid: Some(12), exit: Exit::Signal(9), ..Ended::unmade(EndReason::LongAgo) };
    inspector.note_end(who, &died, "trainers", &outbox);
    inspector.note_end(who, &Ended { orderly: true, exit: Exit::Code(0), ..died }, "trainers", &outbox);
    let said = outbox.take();
    assert!(said.iter().all(|frame| frame.header.dst == ProcAddr::CONTROLLER && frame.header.src == agent));
    let [(died, true), (stopped, false)] = &said.iter().map(text).collect::<Vec<_>>()[..] else { panic!("{said:?}") };
    assert!(died.contains(r#""kind":"proc_died","proc":[3,1,2],"title":"trainers""#), "{died}");
    assert!(died.ends_with(r#","pid":12,"signal":9}"#), "{died}");
    assert!(stopped.contains(r#""kind":"proc_stopped""#) && stopped.ends_with(r#","exitcode":0}"#), "{stopped}");
    let inspector = Inspector::new(ProcAddr::CONTROLLER, &reactor);
    inspector.note_text(died.clone(), true, &outbox);
    assert!(outbox.take().is_empty());
    assert_eq!(&*inspector.journal.read(0, 9).entries[0], died);
    assert_eq!(inspector.journal.failures().len(), 1);
}

#[test]
fn processes_that_begin_hear_first_that_somebody_follows() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let (inspector, outbox) = (Inspector::new(ProcAddr::agent(2), &reactor), Outbox::default());
    let who = ProcAddr { mesh: 3, rank: 0, host: 2 };
    for (follow, told) in [(false, 0), (true, 1), (false, 0)] {
        inspector.on_watch(follow);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let links = [Arc::new(Link::new(1, who, ours))];
        inspector.note_spawn((3, "trainers"), ProcAddr::CONTROLLER, &links, &outbox);
        let (event, failure) = text(&outbox.take()[0]);
        assert!(event.contains(r#""kind":"procs_spawned""#) && event.contains(r#""count":1"#) && !failure, "{event}");
        let (mut bytes, mut decoder) = ([0; 4096], Decoder::default());
        let length = rustix::io::read(&theirs, &mut bytes).unwrap_or(0);
        decoder.push(&bytes[..length]);
        let came = std::iter::from_fn(|| decoder.next_frame().unwrap());
        assert_eq!(came.filter(|frame| matches!(Inspect::read(frame), Some(Inspect::Watch(true)))).count(), told);
    }
}

#[test]
fn the_tree_of_a_host_is_json() {
    let who = ProcAddr { mesh: 3, rank: 1, host: 2 };
    let journal = crate::journal::Journal::default();
    journal.push(&Reactor::new().unwrap(), r#"{"a":"b"}"#.into(), true);
    let procs = vec![(who, mesh_proto::Stage::Running, None, ProcAddr::CONTROLLER)];
    let fork_servers = vec![crate::inspect::ForkServerView {
        pid: 5,
        workers: 1,
        importing: String::new(),
        imported: "numpy,torch".to_owned(),
    }];
    let told = crate::inspect::tree(procs, fork_servers, |_| 7, None, vec![(3, "a \"title\"".into())], &journal);
    let running = crate::usage::stage_name(mesh_proto::Stage::Running);
    let procs = format!(r#"{{"procs":[[[3,1,2],"{running}",null,[0,0,0],7]],"#);
    assert_eq!(
        told,
        procs + r#""fork_servers":[[5,1,"","numpy,torch"]],"titles":[[3,"a \"title\""]],"failures":["{\"a\":\"b\"}"]}"#
    );
}
