//! An executor's progress with a message, as the inbox and the gauge see it.

use super::options;
use crate::handling::Handling;
use crate::inbox::{Inbox, Side};
use crate::{Body, Outgoing, Runtime};
use mesh_proto::messages::Request;
use mesh_proto::{ProcAddr, Target};
use std::sync::Arc;
use std::time::Duration;

const ACTOR: u64 = 5;

fn send(runtime: &Runtime, request: Request) {
    let target = Target::One(ProcAddr::CONTROLLER);
    runtime.tell(&Outgoing { request, target: &target, actor: ACTOR, name: b"echo", body: Body::default() }).unwrap();
}

/// The numbers of messages that wait, run, were handled, and failed.
fn figures(inbox: &Inbox) -> (usize, usize, u64, u64) {
    let reading = inbox.gauge.read();
    (inbox.flow().0, reading.running.len(), reading.handled, reading.failed)
}

#[test]
fn a_message_waits_until_it_is_begun_and_ends_once() {
    let runtime = Runtime::controller(options()).unwrap();
    send(&runtime, Request::Spawn);
    let inbox = runtime.inbox(ACTOR).unwrap();
    for _ in 0..3 {
        send(&runtime, Request::CALL);
    }
    let messages = inbox.lend(runtime.reactor(), 3, Side::Thread);
    let all: Vec<Handling> = messages.iter().map(|message| Handling::new(&inbox, message)).collect();
    assert_eq!(figures(&inbox), (3, 0, 0, 0));
    all[0].begin(&messages[0]);
    all[0].begin(&messages[0]);
    assert_eq!(figures(&inbox), (2, 1, 0, 0));
    all[0].end(&messages[0], true);
    all[0].end(&messages[0], false);
    all[0].begin(&messages[0]);
    assert_eq!(figures(&inbox), (2, 0, 1, 1));
    // A message refused before it runs no longer waits, and was not handled.
    all[1].end(&messages[1], false);
    assert_eq!(figures(&inbox), (1, 0, 1, 1));
    all[2].begin(&messages[2]);
    all[2].end(&messages[2], false);
    assert_eq!(figures(&inbox), (0, 0, 2, 1));
    drop(messages);
    runtime.close_inbox(&inbox);
    runtime.close(Duration::ZERO);
}

#[test]
fn a_stop_does_not_count() {
    let runtime = Runtime::controller(options()).unwrap();
    send(&runtime, Request::Spawn);
    let inbox: Arc<Inbox> = runtime.inbox(ACTOR).unwrap();
    send(&runtime, Request::StopActor);
    let messages = inbox.lend(runtime.reactor(), 1, Side::Thread);
    let handling = Handling::new(&inbox, &messages[0]);
    handling.begin(&messages[0]);
    handling.end(&messages[0], false);
    assert_eq!(figures(&inbox), (0, 0, 0, 0));
    drop(messages);
    runtime.close_inbox(&inbox);
    runtime.close(Duration::ZERO);
}
