//! What an inbox does with tasks (TAK-1, TAK-2).

use crate::gauge::Gauge;
use crate::inbox::{Inbox, Put};
use crate::message::Message;
use crate::reactor::Reactor;
use mesh_proto::messages::Request;
use mesh_proto::{Frame, ProcAddr};

const ME: ProcAddr = ProcAddr { mesh: 3, rank: 1, host: 0 };
const CALLER: ProcAddr = ProcAddr { mesh: 3, rank: 2, host: 0 };
const OTHER: ProcAddr = ProcAddr { mesh: 3, rank: 4, host: 0 };

fn message(request: Request, call: u64, from: ProcAddr) -> Message {
    Message::plain(Frame::build_plain(request.header(5, call, 0, from, ME), None, b"run", b""))
}

fn calls(messages: &[Message]) -> Vec<u64> {
    messages.iter().map(|message| message.meaning().call()).collect()
}

fn inbox(reactor: &Reactor, messages: Vec<Message>) -> Inbox {
    let inbox = Inbox::new(5, Gauge::new(None));
    for message in messages {
        assert_eq!(inbox.put(reactor, message, false), Put::Done);
    }
    inbox
}

#[test]
fn a_task_is_taken_when_its_actor_comes_to_it() {
    let reactor = Reactor::new().unwrap();
    let plain = |call| message(Request::CALL, call, CALLER);
    let task = |call| message(Request::TASK, call, CALLER);
    let inbox = inbox(&reactor, vec![plain(1), plain(2), task(3), plain(4), task(5), task(6)]);
    let bursts: Vec<_> = std::iter::from_fn(|| Some(inbox.take(256)).filter(|burst| !burst.is_empty())).collect();
    let bursts: Vec<_> = bursts.iter().map(|burst| calls(burst)).collect();
    assert_eq!(bursts, [vec![1, 2], vec![3, 4], vec![5], vec![6]]);
}

#[test]
fn a_task_can_be_taken_back_until_then() {
    let reactor = Reactor::new().unwrap();
    let mine = [Request::TASK, Request::TASK_AHEAD, Request::CALL].into_iter().zip(1..);
    let inbox = inbox(&reactor, mine.map(|(request, call)| message(request, call, CALLER)).collect());
    assert_eq!(calls(&inbox.take(256)), [1]);
    assert!(inbox.take_back(&reactor, CALLER, 1).is_none(), "it has begun");
    assert!(inbox.take_back(&reactor, OTHER, 2).is_none(), "it is another's");
    assert!(inbox.take_back(&reactor, CALLER, 3).is_none(), "it is no task");
    assert_eq!(inbox.take_back(&reactor, CALLER, 2).map(|message| message.meaning().call()), Some(2));
    assert!(inbox.take_back(&reactor, CALLER, 2).is_none());
    assert_eq!((inbox.len(), calls(&inbox.take(256))), (1, vec![3]));
}

#[test]
fn what_was_sent_ahead_waits_for_its_caller_to_have_the_reply_before() {
    let reactor = Reactor::new().unwrap();
    let ahead = |call, from| message(Request::TASK_AHEAD, call, from);
    let inbox = inbox(&reactor, vec![message(Request::TASK, 1, CALLER), ahead(2, CALLER), ahead(3, OTHER)]);
    assert_eq!(calls(&inbox.take(1)), [1]);
    assert_eq!(calls(&inbox.hold_up(&reactor, CALLER)), [2]);
    assert_eq!(inbox.put(&reactor, ahead(4, CALLER), false), Put::NotAhead);
    assert_eq!(inbox.put(&reactor, ahead(5, OTHER), false), Put::Done);
    // It has the reply, so it sends one that is not ahead.
    assert_eq!(inbox.put(&reactor, message(Request::TASK, 6, CALLER), false), Put::Done);
    assert_eq!(inbox.put(&reactor, ahead(7, CALLER), false), Put::Done);
    assert!(inbox.close(&reactor).len() == 4);
    assert_eq!(inbox.put(&reactor, ahead(8, CALLER), false), Put::Closed);
}
